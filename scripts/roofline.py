#!/usr/bin/env python3
"""What each kernel of the engine can reach at most on an H200, by arithmetic: writes docs/gpu/kernels.md.

  scripts/roofline.py          the page on stdout
  scripts/roofline.py --check  whether docs/gpu/kernels.md is that page

A kernel's time is at least its bytes over the memory's rate and its flops over the tensor cores'. Bytes are those that the
algorithm must move with every array read or written once: what caches save or what is read twice shows as a difference to
the measurement. bf16 activations and weights, fp32 gradients and moments, master weights in two halves of 16 bits.
"""
import os
import sys

BYTES_PER_S, FLOPS_PER_S = 4.3e12, 790e12  # a copy and a large cuBLAS bf16 matmul on random data, on an H200
PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "docs", "gpu", "kernels.md")


class Shape:
    """A preset of config.h at one batch."""

    def __init__(self, name, layers, hidden, heads, groups, ffn, vocabulary, llama, batch, length):
        self.name, self.L, self.C, self.H, self.G, self.F, self.llama = name, layers, hidden, heads, groups, ffn, llama
        self.V = (vocabulary + 127) // 128 * 128
        self.B, self.T, self.D, self.N = batch, length, hidden // heads, batch * length
        self.qkv = (heads + 2 * groups) * self.D
        self.up = 2 * ffn if llama else ffn
        block = self.C * (self.qkv + self.C + self.up + self.F)
        vectors = 2 * self.C if llama else 4 * self.C + self.qkv + self.C + self.up + self.C
        self.parameters = layers * (block + vectors) + self.V * self.C + (self.C if llama else (2 + length) * self.C)


SHAPES = [
    Shape("gpt2-124m", 12, 768, 12, 12, 3072, 50257, False, 16, 1024),
    Shape("gpt2-1558m", 48, 1600, 25, 25, 6400, 50257, False, 16, 1024),
    Shape("llama3.2-1b", 16, 2048, 32, 8, 8192, 128256, True, 4, 4096),
]


def linears(s):
    """(name, inputs, outputs) of a block's linear layers."""
    return [("qkv", s.C, s.qkv), ("projection", s.C, s.C), ("MLP up", s.C, s.up), ("MLP down", s.F, s.C)]


def matmuls(name, s, inputs, outputs):
    """A linear layer's three products: (N, inputs) times (inputs, outputs). The weight gradient is added to in fp32."""
    flops = 2 * s.N * inputs * outputs
    x, y, w = 2 * s.N * inputs, 2 * s.N * outputs, inputs * outputs
    return [(f"{name} forward", x + y + 2 * w, flops), (f"{name} backward, input", x + y + 2 * w, flops),
            (f"{name} backward, weight", x + y + 8 * w, flops)]


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
        layer.append(("bias gradients of a block", 2 * s.N * (s.qkv + s.C + s.up + s.C), 0))
    layer += [
        ("attention forward", packed + rows + lse, attention_flops),
        # dQ's kernel reads q, k, v, out, dout and writes dq; that of dK and dV reads q, k, v, dout again
        ("attention backward", 3 * packed + 3 * rows + 5 * lse, 2.5 * attention_flops),
    ]
    if s.llama:
        rotated = 2 * s.N * (s.H + s.G) * s.D
        layer += [("rope, forward and backward", 2 * 2 * rotated, 0),
                  ("swiglu forward", 3 * 2 * s.N * s.F, 0), ("swiglu backward", 5 * 2 * s.N * s.F, 0)]
    else:
        layer += [("gelu forward", 2 * 2 * s.N * s.F, 0), ("gelu backward", 3 * 2 * s.N * s.F, 0)]
    table = [(name, s.L, size, flops) for name, size, flops in layer]
    table += [
        ("residual add + norm forward", 2 * s.L, 4 * rows, 0),  # x, what is added, their sum, its norm
        ("norm backward + residual", 2 * s.L + 1, 4 * rows, 0),
        ("embedding forward", 1, 2 * rows, 0),
        ("embedding backward", 1, rows + 8 * min(s.N, s.V) * s.C, 0),
    ]
    table += [(name, 1, size, flops) for name, size, flops in matmuls("head", s, s.C, s.V)]
    table += [
        ("classifier, loss and gradient in place", 1, 2 * 2 * s.N * s.V, 0),
        ("gradients to zero", 1, 4 * s.parameters, 0),
        ("gradient norm", 1, 4 * s.parameters, 0),
        ("AdamW", 1, 28 * s.parameters, 0),  # gradient, parameter and its lower half, two moments read; the last four written
    ]
    return table


def least_seconds(size, flops):
    return max(size / BYTES_PER_S, flops / FLOPS_PER_S)


def table_of(s):
    lines = [f"## {s.name}, B = {s.B}, T = {s.T}", "",
             "| kernel | calls | MB | GFLOP | bound by | least us a call | least ms a step |", "|---|---|---|---|---|---|---|"]
    total = total_flops = 0.0
    for name, calls, size, flops in kernels(s):
        seconds = least_seconds(size, flops)
        total += calls * seconds
        total_flops += calls * flops
        bound = "flops" if flops / FLOPS_PER_S > size / BYTES_PER_S else "bytes"
        lines.append(f"| {name} | {calls} | {size / 1e6:.1f} | {flops / 1e9:.1f} | {bound} | {1e6 * seconds:.1f} | "
                     f"{1e3 * calls * seconds:.2f} |")
    share = total_flops / total
    lines += ["", f"The step: at least {1e3 * total:.1f} ms, {s.N / total / 1e3:.0f} thousand tokens/s at most, "
              f"{total_flops / s.N / 1e9:.2f} GFLOP a token, so no more than {share / 1e12:.0f} TFLOP/s, which is "
              f"{100 * share / 989.5e12:.0f} % MFU against the data sheet's 989.5."]
    return lines


HEAD = """# Every kernel's roofline, at the sizes of the benchmarks

Written by `scripts/roofline.py`; a test holds this page to it. **Nothing here was measured by this project.** Each figure is
arithmetic: the bytes that a kernel must move over 4.3 TB/s, the flops it must do over 790 TFLOP/s, the larger of the two.
Those two rates are what an H200 is known to reach in a copy and in a large bf16 matmul, below the data sheet's 4.8 TB/s
and 989.5 TFLOP/s. `scripts/gpu_check.sh` measures on a GPU; a kernel's measured time over its time here is what
is left to gain, and none can be below it unless its data stayed in the 50 MB of L2.

Not in it: launches (about 2 us each where no CUDA graph hides them), the tail of the last wave of blocks, and attention's
own ceiling, which is lower than a matmul's on this design: see [attention-sm80.md](attention-sm80.md). Recomputation adds
the forward rows of what it makes again, once more.
"""


def page():
    lines = [HEAD]
    for s in SHAPES:
        lines += ["\n".join(table_of(s)), ""]
    return "\n".join(lines).rstrip() + "\n"


def write_or_check(text, path, check, complaint, part=False):
    """Writes the text, or holds a page to it: all of the page, or a part. Returns the exit status."""
    if not check:
        sys.stdout.write(text)
        return 0
    with open(path, encoding="utf-8") as file:
        there = file.read()
    if text in there if part else text == there:
        return 0
    print(complaint)
    return 1


def main():
    return write_or_check(page(), PAGE, sys.argv[1:] == ["--check"], "docs/gpu/kernels.md is not what scripts/roofline.py writes: "
                          "scripts/roofline.py >docs/gpu/kernels.md")


if __name__ == "__main__":
    sys.exit(main())
