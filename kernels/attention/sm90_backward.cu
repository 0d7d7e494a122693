// Backward of flash attention for Hopper, by TMA and wgmma. Blocks of keys run over queries as in FlashAttention-2
// (arXiv 2307.08691); a warpgroup copies for those that multiply, as in FlashAttention-3 (arXiv 2407.08608).
//   S = Q K^T, P = exp2(scale log2(e) S - lse), dP = dO V^T, dS = P (dP - delta), delta = rowsum(dO O)
//   dV = P^T dO, dK = scale dS^T Q, dQ = scale dS K
// Three kernels: sm90_backward_rows_kernel makes delta, sm90_backward_kernel the products, and
// sm90_backward_queries_kernel brings dQ from fp32 to where it belongs. delta has a kernel of its own: cuBLAS makes dO,
// and if the middle kernel made delta, it would read O once for each block of keys. The design of this file:
// - A block of the middle kernel holds a tile of keys of one KV head and runs over the queries of all heads of the
//   group, from the diagonal to the last that sees a key: dK and dV stay in registers, whatever the group's size.
// - S^T and dP^T are made with keys as rows, so that P^T and dS^T are left operands of dV and dK in registers. Only dS
//   goes through shared memory, for dQ. At head dim 256 dK and dV of 64 keys need both warpgroups' registers: each
//   makes S^T and dP^T of half the queries, and half the columns of dK, dV and dQ; P goes through shared memory too.
// - dQ of a tile is the sum of what the blocks of keys up to its diagonal add to it in memory, by bulk copies that add.
//   The order is fixed, the diagonal's block last, and the first block stores. A counter for each tile says whose turn
//   it is. Where any order is allowed, the rows' kernel fills dQ with zeroes, and blocks begin at different heads.
// - RoPE is undone on dQ and dK in fp32, where dQ and dK's accumulators are scaled: no kernel of its own reads dqkv.
// - Nobody waits for a block that may not have started: a block's turn comes only after blocks with earlier keys of its
//   KV head, which have lower indices. GPUs start blocks in the order of their index (CUDA does not promise it, but
//   one-pass scans rely on it), so that there is no deadlock, however few fit. It also starts long blocks first.
// - A step is a tile of one query head, and all heads of a tile follow each other. Blocks begin at the last tile and
//   descend to their diagonal, so that blocks that start together wait only for the step by which one follows another.
// - KV heads are worked on in sections, whose Q, dO and dQ stay in the L2 cache: as many heads as it holds or, where
//   that is fewer, so many that about eight blocks of each head, a gang, are at work at the same time. A gang's blocks
//   are at nearly the same tile, so that all but the first find it in the cache. They end one after another, as many
//   steps apart as a tile has heads. Where that is far, and there are no tables of first keys, every other gang
//   ascends: its first block starts at its diagonal, and is at the next block's diagonal when that block starts.
// - Queries past T have P = 0 by an lse of infinity. Keys past T lie above every diagonal; without one they are masked.
#if defined(TARGET_CUDA) && defined(PRECISION_BF16)
#include "kernels/attention/sm90_backward_plan.cuh" // sm90_backward_plan, struct sm90_backward_arguments

// --- Before: lse and delta of each row, counters ------------------------------------------------------------------

enum { SM90_ROWS_THREADS = 256, SM90_THREADS_A_ROW = 8 };

// Writes each row's lse and delta = rowsum(dO O), past T infinity and 0. Zeroes a.counters and, with any_order, a.dq.
template <class plan>
static __global__ void __launch_bounds__(SM90_ROWS_THREADS)
    sm90_backward_rows_kernel(const __grid_constant__ struct sm90_backward_arguments a) {
    constexpr int D = plan::D, QUERIES = plan::QUERIES;
    const unsigned index = blockIdx.x * (SM90_ROWS_THREADS / SM90_THREADS_A_ROW) + threadIdx.x / SM90_THREADS_A_ROW;
    const int lane = (int)threadIdx.x % SM90_THREADS_A_ROW, padded = a.tiles * QUERIES, b = (int)blockIdx.y;
    const int h = (int)(index % (unsigned)a.H), t = (int)(index / (unsigned)a.H);
    if (lane == 0 && index < (unsigned)(a.H * a.tiles))
        a.counters[(int64_t)b * a.H * a.tiles + index] = 0;
    float delta = 0;
    if (t < a.T)
#pragma unroll
        for (int piece = lane; piece < D / 8; piece += SM90_THREADS_A_ROW) {
            const int64_t at = (((int64_t)b * a.T + t) * a.H + h) * D + piece * 8;
            packed_check(a.out + at, false);
            packed_check(a.dout_rows + at, false);
            const uint4 out = *(const uint4 *)(a.out + at), dout = *(const uint4 *)(a.dout_rows + at);
            const uint32_t x[4] = {out.x, out.y, out.z, out.w}, y[4] = {dout.x, dout.y, dout.z, dout.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                delta = fmaf(__uint_as_float(x[i] << 16), __uint_as_float(y[i] << 16), delta);
                delta = fmaf(__uint_as_float(x[i] & 0xffff0000u), __uint_as_float(y[i] & 0xffff0000u), delta);
            }
        }
#pragma unroll
    for (int i = 1; i < SM90_THREADS_A_ROW; i *= 2)
        delta += __shfl_xor_sync(0xffffffffu, delta, i);
    if (t >= padded)
        return;
    const int64_t head = (int64_t)b * a.H + h;
    if (a.any_order)
#pragma unroll
        for (int i = lane; i < D / 4; i += SM90_THREADS_A_ROW) {
            float *dq = a.dq + (head * padded + t) * D + 4 * i;
            packed_check(dq, true);
            *(float4 *)dq = make_float4(0, 0, 0, 0);
        }
    if (lane > 0)
        return;
    float *row = a.rows + (head * a.tiles + t / QUERIES) * (2 * QUERIES) + t % QUERIES;
    row[0] = t < a.T ? a.lse[head * a.T + t] : INFINITY;
    row[QUERIES] = delta;
}

// --- The producers ------------------------------------------------------------------------------------------------

// Starts copying a tile in boxes of `columns` columns. One thread calls, once `barrier` expects it. again: L2 keeps it.
template <class operand, int D>
DEVICE_FUNCTION void sm90_load_chunks(uint32_t tile, const struct tensor_map *map, uint32_t barrier, int columns,
                                      int head, int first, int b, bool again) {
#pragma unroll
    for (int c = 0; c < D; c += columns) {
        const uint32_t to = tile + (uint32_t)(c / columns * operand::CHUNK_BYTES);
        if (again)
            tma_load_4d(to, map, barrier, c, head, first, b, l2_evict_last_anew());
        else
            tma_load_4d(to, map, barrier, c, head, first, b);
    }
}

