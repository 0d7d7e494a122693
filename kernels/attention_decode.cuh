// Attention of one new token per sequence against a cache of keys and values, as generation needs it.
#pragma once
#include "kernels/attention_shape.cuh" // struct attention_shape
#include "kernels/device.cuh"          // floatX, struct device
#include <math.h>                      // expf, INFINITY

// The new token's k and v, out of its qkv row, become the cache's row `position`.
static void kv_cache_append(floatX *keys /*(B, capacity, Hkv*D)*/, floatX *values /*(B, capacity, Hkv*D)*/,
                            const floatX *qkv /*(B, (H + 2*Hkv)*D)*/, int position, int capacity,
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

static size_t attention_decode_workspace_bytes(struct attention_shape shape, int capacity, struct device *dev) { return 0; }

enum { DECODE_KEYS = 64, DECODE_MAX_HEAD_DIM = 256 };

// out = softmax(scale q K^T) V of one head; rows of K and V are `stride` apart. Online softmax over runs of 64 keys.
static void decode_head(floatX *out, const floatX *q, const floatX *keys, const floatX *values, int64_t stride, int count,
                        int D, float scale) {
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

// Keys 0..position are attended to; the new token's own are in the cache already. shape.T is not used.
static void attention_decode(floatX *out /*(B, H*D)*/, const floatX *qkv /*(B, (H + 2*Hkv)*D)*/,
                             const floatX *keys /*(B, capacity, Hkv*D)*/, const floatX *values /*(B, capacity, Hkv*D)*/,
                             int position, int capacity, struct attention_shape shape, void *workspace, struct device *dev) {
    const int H = shape.num_heads, Hkv = shape.num_query_groups, D = shape.head_dim;
    const int64_t stride = (int64_t)Hkv * D;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < (int64_t)shape.B * H; i++) {
        const int64_t b = i / H, h = i % H, at = b * capacity * stride + h / (H / Hkv) * D;
        decode_head(out + i * D, qkv + (b * (H + 2 * Hkv) + h) * D, keys + at, values + at, stride, position + 1, D,
                    shape.scale);
    }
}
