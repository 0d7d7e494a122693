"""docs/fit.md and its plans: what must fit does, near its lower bound, and bytes are those that formulas say."""
import itertools
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import unittest

from environment import ROOT, chosen

SCRIPTS = os.path.join(ROOT, "scripts")
sys.path.insert(0, SCRIPTS)
# pylint: disable=wrong-import-position
import fit_model as fm  # noqa: E402

PROGRAM = os.path.abspath(os.environ.get("TRAIN_GPT", os.path.join(ROOT, "build/train_gpt")))
LOSSY = ("main-params-dtype", "main-grads-dtype", "exp-avg-dtype", "exp-avg-sq-dtype", "allow-lossy-states")


def fit_model(*arguments):
    return subprocess.run([sys.executable, os.path.join(SCRIPTS, "fit_model.py"), *arguments], capture_output=True, text=True,
                          check=False)


def planned():
    return [row for row in fm.written_plans() if "refused" not in row]


def format_bytes(name, parameters):
    """Bytes of a unit's parameter, remainder, gradient, m and v. Of 8bit the head's and the embedding's m and v are bf16."""
    sizes = fm.FORMATS[name][1]
    ends = 2 * 128256 * 4096 / parameters
    return tuple(size if size != 33 / 32 else size * (1 - ends) + 2 * ends for size in sizes)


def bus_formula(name, row):
    """Bytes to the host and to the device of a step of the bus section, as the page's formulas have them."""
    step = {"P": row["parameters"], "k": fm.BUS_MICRO_STEPS, "N": 2 * 2048, "L": 32, "C": 4096,
            "ends": 2 * 128256 * 4096}  # the embedding and the head, which backward does not need again
    formulas = [re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula) for formula in fm.BUS_WORDS[name]]
    return [eval(formula, {}, step) for formula in (formulas[0], formulas[-1])]  # pylint: disable=eval-used


class Page(unittest.TestCase):
    def test_page_is_what_the_script_writes(self):
        result = fit_model("--check")
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_plans_are_those_of_the_engine_to_the_byte(self):
        result = fit_model("--train-gpt", PROGRAM, "--check", "--every", chosen("1", "12"))
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_predictions_are_near_what_was_measured(self):
        """Of an H200's runs, whose flop/s power lowers; FP8's casts and faster products count."""
        with open(os.path.join(ROOT, "docs/gpu/measured-nvidia-h200.json"), encoding="utf-8") as file:
            rows = [row for check in json.load(file)["checks"] if check["stage"] in ("train_table", "fp8") for row in check["rows"]]
        ratios = {}
        for row in rows:
            tokens = row.get("micro_steps", 1) * row.get("batch", 0) * row.get("length", 0)
            if row["engine"] != "ours" or tokens < 16384:
                continue
            policy, _, lossy = row["policy"].partition(", ")
            options = {"preset": row["preset"], "seq-length": row["length"], "max-position-embeddings": row["length"], "recompute-granularity": policy,
                       "micro-batch-size": row["batch"], "global-batch-size": row["batch"] * row.get("micro_steps", 1), "precision": "bf16"}
            if lossy:
                options.update({"allow-lossy-states": "true", "memory-budget": "140895MiB"})
            if row["bench"] == "fp8":
                self.assertEqual((row["format"], row["recipe"]), ("hybrid", "delayed"))
                options.update({"fp8-format": "hybrid", "fp8-recipe": "delayed", "fp8-amax-history-len": 16, "fp8-amax-compute-algo": "max"})
            result = subprocess.run([PROGRAM, "--plan", "--plan-gpu", "H200", *fm.words(options)], capture_output=True, text=True, check=False)
            predicted = re.search(r"^predicted .*; (\d+) tokens/s", result.stdout, re.MULTILINE)
            self.assertTrue(predicted, result.stdout + result.stderr)
            ratios[row["bench"], row["preset"], row["batch"]] = row["tokens_per_second"] / int(predicted[1])
        self.assertEqual({bench for bench, *_ in ratios}, {"train", "fp8"})
        self.assertEqual({key: ratio for key, ratio in ratios.items() if not 0.92 < ratio < 1.08}, {})

    def test_a_program_that_plans_otherwise(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "planner")
            for text, status, complaint in (("echo train_gpt: nothing fits: sorry >&2; exit 2", 1, "is not what"),
                                            ("echo no engine >&2; exit 2", 2, "made no plan")):
                with open(path, "w", encoding="utf-8") as file:
                    file.write("#!/bin/sh\n" + text + "\n")
                os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR)
                result = fit_model("--train-gpt", path, "--check")
                self.assertEqual(result.returncode, status)
                self.assertIn(complaint, result.stdout + result.stderr)

    def test_plans_beside_llmq_are_those_of_the_table(self):
        planned = {(row["card"], row["model"], row["lossy"]) for row in fm.rows_of("llmq")}
        self.assertEqual(planned, {(card, model, lossy) for card, model, *_ in fm.LLMQ for lossy in (False, True)})

    def test_bytes_of_choices(self):
        for text, expected in (
                ("recomputes nothing; nothing in host memory", 16),
                ("recomputes norm:0-27; activations of 3 layers, 74 % of the optimizer states, weights in host memory; moments in 8bit and "
                 "bf16, gradients in bf16, no master weights", 2 + 2 + 33 / 32 + 2),
                ("recomputes nothing; nothing in host memory; moments in fp32 and fp32, gradients in bf16", 14)):
            self.assertEqual(fm.state_bytes({"choice": text}), expected)
        for row in fm.rows_of("largest"):
            if not row["lossy"]:
                self.assertEqual(fm.state_bytes(row), 16)

    def test_longest_leaves_out_what_gains_nothing(self):
        """Each plan that the page has no cell of is as long as one with a smaller host."""
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in fm.longest_table()[2:]]
        cells = {(int(card), host): cell.split(" ")[0] for card, *found in rows for host, cell in zip(fm.HOSTS, found)}
        lengths = {(row["card"], row["host"]): row["options"]["seq-length"] for row in fm.rows_of("longest")}
        for (card, host), length in lengths.items():
            smaller = [lengths[card, h] for h in fm.HOSTS if h < host and (card, h) in lengths]
            self.assertEqual(cells.pop((card, host)), f"{length:,}" if length > max(smaller, default=0) else "-")
        self.assertEqual(set(cells.values()) - {"-"}, set())


