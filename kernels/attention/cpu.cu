// Flash attention on the CPU (kernels/attention/flash.cuh): online softmax, and scores made again by backward (Dao et
// al. 2022, arXiv 2205.14135). All work is done on blocks of 32 x 32 (kernels/blocks.cuh), and scores are kept
// transposed, S^T = K Q^T: keys run down the rows and queries along the lanes, so that maximum, sum, log-sum-exp and
// delta = rowsum(dout * out) are plain vectors and no reduction runs across lanes. A panel is 32 keys, a strip 32
// queries. Strip g visits only the panels up to g, from 0 or from the panel of the first key that the strip's first
// query sees. Only panel g needs the causal mask, which hides the padding too, as keys beyond T come after every query.
// Only panels before the first key that the strip's last query sees need the mask of first keys.
//   forward:   S^T = K Q^T     O^T += V^T P^T
//   backward:  S^T = K Q^T     dP^T = V dO^T     dV += P^T dO     dK += dS^T Q     dQ^T += K^T dS^T
// K and V are packed once per KV head, for all query heads of its group. No thread ever adds to what another thread
// writes, so that any number of threads gives the same bits. Threads keep up to 500 KB of blocks on their stacks.
#if !defined(TARGET_CUDA)
#include "kernels/attention/cpu_cuts.cuh"  // struct flash_cuts
#include "kernels/attention/cpu_tiles.cuh" // struct flash, what a tile sees
#include "kernels/attention/flash.cuh"     // the prototypes of what is defined here
#include "kernels/blocks.cuh"              // block_product, pack_left, pack_right
#include "kernels/gpu_sizes.cuh"           // gpu_flash_backward_bytes
#include "kernels/vectors.cuh"             // vec, vec_exp2, vec_store_bf16
#include <math.h>                          // logf
#include <omp.h>                           // omp_get_thread_num

// ---- Forward ----

// A query's running maximum m is raised to the largest score only if that is above m by more than this. So P stays
// below 2^8, where fp32 and bf16 are as precise as at 1, and sums are rarely rescaled; the quotient is the same for any
// m. m begins at FLASH_LOWEST. It isn't infinite, as the strip's queries don't all see a key in the same panel.
#define FLASH_SLACK_LOG2 8.0f
#define FLASH_LOWEST (-0x1p127f)

// Holds the online softmax of a strip of queries, in units of log2: m near max(scale S), and l = sum 2^(scale S - m).
struct flash_strip {
    float max[BLOCK], sum[BLOCK];
} ALIGN_BLOCK;

