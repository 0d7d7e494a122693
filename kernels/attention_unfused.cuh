// Unfused attention on the CPU: the baseline that flash attention is measured and tested against.
//
//   S = scale Q K^T     P = softmax(S + causal mask)     O = dropout(P) V
//
// P is stored whole, (B, H, T, T), with zeros above the diagonal; backward stores dS alike. Each of those matrices is made
// and read in passes of its own, by the products of kernels/blocks.cuh. Strips are 32 queries, panels 32 keys.
#pragma once
#include "kernels/attention_shape.cuh" // struct attention_shape
#include "kernels/blocks.cuh"          // block_product, pack_left, pack_right, vec
#include "kernels/random.cuh"          // struct dropout, dropout_scales
#include <math.h>                      // INFINITY

// The jobs are dealt out to this many lanes, each with room for the fp32 scores of one strip in the workspace.
enum { UNFUSED_LANES = 32 };

struct unfused {
    struct attention_shape shape;
    struct dropout dropout;
    bool amx;
    int H, Hkv, D, T, group;
    int panels, steps;                // blocks along T and along D
    int64_t qkv_stride, out_stride;   // elements of a token's row
    char *k, *v;                      // packed, (B, Hkv, panels, steps) blocks each
    char *q, *dout;                   // packed, (B, H, panels, steps) blocks each; backward alone
    float *rows;                      // (UNFUSED_LANES, panels) blocks
};

