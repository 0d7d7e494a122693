#!/usr/bin/env python3
"""Shows from the machine code of Hopper's attention whether softmax runs beside the tensor cores where the sources put
it, and how many instructions a warp issues in a step.

    cuobjdump -sass FILE | scripts/hopper_overlap.py      or what nvdisasm says of a cubin

ptxas moves a wait for a product up past all instructions that don't depend on the product. What the sources put between
two waits then comes after both waits, while the tensor cores have nothing to do. So no exponential may come behind the
second wait after a product has begun. Exit status 1 where one does, where products in flight or idle multiplications
are not as expected below, or where there is no such kernel.

A step is the shortest way through the shortest loop that has products and exponentials: one tile of keys (of queries,
in backward) that no mask touches. scripts/hopper_ceiling.py has these counts.
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
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE\s+gsb0,\s*0x([0-9a-f]+)")

# Products of this warpgroup that are in flight as each product of a step begins, by head dim. Forward's products: S and
# O += P V. Backward's up to head dim 128: dQ, dK, S of the next step, dP, dV; at 256: S, dP, then dV, dQ and dK.
PRODUCTS_IN_FLIGHT = {"sm90_forward_kernel": {64: [0, 1], 96: [0, 1], 128: [0, 1], 256: [0, 1]},
                      "sm90_backward_kernel": {64: [0, 1, 2, 1, 1], 96: [1, 2, 2, 1, 1], 128: [0, 1, 2, 1, 1], 256: [0, 1, 0, 1, 2]}}
# Multiplications allowed while no product is in flight. At head dim 256 O is rescaled while S is multiplied; 8 or 9 of
# 128 multiplications come before S begins.
IDLE_MULTIPLICATIONS = {("sm90_forward_kernel", 256): 16}


class Kernel:
    def __init__(self):
        self.code, self.at = [], {}  # instructions; the index of each label and address

    def target(self, i):
        match = BRANCH.search(self.code[i])
        return match and self.at.get(match[1] or int(match[2], 16))

    def exponentials(self):
        """Returns the numbers of exponentials before and after the second wait that follows a product's begin."""
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
        """Returns the number of instructions on the shortest way from `first` to `last`, both counted; None: there
        is no way."""
        steps, queue = {first: 1}, collections.deque([first])
        while queue:
            i = queue.popleft()
            for j in (self.target(i), None if ALWAYS.match(self.code[i]) else i + 1):
                if j is not None and first <= j <= last and j not in steps:
                    steps[j] = steps[i] + 1
                    queue.append(j)
        return steps.get(last)

    def loop(self):
        """Returns the first and the last instruction of the shortest loop that has products and exponentials; None:
        there is none."""
        loops = []
        for last in range(len(self.code)):
            first = self.target(last)
            if first is not None and first <= last and all(any(word in text for text in self.code[first:last + 1])
                                                           for word in ("HGMMA", "MUFU.EX2")):
                loops.append((last - first, first, last))
        return min(loops)[1:] if loops else None

    def step(self):
        loop = self.loop()
        return self.way(*loop) if loop else None

    def flight(self):
        """Returns, of a step, the products in flight as each product begins, and the multiplications while none is
        in flight. A product ends no later than a wait says."""
        first, last = self.loop() or (0, -1)
        in_flight, begun, idle = 0, [], 0
        for _ in range(2):  # the second turn begins with what the first leaves in flight
            begun, idle, opened = [], 0, False
            for text in self.code[first:last + 1]:
                wait = WAIT.search(text)
                if "HGMMA" in text:
                    begun += [] if opened else [in_flight]
                    opened = "gsb" not in text
                    in_flight += not opened
                elif wait:
                    in_flight = min(in_flight, int(wait[1], 16))
                elif text.startswith("FMUL") and not in_flight and not opened:
                    idle += 1
        return begun, idle


def kernels(lines, pattern, key):
    """Returns {key(match): Kernel} of the kernels whose first line matches the pattern."""
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
    # (kernel, head dim, whether tables name each query's first key)
    bad, found = False, kernels(sys.stdin, KERNEL, lambda match: (match[1], int(match[2]), match[3] == "1"))
    for (name, head_dim, spans), kernel in sorted(found.items()):
        beside, after = kernel.exponentials()
        begun, idle = kernel.flight()
        wrong = [f"expected {PRODUCTS_IN_FLIGHT[name][head_dim]}"] if begun != PRODUCTS_IN_FLIGHT[name][head_dim] else []
        if idle > IDLE_MULTIPLICATIONS.get((name, head_dim), idle):
            wrong.append(f"more than {IDLE_MULTIPLICATIONS[name, head_dim]}")
        bad = bad or after > 0 or bool(wrong)
        print(f"{name} {head_dim}{' with tables' if spans else ''}: {beside} exponentials before the second wait, {after} after it; "
              f"{kernel.step() or 'no'} instructions a step, {len(kernel.code)} in all; products in flight as each begins: {begun}, multiplications "
              f"while none is: {idle}{''.join('; ' + each for each in wrong)}")
    if not found:
        print("hopper_overlap.py: no kernel of Hopper's attention in the input", file=sys.stderr)
    return 1 if bad or not found else 0


if __name__ == "__main__":
    sys.exit(main())
