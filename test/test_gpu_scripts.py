"""What of scripts/gpu_check.sh runs without a GPU: the pages, the comparison of curves, the start of ranks, the report, and all of it
from end to end in a rehearsal on the emulator."""
import array
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest

from environment import ROOT, chosen, long_test
from gpu_stand_ins import STAND_INS, write_program, write_stand_ins

SCRIPTS = os.path.join(ROOT, "scripts")
sys.path[:0] = SCRIPTS, os.path.join(ROOT, "test", "long")
# pylint: disable=wrong-import-position
import hopper_ceiling  # noqa: E402
import rehearsal  # noqa: E402
import roofline  # noqa: E402
import roofline_fp8  # noqa: E402


def script(name, *arguments, **environment):
    return subprocess.run([sys.executable, os.path.join(SCRIPTS, name), *arguments], capture_output=True, text=True,
                          check=False, env={**os.environ, **environment})


def write_lines(path, rows):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


class Roofline(unittest.TestCase):
    def test_page_is_what_the_script_writes(self):
        result = script("roofline.py", "--check")
        self.assertEqual(result.returncode, 0, result.stdout)

    def test_h100(self):
        """Beside an H200's step: what memory bounds takes longer by the ratio of the rates, what flops bound does not."""
        for shape in roofline.SHAPES:
            expected = sum(calls * max(size / 3.0e12, flops / 790e12, roofline.issue_seconds(shape, name))
                           for name, calls, size, flops in roofline.kernels(shape))
            cells = next(line for line in roofline.page().splitlines() if line.startswith(f"| {shape.name}, B {shape.B}, ")).split(" | ")
            self.assertEqual(cells[-1], f"{1e3 * expected:.1f} |")
            self.assertGreater(1e3 * expected, float(cells[1]))

    def test_parameters(self):
        """As published: of llama3-8b alone the head has a table of its own. GPT-2's vocabulary is padded by 47 rows."""
        published = {"gpt2-124m": 124.44e6 + 47 * 768, "gpt2-1558m": 1557.61e6 + 47 * 1600, "llama3.2-1b": 1235.81e6, "llama3-8b": 8030.26e6}
        self.assertEqual(set(published), {shape.name for shape in roofline.SHAPES})
        for shape in roofline.SHAPES:
            self.assertAlmostEqual(shape.parameters / published[shape.name], 1, places=4, msg=shape.name)

    def test_flash_in_fp32_takes_at_most_half_of_unfused(self):
        """By the rates of an A100 and of an H100 on the page: forward and backward, T 4096, head dim 128."""
        for name, *rates in roofline.FP32_GPUS[:2]:
            flash_forward, flash_backward, forward, backward = roofline.attention_fp32(*rates)
            self.assertLessEqual(flash_forward + flash_backward, 0.5 * (forward + backward), name)

    def test_hopper_ceilings_are_what_the_script_writes(self):
        result = script("hopper_ceiling.py", "--check")
        self.assertEqual(result.returncode, 0, result.stdout)


class Fp8Roofline(unittest.TestCase):
    def test_page_has_what_the_script_writes(self):
        result = script("roofline_fp8.py", "--check")
        self.assertEqual(result.returncode, 0, result.stdout)

    def test_gpt2_1558m_by_hand(self):
        """48 layers of width C = 1600, 16 x 1024 tokens: what a step moves and multiplies, in bytes and flops from the formulas."""
        layers, width, tokens = 48, 1600, 16384
        elements, weights = layers * tokens * width, layers * 12 * width ** 2
        # Inputs C, C, C, 4C; gradients 3C, C, 4C, C. A cast reads 2 bytes and writes 1 twice; attention's output is read twice.
        tensorwise = elements * (16 * (2 + 1 + 1) + 2)
        expected = {
            "tensorwise": (tensorwise, weights * 2 * (2 + 1)),
            # the activation writes its two forms itself, forward and backward, and so do the two norms forward
            "delayed": (tensorwise - elements * (4 + 4 + 1 + 1) * (2 + 1 + 1), weights * 2 * (2 + 1)),
        }
        case = next(case for case in roofline_fp8.CASES if case.shape.name == "gpt2-1558m")
        flops = 6 * weights * tokens
        for rate in (4.3e12, 3.0e12):
            bf16 = roofline_fp8.bf16_step(case, rate)
            self.assertAlmostEqual(bf16[0] / (flops / (0.88 * 790e12)), 1, places=9)
            # bias gradients: partial sums of 4 bytes, written and read, of two norms' runs, of 64 rows of the activation each and of
            # 128 queries of attention each, at a head dim of 64
            sums = 528 * 2 * width + tokens / 64 * 4 * width + tokens / 128 * 3 * width
            self.assertAlmostEqual(bf16[1] / (layers * 8 * sums / (0.85 * rate)), 1, places=9)
            for recipe, (of_activations, of_weights) in expected.items():
                linear, activations, cast_weights, rest = roofline_fp8.fp8_step(case, rate, recipe)
                self.assertAlmostEqual(linear / (flops / (0.88 * 1400e12)), 1, places=9)
                self.assertAlmostEqual(activations / (of_activations / (0.85 * rate)), 1, places=9)
                self.assertAlmostEqual(cast_weights / (of_weights / (0.85 * rate)), 1, places=9)
                self.assertEqual(rest, bf16[2])
                sharded = roofline_fp8.fp8_step(roofline_fp8.Case(case.shape, ranks=8), rate, recipe)  # a pass takes weights' amaxes
                self.assertAlmostEqual(sharded[2] / (weights * (2 * (2 + 1) + 2) / (0.85 * rate)), 1, places=9)

    def test_products_that_memory_bounds(self):
        """A small batch: FP8's products wait for the weights, of which a forward reads a byte and a weight gradient writes 4."""
        tokens, width = 128, 2048
        case = roofline_fp8.Case(roofline_fp8.Shape("small", 1, width, 16, 16, 4 * width, 1000, False, 1, tokens))
        weights, activations = 12 * width ** 2, tokens * width
        size = weights * (1 + 1 + 4) + activations * (7 + 2 * 9 + 2 * 7 + 9 + 7 + 9)
        self.assertAlmostEqual(roofline_fp8.fp8_step(case, 1e12, "delayed")[0] / (size / 0.85e12), 1, places=9)


class Curve(unittest.TestCase):
    def compare(self, one, other, precision="fp32", exact=None):
        with tempfile.TemporaryDirectory() as folder:
            runs = [os.path.join(folder, f"curve_{precision}_{device}") for device in ("cpu", "cuda", "exact")]
            for run, losses in zip(runs, (one, other, exact or [])):
                write_lines(f"{run}/log.jsonl", [{"step": i + 1, "loss": loss} for i, loss in enumerate(losses)])
            return script("gpu_report.py", "curve", *runs[:3 if exact else 2]).returncode

    def test_curves(self):
        self.assertEqual(self.compare([5.5, 4.5, 3.5], [5.5, 4.501, 3.4995]), 0)
        self.assertEqual(self.compare([5.5, 4.5, 3.5], [5.5, 4.51, 3.5]), 1)
        self.assertEqual(self.compare([5.5, 4.5, 3.5], [5.5, 4.5]), 1)
        self.assertEqual(self.compare([5.5, 4.5, 3.5], [5.5, None, 3.5]), 1)
        self.assertEqual(self.compare([5.5, 4.5, 5.4], [5.5, 4.5, 5.4]), 0)  # a batch of a few sequences may be a hard one
        self.assertEqual(self.compare([5.5, 5.5, 5.5], [5.5, 5.5, 5.5]), 1)
        self.assertEqual(self.compare([], []), 1)

    def test_curves_beside_fp32(self):
        """By how far the cpu target's losses are from fp32's: 1.5 times in bf16, twice in FP8."""
        exact, cpu = [5.5, 4.5, 3.5], [5.5, 4.52, 3.5]
        for far, precision, expected in [(4.529, "bf16", 0), (4.531, "bf16", 1), (4.469, "bf16", 1), (4.539, "fp8_bf16", 0),
                                         (4.541, "fp8_bf16", 1)]:
            self.assertEqual(self.compare(cpu, [5.5, far, 3.5], precision, exact), expected, (far, precision))
        self.assertEqual(self.compare(cpu, exact, "bf16", exact[:2]), 1)
        for far, expected in ((4.505, 0), (4.506, 1)):  # the cpu target's are fp32's by chance
            self.assertEqual(self.compare(exact, [5.5, far, 3.5], "bf16", exact), expected, far)


# In place of train_gpt: rank 0 logs steps, and what its rank was told. The ranks find each other as real ones do.
PROGRAM = '''#!%s
import json, os, socket, sys, time
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if ranks > 1:
    assert os.environ["LOCAL_RANK"] == str(rank) and os.environ["LOCAL_WORLD_SIZE"] == str(ranks)
    host, port = options["--rendezvous"].split(":")
    if rank == 0:
        with socket.create_server((host, int(port))) as server:
            server.settimeout(20)
            for _ in range(1, ranks):
                server.accept()[0].close()
    else:
        for i in range(2000):
            try:
                socket.create_connection((host, int(port))).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
else:
    assert "--rendezvous" not in options
if str(rank) == os.environ.get("FAILS"):
    sys.exit("train_gpt: rank %%d fails. So it is" %% rank)
error = json.loads(os.environ.get("ERROR", "{}"))
if rank == 0:
    with open(options["--plan-json"], "w") as f:
        json.dump({"peak_bytes": 1}, f)
    with open(options["--out"] + "/log.jsonl", "w") as f:
        for step in range(1, 7):
            entry = {"step": step, "step_ms": 1, "tokens_per_second": 100.0 * ranks, "peak_bytes": 1, "mfu": None,
                     "loss": 7.0 - step, "grad_norm": 2.0, "comm_ms": 3.0, "comm_exposed_ms": 1.0, "comm_bytes": 5000000}
            f.write(json.dumps({**entry, **(error if step == 2 and (ranks > 1 or "--fp8-format" in options) else {})}) + "\\n")
''' % sys.executable


class Data(unittest.TestCase):
    def test_no_measurement_reads_a_token_twice(self):
        """14 steps of 65536 tokens, or of eight ranks' 16384 each; 8 of eight micro-steps of 16384."""
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(script("gpu_report.py", "data", folder).returncode, 0)
            for name, width, vocabulary in (("gpt2", 2, 50257), ("llama", 4, 128256)):
                with open(f"{folder}/{name}_000.bin", "rb") as file:
                    header, tokens = array.array("i", file.read(1024)), array.array({2: "H", 4: "I"}[width], file.read())
                self.assertGreater(len(tokens), max(14 * 64 * 1024, 14 * 8 * 16384, 8 * 8 * 16384))
                self.assertEqual(header[2], len(tokens))
                self.assertTrue(vocabulary * 0.99 < max(tokens) < vocabulary)
            with open(folder + "/bytes_000.bin", "rb") as file:
                header, text = array.array("i", file.read(1024)), file.read()
            self.assertEqual((len(text), set(text[1::2])), (2 * header[2], {0}))


