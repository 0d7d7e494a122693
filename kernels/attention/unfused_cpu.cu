// Unfused attention on the CPU, by blocks of 32 x 32.
#if !defined(TARGET_CUDA)
#include "kernels/amax.cuh"              // amax_merge_rows
#include "kernels/attention/unfused.cuh" // unfused_forward, unfused_backward
#include "kernels/blocks.cuh"            // block_product, pack_left, pack_right
#include "kernels/gpu_sizes.cuh"         // gpu_unfused_backward_bytes
#include "kernels/vector_math.cuh"       // LOG2E, vector_tanhf
#include "kernels/vectors.cuh"           // vec, vec_exp2, vec_sum_in_order
#include <math.h>                        // INFINITY

// Strips are 32 queries, panels 32 keys. Slot i % UNFUSED_SLOTS of the workspace has the fp32 scores of job i's strip.
enum { UNFUSED_SLOTS = 32 };

struct unfused {
    struct attention_shape shape;
    struct dropout dropout;
    uint32_t *amax; // of what is written, or NULL
    enum block_unit unit;
    int H, Hkv, D, T, group;
    int panels, steps;              // blocks along T and along D
    int64_t qkv_stride, out_stride; // elements of a token's row
    char *k, *v;                    // packed, (B, Hkv, panels, steps) blocks each
    char *q, *dout;                 // packed, (B, H, panels, steps) blocks each; only in backward
    char *score_k;                  // K^T, packed as k; only in backward with a softcap
    float *rows;                    // (UNFUSED_SLOTS, panels) blocks
};

// Returns a call's arguments and sizes; packed operands and rows are still NULL.
static inline struct unfused unfused_of(struct attention_shape shape, struct dropout dropout, uint32_t *amax) {
    struct unfused u;
    memset(&u, 0, sizeof u);
    u.shape = shape;
    u.dropout = dropout;
    u.amax = amax;
    u.unit = blocks_unit();
    u.H = shape.num_heads;
    u.Hkv = shape.num_query_groups;
    u.D = shape.head_dim;
    u.T = shape.T;
    u.group = u.H / u.Hkv;
    u.panels = (u.T + BLOCK - 1) / BLOCK;
    u.steps = (u.D + BLOCK - 1) / BLOCK;
    u.qkv_stride = (int64_t)(u.H + 2 * u.Hkv) * u.D;
    u.out_stride = (int64_t)u.H * u.D;
    return u;
}
// Returns the bytes of one packed operand, which has `heads` heads in each of the B sequences.
static inline size_t unfused_packed_bytes(const struct unfused *u, int heads) {
    return (size_t)u->shape.B * heads * u->panels * u->steps * block_bytes(blocks_layout(u->unit));
}
static inline size_t unfused_slots_bytes(const struct unfused *u) {
    return (size_t)UNFUSED_SLOTS * u->panels * BLOCK_ELEMENTS * sizeof(float);
}
// The number of rows or columns of a strip or panel that lie before T.
static inline int unfused_count(const struct unfused *u, int block) {
    return u->T - block * BLOCK < BLOCK ? u->T - block * BLOCK : BLOCK;
}
// Returns the first packed block of a panel or strip. head, counted over all sequences, is a KV head in K and V.
static inline void *unfused_panel(const struct unfused *u, const char *packed, int64_t head, int panel) {
    return block_at(blocks_layout(u->unit), packed, (head * u->panels + panel) * u->steps);
}
// Returns the index in qkv at which a head of token (b, t) begins; head counts a token's query, key and value heads.
static inline int64_t unfused_at(const struct unfused *u, int64_t b, int t, int head) {
    return (b * u->T + t) * u->qkv_stride + (int64_t)head * u->D;
}
static inline int64_t unfused_out_at(const struct unfused *u, int64_t b, int t, int h) {
    return (b * u->T + t) * u->out_stride + (int64_t)h * u->D;
}

// Returns the first panel of keys that the queries of a strip see. b: the sequence in the batch.
static inline int unfused_first_panel(const struct unfused *u, int64_t b, int strip) {
    return unfused_first_key(u->shape, b, strip * BLOCK) / BLOCK;
}
// Returns the last strip of queries that see a key of the panel. b: the sequence in the batch.
static inline int unfused_last_strip(const struct unfused *u, int64_t b, int panel) {
    const int last_key = panel * BLOCK + unfused_count(u, panel) - 1;
    return u->shape.last_query ? u->shape.last_query[b * u->T + last_key] / BLOCK : u->panels - 1;
}

