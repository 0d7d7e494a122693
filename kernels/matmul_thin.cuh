// Thin products, where the depth, or the narrower operand of a weight gradient, or the output has few columns, as those
// of adapters of a low rank do. A backend that packs operands, or pads them to tiles, takes many times as long as their
// arithmetic or their way through memory.
//
// The right operand is packed into words of 32 bits, an fp32 number or a pair of bf16 along the depth, whose columns
// are the lanes of a vector. Rows of the left operand are read where they lie, once and in order, a word in all lanes
// at a time. A weight gradient's sums over a block of tokens stay in registers, those over all tokens in a cache.
//
// Each element is summed in the order of depth by one thread, so that no number of threads changes a bit.
#pragma once
#include "kernels/matmul_gemm.cuh"    // struct gemm
#include "kernels/vectors_floatx.cuh" // floatx_load, floatx_store
#include "kernels/xvec.cuh"           // xvec_dot, xvec_join
#include <omp.h>                      // omp_get_thread_num

// Columns, or depth, up to which a product is thin.
enum { THIN_MOST = 64 };
// Sums of THIN_ROWS x 2 vectors, or of THIN_GROUP x 2, stay in registers: 32 of them, or 16 of x86 without AVX-512.
#if defined(__AVX512F__) || !defined(__SSE2__)
enum { THIN_ROWS = 12, THIN_GROUP = 8 };
#else
enum { THIN_ROWS = 6, THIN_GROUP = 4 };
#endif
enum {
    THIN_COLUMNS = 2 * LANES,
    THIN_CHUNK = 16,  // words of a row, a cache line, before which the next rows' line is prefetched
    THIN_TOKENS = 64, // of a block that a weight gradient is summed over in registers
    THIN_STEPS = THIN_TOKENS / XVEC_PARTS,
};
#define EACH(i, n) _Pragma("GCC unroll 12") for (int i = 0; i < n; i++)

// Whether gemm_thin computes this gemm, and is faster than a backend.
static inline bool gemm_is_thin(const struct gemm *g) {
    return gemm_min(g->a.transposed ? g->rows : g->depth, g->cols) <= THIN_MOST;
}

// ---- out = A B ----

static inline int64_t thin_steps(int64_t depth) { return (depth + XVEC_PARTS - 1) / XVEC_PARTS; }
static inline int64_t thin_width(int64_t cols) { return gemm_round_up(cols, LANES); }

// Packs step s of the right operand: the words of all columns, and zeros up to whole vectors.
static inline void thin_pack_step(word *packed, const struct gemm *g, int64_t s) {
    const struct gemm_operand *b = &g->b;
    const int64_t k = s * XVEC_PARTS;
    const int count = (int)gemm_min(XVEC_PARTS, g->depth - k); // elements of a word
    for (int64_t c = 0; c < thin_width(g->cols); c += LANES) {
        xvec words = {0};
        if (!b->transposed) {
            const floatX *row = b->data + k * b->ld + c;
            const int lanes = (int)gemm_min(LANES, g->cols - c);
            words = xvec_join_rows(row, count > 1 ? row + b->ld : NULL, lanes);
        } else
            for (int i = 0; i < LANES && c + i < g->cols; i++)
                memcpy((word *)&words + i, b->data + (c + i) * b->ld + k, (size_t)count * sizeof *b->data);
        memcpy(packed + c, &words, sizeof words);
    }
}

// sums[i][v] += row i of a times vector v of the packed words, over `steps`.
ALWAYS_INLINE void thin_dot(const int rows, const int vecs, vec sums[THIN_ROWS][2], const floatX *a, int64_t lda,
                            const word *packed, int64_t width, int64_t steps) {
    for (int64_t s = 0; s < steps; s++) {
        xvec w[2];
        EACH(v, vecs) { w[v] = xvec_load_words(packed + s * width + v * LANES); }
        EACH(i, rows) {
            const xvec x = xvec_set(a + i * lda + s * XVEC_PARTS, XVEC_PARTS);
            EACH(v, vecs) { sums[i][v] = xvec_dot(sums[i][v], x, w[v]); }
        }
    }
}

