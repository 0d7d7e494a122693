#!/usr/bin/env python3
"""What make bench promises, beside what it measured: ratios of the least times of the rounds that were run in turn.

  scripts/bench_report.py FOLDER     reads FOLDER/step-PRECISION-ROUND.json, of bench_step, FOLDER/generate-PRECISION.txt and
                                     FOLDER/attention-PRECISION.txt

A ratio that misses its bound is marked; the exit status stays 0, as a busy machine misses them too.
"""
import glob
import json
import os
import re
import sys

# On AMX tiles the matmuls are so fast that all else weighs more. The bounds of a step against its own matmuls; of full
# recomputation, a forward pass of the blocks more, which there has 23 % of a step (GPT-2 124M, B4 T1024); and of
# attention under a mask, where tiles that an edge of it cuts cost whole.
STEP_OVER_MATMULS = {"amx": 1.5, "vectors": 1.2}
FULL_OVER_NONE = {"amx": 1.3, "vectors": 1.2}
MASKED_OVER_VISIBLE = {"amx": 1.5, "vectors": 1.3}


def read_rounds(folder, precision):
    """The JSON of each round, in order."""
    paths = sorted(glob.glob(os.path.join(glob.escape(folder), f"step-{precision}-*.json")))
    rounds = []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            rounds.append(json.load(file))
    return rounds


def kind_of(rounds):
    """What multiplies, as the bounds have it."""
    return "amx" if "AMX" in rounds[0]["matmul"] else "vectors"


def step_ms(rounds, case):
    """The least time of a case's step of all rounds: what else a machine does only adds to it."""
    return min(entry["step_ms"] for r in rounds for entry in r["cases"] if entry["case"].startswith(case))


def rows_of(rounds, precision):
    """(what, measured, bound, whether the bound is an upper one) of one precision."""
    step, kind = step_ms(rounds, "none"), kind_of(rounds)
    matmuls = min(r["matmuls_ms"] for r in rounds)
    yield f"{precision}: step / its matmuls alone", step / matmuls, STEP_OVER_MATMULS[kind], True
    yield f"{precision}: full recomputation / none", step_ms(rounds, "full") / step, FULL_OVER_NONE[kind], True
    yield f"{precision}: selective (norm, activation) / none", step_ms(rounds, "selective") / step, 1.03, True
    planned = max(entry["allocated_bytes"] / entry["planned_bytes"] for r in rounds for entry in r["cases"])
    yield f"{precision}: allocated / planned bytes", planned, 1.0, True


def decode_ratio(folder, precision):
    """Decoding's share of triad's bandwidth, of the models that bench_generate ran the least; None where it did not run."""
    try:
        with open(os.path.join(folder, f"generate-{precision}.txt"), encoding="utf-8") as file:
            shares = re.findall(r"decode reads .* triad .*: ([0-9]+) %", file.read())
    except FileNotFoundError:
        return None
    return min(map(float, shares)) / 100 if shares else None


def masked_ratios(folder, precision):
    """(mask, attention's time in that of causal attention times the visible area) of bench_attention, where it ran."""
    try:
        with open(os.path.join(folder, f"attention-{precision}.txt"), encoding="utf-8") as file:
            rows = re.findall(r"^masked +(documents|window) .* both ([0-9.]+)$", file.read(), re.M)
    except FileNotFoundError:
        return []
    return [(mask, float(ratio)) for mask, ratio in rows]


def report(folder):
    """Every row that the folder has figures for."""
    rounds = {precision: read_rounds(folder, precision) for precision in ("fp32", "bf16")}
    rows = []
    if rounds["fp32"] and rounds["bf16"]:
        rows.append(("bf16 / fp32 tokens a second", step_ms(rounds["fp32"], "none") / step_ms(rounds["bf16"], "none"), 1.75, False))
    for precision, some in rounds.items():
        rows += rows_of(some, precision) if some else []
        share = decode_ratio(folder, precision)
        rows += [(f"{precision}: attention, {mask} / visible area", ratio, MASKED_OVER_VISIBLE[kind_of(some)] if some else 1.3, True)
                 for mask, ratio in masked_ratios(folder, precision)]
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
