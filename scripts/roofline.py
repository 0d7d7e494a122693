#!/usr/bin/env python3
"""What each kernel of the engine can reach at most on an H200, by arithmetic: writes docs/internals/kernels.md.

  scripts/roofline.py          the page on stdout
  scripts/roofline.py --check  whether docs/internals/kernels.md is that page

A kernel's time is at least its bytes over the memory's rate, its flops over the tensor cores' and its instructions over the
schedulers'. Bytes are those that the algorithm must move with every array read or written once: what caches save or what is read
twice shows as a difference to the measurement. bf16 activations and weights, fp32 gradients and moments, master weights in two
halves of 16 bits. A step is of one micro-step.
"""
import math
import os
import sys

from written_page import tables_as_blocks, write_or_check

BYTES_PER_S, FLOPS_PER_S = 4.3e12, 790e12  # a copy and a large cuBLAS bf16 matmul on random data, on an H200
H100_BYTES_PER_S = 3.0e12  # 90 % of the data sheet's 3.35 TB/s, as 4.3 is of an H200's 4.8; the rest of an H100 is an H200's
DATA_SHEET_FLOPS_PER_S = 989.5e12  # what MFU is held against
ISSUES_PER_S = 132 * 4 * 32 * 1.83e9  # instructions of single threads: 132 multiprocessors of 4 schedulers, a warp's each clock
PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "docs", "internals", "kernels.md")


NORM_RUNS = 4 * 132   # partial sums of a norm's backward (kernels/norm.cuh), at most
ACTIVATION_ROWS = 64  # rows of a partial sum of an activation's backward (kernels/activation.cuh)
# Of an element in bf16: counted in sm_90a's machine code by scripts/count_sass.py.
INSTRUCTIONS = {"gelu forward": 11.6, "gelu backward": 21.5, "swiglu forward": 13.9, "swiglu backward": 22.6}


class Shape:
    """A preset of config/config.h at one batch. tied: the head's weight is the embedding's."""

    def __init__(self, name, layers, hidden, heads, groups, ffn, vocabulary, llama, batch, length, ranks=1, tied=True):
        self.given = (name, layers, hidden, heads, groups, ffn, vocabulary, llama, batch, length, ranks, tied)
        self.name, self.L, self.C, self.H, self.G, self.F, self.llama = name, layers, hidden, heads, groups, ffn, llama
        self.V = (vocabulary + 127) // 128 * 128
        self.B, self.T, self.D, self.N = batch, length, hidden // heads, batch * length
        self.qkv = (heads + 2 * groups) * self.D
        self.up = 2 * ffn if llama else ffn
        block = self.C * (self.qkv + self.C + self.up + self.F)
        vectors = 2 * self.C if llama else 4 * self.C + self.qkv + self.C + self.up + self.C
        self.ranks, self.tied = ranks, tied
        tables = (1 if tied else 2) * self.V * self.C
        self.parameters = layers * (block + vectors) + tables + (self.C if llama else (2 + length) * self.C)

    def resized(self, layers, batch, length):
        """The same with so many layers, None: with all of them."""
        name, of_preset, *widths, _, _, ranks, tied = self.given
        return Shape(name, layers or of_preset, *widths, batch, length, ranks, tied)


SHAPES = [
    Shape("gpt2-124m", 12, 768, 12, 12, 3072, 50257, False, 64, 1024),
    Shape("gpt2-1558m", 48, 1600, 25, 25, 6400, 50257, False, 16, 1024),
    Shape("llama3.2-1b", 16, 2048, 32, 8, 8192, 128256, True, 4, 4096),
    Shape("llama3-8b", 32, 4096, 32, 8, 14336, 128256, True, 1, 8192, ranks=8, tied=False),
]


