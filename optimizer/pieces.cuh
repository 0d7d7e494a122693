// The update, piece by piece. What lies in the host's memory is streamed through three slots of device memory: while
// one piece is updated, the next arrives and the previous one leaves. The results are as without offload, to the bit.
#pragma once
#include "kernels/adamw.cuh"    // adamw_update
#include "kernels/averages.cuh" // averages_update, averages_swap
#include "kernels/muon.cuh"     // muon_momentum, muon_step
#include "optimizer/muon.cuh"   // struct muon
#include "optimizer/state.cuh"  // struct optimizer
#include "zero/units.cuh"       // struct zero

enum { OPERAND_PARAMETERS = STATE_COUNT, OPERAND_GRADIENTS, OPERAND_COUNT };

enum update_kind {
    WORK_ADAMW,    // all of an element's update by AdamW
    WORK_MOMENTUM, // Muon's first half: the momentum, and what is to be orthogonalized of it
    WORK_STEP,     // Muon's second half: the step along the orthogonal factors
    WORK_AVERAGES, // the moving averages of updated parameters
    WORK_SWAP,     // averages and parameters change places
};
static bool update_covers(enum update_kind work, enum state_group group) {
    switch (work) {
    case WORK_ADAMW: return group != GROUP_MUON;
    case WORK_MOMENTUM:
    case WORK_STEP: return group == GROUP_MUON;
    case WORK_AVERAGES:
    case WORK_SWAP: return true;
    }
    return false;
}
// Whether the work reads an operand: a state (enum optimizer_state) or OPERAND_*.
static bool update_reads(enum update_kind work, int operand) {
    switch (work) {
    case WORK_ADAMW: return operand != STATE_MOMENTUM && operand != STATE_AVERAGES;
    case WORK_MOMENTUM: return operand == STATE_MOMENTUM || operand == OPERAND_GRADIENTS;
    case WORK_STEP: return operand == STATE_MASTER || operand == OPERAND_PARAMETERS;
    case WORK_AVERAGES:
    case WORK_SWAP: return operand == STATE_MASTER || operand == STATE_AVERAGES || operand == OPERAND_PARAMETERS;
    }
    return false;
}
static bool update_changes(enum update_kind work, int operand) {
    return work == WORK_AVERAGES ? operand == STATE_AVERAGES
                                 : update_reads(work, operand) && operand != OPERAND_GRADIENTS;
}

// A range of elements of one group, in this rank's shard of a bucket or, if unsharded, anywhere in the flat buffers.
struct update_piece {
    int64_t at, n; // elements of the flat buffers
    enum state_group group;
    const struct bucket *b; // NULL: unsharded
    int bucket;             // index of the bucket whose parameters are gathered after this piece; -1: none
    uint64_t arrival;       // ticket of the last operand's transfer to the device; 0: none
    uint64_t leaving;       // ticket of the last operand's transfer back; 0: none
};

struct update_operand {
    char *memory; // NULL: the optimizer has no such state
    size_t bytes;
    bool on_host;
};

// Returns the index of a piece's first element in this rank's buffer, which has only the rank's shards if `sharded`.
static int64_t piece_place(const struct optimizer *o, const struct update_piece *p, bool sharded) {
    return p->b ? shards_place(&o->zero->shards, p->b, p->at, sharded) : p->at;
}
// Returns where a piece's operand is. memory is NULL if this rank has no such state; bytes is 0 if p->group has none.
static struct update_operand update_operand_of(const struct optimizer *o, const struct update_piece *p, int operand) {
    const struct zero *z = o->zero;
    struct update_operand result = {NULL, 0, false};
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
    } else if (optimizer_holds(o, (enum optimizer_state)operand)) {
        const enum optimizer_state id = (enum optimizer_state)operand;
        const int64_t place = piece_place(o, p, shards_optimizer(&z->shards));
        int64_t count; // all: pieces do not cross the cut
        result.memory = state_address(o, id, place, p->n, &count, &result.on_host);
        result.bytes = state_offset(o, id, place + p->n) - state_offset(o, id, place);
    }
    return result;
}
// The number of aligned bytes of a slot for n elements of an operand, in its largest format; 0 if none is on the host.
static size_t operand_room(const struct optimizer *o, int operand, int64_t n) {
    size_t bytes = 0;
    if (operand == OPERAND_PARAMETERS)
        bytes = o->zero->params_on_host ? (size_t)n * sizeof *o->zero->params : 0;
    else if (operand == OPERAND_GRADIENTS)
        bytes = o->zero->grads_on_host ? state_bytes(o->zero->grads_format, n) : 0;
    else if (o->states[operand].host_id >= 0) {
        for (int group = 0; group < STATE_GROUPS; group++) {
            const size_t of_group = state_bytes(o->states[operand].formats[group], n);
            bytes = of_group > bytes ? of_group : bytes;
        }
    }
    return plan_aligned(bytes);
}
// The number of bytes of a slot for pieces of n elements: the sum of what each streamed operand needs.
static size_t slot_room(const struct optimizer *o, int64_t n) {
    size_t bytes = 0;
    for (int i = 0; i < OPERAND_COUNT; i++)
        bytes += operand_room(o, i, n);
    return bytes;
}

