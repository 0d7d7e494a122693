// The memory of a training step, planned before anything is allocated. The schedule of a step runs once in plan mode:
// each op starts a phase, each access of a buffer is a touch, and nothing is computed. So lifetimes come from the code
// that will run. plan_place then finds offsets, such that buffers that never live together may share bytes.
#pragma once
#include "kernels/device_memory.cuh"       // device_allocate_untouched, device_touch, device_free, host_reserve
#include "kernels/device_queue.cuh"        // device_free_bytes, device_used_bytes
#include "kernels/transfers.cuh"           // enum transfer_direction
#include "memory/packing.cuh"              // plan_pack
#include "runtime/machine/error.h"         // fail
#include "runtime/machine/memory_limits.h" // memory_available_bytes, memory_resident_peak_bytes
#include <stdbool.h>                       // bool
#include <stddef.h>                        // size_t
#include <stdint.h>                        // int64_t, SIZE_MAX
#include <stdlib.h>                        // calloc, realloc, free, qsort
#include <string.h>                        // memcpy, memset, strncmp, strnlen

// An arena lies in one of two memories. On the cpu target these are one memory, and offloading saves nothing.
enum plan_memory { MEMORY_DEVICE, MEMORY_HOST, MEMORY_COUNT };

// An arena is one allocation. Columns: id; name; memory; packed. The buffers of a packed arena live for some phases
// only, as activations and workspace do, and are packed by lifetime. Other buffers live from start-up to the end.
#define ARENA_ROWS(ROW)                                                                                                \
    ROW(PARAMETERS, "parameters", MEMORY_DEVICE, false)                                                                \
    ROW(GRADIENTS, "gradients", MEMORY_DEVICE, false)                                                                  \
    ROW(OPTIMIZER, "optimizer", MEMORY_DEVICE, false)                                                                  \
    ROW(ACTIVATIONS, "activations", MEMORY_DEVICE, true)                                                               \
    ROW(HOST_PARAMETERS, "host parameters", MEMORY_HOST, false)                                                        \
    ROW(HOST_GRADIENTS, "host gradients", MEMORY_HOST, false)                                                          \
    ROW(HOST_OPTIMIZER, "host optimizer", MEMORY_HOST, false)                                                          \
    ROW(HOST_ACTIVATIONS, "host activations", MEMORY_HOST, true)                                                       \
    ROW(HOST_STAGING, "host staging", MEMORY_HOST, false) /* batches, results, checkpoints' copies */
enum plan_arena {
#define ENUM_ROW(id, name, memory, packed) ARENA_##id,
    ARENA_ROWS(ENUM_ROW)
#undef ENUM_ROW
        ARENA_COUNT
};

enum {
    PLAN_NAME_CHARS = 48,
    PLAN_ALIGNMENT = 256 // a vector register, an AMX tile row, what cuBLASLt assumes of its operands
};
// Returns `bytes` rounded up to PLAN_ALIGNMENT, so that the next part of a buffer is aligned as buffers are.
static inline size_t plan_aligned(size_t bytes) {
    return (bytes + PLAN_ALIGNMENT - 1) / PLAN_ALIGNMENT * PLAN_ALIGNMENT;
}

struct plan_buffer {
    char name[PLAN_NAME_CHARS];
    int category;                // index into plan.categories
    int layer;                   // -1: of no layer
    size_t bytes;                // as asked for; plan_place rounds them up to PLAN_ALIGNMENT
    size_t offset;               // from the start of its arena
    int first_phase, last_phase; // live in both and between; -1 while never touched
    enum plan_arena arena;
};

struct plan_transfer {
    int phase;
    int waited_phase; // the first phase whose work needs the copy to be done; -1: the end of its region
    enum transfer_direction direction;
    size_t bytes;
    char name[PLAN_NAME_CHARS];
};

