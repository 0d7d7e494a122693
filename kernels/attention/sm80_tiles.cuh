// Holds what the forward and the backward of flash attention by mma.sync share: their arguments, tiles in shared
// memory, a warp's products, spans, softcap and dropout. kernels/attention/sm80.cu states the design.
#pragma once
#include "kernels/device.cuh"      // floatX
#include "kernels/packed.cuh"      // PACK, packed_check
#include "kernels/ptx.cuh"         // mma_m16n8k16, mma_m16n8k8, ldmatrix_x4, cp_async_16, pack_bf16x2
#include "kernels/random.cuh"      // struct dropout, philox4x32
#include "kernels/vector_math.cuh" // LOG2E
#include <stdint.h>                // int32_t

// Says which scores a kernel can make. Each choice has an instance, so that plain causal attention pays for no other.
enum flash_scores {
    FLASH_CAUSAL, // a query sees every key up to its own position
    FLASH_SPANS,  // a query sees its keys from first_key on
    FLASH_ANY     // a softcap, with or without first_key; or first_key with dropout
};

// The arguments of all three kernels.
struct flash_arguments {
    const floatX *qkv;  // (B, T, (H + 2 Hkv) D)
    floatX *out;        // (B, T, H D); only read by backward
    float *lse;         // (B, H, T), natural logarithm, or NULL; only read by backward
    const floatX *dout; // (B, T, H D)
    floatX *dqkv;       // (B, T, (H + 2 Hkv) D)
    float2 *rows;       // (B, H, T): lse log2(e), delta
    int T, H, Hkv, head_dim;
    int qkv_stride, out_stride; // elements from token to token
    uint32_t group_magic; // h / (H / Hkv) = h group_magic >> 31, so that a head's addresses stay in uniform registers
    float scale;
    struct dropout dropout;
};

static constexpr bool FP32 = sizeof(floatX) == 4;

// Returns threadIdx.x. With HIDDEN, which in fp32 needs blocks of at most 256 threads, the compiler can't see where the
// value comes from. It then recomputes what depends on it, and leaves registers to accumulators. What to hide, and how
// to unroll forward's loop over D, is chosen so that ptxas 13.0 spills least, in plain causal forward nothing.
template <bool HIDDEN> DEVICE_FUNCTION int thread_index(void) {
    return HIDDEN ? hide_value((int)threadIdx.x) & (FP32 ? 255 : -1) : (int)threadIdx.x;
}

// Returns 0. With LATE it is computed from count >= 0, so that ptxas, which sees through thread_index(), can't compute
// a sum with this 0, and spend a register, before count is known.
template <bool LATE> DEVICE_FUNCTION uint32_t zero_after(int count) {
    return LATE ? (uint32_t)hide_value(count) >> 31 : 0;
}

// The further arguments of FLASH_SPANS and FLASH_ANY. They are apart as nvcc 13.0 spills more with over 128 bytes.
struct flash_spans_arguments : flash_arguments {
    const int32_t *spans; // (B, T): first_key in the kernels of queries, last_query in the kernel of keys; NULL: causal
};
struct flash_any_arguments : flash_spans_arguments {
    float unit;       // what score_unit() returns: the softcap, or the scale where there is none
    float cap_factor; // for score_tanh(): scale / softcap, in bf16 times 2 log2(e); 0: no softcap
};
static_assert(sizeof(struct flash_spans_arguments) <= 128, "see above");
template <flash_scores SCORES> struct flash_arguments_for;
template <> struct flash_arguments_for<FLASH_CAUSAL> { typedef struct flash_arguments type; };
template <> struct flash_arguments_for<FLASH_SPANS> { typedef struct flash_spans_arguments type; };
template <> struct flash_arguments_for<FLASH_ANY> { typedef struct flash_any_arguments type; };

// Returns the number of elements of a head, which is a constant where the plan takes only heads as wide as its tile.
template <class plan> DEVICE_FUNCTION int head_size(const struct flash_arguments &a) {
    return plan::PADDED ? a.head_dim : plan::D;
}