class Ranks(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.program = self.folder.name + "/train_gpt"
        with open(self.program, "w", encoding="utf-8") as file:
            file.write(PROGRAM)
        os.chmod(self.program, 0o755)
        self.one = self.folder.name + "/one"
        result = script("gpu_report.py", "run", self.one, "--precision", "fp32", TRAIN_GPT=self.program)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_what_does_not_fit_is_an_answer(self):
        for message, status in (("the plan needs 90 GiB, and this process may use 80 GiB. What would help: less", 0), ("out of luck", 2)):
            with open(self.program, "w", encoding="utf-8") as file:
                file.write(f"#!/bin/sh\necho 'train_gpt: {message}'\nexit 2\n")
            result = script("gpu_report.py", "run", self.one, "--precision", "bf16", TRAIN_GPT=self.program)
            self.assertEqual(result.returncode, status)
            self.assertEqual(json.loads(result.stdout.splitlines()[-1])["error"], message.split(". ")[0])

    def ranks(self, precision="fp32", **environment):
        """The row and the exit status."""
        result = script("gpu_report.py", "ranks", self.folder.name + "/two", self.one, "2", "--precision", precision,
                        "--collectives", "sockets", "--zero-stage", "3", TRAIN_GPT=self.program, **environment)
        return json.loads(result.stdout.splitlines()[-1]), result.returncode

    def test_row(self):
        row, status = self.ranks()
        self.assertEqual(status, 0)
        for name, value in {"bench": "ranks", "ranks": 2, "collectives": "sockets", "zero_stage": 3, "difference": 0,
                            "tokens_per_second": 200, "one_tokens_per_second": 100, "comm_ms": 3, "comm_bytes": 5e6}.items():
            self.assertEqual(row[name], value, name)
        self.assertNotIn("error", row)

    def test_differences_are_found(self):
        for error, precision, expected in (({"loss": 5.0001}, "fp32", 0), ({"loss": 5.001}, "fp32", 1),
                                           ({"loss": 5.001}, "bf16", 0), ({"loss": 5.2}, "bf16", 1),
                                           ({"grad_norm": 2.001}, "fp32", 1), ({"loss": None}, "fp32", 1),
                                           ({"step": 3}, "fp32", 1)):
            row, status = self.ranks(precision, ERROR=json.dumps(error))
            self.assertEqual(status, expected, (error, row))
            self.assertEqual(row.get("error"), "differs from one rank" if expected else None)

    def fp8(self, bf16, **error):
        result = script("gpu_report.py", "fp8", self.folder.name + "/fp8", bf16, "--precision", "bf16", "--fp8-format", "hybrid",
                        "--fp8-recipe", "delayed", "--num-layers", "8", TRAIN_GPT=self.program, ERROR=json.dumps(error))
        return json.loads(result.stdout.splitlines()[-1]), result.returncode

    def test_fp8_beside_bf16(self):
        row, status = self.fp8(self.one)
        self.assertEqual(status, 0)
        for name, value in {"bench": "fp8", "format": "hybrid", "recipe": "delayed", "layers": "8", "tokens_per_second": 100,
                            "bf16_tokens_per_second": 100, "bf16_peak_bytes": 1, "loss": 3.5, "bf16_loss": 3.5}.items():
            self.assertEqual(row[name], value, name)
        self.assertNotIn("error", row)
        for error, differs in (({"loss": 5.4}, 0), ({"loss": 5.5}, 1), ({"loss": None}, 1), ({"step": 3}, 1)):  # of a mean of 3.5
            row, status = self.fp8(self.one, **error)
            self.assertEqual((status, row.get("error")), (differs, "differs from bf16" if differs else None))
        self.assertEqual(self.fp8(self.folder.name + "/none")[1], 1)

    def test_any_rank_may_fail(self):
        for rank in (0, 1):
            row, status = self.ranks(FAILS=str(rank))
            self.assertNotEqual(status, 0)
            self.assertEqual(row["error"], f"rank {rank} fails")


class Spills(unittest.TestCase):
    def table(self, *kernels, architecture="sm_80", stack=16, build="bf16_sm_80", options=()):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, f"ptxas_{build}.log")
            with open(path, "w", encoding="utf-8") as file:
                for name, stores in kernels:
                    file.write(f"ptxas info    : Compiling entry function '{name}' for '{architecture}'\n"
                               f"    {stack} bytes stack frame, {stores} bytes spill stores, 8 bytes spill loads\n"
                               f"ptxas info    : Used 255 registers, used 1 barriers, 16 bytes smem, 400 bytes cmem[0]\n")
            return script("ptxas_table.py", *options, path)

    def test_bounds(self):
        # flash_forward_kernel<plan<64, 0> >: plain causal attention; with 1 it sees documents or a window.
        forward, masked, backward = (f"_Z{len(name)}{name}I4planILi64ELi{scores}EEEvv" for name, scores in (
            ("flash_forward_kernel", 0), ("flash_forward_kernel", 1), ("flash_backward_key_kernel", 0)))
        table = self.table((forward, 0), (backward, 120), (masked, 28), ("rope_kernel", 0))
        self.assertEqual(table.returncode, 0, table.stderr)
        self.assertRegex(table.stdout, r"flash_backward_key_kernel<plan<64, 0> > bf16_sm_80 +255 +16 +16 +120 +8\n")
        any_scores = backward.replace("ELi0E", "ELi2E")
        for kernel, most in ((forward, {"sm_100": 8, "sm_120": 8}), (masked, {"sm_89": 28, "sm_90a": 68, "sm_120": 8}),
                             (backward, {"sm_90a": 120, "sm_100": 48, "sm_120": 64}), (any_scores, {"sm_80": 172, "sm_100": 96, "sm_120": 96})):
            for architecture, stores in most.items():
                with self.subTest(kernel=kernel, architecture=architecture):
                    self.assertEqual(self.table((kernel, stores), architecture=architecture).returncode, 0)
                    self.assertEqual(self.table((kernel, stores + 4), architecture=architecture).returncode, 1)
        for kernel, stores in ((forward, 4), (masked, 32), (backward, 124), ("rope_kernel", 4)):
            table = self.table((forward, 0), (kernel, stores))
            self.assertEqual(table.returncode, 1)
            self.assertRegex(table.stderr, f" of bf16_sm_80 spills {stores} bytes")
        for architecture, stores, status in (("sm_80", 0, 0), ("sm_80", 4, 1), ("sm_89", 4, 1), ("sm_90a", 4, 1), ("sm_100", 12, 1), ("sm_120", 28, 0)):
            self.assertEqual(self.table((backward, stores), architecture=architecture, build="fp32").returncode, status)
        for stores, status in ((4, 0), (8, 1)):
            kernel = ("_Z31unfused_softmax_backward_kernelILi1EEvv", stores)
            self.assertEqual(self.table(kernel, options=("--ptxas", "12.4")).returncode, status)
            self.assertEqual(self.table(kernel).returncode, 1)
        self.assertEqual(self.table().returncode, 1)  # no kernel at all

    def test_hopper(self):
        """Kernels for sm_90a alone are judged by that build, where not even a stack is allowed."""
        table = self.table(("sm90_forward_kernel", 4), ("rope_kernel", 0))
        self.assertEqual((table.returncode, "sm90" in table.stdout), (0, False))
        for stack, status in ((0, 0), (16, 1)):
            table = self.table(("sm90_forward_kernel", 0), architecture="sm_90a", stack=stack)
            self.assertEqual(table.returncode, status, table.stderr)
            self.assertIn("sm90_forward_kernel bf16_sm_80_sm_90a", table.stdout)
        self.assertIn("sm90_forward_kernel of bf16_sm_80_sm_90a has 16 bytes of stack", table.stderr)


NVCC = shutil.which("nvcc") or next(filter(os.path.exists, ["/usr/local/cuda/bin/nvcc"]), None)


def disassembler():
    """nvdisasm or cuobjdump: of the PATH, beside nvcc, or of the wheel nvidia-cuda-nvdisasm, installed or unpacked into .deps."""
    folders = [os.path.dirname(os.path.realpath(NVCC))] if NVCC else []
    for packages in [os.path.join(ROOT, ".deps", "nvdisasm"), *sys.path]:
        folders += glob.glob(os.path.join(packages, "nvidia", "cu*", "bin"))
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *folders])
    found = {name: shutil.which(name, path=path) for name in ("nvdisasm", "cuobjdump")}
    return [found["nvdisasm"]] if found["nvdisasm"] else [found["cuobjdump"], "-sass"] if found["cuobjdump"] else None


def why_no_machine_code():
    if not NVCC or not DISASSEMBLER:
        return "there is no nvcc, or neither nvdisasm nor cuobjdump"
    version = subprocess.run([NVCC, "--version"], capture_output=True, text=True, check=False).stdout
    return None if "release 13.0" in version else "the counts on the pages are of nvcc 13.0"


DISASSEMBLER = disassembler()
NO_MACHINE_CODE = why_no_machine_code()


def machine_code(*files):
    """What these files of kernels compile to for sm_90a, in bf16."""
    code = ""
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            subprocess.run([NVCC, "-std=c++17", "-O3", "-I", ROOT, "-D_GNU_SOURCE", "-DTARGET_CUDA", "-DPRECISION_BF16", "-gencode",
                            "arch=compute_90a,code=sm_90a", "-cubin", os.path.join(ROOT, "kernels", file), "-o", folder + "/cubin"],
                           check=True, capture_output=True, timeout=1800)
            code += subprocess.run([*DISASSEMBLER, folder + "/cubin"], check=True, capture_output=True, text=True, timeout=120).stdout
    return code


class Overlap(unittest.TestCase):
    def overlap(self, *opcodes, kernel="_Z19sm90_forward_kernelI17sm90_forward_planILi64EEEv22sm90_forward_arguments"):
        sass = "\n".join([f"\tFunction : {kernel}", *(f"  /*{16 * i:04x}*/  {code} R1 ;" for i, code in enumerate(opcodes)),
                          "\tFunction : other", "  /*0000*/ WARPGROUP.DEPBAR.LE gsb0 ;", "  /*0010*/ MUFU.EX2 R1, R2 ;"])
        return subprocess.run([os.path.join(SCRIPTS, "hopper_overlap.py")], input=sass, capture_output=True, text=True,
                              timeout=60)

    PRODUCT, ONE_LEFT, NONE_LEFT = "HGMMA.64x64x16.F32.BF16 R8, gsb0 ;", "WARPGROUP.DEPBAR.LE gsb0, 0x1 ;", "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"
    EXPONENTIAL, MULTIPLICATION, AGAIN = "MUFU.EX2", "FMUL R2, R3, R4 ;", "@P0 BRA 0x0 ;"

    def test_waits(self):
        """An exponential stands before the second wait after the products that it was put beside."""
        products = [self.PRODUCT, self.PRODUCT, self.ONE_LEFT]
        self.assertEqual(self.overlap(*products, self.EXPONENTIAL, self.NONE_LEFT, self.AGAIN).returncode, 0)
        self.assertEqual(self.overlap(*products, self.NONE_LEFT, self.EXPONENTIAL, self.AGAIN).returncode, 1)
        self.assertEqual(self.overlap("MOV", kernel="_Z11norm_kernel").returncode, 1)  # none of Hopper's

    def test_products_in_flight(self):
        """A product is begun before the wait for the one that it was put beside; one of several instructions counts once."""
        rest = [self.EXPONENTIAL, self.NONE_LEFT, self.AGAIN]
        parts = [self.PRODUCT.replace(", gsb0", ""), self.PRODUCT]
        self.assertEqual(self.overlap(*parts, *parts, self.ONE_LEFT, *rest).returncode, 0)
        late = self.overlap(*parts, self.NONE_LEFT, *parts, *rest)
        self.assertEqual((late.returncode, "[0, 0], multiplications while none is: 0; expected [0, 1]" in late.stdout), (1, True), late.stdout)
        kept = self.overlap(self.PRODUCT, self.PRODUCT, self.EXPONENTIAL, self.ONE_LEFT, self.AGAIN)  # the second one, into the next step
        self.assertIn("[1, 2], multiplications while none is: 0; expected [0, 1]", kept.stdout)

    def test_multiplications(self):
        """At head dim 256 O is rescaled while S is multiplied."""
        kernel = "_Z19sm90_forward_kernelI17sm90_forward_planILi256EEEv22sm90_forward_arguments"
        for idle, beside, status in ((16, 112, 0), (17, 111, 1)):
            result = self.overlap(*idle * [self.MULTIPLICATION], self.PRODUCT, *beside * [self.MULTIPLICATION], self.PRODUCT, self.ONE_LEFT,
                                  self.EXPONENTIAL, self.NONE_LEFT, self.AGAIN, kernel=kernel)
            self.assertEqual(result.returncode, status, result.stdout)

    def test_instances(self):
        """Those with tables of first keys are kernels of their own, and lines of their own."""
        name = "_Z20sm90_backward_kernelI18sm90_backward_planILi96ELb{}EEEv23sm90_backward_arguments"
        self.assertTrue(self.overlap("MOV", kernel=name.format(0)).stdout.startswith("sm90_backward_kernel 96: "))
        self.assertTrue(self.overlap("MOV", kernel=name.format(1)).stdout.startswith("sm90_backward_kernel 96 with tables: "))

    @long_test("12 seconds; the emulator's tests hold the schedule that the source asks for")
    @unittest.skipIf(NO_MACHINE_CODE, NO_MACHINE_CODE)
    def test_what_nvcc_makes(self):
        """Softmax runs beside the products, and a step has the instructions by which docs/internals/hopper.md predicts."""
        sass = machine_code("attention/sm90_forward.cu", "attention/sm90_backward.cu")
        result = subprocess.run([os.path.join(SCRIPTS, "hopper_overlap.py")], input=sass, capture_output=True, text=True, timeout=60)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        counted = {(direction, int(head_dim)): int(step) for direction, head_dim, step in re.findall(
            r"^sm90_(\w+)_kernel (\d+): .*; (\d+) instructions a step, ", result.stdout, re.MULTILINE)}
        for direction, of_head_dims in hopper_ceiling.INSTRUCTIONS.items():
            self.assertEqual({head_dim: counted[direction, head_dim] for head_dim in hopper_ceiling.HEAD_DIMS}, of_head_dims)

    def test_instructions_of_a_step(self):
        """Without the mask that a branch goes past, and of the inner loop."""
        step = ["MOV", "HGMMA", "@P1 BRA 0x60 ;", "FSEL", "FSEL", "FSEL", "MUFU.EX2", "@P0 BRA 0x10 ;", "FADD", "@P2 BRA 0x0 ;", "EXIT"]
        self.assertIn("; 4 instructions a step", self.overlap(*step).stdout)
        self.assertIn("; no instructions a step", self.overlap(*step[:7]).stdout)


