#!/usr/bin/env python3
"""What a training step is expected to take on 8 to 1024 H200s, by a model: writes docs/scaling.md.

  scripts/scaling_model.py            the page on stdout
  scripts/scaling_model.py --check    whether docs/scaling.md is that page
  scripts/scaling_model.py --model llama3-8b --gpus 64 --zero-stage 2 [--bucket-mib 128 --nvlink-gbps 340 ...]
                                      one run as JSON, with what was measured on a cluster in place of what is assumed

Compute is each kernel's roofline (roofline.py) over a stated efficiency. Collectives cost latency and bytes as NCCL's own
tuning model has them. Both are queues that wait for each other where the engine does; a step is the time until both are
empty. docs/scaling.md states every assumption.
"""
import argparse
import dataclasses
import json
import math
import os
import sys

import roofline
from roofline import Shape

PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "docs", "scaling.md")
DATA_SHEET_FLOPS_PER_S = 989.5e12  # what MFU is held against
POLICIES = ("none", "selective", "full")


@dataclasses.dataclass(frozen=True)
class Machine:
    """What is assumed of a GPU and of the network. Rates in GB/s are 1e9 bytes a second."""
    gpus_per_node: int = 8
    nvlink_gbps: float = 360.0   # bus bandwidth within a node, as nccl-tests report it
    nic_gbps: float = 45.0       # a GPU's own adapter: 90 % of 400 Gb/s
    efficiency: float = 0.75     # of each kernel's roofline; attention has its own rates
    attention_tflops: tuple = (300.0, 240.0)  # forward, backward: docs/gpu/attention-sm80.md
    sm_share: float = 16 / 132   # of the compute rate that a running collective takes: 16 channels of 132 SMs
    memory_gb: float = 141.0
    reserve_gb: float = 6.0      # CUDA context, NCCL buffers, workspaces, the chunk of logits
    latency_scale: float = 1.0
    trees: bool = False          # also what NCCL has no algorithm for at several GPUs a node; else its ring alone


# NCCL 2.30, src/graph/tuning.cc, Hopper, ring: us at the start, us a hop on NVLink, us a hop between nodes, share of the
# bandwidth, GB/s at most within a node, GB/s at most between nodes.
RING = (
    (6.6, 0.6, 2.7, 0.5, 141.0, 35.0),             # LL
    (14.0, 1.9, 4.0, 0.92, math.inf, math.inf),    # LL128
    (8.4, 3.4, 14.0, 1.0, math.inf, math.inf),     # Simple
)
LL_HOP_OF_SEVERAL_NODES = 1.8                      # a hop on NVLink takes LL so much longer there
TREE_SHARE = 0.75                   # of the bandwidth: what PAT, NCCL's trees for these two collectives, is given there
TREE_ALL_REDUCE = (6.8, 0.6, 5.0)   # LL: of one number, so bytes cost nothing


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


def hierarchical_seconds(machine, gpus, size, tree):
    """A ring within each node, then a ring or a tree between nodes, on each GPU's adapter for its eighth of the bytes."""
    nodes = nodes_of(machine, gpus)
    near = ring_seconds(machine, min(gpus, machine.gpus_per_node), size)
    if nodes == 1:
        return near
    start, _, far = RING[2][:3]  # Simple: the eighth is still large
    hops = math.ceil(math.log2(nodes)) if tree else nodes - 1
    rate = 1e9 * machine.nic_gbps * (TREE_SHARE if tree else 1.0)
    part = size / machine.gpus_per_node
    return near + 1e-6 * machine.latency_scale * (start + hops * far) + (nodes - 1) / nodes * part / rate


def collective_seconds(machine, gpus, size):
    if gpus == 1:
        return 0.0
    times = [ring_seconds(machine, gpus, size)]
    if machine.trees:
        times += [hierarchical_seconds(machine, gpus, size, tree) for tree in (False, True)]
    return min(times)


