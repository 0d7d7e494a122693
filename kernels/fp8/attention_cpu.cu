// FP8 attention on the CPU (kernels/fp8/attention.cuh), the reference of what GPUs compute. Blocks, strips, tiles and
// units of work are flash attention's (kernels/attention/cpu.cu). Codes are decoded to their values without the scale,
// which bf16 holds exactly, so that the bf16 products multiply them; scales come in as factors of sums in fp32.
// P is rounded after it is normalized, so that a strip needs its maximum and sum before the first value of P. Of the
// last KEPT_PANELS panels that a strip sees the scores stay on the stack in between; of others they are made twice.
#if !defined(TARGET_CUDA)
#include "kernels/attention/cpu_cuts.cuh"  // struct flash_cuts
#include "kernels/attention/cpu_tiles.cuh" // struct flash, and what both backwards share
#include "kernels/attention/flash.cuh"     // flash_forward_workspace_bytes
#include "kernels/blocks.cuh"              // block_product, pack_left, pack_right
#include "kernels/fp8/attention_rules.cuh" // fp8_attention_refuses, and the prototypes of what is defined here
#include "kernels/fp8/tiles.cuh"           // vec_choose, vec_fp8_encode
#include "kernels/vectors.cuh"             // vec, vec_exp2, vec_store_bf16
#include <math.h>                          // logf
#include <omp.h>                           // omp_get_thread_num

#define P_SCALE_LOG2 8.0f
enum { KEPT_PANELS = 64 }; // 256 KB of scores; a multiple of FLASH_PANELS

// Says what a run of backward is for. A result needs known scales. Without a history, earlier runs only find the amaxes
// that make them: first dS's, which dQ, dK and dV depend on, then the amaxes of these outputs.
enum fp8_run { RUN_DS_AMAX, RUN_OUTPUT_AMAXES, RUN_RESULT };

// A call. Its factors multiply sums of products of codes' values.
struct fp8_flash {
    struct flash f;
    struct fp8_attention a;
    enum fp8_run run;
    bool takes_amax;
    float score_log2; // of q8 k8, to S log2(e)
    float out;        // of P8 v8, to O
    float dp, delta;  // of dO8 v8, to dP; of dO8 O8, to D
    float dq, dk, dv;
    const fp8 *qkv8, *dout8, *out8;
    const float *lse;
    fp8 *to8; // forward's results; NULL: not wanted
    floatX *to;
    float *to_lse;
    floatX *dqkv;   // backward's
    uint32_t *amax; // of dqkv
};

// Returns a call with its sizes, and forward's factors by the scales of q, k and v. Outputs and packed operands: NULL.
static struct fp8_flash fp8_flash_of(struct fp8_attention a, const fp8 *qkv8) {
    const struct dropout none = {0, 0, 0, 0, 0};
    struct fp8_flash c;
    memset(&c, 0, sizeof c);
    c.f = flash_of(a.shape, none, NULL);
    c.a = a;
    c.qkv8 = qkv8;
    struct fp8_scale *const *scales = a.scales;
    c.score_log2 = a.shape.scale * scales[FP8_ATTENTION_Q]->inverse * scales[FP8_ATTENTION_K]->inverse * LOG2E;
    if (c.score_log2 < 0x1p-126f) // of q and k so small that every score is 0: times 0 a hidden key's would be NaN
        c.score_log2 = 0x1p-126f;
    c.out = scales[FP8_ATTENTION_V]->inverse / FP8_ATTENTION_P_SCALE;
    return c;
}

// ---- values of FP8 in vectors ----

// Returns x, at most the format's largest in size, rounded as by fp8_encode, but as a value, without negative zeros.
// Adding 1.5 2^23 u rounds to multiples of u, the unit of x's last place or of subnormals: 2^mantissa u is `power`.
ALWAYS_INLINE vec vec_fp8_round_small(vec x, const enum fp8_format format) {
    const vec power_of_x = (vec)((vec_words)x & 0x7f800000u); // NaN's is infinity
    const vec power = vec_max(power_of_x, vec_set(format == FP8_E4M3 ? 0x1p-6f : 0x1p-14f));
    const float magic = format == FP8_E4M3 ? 0x1.8p20f : 0x1.8p21f;
    return vec_fma(vec_fma(x, power, vec_set(magic)), power, vec_set(-magic));
}
// Returns any x, limited to the format's largest magnitude, rounded as by vec_fp8_round_small. A NaN stays.
ALWAYS_INLINE vec vec_fp8_round(vec x, const enum fp8_format format) {
    const float largest = fp8_largest(format);
    return vec_fp8_round_small(vec_max(vec_set(-largest), vec_min(vec_set(largest), x)), format);
}
static inline vec vec_fp8_round_to(vec x, enum fp8_format format) {
    switch (format) {
    case FP8_E4M3: return vec_fp8_round(x, FP8_E4M3);
    case FP8_E5M2: return vec_fp8_round(x, FP8_E5M2);
    }
    return x;
}
// Returns in each lane the larger of a and b as integers; both are fp8_magnitude's bits.
ALWAYS_INLINE vec_words vec_larger_bits(vec_words a, vec_words b) {
#if defined(__AVX512F__)
    return (vec_words)_mm512_max_epu32((__m512i)a, (__m512i)b);
#else
    return vec_choose((vec_words)(a > b), a, b);
#endif
}
static void merge_lanes(uint32_t *amax, vec_words lanes) {
    uint32_t largest = 0;
    for (int i = 0; i < LANES; i++)
        largest = amax_larger(largest, lanes[i]);
    amax_merge(amax, largest);
}

