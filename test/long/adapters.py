#!/usr/bin/env python3
"""Trains LoRA's adapters on a small random model of every architecture (make_zoo.py's, at the larger shapes) three
times: by the program; by peft and torch.optim.AdamW in fp32; and by these in fp64. Reports how far each of the two
trainings in fp32 is from fp64.

  test/long/adapters.py [MODEL]...     checks losses, gradients' norms and adapters against fp64
  --epsilon X --b-std X --draws N      with another epsilon of AdamW or standard deviation of B before training, N
                                       random models of each MODEL: checks only the losses, and prints what it finds

AdamW divides the first gradient of an element by its own size. If this gradient is within its rounding error of 0 and
epsilon is as small, rounding decides the update. The default epsilon here is far above the rounding errors.
"""
import argparse
import contextlib
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from environment import ROOT
from test_cli import write_shard
from test_huggingface import zoo_maker

PROGRAM = os.environ.get("TRAIN_GPT") or ROOT + "/build/train_gpt"
BATCH, STEPS, RANK, LR, BETAS, CLIP = 2, 5, 8, 1e-3, (0.9, 0.95), 1.0
EPSILON, B_STD = 1e-4, 0.05  # B is not zero, so that the first step has every gradient
# Relative tolerances, as in test_huggingface.py and test_lora.py; for an adapter's matrix, of the difference's norm.
TOLERANCES = {"losses": 1e-6, "norms": 1e-4, "adapters": 1e-5}


def largest_of(values):
    """Returns the largest value; infinity where a value is not a number."""
    values = list(values)
    return math.inf if any(map(math.isnan, values)) else max(values)


class Training:
    """The results of a training: its losses, its gradients' norms, and its adapters by the names of peft's files."""

    def __init__(self, losses, norms, adapters):
        self.losses, self.norms, self.adapters = losses, norms, adapters

    def distances(self, other):
        """Returns {quantity: the largest relative difference from the other training}."""
        if self.adapters.keys() != other.adapters.keys():
            raise SystemExit("adapters.py: other names: %s" % sorted(self.adapters.keys() ^ other.adapters.keys()))
        apart = lambda ours, theirs: largest_of(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))
        matrix = lambda ours, theirs: ((ours - theirs).norm() / theirs.norm()).item()
        adapters = largest_of(matrix(value, other.adapters[name]) for name, value in self.adapters.items())
        return {"losses": apart(self.losses, other.losses), "norms": apart(self.norms, other.norms), "adapters": adapters}


def make_adapters(folder, base, b_std, generator):
    """Writes a folder as peft saves it."""
    import peft
    import torch

    torch.manual_seed(generator.initial_seed())
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.copy_(b_std * torch.randn(value.shape, generator=generator))
    model.save_pretrained(folder)


def train_peft(make_zoo, folder, adapters, tokens, double, epsilon):
    import make_golden
    import peft
    import torch

    base = make_zoo.open_folder(folder)
    if double:
        base = make_zoo.in_double(base)
        torch.set_default_dtype(torch.float32)
    model = peft.PeftModel.from_pretrained(base, adapters, is_trainable=True).eval()
    if double:
        torch.set_default_dtype(torch.float64)
        model = model.double()
    trained = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=LR, betas=BETAS, eps=epsilon, weight_decay=0.0, foreach=False)
    losses, norms = [], []
    with make_golden.DoublePrecision() if double else contextlib.nullcontext():
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = make_zoo.token_losses(make_zoo.whole_logits(model, tokens[:, :-1]), tokens[:, 1:]).mean()
            loss.backward()
            losses.append(loss.item())
            norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), CLIP, foreach=False).item())
            optimizer.step()
    torch.set_default_dtype(torch.float32)
    return Training(losses, norms, {name: p.detach().double() for name, p in trained.items()})


