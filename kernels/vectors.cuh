// SIMD vectors of the CPU target in GNU C, as wide as the instruction set that this file is compiled for, with what the
// compiler does not find by itself; for vectors_floatx.cuh, blocks.cuh and xvec.cuh.
#pragma once
#include "kernels/device.cuh" // bf16
#if defined(__SSE2__)
#include <immintrin.h> // _mm512_max_ps and its narrower forms, _mm512_dpbf16_ps, bf16 conversions
#elif defined(__aarch64__)
#include <arm_neon.h> // vfmaq_f32, vbfdotq_f32
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
typedef float vec __attribute__((vector_size(4 * LANES), may_alias));
typedef uint32_t vec_words __attribute__((vector_size(4 * LANES), may_alias));
typedef uint32_t word __attribute__((may_alias)); // a float's bits or two neighboring bf16

// Loads LANES floats; p is aligned to their size.
static inline vec vec_load(const float *p) { return *(const vec *)p; }
// Stores LANES floats; p is aligned to their size.
static inline void vec_store(float *p, vec x) { *(vec *)p = x; }
static inline vec vec_set(float x) {
    const vec zero = {0};
    return x - zero;
}

// Returns the larger of a and b in each lane. A NaN in b comes through, one in a does not.
static inline vec vec_max(vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (vec)_mm_max_ps((__m128)a, (__m128)b);
#else
    for (int i = 0; i < LANES; i++)
        b[i] = a[i] > b[i] ? a[i] : b[i];
    return b;
#endif
}
// Returns the smaller of a and b in each lane. A NaN in b comes through, one in a does not.
static inline vec vec_min(vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (vec)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (vec)_mm_min_ps((__m128)a, (__m128)b);
#else
    for (int i = 0; i < LANES; i++)
        b[i] = a[i] < b[i] ? a[i] : b[i];
    return b;
#endif
}

// Returns sum + a b, rounded once if the CPU can. The compiler itself might fuse only some inlined copies of a loop.
static inline vec vec_fma(vec sum, vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
    return sum + a * b;
#endif
}

// Returns the sum of all lanes, half added onto half.
static inline float vec_sum(vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    for (int n = LANES / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++)
            x[i] += x[i + n];
    return x[0];
#endif
}
// Returns the sum of all lanes, added one after the other.
ALWAYS_INLINE float vec_sum_in_order(vec x) {
    float lanes[LANES], sum = 0;
    memcpy(lanes, &x, sizeof lanes);
    for (int i = 0; i < LANES; i++)
        sum += lanes[i];
    return sum;
}

// Loads LANES signed bytes, each to a word; p need not be aligned. gcc 12 widens the generic form byte by byte.
static inline vec_words vec_load_signed_bytes(const void *p) {
#if defined(__AVX512F__)
    return (vec_words)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
    return (vec_words)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#elif defined(__aarch64__)
    uint32_t four;
    memcpy(&four, p, sizeof four);
    return (vec_words)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four))));
#else
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    typedef int32_t words __attribute__((vector_size(4 * LANES)));
    bytes x;
    memcpy(&x, p, sizeof x);
    return (vec_words) __builtin_convertvector(x, words);
#endif
}

// Lanes of a (0 to LANES - 1) and of b (from LANES on) in the order of the constants that follow.
#if defined(__clang__) || __GNUC__ >= 12
#define VEC_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define VEC_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vec_words){__VA_ARGS__})
#endif

enum { EXP2_VECS = 4 };
// x[i] = 2^x[i] for x[i] <= 127, to 2e-7 relative; 0 from 2^-126.5 down; NaN stays. With x = n + f, |f| <= 1/2, 2^f is
// a polynomial of degree 5 with p(0) = 1, minimax in the relative error (9.2e-8), by Lawson's iteration. Adding 1.5 *
// 2^23 + 127 leaves n + 127 in the last bits, for the exponent field: n = -127 makes the factor 0. Four vectors go step
// by step, as one vector's steps are a chain of 12 dependent operations, too long for a core's scheduler.
static inline void vec_exp2(vec x[EXP2_VECS]) {
    static const float coefficients[5] = {9.671512649e-03f, 5.550733744e-02f, 2.402224209e-01f, 6.931469776e-01f, 1.0f};
    const float magic = 0x1.8p23f + 127;
    const vec least = vec_set(-127.0f);
    vec t[EXP2_VECS], p[EXP2_VECS];
#define EACH _Pragma("GCC unroll 4") for (int i = 0; i < EXP2_VECS; i++)
    EACH x[i] = vec_max(least, x[i]);
    EACH t[i] = x[i] + magic;
    EACH p[i] = t[i] - magic;
    EACH x[i] = x[i] - p[i];
    EACH p[i] = x[i] * 1.326472707e-03f + coefficients[0];
#pragma GCC unroll 4
    for (int k = 1; k < 5; k++)
        EACH p[i] = p[i] * x[i] + coefficients[k];
    EACH x[i] = p[i] * (vec)((vec_words)t[i] << 23);
#undef EACH
}

// Returns tanh x, to 3.6e-7 relative and at most 1 in size; NaN stays. It is x P(x^2) / Q(x^2), a weighted minimax fit
// of the relative error (2.1e-8) up to 9, from where fp32's tanh is 1.
static inline vec vec_tanh(vec x) {
    x = vec_min(vec_set(9.0f), vec_max(vec_set(-9.0f), x));
    const vec y = x * x;
    const vec p = (((0x1.cadc92p-27f * y + 0x1.59c33ap-16f) * y + 0x1.ca2c6cp-9f) * y + 0x1.120b1ap-3f) * y + 1.0f;
    const vec q = (((0x1.a18006p-21f * y + 0x1.588606p-12f) * y + 0x1.a7f7e8p-6f) * y + 0x1.de5ad6p-2f) * y + 1.0f;
    return vec_min(vec_set(1.0f), vec_max(vec_set(-1.0f), x * p / q));
}

