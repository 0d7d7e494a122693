#!/usr/bin/env python3
"""Counts what a training step launches on a GPU: kernels, matrix products, memsets, copies, collectives.

  scripts/count_launches.py [--train-gpt build/emu/train_gpt] [--ranks N] [OPTION...]     OPTIONs are train_gpt's

The emulator (`make emu`) counts. Two runs whose numbers of steps, or of micro-steps, differ by one differ by the work
of a step, or of a micro-step. The emulator is a GPU of compute capability 9.0, or of EMU_CAPABILITY. Heads are of 64,
which its attention takes. Other widths do not change the counts, so that a preset's layers are counted at small widths;
a width among the OPTIONs overrides its small one. The number of tokens changes only the sort of tokens (roofline.py:
sort_launches). Matrix products are not tuned: --matmul-tuning may find epilogues that are faster than kernels, which
then are fewer. What a CUDA graph launches counts as often as the graph runs. The graphs, each enqueued by one call of
the host, are counted below the rest.

With --ranks, mpirun trains the model by N ranks, and rank 0's work is counted. A micro-step is what one more micro-step
adds to a step: at ZeRO stages 0 and 1 it has no collectives, which are all in the rest of a step.
"""
import argparse
import collections
import os
import re
import subprocess
import sys
import tempfile

SMALL = ["--hidden-size=64", "--num-attention-heads=2", "--num-query-groups=2", "--kv-channels=64", "--ffn-hidden-size=128",
         "--vocab-size=256", "--seq-length=64", "--matmul-tuning=false", "--precision=bf16", "--checkpoint-every=0"]
# Options that this script sets: how much is trained, and where.
OURS = ("--global-batch-size", "--train-steps", "--train-data", "--out", "--device")

NO_WORK = ("an event", "a wait for an event")
GRAPHS = "CUDA graphs that launch these"
CALLS = {"a copy": "cudaMemcpy", "messages": "ncclSend, ncclRecv", "a graph": GRAPHS,
         **{name: name for name in ("cudaMemset", "cublasLtMatmul", "cudnnBackendExecute", "ncclReduceScatter", "ncclAllGather")}}

# Rows of the documentation's table (roofline.py: LAUNCHES), and patterns of the names that count in each row.
ROWS = {
    "products": r"cublasLtMatmul",
    "attention": r"sm90_\w+|flash_\w+|unfused_\w+|attention_\w+|cudnnBackendExecute",
    "norms": r"norm_\w+|qk_norm_\w+|residual_\w+",
    "RoPE": r"rope_kernel",
    "GELU, SwiGLU": r"(gelu|squared_relu|swiglu|geglu)_\w+",
    "bias gradients": r"column_sums_kernel|dbias_partial_kernel|activation_bias_sums_kernel",
    "embedding": r"embedding_\w+|sort_\w+",
    "loss": r"cross_entropy_kernel|losses_sum_kernel|logits_transform_kernel",
    "AdamW, gradient norm": r"adamw_kernel|squares_\w+|gradient_check_kernel",
    "collectives": r"nccl\w+(, nccl\w+)*|\w+_wire_kernel",
    "dropout's counter, copies": r"dropout_step_kernel|cudaMem\w+",
}


def refuse(message):
    sys.exit(f"count_launches.py: {message}")


def write_shard(path, tokens):
    """Writes a shard of 16-bit tokens: 256 int32 of header, then the tokens."""
    header = [20240520, 1, tokens] + [0] * 253
    with open(path, "wb") as file:
        file.write(b"".join(value.to_bytes(4, "little") for value in header))
        file.write(b"".join((i * 7 % 251).to_bytes(2, "little") for i in range(tokens)))


def options_of(arguments):
    """Returns (this script's options, train_gpt's options). Of an option that is given twice train_gpt takes the
    last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-gpt", default="build/emu/train_gpt")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--micro-batch-size", type=int, default=1, help=argparse.SUPPRESS)  # the global batch depends on it
    known, given = parser.parse_known_args(arguments)
    for argument in given:
        if argument.split("=")[0] in OURS:
            refuse(f"{argument}: it is chosen here, by what is counted")
    if known.ranks < 1:
        refuse(f"--ranks {known.ranks}: at least 1")
    return known, SMALL + given


def command_of(program, ranks, counts):
    """Returns the command that runs the program, a list, on so many ranks; only rank 0 counts, into the file
    `counts`."""
    if ranks == 1:
        return ["env", f"EMU_WORK_COUNTS={counts}", *program]
    return ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", "1", "-x", f"EMU_WORK_COUNTS={counts}", *program,
            ":", "-n", str(ranks - 1), *program]


def counts_by_text(path):
    """Yields (how often, the text of a launch or a call) from the emulator's file, which numbers graphs."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            times, text = line.rstrip("\n").split(" ", 1)
            yield int(times), re.sub(r"^a graph \(\d+\)$", "a graph", text)


