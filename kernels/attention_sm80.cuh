// Flash attention by mma.sync, for sm_80 and every GPU after it: causal, bf16 in and out, sums in fp32.
//
//   S = Q K^T, P = softmax(scale S) over j <= i, O = dropout(P) V
//
// after FlashAttention-2 (Dao, 2023, arXiv:2307.08691): no (T, T) matrix reaches memory; forward keeps the logarithm of
// each row's sum (lse), from which backward makes P again.
//
// The policy of this file:
// - Packed (B, T, (H + 2 Hkv) D) is read and its gradient written in place, in 16-byte accesses; K and V are never
//   expanded: query head h reads KV head h / (H / Hkv).
// - Every result has one writer and every sum one order, so that the same inputs give the same bits.
// - Rows past T are zeroes in shared memory and are not written. A query below T attends to no key past T because of
//   the causal mask, so that no other test of T is needed.
// - Tiles have 64, 96, 128 or 256 columns. A head of another size, a multiple of 8, takes the next larger tile, with
//   zeroes in the columns past it, which add nothing to any product and are not written: instances of their own, so
//   that the exact sizes pay nothing for it.
// - Backward is two kernels. One holds dQ of a block of queries in registers and runs over the keys; it also makes
//   delta = rowsum(dO O). The other holds dK and dV of a block of keys of one KV head and runs over the queries of
//   every query head of the group. S and dP are made twice, which costs 7 matmuls where 5 are the minimum; in return dQ
//   needs neither an fp32 buffer in memory nor an order among blocks, and nothing is zeroed or converted afterwards.
// - In shared memory the 16-byte units of a row are XORed with the row's number, so that the eight rows an ldmatrix
//   reads lie in different banks.
#pragma once
#include "kernels/attention_flash.cuh" // the prototypes of what is defined here
#include "kernels/device.cuh"          // bf16, floatX, struct device, LAUNCH
#include "kernels/packed.cuh"          // packed_check
#include "kernels/ptx.cuh"             // mma_m16n8k16, ldmatrix_x4, cp_async_16, exp2_approx, pack_bf16x2
#include "kernels/random.cuh"          // struct dropout, philox4x32
#include "kernels/vector_math.cuh"     // LOG2E
#include "runtime/machine/error.h"     // fail
#include <math.h>                      // logf, INFINITY
#include <stdio.h>                     // snprintf

enum { FLASH_MAX_HEAD_DIM = 256 }; // the largest tile

static void flash_unavailable_reason(char *reason, size_t size, struct attention_shape shape) {
    reason[0] = 0;
    if (sizeof(floatX) != 2)
        snprintf(reason, size, "takes bf16 alone: --precision bf16");
    else if (shape.head_dim % 8 != 0 || shape.head_dim > FLASH_MAX_HEAD_DIM)
        snprintf(reason, size, "takes heads of a multiple of 8 up to %d, not %d", FLASH_MAX_HEAD_DIM, shape.head_dim);
    else if (shape.B > 65535 || shape.num_heads > 65535) // the grid's other dimensions
        snprintf(reason, size, "takes at most 65535 sequences and heads: lower --micro-batch-size");
}
static const char *flash_describe(void) { return "mma.sync bf16"; }

// Forward needs no workspace; backward keeps lse log2(e) and delta of each row there.
static size_t flash_forward_workspace_bytes(struct attention_shape shape) { return 0; }
static size_t flash_backward_workspace_bytes(struct attention_shape shape) {
    return sizeof(float2) * (size_t)shape.B * (size_t)shape.num_heads * (size_t)shape.T;
}

#ifdef PRECISION_BF16

// The arguments of all three kernels.
struct flash_arguments {
    const bf16 *qkv;  // (B, T, (H + 2 Hkv) D)
    bf16 *out;        // (B, T, H D); only read by backward
    float *lse;       // (B, H, T), natural logarithm, or NULL; only read by backward
    const bf16 *dout; // (B, T, H D)
    bf16 *dqkv;       // (B, T, (H + 2 Hkv) D)
    float2 *rows;     // (B, H, T): lse log2(e), delta
    int T, H, Hkv, head_dim;
    int qkv_stride, out_stride; // elements from token to token
    uint32_t group_magic; // h / (H / Hkv) = h group_magic >> 31, so that a head's addresses stay in uniform registers
    float scale;
    struct dropout dropout;
};

// threadIdx.x. What a thread computes from it for a tile is cheap to compute, but kept from tile to tile it takes
// registers that the accumulators need. Where HIDDEN, the compiler computes it again. Which uses are hidden, and how
// far forward's loop over D is unrolled, is what ptxas of CUDA 13.0 needs to spill nothing in any forward kernel, on
// sm_80 and sm_90a; with nothing hidden and all unrolled it spills up to 120 bytes. `make ptxas` fails on a spill.
template <bool HIDDEN> DEVICE_FUNCTION int thread_index(void) {
    return HIDDEN ? hide_value((int)threadIdx.x) : (int)threadIdx.x;
}

// The size of a head: a constant where the tile has no columns past it.
template <class plan> DEVICE_FUNCTION int head_size(const struct flash_arguments &a) {
    return plan::PADDED ? a.head_dim : plan::D;
}

// --- Tiles: rows of D bf16 in shared memory -----------------------------------------------------------------------

// The 16-byte units of a row are permuted in groups of 128 bytes, or of 64 where a row is not a multiple of 128 bytes.
template <int D> struct tile_layout { static constexpr int ROW_BYTES = 2 * D, GROUP = D % 64 == 0 ? 8 : 4; };

