// Flash attention's forward for Hopper, after FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608).
//   S = Q K^T, P = softmax(scale S) over first_key[i] <= j <= i, O = P V
// - There is a block for each multiprocessor. Each takes tiles of queries in turn: the longest first, every other round
//   backwards, so that no block always has the longer tile. Where memory can't feed that, heads are done in sections,
//   whose keys and values fit the L2 cache. A section's tiles are taken in pairs of the same length, a long tile and a
//   short one or two heads' middle ones: longest first in each section would leave up to 15 % of the time unused.
// - Where the shape has a first_key, an instance of its own runs. A tile's keys begin where its first query's do, so
//   that its place says nothing of its length: a small kernel sorts the tiles by length before.
// - A warpgroup has 64 queries, with O and S in its registers; P is rounded there and is wgmma's A operand from there.
// - Two things hide softmax. The next tile's S is multiplied before this tile's O += P V, which runs during the next
//   softmax. Warpgroups take turns to start products, so that one's softmax falls into another's products.
// - Tiles that the diagonal cuts come first, tiles that first_key cuts last, in own loops; the rest test no -inf.
// - O leaves by TMA from a place of its own in shared memory, so that the next tile's Q comes while this tile's last
//   product runs and its O leaves. At head dim 256, where that doesn't fit, O leaves through Q's place before.
// - The L2 cache is to replace K and V, which other tiles read too, last, and Q, which only this tile reads, first.
#if defined(TARGET_CUDA) && defined(PRECISION_BF16)
#include "kernels/attention/sm90_forward_plan.cuh" // sm90_forward_plan, struct sm90_forward_arguments

enum { SM90_ORDER_THREADS = 256 };

// Sorts the tiles of queries into a.order by the number of tiles of keys that they see, most first; of two with equal
// numbers the later one comes first. With sections, sorts each sequence by itself, one section after another. A tile's
// heads get neighboring entries, with sections a section's heads. Each thread places one tile.
template <class plan>
static __global__ void __launch_bounds__(SM90_ORDER_THREADS)
    sm90_forward_order_kernel(const __grid_constant__ struct sm90_forward_arguments a) {
    const int all = a.heads / a.H * a.blocks, mine = (int)blockIdx.x * SM90_ORDER_THREADS + (int)threadIdx.x;
    if (mine >= all)
        return;
    const int b = mine / a.blocks, length = sm90_tiles_of_keys<plan>(a, mine);
    const int begin = a.section_heads ? b * a.blocks : 0, end = a.section_heads ? begin + a.blocks : all;
    int place = 0;
    for (int other = begin; other < end; other++) {
        const int theirs = sm90_tiles_of_keys<plan>(a, other);
        place += theirs > length || (theirs == length && other > mine);
    }
    for (int head = b * a.H; head < (b + 1) * a.H; head++) {
        int at = place * a.H + head % a.H;
        if (a.section_heads) {
            const int first = head - head % a.section_heads, left = a.heads - first;
            at = first * a.blocks + place * (left < a.section_heads ? left : a.section_heads) + head - first;
        }
        a.order[at].head = head;
        a.order[at].first = mine % a.blocks * plan::QUERIES;
    }
}

// The barriers of a block: of each warpgroup's queries, of K, of V.
template <class plan> struct sm90_forward_pipelines {
    struct sm90_pipeline<plan::STAGES> k, v;
    uint32_t queries; // a full and an empty one for each warpgroup

    // Sets the barriers' addresses in the block's shared memory, where `open` then initializes them, and `use` to 0.
    __device__ __forceinline__ void at(uint32_t shared) {
        k.barriers = shared + plan::BARRIERS_AT;
        v.barriers = k.barriers + 16 * plan::STAGES;
        queries = v.barriers + 16 * plan::STAGES;
        k.use = v.use = 0;
    }
    __device__ __forceinline__ struct sm90_pipeline<1> of_queries(int warpgroup, int use) const {
        const struct sm90_pipeline<1> result = { queries + 16 * (uint32_t)warpgroup, use };
        return result;
    }
};

// --- The producer: one thread --------------------------------------------------------------------------------------

