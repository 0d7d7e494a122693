// The product of a few rows with a weight, as in decoding: each weight is read once, at the memory's bandwidth, and
// meets all rows while it is in a cache. The order of a sum depends neither on the number of rows nor on threads.
#pragma once
#include "kernels/matmul/gemm.cuh" // struct gemm
#include "kernels/vectors.cuh"     // vec_sum
#include "kernels/xvec.cuh"        // xvec_load, xvec_dot
#include <omp.h>                   // omp_get_thread_num

// A thread reads two runs of neighboring weight rows, half its share each, at a time. On two Zen 4 cores that streams
// 51 GB/s; one run streams 44, four neighboring rows at a time 21, a triad 35. Software prefetches only cost.
enum { FEW_RUNS = 2 };
// FEW_ROWS rows of the input meet a weight in registers. FEW_COLUMNS columns of a run meet all rows before the next do.
enum { FEW_ROWS = 4, FEW_COLUMNS = 16 };
enum { FEW_ROWS_MAX = 16 }; // up to which the products take no longer than the weight's way from memory

// Whether gemm_few_rows can take the gemm: a forward, as its operands are stored, of at most FEW_ROWS_MAX rows.
static inline bool gemm_has_few_rows(const struct gemm *g) {
    return g->rows <= FEW_ROWS_MAX && g->b.transposed && !g->a.transposed && g->out != NULL;
}

#define EACH(i, n) _Pragma("GCC unroll 4") for (int i = 0; i < n; i++)

// Computes the dot products of rows 0 to rows - 1 of a with `runs` weight rows, the first at b and each next one
// `apart` elements later. sums[i][run] has lanes, which the caller adds up.
ALWAYS_INLINE void few_rows_dot(const int rows, const int runs, vec sums[FEW_ROWS][FEW_RUNS], const floatX *a,
                                int64_t lda, const floatX *b, int64_t apart, int64_t depth) {
    const int64_t whole = depth / XVEC_LANES * XVEC_LANES;
    const int rest = (int)(depth - whole);
    EACH(i, rows) EACH(run, runs) { sums[i][run] = vec_set(0); }
    for (int64_t k = 0; k < whole; k += XVEC_LANES) {
        xvec w[FEW_RUNS];
        EACH(run, runs) { w[run] = xvec_load(b + run * apart + k); }
        EACH(i, rows) {
            const xvec x = xvec_load(a + i * lda + k);
            EACH(run, runs) { sums[i][run] = xvec_dot(sums[i][run], w[run], x); }
        }
    }
    if (rest > 0) {
        EACH(run, runs) {
            const xvec w = xvec_load_some(b + run * apart + whole, rest);
            EACH(i, rows) { sums[i][run] = xvec_dot(sums[i][run], w, xvec_load_some(a + i * lda + whole, rest)); }
        }
    }
}

// Computes g's output rows [row, row + rows), `columns` <= FEW_COLUMNS from j and, with 2 runs, from j + apart on.
ALWAYS_INLINE void few_rows_block(const int rows, const int runs, const struct gemm *g, int64_t row, int64_t j,
                                  int columns, int64_t apart) {
    const floatX *a = g->a.data + row * g->a.ld, *b = g->b.data + j * g->b.ld;
    const int64_t lda = g->a.ld, ldb = g->b.ld, depth = g->depth;
    float out[FEW_ROWS][FEW_RUNS][FEW_COLUMNS];
    for (int column = 0; column < columns; column++) {
        vec sums[FEW_ROWS][FEW_RUNS];
        few_rows_dot(rows, runs, sums, a, lda, b + column * ldb, apart * ldb, depth);
        EACH(i, rows) EACH(run, runs) { out[i][run][column] = vec_sum(sums[i][run]); }
    }
    for (int i = 0; i < rows; i++)
        for (int run = 0; run < runs; run++) {
            floatX *to = g->out + (row + i) * g->ld_out + j + run * apart;
            const floatX *bias = g->bias ? g->bias + j + run * apart : NULL;
#pragma omp simd
            for (int column = 0; column < columns; column++)
                to[column] = to_floatX(out[i][run][column] + (g->add ? to_float(to[column])
                                                              : bias ? to_float(bias[column])
                                                                     : 0.0f));
        }
}
#undef EACH

// Calls few_rows_block for all rows, a few at a time: only the first few read the weights from memory.
ALWAYS_INLINE void few_rows_columns(const int runs, const struct gemm *g, int64_t j, int columns, int64_t apart) {
    for (int64_t row = 0; row < g->rows; row += FEW_ROWS)
        switch (gemm_min(FEW_ROWS, g->rows - row)) {
        case 1: few_rows_block(1, runs, g, row, j, columns, apart); break;
        case 2: few_rows_block(2, runs, g, row, j, columns, apart); break;
        case 3: few_rows_block(3, runs, g, row, j, columns, apart); break;
        default: few_rows_block(FEW_ROWS, runs, g, row, j, columns, apart); break;
        }
}

static void gemm_few_rows(const struct gemm *g, const struct device *dev) {
#pragma omp parallel num_threads(dev->threads)
    {
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const int64_t begin = g->cols * thread / threads, end = g->cols * (thread + 1) / threads;
        const int64_t apart = (end - begin) / FEW_RUNS;
        for (int64_t j = begin; j < begin + apart; j += FEW_COLUMNS)
            few_rows_columns(FEW_RUNS, g, j, (int)gemm_min(FEW_COLUMNS, begin + apart - j), apart);
        if (begin + FEW_RUNS * apart < end)
            few_rows_columns(1, g, begin + FEW_RUNS * apart, (int)(end - begin - FEW_RUNS * apart), 0);
    }
}
