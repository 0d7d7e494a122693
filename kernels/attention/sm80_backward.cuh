// Flash attention's backward by mma.sync: a kernel for dQ, one for dK and dV. Its design: kernels/attention/sm80.cu.
#pragma once
#include "kernels/attention/sm80_tiles.cuh" // struct flash_arguments, tiles, products
#include "kernels/vector_math.cuh"          // LOG2E

// --- Backward: P and dS of a chunk --------------------------------------------------------------------------------

struct backward_element {
    float p, ds;
};
// Returns P and dS of an element. P = exp2(scale_log2 S - lse_log2), or 0 if not `visible`; dS = P (dP - delta), times
// 1 - tanh^2 where scores are capped. Dropout's factor `mask` multiplies dP and the P that is returned.
template <class plan>
DEVICE_FUNCTION struct backward_element backward_one(const typename plan::arguments &a, float s, float dp,
                                                     float scale_log2, float lse_log2, float delta, float mask,
                                                     bool visible) {
    struct backward_element result;
    if constexpr (plan::ANY)
        if (has_cap<plan>(a))
            s = score_tanh(s, cap_factor(a));
    const float p = visible ? exp2_approx(fmaf(s, scale_log2, -lse_log2)) : 0.0f;
    result.p = p * mask;
    result.ds = p * (dp * mask - delta);
    if constexpr (plan::ANY)
        if (has_cap<plan>(a))
            result.ds *= fmaf(-s, s, 1.0f);
    return result;
}

// Computes S and dP of a chunk: s = left . right^T, dp = dleft . dright^T. left, dleft: 16 M rows; right, dright:
// origin_right() of tiles, whose 8 N rows from `first` on are read. fp32 makes s first, which takes fewer registers.
template <int D, int M, int N, class left_operand>
DEVICE_FUNCTION void multiply_both(float s[M][N][4], float dp[M][N][4], const left_operand &left,
                                   const left_operand &dleft, uint32_t right, uint32_t dright, int first) {
    if constexpr (FP32) {
        multiply_in_runs<4, D, M, N>(s, left, right, first);
        multiply_in_runs<4, D, M, N>(dp, dleft, dright, first);
    } else {
        clear<M, N>(s);
        clear<M, N>(dp);
#pragma unroll
        for (int k = 0; k < D / STEP; k++) {
            struct word_x4 operand[M];
            left.at(operand, k);
            multiply_transposed<D, M, N>(s, operand, right, first, k);
            dleft.at(operand, k);
            multiply_transposed<D, M, N>(dp, operand, dright, first, k);
        }
    }
}

// --- Backward: dQ -------------------------------------------------------------------------------------------------

template <int COLUMNS_OF_TILE, bool WITH_DROPOUT, bool WITH_PADDING, flash_scores SCORES> struct backward_query_plan {
    static constexpr int D = COLUMNS_OF_TILE;
    static constexpr bool DROPOUT = WITH_DROPOUT, PADDED = WITH_PADDING;
    static constexpr bool SPANS = SCORES != FLASH_CAUSAL, ANY = SCORES == FLASH_ANY;
    typedef typename flash_arguments_for<SCORES>::type arguments;
    static constexpr int WARPS = FP32                  ? D == 256 ? 2 : 4
                                 : D == 64 || D == 256 ? 4
                                                       : 8,
                         THREADS = 32 * WARPS, BLOCKS = D == 64 || D == 256 ? 2 : 1;
    static constexpr int M = D == 64 && !FP32 ? 2 : 1;                 // 16-row blocks of a warp
    static constexpr int QUERIES = 16 * M * WARPS;                     // of a block
    static constexpr int KEYS = (D == 256 ? 32 : 64) / (FP32 ? 2 : 1); // of a tile
    static constexpr int CHUNK =
        FP32 || D == 256 || D == 64 ? 16 : 32;                         // keys whose S and dP are in registers at a time
    static constexpr int UNROLL = FP32 || D == 256 || DROPOUT ? 1 : 4; // chunks
    static constexpr int STAGES = FP32 || D == 256 ? 1 : 2;
    static constexpr bool IN_REGISTERS = !FP32 && D < 256; // Q and dO
    static constexpr bool LATE = HIDE_MORE && D == 256;    // see zero_after()
    static constexpr int ROWS_BYTES = QUERIES * ELEMENT * D, TILE_BYTES = KEYS * ELEMENT * D,
                         STAGE_BYTES = 2 * TILE_BYTES;
    // Where Q and dO stay in registers, K and V take their place in shared memory.
    static constexpr int STAGES_AT = IN_REGISTERS ? 0 : 2 * ROWS_BYTES;
    static constexpr int STAGES_END = STAGES_AT + STAGES * STAGE_BYTES;
    static constexpr int SHARED_BYTES = STAGES_END > 2 * ROWS_BYTES ? STAGES_END : 2 * ROWS_BYTES;
};

