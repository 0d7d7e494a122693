// Unfused attention: the baseline that flash attention is measured and tested against.
//
//   S = scale Q K^T     P = softmax(S + causal mask)     O = dropout(P) V
//
// P is stored whole, (B, H, T, T), with zeros above the diagonal; backward stores dS alike. Each of these matrices is
// made and read in passes of its own.
#pragma once
#include "kernels/attention_shape.cuh" // struct attention_shape
#include "kernels/random.cuh"          // struct dropout, dropout_scales
#include "kernels/vector_math.cuh"     // LOG2E
#include <math.h>                      // INFINITY
#ifdef TARGET_CUDA
#include "kernels/ptx.cuh"    // shared memory, exp2_approx
#include "kernels/reduce.cuh" // lanes_sum, lanes_max
#include <float.h>            // FLT_MAX
#else
#include "kernels/blocks.cuh"  // block_product, pack_left, pack_right
#include "kernels/vectors.cuh" // vec, vec_exp2, vec_sum_in_order
#endif

// out = dropout(P) V. P is kept for backward, without the dropout; both are written in full.
static size_t unfused_forward_workspace_bytes(struct attention_shape shape);
static void unfused_forward(floatX *out,           // (B, T, H * D)
                            floatX *probabilities, // (B, H, T, T)
                            const floatX *qkv,     // (B, T, (H + 2 Hkv) * D)
                            struct attention_shape shape, struct dropout dropout, void *workspace, struct device *dev);

// The gradient of unfused_forward; dqkv is written in full.
static size_t unfused_backward_workspace_bytes(struct attention_shape shape);
static void unfused_backward(floatX *dqkv,                // (B, T, (H + 2 Hkv) * D)
                             const floatX *dout,          // (B, T, H * D)
                             const floatX *qkv,           // (B, T, (H + 2 Hkv) * D)
                             const floatX *out,           // (B, T, H * D)
                             const floatX *probabilities, // (B, H, T, T)
                             struct attention_shape shape, struct dropout dropout, void *workspace, struct device *dev);

#ifdef TARGET_CUDA

// Every product here is one of tiles of 64 x 64, fp32, by a block of 256 threads: thread (y, x) of 16 x 16 has rows 4y
// to 4y + 3 and columns 4x to 4x + 3, so that a row belongs to 16 neighbouring lanes. Both operands come through shared
// memory, 16 of the inner dimension at a time, as rows of 64 floats (and 4 more, against bank conflicts).
enum { TILE = 64, TILE_DEPTH = 16, TILE_THREADS = 256, TILE_ROW_BYTES = (TILE + 4) * 4 };
enum { TILE_BYTES = TILE_DEPTH * TILE_ROW_BYTES, UNFUSED_SHARED_BYTES = 2 * TILE_BYTES };

// A matrix in memory: element (i, j) at x[i * row + j * column], zero outside. With dropout the matrix is multiplied by
// the mask, of which x[0] is element `element`.
struct unfused_matrix {
    const floatX *x;
    int64_t row, column;
    int rows, columns;
    struct dropout dropout;
    uint64_t element;
};
DEVICE_FUNCTION struct unfused_matrix transposed(struct unfused_matrix m) {
    const struct unfused_matrix result = {m.x, m.column, m.row, m.columns, m.rows, m.dropout, m.element};
    return result;
}

DEVICE_FUNCTION int tile_y(void) { return threadIdx.x / 16 * 4; } // the thread's first row in the tile
DEVICE_FUNCTION int tile_x(void) { return threadIdx.x % 16 * 4; }

// Loads 64 rows of 16 columns, the columns as rows of shared memory. Neighbouring threads read neighbours in memory.
DEVICE_FUNCTION void tile_load(uint32_t to, const struct unfused_matrix &m, int first_row, int first_column) {
    const bool along_rows = m.row == 1;
#pragma unroll
    for (int i = threadIdx.x; i < TILE * TILE_DEPTH; i += TILE_THREADS) {
        const int r = along_rows ? i % TILE : i / TILE_DEPTH, c = along_rows ? i / TILE : i % TILE_DEPTH;
        float value = 0;
        if (first_row + r < m.rows && first_column + c < m.columns) {
            const int64_t at = (first_row + r) * m.row + (first_column + c) * m.column;
            value = to_float(m.x[at]);
            if (m.dropout.p > 0)
                value *= dropout_scale(m.dropout, m.element + (uint64_t)at);
        }
        store_shared_float(to + (uint32_t)(c * TILE_ROW_BYTES + r * 4), value);
    }
}

