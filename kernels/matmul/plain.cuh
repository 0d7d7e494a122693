// fp32 matrix product in plain C, where no library is installed, by Goto and van de Geijn's "Anatomy of
// High-Performance Matrix Multiplication" (2008): B is packed into strips of PLAIN_COLS columns that stay in L1, A into
// strips of PLAIN_ROWS rows that stay in L2, and a tile of C is held in registers for PLAIN_DEPTH steps.
#pragma once
#include "kernels/device.cuh"      // struct device
#include "kernels/matmul/gemm.cuh" // gemm_min
#include <omp.h>                   // omp_get_thread_num

#if defined(__AVX512F__)
enum { PLAIN_LANES = 16, PLAIN_ROWS = 12 }; // 24 accumulators of 32 registers
#elif defined(__AVX__)
enum { PLAIN_LANES = 8, PLAIN_ROWS = 6 }; // 12 accumulators of 16 registers
#else
enum { PLAIN_LANES = 4, PLAIN_ROWS = 6 };
#endif
enum {
    PLAIN_COLS = 2 * PLAIN_LANES,
    PLAIN_DEPTH = 192,                // a B strip takes 24 KB of L1 with AVX-512, less without
    PLAIN_ROW_BLOCK = 8 * PLAIN_ROWS, // rows and columns of C that are one task of a thread
    PLAIN_COL_BLOCK = 8 * PLAIN_COLS,
    PLAIN_PANEL = 8 * PLAIN_COL_BLOCK, // columns of B that are packed at a time
};
typedef float plain_vector __attribute__((vector_size(PLAIN_LANES * sizeof(float))));

static size_t sgemm_plain_workspace_bytes(const struct device *dev) {
    return sizeof(float) * PLAIN_DEPTH * (PLAIN_PANEL + (size_t)dev->threads * PLAIN_ROW_BLOCK);
}

// strip[k][i] = x(first + i, k) for `width` lines i, zero where first + i >= lines. x(i, k) is x[i*line + k*step].
static inline void plain_pack(float *strip, const float *x, int64_t line, int64_t step, int64_t first, int64_t lines,
                              int width, int depth) {
    const int valid = lines - first < width ? (int)(lines - first) : width;
    x += first * line;
    if (valid == width && line == 1) {
        for (int k = 0; k < depth; k++)
            memcpy(strip + (int64_t)k * width, x + k * step, (size_t)width * sizeof *strip);
        return;
    }
    for (int i = 0; i < width; i++)
        for (int k = 0; k < depth; k++)
            strip[(int64_t)k * width + i] = i < valid ? x[i * line + k * step] : 0.0f;
}

// c (rows, cols) = the upper left part of a (depth, PLAIN_ROWS)^T b (depth, PLAIN_COLS), plus c when `add`
static inline void plain_tile(float *c, int64_t ldc, int rows, int cols, const float *a, const float *b, int depth,
                              bool add) {
    plain_vector sum[PLAIN_ROWS][2];
    memset(sum, 0, sizeof sum);
    for (int k = 0; k < depth; k++) {
        plain_vector b0, b1;
        memcpy(&b0, b + (int64_t)k * PLAIN_COLS, sizeof b0);
        memcpy(&b1, b + (int64_t)k * PLAIN_COLS + PLAIN_LANES, sizeof b1);
#pragma GCC unroll 12
        for (int i = 0; i < PLAIN_ROWS; i++) {
            sum[i][0] += a[(int64_t)k * PLAIN_ROWS + i] * b0;
            sum[i][1] += a[(int64_t)k * PLAIN_ROWS + i] * b1;
        }
    }
    float tile[PLAIN_ROWS][PLAIN_COLS];
    memcpy(tile, sum, sizeof tile);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++)
            c[i * ldc + j] = tile[i][j] + (add ? c[i * ldc + j] : 0.0f);
}

// c (rows, cols) = a block of A times a block of B, both in plain_pack's strips, plus c when `add`: one task.
static void plain_block(float *c, int64_t ldc, int64_t rows, int64_t cols, const float *packed_a, const float *packed_b,
                        int depth, bool add) {
    for (int64_t j = 0; j < cols; j += PLAIN_COLS)
        for (int64_t i = 0; i < rows; i += PLAIN_ROWS)
            plain_tile(c + i * ldc + j, ldc, rows - i < PLAIN_ROWS ? (int)(rows - i) : PLAIN_ROWS,
                       cols - j < PLAIN_COLS ? (int)(cols - j) : PLAIN_COLS, packed_a + i * depth, packed_b + j * depth,
                       depth, add);
}

// Multiplies as sgemm_function says, in plain C. workspace: sgemm_plain_workspace_bytes.
static void sgemm_plain(bool a_transposed, bool b_transposed, int64_t rows, int64_t cols, int64_t depth, const float *a,
                        int64_t lda, const float *b, int64_t ldb, bool add, float *c, int64_t ldc, void *workspace,
                        const struct device *dev) {
    const int64_t a_row = a_transposed ? 1 : lda, a_step = a_transposed ? lda : 1;
    const int64_t b_col = b_transposed ? ldb : 1, b_step = b_transposed ? 1 : ldb;
    float *packed_b = (float *)workspace, *packed_as = packed_b + (size_t)PLAIN_DEPTH * PLAIN_PANEL;
    for (int64_t j0 = 0; j0 < cols; j0 += PLAIN_PANEL)
        for (int64_t k0 = 0; k0 < depth; k0 += PLAIN_DEPTH) {
            const int64_t width = gemm_min(PLAIN_PANEL, cols - j0);
            const int steps = (int)gemm_min(PLAIN_DEPTH, depth - k0);
            const int64_t col_blocks = (width + PLAIN_COL_BLOCK - 1) / PLAIN_COL_BLOCK;
            const int64_t row_blocks = (rows + PLAIN_ROW_BLOCK - 1) / PLAIN_ROW_BLOCK;
#pragma omp parallel num_threads(dev->threads)
            {
#pragma omp for schedule(static)
                for (int64_t j = 0; j < width; j += PLAIN_COLS)
                    plain_pack(packed_b + j * steps, b + j0 * b_col + k0 * b_step, b_col, b_step, j, width, PLAIN_COLS,
                               steps);
                float *packed_a = NULL;
#pragma omp for schedule(static)
                for (int64_t task = 0; task < row_blocks * col_blocks; task++) {
                    const int64_t i0 = task / col_blocks * PLAIN_ROW_BLOCK, j = task % col_blocks * PLAIN_COL_BLOCK;
                    const int64_t height = gemm_min(PLAIN_ROW_BLOCK, rows - i0);
                    if (packed_a == NULL || j == 0) {
                        packed_a = packed_as + (size_t)omp_get_thread_num() * PLAIN_ROW_BLOCK * PLAIN_DEPTH;
                        for (int64_t i = 0; i < height; i += PLAIN_ROWS)
                            plain_pack(packed_a + i * steps, a + i0 * a_row + k0 * a_step, a_row, a_step, i, height,
                                       PLAIN_ROWS, steps);
                    }
                    plain_block(c + i0 * ldc + j0 + j, ldc, height, gemm_min(PLAIN_COL_BLOCK, width - j), packed_a,
                                packed_b + j * steps, steps, add || k0 > 0);
                }
            }
        }
}
