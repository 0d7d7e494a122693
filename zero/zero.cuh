// Which rank owns which ranges of the flat buffers, and the gathering and reducing of units (ZeRO: Rajbhandari et al.
// 2020, arXiv 1910.02054).
//
// A unit is a set of tensors that are gathered and reduced together: the head's, a layer's, or the embeddings'. Units
// are ranges of the flat buffers (model/parameters.cuh), in the order in which backward finishes their gradients. A
// unit is cut into buckets of at most --bucket-mib of fp32 gradients; a bucket is reduced as soon as its unit's
// gradients are complete. Each rank owns an equal shard of each bucket, so that every reduction and every all-gather is
// balanced. The shards are the same in every stage:
//
//   stage 0   each rank holds and updates everything; gradients are all-reduced
//   stage 1   a rank holds the optimizer state of its shards; gradients are reduced to shards, new parameters gathered
//   stage 2   gradients too: a unit's are reduce-scattered after its backward, in each micro-step
//   stage 3   parameters too: a unit's are gathered before it is used, in forward and again in backward
//
// Units are padded to a multiple of the ranks, so that any number of ranks divides every bucket. A rank's shards stand
// in a sharded buffer in the order of the buckets, without gaps: the shard of bucket b begins at b.begin / ranks.
//
// Offloading is the same schedule with copies over the bus: the host is one more rank, which holds what this rank
// would.
//
//   parameters   a unit's are copied into the buffer that a sharded unit is gathered into; where they are sharded too,
//                this rank's shards are, and the all-gather begins behind these copies
//   gradients    in fp32 on one rank the unit's buffer starts from the stored sum, a unit ahead, and backward adds to
//                it as it would in place. Else backward overwrites the buffer, which is reduced; this rank's shards
//                of it are added to the stored sum, which comes and goes by slots
//
// Gradients in bf16 take the second way wherever they lie: a micro-step's are summed in fp32 and rounded stochastically
// once, when they are added to the stored sum. None of this changes a bit of what the same number of ranks computes
// without offloading. Other numbers of ranks sum in another order, as they do in fp32.
#pragma once
#include "kernels/collectives.cuh"  // collective_reduce_scatter, collective_all_gather
#include "kernels/gradients.cuh"    // add_gradients, sum_of_squares
#include "kernels/state_format.cuh" // enum state_format
#include "model/parameters.cuh"     // struct parameters, TENSOR_ALIGNMENT
#include "model/timeline.cuh"       // struct timeline, enum pass

struct bucket {
    int64_t begin; // element of the flat buffers
    int64_t shard; // elements of each rank's shard: the bucket is [begin, begin + ranks * shard)
    int unit;
};

struct shards {
    int rank, ranks, stage;
    struct bucket *buckets; // in flat order
    int count;
    int *first; // (units + 1) unit u consists of buckets first[u] .. first[u + 1] - 1
    int units;
    int64_t flat; // elements of a whole flat buffer
    int64_t largest_shard;
};

// What a stage shards; with one rank, nothing.
static bool shards_optimizer(const struct shards *s) { return s->ranks > 1 && s->stage >= 1; }
static bool shards_gradients(const struct shards *s) { return s->ranks > 1 && s->stage >= 2; }
static bool shards_parameters(const struct shards *s) { return s->ranks > 1 && s->stage >= 3; }

// Cuts [begin, end) into buckets of at most about `most` elements, as equal as the alignment of their shards allows.
static void shards_cut(struct shards *s, int64_t begin, int64_t end, int64_t most, int unit) {
    const int64_t multiple = (int64_t)s->ranks * TENSOR_ALIGNMENT, n = end - begin;
    if (n == 0)
        return;
    const int64_t buckets = (n + most - 1) / most,
                  size = ((n + buckets - 1) / buckets + multiple - 1) / multiple * multiple;
    for (int64_t at = begin; at < end; at += size) {
        struct bucket *b = &s->buckets[s->count++];
        b->begin = at;
        b->shard = (end - at < size ? end - at : size) / s->ranks;
        b->unit = unit;
        s->largest_shard = b->shard > s->largest_shard ? b->shard : s->largest_shard;
    }
}

