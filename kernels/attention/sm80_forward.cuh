// Flash attention's forward by mma.sync; kernels/attention/sm80.cu states the design.
#pragma once
#include "kernels/attention/sm80_tiles.cuh" // struct flash_arguments, tiles, products
#include "kernels/vector_math.cuh"          // LOG2E
#include <math.h>                           // logf, INFINITY

// Tiles as in FlashAttention-2 for sm_80: 4 warps, two blocks to a multiprocessor.
template <int COLUMNS_OF_TILE, bool WITH_DROPOUT, bool WITH_PADDING, flash_scores SCORES> struct forward_plan {
    static constexpr int D = COLUMNS_OF_TILE, WARPS = 4, THREADS = 32 * WARPS;
    static constexpr bool DROPOUT = WITH_DROPOUT, PADDED = WITH_PADDING;
    static constexpr bool SPANS = SCORES != FLASH_CAUSAL, ANY = SCORES == FLASH_ANY;
    typedef typename flash_arguments_for<SCORES>::type arguments;
    static constexpr int M = D == 256 || (FP32 && D > 64) ? 1 : 2; // 16-row blocks of a warp
    static constexpr int QUERIES = 16 * M * WARPS;                 // of a block
    // Of a tile. FLASH_SPANS has the tiles of FLASH_CAUSAL, and so the same bits where spans hide nothing.
    static constexpr int KEYS =
        FP32 ? D == 256 ? 16 : 32 : (D == 64 ? 128 : 64) / (DROPOUT || ANY || (PADDED && D == 128) ? 2 : 1);
    // UNROLL: of the loop over D. SKIP_LEFT: a warp tests whether a tile lies before all that its rows see. MASK_ALL:
    // every tile is masked, so that the loop over tiles has one body.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 // see thread_index()
    static constexpr int UNROLL = 1;
    static constexpr bool HIDE_KEYS = SPANS || DROPOUT || D == 128, HIDE_VALUES = SPANS || DROPOUT;
    static constexpr bool SKIP_LEFT = SPANS && D != 64, MASK_ALL = SPANS;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    static constexpr int UNROLL = D == 128 && !DROPOUT && !PADDED && !SPANS ? 2 : 1;
    static constexpr bool HIDE_KEYS = SPANS || (DROPOUT && D != 128), HIDE_VALUES = HIDE_KEYS;
    static constexpr bool SKIP_LEFT = SPANS && D != 64, MASK_ALL = FP32 && D == 256;
#else
    static constexpr int UNROLL = D == 128 && !DROPOUT && !PADDED && !SPANS ? 2 : 1;
    static constexpr bool HIDE_KEYS = SPANS || DROPOUT || D == 128,
                          HIDE_VALUES = SPANS || DROPOUT || (PADDED && D == 128);
    static constexpr bool SKIP_LEFT = SPANS, MASK_ALL = FP32 && (D == 256 || (D == 64 && ANY && DROPOUT));
#endif
    static constexpr bool LATE = FP32 && D == 256; // see zero_after()
    static constexpr int SHARED_BYTES = (QUERIES + 2 * KEYS) * ELEMENT * D;
};

template <class plan> struct forward_state {
    float o[plan::M][plan::D / 8][4]; // sum of P V, P relative to the maximum so far
    float maximum[plan::M][2], sum[plan::M][2];
    uint32_t step; // of dropout
};

// Does one tile's step of the online softmax: raises the maximum, rescales o and sum to it, and turns s into exp2((s -
// maximum) scale_log2). sum is of this lane's columns only; forward_finish adds up the lanes.
template <class plan>
DEVICE_FUNCTION void forward_softmax(float s[plan::M][plan::KEYS / 8][4], struct forward_state<plan> &state,
                                     float scale_log2) {
#pragma unroll
    for (int m = 0; m < plan::M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float maximum = state.maximum[m][half];
#pragma unroll
            for (int n = 0; n < plan::KEYS / 8; n++)
                maximum = fmaxf(maximum, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
            maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 1)); // a row is in the four lanes of a quad
            maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 2));
            // fp32: the former sum's own shift, whose rounding counts.
            const float rescale =
                exp2_approx(FP32 ? add_rounded(state.maximum[m][half] * scale_log2, -(maximum * scale_log2))
                                 : (state.maximum[m][half] - maximum) * scale_log2);
            const float shift = maximum * scale_log2;
            float sum = state.sum[m][half] * rescale; // of this lane's columns; the quad is summed once, at the end