# Kernels, products, memsets and copies of a step in bf16 on one GPU of compute capability 9.0: (of a micro-step, of the
# step besides it), as scripts/count_launches.py --preset NAME counts them at 64 tokens; test/test_cuda_engine.py holds
# these figures to it.
LAUNCHES = {
    "gpt2-124m": {"products": (147, 0), "attention": (48, 0), "norms": (75, 0), "RoPE": (0, 0), "GELU, SwiGLU": (24, 0),
                  "bias gradients": (48, 0), "embedding": (4, 0), "loss": (2, 0), "AdamW, gradient norm": (0, 4),
                  "collectives": (0, 0), "dropout's counter, copies": (4, 2)},
    "llama3.2-1b": {"products": (195, 0), "attention": (64, 0), "norms": (99, 0), "RoPE": (16, 0), "GELU, SwiGLU": (32, 0),
                    "bias gradients": (0, 0), "embedding": (3, 0), "loss": (2, 0), "AdamW, gradient norm": (0, 4),
                    "collectives": (0, 0), "dropout's counter, copies": (4, 2)},
}
SORT_TILE, TOKEN_FEW = 4096, 64  # of kernels/embedding.cuh


def sort_launches(tokens):
    """Of the backward of an embedding of so many tokens, beside that of 64: of a bitonic sort, whose runs above a tile
    double until they hold all tokens, each by steps between tiles and one within them; and the sums of frequent tokens."""
    doublings = max(0, math.ceil(math.log2(tokens / SORT_TILE)))
    return doublings * (doublings + 3) // 2 + (tokens > TOKEN_FEW)


def linears(s):
    """(name, inputs, outputs) of a block's linear layers."""
    return [("qkv", s.C, s.qkv), ("projection", s.C, s.C), ("MLP up", s.C, s.up), ("MLP down", s.F, s.C)]


def matmuls(name, s, inputs, outputs):
    """A linear layer's three products: (N, inputs) times (inputs, outputs). The weight gradient is fp32, and overwritten."""
    flops = 2 * s.N * inputs * outputs
    x, y, w = 2 * s.N * inputs, 2 * s.N * outputs, inputs * outputs
    return [(f"{name} forward", x + y + 2 * w, flops), (f"{name} backward, input", x + y + 2 * w, flops),
            (f"{name} backward, weight", x + y + 4 * w, flops)]


def bias_gradients(s):
    """Bytes of a block's bias gradients: the partial sums that the kernels write that make what is summed, and a second stage reads."""
    queries = 128 if s.D == 64 else 64  # of attention's partial sums on Hopper: sm90_backward_plan::QUERIES
    return 8 * (NORM_RUNS * 2 * s.C + s.N / ACTIVATION_ROWS * s.up + s.N / queries * s.qkv)


def kernels(s):
    """(name, calls in a step of one micro-batch, bytes of a call, flops of a call)."""
    rows = 2 * s.N * s.C  # one bf16 array (N, C)
    packed = 2 * s.N * s.qkv
    lse = 4 * s.N * s.H
    attention_flops = 2 * s.B * s.H * s.T * s.T * s.D  # two products, half of each below the diagonal
    layer = []
    for linear in linears(s):
        layer += matmuls(linear[0], s, *linear[1:])
    if not s.llama:
        layer.append(("bias gradients of a block", bias_gradients(s), 0))
    layer += [
        ("attention forward", packed + rows + lse, attention_flops),
        # dQ's kernel reads q, k, v, out, dout and writes dq; that of dK and dV reads q, k, v, dout again
        ("attention backward", 3 * packed + 3 * rows + 5 * lse, 2.5 * attention_flops),
    ]
    if s.llama:
        rotated = 2 * s.N * (s.H + s.G) * s.D
        # Attention's backward undoes it: for Hopper within its own passes, after the other backends by a pass like this.
        layer += [("rope forward", 2 * rotated, 0),
                  ("swiglu forward", 3 * 2 * s.N * s.F, 0), ("swiglu backward", 5 * 2 * s.N * s.F, 0)]
    else:
        layer += [("gelu forward", 2 * 2 * s.N * s.F, 0), ("gelu backward", 3 * 2 * s.N * s.F, 0)]
    table = [(name, s.L, size, flops) for name, size, flops in layer]
    table += [
        ("residual add + norm forward", 2 * s.L, 4 * rows, 0),  # x, what is added, their sum, its norm
        ("norm backward + residual", 2 * s.L + 1, 4 * rows, 0),
        ("embedding forward", 1, 2 * rows, 0),
        # a tied table is added to; a table of its own is written, in every row
        ("embedding backward", 1, rows + (8 * min(s.N, s.V) if s.tied else 4 * s.V) * s.C, 0),
    ]
    table += [(name, 1, size, flops) for name, size, flops in matmuls("head", s, s.C, s.V)]
    table += [("classifier, loss and gradient in place", 1, 2 * 2 * s.N * s.V, 0)]
    table += [
        ("gradient norm", 1, 4 * s.parameters / s.ranks, 0),
        # gradient, parameter and its lower half, two moments read; the last four written
        ("AdamW", 1, 28 * s.parameters / s.ranks, 0),
    ]
    return table


