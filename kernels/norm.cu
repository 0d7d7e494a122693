#include "kernels/norm.cuh"
#include "kernels/amax.cuh"          // amax_with_packed, amax_merge_block
#include "kernels/column_sums.cuh"   // column_sums_add_pack
#include "kernels/device_memory.cuh" // device_copy
#include "kernels/gpu_sizes.cuh"     // gpu_norm_backward_num_runs, gpu_residual_backward_num_runs
#include "kernels/norm_forward.cuh"  // norm_forward_row
#include "kernels/norm_rows.cuh"     // row_packs, row_sums, norm_groups_reduce, norm_reduce_kernel
#include "kernels/packed.cuh"        // packed_load, packed_load_if, packed_store_some
#include "kernels/packed_floats.cuh" // packed_to_floats, dropout_scales_packed
#include "kernels/reduce.cuh"        // lanes_sum
#include <math.h>                    // sqrtf

#ifdef TARGET_CUDA
static_assert((int)GPU_PACK == (int)PACK, "what plans of memory count with");
template <int THREADS, int PACKS, bool AMAX>
static __global__ void __launch_bounds__(NORM_THREADS)
    norm_forward_kernel(floatX *out, const struct norm_forward_arrays a, int64_t N, int C, struct norm_options options,
                        float scale, struct dropout dropout) {
    const int64_t n = (int64_t)blockIdx.x * (NORM_THREADS / THREADS) + threadIdx.x / THREADS;
    uint32_t largest = 0;
    if (n < N) {
        norm_forward_row<THREADS, PACKS>(a, n, C, options, scale, dropout, out != NULL,
                                         [&](int c, const struct packed &value) {
                                             row_store<PACKS>(out + n * C, value, c, C);
                                             if (AMAX && PACKS > 0)
                                                 largest = amax_with_packed(largest, value);
                                         });
        if (AMAX && PACKS == 0) // in a loop of its own: in the row's, registers would be spilled
            row_packs<THREADS, PACKS>(C, [&](int j, int c) {
                largest = amax_with_packed(largest, row_load<PACKS>(out + n * C, c, C)); // 0 past the row's end
            });
    }
    if (AMAX)
        amax_merge_block(options.amax, largest, shared_memory() + NORM_FORWARD_PLACES * (NORM_THREADS / 32) * 4);
}

static void norm_forward_launch(floatX *sum, floatX *out, float *mean, float *rstd, const floatX *x,
                                const floatX *delta, const floatX *weight, const floatX *bias, int64_t N, int C,
                                struct norm_options options, float scale, struct dropout dropout, struct device *dev) {
    const void *arrays[] = {sum, out, x, delta, weight, bias};
    const struct norm_forward_arrays a = {sum, mean, rstd, x, delta, weight, bias};
    const bool whole = norm_rows_whole(C, arrays, 6), amax = out != NULL && options.amax != NULL;
    const size_t shared_bytes = NORM_FORWARD_PLACES * NORM_THREADS / 32 * sizeof(float) + (amax ? AMAX_BLOCK_BYTES : 0);
#define NORM_FORWARD(threads, packs)                                                                                   \
    LAUNCH(dev, (amax ? norm_forward_kernel<threads, packs, true> : norm_forward_kernel<threads, packs, false>),       \
           blocks_for(N, NORM_THREADS / threads), NORM_THREADS, shared_bytes, out, a, N, C, options, scale, dropout)
    if (!whole || C > 8 * NORM_THREADS * PACK)
        NORM_FORWARD(NORM_THREADS, 0);
    else if (C <= 2 * 32 * PACK)
        NORM_FORWARD(32, 2);
    else if (C <= 4 * 32 * PACK)
        NORM_FORWARD(32, 4);
    else if (C <= 8 * 32 * PACK)
        NORM_FORWARD(32, 8);
    else if (C <= 2 * NORM_THREADS * PACK)
        NORM_FORWARD(NORM_THREADS, 2);
    else if (C <= 4 * NORM_THREADS * PACK)
        NORM_FORWARD(NORM_THREADS, 4);
    else
        NORM_FORWARD(NORM_THREADS, 8);
#undef NORM_FORWARD
}

