"""--plan: a GPU's plan by a build without CUDA is the GPU's, to the byte; what the ten lines claim holds; the picture."""
import json
import os
import random
import re
import shlex
import subprocess
import sys
import unittest

from environment import ROOT, chosen, in_long_run
from test_cli import Case, PROGRAM, run

CUDA_PROGRAM = os.environ.get("TRAIN_GPT_CUDA", "")
GPUS = {"A100-SXM4-40GB": "8.0", "GeForce RTX 3090": "8.6", "GeForce RTX 4090": "8.9", "H100 80GB HBM3": "9.0", "B200": "10.0", "GeForce RTX 5090": "12.0"}
NO_COLOR = "#333333"
# Options of a plan beside its shape, and how often one is drawn.
ROWS = [
    (0.5, ["--normalization=RMSNorm"]), (0.2, ["--normalization=RMSNorm", "--qk-layernorm"]),
    (0.1, ["--normalization=RMSNorm", "--qk-layernorm", "--qk-layernorm-width=full"]), (0.5, ["--position-embedding-type=rope"]),
    (0.3, ["--activation=swiglu"]), (0.2, ["--activation=squared_relu"]), (0.4, ["--no-add-bias-linear"]),
    (0.3, ["--untie-embeddings-and-output-weights"]), (0.2, ["--parallel-residual"]), (0.15, ["--norm-placement=post"]),
    (0.15, ["--norm-placement=sandwich"]), (0.15, ["--attention-dropout=0.1"]), (0.15, ["--hidden-dropout=0.1"]),
    (0.15, ["--attn-logit-softcapping=30"]), (0.2, ["--recompute-granularity=full"]), (0.2, ["--recompute-granularity=selective"]),
    (0.2, ["--recompute-granularity=auto", "--memory-budget=1GiB"]), (0.2, ["--window-size=64"]), (0.2, ["--separate-documents"]),
    (0.3, ["--optimizer-cpu-offload"]), (0.2, ["--offload-gradients"]), (0.2, ["--offload-weights"]),
    (0.2, ["--cpu-offloading-num-layers=1"]), (0.2, ["--optimizer=muon"]), (0.2, ["--ema-decay=0.99"]), (0.2, ["--exp-avg-dtype=8bit"]),
    (0.2, ["--fp8-format=hybrid"]), (0.1, ["--fp8-format=hybrid", "--fp8-recipe=delayed"]), (0.1, ["--fp8-format=e4m3", "--fp8-recipe=blockwise"]),
    (0.1, ["--fp8-format=hybrid", "--fp8-recipe=delayed", "--fp8-dot-product-attention=forward"]),
    (0.1, ["--main-grads-dtype=bf16"]), (0.1, ["--main-params-dtype=bf16"]), (0.05, ["--generate=a"]), (0.05, ["--chat"]), (0.1, ["--collectives=sockets"]),
    (0.2, ["--mlp-chunk-tokens=100", "--recompute-granularity=full"]), (0.2, ["--attention-backend=flash"]),
    (0.1, ["--attention-backend=unfused"]), (0.1, ["--attention-backend=fused"]), (0.2, ["--lora-rank=8"]), (0.15, ["--sample-every=10"]),
    (0.2, ["--no-deterministic-mode"]), (0.3, ["--world-size=2", "--zero-stage=1"]),
    (0.2, ["--world-size=2", "--zero-stage=3", "--grad-reduce-in-bf16"])]  # fmt: skip


def draw(rng):
    """The options of a random plan; some contradict each other, and the program refuses them."""
    groups, micro_batch, length = rng.choice([1, 2, 3]), rng.randint(1, 4), rng.choice([48, 128, 640, 1024, 4096])
    options = {"num-layers": rng.randint(1, 4), "kv-channels": rng.choice([32, 64, 96, 128, 256]), "num-query-groups": groups,
               "num-attention-heads": groups * rng.choice([1, 2, 4]), "hidden-size": 64 * rng.randint(2, 20),
               "ffn-hidden-size": 64 * rng.randint(2, 40), "vocab-size": rng.choice([257, 5000, 50257, 151936]), "seq-length": length,
               "max-position-embeddings": length, "micro-batch-size": micro_batch, "global-batch-size": 2 * micro_batch * rng.randint(1, 3),
               "precision": rng.choice(["bf16", "bf16", "fp32"])}  # fmt: skip
    words = [f"--{name}={value}" for name, value in options.items()]
    for share, row in ROWS:
        if rng.random() < share:
            words += row
    return words


class Plan(Case):
    def plan(self, *words, program=PROGRAM, **keywords):
        """(the exit status and message, the plan)"""
        path = self.path + "/plan.json"
        result = run("--plan", "--plan-json", path, *words, program=program, **keywords)
        if result.returncode != 0:
            return (result.returncode, result.stderr), None
        with open(path, encoding="utf-8") as file:
            return (0, ""), json.load(file)


