"""Several ranks compute what one computes, whatever the ZeRO stage, the launcher and the collectives; a job goes on
with another number of ranks; it ends, and says why, when a rank is lost. Needs only Python's standard library."""
import glob
import json
import os
import pty
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock

from environment import ROOT, built_with_mpi, chosen, free_port, long_test, skip_under_address_sanitizer
from run import processes_of_session

sys.path.insert(0, os.path.join(ROOT, "scripts"))
import count_launches  # noqa: E402 pylint: disable=wrong-import-position

PROGRAM = os.path.abspath(os.environ.get("TRAIN_GPT", os.path.join(ROOT, "build/train_gpt")))
CUDA_PROGRAM = os.environ.get("TRAIN_GPT_CUDA")
MPIRUN = shutil.which("mpirun")
T, VOCABULARY = 16, 97
MODEL = ["--num-layers", "3", "--hidden-size", "32", "--num-attention-heads", "2", "--vocab-size", VOCABULARY, "--seq-length", T,
         "--global-batch-size", "12", "--lr", "3e-3", "--threads", "1", "--val-every", "5", "--val-steps", "5",
         "--bucket-mib", "0.02", "--checkpoint-every", "0", "--precision", "fp32"]
DROPOUT = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
LLAMA = ["--num-layers", "5", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--activation", "swiglu",
         "--no-add-bias-linear", "--num-query-groups", "1", "--untie-embeddings-and-output-weights"]
MUON = ["--optimizer", "muon", "--ema-decay", "0.9"]
# Sums in another order change small singular values, and the iterations enlarge this by hundreds. Seen: 2e-7.
MUON_TOLERANCE = 1e-5
# Sums of gradients in another order differ by 2^-24 each, which 50 steps of AdamW let grow. Seen: 1e-8.
FP32_TOLERANCE = 1e-6
ENVIRONMENT = {**{name: value for name, value in os.environ.items() if name != "TRAIN_GPT_SECRET"},
               "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "EMU_DEVICES": "4"}
LIMIT = 120 # seconds, for any run


def write_shard(path, seed, samples):
    generator = random.Random(seed)
    tokens = [generator.randrange(VOCABULARY) * (i % 3) % VOCABULARY for i in range(samples * T + 1)]
    with open(path, "wb") as f:
        f.write(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253))
        f.write(struct.pack("<%dH" % len(tokens), *tokens))


HAS_MPI = built_with_mpi(PROGRAM)
needs_mpi = unittest.skipUnless(HAS_MPI, "no mpirun, or a build without MPI")


def here(command, folder):
    """Returns the command with the data of the folder that a rank is started in."""
    return [part.replace(folder + "/t_", "t_") for part in command]


class Job:
    """Ranks that are started one by one, by --rendezvous, so that a test can do something to one of them."""

    def __init__(self, command, ranks, different=None, folders=None, environments=None, programs=None):
        port = free_port()
        self.ranks = []
        for rank in range(ranks):
            environment = {**ENVIRONMENT, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank),
                           "LOCAL_WORLD_SIZE": str(ranks), **(environments or {}).get(rank, {})}
            mine = (different or {}).get(rank, [])
            program = (programs or {}).get(rank, command[0])
            self.ranks.append(subprocess.Popen([program, *command[1:], *mine, "--rendezvous", "127.0.0.1:%d" % port], env=environment, text=True,
                                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folders and folders[rank]))

    def end(self, seconds=LIMIT):
        """Returns exit statuses, and what all ranks said."""
        until = time.monotonic() + seconds
        outputs = []
        try:
            for rank in self.ranks:
                outputs.append("".join(rank.communicate(timeout=max(0.1, until - time.monotonic()))))
        finally:
            for rank in self.ranks:
                if rank.poll() is None:
                    rank.kill()
                    rank.communicate()
        return [rank.returncode for rank in self.ranks], outputs


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.path = cls.folder.name
        for i in range(2):
            write_shard(cls.path + "/t_train_%03d.bin" % i, i, 50 + 7 * i)
        write_shard(cls.path + "/t_val_000.bin", 99, 30)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def command(self, name, *arguments, program=PROGRAM, data=None):
        data = data or self.path
        return [program, *map(str, MODEL), "--train-data", data + "/t_train_*.bin", "--val-data", data + "/t_val_*.bin",
                "--out", self.path + "/" + name, *map(str, arguments)]

    def run_it(self, name, ranks, *arguments, expect=0, limit=LIMIT, **keywords):
        command = self.command(name, *arguments, **keywords)
        if "--resume" not in command:
            shutil.rmtree(self.path + "/" + name, ignore_errors=True)
        if ranks > 1:
            command = [MPIRUN, "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *command]
        result = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=ENVIRONMENT)
        self.assertEqual(result.returncode, expect, result.stdout + result.stderr)
        return result.stdout + result.stderr

    def log(self, name):
        with open(self.path + "/" + name + "/log.jsonl") as f:
            return [json.loads(line) for line in f]

    def curve(self, name):
        """Returns what must have the same bits."""
        return [(e["step"], e["tokens"], e["loss"], e["grad_norm"], e.get("val_loss")) for e in self.log(name)]

    def difference(self, name, other):
        a, b = self.log(name), self.log(other)
        self.assertEqual(len(a), len(b))
        return max(abs(x[key] / y[key] - 1) for x, y in zip(a, b) for key in ("loss", "grad_norm", "val_loss") if key in x)

    def wait_for_steps(self, name, steps, job=None):
        until = time.monotonic() + LIMIT
        path = self.path + "/" + name + "/log.jsonl"
        while time.monotonic() < until:
            if os.path.exists(path) and len(self.log_so_far(path)) >= steps:
                return
            if job and any(rank.poll() is not None for rank in job.ranks):
                break
            time.sleep(0.01)
        self.fail("the job did not come to step %d: %s" % (steps, job and job.end(1)))

    @staticmethod
    def log_so_far(path):
        with open(path) as f:
            return [line for line in f.read().split("\n") if line.endswith("}")]


