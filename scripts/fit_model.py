#!/usr/bin/env python3
"""What fits which GPU, by plans of the engine: writes docs/fit.md.

  scripts/fit_model.py            the page on stdout
  scripts/fit_model.py --check    whether docs/fit.md is that page
  scripts/fit_model.py --train-gpt PROGRAM >docs/fit_plans.json
                                  searches what the page needs, with any train_gpt
  scripts/fit_model.py --train-gpt PROGRAM --check
                                  makes each plan of docs/fit_plans.json again, and holds it to what is written there

Bytes are the engine's plans, times are the engine's predictions by data sheets. Nothing is measured here.
"""
import argparse
import collections
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import tempfile

from mistakes import Mistake, run_script
from written_page import tables_as_blocks, write_or_check

DOCS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "docs")
PAGE, PLANS = os.path.join(DOCS, "fit.md"), os.path.join(DOCS, "fit_plans.json")
GIB = 2**30
STEP_TOKENS = 2**19  # of a step: llmq's 524,288
BOUND = 1.02         # a plan's bytes over its lower bound, at most


@dataclasses.dataclass(frozen=True)
class Card:
    """Usable: what is left of the memory beside the context and the kernels. Rates are those of a GPU whose data sheet the
    engine knows: kernels/gpu_peak.cuh. Flop/s and the bus's bytes/s are repeated here for the page."""
    gb: int
    usable_gib: float
    gpu: str
    tflops: float
    bus_gbps: float


CARDS = [
    Card(8, 7.2, "GeForce RTX 3080", 59.5, 22),
    Card(12, 11.0, "GeForce RTX 3080", 59.5, 22),
    Card(16, 15.0, "GeForce RTX 4080", 97.5, 22),
    Card(24, 22.8, "GeForce RTX 4090", 165.2, 22),
    Card(48, 44.0, "L40S", 362.05, 22),
    Card(80, 78.5, "H100 80GB HBM3", 989.5, 52),
    Card(141, 138.5, "H200", 989.5, 52),
]
HOSTS = {64: 60, 256: 240, 1024: 960}  # GB of a host to GiB that may be pinned
CARD = {card.gb: card for card in CARDS}


def qwen25(layers, hidden, heads, groups, ffn, vocabulary, untied=True):
    return {"preset": "qwen2.5-7b", "num-layers": layers, "hidden-size": hidden, "num-attention-heads": heads,
            "num-query-groups": groups, "ffn-hidden-size": ffn, "vocab-size": vocabulary,
            "untie-embeddings-and-output-weights": str(untied).lower()}


# From small to large. What is no preset is given by its shape, as its config.json has it.
MODELS = {
    "gpt2-124m": {"preset": "gpt2-124m"},
    "qwen2.5-0.5b": {"preset": "qwen2.5-0.5b"},
    "llama3.2-1b": {"preset": "llama3.2-1b"},
    "qwen2.5-1.5b": {"preset": "qwen2.5-1.5b"},
    "qwen2.5-3b": qwen25(36, 2048, 16, 2, 11008, 151936, untied=False),
    "llama3.2-3b": {"preset": "llama3.2-3b"},
    "qwen3-4b": {"preset": "qwen3-4b"},
    "qwen2.5-7b": {"preset": "qwen2.5-7b"},
    "llama3-8b": {"preset": "llama3-8b"},
    "qwen2.5-14b": qwen25(48, 5120, 40, 8, 13824, 152064),
    "qwen2.5-32b": qwen25(64, 5120, 40, 8, 27648, 152064),
    "llama3-70b": {"preset": "llama3-8b", "num-layers": 80, "hidden-size": 8192, "num-attention-heads": 64,
                   "ffn-hidden-size": 28672},
}
CANDIDATES = ("llama3.2-1b", "qwen2.5-1.5b", "llama3.2-3b", "qwen3-4b", "qwen2.5-7b", "llama3-8b", "qwen2.5-14b", "qwen2.5-32b",
              "llama3-70b")
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)

