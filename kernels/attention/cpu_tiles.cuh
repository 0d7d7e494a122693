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

// Panels whose products are added to a sum at a time; most strips and most blocks of a query tile.
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
static inline int flash_queries_count(const struct flash *f, int first_strip, int strips) {
    const int rest = f->shape.T - first_strip * BLOCK;
    return rest < strips * BLOCK ? rest : strips * BLOCK;
}
// Returns the blocks of panel `panel` at `place`, which has the room of one KV head, of `packed`: f->k, f->kt or f->v.
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

// Returns the first panel that strip `strip` of sequence b sees, by its first query's first_key; 0 without first_key.
static inline int flash_begin(const struct flash *f, int b, int strip) {
    return f->shape.first_key ? f->shape.first_key[(int64_t)b * f->shape.T + strip * BLOCK] / BLOCK : 0;
}
// Returns the area that a query tile sees, in squares of its width; the diagonal's square and a short tile count full.
static double flash_area(const struct flash *f, int b, int tile) {
    if (!f->shape.first_key)
        return tile + 1;
    const int first = tile * f->strips, rest = f->panels - first, strips = rest < f->strips ? rest : f->strips;
    int hidden = 0; // panels
    for (int s = 0; s < strips; s++)
        hidden += flash_begin(f, b, first + s);
    return tile + 1 - (double)hidden / (strips * f->strips);
}
static double flash_sequence_area(const struct flash *f, int b) {
    double area = 0;
    for (int tile = 0; tile < f->tiles; tile++)
        area += flash_area(f, b, tile);
    return area;
}
// Returns all sequences' visible area divided by the largest sequence's: B where all sequences are alike.
static double flash_effective_sequences(const struct flash *f) {
    double sum = 0, most = 0;
    for (int b = 0; b < f->shape.B; b++) {
        const double area = flash_sequence_area(f, b);
        sum += area;
        most = area > most ? area : most;
    }
    return sum / most;
}

// Whether each thread takes whole KV heads and packs them, one after the other, at the place of the thread's number,
// which stays in its cache: from about 4 heads a thread on. To be called in the parallel region.
static inline bool flash_whole_heads(const struct flash *f) {
    return flash_effective_sequences(f) * f->Hkv >= 4.0 * omp_get_num_threads();
}

// Prefetches rows to the L2 cache: a head's rows lie a token apart, which the hardware's prefetchers do not follow.
static inline void flash_prefetch(const floatX *rows, int64_t stride, int count, int D) {
    for (int r = 0; r < count; r++)
        for (int d = 0; d < D; d += 64 / (int)sizeof *rows)
            __builtin_prefetch(rows + r * stride + d, 0, 2);
}

// The panels of keys that strip s of a query tile sees: from begin[s] on. Before whole[s] first_key hides some keys.
struct flash_sight {
    int begin[FLASH_STRIPS], whole[FLASH_STRIPS];
    int32_t first_key[FLASH_STRIPS * BLOCK];
};
// Fills *sight for `strips` strips of queries of sequence b, from strip `first` on; first_key only if the shape has it.
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
// Returns the panels [begin, end) of FLASH_PANELS from `group` on that `strip`, number s of its tile, sees; maybe none.
static inline struct flash_panels flash_seen(const struct flash_sight *sight, int s, int strip, int group) {
    struct flash_panels seen;
    seen.begin = group > sight->begin[s] ? group : sight->begin[s];
    seen.end = group + FLASH_PANELS < strip + 1 ? group + FLASH_PANELS : strip + 1;
    return seen;
}
// Sets scores below the diagonal to -inf, keys after the query, in the block of S^T of a strip and its last panel.
static inline void flash_mask_diagonal(float *scores) {
    for (int key = 1; key < BLOCK; key++)
        for (int query = 0; query < key; query++)
            scores[key * BLOCK + query] = -INFINITY;
}
// Sets to -inf the scores in a block of S^T, `panel` <= `strip`, that the strip, number s of its tile, doesn't see.
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

// scores (count, whole vecs) = softcap tanh(scale scores / softcap). slopes (count) = 1 - tanh^2; NULL: not wanted.
static void flash_cap(float *scores, float *slopes, int count, const struct flash *f) {
    const float inner = f->shape.scale / f->shape.softcap, softcap = f->shape.softcap;
    for (int i = 0; i < count; i += LANES) {
        const vec t = vec_tanh(vec_load(scores + i) * inner);
        vec_store(scores + i, t * softcap);
        if (slopes)
            vec_store(slopes + i, 1.0f - t * t);
    }
}
// Returns what scores, capped where there is a softcap, are multiplied by to be exponents of 2.
static inline float flash_scale_log2(const struct flash *f) {
    return f->shape.softcap > 0 ? LOG2E : f->shape.scale * LOG2E;
}

// Fills factors (panels, key, query) by dropout: queries of `strip`, past T 0; <= FLASH_PANELS panels, `first` on.
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

// rows (count, D) = a strip's out or dQ, from transposed blocks (D, 32), row q times factor[q]. Merges into *f->amax.
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

// P^T of one panel, dS^T of four, for each strip; blocks as flash_store_gradients writes them.
struct flash_gradients {
    float p[FLASH_STRIPS * BLOCK_ELEMENTS], ds_left[FLASH_STRIPS * BLOCK_ELEMENTS];
    float ds[FLASH_STRIPS * FLASH_PANELS * BLOCK_ELEMENTS];
} ALIGN_BLOCK;

// Stores EXP2_VECS rows, a vector of each, of a block's P^T, x, and dS^T, from row `key` and column c on: P^T as a left
// operand, dS^T as a left and a right one; in fp32 the two are one, ds_right, and ds_left is not written.
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
// Adds a panel's dK and dV, of `depth` strips of the tile from strip `begin` on, to dk and dv, (steps) blocks each;
// where `fresh`, overwrites them. dK lacks the scale. slot: the panel's in g->ds; in bf16 g->ds_left is read instead.
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
