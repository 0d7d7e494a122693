#!/usr/bin/env python3
"""Measures the tokens and the time for which recipes train until the validation loss reaches a target.

  scripts/bench_to_loss.py --model demo                          all recipes of the demo's model, three seeds
  scripts/bench_to_loss.py --recipe adam muon --seeds 1 2        some of them; the first is the baseline
  scripts/bench_to_loss.py --recipe adam 'adam2x=--lr 1e-2'      your own recipe: the baseline's steps, these options
  scripts/bench_to_loss.py --model 124m --data 'fineweb_train_*.bin' 'fineweb_val_*.bin'

All runs of a model train on the same text and are validated on the same tokens. Unless --target gives it, the target is
the highest loss that a seed of the baseline ends with, so that every seed of the baseline reaches it. Between two
validations the loss is taken to fall linearly with the steps. Validations do not count as time. The time of a token is
measured in short runs, in which the recipes take turns, so that other work on the machine slows all recipes alike;
--time-rounds 0 takes the sum of the whole runs' steps instead.

OUT/MODEL/RECIPE/seed_N holds a run. A finished run of the same options is not run again, so that the script may be
stopped and started again. OUT/MODEL has table.md, table.json and picture.svg.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass

import plot_loss
from mistakes import Mistake, run_script
from plot_loss import write_whole

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass(frozen=True)
class Model:
    options: str
    sequences: int  # of a validation: the first of the validation data
    checkpoint_every: int  # steps; 0: an interrupted run begins anew
    needs_data: bool
    recipes: dict  # name: options; the first is the baseline


MODELS = {
    # 0.8M parameters. adam: an earlier `make demo`; muon: the present one (docs/recipes.md)
    "demo": Model(
        "--preset demo --micro-batch-size 8 --val-every 100",
        512,
        0,
        False,
        {
            "adam": "--train-steps 2600 --lr 5e-3 --lr-warmup-steps 40 --min-lr 1e-4",
            "adam_tuned": "--train-steps 1800 --lr 2e-3 --lr-warmup-steps 40 --lr-decay-style linear "
            "--init-method-std 0.06",
            "muon": "--train-steps 1200 --lr 3e-3 --lr-warmup-steps 40 --lr-decay-style linear --init-method-std 0.06 "
            "--optimizer muon --muon-momentum 0.9 --muon-num-ns-steps 3",
        },
    ),
    # 4.8M parameters, 3.1M tokens of bytes
    "5m": Model(
        "--preset demo --num-layers 6 --hidden-size 256 --num-attention-heads 8 --num-query-groups 4 "
        "--ffn-hidden-size 768 --seq-length 256 --micro-batch-size 8 --train-steps 1500 --lr-warmup-steps 40 "
        "--lr-decay-style linear --init-method-std 0.05 --val-every 50",
        512,
        0,
        False,
        {
            "adam": "--lr 2e-3",
            "muon": "--lr 2e-3 --optimizer muon --muon-momentum 0.9 --muon-num-ns-steps 3",
        },
    ),
    # GPT-2's shape at 0.5M tokens a step
    "124m": Model(
        "--preset gpt2-124m --micro-batch-size 32 --global-batch-size 512 --val-every 125",
        10240,
        1000,
        True,
        {
            "adam": "--train-steps 5600 --lr 1.8e-3 --lr-warmup-steps 256 --lr-decay-style WSD --lr-wsd-decay-steps 1600 "
            "--lr-wsd-decay-style linear",
            "muon": "--train-steps 5600 --lr 1.8e-3 --lr-warmup-steps 256 --lr-decay-style WSD --lr-wsd-decay-steps 1600 "
            "--lr-wsd-decay-style linear --optimizer muon",
        },
    ),
}
TIMED_STEPS, UNTIMED_STEPS = 40, 8  # steps of a short run; the first of them, in which caches and clocks settle
COLORS = ["#555555", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"]  # by Okabe and Ito
LEFT, PANEL, GAP, TOP, BOTTOM, WIDTH = 64, 400, 64, 64, 344, 960


# --- Runs -------------------------------------------------------------------------------------------------------------


def value_of(options, name, default=None):
    """Returns the last value that a list of options gives to an option; the default where it gives none."""
    values = [options[i + 1] for i, option in enumerate(options[:-1]) if option == name]
    values += [option[len(name) + 1 :] for option in options if option.startswith(name + "=")]
    return values[-1] if values else default


class Recipe:
    def __init__(self, name, model, options, data):
        self.name = name
        self.options = shlex.split(model.options) + shlex.split(options)
        sequences = int(value_of(self.options, "--micro-batch-size", "4"))
        if model.sequences % sequences:
            raise Mistake(
                f"recipe {name}: --micro-batch-size {sequences} does not divide the {model.sequences} sequences of the "
                "validation set; choose one that does"
            )
        self.steps = int(value_of(self.options, "--train-steps", "0"))
        if self.steps <= UNTIMED_STEPS:
            raise Mistake(f"recipe {name}: --train-steps is {self.steps}; expected more than {UNTIMED_STEPS}")
        self.options += ["--val-steps", str(model.sequences // sequences), "--train-data", data[0], "--val-data", data[1]]


class Bench:
    """Runs recipes, or takes their runs from the folder."""

    def __init__(self, program, folder, machine, checkpoint_every):
        self.program, self.folder, self.checkpoint_every = program, folder, checkpoint_every
        self.machine = machine  # options that say where to compute

    def train(self, recipe, seed):
        """Returns the log of a whole run; starts or resumes the run where it is not finished."""
        kept = ["--checkpoint-every", str(self.checkpoint_every), "--keep-checkpoints", "1"]
        options = [*recipe.options, *kept, "--seed", str(seed), *self.machine]
        return self.run(os.path.join(self.folder, recipe.name, f"seed_{seed}"), options, recipe.steps)

    def time(self, recipe, number):
        """Returns seconds a token, the median over a short run."""
        steps = min(recipe.steps, TIMED_STEPS)
        # The schedule stays the whole run's, whose warm-up may be longer than the short run.
        decay = value_of(recipe.options, "--lr-decay-steps", str(recipe.steps))
        options = [*recipe.options, "--train-steps", str(steps), "--lr-decay-steps", decay, "--val-every", "0"]
        options += ["--checkpoint-every", "0", *self.machine]
        log = self.run(os.path.join(self.folder, recipe.name, f"time_{number}"), options, steps)
        return log.seconds_a_token()

    def run(self, folder, options, steps):
        """Returns the log of a run in the folder; runs what is missing. Removes a run of other options."""
        note, path = os.path.join(folder, "options.json"), os.path.join(folder, "log.jsonl")
        if os.path.isdir(folder) and (not os.path.exists(note) or read_json(note) != options):
            if not os.path.exists(note) and os.listdir(folder):
                raise Mistake(f"{folder}: was not made by this script; choose another --out")
            shutil.rmtree(folder)
        if os.path.exists(path):
            log = Log(path)
            if log.steps == steps:
                return log
        os.makedirs(folder, exist_ok=True)
        write_whole(note, json.dumps(options))
        print(f"{folder}: {steps} steps", flush=True)
        command = [self.program, *options, "--out", folder, "--resume", "auto"]
        with open(os.path.join(folder, "output.txt"), "a", encoding="utf-8") as output:
            status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
        log = Log(path) if os.path.exists(path) else None
        if status != 0 or not log or log.steps != steps:
            with open(os.path.join(folder, "output.txt"), encoding="utf-8", errors="replace") as output:
                last = output.read().strip().split("\n")[-1]
            raise Mistake(f"{folder}: the run ended with status {status}: {last}\n  {shlex.join(command)}")
        shutil.rmtree(os.path.join(folder, "checkpoints"), ignore_errors=True)
        return log


class Log:
    """A run's log: the tokens and seconds up to each step, and the validation losses."""

    def __init__(self, path):
        run = plot_loss.Run(path)
        self.steps = run.rows[-1]["step"]
        self.losses = run.val_loss
        self.tokens, self.seconds = {0: 0}, {0: 0.0}
        self.last = 0  # the last step that was trained
        for row in run.rows:
            if "step_ms" in row:
                step = row["step"]
                if step != self.last + 1:
                    raise Mistake(f"{path}: step {step} follows step {self.last}; remove its folder, to train again")
                self.tokens[step] = row["tokens"]
                self.seconds[step] = self.seconds[self.last] + row["step_ms"] / 1e3
                self.last = step

    def seconds_a_token(self):
        first = min(UNTIMED_STEPS, self.last - 1)
        rates = [
            (self.seconds[step] - self.seconds[step - 1]) / (self.tokens[step] - self.tokens[step - 1])
            for step in range(first + 1, self.last + 1)
        ]
        return statistics.median(rates)

    def at(self, series, step):
        """Returns a series' value at a step with a fraction, interpolated."""
        below = min(int(step), self.last - 1)
        return series[below] + (step - below) * (series[below + 1] - series[below])

    def crossing(self, target):
        """Returns the step, with its fraction, at which the validation loss first reaches the target; None where it
        never does."""
        before = None
        for step, loss in self.losses:
            if loss <= target:
                return step if before is None else before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
            before = step, loss
        return None


