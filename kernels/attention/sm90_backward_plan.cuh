// The tiles of attention's backward for Hopper, its arguments, and the order of its blocks' work.
#pragma once
#include "kernels/attention/sm90.cuh" // sm90_pipeline, sm90_map, tiles
#include "kernels/packed.cuh"         // packed_check
#include "kernels/positions.cuh"      // struct token_positions
#include "kernels/rope.cuh"           // rope_rotate_pair

// A tile of ROWS rows in chunks of COLUMNS columns, as an operand of wgmma, multiplied in steps of 16 along its rows
// (K-major) or along its columns (MN-major). Chunks begin at multiples of 1024 bytes.
template <int COLUMNS, int ROWS> struct sm90_operand {
    static constexpr int SPAN = 2 * COLUMNS, SWIZZLE = COLUMNS == 64 ? 1 : COLUMNS == 32 ? 2 : 3;
    static constexpr int CHUNK_BYTES = ROWS * SPAN;

    static __device__ __forceinline__ uint64_t along_rows(uint32_t tile) {
        return matrix_descriptor(tile, 16, 8 * SPAN, SWIZZLE);
    }
    static __device__ __forceinline__ uint64_t step_right(uint64_t descriptor, int k) {
        constexpr int STEPS = COLUMNS / 16;
        return descriptor + (uint64_t)((k / STEPS * CHUNK_BYTES + k % STEPS * 32) >> 4);
    }
    static __device__ __forceinline__ uint64_t along_columns(uint32_t tile) {
        return matrix_descriptor(tile, CHUNK_BYTES, 8 * SPAN, SWIZZLE);
    }
    static __device__ __forceinline__ uint64_t step_down(uint64_t descriptor, int k) {
        return descriptor + (uint64_t)((k * 16 * SPAN) >> 4);
    }
    // Returns the address of the 16-byte unit that begins at (row, column) of a tile; column: a multiple of 8.
    static __device__ __forceinline__ uint32_t at(uint32_t tile, int row, int column) {
        const uint32_t offset = (uint32_t)(row * SPAN + column % COLUMNS * 2);
        return tile + (uint32_t)(column / COLUMNS * CHUNK_BYTES) +
               (offset ^ ((offset >> 7 & (uint32_t)(SPAN / 16 - 1)) << 4));
    }
};

