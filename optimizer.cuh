// The optimizer: its state, one row per kind; the update of this rank's shards; and the copy of the state, in the
// host's memory, from which checkpoints are written while the training goes on.
#pragma once
#include "kernels/adamw.cuh"         // adamw_update, sum_of_squares
#include "kernels/device_memory.cuh" // device_download, host_allocate
#include "fp8.cuh"                   // fp8_weight_amax
#include "kernels/fp8_cast.cuh"      // fp8_amax
#include "zero.cuh"                  // struct zero

// The value of an element of the state before the first step.
enum state_start {
    STATE_FROM_PARAMETERS, // the parameter, not rounded to floatX
    STATE_ZERO,
};

// One row per kind of state: a flat buffer with an element for each parameter, sharded from ZeRO stage 1 on. Columns:
// id; name in reports and plans; prefix of its tensors' names in optimizer.safetensors; element type; whether it is
// present; initial value. Without master weights the parameters are fp32 and stand in for them.
#define OPTIMIZER_STATE_ROWS(ROW)                                                                                      \
    ROW(MASTER, "master weights", "master", float, sizeof(floatX) < sizeof(float), STATE_FROM_PARAMETERS)              \
    ROW(MOMENT1, "first moments", "exp_avg", float, true, STATE_ZERO)                                                  \
    ROW(MOMENT2, "second moments", "exp_avg_sq", float, true, STATE_ZERO)

enum optimizer_state {
#define ENUM_ROW(id, name, file_name, type, present, start) STATE_##id,
    OPTIMIZER_STATE_ROWS(ENUM_ROW)
#undef ENUM_ROW
        STATE_COUNT
};

struct optimizer_state_row {
    const char *name, *file_name;
    size_t element_bytes;
    bool present;
    enum state_start start;
};
static const struct optimizer_state_row optimizer_state_rows[STATE_COUNT] = {
#define STRUCT_ROW(id, name, file_name, type, present, start) {name, file_name, sizeof(type), present, start},
    OPTIMIZER_STATE_ROWS(STRUCT_ROW)
#undef STRUCT_ROW
};
// Gathers, copies and files of the state are fp32.
#define CHECK_ROW(id, name, file_name, type, present, start)                                                           \
    static_assert(sizeof(type) == sizeof(float), name ": another element type needs conversions in optimizer.cuh");
OPTIMIZER_STATE_ROWS(CHECK_ROW)
#undef CHECK_ROW

struct optimizer {
    struct zero *zero;         // parameters and gradients; not owned
    struct fp8_state *fp8;     // whose amaxes of weights the update collects; not owned
    float *state[STATE_COUNT]; // device memory, whole or this rank's shards; NULL: not present, or only planned
    float *copy[STATE_COUNT];  // host memory, whole, for checkpoints; NULL: none. Of MASTER: the unrounded parameters
    int ids[STATE_COUNT], copy_ids[STATE_COUNT], gathered_id; // buffers in the plan, -1: none
    bool keeps_copy;                                          // checkpoints are written from `copy`, by this rank
};

static bool optimizer_is_sharded(const struct optimizer *o) { return shards_optimizer(&o->zero->shards); }
// Whether the parameters stand in for this state: for MASTER, where it is not present.
static bool state_is_parameters(enum optimizer_state id) {
    return id == STATE_MASTER && !optimizer_state_rows[id].present;
}
// A state as checkpoints hold it, in the device's memory: whole, or this rank's shards (optimizer_state_is_sharded).
static const float *optimizer_state_of(const struct optimizer *o, enum optimizer_state id) {
    return state_is_parameters(id) ? (const float *)o->zero->params : o->state[id];
}
static bool optimizer_state_is_sharded(const struct optimizer *o, enum optimizer_state id) {
    return state_is_parameters(id) ? shards_parameters(&o->zero->shards) : optimizer_is_sharded(o);
}
// Whether checkpoints hold this state.
static bool optimizer_has(enum optimizer_state id) {
    return optimizer_state_rows[id].present || state_is_parameters(id);
}

// ---- memory ----

