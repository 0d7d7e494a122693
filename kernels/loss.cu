#include "kernels/loss.cuh"
#include "kernels/packed_floats.cuh"  // packed_to_floats, packed_store_some
#include "kernels/ptx.cuh"            // exp2_approx, reciprocal_approx, shared memory
#include "kernels/reduce.cuh"         // lanes_sum, lanes_max, block_sum_double
#include "kernels/vector_math.cuh"    // LOG2E, vector_expf
#include "kernels/vectors_floatx.cuh" // vecs_exp, vec_tanh, floatx_load
#include <float.h>                    // FLT_MAX

#ifdef TARGET_CUDA

// One block a row. Memory is read once and written once: between the passes shared memory keeps the row's beginning, and
// the caches the rest. An SM has two blocks for rows that fit into half of its memory (57k bf16 on 9.0), one for longer
// rows. 64 KB of an SM's loads are in flight. SMs but 8.0, 9.0 and 10.x hold 1536 threads: ptxas warns of two blocks.
enum { LOSS_THREADS = 1024, LOSS_STEP = LOSS_THREADS * (int)PACK };
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 800 && __CUDA_ARCH__ / 100 != 9 && __CUDA_ARCH__ / 100 != 10
enum { LOSS_BLOCKS = 1 };
#else
enum { LOSS_BLOCKS = 2 };
#endif
enum { LOSS_SHARED_BYTES = LOSS_THREADS / 32 * 8 }; // of the warps' shifts and sums; the row's beginning follows

// Returns e^x for x <= 0, and 0 below -87, by the special function unit: the FMA units can't do two exponentials an
// element in the time of its memory traffic. Pass z - shift: scaling z and shift first would round each.
DEVICE_FUNCTION float loss_exp(float x) { return exp2_approx(x * LOG2E); }

struct logit {
    float z, slope;
};
// Returns a logit's z, and as `slope` dz/dlogit / scale, which is 1 unless z is capped. tanh x is 1 - 2r, r = 1 / (e^2x
// + 1), to about 2e-7, and its derivative 4r (1 - r). tanh.approx would err by 5e-4: at a softcap of 30, z by 0.02.
template <enum logit_kind KIND> DEVICE_FUNCTION struct logit logit_transformed(float logit, struct logit_transform t) {
    struct logit result = {logit, 1};
    if (KIND == LOGITS_SCALED)
        result.z = t.scale * logit;
    if (KIND == LOGITS_CAPPED) {
        const float r = reciprocal_approx(exp2_approx(2 * LOG2E * t.scale / t.softcap * logit) + 1.0f);
        result.z = t.softcap * (1.0f - 2.0f * r);
        result.slope = 4.0f * r * (1.0f - r);
    }
    return result;
}

// Loads a pack of the row's logits from column `at` on; columns from V on are -infinity, a probability of 0.
DEVICE_FUNCTION struct packed logits_load(const floatX *row, int at, int V) {
    if (V - at >= PACK && packed_aligned(row + at))
        return packed_load(row + at);
    struct packed result;
    for (int i = 0; i < PACK; i++)
        result.x[i] = at + i < V ? row[at + i] : to_floatX(-INFINITY);
    return result;
}

// Returns the row's sum as it is with another shift.
DEVICE_FUNCTION float softmax_rescaled_sum(struct softmax_row row, float shift) {
    return row.sum * loss_exp(row.shift - shift);
}

template <enum logit_kind KIND>
DEVICE_FUNCTION struct packed_floats logits_z(const struct packed &logits, int at, int V, struct logit_transform t) {
    struct packed_floats z;
    for (int i = 0; i < PACK; i++) {
        z.x[i] = logit_transformed<KIND>(to_float(logits.x[i]), t).z;
        if (KIND == LOGITS_CAPPED && at + i >= V) // the others' -infinity comes through
            z.x[i] = -INFINITY;
    }
    return z;
}

