#include "kernels/embedding.cuh"
#include "kernels/gpu_sizes.cuh"      // embedding_sort_size, gpu_embedding_backward_bytes
#include "kernels/packed.cuh"         // packed_load_some
#include "kernels/packed_floats.cuh"  // floats_load_some, floats_store_some, dropout_scales_packed
#include "kernels/positions.cuh"      // token_position
#include "kernels/ptx.cuh"            // store_shared_long
#include "kernels/vectors_floatx.cuh" // row_vec_load, float_load

#ifdef TARGET_CUDA

// Threads of a block in forward and in the positions' gradients. A thread takes one pack (16 bytes) of a row.
enum { EMBEDDING_THREADS = 128 };

// x <- x * scale * the dropout scales, for the pack at column c of row `row`
DEVICE_FUNCTION void embedding_scale(struct packed_floats *x, int64_t row, int c, int C, float scale,
                                     const struct dropout &dropout) {
#pragma unroll
    for (int i = 0; i < PACK; i++)
        x->x[i] *= scale;
    if (dropout.p == 0)
        return;
    const struct packed_floats scales = dropout_scales_packed(dropout, (uint64_t)(row * C + c));
#pragma unroll
    for (int i = 0; i < PACK; i++)
        x->x[i] *= scales.x[i];
}
DEVICE_FUNCTION struct packed_floats embedding_gradient(const floatX *dout, int64_t row, int c, int C, float scale,
                                                        const struct dropout &dropout) {
    struct packed_floats d = packed_to_floats(packed_load_some(dout + row * C + c, C - c));
    embedding_scale(&d, row, c, C, scale, dropout);
    return d;
}
DEVICE_FUNCTION void embedding_add(struct packed_floats *sum, const struct packed_floats &d) {
#pragma unroll
    for (int i = 0; i < PACK; i++)
        sum->x[i] += d.x[i];
}

static __global__ void __launch_bounds__(EMBEDDING_THREADS)
    embedding_forward_kernel(floatX *out, const int32_t *tokens, const floatX *wte, const floatX *wpe,
                             struct token_positions positions, int T, int C, float scale, struct dropout dropout) {
    const int64_t row = blockIdx.x;
    const int c = (int)(blockIdx.y * EMBEDDING_THREADS + threadIdx.x) * PACK;
    if (c >= C)
        return;
    struct packed_floats sum = packed_to_floats(packed_load_some(wte + (int64_t)tokens[row] * C + c, C - c));
    if (wpe != NULL)
        embedding_add(&sum, packed_to_floats(packed_load_some(wpe + token_position(positions, row, T) * C + c, C - c)));
    embedding_scale(&sum, row, c, C, scale, dropout);
    packed_store_some(out + row * C + c, packed_from_floats(sum), C - c);
}
void embedding_forward(floatX *out, const int32_t *tokens, const floatX *wte, const floatX *wpe,
                       struct token_positions positions, int B, int T, int C, float scale, struct dropout dropout,
                       struct device *dev) {
    LAUNCH(dev, embedding_forward_kernel, dim3((unsigned)((int64_t)B * T), blocks_for(C, EMBEDDING_THREADS * PACK)),
           EMBEDDING_THREADS, 0, out, tokens, wte, wpe, positions, T, C, scale, dropout);
}

// Backward sorts the rows by token, so that the rows of a token stand together, in order, and each token's sum is made
// by one warp or block in a fixed order. Where positions are not the rows' numbers in their sequences, the rows are
// sorted once more, by position. A key is token << 32 | row, or position << 32 | row: no two are equal, and so any sort
// gives the same order. The sort is a bitonic network (Batcher 1968), padded to a power of two with keys above all
// others: the steps between keys less than a tile apart are made in shared memory, many a launch.
enum { SORT_TILE = 4096, SORT_THREADS = 1024 };

size_t embedding_backward_workspace_bytes(int B, int T, const struct device *dev) {
    return gpu_embedding_backward_bytes(B, T);
}

