"""What test/run.py promises, in a small tree of its own. Needs only Python's standard library."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import environment
import run
import stamps

OWN = re.compile("TRAIN_GPT|TEST_|AGAIN$|EMU_|CHECKPOINT_KILLS$")  # of the run that this test is part of
PASSES = "echo 'ok 1 - a'; echo 'ok 2 - b'"
CMOCKA = """#include "test/testing.h"
static void first(void **state) { }
static void second(void **state) {
    test_case(7, "of shape %d", 3);
    fail_msg("words of the second");
}
static void third(void **state) { fail_msg("words of the third"); }
static void fourth(void **state) { skip(); }
int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(first), cmocka_unit_test(second), cmocka_unit_test(third), cmocka_unit_test(fourth)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
"""
PYTHON = """import os
import unittest
class A(unittest.TestCase):
    def test_a(self): pass
    def test_b(self): pass
    @unittest.skip("for this test")
    def test_skipped(self): pass
class B(unittest.TestCase):
    def test_good(self): pass
    def test_bad(self):
        '''It has a first line.'''
        self.fail("TRAIN_GPT=" + os.environ["TRAIN_GPT"])
    def test_parts(self):
        for i in range(3):
            with self.subTest(i=i): self.assertNotEqual(i, 1, "a part")
class C(unittest.TestCase):
    @classmethod
    def setUpClass(cls): raise OSError("no class")
    def test_never(self): pass
unittest.main()
"""


def is_alive(pid):
    try:
        with open("/proc/%d/stat" % pid, encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Tree(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="two  words ")
        self.addCleanup(folder.cleanup)
        self.path = folder.name
        for name in ("test/golden", "build/test", "build/emu"):
            os.makedirs(os.path.join(self.path, name))
        for name in stamps.OURS:
            shutil.copy(os.path.join(environment.ROOT, "test", name), self.path + "/test")
        self.write("test/test_it.py", PYTHON)
        self.program("build/train_gpt", "exit 0")
        self.program("build/test/passes", PASSES)

    def write(self, name, text):
        with open(os.path.join(self.path, name), "w", encoding="utf-8") as file:
            file.write(text)

    def read(self, name):
        with open(os.path.join(self.path, name), encoding="utf-8") as file:
            return file.read()

    def program(self, name, text):
        self.write(name, "#!/bin/sh\n%s\n" % text)
        os.chmod(os.path.join(self.path, name), 0o755)

    def counting(self, name, text):
        """Writes a program that leaves a line each time it runs."""
        self.program(name, "echo run >>%s.runs\n%s" % (name, text))

    def runs(self, name):
        return len(self.read(name + ".runs").splitlines())

    def variables(self, more):
        return {**{name: value for name, value in os.environ.items() if not OWN.match(name) and not run.CHOSEN.match(name)}, **more}

    def run_it(self, *tests, stdout=subprocess.PIPE, script=("test/run.py",), **variables):
        """Returns status and lines. The variables of the script's own test are in the environment."""
        result = subprocess.run([sys.executable, *script, *tests], text=True, stdout=stdout, stderr=subprocess.STDOUT, timeout=60, check=False,
                                cwd=self.path, env=self.variables(variables))
        return result.returncode, (result.stdout or "").splitlines()

    def shell(self, command):
        result = subprocess.run(["sh", "-c", command], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, check=False,
                                cwd=self.path, env=self.variables({"PYTHONPATH": environment.ROOT + "/test"}))
        return result.returncode, result.stdout