struct tile {
    float x[4][4]; // of this thread
};
// sums += the tile at (row, column) of a b^T, summed over the inner dimension from `begin` to `end`, in this order.
DEVICE_FUNCTION void tile_multiply(struct tile *sums, const struct unfused_matrix &a, int row,
                                   const struct unfused_matrix &b, int column, int begin, int end) {
    const uint32_t left = shared_memory(), right = left + TILE_BYTES;
    for (int inner = begin; inner < end; inner += TILE_DEPTH) {
        __syncthreads(); // all threads have read the slice before
        tile_load(left, a, row, inner);
        tile_load(right, b, column, inner);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < TILE_DEPTH; k++) {
            const struct float_x4 y = load_shared_floats(left + (uint32_t)(k * TILE_ROW_BYTES + tile_y() * 4));
            const struct float_x4 x = load_shared_floats(right + (uint32_t)(k * TILE_ROW_BYTES + tile_x() * 4));
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++)
                    sums->x[i][j] += y.x[i] * x.x[j];
        }
    }
}
// Stores scale times the tile at (row, column) of a matrix of `rows` x `columns` whose rows are `stride` apart.
DEVICE_FUNCTION void tile_store(floatX *to, int64_t stride, int row, int column, int rows, int columns,
                                const struct tile &sums, float scale) {
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++)
            if (row + tile_y() + i < rows && column + tile_x() + j < columns)
                to[(row + tile_y() + i) * stride + column + tile_x() + j] = to_floatX(scale * sums.x[i][j]);
}

struct unfused {
    int T, H, Hkv, D, group;
    int64_t qkv_stride, out_stride; // elements of a token's row
    float scale;
    struct dropout dropout;
};
static inline struct unfused unfused_of(struct attention_shape shape, struct dropout dropout) {
    struct unfused u;
    u.T = shape.T;
    u.H = shape.num_heads;
    u.Hkv = shape.num_query_groups;
    u.D = shape.head_dim;
    u.group = u.H / u.Hkv;
    u.qkv_stride = (int64_t)(u.H + 2 * u.Hkv) * u.D;
    u.out_stride = (int64_t)u.H * u.D;
    u.scale = shape.scale;
    u.dropout = dropout;
    return u;
}
// A grid of a block per head, 64 rows of T and 64 columns; the head is the first dimension, since others end at 65535.
static inline dim3 unfused_grid(int64_t heads, int T, int columns) {
    return dim3((unsigned)heads, blocks_for(T, TILE), blocks_for(columns, TILE));
}

// One head's (T, D) out of a tensor of tokens, whose rows are `stride` apart.
DEVICE_FUNCTION struct unfused_matrix unfused_rows(const struct unfused &u, const floatX *x, int64_t stride, int64_t b,
                                                   int head) {
    const struct unfused_matrix result = {x + b * u.T * stride + (int64_t)head * u.D, stride, 1, u.T, u.D, {0}, 0};
    return result;
}
// One head's (T, T): P, with dropout applied where `dropped`, or dS.
DEVICE_FUNCTION struct unfused_matrix unfused_square(const struct unfused &u, const floatX *x, int64_t head,
                                                     bool dropped) {
    const int64_t at = head * u.T * u.T;
    struct unfused_matrix result = {x + at, u.T, 1, u.T, u.T, {0}, (uint64_t)at};
    if (dropped && u.dropout.p > 0) {
        result.dropout = u.dropout;
        result.dropout.step = dropout_step(u.dropout); // read once, not at each element
        result.dropout.micro_step = NULL;
    }
    return result;
}