void norm_forward(floatX *out, float *mean, float *rstd, const floatX *x, const floatX *weight, const floatX *bias,
                  int64_t N, int C, struct norm_options options, struct device *dev) {
    const struct dropout none = {0};
    norm_forward_launch(NULL, out, mean, rstd, x, NULL, weight, bias, N, C, options, 1, none, dev);
}

void residual_norm_forward(floatX *sum, floatX *out, float *mean, float *rstd, const floatX *x, const floatX *delta,
                           const floatX *weight, const floatX *bias, int64_t N, int C, struct norm_options options,
                           float scale, struct dropout dropout, struct device *dev) {
    norm_forward_launch(sum, out, mean, rstd, x, delta, weight, bias, N, C, options, scale, dropout, dev);
}

int64_t norm_backward_num_runs(int64_t N, int C, const struct device *dev) { return gpu_norm_backward_num_runs(N, C); }
size_t norm_backward_workspace_bytes(int64_t N, int C, const struct device *dev) {
    return gpu_norm_backward_bytes(N, C);
}

enum { NORM_BACKWARD_PLACES = 6 };

// Returns where in shared memory this thread's sums of dx's columns of pack j lie: after norm_groups_reduce's floats,
// in fours NORM_THREADS * 16 bytes apart, so that a warp accesses neighboring 16 bytes. The sums are here only where a
// row is a warp's: in registers they would leave room for one block, not two. Where a row is a block's they are in
// registers, `held`. Where rows have any length (PACKS 0) they are in dx_partial, in the run's row.
DEVICE_FUNCTION uint32_t norm_dx_sums_shared(int j) {
    return shared_memory() + (NORM_THREADS * PACK + j * NORM_THREADS * PACK + threadIdx.x * 4) * 4;
}
// Loads this thread's sums of pack j, at column c, from `held`, run (C) or shared memory, as norm_dx_sums_shared says.
template <int THREADS, int PACKS>
DEVICE_FUNCTION struct packed_floats norm_dx_sums_load(const struct packed_floats *held, const float *run, int j, int c,
                                                       int C) {
    if (PACKS == 0)
        return floats_load_some(run + c, C - c);
    return THREADS > 32 ? held[j] : floats_load_shared(norm_dx_sums_shared(j), NORM_THREADS * 16);
}
template <int THREADS, int PACKS>
DEVICE_FUNCTION void norm_dx_sums_store(struct packed_floats *held, float *run, const struct packed_floats &sums, int j,
                                        int c, int C) {
    if (PACKS == 0)
        floats_store_some(run + c, sums, C - c);
    else if (THREADS > 32)
        held[j] = sums;
    else
        floats_store_shared(norm_dx_sums_shared(j), sums, NORM_THREADS * 16);
}

// Where a row is a block's, the next row's packs are under way to shared memory while the block computes a row: without
// them 4 blocks an SM would have too little in flight, as their threads wait for each other.
enum { NORM_STAGES = 2, NORM_STAGED_ARRAYS = 3 }; // x, dout, residual
template <int THREADS, int PACKS> HOST_DEVICE constexpr bool norm_is_staged() { return THREADS > 32 && PACKS > 0; }
// The number of bytes of shared memory before the staged rows.
template <int THREADS> HOST_DEVICE constexpr int norm_backward_shared() {
    return NORM_BACKWARD_PLACES * (THREADS / 32) * (int)sizeof(float) + AMAX_BLOCK_BYTES;
}
// Returns where in shared memory this thread's pack j of a staged row's array `which` is.
template <int THREADS, int PACKS> DEVICE_FUNCTION uint32_t norm_staged(int stage, int which, int j) {
    return shared_memory() + norm_backward_shared<THREADS>() +
           (uint32_t)(((stage * NORM_STAGED_ARRAYS + which) * PACKS + j) * THREADS + (int)threadIdx.x) * 16;
}
// Begins to copy this thread's packs of row n of each array (N, C), if n < end, and closes the group. residual: or NULL.
template <int THREADS, int PACKS>
DEVICE_FUNCTION void norm_stage(int stage, const floatX *x, const floatX *dout, const floatX *residual, int64_t n,
                                int64_t end, int C) {
    if (n < end)
        row_packs<THREADS, PACKS>(C, [&](int j, int c) {
            cp_async_16(norm_staged<THREADS, PACKS>(stage, 0, j), x + n * C + c, true);
            cp_async_16(norm_staged<THREADS, PACKS>(stage, 1, j), dout + n * C + c, true);
            if (residual != NULL)
                cp_async_16(norm_staged<THREADS, PACKS>(stage, 2, j), residual + n * C + c, true);
        });
    cp_async_commit();
}
// Loads a pack from shared memory or, unless `valid`, returns zeros.
DEVICE_FUNCTION struct packed packed_load_shared(uint32_t from, bool valid) {
    struct packed result = {};
    if (valid) {
        const struct word_x4 words = load_shared_words(from);
        memcpy(&result, &words, sizeof result);
    }
    return result;
}