// Loads K, then each step's Q, lse, delta and dO; V after the first Q, since S doesn't need it. One thread calls this.
template <class plan>
DEVICE_FUNCTION void sm90_backward_load(const struct sm90_backward_arguments &a,
                                        const struct sm90_backward_block &block, uint32_t shared) {
    constexpr int D = plan::D, QUERIES = plan::QUERIES;
    struct sm90_pipeline<plan::QUERY_STAGES> queries = {
        shared + plan::QUERY_BARRIERS_AT, 0
    };
    struct sm90_pipeline<plan::DOUT_STAGES> douts = {
        shared + plan::DOUT_BARRIERS_AT, 0
    };
    const uint32_t keys_full = shared + plan::KEYS_FULL_AT, values_full = shared + plan::VALUES_FULL_AT;
    mbarrier_arrive_expect(keys_full, plan::KEYS_BYTES);
    sm90_load_chunks<typename plan::keys, D>(shared + plan::KEYS_AT, &a.k, keys_full, plan::KEY_CHUNK,
                                             a.H + block.group, block.first_key, block.b, false);
    for (int tile = block.first_tile; tile != block.end_tile; tile += block.step)
        for (int i = 0; i < a.heads; i++, queries.use++, douts.use++) {
            const int h = sm90_backward_head(a, block, i);
            queries.wait_empty();
            mbarrier_arrive_expect(queries.full(), plan::TILE_BYTES + plan::ROWS_BYTES);
            sm90_load_chunks<typename plan::queries, D>(shared + plan::QUERIES_AT + queries.stage() * plan::TILE_BYTES,
                                                        &a.q, queries.full(), plan::CHUNK, h, tile * QUERIES, block.b,
                                                        true);
            bulk_load(shared + plan::ROWS_AT + queries.stage() * plan::ROWS_BYTES,
                      a.rows + (uint64_t)(unsigned)((block.b * a.H + h) * a.tiles + tile) * (2 * QUERIES),
                      plan::ROWS_BYTES, queries.full());
            if (queries.use == 0) {
                mbarrier_arrive_expect(values_full, plan::KEYS_BYTES);
                sm90_load_chunks<typename plan::values, D>(shared + plan::VALUES_AT, &a.v, values_full, plan::CHUNK,
                                                           a.H + a.Hkv + block.group, block.first_key, block.b, false);
            }
            douts.wait_empty();
            mbarrier_arrive_expect(douts.full(), plan::TILE_BYTES);
            sm90_load_chunks<typename plan::queries, D>(shared + plan::DOUT_AT + douts.stage() * plan::TILE_BYTES,
                                                        &a.dout, douts.full(), plan::CHUNK, h, tile * QUERIES, block.b,
                                                        true);
        }
}

// Adds dQ of the block's even steps, or with `odd` its odd steps, from shared to global memory. Waits for the block's
// turn, unless any_order; the first turn stores. Two threads call, with odd 0 and 1, because waiting for the turn and
// for the copy takes longer than a step. Up to head dim 128 each has a buffer of its own.
template <class plan>
DEVICE_FUNCTION void sm90_backward_reduce(const struct sm90_backward_arguments &a,
                                          const struct sm90_backward_block &block, uint32_t shared, int odd) {
    int turn = a.any_order ? -1 : block.number; // the number of blocks that add before; -1: any order
    const uint32_t buffer = (uint32_t)odd % plan::DQ_BUFFERS, full = shared + plan::DQ_FULL_AT + 16 * (uint32_t)odd;
    const uint32_t empty = shared + plan::DQ_EMPTY_AT + 16 * buffer;
    uint32_t parity = 0;
    int i = odd; // the head of a tile, or of the next one
    for (int tile = block.first_tile; tile != block.end_tile; tile += block.step) {
        if (plan::SPANS && !a.any_order)
            turn = block.number -
                   sm90_first_key_of<plan>(a, (unsigned)block.b, (unsigned)(tile * plan::QUERIES)) / plan::KEYS;
        for (; i < a.heads; i += 2) {
            const int at = (block.b * a.H + sm90_backward_head(a, block, i)) * a.tiles + tile;
            float *dq = a.dq + (int64_t)at * (plan::QUERIES * plan::D);
            if (turn > 0) {
                wait_acquire(a.counters + at, turn);
                async_proxy_fence_global();
            }
#pragma unroll
            for (int piece = 0; piece < plan::PIECES; piece++, parity ^= 1) {
                mbarrier_wait(full, parity);
                mbarrier_wait(full + 8, parity);
#pragma unroll
                for (int w = 0; w < 2; w++) {
                    float *to = dq + (w * plan::PIECES + piece) * plan::PIECE_FLOATS;
                    const uint32_t from =
                        shared + plan::DQ_AT + buffer * plan::DQ_BUFFER_BYTES + (uint32_t)(w * 4 * plan::PIECE_FLOATS);
                    if (turn == 0)
                        bulk_store(to, from, 4 * plan::PIECE_FLOATS);
                    else
                        bulk_reduce_add(to, from, 4 * plan::PIECE_FLOATS, l2_evict_last_anew());
                }
                bulk_commit();
                bulk_wait_read<0>();
                mbarrier_arrive(empty);
                mbarrier_arrive(empty + 8);
            }
            if (turn >= 0) {
                bulk_wait<0>();
                async_proxy_fence_global();
                store_release(a.counters + at, turn + 1);
            }
        }
        i -= a.heads;
    }
}

// --- The warpgroups that multiply ---------------------------------------------------------------------------------

template <class plan> struct sm90_backward_state {
    uint32_t shared;
    int warpgroup, step;
    int keys; // where a.full, the keys from the block's first on up to T: more are masked; else KEYS
    float scale_log2;
    float dk[plan::COLUMNS / 2], dv[plan::COLUMNS / 2];
    float s[plan::PART / 2];                                        // S^T of the step, then P^T
    struct word_x4 p[plan::PART / 16], ds[plan::PART / 16];         // P and dS of the step, as left operands
    struct word_x4 v[plan::VALUES_IN_REGISTERS ? plan::D / 16 : 1]; // V, as a left operand
};

// Returns the pipeline of Q, lse and delta at a step.
template <class plan>
DEVICE_FUNCTION sm90_pipeline<plan::QUERY_STAGES> sm90_backward_queries_of(uint32_t shared, int step) {
    const sm90_pipeline<plan::QUERY_STAGES> queries = {shared + plan::QUERY_BARRIERS_AT, step};
    return queries;
}
// Returns the pipeline of dO at a step.
template <class plan>
DEVICE_FUNCTION sm90_pipeline<plan::DOUT_STAGES> sm90_backward_douts_of(uint32_t shared, int step) {
    const sm90_pipeline<plan::DOUT_STAGES> douts = {shared + plan::DOUT_BARRIERS_AT, step};
    return douts;
}

// Loads into `pair`, from shared memory, the lse or delta of two queries side by side; from: the first one's address.
DEVICE_FUNCTION void sm90_load_pair(float pair[2], uint32_t from) {
    const uint64_t words = load_shared_long(from);
    pair[0] = __uint_as_float((uint32_t)words);
    pair[1] = __uint_as_float((uint32_t)(words >> 32));
}