def all_reduce_one_seconds(machine, gpus):
    """One number, for the gradient's norm: up a tree and down again."""
    if gpus == 1:
        return 0.0
    start, near, far = TREE_ALL_REDUCE
    nodes = nodes_of(machine, gpus)
    hops = 2 * ((min(gpus, machine.gpus_per_node) - 1) * near + math.ceil(math.log2(nodes)) * far)
    return 1e-6 * machine.latency_scale * (start + hops)


# ---- a model: units of parameters in the order of the forward ----

@dataclasses.dataclass(frozen=True)
class Unit:
    """What is reduced and gathered together: the embedding, a layer, the head."""
    parameters: int
    gathers: tuple    # elements gathered for its forward and its backward at stage 3; twice its parameters over the model
    forward: float    # seconds of one micro-batch
    backward: float


class Model:
    def __init__(self, shape, tied, micro_steps):
        self.shape, self.tied, self.micro_steps, self.name = shape, tied, micro_steps, shape.name
        s = shape
        self.table = s.V * s.C
        positions = 0 if s.llama else s.T * s.C
        final_norm = s.C if s.llama else 2 * s.C
        self.layer = (s.parameters - self.table - positions - final_norm) // s.L
        self.embedding, self.head = self.table + positions, final_norm + (0 if tied else self.table)
        self.parameters = s.L * self.layer + self.embedding + self.head
        self.tokens = s.N * micro_steps  # of a GPU in a step
        matmul = s.C * (s.qkv + s.C + s.up + s.F)
        self.flops_per_token = 6 * (s.L * matmul + self.table) + 12 * s.L * s.C * s.T  # PaLM's convention, as the engine

    def seconds(self, machine):
        """Of a micro-batch: {embedding, layer, head} to [forward, backward], and the forward kernels of a layer by name."""
        s, times, forward_of = self.shape, {"embedding": [0.0, 0.0], "layer": [0.0, 0.0], "head": [0.0, 0.0]}, {}
        for name, calls, size, flops in roofline.kernels(s):
            if name in ("gradients to zero", "gradient norm", "AdamW"):
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
            elif name.startswith("rope"):  # one row for both
                times["layer"][0] += seconds / 2 / s.L
                times["layer"][1] += seconds / 2 / s.L
                forward_of[name] = seconds / 2 / s.L
            else:
                times["layer"][backward] += seconds / s.L
                if not backward:
                    forward_of[name] = seconds / s.L
        return times, forward_of

    def recompute_seconds(self, machine, policy):
        """What backward of a layer makes again: all but the last matmul, or the norms and the MLP's activation."""
        forward_of = self.seconds(machine)[1]
        if policy == "none":
            return 0.0
        if policy == "full":
            return sum(seconds for name, seconds in forward_of.items() if name != "MLP down forward")
        return sum(seconds for name, seconds in forward_of.items() if "norm" in name or "gelu" in name or "swiglu" in name)

    def units(self, machine, policy):
        s, times = self.shape, self.seconds(machine)[0]
        again = self.recompute_seconds(machine, policy)
        shared = self.table if self.tied else 0  # a tied table is gathered for the embedding and for the head
        embedding = Unit(self.embedding, (self.embedding, self.embedding - shared), *times["embedding"])
        layer = Unit(self.layer, (self.layer, self.layer), times["layer"][0], times["layer"][1] + again)
        head = Unit(self.head, (self.head + shared, self.head), *times["head"])
        return [embedding] + [layer] * s.L + [head]

    def activation_bytes_per_token(self, policy):
        """Of a layer, as recompute.cuh has it."""
        s = self.shape
        norms, activation, out = 2 * 2 * s.C, 2 * s.F, 2 * s.C
        everything = norms + 2 * s.qkv + 4 * s.H + 2 * s.C + 2 * s.C + 2 * s.up + activation + out + (8 if s.llama else 16)
        return {"none": everything, "selective": everything - norms - activation, "full": out}[policy]

    def memory_gb(self, machine, gpus, stage, policy):
        """bf16 parameters and activations; fp32 gradients, master weights and two moments."""
        largest = max(self.layer, self.embedding, self.head)
        parameters, gradients, optimizer = 2 * self.parameters, 4 * self.parameters, 12 * self.parameters
        if stage >= 1:
            optimizer /= gpus
        if stage >= 2:
            gradients = gradients / gpus + 2 * 4 * largest  # of two units while they are reduced
        if stage >= 3:
            parameters = parameters / gpus + 2 * 2 * largest  # of two units while they are used
        s = self.shape
        activations = s.N * s.L * self.activation_bytes_per_token(policy)
        if policy != "none":  # of the layer that is made again
            activations += s.N * (self.activation_bytes_per_token("none") - self.activation_bytes_per_token(policy))
        return machine.reserve_gb + 1e-9 * (parameters + gradients + optimizer + activations)


