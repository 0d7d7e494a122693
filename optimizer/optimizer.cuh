// Updates this rank's parameters, by AdamW and Muon, and their moving averages. Sums the gradients' squares.
#pragma once
#include "kernels/fp8/cast.cuh"  // fp8_amax
#include "kernels/gradients.cuh" // squares_of_ranges, squares_total
#include "model/fp8.cuh"         // fp8_weight_amaxes_bytes
#include "optimizer/pieces.cuh"  // struct update, update_range

// Enqueues one kind of work on the elements that it covers and whose states this rank has; if states are sharded,
// bucket by bucket from the last to the first. With `gathers`, then begins to all-gather a bucket's parameters, unless
// parameters stay sharded. except_matrices leaves out the all-gathers of buckets that have matrices of Muon's.
static void update_all(struct update *u, enum update_kind work, bool gathers, bool except_matrices) {
    const struct optimizer *o = u->o;
    const struct shards *s = &o->zero->shards;
    u->work = work;
    if (!optimizer_is_sharded(o))
        update_range(u, 0, s->flat, -1, false);
    for (int i = s->count - 1; i >= 0 && optimizer_is_sharded(o); i--) {
        const int64_t own = shards_own_begin(s, &s->buckets[i]);
        update_range(u, own, own + s->buckets[i].shard, i,
                     gathers && !(except_matrices && bucket_has_muon_matrices(o, &s->buckets[i])));
    }
    update_finish_pieces(u);
}
// Enqueues AdamW's update of all that this rank owns but Muon's matrices. In stages 1 and 2 begins to all-gather the
// buckets without such matrices. Zeroes FP8 weights' amaxes, which updates then collect. *check, on the device, scales
// gradients or forbids the update. slots: from optimizer_slots. First wait for the reductions. Every rank calls this.
static void optimizer_update(struct optimizer *o, struct adamw adamw, const struct gradient_check *check, void *slots) {
    struct update u = update_of(o, adamw, check, slots);
    if (o->fp8->weight_amaxes)
        device_zero(o->fp8->weight_amaxes, fp8_weight_amaxes_bytes(o->fp8), o->zero->timeline->dev);
    update_all(&u, WORK_ADAMW, true, true);
}
static size_t optimizer_squares_workspace_bytes(const struct optimizer *o) {
    return squares_of_ranges_workspace_bytes(o->zero->shards.count, o->zero->timeline->dev);
}
// Enqueues *squares = the sum of squares of this rank's shards of the gradients, after the reductions in flight.
// *squares and gradients lie on the device. The bits are equal in every stage. ws: optimizer_squares_workspace_bytes.
static void optimizer_sum_squares(struct optimizer *o, double *squares, void *ws) {
    struct zero *z = o->zero;
    const struct shards *s = &z->shards;
    const bool waits = s->ranks > 1 && !shards_gradients(s);
    const int ends[] = {waits ? s->first[s->units - 1] : 0, s->count}; // the last unit's reduction ends last
    for (int group = 0, first = 0; group < 2; first = ends[group++]) {
        for (int i = first; i < ends[group] && waits; i++)
            collective_wait(z->collectives, z->grads_tickets[i], z->timeline->dev);
        squares_of_ranges(ws, z->grads, z->grads_format, o->buckets, first, ends[group], z->timeline->dev);
    }
    squares_total(squares, s->count, ws, z->timeline->dev);
}

// Computes, enqueued, FP8 weights' amaxes if parameters were set or swapped. Does nothing if updates collect none.
static void optimizer_compute_weight_amaxes(struct optimizer *o) {
    const struct zero *z = o->zero;
    if (o->fp8->weight_amaxes == NULL || o->fp8->weights_known)
        return;
    device_zero(o->fp8->weight_amaxes, fp8_weight_amaxes_bytes(o->fp8), z->timeline->dev);
    for (int i = 0; i < z->table->num_tensors; i++) {
        const struct tensor *t = &z->table->tensors[i];
        uint32_t *amax = optimizer_amax(o, t);
        if (amax)
            fp8_amax(amax, z->params + t->offset, t->count, z->timeline->dev);
    }
    o->fp8->weights_known = true;
}

// ---- Moving averages ----

// Enqueues this rank's update of moving averages. Needs --ema-decay. Follows the updates, with equal adamw and check.
static void optimizer_update_averages(struct optimizer *o, struct adamw adamw, const struct gradient_check *check,
                                      void *slots) {
    struct update u = update_of(o, adamw, check, slots);
    update_all(&u, WORK_AVERAGES, false, false);
}
// Enqueues a swap of this rank's parameters with their moving averages (--ema-decay), after all-gathers in flight. In
// stages 1 and 2 begins to gather the new ones. slots: from optimizer_slots, in this phase. Every rank calls this.
static void optimizer_swap_averages(struct optimizer *o, void *slots) {
    const struct adamw none = {0, 0, 0, 0, 0, 0, 0, 0};
    struct update u = update_of(o, none, NULL, slots);
    zero_wait_for_updates(o->zero);
    update_all(&u, WORK_SWAP, true, false);
    o->fp8->weights_known = false;
}
// ---- Muon ----

// Begins to all-gather the buckets of Muon's matrices whose updates wave w completes. *bucket is the next to look at,
// at first the last bucket. Does nothing except in stages 1 and 2 of several ranks. Every rank calls this.
static void muon_gather_parameters(const struct muon *m, const struct muon_wave *w, int *bucket) {
    struct zero *z = m->o->zero;
    const int64_t before = w == m->waves ? 0 : w[-1].stop; // waves that are still to come have elements below
    if (!optimizer_is_sharded(m->o) || shards_parameters(&z->shards))
        return;
    for (; *bucket >= 0 && z->shards.buckets[*bucket].begin >= before; --*bucket)
        if (bucket_has_muon_matrices(m->o, &z->shards.buckets[*bucket]))
            update_gather(z, *bucket);
}
// Enqueues Muon's update of m's matrices, at least one, after optimizer_update with equal adamw and check. Stages 1 and
// 2 begin to all-gather the buckets. slots: optimizer_slots of this phase. Every rank calls this, also in planning.
static void optimizer_update_matrices(struct muon *m, struct adamw adamw, const struct gradient_check *check,
                                      void *slots) {
    struct timeline *t = m->o->zero->timeline;
    struct update u = update_of(m->o, adamw, check, slots);
    const struct muon_buffers b = muon_buffers_of(m);
    int bucket = m->o->zero->shards.count - 1;
    u.muon = m;
    u.update = b.update;
    for (int i = m->num_waves - 1; i >= 0 && !timeline_is_planning(t); i--) {
        const struct muon_wave *w = &m->waves[i];
        TIMELINE_RUN(t, update_wave(&u, WORK_MOMENTUM, w));
        muon_orthogonalize(m, w, b);
        TIMELINE_RUN(t, update_wave(&u, WORK_STEP, w));
        TIMELINE_RUN(t, muon_gather_parameters(m, w, &bucket));
    }
}
