#!/usr/bin/env python3
"""Counts what a training step launches on a GPU: kernels, matrix products, memsets, copies, collectives.

  scripts/count_launches.py [--train-gpt build/emu/train_gpt] [OPTION...]   of a model with these options of train_gpt

The emulator counts (`make emu`): runs of different numbers of steps and micro-steps differ by a step's, and by a micro-step's,
work. Widths do not matter to the counts, so that a preset's layers are counted at small ones; an option that is given here
overrides its small one. What a CUDA graph launches counts as often as it runs.
"""
import argparse
import collections
import os
import re
import subprocess
import sys
import tempfile

SMALL = {"hidden-size": "64", "num-attention-heads": "2", "num-query-groups": "2", "kv-channels": "32", "ffn-hidden-size": "128",
         "vocab-size": "256", "seq-length": "64", "micro-batch-size": "1"}


def options_of(arguments):
    """--name value pairs of a command line, by name."""
    options = dict(SMALL)
    for name, value in zip(arguments[::2], arguments[1::2]):
        if not name.startswith("--"):
            sys.exit(f"count_launches.py: '{name}': expected an option of train_gpt with its value")
        options[name[2:]] = value
    return options


def write_shard(path, tokens):
    """A token shard of 16-bit tokens: 256 int32 of header, then the tokens."""
    header = [20240520, 1, tokens] + [0] * 253
    with open(path, "wb") as file:
        file.write(b"".join(value.to_bytes(4, "little") for value in header))
        file.write(b"".join((i * 7 % 251).to_bytes(2, "little") for i in range(tokens)))


def counts_of(program, options, folder, steps, micro_steps):
    """How often each kind of work ran in a run of so many steps."""
    counts = os.path.join(folder, f"counts_{steps}_{micro_steps}")
    batch = int(options["micro-batch-size"]) * micro_steps
    given = {**options, "global-batch-size": str(batch), "train-steps": str(steps), "train-data": os.path.join(folder, "train.bin"),
             "out": os.path.join(folder, f"out_{steps}_{micro_steps}"), "device": "cuda", "precision": "bf16"}
    command = [program] + [f"--{name}={value}" for name, value in given.items()]
    run = subprocess.run(command, env={**os.environ, "EMU_WORK_COUNTS": counts}, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        sys.exit(f"count_launches.py: {' '.join(command)}\n{run.stderr}")
    result = collections.Counter()
    with open(counts, encoding="utf-8") as file:
        for line in file:
            count, name = line.split(" ", 1)
            result[name_of(name.strip())] += int(count)
    return result


def name_of(text):
    """A kernel's name without its template's arguments, which the shape decides; what is no work of the GPU has none."""
    names = {"an event": "", "a wait for an event": "", "a graph": "", "a copy": "cudaMemcpy", "kernel": "attention's kernels",
             "amax ? with_amax : without": "norm_backward_kernel"}  # of pointers that were chosen before
    return names[text] if text in names else re.sub(r"^.*?(\w+_kernel).*$", r"\1", text)


def count(program, arguments):
    """(work of a micro-step, work of a step with one micro-step besides it), by name."""
    options = options_of(arguments)
    with tempfile.TemporaryDirectory() as folder:
        write_shard(os.path.join(folder, "train.bin"), 1 << 14)
        one, two = (counts_of(program, options, folder, steps, 1) for steps in (3, 4))
        more = [counts_of(program, options, folder, steps, 2) for steps in (3, 4)]
    step, step_of_two = two - one, more[1] - more[0]
    micro_step = step_of_two - step
    rest = step - micro_step
    for table in (micro_step, rest):
        table.pop("", None)
    return micro_step, rest


def table(micro_step, rest):
    """The counts as a table."""
    lines = ["| work | a micro-step | the rest of a step |", "|---|---|---|"]
    for name in sorted(set(micro_step) | set(rest), key=lambda n: (-micro_step[n] - rest[n], n)):
        lines.append(f"| {name} | {micro_step[name]} | {rest[name]} |")
    lines.append(f"| all | {sum(micro_step.values())} | {sum(rest.values())} |")
    return "\n".join(lines)


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-gpt", default="build/emu/train_gpt")
    known, rest = parser.parse_known_args()
    print(table(*count(known.train_gpt, rest)))


if __name__ == "__main__":
    main()
