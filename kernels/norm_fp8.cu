#include "kernels/norm_fp8.cuh"
#include "kernels/fp8/cast.cuh"  // fp8_cast
#include "kernels/gpu_sizes.cuh" // gpu_norm_fp8_bytes
#ifdef TARGET_CUDA
#include "kernels/fp8/tiles.cuh"    // fp8_encode_eight, fp8_count_eight, transpose_bytes
#include "kernels/norm_forward.cuh" // norm_forward_row
#endif

size_t norm_forward_fp8_workspace_bytes(int64_t N, int C, const struct device *dev) {
    return device_is_gpu(dev) ? gpu_norm_fp8_bytes(N, C) : (size_t)(N * C) * sizeof(floatX);
}
// Does norm_forward_fp8 by the op and fp8_cast; out: (N, C).
static void norm_then_cast(struct fp8_cast to, floatX *out, floatX *sum, float *mean, float *rstd, const floatX *x,
                           const floatX *delta, const floatX *weight, const floatX *bias, int64_t N, int C,
                           struct norm_options options, float scale, struct dropout dropout, struct device *dev) {
    options.amax = &to.scale->amax;
    if (delta)
        residual_norm_forward(sum, out, mean, rstd, x, delta, weight, bias, N, C, options, scale, dropout, dev);
    else
        norm_forward(out, mean, rstd, x, weight, bias, N, C, options, dev);
    fp8_cast(to, out, N, C, NULL, dev);
}

#ifdef TARGET_CUDA

// Bound by memory: 2 bytes an element are read of x and 2 of delta, 2 written of the sum, 1 of each form. Rows are divided
// among threads as norm_forward_launch divides them, which decides their bits. A block's rows of codes lie in shared
// memory, 64 KB at most, so that the column form is written by runs of 16 or 32 bytes.
enum { NORM_FP8_CHUNK = 16, NORM_FP8_SUMS_BYTES = 128 };
static_assert(NORM_FP8_SUMS_BYTES >= NORM_FORWARD_PLACES * NORM_THREADS / 32 * 4,
              "row_sums needs it, before the codes");
// The number of threads of a block whose rows have `threads` threads each.
HOST_DEVICE constexpr int norm_fp8_threads(int threads) { return threads == 32 ? 128 : threads; }
// The number of rows of a block.
HOST_DEVICE constexpr int norm_fp8_rows(int threads) { return (threads == 32 ? 2 : 1) * NORM_FP8_CHUNK; }
// The number of bytes from a row of codes in shared memory to the next: two chunks of a column lie in other banks.
HOST_DEVICE int norm_fp8_pitch(int C) { return C + 4; }