template <int D> DEVICE_FUNCTION uint32_t tile_offset(int row, int piece) {
    typedef tile_layout<D> layout;
    const int permutation = layout::GROUP == 8 ? row & 7 : row >> 1 & 3;
    return (uint32_t)(row * layout::ROW_BYTES + ((piece ^ permutation) << 4));
}

// ldmatrix's address of the 16 x 16 block at (row, column), both multiples of 16, given that of the block at (0, 0). As
// blocks lie a multiple of 8 rows apart, only the lane's part and a constant meet in the XOR.
template <int D> DEVICE_FUNCTION uint32_t block_address(uint32_t origin, int row, int column) {
    constexpr int GROUP_COLUMNS = 8 * tile_layout<D>::GROUP;
    return (origin ^ (uint32_t)(column % GROUP_COLUMNS * 2)) +
           (uint32_t)(column / GROUP_COLUMNS * (2 * GROUP_COLUMNS) + row * tile_layout<D>::ROW_BYTES);
}
// The block at (0, 0) with its four 8 x 8 matrices in the order down, then right: a left operand, or, transposed by
// ldmatrix, two right operands of 16 x 8 side by side.
template <int D, bool HIDDEN = false> DEVICE_FUNCTION uint32_t origin_down(uint32_t tile) {
    const int lane = thread_index<HIDDEN>() % 32;
    return tile + tile_offset<D>(lane % 16, lane / 16);
}
// In the order right, then down: rows 0-7 and 8-15 as two right operands that are used transposed.
template <int D, bool HIDDEN = false> DEVICE_FUNCTION uint32_t origin_right(uint32_t tile) {
    const int lane = thread_index<HIDDEN>() % 32;
    return tile + tile_offset<D>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

// Starts copying rows first .. first + ROWS - 1 of a head's part of a matrix to a tile; rows past T and columns past
// the head become zeroes. A thread's rows are a multiple of 8 apart, so that its address in the tile is one offset plus
// constants.
template <class plan, int ROWS>
DEVICE_FUNCTION void load_tile(uint32_t tile, const bf16 *matrix, int row_stride, int first,
                               const struct flash_arguments &a) {
    constexpr int D = plan::D, GROUP = tile_layout<D>::GROUP, ROWS_AT_ONCE = plan::THREADS / GROUP;
    static_assert(ROWS % ROWS_AT_ONCE == 0 && ROWS_AT_ONCE % 8 == 0, "every thread copies the same number of pieces");
    const int thread = thread_index<true>(), row = thread / GROUP, piece = thread % GROUP;
    // The block's part of the address and the thread's are kept apart: the thread's takes one register. Past T it is
    // not followed.
    const bf16 *from = matrix + (int64_t)first * row_stride + (uint32_t)(row * row_stride + piece * 8);
    const uint32_t to = tile + tile_offset<D>(row, piece);
#pragma unroll
    for (int i = 0; i < ROWS; i += ROWS_AT_ONCE)
#pragma unroll
        for (int j = 0; j < D / 8; j += GROUP)
            cp_async_16(to + (uint32_t)(i * tile_layout<D>::ROW_BYTES + 16 * j), from + (int64_t)i * row_stride + 8 * j,
                        first + row + i < a.T && (!plan::PADDED || 8 * (piece + j) < a.head_dim));
}

// Writes this warp's ROWS x COLUMNS of accumulators, as bf16, by way of its own part of a tile, so that global memory
// sees 16-byte writes. Rows past T and columns past the head are left out. acc is ROWS/16 x COLUMNS/8 fragments.
template <class plan, int ROWS, int COLUMNS>
DEVICE_FUNCTION void store_rows(bf16 *matrix, int row_stride, int first, const struct flash_arguments &a, uint32_t tile,
                                int tile_row, int tile_column, const float acc[ROWS / 16][COLUMNS / 8][4]) {
    constexpr int D = plan::D;
    const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < ROWS / 16; m++)
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                store_shared_word(tile + tile_offset<D>(tile_row + 16 * m + 8 * half + g, tile_column / 8 + n) + 4 * t,
                                  pack_bf16x2(acc[m][n][2 * half], acc[m][n][2 * half + 1]));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < ROWS * COLUMNS / 8 / 32; i++) {
        const int at = 32 * i + lane, row = at / (COLUMNS / 8), piece = at % (COLUMNS / 8);
        const struct word_x4 words = load_shared_words(tile + tile_offset<D>(tile_row + row, tile_column / 8 + piece));
        if (first + row < a.T && (!plan::PADDED || tile_column + 8 * piece < a.head_dim)) {
            bf16 *to = matrix + (int64_t)(first + row) * row_stride + tile_column + piece * 8;
            packed_check(to, true);
            *(uint4 *)to = make_uint4(words.x[0], words.x[1], words.x[2], words.x[3]);
        }
    }
}

// --- Products of one warp -----------------------------------------------------------------------------------------

// A warp's 16 M rows of a tile as left operands, either held in registers or read again at each use.
template <int D, int M, bool IN_REGISTERS> struct left_rows {
    uint32_t address;
    struct word_x4 fragment[IN_REGISTERS ? D / 16 : 1][M];

    __device__ __forceinline__ void open(uint32_t tile, int row) {
        address = block_address<D>(origin_down<D>(tile), row, 0);
        if (IN_REGISTERS)
#pragma unroll
            for (int k = 0; k < D / 16; k++)
                read(fragment[k], k);
    }
    __device__ __forceinline__ void read(struct word_x4 to[M], int k) const {
#pragma unroll
        for (int m = 0; m < M; m++)
            to[m] = ldmatrix_x4(block_address<D>(address, 16 * m, 16 * k));
    }
    __device__ __forceinline__ void at(struct word_x4 to[M], int k) const {
        if (IN_REGISTERS)
#pragma unroll
            for (int m = 0; m < M; m++)
                to[m] = fragment[IN_REGISTERS ? k : 0][m];
        else
            read(to, k);
    }
};

