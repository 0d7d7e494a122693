#!/usr/bin/env python3
"""Prints the ratios that `make bench` promises, measured, beside their bounds. Times in ratios are the least of all
rounds.

  scripts/bench_report.py FOLDER     reads step-PRECISION-ROUND.json, of bench_step, generate-PRECISION.txt and
                                     attention-PRECISION.txt there

A ratio that misses its bound is marked. The exit status stays 0, since a busy machine misses bounds, too.
"""
import glob
import json
import os
import re
import sys

# Bounds by what multiplies: on AMX tiles matmuls are so fast that all else weighs more. STEP_OVER_MATMULS: a step
# against its own matmuls. FULL_OVER_NONE: full recomputation, which adds a forward pass of the blocks, with AMX 23 % of
# a step (GPT-2 124M, B 4, T 1024). MASKED_OVER_VISIBLE: attention under a mask, where a tile that the mask's edge cuts
# costs as much as a whole tile.
STEP_OVER_MATMULS = {"amx": 1.5, "vectors": 1.2}
FULL_OVER_NONE = {"amx": 1.3, "vectors": 1.2}
MASKED_OVER_VISIBLE = {"amx": 1.5, "vectors": 1.3}
# FP8 attention, which decodes codes and rounds P and dS beside the same products: 0.91 to 0.99 by vectors (EPYC Zen 4,
# 2026-11-29), 0.73 to 0.90 there with products that take no time, as AMX comes near to.
FP8_OVER_FLASH = {"amx": 0.6, "vectors": 0.8}


def read_rounds(folder, precision):
    """Returns the JSON of each round, in order."""
    paths = sorted(glob.glob(os.path.join(glob.escape(folder), f"step-{precision}-*.json")))
    rounds = []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            rounds.append(json.load(file))
    return rounds


def kind_of(rounds):
    """Returns what multiplies, a key of the bounds."""
    return "amx" if "AMX" in rounds[0]["matmul"] else "vectors"


def step_ms(rounds, case):
    """Returns the least time of a case's step over all rounds: other work on the machine only adds to it."""
    return min(entry["step_ms"] for r in rounds for entry in r["cases"] if entry["case"].startswith(case))


def rows_of(rounds, precision):
    """Yields (what, measured, bound, whether the bound is an upper one) for one precision."""
    step, kind = step_ms(rounds, "none"), kind_of(rounds)
    matmuls = min(r["matmuls_ms"] for r in rounds)
    yield f"{precision}: step / its matmuls alone", step / matmuls, STEP_OVER_MATMULS[kind], True
    yield f"{precision}: full recomputation / none", step_ms(rounds, "full") / step, FULL_OVER_NONE[kind], True
    yield f"{precision}: selective (norm, activation) / none", step_ms(rounds, "selective") / step, 1.03, True
    planned = max(entry["allocated_bytes"] / entry["planned_bytes"] for r in rounds for entry in r["cases"])
    yield f"{precision}: allocated / planned bytes", planned, 1.0, True


def decode_ratio(folder, precision):
    """Returns the least share of triad's bandwidth at which a model of bench_generate decodes; None without
    bench_generate's figures."""
    try:
        with open(os.path.join(folder, f"generate-{precision}.txt"), encoding="utf-8") as file:
            shares = re.findall(r"decode reads .* triad .*: ([0-9]+) %", file.read())
    except FileNotFoundError:
        return None
    return min(map(float, shares)) / 100 if shares else None


def masked_ratios(folder, precision):
    """Returns (mask, ratio) of each mask of bench_attention: masked attention's time to causal attention's time,
    scaled to the visible area. Empty where bench_attention did not run."""
    try:
        with open(os.path.join(folder, f"attention-{precision}.txt"), encoding="utf-8") as file:
            rows = re.findall(r"^masked +(documents|window) .* both ([0-9.]+)$", file.read(), re.M)
    except FileNotFoundError:
        return []
    return [(mask, float(ratio)) for mask, ratio in rows]


def fp8_ratio(folder):
    """Returns the least ratio of FP8 attention's speed to flash attention's in bf16; None without bench_attention's
    figures."""
    try:
        with open(os.path.join(folder, "attention-bf16.txt"), encoding="utf-8") as file:
            ratios = re.findall(r"^fp8 .* both ([0-9.]+)$", file.read(), re.M)
    except FileNotFoundError:
        return None
    return min(map(float, ratios)) if ratios else None


def report(folder):
    """Returns every row that the folder has figures for."""
    rounds = {precision: read_rounds(folder, precision) for precision in ("fp32", "bf16")}
    rows = []
    if rounds["fp32"] and rounds["bf16"]:
        rows.append(("bf16 / fp32 tokens a second", step_ms(rounds["fp32"], "none") / step_ms(rounds["bf16"], "none"), 1.75, False))
    for precision, some in rounds.items():
        rows += rows_of(some, precision) if some else []
        share = decode_ratio(folder, precision)
        rows += [(f"{precision}: attention, {mask} / visible area", ratio, MASKED_OVER_VISIBLE[kind_of(some)] if some else 1.3, True)
                 for mask, ratio in masked_ratios(folder, precision)]
        ratio = fp8_ratio(folder) if precision == "bf16" and some else None
        rows += [(f"{precision}: FP8 attention's speed / flash's", ratio, FP8_OVER_FLASH[kind_of(some)], False)] if ratio is not None else []
        rows += [(f"{precision}: decoding / triad bandwidth", share, 0.80, False)] if share is not None else []
    return rows


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__.strip())
    rows = report(sys.argv[1])
    if not rows:
        sys.exit(f"bench_report.py: {sys.argv[1]} has no step-PRECISION-ROUND.json; bench_step --json writes it")
    print(f"{'ratio':<46} {'measured':>9} {'bound':>9}")
    for what, measured, bound, is_upper in rows:
        missed = measured > bound + 5e-4 if is_upper else measured < bound - 5e-4
        print(f"{what:<46} {measured:>9.3f} {'<=' if is_upper else '>='} {bound:>6.2f}{'   missed' if missed else ''}")


if __name__ == "__main__":
    main()
