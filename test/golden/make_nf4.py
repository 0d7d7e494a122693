#!/usr/bin/env python3
"""Makes nf4.golden: what bitsandbytes stores of two matrices in NF4 with double quantization.

    python3 test/golden/make_nf4.py [folder]        needs torch, numpy and bitsandbytes; README.md has the versions

The matrices are test/op_frozen_format.c's, made here again by the same generator. The file also has the first elements
of each matrix, read back as fp32 and as bf16, as fp32 numbers.
"""
import struct
import sys
from pathlib import Path

import bitsandbytes
import numpy
import torch

MASK, READ_BACK = (1 << 64) - 1, 512
SHAPES = {"even": (160, 205), "odd": (7, 29)}


def uniform(seed):
    """Makes test/testing.h's test_uniform."""
    while True:
        seed = seed + 0x9e3779b97f4a7c15 & MASK
        z = (seed ^ seed >> 30) * 0xbf58476d1ce4e5b9 & MASK
        z = (z ^ z >> 27) * 0x94d049bb133111eb & MASK
        yield ((z ^ z >> 31) >> 11) * 2.0**-52 - 1.0


def weights(rows, cols):
    """Makes weights: four uniform numbers summed; row 3 is zero, and each 97th element is an outlier."""
    random, values = uniform(rows), []
    for i in range(rows * cols):
        x = next(random)
        for _ in range(3):
            x += next(random)
        values.append(0.0 if i // cols == 3 else x * (0.1 if i % 97 == 0 else 0.02))
    return torch.from_numpy(numpy.array(values).astype(numpy.float32)).reshape(rows, cols)


def stored(name, rows, cols):
    matrix = weights(rows, cols)
    codes, state = bitsandbytes.functional.quantize_4bit(matrix, quant_type="nf4", compress_statistics=True)
    assert state.blocksize == 64 and state.state2.blocksize == 256
    back = bitsandbytes.functional.dequantize_4bit(codes, state)
    state.dtype = torch.bfloat16
    back_bf16 = bitsandbytes.functional.dequantize_4bit(codes, state)
    return {f"{name}.shape": torch.tensor([rows, cols]), f"{name}.codes": codes.flatten(),
            f"{name}.absmax_codes": state.absmax, f"{name}.absmax_scales": state.state2.absmax,
            f"{name}.absmax_mean": state.offset.reshape(1), f"{name}.fp32": back.flatten()[:READ_BACK],
            f"{name}.bf16": back_bf16.flatten()[:READ_BACK].float()}


def write(path, tensors):
    """Writes the file in README.md's format; bytes are packed in int32, the last one filled up with zeros."""
    with open(path, "wb") as file:
        file.write(struct.pack("<8sII", b"GPTGOLD1", 0, len(tensors)))
        for name, tensor in tensors.items():
            data = tensor.contiguous().numpy()
            if data.dtype == numpy.uint8:
                data = numpy.frombuffer(data.tobytes() + bytes(-data.size % 4), "<i4")
            is_int = data.dtype.kind == "i"
            file.write(struct.pack("<I", len(name)) + name.encode() + struct.pack("<BIq", is_int, 1, data.size))
            file.write(bytes(-file.tell() % 8) + data.astype("<i4" if is_int else "<f4").tobytes())


folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
tensors = {}
for name, shape in SHAPES.items():
    tensors.update(stored(name, *shape))
write(folder / "nf4.golden", tensors)
