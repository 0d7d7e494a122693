#include "kernels/gradients.cuh"
#include "kernels/four.cuh"      // four_load, four_store, FLAT_THREADS
#include "kernels/gpu_sizes.cuh" // SQUARES_BLOCKS, gpu_squares_bytes
#include "kernels/reduce.cuh"    // block_sum_double
#include <assert.h>              // static_assert

#ifdef TARGET_CUDA

DEVICE_FUNCTION double square(float x) { return (double)x * (double)x; }
DEVICE_FUNCTION double square(bf16 x) { return square(bf16_to_float(x)); }
// sums[block] = the sum of squares of the part of x (n) that block number `block` takes. All threads of the block call,
// with BLOCK_SUM_BYTES of shared memory. All GPUs have SQUARES_BLOCKS blocks, and so the same bits.
template <class T> DEVICE_FUNCTION void squares_block(double *sums, const T *x, int64_t n, int block) {
    const int64_t first = (int64_t)block * FLAT_THREADS, thread = first + threadIdx.x;
    const int64_t before = (4 - (int64_t)((uintptr_t)x / sizeof *x % 4)) % 4; // elements before the first whole group
    const int64_t head = before < n ? before : n, groups = (n - head) / 4, tail = head + 4 * groups;
    if (block > 0 && first >= groups) { // a short range has nothing for its last blocks
        if (threadIdx.x == 0)
            sums[block] = 0;
        return;
    }
    double sum = 0;
#pragma unroll 4
    for (int64_t group = thread; group < groups; group += SQUARES_BLOCKS * FLAT_THREADS) {
        const four<T> y = four_load(x + head + 4 * group, 4);
        for (int i = 0; i < 4; i++)
            sum += square(y.x[i]);
    }
    if (thread < head)
        sum += square(x[thread]);
    if (thread < n - tail)
        sum += square(x[tail + thread]);
    sum = block_sum_double(sum, shared_memory());
    if (threadIdx.x == 0)
        sums[block] = sum;
}
template <class T> static __global__ void squares_kernel(double *sums, const T *x, int64_t n) {
    squares_block(sums, x, n, (int)blockIdx.x);
}
// Writes the partial sums of ranges[i], i >= first, to row i of sums (count, SQUARES_BLOCKS), one block for each sum.
template <class T>
static __global__ void squares_of_ranges_kernel(double *sums, const T *x, const struct gradient_range *ranges,
                                                int first) {
    const int i = first + (int)(blockIdx.x / SQUARES_BLOCKS);
    squares_block(sums + (int64_t)i * SQUARES_BLOCKS, x + ranges[i].at, ranges[i].n,
                  (int)(blockIdx.x % SQUARES_BLOCKS));
}
static __global__ void __launch_bounds__(SQUARES_BLOCKS)
    squares_total_kernel(double *total, const double *sums, bool add) { // one block, a thread a sum
    const double sum = block_sum_double(sums[threadIdx.x], shared_memory());
    if (threadIdx.x == 0)
        *total = add ? *total + sum : sum;
}
// Returns the sum of sums (SQUARES_BLOCKS), with block_sum_double's bits, by one warp, all of whose lanes call.
DEVICE_FUNCTION double squares_warp_total(const double *sums) {
    const int lane = threadIdx.x % 32;
    double mine = 0;
#pragma unroll 8
    for (int row = 0; row < SQUARES_BLOCKS / 32; row++) {
        const double sum = warp_sum_double(sums[32 * row + lane]);
        mine = row == lane ? sum : mine;
    }
    return warp_sum_double(mine);
}
static_assert(SQUARES_BLOCKS == 32 * 32, "a lane holds a row's sum");
// *total = the sum over the ranges, by one block. A warp puts a range's sum in place of its first partial sum.
static __global__ void __launch_bounds__(SQUARES_BLOCKS, 1)
    squares_ranges_total_kernel(double *total, double *sums, int count) {
    for (int i = threadIdx.x / 32; i < count; i += SQUARES_BLOCKS / 32) {
        const double sum = squares_warp_total(sums + (int64_t)i * SQUARES_BLOCKS);
        if (threadIdx.x % 32 == 0)
            sums[(int64_t)i * SQUARES_BLOCKS] = sum;
    }
    __syncthreads();
    if (threadIdx.x > 0)
        return;
    double sum = 0;
    for (int i = 0; i < count; i++)
        sum += sums[(int64_t)i * SQUARES_BLOCKS];
    *total = sum;
}
size_t squares_of_ranges_workspace_bytes(int count, const struct device *dev) { return gpu_squares_bytes(count); }
void squares_of_ranges(void *workspace, const void *x, enum state_format format, const struct gradient_range *ranges,
                       int first, int end, struct device *dev) {
    double *sums = (double *)workspace; // (count, SQUARES_BLOCKS)
    const unsigned grid = (unsigned)SQUARES_BLOCKS * (unsigned)(end - first);
    gradients_format_check(format);
    if (first < end && format == FORMAT_BF16)
        LAUNCH(dev, squares_of_ranges_kernel<bf16>, grid, FLAT_THREADS, BLOCK_SUM_BYTES, sums, (const bf16 *)x, ranges,
               first);
    else if (first < end)
        LAUNCH(dev, squares_of_ranges_kernel<float>, grid, FLAT_THREADS, BLOCK_SUM_BYTES, sums, (const float *)x,
               ranges, first);
}
void squares_total(double *total, int count, void *workspace, struct device *dev) {
    LAUNCH(dev, squares_ranges_total_kernel, 1, SQUARES_BLOCKS, 0, total, (double *)workspace, count);
}
size_t sum_of_squares_workspace_bytes(const struct device *dev) { return gpu_squares_bytes(1); }
void sum_of_squares(double *total, const void *x, enum state_format format, int64_t n, bool add, void *workspace,
                    struct device *dev) {
    double *sums = (double *)workspace; // (SQUARES_BLOCKS)
    gradients_format_check(format);
    if (format == FORMAT_BF16)
        LAUNCH(dev, squares_kernel<bf16>, SQUARES_BLOCKS, FLAT_THREADS, BLOCK_SUM_BYTES, sums, (const bf16 *)x, n);
    else
        LAUNCH(dev, squares_kernel<float>, SQUARES_BLOCKS, FLAT_THREADS, BLOCK_SUM_BYTES, sums, (const float *)x, n);
    LAUNCH(dev, squares_total_kernel, 1, SQUARES_BLOCKS, BLOCK_SUM_BYTES, total, sums, add);
}

