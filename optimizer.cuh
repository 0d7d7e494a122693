// The optimizer: its state, one row per kind, and the update of this rank's shards.
#pragma once
#include "kernels/adamw.cuh"         // adamw_update, sum_of_squares
#include "kernels/device_memory.cuh" // device_download
#include "fp8.cuh"                   // fp8_weight_amax
#include "kernels/fp8_cast.cuh"      // fp8_amax
#include "kernels/state_format.cuh"  // enum state_format
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
    int ids[STATE_COUNT];      // buffers in the plan, -1: none
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

// Adds the state to the plan. `trains` false: none.
static void optimizer_plan(struct optimizer *o, struct zero *zero, struct fp8_state *fp8, bool trains) {
    struct plan *plan = &zero->timeline->plan;
    memset(o, 0, sizeof *o);
    o->zero = zero;
    o->fp8 = fp8;
    const size_t elements = (size_t)shards_elements(&zero->shards, optimizer_is_sharded(o));
    for (int id = 0; id < STATE_COUNT; id++) {
        const struct optimizer_state_row *row = &optimizer_state_rows[id];
        o->ids[id] = trains && row->present
                         ? plan_add(plan, ARENA_OPTIMIZER, row->name, row->name, -1, elements * row->element_bytes)
                         : -1;
    }
}

// Sets the state's addresses in the arenas.
static void optimizer_allocate(struct optimizer *o) {
    const struct timeline *t = o->zero->timeline;
    for (int id = 0; id < STATE_COUNT; id++)
        o->state[id] = (float *)plan_pointer(&t->plan, &t->arenas, o->ids[id]);
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
        adamw_update(z->params + parameter, master ? master + state : NULL, z->grads + gradient,
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
        sum_of_squares(squares, z->grads + at, b->shard, i > 0, ws, z->timeline->dev);
    }
}

// ---- access by the host: checkpoints ----

// Whether the optimizer keeps the state in memory of its own.
static bool optimizer_keeps(const struct optimizer *o, enum optimizer_state id) { return o->ids[id] >= 0; }
// How a state of a unit's parameters is stored.
static enum state_format optimizer_format(const struct optimizer *o, enum optimizer_state id, int unit) {
    return id == STATE_MASTER ? FORMAT_REMAINDER : FORMAT_FP32;
}
// The address of a state's element `at`, of which this rank holds n.
static float *optimizer_place(const struct optimizer *o, enum optimizer_state id, int64_t at, int64_t n) {
    int64_t place = 0;
    shards_next(&o->zero->shards, optimizer_is_sharded(o), &at, at + n, &place);
    return o->state[id] + place;
}
// native = elements [at, at + n) of the flat buffers as they are stored: whole blocks, of one unit and of this rank's
// shard.
static void optimizer_download(struct optimizer *o, enum optimizer_state id, int64_t at, int64_t n, void *native) {
    const float *from = optimizer_place(o, id, at, n);
    if (id != STATE_MASTER) {
        device_download(native, from, (size_t)n * sizeof *from, o->zero->timeline->dev);
        return;
    }
    float *values = (float *)malloc((size_t)n * sizeof *values);
    device_download(values, from, (size_t)n * sizeof *from, o->zero->timeline->dev);
    for (int64_t i = 0; i < n; i++)
        ((uint16_t *)native)[i] = split_low(values[i]);
    free(values);
}
// The inverse of optimizer_download; not of master weights, which optimizer_set_parameters sets.
static void optimizer_upload(struct optimizer *o, enum optimizer_state id, int64_t at, int64_t n, const void *native) {
    device_upload(optimizer_place(o, id, at, n), native, (size_t)n * sizeof(float), o->zero->timeline->dev);
    device_synchronize(o->zero->timeline->dev);
}