// Turns scores of `panels` blocks into P^T = 2^(scale S^T - m), and brings m and l in *strip up to date. Sets rescale
// (32) to 2^(old m - new m), by which the caller must multiply O^T. Dropout's factors, unless NULL, multiply P^T but
// not l. In fp32 p is `scores`, overwritten; in bf16 it is a buffer of its own, for right operands.
ALWAYS_INLINE void flash_softmax(const enum block_layout layout, void *p, float *rescale, struct flash_strip *strip,
                                 const float *scores, const float *factors, int panels, float scale_log2) {
    const int keys = panels * BLOCK;
    for (int c = 0; c < BLOCK; c += LANES) {
        vec m0 = vec_load(scores + c), m1 = m0, m2 = m0, m3 = m0;
        for (int key = 0; key < keys; key += 4) {
            const float *s = scores + key * BLOCK + c;
            m0 = vec_max(m0, vec_load(s));
            m1 = vec_max(m1, vec_load(s + BLOCK));
            m2 = vec_max(m2, vec_load(s + 2 * BLOCK));
            m3 = vec_max(m3, vec_load(s + 3 * BLOCK));
        }
        const vec old = vec_load(strip->max + c);
        const vec top = scale_log2 * vec_max(vec_max(m0, m1), vec_max(m2, m3));
        const vec_words raised = (vec_words)(top > old + FLASH_SLACK_LOG2);
        const vec m = (vec)((raised & (vec_words)top) | (~raised & (vec_words)old));
        vec shrink[EXP2_VECS] = {old - m}, sum[EXP2_VECS] = {vec_load(strip->sum + c)};
        vec_exp2(shrink);
        vec_store(strip->max + c, m);
        vec_store(rescale + c, shrink[0]);
        sum[0] *= shrink[0];
        for (int key = 0; key < keys; key += EXP2_VECS) {
            const int at = key * BLOCK + c;
            vec x[EXP2_VECS];
#pragma GCC unroll 4
            for (int i = 0; i < EXP2_VECS; i++)
                x[i] = vec_load(scores + at + i * BLOCK) * scale_log2 - m;
            vec_exp2(x);
#pragma GCC unroll 4
            for (int i = 0; i < EXP2_VECS; i++) {
                sum[i] += x[i];
                if (factors)
                    x[i] *= vec_load(factors + at + i * BLOCK);
                if (layout == LAYOUT_FP32)
                    vec_store((float *)p + at + i * BLOCK, x[i]);
            }
            if (layout == LAYOUT_BF16) {
                word *pairs =
                    (word *)block_at(LAYOUT_BF16, p, key / BLOCK) + c / 16 * 256 + key % BLOCK / 2 * 16 + c % 16;
                vec_store_bf16(pairs, NULL, NULL, x[0], x[1]);
                vec_store_bf16(pairs + 16, NULL, NULL, x[2], x[3]);
            }
        }
        vec_store(strip->sum + c, (sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
}

// Multiplies column q of `steps` blocks by rescale[q], q < 32.
static inline void flash_rescale(float *blocks, const float *rescale, int steps) {
    for (int c = 0; c < BLOCK; c += LANES) {
        const vec factor = vec_load(rescale + c);
        int changed = 0;
        for (int i = 0; i < LANES; i++)
            changed |= rescale[c + i] != 1.0f;
        if (!changed)
            continue;
        for (int row = 0; row < steps * BLOCK; row++)
            vec_store(blocks + row * BLOCK + c, vec_load(blocks + row * BLOCK + c) * factor);
    }
}

// Writes a strip's out = O / l and, unless NULL, lse = ln 2 * m + ln l. Merges out's amax. blocks: O^T; state: m, l.
static void flash_finish_strip(floatX *out, float *lse, const struct flash *f, int b, int h, int strip,
                               const float *blocks, const struct flash_strip *state) {
    float inverse[BLOCK];
    const int count = flash_rows(f, strip), t = strip * BLOCK;
    for (int q = 0; q < count; q++)
        inverse[q] = 1.0f / state->sum[q];
    const int64_t stride = (int64_t)f->H * f->D;
    flash_write_rows(out + ((int64_t)b * f->shape.T + t) * stride + (int64_t)h * f->D, stride, blocks, inverse, count,
                     f);
    for (int q = 0; lse && q < count; q++)
        lse[flash_row(f, b, h, t + q)] = 0.6931471806f * state->max[q] + logf(state->sum[q]);
}

// Computes out, its amax, and lse of one tile of queries of one head, whose K and V^T are packed at `place`.
ALWAYS_INLINE void flash_forward_tile(const enum block_layout layout, floatX *out, float *lse, const floatX *qkv,
                                      const struct flash *f, int b, int h, int tile, int64_t place) {
    ALIGN_BLOCK float qt[FLASH_QUERY_BLOCKS * BLOCK_ELEMENTS], sums[FLASH_QUERY_BLOCKS * BLOCK_ELEMENTS];
    ALIGN_BLOCK float scores[FLASH_PANELS * BLOCK_ELEMENTS], factors[FLASH_PANELS * BLOCK_ELEMENTS], rescale[BLOCK];
    ALIGN_BLOCK bf16 probabilities[FLASH_PANELS * BLOCK_ELEMENTS];
    struct flash_strip state[FLASH_STRIPS];
    struct flash_sight sight;
    const int first = tile * f->strips, rest = f->panels - first, strips = rest < f->strips ? rest : f->strips;
    const int steps = f->steps;
    const float scale_log2 = flash_scale_log2(f);

    flash_look(&sight, f, b, first, strips);
    flash_prefetch(flash_head(f, qkv, b, first * BLOCK, h), f->qkv_stride, flash_queries_count(f, first, strips), f->D);
    for (int s = 0; s < strips; s++) {
        pack_right(layout, NULL, block_at(layout, qt, s * steps), flash_head(f, qkv, b, (first + s) * BLOCK, h),
                   f->qkv_stride, flash_rows(f, first + s), f->D);
        for (int q = 0; q < BLOCK; q++) {
            state[s].max[q] = FLASH_LOWEST;
            state[s].sum[q] = 0;
        }
    }
    for (int group = sight.begin[0]; group < first + strips; group += FLASH_PANELS)
        for (int s = 0; s < strips; s++) {
            const int strip = first + s;
            const struct flash_panels seen = flash_seen(&sight, s, strip, group);
            const int panel = seen.begin, panels = seen.end - panel;
            if (panels <= 0)
                continue;
            const bool fresh = panel == sight.begin[s];
            float *sum = sums + s * steps * BLOCK_ELEMENTS;
            for (int p = 0; p < panels; p++)
                block_product(f->unit, scores + p * BLOCK_ELEMENTS, flash_panel(f, f->k, place, panel + p), 1,
                              block_at(layout, qt, s * steps), 1, steps, false);
            if (f->shape.softcap > 0)
                flash_cap(scores, NULL, panels * BLOCK_ELEMENTS, f);
            for (int p = 0; p < panels; p++)
                flash_mask(scores + p * BLOCK_ELEMENTS, &sight, s, strip, panel + p);
            if (f->dropout.p > 0)
                flash_dropout(factors, f, b, h, strip, panel, panels);
            void *p = layout == LAYOUT_BF16 ? (void *)probabilities : (void *)scores;
            flash_softmax(layout, p, rescale, &state[s], scores, f->dropout.p > 0 ? factors : NULL, panels, scale_log2);
            if (!fresh)
                flash_rescale(sum, rescale, steps);
            for (int d = 0; d < steps; d++)
                block_product(f->unit, sum + d * BLOCK_ELEMENTS,
                              block_at(layout, flash_panel(f, f->v, place, panel), d), steps, p, 1, panels, !fresh);
        }
    for (int s = 0; s < strips; s++)
        flash_finish_strip(out, lse, f, b, h, first + s, sums + s * steps * BLOCK_ELEMENTS, &state[s]);
}

// Packs one panel at `place`: its K and V^T or, for backward, its K, K^T and V. kv_head counts over all sequences.
ALWAYS_INLINE void flash_pack_panel(const enum block_layout layout, const struct flash *f, const floatX *qkv,
                                    int64_t kv_head, int panel, int64_t place, bool backward) {
    const int b = (int)(kv_head / f->Hkv), head = (int)(kv_head % f->Hkv), rows = flash_rows(f, panel);
    const floatX *k = flash_head(f, qkv, b, panel * BLOCK, f->H + head);
    const floatX *v = flash_head(f, qkv, b, panel * BLOCK, f->H + f->Hkv + head);
    void *packed_k = flash_panel(f, f->k, place, panel), *packed_v = flash_panel(f, f->v, place, panel);
    void *packed_kt = backward ? flash_panel(f, f->kt, place, panel) : NULL;
    flash_prefetch(v, f->qkv_stride, rows, f->D);
    if (panel + 1 < f->panels)
        flash_prefetch(k + BLOCK * f->qkv_stride, f->qkv_stride, flash_rows(f, panel + 1), f->D);
    pack_left(layout, packed_k, packed_kt, k, f->qkv_stride, rows, f->D);
    pack_left(layout, backward ? packed_v : NULL, backward ? NULL : packed_v, v, f->qkv_stride, rows, f->D);
}
static void flash_pack(const struct flash *f, const floatX *qkv, int64_t kv_head, int panel, int64_t place,
                       bool backward) {
    if (blocks_layout(f->unit) == LAYOUT_BF16)
        flash_pack_panel(LAYOUT_BF16, f, qkv, kv_head, panel, place, backward);
    else
        flash_pack_panel(LAYOUT_FP32, f, qkv, kv_head, panel, place, backward);
}
// Packs all KV heads, head i at place i. All threads of the team must call this, and leave it when all is packed.
static void flash_pack_all(const struct flash *f, const floatX *qkv, bool backward) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < (int64_t)f->shape.B * f->Hkv * f->panels; i++)
        flash_pack(f, qkv, i / f->panels, (int)(i % f->panels), i / f->panels, backward);
}
static void flash_forward_job(floatX *out, float *lse, const floatX *qkv, const struct flash *f, int64_t head, int tile,
                              int64_t place) {
    if (blocks_layout(f->unit) == LAYOUT_BF16)
        flash_forward_tile(LAYOUT_BF16, out, lse, qkv, f, (int)(head / f->H), (int)(head % f->H), tile, place);
    else
        flash_forward_tile(LAYOUT_FP32, out, lse, qkv, f, (int)(head / f->H), (int)(head % f->H), tile, place);
}

// Returns the bytes of packed K and V: B * Hkv * roundup(T, 32) * roundup(D, 32) times 4 or 8; 0 for a planned GPU.
size_t flash_forward_workspace_bytes(struct attention_shape shape, const struct device *dev) {
    if (device_is_gpu(dev))
        return 0;
    const struct dropout none = {0, 0, 0, 0, 0};
    const struct flash f = flash_of(shape, none, NULL);
    return 2 * flash_packed_bytes(&f);
}

void flash_forward(floatX *out, float *lse, const floatX *qkv, struct attention_shape shape, struct dropout dropout,
                   uint32_t *amax, void *workspace, struct device *dev) {
    struct flash f = flash_of(shape, dropout, amax);
    f.k = (char *)workspace;
    f.v = f.k + flash_packed_bytes(&f);
#pragma omp parallel
    {
        blocks_begin(f.unit);
        if (flash_whole_heads(&f)) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t kv_head = 0; kv_head < (int64_t)shape.B * f.Hkv; kv_head++) {
                const int64_t place = omp_get_thread_num(), head = kv_head * f.group;
                for (int panel = 0; panel < f.panels; panel++)
                    flash_pack(&f, qkv, kv_head, panel, place, false);
                for (int i = 0; i < f.group * f.tiles; i++)
                    flash_forward_job(out, lse, qkv, &f, head + i / f.tiles, i % f.tiles, place);
            }
        } else {
            flash_pack_all(&f, qkv, false);
            const int64_t jobs = (int64_t)shape.B * f.H * f.tiles;
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < jobs; i++) // head by head for the cache; a head's longest tile first
                flash_forward_job(out, lse, qkv, &f, i / f.tiles, f.tiles - 1 - (int)(i % f.tiles),
                                  i / f.tiles / f.group);
        }
        blocks_end(f.unit);
    }
}