// Waits until the pipeline's next buffer is empty, starts copying tile `keys` of a head of qkv to it, and advances.
template <class plan>
DEVICE_FUNCTION void sm90_produce_keys(struct sm90_pipeline<plan::STAGES> &pipeline, uint32_t buffers,
                                       const struct sm90_forward_arguments &a, int head, int keys, int b,
                                       uint64_t policy) {
    pipeline.wait_empty();
    mbarrier_arrive_expect(pipeline.full(), plan::KEYS_BYTES);
    sm90_load_tile<plan::D, plan::KEYS>(buffers + pipeline.stage() * plan::KEYS_BYTES, &a.keys, pipeline.full(), head,
                                        keys * plan::KEYS, b, policy);
    pipeline.use++;
}
// Loads queries, keys and values of all of the block's tiles. One thread calls this.
template <class plan>
DEVICE_FUNCTION void sm90_forward_produce(const struct sm90_forward_arguments &a, uint32_t shared,
                                          struct sm90_forward_pipelines<plan> p) {
    const uint64_t stays = l2_evict_last(), passes = l2_evict_first();
    struct sm90_forward_tile tile = sm90_forward_begin();
    while (sm90_forward_next<plan>(tile, a)) {
        const int b = sm90_quotient(tile.head, a.by_H), h = tile.head - b * a.H, group = sm90_quotient(h, a.by_group);
        const int last = sm90_last_tile_of_keys<plan>(a, tile.first, plan::QUERIES);
        int end = 0;
        for (int keys = last; keys >= end; keys--) {
            sm90_produce_keys<plan>(p.k, shared + plan::K_AT, a, a.H + group, keys, b, stays);
            // The first keys come before the queries, whose place is free later: the last tile's last products read it.
            for (int w = 0; keys == last && w < plan::WARPGROUPS; w++) {
                const struct sm90_pipeline<1> q = p.of_queries(w, tile.number);
                q.wait_empty();
                mbarrier_arrive_expect(q.full(), plan::Q_BYTES);
                sm90_load_tile<plan::D, 64>(shared + (uint32_t)(w * plan::Q_BYTES), &a.queries, q.full(), h,
                                            tile.first + 64 * w, b, passes);
            }
            if (plan::SPANS && keys == last)
                end = sm90_first_key<plan>(a, b, tile.first) / plan::KEYS;
            sm90_produce_keys<plan>(p.v, shared + plan::V_AT, a, a.H + a.Hkv + group, keys, b, stays);
        }
    }
}

// --- A consumer: 64 queries of a warpgroup ------------------------------------------------------------------------

template <class plan> struct sm90_forward_state {
    float o[plan::D / 2], s[plan::KEYS / 2];
    uint32_t p[plan::KEYS / 16][4]; // P, rounded, as A operands
    float maximum[2], sum[2];       // of rows sm90_row() and sm90_row() + 8; sum: this thread's columns
    float factor[2];                // of what was summed before the last tile
};

// Waits, with TURNS, at barrier 1 + warpgroup until the previous warpgroup lets this one start its products.
template <class plan> DEVICE_FUNCTION void sm90_take_turn(int warpgroup) {
    if (plan::TURNS)
        named_barrier_sync(1 + warpgroup, 256);
}
// Passes the turn, with TURNS, to the next warpgroup. Call it when this warpgroup has started its products.
template <class plan> DEVICE_FUNCTION void sm90_pass_turn(int warpgroup) {
    if (plan::TURNS)
        named_barrier_arrive(1 + (warpgroup + 1) % plan::WARPGROUPS, 256);
}

// Starts S = Q K^T, K at `keys` in shared memory; the caller waits. Each product has a fence of its own, or else the
// compiler would put one after a wait for a barrier, and run the products one by one.
template <class plan>
DEVICE_FUNCTION void sm90_multiply_keys(struct sm90_forward_state<plan> &state, uint64_t queries, uint32_t keys) {
    const uint64_t right = sm90_along_rows<plan::D>(keys);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < plan::D / 16; k++)
        wgmma_shared<plan::KEYS, false, false>(state.s, sm90_step_right<plan::D, 64>(queries, k),
                                               sm90_step_right<plan::D, plan::KEYS>(right, k), k > 0);
    wgmma_commit();
}
// Starts O += P V, V at `values` in shared memory; the caller waits.
template <class plan>
DEVICE_FUNCTION void sm90_multiply_values(struct sm90_forward_state<plan> &state, uint32_t values) {
    const uint64_t right = sm90_along_columns<plan::D, plan::KEYS>(values);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < plan::KEYS / 16; k++)
        wgmma_registers<plan::D, true>(state.o, state.p[k], sm90_step_down<plan::D>(right, k), true);
    wgmma_commit();
}

