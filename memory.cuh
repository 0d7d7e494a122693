// The memory of a training step, planned before anything is allocated.
//
// The schedule of a step runs once in plan mode: each op starts a phase, each access of a buffer is a touch, nothing is
// computed. So the lifetimes come from the code that will run. plan_place then finds an offset for every buffer, such
// that buffers that never live together share bytes; then each arena is one allocation, and there is no other.
//
// Placing is offline dynamic storage allocation: rectangles (lifetime x bytes) that may move up and down only, packed
// to the least height. NP-hard in general (Garey & Johnson, problem SR2), but a training step is regular. Activations
// nest, since what is made first is freed last, so that stacking them, the longest-lived first, is dense. What does not
// nest, such as the parameters of a ZeRO unit, gathered while the unit before is used, is fitted into gaps above.
#pragma once
#include "kernels/device_memory.cuh" // device_allocate, device_free
#include "kernels/device_queue.cuh"  // device_free_bytes, device_used_bytes
#include "runtime/machine/error.h"   // fail
#include "runtime/machine/memory_limits.h" // memory_available_bytes
#include <errno.h>                   // errno
#include <stdbool.h>                 // bool
#include <stddef.h>                  // size_t
#include <stdint.h>                  // int64_t, SIZE_MAX
#include <stdio.h>                   // FILE, fprintf, snprintf, sscanf
#include <stdlib.h>                  // calloc, realloc, free, qsort, strtoull
#include <string.h>                  // memcpy, memset, strncmp, strstr, strchr, strerror
#include <sys/resource.h>            // getrlimit
#include <sys/stat.h>                // lstat
#include <unistd.h>                  // sysconf, getpid, unlink

// One allocation each. ACTIVATIONS holds all whose lifetime lies within the step: activations, temporaries, logits,
// workspace. Buffers of the other arenas live always.
enum plan_arena { ARENA_PARAMETERS, ARENA_GRADIENTS, ARENA_OPTIMIZER, ARENA_ACTIVATIONS, ARENA_COUNT };

enum {
    PLAN_NAME_CHARS = 48,
    PLAN_ALIGNMENT = 256 // a vector register, an AMX tile row, what cuBLASLt assumes of its operands
};

struct plan_buffer {
    char name[PLAN_NAME_CHARS];
    int category;                // index into plan.categories
    int layer;                   // -1: of no layer
    size_t bytes;                // as asked for; placed as if rounded up to PLAN_ALIGNMENT
    size_t offset;               // from the start of its arena
    int first_phase, last_phase; // lives in both and between; -1 while never touched
    enum plan_arena arena;
};

struct plan {
    struct plan_buffer *buffers;
    int count, capacity;
    char (*categories)[PLAN_NAME_CHARS]; // in the order of first appearance
    int category_count, category_capacity;
    char (*phases)[PLAN_NAME_CHARS];
    int phase_count, phase_capacity;
    // Set by plan_place:
    size_t arena_bytes[ARENA_COUNT];
    size_t peak_bytes;        // of all arenas together: what is allocated
    size_t lower_bound_bytes; // the largest sum of live buffers over the phases, and the other arenas: no plan is lower
    int peak_phase;           // where that sum is reached first; -1 if nothing lives within the step
};

// ---------------------------------------------------------------------------------------------------------------------
// Recording

static const char *plan_arena_name(int arena) {
    static const char *const names[ARENA_COUNT] = {"parameters", "gradients", "optimizer", "activations"};
    return names[arena];
}

static void plan_begin(struct plan *plan) {
    memset(plan, 0, sizeof *plan);
    plan->peak_phase = -1;
}

static void plan_free(struct plan *plan) {
    free(plan->buffers);
    free(plan->categories);
    free(plan->phases);
    plan_begin(plan);
}

static void *plan_allocate(size_t count, size_t size) {
    void *memory = calloc(count > 0 ? count : 1, size);
    if (!memory)
        fail("no memory left to lay out the memory plan (%zu bytes); free some memory on this machine", count * size);
    return memory;
}

// Makes room for one more element of an array that grows by doubling.
static void *plan_grow(void *array, int count, int *capacity, size_t size) {
    if (count < *capacity)
        return array;
    *capacity = *capacity > 0 ? 2 * *capacity : 64;
    void *memory = realloc(array, (size_t)*capacity * size);
    if (!memory)
        fail("no memory left to lay out the memory plan (%d buffers); free some memory on this machine", count);
    return memory;
}

static size_t plan_sum(size_t a, size_t b, const char *what) {
    size_t sum;
    if (__builtin_add_overflow(a, b, &sum))
        fail("the memory plan exceeds 2^64 bytes at '%s'; lower --micro-batch-size, --seq-length or the model's sizes",
             what);
    return sum;
}

static size_t plan_rounded(const struct plan_buffer *buffer) {
    return plan_sum(buffer->bytes, PLAN_ALIGNMENT - 1, buffer->name) / PLAN_ALIGNMENT * PLAN_ALIGNMENT;
}

// Longer names lose their end.
static void plan_copy_name(char *out, const char *name) {
    const size_t n = strnlen(name, PLAN_NAME_CHARS - 1);
    memcpy(out, name, n);
    out[n] = 0;
}

static int plan_category(struct plan *plan, const char *name) {
    for (int i = 0; i < plan->category_count; i++)
        if (strncmp(plan->categories[i], name, PLAN_NAME_CHARS - 1) == 0)
            return i;
    plan->categories = (char(*)[PLAN_NAME_CHARS])plan_grow(plan->categories, plan->category_count,
                                                           &plan->category_capacity, sizeof *plan->categories);
    plan_copy_name(plan->categories[plan->category_count], name);
    return plan->category_count++;
}

