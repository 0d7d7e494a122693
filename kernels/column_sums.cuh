// Sums over the rows of a matrix, in two stages. The kernels that make or read the matrix leave partial sums of chunks
// of rows. Then column_sums adds the partial sums up, in an order that depends only on the number of chunks.
#pragma once
#include "kernels/device.cuh"        // struct device, LAUNCH
#include "kernels/packed_floats.cuh" // struct packed_floats
#include <sys/cdefs.h>               // __BEGIN_DECLS

__BEGIN_DECLS
// sums (N) = the sums over the chunks of partial (chunks, N), or += where `add`
void column_sums(float *sums, const float *partial, int64_t chunks, int64_t N, bool add, struct device *dev);
__END_DECLS

#ifdef TARGET_CUDA
#include "kernels/ptx.cuh" // shared_memory, store_shared_float, load_shared_float

// The first stage: column_sums_add_pack for each pack, then column_sums_of_warps.
// COLUMN_SUMS_LINE: words from one line of 32 sums to the next. A warp meets no bank twice, neither when it writes a
// line nor when it reads 32 columns, which are elements i, i + 1, ... of PACK lines.
enum { COLUMN_SUMS_LINE = 32 + 32 / PACK };
#define COLUMN_SUMS_OF_WARPS_BYTES(warps) ((warps)*PACK * COLUMN_SUMS_LINE * 4)
DEVICE_FUNCTION void column_sums_add_pack(struct packed_floats *sums, const struct packed &x) {
#pragma unroll
    for (int i = 0; i < PACK; i++)
        sums->x[i] += to_float(x.x[i]);
}
// to[c] = the sum of column c over the block's warps, c < columns; a warp's lanes hold neighboring packs of columns.
// All threads call. Overwrites the first COLUMN_SUMS_OF_WARPS_BYTES of shared memory. A barrier before and one after
// are the caller's task, where other uses of these bytes are near.
DEVICE_FUNCTION void column_sums_of_warps(float *to, const struct packed_floats &sums, int columns) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32;
    const uint32_t shared = shared_memory(); // (warps, PACK, COLUMN_SUMS_LINE)
    for (int i = 0; i < PACK; i++)
        store_shared_float(shared + (uint32_t)((warp * PACK + i) * COLUMN_SUMS_LINE + lane) * 4, sums.x[i]);
    __syncthreads();
    for (int c = (int)threadIdx.x; c < 32 * PACK && c < columns; c += (int)blockDim.x) {
        float sum = 0;
        for (int w = 0; w < warps; w++)
            sum += load_shared_float(shared + (uint32_t)((w * PACK + c % PACK) * COLUMN_SUMS_LINE + c / PACK) * 4);
        to[c] = sum;
    }
}
#endif
