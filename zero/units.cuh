// Units of parameters and gradients on the device (zero/shards.cuh): their memory, and the gathering of parameters.
// Offloading follows sharding's schedule, with copies over the bus, as if the host were one more rank.
//   parameters   a unit's parameters are copied into the buffer that a sharded unit is gathered into; where they are
//                sharded too, only this rank's shards are copied, and the all-gather begins after the copies
//   gradients    in fp32 on one rank the stored sum is copied into the unit's buffer, a unit ahead, and backward adds
//                to it as it would in place. Else backward overwrites the buffer, the buffer is reduced, and this
//                rank's shards of it are added to the stored sum, which passes through the device by slots
// Gradients in bf16 always take the second way: a micro-step rounds them only once. Offloading changes no bits.
#pragma once
#include "kernels/collectives.cuh"  // collective_all_gather
#include "kernels/flat_tensors.cuh" // struct flat_tensors
#include "kernels/state_format.cuh" // enum state_format
#include "model/parameters.cuh"     // struct parameters
#include "model/timeline.cuh"       // struct timeline, enum pass
#include "zero/shards.cuh"          // struct shards

// Whether a unit's parameters in one pass, or the stored sum of its gradients, are in the unit's buffer.
enum unit_state { UNIT_ABSENT, UNIT_IN_FLIGHT, UNIT_READY };

struct zero_options {
    bool offload_weights, offload_gradients; // in the host's memory
    enum state_format grads_format;          // FORMAT_FP32 or FORMAT_BF16
    uint64_t seed;                           // of stochastic rounding
};

// The trained tensors or the frozen ones: this rank's parameters and, of trained tensors, gradients. By the ZeRO stage
// they are whole or sharded; a unit in use is always whole. A unit without tensors of the kind has no buckets.
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
    struct flat_tensors tensors;   // the table's rows in the device's memory; not owned
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

// Sets up z for the table's trained or frozen tensors, as `layout` says. bucket_bytes is as in shards_create. The
// caller later sets z's memory and collectives. Table, layout and timeline must outlive z. zero_free frees z.
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

// Marks units' buffers as empty, as a region begins. zero_use then also waits again for the last update's all-gathers.
static void zero_forget_buffers(struct zero *z) {
    memset(z->units, 0, (size_t)PASS_COUNT * (size_t)z->shards.units * sizeof *z->units); // UNIT_ABSENT
    memset(z->sums, 0, (size_t)z->shards.units * sizeof *z->sums);
}
// Sets z's flags of a micro-step. adds_up: the step has had micro-steps already or, when planning, may get several.
static void zero_begin_micro_step(struct zero *z, bool adds_up, bool last_micro_step) {
    z->adds_up = adds_up;
    z->last_micro_step = last_micro_step;
}

// The number of elements of a unit in z's flat buffers, padding included; 0 if the unit has no tensor of z's kind.
static int64_t unit_elements(const struct zero *z, int unit) {
    return z->layout->unit_begin[unit + 1] - z->layout->unit_begin[unit];
}
// Whether a unit's parameters are brought into a buffer of the unit for use. Otherwise they are used in z->params.
static bool zero_buffers_parameters(const struct zero *z) { return shards_parameters(&z->shards) || z->params_on_host; }
// Whether backward writes a unit's gradients into an fp32 buffer of the unit. Otherwise it writes them into z->grads.
static bool zero_buffers_gradients(const struct zero *z) {
    return shards_gradients(&z->shards) || z->grads_on_host || z->grads_format != FORMAT_FP32;
}
// Whether the stored sum is copied from the host into the unit's buffer of gradients, where backward adds to it.
static bool sums_in_unit_buffer(const struct zero *z) {
    return z->grads_on_host && !shards_gradients(&z->shards) && z->grads_format == FORMAT_FP32;
}
// Whether backward adds to the sum of earlier micro-steps in a gradient's memory. If not, it overwrites what is there.
static bool zero_adds(const struct zero *z) {
    return z->adds_up && (!zero_buffers_gradients(z) || sums_in_unit_buffer(z));
}
// The number of bytes of this rank's stored gradients (z->grads), on the device or the host.
static size_t zero_gradients_bytes(const struct zero *z) {
    return state_bytes(z->grads_format, shards_elements(&z->shards, shards_gradients(&z->shards)));
}

// Returns the layer that a unit belongs to; -1 if the unit is the head's or the embeddings'.
static int unit_layer(const struct zero *z, int unit) {
    const bool layer = unit != unit_of_head() && unit != unit_of_embeddings(z->table);
    return layer ? z->table->L - unit : -1;
}
// Writes the name of a unit's `what`, such as "parameters of layer 3", to text and returns text.
static const char *unit_name(const struct zero *z, int unit, char text[64], const char *what) {
    if (unit == unit_of_head())
        snprintf(text, 64, "%s of the head", what);
    else if (unit == unit_of_embeddings(z->table))
        snprintf(text, 64, "%s of the embeddings", what);
    else
        snprintf(text, 64, "%s of layer %d", what, z->table->L - unit);
    return text;
}

// Returns the buffer of a unit's parameters in a pass, live in this phase; NULL when planning. Call it only where
// zero_buffers_parameters. zero_prefetch begins to fill it; it holds the parameters from zero_use on.
static floatX *unit_parameters(struct zero *z, enum pass pass, int unit) {
    return (floatX *)timeline_buffer(z->timeline, &z->params_ids[(int)pass * z->shards.units + unit],
                                     (size_t)unit_elements(z, unit) * sizeof(floatX), "parameters of a unit",
                                     "unit's parameters", unit_layer(z, unit));
}
// Returns a unit's gradient buffer, live in this phase; NULL when planning. Call it only where zero_buffers_gradients.
static float *unit_gradients(struct zero *z, int unit) {
    return (float *)timeline_buffer(z->timeline, &z->grads_ids[unit], (size_t)unit_elements(z, unit) * sizeof(float),
                                    "gradients of a unit", "unit's gradients", unit_layer(z, unit));
}
// Returns the address `bytes` after base; NULL for base NULL, as when planning.
static void *address_after(void *base, size_t bytes) { return base ? (char *)base + bytes : NULL; }

