// The tiles of flash attention on the CPU (kernels/attention/cpu.cu): how a shape is cut into panels of keys, strips
// and tiles of queries, which panels a strip sees, and what is done to a block of scores before its softmax.
#pragma once
#include "kernels/amax.cuh"            // amax_merge_rows
#include "kernels/attention/shape.cuh" // struct attention_shape
#include "kernels/blocks.cuh"          // BLOCK, block_at, block_transpose, row_store
#include "kernels/random.cuh"          // struct dropout, dropout_scales
#include "kernels/vector_math.cuh"     // LOG2E
#include "kernels/vectors.cuh"         // vec, vec_tanh
#include <math.h>                      // INFINITY
#include <omp.h>                       // omp_get_num_threads

// FLASH_PANELS panels are added to a sum at a time. The other two are the most strips and blocks of a query tile.
enum { FLASH_PANELS = 4, FLASH_STRIPS = 4, FLASH_QUERY_BLOCKS = 16 };

struct flash {
    struct attention_shape shape;
    struct dropout dropout;
    uint32_t *amax; // of what is written, or NULL
    enum block_unit unit;
    int H, Hkv, D, group; // group: query heads of a KV head
    int panels, steps;    // blocks along T and along D
    int strips;           // strips of a query tile
    int tiles;            // query tiles along T
    int64_t qkv_stride;   // elements of a token's row
    char *k, *kt, *v; // packed keys, their transpose and values, (B * Hkv places, panels, steps) blocks; v^T in forward
};

// Returns a call's arguments and sizes; the packed operands are still NULL.
static inline struct flash flash_of(struct attention_shape shape, struct dropout dropout, uint32_t *amax) {
    struct flash f;
    memset(&f, 0, sizeof f);
    f.shape = shape;
    f.dropout = dropout;
    f.amax = amax;
    f.unit = blocks_unit();
    f.H = shape.num_heads;
    f.Hkv = shape.num_query_groups;
    f.D = shape.head_dim;
    f.group = f.H / f.Hkv;
    f.panels = (shape.T + BLOCK - 1) / BLOCK;
    f.steps = (f.D + BLOCK - 1) / BLOCK;
    f.strips = FLASH_QUERY_BLOCKS / f.steps < FLASH_STRIPS ? FLASH_QUERY_BLOCKS / f.steps : FLASH_STRIPS;
    f.tiles = (f.panels + f.strips - 1) / f.strips;
    f.qkv_stride = (int64_t)(f.H + 2 * f.Hkv) * f.D;
    return f;
}
// The number of bytes of one packed operand, k, kt or v, of all KV heads.
static inline size_t flash_packed_bytes(const struct flash *f) {
    return (size_t)f->shape.B * f->Hkv * f->panels * f->steps * block_bytes(blocks_layout(f->unit));
}
// The number of rows of strip or panel `block` that lie before T, 32 at most.
static inline int flash_rows(const struct flash *f, int block) {
    return f->shape.T - block * BLOCK < BLOCK ? f->shape.T - block * BLOCK : BLOCK;
}
// The number of queries before T in `strips` strips from strip first_strip on.
static inline int flash_queries_count(const struct flash *f, int first_strip, int strips) {
    const int rest = f->shape.T - first_strip * BLOCK;
    return rest < strips * BLOCK ? rest : strips * BLOCK;
}
// Returns a panel's blocks in `packed`, which is f->k, f->kt or f->v. A place there has the room of one KV head.
static inline void *flash_panel(const struct flash *f, const char *packed, int64_t place, int panel) {
    return block_at(blocks_layout(f->unit), packed, (place * f->panels + panel) * f->steps);
}
// Returns the first element of a head of token (b, t) in qkv; head counts a token's query, key and value heads.
static inline const floatX *flash_head(const struct flash *f, const floatX *qkv, int b, int t, int head) {
    return qkv + ((int64_t)b * f->shape.T + t) * f->qkv_stride + (int64_t)head * f->D;
}
static inline int64_t flash_row(const struct flash *f, int b, int h, int t) { // of lse (B, H, T)
    return ((int64_t)b * f->H + h) * f->shape.T + t;
}

