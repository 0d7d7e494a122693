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
#include "kernels/device_memory.cuh"       // device_reserve, device_touch, device_free
#include "kernels/device_queue.cuh"        // device_free_bytes, device_used_bytes
#include "runtime/machine/error.h"         // fail
#include "runtime/machine/memory_limits.h" // memory_available_bytes, memory_resident_peak_bytes
#include <stdbool.h>                       // bool
#include <stddef.h>                        // size_t
#include <stdint.h>                        // int64_t, SIZE_MAX
#include <stdlib.h>                        // calloc, realloc, free, qsort
#include <string.h>                        // memcpy, memset, strncmp, strnlen

// An arena is one allocation. ACTIVATIONS holds every buffer whose lifetime is within a step: activations, their
// gradients, logits, workspace. Buffers of the other arenas live from start-up to the end.
enum plan_arena { ARENA_PARAMETERS, ARENA_GRADIENTS, ARENA_OPTIMIZER, ARENA_ACTIVATIONS, ARENA_COUNT };

enum {
    PLAN_NAME_CHARS = 48,
    PLAN_ALIGNMENT = 256 // a vector register, an AMX tile row, what cuBLASLt assumes of its operands
};

struct plan_buffer {
    char name[PLAN_NAME_CHARS];
    int category;                // index into plan.categories
    int layer;                   // -1: of no layer
    size_t bytes;                // as asked for; plan_place rounds them up to PLAN_ALIGNMENT
    size_t offset;               // from the start of its arena
    int first_phase, last_phase; // live in both and between; -1 while never touched
    enum plan_arena arena;
};

// A memory plan: recorded by plan_add, plan_phase and plan_touch, placed by plan_place.
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
    size_t lower_bound_bytes; // the largest sum of live buffers in any phase, plus the other arenas: no plan is lower
    int peak_phase;           // the first phase with the largest sum; -1: no buffer of ARENA_ACTIVATIONS is live
};

// ---- recording ----

// Makes an empty plan, which plan_free frees. In all functions below, being out of memory or a size beyond 2^64 bytes
// ends the program.
static void plan_begin(struct plan *plan);
static void plan_free(struct plan *plan);

// Adds a buffer and returns its id. A buffer of ARENA_ACTIVATIONS has no lifetime, and takes no bytes, until it is
// touched. Names are cut to PLAN_NAME_CHARS - 1 characters. layer -1: of no layer.
static int plan_add(struct plan *plan, enum plan_arena arena, const char *category, const char *name, int layer,
                    size_t bytes);

// Begins a phase and returns its index. Phases whose names agree up to ": " are one group in the picture.
static int plan_phase(struct plan *plan, const char *name);

// Makes a buffer live in the current phase and in all since its first touch. A negative id, of a buffer that this
// configuration does not have, is ignored.
static void plan_touch(struct plan *plan, int id);

// ---- placing ----

// Sets every offset, the size of every arena, the peak and its lower bound. The search is bounded by work: milliseconds
// for a model, 0.3 s for the tests' least favourable 20,000 buffers. The same schedule has the same plan everywhere.
static void plan_place(struct plan *plan);

// "activations"
static const char *plan_arena_name(enum plan_arena arena);

// Whether the buffer takes bytes of its arena: all do but those of ARENA_ACTIVATIONS that no phase touched.
static bool plan_owns_bytes(const struct plan_buffer *buffer);

// Whether the buffer's offset depends on its lifetime: it is of ARENA_ACTIVATIONS, touched, and not empty.
static bool plan_is_packed(const struct plan_buffer *buffer);

// Allocates `count` zeroed elements of `size` bytes, for free(); ends the program when out of memory.
static void *plan_allocate(size_t count, size_t size);

// ---- arenas ----

struct arenas {
    char *base[ARENA_COUNT]; // in the device's memory; NULL: empty
    size_t bytes[ARENA_COUNT];
};

// Allocates the arenas of a placed plan, one device allocation each; ends the program where one does not fit.
static void arenas_allocate(struct arenas *arenas, const struct plan *plan);
static void arenas_free(struct arenas *arenas);

