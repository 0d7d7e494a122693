"""scripts/bench_to_loss.py: where a loss is reached, ratios to the baseline, what is run again; on made-up logs and one short run."""
import json
import os
import re
import shlex
import stat
import subprocess
import sys
import tempfile
import unittest
import xml.dom.minidom

from environment import ROOT
from test_cli import PROGRAM, write_shard

sys.dont_write_bytecode = True
SCRIPT = os.path.join(ROOT, "scripts", "bench_to_loss.py")
sys.path.insert(0, os.path.dirname(SCRIPT))
# pylint: disable=wrong-import-position
import bench_to_loss  # noqa: E402

# An engine whose loss falls from 5 by 100 lr a step, whose seed adds a hundredth, whose token takes 1 us with --micro-batch-size
# 8 and 2 us with 4; validates every 10 steps. It notes its starts in the folder's "starts", and ends early where "limit" says so.
ENGINE = """#!%s
import json, os, sys
o = dict(zip(sys.argv[1::2], sys.argv[2::2]))
out, steps, every, rows = o["--out"], int(o["--train-steps"]), int(o["--val-every"]), int(o["--micro-batch-size"])
here = os.path.dirname(os.path.abspath(__file__))
open(here + "/starts", "a").write(os.path.basename(os.path.dirname(out)) + "/" + os.path.basename(out) + "\\n")
last = min(steps, int(open(here + "/limit").read())) if os.path.exists(here + "/limit") else steps
with open(out + "/log.jsonl", "w") as log:
    for step in range(1, last + 1):
        loss = 5 - 100 * float(o["--lr"]) * step + 0.01 * int(o.get("--seed", 0))
        tokens = 128 * rows
        row = {"step": step, "tokens": tokens * step, "loss": loss, "step_ms": tokens * 8 / rows / 1e3}
        if step == 3:
            row["step_ms"] *= 100  # of what a stretch leaves out
        log.write(json.dumps(row) + "\\n")
        if every and step %% 10 == 0:
            log.write(json.dumps({"step": step, "val_loss": loss}) + "\\n")
print("broken off" if last < steps else "done")
sys.exit(last < steps)
""" % sys.executable