MODELS = [
    Model(Shape("gpt2-1558m", 48, 1600, 25, 25, 6400, 50257, False, 16, 1024), True, 1),
    Model(Shape("llama3-8b", 32, 4096, 32, 8, 14336, 128256, True, 2, 4096), False, 2),
    Model(Shape("llama3-70b", 80, 8192, 64, 8, 28672, 128256, True, 1, 4096), False, 4),
]
GPUS, STAGES = (8, 16, 64, 256, 1024), (0, 1, 2, 3)


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
    bucket_mib: float = 32.0
    bf16_gradients: bool = False


class Step:
    """The two queues of a run's step, and what it sends."""

    def __init__(self, run, machine):
        self.run, self.machine = run, machine
        self.compute, self.network = [], []
        self.sent_elements = self.sent_bytes = 0.0
        self.units = run.model.units(machine, run.policy)
        self.build()

    def collective(self, elements, element_bytes, after):
        """In pieces of at most a bucket of fp32, equal, one behind the other; so they are one entry."""
        run = self.run
        if run.gpus == 1 or elements == 0:
            return
        pieces = math.ceil(4 * elements / (run.bucket_mib * 2**20))
        size = elements * element_bytes
        self.network.append((pieces * collective_seconds(self.machine, run.gpus, size / pieces), after))
        share = (run.gpus - 1) / run.gpus
        self.sent_elements += share * elements
        self.sent_bytes += share * size

    def schedule(self):
        """(unit, is backward, is of the last micro-step) in the order in which they are computed."""
        for micro in range(self.run.model.micro_steps):
            last = micro + 1 == self.run.model.micro_steps
            yield from ((unit, False, last) for unit in self.units)
            yield from ((unit, True, last) for unit in reversed(self.units))

    def build(self):
        stage, order = self.run.stage, list(self.schedule())
        gathered, reduced = {}, {}  # position in `order` -> entries of the network that bring its parameters, take its gradients
        if stage in (1, 2):  # what the update before this step left, in the order of the forward
            for position, unit in enumerate(self.units):
                self.collective(unit.parameters, 2, 0)
                gathered[position] = len(self.network)
        for position in range(len(order) + 1):  # as it begins: all before it are done
            ahead = [] if stage < 3 else [0, 1] if position == 0 else [position + 1]
            for next_one in (p for p in ahead if p < len(order)):
                unit, backward, _ = order[next_one]
                self.collective(unit.gathers[backward], 2, position)
                gathered[next_one] = len(self.network)
            if position > 0 and self.reduces(order[position - 1]):
                self.reduce(order[position - 1][0], position)
                reduced[position - 1] = len(self.network)
        self.compute_entries(order, gathered, reduced)
        self.update()

    def reduces(self, entry):
        _, backward, last = entry
        return backward and (last or self.run.stage >= 2)

    def reduce(self, unit, after):
        wire = 2 if self.run.bf16_gradients else 4
        self.collective(unit.parameters, wire, after)
        if self.run.stage == 0:
            self.collective(unit.parameters, wire, after)  # the sum goes back to every rank

    def compute_entries(self, order, gathered, reduced):
        """A backward of stages 2 and 3 writes where that of two units before it wrote."""
        for position, (unit, backward, _) in enumerate(order):
            needs = gathered.get(position, 0)
            if self.run.stage >= 2:
                needs = max(needs, reduced.get(position - 2, 0))
            self.compute.append((unit.backward if backward else unit.forward, needs))

    def update(self):
        """The norm of what this rank holds, its sum over ranks, AdamW; gradients to zero where they are kept."""
        run, machine = self.run, self.machine
        rate = roofline.BYTES_PER_S * machine.efficiency
        own = run.model.parameters / (run.gpus if run.stage >= 1 else 1)
        kept = run.model.parameters / (run.gpus if run.stage >= 2 else 1)
        self.compute.append((4 * own / rate, len(self.network)))
        if run.gpus > 1:
            self.network.append((all_reduce_one_seconds(machine, run.gpus), len(self.compute)))
        self.compute.append(((30 * own + 4 * kept) / rate, len(self.network)))

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
    result["memory_gb"] = run.model.memory_gb(machine, run.gpus, run.stage, run.policy)
    return result