// Adds a buffer and returns its id. It has no lifetime, and takes no bytes of ARENA_ACTIVATIONS, until it is touched.
static int plan_add(struct plan *plan, enum plan_arena arena, const char *category, const char *name, int layer,
                    size_t bytes) {
    plan->buffers = (struct plan_buffer *)plan_grow(plan->buffers, plan->count, &plan->capacity, sizeof *plan->buffers);
    struct plan_buffer *buffer = &plan->buffers[plan->count];
    memset(buffer, 0, sizeof *buffer);
    plan_copy_name(buffer->name, name);
    buffer->category = plan_category(plan, category);
    buffer->layer = layer;
    buffer->bytes = bytes;
    buffer->first_phase = buffer->last_phase = -1;
    buffer->arena = arena;
    return plan->count++;
}

// Starts the next phase and returns its index. What stands before ": " in a name groups phases in the picture.
static int plan_phase(struct plan *plan, const char *name) {
    plan->phases = (char(*)[PLAN_NAME_CHARS])plan_grow(plan->phases, plan->phase_count, &plan->phase_capacity,
                                                       sizeof *plan->phases);
    plan_copy_name(plan->phases[plan->phase_count], name);
    return plan->phase_count++;
}

// The buffer is live in the current phase, and so in all phases since it was touched first. A negative id is a buffer
// that this configuration does not have.
static void plan_touch(struct plan *plan, int id) {
    if (id < 0)
        return;
    const int phase = plan->phase_count > 0 ? plan->phase_count - 1 : plan_phase(plan, "start");
    struct plan_buffer *buffer = &plan->buffers[id];
    if (buffer->first_phase < 0)
        buffer->first_phase = phase;
    buffer->last_phase = phase;
}

// ---------------------------------------------------------------------------------------------------------------------
// Placing

// A buffer as the packer sees it. Time runs in slots: the phases in which some buffer begins to live. No other phase
// can decide anything, since all that lives in it lives in the slot before it too.
struct plan_item {
    int first, last; // slots
    int id;
    size_t bytes; // rounded up
    size_t offset;
};

// What a placed item takes of the addresses.
struct plan_span {
    size_t begin, end;
};

// Work counts slots and neighbours looked at, some 3 ns each. It bounds the search rather than time does, so that the
// same schedule has the same plan everywhere.
enum {
    PLAN_FIT_NEIGHBOURS = 256,     // an item with more neighbours than these is not searched for gaps
    PLAN_FIT_PAIRS = 1000000,      // of fitted items that live together, at most; stack more if there would be more
    PLAN_CLASSES = 32,             // class k: items of more than 2^(k - 1) and up to 2^k slots
    PLAN_PACK_WORK = 4000000,      // in all tries, once each kind of stack was tried,
    PLAN_PACK_WORK_MOST = 50000000 // and while more than a hundredth is lost
};

// The shortest items, of which so many live at a time on average, are never stacked. With 0 all that nest are: few are
// left to fit, which is fast and meets the bound of most plans. The others are for lifetimes that nest by chance. Of
// the values tried (0 to 48, alone and together) these leave the fewest plans above their bound.
enum { PLAN_STACKS = 3 };
static const int plan_fitted_live[PLAN_STACKS] = {0, 8, 24};

struct plan_packing {
    struct plan_item *items; // by falling length
    int count, slots;
    size_t bound; // the largest live sum: no packing is lower
    size_t *best; // (count) offsets of the best packing so far
    size_t best_height;
    size_t *skyline; // (slots) the top of what is stacked
    size_t stack_height;
    int *fitted; // (fitted_count) items that are not stacked
    int fitted_count;
    size_t *floor; // (count) of a fitted item: the highest stacked byte under it
    // Placed fitted items by class and the 2^class slots in which they begin, so that an item finds its neighbours at
    // a cost that follows their number, however long another one lives.
    int *newest;                  // (bucket_count) the last one placed of a bucket, -1: none
    int *next;                    // (count) the one of its bucket placed before it, -1: none
    int buckets_of[PLAN_CLASSES]; // the first bucket of a class, -1: no fitted item has it
    int bucket_count;
    int64_t work; // how much has been looked at
};

struct plan_key {
    double key;
    int item;
};

static int plan_compare_keys(const void *a, const void *b) {
    const struct plan_key *x = (const struct plan_key *)a, *y = (const struct plan_key *)b;
    if (x->key != y->key)
        return x->key > y->key ? -1 : 1;
    return x->item < y->item ? -1 : 1;
}

static int plan_item_length(const struct plan_item *item) { return item->last - item->first + 1; }

static int plan_compare_lengths(const void *a, const void *b) {
    const struct plan_item *x = (const struct plan_item *)a, *y = (const struct plan_item *)b;
    if (plan_item_length(x) != plan_item_length(y))
        return plan_item_length(x) > plan_item_length(y) ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}
static int plan_class(const struct plan_item *item) {
    int k = 0;
    while (1 << k < plan_item_length(item))
        k++;
    return k;
}

// The highest stacked byte under an item.
static size_t plan_floor(const struct plan_packing *packing, const struct plan_item *item) {
    size_t top = 0;
    for (int s = item->first; s <= item->last; s++)
        top = packing->skyline[s] > top ? packing->skyline[s] : top;
    return top;
}

// Whether an item can be stacked without a gap below it.
static bool plan_is_flat(const struct plan_packing *packing, const struct plan_item *item) {
    size_t differ = 0;
    for (int s = item->first; s <= item->last; s++)
        differ |= packing->skyline[s] ^ packing->skyline[item->first];
    return differ == 0;
}