// Returns where shared memory keeps column `at` of the row.
DEVICE_FUNCTION uint32_t logits_kept(int at) {
    return shared_memory() + LOSS_SHARED_BYTES + (uint32_t)at * (uint32_t)sizeof(floatX);
}

// Returns the row with a pack of logits, from column `at` on, added to it.
template <enum logit_kind KIND>
DEVICE_FUNCTION struct softmax_row softmax_with(struct softmax_row row, const struct packed &logits, int at, int V,
                                                struct logit_transform t) {
    const struct packed_floats z = logits_z<KIND>(logits, at, V, t);
    float shift = row.shift;
    for (int i = 0; i < PACK; i++)
        shift = fmaxf(shift, z.x[i]);
    float sum = softmax_rescaled_sum(row, shift);
    for (int i = 0; i < PACK; i++)
        sum += loss_exp(z.x[i] - shift);
    const struct softmax_row result = {shift, sum};
    return result;
}
// Returns the shift and the sum of this thread's packs of the row, every LOSS_THREADS-th, in one pass (Milakov and
// Gimelshein 2018), and keeps columns below `kept`. The shift is the maximum so far. It begins at a finite number, so
// that -infinity adds 0 to `sum`. A NaN does not become the maximum; a NaN, or a z of +infinity, makes `sum` NaN.
template <enum logit_kind KIND, int LOADS>
DEVICE_FUNCTION struct softmax_row softmax_of_thread(const floatX *row, int V, int kept, struct logit_transform t) {
    struct softmax_row result = {-FLT_MAX, 0};
    const bool aligned = packed_aligned(row);
    for (int at = threadIdx.x * PACK; at < V; at += LOADS * LOSS_STEP) {
        struct packed x[LOADS];
        if (aligned && V - (at + (LOADS - 1) * LOSS_STEP) >= PACK) {
#pragma unroll
            for (int k = 0; k < LOADS; k++)
                x[k] = packed_load(row + at + k * LOSS_STEP);
        } else {
#pragma unroll
            for (int k = 0; k < LOADS; k++)
                x[k] = logits_load(row, at + k * LOSS_STEP, V);
        }
#pragma unroll
        for (int k = 0; k < LOADS; k++) {
            const int column = at + k * LOSS_STEP;
            if (column < kept) {
                struct float_x4 words;
                memcpy(&words, &x[k], sizeof words);
                store_shared_floats(logits_kept(column), words);
            }
            result = softmax_with<KIND>(result, x[k], column, V, t);
        }
    }
    return result;
}

DEVICE_FUNCTION struct softmax_row softmax_of_warp(struct softmax_row part) {
    const float shift = lanes_max(part.shift, 32);
    const struct softmax_row result = {shift, lanes_sum(softmax_rescaled_sum(part, shift), 32)};
    return result;
}
// Combines all threads' softmax_of_thread; each gets the same bits. All threads call, once, with LOSS_SHARED_BYTES.
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

// row (Vp) <- dloss * (z_loss_factor softmax - onehot(target)) dz/dlogit, padded columns <- 0; all threads of the block
// call. Shared memory has the columns below `kept`. Goes from the row's end to its beginning: what softmax_of_thread
// read last is still in the nearest cache.
template <enum logit_kind KIND>
DEVICE_FUNCTION void softmax_gradient(floatX *row, struct softmax_row softmax, int target, float dloss, float z_loss,
                                      int V, int Vp, int kept, struct logit_transform t) {
    const float dz = KIND == LOGITS_PLAIN ? dloss : dloss * t.scale;
    const float scale = dz * z_loss_factor(softmax, z_loss) / softmax.sum;
    const int first = threadIdx.x * PACK;
    if (first >= Vp)
        return;
    for (int at = first + (Vp - 1 - first) / LOSS_STEP * LOSS_STEP; at >= 0; at -= LOSS_STEP) {
        struct packed x;
        if (at < kept) {
            const struct word_x4 words = load_shared_words(logits_kept(at));
            memcpy(&x, &words, sizeof x);
        } else
            x = logits_load(row, at, V);
        for (int i = 0; i < PACK; i++) {
            const struct logit l = logit_transformed<KIND>(to_float(x.x[i]), t);
            const float gradient = l.slope * (scale * loss_exp(l.z - softmax.shift) - (at + i == target ? dz : 0.0f));
            x.x[i] = to_floatX(at + i < V ? gradient : 0.0f); // in a broken row scale * 0 is NaN
        }
        packed_store_some(row + at, x, Vp - at);
    }
}
// row (Vp) <- 0, by all threads of the block
DEVICE_FUNCTION void gradient_zero_row(floatX *row, int Vp) {
    struct packed zeros;
    for (int i = 0; i < PACK; i++)
        zeros.x[i] = to_floatX(0);
    for (int at = threadIdx.x * PACK; at < Vp; at += LOSS_THREADS * PACK)
        packed_store_some(row + at, zeros, Vp - at);
}