// Returns the first panel that a strip of sequence b sees, by the first_key of its first query; 0 without first_key.
static inline int flash_begin(const struct flash *f, int b, int strip) {
    return f->shape.first_key ? f->shape.first_key[(int64_t)b * f->shape.T + strip * BLOCK] / BLOCK : 0;
}
// Returns the area that a query tile sees, in squares of its width. The diagonal's square and a short tile count fully.
static double flash_area(const struct flash *f, int b, int tile) {
    if (!f->shape.first_key)
        return tile + 1;
    const int first = tile * f->strips, rest = f->panels - first, strips = rest < f->strips ? rest : f->strips;
    int hidden = 0; // panels
    for (int s = 0; s < strips; s++)
        hidden += flash_begin(f, b, first + s);
    return tile + 1 - (double)hidden / (strips * f->strips);
}
// Returns the area that a sequence's query tiles see, of one head, in squares of a query tile's width (flash_area).
static double flash_sequence_area(const struct flash *f, int b) {
    double area = 0;
    for (int tile = 0; tile < f->tiles; tile++)
        area += flash_area(f, b, tile);
    return area;
}
// Returns the sum of the sequences' visible areas divided by the largest of them: B where all sequences are alike.
static double flash_effective_sequences(const struct flash *f) {
    double sum = 0, most = 0;
    for (int b = 0; b < f->shape.B; b++) {
        const double area = flash_sequence_area(f, b);
        sum += area;
        most = area > most ? area : most;
    }
    return sum / most;
}

// Whether each thread takes whole KV heads, and packs one after the other at a place of its own, which stays in its
// cache. It does where there are enough heads, about 4 a thread. Call this in the parallel region.
static inline bool flash_whole_heads(const struct flash *f) {
    return flash_effective_sequences(f) * f->Hkv >= 4.0 * omp_get_num_threads();
}

// Prefetches rows of `bytes` to the L2 cache. The hardware doesn't, since a head's rows lie a token apart.
static inline void prefetch_rows(const void *rows, int64_t stride_bytes, int count, int64_t bytes) {
    for (int r = 0; r < count; r++) {
        const uintptr_t row = (uintptr_t)rows + (uintptr_t)(r * stride_bytes), end = row + (uintptr_t)bytes;
        for (uintptr_t line = row & ~(uintptr_t)63; line < end; line += 64)
            __builtin_prefetch((const void *)line, 0, 2);
    }
}
static inline void flash_prefetch(const floatX *rows, int64_t stride, int count, int D) {
    prefetch_rows(rows, stride * (int64_t)sizeof *rows, count, D * (int64_t)sizeof *rows);
}

