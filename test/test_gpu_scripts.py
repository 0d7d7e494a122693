"""What of scripts/gpu_check.sh runs without a GPU: the roofline page, the comparison of curves, the report."""
import json
import os
import subprocess
import sys
import tempfile
import unittest

SCRIPTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "scripts")


def script(name, *arguments):
    return subprocess.run([sys.executable, os.path.join(SCRIPTS, name), *arguments], capture_output=True, text=True,
                          check=False)


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


class Spills(unittest.TestCase):
    def table(self, *kernels):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "ptxas_bf16_sm_80.log")
            with open(path, "w", encoding="utf-8") as file:
                for name, stores in kernels:
                    file.write(f"ptxas info    : Compiling entry function '{name}' for 'sm_80'\n"
                               f"    16 bytes stack frame, {stores} bytes spill stores, 8 bytes spill loads\n"
                               f"ptxas info    : Used 255 registers, used 1 barriers, 16 bytes smem, 400 bytes cmem[0]\n")
            return script("ptxas_table.py", path)

    def test_bounds(self):
        table = self.table(("flash_forward_kernel", 0), ("flash_backward_key_kernel", 120), ("rope_kernel", 0))
        self.assertEqual(table.returncode, 0, table.stderr)
        self.assertIn("flash_backward_key_kernel bf16_sm_80         255      16     16          120           8", table.stdout)
        for kernel, stores in (("flash_forward_kernel", 4), ("flash_backward_key_kernel", 124), ("rope_kernel", 4)):
            table = self.table(("flash_forward_kernel", 0), (kernel, stores))
            self.assertEqual(table.returncode, 1)
            self.assertIn(f"{kernel} of bf16_sm_80 spills {stores} bytes", table.stderr)
        self.assertEqual(self.table().returncode, 1)  # no kernel at all


class Report(unittest.TestCase):
    def test_tables(self):
        attention = {"bench": "attention", "direction": "forward", "head_dim": 64, "heads": 32, "groups": 32, "batch": 16,
                     "length": 1024}
        train = {"bench": "train", "preset": "gpt2-124m", "length": 1024, "batch": 16, "policy": "none"}
        with tempfile.TemporaryDirectory() as folder:
            write_lines(f"{folder}/machine.jsonl", [{"gpu": "Some GPU", "date": "2026-01-01", "commit": "abc"}])
            write_lines(f"{folder}/checks.jsonl", [{"check": "one", "status": 0, "seconds": 3},
                                                   {"check": "two", "status": 1, "seconds": 3},
                                                   {"check": "three", "skipped": "no time left"}])
            write_lines(f"{folder}/bench.jsonl", [
                {**attention, "engine": "ours", "tflops": 300.0},
                {**attention, "engine": "torch flash", "tflops": 200.0},
                {**attention, "engine": "torch cudnn", "error": "none"},
                {**train, "engine": "ours", "tokens_per_second": 5e5, "mfu": 0.4, "peak_bytes": 12 << 30,
                 "planned_bytes": 11 << 30},
                {**train, "engine": "ours", "policy": "full", "error": "failed"},
                {**train, "engine": "torch", "tokens_per_second": 4e5, "peak_bytes": 14 << 30}])
            self.assertEqual(script("gpu_report.py", "report", folder).returncode, 0)
            with open(f"{folder}/gpu_check.md", encoding="utf-8") as file:
                text = file.read()
            with open(f"{folder}/gpu_check.json", encoding="utf-8") as file:
                self.assertEqual(len(json.load(file)["benchmarks"]), 6)
        for line in ("1 checks passed, failed: two; skipped: three (no time left)",
                     "| forward | 64 | 32/32 | 16 | 1024 | 300 | 200 | - | 1.50 |",
                     "| gpt2-124m | 1024 | 16 | ours | none | 500000 | 40.0 % | 12.00 | 11.00 | 1.25 |",
                     "| gpt2-124m | 1024 | 16 | ours | full | failed | - | - | - | - |",
                     "| gpt2-124m | 1024 | 16 | torch | none | 400000 | 32.0 % | 14.00 | - | - |"):
            self.assertIn(line, text)


if __name__ == "__main__":
    unittest.main()
