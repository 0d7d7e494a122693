// The memory of a training step, planned before anything is allocated.
//
// The schedule of a step runs once in plan mode: each op starts a phase, each access of a buffer is a touch, nothing is
// computed. So the lifetimes come from the code that will run. plan_place then finds an offset for every buffer, such
// that buffers that never live together share bytes; then each arena is one allocation, and there is no other.
//
// Placing is offline dynamic storage allocation: rectangles (lifetime x bytes) that may move up and down only, packed to
// the least height. NP-hard in general (Garey & Johnson, problem SR2), but a training step is regular: activations nest
// (what layer 0 makes first it frees last), so that stacking them by decreasing lifetime is dense, and what is left, the
// short-lived buffers on top of that pyramid, is packed by best fit in several orders until the live sum is reached.
#pragma once
#include "runtime/error.h" // fail
#include <errno.h>         // errno
#include <stdbool.h>       // bool
#include <stddef.h>        // size_t
#include <stdint.h>        // int64_t, SIZE_MAX
#include <stdio.h>         // FILE, fprintf, snprintf
#include <stdlib.h>        // realloc, free, qsort, strtoull
#include <string.h>        // strcmp, strerror, memcpy
#include <sys/mman.h>      // mmap, madvise, munmap
#include <sys/resource.h>  // getrlimit
#include <sys/stat.h>      // lstat
#include <unistd.h>        // sysconf, getpid, unlink

// One allocation each. ACTIVATIONS holds all whose lifetime lies within the step: activations, temporaries, logits,
// workspace. Buffers of the other arenas live always.
enum plan_arena { ARENA_PARAMETERS, ARENA_GRADIENTS, ARENA_OPTIMIZER, ARENA_ACTIVATIONS, ARENA_COUNT };

