"""Tells which tests need not run again, since nothing that their result depends on has changed since they passed.

A test that passed leaves a stamp in the build folder's passed/: its key, counts and seconds. The key is a hash of
everything found that a result depends on. For a C test this is its bytes, its shared libraries, the data in DATA and
the machine. For a test in Python, which may read, build or start anything in the tree, it is all source files and the
programs that it is given. No key has the network, free memory and disk, other processes, or files outside the tree, of
which it has only the names of what is installed. AGAIN=1 is for these.
"""
import functools
import glob
import hashlib
import json
import os
import re
import subprocess
import sys

import environment

FORMAT = 1
# What the C tests read in the tree when they run; test/test_run.py checks their sources against it.
DATA = ["test/golden", "test/fuzz/corpus"]
OURS = ["run.py", "stamps.py", "environment.py"]  # what runs and counts tests
# Variables on which no result depends: make's, this run's, and those that a terminal's session sets.
INCIDENTAL = re.compile("(PWD|OLDPWD|SHLVL|_|MAKE.*|MFLAGS|GNUMAKEFLAGS|AGAIN|TEST_(STAMPS|JOBS|LIMIT)|(SSH|XDG|DBUS|WAYLAND|TERM|VTE|GPG|WINDOW)_.*"
                        "|DISPLAY|WINDOWID|COLUMNS|LINES|LS_COLORS|COLORTERM|INVOCATION_ID|JOURNAL_STREAM|MAIL|EDITOR|PAGER)$")
# Each of these changes when a package with a library is installed or a driver is replaced.
SYSTEM = ["/etc/ld.so.cache", "/var/lib/dpkg/status", "/proc/driver/nvidia/version"]
# for a tree without git, which would say what it ignores
NOT_SOURCE = {".git", "build", "data", "out", ".deps", "__pycache__"}


def digest(value):
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def write_json(path, value):
    """Writes a file whole or not at all, whoever else writes it. In a folder that can't be written, tests only take
    longer."""
    temporary = "%s.%d" % (path, os.getpid())
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(value, file)
        os.replace(temporary, path)
    except OSError:
        pass


def read_json(path):
    """Returns the object in the file; {} if there is no file, or a damaged one."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
        return value if isinstance(value, dict) else {}
    except (OSError, ValueError):
        return {}


def contents(path):
    try:
        with open(path, "rb") as file:
            return hashlib.blake2b(file.read(), digest_size=16).hexdigest()
    except OSError:
        return None


def names_in(folder):
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return None


@functools.lru_cache(maxsize=None)
def machine():
    """Returns what every result depends on beside files of the tree: CPU, kernel, user, installed libraries and
    programs."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            first = file.read().split("\n\n")[0]
    except OSError:
        first = ""
    cpu = re.findall(r"^(?:model name|flags|Features|CPU part)\s*:.*", first, re.MULTILINE)
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return digest([cpu, os.cpu_count(), len(os.sched_getaffinity(0)), list(os.uname())[2:], os.getuid(), os.getcwd(), [contents(path) for path in SYSTEM],
                   [names_in(folder) for folder in folders]])


@functools.lru_cache(maxsize=None)
def python():
    """Returns this Python, and the names and versions of the packages that it finds."""
    here = os.path.dirname(os.path.abspath(__file__))
    folders = [folder for folder in sys.path if os.path.abspath(folder) != here]
    return digest([sys.version, sys.executable, [names_in(folder) for folder in folders], names_in(environment.ROOT + "/.deps")])


