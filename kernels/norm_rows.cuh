// The rows of a norm, for norm.cu and qk_norm.cu: on the cuda target loads and sums of a row by a warp or a block, and
// on each target the sums over runs of rows that make up a weight's gradient.
#pragma once
#include "kernels/device.cuh"    // floatX
#include "kernels/norm_kind.cuh" // norm_weight_offset
#ifdef TARGET_CUDA
#include "kernels/packed.cuh"        // packed_load, packed_load_some
#include "kernels/packed_floats.cuh" // packed_to_floats
#include "kernels/reduce.cuh"        // lanes_sum

// A row is the work of a warp where a lane's share fits its registers, else of a block; in qk_norm.cu also of part of a
// warp. Each of the THREADS threads has every THREADS-th pack (16 bytes) of the row: PACKS of them, held in registers,
// or, with PACKS = 0, any number at any alignment, read again in each pass. Only C and alignments decide.
enum { NORM_THREADS = 256 };

// Calls f(j, c) for each of this thread's packs: j is its number, 0 where PACKS = 0, and c its first column.
template <int THREADS, int PACKS, class F> DEVICE_FUNCTION void row_packs(int C, F f) {
    const int thread = threadIdx.x % THREADS;
    if (PACKS > 0) {
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            const int c = (j * THREADS + thread) * PACK;
            if (c < C)
                f(j, c);
        }
    } else
        for (int c = thread * PACK; c < C; c += THREADS * PACK)
            f(0, c);
}
// Loads the pack at column c of C: in one aligned access, or with PACKS = 0 at any alignment, 0 past the row's end.
template <int PACKS> DEVICE_FUNCTION struct packed row_load(const floatX *row, int c, int C) {
    return PACKS > 0 ? packed_load(row + c) : packed_load_some(row + c, C - c);
}
template <int PACKS> DEVICE_FUNCTION void row_store(floatX *row, const struct packed &value, int c, int C) {
    if (PACKS > 0)
        packed_store(row + c, value);
    else
        packed_store_some(row + c, value, C - c);
}

// Returns pack j of the row, at column c, in fp32: from `held` or, with PACKS = 0, from memory again.
template <int PACKS>
DEVICE_FUNCTION struct packed_floats row_pack(const struct packed *held, const floatX *row, int j, int c, int C) {
    return packed_to_floats(PACKS > 0 ? held[j] : row_load<PACKS>(row, c, C));
}

// Returns the sum of a pack's squares.
DEVICE_FUNCTION float pack_squares(const struct packed_floats &v) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < PACK; i++)
        sum = fmaf(v.x[i], v.x[i], sum);
    return sum;
}

// Replaces each x[k] by its sum over the row's threads. All lanes of the warp call or, for THREADS > 32, all threads of
// the block: by shared slots `slot` to slot + COUNT - 1 of THREADS / 32 floats, free after a barrier.
template <int THREADS, int COUNT> DEVICE_FUNCTION void row_sums(float (&x)[COUNT], int slot) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t shared = shared_memory() + (uint32_t)(slot * (THREADS / 32) * 4);
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        x[k] = lanes_sum(x[k], THREADS < 32 ? THREADS : 32);
        if (THREADS > 32 && lane == 0)
            store_shared_float(shared + 4 * (uint32_t)(k * (THREADS / 32) + warp), x[k]);
    }
    if (THREADS <= 32)
        return;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        x[k] = lanes_sum(
            lane < THREADS / 32 ? load_shared_float(shared + 4 * (uint32_t)(k * (THREADS / 32) + lane)) : 0, 32);
}

// Returns the weights (C) of the pack at column c, each plus `offset` (norm_weight_offset), in fp32; `offset` past C.
template <int PACKS> DEVICE_FUNCTION struct packed_floats row_weight(const floatX *weight, float offset, int c, int C) {
    struct packed_floats w = packed_to_floats(row_load<PACKS>(weight, c, C));
#pragma unroll
    for (int i = 0; i < PACK; i++)
        w.x[i] += offset;
    return w;
}

// Whether rows of C elements of all arrays (count) are whole, aligned packs. A NULL array counts as aligned.
static inline bool norm_rows_whole(int C, const void *const *arrays, int count) {
    bool whole = C % PACK == 0;
    for (int i = 0; i < count; i++)
        whole = whole && (uintptr_t)arrays[i] % 16 == 0;
    return whole;
}

