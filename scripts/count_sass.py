#!/usr/bin/env python3
"""How many instructions the machine code of an activation's kernels has for an element, in bf16: docs/gpu/kernels.md uses them.

    cuobjdump -sass FILE | scripts/count_sass.py      or what nvdisasm says of a cubin

Counted are whole, aligned rows without an amax: in a kernel without a loop all instructions from its beginning to its end, in one
that sums columns those of the shortest way through its loop. A thread stores 8 elements at a time (16 bytes), of a gated backward
8 of each half; SwiGLU's elements are those of its output. Exit status 1 where a forward needs more than 16, or where there are
no such kernels.
"""
import re
import sys

from hopper_overlap import ALWAYS, kernels

NAME = re.compile(r"(?:Function : |\.text\.)_Z\d+((?:gelu|squared_relu|swiglu|geglu)_(?:forward|backward|backward_sums)_kernel)ILb0ELb1EE")
FORWARD_MOST = 16


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


def main():
    """Prints a line for each kernel."""
    found, bad = kernels(sys.stdin, NAME, lambda match: match[1]), False
    for name, kernel in sorted(found.items()):
        instructions, stored = count(kernel)
        elements = stored // 2 if name.startswith(("swiglu_backward", "geglu_backward")) else stored
        each = instructions / elements
        bad = bad or ("forward" in name and each > FORWARD_MOST)
        print(f"{name}: {instructions} instructions for {elements} elements, {each:.1f} each")
    if not found:
        print("count_sass.py: no activation's kernel in this", file=sys.stderr)
    return 1 if bad or not found else 0


if __name__ == "__main__":
    sys.exit(main())
