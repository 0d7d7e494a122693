// The amax of what an op stores is the largest magnitude among the elements, which gives the scale of their cast to FP8
// (kernels/fp8/fp8.cuh). The op merges it into *amax, in the device's memory, which becomes the maximum of itself and
// of fp8_magnitude of each element as stored. That is a maximum of integers: no order changes its bits.
#pragma once
#include "kernels/device.cuh"  // floatX
#include "kernels/fp8/fp8.cuh" // fp8_magnitude
#include "kernels/packed.cuh"  // struct packed
#include "kernels/ptx.cuh"     // store_shared_word, load_shared_word

HOST_DEVICE uint32_t amax_larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
HOST_DEVICE uint32_t amax_with(uint32_t largest, floatX x) { return amax_larger(largest, fp8_magnitude(to_float(x))); }

#ifdef TARGET_CUDA

// Returns the largest of `largest` and the fp8_magnitude of each of a pack's first `count` elements.
DEVICE_FUNCTION uint32_t amax_with_packed(uint32_t largest, const struct packed &x, int64_t count = PACK) {
#pragma unroll
    for (int i = 0; i < PACK; i++)
        if (i < count)
            largest = amax_with(largest, x.x[i]);
    return largest;
}

// Merges each lane's `largest` into *amax (not NULL) by one atomic operation. All lanes of the warp call.
DEVICE_FUNCTION void amax_merge_warp(uint32_t *amax, uint32_t largest) {
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (threadIdx.x % 32 == 0)
        atomicMax(amax, largest);
}
enum { AMAX_BLOCK_BYTES = 32 * sizeof(uint32_t) };
// Merges each thread's `largest` into *amax (not NULL), by one atomic operation a block. All threads call, in whole
// warps. shared: AMAX_BLOCK_BYTES of shared memory, unused since the last barrier, free again after the next.
DEVICE_FUNCTION void amax_merge_block(uint32_t *amax, uint32_t largest, uint32_t shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (lane == 0)
        store_shared_word(shared + 4 * (uint32_t)warp, largest);
    __syncthreads();
    if (warp == 0)
        amax_merge_warp(amax, lane < warps ? load_shared_word(shared + 4 * (uint32_t)lane) : 0);
}

#else

// Returns the largest fp8_magnitude in x (n), which an op has just written and the nearest cache still holds.
static inline uint32_t amax_elements(const floatX *x, int64_t n) {
    uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < n; i++)
        largest = amax_with(largest, x[i]);
    return largest;
}
// *amax = the larger of *amax and `largest`, atomically: several threads may do so at a time.
static inline void amax_merge(uint32_t *amax, uint32_t largest) {
    uint32_t before = __atomic_load_n(amax, __ATOMIC_RELAXED);
    while (before < largest &&
           !__atomic_compare_exchange_n(amax, &before, largest, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        continue;
}
// Merges the largest fp8_magnitude in x (n) into *amax. Does nothing where amax is NULL.
static inline void amax_merge_elements(uint32_t *amax, const floatX *x, int64_t n) {
    if (amax != NULL)
        amax_merge(amax, amax_elements(x, n));
}
// Merges the largest fp8_magnitude in `count` rows of n elements, `stride` elements apart, into *amax, if not NULL.
static inline void amax_merge_rows(uint32_t *amax, const floatX *rows, int64_t stride, int64_t count, int64_t n) {
    uint32_t largest = 0;
    if (!amax)
        return;
    for (int64_t r = 0; r < count; r++)
        largest = amax_larger(largest, amax_elements(rows + r * stride, n));
    amax_merge(amax, largest);
}

#endif