class Counts(Tree):
    def test_what_passes_fails_and_is_skipped_is_counted(self):
        for tests, expected in ((["build/test/passes"], (0, ["2 passed, 0 failed"])),
                                (["test/test_it.py:A"], (0, ["1 skipped", "2 passed, 0 failed"])),
                                (["test/test_it.py:B", "build/test/passes"], (1, ["3 passed, 2 failed"])),
                                (["build/test/missing"], (1, ["0 passed, 1 failed"]))):
            status, lines = self.run_it(*tests)
            self.assertEqual((status, lines[-len(expected[1]):]), expected, lines)

    def test_a_crash_is_a_failure_that_names_the_signal(self):
        self.program("build/test/crash", "echo 'ok 1 - a'\nkill -SEGV $$")
        status, lines = self.run_it("build/test/crash")
        self.assertEqual((status, lines[-1]), (1, "1 passed, 1 failed"), lines)
        self.assertIn("    killed by SIGSEGV", lines)

    def test_no_test_and_an_early_end_and_a_status_are_failures(self):
        for text, expected, words in (("exit 0", "0 passed, 1 failed", "ran no test"),
                                      ("echo 1..3; echo 'ok 1 - a'", "1 passed, 1 failed", "ended after 1 of its 3 tests"),
                                      ("echo 'ok 1 - a'; exit 3", "1 passed, 1 failed", "exit status 3")):
            self.program("build/test/ends", text)
            status, lines = self.run_it("build/test/ends")
            self.assertEqual((status, lines[-1]), (1, expected), lines)
            self.assertIn("    " + words, lines)
        self.write("test/test_none.py", "import unittest\nunittest.main()\n")
        self.assertEqual(self.run_it("test/test_none.py")[0], 1)

    def test_a_test_that_could_not_run_is_missed(self):
        """The first test removes the folder in which the second one would have its scratch."""
        self.program("build/test/removes", 'rm -rf "$TMPDIR"\n' + PASSES)
        os.mkdir(self.path + "/temporary")
        status, lines = self.run_it("build/test/removes", "build/test/passes", TMPDIR=self.path + "/temporary", TEST_JOBS="1")
        self.assertEqual((status, lines[-2:]), (1, ["1 of 2 tests ran", "2 passed, 1 failed"]), lines)

    def test_a_count_that_nobody_can_read_is_no_success(self):
        with open("/dev/full", "w", encoding="utf-8") as full:
            self.assertNotEqual(self.run_it("build/test/passes", stdout=full)[0], 0)

    def test_each_test_has_a_folder_for_mpirun(self):
        self.program("build/test/folder", 'echo "$OMPI_MCA_orte_tmpdir_base" >>folders; test -d "$PRTE_MCA_prte_tmpdir_base" && ' + PASSES)
        self.assertEqual(self.run_it("build/test/folder", "build/test/folder")[0], 0)
        folders = self.read("folders").splitlines()
        self.assertEqual(len(set(folders)), 2)
        self.assertEqual([folder for folder in folders if os.path.exists(folder)], [])

    def test_a_runner_starts_the_programs(self):
        self.program("runner", 'test "$1" = --for && shift && exec "$@"')
        self.program("build/test/passes", PASSES + '; test "$1" = part')
        self.assertEqual(self.run_it("build/test/passes:part", TEST_RUNNER="./runner --for")[0], 0)
        self.assertEqual(self.run_it("build/test/passes:part", TEST_RUNNER="./runner --of")[0], 1)


