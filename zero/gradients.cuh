// The gradients of units: their reduction over ranks, and the stored sum over micro-steps, which may be on the host.
#pragma once
#include "kernels/collectives.cuh" // collective_reduce_scatter, collective_all_gather
#include "kernels/gradients.cuh"   // add_gradients, sum_of_squares
#include "zero/units.cuh"          // struct zero

// A part of a unit's stored gradients, for one slot: buckets [first, end), elements [place, place + n) of z->grads.
struct stored {
    int first, end;
    int64_t place, n;
};
// Whether a unit's stored gradients pass through two slots of one bucket each, rather than through one slot for all.
// Only the head and the embeddings do, if larger than a layer and of more than two buckets.
static bool unit_is_streamed(const struct zero *z, int unit) {
    const struct shards *s = &z->shards;
    return unit_layer(z, unit) < 0 && unit_elements(z, unit) > unit_elements(z, unit_of_layer(z->table, 0)) &&
           s->first[unit + 1] - s->first[unit] > 2;
}
// Returns a unit's stored gradients of `bucket`, an index over all units, and, unless streamed, of its later buckets.
static struct stored stored_range_of(const struct zero *z, int unit, int bucket) {
    const struct shards *s = &z->shards;
    struct stored stored;
    stored.first = bucket;
    stored.end = unit_is_streamed(z, unit) ? bucket + 1 : s->first[unit + 1];
    const struct bucket *first = &s->buckets[stored.first], *last = &s->buckets[stored.end - 1];
    stored.place = first->begin / s->ranks;
    stored.n = last->begin / s->ranks + last->shard - stored.place;
    return stored;
}
// Returns a slot of device memory through which a unit's stored sums pass, live in this phase; NULL when planning. Slot
// 1 exists only for a unit that passes bucket by bucket (unit_is_streamed).
static void *stored_slot(struct zero *z, int unit, int slot) {
    const bool streamed = unit_is_streamed(z, unit);
    int64_t n = streamed ? 0 : unit_elements(z, unit) / z->shards.ranks;
    for (int i = z->shards.first[unit]; i < z->shards.first[unit + 1] && streamed; i++)
        n = z->shards.buckets[i].shard > n ? z->shards.buckets[i].shard : n;
    const size_t bytes = state_bytes(z->grads_format, n);
    void *slots = timeline_buffer(z->timeline, &z->slots_ids[unit], streamed ? 2 * bytes : bytes, "gradients of a unit",
                                  "unit's stored gradients", unit_layer(z, unit));
    return address_after(slots, (size_t)slot * bytes);
}
// Returns the address of this rank's stored gradients from `place` on, a multiple of STATE_BLOCK; NULL when planning.
static void *stored_gradients(const struct zero *z, int64_t place) {
    return address_after(z->grads, state_bytes(z->grads_format, place));
}

