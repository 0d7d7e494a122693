#!/usr/bin/env python3
"""What scripts/gpu_check.sh needs besides a shell; the standard library alone.

  gpu_report.py data FOLDER          token shards: bytes of this tree's sources, and random tokens for the benchmarks
  gpu_report.py run FOLDER OPTION... runs build/train_gpt into FOLDER; prints its speed as a line of JSON
  gpu_report.py ranks FOLDER ONE RANKS OPTION...
                                     the same by so many ranks of this host, held against the run of one rank in ONE
  gpu_report.py curve FOLDER FOLDER  compares the losses of two runs, step by step
  gpu_report.py report FOLDER        FOLDER/gpu_check.json and gpu_check.md of all that gpu_check.sh left there
"""
import glob
import json
import math
import os
import random
import socket
import statistics
import struct
import subprocess
import sys
import tempfile

TRAIN_GPT = os.environ.get("TRAIN_GPT", "build/train_gpt")
WARM_UP = 4  # steps: plans, graphs and clocks settle
# nats between the cpu's and the GPU's loss at any of 50 steps: sums in another order at first, then what Adam makes of it,
# whose steps are as long for small gradients as for large ones.
CURVE_TOLERANCE = {"fp32": 2e-3, "bf16": 3e-2}
# The largest relative difference of a loss or a gradient norm of any step between one rank and several: gradients added in
# another order, in bf16 also parameters that round the other way. The cpu target's are held to 1e-6 and 2e-2.
RANKS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}


def read_lines(path):
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


# ---- data, runs, curves ----

def write_shard(path, tokens, width):
    """Format of llm.c: 256 ints of header, then 16- or 32-bit tokens."""
    magic, version = {2: (20240520, 1), 4: (20240801, 7)}[width]
    with open(path, "wb") as file:
        file.write(struct.pack("<256i", magic, version, len(tokens), *[0] * 253))
        file.write(struct.pack(f"<{len(tokens)}{'H' if width == 2 else 'I'}", *tokens))


def data(folder):
    if glob.glob(f"{folder}/llama_*.bin"):
        return 0
    os.makedirs(folder, exist_ok=True)
    text = b""
    for path in sorted(glob.glob("*.c*") + glob.glob("kernels/*.cuh") + glob.glob("runtime/*.h") + glob.glob("test/*.c")):
        with open(path, "rb") as file:
            text += file.read() + b"\0"
    write_shard(f"{folder}/bytes_000.bin", text, 2)
    numbers = random.Random(1)
    count = 16 * 16384 + 1  # the benchmark's steps
    write_shard(f"{folder}/gpt2_000.bin", [numbers.randrange(50257) for _ in range(count)], 2)
    write_shard(f"{folder}/llama_000.bin", [numbers.randrange(128256) for _ in range(count)], 4)
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
        status = max((job.wait() for job in jobs), key=abs)
        output.seek(0)
        return status, output.read()


def median_of(steps, name):
    numbers = [step[name] for step in steps if step.get(name) is not None]
    return statistics.median(numbers) if numbers else None


def measure(folder, options, ranks=1):
    """One run of train_gpt; its row of the report, and the status to exit with."""
    log, plan = os.path.join(folder, "log.jsonl"), os.path.join(folder, "plan.json")
    os.makedirs(folder, exist_ok=True)
    if os.path.exists(log):
        os.remove(log)
    status, output = launch([TRAIN_GPT, "--out", folder, "--plan-json", plan, "--val-every", "0", "--checkpoint-every", "0",
                             "--log-every", "1000", *options], ranks)
    sys.stdout.write(output)
    row = {"bench": "train", "engine": "ours", "preset": option(options, "--preset"),
           "length": int(option(options, "--seq-length", 0)), "batch": int(option(options, "--micro-batch-size", 0)),
           "policy": option(options, "--recompute-granularity", "none")}
    if status != 0:
        said = [line for line in output.splitlines() if line.startswith("train_gpt: ")]  # advice may follow
        row["error"] = said[-1].removeprefix("train_gpt: ").split(". ")[0] if said else f"status {status}"
        return row, abs(status)
    steps = [step for step in read_lines(log) if step["step"] > WARM_UP]
    if not steps:
        row["error"] = f"{log}: no step after the first {WARM_UP}"
        return row, 1
    row.update(step_ms=median_of(steps, "step_ms"), tokens_per_second=median_of(steps, "tokens_per_second"),
               peak_bytes=max(step["peak_bytes"] for step in steps), loss=steps[-1]["loss"], mfu=median_of(steps, "mfu"))
    with open(plan, encoding="utf-8") as file:
        row["planned_bytes"] = json.load(file)["peak_bytes"]
    return row, 0 if row["loss"] is not None and math.isfinite(row["loss"]) else 1


def run(folder, options):
    row, status = measure(folder, options)
    print(json.dumps(row))
    return status


def relative(x, y):
    """Of what a log holds, in which a NaN is null."""
    return abs(x - y) / abs(y) if x is not None and y else math.inf


def ranks(folder, one, count, options):
    row, status = measure(folder, options, count)
    row.update(bench="ranks", ranks=count, collectives=option(options, "--collectives", "auto"),
               zero_stage=int(option(options, "--zero-stage", 0)))
    if status == 0:
        ours, theirs = (read_lines(os.path.join(path, "log.jsonl")) for path in (folder, one))
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


