#!/usr/bin/env python3
"""Trains with a program that ThreadSanitizer watches ($TRAIN_GPT): the program has threads that read data ahead, write
checkpoints, stream states and gradients, and watch over the ranks. A report fails the run, and so does a status other
than 0.

With clang's OpenMP, whose archer tells the sanitizer of barriers, runs have two OpenMP threads; without it, one.
"""
import functools
import os
import signal
import sys
import time

from job import Difference, Folder, run_checks, wait

THREADS = os.environ.get("LONG_OMP_THREADS", "2")
COMMON = ["--threads", THREADS, "--train-steps", "12", "--checkpoint-every", "2", "--keep-checkpoints", "2", "--val-every", "4"]
OFFLOAD = ["--optimizer-cpu-offload", "--offload-weights", "--offload-gradients", "--checkpoint-async"]
RUNS = {
    "fp32": (1, "gpt2", ["--precision", "fp32"]),
    "bf16": (1, "llama", ["--precision", "bf16", "--ema-decay", "0.9"]),
    "offload": (1, "llama", ["--precision", "bf16", *OFFLOAD]),
    "lora": (1, "lora", ["--precision", "bf16"]),
    "stage 0": (2, "gpt2", ["--precision", "fp32", "--zero-stage", "0"]),
    "stage 2": (2, "llama", ["--precision", "bf16", "--zero-stage", "2"]),
    "stage 3, offload": (2, "llama", ["--precision", "bf16", "--zero-stage", "3", *OFFLOAD]),
}
# The OpenMP runtime is not instrumented: what it does with its own memory is no report, and archer reports its
# barriers.
OPTIONS = "exitcode=66 halt_on_error=0 second_deadlock_stack=1 ignore_noninstrumented_modules=1"


def reports(text):
    return text.count("WARNING: ThreadSanitizer")


def check(folder, name, ranks, model, options):
    said = folder.run(name, ranks, model, [*options, *COMMON])
    if reports(said):
        raise Difference(said)


def check_signals(folder, name, ranks, model, options):
    """Checks that SIGUSR1 saves, and that SIGTERM saves and stops: other threads read what the handlers set."""
    processes = folder.start(name, ranks, model, [*options, "--threads", THREADS, "--train-steps", "1000000", "--checkpoint-every", "0"])
    end = time.monotonic() + 100
    while time.monotonic() < end and not os.path.exists(folder.out(name) + "/log.jsonl"):
        time.sleep(0.05)
    time.sleep(2)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        processes[-1].send_signal(number)
        time.sleep(2)
    statuses = wait(processes, 100)
    said = folder.said(name, ranks)
    if statuses != [3] * ranks or reports(said):
        raise Difference("status %s\n%s" % (statuses, said))


def main():
    os.environ["TSAN_OPTIONS"] = "%s %s" % (OPTIONS, os.environ.get("TSAN_OPTIONS", ""))
    os.environ.setdefault("JOB_SECONDS", "300")
    checks = [(check, name, run) for name, run in RUNS.items()]
    checks += [(check_signals, "signals, " + name, RUNS[name]) for name in ("fp32", "stage 2")]
    with Folder() as folder:
        return run_checks([(name, functools.partial(function, folder, name, *run)) for function, name, run in checks])


if __name__ == "__main__":
    sys.exit(main())
