"""What every test relies on, whatever starts it: a login shell, a script's background, nohup, cron, a step of a cluster's job.

The tests in Python import this module, since each may be started alone; so does test/run.py, so that the cmocka programs get the
same. Signal dispositions are why neither is a shell script: a shell can't take back that a signal is ignored where it was so at
the shell's start (POSIX, "trap"). test/testing.h does for a cmocka program that is
started alone what a process can do for itself.

LONG_TESTS, where it is not empty, asks for the long run: in_long_run() and long_test() say what the short one leaves out.
"""
import itertools
import os
import pwd
import re
import resource
import signal
import socket
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# What launchers leave behind, and what numbers threads or chooses kernels: a test that wants one sets it. The variables of CUDA,
# of the emulator and of the sanitizers stay, since who starts the tests chooses a machine by them; so do those that say where a
# library is installed and how Open MPI reaches its processes, and the folder that test/run.py gives an mpirun.
FOREIGN = re.compile("(?!.*(_tmpdir_base|_PREFIX|_ROOT|_HOME|_CONF)$|OMPI_MCA_(plm|btl|pml|mtl)_?)(OMPI|OPAL|ORTE|PMIX?|PRTE|HYDRA|MPI|I_MPI|MPICH|SLURM|OMP|GOMP|KMP|OPENBLAS|GOTO|BLIS|MKL|DNNL|ONEDNN|NVTE)_"
                     "|(LOCAL_)?(RANK|WORLD_SIZE)$|(LC_.*|LANG|LANGUAGE)$")
# What nohup and a shell's job control have set lets the tests go on when the terminal is left.
KEPT_SIGNALS = {signal.SIGKILL, signal.SIGSTOP, signal.SIGHUP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
OPEN_FILES = 1024  # what Linux gives a process by default
PORTS = itertools.count()  # of free_port


def set_signals():
    """As after a login: nothing is ignored or blocked. Python's own choice for SIGPIPE and SIGXFSZ ends with an exec or a child."""
    for number in signal.valid_signals() - KEPT_SIGNALS - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def set_limits():
    """Tests keep apart what the owner may do from what others may, open shards and sockets, and end programs by signals."""
    os.umask(0o022)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most), most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def open_standard_files():
    """So that no file of a test takes the place of one that was closed."""
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
    os.environ.setdefault("TRAIN_GPT_SELF_CHECK", "off")  # each run's --out is new, and would check the emulated kernels again
    # Tests are many small parallel regions: on a busy machine threads that spin at barriers take the time of those that work.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    if not os.path.isdir(os.environ.get("HOME", "")):
        known = [entry.pw_dir for entry in pwd.getpwall() if entry.pw_uid == os.getuid()]  # a container's user may have no name
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
    """What a test goes over: everything in the long run, in the short one what takes each path once."""
    return everything if in_long_run() else short


def long_test(reason):
    """Decorates a test, or a class of them, that the short run skips. The reason names the short test that keeps its core."""
    return unittest.skipUnless(in_long_run(), "in the long run alone: " + reason)


def free_port():
    """Finds a port of this host at which nobody listens. It lies below 32768, where Linux begins to take ports for connections: a
    connection of another test could have it before the test's process listens."""
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
    """A decorator of a test that is not run of a program with AddressSanitizer, which keeps freed memory for a while and takes terabytes
    of addresses: a test of resident memory, of ulimit -v, or one that reads all of a process's memory."""
    if not os.path.exists(program):
        return lambda test: test
    with open(program, "rb") as file:
        return unittest.skipIf(b"__asan_init" in file.read(), "not under AddressSanitizer")
