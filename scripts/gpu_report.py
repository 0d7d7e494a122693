#!/usr/bin/env python3
"""What scripts/gpu_check.sh needs besides a shell; the standard library alone.

  gpu_report.py data FOLDER          token shards: bytes of this tree's sources, and random tokens for the benchmarks
  gpu_report.py run FOLDER OPTION... runs build/train_gpt into FOLDER; prints its speed as a line of JSON
  gpu_report.py ranks FOLDER ONE RANKS OPTION...
                                     the same by so many ranks of this host, held against the run of one rank in ONE
  gpu_report.py fp8 FOLDER BF16 OPTION...
                                     as run, in FP8, held against the bf16 run in BF16
  gpu_report.py curve CPU GPU [FP32] compares the losses of two runs, step by step; FP32: of bf16 or FP8, by how far CPU's are
                                     from those of that run

The report, RESULTS/gpu_check.json, and what of it is for reading, RESULTS/gpu_check.md:
  gpu_report.py start RESULTS NAME=VALUE...
                                     begins a run on the machine that the values describe; what earlier runs left stays
  gpu_report.py add RESULTS STAGE CHECK STATUS SECONDS LIMIT OWN_LIMIT OUTPUT [--probe]
                                     a command that ended by STATUS after SECONDS, where it had LIMIT of its OWN_LIMIT;
                                     `stopped by SIGNAL` in place of a number: the script was. Its rows are the JSON lines in the
                                     file OUTPUT. --probe: what it looks for may be missing
  gpu_report.py skip RESULTS STAGE CHECK WHY
  gpu_report.py flash_options RESULTS
                                     prints the options by which runs without a start-up check leave wgmma out: where a
                                     start-up check failed or, if none was made, attention's op test

docs/gpu/measured.md, from the reports that were published:
  gpu_report.py publish RESULTS [FOLDER]   puts a report into FOLDER, docs/gpu if left out, and writes the page anew
  gpu_report.py page [--check] [FOLDER]    the page on stdout, or whether FOLDER has that page
"""
import array
import glob
import json
import math
import os
import random
import re
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile

from written_page import tables_as_blocks, write_or_check

TRAIN_GPT = os.environ.get("TRAIN_GPT", "build/train_gpt")
DOCS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "docs", "gpu")
WARM_UP = 4  # steps: plans, graphs and clocks settle
# nats between the cpu's and the GPU's loss at any of 50 steps in fp32: sums in another order at first, then what Adam makes of
# it, whose steps are as long for small gradients as for large ones.
CURVE_TOLERANCE = 2e-3
# How far the GPU's losses in bf16 and in FP8 may be from fp32's, by how far the cpu target's are. Four seeds' ratios in bf16
# were 0.9 to 1.1 (test/test_cuda_engine.py).
CURVE_RATIO = {"fp8": 2, "bf16": 1.5}
CURVE_FLOOR = 2 ** -10  # of a loss: half of what bf16 rounds a number by; the cpu target's may be nearer to fp32's by chance
# The largest relative difference of a loss or a gradient norm of any step between one rank and several: gradients added in
# another order, in bf16 also parameters that round the other way. The cpu target's are held to 1e-6 and 2e-2.
RANKS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
# tokens/s over bf16's that FP8 is to reach, with all of a model's layers: what llmq does at 1.5B and 7B on an H100.
FP8_AIMS = {"gpt2-1558m": 1.24, "qwen2.5-1.5b": 1.24, "llama3-8b": 1.38, "qwen2.5-7b": 1.38}
# Bytes and flops a second by which docs/internals/kernels.md predicts, an H200's.
PREDICTED_BY = (4.3e12, 790e12)
# What training in bf16 at T = 1024 is to reach on one H100: the field of a row, its value and whose figure it is. llmq's are of
# steps of 524,288 tokens. The models that have them, and gpt2-1558m, are timed in steps of 8 micro-steps, 131,072 tokens (65,536
# at 7B), so that AdamW's share of a step is an eighth of a single micro-step's and still 4 times what it is there (8 at 7B): what
# that leaves is for the peer. llm.c's 124M is of 65,536 tokens a GPU, which are one micro-step here.
GOALS = {
    "gpt2-124m": ("tokens_per_second", 1.25 * 463e3, "1.25 x llm.c's 463 thousand, a GPU of 8 H100, modded-nanogpt's README"),
    "gpt2-1558m": ("mfu", 0.6, "llm.c has 47 % on 8 H100"),
    "qwen2.5-0.5b": ("tokens_per_second", 149e3, "llmq's"),
    "qwen2.5-1.5b": ("tokens_per_second", 58.9e3, "llmq's"),
    "qwen2.5-7b": ("tokens_per_second", 13.85e3, "llmq's"),
}
FP8_GOALS = {
    "qwen2.5-1.5b": ("tokens_per_second", 73.0e3, "llmq's"),
    "qwen2.5-7b": ("tokens_per_second", 19.15e3, "llmq's"),
}
GOAL_LENGTH = 1024
# A peer's tokens/s a GPU that a goal is not: what its line is held against besides.
PEER_RATES = {
    "gpt2-1558m": (381e3 / 8, "llm.c's 47.6 thousand tokens/s"),
}
# Attention is to be as fast as the fastest peer from this length on, with heads of this size.
ATTENTION_GOAL_LENGTH, ATTENTION_GOAL_HEAD_DIM = 4096, 128
# What attention is timed by: the heads of columns. Ours is held against the fastest of PEERS.
ENGINES = {"ours": "ours", "ours sm_80": "ours for sm_80", "fused": "cuDNN from here", "torch flash": "PyTorch flash",
           "torch cudnn": "PyTorch cuDNN", "fa3": "FA3", "fa4": "FA4"}
