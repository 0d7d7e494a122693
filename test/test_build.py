"""The Makefile: how a build was made decides what is built again; what can't be used is named in one line."""
import os
import platform
import re
import shutil
import subprocess
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROGRAM = "test/unit_schedule"  # the smallest one
ANOTHER_ARCH = {"x86_64": "x86-64", "aarch64": "armv8-a"}.get(platform.machine(), "native")


class Build(unittest.TestCase):
    def setUp(self):
        # Below this tree, under names without a space, at which make would split them.
        os.makedirs(ROOT + "/build", exist_ok=True)
        self.folder = os.path.relpath(tempfile.mkdtemp(dir=ROOT + "/build"), ROOT)
        self.addCleanup(shutil.rmtree, f"{ROOT}/{self.folder}")
        self.target = f"{self.folder}/build/{PROGRAM}"

    def make(self, *arguments):
        # Neither the variables of a make that runs this test nor its caller's are for this make.
        environment = {k: v for k, v in os.environ.items()
                       if not k.startswith("MAKE") and k not in (
                           "MFLAGS", "CC", "CXX", "ARCH", "SANITIZE", "WERROR", "MPI", "ONEDNN", "OPENBLAS", "OPENBLAS_INCLUDE",
                           "DEPS", "CFLAGS", "CPPFLAGS", "LDFLAGS", "CUDA_HOME", "NVCC", "CUBLASLT_DIR", "NCCL_HOME", "GPU_ARCH", "RELEASE")}
        return subprocess.run(["make", f"B={self.folder}/build", "CUDA=", *arguments, self.target], cwd=ROOT,
                              env=environment, text=True, capture_output=True)

    def script(self, name, text):
        path = f"{self.folder}/{name}"
        with open(f"{ROOT}/{path}", "w") as file:
            file.write("#!/bin/sh\n" + text)
        os.chmod(f"{ROOT}/{path}", 0o755)
        return path

    def test_what_a_build_is_made_with_decides_what_is_built_anew(self):
        self.target = f"{self.folder}/build/library/runtime/schedule.o"
        self.assertEqual(self.make().returncode, 0)
        self.assertEqual(self.make("-q").returncode, 0, "nothing changed")
        compiler = self.script("another", 'exec gcc "$@"\n')
        for change in ("MPI=", f"ARCH={ANOTHER_ARCH}", f"CC={compiler}", "DEFINES=-DHAVE_ONEDNN"):
            with self.subTest(change):
                if change == "MPI=" and not shutil.which("mpicc"):
                    self.skipTest("no MPI is installed")
                self.assertEqual(self.make("-q", change).returncode, 1, "out of date")
        self.assertEqual(self.make("-q").returncode, 0, "-q wrote nothing")
        before = os.stat(f"{ROOT}/{self.target}").st_mtime_ns
        self.assertEqual(self.make("MPI=", f"ARCH={ANOTHER_ARCH}").returncode, 0)
        self.assertGreater(os.stat(f"{ROOT}/{self.target}").st_mtime_ns, before)

    def test_hopper_is_built_for_with_wgmma(self):
        """sm_90a is meant: machine code for sm_90 has no wgmma, and traps where the engine, which sees only the GPU,
        chooses it."""
        nvcc = self.script("nvcc", "echo release\n")
        self.target = f"{self.folder}/build/train_gpt"
        for asked, made in (("sm_90", "90a"), ("sm_90a", "90a"), ("sm_89", "89"), ("90", "90a"), ("80,sm_90", "80 90a")):
            printed = self.make("-n", "MISSING=", "MPI=", "CUDA=yes", f"NVCC={nvcc}", "CUBLASLT=lib", "find_include=x", "NCCL=",
                                f"GPU_ARCH={asked}").stdout
            self.assertEqual(set(re.findall(r"arch=compute_(\w+),code=(sm_\w+|compute_\w+)", printed)), {(a, "sm_" + a) for a in made.split()}, asked)

    def test_a_release_has_code_for_every_gpu_that_nvcc_knows(self):
        self.target = f"{self.folder}/build/train_gpt"
        for knows, codes in (("sm_75 sm_80 sm_86 sm_89 sm_90 sm_100 sm_120", "80 86 89 90a 100 120"), ("sm_80 sm_86 sm_89 sm_90", "80 86 89 90a")):
            nvcc = self.script("nvcc", f'[ "$1" = --list-gpu-code ] && echo {knows} || echo release\n')
            printed = self.make("-n", "MISSING=", "MPI=", "CUDA=yes", f"NVCC={nvcc}", "CUBLASLT=lib", "find_include=x", "NCCL=", "GPU_ARCH=release").stdout
            self.assertEqual(set(re.findall(r"arch=compute_(\w+),code=(sm_\w+|compute_\w+)", printed)),
                             {("90", "compute_90"), *((code, "sm_" + code) for code in codes.split())})

    def test_the_program_is_linked_again_for_another_target(self):
        """Stand-ins for compilers only make their output: what matters is which objects are linked."""
        touch = self.script("cc", 'for a; do [ "$last" = -o ] && : >"$a"; last=$a; done\necho gcc\n')
        nvcc = self.script("nvcc", 'for a; do [ "$last" = -o ] && : >"$a"; last=$a; done\necho release\n')
        objcopy = self.script("objcopy", 'for a; do last=$a; done\n: >"$last"\n')
        self.target = f"{self.folder}/build/train_gpt"
        cpu, cuda = ["CUDA="], ["CUDA=yes", f"NVCC={nvcc}", "CUBLASLT=lib", "find_include=x", "NCCL="]
        for target, wanted in ((cuda, True), (cuda, False), (cpu, True), (cpu, False), (cuda, True)):
            made = self.make("V=1", f"CC={touch}", f"OBJCOPY={objcopy}", "MISSING=", "MPI=", *target)
            self.assertEqual(made.returncode, 0, made.stdout + made.stderr)
            linked = [line for line in made.stdout.splitlines() if line.endswith(f"-o {self.target}")]
            self.assertEqual(bool(linked), wanted, made.stdout)
            if wanted:
                self.assertEqual("engine_cuda" in linked[0], target is cuda)

    def test_an_edit_of_an_op_compiles_its_file_alone(self):
        """The edited file is compiled once for each precision; the engine's host code, the other ops and the tests are
        linked with the new object."""
        touch = self.script("cc", 'for a; do [ "$last" = -o ] && : >"$a"; last=$a; done\necho gcc\n')
        objcopy = self.script("objcopy", 'for a; do last=$a; done\n: >"$last"\n')
        stand_ins = (f"CC={touch}", f"CXX={touch}", f"OBJCOPY={objcopy}", "MISSING=", "MPI=")
        tests = [f"{self.folder}/build/test/op_norm_bf16", f"{self.folder}/build/test/models_bf16"]
        self.target = f"{self.folder}/build/train_gpt"
        made = self.make(*stand_ins, *tests)
        self.assertEqual(made.returncode, 0, made.stdout + made.stderr)
        printed = self.make("-n", "-W", "kernels/rope.cu", *stand_ins, *tests).stdout
        self.assertEqual(sorted(re.findall(r"'(\S+) cpu (\S+) '", printed)), [("kernels/rope.cu", "bf16"), ("kernels/rope.cu", "fp32")])
        self.assertEqual([line for line in printed.splitlines() if " -c " in line and "kernels/rope.cu" not in line], [])
        for linked in (self.target, *tests):
            self.assertRegex(printed, f"-o {linked}(\n|$)")

        # A list of what an object was compiled from lies beside it, whatever folder of kernels/ its source is in.
        header = self.script("planted.h", "")
        for op in ("rope", "attention/cpu"):
            with open(f"{self.folder}/build/ops/cpu_bf16/{op}.d", "w", encoding="utf-8") as file:
                file.write(f"{self.folder}/build/ops/cpu_bf16/{op}.o: {header}\n")
        printed = self.make("-n", "-W", header, *stand_ins, *tests).stdout
        self.assertEqual(sorted(re.findall(r"'(\S+) cpu (\S+) '", printed)), [("kernels/attention/cpu.cu", "bf16"), ("kernels/rope.cu", "bf16")])

    def test_tests_of_the_runtime_are_the_same_program_on_every_machine(self):
        commands = self.make("-n", "--always-make").stdout
        self.assertIn("unit_schedule.c", commands)
        compiling = [line for line in commands.splitlines() if "unit_schedule.c" in line]
        self.assertEqual([line for line in compiling if "native" in line], [])

    def test_the_library_is_for_no_newer_cpu_than_the_program(self):
        if platform.machine() != "x86_64":
            self.skipTest("x86-64's levels")
        self.target = f"{self.folder}/build/library/runtime/schedule.o"
        for arch, newer in (("x86-64", False), ("x86-64-v3", True)):
            commands = self.make("-n", "--always-make", f"ARCH={arch}").stdout
            self.assertIn("schedule.c", commands)
            self.assertEqual("-msse4.2" in commands, newer, commands)

    def engines(self, arch):
        """Returns what the engines of a program for `arch` are compiled for, by their names, and the levels that main
        gets."""
        self.target = f"{self.folder}/build/train_gpt"
        commands = self.make("-n", "--always-make", f"ARCH={arch}").stdout
        engines = {re.search("-DENGINE=train_cpu_(\\S+)", line).group(1): " ".join(re.findall("-march=\\S+|-m\\w+bf16", line))
                   for line in commands.splitlines() if "-DENGINE=" in line}
        return engines, re.findall('"([^"]+)"', re.search(r"'-DLEVELS\(X\)=(.*?)'", commands).group(1))

    def test_a_native_program_has_one_level(self):
        engines, levels = self.engines("native")
        self.assertEqual(sorted(engines), ["bf16", "fp32"])
        self.assertEqual(levels, ["native"])

    def test_a_program_for_an_old_cpu_has_all_levels_above(self):
        if platform.machine() != "x86_64":
            self.skipTest("x86-64's levels")
        above = ["x86-64-v3", "x86-64-v4", "x86-64-v4+avx512bf16"]
        for arch, wanted in (("x86-64", above), ("x86-64-v3", above[1:]), (above[2], [])):
            with self.subTest(arch):
                engines, levels = self.engines(arch)
                self.assertEqual(levels, [arch, *wanted])
                self.assertEqual(len(engines), 2 * len(levels))
                for level, suffix in zip(levels, ["", *("_" + re.sub("[-+.]", "_", level) for level in wanted)]):
                    for precision in ("fp32", "bf16"):
                        self.assertEqual(engines[precision + suffix], "-march=" + level.replace("+", " -m"))

    def test_a_level_that_the_compiler_does_not_know_is_left_out(self):
        if platform.machine() != "x86_64":
            self.skipTest("x86-64's levels")
        older = self.script("older", 'for a; do [ "$a" = -mavx512bf16 ] && exit 1; done\nexec gcc "$@"\n')
        commands = self.make("-n", "--always-make", "ARCH=x86-64-v4", f"CC={older}").stdout
        self.assertNotIn("avx512bf16", commands)

    def test_a_fuzz_target_is_built_anew_where_a_parser_changes(self):
        touch = self.script("cc", 'for a; do [ "$last" = -o ] && : >"$a"; last=$a; done\necho gcc\n')
        compilers = (f"CC={touch}", f"CLANG={touch}", "MISSING=", "MPI=")
        self.target = f"{self.folder}/build/fuzz/manifest"
        made = self.make(*compilers)
        self.assertEqual(made.returncode, 0, made.stdout + made.stderr)
        self.assertEqual(self.make("-q", *compilers).returncode, 0, "nothing changed")
        for changed in ("formats/manifest.c", "test/fuzz/fuzz.h"):
            self.assertEqual(self.make("-q", "-W", changed, *compilers).returncode, 1, changed)

    def refused(self, *arguments):
        made = self.make(*arguments)
        self.assertEqual(made.returncode, 2, made.stdout + made.stderr)
        lines = [line for line in made.stderr.splitlines() if "***" not in line or "Stop." in line]
        self.assertFalse(os.path.exists(f"{ROOT}/{self.target}"))
        return lines

    def test_what_cannot_be_used_is_named_in_one_line_with_the_way_out(self):
        no_openmp = self.script("no_openmp", 'for a; do [ "$a" = -fopenmp ] && exit 1; done\nexec gcc "$@"\n')
        no_library = self.script("mpicc", "echo gcc -I/nowhere -L/nowhere -lmpi_that_is_not_there\n")
        for arguments, wanted in (
                (["ARCH=of-tomorrow"], "ARCH=native"),
                ([f"CC={no_openmp}"], "has no OpenMP"),
                ([f"MPI={no_library}"], "leave it out by MPI="),
                (["MISSING=jansson.h"], "jansson.h not found; scripts/setup.sh build installs what is missing"),
                (["CUDA=yes", "NVCC=/nowhere/nvcc"], "make CUDA= builds for the cpu only"),
                (["CUDA=yes", "NVCC=true", "CUDA_DIRS=/nowhere", "WHEELS="], "CUBLASLT_DIR= names the folder")):
            with self.subTest(arguments[-1]):
                lines = self.refused(*arguments)
                self.assertEqual(len(lines), 1, lines)
                self.assertIn(wanted, lines[0])

    def test_a_compiler_that_builds_nothing_is_named(self):
        for compiler in (self.script("broken", "exit 1"), "no-such-gcc"):
            lines = self.refused(f"CC={compiler}", "CUDA=")
            self.assertEqual(len(lines), 1, lines)
            self.assertIn("scripts/setup.sh build installs gcc; CC= names another compiler", lines[0])


if __name__ == "__main__":
    unittest.main()
