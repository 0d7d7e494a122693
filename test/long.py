#!/usr/bin/env python3
"""Runs the long table: what takes longer than `make test`, or needs more than every machine has.

  test/long.py [ROW]...       runs these rows, or all, in turn; --seconds N is each row's limit
  test/long.py --again ROW    forgets which steps passed on this commit
  test/long.py --list         names the rows
  test/long.py --write-docs   writes docs/internals/machines.md from test/long_results.json
  test/long.py --ci           `make test`, then the row whose turn it is; the last line is 'N passed, N failed' of both

test/long_rows.tsv is the table, a line a row, whose columns are separated by tabs:
  row    the name; what it builds lies in build/long/ROW unless B= is among its variables
  needs  what is looked for, and installed where it is missing and may be: COMMAND|/GLOB=PACKAGE+PACKAGE, cpu:FLAG+FLAG,
         deb:FOLDER=PACKAGE+PACKAGE unpacked into build/long/packages/FOLDER, pip:NAME=PACKAGE+PACKAGE in a virtual environment,
         arm64 (the libraries that scripts/setup.sh unpacks)
  with   NAME=VALUE ..., variables of make and of the environment, or, as @NAME=VALUE, of the environment alone; ${ROOT} is filled in
  steps  separated by ' ; ', each one of
           make EXPRESSION            goals, as an expression of the Makefile: a build that what follows needs
           each [/REGEX/] EXPRESSION  a list of make: builds its programs, then runs each test that matches (!/REGEX/: does not);
                                      so many as keep the cores busy, TESTS_A_CORE each, are a step
           goals EXPRESSION           a list of make: each goal is a step
           COMMAND                    of the shell, with B and TRAIN_GPT set. Status 77, or 'missing: WHAT' as its last line: this
                                      machine lacks something. 'figure: NAME VALUE' goes into the row's result
  what   a phrase for docs/internals/machines.md

A step that passed is not repeated on the same commit, so that a row that was stopped goes on: build/long/ROW/state.json, logs
beside it. A row's result is a line of test/long_results.json, unless the tree differs from its commit. Exit status 1 if a step
failed; one that the limit stopped did not.
"""
import argparse
import functools
import glob
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import string
import subprocess
import sys
import time

ROOT = os.environ.get("LONG_ROOT") or os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ROWS, RESULTS, PAGE, FOLDER = "test/long_rows.tsv", "test/long_results.json", "docs/internals/machines.md", "build/long"
ROW_SECONDS = 25 * 60
CI_SECONDS, CI_ROW_SECONDS = 35 * 60, 22 * 60
STALE_COMMITS = 200
MISSING_STATUS = 77
TESTS_A_CORE = 3
JOBS = int(os.environ.get("JOBS") or len(os.sched_getaffinity(0)))


class Row:
    def __init__(self, line):
        cells = self.cells = line.rstrip("\n").split("\t")
        if len(cells) != 5:
            sys.exit("long.py: a row of %s has %d columns, not 5: %s" % (ROWS, len(cells), cells[0]))
        self.name, needs, variables, steps, self.what = (cell.strip() for cell in cells)
        self.needs = needs.split()
        self.folder = "%s/%s" % (FOLDER, self.name)
        words = [word.split("=", 1) for word in shlex.split(variables)]
        self.build = dict(words).get("B", self.folder)
        filled = [(name, string.Template(value).safe_substitute(ROOT=ROOT)) for name, value in words if name != "B"]
        self.variables = {name: value for name, value in filled if name[0] != "@"}
        self.environment = {name.lstrip("@"): value for name, value in filled}
        self.steps = [step.strip() for step in steps.split(" ; ")]


def rows_of(text):
    return [Row(line) for line in text.splitlines() if line.strip() and not line.startswith("#")]


def read_rows():
    with open(os.path.join(ROOT, ROWS), encoding="utf-8") as file:
        return rows_of(file.read())


# ---- the tree's commit ----

