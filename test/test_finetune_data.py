"""Shards to finetune on as a run meets them. The loss is the mean over the learned tokens of the whole batch, however
it is split; examples in one row do not see each other; what is damaged is refused. Needs only Python's standard
library."""
import importlib.util
import json
import os
import random
import re
import shutil
import struct
import subprocess
import unittest

from finetune_shard import write_rows
from environment import ROOT
from test_cli import PROGRAM, Case, run, write_shard

V, T, ROWS = 61, 24, 12
MODEL = ["--num-layers", 2, "--hidden-size", 32, "--num-attention-heads", 2, "--vocab-size", V, "--threads", 1, "--precision", "fp32",
         "--init-method-std", "0.2", "--lr", "1e-2", "--val-steps", 1]  # fmt: skip
MPIRUN = shutil.which("mpirun")
TOLERANCE = 1e-6  # sums in another order, 2^-24 each


def example(generator, prompt, answer):
    return [(generator.randrange(1, V), i >= prompt) for i in range(prompt + answer)]


def make_rows(seed):
    """Makes rows with from one to nearly all tokens learned, so that a mean of means is another number."""
    generator = random.Random(seed)
    rows = []
    for i in range(ROWS):
        rows.append([example(generator, 8, 1)] if i % 3 == 0
                    else [example(generator, 3, 5), example(generator, 2, 10)] if i % 3 == 1 else [example(generator, 1, 23)])
    return rows


