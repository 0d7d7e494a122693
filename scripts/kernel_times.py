#!/usr/bin/env python3
"""Times the kernels of a training step on a GPU, by Nsight Compute's ncu, beside the least time that they can take.

  scripts/kernel_times.py NCU FOLDER --preset NAME --batch B --length T [--layers N] [OPTION...]
                             prints a JSON object for each row of count_launches.py's table; OPTIONs are train_gpt's

Of three steps of one micro-step the last is timed: the kernels behind one AdamW up to the next. ncu runs kernels one at
a time, at the clocks that the GPU has by itself and with the caches as they are; it does not time copies and memsets.
Matrix products are cuBLASLt's first choices (--matmul-tuning=false), or the kernels of tuning would be timed, too. The
least time is roofline.py's, for an H200 and a model of the same layers: with --layers it has N layers, too, and nothing
is scaled.

Exit status: 77 where ncu may not or can not time kernels; the last line has its reason.
"""
import argparse
import collections
import csv
import json
import os
import re
import subprocess
import sys

import count_launches
import roofline

NANOSECONDS = {"ns": 1, "nsecond": 1, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9}
LAST_OF_A_STEP = "adamw_kernel"
# Names of libraries' kernels, tried before ours: some begin and end as ours do.
LIBRARIES = {"attention": r"cudnn", "products": r"nvjet|xmma|cutlass|gemm|splitk|cublas"}
OTHER = "other"
# How the names of roofline.py's rows begin that belong to a row of count_launches.py.
LEAST = {"products": ("qkv", "projection", "MLP", "head"), "attention": ("attention",), "norms": ("residual", "norm"), "RoPE": ("rope",),
         "GELU, SwiGLU": ("gelu", "swiglu"), "bias gradients": ("bias",), "embedding": ("embedding",), "loss": ("classifier",),
         "AdamW, gradient norm": ("gradient norm", "AdamW")}


def kernels_of(lines):
    """Yields (name, us) of each kernel in ncu's CSV, which begins at its header."""
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    for row in csv.DictReader(line for line in lines[begin:] if line.startswith('"')):
        if row.get("Metric Name") == "gpu__time_duration.sum":
            yield row["Kernel Name"], float(row["Metric Value"].replace(",", "")) * NANOSECONDS[row["Metric Unit"]] * 1e-3


def last_step(kernels):
    """Returns the kernels behind the last AdamW but one, up to the last; None where there are not two."""
    ends = [i for i, (name, _) in enumerate(kernels) if LAST_OF_A_STEP in name]
    return kernels[ends[-2] + 1:ends[-1] + 1] if len(ends) > 1 else None


def row_of(name):
    for row, names in LIBRARIES.items():
        if re.search(names, name, re.IGNORECASE):
            return row
    ours = re.search(r"\w+_kernel\b", name)
    return next((row for row, names in count_launches.ROWS.items() if ours and re.fullmatch(names, ours[0])), OTHER)


def least_us(shape):
    """Returns the least us of each row. A kernel of no row or of several fails, so that no work is left out."""
    result = collections.Counter()
    for name, calls, size, flops in roofline.kernels(shape):
        rows = [row for row, begins in LEAST.items() if name.startswith(begins)]
        assert len(rows) == 1, name
        result[rows[0]] += 1e6 * calls * max(roofline.least_seconds(size, flops), roofline.issue_seconds(shape, name))
    return result


def rows_of(step, shape, known):
    """Yields the report's rows: count_launches.py's rows that ran, kernels of no row, and all. known: members of
    each row."""
    least, times, counts = least_us(shape), collections.Counter(), collections.Counter()
    for name, us in step:
        times[row_of(name)] += us
        counts[row_of(name)] += 1
    times["all"], counts["all"], least["all"] = sum(times.values()), len(step), sum(least.values())
    for row in [*count_launches.ROWS, OTHER, "all"]:
        if counts[row]:
            yield {"bench": "kernels", **known, "work": row, "launches": counts[row], "us": times[row], "least_us": least[row] or None}


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ncu")
    parser.add_argument("folder")
    parser.add_argument("--preset", choices=[shape.name for shape in roofline.SHAPES], required=True)
    for name in ("--batch", "--length"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--layers", type=int)
    known, options = parser.parse_known_args(arguments)
    shape = next(shape for shape in roofline.SHAPES if shape.name == known.preset).resized(known.layers, known.batch, known.length)
    os.makedirs(known.folder, exist_ok=True)
    log = os.path.join(known.folder, "ncu.csv")
    command = [known.ncu, "--clock-control", "none", "--cache-control", "none", "--metrics", "gpu__time_duration.sum", "--print-units", "base",
               "--csv", "--log-file", log, os.environ.get("TRAIN_GPT", "build/train_gpt"), "--preset", known.preset, "--num-layers", str(shape.L),
               "--micro-batch-size", str(shape.B), "--global-batch-size", str(shape.B), "--seq-length", str(shape.T),
               "--max-position-embeddings", str(shape.T), "--train-steps", "3", "--cuda-graphs=false", "--matmul-tuning=false",
               "--val-every", "0", "--checkpoint-every", "0", "--precision", "bf16", "--device", "cuda", "--out", known.folder, *options]
    status = subprocess.run(command, check=False).returncode
    lines = []
    if os.path.exists(log):
        with open(log, encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    refused = [line for line in lines if line.startswith("==ERROR==")]
    if refused:
        print(refused[0].removeprefix("==ERROR==").strip())
        return 77
    step = last_step(list(kernels_of(lines)))
    if status or not step:
        print(f"ncu ended by status {status}, and timed {sum(1 for _ in kernels_of(lines))} kernels, which are no step")
        return 1
    for row in rows_of(step, shape, {"preset": known.preset, "layers": shape.L, "batch": shape.B, "length": shape.T}):
        print(json.dumps(row))
    print("kernels without a row:", ", ".join(sorted({name for name, _ in step if row_of(name) == OTHER})) or "none")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