// Adds the state to the plan, and the copy where the device's memory is the host's. `trains` false: neither.
static void optimizer_plan(struct optimizer *o, struct zero *zero, struct fp8_state *fp8, bool trains,
                           bool keeps_copy) {
    const size_t whole = (size_t)zero->shards.flat;
    struct plan *plan = &zero->timeline->plan;
    memset(o, 0, sizeof *o);
    o->zero = zero;
    o->fp8 = fp8;
    o->keeps_copy = keeps_copy;
    o->gathered_id = -1;
    const size_t elements = (size_t)shards_elements(&zero->shards, optimizer_is_sharded(o));
    for (int id = 0; id < STATE_COUNT; id++) {
        const struct optimizer_state_row *row = &optimizer_state_rows[id];
        o->ids[id] = trains && row->present
                         ? plan_add(plan, ARENA_OPTIMIZER, row->name, row->name, -1, elements * row->element_bytes)
                         : -1;
    }
    for (int id = 0; id < STATE_COUNT; id++)
        o->copy_ids[id] = trains && keeps_copy && DEVICE_MEMORY_IS_HOSTS && optimizer_has((enum optimizer_state)id)
                              ? plan_add(plan, ARENA_OPTIMIZER, "copy for checkpoints", "copy for checkpoints", -1,
                                         whole * sizeof(float))
                              : -1;
}

// Sets the state's addresses in the arenas, and allocates the copy where the plan does not hold it.
static void optimizer_allocate(struct optimizer *o) {
    const struct timeline *t = o->zero->timeline;
    for (int id = 0; id < STATE_COUNT; id++) {
        o->state[id] = (float *)plan_pointer(&t->plan, &t->arenas, o->ids[id]);
        if (!o->keeps_copy || !optimizer_has((enum optimizer_state)id))
            continue;
        o->copy[id] = DEVICE_MEMORY_IS_HOSTS ? (float *)plan_pointer(&t->plan, &t->arenas, o->copy_ids[id])
                                             : (float *)malloc((size_t)o->zero->shards.flat * sizeof(float));
        if (!o->copy[id])
            fail("out of the host's memory for the copy that checkpoints are written from; --no-checkpoint-async does "
                 "without");
    }
}
static void optimizer_free(struct optimizer *o) {
    for (int id = 0; id < STATE_COUNT && !DEVICE_MEMORY_IS_HOSTS; id++)
        free(o->copy[id]);
}

// Zeroes the state, and with it the gaps between tensors; optimizer_set_parameters then sets STATE_FROM_PARAMETERS.
static void optimizer_initialise(struct optimizer *o) {
    const int64_t elements = shards_elements(&o->zero->shards, optimizer_is_sharded(o));
    for (int id = 0; id < STATE_COUNT; id++)
        if (o->state[id])
            device_zero(o->state[id], (size_t)elements * optimizer_state_rows[id].element_bytes,
                        o->zero->timeline->dev);
}

// Sets parameters [at, at + n) of the flat buffers: `exact` into the states that start from them, rounded to floatX
// into the parameters. `rounded` has room for n. Both must stay until the device was waited for.
static void optimizer_set_parameters(struct optimizer *o, int64_t at, const float *exact, int64_t n, floatX *rounded) {
    for (int64_t i = 0; i < n; i++)
        rounded[i] = to_floatX(exact[i]);
    for (int id = 0; id < STATE_COUNT; id++)
        switch (optimizer_state_rows[id].start) {
        case STATE_FROM_PARAMETERS:
            if (o->state[id])
                zero_upload(o->zero, o->state[id], optimizer_is_sharded(o), at, exact, n, sizeof *exact);
            break;
        case STATE_ZERO: break;
        }
    zero_upload(o->zero, o->zero->params, shards_parameters(&o->zero->shards), at, rounded, n, sizeof *rounded);
    o->fp8->weights_known = false;
}

// ---- amaxes of weights in FP8 ----