// Begins, in this phase, to copy the stored sum of a unit's gradients into the unit's buffer; zero_begin_gradients
// waits. Does nothing in a step's first micro-step, without sums_in_unit_buffer, or if the copy has begun already.
static void zero_prefetch_gradients(struct zero *z, int unit) {
    char name[64];
    if (!sums_in_unit_buffer(z) || !z->adds_up || z->sums[unit] != UNIT_ABSENT || unit_elements(z, unit) == 0)
        return;
    float *sum = unit_gradients(z, unit);
    z->grads_loads[2 * unit] = timeline_transfer(z->timeline, TRANSFER_TO_DEVICE, unit_name(z, unit, name, "gradients"),
                                                 sum, stored_gradients(z, z->layout->unit_begin[unit]),
                                                 (size_t)unit_elements(z, unit) * sizeof *sum);
    z->sums[unit] = UNIT_IN_FLIGHT;
}
// Begins to copy a part of a unit's stored gradients from the host to a slot; add_to_host_gradients waits. In a step's
// first micro-step zeroes the slot instead, as there is no sum yet and add_shard leaves gaps unwritten.
static void load_stored(struct zero *z, int unit, struct stored stored, int slot) {
    struct timeline *t = z->timeline;
    const size_t bytes = state_bytes(z->grads_format, stored.n);
    void *to = stored_slot(z, unit, slot);
    char name[64];
    if (z->adds_up)
        z->grads_loads[2 * unit + slot] = timeline_transfer(
            t, TRANSFER_TO_DEVICE, unit_name(z, unit, name, "gradients"), to, stored_gradients(z, stored.place), bytes);
    else
        TIMELINE_RUN(t, device_zero(to, bytes, t->dev));
}
// Begins to load a unit's stored gradients into its slot 0, as load_stored does. The unit must not be empty. Does
// nothing if the unit is streamed or if its gradients use no slots.
static void prefetch_stored_gradients(struct zero *z, int unit) {
    if (z->grads_on_host && !sums_in_unit_buffer(z) && !unit_is_streamed(z, unit))
        load_stored(z, unit, stored_range_of(z, unit, z->shards.first[unit]), 0);
}
// Makes later device work wait until the gradients of unit z->storing are on the host, and keeps the memory that they
// are copied from live until now. Then sets z->storing to -1. Does nothing if z->storing is -1.
static void wait_for_stores(struct zero *z) {
    struct timeline *t = z->timeline;
    if (z->storing < 0)
        return;
    if (sums_in_unit_buffer(z))
        timeline_touch(unit_gradients(z, z->storing));
    else
        timeline_touch(stored_slot(z, z->storing, 0));
    timeline_transfer_wait(t, &z->grads_stores[0]);
    timeline_transfer_wait(t, &z->grads_stores[1]);
    z->storing = -1;
}

static void clear_gap(struct zero *z, float *from, int64_t n) {
    if (n > 0)
        TIMELINE_RUN(z->timeline, device_zero(from, (size_t)n * sizeof *from, z->timeline->dev));
}
// Zeroes the gaps between tensors in `whole`, a unit's gradients, which the gradient norm reads. Does nothing for NULL.
static void clear_gaps(struct zero *z, float *whole, int unit) {
    const int64_t begin = z->layout->unit_begin[unit], end = z->layout->unit_begin[unit + 1];
    int64_t at = begin; // after the tensors so far
    for (int i = 0; i < z->table->num_tensors && whole; i++) {
        const struct tensor *t = &z->table->tensors[i];
        if (t->offset < begin || t->offset >= end)
            continue;
        clear_gap(z, whole + at - begin, t->offset - at);
        at = t->offset + t->count;
    }
    if (whole)
        clear_gap(z, whole + at - begin, end - at);
}
// Begins a phase and prepares a unit's buffer of gradients, if it has one. With sums_in_unit_buffer, waits for the
// stored sum, or in a step's first micro-step zeroes the gaps. Otherwise backward overwrites the buffer; then
// prefetch_stored_gradients is called too, unless gradients are sharded.
static void zero_begin_gradients(struct zero *z, int unit) {
    struct timeline *t = z->timeline;
    if (!zero_buffers_gradients(z) || unit_elements(z, unit) == 0)
        return;
    timeline_phase(t, PHASES_BACKWARD, -1, "gradients begin");
    zero_prefetch_gradients(z, unit);
    if (unit + 1 < z->shards.units)
        zero_prefetch_gradients(z, unit + 1);
    if (!shards_gradients(&z->shards)) // else the load begins with the reduction
        prefetch_stored_gradients(z, unit);
    float *whole = unit_gradients(z, unit);
    if (z->sums[unit] == UNIT_IN_FLIGHT)
        timeline_transfer_wait(t, &z->grads_loads[2 * unit]);
    else if (sums_in_unit_buffer(z))
        clear_gaps(z, whole, unit);
    z->sums[unit] = UNIT_READY;
}