enum {
    PLAN_NAME_CHARS = 48,
    PLAN_ALIGNMENT = 64 // a cache line, a vector register, an AMX tile row
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
    size_t lower_bound_bytes; // the largest sum of live buffers over the phases, and the other arenas: no plan takes less
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

// A buffer as the packer sees it. Time runs in slots: the phases in which some buffer begins to live. No other phase can
// decide anything, since all that lives in it lives in the slot before it too.
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

enum {
    PLAN_GAP_SEARCH_LIVE = 8,       // stack so many that of the others this many live at a time, on average
    PLAN_GAP_SEARCH_NEIGHBOURS = 256,
    PLAN_GAP_SEARCH_WORK = 4000000, // at most so many list heads looked at in one try,
    PLAN_PACK_WORK = 20000000       // and so many, neighbours included, in all tries: some 0.1 s
};

struct plan_packing {
    struct plan_item *items; // by falling length: the first `stacked` are stacked, the others fitted on top
    int count, stacked, slots;
    int longest;       // slots of the longest fitted item
    size_t bound;      // the largest live sum: no packing is lower
    size_t *best;      // offsets of the best packing so far
    size_t best_height;
    size_t *skyline;   // per slot, the top of what is stacked there
    int *newest, *next; // per slot, a list of the fitted items that begin there; -1 ends it
    int64_t work;      // how much has been looked at
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

// The highest stacked byte under an item.
static size_t plan_floor(const struct plan_packing *packing, const struct plan_item *item) {
    size_t top = 0;
    for (int s = item->first; s <= item->last; s++)
        top = packing->skyline[s] > top ? packing->skyline[s] : top;
    return top;
}

// Stacks the long-lived items, each on top of all that is stacked in its slots: dense where lifetimes nest.
static void plan_stack(struct plan_packing *packing, const struct plan_key *order) {
    memset(packing->skyline, 0, (size_t)packing->slots * sizeof *packing->skyline);
    for (int i = 0; i < packing->stacked; i++) {
        struct plan_item *item = &packing->items[order[i].item];
        item->offset = plan_floor(packing, item);
        packing->work += plan_item_length(item) / 4; // these loops are vectors
        for (int s = item->first; s <= item->last; s++)
            packing->skyline[s] = item->offset + item->bytes;
    }
}

// Puts an item into the tightest gap between the fitted ones that live with it, above what is stacked; on top of them if
// none is wide enough, or if they are too many to look.
static void plan_fit(struct plan_packing *packing, int index) {
    struct plan_item *item = &packing->items[index];
    const size_t bottom = plan_floor(packing, item);
    struct plan_span near_[PLAN_GAP_SEARCH_NEIGHBOURS]; // by begin
    int count = 0;
    size_t top = bottom;
    const int from = item->first - packing->longest + 1;
    for (int s = from > 0 ? from : 0; s <= item->last; s++)
        for (int other = packing->newest[s]; other >= 0; other = packing->next[other]) {
            if (packing->items[other].last < item->first)
                continue;
            const struct plan_span span = {packing->items[other].offset,
                                           packing->items[other].offset + packing->items[other].bytes};
            packing->work++;
            top = span.end > top ? span.end : top;
            if (count == PLAN_GAP_SEARCH_NEIGHBOURS)
                continue;
            int at = count++;
            for (; at > 0 && near_[at - 1].begin > span.begin; at--)
                near_[at] = near_[at - 1];
            near_[at] = span;
        }
    packing->work += plan_item_length(item) + packing->longest;
    item->offset = top;
    size_t base = bottom, tightest = SIZE_MAX;
    for (int i = 0; i < count && count < PLAN_GAP_SEARCH_NEIGHBOURS; i++) {
        if (near_[i].begin > base && near_[i].begin - base >= item->bytes && near_[i].begin - base < tightest) {
            tightest = near_[i].begin - base;
            item->offset = base;
        }
        base = near_[i].end > base ? near_[i].end : base;
    }
    packing->next[index] = packing->newest[item->first];
    packing->newest[item->first] = index;
}

// Fits the short-lived items, in the order given, on what is stacked. Keeps the result if it is the best yet. True when
// nothing better is possible.
static bool plan_try(struct plan_packing *packing, const struct plan_key *order) {
    for (int s = 0; s < packing->slots; s++)
        packing->newest[s] = -1;
    for (int i = 0; i < packing->count - packing->stacked; i++)
        plan_fit(packing, order[i].item);
    size_t height = 0;
    for (int i = 0; i < packing->count; i++) {
        const size_t top = packing->items[i].offset + packing->items[i].bytes;
        height = top > height ? top : height;
    }
    if (height < packing->best_height) {
        packing->best_height = height;
        for (int i = 0; i < packing->count; i++)
            packing->best[i] = packing->items[i].offset;
    }
    return packing->best_height == packing->bound;
}

enum plan_order { PLAN_BY_LENGTH, PLAN_BY_AREA, PLAN_BY_BYTES, PLAN_BY_START, PLAN_ORDERS };

static void plan_sort(const struct plan_packing *packing, struct plan_key *keys, int from, int to, enum plan_order order) {
    for (int i = from; i < to; i++) {
        const struct plan_item *item = &packing->items[i];
        const double length = plan_item_length(item), bytes = (double)item->bytes;
        keys[i - from].item = i;
        switch (order) {
        case PLAN_BY_AREA: keys[i - from].key = length * bytes; break;
        case PLAN_BY_BYTES: keys[i - from].key = bytes; break;
        case PLAN_BY_START: keys[i - from].key = -item->first; break;
        default: keys[i - from].key = length;
        }
    }
    qsort(keys, (size_t)(to - from), sizeof *keys, plan_compare_keys);
}

// Squeaky wheel (Joslin & Clements 1999): what stuck out above the bound is placed a little earlier next time. By a fifth
// of its rank: bigger steps undo what was right (measured: they leave four times as many plans above the bound).
static void plan_promote(const struct plan_packing *packing, struct plan_key *keys, int count) {
    for (int i = 0; i < count; i++) {
        const struct plan_item *item = &packing->items[keys[i].item];
        keys[i].key = item->offset + item->bytes > packing->bound ? 0.5 - 0.8 * i : -i;
    }
    qsort(keys, (size_t)count, sizeof *keys, plan_compare_keys);
}

// Splits the items, tries every pair of orders, and goes on with better ones until the bound is met or enough was done.
static void plan_pack(struct plan_packing *packing) {
    qsort(packing->items, (size_t)packing->count, sizeof *packing->items, plan_compare_lengths);
    int64_t area = 0;
    packing->stacked = packing->count;
    packing->longest = 1;
    while (packing->stacked > 0) {
        const int length = plan_item_length(&packing->items[packing->stacked - 1]);
        area += length;
        if (area > (int64_t)PLAN_GAP_SEARCH_LIVE * packing->slots ||
            (int64_t)length * (packing->count - packing->stacked) > PLAN_GAP_SEARCH_WORK)
            break;
        packing->longest = length;
        packing->stacked--;
    }
    static const enum plan_order stack_orders[2] = {PLAN_BY_START, PLAN_BY_LENGTH};
    const int fitted = packing->count - packing->stacked;
    struct plan_key *stack = (struct plan_key *)plan_allocate((size_t)packing->stacked, sizeof *stack);
    struct plan_key *fit = (struct plan_key *)plan_allocate((size_t)(2 * PLAN_ORDERS * fitted), sizeof *fit);
    bool done = false;
    for (int round = 0; !done && packing->work < PLAN_PACK_WORK && round < 50; round++)
        for (int i = 0; !done && i < 2 * PLAN_ORDERS && packing->work < PLAN_PACK_WORK; i++) {
            struct plan_key *order = fit + (size_t)i * (size_t)fitted;
            if (i % PLAN_ORDERS == 0) {
                plan_sort(packing, stack, 0, packing->stacked, stack_orders[i / PLAN_ORDERS]);
                plan_stack(packing, stack);
            }
            if (round == 0)
                plan_sort(packing, order, packing->stacked, packing->count, (enum plan_order)(i % PLAN_ORDERS));
            for (int again = 0; !done && again < 2; again++) { // one promotion often is enough
                done = plan_try(packing, order);
                plan_promote(packing, order, fitted);
            }
        }
    free(fit);
    free(stack);
}

static void plan_place_activations(struct plan *plan) {
    struct plan_packing packing;
    memset(&packing, 0, sizeof packing);
    // slot_of[p]: the number of phases up to p in which a buffer begins, less one.
    int *slot_of = (int *)plan_allocate((size_t)plan->phase_count + 1, sizeof *slot_of);
    size_t total = 0;
    for (int i = 0; i < plan->count; i++) {
        struct plan_buffer *buffer = &plan->buffers[i];
        if (buffer->arena != ARENA_ACTIVATIONS)
            continue;
        total = plan_sum(total, plan_rounded(buffer), buffer->name); // so that no height below can overflow
        buffer->offset = 0;
        if (buffer->first_phase >= 0 && buffer->bytes > 0) {
            slot_of[buffer->first_phase] = 1;
            packing.count++;
        }
    }
    for (int p = 0; p < plan->phase_count; p++)
        slot_of[p] = slot_of[p] ? packing.slots++ : packing.slots - 1;

    packing.items = (struct plan_item *)plan_allocate((size_t)packing.count, sizeof *packing.items);
    packing.best = (size_t *)plan_allocate((size_t)packing.count, sizeof *packing.best);
    packing.next = (int *)plan_allocate((size_t)packing.count, sizeof *packing.next);
    packing.skyline = (size_t *)plan_allocate((size_t)packing.slots, sizeof *packing.skyline);
    packing.newest = (int *)plan_allocate((size_t)packing.slots, sizeof *packing.newest);
    packing.best_height = SIZE_MAX;
    int n = 0;
    for (int i = 0; i < plan->count; i++) {
        const struct plan_buffer *buffer = &plan->buffers[i];
        if (buffer->arena != ARENA_ACTIVATIONS || buffer->first_phase < 0 || buffer->bytes == 0)
            continue;
        struct plan_item *item = &packing.items[n++];
        item->first = slot_of[buffer->first_phase];
        item->last = slot_of[buffer->last_phase];
        item->id = i;
        item->bytes = plan_rounded(buffer);
    }
    size_t *live = (size_t *)plan_allocate((size_t)packing.slots + 1, sizeof *live); // differences, then their sums
    for (int i = 0; i < n; i++) {
        live[packing.items[i].first] += packing.items[i].bytes;
        live[packing.items[i].last + 1] -= packing.items[i].bytes;
    }
    int peak_slot = -1;
    size_t sum = 0;
    for (int s = 0; s < packing.slots; s++) {
        sum += live[s];
        if (sum > packing.bound) {
            packing.bound = sum;
            peak_slot = s;
        }
    }
    plan->peak_phase = -1;
    for (int p = plan->phase_count - 1; p >= 0 && peak_slot >= 0; p--)
        if (slot_of[p] == peak_slot)
            plan->peak_phase = p;
    if (n > 0) {
        plan_pack(&packing);
        for (int i = 0; i < n; i++)
            plan->buffers[packing.items[i].id].offset = packing.best[i];
        plan->arena_bytes[ARENA_ACTIVATIONS] = packing.best_height;
    }
    plan->lower_bound_bytes = packing.bound;
    free(live);
    free(packing.newest);
    free(packing.skyline);
    free(packing.next);
    free(packing.best);
    free(packing.items);
    free(slot_of);
}

// Sets every offset, the size of every arena, the peak and its lower bound.
static void plan_place(struct plan *plan) {
    memset(plan->arena_bytes, 0, sizeof plan->arena_bytes);
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
    while (value >= 1023.995 && unit < 6) { // what would be printed as 1024.00 is 1.00 of the next unit
        value /= 1024;
        unit++;
    }
    snprintf(out, n, unit == 0 ? "%.0f %s" : "%.2f %s", value, units[unit]);
    return out;
}

// ---------------------------------------------------------------------------------------------------------------------
// Arenas

struct arenas {
    char *base[ARENA_COUNT];
    size_t bytes[ARENA_COUNT];
};

// One mapping, with huge pages where the kernel has them, each page touched by the thread that a static loop over the
// arena gives it to: it lies in that thread's memory, and every later access finds it there.
static void *arena_allocate(size_t bytes) {
    if (bytes == 0)
        return NULL;
    char *base = (char *)mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) {
        char size[32];
        fail("cannot allocate %s of memory: %s; lower --micro-batch-size or --seq-length, or recompute activations "
             "(--recompute-granularity full)",
             format_bytes(size, sizeof size, bytes), strerror(errno));
    }
    madvise(base, bytes, MADV_HUGEPAGE);
    const int64_t page = sysconf(_SC_PAGESIZE), pages = (int64_t)((bytes + (size_t)page - 1) / (size_t)page);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < pages; i++)
        ((volatile char *)base)[i * page] = 0;
    return base;
}

static void arena_free(void *base, size_t bytes) {
    if (base)
        munmap(base, bytes);
}

static void arenas_allocate(struct arenas *arenas, const struct plan *plan) {
    for (int a = 0; a < ARENA_COUNT; a++) {
        arenas->bytes[a] = plan->arena_bytes[a];
        arenas->base[a] = (char *)arena_allocate(plan->arena_bytes[a]);
    }
}

static void arenas_free(struct arenas *arenas) {
    for (int a = 0; a < ARENA_COUNT; a++)
        arena_free(arenas->base[a], arenas->bytes[a]);
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