// Does norm_backward, leaving each run's dweight and dbias in sums (runs, 2, C). A block takes a run, an SM 16 warps.
template <int THREADS, int PACKS, bool AMAX, bool PARTIAL>
static __global__ void __launch_bounds__(THREADS == 32 ? NORM_THREADS : THREADS,
                                         512 / (THREADS == 32 ? NORM_THREADS : THREADS))
    norm_backward_kernel(float *sums, floatX *dx, float *dx_partial, const floatX *residual, const floatX *dout,
                         const floatX *x, const floatX *weight, const float *mean, const float *rstd, int64_t N, int C,
                         struct norm_options options) {
    const float offset = norm_weight_offset(options.one_plus);
    enum { HELD = PACKS > 0 ? PACKS : 1, ROWS = THREADS == 32 ? NORM_THREADS / 32 : 1 };
    float *dweight = sums + (int64_t)blockIdx.x * 2 * C, *dbias = dweight + C; // of this run
    float *dx_run = PARTIAL ? dx_partial + (int64_t)blockIdx.x * C : NULL;
    struct packed_floats dweight_sum[HELD], dbias_sum[HELD], dx_sum[HELD];
    memset(dweight_sum, 0, sizeof dweight_sum);
    memset(dbias_sum, 0, sizeof dbias_sum);
    if (PARTIAL)
        row_packs<THREADS, PACKS>(
            C, [&](int j, int c) { norm_dx_sums_store<THREADS, PACKS>(dx_sum, dx_run, dbias_sum[0], j, c, C); });
    if (PACKS == 0)
        row_packs<THREADS, PACKS>(C, [&](int j, int c) {
            floats_store_some(dweight + c, dweight_sum[0], C - c);
            floats_store_some(dbias + c, dbias_sum[0], C - c);
        });

    const int64_t end = (blockIdx.x + 1) * N / gridDim.x;
    uint32_t largest = 0; // magnitude of this thread's part of dx
    int turn = 0;         // the row's sums are exchanged in the first or second set of slots, by turns
    int64_t n = blockIdx.x * N / gridDim.x + threadIdx.x / THREADS;
    if (norm_is_staged<THREADS, PACKS>())
        norm_stage<THREADS, PACKS>(turn, x, dout, residual, n, end, C);
    for (; n < end; n += ROWS, turn ^= 1) {
        const floatX *x_row = x + n * C, *dout_row = dout + n * C;
        const floatX *residual_row = residual + n * C;
        const float row_mean = options.kind == NORM_LAYERNORM ? mean[n] : 0, row_rstd = rstd[n];
        struct packed x_held[HELD], dout_held[HELD], residual_held[HELD];
        if (norm_is_staged<THREADS, PACKS>()) {
            norm_stage<THREADS, PACKS>(turn ^ 1, x, dout, residual, n + ROWS, end, C);
            cp_async_wait<1>();
            row_packs<THREADS, PACKS>(C, [&](int j, int c) {
                x_held[j] = packed_load_shared(norm_staged<THREADS, PACKS>(turn, 0, j), true);
                dout_held[j] = packed_load_shared(norm_staged<THREADS, PACKS>(turn, 1, j), true);
                residual_held[j] = packed_load_shared(norm_staged<THREADS, PACKS>(turn, 2, j), residual != NULL);
            });
        } else if (PACKS > 0)
            row_packs<THREADS, PACKS>(C, [&](int j, int c) {
                x_held[j] = row_load<PACKS>(x_row, c, C);
                dout_held[j] = row_load<PACKS>(dout_row, c, C);
                residual_held[j] = packed_load_if(residual_row + c, residual != NULL);
            });
        float means[3] = {0, 0, 0}; // of g, g y, y
        row_packs<THREADS, PACKS>(C, [&](int j, int c) {
            const struct packed_floats v = row_pack<PACKS>(x_held, x_row, j, c, C);
            const struct packed_floats d = row_pack<PACKS>(dout_held, dout_row, j, c, C);
            const struct packed_floats w = row_weight<PACKS>(weight, offset, c, C);
            float part[3] = {0, 0, 0};
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                const float g = d.x[i] * w.x[i], y = PACKS > 0 || c + i < C ? (v.x[i] - row_mean) * row_rstd : 0;
                part[0] += g;
                part[1] = fmaf(g, y, part[1]);
                part[2] += y;
            }
#pragma unroll
            for (int k = 0; k < 3; k++)
                means[k] += part[k];
        });
        row_sums<THREADS>(means, 3 * turn);
        const float y_mean =
            options.kind == NORM_LAYERNORM ? means[2] / (float)C : 0; // 0 but for the rounding of `mean`
        const float g_mean = options.kind == NORM_LAYERNORM ? means[0] / (float)C : 0;
        const float gy_mean = means[1] / (float)C - g_mean * y_mean;
        row_packs<THREADS, PACKS>(C, [&](int j, int c) {
            const struct packed_floats v = row_pack<PACKS>(x_held, x_row, j, c, C);
            const struct packed_floats d = row_pack<PACKS>(dout_held, dout_row, j, c, C);
            const struct packed_floats w = row_weight<PACKS>(weight, offset, c, C);
            if (PACKS == 0)
                residual_held[0] = packed_load_some(residual_row + c, residual != NULL ? C - c : 0);
            struct packed_floats to = packed_to_floats(residual_held[j]);
            if (PACKS == 0) {
                dweight_sum[0] = floats_load_some(dweight + c, C - c);
                dbias_sum[0] = floats_load_some(dbias + c, C - c);
            }
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                const float y = (v.x[i] - row_mean) * row_rstd - y_mean;
                dweight_sum[j].x[i] = fmaf(d.x[i], y, dweight_sum[j].x[i]);
                dbias_sum[j].x[i] += d.x[i];
                to.x[i] += row_rstd * (d.x[i] * w.x[i] - g_mean - y * gy_mean);
            }
            const struct packed value = packed_from_floats(to);
            row_store<PACKS>(dx + n * C, value, c, C);
            if (PARTIAL) {
                struct packed_floats total = norm_dx_sums_load<THREADS, PACKS>(dx_sum, dx_run, j, c, C);
                const struct packed_floats stored = packed_to_floats(value);
#pragma unroll
                for (int i = 0; i < PACK; i++)
                    total.x[i] += stored.x[i];
                norm_dx_sums_store<THREADS, PACKS>(dx_sum, dx_run, total, j, c, C);
            }
            if (AMAX)
                largest = amax_with_packed(largest, value, PACKS > 0 ? PACK : C - c);
            if (PACKS == 0) {
                floats_store_some(dweight + c, dweight_sum[0], C - c);
                floats_store_some(dbias + c, dbias_sum[0], C - c);
            }
        });
    }
    if (AMAX)
        amax_merge_block(options.amax, largest, shared_memory() + NORM_BACKWARD_PLACES * (THREADS / 32) * 4);
    if (PACKS > 0 && THREADS == 32) {
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            const int c = j * 32 * PACK;
            norm_groups_reduce<32>(dweight + c, C - c, dweight_sum[j]);
            norm_groups_reduce<32>(dbias + c, C - c, dbias_sum[j]);
            if (PARTIAL)
                norm_groups_reduce<32>(dx_run + c, C - c, norm_dx_sums_load<THREADS, PACKS>(dx_sum, dx_run, j, c, C));
        }
    } else if (PACKS > 0)
        row_packs<THREADS, PACKS>(C, [&](int j, int c) {
            floats_store(dweight + c, dweight_sum[j]);
            floats_store(dbias + c, dbias_sum[j]);
            if (PARTIAL)
                floats_store(dx_run + c, dx_sum[j]);
        });
}