#pragma unroll
            for (int n = 0; n < plan::KEYS / 8; n++)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    s[m][n][i] = exp2_approx(fmaf(s[m][n][i], scale_log2, -shift));
                    sum += s[m][n][i];
                }
#pragma unroll
            for (int n = 0; n < plan::D / 8; n++)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++)
                    state.o[m][n][i] *= rescale;
            state.maximum[m][half] = maximum;
            state.sum[m][half] = sum;
        }
}

// Sets scores of keys after their query to -inf. first_row: the warp's first query; first_column: the tile's first key.
template <class plan>
DEVICE_FUNCTION void forward_mask(float s[plan::M][plan::KEYS / 8][4], int first_row, int first_column) {
    const int lane = thread_index<(plan::D > 64 || plan::SPANS)>() % 32;
    const int row = first_row - first_column + lane / 4 - lane % 4 * 2; // as seen from the column
#pragma unroll
    for (int m = 0; m < plan::M; m++)
#pragma unroll
        for (int n = 0; n < plan::KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (fragment_column(n, i) - fragment_row(m, i) > row)
                    s[m][n][i] = -INFINITY;
}

// Sets scores of keys before a row's first_key to -inf. token: the sequence's first row; the rest as in forward_mask.
template <class plan>
DEVICE_FUNCTION void forward_mask_left(float s[plan::M][plan::KEYS / 8][4], const typename plan::arguments &a,
                                       int64_t token, int first_row, int first_column) {
    const int lane = thread_index<true>() % 32;
#pragma unroll
    for (int m = 0; m < plan::M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = first_row + lane / 4 + fragment_row(m, 2 * half);
            const int first = first_key_of<plan>(a, token, row) - first_column - lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < plan::KEYS / 8; n++)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++)
                    if (fragment_column(n, i) < first)
                        s[m][n][i] = -INFINITY;
        }
}

