// One transformer block: its forward pass, which recomputation calls again, and its backward pass.
#pragma once
#include "model/attend.cuh" // make_qkv, attend, attend_backward, qkv_backward
#include "model/branch.cuh" // branch_norm, branch_end, begin_projection_backward, branch_input_backward
#include "model/mlp.cuh"    // mlp_forward, mlp_backward

// Brings in the parameters of layer at.l, unless at.produce is empty. In forward also begins to fetch the next layer's
// parameters or, in the last layer, the head's and, in training, the stored sums of the head's gradients.
static void block_fetch_parameters(struct at at) {
    struct gpt *m = at.m;
    const int next = next_unit(at);
    if (at.produce)
        use_unit(m, at.pass, unit_of_layer(&m->table, at.l));
    if (at.pass == PASS_BACKWARD)
        return;
    prefetch_unit(m, at.pass, next);
    if (next == unit_of_head())
        prefetch_unit(m, head_pass(m, at.pass), unit_with_head_weight(m));
    if (next == unit_of_head() && at.pass == PASS_TRAIN) {
        zero_prefetch_gradients(&m->zero, unit_of_head());
        zero_prefetch_gradients(&m->zero, unit_with_head_weight(m));
    }
}

// Runs layer l's ops that make activations in `produce`: ACT_ALL, without SOFTMAX in PASS_GENERATE; policy_recomputed
// in recomputation. Leaves out what backward makes by token ranges. Outside recomputation l's last addition makes the
// next layer's NORM1 too, or the final norm; only layer 0 makes its own NORM1. Every rank calls this.
static void block_forward(struct gpt *m, int l, uint32_t produce, enum pass pass) {
    const uint32_t made = produce & activation_present(&m->shape.layer) & ~left_to_backward_ranges(m, pass, l, produce);
    const struct at at = at_layer(m, pass, l, made);
    block_fetch_parameters(at);

    branch_norm(at, &ATTENTION_BRANCH); // layer input -> NORM1, where the layer before has not made it
    cast_input(at, LINEAR_QKV);         // FP8 only
    make_qkv(at);                       // NORM1 -> QKV, q and k rotated (in some models normed first)
    attend(at);                         // QKV -> ATT
    branch_end(at, &ATTENTION_BRANCH);  // ATT projected; then one op: + layer input -> MID -> NORM2

    branch_norm(at, &MLP_BRANCH); // MID -> NORM2, where that op has not made it
    if (mlp_range_tokens(m, pass, l) > 0)
        mlp_forward_ranges(at);
    else
        mlp_forward(at);         // NORM2 -> FC -> ACT
    branch_end(at, &MLP_BRANCH); // ACT projected; then one op: + MID -> OUT -> the next layer's NORM1
}

// Writes or adds the MLP's parameter gradients, as linear_backward does, and turns d_residual from the gradient of OUT
// into the gradient of MID. With parallel branches leaves d_residual to block_backward.
static void mlp_branch_backward(struct at at) {
    // OUT's gradient -> D_ACT -> D_FC -> D_NORM2. Reads FC; for the weights' gradients ACT and NORM2.
    mlp_backward(at, begin_projection_backward(at, &MLP_BRANCH));
    if (!at.m->shape.layer.parallel)
        branch_input_backward(at, &MLP_BRANCH); // d_residual: OUT's gradient -> MID's
}
// Does what mlp_branch_backward does, a range of tokens at a time. Recomputes each range's activations first.
static void mlp_branch_backward_ranges(struct at at) {
    struct at range = at_backward_ranges(at);
    phase(at.m, PHASES_BACKWARD, at.l, "mlp");
    addend_gradient(at, &MLP_BRANCH, NULL);
    struct timeline_loop loop = timeline_loop_of(&at.m->timeline, range.largest_range_rows, at.rows);
    while (at_next(&range, &loop)) {
        branch_norm(range, &MLP_BRANCH);
        mlp_forward(range);
        branch_project(range, &MLP_BRANCH);
        mlp_branch_backward(range);
    }
}
// Writes or adds layer l's parameter gradients and turns d_residual from the output's gradient into the input's. Before
// a group's last layer l, call fetch_group, and then block_forward with policy_recomputed for each layer of the group.
// After each layer, call zero_reduce for its unit. Every rank calls this.
static void block_backward(struct gpt *m, int l) {
    const struct at at = at_layer(m, PASS_BACKWARD, l, 0);
    const int next = next_backward_layer(m, l);
    zero_begin_gradients(&m->zero, unit_of_layer(&m->table, l));
    use_unit(m, PASS_BACKWARD, unit_of_layer(&m->table, l));
    if (next >= 0)
        prefetch_unit(m, PASS_BACKWARD, unit_of_layer(&m->table, next));

    if (mlp_range_tokens(m, PASS_BACKWARD, l) > 0)
        mlp_branch_backward_ranges(at);
    else
        mlp_branch_backward(at);

    // MID's gradient -> D_ATT -> D_QKV, RoPE undone. Reads QKV, ATT, the log-sum-exp; for the weights' gradient ATT.
    attend_backward(at, begin_projection_backward(at, &ATTENTION_BRANCH));
    qkv_backward(at);                             // D_QKV -> D_NORM1; reads NORM1 for the weights' gradient
    branch_input_backward(at, &ATTENTION_BRANCH); // d_residual: MID's gradient -> the layer input's
    if (m->shape.layer.parallel)
        branch_input_backward(at, &MLP_BRANCH);
}
