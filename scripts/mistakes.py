"""How scripts end: a mistake of the user is one line behind the script's name, and status 2."""

import os
import signal
import subprocess
import sys

SCRIPT = [os.path.basename(sys.argv[0])]  # whose messages these are


class Mistake(Exception):
    """What the user has to change; ends the script with status 2."""


def warn(message):
    print(f"{SCRIPT[0]}: {message}", file=sys.stderr)


def write_output():
    """Writes what was printed. Raises OSError where that can't be written, and drops it: Python would try again at its end and
    complain in lines of its own."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise


def run_script(name, work, *arguments, interrupted="interrupted"):
    """Does a script's work; returns its exit status: what `work` returns, 0 for None. What went wrong is one line."""
    SCRIPT[0] = name
    try:
        try:
            return work(*arguments) or 0
        finally:
            write_output()
    except Mistake as mistake:
        warn(mistake)
        return 2
    except BrokenPipeError:  # who reads the output, as `head`, has seen enough
        return 128 + signal.SIGPIPE
    except OSError as error:
        warn(f"{error.filename or 'writing'}: {error.strerror}" if error.strerror else error)
        return 2
    except subprocess.CalledProcessError as error:
        warn(f"{error.cmd[0]} failed with status {error.returncode}")
        return 1
    except KeyboardInterrupt:
        warn(interrupted)
        return 128 + signal.SIGINT
