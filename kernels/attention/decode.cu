#include "kernels/attention/decode.cuh"
#include "kernels/packed.cuh" // packed_load_some, packed_store_some
#include "kernels/ptx.cuh"    // shared memory, exp2_approx
#include "kernels/reduce.cuh" // lanes_sum
#include <float.h>            // FLT_MAX
#include <math.h>             // exp2f, INFINITY

#ifdef TARGET_CUDA

enum { DECODE_THREADS = 256, DECODE_SLICE = 8 }; // a lane takes 8 elements of a head

// Copies one pack of a k or v head per thread, unless its slot is -1. A row of qkv has q's heads, then k's, then v's.
static __global__ void kv_cache_append_kernel(floatX *keys, floatX *values, const floatX *qkv, const int32_t *starts,
                                              const int32_t *ends, int capacity, struct attention_shape shape) {
    const int H = shape.num_heads, Hkv = shape.num_query_groups, D = shape.head_dim;
    const int64_t packs = (D + PACK - 1) / PACK, i = (int64_t)blockIdx.x * DECODE_THREADS + threadIdx.x;
    const int64_t row = i / (2 * Hkv * packs), head = i / packs % (2 * Hkv), at = i % packs * PACK;
    if (row >= (int64_t)shape.B * shape.T)
        return;
    const int slot = kv_cache_slot(starts, ends, capacity, row, shape.T);
    if (slot < 0)
        return;
    const struct packed x = packed_load_some(qkv + (row * (H + 2 * Hkv) + H + head) * D + at, D - at);
    const int64_t place = (row / shape.T * Hkv + head % Hkv) * capacity + slot;
    packed_store_some((head < Hkv ? keys : values) + place * D + at, x, D - at);
}
void kv_cache_append(floatX *keys, floatX *values, const floatX *qkv, const int32_t *starts, const int32_t *ends,
                     int capacity, struct attention_shape shape, struct device *dev) {
    const int64_t packs = (int64_t)shape.num_query_groups * ((shape.head_dim + PACK - 1) / PACK);
    LAUNCH(dev, kv_cache_append_kernel, blocks_for((int64_t)shape.B * shape.T * 2 * packs, DECODE_THREADS),
           DECODE_THREADS, 0, keys, values, qkv, starts, ends, capacity, shape);
}

struct decode_slice {
    float x[DECODE_SLICE];
};
// Returns elements [at, at + DECODE_SLICE) of a head, 0 past its D.
DEVICE_FUNCTION struct decode_slice decode_load(const floatX *head, int at, int D) {
    struct decode_slice result;
    for (int i = 0; i < DECODE_SLICE; i += PACK) {
        struct packed x = {};
        if (at + i < D)
            x = packed_load_some(head + at + i, D - at - i);
        for (int j = 0; j < PACK; j++)
            result.x[i + j] = to_float(x.x[j]);
    }
    return result;
}

// Holds a team's online softmax over its keys. The first maximum is finite, so that a team without keys weighs 0.
struct decode_sums {
    float max, total;           // of the scores, in units of ln 2; of the weights
    struct decode_slice values; // weighted sums
};

// Returns the shared-memory address of a team's floats: its max, its total, then D sums.
DEVICE_FUNCTION uint32_t decode_team(int team, int D) { return shared_memory() + (uint32_t)(team * (D + 2)) * 4; }

// Computes one head of a sequence per block. A team of `lanes` lanes takes one key at a time, and a lane DECODE_SLICE
// elements of it; lanes is a power of 2. Then a thread for each element adds up what the teams left at decode_team.
static __global__ void __launch_bounds__(DECODE_THREADS)
    attention_decode_kernel(floatX *out, const floatX *qkv, const floatX *keys, const floatX *values,
                            const int32_t *positions, int capacity, int lanes, struct attention_shape shape) {
    const int H = shape.num_heads, Hkv = shape.num_query_groups, D = shape.head_dim;
    const int64_t head = blockIdx.x, b = head / H, h = head % H, kv_head = b * Hkv + h / (H / Hkv);
    const int count = decode_num_keys(positions, b, capacity);
    const int team = threadIdx.x / lanes, teams = DECODE_THREADS / lanes, at = threadIdx.x % lanes * DECODE_SLICE;
    struct decode_slice q = decode_load(qkv + (b * (H + 2 * Hkv) + h) * D, at, D);
    for (int i = 0; i < DECODE_SLICE; i++)
        q.x[i] *= decode_scale(shape);

    struct decode_sums sums = {-FLT_MAX, 0, {{0}}};
    for (int first = 0; first < count; first += teams) { // every lane runs to the end, as lanes_sum needs them all
        const int key = first + team;
        const int64_t row = (kv_head * capacity + (key < count ? key : 0)) * D;
        const struct decode_slice k = decode_load(keys + row, at, D), v = decode_load(values + row, at, D);
        float score = 0;
        for (int i = 0; i < DECODE_SLICE; i++)
            score += q.x[i] * k.x[i];
        score = lanes_sum(score, lanes);
        if (key >= count)
            continue;
        if (shape.softcap > 0)
            score = decode_cap(score, shape.softcap);
        const float max = fmaxf(sums.max, score), shrink = exp2_approx(sums.max - max),
                    weight = exp2_approx(score - max);
        sums.max = max;
        sums.total = sums.total * shrink + weight;
        for (int i = 0; i < DECODE_SLICE; i++)
            sums.values.x[i] = sums.values.x[i] * shrink + weight * v.x[i];
    }

    if (at == 0) {
        store_shared_float(decode_team(team, D), sums.max);
        store_shared_float(decode_team(team, D) + 4, sums.total);
    }
    for (int i = 0; i < DECODE_SLICE; i++)
        if (at + i < D)
            store_shared_float(decode_team(team, D) + 8 + (uint32_t)(at + i) * 4, sums.values.x[i]);
    __syncthreads();
    const int d = threadIdx.x;
    if (d >= D)
        return;
    float max = -FLT_MAX, total = 0, sum = 0;
    for (int t = 0; t < teams; t++)
        max = fmaxf(max, load_shared_float(decode_team(t, D)));
    for (int t = 0; t < teams; t++) {
        const float weight = exp2_approx(load_shared_float(decode_team(t, D)) - max);
        total += weight * load_shared_float(decode_team(t, D) + 4);
        sum += weight * load_shared_float(decode_team(t, D) + 8 + (uint32_t)d * 4);
    }
    out[head * D + d] = to_floatX(sum / total);
}

