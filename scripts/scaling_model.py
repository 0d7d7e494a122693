#!/usr/bin/env python3
"""What a training step is expected to take on 8 to 1024 H200s, by a model: writes docs/internals/scaling.md.

  scripts/scaling_model.py            the page on stdout
  scripts/scaling_model.py --check    whether docs/internals/scaling.md is that page
  scripts/scaling_model.py --train-gpt PROGRAM [--check]
                                      the memory plans that the page needs, made by a train_gpt: writes
                                      docs/internals/scaling_plans.json, or holds it to what that program plans
  scripts/scaling_model.py --model llama3-8b --gpus 64 --zero-stage 2 [--bucket-mib 128 --nvlink-gbps 340 ...]
                                      one run as JSON, with what was measured on a cluster in place of what is assumed;
                                      --train-gpt PROGRAM plans its memory where docs/internals/scaling_plans.json has no such run

Compute is each kernel's roofline (roofline.py) over a stated efficiency. Collectives cost latency and bytes as NCCL's own
tuning model has them. Both are queues that wait for each other where the engine does; a step is the time until both are
empty. docs/internals/scaling.md has what is assumed. Memory is no part of the model: it is what the engine plans.
"""
import argparse
import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
import tempfile

import roofline
from mistakes import Mistake, run_script
from roofline import Shape
from written_page import tables_as_blocks, write_or_check

DOCS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "docs", "internals")
PAGE, PLANS = os.path.join(DOCS, "scaling.md"), os.path.join(DOCS, "scaling_plans.json")
DATA_SHEET_FLOPS_PER_S = 989.5e12  # what MFU is held against
POLICIES = ("none", "selective", "full")


@dataclasses.dataclass(frozen=True)
class Machine:
    """What is assumed of a GPU and of the network. Rates in GB/s are 1e9 bytes a second."""
    gpus_per_node: int = 8
    nvlink_gbps: float = 360.0   # bus bandwidth within a node, as nccl-tests report it
    nic_gbps: float = 45.0       # a GPU's own adapter: 90 % of 400 Gb/s
    efficiency: float = 0.75     # of each kernel's roofline; attention has its own rates
    attention_tflops: tuple = (300.0, 240.0)  # forward, backward: mma.sync's, below an H200's in docs/gpu/measured.md
    sm_share: float = 16 / 132   # of the compute rate that a running collective takes: 16 channels of 132 SMs
    memory_gb: float = 141.0
    reserve_gb: float = 2.0      # besides the plan: CUDA's context and kernels, NCCL's buffers
    latency_scale: float = 1.0


# NCCL 2.30, src/graph/tuning.cc, Hopper, ring: us at the start, us a hop on NVLink, us a hop between nodes, share of the
# bandwidth, GB/s at most within a node, GB/s at most between nodes.
RING = (
    (6.6, 0.6, 2.7, 0.5, 141.0, 35.0),             # LL
    (14.0, 1.9, 4.0, 0.92, math.inf, math.inf),    # LL128
    (8.4, 3.4, 14.0, 1.0, math.inf, math.inf),     # Simple
)
LL_HOP_OF_SEVERAL_NODES = 1.8                      # a hop on NVLink takes LL so much longer there
LEAST_BUCKET_MIB = 32               # of the engine's --bucket-mib 0, else a MiB a rank
REPORT_NUMBERS = 2                  # of a rank, besides its losses: the squares of its gradients, what it asks of all


