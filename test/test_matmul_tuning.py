"""--matmul-tuning on the emulator, whose cuBLASLt takes from its environment how long each algorithm takes: what is
chosen, the file that keeps it, and the runs that go on with it. Skipped where TRAIN_GPT_CUDA names no train_gpt of the
emulator."""
import json
import os
import re
import shutil
import subprocess
import tempfile
import unittest

from environment import chosen, free_port, long_test
from test_cli import write_shard

PROGRAM = os.path.abspath(os.environ.get("TRAIN_GPT_CUDA") or "/nowhere")
NAME = "matmul_algorithms.txt"
STEPS = 4
# Heads of 16 in bf16: small, and with a bias gradient for BGRADB.
TRAINING = ["--vocab-size", 257, "--seq-length", 24, "--micro-batch-size", 2, "--global-batch-size", 4, "--lr", "1e-3",
            "--lr-decay-steps", STEPS, "--val-every", 2, "--val-steps", 1, "--num-layers", chosen(2, 1), "--hidden-size", chosen(64, 32),
            "--num-attention-heads", chosen(2, 1), "--threads", 1, "--device", "cuda", "--precision", "bf16", "--checkpoint-every", 2, "--cuda-graphs=false"]
THIRD = {"EMU_CUBLASLT_TIMES": "900,800,300,800"}   # it sums two parts of the depth
SIXTH = {"EMU_CUBLASLT_TIMES": "900,800,700,800,900,400,800"} # it sums four parts of the depth