// Replaces each s, a product q k, by score_tanh(s, factor). Times score_unit(), the result is the capped score.
template <class plan> DEVICE_FUNCTION void forward_cap(float s[plan::M][plan::KEYS / 8][4], float factor) {
#pragma unroll
    for (int m = 0; m < plan::M; m++)
#pragma unroll
        for (int n = 0; n < plan::KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[m][n][i] = score_tanh(s[m][n][i], factor);
}

// Multiplies the elements of P that are kept by `scale`, the others by 0.
template <class plan>
DEVICE_FUNCTION void forward_dropout(float s[plan::M][plan::KEYS / 8][4],
                                     const struct dropout_bits<plan::M, plan::KEYS> &kept, float scale) {
#pragma unroll
    for (int m = 0; m < plan::M; m++)
#pragma unroll
        for (int n = 0; n < plan::KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[m][n][i] *= kept.mask(m, n, i, scale);
}

// Adds a tile of keys to `state`. All threads must call this, for one tile after the other, down to tile `lowest`. This
// tile's K must be on its way on entry, as the next tile's is on return. K and V have a buffer each: V arrives while S
// is computed, the next K while O is. queries, keys and values are shared-memory addresses; first_row is the block's.
template <bool MASKED, class plan>
DEVICE_FUNCTION void forward_tile(struct forward_state<plan> &state, const typename plan::arguments &a,
                                  const struct head_views &view, int64_t head, int first_row, int tile, int lowest,
                                  uint32_t queries, uint32_t keys, uint32_t values) {
    constexpr int D = plan::D, M = plan::M, KEYS = plan::KEYS;
    const int warp_row = 16 * M * (thread_index<(D > 64 || plan::SPANS)>() / 32);
    float s[M][KEYS / 8][4];
    struct dropout_bits<M, KEYS> kept;
    const bool visible = // to this warp
        (!MASKED || plan::QUERIES <= KEYS || tile * KEYS <= first_row + warp_row + 16 * M - 1) &&
        (!MASKED || !plan::SKIP_LEFT || (tile + 1) * KEYS > first_key_of<plan>(a, view.token, first_row + warp_row));
    cp_async_wait<0>();
    __syncthreads();
    load_tile<plan, KEYS>(values, view.v, a.qkv_stride, tile * KEYS, a);
    cp_async_commit();
    if (visible) {
        if (plan::DROPOUT)
            kept.make(a.dropout, state.step,
                      (uint64_t)(head * a.T + first_row + warp_row + lane_row()) * (uint64_t)a.T +
                          (uint64_t)(tile * KEYS + lane_column()),
                      1, (uint64_t)a.T);
        struct left_rows<D, M, false> q;
        q.template open<plan::LATE && plan::ANY>(queries, warp_row);
        if constexpr (FP32) {
            multiply_in_runs<plan::UNROLL, D, M, KEYS / 8>(s, q, origin_right<D, plan::HIDE_KEYS>(keys), 0);
        } else {
            clear<M, KEYS / 8>(s);
#pragma unroll(MASKED ? 1 : plan::UNROLL)
            for (int k = 0; k < D / STEP; k++) { // unrolled further, operands are loaded so far ahead that there are
                struct word_x4 left[M];          // spills
                q.at(left, k);
                multiply_transposed<D, M, KEYS / 8>(s, left, origin_right<D, plan::HIDE_KEYS>(keys), 0, k);
            }
        }
        if constexpr (plan::ANY)
            if (has_cap<plan>(a))
                forward_cap<plan>(s, cap_factor(a));
        if (MASKED)
            forward_mask<plan>(s, first_row + warp_row, tile * KEYS);
        if constexpr (MASKED && plan::SPANS)
            forward_mask_left<plan>(s, a, view.token, first_row + warp_row, tile * KEYS);
    }
    cp_async_wait<0>();
    __syncthreads();
    if (tile > (plan::SPANS ? lowest : 0))
        load_tile<plan, KEYS>(keys, view.k, a.qkv_stride, (tile - 1) * KEYS, a);
    cp_async_commit();
    if (visible) {
        forward_softmax<plan>(s, state, score_unit(a) * LOG2E);
        if (plan::DROPOUT)
            forward_dropout<plan>(s, kept, 1.0f / (1.0f - a.dropout.p));
        if constexpr (FP32) {
            const uint32_t stage = values + zero_after<plan::LATE>(tile);
            accumulate<D, M, D / 8, KEYS>(state.o, s, origin_rows<D, plan::HIDE_VALUES>(stage), 0);
        } else {
#pragma unroll
            for (int k = 0; k < KEYS / STEP; k++) { // each step makes a hidden origin again
                struct word_x4 p[M];
                to_left<M, KEYS / 8>(p, s, k);
                multiply<D, M, D / 8>(state.o, p, origin_rows<D, plan::HIDE_VALUES>(values), STEP * k);
            }
        }
    }
}

// Writes the warp's O / sum and, unless a.lse is NULL, lse = score_unit() maximum + ln(sum). bf16 overwrites Q.
template <class plan>
DEVICE_FUNCTION void forward_finish(struct forward_state<plan> &state, const typename plan::arguments &a,
                                    const struct head_views &view, int64_t head, int first_row, uint32_t queries) {
    const int warp_row = 16 * plan::M * ((int)threadIdx.x / 32);
#pragma unroll
    for (int m = 0; m < plan::M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = state.sum[m][half];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            const int row = first_row + warp_row + lane_row() + fragment_row(m, 2 * half);
            if (a.lse && threadIdx.x % 4 == 0 && row < a.T)
                a.lse[head * a.T + row] = state.maximum[m][half] * score_unit(a) + logf(sum);
            const float inverse = 1.0f / sum;
#pragma unroll
            for (int n = 0; n < plan::D / 8; n++) {
                state.o[m][n][2 * half] *= inverse;
                state.o[m][n][2 * half + 1] *= inverse;
            }
        }
    // Only this warp has read its rows of Q, and it will not read them again.
    store_rows<plan, 16 * plan::M, plan::D>(a.out + view.out_offset, a.out_stride, first_row + warp_row, a, queries,
                                            warp_row, 0, state.o);
}

// Computes plan::QUERIES queries of a head per block of flash_grid. Writes a.out and, unless NULL, a.lse. The blocks
// with the most keys start first. Keys go from the diagonal down, so that each row has a maximum after its first tile.
template <class plan>
static __global__ void __launch_bounds__(plan::THREADS, 2) flash_forward_kernel(const typename plan::arguments a) {
    constexpr int D = plan::D, QUERIES = plan::QUERIES, KEYS = plan::KEYS;
    const int first_row = (int)(gridDim.x - 1 - blockIdx.x) * QUERIES, h = (int)blockIdx.y, b = (int)blockIdx.z;
    const int64_t head = (int64_t)b * a.H + h;
    const struct head_views view = view_head<plan>(a, b, h);
    const uint32_t queries = shared_memory(), keys = queries + QUERIES * ELEMENT * D,
                   values = keys + KEYS * ELEMENT * D;
    const int end = first_row + QUERIES < a.T ? first_row + QUERIES : a.T;

    struct forward_state<plan> state;
    state.step = plan::DROPOUT ? (uint32_t)dropout_step(a.dropout) : 0;
    clear<plan::M, D / 8>(state.o);
#pragma unroll
    for (int m = 0; m < plan::M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            state.maximum[m][half] = -INFINITY;
            state.sum[m][half] = 0;
        }
    int tile = (end - 1) / KEYS;
    load_tile<plan, QUERIES>(queries, view.q, a.qkv_stride, first_row, a);
    load_tile<plan, KEYS>(keys, view.k, a.qkv_stride, tile * KEYS, a);
    cp_async_commit();
    if constexpr (plan::SPANS) {
        const int lowest = first_key_of<plan>(a, view.token, first_row) / KEYS;
        const int all_see = first_key_of<plan>(a, view.token, end - 1); // every query sees the keys from here
        for (; tile >= lowest; tile--)
            if (plan::MASK_ALL || (tile + 1) * KEYS - 1 > first_row || tile * KEYS < all_see)
                forward_tile<true, plan>(state, a, view, head, first_row, tile, lowest, queries, keys, values);
            else
                forward_tile<false, plan>(state, a, view, head, first_row, tile, lowest, queries, keys, values);
    } else {
        for (; (plan::MASK_ALL || (tile + 1) * KEYS - 1 > first_row) && tile >= 0; tile--)
            forward_tile<true, plan>(state, a, view, head, first_row, tile, 0, queries, keys, values);
        if constexpr (!plan::MASK_ALL)
            for (; tile >= 0; tile--)
                forward_tile<false, plan>(state, a, view, head, first_row, tile, 0, queries, keys, values);
    }
    if constexpr (plan::LATE) {
        const uint32_t zero = zero_after<true>(tile + 1);
        const int row = (int)(first_row + zero), late_h = (int)(blockIdx.y + zero), late_b = (int)(blockIdx.z + zero);
        typename plan::arguments late = a;
        late.T = (int)(a.T + zero);
        late.H = (int)(a.H + zero);
        late.out_stride = (int)(a.out_stride + zero);
        forward_finish<plan>(state, late, view_head<plan>(late, late_b, late_h), (int64_t)late_b * late.H + late_h, row,
                             queries);
    } else {
        forward_finish<plan>(state, a, view, head, first_row, queries);
    }
}
