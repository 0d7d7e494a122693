#!/usr/bin/env python3
"""Prints registers, shared memory and spills of every kernel, a line each, from what `nvcc -Xptxas -v` printed.

    scripts/ptxas_table.py [--ptxas 12.4] ptxas_bf16_sm_80.log ...

A kernel's build is the BUILD of its file's name, ptxas_BUILD.log, and the architecture. Kernels sm90_* are listed only
for sm_90a, since they are empty for other architectures. Exit status 1 where a kernel spills more than SPILLS_ALLOWED
or, with --ptxas, SPILLS_BY_PTXAS allow; where a kernel sm90_* has a stack, in which its accumulators would lie; or
where ptxas says (C75xx) that a kernel runs wgmma one by one or takes no setmaxnreg.
"""
import os
import re
import subprocess
import sys

ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
# Bytes of spill stores that are allowed, by how 'NAME BUILD' begins; the first match counts.
# docs/internals/attention-sm80.md states them. The last argument of flash_*'s plans is 0 for plainly causal attention,
# 1 with spans, 2 where spans and a softcap are chosen at run time. One or two words may spill: avoiding it would cost a
# block on a multiprocessor.
SPILLS_ALLOWED = {r"rope_kernel<true, true> bf16_sm_1[02]0$": 4, r"fp8_tile_kernel<squared_relu_forward_source> fp32_sm_120$": 8,
                  r"flash_.* fp32_sm_(80|86|89|90a)$": 0, r"flash_.* fp32_sm_10\d$": 8, r"flash_.* fp32_sm_12\d$": 28,
                  r"flash_forward_kernel<.*, 0> > \w*sm_(80|90a)$": 0, r"flash_forward_kernel<.*, 0> >": 8,
                  r"flash_forward.* \w*sm_1[02]\d$": 8, r"flash_forward.* \w*sm_8\d$": 28, "flash_forward": 68,
                  r"flash_backward_\w+<.*, [01]> > \w*sm_10\d$": 48, r"flash_backward_\w+<.*, [01]> > \w*sm_12\d$": 64,
                  r"flash_backward_.* \w*sm_1[02]\d$": 96, r"flash_backward_\w+<.*, 0> >": 120, "flash_backward": 172, "": 0}
# What other toolkits' ptxas may spill besides: 12.4's of what nvcc 13.5 makes of the source.
SPILLS_BY_PTXAS = {"12.4": {r"adamw_kernel<false> bf16": 8, r"unfused_softmax_backward_kernel<1> bf16": 4,
                            r"flash_forward_kernel<.*<128, false, false, 1> > bf16": 96,
                            r"flash_forward_kernel<.*<128, true, \w+, 0> > bf16": 68,
                            r"flash_forward_kernel<.*<256, .*fp32": 16, r"flash_forward_kernel<.*<64, true, .*fp32": 4},
                   "13.5": {r"flash_backward_\w+<.*, [01]> > bf16_sm_100$": 64, r"flash_backward_\w+<.*, 2> > bf16_sm_80$": 180,
                            r"flash_forward_kernel<.*<96, .*, 0> > bf16_sm_80$": 8}}
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


def kernels_of(path):
    """Returns (mangled name, architecture, registers, static shared memory, stack, spill stores, spill loads) of
    each kernel, in bytes."""
    name, architecture, spills, found = None, None, (0, 0, 0), []
    with open(path, encoding="utf-8", errors="replace") as log:
        for line in log:
            if match := ENTRY.search(line):
                name, architecture = match.groups()
            elif match := SPILLS.search(line):
                spills = tuple(int(n) for n in match.groups())
            elif (match := USED.search(line)) and name:
                shared = SHARED.search(line)
                found.append((name, architecture, int(match[1]), int(shared[1]) if shared else 0, *spills))
                name = None
    return found


def wgmma_warnings_of(path):
    """Returns ptxas's warnings of a kernel's use of wgmma, as whole lines."""
    with open(path, encoding="utf-8", errors="replace") as log:
        return [line.strip() for line in log if "(C75" in line]


def plain_names(names):
    """Returns the names without mangling and parameters, as norm_kernel<64, false>; as they are where there is no
    c++filt."""
    try:
        text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return names
    without_parameters = (re.sub(r"\(.*", "", re.sub(r"\((?:int|bool|unsigned int|\w+_scores)\)", "", n)) for n in text.splitlines())
    return [re.sub(r"^void ", "", n) for n in without_parameters]


def main():
    rows, warnings, paths, allowed_of = [], [], sys.argv[1:], SPILLS_ALLOWED
    if paths[:1] == ["--ptxas"]:
        allowed_of = {**SPILLS_BY_PTXAS[paths[1]], **SPILLS_ALLOWED}
        paths = paths[2:]
    for path in paths:
        variant = os.path.basename(path).removeprefix("ptxas_").removesuffix(".log")
        kernels = kernels_of(path)
        if not kernels:
            sys.exit(f"ptxas_table.py: {path}: no kernel in it; expected the output of nvcc -Xptxas -v")
        names = plain_names([k[0] for k in kernels])
        rows += [(name, variant if variant.endswith(k[1]) else f"{variant}_{k[1]}", *k[2:]) for name, k in zip(names, kernels)
                 if k[1] == "sm_90a" or not name.startswith("sm90_")]
        warnings += [f"{variant}: {line}" for line in wgmma_warnings_of(path)]
    width = max([len("kernel")] + [len(r[0]) for r in rows])
    print(f"{'kernel':{width}} {'build':16} {'registers':>9} {'shared':>7} {'stack':>6} {'spill stores':>12} {'spill loads':>11}")
    for name, variant, *numbers in sorted(rows):
        print(f"{name:{width}} {variant:16} {numbers[0]:9} {numbers[1]:7} {numbers[2]:6} {numbers[3]:12} {numbers[4]:11}")
    print(f"{len(rows)} kernels; {sum(1 for r in rows if r[5] + r[6] > 0)} spill. Shared memory: static bytes only.")
    too_many = 0
    for name, variant, *numbers in sorted(rows):
        allowed = next(most for beginning, most in allowed_of.items() if re.match(beginning, f"{name} {variant}"))
        if numbers[3] > allowed:
            print(f"ptxas_table.py: {name} of {variant} spills {numbers[3]} bytes; at most {allowed} are allowed", file=sys.stderr)
            too_many = 1
        if name.startswith("sm90_") and numbers[2] > 0:
            print(f"ptxas_table.py: {name} of {variant} has {numbers[2]} bytes of stack", file=sys.stderr)
            too_many = 1
    for line in warnings:
        print(f"ptxas_table.py: {line}", file=sys.stderr)
    return 1 if too_many or warnings else 0


if __name__ == "__main__":
    sys.exit(main())
