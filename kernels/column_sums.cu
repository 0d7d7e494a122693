#include "kernels/column_sums.cuh"

#ifdef TARGET_CUDA

enum { COLUMN_SUMS_PARTS = 32 };

// Sums 32 columns a block. Each warp sums every COLUMN_SUMS_PARTS-th chunk, then the first warp adds up these sums.
static __global__ void __launch_bounds__(32 * COLUMN_SUMS_PARTS)
    column_sums_kernel(float *sums, const float *partial, int64_t chunks, int64_t N, bool add) {
    const int lane = (int)threadIdx.x % 32, part = (int)threadIdx.x / 32;
    const int64_t column = (int64_t)blockIdx.x * 32 + lane;
    const uint32_t shared = shared_memory(); // (parts, 32)
    float sum = 0;
    if (column < N)
        for (int64_t chunk = part; chunk < chunks; chunk += COLUMN_SUMS_PARTS)
            sum += partial[chunk * N + column];
    store_shared_float(shared + (uint32_t)(part * 32 + lane) * 4, sum);
    __syncthreads();
    if (part > 0 || column >= N)
        return;
    sum = 0;
    for (int p = 0; p < COLUMN_SUMS_PARTS; p++)
        sum += load_shared_float(shared + (uint32_t)(p * 32 + lane) * 4);
    sums[column] = add ? sums[column] + sum : sum;
}
void column_sums(float *sums, const float *partial, int64_t chunks, int64_t N, bool add, struct device *dev) {
    LAUNCH(dev, column_sums_kernel, blocks_for(N, 32), 32 * COLUMN_SUMS_PARTS, COLUMN_SUMS_PARTS * 32 * sizeof(float),
           sums, partial, chunks, N, add);
}

#else

void column_sums(float *sums, const float *partial, int64_t chunks, int64_t N, bool add, struct device *dev) {
#pragma omp parallel for simd schedule(static)
    for (int64_t column = 0; column < N; column++) {
        float sum = 0;
        for (int64_t chunk = 0; chunk < chunks; chunk++)
            sum += partial[chunk * N + column];
        sums[column] = add ? sums[column] + sum : sum;
    }
}

#endif
