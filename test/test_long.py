"""The runner of the long table (test/long.py), on tables of a few shell commands in a repository of its own: whose turn a row has,
what is done again after an interruption, limits, what a machine lacks, failures by name, and the page. And the real table's form."""
import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

from environment import ROOT

sys.path.insert(0, os.path.join(ROOT, "test"))
import long as table

MAKEFILE = """LIST := $(B)/test/op_one $(B)/test/op_two_bf16
$(B)/train_gpt:
	@mkdir -p $(@D) && touch $@
$(B)/test/%:
	@mkdir -p $(@D) && printf '#!/bin/sh\\necho built >>ran; echo "ok 1 - a"\\n' >$@ && chmod +x $@
goal-%:
	@echo $* >>goals
"""


class Case(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.path = holder.name
        for folder in ("test", "docs/internals", "scripts"):
            os.makedirs(os.path.join(self.path, folder))
        for name in ("run.py", "stamps.py", "environment.py"):
            shutil.copy(os.path.join(ROOT, "test", name), os.path.join(self.path, "test"))
        self.write("scripts/setup.sh", "#!/bin/sh\necho setup.sh \"$@\" >>installed\n")
        os.chmod(os.path.join(self.path, "scripts/setup.sh"), 0o755)
        self.write("Makefile", MAKEFILE)
        self.write(".gitignore", "/build/\n/ran\n/goals\n/installed\n__pycache__/\n")
        self.git("init", "-q")

    def write(self, path, text):
        with open(os.path.join(self.path, path), "w", encoding="utf-8") as file:
            file.write(text)

    def read(self, path):
        try:
            with open(os.path.join(self.path, path), encoding="utf-8") as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def git(self, *arguments):
        done = subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", *arguments], cwd=self.path,
                              capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(self, *rows, count=1):
        """A table of (row, needs, with, steps), committed `count` times."""
        if rows:
            self.write("test/long_rows.tsv", "".join("\t".join((*row, "what it is")) + "\n" for row in rows))
        for _ in range(count):
            self.git("add", "-A")
            self.git("commit", "-q", "--allow-empty", "-m", "a commit")

    def start(self, *arguments, **environment):
        return subprocess.Popen([sys.executable, os.path.join(ROOT, "test/long.py"), *arguments], text=True, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "LONG_ROOT": self.path, **environment})

    def call(self, *arguments, expect=0, **environment):
        process = self.start(*arguments, **environment)
        text = process.communicate(timeout=60)[0]
        self.assertEqual(process.returncode, expect, text)
        return text

    def result(self, name):
        return {result["row"]: result for result in json.loads(self.read("test/long_results.json"))}[name]