// A block of out: `rows` rows from `row` on, `vecs` vectors of columns from j on.
ALWAYS_INLINE void thin_block(const int rows, const int vecs, const struct gemm *g, const word *packed, int64_t row,
                              int64_t j) {
    const int64_t lda = g->a.ld, width = thin_width(g->cols), whole = g->depth / XVEC_PARTS;
    const floatX *a = g->a.data + row * lda;
    const int next = (int)gemm_min(rows, g->rows - row - rows); // rows to prefetch
    vec sums[THIN_ROWS][2];
    EACH(i, rows) EACH(v, vecs) { sums[i][v] = vec_set(0); }
    packed += j;
    for (int i = 0; i < next && g->add; i++)
        __builtin_prefetch(g->out + (row + rows + i) * g->ld_out + j, 1);
    for (int64_t s = 0; s < whole; s += THIN_CHUNK) {
        for (int i = 0; i < next && j == 0; i++)
            __builtin_prefetch(a + (rows + i) * lda + s * XVEC_PARTS);
        thin_dot(rows, vecs, sums, a + s * XVEC_PARTS, lda, packed + s * width, width, gemm_min(THIN_CHUNK, whole - s));
    }
    if (whole * XVEC_PARTS < g->depth) {
        EACH(i, rows) {
            const xvec x = xvec_set(a + i * lda + whole * XVEC_PARTS, 1);
            EACH(v, vecs) { sums[i][v] = xvec_dot(sums[i][v], x, xvec_load_words(packed + whole * width + v * LANES)); }
        }
    }
    EACH(i, rows) EACH(v, vecs) {
        floatX *to = g->out + (row + i) * g->ld_out;
        const int c = (int)j + v * LANES;
        if (g->add)
            sums[i][v] += row_vec_load(to, c, (int)g->cols);
        row_vec_store(to, sums[i][v], c, (int)g->cols);
    }
}
ALWAYS_INLINE void thin_rows(const int rows, const struct gemm *g, const word *packed, int64_t row) {
    for (int64_t j = 0; j < g->cols; j += THIN_COLUMNS)
        if (g->cols - j > LANES)
            thin_block(rows, 2, g, packed, row, j);
        else
            thin_block(rows, 1, g, packed, row, j);
}

// gemm_thin for an A that is stored by rows. Threads share the rows.
static void thin_product(const struct gemm *g, void *workspace, const struct device *dev) {
    word *const packed = (word *)workspace; // (steps, width)
    const int64_t whole = g->rows / THIN_ROWS;
#pragma omp parallel num_threads(dev->threads)
    {
#pragma omp for schedule(static)
        for (int64_t s = 0; s < thin_steps(g->depth); s++)
            thin_pack_step(packed + s * thin_width(g->cols), g, s);
#pragma omp for schedule(static) nowait
        for (int64_t group = 0; group < whole; group++)
            thin_rows(THIN_ROWS, g, packed, group * THIN_ROWS);
#pragma omp for schedule(static)
        for (int64_t row = whole * THIN_ROWS; row < g->rows; row++)
            thin_rows(1, g, packed, row);
    }
}

// ---- sum = A B, of an A and a B stored by tokens, which are the depth ----

// The narrow operand's columns are lines of the sums, the wide one's their lanes.
struct thin_gradient {
    const struct gemm *g;
    const struct gemm_operand *narrow, *wide;
    int64_t narrow_cols, wide_cols;
    float *sums; // (tiles of THIN_COLUMNS wide columns, lines, THIN_COLUMNS)
};
static struct thin_gradient thin_gradient_of(const struct gemm *g, void *workspace) {
    const bool a_is_narrow = g->rows <= g->cols;
    const struct thin_gradient x = {g,
                                    a_is_narrow ? &g->a : &g->b,
                                    a_is_narrow ? &g->b : &g->a,
                                    a_is_narrow ? g->rows : g->cols,
                                    a_is_narrow ? g->cols : g->rows,
                                    (float *)workspace};
    return x;
}
static inline int64_t thin_lines(const struct thin_gradient *x) { return gemm_round_up(x->narrow_cols, THIN_GROUP); }
static inline int64_t thin_tiles(const struct thin_gradient *x) {
    return (x->wide_cols + THIN_COLUMNS - 1) / THIN_COLUMNS;
}

// Packs columns [c, c + width), of which `cols` in all exist, of the tokens from t on: out (THIN_STEPS, width).
static inline void thin_pack_tokens(word *out, const struct gemm_operand *x, int64_t cols, int64_t c, int width,
                                    int64_t t, int64_t depth) {
    for (int s = 0; s < THIN_STEPS; s++)
        for (int i = 0; i < width; i += LANES) {
            const int64_t token = t + s * XVEC_PARTS, lanes = gemm_min(LANES, cols - c - i);
            const floatX *row = x->data + token * x->ld + c + i;
            xvec words = {0};
            if (token < depth && lanes > 0)
                words = xvec_join_rows(row, token + 1 < depth ? row + x->ld : NULL, (int)lanes);
            memcpy(out + s * width + i, &words, sizeof words);
        }
}