// P = softmax(scale Q K^T) of 64 queries of a head. The scores are computed twice, for the rows' sums and for P, so
// that fp32 scores need no memory and P is rounded once. The blocks with the most keys come first.
static __global__ void __launch_bounds__(TILE_THREADS)
    unfused_softmax_kernel(floatX *probabilities, const floatX *qkv, struct unfused u) {
    const int64_t head = blockIdx.x, b = head / u.H;
    const int h = (int)(head % u.H), first = (int)(gridDim.y - 1 - blockIdx.y) * TILE;
    const struct unfused_matrix q = unfused_rows(u, qkv, u.qkv_stride, b, h);
    const struct unfused_matrix k = unfused_rows(u, qkv, u.qkv_stride, b, u.H + h / u.group);
    const float scale_log2 = u.scale * LOG2E;
    floatX *rows = probabilities + head * u.T * u.T;
    float max[4], sum[4]; // of scale_log2 scores; of 2^(scale_log2 score - max), of this thread's keys
    for (int i = 0; i < 4; i++) {
        max[i] = -FLT_MAX;
        sum[i] = 0;
    }
    for (int panel = 0; panel <= first; panel += TILE) {
        struct tile s = {};
        tile_multiply(&s, q, first, k, panel, 0, u.D);
        for (int i = 0; i < 4; i++) {
            const int keys = first + tile_y() + i + 1 - (panel + tile_x()); // this thread's keys, up to the query's own
            float now = max[i];
            for (int j = 0; j < 4; j++)
                now = j < keys ? fmaxf(now, scale_log2 * s.x[i][j]) : now;
            now = lanes_max(now, 16);
            sum[i] *= exp2_approx(max[i] - now);
            max[i] = now;
            for (int j = 0; j < 4; j++)
                sum[i] += j < keys ? exp2_approx(scale_log2 * s.x[i][j] - now) : 0.0f;
        }
    }
    for (int i = 0; i < 4; i++)
        sum[i] = lanes_sum(sum[i], 16);
    for (int panel = 0; panel < u.T; panel += TILE) {
        struct tile s = {};
        if (panel <= first)
            tile_multiply(&s, q, first, k, panel, 0, u.D);
        for (int i = 0; i < 4; i++) {
            const int keys = first + tile_y() + i + 1 - (panel + tile_x());
            for (int j = 0; j < 4; j++)
                s.x[i][j] = j < keys ? exp2_approx(scale_log2 * s.x[i][j] - max[i]) / sum[i] : 0.0f;
        }
        tile_store(rows, u.T, first, panel, u.T, u.T, s, 1.0f);
    }
}

// dS = P * (dP - delta), dP = dropout(dO V^T), delta = rowsum(P * dP) = rowsum(dO * O), of 64 queries of a head; up to
// the last key that one of them sees, as nothing behind it is read.
static __global__ void __launch_bounds__(TILE_THREADS)
    unfused_softmax_backward_kernel(floatX *ds, const floatX *dout, const floatX *qkv, const floatX *out,
                                    const floatX *probabilities, struct unfused u) {
    const int64_t head = blockIdx.x, b = head / u.H;
    const int h = (int)(head % u.H), first = (int)(gridDim.y - 1 - blockIdx.y) * TILE;
    const struct unfused_matrix v = unfused_rows(u, qkv, u.qkv_stride, b, u.H + u.Hkv + h / u.group);
    const struct unfused_matrix dout_rows = unfused_rows(u, dout, u.out_stride, b, h);
    const struct unfused_matrix out_rows = unfused_rows(u, out, u.out_stride, b, h);
    const struct unfused_matrix p = unfused_square(u, probabilities, head, true);
    float delta[4];
    for (int i = 0; i < 4; i++) {
        const int query = first + tile_y() + i;
        delta[i] = 0;
        for (int d = threadIdx.x % 16; d < u.D && query < u.T; d += 16)
            delta[i] +=
                to_float(dout_rows.x[query * u.out_stride + d]) * to_float(out_rows.x[query * u.out_stride + d]);
        delta[i] = lanes_sum(delta[i], 16);
    }
    for (int panel = 0; panel <= first; panel += TILE) {
        struct tile dp = {};
        tile_multiply(&dp, dout_rows, first, v, panel, 0, u.D);
        struct tile result = {};
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int query = first + tile_y() + i, key = panel + tile_x() + j;
                const int64_t at = (int64_t)query * u.T + key;
                if (key <= query && query < u.T) {
                    const float kept = p.dropout.p > 0 ? dropout_scale(p.dropout, p.element + (uint64_t)at) : 1.0f;
                    result.x[i][j] = to_float(p.x[at]) * (kept * dp.x[i][j] - delta[i]);
                }
            }
        }
        tile_store(ds + head * u.T * u.T, u.T, first, panel, u.T, u.T, result, 1.0f);
    }
}

