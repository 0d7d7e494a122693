#!/usr/bin/env python3
"""Measures scaling on the cpu target: one rank against two under mpirun, what each ZeRO stage sends, and how much of it
is hidden behind computation.

  scripts/bench_parallel.py [--json FILE] [--steps N]      TRAIN_GPT and MPIRUN name other programs

Each rank has half of the cores as threads in every run, so a ratio of 2 is perfect: at the same global batch twice the
speed, at the same batch a rank twice the tokens in the same time. Bytes are rank 0's.
"""
import argparse
import json
import os
import random
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile

TRAIN_GPT = os.environ.get("TRAIN_GPT", "build/train_gpt")
MPIRUN = os.environ.get("MPIRUN", "mpirun")
WARM_UP = 2  # steps that are not timed: they fill caches and open connections
VOCABULARY, LENGTH, MICRO_BATCH = 1024, 128, 4
MODEL = ["--device", "cpu", "--precision", "fp32", "--num-layers", "6", "--hidden-size", "256", "--num-attention-heads", "4",
         "--vocab-size", str(VOCABULARY), "--seq-length", str(LENGTH), "--micro-batch-size", str(MICRO_BATCH)]
# (name, ranks, ZeRO stage, sequences a step)
CASES = [
    ("same global batch", 1, 0, 2 * MICRO_BATCH), *(("same global batch", 2, stage, 2 * MICRO_BATCH) for stage in range(4)),
    ("same batch a rank", 1, 0, MICRO_BATCH), *(("same batch a rank", 2, stage, 2 * MICRO_BATCH) for stage in (0, 1)),
    ("two micro-steps", 1, 0, 2 * MICRO_BATCH), *(("two micro-steps", 2, stage, 4 * MICRO_BATCH) for stage in range(4)),
]


def theory_bytes(elements, ranks, stage, micro_steps):
    """Returns the bytes that a rank sends in a step, all in fp32. Gradients are reduced (4 bytes an element) once at
    stages 0 and 1, else in each micro-step. Then stage 0 gathers gradients, once, and stages 1 and 2 parameters,
    once. Stage 3 gathers parameters for forward and for backward of each micro-step, although an untied head and
    embeddings need one of the two. The ranks' reports are some hundred bytes more."""
    reductions = micro_steps if stage >= 2 else 1
    gathers = 2 * micro_steps if stage == 3 else 1
    return 4 * elements * (reductions + gathers) * (ranks - 1) / ranks


def summarize(entries, tokens):
    """Returns medians over a log's steps after the first WARM_UP; `hidden` is None where nothing was sent."""
    entries = [entry for entry in entries if "step_ms" in entry][WARM_UP:]
    if not entries:
        raise ValueError(f"the log has no step after the first {WARM_UP}")
    middle = {name: statistics.median(entry.get(name) or 0 for entry in entries)
              for name in ("step_ms", "comm_bytes", "comm_ms", "comm_exposed_ms")}
    hidden = 1 - middle["comm_exposed_ms"] / middle["comm_ms"] if middle["comm_ms"] > 0 else None
    return {**middle, "tokens_per_second": 1e3 * tokens / middle["step_ms"], "hidden": hidden}


def write_tokens(path, count):
    """Writes random tokens as an llm.c shard of uint16."""
    numbers = random.Random(1)
    with open(path, "wb") as file:
        file.write(struct.pack("<256i", 20240520, 1, count, *[0] * 253))
        file.write(struct.pack(f"<{count}H", *(numbers.randrange(VOCABULARY) for _ in range(count))))


def call(command):
    # Only Open MPI reads these. Without them it starts neither as root nor more ranks than cores, and gives each rank
    # one core.
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                   "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if result.returncode != 0:
        sys.exit(f"bench_parallel.py: {' '.join(command)}\n{result.stderr}")


def count_elements(folder):
    """Returns the elements of a flat buffer: one rank's gradients in the plan, in fp32."""
    path = os.path.join(folder, "plan.json")
    call([TRAIN_GPT, *MODEL, "--plan", "--plan-json", path])
    with open(path, encoding="utf-8") as file:
        buffers = json.load(file)["buffers"]
    return sum(buffer["bytes"] for buffer in buffers if buffer["arena"] == "gradients") // 4


def run_case(folder, case, steps, threads):
    _, ranks, stage, batch = case
    out = os.path.join(folder, "out")
    shutil.rmtree(out, ignore_errors=True)
    command = [TRAIN_GPT, *MODEL, "--train-data", os.path.join(folder, "random_train_*.bin"), "--out", out,
               "--global-batch-size", str(batch), "--train-steps", str(steps + WARM_UP), "--val-every", "0",
               "--threads", str(threads), "--zero-stage", str(stage)]
    call([MPIRUN, "-np", str(ranks), *command] if ranks > 1 else command)
    with open(os.path.join(out, "log.jsonl"), encoding="utf-8") as file:
        entries = [json.loads(line) for line in file if line.strip()]
    result = summarize(entries, batch * LENGTH)
    if ranks > 1 and result["comm_bytes"] == 0:
        sys.exit(f"bench_parallel.py: the {ranks} ranks sent nothing; was {TRAIN_GPT} built where MPI is?")
    return result


def row_of(case, result, one, elements):
    name, ranks, stage, batch = case
    theory = theory_bytes(elements, ranks, stage, batch // (ranks * MICRO_BATCH))
    return {"case": name, "ranks": ranks, "zero_stage": stage, "sequences": batch, **result, "theory_bytes": theory,
            "bytes_to_theory": result["comm_bytes"] / theory if theory else None,
            "ratio": result["tokens_per_second"] / one["tokens_per_second"]}


def measure(steps):
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    rows, one = [], None
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(os.path.join(folder, "random_train_000.bin"), 200000)
        elements = count_elements(folder)
        for case in CASES:
            result = run_case(folder, case, steps, threads)
            if case[1] == 1:
                one = result
            rows.append(row_of(case, result, one, elements))
            print(text_of(rows[-1]), flush=True)
    return {"elements": elements, "threads_a_rank": threads, "rows": rows}


HEADER = f"{'':18} ranks stage  ms/step   tokens/s  ratio  MB sent  to theory  comm ms  exposed  hidden"


def text_of(row):
    def share(value):
        return "-" if value is None else f"{value:.3f}"

    return (f"{row['case']:18} {row['ranks']:5} {row['zero_stage']:5} {row['step_ms']:8.1f} {row['tokens_per_second']:10.0f} "
            f"{row['ratio']:6.2f} {row['comm_bytes'] / 1e6:8.2f} {share(row['bytes_to_theory']):>10} {row['comm_ms']:8.1f} "
            f"{row['comm_exposed_ms']:8.1f} {share(row['hidden']):>7}")


def main():
    parser = argparse.ArgumentParser(description="Speed of one and of two ranks on the cpu target.")
    parser.add_argument("--json", metavar="FILE", help="write the table to FILE, too")
    parser.add_argument("--steps", type=int, default=6, help="measured steps of each run (default: 6)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be 1 or more")
    if not shutil.which(MPIRUN):
        sys.exit(f"bench_parallel.py: no {MPIRUN} here")
    print(HEADER)
    table = measure(options.steps)
    if options.json:
        temporary = f"{options.json}.{os.getpid()}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(table, file, indent=1)
        os.replace(temporary, options.json)


if __name__ == "__main__":
    main()
