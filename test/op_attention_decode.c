// Attention of one new token per sequence against a KV cache: against a naive loop in double.
#include "kernels/attention_decode.cuh"
#include "test/testing.h"

static struct device dev;

static struct attention_shape shape_of(int B, int T, int num_heads, int num_query_groups, int head_dim) {
    struct attention_shape shape;
    memset(&shape, 0, sizeof shape);
    shape.B = B;
    shape.T = T;
    shape.num_heads = num_heads;
    shape.num_query_groups = num_query_groups;
    shape.head_dim = head_dim;
    shape.scale = (float)(1 / sqrt((double)head_dim));
    return shape;
}
static int64_t token_elements(struct attention_shape s) {
    return (int64_t)(s.num_heads + 2 * s.num_query_groups) * s.head_dim;
}

// The attention of every token of s.T to those up to itself.
static double *naive_attention(const double *qkv, struct attention_shape s) {
    const int H = s.num_heads, Hkv = s.num_query_groups, D = s.head_dim;
    const int64_t W = token_elements(s);
    double *out = test_doubles((int64_t)s.B * s.T * H * D), *p = test_doubles(s.T);
    for (int64_t row = 0; row < (int64_t)s.B * s.T; row++)
        for (int h = 0; h < H; h++) {
            const double *q = qkv + row * W + (int64_t)h * D, *k = q + (int64_t)(H - h + h / (H / Hkv)) * D;
            double *o = out + (row * H + h) * D, sum = 0;
            for (int back = 0; back <= row % s.T; back++) {
                double score = 0;
                for (int d = 0; d < D; d++)
                    score += q[d] * k[d - back * W];
                sum += p[back] = exp(s.scale * score); // inputs in [-1, 1): no score overflows
            }
            for (int back = 0; back <= row % s.T; back++)
                for (int d = 0; d < D; d++)
                    o[d] += p[back] / sum * k[(int64_t)Hkv * D + d - back * W];
        }
    free(p);
    return out;
}

// The result is rounded once. A score is a sum of D products in fp32, whose error enters its weight; sums are over T.
static double bound_of(struct attention_shape s) {
    const double score = s.scale * s.head_dim;
    return FLOATX_ROUNDING + 4 * (0x1p-24 * (sqrt(s.head_dim) * score + sqrt(s.T) + 4) + 4e-7);
}

enum { GUARD_BYTES = 256, GUARD = 0xff }; // 0xffff.. is a NaN in bf16 and fp32

static void *guarded(size_t bytes) {
    char *memory = (char *)test_alloc(bytes + 2 * GUARD_BYTES);
    memset(memory, GUARD, bytes + 2 * GUARD_BYTES);
    return memory + GUARD_BYTES;
}
static void guarded_free(void *memory, size_t bytes) {
    const unsigned char *guard = (const unsigned char *)memory;
    for (int i = 0; i < GUARD_BYTES; i++) {
        assert_int_equal(guard[-1 - i], GUARD);
        assert_int_equal(guard[bytes + (size_t)i], GUARD);
    }
    free((char *)memory - GUARD_BYTES);
}

// Fed token by token through the cache, each sequence one position behind the one before, each row equals forward's;
// the cache is the one that all tokens at once make.
static void check_decode(struct attention_shape s, int capacity) {
    const int64_t W = token_elements(s), C = (int64_t)s.num_heads * s.head_dim, out_count = s.B * s.T * C,
                  heads = (int64_t)s.B * s.num_query_groups, head = (int64_t)capacity * s.head_dim;
    const size_t cache_bytes = (size_t)(heads * head) * sizeof(floatX);
    uint64_t seed = 6;
    test_case(seed, "B %d, T %d, %d heads, %d KV heads of %d, capacity %d", s.B, s.T, s.num_heads, s.num_query_groups,
              s.head_dim, capacity);
    double *exact;
    floatX *qkv = test_floats(&exact, s.B * s.T * W, 1, &seed);
    double *reference = naive_attention(exact, s);
    floatX *caches[4]; // keys, values; those of all tokens at once
    for (int i = 0; i < 4; i++)
        caches[i] = (floatX *)guarded(cache_bytes);
    floatX *token = (floatX *)test_alloc((size_t)(s.B * W) * sizeof *token);
    int32_t *positions = (int32_t *)test_alloc((size_t)s.B * sizeof *positions);
    floatX *out = (floatX *)guarded((size_t)(s.B * C) * sizeof *out);
    double *rows = test_doubles(out_count);
    struct attention_shape one = s;
    one.T = 1;
    for (int step = 0; step < s.T + s.B - 1; step++) {
        for (int b = 0; b < s.B; b++) {
            const int t = step < b ? 0 : step - b < s.T ? step - b : s.T - 1;
            positions[b] = t;
            memcpy(token + b * W, qkv + ((int64_t)b * s.T + t) * W, (size_t)W * sizeof *token);
        }
        kv_cache_append(caches[0], caches[1], token, positions, capacity, one, &dev);
        attention_decode(out, token, caches[0], caches[1], positions, capacity, one, NULL, &dev);
        for (int64_t i = 0; i < s.B * C; i++)
            rows[(i / C * s.T + positions[i / C]) * C + i % C] = to_float(out[i]);
    }
    assert_close(rows, reference, out_count, bound_of(s));
    kv_cache_append(caches[2], caches[3], qkv, NULL, capacity, s, &dev);
    for (int64_t i = 0; i < 2 * heads; i++)
        assert_memory_equal(caches[i % 2] + i / 2 * head, caches[2 + i % 2] + i / 2 * head,
                            (size_t)s.T * (size_t)s.head_dim * sizeof(floatX));
    for (int i = 0; i < 4; i++)
        guarded_free(caches[i], cache_bytes);
    guarded_free(out, (size_t)(s.B * C) * sizeof *out);
    free(reference);
    free(positions);
    free(rows);
    free(token);
    free(qkv);
    free(exact);
}
static void decoding_equals_forward(void **state) {
    check_decode(shape_of(3, 70, 6, 2, 24), 80);
    check_decode(shape_of(1, 129, 2, 1, 64), 129);
    check_decode(shape_of(1, 1, 1, 1, 256), 1);
    check_decode(shape_of(1, 700, 1, 1, 8), 700); // more than a run of keys
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decoding_equals_forward),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