class MadeUp(unittest.TestCase):
    def setUp(self):
        self.scratch = tempfile.TemporaryDirectory()
        self.path = self.scratch.name
        self.engine = os.path.join(self.path, "engine")
        with open(self.engine, "w", encoding="utf-8") as file:
            file.write(ENGINE)
        os.chmod(self.engine, os.stat(self.engine).st_mode | stat.S_IXUSR)

    def tearDown(self):
        self.scratch.cleanup()

    def bench(self, *arguments, recipes=("a=--train-steps 100 --lr 1e-4", "b=--train-steps 100 --lr 2e-4")):
        return subprocess.run([sys.executable, SCRIPT, "--model", "demo", "--data", "t", "v", "--out", self.path + "/out", "--train-gpt",
                               self.engine, "--recipe", *recipes, *arguments], capture_output=True, text=True, check=False)

    def rows(self, *arguments, **keywords):
        result = self.bench(*arguments, **keywords)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        with open(self.path + "/out/demo/table.json", encoding="utf-8") as file:
            return result.stdout, {row["recipe"]: row for row in json.load(file)["recipes"]}

    def starts(self):
        with open(self.path + "/starts", encoding="utf-8") as file:
            return file.read().split()

    def test_tokens_and_time_to_the_target(self):
        # a loses 0.01 a step, b 0.02, c 0.02 by half the tokens a step, each of which takes twice as long
        text, rows = self.rows("--seeds", "1", "2", "--target", "4.315", "--time-rounds", "2", recipes=(
            "a=--train-steps 100 --lr 1e-4", "b=--train-steps 100 --lr 2e-4", "c=--train-steps 100 --lr 2e-4 --micro-batch-size 4"))
        for name, steps, tokens, rate in (("a", 70, 1024, 1e-6), ("b", 35, 1024, 1e-6), ("c", 35, 512, 2e-6)):
            for low_high, step in (("low", steps - 0.5 * steps / 70), ("high", steps + 0.5 * steps / 70)):
                self.assertAlmostEqual(rows[name]["steps"][low_high], step)
                self.assertAlmostEqual(rows[name]["tokens"][low_high], step * tokens)
                self.assertAlmostEqual(rows[name]["seconds"][low_high], step * tokens * rate)
            self.assertAlmostEqual(rows[name]["step_ms"], 1.024)
        for name, tokens, time in (("a", 1, 1), ("b", 0.5, 0.5), ("c", 0.25, 0.5)):
            self.assertAlmostEqual(rows[name]["tokens_ratio"]["mean"], tokens)
            self.assertAlmostEqual(rows[name]["time_ratio"]["mean"], time)
        self.assertIn("| c | 2 of 2 | 3.0150 (3.0100 to 3.0200) | 17.9K (17.8K to 18K) | 0.25 | 1.024 |", text)

    def test_time_without_rounds_is_the_sum_of_steps(self):
        _, rows = self.rows("--seeds", "0", "--target", "4.3", "--time-rounds", "0")
        self.assertAlmostEqual(rows["a"]["seconds"]["mean"], (70 + 99) * 1.024e-3)
        self.assertAlmostEqual(rows["b"]["seconds"]["mean"], (35 + 99) * 1.024e-3)
        self.assertAlmostEqual(rows["b"]["time_ratio"]["mean"], 134 / 169)

    def test_every_seed_of_the_baseline_reaches_its_own_target(self):
        _, rows = self.rows("--time-rounds", "0")
        self.assertEqual(rows["a"]["reached"], [1, 2, 3])
        self.assertAlmostEqual(rows["a"]["steps"]["high"], 100)
        self.assertAlmostEqual(rows["a"]["steps"]["low"], 98)

    def test_a_recipe_that_does_not_reach_it_says_so(self):
        text, rows = self.rows("--time-rounds", "0", "--target", "3.5")
        self.assertEqual(rows["a"]["reached"], [])
        self.assertIsNone(rows["b"]["time_ratio"])  # there is nothing to compare it with
        self.assertRegex(text, r"\| a \| not reached \| 4\.0200 \(.*\) \| - \| - \| 1\.024 \| - \| - \|")
        self.assertRegex(text, r"\| b \| 3 of 3 \|")
        _, rows = self.rows("--time-rounds", "0", "--target", "4.015")
        self.assertEqual(rows["a"]["reached"], [1])
        self.assertEqual(list(rows["b"]["reached"]), [1, 2, 3])
        self.assertAlmostEqual(rows["b"]["tokens_ratio"]["mean"], 0.5)

    def test_recipes_take_turns(self):
        self.rows("--time-rounds", "2", "--seeds", "7", "8")
        self.assertEqual(self.starts(), ["a/time_0", "b/time_0", "a/time_1", "b/time_1", "a/seed_7", "b/seed_7", "a/seed_8", "b/seed_8"])

    def test_what_is_there_is_not_run_again(self):
        limit = self.path + "/limit"
        with open(limit, "w", encoding="utf-8") as file:
            file.write("50")
        result = self.bench("--seeds", "1", "--time-rounds", "1")
        self.assertEqual(result.returncode, 2)
        self.assertIn("the run ended with status 1: broken off", result.stderr)
        os.remove(limit)
        first, _ = self.rows("--seeds", "1", "--time-rounds", "1")
        self.assertEqual(self.starts(), ["a/time_0", "b/time_0", "a/seed_1", "a/seed_1", "b/seed_1"])
        again, _ = self.rows("--seeds", "1", "--time-rounds", "1")
        self.assertEqual(again, first[first.index("Validation loss"):])
        self.rows("--seeds", "1", "--time-rounds", "0", recipes=("a=--train-steps 100 --lr 1e-4", "b=--train-steps 100 --lr 3e-4"))
        self.assertEqual(self.starts()[5:], ["b/seed_1"])  # its options are others now

    def test_mistakes(self):
        for recipes, arguments, complaint in (
                (("none",), (), "expected NAME=OPTIONS or one of adam"), (("a=", "a="), (), "a name is given twice"),
                (("../a=",), (), "names a folder"), (("a=--micro-batch-size 7",), (), "does not divide the 512 sequences"),
                (("a=--train-steps 5",), (), "--train-steps is 5"), (("a=",), ("--train-gpt", self.path + "/no"), "no such program")):
            result = self.bench(*arguments, recipes=recipes)
            self.assertEqual(result.returncode, 2)
            self.assertIn(complaint, result.stderr)
        os.makedirs(self.path + "/out/demo/a/seed_1/mine")
        self.assertIn("was not made by this script", self.bench("--time-rounds", "0").stderr)

    def test_picture(self):
        self.rows("--time-rounds", "0", "--seeds", "1", "2")
        picture = xml.dom.minidom.parse(self.path + "/out/demo/picture.svg")
        lines = [line.getAttribute("points").split() for line in picture.getElementsByTagName("polyline")]
        self.assertEqual([len(points) for points in lines], [10] * 12)  # two panels, two recipes, two seeds and their mean
        ends = [tuple(map(float, points[-1].split(","))) for points in lines]
        self.assertAlmostEqual(ends[2][0], bench_to_loss.LEFT + bench_to_loss.PANEL)  # the most tokens: the right edge
        self.assertGreater(ends[2][1], 0)
        self.assertLess(ends[2][1], ends[5][1])  # the lower loss is the lower line
        self.assertEqual(len(re.findall("stroke-dasharray", picture.toxml())), 2)  # the target