// Adds `in` (n) to `store`, or overwrites `store` where `add` is false. Leaves the gaps between tensors as they are.
static __global__ void add_floats_kernel(float *store, const float *in, int64_t begin, int64_t n,
                                         struct flat_tensors tensors, bool add) {
    const int64_t at = ((int64_t)blockIdx.x * FLAT_THREADS + threadIdx.x) * 4;
    int count = n - at >= 4 ? 4 : n > at ? (int)(n - at) : 0;
    four<float> sum = four_load(in + at, count), before = {};
    if (add)
        before = four_load(store + at, count);
    const int row = flat_tensor_at_warp(tensors, begin + at / STATE_BLOCK * STATE_BLOCK);
    count = flat_tensor_clip_count(tensors.rows[row], begin + at, count);
    for (int i = 0; i < 4 && add; i++)
        sum.x[i] += before.x[i];
    four_store(store + at, sum, count);
}
static __global__ void add_bf16_kernel(bf16 *store, const float *in, int64_t begin, int64_t n,
                                       struct flat_tensors tensors, bool add, struct rounding r) {
    const int64_t at = ((int64_t)blockIdx.x * FLAT_THREADS + threadIdx.x) * 4;
    int count = n - at >= 4 ? 4 : n > at ? (int)(n - at) : 0;
    const four<float> more = four_load(in + at, count);
    four<bf16> sum = {};
    if (add)
        sum = four_load(store + at, count);
    const int row = flat_tensor_at_warp(tensors, begin + at / STATE_BLOCK * STATE_BLOCK);
    const struct flat_tensor tensor = tensors.rows[row];
    count = flat_tensor_clip_count(tensor, begin + at, count);
    const struct philox_words random = rounding_words(tensor_rounding(r, tensor, row, begin), at);
    for (int i = 0; i < 4; i++)
        sum.x[i] = bf16_stochastic(more.x[i] + (add ? bf16_to_float(sum.x[i]) : 0.0f), random.word[i] & 0xffffu);
    four_store(store + at, sum, count);
}
static_assert(STATE_BLOCK == 4 * 32, "a warp's elements are a block of one tensor");
void add_gradients(void *store, enum state_format format, const float *in, int64_t begin, int64_t n,
                   struct flat_tensors tensors, bool add, struct rounding r, struct device *dev) {
    const unsigned blocks = blocks_for(n, 4 * FLAT_THREADS);
    gradients_format_check(format);
    if (n > 0 && format == FORMAT_BF16)
        LAUNCH(dev, add_bf16_kernel, blocks, FLAT_THREADS, 0, (bf16 *)store, in, begin, n, tensors, add, r);
    else if (n > 0)
        LAUNCH(dev, add_floats_kernel, blocks, FLAT_THREADS, 0, (float *)store, in, begin, n, tensors, add);
}

