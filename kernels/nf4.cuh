// NF4, the 4-bit format of QLoRA (Dettmers et al. 2023, arXiv 2305.14314), as bitsandbytes stores it (get_4bit_type and
// create_dynamic_map in functional.py, dQuantizeNF4 and kQuantizeBlockwise in csrc/kernels.cu).
//
// The elements of a matrix, row after row, are cut into blocks of 64, whose absmax is their largest magnitude. A code
// is the number of the level nearest to element / absmax, in a tie the lower level's. Two neighbors share a byte, the
// first in its upper half. Absmaxes take 8 bits ("double quantization"): their mean is subtracted, blocks of 256 are
// divided by their largest magnitude, and each becomes the code of the dynamic map's nearest value.
//
// An element read back is level * absmax in fp32, rounded once to floatX: bitsandbytes' bits. An absmax gets the
// nearest code, as by its CUDA kernel; its CPU kernel looks codes up by 16 bits, and takes a neighbor for some.
#pragma once
#include "kernels/device.cuh"      // floatX, HOST_DEVICE
#include "kernels/vector_math.cuh" // float_bits
#include <math.h>                  // fabsf
#if !defined(TARGET_CUDA) && defined(__SSSE3__)
#include <immintrin.h> // _mm_shuffle_epi8, _mm512_permutexvar_ps
#endif

enum { NF4_BLOCK = 64, NF4_ABSMAX_BLOCK = 256, NF4_LEVELS = 16, NF4_MAP_ZERO = 127 };

// clang-format off
#define NF4_LEVEL_VALUES \
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f, \
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f, \
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f

// The dynamic map's values from 0 up. Code NF4_MAP_ZERO + i is value i, and code NF4_MAP_ZERO - i its negative, which
// only the last, 1.0, lacks. Decade i = 0..6 has 2^i values, the midpoints of as many equal parts of [0.1, 1], times
// 10^(i - 6), as PyTorch's fp32 arithmetic makes them: up to two units in the last place off the formula.
#define NF4_MAP_VALUES \
    0.0f, 5.5000004e-7f, 3.2500002e-6f, 7.75e-6f, 2.1249998e-5f, 4.375e-5f, 6.625e-5f, 8.875e-5f, 0.00015625001f, \
    0.00026875004f, 0.00038125002f, 0.00049375003f, 0.0006062501f, 0.00071875006f, 0.00083125f, 0.0009437501f, \
    0.0012812499f, 0.00184375f, 0.00240625f, 0.00296875f, 0.0035312497f, 0.00409375f, 0.0046562497f, 0.0052187503f, \
    0.00578125f, 0.00634375f, 0.00690625f, 0.00746875f, 0.00803125f, 0.00859375f, 0.009156249f, 0.00971875f, \
    0.01140625f, 0.01421875f, 0.01703125f, 0.019843752f, 0.02265625f, 0.02546875f, 0.028281251f, 0.03109375f, \
    0.03390625f, 0.036718752f, 0.03953125f, 0.042343747f, 0.04515625f, 0.04796875f, 0.05078125f, 0.05359375f, \
    0.05640625f, 0.059218753f, 0.06203125f, 0.06484375f, 0.067656256f, 0.070468746f, 0.07328125f, 0.07609375f, \
    0.07890625f, 0.08171876f, 0.08453125f, 0.08734375f, 0.09015625f, 0.092968754f, 0.09578126f, 0.09859375f, \
    0.107031256f, 0.12109375f, 0.13515624f, 0.14921875f, 0.16328125f, 0.17734376f, 0.19140625f, 0.20546874f, \
    0.21953125f, 0.23359375f, 0.24765624f, 0.26171875f, 0.27578127f, 0.28984374f, 0.30390626f, 0.31796873f, \
    0.33203125f, 0.34609374f, 0.36015624f, 0.37421876f, 0.38828123f, 0.40234375f, 0.41640624f, 0.43046874f, \
    0.44453126f, 0.45859373f, 0.47265625f, 0.4867187f, 0.50078124f, 0.5148437f, 0.5289062f, 0.54296875f, \
    0.5570313f, 0.5710938f, 0.58515626f, 0.5992187f, 0.61328125f, 0.6273438f, 0.6414063f, 0.65546876f, 0.6695312f, \
    0.68359375f, 0.6976563f, 0.7117188f, 0.72578126f, 0.7398437f, 0.75390625f, 0.7679688f, 0.78203124f, \
    0.79609376f, 0.8101562f, 0.82421875f, 0.8382813f, 0.85234374f, 0.86640626f, 0.8804687f, 0.89453125f, \
    0.9085938f, 0.92265624f, 0.93671876f, 0.9507812f, 0.96484375f, 0.9789063f, 0.99296874f, 1.0f
