// Unfused attention on a GPU, by tiles of 64 x 64. An amax has a pass of its own: in the kernels it made ptxas spill.
#if defined(TARGET_CUDA)
#include "kernels/attention/unfused.cuh" // unfused_forward, unfused_backward
#include "kernels/fp8/cast.cuh"          // fp8_amax
#include "kernels/gpu_sizes.cuh"         // gpu_unfused_backward_bytes
#include "kernels/ptx.cuh"               // shared memory, exp2_approx
#include "kernels/reduce.cuh"            // lanes_sum, lanes_max
#include "kernels/vector_math.cuh"       // LOG2E, vector_tanhf
#include <float.h>                       // FLT_MAX

// Every product here is made by tiles of 64 x 64, in fp32, by a block of 256 threads: thread (y, x) of 16 x 16 has rows
// 4y to 4y + 3 and columns 4x to 4x + 3, so that a row belongs to 16 neighboring lanes. Both operands come through
// shared memory, 16 of the inner dimension at a time, as rows of 64 floats (and 4 more, against bank conflicts).
enum { TILE = 64, TILE_DEPTH = 16, TILE_THREADS = 256, TILE_ROW_BYTES = (TILE + 4) * 4 };
enum { TILE_BYTES = TILE_DEPTH * TILE_ROW_BYTES, UNFUSED_SHARED_BYTES = 2 * TILE_BYTES };

// A matrix, after any dropout: (i, j) is x[i * row + j * column], 0 outside; x[0] is number `element` of the mask.
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

// Returns the first of this thread's 4 rows in a tile.
DEVICE_FUNCTION int tile_y(void) { return threadIdx.x / 16 * 4; }
// Returns the first of this thread's 4 columns in a tile.
DEVICE_FUNCTION int tile_x(void) { return threadIdx.x % 16 * 4; }

// Loads 64 x 16 of m from (first_row, first_column) to shared memory, transposed. All threads call, then synchronize.
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
// sums += the tile at (row, column) of a b^T. The inner dimension goes from `begin` in steps of 16, in order, until
// `end` is reached or passed. All threads of the block must call this, with UNFUSED_SHARED_BYTES of shared memory.
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
// Stores scale times `sums` at (row, column) of a matrix, but nothing past rows x columns. stride: from row to row.
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
    struct attention_shape shape;
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
    u.shape = shape;
    u.dropout = dropout;
    return u;
}
// Says which scores a kernel can make. Each choice has an instance, so that plain causal attention pays for no other.
enum unfused_scores {
    UNFUSED_CAUSAL, // a query sees every key up to its own position
    UNFUSED_SPANS,  // a query sees its keys from first_key on
    UNFUSED_CAPPED  // a softcap; with first_key or without
};

// Returns the first key of the first tile of keys that 64 queries from `first` on see.
DEVICE_FUNCTION int unfused_first_tile_key(const struct unfused &u, int64_t b, int first) {
    return unfused_first_key(u.shape, b, first) / TILE * TILE;
}
// Returns the end of the queries that see one of 64 keys from `first` on. The shape must have a last_query.
DEVICE_FUNCTION int unfused_end_query(const struct unfused &u, int64_t b, int first) {
    const int last_key = first + TILE < u.T ? first + TILE - 1 : u.T - 1;
    return u.shape.last_query[b * u.T + last_key] + 1;
}
// Caps products of queries and keys by tanh if UNFUSED_CAPPED. unfused_factor() times the result is the score.
template <unfused_scores SCORES> DEVICE_FUNCTION void unfused_cap(const struct unfused &u, struct tile *s) {
    if (SCORES == UNFUSED_CAPPED)
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++)
                s->x[i][j] = vector_tanhf(u.shape.scale / u.shape.softcap * s->x[i][j]);
}
// Returns what unfused_cap's result is multiplied by to be scores: the softcap if UNFUSED_CAPPED, else the scale.
template <unfused_scores SCORES> DEVICE_FUNCTION float unfused_factor(const struct unfused &u) {
    return SCORES == UNFUSED_CAPPED ? u.shape.softcap : u.shape.scale;
}
// Returns a grid with a block per head, 64 rows of T and 64 columns. Heads are x, since y and z end at 65535.
static inline dim3 unfused_grid(int64_t heads, int T, int columns) {
    return dim3((unsigned)heads, blocks_for(T, TILE), blocks_for(columns, TILE));
}

