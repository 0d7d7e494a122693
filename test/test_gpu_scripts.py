"""What of scripts/gpu_check.sh runs without a GPU: the roofline page, the comparison of curves, the start of ranks, the
report."""
import json
import os
import subprocess
import sys
import tempfile
import unittest

SCRIPTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "scripts")


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

    def test_hopper_ceilings_are_what_the_script_writes(self):
        result = script("hopper_ceiling.py", "--check")
        self.assertEqual(result.returncode, 0, result.stdout)


class Curve(unittest.TestCase):
    def compare(self, one, other, precision="fp32"):
        with tempfile.TemporaryDirectory() as folder:
            runs = [os.path.join(folder, f"curve_{precision}_{device}") for device in ("cpu", "cuda")]
            for run, losses in zip(runs, (one, other)):
                write_lines(f"{run}/log.jsonl", [{"step": i + 1, "loss": loss} for i, loss in enumerate(losses)])
            return script("gpu_report.py", "curve", *runs).returncode

    def test_curves(self):
        self.assertEqual(self.compare([5.5, 4.5, 3.5], [5.5, 4.501, 3.4995]), 0)
        self.assertEqual(self.compare([5.5, 4.5, 3.5], [5.5, 4.51, 3.5]), 1)
        self.assertEqual(self.compare([5.5, 4.5, 3.5], [5.5, 4.51, 3.5], "bf16"), 0)
        self.assertEqual(self.compare([5.5, 4.5, 3.5], [5.5, 4.5]), 1)
        self.assertEqual(self.compare([5.5, 4.5, 3.5], [5.5, None, 3.5]), 1)
        self.assertEqual(self.compare([5.5, 5.5, 5.5], [5.5, 5.5, 5.5]), 1)
        self.assertEqual(self.compare([], []), 1)


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
            f.write(json.dumps({**entry, **(error if ranks > 1 and step == 2 else {})}) + "\\n")
