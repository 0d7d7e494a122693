#!/usr/bin/env python3
"""Runs two builds of train_gpt on the same small configurations and says where a byte of what they make differs.

  git worktree add ../base COMMIT && make -C ../base CUDA= build/train_gpt build/emu/train_gpt
  scripts/compare_builds.py --base ../base/build/train_gpt --new build/train_gpt \\
                            --base-emu ../base/build/emu/train_gpt --new-emu build/emu/train_gpt

Without --base-emu and --new-emu the emulator's configurations are left out; without --base and --new the cpu target's
are. A configuration is one command or a few. Each build runs them in a folder of its own, under the same relative
names, so that everything they write must have the same bytes: exit status, what is printed, log.jsonl, config.json,
each file of each checkpoint, the plan as JSON and as a picture. Left out of the comparison: times, rates and measured
memory (MEASURED and NOISE below), and the commit in --version.

  --only WORD ...    configurations whose name has all these words: --only cpu policy llama; --list prints the names
  --allow NAME ...   what is meant to differ: a member of a JSON file (wherever it stands), a row that is printed, or a
                     file's name
  --jobs N           runs at a time (2)
  --keep FOLDER      keeps the base's runs there, which are then not made again, and the new build's runs that differ

Prints a line for each configuration, under it the first differences, and 'N the same, M differ' at the end. Exit status
1 if a configuration differs or could not be compared. Needs only Python's standard library.
"""
import argparse
import concurrent.futures
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT + "/test")
import environment # noqa: F401, E402: the same variables, limits and signals as in tests

MEASURED = {"time", "step_ms", "tokens_per_second", "mfu", "mfu_palm", "peak_bytes", "comm_ms", "comm_exposed_ms"} # members of log.jsonl
NOISE = [(re.compile(pattern, re.M), text) for pattern, text in [
    (r"  [\d.]+ tok/s.*$", "  RATE"),                    # the end of a progress line
    (r"  ETA .*$", "  RATE"),
    (r"[\d.]+ GFLOP/s measured", "N GFLOP/s measured"),
    (r"^predicted .*a matmul measured.*$", "predicted"), # by rates of the moment
    (r"(?<=of the host's, )[\d.]+ \w+", "N"),           # free memory
    (r"[\d.]+ (ms|s)\b", r"N \1"),                       # how long a checkpoint took
    (r"^(train_gpt .*|commit +)\b[0-9a-f]{7,}\S*", r"\1COMMIT"),
    (r"(?<=^built)( .*)$", " WHEN")]]
FOLDER = re.compile(rb"[^\"]*/(base-[0-9a-f]{12}|new-\d+)(?=/data/)") # a build's folder, in files that name a model's
SHOWN = 4 # differences printed of a configuration
LIMIT_SECONDS = 600

# ---- configurations ----

T, VOCABULARY = 32, 257 # bytes and the end of a text, so that --generate needs no tokenizer
DATA = "--train-data ../data/t_train_*.bin --val-data ../data/t_val_*.bin --vocab-size %d --seq-length %d " % (VOCABULARY, T)
TRAINING = DATA + ("--train-steps 3 --micro-batch-size 1 --global-batch-size 2 --lr 3e-3 --lr-warmup-steps 1 --val-every 2 --val-steps 2 "
                   "--sample-every 3 --sample-tokens 12 --checkpoint-every 2 --seed 7 --threads 1 --bucket-mib 0.02 ")