class Rows(Case):
    def test_lists_of_make_are_built_and_run(self):
        self.commit(("a", "", "", "each /op_/ $(LIST)"), ("b", "", "B=build/of_b", "each !/bf16/ $(LIST) ; goals goal-x goal-y ; make $(B)/train_gpt"))
        self.assertEqual(self.call("a").splitlines()[-1], "3 passed, 0 failed")
        self.assertTrue(os.path.exists(self.path + "/build/long/a/test/op_two_bf16"))
        self.call("b")
        self.assertTrue(os.path.exists(self.path + "/build/of_b/test/op_one"))
        self.assertFalse(os.path.exists(self.path + "/build/of_b/test/op_two_bf16"))
        self.assertEqual(self.read("goals"), "x\ny\n")
        self.assertEqual(self.result("b")["status"], "passed")

    def test_several_tests_are_a_step_and_fail_by_name(self):
        self.commit(("a", "", "", "each $(LIST) $(B)/test/op_three $(B)/test/op_four"))
        self.assertEqual(self.call("a", JOBS="1").splitlines()[-1], "5 passed, 0 failed")
        steps = json.loads(self.read("build/long/a/state.json"))["steps"]
        self.assertEqual(list(steps)[1:], ["test/op_one test/op_two_bf16 test/op_three", "test/op_four"])
        self.write("build/long/a/test/op_two_bf16", "#!/bin/sh\necho 'not ok 1 - a'\nexit 1\n")
        self.call("--again", "a", expect=1, JOBS="1")
        self.assertEqual(self.result("a")["failures"], ["op_two_bf16"])

    def test_an_empty_list_fails(self):
        self.commit(("a", "", "", "each /nothing/ $(LIST)"))
        self.assertIn("a: the list /nothing/ $(LIST) failed", self.call("a", expect=1))

    def test_a_failing_step_fails_by_name(self):
        self.commit(("a", "", "", "echo of the step; false ; echo '7 passed, 2 failed'; exit 1 ; true"))
        text = self.call("a", expect=1)
        self.assertIn("    of the step\nlong: a: echo of the step; false failed: build/long/a/logs/", text)
        self.assertEqual(text.splitlines()[-1], "8 passed, 3 failed")
        self.assertEqual((self.result("a")["status"], len(self.result("a")["failures"])), ("failed", 2))
        self.assertIn("  failed; 8+0; 3 failed; ", self.read("docs/internals/machines.md"))

    def test_a_build_that_fails_ends_the_row(self):
        self.commit(("a", "", "", "make nothing-makes-it ; echo ran >>ran"))
        self.call("a", expect=1)
        self.assertEqual(self.read("ran"), "")

    def test_a_status_without_a_failed_test_is_a_failure(self):
        self.commit(("a", "", "", "echo '3 passed, 0 failed'; exit 1"))
        self.assertEqual(self.call("a", expect=1).splitlines()[-1], "3 passed, 1 failed")

    def test_what_passed_is_not_repeated_on_the_same_commit(self):
        self.commit(("a", "", "", "echo one >>ran ; echo two >>ran; test -e fixed"))
        self.write(".gitignore", self.read(".gitignore") + "/fixed\n")
        self.commit()
        self.call("a", expect=1)
        self.write("fixed", "")
        self.assertEqual(self.call("a").splitlines()[-1], "2 passed, 0 failed")
        self.assertEqual(self.read("ran"), "one\ntwo\ntwo\n")
        self.call("a")
        self.call("--again", "a")
        self.commit()
        self.call("a")
        self.assertEqual(self.read("ran"), "one\ntwo\ntwo\n" + 2 * "one\ntwo\n")

    def test_figures_are_kept(self):
        self.commit(("a", "", "", "echo figure: kills 12"))
        self.call("a")
        self.assertEqual(self.result("a")["figures"], {"kills": "12"})

    def test_a_changed_tree_is_not_recorded(self):
        self.commit(("a", "", "", "true"))
        self.write("new.c", "")
        self.assertIn("not recorded", self.call("a"))
        self.assertEqual(self.read("test/long_results.json"), "")

    def test_variables_reach_make_and_steps(self):
        self.commit(("a", "", "X=1 '@Y=a  b'", "echo \"$X,$Y,$B,$TRAIN_GPT\" >>ran ; goals $(if $(X),goal-with)"))
        self.call("a", MAKEFLAGS="n")  # of a make above: it would only print
        self.assertEqual((self.read("ran"), self.read("goals")), ("1,a  b,build/long/a,build/long/a/train_gpt\n", "with\n"))

    def test_unknown_rows_are_refused(self):
        self.commit(("a", "", "", "true"))
        self.assertIn("no row b", self.call("b", expect=2))


class Limits(Case):
    SLEEP = "echo begun >>ran; sleep 60 & echo $! >build/pid; (setsid sleep 60 & echo $! >>build/pid; wait); wait"

    def test_the_limit_stops_a_step_with_all_that_it_started(self):
        self.commit(("a", "", "", "echo one >>ran ; mkdir -p build; echo figure: kills 7; %s" % self.SLEEP))
        text = self.call("--seconds", "1.5", "a")
        self.assertIn("incomplete: the limit stopped mkdir", text)
        self.assertEqual(text.splitlines()[-1], "1 passed, 0 failed")
        self.assertEqual((self.result("a")["status"], self.result("a")["figures"]), ("incomplete", {"kills": "7"}))
        pids = self.read("build/pid").split()
        self.assertEqual(len(pids), 2)
        for pid in pids:
            state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True, check=False).stdout
            self.assertIn(state[:1], ("", "Z"))
        self.call("--seconds", "0.5", "a")
        self.assertEqual(self.read("ran").count("one"), 1)

    def test_a_signal_leaves_a_row_to_go_on(self):
        self.commit(("a", "", "", "echo one >>ran ; sleep 60"))
        process = self.start("a")
        end = time.monotonic() + 20
        while "one" not in self.read("ran") and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.3)
        process.terminate()
        self.assertIn("incomplete: a signal stopped sleep 60", process.communicate(timeout=30)[0])
        self.assertEqual(process.returncode, 130)

    def test_nothing_of_a_step_lives_on(self):
        self.commit(("a", "", "", "mkdir -p build; sleep 60 & echo $! >build/pid"))
        self.call("a")
        state = subprocess.run(["ps", "-o", "stat=", "-p", self.read("build/pid").strip()], capture_output=True, text=True, check=False).stdout
        self.assertIn(state[:1], ("", "Z"))


