// The update of the parameters that this rank owns, by AdamW, and the norm of their gradients.
//
// What the update reads and writes may lie in the host's memory: states (optimizer_state.cuh), parameters and gradients
// (zero.cuh). It is then streamed through the device in pieces, in three slots: while one piece is updated, the next
// arrives and the one before leaves. The same kernel updates the same elements as without offload, so that the bits are
// the same.
#pragma once
#include "fp8.cuh"               // fp8_amaxes_bytes
#include "kernels/adamw.cuh"     // adamw_update
#include "kernels/fp8_cast.cuh"  // fp8_amax
#include "kernels/gradients.cuh" // squares_of_ranges, squares_total
#include "optimizer_state.cuh"   // struct optimizer
#include "zero.cuh"              // struct zero

// ---- amaxes of weights in FP8 ----

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

// What a piece of the update consists of: a state of each kind (enum optimizer_state), parameters and gradients.
enum { OPERAND_PARAMETERS = STATE_COUNT, OPERAND_GRADIENTS, OPERAND_COUNT };

// A range of a bucket of this rank's shard, or of all that an unsharded rank holds.
struct update_piece {
    int64_t at, n;          // elements of the flat buffers
    const struct bucket *b; // NULL: unsharded
    int bucket;             // its index, where this is its last piece; -1: it is not
    uint64_t arrival;       // transfers in flight: the last of the piece's operands to the device
    uint64_t leaving;       // and back
};

// Where the operands of a piece are: in this rank's buffers, and the bytes that they have there.
struct update_operand {
    char *memory;
    size_t bytes;
    bool on_host, changes;
};

static int64_t piece_place(const struct optimizer *o, const struct update_piece *p, bool sharded) {
    return p->b ? shards_place(&o->zero->shards, p->b, p->at, sharded) : p->at;
}
static struct update_operand update_operand_of(const struct optimizer *o, const struct update_piece *p, int operand) {
    const struct zero *z = o->zero;
    struct update_operand result = {NULL, 0, false, true};
    if (operand == OPERAND_PARAMETERS) {
        const int64_t place = piece_place(o, p, shards_parameters(&z->shards));
        result.memory = (char *)(z->params + place);
        result.bytes = (size_t)p->n * sizeof *z->params;
        result.on_host = z->params_on_host;
    } else if (operand == OPERAND_GRADIENTS) {
        const int64_t place = piece_place(o, p, shards_gradients(&z->shards));
        result.memory = (char *)z->grads + state_bytes(z->grads_format, place);
        result.bytes = state_bytes(z->grads_format, p->n);
        result.on_host = z->grads_on_host;
        result.changes = false;
    } else if (optimizer_holds(o, (enum optimizer_state)operand)) {
        const enum optimizer_state id = (enum optimizer_state)operand;
        const int64_t place = piece_place(o, p, shards_optimizer(&z->shards));
        int64_t count; // all: pieces do not cross the cut
        result.memory = state_address(o, id, place, p->n, &count, &result.on_host);
        result.bytes = state_offset(o, id, place + p->n) - state_offset(o, id, place);
    }
    return result;
}
// The most bytes of an operand of `n` elements, rounded up so that the next one is aligned.
static size_t operand_room(const struct optimizer *o, int operand, int64_t n) {
    size_t bytes = 0;
    if (operand == OPERAND_PARAMETERS)
        bytes = o->zero->params_on_host ? (size_t)n * sizeof *o->zero->params : 0;
    else if (operand == OPERAND_GRADIENTS)
        bytes = o->zero->grads_on_host ? state_bytes(o->zero->grads_format, n) : 0;
    else if (o->states[operand].host_id >= 0) {
        const struct state_formats *f = &o->states[operand].formats;
        const size_t layers = state_bytes(f->layers, n), others = state_bytes(f->others, n);
        bytes = layers > others ? layers : others;
    }
    return (bytes + PLAN_ALIGNMENT - 1) / PLAN_ALIGNMENT * PLAN_ALIGNMENT;
}
static size_t slot_room(const struct optimizer *o, int64_t n) {
    size_t bytes = 0;
    for (int i = 0; i < OPERAND_COUNT; i++)
        bytes += operand_room(o, i, n);
    return bytes;
}

