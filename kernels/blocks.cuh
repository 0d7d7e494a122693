// Matrix products on the CPU by packed blocks of 32 x 32, for attention and kernels/matmul/tiles.cuh. An operand is a
// row of blocks, of fp32 or bf16 (enum block_layout). A left operand's blocks (A) are row-major, and so are a right
// operand's (B) in fp32. In bf16 B has two VNNI tiles of words, columns 0 to 15 and 16 to 31: row r of a tile has the
// pairs B[2r][n], B[2r + 1][n]. Sums (C) are row-major fp32. Blocks are aligned to 64 bytes.
#pragma once
#include "kernels/amx.cuh"     // amx_available, amx_load, amx_dot
#include "kernels/device.cuh"  // floatX, bf16
#include "kernels/vectors.cuh" // vec, vec_dot, word, transpose_16x16

enum { BLOCK = 32, BLOCK_ELEMENTS = BLOCK * BLOCK };
enum { MAX_HEAD_DIM = 256, MAX_STEPS = MAX_HEAD_DIM / BLOCK };
enum { PRODUCT_STEPS = 12 }; // blocks that one product sums over, at most

#define ALIGN_BLOCK __attribute__((aligned(64)))

// out (32, 32) = in^T, in fp32. `out` is dense and does not overlap `in`, whose rows are in_stride elements apart.
static inline void block_transpose(float *out, const float *in, int in_stride) {
    for (int i = 0; i < BLOCK; i += 16)
        for (int j = 0; j < BLOCK; j += 16)
            transpose_16x16((word *)out + j * BLOCK + i, BLOCK, (const word *)in + i * in_stride + j, in_stride);
}

// ---- Products ----

enum block_layout { LAYOUT_FP32, LAYOUT_BF16 };

// UNIT_FP32  fp32 operands on the vector unit: for fp32, and for bf16 on CPUs without products of bf16
// UNIT_DOT   bf16 operands by the vector unit's dot product of pairs (vec_dot)
// UNIT_AMX   bf16 operands on AMX tiles (kernels/amx.cuh), 2 x 2 of them a product
enum block_unit { UNIT_FP32, UNIT_DOT, UNIT_AMX };

// Returns the unit that multiplies blocks of floatX on this CPU. In bf16 builds asks Linux for the use of AMX.
static inline enum block_unit blocks_unit(void) {
    if (sizeof(floatX) != sizeof(bf16))
        return UNIT_FP32;
    if (amx_available())
        return UNIT_AMX;
    return BF16_DOT ? UNIT_DOT : UNIT_FP32;
}
// Returns the layout of the unit's operands: a compile-time constant, except in bf16 builds without BF16_DOT.
static inline enum block_layout blocks_layout(enum block_unit unit) {
    if (sizeof(floatX) != sizeof(bf16))
        return LAYOUT_FP32;
    return BF16_DOT || unit == UNIT_AMX ? LAYOUT_BF16 : LAYOUT_FP32;
}
// Prepares this thread for products on the unit. After its last product the thread calls blocks_end.
static inline void blocks_begin(enum block_unit unit) {
    if (unit == UNIT_AMX)
        amx_begin();
}
static inline void blocks_end(enum block_unit unit) {
    if (unit == UNIT_AMX)
        amx_end();
}

static inline size_t block_bytes(enum block_layout layout) {
    return BLOCK_ELEMENTS * (layout == LAYOUT_BF16 ? sizeof(bf16) : sizeof(float));
}
static inline void *block_at(enum block_layout layout, const void *blocks, int64_t i) {
    return (char *)(uintptr_t)blocks + (size_t)i * block_bytes(layout);
}