def policy_that_fits(model, machine, gpus, stage):
    for policy in POLICIES:
        if model.memory_gb(machine, gpus, stage, policy) <= machine.memory_gb:
            return policy
    return None


# ---- the page ----

def gigabytes(value):
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


BUCKETS_MIB = (32, 128, 512, 2048)


def best_bucket(run, machine):
    """The smallest that is within 1 % of the best."""
    results = [(predict(dataclasses.replace(run, bucket_mib=mib), machine), mib) for mib in BUCKETS_MIB]
    least = min(r["step_ms"] for r, _ in results)
    return next((r, mib) for r, mib in results if r["step_ms"] <= 1.01 * least)


def scaling_rows(model, machine):
    for gpus in GPUS:
        for stage in STAGES:
            policy = policy_that_fits(model, machine, gpus, stage)
            if policy is None:
                least = model.memory_gb(machine, gpus, stage, "full")
                yield f"| {gpus} | {stage} | does not fit | {least:.0f} | - | - | - | - | - | - | - | - |"
                continue
            run = Run(model, gpus, stage, policy)
            r, (best, mib) = predict(run, machine), best_bucket(run, machine)
            trees = predict(run, dataclasses.replace(machine, trees=True))
            yield (f"| {gpus} | {stage} | {policy} | {r['memory_gb']:.0f} | {r['step_ms']:.0f} | "
                   f"{r['exposed_ms']:.0f} + {r['slowdown_ms']:.0f} | {100 * r['efficiency']:.0f} % | {100 * r['mfu']:.0f} % | "
                   f"{gigabytes(1e-9 * r['sent_bytes'])} | {mib} | {best['step_ms']:.0f}, {100 * best['efficiency']:.0f} % | "
                   f"{trees['step_ms']:.0f}, {100 * trees['efficiency']:.0f} % |")


def scaling_table(model, machine):
    s = model.shape
    one = predict(Run(model, 1, 0), machine)
    return [f"## {model.name}: L = {s.L}, C = {s.C}, H = {s.H}, G = {s.G}, F = {s.F}, V = {s.V}", "",
            f"{model.parameters / 1e9:.2f}e9 parameters. Each GPU {model.micro_steps} micro-step"
            f"{'s' if model.micro_steps > 1 else ''} of {s.B} x {s.T} tokens, {model.tokens} in a step. One GPU of memory "
            f"enough, nothing recomputed: {one['step_ms']:.0f} ms, MFU {100 * one['mfu']:.0f} %.", "",
            "| GPUs | stage | recompute | GB a GPU | ms a step | exposed + slowed ms | efficiency | MFU | GB sent by a GPU | good "
            "--bucket-mib | with it | 32 MiB, trees |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|", *scaling_rows(model, machine)]


def collective_table(machine):
    trees = dataclasses.replace(machine, trees=True)
    lines = ["| bytes in all | " + " | ".join(f"{gpus} GPUs" for gpus in GPUS) + " |", "|---|" + "---|" * len(GPUS)]
    for mib in (1, 32, 128, 512, 2048, 8192):
        cells = []
        for gpus in GPUS:
            size = mib * 2**20
            rates = [(gpus - 1) / gpus * size / collective_seconds(m, gpus, size) / 1e9 for m in (machine, trees)]
            cells.append(f"{rates[0]:.0f} ({rates[1]:.0f})")
        lines.append(f"| {mib} MiB | " + " | ".join(cells) + " |")
    return lines


