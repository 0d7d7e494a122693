// Attention of one new token per sequence against a cache of keys and values, as generation needs it.
#pragma once
#include "kernels/attention_shape.cuh" // struct attention_shape
#include "kernels/device.cuh"          // floatX, struct device
#include "kernels/packed.cuh"          // packed_load_some, packed_store_some
#include "kernels/ptx.cuh"             // shared memory, exp2_approx
#include "kernels/reduce.cuh"          // lanes_sum
#include "kernels/vector_math.cuh"     // LOG2E
#include <float.h>                     // FLT_MAX
#include <math.h>                      // expf, INFINITY

// The new token's k and v, out of its qkv row, become the cache's row `position`.
static void kv_cache_append(floatX *keys,      // (B, capacity, Hkv * D)
                            floatX *values,    // (B, capacity, Hkv * D)
                            const floatX *qkv, // (B, (H + 2 Hkv) * D)
                            int position, int capacity, struct attention_shape shape, struct device *dev);

// out = softmax(scale q K^T) V over keys 0 to position, the new token's own included: kv_cache_append comes first.
// shape.T is not used.
static size_t attention_decode_workspace_bytes(struct attention_shape shape, int capacity, struct device *dev) {
    return 0;
}
static void attention_decode(floatX *out,          // (B, H * D)
                             const floatX *qkv,    // (B, (H + 2 Hkv) * D)
                             const floatX *keys,   // (B, capacity, Hkv * D)
                             const floatX *values, // (B, capacity, Hkv * D)
                             int position, int capacity, struct attention_shape shape, void *workspace,
                             struct device *dev);

#ifdef TARGET_CUDA

enum { DECODE_THREADS = 256, DECODE_SLICE = 8 }; // a lane takes 8 elements of a head

static __global__ void kv_cache_append_kernel(floatX *keys, floatX *values, const floatX *qkv, int position,
                                              int capacity, struct attention_shape shape) {
    const int64_t width = (int64_t)shape.num_query_groups * shape.head_dim, packs = (width + PACK - 1) / PACK;
    const int64_t i = (int64_t)blockIdx.x * DECODE_THREADS + threadIdx.x, b = i / (2 * packs), at = i % packs * PACK;
    const bool is_value = i / packs % 2;
    if (b >= shape.B)
        return;
    const floatX *k = qkv + b * (shape.num_heads + 2 * shape.num_query_groups) * shape.head_dim +
                      (int64_t)shape.num_heads * shape.head_dim;
    const struct packed x = packed_load_some(k + (is_value ? width : 0) + at, width - at);
    packed_store_some((is_value ? values : keys) + (b * capacity + position) * width + at, x, width - at);
}
static void kv_cache_append(floatX *keys, floatX *values, const floatX *qkv, int position, int capacity,
                            struct attention_shape shape, struct device *dev) {
    const int64_t width = (int64_t)shape.num_query_groups * shape.head_dim, packs = (width + PACK - 1) / PACK;
    LAUNCH(dev, kv_cache_append_kernel, blocks_for(shape.B * 2 * packs, DECODE_THREADS), DECODE_THREADS, 0, keys,
           values, qkv, position, capacity, shape);
}

struct decode_slice {
    float x[DECODE_SLICE];
};
// Elements [at, at + 8) of a head, zero past its D.
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

// Online softmax over the keys that one team of lanes sees. The maximum begins at a finite number, so that a team
// without keys weighs 0.
struct decode_sums {
    float max, total;           // of the scores, in units of ln 2; of the weights
    struct decode_slice values; // weighted sums
};

// Where a team's results lie in shared memory: its max, its total, then D sums.
DEVICE_FUNCTION uint32_t decode_team(int team, int D) { return shared_memory() + (uint32_t)(team * (D + 2)) * 4; }

