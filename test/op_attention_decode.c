// Attention of one new token per sequence against a KV cache, compared with a naive loop in double.
#include "kernels/attention/decode.cuh"
#include "test/attention_shape.h" // shape_of
#include "test/fails.h"           // assert_fails
#include "test/testing.h"

static struct device dev;

// Returns the attention (B, T, H D) of every token to the `window` keys up to its own one; the caller frees it.
static double *naive_attention(const double *qkv, struct attention_shape s, int window) {
    const int H = s.num_heads, Hkv = s.num_query_groups, D = s.head_dim;
    const int64_t W = token_elements(s);
    double *out = test_doubles((int64_t)s.B * s.T * H * D), *p = test_doubles(window);
    for (int64_t row = 0; row < (int64_t)s.B * s.T; row++)
        for (int h = 0; h < H; h++) {
            const double *q = qkv + row * W + (int64_t)h * D, *k = q + (int64_t)(H - h + h / (H / Hkv)) * D;
            const int count = row % s.T < window ? (int)(row % s.T) + 1 : window;
            double *o = out + (row * H + h) * D, sum = 0;
            for (int back = 0; back < count; back++) {
                double score = 0;
                for (int d = 0; d < D; d++)
                    score += s.scale * q[d] * k[d - back * W];
                if (s.softcap > 0)
                    score = s.softcap * tanh(score / s.softcap);
                sum += p[back] = exp(score); // inputs are in [-1, 1): no score overflows
            }
            for (int back = 0; back < count; back++)
                for (int d = 0; d < D; d++)
                    o[d] += p[back] / sum * k[(int64_t)Hkv * D + d - back * W];
        }
    free(p);
    return out;
}

// Returns the tolerance. A result is rounded once. A score is a sum of D products in fp32, whose error enters its
// weight; sums are over T keys.
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

static int least(int a, int b) { return a < b ? a : b; }

// A cache of keys and values, whose slots hold NaN until something is stored there.
struct cache {
    floatX *keys, *values;
    size_t bytes; // of the keys, and of the values
};
static struct cache cache_of(struct attention_shape s, int capacity) {
    struct cache c;
    c.bytes = (size_t)s.B * (size_t)(s.num_query_groups * capacity * s.head_dim) * sizeof(floatX);
    c.keys = (floatX *)guarded(c.bytes);
    c.values = (floatX *)guarded(c.bytes);
    return c;
}
static void cache_free(struct cache c) {
    guarded_free(c.keys, c.bytes);
    guarded_free(c.values, c.bytes);
}
// Appends `tokens` rows of each sequence, from position starts[b] on and at most to ends[b]. Rows after ends[b], as
// after a prompt that is shorter than another, are NaN. starts, ends: as kv_cache_append's.
static void append(struct cache c, const floatX *qkv, struct attention_shape s, const int32_t *starts,
                   const int32_t *ends, int tokens, int capacity) {
    const int64_t W = token_elements(s);
    floatX *rows = (floatX *)test_alloc((size_t)(s.B * tokens * W) * sizeof *rows);
    memset(rows, GUARD, (size_t)(s.B * tokens * W) * sizeof *rows);
    for (int b = 0; b < s.B; b++) {
        const int start = starts ? starts[b] : 0, count = ends ? least(ends[b] - start, tokens) : tokens;
        memcpy(rows + b * tokens * W, qkv + ((int64_t)b * s.T + start) * W, (size_t)(count * W) * sizeof *rows);
    }
    s.T = tokens;
    kv_cache_append(c.keys, c.values, rows, starts, ends, capacity, s, &dev);
    free(rows);
}
// Checks that a cache's slots after the last of s.T positions do not depend on the steps in which the positions came.
static void assert_same_cache(struct cache a, struct cache b, struct attention_shape s, int capacity) {
    const int64_t head = (int64_t)capacity * s.head_dim;
    const size_t bytes = (size_t)least(s.T, capacity) * (size_t)s.head_dim * sizeof(floatX);
    for (int64_t i = 0; i < s.B * s.num_query_groups; i++) {
        assert_memory_equal(a.keys + i * head, b.keys + i * head, bytes);
        assert_memory_equal(a.values + i * head, b.values + i * head, bytes);
    }
}