// Returns where the keys from key `first` on begin within a panel: 0 or more, and BLOCK or more if it has none of them.
static inline int unfused_begin(int first, int panel) { return first > panel * BLOCK ? first - panel * BLOCK : 0; }
// Returns where the keys up to key `last` end within a panel: BLOCK at most, and 0 or less if it has none of them.
static inline int unfused_end(int last, int panel) {
    return last - panel * BLOCK < BLOCK ? last - panel * BLOCK + 1 : BLOCK;
}

// block = the block (strip, panel) of a head's (T, T) in `matrix`, 0 past T, and with dropout where `dropped`.
static void unfused_block(floatX *block, const floatX *matrix, const struct unfused *u, int64_t head, int strip,
                          int panel, bool dropped) {
    const int columns = unfused_count(u, panel);
    float factors[BLOCK];
    memset(block, 0, BLOCK_ELEMENTS * sizeof *block);
    for (int q = 0; q < unfused_count(u, strip); q++) {
        const int64_t element = (head * u->T + strip * BLOCK + q) * u->T + panel * BLOCK;
        memcpy(block + q * BLOCK, matrix + element, (size_t)columns * sizeof *block);
        if (!dropped || u->dropout.p == 0)
            continue;
        dropout_scales(factors, u->dropout, (uint64_t)element, columns);
        for (int i = 0; i < columns; i++)
            block[q * BLOCK + i] = to_floatX(to_float(block[q * BLOCK + i]) * factors[i]);
    }
}
// Writes scale times a strip's or panel's (steps) blocks to rows (count, D) that lie `stride` apart. Merges u->amax.
static void unfused_write(floatX *rows, int64_t stride, const float *blocks, float scale, int count,
                          const struct unfused *u) {
    const int D = u->D;
    for (int r = 0; r < count; r++)
        for (int d = 0; d < D; d++)
            rows[r * stride + d] = to_floatX(scale * blocks[d / BLOCK * BLOCK_ELEMENTS + r * BLOCK + d % BLOCK]);
    amax_merge_rows(u->amax, rows, stride, count, D);
}
// sums (steps blocks) = unfused_block's block of `matrix` times panel `panel` of `right`; where `add`, += instead.
ALWAYS_INLINE void unfused_multiply(const enum block_layout layout, float *sums, const floatX *matrix,
                                    const char *right, int64_t right_head, const struct unfused *u, int64_t head,
                                    int strip, int panel, bool dropped, bool add) {
    ALIGN_BLOCK floatX block[BLOCK_ELEMENTS];
    ALIGN_BLOCK float left[BLOCK_ELEMENTS];
    unfused_block(block, matrix, u, head, strip, panel, dropped);
    pack_left(layout, left, NULL, block, BLOCK, BLOCK, BLOCK);
    for (int d = 0; d < u->steps; d++)
        block_product(u->unit, sums + d * BLOCK_ELEMENTS, left, 1,
                      block_at(layout, unfused_panel(u, right, right_head, panel), d), 1, 1, add);
}

// ---- Forward ----

// block = softcap tanh(scale block / softcap), of a block of Q K^T.
static void unfused_cap(float *block, float scale, float softcap) {
    const float inner = scale / softcap;
#pragma omp simd
    for (int i = 0; i < BLOCK_ELEMENTS; i++)
        block[i] = softcap * vector_tanhf(inner * block[i]);
}
// Sets the scores that their query does not see to -inf, in a strip's blocks from panel `begin` to the diagonal.
static void unfused_mask(float *rows, const struct unfused *u, int64_t b, int strip, int begin) {
    for (int r = 0; r < BLOCK; r++)
        for (int i = r + 1; i < BLOCK; i++)
            rows[strip * BLOCK_ELEMENTS + r * BLOCK + i] = -INFINITY;
    for (int r = 0; r < unfused_count(u, strip); r++)
        for (int j = begin * BLOCK; j < unfused_first_key(u->shape, b, strip * BLOCK + r); j++)
            rows[j / BLOCK * BLOCK_ELEMENTS + r * BLOCK + j % BLOCK] = -INFINITY;
}
// Turns scores into 2^(scale_log2 score) / the row's sum, in EXP2_VECS rows, the first at `rows`, of `panels` blocks.
static void unfused_softmax(float *rows, int panels, float scale_log2) {
    vec shift[EXP2_VECS], sums[EXP2_VECS], x[EXP2_VECS];
    for (int r = 0; r < EXP2_VECS; r++) {
        float max = -INFINITY;
        for (int p = 0; p < panels; p++)
            for (int i = 0; i < BLOCK; i++) {
                const float score = rows[p * BLOCK_ELEMENTS + r * BLOCK + i];
                max = score > max ? score : max;
            }
        shift[r] = vec_set(scale_log2 * max);
        sums[r] = vec_set(0);
    }
    for (int p = 0; p < panels; p++)
        for (int i = 0; i < BLOCK; i += LANES) {
            float *scores = rows + p * BLOCK_ELEMENTS + i;
            for (int r = 0; r < EXP2_VECS; r++)
                x[r] = vec_load(scores + r * BLOCK) * scale_log2 - shift[r];
            vec_exp2(x);
            for (int r = 0; r < EXP2_VECS; r++) {
                vec_store(scores + r * BLOCK, x[r]);
                sums[r] += x[r];
            }
        }
    for (int r = 0; r < EXP2_VECS; r++) {
        const float sum = vec_sum_in_order(sums[r]);
        for (int p = 0; p < panels; p++)
            for (int i = 0; i < BLOCK; i++)
                rows[p * BLOCK_ELEMENTS + r * BLOCK + i] /= sum;
    }
}