// clang-format on
static const float nf4_levels[NF4_LEVELS] = {NF4_LEVEL_VALUES};
static const float nf4_map_values[NF4_MAP_ZERO + 2] = {NF4_MAP_VALUES};

// The tables that device code reads: not in constant memory, which serves one address at a time.
#ifdef TARGET_CUDA
static __device__ const float device_nf4_levels[NF4_LEVELS] = {NF4_LEVEL_VALUES};
static __device__ const float device_nf4_map_values[NF4_MAP_ZERO + 2] = {NF4_MAP_VALUES};
#endif
#ifdef __CUDA_ARCH__
#define NF4_TABLE(table) device_##table
#else
#define NF4_TABLE(table) table
#endif

// A matrix of n elements in `blocks` = ceil(n / 64) blocks.
struct nf4_matrix {
    uint8_t *codes;        // (ceil(n / 2)), readable to a multiple of 4
    uint8_t *absmax_codes; // (blocks)
    float *absmax_scales;  // (ceil(blocks / 256))
    float *absmax_mean;    // (1)
};

HOST_DEVICE int64_t nf4_blocks(int64_t n) { return (n + NF4_BLOCK - 1) / NF4_BLOCK; }
// The number of blocks that the absmaxes of a matrix of n elements are cut into.
HOST_DEVICE int64_t nf4_absmax_blocks(int64_t n) { return (nf4_blocks(n) + NF4_ABSMAX_BLOCK - 1) / NF4_ABSMAX_BLOCK; }

// Returns the value of one of the dynamic map's codes, 0 to 255.
HOST_DEVICE float nf4_map_value(uint8_t code) {
    return code < NF4_MAP_ZERO ? -NF4_TABLE(nf4_map_values)[NF4_MAP_ZERO - code]
                               : NF4_TABLE(nf4_map_values)[code - NF4_MAP_ZERO];
}
// Returns a b, rounded before anything is added to it: with a fused multiply-add bits would depend on the machine.
HOST_DEVICE float nf4_product(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fmul_rn(a, b);
#else
    const volatile float product = a * b;
    return product;
#endif
}
HOST_DEVICE float nf4_absmax(const struct nf4_matrix *from, int64_t block) {
    return nf4_product(nf4_map_value(from->absmax_codes[block]), from->absmax_scales[block / NF4_ABSMAX_BLOCK]) +
           *from->absmax_mean;
}
HOST_DEVICE uint32_t nf4_code_at(const struct nf4_matrix *from, int64_t i) {
    return (uint32_t)from->codes[i / 2] >> (i % 2 ? 0 : 4) & 15u;
}
#undef NF4_TABLE

// ---- Quantizing, on the host ----

// Returns 1 / x; 1e38 where x is NaN, or below 1e-38, whose reciprocal may be infinite.
static inline float nf4_inverse(float x) { return 1.0f / (x > 1e-38f ? x : 1e-38f); }