// THIN_GROUP lines of a tile's sums += those of a block of tokens.
static void thin_sum_block(float *sums, const word *narrow, const word *wide) {
    vec sum[THIN_GROUP][2];
    EACH(i, THIN_GROUP) EACH(v, 2) { sum[i][v] = vec_load(sums + i * THIN_COLUMNS + v * LANES); }
    for (int s = 0; s < THIN_STEPS; s++) {
        const xvec w[] = {xvec_load_words(wide + s * THIN_COLUMNS), xvec_load_words(wide + s * THIN_COLUMNS + LANES)};
        EACH(i, THIN_GROUP) {
            const xvec x = xvec_set((const floatX *)(narrow + s * THIN_MOST + i), XVEC_PARTS);
            EACH(v, 2) { sum[i][v] = xvec_dot(sum[i][v], x, w[v]); }
        }
    }
    EACH(i, THIN_GROUP) EACH(v, 2) { vec_store(sums + i * THIN_COLUMNS + v * LANES, sum[i][v]); }
}

static void thin_write_tile(const struct thin_gradient *x, int64_t tile) {
    const struct gemm *g = x->g;
    const float *sums = x->sums + tile * thin_lines(x) * THIN_COLUMNS;
    const int64_t first = tile * THIN_COLUMNS, count = gemm_min(THIN_COLUMNS, x->wide_cols - first);
    const int64_t down = x->narrow == &g->a ? x->narrow_cols : count,
                  across = x->narrow == &g->a ? count : x->narrow_cols;
    const int64_t line = x->narrow == &g->a ? THIN_COLUMNS : 1, step = x->narrow == &g->a ? 1 : THIN_COLUMNS;
    float *to = g->sum + (x->narrow == &g->a ? first : first * g->ld_out);
    for (int64_t i = 0; i < down; i++)
        for (int64_t j = 0; j < across; j++)
            to[i * g->ld_out + j] = sums[i * line + j * step] + (g->add ? to[i * g->ld_out + j] : 0);
}

// Tiles [from, to), over all tokens.
static void thin_tiles_run(const struct thin_gradient *x, int64_t from, int64_t to) {
    __attribute__((aligned(64))) word narrow[THIN_STEPS * THIN_MOST], wide[THIN_STEPS * THIN_COLUMNS];
    const int64_t lines = thin_lines(x), depth = x->g->depth, ld = x->wide->ld;
    memset(x->sums + from * lines * THIN_COLUMNS, 0, (size_t)((to - from) * lines * THIN_COLUMNS) * sizeof *x->sums);
    for (int64_t t = 0; t < depth; t += THIN_TOKENS) {
        thin_pack_tokens(narrow, x->narrow, x->narrow_cols, 0, THIN_MOST, t, depth);
        for (int64_t tile = from; tile < to; tile++) {
            thin_pack_tokens(wide, x->wide, x->wide_cols, tile * THIN_COLUMNS, THIN_COLUMNS, t, depth);
            for (int64_t i = 0; i < gemm_min(THIN_TOKENS, depth - t) && tile + 1 < to; i++)
                __builtin_prefetch(x->wide->data + (t + i) * ld + (tile + 1) * THIN_COLUMNS);
            for (int64_t line = 0; line < lines; line += THIN_GROUP)
                thin_sum_block(x->sums + (tile * lines + line) * THIN_COLUMNS, narrow + line, wide);
        }
    }
    for (int64_t tile = from; tile < to; tile++)
        thin_write_tile(x, tile);
}
#undef EACH

// gemm_thin for a weight gradient. Threads share the wide operand's columns.
static void thin_gradient(const struct gemm *g, void *workspace, const struct device *dev) {
    const struct thin_gradient x = thin_gradient_of(g, workspace);
#pragma omp parallel num_threads(dev->threads)
    {
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads(), tiles = thin_tiles(&x);
        thin_tiles_run(&x, tiles * thread / threads, tiles * (thread + 1) / threads);
    }
}

// ---- both ----

static size_t thin_workspace_bytes(const struct gemm *g) {
    const struct thin_gradient x = thin_gradient_of(g, NULL);
    return g->a.transposed ? (size_t)(thin_tiles(&x) * thin_lines(&x)) * THIN_COLUMNS * sizeof(float)
                           : (size_t)(thin_steps(g->depth) * thin_width(g->cols)) * sizeof(word);
}
// Computes a gemm for which gemm_is_thin is true, without a bias. workspace: thin_workspace_bytes, aligned to 64.
static void gemm_thin(const struct gemm *g, void *workspace, const struct device *dev) {
    if (g->a.transposed)
        thin_gradient(g, workspace, dev);
    else
        thin_product(g, workspace, dev);
}
