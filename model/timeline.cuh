// The timeline of a training step: its phases, in the order in which they run, and the buffers that each of them uses.
// The code of the model runs in two modes. When planning, each phase only records the buffers that it touches, of which
// the plan is made. When running, the same code finds the buffers at their planned addresses. A phase:
//     timeline_phase(t, PHASES_FORWARD, layer, "norm 1");   // the next phase of the timeline begins
//     floatX *out = (floatX *)timeline_buffer(t, ...);    // each of its buffers: touched, when planning
//     TIMELINE_RUN(t, norm_forward(out, ...));            // the op: skipped, when planning
// A dry run is planning once more, after the memory is allocated: nothing is recorded, and buffers have their
// addresses. The matmuls are called, but their library only lists them; other ops are skipped.
#pragma once
#include "kernels/transfers.cuh"      // transfer_begin, transfer_wait
#include "kernels/work_segments.cuh"  // segments_op_begin
#include "memory.cuh"                 // struct plan, struct arenas
#include "runtime/machine/deadline.h" // deadline_clock_s
#include "runtime/machine/error.h"    // fail
#include <stdio.h>                    // snprintf

// A pass over the model's layers. Each pass has activation buffers of its own. PASS_TRAIN: a training step's forward.
// PASS_BACKWARD: its backward, which makes a layer's dropped activations again, then its gradients. PASS_EVALUATE:
// validation. PASS_PREFILL: a generation's prompts. PASS_GENERATE: one new token a sequence, with the KV cache.
enum pass { PASS_TRAIN, PASS_BACKWARD, PASS_EVALUATE, PASS_PREFILL, PASS_GENERATE, PASS_COUNT };

// The groups of phases. Columns: id; name in plans. A micro-step's groups come first; BACKWARD is the last of them.
#define PHASE_GROUPS(ROW)                                                                                              \
    ROW(FORWARD, "forward")                                                                                            \
    ROW(RECOMPUTE, "recompute") /* of activations that the forward has dropped */                                      \
    ROW(HEAD, "head")           /* forward and backward */                                                             \
    ROW(BACKWARD, "backward")                                                                                          \
    ROW(UPDATE, "update")                                                                                              \
    ROW(AVERAGES, "averages")                                                                                          \
    ROW(EVALUATE, "evaluate")                                                                                          \
    ROW(PREFILL, "prefill")                                                                                            \
    ROW(GENERATE, "generate")
enum phase_group {
#define ENUM_ROW(id, name) PHASES_##id,
    PHASE_GROUPS(ENUM_ROW)
#undef ENUM_ROW
};
static const char *group_name(enum phase_group group) {
    static const char *const names[] = {
#define NAME_ROW(id, name) name,
        PHASE_GROUPS(NAME_ROW)
#undef NAME_ROW
    };
    return names[group];
}
// Returns the group of a pass's forward phases. Each pass has its own group; in PASS_BACKWARD it is recomputation.
static enum phase_group forward_group(enum pass pass) {
    switch (pass) {
    case PASS_TRAIN: return PHASES_FORWARD;
    case PASS_BACKWARD: return PHASES_RECOMPUTE;
    case PASS_EVALUATE: return PHASES_EVALUATE;
    case PASS_PREFILL: return PHASES_PREFILL;
    case PASS_GENERATE: return PHASES_GENERATE;
    case PASS_COUNT: break;
    }
    return PHASES_FORWARD;
}
static const char *forward_group_name(enum pass pass) { return group_name(forward_group(pass)); }

// Stretches of the timeline, each entered at its own first phase.
enum region {
    REGION_MICRO_STEP,
    REGION_UPDATE,
    REGION_AVERAGES,
    REGION_EVALUATE,
    REGION_PREFILL,
    REGION_GENERATE,
    REGION_COUNT
};

struct timeline {
    struct plan plan;
    struct arenas arenas;
    struct transfers transfers; // of what is offloaded, opened with the arenas
    struct device *dev;
    bool planning, dry_run;         // a dry run counts as planning
    int phase;                      // index in the plan
    int region_first[REGION_COUNT]; // first phase of each region
    int *workspaces;                // (phases) buffer id of the phase's workspace, -1: none
    int workspaces_capacity;
};

