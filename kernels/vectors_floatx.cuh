// Arrays of floatX as SIMD vectors of floats: loads and stores at any alignment, ends of rows, and the functions of
// activations and the loss. These take FLOATX_VECS vectors at a time, and make each step for all of them before the
// next: one vector's steps are a chain of dependent operations, too long for a core's scheduler.
//
// The functions give vector_math.cuh's bits in fp32. In bf16 errors are below 1e-4, and denormals may count as 0.
#pragma once
#include "kernels/device.cuh" // floatX

#ifndef TARGET_CUDA
#include "kernels/vectors.cuh" // vec

enum { FLOATX_VECS = 4, FLOATX_GROUP = FLOATX_VECS * LANES };
#define EACH_VEC _Pragma("GCC unroll 4") for (int i = 0; i < FLOATX_VECS; i++)

// ---- Loads and stores at any alignment ----

typedef float vec_anywhere __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t half_words __attribute__((vector_size(2 * LANES), may_alias));
typedef uint16_t half_words_anywhere __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#ifdef PRECISION_BF16
ALWAYS_INLINE vec floatx_load(const floatX *p) {
    const half_words halves = *(const half_words_anywhere *)p;
#if defined(__AVX512BW__) // one operation; widening and shifting would be two, on the ports that additions need
    const __m512i upper = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0, 6, 0, 5, 0, 4, 0,
                                           3, 0, 2, 0, 1, 0, 0, 0);
    return (vec)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, upper, _mm512_castsi256_si512((__m256i)halves));
#else
    return (vec)(__builtin_convertvector(halves, vec_words) << 16);
#endif
}
ALWAYS_INLINE void floatx_store(floatX *p, vec x) {
#if defined(__AVX512BF16__)
    *(half_words_anywhere *)p = (half_words)_mm512_cvtneps_pbh((__m512)x);
#else
    *(half_words_anywhere *)p = __builtin_convertvector(vec_round_bf16(x) >> 16, half_words);
#endif
}
#else
ALWAYS_INLINE vec floatx_load(const floatX *p) { return *(const vec_anywhere *)p; }
ALWAYS_INLINE void floatx_store(floatX *p, vec x) { *(vec_anywhere *)p = x; }
#endif
// Loads LANES floats; p need not be aligned.
ALWAYS_INLINE vec float_load(const float *p) { return *(const vec_anywhere *)p; }
// Stores LANES floats; p need not be aligned.
ALWAYS_INLINE void float_store(float *p, vec x) { *(vec_anywhere *)p = x; }

#if defined(__AVX512BW__) &&                                                                                           \
    defined(__AVX512VL__) // by masks: a call of memcpy in a row's loop would spill the registers
ALWAYS_INLINE __mmask16 vec_mask(int count) { return (__mmask16)((1u << count) - 1); }
// Loads the first `count` < LANES floats; the other lanes are 0.
ALWAYS_INLINE vec float_load_some(const float *p, int count) { return (vec)_mm512_maskz_loadu_ps(vec_mask(count), p); }
ALWAYS_INLINE void float_store_some(float *p, vec x, int count) {
    _mm512_mask_storeu_ps(p, vec_mask(count), (__m512)x);
}
#ifdef PRECISION_BF16
// Loads the first `count` < LANES elements in fp32; the other lanes are 0.
ALWAYS_INLINE vec floatx_load_some(const floatX *p, int count) {
    const __m256i halves = _mm256_maskz_loadu_epi16(vec_mask(count), p);
    floatX padded[LANES];
    memcpy(padded, &halves, sizeof padded);
    return floatx_load(padded);
}
// Stores the first `count` < LANES floats of x, rounded to floatX.
ALWAYS_INLINE void floatx_store_some(floatX *p, vec x, int count) {
    floatX padded[LANES];
    floatx_store(padded, x);
    __m256i halves;
    memcpy(&halves, padded, sizeof padded);
    _mm256_mask_storeu_epi16(p, vec_mask(count), halves);
}
#else
ALWAYS_INLINE vec floatx_load_some(const floatX *p, int count) { return float_load_some(p, count); }
ALWAYS_INLINE void floatx_store_some(floatX *p, vec x, int count) { float_store_some(p, x, count); }
#endif
#else
static inline vec floatx_load_some(const floatX *p, int count) {
    floatX padded[LANES];
    memset(padded, 0, sizeof padded);
    memcpy(padded, p, (size_t)count * sizeof *p);
    return floatx_load(padded);
}
static inline void floatx_store_some(floatX *p, vec x, int count) {
    floatX padded[LANES];
    floatx_store(padded, x);
    memcpy(p, padded, (size_t)count * sizeof *p);
}
static inline vec float_load_some(const float *p, int count) {
    float padded[LANES];
    memset(padded, 0, sizeof padded);
    memcpy(padded, p, (size_t)count * sizeof *p);
    return float_load(padded);
}
static inline void float_store_some(float *p, vec x, int count) {
    float padded[LANES];
    float_store(padded, x);
    memcpy(p, padded, (size_t)count * sizeof *p);
}
#endif

