// Positions of tokens in their sequences: what rotary and learned positions, and the KV cache, are indexed by.
#pragma once
#include "kernels/device.cuh" // HOST_DEVICE

// The position of row `row` of (B, T) tokens. starts: (B) positions of the sequences' first tokens; NULL: all 0.
HOST_DEVICE int64_t position_of(const int32_t *starts, int64_t row, int T) {
    return (starts ? starts[row / T] : 0) + row % T;
}