static struct shards shards_create(const struct flat_layout *layout, int units, int rank, int ranks, int stage,
                                   int64_t bucket_bytes) {
    const int64_t most = bucket_bytes > 0 ? bucket_bytes / (int64_t)sizeof(float) : layout->flat;
    struct shards s;
    memset(&s, 0, sizeof s);
    s.rank = rank;
    s.ranks = ranks;
    s.stage = stage;
    s.units = units;
    s.flat = layout->flat;
    s.buckets =
        (struct bucket *)calloc((size_t)(most > 0 ? s.flat / most : 0) + (size_t)s.units + 1, sizeof *s.buckets);
    s.first = (int *)calloc((size_t)s.units + 1, sizeof *s.first);
    if (!s.buckets || !s.first)
        fail("out of memory for the table of shards");
    for (int unit = 0; unit < s.units; unit++) {
        s.first[unit] = s.count;
        shards_cut(&s, layout->unit_begin[unit], layout->unit_begin[unit + 1], most, unit);
    }
    s.first[s.units] = s.count;
    return s;
}
static void shards_free(struct shards *s) {
    free(s->buckets);
    free(s->first);
    memset(s, 0, sizeof *s);
}

// Elements of a flat buffer on this rank, sharded or whole.
static int64_t shards_elements(const struct shards *s, bool sharded) { return sharded ? s->flat / s->ranks : s->flat; }

// The element of the whole flat buffer at which this rank's shard of a bucket begins.
static int64_t shards_own_begin(const struct shards *s, const struct bucket *b) {
    return b->begin + s->rank * b->shard;
}

// The index, in this rank's buffer (sharded or whole), of element `at` of the flat buffers, which is in this rank's
// shard of the bucket.
static int64_t shards_place(const struct shards *s, const struct bucket *b, int64_t at, bool sharded) {
    return sharded ? b->begin / s->ranks + at - shards_own_begin(s, b) : at;
}

