// Attention on the CPU works on blocks of 32 x 32: packed operands, one product, and vectors for the softmax between
// products.
//
// The blocks are multiplied by one of two units, with the same calls. `amx` says which, a constant at every call:
// amx   bf16 operands on AMX tiles (kernels/amx.cuh), 2 x 2 of them a product; where the CPU has AMX and floatX is bf16
//   else  fp32 operands on the vector unit, for fp32, and for bf16 on all other CPUs
// An operand is a row of blocks. A left operand (A) is row-major for both units; a right one (B) is row-major in fp32
// and two VNNI tiles, columns 0 to 15 and 16 to 31, with AMX. Sums (C) are row-major fp32. Blocks are 64-byte aligned.
#pragma once
#include "kernels/amx.cuh"    // amx_available, amx_load, amx_dot
#include "kernels/device.cuh" // floatX, bf16
#if defined(__SSE2__)
#include <immintrin.h> // _mm512_max_ps and its narrower forms, bf16 conversions
#endif

enum { BLOCK = 32, BLOCK_ELEMENTS = BLOCK * BLOCK };

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define ALIGN_BLOCK __attribute__((aligned(64)))

// ---------------------------------------------------------------------------------------------------------------------
// Vectors

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
typedef float vec __attribute__((vector_size(4 * LANES), may_alias));
typedef uint32_t vec_words __attribute__((vector_size(4 * LANES), may_alias));
typedef uint32_t word __attribute__((may_alias)); // a float's bits or two neighbouring bf16

static inline vec vec_load(const float *p) { return *(const vec *)p; }
static inline void vec_store(float *p, vec x) { *(vec *)p = x; }
static inline vec vec_set(float x) {
    const vec zero = {0};
    return x - zero;
}

// The maximum. A NaN in b comes through, one in a does not.
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

// Lanes of a (0 to LANES - 1) and of b (from LANES on) in the order of the constants that follow.
#if defined(__clang__) || __GNUC__ >= 12
#define VEC_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define VEC_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vec_words){__VA_ARGS__})
#endif

// x[i] = 2^x[i], to 2e-7 relative; 0 from 2^-127 down; NaN stays. x = n + f with |f| <= 1/2; 2^f by a polynomial of
// degree 5 with p(0) = 1 (minimax in the relative error, 9.2e-8, found by Lawson's iteration); n reaches the exponent
// field by adding 1.5 * 2^23, in whose last bits it then stands, and the exponent's bias 127 with it: n = -127 makes
// the factor 0. Four vectors at a time, step by step: one is a chain of 12 dependent operations, and a core's scheduler
// is too small to look through whole chains for work.
enum { EXP2_VECS = 4 };
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

// Two rows of sums as bf16: `pairs` gets one row of VNNI pairs, `row0` and `row1` plain rows; NULL where not wanted.
#if defined(__AVX512BF16__)
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
// Rounds to bf16 in the upper half of each word. Unlike bf16_from_float it does not care for NaNs whose payload is all
// ones at the top: arithmetic makes none.
static inline vec_words vec_round_bf16(vec x) {
    const vec_words bits = (vec_words)x;
    return bits + 0x7fffu + ((bits >> 16) & 1u);
}
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