// Returns the largest magnitude in x (n); a NaN counts as larger than infinity.
static inline float floats_largest(const float *x, int n) {
    uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int i = 0; i < n; i++) {
        const uint32_t bits = float_bits(x[i]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return float_from_bits(largest);
}

// Returns the middle between levels k and k + 1. In bitsandbytes' CUDA kernels four of these are off by the last bit.
static inline float nf4_border(int k) { return 0.5f * (nf4_levels[k] + nf4_levels[k + 1]); }

// Encodes a block of n <= 64 elements, two a byte; half of the last byte is 0 where n is odd. Returns the absmax.
static inline float nf4_encode_block(uint8_t *codes, const float *x, int n) {
    const float absmax = floats_largest(x, n), inverse = nf4_inverse(absmax);
    uint8_t code[NF4_BLOCK] = {0};
#pragma omp simd
    for (int i = 0; i < n; i++) {
        const float y = x[i] * inverse;
        int above = 0;
#pragma GCC unroll 15
        for (int k = 0; k < NF4_LEVELS - 1; k++)
            above += y > nf4_border(k);
        code[i] = (uint8_t)above;
    }
    for (int i = 0; i < n; i += 2)
        codes[i / 2] = (uint8_t)(code[i] << 4 | code[i + 1]);
    return absmax;
}

// Returns the dynamic map's code nearest to x in [-1, 1], in a tie the lower code.
static inline uint8_t nf4_map_code(float x) {
    int low = 0, high = 255; // the code is one of low..high
    while (low < high) {
        const int middle = (low + high) / 2;
        if (x > 0.5f * (nf4_map_value((uint8_t)middle) + nf4_map_value((uint8_t)(middle + 1))))
            low = middle + 1;
        else
            high = middle;
    }
    return (uint8_t)low;
}
// Writes absmax_codes, absmax_scales and absmax_mean of `to` for absmaxes (blocks).
static inline void nf4_encode_absmaxes(struct nf4_matrix to, const float *absmaxes, int64_t blocks) {
    double sum = 0;
    for (int64_t b = 0; b < blocks; b++)
        sum += absmaxes[b];
    const float mean = (float)(sum / (double)(blocks > 0 ? blocks : 1));
    *to.absmax_mean = mean;
#pragma omp parallel for schedule(static) if (blocks >= 1 << 14)
    for (int64_t first = 0; first < blocks; first += NF4_ABSMAX_BLOCK) {
        const int count = blocks - first < NF4_ABSMAX_BLOCK ? (int)(blocks - first) : (int)NF4_ABSMAX_BLOCK;
        float centered[NF4_ABSMAX_BLOCK];
        for (int i = 0; i < count; i++)
            centered[i] = absmaxes[first + i] - mean;
        const float scale = floats_largest(centered, count), inverse = nf4_inverse(scale);
        to.absmax_scales[first / NF4_ABSMAX_BLOCK] = scale;
        for (int i = 0; i < count; i++)
            to.absmax_codes[first + i] = nf4_map_code(centered[i] * inverse);
    }
}

// ---- Dequantizing a block, by a thread of the cpu target ----

#ifndef TARGET_CUDA

// Writes the block's 64 elements, looked up by code among the 16 values that a block of this absmax can have.
static inline void nf4_decode_block(floatX *out, const uint8_t codes[NF4_BLOCK / 2], float absmax) {
#if defined(PRECISION_BF16) && defined(__SSSE3__)
    __m128i words[4], low, high;           // the values' bits, and their bytes
    absmax = isnan(absmax) ? NAN : absmax; // rounding would carry another NaN's low bits into the sign
    for (int i = 0; i < 4; i++) {
        const __m128i bits = _mm_castps_si128(_mm_mul_ps(_mm_loadu_ps(nf4_levels + 4 * i), _mm_set1_ps(absmax)));
        const __m128i odd = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(1));
        words[i] = _mm_srai_epi32(_mm_add_epi32(_mm_add_epi32(bits, _mm_set1_epi32(0x7fff)), odd), 16);
    }
    const __m128i values[2] = {_mm_packs_epi32(words[0], words[1]), _mm_packs_epi32(words[2], words[3])};
    const __m128i byte = _mm_set1_epi16(255), half = _mm_set1_epi8(15);
    low = _mm_packus_epi16(_mm_and_si128(values[0], byte), _mm_and_si128(values[1], byte));
    high = _mm_packus_epi16(_mm_srli_epi16(values[0], 8), _mm_srli_epi16(values[1], 8));
    for (int i = 0; i < NF4_BLOCK / 2; i += 16) {
        const __m128i pairs = _mm_loadu_si128((const __m128i *)(codes + i));
        const __m128i first = _mm_and_si128(_mm_srli_epi16(pairs, 4), half), second = _mm_and_si128(pairs, half);
        const __m128i of[2] = {_mm_unpacklo_epi8(first, second), _mm_unpackhi_epi8(first, second)};
        for (int k = 0; k < 2; k++) {
            const __m128i l = _mm_shuffle_epi8(low, of[k]), h = _mm_shuffle_epi8(high, of[k]);
            _mm_storeu_si128((__m128i *)(out + 2 * i + 16 * k), _mm_unpacklo_epi8(l, h));
            _mm_storeu_si128((__m128i *)(out + 2 * i + 16 * k + 8), _mm_unpackhi_epi8(l, h));
        }
    }
#elif !defined(PRECISION_BF16) && defined(__AVX512F__)
    const __m512 table = _mm512_mul_ps(_mm512_loadu_ps(nf4_levels), _mm512_set1_ps(absmax));
    for (int i = 0; i < NF4_BLOCK / 2; i += 8) { // a lookup takes the lowest four bits of an index
        const __m128i pairs = _mm_loadl_epi64((const __m128i *)(codes + i));
        const __m512i index = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(_mm_srli_epi16(pairs, 4), pairs));
        _mm512_storeu_ps(out + 2 * i, _mm512_permutexvar_ps(index, table));
    }
#else
    floatX values[NF4_LEVELS];
    for (int i = 0; i < NF4_LEVELS; i++)
        values[i] = to_floatX(nf4_levels[i] * absmax);
    for (int i = 0; i < NF4_BLOCK / 2; i++) {
        out[2 * i] = values[codes[i] >> 4];
        out[2 * i + 1] = values[codes[i] & 15];
    }
#endif
}

#endif
