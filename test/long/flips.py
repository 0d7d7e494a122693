#!/usr/bin/env python3
"""Flips single bits of checkpoints, and compares what a run then does with a run without a flip: `--resume auto` names
the file, falls back on the checkpoint before, and comes to the same bits; `--resume` of the damaged folder refuses it
by name.

  test/long/flips.py [--flips N] [--seed N]

Every file of a checkpoint is hit in turn, at a random bit of a random byte. Half of the flips hit the newest
checkpoint, half hit the two newest.
"""
import argparse
import os
import random
import re
import shutil
import sys
import time

from job import Difference, Folder
from kills import ALONE, EIGHT_BITS

STEPS = 6
KINDS = {**ALONE, "with EMA, 8 bits": ("llama", ["--precision", "bf16", "--ema-decay", "0.9", *EIGHT_BITS])}


def flip(path, generator):
    """Flips one bit of a file; returns where."""
    at, bit = generator.randrange(os.path.getsize(path)), generator.randrange(8)
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
    return "bit %d of byte %d of %s" % (bit, at, os.path.basename(path))


def one_flip(folder, kind, model, options, number, generator):
    """Damages a copy of the run's checkpoints, and resumes it from the newest one, and from the damaged one by name."""
    damaged = [STEPS, STEPS - 2] if number % 2 else [STEPS]
    shutil.copytree(folder.out(kind), folder.out("flipped"))
    flips = {}
    for step in damaged:
        files = sorted(os.listdir(folder.checkpoint("flipped", step)))
        name = files[number // 2 % len(files)]
        # a flipped hash or name is reported for the file that it belongs to
        known_by = "" if name == "manifest.json" else name
        flips[step] = (known_by, flip(folder.checkpoint("flipped", step) + "/" + name, generator))
    what = "%s: %s" % (kind, "; ".join("step %d: %s" % (step, text) for step, (_, text) in flips.items()))
    try:
        said = folder.run("flipped", 1, model, [*options, "--resume", folder.checkpoint("flipped", STEPS)], expect=2)
        if not re.search(r"/step_%08d/.*%s" % (STEPS, re.escape(flips[STEPS][0])), said):
            raise Difference("refused without the file's name: " + said)
        said = folder.run("flipped", 1, model, [*options, "--resume", "auto"])
        for step, (name, _) in flips.items():
            if not re.search(r"^passed over: .*/step_%08d.*%s" % (step, re.escape(name)), said, re.M):
                raise Difference("step %d was not passed over by the name of %s: %s" % (step, name, said))
        if not re.search(r"goes on from .*step_%08d" % (damaged[-1] - 2), said):
            raise Difference("it did not go on from the checkpoint before: " + said)
        folder.same_files(kind, "flipped", STEPS)
    except Difference as difference:
        raise Difference("%s\n%s" % (what, difference)) from None
    shutil.rmtree(folder.out("flipped"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print("seed %d" % options.seed, flush=True)
    generator = random.Random(options.seed)
    failed = 0
    with Folder() as folder:
        kinds = {kind: (model, ["--train-steps", STEPS, "--checkpoint-every", "2", *more]) for kind, (model, more) in KINDS.items()}
        for kind, (model, more) in kinds.items():
            folder.run(kind, 1, model, more)
        for number in range(options.flips):
            kind = list(kinds)[number % len(kinds)]
            try:
                one_flip(folder, kind, *kinds[kind], number // len(kinds), generator)
            except Difference as difference:
                failed += 1
                print("flip %d: %s" % (number, difference), flush=True)
                shutil.rmtree(folder.out("flipped"), ignore_errors=True)
    print("%d passed, %d failed" % (options.flips - failed, failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
