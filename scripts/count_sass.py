#!/usr/bin/env python3
"""How many instructions the machine code of an activation's kernels has for an element, in bf16: docs/internals/kernels.md uses them.

    cuobjdump -sass FILE | scripts/count_sass.py      or what nvdisasm says of a cubin

Counted are whole, aligned rows without an amax: in a kernel without a loop all instructions from its beginning to its end, in one
that sums columns those of its loop. A thread stores 8 elements at a time (16 bytes), of a gated backward 8 of each half; SwiGLU's
elements are those of its output. Exit status 1 where a forward needs more than its limit, branches, calls or loads by less than
16 bytes; where a count for sm_90a is not that of scripts/roofline.py; where there are no such kernels.

An element of a pointwise forward moves 4 bytes. At 4.3 TB/s the schedulers of an H200, 4 on each of 132 multiprocessors, issue one
instruction a clock for 32 elements: at 1.83 GHz 28 an element in that time. GELU by the error function has 19 of them.
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
ROOFLINE_TARGET = re.compile(r"(?:\.target\s+|arch = |code for )sm_90a\b")  # as nvdisasm and cuobjdump say it
DETOUR = re.compile(r"\b(?:BRA|BRX|CALL|BSSY|BSYNC)\b|\bLDG\.E(?!\.128\b)")


def range_of(kernel):
    """The first and last instruction of the longest loop that stores elements, or of the kernel's main part."""
    loops = []
    for last in range(len(kernel.code)):
        first = kernel.target(last)
        if first is not None and first < last and any("STG.E.128" in text for text in kernel.code[first:last]):
            loops.append((last - first, first, last))
    if loops:
        return max(loops)[1:]
    return 0, next(i for i, text in enumerate(kernel.code) if ALWAYS.match(text) and "EXIT" in text)


def count(kernel):
    """(instructions, elements) of a thread: all of the range, which has no ways past each other but a loop's exit."""
    first, last = range_of(kernel)
    part = kernel.code[first:last + 1]
    return len(part), 8 * sum("STG.E.128" in text for text in part)


def complaints(name, kernel, each, listed):
    """What is wrong with a kernel of so many instructions an element; listed: how many scripts/roofline.py has, or None."""
    if "forward" in name and each > FORWARD_MAX_OF.get(name, FORWARD_MAX):
        yield f"more than {FORWARD_MAX_OF.get(name, FORWARD_MAX)}"
    if "forward" in name:
        first, last = range_of(kernel)
        yield from (f"'{text}'" for text in kernel.code[first:last + 1] if DETOUR.search(text))
    if listed is not None and abs(each - listed) >= 0.1:
        yield f"scripts/roofline.py has {listed}"


def main():
    """Prints a line for each kernel."""
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
        print("count_sass.py: no activation's kernel in this", file=sys.stderr)
    return 1 if bad or not found else 0


if __name__ == "__main__":
    sys.exit(main())
