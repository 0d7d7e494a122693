// struct at: the layer, pass and tokens that an op of a block works on. struct sink: where the op's result goes.
#pragma once
#include "kernels/norm_kind.cuh" // struct norm_options
#include "model/state.cuh"       // struct gpt and its buffers

// Layer l in a pass, and its tokens [first, first + rows): all of them, or a range (model/mlp_ranges.cuh).
struct at {
    struct gpt *m;
    enum pass pass;
    int l;
    uint32_t produce; // the activations that are to be made, a bit each (BIT)
    int64_t first, rows;
    int64_t largest_range_rows, last_range_rows; // the rows of the largest range, and of the last range
    uint32_t ranged;                             // the activations of which one range exists at a time
    int range_slot; // the slot of a range's activation 0; the other activations' slots follow
};
// Returns an `at` of all the pass's tokens in layer l (-1: none). produce: the activations to make, a bit each (BIT).
static struct at at_layer(struct gpt *m, enum pass pass, int l, uint32_t produce) {
    const int64_t N = extent_of(m, pass).N;
    const struct at at = {m, pass, l, produce, 0, N, N, N, 0, 0};
    return at;
}
// Whether `at` is of a range among several of the pass's tokens; false if it is of all tokens at once.
static bool at_is_range(struct at at) { return at.largest_range_rows < extent_of(at.m, at.pass).N; }
// Whether at.produce has any of the activations in `set`, a bit each (BIT).
static bool produces(struct at at, uint32_t set) { return at.produce & set; }

// Begins a phase of layer at.l, named `op`. For a range adds "of a chunk" to the name, as plans call a range a chunk.
static void phase_at(struct at at, enum phase_group group, const char *op) {
    char name[PLAN_NAME_CHARS];
    snprintf(name, sizeof name, "%s%s", op, at_is_range(at) ? " of a chunk" : "");
    phase(at.m, group, at.l, name);
}
// Returns an at.ranged activation's memory, used by all ranges in turn, live in this phase; NULL when planning.
static void *range_memory(struct at at, enum activation_id id) {
    const struct activation_row row = activation_row_of(at.m, PASS_EVALUATE, at.l, id);
    return buffer(at.m, at.pass, at.l, at.range_slot + (int)id, (size_t)(row.bytes_per_token * at.largest_range_rows),
                  "chunk of the mlp", row.name);
}
// Returns an activation's rows for at's tokens, floatX (rows, width), live in this phase; NULL when planning.
static floatX *rows_of(struct at at, enum activation_id id) {
    if (at.ranged & (1u << id))
        return (floatX *)range_memory(at, id);
    floatX *whole = activation(at.m, at.pass, at.l, id);
    if (at.first == 0)
        return whole;
    return whole + at.first * activation_row_of(at.m, at.pass, at.l, id).bytes_per_token / (int64_t)sizeof *whole;
}
// Returns at's tokens in the layer below; -1 is the embedding. Only the OUT may be read there, which is always whole.
static struct at at_layer_below(struct at at) {
    at.l--;
    at.ranged = 0;
    return at;
}
// The statistics of a norm. Their buffer holds rstd of all rows and then, for LayerNorm only, mean of all rows.
struct norm_stats {
    float *mean, *rstd; // (rows) means and reciprocal standard deviations; mean is NULL for RMSNorm
};
// Returns pointers to the rstd and mean of token `first` in `statistics`, which holds N rstd and, for LayerNorm only,
// then N means. mean is NULL for RMSNorm; both are NULL if `statistics` is NULL.
static struct norm_stats norm_stats_from(const struct gpt *m, float *statistics, int64_t N, int64_t first) {
    struct norm_stats rows = {NULL, NULL};
    if (statistics) {
        rows.rstd = statistics + first;
        rows.mean = m->shape.layer.norm_statistics > 1 ? rows.rstd + N : NULL;
    }
    return rows;
}
// Returns a norm's mean and rstd, activation `id`, for at's tokens, live in this phase; both are NULL when planning.
static struct norm_stats norm_stats_of(struct at at, enum activation_id id) {
    if (at.ranged & (1u << id))
        return norm_stats_from(at.m, (float *)range_memory(at, id), at.largest_range_rows, 0);
    return norm_stats_from(at.m, activation_stats(at.m, at.pass, at.l, id), extent_of(at.m, at.pass).N, at.first);
}
static struct norm_stats final_norm_stats_of(struct gpt *m, enum pass pass) {
    return norm_stats_from(m, final_norm_stats(m, pass), extent_of(m, pass).N, 0);
}
// Returns the rows of the gradient in `slot` (SLOT_D_...) for at's tokens, (rows, width), live in this phase; NULL when
// planning. Ranges overwrite each other's D_MLP_PROJ, D_ACT and D_FC and, unless branches are parallel, D_NORM2.
static floatX *d_rows(struct at at, enum slot slot, int64_t width) {
    const bool ranged = slot == SLOT_D_MLP_PROJ || slot == SLOT_D_ACT || slot == SLOT_D_FC ||
                        (slot == SLOT_D_NORM2 && !at.m->shape.layer.parallel);
    if (ranged && at_is_range(at))
        return (floatX *)buffer(at.m, PASS_TRAIN, at.l, slot, (size_t)(at.largest_range_rows * width) * sizeof(floatX),
                                "chunk of the mlp", gradient_slot_names[slot - ACT_COUNT]);
    floatX *whole = d_buffer(at.m, at.l, slot, width);
    return whole ? whole + at.first * width : NULL;
}
// Returns the residual stream's gradient for at's tokens, (rows, C), live in this phase; NULL when planning.
static floatX *d_residual_rows(struct at at) {
    floatX *whole = d_residual(at.m);
    return whole ? whole + at.first * at.m->shape.layer.C : NULL;
}

struct sink {
    floatX *data;
    uint32_t *amax; // (1) where the op merges data's largest magnitude (kernels/amax.cuh); NULL: it doesn't
    float *sums;    // where the op writes partial sums of data's columns; NULL: it doesn't
};
// Returns a sink that takes neither amax nor sums. `data` is NULL when planning, and if a norm is to write no output.
static struct sink plain_sink(floatX *data) {
    const struct sink sink = {data, NULL, NULL};
    return sink;
}

// Returns the options of every norm except q's and k's. The op merges its result's amax into `amax`, unless NULL.
static struct norm_options norm_options_of(const struct gpt *m, uint32_t *amax) {
    struct norm_options options;
    options.kind = NORM_LAYERNORM;
    switch (m->shape.normalization) {
    case NORMALIZATION_LAYERNORM: break;
    case NORMALIZATION_RMSNORM: options.kind = NORM_RMSNORM; break;
    }
    options.one_plus = m->shape.norm_one_plus;
    options.epsilon = (float)m->config.model.norm_epsilon;
    options.amax = amax;
    return options;
}