def git(*arguments):
    """The text that git prints, None where it fails or there is no git."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None


def tree_key():
    """(commit, what the tree is beyond it: empty where nothing that matters was changed). A tree of no repository: ("", "unknown")."""
    commit = git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return "", "unknown"
    own = ["--", ".", ":!" + RESULTS, ":!" + PAGE]
    changes = git("diff", "HEAD", *own) or ""
    for path in (git("ls-files", "--others", "--exclude-standard", *own) or "").splitlines():
        if os.path.isfile(os.path.join(ROOT, path)):
            with open(os.path.join(ROOT, path), "rb") as file:
                changes += path + hashlib.sha256(file.read()).hexdigest()
    return commit, hashlib.sha256(changes.encode()).hexdigest()[:16] if changes else ""


def age_of(commit):
    """The number of commits since this one, None where this history does not have it."""
    count = git("rev-list", "--count", commit + "..HEAD") if commit else None
    return int(count) if count else None


@functools.lru_cache(maxsize=None)
def steps_at(commit):
    """What each row ran as of this commit, {row: (variables, steps)}; empty where this history does not have the commit."""
    return {row.name: row.cells[2:4] for row in rows_of(git("show", "%s:%s" % (commit, ROWS)) or "")}


def row_of_turn(rows):
    """The row for this commit: by its number in the history; by its name where the clone is shallow, so that the number stands still;
    by the day without a repository."""
    head = git("rev-parse", "HEAD")
    if not head:
        turn = int(time.time()) // 86400
    elif git("rev-parse", "--is-shallow-repository") == "true":
        turn = int(head[:12], 16)
    else:
        turn = int(git("rev-list", "--count", "HEAD"))
    return rows[turn % len(rows)]


# ---- what a row needs ----

class Installer:
    """Runs what installs, none of it beyond the row's limit."""
    end = 0.0

    @classmethod
    def run(cls, *command, cwd=ROOT):
        """Whether the command ended well."""
        try:
            return subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False,
                                  timeout=max(1, cls.end - time.monotonic())).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False


def is_here(pattern):
    """Whether there is one of several commands, or paths that may hold wildcards."""
    return any(glob.glob(one) if one.startswith("/") else shutil.which(one) for one in pattern.split("|"))


def provide_file(pattern, packages):
    if not is_here(pattern) and packages:
        Installer.run("scripts/setup.sh", "--packages", *packages)
    return "" if is_here(pattern) else "%s%s" % (pattern.replace("|", " or "), ", of Debian's " + " ".join(packages) if packages else "")


def provide_unpacked(folder, packages):
    path = os.path.join(ROOT, FOLDER, "packages", folder)
    if not os.path.isdir(path + "/usr"):
        os.makedirs(path, exist_ok=True)
        script = "apt-get -qq download $0 \"$@\" || { apt-get -qq update && apt-get -qq download $0 \"$@\"; } && for p in *.deb; do dpkg -x $p .; done"
        Installer.run("sh", "-c", script, *packages, cwd=path)
    return "" if os.path.isdir(path + "/usr") else "Debian's " + " ".join(packages)


def provide_python(name, packages, environment):
    path = os.path.join(ROOT, FOLDER, "venv", name)
    if not os.path.exists(path + "/complete"):
        shutil.rmtree(path, ignore_errors=True)
        if not (Installer.run(sys.executable, "-m", "venv", path) and
                Installer.run(path + "/bin/pip", "install", "-q", "--disable-pip-version-check", *packages)):
            return "the registry's " + " ".join(packages)
        with open(path + "/complete", "w", encoding="utf-8"):
            pass
    environment["PATH"] = path + "/bin:" + environment["PATH"]
    return ""


def provide_arm64():
    folder = FOLDER + "/arm64"
    if not os.path.isdir(os.path.join(ROOT, folder, "usr")):
        Installer.run("scripts/setup.sh", "--into", folder, "--architecture", "arm64")
    return "" if os.path.isdir(os.path.join(ROOT, folder, "usr")) else "the libraries of arm64, which scripts/setup.sh unpacks"


def provide_cpu(flags):
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        here = set(file.read().split())
    lacking = [flag for flag in flags if flag not in here]
    return "a CPU with " + ", ".join(lacking) if lacking else ""


def provide(need, environment):
    """Looks for one need and installs it where that is possible. Returns what is missing, or empty."""
    name, _, packages = need.partition("=")
    packages = re.split(r"(?<!\+)\+(?!\+)", packages) if packages else []  # g++-12 is one package
    if need == "arm64":
        return provide_arm64()
    if name.startswith("cpu:"):
        return provide_cpu(name[4:].split("+"))
    if name.startswith("deb:"):
        return provide_unpacked(name[4:], packages)
    if name.startswith("pip:"):
        return provide_python(name[4:], packages, environment)
    return provide_file(name, packages)