// The next range of [*at, end) that this rank's buffer holds: [*at, *at + n) of the flat buffer, at index *place of
// this rank's buffer. Returns n; 0: nothing is left.
static int64_t shards_next(const struct shards *s, bool sharded, int64_t *at, int64_t end, int64_t *place) {
    if (!sharded) {
        *place = *at;
        return *at < end ? end - *at : 0;
    }
    for (int i = 0; i < s->count; i++) {
        const struct bucket *b = &s->buckets[i];
        const int64_t own = shards_own_begin(s, b), first = own > *at ? own : *at;
        const int64_t last = own + b->shard < end ? own + b->shard : end;
        if (first >= last)
            continue;
        *at = first;
        *place = shards_place(s, b, first, true);
        return last - first;
    }
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Units

// The parameters of a unit in one pass, or the stored sum of its gradients: whether they are in the unit's buffer.
enum unit_state { UNIT_ABSENT, UNIT_IN_FLIGHT, UNIT_READY };

// Where parameters and gradients lie and how gradients are stored.
struct zero_options {
    bool offload_weights, offload_gradients; // in the host's memory
    enum state_format grads_format;          // FORMAT_FP32 or FORMAT_BF16
    uint64_t seed;                           // of stochastic rounding
};

// The trained or the frozen tensors of this rank: parameters, and gradients of those that are trained. Whole or
// sharded, by the stage; units in use are whole in any case. A unit may have no tensors of the kind, and then no
// buckets.
struct zero {
    struct shards shards;
    const struct parameters *table;   // not owned
    const struct flat_layout *layout; // of the table; not owned
    struct timeline *timeline;        // not owned
    struct collectives *collectives;  // not owned; NULL with one rank, and while planning
    floatX *params;                   // NULL while planning
    void *grads;                      // of grads_format; NULL while planning, and where the model does not train
    bool params_on_host, grads_on_host;
    enum state_format grads_format;
    uint64_t seed;
    // Device memory, NULL while planning: where squares of gradients on the host are summed, and the number of the
    // micro-step, which each rank counts from its own rank on.
    double *squares;
    const uint64_t *micro_step;
    struct flat_tensors tensors;   // of the table, which is in the device's memory too; not owned
    bool adds_up, last_micro_step; // of this micro-step: the step has gradients already; it is the step's last
    uint64_t *params_tickets;      // (buckets) all-gathers of parameters in flight, 0: none
    uint64_t *params_loads;        // (buckets) transfers of parameters to the device in flight, 0: none
    uint64_t *grads_tickets;       // (buckets) reductions of gradients in flight, 0: none
    uint64_t *grads_loads;         // (units, 2) transfers of stored gradients to the device in flight, by slot
    uint64_t grads_stores[2];      // transfers of gradients of unit `storing` to the host in flight, by slot
    int storing;                   // -1: none
    enum unit_state *units;        // (PASS_COUNT, units) of parameters
    enum unit_state *sums;         // (units) where the buffers of gradients hold the stored sums
    int *params_ids;               // (PASS_COUNT, units) buffer of a unit's parameters, -1: none
    int *grads_ids;                // (units) buffer of a unit's gradients before they are reduced and stored, -1: none
    int *slots_ids;                // (units) buffer of a unit's stored gradients on the device, -1: none
};

// Sets up z, for the tensors of one of the table's layouts, on rank `rank` of `ranks`. The table and the timeline must
// outlive it; zero_free frees it.
static void zero_create(struct zero *z, const struct parameters *table, const struct flat_layout *layout,
                        struct timeline *timeline, int rank, int ranks, int stage, int64_t bucket_bytes,
                        struct zero_options options) {
    memset(z, 0, sizeof *z);
    z->shards = shards_create(layout, table->num_units, rank, ranks, stage, bucket_bytes);
    z->table = table;
    z->layout = layout;
    z->timeline = timeline;
    z->params_on_host = options.offload_weights;
    z->grads_on_host = options.offload_gradients;
    z->grads_format = options.grads_format;
    z->seed = options.seed;
    z->storing = -1;
    const size_t units = (size_t)z->shards.units, buckets = (size_t)z->shards.count + 1;
    z->params_tickets = (uint64_t *)calloc(buckets, sizeof *z->params_tickets);
    z->params_loads = (uint64_t *)calloc(buckets, sizeof *z->params_loads);
    z->grads_tickets = (uint64_t *)calloc(buckets, sizeof *z->grads_tickets);
    z->grads_loads = (uint64_t *)calloc(2 * units, sizeof *z->grads_loads);
    z->units = (enum unit_state *)calloc(PASS_COUNT * units, sizeof *z->units);
    z->sums = (enum unit_state *)calloc(units, sizeof *z->sums);
    z->params_ids = (int *)calloc(PASS_COUNT * units, sizeof *z->params_ids);
    z->grads_ids = (int *)calloc(2 * units, sizeof *z->grads_ids);
    if (!z->params_tickets || !z->params_loads || !z->grads_tickets || !z->grads_loads || !z->units || !z->sums ||
        !z->params_ids || !z->grads_ids)
        fail("out of memory for the table of shards");
    z->slots_ids = z->grads_ids + units;
    for (size_t i = 0; i < PASS_COUNT * units; i++)
        z->params_ids[i] = -1;
    for (size_t i = 0; i < 2 * units; i++)
        z->grads_ids[i] = -1;
}
static void zero_free(struct zero *z) {
    shards_free(&z->shards);
    free(z->params_tickets);
    free(z->params_loads);
    free(z->grads_tickets);
    free(z->grads_loads);
    free(z->units);
    free(z->sums);
    free(z->params_ids);
    free(z->grads_ids);
    memset(z, 0, sizeof *z);
}

// To be called when a region of the timeline begins: no unit is on the device then but where all are.
static void zero_begin_region(struct zero *z) {
    memset(z->units, 0, (size_t)PASS_COUNT * (size_t)z->shards.units * sizeof *z->units); // UNIT_ABSENT
    memset(z->sums, 0, (size_t)z->shards.units * sizeof *z->sums);
}
// To be called before a micro-step's forward. adds_up: an earlier micro-step of the step has made gradients; when
// planning, whether there is one that does. Else nothing of the step before is read: gradients are overwritten.
static void zero_begin_micro_step(struct zero *z, bool adds_up, bool last_micro_step) {
    z->adds_up = adds_up;
    z->last_micro_step = last_micro_step;
}

static int64_t unit_elements(const struct zero *z, int unit) {
    return z->layout->unit_begin[unit + 1] - z->layout->unit_begin[unit];
}
// Whether a unit's parameters, or gradients, are in a buffer of the unit while they are in use.
static bool zero_has_unit_parameters(const struct zero *z) {
    return shards_parameters(&z->shards) || z->params_on_host;
}
static bool zero_has_unit_gradients(const struct zero *z) {
    return shards_gradients(&z->shards) || z->grads_on_host || z->grads_format != FORMAT_FP32;
}
// Whether the buffer of a unit's gradients holds the stored sum, to which backward adds in place.
static bool zero_adds_in_place(const struct zero *z) {
    return z->grads_on_host && !shards_gradients(&z->shards) && z->grads_format == FORMAT_FP32;
}
// Whether backward adds to what the memory of gradients holds: to those of earlier micro-steps of the step. Else it
// overwrites them.
static bool zero_adds(const struct zero *z) {
    return z->adds_up && (!zero_has_unit_gradients(z) || zero_adds_in_place(z));
}
// Bytes of this rank's gradients.
static size_t zero_gradients_bytes(const struct zero *z) {
    return state_bytes(z->grads_format, shards_elements(&z->shards, shards_gradients(&z->shards)));
}

// The layer of a unit, -1: the head's or the embeddings'.
static int unit_layer(const struct zero *z, int unit) {
    const bool layer = unit != unit_of_head() && unit != unit_of_embeddings(z->table);
    return layer ? z->table->L - unit : -1;
}
// "parameters of layer 3", for messages about a collective.
static const char *unit_name(const struct zero *z, int unit, char text[64], const char *what) {
    if (unit == unit_of_head())
        snprintf(text, 64, "%s of the head", what);
    else if (unit == unit_of_embeddings(z->table))
        snprintf(text, 64, "%s of the embeddings", what);
    else
        snprintf(text, 64, "%s of layer %d", what, z->table->L - unit);
    return text;
}

// The buffers of a unit's parameters, and of its gradients until they are reduced and stored; NULL when planning.
static floatX *unit_parameters(struct zero *z, enum pass pass, int unit) {
    return (floatX *)timeline_buffer(z->timeline, &z->params_ids[(int)pass * z->shards.units + unit],
                                     (size_t)unit_elements(z, unit) * sizeof(floatX), "parameters of a unit",
                                     "unit's parameters", unit_layer(z, unit));
}
static float *unit_gradients(struct zero *z, int unit) {
    return (float *)timeline_buffer(z->timeline, &z->grads_ids[unit], (size_t)unit_elements(z, unit) * sizeof(float),
                                    "gradients of a unit", "unit's gradients", unit_layer(z, unit));
}
// `bytes` behind `base`; NULL, when planning, has nothing behind it.
static void *bytes_behind(void *base, size_t bytes) { return base ? (char *)base + bytes : NULL; }

// The address of a parameter, and of its gradient; NULL when planning. The tensor is one of the layout.
static floatX *zero_parameter(struct zero *z, enum pass pass, const struct tensor *t) {
    if (zero_has_unit_parameters(z)) {
        const int unit = unit_of(z->table, t);
        floatX *gathered = unit_parameters(z, pass, unit);
        return gathered ? gathered + t->offset - z->layout->unit_begin[unit] : NULL;
    }
    return z->params ? z->params + t->offset : NULL;
}
static float *zero_gradient(struct zero *z, const struct tensor *t) {
    if (zero_has_unit_gradients(z)) {
        const int unit = unit_of(z->table, t);
        float *whole = unit_gradients(z, unit);
        return whole ? whole + t->offset - z->layout->unit_begin[unit] : NULL;
    }
    return z->grads ? (float *)z->grads + t->offset : NULL;
}

// Makes later work of the device wait for a unit's collectives in flight, and clears their tickets.
static void unit_wait(struct zero *z, uint64_t *tickets, int unit) {
    for (int i = z->shards.first[unit]; i < z->shards.first[unit + 1]; i++) {
        collective_wait(z->collectives, tickets[i], z->timeline->dev);
        tickets[i] = 0;
    }
}
// Makes later work of the device wait for every all-gather of updated parameters in flight.
static void zero_wait_for_updates(struct zero *z) {
    for (int unit = 0; unit < z->shards.units && z->shards.ranks > 1; unit++)
        unit_wait(z, z->params_tickets, unit);
}

// Begins to copy elements [at, at + n) of the flat buffer of parameters, at `place` of this rank's, into the buffer of
// their unit. Returns the ticket.
static uint64_t begin_parameters_load(struct zero *z, floatX *whole, int unit, int64_t at, int64_t place, int64_t n) {
    char name[64];
    return timeline_transfer(z->timeline, TRANSFER_TO_DEVICE, unit_name(z, unit, name, "parameters"),
                             bytes_behind(whole, (size_t)(at - z->layout->unit_begin[unit]) * sizeof *whole),
                             bytes_behind(z->params, (size_t)place * sizeof *whole), (size_t)n * sizeof *whole);
}
// Begins the all-gather of a unit's sharded parameters, behind the copies of this rank's shards where these are on the
// host.
static void gather_parameters(struct zero *z, floatX *whole, int unit) {
    const struct shards *s = &z->shards;
    struct timeline *t = z->timeline;
    char name[64];
    for (int i = s->first[unit]; i < s->first[unit + 1]; i++) {
        const struct bucket *b = &s->buckets[i];
        const int64_t begin = b->begin - z->layout->unit_begin[unit], own = shards_own_begin(s, b);
        if (z->params_on_host)
            z->params_loads[i] = begin_parameters_load(z, whole, unit, own, b->begin / s->ranks, b->shard);
        if (t->planning)
            continue;
        const floatX *from = z->params + b->begin / s->ranks;
        if (z->params_on_host) {
            collectives_begin_after(z->collectives, &t->transfers, z->params_loads[i], t->dev);
            from = whole + begin + s->rank * b->shard;
        }
        z->params_tickets[i] =
            collective_all_gather(z->collectives, whole + begin, from, (size_t)b->shard * sizeof *whole,
                                  unit_name(z, unit, name, "parameters"), t->dev);
    }
}
// Begins to bring a unit's parameters into its buffer in the current phase, where it has one and they are not there
// yet.
static void zero_prefetch(struct zero *z, enum pass pass, int unit) {
    const struct shards *s = &z->shards;
    enum unit_state *state = &z->units[(int)pass * s->units + unit];
    if (!zero_has_unit_parameters(z) || *state != UNIT_ABSENT || unit_elements(z, unit) == 0)
        return;
    floatX *whole = unit_parameters(z, pass, unit);
    const int64_t begin = z->layout->unit_begin[unit];
    if (shards_parameters(s))
        gather_parameters(z, whole, unit);
    else
        z->params_loads[s->first[unit]] = begin_parameters_load(z, whole, unit, begin, begin, unit_elements(z, unit));
    *state = UNIT_IN_FLIGHT;
}
// Whether all-gathers of the last update may be in flight for parameters without buffers of units. The first micro-step
// behind it waits for all in its forward. Frozen parameters have none. Waits where there can be none would divide
// recorded work for nothing (kernels/work_segments.cuh).
static bool update_may_be_in_flight(const struct zero *z, enum pass pass) {
    const bool updated = z->layout == &z->table->trained && shards_optimizer(&z->shards);
    return updated && pass != PASS_BACKWARD && !(pass == PASS_TRAIN && z->adds_up);
}
// To be called before a unit's parameters are used: waits for what zero_prefetch or the last update began. Where units
// have buffers this is a phase of its own.
static void zero_use(struct zero *z, enum pass pass, int unit) {
    const struct shards *s = &z->shards;
    struct timeline *t = z->timeline;
    enum unit_state *state = &z->units[(int)pass * s->units + unit];
    if (!zero_has_unit_parameters(z)) {
        if (*state == UNIT_ABSENT && update_may_be_in_flight(z, pass) && !t->planning)
            unit_wait(z, z->params_tickets, unit);
        *state = UNIT_READY;
        return;
    }
    if (unit_elements(z, unit) == 0)
        return;
    timeline_phase(t, forward_group(pass), -1, "parameters");
    zero_prefetch(z, pass, unit);
    timeline_touch(unit_parameters(z, pass, unit));
    for (int i = s->first[unit]; i < s->first[unit + 1] && *state == UNIT_IN_FLIGHT; i++)
        timeline_transfer_wait(t, &z->params_loads[i]);
    if (*state == UNIT_IN_FLIGHT && s->ranks > 1 && !t->planning)
        unit_wait(z, z->params_tickets, unit);
    *state = UNIT_READY;
}

// ---------------------------------------------------------------------------------------------------------------------
// Gradients

// What comes and goes at a time of a unit's stored gradients: its buckets [first, end), which are elements [place,
// place + n) of this rank's gradients.
struct stored {
    int first, end;
    int64_t place, n;
};
// Whether a unit's stored gradients pass through the device bucket by bucket, by two slots, rather than at once: the
// head's and the embeddings', where they are larger than a layer's.
static bool unit_is_streamed(const struct zero *z, int unit) {
    const struct shards *s = &z->shards;
    return unit_layer(z, unit) < 0 && unit_elements(z, unit) > unit_elements(z, unit_of_layer(z->table, 0)) &&
           s->first[unit + 1] - s->first[unit] > 2;
}
static struct stored stored_at(const struct zero *z, int unit, int bucket) {
    const struct shards *s = &z->shards;
    struct stored stored;
    stored.first = bucket;
    stored.end = unit_is_streamed(z, unit) ? bucket + 1 : s->first[unit + 1];
    const struct bucket *first = &s->buckets[stored.first], *last = &s->buckets[stored.end - 1];
    stored.place = first->begin / s->ranks;
    stored.n = last->begin / s->ranks + last->shard - stored.place;
    return stored;
}
// Slot 0 or 1 of a unit's stored gradients; NULL when planning.
static void *stored_slot(struct zero *z, int unit, int slot) {
    const bool streamed = unit_is_streamed(z, unit);
    int64_t n = streamed ? 0 : unit_elements(z, unit) / z->shards.ranks;
    for (int i = z->shards.first[unit]; i < z->shards.first[unit + 1] && streamed; i++)
        n = z->shards.buckets[i].shard > n ? z->shards.buckets[i].shard : n;
    const size_t bytes = state_bytes(z->grads_format, n);
    void *slots = timeline_buffer(z->timeline, &z->slots_ids[unit], streamed ? 2 * bytes : bytes, "gradients of a unit",
                                  "unit's stored gradients", unit_layer(z, unit));
    return bytes_behind(slots, (size_t)slot * bytes);
}
// The stored gradients from element `place` of this rank's on; NULL when planning.
static void *stored_gradients(const struct zero *z, int64_t place) {
    return bytes_behind(z->grads, state_bytes(z->grads_format, place));
}

// Begins to bring the stored sum of a unit's gradients into its buffer, where that holds it and it is not there yet.
static void zero_prefetch_gradients(struct zero *z, int unit) {
    char name[64];
    if (!zero_adds_in_place(z) || !z->adds_up || z->sums[unit] != UNIT_ABSENT || unit_elements(z, unit) == 0)
        return;
    float *sum = unit_gradients(z, unit);
    z->grads_loads[2 * unit] = timeline_transfer(z->timeline, TRANSFER_TO_DEVICE, unit_name(z, unit, name, "gradients"),
                                                 sum, stored_gradients(z, z->layout->unit_begin[unit]),
                                                 (size_t)unit_elements(z, unit) * sizeof *sum);
    z->sums[unit] = UNIT_IN_FLIGHT;
}
// Begins to bring stored gradients into a slot; in the first micro-step of a step there are none, and the slot gets the
// zeroes between tensors.
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
// As load_stored, of a unit that is not streamed, where slots are used: while the unit is reduced, or, with one rank,
// computed.
static void prefetch_stored(struct zero *z, int unit) {
    if (z->grads_on_host && !zero_adds_in_place(z) && !unit_is_streamed(z, unit))
        load_stored(z, unit, stored_at(z, unit, z->shards.first[unit]), 0);
}
// Waits until the gradients that are on their way to the host are there. Their buffers are live in this phase.
static void wait_for_stores(struct zero *z) {
    struct timeline *t = z->timeline;
    if (z->storing < 0)
        return;
    if (zero_adds_in_place(z))
        timeline_touch(unit_gradients(z, z->storing));
    else
        timeline_touch(stored_slot(z, z->storing, 0));
    timeline_transfer_wait(t, &z->grads_stores[0]);
    timeline_transfer_wait(t, &z->grads_stores[1]);
    z->storing = -1;
}

// Zeroes between the tensors of a unit in its buffer, where no op writes: the buffer itself is stored and squared.
static void zero_gap(struct zero *z, float *from, int64_t n) {
    if (n > 0)
        TIMELINE_RUN(z->timeline, device_zero(from, (size_t)n * sizeof *from, z->timeline->dev));
}
static void zero_gaps(struct zero *z, float *whole, int unit) {
    const int64_t begin = z->layout->unit_begin[unit], end = z->layout->unit_begin[unit + 1];
    int64_t at = begin; // behind the tensors so far
    for (int i = 0; i < z->table->num_tensors && whole; i++) {
        const struct tensor *t = &z->table->tensors[i];
        if (t->offset < begin || t->offset >= end)
            continue;
        zero_gap(z, whole + at - begin, t->offset - at);
        at = t->offset + t->count;
    }
    if (whole)
        zero_gap(z, whole + at - begin, end - at);
}
// To be called before a unit's backward makes its gradients. Where units have buffers, the unit's then holds the stored
// sum, to which backward adds, or nothing yet (zero_adds says which), and the next unit's sum is fetched. A buffer that
// is added to the stored sum (add_shard) may hold anything between its tensors.
static void zero_begin_gradients(struct zero *z, int unit) {
    struct timeline *t = z->timeline;
    if (!zero_has_unit_gradients(z) || unit_elements(z, unit) == 0)
        return;
    timeline_phase(t, GROUP_BACKWARD, -1, "gradients begin");
    zero_prefetch_gradients(z, unit);
    if (unit + 1 < z->shards.units)
        zero_prefetch_gradients(z, unit + 1);
    if (!shards_gradients(&z->shards)) // else the load begins with the reduction
        prefetch_stored(z, unit);
    float *whole = unit_gradients(z, unit);
    if (z->sums[unit] == UNIT_IN_FLIGHT)
        timeline_transfer_wait(t, &z->grads_loads[2 * unit]);
    else if (zero_adds_in_place(z))
        zero_gaps(z, whole, unit);
    z->sums[unit] = UNIT_READY;
}

// sum (of the format, the bucket's shard) += this rank's shard of the unit's gradients, or, in the first micro-step, =.
// Gaps between tensors stay zero.
static void add_shard(struct zero *z, char *sum, const float *whole, const struct bucket *b) {
    const int64_t begin = shards_own_begin(&z->shards, b);
    // The counter is the rank's own; less the rank it is the same on all.
    const struct rounding r = {z->seed, (uint64_t)0 - (uint64_t)z->shards.rank, z->micro_step, 0, ROUNDING_GRADIENTS,
                               0};
    add_gradients(sum, z->grads_format, whole + begin - z->layout->unit_begin[b->unit], begin, b->shard, z->tensors,
                  z->adds_up, r, z->timeline->dev);
}
// In the last micro-step: adds the squares of gradients that will be on the host to the report, bucket by bucket as
// optimizer_sum_squares does with others.
static void add_squares(struct zero *z, const void *sum, int bucket, void *ws) {
    if (z->last_micro_step)
        sum_of_squares(z->squares, sum, z->grads_format, z->shards.buckets[bucket].shard, bucket > 0, ws,
                       z->timeline->dev);
}
// Adds buckets of a unit, reduced by now, to stored gradients on the device, `sum`, and takes their squares where they
// will be on the host.
static void add_to_stored(struct zero *z, void *sum, const float *whole, struct stored stored, void *ws) {
    const struct shards *s = &z->shards;
    const bool planning = z->timeline->planning;
    for (int i = stored.first; i < stored.end && s->ranks > 1 && !planning; i++) // all, then ops, which are one graph
        collective_wait(z->collectives, z->grads_tickets[i], z->timeline->dev);
    for (int i = stored.first; i < stored.end && !planning; i++) {
        const struct bucket *b = &s->buckets[i];
        char *at = (char *)sum + state_bytes(z->grads_format, b->begin / s->ranks - stored.place);
        TIMELINE_RUN(z->timeline, add_shard(z, at, whole, b));
        if (z->grads_on_host)
            TIMELINE_RUN(z->timeline, add_squares(z, at, i, ws));
    }
}
// Begins to store what `from` holds.
static void store_gradients(struct zero *z, int unit, struct stored stored, const void *from, int slot) {
    char name[64];
    z->grads_stores[slot] =
        timeline_transfer(z->timeline, TRANSFER_TO_HOST, unit_name(z, unit, name, "gradients"),
                          stored_gradients(z, stored.place), from, state_bytes(z->grads_format, stored.n));
    z->storing = unit;
}
// Adds a unit's gradients to those on the host by way of the slots: while one is in work, the next is loaded and the
// one before stored.
static void add_by_slots(struct zero *z, int unit, const float *whole, void *ws) {
    const struct shards *s = &z->shards;
    struct timeline *t = z->timeline;
    if (unit_is_streamed(z, unit))
        load_stored(z, unit, stored_at(z, unit, s->first[unit]), 0);
    for (int i = s->first[unit], slot = 0, end; i < s->first[unit + 1]; i = end, slot = 1 - slot) {
        const struct stored stored = stored_at(z, unit, i);
        end = stored.end;
        if (end < s->first[unit + 1]) {
            timeline_transfer_wait(t, &z->grads_stores[1 - slot]);
            load_stored(z, unit, stored_at(z, unit, end), 1 - slot);
        }
        timeline_transfer_wait(t, &z->grads_loads[2 * unit + slot]);
        void *sum = stored_slot(z, unit, slot);
        add_to_stored(z, sum, whole, stored, ws);
        store_gradients(z, unit, stored, sum, slot);
    }
}
// Stores a unit's gradients, of which backward, and with several ranks the reduction, is done or waited for.
static void collect_gradients(struct zero *z, int unit) {
    const struct shards *s = &z->shards;
    struct timeline *t = z->timeline;
    struct stored all;
    timeline_phase(t, GROUP_BACKWARD, -1, "collect gradients");
    float *whole = unit_gradients(z, unit);
    void *ws = z->grads_on_host ? timeline_workspace(t, sum_of_squares_workspace_bytes(t->dev)) : NULL;
    wait_for_stores(z);
    all.first = s->first[unit];
    all.end = s->first[unit + 1];
    all.place = z->layout->unit_begin[unit] / s->ranks;
    all.n = unit_elements(z, unit) / s->ranks;
    if (zero_adds_in_place(z)) {
        for (int i = all.first; i < all.end; i++)
            TIMELINE_RUN(t, add_squares(z, whole + s->buckets[i].begin - all.place, i, ws));
        store_gradients(z, unit, all, whole, 0);
    } else if (z->grads_on_host)
        add_by_slots(z, unit, whole, ws);
    else
        add_to_stored(z, stored_gradients(z, all.place), whole, all, NULL);
}
// To be called after a unit's backward: begins the reduction of its gradients, sharded ones in each micro-step, whole
// ones in the last one. With one rank it stores them where the unit has a buffer.
static void zero_reduce(struct zero *z, int unit) {
    const struct shards *s = &z->shards;
    struct timeline *t = z->timeline;
    char name[64];
    float *whole = NULL;
    if (unit_elements(z, unit) == 0)
        return;
    if (shards_gradients(s)) {
        timeline_phase(t, GROUP_BACKWARD, -1, "reduce gradients");
        whole = unit_gradients(z, unit);
        prefetch_stored(z, unit);
    } else if (zero_has_unit_gradients(z)) {
        collect_gradients(z, unit);
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
// Waits for the reduction of a unit's sharded gradients and adds this rank's shards to those of the micro-steps before.
static void zero_add_reduced(struct zero *z, int unit) {
    if (shards_gradients(&z->shards) && unit_elements(z, unit) > 0)
        collect_gradients(z, unit);
}
// To be called at a micro-step's end: waits until all gradients are stored.
static void zero_end_gradients(struct zero *z) {
    if (!z->grads_on_host)
        return;
    timeline_phase(z->timeline, GROUP_BACKWARD, -1, "store gradients");
    wait_for_stores(z);
}

// Whether this rank holds anything of elements [at, at + n) of a flat buffer.
static bool zero_holds(const struct zero *z, bool sharded, int64_t at, int64_t n) {
    int64_t place;
    return shards_next(&z->shards, sharded, &at, at + n, &place) > 0;
}
// Uploads elements [at, at + n) of a flat buffer, those that this rank holds; parameters on the host are copied there.
// `values`, in host memory, must stay until the device was waited for.
static void zero_upload(const struct zero *z, void *flat, bool sharded, int64_t at, const void *values, int64_t n,
                        size_t element_bytes) {
    const bool on_host = flat == z->params && z->params_on_host;
    int64_t first = at, place, count;
    for (; (count = shards_next(&z->shards, sharded, &first, at + n, &place)) > 0; first += count) {
        char *to = (char *)flat + (size_t)place * element_bytes;
        const char *from = (const char *)values + (size_t)(first - at) * element_bytes;
        if (on_host)
            memcpy(to, from, (size_t)count * element_bytes);
        else
            device_upload(to, from, (size_t)count * element_bytes, z->timeline->dev);
    }
}