class Instructions(unittest.TestCase):
    """scripts/count_sass.py"""

    def count(self, name, opcodes, target="sm_90a"):
        sass = "\n".join([f"\t.target\t{target}", f"\tFunction : _Z19{name}ILb0ELb1EEvP4bf16PKS0_lPj",
                          *(f"  /*{16 * i:04x}*/  {code} ;" for i, code in enumerate(opcodes)), "\tFunction : other", "  /*0000*/ EXIT ;"])
        return subprocess.run([os.path.join(SCRIPTS, "count_sass.py")], input=sass, capture_output=True, text=True, timeout=60)

    def test_limit(self):
        for instructions, status in ((16 * 8, 0), (16 * 8 + 1, 1)):
            opcodes = ["FMUL R1, R2, R3"] * (instructions - 2) + ["STG.E.128 desc[UR4][R2.64], R4", "EXIT"]
            result = self.count("squared_relu_forward_kernel", opcodes)
            self.assertEqual(result.returncode, status, result.stdout)
            self.assertIn(f"squared_relu_forward_kernel: {instructions} instructions for 8 elements", result.stdout)
        self.assertEqual(self.count("norm_kernel", ["EXIT"]).returncode, 1)  # none of an activation's

    def test_detours(self):
        """A forward has no branch and no call before its end, and loads 16 bytes at a time."""
        plain = ["LDG.E.128 R4, desc[UR4][R2.64]", "STG.E.128 desc[UR4][R2.64], R4", "EXIT"]
        self.assertEqual(self.count("geglu_forward_kernel", [*plain, "BRA 0x30 "]).returncode, 0)
        for detour in ("@P0 BRA 0x10 ", "CALL.REL.NOINC 0x10 ", "BSSY B0, 0x10 ", "LDG.E R4, desc[UR4][R2.64]", "LDG.E.U16 R4, desc[UR4][R2.64]"):
            result = self.count("geglu_forward_kernel", [plain[0], detour, *plain[1:]])
            self.assertEqual(result.returncode, 1, detour)
            self.assertIn(f"; '{detour.strip()}'", result.stdout)

    def test_what_the_roofline_has(self):
        for instructions, status in ((93, 0), (90, 1), (96, 1)):
            opcodes = ["FMUL R1, R2, R3"] * (instructions - 2) + ["STG.E.128 desc[UR4][R2.64], R4", "EXIT"]
            result = self.count("gelu_forward_kernel", opcodes)
            self.assertEqual(result.returncode, status, result.stdout)
            self.assertEqual("scripts/roofline.py has 11.6" in result.stdout, status == 1)
        self.assertEqual(self.count("gelu_forward_kernel", opcodes, "sm_80").returncode, 0)  # whose code is another

    @unittest.skipIf(NO_MACHINE_CODE, NO_MACHINE_CODE)
    def test_what_nvcc_makes(self):
        sass = machine_code("activation.cu")
        result = subprocess.run([os.path.join(SCRIPTS, "count_sass.py")], input=sass, capture_output=True, text=True, timeout=60)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual(result.stdout.count("_forward_kernel: "), 5, result.stdout)

    def test_loop(self):
        """What sums columns is judged by its loop; a gated backward stores 8 elements of each half."""
        loop = ["MOV R1, R2", *["FMUL R1, R2, R3"] * 15, *["STG.E.128 desc[UR4][R2.64], R4"] * 2, "@P0 BRA 0x10 ", "MOV R1, R2", "EXIT"]
        self.assertIn(": 18 instructions for 8 elements", self.count("swiglu_backward_sums_kernel", loop).stdout)