def least_seconds(size, flops, bytes_per_s=BYTES_PER_S):
    return max(size / bytes_per_s, flops / FLOPS_PER_S)


def issue_seconds(s, name):
    """What the schedulers need at least for an activation; 0: of other kernels nothing is counted."""
    return INSTRUCTIONS.get(name, 0) * s.N * s.F / ISSUES_PER_S


def step(s, bytes_per_s=BYTES_PER_S):
    """Seconds of a step, at least."""
    return sum(calls * max(least_seconds(size, flops, bytes_per_s), issue_seconds(s, name)) for name, calls, size, flops in kernels(s))


def steps_table():
    """Steps, and the MFU that they allow."""
    lines = ["| | ms | MFU | on an H100, ms |", "|---|---|---|---|"]
    for s in SHAPES:
        h200, h100 = step(s), step(s, H100_BYTES_PER_S)
        flops = sum(calls * flops for _, calls, _, flops in kernels(s))
        ranks = f", {s.ranks} ranks, ZeRO stage 1, without its collectives" if s.ranks > 1 else ""
        lines.append(f"| {s.name}, B {s.B}, T {s.T}{ranks} | {1e3 * h200:.1f} | {100 * flops / h200 / DATA_SHEET_FLOPS_PER_S:.0f} % | "
                     f"{1e3 * h100:.1f} |")
    return lines


def launches(name):
    """LAUNCHES in all, at the tokens of SHAPES: of a micro-step, of the rest of a step."""
    micro, rest = map(sum, zip(*LAUNCHES[name].values()))
    return micro + sort_launches(next(s.N for s in SHAPES if s.name == name)), rest


# Rows of the page's table, and how the names of their kernels begin.
ROWS = {
    "qkv, three products": ("qkv",), "projection, three": ("projection",), "MLP up, three": ("MLP up",), "MLP down, three": ("MLP down",),
    "bias gradients of a block": ("bias",), "attention forward": ("attention forward",), "attention backward": ("attention backward",),
    "RoPE forward": ("rope",), "GELU or SwiGLU forward": ("gelu forward", "swiglu forward"),
    "GELU or SwiGLU backward": ("gelu backward", "swiglu backward"), "residual and norm, forward or backward": ("residual", "norm"),
    "embedding forward": ("embedding forward",), "embedding backward": ("embedding backward",),
    "head, three products": ("head",), "classifier, loss and gradient in place": ("classifier",), "gradient norm": ("gradient norm",),
    "AdamW": ("AdamW",),
}
BOUND_BY_FLOPS = "qkv", "projection", "MLP", "attention", "head"