// Sets this thread's s (N / 2), of S^T, to -inf where the key comes after the query. diagonal: query less key of s[0].
template <int N> DEVICE_FUNCTION void sm90_backward_mask(float *s, int diagonal) {
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        if (8 * (i / 2 % 2) - 8 * (i / 4) - i % 2 > diagonal)
            s[i] = -INFINITY;
}
// Sets the scores of keys past T to -inf. left: how many keys from this thread's first on are not past T.
template <int N> DEVICE_FUNCTION void sm90_backward_mask_keys(float *s, int left) {
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        if (8 * (i / 2 % 2) >= left)
            s[i] = -INFINITY;
}
// Sets scores of queries past seen[i] to -inf: the last that sees the thread's key i, less the thread's first query.
template <int N> DEVICE_FUNCTION void sm90_backward_mask_queries(float *s, const int seen[2]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        if (8 * (i / 4) + i % 2 > seen[i / 2 % 2])
            s[i] = -INFINITY;
}
// Loads the lse or delta of this thread's columns to `pairs`, with FIRST. Else sm90_load_now loads each pair when used.
template <int N, bool FIRST> DEVICE_FUNCTION void sm90_load_first(float *pairs /*[N / 4]*/, uint32_t from) {
#pragma unroll
    for (int n = 0; FIRST && n < N / 8; n++)
        sm90_load_pair(pairs + 2 * n, from + (uint32_t)(32 * n));
}
// Gets the thread's pair of lse or delta of block n of 8 columns: from `pairs` with FIRST, else from shared memory.
template <int N, bool FIRST>
DEVICE_FUNCTION void sm90_load_now(float pair[2], const float *pairs, uint32_t from, int n) {
    if (FIRST) {
        pair[0] = pairs[2 * n];
        pair[1] = pairs[2 * n + 1];
    } else {
        sm90_load_pair(pair, from + (uint32_t)(32 * n));
    }
}
// Turns S^T, s (N / 2), into P^T = exp2(scale_log2 S^T - lse). lse is in `pairs` with FIRST, else at address `lse`.
template <int N, bool FIRST>
DEVICE_FUNCTION void sm90_backward_probabilities(float *s, const float *pairs, uint32_t lse, float scale_log2) {
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        float pair[2];
        sm90_load_now<N, FIRST>(pair, pairs, lse, n);
#pragma unroll
        for (int i = 0; i < 4; i++)
            s[4 * n + i] = exp2_approx(fmaf(s[4 * n + i], scale_log2, -pair[i % 2]));
    }
}
// Turns dP^T, dp (N / 2), into dS^T = P^T (dP^T - delta). p is P^T; delta is in `pairs` with FIRST, else at `delta`.
template <int N, bool FIRST>
DEVICE_FUNCTION void sm90_backward_score_gradients(float *dp, const float *p, const float *pairs, uint32_t delta) {
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        float pair[2];
        sm90_load_now<N, FIRST>(pair, pairs, delta, n);
#pragma unroll
        for (int i = 0; i < 4; i++)
            dp[4 * n + i] = p[4 * n + i] * (dp[4 * n + i] - pair[i % 2]);
    }
}
// left (N / 16) = acc, rounded to bf16, as left operands of 16 columns each.
template <int N> DEVICE_FUNCTION void sm90_to_left(struct word_x4 *left, const float *acc) {
#pragma unroll
    for (int k = 0; k < N / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            left[k].x[i] = pack_bf16x2(acc[8 * k + 2 * i], acc[8 * k + 2 * i + 1]);
}
// Stores P^T or dS^T of this warp's 16 keys, words (PART / 16), transposed, to the block's shared tile of P or dS.
template <class plan> DEVICE_FUNCTION void sm90_put_scores(uint32_t tile, int warpgroup, const struct word_x4 *words) {
    const int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32 % 4);
    const int query = lane / 16 * 8 + lane % 8 + (plan::SPLIT_KEYS ? 0 : warpgroup * plan::PART);
    const int key = 16 * warp + lane / 8 % 2 * 8;
    const uint32_t chunk = plan::SPLIT_KEYS ? (uint32_t)(warpgroup * plan::scores::CHUNK_BYTES) : 0;
    const uint32_t at = plan::scores::at(tile + chunk, query, key);
#pragma unroll
    for (int k = 0; k < plan::PART / 16; k++) // 16 rows further the swizzle is the same
        stmatrix_x4_trans(at + (uint32_t)(k * 16 * plan::scores::SPAN), words[k]);
}

// Waits for room, then hands dQ of state.step to sm90_backward_reduce. Writing four by four avoids bank conflicts.
template <class plan> DEVICE_FUNCTION void sm90_put_dq(const struct sm90_backward_state<plan> &state, const float *dq) {
    constexpr int QUADS = plan::PIECE_FLOATS / 128 / 4;
    const uint32_t odd = (uint32_t)state.step % 2, buffer = odd % plan::DQ_BUFFERS, w = (uint32_t)state.warpgroup;
    const uint32_t full = state.shared + plan::DQ_FULL_AT + 16 * odd + 8 * w;
    const uint32_t empty = state.shared + plan::DQ_EMPTY_AT + 16 * buffer + 8 * w;
    const uint32_t to = state.shared + plan::DQ_AT + buffer * plan::DQ_BUFFER_BYTES + w * (4 * plan::PIECE_FLOATS) +
                        threadIdx.x % 128 * 16;
#pragma unroll
    for (int piece = 0; piece < plan::PIECES; piece++) {
        const int use = state.step / plan::DQ_BUFFERS * plan::PIECES + piece; // of the buffer
        mbarrier_wait(empty, (uint32_t)(use % 2 ^ 1));
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            struct float_x4 quad;
#pragma unroll
            for (int j = 0; j < 4; j++)
                quad.x[j] = dq[4 * (piece * QUADS + i) + j];
            store_shared_floats(to + (uint32_t)(i * 128 * 16), quad);
        }
        async_proxy_fence();
        __syncwarp();
        if (elect_one())
            mbarrier_arrive(full);
    }
}

// Begins acc (64 x PART) = A B^T, over D, of the tiles at a and b; the caller waits. Each product has its own fence.
template <class plan, class left, class right>
DEVICE_FUNCTION void sm90_product_over_columns(float *acc, uint32_t a, uint32_t b) {
    const uint64_t first = left::along_rows(a), second = right::along_rows(b);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < plan::D / 16; k++)
        wgmma_shared<plan::PART, false, false>(acc, left::step_right(first, k), right::step_right(second, k), k > 0);
    wgmma_commit();
}
// Loads this warp's 16 rows of V, which must have arrived, to state.v, as left operands.
template <class plan> DEVICE_FUNCTION void sm90_backward_take_values(struct sm90_backward_state<plan> &state) {
    const int lane = (int)(threadIdx.x % 32), row = 64 * state.warpgroup + (int)(threadIdx.x / 32 % 4 * 16) + lane % 16;
#pragma unroll
    for (int k = 0; k < plan::D / 16; k++)
        state.v[k] = ldmatrix_x4(plan::values::at(state.shared + plan::VALUES_AT, row, 16 * k + lane / 16 * 8));
}
// Begins dP^T (64 x PART) = V dO^T; the caller waits. V is state.v with VALUES_IN_REGISTERS, else at address `values`.
template <class plan>
DEVICE_FUNCTION void sm90_product_with_dout(float *dp, const struct sm90_backward_state<plan> &state, uint32_t values,
                                            uint32_t dout) {
    if (!plan::VALUES_IN_REGISTERS) {
        sm90_product_over_columns<plan, typename plan::values, typename plan::queries>(dp, values, dout);
        return;
    }
    const uint64_t right = plan::queries::along_rows(dout);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < plan::D / 16; k++)
        wgmma_registers<plan::PART, false>(dp, state.v[k].x, plan::queries::step_right(right, k), k > 0);
    wgmma_commit();
}
// Begins acc (64 keys x COLUMNS) += P^T . dO or dS^T . Q, for this warpgroup's columns of dO or Q, at `tile`; the
// caller waits. P^T or dS^T (64 x QUERIES) is `left` with SPLIT_KEYS, else it is in shared memory at `scores`.
template <class plan>
DEVICE_FUNCTION void sm90_product_with_queries(float *acc, const struct word_x4 *left, uint32_t scores, uint32_t tile,
                                               int warpgroup) {
    wgmma_fence();
    if (plan::SPLIT_KEYS) {
        const uint64_t right = plan::queries::along_columns(tile);
#pragma unroll
        for (int k = 0; k < plan::QUERIES / 16; k++)
            wgmma_registers<plan::COLUMNS, true>(acc, left[k].x, plan::queries::step_down(right, k), true);
    } else {
        const uint32_t half = (uint32_t)(warpgroup * (plan::COLUMNS / plan::CHUNK) * plan::queries::CHUNK_BYTES);
        const uint64_t first = plan::scores::along_columns(scores), right = plan::queries::along_columns(tile + half);
#pragma unroll
        for (int k = 0; k < plan::QUERIES / 16; k++)
            wgmma_shared<plan::COLUMNS, true, true>(acc, plan::scores::step_down(first, k),
                                                    plan::queries::step_down(right, k), true);
    }
    wgmma_commit();
}
// Begins this warpgroup's rows or columns of dQ = dS K, with dS in shared memory at `scores`; the caller waits.
template <class plan>
DEVICE_FUNCTION void sm90_product_with_keys(float *dq, uint32_t scores, uint32_t keys, int warpgroup) {
    const uint32_t row = plan::SPLIT_ROWS ? (uint32_t)(warpgroup * 64 * plan::scores::SPAN) : 0;
    const uint32_t column =
        plan::SPLIT_ROWS ? 0 : (uint32_t)(warpgroup * (plan::DQ_COLUMNS / plan::KEY_CHUNK) * plan::keys::CHUNK_BYTES);
    const uint64_t left = plan::scores::along_rows(scores + row), right = plan::keys::along_columns(keys + column);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < plan::KEYS / 16; k++)
        wgmma_shared<plan::DQ_COLUMNS, false, true>(dq, plan::scores::step_right(left, k),
                                                    plan::keys::step_down(right, k), k > 0);
    wgmma_commit();
}

