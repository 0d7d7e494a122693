// Thin products: the depth, or the narrower operand of a weight gradient, or the output has few columns, as with
// adapters of a low rank. A backend that packs operands, or pads them to tiles, takes many times as long. Operands are
// multiplied in words of 32 bits: an fp32 number, or a pair of bf16 along the depth. The right operand is packed, so
// that words of neighboring columns are the lanes of a vector; the left one's rows are read once, in order. Each
// element is summed in the order of depth by one thread: no number of threads changes a bit.
#pragma once
#include "kernels/matmul/gemm.cuh"    // struct gemm
#include "kernels/vectors_floatx.cuh" // floatx_load, row_vec_load
#include "kernels/xvec.cuh"           // xvec_dot
#include <omp.h>                      // omp_get_thread_num

enum { THIN_MAX = 64 }; // columns, or depth, up to which a product is thin
// Sums of THIN_ROWS by LANES, or of half the rows or THIN_LINES by THIN_COLUMNS, stay in registers: 32 or 16 vectors.
#if defined(__AVX512F__) || !defined(__SSE2__)
enum { THIN_ROWS = 16, THIN_LINES = 8 };
#else
enum { THIN_ROWS = 8, THIN_LINES = 4 };
#endif
enum {
    THIN_COLUMNS = 2 * LANES,
    THIN_LINE = 64 / sizeof(floatX), // elements of a cache line
    THIN_WORDS = THIN_MAX,           // of the depth that a block is summed over at a time
    THIN_TOKENS = 32,                // tokens, a weight gradient's depth, that are summed at a time
    THIN_STEPS = THIN_TOKENS / XVEC_PARTS,
};
#define THIN_ALIGN __attribute__((aligned(64)))
#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < n; i++)

// Whether the depth or the columns are at most THIN_MAX, or for a weight gradient (A transposed) the rows or columns.
static inline bool gemm_is_thin(const struct gemm *g) {
    return gemm_min(g->a.transposed ? g->rows : g->depth, g->cols) <= THIN_MAX;
}

// ---- words ----

// Returns the LANES words from p on, one in each lane.
ALWAYS_INLINE xvec thin_load(const word *p) {
    xvec x;
    memcpy(&x, p, sizeof x);
    return x;
}
#ifdef PRECISION_BF16
// Returns the word *p in every lane; thin_load reads a word for each lane.
ALWAYS_INLINE xvec thin_set(const word *p) { return vec_words_set(*p); }
// Joins `count` columns of two rows to words. A NULL `next` counts as zeros. In fp32 only `row` is copied.
static inline void thin_join(word *out, const floatX *row, const floatX *next, int count) {
    if (next) {
#pragma omp simd
        for (int i = 0; i < count; i++)
            out[i] = (word)row[i].bits | (word)next[i].bits << 16;
    } else {
#pragma omp simd
        for (int i = 0; i < count; i++)
            out[i] = row[i].bits;
    }
}
// Returns the column whose word thin_join_tile puts at place p, of THIN_COLUMNS.
static inline int thin_column(int p) { return p % LANES * 2 + p / LANES; } // which asks for no permutation
// Joins THIN_COLUMNS columns of two rows to words, with column thin_column(p) at place p.
ALWAYS_INLINE void thin_join_tile(word *out, const floatX *row, const floatX *next) {
    const xvec x = xvec_load(row), y = xvec_load(next),
               joined[] = {(x & 0xffffu) | y << 16, x >> 16 | (y & 0xffff0000u)};
    memcpy(out, joined, sizeof joined);
}
#else
ALWAYS_INLINE xvec thin_set(const word *p) { return vec_set(*(const float *)p); }
static inline void thin_join(word *out, const floatX *row, const floatX *next, int count) {
    memcpy(out, row, (size_t)count * sizeof *row);
}
static inline int thin_column(int p) { return p; }
ALWAYS_INLINE void thin_join_tile(word *out, const floatX *row, const floatX *next) {
    memcpy(out, row, THIN_COLUMNS * sizeof *row);
}
#endif

// ---- out = A B ----

static inline int64_t thin_words(int64_t depth) { return (depth + XVEC_PARTS - 1) / XVEC_PARTS; }
static inline int64_t thin_width(int64_t cols) { return gemm_round_up(cols, LANES); }

// Copies the words of elements [k, depth) of a row, THIN_WORDS at most; later words stay. A pair's missing second is 0.
static inline void thin_copy_row(word out[THIN_WORDS], const floatX *row, int64_t k, int64_t depth) {
    if (depth - k >= THIN_WORDS * XVEC_PARTS) {
        memcpy(out, row + k, THIN_WORDS * sizeof *out);
        return;
    }
    out[(depth - k - 1) / XVEC_PARTS] = 0;
    memcpy(out, row + k, (size_t)(depth - k) * sizeof *row);
}