@unittest.skipUnless(os.path.exists(PROGRAM), "no emulator's train_gpt")
class MatmulTuning(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = self.folder.name
        write_shard(self.path + "/t_train_000.bin", list(b"sum += x[i] * y[i];\n" * 100))
        write_shard(self.path + "/t_val_000.bin", list(b"return sum / n;\n" * 20))

    def command(self, out, *arguments):
        return [PROGRAM, *map(str, [*TRAINING, "--train-data", self.path + "/t_train_*.bin", "--val-data",
                                    self.path + "/t_val_*.bin", "--out", self.path + "/" + out, *arguments])]

    def start(self, out, environment, *arguments):
        return subprocess.run(self.command(out, *arguments), capture_output=True, text=True, timeout=300,
                              env={**os.environ, **environment})

    def train(self, out, environment, *arguments, steps=STEPS):
        """Returns the losses in the log, and what the run said."""
        result = self.start(out, environment, "--train-steps", steps, *arguments)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return self.losses(out), result.stdout + result.stderr

    def losses(self, out):
        with open("%s/%s/log.jsonl" % (self.path, out)) as f:
            return [(entry["loss"], entry["grad_norm"], entry.get("val_loss")) for entry in map(json.loads, f) if "loss" in entry]

    def algorithms(self, folder):
        """Returns for each product: its candidate, whether an epilogue does what comes with the product, and what that
        is."""
        with open("%s/%s/%s" % (self.path, folder, NAME)) as f:
            lines = f.read().splitlines()
        self.assertRegex(lines[1], r"^library=130\d00 multiprocessors=3 gpu=emulated GPU$")
        return [tuple(int(re.search(r"\b%s=(\d+)" % key, line)[1]) for key in ("candidate", "fused", "has_dbias", "gelu")) for line in lines[2:]]

    def test_the_fastest_is_taken_and_kept(self):
        first, said = self.train("first", {})
        self.assertIn("not by the heuristics' first", said)
        self.assertEqual({candidate for candidate, *_ in self.algorithms("first")}, {0})
        off, said = self.train("off", THIRD, "--matmul-tuning=false")
        self.assertIn("--matmul-tuning=false", said)
        self.assertFalse(os.path.exists(self.path + "/off/" + NAME))
        self.assertEqual(off, first)
        third, said = self.train("third", THIRD, "--checkpoint-every", 0)
        self.assertRegex(said, r"(\d+) products, \1 timed in .* s; \1 not by the heuristics' first, which saves 66\.7 % of one run of "
                               r"each, 66\.7 % at most")
        self.assertEqual({candidate for candidate, *_ in self.algorithms("third")}, {2})
        self.assertNotEqual(third, off)
        for ours, theirs in zip(third, off):
            self.assertAlmostEqual(ours[0], theirs[0], delta=1e-2)
        again, said = self.train("third", SIXTH, "--checkpoint-every", 0) # a run into the same folder takes its file
        self.assertEqual(again, third)
        self.assertIn("third/" + NAME, said)

    def test_a_library_that_multiplies_wrongly_ends_the_run(self):
        result = self.start("wrong", {"EMU_FAULT": "wrong:cublasLtMatmul"}, "--train-steps", 1)
        self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
        self.assertRegex(result.stderr, r"cuBLASLt multiplies wrongly on this GPU: of a product of \d+ x \d+ x \d+ its first algorithm")

    def test_bias_gradients_by_the_epilogue(self):
        losses, said = self.train("epilogue", {"EMU_CUBLASLT_BGRAD_TIMES": "200"})
        for candidate, fused, has_dbias, _ in self.algorithms("epilogue"):
            self.assertEqual((candidate, fused), (8, 1) if has_dbias else (0, 0))
        self.assertRegex(said, r"; [1-9]\d* by an epilogue that does what comes with them")
        off, _ = self.train("off", {}, "--matmul-tuning=false")
        for ours, theirs in zip(losses, off):
            self.assertAlmostEqual(ours[0], theirs[0], delta=1e-2)

    def test_an_algorithm_that_varies_is_taken_for_no_operand(self):
        """When products are timed, FP8's codes and scales are not 0. An adapter's second matrix is 0, so that the first
        algorithm stays."""
        varies = {**THIRD, "EMU_CUBLASLT_VARIES": "2", "EMU_CAPABILITY": "9.0"}
        self.train("base", {}, steps=2)
        base = self.path + "/base/checkpoints/" + os.listdir(self.path + "/base/checkpoints")[0]
        shape = ["--hidden-size", 128, "--ffn-hidden-size", 256, "--seq-length", 64]
        runs = (("lora", ["--lora-rank", 8, "--init-from", base]), ("tensorwise", [*shape, "--fp8-format", "hybrid"]),
                ("blockwise", [*shape, "--fp8-format", "e4m3", "--fp8-recipe", "blockwise"]))
        for name, options in chosen(runs, runs[:1]):
            _, said = self.train(name, varies, "--checkpoint-every", 0, *options, steps=1)
            self.assertNotIn(2, [candidate for candidate, *_ in self.algorithms(name)], said)
            self.assertEqual("by the heuristics' first, since no algorithm could be proven" in said, name == "lora", said)

    def test_gelus_derivative_by_the_epilogue(self):
        """One product for each layer's shape has it, with one bias gradient after it. The first forward is the same,
        later losses are nearly so."""
        off, _ = self.train("off", {}, "--matmul-tuning=false")
        runs = (("sums", [], 2), ("full", ["--recompute-granularity", "full"], 2), ("alone", ["--no-add-bias-linear"], 1))
        for name, options, gelu in chosen(runs, runs[:2]):
            losses, said = self.train(name, {"EMU_CUBLASLT_DGELU_TIMES": "200"}, *options)
            fused = [row for row in self.algorithms(name) if row[3]]
            self.assertEqual(fused, [(8, 1, 0, gelu)], name)
            self.assertIn("; 1 by an epilogue that does what comes with them", said)
            plain = off if "bias" not in str(options) else self.train("plain", {}, "--matmul-tuning=false", *options)[0]
            self.assertNotEqual(losses, plain)
            self.assertEqual(losses[0][0], plain[0][0])
            for ours, theirs in zip(losses, plain):
                self.assertAlmostEqual(ours[0], theirs[0], delta=1e-2)
                self.assertAlmostEqual(ours[1] / theirs[1], 1, delta=1e-2)
        self.assertEqual(self.losses("full"), self.losses("sums"))

    @long_test("test_a_run_that_goes_on_has_the_same_bits holds it of other algorithms")
    def test_gelus_derivative_goes_on(self):
        self.train("sums", {"EMU_CUBLASLT_DGELU_TIMES": "200"})
        parts, _ = self.train("parts", {"EMU_CUBLASLT_DGELU_TIMES": "200"}, steps=2)
        parts, _ = self.train("parts", {}, "--resume", "auto")
        self.assertEqual(parts, self.losses("sums"))

    def test_gelus_derivative_is_left_to_ours_elsewhere(self):
        """Adapters add to the gradient before the derivative; other activations have no epilogue; fp32's epilogue would
        be less exact."""
        self.train("base", {}, steps=2)
        base = self.path + "/base/checkpoints/" + os.listdir(self.path + "/base/checkpoints")[0]
        elsewhere = (["--activation", "gelu_erf"], ["--lora-rank", 4, "--init-from", base], ["--precision", "fp32"], ["--activation", "swiglu"],
                     ["--mlp-chunk-tokens", 16, "--recompute-granularity", "full"])
        for options in chosen(elsewhere, elsewhere[:2]):  # the short run's emulator has no engine in fp32
            self.train("else", {"EMU_CUBLASLT_DGELU_TIMES": "200"}, *options, "--checkpoint-every", 0, steps=1)
            self.assertEqual([row for row in self.algorithms("else") if row[1] and row[3]], [], options)
            os.remove(self.path + "/else/" + NAME)

    def test_a_run_that_goes_on_has_the_same_bits(self):
        whole, _ = self.train("whole", THIRD)
        other, _ = self.train("other", SIXTH)
        self.assertNotEqual(whole, other)
        self.train("parts", THIRD, steps=2)
        os.remove(self.path + "/parts/" + NAME) # the checkpoint has it too
        parts, said = self.train("parts", SIXTH, "--resume", "auto")
        self.assertRegex(said, r"(\d+) products, 0 timed in .* s, \1 by \S*step_0*2/" + NAME)
        self.assertEqual(parts, whole)
        self.assertEqual(self.algorithms("parts"), self.algorithms("whole"))

    def test_products_that_the_file_does_not_have_are_timed(self):
        self.train("grows", THIRD, steps=2)
        _, said = self.train("grows", SIXTH, "--resume", "auto", "--micro-batch-size", 1)
        self.assertRegex(said, r"not used +\S+: \d+ of its \d+ products, which are not this run's")
        self.assertEqual({candidate for candidate, *_ in self.algorithms("grows")}, {2, 5})

    def test_another_librarys_file_is_not_used(self):
        self.train("version", THIRD, steps=2)
        _, said = self.train("version", {**SIXTH, "EMU_CUBLASLT_VERSION": "130100"}, "--resume", "auto")
        self.assertRegex(said, r"not used +\S+: of cuBLASLt 130000 on emulated GPU with 3 multiprocessors, here 130100")
        self.assertEqual({candidate for candidate, *_ in self.algorithms("version")}, {5})

    def test_a_broken_file_is_refused_by_its_line(self):
        self.train("broken", {}, "--checkpoint-every", 0, steps=2)
        path = self.path + "/broken/" + NAME
        with open(path) as f:
            lines = f.readlines()
        with open(path, "w") as f:
            f.writelines([*lines[:3], lines[3].replace("depth=", "depth=x"), *lines[4:]])
        result = self.start("broken", {}, "--train-steps", 2, "--checkpoint-every", 0)
        self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        for words in (path + ": line 4: expected depth= and a number", "--matmul-tuning=false"):
            self.assertIn(words, result.stderr)
        self.train("broken", {}, "--matmul-tuning=false", "--checkpoint-every", 0, steps=2)

    def test_a_file_that_cannot_be_written_is_said(self):
        """The file that was there stays."""
        self.train("closed", {}, "--checkpoint-every", 0, steps=2)
        was = self.algorithms("closed")
        path = self.path + "/closed/" + NAME
        refusals = (("/dev/full", "No space left on device"), ("/nowhere/x", "No such file"))
        for target, reason in chosen(refusals, refusals[:1]):
            os.symlink(target, path + ".tmp")
            _, said = self.train("closed", {}, "--micro-batch-size", 1, steps=2)
            self.assertIn("%s: cannot be written: %s" % (path, reason), said)
            self.assertEqual(self.algorithms("closed"), was)
            if os.path.lexists(path + ".tmp"):
                os.remove(path + ".tmp")
            step = self.path + "/closed/checkpoints/" + os.listdir(self.path + "/closed/checkpoints")[0]
            self.assertTrue(os.path.exists(step + "/" + NAME))
            shutil.rmtree(self.path + "/closed/checkpoints")

    def test_other_products_choices_stay_in_the_file(self):
        first, _ = self.train("other", THIRD, "--checkpoint-every", 0)
        was = self.algorithms("other")
        self.train("other", SIXTH, "--checkpoint-every", 0, "--micro-batch-size", 1)
        both = self.algorithms("other")
        self.assertGreater(len(both), len(was))
        self.assertEqual({row[0] for row in both}, {2, 5})
        again, said = self.train("other", {}, "--checkpoint-every", 0)
        self.assertRegex(said, r"(\d+) products, 0 timed in")
        self.assertEqual(again, first)
        self.assertCountEqual(self.algorithms("other"), both)

    def test_tuning_leaves_no_trace(self):
        """If the first algorithms are the fastest, losses are the same as without tuning, wherever a step's buffers
        lie."""
        llama = ["--normalization", "RMSNorm", "--position-embedding-type", "rope", "--activation", "swiglu", "--no-add-bias-linear",
                 "--untie-embeddings-and-output-weights", "--num-query-groups", 1]
        runs = (["--recompute-granularity", "full", "--loss-chunk-tokens", 20],
                [*llama, "--fp8-format", "hybrid", "--fp8-recipe", "delayed", "--fp8-amax-history-len", 2],
                [*llama, "--offload-weights", "--offload-gradients"],
                ["--cpu-offloading-num-layers", 1, "--main-grads-dtype", "bf16", "--hidden-dropout", "0.1"])
        for options in chosen(runs, runs[1:3]):
            capability = {"EMU_CAPABILITY": "9.0"}
            with_it, said = self.train("with", capability, *options, "--checkpoint-every", 0, steps=2)
            self.assertRegex(said, r"\d+ products, \d+ timed in")
            without, _ = self.train("without", capability, *options, "--matmul-tuning=false", "--checkpoint-every", 0, steps=2)
            self.assertEqual(with_it, without, options)
            os.remove(self.path + "/with/" + NAME)

    def test_rank_0_chooses_for_all(self):
        def curve(out, environments, *arguments):
            port, ranks = free_port(), []
            shutil.rmtree(self.path + "/" + out, ignore_errors=True)
            for rank, environment in enumerate(environments):
                one = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "EMU_DEVICES": "2"}
                ranks.append(subprocess.Popen(
                    [*self.command(out, "--train-steps", STEPS, "--check-replicas", 1, "--collectives", "sockets",
                                   "--threads", 1, *arguments), "--rendezvous", "127.0.0.1:%d" % port],
                    env={**os.environ, **environment, **one}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            for rank in ranks:
                said = "".join(rank.communicate(timeout=300))
                self.assertEqual(rank.returncode, 0, said)
            return self.losses(out)
        same, mixed, other = curve("same", [THIRD, THIRD]), curve("mixed", [THIRD, SIXTH]), curve("other", [SIXTH, SIXTH])
        self.assertEqual(mixed, same)
        self.assertNotEqual(other, same)
        for stage in chosen((3,), ()):
            sharded = [curve("sharded", [{}, {}], "--zero-stage", stage, *options) for options in ([], ["--matmul-tuning=false"])]
            self.assertEqual(sharded[0], sharded[1])


if __name__ == "__main__":
    unittest.main()