// A prediction of a training step's time by the plan's user, for the reports. step_ms is 0 where there is none.
struct plan_prediction {
    double step_ms, micro_step_ms, update_ms, tokens_per_s;
    double to_host_bytes, to_device_bytes; // over the bus in a step
    const char *rates;                     // what it is predicted by
};

// A phase of a step. group is the caller's number of this kind of phase. layer is -1 if the phase is of no layer.
struct plan_phase {
    int group, layer;
    char name[PLAN_NAME_CHARS];
};

struct plan_loop {
    int first, last;
};

// A memory plan: recorded by plan_add, plan_phase and plan_touch, placed by plan_place.
struct plan {
    struct plan_buffer *buffers;
    int count, capacity;
    char (*categories)[PLAN_NAME_CHARS]; // in the order of first appearance
    int category_count, category_capacity;
    struct plan_phase *phases;
    int phase_count, phase_capacity;
    struct plan_transfer *transfers;
    int transfer_count, transfer_capacity;
    struct plan_loop *loops; // in the order of their phases
    int loop_count, loop_capacity;
    // Set by plan_place:
    size_t arena_bytes[ARENA_COUNT];
    size_t peak_bytes;        // of all arenas of the device together: what is allocated
    size_t lower_bound_bytes; // the largest sum of live buffers in any phase, plus the other arenas: no plan is lower
    size_t host_peak_bytes;   // of all arenas of the host together
    size_t host_lower_bound_bytes;
    struct plan_prediction predicted; // by the plan's user, not by plan_place
    int peak_phase;                   // the first with ARENA_ACTIVATIONS' largest sum of live buffers; -1: none is live
};

// ---- recording ----

// Empties *plan, but frees nothing. The functions below end the program if memory runs out or sizes exceed 2^64 bytes.
static void plan_begin(struct plan *plan);
// Frees the plan's lists and leaves an empty plan. The arenas stay: arenas_free frees them.
static void plan_free(struct plan *plan);

// Adds a buffer and returns its id. A buffer of a packed arena has no lifetime, and takes no bytes, until it is
// touched. Names are copied, cut to PLAN_NAME_CHARS - 1 characters. layer is -1 if the buffer is of no layer.
static int plan_add(struct plan *plan, enum plan_arena arena, const char *category, const char *name, int layer,
                    size_t bytes);

// Begins a phase and returns its index. group: the caller's number for its kind; layer -1: no layer. Copies `name`.
static int plan_phase(struct plan *plan, int group, int layer, const char *name);

// Declares that the phases from `first` to the current one, recorded once, run as a loop. A buffer touched in the loop
// and outside lives in all of it. A buffer touched only in the loop keeps nothing from round to round.
static void plan_add_loop(struct plan *plan, int first);

// Makes a buffer live from its first touch to the current phase. Begins a phase if none is there. Ignores negative ids.
static void plan_touch(struct plan *plan, int id);

// Adds a copy that the current phase begins, with waited_phase -1. There must be a phase. Returns the copy's index.
static int plan_add_transfer(struct plan *plan, enum transfer_direction direction, const char *name, size_t bytes);

// ---- placing ----

// Sets all offsets, arena sizes, peaks, lower bounds and the peak phase. A schedule has the same plan on every machine.
static void plan_place(struct plan *plan);
// Sets the lower bounds and the peak phase as plan_place does, but packs nothing, which saves the time: packed arenas'
// sizes and offsets become 0, and the peaks leave these arenas out.
static void plan_set_bounds(struct plan *plan);

// Returns the name of an arena in reports and errors, such as "host optimizer"; "" for ARENA_COUNT.
static const char *plan_arena_name(enum plan_arena arena);
static enum plan_memory plan_arena_memory(enum plan_arena arena);
static bool plan_arena_is_packed(enum plan_arena arena);

// Whether the buffer has a place in its arena, even for 0 bytes. In a packed arena, only touched buffers have one.
static bool plan_owns_bytes(const struct plan_buffer *buffer);