// Stores a pack of a row as codes: in the row form at to.rows.codes + at, if it is made, and in shared memory. Returns
// fp8_count_eight's counts, 0 where to.counts is NULL.
DEVICE_FUNCTION uint32_t norm_fp8_store(const struct fp8_cast &to, enum fp8_format format, int64_t at, uint32_t shared,
                                        const struct packed &value, float scale) {
    struct fp8_eight eight = {};
    uint32_t codes[2];
    float sums[FP8_THREAD_COLUMNS] = {0};
    memcpy(&eight, &value, sizeof value);
    fp8_encode_eight(codes, sums, eight, scale, format);
#pragma unroll
    for (int i = 0; i < PACK / 4; i++)
        store_shared_word(shared + 4 * i, codes[i]);
    if (to.rows.codes && PACK == 8)
        *(uint2 *)(to.rows.codes + at) = make_uint2(codes[0], codes[1]);
    else if (to.rows.codes)
        *(uint32_t *)(to.rows.codes + at) = codes[0];
    return to.counts ? fp8_count_eight(eight, scale, format) : 0;
}
// Writes the block's codes, rows from row `first` on, to the column form (C, N). All threads call, after a barrier.
template <int THREADS>
DEVICE_FUNCTION void norm_fp8_write_columns(fp8 *columns, uint32_t codes, int64_t first, int64_t N, int C) {
    const int chunks = norm_fp8_rows(THREADS) / NORM_FP8_CHUNK, items = C / 4 * chunks;
    for (int item = threadIdx.x; item < items; item += norm_fp8_threads(THREADS)) {
        const int chunk = item % chunks, column = item / chunks * 4;
        uint32_t four[4][NORM_FP8_CHUNK / 4]; // of each of four columns the codes of 16 rows
        if (first + chunk * NORM_FP8_CHUNK >= N)
            continue;
#pragma unroll
        for (int i = 0; i < NORM_FP8_CHUNK / 4; i++) {
            uint32_t rows[4], turned[4];
#pragma unroll
            for (int r = 0; r < 4; r++)
                rows[r] = load_shared_word(
                    codes + (uint32_t)((chunk * NORM_FP8_CHUNK + 4 * i + r) * norm_fp8_pitch(C) + column));
            transpose_bytes(turned, rows);
#pragma unroll
            for (int j = 0; j < 4; j++)
                four[j][i] = turned[j];
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            fp8 *const at = columns + (column + j) * N + first + chunk * NORM_FP8_CHUNK;
            packed_check(at, true);
            *(uint4 *)at = make_uint4(four[j][0], four[j][1], four[j][2], four[j][3]);
        }
    }
}
// Adds the sum of all lanes' counts to `counts`. All lanes of the warp call.
DEVICE_FUNCTION void norm_fp8_add_counts(uint64_t *counts, uint32_t count) {
    for (int offset = 16; offset > 0; offset /= 2)
        count += __shfl_xor_sync(0xffffffffu, count, offset); // a kind has fewer than 2^16: the warp's rows
    if (threadIdx.x % 32 == 0)
        fp8_add_counts(counts, count);
}