// Does a step's first part: waits for Q, and begins S^T in state.s. A step is a tile of queries of one head. K must
// have arrived; the caller waits for S^T. With EARLY the previous step's third part calls this, to queue S after dK.
template <class plan> DEVICE_FUNCTION void sm90_backward_begin(struct sm90_backward_state<plan> &state, int step) {
    const struct sm90_pipeline<plan::QUERY_STAGES> queries = sm90_backward_queries_of<plan>(state.shared, step);
    const uint32_t query = plan::SPLIT_KEYS ? 0 : (uint32_t)(state.warpgroup * plan::PART);
    const uint32_t key_row = plan::SPLIT_KEYS ? (uint32_t)state.warpgroup * 64 : 0;
    const uint32_t q = state.shared + plan::QUERIES_AT + queries.stage() * plan::TILE_BYTES;
    queries.wait_full();
    wgmma_forget<plan::PART / 2>(state.s);
    sm90_product_over_columns<plan, typename plan::keys, typename plan::queries>(
        state.s, state.shared + plan::KEYS_AT + key_row * plan::keys::SPAN, q + query * plan::queries::SPAN);
}
// Does the second part of state.step: computes P and dS, and brings dS to shared memory. With SPLIT_KEYS it also begins
// dV, otherwise P goes to shared memory too. Both warpgroups call, and meet. diagonal is the tile's first query less
// the block's first key; from KEYS - 1 on there is no causal mask.
template <class plan> DEVICE_FUNCTION void sm90_backward_middle(struct sm90_backward_state<plan> &state, int diagonal) {
    constexpr int PART = plan::PART;
    const int w = state.warpgroup;
    const uint32_t shared = state.shared, query = plan::SPLIT_KEYS ? 0 : (uint32_t)(w * PART);
    const uint32_t key_row = plan::SPLIT_KEYS ? (uint32_t)w * 64 : 0;
    const struct sm90_pipeline<plan::QUERY_STAGES> queries = sm90_backward_queries_of<plan>(shared, state.step);
    const struct sm90_pipeline<plan::DOUT_STAGES> douts = sm90_backward_douts_of<plan>(shared, state.step);
    const uint32_t dout = shared + plan::DOUT_AT + douts.stage() * plan::TILE_BYTES;
    const uint32_t scores = shared + plan::SCORES_AT + (uint32_t)(state.step % 2) * plan::SCORES_STAGE_BYTES;
    const uint32_t rows = shared + plan::ROWS_AT + queries.stage() * plan::ROWS_BYTES + 4 * query + threadIdx.x % 4 * 8;
    float dp[PART / 2];
    float *s = state.s;
    struct word_x4 *p = state.p;

    if (!plan::EARLY)
        mbarrier_wait(shared + plan::VALUES_FULL_AT, 0); // long true after the first step
    douts.wait_full();
    sm90_product_with_dout<plan>(dp, state, shared + plan::VALUES_AT + key_row * plan::values::SPAN,
                                 dout + query * plan::queries::SPAN);
    // The last query that sees every key: the first key is the first to be out of sight.
    const uint32_t last_query = shared + plan::LAST_QUERY_AT;
    const int seen_whole = plan::SPANS ? (int)load_shared_word(last_query) : 0;
    float lse[PART / 4], delta[PART / 4];
    sm90_load_first<PART, plan::LSE_FIRST>(lse, rows);
    wgmma_wait<1>();
    wgmma_hold<PART / 2>(s);
    if (diagonal < plan::KEYS - 1)
        sm90_backward_mask<PART>(s,
                                 diagonal + (int)query + sm90_backward_column() - (int)key_row - sm90_backward_row());
    if (!plan::SPANS && state.keys < plan::KEYS)
        sm90_backward_mask_keys<PART>(s, state.keys - (int)key_row - sm90_backward_row());
    if (plan::SPANS && diagonal + plan::QUERIES - 1 > seen_whole) {
        const int first = diagonal + (int)query + sm90_backward_column();
        const uint32_t mine = last_query + 4 * (key_row + (uint32_t)sm90_backward_row());
        const int seen[2] = {(int)load_shared_word(mine) - first, (int)load_shared_word(mine + 32) - first};
        sm90_backward_mask_queries<PART>(s, seen);
    }
    sm90_backward_probabilities<PART, plan::LSE_FIRST>(s, lse, rows, state.scale_log2);
    sm90_to_left<PART>(p, s);
    sm90_load_first<PART, plan::DELTA_FIRST>(delta, rows + 4 * plan::QUERIES);
    // What uses P comes before the wait for dP, which ptxas would else move before the exponentials.
    if (plan::SPLIT_KEYS) { // dV runs while dS is made and exchanged
        sm90_product_with_queries<plan>(state.dv, p, 0, dout, w);
        wgmma_wait<1>();
    } else {
        sm90_put_scores<plan>(scores + plan::SCORES_BYTES, w, p);
        wgmma_wait<0>();
    }
    wgmma_hold<PART / 2>(dp);
    sm90_backward_score_gradients<PART, plan::DELTA_FIRST>(dp, s, delta, rows + 4 * plan::QUERIES);
    sm90_to_left<PART>(state.ds, dp);

    sm90_put_scores<plan>(scores, w, state.ds);
    async_proxy_fence();
    named_barrier_sync(1, 256);
    if (plan::DV_FIRST) {
        wgmma_wait<0>();
        wgmma_hold<plan::COLUMNS / 2>(state.dv);
    }
}
// Does the third part of state.step: dK, dV and dQ. Releases Q and dO, and advances step. Unless LAST, begins S of the
// next step; without EARLY every call has LAST.
template <class plan, bool LAST> DEVICE_FUNCTION void sm90_backward_end(struct sm90_backward_state<plan> &state) {
    const int w = state.warpgroup;
    const uint32_t shared = state.shared;
    const struct sm90_pipeline<plan::QUERY_STAGES> queries = sm90_backward_queries_of<plan>(shared, state.step);
    const uint32_t q = shared + plan::QUERIES_AT + queries.stage() * plan::TILE_BYTES;
    const struct sm90_pipeline<plan::DOUT_STAGES> douts = sm90_backward_douts_of<plan>(shared, state.step);
    const uint32_t dout = shared + plan::DOUT_AT + douts.stage() * plan::TILE_BYTES;
    const uint32_t scores = shared + plan::SCORES_AT + (uint32_t)(state.step % 2) * plan::SCORES_STAGE_BYTES;
    float dq[plan::DQ_COLUMNS / 2];
    if (!plan::SPLIT_KEYS)
        sm90_product_with_queries<plan>(state.dv, state.p, scores + plan::SCORES_BYTES, dout, w);
    sm90_product_with_keys<plan>(dq, scores, shared + plan::KEYS_AT, w);
    sm90_product_with_queries<plan>(state.dk, state.ds, scores, q, w);
    wgmma_wait<2>();
    wgmma_hold<plan::COLUMNS / 2>(state.dv);
    sm90_release(douts.empty());
    if (!LAST)
        sm90_backward_begin<plan>(state, state.step + 1);
    wgmma_wait<LAST ? 1 : 2>();
    wgmma_hold<plan::DQ_COLUMNS / 2>(dq);
    sm90_put_dq<plan>(state, dq);
    wgmma_wait<LAST ? 0 : 1>();
    wgmma_hold<plan::COLUMNS / 2>(state.dk);
    __syncwarp(); // every lane has read lse and delta
    sm90_release(queries.empty());
    state.step++;
}