// Says where one query head of one sequence lies: its first query, and the first key and value of its group.
struct head_views {
    const floatX *q, *k, *v;
    int64_t qkv_offset, out_offset; // of q in qkv, and of the head in out
    int64_t token;                  // the sequence's first
};
// Returns where query head h of sequence b, its group's keys and values, and its output lie.
template <class plan> DEVICE_FUNCTION struct head_views view_head(const struct flash_arguments &a, int b, int h) {
    const int D = head_size<plan>(a);
    struct head_views view;
    const int64_t token = (int64_t)b * a.T;
    const int group = (int)((uint64_t)(uint32_t)h * a.group_magic >> 31);
    view.token = token;
    view.qkv_offset = token * a.qkv_stride + h * D;
    view.out_offset = token * a.out_stride + h * D;
    view.q = a.qkv + view.qkv_offset;
    view.k = a.qkv + token * a.qkv_stride + (a.H + group) * D;
    view.v = view.k + a.Hkv * D;
    return view;
}

// --- Elements -----------------------------------------------------------------------------------------------------

// ELEMENT: an element's bytes. STEP: the depth of one mma in elements, for either type two units of 16 bytes.
static constexpr int ELEMENT = (int)sizeof(floatX), STEP = 2 * PACK;
// Whether fp32 computes more values again instead of keeping them in registers: see thread_index().
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
static constexpr bool HIDE_MORE = FP32;
#else
static constexpr bool HIDE_MORE = false;
#endif
// The number of steps after which a sum over D leaves the tensor cores, which truncate sums: 64 products in fp32.
template <int D> struct depth_run { static constexpr int STEPS = FP32 && D > 64 ? 64 / STEP : D / STEP; };

// 3xTF32 splits a float x into big + small, exactly. Each is a TF32 number, but for bits of small that the tensor core
// drops, 2^-22 of x at most. An infinity's small part is a NaN, and so are all products with it.

// Returns the big parts of four floats: the bits that TF32 has, the others cut off.
DEVICE_FUNCTION struct word_x4 tf32_big(const struct word_x4 &x) {
    const struct word_x4 big = {
        {x.x[0] & 0xffffe000u, x.x[1] & 0xffffe000u, x.x[2] & 0xffffe000u, x.x[3] & 0xffffe000u}};
    return big;
}
// Returns the small parts of four floats: what tf32_big cuts off, exactly.
DEVICE_FUNCTION struct word_x4 tf32_small(const struct word_x4 &x) {
    struct word_x4 small;
#pragma unroll
    for (int i = 0; i < 4; i++)
        small.x[i] = __float_as_uint(__uint_as_float(x.x[i]) - __uint_as_float(x.x[i] & 0xffffe000u));
    return small;
}

// --- Tiles: rows of D elements in shared memory -------------------------------------------------------------------

// The 16-byte units of a row are permuted in groups of 128 bytes, or of 64 where a row is not a multiple of 128 bytes.
template <int D> struct tile_layout {
    static constexpr int ROW_BYTES = ELEMENT * D, GROUP = ROW_BYTES % 128 == 0 ? 8 : 4;
};

// Returns the offset, in bytes, of the 16-byte unit `piece` of a row in a tile.
template <int D> DEVICE_FUNCTION uint32_t tile_offset(int row, int piece) {
    typedef tile_layout<D> layout;
    const int permutation = layout::GROUP == 8 ? row & 7 : row >> 1 & 3;
    return (uint32_t)(row * layout::ROW_BYTES + ((piece ^ permutation) << 4));
}

// Returns the address that this lane gives ldmatrix for 16 rows and two units at (row, column). origin is its address
// at (0, 0). row must be a multiple of 8, column of STEP, so that the XOR has only the lane's part and a constant.
template <int D> DEVICE_FUNCTION uint32_t block_address(uint32_t origin, int row, int column) {
    constexpr int GROUP_COLUMNS = PACK * tile_layout<D>::GROUP;
    return (origin ^ (uint32_t)(column % GROUP_COLUMNS * ELEMENT)) +
           (uint32_t)(column / GROUP_COLUMNS * (ELEMENT * GROUP_COLUMNS) + row * tile_layout<D>::ROW_BYTES);
}
// Returns the address that this lane gives ldmatrix for a tile's block at (0, 0), whose four 8 x 8 matrices (fp32: 8 x
// 4) come down, then right: as a left operand or, if ldmatrix transposes, two right ones of 16 x 8 side by side.
template <int D, bool HIDDEN = false> DEVICE_FUNCTION uint32_t origin_down(uint32_t tile) {
    const int lane = thread_index<HIDDEN>() % 32;
    return tile + tile_offset<D>(lane % 16, lane / 16);
}
// Returns what origin_down does, for the order right, then down: rows 0-7 and 8-15 are two right operands' columns.
template <int D, bool HIDDEN = false> DEVICE_FUNCTION uint32_t origin_right(uint32_t tile) {
    const int lane = thread_index<HIDDEN>() % 32;
    return tile + tile_offset<D>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}