# tokens/s that llmq publishes (IST-DASLab/llmq b77d969, benchmarks) of cards that are CARDS' too: card, model, bf16, fp8
LLMQ = [
    (24, "qwen2.5-3b", 7000, 10700), (24, "qwen2.5-7b", 2800, 4300), (24, "qwen2.5-14b", 1349, 2001),
    (80, "qwen2.5-7b", 13800, 19200), (80, "qwen2.5-14b", 6300, 9400),
]


# ---- plans ----

def auto(card, host_gib, lossy):
    options = {"recompute-granularity": "auto", "memory-budget": f"{card.usable_gib}GiB", "host-memory-budget": f"{host_gib}GiB"}
    return {**options, "allow-lossy-states": "true"} if lossy else options


def training(model, seq_length, micro_batch, step_tokens=STEP_TOKENS, ranks=1):
    return {**MODELS[model], "seq-length": seq_length, "micro-batch-size": micro_batch,
            "global-batch-size": max(step_tokens // seq_length, micro_batch * ranks)}


def words(options):
    return [f"--{name}={value}" for name, value in options.items()]


def plan(program, card, options):
    """What the program plans on a card: bytes of both memories, what moves, tokens/s, what auto chose. Where nothing fits,
    {"refused": the reason}."""
    given = {"device": "cuda", "precision": "bf16", "plan-gpu": card.gpu, **options}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "plan.json")
        result = subprocess.run([program, "--plan=full", "--plan-json", path, *words(given)], capture_output=True, text=True,
                                check=False)
        if result.returncode != 0:
            reason = result.stderr.strip().splitlines()[0] if result.stderr.strip() else "no message"
            if "fits" not in reason:
                raise Mistake(f"{program} made no plan of {' '.join(words(given))}: {reason}")
            return {"refused": reason.split(": ", 1)[-1]}
        with open(path, encoding="utf-8") as file:
            planned = json.load(file)
    lines = dict(line.split(None, 1) for line in reversed(result.stdout.splitlines()) if len(line.split(None, 1)) == 2)
    moved = {"to host": 0, "to device": 0}
    for transfer in planned["transfers"]:
        moved[transfer["direction"]] += transfer["bytes"]
    predicted = planned["predicted"]
    return {"parameters": int(lines["parameters"].replace(",", "")), "device_bytes": planned["peak_bytes"],
            "bound_bytes": planned["lower_bound_bytes"], "host_bytes": planned["host"]["peak_bytes"],
            "host_bound_bytes": planned["host"]["lower_bound_bytes"],
            "to_host_bytes": round(predicted["to_host_bytes"]), "to_device_bytes": round(predicted["to_device_bytes"]),
            "step_ms": round(predicted["step_ms"], 3), "update_ms": round(predicted["update_ms"], 3),
            "tokens_per_s": round(predicted["tokens_per_s"], 2),
            "arenas": {arena["name"]: arena["bytes"] for arena in planned["arenas"] + planned["host"]["arenas"] if arena["bytes"]},
            "peak": planned["phases"][planned["peak_phase"]],
            "choice": re.sub(r"^.*? of the host: ", "", lines["auto"]) if "auto" in lines else ""}


class Planner:
    """Makes the rows of docs/fit_plans.json."""

    def __init__(self, program):
        self.program, self.rows = program, []

    def add(self, section, card, options, planned, **names):
        self.rows.append({"section": section, **names, "card": card.gb, "options": options, **planned})

    def quickest(self, card, model, seq_length, budgets):
        """The micro-batch with the most tokens a second: larger ones are tried until two did worse."""
        best, worse = None, 0
        for micro_batch in MICRO_BATCHES:
            if micro_batch * seq_length > STEP_TOKENS or worse == 2:
                break
            options = {**training(model, seq_length, micro_batch), **budgets}
            planned = plan(self.program, card, options)
            if "refused" in planned:
                break
            if best is None or planned["tokens_per_s"] > 1.005 * best[1]["tokens_per_s"]:
                best, worse = (options, planned), 0
            else:
                worse += 1
        return best

    def largest(self, card, host, lossy):
        names, budgets, refused = {"host": host, "lossy": lossy}, auto(card, HOSTS[host], lossy), None
        for model in reversed(CANDIDATES):
            found = self.quickest(card, model, 2048, budgets)
            if found:
                self.add("largest", card, *found, model=model, **names)
                break
            refused = model
        if refused:  # the next in size
            options = {**training(refused, 2048, 1), **budgets}
            self.add("too large", card, options, plan(self.program, card, options), model=refused, **names)

    def longest(self, card, host):
        """The longest of llama3-8b, to half a power of two."""
        names, refused = {"model": "llama3-8b", "host": host, "lossy": False}, None
        for half in range(2 * 21, 2 * 12 - 1, -1):
            options = {**LONG, "seq-length": 2**(half // 2) * (3 if half % 2 else 2) // 2, **auto(card, HOSTS[host], False)}
            planned = plan(self.program, card, options)
            if "refused" not in planned:
                self.add("longest", card, options, planned, **names)
                self.add("too long", card, *refused, **names)
                break
            refused = options, planned

    def llmq(self):
        for gb, model, _, _ in LLMQ:
            for lossy in (False, True):
                found = self.quickest(CARD[gb], model, 1024, auto(CARD[gb], HOSTS[256], lossy))
                if found:
                    self.add("llmq", CARD[gb], *found, model=model, host=256, lossy=lossy)

    def required(self):
        options = {**training("llama3-8b", 2048, 3, 2048 * 255), "recompute-granularity": "none", "optimizer-cpu-offload": "true"}
        self.add("required", CARD[80], options, plan(self.program, CARD[80], options), model="llama3-8b", host=256, lossy=False)
        for gb, host, model, lossy in REQUIRED:
            found = self.quickest(CARD[gb], model, 2048, auto(CARD[gb], HOSTS[host], lossy))
            if found:
                self.add("required", CARD[gb], *found, model=model, host=host, lossy=lossy)

    def stages(self):
        for model in STAGE_MODELS:
            for stage in range(4):
                for name, more in STAGE_SETS.items():
                    if stage < more.get("least stage", 0):
                        continue
                    extra = {key: value for key, value in more.items() if key != "least stage"}
                    options = {**training(model, 2048, 1, 2**16, 8), "world-size": 8, "zero-stage": stage, **extra}
                    self.add("stages", CARD[141], options, plan(self.program, CARD[141], options), name=name, model=model, stage=stage)

    def options(self):
        """llama3-8b in each format, and with each kind of buffers on the host."""
        step = {**training("llama3-8b", 2048, 2, BUS_MICRO_STEPS * 2 * 2048), "recompute-granularity": "full"}
        for section, sets in (("formats", {name: more for name, (more, _) in FORMATS.items()}), ("bus", BUS_SETS)):
            for name, more in sets.items():
                options = {**step, **more}
                self.add(section, CARD[80], options, plan(self.program, CARD[80], options), name=name, model="llama3-8b")


BUS_MICRO_STEPS = 2
LONG = {**MODELS["llama3-8b"], "micro-batch-size": 1, "global-batch-size": 1, "mlp-chunk-tokens": 4096}
STAGE_MODELS = ("qwen2.5-0.5b", "llama3-8b")
STAGE_SETS = {
    "nothing recomputed": {},
    "full recomputation": {"recompute-granularity": "full"},
    "full, states and activations on the host": {"recompute-granularity": "full", "optimizer-cpu-offload": "true",
                                                 "cpu-offloading-num-layers": 16},
    "full, gradients on the host too": {"recompute-granularity": "full", "optimizer-cpu-offload": "true",
                                        "offload-gradients": "true", "least stage": 2},
    "full, weights on the host too": {"recompute-granularity": "full", "optimizer-cpu-offload": "true",
                                      "offload-gradients": "true", "offload-weights": "true", "least stage": 3},
}
MOMENTS = {"main-grads-dtype": "bf16", "exp-avg-dtype": "bf16", "exp-avg-sq-dtype": "bf16"}
MOMENTS_8BIT = {**MOMENTS, "exp-avg-dtype": "8bit", "exp-avg-sq-dtype": "8bit"}
NO_MASTER = {"main-params-dtype": "bf16"}
# name: (options, bytes of parameter, remainder, gradient, m, v)
FORMATS = {
    "exact": ({}, (2, 2, 4, 4, 4)), "bf16 gradients": ({"main-grads-dtype": "bf16"}, (2, 2, 2, 4, 4)),
    "bf16 gradients, m, v": (MOMENTS, (2, 2, 2, 2, 2)), "the same, no master": ({**MOMENTS, **NO_MASTER}, (2, 0, 2, 2, 2)),
    "bf16 gradients, 8-bit m, v": (MOMENTS_8BIT, (2, 2, 2, 33 / 32, 33 / 32)),
    "the same with 8 bits, no master": ({**MOMENTS_8BIT, **NO_MASTER}, (2, 0, 2, 33 / 32, 33 / 32)),
}
BUS_SETS = {
    "states": {"optimizer-cpu-offload": "true"}, "layer inputs": {"cpu-offloading-num-layers": 32},
    "gradients": {"offload-gradients": "true"}, "gradients in bf16": {"offload-gradients": "true", "main-grads-dtype": "bf16"},
    "weights": {"offload-weights": "true"}, "states, bf16 m, v": {**MOMENTS, "optimizer-cpu-offload": "true"},
    "states, bf16 m, v, no master": {**MOMENTS, **NO_MASTER, "optimizer-cpu-offload": "true"},
}


# Card, GB of the host, model, lossy: beside llama3-8b on 80 GB with nothing recomputed
REQUIRED = ((16, 64, "qwen2.5-7b", True), (24, 256, "qwen2.5-14b", False), (24, 256, "qwen2.5-14b", True))


def search(program):
    planner = Planner(program)
    planner.required()
    for card in CARDS:
        for host in HOSTS:
            for lossy in (False, True):
                planner.largest(card, host, lossy)
    for card in CARDS:
        for host in HOSTS:
            planner.longest(card, host)
    planner.llmq()
    planner.stages()
    planner.options()
    return planner.rows


def plans_text(rows):
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


@functools.lru_cache(maxsize=None)
def written_plans():
    with open(PLANS, encoding="utf-8") as file:
        return json.load(file)


def rows_of(section):
    return [row for row in written_plans() if row["section"] == section]


def check_plans(program, every):
    """Makes every `every`-th written plan of each section again, its first among them. Returns the exit status."""
    seen = collections.Counter()
    for row in written_plans():
        seen[row["section"]] += 1
        if (seen[row["section"]] - 1) % every:
            continue
        planned = plan(program, CARD[row["card"]], row["options"])
        if "refused" in row and "refused" in planned:
            continue  # in words of its own
        wrong = [key for key, value in planned.items() if row.get(key) != value]
        if wrong:
            print(f"docs/fit_plans.json is not what {program} plans: {wrong[0]} of {' '.join(words(row['options']))} is "
                  f"{planned[wrong[0]]}, and {row.get(wrong[0])} is written; scripts/fit_model.py --train-gpt {program} "
                  ">docs/fit_plans.json, then scripts/fit_model.py >docs/fit.md")
            return 1
    return 0


# ---- the page ----

def gib(value):
    return f"{value / GIB:.1f}"


def rate(value):
    return f"{value:,.0f}"


def state_bytes(row):
    """Returns the bytes a parameter of the formats that auto chose: of parameter, remainder, gradient, m and v."""
    formats = row["choice"].partition(" in host memory; ")[2]
    if not formats:
        return sum(FORMATS["exact"][1])
    match = re.fullmatch(r"moments in (\w+) and (\w+), gradients in (\w+)(, no master weights)?", formats)
    if not match:
        raise Mistake(f"auto's choice is not understood: {row['choice']}")
    sizes = {"fp32": 4, "bf16": 2, "8bit": 33 / 32}
    return 2 + (0 if match[4] else 2) + sum(sizes[name] for name in match.groups()[:3])


def table(head, rows):
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(str(cell) for cell in row)} |" for row in rows)]


MATMUL_SHARE, HOPPERS_SHARE = 0.8, 0.7  # of the data sheet's flop/s, as run/fit_time.cuh has them


def card_table():
    """With the hidden size C and the tokens N from which on copies take no longer than what computes beside them, N = 6.5 C. A layer's
    input has 2 N C bytes, its forward 2 N flops for each of about 13 C^2 weights; weights have 4 bytes a parameter, a micro-step 8 N flops."""
    found = []
    for card in CARDS:
        ratio = 1e12 * (HOPPERS_SHARE if card.gb > 48 else MATMUL_SHARE) * card.tflops / (1e9 * card.bus_gbps)
        found.append((card.gb, card.usable_gib, rate(ratio / 2)))
    return table(("card, GB", "usable GiB", "hidden from N on"), found)


def largest_table():
    plans = {(row["card"], row["host"], row["lossy"]): row for row in rows_of("largest")}
    columns = [(host, lossy) for host in HOSTS for lossy in (False, True)]
    found = []
    for card in CARDS:
        rows = [plans[card.gb, host, lossy] for host, lossy in columns]
        found.append((card.gb, *(f"{row['model']} ({rate(row['tokens_per_s'])})" for row in rows)))
    return table(("card", *(f"{host} GB, {'lossy' if lossy else 'exact'}" for host, lossy in columns)), found)


def llmq_table():
    plans = {(row["card"], row["model"], row["lossy"]): row for row in rows_of("llmq")}
    found = []
    for gb, model, bf16, fp8 in LLMQ:
        predicted = [rate(plans[gb, model, lossy]["tokens_per_s"]) for lossy in (False, True)]
        found.append((gb, model, rate(bf16), rate(fp8), *predicted))
    return table(("card", "model", "llmq, bf16", "llmq, fp8", "ours, exact", "ours, lossy"), found)


def longest_table():
    """Without a larger host's length that is no longer."""
    lengths = {(row["card"], row["host"]): row for row in rows_of("longest")}
    found = []
    for card in CARDS:
        cells, longest = [], 0
        for host in HOSTS:
            row = lengths.get((card.gb, host))
            length = row["options"]["seq-length"] if row else 0
            cells.append(f"{length:,} ({rate(row['tokens_per_s'])})" if length > longest else "-")
            longest = max(longest, length)
        found.append((card.gb, *cells))
    return table(("card", *(f"{host} GB" for host in HOSTS)), found)


def stage_table():
    found = []
    for name in STAGE_SETS:
        rows = {row["stage"]: row for row in rows_of("stages") if (row["model"], row["name"]) == (STAGE_MODELS[-1], name)}
        found.append((name, *(" + ".join(gib(rows[s][which]) for which in ("device_bytes", "host_bytes") if rows[s][which] >= 0.05 * GIB)
                              if s in rows else "-" for s in range(4))))
    return table(("", "stage 0", "stage 1", "stage 2", "stage 3"), found)


def furthest():
    """The most by which a plan exceeds its lower bound."""
    most = max(row["device_bytes"] / row["bound_bytes"] for row in written_plans() if "refused" not in row)
    return f"{100 * (most - 1):.2f} %"


def format_table():
    found = [(row["name"], f"{sum(FORMATS[row['name']][1]):.2f}", gib(row["device_bytes"])) for row in rows_of("formats")]
    return table(("format", "bytes", "device GiB"), found)


# bytes to the host, and to the device where they are others
BUS_WORDS = {
    "states": ("10 P",), "states, bf16 m, v": ("6 P",), "states, bf16 m, v, no master": ("4 P",),
    "layer inputs": ("2 k N (L - 1) C",), "gradients": ("4 k P",), "gradients in bf16": ("2 k P",),
    "weights": ("2 P", "2 k (2 P - ends) + 2 P"),
}


def bus_table():
    found = []
    for row in rows_of("bus"):
        if row["name"].startswith("states, "):
            continue  # fewer bytes of each parameter
        found.append((row["name"], gib(row["device_bytes"]), " out, in ".join(BUS_WORDS[row["name"]])))
    return table(("on the host", "device GiB", "bytes each way"), found)


HEAD = """# What fits which card

Ask the planner for your own model and card. It needs neither the card nor a build for CUDA:

```
build/train_gpt --plan=full --preset qwen2.5-7b --precision bf16 --seq-length 2048 --micro-batch-size 4 --global-batch-size 256 \\
    --recompute-granularity auto --memory-budget 15GiB --host-memory-budget 60GiB --plan-gpu 'GeForce RTX 4080' --allow-lossy-states
```

The plan has auto's choice, the next two choices, every buffer and the predicted step; `--plan` prints some ten lines. Without `--plan` and
`--plan-gpu` the options train, and choose by rates measured on the machine. Where nothing fits, the message names the nearest budget
that suffices. [options.md](options.md#memory) lists the options.

- `--recompute-granularity auto` finds the least predicted time among [recomputation](recomputation.md) by layer and offloads. Options that
  you give stay.
- `--allow-lossy-states`: auto may choose bf16 and 8-bit states, where they gain 2 % of the time. Without it all choices train the same bits.
- `--mlp-chunk-tokens`, `--loss-chunk-tokens`: bits are the same for the same value.

## What is promised

**Times are predicted from data sheets.** Bytes are planned to the byte.

| promise | proof |
|---|---|
| The plans of this page are the engine's; [fit_plans.json](fit_plans.json) has their options and what auto chose | `test/test_fit_page.py` |
| A plan takes at most 2 % more than what lives at once in its fullest phase; on this page the most is {furthest} | `test/test_fit_page.py` |
| More memory never leads to a slower prediction; a budget that a message names is the least to the byte among what auto tries (of a deep model not each number of layers) | `test/op_fit.c` |
| Predictions are within 8 % of an H200's [measured](gpu/measured.md) steps, in bf16 and FP8 | `test/test_fit_page.py` |
| Offload changes no bit | `test/op_offload.c`, `test/op_offload_units.c` |

## Assumed of the cards

Usable is what the driver's context leaves. Of a host's 64, 256 and 1024 GB 60, 240 and 960 GiB may be pinned. Matmuls reach 0.8 of the
data sheets' rates, on Hopper 0.7: {gpus}.
The bus has {slow_bus} GB/s each way, {fast_bus} with 80 and 141 GB. Copies of weights [are hidden](#what-offload-sends-over-the-bus) in
micro-batches of N tokens or more.
"""

LARGEST = """## The largest model

And its tokens/s, by GB of card and host: T = 2048, 524,288 tokens a step, the quickest micro-batch, all else chosen by auto. Exact has
the bits of fp32 masters and moments; lossy holds {least:.2f} to {most:.2f} [bytes a parameter](#bytes-a-parameter). Tried were
{models}.
"""

LLMQ_HEAD = """## Beside llmq

Tokens/s, T = 1024, 524,288 tokens a step. **llmq's are measured** (IST-DASLab/llmq b77d969), of 8 bytes a parameter or fewer; **ours are
predicted**, in bf16, with 256 GB of host.
"""

LONGEST = """## The longest sequence of llama3-8b

And its tokens/s: exact, one sequence a step, to half a power of two, `--mlp-chunk-tokens 4096`, all else chosen by auto. `-`: nothing
fits, or no more than with less.
"""

STAGE_HEAD = """## Eight ranks

llama3-8b, 2048 tokens a micro-batch, GiB of a rank's device + of its host memory, by `--zero-stage` ([parallel.md](parallel.md)):
"""

FORMAT_HEAD = """## Bytes a parameter

Exact are 2 bytes of the parameter, 2 that make it an fp32 master, 4 each of gradient, m and v. 8-bit blocks of 128 have an fp32 scale;
the head's and the embedding's m and v are bf16 then. GiB are llama3-8b's, full recomputation, 2 x 2048 tokens:
"""

BUS_HEAD = """## What offload sends over the bus

A step of k micro-steps of N tokens, P parameters, L layers, hidden size C; ends are the head's and the embedding's parameters. GiB are
as above, k = 2, N = 4096. `test/test_fit_page.py` compares plans with the formulas.
"""

HIDDEN = """Copies run beside compute: weights are hidden from the [cards'](#assumed-of-the-cards) N on, inputs from C = N / 6.5; gradients want as much
N again, half in bf16. The update's copies are not hidden: 10 bytes of 1e9 parameters take {slow} ms on PCIe 4, {fast} on PCIe 5.
"""

LOSSES_HEAD = """## Losses by state format

Measured on the cpu target in bf16, 2026-11-22, one seed: validation loss after 2000 steps on manual pages' bytes, llama shape of 4 layers,
hidden size 128, 4 x 128 tokens a step. A learning rate that differs by 0.1 % moves the loss by 0.02 %.
"""
# formats, bytes a parameter, validation loss
LOSSES = [
    ("exact", "16", 1.56426),
    ("bf16 parameters, stochastic rounding, no master", "14", 1.56485),
    ("the same, m and v in bf16", "10", 1.56516),
    ("m and v in 8 bits", "10.06", 1.56525),
    ("bf16 parameters, no master, m and v in 8 bits", "8.06", 1.56462),
    ("the same, bf16 gradients", "6.06", 1.56343),
]
LOSSES_TAIL = """Papers of larger models: bf16 moments (2412.19437): no loss seen; stochastic rounding
(2502.20566): perplexity no worse up to 6.7B, at a higher learning rate; 8-bit moments (2110.02861): on par, embeddings kept wider.
"""


def losses_table():
    return table(("formats", "bytes", "loss"), [(formats, size, f"{loss:.4f}") for formats, size, loss in LOSSES])


def page():
    update_ms = {name: f"{10_000 / card.bus_gbps:.0f}" for name, card in (("slow", CARDS[0]), ("fast", CARDS[-1]))}
    gpus = {card.gpu: [str(other.gb) for other in CARDS if other.gpu == card.gpu] for card in CARDS}
    sheets = {"gpus": ", ".join(f"{gpu} ({', '.join(sizes)})" for gpu, sizes in gpus.items()), "slow_bus": CARD[8].bus_gbps, "fast_bus": CARD[80].bus_gbps}
    lossy = [state_bytes(row) for row in rows_of("largest") if row["lossy"]]
    parts = [HEAD.format(furthest=furthest(), **sheets), *card_table(), "",
             LARGEST.format(models=", ".join(CANDIDATES), least=min(lossy), most=max(lossy)), *largest_table(), "",
             LONGEST, *longest_table(), "", LLMQ_HEAD, *llmq_table(), "", STAGE_HEAD, *stage_table(), "",
             FORMAT_HEAD, *format_table(), "", BUS_HEAD, *bus_table(), "", HIDDEN.format(**update_ms),
             LOSSES_HEAD, *losses_table(), "", LOSSES_TAIL]
    return "\n".join(parts).rstrip() + "\n"


def main(arguments):
    parser = argparse.ArgumentParser(description="What fits which GPU; without options writes docs/fit.md.")
    parser.add_argument("--check", action="store_true", help="whether the page, or the plans, are what this writes")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="with --check: only every N-th plan of each section")
    parser.add_argument("--train-gpt", metavar="PROGRAM", help="makes the plans")
    options = parser.parse_args(arguments)
    if options.train_gpt and options.check:
        return check_plans(options.train_gpt, options.every)
    if options.train_gpt:
        sys.stdout.write(plans_text(search(options.train_gpt)))
        return 0
    return write_or_check(tables_as_blocks(page()), PAGE, options.check, "docs/fit.md is not what scripts/fit_model.py writes: "
                                   "scripts/fit_model.py >docs/fit.md")


if __name__ == "__main__":
    sys.exit(run_script("fit_model.py", main, sys.argv[1:]))