// Says which panels strip s of a query tile sees: from begin[s] on. Before whole[s], first_key hides some keys.
struct flash_sight {
    int begin[FLASH_STRIPS], whole[FLASH_STRIPS];
    int32_t first_key[FLASH_STRIPS * BLOCK];
};
// Fills *sight for `strips` strips of sequence b, from strip `first` on. Sets its first_key only if the shape has one.
static void flash_look(struct flash_sight *sight, const struct flash *f, int b, int first, int strips) {
    for (int s = 0; s < strips; s++) {
        sight->begin[s] = flash_begin(f, b, first + s);
        sight->whole[s] = 0;
        if (!f->shape.first_key)
            continue;
        const int32_t *keys = f->shape.first_key + (int64_t)b * f->shape.T + (first + s) * BLOCK;
        const int last = flash_rows(f, first + s) - 1;
        for (int q = 0; q < BLOCK; q++)
            sight->first_key[s * BLOCK + q] = keys[q < last ? q : last];
        sight->whole[s] = (keys[last] + BLOCK - 1) / BLOCK;
    }
}
struct flash_panels {
    int begin, end;
};
// Returns which of the FLASH_PANELS panels from panel `group` on a strip sees; none where end <= begin. s is the
// strip's number in its tile, `strip` its number in the sequence.
static inline struct flash_panels flash_seen(const struct flash_sight *sight, int s, int strip, int group) {
    struct flash_panels seen;
    seen.begin = group > sight->begin[s] ? group : sight->begin[s];
    seen.end = group + FLASH_PANELS < strip + 1 ? group + FLASH_PANELS : strip + 1;
    return seen;
}
// Sets scores of keys after their query to -inf: in the block of S^T on the diagonal, the scores below it.
static inline void flash_mask_diagonal(float *scores) {
    for (int key = 1; key < BLOCK; key++)
        for (int query = 0; query < key; query++)
            scores[key * BLOCK + query] = -INFINITY;
}
// Sets scores that a strip, number s of its tile, doesn't see to -inf, in the block of S^T of a panel <= strip.
static inline void flash_mask(float *scores, const struct flash_sight *sight, int s, int strip, int panel) {
    if (panel == strip)
        flash_mask_diagonal(scores);
    if (panel < sight->whole[s])
        for (int key = 0; key < BLOCK; key++) {
            float *row = scores + key * BLOCK;
            const int32_t *first = sight->first_key + s * BLOCK;
#pragma omp simd
            for (int query = 0; query < BLOCK; query++)
                row[query] = first[query] > panel * BLOCK + key ? -INFINITY : row[query];
        }
}

// scores (count) = softcap tanh(scale scores / softcap), slopes (count) = 1 - tanh^2 unless NULL. LANES divides count.
static void flash_cap(float *scores, float *slopes, int count, const struct flash *f) {
    const float inner = f->shape.scale / f->shape.softcap, softcap = f->shape.softcap;
    for (int i = 0; i < count; i += LANES) {
        const vec t = vec_tanh(vec_load(scores + i) * inner);
        vec_store(scores + i, t * softcap);
        if (slopes)
            vec_store(slopes + i, 1.0f - t * t);
    }
}
// Returns the factor that turns scores, or capped scores where there is a softcap, into exponents of 2.
static inline float flash_scale_log2(const struct flash *f) {
    return f->shape.softcap > 0 ? LOG2E : f->shape.scale * LOG2E;
}

// Fills factors (panels <= FLASH_PANELS, key, query) for a strip, from panel `first` on. Queries past T get 0.
static void flash_dropout(float *factors, const struct flash *f, int b, int h, int strip, int first, int panels) {
    ALIGN_BLOCK float rows[BLOCK * FLASH_PANELS * BLOCK]; // (query, key)
    const int T = f->shape.T, width = FLASH_PANELS * BLOCK;
    memset(rows, 0, sizeof rows);
    for (int q = 0; q < flash_rows(f, strip); q++) {
        const uint64_t element =
            (uint64_t)flash_row(f, b, h, strip * BLOCK + q) * (uint64_t)T + (uint64_t)(first * BLOCK);
        dropout_scales(rows + q * width, f->dropout, element, panels * BLOCK);
    }
    for (int p = 0; p < panels; p++)
        block_transpose(factors + p * BLOCK_ELEMENTS, rows + p * BLOCK, width);
}

// Writes a strip's out or dQ to rows (count, D), from transposed blocks (D, 32), row q times factor[q]. Merges f->amax.
static void flash_write_rows(floatX *rows, int64_t stride, const float *blocks, const float *factor, int count,
                             const struct flash *f) {
    const int D = f->D;
    ALIGN_BLOCK float block[BLOCK_ELEMENTS];
    for (int s = 0; s * BLOCK < D; s++) {
        const int columns = D - s * BLOCK < BLOCK ? D - s * BLOCK : BLOCK;
        block_transpose(block, blocks + s * BLOCK_ELEMENTS, BLOCK);
        for (int q = 0; q < count; q++)
            row_store(rows + q * stride + s * BLOCK, block + q * BLOCK, factor[q], columns);
    }
    amax_merge_rows(f->amax, rows, stride, count, D);
}