// Returns the origin that multiply() takes. In bf16 it is origin_down's. In fp32, which ldmatrix can't transpose, it is
// the address of this lane's word, in row 2t and column g (g = lane / 4, t = lane % 4).
template <int D, bool HIDDEN = false> DEVICE_FUNCTION uint32_t origin_rows(uint32_t tile) {
    if (!FP32)
        return origin_down<D, HIDDEN>(tile);
    const int lane = thread_index<HIDDEN>() % 32;
    return tile + tile_offset<D>(lane % 4 * 2, lane / 16) + (uint32_t)(lane / 4 % 4 * 4);
}

// Starts copying ROWS rows of a head, from row `first` on, to a tile. Rows past T and columns past the head become
// zeroes. matrix: the head in the sequence's first row; row_stride counts elements. All threads must call this; the
// caller commits and waits. A thread's rows lie a multiple of 8 apart, so that it needs one offset plus constants.
template <class plan, int ROWS>
DEVICE_FUNCTION void load_tile(uint32_t tile, const floatX *matrix, int row_stride, int first,
                               const struct flash_arguments &a) {
    constexpr int D = plan::D, GROUP = tile_layout<D>::GROUP, ROWS_AT_ONCE = plan::THREADS / GROUP;
    static_assert(ROWS % ROWS_AT_ONCE == 0 && ROWS_AT_ONCE % 8 == 0, "every thread copies the same number of pieces");
    const int thread = thread_index<true>(), row = thread / GROUP, piece = thread % GROUP;
    // The block's and the thread's part of the address are kept apart: one register for the thread's. Past T: not read.
    const floatX *from = matrix + (int64_t)first * row_stride + (uint32_t)(row * row_stride + piece * PACK);
    const uint32_t to = tile + tile_offset<D>(row, piece);
#pragma unroll
    for (int i = 0; i < ROWS; i += ROWS_AT_ONCE)
#pragma unroll
        for (int j = 0; j < D / PACK; j += GROUP)
            cp_async_16(to + (uint32_t)(i * tile_layout<D>::ROW_BYTES + 16 * j),
                        from + (int64_t)i * row_stride + PACK * j,
                        first + row + i < a.T && (!plan::PADDED || PACK * (piece + j) < a.head_dim));
}

// Writes acc, this warp's ROWS x COLUMNS, to a head's rows from `first` on and columns from tile_column on, except past
// T and past the head. bf16 passes through the warp's own part of a tile, at (tile_row, tile_column), so that memory
// sees 16-byte writes. fp32 doesn't need to: a fragment's row already has 32 bytes.
template <class plan, int ROWS, int COLUMNS>
DEVICE_FUNCTION void store_rows(floatX *matrix, int row_stride, int first, const struct flash_arguments &a,
                                uint32_t tile, int tile_row, int tile_column,
                                const float acc[ROWS / 16][COLUMNS / 8][4]) {
    constexpr int D = plan::D;
    const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if constexpr (FP32) {
#pragma unroll
        for (int m = 0; m < ROWS / 16; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = first + 16 * m + 8 * half + g;
                floatX *to = matrix + (int64_t)row * row_stride + tile_column + 2 * t;
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; n++)
                    if (row < a.T && (!plan::PADDED || tile_column + 8 * n < a.head_dim)) {
                        pair_check(to + 8 * n);
                        *(float2 *)(to + 8 * n) = make_float2(acc[m][n][2 * half], acc[m][n][2 * half + 1]);
                    }
            }
    } else {
#pragma unroll
        for (int m = 0; m < ROWS / 16; m++)
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    store_shared_word(tile + tile_offset<D>(tile_row + 16 * m + 8 * half + g, tile_column / 8 + n) +
                                          4 * t,
                                      pack_bf16x2(acc[m][n][2 * half], acc[m][n][2 * half + 1]));
        __syncwarp();
#pragma unroll
        for (int i = 0; i < ROWS * COLUMNS / 8 / 32; i++) {
            const int at = 32 * i + lane, row = at / (COLUMNS / 8), piece = at % (COLUMNS / 8);
            const struct word_x4 words =
                load_shared_words(tile + tile_offset<D>(tile_row + row, tile_column / 8 + piece));
            if (first + row < a.T && (!plan::PADDED || tile_column + 8 * piece < a.head_dim)) {
                floatX *to = matrix + (int64_t)(first + row) * row_stride + tile_column + piece * 8;
                packed_check(to, true);
                *(uint4 *)to = make_uint4(words.x[0], words.x[1], words.x[2], words.x[3]);
            }
        }
    }
}

