// The tiles of attention's forward for Hopper, its arguments, and the order of its tiles.
#pragma once
#include "kernels/attention/sm90.cuh" // tiles, pipelines, maps
#include <math.h>                     // log2f, INFINITY

// Tiles and registers are FlashAttention-3's where ptxas can keep it all in registers. Turns do not pay at 256 columns,
// whose products are long beside their softmax. scripts/attention_sweep.sh tries others on a GPU.
#ifndef SM90_FORWARD_KEYS // up to 128 columns
#define SM90_FORWARD_KEYS 128
#endif
#ifndef SM90_FORWARD_STAGES
#define SM90_FORWARD_STAGES 2
#endif
#ifndef SM90_FORWARD_TURNS
#define SM90_FORWARD_TURNS (D <= 128)
#endif
template <int HEAD_DIM, bool WITH_SPANS = false> struct sm90_forward_plan {
    static constexpr int D = HEAD_DIM;
    static constexpr bool SPANS = WITH_SPANS;          // queries' keys begin where first_key says
    static constexpr int WARPGROUPS = D == 64 ? 3 : 2; // that multiply
    static constexpr int THREADS = 128 * (WARPGROUPS + 1);
    static constexpr int QUERIES = 64 * WARPGROUPS, KEYS = D == 256 ? 80 : SM90_FORWARD_KEYS,
                         STAGES = SM90_FORWARD_STAGES;
    static constexpr bool RESCALES_EARLY = D == 256; // O: see sm90_rescale
    static constexpr bool TURNS = SM90_FORWARD_TURNS;
    static constexpr int PRODUCER_REGISTERS = WARPGROUPS == 3 ? 32 : 24, REGISTERS = WARPGROUPS == 3 ? 160 : 240;
    static constexpr int Q_BYTES = 64 * 2 * D, KEYS_BYTES = KEYS * 2 * D; // a warpgroup's queries; a tile of keys
    static constexpr int K_AT = WARPGROUPS * Q_BYTES, V_AT = K_AT + STAGES * KEYS_BYTES;
    static constexpr int BARRIERS = 2 * (WARPGROUPS + 2 * STAGES);
    static constexpr int KEYS_END = V_AT + STAGES * KEYS_BYTES;
    static constexpr bool O_APART = KEYS_END + K_AT + 8 * BARRIERS <= 227 * 1024; // O has a place of its own, not Q's
    static constexpr int O_AT = O_APART ? KEYS_END : 0, BARRIERS_AT = KEYS_END + (O_APART ? K_AT : 0);
    static constexpr int SHARED_BYTES = BARRIERS_AT + 8 * BARRIERS;
    static_assert(SHARED_BYTES <= 227 * 1024, "what a block can have");
};

static_assert(sm90_forward_plan<64>::QUERIES == SM90_FORWARD_QUERIES_OF_64, "what plans of memory count with");
static_assert(sm90_forward_plan<128>::QUERIES == SM90_FORWARD_QUERIES, "what plans of memory count with");
struct sm90_forward_arguments {           // a tile is 64 * WARPGROUPS queries of one head
    struct tensor_map queries, keys, out; // boxes of 64 rows of qkv, plan::KEYS rows of qkv, 16 rows of out
    float *lse;                           // (B, H, T), to base 2, or NULL
    uint32_t *amax;                       // of out, or NULL
    int T, H, Hkv;
    bool full;         // no diagonal
    int heads;         // B * H
    int section_heads; // 0: all at once
    int blocks;        // tiles of queries of a head
    float scale_log2;
    struct sm90_divisor by_H, by_group; // H; H / Hkv
    // How rounds are divided, by sm90_forward_divide:
    int pairs, turns_back;                     // 1: rounds are of halves of pairs; every other one goes backwards
    int half, middle;                          // blocks / 2; a head's middle tile, -1 where it has none
    struct sm90_divisor by_items, by_heads[2]; // tiles or pairs of a section; its heads, and the last section's
    // Only with plan::SPANS:
    const int32_t *first_key;        // (B, T)
    struct sm90_forward_item *order; // (heads * blocks): in the workspace
};

struct sm90_forward_tile {
    int round, number; // the next round; how many tiles this block had before the current one
    int head, first;   // as in sm90_forward_item
};

// Sets a's members from pairs to by_heads, for sm90_in_sections. Reads section_heads, heads, blocks and full.
static void sm90_forward_divide(struct sm90_forward_arguments &a) {
    const int section = a.section_heads ? a.section_heads : a.heads, last = a.heads - (a.heads - 1) / section * section;
    a.pairs = a.section_heads > 0 && !a.full;
    a.turns_back = a.section_heads == 0;
    a.half = a.blocks / 2;
    a.middle = a.blocks % 2 ? a.half : -1;
    a.by_items = sm90_divisor_of(a.pairs ? section * a.half + a.blocks % 2 * ((section + 1) / 2) : section * a.blocks);
    a.by_heads[0] = sm90_divisor_of(section);
    a.by_heads[1] = sm90_divisor_of(last);
}