def kernels_table():
    """A row of each kernel, and one of a layer's three products, which take the same time."""
    lines = ["| | calls | " + " | ".join(s.name for s in SHAPES) + " |", "|---|---|" + "---|" * len(SHAPES)]
    named = 0
    for label, begins in ROWS.items():
        calls, bounds, cells = set(), set(), []
        for s in SHAPES:
            times = set()
            in_row = [kernel for kernel in kernels(s) if kernel[0].startswith(begins)]
            named += len(in_row)
            for name, _, size, flops in in_row:
                seconds, issue = least_seconds(size, flops), issue_seconds(s, name)
                bounds.add("issue" if issue > seconds else "flops" if flops / FLOPS_PER_S > size / BYTES_PER_S else "bytes")
                times.add(f"{1e6 * max(seconds, issue):.1f}")
            assert len(times) <= 1, (label, times)
            cells += times or {"-"}
            layers, rest = divmod(sum(times for _, times, _, _ in in_row), s.L)
            calls |= {" + ".join([f"{layers} L" if layers > 1 else "L"] * (layers > 0) + [str(rest)] * (rest > 0))} if in_row else set()
        assert len(calls) == 1, (label, calls)
        assert bounds == {"flops" if label.startswith(BOUND_BY_FLOPS) else "bytes"}, (label, bounds)  # as the text says
        lines.append(f"| {label} | {calls.pop()} | " + " | ".join(cells) + " |")
    assert named == sum(len(kernels(s)) for s in SHAPES)  # each kernel has one row
    return lines


MUON_STEPS = 5  # of a Newton-Schulz iteration
MUON_TOKENS = (1 << 16, 1 << 19)