@needs_mpi
class SameResult(Case):
    def test_one_to_four_ranks_and_every_stage(self):
        options = ["--micro-batch-size", 1, "--train-steps", chosen(50, 10), *DROPOUT]
        self.run_it("one", 1, *options)
        for ranks in chosen((2, 3, 4), (3,)):
            for stage in range(4):
                name = "%d-%d" % (ranks, stage)
                self.run_it(name, ranks, *options, "--zero-stage", stage)
                self.assertLess(self.difference(name, "one"), FP32_TOLERANCE, name)
                # The first loss has the same bits: samples, dropout and the order of sums are the same.
                self.assertEqual(self.log(name)[0]["loss"], self.log("one")[0]["loss"])
            # Stages 0 and 1 reduce the sum of a step's micro-steps; stages 2 and 3 reduce each micro-step's gradients.
            self.assertEqual(self.curve("%d-0" % ranks), self.curve("%d-1" % ranks))
            self.assertEqual(self.curve("%d-2" % ranks), self.curve("%d-3" % ranks))

    def test_muon(self):
        """Matrices cross the borders of shards and buckets. Validation uses the moving averages."""
        for more, some in chosen([([], (2, 3)), (["--muon-split-qkv", "groups", "--num-query-groups", 2], (4,))], [([], (3,))]):
            options = [*LLAMA, "--micro-batch-size", 1, "--train-steps", chosen(12, 6), *MUON, *more]
            self.run_it("one", 1, *options)
            for ranks in some:
                for stage in range(4):
                    name = "%d-%d" % (ranks, stage)
                    self.run_it(name, ranks, *options, "--zero-stage", stage, "--check-replicas", 5,
                                *(["--collectives", "sockets"] if stage == 2 else []))
                    self.assertLess(self.difference(name, "one"), MUON_TOLERANCE, name)
                self.assertEqual(self.curve("%d-0" % ranks), self.curve("%d-1" % ranks))
                self.assertEqual(self.curve("%d-2" % ranks), self.curve("%d-3" % ranks))

    def test_bytes_sent_by_muon(self):
        """Updates go to the matrices' owners and factors come back: a rank's part of each, less what it owns itself."""
        for ranks in chosen((2, 4), (2,)):
            sent = []
            for optimizer in ("adam", "muon"):
                out = self.run_it(optimizer, ranks, "--micro-batch-size", 12 // ranks, "--train-steps", 5, "--zero-stage", 1, "--optimizer", optimizer)
                sent.append(self.log(optimizer)[-1]["comm_bytes"])
            elements = int(re.search(r"matrices of ([\d,]+) parameters", out).group(1).replace(",", ""))
            theory = 2 * 4 * elements / ranks * (ranks - 1) / ranks
            self.assertTrue(0.6 * theory < sent[1] - sent[0] < 1.4 * theory, (ranks, (sent[1] - sent[0]) / theory)) # rank 0 owns about its share

    def test_a_batch_that_warms_up(self):
        options = ["--micro-batch-size", 1, "--train-steps", 20, "--rampup-batch-size", "4 4 40", *DROPOUT]
        self.run_it("one", 1, *options)
        self.assertEqual([entry["batch"] for entry in self.log("one")], 5 * [4] + 3 * [8] + 12 * [12])
        for ranks, stage in chosen([(2, 0), (2, 2), (4, 1), (4, 3)], [(2, 0), (4, 3)]):
            name = "%d-%d" % (ranks, stage)
            self.run_it(name, ranks, *options, "--zero-stage", stage)
            self.assertLess(self.difference(name, "one"), FP32_TOLERANCE, name)
            self.assertEqual([(e["batch"], e["tokens"]) for e in self.log(name)],
                             [(e["batch"], e["tokens"]) for e in self.log("one")])

    def test_stages_and_policies_have_the_same_bits(self):
        policies = [["--recompute-granularity", "selective"], ["--recompute-granularity", "full"],
                    ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 2]]
        for shape, ranks, batch in chosen([(DROPOUT, 4, 3), (LLAMA, 3, 4)], [(LLAMA, 3, 4)]):
            options = [*shape, "--micro-batch-size", batch, "--train-steps", chosen(10, 5)]
            self.run_it("a", ranks, *options)
            for stage, more in chosen([(0, []), (1, []), (2, []), (3, []), (3, ["--collectives", "sockets"]), (0, policies[0]),
                                       *((3, policy) for policy in policies)],
                                      [(1, []), (3, []), (3, ["--collectives", "sockets"]), (0, policies[0]), (3, policies[2])]):
                self.run_it("b", ranks, *options, "--zero-stage", stage, *more)
                self.assertEqual(self.curve("b"), self.curve("a"), (stage, more))

    def test_bf16(self):
        options = ["--precision", "bf16", "--micro-batch-size", 3, "--train-steps", 10]
        self.run_it("one", 1, *options)
        self.run_it("a", 4, *options)
        self.assertLess(self.difference("a", "one"), 2e-2) # roundings of 2^-9 to the parameters
        for stage in chosen((1, 2, 3), (3,)):
            self.run_it("b", 4, *options, "--zero-stage", stage)
            self.assertEqual(self.curve("b"), self.curve("a"), stage)

    def test_targets_that_do_not_count(self):
        """Ranks and micro-batches have different numbers of targets that count: each target has the same weight."""
        options = ["--train-steps", 10, "--val-every", 0, "--separate-documents", "--eod-token", 0, "--document-delimiter", "last"]
        self.run_it("one", 1, *options, "--micro-batch-size", 12)
        self.run_it("all", 1, *options, "--micro-batch-size", 12, "--no-eod-mask-loss")
        self.assertGreater(self.difference("all", "one"), 1e-3)
        for ranks, batch, stage in chosen([(1, 2, 0), (2, 6, 0), (2, 1, 0), (2, 3, 2), (3, 1, 3)], [(2, 1, 0), (3, 1, 3)]):
            name = "%d-%d-%d" % (ranks, batch, stage)
            self.run_it(name, ranks, *options, "--micro-batch-size", batch, "--zero-stage", stage)
            self.assertLess(self.difference(name, "one"), FP32_TOLERANCE, name)

    def test_the_end_of_text_is_that_of_any_rank(self):
        """Each rank reads data of its own folder; only one of these folders has the vocabulary."""
        options = ["--train-steps", 2, "--val-every", 0, "--separate-documents", "--document-delimiter", "last", "--micro-batch-size", 6]
        other = self.path + "/other"
        os.makedirs(other)
        for path in glob.glob(self.path + "/t_*.bin"):
            shutil.copy(path, other)
        self.run_it("named", 2, *options, "--eod-token", 0)
        for first, second in chosen([(self.path, other), (other, self.path)], [(other, self.path)]):
            job = Job(here(self.command("found", *options), self.path), 2, folders=[first, second])
            statuses, outputs = job.end(20)
            self.assertNotIn(0, statuses, outputs)
            self.assertIn("no end-of-text token is known", "".join(outputs))
            with open(self.path + "/vocabulary.bin", "wb") as f: # each token is empty, token 0 is the end of text
                f.write(struct.pack("<8s4I", b"GPTVOCAB", 1, VOCABULARY, 0, 0) + bytes(4 * (VOCABULARY + 1)))
            job = Job(here(self.command("found", *options), self.path), 2, folders=[first, second])
            statuses, outputs = job.end(20)
            os.remove(self.path + "/vocabulary.bin")
            self.assertEqual(statuses, [0, 0], outputs)
            self.assertEqual(self.curve("found"), self.curve("named"))
            shutil.rmtree(self.path + "/found")

    def test_gradients_in_bf16(self):
        options = ["--micro-batch-size", 3, "--train-steps", 10]
        self.run_it("exact", 4, *options)
        self.run_it("a", 4, *options, "--grad-reduce-in-bf16")
        self.assertNotEqual(self.curve("a"), self.curve("exact"))
        self.assertLess(self.difference("a", "exact"), 2e-2)
        for stage in chosen((1, 3), (3,)):
            self.run_it("b", 4, *options, "--grad-reduce-in-bf16", "--zero-stage", stage)
            self.assertEqual(self.curve("b"), self.curve("a"), stage)
        self.assertLess(self.log("b")[-1]["comm_bytes"], self.log("exact")[-1]["comm_bytes"] * 1.5)

    def test_bytes_sent(self):
        """Stages 0 to 2 send 2 P bytes and stage 3 sends 3 P, less each rank's own part, and the reports."""
        for ranks, stages in chosen([(2, range(4)), (4, range(4))], [(2, (0, 3)), (4, (1, 2))]):
            for stage in stages:
                out = self.run_it("a", ranks, "--micro-batch-size", 12 // ranks, "--train-steps", 5, "--zero-stage", stage)
                parameters = int(re.search(r"parameters +([\d,]+)", out).group(1).replace(",", ""))
                theory = (3 if stage == 3 else 2) * 4 * parameters * (ranks - 1) / ranks
                sent = self.log("a")[-1]["comm_bytes"]
                # more, since units are padded
                self.assertTrue(0.97 * theory < sent < 1.25 * theory, (ranks, stage, sent / theory))
                self.assertGreater(self.log("a")[-1]["comm_ms"], 0)

    def test_evaluation_and_generation(self):
        self.run_it("model", 1, "--micro-batch-size", 12, "--train-steps", 5, "--checkpoint-every", 5)
        model = glob.glob(self.path + "/model/checkpoints/step_*")[0]
        def last_line(ranks, *arguments):
            command = [PROGRAM, "--init-from", model, "--seq-length", T, "--threads", 1, "--precision", "fp32", *arguments]
            command = [MPIRUN, "--oversubscribe", "--bind-to", "none", "-np", ranks, *command] if ranks > 1 else command
            result = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=LIMIT, env=ENVIRONMENT)
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
            return result.stdout.strip().split("\n")[-1]
        evaluation = ["--eval-only", "--val-data", self.path + "/t_val_*.bin", "--val-steps", 7, "--micro-batch-size", 2]
        expected = last_line(1, *evaluation)
        self.assertIn("validation loss", expected)
        for ranks, stage in chosen([(2, 0), (3, 3), (4, 1)], [(3, 3)]):
            self.assertEqual(last_line(ranks, *evaluation, "--zero-stage", stage), expected)

    def test_samples_during_training(self):
        options = ["--micro-batch-size", 4, "--train-steps", 2, "--sample-every", 2, "--sample-tokens", 8]
        one = self.run_it("one", 1, "--micro-batch-size", 4, *options)
        for stage in chosen((0, 3), (3,)):
            three = self.run_it("three", 3, *options, "--zero-stage", stage)
            self.assertEqual(re.findall("--- sample.*?\n---", three.replace("\r", ""), re.S),
                             re.findall("--- sample.*?\n---", one.replace("\r", ""), re.S))

    def test_plan(self):
        """A rank takes what its plan says, and more ranks take less each."""
        def planned(*arguments):
            path = self.path + "/plan.json"
            result = subprocess.run(self.command("p", "--plan=full", "--plan-json", path, "--micro-batch-size", 2, *arguments),
                                    capture_output=True, text=True, env=ENVIRONMENT)
            self.assertEqual(result.returncode, 0, result.stderr)
            return re.search("memory +(.*)", result.stdout).group(1)
        for stage in chosen(range(4), (0, 3)):
            options = ["--zero-stage", stage, "--global-batch-size", 8, "--checkpoint-every", 2, "--train-steps", 2]
            out = self.run_it("a", 4, "--micro-batch-size", 2, *options)
            self.assertEqual(re.search("memory +(.*)", out).group(1).strip(), planned("--world-size", 4, *options))
        sizes = []
        for stage in range(4):
            result = subprocess.run([PROGRAM, "--preset", "llama3-8b", "--plan=full", "--world-size", "64", "--zero-stage", str(stage),
                                     "--precision", "bf16", "--checkpoint-every", "0"], capture_output=True, text=True)
            sizes.append(float(re.search(r"memory +([\d.]+) GiB planned", result.stdout).group(1)))
        self.assertEqual(sizes, sorted(sizes, reverse=True))
        # 12 bytes a parameter of optimizer state, 4 of gradients, 2 of parameters; a 64th of these stays.
        for stage, bytes_each in ((1, 12), (2, 4)):
            saved = 8.03e9 * bytes_each * 63 / 64 / 2 ** 30
            self.assertGreater(sizes[stage - 1] - sizes[stage], 0.6 * saved)