// Asks CUDA to allow a kernel's launches `bytes` of shared memory, which is needed for more than 48 KB.
static void norm_allow_shared(const void *kernel, int bytes) {
    if (bytes > 48 * 1024)
        cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}
void norm_backward(floatX *dx, float *dx_partial, float *dweight, float *dbias, const floatX *residual,
                   const floatX *dout, const floatX *x, const floatX *weight, const float *mean, const float *rstd,
                   int64_t N, int C, bool add, struct norm_options options, void *workspace, struct device *dev) {
    float *sums = (float *)workspace; // (runs, 2, C)
    const void *arrays[] = {dx, dx_partial, residual, dout, x, weight, workspace};
    const bool whole = norm_rows_whole(C, arrays, 7);
    const int threads = norm_backward_row_threads(C);
    const int64_t runs = gpu_norm_backward_num_runs(N, C);
    const bool amax = options.amax != NULL, partial = dx_partial != NULL;
#define NORM_BACKWARD_KERNEL(row_threads, packs)                                                                       \
    (amax ? (partial ? norm_backward_kernel<row_threads, packs, true, true>                                            \
                     : norm_backward_kernel<row_threads, packs, true, false>)                                          \
          : (partial ? norm_backward_kernel<row_threads, packs, false, true>                                           \
                     : norm_backward_kernel<row_threads, packs, false, false>))
#define NORM_BACKWARD(row_threads, block_threads, packs, shared_bytes)                                                 \
    do {                                                                                                               \
        norm_allow_shared((const void *)NORM_BACKWARD_KERNEL(row_threads, packs), shared_bytes);                       \
        LAUNCH(dev, NORM_BACKWARD_KERNEL(row_threads, packs), (unsigned)runs, block_threads, shared_bytes, sums, dx,   \
               dx_partial, residual, dout, x, weight, mean, rstd, N, C, options);                                      \
    } while (0)
#define NORM_BACKWARD_STAGED(threads)                                                                                  \
    NORM_BACKWARD(threads, threads, NORM_BACKWARD_PACKS,                                                               \
                  norm_backward_shared<threads>() +                                                                    \
                      NORM_STAGES * NORM_STAGED_ARRAYS * NORM_BACKWARD_PACKS * threads * (int)sizeof(struct packed))
    if (!whole || C > NORM_BACKWARD_PACKS * threads * PACK * (threads == 32 ? 2 : 1))
        NORM_BACKWARD(NORM_THREADS, NORM_THREADS, 0, norm_backward_shared<NORM_THREADS>());
    else if (threads == 32)
        NORM_BACKWARD(32, NORM_THREADS, NORM_BACKWARD_WARP_PACKS,
                      NORM_THREADS * PACK * (partial ? 1 + NORM_BACKWARD_WARP_PACKS : 1) * (int)sizeof(float) +
                          AMAX_BLOCK_BYTES);
    else if (threads == 128)
        NORM_BACKWARD_STAGED(128);
    else if (threads == 256)
        NORM_BACKWARD_STAGED(256);
    else
        NORM_BACKWARD_STAGED(512);
#undef NORM_BACKWARD_STAGED
#undef NORM_BACKWARD
#undef NORM_BACKWARD_KERNEL
    if (dweight == NULL && dbias == NULL)
        return;
    LAUNCH(dev, norm_reduce_kernel, blocks_for((dbias != NULL ? 2 : 1) * (int64_t)C, 32), NORM_REDUCE_THREADS,
           NORM_REDUCE_THREADS * sizeof(float), dweight, C, dbias, C, (const float *)sums, runs, add);
}

