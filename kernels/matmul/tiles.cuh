// bf16 matrix products on packed tiles, by AMX or by vectors' dot product of bf16 pairs (AVX512_BF16, Arm's BF16).
// C is computed in blocks of 32 x 32, from two tiles of A and two of B for each 32 steps of depth. On AMX these feed
// four accumulator tiles: four loads for four dots, which is what the load ports can deliver from L1 and L2. Three
// levels above that:
//   B   a panel of at most TILES_PANEL_BYTES, packed once, stays in L2 while all rows of A are multiplied by it
//   A   32 rows x TILES_A_DEPTH, packed, stays in L1 for all columns of the panel; the next slice is prefetched to L2
//   C   an fp32 block, in L1 or L2 between two slices of depth, is rounded once, after the last slice
// A thread packs its own columns of B: no copy of the weights to keep, no barrier to wait at. Only an A that is stored
// by columns (dweight's) is packed as a whole, before the product and by all threads, as its transpose would be made
// again for every panel of B. One thread sums each element of C in the order of depth: no partition changes a bit.
#pragma once
#include "kernels/amx.cuh"                // amx_load, amx_dot
#include "kernels/blocks.cuh"             // block_product_dot, block_pair_rows, enum block_unit
#include "kernels/device.cuh"             // struct device, bf16
#include "kernels/matmul/backend_run.cuh" // struct matmul_library
#include "kernels/matmul/gemm.cuh"        // struct gemm
#include "kernels/vectors.cuh"            // vec_store_bf16
#include <stdio.h>                        // snprintf
#ifdef __AVX512F__
#include <immintrin.h> // _mm512_*
#endif

#ifdef PRECISION_BF16 // there is no fp32 on tiles

enum {
    TILES_BLOCK = BLOCK,     // 32 rows and columns of C, and depth, that one step of the inner loop works on
    TILES_PAIR_BYTES = 2048, // two tiles: a 32 x 32 block of A or B, packed
    TILES_C_BYTES = 4096,    // a 32 x 32 block of C
    TILES_A_DEPTH = PRODUCT_STEPS * BLOCK, // 384: 24 KB of A, half of an L1 of 48 KB
    TILES_PANEL_DEPTH = 1536,              // C goes through memory once for every so many steps
    TILES_PANEL_BYTES = 5 << 18,           // 1.25 MB of an L2 of 2 MB
    TILES_SOURCE_AHEAD = 2,                // blocks that packing prefetches ahead
};

// ---- packing: 32 x 32 blocks to two tiles ----

// out (16 x 16 words) = in transposed, at any alignment. Rows of `in` are `stride` bytes apart, an odd number too.
static inline void tiles_transpose(void *out, const void *in, size_t stride) {
#ifdef __AVX512F__
    for (int quad = 0; quad < 4; quad++) { // four columns: a 4 x 4 transpose in each 128-bit lane
        __m512i lane[4];
        for (int i = 0; i < 4; i++) {
            const char *row = (const char *)in + (size_t)i * stride + (size_t)quad * 16;
            lane[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)row));
            lane[i] = _mm512_inserti32x4(lane[i], _mm_loadu_si128((const __m128i *)(row + 4 * stride)), 1);
            lane[i] = _mm512_inserti32x4(lane[i], _mm_loadu_si128((const __m128i *)(row + 8 * stride)), 2);
            lane[i] = _mm512_inserti32x4(lane[i], _mm_loadu_si128((const __m128i *)(row + 12 * stride)), 3);
        }
        const __m512i low01 = _mm512_unpacklo_epi32(lane[0], lane[1]), high01 = _mm512_unpackhi_epi32(lane[0], lane[1]);
        const __m512i low23 = _mm512_unpacklo_epi32(lane[2], lane[3]), high23 = _mm512_unpackhi_epi32(lane[2], lane[3]);
        char *rows = (char *)out + (size_t)quad * 256;
        _mm512_storeu_si512(rows, _mm512_unpacklo_epi64(low01, low23));
        _mm512_storeu_si512(rows + 64, _mm512_unpackhi_epi64(low01, low23));
        _mm512_storeu_si512(rows + 128, _mm512_unpacklo_epi64(high01, high23));
        _mm512_storeu_si512(rows + 192, _mm512_unpackhi_epi64(high01, high23));
    }
