#!/usr/bin/env python3
"""Measures in PyTorch what the engine's benchmarks measure, as a peer; scripts/gpu_check.sh runs it.

  peer_torch.py attention [--quick] [--peers NAME,...] [--head-dims D,...] [--lengths T,...]
                                               scaled_dot_product_attention: flash and cuDNN, forward, backward and
                                               deterministic backward, causal and full; FlashAttention-3 and -4, where
                                               their flash_attn_interface and flash_attn.cute are installed: PyTorch's
                                               flash is FlashAttention-2. The options choose some of the shapes and of
                                               torch_flash, torch_cudnn, fa3, fa4
  peer_torch.py train --preset NAME --length T --batch B [--micro-steps M] [--steps N] [--float8]
                                               tokens/s and peak memory of a training step, whose gradients are those of M
                                               batches of B; --float8: linear layers by torchao, in its default recipe,
                                               tensorwise

Each result is a line of JSON on stdout. Training: fp32 parameters under bf16 autocast, torch.compile of the whole
model, fused AdamW, random tokens, no recomputation: what a user of PyTorch would write first. Where the GPU's memory
is too small for that, half the batch is tried in twice the micro-steps, and so on, with a row for each.
"""
import argparse
import contextlib
import gc
import importlib
import json
import math
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

# layers, hidden, heads, groups, ffn, vocabulary (padded to a multiple of 128), whether Llama's shape, whether q, k, v
# have biases
PRESETS = {
    "gpt2-124m": (12, 768, 12, 12, 3072, 50304, False, True),
    "gpt2-1558m": (48, 1600, 25, 25, 6400, 50304, False, True),
    "llama3.2-1b": (16, 2048, 32, 8, 8192, 128256, True, False),
    "qwen2.5-0.5b": (24, 896, 14, 2, 4864, 151936, True, True),
    "qwen2.5-1.5b": (28, 1536, 12, 2, 8960, 151936, True, True),
    "demo": (4, 128, 4, 2, 384, 384, True, False),
    "tiny-gpt2": (2, 32, 4, 4, 128, 128, False, True),
    "tiny-llama": (2, 32, 4, 2, 64, 128, True, False),
}


class Attention(nn.Module):
    """Causal attention; grouped heads and rotary positions (half-split form) for Llama shapes."""

    def __init__(self, hidden, heads, groups, llama, qkv_bias):
        super().__init__()
        self.heads, self.groups, self.size, self.llama = heads, groups, hidden // heads, llama
        self.qkv = nn.Linear(hidden, (heads + 2 * groups) * self.size, bias=qkv_bias)
        self.projection = nn.Linear(hidden, hidden, bias=not llama)

    def forward(self, x, rope):
        batch, length, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, length, -1, self.size).transpose(1, 2).split(
            [self.heads, self.groups, self.groups], dim=1)
        if self.llama:
            q, k = rotate(q, rope), rotate(k, rope)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.groups)
        return self.projection(out.transpose(1, 2).reshape(batch, length, hidden))


def rotate(x, rope):
    first, second = x.chunk(2, dim=-1)
    cosine, sine = rope
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, hidden, heads, groups, ffn, llama, qkv_bias):
        super().__init__()
        norm = nn.RMSNorm if llama else nn.LayerNorm
        self.norm1, self.norm2 = norm(hidden, eps=1e-5), norm(hidden, eps=1e-5)
        self.attention = Attention(hidden, heads, groups, llama, qkv_bias)
        self.up = nn.Linear(hidden, 2 * ffn if llama else ffn, bias=not llama)
        self.down = nn.Linear(ffn, hidden, bias=not llama)
        self.llama = llama

    def forward(self, x, rope):
        x = x + self.attention(self.norm1(x), rope)
        h = self.up(self.norm2(x))
        if self.llama:
            gate, h = h.chunk(2, dim=-1)
            h = F.silu(gate) * h
        else:
            h = F.gelu(h, approximate="tanh")
        return x + self.down(h)