// C (32 x 32) = the sum over s < steps of the products A[s * a_step] . B[s * b_step] of blocks, or += where
// `accumulate`. steps <= PRODUCT_STEPS; a_step and b_step count blocks. With AVX-512, 8 x 32 sums stay in registers: 16
// vectors, whose chains of additions hide the latency of two FMA units.
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
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && !defined(BF16_DOT_EMULATE)
#define UNIT_DOT_NAME "NEON bf16 mmla"
// Computes block_product_fp32's C for a and b in LAYOUT_BF16, by BFMMLA: it adds 2 x 4 . 4 x 2 to 2 x 2 sums, twice the
// work of BFDOT. It takes pairs of A's rows and B's columns. A is put in that order once: left[step][k / 4][row / 2].
static __attribute__((noinline)) void block_product_dot(float *c, const word *a, int a_step, const word *b, int b_step,
                                                        int steps, bool accumulate) {
    enum { FOURS = BLOCK / 4, ROW_PAIRS = BLOCK / 2, BLOCK_WORDS = BLOCK * BLOCK / 2, ROW_WORDS = BLOCK / 2 };
    uint64x2_t left[PRODUCT_STEPS * FOURS * ROW_PAIRS];
    for (int s = 0; s < steps; s++)
        for (int r = 0; r < ROW_PAIRS; r++)
            for (int k = 0; k < FOURS; k += 2) {
                const word *row = a + (int64_t)s * a_step * BLOCK_WORDS + r * BLOCK + k * 2;
                const uint64x2_t even = (uint64x2_t)vec_words_load(row);
                const uint64x2_t odd = (uint64x2_t)vec_words_load(row + ROW_WORDS);
                left[(s * FOURS + k) * ROW_PAIRS + r] = vzip1q_u64(even, odd);
                left[(s * FOURS + k + 1) * ROW_PAIRS + r] = vzip2q_u64(even, odd);
            }
    enum { ROWS = 8, COLUMNS = 8 };
    for (int c0 = 0; c0 < BLOCK; c0 += COLUMNS)
        for (int r0 = 0; r0 < BLOCK; r0 += ROWS) {
            float32x4_t sum[ROWS / 2][COLUMNS / 2]; // two columns of a row, then of the next row
            float *out = c + r0 * BLOCK + c0;
#pragma GCC unroll 4
            for (int r = 0; r < ROWS / 2; r++)
#pragma GCC unroll 2
                for (int v = 0; v < COLUMNS / 4; v++) {
                    const float32x4_t zero = vdupq_n_f32(0), *at = (const float32x4_t *)(out + 2 * r * BLOCK + 4 * v);
                    const float64x2_t x = vreinterpretq_f64_f32(accumulate ? at[0] : zero);
                    const float64x2_t y = vreinterpretq_f64_f32(accumulate ? at[BLOCK / 4] : zero);
                    sum[r][2 * v] = vreinterpretq_f32_f64(vzip1q_f64(x, y));
                    sum[r][2 * v + 1] = vreinterpretq_f32_f64(vzip2q_f64(x, y));
                }
            for (int s = 0; s < steps; s++) {
                const word *right = b + (int64_t)s * b_step * BLOCK_WORDS + c0 / 16 * (BLOCK_WORDS / 2) + c0 % 16;
                for (int k = 0; k < FOURS; k++) {
                    bfloat16x8_t columns[COLUMNS / 2];
#pragma GCC unroll 2
                    for (int v = 0; v < COLUMNS / 4; v++) {
                        const uint32x4_t x = (uint32x4_t)vec_words_load(right + 32 * k + 4 * v),
                                         y = (uint32x4_t)vec_words_load(right + 32 * k + 16 + 4 * v);
                        columns[2 * v] = vreinterpretq_bf16_u32(vzip1q_u32(x, y));
                        columns[2 * v + 1] = vreinterpretq_bf16_u32(vzip2q_u32(x, y));
                    }
#pragma GCC unroll 4
                    for (int r = 0; r < ROWS / 2; r++) {
                        const bfloat16x8_t rows =
                            vreinterpretq_bf16_u64(left[(s * FOURS + k) * ROW_PAIRS + r0 / 2 + r]);
#pragma GCC unroll 4
                        for (int v = 0; v < COLUMNS / 2; v++)
                            sum[r][v] = vbfmmlaq_f32(sum[r][v], rows, columns[v]);
                    }
                }
            }
#pragma GCC unroll 4
            for (int r = 0; r < ROWS / 2; r++)
#pragma GCC unroll 2
                for (int v = 0; v < COLUMNS / 4; v++) {
                    const float64x2_t x = vreinterpretq_f64_f32(sum[r][2 * v]);
                    const float64x2_t y = vreinterpretq_f64_f32(sum[r][2 * v + 1]);
                    float32x4_t *at = (float32x4_t *)(out + 2 * r * BLOCK + 4 * v);
                    at[0] = vreinterpretq_f32_f64(vzip1q_f64(x, y));
                    at[BLOCK / 4] = vreinterpretq_f32_f64(vzip2q_f64(x, y));
                }
        }
}
#else
#define UNIT_DOT_NAME VEC_DOT_NAME
// Computes block_product_fp32's C for a and b in LAYOUT_BF16, by vec_dot.
static __attribute__((noinline)) void block_product_dot(float *c, const word *a, int a_step, const word *b, int b_step,
                                                        int steps, bool accumulate) {
    enum {
        ROWS = LANES == 8 ? 4 : 8,
        VECS = 2,
        COLUMNS = VECS * LANES,
        PAIRS = BLOCK / 2,
        BLOCK_WORDS = BLOCK * PAIRS
    };
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
                const word *left = a + (int64_t)s * a_step * BLOCK_WORDS + r0 * PAIRS;
                const word *right = b + (int64_t)s * b_step * BLOCK_WORDS;
                for (int k = 0; k < PAIRS; k++)
#pragma GCC unroll 8
                    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
                        for (int v = 0; v < VECS; v++) {
                            const int column = c0 + v * LANES; // of 16 in each tile
                            const word *pairs = right + column / 16 * (BLOCK_WORDS / 2) + k * 16 + column % 16;
                            sum[r][v] = vec_dot(sum[r][v], vec_words_set(left[r * PAIRS + k]), vec_words_load(pairs));
                        }
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
                for (int v = 0; v < VECS; v++)
                    vec_store(out + r * BLOCK + v * LANES, sum[r][v]);
        }
}
#endif
// Computes block_product_fp32's C for a and b in LAYOUT_BF16, on AMX tiles, after this thread's blocks_begin(UNIT_AMX).
static __attribute__((noinline)) void block_product_amx(float *c, const bf16 *a, int a_step, const bf16 *b, int b_step,
                                                        int steps, bool accumulate) {
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
static inline const char *blocks_describe(void) {
    switch (blocks_unit()) {
    case UNIT_AMX: return "AMX bf16";
    case UNIT_DOT: return UNIT_DOT_NAME;
    case UNIT_FP32: return LANES == 16 ? "AVX-512 fp32" : LANES == 8 ? "AVX fp32" : "4-lane fp32";
    }
    return "";
}
// Computes block_product_fp32's C on the unit, in whose layout a and b are. The thread has called blocks_begin for it.
static inline void block_product(enum block_unit unit, float *c, const void *a, int a_step, const void *b, int b_step,
                                 int steps, bool accumulate) {
    switch (unit) {
    case UNIT_FP32: block_product_fp32(c, (const float *)a, a_step, (const float *)b, b_step, steps, accumulate); break;
    case UNIT_DOT: block_product_dot(c, (const word *)a, a_step, (const word *)b, b_step, steps, accumulate); break;
    case UNIT_AMX: block_product_amx(c, (const bf16 *)a, a_step, (const bf16 *)b, b_step, steps, accumulate); break;
    }
}

// ---- Packing: rows of floatX to the blocks of an operand, with zeros beyond the last row and column ----

// Returns x in bf16: unchanged in a bf16 build, else rounded to nearest, ties to even.
static inline bf16 floatX_to_bf16(floatX x) {
#ifdef PRECISION_BF16
    return x;
#else
    return bf16_from_float(x);
#endif
}

// Converts n <= BLOCK elements to the layout, at the start of `row`. A constant n lets the compiler use vectors.
ALWAYS_INLINE void row_load_some(const enum block_layout layout, void *row, const floatX *in, int n) {
    bf16 *row16 = (bf16 *)row;
    float *row32 = (float *)row;
    for (int i = 0; i < n; i++)
        if (layout == LAYOUT_BF16)
            row16[i] = floatX_to_bf16(in[i]);
        else
            row32[i] = to_float(in[i]);
}
ALWAYS_INLINE void row_store_some(floatX *out, const float *row, float factor, int n) {
    for (int i = 0; i < n; i++)
        out[i] = to_floatX(factor * row[i]);
}
// Converts n <= BLOCK elements to the layout, at the start of `row`; pads nothing. It compiles n == BLOCK to vectors.
ALWAYS_INLINE void row_load(const enum block_layout layout, void *row, const floatX *in, int n) {
    if (n == BLOCK)
        row_load_some(layout, row, in, BLOCK);
    else
        row_load_some(layout, row, in, n);
}
ALWAYS_INLINE void row_store(floatX *out, const float *row, float factor, int n) {
    if (n == BLOCK)
        row_store_some(out, row, factor, BLOCK);
    else
        row_store_some(out, row, factor, n);
}

// Packs rows (count <= 32, D), `stride` elements apart, to roundup(D, 32) / 32 row-major blocks, padded with 0.
ALWAYS_INLINE void pack_rows(const enum block_layout layout, void *blocks, const floatX *rows, int64_t stride,
                             int count, int D) {
    const size_t row_bytes = block_bytes(layout) / BLOCK;
    for (int s = 0; s * BLOCK < D; s++) {
        const int columns = D - s * BLOCK < BLOCK ? D - s * BLOCK : BLOCK;
        char *block = (char *)block_at(layout, blocks, s);
        if (count < BLOCK || columns < BLOCK)
            memset(block, 0, block_bytes(layout));
        for (int r = 0; r < count; r++)
            row_load(layout, block + (size_t)r * row_bytes, rows + r * stride + s * BLOCK, columns);
    }
}

// out = a block of bf16, whose rows are `stride` elements apart, as two VNNI tiles: columns 0 to 15, then 16 to 31
static inline void block_pair_rows(word *out, const bf16 *in, int64_t stride) {
    for (int c = 0; c < BLOCK; c += 16)
        for (int r = 0; r < 16; r++) {
            const bf16 *even = in + 2 * r * stride + c, *odd = even + stride;
            word *pairs = out + c * 16 + r * 16;
#pragma omp simd
            for (int i = 0; i < 16; i++)
                pairs[i] = (uint32_t)even[i].bits | (uint32_t)odd[i].bits << 16;
        }
}

// Packs X = rows (count <= 32, D), `stride` elements apart, into x, and its transpose X^T into `transposed`, as left
// operands. x or `transposed` may be NULL. Block s has X's columns from 32 s on: as columns in x, as rows in
// `transposed`. D <= MAX_HEAD_DIM. In bf16 X^T is made by transposing, as words, VNNI pairs of X's rows.
ALWAYS_INLINE void pack_left(const enum block_layout layout, void *x, void *transposed, const floatX *rows,
                             int64_t stride, int count, int D) {
    ALIGN_BLOCK float scratch[MAX_STEPS * BLOCK_ELEMENTS];
    ALIGN_BLOCK word pairs[BLOCK_ELEMENTS / 2];
    void *natural = x ? x : scratch;
    pack_rows(layout, natural, rows, stride, count, D);
    for (int s = 0; transposed && s * BLOCK < D; s++) {
        if (layout == LAYOUT_FP32) {
            block_transpose((float *)block_at(layout, transposed, s), (const float *)block_at(layout, natural, s),
                            BLOCK);
            continue;
        }
        block_pair_rows(pairs, (const bf16 *)block_at(layout, natural, s), BLOCK);
        for (int tile = 0; tile < 2; tile++)
            transpose_16x16((word *)block_at(layout, transposed, s) + tile * 256, 16, pairs + tile * 256, 16);
    }
}

// Packs X and X^T as pack_left does, but as right operands. x or `transposed` may be NULL.
ALWAYS_INLINE void pack_right(const enum block_layout layout, void *x, void *transposed, const floatX *rows,
                              int64_t stride, int count, int D) {
    if (layout == LAYOUT_FP32) {
        pack_left(layout, x, transposed, rows, stride, count, D);
        return;
    }
    ALIGN_BLOCK bf16 natural[MAX_STEPS * BLOCK_ELEMENTS];
    pack_rows(layout, natural, rows, stride, count, D);
    for (int s = 0; s * BLOCK < D; s++) {
        const bf16 *in = natural + s * BLOCK_ELEMENTS;
        if (x)
            block_pair_rows((word *)block_at(layout, x, s), in, BLOCK);
        for (int tile = 0; transposed && tile < 2; tile++)
            transpose_16x16((word *)block_at(layout, transposed, s) + tile * 256, 16, (const word *)in + tile * 256,
                            16);
    }
}