#else
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++)
            memcpy((char *)out + 64 * j + 4 * i, (const char *)in + (size_t)i * stride + 4 * j, 4);
#endif
}

// Adds to sums, (16), the sums of the columns of a VNNI tile: 32 rows x 16 columns of bf16, two rows a word.
static inline void tiles_add_columns(float *sums, const word *tile) {
    float sum[16] = {0};
    for (int r = 0; r < 16; r++) {
#pragma omp simd
        for (int n = 0; n < 16; n++) {
            const bf16 even = {(uint16_t)tile[r * 16 + n]}, odd = {(uint16_t)(tile[r * 16 + n] >> 16)};
            sum[n] += bf16_to_float(even) + bf16_to_float(odd);
        }
    }
#pragma omp simd
    for (int n = 0; n < 16; n++)
        sums[n] += sum[n];
}

// tiles (2, 16, 16) = the 32 x 32 block as VNNI pairs of rows. Adds its column sums to sums (32), unless NULL.
static inline void tiles_interleave(word *tiles, const bf16 *source, int64_t ld, float *sums) {
    block_pair_rows(tiles, source, ld);
    for (int half = 0; sums && half < 2; half++)
        tiles_add_columns(sums + half * 16, tiles + half * 256);
}

// An operand as the product reads it, lines x depth: a line is a row of A or a column of B.
struct tiles_operand {
    const bf16 *data;
    int64_t ld;
    int64_t lines, depth;
    bool by_depth; // stored (depth, lines); otherwise (lines, depth)
};

static inline const bf16 *tiles_at(const struct tiles_operand *x, int64_t line, int64_t k) {
    return x->by_depth ? x->data + k * x->ld + line : x->data + line * x->ld + k;
}

// Packs 32 lines from `line` on, 32 steps from k on, into two tiles, as A (16 lines x 32 steps) or as B (VNNI), with
// zeros past the end. Where x is stored by depth, adds the lines' sums to sums (32), unless NULL.
static inline void tiles_pack(bf16 *tiles, const struct tiles_operand *x, int64_t line, int64_t k, bool as_b,
                              float *sums) {
    const bf16 *source = tiles_at(x, line, k);
    int64_t ld = x->ld;
    bf16 padded[TILES_BLOCK * TILES_BLOCK];
    const int64_t lines = x->lines - line, depth = x->depth - k;
    if (lines < TILES_BLOCK || depth < TILES_BLOCK) { // at the edges: a copy with zeros around
        memset(padded, 0, sizeof padded);
        const int64_t rows = gemm_min(TILES_BLOCK, x->by_depth ? depth : lines);
        const int64_t cols = gemm_min(TILES_BLOCK, x->by_depth ? lines : depth);
        for (int64_t i = 0; i < rows; i++)
            memcpy(padded + i * TILES_BLOCK, source + i * ld, (size_t)cols * sizeof *padded);
        source = padded;
        ld = TILES_BLOCK;
    }
    const size_t stride = (size_t)ld * sizeof *source;
    if (!x->by_depth && as_b) {
        tiles_transpose(tiles, source, stride);
        tiles_transpose(tiles + 512, source + 16 * ld, stride);
    } else if (!x->by_depth) {
        for (int i = 0; i < TILES_BLOCK; i++)
            memcpy(tiles + i * TILES_BLOCK, source + i * ld, 64);
    } else if (as_b) {
        tiles_interleave((word *)tiles, source, ld, sums);
    } else {
        word pairs[512];
        tiles_interleave(pairs, source, ld, sums);
        tiles_transpose(tiles, pairs, 64);
        tiles_transpose(tiles + 512, pairs + 256, 64);
    }
}