// Computes cross_entropy, one row a block. Without `backward`, `kept` is 0.
template <enum logit_kind KIND, int BLOCKS>
static __global__ void __launch_bounds__(LOSS_THREADS, BLOCKS < (int)LOSS_BLOCKS ? BLOCKS : (int)LOSS_BLOCKS)
    cross_entropy_kernel(float *losses, floatX *logits, const int32_t *targets, float dloss, float z_loss, int V,
                         int Vp, int kept, struct logit_transform transform, bool backward) {
    // The last row comes first: its logits were written last.
    const int64_t n = (int64_t)gridDim.x - 1 - blockIdx.x;
    floatX *row = logits + n * Vp;
    const int target = targets[n];
    if (target < 0) { // every thread of the block returns here, before the barriers
        if (threadIdx.x == 0)
            losses[n] = 0;
        if (backward)
            gradient_zero_row(row, Vp);
        return;
    }
    const float target_logit = to_float(row[target]); // before the barrier, after which another thread overwrites it
    const struct softmax_row softmax = softmax_of_block(softmax_of_thread<KIND, 4 / BLOCKS>(row, V, kept, transform));
    // The target's logit is taken off before the logarithm is added: both may be 1e4 where the loss is 1.
    if (threadIdx.x == 0)
        losses[n] = logf(softmax.sum) - (logit_transformed<KIND>(target_logit, transform).z - softmax.shift);
    if (backward)
        softmax_gradient<KIND>(row, softmax, target, dloss, z_loss, V, Vp, kept, transform);
}
// Returns the bytes of shared memory that a block can ask for.
static int loss_block_bytes(const struct device *dev) {
    struct cudaDeviceProp properties;
    cuda_check(cudaGetDeviceProperties(&properties, dev->index));
    return (int)properties.sharedMemPerBlockOptin;
}
// The number of columns that shared memory can keep where an SM has 1 or 2 blocks. An SM has 1 KB more than a block can
// ask for, and takes 1 KB from each block.
static int loss_most_kept(int blocks, const struct device *dev) {
    static const int bytes = loss_block_bytes(dev); // the question takes CUDA long
    const int columns = ((bytes + 1024) / blocks - 1024 - LOSS_SHARED_BYTES) / (int)sizeof(floatX);
    return columns / LOSS_STEP * LOSS_STEP;
}
template <enum logit_kind KIND, int BLOCKS>
static void cross_entropy_launch(float *losses, floatX *logits, const int32_t *targets, float dloss, float z_loss,
                                 int64_t N, int V, int Vp, struct logit_transform transform, bool backward,
                                 struct device *dev) {
    static const int most = loss_most_kept(BLOCKS, dev);
    static const cudaError_t prepared = cudaFuncSetAttribute((const void *)cross_entropy_kernel<KIND, BLOCKS>,
                                                             cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                             LOSS_SHARED_BYTES + most * (int)sizeof(floatX));
    if (BLOCKS > 1 && V > most) {
        cross_entropy_launch<KIND, 1>(losses, logits, targets, dloss, z_loss, N, V, Vp, transform, backward, dev);
        return;
    }
    const int whole = (int)blocks_for(V, LOSS_STEP) * LOSS_STEP, kept = !backward ? 0 : whole < most ? whole : most;
    cuda_check(prepared);
    LAUNCH(dev, (cross_entropy_kernel<KIND, BLOCKS>), (unsigned)N, LOSS_THREADS,
           LOSS_SHARED_BYTES + (size_t)kept * sizeof(floatX), losses, logits, targets, dloss, z_loss, V, Vp, kept,
           transform, backward);
}
void cross_entropy(float *losses, floatX *logits, const int32_t *targets, float dloss, float z_loss, int64_t N, int V,
                   int Vp, struct logit_transform transform, bool backward, struct device *dev) {
    if (N == 0)
        return;
    switch (logit_kind_of(transform)) {
    case LOGITS_PLAIN:
        cross_entropy_launch<LOGITS_PLAIN, 2>(losses, logits, targets, dloss, z_loss, N, V, Vp, transform, backward,
                                              dev);
        return;
    case LOGITS_SCALED:
        cross_entropy_launch<LOGITS_SCALED, 2>(losses, logits, targets, dloss, z_loss, N, V, Vp, transform, backward,
                                               dev);
        return;
    case LOGITS_CAPPED:
        cross_entropy_launch<LOGITS_CAPPED, 2>(losses, logits, targets, dloss, z_loss, N, V, Vp, transform, backward,
                                               dev);
        return;
    }
}