// out[j][i] = in[i][j] for 16 x 16 words; strides in words.
static inline void transpose_16x16(word *out, int out_stride, const word *in, int in_stride) {
#if LANES == 16
    vec_words r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        r[i] = *(const vec_words *)(in + i * in_stride);
// Swaps the off-diagonal quarters of every 2H x 2H square: H = 1, 2, 4, 8 together transpose. Lane l of the upper row
// of two comes from lane LOW of both, one after the other; that of the lower row from lane HIGH.
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

// out = in^T, 32 x 32 fp32
static inline void block_transpose(float *out, const float *in, int in_stride) {
    for (int i = 0; i < BLOCK; i += 16)
        for (int j = 0; j < BLOCK; j += 16)
            transpose_16x16((word *)out + j * BLOCK + i, BLOCK, (const word *)in + i * in_stride + j, in_stride);
}

// ---------------------------------------------------------------------------------------------------------------------
// Products

static inline bool blocks_use_amx(void) {
#ifdef PRECISION_BF16
    return amx_available();
#else
    return false;
#endif
}
static inline const char *blocks_describe(void) {
    if (blocks_use_amx())
        return "AMX bf16";
    return LANES == 16 ? "AVX-512 fp32" : LANES == 8 ? "AVX fp32" : "4-lane fp32";
}
static inline size_t block_bytes(bool amx) { return BLOCK_ELEMENTS * (amx ? sizeof(bf16) : sizeof(float)); }
static inline void *block_at(bool amx, const void *blocks, int64_t i) {
    return (char *)(uintptr_t)blocks + (size_t)i * block_bytes(amx);
}

// C (32 x 32) = or += sum over s < steps of A[s * a_step] (32 x 32) . B[s * b_step] (32 x 32); steps count blocks.
// 8 x 32 sums stay in registers (4 x 16 without AVX-512): 16 independent chains hide the latency of two FMA units.
static __attribute__((noinline)) void block_product_fp32(float *c, const float *a, int a_step, const float *b,
                                                         int b_step, int steps, bool accumulate) {
    enum { ROWS = LANES == 16 ? 8 : 4, VECS = 2, COLUMNS = VECS * LANES };
    for (int r0 = 0; r0 < BLOCK; r0 += ROWS)
        for (int c0 = 0; c0 < BLOCK; c0 += COLUMNS) {
            vec sum[ROWS][VECS];
            float *out = c + r0 * BLOCK + c0;
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
                for (int v = 0; v < VECS; v++)
                    sum[r][v] = accumulate ? vec_load(out + r * BLOCK + v * LANES) : vec_set(0);
            for (int s = 0; s < steps; s++) {
                const float *left = a + (int64_t)s * a_step * BLOCK_ELEMENTS + r0 * BLOCK;
                const float *right = b + (int64_t)s * b_step * BLOCK_ELEMENTS + c0;
                for (int k = 0; k < BLOCK; k++)
#pragma GCC unroll 8
                    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
                        for (int v = 0; v < VECS; v++)
                            sum[r][v] += left[r * BLOCK + k] * vec_load(right + k * BLOCK + v * LANES);
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
                for (int v = 0; v < VECS; v++)
                    vec_store(out + r * BLOCK + v * LANES, sum[r][v]);
        }
}
static inline void block_product_amx(float *c, const bf16 *a, int a_step, const bf16 *b, int b_step, int steps,
                                     bool accumulate) {
    enum { ROW_BYTES = BLOCK * sizeof(float), HALF = BLOCK_ELEMENTS / 2 };
    float *c00 = c, *c01 = c + 16, *c10 = c + 16 * BLOCK, *c11 = c10 + 16;
    if (accumulate) {
        amx_load(0, c00, ROW_BYTES);
        amx_load(1, c01, ROW_BYTES);
        amx_load(2, c10, ROW_BYTES);
        amx_load(3, c11, ROW_BYTES);
    } else {
        amx_zero(0);
        amx_zero(1);
        amx_zero(2);
        amx_zero(3);
    }
    for (int s = 0; s < steps; s++) {
        amx_load(4, a, 64);
        amx_load(6, b, 64);
        amx_load(7, b + HALF, 64);
        amx_load(5, a + HALF, 64);
        amx_dot(0, 4, 6);
        amx_dot(1, 4, 7);
        amx_dot(2, 5, 6);
        amx_dot(3, 5, 7);
        a += (int64_t)a_step * BLOCK_ELEMENTS;
        b += (int64_t)b_step * BLOCK_ELEMENTS;
    }
    amx_store(0, c00, ROW_BYTES);
    amx_store(1, c01, ROW_BYTES);
    amx_store(2, c10, ROW_BYTES);
    amx_store(3, c11, ROW_BYTES);
}
ALWAYS_INLINE void block_product(const bool amx, float *c, const void *a, int a_step, const void *b, int b_step,
                                 int steps, bool accumulate) {
    if (amx)
        block_product_amx(c, (const bf16 *)a, a_step, (const bf16 *)b, b_step, steps, accumulate);
    else
        block_product_fp32(c, (const float *)a, a_step, (const float *)b, b_step, steps, accumulate);
}

// ---------------------------------------------------------------------------------------------------------------------
// Packing: rows of floatX to the blocks of an operand, with zeros beyond the last row and column

enum { MAX_HEAD_DIM = 256, MAX_STEPS = MAX_HEAD_DIM / BLOCK };

static inline bf16 floatX_to_bf16(floatX x) {
#ifdef PRECISION_BF16
    return x;
#else
    return bf16_from_float(x);
#endif
}

// Copies n of a row's elements to a block's row (row_load) and back, times factor (row_store). Full rows are the rule:
// with a constant count the compiler makes straight lines of vectors.
ALWAYS_INLINE void row_load_some(const bool amx, void *row, const floatX *in, int n) {
    bf16 *row16 = (bf16 *)row;
    float *row32 = (float *)row;
    for (int i = 0; i < n; i++)
        if (amx)
            row16[i] = floatX_to_bf16(in[i]);
        else
            row32[i] = to_float(in[i]);
}
ALWAYS_INLINE void row_store_some(floatX *out, const float *row, float factor, int n) {
    for (int i = 0; i < n; i++)
        out[i] = to_floatX(factor * row[i]);
}
ALWAYS_INLINE void row_load(const bool amx, void *row, const floatX *in, int n) {
    if (n == BLOCK)
        row_load_some(amx, row, in, BLOCK);
    else
        row_load_some(amx, row, in, n);
}
ALWAYS_INLINE void row_store(floatX *out, const float *row, float factor, int n) {
    if (n == BLOCK)
        row_store_some(out, row, factor, BLOCK);
    else
        row_store_some(out, row, factor, n);
}

// Packs `count` rows of D elements, `stride` apart, to roundup(D, 32) / 32 row-major blocks of 32 rows.
ALWAYS_INLINE void pack_rows(const bool amx, void *blocks, const floatX *rows, int64_t stride, int count, int D) {
    const size_t row_bytes = block_bytes(amx) / BLOCK;
    for (int s = 0; s * BLOCK < D; s++) {
        const int columns = D - s * BLOCK < BLOCK ? D - s * BLOCK : BLOCK;
        char *block = (char *)block_at(amx, blocks, s);
        if (count < BLOCK || columns < BLOCK)
            memset(block, 0, block_bytes(amx));
        for (int r = 0; r < count; r++)
            row_load(amx, block + (size_t)r * row_bytes, rows + r * stride + s * BLOCK, columns);
    }
}

// out = one block of bf16 rows, as VNNI pairs of rows.
static inline void block_pair_rows(word *out, const bf16 *in) {
    for (int c = 0; c < BLOCK; c += 16)
        for (int r = 0; r < 16; r++)
            for (int i = 0; i < 16; i++)
                out[c * 16 + r * 16 + i] =
                    (uint32_t)in[2 * r * BLOCK + c + i].bits | (uint32_t)in[(2 * r + 1) * BLOCK + c + i].bits << 16;
}

// Packs X (count rows padded to 32, D) as a left operand, and X^T as a left operand: (D / 32) blocks each; either may
// be NULL. VNNI pairs of rows are the transpose, word by word, of X^T's rows.
ALWAYS_INLINE void pack_left(const bool amx, void *x, void *transposed, const floatX *rows, int64_t stride, int count,
                             int D) {
    ALIGN_BLOCK float scratch[MAX_STEPS * BLOCK_ELEMENTS];
    ALIGN_BLOCK word pairs[BLOCK_ELEMENTS / 2];
    void *natural = x ? x : scratch;
    pack_rows(amx, natural, rows, stride, count, D);
    for (int s = 0; transposed && s * BLOCK < D; s++) {
        if (!amx) {
            block_transpose((float *)block_at(amx, transposed, s), (const float *)block_at(amx, natural, s), BLOCK);
            continue;
        }
        block_pair_rows(pairs, (const bf16 *)block_at(amx, natural, s));
        for (int tile = 0; tile < 2; tile++)
            transpose_16x16((word *)block_at(amx, transposed, s) + tile * 256, 16, pairs + tile * 256, 16);
    }
}

// As pack_left, to right operands.
ALWAYS_INLINE void pack_right(const bool amx, void *x, void *transposed, const floatX *rows, int64_t stride, int count,
                              int D) {
    if (!amx) {
        pack_left(amx, x, transposed, rows, stride, count, D);
        return;
    }
    ALIGN_BLOCK bf16 natural[MAX_STEPS * BLOCK_ELEMENTS];
    pack_rows(amx, natural, rows, stride, count, D);
    for (int s = 0; s * BLOCK < D; s++) {
        const bf16 *in = natural + s * BLOCK_ELEMENTS;
        if (x)
            block_pair_rows((word *)block_at(amx, x, s), in);
        for (int tile = 0; transposed && tile < 2; tile++)
            transpose_16x16((word *)block_at(amx, transposed, s) + tile * 256, 16, (const word *)in + tile * 256, 16);
    }
}