// Stores a warpgroup's dK or dV times `factor`, as bf16, at (first_row, first_column) of the tile where K or V was.
template <class operand, int COLUMNS>
DEVICE_FUNCTION void sm90_put_gradient(uint32_t tile, int first_row, int first_column, const float *acc, float factor) {
    const int lane = (int)(threadIdx.x % 32), row = first_row + (int)(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16);
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; k++) {
        struct word_x4 words;
#pragma unroll
        for (int i = 0; i < 4; i++)
            words.x[i] = pack_bf16x2(factor * acc[8 * k + 2 * i], factor * acc[8 * k + 2 * i + 1]);
        stmatrix_x4(operand::at(tile, row, first_column + 16 * k + lane / 16 * 8), words);
    }
}
// Returns the largest magnitude, as fp32's bits, in this thread's part of a tile of BYTES bytes, in its first `rows`
// rows. `operand` says how the tile lies. Threads 128 to 383 divide it; amax_merge_warp joins what they return.
template <class operand, int BYTES> DEVICE_FUNCTION uint32_t sm90_amax_of_tile(uint32_t tile, int rows) {
    uint32_t largest = 0;
#pragma unroll 1
    for (int at = ((int)threadIdx.x - 128) * 16; at < BYTES; at += 256 * 16)
        if (at % operand::CHUNK_BYTES / operand::SPAN < rows)
            largest = sm90_amax_words(largest, load_shared_words(tile + (uint32_t)at));
    return largest;
}
// Returns where in a.bias_partial the D column sums of a head of qkv (H + 2 Hkv) over a tile of plan::QUERIES rows lie.
template <class plan>
DEVICE_FUNCTION float *sm90_bias_at(const struct sm90_backward_arguments &a, int b, int tile, int head) {
    return a.bias_partial + (((int64_t)b * a.tiles + tile) * (a.H + 2 * a.Hkv) + head) * plan::D;
}
template <class plan> struct sm90_sums {
    static constexpr int UNITS = plan::D / 8, GROUPS = 256 / UNITS, BYTES = GROUPS * plan::D * 4;
};
// Sums a gradient's columns over a tile's first `rows` rows, in GROUPS groups of rows. `operand` says how the tile
// lies. Leaves the sums in `scratch`, (GROUPS, D) floats, for sm90_finish_sums. All threads of both warpgroups call.
template <class plan, class operand> DEVICE_FUNCTION void sm90_sum_rows(uint32_t scratch, uint32_t tile, int rows) {
    typedef sm90_sums<plan> sums;
    const int thread = (int)threadIdx.x - 128, unit = thread % sums::UNITS, group = thread / sums::UNITS;
    if (group >= sums::GROUPS)
        return;
    float columns[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll 4
    for (int row = group; row < plan::KEYS; row += sums::GROUPS) {
        const struct word_x4 words = load_shared_words(operand::at(tile, row, 8 * unit));
#pragma unroll
        for (int i = 0; i < 4 && row < rows; i++) {
            columns[2 * i] += __uint_as_float(words.x[i] << 16);
            columns[2 * i + 1] += __uint_as_float(words.x[i] & 0xffff0000u);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        store_shared_float(scratch + (uint32_t)(group * plan::D + 8 * unit + i) * 4, columns[i]);
}
// Returns the sum of a column over the groups of sm90_sum_rows. Call it after a barrier.
template <class plan> DEVICE_FUNCTION float sm90_finish_sums(uint32_t scratch, int column) {
    float sum = 0;
    for (int group = 0; group < sm90_sums<plan>::GROUPS; group++)
        sum += load_shared_float(scratch + (uint32_t)(group * plan::D + column) * 4);
    return sum;
}
// Writes the column sums of the block's dK and dV, which lie where K and V did, to a.bias_partial. If the block spans
// two tiles of QUERIES rows, the first tile gets the sums and the second zeroes. Overwrites dS. Both warpgroups call.
template <class plan>
DEVICE_FUNCTION void sm90_sum_keys(const struct sm90_backward_arguments &a, const struct sm90_backward_block &block,
                                   uint32_t shared) {
    constexpr int D = plan::D, TILES = plan::KEYS / plan::QUERIES;
    static_assert(2 * sm90_sums<plan>::BYTES <= 2 * plan::SCORES_STAGE_BYTES, "the sums lie where dS did");
    const uint32_t scratch = shared + plan::SCORES_AT;
    const int rows = a.T - block.first_key, first = block.first_key / plan::QUERIES;
    sm90_sum_rows<plan, typename plan::keys>(scratch, shared + plan::KEYS_AT, rows);
    sm90_sum_rows<plan, typename plan::values>(scratch + sm90_sums<plan>::BYTES, shared + plan::VALUES_AT, rows);
    named_barrier_sync(1, 256);
#pragma unroll 1
    for (int i = (int)threadIdx.x - 128; i < 2 * D; i += 256) {
        const int value = i / D, column = i % D, head = a.H + value * a.Hkv + block.group;
        const float sum = sm90_finish_sums<plan>(scratch + (uint32_t)value * sm90_sums<plan>::BYTES, column);
        for (int tile = 0; tile < TILES && first + tile < a.tiles; tile++)
            sm90_bias_at<plan>(a, block.b, first + tile, head)[column] = tile == 0 ? sum : 0;
    }
}
// Undoes RoPE on dK; a.rotary must not be NULL. All threads of both warpgroups call, after their last read of Q. At
// head dim 256 each warpgroup has half of the columns, and they exchange these through Q's shared memory.
template <class plan>
DEVICE_FUNCTION void sm90_undo_rope_on_keys(struct sm90_backward_state<plan> &state,
                                            const struct sm90_backward_arguments &a,
                                            const struct sm90_backward_block &block) {
    constexpr int D = plan::D, HALF = D / 4; // accumulators of half a head
    const float *rotary = a.rotary;
    const int row = block.first_key + sm90_backward_row() + (plan::SPLIT_KEYS ? 64 * state.warpgroup : 0);
    const int positions[2] = {sm90_position<plan>(a, block.b, row), sm90_position<plan>(a, block.b, row + 8)};
    if (plan::SPLIT_KEYS) {
#pragma unroll
        for (int i = 0; i < HALF; i += 2)
            sm90_undo_rope(state.dk + i, state.dk + HALF + i,
                           sm90_angles_at<D>(rotary, positions[i / 2 % 2], 8 * (i / 4) + sm90_backward_column()));
        return;
    }
    static_assert(plan::SPLIT_KEYS || 2 * 128 * 4 * HALF <= plan::QUERY_STAGES * plan::TILE_BYTES,
                  "room for both halves");
    const uint32_t place = state.shared + plan::QUERIES_AT + threadIdx.x % 128 * 16;
    const uint32_t mine = place + (uint32_t)state.warpgroup * (128 * 4 * HALF);
    const uint32_t other = place + (uint32_t)(1 - state.warpgroup) * (128 * 4 * HALF);
#pragma unroll
    for (int i = 0; i < HALF; i += 4) {
        struct float_x4 quad;
#pragma unroll
        for (int j = 0; j < 4; j++)
            quad.x[j] = state.dk[i + j];
        store_shared_floats(mine + (uint32_t)(i * 128 * 4), quad);
    }
    named_barrier_sync(1, 256);
#pragma unroll
    for (int i = 0; i < HALF; i += 4) {
        struct float_x4 quad = load_shared_floats(other + (uint32_t)(i * 128 * 4));
#pragma unroll
        for (int j = 0; j < 4; j += 2) { // values are selected, not indexed: registers have no address
            const bool first = state.warpgroup == 0;
            float a[2], b[2];
            for (int e = 0; e < 2; e++) {
                a[e] = first ? state.dk[i + j + e] : quad.x[j + e];
                b[e] = first ? quad.x[j + e] : state.dk[i + j + e];
            }
            sm90_undo_rope(a, b, sm90_angles_at<D>(rotary, positions[j / 2], 8 * (i / 4) + sm90_backward_column()));
            for (int e = 0; e < 2; e++)
                state.dk[i + j + e] = first ? a[e] : b[e];
        }
    }
}
// Starts copying a tile, in boxes of `columns` columns, to a head's rows from `first`. One thread calls, then commits.
template <class operand, int D>
DEVICE_FUNCTION void sm90_store_chunks(const struct tensor_map *map, uint32_t tile, int columns, int head, int first,
                                       int b) {
#pragma unroll
    for (int c = 0; c < D; c += columns)
        tma_store_4d(map, tile + (uint32_t)(c / columns * operand::CHUNK_BYTES), c, head, first, b);
}

// Stores, for each of the block's keys, the last query that sees it, less block.first_key, in shared memory, because
// registers are too few. Both warpgroups call, and meet. Keys past T, which the diagonal hides, get the last key's.
template <class plan>
DEVICE_FUNCTION void sm90_backward_put_last_queries(const struct sm90_backward_arguments &a,
                                                    const struct sm90_backward_block &block, uint32_t shared) {
    const int i = (int)threadIdx.x - 128, key = block.first_key + i;
    if (i < plan::KEYS)
        store_shared_word(
            shared + plan::LAST_QUERY_AT + 4 * (uint32_t)i,
            (uint32_t)(sm90_last_query_of<plan>(a, (unsigned)block.b, (unsigned)(key < a.T ? key : a.T - 1)) -
                       block.first_key));
    named_barrier_sync(1, 256);
}

// Computes and stores a block's dV and dK and, unless NULL in `a`, their amax and bias sums; with a.rotary undoes RoPE
// on dK. Hands dQ to sm90_backward_reduce. The two warpgroups that multiply call this, as warpgroup 0 and 1.
template <class plan>
DEVICE_FUNCTION void sm90_backward_multiply(const struct sm90_backward_arguments &a, struct sm90_backward_block block,
                                            uint32_t shared, int warpgroup) {
    constexpr int COLUMNS = plan::COLUMNS;
    struct sm90_backward_state<plan> state;
    state.shared = shared;
    state.warpgroup = warpgroup;
    state.step = 0;
    state.keys = a.full ? a.T - block.first_key : plan::KEYS;
    state.scale_log2 = a.scale * LOG2E;
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++)
        state.dk[i] = state.dv[i] = 0;
    if (plan::SPANS)
        sm90_backward_put_last_queries<plan>(a, block, shared);
    mbarrier_wait(shared + plan::KEYS_FULL_AT, 0);
    if (plan::EARLY) {
        sm90_backward_begin<plan>(state, state.step);
        mbarrier_wait(shared + plan::VALUES_FULL_AT, 0);
        if (plan::VALUES_IN_REGISTERS)
            sm90_backward_take_values<plan>(state);
        sm90_backward_middle<plan>(state, a.full ? plan::KEYS : block.first_tile * plan::QUERIES - block.first_key);
        int h = 1;
        for (int tile = block.first_tile; tile != block.end_tile; tile += block.step, h = 0)
            for (; h < a.heads; h++) {
                sm90_backward_end<plan, false>(state);
                sm90_backward_middle<plan>(state, a.full ? plan::KEYS : tile * plan::QUERIES - block.first_key);
            }
        sm90_backward_end<plan, true>(state);
    } else {
        for (int tile = block.first_tile; tile != block.end_tile; tile += block.step)
            for (int h = 0; h < a.heads; h++) {
                sm90_backward_begin<plan>(state, state.step);
                sm90_backward_middle<plan>(state, a.full ? plan::KEYS : tile * plan::QUERIES - block.first_key);
                sm90_backward_end<plan, true>(state);
            }
    }

    // Found again: kept throughout the steps, it would be spilled at head dim 128 with tables.
    block = sm90_backward_block_of<plan>(a, hide_value((int)blockIdx.x));
    const int row = plan::SPLIT_KEYS ? 64 * warpgroup : 0, column = plan::SPLIT_KEYS ? 0 : COLUMNS * warpgroup;
    named_barrier_sync(1, 256); // the two warpgroups have read K and V, Q and dO
    if (a.rotary)
        sm90_undo_rope_on_keys<plan>(state, a, block);
    sm90_put_gradient<typename plan::keys, COLUMNS>(shared + plan::KEYS_AT, row, column, state.dk, a.scale);
    sm90_put_gradient<typename plan::values, COLUMNS>(shared + plan::VALUES_AT, row, column, state.dv, 1);
    async_proxy_fence();
    named_barrier_sync(1, 256);
    if (a.amax) { // from shared memory: taken from the accumulators, ptxas spills
        const int rows = a.T - block.first_key;
        const uint32_t dk = sm90_amax_of_tile<typename plan::keys, plan::KEYS_BYTES>(shared + plan::KEYS_AT, rows);
        const uint32_t dv = sm90_amax_of_tile<typename plan::values, plan::KEYS_BYTES>(shared + plan::VALUES_AT, rows);
        amax_merge_warp(a.amax, amax_larger(dk, dv));
    }
    if (a.bias_partial)
        sm90_sum_keys<plan>(a, block, shared);
    if (threadIdx.x != 128)
        return;
    sm90_store_chunks<typename plan::keys, plan::D>(&a.dk, shared + plan::KEYS_AT, plan::KEY_CHUNK, a.H + block.group,
                                                    block.first_key, block.b);
    sm90_store_chunks<typename plan::values, plan::D>(&a.dv, shared + plan::VALUES_AT, plan::CHUNK,
                                                      a.H + a.Hkv + block.group, block.first_key, block.b);
    bulk_commit();
    bulk_wait_read<0>();
}

template <class plan> DEVICE_FUNCTION void sm90_backward_init_barriers(uint32_t shared) { // one thread calls
    const struct sm90_pipeline<plan::QUERY_STAGES> queries = { shared + plan::QUERY_BARRIERS_AT, 0 };
    const struct sm90_pipeline<plan::DOUT_STAGES> douts = { shared + plan::DOUT_BARRIERS_AT, 0 };
    mbarrier_init(shared + plan::KEYS_FULL_AT, 1);
    mbarrier_init(shared + plan::VALUES_FULL_AT, 1);
    queries.open(8);
    douts.open(8);
    for (uint32_t w = 0; w < 2; w++) {
        mbarrier_init(shared + plan::DQ_FULL_AT + 8 * w, 4);
        mbarrier_init(shared + plan::DQ_FULL_AT + 16 + 8 * w, 4);
        for (uint32_t i = 0; i < plan::DQ_BUFFERS; i++)
            mbarrier_init(shared + plan::DQ_EMPTY_AT + 16 * i + 8 * w, 1);
    }
    mbarrier_init_fence();
}

// Computes dK and dV of a block of keys, and adds the block's part of dQ to the sums. It runs after the rows' kernel
// and before the queries' kernel. Three threads of the first warpgroup copy, the other two warpgroups multiply.
template <class plan>
static __global__ void __launch_bounds__(plan::THREADS, 1)
    sm90_backward_kernel(const __grid_constant__ struct sm90_backward_arguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(CUDA_EMULATED)
    const uint32_t shared = shared_memory();
    const int warpgroup = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0); // known to be uniform
    if (threadIdx.x == 0) {
        tma_prefetch_map(&a.k);
        tma_prefetch_map(&a.q);
        tma_prefetch_map(&a.v);
        tma_prefetch_map(&a.dout);
        sm90_backward_init_barriers<plan>(shared);
    } else if (threadIdx.x == 128) {
        tma_prefetch_map(&a.dk);
        tma_prefetch_map(&a.dv);
    }
    __syncthreads();
    // Each finds its block for itself: found before the branch, it would take more registers than the producers have.
    if (warpgroup > 0) {
        registers_increase<plan::CONSUMER_REGISTERS>();
        sm90_backward_multiply<plan>(a, sm90_backward_block_of<plan>(a, (int)blockIdx.x), shared, warpgroup - 1);
    } else {
        registers_decrease<plan::PRODUCER_REGISTERS>();
        if (threadIdx.x == 0)
            sm90_backward_load<plan>(a, sm90_backward_block_of<plan>(a, (int)blockIdx.x), shared);
        else if (threadIdx.x == 32 || threadIdx.x == 64)
            sm90_backward_reduce<plan>(a, sm90_backward_block_of<plan>(a, (int)blockIdx.x), shared, threadIdx.x == 64);
    }
#elif defined(__CUDACC__)
    __trap(); // as in forward
#endif
}

// --- After: dQ ----------------------------------------------------------------------------------------------------

enum { SM90_QUERIES_THREADS = 256, SM90_QUERIES_HEADS = 4 };

// Writes a tile's column sums of dQ to a.bias_partial. shared: dQ's rows, then scratch. All call, then synchronize.
template <class plan>
DEVICE_FUNCTION void sm90_sum_queries(const struct sm90_backward_arguments &a, uint32_t shared, int b, int tile,
                                      int head) {
    constexpr int D = plan::D, ROW_BYTES = 2 * D + 16, WORDS = D / 2, GROUPS = SM90_QUERIES_THREADS / WORDS;
    const int word = (int)threadIdx.x % WORDS, group = (int)threadIdx.x / WORDS, rows = a.T - tile * plan::QUERIES;
    const uint32_t scratch = shared + plan::QUERIES * ROW_BYTES;
    float low = 0, high = 0;
#pragma unroll 8
    for (int row = group; row < plan::QUERIES; row += GROUPS) {
        const uint32_t x = load_shared_word(shared + (uint32_t)(row * ROW_BYTES + 4 * word));
        low += row < rows ? __uint_as_float(x << 16) : 0.0f;
        high += row < rows ? __uint_as_float(x & 0xffff0000u) : 0.0f;
    }
    if (group < GROUPS) {
        store_shared_float(scratch + (uint32_t)(group * D + 2 * word) * 4, low);
        store_shared_float(scratch + (uint32_t)(group * D + 2 * word + 1) * 4, high);
    }
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < GROUPS && threadIdx.x < D; i++)
        sum += load_shared_float(scratch + (uint32_t)(i * D + (int)threadIdx.x) * 4);
    if (threadIdx.x < D)
        sm90_bias_at<plan>(a, b, tile, head)[threadIdx.x] = sum;
}
// Writes dQ of one tile of a few heads, which share RoPE's angles: scales the sums, undoes RoPE if a.rotary is given,
// and rounds. AMAX: a.amax is given. Rows pass through shared memory, for 16-byte writes, 16 bytes longer so that a
// quad's words differ in banks. (SM90_QUERIES_THREADS / (D / 2), D) floats for sm90_sum_queries follow.
template <class plan, bool AMAX>
static __global__ void __launch_bounds__(SM90_QUERIES_THREADS)
    sm90_backward_queries_kernel(const __grid_constant__ struct sm90_backward_arguments a) {
    constexpr int D = plan::D, QUERIES = plan::QUERIES, ROW_BYTES = 2 * D + 16;
    constexpr int QUADS = plan::SPLIT_ROWS ? D / 16 : D / 32; // of a half, a thread
    const int tile = (int)blockIdx.x, first_head = (int)blockIdx.y * SM90_QUERIES_HEADS, b = (int)blockIdx.z;
    const int end_head = first_head + SM90_QUERIES_HEADS < a.H ? first_head + SM90_QUERIES_HEADS : a.H;
    // A thread has both halves of a head's columns. Where each half was one warpgroup's, the first 128 threads take
    // half of each warpgroup's quads, the last 128 the rest.
    const int w = (int)threadIdx.x / 128,
              first_quad = w * (plan::SPLIT_ROWS ? 64 * D : 512 * QUADS) + (int)threadIdx.x % 128 * 4;
    const int row = sm90_backward_row() + (plan::SPLIT_ROWS ? 64 * w : 0),
              column = sm90_backward_column() + (plan::SPLIT_ROWS ? 0 : 8 * QUADS * w);
    const uint32_t shared = shared_memory();
    uint32_t largest = 0;
    struct sm90_angles angles[QUADS][2];
    if (a.rotary)
#pragma unroll
        for (int i = 0; i < 2 * QUADS; i++) {
            const int position = sm90_position<plan>(a, b, tile * QUERIES + row + i % 2 * 8);
            angles[i / 2][i % 2] = sm90_angles_at<D>(a.rotary, position, column + 8 * (i / 2));
        }
    for (int h = first_head; h < end_head; h++) {
        const float *from = a.dq + (((int64_t)b * a.H + h) * a.tiles + tile) * (QUERIES * D) + first_quad;
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const float *const first = from + i * 512, *const second =
                                                           first + 32 * D; // D / 2 columns of 64 rows further
            packed_check(first, false);
            packed_check(second, false);
            const float4 x = *(const float4 *)first, y = *(const float4 *)second;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float low[2] = {a.scale * (half ? x.z : x.x), a.scale * (half ? x.w : x.y)};
                float high[2] = {a.scale * (half ? y.z : y.x), a.scale * (half ? y.w : y.y)};
                if (a.rotary)
                    sm90_undo_rope(low, high, angles[i][half]);
                const uint32_t to = shared + (uint32_t)((row + 8 * half) * ROW_BYTES + 2 * (column + 8 * i));
                store_shared_word(to, pack_bf16x2(low[0], low[1]));
                store_shared_word(to + D, pack_bf16x2(high[0], high[1]));
            }
        }
        __syncthreads();