static __global__ void __launch_bounds__(LOSS_THREADS)
    logits_transform_kernel(floatX *logits, int V, int Vp, struct logit_transform transform) {
    floatX *row = logits + (int64_t)blockIdx.x * Vp;
    for (int at = threadIdx.x * PACK; at < V; at += LOSS_THREADS * PACK) {
        struct packed x = logits_load(row, at, V);
        for (int i = 0; i < PACK; i++) {
            const float scaled = logit_transformed<LOGITS_SCALED>(to_float(x.x[i]), transform).z;
            x.x[i] = to_floatX(transform.softcap > 0 ? logit_transformed<LOGITS_CAPPED>(to_float(x.x[i]), transform).z
                                                     : scaled);
        }
        packed_store_some(row + at, x, V - at);
    }
}
void logits_transform(floatX *logits, int64_t N, int V, int Vp, struct logit_transform transform, struct device *dev) {
    if (N > 0 && logit_kind_of(transform) != LOGITS_PLAIN)
        LAUNCH(dev, logits_transform_kernel, (unsigned)N, LOSS_THREADS, 0, logits, V, Vp, transform);
}

static __global__ void __launch_bounds__(LOSS_THREADS)
    losses_sum_kernel(struct loss_sum *total, const float *losses, const int32_t *targets, int64_t N) {
    double sum = 0, count = 0;
#pragma unroll 8
    for (int64_t n = threadIdx.x; n < N; n += LOSS_THREADS) {
        sum += losses[n];
        count += targets[n] >= 0 ? 1 : 0;
    }
    sum = block_sum_double(sum, shared_memory());
    count = block_sum_double(count, shared_memory() + BLOCK_SUM_BYTES);
    if (threadIdx.x == 0) {
        total->sum = sum;
        total->count = count;
    }
}
void losses_sum(struct loss_sum *total, const float *losses, const int32_t *targets, int64_t N, struct device *dev) {
    LAUNCH(dev, losses_sum_kernel, 1, LOSS_THREADS, 2 * BLOCK_SUM_BYTES, total, losses, targets, N);
}