LLAMA = "--normalization RMSNorm --position-embedding-type rope --activation swiglu --no-add-bias-linear "
SHAPES = {
    "gpt2": "--num-layers 3 --hidden-size 32 --num-attention-heads 2 --hidden-dropout 0.1 --attention-dropout 0.1 ",
    "llama": LLAMA + "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --num-query-groups 1 --kv-channels 16 "
                     "--ffn-hidden-size 72 --untie-embeddings-and-output-weights ",
    "qwen2": LLAMA + "--num-layers 3 --hidden-size 48 --num-attention-heads 4 --num-query-groups 2 --kv-channels 16 "
                     "--ffn-hidden-size 80 --add-qkv-bias --norm-epsilon 1e-6 --hidden-dropout 0.1 ",
}
EMULATED_SHAPES = {
    "gpt2": "--num-layers 2 --hidden-size 64 --num-attention-heads 1 --hidden-dropout 0.1 --attention-dropout 0.1 ",
    "llama": LLAMA + "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --num-query-groups 1 --kv-channels 64 "
                     "--ffn-hidden-size 96 --untie-embeddings-and-output-weights ",
    "qwen2": LLAMA + "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --num-query-groups 2 --kv-channels 32 "
                     "--ffn-hidden-size 96 --add-qkv-bias --norm-epsilon 1e-6 ",
}
SELECTIVE, FULL = "--recompute-granularity selective ", "--recompute-granularity full "
MODULES = ["core_attn", "norm", "activation", "mlp", "qkv"]
POLICIES = {
    "none": "",
    "selective": SELECTIVE,
    **{"selective-" + module: SELECTIVE + "--recompute-modules " + module + " " for module in MODULES},
    "selective-all": SELECTIVE + "--recompute-modules %s " % ",".join(MODULES),
    "full": FULL,
    "uniform": FULL + "--recompute-method uniform --recompute-num-layers 2 ",
    "block": FULL + "--recompute-method block --recompute-num-layers 2 ",
    "layers": FULL + "--recompute-layers 0,2 ",
    "auto": "--recompute-granularity auto --memory-budget BUDGET ",
}
# Options of the engine, by name: (shape, precision, the options).
FP8 = "--fp8-format hybrid --first-last-layers-bf16=false --ffn-hidden-size 96 "
SANDWICH = "--norm-placement sandwich --qk-layernorm "
OPTIONS = {
    "fp8-tensorwise": ("llama", "bf16", FP8 + "--fp8-recipe tensorwise "),
    "fp8-delayed": ("llama", "bf16", FP8 + "--fp8-recipe delayed --fp8-amax-history-len 4 " + FULL),
    "fp8-delayed-biases": ("gpt2", "bf16", FP8 + "--fp8-recipe delayed " + SELECTIVE),
    "fp8-blockwise": ("llama", "bf16", FP8 + "--fp8-recipe blockwise --hidden-size 128 --ffn-hidden-size 256 --kv-channels 32 --num-query-groups 2 "
                             "--micro-batch-size 4 --global-batch-size 8 " + SELECTIVE),
    "fp8-sandwich": ("llama", "bf16", FP8 + "--fp8-recipe delayed " + SANDWICH),
    "fp8-post": ("qwen2", "bf16", FP8 + "--fp8-recipe tensorwise --norm-placement post --hidden-dropout 0 "),
    "fp8-parallel": ("gpt2", "bf16", FP8 + "--fp8-recipe delayed --parallel-residual " + FULL),
    "offload-activations": ("llama", "bf16", "--cpu-offloading-num-layers 1 "),
    "offload-optimizer": ("gpt2", "bf16", "--optimizer-cpu-offload --offload-gradients --offload-weights " + FULL),
    "offload-part": ("llama", "bf16", "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --exp-avg-dtype 8bit "
                                      "--exp-avg-sq-dtype bf16 --main-grads-dtype bf16 "),
    "masters-bf16": ("gpt2", "bf16", "--main-params-dtype bf16 "),
    "muon": ("gpt2", "bf16", "--optimizer muon "),
    "ema": ("gpt2", "fp32", "--ema-decay 0.9 --zero-stage 0 "),
    "chunks": ("llama", "bf16", "--mlp-chunk-tokens 8 " + FULL),
    "chunks-biases": ("gpt2", "bf16", "--mlp-chunk-tokens 8 " + SELECTIVE + "--recompute-modules mlp,norm "),
    "chunks-sandwich": ("llama", "fp32", "--mlp-chunk-tokens 8 " + SANDWICH + FULL),
    "chunks-parallel": ("gpt2", "fp32", "--mlp-chunk-tokens 8 --parallel-residual " + FULL),
    "documents": ("llama", "bf16", "--reset-attention-mask --reset-position-ids --eod-token 0 " + FULL),
    "window": ("llama", "bf16", "--window-size 8 --window-attn-skip-freq 2 "),
    "sandwich": ("llama", "bf16", SANDWICH + SELECTIVE),
    "qk-norm-full": ("qwen2", "fp32", "--norm-placement post --qk-layernorm --qk-layernorm-width full " + SELECTIVE),
    "parallel": ("gpt2", "bf16", "--parallel-residual " + FULL),
    "multipliers": ("llama", "bf16", "--embedding-multiplier 2 --residual-multiplier 0.5 --attn-logit-softcapping 20 "
                                     "--final-logit-softcapping 30 --z-loss 1e-4 " + SELECTIVE),
}
# Budgets for --recompute-granularity auto: between what full recomputation needs and what none needs.
BUDGETS = {"gpt2": {"fp32": "3.17MiB", "bf16": "15.19MiB"}, "llama": {"fp32": "3.74MiB", "bf16": "15.78MiB"},
           "qwen2": {"fp32": "3.97MiB", "bf16": "16.02MiB"}}
