"""Mixtures of training data, epochs, other data on purpose, the best checkpoint and early stops, and a run's folder where
a checkpoint is asked for. The order of a mixture is unit_mixture.c's. Needs only Python's standard library."""
import json
import os
import random
import struct
import subprocess
import tempfile
import unittest

from environment import ROOT

PROGRAM = os.path.abspath(os.environ.get("TRAIN_GPT", os.path.join(ROOT, "build/train_gpt")))
T = 8
MODEL = ["--num-layers", 1, "--hidden-size", 16, "--num-attention-heads", 2, "--vocab-size", 67, "--seq-length", T, "--micro-batch-size", 2,
         "--global-batch-size", 4, "--hidden-dropout", 0.1, "--lr", "3e-3", "--lr-decay-style", "constant", "--threads", 1, "--device", "cpu",
         "--precision", "fp32", "--val-steps", 2, "--log-every", 5, "--checkpoint-every", 100]
KEPT = ("tokens", "loss", "lr", "grad_norm", "val_loss", "epochs", "val_losses")


def write_shard(path, seed, samples, least=0, below=67):
    generator = random.Random(seed)
    tokens = [generator.randrange(least, below) for _ in range(samples * T + 1)]
    with open(path, "wb") as f:
        f.write(struct.pack("<256i%dH" % len(tokens), 20240520, 1, len(tokens), *[0] * 253, *tokens))


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.path = cls.folder.name
        for seed, (name, samples, least, below) in enumerate((("web_0", 30, 0, 40), ("web_1", 20, 0, 40), ("code", 10, 40, 67), ("math", 16, 20, 50),
                                                              ("web_val", 8, 0, 40), ("code_val", 8, 40, 67))):
            write_shard("%s/%s.bin" % (cls.path, name), seed, samples, least, below)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def run_it(self, *arguments, expect=0):
        """Runs the program in the folder of the data."""
        result = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=100, cwd=self.path)
        self.assertEqual(result.returncode, expect, result.stdout + result.stderr)
        return result

    def refused(self, *arguments, words):
        result = self.run_it(*MODEL, *arguments, "--out", "never", expect=2)
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        self.assertFalse(os.path.exists(self.path + "/never"))
        for word in words:
            self.assertIn(word, result.stderr)

    def log(self, out):
        steps = {}
        with open("%s/%s/log.jsonl" % (self.path, out)) as f:
            for line in f:
                entry = json.loads(line)
                steps.setdefault(entry["step"], {}).update({key: entry[key] for key in KEPT if key in entry})
        return steps

    def state(self, out, step):
        with open("%s/%s/checkpoints/step_%08d/trainer_state.json" % (self.path, out, step)) as f:
            return json.load(f)

    def model(self, out, step):
        with open("%s/%s/checkpoints/step_%08d/model.safetensors" % (self.path, out, step), "rb") as f:
            return f.read()

    def checkpoints(self, out):
        return sorted(os.listdir("%s/%s/checkpoints" % (self.path, out)))


