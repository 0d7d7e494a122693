// The MLP by ranges of tokens (--mlp-chunk-tokens; plans call a range a chunk), to save memory. If a layer keeps
// neither FC nor ACT, both exist for one range at a time. A range's backward first makes again what it reads. The
// price: each range reads both weights in three products, and adds to their fp32 gradients (mlp_chunk_default weighs
// that). Forward has other bits than without ranges only where a matmul's sums depend on its number of rows.
#pragma once
#include "model/at.cuh" // struct gpt and its buffers, struct at

// The number of tokens of a range of layer l's MLP in a pass; the last range may be shorter. 0: there are no ranges.
static int64_t mlp_range_tokens(const struct gpt *m, enum pass pass, int l) {
    const int64_t tokens = m->config.memory.mlp_chunk_tokens;
    const bool trains = pass == PASS_TRAIN || pass == PASS_BACKWARD;
    const bool kept = trains && kept_activations(m, l) & (BIT(FC) | BIT(ACT));
    return tokens < extent_of(m, pass).N && !kept && !is_quantized(m, pass, l) ? tokens : 0;
}
// Returns the activations, in `produce` or not, that recomputation leaves to the ranges of backward. If `produce` has
// OUT, they are only POST2_STATS. Returns 0 in another pass than PASS_BACKWARD, and without ranges.
static uint32_t left_to_backward_ranges(const struct gpt *m, enum pass pass, int l, uint32_t produce) {
    if (pass != PASS_BACKWARD || mlp_range_tokens(m, pass, l) == 0)
        return 0;
    return produce & BIT(OUT) ? BIT(POST2_STATS) : BIT(NORM2) | BIT(FC) | BIT(ACT) | BIT(MLP_PROJ) | BIT(POST2_STATS);
}

// Returns `at`, all tokens of a layer with ranges, with the largest range's number of rows set, and the last range's.
static struct at at_with_range_rows(struct at at) {
    at.largest_range_rows = mlp_range_tokens(at.m, at.pass, at.l);
    at.last_range_rows = (at.rows - 1) % at.largest_range_rows + 1;
    return at;
}
// Returns forward's ranges, for at_next. Each makes FC, ACT and its rows of the projection's output.
static struct at at_forward_ranges(struct at whole) {
    const enum activation_id product = linear_row(LINEAR_MLP_PROJ, &whole.m->shape.layer).source.product;
    struct at at = at_with_range_rows(whole);
    at.ranged = BIT(FC) | BIT(ACT);
    at.produce = at.ranged | 1u << product;
    return at;
}
// Returns backward's ranges, for at_next. NORM2, FC, ACT, MLP_PROJ and POST2_STATS, where dropped, exist for one range
// at a time. A range makes them again, except POST2_STATS, which the backward of the norm after the MLP makes.
static struct at at_backward_ranges(struct at whole) {
    const uint32_t members = BIT(NORM2) | BIT(FC) | BIT(ACT) | BIT(MLP_PROJ) | BIT(POST2_STATS);
    struct at at = at_with_range_rows(whole);
    at.ranged = members & activation_present(&at.m->shape.layer) & ~kept_activations(at.m, at.l);
    at.produce = at.ranged & ~BIT(POST2_STATS); // which the backward of the norm after the MLP makes
    at.range_slot = SLOT_RANGE;
    return at;
}
// Moves *at to the loop's next range. Returns false if none is left; *at is then unusable. Planning has only one range.
static bool at_next(struct at *at, struct timeline_loop *loop) {
    const bool more = timeline_loop_next(&at->m->timeline, loop);
    at->first = loop->first;
    at->rows = loop->end - loop->first < loop->step ? loop->end - loop->first : loop->step;
    return more;
}