// Adds, enqueued, this rank's shard of bucket b in the unit's buffer `whole` to `sum` (b->shard), of grads_format.
// Rounds bf16 stochastically. A step's first micro-step overwrites `sum` instead. Gaps between tensors stay unwritten.
static void add_shard(struct zero *z, char *sum, const float *whole, const struct bucket *b) {
    const int64_t begin = shards_own_begin(&z->shards, b);
    const struct rounding r = {z->seed, (uint64_t)0 - (uint64_t)z->shards.rank, z->micro_step, 0, ROUNDING_GRADIENTS,
                               0}; // a rank's counter begins at its rank; less the rank, it is equal on all ranks
    add_gradients(sum, z->grads_format, whole + begin - z->layout->unit_begin[b->unit], begin, b->shard, z->tensors,
                  z->adds_up, r, z->timeline->dev);
}
// Adds the squares of `sum`, this rank's stored shard of a bucket, to *z->squares. Does nothing before a step's last
// micro-step. Call it in order of buckets: bucket 0 overwrites *z->squares. ws has sum_of_squares_workspace_bytes.
static void add_squares(struct zero *z, const void *sum, int bucket, void *ws) {
    if (z->last_micro_step)
        sum_of_squares(z->squares, sum, z->grads_format, z->shards.buckets[bucket].shard, bucket > 0, ws,
                       z->timeline->dev);
}
// Adds this rank's shards of `stored`'s buckets from a unit's `whole` to `sum`; a step's first micro-step overwrites
// `sum`. First waits for the reductions. Calls add_squares with ws for host gradients. Does nothing when planning.
static void add_to_stored(struct zero *z, void *sum, const float *whole, struct stored stored, void *ws) {
    const struct shards *s = &z->shards;
    const bool planning = z->timeline->planning;
    for (int i = stored.first; i < stored.end && s->ranks > 1 && !planning; i++) // all waits, then ops: one graph
        collective_wait(z->collectives, z->grads_tickets[i], z->timeline->dev);
    for (int i = stored.first; i < stored.end && !planning; i++) {
        const struct bucket *b = &s->buckets[i];
        char *at = (char *)sum + state_bytes(z->grads_format, b->begin / s->ranks - stored.place);
        TIMELINE_RUN(z->timeline, add_shard(z, at, whole, b));
        if (z->grads_on_host)
            TIMELINE_RUN(z->timeline, add_squares(z, at, i, ws));
    }
}
// Begins to copy the sum of a part, at `from` on the device, to the host. wait_for_stores waits for the copy.
static void store_gradients(struct zero *z, int unit, struct stored stored, const void *from, int slot) {
    char name[64];
    z->grads_stores[slot] =
        timeline_transfer(z->timeline, TRANSFER_TO_HOST, unit_name(z, unit, name, "gradients"),
                          stored_gradients(z, stored.place), from, state_bytes(z->grads_format, stored.n));
    z->storing = unit;
}
// Adds this rank's shards of `whole`, a unit's buffer, to the sum on the host, through the slots. First waits for their
// reductions. ws is for add_squares. Call prefetch_stored_gradients before, and wait_for_stores before and after.
static void add_to_host_gradients(struct zero *z, int unit, const float *whole, void *ws) {
    const struct shards *s = &z->shards;
    struct timeline *t = z->timeline;
    if (unit_is_streamed(z, unit))
        load_stored(z, unit, stored_range_of(z, unit, s->first[unit]), 0);
    for (int i = s->first[unit], slot = 0, end; i < s->first[unit + 1]; i = end, slot = 1 - slot) {
        const struct stored stored = stored_range_of(z, unit, i);
        end = stored.end;
        if (end < s->first[unit + 1]) {
            timeline_transfer_wait(t, &z->grads_stores[1 - slot]);
            load_stored(z, unit, stored_range_of(z, unit, end), 1 - slot);
        }
        timeline_transfer_wait(t, &z->grads_loads[2 * unit + slot]);
        void *sum = stored_slot(z, unit, slot);
        add_to_stored(z, sum, whole, stored, ws);
        store_gradients(z, unit, stored, sum, slot);
    }
}
// Adds this rank's shards in a unit's buffer of gradients to the stored sum on device or host, in a new phase. First
// waits for their reductions. With sums_in_unit_buffer the buffer is the sum already, and its copy to the host begins.
// Call prefetch_stored_gradients before. The next call, or zero_end_gradients, waits for copies to the host.
static void add_to_stored_sum(struct zero *z, int unit) {
    const struct shards *s = &z->shards;
    struct timeline *t = z->timeline;
    struct stored all;
    timeline_phase(t, PHASES_BACKWARD, -1, "collect gradients");
    float *whole = unit_gradients(z, unit);
    void *ws = z->grads_on_host ? timeline_workspace(t, sum_of_squares_workspace_bytes(t->dev)) : NULL;
    wait_for_stores(z);
    all.first = s->first[unit];
    all.end = s->first[unit + 1];
    all.place = z->layout->unit_begin[unit] / s->ranks;
    all.n = unit_elements(z, unit) / s->ranks;
    if (sums_in_unit_buffer(z)) {
        for (int i = all.first; i < all.end; i++)
            TIMELINE_RUN(t, add_squares(z, whole + s->buckets[i].begin - all.place, i, ws));
        store_gradients(z, unit, all, whole, 0);
    } else if (z->grads_on_host)
        add_to_host_gradients(z, unit, whole, ws);
    else
        add_to_stored(z, stored_gradients(z, all.place), whole, all, NULL);
}
// Begins to sum a unit's gradients over the ranks after its backward. Sharded gradients: in each micro-step, and
// zero_add_reduced waits. Whole ones: in the last micro-step, and the update waits. From stage 1 on only own shards get
// the sum. On one rank adds buffered gradients to the stored sum. May open a phase. Every rank calls this.
static void zero_reduce(struct zero *z, int unit) {
    const struct shards *s = &z->shards;
    struct timeline *t = z->timeline;
    char name[64];
    float *whole = NULL;
    if (unit_elements(z, unit) == 0)
        return;
    if (shards_gradients(s)) {
        timeline_phase(t, PHASES_BACKWARD, -1, "reduce gradients");
        whole = unit_gradients(z, unit);
        prefetch_stored_gradients(z, unit);
    } else if (zero_buffers_gradients(z)) {
        add_to_stored_sum(z, unit);
        return;
    } else if (s->ranks == 1 || !z->last_micro_step)
        return;
    else if (z->grads)
        whole = (float *)z->grads + z->layout->unit_begin[unit];
    for (int i = s->first[unit]; i < s->first[unit + 1] && !t->planning; i++) {
        const struct bucket *b = &s->buckets[i];
        float *at = whole + b->begin - z->layout->unit_begin[unit], *own = at + s->rank * b->shard;
        z->grads_tickets[i] = collective_reduce_scatter(z->collectives, own, at, b->shard,
                                                        unit_name(z, unit, name, "reduction of gradients"), t->dev);
        if (s->stage == 0)
            z->grads_tickets[i] = collective_all_gather(z->collectives, at, own, (size_t)b->shard * sizeof *at,
                                                        unit_name(z, unit, name, "gathering of gradients"), t->dev);
    }
}
// Adds this rank's shards of a unit's reduced gradients to the stored sum, in a new phase. Does nothing if unsharded.
static void zero_add_reduced(struct zero *z, int unit) {
    if (shards_gradients(&z->shards) && unit_elements(z, unit) > 0)
        add_to_stored_sum(z, unit);
}
// Makes later device work wait, in a new phase, for gradients on their way to the host. Does nothing if none go there.
static void zero_end_gradients(struct zero *z) {
    if (!z->grads_on_host)
        return;
    timeline_phase(z->timeline, PHASES_BACKWARD, -1, "store gradients");
    wait_for_stores(z);
}
