// Packs buffers of known lifetimes into the least memory (offline dynamic storage allocation). Buffers are rectangles,
// lifetime x bytes, that may only move up and down; the lowest packing is sought. That is NP-hard in general (Garey &
// Johnson, problem SR2), but a training step is regular. There are two searches: the skyline's (memory/skyline.cuh) and
// the stacks' here. Activations nest, since what is made first is freed last: they make dense stacks, the longest-lived
// at the bottom. Buffers that don't nest, such as a ZeRO unit's parameters, are fitted into gaps above.
#pragma once
#include "memory/skyline.cuh" // struct plan_item, struct skyline, its searches
#include <stdbool.h>          // bool
#include <stddef.h>           // size_t
#include <stdint.h>           // int64_t, SIZE_MAX
#include <stdlib.h>           // free, qsort
#include <string.h>           // memset, memcpy

struct plan_span {
    size_t begin, end;
};

// Work is the number of ticks and neighbors visited, some 3 ns each. It limits the search: by time, plans would vary.
enum {
    PLAN_FIT_NEIGHBORS = 256, // an item with more fitted neighbors is put on top of them
    PLAN_FIT_PAIRS = 1000000, // most pairs of fitted items that are live together; beyond it more are stacked
    PLAN_CLASSES = 32,        // class k: items of more than 2^(k - 1) and up to 2^k ticks
    PLAN_PACK_WORK = 4000000  // limit of work
};

// The kinds of stacks. Each leaves its shortest items to be fitted, so many that plan_fitted_live live at a time on
// average. 0 stacks all items that nest, which is fast and meets most plans' bound. The others are for lifetimes that
// nest by chance: of the values tried (0 to 48, also together) they leave the fewest plans above the bound.
enum { PLAN_STACKS = 3 };
static const int plan_fitted_live[PLAN_STACKS] = {0, 8, 24};

// The state of the search for the lowest packing. Stacked items lie at the bottom, fitted items above them in gaps.
struct plan_packing {
    struct plan_item *items; // by falling length
    int count, ticks;
    size_t bound; // the largest live sum: no packing is lower
    size_t *best; // (count) offsets of the best packing so far
    size_t best_height;
    size_t *skyline; // (ticks) the top of the stack
    size_t stack_height;
    int *fitted; // (fitted_count) items that are not stacked
    int fitted_count;
    size_t *floor; // (count) of a fitted item: the top of the stack in its ticks
    // A bucket is a list of the placed fitted items of one class that begin in the same 2^class ticks, so that finding
    // an item's neighbors costs by their number, however long other items live.
    int *newest;                  // (bucket_count) the item of a bucket that was placed last, -1: none
    int *next;                    // (count) the item of the same bucket that was placed before this one, -1: none
    int buckets_of[PLAN_CLASSES]; // the first bucket of a class, -1: the class has no fitted item
    int bucket_count;
    int64_t work; // ticks and neighbors looked at so far
};

// Compares items for qsort: the longest lifetime comes first, of equal ones the lowest id.
static int plan_compare_lengths(const void *a, const void *b) {
    const struct plan_item *x = (const struct plan_item *)a, *y = (const struct plan_item *)b;
    if (plan_item_ticks(x) != plan_item_ticks(y))
        return plan_item_ticks(x) > plan_item_ticks(y) ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}
// Returns the class of an item: the least k for which 2^k ticks are at least as long as the item's lifetime.
static int plan_class(const struct plan_item *item) {
    int k = 0;
    while (1 << k < plan_item_ticks(item))
        k++;
    return k;
}

// Returns the height of the stack, in bytes, during an item's lifetime: the largest skyline of ticks [first, last].
static size_t plan_floor(const struct plan_packing *packing, const struct plan_item *item) {
    size_t top = 0;
    for (int s = item->first; s <= item->last; s++)
        top = packing->skyline[s] > top ? packing->skyline[s] : top;
    return top;
}