// The address of a buffer in the device's memory; NULL for a negative id, and for a buffer that owns no bytes, whose
// use then crashes instead of overwriting another.
static void *plan_pointer(const struct plan *plan, const struct arenas *arenas, int id);

// Bytes of the device's memory that a plan may take now, and the peak that the run has held so far: on the cpu target
// the peak resident set size.
static size_t device_available_bytes(struct device *dev);
static size_t device_peak_bytes(struct device *dev);

// ---------------------------------------------------------------------------------------------------------------------
// Recording

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

// Returns the array, reallocated to twice its capacity where `count` elements fill it.
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

static void plan_copy_name(char *out, const char *name) {
    const size_t n = strnlen(name, PLAN_NAME_CHARS - 1);
    memcpy(out, name, n);
    out[n] = 0;
}

// The index of a category; a new one is added.
static int plan_category(struct plan *plan, const char *name) {
    for (int i = 0; i < plan->category_count; i++)
        if (strncmp(plan->categories[i], name, PLAN_NAME_CHARS - 1) == 0)
            return i;
    plan->categories = (char(*)[PLAN_NAME_CHARS])plan_grow(plan->categories, plan->category_count,
                                                           &plan->category_capacity, sizeof *plan->categories);
    plan_copy_name(plan->categories[plan->category_count], name);
    return plan->category_count++;
}

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

static int plan_phase(struct plan *plan, const char *name) {
    plan->phases = (char(*)[PLAN_NAME_CHARS])plan_grow(plan->phases, plan->phase_count, &plan->phase_capacity,
                                                       sizeof *plan->phases);
    plan_copy_name(plan->phases[plan->phase_count], name);
    return plan->phase_count++;
}

static void plan_touch(struct plan *plan, int id) {
    if (id < 0)
        return;
    const int phase = plan->phase_count > 0 ? plan->phase_count - 1 : plan_phase(plan, "start");
    struct plan_buffer *buffer = &plan->buffers[id];
    if (buffer->first_phase < 0)
        buffer->first_phase = phase;
    buffer->last_phase = phase;
}

static bool plan_owns_bytes(const struct plan_buffer *buffer) {
    return buffer->arena != ARENA_ACTIVATIONS || buffer->first_phase >= 0;
}

static bool plan_is_packed(const struct plan_buffer *buffer) {
    return buffer->arena == ARENA_ACTIVATIONS && plan_owns_bytes(buffer) && buffer->bytes > 0;
}

static const char *plan_arena_name(enum plan_arena arena) {
    switch (arena) {
    case ARENA_PARAMETERS: return "parameters";
    case ARENA_GRADIENTS: return "gradients";
    case ARENA_OPTIMIZER: return "optimizer";
    case ARENA_ACTIVATIONS: return "activations";
    case ARENA_COUNT: break;
    }
    return "";
}

// ---------------------------------------------------------------------------------------------------------------------
// Placing

// A buffer as the packer sees it. Time is counted in slots, the phases in which some buffer's lifetime begins. Other
// phases constrain nothing: whatever is live in one is live in the slot before it too.
struct plan_item {
    int first, last; // slots
    int id;
    size_t bytes; // rounded up
    size_t offset;
};

// The range of offsets that a placed item occupies.
struct plan_span {
    size_t begin, end;
};

// Work is the number of slots and neighbours that were visited, some 3 ns each. Work rather than time bounds the
// search, so that the same schedule has the same plan everywhere.
enum {
    PLAN_FIT_NEIGHBOURS = 256,     // an item with more fitted neighbours is put on top of them
    PLAN_FIT_PAIRS = 1000000,      // most pairs of fitted items that are live together; beyond it more are stacked
    PLAN_CLASSES = 32,             // class k: items of more than 2^(k - 1) and up to 2^k slots
    PLAN_PACK_WORK = 4000000,      // limit of work, once each kind of stack was tried
    PLAN_PACK_WORK_MOST = 50000000 // limit before that, and while the best is more than 1 % above the bound
};