// ---- backward ----

// A query tile as right operands, packed once for all panels: Q^T and dO^T for the scores, Q and dO for dK and dV.
struct flash_queries {
    float qt[FLASH_QUERY_BLOCKS * BLOCK_ELEMENTS], q[FLASH_QUERY_BLOCKS * BLOCK_ELEMENTS];
    float doutt[FLASH_QUERY_BLOCKS * BLOCK_ELEMENTS], dout[FLASH_QUERY_BLOCKS * BLOCK_ELEMENTS];
    float lse_log2[FLASH_STRIPS * BLOCK], delta[FLASH_STRIPS * BLOCK]; // in FP8 lse of 256 P
} ALIGN_BLOCK;

// P^T of one panel and dS^T of FLASH_PANELS, for each strip, in blocks as flash_store_gradients writes them.
struct flash_gradients {
    float p[FLASH_STRIPS * BLOCK_ELEMENTS], ds_left[FLASH_STRIPS * BLOCK_ELEMENTS];
    float ds[FLASH_STRIPS * FLASH_PANELS * BLOCK_ELEMENTS];
} ALIGN_BLOCK;

// Stores a vector of each of EXP2_VECS rows of a block's P^T, x, and dS^T, ds, from row `key` and column c on. P^T is a
// left operand; dS^T is stored as a left one and as a right one. In fp32 these are alike, and only ds_right is written.
ALWAYS_INLINE void flash_store_gradients(const enum block_layout layout, void *p, void *ds_left, void *ds_right,
                                         const vec *x, const vec *ds, int key, int c) {
    for (int i = 0; i < EXP2_VECS; i += 2) {
        const int at = (key + i) * BLOCK + c;
        if (layout == LAYOUT_BF16) {
            bf16 *p_row = (bf16 *)p + at, *ds_row = (bf16 *)ds_left + at;
            word *pairs = (word *)ds_right + c / 16 * 256 + (key + i) / 2 * 16 + c % 16;
            vec_store_bf16(NULL, p_row, p_row + BLOCK, x[i], x[i + 1]);
            vec_store_bf16(pairs, ds_row, ds_row + BLOCK, ds[i], ds[i + 1]);
        } else {
            vec_store((float *)p + at, x[i]);
            vec_store((float *)p + at + BLOCK, x[i + 1]);
            vec_store((float *)ds_right + at, ds[i]);
            vec_store((float *)ds_right + at + BLOCK, ds[i + 1]);
        }
    }
}
// Adds a panel's dK, without the scale, and dV from `depth` strips from strip `begin` on to dk and dv, (steps) blocks
// each; where `fresh`, overwrites. A strip's dS^T is in g->ds, in block `slot` of FLASH_PANELS; in bf16 in g->ds_left.
ALWAYS_INLINE void flash_add_key_gradients(const enum block_layout layout, const struct flash *f, float *dk, float *dv,
                                           const struct flash_gradients *g, const struct flash_queries *queries,
                                           int slot, int begin, int depth, bool fresh) {
    const int steps = f->steps;
    const void *ds = layout == LAYOUT_BF16 ? block_at(layout, g->ds_left, begin)
                                           : block_at(layout, g->ds, begin * FLASH_PANELS + slot);
    for (int d = 0; d < steps; d++) {
        block_product(f->unit, dv + d * BLOCK_ELEMENTS, block_at(layout, g->p, begin), 1,
                      block_at(layout, queries->dout, begin * steps + d), steps, depth, !fresh);
        block_product(f->unit, dk + d * BLOCK_ELEMENTS, ds, layout == LAYOUT_BF16 ? 1 : FLASH_PANELS,
                      block_at(layout, queries->q, begin * steps + d), steps, depth, !fresh);
    }
}