// Bytes of a slot, about: long enough for the bus to reach its full speed, short beside what is dead during the update.
// Tests define other sizes.
#ifndef UPDATE_SLOT_BYTES
#ifdef TARGET_CUDA
#define UPDATE_SLOT_BYTES (64 << 20)
#else
#define UPDATE_SLOT_BYTES (1 << 20) // within a core's cache
#endif
#endif

// The slots of pieces on the device, live in this phase; when planning, records what the update moves. NULL: when
// planning, and where nothing is streamed.
static void *optimizer_slots(struct optimizer *o) {
    struct timeline *t = o->zero->timeline;
    if (t->planning) {
        const size_t block = slot_room(o, STATE_BLOCK * STATE_BLOCK) / STATE_BLOCK; // about, of STATE_BLOCK elements
        int64_t blocks = block > 0 ? (int64_t)(UPDATE_SLOT_BYTES / block) : 0;
        blocks = blocks > o->elements / STATE_BLOCK ? o->elements / STATE_BLOCK : blocks;
        o->piece = block > 0 ? (blocks > 0 ? blocks : 1) * STATE_BLOCK : 0;
        o->slot_bytes = slot_room(o, o->piece);
    }
    if (o->piece == 0)
        return NULL;
    void *slots = timeline_buffer(t, &o->slots_id, UPDATE_SLOTS * o->slot_bytes, "update", "pieces of the update", -1);
    for (int i = 0; i < OPERAND_COUNT && t->planning; i++) {
        const int64_t n = i < STATE_COUNT ? o->elements - o->cut : o->elements;
        const size_t bytes = i < STATE_COUNT
                                 ? (o->states[i].host_id < 0 ? 0
                                                             : state_offset(o, (enum optimizer_state)i, o->elements) -
                                                                   state_offset(o, (enum optimizer_state)i, o->cut))
                                 : operand_room(o, i, n);
        const char *name = i < STATE_COUNT           ? optimizer_state_rows[i].name
                           : i == OPERAND_PARAMETERS ? "parameters"
                                                     : "gradients";
        if (bytes == 0)
            continue;
        timeline_transfer(t, TRANSFER_TO_DEVICE, name, NULL, NULL, bytes);
        if (i != OPERAND_GRADIENTS)
            timeline_transfer(t, TRANSFER_TO_HOST, name, NULL, NULL, bytes);
    }
    return slots;
}

// The state of an update in progress.
struct update {
    struct optimizer *o;
    struct adamw adamw;
    const struct gradient_check *check;
    char *slots;
    struct update_piece pieces[UPDATE_SLOTS]; // the last ones
    int count;                                // of pieces so far
};