// out[query] = scale * sum over keys up to the query of matrix[query][key] x[key]: O from P and V, dQ from dS and K.
// The matrix is of the query's head, x of its KV head.
static __global__ void __launch_bounds__(TILE_THREADS)
    unfused_queries_kernel(floatX *out, int64_t out_stride, const floatX *matrix, bool dropped, const floatX *x,
                           float scale, struct unfused u) {
    const int64_t head = blockIdx.x, b = head / u.H;
    const int h = (int)(head % u.H), first = (int)(gridDim.y - 1 - blockIdx.y) * TILE, column = blockIdx.z * TILE;
    const struct unfused_matrix left = unfused_square(u, matrix, head, dropped);
    const struct unfused_matrix right = transposed(unfused_rows(u, x, u.qkv_stride, b, h / u.group));
    struct tile sums = {};
    tile_multiply(&sums, left, first, right, column, 0, first + TILE < u.T ? first + TILE : u.T);
    tile_store(out + b * u.T * out_stride + (int64_t)h * u.D, out_stride, first, column, u.T, u.D, sums, scale);
}
// out[key] = scale * sum over the group's heads and, in each, the queries from the key on of matrix[query][key]
// x[query]: dK from dS and Q, dV from P and dO.
static __global__ void __launch_bounds__(TILE_THREADS)
    unfused_keys_kernel(floatX *out, const floatX *matrix, bool dropped, const floatX *x, int64_t x_stride, float scale,
                        struct unfused u) {
    const int64_t kv_head = blockIdx.x, b = kv_head / u.Hkv;
    const int kv = (int)(kv_head % u.Hkv), first = blockIdx.y * TILE, column = blockIdx.z * TILE;
    struct tile sums = {};
    for (int h = kv * u.group; h < (kv + 1) * u.group; h++) {
        const struct unfused_matrix left = transposed(unfused_square(u, matrix, b * u.H + h, dropped));
        const struct unfused_matrix right = transposed(unfused_rows(u, x, x_stride, b, h));
        tile_multiply(&sums, left, first, right, column, first, u.T);
    }
    tile_store(out + b * u.T * u.qkv_stride + (int64_t)kv * u.D, u.qkv_stride, first, column, u.T, u.D, sums, scale);
}

static size_t unfused_forward_workspace_bytes(struct attention_shape shape) { return 0; }
static void unfused_forward(floatX *out, floatX *probabilities, const floatX *qkv, struct attention_shape shape,
                            struct dropout dropout, void *workspace, struct device *dev) {
    const struct unfused u = unfused_of(shape, dropout);
    const int64_t heads = (int64_t)shape.B * u.H;
    const floatX *v = qkv + (int64_t)(u.H + u.Hkv) * u.D;
    LAUNCH(dev, unfused_softmax_kernel, unfused_grid(heads, u.T, 1), TILE_THREADS, UNFUSED_SHARED_BYTES, probabilities,
           qkv, u);
    LAUNCH(dev, unfused_queries_kernel, unfused_grid(heads, u.T, u.D), TILE_THREADS, UNFUSED_SHARED_BYTES, out,
           u.out_stride, probabilities, true, v, 1.0f, u);
}