// The kinds of stacks. The shortest items are never stacked but fitted: as many as are, on average, this many live at a
// time. With 0 every item that nests is stacked; few are left to fit, which is fast and meets the bound of most plans.
// The other values are for lifetimes that nest by chance. Of the values tried (0 to 48, alone and together) these leave
// the fewest plans above their bound.
enum { PLAN_STACKS = 3 };
static const int plan_fitted_live[PLAN_STACKS] = {0, 8, 24};

// The state of the search for the lowest packing. Stacked items lie at the bottom, fitted ones above them in gaps.
struct plan_packing {
    struct plan_item *items; // by falling length
    int count, slots;
    size_t bound; // the largest live sum: no packing is lower
    size_t *best; // (count) offsets of the best packing so far
    size_t best_height;
    size_t *skyline; // (slots) the top of the stack
    size_t stack_height;
    int *fitted; // (fitted_count) items that are not stacked
    int fitted_count;
    size_t *floor; // (count) of a fitted item: the top of the stack in its slots
    // A bucket is a list of the placed fitted items of one class that begin in the same 2^class slots, so that finding
    // an item's neighbours costs by their number, however long other items live.
    int *newest;                  // (bucket_count) the item of a bucket that was placed last, -1: none
    int *next;                    // (count) the item of the same bucket that was placed before this one, -1: none
    int buckets_of[PLAN_CLASSES]; // the first bucket of a class, -1: the class has no fitted item
    int bucket_count;
    int64_t work; // slots and neighbours looked at so far
};

// An item and its key; orders are by falling key, then by item.
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

// The top of the stack in an item's slots.
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

// Stacks items by falling length: an item goes on top of those stacked in its slots if no gap remains below it, which
// is dense where lifetimes nest. The first `forced` items are stacked in any case; the shortest, `live` at a time on
// average, never. Items that are not stacked are left in `fitted`.
static void plan_stack(struct plan_packing *packing, int live, int forced) {
    memset(packing->skyline, 0, (size_t)packing->slots * sizeof *packing->skyline);
    packing->fitted_count = 0;
    packing->stack_height = 0;
    int last = packing->count; // the item from which on none is stacked
    for (int64_t area = 0; last > 0; last--) {
        area += plan_item_length(&packing->items[last - 1]);
        if (area > (int64_t)live * packing->slots)
            break;
    }
    for (int i = 0; i < packing->count; i++) {
        struct plan_item *item = &packing->items[i];
        packing->work += plan_item_length(item) / 4; // the loops over slots are vectorised
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

// The number of pairs of fitted items that are live together; one try visits each pair once or twice.
static int64_t plan_fitted_pairs(const struct plan_packing *packing) {
    int *begun = (int *)plan_allocate((size_t)packing->slots + 1, sizeof *begun); // [s]: items that began before slot s
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

// Decides which items are stacked and which are fitted, and gives the fitted ones their floors and buckets.
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

// Adds a span to `spans`, which are sorted by begin. Beyond PLAN_FIT_NEIGHBOURS spans are only counted, in *count.
static void plan_add_span(struct plan_span *spans, int *count, struct plan_span span) {
    if (*count < PLAN_FIT_NEIGHBOURS) {
        int at = *count;
        for (; at > 0 && spans[at - 1].begin > span.begin; at--)
            spans[at] = spans[at - 1];
        spans[at] = span;
    }
    (*count)++;
}

// Places an item above the stack, in the tightest gap between the fitted items that are live with it; on top of these
// where no gap is wide enough, or where they are more than PLAN_FIT_NEIGHBOURS.
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

// Makes one packing, by fitting the items that are not stacked in this order, and keeps the lowest so far.
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

// The initial orders of the fitted items.
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
        case PLAN_BY_LENGTH: keys[i].key = length; break;
        case PLAN_ORDERS: break;
        }
    }
    qsort(keys, (size_t)packing->fitted_count, sizeof *keys, plan_compare_keys);
}

// Squeaky-wheel optimisation (Joslin & Clements 1999): an item that ended above the bound is fitted earlier next time,
// by a fifth of its rank. Larger steps are worse (measured: moving by half the rank leaves four times as many plans
// above the bound, moving to the front ten times).
static void plan_promote(const struct plan_packing *packing, struct plan_key *keys, int count) {
    for (int i = 0; i < count; i++) {
        const struct plan_item *item = &packing->items[keys[i].item];
        keys[i].key = item->offset + item->bytes > packing->bound ? 0.5 - 0.8 * i : -i;
    }
    qsort(keys, (size_t)count, sizeof *keys, plan_compare_keys);
}