// ---- Backward: its units of work are kernels/attention/cpu_cuts.cuh's ----

// Fills *queries for `strips` strips from strip `first` on, with delta = rowsum(dout * out). Queries past T are 0.
ALWAYS_INLINE void flash_load_queries(const enum block_layout layout, struct flash_queries *queries,
                                      const struct flash *f, const floatX *dout, const floatX *qkv, const floatX *out,
                                      const float *lse, int b, int h, int first, int strips) {
    const int64_t stride = (int64_t)f->H * f->D;
    const int begin = first * BLOCK, all = flash_queries_count(f, first, strips);
    const int64_t first_row = ((int64_t)b * f->shape.T + begin) * stride + (int64_t)h * f->D;
    flash_prefetch(flash_head(f, qkv, b, begin, h), f->qkv_stride, all, f->D);
    flash_prefetch(dout + first_row, stride, all, f->D);
    flash_prefetch(out + first_row, stride, all, f->D);
    for (int s = 0; s < strips; s++) {
        const int t = (first + s) * BLOCK, count = flash_rows(f, first + s), at = s * f->steps;
        const int64_t row = ((int64_t)b * f->shape.T + t) * stride + (int64_t)h * f->D;
        pack_right(layout, block_at(layout, queries->q, at), block_at(layout, queries->qt, at),
                   flash_head(f, qkv, b, t, h), f->qkv_stride, count, f->D);
        pack_right(layout, block_at(layout, queries->dout, at), block_at(layout, queries->doutt, at), dout + row,
                   stride, count, f->D);
        for (int q = 0; q < BLOCK; q++) {
            float delta = 0;
            if (q < count) {
                const floatX *x = dout + row + q * stride, *y = out + row + q * stride;
#pragma omp simd reduction(+ : delta)
                for (int d = 0; d < f->D; d++)
                    delta += to_float(x[d]) * to_float(y[d]);
            }
            queries->delta[s * BLOCK + q] = delta;
            queries->lse_log2[s * BLOCK + q] = q < count ? LOG2E * lse[flash_row(f, b, h, t + q)] : 0;
        }
    }
}