// Says which row of its table a row of dout is added to: its token's, or where tokens is NULL its position's.
struct embedding_index {
    const int32_t *tokens;
    struct token_positions positions;
    int T;
};
// Returns a sort key: the row's token, or without tokens its position, in the upper 32 bits, and `row` in the lower.
DEVICE_FUNCTION uint64_t embedding_key(const struct embedding_index &index, int64_t row) {
    const int64_t at = index.tokens != NULL ? index.tokens[row] : token_position(index.positions, row, index.T);
    return (uint64_t)at << 32 | (uint64_t)row;
}
DEVICE_FUNCTION uint32_t key_index(uint64_t key) { return (uint32_t)(key >> 32); }
DEVICE_FUNCTION uint32_t key_row(uint64_t key) { return (uint32_t)key; }

// Returns the number of a pair's first key. A step of the sort compares pairs of keys `stride`, a power of two, apart.
DEVICE_FUNCTION int64_t sort_pair_first(int64_t pair, int64_t stride) {
    return (pair & ~(stride - 1)) * 2 | (pair & (stride - 1));
}
// Whether a pair whose first key is number `at` becomes ascending in the stage that makes sorted runs of `run` keys.
DEVICE_FUNCTION bool sort_ascending(int64_t at, int64_t run) { return (at & run) == 0; }

// Does the sort's steps that stay within tiles of `tile` keys, a block a tile. With run 0 makes the keys, all ones from
// key n on, and sorts each tile. Else does the last steps of the stage that makes sorted runs of `run` keys.
static __global__ void __launch_bounds__(SORT_THREADS)
    sort_tile_kernel(uint64_t *keys, struct embedding_index index, int64_t n, int tile, int64_t run) {
    const int64_t begin = (int64_t)blockIdx.x * tile;
    const uint32_t shared = shared_memory();
    for (int i = threadIdx.x; i < tile; i += blockDim.x) {
        const int64_t at = begin + i;
        uint64_t key = ~(uint64_t)0;
        if (run > 0)
            key = keys[at];
        else if (at < n)
            key = embedding_key(index, at);
        store_shared_long(shared + 8 * (uint32_t)i, key);
    }
    const int64_t last = run > 0 ? run : tile;
    for (int64_t r = run > 0 ? run : 2; r <= last; r *= 2)
        for (int stride = (int)(r < tile ? r : tile) / 2; stride > 0; stride /= 2) {
            __syncthreads();
            for (int pair = threadIdx.x; pair < tile / 2; pair += blockDim.x) {
                const uint32_t first = (uint32_t)sort_pair_first(pair, stride);
                const uint32_t low = shared + 8 * first, high = low + 8 * (uint32_t)stride;
                const uint64_t a = load_shared_long(low), b = load_shared_long(high);
                if ((a > b) == sort_ascending(begin + first, r)) {
                    store_shared_long(low, b);
                    store_shared_long(high, a);
                }
            }
        }
    __syncthreads();
    for (int i = threadIdx.x; i < tile; i += blockDim.x)
        keys[begin + i] = load_shared_long(shared + 8 * (uint32_t)i);
}
// Does one step of the stage that makes sorted runs of `run` keys: compares keys `stride` apart, a pair a thread.
static __global__ void sort_step_kernel(uint64_t *keys, int64_t stride, int64_t run) {
    const int64_t first = sort_pair_first((int64_t)blockIdx.x * blockDim.x + threadIdx.x, stride);
    const uint64_t a = keys[first], b = keys[first + stride];
    if ((a > b) == sort_ascending(first, run)) {
        keys[first] = b;
        keys[first + stride] = a;
    }
}
// keys (embedding_sort_size) = the rows' keys, sorted by index, then row, and padding; 15 launches for 65,536 rows.
static void embedding_sort(uint64_t *keys, struct embedding_index index, int B, struct device *dev) {
    const int64_t n = (int64_t)B * index.T, size = embedding_sort_size(B, index.T);
    const int tile = size < SORT_TILE ? (int)size : (int)SORT_TILE;
    const unsigned tiles = (unsigned)(size / tile),
                   threads = tile / 2 < SORT_THREADS ? (unsigned)tile / 2 : (unsigned)SORT_THREADS;
    LAUNCH(dev, sort_tile_kernel, tiles, threads, (size_t)tile * sizeof *keys, keys, index, n, tile, (int64_t)0);
    for (int64_t run = 2 * (int64_t)tile; run <= size; run *= 2) {
        for (int64_t stride = run / 2; stride >= tile; stride /= 2)
            LAUNCH(dev, sort_step_kernel, (unsigned)(size / 2 / 256), 256, 0, keys, stride, run);
        LAUNCH(dev, sort_tile_kernel, tiles, threads, (size_t)tile * sizeof *keys, keys, index, n, tile, run);
    }
}