// Stores a row of a strip's blocks in out, a row of a (T, T) matrix, with zeroes before key `first` and after `query`.
static void unfused_store_row(floatX *out, const float *row, const struct unfused *u, int first, int query) {
    memset(out, 0, (size_t)first * sizeof *out);
    for (int p = first / BLOCK; p <= query / BLOCK; p++)
        for (int i = unfused_begin(first, p); i < unfused_end(query, p); i++)
            out[p * BLOCK + i] = to_floatX(row[p * BLOCK_ELEMENTS + i]);
    memset(out + query + 1, 0, (size_t)(u->T - query - 1) * sizeof *out);
}

// Computes and stores P and out of one strip of a head. rows (panels blocks): the slot's scores, overwritten.
ALWAYS_INLINE void unfused_forward_strip(const enum block_layout layout, floatX *out, floatX *probabilities,
                                         const floatX *qkv, float *rows, const struct unfused *u, int64_t head,
                                         int strip) {
    ALIGN_BLOCK float q[MAX_STEPS * BLOCK_ELEMENTS], sums[MAX_STEPS * BLOCK_ELEMENTS];
    const int64_t b = head / u->H;
    const int h = (int)(head % u->H), count = unfused_count(u, strip), first = strip * BLOCK;
    const int64_t kv_head = b * u->Hkv + h / u->group;
    const int begin = unfused_first_panel(u, b, strip);
    const bool capped = u->shape.softcap > 0;
    pack_left(layout, q, NULL, qkv + unfused_at(u, b, first, h), u->qkv_stride, count, u->D);
    for (int p = begin; p <= strip; p++) {
        block_product(u->unit, rows + p * BLOCK_ELEMENTS, q, 1, unfused_panel(u, u->k, kv_head, p), 1, u->steps, false);
        if (capped)
            unfused_cap(rows + p * BLOCK_ELEMENTS, u->shape.scale, u->shape.softcap);
    }
    unfused_mask(rows, u, b, strip, begin);
    for (int r = 0; r < count; r++) {
        if (r % EXP2_VECS == 0)
            unfused_softmax(rows + begin * BLOCK_ELEMENTS + r * BLOCK, strip + 1 - begin,
                            capped ? LOG2E : u->shape.scale * LOG2E);
        unfused_store_row(probabilities + (head * u->T + first + r) * u->T, rows + r * BLOCK, u,
                          unfused_first_key(u->shape, b, first + r), first + r);
    }
    for (int p = begin; p <= strip; p++)
        unfused_multiply(layout, sums, probabilities, u->v, kv_head, u, head, strip, p, true, p > begin);
    unfused_write(out + unfused_out_at(u, b, first, h), u->out_stride, sums, 1.0f, count, u);
}

// Returns the bytes of packed K^T and V, and of 32 rows of fp32 scores for each job slot; with a planned GPU 0.
size_t unfused_forward_workspace_bytes(struct attention_shape shape, const struct device *dev) {
    if (device_is_gpu(dev))
        return 0;
    const struct dropout none = {0, 0, 0, 0, 0, NULL};
    const struct unfused u = unfused_of(shape, none, NULL);
    return 2 * unfused_packed_bytes(&u, u.Hkv) + unfused_slots_bytes(&u);
}

