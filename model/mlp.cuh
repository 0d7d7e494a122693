// The MLP of a block, of all tokens or of a range: its first product and activation forward; its whole backward.
#pragma once
#include "model/activations.cuh"    // ACTIVATION_SWITCH
#include "model/bias_gradients.cuh" // bias_partial, bias_source
#include "model/linear.cuh"         // linear_forward, linear_backward
#include "model/mlp_ranges.cuh"     // at_forward_ranges, at_next

// act.data (N, F) = the MLP's activation of fc (N, fc_width). Merges its amax into act.amax. Makes no act.sums.
static void mlp_activation_forward(struct sink act, const floatX *fc, int64_t N, const struct model_shape *s,
                                   struct device *dev) {
#define POINTWISE(name) name##_forward(act.data, fc, N * s->layer.F, act.amax, dev)
#define GATED(name) name##_forward(act.data, fc, N, s->layer.F, act.amax, dev)
    ACTIVATION_SWITCH(s->activation, POINTWISE, GATED)
#undef GATED
#undef POINTWISE
}
// dfc.data (N, fc_width) = fc's gradient from dact (N, F). Makes dfc.sums and amax. dfc.data may be dact unless gated.
static void mlp_activation_backward(struct sink dfc, const floatX *dact, const floatX *fc, int64_t N,
                                    const struct model_shape *s, struct device *dev) {
#define BACKWARD(name) name##_backward(dfc.data, dfc.sums, dact, fc, N, s->layer.F, dfc.amax, dev)
    ACTIVATION_SWITCH(s->activation, BACKWARD, BACKWARD)
#undef BACKWARD
}

// Makes FC and the MLP's activation, in new phases, as far as at.produce asks. In FP8 layers first casts FC's input.
static void mlp_forward(struct at at) {
    struct gpt *m = at.m;
    cast_input(at, LINEAR_FC);
    if (produces(at, BIT(FC))) {
        phase_at(at, forward_group(at.pass), "fc");
        linear_forward(at, LINEAR_FC, rows_of(at, ACT_FC));
    }
    if (!linear_input_is_wanted(at, LINEAR_MLP_PROJ))
        return;
    phase_at(at, forward_group(at.pass), "activation");
    const floatX *fc = rows_of(at, ACT_FC);
    if (producer_writes_fp8(at, LINEAR_MLP_PROJ)) {
        activate_in_fp8(at, fc);
        return;
    }
    const struct sink act = input_sink(at, LINEAR_MLP_PROJ);
    RUN(m, mlp_activation_forward(act, fc, at.rows, &m->shape, m->dev));
}

// Makes FC, the activation and the projection's output range by range. Does nothing if at.produce lacks that output.
static void mlp_forward_ranges(struct at at) {
    const enum activation_id product = linear_row(LINEAR_MLP_PROJ, &at.m->shape.layer).source.product;
    if (!produces(at, 1u << product))
        return;
    struct at range = at_forward_ranges(at);
    struct timeline_loop loop = timeline_loop_of(&at.m->timeline, range.largest_range_rows, at.rows);
    while (at_next(&range, &loop)) {
        mlp_forward(range);
        phase_at(range, forward_group(at.pass), "mlp projection");
        linear_forward(range, LINEAR_MLP_PROJ, rows_of(range, product));
    }
}
// Returns FC, live in this phase, if linear_backward of the MLP's projection may go on through GELU. Its `pre` is NULL
// when planning. Returns NO_GELU for a range, in an FP8 layer, with an adapter, and for other activations.
static struct gelu_input gelu_input_of(struct at at) {
    struct gpt *m = at.m;
    if (m->shape.activation != ACTIVATION_GELU || has_adapter(m, LINEAR_MLP_PROJ) ||
        is_quantized(m, PASS_TRAIN, at.l) || at_is_range(at))
        return NO_GELU;
    const struct gelu_input gelu = {rows_of(at, ACT_FC), bias_source(m, at.l, LINEAR_FC) == BIAS_BY_ACTIVATION};
    return gelu;
}
// Goes back from dproj (rows, C), the gradient of the MLP projection's output, live in this phase, to D_NORM2, in this
// and new phases. Writes or adds the parameters' gradients as linear_backward does.
static void mlp_backward(struct at at, const floatX *dproj) {
    struct gpt *m = at.m;
    const struct layer_shape *s = &m->shape.layer;
    const bool sums_bias = !bias_finish(m, at.l, LINEAR_MLP_PROJ);
    const bool applied =
        linear_backward(at, LINEAR_MLP_PROJ, SLOT_D_ACT, DIN_WRITTEN, dproj, sums_bias, gelu_input_of(at));

    phase_at(at, PHASES_BACKWARD, "activation");
    const floatX *dact = d_rows(at, SLOT_D_ACT, s->F), *fc = rows_of(at, ACT_FC);
    if (producer_writes_fp8(at, LINEAR_MLP_PROJ)) { // its backward, too
        activation_backward_in_fp8(at, dact, fc);
        return;
    }
    // dfc overwrites dact, unless a gated activation makes it twice as wide.
    const enum slot slot = s->gated ? SLOT_D_FC : SLOT_D_ACT;
    struct sink dfc = plain_sink(d_rows(at, slot, fc_width(s)));
    dfc.sums = bias_partial(m, at.l, LINEAR_FC, BIAS_BY_ACTIVATION);
    dfc.amax = gradient_amax(m, at.l, LINEAR_FC);
    if (applied)
        RUN(m, activation_bias_sums(dfc.sums, dfc.data, at.rows, fc_width(s), m->dev));
    else
        RUN(m, mlp_activation_backward(dfc, dact, fc, at.rows, &m->shape, m->dev));

    phase_at(at, PHASES_BACKWARD, "fc");
    const floatX *dout = d_rows(at, slot, fc_width(s));
    const bool fc_sums_bias = !bias_finish(m, at.l, LINEAR_FC);
    linear_backward(at, LINEAR_FC, SLOT_D_NORM2, DIN_WRITTEN, dout, fc_sums_bias, NO_GELU);
}
