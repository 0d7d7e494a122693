"""Sets up what every test relies on, however it was started: from a login shell, a script's background, nohup, cron, or
a step of a cluster's job.

Each test in Python imports this module, since it may be started on its own. So does test/run.py, so that the cmocka
programs get the same environment. Neither is a shell script because of signals: a shell can't undo that a signal was
ignored when the shell started (POSIX, "trap"). test/testing.h does what a process can do for itself, for a cmocka
program that is started on its own.

LONG_TESTS, if it is not empty, asks for the long run: in_long_run() and long_test() say what the short run leaves out.
"""
import itertools
import os
import pwd
import re
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# What launchers leave, and what sets the number of threads or chooses kernels: a test that wants such a variable sets
# it. The variables of CUDA, the emulator and the sanitizers stay, since whoever starts the tests chooses a machine by
# them. So do variables that say where a library is installed and how Open MPI reaches its processes, and the folder
# that test/run.py gives an mpirun.
FOREIGN = re.compile("(?!.*(_tmpdir_base|_PREFIX|_ROOT|_HOME|_CONF)$|OMPI_MCA_(plm|btl|pml|mtl)_?)(OMPI|OPAL|ORTE|PMIX?|PRTE|HYDRA|MPI|I_MPI|MPICH|SLURM|OMP|GOMP|KMP|OPENBLAS|GOTO|BLIS|MKL|DNNL|ONEDNN|NVTE)_"
                     "|(LOCAL_)?(RANK|WORLD_SIZE)$|(LC_.*|LANG|LANGUAGE)$")
# Signals that stay as nohup and a shell's job control set them, so that the tests go on when the terminal is left.
KEPT_SIGNALS = {signal.SIGKILL, signal.SIGSTOP, signal.SIGHUP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
OPEN_FILES = 1024  # what Linux gives a process by default
PORTS = itertools.count()  # numbers the calls of free_port


def built_with_mpi(program):
    """Whether the program can be a rank of an mpirun, and one is installed."""
    libraries = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    return shutil.which("mpirun") is not None and "libmpi" in libraries


def set_signals():
    """Ignores and blocks no signal, as after a login. Python's own settings of SIGPIPE and SIGXFSZ end with an exec or
    a child."""
    for number in signal.valid_signals() - KEPT_SIGNALS - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def set_limits():
    """Sets umask and limits as tests need them: they tell what the owner may do from what others may, open shards and
    sockets, and end programs by signals."""
    os.umask(0o022)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most), most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def open_standard_files():
    """Opens closed standard files, or a file of a test would take the place of one."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
            if null != number:
                os.dup2(null, number)
                os.close(null)


def can_hold_files(folder):
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def set_variables():
    for name in [name for name in os.environ if FOREIGN.match(name)]:
        del os.environ[name]
    os.environ.update({"LC_ALL": "C", "PYTHONUTF8": "1", "TZ": "UTC0"})
    # each run has a new --out, and would check the emulated kernels again
    os.environ.setdefault("TRAIN_GPT_SELF_CHECK", "off")
    # Tests have many small parallel regions: on a busy machine threads that spin at barriers take time from threads
    # that work.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    if not os.path.isdir(os.environ.get("HOME", "")):
        # in a container the user may have no name
        known = [entry.pw_dir for entry in pwd.getpwall() if entry.pw_uid == os.getuid()]
        os.environ["HOME"] = known[0] if known and os.path.isdir(known[0]) else "/"
    if not can_hold_files(os.environ.get("TMPDIR", "/tmp")):
        folder = os.path.join(ROOT, "build", "tmp")
        os.makedirs(folder, exist_ok=True)
        os.environ["TMPDIR"] = folder
        tempfile.tempdir = None


def in_long_run():
    """Whether LONG_TESTS asks for the long run: more shapes, seeds, kills and processes than the short run has time for."""
    return bool(os.environ.get("LONG_TESTS"))


def chosen(everything, short):
    """Returns what a test goes through: everything in the long run; in the short run, what takes each path once."""
    return everything if in_long_run() else short


def long_test(reason):
    """Makes the short run skip a test, or a class of tests. The reason names the short test that keeps the test's
    core."""
    return unittest.skipUnless(in_long_run(), "in the long run alone: " + reason)


def free_port():
    """Finds a port of this host at which nobody listens. It lies below 32768, where Linux begins to hand out ports for
    connections: another test's connection could get a port above before the process under test listens."""
    for _ in range(61):
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", 10000 + os.getpid() % 327 * 61 + next(PORTS) % 61))
                return listener.getsockname()[1]
            except OSError:
                pass
    raise OSError("no free port among 61 from 10000 to 29946")


def prepare():
    open_standard_files()
    set_signals()
    set_limits()
    set_variables()


prepare()


def skip_under_address_sanitizer(program):
    """Makes a decorator that skips a test if the program has AddressSanitizer, which keeps freed memory for a while and
    takes terabytes of addresses: for tests of resident memory or of ulimit -v, or that read all of a process's
    memory."""
    if not os.path.exists(program):
        return lambda test: test
    with open(program, "rb") as file:
        return unittest.skipIf(b"__asan_init" in file.read(), "not under AddressSanitizer")