// Where the amax of a tensor is collected; NULL: nowhere.
static uint32_t *optimizer_amax(const struct optimizer *o, const struct tensor *t) {
    for (int linear = 0; linear < LINEAR_COUNT && t->layer >= 0; linear++)
        if (linear_row((enum linear)linear, o->fp8->shape).weight == t->parameter)
            return fp8_weight_amax(o->fp8, t->layer, (enum linear)linear);
    return NULL;
}
// Takes the amaxes of weights that no update has made, initial ones and those of a checkpoint, where they are not known
// yet.
static void optimizer_know_weights(struct optimizer *o) {
    const struct zero *z = o->zero;
    if (o->fp8->weight_amaxes == NULL || o->fp8->weights_known)
        return;
    device_zero(o->fp8->weight_amaxes, fp8_amaxes_bytes(o->fp8), z->timeline->dev);
    for (int i = 0; i < z->table->num_tensors; i++) {
        const struct tensor *t = &z->table->tensors[i];
        uint32_t *amax = optimizer_amax(o, t);
        if (amax)
            fp8_amax(amax, z->params + t->offset, t->count, z->timeline->dev);
    }
    o->fp8->weights_known = true;
}

// ---- the update ----

// Enqueues AdamW on elements [begin, end) of the flat buffers, which are in this rank's shard of bucket b (NULL: this
// rank holds all): tensor by tensor, since not all have weight decay.
static void optimizer_update_range(struct optimizer *o, struct adamw adamw, const struct gradient_check *check,
                                   int64_t begin, int64_t end, const struct bucket *b) {
    const struct zero *z = o->zero;
    const struct shards *s = &z->shards;
    for (int i = 0; i < z->table->num_tensors; i++) {
        const struct tensor *t = &z->table->tensors[i];
        const int64_t first = t->offset > begin ? t->offset : begin;
        const int64_t last = t->offset + t->count < end ? t->offset + t->count : end;
        if (first >= last)
            continue;
        struct adamw a = adamw;
        a.weight_decay = tensor_decays(t) ? adamw.weight_decay : 0;
        a.amax = optimizer_amax(o, t);
        const int64_t parameter = b ? shards_place(s, b, first, shards_parameters(s)) : first;
        const int64_t gradient = b ? shards_place(s, b, first, shards_gradients(s)) : first;
        const int64_t state = b ? shards_place(s, b, first, shards_optimizer(s)) : first;
        float *const master = o->state[STATE_MASTER];
        adamw_update(z->params + parameter, master ? master + state : NULL, (const float *)z->grads + gradient,
                     o->state[STATE_MOMENT1] + state, o->state[STATE_MOMENT2] + state, last - first, a, check,
                     z->timeline->dev);
    }
}
// Enqueues the update of all that this rank owns. Where it is sharded the embeddings are first: what the next forward
// needs first is gathered while the rest is updated. *check, in the device's memory, holds the clipping or forbids the
// update.
static void optimizer_update(struct optimizer *o, struct adamw adamw, const struct gradient_check *check) {
    struct zero *z = o->zero;
    const struct shards *s = &z->shards;
    char name[64];
    if (o->fp8->weight_amaxes)
        device_zero(o->fp8->weight_amaxes, fp8_amaxes_bytes(o->fp8), z->timeline->dev);
    if (!optimizer_is_sharded(o)) {
        optimizer_update_range(o, adamw, check, 0, s->flat, NULL);
        return;
    }
    for (int i = s->count - 1; i >= 0; i--) {
        const struct bucket *b = &s->buckets[i];
        const int64_t own = shards_own_begin(s, b);
        optimizer_update_range(o, adamw, check, own, own + b->shard, b);
        if (!shards_parameters(s))
            z->params_tickets[i] = collective_all_gather(
                z->collectives, z->params + b->begin, z->params + own, (size_t)b->shard * sizeof *z->params,
                unit_name(z, b->unit, name, "updated parameters"), z->timeline->dev);
    }
}

// *squares (device memory) = the sum of squares of the gradients of this rank's shards: bucket by bucket in every
// stage, so that all stages have the norm in the same bits. Waits for reductions in flight. `ws`:
// sum_of_squares_workspace_bytes().
static void optimizer_sum_squares(struct optimizer *o, double *squares, void *ws) {
    struct zero *z = o->zero;
    const struct shards *s = &z->shards;
    for (int i = 0; i < s->count; i++) {
        const struct bucket *b = &s->buckets[i];
        if (s->ranks > 1 && !shards_gradients(s))
            collective_wait(z->collectives, z->grads_tickets[i], z->timeline->dev);
        const int64_t at = shards_place(s, b, shards_own_begin(s, b), shards_gradients(s));
        sum_of_squares(squares, (const float *)z->grads + at, b->shard, i > 0, ws, z->timeline->dev);
    }
}