static __global__ void __launch_bounds__(LOSS_THREADS)
    targets_are_largest_kernel(int32_t *largest, const floatX *logits, const int32_t *targets, int V, int Vp) {
    const int64_t n = blockIdx.x;
    const floatX *row = logits + n * Vp;
    const int target = targets[n];
    if (threadIdx.x == 0)
        largest[n] = target >= 0 ? 1 : 0;
    if (target < 0) // every thread of the block returns here, before the barrier
        return;
    __syncthreads();
    const float logit = to_float(row[target]);
    bool beaten = false;
    for (int at = threadIdx.x * PACK; at < V; at += LOSS_THREADS * PACK) {
        const struct packed x = logits_load(row, at, V);
        for (int i = 0; i < PACK; i++) {
            const float other = to_float(x.x[i]);
            const bool smaller = at + i < target ? other < logit : other <= logit;
            beaten |= at + i < V && !smaller;
        }
    }
    if (beaten) // all threads that write, write 0
        largest[n] = 0;
}
void targets_are_largest(int32_t *largest, const floatX *logits, const int32_t *targets, int64_t N, int V, int Vp,
                         struct device *dev) {
    if (N > 0)
        LAUNCH(dev, targets_are_largest_kernel, (unsigned)N, LOSS_THREADS, 0, largest, logits, targets, V, Vp);
}

#else

// Logits that are taken at a time, so that the second reading comes from the L1 cache.
enum { LOSS_BLOCK = 1024 };

// z = the transform of FLOATX_GROUP logits; slope = dz/dlogit / scale, written only for LOGITS_CAPPED and unless NULL.
ALWAYS_INLINE void logits_transformed(vec z[FLOATX_VECS], vec *slope, const floatX *logits, struct logit_transform t,
                                      enum logit_kind kind) {
    EACH_VEC z[i] = floatx_load(logits + i * LANES);
    if (kind == LOGITS_SCALED)
        EACH_VEC z[i] = t.scale * z[i];
    if (kind == LOGITS_CAPPED) {
        EACH_VEC z[i] = vec_tanh(t.scale / t.softcap * z[i]);
        if (slope)
            EACH_VEC slope[i] = 1.0f - z[i] * z[i];
        EACH_VEC z[i] = t.softcap * z[i];
    }
}
// Transforms the last n < FLOATX_GROUP logits as logits_transformed does; z of the group's rest is -infinity.
ALWAYS_INLINE void logits_transformed_some(vec z[FLOATX_VECS], vec *slope, const floatX *logits, int n,
                                           struct logit_transform t, enum logit_kind kind) {
    floatX rest[FLOATX_GROUP];
    floatx_pad(rest, logits, n, -INFINITY);
    logits_transformed(z, slope, rest, t, kind);
    if (kind == LOGITS_CAPPED) { // of which -infinity is -softcap
        float values[FLOATX_GROUP];
        EACH_VEC float_store(values + i * LANES, z[i]);
        for (int i = n; i < FLOATX_GROUP; i++)
            values[i] = -INFINITY;
        EACH_VEC z[i] = float_load(values + i * LANES);
    }
}
// Returns z of one logit, by the operations of logits_transformed; *slope = dz/dlogit / scale, 1 unless capped.
ALWAYS_INLINE float logit_transformed(float *slope, float logit, struct logit_transform t, enum logit_kind kind) {
    *slope = 1;
    if (kind == LOGITS_PLAIN)
        return logit;
    if (kind == LOGITS_SCALED)
        return t.scale * logit;
    const float tangent = vec_tanh(vec_set(t.scale / t.softcap * logit))[0];
    *slope = 1.0f - tangent * tangent;
    return t.softcap * tangent;
}

