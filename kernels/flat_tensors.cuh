// The tensors of the flat buffers, as an op over a range of many tensors sees them: a table in the device's memory.
#pragma once
#include "kernels/device.cuh" // DEVICE_FUNCTION
#include <math.h>             // fmaf
#include <stdbool.h>          // bool
#include <stdint.h>           // int64_t

// A tensor: elements [begin, end) of the flat buffers. From `end` to the next tensor's `begin` is a gap.
struct flat_tensor {
    int64_t begin, end;
    uint32_t *amax; // where updates take the amax of its parameters, as kernels/amax.cuh says; NULL: nowhere
    bool decays;    // whether updates decay it
    float lr_scale; // what the learning rate of its updates is multiplied by
    float scale;    // of a matrix that Muon updates: what its update is multiplied by
};
// Returns what an update multiplies a tensor's values by: 1 - lr_scale lr weight_decay, or 1 where the tensor does not
// decay. keep is 1 - lr weight_decay, the result's bits at an lr_scale of 1; decay is lr weight_decay.
HOST_DEVICE float flat_tensor_keep(const struct flat_tensor *tensor, float keep, float decay) {
    return tensor->decays ? fmaf(1 - tensor->lr_scale, decay, keep) : 1;
}
// All tensors, in flat order. The first one begins at element 0, each at a multiple of STATE_BLOCK. A tensor's row is
// its index, which is the key of stochastic rounding. The matrices that Muon updates, ranges of tensors, have such a
// table of their own. There a matrix begins anywhere, and only elements of matrices are looked up.
struct flat_tensors {
    const struct flat_tensor *rows; // (count) in the device's memory
    int count;
    bool has_amaxes; // some row has
};

#ifdef TARGET_CUDA

// Returns the row of the last tensor that begins at or before `at`, as row 0 must: `at` is in it or in the gap after
// it. All lanes of a warp call with one `at`, and load a row each: a search among a thousand rows waits for two loads.
DEVICE_FUNCTION int flat_tensor_at_warp(const struct flat_tensors &tensors, int64_t at) {
    int stride = 1, first = 0;
    while (32 * stride < tensors.count)
        stride *= 32;
    for (; stride > 0; stride /= 32) {
        const int row = first + (int)(threadIdx.x % 32) * stride;
        const bool begun = row < tensors.count && tensors.rows[row].begin <= at;
        first += (__popc(__ballot_sync(0xffffffffu, begun)) - 1) * stride;
    }
    return first;
}
// Returns how many of the elements [at, at + count) lie before the tensor's end: 0 where `at` is in the gap after it.
DEVICE_FUNCTION int flat_tensor_clip_count(const struct flat_tensor &tensor, int64_t at, int count) {
    const int64_t left = tensor.end - at;
    return left >= count ? count : left > 0 ? (int)left : 0;
}

#else

// Returns the row of the last tensor that begins at or before `at`, which is in it or the gap after it; 0 if none does.
static inline int flat_tensor_at(const struct flat_tensors *tensors, int64_t at) {
    int first = 0, end = tensors->count; // the row is in [first, end)
    while (end - first > 1) {
        const int middle = first + (end - first) / 2;
        if (tensors->rows[middle].begin <= at)
            first = middle;
        else
            end = middle;
    }
    return first;
}
// Finds the first elements of [*first, end) that one tensor has: [*first, *last), of row *row. Returns false where
// there are none. The caller sets *row to -1 before the first call, and *first to *last between calls.
static inline bool flat_tensors_next(const struct flat_tensors *tensors, int64_t end, int *row, int64_t *first,
                                     int64_t *last) {
    for (*row = *row < 0 ? flat_tensor_at(tensors, *first) : *row + 1;
         *row < tensors->count && tensors->rows[*row].begin < end; ++*row) {
        const struct flat_tensor *t = &tensors->rows[*row];
        *first = t->begin > *first ? t->begin : *first;
        *last = t->end < end ? t->end : end;
        if (*first < *last)
            return true;
    }
    return false;
}

#endif