// A block computes one head of a sequence. A team of `lanes` lanes, a power of 2, takes a key at a time, 8 elements a
// lane; then each element's thread adds the teams' results.
static __global__ void __launch_bounds__(DECODE_THREADS)
    attention_decode_kernel(floatX *out, const floatX *qkv, const floatX *keys, const floatX *values, int count,
                            int capacity, int lanes, struct attention_shape shape) {
    const int H = shape.num_heads, Hkv = shape.num_query_groups, D = shape.head_dim;
    const int64_t head = blockIdx.x, b = head / H, h = head % H, stride = (int64_t)Hkv * D;
    const int64_t kv_at = b * capacity * stride + h / (H / Hkv) * D;
    const int team = threadIdx.x / lanes, teams = DECODE_THREADS / lanes, at = threadIdx.x % lanes * DECODE_SLICE;
    struct decode_slice q = decode_load(qkv + (b * (H + 2 * Hkv) + h) * D, at, D);
    for (int i = 0; i < DECODE_SLICE; i++)
        q.x[i] *= shape.scale * LOG2E;

    struct decode_sums sums = {-FLT_MAX, 0, {{0}}};
    for (int first = 0; first < count; first += teams) { // every lane runs to the end, as lanes_sum needs them all
        const int key = first + team;
        const int64_t row = kv_at + (key < count ? key : 0) * stride;
        const struct decode_slice k = decode_load(keys + row, at, D), v = decode_load(values + row, at, D);
        float score = 0;
        for (int i = 0; i < DECODE_SLICE; i++)
            score += q.x[i] * k.x[i];
        score = lanes_sum(score, lanes);
        if (key >= count)
            continue;
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

static void attention_decode(floatX *out, const floatX *qkv, const floatX *keys, const floatX *values, int position,
                             int capacity, struct attention_shape shape, void *workspace, struct device *dev) {
    int lanes = 1;
    while (lanes * DECODE_SLICE < shape.head_dim)
        lanes *= 2;
    if (lanes > 32)
        fail("attention: heads of %d: expected at most %d", shape.head_dim, 32 * DECODE_SLICE);
    LAUNCH(dev, attention_decode_kernel, (unsigned)(shape.B * shape.num_heads), DECODE_THREADS,
           (unsigned)(DECODE_THREADS / lanes * (shape.head_dim + 2) * sizeof(float)), out, qkv, keys, values,
           position + 1, capacity, lanes, shape);
}

#else

static void kv_cache_append(floatX *keys, floatX *values, const floatX *qkv, int position, int capacity,
                            struct attention_shape shape, struct device *dev) {
    const size_t width = (size_t)shape.num_query_groups * shape.head_dim;
    for (int b = 0; b < shape.B; b++) {
        const floatX *k = qkv + (size_t)b * (shape.num_heads + 2 * shape.num_query_groups) * shape.head_dim +
                          (size_t)shape.num_heads * shape.head_dim;
        const size_t row = ((size_t)b * capacity + position) * width;
        memcpy(keys + row, k, width * sizeof *k);
        memcpy(values + row, k + width, width * sizeof *k);
    }
}

enum { DECODE_KEYS = 64, DECODE_MAX_HEAD_DIM = 256 };

// out = softmax(scale q K^T) V of one head, by online softmax over runs of 64 keys; rows of K and V are `stride` apart.
static void decode_head(floatX *out, const floatX *q, const floatX *keys, const floatX *values, int64_t stride,
                        int count, int D, float scale) {
    float query[DECODE_MAX_HEAD_DIM], sums[DECODE_MAX_HEAD_DIM], p[DECODE_KEYS], max = -INFINITY, total = 0;
    for (int d = 0; d < D; d++) {
        query[d] = scale * to_float(q[d]);
        sums[d] = 0;
    }
    for (int first = 0; first < count; first += DECODE_KEYS) {
        const int n = count - first < DECODE_KEYS ? count - first : DECODE_KEYS;
        const float old = max;
        for (int j = 0; j < n; j++) {
            const floatX *k = keys + (first + j) * stride;
            float score = 0;
#pragma omp simd reduction(+ : score)
            for (int d = 0; d < D; d++)
                score += query[d] * to_float(k[d]);
            p[j] = score;
            max = score > max ? score : max;
        }
        const float shrink = expf(old - max);
        total *= shrink;
        for (int d = 0; d < D; d++)
            sums[d] *= shrink;
        for (int j = 0; j < n; j++) {
            const floatX *v = values + (first + j) * stride;
            const float weight = expf(p[j] - max);
            total += weight;
#pragma omp simd
            for (int d = 0; d < D; d++)
                sums[d] += weight * to_float(v[d]);
        }
    }
    for (int d = 0; d < D; d++)
        out[d] = to_floatX(sums[d] / total);
}

static void attention_decode(floatX *out, const floatX *qkv, const floatX *keys, const floatX *values, int position,
                             int capacity, struct attention_shape shape, void *workspace, struct device *dev) {
    const int H = shape.num_heads, Hkv = shape.num_query_groups, D = shape.head_dim;
    const int64_t stride = (int64_t)Hkv * D;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < (int64_t)shape.B * H; i++) {
        const int64_t b = i / H, h = i % H, at = b * capacity * stride + h / (H / Hkv) * D;
        decode_head(out + i * D, qkv + (b * (H + 2 * Hkv) + h) * D, keys + at, values + at, stride, position + 1, D,
                    shape.scale);
    }
}

#endif