template <int M, int N> DEVICE_FUNCTION void clear(float acc[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                acc[m][n][i] = 0;
}

template <int M, int N> DEVICE_FUNCTION void scale_all(float acc[M][N][4], float factor) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                acc[m][n][i] *= factor;
}

// One step k of acc (16 M x 8 N) += left (16 M x D) . rows^T, with `rows` N/2 blocks of 16 rows from row `first` on.
template <int D, int M, int N>
DEVICE_FUNCTION void multiply_transposed(float acc[M][N][4], const struct word_x4 left[M], uint32_t right_origin,
                                         int first, int k) {
#pragma unroll
    for (int n = 0; n < N / 2; n++) {
        const struct word_x4 right = ldmatrix_x4(block_address<D>(right_origin, first + 16 * n, 16 * k));
#pragma unroll
        for (int m = 0; m < M; m++) {
            mma_m16n8k16(acc[m][2 * n], left[m].x, right.x[0], right.x[1]);
            mma_m16n8k16(acc[m][2 * n + 1], left[m].x, right.x[2], right.x[3]);
        }
    }
}

// acc (16 M x 8 N) += left (16 M x 16) . the 16 rows of a tile from row `first` on.
template <int D, int M, int N>
DEVICE_FUNCTION void multiply(float acc[M][N][4], const struct word_x4 left[M], uint32_t down_origin, int first) {
#pragma unroll
    for (int n = 0; n < N / 2; n++) {
        const struct word_x4 right = ldmatrix_x4_trans(block_address<D>(down_origin, first, 16 * n));
#pragma unroll
        for (int m = 0; m < M; m++) {
            mma_m16n8k16(acc[m][2 * n], left[m].x, right.x[0], right.x[1]);
            mma_m16n8k16(acc[m][2 * n + 1], left[m].x, right.x[2], right.x[3]);
        }
    }
}

// Accumulator fragments of columns 16 k .. 16 k + 15, rounded to bf16, as left operands: no lane needs another's
// values.
template <int M, int N> DEVICE_FUNCTION void to_left(struct word_x4 left[M], const float acc[M][N][4], int k) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            left[m].x[i] = pack_bf16x2(acc[m][2 * k + i / 2][i % 2 * 2], acc[m][2 * k + i / 2][i % 2 * 2 + 1]);
}

// Element i of fragment (m, n) of a warp is at row 16 m + 8 (i / 2) + lane_row() and column 8 n + i % 2 +
// lane_column(). The lane's part is kept apart from the constants, so that a comparison takes one register, not one for
// each column.
DEVICE_FUNCTION int lane_row(void) { return (int)threadIdx.x % 32 / 4; }
DEVICE_FUNCTION int lane_column(void) { return 2 * ((int)threadIdx.x % 4); }
DEVICE_FUNCTION constexpr int fragment_row(int m, int i) { return 16 * m + 8 * (i / 2); }
DEVICE_FUNCTION constexpr int fragment_column(int n, int i) { return 8 * n + i % 2; }

// --- Dropout ------------------------------------------------------------------------------------------------------

// The four words of block element / 4, as dropout_scale() of kernels/random.cuh makes them.
DEVICE_FUNCTION struct philox_words dropout_words(const struct dropout &d, uint32_t step, uint64_t element) {
    return philox4x32((uint32_t)(element / 4), (uint32_t)(element / 4 >> 32), step, d.layer << 8 | d.use,
                      (uint32_t)d.seed, (uint32_t)(d.seed >> 32));
}
// 1 where the element is kept.
DEVICE_FUNCTION uint32_t dropout_keeps(const struct dropout &d, const struct philox_words &words, uint64_t element) {
    const uint32_t even = element & 2 ? words.word[2] : words.word[0],
                   odd = element & 2 ? words.word[3] : words.word[1];
    return uniform_from_word(element & 1 ? odd : even) >= d.p;
}

// Bits that say which of this lane's elements of 16 M x COLUMNS accumulators are kept. They are made before the
// accumulators, in a rolled loop, because Philox in the middle of the products would take the accumulators' registers.
// Fragment (m, n), element i is bit ((2 m + i / 2) COLUMNS / 8 + n) 2 + i % 2.
template <int M, int COLUMNS> struct dropout_bits {
    static constexpr int PAIRS = 2 * M * COLUMNS / 8, WORDS = (PAIRS + 15) / 16;
    uint32_t word[WORDS];

    __device__ __forceinline__ float mask(int m, int n, int i, float kept) const {
        const int bit = ((2 * m + i / 2) * (COLUMNS / 8) + n) * 2 + i % 2;
        return word[bit / 32] >> bit % 32 & 1 ? kept : 0.0f;
    }
    // first: number of the lane's first element; a step to the right and one down add `right` and `down` to it. The
    // lane's elements come in pairs side by side; where `right` is 1, mostly both are in one block of four.
    __device__ __forceinline__ void make(const struct dropout &d, uint32_t step, uint64_t first, uint64_t right,
                                         uint64_t down) {
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            uint32_t bits = 0;
#pragma unroll 1
            for (int j = 0; j < PAIRS - 16 * w && j < 16; j++) {
                const int pair = 16 * w + j;
                const uint64_t e0 =
                    first + (uint64_t)(pair % (COLUMNS / 8) * 8) * right + (uint64_t)(pair / (COLUMNS / 8) * 8) * down;
                const uint64_t e1 = e0 + right;
                const struct philox_words words0 = dropout_words(d, step, e0);
                const struct philox_words words1 = e0 / 4 == e1 / 4 ? words0 : dropout_words(d, step, e1);
                bits |= (dropout_keeps(d, words0, e0) | dropout_keeps(d, words1, e1) << 1) << 2 * j;
            }
            word[w] = bits;
        }
    }
};