// Stacks items by falling length, each on top of all that is stacked in its slots, if nothing is lost below it: dense
// where lifetimes nest. The first `forced` are stacked in any case; the shortest, `live` at a time, never.
static void plan_stack(struct plan_packing *packing, int live, int forced) {
    memset(packing->skyline, 0, (size_t)packing->slots * sizeof *packing->skyline);
    packing->fitted_count = 0;
    packing->stack_height = 0;
    int last = packing->count; // none is stacked from here on
    for (int64_t area = 0; last > 0; last--) {
        area += plan_item_length(&packing->items[last - 1]);
        if (area > (int64_t)live * packing->slots)
            break;
    }
    for (int i = 0; i < packing->count; i++) {
        struct plan_item *item = &packing->items[i];
        packing->work += plan_item_length(item) / 4; // these loops are vectors
        if (i >= forced && (i >= last || !plan_is_flat(packing, item))) {
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

// How many pairs of fitted items live together: what one try looks at, each pair once or twice.
static int64_t plan_fitted_pairs(const struct plan_packing *packing) {
    int *begun = (int *)plan_allocate((size_t)packing->slots + 1, sizeof *begun); // [s]: in the slots before s
    int64_t pairs = 0;
    for (int i = 0; i < packing->fitted_count; i++)
        begun[packing->items[packing->fitted[i]].first + 1]++;
    for (int s = 0; s < packing->slots; s++)
        begun[s + 1] += begun[s];
    for (int i = 0; i < packing->fitted_count; i++) {
        const struct plan_item *item = &packing->items[packing->fitted[i]];
        pairs += begun[item->last + 1] - begun[item->first];
    }
    free(begun);
    return pairs;
}

// Decides what is stacked and what is fitted, and prepares for the fitting.
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
        packing->work += plan_item_length(item) / 4;
        if (packing->buckets_of[k] < 0) {
            packing->buckets_of[k] = packing->bucket_count;
            packing->bucket_count += (packing->slots >> k) + 1;
        }
    }
}

// Adds what a placed item takes to `spans`, by begin, which hold the first PLAN_FIT_NEIGHBOURS of *count.
static void plan_add_span(struct plan_span *spans, int *count, struct plan_span span) {
    if (*count < PLAN_FIT_NEIGHBOURS) {
        int at = *count;
        for (; at > 0 && spans[at - 1].begin > span.begin; at--)
            spans[at] = spans[at - 1];
        spans[at] = span;
    }
    (*count)++;
}

// Puts an item into the tightest gap between the fitted ones that live with it, above what is stacked; on top of them
// if none is wide enough, or if they are too many to look.
static void plan_fit(struct plan_packing *packing, int index) {
    struct plan_item *item = &packing->items[index];
    const size_t bottom = packing->floor[index];
    struct plan_span near[PLAN_FIT_NEIGHBOURS];
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
    for (int i = 0; i < count && count <= PLAN_FIT_NEIGHBOURS; i++) {
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

// Fits what is not stacked, in the order given, on what is. Keeps the result if it is the best yet.
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

enum plan_order { PLAN_BY_LENGTH, PLAN_BY_AREA, PLAN_BY_BYTES, PLAN_BY_START, PLAN_ORDERS };

static void plan_sort(const struct plan_packing *packing, struct plan_key *keys, enum plan_order order) {
    for (int i = 0; i < packing->fitted_count; i++) {
        const struct plan_item *item = &packing->items[packing->fitted[i]];
        const double length = plan_item_length(item), bytes = (double)item->bytes;
        keys[i].item = packing->fitted[i];
        switch (order) {
        case PLAN_BY_AREA: keys[i].key = length * bytes; break;
        case PLAN_BY_BYTES: keys[i].key = bytes; break;
        case PLAN_BY_START: keys[i].key = -item->first; break;
        default: keys[i].key = length;
        }
    }
    qsort(keys, (size_t)packing->fitted_count, sizeof *keys, plan_compare_keys);
}

// Squeaky wheel (Joslin & Clements 1999): what stuck out above the bound is placed a little earlier next time. By a
// fifth of its rank: bigger steps undo what was right (measured: by a half they leave four times as many plans above
// the bound, to the front ten times).
static void plan_promote(const struct plan_packing *packing, struct plan_key *keys, int count) {
    for (int i = 0; i < count; i++) {
        const struct plan_item *item = &packing->items[keys[i].item];
        keys[i].key = item->offset + item->bytes > packing->bound ? 0.5 - 0.8 * i : -i;
    }
    qsort(keys, (size_t)count, sizeof *keys, plan_compare_keys);
}

static bool plan_goes_on(const struct plan_packing *packing, int round) {
    if (packing->best_height == packing->bound)
        return false;
    if (packing->best_height == SIZE_MAX) // not tried yet
        return true;
    const bool much = packing->best_height - packing->bound > packing->bound / 100;
    return packing->work < (much || round == 0 ? PLAN_PACK_WORK_MOST : PLAN_PACK_WORK);
}

// Tries every kind of stack with every order, and goes on with better orders until the bound is met or enough was done.
static void plan_pack(struct plan_packing *packing) {
    enum { ROUNDS = 50 };
    const size_t count = (size_t)packing->count;
    qsort(packing->items, count, sizeof *packing->items, plan_compare_lengths);
    struct plan_key *orders = (struct plan_key *)plan_allocate(PLAN_STACKS * PLAN_ORDERS * count, sizeof *orders);
    for (int round = 0; round < ROUNDS && plan_goes_on(packing, round); round++)
        for (int stack = 0; stack < PLAN_STACKS && plan_goes_on(packing, round); stack++) {
            plan_split(packing, plan_fitted_live[stack]);
            for (int i = 0; i < PLAN_ORDERS && plan_goes_on(packing, round); i++) {
                struct plan_key *order = orders + (size_t)(stack * PLAN_ORDERS + i) * count;
                if (round == 0)
                    plan_sort(packing, order, (enum plan_order)i);
                // One promotion often is enough.
                for (int again = 0; again < 2 && plan_goes_on(packing, round); again++) {
                    plan_try(packing, order);
                    plan_promote(packing, order, packing->fitted_count);
                }
            }
        }
    free(orders);
}

static bool plan_is_packed(const struct plan_buffer *buffer) {
    return buffer->arena == ARENA_ACTIVATIONS && buffer->first_phase >= 0 && buffer->bytes > 0;
}

// slot_of[p]: the last slot that began up to phase p. Counts the slots.
static int plan_slots(const struct plan *plan, int *slot_of) {
    for (int i = 0; i < plan->count; i++)
        if (plan_is_packed(&plan->buffers[i]))
            slot_of[plan->buffers[i].first_phase] = 1;
    int slots = 0;
    for (int p = 0; p < plan->phase_count; p++) {
        slots += slot_of[p];
        slot_of[p] = slots - 1;
    }
    return slots;
}

static int plan_items(const struct plan *plan, const int *slot_of, struct plan_item *items) {
    int count = 0;
    size_t total = 0;
    for (int i = 0; i < plan->count; i++) {
        const struct plan_buffer *buffer = &plan->buffers[i];
        if (!plan_is_packed(buffer))
            continue;
        struct plan_item *item = &items[count++];
        item->first = slot_of[buffer->first_phase];
        item->last = slot_of[buffer->last_phase];
        item->id = i;
        item->bytes = plan_rounded(buffer);
        total = plan_sum(total, item->bytes, buffer->name); // all of them fit, so no height can overflow
    }
    return count;
}

// The largest sum of live items; `slot` is the first where it is reached.
static size_t plan_bound(const struct plan_packing *packing, int *slot) {
    size_t *change = (size_t *)plan_allocate((size_t)packing->slots + 1, sizeof *change), sum = 0, most = 0;
    for (int i = 0; i < packing->count; i++) {
        change[packing->items[i].first] += packing->items[i].bytes;
        change[packing->items[i].last + 1] -= packing->items[i].bytes; // modulo 2^64
    }
    for (int s = 0; s < packing->slots; s++) {
        sum += change[s];
        if (sum > most) {
            most = sum;
            *slot = s;
        }
    }
    free(change);
    return most;
}

static void plan_place_activations(struct plan *plan) {
    int *slot_of = (int *)plan_allocate((size_t)plan->phase_count, sizeof *slot_of);
    struct plan_packing packing;
    memset(&packing, 0, sizeof packing);
    packing.slots = plan_slots(plan, slot_of);
    packing.items = (struct plan_item *)plan_allocate((size_t)plan->count, sizeof *packing.items);
    packing.count = plan_items(plan, slot_of, packing.items);
    packing.best = (size_t *)plan_allocate((size_t)packing.count, sizeof *packing.best);
    packing.skyline = (size_t *)plan_allocate((size_t)packing.slots, sizeof *packing.skyline);
    packing.floor = (size_t *)plan_allocate((size_t)packing.count, sizeof *packing.floor);
    packing.fitted = (int *)plan_allocate((size_t)packing.count, sizeof *packing.fitted);
    packing.newest = (int *)plan_allocate(2 * (size_t)packing.slots + PLAN_CLASSES, sizeof *packing.newest);
    packing.next = (int *)plan_allocate((size_t)packing.count, sizeof *packing.next);
    packing.best_height = SIZE_MAX;
    int peak_slot = -1;
    packing.bound = plan_bound(&packing, &peak_slot);
    plan->lower_bound_bytes = packing.bound;
    plan->peak_phase = -1;
    for (int p = 0; p < plan->phase_count && plan->peak_phase < 0; p++)
        if (peak_slot >= 0 && slot_of[p] == peak_slot)
            plan->peak_phase = p;
    if (packing.count > 0) {
        plan_pack(&packing);
        plan->arena_bytes[ARENA_ACTIVATIONS] = packing.best_height;
        for (int i = 0; i < packing.count; i++)
            plan->buffers[packing.items[i].id].offset = packing.best[i];
    }
    free(packing.next);
    free(packing.newest);
    free(packing.fitted);
    free(packing.floor);
    free(packing.skyline);
    free(packing.best);
    free(packing.items);
    free(slot_of);
}

// Sets every offset, the size of every arena, the peak and its lower bound.
static void plan_place(struct plan *plan) {
    memset(plan->arena_bytes, 0, sizeof plan->arena_bytes);
    for (int i = 0; i < plan->count; i++)
        plan->buffers[i].offset = 0;
    plan_place_activations(plan);
    for (int i = 0; i < plan->count; i++) {
        struct plan_buffer *buffer = &plan->buffers[i];
        if (buffer->arena == ARENA_ACTIVATIONS)
            continue;
        buffer->offset = plan->arena_bytes[buffer->arena];
        plan->arena_bytes[buffer->arena] = plan_sum(buffer->offset, plan_rounded(buffer), buffer->name);
    }
    plan->peak_bytes = plan->arena_bytes[ARENA_ACTIVATIONS];
    for (int a = 0; a < ARENA_COUNT; a++) {
        if (a == ARENA_ACTIVATIONS)
            continue;
        plan->peak_bytes = plan_sum(plan->peak_bytes, plan->arena_bytes[a], plan_arena_name(a));
        plan->lower_bound_bytes = plan_sum(plan->lower_bound_bytes, plan->arena_bytes[a], plan_arena_name(a));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Reports

// "1.21 GiB"
static const char *format_bytes(char *out, size_t n, size_t bytes) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double value = (double)bytes;
    int unit = 0;
    while (value >= (unit == 0 ? 1024 : 1023.995) && unit < 6) { // what would be printed as 1024.00 is 1.00 of the next
        value /= 1024;
        unit++;
    }
    snprintf(out, n, unit == 0 ? "%.0f %s" : "%.2f %s", value, units[unit]);
    return out;
}

// "1,297,612,800"
static const char *format_exact(char *out, size_t n, size_t bytes) {
    char digits[32];
    const int count = snprintf(digits, sizeof digits, "%zu", bytes);
    size_t at = 0;
    for (int i = 0; i < count && at + 2 < n; i++) {
        if (i > 0 && (count - i) % 3 == 0)
            out[at++] = ',';
        out[at++] = digits[i];
    }
    out[at] = 0;
    return out;
}

// False for a buffer of the step that no phase touched: it owns no bytes.
static bool plan_is_live(const struct plan_buffer *buffer) {
    return buffer->arena != ARENA_ACTIVATIONS || buffer->first_phase >= 0;
}
static int plan_first_phase(const struct plan_buffer *buffer) {
    return buffer->arena == ARENA_ACTIVATIONS ? buffer->first_phase : 0;
}
static int plan_last_phase(const struct plan *plan, const struct plan_buffer *buffer) {
    return buffer->arena == ARENA_ACTIVATIONS ? buffer->last_phase : plan->phase_count > 0 ? plan->phase_count - 1 : 0;
}

// live[p]: true bytes of the live buffers in phase p, of one category (or all: -1) and one arena (or all: -1). At least
// one phase.
static size_t *plan_live_bytes(const struct plan *plan, int category, int arena) {
    const int phases = plan->phase_count > 0 ? plan->phase_count : 1;
    size_t *live = (size_t *)plan_allocate((size_t)phases + 1, sizeof *live); // differences (modulo 2^64), then sums
    for (int i = 0; i < plan->count; i++) {
        const struct plan_buffer *buffer = &plan->buffers[i];
        if (!plan_is_live(buffer) || (category >= 0 && buffer->category != category) ||
            (arena >= 0 && (int)buffer->arena != arena))
            continue;
        live[plan_first_phase(buffer)] += buffer->bytes;
        live[plan_last_phase(plan, buffer) + 1] -= buffer->bytes;
    }
    for (int p = 1; p < phases; p++)
        live[p] += live[p - 1];
    return live;
}

static void plan_print_row(FILE *file, const char *name, size_t bytes, size_t of, size_t most) {
    char size[32], exact[32], largest[32];
    fprintf(file, "  %-36s %11s %23s %5.1f %%", name, format_bytes(size, sizeof size, bytes),
            format_exact(exact, sizeof exact, bytes), of > 0 ? 100.0 * (double)bytes / (double)of : 0.0);
    if (most != SIZE_MAX)
        fprintf(file, " %15s", format_bytes(largest, sizeof largest, most));
    fputc('\n', file);
}

// One row a category: what of it lives in the peak phase, and the most that ever does. The rows sum up to the peak.
static void plan_print(const struct plan *plan, FILE *file) {
    const int peak_phase = plan->peak_phase >= 0 ? plan->peak_phase : 0;
    fprintf(file, "memory plan\n  %-36s %11s %23s %7s %15s\n", "category", "at the peak", "bytes", "share",
            "largest in time");
    size_t sum = 0;
    for (int c = 0; c < plan->category_count; c++) {
        size_t *live = plan_live_bytes(plan, c, -1), most = 0;
        for (int p = 0; p < plan->phase_count || p < 1; p++)
            most = live[p] > most ? live[p] : most;
        if (most > 0)
            plan_print_row(file, plan->categories[c], live[peak_phase], plan->peak_bytes, most);
        sum += live[peak_phase];
        free(live);
    }
    plan_print_row(file, "alignment and gaps", plan->peak_bytes - sum, plan->peak_bytes, SIZE_MAX);
    plan_print_row(file, "peak", plan->peak_bytes, plan->peak_bytes, SIZE_MAX);
    if (plan->peak_phase >= 0)
        fprintf(file, "  reached in phase %d of 0 to %d: %s\n", plan->peak_phase, plan->phase_count - 1,
                plan->phases[plan->peak_phase]);
    fprintf(file, "arenas (one allocation each)\n");
    for (int a = 0; a < ARENA_COUNT; a++)
        plan_print_row(file, plan_arena_name(a), plan->arena_bytes[a], plan->peak_bytes, SIZE_MAX);
    char bound[32];
    fprintf(file, "  no placement takes less than %s; this one takes %.2f %% more\n",
            format_bytes(bound, sizeof bound, plan->lower_bound_bytes),
            plan->lower_bound_bytes > 0
                ? 100.0 * (double)(plan->peak_bytes - plan->lower_bound_bytes) / (double)plan->lower_bound_bytes
                : 0.0);
}

// A report is written beside its place and moved there when it is whole. What is no plain file (a pipe, a terminal, a
// link to one) is written directly.
struct plan_file {
    FILE *file;
    const char *option, *path;
    char *temporary; // NULL: written directly
};

__attribute__((noreturn)) static void plan_file_fail(const struct plan_file *out) {
    const char *reason = strerror(errno);
    if (out->temporary)
        unlink(out->temporary);
    fail("%s %s: cannot write it: %s; name a file in a folder that exists, may be written and has room", out->option,
         out->path, reason);
}

static struct plan_file plan_file_open(const char *option, const char *path) {
    struct plan_file out;
    memset(&out, 0, sizeof out);
    out.option = option;
    out.path = path;
    struct stat status;
    if (lstat(path, &status) != 0 || S_ISREG(status.st_mode)) {
        const size_t n = strlen(path) + 32;
        out.temporary = (char *)plan_allocate(n, 1);
        snprintf(out.temporary, n, "%s.%ld.tmp", path, (long)getpid());
    }
    out.file = fopen(out.temporary ? out.temporary : path, "w");
    if (!out.file)
        plan_file_fail(&out);
    return out;
}

static void plan_file_close(struct plan_file *out) {
    const bool written = fflush(out->file) == 0 && !ferror(out->file);
    if (fclose(out->file) != 0 || !written || (out->temporary && rename(out->temporary, out->path) != 0))
        plan_file_fail(out);
    free(out->temporary);
}

static void plan_write_json_string(FILE *file, const char *text) {
    fputc('"', file);
    for (; *text; text++) {
        const unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\')
            fprintf(file, "\\%c", c);
        else if (c < 0x20)
            fprintf(file, "\\u%04x", c);
        else
            fputc(c, file);
    }
    fputc('"', file);
}

static void plan_write_json_strings(FILE *file, const char *key, char (*names)[PLAN_NAME_CHARS], int count) {
    fprintf(file, "  \"%s\": [", key);
    for (int i = 0; i < count; i++) {
        fputs(i > 0 ? ",\n    " : "\n    ", file);
        plan_write_json_string(file, names[i]);
    }
    fputs(count > 0 ? "\n  ],\n" : "],\n", file);
}

// Offsets in the file count from the start of the first arena, as if the arenas lay one behind the other: any two
// buffers may be compared, and all lie below peak_bytes. Buffers that nothing touches are left out.
static void plan_write_json(const struct plan *plan, const char *path) {
    struct plan_file out = plan_file_open("--plan-json", path);
    FILE *file = out.file;
    fprintf(file, "{\n  \"peak_bytes\": %zu,\n  \"lower_bound_bytes\": %zu,\n  \"peak_phase\": %d,\n  \"arenas\": [",
            plan->peak_bytes, plan->lower_bound_bytes, plan->peak_phase);
    size_t base[ARENA_COUNT], end = 0;
    for (int a = 0; a < ARENA_COUNT; a++) {
        base[a] = end;
        end += plan->arena_bytes[a];
        fprintf(file, "%s\n    {\"name\": \"%s\", \"offset\": %zu, \"bytes\": %zu}", a > 0 ? "," : "",
                plan_arena_name(a), base[a], plan->arena_bytes[a]);
    }
    fputs("\n  ],\n", file);
    plan_write_json_strings(file, "categories", plan->categories, plan->category_count);
    plan_write_json_strings(file, "phases", plan->phases, plan->phase_count);
    fputs("  \"buffers\": [", file);
    const char *separator = "\n    ";
    for (int i = 0; i < plan->count; i++) {
        const struct plan_buffer *buffer = &plan->buffers[i];
        if (!plan_is_live(buffer))
            continue;
        fprintf(file, "%s{\"name\": ", separator);
        plan_write_json_string(file, buffer->name);
        fputs(", \"category\": ", file);
        plan_write_json_string(file, plan->categories[buffer->category]);
        fprintf(file,
                ", \"layer\": %d, \"arena\": \"%s\", \"bytes\": %zu, \"offset\": %zu, \"first_phase\": %d, "
                "\"last_phase\": %d}",
                buffer->layer, plan_arena_name(buffer->arena), buffer->bytes, base[buffer->arena] + buffer->offset,
                plan_first_phase(buffer), plan_last_phase(plan, buffer));
        separator = ",\n    ";
    }
    fputs(separator[0] == ',' ? "\n  ]\n}\n" : "]\n}\n", file);
    plan_file_close(&out);
}

// The picture: addresses of the activations arena upwards, phases to the right; above it a bar of all the arenas.
struct plan_picture {
    FILE *file;
    const struct plan *plan;
    int *colours; // per category, its number from 1 among those of the activations arena; 0 for the others
    double width, height, left, right, top, bottom; // of the page, and the margins around the plot
};

static const char *plan_colour(const struct plan_picture *picture, int category) {
    static const char *const colours[] = {"#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#edc948", "#76b7b2",
                                          "#9c755f", "#ff9da7", "#1f4e79", "#a6d854", "#bcbd22", "#17becf", "#7f3c8d",
                                          "#d37295", "#a0cbe8", "#ffbe7d", "#2e6b34", "#c7c7c7"};
    return colours[(size_t)(picture->colours[category] - 1) % (sizeof colours / sizeof *colours)];
}

static double plan_x(const struct plan_picture *picture, int phase) {
    const int phases = picture->plan->phase_count > 0 ? picture->plan->phase_count : 1;
    return picture->left + (picture->width - picture->left - picture->right) * phase / phases;
}
static double plan_y(const struct plan_picture *picture, size_t bytes) {
    const size_t most = picture->plan->arena_bytes[ARENA_ACTIVATIONS];
    const double span = picture->height - picture->top - picture->bottom;
    return picture->height - picture->bottom - (most > 0 ? span * (double)bytes / (double)most : 0);
}

static void plan_svg_text(FILE *file, const char *text) {
    for (; *text; text++)
        switch (*text) {
        case '<': fputs("&lt;", file); break;
        case '>': fputs("&gt;", file); break;
        case '&': fputs("&amp;", file); break;
        case '"': fputs("&quot;", file); break;
        default: fputc((unsigned char)*text < 0x20 ? ' ' : *text, file);
        }
}

static void plan_svg_buffer(const struct plan_picture *picture, const struct plan_buffer *buffer) {
    const struct plan *plan = picture->plan;
    char size[32];
    const double x = plan_x(picture, buffer->first_phase), y = plan_y(picture, buffer->offset + buffer->bytes);
    fprintf(picture->file, "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"%s\"><title>", x, y,
            plan_x(picture, buffer->last_phase + 1) - x, plan_y(picture, buffer->offset) - y,
            plan_colour(picture, buffer->category));
    if (buffer->layer >= 0)
        fprintf(picture->file, "layer %d: ", buffer->layer);
    plan_svg_text(picture->file, buffer->name);
    fprintf(picture->file, "\n%s (%zu bytes) at %zu\n", format_bytes(size, sizeof size, buffer->bytes), buffer->bytes,
            buffer->offset);
    plan_svg_text(picture->file, plan->categories[buffer->category]);
    fprintf(picture->file, "\nphases %d to %d: ", buffer->first_phase, buffer->last_phase);
    plan_svg_text(picture->file, plan->phases[buffer->first_phase]);
    fputs(" ... ", picture->file);
    plan_svg_text(picture->file, plan->phases[buffer->last_phase]);
    fputs("</title></rect>\n", picture->file);
}

// Characters of a phase's name that name its group: those before ": ", or all.
static int plan_group_chars(const char *phase) {
    const char *colon = strstr(phase, ": ");
    return colon ? (int)(colon - phase) : (int)strlen(phase);
}

// Names below the plot: one a group of phases, as many as have room; shading tells neighbours apart.
static void plan_svg_phases(const struct plan_picture *picture) {
    const struct plan *plan = picture->plan;
    const double bottom = picture->height - picture->bottom;
    double last_label = -1e9;
    bool shaded = false;
    for (int first = 0, next; first < plan->phase_count; first = next, shaded = !shaded) {
        const int chars = plan_group_chars(plan->phases[first]);
        for (next = first + 1; next < plan->phase_count; next++)
            if (plan_group_chars(plan->phases[next]) != chars ||
                strncmp(plan->phases[first], plan->phases[next], (size_t)chars) != 0)
                break;
        const double x = plan_x(picture, first), end = plan_x(picture, next), middle = (x + end) / 2;
        if (shaded)
            fprintf(picture->file, "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"#f0f0f0\"/>\n", x,
                    picture->top, end - x, bottom - picture->top);
        if (middle - last_label < 11) // pixels that a line of text needs
            continue;
        last_label = middle;
        fprintf(picture->file, "<text transform=\"translate(%.2f %.2f) rotate(-90)\" text-anchor=\"end\">",
                middle + 3.5, bottom + 6);
        char name[PLAN_NAME_CHARS];
        memcpy(name, plan->phases[first], (size_t)chars);
        name[chars] = 0;
        plan_svg_text(picture->file, name);
        fputs("</text>\n", picture->file);
    }
}

static void plan_svg_addresses(const struct plan_picture *picture) {
    const size_t most = picture->plan->arena_bytes[ARENA_ACTIVATIONS];
    size_t step = 1;
    while (step < most / 8)
        step *= 2;
    for (size_t at = 0; at <= most; at += step) {
        char size[32];
        const double y = plan_y(picture, at);
        fprintf(picture->file,
                "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%.2f\" y2=\"%.2f\" stroke=\"#ccc\"/>"
                "<text x=\"%.1f\" y=\"%.2f\" text-anchor=\"end\">%s</text>\n",
                picture->left - 4, picture->width - picture->right, y, y, picture->left - 8, y + 3.5,
                format_bytes(size, sizeof size, at));
        if (SIZE_MAX - at < step)
            break;
    }
}

// The sum of the live buffers in each phase: what a perfect placement would reach there.
static void plan_svg_live(const struct plan_picture *picture) {
    size_t *live = plan_live_bytes(picture->plan, -1, ARENA_ACTIVATIONS);
    fputs("<path fill=\"none\" stroke=\"#000\" stroke-width=\"0.8\" d=\"", picture->file);
    for (int p = 0; p < picture->plan->phase_count; p++)
        fprintf(picture->file, "%s%.2f %.2f H%.2f", p == 0 ? "M" : "L", plan_x(picture, p), plan_y(picture, live[p]),
                plan_x(picture, p + 1));
    fputs("\"/>\n", picture->file);
    free(live);
}

static void plan_svg_legend_row(const struct plan_picture *picture, double y, const char *colour, const char *name,
                                size_t bytes) {
    const double x = picture->width - picture->right + 20;
    char size[32];
    fprintf(picture->file,
            "<rect x=\"%.0f\" y=\"%.0f\" width=\"12\" height=\"12\" fill=\"%s\"/>"
            "<text x=\"%.0f\" y=\"%.0f\">",
            x, y - 10, colour, x + 18, y);
    plan_svg_text(picture->file, name);
    fprintf(picture->file, "</text><text x=\"%.0f\" y=\"%.0f\" text-anchor=\"end\">%s</text>\n", picture->width - 15, y,
            format_bytes(size, sizeof size, bytes));
}

// All arenas to scale, one behind the other, and their rows of the legend.
static void plan_svg_arenas(const struct plan_picture *picture) {
    static const char *const greys[ARENA_COUNT] = {"#6e6e6e", "#969696", "#bababa", "#dedede"};
    const double span = picture->width - picture->left - picture->right;
    double x = picture->left;
    for (int a = 0; a < ARENA_COUNT; a++) {
        const size_t bytes = picture->plan->arena_bytes[a];
        const double width = bytes > 0 ? span * (double)bytes / (double)picture->plan->peak_bytes : 0;
        fprintf(picture->file,
                "<rect x=\"%.2f\" y=\"48\" width=\"%.2f\" height=\"22\" fill=\"%s\"><title>%s (%zu bytes)</title>"
                "</rect>\n",
                x, width, greys[a], plan_arena_name(a), bytes);
        plan_svg_legend_row(picture, 40 + 20 * a, greys[a], plan_arena_name(a), bytes);
        x += width;
    }
}

static void plan_svg_legend(const struct plan_picture *picture) {
    const struct plan *plan = picture->plan;
    const double x = picture->width - picture->right + 20;
    double y = picture->top + 40;
    fprintf(picture->file, "<text x=\"%.0f\" y=\"%.0f\" font-weight=\"bold\">activations: most at any time</text>\n", x,
            y);
    for (int c = 0; c < plan->category_count; c++) {
        size_t *live = plan_live_bytes(plan, c, ARENA_ACTIVATIONS), most = 0;
        for (int p = 0; p < plan->phase_count; p++)
            most = live[p] > most ? live[p] : most;
        if (most > 0)
            plan_svg_legend_row(picture, y += 20, plan_colour(picture, c), plan->categories[c], most);
        free(live);
    }
    y += 24;
    fprintf(picture->file,
            "<line x1=\"%.0f\" x2=\"%.0f\" y1=\"%.0f\" y2=\"%.0f\" stroke=\"#000\"/>"
            "<text x=\"%.0f\" y=\"%.0f\">sum of the live buffers</text>\n",
            x, x + 12, y - 4, y - 4, x + 18, y);
}

static int *plan_picture_colours(const struct plan *plan) {
    int *colours = (int *)plan_allocate((size_t)plan->category_count, sizeof *colours), next = 0;
    for (int i = 0; i < plan->count; i++)
        if (plan->buffers[i].arena == ARENA_ACTIVATIONS && colours[plan->buffers[i].category] == 0)
            colours[plan->buffers[i].category] = ++next;
    return colours;
}

static void plan_write_svg(const struct plan *plan, const char *path) {
    struct plan_file out = plan_file_open("--plan-picture", path);
    struct plan_picture picture = {out.file, plan, NULL, 1500, 860, 100, 310, 90, 150};
    picture.colours = plan_picture_colours(plan);
    char peak[32];
    fprintf(out.file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" height=\"%.0f\" "
            "font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n",
            picture.width, picture.height, picture.width, picture.height);
    fprintf(out.file, "<text x=\"%.0f\" y=\"34\" font-size=\"17\">Memory of a step: peak %s (%zu bytes)", picture.left,
            format_bytes(peak, sizeof peak, plan->peak_bytes), plan->peak_bytes);
    if (plan->peak_phase >= 0) {
        fputs(", reached in '", out.file);
        plan_svg_text(out.file, plan->phases[plan->peak_phase]);
        fputc('\'', out.file);
    }
    fputs("</text>\n", out.file);
    plan_svg_arenas(&picture);
    plan_svg_phases(&picture);
    plan_svg_addresses(&picture);
    fputs("<g stroke=\"#fff\" stroke-width=\"0.25\">\n", out.file);
    for (int i = 0; i < plan->count; i++) {
        const struct plan_buffer *buffer = &plan->buffers[i];
        if (plan_is_packed(buffer))
            plan_svg_buffer(&picture, buffer);
    }
    fputs("</g>\n", out.file);
    plan_svg_live(&picture);
    plan_svg_legend(&picture);
    fprintf(out.file,
            "<text transform=\"translate(18 %.0f) rotate(-90)\" text-anchor=\"middle\" font-size=\"13\">address in the "
            "activations arena</text>\n<text x=\"%.0f\" y=\"%.0f\" text-anchor=\"middle\" font-size=\"13\">phases of "
            "the step</text>\n</svg>\n",
            (picture.height + picture.top - picture.bottom) / 2, (picture.width + picture.left - picture.right) / 2,
            picture.height - 10);
    free(picture.colours);
    plan_file_close(&out);
}

// ---------------------------------------------------------------------------------------------------------------------
// Arenas

struct arenas {
    char *base[ARENA_COUNT];
    size_t bytes[ARENA_COUNT];
};

static void arenas_allocate(struct arenas *arenas, const struct plan *plan) {
    for (int a = 0; a < ARENA_COUNT; a++) {
        arenas->bytes[a] = plan->arena_bytes[a];
        arenas->base[a] = (char *)device_allocate(plan->arena_bytes[a]);
    }
}

static void arenas_free(struct arenas *arenas) {
    for (int a = 0; a < ARENA_COUNT; a++)
        device_free(arenas->base[a], arenas->bytes[a]);
    memset(arenas, 0, sizeof *arenas);
}

// Where a buffer lies. NULL for one that this configuration does not have (id < 0) or that the schedule never touched:
// it owns no bytes, and using it anyway should crash rather than overwrite another.
static void *plan_pointer(const struct plan *plan, const struct arenas *arenas, int id) {
    if (id < 0)
        return NULL;
    const struct plan_buffer *buffer = &plan->buffers[id];
    if (buffer->arena == ARENA_ACTIVATIONS && buffer->first_phase < 0)
        return NULL;
    return arenas->base[buffer->arena] ? arenas->base[buffer->arena] + buffer->offset : NULL;
}

// What a plan may use of the device's memory, and the most that the run has used of it so far.
#ifdef TARGET_CUDA
// The reserve is for what the driver takes as kernels and graphs load, after the plan: a supposition, not measured.
enum { DRIVER_RESERVE_BYTES = 256 << 20 };
static size_t device_available_bytes(struct device *dev) {
    const size_t free_bytes = device_free_bytes(dev);
    return free_bytes > DRIVER_RESERVE_BYTES ? free_bytes - DRIVER_RESERVE_BYTES : 0;
}
static size_t device_peak_bytes(struct device *dev) { return device_used_bytes(dev); } // which never falls during a run
#else
static size_t device_available_bytes(struct device *dev) { return memory_available_bytes(); }
static size_t device_peak_bytes(struct device *dev) { return memory_resident_peak_bytes(); }
#endif