// Rounds to bf16, to nearest, ties to even, in the upper half of each word; the lower half holds leftovers. A quiet NaN
// stays one unless the top 8 bits of its fraction are all ones, which arithmetic on bf16 never gives.
static inline vec_words vec_round_bf16(vec x) {
    const vec_words bits = (vec_words)x;
    return bits + 0x7fffu + ((bits >> 16) & 1u);
}

#if defined(__AVX512BF16__)
// Stores x0 and x1 as bf16: to `pairs` (LANES) as VNNI pairs with x0[i] in the low half, and to row0 and row1 (LANES
// each) as rows. `pairs` may be NULL, and so may row0 with row1. Addresses are aligned to what is stored there.
static inline void vec_store_bf16(word *pairs, bf16 *row0, bf16 *row1, vec x0, vec x1) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)x1, (__m512)x0); // x0 in the lower half
    if (pairs) {
        const __m512i halves = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                                6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        _mm512_store_si512(pairs, _mm512_permutexvar_epi16(halves, both));
    }
    if (row0) {
        _mm256_store_si256((__m256i *)row0, _mm512_castsi512_si256(both));
        _mm256_store_si256((__m256i *)row1, _mm512_extracti64x4_epi64(both, 1));
    }
}
#else
static inline void vec_store_bf16(word *pairs, bf16 *row0, bf16 *row1, vec x0, vec x1) {
    const vec_words r0 = vec_round_bf16(x0) >> 16, r1 = vec_round_bf16(x1);
    typedef uint16_t halves __attribute__((vector_size(2 * LANES), may_alias));
    if (pairs)
        *(vec_words *)pairs = r0 | (r1 & 0xffff0000u);
    if (row0) {
        *(halves *)row0 = __builtin_convertvector(r0, halves);
        *(halves *)row1 = __builtin_convertvector(r1 >> 16, halves);
    }
}
#endif

// out[j][i] = in[i][j] for 16 x 16 words; strides in words, rows aligned to 64 bytes. `out` and `in` do not overlap.
static inline void transpose_16x16(word *out, int out_stride, const word *in, int in_stride) {
#if LANES == 16
    vec_words r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        r[i] = *(const vec_words *)(in + i * in_stride);
// EXCHANGE swaps the off-diagonal quarters of every 2H x 2H square: H = 1, 2, 4, 8 together transpose. Of two rows, one
// after the other, lane LOW becomes lane l of the upper row, and lane HIGH lane l of the lower row.
#define LOW(H, l) ((l) & (H) ? 16 + (l) - (H) : (l))
#define HIGH(H, l) ((l) & (H) ? 16 + (l) : (l) + (H))
#define LANES_OF(from, H)                                                                                              \
    from(H, 0), from(H, 1), from(H, 2), from(H, 3), from(H, 4), from(H, 5), from(H, 6), from(H, 7), from(H, 8),        \
        from(H, 9), from(H, 10), from(H, 11), from(H, 12), from(H, 13), from(H, 14), from(H, 15)
#define EXCHANGE(H)                                                                                                    \
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) {                                                            \
        if (i & (H))                                                                                                   \
            continue;                                                                                                  \
        const vec_words a = r[i], b = r[i + (H)];                                                                      \
        r[i] = VEC_SHUFFLE(a, b, LANES_OF(LOW, H));                                                                    \
        r[i + (H)] = VEC_SHUFFLE(a, b, LANES_OF(HIGH, H));                                                             \
    }
    EXCHANGE(1)
    EXCHANGE(2)
    EXCHANGE(4)
    EXCHANGE(8)
#undef EXCHANGE
#undef LANES_OF
#undef HIGH
#undef LOW
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        *(vec_words *)(out + i * out_stride) = r[i];
#else
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++)
            out[j * out_stride + i] = in[i * in_stride + j];
#endif
}

// ---- Dot products of bf16 pairs ----

// BF16_DOT: vec_dot is an instruction. BF16_DOT_EMULATE computes it in fp32, to test its kernels anywhere.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) || defined(BF16_DOT_EMULATE)
#define BF16_DOT 1
#else
#define BF16_DOT 0
#endif
#if defined(BF16_DOT_EMULATE) || !BF16_DOT
#define VEC_DOT_NAME "emulated bf16 dot"
#elif defined(__AVX512BF16__)
#define VEC_DOT_NAME "AVX-512 bf16 dot"
#else
#define VEC_DOT_NAME "NEON bf16 dot"
#endif

// Adds a dot product of two bf16 pairs to each lane: returns sum[i] + low(a[i]) low(b[i]) + high(a[i]) high(b[i]), of
// the halves of each word. x86 adds the high halves' product first, and rounds each sum to nearest (Intel SDM,
// VDPBF16PS); Arm's BFDOT adds the products, rounds to odd, then adds to sum. The instructions take denormals as 0.
static inline vec vec_dot(vec sum, vec_words a, vec_words b) {
#if defined(__AVX512BF16__) && !defined(BF16_DOT_EMULATE)
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && !defined(BF16_DOT_EMULATE)
    return (vec)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
#else
    sum = vec_fma(sum, (vec)(a & 0xffff0000u), (vec)(b & 0xffff0000u));
    return vec_fma(sum, (vec)(a << 16), (vec)(b << 16));
#endif
}
// Loads LANES words; p is aligned to their size.
static inline vec_words vec_words_load(const word *p) { return *(const vec_words *)p; }
static inline vec_words vec_words_set(word x) {
    const vec_words zero = {0};
    return x - zero;
}