// Computes P^T = 2^(scale S^T - lse) and dS^T = P^T * (dP^T - delta) of one block, stored as by flash_store_gradients.
// Where `capped`, dS^T is also multiplied by the slopes; else slopes is NULL. The scale is left to the writers of dQ
// and dK. Dropout's factors, unless NULL, multiply dP^T and the stored P^T.
ALWAYS_INLINE void flash_gradient(const enum block_layout layout, const bool capped, void *p, void *ds_left,
                                  void *ds_right, const float *scores, const float *dp, const float *lse_log2,
                                  const float *delta, const float *factors, const float *slopes, float scale_log2) {
    for (int c = 0; c < BLOCK; c += LANES) {
        const vec lse = vec_load(lse_log2 + c), shift = vec_load(delta + c);
        for (int key = 0; key < BLOCK; key += EXP2_VECS) {
            const int at = key * BLOCK + c;
            vec x[EXP2_VECS], ds[EXP2_VECS];
#pragma GCC unroll 4
            for (int i = 0; i < EXP2_VECS; i++)
                x[i] = vec_load(scores + at + i * BLOCK) * scale_log2 - lse;
            vec_exp2(x);
#pragma GCC unroll 4
            for (int i = 0; i < EXP2_VECS; i++) {
                ds[i] = vec_load(dp + at + i * BLOCK);
                if (factors)
                    ds[i] *= vec_load(factors + at + i * BLOCK);
                ds[i] = x[i] * (ds[i] - shift);
                if (capped)
                    ds[i] *= vec_load(slopes + at + i * BLOCK);
                if (factors)
                    x[i] *= vec_load(factors + at + i * BLOCK);
            }
            flash_store_gradients(layout, p, ds_left, ds_right, x, ds, key, c);
        }
    }
}

