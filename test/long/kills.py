#!/usr/bin/env python3
"""Kills runs that save every step, by SIGKILL at random moments, and compares what they come to with a run that was not
killed: losses and files, bit for bit.

  test/long/kills.py one|several [--kills N] [--seed N]

`one`: runs of one process. `several`: runs of 2 or 3 ranks, of which a random one or all are killed; the others must
end by themselves. A kind of run is begun, killed and resumed until it reaches its last step, and then compared. Kills
in rounds that were compared are counted in $ROW_FOLDER/kills_KIND.json, so that a row that was stopped goes on to N.
"""
import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import time

from job import PEER_SECONDS, Difference, Folder, wait

STEPS = 40
START_SECONDS = 3
EIGHT_BITS = ["--exp-avg-dtype", "8bit", "--exp-avg-sq-dtype", "8bit"]
ALONE = {
    "fp32": ("gpt2", ["--precision", "fp32"]),
    "fp32, in turn": ("gpt2", ["--precision", "fp32", "--no-checkpoint-async"]),
    "bf16": ("llama", ["--precision", "bf16"]),
    "bf16 parameters, 8 bits": ("llama", ["--precision", "bf16", "--main-params-dtype", "bf16", *EIGHT_BITS]),
    "in shards": ("llama", ["--precision", "fp32", "--checkpoint-dtype", "bf16", "--max-shard-gib", "3e-5"]),
    "muon with averages": ("llama", ["--precision", "bf16", "--optimizer", "muon", "--ema-decay", "0.9"]),
    "fp8 delayed": ("gpt2", ["--precision", "bf16", "--fp8-format", "hybrid", "--fp8-recipe", "delayed"]),
    "offload": ("llama", ["--precision", "bf16", "--optimizer-cpu-offload", "--offload-weights", "--checkpoint-async"]),
    "lora": ("lora", ["--precision", "fp32"]),
    "lora, in turn": ("lora", ["--precision", "bf16", "--no-checkpoint-async"]),
}
SEVERAL = {
    "stage 0": (2, "gpt2", ["--precision", "fp32", "--zero-stage", "0"]),
    "stage 1": (2, "llama", ["--precision", "bf16", "--zero-stage", "1"]),
    "stage 2": (3, "llama", ["--precision", "bf16", "--zero-stage", "2", *EIGHT_BITS]),
    "stage 3": (2, "gpt2", ["--precision", "bf16", "--zero-stage", "3"]),
    "stage 1, in turn": (2, "llama", ["--precision", "fp32", "--zero-stage", "1", "--no-checkpoint-async"]),
    "stage 2, offload": (2, "llama", ["--precision", "bf16", "--zero-stage", "2", "--optimizer-cpu-offload", "--checkpoint-async"]),
    "stage 3, offload": (3, "gpt2", ["--precision", "bf16", "--zero-stage", "3", "--offload-weights", "--optimizer-cpu-offload"]),
    "stage 1, lora": (2, "lora", ["--precision", "fp32", "--zero-stage", "1"]),
}


def options_of(options):
    return ["--train-steps", STEPS, "--checkpoint-every", "1", "--keep-checkpoints", "3", *options]


def kill_once(folder, name, ranks, model, options, delay, generator):
    """Starts or resumes the run, and kills it after `delay` seconds. Returns whether it was alive then."""
    # If a rank is killed before it has met the others, they wait for it for this time.
    alone = ["--collective-timeout", START_SECONDS] if ranks > 1 else []
    processes = folder.start(name, ranks, model, [*options, *alone, "--resume", "auto"])
    time.sleep(delay)
    victims = processes if generator.random() < 0.3 else [generator.choice(processes)]
    for process in victims:
        process.kill()
    try:
        statuses = wait(processes, PEER_SECONDS)
    except Difference as difference:
        raise Difference("%s: rank %s was killed after %.3f s: %s\n%s" % (name, [processes.index(v) for v in victims], delay, difference,
                                                                      folder.said(name, ranks))) from None
    said = folder.said(name, ranks)
    if re.search(r"^passed over: .*/step_\d+", said, re.M):  # partial folders are named .step_N.PID.partial
        raise Difference("%s: a kill left a damaged checkpoint\n%s" % (name, said))
    return -signal.SIGKILL in statuses


def one_round(folder, kind, ranks, model, options, generator, most):
    """Kills one run until it comes to its end, or `most` times, and compares. Returns the number of kills that found it
    alive."""
    options = options_of(options)
    seconds = folder.seconds.get(kind)
    if seconds is None:  # the run that is not killed
        begin = time.monotonic()
        folder.run("whole " + kind, ranks, model, options)
        seconds = folder.seconds[kind] = time.monotonic() - begin
    name, kills = "killed " + kind, 0
    while kills < most and folder.steps(name)[-1:] != [STEPS]:
        kills += kill_once(folder, name, ranks, model, options, generator.uniform(0.01, 0.2 * seconds + 0.05), generator)
    saves = folder.steps(name)[-1:] != [STEPS]
    folder.run(name, ranks, model, [*options, "--resume", "auto"])
    folder.same_end("whole " + kind, name, STEPS)
    left = [f for f in os.listdir(folder.out(name) + "/checkpoints") if saves and not f.startswith("step_")]
    if left:
        raise Difference("%s: left behind: %s" % (kind, left))
    shutil.rmtree(folder.out(name))
    return kills


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("one", "several"))
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--kinds", help="only those whose names match this regular expression")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    path = os.path.join(os.environ.get("ROW_FOLDER") or ".", "kills_%s.json" % options.kind)
    key = os.environ.get("ROW_KEY", "")
    counts = {}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            stored = json.load(file)
        counts = stored["counts"] if stored["key"] == key else {}
    kinds = {name: (1, *run) for name, run in ALONE.items()} if options.kind == "one" else SEVERAL
    kinds = {name: kinds[name] for name in kinds if re.search(options.kinds or "", name)}
    print("seed %d; kills that were compared before: %d" % (options.seed, sum(counts.values())), flush=True)
    generator = random.Random(options.seed)
    with Folder() as folder:
        folder.seconds = {}
        while sum(counts.values()) < options.kills:
            kind = min(kinds, key=lambda name: counts.get(name, 0))
            kills = one_round(folder, kind, *kinds[kind], generator, options.kills)
            counts[kind] = counts.get(kind, 0) + kills
            print("%-26s %4d kills\nfigure: kills_%s %d" % (kind, kills, options.kind, sum(counts.values())), flush=True)
            if os.environ.get("ROW_FOLDER"):
                with open(path, "w", encoding="utf-8") as file:
                    json.dump({"key": key, "counts": counts}, file)
    print("figure: kills_%s %d" % (options.kind, sum(counts.values())))


if __name__ == "__main__":
    try:
        main()
    except Difference as difference:
        print(difference)
        sys.exit(1)