PRESETS = ["gpt2-124m", "gpt2-350m", "gpt2-774m", "gpt2-1558m", "llama3.2-1b", "llama3-8b", "qwen2.5-0.5b", "qwen2.5-1.5b",
           "qwen2.5-7b", "demo"]
MISTAKES = [
    "", "--nonsense 1", "--num", "--hidden-size 30 --num-attention-heads 4", "--num-query-groups 5", "--kv-channels 12",
    "--recompute-modules norm,nonsense", "--recompute-modules norm,", "--recompute-modules ,norm",
    "--recompute-granularity selective --recompute-modules x", "--recompute-granularity full --recompute-layers 3-1",
    "--recompute-granularity full --recompute-layers 0,99", "--recompute-layers 0", "--recompute-granularity full --recompute-method block",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 5", "--recompute-method uniform",
    "--recompute-granularity auto", "--recompute-granularity auto --memory-budget 1MiB", "--memory-budget 1GiB", "--activation relu",
    "--preset nonsense", "--micro-batch-size 0", "--micro-batch-size 3 --global-batch-size 4", "--lr -1", "--min-lr 1", "--train-steps x",
    "--world-size 2", "--zero-stage 4", "--max-position-embeddings 4", "--lr-warmup-steps 5000", "--sample-tokens 4096",
    "--val-data= --val-every 3", "--eval-only --generate x", "--eval-only", "--generate x", "--init-from ../data/none",
    "--resume ../data/none", "--out=", "--train-data ../data/none_*.bin", "--device cuda", "--vocab-size 100",
    "--bucket-mib 0.0001", "--dropout 0.1", "--hidden-dropout 2", "--attention-backend flashy", "--checkpoint-dtype fp8",
    "--init-from ../data/gpt2 --hidden-size 48", "--init-from ../data/gpt2 --activation swiglu", "--rotary-base 0", "--top-p 2",
    "--num-layers 60000 --hidden-size 1000000 --num-attention-heads 1000 --vocab-size 60000000",
]


class Configuration:
    """Commands, without the program's name, that run in turn in one folder. expect: each command's exit status."""
    def __init__(self, name, *commands, ranks=1, expect=0, variables=None):
        self.name, self.commands, self.ranks, self.expect, self.variables = name, commands, ranks, expect, variables or {}
        self.emulated = name.startswith("emu ")