template <int HEAD_DIM, bool WITH_SPANS = false> struct sm90_backward_plan {
    static constexpr int D = HEAD_DIM;
    static constexpr bool SPANS = WITH_SPANS; // there are tables of first keys, or of positions
    static constexpr bool SPLIT_KEYS =
        D <= 128; // between the two warpgroups that multiply; else the queries of S and dP
    static constexpr int KEYS = SPLIT_KEYS ? 128 : 64;              // of a block
    static constexpr int QUERIES = D == 64 ? 128 : 64;              // of a tile
    static constexpr int PART = SPLIT_KEYS ? QUERIES : QUERIES / 2; // a warpgroup's columns of S^T
    static constexpr int COLUMNS = SPLIT_KEYS ? D : D / 2;          // a warpgroup's of dK and dV
    static constexpr bool SPLIT_ROWS = QUERIES == 128;              // of dQ; else its columns
    static constexpr int DQ_COLUMNS = SPLIT_ROWS ? D : D / 2;       // a warpgroup's of dQ, of 64 rows
    static constexpr int PIECES =
        DQ_COLUMNS > 64 ? DQ_COLUMNS / 64 : 1; // in which they go to memory, one after another
    static constexpr int PIECE_FLOATS = 64 * DQ_COLUMNS / PIECES;
    // Buffers of dQ in shared memory: one for even and one for odd steps, or one for all.
    static constexpr int DQ_BUFFERS = D == 256 ? 1 : 2, DQ_BUFFER_BYTES = 2 * 4 * PIECE_FLOATS;
    // Columns of a chunk. K's are such that half of dQ's columns are whole chunks.
    static constexpr int CHUNK = D % 64 == 0 ? 64 : 32, KEY_CHUNK = D % 64 == 0 ? 64 : 16;
    // EARLY: S of the next step is begun beside dQ and dK. DV_FIRST: dV is waited for before those two are begun, since
    // with P and dV in flight beside them ptxas runs short of registers (C7512).
    static constexpr bool EARLY = SPLIT_KEYS, DV_FIRST = D == 64 || D == 128;
    // V is dP's left operand: in registers where they suffice, as FlashAttention-3 has it, which spares shared memory 2
    // KB for each 16 columns and warpgroup. At head dims 64 and 128 they don't.
    static constexpr bool VALUES_IN_REGISTERS = D == 96;
    // lse is loaded before the wait for S, delta before dP's, as in FlashAttention-3, where registers suffice.
    static constexpr bool LSE_FIRST = D == 96 || (D == 128 && !SPANS) || D == 256, DELTA_FIRST = D == 256;
    static constexpr int QUERY_STAGES = 2, DOUT_STAGES = D == 256 ? 1 : 2;
    static constexpr int THREADS = 384, PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;

    typedef sm90_operand<KEY_CHUNK, KEYS> keys;
    typedef sm90_operand<CHUNK, KEYS> values;
    typedef sm90_operand<CHUNK, QUERIES> queries;
    typedef sm90_operand<64, QUERIES> scores; // P and dS, queries as rows, keys as columns

    // Shared memory. There are two buffers of dS (and P), so that one barrier a step is enough.
    static constexpr int KEYS_BYTES = KEYS * 2 * D, TILE_BYTES = QUERIES * 2 * D, ROWS_BYTES = QUERIES * 8;
    static constexpr int SCORES_BYTES = QUERIES * KEYS * 2, SCORES_STAGE_BYTES = SCORES_BYTES * (SPLIT_KEYS ? 1 : 2);
    static constexpr int KEYS_AT = 0, VALUES_AT = KEYS_BYTES, QUERIES_AT = 2 * KEYS_BYTES;
    static constexpr int DOUT_AT = QUERIES_AT + QUERY_STAGES * TILE_BYTES;
    static constexpr int SCORES_AT = DOUT_AT + DOUT_STAGES * TILE_BYTES;
    static constexpr int DQ_AT = SCORES_AT + 2 * SCORES_STAGE_BYTES;
    static constexpr int ROWS_AT = DQ_AT + DQ_BUFFERS * DQ_BUFFER_BYTES;
    static constexpr int KEYS_FULL_AT = ROWS_AT + QUERY_STAGES * ROWS_BYTES;
    static constexpr int VALUES_FULL_AT = KEYS_FULL_AT + 8;
    static constexpr int QUERY_BARRIERS_AT = VALUES_FULL_AT + 8,
                         DOUT_BARRIERS_AT = QUERY_BARRIERS_AT + 16 * QUERY_STAGES;
    // DQ_FULL: of even and of odd steps; DQ_EMPTY: of the buffers. Each has a barrier for either warpgroup.
    static constexpr int DQ_FULL_AT = DOUT_BARRIERS_AT + 16 * DOUT_STAGES, DQ_EMPTY_AT = DQ_FULL_AT + 32;
    // With SPANS: of each key the last query that sees it, less the first key.
    static constexpr int LAST_QUERY_AT = DQ_EMPTY_AT + 16 * DQ_BUFFERS;
    static constexpr int SHARED_BYTES = LAST_QUERY_AT + (SPANS ? 4 * KEYS : 0);
};

// Returns what sm90_row() does, this thread's first row of a warpgroup's 64, but without signed divisions, parts of
// which ptxas would keep in registers throughout the products' loop.
DEVICE_FUNCTION int sm90_backward_row(void) { return (int)(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4); }
DEVICE_FUNCTION int sm90_backward_column(void) { return (int)(2 * (threadIdx.x % 4)); }

struct sm90_backward_arguments {
    struct tensor_map q, k, v, dout, dk, dv;
    const bf16 *qkv;             // (B, T, (H + 2 Hkv) D)
    const bf16 *out, *dout_rows; // (B, T, H D)
    bf16 *dqkv;                  // (B, T, (H + 2 Hkv) D)
    const float *lse;            // (B, H, T)
    // In the workspace. Tiles are of plan::QUERIES queries, the last one padded.
    float *dq;                              // (B, H, tiles, 2 warpgroups, pieces, accumulators / 4, 128 threads, 4)
    float *rows;                            // (B, H, tiles, 2, QUERIES): lse, delta
    int *counters;                          // (B, H, tiles): blocks that have added to dQ
    int B, T, H, Hkv, heads, tiles, blocks; // heads: of a group; blocks: of keys of a KV head
    int section, gang;                      // KV heads of a section; blocks of a gang, 0: all descend
    // section * blocks; KV heads of a section, of the last one; gang, or 1; Hkv; heads
    struct sm90_divisor by_section, by_units[2], by_gang, by_Hkv, by_heads;
    float scale;
    const float *rotary; // (more than the largest position, D), or NULL
    uint32_t *amax;      // of dqkv, or NULL
    float *bias_partial; // (B, tiles, (H + 2 Hkv) D): sums of dqkv's columns, or NULL
    bool any_order, full;
    // Only with plan::SPANS:
    const int32_t *first_key, *last_query; // (B, T), both or neither NULL
    struct token_positions positions;      // of rotary
};

