// What a checkpoint is made of, as it is stored: the parameters and the states of the optimizer, of the elements that
// this rank writes; and their copy in the host's memory, from which a checkpoint is written while the training goes on.
//
// From ZeRO stage 1 on each rank writes its shards, in every stage the same ones; below it rank 0 writes everything.
#pragma once
#include "kernels/device_memory.cuh" // device_download
#include "kernels/state_format.cuh"  // enum state_format
#include "optimizer.cuh"             // optimizer_download

// The states, and the parameters behind them.
enum { PART_PARAMETERS = STATE_COUNT, STATE_PARTS };

struct state_copy {
    bool kept;
    int ids[STATE_PARTS];      // buffers in the plan, -1: none
    char *parts[STATE_PARTS];  // pinned host memory: the elements that this rank writes, in their order, as stored
};

// How many ranks write a checkpoint, from rank 0 on; and whether this rank is one of them.
static int state_copy_ranks(const struct shards *s) { return shards_optimizer(s) ? s->ranks : 1; }
static bool state_copy_writers(const struct shards *s) { return s->rank < state_copy_ranks(s); }

static bool part_is_kept(const struct optimizer *o, int part) {
    return part == PART_PARAMETERS || optimizer_keeps(o, (enum optimizer_state)part);
}
static enum state_format part_format(const struct optimizer *o, int part, int unit) {
    if (part == PART_PARAMETERS)
        return sizeof(floatX) == sizeof(float) ? FORMAT_FP32 : FORMAT_BF16;
    return optimizer_format(o, (enum optimizer_state)part, unit);
}

// The next range of [*at, end) that this rank writes, as shards_next. Ranges begin and end with whole blocks.
static int64_t part_next(const struct optimizer *o, int64_t *at, int64_t end, int64_t *place) {
    return shards_next(&o->zero->shards, optimizer_is_sharded(o), at, end, place);
}

// Where element `place` of what this rank writes, which is in the unit, stands in the copy: bytes.
static size_t part_offset(const struct optimizer *o, int part, int unit, int64_t place) {
    const int64_t *begin = o->zero->table->unit_begin, ranks = state_copy_ranks(&o->zero->shards);
    size_t bytes = 0;
    for (int u = 0; u < unit; u++)
        bytes += state_bytes(part_format(o, part, u), (begin[u + 1] - begin[u]) / ranks);
    return bytes + state_bytes(part_format(o, part, unit), place - begin[unit] / ranks);
}

// native = elements [at, at + n) of a part as they are stored: whole blocks, of one unit and of what this rank writes.
static void part_download(struct optimizer *o, int part, int64_t at, int64_t n, void *native) {
    struct zero *z = o->zero;
    int64_t first = at, place = 0;
    if (part != PART_PARAMETERS) {
        optimizer_download(o, (enum optimizer_state)part, at, n, native);
        return;
    }
    shards_next(&z->shards, shards_parameters(&z->shards), &first, at + n, &place);
    device_download(native, z->params + place, (size_t)n * sizeof *z->params, z->timeline->dev);
}

// Adds the copy to the plan.
static void state_copy_plan(struct state_copy *c, const struct optimizer *o, bool kept) {
    struct zero *z = o->zero;
    const int units = z->table->num_units;
    const int64_t end = z->table->unit_begin[units] / state_copy_ranks(&z->shards);
    c->kept = kept;
    for (int part = 0; part < STATE_PARTS; part++)
        c->ids[part] = kept && part_is_kept(o, part)
                           ? plan_add(&z->timeline->plan, ARENA_HOST_STAGING, "copy for checkpoints",
                                      part == PART_PARAMETERS ? "copy of parameters" : optimizer_state_rows[part].name,
                                      -1, part_offset(o, part, units - 1, end))
                           : -1;
}
static void state_copy_allocate(struct state_copy *c, const struct optimizer *o) {
    const struct timeline *t = o->zero->timeline;
    for (int part = 0; part < STATE_PARTS; part++)
        c->parts[part] = (char *)plan_pointer(&t->plan, &t->arenas, c->ids[part]);
}

// Copies what this rank writes. No update may be in flight.
static void state_copy_take(struct state_copy *c, struct optimizer *o) {
    const struct parameters *table = o->zero->table;
    for (int part = 0; part < STATE_PARTS; part++)
        for (int unit = 0; unit < table->num_units && part_is_kept(o, part); unit++) {
            int64_t at = table->unit_begin[unit], place, n;
            for (; (n = part_next(o, &at, table->unit_begin[unit + 1], &place)) > 0; at += n)
                part_download(o, part, at, n, c->parts[part] + part_offset(o, part, unit, place));
        }
}

// Elements [at, at + n) of a part as they are stored, under part_download's conditions: in the copy where there is one,
// else downloaded to `room`.
static const void *state_copy_read(const struct state_copy *c, struct optimizer *o, int part, int64_t at, int64_t n,
                                   void *room) {
    const struct parameters *table = o->zero->table;
    if (!c->kept) {
        part_download(o, part, at, n, room);
        return room;
    }
    int unit = 0;
    while (at >= table->unit_begin[unit + 1])
        unit++;
    int64_t place = 0;
    part_next(o, &at, at + n, &place);
    return c->parts[part] + part_offset(o, part, unit, place);
}
