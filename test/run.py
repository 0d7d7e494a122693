#!/usr/bin/env python3
"""Runs tests at the same time, the longest first, and counts: test/run.py PROGRAM[:TEST]|FILE.py[:CLASS] ...

The last line is 'N passed, N failed'. The exit status is not 0 if a test failed or that line can't be written. A test
that passed is not run again until something changes that its result depends on (test/stamps.py).

A program is a cmocka test. A program that crashes, ends before its last test or runs no test counts as one more failure
than it reported. Tests that compare times (TIMED) come last, one at a time. All run in one environment,
test/environment.py's, whatever started this script. Variables:
  AGAIN=1         also runs tests that passed
  TEST_STAMPS=0   the same, and tests that pass now are run again next time
  TEST_JOBS=N     the number of tests at a time; if unset, one more than there are cores, since some tests wait, at most
  9
  TEST_LIMIT=S    seconds after which a test is ended and counts as failed; if unset, 1200
  TEST_RUNNER=... runs a program for another CPU, such as "qemu-aarch64 -L /usr/aarch64-linux-gnu"
  TRAIN_GPT=...   the program that tests in Python start; if unset, build/train_gpt
"""
import concurrent.futures
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import environment  # its import prepares this process, and so its children
import stamps

SHOWN_LINES = 100  # of a failure that is repeated at the end
SLOWEST = 10
WORTH_A_LIST_SECONDS = 10
TIMED = re.compile("(.*:)?(unit_transfers|op_fit)(_|$)")
GRACE_SECONDS = 5  # between SIGTERM and SIGKILL
# Variables that choose the program or the machine of a test. The command that runs the test by itself names them.
CHOSEN = re.compile("(EMU_.*|CUDA_(VISIBLE_DEVICES|LAUNCH_BLOCKING)|[A-Z]+SAN_OPTIONS|TEST_MEMORY|CHECKPOINT_KILLS|LONG_TESTS)$")


class Stopped(Exception):
    """A signal has stopped this run."""


# ---- One test ----

class Test:
    def __init__(self, argument):
        self.argument = argument
        self.path, _, self.part = argument.rpartition(":") if ":" in argument else (argument, "", "")
        self.is_python = self.path.endswith(".py")
        self.program = os.environ.get("TRAIN_GPT") or "build/train_gpt"

    def name(self):
        """Returns the test's name: for the tests of one op, op_NAME on the CPU and emu_NAME on the emulator."""
        file = os.path.basename(self.path)
        if self.part and not self.is_python:
            file = self.part + "_" + file.rpartition("_")[2]
        elif self.part:
            file += ":" + self.part
        if not self.is_python and "/emu/" in self.argument:
            file = "emu_" + (file[3:] if file.startswith("op_") else file)
        return file

    def command(self):
        if self.is_python:
            return [sys.executable, self.path, "-v", *([self.part] if self.part else [])]
        return [*os.environ.get("TEST_RUNNER", "").split(), self.path, *([self.part] if self.part else [])]

    def variables(self):
        if self.is_python:
            # A program that ends by a user's mistake leaves its memory to the system: the sanitizer must not report a
            # leak there, which would change status 2.
            return {"ASAN_OPTIONS": "detect_leaks=0", "TRAIN_GPT": self.program}
        return {"CMOCKA_MESSAGE_OUTPUT": "TAP"}

    def command_alone(self, case):
        """Returns the command for a shell in the folder in which this script was started. case: "" for the whole
        test."""
        named = {name: value for name, value in sorted(os.environ.items()) if CHOSEN.match(name)}
        if self.is_python:
            named.update({name: value for name, value in sorted(os.environ.items()) if name.startswith("TRAIN_GPT")}, TRAIN_GPT=self.program)
            if "sanitize" in self.program:
                named["ASAN_OPTIONS"] = "detect_leaks=0"
            words = ["python3", self.path, "-v", case or self.part]
        else:
            if case:
                named["TEST_FILTER"] = case
            words = self.command()
        return " ".join(["%s=%s" % (name, shlex.quote(value)) for name, value in named.items()] + [shlex.quote(word) for word in words if word])

    def rank(self, seconds):
        """Returns a key that sorts the longest test first. Before these come the tests whose time is not known, in the
        order of how long they may take."""
        if self.argument in seconds:
            return 1, -seconds[self.argument]
        return 0, 0 if self.is_python else 1 if "/emu/" in self.argument else 2


