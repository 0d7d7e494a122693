// The MLP by ranges of tokens (--mlp-chunk-tokens; in plans a range is called a chunk, too). Of a layer that keeps
// neither FC nor ACT, both exist for one range of tokens at a time: the ops (model/mlp.cuh) are called for each range.
// The backward of a range makes again what it reads, from the MLP's input to the activation; the weights' fp32
// gradients add up over the ranges. A range reads both weights again, in each of three products, and reads and writes
// their gradients: mlp_chunk_default (recompute.cuh) weighs that. Rows do not depend on each other: forward differs
// from the MLP at once only where a matmul's sums depend on its number of rows.
#pragma once
#include "model/at.cuh" // struct gpt and its buffers, struct at

// The number of tokens of a range of layer l's MLP in a pass; the last may be shorter. 0: no ranges, all at once.
static int64_t mlp_range_tokens(const struct gpt *m, enum pass pass, int l) {
    const int64_t tokens = m->config.memory.mlp_chunk_tokens;
    const bool trains = pass == PASS_TRAIN || pass == PASS_BACKWARD;
    const bool kept = trains && kept_activations(m, l) & (BIT(FC) | BIT(ACT));
    return tokens < extent_of(m, pass).N && !kept && !is_quantized(m, pass, l) ? tokens : 0;
}
// Returns activations, some maybe not in `produce`, that block_forward(produce) leaves to backward's ranges; else 0.
static uint32_t made_by_ranges(const struct gpt *m, enum pass pass, int l, uint32_t produce) {
    if (pass != PASS_BACKWARD || mlp_range_tokens(m, pass, l) == 0)
        return 0;
    return produce & BIT(OUT) ? BIT(POST2_STATS) : BIT(NORM2) | BIT(FC) | BIT(ACT) | BIT(MLP_PROJ) | BIT(POST2_STATS);
}

// Returns `at`, all tokens of a layer with ranges, with the ranges' most_rows and last_rows; at_next sets first, rows.
static struct at at_ranges(struct at at) {
    at.most_rows = mlp_range_tokens(at.m, at.pass, at.l);
    at.last_rows = (at.rows - 1) % at.most_rows + 1;
    return at;
}
// Returns at_ranges(whole), for at_next: produces FC and ACT a range at a time, and the second product whole.
static struct at at_forward_ranges(struct at whole) {
    const enum activation_id product = linear_row(LINEAR_MLP_PROJ, &whole.m->shape.layer).source.product;
    struct at at = at_ranges(whole);
    at.ranged = BIT(FC) | BIT(ACT);
    at.produce = at.ranged | 1u << product;
    return at;
}
// Returns at_ranges(whole), for at_next: each range makes what the policy drops from norm 2 to the norm after the MLP.
static struct at at_backward_ranges(struct at whole) {
    const uint32_t members = BIT(NORM2) | BIT(FC) | BIT(ACT) | BIT(MLP_PROJ) | BIT(POST2_STATS);
    struct at at = at_ranges(whole);
    at.ranged = members & activation_present(&at.m->shape.layer) & ~kept_activations(at.m, at.l);
    at.produce = at.ranged & ~BIT(POST2_STATS); // which the backward of the norm after the MLP makes
    at.range_slot = SLOT_RANGE;
    return at;
}
// Moves *at to the loop's next range, of which planning has only one. Returns false, *at unusable, where none is left.
static bool at_next(struct at *at, struct timeline_loop *loop) {
    const bool more = timeline_loop_next(&at->m->timeline, loop);
    at->first = loop->first;
    at->rows = loop->end - loop->first < loop->step ? loop->end - loop->first : loop->step;
    return more;
}