// ---- codes, decoded and packed ----

// Returns the values of LANES codes, as fp8_decode does. A code's bits, moved to where a float has them, make a float
// that is too small by a power of two. One multiplication corrects it, for subnormals too.
ALWAYS_INLINE vec vec_fp8_decode(const fp8 *codes, const enum fp8_format format) {
    const bool e4m3 = format == FP8_E4M3;
    const vec_words words = vec_load_signed_bytes(codes);
    const vec_words moved = e4m3 ? words << 20 & 0x87f00000u : words << 21 & 0x8fe00000u;
    const vec size = (vec)moved * vec_set(e4m3 ? 0x1p120f : 0x1p112f);
    const vec_words not_finite = (vec_words)((moved & 0x7fffffffu) >= (e4m3 ? 0x07f00000u : 0x0f800000u));
    return (vec)((vec_words)size | (not_finite & 0x7f800000u));
}
// rows (count, D) = the values of codes (count, D) in rows `stride` apart; D is a multiple of 16.
static void decode_rows(floatX *rows, enum fp8_format format, const fp8 *codes, int64_t stride, int count, int D) {
    for (int r = 0; r < count; r++)
        for (int d = 0; d < D; d += LANES)
            switch (format) {
            case FP8_E4M3: floatx_store(rows + r * D + d, vec_fp8_decode(codes + r * stride + d, FP8_E4M3)); break;
            case FP8_E5M2: floatx_store(rows + r * D + d, vec_fp8_decode(codes + r * stride + d, FP8_E5M2)); break;
            }
}
// Returns the first code of a head of token (b, t) in packed qkv8; head counts a token's query, key and value heads.
static const fp8 *codes_of_head(const struct fp8_flash *c, int b, int t, int head) {
    return c->qkv8 + ((int64_t)b * c->f.shape.T + t) * c->f.qkv_stride + (int64_t)head * c->f.D;
}
// Returns the index of the first element of a head of token (b, t) in O or dO, (B, T, H, D).
static int64_t out_index(const struct fp8_flash *c, int b, int t, int h) {
    return (((int64_t)b * c->f.shape.T + t) * c->f.H + h) * c->f.D;
}
// Packs one panel at `place`: its K and V^T or, for backward, its K, K^T and V. kv_head is b * Hkv + head.
ALWAYS_INLINE void pack_panel_as(const enum block_layout layout, const struct fp8_flash *c, int64_t kv_head, int panel,
                                 int64_t place, bool backward) {
    floatX rows[BLOCK * MAX_HEAD_DIM];
    const struct flash *f = &c->f;
    const int b = (int)(kv_head / f->Hkv), head = (int)(kv_head % f->Hkv), count = flash_rows(f, panel);
    void *k = flash_panel(f, f->k, place, panel), *v = flash_panel(f, f->v, place, panel);
    const fp8 *k8 = codes_of_head(c, b, panel * BLOCK, f->H + head), *v8 = k8 + (int64_t)f->Hkv * f->D;
    prefetch_rows(v8, f->qkv_stride, count, f->D);
    if (panel + 1 < f->panels)
        prefetch_rows(k8 + BLOCK * f->qkv_stride, f->qkv_stride, flash_rows(f, panel + 1), f->D);
    decode_rows(rows, FP8_E4M3, k8, f->qkv_stride, count, f->D);
    pack_left(layout, k, backward ? flash_panel(f, f->kt, place, panel) : NULL, rows, f->D, count, f->D);
    decode_rows(rows, FP8_E4M3, v8, f->qkv_stride, count, f->D);
    pack_left(layout, backward ? v : NULL, backward ? NULL : v, rows, f->D, count, f->D);
}
static void pack_panel(const struct fp8_flash *c, int64_t kv_head, int panel, int64_t place, bool backward) {
    if (blocks_layout(c->f.unit) == LAYOUT_BF16)
        pack_panel_as(LAYOUT_BF16, c, kv_head, panel, place, backward);
    else
        pack_panel_as(LAYOUT_FP32, c, kv_head, panel, place, backward);
}
// Packs all panels of KV head i at place i, for every i. All threads of the team call this; it ends with a barrier.
static void pack_all(const struct fp8_flash *c, bool backward) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < (int64_t)c->f.shape.B * c->f.Hkv * c->f.panels; i++)
        pack_panel(c, i / c->f.panels, (int)(i % c->f.panels), i / c->f.panels, backward);
}

// ---- forward ----