// Packs words [from, to) of the right operand's depth at packed + from * width: (words, width), zeros past the columns.
static void thin_pack(word *packed, const struct gemm *g, int64_t from, int64_t to) {
    const struct gemm_operand *b = &g->b;
    const int64_t width = thin_width(g->cols), whole = gemm_min(to, g->depth / XVEC_PARTS);
    memset(packed + from * width, 0, (size_t)((to - from) * width) * sizeof *packed);
    if (!b->transposed) {
        for (int64_t s = from; s < to; s++) {
            const floatX *row = b->data + s * XVEC_PARTS * b->ld;
            thin_join(packed + s * width, row, s < whole ? row + b->ld : NULL, (int)g->cols);
        }
        return;
    }
    for (int64_t c = 0; c < g->cols; c++) {
        const floatX *row = b->data + c * b->ld;
        for (int64_t s = from; s < whole; s++)
            memcpy(packed + s * width + c, row + s * XVEC_PARTS, sizeof *packed);
        if (gemm_max(from, whole) < to)
            memcpy(packed + whole * width + c, row + whole * XVEC_PARTS, sizeof *row);
    }
}

struct thin_rows {
    const struct gemm *g;
    const word *packed;
    int64_t row;
    int count;           // rows that there are; the others are copies of the last one, and not written
    int64_t first;       // of the words
    int words;           // THIN_WORDS, or less where the depth ends
    const floatX *ahead; // these words in the next group, to be prefetched; NULL where there is none
    THIN_ALIGN word a[THIN_ROWS][THIN_WORDS];
    THIN_ALIGN float sums[THIN_ROWS][THIN_MAX]; // where the depth does not end: (rows, columns)
};

// Writes sums to out, or adds them if the gemm adds: x's rows [i0, i0 + rows) below x->count, `left` columns from j on.
ALWAYS_INLINE void thin_write(const int rows, const int vecs, const struct thin_rows *x, int i0, int64_t j,
                              vec sums[THIN_ROWS][2], const int left) {
    const int64_t ld = x->g->ld_out;
    floatX *out = x->g->out + (x->row + i0) * ld + j;
    EACH(i, rows) {
        if (i0 + i >= x->count)
            return;
        if (x->g->add) {
            EACH(v, vecs) { sums[i][v] += row_vec_load(out + i * ld, v * LANES, left); }
        }
        EACH(v, vecs) { row_vec_store(out + i * ld, sums[i][v], v * LANES, left); }
    }
}
// Adds products over x's piece of the depth to sums of x's rows [i0, i0 + rows), `vecs` vectors of columns from j on.
// x->sums keeps them between pieces; the last piece writes them to out. ahead: elements of A to prefetch, or NULL.
ALWAYS_INLINE void thin_block(const int rows, const int vecs, struct thin_rows *x, int i0, int64_t j,
                              const floatX *ahead) {
    const int64_t cols = x->g->cols, width = thin_width(cols);
    const word *packed = x->packed + x->first * width + j;
    const bool last = x->first + x->words == thin_words(x->g->depth);
    vec sums[THIN_ROWS][2];
    EACH(i, rows) EACH(v, vecs) { sums[i][v] = x->first ? vec_load(x->sums[i0 + i] + j + v * LANES) : vec_set(0); }
    for (int s = 0; s < x->words; s++, packed += width) {
        xvec w[2];
        EACH(v, vecs) { w[v] = thin_load(packed + v * LANES); }
        if (ahead)
            __builtin_prefetch(ahead + s % THIN_ROWS * x->g->a.ld + s / THIN_ROWS * THIN_LINE);
        EACH(i, rows) {
            const xvec a = thin_set(&x->a[i0 + i][s]);
            EACH(v, vecs) { sums[i][v] = xvec_dot(sums[i][v], a, w[v]); }
        }
    }
    if (!last) {
        EACH(i, rows) EACH(v, vecs) { vec_store(x->sums[i0 + i] + j + v * LANES, sums[i][v]); }
    } else if (cols - j >= vecs * LANES)
        thin_write(rows, vecs, x, i0, j, sums, vecs * LANES);
    else
        thin_write(rows, vecs, x, i0, j, sums, (int)(cols - j));
}
// Computes all columns of x's rows, over x's piece of the depth. THIN_ROWS chains of sums hide their latency.
static void thin_columns(struct thin_rows *x) {
    const struct gemm *g = x->g;
    for (int64_t j = 0; j < g->cols; j += THIN_COLUMNS) {
        const floatX *ahead = j == 0 ? x->ahead : NULL;
        for (int i = 0; i < THIN_ROWS && g->add && x->ahead; i++)
            for (int line = 0; line < THIN_COLUMNS; line += THIN_LINE)
                __builtin_prefetch(g->out + (x->row + THIN_ROWS + i) * g->ld_out + j + line, 1);
        if (g->cols - j > LANES) {
            thin_block(THIN_ROWS / 2, 2, x, 0, j, ahead);
            thin_block(THIN_ROWS / 2, 2, x, THIN_ROWS / 2, j, NULL);
        } else
            thin_block(THIN_ROWS, 1, x, 0, j, ahead);
    }
}
// Computes THIN_ROWS rows of out from `row` on, or as many as there are. packed: the right operand, by thin_pack.
static void thin_rows_run(const struct gemm *g, const word *packed, int64_t row) {
    const int64_t words = thin_words(g->depth), ld = g->a.ld;
    struct thin_rows x;
    x.g = g;
    x.packed = packed;
    x.row = row;
    x.count = (int)gemm_min(THIN_ROWS, g->rows - row);
    for (x.first = 0; x.first < words; x.first += THIN_WORDS) {
        x.words = (int)gemm_min(THIN_WORDS, words - x.first);
        x.ahead = row + 2 * THIN_ROWS <= g->rows ? g->a.data + (row + THIN_ROWS) * ld + x.first * XVEC_PARTS : NULL;
        for (int i = 0; i < THIN_ROWS; i++)
            thin_copy_row(x.a[i], g->a.data + gemm_min(row + i, g->rows - 1) * ld, x.first * XVEC_PARTS, g->depth);
        thin_columns(&x);
    }
}