static __global__ void residual_forward_kernel(floatX *sum, const floatX *x, const floatX *delta, int64_t n,
                                               float scale, struct dropout dropout) {
    const int64_t at = ((int64_t)blockIdx.x * NORM_THREADS + threadIdx.x) * PACK;
    if (at >= n)
        return;
    const struct packed_floats a = packed_to_floats(packed_load_some(x + at, n - at));
    const struct packed_floats b = packed_to_floats(packed_load_some(delta + at, n - at));
    packed_store_some(sum + at, residual_pack(a, b, scale, dropout, at), n - at);
}
void residual_forward(floatX *sum, const floatX *x, const floatX *delta, int64_t N, int C, float scale,
                      struct dropout dropout, struct device *dev) {
    LAUNCH(dev, residual_forward_kernel, blocks_for(N * C, NORM_THREADS * PACK), NORM_THREADS, 0, sum, x, delta, N * C,
           scale, dropout);
}

// Returns d times `scale` and the dropout scales, rounded; the pack's first element is number `element` of the mask.
DEVICE_FUNCTION struct packed residual_backward_pack(struct packed_floats d, float scale, const struct dropout &dropout,
                                                     int64_t element) {
    if (dropout.p == 0) {
#pragma unroll
        for (int i = 0; i < PACK; i++)
            d.x[i] *= scale;
    } else {
        const struct packed_floats kept = dropout_scales_packed(dropout, (uint64_t)element);
#pragma unroll
        for (int i = 0; i < PACK; i++)
            d.x[i] *= scale * kept.x[i];
    }
    return packed_from_floats(d);
}
static __global__ void residual_backward_kernel(floatX *ddelta, const floatX *dout, int64_t n, float scale,
                                                struct dropout dropout) {
    const int64_t at = ((int64_t)blockIdx.x * NORM_THREADS + threadIdx.x) * PACK;
    if (at >= n)
        return;
    const struct packed_floats d = packed_to_floats(packed_load_some(dout + at, n - at));
    packed_store_some(ddelta + at, residual_backward_pack(d, scale, dropout, at), n - at);
}

