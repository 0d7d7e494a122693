// The gradient of a linear layer's bias is the column sums of the output's gradient. On a GPU the kernel that makes
// that output's gradient also leaves partial sums, so that no pass reads it again; bias_finish adds them up. On a CPU,
// and without such a kernel (attention other than Hopper's, QK norm), the weight gradient's product, wgrad, sums the
// columns while it packs dout. In FP8 layers the cast sums them.
#pragma once
#include "attention.cuh"           // attention_bias_num_runs
#include "kernels/activation.cuh"  // activation_bias_num_runs
#include "kernels/column_sums.cuh" // column_sums
#include "kernels/norm.cuh"        // norm_backward_num_runs, residual_backward_num_runs
#include "model/mlp_ranges.cuh"    // mlp_range_tokens
#include "model/sequence.cuh"      // attention_shape_of
#include "model/state.cuh"         // struct gpt and its buffers

enum bias_source { BIAS_BY_WGRAD, BIAS_BY_NORM, BIAS_BY_RESIDUAL, BIAS_BY_ACTIVATION, BIAS_BY_ATTENTION };

// Returns which op leaves partial sums of a linear layer's bias gradient in training. BIAS_BY_WGRAD means that none
// does: wgrad sums or, in FP8, the cast. It is the answer on a CPU, and for a bias that isn't trained.
static enum bias_source bias_source(const struct gpt *m, int l, enum linear linear);

// Returns bias_source of a branch's projection, after bias_source has checked all else. It is the backward, of a norm
// or of dropout and multiplier, that makes the output's gradient; else BIAS_BY_WGRAD.
static enum bias_source bias_source_of_projection(const struct gpt *m, int l, enum linear linear) {
    const struct layer_shape *s = &m->shape.layer;
    const bool last = linear == LINEAR_MLP_PROJ && l + 1 == m->shape.L; // the final norm made the stream's gradient
    if (s->norm_after)
        return BIAS_BY_NORM;
    if (!branch_is_added_unscaled(m))
        return BIAS_BY_RESIDUAL;
    if (linear == LINEAR_ATT_PROJ && s->parallel) // the two projections' outputs have one gradient, and so one sum
        return bias_source(m, l, LINEAR_MLP_PROJ) == BIAS_BY_NORM ? BIAS_BY_NORM : BIAS_BY_WGRAD;
    if (linear == LINEAR_ATT_PROJ &&
        mlp_range_tokens(m, PASS_BACKWARD, l) > 0) // norm 2's gradient goes by the MLP's ranges
        return BIAS_BY_WGRAD;
    return s->norm_before || last ? BIAS_BY_NORM : BIAS_BY_WGRAD;
}
// The number of partial sums that attention's backward can leave of each column of D_QKV; 0 if it leaves none.
static int64_t attention_bias_sum_runs(const struct gpt *m) {
    const struct extent e = extent_of(m, PASS_TRAIN);
    return attention_bias_num_runs(m->backend, attention_shape_of(&m->config, e.B, e.T));
}
static enum bias_source bias_source(const struct gpt *m, int l, enum linear linear) {
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const bool ranged = mlp_range_tokens(m, PASS_BACKWARD, l) > 0; // each range's products sum their rows
    if (!device_is_gpu(m->dev) || is_quantized(m, PASS_TRAIN, l) || !is_trained(m, l, row.bias))
        return BIAS_BY_WGRAD;
    switch (row.gradient_by) {
    case GRADIENT_BY_ATTENTION: // the norm of q and k goes on from attention's gradient
        return attention_bias_sum_runs(m) > 0 && !m->shape.layer.qk_statistics ? BIAS_BY_ATTENTION : BIAS_BY_WGRAD;
    case GRADIENT_BY_STREAM:
        return ranged && linear == LINEAR_MLP_PROJ ? BIAS_BY_WGRAD : bias_source_of_projection(m, l, linear);
    case GRADIENT_BY_ACTIVATION: return ranged ? BIAS_BY_WGRAD : BIAS_BY_ACTIVATION;
    case GRADIENT_BY_OTHERS: return BIAS_BY_WGRAD;
    }
    return BIAS_BY_WGRAD;
}

// The number of rows of bias_partial, each of which is the sum over a run of tokens; 0 if no op leaves partial sums.
static int64_t bias_num_runs(const struct gpt *m, int l, enum linear linear) {
    const int64_t N = extent_of(m, PASS_TRAIN).N;
    const int C = m->shape.layer.C;
    switch (bias_source(m, l, linear)) {
    case BIAS_BY_WGRAD: return 0;
    case BIAS_BY_NORM: return norm_backward_num_runs(N, C, m->dev);
    case BIAS_BY_RESIDUAL: return residual_backward_num_runs(N, C, m->dev);
    case BIAS_BY_ACTIVATION: return activation_bias_num_runs(N);
    case BIAS_BY_ATTENTION: return attention_bias_sum_runs(m);
    }
    return 0;
}
// Returns the linear layer whose slot has linear's partial sums. It is `linear`, except for attention's projection
// where parallel branches share one output gradient: the sums are then in the slot of the MLP's projection.
static enum linear bias_sums_owner(const struct gpt *m, enum linear linear, enum bias_source source) {
    const struct layer_shape *s = &m->shape.layer;
    const bool shared = s->parallel && source == BIAS_BY_NORM && !s->norm_after;
    return shared && linear == LINEAR_ATT_PROJ ? LINEAR_MLP_PROJ : linear;
}
// Returns where op `source` leaves the partial sums of a bias's gradient, (bias_num_runs, outputs), kept live in this
// phase. NULL if this op leaves none for the bias, for l -1, and when planning. bias_finish calls this to read them.
static float *bias_partial(struct gpt *m, int l, enum linear linear, enum bias_source source) {
    if (source == BIAS_BY_WGRAD || l < 0 || bias_source(m, l, linear) != source)
        return NULL;
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const size_t bytes = (size_t)bias_num_runs(m, l, linear) * (size_t)row.outputs * sizeof(float);
    const int slot = SLOT_BIAS_SUMS + (int)bias_sums_owner(m, linear, source);
    return (float *)buffer(m, PASS_TRAIN, l, slot, bytes, "sums of bias gradients", row.name);
}
// Returns bias_partial of a projection if its output's gradient is the residual stream's, made by a norm; else NULL.
static float *stream_bias_partial(struct gpt *m, int l, enum linear projection) {
    const bool as_it_is = !m->shape.layer.norm_after && branch_is_added_unscaled(m);
    return as_it_is ? bias_partial(m, l, projection, BIAS_BY_NORM) : NULL;
}
// Adds up a bias's partial sums, in this phase: writes the gradient or, if accumulates(m), adds to it. Returns false,
// with nothing done, if no op leaves partial sums; linear_backward then sums.
static bool bias_finish(struct gpt *m, int l, enum linear linear) {
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const int64_t chunks = bias_num_runs(m, l, linear);
    if (chunks == 0)
        return false;
    const float *partial = bias_partial(m, l, linear, bias_source(m, l, linear));
    float *db = grad(m, l, row.bias);
    RUN(m, column_sums(db, partial, chunks, row.outputs, accumulates(m), m->dev));
    return true;
}