// Checks decoding. The first prompts[b] tokens of sequence b are fed at once (if all prompts are 0, none are), the
// others one by one. Each result equals attention over a whole sequence, in which a query sees `capacity` keys.
static void check_decode(struct attention_shape s, int capacity, const int *prompts) {
    const int64_t W = token_elements(s), C = (int64_t)s.num_heads * s.head_dim;
    uint64_t seed = 6;
    double *exact;
    floatX *qkv = test_floats(&exact, s.B * s.T * W, 1, &seed);
    double *reference = naive_attention(exact, s, capacity), *rows = test_doubles(s.B * s.T * C);
    const struct cache fed = cache_of(s, capacity), at_once = cache_of(s, capacity), halves = cache_of(s, capacity);
    floatX *token = (floatX *)test_alloc((size_t)(s.B * W) * sizeof *token);
    floatX *out = (floatX *)guarded((size_t)(s.B * C) * sizeof *out);
    int32_t *positions = (int32_t *)test_alloc((size_t)s.B * sizeof *positions);
    int longest = 0, shortest = s.T;
    for (int b = 0; b < s.B; b++) {
        positions[b] = prompts[b];
        longest = prompts[b] > longest ? prompts[b] : longest;
        shortest = least(prompts[b], shortest);
    }
    test_case(6, "B %d, T %d, %d heads, %d KV heads of %d, softcap %g, capacity %d, prompts of %d to %d", s.B, s.T,
              s.num_heads, s.num_query_groups, s.head_dim, (double)s.softcap, capacity, shortest, longest);
    if (longest > 0)
        append(fed, qkv, s, NULL, positions, longest, capacity);
    struct attention_shape one = s;
    one.T = 1;
    for (int step = 0; step < s.T - shortest; step++) {
        for (int b = 0; b < s.B; b++) {
            positions[b] = least(prompts[b] + step, s.T - 1); // a sequence that is at its end waits for the others
            memcpy(token + b * W, qkv + ((int64_t)b * s.T + positions[b]) * W, (size_t)W * sizeof *token);
        }
        append(fed, qkv, s, positions, NULL, 1, capacity);
        attention_decode(out, token, fed.keys, fed.values, positions, capacity, one, NULL, &dev);
        for (int64_t i = 0; i < s.B * C; i++)
            rows[(i / C * s.T + positions[i / C]) * C + i % C] = to_float(out[i]);
    }
    for (int b = 0; b < s.B; b++)
        memcpy(rows + b * s.T * C, reference + b * s.T * C, (size_t)(prompts[b] * C) * sizeof *rows);
    assert_close(rows, reference, s.B * s.T * C, bound_of(s));

    append(at_once, qkv, s, NULL, NULL, s.T, capacity);
    assert_same_cache(fed, at_once, s, capacity);
    for (int b = 0; b < s.B; b++)
        positions[b] = s.T / 2;
    append(halves, qkv, s, NULL, positions, s.T / 2 + 1, capacity);
    append(halves, qkv, s, positions, NULL, s.T - s.T / 2, capacity);
    assert_same_cache(halves, at_once, s, capacity);

    cache_free(fed);
    cache_free(at_once);
    cache_free(halves);
    guarded_free(out, (size_t)(s.B * C) * sizeof *out);
    free(reference);
    free(positions);
    free(rows);
    free(token);
    free(qkv);
    free(exact);
}
static void decoding_equals_forward(void **state) {
    static const int none[3] = {0, 0, 0}, staggered[3] = {0, 1, 2}, some[3] = {40, 1, 69};
    check_decode(shape_of(3, 70, 6, 2, 24), 80, staggered);
    check_decode(shape_of(3, 70, 6, 2, 24), 80, some);
    check_decode(shape_of(1, 129, 2, 1, 64), 129, none);
    check_decode(shape_of(1, 1, 1, 1, 256), 1, none);
    check_decode(shape_of(1, 700, 1, 1, 8), 700, none); // more keys than a run has
}
// Checks a ring of the window's size, with prompts that end before, at and after each turn of the ring.
static void decoding_in_a_ring_equals_a_window(void **state) {
    static const int windows[] = {1, 2, 7, 32, 33};
    for (int i = 0; i < 5; i++) {
        const int W = windows[i], prompts[8] = {W - 1, W, W + 1, 2 * W - 1, 2 * W, 2 * W + 1, 3 * W, 1};
        static const int none[8] = {0};
        check_decode(shape_of(8, 4 * W + 2, 4, 2, 24), W, prompts);
        check_decode(shape_of(2, 3 * W + 2, 3, 3, 40), W, none);
    }
    static const int behind[2] = {520, 1030};
    check_decode(shape_of(2, 1040, 1, 1, 8), 513, behind); // more keys than a run has
}
// Checks scores so large that the cap bends them.
static void decoding_caps_scores(void **state) {
    static const int prompts[3] = {9, 40, 1}, one[1] = {1000};
    struct attention_shape s = shape_of(3, 70, 6, 2, 64), run = shape_of(1, 1100, 1, 1, 8);
    s.scale = run.scale = 1;
    s.softcap = 3;
    run.softcap = 0.5f;
    check_decode(s, 70, prompts);
    check_decode(s, 13, prompts);
    check_decode(run, 1100, one);
}
// Decodes heads that are larger than any backend takes.
static void decode_wide_head(void *unused) {
    enum { D = 264 };
    const struct attention_shape s = shape_of(1, 1, 1, 1, D);
    static const int32_t positions[1] = {0};
    floatX *qkv = (floatX *)test_alloc(3 * D * sizeof(floatX)), *cache = (floatX *)test_alloc(2 * D * sizeof(floatX)),
           *out = (floatX *)test_alloc(D * sizeof(floatX));
    attention_decode(out, qkv, cache, cache + D, positions, 1, s, NULL, &dev);
}
static void wide_heads_are_refused(void **state) {
    assert_fails(decode_wide_head, NULL, "heads of 264: expected at most 256");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decoding_equals_forward),
        cmocka_unit_test(decoding_in_a_ring_equals_a_window),
        cmocka_unit_test(decoding_caps_scores),
        cmocka_unit_test(wide_heads_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