class Model(nn.Module):
    """A GPT-2 or Llama shape with a tied head; returns the mean loss."""

    def __init__(self, layers, hidden, heads, groups, ffn, vocabulary, llama, qkv_bias, length):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = None if llama else nn.Embedding(length, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, groups, ffn, llama, qkv_bias) for _ in range(layers))
        self.norm = (nn.RMSNorm if llama else nn.LayerNorm)(hidden, eps=1e-5)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        half = hidden // heads // 2
        angles = torch.outer(torch.arange(length), 500000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, inputs, targets):
        x = self.tokens(inputs)
        if self.positions is not None:
            x = x + self.positions.weight
        for block in self.blocks:
            x = block(x, (self.cosine, self.sine))
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def train_at(arguments, batch, micro_steps):
    """Trains at one batch size; returns the row of a step of that many micro-steps."""
    device = arguments.device
    on_gpu = device == "cuda"
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    shape = PRESETS[arguments.preset]
    with torch.device(device):
        model = Model(*shape, arguments.length)
        data = torch.randint(shape[5] - 64, (micro_steps, batch, arguments.length + 1))
    if arguments.float8:
        from torchao.float8 import convert_to_float8_training  # pylint: disable=import-outside-toplevel
        convert_to_float8_training(model)  # the head is no module, so it stays as it is
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    step_of = model if arguments.no_compile else torch.compile(model)
    times, loss = [], None
    for step in range(arguments.warm_up + arguments.steps):
        begin = time.perf_counter()
        for tokens in data:
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = step_of(tokens[:, :-1], tokens[:, 1:])
            (loss / micro_steps).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()
        if step >= arguments.warm_up:
            times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    row = {"step_ms": 1e3 * seconds, "tokens_per_second": micro_steps * batch * arguments.length / seconds, "loss": loss.item(),
           "parameters": sum(p.numel() for p in model.parameters())}
    if on_gpu:
        row.update(peak_bytes=torch.cuda.max_memory_allocated(), reserved_bytes=torch.cuda.max_memory_reserved())
    return row


def train(arguments):
    batch, micro_steps = arguments.batch, arguments.micro_steps
    while True:
        result = {"bench": "train", "engine": "torchao" if arguments.float8 else "torch", "preset": arguments.preset,
                  "length": arguments.length, "batch": batch, "micro_steps": micro_steps, "policy": "none"}
        if batch != arguments.batch:
            result["policy"] += f", B {arguments.batch} was out of memory"
        try:
            result.update(train_at(arguments, batch, micro_steps))
        except torch.OutOfMemoryError:
            result["error"] = "out of memory"
        print(json.dumps(result), flush=True)
        if "error" not in result or batch % 2:
            return 0 if "error" in result or math.isfinite(result["loss"]) else 1
        batch, micro_steps = batch // 2, 2 * micro_steps
        gc.collect()  # the exception has let go of the frames that held the model
        torch.compiler.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def median_ms(function, repeats=11):
    """The median time of one call, by CUDA events, after warm-up."""
    for _ in range(3):
        function()
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    for start, end in zip(starts, ends):
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in zip(starts, ends))


def flash_attention(module):
    """flash_attn_func of FlashAttention-3's or -4's module; None where that cannot be imported."""
    try:
        return importlib.import_module(module).flash_attn_func
    except Exception as error:  # FlashAttention-4's compiler looks for its libraries and a driver
        print(f"no {module}: {error!r}", file=sys.stderr)
        return None