// Whether the buffer's offset depends on its lifetime: it is in a packed arena, was touched, and is not empty.
static bool plan_is_packed(const struct plan_buffer *buffer);

// ---- arenas ----

struct arenas {
    char *base[ARENA_COUNT]; // in the device's or, pinned, in the host's memory; NULL: empty
    size_t bytes[ARENA_COUNT];
};

// Allocates a placed plan's arenas; all outside GPU memory are zero. arenas_free frees them. Failure ends the program.
static void arenas_allocate(struct arenas *arenas, const struct plan *plan);
static void arenas_free(struct arenas *arenas);

// Returns a buffer's address; NULL for a negative id, an empty or unallocated arena, or a packed buffer never touched.
static void *plan_pointer(const struct plan *plan, const struct arenas *arenas, int id);

// Returns how many bytes of the device's memory (cpu target: the host's) a plan may take now; SIZE_MAX if unknown.
static size_t device_available_bytes(struct device *dev);
// Returns the peak memory use in bytes. On a GPU it is the growth of use, by any process, since device_open, as a run's
// use never falls. On the cpu target it is this process's peak resident set size, 0 if unknown.
static size_t device_peak_bytes(struct device *dev);
// Returns how many bytes of host memory each of `ranks_on_host` ranks may plan for now: an equal part of what the
// machine, cgroups and limits leave; SIZE_MAX if unknown. On the cpu target the device's arenas share it.
static size_t host_available_bytes(int ranks_on_host);

// ---- Recording ----

static void plan_begin(struct plan *plan) {
    memset(plan, 0, sizeof *plan);
    plan->peak_phase = -1;
}

static void plan_free(struct plan *plan) {
    free(plan->buffers);
    free(plan->categories);
    free(plan->phases);
    free(plan->loops);
    free(plan->transfers);
    plan_begin(plan);
}

// Returns `array` with room for one element more than `count`. Moves it, and doubles *capacity, if it was full.
static void *plan_grow(void *array, int count, int *capacity, size_t size) {
    if (count < *capacity)
        return array;
    *capacity = *capacity > 0 ? 2 * *capacity : 64;
    void *memory = realloc(array, (size_t)*capacity * size);
    if (!memory)
        fail("no memory left to lay out the memory plan (%d buffers); free some memory on this machine", count);
    return memory;
}

// Returns a + b; a sum beyond 2^64 bytes ends the program, with an error that names `what`.
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

static void plan_cut_name(char *out, const char *name) {
    const size_t n = strnlen(name, PLAN_NAME_CHARS - 1);
    memcpy(out, name, n);
    out[n] = 0;
}

// Returns the index of a category, which is added if it is new. Compares names as far as a plan keeps them.
static int plan_category(struct plan *plan, const char *name) {
    for (int i = 0; i < plan->category_count; i++)
        if (strncmp(plan->categories[i], name, PLAN_NAME_CHARS - 1) == 0)
            return i;
    plan->categories = (char(*)[PLAN_NAME_CHARS])plan_grow(plan->categories, plan->category_count,
                                                           &plan->category_capacity, sizeof *plan->categories);
    plan_cut_name(plan->categories[plan->category_count], name);
    return plan->category_count++;
}

static int plan_add(struct plan *plan, enum plan_arena arena, const char *category, const char *name, int layer,
                    size_t bytes) {
    plan->buffers = (struct plan_buffer *)plan_grow(plan->buffers, plan->count, &plan->capacity, sizeof *plan->buffers);
    struct plan_buffer *buffer = &plan->buffers[plan->count];
    memset(buffer, 0, sizeof *buffer);
    plan_cut_name(buffer->name, name);
    buffer->category = plan_category(plan, category);
    buffer->layer = layer;
    buffer->bytes = bytes;
    buffer->first_phase = buffer->last_phase = -1;
    buffer->arena = arena;
    return plan->count++;
}