// Computes gemm_thin's product to g->out, for an A stored by rows; threads share the rows. workspace: gemm_thin's.
static void thin_product(const struct gemm *g, void *workspace, const struct device *dev) {
    word *const packed = (word *)workspace;
#pragma omp parallel num_threads(dev->threads)
    {
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads(), words = thin_words(g->depth);
        thin_pack(packed, g, words * thread / threads, words * (thread + 1) / threads);
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t row = 0; row < g->rows; row += THIN_ROWS)
            thin_rows_run(g, packed, row);
    }
}

// ---- sum = A B, of an A and a B stored by tokens, which are the depth ----

// The narrow operand's columns are lines of the sums, the wide one's their lanes.
struct thin_gradient {
    const struct gemm *g;
    const struct gemm_operand *narrow, *wide;
    int64_t narrow_cols, wide_cols;
    float *sums; // (tiles of THIN_COLUMNS wide columns, lines, THIN_COLUMNS), in the order of thin_column
};
// Returns a weight gradient's narrow and wide operand. workspace: thin_workspace_bytes; NULL: only sizes are wanted.
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
static inline int64_t thin_lines(const struct thin_gradient *x) { return gemm_round_up(x->narrow_cols, THIN_LINES); }
static inline int64_t thin_tiles(const struct thin_gradient *x) {
    return (x->wide_cols + THIN_COLUMNS - 1) / THIN_COLUMNS;
}

// Packs THIN_TOKENS tokens of a tile of `wide` from t on to out (THIN_STEPS, THIN_COLUMNS), in thin_column's order.
static void thin_pack_tile(word *out, const struct thin_gradient *x, int64_t tile, int64_t t) {
    const int64_t first = tile * THIN_COLUMNS, depth = x->g->depth, ld = x->wide->ld;
    const int64_t tokens = gemm_min(THIN_TOKENS, depth - t), columns = gemm_min(THIN_COLUMNS, x->wide_cols - first);
    const floatX *from = x->wide->data + t * ld + first;
    THIN_ALIGN floatX padded[THIN_TOKENS * THIN_COLUMNS];
    int64_t from_ld = ld;
    if (tokens < THIN_TOKENS || columns < THIN_COLUMNS) {
        memset(padded, 0, sizeof padded);
        for (int64_t i = 0; i < tokens; i++)
            memcpy(padded + i * THIN_COLUMNS, from + i * ld, (size_t)columns * sizeof *padded);
        from = padded;
        from_ld = THIN_COLUMNS;
    }
    for (int s = 0; s < THIN_STEPS; s++, from += XVEC_PARTS * from_ld)
        thin_join_tile(out + s * THIN_COLUMNS, from, from + from_ld);
}
// out (THIN_STEPS, THIN_MAX) = the narrow operand, THIN_TOKENS tokens from t on; 0 past the ends
static void thin_pack_narrow(word *out, const struct thin_gradient *x, int64_t t) {
    const int64_t end = gemm_min(x->g->depth, t + THIN_TOKENS), ld = x->narrow->ld;
    memset(out, 0, THIN_STEPS * THIN_MAX * sizeof *out);
    for (; t < end; t += XVEC_PARTS, out += THIN_MAX) {
        const floatX *row = x->narrow->data + t * ld;
        thin_join(out, row, t + 1 < end ? row + ld : NULL, (int)x->narrow_cols);
    }
}

