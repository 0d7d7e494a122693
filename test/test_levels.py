"""Levels of instruction sets in one program: which one is taken, what the report says of it, what each computes.

`make test-levels` builds a program for the oldest CPU, with every level above it, and names it in TRAIN_GPT_LEVELS.
"""
import glob
import json
import os
import re
import shutil
import subprocess
import tempfile
import unittest

from environment import ROOT, free_port
from test_cli import write_shard

NATIVE = os.path.abspath(os.environ.get("TRAIN_GPT", os.path.join(ROOT, "build/train_gpt")))
LEVELS = os.environ.get("TRAIN_GPT_LEVELS") and os.path.abspath(os.environ["TRAIN_GPT_LEVELS"])
EMULATOR = shutil.which("qemu-x86_64") if os.uname().machine == "x86_64" else None
TRAINING = ("--device cpu --threads 2 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --vocab-size 257 "
            "--seq-length 48 --micro-batch-size 2 --normalization RMSNorm --position-embedding-type rope --activation swiglu "
            "--no-add-bias-linear --lr 1e-3 --train-steps 10 --val-every 0 --checkpoint-every 0").split()
# The relative difference of a loss: 10 steps let roundings of 2^-24, or of 2^-9, grow.
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}


def run(program, *arguments, prefix=()):
    return subprocess.run([*prefix, program, *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False)


def levels_of(program):
    """Returns each level's name and the features that it is compiled for, lowest first, from --version."""
    return {name: features.split() for name, features in re.findall(r"^cpu +fp32 and bf16, for (\S+):(.*)$", run(program, "--version").stdout, re.M)}


def here(program):
    """Returns the names of the levels that this CPU has, from the message about a wrong name."""
    return run(program, "--plan", "--device", "cpu", "--instruction-set", "none").stderr.strip().split(" or of ")[1].split(", ")


def row(result, name):
    return re.search("^%s +(.*)$" % name, result.stdout, re.M).group(1)


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.path = cls.folder.name
        write_shard(cls.path + "/t_train_000.bin", list(b"for (int i = 0; i < n; i++)\n    sum += x[i] * y[i];\n" * 200))
        cls.data = ["--train-data", cls.path + "/t_train_*.bin"]

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def train(self, program, name, *arguments):
        out = self.path + "/" + name
        result = run(program, *TRAINING, *self.data, "--out", out, *arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        with open(out + "/log.jsonl") as file:
            steps = [json.loads(line) for line in file]
        return result, [step["loss"] for step in steps] + [step["grad_norm"] for step in steps]

    def refused(self, program, *words, name, prefix=()):
        result = run(program, "--plan=full", "--device", "cpu", "--instruction-set", name, prefix=prefix)
        self.assertEqual((result.returncode, result.stdout), (2, ""), result.stderr)
        for word in ("train_gpt: --instruction-set %s: " % name, *words):
            self.assertIn(word, result.stderr)


class Choice(Case):
    """The level and the precision of any build, and the reason for each."""
    def test_the_highest_level_that_the_cpu_has_is_taken(self):
        plan = run(NATIVE, "--plan=full", "--device", "cpu", "--preset", "demo")
        self.assertEqual(row(plan, "instruction set").split(",")[0], here(NATIVE)[-1])

    def test_a_level_that_is_not_there_is_refused(self):
        self.refused(NATIVE, "was not built for it; it may be auto, or of " + ", ".join(here(NATIVE)), name="x86-64-v99")

    def test_auto_is_bf16_where_the_cpu_multiplies_it(self):
        level = here(NATIVE)[-1]
        products = [unit for unit in ("avx512bf16", "bf16") if unit in levels_of(NATIVE)[level]]
        with open("/proc/cpuinfo") as file:
            products = ["AMX"] if " amx_bf16" in file.read() else products
        said = row(run(NATIVE, "--plan=full", "--device", "cpu", "--preset", "demo"), "precision")
        self.assertIn("bf16: this CPU multiplies it (%s)" % products[0] if products else "fp32: %s has no products of bf16" % level, said)

    def test_a_precision_that_was_asked_for_is_taken(self):
        for precision in ("fp32", "bf16"):
            with self.subTest(precision):
                result, _ = self.train(NATIVE, precision, "--precision", precision, "--train-steps", 1)
                self.assertEqual(row(result, "precision"), precision + ": by --precision")

    def test_config_json_has_what_was_chosen(self):
        result, _ = self.train(NATIVE, "config", "--train-steps", 1)
        with open(self.path + "/config/config.json") as file:
            config = json.load(file)
        self.assertEqual(config["precision"], row(result, "precision").split(":")[0])
        self.assertEqual(config["instruction_set"], row(result, "instruction set").split(",")[0])

    def test_a_resumed_run_keeps_its_precision(self):
        for precision in ("fp32", "bf16"):
            with self.subTest(precision):
                steps = ["--checkpoint-every", 1, "--train-steps"]
                self.train(NATIVE, "resumed_" + precision, "--precision", precision, *steps, 1)
                result, _ = self.train(NATIVE, "resumed_" + precision, "--resume", "auto", *steps, 2)
                self.assertEqual(row(result, "precision"), precision + ": the checkpoint's")


@unittest.skipUnless(LEVELS, "make test-levels builds the program that it needs")
class Levels(Case):
    """A program with several levels."""
    def test_each_level_trains_as_the_native_build_and_twice_the_same_bits(self):
        names = here(LEVELS)
        self.assertEqual(names, list(levels_of(LEVELS))[:len(names)], "those that the CPU lacks are the highest")
        for precision, tolerance in TOLERANCE.items():
            _, native = self.train(NATIVE, "native_" + precision, "--precision", precision)
            for name in names:
                with self.subTest(precision + " " + name):
                    options = ["--precision", precision, "--instruction-set", name]
                    result, first = self.train(LEVELS, "first_%s_%s" % (precision, name), *options)
                    self.assertEqual(row(result, "instruction set"), "%s, of %d that this program has" % (name, len(levels_of(LEVELS))))
                    self.assertEqual(first, self.train(LEVELS, "second_%s_%s" % (precision, name), *options)[1])
                    for ours, theirs in list(zip(first, native))[:10]:
                        self.assertAlmostEqual(ours / theirs, 1, delta=tolerance)

    def test_levels_are_different_programs(self):
        """Each is compiled for more than the level below it; the engines' objects export nothing that the linker might
        take for all of them."""
        features = list(levels_of(LEVELS).values())
        self.assertGreaterEqual(len(features), 2)
        for lower, higher in zip(features, features[1:]):
            self.assertLess(set(lower) - {"any", "CPU"}, set(higher))
        for engine in glob.glob(os.path.dirname(LEVELS) + "/engine_cpu_*.o"):
            symbols = subprocess.run(["nm", "-g", "--defined-only", "--format=posix", engine], capture_output=True, text=True, check=True)
            self.assertEqual([line.split()[0] for line in symbols.stdout.splitlines()],
                             ["train_cpu_" + os.path.basename(engine)[len("engine_cpu_"):-len(".o")]])
            sections = subprocess.run(["readelf", "-SW", engine], capture_output=True, text=True, check=True).stdout
            self.assertNotRegex(sections, r"\.(init_array|ctors)", "would run on every CPU")

    @unittest.skipUnless(EMULATOR, "no qemu-x86_64")
    def test_an_older_cpu_takes_a_lower_level(self):
        for cpu, level in (("Nehalem", list(levels_of(LEVELS))[0]), ("Haswell", "x86-64-v3")):
            prefix = [EMULATOR, "-cpu", cpu]
            plan = run(LEVELS, "--plan=full", "--device", "cpu", "--preset", "demo", prefix=prefix)
            self.assertEqual(row(plan, "instruction set").split(",")[0], level)
            self.assertEqual(row(plan, "precision"), "fp32: %s has no products of bf16" % level)
            self.refused(LEVELS, "this CPU lacks some of it; it may be auto, or of ", level + "\n", name="x86-64-v4", prefix=prefix)

    def test_ranks_take_the_lowest_level_of_all(self):
        """Ranks take the lowest level of all, so that their replicas stay equal: rank 1 may use only the lowest
        level."""
        lowest = list(levels_of(LEVELS))[0]
        port, ranks = free_port(), []
        for rank, options in enumerate(([], ["--instruction-set", lowest])):
            variables = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
            command = [LEVELS, *TRAINING, *self.data, "--threads", "1", "--rendezvous", "127.0.0.1:%d" % port, "--check-replicas", "1",
                       "--out", self.path + "/ranks", *options]
            ranks.append(subprocess.Popen(command, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        said = [process.communicate(timeout=120) for process in ranks]
        self.assertEqual([process.returncode for process in ranks], [0, 0], said)
        self.assertRegex(said[0][0], r"(?m)^instruction set +%s, of " % re.escape(lowest))


if __name__ == "__main__":
    unittest.main()