#pragma unroll
        for (int i = (int)threadIdx.x; i < QUERIES * D / 8; i += SM90_QUERIES_THREADS) {
            const int t = tile * QUERIES + i / (D / 8), piece = i % (D / 8);
            if (t < a.T) {
                const struct word_x4 words =
                    load_shared_words(shared + (uint32_t)(i / (D / 8) * ROW_BYTES + 16 * piece));
                bf16 *dq = a.dqkv + (((int64_t)b * a.T + t) * (a.H + 2 * a.Hkv) + h) * D + piece * 8;
                packed_check(dq, true);
                *(uint4 *)dq = make_uint4(words.x[0], words.x[1], words.x[2], words.x[3]);
                if (AMAX)
                    largest = sm90_amax_words(largest, words);
            }
        }
        if (a.bias_partial)
            sm90_sum_queries<plan>(a, shared, b, tile, h);
        __syncthreads();
    }
    if (AMAX)
        amax_merge_warp(a.amax, largest);
}

// Returns the map of (B, T, heads * D), in boxes of `rows` rows of `columns` columns of one head.
template <class plan>
static struct tensor_map sm90_backward_map(const bf16 *base, int heads, struct attention_shape shape, int columns,
                                           int rows) {
    const uint64_t row_bytes = (uint64_t)heads * plan::D * sizeof(bf16);
    const uint64_t dims[4] = {(uint64_t)plan::D, (uint64_t)heads, (uint64_t)shape.T, (uint64_t)shape.B};
    const uint64_t strides[3] = {plan::D * sizeof(bf16), row_bytes, row_bytes * (uint64_t)shape.T};
    return tensor_map_of(base, dims, strides, columns, rows);
}