// ---- the copy for checkpoints ----

// The buffer for a gathered bucket of one state, live in REGION_SAVE; NULL when planning.
static float *optimizer_gathered_buffer(struct optimizer *o) {
    const struct shards *s = &o->zero->shards;
    struct timeline *t = o->zero->timeline;
    timeline_region(t, REGION_SAVE);
    timeline_phase(t, "save", -1, "gather");
    return (float *)timeline_buffer(t, &o->gathered_id, (size_t)s->ranks * (size_t)s->largest_shard * sizeof(float),
                                    "checkpoint", "a piece of sharded state", -1);
}

// Gathers a sharded state from all ranks into the copy of the rank that keeps one. Every rank calls it.
static void optimizer_gather_state(struct optimizer *o, enum optimizer_state id) {
    const struct shards *s = &o->zero->shards;
    struct device *dev = o->zero->timeline->dev;
    float *gathered = optimizer_gathered_buffer(o);
    for (int i = 0; i < s->count; i++) {
        const struct bucket *b = &s->buckets[i];
        const size_t bytes = (size_t)b->shard * sizeof *gathered;
        collective_wait(o->zero->collectives,
                        collective_all_gather(o->zero->collectives, gathered,
                                              optimizer_state_of(o, id) + b->begin / s->ranks, bytes,
                                              "state for a checkpoint", dev),
                        dev);
        if (o->keeps_copy)
            device_download(o->copy[id] + b->begin, gathered, (size_t)s->ranks * bytes, dev);
    }
}

// Copies an unsharded state into the copy. Only transfers to pinned memory reach the bus's full speed: while one chunk
// is in flight, the one before is copied from pinned memory to its place.
static void optimizer_copy_whole(struct optimizer *o, enum optimizer_state id) {
    const int64_t CHUNK = DEVICE_MEMORY_IS_HOSTS ? 1 << 16 : 4 << 20, n = o->zero->shards.flat,
                  chunks = (n + CHUNK - 1) / CHUNK;
    const float *from = optimizer_state_of(o, id);
    struct device *dev = o->zero->timeline->dev;
    if (DEVICE_MEMORY_IS_HOSTS) {
#pragma omp parallel for schedule(static)
        for (int64_t first = 0; first < n; first += CHUNK)
            memcpy(o->copy[id] + first, from + first, (size_t)(n - first < CHUNK ? n - first : CHUNK) * sizeof *from);
        return;
    }
    float *pinned = (float *)host_allocate(2 * (size_t)CHUNK * sizeof *pinned, dev);
    for (int64_t i = 0; i <= chunks; i++) {
        if (i > 0)
            device_synchronize(dev);
        if (i < chunks) {
            const int64_t first = i * CHUNK, count = n - first < CHUNK ? n - first : CHUNK;
            device_download_begin(pinned + i % 2 * CHUNK, from + first, (size_t)count * sizeof *pinned, dev);
        }
        if (i > 0) {
            const int64_t first = (i - 1) * CHUNK, count = n - first < CHUNK ? n - first : CHUNK;
            memcpy(o->copy[id] + first, pinned + (i + 1) % 2 * CHUNK, (size_t)count * sizeof *pinned);
        }
    }
    host_free(pinned);
}

// Copies the state that a checkpoint holds into the copy of the rank that keeps one. Every rank calls it, after waiting
// for updated parameters in flight.
static void optimizer_copy_state(struct optimizer *o) {
    for (int id = 0; id < STATE_COUNT; id++) {
        if (!optimizer_has((enum optimizer_state)id))
            continue;
        if (optimizer_state_is_sharded(o, (enum optimizer_state)id))
            optimizer_gather_state(o, (enum optimizer_state)id);
        else if (o->keeps_copy)
            optimizer_copy_whole(o, (enum optimizer_state)id);
    }
    device_synchronize(o->zero->timeline->dev); // no gather is in flight when the next step starts
}