// Returns one head's (T, D) of sequence b, from a tensor of tokens, whose rows are `stride` apart; head: within a row.
DEVICE_FUNCTION struct unfused_matrix unfused_rows(const struct unfused &u, const floatX *x, int64_t stride, int64_t b,
                                                   int head) {
    const struct unfused_matrix result = {x + b * u.T * stride + (int64_t)head * u.D, stride, 1, u.T, u.D, {0}, 0};
    return result;
}
// Returns one head's (T, T): P, with dropout applied where `dropped`, or dS. head counts over all sequences.
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

// P = softmax(cap(scale Q K^T)) of 64 queries of a head, 0 at hidden keys. The scores are computed twice, for the rows'
// sums and for P, so that fp32 scores need no memory and P is rounded once. The blocks with the most keys come first.
// ptxas is held to 3 blocks a multiprocessor, or 2 where tanh takes more registers; plain causal fits 4 unasked.
template <unfused_scores SCORES>
static __global__ void __launch_bounds__(TILE_THREADS, SCORES == UNFUSED_CAUSAL  ? 0
                                                       : SCORES == UNFUSED_SPANS ? 3
                                                                                 : 2)
    unfused_softmax_kernel(floatX *probabilities, const floatX *qkv, struct unfused u) {
    const int64_t head = blockIdx.x, b = head / u.H;
    const int h = (int)(head % u.H), first = (int)(gridDim.y - 1 - blockIdx.y) * TILE;
    const struct unfused_matrix q = unfused_rows(u, qkv, u.qkv_stride, b, h);
    const struct unfused_matrix k = unfused_rows(u, qkv, u.qkv_stride, b, u.H + h / u.group);
    const float unit_log2 = unfused_factor<SCORES>(u) * LOG2E;
    const int begin = SCORES == UNFUSED_CAUSAL ? 0 : unfused_first_tile_key(u, b, first);
    floatX *rows = probabilities + head * u.T * u.T;
    int first_key[4];
    float max[4], sum[4]; // of unit_log2 scores; of 2^(unit_log2 score - max), of this thread's keys
    for (int i = 0; i < 4; i++) {
        const int query = first + tile_y() + i;
        first_key[i] = SCORES != UNFUSED_CAUSAL && query < u.T ? unfused_first_key(u.shape, b, query) : 0;
        max[i] = -FLT_MAX;
        sum[i] = 0;
    }
    for (int panel = begin; panel <= first; panel += TILE) {
        struct tile s = {};
        tile_multiply(&s, q, first, k, panel, 0, u.D);
        unfused_cap<SCORES>(u, &s);
        for (int i = 0; i < 4; i++) {
            // This thread's keys: from the query's first, up to its own.
            const int hidden = SCORES == UNFUSED_CAUSAL ? 0 : first_key[i] - (panel + tile_x());
            const int keys = first + tile_y() + i + 1 - (panel + tile_x());
            float now = max[i];
            for (int j = 0; j < 4; j++)
                now = j >= hidden && j < keys ? fmaxf(now, unit_log2 * s.x[i][j]) : now;
            now = lanes_max(now, 16);
            sum[i] *= exp2_approx(max[i] - now);
            max[i] = now;
            for (int j = 0; j < 4; j++)
                sum[i] += j >= hidden && j < keys ? exp2_approx(unit_log2 * s.x[i][j] - now) : 0.0f;
        }
    }
    for (int i = 0; i < 4; i++)
        sum[i] = lanes_sum(sum[i], 16);
    for (int panel = 0; panel < u.T; panel += TILE) {
        struct tile s = {};
        if (panel >= begin && panel <= first)
            tile_multiply(&s, q, first, k, panel, 0, u.D);
        unfused_cap<SCORES>(u, &s);
        for (int i = 0; i < 4; i++) {
            const int hidden = SCORES == UNFUSED_CAUSAL ? 0 : first_key[i] - (panel + tile_x());
            const int keys = first + tile_y() + i + 1 - (panel + tile_x());
            for (int j = 0; j < 4; j++)
                s.x[i][j] = j >= hidden && j < keys ? exp2_approx(unit_log2 * s.x[i][j] - max[i]) / sum[i] : 0.0f;
        }
        tile_store(rows, u.T, first, panel, u.T, u.T, s, 1.0f);
    }
}