def train_ours(folder, adapters, shard, tokens, epsilon):
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as out:
        options = {"init-from": folder, "lora-adapter": adapters, "train-data": shard, "out": out, "seq-length": tokens,
                   "micro-batch-size": BATCH, "train-steps": STEPS, "lr": LR, "lr-decay-style": "constant", "weight-decay": 0,
                   "adam-beta1": BETAS[0], "adam-beta2": BETAS[1], "adam-eps": epsilon, "clip-grad": CLIP, "precision": "fp32",
                   "device": "cpu", "threads": 1, "log-every": 1}  # fmt: skip
        subprocess.run([PROGRAM, *(word for name, value in options.items() for word in ("--" + name, str(value)))], check=True,
                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        with open(out + "/log.jsonl", encoding="utf-8") as file:
            steps = [line for line in map(json.loads, file) if "grad_norm" in line]
        saved = load_file("%s/checkpoints/step_%08d/adapter_model.safetensors" % (out, STEPS))
    return Training([step["loss"] for step in steps], [step["grad_norm"] for step in steps],
                    {name: value.double() for name, value in saved.items()})


def measure(make_zoo, name, seed, options, path):
    """Returns the distances from fp64, of the program and of peft in fp32, for one random model."""
    import torch

    folder, adapters, shard = pathlib.Path(path) / name, path + "/adapters_" + name, path + "/" + name + ".bin"
    size, T, generator = make_zoo.LARGE, make_zoo.LARGE.T, torch.Generator().manual_seed(seed)
    make_zoo.save(folder, name, size, make_zoo.make_model(name, size, generator))
    make_adapters(adapters, make_zoo.open_folder(folder), options.b_std, generator)
    stream = make_zoo.random_stream(T, generator)
    write_shard(shard, stream.tolist())
    tokens = torch.stack([stream[row * T : row * T + T + 1] for row in range(BATCH)])  # rows overlap by a token, as in a shard
    exact, rounded = (train_peft(make_zoo, folder, adapters, tokens, double, options.epsilon) for double in (True, False))
    return train_ours(folder, adapters, shard, T, options.epsilon).distances(exact), rounded.distances(exact)


def wrong(found, options):
    """Returns which of the program's distances exceed their tolerances, as text; "" if none does."""
    checked = TOLERANCES if options.epsilon == EPSILON and options.b_std == B_STD else {"losses": TOLERANCES["losses"]}
    exceeding = [quantity for quantity, most in checked.items() if not found[quantity] <= most]
    return ", ".join("%s differ by %.1e" % (quantity, found[quantity]) for quantity in exceeding)


def parse(models):
    parser = argparse.ArgumentParser(description="LoRA beside peft in fp32 and fp64")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="of " + ", ".join(models))
    parser.add_argument("--epsilon", type=float, default=EPSILON)
    parser.add_argument("--b-std", type=float, default=B_STD)
    parser.add_argument("--draws", type=int, default=1)
    options = parser.parse_args()
    unknown = set(options.models) - set(models)
    if unknown:
        parser.error("no model %s; there are %s" % (", ".join(sorted(unknown)), ", ".join(models)))
    return options


def main():
    try:
        import peft  # noqa: F401

        make_zoo, _ = zoo_maker()
    except ImportError as error:
        print("missing: the Python package %s" % error.name)
        return 77
    options = parse(list(make_zoo.ZOO))
    models, failed, largest = options.models or list(make_zoo.ZOO), 0, 0.0
    print("adapters after %d steps, epsilon %g: relative distance from fp64; least, median and most of %d models"
          % (STEPS, options.epsilon, options.draws))
    print("%-22s %-28s %s" % ("", "train_gpt in fp32", "peft in fp32"))
    for name in models:
        with tempfile.TemporaryDirectory() as path:
            found = [measure(make_zoo, name, seed, options, path) for seed in range(options.draws)]
        ours, theirs = ([which["adapters"] for which in side] for side in zip(*found))
        cells = ["%.1e  %.1e  %.1e" % (min(side), statistics.median(side), max(side)) for side in (ours, theirs)]
        words = "; ".join(filter(None, (wrong(one, options) for one, _ in found)))
        print("%-22s %s    %s%s" % (name, *cells, "  failed: " + words if words else ""), flush=True)
        failed += bool(words)
        largest = max(largest, *ours)
    print("figure: adapters %.1e" % largest)
    print("%d passed, %d failed" % (len(models) - failed, failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