// Packs `lines` lines from `line` on, `depth` steps from k0 on, in whole blocks, with zeros past the end of x. Block
// (i, k) goes to tiles + i*line_stride + k*1024. sums is tiles_pack's, for all lines, or NULL.
static void tiles_pack_panel(bf16 *tiles, int64_t line_stride, const struct tiles_operand *x, int64_t line,
                             int64_t lines, int64_t k0, int64_t depth, bool as_b, float *sums) {
    const int64_t line_blocks = (lines + TILES_BLOCK - 1) / TILES_BLOCK,
                  k_blocks = (depth + TILES_BLOCK - 1) / TILES_BLOCK;
    const int64_t inner = x->by_depth ? line_blocks : k_blocks, total = line_blocks * k_blocks;
    for (int64_t n = 0; n < total; n++) {
        const int64_t ahead = gemm_min(n + TILES_SOURCE_AHEAD, total - 1);
        const int64_t next_line = line + TILES_BLOCK * (x->by_depth ? ahead % inner : ahead / inner);
        const int64_t next_k = k0 + TILES_BLOCK * (x->by_depth ? ahead / inner : ahead % inner);
        const bf16 *next = tiles_at(x, next_line, next_k);
        for (int i = 0; i < TILES_BLOCK; i++) // beyond the end of x this asks for what is not there, which does no harm
            __builtin_prefetch((const void *)((uintptr_t)next + (uintptr_t)i * (uintptr_t)x->ld * sizeof *next));
        const int64_t i = x->by_depth ? n % inner : n / inner, k = x->by_depth ? n / inner : n % inner;
        tiles_pack(tiles + i * line_stride + k * 1024, x, line + i * TILES_BLOCK, k0 + k * TILES_BLOCK, as_b,
                   sums ? sums + i * TILES_BLOCK : NULL);
    }
}

// ---- the inner loop ----

// Cache lines to prefetch, `stride` bytes apart, a few at each step: more would hold up the inner loop's own loads.
struct tiles_cache_lines {
    const char *at;
    size_t stride;
    int left, per_step;
};
struct tiles_ahead {
    const char *a; // one line of each of a_rows rows at each step: a part of the next slice of A
    size_t a_stride;
    int a_rows;
    struct tiles_cache_lines c;      // of the fp32 blocks of the next row
    struct tiles_cache_lines target; // where this block will be written
};
static inline void tiles_prefetch_lines(struct tiles_cache_lines *x) {
    for (int i = 0; i < x->per_step && x->left > 0; i++, x->left--) {
        __builtin_prefetch(x->at, 0, 2);
        x->at += x->stride;
    }
}
// Prefetches what is due at one step of the inner loop, and advances.
static inline void tiles_prefetch_step(struct tiles_ahead *x) {
    const char *a = x->a;
    for (int i = 0; i < x->a_rows; i++, a += x->a_stride)
        __builtin_prefetch(a, 0, 2);
    x->a += 64;
    tiles_prefetch_lines(&x->c);
    tiles_prefetch_lines(&x->target);
}

// c (32 x 32, row-major) = a b, plus c itself unless `first`; a, b: `steps` packed blocks each. Needs blocks_begin.
// Prefetches between the dots, unlike block_product_amx. It isn't inlined, so that the loop keeps all in registers.
__attribute__((noinline)) static void tiles_block_amx(float *c, const bf16 *a, const bf16 *b, int steps, bool first,
                                                      struct tiles_ahead ahead) {
    enum { ROW_BYTES = TILES_BLOCK * sizeof(float), TILE = 512 };
    if (first) {
        amx_zero(0);
        amx_zero(1);
        amx_zero(2);
        amx_zero(3);
    } else {
        amx_load(0, c, ROW_BYTES);
        amx_load(1, c + 16, ROW_BYTES);
        amx_load(2, c + 16 * TILES_BLOCK, ROW_BYTES);
        amx_load(3, c + 16 * TILES_BLOCK + 16, ROW_BYTES);
    }
    for (int s = 0; s < steps; s++, a += 2 * TILE, b += 2 * TILE) {
        amx_load(6, b, 64);
        amx_load(4, a, 64);
        amx_dot(0, 4, 6);
        amx_load(7, b + TILE, 64);
        amx_dot(1, 4, 7);
        amx_load(5, a + TILE, 64);
        amx_dot(2, 5, 6);
        amx_dot(3, 5, 7);
        tiles_prefetch_step(&ahead);
    }
    amx_store(0, c, ROW_BYTES);
    amx_store(1, c + 16, ROW_BYTES);
    amx_store(2, c + 16 * TILES_BLOCK, ROW_BYTES);
    amx_store(3, c + 16 * TILES_BLOCK + 16, ROW_BYTES);
}

