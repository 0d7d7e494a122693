// Positions of tokens in their sequences: what rotary and learned positions, and the KV cache, are indexed by.
#pragma once
#include "kernels/device.cuh" // HOST_DEVICE

// Returns the position of row `row` < 2^32 of (B, T) tokens. starts (B): the sequences' first positions; NULL: all 0.
HOST_DEVICE int64_t position_of(const int32_t *starts, int64_t row, int T) {
    const uint32_t r = (uint32_t)row, t = (uint32_t)T; // a GPU divides 64 bits by many instructions
    return (starts ? starts[r / t] : 0) + (int64_t)(r % t);
}

// Operands of positions. starts (B): positions of the sequences' first tokens; NULL: 0. document_starts (B, T),
// only where starts is NULL: the t at which a token's document begins, at position 0; NULL: positions aren't reset.
struct token_positions {
    const int32_t *starts, *document_starts;
};
// Returns the position of row `row` < 2^32 of (B, T) tokens: in its document, where document_starts is given.
HOST_DEVICE int64_t token_position(struct token_positions positions, int64_t row, int T) {
    const int64_t position = position_of(positions.starts, row, T);
    return positions.document_starts ? position - positions.document_starts[row] : position;
}