def nodes_of(machine, gpus):
    return -(-gpus // machine.gpus_per_node)


def ring_seconds(machine, gpus, size):
    """A reduce-scatter or all-gather of `size` bytes in all on one ring through every GPU: n - 1 hops, (n-1)/n of the bytes.
    All adapters of a node carry their share, so between nodes the rate is the lower of NVLink's and their sum."""
    nodes = nodes_of(machine, gpus)
    rate = machine.nvlink_gbps if nodes == 1 else min(machine.nvlink_gbps, machine.gpus_per_node * machine.nic_gbps)

    def protocol(start, near, far, share, most_near, most_far):
        if nodes > 1 and (start, near) == RING[0][:2]:
            near *= LL_HOP_OF_SEVERAL_NODES
        latency = start + (gpus - nodes) * near + (nodes - 1) * far
        bandwidth = 1e9 * min(rate * share, most_near if nodes == 1 else most_far)
        return 1e-6 * machine.latency_scale * latency + (gpus - 1) / gpus * size / bandwidth

    return min(protocol(*row) for row in RING)


def collective_seconds(machine, gpus, size):
    return ring_seconds(machine, gpus, size) if gpus > 1 else 0.0


def default_bucket_mib(gpus):
    return max(LEAST_BUCKET_MIB, gpus)


# ---- a model: units of parameters in the order of the forward ----

@dataclasses.dataclass(frozen=True)
class Unit:
    """The embedding, a layer or the head, which is reduced and gathered as a whole. Seconds are of one micro-batch."""
    parameters: int
    forward: float
    backward: float
    projection: float = 0.0  # the end of a layer's forward, which makes the next unit's first norm too, and so waits for it
    recomputed: float = 0.0  # recomputation before the backward


class Model:
    def __init__(self, shape, micro_steps):
        self.shape, self.micro_steps, self.name = shape, micro_steps, shape.name
        s = shape
        self.table = s.V * s.C
        positions = 0 if s.llama else s.T * s.C
        final_norm = s.C if s.llama else 2 * s.C
        self.embedding, self.head = self.table + positions, final_norm + (0 if s.tied else self.table)
        self.layer = (s.parameters - self.embedding - self.head) // s.L
        self.parameters = s.L * self.layer + self.embedding + self.head
        self.tokens = s.N * micro_steps  # of a GPU in a step
        matmul = s.C * (s.qkv + s.C + s.up + s.F)
        self.flops_per_token = 6 * (s.L * matmul + self.table) + 6 * s.L * s.C * (s.T + 1)  # as the engine's mfu

    def seconds(self, machine):
        """Of a micro-batch: {embedding, layer, head} to [forward, backward], and the forward kernels of a layer by name."""
        s, times, forward_of = self.shape, {"embedding": [0.0, 0.0], "layer": [0.0, 0.0], "head": [0.0, 0.0]}, {}
        for name, calls, size, flops in roofline.kernels(s):
            if name in ("gradient norm", "AdamW"):
                continue  # the update, whose range depends on the stage
            seconds = roofline.least_seconds(size, flops) / machine.efficiency
            backward = "backward" in name or "gradients" in name
            if name.startswith("attention"):
                seconds = max(seconds, flops / (1e12 * machine.attention_tflops[backward]))
            seconds *= calls
            if name.startswith("embedding"):
                times["embedding"][backward] += seconds
            elif name.startswith("classifier"):
                times["head"][0] += seconds
            elif name.startswith("head"):
                times["head"][backward] += seconds
            else:
                times["layer"][backward] += seconds / s.L
                if not backward:
                    forward_of[name] = seconds / s.L
        return times, forward_of

    def recompute_seconds(self, machine, policy):
        """The recomputation of a layer: all but the last matmul, or the norms and the MLP's activation."""
        forward_of = self.seconds(machine)[1]
        if policy == "none":
            return 0.0
        if policy == "full":
            return sum(seconds for name, seconds in forward_of.items() if name != "MLP down forward")
        return sum(seconds for name, seconds in forward_of.items() if "norm" in name or "gelu" in name or "swiglu" in name)

    def units(self, machine, policy):
        times, forward_of = self.seconds(machine)
        projection = forward_of.get("MLP down forward", 0.0)
        forward, backward = times["layer"]
        layer = Unit(self.layer, forward - projection, backward, projection, self.recompute_seconds(machine, policy))
        return [Unit(self.embedding, *times["embedding"])] + [layer] * self.shape.L + [Unit(self.head, *times["head"])]


MODELS = [
    Model(Shape("gpt2-1558m", 48, 1600, 25, 25, 6400, 50257, False, 16, 1024), 1),
    Model(Shape("llama3-8b", 32, 4096, 32, 8, 14336, 128256, True, 2, 4096, tied=False), 2),
    Model(Shape("llama3-70b", 80, 8192, 64, 8, 28672, 128256, True, 1, 4096, tied=False), 4),
]
GPUS, STAGES = (8, 64, 1024), (0, 1, 2, 3)


# ---- a step: two queues ----

def simulate(compute, network, sm_share):
    """Runs two queues side by side, each in its own order. An entry is (seconds, how many entries of the other queue must
    be done). While the network runs, compute goes at 1 - sm_share of its rate. Returns the time until both are empty and
    the time in which compute waited for the network."""
    done, left = [0, 0], [0.0, 0.0]
    queues = (compute, network)
    for i in (0, 1):
        left[i] = queues[i][0][0] if queues[i] else 0.0
    now = waited = 0.0
    while done[0] < len(compute) or done[1] < len(network):
        runs = [done[i] < len(queues[i]) and queues[i][done[i]][1] <= done[1 - i] for i in (0, 1)]
        if not any(runs):
            raise ValueError("the queues wait for each other")
        rates = (1.0 - sm_share if runs[1] else 1.0, 1.0)
        ends = [left[i] / rates[i] if runs[i] else math.inf for i in (0, 1)]
        passed = min(ends)
        now += passed
        waited += 0.0 if runs[0] else passed
        for i in (0, 1):
            if ends[i] == passed:
                done[i] += 1
                left[i] = queues[i][done[i]][0] if done[i] < len(queues[i]) else 0.0
            elif runs[i]:
                left[i] -= passed * rates[i]
    return now, waited


@dataclasses.dataclass(frozen=True)
class Run:
    model: Model
    gpus: int
    stage: int
    policy: str = "none"
    bucket_mib: float = 0.0  # 0: the engine's default
    bf16_gradients: bool = False


class Step:
    """The two queues of a run's step, and what it sends, as gpt.cuh and zero/ enqueue them. Each is filled in its own order;
    an entry that is added waits for what stands in the other queue by then, or for as much of it as is said."""

    def __init__(self, run, machine):
        self.run, self.machine = run, machine
        self.bucket_bytes = 2**20 * (run.bucket_mib or default_bucket_mib(run.gpus))
        self.rate = roofline.BYTES_PER_S * machine.efficiency
        self.compute, self.network = [], []
        self.sent_elements = self.sent_bytes = 0.0
        self.units = run.model.units(machine, run.policy)
        self.gathered = [0] * len(self.units)  # how much of the network queue brings a unit's parameters,
        self.reduced = [0] * len(self.units)   # and takes its gradients
        if run.stage in (1, 2):  # what the update before this step left, in the order of the forward
            for unit in range(len(self.units)):
                self.gather(unit)
        for micro in range(run.model.micro_steps):
            self.micro_step(micro + 1 == run.model.micro_steps)
        self.update()

    def collective(self, elements, element_bytes):
        """One entry for all buckets of a unit, which are equal and follow each other."""
        gpus = self.run.gpus
        if gpus == 1 or elements == 0:
            return
        buckets = math.ceil(4 * elements / self.bucket_bytes)
        size = elements * element_bytes
        self.network.append((buckets * collective_seconds(self.machine, gpus, size / buckets), len(self.compute)))
        self.sent_elements += (gpus - 1) / gpus * elements
        self.sent_bytes += (gpus - 1) / gpus * size

    def calculate(self, seconds, needs):
        self.compute.append((seconds, needs))

    def gather(self, unit):
        self.collective(self.units[unit].parameters, 2)
        self.gathered[unit] = len(self.network)

    def prefetch(self, unit):
        """Stage 3 begins to gather the unit that is used next."""
        if self.run.stage == 3:
            self.gather(unit)

    def reduce(self, unit, reduces):
        if not reduces:
            return
        wire = 2 if self.run.bf16_gradients else 4
        self.collective(self.units[unit].parameters, wire)
        if self.run.stage == 0:
            self.collective(self.units[unit].parameters, 4)  # the sum goes back to every rank
        self.reduced[unit] = len(self.network)

    def accumulate(self, unit):
        """Stages 2 and 3 add the reduced shard to the kept one: two reads and a write."""
        if self.run.stage >= 2:
            self.calculate(12 * self.units[unit].parameters / self.run.gpus / self.rate, self.reduced[unit])

    def zeroing(self, unit):
        """Stages 2 and 3 begin a unit's gradients from zero in every micro-step."""
        return 4 * self.units[unit].parameters / self.rate if self.run.stage >= 2 else 0.0

    def micro_step(self, last):
        self.forward()
        self.backward(last or self.run.stage >= 2)

    def forward(self):
        """A unit is gathered while the one before it is computed. The head needs a tied table again."""
        units, gathered, head = self.units, self.gathered, len(self.units) - 1
        self.prefetch(0)
        self.prefetch(1)
        self.calculate(units[0].forward, gathered[0])
        for layer in range(1, head):
            self.prefetch(layer + 1)
            if layer + 1 == head and self.run.model.shape.tied:
                self.prefetch(0)
            self.calculate(units[layer].forward, gathered[layer])
            self.calculate(units[layer].projection, gathered[layer + 1])
        self.calculate(units[head].forward, max(gathered[head], gathered[0]))

    def backward(self, reduces):
        """A unit's gradients are reduced while the next unit's are made. The head's and the embedding's need no gathering."""
        units, head = self.units, len(self.units) - 1
        self.calculate(units[head].backward + self.zeroing(head), 0)
        self.prefetch(head - 1)
        self.reduce(head, reduces)
        for layer in range(head - 1, 0, -1):
            if units[layer].recomputed > 0:
                self.calculate(units[layer].recomputed, self.gathered[layer])
            if layer > 1:
                self.prefetch(layer - 1)
            self.calculate(units[layer].backward + self.zeroing(layer), self.gathered[layer])
            self.reduce(layer, reduces)
            self.accumulate(layer + 1)
        self.calculate(units[0].backward + self.zeroing(0), 0)
        self.reduce(0, reduces)
        self.accumulate(1)
        self.accumulate(0)

    def update(self):
        """The norm of the own parts, the ranks' reports of theirs, AdamW of what is held; kept gradients to zero."""
        run = self.run
        elements = run.model.parameters
        self.calculate(4 * elements / run.gpus / self.rate, len(self.network))
        if run.gpus > 1:
            reports = 8 * run.gpus * (REPORT_NUMBERS + run.model.micro_steps)
            self.network.append((collective_seconds(self.machine, run.gpus, reports), len(self.compute)))
        updated = elements / (run.gpus if run.stage >= 1 else 1)
        kept = elements / (run.gpus if run.stage >= 2 else 1)
        self.calculate((28 * updated + 4 * kept) / self.rate, len(self.network))

    def predict(self):
        seconds, waited = simulate(self.compute, self.network, self.machine.sm_share)
        alone = sum(entry[0] for entry in self.compute)
        model = self.run.model
        return {
            "step_ms": 1e3 * seconds, "compute_ms": 1e3 * alone, "communication_ms": 1e3 * sum(e[0] for e in self.network),
            "exposed_ms": 1e3 * waited, "slowdown_ms": 1e3 * max(0.0, seconds - waited - alone),
            "sent_bytes": self.sent_bytes, "sent_elements": self.sent_elements,
            "tokens_per_second": self.run.gpus * model.tokens / seconds,
            "mfu": model.flops_per_token * model.tokens / seconds / DATA_SHEET_FLOPS_PER_S,
        }


def predict(run, machine):
    """A run's step; its efficiency is that of one GPU with the same policy, no communication and memory enough."""
    result = Step(run, machine).predict()
    one = Step(dataclasses.replace(run, gpus=1, stage=0), machine).predict()
    result["efficiency"] = one["step_ms"] / result["step_ms"]
    result["policy"] = run.policy
    return result


# ---- what the engine plans ----

ARENAS = ("parameters", "gradients", "optimizer", "activations")
PLANNED_FOR = {"device": "cuda", "precision": "bf16", "compute_capability": "9.0"}


def plan_options(run):
    """Those of train_gpt for a run. A preset gives what no shape has: the norm, the positions, the activation."""
    model, s = run.model, run.model.shape
    options = {"device": PLANNED_FOR["device"], "precision": PLANNED_FOR["precision"],
               "preset": "llama3-8b" if s.llama else "gpt2-1558m", "num-layers": s.L, "hidden-size": s.C,
               "num-attention-heads": s.H, "num-query-groups": s.G, "ffn-hidden-size": s.F, "vocab-size": s.V, "seq-length": s.T,
               "untie-embeddings-and-output-weights": str(not s.tied).lower(), "micro-batch-size": s.B,
               "global-batch-size": s.B * model.micro_steps * run.gpus, "world-size": run.gpus, "zero-stage": run.stage,
               "recompute-granularity": run.policy, "bucket-mib": run.bucket_mib,
               "grad-reduce-in-bf16": str(run.bf16_gradients).lower()}
    return [f"--{name}={value}" for name, value in options.items()]


def plan_by_engine(run, program):
    """Bytes of each arena of a GPU's memory, as this train_gpt, of any build, plans them for an H200."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "plan.json")
        result = subprocess.run([program, "--plan=full", "--plan-json", path, "--plan-gpu", "H200", *plan_options(run)], capture_output=True,
                                text=True, check=False)
        if result.returncode != 0:
            raise Mistake(f"{program} made no plan: {(result.stderr or result.stdout).strip()}")
        with open(path, encoding="utf-8") as file:
            plan = json.load(file)
    arenas = {arena["name"]: arena["bytes"] for arena in plan["arenas"]}
    if tuple(arenas) != ARENAS or sum(arenas.values()) != plan["peak_bytes"]:
        raise Mistake(f"{program} plans other arenas than {', '.join(ARENAS)}: {arenas}, {plan['peak_bytes']} in all")
    return arenas


def planned_runs():
    """What docs/internals/scaling_plans.json holds: all that the page chooses from, and one GPU of each."""
    for model in MODELS:
        for gpus in (1, *GPUS):
            for stage in STAGES if gpus > 1 else (0,):
                for policy in POLICIES:
                    yield Run(model, gpus, stage, policy)


def plans_text(program):
    rows = []
    for run in planned_runs():
        s = run.model.shape
        row = {"model": run.model.name, "micro_batch_size": s.B, "seq_length": s.T, "ranks": run.gpus, "zero_stage": run.stage,
               "recompute": run.policy, **plan_by_engine(run, program)}
        rows.append(json.dumps(row))
    return json.dumps(PLANNED_FOR)[:-1] + ', "plans": [\n' + ",\n".join(rows) + "\n]}\n"


@functools.lru_cache(maxsize=None)
def written_plans():
    with open(PLANS, encoding="utf-8") as file:
        plans = json.load(file)["plans"]
    return {(p["model"], p["ranks"], p["zero_stage"], p["recompute"]): {name: p[name] for name in ARENAS} for p in plans}


def planned_arenas(run, program=None):
    """Bytes by arena of a GPU's plan: the program's, else that of docs/internals/scaling_plans.json, which knows the default bucket and
    fp32 on the wire alone. None where neither has it."""
    if program:
        return plan_by_engine(run, program)
    if run.bf16_gradients or run.bucket_mib not in (0, default_bucket_mib(run.gpus)):
        return None
    return written_plans().get((run.model.name, run.gpus, run.stage, run.policy))


def planned_gb(run, program=None):
    arenas = planned_arenas(run, program)
    return 1e-9 * sum(arenas.values()) if arenas else None


def policy_that_fits(model, machine, gpus, stage, program=None):
    """The first whose plan, with the default bucket, leaves the reserve; None where not even full recomputation does."""
    for policy in POLICIES:
        planned = planned_gb(Run(model, gpus, stage, policy), program)
        if planned is None:
            raise Mistake(f"docs/internals/scaling_plans.json has no plan of {model.name} on {gpus} GPUs: give --train-gpt, which "
                          "makes it, or --recompute")
        if planned + machine.reserve_gb <= machine.memory_gb:
            return policy
    return None


# ---- the page ----

BUCKETS_MIB = (32, 64, 128, 256, 512, 1024, 2048)


def better_bucket(run, machine):
    """The result and the MiB of the smallest that is within 1 % of the best; None where the default is, too."""
    results = [(predict(dataclasses.replace(run, bucket_mib=mib), machine), mib) for mib in BUCKETS_MIB]
    most = 1.01 * min(r["step_ms"] for r, _ in results)
    return None if predict(run, machine)["step_ms"] <= most else next((r, mib) for r, mib in results if r["step_ms"] <= most)


def scaling_cell(model, machine, gpus, stage):
    """What is planned, with full recomputation in brackets, and the efficiency; after a semicolon a better bucket and its efficiency."""
    policy = policy_that_fits(model, machine, gpus, stage)
    if policy is None:
        return "-"
    assert policy in ("none", "full")  # as the page says
    run = Run(model, gpus, stage, policy)
    planned, better = f"{planned_gb(run):.1f}", better_bucket(run, machine)
    cell = f"{f'({planned})' if policy == 'full' else planned}, {100 * predict(run, machine)['efficiency']:.0f} %"
    return cell + (f"; {better[1]}: {100 * better[0]['efficiency']:.0f} %" if better else "")


def scaling_table(machine):
    """A row of each model and number of GPUs that some stage fits."""
    lines = ["| model | GPUs | " + " | ".join(f"stage {stage}" for stage in STAGES) + " |", "|---|---|" + "---|" * len(STAGES)]
    for model in MODELS:
        for gpus in GPUS:
            cells = [scaling_cell(model, machine, gpus, stage) for stage in STAGES]
            if set(cells) != {"-"}:
                lines.append(f"| {model.name} | {gpus} | " + " | ".join(cells) + " |")
    return lines


def models_table(machine):
    """What each GPU computes, and how fast one does that."""
    lines = ["| model | micro-steps x B x T | ms on one GPU, nothing recomputed | MFU there |", "|---|---|---|---|"]
    for model in MODELS:
        one = predict(Run(model, 1, 0), machine)
        lines.append(f"| {model.name} | {model.micro_steps} x {model.shape.B} x {model.shape.T} | {one['step_ms']:.0f} | {100 * one['mfu']:.0f} % |")
    return lines


def collective_table(machine):
    lines = ["| bytes in all | " + " | ".join(f"{gpus} GPUs" for gpus in GPUS) + " |", "|---|" + "---|" * len(GPUS)]
    for mib in (32, 128, 512, 2048):
        rates = [(gpus - 1) / gpus * mib * 2**20 / collective_seconds(machine, gpus, mib * 2**20) / 1e9 for gpus in GPUS]
        lines.append(f"| {mib} MiB | " + " | ".join(f"{rate:.0f}" for rate in rates) + " |")
    return lines


HEAD = """# A model of a step on 8 to 1024 H200s

`scripts/scaling_model.py` writes this page. **Nothing here was measured.** Options set the assumed rates:
`scripts/scaling_model.py --model llama3-8b --gpus 64 --zero-stage 2 --nvlink-gbps 340 --efficiency 0.7` prints one run as JSON.

## What is assumed

- **Compute**: a kernel takes its roofline ([kernels.md](kernels.md)) over 0.75, attention 300 TFLOP/s forward and 240 backward. While a
  collective runs, compute goes at 1 - 16/132 of its rate: NCCL's channels take SMs.
- **Network**: one ring over all GPUs, 360 GB/s within a node and between nodes (8 adapters of 45). NCCL 2.30's tuning model for Hopper
  has the latencies (`RING` in the script); its fastest protocol counts.
- **A step**: two queues, compute and network, wait for each other where the engine does ([parallel.md](../parallel.md#zero-stages)).
- **Update**: the norm moves 4 bytes for each parameter of the shard, AdamW 28, zeroing gradients 4. At stages 2 and 3 each micro-step of n
  GPUs zeroes a unit's gradients (4) and adds its shard (12 / n).
- **Memory** is what the engine plans in bf16 ([scaling_plans.json](scaling_plans.json), which a test makes again), GB of 1e9 bytes. 139 of
  141 may be planned. The first of no, selective (norm, activation) and full recomputation that fits is taken.
- **Efficiency** is against one GPU of memory enough, with the same recomputation and no communication; a sharded update takes it
  above 100 %.

## Bus bandwidth of the ring, GB/s
"""

STEPS_HEAD = """
## Steps

The tokens of each GPU are fixed, so the global batch grows with the GPUs:
"""

CELLS = """
GB planned (in brackets with full recomputation, -: nothing fits), efficiency; where the default `--bucket-mib` is not within 1 % of the best,
the smallest of 32, 64, ... 2048 that is, and its efficiency:
"""


def page():
    machine = Machine()
    return "\n".join([HEAD, *collective_table(machine), STEPS_HEAD, *models_table(machine), CELLS, *scaling_table(machine)]) + "\n"


def parse(arguments):
    parser = argparse.ArgumentParser(description="Predicts a training step on H200s; without options writes docs/internals/scaling.md.")
    parser.add_argument("--check", action="store_true", help="whether the page, or the plans, are what this writes")
    parser.add_argument("--train-gpt", metavar="PROGRAM", help="makes the plans")
    parser.add_argument("--model", choices=[m.name for m in MODELS])
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--zero-stage", type=int, choices=STAGES, default=1)
    parser.add_argument("--bucket-mib", type=float, default=0.0, help="0: the engine's default")
    parser.add_argument("--grad-reduce-in-bf16", action="store_true")
    parser.add_argument("--recompute", choices=POLICIES, help="default: the first that fits")
    for field in dataclasses.fields(Machine):
        if field.type in (int, float):
            parser.add_argument("--" + field.name.replace("_", "-"), type=field.type, default=field.default,
                                help="assumed: %(default)s")
    options = parser.parse_args(arguments)
    if options.gpus < 1 or options.gpus > options.gpus_per_node and options.gpus % options.gpus_per_node:
        parser.error(f"--gpus {options.gpus} are not whole nodes of {options.gpus_per_node}; --gpus-per-node sets that")
    if options.bucket_mib < 0:
        parser.error("--bucket-mib must not be below 0")
    return options


def machine_of(options):
    return Machine(**{f.name: getattr(options, f.name) for f in dataclasses.fields(Machine) if hasattr(options, f.name)})


def predict_one(options):
    machine = machine_of(options)
    model = next(m for m in MODELS if m.name == options.model)
    program = options.train_gpt
    policy = options.recompute or policy_that_fits(model, machine, options.gpus, options.zero_stage, program)
    if policy is None:
        least = planned_gb(Run(model, options.gpus, options.zero_stage, "full"), program)
        raise Mistake(f"stage {options.zero_stage} is planned to take {least:.1f} GB with full recomputation, and "
                      f"{machine.memory_gb - machine.reserve_gb:.1f} are there; raise --zero-stage or --gpus")
    run = Run(model, options.gpus, options.zero_stage, policy, options.bucket_mib, options.grad_reduce_in_bf16)
    print(json.dumps({**predict(run, machine), "planned_gb": planned_gb(run, program)}))
    return 0


def main(arguments):
    options = parse(arguments)
    if options.model:
        return predict_one(options)
    if options.train_gpt:
        return write_or_check(plans_text(options.train_gpt), PLANS, options.check, "docs/internals/scaling_plans.json is not what "
                                       f"{options.train_gpt} plans: scripts/scaling_model.py --train-gpt build/train_gpt "
                                       ">docs/internals/scaling_plans.json, then scripts/scaling_model.py >docs/internals/scaling.md")
    return write_or_check(tables_as_blocks(page()), PAGE, options.check, "docs/internals/scaling.md is not what scripts/scaling_model.py writes: "
                                   "scripts/scaling_model.py >docs/internals/scaling.md")


if __name__ == "__main__":
    sys.exit(run_script("scaling_model.py", main, sys.argv[1:]))