// Multiplies as tiles_block_amx does, by the dot product of bf16 pairs: so slow that prefetches may all go before it.
static void tiles_block_dot(float *c, const bf16 *a, const bf16 *b, int steps, bool first, struct tiles_ahead ahead) {
    for (int s = 0; s < steps; s++)
        tiles_prefetch_step(&ahead);
    block_product_dot(c, (const word *)a, 1, (const word *)b, 1, steps, !first);
}

// ---- output: finished blocks of C ----

struct tiles_output {
    bf16 *out;        // (rows, cols) = C + bias; NULL: sum is written
    const bf16 *bias; // (cols) or NULL
    float *sum;       // (rows, cols) = C, or (cols, rows) = C^T when transposed
    int64_t ld;       // elements from one stored row to the next
    bool add;         // += in place of =
    bool transposed;
    int64_t rows, cols;
};

// Writes c (TILES_BLOCK, TILES_BLOCK) to `out` from (row, col) on, rounded, clipped, with the bias or added to `out`.
static inline void tiles_write_out(const struct tiles_output *o, const float *c, int64_t row, int64_t col) {
    const int rows = (int)gemm_min(TILES_BLOCK, o->rows - row), cols = (int)gemm_min(TILES_BLOCK, o->cols - col);
    ALIGN_BLOCK float before[TILES_BLOCK] = {0}; // the bias, or what a row of out holds
    for (int j = 0; o->bias && j < cols; j++)
        before[j] = bf16_to_float(o->bias[col + j]);
    for (int i = 0; i < rows; i++) {
        ALIGN_BLOCK bf16 line[TILES_BLOCK];
        bf16 *to = o->out + (row + i) * o->ld + col;
        if (o->add) {
            memcpy(line, to, (size_t)cols * sizeof *line);
#pragma omp simd
            for (int j = 0; j < TILES_BLOCK; j++)
                before[j] = bf16_to_float(line[j]);
        }
        for (int j = 0; j < TILES_BLOCK; j += 2 * LANES) {
            const float *from = c + i * TILES_BLOCK + j;
            vec_store_bf16(NULL, line + j, line + j + LANES, vec_load(from) + vec_load(before + j),
                           vec_load(from + LANES) + vec_load(before + j + LANES));
        }
        if (cols == TILES_BLOCK)
            memcpy(to, line, sizeof line);
        else
            memcpy(to, line, (size_t)cols * sizeof *line);
    }
}

// Writes the finished block c (TILES_BLOCK, TILES_BLOCK) to `sum`, or adds it there, clipped at the edges. Element
// (row, col) of C is c's first, also where `sum` holds C^T (o->transposed): the block is then transposed.
static inline void tiles_write_sum(const struct tiles_output *o, const float *c, int64_t row, int64_t col) {
    for (int i = 0; i < TILES_BLOCK; i += 16)
        for (int j = 0; j < TILES_BLOCK; j += 16) {
            float tile[256];
            if (o->transposed)
                tiles_transpose(tile, c + i * TILES_BLOCK + j, TILES_BLOCK * sizeof *c);
            else
                for (int r = 0; r < 16; r++)
                    memcpy(tile + r * 16, c + (i + r) * TILES_BLOCK + j, 64);
            const int64_t rows_left = o->rows - row - i, cols_left = o->cols - col - j;
            const int down = (int)gemm_min(16, o->transposed ? cols_left : rows_left);
            const int across = (int)gemm_min(16, o->transposed ? rows_left : cols_left);
            float *to = o->sum + (o->transposed ? (col + j) * o->ld + row + i : (row + i) * o->ld + col + j);
            for (int r = 0; r < down; r++, to += o->ld)
#pragma omp simd
                for (int n = 0; n < across; n++)
                    to[n] = o->add ? to[n] + tile[r * 16 + n] : tile[r * 16 + n];
        }
}

// ---- the plan: threads' shares and sizes of panels ----

// Sizes are in blocks of 32.
struct tiles_plan {
    int64_t rows, cols, depth;
    int64_t panel_depth;          // of a panel of B; depends only on the depth
    int64_t panel_cols;           // at most
    int row_parts, col_parts;     // threads along each: their product is at most the number of threads
    int64_t part_rows, part_cols; // of the largest part
};