void attention_decode(floatX *out, const floatX *qkv, const floatX *keys, const floatX *values,
                      const int32_t *positions, int capacity, struct attention_shape shape, void *workspace,
                      struct device *dev) {
    int lanes = 1;
    while (lanes * DECODE_SLICE < shape.head_dim)
        lanes *= 2;
    if (lanes > 32)
        fail("attention: heads of %d: expected at most %d", shape.head_dim, 32 * DECODE_SLICE);
    LAUNCH(dev, attention_decode_kernel, (unsigned)(shape.B * shape.num_heads), DECODE_THREADS,
           (unsigned)(DECODE_THREADS / lanes * (shape.head_dim + 2) * sizeof(float)), out, qkv, keys, values, positions,
           capacity, lanes, shape);
}

#else
#include "kernels/vectors.cuh" // vec_sum, vec_exp2
#include "kernels/xvec.cuh"    // xvec_load, xvec_dot, xvec_part

void kv_cache_append(floatX *keys, floatX *values, const floatX *qkv, const int32_t *starts, const int32_t *ends,
                     int capacity, struct attention_shape shape, struct device *dev) {
    const int H = shape.num_heads, Hkv = shape.num_query_groups, D = shape.head_dim;
    const int64_t rows = (int64_t)shape.B * shape.T;
#pragma omp parallel for schedule(static) if (rows > 64)
    for (int64_t row = 0; row < rows; row++) {
        const int slot = kv_cache_slot(starts, ends, capacity, row, shape.T);
        for (int g = 0; g < Hkv && slot >= 0; g++) {
            const floatX *k = qkv + (row * (H + 2 * Hkv) + H + g) * D;
            const int64_t at = ((row / shape.T * Hkv + g) * capacity + slot) * D;
            memcpy(keys + at, k, (size_t)D * sizeof *k);
            memcpy(values + at, k + (int64_t)Hkv * D, (size_t)D * sizeof *k);
        }
    }
}

// A run reads DECODE_KEYS keys, then their values, which is long enough for the hardware's prefetchers.
enum { DECODE_KEYS = 512, DECODE_MAX_HEAD_DIM = 256, DECODE_MAX_VECS = DECODE_MAX_HEAD_DIM / XVEC_LANES };
enum { DECODE_VECS = 4 }; // vectors of a value that are summed in registers at a time

// Returns elements [v * XVEC_LANES, (v + 1) * XVEC_LANES) of a head, 0 past its D. v * XVEC_LANES <= D.
static inline xvec decode_vec(const floatX *head, int v, int D) {
    const int rest = D - v * XVEC_LANES;
    return rest >= XVEC_LANES ? xvec_load(head + v * XVEC_LANES) : xvec_load_some(head + v * XVEC_LANES, rest);
}

// scores = scale q K^T of n keys, (n, D). Returns the largest score. q: decode_vec's of a head; scale: decode_scale's.
static inline float decode_scores(float *scores, const xvec *q, const floatX *keys, int n, int D, float scale) {
    float max = -INFINITY;
    for (int j = 0; j < n; j++) {
        vec sum = vec_set(0);
        for (int v = 0; v * XVEC_LANES < D; v++)
            sum = xvec_dot(sum, q[v], decode_vec(keys + (int64_t)j * D, v, D));
        scores[j] = scale * vec_sum(sum);
        max = scores[j] > max ? scores[j] : max;
    }
    return max;
}

// Applies decode_cap to n scores, the largest of which is `max`. Returns the largest capped score. It isn't inlined,
// since that took registers from the loops of models without a softcap: 4 % of their time.
static __attribute__((noinline)) float decode_capped(float *scores, int n, float max, float softcap) {
#pragma omp simd
    for (int j = 0; j < n; j++)
        scores[j] = decode_cap(scores[j], softcap);
    return decode_cap(max, softcap);
}