def matrices(s):
    """(rows, columns) of a block's matrices that Muon updates."""
    mlp = [(s.F, s.C)] * (s.up // s.F) + [(s.C, s.F)]
    return [(s.H * s.D, s.C), (s.G * s.D, s.C), (s.G * s.D, s.C), (s.C, s.H * s.D), *mlp]


def muon(s):
    """Seconds of an update of all matrices by Muon, on one GPU, less AdamW's bytes of them.

    A product of the iteration reads and writes its operands once; of each parameter the momentum's pass moves a gradient, a momentum twice
    and the update, 14 bytes; the norm and the division 6; the step reads the factor and moves the parameter and its lower half
    twice, 10; the copy of an odd number of steps 4. AdamW moves 28."""
    seconds = 0
    for rows, columns in s.L * matrices(s):
        side, length = min(rows, columns), max(rows, columns)
        products = [(2 * (side * length + side * side), 2 * side * side * length), (4 * side * side, 2 * side ** 3),
                    (2 * (2 * side * length + side * side), 2 * side * side * length)]
        seconds += MUON_STEPS * sum(least_seconds(size, work) for size, work in products)
        seconds += MUON_STEPS * 6 * side * side / BYTES_PER_S  # the polynomial
        seconds += (14 + 6 + 10 + 4 - 28) * rows * columns / BYTES_PER_S
    return seconds


def muon_table():
    """What --optimizer muon adds to a step on one GPU, by its number of tokens."""
    lines = ["| | least ms | of a step of 64 thousand tokens | of 512 thousand |", "|---|---|---|---|"]
    for s in SHAPES:
        seconds = muon(s)
        shares = [seconds / (step(s) * tokens / s.N) for tokens in MUON_TOKENS]
        lines.append(f"| {s.name} | {1e3 * seconds:.1f} | "
                     + " | ".join(f"{100 * share:.1f} %" for share in shares) + " |")
    return lines


# Rates of the data sheets: name, FMA units, TF32 by mma.sync (on Hopper 63 % of wgmma's), and 90 % of the memory's.
FP32_GPUS = [("8.0, A100", 19.5e12, 156e12, 1.4e12), ("9.0, H100", 67e12, 310e12, 3.0e12), ("8.9, RTX 4090", 83e12, 83e12, 0.9e12)]
FMA_SHARE, TENSOR_SHARE = 0.4, 0.75  # of these rates, guessed: unfused attention's products, flash attention's


def attention_fp32(fma, tf32, memory, heads=32, head_dim=128, T=4096):
    """Predicted ms of a layer's attention in fp32: flash forward, backward, unfused forward, backward. Flash makes 2 and 7 products,
    each three times in TF32; unfused 3, as its scores are made twice, and 4, and moves P twice and P and dS five times."""
    product, matrix = heads * T * T * head_dim, heads * T * T / 2 * 4  # flops and bytes at and below the diagonal
    flash = [1e3 * n * 3 * product / (TENSOR_SHARE * tf32) for n in (2, 7)]
    return flash + [1e3 * (n * product / (FMA_SHARE * fma) + moved * matrix / memory) for n, moved in ((3, 2), (4, 5))]


def attention_fp32_table():
    lines = ["| | flash, forward + backward ms | unfused | flash over unfused |", "|---|---|---|---|"]
    for name, *rates in FP32_GPUS:
        a, b, c, d = attention_fp32(*rates)
        lines.append(f"| {name} | {a:.1f} + {b:.1f} | {c:.1f} + {d:.1f} | {(a + b) / (c + d):.2f} |")
    return lines


HEAD = """# Every kernel's roofline, at the sizes of the benchmarks

Written by `scripts/roofline.py`. **Nothing here was measured.** A kernel's least time is the largest of: the bytes that it must move over
4.3 TB/s; the flops that it must do over 790 TFLOP/s; of an activation, the instructions that the schedulers must issue, one a clock each
at 1.83 GHz. The rates are an H200's in a copy and in a large bf16 matmul. An H100 has 3.0 TB/s here.

A [measured](../gpu/measured.md) time over the least time is what is left to gain. Only a kernel whose data stayed in the 50 MB of L2 can
take less. Not in it: launches (about 2 us each), the tail of the last wave of blocks, and attention's own ceiling, lower than a matmul's
([hopper.md](hopper.md), [attention-sm80.md](attention-sm80.md)).
Recomputation adds the forward rows of what it makes again.

## A step, at best
"""

AFTER_STEPS = """
A step is one micro-step: it overwrites gradients, takes all logits at once, and sums biases' gradients in kernels that make what is summed.

## A call on an H200, least us

L is the number of layers. Flops bound products and attention, bytes bound the rest.
"""

LAUNCHES_HEAD = """
## Launches

A micro-step of {gpt2} has {gpt2_micro} launches, of {llama} {llama_micro}; the rest of a step has {rest}: one GPU with attention for Hopper,
without epilogues that `--matmul-tuning` may choose. `scripts/count_launches.py` counts them by kind."""

MUON_HEAD = """
## What Muon adds to a step

`--optimizer muon` on one GPU, five steps of the iteration, less what AdamW would move; once a step. Products of 768 x 768 fill no GPU
and take more.
"""


FP32_HEAD = """
## Attention in fp32

A layer of 32 heads of 128 at T 4096, causal, predicted with products at {fma:.0f} % of the FMA units' rate (unfused) and {tensor:.0f} % of the
tensor cores' (flash, 3xTF32).
"""


def launches_part():
    gpt2, llama = LAUNCHES
    (gpt2_micro, rest), (llama_micro, llama_rest) = launches(gpt2), launches(llama)
    assert rest == llama_rest
    return LAUNCHES_HEAD.format(gpt2=gpt2, gpt2_micro=gpt2_micro, llama=llama, llama_micro=llama_micro, rest=rest)


def page():
    lines = [HEAD, *steps_table(), AFTER_STEPS, *kernels_table(),
             FP32_HEAD.format(fma=100 * FMA_SHARE, tensor=100 * TENSOR_SHARE), *attention_fp32_table(), launches_part(), MUON_HEAD, *muon_table(), ""]
    return "\n".join(lines)


def main():
    return write_or_check(tables_as_blocks(page()), PAGE, sys.argv[1:] == ["--check"], "docs/internals/kernels.md is not what scripts/roofline.py writes: "
                          "scripts/roofline.py >docs/internals/kernels.md")


if __name__ == "__main__":
    sys.exit(main())