static inline int64_t tiles_blocks(int64_t n) { return (n + TILES_BLOCK - 1) / TILES_BLOCK; }
static inline int64_t tiles_divide_up(int64_t n, int64_t parts) { return (n + parts - 1) / parts; }

// Returns the width of a panel of B, TILES_PANEL_BYTES at most, for even panels of `cols`. All sizes are in blocks.
static inline int64_t tiles_panel_cols(int64_t cols, int64_t panel_depth) {
    const int64_t most = gemm_max(1, TILES_PANEL_BYTES / TILES_PAIR_BYTES / panel_depth);
    return tiles_divide_up(cols, tiles_divide_up(cols, most));
}

// Returns the plan of the least estimated time for at most `threads` threads. rows, cols and depth are in elements.
static struct tiles_plan tiles_plan_make(int64_t rows, int64_t cols, int64_t depth, int threads) {
    struct tiles_plan p;
    memset(&p, 0, sizeof p);
    p.rows = tiles_blocks(rows);
    p.cols = tiles_blocks(cols);
    p.depth = tiles_blocks(depth);
    const int64_t most = TILES_PANEL_DEPTH / TILES_BLOCK, unit = TILES_A_DEPTH / TILES_BLOCK;
    p.panel_depth =
        p.depth <= most ? p.depth : gemm_round_up(tiles_divide_up(p.depth, tiles_divide_up(p.depth, most)), unit);
    // Cycles for each 32 steps of depth: of a block of C, of A copied from L2, and of B fetched from memory and packed.
    enum { BLOCK_CYCLES = 64, PACK_A_CYCLES = 130, PACK_B_CYCLES = 450 };
    int64_t least = INT64_MAX;
    for (int row_parts = 1; row_parts <= threads; row_parts++) {
        const int col_parts = threads / row_parts;
        const int64_t part_rows = tiles_divide_up(p.rows, row_parts), part_cols = tiles_divide_up(p.cols, col_parts);
        const int64_t panel_cols = tiles_panel_cols(part_cols, p.panel_depth);
        const int64_t cost = part_rows * part_cols * BLOCK_CYCLES +
                             part_rows * tiles_divide_up(part_cols, panel_cols) * PACK_A_CYCLES +
                             part_cols * PACK_B_CYCLES;
        if (cost >= least)
            continue;
        least = cost;
        p.row_parts = row_parts;
        p.col_parts = col_parts;
        p.part_rows = part_rows;
        p.part_cols = part_cols;
        p.panel_cols = panel_cols;
    }
    return p;
}

// Returns the bytes of a thread's fp32 blocks of C: all that wait for the next panel, or one row where none waits.
static inline size_t tiles_c_bytes(const struct tiles_plan *p) {
    return (size_t)(p->panel_depth < p->depth ? p->part_rows : 1) * (size_t)p->panel_cols * TILES_C_BYTES;
}
static inline size_t tiles_thread_bytes(const struct tiles_plan *p) {
    const size_t b_bytes = (size_t)p->panel_cols * (size_t)p->panel_depth * TILES_PAIR_BYTES;
    return b_bytes + TILES_A_DEPTH / TILES_BLOCK * TILES_PAIR_BYTES + tiles_c_bytes(p);
}

// ---- the product ----

struct tiles_product {
    enum block_unit unit;
    struct tiles_plan plan;
    struct tiles_operand a, b;
    struct tiles_output output;
    bf16 *packed_a;         // all of A, where it is stored by depth: (row block, depth block, two tiles)
    float *a_sums, *b_sums; // (rows), (cols) in blocks: sums over the depth, or NULL
    char *thread_memory;
};

// Packs the rows of A in share `thread` of `threads`, before the product. Sets their x->a_sums, unless NULL.
static void tiles_pack_a(const struct tiles_product *x, int thread, int threads) {
    const int64_t from = x->plan.rows * thread / threads, to = x->plan.rows * (thread + 1) / threads;
    const int64_t stride = x->plan.depth * (TILES_PAIR_BYTES / (int64_t)sizeof(bf16));
    float *sums = x->a_sums ? x->a_sums + from * TILES_BLOCK : NULL;
    if (sums)
        memset(sums, 0, (size_t)(to - from) * TILES_BLOCK * sizeof *sums);
    tiles_pack_panel(x->packed_a + from * stride, stride, &x->a, from * TILES_BLOCK, (to - from) * TILES_BLOCK, 0,
                     x->plan.depth * TILES_BLOCK, false, sums);
}

