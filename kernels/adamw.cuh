// AdamW (Loshchilov and Hutter 2019) as torch.optim.AdamW computes it, and the norm that gradients are clipped by.
#pragma once
#include "kernels/amax.cuh"   // amax_with, amax_merge_block, amax_take
#include "kernels/device.cuh" // floatX
#include "kernels/reduce.cuh" // block_sum_double
#include <math.h>             // pow, sqrt, sqrtf

struct adamw {
    float lr, beta1, beta2, eps, weight_decay;
    int64_t step;     // from 1
    float grad_scale; // what the gradients are multiplied by first
    uint32_t *amax;   // of params, as kernels/amax.cuh says; NULL: not taken
};

// What the update must know of a step's losses and gradients, in the device's memory, so that the host need not wait
// for it.
struct gradient_check {
    double grad_norm;
    float grad_scale; // clipping, and the mean over the targets that count
    int32_t finite;   // 1 where every loss and the norm are
};

// What is the same for all elements.
struct adamw_factors {
    float grad_scale, beta1, rest1, beta2, rest2, eps; // rest = 1 - beta
    float step_size;                                   // lr / (1 - beta1^step)
    float inverse_root;                                // 1 / sqrt(1 - beta2^step)
    float keep;                                        // 1 - lr weight_decay
};
// In double: 1 - beta2^step loses three digits to cancellation at step 1.
static inline struct adamw_factors adamw_factors_of(struct adamw a) {
    const double correction1 = 1 - pow((double)a.beta1, (double)a.step);
    const double correction2 = 1 - pow((double)a.beta2, (double)a.step);
    struct adamw_factors f;
    f.grad_scale = a.grad_scale;
    f.beta1 = a.beta1;
    f.rest1 = (float)(1 - (double)a.beta1);
    f.beta2 = a.beta2;
    f.rest2 = (float)(1 - (double)a.beta2);
    f.eps = a.eps;
    f.step_size = (float)(a.lr / correction1);
    f.inverse_root = (float)(1 / sqrt(correction2));
    f.keep = (float)(1 - (double)a.lr * a.weight_decay);
    return f;
}
// One element: its new value; *m and *v are updated.
HOST_DEVICE float adamw_element(float value, float grad, float *m, float *v, struct adamw_factors f) {
    const float g = grad * f.grad_scale;
    const float first = f.beta1 * *m + f.rest1 * g, second = f.beta2 * *v + f.rest2 * (g * g);
    *m = first;
    *v = second;
    const float change = f.step_size * first / (sqrtf(second) * f.inverse_root + f.eps);
    return f.keep * value - change;
}

// The gradients are those of the sum of losses over `targets`, of which `counted` counted: of the mean loss they are
// targets / counted times as large. grad_norm is the norm of those; they are scaled down to norm `clip` (0: never) as
// torch.nn.utils.clip_grad_norm_ does, where 1e-6 keeps a zero norm from dividing.
HOST_DEVICE struct gradient_check gradient_check_of(double squares, double targets, double counted, double clip) {
    struct gradient_check check;
    const double mean = counted == targets ? 1 : counted > 0 ? targets / counted : 0;
    check.grad_norm = sqrt(squares) * mean;
    const double scale = clip > 0 ? clip / (check.grad_norm + 1e-6) : 1;
    check.grad_scale = (float)(mean * (scale < 1 ? scale : 1));
    check.finite = isfinite(check.grad_norm) ? 1 : 0;
    return check;
}

// With g = grads * grad_scale:
//   m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
//   master = (1 - lr weight_decay) master - lr / (1 - beta1^step) * m / (sqrt(v / (1 - beta2^step)) + eps)
//   params = master, rounded. master NULL (fp32 only): params are the master.
// One pass: 16 bytes read and 12 written per parameter, and 2 more for a bf16 parameter.
// `check`, made by gradient_check: its scale comes to the gradients' own, and where it is not finite nothing is
// changed; NULL: neither. adamw.amax is of params as they are afterwards, where nothing is changed too: so it may be
// cleared before each update.
static void adamw_update(floatX *params,     // (n)
                         float *master,      // (n)
                         const float *grads, // (n)
                         float *m,           // (n)
                         float *v,           // (n)
                         int64_t n, struct adamw adamw, const struct gradient_check *check, struct device *dev);