template <class plan> struct backward_query_state {
    struct left_rows<plan::D, plan::M, plan::IN_REGISTERS> q, dout;
    float dq[plan::M][plan::D / 8][4];
    float lse_log2[plan::M][2], delta[plan::M][2];
    uint32_t step; // of dropout
};

// Sets lse log2(e) and delta = rowsum(dO O) of the warp's rows from first_row on, in `state` (0 past T) and in a.rows.
template <class plan>
DEVICE_FUNCTION void backward_rows(struct backward_query_state<plan> &state, const typename plan::arguments &a,
                                   const struct head_views &view, int64_t head, int first_row) {
    const int t = (int)threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < plan::M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = first_row + lane_row() + fragment_row(m, 2 * half);
            float delta = 0;
            if (row < a.T)
#pragma unroll
                for (int piece = t; piece < plan::D / PACK; piece += 4) {
                    if (plan::PADDED && PACK * piece >= a.head_dim)
                        break;
                    const int64_t at = view.out_offset + (int64_t)row * a.out_stride + piece * PACK;
                    packed_check(a.out + at, false);
                    packed_check(a.dout + at, false);
                    const uint4 out = *(const uint4 *)(a.out + at), dout = *(const uint4 *)(a.dout + at);
                    const uint32_t x[4] = {out.x, out.y, out.z, out.w}, y[4] = {dout.x, dout.y, dout.z, dout.w};
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        if (FP32) {
                            delta = fmaf(__uint_as_float(x[i]), __uint_as_float(y[i]), delta);
                            continue;
                        }
                        delta = fmaf(__uint_as_float(x[i] << 16), __uint_as_float(y[i] << 16), delta);
                        delta = fmaf(__uint_as_float(x[i] & 0xffff0000u), __uint_as_float(y[i] & 0xffff0000u), delta);
                    }
                }
            delta += __shfl_xor_sync(0xffffffffu, delta, 1);
            delta += __shfl_xor_sync(0xffffffffu, delta, 2);
            const float lse_log2 = row < a.T ? a.lse[head * a.T + row] * LOG2E : 0;
            if (t == 0 && row < a.T)
                a.rows[head * a.T + row] = make_float2(lse_log2, delta);
            state.lse_log2[m][half] = lse_log2;
            state.delta[m][half] = delta;
        }
}