// Says what may hide a tile's keys from some rows. SM90_NO_MASK: nothing. SM90_DIAGONAL: the diagonal, the end of the
// sequence and, with spans, first_key. SM90_LEFT: only first_key, from rows that have all seen a key already.
enum sm90_mask { SM90_NO_MASK, SM90_DIAGONAL, SM90_LEFT };
// The last and, with spans, first key that the thread's two rows see, less the tile's first key and sm90_column().
struct sm90_seen {
    int last[2], first[2];
};
// Moves `seen` to the tile of keys that lies `tiles` tiles earlier.
template <class plan> DEVICE_FUNCTION void sm90_seen_before(struct sm90_seen &seen, int tiles) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        seen.last[half] += tiles * plan::KEYS;
        seen.first[half] += tiles * plan::KEYS;
    }
}
// Whether row `half`, 0 or 1, of the thread doesn't see a key. column: the key's in the tile, less sm90_column().
template <enum sm90_mask MASK, class plan>
DEVICE_FUNCTION bool sm90_hidden(const struct sm90_seen &seen, int half, int column) {
    return (MASK == SM90_DIAGONAL && column > seen.last[half]) ||
           (MASK != SM90_NO_MASK && plan::SPANS && column < seen.first[half]);
}

// Masks S and makes it P = exp2(scale_log2 (S - the row's maximum so far)). Updates rows' maxima, factors and sums.
template <enum sm90_mask MASK, class plan>
DEVICE_FUNCTION void sm90_softmax(struct sm90_forward_state<plan> &state, float scale_log2,
                                  const struct sm90_seen &seen) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float maximum = state.maximum[half];
#pragma unroll
        for (int i = 0; i < plan::KEYS / 4; i++) {
            float &s = state.s[i / 2 * 4 + 2 * half + i % 2];
            if (sm90_hidden<MASK, plan>(seen, half, i / 2 * 8 + i % 2))
                s = -INFINITY;
            maximum = fmaxf(maximum, s);
        }
        maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 1));
        maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 2));
        // A row that has seen no key yet: -inf less -inf would be no number.
        const float shift = MASK == SM90_DIAGONAL && maximum == -INFINITY ? 0.0f : maximum * scale_log2;
        state.factor[half] = exp2_approx(state.maximum[half] * scale_log2 - shift);
        state.maximum[half] = maximum;
        float sum = state.sum[half] * state.factor[half];