def read_json(path):
    with open(path, encoding="utf-8") as file:
        try:
            return json.load(file)
        except ValueError:
            return None


# --- Results ----------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    recipe: Recipe
    logs: dict  # by seed
    times: list  # seconds a token, of each round

    def seconds(self, log, step):
        """Returns the training time up to a step."""
        if self.times:
            return log.at(log.tokens, step) * statistics.median(self.times)
        return log.at(log.seconds, step)

    def reached(self, target):
        """Returns steps, tokens and seconds to the target, by seed; seeds that do not reach the target are left out."""
        found = {}
        for seed, log in self.logs.items():
            step = log.crossing(target)
            if step is not None:
                found[seed] = {
                    "steps": step,
                    "tokens": log.at(log.tokens, step),
                    "seconds": self.seconds(log, step),
                }
        return found

    def final(self):
        return [log.losses[-1][1] for log in self.logs.values()]

    def step_ms(self):
        tokens = statistics.median(log.tokens[log.last] / log.last for log in self.logs.values())
        if self.times:
            return statistics.median(self.times) * tokens * 1e3
        return statistics.median(log.seconds_a_token() for log in self.logs.values()) * tokens * 1e3


def spread(values):
    """Returns mean and range, since a standard deviation of three values says less; None where there is no value."""
    return {"mean": statistics.mean(values), "low": min(values), "high": max(values)} if values else None