// Whether the stack has one height in all ticks of an item's lifetime.
static bool plan_skyline_is_flat(const struct plan_packing *packing, const struct plan_item *item) {
    size_t differ = 0;
    for (int s = item->first; s <= item->last; s++)
        differ |= packing->skyline[s] ^ packing->skyline[item->first];
    return differ == 0;
}

// Stacks items, the longest-lived first. Leaves out an item that would have a gap below it. Also leaves out the
// shortest items, so many that on average `live` of them are live in a tick. Stacks the first `forced` items in any
// case. Sets skyline, stack_height, the stacked items' offsets, and `fitted`, the list of the items left out.
static void plan_stack(struct plan_packing *packing, int live, int forced) {
    memset(packing->skyline, 0, (size_t)packing->ticks * sizeof *packing->skyline);
    packing->fitted_count = 0;
    packing->stack_height = 0;
    int last = packing->count; // the item from which on none is stacked
    for (int64_t area = 0; last > 0; last--) {
        area += plan_item_ticks(&packing->items[last - 1]);
        if (area > (int64_t)live * packing->ticks)
            break;
    }
    for (int i = 0; i < packing->count; i++) {
        struct plan_item *item = &packing->items[i];
        packing->work += plan_item_ticks(item) / 4; // the loops over ticks are vectorized
        if (i >= forced && (i >= last || !plan_skyline_is_flat(packing, item))) {
            packing->fitted[packing->fitted_count++] = i;
            continue;
        }
        item->offset = plan_floor(packing, item);
        const size_t top = item->offset + item->bytes;
        for (int s = item->first; s <= item->last; s++)
            packing->skyline[s] = top;
        packing->stack_height = top > packing->stack_height ? top : packing->stack_height;
    }
}

// The number of pairs of fitted items that live together. An item and itself are a pair; equal begins count twice.
static int64_t plan_fitted_pairs(const struct plan_packing *packing) {
    int *begun = (int *)plan_allocate((size_t)packing->ticks + 1, sizeof *begun); // [s]: items that began before tick s
    int64_t pairs = 0;
    for (int i = 0; i < packing->fitted_count; i++)
        begun[packing->items[packing->fitted[i]].first + 1]++;
    for (int s = 0; s < packing->ticks; s++)
        begun[s + 1] += begun[s];
    for (int i = 0; i < packing->fitted_count; i++) {
        const struct plan_item *item = &packing->items[packing->fitted[i]];
        pairs += begun[item->last + 1] - begun[item->first];
    }
    free(begun);
    return pairs;
}

// Divides the items by plan_stack into stacked ones and fitted ones, about `live` of these in a tick. Stacks more of
// them as long as more than PLAN_FIT_PAIRS pairs are fitted. Sets floor, and the buckets' number and classes.
static void plan_split(struct plan_packing *packing, int live) {
    plan_stack(packing, live, 0);
    for (int forced = packing->count / 16 + 1; plan_fitted_pairs(packing) > PLAN_FIT_PAIRS; forced *= 2)
        plan_stack(packing, live, forced);
    packing->bucket_count = 0;
    for (int k = 0; k < PLAN_CLASSES; k++)
        packing->buckets_of[k] = -1;
    for (int i = 0; i < packing->fitted_count; i++) {
        const struct plan_item *item = &packing->items[packing->fitted[i]];
        const int k = plan_class(item);
        packing->floor[packing->fitted[i]] = plan_floor(packing, item);
        packing->work += plan_item_ticks(item) / 4;
        if (packing->buckets_of[k] < 0) {
            packing->buckets_of[k] = packing->bucket_count;
            packing->bucket_count += (packing->ticks >> k) + 1;
        }
    }
}

// Inserts a span into `spans` (PLAN_FIT_NEIGHBORS), sorted by begin, if room is left. Increments *count in any case.
static void plan_add_span(struct plan_span *spans, int *count, struct plan_span span) {
    if (*count < PLAN_FIT_NEIGHBORS) {
        int at = *count;
        for (; at > 0 && spans[at - 1].begin > span.begin; at--)
            spans[at] = spans[at - 1];
        spans[at] = span;
    }
    (*count)++;
}