// dS = P * (dP - delta) times the softcap's derivative, dP = dropout(dO V^T), delta = rowsum(P * dP) = rowsum(dO * O),
// of 64 queries of a head. Tiles of keys that none of these queries sees stay unwritten.
template <unfused_scores SCORES>
static __global__ void __launch_bounds__(TILE_THREADS, SCORES == UNFUSED_CAPPED ? 2 : 0) // without the 2, spills
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
    const int begin = SCORES == UNFUSED_CAUSAL ? 0 : unfused_first_tile_key(u, b, first);
    for (int panel = begin; panel <= first; panel += TILE) {
        struct tile dp = {}, s = {};
        tile_multiply(&dp, dout_rows, first, v, panel, 0, u.D);
        if (SCORES == UNFUSED_CAPPED)
            tile_multiply(&s, unfused_rows(u, qkv, u.qkv_stride, b, h), first,
                          unfused_rows(u, qkv, u.qkv_stride, b, u.H + h / u.group), panel, 0, u.D);
        unfused_cap<SCORES>(u, &s);
        struct tile result = {};
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int query = first + tile_y() + i, key = panel + tile_x() + j;
                const int64_t at = (int64_t)query * u.T + key;
                if (key <= query && query < u.T &&
                    (SCORES == UNFUSED_CAUSAL || key >= unfused_first_key(u.shape, b, query))) {
                    const float kept = p.dropout.p > 0 ? dropout_scale(p.dropout, p.element + (uint64_t)at) : 1.0f;
                    result.x[i][j] = to_float(p.x[at]) * (kept * dp.x[i][j] - delta[i]);
                    if (SCORES == UNFUSED_CAPPED)
                        result.x[i][j] *= 1.0f - s.x[i][j] * s.x[i][j];
                }
            }
        }
        tile_store(ds + head * u.T * u.T, u.T, first, panel, u.T, u.T, result, 1.0f);
    }
}

// out[query] = scale * the sum of matrix[query][key] x[key] over the keys that the query sees: O from P and V, dQ from
// dS and K. matrix has all heads; x is qkv from its first K or V head on. Without the 3 ptxas spills for sm_86, sm_89.
template <unfused_scores SCORES>
static __global__ void __launch_bounds__(TILE_THREADS, 3)
    unfused_queries_kernel(floatX *out, int64_t out_stride, const floatX *matrix, bool dropped, const floatX *x,
                           float scale, struct unfused u) {
    const int64_t head = blockIdx.x, b = head / u.H;
    const int h = (int)(head % u.H), first = (int)(gridDim.y - 1 - blockIdx.y) * TILE, column = blockIdx.z * TILE;
    const struct unfused_matrix left = unfused_square(u, matrix, head, dropped);
    const struct unfused_matrix right = transposed(unfused_rows(u, x, u.qkv_stride, b, h / u.group));
    struct tile sums = {};
    const int begin = SCORES == UNFUSED_CAUSAL ? 0 : unfused_first_tile_key(u, b, first);
    tile_multiply(&sums, left, first, right, column, begin, first + TILE < u.T ? first + TILE : u.T);
    tile_store(out + b * u.T * out_stride + (int64_t)h * u.D, out_stride, first, column, u.T, u.D, sums, scale);
}
// out[key] = scale * the sum of matrix[query][key] x[query] over the group's heads and the queries that see the key: dK
// from dS and Q, dV from P and dO. out is dqkv from its first K or V head on.
template <unfused_scores SCORES>
static __global__ void __launch_bounds__(TILE_THREADS)
    unfused_keys_kernel(floatX *out, const floatX *matrix, bool dropped, const floatX *x, int64_t x_stride, float scale,
                        struct unfused u) {
    const int64_t kv_head = blockIdx.x, b = kv_head / u.Hkv;
    const int kv = (int)(kv_head % u.Hkv), first = blockIdx.y * TILE, column = blockIdx.z * TILE;
    const int end = SCORES == UNFUSED_CAUSAL ? u.T : unfused_end_query(u, b, first);
    struct tile sums = {};
    for (int h = kv * u.group; h < (kv + 1) * u.group; h++) {
        const struct unfused_matrix left = transposed(unfused_square(u, matrix, b * u.H + h, dropped));
        const struct unfused_matrix right = transposed(unfused_rows(u, x, x_stride, b, h));
        tile_multiply(&sums, left, first, right, column, first, end);
    }
    tile_store(out + b * u.T * u.qkv_stride + (int64_t)kv * u.D, u.qkv_stride, first, column, u.T, u.D, sums, scale);
}