// to[c] = the sum of column c over the block's groups of THREADS threads, in order, c < count. Each group has the same
// THREADS * PACK columns, a thread a pack. All threads call. Needs NORM_THREADS * PACK floats of shared memory.
template <int THREADS> DEVICE_FUNCTION void norm_groups_reduce(float *to, int count, const struct packed_floats &sums) {
    __syncthreads(); // the last call's sums have been read
    floats_store_shared(shared_memory() + threadIdx.x * (PACK * 4), sums);
    __syncthreads();
    for (int c = threadIdx.x; c < THREADS * PACK && c < count; c += NORM_THREADS) {
        float sum = 0;
        for (int group = 0; group < NORM_THREADS / THREADS; group++)
            sum += load_shared_float(shared_memory() + 4 * (uint32_t)(group * THREADS * PACK + c));
        to[c] = sum;
    }
}

enum { NORM_REDUCE_THREADS = 1024 };
// a (a_count) and b (b_count) = the sums of `sums` (runs, a_count + b_count) over the runs, or += them where `add`. a
// or b may be NULL. A warp adds every 32nd run of 32 columns; warp 0 adds up the warps' sums, a shared float a thread.
static __global__ void __launch_bounds__(NORM_REDUCE_THREADS)
    norm_reduce_kernel(float *a, int a_count, float *b, int b_count, const float *sums, int64_t runs, bool add) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t k = (int64_t)blockIdx.x * 32 + lane, columns = (int64_t)a_count + b_count;
    float sum = 0;
    if (k < columns) {
#pragma unroll 8
        for (int64_t run = warp; run < runs; run += NORM_REDUCE_THREADS / 32)
            sum += sums[run * columns + k];
    }
    store_shared_float(shared_memory() + 4 * threadIdx.x, sum);
    __syncthreads();
    if (warp != 0 || k >= columns)
        return;
    sum = 0;
    for (int i = 0; i < NORM_REDUCE_THREADS / 32; i++)
        sum += load_shared_float(shared_memory() + 4 * (uint32_t)(i * 32 + lane));
    float *of = k < a_count ? a : b;
    float *to = k < a_count ? of + k : of + (k - a_count);
    if (of != NULL)
        *to = add ? *to + sum : sum;
}

#else
#include "kernels/vectors_floatx.cuh" // ALWAYS_INLINE

// Rows that are taken at a time. Sums are chains of dependent additions: four rows' take no longer than one's. The
// hardware's prefetchers do not follow such short turns: the loops prefetch the next rows.
enum { NORM_ROWS = 4 };
#define EACH_ROW _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++)

// The rows are cut into at most NORM_BACKWARD_RUNS runs. Each run's sums for dweight and dbias lie in the workspace and
// are added in the order of the runs, so that the result doesn't depend on the number of threads.
enum { NORM_BACKWARD_RUNS = 128 };

static inline int64_t norm_backward_cpu_runs(int64_t N) {
    return N < NORM_BACKWARD_RUNS ? N : (int64_t)NORM_BACKWARD_RUNS;
}

// Columns of a cache line: a run's row of sums is padded to whole lines, and so to whole vectors.
enum { NORM_SUM_COLUMNS = 16 };

static inline int64_t norm_padded_columns(int C) {
    return (C + (int64_t)NORM_SUM_COLUMNS - 1) / NORM_SUM_COLUMNS * NORM_SUM_COLUMNS;
}

// to[c] = the runs' sum of column c, c < count, or += it where `add`. Reads `lines` cache lines, 1 or 2, of each run.
ALWAYS_INLINE void norm_add_lines(float *to, const float *sums, int64_t runs, int64_t stride, int count, bool add,
                                  const int lines) {
    float total[2 * NORM_SUM_COLUMNS] = {0};
    for (int64_t run = 0; run < runs; run++) {
#pragma omp simd
        for (int c = 0; c < lines * NORM_SUM_COLUMNS; c++)
            total[c] += sums[run * stride + c];
    }
    for (int c = 0; c < count; c++)
        to[c] = add ? to[c] + total[c] : total[c];
}

// to (C) = the runs' sums of columns, or += them where `add`. Does nothing where `to` is NULL. Runs begin `stride`
// floats apart, a multiple of NORM_SUM_COLUMNS. Two cache lines of a run are read at a time, as runs lie far apart.
static void norm_add_runs(float *to, const float *sums, int64_t runs, int64_t stride, int C, bool add) {
    if (to == NULL)
        return;
#pragma omp parallel for schedule(static)
    for (int64_t begin = 0; begin < C; begin += 2 * NORM_SUM_COLUMNS) {
        const int count = C - begin < 2 * NORM_SUM_COLUMNS ? (int)(C - begin) : 2 * (int)NORM_SUM_COLUMNS;
        if (count > NORM_SUM_COLUMNS)
            norm_add_lines(to + begin, sums + begin, runs, stride, count, add, 2);
        else
            norm_add_lines(to + begin, sums + begin, runs, stride, count, add, 1);
    }
}

#endif