// The approximate bytes of a slot. On a GPU: large enough for the bus to reach its full speed, and small beside the
// activations, which are dead during the update. On the CPU: within a core's cache. Tests define other sizes.
#ifndef UPDATE_SLOT_BYTES
#define UPDATE_SLOT_BYTES(dev) (device_is_gpu(dev) ? 64 << 20 : 1 << 20)
#endif

// Returns the slots for pieces, (UPDATE_SLOTS, o->slot_bytes) on the device, live in this phase; NULL where nothing is
// streamed, and while the plan is recorded. Planning sets sizes and, if `records`, plans an update's transfers.
static void *optimizer_slots(struct optimizer *o, bool records) {
    struct timeline *t = o->zero->timeline;
    if (t->planning) {
        const size_t block = slot_room(o, STATE_BLOCK * STATE_BLOCK) / STATE_BLOCK; // about, of STATE_BLOCK elements
        int64_t blocks = block > 0 ? (int64_t)((size_t)UPDATE_SLOT_BYTES(t->dev) / block) : 0;
        blocks = blocks > o->elements / STATE_BLOCK ? o->elements / STATE_BLOCK : blocks;
        o->piece = block > 0 ? (blocks > 0 ? blocks : 1) * STATE_BLOCK : 0;
        o->slot_bytes = slot_room(o, o->piece);
    }
    if (o->piece == 0)
        return NULL;
    void *slots = timeline_buffer(t, &o->slots_id, UPDATE_SLOTS * o->slot_bytes, "update", "pieces of the update", -1);
    for (int i = 0; i < OPERAND_COUNT && t->planning && records; i++) {
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
        if (o->config->training.ema_decay > 0 && update_reads(WORK_AVERAGES, i) && i != STATE_AVERAGES) // a second time
            timeline_transfer(t, TRANSFER_TO_DEVICE, name, NULL, NULL, bytes);
        if (i != OPERAND_GRADIENTS)
            timeline_transfer(t, TRANSFER_TO_HOST, name, NULL, NULL, bytes);
    }
    return slots;
}

struct update {
    struct optimizer *o;
    struct adamw adamw; // Muon too uses its learning rate and decay
    const struct gradient_check *check;
    char *slots;
    enum update_kind work;
    struct update_piece pieces[UPDATE_SLOTS]; // the last ones, by slot
    int count;                                // of pieces so far
    // of a wave of Muon's
    const struct muon *muon;
    const struct muon_wave *wave;
    floatX *update; // of struct muon_buffers
};