// The end of the elements from `first` on whose states have one format each: of the head, of the layers, of the
// embeddings, or of all. *unit: a unit that they are of.
static int64_t update_formats_end(const struct optimizer *o, int64_t first, int *unit) {
    const struct parameters *table = o->zero->table;
    const int units[] = {unit_of_head(), unit_of_layer(table, table->L - 1), unit_of_embeddings(table)};
    const int64_t ends[] = {table->trained.unit_begin[unit_of_head() + 1],
                            table->trained.unit_begin[unit_of_embeddings(table)], table->trained.flat};
    bool differ = false;
    for (int i = 0; i < STATE_COUNT; i++)
        differ = differ || o->states[i].formats.layers != o->states[i].formats.others;
    int i = differ ? 0 : 2;
    while (ends[i] <= first)
        i++;
    *unit = units[i];
    return ends[i];
}
// Enqueues AdamW on a piece, in one launch or in one for each set of formats. memory: of each operand, the piece's
// first element.
static void update_compute(struct update *u, const struct update_piece *p, char *const memory[OPERAND_COUNT]) {
    struct optimizer *o = u->o;
    const struct zero *z = o->zero;
    const int64_t end = p->at + p->n;
    for (int64_t first = p->at, last; first < end; first = last) {
        int unit;
        const int64_t formats_end = update_formats_end(o, first, &unit);
        last = formats_end < end ? formats_end : end;
        const struct update_piece before = {p->at, first - p->at, p->b, -1, 0, 0};
        char *at[OPERAND_COUNT];
        for (int k = 0; k < OPERAND_COUNT; k++)
            at[k] = memory[k] ? memory[k] + update_operand_of(o, &before, k).bytes : NULL;
        struct adamw_range r;
        r.params = (floatX *)at[OPERAND_PARAMETERS];
        r.remainder = (uint16_t *)at[STATE_MASTER];
        r.grads = at[OPERAND_GRADIENTS];
        r.grads_format = z->grads_format;
        r.m = at[STATE_MOMENT1];
        r.m_format = optimizer_format(o, STATE_MOMENT1, unit);
        r.v = at[STATE_MOMENT2];
        r.v_format = optimizer_format(o, STATE_MOMENT2, unit);
        r.n = last - first;
        r.begin = first;
        adamw_update(r, o->tensors, u->adamw, u->check, z->timeline->dev);
    }
}

// Where a piece's operand is during its update: in its slot, or in this rank's buffers.
static char *piece_memory(const struct update *u, const struct update_operand *operand, int slot, int i) {
    if (!operand->on_host)
        return operand->memory;
    char *memory = u->slots + (size_t)slot * u->o->slot_bytes;
    for (int k = 0; k < i; k++)
        memory += operand_room(u->o, k, u->o->piece);
    return memory;
}
// Begins the copies of a piece's operands into its slot, which the piece before in that slot has left.
static void update_arrive(struct update *u, struct update_piece *p, int slot) {
    struct timeline *t = u->o->zero->timeline;
    for (int i = 0; i < OPERAND_COUNT; i++) {
        const struct update_operand operand = update_operand_of(u->o, p, i);
        if (operand.on_host)
            p->arrival = timeline_transfer(t, TRANSFER_TO_DEVICE, "", piece_memory(u, &operand, slot, i),
                                           operand.memory, operand.bytes);
    }
}
// Updates a piece, which has arrived, and begins the copies back. Once all of a sharded bucket is updated, begins the
// all-gather of its parameters.
static void update_finish(struct update *u, struct update_piece *p, int slot) {
    struct zero *z = u->o->zero;
    struct update_operand operands[OPERAND_COUNT];
    char *memory[OPERAND_COUNT], name[64];
    for (int i = 0; i < OPERAND_COUNT; i++) {
        operands[i] = update_operand_of(u->o, p, i);
        memory[i] = operands[i].memory ? piece_memory(u, &operands[i], slot, i) : NULL;
    }
    timeline_transfer_wait(z->timeline, &p->arrival);
    update_compute(u, p, memory);
    for (int i = 0; i < OPERAND_COUNT; i++)
        if (operands[i].on_host && operands[i].changes)
            p->leaving =
                timeline_transfer(z->timeline, TRANSFER_TO_HOST, "", operands[i].memory, memory[i], operands[i].bytes);
    if (p->bucket >= 0 && !shards_parameters(&z->shards))
        z->params_tickets[p->bucket] = collective_all_gather(
            z->collectives, z->params + p->b->begin, z->params + shards_own_begin(&z->shards, p->b),
            (size_t)p->b->shard * sizeof *z->params, unit_name(z, p->b->unit, name, "updated parameters"),
            z->timeline->dev);
}
// Takes up the next piece: its operands arrive while the piece before is updated.
static void update_add(struct update *u, struct update_piece piece) {
    const int slot = u->count % UPDATE_SLOTS, before = (u->count + UPDATE_SLOTS - 1) % UPDATE_SLOTS;
    if (u->count >= UPDATE_SLOTS)
        timeline_transfer_wait(u->o->zero->timeline, &u->pieces[slot].leaving);
    u->pieces[slot] = piece;
    update_arrive(u, &u->pieces[slot], slot);
    if (u->count > 0)
        update_finish(u, &u->pieces[before], before);
    u->count++;
}
static void update_end(struct update *u) {
    const int last = (u->count + UPDATE_SLOTS - 1) % UPDATE_SLOTS;
    if (u->count > 0)
        update_finish(u, &u->pieces[last], last);
    for (int i = 0; i < UPDATE_SLOTS && i < u->count; i++)
        timeline_transfer_wait(u->o->zero->timeline, &u->pieces[i].leaving);
}
// Cuts elements [at, end) of the flat buffers, of bucket `index` (-1: this rank is unsharded), into pieces.
static void update_range(struct update *u, int64_t at, int64_t end, int index) {
    const struct optimizer *o = u->o;
    const struct zero *z = o->zero;
    const bool all = z->params_on_host || z->grads_on_host;
    while (at < end) {
        struct update_piece p = {at, end - at, index < 0 ? NULL : &z->shards.buckets[index], -1, 0, 0};
        const int64_t below = o->cut - piece_place(o, &p, optimizer_is_sharded(o)); // elements before the cut
        if (below > 0 && p.n > below)
            p.n = below;
        if ((all || below <= 0) && p.n > o->piece) // streamed
            p.n = o->piece;
        at += p.n;
        p.bucket = at == end ? index : -1;
        update_add(u, p);
    }
}