@unittest.skipUnless(os.path.exists(CUDA_PROGRAM), "TRAIN_GPT_CUDA names no train_gpt of the cuda target")
class OfAGPU(Plan):
    def test_a_build_without_cuda_plans_what_the_cuda_target_plans(self):
        rng, planned = random.Random(1), 0
        for _ in range(chosen(400, 24)):
            words = [*draw(rng), "--plan-gpu", rng.choice(sorted(GPUS))]
            if not in_long_run():  # the short run's emulator has no engine in fp32
                words = [word.replace("--precision=fp32", "--precision=bf16") for word in words]
            (answer, mine), (expected, theirs) = (self.plan(*words, "--device", device, program=program)
                                                  for device, program in (("cpu", PROGRAM), ("cuda", CUDA_PROGRAM)))
            with self.subTest(words=" ".join(words)):
                self.assertEqual(answer, expected)
                if mine:
                    planned += 1
                    times = [plan.pop("predicted", {"step_ms": 0})["step_ms"] for plan in (mine, theirs)] # none by a sheet without a rate
                    self.assertAlmostEqual(*times, delta=1e-12 * times[0])
                    self.assertEqual(mine, theirs)
        self.assertGreater(planned, chosen(150, 8))

    def test_a_build_without_cuda_plans_what_a_run_takes(self):
        """Of each compute capability: the plan of a run that trains there. In the short run, of each kind of kernels."""
        rope = ["--normalization=RMSNorm", "--position-embedding-type=rope", "--activation=swiglu", "--no-add-bias-linear"]
        small = ["--num-layers", 2, "--hidden-size", 128, "--num-attention-heads", 2, "--kv-channels", 64, "--seq-length", 64, "--vocab-size", 257,
                 "--micro-batch-size", 2, "--precision", "bf16", "--loss-chunk-tokens", 64, "--train-steps", 1, "--val-every", 0,
                 "--attention-backend", "flash"]  # fmt: skip
        for number, (gpu, capability) in enumerate(GPUS.items()):
            if capability not in chosen(GPUS.values(), ("8.0", "9.0", "10.0")):
                continue
            words = [*small, *(rope if number % 2 else []), *(["--optimizer-cpu-offload"] if number % 3 == 0 else []),
                     *(["--matmul-tuning=false"] if number and not in_long_run() else [])]
            path = self.path + "/run.json"
            result = run(*words, "--device", "cuda", "--plan-json", path, "--train-data", self.data[1], "--out", f"{self.path}/{number}",
                         program=CUDA_PROGRAM, environment={"EMU_CAPABILITY": capability})
            self.assertEqual(result.returncode, 0, result.stderr)
            with open(path, encoding="utf-8") as file:
                taken = json.load(file)
            taken.pop("predicted", None)
            _, planned = self.plan(*words, "--plan-gpu", gpu)
            planned.pop("predicted")
            with self.subTest(gpu=gpu):
                self.assertEqual(planned, taken)


