#!/usr/bin/env python3
"""Compares the losses of this build ($B/train_gpt) in 20 steps with those that the native build has (build/train_gpt,
made if it is out of date), in fp32 and in bf16. The memory plans of a GPU must be the same as the native build's, to
the byte.

TEST_RUNNER runs the program for another CPU. ARCH, if it is set, is the level that the program must take.
"""
import json
import os
import shlex
import struct
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# A model with everything that differs from GPT-2, and few enough steps for an emulated CPU.
TRAINING = ("--device cpu --threads 2 --num-layers 3 --hidden-size 128 --num-attention-heads 4 --num-query-groups 2 --kv-channels 32 "
            "--ffn-hidden-size 160 --normalization RMSNorm --position-embedding-type rope --activation swiglu --no-add-bias-linear "
            "--untie-embeddings-and-output-weights --vocab-size 257 --seq-length 48 --micro-batch-size 1 --global-batch-size 2 "
            "--train-steps 20 --lr 1e-3 --lr-warmup-steps 4 --val-every 20 --val-steps 2 --seed 7 --checkpoint-every 0").split()
# The relative difference of a loss in fp32: 20 steps let roundings of 2^-24 grow. In bf16 a curve may be twice as far
# from the reference's fp32 curve as the reference's own bf16 curve is.
FP32_TOLERANCE = 1e-4
BF16_TIMES = 2
PLANS = ("--preset gpt2-124m", "--preset olmo2-1b --recompute-granularity selective --fp8-format hybrid --precision bf16",
         "--preset qwen3-1.7b --world-size 64 --zero-stage 3 --optimizer-cpu-offload --cpu-offloading-num-layers 28 --offload-gradients --offload-weights")


def write_data(folder):
    for name, repeats in (("train", 200), ("val", 30)):
        text = b"for (int i = 0; i < n; i++)\n    sum += x[i] * y[i];\nreturn sum / (double)n + 1e-9;\n" * repeats
        with open("%s/text_%s_000.bin" % (folder, name), "wb") as file:
            file.write(struct.pack("<256i", 20240520, 1, len(text), *[0] * 253))
            file.write(struct.pack("<%dH" % len(text), *text))


def losses(folder, program, precision, options, runner=()):
    """Returns the loss of each step, and the last validation's."""
    out = tempfile.mkdtemp(dir=folder)
    subprocess.run([*runner, program, *TRAINING, "--precision", precision, *options, "--out", out, "--train-data", folder + "/text_train_*.bin",
                    "--val-data", folder + "/text_val_*.bin"], check=True, stdin=subprocess.DEVNULL)
    with open(out + "/log.jsonl", encoding="utf-8") as file:
        steps = [json.loads(line) for line in file]
    return [step["loss"] for step in steps] + [step["val_loss"] for step in steps if "val_loss" in step]


def plan(folder, program, options, runner=()):
    path = folder + "/plan.json"
    subprocess.run([*runner, program, "--plan", "--plan-json", path, "--plan-gpu", "H100 80GB HBM3", *options.split()], check=True,
                   stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def difference(ours, theirs):
    """Returns the largest relative difference; infinity where a loss is missing or not finite."""
    if not ours or len(ours) != len(theirs) or None in ours:
        return float("inf")
    return max(abs(a / b - 1) for a, b in zip(ours, theirs))


def plain_environment():
    """Returns the environment without the row's variables: the reference is not built by the row's compiler."""
    row_variables = ("B", "CC", "ARCH", "DEPS", "SANITIZE", "SANITIZERS", "ONEDNN", "OPENBLAS", "MPI", "CFLAGS", "TEST_RUNNER",
                     "CPATH", "LIBRARY_PATH", "LD_LIBRARY_PATH")
    return {name: value for name, value in os.environ.items() if name not in row_variables}


def main():
    build = os.environ["B"]
    subprocess.run(["make", "-j" + os.environ.get("JOBS", "2"), "--no-print-directory", "CUDA=", "build/train_gpt"], cwd=ROOT,
                   env=plain_environment(), check=True, stdin=subprocess.DEVNULL)
    # not a higher level, even if the program has one
    level = ["--instruction-set", os.environ["ARCH"]] if os.environ.get("ARCH") else []
    runner = shlex.split(os.environ.get("TEST_RUNNER", ""))
    with tempfile.TemporaryDirectory() as folder:
        write_data(folder)
        reference = {precision: losses(folder, ROOT + "/build/train_gpt", precision, []) for precision in ("fp32", "bf16")}
        ours = {precision: losses(folder, os.path.join(ROOT, build, "train_gpt"), precision, level, runner) for precision in ("fp32", "bf16")}
        other_plans = [options for options in PLANS if plan(folder, os.path.join(ROOT, build, "train_gpt"), options, runner)
                       != plan(folder, ROOT + "/build/train_gpt", options)]
    bounds = {"fp32": FP32_TOLERANCE, "bf16": BF16_TIMES * difference(reference["bf16"], reference["fp32"])}
    failed = len(other_plans)
    for options in other_plans:
        print("the plan differs from the native build's: %s: failed" % options)
    for precision, bound in bounds.items():
        found = difference(ours[precision], reference["fp32"])
        failed += not found <= bound
        print("figure: %s %.1e" % (precision, found))
        print("%s: differs by %.1e, bound %.1e%s" % (precision, found, bound, "" if found <= bound else ": failed"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