class Stamps(Tree):
    def setUp(self):
        super().setUp()
        self.counting("build/test/passes", PASSES)

    def test_what_passed_is_not_run_again(self):
        self.assertEqual(self.run_it("build/test/passes", "test/test_it.py:A")[0], 0)
        status, lines = self.run_it("build/test/passes", "test/test_it.py:A")
        self.assertEqual((status, lines), (0, ["2 tests unchanged since they passed (AGAIN=1 runs them)", "1 skipped", "4 passed, 0 failed"]))
        self.assertEqual(self.runs("build/test/passes"), 1)
        self.run_it("build/test/passes", AGAIN="1")
        self.assertEqual(self.runs("build/test/passes"), 2)
        self.run_it("build/test/passes", AGAIN="0", TEST_JOBS="3")
        self.assertEqual(self.runs("build/test/passes"), 2)

    def assert_runs_again(self, test, *changes):
        """Checks that the test runs again after each of the changes, which are functions or variables, and after
        nothing else."""
        self.run_it(test)
        self.assertIn("unchanged", self.run_it(test)[1][0])
        for number, change in enumerate(changes):
            variables = {change: "1"} if isinstance(change, str) else {}
            if not variables:
                change()
            self.assertNotIn("unchanged", "".join(self.run_it(test, **variables)[1]), "change %d" % number)
        self.assertIn("unchanged", self.run_it(test, **variables)[1][0])

    def test_a_program_is_run_again_after_a_change(self):
        def program():
            self.counting("build/test/passes", PASSES + "  # changed")
        def program_of_the_same_size_and_time():
            before = os.stat(self.path + "/build/test/passes")
            self.counting("build/test/passes", PASSES + "  # Changed")
            os.utime(self.path + "/build/test/passes", ns=(before.st_atime_ns, before.st_mtime_ns))
        self.assert_runs_again("build/test/passes", program, program_of_the_same_size_and_time, lambda: self.write("build/test/lib.so.1", "a"),
                               lambda: self.write("test/golden/data", "a"), lambda: self.write("test/golden/data", "b"),
                               lambda: self.write("test/run.py", self.read("test/run.py") + "\n"),
                               "EMU_CAPABILITY", "CUDA_VISIBLE_DEVICES", "UBSAN_OPTIONS", "LONG_TESTS", "TEST_FILTER")

    def test_a_program_is_not_run_again_for_a_source(self):
        self.run_it("build/test/passes")
        self.write("kernel.c", "")
        self.run_it("build/test/passes", TRAIN_GPT="other/train_gpt", MAKEFLAGS="k", PWD="/")
        self.assertEqual(self.runs("build/test/passes"), 1)

    def test_a_test_in_python_is_run_again_after_a_change(self):
        subprocess.run(["git", "init", "-q"], cwd=self.path, check=True)
        self.write(".gitignore", "/build/\n__pycache__/\nignored\n")
        self.write("ignored", "a")
        self.assert_runs_again("test/test_it.py:A", lambda: self.write("kernel.c", "a"), lambda: self.write("kernel.c", "b"),
                               lambda: os.unlink(self.path + "/kernel.c"), lambda: self.program("build/train_gpt", "exit 1"),
                               lambda: self.write("build/test/unit_signals", "a"), "TRAIN_GPT_CUDA", "CHECKPOINT_KILLS")
        self.run_it("test/test_it.py:A")
        self.write("ignored", "b")
        self.assertIn("unchanged", self.run_it("test/test_it.py:A")[1][0])
        shutil.rmtree(self.path + "/.git")
        # without git nothing says that it is ignored
        self.assert_runs_again("test/test_it.py:A", lambda: self.write("ignored", "a"))

    def test_a_failure_leaves_no_stamp_and_takes_away_the_former(self):
        self.program("build/test/passes", "test -e fails || { %s; }" % PASSES)
        self.assertEqual(self.run_it("build/test/passes")[0], 0)
        self.write("fails", "")  # no key depends on it
        self.assertEqual(self.run_it("build/test/passes", AGAIN="1")[0], 1)
        self.assertEqual(self.run_it("build/test/passes")[0], 1)

    def test_a_change_while_a_test_runs_leaves_no_stamp(self):
        """Else the former data would count as data with which the test passed."""
        self.counting("build/test/passes", "echo b >test/golden/data; " + PASSES)
        self.write("test/golden/data", "a")
        self.run_it("build/test/passes")
        self.write("test/golden/data", "a")
        self.run_it("build/test/passes")
        self.assertEqual(self.runs("build/test/passes"), 2)

    def test_a_damaged_stamp_counts_for_nothing(self):
        self.run_it("build/test/passes")
        for name in os.listdir(self.path + "/build/passed"):
            self.write("build/passed/" + name, "{")
        self.assertEqual(self.run_it("build/test/passes")[0], 0)
        self.assertEqual(self.runs("build/test/passes"), 2)

    def test_no_stamps_are_kept_where_they_are_not_wanted(self):
        self.run_it("build/test/passes", TEST_STAMPS="0")
        self.assertFalse(os.path.exists(self.path + "/build/passed"))

    def test_the_data_of_the_c_tests_are_known(self):
        """Each string in their sources that names a file or folder of the tree names one in DATA, except for names that
        are not opened."""
        not_opened = {"kernels/attention/sm90.cuh"}
        found = set()
        for base, folders, names in os.walk(environment.ROOT + "/test"):
            folders[:] = [folder for folder in folders if folder not in ("golden", "corpus", "__pycache__")]
            for name in names:
                if not name.endswith((".py", ".json")):
                    with open(os.path.join(base, name), encoding="utf-8") as file:
                        code = re.sub(r"^ *#include.*|//.*", "", file.read(), flags=re.MULTILINE)
                    found.update(text for text in re.findall(r'"((?:\.\./|\./)*\w[\w.-]*/[^"%\n]*)', code)
                                 if os.path.exists(os.path.join(environment.ROOT, text)))
        self.assertIn("test/golden/gpt2.golden", found)
        self.assertEqual([text for text in sorted(found - not_opened) if not text.startswith(tuple(folder + "/" for folder in stamps.DATA))
                          and text not in stamps.DATA], [])