// Returns the index, among all tiles, of this block's tile in a round, maybe past the last. Odd rounds go backwards.
DEVICE_FUNCTION int sm90_there_and_back(int round) {
    const int grid = (int)gridDim.x;
    return round * grid + (round % 2 ? grid - 1 - (int)blockIdx.x : (int)blockIdx.x);
}
// Returns a where all bits of `mask` are set, b where none is.
DEVICE_FUNCTION int sm90_either(int mask, int a, int b) { return b ^ ((a ^ b) & mask); }
// Finds this block's tile of round tile.round. Sets tile.head, `block`, the tile's number in its head, and tile.round,
// to the block's next round. Returns false, with these undefined, if no round from this one on has a tile. Sections of
// heads follow each other; a head's last tile comes first. In a pair, an even round has the longer tile and the next
// round the shorter: two tiles equally far from a head's ends or, at a section's end, two heads' middle tiles.
DEVICE_FUNCTION bool sm90_in_sections(struct sm90_forward_tile &tile, int &block,
                                      const struct sm90_forward_arguments &a) {
    // There is no branch, after which ptxas would move all addresses to uniform registers again.
    const int round = tile.round, item = round >> a.pairs, odd = round & a.pairs, backwards = -(item & a.turns_back);
    const int grid = (int)gridDim.x, place = (int)blockIdx.x;
    const int at = item * grid + sm90_either(backwards, grid - 1 - place, place);
    const int section = sm90_quotient(at, a.by_items), within = at - section * (int)a.by_items.divisor;
    const int first_head = section * (int)a.by_heads[0].divisor;
    const struct sm90_divisor &by = a.by_heads[a.heads - first_head < (int)a.by_heads[0].divisor];
    const int heads = (int)by.divisor, row = sm90_quotient(within, by);
    const int middle = 2 * (within - heads * a.half) + odd, in_middle = -a.pairs & ~(middle >> 31);
    const int alone = in_middle & ~((middle + 1 - heads) >> 31) & (1 - odd); // 1: it has no shorter half
    tile.head = first_head + sm90_either(in_middle, middle, within - row * heads);
    block = sm90_either(in_middle, a.middle, sm90_either(-odd, row, a.blocks - 1 - row));
    tile.round = round + 1 + alone;
    return ((a.heads - 1 - tile.head) | block) >= 0; // the last section has fewer heads than the others
}
// Sets tile.head and first, from a.order, to this block's tile of a round; adds 1 to number. Returns false without one.
DEVICE_FUNCTION bool sm90_in_order(struct sm90_forward_tile &tile, const struct sm90_forward_arguments &a, int round) {
    const int at = sm90_there_and_back(round);
    if (at >= a.heads * a.blocks)
        return false;
    tile.head = a.order[at].head;
    tile.first = a.order[at].first;
    tile.number++;
    return true;
}
// Returns a tile that stands before the block's first, from which sm90_forward_next goes on.
DEVICE_FUNCTION struct sm90_forward_tile sm90_forward_begin(void) {
    const struct sm90_forward_tile before_first = {0, -1, 0, 0};
    return before_first;
}
// Advances `tile`, at first sm90_forward_begin's, to this block's next tile. Returns false after the last.
template <class plan>
DEVICE_FUNCTION bool sm90_forward_next(struct sm90_forward_tile &tile, const struct sm90_forward_arguments &a) {
    if (plan::SPANS)
        return sm90_in_order(tile, a, tile.round++);
    int block;
    if (!sm90_in_sections(tile, block, a))
        return false;
    tile.number++;
    tile.first = block * plan::QUERIES;
    return true;
}
// Returns the number of the last tile of keys that one of the rows first .. first + rows - 1 sees.
template <class plan>
DEVICE_FUNCTION int sm90_last_tile_of_keys(const struct sm90_forward_arguments &a, int first, int rows) {
    return ((first + rows < a.T && !a.full ? first + rows : a.T) - 1) / plan::KEYS;
}
// Returns the first key that a row of sequence b sees, and past T what the last row sees; 0 without SPANS.
template <class plan> DEVICE_FUNCTION int sm90_first_key(const struct sm90_forward_arguments &a, int b, int row) {
    return plan::SPANS ? a.first_key[(int64_t)b * a.T + (row < a.T ? row : a.T - 1)] : 0;
}

// The number of tiles of keys that a tile of queries sees; tile: b * blocks + block.
template <class plan> DEVICE_FUNCTION int sm90_tiles_of_keys(const struct sm90_forward_arguments &a, int tile) {
    const int first = tile % a.blocks * plan::QUERIES;
    return sm90_last_tile_of_keys<plan>(a, first, plan::QUERIES) + 1 -
           sm90_first_key<plan>(a, tile / a.blocks, first) / plan::KEYS;
}