// Whether the search goes on: a lower packing may exist and the limit of work is not reached.
static bool plan_goes_on(const struct plan_packing *packing, int round) {
    if (packing->best_height == packing->bound)
        return false;
    if (packing->best_height == SIZE_MAX) // not tried yet
        return true;
    const bool much = packing->best_height - packing->bound > packing->bound / 100;
    return packing->work < (much || round == 0 ? PLAN_PACK_WORK_MOST : PLAN_PACK_WORK);
}

// Tries every kind of stack with every order, then with orders improved by promotion, until the bound is met or the
// limit of work is reached.
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
                // the second try, after one promotion, is often enough
                for (int again = 0; again < 2 && plan_goes_on(packing, round); again++) {
                    plan_try(packing, order);
                    plan_promote(packing, order, packing->fitted_count);
                }
            }
        }
    free(orders);
}

// slot_of[p] = the last slot that began up to phase p; zeroed before. Returns the number of slots.
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

// Fills in bytes and lifetime of an item for each packed buffer, and returns their number; slot_of[phase] is the slot
// that plan_slots gave a phase. Fails unless the sum of all bytes fits 64 bits, so that no address can overflow.
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
        total = plan_sum(total, item->bytes, buffer->name);
    }
    return count;
}

// The largest sum of live items, in bytes; *slot: the first slot that reaches it.
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

// Places the activations arena: sets its buffers' offsets, its size, the peak phase, and its share of the lower bound.
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
        plan->peak_bytes = plan_sum(plan->peak_bytes, plan->arena_bytes[a], plan_arena_name((enum plan_arena)a));
        plan->lower_bound_bytes =
            plan_sum(plan->lower_bound_bytes, plan->arena_bytes[a], plan_arena_name((enum plan_arena)a));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Arenas

// Buffers are touched one by one: each is divided among the threads as the ops that use it divide it.
static void arenas_allocate(struct arenas *arenas, const struct plan *plan) {
    for (int a = 0; a < ARENA_COUNT; a++) {
        arenas->bytes[a] = plan->arena_bytes[a];
        arenas->base[a] = (char *)device_reserve(plan->arena_bytes[a]);
    }
    for (int i = 0; i < plan->count; i++)
        device_touch(plan_pointer(plan, arenas, i), plan_owns_bytes(&plan->buffers[i]) ? plan->buffers[i].bytes : 0);
    for (int a = 0; a < ARENA_COUNT; a++) // what no buffer covers
        device_touch(arenas->base[a], arenas->bytes[a]);
}

static void arenas_free(struct arenas *arenas) {
    for (int a = 0; a < ARENA_COUNT; a++)
        device_free(arenas->base[a], arenas->bytes[a]);
    memset(arenas, 0, sizeof *arenas);
}

static void *plan_pointer(const struct plan *plan, const struct arenas *arenas, int id) {
    if (id < 0)
        return NULL;
    const struct plan_buffer *buffer = &plan->buffers[id];
    if (!plan_owns_bytes(buffer))
        return NULL;
    return arenas->base[buffer->arena] ? arenas->base[buffer->arena] + buffer->offset : NULL;
}

#ifdef TARGET_CUDA
// Left free for what the driver allocates when kernels and graphs are loaded, after planning; an estimate, not
// measured.
enum { DRIVER_RESERVE_BYTES = 256 << 20 };
static size_t device_available_bytes(struct device *dev) {
    const size_t free_bytes = device_free_bytes(dev);
    return free_bytes > DRIVER_RESERVE_BYTES ? free_bytes - DRIVER_RESERVE_BYTES : 0;
}
static size_t device_peak_bytes(struct device *dev) { return device_used_bytes(dev); } // use never falls during a run
#else
static size_t device_available_bytes(struct device *dev) { return memory_available_bytes(); }
static size_t device_peak_bytes(struct device *dev) { return memory_resident_peak_bytes(); }
#endif
