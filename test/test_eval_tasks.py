"""--eval-tasks and --perplexity: scripts/convert_tasks.py and the engine against lm-evaluation-harness
(golden/eval_tasks.json has its results for the same tasks and models); scores that do not depend on order, batches or
ranks; what is refused. Needs only Python's standard library."""
import hashlib
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import unittest

import eval_data
import eval_model
from environment import ROOT
from test_cli import Case, PROGRAM, SMALL, run, write_shard

MPIRUN = shutil.which("mpirun")
TOLERANCE = 1e-4  # for a log-likelihood, a sum of some tens of fp32 numbers of about 10
FAST = ["--precision", "fp32", "--threads", 1, "--micro-batch-size", 4]


def pairs(item):
    delimiter = item.get("delimiter", " ")
    if "contexts" in item:
        return [[context, delimiter + item["continuation"]] for context in item["contexts"]]
    return [[item["context"], delimiter + text] for text in item.get("choices", [item.get("continuation")])]


class Scores(Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        with open(os.path.join(ROOT, "test/golden/eval_tasks.json"), encoding="utf-8") as f:
            cls.golden = json.load(f)
        cls.items = {"edges": [dict(item, task="edges") for item in eval_data.make("edges")]}
        for name, arguments in eval_data.write(cls.path).items():
            made = subprocess.run([sys.executable, os.path.join(ROOT, "scripts/convert_tasks.py"), *arguments, "--name", name],
                                  capture_output=True, text=True, encoding="utf-8", timeout=60)
            assert made.returncode == 0, made.stderr
            cls.items[name] = [json.loads(line) for line in made.stdout.splitlines()]
        for name in eval_model.MODELS:
            eval_model.write_model(cls.path + "/" + name, name)

    def write_items(self, name, items):
        path = "%s/%s.jsonl" % (self.path, name)
        with open(path, "w", encoding="utf-8") as f:
            f.write(eval_data.lines(items))
        return path

    def score(self, model, paths, *arguments, ranks=1):
        """Returns what is written of items, by file order, and of tasks, by name; and what is printed."""
        out = self.path + "/scores.out"
        command = ["--init-from", self.path + "/" + model, *[word for path in paths for word in ("--eval-tasks", path)], *FAST,
                   "--eval-tasks-output", out, *arguments]  # fmt: skip
        if ranks > 1:
            result = subprocess.run([MPIRUN, "--oversubscribe", "--bind-to", "none", "-np", str(ranks), PROGRAM, *map(str, command)],
                                    capture_output=True, text=True, timeout=120,
                                    env={**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
        else:
            result = run(*command)
        self.assertEqual(result.returncode, 0, result.stderr)
        with open(out, encoding="utf-8") as f:
            written = [json.loads(line) for line in f]
        table = result.stdout[result.stdout.index("\ntask ") :]
        return [w for w in written if "texts" in w], {w["task"]: w for w in written if "texts" not in w}, table

    def everything(self):
        return self.write_items("everything", [item for name in sorted(self.items) for item in self.items[name]])

    def test_equals_lm_evaluation_harness(self):
        for model in eval_model.MODELS:
            items, tasks, _ = self.score(model, [self.everything()])
            for name, golden in ((name, self.golden[model][name]) for name in sorted(self.items)):
                self.assertEqual(hashlib.sha256(json.dumps([pairs(item) for item in self.items[name]]).encode()).hexdigest(),
                                 golden["texts"], "%s: the texts are others" % name)
                ours = [item for item in items if item["task"] == name]
                self.assertEqual(len(ours), len(golden["log_likelihoods"]))
                for i, item in enumerate(ours):
                    where = "%s, %s, item %d" % (model, name, i)
                    self.assertEqual([text["greedy"] for text in item["texts"]], golden["greedy"][i], where)
                    for text, expected in zip(item["texts"], golden["log_likelihoods"][i], strict=True):
                        self.assertAlmostEqual(text["log_likelihood"], expected, delta=TOLERANCE, msg=where)
                    if "gold" in item:
                        right = [float(item[key] == item["gold"]) for key in ("chosen", "chosen_norm", "chosen_bytes")]
                        self.assertEqual(right, golden["right"][i], where)
                for key in ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "acc_bytes", "acc_bytes_stderr"):
                    if key in golden["scores"]:
                        self.assertAlmostEqual(tasks[name][key], golden["scores"][key], delta=1e-12, msg="%s %s" % (name, key))
                if "perplexity" in golden["scores"]:
                    self.assertAlmostEqual(math.log(tasks[name]["perplexity"]), math.log(golden["scores"]["perplexity"]), delta=TOLERANCE)
            self.assertGreater(tasks["edges"]["cut"], 1)
            self.assertEqual(tasks["arc"]["cut"], 0)

    def test_the_likeliest_tokens_are_seen(self):
        for model in eval_model.MODELS:
            golden = self.golden[model]["greedy"]
            items, tasks, table = self.score(model, [self.write_items("greedy", golden["items"])])
            self.assertTrue(any(greedy for _, greedy in golden["answers"]))
            for item, (expected, greedy) in zip(items, golden["answers"], strict=True):
                self.assertEqual(item["texts"][0]["greedy"], greedy)
                self.assertAlmostEqual(item["texts"][0]["log_likelihood"], expected, delta=TOLERANCE)
            self.assertEqual(tasks["greedy"]["acc"], sum(greedy for _, greedy in golden["answers"]) / len(items))
            self.assertIn("%.4f" % tasks["greedy"]["acc"], table)

    def test_neither_order_nor_ranks_change_a_bit(self):
        items, tasks, table = self.score("llama", [self.everything()])
        scores = {(item["task"], item["id"]): item for item in items}
        everything = [item for name in sorted(self.items) for item in self.items[name]]
        random.Random(1).shuffle(everything)
        halves = [self.write_items("half%d" % i, everything[i::2]) for i in range(2)]
        for ranks in [1] + [3] * bool(MPIRUN):
            shuffled, tasks_now, table_now = self.score("llama", halves, ranks=ranks)
            self.assertEqual({(item["task"], item["id"]): item for item in shuffled}, scores)
            self.assertEqual((tasks_now, table_now), (tasks, table))

    def test_neighbors_change_little(self):
        """Among other items a text has another place in its row, and so in attention's tiles, which round otherwise."""
        everything = [item for name in sorted(self.items) for item in self.items[name]]
        items, _, _ = self.score("gpt2", [self.everything()])
        others, _, _ = self.score("gpt2", [self.write_items("some", everything[::3])], "--micro-batch-size", 3)
        for a, b in zip(items[::3], others, strict=True):
            for x, y in zip(a["texts"], b["texts"], strict=True):
                self.assertAlmostEqual(x["log_likelihood"], y["log_likelihood"], delta=TOLERANCE)

    def test_during_training(self):
        """Tasks are scored at the steps that are asked for and at the end, as a run on the checkpoint scores them;
        losses stay the same."""
        text = self.write_items("bytes", [{"context": "for (int", "choices": [" i = 0", "x"], "gold": 0}, {"context": "", "choices": ["a", "b"], "gold": 1}])
        options = ["--vocab-size", "257", "--train-steps", 5, "--threads", 1, "--precision", "fp32", "--val-every", 2, "--val-steps", 2]
        _, plain = self.train("plain", *options, "--checkpoint-every", 0)
        out, scored = self.train("scored", *options, "--eval-tasks", text, "--eval-tasks-every", 2, "--checkpoint-every", 5)
        tasks = {line["step"]: line["tasks"]["bytes"] for line in scored if "tasks" in line}
        self.assertEqual(sorted(tasks), [2, 4, 5])
        self.assertEqual([(line["loss"], line.get("val_loss")) for line in scored if "loss" in line],
                         [(line["loss"], line.get("val_loss")) for line in plain])
        self.assertEqual(out.stdout.count("\ntask "), 3)
        # without scoring
        again = run("--resume", self.path + "/scored", "--out", self.path + "/scored", "--train-steps", 6)
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertNotIn("\ntask ", again.stdout)
        alone = run("--init-from", self.path + "/scored/checkpoints/step_00000005", "--eval-tasks", text, "--threads", 1, "--precision",
                    "fp32", "--seq-length", 32, "--micro-batch-size", 4, "--eval-tasks-output", self.path + "/alone.out")  # fmt: skip
        self.assertEqual(alone.returncode, 0, alone.stderr)
        with open(self.path + "/alone.out") as f:
            self.assertEqual({k: v for k, v in json.loads(f.readlines()[-1]).items() if k != "task"}, tasks[5])

    def test_validation_beside_them_is_as_without(self):
        """Documents are separate only in attention, or only in positions: scoring tasks, which separates them in each,
        must not add the other."""
        data = self.path + "/documents.bin"
        generator = random.Random(3)
        write_shard(data, [generator.choice([7, generator.randrange(eval_model.V)]) for _ in range(16 * 40 + 1)])
        options = ["--init-from", self.path + "/gpt2", "--eval-only", "--val-data", data, "--val-steps", 10, "--seq-length", 40, *FAST,
                   "--eod-token", 7, "--document-delimiter", "first"]  # fmt: skip
        tasks = ["--eval-tasks", self.write_items("beside", [{"context": "a", "continuation": "b"}])]
        for apart in ("--reset-attention-mask", "--reset-position-ids"):
            losses = {re.search("validation loss .*", run(*options, apart, *more).stdout).group() for more in ([], tasks)}
            self.assertEqual(len(losses), 1, (apart, losses))

    def test_perplexity(self):
        """Windows are as in Hugging Face: each one scores the tokens that the window before it did not score."""
        text = eval_data.text()
        path = self.path + "/text.txt"
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)

        def perplexity(*arguments):
            result = run("--init-from", self.path + "/gpt2", "--perplexity", path, *FAST, *arguments)
            self.assertEqual(result.returncode, 0, result.stderr)
            words = result.stdout.splitlines()[-1].replace(",", "").split()
            self.assertEqual(words[0], path + ":")
            return float(words[2]), float(words[4]), float(words[8]), int(words[10]), int(words[13])

        whole = perplexity("--seq-length", 90, "--perplexity-stride", 90)
        some = perplexity("--seq-length", 90)
        every = perplexity("--seq-length", 90, "--perplexity-stride", 1)
        golden = self.golden["gpt2"]["perplexity"]
        for ours, stride in ((whole, 90), (some, 45), (every, 1)):
            mean, tokens = golden[str(stride)]
            self.assertEqual(ours[3], tokens)
            self.assertAlmostEqual(ours[1], mean, delta=1e-5)
            self.assertAlmostEqual(math.log(ours[0]), mean, delta=1e-5)
            self.assertAlmostEqual(ours[2], mean * tokens / math.log(2) / ours[4], delta=1e-4)
        self.assertIn(len(text.encode()) - every[4], (1, 2, 3))  # all but the first token, which is at most "the"

    def test_what_is_refused(self):
        model = ["--init-from", self.path + "/gpt2", *FAST]
        good = '{"context": "a", "choices": ["b", "c"], "gold": 1}\n'
        bad = {
            '{"context": "a", "choices": ["b"]': ("2", "expected"),
            '{"context": "a", "choices": ["b"]}': ("gold is absent", "expected the number of the right choice"),
            '{"context": "a", "choices": ["b", "c"], "gold": 2}': ("gold is 2", "expected 0 to 1"),
            '{"context": "a", "choices": ["b", "c"], "gold": -1}': ("gold is -1",),
            '{"context": "a", "choices": ["b", "c"], "gold": "1"}': ("gold is a string",),
            '{"context": "a", "choices": [], "gold": 0}': ("choices has 0 texts; expected 1",),
            '{"context": "a", "choices": ["b", 3], "gold": 0}': ("choices[1]",),
            '{"context": "a", "choices": [""], "gold": 0, "delimiter": ""}': ("no token to score",),
            '{"contexts": ["a", "b"], "gold": 0}': ('expected "context" and "choices"',),
            '{"context": "a", "contexts": ["a"], "continuation": "c", "gold": 0}': ('expected "context" and "choices"',),
            '{"context": "a", "continuation": "c", "delimeter": ""}': ('"delimeter"', "delimiter"),
            '{"context": "a", "continuation": "c"}': ("no choices", "some"),
            '{"context": "a", "choices": ["%s", "c"], "gold": 1}' % ("b " * 200): ("tokens to score; expected at most --seq-length",),
            "[]": ("expected",),
        }
        for line, words in bad.items():
            path = self.path + "/bad.jsonl"
            with open(path, "w") as f:
                f.write(good + line + "\n")
            self.refused(*model, "--eval-tasks", path, words=[path + ":2", *words])
        empty = self.path + "/empty.jsonl"
        with open(empty, "w") as f:
            f.write("\n")
        self.refused(*model, "--eval-tasks", empty, words=[empty, "no items"])
        self.refused(*model, "--eval-tasks", self.path + "/none.jsonl", words=["none.jsonl"])
        items = self.write_items("good", [json.loads(good)])
        os.makedirs(self.path + "/bare", exist_ok=True)
        for name in ("config.json", "model.safetensors"):
            shutil.copy("%s/gpt2/%s" % (self.path, name), self.path + "/bare")
        self.refused("--init-from", self.path + "/bare", *FAST, "--eval-tasks", items, words=["tokenizer.json", "bare"])
        self.refused("--eval-tasks", items, words=["--init-from"])
        self.refused(*model, "--eval-tasks-output", "x", words=["--eval-tasks"])
        os.symlink(os.path.basename(items), self.path + "/to_good.jsonl")
        self.refused(*model, "--eval-tasks", items, "--eval-tasks", self.path + "/to_good.jsonl", words=["given twice"])
        self.refused(*model, "--perplexity", items, "--seq-length", 1, words=["--seq-length 1: a window of one token has none to score"])
        for output in (items, self.path + "/to_good.jsonl"):
            self.refused(*model, "--eval-tasks", items, "--eval-tasks-output", output, words=["would be overwritten"])
        with open(items) as f:
            self.assertEqual(json.load(f), json.loads(good))
        self.refused(*model, "--eval-tasks", items, "--generate", "a", words=["--generate and --eval-tasks are two runs"])
        self.refused(*model, "--eval-tasks", items, "--chat", words=["--chat and --eval-tasks are two runs"])
        self.refused(*model, "--perplexity", items, "--chat", words=["--chat and --perplexity are two runs"])
        self.refused(*model, "--perplexity", items, "--perplexity-stride", 97, "--seq-length", 96, words=["--perplexity-stride 97"])
        self.refused(*model, "--perplexity", empty, words=[empty, "expected at least 2"])

    def test_what_the_converter_refuses(self):
        def refused(name, rows, *arguments, words):
            path = self.path + "/raw.jsonl"
            with open(path, "w") as f:
                f.write(rows)
            result = subprocess.run([sys.executable, os.path.join(ROOT, "scripts/convert_tasks.py"), name, path, *arguments],
                                    capture_output=True, text=True, timeout=60)
            self.assertEqual(result.returncode, 2, result.stderr)
            for word in ("convert_tasks.py: ", *words):
                self.assertIn(word, result.stderr)

        refused("boolq", '{"question": "a", "passage": "b"}\n', words=["raw.jsonl:1", '"answer"'])
        refused("lambada", '{"text": "a b"}\n\n{"text": "one"}\n', words=["raw.jsonl:3", "expected a passage"])
        refused("winogrande", '{"sentence": "no blank"}\n', words=["raw.jsonl:1", "expected a _"])
        refused("hellaswag", "{\n", words=["raw.jsonl:1", "not JSON"])
        refused("piqa", '{"goal": "a", "sol1": "b", "sol2": "c"}\n', "--labels", self.path + "/piqa.lst", words=["8 labels; expected 1"])


if __name__ == "__main__":
    unittest.main()