// Places a fitted item among the placed ones that live with it: in the tightest gap above its floor, or else on top.
static void plan_fit(struct plan_packing *packing, int index) {
    struct plan_item *item = &packing->items[index];
    const size_t bottom = packing->floor[index];
    struct plan_span near[PLAN_FIT_NEIGHBORS];
    int count = 0;
    size_t top = bottom;
    for (int k = 0; k < PLAN_CLASSES; k++) {
        if (packing->buckets_of[k] < 0)
            continue;
        const int *newest = packing->newest + packing->buckets_of[k], earliest = item->first - (1 << k) + 1;
        for (int bucket = earliest > 0 ? earliest >> k : 0; bucket <= item->last >> k; bucket++, packing->work++)
            for (int i = newest[bucket]; i >= 0; i = packing->next[i], packing->work++) {
                const struct plan_item *other = &packing->items[i];
                if (other->last < item->first || other->first > item->last)
                    continue;
                const struct plan_span span = {other->offset, other->offset + other->bytes};
                top = span.end > top ? span.end : top;
                plan_add_span(near, &count, span);
            }
    }
    item->offset = top;
    size_t base = bottom, tightest = SIZE_MAX;
    for (int i = 0; i < count && count <= PLAN_FIT_NEIGHBORS; i++) {
        if (near[i].begin > base && near[i].begin - base >= item->bytes && near[i].begin - base < tightest) {
            tightest = near[i].begin - base;
            item->offset = base;
        }
        base = near[i].end > base ? near[i].end : base;
    }
    const int k = plan_class(item);
    int *newest = &packing->newest[packing->buckets_of[k] + (item->first >> k)];
    packing->next[index] = *newest;
    *newest = index;
}

// Fits all fitted items anew, in an order (fitted_count). Keeps the packing in `best` if it is the lowest so far.
static void plan_try(struct plan_packing *packing, const struct plan_key *order) {
    for (int bucket = 0; bucket < packing->bucket_count; bucket++)
        packing->newest[bucket] = -1;
    size_t height = packing->stack_height;
    for (int i = 0; i < packing->fitted_count; i++) {
        const struct plan_item *item = &packing->items[order[i].item];
        plan_fit(packing, order[i].item);
        height = item->offset + item->bytes > height ? item->offset + item->bytes : height;
    }
    if (height < packing->best_height) {
        packing->best_height = height;
        for (int i = 0; i < packing->count; i++)
            packing->best[i] = packing->items[i].offset;
    }
}

// The initial orders of the fitted items. Chains are for lifetimes that overlap in a row, as in offloading: they order
// long items by the end of their lives, the last first, so that every other one shares a place; short items fill gaps.
enum plan_order {
    PLAN_BY_LENGTH,
    PLAN_BY_AREA,
    PLAN_BY_BYTES,
    PLAN_BY_START,
    PLAN_CHAINS,
    PLAN_LONG_CHAINS,
    PLAN_ORDERS
};
enum { PLAN_CHAIN_TICKS = 3, PLAN_LONG_CHAIN_TICKS = 12 };

// Fills keys (fitted_count) with the fitted items in one of the initial orders, sorted by falling key.
static void plan_sort(const struct plan_packing *packing, struct plan_key *keys, enum plan_order order) {
    for (int i = 0; i < packing->fitted_count; i++) {
        const struct plan_item *item = &packing->items[packing->fitted[i]];
        const double length = plan_item_ticks(item), bytes = (double)item->bytes,
                     area = length * bytes / 0x1p80; // below 1
        keys[i].item = packing->fitted[i];
        switch (order) {
        case PLAN_BY_AREA: keys[i].key = length * bytes; break;
        case PLAN_BY_BYTES: keys[i].key = bytes; break;
        case PLAN_BY_START: keys[i].key = -item->first; break;
        case PLAN_BY_LENGTH: keys[i].key = length; break;
        case PLAN_CHAINS:
            keys[i].key = length < PLAN_CHAIN_TICKS ? area : 1 + item->last + length / (packing->ticks + 1.0);
            break;
        case PLAN_LONG_CHAINS:
            keys[i].key = length < PLAN_LONG_CHAIN_TICKS ? area : 1 + item->last + bytes / 0x1p64;
            break;
        case PLAN_ORDERS: break;
        }
    }
    qsort(keys, (size_t)packing->fitted_count, sizeof *keys, plan_compare_keys);
}