// Adds dS K of one tile of keys, without the scale, to state.dq, for the warp's rows from first_row on. token is the
// row of the sequence's first token. stage: the shared-memory address of K, loaded, with V TILE_BYTES after it.
template <bool MASKED, class plan>
DEVICE_FUNCTION void backward_query_tile(struct backward_query_state<plan> &state, const typename plan::arguments &a,
                                         int64_t token, int64_t head, int first_row, int first_key, uint32_t stage) {
    constexpr int D = plan::D, M = plan::M, N = plan::CHUNK / 8;
    const float scale_log2 = score_unit(a) * LOG2E, dropout_scale = 1.0f / (1.0f - a.dropout.p);
    const uint32_t keys_right = origin_right<D>(stage), keys_down = origin_rows<D>(stage);
    const uint32_t values_right = origin_right<D>(stage + plan::TILE_BYTES);
    const uint64_t element = (uint64_t)(head * a.T + first_row + lane_row()) * (uint64_t)a.T +
                             (uint64_t)(first_key + lane_column()); // for dropout
    int first_seen[M][2]; // by each row of this lane, as seen from its columns
    if constexpr (MASKED && plan::SPANS)
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                first_seen[m][half] = first_key_of<plan>(a, token, first_row + lane_row() + fragment_row(m, 2 * half)) -
                                      first_key - lane_column();
#pragma unroll(plan::UNROLL)
    for (int chunk = 0; chunk < plan::KEYS; chunk += plan::CHUNK) {
        if (MASKED && first_key + chunk > first_row + 16 * M - 1)
            break; // no row of this warp sees the chunk
        if constexpr (MASKED && plan::SPANS)
            if (first_key + chunk + plan::CHUNK <= first_key_of<plan>(a, token, first_row))
                continue; // no row of this warp sees a key as early as these
        struct dropout_bits<M, plan::CHUNK> kept;
        if (plan::DROPOUT)
            kept.make(a.dropout, state.step, element + chunk, 1, (uint64_t)a.T);
        float s[M][N][4], dp[M][N][4];
        multiply_both<D, M, N>(s, dp, state.q, state.dout, keys_right, values_right, chunk);
        const int row = first_row - first_key - chunk + lane_row() - lane_column(); // as seen from the column
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float mask = plan::DROPOUT ? kept.mask(m, n, i, dropout_scale) : 1.0f;
                    bool visible = !MASKED || fragment_column(n, i) - fragment_row(m, i) <= row;
                    if constexpr (MASKED && plan::SPANS)
                        visible = visible && chunk + fragment_column(n, i) >= first_seen[m][i / 2];
                    s[m][n][i] = backward_one<plan>(a, s[m][n][i], dp[m][n][i], scale_log2, state.lse_log2[m][i / 2],
                                                    state.delta[m][i / 2], mask, visible)
                                     .ds;
                }
        accumulate<D, M, D / 8, plan::CHUNK>(state.dq, s, keys_down, chunk);
    }
}

// Adds a tile of keys to state.dq by backward_query_tile, when its K and V are loaded. With two stages the next tile's
// K and V are loaded meanwhile; with one stage, this tile's are loaded first. All threads must call this.
template <bool MASKED, class plan>
DEVICE_FUNCTION void backward_query_step(struct backward_query_state<plan> &state, const typename plan::arguments &a,
                                         const struct head_views &view, int64_t head, int first_row, int tile,
                                         int tiles, uint32_t stages) {
    constexpr int KEYS = plan::KEYS;
    const int warp_row = 16 * plan::M * ((int)threadIdx.x / 32);
    const int next = plan::STAGES == 1 ? tile : tile + 1;
    const uint32_t stage = stages + (uint32_t)(tile % plan::STAGES * plan::STAGE_BYTES);
    const uint32_t next_stage = stages + (uint32_t)(next % plan::STAGES * plan::STAGE_BYTES);
    if (plan::STAGES > 1)
        cp_async_wait<0>();
    __syncthreads(); // this tile is there, and what lies where the next one goes has been read
    if (next < tiles) {
        load_tile<plan, KEYS>(next_stage, view.k, a.qkv_stride, next * KEYS, a);
        load_tile<plan, KEYS>(next_stage + plan::TILE_BYTES, view.v, a.qkv_stride, next * KEYS, a);
    }
    cp_async_commit();
    if (plan::STAGES == 1) {
        cp_async_wait<0>();
        __syncthreads();
    }
    backward_query_tile<MASKED, plan>(state, a, view.token, head, first_row + warp_row, tile * KEYS, stage);
}

