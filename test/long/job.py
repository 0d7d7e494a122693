"""Helpers for the programs of the long table: small runs of train_gpt, as one process or as several ranks on this
machine, and a comparison of two runs."""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from environment import ROOT, free_port  # sets what every test relies on
from test_checkpoints import MODELS, PROGRAM, read, write_shard

PEER_SECONDS = 60  # within which the other ranks must end when one is killed
SECONDS = float(os.environ.get("JOB_SECONDS", "300"))  # of any run
BASE = os.path.join(ROOT, "test/golden/huggingface/llama")
LORA = ["--init-from", BASE, "--lora-rank", "3", "--lora-dropout", "0.1", "--seq-length", "16", "--micro-batch-size", "2",
        "--global-batch-size", "4", "--lr", "1e-2", "--threads", "1"]
MODELS = {**MODELS, "lora": LORA}


class Difference(Exception):
    """What a program of the table reports before it exits with status 1."""


def run_checks(checks):
    """Calls checks, a list of (name, function), and prints a line of each and the counts. Returns the exit status."""
    failed = 0
    for name, check in checks:
        try:
            check()
            print("ok " + name, flush=True)
        except Difference as difference:
            failed += 1
            print("failed: %s: %s" % (name, difference), flush=True)
    print("%d passed, %d failed" % (len(checks) - failed, failed))
    return 1 if failed else 0


class Folder:
    """Data of a small vocabulary, and the folders of runs that train on it."""
    def __init__(self):
        self.path = tempfile.mkdtemp(prefix="long-")
        for i in range(2):
            write_shard(self.path + "/t_train_%03d.bin" % i, i)
        write_shard(self.path + "/t_val_000.bin", 99)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.path, ignore_errors=True)

    def command(self, name, model, options):
        return [PROGRAM, *map(str, MODELS[model]), "--train-data", self.path + "/t_train_*.bin", "--val-data", self.path + "/t_val_*.bin",
                "--val-every", "0", "--val-steps", "2", "--out", self.out(name), *map(str, options)]

    def out(self, name):
        return self.path + "/" + name

    def start(self, name, ranks, model, options):
        """Starts the processes of one run; if there are several ranks, each has its place in the environment, as
        scripts/launch_two_hosts.sh sets it."""
        command, processes = self.command(name, model, options), []
        if ranks > 1:
            command += ["--rendezvous", "127.0.0.1:%d" % free_port(), "--micro-batch-size", "1", "--global-batch-size", str(2 * ranks),
                        "--bucket-mib", "0.01"]
        for rank in range(ranks):
            place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks} if ranks > 1 else {}
            with open("%s.%d.log" % (self.out(name), rank), "wb") as log:
                processes.append(subprocess.Popen(command, env={**os.environ, **{key: str(value) for key, value in place.items()}},
                                                  stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT))
        return processes

    def said(self, name, ranks):
        """Returns what all ranks printed."""
        return "\n".join(read("%s.%d.log" % (self.out(name), rank)).decode(errors="replace") for rank in range(ranks))

    def run(self, name, ranks, model, options, expect=0):
        """Runs to the end; returns what was printed."""
        statuses = wait(self.start(name, ranks, model, options), SECONDS)
        if statuses != [expect] * ranks:
            raise Difference("%s: status %s, not %d\n%s" % (name, statuses, expect, self.said(name, ranks)))
        return self.said(name, ranks)

    def steps(self, name):
        folder = self.out(name) + "/checkpoints"
        return sorted(int(f[5:]) for f in os.listdir(folder) if f.startswith("step_")) if os.path.isdir(folder) else []

    def checkpoint(self, name, step):
        return "%s/checkpoints/step_%08d" % (self.out(name), step)

    def log(self, name):
        """Returns, by step, what must be the same however often the run was stopped. The last line may be half
        written."""
        steps = {}
        with open(self.out(name) + "/log.jsonl", encoding="utf-8") as f:
            for line in f:
                entry = json.loads(line)
                kept = {k: entry[k] for k in ("tokens", "batch", "loss", "lr", "grad_norm", "val_loss") if k in entry}
                steps.setdefault(entry["step"], {}).update(kept)
        return steps

    def same_end(self, a, b, step):
        """Raises Difference unless two runs have the same losses and the same files at this step."""
        if self.log(a) != self.log(b):
            other = self.log(b)
            raise Difference("losses of %s and %s differ: %s" % (a, b, [(s, e, other.get(s)) for s, e in self.log(a).items() if e != other.get(s)][:3]))
        self.same_files(a, b, step)

    def same_files(self, a, b, step):
        folders = [self.checkpoint(name, step) for name in (a, b)]
        names = [sorted(f for f in os.listdir(folder) if f.endswith((".safetensors", ".index.json", "config.json"))) for folder in folders]
        if names[0] != names[1] or len(names[0]) < 2:
            raise Difference("files of %s and %s differ: %s" % (a, b, names))
        for name in names[0]:
            if read(folders[0] + "/" + name) != read(folders[1] + "/" + name):
                raise Difference("%s of %s and %s differs at step %d" % (name, a, b, step))


def wait(processes, seconds):
    """Returns the processes' statuses when all have ended. Kills those that have not ended by then, and raises
    Difference."""
    end = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            for other in processes:
                other.kill()
                other.wait()
            raise Difference("a process did not end within %d s: %s" % (seconds, process.args)) from None
    return [process.returncode for process in processes]