// Enqueues the update of all that this rank owns. Where it is sharded the embeddings are first: what the next forward
// needs first is gathered while the rest is updated. *check, in the device's memory, holds the clipping or forbids the
// update. slots: optimizer_slots.
static void optimizer_update(struct optimizer *o, struct adamw adamw, const struct gradient_check *check, void *slots) {
    struct zero *z = o->zero;
    const struct shards *s = &z->shards;
    struct update u;
    memset(&u, 0, sizeof u);
    u.o = o;
    u.adamw = adamw;
    u.check = check;
    u.slots = (char *)slots;
    if (o->fp8->weight_amaxes)
        device_zero(o->fp8->weight_amaxes, fp8_amaxes_bytes(o->fp8), z->timeline->dev);
    if (!optimizer_is_sharded(o))
        update_range(&u, 0, s->flat, -1);
    for (int i = s->count - 1; i >= 0 && optimizer_is_sharded(o); i--) {
        const int64_t own = shards_own_begin(s, &s->buckets[i]);
        update_range(&u, own, own + s->buckets[i].shard, i);
    }
    update_end(&u);
}

static size_t optimizer_squares_workspace_bytes(const struct optimizer *o) {
    return squares_of_ranges_workspace_bytes(o->zero->shards.count);
}
// *squares (device memory) = the sum of squares of the gradients of this rank's shards: bucket by bucket in every
// stage, so that all stages have the norm in the same bits. Waits for reductions in flight, for those of the last unit
// after the sums of all others, as they run behind backward. `ws`: optimizer_squares_workspace_bytes.
static void optimizer_sum_squares(struct optimizer *o, double *squares, void *ws) {
    struct zero *z = o->zero;
    const struct shards *s = &z->shards;
    const bool waits = s->ranks > 1 && !shards_gradients(s);
    const int ends[] = {waits ? s->first[s->units - 1] : 0, s->count};
    for (int group = 0, first = 0; group < 2; first = ends[group++]) {
        for (int i = first; i < ends[group] && waits; i++)
            collective_wait(z->collectives, z->grads_tickets[i], z->timeline->dev);
        squares_of_ranges(ws, z->grads, z->grads_format, o->buckets, first, ends[group], z->timeline->dev);
    }
    squares_total(squares, s->count, ws, z->timeline->dev);
}