// Computes dQ and a.rows of plan::QUERIES queries of one head per block. The blocks with the most keys start first.
template <class plan>
static __global__ void __launch_bounds__(plan::THREADS, plan::BLOCKS)
    flash_backward_query_kernel(const typename plan::arguments a) {
    constexpr int D = plan::D, QUERIES = plan::QUERIES, KEYS = plan::KEYS;
    const int first_row = (int)(gridDim.x - 1 - blockIdx.x) * QUERIES, h = (int)blockIdx.y, b = (int)blockIdx.z;
    const int64_t head = (int64_t)b * a.H + h;
    const int warp_row = 16 * plan::M * ((int)threadIdx.x / 32);
    const struct head_views view = view_head<plan>(a, b, h);
    const uint32_t shared = shared_memory(), stages = shared + plan::STAGES_AT;

    load_tile<plan, QUERIES>(shared, view.q, a.qkv_stride, first_row, a);
    load_tile<plan, QUERIES>(shared + plan::ROWS_BYTES, a.dout + view.out_offset, a.out_stride, first_row, a);
    cp_async_commit();
    struct backward_query_state<plan> state;
    state.step = plan::DROPOUT ? (uint32_t)dropout_step(a.dropout) : 0;
    clear<plan::M, D / 8>(state.dq);
    backward_rows<plan>(state, a, view, head, first_row + warp_row);
    cp_async_wait<0>();
    __syncthreads();
    state.q.open(shared, warp_row);
    state.dout.open(shared + plan::ROWS_BYTES, warp_row);
    const int end = first_row + QUERIES < a.T ? first_row + QUERIES : a.T, tiles = (end + KEYS - 1) / KEYS;
    int tile = 0;
    if constexpr (plan::SPANS)
        tile = first_key_of<plan>(a, view.token, first_row) / KEYS;
    if (plan::STAGES > 1) {
        __syncthreads(); // Q and dO have been read
        const uint32_t stage = stages + (uint32_t)(tile % plan::STAGES * plan::STAGE_BYTES);
        load_tile<plan, KEYS>(stage, view.k, a.qkv_stride, tile * KEYS, a);
        load_tile<plan, KEYS>(stage + plan::TILE_BYTES, view.v, a.qkv_stride, tile * KEYS, a);
        cp_async_commit();
    }

    if constexpr (plan::SPANS) {
        const int all_see = first_key_of<plan>(a, view.token, end - 1); // every query sees the keys from here
        for (; tile < tiles; tile++)
            if ((tile + 1) * KEYS - 1 > first_row || tile * KEYS < all_see)
                backward_query_step<true, plan>(state, a, view, head, first_row, tile, tiles, stages);
            else
                backward_query_step<false, plan>(state, a, view, head, first_row, tile, tiles, stages);
    } else {
        for (; tile < tiles && (tile + 1) * KEYS - 1 <= first_row; tile++)
            backward_query_step<false, plan>(state, a, view, head, first_row, tile, tiles, stages);
        for (; tile < tiles; tile++)
            backward_query_step<true, plan>(state, a, view, head, first_row, tile, tiles, stages);
    }

    __syncthreads();
    scale_all<plan::M, D / 8>(state.dq, a.scale);
    const uint32_t zero = zero_after<plan::LATE>(tile);
    const struct head_views to = plan::LATE ? view_head<plan>(a, (int)(b + zero), (int)(h + zero)) : view;
    store_rows<plan, 16 * plan::M, D>(a.dqkv + to.qkv_offset, a.qkv_stride, (int)(first_row + zero) + warp_row, a,
                                      shared, warp_row, 0, state.dq);
}

// --- Backward: dK and dV ------------------------------------------------------------------------------------------