class Output(Tree):
    def test_a_failure_is_repeated_with_a_command_that_runs_it_alone(self):
        status, lines = self.run_it("test/test_it.py", "build/test/passes", TRAIN_GPT="build/of two/train_gpt")
        self.assertEqual(status, 1)
        at = lines.index("failed: test_it.py")
        commands = {}
        for line in lines[at:]:
            if line.startswith("    alone: "):
                commands[re.search(r"-v (\S+)", line).group(1)] = line.split(": ", 1)[1]
        self.assertEqual(list(commands), ["C", "B.test_bad", "B.test_parts"], lines)
        self.assertIn("    AssertionError: TRAIN_GPT=build/of two/train_gpt", lines[at:])
        for name, words in (("C", "no class"), ("B.test_bad", "TRAIN_GPT=build/of two/train_gpt"), ("B.test_parts", "a part")):
            status, output = self.shell(commands[name])
            self.assertEqual(status, 1)
            self.assertIn(words, output)
            self.assertRegex(output, "Ran %d test" % (name != "C"))

    def test_a_failed_case_of_a_program_is_repeated_with_its_words(self):
        self.write("build/cases.c", CMOCKA)
        built = subprocess.run(["gcc", "-I", environment.ROOT, "build/cases.c", "-lcmocka", "-lm", "-o", "build/test/cases"], capture_output=True,
                               text=True, check=False, timeout=120, cwd=self.path)
        if "cmocka" in built.stderr:
            self.skipTest("there is no cmocka")
        self.assertEqual(built.returncode, 0, built.stderr)
        status, lines = self.run_it("build/test/cases", "build/test/passes", EMU_DEVICES="4")
        self.assertEqual((status, lines[-2:]), (1, ["1 skipped", "3 passed, 2 failed"]))
        at = lines.index("failed: cases")
        second, third = ["    alone: EMU_DEVICES=4 TEST_FILTER=%s build/test/cases" % name for name in ("second", "third")]
        said = lines[at + 1:lines.index(second)]
        self.assertEqual(said[0], "    not ok - second")
        self.assertIn("    in the case of shape 3, seed 7, of no one precision:", said)
        self.assertIn("    words of the second", said)
        self.assertNotIn("    words of the third", said)
        self.assertIn("    words of the third", lines[lines.index(second):lines.index(third)])
        status, output = self.shell(third.split(": ", 1)[1])
        self.assertNotEqual(status, 0)
        self.assertIn("words of the third", output)
        self.assertNotIn("words of the second", output)

    def test_a_long_failure_is_repeated_in_short(self):
        self.program("build/test/long", "for i in $(seq 500); do echo line $i; done; echo 'not ok 1 - a'; echo '# the end'")
        _, lines = self.run_it("build/test/long")
        at = lines.index("failed: long")
        self.assertIn("    line 250", lines[:at])
        self.assertLess(len(lines) - at, 110)
        self.assertIn("    # the end", lines[at:])

    def test_the_longest_run_first(self):
        for name in ("b", "c", "d"):
            self.program("build/test/" + name, PASSES)
        self.program("build/emu/op_e", PASSES)
        os.mkdir(self.path + "/build/passed")
        self.write("build/passed/seconds.json", json.dumps({"build/test/b": 1, "build/test/c": 30}))
        _, lines = self.run_it("build/test/b", "build/test/c", "build/test/d", "build/emu/op_e", "test/test_it.py:A", TEST_JOBS="1")
        self.assertEqual([line.split()[0] for line in lines[:5]], ["test_it.py:A", "emu_e", "d", "c", "b"])
        self.assertLess(json.loads(self.read("build/passed/seconds.json"))["build/test/c"], 30)

    def test_what_holds_times_against_each_other_runs_last_and_by_itself(self):
        for name in ("build/test/unit_transfers", "build/test/models_bf16", "build/emu/unit_transfers"):
            self.program(name, "[ -e others ] || [ -e alone ] && exit 1; : >alone; sleep 0.1; rm alone; " + PASSES)
        self.program("build/test/a", ": >others; sleep 0.3; rm others; " + PASSES)
        _, lines = self.run_it("build/test/unit_transfers", "build/test/models_bf16:op_fit", "build/emu/unit_transfers", "build/test/a", TEST_JOBS="4")
        self.assertEqual(lines[0].split()[0], "a")
        self.assertRegex(lines[-1], "passed, 0 failed")

    def test_the_slowest_are_listed_where_that_is_worth_it(self):
        worth = "import sys; sys.path.insert(0, 'test'); import run; run.WORTH_A_LIST_SECONDS = 0.2; sys.exit(run.main(sys.argv[1:]))"
        self.program("build/test/sleeps", "sleep 0.3; " + PASSES)
        _, lines = self.run_it("build/test/passes", "build/test/sleeps", script=("-c", worth))
        at = lines.index("slowest:")
        self.assertRegex(lines[at + 1], r"^ +0\.[3-9] s  sleeps$")
        self.assertRegex(lines[at + 2], r"^ +0\.\d s  passes$")
        self.assertNotIn("slowest:", self.run_it("build/test/passes", "build/test/sleeps", AGAIN="1")[1])


