#!/usr/bin/env python3
"""Writes types.safetensors with the reference implementation (pip install safetensors==0.8.0): a tensor of each type,
in an order of names that is not the file's, shapes of 0 to 3 dimensions, an empty tensor, and floats that test
conversions."""
import ctypes
import os
import struct

from safetensors import TensorSpec, serialize

TYPES = {"bool": 1, "uint8": 1, "int8": 1, "float8_e5m2": 1, "float8_e4m3fn": 1, "float8_e8m0fnu": 1,
         "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "complex64": 8,
         "int64": 8, "uint64": 8}  # fmt: skip
VALUES = [0.0, -0.0, 1.0, -2.5, 65504.0, 6e-8]
tensors = {}
for i, (name, width) in enumerate(TYPES.items()):
    tensors["t%02d" % i] = (name, [1], bytes([i + 1] * width))
tensors["z.half"] = ("float16", [2, 3], struct.pack("<6e", *VALUES))
tensors["bfloat"] = ("bfloat16", [6], b"".join(struct.pack("<f", v)[2:] for v in VALUES))
tensors["single"] = ("float32", [1, 3, 2], struct.pack("<6f", *VALUES))
tensors["scalar"] = ("float32", [], struct.pack("<f", 7.0))
tensors["empty"] = ("float32", [0, 3], b"")
tensors["double"] = ("float64", [6], struct.pack("<6d", *VALUES))

keep = {name: ctypes.create_string_buffer(data, len(data)) for name, (_, _, data) in tensors.items()}
specs = {name: TensorSpec(dtype=dtype, shape=shape, data_ptr=ctypes.addressof(keep[name]), data_len=len(data))
         for name, (dtype, shape, data) in tensors.items()}  # fmt: skip
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "types.safetensors"), "wb") as file:
    file.write(bytes(serialize(specs, metadata={"format": "pt"})))