class Missing(Case):
    def test_what_a_machine_lacks_is_no_pass(self):
        self.commit(("a", "no-such-command=one+g++-two+three", "", "echo ran >>ran"), ("b", "cpu:no-such-flag", "", "true"), ("c", "/no/such*|nor-this", "", "true"))
        text = self.call()
        self.assertIn("missing: no-such-command, of Debian's one g++-two three\n", text)
        self.assertEqual(self.read("installed"), "setup.sh --packages one g++-two three\n")
        self.assertIn("missing: a CPU with no-such-flag\n", text)
        self.assertIn("missing: /no/such* or nor-this\n", text)
        self.assertEqual(text.splitlines()[-1], "0 passed, 0 failed")
        self.assertEqual((self.read("ran"), self.result("a")["status"], self.result("b")["status"]), ("", "missing", "missing"))

    def test_what_a_registry_does_not_give(self):
        self.commit(("a", "pip:x=no-such-package-of-ours==1", "", "true"))
        self.assertIn("missing: the registry's no-such-package-of-ours==1", self.call("a", PIP_NO_INDEX="1"))

    def test_a_step_may_lack_something(self):
        self.commit(("a", "", "", "echo 'missing: a locale'; exit 77 ; true"), ("b", "", "", "make $(B)/train_gpt ; printf '%-9s missing: %s\\n' x 'a right'"))
        self.call()
        self.assertEqual((self.result("a")["status"], self.result("a")["missing"], self.result("a")["passed"]), ("passed", ["a locale"], 1))
        self.assertEqual((self.result("b")["status"], self.result("b")["missing"]), ("missing", ["a right"]))

    def test_it_does_not_hide_what_another_machine_found(self):
        self.commit(("a", "", "", "false"))
        self.call("a", expect=1)
        self.commit(("a", "no-such-command", "", "false"))
        self.call("a")
        self.assertEqual(self.result("a")["status"], "failed")
        self.commit(("a", "", "", "true"))
        self.call("a")
        self.assertEqual(self.result("a")["status"], "passed")


class Page(Case):
    def test_rows_grow_stale(self):
        self.commit(("a", "", "", "true"), ("b", "", "", "true"))
        self.call("a")
        self.assertRegex(self.read("docs/internals/machines.md"), r"\na +1\+0; [0-9a-f]{12} +what it is\n")
        self.assertRegex(self.read("docs/internals/machines.md"), r"\nb +not run +what it is\n")
        result = self.result("a")
        count = lambda more: self.git("commit-tree", "HEAD^{tree}", "-m", "x", *more)
        head = self.git("rev-parse", "HEAD")
        for _ in range(table.STALE_COMMITS):
            head = count(["-p", head])
        self.git("reset", "-q", "--hard", head)
        self.write("test/long_results.json", json.dumps([result]))
        self.call("--write-docs")
        self.assertIn("  1+0; ", self.read("docs/internals/machines.md"))
        self.git("reset", "-q", "--hard", count(["-p", head]))
        self.write("test/long_results.json", json.dumps([result]))
        self.call("--write-docs")
        self.assertIn("  stale; 1+0; ", self.read("docs/internals/machines.md"))

    def test_a_commit_that_is_not_here_is_stale(self):
        self.commit(("a", "", "", "true"))
        self.call("a")
        self.write("test/long_results.json", json.dumps([{**self.result("a"), "commit": "0123456789ab"}]))
        self.call("--write-docs")
        self.assertIn("  stale; 1+0; ", self.read("docs/internals/machines.md"))

    def test_a_row_that_has_changed_is_stale(self):
        """Of the row itself: its variables and its steps, not what is said of it, nor another row."""
        self.commit(("a", "", "", "true"), ("b", "", "", "true"))
        self.call()
        self.commit(("a", "sh", "", "true"), ("b", "", "", "true ; true"), ("c", "", "", "true"))
        self.call("--write-docs")
        self.assertRegex(self.read("docs/internals/machines.md"), r"\na +1\+0; ")
        self.assertRegex(self.read("docs/internals/machines.md"), r"\nb +stale; 1\+0; ")

    def test_one_line_a_row(self):
        self.commit(("b", "", "", "true"), ("a", "", "", "true"))
        self.call()
        lines = self.read("test/long_results.json").splitlines()
        self.assertEqual((lines[0], lines[-1], [json.loads(line.rstrip(","))["row"] for line in lines[1:-1]]), ("[", "]", ["a", "b"]))