def summarize(results, target):
    """Returns a row for each recipe. Ratios are to the baseline: of tokens with the same seed, of times in the same
    round."""
    first = results[0]
    baseline = first.reached(target)
    rows = []
    for result in results:
        reached = result.reached(target)
        both = [seed for seed in reached if seed in baseline]
        tokens = [reached[seed]["tokens"] / baseline[seed]["tokens"] for seed in both]
        if result.times:
            rate = statistics.median(mine / theirs for mine, theirs in zip(result.times, first.times))
            time = [ratio * rate for ratio in tokens]
        else:
            time = [reached[seed]["seconds"] / baseline[seed]["seconds"] for seed in both]
        rows.append(
            {
                "recipe": result.recipe.name,
                "options": result.recipe.options,
                "seeds": list(result.logs),
                "reached": list(reached),
                "final_loss": spread(result.final()),
                "steps": spread([value["steps"] for value in reached.values()]),
                "tokens": spread([value["tokens"] for value in reached.values()]),
                "tokens_ratio": spread(tokens),
                "step_ms": result.step_ms(),
                "seconds": spread([value["seconds"] for value in reached.values()]),
                "time_ratio": spread(time),
            }
        )
    return rows


def with_range(value, form):
    if value is None:
        return "-"
    if form(value["low"]) == form(value["high"]):
        return form(value["mean"])
    return f"{form(value['mean'])} ({form(value['low'])} to {form(value['high'])})"