// Returns the first key that query `row` < T of sequence b sees; without a table 0. Unsigned saves registers for signs.
template <class plan>
DEVICE_FUNCTION int sm90_first_key_of(const struct sm90_backward_arguments &a, unsigned b, unsigned row) {
    return plan::SPANS && a.first_key ? a.first_key[(uint64_t)b * (unsigned)a.T + row] : 0;
}
// Returns the last query that sees key `row` < T of sequence b; without a table T - 1.
template <class plan>
DEVICE_FUNCTION int sm90_last_query_of(const struct sm90_backward_arguments &a, unsigned b, unsigned row) {
    return plan::SPANS && a.last_query ? a.last_query[(uint64_t)b * (unsigned)a.T + row] : a.T - 1;
}

struct sm90_backward_block {
    int b, group, number, first_key; // group: the KV head; number: of the block of keys
    int first_tile, end_tile, step;  // of queries, in the order of visits; step: 1 or -1
};
// Returns what block `index` (blockIdx.x) works on, and its order of visits. sm90_backward_order must have set a.
template <class plan>
DEVICE_FUNCTION struct sm90_backward_block sm90_backward_block_of(const struct sm90_backward_arguments &a, int index) {
    struct sm90_backward_block block;
    const int section = sm90_quotient(index, a.by_section), within = index - section * (int)a.by_section.divisor;
    const int first_unit = section * a.section;
    const struct sm90_divisor &by_units = a.by_units[a.B * a.Hkv - first_unit < a.section];
    block.number = sm90_quotient(within, by_units);
    const int unit = first_unit + within - block.number * (int)by_units.divisor;
    block.b = sm90_quotient(unit, a.by_Hkv);
    block.group = unit - block.b * a.Hkv;
    block.first_key = block.number * plan::KEYS;
    const int diagonal = a.full ? 0 : block.first_key / plan::QUERIES;
    if (plan::SPANS) {
        const int end_key = block.first_key + plan::KEYS < a.T ? block.first_key + plan::KEYS : a.T;
        block.first_tile = sm90_last_query_of<plan>(a, (unsigned)block.b, (unsigned)end_key - 1) / plan::QUERIES;
        block.end_tile = diagonal - 1;
        block.step = -1;
        return block;
    }
    const bool ascends = a.gang > 0 && sm90_quotient(block.number, a.by_gang) % 2 == 1;
    block.first_tile = ascends ? diagonal : a.tiles - 1;
    block.end_tile = ascends ? a.tiles : diagonal - 1;
    block.step = ascends ? 1 : -1;
    return block;
}

// Returns the i-th query head, of H, that a block takes at a tile. With any_order blocks begin at different heads.
DEVICE_FUNCTION int sm90_backward_head(const struct sm90_backward_arguments &a, const struct sm90_backward_block &block,
                                       int i) {
    const int later = i + block.number;
    return block.group * a.heads + (a.any_order ? later - sm90_quotient(later, a.by_heads) * a.heads : i);
}