static void compute_adamw(const struct update *u, const struct update_piece *p, char *const memory[OPERAND_COUNT]) {
    const struct optimizer *o = u->o;
    struct adamw_range r;
    r.params = (floatX *)memory[OPERAND_PARAMETERS];
    r.remainder = (uint16_t *)memory[STATE_MASTER];
    r.grads = memory[OPERAND_GRADIENTS];
    r.grads_format = o->zero->grads_format;
    r.m = memory[STATE_MOMENT1];
    r.m_format = o->states[STATE_MOMENT1].formats[p->group];
    r.v = memory[STATE_MOMENT2];
    r.v_format = o->states[STATE_MOMENT2].formats[p->group];
    r.n = p->n;
    r.begin = p->at;
    adamw_update(r, o->tensors, u->adamw, u->check, o->zero->timeline->dev);
}
// Returns the address of a piece's elements in u->update, where factors later replace what is to be orthogonalized.
static floatX *piece_in_wave(const struct update *u, const struct update_piece *p) {
    return u->update + (piece_place(u->o, p, optimizer_is_sharded(u->o)) - u->wave->place);
}
// Enqueues Muon's first half on a piece: updates the momentum, and writes what is to be orthogonalized to u->update.
static void compute_momentum(const struct update *u, const struct update_piece *p, char *const memory[OPERAND_COUNT]) {
    const struct optimizer *o = u->o;
    struct muon_momentum_range r;
    r.grads = memory[OPERAND_GRADIENTS];
    r.grads_format = o->zero->grads_format;
    r.momentum = memory[STATE_MOMENTUM];
    r.format = o->states[STATE_MOMENTUM].formats[p->group];
    r.update = piece_in_wave(u, p);
    r.n = p->n;
    r.begin = p->at;
    r.mu = o->config->training.muon_momentum;
    r.nesterov = o->config->training.muon_nesterov;
    muon_momentum(r, o->tensors, u->check, o->zero->timeline->dev);
}
// Enqueues Muon's second half on a piece: moves the parameters along the orthogonal factors, which u->update holds.
static void compute_muon_step(const struct update *u, const struct update_piece *p, char *const memory[OPERAND_COUNT]) {
    struct muon_step_range r;
    r.params = (floatX *)memory[OPERAND_PARAMETERS];
    r.remainder = (uint16_t *)memory[STATE_MASTER];
    r.factor = piece_in_wave(u, p);
    r.n = p->n;
    r.begin = p->at;
    r.lr = u->adamw.lr;
    r.weight_decay = u->adamw.weight_decay;
    r.rounding = adamw_rounding(&u->adamw);
    muon_step(r, u->o->tensors, u->muon->table, u->check, u->o->zero->timeline->dev);
}
// Enqueues an update of a piece's moving averages, with lower decay early on. WORK_SWAP only swaps them and parameters.
static void compute_averages(const struct update *u, const struct update_piece *p, char *const memory[OPERAND_COUNT]) {
    // Early on the average is of the steps so far, not of what the parameters began as.
    const double t = (double)u->adamw.step, early = (1 + t) / (10 + t), decay = u->o->config->training.ema_decay;
    const struct averages_range r = {(floatX *)memory[OPERAND_PARAMETERS], (uint16_t *)memory[STATE_MASTER],
                                     (float *)memory[STATE_AVERAGES], p->n};
    if (u->work == WORK_SWAP)
        averages_swap(r, u->o->zero->timeline->dev);
    else
        averages_update(r, (float)(decay < early ? decay : early), u->check, u->o->zero->timeline->dev);
}
// Enqueues u->work on a piece. memory: where the piece's operands are on the device; NULL: this rank has no such state.
static void update_compute(const struct update *u, const struct update_piece *p, char *const memory[OPERAND_COUNT]) {
    switch (u->work) {
    case WORK_ADAMW: compute_adamw(u, p, memory); break;
    case WORK_MOMENTUM: compute_momentum(u, p, memory); break;
    case WORK_STEP: compute_muon_step(u, p, memory); break;
    case WORK_AVERAGES:
    case WORK_SWAP: compute_averages(u, p, memory); break;
    }
}