class Summary(Plan):
    GPT2 = ("--preset", "gpt2-124m", "--precision", "bf16", "--plan-gpu", "GeForce RTX 4090")

    def summary(self, *words):
        result = run("--plan", *words)
        self.assertEqual(result.returncode, 0, result.stderr)
        return dict(line.split(None, 1) for line in result.stdout.splitlines())

    def peak(self, *words):
        _, plan = self.plan(*words)
        return plan["peak_bytes"]

    def test_ten_lines(self):
        said = self.summary(*self.GPT2)
        self.assertEqual(list(said), ["model", "device", "batch", "computed", "verdict", "parts", "peak", "predicted", "next", "more"])
        self.assertIn("GeForce RTX 4090", said["device"])
        self.assertIn("GiB pinned", self.summary(*self.GPT2, "--optimizer-cpu-offload")["host"])

    def test_what_the_next_line_promises(self):
        gib, batch = 2**30, (*self.GPT2, "--global-batch-size", 64)
        for pattern, words in ((r"(--recompute-granularity none) takes ([\d.]+) GiB", ("--micro-batch-size", 8, "--recompute-granularity", "full")),
                               (r"(--micro-batch-size 64) takes ([\d.]+) GiB", ("--micro-batch-size", 8, "--memory-budget", "22GiB"))):
            promised, takes = re.search(pattern, self.summary(*batch, *words)["next"]).groups()
            kept = [word for word in words if word not in ("--recompute-granularity", "full")]
            self.assertAlmostEqual(self.peak(*batch, *kept, *promised.split()) / gib, float(takes), delta=0.005)
        seven = ("--preset", "qwen2.5-7b", "--seq-length", 2048, "--micro-batch-size", 1, "--plan-gpu", "GeForce RTX 4090")
        large = self.summary(*seven)
        self.assertIn("does NOT fit", large["verdict"])
        words, takes, tokens = re.match(r"(--recompute-granularity auto) fits: ([\d.]+ GiB) and [\d.]+ GiB of the host's, ([\d.]+) tokens/s", large["next"]).groups()
        slow = self.summary(*seven, *words.split())
        self.assertIn("it takes %s, with" % takes, slow["verdict"])
        self.assertIn(" %s tokens/s" % tokens, slow["predicted"])
        words = words.split()
        self.assertRegex(slow["verdict"], r"^fits: it takes [\d.]+ GiB, with [\d.]+ GiB of the host's, this GPU leaves 22\.99 GiB")
        self.assertIn("in host memory", slow["auto"])
        before, batch, after, times = re.search(r"update is (\d+) % of a step: --global-batch-size (\d+) makes it (\d+) %, and about ([\d.]+) times", slow["next"]).groups()
        again = self.summary(*seven, *words, "--global-batch-size", batch)
        share = [int(re.search(r"step, (\d+) % of it the update", said["predicted"])[1]) for said in (slow, again)]
        tokens = [float(re.search(r"([\d.e+]+) tokens/s", said["predicted"])[1]) for said in (slow, again)]
        self.assertEqual(share[0], int(before))
        self.assertLessEqual(share[1], int(after) + 3) # auto chooses anew
        self.assertGreaterEqual(tokens[1] / tokens[0], 0.9 * float(times))

    def test_two_gpus_are_told_to_shard(self):
        two = ("--preset", "llama3-8b", "--precision", "bf16", "--seq-length", 2048, "--global-batch-size", 8, "--plan-gpu", "2x3090")
        promised, takes = re.match(r"(--recompute-granularity auto --zero-stage 3) fits: ([\d.]+ GiB) and [\d.]+ GiB of the host's for each rank, ",
                                   self.summary(*two)["next"]).groups()
        self.assertIn("it takes %s, with" % takes, self.summary(*two, *promised.split())["verdict"])

    def test_cards_by_the_names_that_people_write(self):
        """What the next line says of a card that is too small is what its options give."""
        one, two = (self.summary("--preset", "llama3-8b", "--zero-stage", 3, "--plan-gpu", name) for name in ("3090", "2x3090"))
        self.assertTrue(two["device"].startswith("2 x GeForce RTX 3090 of 24.00 GiB"), two)
        self.assertIn("this GPU leaves 23.00 GiB", one["verdict"])
        self.assertIn("each GPU leaves 23.00 GiB", two["verdict"])
        self.assertIn("8 sequences a step of all ranks", two["batch"])
        self.assertIn("of all ranks, without their exchange", two["predicted"])
        self.assertIn("for each rank", two["next"])
        for said in (one, two):
            self.assertNotRegex(str(said), r"(?i)\bcpu\b|AVX|threads")
        small = ("--preset", "llama3-8b", "--seq-length", 8192, "--plan-gpu", "4060ti")
        said = self.summary(*small)
        self.assertIn("with more memory there is the GeForce RTX 4060 Ti 16GB", said["device"])
        words, takes = re.match(r"(--recompute-granularity auto --micro-batch-size 1) fits: ([\d.]+) GiB", said["next"]).groups()
        then = self.summary(*small, "--global-batch-size", 4, *words.split())["verdict"]
        took = float(re.match(r"fits: it takes ([\d.]+) GiB", then)[1]) # and more logits at a time, where there is room
        self.assertTrue(float(takes) <= took <= 1.02 * float(takes), (takes, then))
        self.assertIn("nothing fits", self.summary(*small, "--num-layers", 300, "--host-memory-budget", "8GiB")["next"])
        for words, message in ((("--world-size", 3, "--plan-gpu", "2x3090"), "--world-size 3"), (("--plan-gpu", "T4"), "Ampere or newer")):
            result = run("--plan", *words)
            self.assertEqual(result.returncode, 2)
            self.assertIn(message, result.stderr)

    def test_where_nothing_is_known(self):
        self.assertIn("this machine leaves", self.summary("--preset", "demo", "--device", "cpu")["verdict"])
        if os.path.exists(CUDA_PROGRAM):
            said = run("--plan", "--preset", "demo", "--device", "cuda", program=CUDA_PROGRAM).stdout
            self.assertRegex(said, r"(?m)^verdict +takes .*says whether that fits$")
            self.assertRegex(said, r"(?m)^next +--plan-gpu ")
        self.assertIn("--memory-budget allows 1.00 GiB", self.summary("--preset", "demo", "--memory-budget", "1GiB")["verdict"])