def table(rows, target, rounds):
    lines = [
        f"Validation loss {target:.4f}; mean over seeds, and their range; ratios to {rows[0]['recipe']} with the same seed.",
        f"Time: {rounds} rounds in which the recipes took turns." if rounds else "Time: the sum of the runs' own steps.",
        "",
        "| recipe | reached | final loss | tokens to target | of baseline | ms a step | seconds to target | of baseline |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ratio = "{:.2f}".format
    for row in rows:
        count = f"{len(row['reached'])} of {len(row['seeds'])}" if row["reached"] else "not reached"
        cells = [
            row["recipe"],
            count,
            with_range(row["final_loss"], "{:.4f}".format),
            with_range(row["tokens"], plot_loss.short),
            with_range(row["tokens_ratio"], ratio),
            f"{row['step_ms']:.4g}",
            with_range(row["seconds"], "{:.4g}".format),
            with_range(row["time_ratio"], ratio),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


# --- The picture ------------------------------------------------------------------------------------------------------


def panel(results, target, y, left, unit, place):
    """Draws validation loss over tokens or seconds: thin lines for the seeds, a thick line for their mean.
    place(result, log, step) gives the tokens or seconds."""
    high = max(place(result, log, log.last) for result in results for log in result.logs.values())
    x = plot_loss.Axis(0, high, left, left + PANEL)
    parts = []
    values = plot_loss.ticks(0, high, 6)
    for value in values:
        parts.append(f'<path d="M{x(value):.1f} {TOP}V{BOTTOM}" stroke="{plot_loss.GRID}"/>')
        parts.append(plot_loss.text(x(value), BOTTOM + 18, plot_loss.short(value), anchor="middle"))
    values = plot_loss.ticks(y.low, y.high, 7)
    for value in values:
        parts.append(f'<path d="M{left} {y(value):.1f}H{left + PANEL}" stroke="{plot_loss.GRID}"/>')
        parts.append(plot_loss.text(left - 8, y(value) + 4, plot_loss.tick_text(value, values), anchor="end"))
    parts.append(f'<path d="M{left} {y(target):.1f}H{left + PANEL}" stroke="#999999" stroke-dasharray="5 4"/>')
    parts.append(f'<path d="M{left} {TOP}V{BOTTOM}H{left + PANEL}" fill="none" stroke="#aaaaaa"/>')
    parts.append(plot_loss.text(left + PANEL / 2, BOTTOM + 38, unit, 13, anchor="middle"))
    parts.append(f'<g clip-path="url(#loss{left})">')
    parts.append(f'<clipPath id="loss{left}"><path d="M{left} {TOP}h{PANEL}V{BOTTOM}h{-PANEL}z"/></clipPath>')
    for color, result in zip(COLORS, results):
        logs = list(result.logs.values())
        curves = [[(x(place(result, log, step)), y(loss)) for step, loss in log.losses] for log in logs]
        if len(logs) > 1:
            parts += [plot_loss.line(curve, color, 0.8, 0.4) for curve in curves]
        if len({len(curve) for curve in curves}) == 1:
            mean = [tuple(statistics.mean(values) for values in zip(*points)) for points in zip(*curves)]
            parts.append(plot_loss.line(mean, color, 2))
    return parts + ["</g>"]


def draw(results, target, title):
    losses = [loss for result in results for log in result.logs.values() for _, loss in log.losses]
    # Shows the last third of the way down to the target: the steep beginning would take most of the height, and tells
    # recipes apart least.
    low, first = min(losses), max(log.losses[0][1] for result in results for log in result.logs.values())
    high = max(target + (first - low) / 3, low + 1e-3)
    y = plot_loss.Axis(low - 0.04 * (high - low), high, BOTTOM, TOP)
    height = BOTTOM + 52
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        plot_loss.text(LEFT, 26, title, 16, plot_loss.TEXT, weight="bold"),
        plot_loss.text(LEFT, 46, f"validation loss, nats a token; dashed: the target, {target:.4f}", 12),
    ]
    parts += panel(results, target, y, LEFT, "tokens", lambda result, log, step: log.at(log.tokens, step))
    right = LEFT + PANEL + GAP
    parts += panel(results, target, y, right, "seconds of training", lambda result, log, step: result.seconds(log, step))
    for i, (color, result) in enumerate(zip(COLORS, results)):
        middle, left = TOP + 16 + 18 * i, right + PANEL - 30 - 7 * max(len(result.recipe.name) for result in results)
        parts.append(f'<path d="M{left - 4} {middle}h22" stroke="{color}" stroke-width="2.2"/>')
        parts.append(plot_loss.text(left + 24, middle + 4, result.recipe.name, color=plot_loss.TEXT))
    return "\n".join(parts + ["</svg>", ""])


# --- Command line -----------------------------------------------------------------------------------------------------


def demo_data():
    """Returns the globs of `make demo`'s shards; makes the shards where they are missing."""
    prefix = os.path.join(ROOT, "data", "demo")
    if not os.path.exists(prefix + "_train_000.bin"):
        os.makedirs(os.path.dirname(prefix), exist_ok=True)
        prepare = [sys.executable, os.path.join(ROOT, "scripts", "prepare_data.py"), "/usr/include", "--include", "*.h"]
        subprocess.run([*prepare, "--max-bytes", "40M", "--out", prefix], check=True)
    return prefix + "_train_*.bin", prefix + "_val_*.bin"


def chosen_recipes(model, given, data):
    baseline = next(iter(model.recipes.values()))
    recipes = []
    for text in given or model.recipes:
        name, own, options = text.partition("=")
        if own:
            options = f"{baseline} {options}"
        elif name in model.recipes:
            options = model.recipes[name]
        else:
            raise Mistake(f"--recipe {name}: expected NAME=OPTIONS or one of {', '.join(model.recipes)}")
        if not name.replace("_", "").replace("-", "").replace(".", "").isalnum():
            raise Mistake(f"--recipe {name}: names a folder; expected letters, digits, '.', '-' and '_'")
        recipes.append(Recipe(name, model, options, data))
    if len({recipe.name for recipe in recipes}) < len(recipes):
        raise Mistake("--recipe: a name is given twice")
    if len(recipes) > len(COLORS):
        raise Mistake(f"--recipe: {len(recipes)} recipes; expected at most {len(COLORS)} in one picture")
    return recipes


def measure(bench, recipes, seeds, rounds):
    """Returns the recipes' results. Recipes take turns, so that other work on the machine meets all of them."""
    results = [Result(recipe, {}, []) for recipe in recipes]
    for number in range(rounds):
        for result in results:
            result.times.append(bench.time(result.recipe, number))
    for seed in seeds:
        for result in results:
            log = bench.train(result.recipe, seed)
            if not log.losses or not all(math.isfinite(loss) for _, loss in log.losses):
                raise Mistake(f"recipe {result.recipe.name}, seed {seed}: has no validation loss, or one that is not finite")
            result.logs[seed] = log
    return results


def run(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", choices=MODELS, default="5m", help="default: 5m")
    parser.add_argument("--recipe", nargs="+", metavar="NAME[=OPTIONS]", help="the first is the baseline (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="N", help="default: 1 2 3")
    parser.add_argument("--target", type=float, metavar="LOSS", help="default: where the baseline's worst seed ends")
    parser.add_argument("--data", nargs=2, metavar="GLOB", help="shards to train and to validate on (default: the demo's)")
    parser.add_argument("--time-rounds", type=int, default=5, metavar="N", help="short runs a recipe (default: 5)")
    parser.add_argument("--out", default=os.path.join(ROOT, "out", "bench_to_loss"), metavar="DIR")
    parser.add_argument("--device", help="cpu or cuda (default: train_gpt's choice)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="default: all that train_gpt may use")
    parser.add_argument("--train-gpt", default=os.path.join(ROOT, "build", "train_gpt"), metavar="PROGRAM")
    options = parser.parse_args(arguments)
    model = MODELS[options.model]
    if model.needs_data and not options.data:
        raise Mistake(f"--model {options.model} needs --data: globs of tokenized shards to train and to validate on")
    if not os.path.exists(options.train_gpt):
        raise Mistake(f"{options.train_gpt}: no such program; run make, or name it by --train-gpt")

    recipes = chosen_recipes(model, options.recipe, options.data or demo_data())
    folder = os.path.join(options.out, options.model)
    machine = [*(["--device", options.device] if options.device else []), "--threads", str(options.threads)]
    bench = Bench(options.train_gpt, folder, machine, model.checkpoint_every)
    results = measure(bench, recipes, options.seeds, options.time_rounds)
    target = options.target if options.target is not None else max(results[0].final())
    rows = summarize(results, target)
    text = table(rows, target, options.time_rounds)
    write_whole(os.path.join(folder, "table.md"), text)
    facts = {"model": options.model, "target": target, "time_rounds": options.time_rounds, "recipes": rows}
    write_whole(os.path.join(folder, "table.json"), json.dumps(facts, indent=1) + "\n")
    write_whole(os.path.join(folder, "picture.svg"), draw(results, target, f"Recipes to one loss: {options.model}"))
    print(text, end="")
    print(f"wrote {folder}/table.md, table.json, picture.svg")


def main(arguments=None):
    return run_script("bench_to_loss.py", run, arguments)


if __name__ == "__main__":
    sys.exit(main())