def cpu_configurations():
    for (shape, model), precision, policy in itertools.product(SHAPES.items(), ("fp32", "bf16"), POLICIES):
        start = TRAINING + model + "--device cpu --precision %s " % precision
        options = POLICIES[policy].replace("BUDGET", BUDGETS[shape][precision])
        plan = "--plan=full --plan-json plan.json --plan-picture plan.svg "
        yield Configuration("cpu policy %s %s %s" % (shape, precision, policy), start + options + plan, start + options)
    for shape, precision in itertools.product(SHAPES, ("fp32", "bf16")):
        start = TRAINING + SHAPES[shape] + "--device cpu --precision %s " % precision
        other = {"fp32": "bf16", "bf16": "fp32"}[precision]
        name = "cpu %%s %s %s" % (shape, precision)
        model = DATA + "--init-from out/checkpoints/step_00000003 --device cpu --threads 1 --precision %s " % precision
        yield Configuration(name % "resume", start, start + "--train-steps 5 --resume auto --keep-checkpoints 2",
                            start + "--train-steps 6 --resume auto --no-checkpoint-async --micro-batch-size 2")
        yield Configuration(name % "files", start + "--checkpoint-dtype %s --max-shard-gib 2e-5" % other,
                            start + "--train-steps 4 --resume auto --checkpoint-dtype %s" % other)
        yield Configuration(name % "init", start, model + "--eval-only --val-steps 3 --micro-batch-size 2",
                            model + "--generate abc --generate if --sample-tokens 16 --sample-count 2 --temperature 0.8 --top-k 40 "
                            "--seed 3", model + "--generate abc --sample-tokens 16 --temperature 0",
                            model + "--train-steps 2 --out again --val-every 0")
        yield Configuration(name % "unfused", start + "--attention-backend unfused --loss-chunk-tokens 16 --threads 2")
        yield Configuration(name % "schedule", start + "--lr-decay-style WSD --lr-wsd-decay-steps 2 --min-lr 1e-4 --clip-grad 0.1",
                            start + "--lr-decay-style linear --clip-grad 0 --weight-decay 0 --out linear")
    for name, shape, options in (("plain", "qwen2", "--lora-dropout 0.1 --lora-target-modules all-linear " + SELECTIVE),
                                 ("nf4", "llama", "--frozen-weights-format nf4 " + FULL), ("fp8", "llama", "--frozen-weights-format fp8 "),
                                 ("chunks", "gpt2", "--mlp-chunk-tokens 8 " + FULL)):
        model = "--init-from ../data/%s --train-data ../data/g_*.bin --threads 1 --device cpu --lora-rank 2 --train-steps 3 " % shape
        yield Configuration("cpu option lora %s" % name, model + "--precision bf16 --checkpoint-every 2 " + options,
                            model + "--precision fp32 --out fp32 " + options)
    for shape in ("gpt2", "llama", "llama_sharded", "qwen2", "qwen2_bf16"):
        model = "--init-from ../data/%s --train-data ../data/g_*.bin --val-data ../data/g_*.bin --threads 1 --device cpu " % shape
        yield Configuration("cpu golden " + shape, model + "--precision fp32 --train-steps 2 --checkpoint-every 2",
                            model + "--precision bf16 --eval-only")
    for precision, number in itertools.product(("fp32", "bf16"), (3, 5)):
        model = "--init-from ../data/gpt2.%d.bin --train-data ../data/g_*.bin --threads 1 --device cpu " % number
        yield Configuration("cpu golden llm.c %d %s" % (number, precision), model + "--train-steps 2 --precision " + precision)


def rank_configurations():
    """Yields runs of two ranks. Policies and stages take turns, so that each policy meets each stage."""
    policies = itertools.cycle(["none", "selective", "full", "uniform", "selective-all"])
    for (shape, model), precision, stage in itertools.product(SHAPES.items(), ("fp32", "bf16"), range(4)):
        policy = next(policies)
        yield Configuration("cpu ranks %s %s zero-%d %s" % (shape, precision, stage, policy), TRAINING + model + POLICIES[policy] +
                            "--device cpu --precision %s --zero-stage %d --global-batch-size 4" % (precision, stage), ranks=2)
    for stage in (1, 3):
        start = TRAINING + SHAPES["gpt2"] + "--device cpu --precision bf16 --global-batch-size 4 --zero-stage %d " % stage
        yield Configuration("cpu ranks resume zero-%d" % stage, start, start + "--train-steps 5 --resume auto --check-replicas 1", ranks=2)
        yield Configuration("cpu ranks grad-reduce-in-bf16 zero-%d" % stage, start + "--grad-reduce-in-bf16", ranks=2)
    yield Configuration("cpu ranks sockets", TRAINING + SHAPES["llama"] +
                        "--device cpu --precision fp32 --zero-stage 3 --collectives sockets", ranks=2)