// Returns `steps` blocks of A along the depth from block (row, k): in the packed A, or packed into `room` now.
static inline const bf16 *tiles_a_tiles(const struct tiles_product *x, bf16 *room, int64_t row, int64_t k,
                                        int64_t steps) {
    if (x->packed_a)
        return x->packed_a + (row * x->plan.depth + k) * 1024;
    for (int64_t s = 0; s < steps; s++)
        tiles_pack(room + s * 1024, &x->a, row * TILES_BLOCK, (k + s) * TILES_BLOCK, false, NULL);
    return room;
}
// Returns what of the output's block at (row, col) slice `slice` of `slices` of the depth prefetches, in `steps` steps.
static inline struct tiles_cache_lines tiles_target_lines(const struct tiles_output *o, int64_t row, int64_t col,
                                                          int64_t slice, int64_t slices, int64_t steps) {
    const bool transposed = o->sum && o->transposed;
    const int64_t ld = o->ld, element = o->sum ? sizeof *o->sum : sizeof *o->out;
    const int64_t first = (transposed ? col : row) + TILES_BLOCK * slice / slices, across = transposed ? row : col;
    const int64_t down = TILES_BLOCK * (slice + 1) / slices - TILES_BLOCK * slice / slices;
    struct tiles_cache_lines lines;
    lines.at = (const char *)((uintptr_t)(o->sum ? (const void *)o->sum : (const void *)o->out) +
                              (uintptr_t)((first * ld + across) * element));
    lines.stride = (size_t)(ld * element);
    lines.left = (int)gemm_max(0, gemm_min(down, (transposed ? o->cols : o->rows) - first));
    lines.per_step = (int)tiles_divide_up(down, steps);
    return lines;
}

// Returns the cache lines of an fp32 block of C that slice `slice` of `slices` of the depth prefetches in `steps`.
static inline struct tiles_cache_lines tiles_c_lines(const float *block, int64_t slice, int64_t slices, int64_t steps) {
    const int64_t first = TILES_C_BYTES / 64 * slice / slices, end = TILES_C_BYTES / 64 * (slice + 1) / slices;
    const struct tiles_cache_lines lines = {(const char *)block + first * 64, 64, (int)(end - first),
                                            (int)tiles_divide_up(end - first, steps)};
    return lines;
}

// Returns what block j of `cols` prefetches: its share of `steps` blocks of A from block (row, k). Zeroes c and target.
static inline struct tiles_ahead tiles_ahead_of(const struct tiles_product *x, int64_t row, int64_t k, int64_t steps,
                                                int64_t j, int64_t cols) {
    struct tiles_ahead ahead;
    memset(&ahead, 0, sizeof ahead);
    const int64_t first = TILES_BLOCK * j / cols,
                  end = gemm_min(TILES_BLOCK * (j + 1) / cols, x->a.lines - row * TILES_BLOCK);
    ahead.a_rows = (int)gemm_max(0, end - first);
    if (x->packed_a) { // as many lines, one after another
        ahead.a_stride = (size_t)steps * 64;
        ahead.a = (const char *)x->packed_a + (row * x->plan.depth + k) * TILES_PAIR_BYTES + first * steps * 64;
    } else {
        ahead.a_stride = (size_t)x->a.ld * sizeof(bf16);
        ahead.a = (const char *)((uintptr_t)tiles_at(&x->a, row * TILES_BLOCK, k * TILES_BLOCK) +
                                 (uintptr_t)first * ahead.a_stride);
    }
    return ahead;
}