// Adds a block of tokens to THIN_LINES lines of a tile's sums. If `prefetch`, prefetches the next tile, at `ahead`.
ALWAYS_INLINE void thin_sum_lines(float *sums, const word *narrow, const word *wide, const bool prefetch,
                                  const floatX *ahead, int64_t ld) {
    const int64_t second = XVEC_PARTS == 2 ? ld : LANES;
    vec sum[THIN_LINES][2];
    EACH(i, THIN_LINES) EACH(v, 2) { sum[i][v] = vec_load(sums + i * THIN_COLUMNS + v * LANES); }
    for (int s = 0; s < THIN_STEPS; s++) {
        const xvec w[] = {thin_load(wide + s * THIN_COLUMNS), thin_load(wide + s * THIN_COLUMNS + LANES)};
        if (prefetch) {
            __builtin_prefetch(ahead + s * XVEC_PARTS * ld);
            __builtin_prefetch(ahead + s * XVEC_PARTS * ld + second);
        }
        EACH(i, THIN_LINES) {
            const xvec x = thin_set(narrow + s * THIN_MAX + i);
            EACH(v, 2) { sum[i][v] = xvec_dot(sum[i][v], x, w[v]); }
        }
    }
    EACH(i, THIN_LINES) EACH(v, 2) { vec_store(sums + i * THIN_COLUMNS + v * LANES, sum[i][v]); }
}

static void thin_write_tile(const struct thin_gradient *x, int64_t tile) {
    const struct gemm *g = x->g;
    const bool lines_are_rows = x->narrow == &g->a;
    const int64_t first = tile * THIN_COLUMNS, line_step = lines_are_rows ? g->ld_out : 1;
    const int64_t column_step = lines_are_rows ? 1 : g->ld_out;
    const float *sums = x->sums + tile * thin_lines(x) * THIN_COLUMNS;
    for (int p = 0; p < THIN_COLUMNS; p++) {
        const int64_t column = first + thin_column(p);
        float *to = g->sum + column * column_step;
        for (int64_t line = 0; column < x->wide_cols && line < x->narrow_cols; line++, to += line_step)
            *to = sums[line * THIN_COLUMNS + p] + (g->add ? *to : 0);
    }
}

// Computes the sums' tiles [from, to), over all tokens, and writes them to the gemm's sum, or adds them where it adds.
static void thin_tiles_run(const struct thin_gradient *x, int64_t from, int64_t to) {
    THIN_ALIGN word narrow[THIN_STEPS * THIN_MAX], wide[THIN_STEPS * THIN_COLUMNS];
    const int64_t lines = thin_lines(x), depth = x->g->depth, ld = x->wide->ld;
    memset(x->sums + from * lines * THIN_COLUMNS, 0, (size_t)((to - from) * lines * THIN_COLUMNS) * sizeof *x->sums);
    for (int64_t t = 0; t < depth; t += THIN_TOKENS) {
        thin_pack_narrow(narrow, x, t);
        for (int64_t tile = from; tile < to; tile++) {
            const bool prefetch = tile + 1 < to && t + THIN_TOKENS <= depth;
            const floatX *ahead = prefetch ? x->wide->data + t * ld + (tile + 1) * THIN_COLUMNS : NULL;
            float *sums = x->sums + tile * lines * THIN_COLUMNS;
            thin_pack_tile(wide, x, tile, t);
            if (prefetch)
                thin_sum_lines(sums, narrow, wide, true, ahead, ld);
            for (int64_t line = prefetch ? THIN_LINES : 0; line < lines; line += THIN_LINES)
                thin_sum_lines(sums + line * THIN_COLUMNS, narrow + line, wide, false, NULL, 0);
        }
    }
    for (int64_t tile = from; tile < to; tile++)
        thin_write_tile(x, tile);
}
#undef EACH

// Computes gemm_thin's product to g->sum, for a weight gradient; threads share the columns. workspace: gemm_thin's.
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
                           : (size_t)(thin_words(g->depth) * thin_width(g->cols)) * sizeof(word);
}
// Computes a gemm that gemm_is_thin, without bias or dbias. workspace: thin_workspace_bytes, aligned to 64.
static void gemm_thin(const struct gemm *g, void *workspace, const struct device *dev) {
    if (g->a.transposed)
        thin_gradient(g, workspace, dev);
    else
        thin_product(g, workspace, dev);
}