class Mixture(Case):
    DATA = ["--train-data", "0.7 web_?.bin 0.3 code.bin", "--val-data", "3 web_val.bin 1 code_val.bin", "--val-every", 5]

    def test_a_run_goes_on_to_the_sample(self):
        """A run that stops twice, in the middle of epochs, equals one that did not; each set's epochs and validation
        losses are in the log, and the loss is their mean by the weights."""
        whole = self.run_it(*MODEL, *self.DATA, "--train-steps", 20, "--out", "whole").stdout
        self.assertRegex(whole, r"mixture +70 % web: 402 tokens in 2 files, 1.12 epochs by the last step\nmixture +30 % code: 81 tokens in 1 files, 2.4 epochs")
        self.assertIn("epochs trained: 1.12 web, 2.4 code", whole)
        log = self.log("whole")
        self.assertEqual(log[10]["epochs"], {"web": 0.56, "code": 1.2})
        losses = log[20]["val_losses"]
        self.assertAlmostEqual(log[20]["val_loss"], 0.75 * losses["web_val"] + 0.25 * losses["code_val"], delta=1e-12)
        self.assertIn("step 20: validation loss %.4f (web_val %.4f, code_val %.4f)" % (log[20]["val_loss"], losses["web_val"], losses["code_val"]), whole)
        for set_ in ("web_val", "code_val"):
            own = self.run_it("--init-from", "whole", "--seq-length", T, "--eval-only", "--val-data", set_ + ".bin", "--val-steps", 2, "--micro-batch-size",
                              2, "--precision", "fp32", "--threads", 1, "--device", "cpu").stdout
            self.assertAlmostEqual(float(own.split("validation loss ")[1].split(",")[0]), losses[set_], delta=1e-7)
        for steps in (7, 12):
            self.run_it(*MODEL, *self.DATA, "--train-steps", steps, "--val-every", 5, "--resume", "auto", "--out", "parts")
        self.run_it("--resume", "parts", "--train-steps", 20)
        parts = self.log("parts")
        for step in (7, 12): # the parts validate and log after their last steps, too
            for key in ("val_loss", "val_losses", "epochs"):
                parts[step].pop(key)
        self.assertEqual(log, parts)
        self.assertEqual(self.model("whole", 20), self.model("parts", 20))

    def test_other_data_on_purpose(self):
        self.run_it(*MODEL, *self.DATA, "--train-steps", 10, "--out", "anneal")
        other = ["--resume", "anneal", "--train-steps", 20, "--train-data", "1 code.bin 4 math.bin"]
        self.assertRegex(self.run_it(*other, expect=2).stderr, r"the weight of code is 1, in integers, but it was 7 in .*--new-data")
        self.assertRegex(self.run_it(*other[:4], "--train-data", "math.bin", expect=2).stderr, "mixes 1 sets of files, but it was 2 in .*--new-data")
        result = self.run_it(*other, "--new-data").stdout
        self.assertRegex(result, "new data +from here on; step, schedule and the optimizer's moments are kept")
        state = self.state("anneal", 20)
        self.assertEqual(state["data_start"], 40)
        self.assertEqual([(part["name"], part["weight"], part["before"]) for part in state["parts"]], [("code", 1, 12), ("math", 4, 0)])
        self.assertEqual(self.log("anneal")[20]["epochs"], {"code": 2.0, "math": 2.0})
        # The same command again, as after a preemption, changes nothing more.
        again = self.run_it(*other[:2], "--train-steps", 22, *other[4:], "--new-data").stdout
        self.assertRegex(again, "new data +none: they are the checkpoint's")
        self.assertEqual(self.state("anneal", 22)["data_start"], 40)

    def test_a_set_that_is_repeated_often_is_said(self):
        result = self.run_it(*MODEL, "--train-data", "1 web_?.bin 9 math.bin", "--train-steps", 25, "--checkpoint-every", 0, "--out", "often").stdout
        self.assertEqual(result.count("arXiv"), 1, result)
        self.assertIn("note: math is taken 5.625 times: beyond about 4 times the same tokens add little (arXiv 2305.16264)\n", result)

    def test_mistakes(self):
        for data, words in (("-1 web_?.bin 2 code.bin", "the weight of web_?.bin is -1; expected 0 or more"),
                            ("0 web_?.bin 0 code.bin", "the weights' sum is 0"), ("1 web_?.bin 1", "found '1' and nothing behind it"),
                            ("1 web_?.bin 1 none_*.bin", "no file matches 'none_*.bin'")):
            self.refused("--train-data", data, words=["--train-data: ", words])
            self.refused("--train-data", "code.bin", "--val-data", data, words=["--val-data: ", words])
        self.refused("--train-data", "code.bin", "--new-data", words=["--new-data needs --resume"])


class Epochs(Case):
    def test_they_set_the_steps(self):
        """1.5 epochs of 50 samples are 75, in steps of 4."""
        data = ["--train-data", "web_?.bin"]
        result = self.run_it(*MODEL, *data, "--train-epochs", 1.5, "--out", "epochs").stdout
        self.assertRegex(result, r"steps +19, 1.52 epochs")
        self.assertEqual(max(self.log("epochs")), 19)
        result = self.run_it(*MODEL, "--train-data", "1 web_?.bin 0 code.bin", "--train-epochs", 1.5, "--out", "weighed").stdout
        self.assertRegex(result, r"steps +19, 1.52 epochs")  # data of weight 0 have no epoch
        self.assertRegex(result, r"matmul peak +not measured, .*; MFU is left out")
        self.refused(*data, "--train-epochs", 1.5, "--train-steps", 18, words=["--train-epochs 1.5 makes 19 steps of these data, but --train-steps is 18"])
        self.refused("--train-epochs", 1, "--plan", words=["--train-epochs 1 needs --train-data"])
        self.run_it("--resume", "epochs", "--train-steps", 20) # given now, in place of the epochs
        # An epoch of a mixture is one of all its samples; of new data it counts from where these begin.
        self.run_it("--resume", "epochs", "--train-data", "1 math.bin 1 code.bin", "--new-data", "--train-epochs", 0.5)
        self.assertEqual(max(self.log("epochs")), 24)
        self.assertIn("nothing is left to do", self.run_it("--resume", "epochs").stdout)


