#!/usr/bin/env python3
"""Counts the machine instructions that an activation's kernels take for an element, in bf16, for
docs/internals/kernels.md.

    cuobjdump -sass FILE | scripts/count_sass.py      or what nvdisasm says of a cubin

Counted are kernels for whole, aligned rows without an amax: all instructions of a kernel without a loop; the loop of a
kernel that sums columns. A thread stores 8 elements at a time (16 bytes), in a gated backward 8 of each half; SwiGLU's
elements are its outputs. Exit status 1 where a forward exceeds its limit, branches, calls or loads less than 16 bytes
at a time; where a count for sm_90a is not scripts/roofline.py's; where there are no such kernels.

An element of a pointwise forward moves 4 bytes. An H200 has 4 schedulers on each of 132 multiprocessors, and a
scheduler issues one instruction a clock, for 32 elements: at 1.83 GHz these are 28 instructions an element in the time
in which 4.3 TB/s move its 4 bytes. GELU by the error function has 19 instructions.
"""
import re
import sys

from hopper_overlap import ALWAYS, kernels
from roofline import INSTRUCTIONS

NAME = re.compile(r"(?:Function : |\.text\.)_Z\d+((?:gelu|gelu_erf|squared_relu|swiglu|geglu)_(?:forward|backward|backward_sums)_kernel)ILb0ELb1EE")
FORWARD_MAX, FORWARD_MAX_OF = 16, {"gelu_erf_forward_kernel": 20}
# The kernels that roofline.py's activations run: with sums of columns where the model has biases.
ROOFLINE = {"gelu_forward_kernel": "gelu forward", "gelu_backward_sums_kernel": "gelu backward", "swiglu_forward_kernel": "swiglu forward",
            "swiglu_backward_kernel": "swiglu backward"}
ROOFLINE_TARGET = re.compile(r"(?:\.target\s+|arch = |code for )sm_90a\b")  # in nvdisasm's and cuobjdump's words
DETOUR = re.compile(r"\b(?:BRA|BRX|CALL|BSSY|BSYNC)\b|\bLDG\.E(?!\.128\b)")


def range_of(kernel):
    """Returns the first and last instruction of the longest loop that stores elements, or, without such a loop, of
    the kernel up to its exit."""
    loops = []
    for last in range(len(kernel.code)):
        first = kernel.target(last)
        if first is not None and first < last and any("STG.E.128" in text for text in kernel.code[first:last]):
            loops.append((last - first, first, last))
    if loops:
        return max(loops)[1:]
    return 0, next(i for i, text in enumerate(kernel.code) if ALWAYS.match(text) and "EXIT" in text)


def count(kernel):
    """Returns a thread's (instructions, elements): all instructions of the range, which branches nowhere but out of
    a loop."""
    first, last = range_of(kernel)
    part = kernel.code[first:last + 1]
    return len(part), 8 * sum("STG.E.128" in text for text in part)


def complaints(name, kernel, each, listed):
    """Yields what is wrong with a kernel. each: its instructions an element; listed: what scripts/roofline.py has,
    or None."""
    if "forward" in name and each > FORWARD_MAX_OF.get(name, FORWARD_MAX):
        yield f"more than {FORWARD_MAX_OF.get(name, FORWARD_MAX)}"
    if "forward" in name:
        first, last = range_of(kernel)
        yield from (f"'{text}'" for text in kernel.code[first:last + 1] if DETOUR.search(text))
    if listed is not None and abs(each - listed) >= 0.1:
        yield f"scripts/roofline.py has {listed}"


def main():
    """Prints a line for each kernel; returns the exit status."""
    lines = sys.stdin.readlines()
    found, bad = kernels(lines, NAME, lambda match: match[1]), False
    of_roofline = ROOFLINE if any(map(ROOFLINE_TARGET.search, lines)) else {}
    for name, kernel in sorted(found.items()):
        instructions, stored = count(kernel)
        elements = stored // 2 if name.startswith(("swiglu_backward", "geglu_backward")) else stored
        each = instructions / elements
        wrong = list(complaints(name, kernel, each, INSTRUCTIONS.get(of_roofline.get(name))))
        bad = bad or bool(wrong)
        print(f"{name}: {instructions} instructions for {elements} elements, {each:.1f} each" + "".join(f"; {text}" for text in wrong))
    if not found:
        print("count_sass.py: no activation's kernel in the input", file=sys.stderr)
    return 1 if bad or not found else 0


if __name__ == "__main__":
    sys.exit(main())