class Report(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.results = self.folder + "/results"

    def start(self, *values):
        return script("gpu_report.py", "start", self.results, *values)

    def add(self, stage, check, status="0", seconds=3, limit=60, own_limit=60, output="", probe=False):
        """The entry of the report; its rows may be given in place of what the check printed."""
        if not isinstance(output, str):
            output = "\n".join(map(json.dumps, output))
        with open(self.folder + "/output", "w", encoding="utf-8") as file:
            file.write(output)
        result = script("gpu_report.py", "add", self.results, stage, check, str(status), str(seconds), str(limit), str(own_limit),
                        self.folder + "/output", *["--probe"][:probe])
        entry = next(entry for entry in self.read()["checks"] if entry["check"] == check)
        self.assertEqual(result.returncode, {"passed": 0, "failed": 1, "hung": 1}.get(entry["outcome"], 77), result.stderr)
        return entry

    def read(self):
        with open(self.results + "/gpu_check.json", encoding="utf-8") as file:
            return json.load(file)

    def page(self):
        with open(self.results + "/gpu_check.md", encoding="utf-8") as file:
            return file.read()

    def test_tables(self):
        attention = {"bench": "attention", "direction": "forward", "mask": "causal", "head_dim": 64, "heads": 32, "groups": 32, "batch": 16,
                     "length": 1024}
        train = {"bench": "train", "preset": "gpt2-124m", "length": 1024, "batch": 16, "policy": "none"}
        ranks = {**train, "bench": "ranks", "engine": "ours", "ranks": 2, "collectives": "nccl", "zero_stage": 0}
        self.start("gpu=Some GPU", "date=2026-01-01", "commit=abc")
        self.add("unit", "one")
        self.add("unit", "two", status=1)
        self.add("attention_table", "attention_ours", output=[
            {**attention, "engine": "ours", "tflops": 300.0},
            {**attention, "direction": "deterministic backward", "mask": "full", "engine": "ours", "tflops": 250.0},
            {**attention, "direction": "backward", "engine": "ours", "tflops": 260.0}])
        self.add("attention_table", "device_rates", output=[
            {"bench": "rates", "copy_bytes_per_s": 3.01e12, "matmul_size": 8192, "matmul_flops_per_s": 711e12}])
        self.add("attention_table", "attention_torch", output=[
            {**attention, "engine": "torch flash", "tflops": 200.0}, {**attention, "engine": "torch cudnn", "error": "none"},
            {**attention, "engine": "torch cudnn", "error": "none", "mask": "full"}, {**attention, "engine": "ours sm_80", "tflops": 190.0},
            {**attention, "direction": "backward", "engine": "fused", "tflops": 325.0}])
        self.add("train_table", "train_124m_1024_none", output=[
            {**train, "engine": "ours", "tokens_per_second": 5e5, "mfu": 0.4, "peak_bytes": 12 << 30, "planned_bytes": 11 << 30}])
        self.add("train_table", "torch_124m_1024", output=[
            {**train, "engine": "torch", "tokens_per_second": 4e5, "peak_bytes": 14 << 30}])
        self.add("train_table", "train_124m_1024_64", output=[{**train, "engine": "ours", "batch": 64, "tokens_per_second": 6e5}])
        self.add("train_table", "train_124m_1024_full", status=1, output=[
            {**train, "engine": "ours", "policy": "full", "error": "failed"}])
        # Runs that other stages need are no rows of the table of training.
        self.add("curve", "curve_gpt2_fp32_cpu", output=[{**train, "engine": "ours", "tokens_per_second": 77777.0}])
        self.add("ranks", "ranks_one", output=[{**train, "engine": "ours", "tokens_per_second": 88888.0}])
        self.add("ranks", "ranks_nccl_0", output=[
            {**ranks, "tokens_per_second": 9e5, "one_tokens_per_second": 5e5, "comm_bytes": 2e8, "comm_ms": 3.14,
             "comm_exposed_ms": 0.5, "difference": 1.23e-4}])
        self.add("ranks", "ranks_sockets_3", output=[
            {**ranks, "preset": None, "collectives": "sockets", "zero_stage": 3, "error": "differs from one rank", "difference": 0.5}])
        fp8 = {**train, "preset": "gpt2-1558m", "bench": "fp8", "engine": "ours", "format": "hybrid", "recipe": "tensorwise", "layers": None}
        self.add("fp8", "fp8_1558m_bf16", output=[{**train, "engine": "ours", "tokens_per_second": 99999.0}])
        self.add("fp8", "torchao_1558m", output=[{**train, "preset": "gpt2-1558m", "engine": "torchao", "tokens_per_second": 6e4}])
        self.add("fp8", "fp8_1558m", output=[
            {**fp8, "tokens_per_second": 7.5e4, "bf16_tokens_per_second": 6e4, "peak_bytes": 60 << 30, "bf16_peak_bytes": 68 << 30, "loss": 3.14159,
             "bf16_loss": 3.14},
            {**fp8, "preset": None, "layers": "3", "recipe": "delayed", "error": "differs from bf16"},
            {**fp8, "preset": "demo", "length": 128, "batch": 8, "micro_steps": 2, "tokens_per_second": 66666.0, "loss": 3.2, "bf16_loss": 3.1}])
        script("gpu_report.py", "skip", self.results, "sanitize", "three", "no time left")
        script("gpu_report.py", "skip", self.results, "sanitize", "four", "not installed")
        text = self.page()
        for line in ("- 2026-01-01, commit abc: unit, attention_table, train_table, curve, ranks, fp8, sanitize\n",
                     "14 of 18 checks passed; failed: two (status 1), train_124m_1024_full (status 1); "
                     "no time left: three; skipped: four (not installed).",
                     "Ours, of B x T = 16384 tokens. In brackets: over the fastest of cuDNN from here, PyTorch flash; 1.00 or more in 1 of 2\n"
                     "cases. Longest is T 1024 at head dim 64.\n",
                     "| | head dim, heads | causal, longest | ours for sm_80 | full, longest |\n",
                     "| forward | 64, 32/32 | 300 (1.50) | 190 | - |\n"
                     "| backward | 64, 32/32 | 260 (0.80) | - | - |\n"
                     "| deterministic backward | 64, 32/32 | - | - | 250 |\n",
                     "- PyTorch cuDNN: none (2 times)\n", "- A copy: 3.01 TB/s, 0.70 of the 4.3 by which ",
                     "- A product of 8192^3 in bf16: 711 TFLOP/s, 0.90 of the 790 there.",
                     "A peak exceeds its plan by at most 1.000 GiB.\n",
                     "| gpt2-124m | 1024 | 16 | 1 | none | 500000 | 40.0 | 12.00 | 1.25 |\n"
                     "| gpt2-124m | 1024 | 16 | 1 | full | failed | - | - | - |\n"
                     "| gpt2-124m, torch | 1024 | 16 | 1 | none | 400000 | 32.0 | 14.00 | - |\n"
                     "| gpt2-124m | 1024 | 64 | 1 | none | 600000 | - | - | - |",
                     "| gpt2-124m | 2 | nccl | 0 | 900000 | 1.80 | 200.00 | 3.14 | 0.50 | 0.0001 |",
                     "| small | 2 | sockets | 3 | differs from one rank | - | - | - | - | 0.5 |",
                     "| gpt2-1558m | 1024 | 16 | hybrid tensorwise | 75000 | 1.25 | 1.24 | 1.25 | 60.00 | 68.00 | 3.1416 | 3.1400 |",
                     "| small, 3 of the layers | 1024 | 16 | hybrid delayed | differs from bf16 | - | - | - | - | - | - | - |",
                     "| demo | 128 | 8 x 2 | hybrid tensorwise | - | - | - | - | - | - | 3.2000 | 3.1000 |"):
            self.assertIn(line, text)
        for number in ("66666", "77777", "88888", "99999"):
            self.assertNotIn(number, text)

    def test_published_figures(self):
        """They stand beside what was measured at their shape and length, and are held against nothing."""
        attention = {"bench": "attention", "engine": "ours", "mask": "causal", "head_dim": 128, "heads": 64, "groups": 8, "batch": 1, "length": 16384}
        self.start("gpu=Some GPU")
        self.add("attention_table", "attention_ours", output=[
            {**attention, "direction": "forward", "tflops": 600}, {**attention, "direction": "forward", "tflops": 590, "batch": 2, "length": 8192},
            {**attention, "direction": "deterministic backward", "tflops": 500, "batch": 2, "length": 8192},
            {**attention, "direction": "backward", "heads": 32, "tflops": 500},
            {**attention, "direction": "forward", "heads": 16, "groups": 16, "tflops": 610},
            {**attention, "direction": "forward", "heads": 16, "groups": 16, "engine": "fa3", "tflops": 610}])
        text = self.page()
        for line in ("over the fastest of FA3; 1.00 or more in 1 of 1\n", "Longest is T 8192 at head dim 128; T 16384 at head dim 128.\n",
                     "| | head dim, heads | causal, T 8192 | causal, longest |\n",
                     "| forward | 128, 64/8 | 590 | 600 |", "| forward | 128, 16/16 | - | 610 (1.00) |", "| backward | 128, 32/8 | - | 500 |",
                     "| deterministic backward | 128, 64/8 | 500 | 500 |",
                     "- FA4 on H200: forward, causal, 128, 64/8: 702\n", "- FA3 on H100: forward, causal, 128, 16/16: 616\n",
                     "- cuDNN 9.27 on H200: forward, causal, 128, 64/8: 633\n",
                     "cudnn-frontend's benchmark/attention_training"):
            self.assertIn(line, text)

    def test_goals(self):
        """The best of a model's runs at the goal's length, the worst of attention's shapes; rates are judged against peers alone."""
        attention = {"bench": "attention", "mask": "causal", "head_dim": 128, "heads": 16, "groups": 16, "batch": 4, "length": 4096}
        train = {"bench": "train", "engine": "ours", "preset": "gpt2-1558m", "length": 1024, "batch": 16, "policy": "none"}
        self.start("gpu=Some GPU")
        self.assertIn("**Goals: 0 met, 0 missed, 10 not measured**", self.page())
        self.add("attention_table", "attention", output=[
            {**attention, "engine": engine, "direction": direction, "length": length, "tflops": rate}
            for direction, length, engine, rate in (
                ("forward", 4096, "ours", 600), ("forward", 4096, "torch cudnn", 500), ("forward", 4096, "torch flash", 400),
                ("forward", 8192, "ours", 630), ("forward", 8192, "torch cudnn", 600), ("forward", 1024, "ours", 100),
                ("forward", 1024, "torch cudnn", 500), ("backward", 4096, "ours", 480), ("backward", 4096, "torch flash", 500),
                ("deterministic backward", 4096, "ours", 480))])
        self.add("train_table", "train", output=[
            {**train, "mfu": 0.57, "tokens_per_second": 6e4, "micro_steps": 8}, {**train, "policy": "selective", "mfu": 0.54, "tokens_per_second": 5.5e4},
            {**train, "length": 4096, "mfu": 0.7, "tokens_per_second": 6e4}, {**train, "preset": "qwen2.5-0.5b", "error": "failed"},
            {**train, "preset": "gpt2-124m", "batch": 64, "tokens_per_second": 578750.0, "mfu": None}])
        text = self.page()
        for line in ("**Goals: 2 met, 2 missed, 6 not measured**",
                     "- met: attention, forward: 1.05 at causal, 16/16 heads, T 8192, without FA3 or FA4\n",
                     "- missed: attention, backward: 0.96 at causal, 16/16 heads, T 4096, without FA3 or FA4\n",
                     "- not measured: attention, deterministic backward: -\n", "- met: gpt2-124m: 578750, 1.00 of 578750 (",
                     "- missed: gpt2-1558m: 57.0 % MFU, 0.95 of 60.0 % MFU (llm.c has 47 % on 8 H100), ",
                     "- not measured: qwen2.5-0.5b: the goal is 149000 (llmq's)\n"):
            self.assertIn(line, text)

    def test_what_a_goal_is_held_against(self):
        """A direction without a rate of FA3 or FA4 says so; a share of the goal, and of a peer's rate that is none, is said."""
        attention = {"bench": "attention", "mask": "causal", "head_dim": 128, "heads": 16, "groups": 16, "batch": 4, "length": 4096}
        train = {"bench": "train", "engine": "ours", "length": 1024, "batch": 16, "policy": "none"}
        self.start("gpu=Some GPU")
        self.add("attention_table", "attention", output=[
            {**attention, "direction": direction, "engine": engine, "tflops": rate} for direction, engine, rate in (
                ("forward", "ours", 600), ("forward", "fa3", 600), ("backward", "ours", 500), ("backward", "torch cudnn", 500),
                ("deterministic backward", "ours", 500), ("deterministic backward", "fa4", 550))])
        self.add("train_table", "train", output=[
            {**train, "preset": "gpt2-124m", "tokens_per_second": 500e3}, {**train, "preset": "gpt2-1558m", "mfu": 0.57, "tokens_per_second": 57e3},
            {**train, "preset": "qwen2.5-7b", "batch": 16, "micro_steps": 4, "tokens_per_second": 12e3}])
        self.add("fp8", "fp8", output=[{**train, "bench": "fp8", "preset": "qwen2.5-1.5b", "micro_steps": 8, "format": "hybrid", "recipe": "delayed",
                                        "layers": None, "tokens_per_second": 80e3}])
        text = self.page()
        for line in ("- met: attention, forward: 1.00 at causal, 16/16 heads, T 4096\n",
                     "- met: attention, backward: 1.00 at causal, 16/16 heads, T 4096, without FA3 or FA4\n",
                     "- missed: attention, deterministic backward: 0.91 at causal, 16/16 heads, T 4096\n",
                     "- missed: gpt2-124m: 500000, 0.86 of 578750 (", "modded-nanogpt's README)\n",
                     "47 % on 8 H100), 1.20 of llm.c's 47.6 thousand tokens/s\n", ": 12000, 0.87 of 13850 (llmq's)\n",
                     "- met: qwen2.5-1.5b, FP8: 80000, 1.10 of 73000 (llmq's)\n", "| qwen2.5-1.5b | 1024 | 16 x 8 | hybrid delayed | 80000 | "):
            self.assertIn(line, text)

    def test_steps_of_the_same_tokens(self):
        """torch.compile's rate is held against ours of as many micro-steps, between which no AdamW runs."""
        train = {"bench": "train", "preset": "gpt2-1558m", "length": 1024, "batch": 16, "policy": "none"}
        self.start("gpu=Some GPU")
        self.add("train_table", "train", output=[
            {**train, "engine": "ours", "micro_steps": 8, "tokens_per_second": 66000}, {**train, "engine": "ours", "tokens_per_second": 60000},
            {**train, "engine": "torch", "micro_steps": 1, "tokens_per_second": 50000},
            {**train, "engine": "torch", "micro_steps": 8, "tokens_per_second": 55000}])
        text = self.page()
        for line in ("| gpt2-1558m | 1024 | 16 | 8 | none | 66000 | - | - | 1.20 |\n",
                     "| gpt2-1558m | 1024 | 16 | 1 | none | 60000 | - | - | 1.20 |\n"):
            self.assertIn(line, text)

    def test_what_fits_pytorch(self):
        """Half the batch in twice the micro-steps is PyTorch's step of as many tokens."""
        train = {"bench": "train", "preset": "gpt2-1558m", "length": 1024, "batch": 16, "micro_steps": 8, "policy": "none"}
        self.start("gpu=Some GPU")
        self.add("train_table", "train", output=[
            {**train, "engine": "ours", "tokens_per_second": 66000}, {**train, "engine": "torch", "error": "out of memory"},
            {**train, "engine": "torch", "batch": 8, "micro_steps": 16, "tokens_per_second": 55000, "policy": "none, B 16 was out of memory"}])
        text = self.page()
        lines = ("| gpt2-1558m | 1024 | 16 | 8 | none | 66000 | - | - | 1.20 |\n",
                 "| gpt2-1558m, torch | 1024 | 16 | 8 | none | out of memory | ",
                 "| gpt2-1558m, torch | 1024 | 8 | 16 | none, B 16 was out of memory | 55000 | ")
        for line in lines:
            self.assertIn(line, text)
        self.assertEqual(sorted(lines, key=text.index), list(lines))

    def test_outcomes(self):
        self.start("gpu=Some GPU")
        for status, seconds, limit, own_limit, outcome, why in (
                (0, 3, 60, 60, "passed", None), (3, 3, 60, 60, "failed", "status 3"), (124, 60, 60, 60, "hung", "killed after 60 s"),
                (137, 65, 60, 60, "hung", "killed after 65 s"), ("stuck", 80, 60, 60, "hung", "could not be killed after 80 s"),
                (124, 10, 10, 60, "no time", "ended after 10 s, when no time was left"), (137, 3, 60, 60, "failed", "status 137"),
                (77, 0, 60, 60, "skipped", "the last line"), ("stopped by TERM", 5, 0, 0, "stopped", "stopped by TERM")):
            entry = self.add("unit", f"{status} {seconds}", status, seconds, limit, own_limit, "a line\nthe last line\n")
            self.assertEqual((entry["outcome"], entry.get("why")), (outcome, why))
        self.assertEqual(self.add("build", "memory", 1, output="refused\n", probe=True)["why"], "refused")
        self.assertEqual(self.add("build", "memory", 124, 60, probe=True)["outcome"], "skipped")
        self.assertEqual(self.add("build", "memory", output="one\ntwo\n", probe=True)["why"], "two")

    def test_programs(self):
        """A test program says by TAP what passed; its status alone is not believed."""
        self.start("gpu=Some GPU")
        tap = "1..3\nok 1 - a\n{}\nnot ok 3 - c # SKIP\n"
        entry = self.add("unit", "one", output=tap.format("ok 2 - b"))
        self.assertEqual((entry["outcome"], entry["tests"]), ("passed", {"planned": 3, "passed": 2, "failed": [], "skipped": 1}))
        entry = self.add("unit", "one", status=1, output=tap.format("not ok 2 - b"))
        self.assertEqual((entry["outcome"], entry["why"]), ("failed", "status 1: b"))
        for output in (tap.format("not ok 2 - b"), "1..2\nok 1 - a\n", "1..0\n"):
            self.assertEqual(self.add("unit", "one", output=output)["outcome"], "failed", output)

    def test_several_runs(self):
        row = {"bench": "train", "engine": "ours", "preset": "gpt2-124m", "length": 1024, "batch": 16, "policy": "none"}
        self.assertEqual(self.start("gpu=Some GPU", "commit=abc", "date=first").returncode, 0)
        self.add("train_table", "train", output=[{**row, "tokens_per_second": 11111}])
        self.add("train_table", "other", output=[{**row, "policy": "full", "tokens_per_second": 22222}])
        self.add("unit", "unit", status=1)
        self.assertEqual(self.start("gpu=Some GPU", "commit=def", "date=second").returncode, 0)
        self.add("train_table", "train", output=[{**row, "tokens_per_second": 33333}])
        script("gpu_report.py", "skip", self.results, "unit", "unit", "no time left")
        text = self.page()
        self.assertNotIn("11111", text)
        for line in ("| 33333 |", "| 22222 |", "- first, commit abc: train_table, unit\n", "- second, commit def: train_table\n",
                     "Several commits stand side by side", "failed: unit (status 1)"):
            self.assertIn(line, text)
        for other in (["gpu=Other GPU"], ["gpu=Some GPU", "rehearsal=build/emu"]):
            result = self.start(*other)
            self.assertEqual(result.returncode, 2)
            self.assertIn("name another folder", result.stderr)
        self.assertEqual(len(self.read()["runs"]), 2)

    def test_broken_rows_are_left_out(self):
        self.start("gpu=Some GPU")
        entry = self.add("unit", "one", 124, 10, 10, 60, '{"bench": "train", "x": 1}\n{"other": 2}\n{"bench": "train", "x')
        self.assertEqual(entry["rows"], [{"bench": "train", "x": 1}])


class Page(unittest.TestCase):
    def test_page_is_what_the_script_writes(self):
        result = script("gpu_report.py", "page", "--check")
        self.assertEqual(result.returncode, 0, result.stdout)

    def test_readme_has_figures_of_the_page(self):
        with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
            said = re.search(r"at (\d+) thousand tokens/s, ([\d.]+) x torch\.compile.*?in (\d+) of (\d+) cases; FP8 training ([\d.]+) and ([\d.]+) x.*?; "
                             r"(\d+) of (\d+) speed goals are missed", file.read(), re.DOTALL)
        with open(os.path.join(ROOT, "docs/gpu/measured.md"), encoding="utf-8") as file:
            text = file.read()
        trained = next(row for row in (re.split(" {2,}", line) for line in text.splitlines()) if row[0] == "gpt2-124m" and row[4] == "none")
        cases = re.search(r"1\.00 or more in (\d+) of (\d+)\ncases", text).groups()
        fp8 = re.findall(r", FP8: \d+, ([\d.]+) of", text)
        met, missed = map(int, re.search(r"Goals: (\d+) met, (\d+) missed, 0 not measured", text).groups())
        self.assertEqual(said.groups(), (str(round(int(trained[5]) / 1000)), trained[8], *cases, *fp8, str(missed), str(met + missed)))

    def test_cases_are_all_that_were_measured(self):
        """The page has some lengths of each kind of attention; its count of cases is of all lengths."""
        rates = {}
        for path in glob.glob(os.path.join(ROOT, "docs/gpu/measured-*.json")):
            with open(path, encoding="utf-8") as file:
                for row in (row for check in json.load(file)["checks"] for row in check.get("rows", [])):
                    if row.get("bench") == "attention" and "tflops" in row and row["engine"] != "ours sm_80":
                        shape = tuple(row[name] for name in ("direction", "mask", "head_dim", "heads", "groups", "length"))
                        rates.setdefault(shape, {})[row["engine"]] = row["tflops"]
        ratios = [round(engines.pop("ours") / max(engines.values()), 2) for engines in rates.values()]
        with open(os.path.join(ROOT, "docs/gpu/measured.md"), encoding="utf-8") as file:
            self.assertIn(f"1.00 or more in {sum(ratio >= 1 for ratio in ratios)} of {len(ratios)}\ncases", file.read())

    def test_only_measurements_are_published(self):
        attention = {"bench": "attention", "engine": "ours", "direction": "forward", "mask": "causal", "head_dim": 64, "heads": 32, "groups": 32,
                     "batch": 16, "length": 1024, "tflops": 321.0}
        with tempfile.TemporaryDirectory() as folder:
            docs, results = folder + "/docs", folder + "/results"
            os.mkdir(docs)
            with open(docs + "/measured.md", "w", encoding="utf-8") as file:
                file.write(script("gpu_report.py", "page", docs).stdout)
            with open(docs + "/measured.md", encoding="utf-8") as file:
                self.assertIn("There is no measurement yet", file.read())
            self.assertEqual(script("gpu_report.py", "publish", results, docs).returncode, 2)
            for rehearsal in ("build/emu", ""):
                shutil.rmtree(results, ignore_errors=True)
                script("gpu_report.py", "start", results, "gpu=NVIDIA Some 200, 580.1, 9.0", "date=2026-01-01", "rehearsal=" + rehearsal)
                with open(folder + "/output", "w", encoding="utf-8") as file:
                    file.write(json.dumps(attention) + "\n/some/folder: no such file\n")
                script("gpu_report.py", "add", results, "attention_table", "attention_ours", "1", "3", "60", "60", folder + "/output")
                result = script("gpu_report.py", "publish", results, docs)
                self.assertEqual(result.returncode, 2 if rehearsal else 0, result.stderr)
            self.assertEqual(sorted(os.listdir(docs)), ["measured-nvidia-some-200.json", "measured.md"])
            self.assertEqual(script("gpu_report.py", "page", "--check", docs).returncode, 0)
            with open(docs + "/measured.md", encoding="utf-8") as file:
                text = file.read()
            for line in ("## NVIDIA Some 200, 580.1, 9.0\n", "### Attention, TFLOP/s, bf16\n"):
                self.assertIn(line, text)
            self.assertRegex(text, "\nforward +64, 32/32 +321\n```\n")
            with open(docs + "/measured-nvidia-some-200.json", encoding="utf-8") as file:
                self.assertNotIn("/some/folder", file.read())
            with open(docs + "/measured.md", "w", encoding="utf-8") as file:
                file.write(text.replace("321", "322"))
            self.assertEqual(script("gpu_report.py", "page", "--check", docs).returncode, 1)


class Build(unittest.TestCase):
    def test_only_op_tests_have_memory_that_the_host_sees(self):
        """What is timed has plain device memory, as PyTorch's has."""
        with tempfile.TemporaryDirectory() as cuda:
            for path in ("include/cublasLt.h", "lib/libcublasLt.so"):
                os.makedirs(os.path.dirname(f"{cuda}/{path}"), exist_ok=True)
                with open(f"{cuda}/{path}", "w", encoding="utf-8"):
                    pass
            environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")}
            commands = subprocess.run(["make", "-n", "-B", "-f", "scripts/gpu_check.mk", "CUDA=yes", "NVCC=/bin/true", f"CUBLASLT_DIR={cuda}",
                                       "MPI=", "B=build/none", "gpu-attention-table", "gpu-fp8", "gpu-ops", "gpu-train-table"],
                                      capture_output=True, text=True, check=True, cwd=ROOT, env=environment).stdout
        compiled = {name: line for line, name in re.findall(r"^(.*-c \S+ +-o build/none/(\S+\.o).*)$", commands, re.MULTILINE)}
        self.assertIn("cuda/attention_bench.o", compiled)
        self.assertIn("host_cuda_bf16.o", compiled)
        self.assertIn("cuda/op_norm_bf16.o", compiled)
        for name, line in compiled.items():
            self.assertEqual("-DDEVICE_MEMORY_MANAGED" in line, name.startswith("cuda/op_"), line)
        linked = re.findall(r"^.* -lcmocka -o build/none/cuda/attention_bench$", commands, re.MULTILINE)
        self.assertEqual(len(linked), 1)
        self.assertNotIn(".log", linked[0])  # nvcc refuses what it does not know, as what ptxas said of the kernels


KILLED = """#include "test/testing.h"
static void first(void **state) { }
static void second(void **state) { printf("# of the second\\n"); raise(SIGKILL); }
int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(first), cmocka_unit_test(second)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
"""


class TestPrograms(unittest.TestCase):
    def test_what_was_said_stays(self):
        """Of a test program that is killed, also where its stdout is a file: what passed, and lines of the test's own."""
        with tempfile.TemporaryDirectory() as folder:
            write_program(folder + "/killed.c", KILLED)
            built = subprocess.run(["gcc", "-I", ROOT, folder + "/killed.c", "-lcmocka", "-o", folder + "/killed"], capture_output=True,
                                   text=True, check=False, timeout=120)
            if "cmocka" in built.stderr:
                self.skipTest("there is no cmocka")
            self.assertEqual(built.returncode, 0, built.stderr)
            with open(folder + "/output", "w", encoding="utf-8") as file:
                status = subprocess.run([folder + "/killed"], stdout=file, stderr=subprocess.STDOUT, check=False, timeout=60,
                                        env={**os.environ, "CMOCKA_MESSAGE_OUTPUT": "TAP"}).returncode
            self.assertEqual(status, -signal.SIGKILL)
            with open(folder + "/output", encoding="utf-8") as file:
                self.assertRegex(file.read(), "ok 1 - first\n(.*\n)*# of the second\n")


# ---- a visit ----

# In place of train_gpt: what it was asked for goes into a file, and its steps are of 1 ms.
TRAINS = """#!%s
import json, os, sys
options = dict(pair for pair in zip(sys.argv[1:], sys.argv[2:]) if pair[0].startswith("--"))
if "--self-check" in options:
    sys.exit(print(os.environ["SELF_CHECK_SAYS"]))
kernels = {"mma": "mma.sync"}.get(options.get("--flash-kernels"), options.get("--flash-kernels"))
print("attention           " + os.environ.get("ATTENTION_SAYS", f"flash, {kernels} bf16 (as asked)"))
with open(os.environ["STAND_IN_FOLDER"] + "/asked", "a") as f:
    f.write(json.dumps(options) + "\\n")
with open(options["--plan-json"], "w") as f:
    json.dump({"peak_bytes": 1}, f)
with open(options["--out"] + "/log.jsonl", "w") as f:
    for step in range(1, int(options["--train-steps"]) + 1):
        f.write(json.dumps({"step": step, "step_ms": 1, "tokens_per_second": 100.0, "peak_bytes": 1, "mfu": 0.5, "loss": 7.0}) + "\\n")
""" % sys.executable


class Visit(unittest.TestCase):
    """scripts/gpu_check.sh with programs that were built elsewhere, on a machine where little is installed."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = folder.name
        cls.tree = cls.folder + "/tree"
        for path in ("bin", "tree/scripts", "tree/build/cuda"):
            os.makedirs(f"{cls.folder}/{path}")
        for name in os.listdir("/usr/bin"):
            if not re.search(r"make|[gc](\+\+|cc)|nvcc|nvidia|^(ncu|nsys|python.*)$", name):
                os.symlink("/usr/bin/" + name, f"{cls.folder}/bin/{name}")
        for name in glob.glob(SCRIPTS + "/*.py") + [SCRIPTS + "/gpu_check.sh"]:
            shutil.copy(name, cls.tree + "/scripts/")
        write_stand_ins(cls.folder + "/bin")
        os.symlink(sys.executable, cls.folder + "/bin/python3")
        write_program(cls.folder + "/bin/python", STAND_INS["python"].replace('cat "$STAND_IN_FOLDER/train"', "printf '" + json.dumps(
            {**TORCH_TRAIN, "asked": "%s"}) + "\\n' \"$(tr '\\0' ' ' </proc/$PPID/cmdline)\""))
        write_program(cls.tree + "/build/train_gpt", TRAINS)
        for name in ("unit_first", "memory_probe", "op_attention_bf16", "op_attention_fp32"):
            write_program(f"{cls.tree}/build/cuda/{name}", PROGRAMS[name])

    def visit(self, *arguments, status=0, **environment):
        """The checks of the report, and what was said."""
        results = f"{self.folder}/{self.id()}"
        result = subprocess.run([self.tree + "/scripts/gpu_check.sh", *arguments, results], capture_output=True, text=True, check=False,
                                timeout=300, env={"PATH": self.folder + "/bin", "HOME": self.folder, "STAND_IN_FOLDER": self.folder,
                                                  "TMPDIR": tempfile.gettempdir(), "CUDA_HOME": self.folder + "/none",
                                                  "PYTHON": self.folder + "/bin/python", **environment})
        self.assertEqual(result.returncode, status, result.stdout + result.stderr)
        if not os.path.exists(results + "/gpu_check.json"):
            return {}, result.stdout + result.stderr
        with open(results + "/gpu_check.json", encoding="utf-8") as file:
            return {check["check"]: check for check in json.load(file)["checks"]}, result.stdout + result.stderr

    def test_a_compiler_is_for_the_build(self):
        checks, _ = self.visit("--stages", "unit")
        self.assertEqual(checks["unit_first"]["outcome"], "passed")
        _, said = self.visit("--stages", "build,unit", status=2)
        self.assertIn("make is not installed", said)

    def test_goals_steps_are_like_their_peers(self):
        """Of 8 micro-steps, ours and PyTorch's, where the goal is of steps of many tokens; a row says so."""
        checks, _ = self.visit("--stages", "train_table", GPU_CHECK_SECONDS="2000")
        with open(self.folder + "/asked", encoding="utf-8") as file:
            asked = {(run["--preset"], run["--seq-length"], run["--recompute-granularity"]): run for run in map(json.loads, file)}
        for preset, policy, batch in (("gpt2-1558m", "none", 16), ("gpt2-1558m", "full", 16), ("qwen2.5-0.5b", "none", 16),
                                      ("qwen2.5-1.5b", "none", 16), ("qwen2.5-7b", "auto", 16)):
            run, micro_steps = asked[preset, "1024", policy], 4 if preset == "qwen2.5-7b" else 8
            self.assertEqual((run["--micro-batch-size"], run["--global-batch-size"], run["--train-steps"]),
                             (str(batch), str(micro_steps * batch), "6"))
            self.assertEqual(checks[f"train_{preset}_1024_{policy}"]["rows"][0]["micro_steps"], micro_steps)
        for preset, length in (("gpt2-124m", 1024), ("llama3.2-1b", 4096), ("gpt2-1558m", 4096)):
            self.assertEqual(checks[f"train_{preset}_{length}_none"]["rows"][0]["micro_steps"], 1)
        for preset, limit, options in (("gpt2-124m", 180, "--batch 64"), ("gpt2-1558m", 300, "--batch 16 --micro-steps 8 --steps 4")):
            self.assertRegex(checks[f"torch_{preset}_1024"]["rows"][0]["asked"], f"timeout -k 5 {limit} .* --length 1024 {options} $")

    def test_kernels_of_a_step(self):
        """The last step's, by rows of the table of launches, beside what they take at least with as many layers."""
        checks, _ = self.visit("--stages", "kernels")
        for preset, layers, batch in (("gpt2-124m", 12, 64), ("gpt2-1558m", 4, 16)):
            rows = {row["work"]: row for row in checks["kernels_" + preset]["rows"]}
            self.assertEqual({work: (row["launches"], row["us"]) for work, row in rows.items()}, {
                "products": (3, 6), "attention": (1, 2), "norms": (1, 2), "AdamW, gradient norm": (2, 4), "other": (1, 2), "all": (8, 16)})
            shape = next(shape for shape in roofline.SHAPES if shape.name == preset).resized(layers, batch, 1024)
            self.assertEqual((rows["all"]["layers"], rows["other"]["least_us"]), (layers, None))
            self.assertAlmostEqual(rows["all"]["least_us"], 1e6 * roofline.step(shape), places=3)
            self.assertLess(rows["products"]["least_us"], rows["all"]["least_us"])
        with open(f"{self.folder}/{self.id()}/gpu_check.md", encoding="utf-8") as file:
            text = file.read()
        self.assertIn("| other | 2 | - |\n", text)
        self.assertIn("\n\ngpt2-1558m, 4 layers, B 16, T 1024:\n\n| work |", text)
        with open(self.folder + "/profiled", encoding="utf-8") as file:
            self.assertIn("build/train_gpt --preset gpt2-1558m --num-layers 4 --micro-batch-size 16 ", file.read())

    def test_kernels_that_are_not_timed(self):
        """Where ncu is not installed or may not, the stage is skipped with its reason; a step that it did not see is a failure."""
        refusal = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"
        checks, _ = self.visit("--stages", "unit,kernels", NCU_SAYS=refusal)
        self.assertEqual((checks["kernels_gpt2-124m"]["outcome"], checks["kernels_gpt2-124m"]["why"]), ("skipped", refusal.removeprefix("==ERROR== ")))
        self.visit("--stages", "unit,kernels", status=1, NCU_SAYS="==WARNING== No kernels were profiled.")
        os.rename(self.folder + "/bin/ncu", self.folder + "/ncu")
        self.addCleanup(os.rename, self.folder + "/ncu", self.folder + "/bin/ncu")
        checks, _ = self.visit("--stages", "unit,kernels")
        self.assertEqual(checks["kernels"]["why"], "ncu is not installed")

    def test_kernels_that_failed_are_not_timed(self):
        """Stages that make no start-up check leave out wgmma where one failed, or else attention's op test; a later visit does, too."""
        chosen = "^(op_attention_bf16|self_check_.*|train_gpt2-124m_1024_none|kernels_gpt2-124m|fp8_gpt2_64_(bf16|tensorwise)(_cpu)?)$"
        right = "self-check          attention's kernels are right, within 0.004 of what they should give; 0.80 s"

        def visit(*stages, status=0, said=right):
            for name in ("asked", "profiled"):
                open(f"{self.folder}/{name}", "w").close()
            checks, _ = self.visit("--stages", ",".join(stages), status=status, GPU_CHECK_ONLY=chosen, SELF_CHECK_SAYS=said, STAND_IN_CAPABILITY="9.0")
            with open(self.folder + "/asked", encoding="utf-8") as file:
                runs = list(map(json.loads, file))
            return checks, [(run["--device"], run.get("--flash-kernels")) for run in runs]
        checks, asked = visit("attention", "train_table", "kernels", "fp8", status=1)
        self.assertEqual(asked, [("cuda", "mma")] * 3 + [("cpu", None)])
        self.assertEqual(checks["train_gpt2-124m_1024_none"]["rows"][0]["policy"], "none, mma.sync")
        with open(self.folder + "/profiled", encoding="utf-8") as file:
            self.assertIn(" --flash-kernels mma", file.read())
        self.assertEqual(visit("curve", "train_table")[1], [("cuda", None)])
        visit("curve", status=1, said="attention           flash, mma.sync (wgmma bf16 failed the self-check: it did not end within 30 s)\n" + right)
        self.assertEqual(visit("train_table")[1], [("cuda", "mma")])

    def test_curves_are_of_hoppers_attention(self):
        """On 9.0, in bf16, of heads that it takes: a curve by another attention, as auto may choose, would show nothing of it."""
        for capability, says, names, kernels, outcome in [("9.0", None, "gpt2_64_bf16 llama_128_bf16", "wgmma", "passed"),
                                                          ("9.0", None, "gpt2_bf16 llama_fp32", None, "passed"),
                                                          ("9.0", "fused, cuDNN 9.19.0 bf16 (as the fastest)", "gpt2_64_bf16", "wgmma", "failed"),
                                                          ("9.0", "flash, mma.sync bf16 (as the fastest)", "llama_128_bf16", "wgmma", "failed"),
                                                          ("10.0", "flash, mma.sync bf16 (by rule)", "gpt2_64_bf16", None, "passed")]:
            open(self.folder + "/asked", "w").close()
            environment = {"ATTENTION_SAYS": says} if says else {}
            checks, said = self.visit("--stages", "curve", status=int(outcome == "failed"), STAND_IN_CAPABILITY=capability, **environment,
                                      GPU_CHECK_ONLY=f"^curve_({names.replace(' ', '|')})_cuda$")
            with open(self.folder + "/asked", encoding="utf-8") as file:
                asked = [(run.get("--attention-backend"), run.get("--flash-kernels")) for run in map(json.loads, file)]
            self.assertEqual(asked, [("flash" if kernels else None, kernels)] * len(names.split()))
            for name in names.split():
                check = checks[f"curve_{name}_cuda"]
                self.assertEqual(check["outcome"], outcome, said)
                if says:
                    self.assertEqual(check["rows"][0]["attention"], says.split(" (")[0])
                if outcome == "failed":
                    self.assertIn("--flash-kernels wgmma, but the report has attention by " + says.split(" (")[0], check["rows"][0]["error"])
            os.remove(f"{self.folder}/{self.id()}/gpu_check.json")
        os.remove(self.folder + "/asked")

    def test_chosen_checks(self):
        """By their names, with what they need; a later call's add to them."""
        checks, _ = self.visit("--stages", "attention_table,train_table", GPU_CHECK_ONLY="^train_.*_(none|auto)")
        self.assertEqual(list(checks), ["device_rates", "attention_ours", "data", *[f"train_{preset}_1024_none" for preset in (
            "gpt2-124m", "gpt2-1558m", "qwen2.5-0.5b", "qwen2.5-1.5b")], "train_llama3.2-1b_4096_none", "train_qwen2.5-7b_1024_auto",
            "train_gpt2-124m_4096_none", "train_gpt2-1558m_4096_none"])
        self.assertEqual([checks[name]["outcome"] for name in ("device_rates", "attention_ours")], ["skipped"] * 2)  # were not built
        later, _ = self.visit("--stages", "train_table", GPU_CHECK_ONLY="^torch_")
        self.assertEqual(set(later) - set(checks) - {"torch"}, {f"torch_{name}" for name in (
            "gpt2-124m_1024", "gpt2-1558m_1024", "qwen2.5-0.5b_1024", "qwen2.5-1.5b_1024", "llama3.2-1b_4096")})
        self.assertEqual(later["train_qwen2.5-7b_1024_auto"], checks["train_qwen2.5-7b_1024_auto"])
        _, said = self.visit("--stages", "unit", status=2, GPU_CHECK_ONLY="(")
        self.assertIn("is no regular expression", said)


# PyTorch without PyTorch: what peer_torch.py needs of it until a model is trained or a kernel timed.
TORCH = """class OutOfMemoryError(RuntimeError):
    pass
class Nothing:
    def __getattr__(self, name):
        return self
    def __call__(self, *arguments, **named):
        return self
    def __bool__(self):
        return False
bfloat16 = compiler = cuda = randn = randn_like = use_deterministic_algorithms = utils = Nothing()
"""


class PeerTorch(unittest.TestCase):
    @staticmethod
    def write(folder, modules=()):
        """Writes PyTorch's stand-in and other modules, by path."""
        for path, text in (("torch/__init__.py", TORCH), ("torch/nn/functional.py", ""),
                           ("torch/nn/__init__.py", "import torch\nclass Module: pass\nattention = torch.Nothing()\n"), *modules):
            os.makedirs(os.path.dirname(f"{folder}/{path}"), exist_ok=True)
            with open(f"{folder}/{path}", "w", encoding="utf-8") as file:
                file.write(text)

    def attention(self, flash_attention_4, *options):
        """The rows of attention's peers where FlashAttention-4's module is this text, and stderr."""
        with tempfile.TemporaryDirectory() as folder:
            self.write(folder, [("flash_attn/cute/__init__.py", flash_attention_4)])
            result = subprocess.run([sys.executable, "test/cuda/peer_torch.py", "attention", *options], capture_output=True,
                                    text=True, check=False, timeout=60, cwd=ROOT, env={**os.environ, "PYTHONPATH": folder})
        self.assertEqual(result.returncode, 0, result.stderr)
        return list(map(json.loads, result.stdout.splitlines())), result.stderr

    def test_attention_that_a_peer_refuses(self):
        """What a compiler raises is a row of each shape that was chosen; a peer that cannot be imported has none."""
        chosen = ("--peers", "fa4,fa3", "--head-dims", "64", "--lengths", "4096,16384")
        rows, said = self.attention("class Refusal(Exception): pass\ndef flash_attn_func(q, k, v, causal, deterministic):\n"
                                    "    raise Refusal('\\nno kernel\\nof this shape')\n", *chosen)
        self.assertEqual({(row["engine"], row["error"]) for row in rows}, {("fa4", "no kernel")})
        self.assertEqual([(row["head_dim"], row["heads"], row["length"]) for row in rows],
                         [(64, heads, length) for heads in (32, 64) for length in (4096, 16384) for _ in range(6)])
        self.assertIn("no flash_attn_interface: ", said)
        rows, said = self.attention("raise RuntimeError('no driver')\n", *chosen)
        self.assertEqual(rows, [])
        self.assertIn("no flash_attn.cute: RuntimeError('no driver')", said)

    def test_half_the_batch(self):
        """What is too large is tried at half the batch in twice the micro-steps; the row says so."""
        with tempfile.TemporaryDirectory() as folder:
            self.write(folder)
            code = """import sys
sys.path[:0] = [%r, %r]
import peer_torch
def train_at(arguments, batch, micro_steps):
    if batch > arguments.warm_up:
        raise peer_torch.torch.OutOfMemoryError
    return {"loss": 1.0, "tokens_per_second": 9.0}
peer_torch.train_at = train_at
sys.exit(peer_torch.main())
""" % (folder, os.path.join(ROOT, "test", "cuda"))

            def rows(batch, fits):
                result = subprocess.run([sys.executable, "-c", code, "train", "--preset", "demo", "--length", "64", "--batch", batch,
                                         "--micro-steps", "3", "--warm-up", fits], capture_output=True, text=True, check=False, timeout=60)
                self.assertEqual(result.returncode, 0, result.stderr)
                return [(row["batch"], row["micro_steps"], row.get("error"), row["policy"]) for row in map(json.loads, result.stdout.splitlines())]
            self.assertEqual(rows("8", "8"), [(8, 3, None, "none")])
            self.assertEqual(rows("8", "2"), [(8, 3, "out of memory", "none"), (4, 6, "out of memory", "none, B 8 was out of memory"),
                                              (2, 12, None, "none, B 8 was out of memory")])
            self.assertEqual(rows("3", "2"), [(3, 3, "out of memory", "none")])


# In place of apt, which needs a network.
APT = {
    "apt-cache": """#!/bin/sh
case "$*" in
*libc6-dev*) printf '%s\\n' libc6 libc6-dev linux-libc-dev ;;
*) printf '%s\\n' libjansson-dev '  Depends: libjansson4' libjansson4 libc6 linux-libc-dev libpcre2-16-0 $(printf %s "$*" | grep -o libdnnl-dev) ;;
esac
""",
    "apt-get": """#!/bin/sh
while [ "$1" != download ]; do shift; done
shift
for package; do : >"$package.deb"; done
""",
    "dpkg-deb": """#!/bin/sh
put() { for file; do mkdir -p "$(dirname "$tree/$file")"; echo "$file" >"$tree/$file"; done; }
package=$(basename "$2" .deb) tree=$3
case $package in
libjansson-dev) put usr/include/jansson.h usr/lib/x/libjansson.a usr/share/doc/jansson usr/lib/x/pkgconfig/jansson.pc ;;
libjansson4) put usr/lib/x/libjansson.so.4 ;;
libpcre2-16-0) put usr/lib/x/libpcre2-16.so.0 ;;
*) put "usr/include/$package.h" ;;
esac
"""}


@unittest.skipIf(subprocess.run(["git", "ls-files"], cwd=SCRIPTS, capture_output=True, check=False).returncode, "the tree is no git checkout")
class Pack(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        os.mkdir(self.folder + "/bin")
        for name, text in APT.items():
            write_program(f"{self.folder}/bin/{name}", text)
        self.environment = {**os.environ, "PATH": f"{self.folder}/bin:{os.environ['PATH']}"}

    def run_script(self, name, *arguments):
        return subprocess.run([os.path.join(SCRIPTS, name), *arguments], capture_output=True, text=True, check=False, timeout=120,
                              env=self.environment)

    def test_minimal_libraries(self):
        """Nothing of the C library, of what no build reads, or, with --minimal, for matmuls."""
        for options, dnnl in ([], True), (["--minimal"], False):
            result = self.run_script("setup.sh", "--into", self.folder + "/deps", *options)
            self.assertEqual(result.returncode, 0, result.stderr)
            files = sorted(os.path.relpath(os.path.join(path, name), self.folder + "/deps/usr")
                           for path, _, names in os.walk(self.folder + "/deps/usr") for name in names)
            self.assertEqual(files, sorted(["include/jansson.h", "lib/x/libjansson.so.4", "lib/libjansson.so.4"] +
                                           ["include/libdnnl-dev.h"] * dnnl))
            with open(self.folder + "/deps/usr/lib/libjansson.so.4", encoding="utf-8") as file:
                self.assertEqual(file.read(), "usr/lib/x/libjansson.so.4\n")
        self.assertEqual(self.run_script("setup.sh", "--into", self.folder + "/deps", "--tiny").returncode, 2)

    def test_pack(self):
        pack, wheels = self.folder + "/pack.tar.gz", self.folder + "/wheels"
        os.mkdir(wheels)
        with open(wheels + "/one.whl", "w", encoding="utf-8") as file:
            file.write("wheel")
        result = self.run_script("gpu_pack.sh", "--wheels", wheels, pack)
        self.assertEqual(result.returncode, 0, result.stderr)
        with tarfile.open(pack) as tar:
            names = set(tar.getnames())
            self.assertEqual(tar.getmember("train_gpt/.deps/usr/lib/libjansson.so.4").linkname, "x/libjansson.so.4")
            self.assertTrue(tar.getmember("train_gpt/scripts/gpu_check.sh").mode & 0o100)
        for name in ("train_gpt.c", "test/cuda/attention_bench.cu", ".packed_commit", ".deps/usr/include/jansson.h", ".deps/wheels/one.whl"):
            self.assertIn("train_gpt/" + name, names)
        self.assertFalse([name for name in names if name.startswith(("train_gpt/build", "train_gpt/.git/"))])
        with open(wheels + "/large.whl", "wb") as file:
            file.write(os.urandom(61 << 20))
        result = self.run_script("gpu_pack.sh", "--wheels", wheels, pack)
        self.assertEqual(result.returncode, 2)
        self.assertIn("more than the 60", result.stderr)


    def test_programs(self):
        """Stripped, in the folders where gpu_check.sh looks; one that needs a library that isn't packed is refused."""
        tree, pack_file = self.folder + "/tree", self.folder + "/pack.tar" + (".xz" if shutil.which("xz") else ".gz")
        for path in ("scripts", "build/cuda", "bin"):
            os.makedirs(f"{tree}/{path}")
        for name in ("gpu_pack.sh", "setup.sh"):
            shutil.copy(os.path.join(SCRIPTS, name), f"{tree}/scripts/{name}")
        with open(tree + "/main.c", "w", encoding="utf-8") as file:
            file.write("int main(void) { return 0; }\n")
        subprocess.run(["git", "init", "-q", "."], cwd=tree, check=True)
        with open(tree + "/.gitignore", "w", encoding="utf-8") as file:
            file.write("build\n")
        subprocess.run("git add . && git -c user.name=a -c user.email=a@b commit -qm a", cwd=tree, shell=True, check=True)

        def pack():
            return subprocess.run([tree + "/scripts/gpu_pack.sh", "--programs", pack_file], capture_output=True,
                                  text=True, check=False, timeout=120, env=self.environment)
        self.assertEqual(pack().returncode, 2)  # nothing was built
        for name in ("train_gpt", "cuda/op_attention_bf16"):
            subprocess.run(["gcc", "-g", "main.c", "-o", "build/" + name], cwd=tree, check=True)
        for name in ("cuda/op_attention_bf16.o", "cuda/ptxas_attention.log"):
            with open(f"{tree}/build/{name}", "w", encoding="utf-8"):
                pass
        result = pack()
        self.assertEqual(result.returncode, 0, result.stderr)
        with tarfile.open(pack_file) as tar:
            names = [name for name in tar.getnames() if name.startswith("train_gpt/build/")]
            self.assertLess(tar.getmember("train_gpt/build/train_gpt").size, os.path.getsize(tree + "/build/train_gpt"))
        self.assertEqual(sorted(names), ["train_gpt/build/cuda", "train_gpt/build/cuda/op_attention_bf16",
                                         "train_gpt/build/cuda/ptxas_attention.log", "train_gpt/build/train_gpt"])
        # A program that is older than a source, its own where it is known which these are, is none of this commit.
        later = time.time() + 100
        for path in ("other.c", "own.h"):
            with open(f"{tree}/{path}", "w", encoding="utf-8"):
                pass
            os.utime(f"{tree}/{path}", (later, later))
        subprocess.run(["git", "add", "other.c", "own.h"], cwd=tree, check=True)
        result = pack()
        self.assertEqual((result.returncode, result.stderr),
                         (2, "gpu_pack.sh: other.c is newer than build/train_gpt: build the programs anew\n"))
        with open(tree + "/build/main.d", "w", encoding="utf-8") as file:
            file.write("build/main.o: main.c \\\n /usr/include/stdio.h\n")
        result = pack()
        self.assertIn("other.c is newer than build/cuda/op_attention_bf16", result.stderr)
        with open(tree + "/build/cuda/op_attention_bf16.d", "w", encoding="utf-8") as file:
            file.write("build/cuda/op_attention_bf16.o: main.c \\\n own.h\nown.h:\n")
        result = pack()
        self.assertIn("own.h is newer than build/cuda/op_attention_bf16", result.stderr)
        os.utime(tree + "/own.h", (1, 1))
        self.assertEqual(pack().returncode, 0)
        subprocess.run(["gcc", "-shared", "-Wl,-soname,libmpi.so.40", "-x", "c", "/dev/null", "-o", "libmpi.so"], cwd=tree, check=True)
        subprocess.run(["gcc", "main.c", "-Wl,--no-as-needed", "-L.", "-lmpi", "-o", "build/train_gpt"], cwd=tree, check=True)
        result = pack()
        self.assertEqual(result.returncode, 2)
        self.assertIn("build/train_gpt needs libmpi.so.40", result.stderr)


# ---- waits that take too long ----

WAITS = """#include "kernels/ptx_sm90.cuh"
__global__ void of_an_int(const int *at, int value) { wait_acquire(at, value); }
__global__ void of_a_barrier(unsigned barrier, unsigned parity) { mbarrier_wait(barrier, parity); }
"""


@unittest.skipUnless(NVCC, "there is no nvcc")
class FrontEnd(unittest.TestCase):
    def test_the_engine(self):
        """nvcc takes both halves of the engine, the host's calls of what is the device's alone included: the emulator, which
        has no such halves, compiles any."""
        for precision in chosen(("-DPRECISION_BF16", "-UPRECISION_BF16"), ("-DPRECISION_BF16",)):
            result = subprocess.run([NVCC, "-x", "cu", "-std=c++17", "-O0", "-I", ROOT, "-D_GNU_SOURCE", "-DTARGET_CUDA",
                                     "-DPCRE2_CODE_UNIT_WIDTH=8", precision, "-DENGINE=train_cuda", "-diag-suppress", "1675", "-gencode",
                                     "arch=compute_90a,code=sm_90a", "-fdevice-syntax-only", "-c", ROOT + "/train_gpt.c", "-o", os.devnull],
                                    capture_output=True, text=True, timeout=600, check=False)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertNotIn("calling a", result.stderr)


@unittest.skipUnless(NVCC, "there is no nvcc")
class Waits(unittest.TestCase):
    def test_the_record_has_operands(self):
        """The emulator does not compile the asm that leaves a wait_record."""
        with tempfile.TemporaryDirectory() as folder:
            with open(folder + "/waits.cu", "w", encoding="utf-8") as file:
                file.write(WAITS)
            subprocess.run([NVCC, "-std=c++17", "-I", ROOT, "-DTARGET_CUDA", "-DDEVICE_WAIT_LIMIT=4", "-gencode",
                            "arch=compute_90a,code=compute_90a", "-ptx", folder + "/waits.cu", "-o", folder + "/waits.ptx"], check=True,
                           capture_output=True, timeout=300)
            with open(folder + "/waits.ptx", encoding="utf-8") as file:
                kernels = file.read().split(".entry ")[1:]
        records = [dict(re.findall(r"\[record\+(\d+)\], (\S+);", text)) for text in kernels]
        for record, wanted in zip(records, ({"8": "0", "12": "%r1", "16": "seen"},
                                            {"0": "%r1", "4": "0", "8": "1", "12": "%r2", "16": "0"}), strict=True):
            self.assertEqual({offset: record[offset] for offset in wanted}, wanted)
            self.assertGreater(int(record["44"]), 16)  # a line and a file's number, not an operand's


# ---- the rehearsal ----

EMULATOR = os.environ.get("TRAIN_GPT_CUDA", "")
ALL_STAGES = ["build", "unit", "attention", "model", "curve", "attention_table", "train_table", "kernels", "fp8", "ops", "ranks", "sanitize"]
# What PyTorch would have said of the shapes that the rehearsal times; its last line is cut off.
TORCH_ROWS = [{"bench": "attention", "engine": "torch flash", "direction": "forward", "mask": "causal", "head_dim": 64, "heads": 2, "groups": 2,
               "batch": 1, "length": 64, "ms": 1.0, "tflops": 123.0},
              {"bench": "attention", "engine": "torch cudnn", "direction": "backward", "mask": "causal", "head_dim": 128, "heads": 8, "groups": 1,
               "batch": 1, "length": 64, "error": "no kernel"}]
TORCH_TRAIN = {"bench": "train", "engine": "torch", "preset": "demo", "length": 64, "batch": 1, "micro_steps": 2, "policy": "none", "tokens_per_second": 4321.0}
PROGRAMS = {
    "memory_probe": "#!/bin/sh\n[ $1 = pinned ] || { echo 'no managed memory'; exit 1; }\necho pinned\n",
    "unit_first": "#!/bin/sh\nprintf '1..2\\nok 1 - products\\nok 2 - copies\\n'\n",
    "unit_for_hopper": "#!/bin/sh\necho 'unit_for_hopper: needs compute capability 9.0'\nexit 77\n",
    "op_attention_bf16": "#!/bin/sh\nprintf '1..2\\nok 1 - forward\\nnot ok 2 - backward\\n'\nexit 1\n",
    "op_matmul_bf16": "#!/bin/sh\nprintf '1..1\\nok 1 - products\\n'\n",
    "op_gpt_bf16": "#!/bin/sh\n[ $CUDA_LAUNCH_BLOCKING = 0 ] && printf '1..1\\nok 1 - loss\\n'\n",
    "op_some_fp8_bf16": "#!/bin/sh\nprintf '1..1\\nok 1 - casts\\n'\n",
    "op_attention_fp32": "#!/bin/sh\n[ $TEST_MEMORY = pinned ] && [ $CUDA_LAUNCH_BLOCKING = 1 ] || exit 3\nprintf '1..1\\nok 1 - memory\\n'\n",
}


class StandIns(unittest.TestCase):
    """scripts/gpu_check.sh with programs that stand for what is built and for what a GPU's machine has."""
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="gpu check ")
        cls.path = cls.folder.name
        os.mkdir(cls.path + "/programs")
        write_stand_ins(cls.path + "/bin")
        for name, text in PROGRAMS.items():
            write_program(f"{cls.path}/programs/{name}", text)
        cls.environment = {**os.environ, "PATH": f"{cls.path}/bin:{os.environ['PATH']}", "PYTHON": cls.path + "/bin/python",
                           "GPU_CHECK_PROGRAMS": "programs", "GPU_CHECK_SMALL": "1", "STAND_IN_FOLDER": cls.path,
                           "OMP_NUM_THREADS": "2"}

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    @classmethod
    def start(cls, results, *arguments, **environment):
        return subprocess.Popen([SCRIPTS + "/gpu_check.sh", *arguments, results], stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, cwd=cls.path, env={**cls.environment, **environment})

    def program(self, name, text):
        write_program(f"{self.path}/programs/{name}", text)
        self.addCleanup(os.remove, f"{self.path}/programs/{name}")

    def read(self, results):
        with open(f"{self.path}/{results}/gpu_check.json", encoding="utf-8") as file:
            checks = json.load(file)["checks"]
        with open(f"{self.path}/{results}/gpu_check.md", encoding="utf-8") as file:
            return {check["check"]: check for check in checks}, file.read()


@unittest.skipUnless(EMULATOR and os.path.exists(EMULATOR), "TRAIN_GPT_CUDA names no emulator")
@long_test("minutes of whole trainings; Stages holds how a visit ends, Visit what it runs, Report what it says")
class Rehearsal(StandIns):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        with open(cls.path + "/attention", "w", encoding="utf-8") as file:
            file.write("\n".join(map(json.dumps, TORCH_ROWS)) + '\n{"bench": "attention", "engine": "tor')
        with open(cls.path + "/train", "w", encoding="utf-8") as file:
            file.write(json.dumps(TORCH_TRAIN) + "\n")
        emulator = os.path.dirname(os.path.abspath(EMULATOR))
        # With the variables of the make that runs this test, or another build would take the place of that one.
        build, names = os.path.relpath(os.path.dirname(emulator), ROOT), ("op_rope_bf16", "attention_bench", "device_rates")
        subprocess.run(["make", "-s", "-f", "scripts/gpu_check.mk", "B=" + build, *(f"{build}/emu/{name}" for name in names)],
                       cwd=ROOT, check=True, capture_output=True, timeout=600)
        for name in ("train_gpt", *names):
            program = os.path.join(emulator, name)
            if os.path.exists(program):
                os.symlink(program, f"{cls.path}/programs/{name}")
        cls.everything = cls.start("all", GPU_CHECK_SECONDS="900")
        cls.output, _ = cls.everything.communicate(timeout=1000)

    def table(self, text, title, heads=False):
        """The cells of the rows under a heading; heads: by the heads of their columns."""
        lines = text.split(f"## {title}", 1)[1].split("\n## ", 1)[0].splitlines()
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        return [dict(zip(head, row)) for row in rows] if heads else rows

    def test_every_table_has_its_rows(self):
        checks, text = self.read("all")
        self.assertIn("**A rehearsal by the programs in programs: no figure here is a GPU's.**", text)
        ours, fused_rows = ({(row["direction"], row["head_dim"], row["heads"]): row for row in checks["attention_ours"]["rows"]
                             if row["engine"] == engine and "tflops" in row} for engine in ("ours", "fused"))
        self.assertEqual(len(ours), 24, self.output)  # three directions, four head dims, MHA and grouped heads
        # What a time limit would end last: ours, and of those the goals' head dim.
        order = [(row["engine"] != "ours", row["head_dim"] != 128) for row in checks["attention_ours"]["rows"]]
        self.assertEqual([others for others, _ in order], sorted(others for others, _ in order))
        self.assertEqual([other for others, other in order if not others], [False] * 6 + [True] * (len(ours) - 6))
        # The emulator is of compute capability 8.0, where cuDNN's deterministic backward is not taken, nor a head dim of 256.
        self.assertEqual(set(fused_rows), {key for key in ours if key[0] != "deterministic backward" and key[1] != 256})
        table = self.table(text, "Attention, TFLOP/s", heads=True)
        self.assertEqual(len(table), 24)
        for row in table:
            head_dim, heads = row["head dim, heads"].split(", ")
            key = row[""], int(head_dim), int(heads.split("/")[0])
            others = [fused_rows[key]["tflops"]] if key in fused_rows else []
            others += [123] if key[:2] == ("forward", 64) and heads == "2/2" else []
            rate = ours[key]["tflops"]
            self.assertEqual(row["causal, longest"], f"{rate:.0f}" + (f" ({rate / max(others):.2f})" if others else ""))
        self.assertIn("over the fastest of cuDNN from here, PyTorch flash; ", text)
        table = self.table(text, "Training")
        self.assertEqual([(row[0], row[3], row[4]) for row in table],
                         [("demo", "2", policy) for policy in ("none", "selective", "full")] + [("demo, torch", "2", "none")])
        for row in table[:3]:
            measured = checks[f"train_demo_64_{row[4]}"]["rows"][0]
            self.assertEqual(row[5], f"{measured['tokens_per_second']:.0f}")
        self.assertEqual(table[3][5], "4321")
        self.assertEqual([(row[1], row[2], row[3]) for row in self.table(text, "Several ranks")], [("2", "sockets", "0"), ("2", "sockets", "3")])
        self.assertEqual(list(dict.fromkeys(check["stage"] for check in checks.values())), ALL_STAGES)

    def test_every_check_is_in_the_report(self):
        checks, text = self.read("all")
        self.assertEqual(self.everything.returncode, 1, self.output)
        outcomes = {name: check["outcome"] for name, check in checks.items()}
        curves = [f"curve_{case}{run}" for case in ("gpt2_fp32", "gpt2_bf16", "gpt2_64_bf16", "llama_fp32", "llama_bf16", "llama_128_bf16") for run in ("_cpu", "_cuda", "")]
        curves += ["curve_gpt2_64_fp32_cpu", "curve_llama_128_fp32_cpu", "self_check_gpt2_64", "self_check_llama_128"]
        passed = ["unit_first", "memory_pinned", "op_attention_fp32", "torch", "device_rates", "attention_ours", "attention_torch", "data",
                  *[f"train_demo_64_{policy}" for policy in ("none", "selective", "full")], "torch_demo_64", "kernels_gpt2-124m", "op_matmul_bf16", "op_gpt_bf16", "op_some_fp8_bf16",
                  "op_rope_bf16",
                  *curves, "ranks_small_one", "ranks_small_sockets_0", "ranks_small_sockets_3"]
        skipped = ["build", "unit_for_hopper", "memory_managed", "fp8_training", "ranks_nccl", "sanitizer"]
        self.assertEqual(outcomes, {"op_attention_bf16": "failed", **{name: "passed" for name in passed},
                                    **{name: "skipped" for name in skipped}}, self.output)
        for line in ("failed: op_attention_bf16 (status 1: backward)", "torch (9.9 of a stand-in)", "memory_managed (no managed memory)",
                     "sanitizer (Device not supported.)", "unit_for_hopper (unit_for_hopper: needs compute capability 9.0)"):
            self.assertIn(line, text)
        with open(self.path + "/all/gpu_check.log", encoding="utf-8") as file:
            log = file.read()
        for name in passed:
            self.assertIn(f"==== {name} of ", log)
        # What shows that the figures are a correct engine's comes before them, and ours before PyTorch's, which may take long.
        order = ["op_attention_fp32", "op_gpt_bf16", "curve_llama_bf16", "attention_ours", "train_demo_64_none", "torch_demo_64", "train_demo_64_full", "op_some_fp8_bf16", "op_rope_bf16"]
        self.assertEqual(sorted(order, key=lambda name: log.index(f"==== {name} of ")), order)
        self.assertIn("==== op_gpt_bf16 of model", log)
        self.assertEqual(sorted(os.listdir(self.path + "/all")), ["gpu_check.json", "gpu_check.log", "gpu_check.md"])

    def test_a_later_run_adds(self):
        shutil.copytree(self.path + "/all", self.path + "/later")
        before, _ = self.read("later")
        self.program("op_attention_bf16", "#!/bin/sh\nprintf '1..2\\nok 1 - forward\\nok 2 - backward\\n'\n")
        self.addCleanup(write_program, f"{self.path}/programs/op_attention_bf16", PROGRAMS["op_attention_bf16"])
        run = self.start("later", "--stages", "attention")
        output, _ = run.communicate(timeout=120)
        self.assertEqual(run.returncode, 0, output)
        checks, text = self.read("later")
        self.assertEqual(checks["op_attention_bf16"]["outcome"], "passed")
        self.assertEqual(list(checks), list(before))
        for name in set(checks) - {"op_attention_bf16", "op_attention_fp32", "memory_managed", "memory_pinned"}:
            self.assertEqual(checks[name], before[name])
        self.assertNotIn("; failed:", text)
        self.assertEqual(len(self.table(text, "Training")), 4)
        run = self.start("later", "--stages", "unit", STAND_IN_GPU="Other")
        output, _ = run.communicate(timeout=120)
        self.assertEqual(run.returncode, 2, output)

    def test_fp8_on_hopper(self):
        run = self.start("fp8", "--stages", "fp8", STAND_IN_CAPABILITY="9.0", EMU_CAPABILITY="9.0")
        output, _ = run.communicate(timeout=600)
        self.assertEqual(run.returncode, 0, output)
        checks, text = self.read("fp8")
        curves = [(shape, recipe) for shape in ("small, 1 of the layers", "demo, 1 of the layers") for recipe in ("tensorwise", "delayed", "blockwise")]
        self.assertEqual([(row[0], row[3]) for row in self.table(text, "FP8 beside bf16")],
                         [(model, "hybrid " + recipe) for model, recipe in [*curves, ("demo", "tensorwise"), ("demo", "delayed")]])
        for shape in ("gpt2_64", "llama_128"):
            for recipe in ("tensorwise", "delayed", "blockwise"):
                self.assertEqual(checks[f"fp8_{shape}_{recipe}_curve"]["outcome"], "passed")

    def test_attention_table_of_each_gpu(self):
        for capability in ("8.9", "9.0", "10.0", "12.0"):
            run = self.start("table_" + capability, "--stages", "attention_table", STAND_IN_CAPABILITY=capability, EMU_CAPABILITY=capability)
            output, _ = run.communicate(timeout=300)
            self.assertEqual(run.returncode, 0, output)
            checks, _ = self.read("table_" + capability)
            self.assertEqual(checks["attention_ours"]["outcome"], "passed", capability)

    def test_curves_on_hopper_train_with_its_attention(self):
        run = self.start("hopper", "--stages", "curve", STAND_IN_CAPABILITY="9.0", EMU_CAPABILITY="9.0")
        output, _ = run.communicate(timeout=300)
        self.assertEqual(run.returncode, 0, output)
        with open(self.path + "/hopper/gpu_check.log", encoding="utf-8") as file:
            checks = re.split(r"^==== ", file.read(), flags=re.M)
        self.assertEqual([check.split()[0] for check in checks if "flash, wgmma" in check], ["curve_gpt2_64_bf16_cuda", "curve_llama_128_bf16_cuda"])

    def test_no_time_left(self):
        self.program("unit_slow", "#!/bin/sh\nexec sleep 60\n")
        begin = time.monotonic()
        run = self.start("late", "--stages", "unit,attention,curve", GPU_CHECK_SECONDS="12")
        output, _ = run.communicate(timeout=120)
        self.assertLess(time.monotonic() - begin, 60)
        self.assertEqual(run.returncode, 0, output)
        checks, text = self.read("late")
        self.assertEqual(checks["unit_first"]["outcome"], "passed")
        self.assertIn("no time left: unit_slow", text)
        self.assertRegex(checks["unit_slow"]["why"], r"^ended after \d+ s, when no time was left$")
        self.assertEqual((checks["op_attention_fp32"]["outcome"], checks["data"]["outcome"]), ("no time", "no time"))


class RehearsalRow(unittest.TestCase):
    """What a rehearsal of the long table says of a report."""
    def test_its_calls_have_every_stage(self):
        stages = [stage for stages, _ in rehearsal.CALLS.values() for stage in stages.split(",")]
        self.assertEqual(set(stages), set(ALL_STAGES))

    def test_each_check_of_the_last_run_passes_or_has_a_reason(self):
        checks = [{"check": name, "outcome": outcome, "why": why, "run": run} for name, outcome, why, run in (
            ("earlier", "failed", "status 1", 0), ("good", "passed", None, 1), ("bad", "failed", "status 1", 1), ("late", "no time", "no time left", 1),
            ("good", "skipped", "good was not built", 1), ("unit_sm90", "skipped", "unit_sm90: needs compute capability 9.0", 1))]
        for capability, unit in (("8.0", ""), ("9.0", "skipped: unit_sm90: needs compute capability 9.0")):
            self.assertEqual(list(rehearsal.faults_of_run({"runs": [{}, {}], "checks": checks}, capability)), [
                ("good", ""), ("bad", "failed: status 1"), ("late", "no time: no time left"), ("good", "skipped: good was not built"), ("unit_sm90", unit)])

    def test_each_program_was_started(self):
        checks = [{"check": name, "outcome": outcome, "why": why} for name, outcome, why in (
            ("op_a_bf16", "passed", None), ("attention_ours", "passed", None), ("op_b_bf16", "hung", "killed after 240 s"))]
        self.assertEqual(dict(rehearsal.faults_of_report({"checks": checks}, "8.0", ["op_a_bf16", "attention_bench", "op_b_bf16", "op_c_bf16"])),
                         {"op_a_bf16": "", "attention_bench": "", "op_b_bf16": "hung: killed after 240 s", "op_c_bf16": "never started"})

    def test_its_programs_are_every_test_of_an_op_and_every_unit_of_cuda(self):
        names = set(map(os.path.basename, rehearsal.programs_of("build")))
        tests = [os.path.splitext(os.path.basename(path))[0] for path in glob.glob(ROOT + "/test/op_*.c")]
        units = [os.path.splitext(os.path.basename(path))[0] for path in glob.glob(ROOT + "/test/cuda/*.cu")]
        self.assertGreater(names, {name + "_bf16" for name in tests if name != "op_zero"} | {*units, "op_attention_quick", "train_gpt"})


class Stages(StandIns):
    def assert_ended(self, name):
        """Of the process whose number is in the file `name`."""
        with open(f"{self.path}/{name}", encoding="utf-8") as file:
            number = int(file.read())
        try:
            with open(f"/proc/{number}/stat", encoding="utf-8") as file:
                self.assertIn(file.read().rsplit(")", 1)[1].split()[0], "ZX", "the check still runs")
        except FileNotFoundError:
            pass

    def test_what_hangs_is_named(self):
        self.program("unit_hangs", "#!/bin/sh\necho begun\ntrap '' TERM\nwhile :; do sleep 1; done\n")
        run = self.start("hang", "--stages", "unit,attention", GPU_CHECK_STEP_SECONDS="2")
        output, _ = run.communicate(timeout=120)
        self.assertEqual(run.returncode, 1)
        checks, text = self.read("hang")
        self.assertRegex(text, r"hung: unit_hangs \(killed after \d+ s\)", output)
        self.assertEqual(checks["unit_hangs"]["output"], ["begun"])
        self.assertEqual(checks["op_attention_fp32"]["outcome"], "passed")  # what comes after it runs

    def test_op_tests_run_side_by_side(self):
        """Each waits for the other, which alone would be its limit; a signal stops all."""
        for name, other in (("one", "two"), ("two", "one")):
            self.program(f"op_{name}_bf16", f"#!/bin/sh\ncd '{self.path}'\n: >began_{name}\nwhile [ ! -e began_{other} ]; do sleep 0.1; done\n"
                         "echo 1..1\necho ok 1 - met\n")
        run = self.start("together", "--stages", "ops", GPU_CHECK_TOGETHER="2", GPU_CHECK_STEP_SECONDS="20", GPU_CHECK_ONLY="^op_(one|two)_")
        output, _ = run.communicate(timeout=120)
        self.assertEqual(run.returncode, 0, output)
        checks, _ = self.read("together")
        for name in ("op_one_bf16", "op_two_bf16"):
            self.assertEqual((checks[name]["outcome"], checks[name]["tests"]["passed"]), ("passed", 1))
        os.remove(self.path + "/began_one")
        os.remove(self.path + "/began_two")
        write_program(self.path + "/programs/op_two_bf16", f"#!/bin/sh\necho $$ >'{self.path}/waits'\nexec sleep 100\n")
        run = self.start("together", "--stages", "ops", GPU_CHECK_TOGETHER="2", GPU_CHECK_ONLY="^op_(one|two)_")
        for _ in range(600):
            if os.path.exists(self.path + "/waits") and os.path.exists(self.path + "/began_one"):
                break
            time.sleep(0.1)
        run.send_signal(signal.SIGTERM)
        self.assertIn("STOPPED: op_one_bf16: stopped by TERM", output := run.communicate(timeout=60)[0])
        self.assertIn("STOPPED: op_two_bf16: stopped by TERM", output)
        self.assert_ended("waits")

    def test_no_check_passed(self):
        """A machine on which all is skipped has shown nothing."""
        write_program(f"{self.path}/programs/memory_probe", "#!/bin/sh\necho none\nexit 1\n")
        self.addCleanup(write_program, f"{self.path}/programs/memory_probe", PROGRAMS["memory_probe"])
        run = self.start("nothing", "--stages", "build,attention")
        output, _ = run.communicate(timeout=120)
        self.assertEqual(run.returncode, 1, output)
        self.assertIn("\n0 passed, 0 failed, ", output)
        self.assertIn("the host and the GPU see no memory in common", output)

    def test_a_signal_leaves_a_report(self):
        self.program("unit_slow", f"#!/bin/sh\ntrap '' TERM\necho $$ >'{self.path}/slow'\nwhile :; do sleep 1; done\n")
        run = self.start("killed", "--stages", "unit,curve")
        for _ in range(600):
            if os.path.exists(self.path + "/slow") and os.path.getsize(self.path + "/slow"):
                break
            time.sleep(0.1)
        run.send_signal(signal.SIGTERM)
        output, _ = run.communicate(timeout=60)
        self.assertEqual(run.returncode, 128 + signal.SIGTERM, output)
        checks, text = self.read("killed")
        self.assertEqual({name: check["outcome"] for name, check in checks.items()},
                         {"unit_first": "passed", "unit_for_hopper": "skipped", "unit_slow": "stopped"})
        self.assertIn("unit_slow (stopped by TERM)", text)
        self.assert_ended("slow")

    def test_wrong_use(self):
        for arguments, status in ((["--stages", "units"], 2), ([], 77)):
            environment = {} if arguments else {"PATH": "/usr/bin:/bin"}
            run = self.start("none", *arguments, **environment)
            run.communicate(timeout=120)
            self.assertEqual(run.returncode, status)
            self.assertFalse(os.path.exists(self.path + "/none"))


if __name__ == "__main__":
    unittest.main()