// Returns where a tensor's parameters are, unsharded, live in this phase; NULL when planning. Call zero_use before.
static floatX *zero_parameter(struct zero *z, enum pass pass, const struct tensor *t) {
    if (zero_buffers_parameters(z)) {
        const int unit = unit_of(z->table, t);
        floatX *gathered = unit_parameters(z, pass, unit);
        return gathered ? gathered + t->offset - z->layout->unit_begin[unit] : NULL;
    }
    return z->params ? z->params + t->offset : NULL;
}
// Returns where backward writes a tensor's gradient, live in this phase; NULL in planning. Needs zero_begin_gradients.
static float *zero_gradient(struct zero *z, const struct tensor *t) {
    if (zero_buffers_gradients(z)) {
        const int unit = unit_of(z->table, t);
        float *whole = unit_gradients(z, unit);
        return whole ? whole + t->offset - z->layout->unit_begin[unit] : NULL;
    }
    return z->grads ? (float *)z->grads + t->offset : NULL;
}

// Makes later device work wait for the collectives of a unit's buckets, and zeroes their tickets. Needs z->collectives.
static void unit_wait(struct zero *z, uint64_t *tickets, int unit) {
    for (int i = z->shards.first[unit]; i < z->shards.first[unit + 1]; i++) {
        collective_wait(z->collectives, tickets[i], z->timeline->dev);
        tickets[i] = 0;
    }
}
// Makes later device work wait for every all-gather of parameters that is in flight.
static void zero_wait_for_updates(struct zero *z) {
    for (int unit = 0; unit < z->shards.units && z->shards.ranks > 1; unit++)
        unit_wait(z, z->params_tickets, unit);
}

// Begins to copy the unit's parameters [at, at + n), indices of the flat buffers, from z->params + place on the host to
// their place in `whole`, the unit's buffer. Returns a ticket. Planning only records the copy.
static uint64_t begin_parameters_load(struct zero *z, floatX *whole, int unit, int64_t at, int64_t place, int64_t n) {
    char name[64];
    return timeline_transfer(z->timeline, TRANSFER_TO_DEVICE, unit_name(z, unit, name, "parameters"),
                             address_after(whole, (size_t)(at - z->layout->unit_begin[unit]) * sizeof *whole),
                             address_after(z->params, (size_t)place * sizeof *whole), (size_t)n * sizeof *whole);
}
// Begins to all-gather a unit's sharded parameters into `whole`, the unit's buffer. Where they are on the host, copies
// this rank's shards first. Sets the buckets' params_tickets and params_loads. When planning, only records the copies.
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
// Begins, in this phase, to bring a unit's parameters into the unit's buffer; zero_use waits for them. Does nothing if
// the unit is empty or has no buffer, or if the parameters are there or on their way. Every rank calls this.
static void zero_prefetch(struct zero *z, enum pass pass, int unit) {
    const struct shards *s = &z->shards;
    enum unit_state *state = &z->units[(int)pass * s->units + unit];
    if (!zero_buffers_parameters(z) || *state != UNIT_ABSENT || unit_elements(z, unit) == 0)
        return;
    floatX *whole = unit_parameters(z, pass, unit);
    const int64_t begin = z->layout->unit_begin[unit];
    if (shards_parameters(s))
        gather_parameters(z, whole, unit);
    else
        z->params_loads[s->first[unit]] = begin_parameters_load(z, whole, unit, begin, begin, unit_elements(z, unit));
    *state = UNIT_IN_FLIGHT;
}
// Whether the last update's all-gathers may be in flight in a pass: in any forward but a step's later micro-steps', for
// trained tensors with sharded states. A wait for nothing would cut a recorded graph in two.
static bool gathers_may_be_in_flight(const struct zero *z, enum pass pass) {
    const bool updated = z->layout == &z->table->trained && shards_optimizer(&z->shards);
    return updated && pass != PASS_BACKWARD && !(pass == PASS_TRAIN && z->adds_up);
}
// Makes later device work wait for a unit's parameters, from zero_prefetch or, without buffers, the last update. Calls
// zero_prefetch if need be. Opens a phase if units have buffers and the unit isn't empty. Every rank calls this.
static void zero_use(struct zero *z, enum pass pass, int unit) {
    const struct shards *s = &z->shards;
    struct timeline *t = z->timeline;
    enum unit_state *state = &z->units[(int)pass * s->units + unit];
    if (!zero_buffers_parameters(z)) {
        if (*state == UNIT_ABSENT && gathers_may_be_in_flight(z, pass) && !t->planning)
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

// Whether this rank's part of a flat buffer, only shards if `sharded`, has any of the buffer's elements [at, at + n).
static bool zero_holds_any(const struct zero *z, bool sharded, int64_t at, int64_t n) {
    int64_t place;
    return shards_next(&z->shards, sharded, &at, at + n, &place) > 0;
}
// Sets elements [at, at + n) of this rank's buffer `flat`, as far as it holds them, to `values` (n), in host memory,
// which stay until the device was waited for. flat is z->params or device memory. If `sharded`, it holds only shards.
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