// A warp sums an index of at most TOKEN_FEW rows, in 32 packs of columns. A block sums an index of more rows, as of the
// frequent words of a text: group i of its threads adds the rows i, i + TOKEN_GROUPS, ...
enum { TOKEN_FEW = 64, TOKEN_AT_A_TIME = 4, TOKEN_WARPS = 8, TOKEN_BLOCK_THREADS = 512, TOKEN_LANES = 16 };
enum { TOKEN_GROUPS = TOKEN_BLOCK_THREADS / TOKEN_LANES };

// Sums dout's rows into the table for indices of at most TOKEN_FEW rows. Warp i does so if key i is its index's first.
static __global__ void __launch_bounds__(TOKEN_WARPS * 32)
    embedding_few_rows_kernel(struct table_gradient table, const floatX *dout, const uint64_t *keys, int64_t n, int C,
                              float scale, struct dropout dropout) {
    const int64_t first = (int64_t)blockIdx.x * TOKEN_WARPS + threadIdx.x / 32;
    const int c = (int)(blockIdx.y * 32 + threadIdx.x % 32) * PACK;
    if (first >= n || c >= C)
        return;
    const uint32_t index = key_index(keys[first]);
    if (first > 0 && key_index(keys[first - 1]) == index) // not the first row of the index
        return;
    if (first + TOKEN_FEW < n && key_index(keys[first + TOKEN_FEW]) == index)
        return;
    float *to = table.sums + (int64_t)index * C + c;
    struct packed_floats sum = {};
    if (table.add)
        sum = floats_load_some(to, C - c);
    for (int i = 0, more = 1; more && i < TOKEN_FEW; i += TOKEN_AT_A_TIME) {
        struct packed_floats d[TOKEN_AT_A_TIME];
#pragma unroll
        for (int k = 0; k < TOKEN_AT_A_TIME; k++) { // all loads are in flight before the first is added
            const int64_t at = first + i + k;
            const uint64_t key = keys[at < n ? at : first];
            more = at < n && key_index(key) == index;
            memset(&d[k], 0, sizeof d[k]);
            if (more)
                d[k] = embedding_gradient(dout, key_row(key), c, C, scale, dropout);
        }
#pragma unroll
        for (int k = 0; k < TOKEN_AT_A_TIME; k++)
            embedding_add(&sum, d[k]);
    }
    floats_store_some(to, sum, C - c);
}