PEERS = ("fused", "torch flash", "torch cudnn", "fa3", "fa4")


# TFLOP/s that others have published, by direction, mask, head dim, heads and key-value heads, all at T = PUBLISHED_LENGTH.
PUBLISHED_LENGTH = 16384
PUBLISHED = {
    ("forward", "causal", 128, 64, 8): {"FA4 on H200": 702, "cuDNN 9.27 on H200": 633},
    ("forward", "full", 128, 64, 8): {"FA4 on H200": 686, "cuDNN 9.27 on H200": 640},
    ("backward", "causal", 128, 64, 8): {"FA4 on H200": 606, "cuDNN 9.27 on H200": 539},
    ("deterministic backward", "causal", 128, 64, 8): {"FA4 on H200": 557, "cuDNN 9.27 on H200": 454},
    ("forward", "causal", 64, 32, 32): {"FA3 on H100": 473},
    ("forward", "causal", 128, 16, 16): {"FA3 on H100": 616},
    ("forward", "full", 128, 16, 16): {"FA3 on H100": 648},
    ("backward", "full", 64, 32, 32): {"FA3 on H100": 474},
    ("backward", "full", 128, 16, 16): {"FA3 on H100": 561},
}
PUBLISHED_HEAD = [
    f"Published, not measured here, at T {PUBLISHED_LENGTH}: FA4 (CuTe) and cuDNN 9.27 by cudnn-frontend's benchmark/attention_training, September",
    "2026, at B = 2; FA3 by its paper. No goal is judged by them."]
DIRECTIONS = ("forward", "backward", "deterministic backward")
# The largest relative difference between FP8 and bf16 of the mean of the last losses of a short run: four times what is
# allowed after 2000 steps.
FP8_TOLERANCE, FP8_LAST_STEPS = 2e-2, 10
TIMED_TOKENS = 16384  # of a step
WITH_RESULT = ("passed", "failed", "hung")  # outcomes of a check that ran to its end, or up to its limit


def read_steps(path):
    """Returns the steps of a log.jsonl, which may have lines of other kinds, too; none where there is no such file."""
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [row for row in map(json.loads, filter(str.strip, file)) if "loss" in row]


# ---- data, runs, curves ----

def write_shard(path, tokens, width):
    """Format of llm.c: 256 ints of header, then 16- or 32-bit tokens."""
    magic, version = {2: (20240520, 1), 4: (20240801, 7)}[width]
    with open(path, "wb") as file:
        file.write(struct.pack("<256i", magic, version, len(tokens), *[0] * 253))
        values = array.array("H" if width == 2 else "I", list(tokens))  # of bytes it would take the memory as it is
        if sys.byteorder == "big":
            values.byteswap()
        values.tofile(file)


def data(folder):
    if glob.glob(f"{folder}/llama_*.bin"):
        return 0
    os.makedirs(folder, exist_ok=True)
    text = b""
    source = ["*.c*", "*/*.cuh", "kernels/*/*.cuh", "config/*.h", "run/*", "formats/*.[ch]", "runtime/**/*.[ch]", "test/*.c"]
    for path in sorted(path for pattern in source for path in glob.glob(pattern, recursive=True)):
        with open(path, "rb") as file:
            text += file.read() + b"\0"
    write_shard(f"{folder}/bytes_000.bin", text, 2)
    numbers = random.Random(1)
    # No benchmark reads a token twice: 14 steps of 64 x 1024 by one rank, of 16 x 1024 by eight; 6 of 8 micro-steps of 16 x 1024.
    count = 14 * 8 * 16384 + 1
    write_shard(f"{folder}/gpt2_000.bin", numbers.choices(range(50257), k=count), 2)
    write_shard(f"{folder}/llama_000.bin", numbers.choices(range(128256), k=count), 4)  # tokens of Qwen2.5's vocabulary, too
    return 0


def option(options, name, default=None):
    return options[options.index(name) + 1] if name in options else default


def launch(command, ranks):
    """Runs the command as so many ranks, without a launcher; the worst exit status, and what they all printed."""
    with tempfile.TemporaryFile("w+") as output, socket.socket() as probe:
        environments = [None]
        if ranks > 1:
            probe.bind(("127.0.0.1", 0))  # a free port, free again before rank 0 can want it
            command = [*command, "--rendezvous", f"127.0.0.1:{probe.getsockname()[1]}"]
            environments = [{**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank),
                             "LOCAL_WORLD_SIZE": str(ranks)} for rank in range(ranks)]
        probe.close()
        jobs = [subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
                for environment in environments]
        try:
            status = max((job.wait() for job in jobs), key=abs)
        finally:  # also where a time limit ends this script
            output.seek(0)
            text = output.read()
            sys.stdout.write(text)
        return status, text


def median_of(steps, name):
    numbers = [step[name] for step in steps if step.get(name) is not None]
    return statistics.median(numbers) if numbers else None