// --- Forward ------------------------------------------------------------------------------------------------------

// Tiles as in FlashAttention-2 for sm_80: 4 warps, two blocks to a multiprocessor.
template <int COLUMNS_OF_TILE, bool WITH_DROPOUT, bool WITH_PADDING> struct forward_plan {
    static constexpr int D = COLUMNS_OF_TILE, WARPS = 4, THREADS = 32 * WARPS;
    static constexpr bool DROPOUT = WITH_DROPOUT, PADDED = WITH_PADDING;
    static constexpr int M = D == 256 ? 1 : 2;                             // 16-row blocks of a warp
    static constexpr int QUERIES = 16 * M * WARPS;                         // of a block
    static constexpr int UNROLL = D == 128 && !DROPOUT && !PADDED ? 2 : 1; // of the loop over D
    static constexpr int KEYS = (D == 64 ? 128 : 64) / (DROPOUT || (PADDED && D == 128) ? 2 : 1); // of a tile
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900                                                // see thread_index()
    static constexpr bool HIDE_KEYS = DROPOUT && D != 128, HIDE_VALUES = HIDE_KEYS;
#else
    static constexpr bool HIDE_KEYS = DROPOUT || D == 128, HIDE_VALUES = DROPOUT || (PADDED && D == 128);
#endif
    static constexpr int SHARED_BYTES = (QUERIES + 2 * KEYS) * 2 * D;
};

template <class plan> struct forward_state {
    float o[plan::M][plan::D / 8][4]; // sum of P V, P relative to the maximum so far
    float maximum[plan::M][2], sum[plan::M][2];
    uint32_t step; // of dropout
};

// Online softmax: s becomes exp2((s - maximum) scale_log2); o and sum are rescaled to the new maximum.
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
            const float rescale = exp2_approx((state.maximum[m][half] - maximum) * scale_log2);
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

template <class plan>
DEVICE_FUNCTION void forward_mask(float s[plan::M][plan::KEYS / 8][4], int first_row, int first_column) {
    const int lane = thread_index<(plan::D > 64)>() % 32;
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

// Where the parts of one (batch, query head) lie: the head's first query, its group's first key and value.
struct head_views {
    const bf16 *q, *k, *v;
    int64_t qkv_offset, out_offset; // of q in qkv, and of the head in out
};
template <class plan> DEVICE_FUNCTION struct head_views view_head(const struct flash_arguments &a, int b, int h) {
    const int D = head_size<plan>(a);
    struct head_views view;
    const int64_t token = (int64_t)b * a.T;
    const int group = (int)((uint64_t)(uint32_t)h * a.group_magic >> 31);
    view.qkv_offset = token * a.qkv_stride + h * D;
    view.out_offset = token * a.out_stride + h * D;
    view.q = a.qkv + view.qkv_offset;
    view.k = a.qkv + token * a.qkv_stride + (a.H + group) * D;
    view.v = view.k + a.Hkv * D;
    return view;
}

// One tile of keys. On entry the copies of K of this tile, and all before, are in flight; on return that of the next K
// is. There is one buffer each for K and V: V arrives while S is made, the next K while O is.
template <bool MASKED, class plan>
DEVICE_FUNCTION void forward_tile(struct forward_state<plan> &state, const struct flash_arguments &a,
                                  const struct head_views &view, int64_t head, int first_row, int tile,
                                  uint32_t queries, uint32_t keys, uint32_t values) {
    constexpr int D = plan::D, M = plan::M, KEYS = plan::KEYS;
    const int warp_row = 16 * M * (thread_index<(D > 64)>() / 32);
    float s[M][KEYS / 8][4];
    struct dropout_bits<M, KEYS> kept;
    const bool visible =
        !MASKED || plan::QUERIES <= KEYS || tile * KEYS <= first_row + warp_row + 16 * M - 1; // to this warp
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
        q.open(queries, warp_row);
        clear<M, KEYS / 8>(s);
#pragma unroll(MASKED ? 1 : plan::UNROLL)
        for (int k = 0; k < D / 16; k++) { // unrolled further, operands are loaded so far ahead that there are spills
            struct word_x4 left[M];
            q.at(left, k);
            multiply_transposed<D, M, KEYS / 8>(s, left, origin_right<D, plan::HIDE_KEYS>(keys), 0, k);
        }
        if (MASKED)
            forward_mask<plan>(s, first_row + warp_row, tile * KEYS);
    }
    cp_async_wait<0>();
    __syncthreads();
    if (tile > 0)
        load_tile<plan, KEYS>(keys, view.k, a.qkv_stride, (tile - 1) * KEYS, a);
    cp_async_commit();
    if (visible) {
        forward_softmax<plan>(s, state, a.scale * LOG2E);
        if (plan::DROPOUT)
            forward_dropout<plan>(s, kept, 1.0f / (1.0f - a.dropout.p));
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            struct word_x4 p[M];
            to_left<M, KEYS / 8>(p, s, k);
            multiply<D, M, D / 8>(state.o, p, origin_down<D, plan::HIDE_VALUES>(values), 16 * k);
        }
    }
}