ALWAYS_INLINE void loss_exponentials(vec z[FLOATX_VECS], float shift) {
    EACH_VEC z[i] = z[i] - shift;
    vecs_exp(z);
}
// Returns the sum of e^(z - shift) over the logits x (n), whose transforms are z.
ALWAYS_INLINE float exponentials_sum(const floatX *x, int n, float shift, struct logit_transform t,
                                     enum logit_kind kind) {
    vec sum = vec_set(0), e[FLOATX_VECS];
    int at = 0;
    for (; at + FLOATX_GROUP <= n; at += FLOATX_GROUP) {
        logits_transformed(e, NULL, x + at, t, kind);
        loss_exponentials(e, shift);
        EACH_VEC sum += e[i];
    }
    if (at < n) {
        logits_transformed_some(e, NULL, x + at, n - at, t, kind);
        loss_exponentials(e, shift);
        EACH_VEC sum += e[i];
    }
    return vec_sum_in_order(sum);
}
// Returns the largest of the logits x (n), at least -FLT_MAX; its z is the largest too. A NaN never is the largest.
static inline float logits_largest(const floatX *x, int n) {
    vec maxima = vec_set(-FLT_MAX);
    float result = -FLT_MAX;
    int at = 0;
    for (; at + LANES <= n; at += LANES)
        maxima = vec_max(floatx_load(x + at), maxima);
    float lanes[LANES];
    float_store(lanes, maxima);
    for (int i = 0; i < LANES; i++)
        result = lanes[i] > result ? lanes[i] : result;
    for (; at < n; at++)
        result = to_float(x[at]) > result ? to_float(x[at]) : result;
    return result;
}

// Returns a row's shift and sum in one pass (Milakov and Gimelshein 2018), on one CPU thread. The shift is the largest
// z of the first LOSS_BLOCK logits, but finite. It rises only if a later LOSS_BLOCK's sum reaches 1e15: so nothing
// overflows, and no exponential that counts becomes 0. NaN or +infinity makes the sum NaN.
ALWAYS_INLINE struct softmax_row softmax_statistics(const floatX *__restrict__ x, int V, struct logit_transform t,
                                                    enum logit_kind kind) {
    struct softmax_row row = {-FLT_MAX, 0};
    float slope;
    for (int begin = 0; begin < V; begin += LOSS_BLOCK) {
        const int n = V - begin < LOSS_BLOCK ? V - begin : (int)LOSS_BLOCK;
        float sum = begin > 0 ? exponentials_sum(x + begin, n, row.shift, t, kind) : INFINITY;
        if (!(sum < 1e15f)) {
            const float most = logit_transformed(&slope, logits_largest(x + begin, n), t, kind);
            const float shift = most > row.shift ? most : row.shift;
            row.sum *= vector_expf(row.shift - shift);
            row.shift = shift;
            sum = exponentials_sum(x + begin, n, shift, t, kind);
        }
        row.sum += sum;
    }
    return row;
}

// row (V) <- scale * e^(z - shift) * slope, by each logit's z and slope. The caller then overwrites the target's place.
ALWAYS_INLINE void softmax_gradient(floatX *row, int V, float shift, float scale, struct logit_transform t,
                                    enum logit_kind kind) {
    vec e[FLOATX_VECS], slope[FLOATX_VECS];
    EACH_VEC slope[i] = vec_set(1.0f);
    int at = 0;
    for (; at + FLOATX_GROUP <= V; at += FLOATX_GROUP) {
        logits_transformed(e, slope, row + at, t, kind);
        loss_exponentials(e, shift);
        EACH_VEC floatx_store(row + at + i * LANES, scale * e[i] * slope[i]);
    }
    if (at < V) {
        floatX rest[FLOATX_GROUP];
        logits_transformed_some(e, slope, row + at, V - at, t, kind);
        loss_exponentials(e, shift);
        EACH_VEC floatx_store(rest + i * LANES, scale * e[i] * slope[i]);
        memcpy(row + at, rest, (size_t)(V - at) * sizeof *row);
    }
}