// total (+)= sum of x[i]^2 in double. A fixed number of partial sums is added in a fixed order: the bits depend neither
// on the number of threads nor on the GPU.
static size_t sum_of_squares_workspace_bytes(void);
static void sum_of_squares(double *total,  // (1)
                           const float *x, // (n)
                           int64_t n, bool add, void *workspace, struct device *dev);
// out += in
static void add_floats(float *out,      // (n)
                       const float *in, // (n)
                       int64_t n, struct device *dev);
// The check of a step, the same on every rank, which has all reports: the norm of the gradients of all ranks' shards,
// clipped to `clip` (0: never); finite: no loss and not the norm is NaN or infinite. targets: of the step, over all
// ranks, counted or not; gradients are those of the sum of losses divided by it. A rank's report: the sum of its
// gradients' squares; num_losses pairs of a sum of losses and the number of targets in it; columns that are not read.
static void gradient_check(struct gradient_check *check, // (1)
                           const double *reports,        // (ranks, width)
                           int ranks, int width, int num_losses, double targets, double clip, struct device *dev);
enum { REPORT_SQUARES, REPORT_LOSSES }; // columns of reports

#ifdef TARGET_CUDA

enum { FLAT_THREADS = 256, SQUARES_BLOCKS = 1024 };

// Four neighbours in a flat range: 16 bytes of fp32, 8 of bf16, one access.
template <class T> struct alignas(4 * sizeof(T)) four { T x[4]; };
// Told of each such access before it is made: the emulator checks its address.
template <class T> DEVICE_FUNCTION void four_check(const T *at, bool write) {
#ifdef CUDA_EMULATED
    emu_access_global(at, sizeof(four<T>), write);
#endif
}
template <class T> DEVICE_FUNCTION bool four_aligned(const T *at) { return (uintptr_t)at % sizeof(four<T>) == 0; }
// Those of from[0..3] that `begin` and `end` leave.
template <class T> DEVICE_FUNCTION struct four<T> four_load(const T *from, int begin, int end) {
    if (begin == 0 && end >= 4 && four_aligned(from)) {
        four_check(from, false);
        return *(const four<T> *)from;
    }
    four<T> result = {};
    for (int i = 0; i < 4; i++)
        if (i >= begin && i < end)
            result.x[i] = from[i];
    return result;
} template <class T> DEVICE_FUNCTION void four_store(T *to, const four<T> &value, int begin, int end) {
    if (begin == 0 && end >= 4 && four_aligned(to)) {
        four_check(to, true);
        *(four<T> *)to = value;
    } else
        for (int i = 0; i < 4; i++)
            if (i >= begin && i < end)
                to[i] = value.x[i];
}