// A strip of queries: in units of log2, m = max S, and l = sum 2^(S - m).
struct fp8_strip {
    float max[BLOCK], sum[BLOCK];
} ALIGN_BLOCK;

// Raises each query's m to its largest score of `panels` blocks, times score_log2, and rescales its l to the new m.
static void raise_max(struct fp8_strip *strip, const float *scores, int panels, float score_log2) {
    for (int q = 0; q < BLOCK; q += LANES) {
        vec m0 = vec_load(scores + q), m1 = m0;
        for (int key = 0; key < panels * BLOCK; key += 2) {
            m0 = vec_max(m0, vec_load(scores + key * BLOCK + q));
            m1 = vec_max(m1, vec_load(scores + (key + 1) * BLOCK + q));
        }
        const vec old = vec_load(strip->max + q), m = vec_max(old, score_log2 * vec_max(m0, m1));
        vec shrink[EXP2_VECS] = {old - m};
        vec_exp2(shrink);
        vec_store(strip->max + q, m);
        vec_store(strip->sum + q, vec_load(strip->sum + q) * shrink[0]);
    }
}
// scores (panels blocks) = 2^(score_log2 scores - m). Adds columns up in sums (32), unless NULL.
static void exponentials(float *scores, float *sums, const float *max, int panels, float score_log2) {
    for (int q = 0; q < BLOCK; q += LANES) {
        const vec m = vec_load(max + q);
        vec sum[EXP2_VECS] = {vec_set(0), vec_set(0), vec_set(0), vec_set(0)};
        for (int key = 0; key < panels * BLOCK; key += EXP2_VECS) {
            vec x[EXP2_VECS];
#pragma GCC unroll 4
            for (int i = 0; i < EXP2_VECS; i++)
                x[i] = vec_load(scores + (key + i) * BLOCK + q) * score_log2 - m;
            vec_exp2(x);
#pragma GCC unroll 4
            for (int i = 0; i < EXP2_VECS; i++) {
                sum[i] += x[i];
                vec_store(scores + (key + i) * BLOCK + q, x[i]);
            }
        }
        if (sums)
            vec_store(sums + q, vec_load(sums + q) + ((sum[0] + sum[1]) + (sum[2] + sum[3])));
    }
}
// Writes `panels` <= FLASH_PANELS blocks x of P^T as right operands p, each column times its factor, rounded to E4M3.
ALWAYS_INLINE void round_probabilities(const enum block_layout layout, void *p, const float *x, const float *factors,
                                       int panels) {
    for (int q = 0; q < BLOCK; q += LANES) {
        const vec factor = vec_load(factors + q);
        for (int key = 0; key < panels * BLOCK; key += 2) {
            const float *at = x + key * BLOCK + q;
            const vec even = vec_fp8_round_small(vec_load(at) * factor, FP8_E4M3),
                      odd = vec_fp8_round_small(vec_load(at + BLOCK) * factor, FP8_E4M3);
            if (layout == LAYOUT_BF16)
                vec_store_bf16((word *)block_at(LAYOUT_BF16, p, key / BLOCK) + q / 16 * 256 + key % BLOCK / 2 * 16 +
                                   q % 16,
                               NULL, NULL, even, odd);
            else {
                vec_store((float *)p + key * BLOCK + q, even);
                vec_store((float *)p + (key + 1) * BLOCK + q, odd);
            }
        }
    }
}
// Writes a strip's O to c->to8 and c->to, unless NULL. If c->takes_amax, merges its amax into a.out. sums: O^T (D, 32).
static void write_strip(const struct fp8_flash *c, const float *sums, int b, int h, int strip) {
    const struct flash *f = &c->f;
    const int count = flash_rows(f, strip);
    const vec factor = vec_set(c->out), scale = vec_set(c->a.outputs_in_fp8 ? c->a.out->scale : 1);
    vec_words largest = {0};
    ALIGN_BLOCK float block[BLOCK_ELEMENTS];
    for (int s = 0; s < f->steps; s++) {
        const int columns = f->D - s * BLOCK < BLOCK ? f->D - s * BLOCK : BLOCK;
        block_transpose(block, sums + s * BLOCK_ELEMENTS, BLOCK);
        for (int q = 0; q < count; q++)
            for (int d = 0; d < columns; d += LANES) {
                const int64_t at = out_index(c, b, strip * BLOCK + q, h) + s * BLOCK + d;
                const vec x = vec_load(block + q * BLOCK + d) * factor;
                if (c->a.outputs_in_fp8)
                    largest = vec_larger_bits(largest, (vec_words)x & 0x7fffffffu);
                if (c->to8)
                    *(vec_bytes_anywhere *)(c->to8 + at) =
                        __builtin_convertvector(vec_fp8_encode(x * scale, FP8_E4M3), vec_bytes_anywhere);
                if (c->to)
                    floatx_store(c->to + at, x);
            }
    }
    if (!c->takes_amax)
        return;
    if (c->a.outputs_in_fp8)
        merge_lanes(&c->a.out->amax, largest);
    else
        amax_merge_rows(&c->a.out->amax, c->to + out_index(c, b, strip * BLOCK, h), (int64_t)f->H * f->D, count, f->D);
}
// Computes O and lse of one strip of queries of one head. place: where the strip's KV head is packed.
ALWAYS_INLINE void forward_strip(const enum block_layout layout, const struct fp8_flash *c, int b, int h, int strip,
                                 int64_t place) {
    ALIGN_BLOCK float kept[KEPT_PANELS * BLOCK_ELEMENTS], early[FLASH_PANELS * BLOCK_ELEMENTS];
    ALIGN_BLOCK float qt[MAX_STEPS * BLOCK_ELEMENTS], sums[MAX_STEPS * BLOCK_ELEMENTS], factors[BLOCK];
    ALIGN_BLOCK float p[FLASH_PANELS * BLOCK_ELEMENTS];
    floatX rows[BLOCK * MAX_HEAD_DIM];
    struct fp8_strip state;
    const struct flash *f = &c->f;
    const int steps = f->steps, count = flash_rows(f, strip), panels = strip + 1;
    const int first_kept = panels > KEPT_PANELS ? panels - KEPT_PANELS : 0;

    decode_rows(rows, FP8_E4M3, codes_of_head(c, b, strip * BLOCK, h), f->qkv_stride, count, f->D);
    pack_right(layout, NULL, qt, rows, f->D, count, f->D);
    for (int q = 0; q < BLOCK; q++) {
        state.max[q] = -0x1p127f; // not infinite: m - m would be NaN
        state.sum[q] = 0;
    }
    for (int panel = 0; panel < first_kept; panel++) {
        block_product(f->unit, early, flash_panel(f, f->k, place, panel), 1, qt, 1, steps, false);
        raise_max(&state, early, 1, c->score_log2);
        exponentials(early, state.sum, state.max, 1, c->score_log2);
    }
    for (int panel = first_kept; panel < panels; panel++)
        block_product(f->unit, kept + (panel - first_kept) * BLOCK_ELEMENTS, flash_panel(f, f->k, place, panel), 1, qt,
                      1, steps, false);
    flash_mask_diagonal(kept + (strip - first_kept) * BLOCK_ELEMENTS);
    raise_max(&state, kept, panels - first_kept, c->score_log2);
    exponentials(kept, state.sum, state.max, panels - first_kept, c->score_log2);
    for (int q = 0; q < BLOCK; q++)
        factors[q] = FP8_ATTENTION_P_SCALE / state.sum[q];

    for (int panel = 0; panel < panels;) {
        const int end = panel < first_kept ? first_kept : panels,
                  n = end - panel < FLASH_PANELS ? end - panel : (int)FLASH_PANELS;
        float *x = panel < first_kept ? early : kept + (panel - first_kept) * BLOCK_ELEMENTS;
        for (int i = 0; panel < first_kept && i < n; i++)
            block_product(f->unit, early + i * BLOCK_ELEMENTS, flash_panel(f, f->k, place, panel + i), 1, qt, 1, steps,
                          false);
        if (panel < first_kept)
            exponentials(early, NULL, state.max, n, c->score_log2);
        round_probabilities(layout, p, x, factors, n);
        for (int d = 0; d < steps; d++)
            block_product(f->unit, sums + d * BLOCK_ELEMENTS, block_at(layout, flash_panel(f, f->v, place, panel), d),
                          steps, p, 1, n, panel > 0);
        panel += n;
    }
    write_strip(c, sums, b, h, strip);
    for (int q = 0; c->to_lse && q < count; q++)
        c->to_lse[flash_row(f, b, h, strip * BLOCK + q)] = 0.6931471806f * state.max[q] + logf(state.sum[q]);
}
static void forward_tile(const struct fp8_flash *c, int64_t head, int tile, int64_t place) {
    const struct flash *f = &c->f;
    const int b = (int)(head / f->H), h = (int)(head % f->H), first = tile * f->strips;
    prefetch_rows(codes_of_head(c, b, first * BLOCK, h), f->qkv_stride, flash_queries_count(f, first, f->strips), f->D);
    for (int strip = first; strip < first + f->strips && strip < f->panels; strip++)
        if (blocks_layout(f->unit) == LAYOUT_BF16)
            forward_strip(LAYOUT_BF16, c, b, h, strip, place);
        else
            forward_strip(LAYOUT_FP32, c, b, h, strip, place);
}
static void forward_run(const struct fp8_flash *c) {
    const struct flash *f = &c->f;
#pragma omp parallel
    {
        blocks_begin(f->unit);
        if (flash_whole_heads(f)) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t kv_head = 0; kv_head < (int64_t)f->shape.B * f->Hkv; kv_head++) {
                const int64_t place = omp_get_thread_num();
                for (int panel = 0; panel < f->panels; panel++)
                    pack_panel(c, kv_head, panel, place, false);
                for (int i = 0; i < f->group * f->tiles; i++)
                    forward_tile(c, kv_head * f->group + i / f->tiles, i % f->tiles, place);
            }
        } else {
            pack_all(c, false);
            const int64_t jobs = (int64_t)f->shape.B * f->H * f->tiles;
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < jobs; i++) // a head's longest tile first
                forward_tile(c, i / f->tiles, f->tiles - 1 - (int)(i % f->tiles), i / f->tiles / f->group);
        }
        blocks_end(f->unit);
    }
}

