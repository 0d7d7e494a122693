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

struct plan_packing {
    struct plan_item *items;
    int count, slots;
    size_t bound;      // the largest live sum: no packing is lower
    size_t *best;      // offsets of the best packing so far
    size_t best_height;
    size_t *skyline;   // per slot, the top of what is stacked there
    int *order;        // items in the order of placing
    int *newest, *next;       // per slot, a list of the short-lived items placed that begin there
    struct plan_item **near_; // the placed items that live together with the one at hand
};

struct plan_key {
    double key;
    int index;
};

static int plan_compare_keys(const void *a, const void *b) {
    const struct plan_key *x = (const struct plan_key *)a, *y = (const struct plan_key *)b;
    if (x->key != y->key)
        return x->key > y->key ? -1 : 1;
    return x->index < y->index ? -1 : 1;
}

static int plan_item_length(const struct plan_item *item) { return item->last - item->first + 1; }

// Puts the item on top of all that is stacked in its slots.
static void plan_stack(struct plan_packing *packing, struct plan_item *item) {
    size_t top = 0;
    for (int s = item->first; s <= item->last; s++)
        top = packing->skyline[s] > top ? packing->skyline[s] : top;
    item->offset = top;
    for (int s = item->first; s <= item->last; s++)
        packing->skyline[s] = top + item->bytes;
}

static int plan_compare_offsets(const void *a, const void *b) {
    const struct plan_item *x = *(struct plan_item *const *)a, *y = *(struct plan_item *const *)b;
    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

// Puts the item into the tightest gap between those short-lived ones that it meets, above what is stacked.
static void plan_fit(struct plan_packing *packing, struct plan_item *item, int longest) {
    size_t base = 0;
    for (int s = item->first; s <= item->last; s++)
        base = packing->skyline[s] > base ? packing->skyline[s] : base;
    int near_count = 0;
    for (int s = item->first - longest + 1 > 0 ? item->first - longest + 1 : 0; s <= item->last; s++)
        for (int i = packing->newest[s]; i >= 0; i = packing->next[i])
            if (packing->items[i].last >= item->first)
                packing->near_[near_count++] = &packing->items[i];
    qsort(packing->near_, (size_t)near_count, sizeof *packing->near_, plan_compare_offsets);
    size_t gap_best = SIZE_MAX, offset = SIZE_MAX;
    for (int i = 0; i < near_count; i++) {
        const struct plan_item *other = packing->near_[i];
        if (other->offset > base) {
            const size_t gap = other->offset - base;
            if (gap >= item->bytes && gap < gap_best) {
                gap_best = gap;
                offset = base;
            }
        }
        base = other->offset + other->bytes > base ? other->offset + other->bytes : base;
    }
    item->offset = offset == SIZE_MAX ? base : offset;
    packing->next[item - packing->items] = packing->newest[item->first];
    packing->newest[item->first] = (int)(item - packing->items);
}

// Places all items in packing->order; the first `stacked` of them on top of each other. Keeps the result if it is the
// best yet. True when nothing better is possible.
static bool plan_try(struct plan_packing *packing, int stacked) {
    memset(packing->skyline, 0, (size_t)packing->slots * sizeof *packing->skyline);
    for (int s = 0; s < packing->slots; s++)
        packing->newest[s] = -1;
    for (int i = 0; i < stacked; i++)
        plan_stack(packing, &packing->items[packing->order[i]]);
    int longest = 1;
    for (int i = stacked; i < packing->count; i++) {
        const int length = plan_item_length(&packing->items[packing->order[i]]);
        longest = length > longest ? length : longest;
    }
    for (int i = stacked; i < packing->count; i++)
        plan_fit(packing, &packing->items[packing->order[i]], longest);
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

enum plan_order { PLAN_BY_LENGTH, PLAN_BY_AREA, PLAN_BY_SIZE, PLAN_BY_START, PLAN_ORDERS };

static void plan_sort(struct plan_packing *packing, int from, enum plan_order order) {
    const int n = packing->count - from;
    struct plan_key *keys = (struct plan_key *)plan_allocate((size_t)n, sizeof *keys);
    for (int i = 0; i < n; i++) {
        const struct plan_item *item = &packing->items[packing->order[from + i]];
        const double length = plan_item_length(item), bytes = (double)item->bytes;
        keys[i].key = order == PLAN_BY_LENGTH ? length
                      : order == PLAN_BY_AREA ? length * bytes
                      : order == PLAN_BY_SIZE ? bytes
                                              : -(double)item->first;
        keys[i].index = packing->order[from + i];
    }
    qsort(keys, (size_t)n, sizeof *keys, plan_compare_keys);
    for (int i = 0; i < n; i++)
        packing->order[from + i] = keys[i].index;
    free(keys);
}

static void plan_pack(struct plan_packing *packing) {
    for (int i = 0; i < packing->count; i++)
        packing->order[i] = i;
    plan_sort(packing, 0, PLAN_BY_LENGTH);
    if (plan_try(packing, packing->count))
        return;
    // Stack the long-lived; so many that of the others some 32 live at a time, among which gaps are looked for.
    int stacked = packing->count;
    double area = 0;
    while (stacked > 0) {
        area += plan_item_length(&packing->items[packing->order[stacked - 1]]);
        if (area > 32.0 * packing->slots)
            break;
        stacked--;
    }
    for (int order = 0; order < PLAN_ORDERS; order++) {
        plan_sort(packing, stacked, (enum plan_order)order);
        if (plan_try(packing, stacked))
            return;
    }
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
    packing.order = (int *)plan_allocate((size_t)packing.count, sizeof *packing.order);
    packing.next = (int *)plan_allocate((size_t)packing.count, sizeof *packing.next);
    packing.near_ = (struct plan_item **)plan_allocate((size_t)packing.count, sizeof *packing.near_);
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
    free(packing.near_);
    free(packing.next);
    free(packing.order);
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
