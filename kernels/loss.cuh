// Cross entropy of softmax(logits) against one target per row, and its gradient in the logits' place.
#pragma once
#include "kernels/device.cuh"         // floatX
#include "kernels/packed.cuh"         // packed_load, packed_store_some
#include "kernels/ptx.cuh"            // exp2_approx, shared memory
#include "kernels/reduce.cuh"         // lanes_sum, lanes_max, block_sum_double
#include "kernels/vector_math.cuh"    // LOG2E, vector_expf
#include "kernels/vectors_floatx.cuh" // vecs_exp, floatx_load
#include <float.h>                    // FLT_MAX
#include <math.h>                     // logf

// losses = ln(sum_{j < V} e^logits[j]) - logits[target]; the padded columns V <= j < Vp are not read.
// backward: logits <- dloss * (softmax(logits) - onehot(target)), padded columns <- 0.
static void cross_entropy(float *losses,          // (N)
                          floatX *logits,         // (N, Vp): in logits, out dlogits
                          const int32_t *targets, // (N), each in [0, V)
                          float dloss, int64_t N, int V, int Vp, bool backward, struct device *dev);

// total = scale * the sum of the losses, in double and in a fixed order.
static void losses_sum(double *total,       // (1)
                       const float *losses, // (N)
                       int64_t N, double scale, struct device *dev);

// What the softmax of a row, or of a part of it, is made from.
struct softmax_row {
    float shift, sum; // sum of e^(x - shift)
};

#ifdef TARGET_CUDA

// One block a row, so that a row is read from memory once: the gradient's reading finds the row in the caches. Two
// blocks of 1024 threads on each of 132 multiprocessors have 26 MB of a vocabulary of 50k in bf16 in flight.
// Multiprocessors that are not 8.0, 9.0 or 10.x hold 1536 threads, and so one block; ptxas warns where two are asked
// for.
enum { LOSS_THREADS = 1024 };
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 800 && __CUDA_ARCH__ / 100 != 9 && __CUDA_ARCH__ / 100 != 10
enum { LOSS_BLOCKS = 1 };
#else
enum { LOSS_BLOCKS = 2 };
#endif

// e^x by the special function unit, as two exponentials an element are more than the FMA units do in the time of the
// element's memory traffic. x <= 0; below -87 the result is 0. The argument is a difference of logits already: a factor
// applied to logit and shift apart would round each, and lose the difference of large ones.
DEVICE_FUNCTION float loss_exp(float x) { return exp2_approx(x * LOG2E); }

// A pack of the row's logits from column `at` on; columns past the V that count are -infinity, a probability of 0.
DEVICE_FUNCTION struct packed logits_load(const floatX *row, int at, int V) {
    if (V - at >= PACK && packed_aligned(row + at))
        return packed_load(row + at);
    struct packed result;
    for (int i = 0; i < PACK; i++)
        result.x[i] = at + i < V ? row[at + i] : to_floatX(-INFINITY);
    return result;
}

// row.sum, rescaled to another shift.
DEVICE_FUNCTION float softmax_rescaled_sum(struct softmax_row row, float shift) {
    return row.sum * loss_exp(row.shift - shift);
}

// The softmax of this thread's packs of the row, threadIdx.x, threadIdx.x + blockDim.x, ..., in one pass (Milakov and
// Gimelshein 2018). The shift is the maximum so far, which begins at a finite number so that -infinity counts as 0. A
// NaN does not become the maximum; it, and an infinity through infinity - infinity, ends up in `sum`.
DEVICE_FUNCTION struct softmax_row softmax_of_thread(const floatX *row, int V) {
    struct softmax_row result = {-FLT_MAX, 0};
    for (int at = threadIdx.x * PACK; at < V; at += LOSS_THREADS * PACK) {
        const struct packed x = logits_load(row, at, V);
        float shift = result.shift;
        for (int i = 0; i < PACK; i++)
            shift = fmaxf(shift, to_float(x.x[i]));
        float sum = softmax_rescaled_sum(result, shift);
        for (int i = 0; i < PACK; i++)
            sum += loss_exp(to_float(x.x[i]) - shift);
        result.shift = shift;
        result.sum = sum;
    }
    return result;
}

