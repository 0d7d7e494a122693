#!/usr/bin/env python3
"""Times PyTorch's scaled_dot_product_attention (flash and cuDNN backends), forward and backward, causal, bf16.

Prints one line per shape, backend and direction in the format of `attention_check --bench`, so that
scripts/gpu_check.sh can put both side by side:  backend direction D H Hkv B T milliseconds TFLOP/s
"""
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

TOKENS = 16384
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def median_ms(function, repeats):
    """Median time of one call by CUDA events, after warm-up."""
    for _ in range(3):
        function()
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    for start, end in zip(starts, ends):
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in zip(starts, ends))
    return times[len(times) // 2]


def measure(name, heads, groups, head_dim, length, repeats):
    batch = TOKENS // length
    def tensor(count):
        return torch.randn(batch, count, length, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q, k, v = tensor(heads), tensor(groups), tensor(groups)
    dout = torch.randn_like(q)

    def forward():
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != groups)

    flops = 4.0 * batch * heads * length * length * head_dim / 2
    with sdpa_kernel([BACKENDS[name]]):
        out = forward()
        times = {
            "forward": (median_ms(forward, repeats), flops),
            "backward": (median_ms(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), repeats),
                         2.5 * flops),
        }
    for direction, (ms, count) in times.items():
        print(f"{name:8s} {direction:8s} {head_dim:4d} {heads:3d} {groups:3d} {batch:3d} {length:6d} "
              f"{ms:9.4f} {count / ms * 1e-9:7.1f}", flush=True)


def main():
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    print(f"# torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {torch.cuda.get_device_name()}")
    for head_dim in (64, 128):
        for heads, groups in ((2048 // head_dim, 2048 // head_dim), (64, 8)):
            for length in (1024, 2048, 4096, 8192, 16384):
                for name in BACKENDS:
                    try:
                        measure(name, heads, groups, head_dim, length, repeats)
                    except RuntimeError as error:
                        print(f"# {name} D={head_dim} H={heads}/{groups} T={length}: skipped, "
                              f"{str(error).splitlines()[0]}", flush=True)


main()