@needs_mpi
class SameBits(Case):
    """Values without sums of gradients have the same bits for any number of ranks."""
    # Many micro-batches, since sums of few, in another order, would mostly round to the same bits.
    OPTIONS = ["--lr", 0, "--micro-batch-size", 1, "--global-batch-size", 48, "--train-steps", 4, "--val-every", 2, "--val-steps", 25]

    def test_losses(self):
        """Parameters stay, so that losses follow from the data, the dropout and the order of the sums."""
        for shape in chosen((DROPOUT, LLAMA), (DROPOUT,)):
            self.run_it("one", 1, *self.OPTIONS, *shape)
            expected = [(e["step"], e["tokens"], e["loss"], e.get("val_loss")) for e in self.log("one")]
            self.assertEqual(len({loss for _, _, loss, _ in expected}), 4)
            for ranks, stage in chosen([(2, 0), (3, 3)], [(3, 3)]):
                self.run_it("many", ranks, *self.OPTIONS, *shape, "--zero-stage", stage)
                self.assertEqual([(e["step"], e["tokens"], e["loss"], e.get("val_loss")) for e in self.log("many")], expected, ranks)

    def test_the_sample_that_breaks_a_step(self):
        """A token's embedding is NaN: the step that meets it names the same samples, on whichever rank they are."""
        self.run_it("model", 1, *self.OPTIONS, *LLAMA, "--checkpoint-every", 4)
        model = self.path + "/nan"
        os.makedirs(model)
        for name in ("config.json", "model.safetensors"):
            shutil.copy(glob.glob(self.path + "/model/checkpoints/step_*/" + name)[0], model)
        with open(model + "/model.safetensors", "r+b") as f:
            length = struct.unpack("<Q", f.read(8))[0]
            table = json.loads(f.read(length))["model.embed_tokens.weight"]
            f.seek(8 + length + table["data_offsets"][0] + 20 * 32 * 4)
            f.write(struct.pack("<f", float("nan")))
        said = []
        for ranks in (1, 3):
            command = [PROGRAM, "--init-from", model, "--seq-length", T, "--train-data", self.path + "/t_train_*.bin", "--precision", "fp32",
                       "--threads", 1, "--micro-batch-size", 2, "--global-batch-size", 12, "--train-steps", 6, "--checkpoint-every", 0,
                       "--out", self.path + "/n", "--check-weights=false"]
            launcher = [MPIRUN, "--oversubscribe", "--bind-to", "none", "-np", ranks] if ranks > 1 else []
            result = subprocess.run(list(map(str, launcher + command)), capture_output=True, text=True, timeout=LIMIT, env=ENVIRONMENT)
            self.assertNotEqual(result.returncode, 0)
            said.append(re.search("step [^:]*: the loss is .*? of the data's order", result.stderr).group())
        self.assertEqual(said[0], said[1])
        self.assertNotIn("samples 0 to", said[0]) # not the first micro-batch's