class Stamps:
    """The stamps of one build folder. Without the folder nothing is known and nothing is kept."""
    def __init__(self, build):
        self.build, self.folder = build, os.path.join(build, "passed")
        self.kept = os.path.isdir(build) and os.environ.get("TEST_STAMPS") != "0"
        if self.kept:
            try:
                os.makedirs(self.folder, exist_ok=True)
            except OSError:
                self.kept = False
        self.hashes = read_json(self.path("hashes.json"))
        self.seconds = read_json(self.path("seconds.json"))

    def path(self, name):
        return os.path.join(self.folder, name)

    def save(self):
        if self.kept:
            write_json(self.path("hashes.json"), {path: entry for path, entry in self.hashes.items() if os.path.exists(path)})
            write_json(self.path("seconds.json"), self.seconds)

    def hash_of(self, path):
        """Returns a hash of the file's bytes and of whether it can be executed, or of where a link leads; None if there
        is no file. It is read only if size, times or inode differ from the last reading's."""
        path = os.path.abspath(path)
        try:
            state = os.lstat(path)
        except OSError:
            return None
        if os.path.islink(path):
            return ["link", os.readlink(path), os.path.isfile(path) and self.hash_of(os.path.realpath(path))]
        known = [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino, state.st_mode]
        entry = self.hashes.get(path)
        if not entry or entry[:-1] != known:
            entry = self.hashes[path] = [*known, contents(path)]
        return [bool(state.st_mode & 0o111), entry[-1]]

    def hashes_of(self, paths):
        return {path: self.hash_of(path) for path in sorted(paths)}

    def key(self, test):
        """Returns the test's key; None if it can't be computed: such a test always runs."""
        if not self.kept:
            return None
        try:
            return digest([FORMAT, test.argument, *(self.python_inputs(test) if test.is_python else self.program_inputs(test))])
        except (OSError, ValueError, subprocess.SubprocessError):
            return None

    def program_inputs(self, test):
        folder = os.path.dirname(test.path)
        data = [os.path.join(base, name) for root in DATA for base, _, names in os.walk(os.path.join(environment.ROOT, root)) for name in names]
        ours = [os.path.join(environment.ROOT, "test", name) for name in OURS]
        return variables("TRAIN_GPT"), machine(), self.hashes_of([test.path, *glob.glob(glob.escape(folder) + "/*.so*"), *data, *ours])

    def python_inputs(self, test):
        given = [value for name, value in os.environ.items() if name.startswith("TRAIN_GPT")] + [test.program]
        libraries = [path for program in given for path in glob.glob(glob.escape(os.path.dirname(program)) + "/*.so*")]
        units = [path for path in glob.glob(glob.escape(self.build) + "/test/unit_*") if not path.endswith(".d")]
        commit, sources = tree()
        return variables(), machine(), python(), commit, self.hashes_of([test.path, *given, *libraries, *units, *sources])

    def find(self, test, key):
        """Returns the stamp of a test that passed with this key, or None."""
        stamp = read_json(self.path(stamp_name(test)))
        if key is None or stamp.get("test") != test.argument or stamp.get("key") != key:
            return None
        return stamp

    def passed(self, test, key, passed, skipped, seconds):
        """Leaves a stamp, unless what the result depends on changed while the test ran."""
        if key is not None and key == self.key(test):
            write_json(self.path(stamp_name(test)), {"test": test.argument, "key": key, "passed": passed, "skipped": skipped,
                                                     "seconds": round(seconds, 3)})

    def failed(self, test):
        try:
            os.unlink(self.path(stamp_name(test)))
        except OSError:
            pass


def stamp_name(test):
    return re.sub("[^A-Za-z0-9_.]", "-", test.argument)[-80:] + "-" + digest(test.argument)[:8] + ".json"


def variables(without=None):
    return {name: value for name, value in os.environ.items() if not INCIDENTAL.match(name) and not (without and name.startswith(without))}


def tree():
    """Returns the commit, or None, and the paths of all source files: what git has or does not ignore."""
    root = environment.ROOT
    if os.path.exists(root + "/.git"):  # else a repository above this tree would answer
        git = ["git", "-C", root]
        listed = subprocess.run([*git, "ls-files", "-coz", "--exclude-standard"], capture_output=True, check=True)
        commit = subprocess.run([*git, "rev-parse", "-q", "--verify", "HEAD"], capture_output=True, check=False)
        return commit.stdout.decode(), [os.path.join(root, os.fsdecode(name)) for name in listed.stdout.split(b"\0") if name]
    sources = []
    for base, folders, names in os.walk(root):
        folders[:] = [folder for folder in folders if folder not in NOT_SOURCE]
        sources += [os.path.join(base, name) for name in names]
    return None, sources