# ---- a row's steps ----

class Step:
    """`needed`: the steps after it can't do without it."""
    def __init__(self, name, command, needed=False):
        self.name, self.command, self.needed = name, command, needed


def make_command(row, *arguments):
    return ["make", "-j%d" % JOBS, "--no-print-directory", "B=" + row.build, "CUDA=", "WERROR=1",
            *("%s=%s" % variable for variable in row.variables.items()), *arguments]


def list_of_make(row, expression, environment):
    """The words of an expression of the Makefile, or None where make fails."""
    command = make_command(row, "-s", "--eval=words-of-a-row:;@printf '%s\\n' $(WORDS_OF_A_ROW)", "WORDS_OF_A_ROW=" + expression, "words-of-a-row")
    done = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.split() if done.returncode == 0 else None


def tests_of(row, rest, environment):
    found = re.match(r"(!?)/(.*?)/ +(.*)$", rest)
    negative, pattern, expression = found.groups() if found else ("", "", rest)
    tests = list_of_make(row, expression, environment) or []
    chosen = [test for test in tests if bool(re.search(pattern, test)) != bool(negative)]
    if not chosen:
        return [Step("the list " + rest, ["sh", "-c", "echo 'the list is empty'; exit 1"], True)]
    programs = sorted({test.split(":")[0] for test in chosen} - {test.split(":")[0] for test in chosen if ".py" in test})
    build = Step("build of %s" % rest, make_command(row, row.build + "/train_gpt", *programs), True)
    size = TESTS_A_CORE * JOBS
    groups = [chosen[i:i + size] for i in range(0, len(chosen), size)]
    return [build, *(Step(" ".join(group).replace(row.build + "/", ""), ["test/run.py", *group]) for group in groups)]


def steps_of(row, environment):
    """All of a row's steps in turn. Lists are asked of make here, so that a program that was added is among them."""
    for text in row.steps:
        kind, _, rest = text.partition(" ")
        if kind == "make":
            yield Step(text, make_command(row, *(list_of_make(row, rest, environment) or ["the list %s is empty" % rest])), True)
        elif kind == "each":
            yield from tests_of(row, rest, environment)
        elif kind == "goals":
            for goal in list_of_make(row, rest, environment) or ["the list %s is empty" % rest]:
                yield Step(goal, make_command(row, goal))
        else:
            yield Step(text, ["sh", "-c", text])


def processes_of(leader):
    """Those of the leader's session and its descendants, which may be in other sessions; none that has ended."""
    parents, found = {}, {leader}
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                state, parent, _, session = file.read().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        pid = int(path.split("/")[2])
        if state not in "ZX":
            parents[pid] = int(parent)
            if int(session) == leader:
                found.add(pid)
    size = 0
    while size != len(found):
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found & set(parents)


def stop(process):
    """Ends a step with all that it started: mpirun's ranks have process groups of their own."""
    everyone = processes_of(process.pid)
    for number, seconds in ((signal.SIGTERM, 5), (signal.SIGKILL, 5)) if everyone else ():
        everyone |= processes_of(process.pid)
        for pid in everyone:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
        end = time.monotonic() + seconds
        while processes_of(process.pid) and time.monotonic() < end:
            process.poll()
            time.sleep(0.05)
    process.wait()


def outcome_of(status, text):
    """A step's counts, figures and what it says is missing."""
    result = {"passed": 0, "failed": 0, "skipped": 0}
    counts = re.findall(r"^(\d+) passed, (\d+) failed$", text, re.M)
    skipped = re.findall(r"^(\d+) skipped$", text, re.M)
    figures = dict(re.findall(r"^figure: (\S+) (.+)$", text, re.M))
    last = (text.strip().splitlines() or [""])[-1]
    missing = re.search(r"\bmissing: (.+)$", last)
    if counts:
        result.update(passed=int(counts[-1][0]), failed=int(counts[-1][1]), skipped=int(skipped[-1]) if skipped else 0)
        result["failed"] += status != 0 and result["failed"] == 0
        result["names"] = re.findall(r"^failed: (\S+)$", text, re.M)  # of a step's tests
    elif status == MISSING_STATUS or (status == 0 and missing):
        result["missing"] = missing.group(1) if missing else "what it did not say"
    else:
        result.update(passed=int(status == 0), failed=int(status != 0))
    if figures:
        result["figures"] = figures
    return result