// S and dP are made as keys x queries: so P and dS, in registers, are left operands of dV += P^T dO, dK += dS^T Q.
template <int COLUMNS_OF_TILE, bool WITH_DROPOUT, bool WITH_PADDING, flash_scores SCORES> struct backward_key_plan {
    static constexpr int D = COLUMNS_OF_TILE;
    static constexpr bool DROPOUT = WITH_DROPOUT, PADDED = WITH_PADDING;
    static constexpr bool SPANS = SCORES != FLASH_CAUSAL, ANY = SCORES == FLASH_ANY;
    typedef typename flash_arguments_for<SCORES>::type arguments;
    static constexpr int M = D == 64 && !FP32 ? 2 : 1; // 16-row blocks of a warp
    // At 256 two warps share keys: each makes S and dP, and half of dK's and dV's columns, for lack of registers.
    static constexpr int KEY_WARPS = FP32                  ? D == 256 ? 2 : 4
                                     : D == 64 || D == 256 ? 4
                                                           : 8,
                         COLUMN_WARPS = D == 256 ? 2 : 1;
    static constexpr int WARPS = KEY_WARPS * COLUMN_WARPS, THREADS = 32 * WARPS, BLOCKS = D == 64 ? 2 : 1;
    static constexpr int COLUMNS = D / COLUMN_WARPS;
    static constexpr int KEYS = 16 * M * KEY_WARPS; // of a block
    // SMALL: smaller tiles. LATE: see zero_after(). AGAIN and FEWER: more values are computed again, not kept. ptxas of
    // CUDA 13.0 needs all four to spill nothing. QUERIES may differ from the host's, which asks for more shared memory.
    static constexpr bool SMALL = HIDE_MORE && D == 128 && (ANY || (SPANS && !PADDED));
    static constexpr int QUERIES = (D == 256 || SMALL ? 32 : 64) / (FP32 ? 2 : 1); // of a tile
    static constexpr int CHUNK = 16; // queries whose S and dP are in registers at a time
    static constexpr int UNROLL = FP32 || D == 256 || DROPOUT ? 1 : 4; // chunks
    static constexpr int STAGES = FP32 || D == 256 ? 1 : 2;
    static constexpr bool IN_REGISTERS = !FP32 && D < 256; // K and V
    static constexpr bool LATE = FP32 && (D == 256 || (D == 128 && (ANY || (!DROPOUT && !PADDED))));
    static constexpr bool AGAIN =
        HIDE_MORE && (SMALL || (D == 128 && !DROPOUT && !PADDED) || (D == 256 && DROPOUT && !SPANS));
    static constexpr bool FEWER = (SPANS && HIDE_MORE) || (FP32 && D == 256 && DROPOUT);
    static constexpr int MEETINGS = D < 128 ? 0 : HIDE_MORE ? 2 : 1; // see accumulate()
    static constexpr int KEYS_BYTES = KEYS * ELEMENT * D, TILE_BYTES = QUERIES * ELEMENT * D;
    static constexpr int STAGE_BYTES = 2 * TILE_BYTES + QUERIES * (int)sizeof(float2);
    static constexpr int STAGES_AT = IN_REGISTERS ? 0 : 2 * KEYS_BYTES;
    static constexpr int STAGES_END = STAGES_AT + STAGES * STAGE_BYTES;
    static constexpr int SHARED_BYTES = STAGES_END > 2 * KEYS_BYTES ? STAGES_END : 2 * KEYS_BYTES;
};

template <class plan> struct backward_key_state {
    struct left_rows<plan::D, plan::M, plan::IN_REGISTERS> k, v;
    float dk[plan::M][plan::COLUMNS / 8][4], dv[plan::M][plan::COLUMNS / 8][4];
    uint32_t step; // of dropout
};

// The queries that a block of keys meets: in each head of its group, from the diagonal to the last that sees a key.
struct query_steps {
    int b, first_head, first_tile, tiles; // tiles: of each head, from first_tile on
    int all_seen;                         // the last query that sees every key of the block; T - 1 without spans
};