// Adds a panel's dK and dV from a tile's strips that see it to dk and dv (steps blocks), or where `fresh` sets these.
// Leaves each strip's dS^T in g->ds, block `slot` of its FLASH_PANELS. all_factors: dropout's, as g->ds.
ALWAYS_INLINE void flash_backward_panel(const enum block_layout layout, float *dk, float *dv, struct flash_gradients *g,
                                        const struct flash_queries *queries, const float *all_factors,
                                        const struct flash_sight *sight, const struct flash *f, int64_t place,
                                        int panel, int slot, int first, int strips, bool fresh) {
    ALIGN_BLOCK float scores[BLOCK_ELEMENTS], dp[BLOCK_ELEMENTS], slopes[BLOCK_ELEMENTS];
    const int steps = f->steps, begin = panel > first ? panel - first : 0;
    while (sight->begin[strips - 1] > panel)
        strips--;
    const float scale_log2 = flash_scale_log2(f);
    const void *k = flash_panel(f, f->k, place, panel), *v = flash_panel(f, f->v, place, panel);
    for (int s = begin; s < strips; s++) {
        block_product(f->unit, scores, k, 1, block_at(layout, queries->qt, s * steps), 1, steps, false);
        block_product(f->unit, dp, v, 1, block_at(layout, queries->doutt, s * steps), 1, steps, false);
        if (f->shape.softcap > 0)
            flash_cap(scores, slopes, BLOCK_ELEMENTS, f);
        flash_mask(scores, sight, s, first + s, panel);
        const int at = s * FLASH_PANELS + slot;
        const float *factors = f->dropout.p > 0 ? all_factors + at * BLOCK_ELEMENTS : NULL;
        const float *lse_log2 = queries->lse_log2 + s * BLOCK, *delta = queries->delta + s * BLOCK;
        void *p = block_at(layout, g->p, s), *left = block_at(layout, g->ds_left, s);
        if (f->shape.softcap > 0)
            flash_gradient(layout, true, p, left, block_at(layout, g->ds, at), scores, dp, lse_log2, delta, factors,
                           slopes, scale_log2);
        else
            flash_gradient(layout, false, p, left, block_at(layout, g->ds, at), scores, dp, lse_log2, delta, factors,
                           NULL, scale_log2);
    }
    flash_add_key_gradients(layout, f, dk, dv, g, queries, slot, begin, strips - begin, fresh);
}