// Sums dout's rows into the table for indices with more than TOKEN_FEW rows. Block i looks at key i * TOKEN_FEW. Each
// such index has at least one of the keys that blocks look at, and the first block that finds the index sums its rows.
static __global__ void __launch_bounds__(TOKEN_BLOCK_THREADS)
    embedding_many_rows_kernel(struct table_gradient table, const floatX *dout, const uint64_t *keys, int64_t n, int C,
                               float scale, struct dropout dropout) {
    const int64_t at = (int64_t)blockIdx.x * TOKEN_FEW;
    const uint32_t index = key_index(keys[at]);
    int64_t first = at, end = at + 1;
    if (at > 0 && key_index(keys[at - TOKEN_FEW]) == index)
        return;
    for (int64_t step = TOKEN_FEW / 2; step > 0; step /= 2) // the index began less than TOKEN_FEW keys before
        if (first >= step && key_index(keys[first - step]) == index)
            first -= step;
    if (first + TOKEN_FEW >= n || key_index(keys[first + TOKEN_FEW]) != index)
        return;
    for (int64_t past = n; end < past;) { // the first key after `at` of another index
        const int64_t middle = end + (past - end) / 2;
        if (key_index(keys[middle]) == index)
            end = middle + 1;
        else
            past = middle;
    }

    const int lane = threadIdx.x % TOKEN_LANES, group = threadIdx.x / TOKEN_LANES;
    const int c = (int)(blockIdx.y * TOKEN_LANES + lane) * PACK;
    struct packed_floats sum;
    memset(&sum, 0, sizeof sum);
    if (c < C) {
#pragma unroll 4
        for (int64_t i = first + group; i < end; i += TOKEN_GROUPS)
            embedding_add(&sum, embedding_gradient(dout, key_row(keys[i]), c, C, scale, dropout));
    }
    floats_store_shared(shared_memory() + threadIdx.x * (PACK * 4), sum);
    __syncthreads();
    const int columns = TOKEN_LANES * PACK, column = (int)blockIdx.y * columns + (int)threadIdx.x;
    if ((int)threadIdx.x >= columns || column >= C)
        return;
    float total = 0;
    for (int i = 0; i < TOKEN_GROUPS; i++)
        total += load_shared_float(shared_memory() + 4 * (uint32_t)(i * columns) + 4 * threadIdx.x);
    float *to = table.sums + (int64_t)index * C + column;
    *to = table.add ? *to + total : total;
}

// Zeroes the table's rows whose index no key has. A block takes a row, and searches the sorted keys for its index.
static __global__ void __launch_bounds__(EMBEDDING_THREADS)
    embedding_other_rows_kernel(struct table_gradient table, const uint64_t *keys, int64_t n, int C) {
    const uint32_t index = blockIdx.x;
    int64_t first = 0; // the first key of no smaller index
    for (int64_t past = n; first < past;) {
        const int64_t middle = first + (past - first) / 2;
        if (key_index(keys[middle]) < index)
            first = middle + 1;
        else
            past = middle;
    }
    if (first < n && key_index(keys[first]) == index)
        return;
    const struct packed_floats zeroes = {};
    for (int c = (int)threadIdx.x * PACK; c < C; c += EMBEDDING_THREADS * PACK)
        floats_store_some(table.sums + (int64_t)index * C + c, zeroes, C - c);
}

// Computes dwpe without a sort: positions are the tokens' numbers in sequences. Zeroes rows from T on, unless `add`.
static __global__ void __launch_bounds__(EMBEDDING_THREADS)
    embedding_positions_kernel(struct table_gradient table, const floatX *dout, int B, int T, int C, float scale,
                               struct dropout dropout) {
    const int64_t t = blockIdx.x; // row of the table
    const int c = (int)(blockIdx.y * EMBEDDING_THREADS + threadIdx.x) * PACK;
    if (c >= C)
        return;
    struct packed_floats sum = {};
    if (table.add)
        sum = floats_load_some(table.sums + t * C + c, C - c);
#pragma unroll 4
    for (int b = 0; b < B && t < T; b++)
        embedding_add(&sum, embedding_gradient(dout, (int64_t)b * T + t, c, C, scale, dropout));
    floats_store_some(table.sums + t * C + c, sum, C - c);
}