size_t fp8_attention_forward_workspace_bytes(struct attention_shape shape, struct fp8_attention_demands demands,
                                             struct device *dev) {
    return device_is_gpu(dev) ? fp8_attention_planned_bytes(shape, demands, false)
                              : flash_forward_workspace_bytes(shape, dev);
}
void fp8_attention_forward(fp8 *out8, floatX *out, float *lse, const fp8 *qkv8, struct fp8_attention a, bool takes_amax,
                           void *workspace, struct device *dev) {
    struct fp8_flash c = fp8_flash_of(a, qkv8);
    c.f.k = (char *)workspace;
    c.f.v = c.f.k + flash_packed_bytes(&c.f);
    if (a.outputs_in_fp8) {
        if (takes_amax && a.out->delayed == 0) {
            c.takes_amax = true;
            forward_run(&c);
        }
        fp8_set_scales(&a.out, 1, FP8_E4M3, dev);
    }
    c.takes_amax = takes_amax;
    c.to8 = out8;
    c.to = out;
    c.to_lse = lse;
    forward_run(&c);
}

// ---- backward ----

// Fills *queries with `strips` strips of a head, from strip `first` on: Q, dO, delta, the formulas' D, and lse in log2
// less 8, so that P comes out times 256. Padding rows get 0 everywhere: their dS is 0, their P counts for nothing.
ALWAYS_INLINE void load_queries(const enum block_layout layout, struct flash_queries *queries,
                                const struct fp8_flash *c, int b, int h, int first, int strips) {
    floatX q_rows[BLOCK * MAX_HEAD_DIM], dout_rows[BLOCK * MAX_HEAD_DIM], out_rows[BLOCK * MAX_HEAD_DIM];
    const struct flash *f = &c->f;
    const int64_t stride = (int64_t)f->H * f->D, first_row = out_index(c, b, first * BLOCK, h);
    const int all = flash_queries_count(f, first, strips);
    prefetch_rows(codes_of_head(c, b, first * BLOCK, h), f->qkv_stride, all, f->D);
    prefetch_rows(c->dout8 + first_row, stride, all, f->D);
    prefetch_rows(c->out8 + first_row, stride, all, f->D);
    for (int s = 0; s < strips; s++) {
        const int t = (first + s) * BLOCK, count = flash_rows(f, first + s), at = s * f->steps;
        const int64_t row = out_index(c, b, t, h);
        decode_rows(q_rows, FP8_E4M3, codes_of_head(c, b, t, h), f->qkv_stride, count, f->D);
        decode_rows(dout_rows, c->a.gradients, c->dout8 + row, stride, count, f->D);
        decode_rows(out_rows, FP8_E4M3, c->out8 + row, stride, count, f->D);
        pack_right(layout, block_at(layout, queries->q, at), block_at(layout, queries->qt, at), q_rows, f->D, count,
                   f->D);
        pack_right(layout, block_at(layout, queries->dout, at), block_at(layout, queries->doutt, at), dout_rows, f->D,
                   count, f->D);
        for (int q = 0; q < BLOCK; q++) {
            float delta = 0;
            if (q < count) {
#pragma omp simd reduction(+ : delta)
                for (int d = 0; d < f->D; d++)
                    delta += to_float(dout_rows[q * f->D + d]) * to_float(out_rows[q * f->D + d]);
            }
            queries->delta[s * BLOCK + q] = delta * c->delta;
            queries->lse_log2[s * BLOCK + q] = q < count ? LOG2E * c->lse[flash_row(f, b, h, t + q)] - P_SCALE_LOG2 : 0;
        }
    }
}

