// Random numbers without state: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
// A value depends only on its key and counter, so that a dropout mask is never stored, a recomputed mask is the same,
// and neither depends on the number of threads. One evaluation makes four words: element e is word e % 4 of block e /
// 4. The counter's fourth word has layer and use of a dropout mask; or, with the highest bit set, the upper half of a
// stream's number (initialization, sampling, shuffling); or, with the bit below it, a tensor and what of it is rounded.
#pragma once
#include "kernels/device.cuh"      // uint32_t, uint64_t, bf16
#include "kernels/vector_math.cuh" // vector_logf, vector_sincos_turn, float_bits
#include <math.h>                  // ceilf, sqrtf
#if defined(__AVX512F__) && !defined(TARGET_CUDA)
#include <immintrin.h> // _mm512_mul_epu32
#include <sys/cdefs.h> // __BEGIN_DECLS
#endif

enum dropout_use {
    DROPOUT_EMBEDDING,
    DROPOUT_ATTENTION,
    DROPOUT_ATTENTION_PROJECTION,
    DROPOUT_MLP_PROJECTION,
    DROPOUT_USES // the uses of LoRA's adapters follow, one for each linear layer
};

struct dropout {
    float p; // probability of an element to become 0; the others are scaled by 1 / (1 - p)
    uint64_t seed, step;
    uint32_t layer, use;        // use: enum dropout_use, or DROPOUT_USES + enum linear
    const uint64_t *micro_step; // in the device's memory, added to step: a recorded graph reads it anew; NULL: 0
};
// Returns step + *micro_step, or step where micro_step is NULL. The cuda target's host code can't read a micro_step.
HOST_DEVICE uint64_t dropout_step(struct dropout d) { return d.step + (d.micro_step ? *d.micro_step : 0); }

__BEGIN_DECLS
// Enqueues *micro_step = value, in the device's memory: what is enqueued later reads the new value.
void dropout_step_set(uint64_t *micro_step, uint64_t value, struct device *dev);

// out[i] = dropout_scale(d, first_element + i), i < n: 0, or 1 / (1 - d.p) if kept. On the host; reads d.micro_step.
void dropout_scales(float *out, struct dropout d, uint64_t first_element, int n);

// Identifies the random numbers that elements [first, ...) of a tensor are rounded by. They depend on an element's
// place in its tensor, not in a buffer, and so not on ranks, padding or threads. One evaluation serves four elements.
enum rounding_use { ROUNDING_UPDATE, ROUNDING_GRADIENTS };
struct rounding {
    uint64_t seed, step;
    const uint64_t *counter; // in the device's memory, added to step: a recorded graph reads it anew; NULL: 0
    uint32_t tensor;         // its index, under 2^22
    enum rounding_use use;
    int64_t first; // a multiple of 4
};
// Rounds x to bf16 stochastically: a uniform `random` in [0, 65535] rounds away from 0 with a probability equal to x's
// distance from the next bf16 toward 0, in units of bf16's spacing. NaNs and values that bf16 holds stay as they are.
// A result above bf16's largest number is infinity.
HOST_DEVICE bf16 bf16_stochastic(float x, uint32_t random) {
    const uint32_t bits = float_bits(x);
    bf16 result;
    result.bits = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : (bits + random) >> 16);
    return result;
}

// Returns a uniform number in [0, 1), in steps of 2^-24, of the arguments only; bit 63 of stream is ignored.
static inline float random_uniform(uint64_t seed, uint64_t stream, uint64_t element);

// out[i] = std * z, i < n, on the host. z is standard normal, |z| < 6.8, of (seed, stream, first_element + i) only.
void random_normal(float *out, int64_t n, float std, uint64_t seed, uint64_t stream, uint64_t first_element);
__END_DECLS

struct philox_words {
    uint32_t word[4];
};