// Adds products over `depth` blocks of B's panel, from k on, to c: row `row` of C's blocks, `cols` of them from col on.
// Where k is 0, overwrites c. The call for the last panel of the depth writes the sums to the output. room is for a
// slice of A. Prefetches A's row next_row, and next_c unless NULL.
static void tiles_row_of_blocks(const struct tiles_product *x, float *c, const float *next_c, bf16 *room,
                                const bf16 *panel, int64_t row, int64_t next_row, int64_t col, int64_t cols, int64_t k,
                                int64_t depth) {
    const int64_t slice_depth = TILES_A_DEPTH / TILES_BLOCK, slices = tiles_divide_up(depth, slice_depth);
    const bool last_panel = k + depth == x->plan.depth;
    for (int64_t slice = 0; slice < slices; slice++) {
        const int64_t at = slice * slice_depth, steps = gemm_min(slice_depth, depth - at);
        const bf16 *a = tiles_a_tiles(x, room, row, k + at, steps);
        const bool last_slice = slice + 1 == slices;
        const int64_t next = last_slice ? 0 : at + slice_depth;
        for (int64_t j = 0; j < cols; j++) {
            struct tiles_ahead ahead = tiles_ahead_of(x, last_slice ? next_row : row, k + next, steps, j, cols);
            if (next_c && k > 0)
                ahead.c = tiles_c_lines(next_c + j * TILES_BLOCK * TILES_BLOCK, slice, slices, steps);
            if (last_panel)
                ahead.target =
                    tiles_target_lines(&x->output, row * TILES_BLOCK, (col + j) * TILES_BLOCK, slice, slices, steps);
            float *block = c + j * TILES_BLOCK * TILES_BLOCK;
            const bf16 *b = panel + (j * depth + at) * 1024;
            switch (x->unit) {
            case UNIT_AMX: tiles_block_amx(block, a, b, (int)steps, k + at == 0, ahead); break;
            case UNIT_DOT: tiles_block_dot(block, a, b, (int)steps, k + at == 0, ahead); break;
            case UNIT_FP32: break; // multiplies no tiles
            }
            if (!last_panel || !last_slice)
                continue;
            if (x->output.out)
                tiles_write_out(&x->output, block, row * TILES_BLOCK, (col + j) * TILES_BLOCK);
            else
                tiles_write_sum(&x->output, block, row * TILES_BLOCK, (col + j) * TILES_BLOCK);
        }
    }
}

// Computes part `thread` of row_parts x col_parts, after blocks_begin. Parts of C's first rows set x->b_sums, if given.
static void tiles_part(const struct tiles_product *x, int thread) {
    const struct tiles_plan *p = &x->plan;
    const int row_part = thread / p->col_parts, col_part = thread % p->col_parts;
    const int64_t row0 = p->rows * row_part / p->row_parts, row1 = p->rows * (row_part + 1) / p->row_parts;
    const int64_t col0 = p->cols * col_part / p->col_parts, col1 = p->cols * (col_part + 1) / p->col_parts;
    char *memory = x->thread_memory + (size_t)thread * tiles_thread_bytes(p);
    float *c = (float *)memory;
    bf16 *room = (bf16 *)(memory + tiles_c_bytes(p)), *panel = room + TILES_A_DEPTH * TILES_BLOCK;
    float *sums = row_part == 0 ? x->b_sums : NULL;
    if (sums)
        memset(sums + col0 * TILES_BLOCK, 0, (size_t)(col1 - col0) * TILES_BLOCK * sizeof *sums);
    for (int64_t col = col0; col < col1; col += p->panel_cols) {
        const int64_t cols = gemm_min(p->panel_cols, col1 - col);
        for (int64_t k = 0; k < p->depth; k += p->panel_depth) {
            const int64_t depth = gemm_min(p->panel_depth, p->depth - k);
            tiles_pack_panel(panel, depth * 1024, &x->b, col * TILES_BLOCK, cols * TILES_BLOCK, k * TILES_BLOCK,
                             depth * TILES_BLOCK, true, sums ? sums + col * TILES_BLOCK : NULL);
            // Where one panel has the whole depth, all rows use the same memory for C.
            const int64_t row_stride = p->panel_depth < p->depth ? p->panel_cols * TILES_BLOCK * TILES_BLOCK : 0;
            for (int64_t row = row0; row < row1; row++) {
                float *blocks = c + (row - row0) * row_stride;
                const int64_t next_row = row + 1 < row1 ? row + 1 : row0;
                tiles_row_of_blocks(x, blocks, row_stride ? c + (next_row - row0) * row_stride : NULL, room, panel, row,
                                    next_row, col, cols, k, depth);
            }
        }
    }
}