class Demo(unittest.TestCase):
    def test_make_demo_trains_by_the_recipe(self):
        with open(os.path.join(ROOT, "scripts", "demo.sh"), encoding="utf-8") as file:
            text = file.read()
        words = shlex.split(re.search(r"build/train_gpt (.*?) \"\$@\"", text, re.S).group(1).replace("\\\n", " "))
        demo = dict(zip(words[::2], words[1::2]))
        model = bench_to_loss.MODELS["demo"]
        recipe = bench_to_loss.Recipe("muon", model, model.recipes["muon"], ("${data}_train_*.bin", "${data}_val_*.bin"))
        apart = {"--out", "--val-every", "--sample-every", "--sample-count", "--temperature", "--log-every"}
        options = dict(zip(recipe.options[::2], recipe.options[1::2]))
        self.assertEqual({name: value for name, value in demo.items() if name not in apart},
                         {name: value for name, value in options.items() if name not in apart})

    @staticmethod
    def words_of(picture):
        return [node.firstChild.data for node in xml.dom.minidom.parse(os.path.join(ROOT, "docs", picture)).getElementsByTagName("text")]

    def test_the_committed_pictures_are_of_these_recipes(self):
        """docs/demo_loss.svg is of as many steps and tokens as make demo; docs/recipes.svg of the target and recipes that its page has."""
        with open(os.path.join(ROOT, "scripts", "demo.sh"), encoding="utf-8") as file:
            demo = file.read().split("build/train_gpt --preset demo", 1)[1]
        steps, sequences = (int(re.search(rf"--{name} (\d+)", demo).group(1)) for name in ("train-steps", "micro-batch-size"))
        plan = subprocess.run([PROGRAM, "--preset", "demo", "--micro-batch-size", str(sequences), "--plan=full"], capture_output=True, text=True, check=True)
        length = int(re.search(r"logits +[\d,]+ tokens at a time, of ([\d,]+)", plan.stdout).group(1).replace(",", "")) // sequences
        words = self.words_of("demo_loss.svg")
        title = re.match(r"training loss ([\d.]+), validation loss ([\d.]+), ([\d.]+)M tokens", words[1])
        self.assertAlmostEqual(float(title[3]), 1e-6 * steps * sequences * length, places=2)
        self.assertIn(f"{steps:,}", words)
        self.assertEqual(words[0], "Loss: demo")
        with open(os.path.join(ROOT, "docs", "recipes.md"), encoding="utf-8") as file:
            page = file.read()
        table = page.split("## The demo's model", 1)[1].split("![", 1)[0]
        words = self.words_of("recipes.svg")
        target = re.search(r"the target, ([\d.]+)", " ".join(words))[1]
        self.assertIn(f"tokens to {target} |", table)
        recipes = re.findall(r"^\| `(\w+)`", table, re.M)
        self.assertEqual([word for word in words if word in recipes], recipes)
        low, high = map(float, re.search(rf"`muon`: {steps} steps.*? \| [\d.]+ \(([\d.]+) to ([\d.]+)\)", table).groups())
        self.assertTrue(low <= float(title[2]) <= high, (low, title[2], high))

    def test_the_line_that_the_demo_prints_generates(self):
        """In a folder with this tree's programs and scripts, three steps long: the last line, as a user would copy it."""
        with tempfile.TemporaryDirectory() as folder:
            os.symlink(os.path.join(ROOT, "scripts"), folder + "/scripts")
            os.mkdir(folder + "/build")
            os.symlink(PROGRAM, folder + "/build/train_gpt")
            os.mkdir(folder + "/text")
            for i in range(64):  # of which some fall to validation
                with open("%s/text/%d.h" % (folder, i), "w", encoding="ascii") as file:
                    file.write("#include <stdio.h>\nint a%d(void) { return puts(\"a\") < 0; }\n" % i * 20)
            short = ["--train-steps", "3", "--lr-warmup-steps", "1", "--checkpoint-every", "3", "--val-every", "0", "--sample-every", "0"]
            demo = subprocess.run(["sh", "scripts/demo.sh", "text", *short], cwd=folder, capture_output=True, text=True, timeout=300)
            self.assertEqual(demo.returncode, 0, demo.stdout + demo.stderr)
            self.assertLess(len(re.split(r"^step ", demo.stdout, flags=re.M)[0].splitlines()), 30, "lines before the first loss")
            line = demo.stdout.splitlines()[-1]
            self.assertRegex(line, "^try: build/train_gpt ")
            generated = subprocess.run(["sh", "-c", line[len("try: "):]], cwd=folder, capture_output=True, text=True, timeout=300)
            self.assertEqual(generated.returncode, 0, generated.stderr)
            self.assertRegex(generated.stdout, "(?m)^#include")