def option_configurations():
    for name, (shape, precision, options) in OPTIONS.items():
        start = TRAINING + SHAPES[shape] + "--device cpu --precision %s %s" % (precision, options)
        plan = "--plan=full --plan-json plan.json --plan-picture plan.svg "
        yield Configuration("cpu option %s" % name, start + plan, start, start + "--train-steps 4 --resume auto ")
        yield Configuration("cpu option ranks %s" % name, start + ("--zero-stage 3 " if "blockwise" in name else "--zero-stage 3 --global-batch-size 4") if name != "ema" else start, ranks=2)


def plan_configurations():
    plan = "--plan=full --plan-json plan.json --plan-picture plan.svg --device cpu --threads 1 "
    for number, preset in enumerate(PRESETS):
        yield Configuration("cpu plan %s" % preset, "--preset %s %s--precision fp32" % (preset, plan),
                            "--preset %s %s--precision bf16 --recompute-granularity full --plan-json full.json" % (preset, plan),
                            "--preset %s %s--precision bf16 --recompute-granularity selective --plan-json selective.json" % (preset, plan))
        for stage in range(4):
            yield Configuration("cpu plan %s zero-%d" % (preset, stage), "--preset %s %s--precision bf16 --world-size %d --zero-stage %d"
                                % (preset, plan, (8, 64)[number % 2], stage))
    for preset, budget in (("gpt2-124m", "3GiB"), ("llama3.2-1b", "30GiB"), ("llama3-8b", "140GiB"), ("qwen2.5-0.5b", "14GiB")):
        yield Configuration("cpu plan %s auto" % preset, "--preset %s %s--precision bf16 --micro-batch-size 1 --recompute-granularity auto "
                            "--memory-budget %s" % (preset, plan, budget))


def message_configurations():
    yield Configuration("cpu messages help", "--help")
    yield Configuration("cpu messages version", "--version")
    for number, mistake in enumerate(MISTAKES):
        data = "--train-data ../data/t_train_*.bin --val-data ../data/t_val_*.bin "
        alone = not mistake or mistake.startswith("--train-data")
        yield Configuration("cpu messages %02d %s" % (number, mistake), ("" if alone else data) + mistake, expect=2)


def emulated_configurations():
    small = TRAINING.replace("--train-steps 3", "--train-steps 2").replace("--seq-length 32", "--seq-length 16")
    small += "--device cuda --bucket-mib 0.2 "
    plan = "--plan=full --plan-json plan.json "
    budgets = {"gpt2": "34.24MiB", "llama": "34.39MiB", "qwen2": "33.69MiB"}
    few = {"fp32": ["none", "selective-all", "full"],
           "bf16": ["none", "selective", "selective-core_attn", "selective-all", "full", "uniform", "block", "layers", "auto"]}
    for (shape, model), precision in itertools.product(EMULATED_SHAPES.items(), few):
        for policy in few[precision]:
            options = POLICIES[policy].replace("BUDGET", budgets[shape]).replace("--recompute-layers 0,2", "--recompute-layers 0")
            options = options.replace("block --recompute-num-layers 2", "block --recompute-num-layers 1") # of two layers
            start = small + model + "--precision %s " % precision + options
            yield Configuration("emu policy %s %s %s" % (shape, precision, policy), start + plan, start)
    for shape, precision, stage in [*(("llama", "bf16", stage) for stage in range(4)), ("gpt2", "bf16", 0), ("gpt2", "bf16", 3),
                                    ("gpt2", "fp32", 3), ("qwen2", "bf16", 2)]: # few: they take long
        yield Configuration("emu ranks %s %s zero-%d" % (shape, precision, stage), small + EMULATED_SHAPES[shape] +
                            "--precision %s --zero-stage %d" % (precision, stage), ranks=2)
    yield Configuration("emu resume", small + EMULATED_SHAPES["llama"] + "--precision bf16",
                        small + EMULATED_SHAPES["llama"] + "--precision bf16 --train-steps 4 --resume auto --cuda-graphs=false")
    yield Configuration("emu unfused", small + EMULATED_SHAPES["llama"] + "--precision bf16 --attention-backend unfused")
    yield Configuration("emu hopper", small + EMULATED_SHAPES["llama"] + "--precision bf16", variables={"EMU_CAPABILITY": "9.0"})
    for name, (shape, precision, options) in OPTIONS.items():
        start = small + EMULATED_SHAPES[shape] + "--precision %s %s" % (precision, options)
        if "blockwise" in name: # whose tokens and widths are multiples of 128
            start += "--num-attention-heads 4 --micro-batch-size 8 --global-batch-size 16 "
        yield Configuration("emu option %s" % name, start + plan, start, variables={"EMU_CAPABILITY": "9.0"} if "fp8" in name else {})
    for preset in ("gpt2-124m", "llama3-8b", "qwen2.5-1.5b"):
        yield Configuration("emu plan " + preset, "--preset %s --device cuda --precision bf16 %s--plan-picture plan.svg" % (preset, plan))