// Merges the amax of norm_forward_row's rows into scale->amax, unless scale->delayed is set (not 0).
template <int THREADS, int PACKS>
static __global__ void __launch_bounds__(norm_fp8_threads(THREADS), PACKS > 4 || THREADS > 32 ? 3 : 4)
    norm_amax_kernel(struct fp8_scale *scale, const struct norm_forward_arrays a, int64_t N, int C,
                     struct norm_options options, float residual_scale, struct dropout dropout) {
    const int together = norm_fp8_threads(THREADS) / THREADS; // rows
    uint32_t largest = 0;
    if (scale->delayed != 0)
        return;
    for (int64_t n = blockIdx.x * together + threadIdx.x / THREADS; n < N; n += gridDim.x * together) {
        norm_forward_row<THREADS, PACKS>(
            a, n, C, options, residual_scale, dropout, true,
            [&](int c, const packed &value) { largest = amax_with_packed(largest, value); });
        if (THREADS > 32)
            __syncthreads(); // row_sums' memory is free
    }
    amax_merge_warp(&scale->amax, largest);
}
// Computes norm_fp8_rows rows and casts them. The first block sets to.scale's scale and inverse.
template <int THREADS, int PACKS>
static __global__ void __launch_bounds__(norm_fp8_threads(THREADS), PACKS > 4 || THREADS > 32 ? 3 : 4)
    norm_fp8_kernel(const struct fp8_cast to, enum fp8_format format, const struct norm_forward_arrays a, int64_t N,
                    int C, struct norm_options options, float residual_scale, struct dropout dropout) {
    const int together = norm_fp8_threads(THREADS) / THREADS; // rows
    const int64_t first = (int64_t)blockIdx.x * norm_fp8_rows(THREADS);
    const uint32_t codes = shared_memory() + NORM_FP8_SUMS_BYTES;
    const float scale = fp8_scale_for(to.scale, format);
    const bool takes_amax = to.scale->delayed != 0;
    uint32_t count = 0, largest = 0;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        to.scale->scale = scale;
        to.scale->inverse = 1.0f / scale;
    }
    for (int r = threadIdx.x / THREADS; r < norm_fp8_rows(THREADS) && first + r < N; r += together) {
        const int64_t n = first + r;
        norm_forward_row<THREADS, PACKS>(a, n, C, options, residual_scale, dropout, true,
                                         [&](int c, const packed &value) {
                                             const uint32_t shared = codes + (uint32_t)(r * norm_fp8_pitch(C) + c);
                                             count += norm_fp8_store(to, format, n * C + c, shared, value, scale);
                                             largest = amax_with_packed(largest, value);
                                         });
        if (THREADS > 32)
            __syncthreads(); // row_sums' memory is free
    }
    if (to.counts)
        norm_fp8_add_counts(to.counts, count);
    if (takes_amax)
        amax_merge_warp(&to.scale->amax, largest);
    __syncthreads();
    if (to.columns.codes)
        norm_fp8_write_columns<THREADS>(to.columns.codes, codes, first, N, C);
}
// Enqueues the two kernels for rows of up to THREADS PACKS packs.
template <int THREADS, int PACKS>
static void norm_fp8_launch(struct fp8_cast to, const struct norm_forward_arrays &a, int64_t N, int C,
                            struct norm_options options, float scale, struct dropout dropout, struct device *dev) {
    const int most_bytes = NORM_FP8_SUMS_BYTES + norm_fp8_rows(THREADS) * norm_fp8_pitch(THREADS * PACKS * PACK);
    static const cudaError_t prepared = cudaFuncSetAttribute((const void *)norm_fp8_kernel<THREADS, PACKS>,
                                                             cudaFuncAttributeMaxDynamicSharedMemorySize, most_bytes);
    const unsigned rows = blocks_for(N, norm_fp8_threads(THREADS) / THREADS), amax_blocks = 2 * GPU_SMS;
    struct norm_forward_arrays unwritten = a; // for the amax, before delta is overwritten
    unwritten.sum = NULL;
    unwritten.mean = unwritten.rstd = NULL;
    cuda_check(prepared);
    LAUNCH(dev, (norm_amax_kernel<THREADS, PACKS>), rows < amax_blocks ? rows : amax_blocks, norm_fp8_threads(THREADS),
           NORM_FP8_SUMS_BYTES, to.scale, unwritten, N, C, options, scale, dropout);
    LAUNCH(dev, (norm_fp8_kernel<THREADS, PACKS>), blocks_for(N, norm_fp8_rows(THREADS)), norm_fp8_threads(THREADS),
           NORM_FP8_SUMS_BYTES + (size_t)(norm_fp8_rows(THREADS) * norm_fp8_pitch(C)), to, fp8_cast_format(&to), a, N,
           C, options, scale, dropout);
}
void norm_forward_fp8(struct fp8_cast to, floatX *sum, float *mean, float *rstd, const floatX *x, const floatX *delta,
                      const floatX *weight, const floatX *bias, int64_t N, int C, struct norm_options options,
                      float scale, struct dropout dropout, void *workspace, struct device *dev) {
    const struct norm_forward_arrays a = {sum, mean, rstd, x, delta, weight, bias};
    if (C > GPU_NORM_FP8_COLUMNS)
        norm_then_cast(to, (floatX *)workspace, sum, mean, rstd, x, delta, weight, bias, N, C, options, scale, dropout,
                       dev);
    else if (C <= 2 * 32 * PACK)
        norm_fp8_launch<32, 2>(to, a, N, C, options, scale, dropout, dev);
    else if (C <= 4 * 32 * PACK)
        norm_fp8_launch<32, 4>(to, a, N, C, options, scale, dropout, dev);
    else if (C <= 8 * 32 * PACK)
        norm_fp8_launch<32, 8>(to, a, N, C, options, scale, dropout, dev);
    else
        norm_fp8_launch<NORM_THREADS, 2>(to, a, N, C, options, scale, dropout, dev);
}

#else

void norm_forward_fp8(struct fp8_cast to, floatX *sum, float *mean, float *rstd, const floatX *x, const floatX *delta,
                      const floatX *weight, const floatX *bias, int64_t N, int C, struct norm_options options,
                      float scale, struct dropout dropout, void *workspace, struct device *dev) {
    norm_then_cast(to, (floatX *)workspace, sum, mean, rstd, x, delta, weight, bias, N, C, options, scale, dropout,
                   dev);
}

#endif