// Packs `heads` heads of all tokens as right operands, in x, and transposed, in `transposed`. Either may be NULL.
static void unfused_pack(const struct unfused *u, char *x, char *transposed, const floatX *rows, int64_t stride,
                         int heads) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < (int64_t)u->shape.B * heads * u->panels; i++) {
        const int64_t head = i / u->panels;
        const int panel = (int)(i % u->panels), count = unfused_count(u, panel);
        const floatX *from = rows + (head / heads * u->T + panel * BLOCK) * stride + head % heads * u->D;
        void *to = x ? unfused_panel(u, x, head, panel) : NULL;
        void *to_transposed = transposed ? unfused_panel(u, transposed, head, panel) : NULL;
        if (blocks_layout(u->unit) == LAYOUT_BF16)
            pack_right(LAYOUT_BF16, to, to_transposed, from, stride, count, u->D);
        else
            pack_right(LAYOUT_FP32, to, to_transposed, from, stride, count, u->D);
    }
}

void unfused_forward(floatX *out, floatX *probabilities, const floatX *qkv, struct attention_shape shape,
                     struct dropout dropout, uint32_t *amax, void *workspace, struct device *dev) {
    struct unfused u = unfused_of(shape, dropout, amax);
    u.k = (char *)workspace;
    u.v = u.k + unfused_packed_bytes(&u, u.Hkv);
    u.rows = (float *)(u.v + unfused_packed_bytes(&u, u.Hkv));
    unfused_pack(&u, NULL, u.k, qkv + (int64_t)u.H * u.D, u.qkv_stride, u.Hkv);
    unfused_pack(&u, u.v, NULL, qkv + (int64_t)(u.H + u.Hkv) * u.D, u.qkv_stride, u.Hkv);
    const int64_t jobs = (int64_t)shape.B * u.H * u.panels;
#pragma omp parallel
    {
        blocks_begin(u.unit);
#pragma omp for schedule(dynamic, 1)
        for (int slot = 0; slot < UNFUSED_SLOTS; slot++)
            for (int64_t i = slot; i < jobs; i += UNFUSED_SLOTS) {
                float *rows = u.rows + (int64_t)slot * u.panels * BLOCK_ELEMENTS;
                if (blocks_layout(u.unit) == LAYOUT_BF16)
                    unfused_forward_strip(LAYOUT_BF16, out, probabilities, qkv, rows, &u, i / u.panels,
                                          (int)(i % u.panels));
                else
                    unfused_forward_strip(LAYOUT_FP32, out, probabilities, qkv, rows, &u, i / u.panels,
                                          (int)(i % u.panels));
            }
        blocks_end(u.unit);
    }
}

// ---- Backward ----