class Ends(Tree):
    def setUp(self):
        super().setUp()
        # It has a child in a group of its own, as an mpirun has.
        self.program("build/test/sleeps", "echo $$ >pids\n%s -c 'import os, time; os.setpgid(0, 0); open(\"begun\", \"w\"); time.sleep(60)' & "
                     "echo $! >>pids\necho 'ok 1 - a'\nwait" % sys.executable)

    def pids(self):
        return [int(pid) for pid in self.read("pids").split()]

    def assert_none_is_left(self):
        deadline = time.monotonic() + 10
        while any(map(is_alive, self.pids())) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.assertEqual([pid for pid in self.pids() if is_alive(pid)], [])

    def test_a_test_that_takes_too_long_is_ended(self):
        status, lines = self.run_it("build/test/sleeps", "build/test/passes", TEST_LIMIT="1")
        self.assertEqual((status, lines[-1]), (1, "3 passed, 1 failed"), lines)
        self.assertIn("    ran for longer than 1 s (TEST_LIMIT) and was ended", lines)
        self.assert_none_is_left()

    def test_a_signal_ends_what_runs_and_prints_what_ran(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            if os.path.exists(self.path + "/begun"):
                os.unlink(self.path + "/begun")
            os.makedirs(self.path + "/build/passed", exist_ok=True)
            # so that they run in this order
            self.write("build/passed/seconds.json", '{"build/test/passes": 2, "build/test/sleeps": 1}')
            process = subprocess.Popen([sys.executable, "test/run.py", "build/test/passes", "build/test/sleeps"], text=True, cwd=self.path,
                                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=self.variables({"TEST_JOBS": "1", "AGAIN": "1"}))
            first = process.stdout.readline()
            deadline = time.monotonic() + 20
            while not os.path.exists(self.path + "/begun") and time.monotonic() < deadline:
                time.sleep(0.02)
            process.send_signal(number)
            output, _ = process.communicate(timeout=30)
            self.assertTrue(first.startswith("passes "), first)
            self.assertEqual(output.splitlines(), ["stopped by " + number.name, "1 of 2 tests ran", "2 passed, 1 failed"])
            self.assertEqual(process.returncode, 128 + number)
            self.assert_none_is_left()


if __name__ == "__main__":
    unittest.main()