// --- Products of one warp -----------------------------------------------------------------------------------------

// A warp's 16 M rows of a tile as left operands, either held in registers or read again at each use.
template <int D, int M, bool IN_REGISTERS> struct left_rows {
    uint32_t address;
    struct word_x4 fragment[IN_REGISTERS ? D / STEP : 1][M];

    template <bool HIDDEN = false> __device__ __forceinline__ void open(uint32_t tile, int row) {
        address = block_address<D>(origin_down<D, HIDDEN>(tile), row, 0);
        if (IN_REGISTERS)
#pragma unroll
            for (int k = 0; k < D / STEP; k++)
                read(fragment[k], k);
    }
    __device__ __forceinline__ void read(struct word_x4 to[M], int k) const {
#pragma unroll
        for (int m = 0; m < M; m++)
            to[m] = ldmatrix_x4(block_address<D>(address, 16 * m, STEP * k));
    }
    // Returns in `to` the operand of the tile's columns from STEP k on.
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

// sum += run, M x N fragments of the warp; where `first`, sum = run.
template <int M, int N> DEVICE_FUNCTION void add_run(float sum[M][N][4], const float run[M][N][4], bool first) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sum[m][n][i] = first ? run[m][n][i] : sum[m][n][i] + run[m][n][i];
}

// Adds left (16 M x STEP) times two right operands side by side (STEP x 16) to fragments 2 n and 2 n + 1 of acc. fp32
// adds three products of parts, the largest last, and leaves out small times small (3xTF32).
template <int M, int N>
DEVICE_FUNCTION void multiply_pair(float acc[M][N][4], int n, const struct word_x4 left[M],
                                   const struct word_x4 &right) {
    if constexpr (FP32) {
#pragma unroll
        for (int term = 0; term < 3; term++) {
            const struct word_x4 b = term == 1 ? tf32_small(right) : tf32_big(right);
#pragma unroll
            for (int m = 0; m < M; m++) {
                const struct word_x4 a = term == 0 ? tf32_small(left[m]) : tf32_big(left[m]);
                mma_m16n8k8(acc[m][2 * n], a.x, b.x[0], b.x[1]);
                mma_m16n8k8(acc[m][2 * n + 1], a.x, b.x[2], b.x[3]);
            }
        }
    } else {
#pragma unroll
        for (int m = 0; m < M; m++) {
            mma_m16n8k16(acc[m][2 * n], left[m].x, right.x[0], right.x[1]);
            mma_m16n8k16(acc[m][2 * n + 1], left[m].x, right.x[2], right.x[3]);
        }
    }
}

// Adds left (16 M x STEP) . B^T to acc (16 M x 8 N). B is rows [first, first + 8 N) and columns [STEP k, STEP (k + 1))
// of a tile, whose origin_right() is right_origin. N must be even, and `first` a multiple of 16.
template <int D, int M, int N>
DEVICE_FUNCTION void multiply_transposed(float acc[M][N][4], const struct word_x4 left[M], uint32_t right_origin,
                                         int first, int k) {
#pragma unroll
    for (int n = 0; n < N / 2; n++) {
        const struct word_x4 right = ldmatrix_x4(block_address<D>(right_origin, first + 16 * n, STEP * k));
        multiply_pair<M, N>(acc, n, left, right);
    }
}

// s (16 M x 8 N) = left . B^T over all of D. left is a left_rows; B is the 8 N rows from `first` on of the tile whose
// origin_right() is right_origin. In fp32 only runs of depth_run steps are summed in the tensor cores.
template <int UNROLL, int D, int M, int N, class left_operand>
DEVICE_FUNCTION void multiply_in_runs(float s[M][N][4], const left_operand &left, uint32_t right_origin, int first) {
    constexpr int RUN = depth_run<D>::STEPS;
#pragma unroll
    for (int begin = 0; begin < D / STEP; begin += RUN) {
        float run[M][N][4];
        clear<M, N>(run);
#pragma unroll(UNROLL)
        for (int k = begin; k < begin + RUN && k < D / STEP; k++) {
            struct word_x4 operand[M];
            left.at(operand, k);
            multiply_transposed<D, M, N>(run, operand, right_origin, first, k);
        }
        add_run<M, N>(s, run, begin == 0);
    }
}