@needs_mpi
class Checkpoints(Case):
    def goes_on(self, first, step, ranks, stage, options, tolerance):
        """A run of other ranks and another stage goes on with the first one's checkpoint: to the same bits, or within the tolerance."""
        name = "%s-%d-%d" % (first, ranks, stage)
        checkpoint = "/checkpoints/step_%08d" % step
        shutil.copytree(self.path + "/" + first + checkpoint, self.path + "/" + name + checkpoint)
        shutil.copy(self.path + "/" + first + "/log.jsonl", self.path + "/" + name)
        self.run_it(name, ranks, *options, "--zero-stage", stage, "--resume", "auto")
        if tolerance is None:
            self.assertEqual(self.curve(name), self.curve(first))
        else:
            self.assertLess(self.difference(name, first), tolerance)

    def test_stages_write_the_same_and_go_on_as_another(self):
        options = ["--micro-batch-size", 3, "--train-steps", 12, "--checkpoint-every", 6, *DROPOUT]
        stages = chosen(range(4), (0, 2))
        for stage in stages:
            self.run_it("%d" % stage, 4, *options, "--zero-stage", stage)
        for step in ("step_00000006", "step_00000012"):
            for name in ("model.safetensors", "optimizer.safetensors"):
                contents = set()
                for stage in stages:
                    with open("%s/%d/checkpoints/%s/%s" % (self.path, stage, step, name), "rb") as f:
                        contents.add(f.read())
                self.assertEqual(len(contents), 1, name)
        for ranks, stage in chosen([(4, 3), (2, 3), (1, 0), (2, 1)], [(4, 3), (2, 1)]):
            self.goes_on("2", 6, ranks, stage, options, None if ranks == 4 else FP32_TOLERANCE)

    def test_stages_write_the_same_of_muon(self):
        options = [*LLAMA, "--micro-batch-size", 2, "--train-steps", 6, "--checkpoint-every", 3, *MUON]
        for stage in chosen((0, 1, 3), (0, 1)):
            self.run_it("m%d" % stage, 3, *options, "--zero-stage", stage)
        for name in ("model.safetensors", "optimizer.safetensors"):
            contents = set()
            for stage in (0, 1): # 3 sums in another order
                with open("%s/m%d/checkpoints/step_00000003/%s" % (self.path, stage, name), "rb") as f:
                    contents.add(f.read())
            self.assertEqual(len(contents), 1, name)
        for ranks, stage in chosen([(3, 1), (2, 3), (1, 0)], [(2, 3)]):
            self.goes_on("m1", 3, ranks, stage, options, None if ranks == 3 else MUON_TOLERANCE)

    def test_global_batch_stays(self):
        """Without --global-batch-size it follows from the number of ranks; a run that goes on keeps the first one."""
        command = [c for c in self.command("g", "--micro-batch-size", 2, "--checkpoint-every", 2)]
        at = command.index("--global-batch-size")
        del command[at:at + 2]
        four = subprocess.run([MPIRUN, "--oversubscribe", "--bind-to", "none", "-np", "4", *command, "--train-steps", "2"],
                              capture_output=True, text=True, env=ENVIRONMENT)
        self.assertIn("8 sequences of 16 tokens, in 4 micro-batches", four.stdout)
        one = subprocess.run([*command, "--train-steps", "4", "--resume", "auto"], capture_output=True, text=True, env=ENVIRONMENT)
        self.assertIn("8 sequences of 16 tokens, in 4 micro-batches", one.stdout)
        self.assertEqual([e["tokens"] for e in self.log("g")], [128, 256, 384, 512])


