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
from typing import NamedTuple

import hopper_ceiling
from written_page import write_or_check

BYTES_PER_S, FLOPS_PER_S = 4.3e12, 790e12  # a copy and a large cuBLAS bf16 matmul on random data, on an H200
H100_BYTES_PER_S = 3.0e12  # 90 % of the data sheet's 3.35 TB/s, as 4.3 is of an H200's 4.8; the rest of an H100 is an H200's
ISSUES_PER_S = 132 * 4 * 32 * 1.83e9  # instructions of single threads: 132 multiprocessors of 4 schedulers, a warp's each clock
PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "docs", "internals", "kernels.md")


NORM_RUNS = 4 * 132   # partial sums of a norm's backward (kernels/norm.cuh), at most
ACTIVATION_ROWS = 64  # rows of a partial sum of an activation's backward (kernels/activation.cuh)
# Of an element in bf16: counted in sm_90a's machine code by scripts/count_sass.py; before, of GELU alone, by hand.
INSTRUCTIONS_BEFORE = {"gelu forward": 34, "gelu backward": 44}
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


class Design(NamedTuple):
    """What decides about a step's bytes and instructions, beside the algorithm."""

    overwrites: bool       # the first micro-step overwrites gradients; else they are zeroed, then added to
    producers_sum: bool    # bias gradients are summed by the kernels that make what they sum; else by passes
    head_chunk_bytes: int  # of logits; 0: all at once
    instructions: dict     # of an activation's element


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
# Of gpt2-124m, at 64 tokens too, by the emulator at d323e87: AdamW was launched for each tensor.
LAUNCHES_BEFORE, UPDATES_BEFORE = (401, 180), "180: 148 of AdamW, 28 of the norm"
LAUNCHES_LABELS = {
    "norms": "norms, with the second stage of their weights' gradients",
    "bias gradients": "bias gradients: second stages",
    "embedding": "embedding, whose backward sorts the tokens",
}
SORT_TILE, TOKEN_FEW = 4096, 64  # of kernels/embedding.cuh


def sort_launches(tokens):
    """Of the backward of an embedding of so many tokens, beside that of 64: of a bitonic sort, whose runs above a tile
    double until they hold all tokens, each by steps between tiles and one within them; and the sums of frequent tokens."""
    doublings = max(0, math.ceil(math.log2(tokens / SORT_TILE)))
    return doublings * (doublings + 3) // 2 + (tokens > TOKEN_FEW)


BEFORE = Design(False, False, 512 << 20, INSTRUCTIONS_BEFORE)
NOW = Design(True, True, 0, INSTRUCTIONS)


def linears(s):
    """(name, inputs, outputs) of a block's linear layers."""
    return [("qkv", s.C, s.qkv), ("projection", s.C, s.C), ("MLP up", s.C, s.up), ("MLP down", s.F, s.C)]


def matmuls(name, s, inputs, outputs, design, chunks=1):
    """A linear layer's three products: (N, inputs) times (inputs, outputs). The weight gradient is fp32; chunks of the rows read
    the weight again and add to the gradient."""
    flops = 2 * s.N * inputs * outputs
    x, y, w = 2 * s.N * inputs, 2 * s.N * outputs, inputs * outputs
    gradient = (4 if design.overwrites else 8) * w + 8 * (chunks - 1) * w
    return [(f"{name} forward", x + y + 2 * chunks * w, flops), (f"{name} backward, input", x + y + 2 * chunks * w, flops),
            (f"{name} backward, weight", x + y + gradient, flops)]


def bias_gradients(s, design):
    """Bytes of a block's bias gradients: passes over what they sum, or the partial sums that producers write and a second stage
    reads."""
    if not design.producers_sum:
        return 2 * s.N * (s.qkv + s.C + s.up + s.C)
    queries = 128 if s.D == 64 else 64  # of attention's partial sums on Hopper: sm90_backward_plan::QUERIES
    return 8 * (NORM_RUNS * 2 * s.C + s.N / ACTIVATION_ROWS * s.up + s.N / queries * s.qkv)


