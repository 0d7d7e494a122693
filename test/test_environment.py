"""Tests get what they rely on, whatever starts them: through test/environment.py or, where a cmocka program is started
on its own, test/testing.h. test/environments.sh runs the tests themselves in such environments."""
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import unittest

import environment

PROGRAM = os.path.abspath(os.environ.get("TRAIN_GPT", os.path.join(environment.ROOT, "build/train_gpt")))
UNIT_SIGNALS = os.path.join(os.path.dirname(PROGRAM), "test", "unit_signals")
IGNORED = {signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD, signal.SIGHUP}
FOREIGN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "RANK": "1",
           "WORLD_SIZE": "2", "LOCAL_RANK": "1", "OMP_NUM_THREADS": "8", "NVTE_FLASH_ATTN": "0", "LC_ALL": "tr_TR.UTF-8",
           "LANG": "tr_TR.UTF-8", "LC_NUMERIC": "de_DE.UTF-8", "HOME": "/nonexistent", "TMPDIR": "/nonexistent"}
# Prints what a program finds when it starts.
PROBE = '''
import json, os, resource, stat, tempfile
def is_open(number):
    try:
        return os.fstat(number) is not None
    except OSError:
        return False
state = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("Sig"))
umask = os.umask(0)
json.dump({"ignored": int(state["SigIgn"], 16), "blocked": int(state["SigBlk"], 16), "umask": umask, "open": [is_open(i) for i in range(3)],
           "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0], "variables": dict(os.environ),
           "temporary": tempfile.gettempdir()}, open(FOUND, "w"))
'''


def worsen():
    """Sets in a child, before the program starts, all that a script's background, a careful user or a cluster may have
    set."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1})
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    os.close(0)


class Environment(unittest.TestCase):
    def probe(self, *command):
        """Returns what a program finds that this command starts; without a command, a program that is started here."""
        with tempfile.TemporaryDirectory() as folder:
            program = folder + "/probe"
            with open(program, "w", encoding="utf-8") as file:
                file.write("#!%s\nFOUND = '%s/found'\n%s\nprint('ok 1 - probe')\n" % (sys.executable, folder, PROBE))
            os.chmod(program, 0o755)
            subprocess.run([*command, program], preexec_fn=worsen, timeout=60, check=True, stdout=subprocess.DEVNULL,
                           env={**os.environ, **FOREIGN, "TEST_STAMPS": "0"}, cwd=environment.ROOT)
            with open(folder + "/found", encoding="utf-8") as file:
                return json.load(file)

    def test_a_program_finds_what_tests_rely_on(self):
        worse, found = self.probe(), self.probe(sys.executable, "test/run.py")
        python_ignores = {signal.SIGPIPE, signal.SIGXFSZ}  # in the probe itself
        for number in IGNORED | python_ignores:
            bit = 1 << (number - 1)
            self.assertTrue(worse["ignored"] & bit, number)
            self.assertEqual(bool(found["ignored"] & bit), number in {signal.SIGHUP} | python_ignores, number)
        self.assertNotEqual(worse["blocked"], 0)
        self.assertEqual(found["blocked"], 0)
        self.assertEqual((worse["umask"], found["umask"]), (0o077, 0o022))
        self.assertEqual((worse["open"], found["open"]), ([False, True, True], [True] * 3))
        self.assertEqual(worse["files"], 64)
        self.assertGreaterEqual(found["files"], 256)
        self.assertEqual([name for name in FOREIGN if name in found["variables"]], ["LC_ALL", "HOME", "TMPDIR"])
        self.assertEqual(found["variables"]["LC_ALL"], "C")
        self.assertTrue(os.path.isdir(found["variables"]["HOME"]))
        self.assertEqual(found["temporary"], os.path.join(environment.ROOT, "build", "tmp"))

    def test_the_long_run_is_asked_for(self):
        """LONG_TESTS reaches the tests, and skips the right ones in the short run."""
        code = "import environment as e; e.prepare(); e.long_test('why')(lambda: print('long'))(); print(e.in_long_run(), e.chosen(2, 1))"
        for asked, expected in (("1", "long\nTrue 2\n"), ("", None)):
            result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
                                    check=False, cwd=environment.ROOT,
                                    env={**os.environ, "LONG_TESTS": asked, "PYTHONPATH": os.path.dirname(environment.__file__)})
            self.assertEqual(result.stdout, expected or "", result.stderr)
            self.assertTrue(expected or "SkipTest: in the long run alone: why" in result.stderr, result.stderr)


class Alone(unittest.TestCase):
    @unittest.skipUnless(os.path.exists(UNIT_SIGNALS), "no build/test/unit_signals")
    def test_a_program(self):
        """Its tests send themselves the signals that were ignored."""
        result = subprocess.run([UNIT_SIGNALS], capture_output=True, text=True, timeout=120, preexec_fn=worsen, check=False,
                                env={**os.environ, **FOREIGN, "TMPDIR": tempfile.gettempdir()})
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_a_test_in_python(self):
        """A test in Python interrupts a child, which dies of it."""
        script = "import environment, subprocess; print(subprocess.run(['sh', '-c', 'kill -INT $$; sleep 1']).returncode)"
        result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, preexec_fn=worsen,
                                check=False, env={**os.environ, **FOREIGN, "PYTHONPATH": os.path.dirname(environment.__file__)})
        self.assertEqual(result.stdout, "%d\n" % -signal.SIGINT, result.stderr)


class Setup(unittest.TestCase):
    def test_a_user_who_cannot_install(self):
        """The user is told what is missing, and the command that installs it. Nothing is asked for or changed."""
        with tempfile.TemporaryDirectory() as folder:
            for name, text in (("id", "echo 1000"), ("sudo", "exit 1"), ("apt-get", "echo called >&2; exit 1")):
                with open(folder + "/" + name, "w", encoding="utf-8") as file:
                    file.write("#!/bin/sh\n" + text + "\n")
                os.chmod(folder + "/" + name, 0o755)
            result = subprocess.run([environment.ROOT + "/scripts/setup.sh", "test"], capture_output=True, text=True, timeout=60, check=False,
                                    env={**os.environ, "PATH": folder + ":" + os.environ["PATH"], "CXX": "no-such-compiler"})
        self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
        self.assertRegex(result.stderr.splitlines()[-1], r"'test' needs more than is here; run: sudo apt-get update && sudo apt-get install -y .*g\+\+")
        self.assertNotIn("called", result.stderr)


if __name__ == "__main__":
    unittest.main()
