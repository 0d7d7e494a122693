#!/usr/bin/env python3
"""What the machine code of Hopper's attention shows: whether softmax runs beside the tensor cores where the sources put it,
and how many instructions a warp issues in a step.

    cuobjdump -sass FILE | scripts/hopper_overlap.py      or what nvdisasm says of a cubin

ptxas moves a wait for a product up past all that doesn't depend on it. What stands between two waits then comes after them
both, while the tensor cores have nothing to do. So: after a product has begun, no exponential may come behind the second wait.
Exit status 1 where one does, or where there is no such kernel.

A step is the shortest way through the shortest loop that has products and exponentials: one tile of keys (of queries, in
backward) that no mask touches. scripts/hopper_ceiling.py has these counts.
"""
import collections
import re
import sys

KERNEL = re.compile(r"(?:Function : |\.text\.)_Z\d+(sm90_(?:forward|backward)_kernel)I\d+sm90_\w+?_planILi(\d+)E(?:Lb([01])E)?E")
OTHER = re.compile(r"Function : |\.section\s+\.text\.|//-+ \.text\.")
LABEL = re.compile(r"\s*(\.L_x_\d+):")
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
BRANCH = re.compile(r"\bBRA\b.*?(?:(\.L_x_\d+)|0x([0-9a-f]+))")
ALWAYS = re.compile(r"(BRA|EXIT|RET)\b(?!.*\bU?P\d)")


class Kernel:
    def __init__(self):
        self.code, self.at = [], {}  # instructions; the index of each label and address

    def target(self, i):
        match = BRANCH.search(self.code[i])
        return match and self.at.get(match[1] or int(match[2], 16))

    def exponentials(self):
        """Those that run beside a product or before any, and those after it."""
        counts, waits = [0, 0], 0
        for text in self.code:
            if "HGMMA" in text:
                waits = 0
            elif "WARPGROUP.DEPBAR" in text:
                waits += 1
            elif "MUFU.EX2" in text:
                counts[waits > 1] += 1
        return counts

    def way(self, first, last):
        """Instructions of the shortest way from one to another."""
        steps, queue = {first: 1}, collections.deque([first])
        while queue:
            i = queue.popleft()
            for j in (self.target(i), None if ALWAYS.match(self.code[i]) else i + 1):
                if j is not None and first <= j <= last and j not in steps:
                    steps[j] = steps[i] + 1
                    queue.append(j)
        return steps.get(last)

    def step(self):
        loops = []
        for last in range(len(self.code)):
            first = self.target(last)
            if first is not None and first <= last and all(any(word in text for text in self.code[first:last + 1])
                                                           for word in ("HGMMA", "MUFU.EX2")):
                loops.append((last - first, first, last))
        return self.way(*min(loops)[1:]) if loops else None


def kernels(lines, pattern, key):
    """{key(match): Kernel} of the kernels whose first line matches the pattern."""
    found, kernel = {}, None
    for line in lines:
        label, instruction = LABEL.match(line), INSTRUCTION.search(line)
        if OTHER.search(line):
            match = pattern.search(line)
            kernel = found.setdefault(key(match), Kernel()) if match else None
        elif kernel and label:
            kernel.at[label[1]] = len(kernel.code)
        elif kernel and instruction:
            kernel.at[int(instruction[1], 16)] = len(kernel.code)
            kernel.code.append(instruction[2])
    return found


def main():
    # kernel, head dim, whether first keys have tables
    late, found = False, kernels(sys.stdin, KERNEL, lambda match: (match[1], int(match[2]), match[3] == "1"))
    for (name, head_dim, spans), kernel in sorted(found.items()):
        beside, after = kernel.exponentials()
        late = late or after > 0
        print(f"{name} {head_dim}{' with tables' if spans else ''}: {beside} exponentials before the second wait, {after} after it; "
              f"{kernel.step() or 'no'} instructions a step")
    if not found:
        print("hopper_overlap.py: no kernel of Hopper's attention in this", file=sys.stderr)
    return 1 if late or not found else 0


if __name__ == "__main__":
    sys.exit(main())