// Hooks that tests and benchmarks define before they include this file. TIMELINE_ON_PHASE is called as a phase begins.
// A true TIMELINE_IS_WATCHED forbids recorded graphs, so that every phase runs. TIMELINE_EXECUTE runs an op.
#ifndef TIMELINE_ON_PHASE
#define TIMELINE_ON_PHASE(t) ((void)(t))
#define TIMELINE_IS_WATCHED false
#endif
#ifndef TIMELINE_EXECUTE
#define TIMELINE_EXECUTE(t, is_matmul, op)                                                                             \
    do {                                                                                                               \
        range_begin((t)->plan.phases[(t)->phase].name);                                                                \
        op;                                                                                                            \
        range_end();                                                                                                   \
    } while (0)
#endif

// Executes an op, unless the op is in a recorded graph, which is enqueued instead.
#define TIMELINE_ENQUEUE(t, is_matmul, op)                                                                             \
    do {                                                                                                               \
        if (segments_op_begin((t)->dev)) {                                                                             \
            TIMELINE_EXECUTE(t, is_matmul, op);                                                                        \
            segments_op_end((t)->dev);                                                                                 \
        }                                                                                                              \
    } while (0)
#define TIMELINE_RUN(t, op)                                                                                            \
    do {                                                                                                               \
        if (!(t)->planning)                                                                                            \
            TIMELINE_ENQUEUE(t, false, op);                                                                            \
    } while (0)
#define TIMELINE_MATMUL(t, op)                                                                                         \
    do {                                                                                                               \
        if (!(t)->planning)                                                                                            \
            TIMELINE_ENQUEUE(t, true, op);                                                                             \
        else if ((t)->dry_run)                                                                                         \
            op;                                                                                                        \
    } while (0)

static double seconds_now(void) { return deadline_clock_s(); }

// Begins to plan, in a zeroed *t. To end it, the caller sets t->planning to false and calls plan_place, in this order.
static void timeline_begin_planning(struct timeline *t, struct device *dev) {
    plan_begin(&t->plan);
    t->dev = dev;
    t->planning = true;
    t->phase = -1;
}
// Begins a dry run, in which only matmuls are called, or ends it if `begin` is false. Call arenas_allocate before.
static void timeline_dry_run(struct timeline *t, bool begin) { t->planning = t->dry_run = begin; }
// Whether the plan is being recorded. This is false in a dry run, although t->planning is true there.
static bool timeline_is_planning(const struct timeline *t) { return t->planning && !t->dry_run; }
// Frees the plan and the arenas, which hold all of its buffers. First waits for the transfers in flight.
static void timeline_free(struct timeline *t) {
    transfers_close(&t->transfers, t->dev);
    arenas_free(&t->arenas);
    plan_free(&t->plan);
    free(t->workspaces);
}

// Enters a region, whose first phase the next timeline_phase begins. When planning, notes where the region begins.
static void timeline_enter_region(struct timeline *t, enum region r) {
    if (timeline_is_planning(t))
        t->region_first[r] = t->phase + 1;
    t->phase = t->region_first[r] - 1;
}

// Begins the next phase of the region. Planning records it, named "GROUP layer 3: OP", or "GROUP: OP" for layer -1.
// When running, the caller must begin the phases in the planned order, which nothing checks.
static void timeline_phase(struct timeline *t, enum phase_group group, int layer, const char *op) {
    char name[96];
    t->phase++;
    if (!t->planning) {
        TIMELINE_ON_PHASE(t);
        return;
    }
    if (t->dry_run)
        return;
    if (layer >= 0)
        snprintf(name, sizeof name, "%s layer %d: %s", group_name(group), layer, op);
    else
        snprintf(name, sizeof name, "%s: %s", group_name(group), op);
    plan_phase(&t->plan, (int)group, layer, name);
}

// A loop over ranges of tokens. The ops of all ranges run in the same phases, so that only one range is planned.
struct timeline_loop {
    int before;          // the phase before the loop's
    int64_t first, step; // the range [first, first + step) of
    int64_t end;         // tokens [0, end)
};
// Returns a loop over tokens [0, end) by ranges of `step`. The caller cuts the last range. The loop's phases follow.
static struct timeline_loop timeline_loop_of(const struct timeline *t, int64_t step, int64_t end) {
    const struct timeline_loop loop = {t->phase, -step, step, end};
    return loop;
}
// Goes on to the loop's next range (the first call: to its first), and back to before the loop's first phase. Returns
// false if no range is left. While the plan is recorded, returns false after one range, and notes the loop.
static bool timeline_loop_next(struct timeline *t, struct timeline_loop *loop) {
    loop->first += loop->step;
    if (loop->first > 0 && timeline_is_planning(t)) {
        plan_add_loop(&t->plan, loop->before + 1);
        return false;
    }
    if (loop->first < loop->end)
        t->phase = loop->before;
    return loop->first < loop->end;
}