def measure_attention(name, backend, causal, heads, groups, head_dim, length):
    """Prints a row for each direction. backend: one of PyTorch's, or FlashAttention's function."""
    batch = max(1, 16384 // length)

    def tensor(count):  # a view of a packed projection: (B, T, heads, D) in memory
        x = torch.randn(batch, length, count, head_dim, device="cuda", dtype=torch.bfloat16)
        return (x if callable(backend) else x.transpose(1, 2)).requires_grad_()

    q, k, v = tensor(heads), tensor(groups), tensor(groups)
    dout = torch.randn_like(q)

    def forward(deterministic):
        if callable(backend):
            out = backend(q, k, v, causal=causal, deterministic=deterministic)
            return out[0] if isinstance(out, tuple) else out  # some versions also return the rows' sums
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != groups)

    flops = (2.0 if causal else 4.0) * batch * heads * length * length * head_dim
    row = {"bench": "attention", "engine": name, "mask": "causal" if causal else "full", "head_dim": head_dim, "heads": heads,
           "groups": groups, "batch": batch, "length": length}
    for direction in ("forward", "backward", "deterministic backward"):
        deterministic, backward = direction.startswith("deterministic"), direction != "forward"
        torch.use_deterministic_algorithms(deterministic)
        try:
            with contextlib.nullcontext() if callable(backend) else torch.nn.attention.sdpa_kernel([backend]):
                out = forward(deterministic)
                ms = median_ms((lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)) if backward else
                               (lambda: forward(False)))
                print(json.dumps({**row, "direction": direction, "ms": ms,
                                  "tflops": (2.5 if backward else 1) * flops / ms * 1e-9}), flush=True)
        except Exception as error:  # assertions and a compiler's errors, too
            said = str(error).strip().splitlines() or [repr(error)]
            print(json.dumps({**row, "direction": direction, "error": said[0]}), flush=True)
        finally:
            torch.use_deterministic_algorithms(False)


# By head dim, as in attention_bench.cu, in its order.
ATTENTION_LENGTHS = {128: (1024, 2048, 4096, 8192, 16384), 64: (1024, 2048, 4096, 8192, 16384), 96: (1024, 8192), 256: (1024, 8192)}
ATTENTION_PEERS = {
    "torch_flash": lambda: torch.nn.attention.SDPBackend.FLASH_ATTENTION,
    "torch_cudnn": lambda: torch.nn.attention.SDPBackend.CUDNN_ATTENTION,
    "fa3": lambda: flash_attention("flash_attn_interface"),
    "fa4": lambda: flash_attention("flash_attn.cute"),
}


def attention(arguments):
    torch.utils.deterministic.fill_uninitialized_memory = False  # it costs a pass over memory that no training makes
    peers = [(name.replace("_", " "), ATTENTION_PEERS[name]()) for name in arguments.peers]
    for head_dim in arguments.head_dims:
        lengths = [length for length in ATTENTION_LENGTHS[head_dim] if length in arguments.lengths]
        for heads, groups in ((2048 // head_dim, 2048 // head_dim), (64, 8)):
            for length in lengths[:1] if arguments.quick else lengths:
                for causal in (True, False):
                    for name, backend in peers:
                        if backend is not None:
                            measure_attention(name, backend, causal, heads, groups, head_dim, length)
    return 0


def add_list(parser, name, choices):
    """Adds an option that is a list of some of the choices, separated by commas; all of them if left out."""
    def some(text):
        chosen = [choice for choice in choices if str(choice) in text.split(",")]
        if len(chosen) != len(text.split(",")):
            raise argparse.ArgumentTypeError(f"no list of some of {','.join(map(str, choices))}")
        return chosen
    parser.add_argument(name, type=some, default=list(choices))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("attention")
    one.add_argument("--quick", action="store_true", help="the shortest length alone")
    add_list(one, "--peers", ATTENTION_PEERS)
    add_list(one, "--head-dims", ATTENTION_LENGTHS)
    add_list(one, "--lengths", ATTENTION_LENGTHS[128])
    one = commands.add_parser("train")
    one.add_argument("--preset", choices=PRESETS, required=True)
    one.add_argument("--length", type=int, required=True)
    one.add_argument("--batch", type=int, required=True)
    one.add_argument("--micro-steps", type=int, default=1)
    one.add_argument("--steps", type=int, default=10)
    one.add_argument("--warm-up", type=int, default=4)
    one.add_argument("--device", default="cuda")
    one.add_argument("--no-compile", action="store_true")
    one.add_argument("--float8", action="store_true")
    arguments = parser.parse_args()
    return {"attention": attention, "train": train}[arguments.command](arguments)


if __name__ == "__main__":
    sys.exit(main())