def attention_of(output, options):
    """By which attention a run says that it trains, if it does; and what is wrong if that is not what --flash-kernels names."""
    said = re.search(r"^attention +([^(\n]*[^( \n])", output, re.MULTILINE)
    kernels, taken = option(options, "--flash-kernels"), said[1] if said else None
    named = {"mma": "flash, mma.sync", "wgmma": "flash, wgmma"}.get(kernels, "")
    return taken, None if (taken or "").startswith(named) else f"--flash-kernels {kernels}, but the report has attention by {taken}"


def measure(folder, options, ranks=1):
    """One run of train_gpt; its row of the report, and the status to exit with."""
    log, plan = os.path.join(folder, "log.jsonl"), os.path.join(folder, "plan.json")
    os.makedirs(folder, exist_ok=True)
    if os.path.exists(log):
        os.remove(log)
    status, output = launch([TRAIN_GPT, "--out", folder, "--plan-json", plan, "--val-every", "0", "--checkpoint-every", "0",
                             "--log-every", "1000", *options], ranks)
    batch = int(option(options, "--micro-batch-size", 0))
    row = {"bench": "train", "engine": "ours", "preset": option(options, "--preset"),
           "length": int(option(options, "--seq-length", 0)), "batch": batch,
           "micro_steps": max(1, int(option(options, "--global-batch-size", 0)) // (max(1, batch) * ranks)),
           "policy": option(options, "--recompute-granularity", "none") + ", lossy states" * ("--allow-lossy-states" in options) +
           ", mma.sync" * (option(options, "--flash-kernels") == "mma")}
    if status != 0:
        said = [line for line in output.splitlines() if line.startswith("train_gpt: ")]  # advice may follow
        row["error"] = said[-1].removeprefix("train_gpt: ").split(". ")[0] if said else f"status {status}"
        return row, abs(status)
    steps = [step for step in read_steps(log) if step["step"] > WARM_UP]
    if not steps:
        row["error"] = f"{log}: no step after the first {WARM_UP}"
        return row, 1
    row["attention"], wrong = attention_of(output, options)
    if wrong:
        row["error"] = wrong
        return row, 1
    row.update(step_ms=median_of(steps, "step_ms"), tokens_per_second=median_of(steps, "tokens_per_second"),
               peak_bytes=max(step["peak_bytes"] for step in steps), loss=steps[-1]["loss"], mfu=median_of(steps, "mfu"),
               mfu_palm=median_of(steps, "mfu_palm"))
    with open(plan, encoding="utf-8") as file:
        row["planned_bytes"] = json.load(file)["peak_bytes"]
    return row, 0 if row["loss"] is not None and math.isfinite(row["loss"]) else 1


def run(folder, options):
    row, status = measure(folder, options)
    print(json.dumps(row))
    return 0 if row.get("error", "").startswith("the plan needs") else status  # what doesn't fit is an answer, of PyTorch too


def relative(x, y):
    """Of what a log holds, in which a NaN is null."""
    return abs(x - y) / abs(y) if x is not None and y else math.inf


def ranks(folder, one, count, options):
    row, status = measure(folder, options, count)
    row.update(bench="ranks", ranks=count, collectives=option(options, "--collectives", "auto"),
               zero_stage=int(option(options, "--zero-stage", 0)))
    if status == 0:
        ours, theirs = (read_steps(os.path.join(path, "log.jsonl")) for path in (folder, one))
        same_steps = [step["step"] for step in ours] == [step["step"] for step in theirs]
        difference = max((relative(x[name], y[name]) for x, y in zip(ours, theirs) for name in ("loss", "grad_norm")),
                         default=math.inf) if same_steps else math.inf
        allowed = RANKS_TOLERANCE[option(options, "--precision")]
        print(f"{len(ours)} steps by {count} ranks, {len(theirs)} by one; the largest relative difference of a loss or a "
              f"gradient norm is {difference:.2g}, allowed {allowed:g}")
        steps = [step for step in ours if step["step"] > WARM_UP]
        row.update({name: median_of(steps, name) for name in ("comm_ms", "comm_exposed_ms", "comm_bytes")},
                   difference=difference if math.isfinite(difference) else None,
                   one_tokens_per_second=median_of([step for step in theirs if step["step"] > WARM_UP], "tokens_per_second"))
        if not difference <= allowed:
            row["error"], status = "differs from one rank", 1
    print(json.dumps(row))
    return status


def last_loss(steps):
    losses = [step["loss"] for step in steps[-FP8_LAST_STEPS:]]
    return statistics.mean(losses) if losses and None not in losses else None


def fp8(folder, bf16, options):
    row, status = measure(folder, options)
    row.update(bench="fp8", format=option(options, "--fp8-format"), recipe=option(options, "--fp8-recipe"),
               layers=option(options, "--num-layers"))
    if status == 0:
        ours, theirs = (read_steps(os.path.join(path, "log.jsonl")) for path in (folder, bf16))
        same_steps = [step["step"] for step in ours] == [step["step"] for step in theirs]
        row.update(loss=last_loss(ours), bf16_loss=last_loss(theirs),
                   bf16_peak_bytes=max((step["peak_bytes"] for step in theirs), default=None),
                   bf16_tokens_per_second=median_of([step for step in theirs if step["step"] > WARM_UP], "tokens_per_second"))
        difference = relative(row["loss"], row["bf16_loss"]) if same_steps else math.inf
        print(f"{len(ours)} steps in FP8, {len(theirs)} in bf16; the means of their last losses differ by {100 * difference:.2g} %, "
              f"allowed are {100 * FP8_TOLERANCE:g} %")
        if not difference <= FP8_TOLERANCE:
            row["error"], status = "differs from bf16", 1
    print(json.dumps(row))
    return 0 if row.get("error", "").startswith("the plan needs") else status


def curve(one, other, exact=None):
    losses = [[step["loss"] for step in read_steps(os.path.join(folder, "log.jsonl"))] for folder in (one, other, exact) if folder]
    precision = next((name for name in CURVE_RATIO if name in os.path.basename(one)), "fp32")
    if not losses[0] or any(len(run) != len(losses[0]) for run in losses):
        print(f"steps: {', '.join(f'{len(run)} of {folder}' for folder, run in zip((one, other, exact), losses))}")
        return 1

    def worst(run, from_run):
        return max(abs(x - y) if x is not None and y is not None else math.inf for x, y in zip(run, from_run))
    learned = losses[0][0] - min(losses[0])  # or two models that both stand still would agree
    distance = worst(losses[1], losses[-1] if exact else losses[0])
    allowed = max(CURVE_RATIO[precision] * worst(losses[0], losses[-1]), CURVE_FLOOR * losses[0][0]) if exact else CURVE_TOLERANCE
    print(f"{len(losses[0])} steps, from {losses[0][0]:.4f} to {losses[0][-1]:.4f} and {losses[1][-1]:.4f}; the largest difference "
          f"{'from fp32 ' if exact else ''}is {distance:.2g}, allowed {allowed:.2g}")
    return 0 if distance <= allowed and learned > 0.5 else 1


# ---- the report ----

def number(value, form="{:.0f}", scale=1.0):
    return "-" if value is None else form.format(value * scale)


def attention_rates(rows):
    """Shapes in the table's order; TFLOP/s by engine and shape."""
    rates, batches = {}, {}
    for row in rows:
        if row.get("bench") == "attention" and "tflops" in row:
            shape = (row["direction"], row["mask"], row["head_dim"], row["heads"], row["groups"], row["length"])
            if batches.setdefault(shape, row.get("batch")) != row.get("batch"):
                sys.exit(f"gpu_report.py: attention of {shape} was timed with two batches; the table has one rate a shape")
            rates[row["engine"], shape] = row["tflops"]
    return sorted({shape for _, shape in rates}, key=lambda s: (DIRECTIONS.index(s[0]), *s[1:])), rates


def over_peers(rates, shape):
    """Our rate over the fastest peer's; None where one of the two is missing."""
    ours, best = rates.get(("ours", shape)), max((rates.get((peer, shape), 0) for peer in PEERS), default=0)
    return ours / best if ours and best else None


def attention_table(rows):
    """A row of each direction and heads: of each mask, our rates at the shortest length, at the goal's and at the row's longest,
    beside our kernels for sm_80 at the longest."""
    shapes, rates = attention_rates(rows)
    if not shapes:
        return []
    ratios = {shape: ratio for shape in shapes if (ratio := over_peers(rates, shape))}
    tokens = sorted({row["batch"] * row["length"] for row in rows if row.get("bench") == "attention"})
    lengths = sorted({length for *_, length in shapes})
    shown = [length for length in dict.fromkeys((lengths[0], ATTENTION_GOAL_LENGTH)) if length in lengths[:-1]]
    longest = {tuple(kind): length for *kind, length in shapes}  # the last of each, by the order of shapes
    of_length = {}
    for (_, _, head_dim, *_), length in longest.items():
        of_length.setdefault(length, set()).add(head_dim)
    ends = "; ".join(f"T {length} at head dim {', '.join(map(str, sorted(dims)))}" for length, dims in sorted(of_length.items()))
    peers = ", ".join(ENGINES[peer] for peer in PEERS if any(engine == peer for engine, _ in rates))
    heads, cells_of = [], []  # of a mask and a column: what gives the cell of a kind

    def ours(kind, length):
        shape = (*kind, length)
        return number(rates.get(("ours", shape))) + (f" ({ratios[shape]:.2f})" if shape in ratios else "")

    for mask in sorted({shape[1] for shape in shapes}):
        for length in shown:
            heads.append(f"{mask}, T {length}")
            cells_of.append((mask, lambda kind, length=length: ours(kind, length)))
        heads.append(f"{mask}, longest")
        cells_of.append((mask, lambda kind: ours(kind, longest.get(kind))))
        if any(engine == "ours sm_80" and shape[1] == mask for engine, shape in rates):
            heads.append(ENGINES["ours sm_80"])
            cells_of.append((mask, lambda kind: number(rates.get(("ours sm_80", (*kind, longest.get(kind)))))))
    lines = [f"Ours, of B x T = {' or '.join(map(str, tokens))} tokens. In brackets: over the fastest of {peers or 'no other'}; "
             f"1.00 or more in {sum(round(ratio, 2) >= 1 for ratio in ratios.values())} of {len(ratios)}", f"cases. Longest is {ends}.", "",
             f"| | head dim, heads | {' | '.join(heads)} |", "|" + "---|" * (2 + len(heads))]
    for direction, head_dim, query_heads, groups in dict.fromkeys((s[0], *s[2:5]) for s in shapes):
        cells = [cell((direction, mask, head_dim, query_heads, groups)) for mask, cell in cells_of]
        lines.append(f"| {direction} | {head_dim}, {query_heads}/{groups} | {' | '.join(cells)} |")
    published = {}
    for kind, length in longest.items():
        for name, rate in PUBLISHED.get(kind, {}).items() if length == PUBLISHED_LENGTH else ():
            published.setdefault(name, []).append("{}, {}, {}, {}/{}: ".format(*kind) + str(rate))
    return lines + ["", *PUBLISHED_HEAD, "", *(f"- {name}: {'; '.join(said)}" for name, said in published.items())] * bool(published)


def refusals(rows):
    """What engine did not take how many shapes, and why."""
    why = [(row["engine"], row["error"]) for row in rows if row.get("bench") == "attention" and "error" in row]
    return [f"- {ENGINES.get(engine, engine)}: {error} ({why.count((engine, error))} times)" for engine, error in dict.fromkeys(why)]


def rates_list(rows):
    """What bounds this GPU's kernels, beside what predictions take for it."""
    row = next((row for row in rows if row.get("bench") == "rates"), None)
    if not row:
        return []
    copied, multiplied = row["copy_bytes_per_s"], row["matmul_flops_per_s"]
    return [f"- A copy: {copied * 1e-12:.2f} TB/s, {copied / PREDICTED_BY[0]:.2f} of the {PREDICTED_BY[0] * 1e-12:g} by which kernels.md predicts.",
            f"- A product of {row['matmul_size']}^3 in bf16: {multiplied * 1e-12:.0f} TFLOP/s, {multiplied / PREDICTED_BY[1]:.2f} of the "
            f"{PREDICTED_BY[1] * 1e-12:.0f} there.",
            "- kernels.md's least times, of bytes and of flops, divided by these ratios are this GPU's."]


def goal_text(field, value):
    return f"{100 * value:.1f} % MFU" if field == "mfu" else f"{value:.0f}"


def work_of(row):
    """What a row's step does, the same for two rows whose rates may be compared: an AdamW to so many tokens. By which batches is
    each engine's own choice: what is too large for PyTorch is half as large there, in twice the micro-steps."""
    return row["preset"], row["length"], row["batch"] * row.get("micro_steps", 1)


def training_table(rows):
    rows = [row for row in rows if row.get("bench") == "train"]
    presets = list(dict.fromkeys(row["preset"] for row in rows))
    rows.sort(key=lambda row: (row["length"], presets.index(row["preset"]), work_of(row)[2], row["engine"] == "torch"))
    over_plan = [row["peak_bytes"] - row["planned_bytes"] for row in rows if row.get("peak_bytes") and row.get("planned_bytes")]
    lines = [f"A peak exceeds its plan by at most {max(over_plan) * 2.0 ** -30:.3f} GiB.", ""] if over_plan else []
    lines += ["| model | T | B | micro-steps | recompute | tokens/s | MFU, % | peak GiB | over torch.compile |", "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        same = [r for r in rows if work_of(r) == work_of(row)]
        peer = max((r["tokens_per_second"] for r in same if r["engine"] == "torch" and r.get("tokens_per_second")), default=None)
        rate, mfu = row.get("tokens_per_second"), row.get("mfu")
        if row["engine"] == "torch" and rate:  # the same flops a token as ours, so the same MFU at the same rate
            known = next((r for r in same if r.get("mfu")), None)
            mfu = rate / known["tokens_per_second"] * known["mfu"] if known else None
        ratio = rate / peer if rate and peer and row["engine"] == "ours" else None
        lines.append(f"| {row['preset']}{', torch' * (row['engine'] == 'torch')} | {row['length']} | {row['batch']} | {row.get('micro_steps', 1)} | {row['policy']} | "
                     f"{row.get('error') or number(rate)} | {number(mfu, '{:.1f}', 100)} | "
                     f"{number(row.get('peak_bytes'), '{:.2f}', 2.0 ** -30)} | {number(ratio, '{:.2f}')} |")
    return lines if rows else []


def goals_list(attention_rows, training_rows, fp8_rows):
    """A line for each goal, with the best that was measured of it; the first says how many are met."""
    judged = []  # what, what was measured of it as a share of the goal, and as text
    shapes, rates = attention_rates(attention_rows)
    for direction in DIRECTIONS:
        ratios = {shape: over_peers(rates, shape) for shape in shapes
                  if shape[0] == direction and shape[2] == ATTENTION_GOAL_HEAD_DIM and shape[5] >= ATTENTION_GOAL_LENGTH}
        worst = min((shape for shape in ratios if ratios[shape]), key=ratios.get, default=None)
        missing = "" if any((peer, shape) in rates for peer in ("fa3", "fa4") for shape in ratios) else ", without FA3 or FA4"
        judged.append((f"attention, {direction}", worst and ratios[worst],
                       worst and f"{ratios[worst]:.2f} at {worst[1]}, {worst[3]}/{worst[4]} heads, T {worst[5]}{missing}"))
    for suffix, rows, goals in (("", training_rows, GOALS), (", FP8", fp8_rows, FP8_GOALS)):
        for preset, (field, goal, source) in goals.items():
            best = max((row for row in rows if (row.get("preset"), row["engine"], row["length"]) == (preset, "ours", GOAL_LENGTH) and row.get(field)),
                       key=lambda row: row[field], default=None)  # pylint: disable=cell-var-from-loop
            share, said = best and best[field] / goal, f"the goal is {goal_text(field, goal)} ({source})"
            if best:
                said = f"{goal_text(field, best[field])}, {share:.2f} of {goal_text(field, goal)} ({source})"
                peer, whose = PEER_RATES.get(preset, (None, None))
                if peer and best.get("tokens_per_second"):
                    said += f", {best['tokens_per_second'] / peer:.2f} of {whose}"
            judged.append((preset + suffix, share, said))
    verdicts = ["not measured" if share is None else "met" if share >= 1 else "missed" for _, share, _ in judged]
    lines = ["**Goals: " + ", ".join(f"{verdicts.count(name)} {name}" for name in ("met", "missed", "not measured")) +
             f"**. Attention's, at head dim {ATTENTION_GOAL_HEAD_DIM}, T >= {ATTENTION_GOAL_LENGTH}: ours over the fastest other, at its worst. Training's, at",
             f"T {GOAL_LENGTH}: tokens/s of one H100; llmq's by benchmarks/H100x1.md, of 524,288 tokens a step.", ""]
    return lines + [f"- {verdict}: {what}: {said or '-'}" for verdict, (what, _, said) in zip(verdicts, judged)]


def kernels_table(rows):
    """Times of kernels beside the least, which are an H200's."""
    rows = [row for row in rows if row.get("bench") == "kernels"]
    lines, step = [], None
    for row in rows:
        if step != (step := (row["preset"], row["layers"], row["batch"], row["length"])):
            lines += [*[""] * bool(lines), "{}, {} layers, B {}, T {}:".format(*step), "", "| work | us | us / least |", "|---|---|---|"]
        least = row["least_us"]
        lines.append(f"| {row['work']} | {row['us']:.0f} | {number(least and row['us'] / least, '{:.2f}')} |")
    return [*lines, "", "Each kernel alone, by ncu; products are cuBLASLt's first choices. The least is kernels.md's."] if rows else []


def is_for_losses(row):
    """Whether a run in FP8 or of several ranks is too small to tell anything of its speed."""
    return row.get("bench") in ("fp8", "ranks") and row["length"] * row["batch"] * row.get("micro_steps", 1) < TIMED_TOKENS


def fp8_table(rows):
    peers = {row["preset"]: row.get("tokens_per_second") for row in rows if row.get("engine") == "torchao"}  # the last, which fits
    rows = [row for row in rows if row.get("bench") == "fp8"]
    lines = ["| model | T | B | | tokens/s | over bf16 | aim, whole model | over torchao | peak GiB | bf16's | last losses | bf16's |",
             "|---|---|---|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        if is_for_losses(row):
            row = {name: value for name, value in row.items() if not name.endswith(("tokens_per_second", "peak_bytes"))}
        rate, bf16, peer = row.get("tokens_per_second"), row.get("bf16_tokens_per_second"), peers.get(row["preset"])
        name = (row["preset"] or "small") + (f", {row['layers']} of the layers" if row["layers"] else "")
        name += ", " * (row.get("policy", "none") != "none") + row.get("policy", "none").removeprefix("none").removeprefix(", ")
        batch = f"{row['batch']} x {row['micro_steps']}" if row.get("micro_steps", 1) > 1 else row["batch"]
        lines.append(f"| {name} | {row['length']} | {batch} | {row['format']} {row['recipe']} | {row.get('error') or number(rate)} | "
                     f"{number(rate and bf16 and rate / bf16, '{:.2f}')} | {number(FP8_AIMS.get(row['preset']), '{:.2f}')} | "
                     f"{number(rate and peer and rate / peer, '{:.2f}')} | {number(row.get('peak_bytes'), '{:.2f}', 2.0 ** -30)} | "
                     f"{number(row.get('bf16_peak_bytes'), '{:.2f}', 2.0 ** -30)} | {number(row.get('loss'), '{:.4f}')} | "
                     f"{number(row.get('bf16_loss'), '{:.4f}')} |")
    return lines if rows else []


def ranks_table(rows):
    rows = [row for row in rows if row.get("bench") == "ranks"]
    lines = ["| model | ranks | collectives | ZeRO stage | tokens/s | over one rank | MB sent | ms of collectives | exposed | "
             "differs from one rank by |", "|---|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        rate, one = row.get("tokens_per_second"), row.get("one_tokens_per_second")
        lines.append(f"| {row['preset'] or 'small'} | {row['ranks']} | {row['collectives']} | {row['zero_stage']} | "
                     f"{row.get('error') or number(rate)} | {number(rate and one and rate / one, '{:.2f}')} | "
                     f"{number(row.get('comm_bytes'), '{:.2f}', 1e-6)} | {number(row.get('comm_ms'), '{:.2f}')} | "
                     f"{number(row.get('comm_exposed_ms'), '{:.2f}')} | {number(row.get('difference'), '{:.1g}')} |")
    return lines if rows else []


def named(checks, *outcomes):
    """Those checks, each with what is known of why."""
    return ", ".join(check["check"] + (f" ({check['why']})" if check.get("why") else "")
                     for check in checks if check["outcome"] in outcomes)


def runs_list(results):
    """A line for each run: its date and software, its source, and which checks' results are its."""
    lines = []
    for i, machine in enumerate(results["runs"]):
        stages = dict.fromkeys(check["stage"] for check in results["checks"] if check["run"] == i)
        facts = [machine[name] for name in ("date", "driver", "nvcc") if machine.get(name)]
        lines.append(f"- {', '.join([*facts, 'commit ' + machine.get('commit', 'unknown')])}: {', '.join(stages) or 'nothing'}")
    if len({machine.get("commit") for machine in results["runs"]}) > 1:
        lines.append("- Several commits stand side by side.")
    return lines


def report_lines(results):
    """The report without its title: runs, goals, checks, tables."""
    checks = results["checks"]
    lines = []
    for program in sorted({machine["rehearsal"] for machine in results["runs"] if machine.get("rehearsal")}):
        lines += [f"**A rehearsal by the programs in {program}: no figure here is a GPU's.**", ""]
    lines += runs_list(results)
    found = [check for check in checks if check.get("why")]

    def rows_of_stage(stage):
        return [row for check in checks if check["stage"] == stage for row in check.get("rows", [])]
    trained = [row for row in rows_of_stage("train_table") if row["bench"] == "train"]
    lines += ["", *goals_list(rows_of_stage("attention_table"), trained, [row for row in rows_of_stage("fp8") if row["bench"] == "fp8"])]
    others = [f"; {what}: {names}" for what, names in (("found", named(found, "passed")), ("failed", named(checks, "failed")), ("hung", named(checks, "hung")),
              ("no time left", ", ".join(check["check"] + f" ({check['why']})" * (check["outcome"] == "stopped")
                                              for check in checks if check["outcome"] in ("no time", "stopped"))), ("skipped", named(checks, "skipped"))) if names]
    lines += ["", f"{sum(check['outcome'] == 'passed' for check in checks)} of {len(checks)} checks passed{''.join(others)}."]
    attention_rows = rows_of_stage("attention_table")
    for title, table in (("What this GPU can do", rates_list(attention_rows)),
                         ("Attention, TFLOP/s, bf16", attention_table(attention_rows)),
                         ("Attention that was refused", refusals(attention_rows)),
                         ("Training, bf16, a step of micro-steps x B x T tokens", training_table(rows_of_stage("train_table"))),
                         ("A step's kernels, bf16", kernels_table(rows_of_stage("kernels"))),
                         ("FP8 beside bf16 in the same run", fp8_table(rows_of_stage("fp8"))),
                         ("Several ranks, the same batches as one; over sockets they share a GPU",
                          ranks_table(rows_of_stage("ranks")))):
        if table:
            lines += ["", f"## {title}", "", *table]
    return lines


# ---- the report's file ----

def read_results(folder):
    path = f"{folder}/gpu_check.json"
    if not os.path.exists(path):
        return {"runs": [], "checks": []}
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def write_whole(path, text):
    """Whoever is killed meanwhile leaves the file as it was."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)


def write_results(folder, results):
    os.makedirs(folder, exist_ok=True)
    write_whole(f"{folder}/gpu_check.json", json.dumps(results, indent=1) + "\n")
    title = results["runs"][-1].get("gpu", "unknown GPU")
    write_whole(f"{folder}/gpu_check.md", "\n".join([f"# {title}", "", *report_lines(results)]) + "\n")


def start(folder, values):
    machine = dict(value.split("=", 1) for value in values)
    machine = {name: value for name, value in machine.items() if value}
    results = read_results(folder)
    for earlier in results["runs"]:
        for name in ("gpu", "rehearsal"):  # or a table would mix what can't be compared
            if earlier.get(name) != machine.get(name):
                print(f"gpu_check.sh: {folder} holds results of {name} '{earlier.get(name, 'none')}', this is "
                      f"'{machine.get(name, 'none')}'; name another folder", file=sys.stderr)
                return 2
    results["runs"].append(machine)
    write_results(folder, results)
    return 0


def put(folder, entry):
    """Takes the place of what the check gave before, unless that was a result and this is none."""
    results = read_results(folder)
    entry["run"] = len(results["runs"]) - 1
    before = next((check for check in results["checks"] if check["check"] == entry["check"]), None)
    if before is None:
        results["checks"].append(entry)
    elif entry["outcome"] in WITH_RESULT or before["outcome"] not in WITH_RESULT:
        results["checks"][results["checks"].index(before)] = entry
    write_results(folder, results)


def skip(folder, stage, check, why):
    put(folder, {"check": check, "stage": stage, "outcome": "no time" if why == "no time left" else "skipped", "why": why})
    print(f"skipped: {check}: {why}", flush=True)
    return 0


def flash_options(folder):
    outcomes = {check["check"]: check["outcome"] for check in read_results(folder)["checks"] if check["outcome"] in WITH_RESULT}
    checked = [outcome for check, outcome in outcomes.items() if check.startswith("self_check_")] or [outcomes.get("op_attention_bf16", "passed")]
    print("" if set(checked) == {"passed"} else "--flash-kernels mma")
    return 0


def rows_of(output):
    rows = []
    for line in output.splitlines():
        if line.startswith('{"bench"'):
            try:
                rows.append(json.loads(line))
            except ValueError:  # its program was ended in the middle of it
                pass
    return rows


def tests_of(output):
    """The counts of a test program that speaks TAP, None of any other."""
    plan = re.search(r"^1\.\.(\d+)$", output, re.MULTILINE)
    if not plan:
        return None
    failed = re.findall(r"^not ok \d+ - (?!.*# SKIP)(.*)$", output, re.MULTILINE)
    skipped = len(re.findall(r"^not ok .*# SKIP", output, re.MULTILINE))
    return {"planned": int(plan[1]), "passed": len(re.findall(r"^ok ", output, re.MULTILINE)), "failed": failed, "skipped": skipped}


def add(folder, stage, check, status, seconds, limit, own_limit, path, probe=False):
    with open(path, encoding="utf-8", errors="replace") as file:
        output = file.read()
    said = [line.strip() for line in output.splitlines() if line.strip()]
    entry = {"check": check, "stage": stage, "outcome": "passed", "seconds": int(seconds), "rows": rows_of(output)}
    tests = tests_of(output)
    if tests:
        entry["tests"] = tests
    if status.startswith("stopped"):
        entry.update(outcome="stopped", why=status)
    elif status in ("124", "137", "stuck") and int(seconds) >= int(limit) < int(own_limit):
        entry.update(outcome="no time", why=f"ended after {seconds} s, when no time was left")
    elif status in ("124", "137", "stuck") and int(seconds) >= int(limit):
        entry.update(outcome="hung", why=f"{'could not be killed' if status == 'stuck' else 'killed'} after {seconds} s")
    elif status == "77":
        entry.update(outcome="skipped", why=said[-1] if said else "it says not why")
    elif status != "0":
        entry.update(outcome="failed", why=f"status {status}")
    elif tests and (tests["passed"] + tests["skipped"] < tests["planned"] or not tests["passed"]):
        entry.update(outcome="failed", why=f"{tests['passed']} of {tests['planned']} tests passed")
    if tests and tests["failed"]:
        entry["why"] += ": " + ", ".join(tests["failed"])
    if probe and entry["outcome"] in ("failed", "hung"):
        entry.update(outcome="skipped", why=said[-1] if entry["outcome"] == "failed" and said else entry["why"])
    if entry["outcome"] != "passed":
        entry["output"] = said[-30:]
    elif probe and said:
        entry["why"] = said[-1]  # what it found
    put(folder, entry)
    passed = f", {tests['passed']} tests" if tests else ""
    print({"passed": f"ok: {check} ({seconds} s{passed})", "skipped": f"skipped: {check}: {entry.get('why')}"}.get(
        entry["outcome"], f"{entry['outcome'].upper()}: {check}: {entry.get('why')}"))
    if entry["outcome"] in ("failed", "hung"):
        print("\n".join(f"    {line}" for line in entry["output"]))
    sys.stdout.flush()
    return {"passed": 0, "failed": 1, "hung": 1}.get(entry["outcome"], 77)


# ---- the page ----

PAGE_HEAD = """# What was measured on GPUs

Written by `scripts/gpu_report.py` from `measured-*.json`, reports of `scripts/gpu_check.sh`, which have every engine at every length.
"""


def page_text(folder):
    lines = [PAGE_HEAD]
    reports = sorted(glob.glob(f"{glob.escape(folder)}/measured-*.json"))
    for path in reports:
        with open(path, encoding="utf-8") as file:
            results = json.load(file)
        for check in results["checks"]:
            check["rows"] = [row for row in check.get("rows", []) if not is_for_losses(row)]
        body = [line.replace("## ", "### ", 1) if line.startswith("## ") else line for line in report_lines(results)]
        lines += [f"## {results['runs'][-1].get('gpu')}", "", *body, ""]
    if not reports:
        lines += ["**There is no measurement yet: no GPU has run this engine.** What is predicted stands in [kernels.md](../internals/kernels.md),",
                  "[attention-sm80.md](../internals/attention-sm80.md), [hopper.md](../internals/hopper.md) and [fp8.md](../fp8.md); how to measure, in",
                  "[README.md](README.md).", ""]
    return tables_as_blocks("\n".join(lines).rstrip() + "\n")


def page(arguments):
    check = arguments[:1] == ["--check"]
    folder = (arguments[check:] or [DOCS])[0]
    return write_or_check(page_text(folder), f"{folder}/measured.md", check, "docs/gpu/measured.md is not what scripts/gpu_report.py "
                          "writes: scripts/gpu_report.py page >docs/gpu/measured.md")


def publish(source, folder=DOCS):
    results = read_results(source)
    if not results["runs"] or any(machine.get("rehearsal") for machine in results["runs"]):
        print(f"gpu_report.py: {source}/gpu_check.json is no measurement of a GPU, but "
              f"{'a rehearsal' if results['runs'] else 'missing or empty'}", file=sys.stderr)
        return 2
    for check in results["checks"]:
        check.pop("output", None)  # names a machine's folders
    name = re.sub("[^a-z0-9]+", "-", results["runs"][-1]["gpu"].split(",")[0].lower()).strip("-")
    write_whole(f"{folder}/measured-{name}.json", json.dumps(results, indent=1) + "\n")
    write_whole(f"{folder}/measured.md", page_text(folder))
    return 0


COMMANDS = {  # by name: what does it, the fewest and the most arguments
    "data": (data, 1, 1), "run": (lambda folder, *options: run(folder, list(options)), 1, math.inf),
    "ranks": (lambda folder, one, count, *options: ranks(folder, one, int(count), list(options)), 3, math.inf),
    "fp8": (lambda folder, bf16, *options: fp8(folder, bf16, list(options)), 2, math.inf),
    "curve": (curve, 2, 3), "start": (lambda folder, *values: start(folder, values), 1, math.inf),
    "add": (add, 8, 9), "skip": (skip, 4, 4), "flash_options": (flash_options, 1, 1), "publish": (publish, 1, 2),
    "page": (lambda *arguments: page(list(arguments)), 0, 2),
}


def main(arguments):
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    command, fewest, most = COMMANDS.get(arguments[0] if arguments else "", (None, 0, 0))
    if not command or not fewest <= len(arguments) - 1 <= most:
        print(__doc__, file=sys.stderr)
        return 2
    return command(*arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
