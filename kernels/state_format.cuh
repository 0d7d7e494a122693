// How a state of the training is stored for each parameter: gradients, moments, master weights.
//
// A stored state is a run of blocks of STATE_BLOCK elements, each of state_block_bytes. Blocks never depend on ranks or
// on what is offloaded: ranges that are updated, sharded or copied begin at whole blocks (TENSOR_ALIGNMENT).
//
//   FORMAT_FP32       4 bytes an element
//   FORMAT_BF16       2
//   FORMAT_8BIT       1, and an fp32 scale in front of each block: its largest magnitude. First moments: 127 magnitudes
//                     of both signs and 0
//   FORMAT_8BIT_ROOT  1, and a scale: the square root of second moments, 256 magnitudes; what is not 0 never becomes 0
//   FORMAT_REMAINDER  2: the lower half of an fp32 master weight whose upper half, rounded, is the bf16 parameter
//
// The split of a master weight is exact for all finite floats: hi = (bits + 0x8000) >> 16, lo = bits & 0xffff. Ties
// round away from zero: with ties to even an even hi has 65,537 preimages, and no 16 bits tell them apart. So every
// parameter is rounded by parameter_rounded: initial, loaded, updated and saved ones.
#pragma once
#include "kernels/device.cuh" // floatX, bf16, HOST_DEVICE

enum { STATE_BLOCK = 128 };
enum state_format { FORMAT_FP32, FORMAT_BF16, FORMAT_8BIT, FORMAT_8BIT_ROOT, FORMAT_REMAINDER };

HOST_DEVICE size_t state_block_bytes(enum state_format format) {
    switch (format) {
    case FORMAT_FP32: return STATE_BLOCK * sizeof(float);
    case FORMAT_BF16:
    case FORMAT_REMAINDER: return STATE_BLOCK * sizeof(uint16_t);
    case FORMAT_8BIT:
    case FORMAT_8BIT_ROOT: return sizeof(float) + STATE_BLOCK;
    }
    return 0;
}
// Bytes of n elements; a block that they begin counts whole.
HOST_DEVICE size_t state_bytes(enum state_format format, int64_t n) {
    return (size_t)((n + STATE_BLOCK - 1) / STATE_BLOCK) * state_block_bytes(format);
}

// The parameter that an fp32 master weight is rounded to, and the rest of its bits; and the master weight again.
HOST_DEVICE bf16 split_high(float master) {
    uint32_t bits;
    bf16 high;
    memcpy(&bits, &master, sizeof bits);
    high.bits = (uint16_t)((bits + 0x8000u) >> 16);
    return high;
}
HOST_DEVICE uint16_t split_low(float master) {
    uint32_t bits;
    memcpy(&bits, &master, sizeof bits);
    return (uint16_t)bits;
}
HOST_DEVICE float split_join(bf16 high, uint16_t low) {
    const uint32_t bits = ((uint32_t)high.bits - (low >> 15)) << 16 | low;
    float master;
    memcpy(&master, &bits, sizeof master);
    return master;
}
// A parameter of floatX by the one rounding that all parameters have. Only finite values come here.
HOST_DEVICE floatX parameter_rounded(float exact) {
#ifdef PRECISION_BF16
    return split_high(exact);
#else
    return exact;
#endif
}