// Computes dQ, and its amax, of one tile of queries of a head. Adds the tile's dK, without the scale, and dV to dk and
// dv, (panels, steps) blocks, but overwrites panels from `written` on. place is where the KV head is packed.
ALWAYS_INLINE void flash_backward_tile(const enum block_layout layout, floatX *dqkv, float *dk, float *dv, int written,
                                       const floatX *dout, const floatX *qkv, const floatX *out, const float *lse,
                                       const struct flash *f, int b, int h, int tile, int64_t place) {
    struct flash_queries queries;
    struct flash_gradients gradients;
    struct flash_sight sight;
    ALIGN_BLOCK float dqt[FLASH_QUERY_BLOCKS * BLOCK_ELEMENTS], factors[FLASH_STRIPS * FLASH_PANELS * BLOCK_ELEMENTS];
    const int first = tile * f->strips, rest = f->panels - first, strips = rest < f->strips ? rest : f->strips;
    const int steps = f->steps;
    const int64_t panel_elements = (int64_t)steps * BLOCK_ELEMENTS;
    flash_look(&sight, f, b, first, strips);
    flash_load_queries(layout, &queries, f, dout, qkv, out, lse, b, h, first, strips);

    for (int group = sight.begin[0]; group < first + strips; group += FLASH_PANELS) {
        const int end = group + FLASH_PANELS < first + strips ? group + FLASH_PANELS : first + strips;
        for (int s = 0; f->dropout.p > 0 && s < strips; s++) {
            const struct flash_panels seen = flash_seen(&sight, s, first + s, group);
            if (seen.begin < seen.end)
                flash_dropout(factors + (s * FLASH_PANELS + seen.begin - group) * BLOCK_ELEMENTS, f, b, h, first + s,
                              seen.begin, seen.end - seen.begin);
        }
        for (int panel = group; panel < end; panel++)
            flash_backward_panel(layout, dk + panel * panel_elements, dv + panel * panel_elements, &gradients, &queries,
                                 factors, &sight, f, place, panel, panel - group, first, strips, panel >= written);
        for (int s = 0; s < strips; s++) {
            const struct flash_panels seen = flash_seen(&sight, s, first + s, group);
            for (int d = 0; d < steps && seen.begin < seen.end; d++)
                block_product(f->unit, dqt + (s * steps + d) * BLOCK_ELEMENTS,
                              block_at(layout, flash_panel(f, f->kt, place, seen.begin), d), steps,
                              block_at(layout, gradients.ds, s * FLASH_PANELS + seen.begin - group), 1,
                              seen.end - seen.begin, seen.begin > sight.begin[s]);
        }
    }
    float scale[BLOCK];
    for (int q = 0; q < BLOCK; q++)
        scale[q] = f->shape.scale;
    for (int s = 0; s < strips; s++)
        flash_write_rows(dqkv + (flash_head(f, qkv, b, (first + s) * BLOCK, h) - qkv), f->qkv_stride,
                         dqt + s * steps * BLOCK_ELEMENTS, scale, flash_rows(f, first + s), f);
}

