"""docs/fit.md and its plans: what must fit does, near its lower bound, and bytes are those that formulas say."""
import itertools
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

CUDA_PROGRAM = os.environ.get("TRAIN_GPT_CUDA", "")
LOSSY = ("main-params-dtype", "main-grads-dtype", "exp-avg-dtype", "exp-avg-sq-dtype", "allow-lossy-states")


def fit_model(*arguments):
    return subprocess.run([sys.executable, os.path.join(SCRIPTS, "fit_model.py"), *arguments], capture_output=True, text=True,
                          check=False)


def planned():
    return [row for row in fm.written_plans() if "refused" not in row]


class Page(unittest.TestCase):
    def test_page_is_what_the_script_writes(self):
        result = fit_model("--check")
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    @unittest.skipUnless(os.path.exists(CUDA_PROGRAM), "TRAIN_GPT_CUDA names no train_gpt of the cuda target")
    def test_plans_are_those_of_the_engine_to_the_byte(self):
        result = fit_model("--train-gpt", CUDA_PROGRAM, "--check", "--every", chosen("1", "12"))
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

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

    def test_choices(self):
        for text, expected in (
                ("recomputes nothing; nothing in host memory", ("nothing", "nothing", "exact")),
                ("recomputes full:0-26;core_attn,norm:27,29-30; activations of 3 layers, 74 % of the optimizer states, weights in host "
                 "memory; moments in 8bit and bf16, gradients in bf16, no master weights",
                 ("27 layers, parts of 3", "inputs of 3 layers, 74 % of states, weights", "8bit bf16 bf16, no master"))):
            self.assertEqual(fm.choice_of({"choice": text}), expected)


class Plans(unittest.TestCase):
    def test_near_the_bound(self):
        """Of every plan, at every stage."""
        for row in planned():
            with self.subTest(row=(row["section"], row["options"])):
                # all but one, which mixes policies and offloads all but one layer
                hard = (row["section"], row.get("model"), row.get("card")) == ("largest", "llama3-70b", 24)
                self.assertLessEqual(row["device_bytes"], (1.07 if hard else fm.BOUND) * row["bound_bytes"])
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
            parameters, remainder, gradient, m, v = fm.format_bytes(row["name"], row["parameters"])
            rotary = 4 * 2048 * 128
            for arena, size in (("parameters", parameters), ("gradients", gradient), ("optimizer", remainder + m + v)):
                expected = size * row["parameters"] + (rotary if arena == "parameters" else 0)
                self.assertAlmostEqual(row["arenas"].get(arena, 0) / expected, 1, places=4, msg=row["name"])

    def test_bytes_on_the_bus(self):
        for row in fm.rows_of("bus"):
            for key, value in zip(("to_host_bytes", "to_device_bytes"), fm.bus_formula(row["name"], row)):
                self.assertAlmostEqual(row[key] / value, 1, places=4, msg=row["name"])
        # C of llama3-8b is above F / (13 B): its layers' inputs leave and come back beside compute
        speed = {row["name"]: row["tokens_per_s"] for row in fm.rows_of("bus") + fm.rows_of("formats")}
        self.assertGreater(speed["layer inputs"], 0.999 * speed["exact"])


if __name__ == "__main__":
    unittest.main()