def kernels(s, design=None):
    """(name, calls in a step of one micro-batch, bytes of a call, flops of a call)."""
    design = design or NOW
    rows = 2 * s.N * s.C  # one bf16 array (N, C)
    packed = 2 * s.N * s.qkv
    lse = 4 * s.N * s.H
    attention_flops = 2 * s.B * s.H * s.T * s.T * s.D  # two products, half of each below the diagonal
    layer = []
    for linear in linears(s):
        layer += matmuls(linear[0], s, *linear[1:], design)
    if not s.llama:
        layer.append(("bias gradients of a block", bias_gradients(s, design), 0))
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
        # a tied table is added to; a table of its own is written, in every row, and before was read again where there are tokens
        ("embedding backward", 1, rows + (8 * min(s.N, s.V) if s.tied or not design.overwrites else 4 * s.V) * s.C, 0),
    ]
    chunks = -(-2 * s.N * s.V // design.head_chunk_bytes) if design.head_chunk_bytes else 1
    table += [(name, 1, size, flops) for name, size, flops in matmuls("head", s, s.C, s.V, design, chunks)]
    table += [("classifier, loss and gradient in place", 1, 2 * 2 * s.N * s.V, 0)]
    if not design.overwrites:
        table += [("gradients to zero", 1, 4 * s.parameters, 0)]
    table += [
        ("gradient norm", 1, 4 * s.parameters / s.ranks, 0),
        # gradient, parameter and its lower half, two moments read; the last four written
        ("AdamW", 1, 28 * s.parameters / s.ranks, 0),
    ]
    return table


def least_seconds(size, flops, bytes_per_s=BYTES_PER_S):
    return max(size / bytes_per_s, flops / FLOPS_PER_S)


def issue_seconds(s, name, design=None):
    """What the schedulers need at least for an activation; 0: of other kernels nothing is counted."""
    return (design or NOW).instructions.get(name, 0) * s.N * s.F / ISSUES_PER_S


def step(s, design, bytes_per_s=BYTES_PER_S):
    """Seconds of a step, at least."""
    return sum(calls * max(least_seconds(size, flops, bytes_per_s), issue_seconds(s, name, design)) for name, calls, size, flops in kernels(s, design))


def before_and_now():
    """The table of steps, and what each change of the design takes off."""
    lines = ["## The step before and now", "",
             "Before: gradients zeroed, then added to; bias gradients by passes; logits in chunks of 512 MiB, each of which adds to the head's",
             "gradient; GELU by a polynomial and a division (34 and 44 instructions an element; SwiGLU's were not counted). Now: the first",
             "micro-step overwrites; kernels that make a gradient sum its bias's, attention's among them (on Hopper: elsewhere, and behind a norm",
             "of q and k, the epilogue of the weight's product does, or a pass); all logits at once, where memory is free for them; activations",
             "by the units for exponentials and reciprocals. What each takes off, in ms a step; and the step now, on an H100:", "",
             "| | before, ms | now, ms | tokens/s at most, thousand | overwriting | bias sums | chunks of logits | activations | on an H100, ms | "
             "tokens/s at most, thousand |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    for s in SHAPES:
        before, now = step(s, BEFORE), step(s, NOW)
        h100 = step(s, NOW, H100_BYTES_PER_S)
        parts = [before - step(s, BEFORE._replace(**{field: getattr(NOW, field)})) for field in Design._fields]
        lines.append(f"| {s.name}, B {s.B}, T {s.T}{f', {s.ranks} ranks' if s.ranks > 1 else ''} | {1e3 * before:.1f} | {1e3 * now:.1f} | "
                     f"{s.N / now / 1e3:.0f} | " + " | ".join(f"{1e3 * part:.2f}" for part in parts) + f" | {1e3 * h100:.1f} | {s.N / h100 / 1e3:.0f} |")
    lines += ["", "A product's own bytes run beside its flops, so that adding to a weight's gradient, 4 bytes an element more than overwriting it, or to",
              "the head's once for each chunk costs nothing in this table, as long as the product hides it: what the chunks of logits add, 8",
              "bytes for each element of the head's weight and chunk, is 0.86 ms of gpt2-124m's step where no product hides it.", "",
              "Elsewhere some passes are left: gradients that lie on the host sharded or in bf16 are zeroed in their slot before the first",
              "micro-step's are added, beside a transfer that takes longer; with `--mlp-chunk-tokens` each chunk's products sum its biases; sharded",
              "states take an AdamW launch a bucket, gradients on the host two of the norm.",
              "", "What a step launches is counted by `scripts/count_launches.py`: of one GPU with attention for Hopper, at the sizes of the",
              "tables below, without epilogues that `--matmul-tuning` may find to be faster than kernels.", "",
              *launches_table()]
    return "\n".join(lines) + "\n"


def launches_table():
    """LAUNCHES at the tokens of SHAPES."""
    shapes = [s for s in SHAPES if s.name in LAUNCHES]
    sorts = [sort_launches(s.N) for s in shapes]
    before = f"{LAUNCHES_BEFORE[0] + sorts[0]} | {UPDATES_BEFORE}" + " | - | -" * (len(shapes) - 1)
    lines = ["| | " + " | ".join(f"{s.name}: a micro-step | the rest of a step" for s in shapes) + " |",
             "|---|" + "---|---|" * len(shapes), f"| before | {before} |"]
    totals = [[sum(counts[i] for counts in LAUNCHES[s.name].values()) for i in (0, 1)] for s in shapes]
    lines.append("| now | " + " | ".join(f"{total + more} | {rest}" for (total, rest), more in zip(totals, sorts)) + " |")
    of_these = "of these: "
    for row in LAUNCHES[shapes[0].name]:
        cells = [LAUNCHES[s.name][row] for s in shapes]
        if any(map(any, cells)):
            more = sorts if row == "embedding" else [0] * len(shapes)
            lines.append(f"| {of_these}{LAUNCHES_LABELS.get(row, row)} | "
                         + " | ".join(f"{times + extra} | {rest}" for (times, rest), extra in zip(cells, more)) + " |")
            of_these = ""
    return lines


# By hand, of a pair of bf16 that RoPE rotates in a tile of keys in shared memory: two unpacked, four products and
# sums, one packed, and a share of the 16-byte loads and stores of keys and angles.
ROTATION_INSTRUCTIONS = 8

ROPE = """## Why RoPE is a pass of its own in forward

It takes at least {small_ms:.2f} of {small_step_ms:.1f} ms ({small.name}) and {large_ms:.2f} of {large_step_ms:.1f} ({large.name}). \
Backward has no such pass on Hopper,
whose attention undoes RoPE where it stores dQ and dK; attention by mma.sync, by cuDNN and unfused is followed by one, which
these tables do not have: mma.sync's backward kernels have both halves of a pair in a thread, but spill registers as they are
([attention-sm80.md](attention-sm80.md)). What could take its place in forward:

- **K rotated where attention loads it** saves K's share of the bytes, {small_keys_ms:.2f} and {large_keys_ms:.2f} ms, but a tile \
of keys is rotated again
  for each tile of queries of each query head. At {each} instructions a pair of elements, estimated by hand, that is {small_more} issue
  slots of a warp in a step at head dim {small.D}, beside its {small_issue}, and {large_more} at {large.D}, beside {large_issue} \
([hopper.md](hopper.md)). At {small.D} a
  scheduler would have to issue in {busy:.0f} % of a step's {small_tile.clocks} clocks, rather than {idle:.0f} %, while exp2's units \
never rest: more would
  be lost than the {small_keys_ms:.2f} ms. At {large.D} it has room beside the tensor cores' {large_tile.mma} clocks, but the product \
with a tile would
  wait until every warp has rotated its part.
- **Q rotated where attention loads it** is rotated once in forward. Backward would load a Q that is not rotated, and rotate
  it again for each block of keys. Written back by forward, it would save what the pass reads of it, {small_read_ms:.2f} and {large_read_ms:.2f} ms, and
  each tile would wait for the rotation before its first product. That was not tried.
- **The epilogue of qkv's product** is not ours to write in cuBLASLt. A product of our own costs more than the pass where it
  is slower than cuBLASLt's by {small_share:.1f} % ({small.name}) and {large_share:.1f} % ({large.name}).
"""


def seconds_of(s, row):
    """A row of the table of kernels."""
    return sum(calls * least_seconds(size, flops) for name, calls, size, flops in kernels(s) if name == row)


def forward_with_rotation(s):
    """(a step of attention's forward for Hopper, instructions of each of its warps, those of rotating its keys besides,
    the clocks in which a scheduler issues without them and with them)."""
    tile = hopper_ceiling.forward(s.D)
    groups = tile.queries // 64  # warpgroups, each of which has a warp on each scheduler
    more = ROTATION_INSTRUCTIONS * tile.keys * s.D // 2 // (128 * groups)
    return tile, tile.issue // groups, more, (tile.issue, tile.issue + groups * more)


def rope():
    """Why nothing else does what RoPE's pass does."""
    figures = {"each": ROTATION_INSTRUCTIONS}
    for size, s in zip(("small", "large"), [s for s in SHAPES if s.llama]):
        seconds = seconds_of(s, "rope forward")
        tile, issue, more, (before, after) = forward_with_rotation(s)
        figures |= {size: s, f"{size}_ms": 1e3 * seconds, f"{size}_step_ms": 1e3 * step(s, NOW),
                    f"{size}_keys_ms": 1e3 * seconds * s.G / (s.H + s.G), f"{size}_read_ms": 1e3 * seconds * s.H / (s.H + s.G) / 2,
                    f"{size}_share": 100 * seconds / seconds_of(s, "qkv forward"), f"{size}_tile": tile,
                    f"{size}_issue": issue, f"{size}_more": more}
        if size == "small":
            assert after > 0.95 * tile.clocks  # as the text says
            figures |= {"idle": 100 * before / tile.clocks, "busy": 100 * after / tile.clocks}
        else:
            assert after < tile.clocks == tile.mma
    return ROPE.format(**figures)


def table_of(s):
    ranks = f", {s.ranks} ranks, ZeRO stage 1, without its collectives" if s.ranks > 1 else ""
    lines = [f"## {s.name}, B = {s.B}, T = {s.T}{ranks}", "",
             "| kernel | calls | MB | GFLOP | bound by | least us a call | least ms a step |", "|---|---|---|---|---|---|---|"]
    total = total_flops = 0.0
    for name, calls, size, flops in kernels(s):
        issue = issue_seconds(s, name)
        seconds = max(least_seconds(size, flops), issue)
        total += calls * seconds
        total_flops += calls * flops
        bound = "issue" if issue == seconds else "flops" if flops / FLOPS_PER_S > size / BYTES_PER_S else "bytes"
        lines.append(f"| {name} | {calls} | {size / 1e6:.1f} | {flops / 1e9:.1f} | {bound} | {1e6 * seconds:.1f} | "
                     f"{1e3 * calls * seconds:.2f} |")
    share = total_flops / total
    lines += ["", f"The step: at least {1e3 * total:.1f} ms, {s.N / total / 1e3:.0f} thousand tokens/s at most, "
              f"{total_flops / s.N / 1e9:.2f} GFLOP a token, so no more than {share / 1e12:.0f} TFLOP/s, which is "
              f"{100 * share / 989.5e12:.0f} % MFU against the data sheet's 989.5."]
    return lines


MUON_STEPS = 5  # of a Newton-Schulz iteration
MUON_TOKENS = (1 << 16, 1 << 19)


def matrices(s):
    """(rows, columns) of a block's matrices that Muon updates."""
    mlp = [(s.F, s.C)] * (s.up // s.F) + [(s.C, s.F)]
    return [(s.H * s.D, s.C), (s.G * s.D, s.C), (s.G * s.D, s.C), (s.C, s.H * s.D), *mlp]


def orthogonalize_flops(rows, columns):
    """optimizer/orthogonalize.cuh's."""
    side, length = min(rows, columns), max(rows, columns)
    return MUON_STEPS * (4 * side * side * length + 2 * side ** 3)


def muon(s):
    """(matrices, parameters, flops, seconds) of an update of all matrices by Muon, on one GPU, less AdamW's bytes of them.

    A product of the iteration reads and writes its operands once; of each parameter the momentum's pass moves a gradient, a momentum twice
    and the update, 14 bytes; the norm and the division 6; the step reads the factor and moves the parameter and its lower half
    twice, 10; the copy of an odd number of steps 4. AdamW moves 28."""
    count = parameters = flops = seconds = 0
    for rows, columns in s.L * matrices(s):
        side, length = min(rows, columns), max(rows, columns)
        products = [(2 * (side * length + side * side), 2 * side * side * length), (4 * side * side, 2 * side ** 3),
                    (2 * (2 * side * length + side * side), 2 * side * side * length)]
        count += 1
        parameters += rows * columns
        flops += orthogonalize_flops(rows, columns)
        seconds += MUON_STEPS * sum(least_seconds(size, work) for size, work in products)
        seconds += MUON_STEPS * 6 * side * side / BYTES_PER_S  # the polynomial
        seconds += (14 + 6 + 10 + 4 - 28) * rows * columns / BYTES_PER_S
    return count, parameters, flops, seconds


def muon_table():
    """What --optimizer muon adds to a step on one GPU, by its number of tokens."""
    lines = ["## What Muon adds to a step", "",
             "`--optimizer muon` on one GPU, five steps of the iteration: the products' flops, the passes over its matrices, less what AdamW's",
             "would move; it is computed once a step, whatever the number of micro-batches. Steps are those of the tables below, without",
             "collectives, as often as the tokens ask for. On several ranks each orthogonalizes its share of the matrices. Products of 768 x",
             "768 and the like fill no GPU: there the time is more, by how much was not measured.", "",
             "| model | matrices | parameters | TFLOP | least ms | of a step of 64 thousand tokens | of 512 thousand |", "|---|---|---|---|---|---|---|"]
    for s in SHAPES:
        count, parameters, flops, seconds = muon(s)
        shares = [seconds / (step(s, NOW) * tokens / s.N) for tokens in MUON_TOKENS]
        lines.append(f"| {s.name} | {count} | {parameters / 1e6:.0f} M | {flops / 1e12:.2f} | {1e3 * seconds:.1f} | "
                     + " | ".join(f"{100 * share:.1f} %" for share in shares) + " |")
    return "\n".join(lines) + "\n"


HEAD = """# Every kernel's roofline, at the sizes of the benchmarks

Written by `scripts/roofline.py`; a test holds this page to it. **Nothing here was measured by this project.** Each figure is
arithmetic: the bytes that a kernel must move over 4.3 TB/s, the flops it must do over 790 TFLOP/s, of an activation the
instructions that the schedulers must issue, one a clock each at 1.83 GHz; the largest of these.
Those two rates are what an H200 is known to reach in a copy and in a large bf16 matmul, below the data sheet's 4.8 TB/s
and 989.5 TFLOP/s. An H100 has the same processor and a slower memory: its step, at 3.0 TB/s, stands beside an H200's in the
first table; all else here is an H200's. `scripts/gpu_check.sh` measures on a GPU; a kernel's measured time over its time here
is what is left to gain, and none can be below it unless its data stayed in the 50 MB of L2.

Not in it: launches (about 2 us each where neither a CUDA graph hides them nor a host that is ahead of the GPU, as it is in
training), the tail of the last wave of blocks, and attention's own ceiling, which is lower than a matmul's on this design: see
[attention-sm80.md](attention-sm80.md). Recomputation adds the forward rows of what it makes again, once more.
"""


def page():
    lines = [HEAD, before_and_now(), muon_table(), rope()]
    for s in SHAPES:
        lines += ["\n".join(table_of(s)), ""]
    return "\n".join(lines).rstrip() + "\n"


def main():
    return write_or_check(page(), PAGE, sys.argv[1:] == ["--check"], "docs/internals/kernels.md is not what scripts/roofline.py writes: "
                          "scripts/roofline.py >docs/internals/kernels.md")


if __name__ == "__main__":
    sys.exit(main())