class FinetuneData(Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.rows = make_rows(1)
        cls.shard = cls.path + "/rows.bin"
        write_rows(cls.shard, cls.rows, T)

    def train(self, name, *arguments, data=None, ranks=1, expect=0):
        out = os.path.join(self.path, name)
        command = [*MODEL, "--train-data", data or self.shard, "--out", out, "--train-steps", 3, "--global-batch-size", ROWS,
                   "--val-every", 0, "--checkpoint-every", 0, *arguments]  # fmt: skip
        if ranks > 1:
            program = [MPIRUN, "--oversubscribe", "--bind-to", "none", "-np", str(ranks), PROGRAM]
            result = subprocess.run([*program, *map(str, command)], capture_output=True, text=True, timeout=120,
                                    env={**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
        else:
            result = run(*command)
        self.assertEqual(result.returncode, expect, result.stderr)
        if expect:
            return result.stderr
        with open(out + "/log.jsonl") as f:
            return [json.loads(line) for line in f]

    def evaluate(self, name, rows, **keywords):
        """Returns (mean loss, targets) of run `model`'s trained model."""
        path = os.path.join(self.path, name + ".bin")
        write_rows(path, rows, T, **keywords)
        result = run("--init-from", self.model, "--eval-only", "--val-data", path, "--micro-batch-size", len(rows), "--val-steps", 1,
                     "--threads", 1, "--precision", "fp32")
        self.assertEqual(result.returncode, 0, result.stderr)
        loss, targets = re.search(r"validation loss ([0-9.]+), .* over (\d+) tokens", result.stdout).groups()
        return float(loss), int(targets)

    def test_the_mean_is_over_the_learned_tokens_of_the_whole_batch(self):
        whole = self.train("whole", "--micro-batch-size", ROWS)
        learned = sum(sum(learned for _, learned in document[1:]) for row in self.rows for document in row)
        self.assertEqual([line["targets"] for line in whole], [learned] * 3)
        splits = [(6, 1), (1, 1)] + ([(3, 2), (1, 2), (1, 4)] if MPIRUN else [])
        for batch, ranks in splits:
            stage = ["--zero-stage", 2] if (batch, ranks) == (1, 2) else []
            split = self.train("split-%d-%d" % (batch, ranks), "--micro-batch-size", batch, *stage, ranks=ranks)
            for a, b in zip(whole, split):
                self.assertEqual(a["targets"], b["targets"])
                for what in ("loss", "grad_norm"):
                    self.assertAlmostEqual(a[what] / b[what], 1, delta=TOLERANCE, msg="%s, %d x %d" % (what, ranks, batch))

    def make_model(self):
        self.model = self.path + "/model/checkpoints/step_00000003"
        if not os.path.exists(self.model):
            self.train("model", "--micro-batch-size", ROWS, "--checkpoint-every", 3)

    def test_examples_are_alone(self):
        """The loss of all rows follows from the losses of single examples, each in a row of its own."""
        self.make_model()
        loss, targets = self.evaluate("all", self.rows)
        total, count = 0, 0
        for i, document in enumerate(document for row in self.rows for document in row):
            alone, number = self.evaluate("alone", [[document]])
            total, count = total + alone * number, count + number
        self.assertEqual(targets, count)
        self.assertAlmostEqual(loss / (total / count), 1, delta=TOLERANCE)
        means = [self.evaluate("row", [row])[0] for row in self.rows]
        self.assertGreater(abs(sum(means) / len(means) - loss), 1e-3)  # a mean of means would show

    def test_what_does_not_count_changes_no_bit(self):
        self.make_model()
        loss = self.evaluate("plain", self.rows[:4])
        self.assertEqual(self.evaluate("last", self.rows[:4], last=7), loss)
        padded = [row + [[(9, False)] * (T - sum(map(len, row)))] if sum(map(len, row)) < T else row for row in self.rows[:4]]
        self.assertEqual(self.evaluate("padded", padded), loss)
        # Other documents in the row.
        other = [[row[0], [(3, False)] * len(row[1])] if len(row) > 1 else row for row in self.rows[1:2]]
        first = [[row[0]] for row in self.rows[1:2]]
        self.assertEqual(self.evaluate("other", other), self.evaluate("first", first))

    def test_validation_of_few_rows(self):
        """All of them count, whatever the batch is; rows beyond the last one do not."""
        self.make_model()
        loss, targets = self.evaluate("few", self.rows[:5])
        for batch in (2, 3, 8):
            result = run("--init-from", self.model, "--eval-only", "--val-data", self.path + "/few.bin", "--micro-batch-size", batch, "--val-steps", 9,
                         "--threads", 1, "--precision", "fp32")
            other, number = re.search(r"validation loss ([0-9.]+), .* over (\d+) tokens", result.stdout).groups()
            self.assertEqual(int(number), targets)
            self.assertAlmostEqual(float(other) / loss, 1, delta=TOLERANCE)

    def test_a_batch_without_loss_updates_nothing(self):
        rows = [[[(5, False)] * T] for _ in range(ROWS)] + [[example(random.Random(2), 2, 20)]] * ROWS
        path = self.path + "/without.bin"
        write_rows(path, rows, T)
        out = self.path + "/without"
        result = run(*MODEL, "--train-data", path, "--out", out, "--train-steps", 12, "--micro-batch-size", 1, "--val-every", 0,
                     "--checkpoint-every", 0)
        self.assertEqual(result.returncode, 0, result.stderr)
        with open(out + "/log.jsonl") as f:
            lines = [json.loads(line) for line in f]
        without = [line["step"] for line in lines if line.get("targets") == 0]
        self.assertTrue(0 < len(without) < 12)
        with open(out + "/config.json") as f:
            self.assertEqual(json.load(f)["skip_nonfinite"], 0)  # a step without targets is not counted as a skip
        for step in without:
            self.assertIn("step %d: no token of its batch has loss; nothing was updated" % step, result.stdout)

    def test_the_length_of_a_row_is_the_sequence_length(self):
        out = self.path + "/length"
        result = run(*MODEL, "--train-data", self.shard, "--out", out, "--train-steps", 1, "--val-every", 0)
        self.assertIn("a token sees only its own document", result.stdout)
        with open(out + "/config.json") as f:
            config = json.load(f)
        self.assertEqual((config["seq_length"], config["reset_attention_mask"], config["reset_position_ids"]), (T, True, True))
        self.assertIn("rows of %d tokens; expected --seq-length 20" % T, self.train("short", "--seq-length", 20, expect=2))

    def test_ordinary_shards_beside_them(self):
        """Validation data without an end-of-text token are one document a sample, and lose no targets."""
        plain = self.path + "/plain_val.bin"
        write_shard(plain, [random.Random(3).randrange(V) for _ in range(4 * T + 1)])
        self.train("beside", "--val-data", plain, "--val-every", 3, "--micro-batch-size", 4)
        result = run(*MODEL, "--train-data", plain, "--val-data", self.shard, "--val-every", 1, "--seq-length", T, "--out", self.path + "/x")
        self.assertEqual(result.returncode, 2)
        self.assertIn("add --separate-documents", result.stderr)
        both = self.path + "/rows*.bin," + plain
        self.assertIn("mixed formats", self.train("mixed", "--seq-length", T, data=both, expect=2))

    def test_damaged(self):
        path = self.path + "/damaged.bin"
        write_rows(path, [[[(3, False), (4, True)]]] * ROWS, T)
        with open(path, "r+b") as f:  # the first token of each row begins a document, and is learned
            f.seek(1024 + (ROWS * T + 1) * 2 + -((ROWS * T + 1) * 2) % 8)
            f.write(b"\xff" * 36)
        message = self.train("damaged", data=path, expect=2)
        self.assertIn("begins a document and has loss", message)
        write_rows(path, [[[(3, False), (4, True)]]] * ROWS, T, last_bits=(True, False))
        self.assertIn("begins a document and has loss", self.train("behind", data=path, expect=2))
        write_rows(path, [[[(V + 3, False), (4, True)]]] * ROWS, T)
        self.assertIn("by a tokenizer of %d tokens" % (V + 4), self.train("large", data=path, expect=2))
        write_rows(path, [[[(V + 3, False), (4, True)]]] * ROWS, T, vocabulary=V)
        self.assertIn("outside the vocabulary", self.train("larger", data=path, expect=2))
        write_rows(path, [[[(3, False), (4, False)]]] * ROWS, T, learned=1)
        self.assertIn("has loss", self.train("nothing", "--val-data", path, "--val-every", 1, expect=2))


class Readme(Case):
    """README's commands, from chats to an answer, on a model of another size and with fewer steps."""

    @unittest.skipUnless(importlib.util.find_spec("jinja2"), "the package 'jinja2' is not installed")
    def test_its_lines_work_as_they_stand(self):
        with open(os.path.join(ROOT, "README.md")) as file:
            lines = re.search(r"## Finetune a model\n\n```\n(.*?)```", file.read(), re.DOTALL)[1]
        self.assertLessEqual(len(lines.strip().split("\n")), 10)
        model = self.path + "/made"
        result = run("--vocab-size", 257, "--num-layers", 2, "--hidden-size", 64, "--num-attention-heads", 4, "--seq-length", 64, "--threads", 1,
                     "--max-position-embeddings", 256, "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--activation", "swiglu",
                     "--no-add-bias-linear", *self.data, "--train-steps", 2, "--val-every", 0, "--out", model)  # fmt: skip
        self.assertEqual(result.returncode, 0, result.stderr)
        lines, found = re.subn("^scripts/get.py .*\nMODEL=.*$", "MODEL=%s/checkpoints/step_00000002" % model, lines, flags=re.MULTILINE)
        self.assertEqual(found, 1)
        lines = lines.replace(" --tokenizer $MODEL", "")  # the model's tokens are bytes
        lines = lines.replace("--train-steps 60", "--train-steps 60 --threads 1").replace("seq 400", "seq 100")
        os.makedirs(self.path + "/home/data")
        os.makedirs(self.path + "/home/build")
        os.symlink(os.path.join(ROOT, "scripts"), self.path + "/home/scripts")
        os.symlink(PROGRAM, self.path + "/home/build/train_gpt")
        done = subprocess.run(["sh", "-eu", "-c", lines], cwd=self.path + "/home", capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("[[I am train_gpt.<|endoftext|>]]", done.stdout)
        self.assertRegex(done.stdout.split("chat_format.json\n")[1], r"\S")


if __name__ == "__main__":
    unittest.main()