def what_if_table(machine):
    model = MODELS[1]
    change = dataclasses.replace
    cases = [
        ("as assumed", {}, {}),
        ("NVLink at half its rate", {"nvlink_gbps": machine.nvlink_gbps / 2}, {}),
        ("adapters at half their rate", {"nic_gbps": machine.nic_gbps / 2}, {}),
        ("every latency twice", {"latency_scale": 2.0}, {}),
        ("matmuls take twice as long beside a collective", {"sm_share": 0.5}, {}),
        ("no slowdown beside a collective", {"sm_share": 0.0}, {}),
        ("kernels at 60 % of their roofline", {"efficiency": 0.6}, {}),
        ("gradients in bf16 on the wire", {}, {"bf16_gradients": True}),
    ]
    lines = ["| | stage 1: ms a step | exposed + slowed | efficiency | stage 3: ms a step | exposed + slowed | efficiency |",
             "|---|---|---|---|---|---|---|"]
    for name, of_machine, of_run in cases:
        cells = []
        for stage in (1, 3):
            r = predict(Run(model, 64, stage, "none", 512, **of_run), change(machine, **of_machine))
            cells.append(f"{r['step_ms']:.0f} | {r['exposed_ms']:.0f} + {r['slowdown_ms']:.0f} | {100 * r['efficiency']:.0f} %")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def public_ring_table(machine):
    """NVIDIA/nccl issue 1229 names the bus bandwidths of reduce-scatter on H100 nodes, of a size it does not name."""
    lines = ["| nodes of 8 | reported, GB/s | model, 4 GiB | model, 8 GiB |", "|---|---|---|---|"]
    for nodes, reported in zip((4, 8, 16, 32, 64, 128), (360, 345, 320, 300, 280, 260)):
        n = 8 * nodes
        rates = [(n - 1) / n * size / ring_seconds(machine, n, size) / 1e9 for size in (2**32, 2**33)]
        lines.append(f"| {nodes} | {reported} | {rates[0]:.0f} | {rates[1]:.0f} |")
    return lines