static int plan_phase(struct plan *plan, int group, int layer, const char *name) {
    plan->phases =
        (struct plan_phase *)plan_grow(plan->phases, plan->phase_count, &plan->phase_capacity, sizeof *plan->phases);
    struct plan_phase *phase = &plan->phases[plan->phase_count];
    phase->group = group;
    phase->layer = layer;
    plan_cut_name(phase->name, name);
    return plan->phase_count++;
}

static void plan_touch(struct plan *plan, int id) {
    if (id < 0)
        return;
    const int phase = plan->phase_count > 0 ? plan->phase_count - 1 : plan_phase(plan, 0, -1, "start");
    struct plan_buffer *buffer = &plan->buffers[id];
    if (buffer->first_phase < 0)
        buffer->first_phase = phase;
    buffer->last_phase = phase;
    for (int i = plan->loop_count - 1; i >= 0 && plan->loops[i].last >= buffer->first_phase; i--)
        if (plan->loops[i].first < buffer->first_phase)
            buffer->first_phase = plan->loops[i].first;
}

static void plan_add_loop(struct plan *plan, int first) {
    plan->loops =
        (struct plan_loop *)plan_grow(plan->loops, plan->loop_count, &plan->loop_capacity, sizeof *plan->loops);
    const struct plan_loop loop = {first, plan->phase_count - 1};
    plan->loops[plan->loop_count++] = loop;
    for (int i = 0; i < plan->count; i++) {
        struct plan_buffer *buffer = &plan->buffers[i];
        if (buffer->first_phase >= 0 && buffer->first_phase < first && buffer->last_phase >= first)
            buffer->last_phase = loop.last;
    }
}

static int plan_add_transfer(struct plan *plan, enum transfer_direction direction, const char *name, size_t bytes) {
    plan->transfers = (struct plan_transfer *)plan_grow(plan->transfers, plan->transfer_count, &plan->transfer_capacity,
                                                        sizeof *plan->transfers);
    struct plan_transfer *transfer = &plan->transfers[plan->transfer_count++];
    transfer->phase = plan->phase_count - 1;
    transfer->waited_phase = -1;
    transfer->direction = direction;
    transfer->bytes = bytes;
    plan_cut_name(transfer->name, name);
    return plan->transfer_count - 1;
}

static bool plan_owns_bytes(const struct plan_buffer *buffer) {
    return !plan_arena_is_packed(buffer->arena) || buffer->first_phase >= 0;
}

static bool plan_is_packed(const struct plan_buffer *buffer) {
    return plan_arena_is_packed(buffer->arena) && plan_owns_bytes(buffer) && buffer->bytes > 0;
}

static const char *plan_arena_name(enum plan_arena arena) {
    switch (arena) {
#define NAME_CASE(id, name, memory, packed)                                                                            \
    case ARENA_##id: return name;
        ARENA_ROWS(NAME_CASE)
#undef NAME_CASE
    case ARENA_COUNT: break;
    }
    return "";
}
static enum plan_memory plan_arena_memory(enum plan_arena arena) {
    switch (arena) {
#define MEMORY_CASE(id, name, memory, packed)                                                                          \
    case ARENA_##id: return memory;
        ARENA_ROWS(MEMORY_CASE)
#undef MEMORY_CASE
    case ARENA_COUNT: break;
    }
    return MEMORY_COUNT;
}
// Whether an arena is of the kind, in ARENA_ROWS, whose buffers share bytes by lifetime; not whether they are placed.
static bool plan_arena_is_packed(enum plan_arena arena) {
    switch (arena) {
#define PACKED_CASE(id, name, memory, packed)                                                                          \
    case ARENA_##id: return packed;
        ARENA_ROWS(PACKED_CASE)
#undef PACKED_CASE
    case ARENA_COUNT: break;
    }
    return false;
}

// ---- Placing ----