class Stopped(Exception):
    """The limit, or a signal to this process, and the figures that the step had printed by then."""
    figures = {}


def read_log(log):
    with open(log, encoding="utf-8", errors="replace") as file:
        return file.read()


def run_step(row, step, environment, seconds):
    """Runs one step. Raises Stopped where it lasts longer."""
    log = os.path.join(ROOT, row.folder, "logs", re.sub(r"[^A-Za-z0-9_.=-]+", "_", step.name)[:80] + ".log")
    os.makedirs(os.path.dirname(log), exist_ok=True)
    begin = time.monotonic()
    with open(log, "wb") as file:
        process = subprocess.Popen(step.command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(timeout=max(0, seconds))
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as why:
            stopped = Stopped("the limit" if isinstance(why, subprocess.TimeoutExpired) else "a signal")
            stopped.figures = outcome_of(0, read_log(log)).get("figures", {})
            raise stopped from why
        finally:
            stop(process)  # also what a failed test left behind
    text = read_log(log)
    result = {**outcome_of(status, text), "seconds": round(time.monotonic() - begin, 1)}
    if result["failed"]:
        print("\n".join("    " + line for line in text.splitlines()[-40:]))
        print("long: %s: %s failed: %s" % (row.name, step.name, os.path.relpath(log, ROOT)), flush=True)
    return result


def read_state(row, key):
    """What earlier runs on the same tree found, by the step's name."""
    try:
        with open(os.path.join(ROOT, row.folder, "state.json"), encoding="utf-8") as file:
            state = json.load(file)
        return state["steps"] if state["key"] == key else {}
    except (OSError, ValueError, KeyError):
        return {}


def write_state(row, key, steps):
    path = os.path.join(ROOT, row.folder, "state.json")
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump({"key": key, "steps": steps}, file)
    os.replace(path + ".new", path)


def environment_of(row, key=""):
    """Of a row's commands; ROW_KEY is the tree's, for what counts over several calls. Tests run even where they passed before. What make passes on to makes that it starts would reach ours too."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "LONG_TESTS")}
    own = {"TEST_STAMPS": "0", "B": row.build, "ROW_FOLDER": row.folder, "ROW_KEY": key, "JOBS": str(JOBS), "TRAIN_GPT": row.build + "/train_gpt"}
    return {**environment, **own, **row.environment}


def machine():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        found = re.search(r"^(?:model name|CPU part)\s*: (.*)$", file.read(), re.M)
    return "%s, %d cores" % (found.group(1).strip() if found else os.uname().machine, len(os.sched_getaffinity(0)))


def compiler_of(row, environment):
    command = shlex.split(row.variables.get("CC", "gcc"))
    try:
        lines = subprocess.run([*command, "--version"], env=environment, capture_output=True, text=True, check=False).stdout.splitlines()
    except OSError:
        return ""
    return lines[0] if lines else ""


def run_steps(row, key, environment, seconds):
    """Runs what has not passed yet. Returns the steps' outcomes and why it stopped, if it did."""
    done = {name: result for name, result in read_state(row, key).items() if not result["failed"]}
    end = time.monotonic() + seconds
    results = {}
    for step in steps_of(row, environment):
        if step.name not in done:
            try:
                done[step.name] = run_step(row, step, environment, end - time.monotonic())
            except Stopped as why:
                so_far = {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0, "figures": why.figures}
                return {**done, **results, step.name: so_far}, "%s stopped %s" % (why, step.name)
            write_state(row, key, done)
        results[step.name] = done[step.name]
        if step.needed and results[step.name]["failed"]:
            break
    return results, ""


def run_row(row, seconds):
    """Runs one row and returns its result, as test/long_results.json has it."""
    commit, changes = tree_key()
    environment = environment_of(row, commit + changes)
    os.makedirs(os.path.join(ROOT, row.folder), exist_ok=True)
    result = {"row": row.name, "status": "missing", "commit": commit + ("-dirty" if changes else ""), "date": time.strftime("%Y-%m-%d", time.gmtime()),
              "machine": machine(), "compiler": "", "seconds": 0, "passed": 0, "failed": 0, "skipped": 0}
    end = Installer.end = time.monotonic() + seconds
    lacking = [what for what in (provide(need, environment) for need in row.needs) if what]
    if lacking:
        return {**result, "missing": lacking}
    result["compiler"] = compiler_of(row, environment)
    steps, stopped = run_steps(row, commit + changes, environment, end - time.monotonic())
    for outcome in steps.values():
        for name in ("passed", "failed", "skipped", "seconds"):
            result[name] += outcome[name]
    result["seconds"] = round(result["seconds"])
    missing = sorted({outcome["missing"] for outcome in steps.values() if "missing" in outcome})
    figures = {name: value for outcome in steps.values() for name, value in outcome.get("figures", {}).items()}
    failures = [test for name, outcome in steps.items() if outcome["failed"] for test in outcome.get("names") or [name]]
    result.update({name: value for name, value in (("missing", missing), ("figures", figures), ("failures", failures), ("stopped", stopped)) if value})
    tested = [name for name, outcome in steps.items() if "missing" not in outcome and not name.startswith(("make ", "build of "))]
    result["status"] = "failed" if failures else "incomplete" if stopped else "passed" if tested or not missing else "missing"
    return result


# ---- results and the page ----

def read_results():
    try:
        with open(os.path.join(ROOT, RESULTS), encoding="utf-8") as file:
            return {result["row"]: result for result in json.load(file)}
    except FileNotFoundError:
        return {}


def replaces(new, old):
    """Whether a result is kept in place of an older one: a run that found nothing does not hide one that did, until that is stale."""
    if new["status"] in ("passed", "failed") or not old or old["status"] not in ("passed", "failed"):
        return True
    return is_stale(old)


def is_stale(result):
    """Whether a result says little of its row today: it is of long ago, or the row ran something else then."""
    age = age_of(result["commit"])
    now = {row.name: row.cells[2:4] for row in read_rows()}.get(result["row"])
    return age is None or age > STALE_COMMITS or steps_at(result["commit"]).get(result["row"], now) != now


def record(result):
    results = read_results()
    if replaces(result, results.get(result["row"])):
        results[result["row"]] = result
    lines = ",\n".join(json.dumps(results[name], sort_keys=True) for name in sorted(results))
    with open(os.path.join(ROOT, RESULTS), "w", encoding="utf-8") as file:
        file.write("[\n%s\n]\n" % lines if lines else "[\n]\n")


def result_cell(result):
    """The table's cell of a row that was run: its status where that is not passed, the numbers of tests, what was found, the commit."""
    said = ["stale"] if is_stale(result) else []
    said += [result["status"]] if result["status"] != "passed" else []
    if result["passed"] + result["failed"] > 0:
        said.append("%d+%d" % (result["passed"], result["skipped"]))
    said += ["%d failed" % result["failed"]] if result["failed"] else []
    said += result.get("failures", []) + ["missing: " + what for what in result.get("missing", [])]
    said += ["%s %s" % figure for figure in sorted(result.get("figures", {}).items())]
    return "; ".join([*said, result["commit"]])


def page_of(rows, results):
    """docs/internals/machines.md."""
    lines = ["# Compilers, instruction sets, sanitizers, kills: what is run beyond `make test`", "",
             "`make test-long ROW=name` runs a row of [test/long_rows.tsv](../../test/long_rows.tsv) within %d minutes, and goes on where the row was" % (ROW_SECONDS // 60),
             "stopped. `test/long.py --write-docs` writes this page from the results of real runs,",
             "[test/long_results.json](../../test/long_results.json).", "",
             "A row has its status where that is not `passed`, tests passed+skipped, figures, the commit, and what it runs. `fp32` and `bf16` are",
             "the largest relative differences of a loss in 20 steps from the native build's fp32 losses, `adapters` the largest of LoRA's",
             "adapters from fp64's. `missing` is what the machine lacked, `incomplete` a row that its limit stopped, `stale` a result of more",
             "than %d commits ago, or of a row that has changed since." % STALE_COMMITS, "",
             "The newest gcc of Debian 12 is the one of `make test`.", "", "```text"]
    cells = [(row.name, result_cell(results[row.name]) if row.name in results else "not run", row.what) for row in rows]
    widths = [max((len(cell[i]) for cell in cells), default=0) for i in range(2)]
    lines += ["%-*s  %-*s  %s" % (widths[0], name, widths[1], result, what) for name, result, what in cells] + ["```"]
    used = [results[row.name] for row in rows if row.name in results]
    for name, title in (("machine", "Machines"), ("compiler", "Compilers")):
        lines += ["", "%s: %s." % (title, "; ".join(sorted({result[name] for result in used if result[name]})) or "none yet")]
    return "\n".join(lines) + "\n"


def write_docs(rows):
    with open(os.path.join(ROOT, PAGE), "w", encoding="utf-8") as file:
        file.write(page_of(rows, read_results()))


def say(result):
    """The row's lines for people."""
    for what in result.get("missing", []):
        print("missing: " + what)
    if result["status"] == "incomplete":
        print("incomplete: %s; the same command goes on" % result["stopped"])
    for name, value in sorted(result.get("figures", {}).items()):
        print("figure: %s %s" % (name, value))
    print("long: %s: %s in %d s, %d skipped" % (result["row"], result["status"], result["seconds"], result["skipped"]))
    print("%d passed, %d failed" % (result["passed"], result["failed"]), flush=True)


# ---- ways to call it ----

def run_make_test():
    """`make test`, its output passed on. Returns (passed, failed), or None where it came to no count."""
    command = shlex.split(os.environ.get("LONG_MAKE_TEST", "make test"))
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    counts = None
    for line in process.stdout:
        sys.stdout.write(line)
        sys.stdout.flush()
        found = re.match(r"(\d+) passed, (\d+) failed$", line)
        counts = (int(found.group(1)), int(found.group(2))) if found else counts
    if process.wait() != 0 and counts and counts[1] == 0:
        counts = (counts[0], 1)
    return counts


def ci(rows):
    begin = time.monotonic()
    counts = run_make_test()
    if not counts:
        print("long: make test came to no count, so that no row is run\n0 passed, 1 failed")
        return 1
    passed, failed = counts
    row = row_of_turn(rows)
    seconds = min(CI_ROW_SECONDS, CI_SECONDS - 60 - (time.monotonic() - begin))
    print("long: the row of this commit is %s, for %d s" % (row.name, seconds), flush=True)
    if seconds < 60:
        print("incomplete: make test left no time")
    else:
        result = run_row(row, seconds)
        say(result)
        print(json.dumps(result, sort_keys=True))
        passed, failed = passed + result["passed"], failed + result["failed"]
    print("%d passed, %d failed" % (passed, failed), flush=True)
    return 1 if failed else 0


def interrupted(number, frame):
    raise KeyboardInterrupt


def main():
    signal.signal(signal.SIGTERM, interrupted)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW")
    for flag in ("--list", "--write-docs", "--ci", "--again"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--seconds", type=float, default=ROW_SECONDS)
    options = parser.parse_args()
    rows = read_rows()
    named = {row.name: row for row in rows}
    unknown = [name for name in options.rows if name not in named]
    if unknown:
        parser.error("no row %s; --list names them" % ", ".join(unknown))
    if options.list:
        print("\n".join(named))
        return 0
    if options.write_docs:
        return write_docs(rows)
    if options.ci:
        return ci(rows)
    passed = failed = 0
    for row in [named[name] for name in options.rows or named]:
        if options.again:
            if os.path.exists(os.path.join(ROOT, row.folder, "state.json")):
                os.remove(os.path.join(ROOT, row.folder, "state.json"))
        print("== %s: %s" % (row.name, row.what), flush=True)
        result = run_row(row, options.seconds)
        say(result)
        passed, failed = passed + result["passed"], failed + result["failed"]
        if result["commit"].endswith("-dirty") or not result["commit"]:
            print("long: not recorded, since the tree is not as its commit has it")
        else:
            record(result)
            write_docs(rows)
        if result.get("stopped", "").startswith("a signal"):
            return 130
    if len(options.rows) != 1:
        print("%d passed, %d failed" % (passed, failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