// Writes a panel's dK, with the scale, and dV to dqkv, and merges their amax. These are summed from `sums`, (segments,
// 2, panels, steps) blocks, over the segments that visited the panel.
static void flash_write_panel(floatX *dqkv, const float *sums, const struct flash *f, const struct flash_cuts *cuts,
                              int64_t kv_head, int panel) {
    const int b = (int)(kv_head / f->Hkv), head = (int)(kv_head % f->Hkv), steps = f->steps;
    const int64_t matrix = (int64_t)f->panels * steps * BLOCK_ELEMENTS; // of dK or dV of a unit
    int live[FLASH_UNITS];
    const int live_count = flash_live_segments(live, f, cuts, b, panel);
    for (int is_v = 0; is_v < 2; is_v++) {
        floatX *rows = dqkv + ((int64_t)b * f->shape.T + panel * BLOCK) * f->qkv_stride +
                       (int64_t)(f->H + is_v * f->Hkv + head) * f->D;
        const float *sum = sums + is_v * matrix + (int64_t)panel * steps * BLOCK_ELEMENTS;
        const float scale = is_v ? 1.0f : f->shape.scale;
        for (int block = 0; block < steps; block++) {
            const int columns = f->D - block * BLOCK < BLOCK ? f->D - block * BLOCK : BLOCK;
            for (int r = 0; r < flash_rows(f, panel); r++) {
                const float *at = sum + block * BLOCK_ELEMENTS + r * BLOCK, *row = at + live[0] * 2 * matrix;
                ALIGN_BLOCK float total[BLOCK];
                for (int c = 0; c < BLOCK && live_count > 1; c += LANES) {
                    vec x = vec_load(row + c);
                    for (int s = 1; s < live_count; s++)
                        x += vec_load(at + live[s] * 2 * matrix + c);
                    vec_store(total + c, x);
                }
                row_store(rows + r * f->qkv_stride + block * BLOCK, live_count > 1 ? total : row, scale, columns);
            }
        }
        amax_merge_rows(f->amax, rows, f->qkv_stride, flash_rows(f, panel), f->D);
    }
}

// Computes dQ of one segment of a KV head. Leaves dK, without the scale, and dV of the panels that the segment visits
// in `sums`, (2, panels, steps) blocks. Doesn't touch other panels of `sums`.
static void flash_backward_segment(floatX *dqkv, float *sums, const floatX *dout, const floatX *qkv, const floatX *out,
                                   const float *lse, const struct flash *f, const struct flash_cuts *cuts,
                                   int64_t kv_head, int segment, int64_t place) {
    const int b = (int)(kv_head / f->Hkv), first_head = (int)(kv_head % f->Hkv) * f->group;
    const int begin = flash_segment_begin(cuts, b, segment), end = flash_segment_begin(cuts, b, segment + 1);
    float *dk = sums, *dv = dk + (int64_t)f->panels * f->steps * BLOCK_ELEMENTS;
    for (int pair = begin, written = 0; pair < end; pair++, written = flash_reach(f, pair)) {
        const int tile = pair / f->group, h = first_head + pair % f->group;
        if (blocks_layout(f->unit) == LAYOUT_BF16)
            flash_backward_tile(LAYOUT_BF16, dqkv, dk, dv, written, dout, qkv, out, lse, f, b, h, tile, place);
        else
            flash_backward_tile(LAYOUT_FP32, dqkv, dk, dv, written, dout, qkv, out, lse, f, b, h, tile, place);
    }
}