// Finds the arena's ticks, the phases in which a packed buffer's lifetime begins, and returns their number. tick_of
// (phase_count), zeroed by the caller, gets the index of the last tick up to each phase; -1 before the first.
static int plan_ticks(const struct plan *plan, enum plan_arena arena, int *tick_of) {
    for (int i = 0; i < plan->count; i++)
        if (plan->buffers[i].arena == arena && plan_is_packed(&plan->buffers[i]))
            tick_of[plan->buffers[i].first_phase] = 1;
    int ticks = 0;
    for (int p = 0; p < plan->phase_count; p++) {
        ticks += tick_of[p];
        tick_of[p] = ticks - 1;
    }
    return ticks;
}

// Fills items (plan->count) with an arena's packed buffers: id, bytes, lifetime in ticks. Returns their number. tick_of
// (phase_count) is from plan_ticks. Ends the program if the buffers together have more than 2^64 bytes.
static int plan_items(const struct plan *plan, enum plan_arena arena, const int *tick_of, struct plan_item *items) {
    int count = 0;
    size_t total = 0;
    for (int i = 0; i < plan->count; i++) {
        const struct plan_buffer *buffer = &plan->buffers[i];
        if (buffer->arena != arena || !plan_is_packed(buffer))
            continue;
        struct plan_item *item = &items[count++];
        item->first = tick_of[buffer->first_phase];
        item->last = tick_of[buffer->last_phase];
        item->id = i;
        item->bytes = plan_rounded(buffer);
        total = plan_sum(total, item->bytes, buffer->name);
    }
    return count;
}

// Returns the largest sum of bytes that live at one tick. Sets *tick to the first such tick, if there are items.
static size_t plan_bound(const struct plan_packing *packing, int *tick) {
    size_t *change = (size_t *)plan_allocate((size_t)packing->ticks + 1, sizeof *change), sum = 0, most = 0;
    for (int i = 0; i < packing->count; i++) {
        change[packing->items[i].first] += packing->items[i].bytes;
        change[packing->items[i].last + 1] -= packing->items[i].bytes; // modulo 2^64
    }
    for (int s = 0; s < packing->ticks; s++) {
        sum += change[s];
        if (sum > most) {
            most = sum;
            *tick = s;
        }
    }
    free(change);
    return most;
}

