#!/usr/bin/env python3
"""What FP8 is expected to gain on an H200 and an H100, by arithmetic: a table of docs/fp8.md.

  scripts/roofline_fp8.py          those lines on stdout
  scripts/roofline_fp8.py --check  whether docs/fp8.md has them

A bf16 step is each kernel's roofline (roofline.py) over a stated efficiency, attention as hopper_ceiling.py predicts it. With FP8
the products of the blocks' linear layers go at FP8's rate, casts move the bytes that are counted here, and the passes that sum
bias gradients are gone, since casts sum them.
"""
import os
import sys

import hopper_ceiling
import roofline
from roofline import Shape
from written_page import tables_as_blocks, write_or_check

PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "docs", "fp8.md")
FP8_FLOPS_PER_S = 1400e12  # a large FP8 product on random data, on an H200, as roofline.py's 790e12 is of a bf16 one
PRODUCTS, MEMORY = 0.88, 0.85  # of those rates, and of a copy's: the products and the memory-bound kernels of a step
GPUS = roofline.BYTES_PER_S, roofline.H100_BYTES_PER_S  # bytes/s of a copy, of an H200 and an H100


class Case:
    """A model at one micro-step of a step; `ranks` share the update as ZeRO's stage 1 does. Where several do, none has the whole of
    a weight in its update, so that a pass takes the weight's amax before its cast."""

    def __init__(self, shape, ranks=1):
        self.shape, self.ranks = shape, ranks


CASES = [
    Case(Shape("gpt2-124m", 12, 768, 12, 12, 3072, 50257, False, 64, 1024)),
    Case(Shape("gpt2-1558m", 48, 1600, 25, 25, 6400, 50257, False, 16, 1024)),
    Case(Shape("llama3-8b", 32, 4096, 32, 8, 14336, 128256, True, 1, 8192, tied=False), ranks=8),
]

# ---- bytes of casts ----

DELAYED = "delayed"
RECIPES = "tensorwise", DELAYED
BF16, FP8 = 2, 1  # bytes
# Who makes the two operands of a linear layer's products that are activations.
PRODUCERS = {
    ("qkv", "input"): "norm", ("projection", "input"): "attention", ("MLP up", "input"): "norm", ("MLP down", "input"): "activation",
    ("qkv", "gradient"): "attention", ("projection", "gradient"): "norm", ("MLP up", "gradient"): "activation",
    ("MLP down", "gradient"): "norm",
}


def cast_bytes(linear, operand, recipe, ranks=1):
    """Bytes of memory that an element of an operand costs beside what a bf16 step moves. Both forms are made, rows and columns."""
    producer = PRODUCERS.get((linear, operand))
    if recipe == DELAYED and (producer == "activation" or (producer, operand) == ("norm", "input")):
        return 2 * FP8 - BF16  # the two forms are what the producer writes, in place of a bf16 result
    # A weight and attention's output, which stay in bf16, are cast twice: rows in the forward, columns in the backward.
    casts = 2 if operand == "weight" or (linear, operand) == ("projection", "input") else 1
    amax_pass = operand == "weight" and ranks > 1
    return (BF16 if amax_pass else 0) + casts * BF16 + 2 * FP8


def operands(s):
    """(linear layer, operand, elements) of a layer's micro-batch."""
    for linear, inputs, outputs in roofline.linears(s):
        yield linear, "input", s.N * inputs
        yield linear, "weight", inputs * outputs
        yield linear, "gradient", s.N * outputs


def casts(case, recipe):
    """Bytes of a step's casts: of activations and gradients, of weights."""
    totals = [0, 0]
    for linear, operand, elements in operands(case.shape):
        totals[operand == "weight"] += case.shape.L * elements * cast_bytes(linear, operand, recipe, case.ranks)
    return totals


# ---- a step ----

def fp8_matmuls(s):
    """As roofline.matmuls, of the blocks' linear layers: (calls, bytes, flops)."""
    for _, inputs, outputs in roofline.linears(s):
        x, y, w = FP8 * s.N * inputs, s.N * outputs, inputs * outputs
        flops = 2 * s.N * inputs * outputs
        yield s.L, x + BF16 * y + FP8 * w, flops
        yield s.L, BF16 * x + FP8 * y + FP8 * w, flops
        yield s.L, x + FP8 * y + 4 * w, flops  # written in fp32