// Factors of a block's gradient: from scores to S log2(e), from dO8 v8 to dP, from 256 P (dP - D) to dS's codes.
struct fp8_factors {
    float score_log2, dp, ds;
};
// Computes P8^T and dS8^T of a block, stored as by flash_store_gradients, from scores (q8 k8), dp (dO8 v8), and
// lse_log2 and delta as of load_queries. Returns, lane by lane, the largest of `largest` and all |256 P (dP - D)|.
ALWAYS_INLINE vec_words gradient_of_block(const enum block_layout layout, const enum fp8_format format, void *p,
                                          void *ds_left, void *ds_right, const float *scores, const float *dp,
                                          const float *lse_log2, const float *delta, struct fp8_factors by,
                                          vec_words largest) {
    for (int c = 0; c < BLOCK; c += LANES) {
        const vec lse = vec_load(lse_log2 + c), shift = vec_load(delta + c);
        for (int key = 0; key < BLOCK; key += EXP2_VECS) {
            const int at = key * BLOCK + c;
            vec x[EXP2_VECS], ds[EXP2_VECS];
#pragma GCC unroll 4
            for (int i = 0; i < EXP2_VECS; i++)
                x[i] = vec_load(scores + at + i * BLOCK) * by.score_log2 - lse;
            vec_exp2(x);
#pragma GCC unroll 4
            for (int i = 0; i < EXP2_VECS; i++) {
                ds[i] = x[i] * (vec_load(dp + at + i * BLOCK) * by.dp - shift);
                largest = vec_larger_bits(largest, (vec_words)ds[i] & 0x7fffffffu);
                ds[i] = vec_fp8_round(ds[i] * by.ds, format);
                x[i] = vec_fp8_round_small(x[i], FP8_E4M3); // not limited: 256 at most, but for roundings of lse
            }
            flash_store_gradients(layout, p, ds_left, ds_right, x, ds, key, c);
        }
    }
    return largest;
}
// Computes dS8^T of a panel and of the strips of a tile that see it, for g->ds, in each strip's block `slot` of
// FLASH_PANELS. Raises *ds_amax to the amax of 256 P (dP - D). Unless RUN_DS_AMAX, also computes the panel's dK and dV
// from these strips, and adds them to dk and dv (steps blocks), or overwrites these where `fresh`.
ALWAYS_INLINE void backward_panel(const enum block_layout layout, const struct fp8_flash *c, float *dk, float *dv,
                                  struct flash_gradients *g, vec_words *ds_amax, const struct flash_queries *queries,
                                  int64_t place, int panel, int slot, int first, int strips, bool fresh) {
    ALIGN_BLOCK float scores[BLOCK_ELEMENTS], dp[BLOCK_ELEMENTS];
    const struct flash *f = &c->f;
    const int steps = f->steps, begin = panel > first ? panel - first : 0;
    const void *k = flash_panel(f, f->k, place, panel), *v = flash_panel(f, f->v, place, panel);
    const struct fp8_factors by = {c->score_log2, c->dp,
                                   f->shape.scale / FP8_ATTENTION_P_SCALE * c->a.scales[FP8_ATTENTION_DS]->scale};
    for (int s = begin; s < strips; s++) {
        const int at = s * FLASH_PANELS + slot;
        const float *lse_log2 = queries->lse_log2 + s * BLOCK, *delta = queries->delta + s * BLOCK;
        void *p = block_at(layout, g->p, s), *left = block_at(layout, g->ds_left, s);
        void *right = block_at(layout, g->ds, at);
        block_product(f->unit, scores, k, 1, block_at(layout, queries->qt, s * steps), 1, steps, false);
        block_product(f->unit, dp, v, 1, block_at(layout, queries->doutt, s * steps), 1, steps, false);
        if (panel == first + s)
            flash_mask_diagonal(scores);
        switch (c->a.gradients) {
        case FP8_E4M3:
            *ds_amax = gradient_of_block(layout, FP8_E4M3, p, left, right, scores, dp, lse_log2, delta, by, *ds_amax);
            break;
        case FP8_E5M2:
            *ds_amax = gradient_of_block(layout, FP8_E5M2, p, left, right, scores, dp, lse_log2, delta, by, *ds_amax);
            break;
        }
    }
    if (c->run != RUN_DS_AMAX)
        flash_add_key_gradients(layout, f, dk, dv, g, queries, slot, begin, strips - begin, fresh);
}