#pragma unroll
        for (int i = 0; i < plan::KEYS / 4; i++) {
            float &s = state.s[i / 2 * 4 + 2 * half + i % 2];
            s = exp2_approx(s * scale_log2 - shift);
            sum += s;
        }
        state.sum[half] = sum;
    }
}
// Rounds P, which sm90_softmax left in state.s, to state.p. An accumulator's columns lie as an A operand's do.
template <class plan> DEVICE_FUNCTION void sm90_round_p(struct sm90_forward_state<plan> &state) {
#pragma unroll
    for (int k = 0; k < plan::KEYS / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            state.p[k][i] = pack_bf16x2(state.s[8 * k + 2 * i], state.s[8 * k + 2 * i + 1]);
}

template <class plan> struct sm90_forward_consumer {
    int warpgroup;
    uint32_t shared;
    uint64_t queries; // as an operand
    float scale_log2;
    struct sm90_forward_pipelines<plan> p;

    __device__ __forceinline__ uint32_t k_stage(void) const {
        return shared + plan::K_AT + p.k.stage() * plan::KEYS_BYTES;
    }
    __device__ __forceinline__ uint32_t v_stage(void) const {
        return shared + plan::V_AT + p.v.stage() * plan::KEYS_BYTES;
    }
};

// Skips a tile of keys that none of this warpgroup's rows sees: releases its K and V unread, and passes the turn on.
template <class plan> DEVICE_FUNCTION void sm90_skip(struct sm90_forward_consumer<plan> &c) {
    sm90_take_turn<plan>(c.warpgroup);
    sm90_pass_turn<plan>(c.warpgroup);
    c.p.k.wait_full(); // an arrival must not count for the tile before
    sm90_release(c.p.k.empty());
    c.p.k.use++;
    c.p.v.wait_full();
    sm90_release(c.p.v.empty());
    c.p.v.use++;
}

// Computes P of the last tile of keys seen, which comes first, without waiting for a turn; releases K. O stays 0.
template <class plan>
DEVICE_FUNCTION void sm90_first_keys(struct sm90_forward_state<plan> &state, struct sm90_forward_consumer<plan> &c,
                                     const struct sm90_seen &seen) {
    c.p.k.wait_full();
    sm90_multiply_keys<plan>(state, c.queries, c.k_stage());
    wgmma_wait<0>();
    wgmma_hold<plan::KEYS / 2>(state.s);
    sm90_release(c.p.k.empty());
    c.p.k.use++;
    sm90_softmax<SM90_DIAGONAL, plan>(state, c.scale_log2, seen);
    sm90_round_p<plan>(state);
}

// Rescales O to its rows' new maxima, at one of two places, which the plan chooses: with EARLY while S of the next tile
// is multiplied, without EARLY as soon as the previous tile's P V is added. The other place's call does nothing.
template <bool EARLY, class plan> DEVICE_FUNCTION void sm90_rescale(struct sm90_forward_state<plan> &state) {
    if (EARLY == plan::RESCALES_EARLY) {
#pragma unroll
        for (int i = 0; i < plan::D / 2; i++)
            state.o[i] *= state.factor[i / 2 % 2];
        wgmma_hold<plan::D / 2>(state.o);
    }
}

// Computes P of a tile of keys while the previous tile's O += P V runs; releases this tile's K and the previous V.
template <enum sm90_mask MASK, class plan>
DEVICE_FUNCTION void sm90_next_keys(struct sm90_forward_state<plan> &state, struct sm90_forward_consumer<plan> &c,
                                    const struct sm90_seen &seen) {
    c.p.k.wait_full();
    sm90_take_turn<plan>(c.warpgroup);
    wgmma_hold<plan::D / 2>(state.o);
    sm90_multiply_keys<plan>(state, c.queries, c.k_stage());
    sm90_rescale<true>(state);
    c.p.v.wait_full();
    sm90_multiply_values<plan>(state, c.v_stage());
    sm90_pass_turn<plan>(c.warpgroup);
    wgmma_wait<1>();
    wgmma_hold<plan::KEYS / 2>(state.s);
    sm90_release(c.p.k.empty());
    c.p.k.use++;
    sm90_softmax<MASK, plan>(state, c.scale_log2, seen);
    c.p.v.wait_full(); // long true; but ptxas would move the next wait before the exponentials, and not across a loop
    wgmma_wait<0>();
    wgmma_hold<plan::D / 2>(state.o);
    sm90_release(c.p.v.empty());
    c.p.v.use++;
    sm90_rescale<false>(state);
    sm90_round_p<plan>(state);
}

// Adds up the rows' sums, sets `factor` to their inverses and, unless a.lse is NULL, writes lse, base 2. head: b H + h.
template <class plan>
DEVICE_FUNCTION void sm90_finish_rows(struct sm90_forward_state<plan> &state, float scale_log2,
                                      const struct sm90_forward_arguments &a, int head, int first) {
    const int row = first + sm90_row();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = state.sum[half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        state.factor[half] = 1.0f / sum;
        if (a.lse && threadIdx.x % 4 == 0 && row + 8 * half < a.T)
            a.lse[(int64_t)head * a.T + row + 8 * half] = state.maximum[half] * scale_log2 + log2f(sum);
    }
}
// Adds the last P V to O and releases V. Runs sm90_finish_rows meanwhile. O isn't multiplied by `factor` yet.
template <class plan>
DEVICE_FUNCTION void sm90_last_values(struct sm90_forward_state<plan> &state, struct sm90_forward_consumer<plan> &c,
                                      const struct sm90_forward_arguments &a, int head, int first) {
    sm90_rescale<true>(state);
    c.p.v.wait_full();
    wgmma_hold<plan::D / 2>(state.o);
    sm90_multiply_values<plan>(state, c.v_stage());
    sm90_finish_rows<plan>(state, c.scale_log2, a, head, first);
    wgmma_hold<2>(state.factor); // or the inverses would be made after the wait
    c.p.v.wait_full();           // as in sm90_next_keys
    wgmma_wait<0>();
    wgmma_hold<plan::D / 2>(state.o);
    sm90_release(c.p.v.empty());
    c.p.v.use++;
}

// Waits until the copy that this warp started last has read its shared memory.
DEVICE_FUNCTION void sm90_await_store(void) {
    if (elect_one())
        bulk_wait_read<0>();
    __syncwarp();
}
// Starts copying O times `factor` to a.out, each warp its rows, and merges a.amax. Without O_APART, when O takes Q's
// place, it waits until the copy has read that place, and releases it at `empty`.
template <class plan>
DEVICE_FUNCTION void
sm90_forward_store(struct sm90_forward_state<plan> &state, const struct sm90_forward_consumer<plan> &c,
                   const struct sm90_forward_arguments &a, const struct sm90_forward_tile &tile, uint32_t empty) {
    const int first = tile.first + 64 * c.warpgroup;
    const uint32_t out = c.shared + plan::O_AT + (uint32_t)(c.warpgroup * plan::Q_BYTES);
#pragma unroll
    for (int i = 0; i < plan::D / 2; i++)
        state.o[i] *= state.factor[i / 2 % 2];
    if (!plan::O_APART)
        named_barrier_sync(1 + plan::WARPGROUPS + c.warpgroup, 128); // the other warps' products have read the queries
    else
        sm90_await_store();
    sm90_put_rows<plan::D>(out, state.o);
    if (a.amax)
        amax_merge_warp(a.amax, sm90_amax_of_rows<plan::D>(out, a.T - first - (int)(threadIdx.x / 32 % 4 * 16)));
    async_proxy_fence();
    __syncwarp();
    if (elect_one()) {
        const int b = sm90_quotient(tile.head, a.by_H);
        sm90_copy_rows<plan::D>(&a.out, out, tile.head - b * a.H, first, b);
        bulk_commit();
        if (!plan::O_APART) {
            bulk_wait_read<0>();
            mbarrier_arrive(empty);
        }
    }
}

// The tiles of keys of a warpgroup's 64 rows, from the last to the first, and what cuts them.
struct sm90_forward_range {
    int block_last, last;          // that the block's rows see, and this warpgroup's
    int whole;                     // from here on the diagonal cuts them
    int uncut, first, block_first; // before `uncut` first_key cuts them
};
// Returns which tiles of keys the 64 rows from `first` on, of the block's `tile`, see, and which of them are cut.
template <class plan>
DEVICE_FUNCTION struct sm90_forward_range sm90_forward_range_of(const struct sm90_forward_arguments &a,
                                                                const struct sm90_forward_tile &tile, int first) {
    const int b = sm90_quotient(tile.head, a.by_H);
    struct sm90_forward_range range;
    range.block_last = sm90_last_tile_of_keys<plan>(a, tile.first, plan::QUERIES);
    range.last = sm90_last_tile_of_keys<plan>(a, first, 64);
    range.uncut = (sm90_first_key<plan>(a, b, first + 63) + plan::KEYS - 1) / plan::KEYS;
    range.first = sm90_first_key<plan>(a, b, first) / plan::KEYS;
    range.block_first = sm90_first_key<plan>(a, b, tile.first) / plan::KEYS;
    const int whole = (a.full ? a.T : first + 1) / plan::KEYS;
    range.whole = plan::SPANS && whole < range.first ? range.first : whole;
    return range;
}
// Computes out and lse of a warpgroup's queries, in all of the block's tiles. All threads of the warpgroup call.
template <class plan>
DEVICE_FUNCTION void sm90_forward_consume(const struct sm90_forward_arguments &a,
                                          struct sm90_forward_consumer<plan> &c) {
    struct sm90_forward_state<plan> state;
    struct sm90_forward_tile tile = sm90_forward_begin();
    if (c.warpgroup == plan::WARPGROUPS - 1)
        sm90_pass_turn<plan>(c.warpgroup); // the first turn is warpgroup 0's
    while (sm90_forward_next<plan>(tile, a)) {
        const int first = tile.first + 64 * c.warpgroup;
        const struct sm90_pipeline<1> q = c.p.of_queries(c.warpgroup, tile.number);
        const struct sm90_forward_range range = sm90_forward_range_of<plan>(a, tile, first);
        const int b = sm90_quotient(tile.head, a.by_H);
        const int first_keys[2] = {sm90_first_key<plan>(a, b, first + sm90_row()),
                                   sm90_first_key<plan>(a, b, first + sm90_row() + 8)};
        int keys = range.block_last;
#pragma unroll
        for (int i = 0; i < plan::D / 2; i++)
            state.o[i] = 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            state.maximum[half] = -INFINITY;
            state.sum[half] = 0;
        }
        for (; keys > range.last; keys--)
            sm90_skip<plan>(c);
        q.wait_full();
        const int column = keys * plan::KEYS + sm90_column();
        struct sm90_seen seen = {
            {(a.full ? a.T - 1 : first + sm90_row()) - column, (a.full ? a.T - 1 : first + sm90_row() + 8) - column},
            {first_keys[0] - column, first_keys[1] - column}};
        sm90_first_keys<plan>(state, c, seen);
        for (keys--; keys >= range.whole; keys--) {
            sm90_seen_before<plan>(seen, 1);
            sm90_next_keys<SM90_DIAGONAL, plan>(state, c, seen);
        }
        if (plan::SPANS && keys >= range.uncut)
            sm90_seen_before<plan>(seen, keys + 1 - range.uncut);
        for (; keys >= range.uncut; keys--)
            sm90_next_keys<SM90_NO_MASK, plan>(state, c, seen);
        if (plan::SPANS) {
            for (; keys >= range.first; keys--) {
                sm90_seen_before<plan>(seen, 1);
                sm90_next_keys<SM90_LEFT, plan>(state, c, seen);
            }
        }
        if (plan::O_APART)
            sm90_release(q.empty());
        sm90_last_values<plan>(state, c, a, tile.head, first);
        if (plan::SPANS)
#pragma unroll 1
            for (; keys >= range.block_first; keys--)
                sm90_skip<plan>(c);
        sm90_forward_store<plan>(state, c, a, tile, q.empty());
    }
    if (plan::O_APART)
        sm90_await_store();
    if (c.warpgroup == 0)
        sm90_take_turn<plan>(c.warpgroup); // the last one passed to it: no barrier is left half full
}