struct sm90_backward_launcher {
    // Launches sm90_backward_kernel, then sm90_backward_queries_kernel.
    template <class plan> static void launch_plan(const struct sm90_backward_arguments &a, struct device *dev) {
        static_assert(plan::SHARED_BYTES <= 227 * 1024, "what a block can have");
        // Once a kernel: more than 48 KB of shared memory has to be asked for.
        static const cudaError_t prepared = cudaFuncSetAttribute(
            (const void *)sm90_backward_kernel<plan>, cudaFuncAttributeMaxDynamicSharedMemorySize, plan::SHARED_BYTES);
        cuda_check(prepared);
        LAUNCH(dev, sm90_backward_kernel<plan>, (unsigned)(a.blocks * a.Hkv * a.B), plan::THREADS, plan::SHARED_BYTES,
               a);
        LAUNCH(dev, (a.amax ? sm90_backward_queries_kernel<plan, true> : sm90_backward_queries_kernel<plan, false>),
               dim3((unsigned)a.tiles, blocks_for(a.H, SM90_QUERIES_HEADS), (unsigned)a.B), SM90_QUERIES_THREADS,
               plan::QUERIES * (2 * plan::D + 16) + (a.bias_partial ? 2 * SM90_QUERIES_THREADS * 4 : 0), a);
    }
    template <int D>
    static void launch(const struct sm90_backward_arguments &given, struct attention_shape shape, struct device *dev) {
        typedef sm90_backward_plan<D> plan;
        static const struct cudaDeviceProp properties = sm90_properties(dev);
        struct sm90_backward_arguments a = given;
        const int packed = sm90_packed_heads(shape);
        sm90_backward_order(a, shape, plan::KEYS, properties.multiProcessorCount, properties.l2CacheSize);
        a.k = sm90_backward_map<plan>(a.qkv, packed, shape, plan::KEY_CHUNK, plan::KEYS);
        a.v = sm90_backward_map<plan>(a.qkv, packed, shape, plan::CHUNK, plan::KEYS);
        a.q = sm90_backward_map<plan>(a.qkv, packed, shape, plan::CHUNK, plan::QUERIES);
        a.dout = sm90_backward_map<plan>(a.dout_rows, shape.num_heads, shape, plan::CHUNK, plan::QUERIES);
        a.dk = sm90_backward_map<plan>(a.dqkv, packed, shape, plan::KEY_CHUNK, plan::KEYS);
        a.dv = sm90_backward_map<plan>(a.dqkv, packed, shape, plan::CHUNK, plan::KEYS);
        const int64_t rows = (int64_t)shape.num_heads * a.tiles * plan::QUERIES;
        LAUNCH(dev, sm90_backward_rows_kernel<plan>,
               dim3(blocks_for(rows * SM90_THREADS_A_ROW, SM90_ROWS_THREADS), (unsigned)shape.B), SM90_ROWS_THREADS, 0,
               a);
        const bool spans = a.first_key || a.positions.starts || a.positions.document_starts;
        if (spans && shape.full) // SPANS masks keys past T only by the diagonal
            fail("attention by wgmma without a causal mask takes no tables and no positions");
        if (spans)
            launch_plan<sm90_backward_plan<D, true>>(a, dev);
        else
            launch_plan<plan>(a, dev);
    }
};