// sums = sums * shrink + weights (n) V (n, D), for `vecs` vectors of D, at most DECODE_VECS, from vector `first` on.
// sums has all vectors of D, in XVEC_PARTS parts each, as xvec_part has them.
ALWAYS_INLINE void decode_values(const int vecs, vec *sums, const float *weights, float shrink, const floatX *values,
                                 int n, int first, int D) {
    vec sum[DECODE_VECS * XVEC_PARTS];
#pragma GCC unroll 8
    for (int i = 0; i < vecs * XVEC_PARTS; i++)
        sum[i] = sums[first * XVEC_PARTS + i] * shrink;
    for (int j = 0; j < n; j++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) {
            const xvec x = decode_vec(values + (int64_t)j * D, first + v, D);
#pragma GCC unroll 2
            for (int part = 0; part < XVEC_PARTS; part++)
                sum[v * XVEC_PARTS + part] += xvec_part(x, part) * weights[j];
        }
#pragma GCC unroll 8
    for (int i = 0; i < vecs * XVEC_PARTS; i++)
        sums[first * XVEC_PARTS + i] = sum[i];
}
// Does decode_values for all vectors of a value.
static void decode_all_values(vec *sums, const float *weights, float shrink, const floatX *values, int n, int D) {
    const int vecs = (D + XVEC_LANES - 1) / XVEC_LANES;
    int v = 0;
    for (; v + DECODE_VECS <= vecs; v += DECODE_VECS)
        decode_values(DECODE_VECS, sums, weights, shrink, values, n, v, D);
    for (; v + 2 <= vecs; v += 2)
        decode_values(2, sums, weights, shrink, values, n, v, D);
    if (v < vecs)
        decode_values(1, sums, weights, shrink, values, n, v, D);
}

// Turns n scores p into 2^(p - max), returns their sum, and zeroes p, which has room, up to whole EXP2_VECS vectors.
static inline float decode_weights(vec *p, int n, float max) {
    vec sum = vec_set(0);
    for (int j = n; j % (EXP2_VECS * LANES) != 0; j++)
        ((float *)p)[j] = -INFINITY;
    for (int i = 0; i * LANES < n; i += EXP2_VECS) {
        for (int k = 0; k < EXP2_VECS; k++)
            p[i + k] -= max;
        vec_exp2(p + i);
        for (int k = 0; k < EXP2_VECS; k++)
            sum += p[i + k];
    }
    return vec_sum(sum);
}

// Writes to out (D) softmax(cap(scale q K^T)) V of one head's q (D); keys and values: (count > 0, D), without gaps.
static void decode_head(floatX *out, const floatX *q, const floatX *keys, const floatX *values, int count,
                        struct attention_shape shape) {
    const int D = shape.head_dim;
    const float scale = decode_scale(shape);
    xvec query[DECODE_MAX_VECS];
    vec sums[DECODE_MAX_VECS * XVEC_PARTS], weights[DECODE_KEYS / LANES];
    float *const p = (float *)weights, max = -FLT_MAX, total = 0;
    for (int v = 0; v * XVEC_LANES < D; v++) {
        query[v] = decode_vec(q, v, D);
        for (int part = 0; part < XVEC_PARTS; part++)
            sums[v * XVEC_PARTS + part] = vec_set(0);
    }
    for (int first = 0; first < count; first += DECODE_KEYS) {
        const int n = count - first < DECODE_KEYS ? count - first : DECODE_KEYS;
        const float old = max;
        float highest = decode_scores(p, query, keys + (int64_t)first * D, n, D, scale);
        if (shape.softcap > 0)
            highest = decode_capped(p, n, highest, shape.softcap);
        max = highest > max ? highest : max;
        const float shrink = exp2f(old - max);
        total = total * shrink + decode_weights(weights, n, max);
        decode_all_values(sums, p, shrink, values + (int64_t)first * D, n, D);
    }
    for (int d = 0; d < D; d++) {
        const vec sum = sums[d / XVEC_LANES * XVEC_PARTS + d % XVEC_PARTS];
        out[d] = to_floatX(sum[d % XVEC_LANES / XVEC_PARTS] / total);
    }
}

void attention_decode(floatX *out, const floatX *qkv, const floatX *keys, const floatX *values,
                      const int32_t *positions, int capacity, struct attention_shape shape, void *workspace,
                      struct device *dev) {
    const int H = shape.num_heads, Hkv = shape.num_query_groups, D = shape.head_dim;
    if (D > DECODE_MAX_HEAD_DIM)
        fail("attention: heads of %d: expected at most %d", D, DECODE_MAX_HEAD_DIM);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < (int64_t)shape.B * H; i++) {
        const int64_t b = i / H, h = i % H, at = (b * Hkv + h / (H / Hkv)) * capacity * D;
        decode_head(out + i * D, qkv + (b * (H + 2 * Hkv) + h) * D, keys + at, values + at,
                    decode_num_keys(positions, b, capacity), shape);
    }
}

#endif
