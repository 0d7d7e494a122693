// Attention on the CPU works on blocks of 32 x 32: packed operands, one product, and vectors for the softmax between
// products.
//
// The blocks are multiplied by one of two units, with the same calls. `amx` says which, a constant at every call:
// amx   bf16 operands on AMX tiles (kernels/amx.cuh), 2 x 2 of them a product; where the CPU has AMX and floatX is bf16
//   else  fp32 operands on the vector unit, for fp32, and for bf16 on all other CPUs
// An operand is a row of blocks. A left operand (A) is row-major for both units; a right one (B) is row-major in fp32
// and two VNNI tiles, columns 0 to 15 and 16 to 31, with AMX. Sums (C) are row-major fp32. Blocks are 64-byte aligned.
#pragma once
#include "kernels/amx.cuh"     // amx_available, amx_load, amx_dot
#include "kernels/device.cuh"  // floatX, bf16
#include "kernels/vectors.cuh" // vec, word, transpose_16x16

enum { BLOCK = 32, BLOCK_ELEMENTS = BLOCK * BLOCK };

#define ALIGN_BLOCK __attribute__((aligned(64)))

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