// dS (B, H, T, T)
static size_t unfused_backward_workspace_bytes(struct attention_shape shape) {
    return (size_t)shape.B * shape.num_heads * shape.T * shape.T * sizeof(floatX);
}
static void unfused_backward(floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out,
                             const floatX *probabilities, struct attention_shape shape, struct dropout dropout,
                             void *workspace, struct device *dev) {
    const struct unfused u = unfused_of(shape, dropout);
    const dim3 queries = unfused_grid((int64_t)shape.B * u.H, u.T, u.D);
    const dim3 keys = unfused_grid((int64_t)shape.B * u.Hkv, u.T, u.D);
    const int64_t k_at = (int64_t)u.H * u.D, v_at = (int64_t)(u.H + u.Hkv) * u.D;
    floatX *ds = (floatX *)workspace;
    LAUNCH(dev, unfused_softmax_backward_kernel, unfused_grid((int64_t)shape.B * u.H, u.T, 1), TILE_THREADS,
           UNFUSED_SHARED_BYTES, ds, dout, qkv, out, probabilities, u);
    LAUNCH(dev, unfused_queries_kernel, queries, TILE_THREADS, UNFUSED_SHARED_BYTES, dqkv, u.qkv_stride, ds, false,
           qkv + k_at, u.scale, u);
    LAUNCH(dev, unfused_keys_kernel, keys, TILE_THREADS, UNFUSED_SHARED_BYTES, dqkv + k_at, ds, false, qkv,
           u.qkv_stride, u.scale, u);
    LAUNCH(dev, unfused_keys_kernel, keys, TILE_THREADS, UNFUSED_SHARED_BYTES, dqkv + v_at, probabilities, true, dout,
           u.out_stride, 1.0f, u);
}

#else

// The products of kernels/blocks.cuh. Strips are 32 queries, panels 32 keys.
//
// Job i is done in slot i % UNFUSED_SLOTS of the workspace, which holds the fp32 scores of one strip.
enum { UNFUSED_SLOTS = 32 };

struct unfused {
    struct attention_shape shape;
    struct dropout dropout;
    enum block_unit unit;
    int H, Hkv, D, T, group;
    int panels, steps;              // blocks along T and along D
    int64_t qkv_stride, out_stride; // elements of a token's row
    char *k, *v;                    // packed, (B, Hkv, panels, steps) blocks each
    char *q, *dout;                 // packed, (B, H, panels, steps) blocks each; backward alone
    float *rows;                    // (UNFUSED_SLOTS, panels) blocks
};