// Computes a gradient's rows (count, D): sums (steps blocks) times factor. Where outputs are FP8, merges their amax
// into the tensor's scale. RUN_RESULT writes them to dqkv from `at` on, and merges c->amax, unless NULL, as stored.
static void write_gradient(const struct fp8_flash *c, enum fp8_attention_tensor tensor, int64_t at, const float *sums,
                           float factor, int count) {
    const struct flash *f = &c->f;
    struct fp8_scale *scale = c->a.scales[tensor];
    const bool in_fp8 = c->a.outputs_in_fp8, writes = c->run == RUN_RESULT;
    vec_words largest = {0};
    for (int s = 0; s < f->steps; s++) {
        const int columns = f->D - s * BLOCK < BLOCK ? f->D - s * BLOCK : BLOCK;
        for (int r = 0; r < count; r++)
            for (int d = 0; d < columns; d += LANES) {
                vec x = vec_load(sums + s * BLOCK_ELEMENTS + r * BLOCK + d) * factor;
                if (in_fp8) {
                    largest = vec_larger_bits(largest, (vec_words)x & 0x7fffffffu);
                    x = vec_fp8_round_to(x * scale->scale, c->a.gradients) * scale->inverse;
                }
                if (writes)
                    floatx_store(c->dqkv + at + r * f->qkv_stride + s * BLOCK + d, x);
            }
    }
    if (in_fp8)
        merge_lanes(&scale->amax, largest);
    if (writes)
        amax_merge_rows(c->amax, c->dqkv + at, f->qkv_stride, count, f->D);
}
// Returns the index in dqkv of the first element of a head of token (b, t); head counts query, key and value heads.
static int64_t gradient_index(const struct fp8_flash *c, int b, int t, int head) {
    return codes_of_head(c, b, t, head) - c->qkv8;
}
// Does backward of a tile of queries of a head; merges dS's amax. Unless RUN_DS_AMAX, passes dQ to write_gradient, and
// adds dK and dV to dk and dv (panels, steps blocks), but overwrites panels from `written` on. place: of K and V.
ALWAYS_INLINE void backward_tile(const enum block_layout layout, const struct fp8_flash *c, float *dk, float *dv,
                                 int written, int b, int h, int tile, int64_t place) {
    struct flash_queries queries;
    struct flash_gradients gradients;
    vec_words ds_amax = {0};
    ALIGN_BLOCK float dqt[FLASH_QUERY_BLOCKS * BLOCK_ELEMENTS], dq[MAX_STEPS * BLOCK_ELEMENTS];
    const struct flash *f = &c->f;
    const int first = tile * f->strips, rest = f->panels - first, strips = rest < f->strips ? rest : f->strips;
    const int steps = f->steps;
    const int64_t panel_elements = (int64_t)steps * BLOCK_ELEMENTS;
    load_queries(layout, &queries, c, b, h, first, strips);
    for (int group = 0; group < first + strips; group += FLASH_PANELS) {
        const int end = group + FLASH_PANELS < first + strips ? group + FLASH_PANELS : first + strips;
        for (int panel = group; panel < end; panel++)
            backward_panel(layout, c, dk + panel * panel_elements, dv + panel * panel_elements, &gradients, &ds_amax,
                           &queries, place, panel, panel - group, first, strips, panel >= written);
        for (int s = 0; s < strips && c->run != RUN_DS_AMAX; s++) {
            const int seen = (end < first + s + 1 ? end : first + s + 1) - group;
            for (int d = 0; d < steps && seen > 0; d++)
                block_product(f->unit, dqt + (s * steps + d) * BLOCK_ELEMENTS,
                              block_at(layout, flash_panel(f, f->kt, place, group), d), steps,
                              block_at(layout, gradients.ds, s * FLASH_PANELS), 1, seen, group > 0);
        }
    }
    merge_lanes(&c->a.scales[FP8_ATTENTION_DS]->amax,
                (vec_words)((vec)ds_amax * (f->shape.scale / FP8_ATTENTION_P_SCALE)));
    for (int s = 0; s < strips && c->run != RUN_DS_AMAX; s++) {
        for (int d = 0; d < steps; d++)
            block_transpose(dq + d * BLOCK_ELEMENTS, dqt + (s * steps + d) * BLOCK_ELEMENTS, BLOCK);
        write_gradient(c, FP8_ATTENTION_DQ, gradient_index(c, b, (first + s) * BLOCK, h), dq, c->dq,
                       flash_rows(f, first + s));
    }
}