// Turns a query's dP from first_key to `query`, a row of blocks, into dS = P * (dropout(dP) - rowsum(P * dropout(dP))).
static void unfused_backward_row(float *row, const floatX *probabilities, const struct unfused *u, int64_t head,
                                 int first_key, int query) {
    const floatX *p_row = probabilities + (head * u->T + query) * u->T;
    float factors[BLOCK], dot = 0;
    for (int p = first_key / BLOCK; p <= query / BLOCK; p++) {
        float *dp = row + p * BLOCK_ELEMENTS;
        const int begin = unfused_begin(first_key, p), end = unfused_end(query, p);
        if (u->dropout.p > 0) {
            dropout_scales(factors, u->dropout, (uint64_t)((head * u->T + query) * u->T + p * BLOCK), end);
            for (int i = begin; i < end; i++)
                dp[i] *= factors[i];
        }
#pragma omp simd reduction(+ : dot)
        for (int i = begin; i < end; i++)
            dot += to_float(p_row[p * BLOCK + i]) * dp[i];
    }
    for (int p = first_key / BLOCK; p <= query / BLOCK; p++) {
        float *dp = row + p * BLOCK_ELEMENTS;
        for (int i = unfused_begin(first_key, p); i < unfused_end(query, p); i++)
            dp[i] = to_float(p_row[p * BLOCK + i]) * (dp[i] - dot);
    }
}
// Takes dS back through the cap: ds *= 1 - tanh(scale x / softcap)^2. x: the block of Q K^T.
static void unfused_cap_backward(float *ds, const float *x, float scale, float softcap) {
    const float inner = scale / softcap;
#pragma omp simd
    for (int i = 0; i < BLOCK_ELEMENTS; i++) {
        const float capped = vector_tanhf(inner * x[i]);
        ds[i] *= 1.0f - capped * capped;
    }
}
// Computes and stores dS, and dQ = scale dS K, of one strip of a head. rows (panels blocks): scratch for dP.
ALWAYS_INLINE void unfused_backward_strip(const enum block_layout layout, floatX *dqkv, floatX *ds, const floatX *dout,
                                          const floatX *qkv, const floatX *probabilities, float *rows,
                                          const struct unfused *u, int64_t head, int strip) {
    ALIGN_BLOCK float left[MAX_STEPS * BLOCK_ELEMENTS], sums[MAX_STEPS * BLOCK_ELEMENTS], scores[BLOCK_ELEMENTS];
    const int64_t b = head / u->H;
    const int h = (int)(head % u->H), count = unfused_count(u, strip), first = strip * BLOCK;
    const int64_t kv_head = b * u->Hkv + h / u->group;
    const int begin = unfused_first_panel(u, b, strip);
    const bool capped = u->shape.softcap > 0;
    pack_left(layout, left, NULL, dout + unfused_out_at(u, b, first, h), u->out_stride, count, u->D);
    for (int p = begin; p <= strip; p++)
        block_product(u->unit, rows + p * BLOCK_ELEMENTS, left, 1, unfused_panel(u, u->v, kv_head, p), 1, u->steps,
                      false);
    for (int r = 0; r < count; r++) {
        const int first_key = unfused_first_key(u->shape, b, first + r);
        unfused_backward_row(rows + r * BLOCK, probabilities, u, head, first_key, first + r);
        if (!capped)
            unfused_store_row(ds + (head * u->T + first + r) * u->T, rows + r * BLOCK, u, first_key, first + r);
    }
    if (capped) {
        pack_left(layout, left, NULL, qkv + unfused_at(u, b, first, h), u->qkv_stride, count, u->D);
        for (int p = begin; p <= strip; p++) {
            block_product(u->unit, scores, left, 1, unfused_panel(u, u->score_k, kv_head, p), 1, u->steps, false);
            unfused_cap_backward(rows + p * BLOCK_ELEMENTS, scores, u->shape.scale, u->shape.softcap);
        }
        for (int r = 0; r < count; r++)
            unfused_store_row(ds + (head * u->T + first + r) * u->T, rows + r * BLOCK, u,
                              unfused_first_key(u->shape, b, first + r), first + r);
    }
    for (int p = begin; p <= strip; p++)
        unfused_multiply(layout, sums, ds, u->k, kv_head, u, head, strip, p, false, p > begin);
    unfused_write(dqkv + unfused_at(u, b, first, h), u->qkv_stride, sums, u->shape.scale, count, u);
}

// Computes a panel's dV = dropout(P)^T dO and dK = scale dS^T Q, of stored dS, over all strips and heads that see it.
ALWAYS_INLINE void unfused_backward_panel(const enum block_layout layout, floatX *dqkv, const floatX *ds,
                                          const floatX *probabilities, const struct unfused *u, int64_t kv_head,
                                          int panel) {
    ALIGN_BLOCK float dk[MAX_STEPS * BLOCK_ELEMENTS], dv[MAX_STEPS * BLOCK_ELEMENTS], left[BLOCK_ELEMENTS];
    ALIGN_BLOCK floatX block[BLOCK_ELEMENTS];
    const int64_t b = kv_head / u->Hkv;
    const int kv = (int)(kv_head % u->Hkv), count = unfused_count(u, panel), last = unfused_last_strip(u, b, panel);
    bool add = false;
    for (int h = kv * u->group; h < (kv + 1) * u->group; h++)
        for (int strip = panel; strip <= last; strip++, add = true) {
            const int64_t head = b * u->H + h;
            unfused_block(block, probabilities, u, head, strip, panel, true);
            pack_left(layout, NULL, left, block, BLOCK, BLOCK, BLOCK);
            for (int d = 0; d < u->steps; d++)
                block_product(u->unit, dv + d * BLOCK_ELEMENTS, left, 1,
                              block_at(layout, unfused_panel(u, u->dout, head, strip), d), 1, 1, add);
            unfused_block(block, ds, u, head, strip, panel, false);
            pack_left(layout, NULL, left, block, BLOCK, BLOCK, BLOCK);
            for (int d = 0; d < u->steps; d++)
                block_product(u->unit, dk + d * BLOCK_ELEMENTS, left, 1,
                              block_at(layout, unfused_panel(u, u->q, head, strip), d), 1, 1, add);
        }
    unfused_write(dqkv + unfused_at(u, b, panel * BLOCK, u->H + kv), u->qkv_stride, dk, u->shape.scale, count, u);
    unfused_write(dqkv + unfused_at(u, b, panel * BLOCK, u->H + u->Hkv + kv), u->qkv_stride, dv, 1.0f, count, u);
}