def all_configurations():
    return [*cpu_configurations(), *rank_configurations(), *option_configurations(), *plan_configurations(), *message_configurations(), *emulated_configurations()]


# ---- runs ----

def write_shard(path, seed, tokens, vocabulary):
    """Writes a shard of words that come again, so that there is something to learn; the seed decides them."""
    generator = random.Random(seed)
    words = [[generator.randrange(vocabulary) for _ in range(generator.randrange(2, 7))] for _ in range(40)]
    ids = []
    while len(ids) < tokens:
        ids += generator.choice(words)
    with open(path, "wb") as file:
        file.write(struct.pack("<256i", 20240520, 1, tokens, *[0] * 253))
        file.write(struct.pack("<%dH" % tokens, *ids[:tokens]))


def write_data(folder):
    os.makedirs(folder, exist_ok=True)
    for i in range(2):
        write_shard("%s/t_train_%03d.bin" % (folder, i), i, 600 + 70 * i, VOCABULARY)
    write_shard(folder + "/t_val_000.bin", 99, 400, VOCABULARY)
    write_shard(folder + "/g_000.bin", 5, 700, 50)
    golden = ROOT + "/test/golden/huggingface/"
    for name in os.listdir(golden):
        if os.path.isdir(golden + name):
            shutil.copytree(golden + name, folder + "/" + name, dirs_exist_ok=True)
        else:
            shutil.copy(golden + name, folder)


def run(program, configuration, folder):
    """Runs the commands; leaves in `folder` what they wrote, and what they printed as files printed_NUMBER_KIND."""
    partial = "%s.partial-%d" % (folder, os.getpid())
    os.makedirs(partial)
    for number, command in enumerate(configuration.commands):
        with tempfile.TemporaryDirectory() as session:
            variables = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "EMU_DEVICES": "2",
                         "OMPI_MCA_orte_tmpdir_base": session, "PRTE_MCA_prte_tmpdir_base": session, **configuration.variables}
            launcher = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(configuration.ranks)]
            result = subprocess.run([*(launcher if configuration.ranks > 1 else []), program, *command.split()], cwd=partial, env=variables,
                                    capture_output=True, text=True, errors="replace", timeout=LIMIT_SECONDS, stdin=subprocess.DEVNULL)
        for kind, text in (("stdout", result.stdout), ("stderr", result.stderr), ("status", "%d\n" % result.returncode)):
            with open("%s/printed_%d_%s" % (partial, number, kind), "w") as file:
                file.write(text)
    try:
        os.rename(partial, folder)
    except OSError: # another comparison has made the base's run meanwhile
        shutil.rmtree(partial)