// Copies `count` < FLOATX_GROUP elements to a whole group, whose other elements become `rest`, rounded.
static inline void floatx_pad(floatX group[FLOATX_GROUP], const floatX *p, int count, float rest) {
    for (int i = count; i < FLOATX_GROUP; i++)
        group[i] = to_floatX(rest);
    memcpy(group, p, (size_t)count * sizeof *p);
}

// ---- Rows, a vector at a time ----

// Loads elements c, c + 1, ... of a row of C > c elements in fp32; 0 past its end.
ALWAYS_INLINE vec row_vec_load(const floatX *row, int c, int C) {
    return C - c >= LANES ? floatx_load(row + c) : floatx_load_some(row + c, C - c);
}
// Stores x as elements c, c + 1, ... of a row of C > c elements, rounded to floatX; nothing past its end.
ALWAYS_INLINE void row_vec_store(floatX *row, vec x, int c, int C) {
    if (C - c >= LANES)
        floatx_store(row + c, x);
    else
        floatx_store_some(row + c, x, C - c);
}
// Returns x, elements c, c + 1, ... of a row of C > c, with 0 past the row's end.
ALWAYS_INLINE vec row_vec_within(vec x, int c, int C) {
    if (C - c < LANES)
        for (int i = C - c; i < LANES; i++)
            x[i] = 0;
    return x;
}

// ---- Functions ----

// x[i] = e^x[i], as vector_expf: infinity above the largest float, 0 below 2^-125.5, NaN stays. x is kept within
// limits. At the lower limit the exponent field, and so the factor, is 0; at the upper limit the product overflows.
ALWAYS_INLINE void vecs_exp(vec x[FLOATX_VECS]) {
    const float magic = 0x1.8p23f + 126;
    vec t[FLOATX_VECS], p[FLOATX_VECS];
    EACH_VEC x[i] = vec_min(vec_set(89.0f), vec_max(vec_set(-87.3f), x[i]));
    EACH_VEC t[i] = x[i] * 0x1.715476p0f + magic;
    EACH_VEC p[i] = t[i] - magic;
#ifdef PRECISION_BF16
    // 2 * 2^f, f = x log2(e) - n, to 2.8e-6: minimax in the relative error, of degree 4
    EACH_VEC x[i] = x[i] * 0x1.715476p0f - p[i];
    EACH_VEC p[i] = x[i] * 0x1.3a02ccp-6f + 0x1.c9fc46p-4f;
    EACH_VEC p[i] = p[i] * x[i] + 0x1.ec0378p-2f;
    EACH_VEC p[i] = p[i] * x[i] + 0x1.62e12cp+0f;
    EACH_VEC p[i] = p[i] * x[i] + 2.0f;
#else
    static const float coefficients[6] = {0x1.123a0ap-6f, 0x1.5558f2p-4f, 0x1.555492p-2f, 0x1.fffffcp-1f, 2.0f, 2.0f};
    EACH_VEC x[i] = (x[i] - p[i] * 0.693359375f) + p[i] * 2.12194440e-4f;
    EACH_VEC p[i] = x[i] * 0x1.6a23f0p-9f + coefficients[0];
#pragma GCC unroll 6
    for (int k = 1; k < 6; k++)
        EACH_VEC p[i] = p[i] * x[i] + coefficients[k];
#endif
    EACH_VEC x[i] = p[i] * (vec)((vec_words)t[i] << 23);
}

// Returns a / b; in bf16 to 2^-14, where there is an instruction for it.
ALWAYS_INLINE vec vec_divide(vec a, vec b) {
#if defined(PRECISION_BF16) && defined(__AVX512F__)
    return a * (vec)_mm512_rcp14_ps((__m512)b);
#else
    return a / b;
#endif
}

ALWAYS_INLINE void vecs_logistic(vec x[FLOATX_VECS]) {
    EACH_VEC x[i] = -x[i];
    vecs_exp(x);
    EACH_VEC x[i] = vec_divide(vec_set(1.0f), 1.0f + x[i]);
}

#endif