// Returns a planned buffer's address. Aborts if id is -1, or the buffer is not live now: others may have its bytes.
static void *timeline_pointer(const struct timeline *t, int id) {
    const struct plan_buffer *b = id < 0 ? NULL : &t->plan.buffers[id];
    if (!b || t->phase < b->first_phase || t->phase > b->last_phase) {
        fprintf(stderr, "train_gpt: internal error: phase %d uses buffer '%s', which is not live in it\n", t->phase,
                b ? b->name : "?");
        abort();
    }
    return plan_pointer(&t->plan, &t->arenas, id);
}

// Returns the address of buffer *id, as timeline_pointer does. When planning, except in a dry run, returns NULL and
// makes the buffer live in this phase; if *id is -1, first adds it to the plan, in `arena`, which is a packed one.
static void *timeline_buffer_in(struct timeline *t, enum plan_arena arena, int *id, size_t bytes, const char *category,
                                const char *name, int layer) {
    if (!t->planning || t->dry_run)
        return timeline_pointer(t, *id);
    if (*id < 0)
        *id = plan_add(&t->plan, arena, category, name, layer, bytes);
    plan_touch(&t->plan, *id);
    return NULL;
}
// Returns a buffer of device memory, of ARENA_ACTIVATIONS, as timeline_buffer_in does.
static void *timeline_buffer(struct timeline *t, int *id, size_t bytes, const char *category, const char *name,
                             int layer) {
    return timeline_buffer_in(t, ARENA_ACTIVATIONS, id, bytes, category, name, layer);
}
// Returns a buffer of host memory, of ARENA_HOST_ACTIVATIONS, as timeline_buffer_in does.
static void *timeline_host_buffer(struct timeline *t, int *id, size_t bytes, const char *category, const char *name,
                                  int layer) {
    return timeline_buffer_in(t, ARENA_HOST_ACTIVATIONS, id, bytes, category, name, layer);
}

// Begins a copy between device and host, after the work enqueued so far. Returns a ticket for timeline_transfer_wait.
// Until the phase that waits, the caller keeps both buffers live and writes neither. Planning only notes the name and
// the bytes; only planning can wait for its tickets. A dry run does nothing and returns 0.
static uint64_t timeline_transfer(struct timeline *t, enum transfer_direction direction, const char *name, void *to,
                                  const void *from, size_t bytes) {
    if (!t->planning)
        return transfer_begin(&t->transfers, direction, to, from, bytes, t->dev);
    if (t->dry_run)
        return 0;
    return (uint64_t)plan_add_transfer(&t->plan, direction, name, bytes) + 1;
}
// Makes the device's later work wait for a transfer, and zeroes its ticket. Does nothing for ticket 0 and in a dry run.
static void timeline_transfer_wait(struct timeline *t, uint64_t *ticket) {
    if (t->dry_run)
        return;
    if (*ticket != 0 && t->planning)
        t->plan.transfers[*ticket - 1].waited_phase = t->phase;
    else if (*ticket != 0)
        transfer_wait(&t->transfers, *ticket, t->dev);
    *ticket = 0;
}

// Does nothing. Its argument, a call that returns a buffer, makes the buffer live in this phase for later phases.
static void timeline_touch(const void *buffer) { (void)buffer; }

// Returns scratch memory of this phase. All calls in the phase get the same memory, of the largest size asked for.
// Returns NULL for 0 bytes, and while the plan is recorded. Aborts if more bytes are asked for than were planned.
static void *timeline_workspace(struct timeline *t, size_t bytes) {
    if (bytes == 0)
        return NULL;
    if (t->phase >= t->workspaces_capacity) {
        const int capacity = 2 * t->phase + 64;
        t->workspaces = (int *)realloc(t->workspaces, (size_t)capacity * sizeof *t->workspaces);
        if (!t->workspaces)
            fail("out of memory for the timeline");
        for (int i = t->workspaces_capacity; i < capacity; i++)
            t->workspaces[i] = -1;
        t->workspaces_capacity = capacity;
    }
    int *const id = &t->workspaces[t->phase];
    const bool is_short = *id >= 0 && t->plan.buffers[*id].bytes < bytes;
    if (is_short && !timeline_is_planning(t)) {
        fprintf(stderr,
                "train_gpt: internal error: phase %d asks for %zu bytes of workspace, of which %zu are planned\n",
                t->phase, bytes, t->plan.buffers[*id].bytes);
        abort();
    }
    if (is_short)
        t->plan.buffers[*id].bytes = bytes;
    return timeline_buffer(t, id, bytes, "workspace", "workspace", -1);
}