size_t unfused_forward_workspace_bytes(struct attention_shape shape, const struct device *dev) { return 0; }
void unfused_forward(floatX *out, floatX *probabilities, const floatX *qkv, struct attention_shape shape,
                     struct dropout dropout, uint32_t *amax, void *workspace, struct device *dev) {
    const struct unfused u = unfused_of(shape, dropout);
    const int64_t heads = (int64_t)shape.B * u.H;
    const floatX *v = qkv + (int64_t)(u.H + u.Hkv) * u.D;
    LAUNCH(dev,
           shape.softcap > 0 ? unfused_softmax_kernel<UNFUSED_CAPPED>
           : shape.first_key ? unfused_softmax_kernel<UNFUSED_SPANS>
                             : unfused_softmax_kernel<UNFUSED_CAUSAL>,
           unfused_grid(heads, u.T, 1), TILE_THREADS, UNFUSED_SHARED_BYTES, probabilities, qkv, u);
    LAUNCH(dev, shape.first_key ? unfused_queries_kernel<UNFUSED_SPANS> : unfused_queries_kernel<UNFUSED_CAUSAL>,
           unfused_grid(heads, u.T, u.D), TILE_THREADS, UNFUSED_SHARED_BYTES, out, u.out_stride, probabilities, true, v,
           1.0f, u);
    if (amax)
        fp8_amax(amax, out, (int64_t)shape.B * u.T * u.out_stride, dev);
}

size_t unfused_backward_workspace_bytes(struct attention_shape shape, const struct device *dev) {
    return gpu_unfused_backward_bytes(shape);
}
void unfused_backward(floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out,
                      const floatX *probabilities, struct attention_shape shape, struct dropout dropout, uint32_t *amax,
                      void *workspace, struct device *dev) {
    const struct unfused u = unfused_of(shape, dropout);
    const dim3 queries = unfused_grid((int64_t)shape.B * u.H, u.T, u.D);
    const dim3 keys = unfused_grid((int64_t)shape.B * u.Hkv, u.T, u.D);
    const int64_t k_at = (int64_t)u.H * u.D, v_at = (int64_t)(u.H + u.Hkv) * u.D;
    floatX *ds = (floatX *)workspace;
    LAUNCH(dev,
           shape.softcap > 0 ? unfused_softmax_backward_kernel<UNFUSED_CAPPED>
           : shape.first_key ? unfused_softmax_backward_kernel<UNFUSED_SPANS>
                             : unfused_softmax_backward_kernel<UNFUSED_CAUSAL>,
           unfused_grid((int64_t)shape.B * u.H, u.T, 1), TILE_THREADS, UNFUSED_SHARED_BYTES, ds, dout, qkv, out,
           probabilities, u);
    LAUNCH(dev, shape.first_key ? unfused_queries_kernel<UNFUSED_SPANS> : unfused_queries_kernel<UNFUSED_CAUSAL>,
           queries, TILE_THREADS, UNFUSED_SHARED_BYTES, dqkv, u.qkv_stride, ds, false, qkv + k_at, u.shape.scale, u);
    LAUNCH(dev, shape.first_key ? unfused_keys_kernel<UNFUSED_SPANS> : unfused_keys_kernel<UNFUSED_CAUSAL>, keys,
           TILE_THREADS, UNFUSED_SHARED_BYTES, dqkv + k_at, ds, false, qkv, u.qkv_stride, u.shape.scale, u);
    LAUNCH(dev, shape.first_key ? unfused_keys_kernel<UNFUSED_SPANS> : unfused_keys_kernel<UNFUSED_CAUSAL>, keys,
           TILE_THREADS, UNFUSED_SHARED_BYTES, dqkv + v_at, probabilities, true, dout, u.out_stride, 1.0f, u);
    if (amax)
        fp8_amax(amax, dqkv, (int64_t)shape.B * u.T * u.qkv_stride, dev);
}

const char *unfused_compute_name(const struct device *dev) { return FLOATX_NAME; }

#endif