// acc (16 M x 8 N) += left (16 M x STEP) . rows `first` to `first` + STEP - 1 of a tile, whose origin_rows() is
// `origin`. N must be even. left has its columns in the order in which to_left() puts them.
template <int D, int M, int N>
DEVICE_FUNCTION void multiply(float acc[M][N][4], const struct word_x4 left[M], uint32_t origin, int first) {
#pragma unroll
    for (int n = 0; n < N / 2; n++) {
        const uint32_t at = block_address<D>(origin, first, 16 * n);
        if constexpr (FP32) { // the row after an even one: its units are permuted by one bit more
            const uint32_t beside = block_address<D>(origin, first, 16 * n + 8), row = tile_layout<D>::ROW_BYTES;
            multiply_pair<M, N>(acc, n, left, load_words_apart(at, (at ^ 16) + row, beside, (beside ^ 16) + row));
        } else {
            const struct word_x4 right = ldmatrix_x4_trans(at);
            multiply_pair<M, N>(acc, n, left, right);
        }
    }
}

// left (16 M x STEP) = columns STEP k to STEP (k + 1) - 1 of acc, without values from other lanes. bf16 rounds them.
// fp32 orders them 0, 2, 4, 6, 1, 3, 5, 7: a lane holds columns 2t and 2t + 1, and the operand wants t and t + 4. It is
// inlined because in the emulator gcc would merge instances of different N, and warn of the larger's bounds.
template <int M, int N>
__attribute__((always_inline)) DEVICE_FUNCTION void to_left(struct word_x4 left[M], const float acc[M][N][4], int k) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if constexpr (FP32)
                left[m].x[i] = __float_as_uint(acc[m][k][i % 2 * 2 + i / 2]);
            else
                left[m].x[i] = pack_bf16x2(acc[m][2 * k + i / 2][i % 2 * 2], acc[m][2 * k + i / 2][i % 2 * 2 + 1]);
}

// acc (16 M x 8 N) += p (16 M x K) . the K rows of a tile from row `first` on; origin is the tile's origin_rows(). In
// fp32 K is at most 64, and 32 columns at a time are summed outside of acc. There the warp meets before the first 32
// (MEETINGS 1) or every 32 columns (2), as ptxas would load operands so far ahead that it spills.
template <int D, int M, int N, int K, int MEETINGS = 0>
DEVICE_FUNCTION void accumulate(float acc[M][N][4], const float p[M][K / 8][4], uint32_t origin, int first) {
    if constexpr (FP32) {
        constexpr int RUN = 4; // fragments
        static_assert(K <= 64 && N % RUN == 0, "as the comment says");
#pragma unroll
        for (int begin = 0; begin < N; begin += RUN) {
            float run[M][RUN][4];
            clear<M, RUN>(run);
            if (MEETINGS == 2 || (MEETINGS == 1 && begin == 0))
                __syncwarp();
#pragma unroll
            for (int k = 0; k < K / STEP; k++) {
                struct word_x4 left[M];
                to_left<M, K / 8>(left, p, k);
                multiply<D, M, RUN>(run, left, block_address<D>(origin, 0, 8 * begin), first + STEP * k);
            }
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = 0; n < RUN; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        acc[m][begin + n][i] += run[m][n][i];
        }
    } else {
#pragma unroll
        for (int k = 0; k < K / STEP; k++) {
            struct word_x4 left[M];
            to_left<M, K / 8>(left, p, k);
            multiply<D, M, N>(acc, left, origin, first + STEP * k);
        }
    }
}

// Element i of fragment (m, n) of a warp is at row fragment_row(m, i) + lane_row() and column fragment_column(n, i) +
// lane_column(). The lane's part is kept apart, so that a comparison takes one register, not one for each column.

// Returns the lane's part of a row: lane / 4.
DEVICE_FUNCTION int lane_row(void) { return thread_index<HIDE_MORE>() % 32 / 4; }
// Returns the lane's part of a column: 2 (lane % 4).
DEVICE_FUNCTION int lane_column(void) { return 2 * (thread_index<HIDE_MORE>() % 4); }
// Returns the row of element i of fragments (m, n), less the lane's part.
DEVICE_FUNCTION constexpr int fragment_row(int m, int i) { return 16 * m + 8 * (i / 2); }
// Returns the column of element i of fragments (m, n), less the lane's part.
DEVICE_FUNCTION constexpr int fragment_column(int n, int i) { return 8 * n + i % 2; }

// --- Spans and softcap --------------------------------------------------------------------------------------------