def as_expected(folder, configuration):
    """Whether the base's commands ended as expected: a mistake of this script in a command would leave nothing to
    compare."""
    statuses = []
    for number in range(len(configuration.commands)):
        with open("%s/printed_%d_status" % (folder, number)) as file:
            statuses.append(int(file.read()))
    return all(status == configuration.expect for status in statuses)


# ---- comparison ----

def files_below(folder):
    """Returns the relative paths of a run's files, but for its lock, which names a process."""
    return sorted(os.path.relpath(os.path.join(where, name), folder) for where, _, names in os.walk(folder)
                  for name in names if name != ".lock")


def without(value, names):
    if isinstance(value, dict):
        return {key: without(member, names) for key, member in value.items() if key not in names}
    return [without(member, names) for member in value] if isinstance(value, list) else value


def json_differences(one, other, place=""):
    if type(one) is type(other) and isinstance(one, dict):
        if list(one) != list(other) and set(one) == set(other):
            yield "%s: members in another order" % (place or "the file")
        for key in [*one, *(key for key in other if key not in one)]:
            yield from ([place + "." + key + " is missing in " + ("the new" if key in one else "the base")]
                        if key not in one or key not in other else json_differences(one[key], other[key], place + "." + key))
    elif type(one) is type(other) and isinstance(one, list) and len(one) == len(other):
        for i, (a, b) in enumerate(zip(one, other)):
            yield from json_differences(a, b, "%s[%d]" % (place, i))
    elif one != other or repr(one) != repr(other): # 1 and 1.0 are equal and have different texts
        yield "%s: %s became %s" % (place, shorten(json.dumps(one)), shorten(json.dumps(other)))


def shorten(text, length=70):
    return text if len(text) <= length else text[:length] + "..."


def text_differences(one, other, allowed):
    texts = []
    for text in (one.decode(errors="replace"), other.decode(errors="replace")):
        for pattern, replacement in NOISE:
            text = pattern.sub(replacement, text)
        lines = [line for line in text.replace("\r", "\n").split("\n") if re.split("  +", line)[0].strip() not in allowed]
        texts.append(sorted(lines, key=lambda line: "checkpoint written" in line)) # a thread prints these at any time
    for a, b in itertools.zip_longest(*texts, fillvalue="(the end)"):
        if a != b:
            yield "'%s' became '%s'" % (shorten(a, 110), shorten(b, 110))
            return


def safetensors_differences(one, other):
    tables = []
    for data in (one, other):
        length = struct.unpack("<Q", data[:8])[0]
        tables.append((json.loads(data[8:8 + length]), data[8 + length:]))
    (a, data_a), (b, data_b) = tables
    yield from json_differences(a, b)
    names = [name for name in a if a == b and name != "__metadata__"]
    bytes_of = lambda data, name: data[slice(*a[name]["data_offsets"])]
    different = [name for name in names if bytes_of(data_a, name) != bytes_of(data_b, name)]
    if different:
        yield "%d of %d tensors differ, such as %s" % (len(different), len(names), different[0])


def file_differences(name, one, other, allowed):
    base = os.path.basename(name)
    if one == other or base in allowed:
        return
    found = []
    try:
        if base.endswith(".jsonl"):
            lines = [[without(json.loads(line), MEASURED | allowed) for line in data.splitlines()] for data in (one, other)]
            yield from json_differences(*lines)
            return
        if base.endswith(".json"):
            values = [without(json.loads(FOLDER.sub(b"", data)), allowed) for data in (one, other)]
            found = list(json_differences(*values))
            if found or allowed or FOLDER.search(one):
                yield from found
                return
        elif base.startswith("printed_"):
            yield from text_differences(one, other, allowed)
            return
        elif base.endswith(".safetensors"):
            found = list(safetensors_differences(one, other))
    except (ValueError, struct.error, KeyError) as problem:
        found = ["cannot be read: %s" % problem]
    if not found:
        first = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
        found = ["byte %d of %d and %d" % (first, len(one), len(other))]
    yield from found