// Returns where `operand`, update_operand_of's for `id`, is on the device: in the slot if streamed, else in its buffer.
static char *piece_memory(const struct update *u, const struct update_operand *operand, int slot, int id) {
    if (!operand->on_host)
        return operand->memory;
    char *memory = u->slots + (size_t)slot * u->o->slot_bytes;
    for (int k = 0; k < id; k++)
        memory += operand_room(u->o, k, u->o->piece);
    return memory;
}
// Begins to copy a piece's operands from the host into a slot. The caller has waited for the slot's previous piece.
static void update_prefetch_piece(struct update *u, struct update_piece *p, int slot) {
    struct timeline *t = u->o->zero->timeline;
    for (int i = 0; i < OPERAND_COUNT; i++) {
        const struct update_operand operand = update_operand_of(u->o, p, i);
        if (operand.on_host && update_reads(u->work, i))
            p->arrival = timeline_transfer(t, TRANSFER_TO_DEVICE, "", piece_memory(u, &operand, slot, i),
                                           operand.memory, operand.bytes);
    }
}
// Begins to all-gather an updated bucket's parameters; zero_use waits. Call it only in stages 1 and 2, on every rank.
static void update_gather(struct zero *z, int bucket) {
    const struct bucket *b = &z->shards.buckets[bucket];
    char name[64];
    z->params_tickets[bucket] = collective_all_gather(
        z->collectives, z->params + b->begin, z->params + shards_own_begin(&z->shards, b),
        (size_t)b->shard * sizeof *z->params, unit_name(z, b->unit, name, "updated parameters"), z->timeline->dev);
}
// Enqueues a piece's update, before which the device waits for the piece. Then begins to copy the changed operands that
// belong on the host back. If p->bucket is not -1, begins to all-gather its parameters, unless they stay sharded.
static void update_finish(struct update *u, struct update_piece *p, int slot) {
    struct zero *z = u->o->zero;
    struct update_operand operands[OPERAND_COUNT];
    char *memory[OPERAND_COUNT];
    for (int i = 0; i < OPERAND_COUNT; i++) {
        operands[i] = update_operand_of(u->o, p, i);
        memory[i] = operands[i].memory ? piece_memory(u, &operands[i], slot, i) : NULL;
    }
    timeline_transfer_wait(z->timeline, &p->arrival);
    update_compute(u, p, memory);
    for (int i = 0; i < OPERAND_COUNT; i++)
        if (operands[i].on_host && update_changes(u->work, i))
            p->leaving =
                timeline_transfer(z->timeline, TRANSFER_TO_HOST, "", operands[i].memory, memory[i], operands[i].bytes);
    if (p->bucket >= 0 && !shards_parameters(&z->shards))
        update_gather(z, p->bucket);
}
// Begins to bring in a piece, and enqueues the previous piece's update; update_finish_pieces enqueues the last piece's.
static void update_add_piece(struct update *u, struct update_piece piece) {
    const int slot = u->count % UPDATE_SLOTS, before = (u->count + UPDATE_SLOTS - 1) % UPDATE_SLOTS;
    if (u->count >= UPDATE_SLOTS)
        timeline_transfer_wait(u->o->zero->timeline, &u->pieces[slot].leaving);
    u->pieces[slot] = piece;
    update_prefetch_piece(u, &u->pieces[slot], slot);
    if (u->count > 0)
        update_finish(u, &u->pieces[before], before);
    u->count++;
}
// Enqueues the last piece's update, if any, and makes later device work wait for copies to the host. Zeroes u->count.
static void update_finish_pieces(struct update *u) {
    const int last = (u->count + UPDATE_SLOTS - 1) % UPDATE_SLOTS;
    if (u->count > 0)
        update_finish(u, &u->pieces[last], last);
    for (int i = 0; i < UPDATE_SLOTS && i < u->count; i++)
        timeline_transfer_wait(u->o->zero->timeline, &u->pieces[i].leaving);
    u->count = 0;
}
// Enqueues u->work, piece by piece, on the elements of [at, end) that it covers; update_finish_pieces ends the last
// piece. The range lies in this rank's shard of bucket `index`; index -1: states are unsharded. With `gathers`, the
// bucket's all-gather follows the piece that ends at `end`, if the work covers that piece.
static void update_range(struct update *u, int64_t at, int64_t end, int index, bool gathers) {
    const struct optimizer *o = u->o;
    const struct zero *z = o->zero;
    const bool all = z->params_on_host || z->grads_on_host;
    while (at < end) {
        int64_t run_end;
        struct update_piece p = {
            at, 0, optimizer_group_at(o, at, &run_end), index < 0 ? NULL : &z->shards.buckets[index], -1, 0, 0};
        p.n = (run_end < end ? run_end : end) - at;
        const int64_t below = o->cut - piece_place(o, &p, optimizer_is_sharded(o)); // elements before the cut
        if (below > 0 && p.n > below)
            p.n = below;
        if ((all || below <= 0) && p.n > o->piece) // streamed
            p.n = o->piece;
        at += p.n;
        p.bucket = at == end && gathers ? index : -1;
        if (update_covers(u->work, p.group))
            update_add_piece(u, p);
    }
}
// Enqueues WORK_MOMENTUM or WORK_STEP on all of this rank's elements of a wave. The caller sets u->muon and u->update.
static void update_wave(struct update *u, enum update_kind work, const struct muon_wave *w) {
    const struct shards *s = &u->o->zero->shards;
    u->work = work;
    u->wave = w;
    if (!optimizer_is_sharded(u->o))
        update_range(u, w->begin, w->stop, -1, false);
    for (int i = 0; i < s->count && optimizer_is_sharded(u->o); i++) {
        const int64_t own = shards_own_begin(s, &s->buckets[i]), end = own + s->buckets[i].shard;
        if (own < w->stop && end > w->begin)
            update_range(u, own > w->begin ? own : w->begin, end < w->stop ? end : w->stop, i, false);
    }
    update_finish_pieces(u);
}

// Whether any rank's shard of a bucket has elements of a matrix that Muon updates, even if only a part of the matrix.
static bool bucket_has_muon_matrices(const struct optimizer *o, const struct bucket *b) {
    const int64_t stop = b->begin + o->zero->shards.ranks * b->shard;
    for (int64_t at = b->begin, end; at < stop; at = end)
        if (optimizer_group_at(o, at, &end) == GROUP_MUON)
            return true;
    return false;
}
// Returns an update without pieces yet. check, in device memory, and slots, from optimizer_slots, must outlive it.
static struct update update_of(struct optimizer *o, struct adamw adamw, const struct gradient_check *check,
                               void *slots) {
    struct update u;
    memset(&u, 0, sizeof u);
    u.o = o;
    u.adamw = adamw;
    u.check = check;
    u.slots = (char *)slots;
    return u;
}