// O / sum and lse = scale maximum + ln(sum).
template <class plan>
DEVICE_FUNCTION void forward_finish(struct forward_state<plan> &state, const struct flash_arguments &a,
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
                a.lse[head * a.T + row] = state.maximum[m][half] * a.scale + logf(sum);
            const float inverse = 1.0f / sum;
#pragma unroll
            for (int n = 0; n < plan::D / 8; n++) {
                state.o[m][n][2 * half] *= inverse;
                state.o[m][n][2 * half + 1] *= inverse;
            }
        }
    // This warp alone has read its rows of Q, and will not again.
    store_rows<plan, 16 * plan::M, plan::D>(a.out + view.out_offset, a.out_stride, first_row + warp_row, a, queries,
                                            warp_row, 0, state.o);
}

// One block: plan::QUERIES queries of one head. Keys are visited from the diagonal down to 0, so that the masked tiles
// come first and a row's maximum is finite from its first tile on; the blocks with the most keys start first.
template <class plan>
static __global__ void __launch_bounds__(plan::THREADS, 2) flash_forward_kernel(const struct flash_arguments a) {
    constexpr int D = plan::D, QUERIES = plan::QUERIES, KEYS = plan::KEYS;
    const int first_row = (int)(gridDim.x - 1 - blockIdx.x) * QUERIES, h = (int)blockIdx.y, b = (int)blockIdx.z;
    const int64_t head = (int64_t)b * a.H + h;
    const struct head_views view = view_head<plan>(a, b, h);
    const uint32_t queries = shared_memory(), keys = queries + QUERIES * 2 * D, values = keys + KEYS * 2 * D;
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
    for (; (tile + 1) * KEYS - 1 > first_row && tile >= 0; tile--)
        forward_tile<true, plan>(state, a, view, head, first_row, tile, queries, keys, values);
    for (; tile >= 0; tile--)
        forward_tile<false, plan>(state, a, view, head, first_row, tile, queries, keys, values);
    forward_finish<plan>(state, a, view, head, first_row, queries);
}

// --- Backward: P and dS of a chunk --------------------------------------------------------------------------------

// From an element of S and dP: P = exp2(scale_log2 S - lse_log2), dS = P (dP - delta). `mask` is dropout's: P is scaled
// by it as in forward, and dP before it is used.
struct backward_element {
    float p, ds;
};
DEVICE_FUNCTION struct backward_element backward_one(float s, float dp, float scale_log2, float lse_log2, float delta,
                                                     float mask, bool visible) {
    struct backward_element result;
    const float p = visible ? exp2_approx(fmaf(s, scale_log2, -lse_log2)) : 0.0f;
    result.p = p * mask;
    result.ds = p * (dp * mask - delta);
    return result;
}

// --- Backward: dQ -------------------------------------------------------------------------------------------------

