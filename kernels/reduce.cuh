// Reductions over lanes of a warp and over a block, in a fixed order; every thread gets the same bits.
#pragma once
#include "kernels/device.cuh" // DEVICE_FUNCTION
#include "kernels/ptx.cuh"    // shared memory, shuffle_xor_double

#ifdef TARGET_CUDA

// Returns the sum of x over this lane's group of `lanes` neighboring lanes, a power of 2 up to 32. All lanes of the
// warp call. In every step both partners add the same two numbers, so that a group agrees to the bit.
DEVICE_FUNCTION float lanes_sum(float x, int lanes) {
    for (int offset = lanes / 2; offset > 0; offset /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}
// Returns the maximum of x over this lane's group of `lanes` neighboring lanes; NaNs are ignored. All lanes call.
DEVICE_FUNCTION float lanes_max(float x, int lanes) {
    for (int offset = lanes / 2; offset > 0; offset /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}
// Returns the sum of x over the warp's lanes, in every lane. All lanes call.
DEVICE_FUNCTION double warp_sum_double(double x) {
    for (int offset = 16; offset > 0; offset /= 2)
        x += shuffle_xor_double(x, offset);
    return x;
}

enum { BLOCK_SUM_BYTES = 32 * sizeof(double) };
// Returns the sum of x over a block of whole warps, in every thread. All threads call. shared: BLOCK_SUM_BYTES of
// shared memory, unused since the last barrier, free again after the next.
DEVICE_FUNCTION double block_sum_double(double x, uint32_t shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = warp_sum_double(x);
    if (lane == 0)
        store_shared_double(shared + 8 * warp, x);
    __syncthreads();
    return warp_sum_double(lane < warps ? load_shared_double(shared + 8 * lane) : 0);
}

#endif