// Starts copying Q, dO and a.rows of a step, which is a tile of queries of one head, to `stage` in shared memory, with
// 0 past T. All threads must call this; the caller commits.
template <class plan>
DEVICE_FUNCTION void load_queries(const typename plan::arguments &a, const struct query_steps &steps, int step,
                                  uint32_t stage) {
    constexpr int QUERIES = plan::QUERIES;
    const int h = steps.first_head + step / steps.tiles, first = (steps.first_tile + step % steps.tiles) * QUERIES;
    const struct head_views view = view_head<plan>(a, steps.b, h);
    load_tile<plan, QUERIES>(stage, view.q, a.qkv_stride, first, a);
    load_tile<plan, QUERIES>(stage + plan::TILE_BYTES, a.dout + view.out_offset, a.out_stride, first, a);
    const int row = first + (int)threadIdx.x;
    if ((int)threadIdx.x < QUERIES)
        cp_async_8(stage + 2 * plan::TILE_BYTES + 8 * threadIdx.x,
                   a.rows + ((int64_t)steps.b * a.H + h) * a.T + (row < a.T ? row : a.T - 1), row < a.T);
}

// Sets last_seen[m][half] to the last query that sees this lane's key (m, half), minus first_query and lane_column().
template <class plan>
DEVICE_FUNCTION void last_queries(int last_seen[plan::M][2], const typename plan::arguments &a, int64_t token,
                                  int first_key, int first_query) {
#pragma unroll
    for (int m = 0; m < plan::M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            last_seen[m][half] = last_query_of<plan>(a, token, first_key + lane_row() + fragment_row(m, 2 * half)) -
                                 first_query - lane_column();
}

// Adds P^T dO to state.dv and dS^T Q, without the scale, to state.dk, for the warp's keys from first_key on and a tile
// of queries. token: the row of the sequence's first token. stage: where Q, then dO and a.rows lie, loaded.
template <bool MASKED, class plan>
DEVICE_FUNCTION void backward_key_tile(struct backward_key_state<plan> &state, const typename plan::arguments &a,
                                       int64_t token, int64_t head, int first_key, int first_query, uint32_t stage) {
    constexpr int D = plan::D, M = plan::M, N = plan::CHUNK / 8, COLUMNS = plan::COLUMNS;
    const float scale_log2 = score_unit(a) * LOG2E, dropout_scale = 1.0f / (1.0f - a.dropout.p);
    const uint32_t queries_right = origin_right<D>(stage), douts_right = queries_right + plan::TILE_BYTES;
    const uint32_t rows = stage + 2 * plan::TILE_BYTES + 16 * ((uint32_t)thread_index<(plan::AGAIN)>() % 4);
    const uint64_t element = (uint64_t)(head * a.T + first_query + lane_column()) * (uint64_t)a.T +
                             (uint64_t)(first_key + lane_row()); // for dropout
    // The part of the columns that is this warp's begins a multiple of 128 bytes into a row.
    const uint32_t warp_bytes = (uint32_t)thread_index<(plan::AGAIN)>() / 32 / plan::KEY_WARPS * (ELEMENT * COLUMNS);
    const uint32_t queries_down = origin_down<D>(stage) + warp_bytes;
    const uint32_t douts_down = queries_down + plan::TILE_BYTES;
    int last_seen[M][2];
    if constexpr (MASKED && plan::SPANS && !plan::FEWER)
        last_queries<plan>(last_seen, a, token, first_key, first_query);
#pragma unroll(plan::UNROLL)
    for (int chunk = 0; chunk < plan::QUERIES; chunk += plan::CHUNK) {
        if (MASKED && first_query + chunk + plan::CHUNK - 1 < first_key)
            continue; // these queries see no key of this warp
        if constexpr (MASKED && plan::SPANS)
            if (first_query + chunk > last_query_of<plan>(a, token, first_key + 16 * M - 1))
                break; // from here on no query sees a key of this warp
        const int query = first_query + chunk - first_key + lane_column() - lane_row(); // as seen from the key
        struct dropout_bits<M, plan::CHUNK> kept;
        if (plan::DROPOUT)
            kept.make(a.dropout, plan::SMALL ? (uint32_t)dropout_step(a.dropout) : state.step,
                      element + (uint64_t)chunk * (uint64_t)a.T, (uint64_t)a.T, 1);
        float s[M][N][4], dp[M][N][4];
        const uint32_t right = FP32 ? origin_right<D, true>(stage) : queries_right; // see thread_index()
        const uint32_t dright = FP32 ? right + plan::TILE_BYTES : douts_right;
        multiply_both<D, M, N>(s, dp, state.k, state.v, right, dright, chunk);
        if constexpr (MASKED && plan::SPANS && plan::FEWER) // no register holds it before
            last_queries<plan>(last_seen, a, token, first_key, first_query);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const struct float_x4 row = load_shared_floats(rows + (uint32_t)(8 * (chunk + 8 * n)));
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float mask = plan::DROPOUT ? kept.mask(m, n, i, dropout_scale) : 1.0f;
                    bool visible = !MASKED || fragment_row(m, i) - fragment_column(n, i) <= query;
                    if constexpr (MASKED && plan::SPANS)
                        visible = visible && chunk + fragment_column(n, i) <= last_seen[m][i / 2];
                    const struct backward_element one = backward_one<plan>(
                        a, s[m][n][i], dp[m][n][i], scale_log2, row.x[i % 2 * 2], row.x[i % 2 * 2 + 1], mask, visible);
                    s[m][n][i] = one.p;
                    dp[m][n][i] = one.ds;
                }
        }
        const uint32_t down = FP32 ? origin_rows<D, true>(stage) + warp_bytes : queries_down;
        accumulate<D, M, COLUMNS / 8, plan::CHUNK, plan::MEETINGS>(state.dv, s,
                                                                   FP32 ? down + plan::TILE_BYTES : douts_down, chunk);
        accumulate<D, M, COLUMNS / 8, plan::CHUNK, plan::MEETINGS>(state.dk, dp, down, chunk);
    }
}