// Returns the four 32-bit words that Philox makes of a counter and a key (k0, k1).
HOST_DEVICE struct philox_words philox4x32(uint32_t counter0, uint32_t counter1, uint32_t counter2, uint32_t counter3,
                                           uint32_t k0, uint32_t k1) {
    uint64_t c0 = counter0, c1 = counter1, c2 = counter2, c3 = counter3; // 64 bits: for the compiler's vectors
#ifdef __CUDACC__
#pragma unroll
#else
#pragma GCC unroll 10
#endif
    for (int round = 0; round < 10; round++) {
        const uint64_t product0 = 0xd2511f53u * c0, product1 = 0xcd9e8d57u * c2;
        c0 = (product1 >> 32) ^ c1 ^ k0;
        c1 = product1 & 0xffffffffu;
        c2 = (product0 >> 32) ^ c3 ^ k1;
        c3 = product0 & 0xffffffffu;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    const struct philox_words result = {{(uint32_t)c0, (uint32_t)c1, (uint32_t)c2, (uint32_t)c3}};
    return result;
}

enum { PHILOX_LANES = 32, PHILOX_CHUNK = 4 * PHILOX_LANES };
#if defined(__AVX512F__) && !defined(TARGET_CUDA)
// Vectorized by hand, which halves the time: gcc 12 multiplies whole 64-bit lanes (three operations) where the lower
// halves suffice (one). The upper halves of the lanes hold leftovers, which neither the product nor the last step
// reads. The vectors of a chunk go through the rounds together, as a round is a chain of five operations.
enum { PHILOX_VECTORS = PHILOX_LANES / 8, XOR3 = 0x96 }; // XOR3: a ^ b ^ c as a table of its 8 cases
#define EACH_PHILOX _Pragma("GCC unroll 4") for (int i = 0; i < PHILOX_VECTORS; i++)
// Writes the words (PHILOX_CHUNK) of PHILOX_LANES blocks, from `block` on, four a block in order. key: k0 + 2^32 k1.
static inline void philox_chunk(uint32_t *words, uint64_t block, uint32_t counter2, uint32_t counter3, uint64_t key) {
    const __m512i multiplier0 = _mm512_set1_epi64(0xd2511f53), multiplier1 = _mm512_set1_epi64(0xcd9e8d57);
    const __m512i eight = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
    __m512i c0[PHILOX_VECTORS], c1[PHILOX_VECTORS], c2[PHILOX_VECTORS], c3[PHILOX_VECTORS];
    EACH_PHILOX {
        c0[i] = _mm512_add_epi64(_mm512_set1_epi64((int64_t)(block + 8 * (uint64_t)i)), eight);
        c1[i] = _mm512_srli_epi64(c0[i], 32);
        c2[i] = _mm512_set1_epi64(counter2);
        c3[i] = _mm512_set1_epi64(counter3);
    }
    __m512i k0 = _mm512_set1_epi64((uint32_t)key), k1 = _mm512_set1_epi64((int64_t)(key >> 32));
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        EACH_PHILOX {
            const __m512i product0 = _mm512_mul_epu32(multiplier0, c0[i]);
            const __m512i product1 = _mm512_mul_epu32(multiplier1, c2[i]);
            c0[i] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(product1, 32), c1[i], k0, XOR3);
            c1[i] = product1;
            c2[i] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(product0, 32), c3[i], k1, XOR3);
            c3[i] = product0;
        }
        k0 = _mm512_add_epi32(k0, _mm512_set1_epi64(0x9e3779b9));
        k1 = _mm512_add_epi32(k1, _mm512_set1_epi64(0xbb67ae85));
    }
    // Lane l: c0 and c1 of block l as one 64-bit number, then c2 and c3; then the two in turn.
    const __m512i first = _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0);
    const __m512i second = _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4);
    EACH_PHILOX {
        const __m512i low = _mm512_mask_blend_epi32(0xaaaa, c0[i], _mm512_slli_epi64(c1[i], 32));
        const __m512i high = _mm512_mask_blend_epi32(0xaaaa, c2[i], _mm512_slli_epi64(c3[i], 32));
        _mm512_storeu_si512(words + 32 * i, _mm512_permutex2var_epi64(low, first, high));
        _mm512_storeu_si512(words + 32 * i + 16, _mm512_permutex2var_epi64(low, second, high));
    }
}
#undef EACH_PHILOX
#else
static inline void philox_chunk(uint32_t *words, uint64_t block, uint32_t counter2, uint32_t counter3, uint64_t key) {
#pragma omp simd
    for (int lane = 0; lane < PHILOX_LANES; lane++) {
        const uint64_t at = block + (uint64_t)lane;
        const struct philox_words four =
            philox4x32((uint32_t)at, (uint32_t)(at >> 32), counter2, counter3, (uint32_t)key, (uint32_t)(key >> 32));
        words[4 * lane + 0] = four.word[0];
        words[4 * lane + 1] = four.word[1];
        words[4 * lane + 2] = four.word[2];
        words[4 * lane + 3] = four.word[3];
    }
}
#endif