HEAD = """# What a step is expected to take on 8 to 1024 H200s

Written by `scripts/scaling_model.py`; a test holds this page to it. **Nothing on this page was measured on a cluster**, nor
on any GPU by this project. It is a model, written down so that a run can be held against it: where the two differ, one of
the assumptions below is wrong, and each can be set on the command line. The tokens of each GPU are fixed, so the global
batch grows with the GPUs.

## Assumptions

**Compute.** A kernel takes its roofline ([gpu/kernels.md](gpu/kernels.md): 790 TFLOP/s and 4.3 TB/s) over an efficiency of
0.75, attention 300 TFLOP/s forward and 240 backward ([gpu/attention-sm80.md](gpu/attention-sm80.md)). Launches cost nothing.
While a collective runs, compute goes at 88 % of its rate: NCCL takes 16 of 132 SMs, an assumption, and shares none of them
(NVIDIA/nccl issue 689). Matmuls that launch one block an SM may lose half instead (pytorch/pytorch issue 143988). MFU
counts 6 flops a matmul weight and full attention, against 989.5 TFLOP/s, as the engine does.

**Reduce-scatter and all-gather of S bytes on n GPUs** cost a start, hops, and (n-1)/n S over the bus bandwidth of nccl-tests
(its doc/PERFORMANCE.md). Bus bandwidth is 360 GB/s within a node (of 450 nominal; what NCCL's maintainer expects of
all-gather on eight H100, which have H200's NVLink: NVIDIA/nccl-tests issue 326). Between nodes a ring crosses all eight
400 Gb/s adapters of a node, 45 of 50 GB/s each, which is assumed, so 360 again.

- **Ring**: n - 1 hops, one a node over the network; the least of three protocols. The constants are those of NCCL 2.30's own
  tuning model for Hopper (src/graph/tuning.cc):

  | | start, us | a hop on NVLink, us | a hop between nodes, us | GB/s |
  |---|---|---|---|---|
  | LL | 6.6 | 0.6, with several nodes 1.08 | 2.7 | 141 in one node, else 35 |
  | LL128 | 14 | 1.9 | 4.0 | 92 % of 360 |
  | Simple | 8.4 | 3.4 | 14 | 360 |

  With several GPUs a node the ring is taken to be all that NCCL has for these two collectives: its trees (PAT) are for one
  GPU a node (the same file); NVLink SHARP and CollNet are left out.
- **Trees**, in the last column: also a ring within each node, then between nodes each GPU's adapter carries an eighth of the
  bytes, on a ring of the nodes or on a tree of log2(nodes) hops at 75 % of the rate; the least of all. It is what
  two-level collectives would gain. The engine uses one communicator.
- The gradient's norm is summed up and down a tree: 6.8 us, 14 hops of 0.6 us in the node, 2 log2(nodes) of 5 us.

**The step.** Two queues, compute and network, each in its own order.

- A layer, the embedding and the head are units; a unit is cut into equal pieces of at most `--bucket-mib` of fp32 gradient
  (32 unless said). A piece is never of two units. The pieces of a unit are reduced when its backward is done and the
  network is free. The embedding's come last, so they are exposed.
- Stage 0 reduces and gathers fp32 gradients, stage 1 reduces them, both in the last micro-step only; stages 2 and 3 in every
  one, into two buffers of a unit each.
- Stages 1 and 2 gather bf16 parameters after the update, in the order of the forward, and the next forward waits unit by
  unit. Stage 3 gathers a unit as the one before it begins, in forward and in backward; a tied table is gathered for the
  embedding and for the head. A gather goes before a reduction that becomes ready with it.
- So in elements a GPU sends 2 P (n-1)/n at stages 0 to 2 and 3 P (n-1)/n at stage 3, for one micro-step. A second gather
  of an untied embedding and head is in it, which an engine may save.
- Then the norm and AdamW on what the rank holds: 34 bytes a parameter, and 4 to zero the gradients.

**Memory** a GPU, in GB of 1e9 bytes, of 141: 2 P parameters, 4 P gradients, 12 P master weights and moments; divided by n
the last from stage 1, the gradients from stage 2 (plus two of the largest unit), the parameters from stage 3 (plus two
units); activations as in recompute.cuh; 6 GB for everything else. The first of none, selective (norm, activation) and full
recomputation that fits; where not even full does, its size is shown. The engine's `--plan` is exact, this is not.

**Efficiency** is against one GPU of memory enough with the same recomputation and no communication. It may pass 100 %: a
sharded update is faster than a whole one. **Exposed**: compute waited for the network. **Slowed**: what collectives that
ran beside it cost it. The good `--bucket-mib` is the smallest of 32, 128, 512 and 2048 within 1 % of the best of them.

## Bus bandwidth by the model, GB/s: ring (least of ring and trees)
"""

READING = """## What follows from it

- **The bucket is the thing to set.** Every piece pays for n - 1 hops. 32 MiB is right within a node and costs the
  smaller models little up to 64 GPUs; beyond it is the ring's latency that costs, and pieces should be as large as the
  layers: `--bucket-mib 512` or 2048. On 1024 GPUs a piece of 32 MiB takes 2.2 ms of which its bytes are 0.1 ms.
- Stages 1 and 2 send the least in a step of one micro-step; each further micro-step costs stage 2 a reduction, and stage 3
  that and two gathers. Fewer, larger micro-steps pay for them: spend the memory that they save on the batch.
- What one flat ring costs, the last column shows: collectives in two levels would make 32 MiB good enough for the
  smaller models. It would take two communicators, one within the nodes and one between them.

## If an assumption is wrong

llama3-8b, 64 GPUs, nothing recomputed, `--bucket-mib 512`:
"""