// Adds a step's queries to `state` by backward_key_tile, when they are loaded. With two stages the next step's queries
// are loaded meanwhile; with one stage, this step's are loaded first. All threads must call this.
template <class plan>
DEVICE_FUNCTION void backward_key_step(struct backward_key_state<plan> &state, const typename plan::arguments &a,
                                       const struct query_steps &steps, int step, int count, int first_key,
                                       uint32_t stages) {
    const int warp_key = first_key + 16 * plan::M * (thread_index<(plan::AGAIN)>() / 32 % plan::KEY_WARPS);
    const int next = plan::STAGES == 1 ? step : step + 1;
    const uint32_t stage = stages + (uint32_t)(step % plan::STAGES * plan::STAGE_BYTES);
    if (plan::STAGES > 1)
        cp_async_wait<0>();
    __syncthreads(); // this step's tiles are there, and what lies where the next ones go has been read
    if (next < count)
        load_queries<plan>(a, steps, next, stages + (uint32_t)(next % plan::STAGES * plan::STAGE_BYTES));
    cp_async_commit();
    if (plan::STAGES == 1) {
        cp_async_wait<0>();
        __syncthreads();
    }
    const int64_t head = (int64_t)steps.b * a.H + steps.first_head + step / steps.tiles;
    const int first_query = (steps.first_tile + step % steps.tiles) * plan::QUERIES;
    const int64_t token = (int64_t)steps.b * a.T;
    if constexpr (plan::FEWER) // one body, for either kind of tile, takes fewer registers
        backward_key_tile<true, plan>(state, a, token, head, warp_key, first_query, stage);
    else if (first_query < first_key + plan::KEYS - 1 ||
             (plan::SPANS && first_query + plan::QUERIES - 1 > steps.all_seen))
        backward_key_tile<true, plan>(state, a, token, head, warp_key, first_query, stage);
    else
        backward_key_tile<false, plan>(state, a, token, head, warp_key, first_query, stage);
}