// Sums dout's rows into the table, by index, as struct table_gradient says. keys (embedding_sort_size) is scratch.
static void embedding_sums(struct table_gradient table, const floatX *dout, struct embedding_index index, int B, int C,
                           float scale, struct dropout dropout, uint64_t *keys, struct device *dev) {
    const int64_t n = (int64_t)B * index.T;
    embedding_sort(keys, index, B, dev);
    LAUNCH(dev, embedding_few_rows_kernel, dim3(blocks_for(n, TOKEN_WARPS), blocks_for(C, 32 * PACK)), TOKEN_WARPS * 32,
           0, table, dout, (const uint64_t *)keys, n, C, scale, dropout);
    if (n > TOKEN_FEW)
        LAUNCH(dev, embedding_many_rows_kernel, dim3(blocks_for(n, TOKEN_FEW), blocks_for(C, TOKEN_LANES * PACK)),
               TOKEN_BLOCK_THREADS, TOKEN_BLOCK_THREADS * PACK * sizeof(float), table, dout, (const uint64_t *)keys, n,
               C, scale, dropout);
    if (!table.add)
        LAUNCH(dev, embedding_other_rows_kernel, (unsigned)table.rows, EMBEDDING_THREADS, 0, table,
               (const uint64_t *)keys, n, C);
}
void embedding_backward(struct table_gradient dwte, struct table_gradient dwpe, const floatX *dout,
                        const int32_t *tokens, struct token_positions positions, int B, int T, int C, float scale,
                        struct dropout dropout, void *workspace, struct device *dev) {
    const struct embedding_index by_token = {tokens, positions, T}, by_position = {NULL, positions, T};
    if (dwte.sums != NULL)
        embedding_sums(dwte, dout, by_token, B, C, scale, dropout, (uint64_t *)workspace, dev);
    if (dwpe.sums == NULL)
        return;
    if (positions.starts != NULL || positions.document_starts != NULL)
        embedding_sums(dwpe, dout, by_position, B, C, scale, dropout, (uint64_t *)workspace, dev);
    else
        LAUNCH(dev, embedding_positions_kernel,
               dim3((unsigned)(dwpe.add ? T : dwpe.rows), blocks_for(C, EMBEDDING_THREADS * PACK)), EMBEDDING_THREADS,
               0, dwpe, dout, B, T, C, scale, dropout);
}

#else

enum { EMBEDDING_COLUMNS = 256, EMBEDDING_LINE = 16 }; // LINE: a cache line of fp32
// A token's row may lie anywhere in memory: it is prefetched this many rows before its turn.
enum { EMBEDDING_AHEAD = 4 };

static inline void prefetch_bytes(const void *p, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 64)
        __builtin_prefetch((const char *)p + at);
}
static inline void prefetch_bytes_to_change(const void *p, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 64)
        __builtin_prefetch((const char *)p + at, 1);
}

// Computes a row of embedding_forward into to (C). position (C) may be NULL. first: the row's first place in the mask.
static inline void embedding_forward_row(floatX *to, const floatX *token, const floatX *position, int C, float scale,
                                         struct dropout dropout, int64_t first) {
    if (dropout.p == 0 && position == NULL && scale == 1) {
        memcpy(to, token, (size_t)C * sizeof *to);
        return;
    }
    float scales[EMBEDDING_COLUMNS];
    for (int begin = 0; begin < C; begin += EMBEDDING_COLUMNS) {
        const int end = C - begin < EMBEDDING_COLUMNS ? C : begin + EMBEDDING_COLUMNS;
        if (dropout.p != 0)
            dropout_scales(scales, dropout, (uint64_t)(first + begin), end - begin);
        for (int c = begin; c < end; c += LANES) {
            vec sum = row_vec_load(token, c, end);
            if (position != NULL)
                sum += row_vec_load(position, c, end);
            sum *= scale;
            if (dropout.p != 0)
                sum *= float_load(scales + c - begin);
            row_vec_store(to, sum, c, end);
        }
    }
}
void embedding_forward(floatX *out, const int32_t *tokens, const floatX *wte, const floatX *wpe,
                       struct token_positions positions, int B, int T, int C, float scale, struct dropout dropout,
                       struct device *dev) {
    const int64_t rows = (int64_t)B * T;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        if (row + EMBEDDING_AHEAD < rows)
            prefetch_bytes(wte + (int64_t)tokens[row + EMBEDDING_AHEAD] * C, (size_t)C * sizeof *wte);
        embedding_forward_row(out + row * C, wte + (int64_t)tokens[row] * C,
                              wpe != NULL ? wpe + token_position(positions, row, T) * C : NULL, C, scale, dropout,
                              row * C);
    }
}