// Adds up a panel's dK and dV over the segments that reach it, for write_gradient. sums (segments, 2, panels, steps)
static void write_panel(const struct fp8_flash *c, const float *sums, const struct flash_cuts *cuts, int64_t kv_head,
                        int panel) {
    const struct flash *f = &c->f;
    const int b = (int)(kv_head / f->Hkv), head = (int)(kv_head % f->Hkv), steps = f->steps;
    const int64_t matrix = (int64_t)f->panels * steps * BLOCK_ELEMENTS; // of dK or dV of a unit
    ALIGN_BLOCK float total[MAX_STEPS * BLOCK_ELEMENTS];
    int live[FLASH_UNITS];
    const int live_count = flash_live_segments(live, f, cuts, b, panel);
    for (int is_v = 0; is_v < 2; is_v++) {
        const float *at = sums + is_v * matrix + (int64_t)panel * steps * BLOCK_ELEMENTS;
        for (int i = 0; i < steps * BLOCK_ELEMENTS; i += LANES) {
            vec x = vec_load(at + live[0] * 2 * matrix + i);
            for (int s = 1; s < live_count; s++)
                x += vec_load(at + live[s] * 2 * matrix + i);
            vec_store(total + i, x);
        }
        write_gradient(c, is_v ? FP8_ATTENTION_DV : FP8_ATTENTION_DK,
                       gradient_index(c, b, panel * BLOCK, f->H + is_v * f->Hkv + head), total, is_v ? c->dv : c->dk,
                       flash_rows(f, panel));
    }
}
// Does backward of one segment of a KV head, as c->run says. Leaves dK and dV in `sums`, (2, panels, steps) blocks.
static void backward_segment(const struct fp8_flash *c, float *sums, const struct flash_cuts *cuts, int64_t kv_head,
                             int segment, int64_t place) {
    const struct flash *f = &c->f;
    const int b = (int)(kv_head / f->Hkv), first_head = (int)(kv_head % f->Hkv) * f->group;
    const int begin = flash_segment_begin(cuts, b, segment), end = flash_segment_begin(cuts, b, segment + 1);
    float *dk = sums, *dv = dk + (int64_t)f->panels * f->steps * BLOCK_ELEMENTS;
    for (int pair = begin, written = 0; pair < end; pair++, written = flash_reach(f, pair)) {
        const int tile = pair / f->group, h = first_head + pair % f->group;
        if (blocks_layout(f->unit) == LAYOUT_BF16)
            backward_tile(LAYOUT_BF16, c, dk, dv, written, b, h, tile, place);
        else
            backward_tile(LAYOUT_FP32, c, dk, dv, written, b, h, tile, place);
    }
}
// Does the run that c->run says, packing included, by all threads. sums: scratch (B, Hkv, segments, 2, panels, steps).
static void backward_run(const struct fp8_flash *c, float *sums) {
    const struct flash *f = &c->f;
    struct flash_cuts cuts;
    flash_cut(&cuts, f);
    const int segments = cuts.segments;
    const int64_t heads = (int64_t)f->shape.B * f->Hkv, matrix = (int64_t)f->panels * f->steps * BLOCK_ELEMENTS;
    const bool writes = c->run != RUN_DS_AMAX;
#pragma omp parallel
    {
        const bool whole = segments == 1 && flash_whole_heads(f);
        blocks_begin(f->unit);
        if (!whole)
            pack_all(c, true);
#pragma omp for schedule(dynamic, 1)
        for (int64_t unit = 0; unit < heads * segments; unit++) {
            const int64_t kv_head = unit / segments, place = whole ? omp_get_thread_num() : kv_head;
            float *unit_sums = sums + (whole ? place : unit) * 2 * matrix;
            for (int panel = 0; whole && panel < f->panels; panel++)
                pack_panel(c, kv_head, panel, place, true);
            backward_segment(c, unit_sums, &cuts, kv_head, (int)(unit % segments), place);
            for (int panel = 0; writes && segments == 1 && panel < f->panels; panel++) // while the sums are cached
                write_panel(c, unit_sums, &cuts, kv_head, panel);
        }
        blocks_end(f->unit);
        if (writes && segments > 1) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < heads * f->panels; i++)
                write_panel(c, sums + i / f->panels * segments * 2 * matrix, &cuts, i / f->panels,
                            (int)(i % f->panels));
        }
    }
}