ALWAYS_INLINE void cross_entropy_row(float *loss, floatX *__restrict__ row, int target, float dloss, float z_loss,
                                     int V, int Vp, struct logit_transform t, enum logit_kind kind, bool backward) {
    const struct softmax_row softmax = softmax_statistics(row, V, t, kind);
    float slope;
    const float target_logit = logit_transformed(&slope, to_float(row[target]), t, kind) - softmax.shift;
    *loss = logf(softmax.sum) - target_logit;
    if (!backward)
        return;
    const float dz = kind == LOGITS_PLAIN ? dloss : dloss * t.scale;
    const float scale = dz * z_loss_factor(softmax, z_loss) / softmax.sum;
    softmax_gradient(row, V, softmax.shift, scale, t, kind);
    row[target] = to_floatX((scale * vector_expf(target_logit) - dz) * slope);
    memset(row + V, 0, (size_t)(Vp - V) * sizeof *row);
}
void cross_entropy(float *losses, floatX *logits, const int32_t *targets, float dloss, float z_loss, int64_t N, int V,
                   int Vp, struct logit_transform transform, bool backward, struct device *dev) {
    const enum logit_kind kind = logit_kind_of(transform);
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        floatX *row = logits + n * Vp;
        if (targets[n] < 0) {
            losses[n] = 0;
            if (backward)
                memset(row, 0, (size_t)Vp * sizeof *row);
            continue;
        }
        switch (kind) { // each call has a constant kind, which is compiled into code of its own
#define CROSS_ENTROPY_ROW(KIND)                                                                                        \
    case KIND:                                                                                                         \
        cross_entropy_row(losses + n, row, targets[n], dloss, z_loss, V, Vp, transform, KIND, backward);               \
        break
            CROSS_ENTROPY_ROW(LOGITS_PLAIN);
            CROSS_ENTROPY_ROW(LOGITS_SCALED);
            CROSS_ENTROPY_ROW(LOGITS_CAPPED);
#undef CROSS_ENTROPY_ROW
        }
    }
}

ALWAYS_INLINE void logits_transform_row(floatX *row, int V, struct logit_transform t, enum logit_kind kind) {
    vec z[FLOATX_VECS];
    int at = 0;
    for (; at + FLOATX_GROUP <= V; at += FLOATX_GROUP) {
        logits_transformed(z, NULL, row + at, t, kind);
        EACH_VEC floatx_store(row + at + i * LANES, z[i]);
    }
    if (at < V) {
        floatX rest[FLOATX_GROUP];
        logits_transformed_some(z, NULL, row + at, V - at, t, kind);
        EACH_VEC floatx_store(rest + i * LANES, z[i]);
        memcpy(row + at, rest, (size_t)(V - at) * sizeof *row);
    }
}
void logits_transform(floatX *logits, int64_t N, int V, int Vp, struct logit_transform transform, struct device *dev) {
    const enum logit_kind kind = logit_kind_of(transform);
    if (kind == LOGITS_PLAIN)
        return;
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++)
        if (kind == LOGITS_CAPPED)
            logits_transform_row(logits + n * Vp, V, transform, LOGITS_CAPPED);
        else
            logits_transform_row(logits + n * Vp, V, transform, LOGITS_SCALED);
}

void losses_sum(struct loss_sum *total, const float *losses, const int32_t *targets, int64_t N, struct device *dev) {
    const struct loss_sum none = {0, 0};
    *total = none;
    for (int64_t n = 0; n < N; n++) {
        total->sum += losses[n];
        total->count += targets[n] >= 0 ? 1 : 0;
    }
}

void targets_are_largest(int32_t *largest, const floatX *logits, const int32_t *targets, int64_t N, int V, int Vp,
                         struct device *dev) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        const floatX *row = logits + n * Vp;
        const int target = targets[n];
        const float logit = target >= 0 ? to_float(row[target]) : NAN;
        int smaller = 0; // counted without a branch, so that it becomes vector instructions
        for (int i = 0; i < target; i++)
            smaller += to_float(row[i]) < logit;
        for (int i = target; i < V && target >= 0; i++)
            smaller += to_float(row[i]) <= logit;
        largest[n] = target >= 0 && smaller == V;
    }
}

#endif