template <int COLUMNS_OF_TILE, bool WITH_DROPOUT, bool WITH_PADDING> struct backward_query_plan {
    static constexpr int D = COLUMNS_OF_TILE;
    static constexpr bool DROPOUT = WITH_DROPOUT, PADDED = WITH_PADDING;
    static constexpr int WARPS = D == 64 || D == 256 ? 4 : 8, THREADS = 32 * WARPS,
                         BLOCKS = D == 64 || D == 256 ? 2 : 1;
    static constexpr int M = D == 64 ? 2 : 1;                   // 16-row blocks of a warp
    static constexpr int QUERIES = 16 * M * WARPS;              // of a block
    static constexpr int KEYS = D == 256 ? 32 : 64;             // of a tile
    static constexpr int CHUNK = D == 256 || D == 64 ? 16 : 32; // keys whose S and dP are in registers at a time
    static constexpr int UNROLL = D == 256 || DROPOUT ? 1 : 4;  // chunks
    static constexpr int STAGES = D == 256 ? 1 : 2;
    static constexpr bool IN_REGISTERS = D < 256; // Q and dO
    static constexpr int ROWS_BYTES = QUERIES * 2 * D, TILE_BYTES = KEYS * 2 * D, STAGE_BYTES = 2 * TILE_BYTES;
    // Where Q and dO stay in registers, K and V come to where they were.
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

// delta = rowsum(dO O) of this lane's rows, each row by its quad; both it and lse log2(e) are kept for the other
// kernel.
template <class plan>
DEVICE_FUNCTION void backward_rows(struct backward_query_state<plan> &state, const struct flash_arguments &a,
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
                for (int piece = t; piece < plan::D / 8; piece += 4) {
                    if (plan::PADDED && 8 * piece >= a.head_dim)
                        break;
                    const int64_t at = view.out_offset + (int64_t)row * a.out_stride + piece * 8;
                    packed_check(a.out + at, false);
                    packed_check(a.dout + at, false);
                    const uint4 out = *(const uint4 *)(a.out + at), dout = *(const uint4 *)(a.dout + at);
                    const uint32_t x[4] = {out.x, out.y, out.z, out.w}, y[4] = {dout.x, dout.y, dout.z, dout.w};
#pragma unroll
                    for (int i = 0; i < 4; i++) {
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

// dQ += dS K over one tile of keys, a chunk at a time.
template <bool MASKED, class plan>
DEVICE_FUNCTION void backward_query_tile(struct backward_query_state<plan> &state, const struct flash_arguments &a,
                                         int64_t head, int first_row, int first_key, uint32_t stage) {
    constexpr int D = plan::D, M = plan::M, N = plan::CHUNK / 8;
    const float scale_log2 = a.scale * LOG2E, dropout_scale = 1.0f / (1.0f - a.dropout.p);
    const uint32_t keys_right = origin_right<D>(stage), keys_down = origin_down<D>(stage);
    const uint32_t values_right = origin_right<D>(stage + plan::TILE_BYTES);
    const uint64_t element = (uint64_t)(head * a.T + first_row + lane_row()) * (uint64_t)a.T +
                             (uint64_t)(first_key + lane_column()); // for dropout
#pragma unroll(plan::UNROLL)
    for (int chunk = 0; chunk < plan::KEYS; chunk += plan::CHUNK) {
        if (MASKED && first_key + chunk > first_row + 16 * M - 1)
            break; // no row of this warp sees the chunk
        struct dropout_bits<M, plan::CHUNK> kept;
        if (plan::DROPOUT)
            kept.make(a.dropout, state.step, element + chunk, 1, (uint64_t)a.T);
        float s[M][N][4], dp[M][N][4];
        clear<M, N>(s);
        clear<M, N>(dp);
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            struct word_x4 left[M];
            state.q.at(left, k);
            multiply_transposed<D, M, N>(s, left, keys_right, chunk, k);
            state.dout.at(left, k);
            multiply_transposed<D, M, N>(dp, left, values_right, chunk, k);
        }
        const int row = first_row - first_key - chunk + lane_row() - lane_column(); // as seen from the column
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float mask = plan::DROPOUT ? kept.mask(m, n, i, dropout_scale) : 1.0f;
                    s[m][n][i] = backward_one(s[m][n][i], dp[m][n][i], scale_log2, state.lse_log2[m][i / 2],
                                              state.delta[m][i / 2], mask,
                                              !MASKED || fragment_column(n, i) - fragment_row(m, i) <= row)
                                     .ds;
                }
#pragma unroll
        for (int k = 0; k < plan::CHUNK / 16; k++) {
            struct word_x4 ds[M];
            to_left<M, N>(ds, s, k);
            multiply<D, M, D / 8>(state.dq, ds, keys_down, chunk + 16 * k);
        }
    }
}

// One tile: waits for its K and V, starts the copy of the next, multiplies.
template <bool MASKED, class plan>
DEVICE_FUNCTION void backward_query_step(struct backward_query_state<plan> &state, const struct flash_arguments &a,
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
    backward_query_tile<MASKED, plan>(state, a, head, first_row + warp_row, tile * KEYS, stage);
}

// One block: dQ of plan::QUERIES queries of one head; the blocks with the most keys start first.
template <class plan>
static __global__ void __launch_bounds__(plan::THREADS, plan::BLOCKS)
    flash_backward_query_kernel(const struct flash_arguments a) {
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
    if (plan::STAGES > 1) {
        __syncthreads(); // Q and dO have been read
        load_tile<plan, KEYS>(stages, view.k, a.qkv_stride, 0, a);
        load_tile<plan, KEYS>(stages + plan::TILE_BYTES, view.v, a.qkv_stride, 0, a);
        cp_async_commit();
    }

    int tile = 0;
    for (; tile < tiles && (tile + 1) * KEYS - 1 <= first_row; tile++)
        backward_query_step<false, plan>(state, a, view, head, first_row, tile, tiles, stages);
    for (; tile < tiles; tile++)
        backward_query_step<true, plan>(state, a, view, head, first_row, tile, tiles, stages);

    __syncthreads();
    scale_all<plan::M, D / 8>(state.dq, a.scale);
    store_rows<plan, 16 * plan::M, D>(a.dqkv + view.qkv_offset, a.qkv_stride, first_row + warp_row, a, shared, warp_row,
                                      0, state.dq);
}

// --- Backward: dK and dV ------------------------------------------------------------------------------------------

// S and dP are made transposed, keys x queries, so that P and dS are left operands of dV += P^T dO and dK += dS^T Q as
// they stand in registers.
template <int COLUMNS_OF_TILE, bool WITH_DROPOUT, bool WITH_PADDING> struct backward_key_plan {
    static constexpr int D = COLUMNS_OF_TILE;
    static constexpr bool DROPOUT = WITH_DROPOUT, PADDED = WITH_PADDING;
    static constexpr int M = D == 64 ? 2 : 1; // 16-row blocks of a warp
    // At 256 two warps share the same keys, each with half of the columns of dK and dV: all of them would not fit into
    // the registers of one. Both make S and dP.
    static constexpr int KEY_WARPS = D == 64 || D == 256 ? 4 : 8, COLUMN_WARPS = D == 256 ? 2 : 1;
    static constexpr int WARPS = KEY_WARPS * COLUMN_WARPS, THREADS = 32 * WARPS, BLOCKS = D == 64 ? 2 : 1;
    static constexpr int COLUMNS = D / COLUMN_WARPS;
    static constexpr int KEYS = 16 * M * KEY_WARPS;            // of a block
    static constexpr int QUERIES = D == 256 ? 32 : 64;         // of a tile
    static constexpr int CHUNK = 16;                           // queries whose S and dP are in registers at a time
    static constexpr int UNROLL = D == 256 || DROPOUT ? 1 : 4; // chunks
    static constexpr int STAGES = D == 256 ? 1 : 2;
    static constexpr bool IN_REGISTERS = D < 256; // K and V
    static constexpr int KEYS_BYTES = KEYS * 2 * D, TILE_BYTES = QUERIES * 2 * D;
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

// The queries that a block of keys meets: of every query head of its group, from the diagonal to the end.
struct query_steps {
    int b, first_head, first_tile, tiles; // tiles: of each head, from first_tile on
};

// Starts the copies of a step's Q, dO and rows.
template <class plan>
DEVICE_FUNCTION void load_queries(const struct flash_arguments &a, const struct query_steps &steps, int step,
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

// dV += P^T dO and dK += dS^T Q over one tile of queries, a chunk at a time.
template <bool MASKED, class plan>
DEVICE_FUNCTION void backward_key_tile(struct backward_key_state<plan> &state, const struct flash_arguments &a,
                                       int64_t head, int first_key, int first_query, uint32_t stage) {
    constexpr int D = plan::D, M = plan::M, N = plan::CHUNK / 8, COLUMNS = plan::COLUMNS;
    const float scale_log2 = a.scale * LOG2E, dropout_scale = 1.0f / (1.0f - a.dropout.p);
    const uint32_t queries_right = origin_right<D>(stage), douts_right = queries_right + plan::TILE_BYTES;
    const uint32_t rows = stage + 2 * plan::TILE_BYTES + 16 * (threadIdx.x % 4);
    const uint64_t element = (uint64_t)(head * a.T + first_query + lane_column()) * (uint64_t)a.T +
                             (uint64_t)(first_key + lane_row()); // for dropout
    // The part of the columns that is this warp's begins a multiple of 128 bytes into a row.
    const uint32_t queries_down = origin_down<D>(stage) + threadIdx.x / 32 / plan::KEY_WARPS * (2 * COLUMNS);
    const uint32_t douts_down = queries_down + plan::TILE_BYTES;
#pragma unroll(plan::UNROLL)
    for (int chunk = 0; chunk < plan::QUERIES; chunk += plan::CHUNK) {
        if (MASKED && first_query + chunk + plan::CHUNK - 1 < first_key)
            continue; // these queries see no key of this warp
        const int query = first_query + chunk - first_key + lane_column() - lane_row(); // as seen from the key
        struct dropout_bits<M, plan::CHUNK> kept;
        if (plan::DROPOUT)
            kept.make(a.dropout, state.step, element + (uint64_t)chunk * (uint64_t)a.T, (uint64_t)a.T, 1);
        float s[M][N][4], dp[M][N][4];
        clear<M, N>(s);
        clear<M, N>(dp);
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            struct word_x4 left[M];
            state.k.at(left, k);
            multiply_transposed<D, M, N>(s, left, queries_right, chunk, k);
            state.v.at(left, k);
            multiply_transposed<D, M, N>(dp, left, douts_right, chunk, k);
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            const struct float_x4 row = load_shared_floats(rows + (uint32_t)(8 * (chunk + 8 * n)));
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float mask = plan::DROPOUT ? kept.mask(m, n, i, dropout_scale) : 1.0f;
                    const struct backward_element one =
                        backward_one(s[m][n][i], dp[m][n][i], scale_log2, row.x[i % 2 * 2], row.x[i % 2 * 2 + 1], mask,
                                     !MASKED || fragment_row(m, i) - fragment_column(n, i) <= query);
                    s[m][n][i] = one.p;
                    dp[m][n][i] = one.ds;
                }
        }
#pragma unroll
        for (int k = 0; k < plan::CHUNK / 16; k++) {
            struct word_x4 left[M];
            to_left<M, N>(left, s, k);
            multiply<D, M, COLUMNS / 8>(state.dv, left, douts_down, chunk + 16 * k);
            to_left<M, N>(left, dp, k);
            multiply<D, M, COLUMNS / 8>(state.dk, left, queries_down, chunk + 16 * k);
        }
    }
}

// One step: waits for its queries, starts the copy of the next ones, multiplies.
template <class plan>
DEVICE_FUNCTION void backward_key_step(struct backward_key_state<plan> &state, const struct flash_arguments &a,
                                       const struct query_steps &steps, int step, int count, int first_key,
                                       uint32_t stages) {
    const int warp_key = first_key + 16 * plan::M * ((int)threadIdx.x / 32 % plan::KEY_WARPS);
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
    if (first_query < first_key + plan::KEYS - 1)
        backward_key_tile<true, plan>(state, a, head, warp_key, first_query, stage);
    else
        backward_key_tile<false, plan>(state, a, head, warp_key, first_query, stage);
}

// One block: dK and dV of plan::KEYS keys of one KV head; the blocks with the most queries start first.
template <class plan>
static __global__ void __launch_bounds__(plan::THREADS, plan::BLOCKS)
    flash_backward_key_kernel(const struct flash_arguments a) {
    constexpr int KEYS = plan::KEYS;
    const int first_key = (int)blockIdx.x * KEYS, group = (int)blockIdx.y, b = (int)blockIdx.z, heads = a.H / a.Hkv;
    const int warp_key = 16 * plan::M * ((int)threadIdx.x / 32 % plan::KEY_WARPS);
    const int warp_column = (int)threadIdx.x / 32 / plan::KEY_WARPS * plan::COLUMNS;
    const struct head_views view = view_head<plan>(a, b, group * heads);
    const uint32_t shared = shared_memory(), stages = shared + plan::STAGES_AT;
    const struct query_steps steps = {b, group * heads, first_key / plan::QUERIES,
                                      (a.T + plan::QUERIES - 1) / plan::QUERIES - first_key / plan::QUERIES};

    load_tile<plan, KEYS>(shared, view.k, a.qkv_stride, first_key, a);
    load_tile<plan, KEYS>(shared + plan::KEYS_BYTES, view.v, a.qkv_stride, first_key, a);
    cp_async_commit();
    struct backward_key_state<plan> state;
    state.step = plan::DROPOUT ? (uint32_t)dropout_step(a.dropout) : 0;
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
    for (int step = 0; step < heads * steps.tiles; step++)
        backward_key_step<plan>(state, a, steps, step, heads * steps.tiles, first_key, stages);

    __syncthreads();
    scale_all<plan::M, plan::COLUMNS / 8>(state.dk, a.scale);
    bf16 *dk = a.dqkv + (view.k - a.qkv), *dv = a.dqkv + (view.v - a.qkv);
    store_rows<plan, 16 * plan::M, plan::COLUMNS>(dk, a.qkv_stride, first_key + warp_key, a, shared, warp_key,
                                                  warp_column, state.dk);
    store_rows<plan, 16 * plan::M, plan::COLUMNS>(dv, a.qkv_stride, first_key + warp_key, a, shared + plan::KEYS_BYTES,
                                                  warp_key, warp_column, state.dv);
}

// --- Launches -----------------------------------------------------------------------------------------------------

// `rows` queries or keys of one of `heads` heads a block.
template <class plan>
static void flash_launch(void (*kernel)(struct flash_arguments), int rows, int heads, const struct flash_arguments &a,
                         struct attention_shape shape, struct device *dev) {
    // Once a kernel: more than 48 KB of shared memory has to be asked for.
    static const cudaError_t prepared =
        cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan::SHARED_BYTES);
    cuda_check(prepared);
    const dim3 grid(blocks_for(shape.T, rows), (unsigned)heads, (unsigned)shape.B);
    LAUNCH(dev, kernel, grid, plan::THREADS, plan::SHARED_BYTES, a);
}

struct flash_forward_launcher {
    template <int D, bool DROPOUT, bool PADDED>
    static void launch(const struct flash_arguments &a, struct attention_shape shape, struct device *dev) {
        typedef forward_plan<D, DROPOUT, PADDED> plan;
        flash_launch<plan>(flash_forward_kernel<plan>, plan::QUERIES, shape.num_heads, a, shape, dev);
    }
};
struct flash_backward_launcher {
    template <int D, bool DROPOUT, bool PADDED>
    static void launch(const struct flash_arguments &a, struct attention_shape shape, struct device *dev) {
        typedef backward_query_plan<D, DROPOUT, PADDED> query;
        typedef backward_key_plan<D, DROPOUT, PADDED> key;
        flash_launch<query>(flash_backward_query_kernel<query>, query::QUERIES, shape.num_heads, a, shape, dev);
        flash_launch<key>(flash_backward_key_kernel<key>, key::KEYS, shape.num_query_groups, a, shape, dev);
    }
};

// Picks the instance: the smallest tile that holds a head.
template <class launcher, int D>
static void flash_choose_plan(const struct flash_arguments &a, struct attention_shape shape, struct device *dev) {
    if (a.dropout.p > 0 && a.head_dim == D)
        launcher::template launch<D, true, false>(a, shape, dev);
    else if (a.dropout.p > 0)
        launcher::template launch<D, true, true>(a, shape, dev);
    else if (a.head_dim == D)
        launcher::template launch<D, false, false>(a, shape, dev);
    else
        launcher::template launch<D, false, true>(a, shape, dev);
}
template <class launcher>
static void flash_choose(const struct flash_arguments &a, struct attention_shape shape, struct device *dev) {
    if (a.head_dim <= 64)
        flash_choose_plan<launcher, 64>(a, shape, dev);
    else if (a.head_dim <= 96)
        flash_choose_plan<launcher, 96>(a, shape, dev);
    else if (a.head_dim <= 128)
        flash_choose_plan<launcher, 128>(a, shape, dev);
    else
        flash_choose_plan<launcher, 256>(a, shape, dev);
}

static struct flash_arguments flash_arguments_of(const floatX *qkv, const void *const aligned[3],
                                                 struct attention_shape shape, struct dropout dropout) {
    char reason[128];
    flash_unavailable_reason(reason, sizeof reason, shape);
    if (*reason)
        fail("flash attention on CUDA %s", reason);
    for (int i = 0; i < 3; i++)
        if ((uintptr_t)aligned[i] % 16 != 0)
            fail("flash attention on CUDA reads 16 bytes at a time, and a buffer is not aligned to that");
    struct flash_arguments a;
    memset(&a, 0, sizeof a);
    a.qkv = qkv;
    a.T = shape.T;
    a.H = shape.num_heads;
    a.Hkv = shape.num_query_groups;
    a.head_dim = shape.head_dim;
    a.qkv_stride = (a.H + 2 * a.Hkv) * shape.head_dim;
    a.out_stride = a.H * shape.head_dim;
    a.group_magic = ((1u << 31) - 1) / (uint32_t)(a.H / a.Hkv) + 1;
    a.scale = shape.scale;
    a.dropout = dropout;
    return a;
}

static void flash_forward(floatX *out, float *lse, const floatX *qkv, struct attention_shape shape,
                          struct dropout dropout, void *workspace, struct device *dev) {
    const void *const aligned[3] = {qkv, out, NULL};
    struct flash_arguments a = flash_arguments_of(qkv, aligned, shape, dropout);
    a.out = out;
    a.lse = lse;
    flash_choose<flash_forward_launcher>(a, shape, dev);
}

static void flash_backward(floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out, const float *lse,
                           struct attention_shape shape, struct dropout dropout, void *workspace, struct device *dev) {
    const void *const aligned[3] = {qkv, dout, dqkv};
    struct flash_arguments a = flash_arguments_of(qkv, aligned, shape, dropout);
    a.out = (floatX *)out;
    a.lse = (float *)lse;
    a.dout = dout;
    a.dqkv = dqkv;
    a.rows = (float2 *)workspace;
    flash_choose<flash_backward_launcher>(a, shape, dev);
}

#else

// Never reached: flash_unavailable_reason() says so.
static void flash_forward(floatX *out, float *lse, const floatX *qkv, struct attention_shape shape,
                          struct dropout dropout, void *workspace, struct device *dev) {
    fail("flash attention on CUDA takes bf16 alone: --precision bf16");
}
static void flash_backward(floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out, const float *lse,
                           struct attention_shape shape, struct dropout dropout, void *workspace, struct device *dev) {
    fail("flash attention on CUDA takes bf16 alone: --precision bf16");
}

#endif