class Best(Case):
    def test_the_best_checkpoint_stays_and_a_run_stops_early(self):
        """Random data: the loss of the validation falls, then rises."""
        data = ["--train-data", "code.bin", "--val-data", "code_val.bin", "--val-every", 4]
        command = [*MODEL, *data, "--lr", 6e-3, "--train-steps", 400, "--checkpoint-every", 10, "--keep-checkpoints", 1, "--save-best", "--early-stop", 3,
                   "--resume", "auto", "--out", "best"]
        result = self.run_it(*command).stdout
        losses = {step: entry["val_loss"] for step, entry in self.log("best").items() if "val_loss" in entry}
        best, last = min(losses, key=losses.get), max(losses)
        self.assertEqual(last, best + 12)
        self.assertGreater(best, 4)
        self.assertIn("step %d: 3 validations in a row without a lower loss than step %d's: --early-stop ends the run" % (last, best), result)
        self.assertEqual(self.checkpoints("best"), ["best", "step_%08d" % best, "step_%08d" % last])
        self.assertEqual(os.readlink(self.path + "/best/checkpoints/best"), "step_%08d" % best)
        evaluation = self.run_it("--init-from", "best/checkpoints/best", "--seq-length", T, "--eval-only", *data[2:4], "--val-steps", 2, "--micro-batch-size", 2,
                                 "--precision", "fp32", "--threads", 1, "--device", "cpu").stdout
        self.assertAlmostEqual(float(evaluation.split("validation loss ")[1].split(",")[0]), losses[best], delta=1e-7)
        again = self.run_it(*command).stdout
        self.assertIn("--early-stop ends the run", again)
        self.assertEqual(max(self.log("best")), last)
        # A kill between a checkpoint and its link. A run that goes on in another folder has no such checkpoint there.
        self.run_it(*MODEL, *data, "--train-steps", 4, "--save-best", "--out", "killed")
        os.remove(self.path + "/killed/checkpoints/best")
        result = self.run_it("--resume", "killed/checkpoints/step_00000004", "--out", "elsewhere")
        self.assertEqual(result.stderr, "")
        self.assertFalse(os.path.lexists(self.path + "/elsewhere/checkpoints/best"))
        self.run_it("--resume", "killed")
        self.assertEqual(os.readlink(self.path + "/killed/checkpoints/best"), "step_00000004")
        for option in (["--save-best"], ["--early-stop", 3]):
            self.refused("--train-data", "code.bin", *option, words=[option[0] + " needs validations: name --val-data"])


class Folder(Case):
    def test_a_runs_folder_is_its_newest_checkpoint(self):
        start = [*MODEL, "--train-data", "code.bin", "--out", "run"]
        self.run_it(*start, "--train-steps", 4, "--checkpoint-every", 2)
        self.assertRegex(self.run_it(*MODEL, "--init-from", "run", "--train-data", "code.bin", "--train-steps", 1, "--out", "other").stdout,
                         "begins from +run/checkpoints/step_00000004")
        with open(self.path + "/run/checkpoints/step_00000004/model.safetensors", "r+b") as f:
            f.truncate(100)
        result = self.run_it(*MODEL, "--init-from", "run", "--train-data", "code.bin", "--train-steps", 1, "--checkpoint-every", 0, "--out", "third").stdout
        self.assertRegex(result, "passed over: .*step_00000004(.|\n)*begins from +run/checkpoints/step_00000002")
        os.makedirs(self.path + "/empty/checkpoints")
        self.assertIn("--init-from empty: empty: holds no checkpoint", self.run_it("--init-from", "empty", "--generate", "a", expect=2).stderr)

    def test_a_run_goes_on_in_its_own_folder(self):
        """--resume DIR without --out."""
        self.run_it(*MODEL, "--train-data", "code.bin", "--out", "deep/own", "--train-steps", 2, "--checkpoint-every", 1)
        for number, folder in enumerate(("deep/own", "deep/own/", "deep/own/checkpoints", "deep/own/checkpoints/step_00000005")):
            self.run_it("--resume", folder, "--train-steps", 3 + number)
            self.assertIn("step_%08d" % (3 + number), self.checkpoints("deep/own"))
        self.assertFalse(os.path.exists(self.path + "/out"))
        self.run_it("--resume", "deep/own", "--train-steps", 7, "--out", "elsewhere")
        self.assertEqual(self.checkpoints("elsewhere"), ["step_00000007"])


if __name__ == "__main__":
    unittest.main()