def name_of(text):
    """Returns the name of what was launched; of a kernel without its template's arguments, which the shape decides."""
    kernels = set(re.findall(r"\w+_kernel\b", text))
    if text in CALLS:
        return CALLS[text]
    if len(kernels) != 1:
        refuse(f"'{text}' was launched, which names no kernel, or several: the macro LAUNCH takes the kernel's own name")
    return kernels.pop()


def counts_of(known, options, folder, steps, micro_steps):
    """Returns how often each kind of work ran, by name, in a run of so many steps of so many micro-steps."""
    name = f"{steps}_{micro_steps}"
    counts = os.path.join(folder, "counts_" + name)
    ours = {"micro-batch-size": known.micro_batch_size, "global-batch-size": known.micro_batch_size * micro_steps * known.ranks,
            "train-steps": steps, "train-data": os.path.join(folder, "train.bin"), "out": os.path.join(folder, "out_" + name),
            "device": "cuda"}
    program = [known.train_gpt, *options, *(f"--{option}={value}" for option, value in ours.items())]
    command = command_of(program, known.ranks, counts)
    environment = {"EMU_CAPABILITY": "9.0", "EMU_DEVICES": str(known.ranks), "OMPI_ALLOW_RUN_AS_ROOT": "1",
                   "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **os.environ}
    environment.pop("EMU_WORK_COUNTS", None)
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        refuse(f"{' '.join(command)}\n{run.stdout}{run.stderr}")
    if not os.path.exists(counts):
        refuse(f"{known.train_gpt} counted nothing: it is not the emulator's")
    result = collections.Counter()
    for times, text in counts_by_text(counts):
        if text not in NO_WORK:
            result[name_of(text)] += times
    return result


def less(counts, others):
    """Subtracts counts, and drops names without a difference. Counter's own subtraction hides what is below 0."""
    result = collections.Counter(counts)
    result.subtract(others)
    return collections.Counter({name: times for name, times in result.items() if times != 0})


def count(arguments):
    """Returns (work of a micro-step, work of a step besides one micro-step), by name. arguments: the script's."""
    known, options = options_of(arguments)
    with tempfile.TemporaryDirectory() as folder:
        write_shard(os.path.join(folder, "train.bin"), 1 << 14)
        one, two = (counts_of(known, options, folder, steps, 1) for steps in (3, 4))
        more = [counts_of(known, options, folder, steps, 2) for steps in (3, 4)]
    step = less(two, one)
    micro_step = less(less(more[1], more[0]), step)
    return micro_step, less(step, micro_step)


def by_row(counts):
    """Sums counts by the rows of the documentation's table."""
    result = dict.fromkeys(ROWS, 0)
    for name, times in counts.items():
        if name == GRAPHS:
            continue
        rows = [row for row, names in ROWS.items() if re.fullmatch(names, name)]
        if len(rows) != 1:
            refuse(f"{name}: no row of the table has it, or several")
        result[rows[0]] += times
    return result


def table(micro_step, rest):
    """Returns the counts as a table in Markdown."""
    lines = ["| work | a micro-step | the rest of a step |", "|---|---|---|"]
    for name in sorted((set(micro_step) | set(rest)) - {GRAPHS}, key=lambda n: (-micro_step[n] - rest[n], n)):
        lines.append(f"| {name} | {micro_step[name]} | {rest[name]} |")
    graphs = micro_step[GRAPHS], rest[GRAPHS]
    lines.append(f"| all | {sum(micro_step.values()) - graphs[0]} | {sum(rest.values()) - graphs[1]} |")
    lines.append(f"| {GRAPHS} | {graphs[0]} | {graphs[1]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(*count(sys.argv[1:])))
