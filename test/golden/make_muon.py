#!/usr/bin/env python3
"""Writes muon.golden: ten steps of torch.optim.Muon on matrices of several shapes, with given gradients.

    python3 test/golden/make_muon.py        needs torch 2.9 or newer; README.md has the version

torch's Newton-Schulz iterations cast to bf16. Here this cast is left out: everything is computed in fp64, from numbers
that are fp32, and rounded to fp32 once.
"""
import struct
from pathlib import Path

import torch

STEPS = 10
# rows, columns, rank of the gradients (0: full), first step with a gradient that is not 0
MATRICES = [(6, 14, 0, 0), (14, 6, 0, 0), (9, 9, 0, 0), (8, 12, 3, 0), (7, 5, 0, 1), (1, 10, 0, 0)]


def write(path, config, tensors):
    text = "".join(f"{key}={value}\n" for key, value in config.items()).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<8sI", b"GPTGOLD1", len(text)) + text + struct.pack("<I", len(tensors)))
        for name, value in tensors.items():
            array = value.detach().float().contiguous().numpy()
            file.write(struct.pack("<I", len(name)) + name.encode())
            file.write(struct.pack(f"<BI{array.ndim}q", 0, array.ndim, *array.shape))
            file.write(bytes(-file.tell() % 8))
            file.write(array.tobytes())


def main():
    torch.bfloat16 = torch.float64  # torch's iterations cast to this type
    generator = torch.Generator().manual_seed(9)
    rates = [1e-2 * (step + 1) / STEPS for step in range(STEPS)]
    tensors = {"lr": torch.tensor(rates)}
    for index, (rows, columns, rank, first) in enumerate(MATRICES):
        random = lambda *shape: torch.randn(*shape, generator=generator).double().float().double()  # noqa: E731
        parameter = torch.nn.Parameter(random(rows, columns) * 0.5)
        grads = torch.stack([random(rows, rank) @ random(rank, columns) if rank else random(rows, columns) for _ in range(STEPS)])
        grads = (grads * 0.1).float().double()
        grads[:first] = 0
        start, values = parameter.detach().float().clone(), []
        parameter.data = start.double()
        optimizer = torch.optim.Muon([parameter], lr=1, weight_decay=float(torch.tensor(0.1)), momentum=float(torch.tensor(0.95)),
                                     nesterov=True, ns_steps=5, adjust_lr_fn="match_rms_adamw")  # fmt: skip
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = float(torch.tensor(rates[step]))
            parameter.grad = grads[step].clone()
            optimizer.step()
            values.append(parameter.detach().clone())
        assert parameter.dtype == torch.float64 and all(torch.isfinite(v).all() for v in values)
        tensors |= {f"start.{index}": start, f"grads.{index}": grads, f"values.{index}": torch.stack(values)}
    write(Path(__file__).with_name("muon.golden"), {"matrices": len(MATRICES)}, tensors)


main()