// A thread takes four elements. Groups begin where m is aligned: ranges of a flat buffer, which all have the same
// beginning, are then aligned in all of them; others are taken one element at a time. What is loaded is loaded first:
// waiting for `check` before would double the time in which a thread has nothing under way. Returns the largest
// magnitude of the parameters, or, without AMAX, 0.
template <bool AMAX>
DEVICE_FUNCTION uint32_t adamw_four(floatX *params, float *master, const float *grads, float *m, float *v, int64_t at,
                                    int64_t n, int skip, struct adamw_factors factors,
                                    const struct gradient_check *check) {
    const int begin = at < 0 ? skip : 0, end = n - at < 4 ? (int)(n - at) : 4;
    const four<float> g = four_load(grads + at, begin, end);
    four<float> first = four_load(m + at, begin, end), second = four_load(v + at, begin, end), value;
    four<floatX> rounded;
    if (master != NULL)
        value = four_load(master + at, begin, end);
    else {
        rounded = four_load(params + at, begin, end);
        for (int i = 0; i < 4; i++)
            value.x[i] = to_float(rounded.x[i]);
    }
    const bool finite = check == NULL || check->finite;
    if (finite) {
        if (check != NULL)
            factors.grad_scale *= check->grad_scale;
        for (int i = 0; i < 4; i++) {
            value.x[i] = adamw_element(value.x[i], g.x[i], &first.x[i], &second.x[i], factors);
            rounded.x[i] = to_floatX(value.x[i]);
        }
        four_store(m + at, first, begin, end);
        four_store(v + at, second, begin, end);
        if (master != NULL)
            four_store(master + at, value, begin, end);
        four_store(params + at, rounded, begin, end);
    } else if (AMAX)
        rounded = four_load(params + at, begin, end);
    uint32_t largest = 0;
    for (int i = 0; AMAX && i < 4; i++)
        if (i >= begin && i < end)
            largest = amax_with(largest, rounded.x[i]);
    return largest;
}
template <bool AMAX>
static __global__ void adamw_kernel(floatX *params, float *master, const float *grads, float *m, float *v, int64_t n,
                                    int skip, struct adamw_factors factors, const struct gradient_check *check,
                                    uint32_t *amax) {
    const int64_t at = ((int64_t)blockIdx.x * FLAT_THREADS + threadIdx.x) * 4 - skip;
    uint32_t largest = 0;
    if (at < n)
        largest = adamw_four<AMAX>(params, master, grads, m, v, at, n, skip, factors, check);
    if (AMAX)
        amax_merge_block(amax, largest, shared_memory());
}
static void adamw_update(floatX *params, float *master, const float *grads, float *m, float *v, int64_t n,
                         struct adamw adamw, const struct gradient_check *check, struct device *dev) {
    const int skip = (int)((uintptr_t)m / sizeof *m % 4);
    if (n > 0)
        LAUNCH(dev, (adamw.amax != NULL ? adamw_kernel<true> : adamw_kernel<false>),
               blocks_for(n + skip, 4 * FLAT_THREADS), FLAT_THREADS, adamw.amax != NULL ? AMAX_BLOCK_BYTES : 0, params,
               master, grads, m, v, n, skip, adamw_factors_of(adamw), check, adamw.amax);
}

// Block b's sum goes to sums[b]. The number of blocks does not depend on the GPU, and so neither do the bits.
static __global__ void squares_kernel(double *sums, const float *x, int64_t n) {
    const int64_t thread = (int64_t)blockIdx.x * FLAT_THREADS + threadIdx.x;
    const int64_t before = (4 - (int64_t)((uintptr_t)x / sizeof *x % 4)) % 4; // elements before the first whole group
    const int64_t head = before < n ? before : n, groups = (n - head) / 4, tail = head + 4 * groups;
    double sum = 0;
#pragma unroll 4
    for (int64_t group = thread; group < groups; group += SQUARES_BLOCKS * FLAT_THREADS) {
        const four<float> y = four_load(x + head + 4 * group, 0, 4);
        for (int i = 0; i < 4; i++)
            sum += (double)y.x[i] * (double)y.x[i];
    }
    if (thread < head)
        sum += (double)x[thread] * (double)x[thread];
    if (thread < n - tail)
        sum += (double)x[tail + thread] * (double)x[tail + thread];
    sum = block_sum_double(sum, shared_memory());
    if (threadIdx.x == 0)
        sums[blockIdx.x] = sum;
}
static __global__ void __launch_bounds__(SQUARES_BLOCKS)
    squares_total_kernel(double *total, const double *sums, bool add) { // one block, a thread a sum
    const double sum = block_sum_double(sums[threadIdx.x], shared_memory());
    if (threadIdx.x == 0)
        *total = add ? *total + sum : sum;
}
static size_t sum_of_squares_workspace_bytes(void) { return SQUARES_BLOCKS * sizeof(double); }
static void sum_of_squares(double *total, const float *x, int64_t n, bool add, void *workspace, struct device *dev) {
    double *sums = (double *)workspace; // (SQUARES_BLOCKS)
    LAUNCH(dev, squares_kernel, SQUARES_BLOCKS, FLAT_THREADS, BLOCK_SUM_BYTES, sums, x, n);
    LAUNCH(dev, squares_total_kernel, 1, SQUARES_BLOCKS, BLOCK_SUM_BYTES, total, sums, add);
}