static __global__ void gradient_check_kernel(struct gradient_check *check, const double *reports, int ranks, int width,
                                             int num_losses, double targets, double clip) { // one warp
    float broken = 0;
    for (int rank = 0; rank < ranks; rank++)
        for (int i = threadIdx.x; i < 2 * num_losses; i += 32)
            broken += isfinite(reports[rank * width + REPORT_LOSSES + i]) ? 0.0f : 1.0f;
    broken = lanes_sum(broken, 32);
    if (threadIdx.x == 0) {
        double squares = 0, counted = 0;
        for (int rank = 0; rank < ranks; rank++) {
            squares += reports[rank * width + REPORT_SQUARES];
            for (int i = 0; i < num_losses; i++)
                counted += reports[rank * width + REPORT_LOSSES + 2 * i + 1];
        }
        struct gradient_check result = gradient_check_of(squares, targets, counted, clip);
        result.finite = result.finite && broken == 0;
        *check = result;
    }
}
void gradient_check(struct gradient_check *check, const double *reports, int ranks, int width, int num_losses,
                    double targets, double clip, struct device *dev) {
    LAUNCH(dev, gradient_check_kernel, 1, 32, 0, check, reports, ranks, width, num_losses, targets, clip);
}

#else

enum { SUM_OF_SQUARES_RUNS = 256 };
size_t squares_of_ranges_workspace_bytes(int count, const struct device *dev) {
    return device_is_gpu(dev) ? gpu_squares_bytes(count) : (size_t)count * SUM_OF_SQUARES_RUNS * sizeof(double);
}
size_t sum_of_squares_workspace_bytes(const struct device *dev) { return squares_of_ranges_workspace_bytes(1, dev); }
static inline double squares_of_floats(const float *x, int64_t n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++)
        sum += (double)x[i] * (double)x[i];
    return sum;
}
static inline double squares_of_bf16(const bf16 *x, int64_t n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++)
        sum += (double)bf16_to_float(x[i]) * (double)bf16_to_float(x[i]);
    return sum;
}
// Returns the sum of squares of the `run`-th of SUM_OF_SQUARES_RUNS runs of x (n), equal but for the last, longer one.
static inline double squares_of_run(const void *x, enum state_format format, int64_t n, int run) {
    // n / RUNS first, as n * RUNS could overflow
    const int64_t begin = n / SUM_OF_SQUARES_RUNS * run;
    const int64_t end = run == SUM_OF_SQUARES_RUNS - 1 ? n : begin + n / SUM_OF_SQUARES_RUNS;
    return format == FORMAT_BF16 ? squares_of_bf16((const bf16 *)x + begin, end - begin)
                                 : squares_of_floats((const float *)x + begin, end - begin);
}
// Returns the total of sums (SUM_OF_SQUARES_RUNS), squares_of_run's results, in their order.
static inline double squares_runs_total(const double *sums) {
    double sum = 0;
    for (int run = 0; run < SUM_OF_SQUARES_RUNS; run++)
        sum += sums[run];
    return sum;
}
void sum_of_squares(double *total, const void *x, enum state_format format, int64_t n, bool add, void *workspace,
                    struct device *dev) {
    double *sums = (double *)workspace; // (runs)
    gradients_format_check(format);
#pragma omp parallel for schedule(static)
    for (int run = 0; run < SUM_OF_SQUARES_RUNS; run++)
        sums[run] = squares_of_run(x, format, n, run);
    const double sum = squares_runs_total(sums);
    *total = add ? *total + sum : sum;
}
void squares_of_ranges(void *workspace, const void *x, enum state_format format, const struct gradient_range *ranges,
                       int first, int end, struct device *dev) {
    double *sums = (double *)workspace; // (count, runs)
    gradients_format_check(format);
#pragma omp parallel for collapse(2) schedule(static)
    for (int i = first; i < end; i++)
        for (int run = 0; run < SUM_OF_SQUARES_RUNS; run++)
            sums[(int64_t)i * SUM_OF_SQUARES_RUNS + run] =
                squares_of_run((const char *)x + state_bytes(format, ranges[i].at), format, ranges[i].n, run);
}
void squares_total(double *total, int count, void *workspace, struct device *dev) {
    const double *sums = (const double *)workspace;
    double sum = 0;
    for (int i = 0; i < count; i++)
        sum += squares_runs_total(sums + (int64_t)i * SUM_OF_SQUARES_RUNS);
    *total = sum;
}