size_t fp8_attention_backward_workspace_bytes(struct attention_shape shape, struct fp8_attention_demands demands,
                                              struct device *dev) {
    return device_is_gpu(dev) ? fp8_attention_planned_bytes(shape, demands, true)
                              : flash_backward_workspace_bytes(shape, dev);
}
void fp8_attention_backward(floatX *dqkv, const fp8 *dout8, const fp8 *qkv8, const fp8 *out8, const float *lse,
                            struct fp8_attention a, uint32_t *amax, void *workspace, struct device *dev) {
    struct fp8_scale *const *s = a.scales;
    struct fp8_flash c = fp8_flash_of(a, qkv8);
    const size_t packed = flash_packed_bytes(&c.f);
    c.f.k = (char *)workspace;
    c.f.kt = c.f.k + packed;
    c.f.v = c.f.kt + packed;
    float *sums = (float *)(c.f.v + packed);
    c.dout8 = dout8;
    c.out8 = out8;
    c.lse = lse;
    c.dqkv = dqkv;
    c.amax = amax;
    c.dp = s[FP8_ATTENTION_DOUT]->inverse * s[FP8_ATTENTION_V]->inverse;
    c.delta = s[FP8_ATTENTION_DOUT]->inverse * a.out->inverse;
    c.dv = s[FP8_ATTENTION_DOUT]->inverse / FP8_ATTENTION_P_SCALE;
    if (s[FP8_ATTENTION_DS]->delayed == 0) {
        c.run = RUN_DS_AMAX;
        backward_run(&c, sums);
    }
    fp8_set_scales(&s[FP8_ATTENTION_DS], 1, a.gradients, dev);
    c.dq = s[FP8_ATTENTION_DS]->inverse * s[FP8_ATTENTION_K]->inverse;
    c.dk = s[FP8_ATTENTION_DS]->inverse * s[FP8_ATTENTION_Q]->inverse;
    if (a.outputs_in_fp8) {
        bool known = true;
        for (int i = FP8_ATTENTION_DQ; i <= FP8_ATTENTION_DV; i++)
            known = known && s[i]->delayed != 0;
        if (!known) {
            c.run = RUN_OUTPUT_AMAXES;
            backward_run(&c, sums);
        }
        fp8_set_scales(&s[FP8_ATTENTION_DQ], 3, a.gradients, dev);
    }
    c.run = RUN_RESULT;
    backward_run(&c, sums);
}

void fp8_attention_unavailable_reason(char *reason, size_t size, struct attention_shape shape,
                                      struct fp8_attention_demands demands, struct device *dev) {
    if (device_is_gpu(dev))
        fp8_attention_refuses(reason, size, SIZE_MAX, dev->planned, shape, demands);
    else
        fp8_attention_refuses_shape(reason, size, shape);
}
const char *fp8_attention_describe(struct device *dev) { return device_is_gpu(dev) ? "cuDNN" : blocks_describe(); }
#endif