// The softmax of all threads' packs, the same bits in every thread.
DEVICE_FUNCTION struct softmax_row softmax_of_warp(struct softmax_row part) {
    const float shift = lanes_max(part.shift, 32);
    const struct softmax_row result = {shift, lanes_sum(softmax_rescaled_sum(part, shift), 32)};
    return result;
}
DEVICE_FUNCTION struct softmax_row softmax_of_block(struct softmax_row part) {
    const uint32_t shared = shared_memory(), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    part = softmax_of_warp(part);
    if (lane == 0) {
        store_shared_float(shared + 8 * warp, part.shift);
        store_shared_float(shared + 8 * warp + 4, part.sum);
    }
    __syncthreads();
    part.shift = load_shared_float(shared + 8 * lane); // as many warps as lanes
    part.sum = load_shared_float(shared + 8 * lane + 4);
    return softmax_of_warp(part);
}
enum { LOSS_SHARED_BYTES = LOSS_THREADS / 32 * 8 };

// row <- dloss * (softmax - onehot(target)), padded columns <- 0. The direction is the reverse of softmax_of_thread's:
// what was read last is still in the nearest cache.
DEVICE_FUNCTION void softmax_gradient(floatX *row, struct softmax_row softmax, int target, float dloss, int V, int Vp) {
    const float scale = dloss / softmax.sum;
    const int first = threadIdx.x * PACK, step = LOSS_THREADS * PACK;
    if (first >= Vp)
        return;
    for (int at = first + (Vp - 1 - first) / step * step; at >= 0; at -= step) {
        struct packed x = logits_load(row, at, V);
        for (int i = 0; i < PACK; i++) {
            const float gradient =
                scale * loss_exp(to_float(x.x[i]) - softmax.shift) - (at + i == target ? dloss : 0.0f);
            x.x[i] = to_floatX(at + i < V ? gradient : 0.0f); // in a broken row scale * 0 is NaN
        }
        packed_store_some(row + at, x, Vp - at);
    }
}

static __global__ void __launch_bounds__(LOSS_THREADS, LOSS_BLOCKS)
    cross_entropy_kernel(float *losses, floatX *logits, const int32_t *targets, float dloss, int V, int Vp,
                         bool backward) {
    // The last row comes first: its logits were written last.
    const int64_t n = (int64_t)gridDim.x - 1 - blockIdx.x;
    floatX *row = logits + n * Vp;
    const int target = targets[n];
    const float target_logit = to_float(row[target]); // before the barrier, behind which another thread overwrites it
    const struct softmax_row softmax = softmax_of_block(softmax_of_thread(row, V));
    // The target's logit is taken off before the logarithm is added: both may be 1e4 where the loss is 1.
    if (threadIdx.x == 0)
        losses[n] = logf(softmax.sum) - (target_logit - softmax.shift);
    if (backward)
        softmax_gradient(row, softmax, target, dloss, V, Vp);
}
static void cross_entropy(float *losses, floatX *logits, const int32_t *targets, float dloss, int64_t N, int V, int Vp,
                          bool backward, struct device *dev) {
    if (N > 0)
        LAUNCH(dev, cross_entropy_kernel, (unsigned)N, LOSS_THREADS, LOSS_SHARED_BYTES, losses, logits, targets, dloss,
               V, Vp, backward);
}

// One block is enough: there is a number a token.
static __global__ void __launch_bounds__(LOSS_THREADS)
    losses_sum_kernel(double *total, const float *losses, int64_t N, double scale) {
    double sum = 0;
#pragma unroll 8
    for (int64_t n = threadIdx.x; n < N; n += LOSS_THREADS)
        sum += losses[n];
    sum = block_sum_double(sum, shared_memory());
    if (threadIdx.x == 0)
        *total = scale * sum;
}
static void losses_sum(double *total, const float *losses, int64_t N, double scale, struct device *dev) {
    LAUNCH(dev, losses_sum_kernel, 1, LOSS_THREADS, BLOCK_SUM_BYTES, total, losses, N, scale);
}

#else

// Logits that are taken at a time, so that the second reading of them comes from the L1 cache.
enum { LOSS_BLOCK = 1024 };