// Computes forward: the first warpgroup loads, the others multiply. A block, one a multiprocessor, takes tiles in turn.
template <class plan>
static __global__ void __launch_bounds__(plan::THREADS, 1)
    sm90_forward_kernel(const __grid_constant__ struct sm90_forward_arguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(CUDA_EMULATED)
    const uint32_t shared = shared_memory();
    const int warpgroup = __shfl_sync(~0u, (int)threadIdx.x / 128, 0) - 1; // uniform, as the compiler sees now
    struct sm90_forward_consumer<plan> c;
    c.warpgroup = warpgroup;
    c.shared = shared;
    c.queries = sm90_along_rows<plan::D>(shared + (uint32_t)(warpgroup * plan::Q_BYTES));
    c.scale_log2 = a.scale_log2;
    c.p.at(shared);
    if (threadIdx.x == 0) {
        tma_prefetch_map(&a.queries);
        tma_prefetch_map(&a.keys);
        tma_prefetch_map(&a.out);
        c.p.k.open(4 * plan::WARPGROUPS);
        c.p.v.open(4 * plan::WARPGROUPS);
        for (int w = 0; w < plan::WARPGROUPS; w++)
            c.p.of_queries(w, 0).open(4);
        mbarrier_init_fence();
    }
    __syncthreads();
    if (warpgroup < 0) {
        registers_decrease<plan::PRODUCER_REGISTERS>();
        if (threadIdx.x < 32 && elect_one())
            sm90_forward_produce<plan>(a, shared, c.p);
    } else {
        registers_increase<plan::REGISTERS>();
        sm90_forward_consume<plan>(a, c);
    }
#elif defined(__CUDACC__)
    __trap(); // a build for sm_90 has no wgmma, and a GPU that takes it would be given nothing
#endif
}