// Places a packed arena if `places`: sets its buffers' offsets and its size, which are 0 before. Always returns the
// arena's lower bound, the largest sum of live buffers. *peak_phase becomes the first phase with this sum; -1: none.
static size_t plan_place_packed(struct plan *plan, enum plan_arena arena, bool places, int *peak_phase) {
    int *tick_of = (int *)plan_allocate((size_t)plan->phase_count, sizeof *tick_of);
    struct plan_packing packing;
    memset(&packing, 0, sizeof packing);
    packing.ticks = plan_ticks(plan, arena, tick_of);
    packing.items = (struct plan_item *)plan_allocate((size_t)plan->count, sizeof *packing.items);
    packing.count = plan_items(plan, arena, tick_of, packing.items);
    packing.best = (size_t *)plan_allocate((size_t)packing.count, sizeof *packing.best);
    packing.skyline = (size_t *)plan_allocate((size_t)packing.ticks, sizeof *packing.skyline);
    packing.floor = (size_t *)plan_allocate((size_t)packing.count, sizeof *packing.floor);
    packing.fitted = (int *)plan_allocate((size_t)packing.count, sizeof *packing.fitted);
    packing.newest = (int *)plan_allocate(2 * (size_t)packing.ticks + PLAN_CLASSES, sizeof *packing.newest);
    packing.next = (int *)plan_allocate((size_t)packing.count, sizeof *packing.next);
    packing.best_height = SIZE_MAX;
    int peak_tick = -1;
    packing.bound = plan_bound(&packing, &peak_tick);
    *peak_phase = -1;
    for (int p = 0; p < plan->phase_count && *peak_phase < 0; p++)
        if (peak_tick >= 0 && tick_of[p] == peak_tick)
            *peak_phase = p;
    if (packing.count > 0 && places) {
        plan_pack(&packing);
        plan->arena_bytes[arena] = packing.best_height;
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
    free(tick_of);
    return packing.bound;
}

// Does what plan_place does if `places`, else what plan_set_bounds does.
static void plan_place_arenas(struct plan *plan, bool places) {
    memset(plan->arena_bytes, 0, sizeof plan->arena_bytes);
    for (int i = 0; i < plan->count; i++) {
        struct plan_buffer *buffer = &plan->buffers[i];
        buffer->offset = 0;
        if (plan_arena_is_packed(buffer->arena))
            continue;
        buffer->offset = plan->arena_bytes[buffer->arena];
        plan->arena_bytes[buffer->arena] = plan_sum(buffer->offset, plan_rounded(buffer), buffer->name);
    }
    size_t peak[MEMORY_COUNT] = {0}, bound[MEMORY_COUNT] = {0};
    for (int a = 0; a < ARENA_COUNT; a++) {
        const enum plan_arena arena = (enum plan_arena)a;
        const enum plan_memory memory = plan_arena_memory(arena);
        int peak_phase = -1;
        const size_t least = plan_arena_is_packed(arena) ? plan_place_packed(plan, arena, places, &peak_phase)
                                                         : plan->arena_bytes[arena];
        if (arena == ARENA_ACTIVATIONS)
            plan->peak_phase = peak_phase;
        peak[memory] = plan_sum(peak[memory], plan->arena_bytes[arena], plan_arena_name(arena));
        bound[memory] = plan_sum(bound[memory], least, plan_arena_name(arena));
    }
    plan->peak_bytes = peak[MEMORY_DEVICE];
    plan->lower_bound_bytes = bound[MEMORY_DEVICE];
    plan->host_peak_bytes = peak[MEMORY_HOST];
    plan->host_lower_bound_bytes = bound[MEMORY_HOST];
}
static void plan_place(struct plan *plan) { plan_place_arenas(plan, true); }
static void plan_set_bounds(struct plan *plan) { plan_place_arenas(plan, false); }

// ---- Arenas ----

static void arenas_allocate(struct arenas *arenas, const struct plan *plan) {
    for (int a = 0; a < ARENA_COUNT; a++) {
        const bool host = plan_arena_memory((enum plan_arena)a) == MEMORY_HOST;
        arenas->bytes[a] = plan->arena_bytes[a];
        arenas->base[a] =
            (char *)(host ? host_reserve(plan->arena_bytes[a]) : device_allocate_untouched(plan->arena_bytes[a]));
    }
    for (int i = 0; i < plan->count; i++) { // each is divided among the threads as the ops that use it divide it
        const struct plan_buffer *b = &plan->buffers[i];
        if (plan_owns_bytes(b) && plan_arena_memory(b->arena) == MEMORY_DEVICE)
            device_touch(plan_pointer(plan, arenas, i), b->bytes);
    }
    for (int a = 0; a < ARENA_COUNT; a++) // what no buffer covers
        if (plan_arena_memory((enum plan_arena)a) == MEMORY_DEVICE)
            device_touch(arenas->base[a], arenas->bytes[a]);
}

static void arenas_free(struct arenas *arenas) {
    for (int a = 0; a < ARENA_COUNT; a++)
        if (plan_arena_memory((enum plan_arena)a) == MEMORY_HOST)
            host_release(arenas->base[a], arenas->bytes[a]);
        else
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
// Left free for what the driver allocates when kernels and graphs are loaded; an estimate, not measured.
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
static size_t host_available_bytes(int ranks_on_host) {
    const size_t bytes = memory_available_bytes();
    return bytes == SIZE_MAX ? bytes : bytes / (size_t)ranks_on_host;
}
