// Which rank owns which ranges of the flat buffers, and the gathering and reducing of units (ZeRO: Rajbhandari et al.
// 2020, arXiv 1910.02054).
//
// A unit is a set of tensors that are gathered and reduced together: the head's, a layer's, or the embeddings'. Units
// are ranges of the flat buffers (parameters.cuh), in the order in which backward finishes their gradients. A unit is
// cut into buckets of at most --bucket-mib of fp32 gradients; a bucket is reduced as soon as its unit's gradients are
// complete. Each rank owns an equal shard of each bucket, so that every reduction and every all-gather is balanced. The
// shards are the same in every stage:
//
//   stage 0   each rank holds and updates everything; gradients are all-reduced
//   stage 1   a rank holds the optimizer state of its shards; gradients are reduced to shards, new parameters gathered
//   stage 2   gradients too: a unit's are reduce-scattered after its backward, in each micro-step
//   stage 3   parameters too: a unit's are gathered before it is used, in forward and again in backward
//
// Units are padded to a multiple of the ranks, so that any number of ranks divides every bucket. A rank's shards stand
// in a sharded buffer in the order of the buckets, without gaps: the shard of bucket b begins at b.begin / ranks.
#pragma once
#include "kernels/gradients.cuh"    // add_gradients
#include "kernels/collectives.cuh"  // collective_reduce_scatter, collective_all_gather
#include "kernels/state_format.cuh" // enum state_format
#include "parameters.cuh"           // struct parameters, TENSOR_ALIGNMENT
#include "timeline.cuh"             // struct timeline, enum pass

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