static __global__ void add_floats_kernel(float *out, const float *in, int64_t n) {
    const int64_t at = ((int64_t)blockIdx.x * FLAT_THREADS + threadIdx.x) * 4;
    if (at >= n)
        return;
    const int end = n - at < 4 ? (int)(n - at) : 4;
    four<float> sum = four_load(out + at, 0, end);
    const four<float> more = four_load(in + at, 0, end);
    for (int i = 0; i < 4; i++)
        sum.x[i] += more.x[i];
    four_store(out + at, sum, 0, end);
}
static void add_floats(float *out, const float *in, int64_t n, struct device *dev) {
    if (n > 0)
        LAUNCH(dev, add_floats_kernel, blocks_for(n, 4 * FLAT_THREADS), FLAT_THREADS, 0, out, in, n);
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
static void gradient_check(struct gradient_check *check, const double *reports, int ranks, int width, int num_losses,
                           double targets, double clip, struct device *dev) {
    LAUNCH(dev, gradient_check_kernel, 1, 32, 0, check, reports, ranks, width, num_losses, targets, clip);
}

#else

// Elements that a thread takes at a time: a page of fp32.
enum { ADAMW_BLOCK = 1024 };

static void adamw_update(floatX *params, float *master, const float *grads, float *m, float *v, int64_t n,
                         struct adamw adamw, const struct gradient_check *check, struct device *dev) {
    struct adamw_factors f = adamw_factors_of(adamw);
    if (check != NULL && !check->finite) {
        if (adamw.amax != NULL) {
#pragma omp parallel for schedule(static)
            for (int64_t begin = 0; begin < n; begin += ADAMW_BLOCK)
                amax_take(adamw.amax, params + begin, n - begin < ADAMW_BLOCK ? n - begin : (int64_t)ADAMW_BLOCK);
        }
        return;
    }
    if (check != NULL)
        f.grad_scale *= check->grad_scale;
#pragma omp parallel for schedule(static)
    for (int64_t begin = 0; begin < n; begin += ADAMW_BLOCK) {
        const int count = n - begin < ADAMW_BLOCK ? (int)(n - begin) : (int)ADAMW_BLOCK;
        const float *__restrict__ g_block = grads + begin;
        float *__restrict__ m_block = m + begin, *__restrict__ v_block = v + begin;
        floatX *__restrict__ params_block = params + begin;
        if (master != NULL) {
            float *__restrict__ master_block = master + begin;
#pragma omp simd
            for (int i = 0; i < count; i++) {
                master_block[i] = adamw_element(master_block[i], g_block[i], &m_block[i], &v_block[i], f);
                params_block[i] = to_floatX(master_block[i]);
            }
        } else {
#pragma omp simd
            for (int i = 0; i < count; i++)
                params_block[i] =
                    to_floatX(adamw_element(to_float(params_block[i]), g_block[i], &m_block[i], &v_block[i], f));
        }
        amax_take(adamw.amax, params_block, count);
    }
}

enum { SUM_OF_SQUARES_RUNS = 256 };
static size_t sum_of_squares_workspace_bytes(void) { return SUM_OF_SQUARES_RUNS * sizeof(double); }
static void sum_of_squares(double *total, const float *x, int64_t n, bool add, void *workspace, struct device *dev) {
    double *sums = (double *)workspace; // (runs)
#pragma omp parallel for schedule(static)
    for (int64_t run = 0; run < SUM_OF_SQUARES_RUNS; run++) {
        // n / RUNS first, as n * RUNS could overflow
        const int64_t begin = n / SUM_OF_SQUARES_RUNS * run, last = run == SUM_OF_SQUARES_RUNS - 1;
        const int64_t end = last ? n : begin + n / SUM_OF_SQUARES_RUNS;
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = begin; i < end; i++)
            sum += (double)x[i] * (double)x[i];
        sums[run] = sum;
    }
    double sum = 0;
    for (int run = 0; run < SUM_OF_SQUARES_RUNS; run++)
        sum += sums[run];
    *total = add ? *total + sum : sum;
}

static void add_floats(float *out, const float *in, int64_t n, struct device *dev) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++)
        out[i] += in[i];
}

static void gradient_check(struct gradient_check *check, const double *reports, int ranks, int width, int num_losses,
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
