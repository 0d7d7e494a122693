// The copy of the optimizer's state, in the host's memory, from which checkpoints are written while the training goes
// on.
#pragma once
#include "optimizer_state.cuh" // struct optimizer, optimizer_download

// Values are fp32, in the order of the flat buffers; of master weights the unrounded parameters.
struct optimizer_copy {
    struct optimizer *o;        // not owned
    float *values[STATE_COUNT]; // (flat) NULL: none
    int ids[STATE_COUNT], gathered_id;
    bool keeps; // checkpoints are written from the copy, by this rank
};

// values (n) = elements [at, at + n) of the flat buffers, which this rank holds, as fp32. Waits for the device.
static void optimizer_values(const struct optimizer *o, enum optimizer_state id, int64_t at, int64_t n, float *values) {
    const struct zero *z = o->zero;
    for (int unit = 0; unit < z->shards.units; unit++) {
        const int64_t begin = z->table->unit_begin[unit] > at ? z->table->unit_begin[unit] : at;
        const int64_t end = z->table->unit_begin[unit + 1] < at + n ? z->table->unit_begin[unit + 1] : at + n;
        if (begin >= end)
            continue;
        const int64_t count = end - begin;
        char *native = (char *)calloc(1, 2 * state_bytes(FORMAT_FP32, count));
        if (!native)
            fail("out of memory for a checkpoint");
        if (optimizer_holds(o, id)) {
            const enum state_format format = optimizer_format(o, id, unit);
            optimizer_download(o, id, begin, count, native);
            if (format != FORMAT_REMAINDER)
                state_decode(values + (begin - at), native, format, count);
        }
        if (optimizer_state_rows[id].start == STATE_FROM_PARAMETERS) {
            floatX *params = (floatX *)(native + state_bytes(FORMAT_FP32, count));
            int64_t place, some, first = begin;
            for (; (some = shards_next(&z->shards, shards_parameters(&z->shards), &first, end, &place)) > 0;
                 first += some)
                device_download(params + (first - begin), z->params + place, (size_t)some * sizeof *params,
                                z->timeline->dev);
            const uint16_t *low = optimizer_holds(o, id) ? (const uint16_t *)native : NULL;
            for (int64_t i = 0; i < count; i++)
                values[begin - at + i] = low ? parameter_joined(params[i], low[i]) : to_float(params[i]);
        }
        free(native);
    }
}

// Whether a state is sharded, as checkpoints see it: parameters that stand in for it are from stage 3 on.
static bool optimizer_state_is_sharded(const struct optimizer *o, enum optimizer_state id) {
    return state_is_parameters(o, id) ? shards_parameters(&o->zero->shards) : optimizer_is_sharded(o);
}
// The buffer for a gathered bucket of one state, live in REGION_SAVE; NULL when planning.
static float *optimizer_gathered_buffer(struct optimizer_copy *c) {
    const struct shards *s = &c->o->zero->shards;
    struct timeline *t = c->o->zero->timeline;
    timeline_region(t, REGION_SAVE);
    timeline_phase(t, "save", -1, "gather");
    return (float *)timeline_buffer(t, &c->gathered_id, (size_t)s->ranks * (size_t)s->largest_shard * sizeof(float),
                                    "checkpoint", "a piece of sharded state", -1);
}
static void optimizer_copy_plan(struct optimizer_copy *c, struct optimizer *o, bool trains, bool keeps) {
    const size_t bytes = (size_t)o->zero->shards.flat * sizeof(float);
    memset(c, 0, sizeof *c);
    c->o = o;
    c->keeps = keeps;
    c->gathered_id = -1;
    for (int id = 0; id < STATE_COUNT; id++)
        c->ids[id] = trains && keeps ? plan_add(&o->zero->timeline->plan, ARENA_HOST_STAGING, "copy for checkpoints",
                                                "copy for checkpoints", -1, bytes)
                                     : -1;
}
static void optimizer_copy_allocate(struct optimizer_copy *c) {
    const struct timeline *t = c->o->zero->timeline;
    for (int id = 0; id < STATE_COUNT; id++)
        c->values[id] = (float *)plan_pointer(&t->plan, &t->arenas, c->ids[id]);
}
// Copies the state that a checkpoint holds into the copy of the rank that keeps one. Every rank calls it, after waiting
// for updated parameters in flight.
static void optimizer_copy_state(struct optimizer_copy *c) {
    const struct optimizer *o = c->o;
    const struct shards *s = &o->zero->shards;
    struct device *dev = o->zero->timeline->dev;
    for (int i = 0; i < STATE_COUNT; i++) {
        const enum optimizer_state id = (enum optimizer_state)i;
        if (!optimizer_state_is_sharded(o, id)) {
            if (c->keeps)
                optimizer_values(o, id, 0, s->flat, c->values[id]);
            continue;
        }
        float *gathered = optimizer_gathered_buffer(c);
        float *own = (float *)malloc((size_t)s->largest_shard * sizeof *own);
        if (!own)
            fail("out of memory for a checkpoint");
        for (int k = 0; k < s->count; k++) {
            const struct bucket *b = &s->buckets[k];
            const size_t bytes = (size_t)b->shard * sizeof *own;
            optimizer_values(o, id, shards_own_begin(s, b), b->shard, own);
            device_upload(gathered + s->rank * b->shard, own, bytes, dev);
            collective_wait(o->zero->collectives,
                            collective_all_gather(o->zero->collectives, gathered, gathered + s->rank * b->shard, bytes,
                                                  "state for a checkpoint", dev),
                            dev);
            if (c->keeps)
                device_download(c->values[id] + b->begin, gathered, (size_t)s->ranks * bytes, dev);
        }
        free(own);
    }
    device_synchronize(dev); // no gather is in flight when the next step starts
}