// x[i] <- e^(row[i] - shift)
ALWAYS_INLINE void loss_exponentials(vec x[FLOATX_VECS], const floatX *row, float shift) {
    EACH_VEC x[i] = floatx_load(row + i * LANES) - shift;
    vecs_exp(x);
}
static inline float exponentials_sum(const floatX *x, int n, float shift) {
    vec sum = vec_set(0), e[FLOATX_VECS];
    int at = 0;
    for (; at + FLOATX_GROUP <= n; at += FLOATX_GROUP) {
        loss_exponentials(e, x + at, shift);
        EACH_VEC sum += e[i];
    }
    if (at < n) {
        floatX rest[FLOATX_GROUP];
        floatx_pad(rest, x + at, n - at, -INFINITY);
        loss_exponentials(e, rest, shift);
        EACH_VEC sum += e[i];
    }
    return vec_sum_in_order(sum);
}
// A NaN does not become the maximum.
static inline float largest(const floatX *x, int n, float at_least) {
    vec maxima = vec_set(at_least);
    int at = 0;
    for (; at + LANES <= n; at += LANES)
        maxima = vec_max(floatx_load(x + at), maxima);
    float lanes[LANES];
    float_store(lanes, maxima);
    for (int i = 0; i < LANES; i++)
        at_least = lanes[i] > at_least ? lanes[i] : at_least;
    for (; at < n; at++)
        at_least = to_float(x[at]) > at_least ? to_float(x[at]) : at_least;
    return at_least;
}

// The softmax of a row in one pass (Milakov and Gimelshein 2018), with a shift that need not be the maximum: the shift
// is the maximum of the first block, and moves only when a later block's sum is too large, not to speak of infinite. So
// sum is between 1 and 1e15 * blocks, and any logit that counts is far above shift - 87, where exponentials become 0. A
// NaN, and an infinity through infinity - infinity, ends up in `sum`. The maximum begins at a finite number, so that
// -infinity counts as 0.
static inline struct softmax_row softmax_statistics(const floatX *__restrict__ x, int V) {
    struct softmax_row row = {-FLT_MAX, 0};
    for (int begin = 0; begin < V; begin += LOSS_BLOCK) {
        const int n = V - begin < LOSS_BLOCK ? V - begin : (int)LOSS_BLOCK;
        float sum = begin > 0 ? exponentials_sum(x + begin, n, row.shift) : INFINITY;
        if (!(sum < 1e15f)) {
            const float shift = largest(x + begin, n, row.shift);
            row.sum *= vector_expf(row.shift - shift);
            row.shift = shift;
            sum = exponentials_sum(x + begin, n, shift);
        }
        row.sum += sum;
    }
    return row;
}

// row <- scale * e^(row - shift)
static inline void softmax_gradient(floatX *row, int V, float shift, float scale) {
    vec e[FLOATX_VECS];
    int at = 0;
    for (; at + FLOATX_GROUP <= V; at += FLOATX_GROUP) {
        loss_exponentials(e, row + at, shift);
        EACH_VEC floatx_store(row + at + i * LANES, scale * e[i]);
    }
    if (at < V) {
        floatX rest[FLOATX_GROUP];
        floatx_pad(rest, row + at, V - at, -INFINITY);
        loss_exponentials(e, rest, shift);
        EACH_VEC floatx_store(rest + i * LANES, scale * e[i]);
        memcpy(row + at, rest, (size_t)(V - at) * sizeof *row);
    }
}

static void cross_entropy(float *losses, floatX *logits, const int32_t *targets, float dloss, int64_t N, int V, int Vp,
                          bool backward, struct device *dev) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        floatX *__restrict__ row = logits + n * Vp;
        const struct softmax_row softmax = softmax_statistics(row, V);
        // The target's logit is taken off before the logarithm is added: both may be 1e4 where the loss is 1.
        const float target_logit = to_float(row[targets[n]]) - softmax.shift;
        losses[n] = logf(softmax.sum) - target_logit;
        if (!backward)
            continue;
        const float scale = dloss / softmax.sum;
        softmax_gradient(row, V, softmax.shift, scale);
        row[targets[n]] = to_floatX(scale * vector_expf(target_logit) - dloss);
        memset(row + V, 0, (size_t)(Vp - V) * sizeof *row);
    }
}

static void losses_sum(double *total, const float *losses, int64_t N, double scale, struct device *dev) {
    double sum = 0;
    for (int64_t n = 0; n < N; n++)
        sum += losses[n];
    *total = scale * sum;
}

#endif