class Plans(unittest.TestCase):
    def test_near_the_bound(self):
        """Of every plan, at every stage."""
        for row in planned():
            with self.subTest(row=(row["section"], row["options"])):
                self.assertLessEqual(row["device_bytes"], fm.BOUND * row["bound_bytes"])
                self.assertLessEqual(row["host_bytes"], fm.BOUND * row["host_bound_bytes"])
        stages = {(row["model"], row["stage"]) for row in fm.rows_of("stages")}
        self.assertEqual(stages, set(itertools.product(fm.STAGE_MODELS, range(4))))

    def test_required(self):
        first, *others = fm.rows_of("required")
        options = first["options"]
        self.assertEqual((options["recompute-granularity"], options["seq-length"], options["micro-batch-size"]), ("none", 2048, 3))
        self.assertFalse([name for name in LOSSY if name in options])
        self.assertLessEqual(first["device_bytes"], 71.5 * fm.GIB)
        self.assertLessEqual(first["host_bytes"], 75.5 * fm.GIB)
        self.assertEqual([(row["card"], row["host"], row["model"], row["lossy"]) for row in others], list(fm.REQUIRED))
        self.assertEqual({row["options"]["seq-length"] for row in others}, {2048})

    def test_within_the_budgets(self):
        for row in planned():
            if "host" in row:
                self.assertLessEqual(row["device_bytes"], fm.CARD[row["card"]].usable_gib * fm.GIB)
                self.assertLessEqual(row["host_bytes"], fm.HOSTS[row["host"]] * fm.GIB)
                self.assertEqual([name for name in LOSSY if name in row["options"]], ["allow-lossy-states"] if row["lossy"] else [])

    def test_largest(self):
        """Every card, host and format has a row; more memory never fits less, and the next larger model is refused."""
        keys = ("card", "host", "lossy")
        size = {tuple(row[key] for key in keys): fm.CANDIDATES.index(row["model"]) for row in fm.rows_of("largest")}
        refused = {tuple(row[key] for key in keys): row for row in fm.rows_of("too large")}
        for key in itertools.product(fm.CARD, fm.HOSTS, (False, True)):
            self.assertTrue(key in size or refused[key]["model"] == fm.CANDIDATES[0])
            if key in refused:
                self.assertEqual(fm.CANDIDATES.index(refused[key]["model"]), size.get(key, -1) + 1)
                self.assertIn("fits", refused[key]["refused"])
            else:
                self.assertEqual(size[key], len(fm.CANDIDATES) - 1)
            for other in size:
                if all(a <= b for a, b in zip(key, other)):
                    self.assertLessEqual(size.get(key, -1), size[other])

    def test_refusals_are_no_contradictions(self):
        """Where auto finds nothing, the least budgets that it names are above those that it was given."""
        for row in fm.rows_of("too large") + fm.rows_of("too long"):
            for option, have in (("--memory-budget", fm.CARD[row["card"]].usable_gib), ("--host-memory-budget", fm.HOSTS[row["host"]])):
                least = re.search(f" {option} (\\d+)", row["refused"])
                if least:
                    self.assertGreater(int(least[1]), have * fm.GIB, row["refused"])

    def test_longest(self):
        for host in fm.HOSTS:
            lengths = [row["options"]["seq-length"] for row in fm.rows_of("longest") if row["host"] == host]
            self.assertEqual(lengths, sorted(lengths))
        for row in fm.rows_of("longest"):
            budgets = fm.auto(fm.CARD[row["card"]], fm.HOSTS[row["host"]], False)
            self.assertEqual(row["options"], {**fm.LONG, "seq-length": row["options"]["seq-length"], **budgets})

    def test_bytes_of_formats(self):
        for row in fm.rows_of("formats"):
            parameters, remainder, gradient, m, v = format_bytes(row["name"], row["parameters"])
            rotary = 4 * 2048 * 128
            for arena, size in (("parameters", parameters), ("gradients", gradient), ("optimizer", remainder + m + v)):
                expected = size * row["parameters"] + (rotary if arena == "parameters" else 0)
                self.assertAlmostEqual(row["arenas"].get(arena, 0) / expected, 1, places=4, msg=row["name"])

    def test_bytes_on_the_bus(self):
        for row in fm.rows_of("bus"):
            for key, value in zip(("to_host_bytes", "to_device_bytes"), bus_formula(row["name"], row)):
                self.assertAlmostEqual(row[key] / value, 1, places=4, msg=row["name"])
        # C of llama3-8b is above F / (13 B): its layers' inputs leave and come back beside compute
        speed = {row["name"]: row["tokens_per_s"] for row in fm.rows_of("bus") + fm.rows_of("formats")}
        self.assertGreater(speed["layer inputs"], 0.999 * speed["exact"])


if __name__ == "__main__":
    unittest.main()