// Returns the third word of Philox's counter for a rounding: the lower half of step + *r.counter, or of step for NULL.
HOST_DEVICE uint32_t rounding_counter2(struct rounding r) { return (uint32_t)(r.step + (r.counter ? *r.counter : 0)); }
// Returns the fourth word of Philox's counter for a rounding: its second highest bit, tensor, and enum rounding_use.
HOST_DEVICE uint32_t rounding_counter3(struct rounding r) { return 0x40000000u | r.tensor << 8 | (uint32_t)r.use; }
// Returns the random words of elements r.first + at to r.first + at + 3; `at` is a multiple of 4.
HOST_DEVICE struct philox_words rounding_words(struct rounding r, int64_t at) {
    const uint64_t block = (uint64_t)(r.first + at) / 4;
    return philox4x32((uint32_t)block, (uint32_t)(block >> 32), rounding_counter2(r), rounding_counter3(r),
                      (uint32_t)r.seed, (uint32_t)(r.seed >> 32));
}
// Writes the random words of elements r.first + at, ... to words (PHILOX_CHUNK); `at` is a multiple of 4.
static inline void rounding_chunk(uint32_t *words, struct rounding r, int64_t at) {
    philox_chunk(words, (uint64_t)(r.first + at) / 4, rounding_counter2(r), rounding_counter3(r), r.seed);
}

// Returns a random word's upper 24 bits as a number in [0, 1), in steps of 2^-24, each exact in fp32.
HOST_DEVICE float uniform_from_word(uint32_t word) { return (float)(int32_t)(word >> 8) * 0x1p-24f; }

// Returns the counter's fourth word of a stream: the highest bit, and the upper half of the stream's number.
static inline uint32_t stream_word(uint64_t stream) { return (uint32_t)(stream >> 32) | 0x80000000u; }

static inline float random_uniform(uint64_t seed, uint64_t stream, uint64_t element) {
    const uint64_t block = element / 4;
    const struct philox_words four = philox4x32((uint32_t)block, (uint32_t)(block >> 32), (uint32_t)stream,
                                                stream_word(stream), (uint32_t)seed, (uint32_t)(seed >> 32));
    return uniform_from_word(four.word[element % 4]);
}

// Returns the factor by which dropout multiplies an element: 0, or 1 / (1 - d.p) if the element is kept.
HOST_DEVICE float dropout_scale(struct dropout d, uint64_t element) {
    const uint64_t block = element / 4;
    const struct philox_words four = philox4x32((uint32_t)block, (uint32_t)(block >> 32), (uint32_t)dropout_step(d),
                                                d.layer << 8 | d.use, (uint32_t)d.seed, (uint32_t)(d.seed >> 32));
    return uniform_from_word(four.word[element % 4]) >= d.p ? 1.0f / (1.0f - d.p) : 0.0f;
}