static void tiles_run(const struct tiles_product *x, int threads) {
#pragma omp parallel num_threads(threads)
    {
        if (x->packed_a) {
#pragma omp for schedule(static)
            for (int thread = 0; thread < threads; thread++)
                tiles_pack_a(x, thread, threads);
        }
        blocks_begin(x->unit);
#pragma omp for schedule(static)
        for (int part = 0; part < x->plan.row_parts * x->plan.col_parts; part++)
            tiles_part(x, part);
        blocks_end(x->unit);
    }
}

// Whether dweight^T is computed instead of dweight: the narrower operand is to be A, which is packed as a whole.
static inline bool tiles_transposes(const struct gemm *g) { return g->a.transposed && g->rows > g->cols; }

static size_t tiles_workspace_bytes(const struct gemm *g, const struct device *dev) {
    const bool transpose = tiles_transposes(g);
    const struct tiles_plan p =
        tiles_plan_make(transpose ? g->cols : g->rows, transpose ? g->rows : g->cols, g->depth, dev->threads);
    const size_t packed_a = g->a.transposed ? (size_t)p.rows * (size_t)p.depth * TILES_PAIR_BYTES : 0;
    const size_t sums = (size_t)(p.rows > p.cols ? p.rows : p.cols) * TILES_BLOCK * sizeof(float);
    return packed_a + sums + (size_t)p.row_parts * (size_t)p.col_parts * tiles_thread_bytes(&p);
}

// Computes a gemm by the unit, UNIT_AMX or UNIT_DOT. dbias (g->rows), unless NULL, = the column sums of a as stored, or
// += where g->add. workspace: tiles_workspace_bytes.
static void gemm_tiles(const struct gemm *g, float *dbias, enum block_unit unit, void *workspace,
                       const struct device *dev) {
    const struct tiles_operand a = {g->a.data, g->a.ld, g->rows, g->depth, g->a.transposed};
    const struct tiles_operand b = {g->b.data, g->b.ld, g->cols, g->depth, !g->b.transposed};
    const bool transpose = tiles_transposes(g);
    struct tiles_product x;
    memset(&x, 0, sizeof x);
    x.unit = unit;
    x.a = transpose ? b : a;
    x.b = transpose ? a : b;
    x.plan = tiles_plan_make(x.a.lines, x.b.lines, g->depth, dev->threads);
    const struct tiles_output output = {g->out, g->bias, g->sum, g->ld_out, g->add, transpose, x.a.lines, x.b.lines};
    x.output = output;
    char *memory = (char *)workspace;
    if (x.a.by_depth) {
        x.packed_a = (bf16 *)memory;
        memory += x.plan.rows * x.plan.depth * TILES_PAIR_BYTES;
    }
    float *sums = (float *)memory;
    memory += gemm_max(x.plan.rows, x.plan.cols) * TILES_BLOCK * (int64_t)sizeof *sums;
    x.a_sums = dbias && !transpose ? sums : NULL;
    x.b_sums = dbias && transpose ? sums : NULL;
    x.thread_memory = memory;
    tiles_run(&x, dev->threads);
    if (dbias) {
#pragma omp simd
        for (int64_t i = 0; i < g->rows; i++)
            dbias[i] = g->add ? dbias[i] + sums[i] : sums[i];
    }
}

// ---- the two backends ----

static bool amx_open(struct matmul_library *library, const struct device *dev) {
    snprintf(library->description, sizeof library->description, "own AMX bf16");
    return amx_available();
}
static void gemm_amx(const struct gemm *g, float *dbias, void *workspace, const struct device *dev) {
    gemm_tiles(g, dbias, UNIT_AMX, workspace, dev);
}
// Whether this build has the instruction of dot products; names the backend in library->description.
static bool dot_open(struct matmul_library *library, const struct device *dev) {
    snprintf(library->description, sizeof library->description, "own bf16, %s", UNIT_DOT_NAME);
    return BF16_DOT;
}
static void gemm_dot(const struct gemm *g, float *dbias, void *workspace, const struct device *dev) {
    gemm_tiles(g, dbias, UNIT_DOT, workspace, dev);
}

#endif