static struct shards shards_create(const struct parameters *table, int rank, int ranks, int stage,
                                   int64_t bucket_bytes) {
    const int64_t most = ranks == 1 ? table->flat : bucket_bytes / (int64_t)sizeof(float); // one rank reduces nothing
    struct shards s;
    memset(&s, 0, sizeof s);
    s.rank = rank;
    s.ranks = ranks;
    s.stage = stage;
    s.units = table->num_units;
    s.flat = table->flat;
    s.buckets = (struct bucket *)calloc((size_t)(s.flat / most) + (size_t)s.units + 1, sizeof *s.buckets);
    s.first = (int *)calloc((size_t)s.units + 1, sizeof *s.first);
    if (!s.buckets || !s.first)
        fail("out of memory for the table of shards");
    for (int unit = 0; unit < s.units; unit++) {
        s.first[unit] = s.count;
        if (ranks > 1)
            shards_cut(&s, table->unit_begin[unit], table->unit_begin[unit + 1], most, unit);
        else if (unit == 0)
            shards_cut(&s, 0, s.flat, most, unit);
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

// The all-gather of a unit's parameters in one pass.
enum unit_state { UNIT_ABSENT, UNIT_IN_FLIGHT, UNIT_READY };

// The parameters and gradients of this rank: whole or sharded, by the stage; units in use are whole in any case.
struct zero {
    struct shards shards;
    const struct parameters *table;  // not owned
    struct timeline *timeline;       // not owned
    struct collectives *collectives; // not owned; NULL with one rank, and while planning
    floatX *params;                  // NULL while planning
    void *grads;                     // NULL while planning, and where the model does not train
    enum state_format grads_format;  // FORMAT_FP32 or FORMAT_BF16
    bool params_on_host, grads_on_host;
    uint64_t *params_tickets; // (buckets) all-gathers of parameters in flight, 0: none
    uint64_t *grads_tickets;  // (buckets) reductions of gradients in flight, 0: none
    enum unit_state *units;   // (PASS_COUNT, units) where parameters are sharded
    int *params_ids;          // (PASS_COUNT, units) buffer of a unit's gathered parameters, -1: none
    int *grads_ids;           // (units) buffer of a unit's gradients before they are reduced, -1: none
};

// Sets up z for rank `rank` of `ranks`. The table and the timeline must outlive it; zero_free frees it.
static void zero_create(struct zero *z, const struct parameters *table, struct timeline *timeline, int rank, int ranks,
                        int stage, int64_t bucket_bytes) {
    memset(z, 0, sizeof *z);
    z->shards = shards_create(table, rank, ranks, stage, bucket_bytes);
    z->table = table;
    z->timeline = timeline;
    const size_t units = (size_t)z->shards.units, buckets = (size_t)z->shards.count + 1;
    z->params_tickets = (uint64_t *)calloc(buckets, sizeof *z->params_tickets);
    z->grads_tickets = (uint64_t *)calloc(buckets, sizeof *z->grads_tickets);
    z->units = (enum unit_state *)calloc(PASS_COUNT * units, sizeof *z->units);
    z->params_ids = (int *)calloc(PASS_COUNT * units, sizeof *z->params_ids);
    z->grads_ids = (int *)calloc(units, sizeof *z->grads_ids);
    if (!z->params_tickets || !z->grads_tickets || !z->units || !z->params_ids || !z->grads_ids)
        fail("out of memory for the table of shards");
    for (size_t i = 0; i < PASS_COUNT * units; i++)
        z->params_ids[i] = -1;
    for (size_t i = 0; i < units; i++)
        z->grads_ids[i] = -1;
}
static void zero_free(struct zero *z) {
    shards_free(&z->shards);
    free(z->params_tickets);
    free(z->grads_tickets);
    free(z->units);
    free(z->params_ids);
    free(z->grads_ids);
    memset(z, 0, sizeof *z);
}

// To be called when a region of the timeline begins: no unit is gathered then.
static void zero_begin_region(struct zero *z) {
    memset(z->units, 0, (size_t)PASS_COUNT * (size_t)z->shards.units * sizeof *z->units); // UNIT_ABSENT
}

static int64_t unit_elements(const struct zero *z, int unit) {
    return z->table->unit_begin[unit + 1] - z->table->unit_begin[unit];
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

// The buffers of a unit's gathered parameters, and of its gradients until they are reduced; NULL when planning.
static floatX *unit_parameters(struct zero *z, enum pass pass, int unit) {
    return (floatX *)timeline_buffer(z->timeline, &z->params_ids[(int)pass * z->shards.units + unit],
                                     (size_t)unit_elements(z, unit) * sizeof(floatX), "parameters of a unit",
                                     "unit's parameters", unit_layer(z, unit));
}
static float *unit_gradients(struct zero *z, int unit) {
    return (float *)timeline_buffer(z->timeline, &z->grads_ids[unit], (size_t)unit_elements(z, unit) * sizeof(float),
                                    "gradients of a unit", "unit's gradients", unit_layer(z, unit));
}

// The address of a parameter, and of its gradient; NULL where the model has none, and when planning. layer -1: of the
// whole model.
static floatX *zero_parameter(struct zero *z, enum pass pass, int layer, enum parameter id) {
    const struct tensor *t = parameters_find(z->table, layer, id);
    if (!t)
        return NULL;
    if (shards_parameters(&z->shards)) {
        const int unit = unit_of(z->table, t);
        floatX *gathered = unit_parameters(z, pass, unit);
        return gathered ? gathered + t->offset - z->table->unit_begin[unit] : NULL;
    }
    return z->params ? z->params + t->offset : NULL;
}
static float *zero_gradient(struct zero *z, int layer, enum parameter id) {
    const struct tensor *t = parameters_find(z->table, layer, id);
    if (!t)
        return NULL;
    if (shards_gradients(&z->shards)) {
        const int unit = unit_of(z->table, t);
        float *whole = unit_gradients(z, unit);
        return whole ? whole + t->offset - z->table->unit_begin[unit] : NULL;
    }
    return z->grads ? (float *)z->grads + t->offset : NULL;
}

// Makes later work of the device wait for a unit's collectives in flight, and clears their tickets: later micro-steps
// then wait for no collective and can be recorded as a graph.
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

// Begins the all-gather of a unit's parameters in the current phase, where they are sharded and not gathered yet.
static void zero_prefetch(struct zero *z, enum pass pass, int unit) {
    const struct shards *s = &z->shards;
    enum unit_state *state = &z->units[(int)pass * s->units + unit];
    char name[64];
    if (!shards_parameters(s) || *state != UNIT_ABSENT)
        return;
    floatX *whole = unit_parameters(z, pass, unit);
    unit_name(z, unit, name, "parameters");
    for (int i = s->first[unit]; i < s->first[unit + 1] && !z->timeline->planning; i++) {
        const struct bucket *b = &s->buckets[i];
        z->params_tickets[i] = collective_all_gather(z->collectives, whole + b->begin - z->table->unit_begin[unit],
                                                     z->params + b->begin / s->ranks, (size_t)b->shard * sizeof *whole,
                                                     name, z->timeline->dev);
    }
    *state = UNIT_IN_FLIGHT;
}
// To be called before a unit's parameters are used: waits for the all-gather that zero_prefetch or the last update
// began. Where parameters are sharded this is a phase of its own.
static void zero_use(struct zero *z, enum pass pass, int unit) {
    struct timeline *t = z->timeline;
    if (z->shards.ranks == 1)
        return;
    if (!shards_parameters(&z->shards)) {
        if (!t->planning)
            unit_wait(z, z->params_tickets, unit);
        return;
    }
    timeline_phase(t, pass_name(pass), -1, "parameters");
    zero_prefetch(z, pass, unit);
    timeline_touch(unit_parameters(z, pass, unit));
    enum unit_state *state = &z->units[(int)pass * z->shards.units + unit];
    if (*state == UNIT_IN_FLIGHT && !t->planning)
        unit_wait(z, z->params_tickets, unit);
    *state = UNIT_READY;
}

// To be called before a unit's backward adds to its gradients. Sharded gradients were reduced in the micro-step before,
// so that the unit's buffer starts from zero; whole ones go on adding up.
static void zero_begin_gradients(struct zero *z, int unit) {
    struct timeline *t = z->timeline;
    if (!shards_gradients(&z->shards))
        return;
    timeline_phase(t, "backward", -1, "zero gradients");
    float *whole = unit_gradients(z, unit);
    TIMELINE_RUN(t, device_zero(whole, (size_t)unit_elements(z, unit) * sizeof *whole, t->dev));
}
// Begins the reduction of a unit's complete gradients: sharded ones in each micro-step, whole ones in the last one.
static void zero_reduce(struct zero *z, int unit, bool last_micro_step) {
    const struct shards *s = &z->shards;
    struct timeline *t = z->timeline;
    char name[64];
    float *whole = NULL;
    if (shards_gradients(s)) {
        timeline_phase(t, "backward", -1, "reduce gradients");
        whole = unit_gradients(z, unit);
    } else if (s->ranks == 1 || !last_micro_step)
        return;
    else if (z->grads)
        whole = (float *)z->grads + z->table->unit_begin[unit];
    for (int i = s->first[unit]; i < s->first[unit + 1] && !t->planning; i++) {
        const struct bucket *b = &s->buckets[i];
        float *at = whole + b->begin - z->table->unit_begin[unit], *own = at + s->rank * b->shard;
        z->grads_tickets[i] = collective_reduce_scatter(z->collectives, own, at, b->shard,
                                                        unit_name(z, unit, name, "reduction of gradients"), t->dev);
        if (s->stage == 0)
            z->grads_tickets[i] = collective_all_gather(z->collectives, at, own, (size_t)b->shard * sizeof *at,
                                                        unit_name(z, unit, name, "gathering of gradients"), t->dev);
    }
}
// Waits for the reduction of a unit's sharded gradients and adds this rank's shards to those of the micro-steps before.
static void zero_add_reduced(struct zero *z, int unit) {
    const struct shards *s = &z->shards;
    struct timeline *t = z->timeline;
    if (!shards_gradients(s))
        return;
    timeline_phase(t, "backward", -1, "collect gradients");
    const float *whole = unit_gradients(z, unit);
    const struct rounding unrounded = {0}; // fp32 is not rounded
    for (int i = s->first[unit]; i < s->first[unit + 1] && !t->planning; i++) {
        const struct bucket *b = &s->buckets[i];
        collective_wait(z->collectives, z->grads_tickets[i], t->dev);
        TIMELINE_RUN(t, add_gradients((float *)z->grads + b->begin / s->ranks, FORMAT_FP32,
                                      whole + shards_own_begin(s, b) - z->table->unit_begin[unit], b->shard, true,
                                      unrounded, t->dev));
    }
}

// Whether this rank holds anything of elements [at, at + n) of a flat buffer.
static bool zero_holds(const struct zero *z, bool sharded, int64_t at, int64_t n) {
    int64_t place;
    return shards_next(&z->shards, sharded, &at, at + n, &place) > 0;
}
// Uploads elements [at, at + n) of a flat buffer, those that this rank holds. `values`, in host memory, must stay until
// the device was waited for.
static void zero_upload(const struct zero *z, void *flat, bool sharded, int64_t at, const void *values, int64_t n,
                        size_t element_bytes) {
    int64_t first = at, place, count;
    for (; (count = shards_next(&z->shards, sharded, &first, at + n, &place)) > 0; first += count)
        device_upload((char *)flat + (size_t)place * element_bytes,
                      (const char *)values + (size_t)(first - at) * element_bytes, (size_t)count * element_bytes,
                      z->timeline->dev);
}