// Returns the first key that a query sees: 0, as there are no spans. token: the row of the sequence's first token.
template <class plan> DEVICE_FUNCTION int first_key_of(const struct flash_arguments &, int64_t token, int query) {
    return 0;
}
// Returns the first key that a query sees. In a kernel of queries, a.spans holds it. Without spans, possible only where
// plan::ANY, all keys from 0 on are seen. A query past T gets the last row's, so that a key is seen.
template <class plan>
DEVICE_FUNCTION int first_key_of(const struct flash_spans_arguments &a, int64_t token, int query) {
    return plan::ANY && !a.spans ? 0 : a.spans[token + (query < a.T ? query : a.T - 1)];
}
// Returns the last query that sees a key: a.spans' or, without spans, T - 1. A key past T gets the last key's.
template <class plan> DEVICE_FUNCTION int last_query_of(const struct flash_arguments &a, int64_t token, int key) {
    return a.T - 1;
}
// Returns the last query that sees a key. In the kernel of keys, a.spans holds it. Without spans, possible only where
// plan::ANY, it is T - 1. A key past T gets the last key's.
template <class plan> DEVICE_FUNCTION int last_query_of(const struct flash_spans_arguments &a, int64_t token, int key) {
    return plan::ANY && !a.spans ? a.T - 1 : a.spans[token + (key < a.T ? key : a.T - 1)];
}

// A capped score is softcap tanh(scale s / softcap). score_tanh() returns the tanh, score_unit() the softcap.

// Returns what scores are multiplied by: the scale. A kernel with this type of arguments never caps them.
DEVICE_FUNCTION float score_unit(const struct flash_arguments &a) { return a.scale; }
// Returns what scores are multiplied by: the softcap, as score_tanh() has left the tanh, or without one the scale.
DEVICE_FUNCTION float score_unit(const struct flash_any_arguments &a) { return a.unit; }
// Whether scores are capped: never, whatever the plan, by a kernel with this type of arguments.
template <class plan> DEVICE_FUNCTION bool has_cap(const struct flash_arguments &) { return false; }
// Whether a FLASH_ANY kernel caps scores. Without dropout it always does, as only a softcap asks for that instance.
template <class plan> DEVICE_FUNCTION bool has_cap(const struct flash_any_arguments &a) {
    return !plan::DROPOUT || a.cap_factor > 0;
}
// Returns the factor for score_tanh(): 0, as there is no softcap.
DEVICE_FUNCTION float cap_factor(const struct flash_arguments &) { return 0; }
// Returns the factor for score_tanh(); 0 without a softcap.
DEVICE_FUNCTION float cap_factor(const struct flash_any_arguments &a) { return a.cap_factor; }
// Returns tanh(x), x = scale s / softcap, where s is q k and factor is cap_factor()'s. bf16 takes 1 - 2 / (e^2x + 1),
// to 1e-7: tanh.approx errs by 5e-4, 0.02 of a score of 50. fp32 takes tanhf: 1e-7 of a softcap of 50 is 5e-6 of P.
DEVICE_FUNCTION float score_tanh(float s, float factor) {
    if (FP32)
        return tanhf(s * factor);
    return fmaf(-2.0f, reciprocal_approx(exp2_approx(s * factor) + 1.0f), 1.0f);
}

// --- Dropout ------------------------------------------------------------------------------------------------------

// Returns the random words of the block of four elements that `element` is in, as dropout_scale() of kernels/random.cuh
// draws them. element is an index of P, (B, H, T, T); step is dropout_step()'s.
DEVICE_FUNCTION struct philox_words dropout_words(const struct dropout &d, uint32_t step, uint64_t element) {
    return philox4x32((uint32_t)(element / 4), (uint32_t)(element / 4 >> 32), step, d.layer << 8 | d.use,
                      (uint32_t)d.seed, (uint32_t)(d.seed >> 32));
}
// Returns 1 where the element is kept, else 0. words: dropout_words of the element.
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

    // Returns `kept` where element i of fragment (m, n) is kept, else 0.
    __device__ __forceinline__ float mask(int m, int n, int i, float kept) const {
        const int bit = ((2 * m + i / 2) * (COLUMNS / 8) + n) * 2 + i % 2;
        return word[bit / 32] >> bit % 32 & 1 ? kept : 0.0f;
    }
    // Sets the bits. first is the number of the lane's first element; a step to the right adds `right`, a step down
    // `down`. Elements come in pairs side by side. Where right is 1, a pair mostly lies in one block of four.
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