// Returns the bytes of dS (B, H, T, T), rounded up, so that what follows stays aligned.
static size_t unfused_matrix_bytes(struct attention_shape shape) {
    const size_t bytes = (size_t)shape.B * shape.num_heads * shape.T * shape.T * sizeof(floatX);
    return (bytes + 63) / 64 * 64;
}
// Returns the bytes of dS (B, H, T, T) and, unless a GPU is planned, packed K, V^T, Q, dO, K^T if capped, and rows.
size_t unfused_backward_workspace_bytes(struct attention_shape shape, const struct device *dev) {
    if (device_is_gpu(dev))
        return gpu_unfused_backward_bytes(shape);
    const struct dropout none = {0, 0, 0, 0, 0, NULL};
    const struct unfused u = unfused_of(shape, none, NULL);
    return unfused_matrix_bytes(shape) + (shape.softcap > 0 ? 3 : 2) * unfused_packed_bytes(&u, u.Hkv) +
           2 * unfused_packed_bytes(&u, u.H) + unfused_slots_bytes(&u);
}

void unfused_backward(floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out,
                      const floatX *probabilities, struct attention_shape shape, struct dropout dropout, uint32_t *amax,
                      void *workspace, struct device *dev) {
    struct unfused u = unfused_of(shape, dropout, amax);
    floatX *ds = (floatX *)workspace;
    u.k = (char *)workspace + unfused_matrix_bytes(shape);
    u.v = u.k + unfused_packed_bytes(&u, u.Hkv);
    u.q = u.v + unfused_packed_bytes(&u, u.Hkv);
    u.dout = u.q + unfused_packed_bytes(&u, u.H);
    u.rows = (float *)(u.dout + unfused_packed_bytes(&u, u.H));
    if (shape.softcap > 0)
        u.score_k = (char *)u.rows + unfused_slots_bytes(&u);
    unfused_pack(&u, u.k, u.score_k, qkv + (int64_t)u.H * u.D, u.qkv_stride, u.Hkv);
    unfused_pack(&u, NULL, u.v, qkv + (int64_t)(u.H + u.Hkv) * u.D, u.qkv_stride, u.Hkv);
    unfused_pack(&u, u.q, NULL, qkv, u.qkv_stride, u.H);
    unfused_pack(&u, u.dout, NULL, dout, u.out_stride, u.H);
    const int64_t jobs = (int64_t)shape.B * u.H * u.panels, panel_jobs = (int64_t)shape.B * u.Hkv * u.panels;
#pragma omp parallel
    {
        blocks_begin(u.unit);
#pragma omp for schedule(dynamic, 1)
        for (int slot = 0; slot < UNFUSED_SLOTS; slot++)
            for (int64_t i = slot; i < jobs; i += UNFUSED_SLOTS) {
                float *rows = u.rows + (int64_t)slot * u.panels * BLOCK_ELEMENTS;
                if (blocks_layout(u.unit) == LAYOUT_BF16)
                    unfused_backward_strip(LAYOUT_BF16, dqkv, ds, dout, qkv, probabilities, rows, &u, i / u.panels,
                                           (int)(i % u.panels));
                else
                    unfused_backward_strip(LAYOUT_FP32, dqkv, ds, dout, qkv, probabilities, rows, &u, i / u.panels,
                                           (int)(i % u.panels));
            }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < panel_jobs; i++)
            if (blocks_layout(u.unit) == LAYOUT_BF16)
                unfused_backward_panel(LAYOUT_BF16, dqkv, ds, probabilities, &u, i / u.panels, (int)(i % u.panels));
            else
                unfused_backward_panel(LAYOUT_FP32, dqkv, ds, probabilities, &u, i / u.panels, (int)(i % u.panels));
        blocks_end(u.unit);
    }
}

const char *unfused_compute_name(const struct device *dev) {
    return device_is_gpu(dev) ? FLOATX_NAME : blocks_describe();
}

#endif