static inline struct unfused unfused_of(struct attention_shape shape, struct dropout dropout) {
    struct unfused u;
    memset(&u, 0, sizeof u);
    u.shape = shape;
    u.dropout = dropout;
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
static inline size_t unfused_packed_bytes(const struct unfused *u, int heads) {
    return (size_t)u->shape.B * heads * u->panels * u->steps * block_bytes(blocks_layout(u->unit));
}
static inline size_t unfused_rows_bytes(const struct unfused *u) {
    return (size_t)UNFUSED_SLOTS * u->panels * BLOCK_ELEMENTS * sizeof(float);
}
static inline int unfused_count(const struct unfused *u, int block) { // rows or columns of a block that lie before T
    return u->T - block * BLOCK < BLOCK ? u->T - block * BLOCK : BLOCK;
}
static inline void *unfused_panel(const struct unfused *u, const char *packed, int64_t head, int panel) {
    return block_at(blocks_layout(u->unit), packed, (head * u->panels + panel) * u->steps);
}
// Element (b, t, head) of qkv, head counted over the query, key and value heads of a token.
static inline int64_t unfused_at(const struct unfused *u, int64_t b, int t, int head) {
    return (b * u->T + t) * u->qkv_stride + (int64_t)head * u->D;
}
static inline int64_t unfused_out_at(const struct unfused *u, int64_t b, int t, int h) {
    return (b * u->T + t) * u->out_stride + (int64_t)h * u->D;
}

// block = block (strip, panel) of a stored (B, H, T, T) matrix, zero beyond T; times dropout's factors where `dropped`.
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
static void unfused_write(floatX *rows, int64_t stride, const float *blocks, float scale, int count, int D) {
    for (int r = 0; r < count; r++)
        for (int d = 0; d < D; d++)
            rows[r * stride + d] = to_floatX(scale * blocks[d / BLOCK * BLOCK_ELEMENTS + r * BLOCK + d % BLOCK]);
}
// sums (steps blocks) = or += the strip's stored block times panel `panel` of `right`: = for the first panel.
ALWAYS_INLINE void unfused_multiply(const enum block_layout layout, float *sums, const floatX *matrix,
                                    const char *right, int64_t right_head, const struct unfused *u, int64_t head,
                                    int strip, int panel, bool dropped) {
    ALIGN_BLOCK floatX block[BLOCK_ELEMENTS];
    ALIGN_BLOCK float left[BLOCK_ELEMENTS];
    unfused_block(block, matrix, u, head, strip, panel, dropped);
    pack_left(layout, left, NULL, block, BLOCK, BLOCK, BLOCK);
    for (int d = 0; d < u->steps; d++)
        block_product(u->unit, sums + d * BLOCK_ELEMENTS, left, 1,
                      block_at(layout, unfused_panel(u, right, right_head, panel), d), 1, 1, panel > 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

// Turns EXP2_VECS rows of a strip's blocks of scores into probabilities, in place. Entries after the query are -inf and
// become 0.
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

// out = one row of a strip's blocks, as a row of a stored (T, T) matrix.
static void unfused_store_row(floatX *out, const float *row, const struct unfused *u, int query) {
    for (int j = 0; j <= query; j++)
        out[j] = to_floatX(row[j / BLOCK * BLOCK_ELEMENTS + j % BLOCK]);
    memset(out + query + 1, 0, (size_t)(u->T - query - 1) * sizeof *out);
}

ALWAYS_INLINE void unfused_forward_strip(const enum block_layout layout, floatX *out, floatX *probabilities,
                                         const floatX *qkv, float *rows, const struct unfused *u, int64_t head,
                                         int strip) {
    ALIGN_BLOCK float q[MAX_STEPS * BLOCK_ELEMENTS], sums[MAX_STEPS * BLOCK_ELEMENTS];
    const int64_t b = head / u->H;
    const int h = (int)(head % u->H), count = unfused_count(u, strip), first = strip * BLOCK;
    const int64_t kv_head = b * u->Hkv + h / u->group;
    pack_left(layout, q, NULL, qkv + unfused_at(u, b, first, h), u->qkv_stride, count, u->D);
    for (int p = 0; p <= strip; p++)
        block_product(u->unit, rows + p * BLOCK_ELEMENTS, q, 1, unfused_panel(u, u->k, kv_head, p), 1, u->steps, false);
    for (int r = 0; r < BLOCK; r++)
        for (int i = r + 1; i < BLOCK; i++)
            rows[strip * BLOCK_ELEMENTS + r * BLOCK + i] = -INFINITY;
    for (int r = 0; r < count; r++) {
        if (r % EXP2_VECS == 0)
            unfused_softmax(rows + r * BLOCK, strip + 1, u->shape.scale * LOG2E);
        unfused_store_row(probabilities + (head * u->T + first + r) * u->T, rows + r * BLOCK, u, first + r);
    }
    for (int p = 0; p <= strip; p++)
        unfused_multiply(layout, sums, probabilities, u->v, kv_head, u, head, strip, p, true);
    unfused_write(out + unfused_out_at(u, b, first, h), u->out_stride, sums, 1.0f, count, u->D);
}

// Packed K^T and V, and 32 rows of fp32 scores for each job slot.
static size_t unfused_forward_workspace_bytes(struct attention_shape shape) {
    const struct dropout none = {0, 0, 0, 0, 0, NULL};
    const struct unfused u = unfused_of(shape, none);
    return 2 * unfused_packed_bytes(&u, u.Hkv) + unfused_rows_bytes(&u);
}

// Packs `heads` heads of rows as right operands: x as it is, transposed as its transpose; either may be NULL.
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

static void unfused_forward(floatX *out, floatX *probabilities, const floatX *qkv, struct attention_shape shape,
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

// ---------------------------------------------------------------------------------------------------------------------
// Backward

// One strip: dP = dropout(dO V^T), dS = P * (dP - rowsum(P * dP)), which is stored, and dQ = scale dS K.
ALWAYS_INLINE void unfused_backward_strip(const enum block_layout layout, floatX *dqkv, floatX *ds, const floatX *dout,
                                          const floatX *probabilities, float *rows, const struct unfused *u,
                                          int64_t head, int strip) {
    ALIGN_BLOCK float left[MAX_STEPS * BLOCK_ELEMENTS], sums[MAX_STEPS * BLOCK_ELEMENTS];
    const int64_t b = head / u->H;
    const int h = (int)(head % u->H), count = unfused_count(u, strip), first = strip * BLOCK;
    const int64_t kv_head = b * u->Hkv + h / u->group;
    float factors[BLOCK];
    pack_left(layout, left, NULL, dout + unfused_out_at(u, b, first, h), u->out_stride, count, u->D);
    for (int p = 0; p <= strip; p++)
        block_product(u->unit, rows + p * BLOCK_ELEMENTS, left, 1, unfused_panel(u, u->v, kv_head, p), 1, u->steps,
                      false);
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
        unfused_multiply(layout, sums, ds, u->k, kv_head, u, head, strip, p, false);
    unfused_write(dqkv + unfused_at(u, b, first, h), u->qkv_stride, sums, u->shape.scale, count, u->D);
}

// One panel: dV = dropout(P)^T dO and dK = scale dS^T Q, summed over all strips that see the panel, of all heads of the
// group.
ALWAYS_INLINE void unfused_backward_panel(const enum block_layout layout, floatX *dqkv, const floatX *ds,
                                          const floatX *probabilities, const struct unfused *u, int64_t kv_head,
                                          int panel) {
    ALIGN_BLOCK float dk[MAX_STEPS * BLOCK_ELEMENTS], dv[MAX_STEPS * BLOCK_ELEMENTS], left[BLOCK_ELEMENTS];
    ALIGN_BLOCK floatX block[BLOCK_ELEMENTS];
    const int64_t b = kv_head / u->Hkv;
    const int kv = (int)(kv_head % u->Hkv), count = unfused_count(u, panel);
    bool add = false;
    for (int h = kv * u->group; h < (kv + 1) * u->group; h++)
        for (int strip = panel; strip < u->panels; strip++, add = true) {
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
    unfused_write(dqkv + unfused_at(u, b, panel * BLOCK, u->H + kv), u->qkv_stride, dk, u->shape.scale, count, u->D);
    unfused_write(dqkv + unfused_at(u, b, panel * BLOCK, u->H + u->Hkv + kv), u->qkv_stride, dv, 1.0f, count, u->D);
}

static size_t unfused_matrix_bytes(struct attention_shape shape) { // rounded up, so that what follows stays aligned
    const size_t bytes = (size_t)shape.B * shape.num_heads * shape.T * shape.T * sizeof(floatX);
    return (bytes + 63) / 64 * 64;
}
// dS (B, H, T, T); packed K, V^T, Q and dO; 32 rows of fp32 for each job slot.
static size_t unfused_backward_workspace_bytes(struct attention_shape shape) {
    const struct dropout none = {0, 0, 0, 0, 0, NULL};
    const struct unfused u = unfused_of(shape, none);
    return unfused_matrix_bytes(shape) + 2 * unfused_packed_bytes(&u, u.Hkv) + 2 * unfused_packed_bytes(&u, u.H) +
           unfused_rows_bytes(&u);
}

static void unfused_backward(floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out,
                             const floatX *probabilities, struct attention_shape shape, struct dropout dropout,
                             void *workspace, struct device *dev) {
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
        blocks_begin(u.unit);
#pragma omp for schedule(dynamic, 1)
        for (int slot = 0; slot < UNFUSED_SLOTS; slot++)
            for (int64_t i = slot; i < jobs; i += UNFUSED_SLOTS) {
                float *rows = u.rows + (int64_t)slot * u.panels * BLOCK_ELEMENTS;
                if (blocks_layout(u.unit) == LAYOUT_BF16)
                    unfused_backward_strip(LAYOUT_BF16, dqkv, ds, dout, probabilities, rows, &u, i / u.panels,
                                           (int)(i % u.panels));
                else
                    unfused_backward_strip(LAYOUT_FP32, dqkv, ds, dout, probabilities, rows, &u, i / u.panels,
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

#endif