class Result:
    """The result of a test that ran: its counts and, if it failed, its output and its failures, each (case, lines)."""
    def __init__(self, test, log, status, problem, seconds):
        self.test, self.log, self.seconds = test, log, seconds
        lines = log.splitlines()
        if test.is_python:
            self.passed = len(re.findall(r"\.\.\. ok$", log, re.MULTILINE))
            self.failed = len(re.findall(r"\.\.\. (?:FAIL|ERROR)$", log, re.MULTILINE))
            self.skipped = len(re.findall(r"\.\.\. skipped", log))
            self.failures = python_failures(lines)
        else:
            reports = re.findall(r"^(not )?ok \d*(.*)", log, re.MULTILINE)
            self.skipped = sum("# SKIP" in rest for _, rest in reports)
            self.failed = sum(bool(bad) and "# SKIP" not in rest for bad, rest in reports)
            self.passed = len(reports) - self.skipped - self.failed
            self.failures = program_failures(lines)
            promised = sum(map(int, re.findall(r"^1\.\.(\d+)$", log, re.MULTILINE)))
            if not problem and 0 < len(reports) < promised and "TEST_FILTER" not in os.environ:
                problem = "ended after %d of its %d tests" % (len(reports), promised)
        if status is not None and status < 0 and not problem:
            problem = "killed by " + signal_name(-status)
        if not problem and self.failed == 0 and status != 0:
            problem = "exit status %s" % status
        if not problem and self.passed + self.failed + self.skipped == 0:
            problem = "ran no test"
        if problem:
            self.failed += 1
            self.failures.append(("", [*lines[-30:], problem]))
        self.problem = problem

    def line(self):
        return "%-32s %4d passed %3d failed  %4d s" % (self.test.name(), self.passed, self.failed, self.seconds)

    def details(self):
        return "".join("    %s\n" % line for line in [*self.log.splitlines(), *([self.problem] if self.problem else [])])

    def repeated(self):
        """Returns the cases that failed, each with the command that runs it; long ones without their middle."""
        text = "failed: %s\n" % self.test.name()
        most = max(10, SHOWN_LINES // len(self.failures)) if self.failures else 0
        for case, lines in self.failures:
            if len(lines) > most:
                lines = [*lines[:most // 2], "[%d lines]" % (len(lines) - most), *lines[len(lines) - most + most // 2:]]
            text += "".join("    %s\n" % line for line in lines)
            text += "    alone: %s\n" % self.test.command_alone(case)
        if not self.failures:  # failures in no known form
            text += "    alone: %s\n" % self.test.command_alone("")
        return text


def signal_name(number):
    try:
        return signal.Signals(number).name
    except ValueError:
        return "signal %d" % number


def program_failures(lines):
    """Returns the failures in a program's output. A case's messages stand before its 'not ok', cmocka's own ones after
    it as comments."""
    failures, before = [], []
    i = 0
    while i < len(lines):
        match = re.match(r"(not )?ok \d+(?: - )?(.*)", lines[i])
        i += 1
        if not match:
            before.append(lines[i - 1])
            continue
        after = []
        bad = match.group(1) and "# SKIP" not in match.group(2)
        while bad and i < len(lines) and lines[i].startswith("#"):
            if not lines[i].startswith("# not ok - "):  # it is of the group
                after.append(lines[i])
            i += 1
        if bad:
            said = [line for line in before if not re.match(r"1\.\.\d+$", line)]
            failures.append((match.group(2), ["not ok - " + match.group(2), *said, *after]))
        before = []
    return failures


def python_failures(lines):
    """Returns the failures in unittest's output. Each is a section: a ruler of =, 'FAIL: test_x
    (__main__.Class.test_x)', a ruler of -, the traceback."""
    failures = []
    begins = [i for i, line in enumerate(lines) if re.match("={70}$", line)]
    for begin, end in zip(begins, [*begins[1:], len(lines)]):
        section = lines[begin + 1:end]
        header = re.match(r"(?:FAIL|ERROR): (\w+) \(([^)]*)\)", section[0]) if section else None
        if not header:
            continue
        last = [i for i, line in enumerate(section) if re.match("Ran [0-9]+ tests? in ", line)]
        if last:
            section = section[:last[0] - 1]  # and without the ruler above it
        names = header.group(2).split(".")[1:]  # without the module; before Python 3.11 without the method, too
        if header.group(1).startswith("test") and names and names[-1] != header.group(1):
            names.append(header.group(1))
        elif not header.group(1).startswith("test"):
            names = [name for name in names if name != header.group(1)]  # setUpClass and the like
        failures.append((".".join(names), [line for line in section if line and not re.match("-{70}$", line)]))
    return failures


# ---- Running ----

def processes_of_session(leader):
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/%s/stat" % name, encoding="utf-8", errors="replace") as file:
                    if int(file.read().rpartition(")")[2].split()[3]) == leader:
                        yield int(name)
            except (OSError, ValueError, IndexError):
                pass


def end(process):
    """Ends a process with all that it started: the ranks of an mpirun have groups of their own, but are in its
    session."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(GRACE_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        pass
    for pid in processes_of_session(process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass


class Runner:
    def __init__(self, limit_seconds):
        self.limit_seconds = limit_seconds
        self.lock, self.processes, self.is_stopping = threading.Lock(), set(), False

    def start(self, test, scratch, log):
        with self.lock:
            if self.is_stopping:
                return None
            process = subprocess.Popen(test.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                                       # In a common folder the first mpirun to end may remove a folder that another one
                                       # has just found there.
                                       env={**os.environ, **test.variables(), "OMPI_MCA_orte_tmpdir_base": scratch,
                                            "PRTE_MCA_prte_tmpdir_base": scratch})
            self.processes.add(process)
            return process

    def stop(self):
        with self.lock:
            self.is_stopping = True
            enders = [threading.Thread(target=end, args=[process]) for process in self.processes]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()

    def run(self, test):
        """Runs a test. Returns its Result, or None if this run is stopped before the test ends. Raises OSError if it
        can't be started."""
        scratch = tempfile.mkdtemp()
        try:
            with open(scratch + "/log", "w+b") as log:
                return self.run_in(test, scratch, log)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def run_in(self, test, scratch, log):
        begin, status, problem = time.monotonic(), None, None
        try:
            process = self.start(test, scratch, log)
        except OSError as error:  # there is no such program
            return Result(test, "", None, "%s: %s" % (test.path, error.strerror), 0)
        if process is None:
            return None
        try:
            status = process.wait(self.limit_seconds)
        except subprocess.TimeoutExpired:
            problem = "ran for longer than %d s (TEST_LIMIT) and was ended" % self.limit_seconds
            end(process)
            process.wait()
        with self.lock:
            self.processes.discard(process)
            if self.is_stopping:
                return None
        log.seek(0)
        return Result(test, log.read().decode(errors="replace"), status, problem, time.monotonic() - begin)


# ---- The whole run ----

def say(text):
    """Writes text to stdout. Raises OSError where nobody can read it."""
    rest = text.encode(errors="replace")
    while rest:
        rest = rest[os.write(1, rest):]


def run_tests(tests, keys, kept, jobs, runner):
    """Runs the tests and reports them. Returns the results, and the number of the signal that stopped the run, or 0."""
    results, stopped = [], 0
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(runner.run, test): test for test in sorted(tests, key=lambda test: test.rank(kept.seconds))}
        try:
            for future in concurrent.futures.as_completed(futures):
                test = futures[future]
                try:
                    result = future.result()
                except OSError as error:
                    say("%-32s did not run: %s\n" % (test.name(), error))
                    continue
                if result is None:
                    continue
                results.append(result)
                kept.seconds[test.argument] = round(result.seconds, 3)
                if result.failed:
                    kept.failed(test)
                else:
                    kept.passed(test, keys[test], result.passed, result.skipped, result.seconds)
                say(result.line() + "\n" + (result.details() if result.failed else ""))
        except (KeyboardInterrupt, Stopped) as reason:
            stopped = reason.args[0] if reason.args else signal.SIGINT
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the running tests are already being ended
                signal.signal(number, signal.SIG_IGN)
        finally:
            for future in futures:
                future.cancel()
            if stopped or sys.exc_info()[0]:
                runner.stop()
    return results, stopped


def stop_by(number, _):
    raise Stopped(number)


def count_variable(name, default):
    text = os.environ.get(name) or str(default)
    if not re.match("[1-9][0-9]*$", text):
        sys.exit("run.py: %s=%s: expected a number above 0" % (name, text))
    return int(text)


def build_folder(tests):
    """Returns the folder above build/test or build/emu, where the programs lie; without such a program, the folder of
    train_gpt."""
    folders = [os.path.dirname(test.path) for test in tests if not test.is_python]
    above = [os.path.dirname(folder) for folder in folders if os.path.basename(folder) in ("test", "emu")]
    return (above or [os.path.dirname(tests[0].program)])[0] or "."


def main(arguments):
    if not arguments:
        sys.exit(__doc__)
    jobs = count_variable("TEST_JOBS", min(9, len(os.sched_getaffinity(0)) + 1))
    runner = Runner(count_variable("TEST_LIMIT", 1200))
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop_by)
    tests = [Test(argument) for argument in arguments]
    kept = stamps.Stamps(build_folder(tests))
    keys = {test: kept.key(test) for test in tests}
    again = os.environ.get("AGAIN", "") not in ("", "0")
    found = {test: None if again else kept.find(test, keys[test]) for test in tests}
    unchanged = [found[test] for test in tests if found[test]]
    results, stopped = [], 0
    for timed in (False, True):
        if not stopped:
            these = [test for test in tests if not found[test] and bool(TIMED.match(os.path.basename(test.argument))) == timed]
            ran, stopped = run_tests(these, keys, kept, 1 if timed else jobs, runner)
            results += ran
    kept.save()

    passed, skipped = (sum(stamp[count] for stamp in unchanged) for count in ("passed", "skipped"))
    passed += sum(result.passed for result in results)
    skipped += sum(result.skipped for result in results)
    failed = sum(result.failed for result in results)
    text = ""
    if sum(result.seconds for result in results) >= WORTH_A_LIST_SECONDS:
        text += "slowest:\n"
        for result in sorted(results, key=lambda result: -result.seconds)[:SLOWEST]:
            text += "%8.1f s  %s\n" % (result.seconds, result.test.name())
    text += "".join(result.repeated() for result in results if result.failed)
    if stopped:
        text += "stopped by %s\n" % signal_name(stopped)
    ran = len(results) + len(unchanged)
    if ran != len(tests):
        text += "%d of %d tests ran\n" % (ran, len(tests))
        failed += len(tests) - ran
    if unchanged:
        text += "%d tests unchanged since they passed (AGAIN=1 runs them)\n" % len(unchanged)
    if skipped:
        text += "%d skipped\n" % skipped
    say(text + "%d passed, %d failed\n" % (passed, failed))
    return 128 + stopped if stopped else int(failed > 0)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (KeyboardInterrupt, Stopped):  # before a test began
        sys.exit(128 + signal.SIGINT)
    except OSError as problem:  # the output can't be written
        try:
            print("run.py: %s" % problem, file=sys.stderr)
        except OSError:
            pass
        sys.exit(1)
