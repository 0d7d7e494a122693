#!/usr/bin/env python3
"""Whether softmax runs beside the tensor cores in the machine code of Hopper's attention, where the sources put it.

    cuobjdump -sass FILE | scripts/hopper_overlap.py      or what nvdisasm says of a cubin

ptxas moves a wait for a product up past all that doesn't depend on it. What stands between two waits then comes after them
both, while the tensor cores have nothing to do. So: after a product has begun, no exponential may come behind the second wait.
Exit status 1 where one does, or where there is no such kernel.
"""
import re
import sys

KERNEL = re.compile(r"(?:Function : |\.text\.)_Z\d+(sm90_(?:forward|backward)_kernel)I\d+sm90_\w+?_planILi(\d+)EEE")
OTHER = re.compile(r"Function : |\.section\s+\.text\.|//-+ \.text\.")


def exponentials(lines):
    """{(kernel, head dim): [exponentials that run beside a product or before any, exponentials after]}"""
    found, counts, waits = {}, None, 0
    for line in lines:
        if OTHER.search(line):
            match = KERNEL.search(line)
            counts = found.setdefault((match[1], int(match[2])), [0, 0]) if match else None
            waits = 0
        elif counts is None:
            continue
        elif "HGMMA" in line:
            waits = 0
        elif "WARPGROUP.DEPBAR" in line:
            waits += 1
        elif "MUFU.EX2" in line:
            counts[waits > 1] += 1
    return found


def main():
    found = exponentials(sys.stdin)
    for (kernel, head_dim), (beside, after) in sorted(found.items()):
        print(f"{kernel} {head_dim}: {beside} exponentials before the second wait, {after} after it")
    if not found:
        print("hopper_overlap.py: no kernel of Hopper's attention in this", file=sys.stderr)
    return 1 if not found or any(after for _, after in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