class Launchers(Case):
    def test_rendezvous_and_srun(self):
        """Neither needs an MPI library."""
        options = ["--micro-batch-size", 4, "--train-steps", 6, "--zero-stage", 2]
        statuses, outputs = Job(self.command("a", *options), 3).end()
        self.assertEqual(statuses, [0, 0, 0], outputs)
        self.assertEqual(outputs[1:], ["", ""]) # only rank 0 speaks
        ranks = []
        for rank in range(3):
            step = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_TASKS_PER_NODE": "3",
                    "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0"}
            ranks.append(subprocess.Popen(self.command("b", *options), env={**ENVIRONMENT, **step}, stdout=subprocess.DEVNULL))
        self.assertEqual([rank.wait(LIMIT) for rank in ranks], [0, 0, 0])
        self.assertEqual(self.curve("a"), self.curve("b"))
        if HAS_MPI:
            self.run_it("c", 3, *options)
            self.assertEqual(self.curve("a"), self.curve("c"))

    def test_a_secret(self):
        """The secret comes by the variable or by a file. A rank without it is turned away, no file has it, and without
        a secret the report says so."""
        secret = "0123456789abcdef of this test"
        path = self.path + "/the_secret"
        with open(path, "w", encoding="utf-8") as file:
            file.write(secret + "\n")
        command = self.command("secret", "--micro-batch-size", 4, "--train-steps", 2, "--collective-timeout", 20)
        by_file = ["--rendezvous-secret", path]
        job = Job(command, 3, different={0: by_file, 2: by_file}, environments={1: {"TRAIN_GPT_SECRET": secret}})
        statuses, outputs = job.end()
        self.assertEqual(statuses, [0, 0, 0], outputs)
        self.assertNotIn("any host that reaches", outputs[0])
        self.assertEqual(outputs[1:], ["", ""])
        for folder, _, names in os.walk(self.path):
            for name in names:
                if os.path.join(folder, name) != path:
                    with open(os.path.join(folder, name), "rb") as file:
                        self.assertNotIn(secret.encode(), file.read(), name)
        self.assertNotIn(secret, "".join(outputs))
        for mine, theirs in ((by_file, []), ([], by_file)):
            job = Job(self.command("other", "--micro-batch-size", 6, "--collective-timeout", 1), 2, different={0: mine, 1: theirs})
            statuses, outputs = job.end()
            self.assertEqual(statuses, [2, 2], outputs)
            for output in outputs:
                self.assertIn("give all ranks the same by --rendezvous-secret", output)
        statuses, outputs = Job(self.command("none", "--micro-batch-size", 6, "--train-steps", 1), 2).end()
        self.assertEqual(statuses, [0, 0], outputs)
        self.assertIn("any host that reaches rank 0's port may join", outputs[0])

    @needs_mpi
    def test_mpirun_to_a_file(self):
        """Lines are whole, every --log-every steps, though each rank prints into a pseudo-terminal of mpirun's."""
        for ranks in (1, 2):
            command = self.command("t%d" % ranks, "--micro-batch-size", 6, "--train-steps", 7, "--log-every", 3, "--val-every", 0)
            with open(self.path + "/output", "w+", encoding="utf-8", newline="") as output:
                subprocess.run([MPIRUN, "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *command], stdout=output, check=True,
                               timeout=LIMIT, env={**ENVIRONMENT, "TERM": "xterm"})
                output.seek(0)
                self.assert_progress(output.read(), [1, 3, 6, 7])

    def test_a_launchers_terminal(self):
        """A pseudo-terminal stands for mpirun's: lines are whole there too; without a launcher each step is drawn."""
        for name, environment, steps in (("u", {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, [1, 3, 6, 7]), ("v", {}, None)):
            command = self.command(name, "--micro-batch-size", 12, "--train-steps", 7, "--log-every", 3, "--val-every", 0)
            terminal, other_end = pty.openpty()
            with subprocess.Popen(command, stdout=other_end, env={**ENVIRONMENT, "TERM": "xterm", **environment}) as process:
                os.close(other_end)
                text = b""
                try:
                    while part := os.read(terminal, 4096):
                        text += part
                except OSError: # this is how a pseudo-terminal tells that its other end was closed
                    pass
            os.close(terminal)
            self.assertEqual(process.returncode, 0)
            if steps:
                self.assert_progress(text.decode().replace("\r\n", "\n"), steps)
            else:
                self.assertEqual(text.count(b"\rstep "), 7)

    def assert_progress(self, text, steps):
        self.assertNotRegex(text, "[\r\033]")
        self.assertEqual([int(step) for step in re.findall(r"^step +(\d+)/7  .*[KMG]iB$", text, re.M)], steps)

    def test_mistakes(self):
        for arguments, message in ((["--micro-batch-size", 5], "--global-batch-size 12 is not a multiple of --micro-batch-size 5 on 2"),
                                   (["--collectives", "mpi"], "--collectives mpi: the ranks were not started by mpirun"),
                                   (["--collectives", "nccl", "--device", "cpu"], "--collectives nccl is for GPUs"),
                                   (["--recompute-granularity", "auto", "--memory-budget", 1000], "no choice of recomputation and offload fits"),
                                   (["--world-size", 2], "--world-size is what --plan plans for")):
            statuses, outputs = Job(self.command("m", "--micro-batch-size", 2, *arguments), 2).end(20)
            self.assertEqual(statuses, [2, 2], outputs)
            self.assertIn(message, outputs[0])

    def test_programs_that_differ(self):
        """The ranks' programs are of different commits: here a copy has another commit's name."""
        commit = re.search(r"\(commit (\S+)\)", subprocess.run([PROGRAM, "--version"], capture_output=True, text=True).stdout)[1]
        other = shutil.copy(PROGRAM, self.path + "/other_commit")
        with open(other, "r+b") as f:
            data = f.read()
            f.seek(data.index(commit.encode() + b"\0"))
            f.write(b"#")
        statuses, outputs = Job(self.command("p", "--micro-batch-size", 2, "--train-steps", 1), 2, programs={1: other}).end(20)
        self.assertEqual(statuses, [2, 2], outputs)
        self.assertIn("rank 1: the programs differ between ranks: here 'commit #%s', on rank 0 'commit %s'; start all" % (commit[1:], commit),
                      outputs[1])

    def test_memory_is_that_of_all_ranks(self):
        """Threads have memory of their own, and are a rank's."""
        options = ["--micro-batch-size", 2, "--train-steps", 1, "--val-every", 0]
        for threads, memory in ((4, r"(\S+ \S+) to (?!\1)\S+ \S+ planned a rank, (\S+ \S+) to (?!\2)\S+ \S+ of it activations"),
                                (1, r"\S+ \S+ planned, \S+ \S+ of it activations")):
            statuses, outputs = Job(self.command("memory", *options), 2, {1: ["--threads", str(threads)]}).end(20)
            self.assertEqual(statuses, [0, 0], outputs)
            self.assertRegex(outputs[0], "(?m)^memory +%s$" % memory)
            self.assertNotIn("ranks differ", outputs[0])

    def test_a_folder_that_another_job_writes_to(self):
        """Every rank ends alike; only rank 0 says why."""
        options = ["--micro-batch-size", 2, "--train-steps", 100000, "--val-every", 0, "--checkpoint-every", 0]
        job = Job(self.command("held", *options), 2)
        self.wait_for_steps("held", 1, job)
        for resume in ("none", "auto"):
            statuses, outputs = Job(self.command("held", *options, "--resume", resume), 3).end(20)
            self.assertEqual(statuses, [2, 2, 2], outputs)
            self.assertIn("held: process %d on host " % job.ranks[0].pid, outputs[0])
            self.assertEqual(outputs[1:], ["", ""])
        job.ranks[1].terminate()
        self.assertEqual(job.end()[0], [3, 3])

    def test_ranks_that_differ(self):
        other = self.path + "/other"
        shutil.rmtree(other, ignore_errors=True)
        os.makedirs(other)
        for path in glob.glob(self.path + "/t_*.bin"):
            shutil.copy(path, other)
        with open(other + "/t_train_001.bin", "r+b") as f:
            f.seek(-20, os.SEEK_END)
            f.write(b"\1\0")
        options = ["--micro-batch-size", 2, "--train-steps", 3]
        for different, message in (({1: ["--lr", "1e-3"]}, "the options differ between ranks: here 'lr 0.001', on rank 0 'lr 0.0030"),
                                   ({2: ["--train-data", other + "/t_train_*.bin"]}, "differ between ranks")):
            statuses, outputs = Job(self.command("d", *options), 3, different).end(20)
            self.assertNotIn(0, statuses)
            self.assertIn(message, "".join(outputs))
        # Nor may the environment differ, where it changes what is computed.
        statuses, outputs = Job(self.command("d", *options), 2, environments={1: {"NVTE_FLASH_ATTN": "0"}}).end(20)
        self.assertEqual(statuses, [2, 2])
        self.assertIn("rank 1: the environment variables differ between ranks: here 'NVTE_FLASH_ATTN=0', on rank 0 'NVTE_FLASH_ATTN is not "
                      "set, or 1'; start all ranks with the same", outputs[1])
        # If only the contents differ, the data are named: the folder is the same for all, but not what lies in it.
        statuses, outputs = Job(here(self.command("d", *options), self.path), 2, folders=[self.path, other]).end(20)
        self.assertNotIn(0, statuses)
        self.assertIn("the data files differ between ranks: here 't_train_001.bin", "".join(outputs))


class Faults(Case):
    STEPS = ["--micro-batch-size", 4, "--train-steps", 100000, "--val-every", 0, "--log-every", 1000000]

    def assert_gone(self, job):
        for rank in job.ranks:
            self.assertIsNotNone(rank.poll())

    def resumes(self, name, step):
        """Checks that the job's last checkpoint is whole."""
        result = subprocess.run(self.command(name, *self.STEPS, "--resume", "auto", "--train-steps", step + 1, "--checkpoint-every", 0),
                                capture_output=True, text=True, env=ENVIRONMENT, timeout=LIMIT)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        # A save that was under way is passed over, and nothing else.
        self.assertNotRegex(result.stdout, "passed over: (?!.*was left by a save that did not end)")

    def test_a_rank_is_killed(self):
        for victim, stage in chosen([(2, 0), (0, 3), (1, 2)], [(0, 3), (1, 2)]):
            name = "k%d" % victim
            job = Job(self.command(name, *self.STEPS, "--zero-stage", stage, "--checkpoint-every", 20, "--keep-checkpoints", 3), 3)
            self.wait_for_steps(name, 45, job)
            job.ranks[victim].kill()
            begun = time.monotonic()
            statuses, outputs = job.end(20)
            self.assertLess(time.monotonic() - begun, 10)
            self.assertEqual(statuses[victim], -signal.SIGKILL)
            self.assertEqual([s for r, s in enumerate(statuses) if r != victim], [1, 1])
            said = "".join(outputs)
            self.assertRegex(said, r"rank %d \(host \S+, pid %d\) ended (during|after) '.*' \((collective|exchange) \d+\)" %
                             (victim, job.ranks[victim].pid))
            self.assert_gone(job)
            steps = sorted(int(p[-8:]) for p in glob.glob(self.path + "/" + name + "/checkpoints/step_" + "?" * 8))
            self.resumes(name, steps[-1])

    def test_a_rank_hangs(self):
        for victim in (1, 0):
            name = "h%d" % victim
            job = Job(self.command(name, *self.STEPS, "--collective-timeout", 3), 3)
            self.wait_for_steps(name, 5, job)
            job.ranks[victim].send_signal(signal.SIGSTOP)
            begun = time.monotonic()
            others = [rank for r, rank in enumerate(job.ranks) if r != victim]
            for rank in others:
                self.assertEqual(rank.wait(20), 1)
            self.assertLess(time.monotonic() - begun, 13)
            said = "".join(rank.stderr.read() for rank in others)
            self.assertRegex(said, r"rank %d \(host \S+, pid %d" % (victim, job.ranks[victim].pid))
            job.ranks[victim].send_signal(signal.SIGCONT) # as a launcher does: the rank finds that the job is over
            statuses, _ = job.end(20)
            self.assertNotEqual(statuses[victim], 0)

    def test_a_rank_fails(self):
        """A rank ends by a message: the others end too, and its message is printed."""
        empty = self.path + "/empty"
        os.makedirs(empty)
        job = Job(here(self.command("f", *self.STEPS), self.path), 3, folders=[self.path, empty, self.path])
        statuses, outputs = job.end(30)
        self.assertEqual(statuses, [2, 2, 2], outputs)
        self.assertIn("train_gpt: rank 1: --train-data", outputs[1])
        self.assertRegex(outputs[0], r"rank 1 \(host \S+, pid %d\) ended" % job.ranks[1].pid)

    @needs_mpi
    def test_mpirun(self):
        """No process stays when a rank of mpirun's is killed."""
        command = self.command("m", *self.STEPS, "--collective-timeout", 5)
        launcher = subprocess.Popen([MPIRUN, "--oversubscribe", "--bind-to", "none", "-np", "3", *command], text=True, env=ENVIRONMENT,
                                    stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.wait_for_steps("m", 5)
        pids = [int(p) for p in subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True).stdout.split()]
        self.assertEqual(len(pids), 3)
        os.kill(pids[1], signal.SIGKILL)
        _, error = launcher.communicate(timeout=30)
        self.assertNotEqual(launcher.returncode, 0)
        self.assertRegex(error, r"rank \d \(host \S+, pid %d\) ended|signal 9" % pids[1])
        self.assertEqual([pid for pid in pids if self.runs(pid)], [])

    @staticmethod
    def runs(pid):
        """Whether the process exists, and not only its status, which nobody has asked for yet."""
        try:
            with open("/proc/%d/stat" % pid) as f:
                return f.read().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False

    def test_signals(self):
        """SIGUSR1 to one rank: all save and go on. SIGTERM to one: all save and end."""
        for stage in chosen((0, 2), (2,)):
            name = "s%d" % stage
            job = Job(self.command(name, *self.STEPS, "--zero-stage", stage, "--checkpoint-every", 1000000), 3)
            self.wait_for_steps(name, 5, job)
            job.ranks[2].send_signal(signal.SIGUSR1)
            until = time.monotonic() + 30
            saved = self.path + "/" + name + "/checkpoints/step_" + "?" * 8
            while not glob.glob(saved) and time.monotonic() < until:
                time.sleep(0.02)
            self.assertEqual(len(glob.glob(saved)), 1)
            job.ranks[1].send_signal(signal.SIGTERM)
            statuses, outputs = job.end(30)
            self.assertEqual(statuses, [3, 3, 3], outputs)
            self.assertIn("Terminated (rank 1): the run is saved and ends", outputs[0])
            steps = sorted(int(p[-8:]) for p in glob.glob(saved))
            self.assertEqual(len(steps), 2)
            self.assertEqual(steps[-1], self.log(name)[-1]["step"])
            self.resumes(name, steps[-1])

    def test_signal_during_a_validation(self):
        """The signal comes to one rank: all leave the validation after the same batch."""
        write_shard(self.path + "/long_val_000.bin", 3, 20000)
        command = self.command("v", *self.STEPS, "--micro-batch-size", 1, "--val-every", 1, "--val-steps", 20000, "--collective-timeout", 5)
        command[command.index("--val-data") + 1] = self.path + "/long_val_*.bin"
        job = Job(command, 2)
        for line in job.ranks[0].stdout:
            if line == "\n": # after the report, before the first step
                break
        time.sleep(1.5)
        job.ranks[1].send_signal(signal.SIGTERM)
        statuses, outputs = job.end(30)
        self.assertEqual(statuses, [3, 3], outputs)

    def test_exit_after(self):
        job = Job(self.command("x", *self.STEPS, "--micro-batch-size", 6, "--exit-after", "0.02", "--checkpoint-every", 1000000), 2)
        statuses, outputs = job.end(30)
        self.assertEqual(statuses, [3, 3], outputs)
        self.assertIn("--exit-after", outputs[0])

    @skip_under_address_sanitizer(PROGRAM)
    def test_drifted_replica(self):
        """A bit of one rank's parameters flips: this rank is named."""
        options = [*self.STEPS, "--lr", 0, "--check-replicas", 10, "--checkpoint-every", 5, "--keep-checkpoints", 1]
        job = Job(self.command("r", *options), 3)
        self.wait_for_steps("r", 12, job)
        self.assertTrue(all(rank.poll() is None for rank in job.ranks)) # all is well so far
        with open(glob.glob(self.path + "/r/checkpoints/step_" + "?" * 8 + "/model.safetensors")[-1], "rb") as f:
            length = struct.unpack("<Q", f.read(8))[0]
            wanted = json.loads(f.read(length))["transformer.wte.weight"]["data_offsets"][0]
            f.seek(8 + length + wanted)
            row = f.read(256) # with --lr 0 it stays as it is
        victim = job.ranks[1]
        flipped = 0
        with open("/proc/%d/maps" % victim.pid) as maps, open("/proc/%d/mem" % victim.pid, "r+b", 0) as memory:
            for line in maps:
                place = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw-p 00000000 00:00 0", line)
                if place:
                    begin, end = (int(x, 16) for x in place.groups())
                    memory.seek(begin)
                    try:
                        found = memory.read(end - begin).find(row)
                    except OSError:
                        continue
                    if found >= 0:
                        memory.seek(begin + found + 3)
                        memory.write(bytes([row[3] ^ 1]))
                        flipped += 1
        self.assertGreater(flipped, 0)
        statuses, outputs = job.end(30)
        self.assertNotIn(0, statuses)
        self.assertRegex("".join(outputs), r"step \d+: the parameters of rank 1 are not those of the other ranks")


@unittest.skipUnless(HAS_MPI and CUDA_PROGRAM and os.path.exists(CUDA_PROGRAM), "no cuda engine on an emulator, or no MPI")
class CudaEngine(Case):
    """The path through NCCL, on the emulator's NCCL, which uses MPI."""
    SHAPE = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "1", "--global-batch-size", "4", "--train-steps", "2",
             "--val-every", "2", "--val-steps", "3", "--bucket-mib", "0.05", "--matmul-tuning=false"]

    def test_stages(self):
        for precision, tolerance, stages in chosen([("fp32", 1e-5, (0, 3)), ("bf16", 2e-2, range(4))], [("bf16", 2e-2, (0, 1, 3))]):
            options = [*self.SHAPE, "--precision", precision, "--micro-batch-size", 2]
            self.run_it("cpu", 2, *options, "--device", "cpu")
            for stage in stages:
                name = "cuda%d" % stage
                self.run_it(name, 2, *options, "--device", "cuda", "--zero-stage", stage, "--checkpoint-every", 2, program=CUDA_PROGRAM)
                self.assertLess(self.difference(name, "cpu"), tolerance)
                self.assertEqual(self.curve(name), self.curve("cuda0"), stage)
                for entry in self.log(name):
                    self.assertGreater(entry["comm_bytes"], 0)
                    self.assertGreater(entry["comm_ms"], 0)
                    self.assertGreaterEqual(entry["comm_exposed_ms"], 0)
        self.run_it("host", 2, *options, "--device", "cuda", "--zero-stage", 3, "--collectives", "mpi", program=CUDA_PROGRAM)
        self.assertEqual(self.curve("host"), self.curve("cuda0")) # two ranks have only one order of summation

    @long_test("test_checkpoints holds the bytes of the cpu target, test_cuda_engine the plan's of one rank")
    def test_memory_is_flat(self):
        """Fused attention in bf16 and in FP8, delayed scales, all activations recomputed, the parameters sharded: the run of
        TransformerEngine's issue 1935, in which what was recomputed stayed. 400 steps hold the plan's bytes, and NCCL's own."""
        options = [*self.SHAPE, "--ffn-hidden-size", 64, "--precision", "bf16", "--micro-batch-size", 1, "--global-batch-size", 2,
                   "--device", "cuda", "--attention-backend", "fused", "--zero-stage", 3, "--fp8-format", "hybrid", "--fp8-recipe", "delayed",
                   "--fp8-amax-history-len", 16, "--recompute-granularity", "full", "--train-steps", 400, "--val-every", 0,
                   "--plan-json", self.path + "/plan.json"]
        gpus = {"none": {"EMU_CAPABILITY": "9.0"}, "full": {"EMU_CAPABILITY": "10.0", "EMU_CUDNN_VERSION": "92800"}}
        for collectives, attention in (("mpi", "none"), ("nccl", "none"), ("mpi", "full")):
            with unittest.mock.patch.dict(ENVIRONMENT, {**gpus[attention], "NVTE_FUSED_ATTN": "1"}):
                said = self.run_it("flat", 2, *options, "--collectives", collectives, "--fp8-dot-product-attention", attention,
                                   program=CUDA_PROGRAM, limit=5 * LIMIT)
            for line in (r"FP8 +hybrid, delayed", r"attention +fused, cuDNN \S+ bf16", r"recomputation +full, uniform", r"ranks +2, ZeRO stage 3"):
                self.assertRegex(said, "(?m)^" + line)
            self.assertEqual("; FP8 forward and backward by cuDNN" in said, attention == "full")
            with open(self.path + "/plan.json", encoding="utf-8") as f:
                planned = json.load(f)["peak_bytes"]
            bytes_of_steps = [entry["peak_bytes"] for entry in self.log("flat")]
            self.assertEqual(len(bytes_of_steps), 400)
            self.assertEqual(len(set(bytes_of_steps)), 1, collectives)
            self.assertEqual(bytes_of_steps[0] == planned, collectives == "mpi")
            self.assertGreaterEqual(bytes_of_steps[0], planned)

    @long_test("test_lora holds frozen parameters on the cpu target")
    def test_frozen_shards(self):
        options = [*self.SHAPE, "--precision", "bf16", "--micro-batch-size", 2]
        # their shards are larger than the trained parameters'
        frozen = [*options, "--freeze", "transformer.h.*,transformer.w*", "--device", "cuda"]
        self.run_it("frozen0", 2, *frozen, program=CUDA_PROGRAM)
        self.run_it("frozen3", 2, *frozen, "--zero-stage", 3, "--collectives", "mpi", program=CUDA_PROGRAM)
        self.assertEqual(self.curve("frozen3"), self.curve("frozen0"))

    def test_a_rank_without_a_gpu(self):
        """--device auto would choose a CPU for it, which would wait for collectives in which the others do not take
        part."""
        command = self.command("auto", *self.SHAPE, "--precision", "bf16", "--micro-batch-size", 2, program=CUDA_PROGRAM)
        statuses, outputs = Job(command, 2, environments={1: {"EMU_DEVICES": "0"}}).end(20)
        self.assertEqual(statuses, [2, 2], outputs)
        self.assertIn("rank 1: --device auto: other ranks have a GPU, and this one uses none: no GPU is visible; start each", outputs[1])

    def test_two_kinds_of_gpu_are_reported(self):
        command = self.command("kinds", *self.SHAPE, "--kv-channels", 64, "--precision", "bf16", "--micro-batch-size", 2, "--val-every", 0,
                               "--train-steps", 1, "--device", "cuda", program=CUDA_PROGRAM)
        ranks = [["-np", "1", "env", "EMU_CAPABILITY=" + capability, *command] for capability in ("9.0", "8.0")]
        result = subprocess.run([MPIRUN, "--oversubscribe", "--bind-to", "none", *ranks[0], ":", *ranks[1]], capture_output=True, text=True,
                                timeout=LIMIT, env={**ENVIRONMENT, "NVTE_FUSED_ATTN": "0"})
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertRegex(result.stdout, "(?m)^ranks differ +rank 1, of 1 that do, has cuda: .*capability 8.0, bf16 where rank 0 has cuda: .*"
                         "capability 9.0, bf16, attention by flash, mma.sync bf16 where rank 0 has attention by flash, wgmma bf16; replicas")

    def test_ranks_agree_on_fused(self):
        """If one rank has no cuDNN that can be used, no rank uses it, and the message names this rank."""
        command = self.command("fused", *self.SHAPE, "--precision", "bf16", "--micro-batch-size", 2, "--device", "cuda",
                               program=CUDA_PROGRAM)
        # this is as if it were unset
        lacks = {"off": "NVTE_FUSED_ATTN=0", "refused": "EMU_CUDNN_REFUSE=create", "here": "NVTE_FUSED_ATTN=1"}
        curves = {}
        for name, first, second in (("all", "here", "here"), ("none", "off", "off"), ("second", "here", "refused")):
            shutil.rmtree(self.path + "/fused", ignore_errors=True)
            ranks = [["-np", "1", "env", lacks[rank], *command] for rank in (first, second)]
            result = subprocess.run([MPIRUN, "--oversubscribe", "--bind-to", "none", *ranks[0], ":", *ranks[1]], capture_output=True,
                                    text=True, timeout=LIMIT, env={**ENVIRONMENT, "EMU_CAPABILITY": "10.0"})
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
            curves[name] = self.curve("fused")
            attention = next(line for line in result.stdout.splitlines() if line.startswith("attention "))
            with self.subTest(name, attention=attention):
                self.assertEqual("fused, cuDNN" in attention, name == "all")
                self.assertEqual("fused: rank 1 does not take it, and ranks compute alike" in attention, name == "second")
                self.assertEqual("fused: switched off by NVTE_FUSED_ATTN=0" in attention, name == "none")
                self.assertEqual("rank 1, attention: flash, " in result.stderr, name == "second", result.stderr)
                self.assertEqual("EMU_CUDNN_REFUSE=create" in result.stderr, name == "second", result.stderr)
        self.assertNotEqual(curves["all"], curves["none"]) # else the next check would show nothing
        self.assertEqual(curves["second"], curves["none"])

    @long_test("op_muon_model holds the optimizer on the emulator, SameResult its ranks, test_stages the ranks of a GPU")
    def test_muon(self):
        options = [*self.SHAPE, "--precision", "fp32", "--micro-batch-size", 2, *MUON]
        self.run_it("cpu", 2, *options, "--device", "cpu")
        runs = [("nccl0", ["--zero-stage", 0]), ("nccl3", ["--zero-stage", 3]), ("nccl1", ["--zero-stage", 1]),
                ("host", ["--zero-stage", 1, "--collectives", "mpi"])]
        for name, more in runs:
            self.run_it(name, 2, *options, "--device", "cuda", *more, program=CUDA_PROGRAM)
            self.assertLess(self.difference(name, "cpu"), 1e-4)
            self.assertEqual(self.curve(name), self.curve("nccl0"), name)

    def test_graphs_between_collectives(self):
        """A micro-step that neither begins nor waits for collectives runs as one graph; other micro-steps run as one
        graph for what is between two collectives. Not so the first one of each kind, before which the libraries are not
        warm. A validation takes over the updated parameters' collectives from the step after it, which is then enqueued
        like all of them."""
        options = [*self.SHAPE, "--precision", "bf16", "--micro-batch-size", 1, "--device", "cuda", "--train-steps", 3]
        units, steps = 4, 2 # units: the head, two layers, the embeddings; steps: recorded or enqueued again
        # additional graphs: the first unit's wait, and the last unit's reduction, have no work beside them
        waits, reductions = units - 1, units - 1
        # additional graphs where gradients are sharded: for the last two units, whose sums have no backward beside them
        sums = 2
        # where parameters are sharded: their all-gathers begin, and are waited for, within forward and backward
        gathered = 6
        middle = 2 * steps + 1 # of a step of four micro-steps
        cases = (
            (0, [steps * (1 + reductions)], []),
            (0, [steps, middle, steps * (1 + reductions)], []),
            (1, [steps * (1 + waits + reductions)], []),
            (1, [steps * (1 + waits), steps * (1 + reductions)], ["--collectives", "mpi"]),
            (1, [steps * (1 + waits), middle, steps * (1 + reductions)], []),
            (2, [steps * (1 + waits + reductions + sums), steps * (1 + reductions + sums)], []),
            # one kind, without the first
            (3, [times * (1 + reductions + sums + gathered) for times in (steps, 0, middle + steps + 1)], []))
        for stage, graphs, more in chosen(cases, (cases[1], cases[2])):
            micro_steps = len(graphs) + (len(graphs) == 3)
            run = [*options, "--zero-stage", stage, "--global-batch-size", 2 * micro_steps, *more]
            self.assertEqual(self.graphs("with", *run), sum(graphs), (stage, micro_steps))
            self.assertEqual(self.graphs("without", *run, "--cuda-graphs=false"), 0)
            self.assertEqual(self.curve("with"), self.curve("without"), (stage, micro_steps))

    def graphs(self, name, *options):
        """Returns how many graphs rank 0 of two launches in a run."""
        counts = self.path + "/counts"
        if os.path.exists(counts):
            os.remove(counts) # the emulator appends
        shutil.rmtree(self.path + "/" + name, ignore_errors=True)
        command = count_launches.command_of(self.command(name, *options, program=CUDA_PROGRAM), 2, counts)
        result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=ENVIRONMENT)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return sum(times for times, text in count_launches.counts_by_text(counts) if text == "a graph")

    @long_test("test_graphs_between_collectives counts by the same script, four runs of two ranks less")
    def test_collectives_are_counted(self):
        """scripts/count_launches.py --ranks: at stage 1 a step reduces and gathers each unit, and gathers the ranks'
        reports."""
        micro_step, rest = count_launches.count(["--train-gpt", CUDA_PROGRAM, "--ranks", "2", "--num-layers", "2", "--zero-stage=1"])
        self.assertEqual((micro_step[count_launches.GRAPHS], rest[count_launches.GRAPHS]), (1, 6)) # as in the test above
        collectives = count_launches.by_row(micro_step)["collectives"], rest["ncclReduceScatter"], rest["ncclAllGather"]
        self.assertEqual(collectives, (0, 4, 5))

    def test_what_nccl_holds_is_counted(self):
        """A GPU has room for the plan and its reserve, but not also for NCCL's buffers: this is reported before
        anything is allocated."""
        options = [*self.SHAPE, "--precision", "bf16", "--micro-batch-size", 2, "--device", "cuda"]
        planned = self.path + "/nccl.json"
        self.run_it("plan", 1, *options, "--plan", "--world-size", 2, "--plan-json", planned, program=CUDA_PROGRAM)
        with open(planned) as f:
            room = json.load(f)["peak_bytes"] + (256 << 20)
        for more, fits, message in (1 << 20, False, "the plan needs"), (32 << 20, True, "2, ZeRO stage 0"):
            command = self.command("nccl", *options, program=CUDA_PROGRAM)
            result = subprocess.run([MPIRUN, "--oversubscribe", "--bind-to", "none", "-np", "2", *command], capture_output=True, text=True,
                                    timeout=LIMIT, env={**ENVIRONMENT, "EMU_MEMORY_BYTES": str(room + more)})
            self.assertEqual(result.returncode == 0, fits, result.stdout + result.stderr)
            self.assertIn(message, result.stdout + result.stderr)

    def first_config(self, name, options, memory, taken):
        """Returns config.json of two ranks, which are killed before their first step, as that takes minutes. memory:
        the bytes of their GPUs; taken: how many of these NCCL takes."""
        shutil.rmtree(self.path + "/" + name, ignore_errors=True)
        command = [MPIRUN, "--oversubscribe", "--bind-to", "none", "-np", "2", *self.command(name, *options, program=CUDA_PROGRAM)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
                              env={**ENVIRONMENT, "EMU_MEMORY_BYTES": str(memory), "EMU_NCCL_BYTES": str(taken)}) as job:
            until = time.monotonic() + 3 * LIMIT # auto measures an emulated GPU
            found = None
            while not found and job.poll() is None and time.monotonic() < until:
                time.sleep(0.1)
                try:
                    with open("%s/%s/config.json" % (self.path, name)) as f:
                        found = json.load(f)
                except (FileNotFoundError, json.JSONDecodeError):
                    pass
            for pid in set(processes_of_session(job.pid)) - {job.pid}:
                os.kill(pid, signal.SIGKILL)
            said = job.communicate(timeout=LIMIT)[0]
        self.assertTrue(found, said)
        return found

    def planned_for_two(self, *options):
        """Returns the peak of a plan for two ranks."""
        self.run_it("plan", 1, *options, "--plan", "--world-size", 2, "--plan-json", self.path + "/plan.json", program=CUDA_PROGRAM)
        with open(self.path + "/plan.json") as f:
            return json.load(f)["peak_bytes"]

    KEPT = 768 << 20 # of a GPU's memory, for the driver and for NCCL

    def test_logits_yield_to_nccl(self):
        """Chunks of logits that grew into free memory shrink where NCCL takes more memory than was kept for it."""
        options = [*self.SHAPE, "--num-layers", 1, "--vocab-size", 50304, "--seq-length", 64, "--micro-batch-size", 128, "--global-batch-size", 256,
                   "--precision", "bf16", "--device", "cuda", "--val-every", 0]
        # All of a micro-batch; half of it, as planned where no free memory is known.
        peaks = [self.planned_for_two(*options, "--loss-chunk-tokens", tokens) for tokens in (8192, 4096)]
        memory = (peaks[0] + self.KEPT) * 64 // 63 + (1 << 20)
        for taken, tokens in chosen(((256 << 20, 8192), (768 << 20, 4096)), ((768 << 20, 4096),)):
            self.assertLess(peaks[1] + taken, memory - (256 << 20))
            self.assertEqual(self.first_config("yields", options, memory, taken)["loss_chunk_tokens"], tokens)

    @long_test("test_logits_yield_to_nccl plans again by the same lines; auto measures an emulated GPU's rates for a minute")
    def test_auto_yields_to_nccl(self):
        """What auto chose by the memory that was free is chosen again where NCCL takes more memory than was kept for
        it."""
        options = [*self.SHAPE, "--num-layers", 6, "--seq-length", 128, "--micro-batch-size", 64, "--global-batch-size", 128, "--precision", "bf16",
                   "--device", "cuda", "--val-every", 0, "--loss-chunk-tokens", 1024, "--recompute-granularity"]
        none, full = (self.planned_for_two(*options, granularity) for granularity in ("none", "full"))
        memory = (none + self.KEPT) * 64 // 63 + (1 << 20)
        for taken, fits in chosen(((256 << 20, True), (576 << 20, False)), ((576 << 20, False),)):
            left = memory - (256 << 20) - taken
            self.assertEqual(none <= left, fits)
            self.assertLess(full, left * 63 // 64)
            found = self.first_config("chooses", [*options, "auto"], memory, taken)
            nothing_given_up = found["recompute_granularity"] == "none" and not found["cpu_offloading_num_layers"] and not found["optimizer_cpu_offload"]
            self.assertEqual(nothing_given_up, fits, found)

    def test_frozen_parameters_divide_no_graph(self):
        """Frozen parameters have no update whose collectives a graph would wait for."""
        options = [*self.SHAPE, "--precision", "bf16", "--micro-batch-size", 1, "--device", "cuda", "--train-steps", 2, "--zero-stage", 1]
        every = self.graphs("all", *options)
        self.assertGreater(every, 0)
        self.assertEqual(self.graphs("frozen", *options, "--freeze", "transformer.h.*.ln_1.*"), every)

    def test_graphs_of_a_batch_that_grows(self):
        """Micro-steps of each kind are recorded anew where the loss's scale changes."""
        options = [*self.SHAPE, "--precision", "bf16", "--micro-batch-size", 1, "--device", "cuda", "--train-steps", 4,
                   "--global-batch-size", 8, "--rampup-batch-size", "4 4 8"] # two, then four micro-steps
        for ranks, stage in chosen([(1, 0), (2, 0), (2, 1), (2, 2)], [(2, 1)]):
            for name, more in (("with", []), ("without", ["--cuda-graphs=false"])):
                self.run_it(name, ranks, *options, "--zero-stage", stage, *more, program=CUDA_PROGRAM)
            self.assertEqual([entry["batch"] for entry in self.log("with")], 2 * [4] + 2 * [8])
            self.assertEqual(self.curve("with"), self.curve("without"), (ranks, stage))


if __name__ == "__main__":
    unittest.main()