static inline void add_floats(float *store, const float *in, int64_t n, bool add) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        store[i] = add ? store[i] + in[i] : in[i];
}
// store (n) = in, or store + in where `add`, rounded stochastically by r, whose first element is store's
static inline void add_bf16(bf16 *store, const float *in, int64_t n, bool add, struct rounding r) {
    for (int64_t begin = 0; begin < n; begin += PHILOX_CHUNK) {
        const int count = n - begin < PHILOX_CHUNK ? (int)(n - begin) : (int)PHILOX_CHUNK;
        uint32_t words[PHILOX_CHUNK];
        rounding_chunk(words, r, begin);
#pragma omp simd
        for (int i = 0; i < count; i++) {
            const float before = add ? bf16_to_float(store[begin + i]) : 0.0f;
            store[begin + i] = bf16_stochastic(before + in[begin + i], words[i] & 0xffffu);
        }
    }
}
enum { GRADIENTS_PART = 4096 }; // elements that a thread takes at a time
void add_gradients(void *store, enum state_format format, const float *in, int64_t begin, int64_t n,
                   struct flat_tensors tensors, bool add, struct rounding r, struct device *dev) {
    gradients_format_check(format);
#pragma omp parallel for schedule(static)
    for (int64_t part = 0; part < n; part += GRADIENTS_PART) {
        const int64_t end = begin + (n - part < GRADIENTS_PART ? n : part + GRADIENTS_PART);
        int row = -1;
        for (int64_t first = begin + part, last; flat_tensors_next(&tensors, end, &row, &first, &last); first = last) {
            const int64_t at = first - begin;
            if (format == FORMAT_BF16)
                add_bf16((bf16 *)store + at, in + at, last - first, add,
                         tensor_rounding(r, tensors.rows[row], row, first));
            else
                add_floats((float *)store + at, in + at, last - first, add);
        }
    }
}

void gradient_check(struct gradient_check *check, const double *reports, int ranks, int width, int num_losses,
                    double targets, double clip, struct device *dev) {
    double squares = 0, counted = 0;
    for (int rank = 0; rank < ranks; rank++) {
        squares += reports[rank * width + REPORT_SQUARES];
        for (int i = 0; i < num_losses; i++)
            counted += reports[rank * width + REPORT_LOSSES + 2 * i + 1];
    }
    *check = gradient_check_of(squares, targets, counted, clip);
    for (int rank = 0; rank < ranks; rank++)
        for (int i = 0; i < 2 * num_losses; i++)
            check->finite = check->finite && isfinite(reports[rank * width + REPORT_LOSSES + i]);
}

#endif