HOLD = """## Holding a run against it

1. Measure what is assumed: `all_gather_perf` and `reduce_scatter_perf -b 1M -e 8G -f 2` of nccl-tests on 8 GPUs and on all; bus
   bandwidth at 8 GiB is `--nvlink-gbps` within a node, and between nodes, over 8, `--nic-gbps`; the times at 1 MiB give
   `--latency-scale`. A run on one GPU gives `--efficiency`: that with which `--gpus 1 --zero-stage 0` predicts its `step_ms`.
2. Predict: `scripts/scaling_model.py --model llama3-8b --gpus 64 --zero-stage 2 --nvlink-gbps ... --efficiency ...`.
3. Compare with the run's `log.jsonl`: `step_ms` with `step_ms`, `comm_ms` with `communication_ms`, `comm_exposed_ms` with
   `exposed_ms`, `comm_bytes` with `sent_bytes`. Bytes must be equal but for padding; if `comm_ms` differs, it is the
   network's constants or ranks that wait for slower ones; if only `comm_exposed_ms` does, it is the overlap.

One public series can be held against the ring already. NVIDIA/nccl issue 1229 reports the bus bandwidth of reduce-scatter on H100
nodes, without the size of the message:
"""


def page():
    machine = Machine()
    lines = [HEAD, *collective_table(machine), ""]
    for model in MODELS:
        lines += [*scaling_table(model, machine), ""]
    lines += [READING, *what_if_table(machine), "", HOLD, *public_ring_table(machine), ""]
    return "\n".join(lines).rstrip() + "\n"


def parse(arguments):
    parser = argparse.ArgumentParser(description="Predicts a training step on H200s; without options writes docs/scaling.md.")
    parser.add_argument("--check", action="store_true", help="whether docs/scaling.md is what this writes")
    parser.add_argument("--model", choices=[m.name for m in MODELS])
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--zero-stage", type=int, choices=STAGES, default=1)
    parser.add_argument("--bucket-mib", type=float, default=32.0)
    parser.add_argument("--grad-reduce-in-bf16", action="store_true")
    parser.add_argument("--recompute", choices=POLICIES, help="default: the first that fits")
    for field in dataclasses.fields(Machine):
        if field.type in (int, float):
            parser.add_argument("--" + field.name.replace("_", "-"), type=field.type, default=field.default,
                                help="assumed: %(default)s")
    parser.add_argument("--trees", action="store_true", help="also collectives that NCCL does not have")
    options = parser.parse_args(arguments)
    if options.gpus < 1 or options.gpus > options.gpus_per_node and options.gpus % options.gpus_per_node:
        parser.error(f"--gpus {options.gpus} are not whole nodes of {options.gpus_per_node}; --gpus-per-node sets that")
    if options.bucket_mib <= 0:
        parser.error("--bucket-mib must be above 0")
    return options


def machine_of(options):
    return Machine(**{f.name: getattr(options, f.name) for f in dataclasses.fields(Machine) if hasattr(options, f.name)})


def predict_one(options):
    machine = machine_of(options)
    model = next(m for m in MODELS if m.name == options.model)
    policy = options.recompute or policy_that_fits(model, machine, options.gpus, options.zero_stage)
    if policy is None:
        least = model.memory_gb(machine, options.gpus, options.zero_stage, "full")
        print(f"scaling_model.py: stage {options.zero_stage} takes {least:.0f} GB of {machine.memory_gb:.0f} with full "
              "recomputation; raise --zero-stage or --gpus", file=sys.stderr)
        return 2
    run = Run(model, options.gpus, options.zero_stage, policy, options.bucket_mib, options.grad_reduce_in_bf16)
    print(json.dumps(predict(run, machine)))
    return 0


def main(arguments):
    options = parse(arguments)
    if options.model:
        return predict_one(options)
    text = page()
    if options.check:
        with open(PAGE, encoding="utf-8") as file:
            if file.read() == text:
                return 0
        print("docs/scaling.md is not what scripts/scaling_model.py writes: scripts/scaling_model.py >docs/scaling.md")
        return 1
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