class Engine(unittest.TestCase):
    def test_short_run(self):
        with tempfile.TemporaryDirectory() as path:
            text = ("for (int i = 0; i < n; i++)\n    sum += x[i] * y[i];\nreturn sum;\n" * 600).encode()
            write_shard(path + "/t_train_000.bin", list(text))
            write_shard(path + "/t_val_000.bin", list(text[:4000]))
            short = "--train-steps 20 --val-every 10 --lr-warmup-steps 5 --num-layers 1 --micro-batch-size 2"
            command = [sys.executable, SCRIPT, "--model", "demo", "--data", path + "/t_train_*.bin", path + "/t_val_*.bin", "--out", path + "/o",
                       "--train-gpt", PROGRAM, "--recipe", "a=" + short, "b=%s --lr 1e-3" % short, "--seeds", "1", "--time-rounds", "1",
                       "--device", "cpu"]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
            with open(path + "/o/demo/table.json", encoding="utf-8") as file:
                adam = json.load(file)["recipes"][0]
            self.assertEqual(adam["reached"], [1])
            self.assertAlmostEqual(adam["tokens"]["mean"], 20 * 2 * 128)
            self.assertGreater(adam["seconds"]["mean"], 0)
            self.assertLess(adam["final_loss"]["mean"], 5)
            log = bench_to_loss.Log(path + "/o/demo/a/seed_1/log.jsonl")
            self.assertEqual([step for step, _ in log.losses], [10, 20])
            self.assertEqual(sorted(os.listdir(path + "/o/demo/a")), ["seed_1", "time_0"])


if __name__ == "__main__":
    unittest.main()