def differences(base, new, allowed):
    """Yields texts. A manifest's entries of files that differ are left out: the files are named already."""
    names = [files_below(folder) for folder in (base, new)]
    for name in sorted(set(names[0]) ^ set(names[1])):
        if os.path.basename(name) not in allowed:
            yield "%s: only in %s" % (name, "the base" if name in names[0] else "the new")
    changed = set()
    for name in sorted(set(names[0]) & set(names[1]), key=lambda name: (os.path.basename(name) == "manifest.json", name)):
        contents = []
        for folder in (base, new):
            with open(folder + "/" + name, "rb") as file:
                contents.append(file.read())
        if contents[0] != contents[1]:
            changed.add(name)
        if os.path.basename(name) == "manifest.json" and contents[0] != contents[1]:
            manifests = [json.loads(data) for data in contents]
            for manifest in manifests:
                manifest["files"] = [entry for entry in manifest["files"] if os.path.dirname(name) + "/" + entry["name"] not in changed]
            contents = [json.dumps(manifest).encode() for manifest in manifests]
        for text in file_differences(name, *contents, allowed):
            yield name + ": " + text


def compare(configuration, programs, folders, allowed):
    """Returns the differences, or None where the base did not end as expected, and the folders of the two runs."""
    places = ["%s/%s" % (folder, re.sub(r"[^\w.-]+", "_", configuration.name)) for folder in folders]
    if not os.path.isdir(places[0]):
        run(programs[0], configuration, places[0])
    if not as_expected(places[0], configuration):
        return None, places
    run(programs[1], configuration, places[1])
    return list(differences(*places, allowed)), places


def base_key(program, configurations):
    """Returns a name for the base's runs: a hash of the program and of the configurations."""
    key = hashlib.sha256(repr([(c.name, c.commands, c.ranks, c.variables) for c in configurations]).encode())
    with open(program, "rb") as file:
        key.update(file.read())
    return key.hexdigest()[:12]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--base", "--new", "--base-emu", "--new-emu"):
        parser.add_argument(name, metavar="PROGRAM", type=os.path.abspath)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD")
    parser.add_argument("--allow", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", metavar="FOLDER", type=os.path.abspath)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    programs = {False: (options.base, options.new), True: (options.base_emu, options.new_emu)}
    everything = all_configurations()
    wanted = [c for c in everything if all(word in c.name.split() for word in options.only)]
    if options.list:
        print("\n".join(c.name for c in wanted))
        return 0
    wanted = [c for c in wanted if all(programs[c.emulated])]
    if not wanted:
        parser.error("nothing to compare: name two programs by --base and --new, or --base-emu and --new-emu")
    allowed, count = set(options.allow), {"same": 0, "differ": 0, "fail": 0}
    with tempfile.TemporaryDirectory() as temporary, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        top = options.keep or temporary
        folders = {emulated: ("%s/base-%s" % (top, base_key(programs[emulated][0], [c for c in everything if c.emulated == emulated])),
                              "%s/new-%d" % (top, os.getpid())) for emulated in {c.emulated for c in wanted}}
        for folder in {folder for both in folders.values() for folder in both}:
            write_data(folder + "/data")
        pending = [(c, pool.submit(compare, c, programs[c.emulated], folders[c.emulated], allowed)) for c in wanted]
        for configuration, result in pending:
            found, places = result.result()
            verdict = "fail" if found is None else "differ" if found else "same"
            count[verdict] += 1
            print("%-8s %s" % ({"fail": "NOT RUN"}.get(verdict, verdict), configuration.name), flush=True)
            if found is None:
                print("         the base does not end as expected: see --keep")
            for text in (found or [])[:SHOWN]:
                print("         " + text)
            if found and len(found) > SHOWN:
                print("         and %d more" % (len(found) - SHOWN))
            if verdict == "same" and options.keep:
                shutil.rmtree(places[1])
    print("%d the same, %d differ%s" % (count["same"], count["differ"],
                                        ", %d did not run as expected" % count["fail"] if count["fail"] else ""))
    return 1 if count["differ"] or count["fail"] else 0


if __name__ == "__main__":
    sys.exit(main())