// Computes dK and dV of plan::KEYS keys of one KV head per block. Launch it after flash_backward_query_kernel, which
// fills a.rows. The blocks with the most queries start first.
template <class plan>
static __global__ void __launch_bounds__(plan::THREADS, plan::BLOCKS)
    flash_backward_key_kernel(const typename plan::arguments a) {
    constexpr int KEYS = plan::KEYS;
    const int first_key = (int)blockIdx.x * KEYS, group = (int)blockIdx.y, b = (int)blockIdx.z, heads = a.H / a.Hkv;
    const int warp_key = 16 * plan::M * ((int)threadIdx.x / 32 % plan::KEY_WARPS);
    const int warp_column = (int)threadIdx.x / 32 / plan::KEY_WARPS * plan::COLUMNS;
    const struct head_views view = view_head<plan>(a, b, group * heads);
    const uint32_t shared = shared_memory(), stages = shared + plan::STAGES_AT;
    const int end = plan::SPANS ? last_query_of<plan>(a, view.token, first_key + KEYS - 1) + 1 : a.T;
    const struct query_steps steps = {b, group * heads, first_key / plan::QUERIES,
                                      (end + plan::QUERIES - 1) / plan::QUERIES - first_key / plan::QUERIES,
                                      last_query_of<plan>(a, view.token, first_key)};

    load_tile<plan, KEYS>(shared, view.k, a.qkv_stride, first_key, a);
    load_tile<plan, KEYS>(shared + plan::KEYS_BYTES, view.v, a.qkv_stride, first_key, a);
    cp_async_commit();
    struct backward_key_state<plan> state;
    state.step = plan::DROPOUT && !plan::SMALL ? (uint32_t)dropout_step(a.dropout) : 0;
    clear<plan::M, plan::COLUMNS / 8>(state.dk);
    clear<plan::M, plan::COLUMNS / 8>(state.dv);
    cp_async_wait<0>();
    __syncthreads();
    state.k.open(shared, warp_key);
    state.v.open(shared + plan::KEYS_BYTES, warp_key);
    if (plan::STAGES > 1) {
        __syncthreads(); // K and V have been read
        load_queries<plan>(a, steps, 0, stages);
        cp_async_commit();
    }
    int step = 0;
    for (; step < heads * steps.tiles; step++)
        backward_key_step<plan>(state, a, steps, step, heads * steps.tiles, first_key, stages);

    __syncthreads();
    scale_all<plan::M, plan::COLUMNS / 8>(state.dk, a.scale);
    if constexpr (plan::LATE) {
        const uint32_t zero = zero_after<true>(step);
        const struct head_views to = view_head<plan>(a, (int)(b + zero), (int)(group * heads + zero));
        const int late_key = 16 * plan::M * (int)((threadIdx.x + zero) / 32 % plan::KEY_WARPS);
        const int row = (int)(first_key + zero) + ((plan::SMALL && plan::ANY) || !HIDE_MORE ? late_key : warp_key);
        floatX *dk = a.dqkv + (to.k - a.qkv), *dv = dk + (int)(a.Hkv + zero) * head_size<plan>(a);
        store_rows<plan, 16 * plan::M, plan::COLUMNS>(dk, a.qkv_stride, row, a, shared, warp_key, warp_column,
                                                      state.dk);
        store_rows<plan, 16 * plan::M, plan::COLUMNS>(dv, a.qkv_stride, row, a, shared + plan::KEYS_BYTES, warp_key,
                                                      warp_column, state.dv);
    } else {
        floatX *dk = a.dqkv + (view.k - a.qkv), *dv = a.dqkv + (view.v - a.qkv);
        store_rows<plan, 16 * plan::M, plan::COLUMNS>(dk, a.qkv_stride, first_key + warp_key, a, shared, warp_key,
                                                      warp_column, state.dk);
        store_rows<plan, 16 * plan::M, plan::COLUMNS>(dv, a.qkv_stride, first_key + warp_key, a,
                                                      shared + plan::KEYS_BYTES, warp_key, warp_column, state.dv);
    }
}