static inline struct unfused unfused_of(struct attention_shape shape, struct dropout dropout) {
    struct unfused u;
    memset(&u, 0, sizeof u);
    u.shape = shape;
    u.dropout = dropout;
    u.amx = blocks_use_amx();
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
static inline size_t unfused_packed_bytes(const struct unfused *u, int heads) {
    return (size_t)u->shape.B * heads * u->panels * u->steps * block_bytes(u->amx);
}
static inline size_t unfused_rows_bytes(const struct unfused *u) {
    return (size_t)UNFUSED_LANES * u->panels * BLOCK_ELEMENTS * sizeof(float);
}
static inline int unfused_count(const struct unfused *u, int block) { // rows or columns of a block that lie before T
    return u->T - block * BLOCK < BLOCK ? u->T - block * BLOCK : BLOCK;
}
static inline void *unfused_panel(const struct unfused *u, const char *packed, int64_t head, int panel) {
    return block_at(u->amx, packed, (head * u->panels + panel) * u->steps);
}
// Element (b, t, head) of qkv, head counted over the query, key and value heads of a token.
static inline int64_t unfused_at(const struct unfused *u, int64_t b, int t, int head) {
    return (b * u->T + t) * u->qkv_stride + (int64_t)head * u->D;
}
static inline int64_t unfused_out_at(const struct unfused *u, int64_t b, int t, int h) {
    return (b * u->T + t) * u->out_stride + (int64_t)h * u->D;
}


// Block (strip, panel) of a stored (B, H, T, T) matrix, zero beyond T; with dropout's factors where asked for.
static void unfused_block(floatX *block, const floatX *matrix, const struct unfused *u, int64_t head, int strip, int panel,
                          bool dropped) {
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
static void unfused_write(floatX *rows, int64_t stride, const float *blocks, float scale, int count, int D) {
    for (int r = 0; r < count; r++)
        for (int d = 0; d < D; d++)
            rows[r * stride + d] = to_floatX(scale * blocks[d / BLOCK * BLOCK_ELEMENTS + r * BLOCK + d % BLOCK]);
}
// sums (steps blocks) = or += the strip's stored block times panel `panel` of `right`
ALWAYS_INLINE void unfused_multiply(const bool amx, float *sums, const floatX *matrix, const char *right, int64_t right_head,
                                    const struct unfused *u, int64_t head, int strip, int panel, bool dropped) {
    ALIGN_BLOCK floatX block[BLOCK_ELEMENTS];
    ALIGN_BLOCK float left[BLOCK_ELEMENTS];
    unfused_block(block, matrix, u, head, strip, panel, dropped);
    pack_left(amx, left, NULL, block, BLOCK, BLOCK, BLOCK);
    for (int d = 0; d < u->steps; d++)
        block_product(amx, sums + d * BLOCK_ELEMENTS, left, 1, block_at(amx, unfused_panel(u, right, right_head, panel), d), 1,
                      1, panel > 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

// EXP2_VECS rows of a strip's blocks of scores to probabilities, in place. Entries after the query are -inf and become 0.
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
        float sum = 0;
        for (int i = 0; i < LANES; i++)
            sum += sums[r][i];
        for (int p = 0; p < panels; p++)
            for (int i = 0; i < BLOCK; i++)
                rows[p * BLOCK_ELEMENTS + r * BLOCK + i] /= sum;
    }
}

// One row of a strip's blocks to a row of a stored (T, T) matrix.
static void unfused_store_row(floatX *out, const float *row, const struct unfused *u, int query) {
    for (int j = 0; j <= query; j++)
        out[j] = to_floatX(row[j / BLOCK * BLOCK_ELEMENTS + j % BLOCK]);
    memset(out + query + 1, 0, (size_t)(u->T - query - 1) * sizeof *out);
}

ALWAYS_INLINE void unfused_forward_strip(const bool amx, floatX *out, floatX *probabilities, const floatX *qkv, float *rows,
                                         const struct unfused *u, int64_t head, int strip) {
    ALIGN_BLOCK float q[MAX_STEPS * BLOCK_ELEMENTS], sums[MAX_STEPS * BLOCK_ELEMENTS];
    const int64_t b = head / u->H;
    const int h = (int)(head % u->H), count = unfused_count(u, strip), first = strip * BLOCK;
    const int64_t kv_head = b * u->Hkv + h / u->group;
    pack_left(amx, q, NULL, qkv + unfused_at(u, b, first, h), u->qkv_stride, count, u->D);
    for (int p = 0; p <= strip; p++)
        block_product(amx, rows + p * BLOCK_ELEMENTS, q, 1, unfused_panel(u, u->k, kv_head, p), 1, u->steps, false);
    for (int r = 0; r < BLOCK; r++)
        for (int i = r + 1; i < BLOCK; i++)
            rows[strip * BLOCK_ELEMENTS + r * BLOCK + i] = -INFINITY;
    for (int r = 0; r < count; r++) {
        if (r % EXP2_VECS == 0)
            unfused_softmax(rows + r * BLOCK, strip + 1, u->shape.scale * 1.4426950409f);
        unfused_store_row(probabilities + (head * u->T + first + r) * u->T, rows + r * BLOCK, u, first + r);
    }
    for (int p = 0; p <= strip; p++)
        unfused_multiply(amx, sums, probabilities, u->v, kv_head, u, head, strip, p, true);
    unfused_write(out + unfused_out_at(u, b, first, h), u->out_stride, sums, 1.0f, count, u->D);
}

// Packed K^T and V, and 32 rows of fp32 scores for each lane.
static size_t unfused_forward_workspace_bytes(struct attention_shape shape) {
    const struct dropout none = {0, 0, 0, 0, 0};
    const struct unfused u = unfused_of(shape, none);
    return 2 * unfused_packed_bytes(&u, u.Hkv) + unfused_rows_bytes(&u);
}

// Packs `heads` heads of rows as right operands: x as it is, transposed as its transpose; either may be NULL.
static void unfused_pack(const struct unfused *u, char *x, char *transposed, const floatX *rows, int64_t stride, int heads) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < (int64_t)u->shape.B * heads * u->panels; i++) {
        const int64_t head = i / u->panels;
        const int panel = (int)(i % u->panels), count = unfused_count(u, panel);
        const floatX *from = rows + (head / heads * u->T + panel * BLOCK) * stride + head % heads * u->D;
        void *to = x ? unfused_panel(u, x, head, panel) : NULL;
        void *to_transposed = transposed ? unfused_panel(u, transposed, head, panel) : NULL;
        if (u->amx)
            pack_right(true, to, to_transposed, from, stride, count, u->D);
        else
            pack_right(false, to, to_transposed, from, stride, count, u->D);
    }
}