''' % sys.executable


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

    def test_any_rank_may_fail(self):
        for rank in (0, 1):
            row, status = self.ranks(FAILS=str(rank))
            self.assertNotEqual(status, 0)
            self.assertEqual(row["error"], f"rank {rank} fails")


class Spills(unittest.TestCase):
    def table(self, *kernels, architecture="sm_80", stack=16):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "ptxas_bf16_sm_80.log")
            with open(path, "w", encoding="utf-8") as file:
                for name, stores in kernels:
                    file.write(f"ptxas info    : Compiling entry function '{name}' for '{architecture}'\n"
                               f"    {stack} bytes stack frame, {stores} bytes spill stores, 8 bytes spill loads\n"
                               f"ptxas info    : Used 255 registers, used 1 barriers, 16 bytes smem, 400 bytes cmem[0]\n")
            return script("ptxas_table.py", path)

    def test_bounds(self):
        table = self.table(("flash_forward_kernel", 0), ("flash_backward_key_kernel", 120), ("rope_kernel", 0))
        self.assertEqual(table.returncode, 0, table.stderr)
        self.assertIn("flash_backward_key_kernel bf16_sm_80             255      16     16          120           8", table.stdout)
        for kernel, stores in (("flash_forward_kernel", 4), ("flash_backward_key_kernel", 124), ("rope_kernel", 4)):
            table = self.table(("flash_forward_kernel", 0), (kernel, stores))
            self.assertEqual(table.returncode, 1)
            self.assertIn(f"{kernel} of bf16_sm_80 spills {stores} bytes", table.stderr)
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


class Overlap(unittest.TestCase):
    def overlap(self, *opcodes, kernel="_Z19sm90_forward_kernelI17sm90_forward_planILi64EEEv22sm90_forward_arguments"):
        sass = "\n".join([f"\tFunction : {kernel}", *(f"  /*{16 * i:04x}*/  {code} R1 ;" for i, code in enumerate(opcodes)),
                          "\tFunction : other", "  /*0000*/ WARPGROUP.DEPBAR.LE gsb0 ;", "  /*0010*/ MUFU.EX2 R1, R2 ;"])
        return subprocess.run([os.path.join(SCRIPTS, "hopper_overlap.py")], input=sass, capture_output=True, text=True,
                              timeout=60)

    def test_waits(self):
        product, wait, exponential = "HGMMA.64x64x16.F32.BF16", "WARPGROUP.DEPBAR.LE", "MUFU.EX2"
        self.assertEqual(self.overlap(product, wait, exponential, wait, product, wait, exponential).returncode, 0)
        self.assertEqual(self.overlap(product, wait, wait, exponential).returncode, 1)
        self.assertEqual(self.overlap(product, wait, exponential, wait, exponential, product).returncode, 1)
        self.assertEqual(self.overlap(product, kernel="_Z11norm_kernel").returncode, 1)  # none of Hopper's

    def test_instructions_of_a_step(self):
        """Without the mask that a branch goes past, and of the inner loop."""
        step = ["MOV", "HGMMA", "@P1 BRA 0x60 ;", "FSEL", "FSEL", "FSEL", "MUFU.EX2", "@P0 BRA 0x10 ;", "FADD", "@P2 BRA 0x0 ;", "EXIT"]
        self.assertIn("; 4 instructions a step", self.overlap(*step).stdout)
        self.assertIn("; no instructions a step", self.overlap(*step[:7]).stdout)


class Report(unittest.TestCase):
    def test_tables(self):
        attention = {"bench": "attention", "direction": "forward", "mask": "causal", "head_dim": 64, "heads": 32, "groups": 32, "batch": 16,
                     "length": 1024}
        train = {"bench": "train", "preset": "gpt2-124m", "length": 1024, "batch": 16, "policy": "none"}
        ranks = {**train, "bench": "ranks", "engine": "ours", "ranks": 2, "collectives": "nccl", "zero_stage": 0}
        with tempfile.TemporaryDirectory() as folder:
            write_lines(f"{folder}/machine.jsonl", [{"gpu": "Some GPU", "date": "2026-01-01", "commit": "abc"}])
            write_lines(f"{folder}/checks.jsonl", [{"check": "one", "status": 0, "seconds": 3},
                                                   {"check": "two", "status": 1, "seconds": 3},
                                                   {"check": "three", "skipped": "no time left"}])
            write_lines(f"{folder}/bench.jsonl", [
                {**attention, "engine": "ours", "tflops": 300.0},
                {**attention, "engine": "torch flash", "tflops": 200.0},
                {**attention, "engine": "torch cudnn", "error": "none"},
                {**attention, "direction": "deterministic backward", "mask": "full", "engine": "ours", "tflops": 250.0},
                {**attention, "direction": "backward", "engine": "ours", "tflops": 260.0},
                {**train, "engine": "ours", "tokens_per_second": 5e5, "mfu": 0.4, "peak_bytes": 12 << 30,
                 "planned_bytes": 11 << 30},
                {**train, "engine": "ours", "policy": "full", "error": "failed"},
                {**train, "engine": "torch", "tokens_per_second": 4e5, "peak_bytes": 14 << 30},
                {**ranks, "tokens_per_second": 9e5, "one_tokens_per_second": 5e5, "comm_bytes": 2e8, "comm_ms": 3.14,
                 "comm_exposed_ms": 0.5, "difference": 1.23e-4},
                {**ranks, "preset": None, "collectives": "sockets", "zero_stage": 3, "error": "differs from one rank",
                 "difference": 0.5}])
            self.assertEqual(script("gpu_report.py", "report", folder).returncode, 0)
            with open(f"{folder}/gpu_check.md", encoding="utf-8") as file:
                text = file.read()
            with open(f"{folder}/gpu_check.json", encoding="utf-8") as file:
                self.assertEqual(len(json.load(file)["benchmarks"]), 10)
        for line in ("1 checks passed, failed: two; skipped: three (no time left)",
                     "| forward | causal | 64 | 32/32 | 16 | 1024 | 300 | 200 | - | 1.50 |\n"
                     "| backward | causal | 64 | 32/32 | 16 | 1024 | 260 | - | - | - |\n"
                     "| deterministic backward | full | 64 | 32/32 | 16 | 1024 | 250 | - | - | - |",
                     "| gpt2-124m | 1024 | 16 | ours | none | 500000 | 40.0 % | 12.00 | 11.00 | 1.25 |",
                     "| gpt2-124m | 1024 | 16 | ours | full | failed | - | - | - | - |",
                     "| gpt2-124m | 1024 | 16 | torch | none | 400000 | 32.0 % | 14.00 | - | - |",
                     "| gpt2-124m | 2 | nccl | 0 | 900000 | 1.80 | 200.00 | 3.14 | 0.50 | 0.0001 |",
                     "| small | 2 | sockets | 3 | differs from one rank | - | - | - | - | 0.5 |"):
            self.assertIn(line, text)


if __name__ == "__main__":
    unittest.main()
