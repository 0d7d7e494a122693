// A checkpoint consists of parts: the parameters, and each kind of optimizer state. Each part can be copied, as it is
// stored, to host memory, from which the checkpoint is then written while the training goes on. From ZeRO stage 1 on
// each rank writes its shards, which are the same in every stage; in stage 0 rank 0 writes everything.
#pragma once
#include "kernels/device_memory.cuh" // device_download
#include "optimizer/state.cuh"       // optimizer_download

enum { PART_PARAMETERS = STATE_COUNT, STATE_PARTS };

struct optimizer_copy {
    bool keeps;               // there is a copy
    int ids[STATE_PARTS];     // buffers in the plan, -1: none
    char *parts[STATE_PARTS]; // pinned host memory: the elements that this rank writes, in their order, as stored
};

// The number of ranks that write a checkpoint: all of them where optimizer states are sharded, else only rank 0.
static int checkpoint_ranks(const struct shards *s) { return shards_optimizer(s) ? s->ranks : 1; }
static bool rank_writes_checkpoint(const struct shards *s) { return s->rank < checkpoint_ranks(s); }

// Whether this rank stores a part: always the parameters, a state only if optimizer_plan has planned memory for it.
static bool part_is_stored(const struct optimizer *o, int part) {
    return part == PART_PARAMETERS || o->states[part].device_id >= 0 || o->states[part].host_id >= 0;
}

// Finds the next range of the flat buffers' [*at, end) whose states this rank has. Sets *at to its first element, and
// *place to the element's index in the states. Returns the length, which the caller adds to *at; 0: none is left.
static int64_t owned_range_next(const struct optimizer *o, int64_t *at, int64_t end, int64_t *place) {
    return shards_next(&o->zero->shards, optimizer_is_sharded(o), at, end, place);
}

// The number of bytes in this rank's copy of a part before `place`, a multiple of STATE_BLOCK as from owned_range_next.
static size_t part_offset(const struct optimizer *o, int part, int64_t place) {
    return part == PART_PARAMETERS ? (size_t)place * sizeof(floatX)
                                   : state_offset(o, (enum optimizer_state)part, place);
}

// Copies parameters [at, at + n) of the flat buffer, one range that this rank holds, to `native` (n) in host memory.
// Returns when the copy is done. After an update the caller first calls zero_wait_for_updates and waits for the device.
static void parameters_download(struct zero *z, int64_t at, int64_t n, floatX *native) {
    int64_t first = at, place = 0;
    shards_next(&z->shards, shards_parameters(&z->shards), &first, at + n, &place);
    if (z->params_on_host)
        memcpy(native, z->params + place, (size_t)n * sizeof *z->params);
    else
        device_download(native, z->params + place, (size_t)n * sizeof *z->params, z->timeline->dev);
}
// Copies elements [at, at + n) of a stored part, unchanged, to `native` on the host: whole STATE_BLOCKs of a range from
// owned_range_next. Groups without the state take no bytes. First wait as for parameters_download. Returns when done.
static void part_download(struct optimizer *o, int part, int64_t at, int64_t n, void *native) {
    if (part == PART_PARAMETERS)
        parameters_download(o->zero, at, n, (floatX *)native);
    else
        optimizer_download(o, (enum optimizer_state)part, at, n, native);
}

// Plans host memory for a copy of each part if `keeps`, which only ranks that write may set. Call optimizer_plan first.
static void optimizer_copy_plan(struct optimizer_copy *c, const struct optimizer *o, bool keeps) {
    struct zero *z = o->zero;
    c->keeps = keeps;
    for (int part = 0; part < STATE_PARTS; part++)
        c->ids[part] = keeps && part_is_stored(o, part)
                           ? plan_add(&z->timeline->plan, ARENA_HOST_STAGING, "copy for checkpoints",
                                      part == PART_PARAMETERS ? "copy of parameters" : optimizer_state_rows[part].name,
                                      -1, part_offset(o, part, o->elements))
                           : -1;
}
// Sets the addresses of the planned copy's parts, after arenas_allocate; NULL for a part that has no copy.
static void optimizer_copy_allocate(struct optimizer_copy *c, const struct optimizer *o) {
    const struct timeline *t = o->zero->timeline;
    for (int part = 0; part < STATE_PARTS; part++)
        c->parts[part] = (char *)plan_pointer(&t->plan, &t->arenas, c->ids[part]);
}

// Fills the copy, which must exist (c->keeps), with the parameters and states that this rank writes to checkpoints.
// Returns when done. After an update the caller first calls zero_wait_for_updates and waits for the device.
static void optimizer_copy_take(struct optimizer_copy *c, struct optimizer *o) {
    for (int part = 0; part < STATE_PARTS; part++) {
        int64_t at = 0, place, n;
        for (; part_is_stored(o, part) && (n = owned_range_next(o, &at, o->zero->shards.flat, &place)) > 0; at += n)
            part_download(o, part, at, n, c->parts[part] + part_offset(o, part, place));
    }
}

// Returns elements [at, at + n) of a part, a range as for part_download: from the copy if c->keeps. If not, downloads
// them to `room`, host memory of as many bytes, and returns `room`; the caller first waits as for part_download.
static const void *optimizer_copy_read(const struct optimizer_copy *c, struct optimizer *o, int part, int64_t at,
                                       int64_t n, void *room) {
    int64_t place = 0;
    if (!c->keeps) {
        part_download(o, part, at, n, room);
        return room;
    }
    owned_range_next(o, &at, at + n, &place);
    return c->parts[part] + part_offset(o, part, place);
}