struct sm90_angles {
    float2 cosine, sine;
};
// Returns the angles of elements i and i + 1 of a head, i < D / 2 and even, at a position, from rope.cuh's table.
template <int D> DEVICE_FUNCTION struct sm90_angles sm90_angles_at(const float *rotary, int position, int i) {
    const float *from = rotary + (int64_t)position * D + i;
    struct sm90_angles angles;
    angles.cosine = *(const float2 *)from;
    angles.sine = *(const float2 *)(from + D / 2);
    return angles;
}
// Returns the position of a row of sequence b, as token_position does, but without its division; without SPANS the row.
// Rows past T, which aren't stored, get the last row's, since branches would wait for loads of angles one by one.
template <class plan> DEVICE_FUNCTION int sm90_position(const struct sm90_backward_arguments &a, int b, int row) {
    const int t = row < a.T ? row : a.T - 1;
    int position = t;
    if (plan::SPANS && a.positions.starts)
        position += a.positions.starts[b];
    if (plan::SPANS && a.positions.document_starts)
        position -= a.positions.document_starts[(int64_t)b * a.T + t];
    return position;
}
// Undoes RoPE in place on 4 elements of a head's gradient: i and i + 1 in a, i + D/2 and i + 1 + D/2 in b. angles: i's.
DEVICE_FUNCTION void sm90_undo_rope(float a[2], float b[2], const struct sm90_angles &angles) {
    rope_rotate_pair(a[0], b[0], angles.cosine.x, -angles.sine.x);
    rope_rotate_pair(a[1], b[1], angles.cosine.y, -angles.sine.y);
}

// --- Launches -----------------------------------------------------------------------------------------------------

static_assert(sm90_backward_plan<64>::QUERIES == SM90_BACKWARD_QUERIES_OF_64, "what plans of memory count with");
static_assert(sm90_backward_plan<128>::QUERIES == SM90_BACKWARD_QUERIES, "what plans of memory count with");

// docs/internals/hopper.md says what these are worth by a simulation.
#ifndef SM90_BACKWARD_GANG // scripts/attention_sweep.sh tries others on a GPU
#define SM90_BACKWARD_GANG 8
#define SM90_BACKWARD_MANY_HEADS 4
#define SM90_BACKWARD_L2_SHARE 0.6
#endif
// A gang has at most SM90_BACKWARD_GANG blocks, if there are enough KV heads. From SM90_BACKWARD_MANY_HEADS heads in a
// group on, gangs alternate. A section's Q, dO and dQ may take SM90_BACKWARD_L2_SHARE of the L2 cache.
enum { SM90_GANG = SM90_BACKWARD_GANG, SM90_MANY_HEADS = SM90_BACKWARD_MANY_HEADS };

// Divides the blocks' work: sets a.blocks, section, gang and the divisors, from a.heads, a.Hkv and `keys`, a block's
// keys. A gang is the blocks of a KV head that run at once. The smaller it is, the less its blocks wait for turns at
// dQ, but the more of Q, dO and dQ, 8 bytes for each element of a query head, is used between two blocks' visits to a
// tile. So a section has as many KV heads as the L2 cache holds or, if that is fewer, as make gangs of SM90_GANG.
static void sm90_backward_order(struct sm90_backward_arguments &a, struct attention_shape shape, int keys,
                                int multiprocessors, double l2_bytes) {
    const int units = shape.B * shape.num_query_groups;
    const double held = SM90_BACKWARD_L2_SHARE * l2_bytes / (8.0 * shape.T * shape.head_dim * a.heads);
    int most = multiprocessors < SM90_GANG ? 1 : multiprocessors / SM90_GANG;
    if (held > most)
        most = held < multiprocessors ? (int)held : multiprocessors;
    const int sections = (units + most - 1) / most;
    a.blocks = (int)blocks_for(shape.T, keys);
    a.section = (units + sections - 1) / sections;
    a.gang = a.heads < SM90_MANY_HEADS ? 0 : multiprocessors < a.section ? 1 : multiprocessors / a.section;
    a.by_section = sm90_divisor_of(a.section * a.blocks);
    a.by_units[0] = sm90_divisor_of(a.section);
    a.by_units[1] = sm90_divisor_of(units - (units - 1) / a.section * a.section);
    a.by_gang = sm90_divisor_of(a.gang > 0 ? a.gang : 1);
    a.by_Hkv = sm90_divisor_of(a.Hkv);
    a.by_heads = sm90_divisor_of(a.heads);
}

// Returns the arguments that depend only on the shape; the others are 0.
static struct sm90_backward_arguments sm90_backward_arguments_of(struct attention_shape shape) {
    struct sm90_backward_arguments a;
    memset(&a, 0, sizeof a);
    a.B = shape.B;
    a.T = shape.T;
    a.H = shape.num_heads;
    a.Hkv = shape.num_query_groups;
    a.heads = a.H / a.Hkv;
    a.tiles = (int)sm90_backward_layout_of(shape).tiles;
    a.scale = shape.scale;
    a.full = shape.full;
    a.first_key = shape.first_key;
    a.last_query = shape.last_query;
    return a;
}