class Packing(Plan):
    LAYERS = {"gpt2-124m": 12, "gpt2-350m": 24, "gpt2-774m": 36, "gpt2-1558m": 48, "llama3.2-1b": 16, "llama3.2-3b": 28, "llama3-8b": 32,
              "smollm2-135m": 30, "smollm2-360m": 32, "smollm2-1.7b": 24, "qwen3-0.6b": 28, "qwen3-4b": 36, "gemma3-270m": 18,
              "gemma3-1b": 26, "qwen2.5-0.5b": 24, "qwen2.5-7b": 28}  # fmt: skip

    def test_offloads_are_packed_within_2_percent_of_their_bound(self):
        """All layers, or nearly all, are offloaded, and their buffers overlap like bricks."""
        rng = random.Random(3)
        for _ in range(chosen(300, 24)):
            model, batch = rng.choice(sorted(self.LAYERS)), rng.choice([1, 2, 4, 8])
            words = ["--preset", model, "--precision", "bf16", "--plan-gpu", "H100 80GB HBM3", "--micro-batch-size", batch, "--global-batch-size",
                     batch * rng.choice([1, 1, 2]), "--recompute-granularity", rng.choice(["none", "selective", "full"]),
                     "--cpu-offloading-num-layers", self.LAYERS[model] - rng.choice([0, 0, 1, 2, 3])]  # fmt: skip
            words += [word for word in ("--optimizer-cpu-offload", "--offload-gradients", "--offload-weights") if rng.random() < 0.6]
            _, plan = self.plan(*words)
            arenas = {arena["name"]: arena["bytes"] for arena in plan["arenas"]}
            bound = plan["lower_bound_bytes"] - sum(size for name, size in arenas.items() if name != "activations")
            self.assertLessEqual(arenas["activations"], 1.02 * bound, words)


class Picture(Plan):
    def drawn(self, *words):
        path = self.path + "/plan.svg"
        result = run("--plan", "--plan-picture", path, *words)
        self.assertIn(result.returncode, (0, 2), result.stderr)
        if result.returncode == 2:
            return ""
        with open(path, encoding="utf-8") as file:
            return file.read()

    def test_the_committed_picture_is_what_the_readme_draws(self):
        with open(ROOT + "/README.md", encoding="utf-8") as file:
            command = re.search(r"^build/train_gpt (.*) --plan-picture (docs/memory_plan\.svg)$", file.read(), re.M)
        with open(f"{ROOT}/{command[2]}", encoding="utf-8") as file:
            self.assertEqual(self.drawn(*shlex.split(command[1])), file.read())

    def test_the_committed_picture_of_recomputation_is_what_its_script_draws(self):
        script = subprocess.run([sys.executable, "-B", ROOT + "/scripts/plan_pictures.py", "--train-gpt", PROGRAM], capture_output=True, text=True, timeout=120)
        self.assertEqual(script.stderr, "")
        with open(ROOT + "/docs/recomputation.svg", encoding="utf-8") as file:
            self.assertEqual(script.stdout, file.read())

    def test_colors_and_labels(self):
        """A category has one color, the same in every picture, and no other category has it; names of sections don't overlap."""
        rng, color_of, drawn = random.Random(2), {}, 0
        for _ in range(chosen(300, 40)):
            words = draw(rng)
            picture = self.drawn(*words, "--plan-gpu", "H200")
            drawn += bool(picture)
            with self.subTest(words=" ".join(words)):
                self.assertNotIn(NO_COLOR, picture)
                buffers = picture.partition('<g class="buffers"')[2].partition("</g>")[0]
                for color, title in re.findall(r'fill="(#\w+)"><title>(.*?)</title>', buffers, re.S):
                    self.assertEqual(color_of.setdefault(title.split("\n")[2], color), color)
                ends = {}
                for x, y, name in re.findall(r'<text class="section" x="([\d.]+)" y="([\d.]+)" text-anchor="middle">(.*?)</text>', picture):
                    half = 3 * len(name)
                    self.assertGreaterEqual(float(x) - half, ends.get(y, 0))
                    ends[y] = float(x) + half
        self.assertEqual(len(set(color_of.values())), len(color_of), color_of)
        self.assertGreater(drawn, chosen(100, 12))
        self.assertGreater(len(color_of), 18)

    def test_the_budget_has_a_line(self):
        self.assertEqual(self.drawn("--preset", "demo").count('class="budget"'), 0)
        self.assertEqual(self.drawn("--preset", "demo", "--memory-budget", "60MiB").count('class="budget"'), 1)
        self.assertIn(">of 1.00 GiB<", self.drawn("--preset", "demo", "--memory-budget", "1GiB"))


if __name__ == "__main__":
    unittest.main()