// to[c] += scale * scales[c - begin] * d[c], begin <= c < end. NULL `scales` are all 1.
static inline void embedding_add(float *to, const floatX *d, float scale, const float *scales, int begin, int end) {
    for (int c = begin; c < end; c += LANES) {
        const bool whole = end - c >= LANES;
        const vec factor = scale * (scales != NULL ? float_load(scales + c - begin) : vec_set(1.0f));
        const vec sum = whole ? float_load(to + c) : float_load_some(to + c, end - c);
        const vec result = sum + factor * row_vec_load(d, c, end);
        if (whole)
            float_store(to + c, result);
        else
            float_store_some(to + c, result, end - c);
    }
}

size_t embedding_backward_workspace_bytes(int B, int T, const struct device *dev) {
    return device_is_gpu(dev) ? gpu_embedding_backward_bytes(B, T) : 0;
}
// Zeroes the table's sums on the host's threads, before rows are added, unless `add` is set or there are no sums.
static void table_gradient_clear(struct table_gradient table, int C) {
    if (table.sums == NULL || table.add)
        return;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < table.rows; row++)
        memset(table.sums + row * C, 0, (size_t)C * sizeof *table.sums);
}
void embedding_backward(struct table_gradient dwte, struct table_gradient dwpe, const floatX *dout,
                        const int32_t *tokens, struct token_positions positions, int B, int T, int C, float scale,
                        struct dropout dropout, void *workspace, struct device *dev) {
    // Threads share the columns, in ranges of whole cache lines, and each goes through the rows in order: no two add to
    // one place, and sums are the same for any number of threads. More ranges would cost more memory accesses.
    const int64_t rows = (int64_t)B * T;
    table_gradient_clear(dwte, C);
    table_gradient_clear(dwpe, C);
    const int shares = dev->threads > 0 ? dev->threads : 1;
    const int columns = ((C + shares - 1) / shares + EMBEDDING_LINE - 1) / EMBEDDING_LINE * EMBEDDING_LINE;
#pragma omp parallel for schedule(static)
    for (int begin = 0; begin < C; begin += columns) {
        const int end = C - begin < columns ? C : begin + columns;
        float scales[EMBEDDING_COLUMNS];
        for (int64_t row = 0; row < rows; row++) {
            const int64_t ahead = row + EMBEDDING_AHEAD < rows ? row + EMBEDDING_AHEAD : row;
            if (dwte.sums != NULL)
                prefetch_bytes_to_change(dwte.sums + tokens[ahead] * (int64_t)C + begin,
                                         (size_t)(end - begin) * sizeof *dwte.sums);
            const int64_t position = token_position(positions, row, T);
            for (int from = begin; from < end; from += EMBEDDING_COLUMNS) {
                const int to = end - from < EMBEDDING_COLUMNS ? end : from + EMBEDDING_COLUMNS;
                if (dropout.p != 0)
                    dropout_scales(scales, dropout, (uint64_t)(row * C + from), to - from);
                const float *factors = dropout.p != 0 ? scales : NULL;
                if (dwte.sums != NULL)
                    embedding_add(dwte.sums + tokens[row] * (int64_t)C, dout + row * C, scale, factors, from, to);
                if (dwpe.sums != NULL)
                    embedding_add(dwpe.sums + position * C, dout + row * C, scale, factors, from, to);
            }
        }
    }
}

#endif