void sm90_backward(floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out, const float *lse,
                   struct attention_shape shape, struct attention_backward_options options, void *workspace,
                   struct device *dev) {
    const void *const aligned[6] = {dqkv, dout, qkv, out, workspace, options.rotary};
    sm90_check(aligned, 6, shape);
    const struct sm90_backward_layout layout = sm90_backward_layout_of(shape);
    struct sm90_backward_arguments a = sm90_backward_arguments_of(shape);
    a.qkv = qkv;
    a.out = out;
    a.dout_rows = dout;
    a.dqkv = dqkv;
    a.lse = lse;
    a.dq = (float *)workspace;
    a.rows = (float *)((char *)workspace + layout.dq_bytes);
    a.counters = (int *)((char *)a.rows + layout.rows_bytes);
    a.rotary = options.rotary;
    // At head dim 256 blocks of a group that add at once cost more than their turns: on an H200, causal, 64 heads over
    // 8, 242 TFLOP/s at T 1024 and at T 8192, where turns have 278 and 319 (docs/gpu/measured.md).
    a.any_order = options.any_order && (shape.head_dim < 256 || shape.num_heads == shape.num_query_groups);
    a.amax = options.amax;
    a.bias_partial = options.bias_partial;
    a.positions = options.positions;
    sm90_choose<sm90_backward_launcher>(a, shape, dev);
}

#endif