// Returns the bytes of packed K, K^T and V, 3/2 of forward's, and of the units' sums, 8 * B * Hkv * segments *
// roundup(T, 32) * roundup(D, 32). B * Hkv * segments is at most 31 + B * Hkv. For a planned GPU: the GPU's bytes.
size_t flash_backward_workspace_bytes(struct attention_shape shape, const struct device *dev) {
    if (device_is_gpu(dev))
        return gpu_flash_backward_bytes(shape);
    const struct dropout none = {0, 0, 0, 0, 0};
    const struct flash f = flash_of(shape, none, NULL);
    const size_t heads = (size_t)shape.B * f.Hkv,
                 sums = heads * (size_t)f.panels * f.steps * BLOCK_ELEMENTS * sizeof(float);
    return 3 * flash_packed_bytes(&f) + 2 * sums * (size_t)flash_segments(&f);
}

void flash_backward(floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out, const float *lse,
                    struct attention_shape shape, struct dropout dropout, uint32_t *amax, void *workspace,
                    struct device *dev) {
    struct flash f = flash_of(shape, dropout, amax);
    struct flash_cuts cuts;
    flash_cut(&cuts, &f);
    const int segments = cuts.segments;
    const int64_t heads = (int64_t)shape.B * f.Hkv, matrix = (int64_t)f.panels * f.steps * BLOCK_ELEMENTS;
    f.k = (char *)workspace;
    f.kt = f.k + flash_packed_bytes(&f);
    f.v = f.kt + flash_packed_bytes(&f);
    float *sums = (float *)(f.v + flash_packed_bytes(&f)); // (B, Hkv, segments, 2, panels, steps) blocks
#pragma omp parallel
    {
        const bool whole = segments == 1 && flash_whole_heads(&f);
        blocks_begin(f.unit);
        if (!whole)
            flash_pack_all(&f, qkv, true);
#pragma omp for schedule(dynamic, 1)
        for (int64_t unit = 0; unit < heads * segments; unit++) {
            const int64_t kv_head = unit / segments, place = whole ? omp_get_thread_num() : kv_head;
            float *unit_sums = sums + (whole ? place : unit) * 2 * matrix;
            for (int panel = 0; whole && panel < f.panels; panel++)
                flash_pack(&f, qkv, kv_head, panel, place, true);
            flash_backward_segment(dqkv, unit_sums, dout, qkv, out, lse, &f, &cuts, kv_head, (int)(unit % segments),
                                   place);
            for (int panel = 0; segments == 1 && panel < f.panels; panel++) // while the sums are still cached
                flash_write_panel(dqkv, unit_sums, &f, &cuts, kv_head, panel);
        }
        blocks_end(f.unit);
        if (segments > 1) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < heads * f.panels; i++)
                flash_write_panel(dqkv, sums + i / f.panels * segments * 2 * matrix, &f, &cuts, i / f.panels,
                                  (int)(i % f.panels));
        }
    }
}

void flash_unavailable_reason(char *reason, size_t size, struct attention_shape shape, const struct device *dev) {
    reason[0] = 0;
    if (device_is_gpu(dev))
        gpu_flash_unavailable_reason(reason, size, shape);
}
bool flash_is_slower(const struct device *dev) { return device_is_gpu(dev) && gpu_flash_is_slower(dev->planned); }
const char *flash_describe(const struct device *dev) { return device_is_gpu(dev) ? GPU_FLASH_NAME : blocks_describe(); }

#endif