def product_seconds(size, flops, bytes_per_s, flops_per_s):
    return max(flops / (PRODUCTS * flops_per_s), size / (MEMORY * bytes_per_s))


def bf16_step(case, bytes_per_s):
    """Seconds of a step: the blocks' linear layers, their bias gradients, all else."""
    s, linear, bias, rest = case.shape, 0.0, 0.0, 0.0
    names = [name for name, _, _ in roofline.linears(s)]
    forward, _, backward = hopper_ceiling.predicted(s.D, s.B, s.H, s.G, s.T)  # the deterministic backward, the default
    for name, calls, size, flops in roofline.kernels(s):
        memory = calls * size / (MEMORY * bytes_per_s)
        product = calls * product_seconds(size, flops, bytes_per_s, roofline.FLOPS_PER_S)
        if name.startswith("attention"):
            rest += calls * flops / (1e12 * (backward if "backward" in name else forward))
        elif name.startswith("bias"):
            bias += memory
        elif name.startswith(tuple(names)):
            linear += product
        elif name in ("gradient norm", "AdamW"):
            rest += memory / case.ranks
        else:
            rest += product
    return linear, bias, rest


def fp8_step(case, bytes_per_s, recipe):
    """Seconds of a step: the blocks' linear layers, casts of activations and gradients, of weights, all else."""
    linear = sum(calls * product_seconds(size, flops, bytes_per_s, FP8_FLOPS_PER_S) for calls, size, flops in fp8_matmuls(case.shape))
    return linear, *(size / (MEMORY * bytes_per_s) for size in casts(case, recipe)), bf16_step(case, bytes_per_s)[2]


# ---- the page's part ----

HEAD = """## Speed, by arithmetic

Written by `scripts/roofline_fp8.py`. The table is predicted, measured figures follow it. Gains over bf16 by kernels' rooflines
([kernels.md](internals/kernels.md)), with products at {products:.0f} % of {bf16:.0f} TFLOP/s in bf16 and of {fp8:.0f} in FP8, memory-bound
kernels at {memory:.0f} % of 4.3 TB/s (H200) or 3.0 (H100), attention as [hopper.md](internals/hopper.md) predicts. One micro-step, nothing
recomputed; llama3-8b is one of 8 ranks at ZeRO's stage 1, without collectives:

| model | H200, tensorwise | delayed | H100, tensorwise | delayed |
|---|---|---|---|---|"""

NOTES = """Weights are cast once a step where memory is free (`--fp8-weight-cache`, 2 bytes a parameter), else in every micro-step.
Before that, with norms' casts apart, an [H200](gpu/measured.md) measured, by delayed scales, 1.15 (gpt2-124m), 1.34 (gpt2-1558m),
1.37 (qwen2.5-1.5b) and 1.56 (qwen2.5-7b); tensorwise has 0.95 of their speed at 1.5B. llmq's gains on an H100: 1.24 at 1.5B, 1.38 at 7B.
"""


def rows():
    for case in CASES:
        s = case.shape
        gains = [sum(bf16_step(case, bytes_per_s)) / sum(fp8_step(case, bytes_per_s, recipe)) for bytes_per_s in GPUS for recipe in RECIPES]
        yield f"| {s.name}, {s.B} x {s.T} | " + " | ".join(f"{gain:.2f}" for gain in gains) + " |"


def lines():
    head = HEAD.format(products=100 * PRODUCTS, memory=100 * MEMORY, bf16=1e-12 * roofline.FLOPS_PER_S, fp8=1e-12 * FP8_FLOPS_PER_S)
    return tables_as_blocks("\n".join([head, *rows(), "", NOTES]))


def main():
    return write_or_check(lines(), PAGE, sys.argv[1:] == ["--check"], "docs/fp8.md has not what scripts/roofline_fp8.py "
                                   "writes: put that in its place", part=True)


if __name__ == "__main__":
    sys.exit(main())