int64_t residual_backward_num_runs(int64_t N, int C, const struct device *dev) {
    return gpu_residual_backward_num_runs(N, C);
}
// Does residual_backward with sums of columns: a block takes 32 packs of columns of a run, a warp every 8th row.
static __global__ void __launch_bounds__(NORM_THREADS)
    residual_backward_columns_kernel(floatX *ddelta, float *partial, const floatX *dout, int64_t N, int C, float scale,
                                     struct dropout dropout) {
    enum { WARPS = NORM_THREADS / 32, ROWS = 4 }; // rows of which a thread has loads under way
    const int first = (int)blockIdx.x * 32 * PACK, c = first + (int)(threadIdx.x % 32) * PACK;
    const int64_t end = (blockIdx.y + 1) * N / gridDim.y;
    struct packed_floats sums = {};
    if (c < C) {
        for (int64_t n = blockIdx.y * N / gridDim.y + threadIdx.x / 32; n < end; n += ROWS * WARPS) {
            struct packed d[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                d[r] = packed_load_some(dout + (n + r * WARPS) * C + c, n + r * WARPS < end ? C - c : 0);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const int64_t at = (n + r * WARPS) * C + c;
                if (n + r * WARPS >= end)
                    break;
                const struct packed value = residual_backward_pack(packed_to_floats(d[r]), scale, dropout, at);
                packed_store_some(ddelta + at, value, C - c);
                column_sums_add_pack(&sums, value);
            }
        }
    }
    norm_groups_reduce<32>(partial + (int64_t)blockIdx.y * C + first, C - first, sums);
}

void residual_backward(floatX *ddelta, float *partial, const floatX *dout, int64_t N, int C, float scale,
                       struct dropout dropout, struct device *dev) {
    if (partial != NULL)
        LAUNCH(dev, residual_backward_columns_kernel,
               dim3((unsigned)residual_backward_column_blocks(C), (unsigned)gpu_residual_backward_num_runs(N, C)),
               NORM_THREADS, NORM_THREADS * PACK * sizeof(float), ddelta, partial, dout, N, C, scale, dropout);
    else if (dropout.p != 0 || scale != 1)
        LAUNCH(dev, residual_backward_kernel, blocks_for(N * C, NORM_THREADS * PACK), NORM_THREADS, 0, ddelta, dout,
               N * C, scale, dropout);
    else if (ddelta != dout)
        device_copy(ddelta, dout, (size_t)(N * C) * sizeof *ddelta, dev);
}

#else
#include "kernels/norm_cpu.cuh" // the cpu target's definitions
#endif