// --- Launch -------------------------------------------------------------------------------------------------------

// The number of query heads of a section, in whole groups; 0: all heads at once. At 650 TFLOP/s the blocks read keys
// and values at 5 TB/s. A group's heads share these reads, so that memory can deliver them from 4 heads on. With fewer,
// a section has the heads whose keys and values fit in the L2 cache, beside Q and O, which pass through.
static int sm90_section_heads(struct attention_shape shape, double l2_bytes) {
    const int group = shape.num_heads / shape.num_query_groups, groups = shape.B * shape.num_query_groups;
    const double fit = 0.6 * l2_bytes / (2.0 * shape.T * shape.head_dim * sizeof(bf16));
    if (group >= 4 || fit >= groups)
        return 0;
    return fit < 1 ? group : (int)fit * group;
}

struct sm90_forward_buffers {
    bf16 *out;
    float *lse;
    uint32_t *amax;
    const bf16 *qkv;
    struct sm90_forward_item *order;
};
struct sm90_forward_launcher {
    template <class plan> static void launch_plan(const struct sm90_forward_arguments &a, struct device *dev) {
        static const cudaError_t prepared = cudaFuncSetAttribute(
            sm90_forward_kernel<plan>, cudaFuncAttributeMaxDynamicSharedMemorySize, plan::SHARED_BYTES);
        static const struct cudaDeviceProp properties = sm90_properties(dev);
        cuda_check(prepared);
        const int tiles = a.heads * a.blocks, most = properties.multiProcessorCount;
        LAUNCH(dev, sm90_forward_kernel<plan>, (unsigned)(tiles < most ? tiles : most), plan::THREADS,
               plan::SHARED_BYTES, a);
    }
    template <int D>
    static void launch(const struct sm90_forward_buffers &buffers, struct attention_shape shape, struct device *dev) {
        typedef sm90_forward_plan<D> plan;
        typedef sm90_forward_plan<D, true> spans;
        static const struct cudaDeviceProp properties = sm90_properties(dev);
        struct sm90_forward_arguments a;
        memset(&a, 0, sizeof a);
        a.queries = sm90_map<D>(buffers.qkv, sm90_packed_heads(shape), shape, 64);
        a.keys = sm90_map<D>(buffers.qkv, sm90_packed_heads(shape), shape, plan::KEYS);
        a.out = sm90_map<D>(buffers.out, shape.num_heads, shape, 16);
        a.lse = buffers.lse;
        a.amax = buffers.amax;
        a.T = shape.T;
        a.H = shape.num_heads;
        a.Hkv = shape.num_query_groups;
        a.full = shape.full;
        a.heads = shape.B * shape.num_heads;
        a.section_heads = sm90_section_heads(shape, properties.l2CacheSize);
        a.blocks = (int)blocks_for(shape.T, plan::QUERIES);
        a.scale_log2 = shape.scale * LOG2E;
        a.by_H = sm90_divisor_of(a.H);
        a.by_group = sm90_divisor_of(a.H / a.Hkv);
        sm90_forward_divide(a);
        a.first_key = shape.first_key;
        a.order = buffers.order;
        if (!a.first_key) {
            launch_plan<plan>(a, dev);
            return;
        }
        LAUNCH(dev, sm90_forward_order_kernel<spans>, blocks_for((int64_t)shape.B * a.blocks, SM90_ORDER_THREADS),
               SM90_ORDER_THREADS, 0, a);
        launch_plan<spans>(a, dev);
    }
};

void sm90_forward(floatX *out, float *lse, const floatX *qkv, struct attention_shape shape, uint32_t *amax,
                  void *workspace, struct device *dev) {
    const void *const aligned[2] = {qkv, out};
    const struct sm90_forward_buffers buffers = {out, lse, amax, qkv, (struct sm90_forward_item *)workspace};
    sm90_check(aligned, 2, shape);
    sm90_choose<sm90_forward_launcher>(buffers, shape, dev);
}

#endif