// Promotes each item that the last try left above the bound: the next try fits it earlier, by a fifth of its place in
// the order, keys (count) (squeaky-wheel optimization, Joslin & Clements 1999). Larger steps are worse, as measured:
// half the place leaves four times as many plans above the bound, a move to the front ten times as many.
static void plan_promote(const struct plan_packing *packing, struct plan_key *keys, int count) {
    for (int i = 0; i < count; i++) {
        const struct plan_item *item = &packing->items[keys[i].item];
        keys[i].key = item->offset + item->bytes > packing->bound ? 0.5 - 0.8 * i : -i;
    }
    qsort(keys, (size_t)count, sizeof *keys, plan_compare_keys);
}

// Whether the search goes on: there is no packing yet, or a lower one may exist and the limit of work is not reached.
static bool plan_goes_on(const struct plan_packing *packing) {
    return packing->best_height == SIZE_MAX ||
           plan_is_worth_searching(packing->best_height, packing->bound, packing->work, PLAN_PACK_WORK, PLAN_PACK_WORK);
}

// Lowers packing->best, if it can. Tries each plan_fitted_live with each order of the fitted items, which plan_promote
// improves after each try. Ends after 50 rounds, at the bound, or at the limit of work.
static void plan_pack_stacks(struct plan_packing *packing) {
    enum { ROUNDS = 50 };
    const size_t count = (size_t)packing->count;
    struct plan_key *orders = (struct plan_key *)plan_allocate(PLAN_STACKS * PLAN_ORDERS * count, sizeof *orders);
    for (int round = 0; round < ROUNDS && plan_goes_on(packing); round++)
        for (int stack = 0; stack < PLAN_STACKS && plan_goes_on(packing); stack++) {
            plan_split(packing, plan_fitted_live[stack]);
            for (int i = 0; i < PLAN_ORDERS && plan_goes_on(packing); i++) {
                struct plan_key *order = orders + (size_t)(stack * PLAN_ORDERS + i) * count;
                if (round == 0)
                    plan_sort(packing, order, (enum plan_order)i);
                for (int again = 0; again < 2 && plan_goes_on(packing); again++) {
                    plan_try(packing, order);
                    plan_promote(packing, order, packing->fitted_count);
                }
            }
        }
    free(orders);
}

// Replaces packing->best by the skyline's lowest packing if that is lower.
static void plan_keep_lower(struct plan_packing *packing, const struct skyline *skyline) {
    if (skyline->best_height >= packing->best_height)
        return;
    packing->best_height = skyline->best_height;
    memcpy(packing->best, skyline->best, (size_t)packing->count * sizeof *packing->best);
}

// Packs the items (at least one). Sorts them by length, and sets best, the offsets in this new order, and best_height.
// The caller allocates all arrays, sets bound, and sets best_height to SIZE_MAX.
static void plan_pack(struct plan_packing *packing) {
    qsort(packing->items, (size_t)packing->count, sizeof *packing->items, plan_compare_lengths);
    struct skyline skyline;
    skyline_begin(&skyline, packing->items, packing->count, packing->ticks, packing->bound);
    skyline_search_by_promotion(&skyline);
    plan_keep_lower(packing, &skyline);
    plan_pack_stacks(packing);
    if (plan_is_worth_searching(packing->best_height, packing->bound, 0, 0, 1)) {
        skyline_search_by_chance(&skyline);
        plan_keep_lower(packing, &skyline);
    }
    skyline_free(&skyline);
}