class Turns(Case):
    ROWS = [(name, "", "", "echo %s >>ran" % name) for name in "abc"]

    def ci(self, tests="echo '5 passed, 0 failed'", expect=0):
        return self.call("--ci", expect=expect, LONG_MAKE_TEST="sh -c %s" % shlex.quote(tests))

    def test_each_commit_has_the_next_row(self):
        self.commit(*self.ROWS)
        for name in "bcab":
            text = self.ci()
            self.assertEqual(self.read("ran").split()[-1], name)
            self.assertEqual(text.splitlines()[-1], "6 passed, 0 failed")
            self.commit()
        self.assertEqual(self.read("test/long_results.json"), "")  # nobody commits there

    def test_a_shallow_clone_has_a_row(self):
        self.commit(*self.ROWS, count=3)
        upper = self.path
        self.path = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.path)
        subprocess.run(["git", "clone", "-q", "--depth", "1", "file://" + upper, self.path], check=True)
        self.ci()  # by the commit's name, as all clones of depth 1 have one commit
        self.assertEqual(self.read("ran").strip(), "abc"[int(self.git("rev-parse", "HEAD")[:12], 16) % 3])
        shutil.rmtree(self.path + "/.git")
        self.ci()
        self.assertEqual(len(self.read("ran").split()), 2)

    def test_a_failed_row_fails_the_run(self):
        self.commit(("a", "", "", "false"))
        text = self.ci(expect=1)
        self.assertIn("long: a: false failed", text)
        self.assertEqual(text.splitlines()[-1], "5 passed, 1 failed")

    def test_failed_tests_fail_the_run(self):
        self.commit(*self.ROWS)
        self.assertEqual(self.ci("echo '5 passed, 2 failed'; exit 1", expect=1).splitlines()[-1], "6 passed, 2 failed")
        self.assertEqual(self.ci("echo no compiler; exit 2", expect=1).splitlines()[-1], "0 passed, 1 failed")

    def test_what_is_missing_or_not_complete_does_not(self):
        self.commit(("a", "no-such-command", "", "false"))
        self.assertEqual(self.ci().splitlines()[-1], "5 passed, 0 failed")


class Table(unittest.TestCase):
    """The real one."""
    def test_its_rows(self):
        rows = table.read_rows()
        self.assertEqual(len({row.name for row in rows}), len(rows))
        for row in rows:
            self.assertRegex(row.name, r"^[a-z0-9.+-]+$")
            self.assertTrue(row.what and row.steps)
            for step in row.steps:
                program = re.match(r"(test/\S+\.(?:py|sh))", step)
                if program:
                    self.assertTrue(os.access(os.path.join(ROOT, program.group(1)), os.X_OK), step)

    def test_what_reads_long_tests_is_run_again(self):
        """The Makefile's long_of names each test that reads LONG_TESTS, also by way of a header."""
        def reads(path):
            with open(os.path.join(ROOT, path), encoding="utf-8") as file:
                text = file.read()
            headers = [name for name in re.findall(r'^#include "(test/[^"]*)"', text, re.M) if name not in ("test/testing.h", "test/models.c")]
            return bool(re.search(r"\b(in_long_run|takes_case|long_test|chosen)\(", text)) or any(map(reads, headers))

        paths = [os.path.relpath(path, ROOT) for pattern in ("unit_*.c", "op_*.c", "emu/unit_*.cu", "test_*.py") for path in glob.glob(ROOT + "/test/" + pattern)]
        done = subprocess.run(["make", "-s", "CUDA=", "--eval=words:;@echo $(LONG_READERS)", "words"], cwd=ROOT, capture_output=True, text=True, check=True,
                              env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")})
        listed = set(done.stdout.split())
        self.assertEqual({path for path in paths if reads(path)} - {path for path in paths if os.path.basename(path).rpartition(".")[0] in listed}, set())

    def test_its_page_is_as_its_results(self):
        with open(os.path.join(ROOT, table.PAGE), encoding="utf-8") as file:
            page = file.read()
        for result in table.read_results().values():
            self.assertRegex(page, r"(?m)^%s  .*%s" % (re.escape(result["row"]), result["commit"]))


if __name__ == "__main__":
    unittest.main()