def curve(one, other):
    losses = [[step["loss"] for step in read_lines(os.path.join(folder, "log.jsonl"))] for folder in (one, other)]
    precision = "bf16" if "bf16" in one else "fp32"
    if not losses[0] or len(losses[0]) != len(losses[1]):
        print(f"{one} has {len(losses[0])} steps, {other} {len(losses[1])}")
        return 1
    worst = max(abs(x - y) if x is not None and y is not None else math.inf for x, y in zip(*losses))
    learned = losses[0][0] - losses[0][-1]  # or two models that both stand still would agree
    print(f"{len(losses[0])} steps, from {losses[0][0]:.4f} to {losses[0][-1]:.4f} and {losses[1][-1]:.4f}; the largest "
          f"difference is {worst:.2g}, allowed {CURVE_TOLERANCE[precision]:g}")
    return 0 if worst <= CURVE_TOLERANCE[precision] and learned > 0.5 else 1


# ---- the report ----

def number(value, form="{:.0f}", scale=1.0):
    return "-" if value is None else form.format(value * scale)


def attention_table(rows):
    shapes, rates = [], {}
    for row in rows:
        if row.get("bench") == "attention" and "tflops" in row:
            shape = (row["direction"], row["mask"], row["head_dim"], row["heads"], row["groups"], row["batch"], row["length"])
            if shape not in shapes:
                shapes.append(shape)
            rates[row["engine"], shape] = row["tflops"]
    lines = ["| | mask | head dim | heads | B | T | ours | PyTorch flash | PyTorch cuDNN | ours / better |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    order = ("forward", "backward", "deterministic backward")
    for shape in sorted(shapes, key=lambda s: (order.index(s[0]), *s[1:5], s[6])):
        ours, *peers = (rates.get((engine, shape)) for engine in ("ours", "torch flash", "torch cudnn"))
        best = max((rate for rate in peers if rate), default=None)
        direction, mask, head_dim, heads, groups, batch, length = shape
        lines.append(f"| {direction} | {mask} | {head_dim} | {heads}/{groups} | {batch} | {length} | {number(ours)} | "
                     f"{number(peers[0])} | {number(peers[1])} | {number(ours and best and ours / best, '{:.2f}')} |")
    return lines if shapes else []


def training_table(rows):
    rows = [row for row in rows if row.get("bench") == "train" and row.get("preset")]
    lines = ["| model | T | B | | recompute | tokens/s | MFU | peak GiB | planned GiB | tokens/s, over torch.compile |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        same = [r for r in rows if (r["preset"], r["length"]) == (row["preset"], row["length"])]
        peer = next((r.get("tokens_per_second") for r in same if r["engine"] == "torch"), None)
        rate, mfu = row.get("tokens_per_second"), row.get("mfu")
        if row["engine"] == "torch" and rate:  # the same flops a token as ours, so the same MFU at the same rate
            known = next((r for r in same if r.get("mfu")), None)
            mfu = rate / known["tokens_per_second"] * known["mfu"] if known else None
        ratio = rate / peer if rate and peer and row["engine"] == "ours" else None
        lines.append(f"| {row['preset']} | {row['length']} | {row['batch']} | {row['engine']} | {row['policy']} | "
                     f"{row.get('error') or number(rate)} | {number(mfu, '{:.1f} %', 100)} | "
                     f"{number(row.get('peak_bytes'), '{:.2f}', 2.0 ** -30)} | "
                     f"{number(row.get('planned_bytes'), '{:.2f}', 2.0 ** -30)} | {number(ratio, '{:.2f}')} |")
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


def report(folder):
    machine = (read_lines(f"{folder}/machine.jsonl") or [{}])[0]
    checks, rows = read_lines(f"{folder}/checks.jsonl"), read_lines(f"{folder}/bench.jsonl")
    failed = [check["check"] for check in checks if check.get("status")]
    skipped = [f"{check['check']} ({check['skipped']})" for check in checks if "skipped" in check]
    with open(f"{folder}/gpu_check.json", "w", encoding="utf-8") as file:
        json.dump({"machine": machine, "checks": checks, "benchmarks": rows}, file, indent=1)
        file.write("\n")
    passed = sum(check.get("status") == 0 for check in checks)
    lines = [f"# {machine.get('gpu', 'unknown GPU')}", "",
             f"{machine.get('date', '')}, commit {machine.get('commit', 'unknown')}; {passed} checks passed, "
             f"failed: {', '.join(failed) or 'none'}; skipped: {', '.join(skipped) or 'none'}."]
    for title, table in (("Attention, TFLOP/s, bf16", attention_table(rows)),
                         ("Training, bf16, a step of B x T tokens", training_table(rows)),
                         ("Several ranks, the same batches as one; over sockets they share a GPU", ranks_table(rows))):
        if table:
            lines += ["", f"## {title}", "", *table]
    text = "\n".join(lines) + "\n"
    with open(f"{folder}/gpu_check.md", "w", encoding="utf-8") as file:
        file.write(text)
    sys.stdout.write(text)
    return 0


def main(arguments):
    if len(arguments) == 2 and arguments[0] in ("data", "report"):
        return {"data": data, "report": report}[arguments[0]](arguments[1])
    if len(arguments) >= 2 and arguments[0] == "run":
        return run(arguments[1], arguments[2:])
    if len(arguments) >= 4 and arguments[0] == "ranks":
        return ranks(arguments[1], arguments[2], int(arguments[3]), arguments[4:])
    if len(arguments) == 3 and arguments[0] == "curve":
        return curve(arguments[1], arguments[2])
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