static void unfused_forward(floatX *out /*(B, T, H*D)*/, floatX *probabilities /*(B, H, T, T)*/,
                            const floatX *qkv /*(B, T, (H + 2*Hkv)*D)*/, struct attention_shape shape,
                            struct dropout dropout, void *workspace, struct device *dev) {
    struct unfused u = unfused_of(shape, dropout);
    u.k = (char *)workspace;
    u.v = u.k + unfused_packed_bytes(&u, u.Hkv);
    u.rows = (float *)(u.v + unfused_packed_bytes(&u, u.Hkv));
    unfused_pack(&u, NULL, u.k, qkv + (int64_t)u.H * u.D, u.qkv_stride, u.Hkv);
    unfused_pack(&u, u.v, NULL, qkv + (int64_t)(u.H + u.Hkv) * u.D, u.qkv_stride, u.Hkv);
    const int64_t jobs = (int64_t)shape.B * u.H * u.panels;
#pragma omp parallel
    {
        if (u.amx)
            amx_begin();
#pragma omp for schedule(dynamic, 1)
        for (int lane = 0; lane < UNFUSED_LANES; lane++)
            for (int64_t i = lane; i < jobs; i += UNFUSED_LANES) {
                float *rows = u.rows + (int64_t)lane * u.panels * BLOCK_ELEMENTS;
                if (u.amx)
                    unfused_forward_strip(true, out, probabilities, qkv, rows, &u, i / u.panels, (int)(i % u.panels));
                else
                    unfused_forward_strip(false, out, probabilities, qkv, rows, &u, i / u.panels, (int)(i % u.panels));
            }
        if (u.amx)
            amx_end();
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

// A strip's dP = dropout(dO V^T), dS = P * (dP - rowsum(P * dP)), stored, and dQ = scale dS K.
ALWAYS_INLINE void unfused_backward_strip(const bool amx, floatX *dqkv, floatX *ds, const floatX *dout,
                                          const floatX *probabilities, float *rows, const struct unfused *u, int64_t head,
                                          int strip) {
    ALIGN_BLOCK float left[MAX_STEPS * BLOCK_ELEMENTS], sums[MAX_STEPS * BLOCK_ELEMENTS];
    const int64_t b = head / u->H;
    const int h = (int)(head % u->H), count = unfused_count(u, strip), first = strip * BLOCK;
    const int64_t kv_head = b * u->Hkv + h / u->group;
    float factors[BLOCK];
    pack_left(amx, left, NULL, dout + unfused_out_at(u, b, first, h), u->out_stride, count, u->D);
    for (int p = 0; p <= strip; p++)
        block_product(amx, rows + p * BLOCK_ELEMENTS, left, 1, unfused_panel(u, u->v, kv_head, p), 1, u->steps, false);
    for (int r = 0; r < count; r++) {
        const int query = first + r;
        const floatX *p_row = probabilities + (head * u->T + query) * u->T;
        float *row = rows + r * BLOCK, dot = 0;
        for (int p = 0; p <= strip; p++) {
            float *dp = row + p * BLOCK_ELEMENTS;
            const int n = query + 1 - p * BLOCK < BLOCK ? query + 1 - p * BLOCK : BLOCK;
            if (u->dropout.p > 0) {
                dropout_scales(factors, u->dropout, (uint64_t)((head * u->T + query) * u->T + p * BLOCK), n);
                for (int i = 0; i < n; i++)
                    dp[i] *= factors[i];
            }
#pragma omp simd reduction(+ : dot)
            for (int i = 0; i < n; i++)
                dot += to_float(p_row[p * BLOCK + i]) * dp[i];
        }
        for (int j = 0; j <= query; j++) {
            float *dp = row + j / BLOCK * BLOCK_ELEMENTS + j % BLOCK;
            *dp = to_float(p_row[j]) * (*dp - dot);
        }
        unfused_store_row(ds + (head * u->T + query) * u->T, row, u, query);
    }
    for (int p = 0; p <= strip; p++)
        unfused_multiply(amx, sums, ds, u->k, kv_head, u, head, strip, p, false);
    unfused_write(dqkv + unfused_at(u, b, first, h), u->qkv_stride, sums, u->shape.scale, count, u->D);
}

// dV = dropout(P)^T dO and dK = scale dS^T Q of one panel, over all strips that see it of all heads of the group.
ALWAYS_INLINE void unfused_backward_panel(const bool amx, floatX *dqkv, const floatX *ds, const floatX *probabilities,
                                          const struct unfused *u, int64_t kv_head, int panel) {
    ALIGN_BLOCK float dk[MAX_STEPS * BLOCK_ELEMENTS], dv[MAX_STEPS * BLOCK_ELEMENTS], left[BLOCK_ELEMENTS];
    ALIGN_BLOCK floatX block[BLOCK_ELEMENTS];
    const int64_t b = kv_head / u->Hkv;
    const int kv = (int)(kv_head % u->Hkv), count = unfused_count(u, panel);
    bool add = false;
    for (int h = kv * u->group; h < (kv + 1) * u->group; h++)
        for (int strip = panel; strip < u->panels; strip++, add = true) {
            const int64_t head = b * u->H + h;
            unfused_block(block, probabilities, u, head, strip, panel, true);
            pack_left(amx, NULL, left, block, BLOCK, BLOCK, BLOCK);
            for (int d = 0; d < u->steps; d++)
                block_product(amx, dv + d * BLOCK_ELEMENTS, left, 1,
                              block_at(amx, unfused_panel(u, u->dout, head, strip), d), 1, 1, add);
            unfused_block(block, ds, u, head, strip, panel, false);
            pack_left(amx, NULL, left, block, BLOCK, BLOCK, BLOCK);
            for (int d = 0; d < u->steps; d++)
                block_product(amx, dk + d * BLOCK_ELEMENTS, left, 1, block_at(amx, unfused_panel(u, u->q, head, strip), d), 1,
                              1, add);
        }
    unfused_write(dqkv + unfused_at(u, b, panel * BLOCK, u->H + kv), u->qkv_stride, dk, u->shape.scale, count, u->D);
    unfused_write(dqkv + unfused_at(u, b, panel * BLOCK, u->H + u->Hkv + kv), u->qkv_stride, dv, 1.0f, count, u->D);
}

static size_t unfused_matrix_bytes(struct attention_shape shape) { // rounded up, so that what follows stays aligned
    const size_t bytes = (size_t)shape.B * shape.num_heads * shape.T * shape.T * sizeof(floatX);
    return (bytes + 63) / 64 * 64;
}
// dS (B, H, T, T); packed K, V^T, Q and dO; 32 rows of fp32 for each lane.
static size_t unfused_backward_workspace_bytes(struct attention_shape shape) {
    const struct dropout none = {0, 0, 0, 0, 0};
    const struct unfused u = unfused_of(shape, none);
    return unfused_matrix_bytes(shape) + 2 * unfused_packed_bytes(&u, u.Hkv) + 2 * unfused_packed_bytes(&u, u.H) +
           unfused_rows_bytes(&u);
}

// The gradient of unfused_forward; dqkv is written in full.
static void unfused_backward(floatX *dqkv /*(B, T, (H + 2*Hkv)*D)*/, const floatX *dout /*(B, T, H*D)*/,
                             const floatX *qkv /*(B, T, (H + 2*Hkv)*D)*/, const floatX *out /*(B, T, H*D)*/,
                             const floatX *probabilities /*(B, H, T, T)*/, struct attention_shape shape,
                             struct dropout dropout, void *workspace, struct device *dev) {
    struct unfused u = unfused_of(shape, dropout);
    floatX *ds = (floatX *)workspace;
    u.k = (char *)workspace + unfused_matrix_bytes(shape);
    u.v = u.k + unfused_packed_bytes(&u, u.Hkv);
    u.q = u.v + unfused_packed_bytes(&u, u.Hkv);
    u.dout = u.q + unfused_packed_bytes(&u, u.H);
    u.rows = (float *)(u.dout + unfused_packed_bytes(&u, u.H));
    unfused_pack(&u, u.k, NULL, qkv + (int64_t)u.H * u.D, u.qkv_stride, u.Hkv);
    unfused_pack(&u, NULL, u.v, qkv + (int64_t)(u.H + u.Hkv) * u.D, u.qkv_stride, u.Hkv);
    unfused_pack(&u, u.q, NULL, qkv, u.qkv_stride, u.H);
    unfused_pack(&u, u.dout, NULL, dout, u.out_stride, u.H);
    const int64_t jobs = (int64_t)shape.B * u.H * u.panels, panel_jobs = (int64_t)shape.B * u.Hkv * u.panels;
#pragma omp parallel
    {
        if (u.amx)
            amx_begin();
#pragma omp for schedule(dynamic, 1)
        for (int lane = 0; lane < UNFUSED_LANES; lane++)
            for (int64_t i = lane; i < jobs; i += UNFUSED_LANES) {
                float *rows = u.rows + (int64_t)lane * u.panels * BLOCK_ELEMENTS;
                if (u.amx)
                    unfused_backward_strip(true, dqkv, ds, dout, probabilities, rows, &u, i / u.panels, (int)(i % u.panels));
                else
                    unfused_backward_strip(false, dqkv, ds, dout, probabilities, rows, &u, i / u.panels, (int)(i % u.panels));
            }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < panel_jobs; i++)
            if (u.amx)
                unfused_backward_panel(true, dqkv, ds, probabilities, &u, i / u.panels, (int)(i % u.panels));
            else
                unfused_backward_panel(false, dqkv, ds, probabilities, &u, i / u.panels, (int)(i % u.panels));
        if (u.amx)
            amx_end();
    }
}
