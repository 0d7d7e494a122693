// The MLP's activation, and the MLP in chunks of tokens (--mlp-chunk-tokens).
//
// Of a layer that keeps neither FC nor ACT for its backward, both exist for one chunk of tokens at a time, forward and
// backward. The backward of a chunk recomputes what it reads, from the MLP's input to the activation, then goes back
// from the gradient of the branch to that of the residual stream; the weights' fp32 gradients add up over the chunks.
// A chunk reads both weights again, in each of three products of 2 bytes an element, and reads and writes the fp32
// gradients, 8 bytes: mlp_chunk_default (recompute.cuh) weighs that.
//
// One chunk is planned, and every chunk runs in its phases. What outlives a chunk is live in all of them: chunk_phase
// touches it. Rows do not depend on each other, so that forward differs from the MLP at once only where a matmul's sums
// depend on its number of rows; gradients of parameters are sums over chunks.
#pragma once
#include "kernels/activation.cuh"     // gelu_forward, swiglu_forward and the like, and their backward
#include "kernels/activation_fp8.cuh" // the same, written in FP8
#include "kernels/norm.cuh"           // norm_forward, norm_backward, residual_forward
#include "model/linear.cuh"           // linear_input
#include "model/lora.cuh"             // lora_forward, lora_backward
#include "model/state.cuh"            // struct gpt and its buffers

// Applies POINTWISE or GATED to the name that an activation's functions begin with (kernels/activation.cuh).
#define ACTIVATION_SWITCH(activation, POINTWISE, GATED)                                                                \
    switch (activation) {                                                                                              \
    case ACTIVATION_GELU: POINTWISE(gelu); break;                                                                      \
    case ACTIVATION_GELU_ERF: POINTWISE(gelu_erf); break;                                                              \
    case ACTIVATION_SQUARED_RELU: POINTWISE(squared_relu); break;                                                      \
    case ACTIVATION_SWIGLU: GATED(swiglu); break;                                                                      \
    case ACTIVATION_GEGLU: GATED(geglu); break;                                                                        \
    }

// act (N, F) = the MLP's activation of fc (N, fc_width); backward: dfc from dact. amax: of the result; NULL: not taken.
static void mlp_activation_forward(floatX *act, const floatX *fc, int64_t N, const struct model_shape *s,
                                   uint32_t *amax, struct device *dev) {
#define POINTWISE(name) name##_forward(act, fc, N * s->layer.F, amax, dev)
#define GATED(name) name##_forward(act, fc, N, s->layer.F, amax, dev)
    ACTIVATION_SWITCH(s->activation, POINTWISE, GATED)
#undef GATED
#undef POINTWISE
}
static void mlp_activation_backward(floatX *dfc, float *bias_partial, const floatX *dact, const floatX *fc, int64_t N,
                                    const struct model_shape *s, uint32_t *amax, struct device *dev) {
#define BACKWARD(name) name##_backward(dfc, bias_partial, dact, fc, N, s->layer.F, amax, dev)
    ACTIVATION_SWITCH(s->activation, BACKWARD, BACKWARD)
#undef BACKWARD
}
// The same, written in FP8 alone, with delayed scales, which are known before the values are.
static void mlp_activation_forward_fp8(struct fp8_cast to, const floatX *fc, int64_t N, const struct model_shape *s,
                                       struct device *dev) {
#define IN_FP8(name) name##_forward_fp8(to, fc, N, s->layer.F, NULL, dev)
    ACTIVATION_SWITCH(s->activation, IN_FP8, IN_FP8)
#undef IN_FP8
}
static void mlp_activation_backward_fp8(struct fp8_cast to, const floatX *dact, const floatX *fc, int64_t N,
                                        const struct model_shape *s, void *ws, struct device *dev) {
#define IN_FP8(name) name##_backward_fp8(to, dact, fc, N, s->layer.F, ws, dev)
    ACTIVATION_SWITCH(s->activation, IN_FP8, IN_FP8)
#undef IN_FP8
}
// ---- Chunks of tokens ----

// Tokens of a chunk of layer l's MLP in a pass; 0: all at once.
static int64_t mlp_chunk_tokens(const struct gpt *m, enum pass pass, int l) {
    const int64_t tokens = m->config.mlp_chunk_tokens;
    const bool trains = pass == PASS_TRAIN || pass == PASS_BACKWARD;
    const bool kept = trains && kept_activations(m, l) & (BIT(FC) | BIT(ACT));
    return tokens < extent_of(m, pass).N && !kept && !is_quantised(m, pass, l) ? tokens : 0;
}
// Those of `produce` that block_forward leaves to the backward of the MLP's chunks.
static uint32_t left_to_chunks(const struct gpt *m, enum pass pass, int l, uint32_t produce) {
    if (pass != PASS_BACKWARD || mlp_chunk_tokens(m, pass, l) == 0)
        return 0;
    return produce & BIT(OUT) ? BIT(POST2_STATS) : BIT(NORM2) | BIT(FC) | BIT(ACT) | BIT(MLP_PROJ) | BIT(POST2_STATS);
}

// Tokens [first, first + rows) of a pass. most, last: the rows of the first and of the last chunk.
struct chunk {
    int64_t first, rows, most, last;
};
static struct chunk chunk_at(int64_t first, int64_t tokens, int64_t N) {
    const struct chunk c = {first, N - first < tokens ? N - first : tokens, tokens, (N - 1) % tokens + 1};
    return c;
}
// A buffer of (most, width) values, used again by each chunk.
static floatX *chunk_buffer(struct gpt *m, enum pass pass, int l, int slot, int64_t width, struct chunk c,
                            const char *name) {
    return (floatX *)buffer(m, pass, l, slot, (size_t)(c.most * width) * sizeof(floatX), "chunk of the mlp", name);
}
// An activation that a chunk's backward recomputes.
static floatX *chunk_activation(struct gpt *m, int l, enum activation_id id, struct chunk c) {
    const struct activation_row row = activation_row_of(m, PASS_EVALUATE, l, id);
    return (floatX *)buffer(m, PASS_BACKWARD, l, SLOT_CHUNK + (int)id, (size_t)(row.bytes_per_token * c.most),
                            "chunk of the mlp", row.name);
}
// Scratch memory of a chunk's products, behind what linear_weight needs.
static void *chunk_matmul_workspace(struct gpt *m, int l, struct chunk c, enum linear linear) {
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const size_t products = larger(matmul_workspace_bytes(c.most, row.outputs, row.inputs, m->dev),
                                   matmul_workspace_bytes(c.last, row.outputs, row.inputs, m->dev));
    const size_t bytes = larger(products, lora_workspace_bytes(m, linear, c.most, c.last));
    return workspace(m, linear_weight_bytes(m, l, linear) + bytes);
}
// linear_forward and linear_backward of a chunk's rows.
static void chunk_linear_forward(struct gpt *m, enum pass pass, int l, enum linear linear, floatX *out,
                                 const floatX *in, struct chunk c) {
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const floatX *b = param(m, pass, l, row.bias);
    void *memory = chunk_matmul_workspace(m, l, c, linear),
         *ws = bytes_behind(memory, linear_weight_bytes(m, l, linear));
    const floatX *w = linear_weight(m, pass, l, linear, memory);
    MATMUL(m, matmul_forward(out, in, w, b, c.rows, row.outputs, row.inputs, ws, m->dev));
    lora_forward(m, pass, l, linear, out, in, c.rows, ws);
}
static void chunk_linear_backward(struct gpt *m, int l, enum linear linear, floatX *din, const floatX *dout,
                                  const floatX *in, struct chunk c) {
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const int n = row.outputs, k = row.inputs;
    float *dw = grad(m, l, row.weight), *db = grad(m, l, row.bias);
    void *memory = chunk_matmul_workspace(m, l, c, linear),
         *ws = bytes_behind(memory, linear_weight_bytes(m, l, linear));
    const floatX *w = linear_weight(m, PASS_BACKWARD, l, linear, memory);
    const bool add = adds(m) || c.first > 0;
    MATMUL(m, matmul_backward_input(din, dout, w, c.rows, n, k, ws, m->dev));
    if (is_trained(m, l, row.weight))
        MATMUL(m, matmul_backward_weight(dw, db, dout, in, c.rows, n, k, add, ws, m->dev));
    lora_backward(m, l, linear, din, dout, in, c.rows, add, ws);
}

// ---- Forward ----

// Rows of the second projection's output, in the activation `product`, from the MLP's input.
static void mlp_forward_chunk(struct gpt *m, enum pass pass, int l, enum activation_id product, struct chunk c) {
    const struct layer_shape *s = &m->shape.layer;
    const enum phase_group group = forward_group(pass);
    const int64_t row = c.first * s->C;

    phase(m, group, l, "fc of a chunk");
    timeline_touch(activation(m, pass, l, product));
    const floatX *in = linear_input(m, pass, l, LINEAR_FC);
    floatX *fc = chunk_buffer(m, pass, l, ACT_FC, fc_width(s), c, "fc");
    chunk_linear_forward(m, pass, l, LINEAR_FC, fc, in + row, c);

    phase(m, group, l, "activation of a chunk");
    fc = chunk_buffer(m, pass, l, ACT_FC, fc_width(s), c, "fc");
    floatX *act = chunk_buffer(m, pass, l, ACT_ACT, s->F, c, s->activation_name);
    RUN(m, mlp_activation_forward(act, fc, c.rows, &m->shape, NULL, m->dev));

    phase(m, group, l, "mlp projection of a chunk");
    timeline_touch(linear_input(m, pass, l, LINEAR_FC));
    floatX *out = activation(m, pass, l, product);
    act = chunk_buffer(m, pass, l, ACT_ACT, s->F, c, s->activation_name);
    chunk_linear_forward(m, pass, l, LINEAR_MLP_PROJ, out + row, act, c);
}
// The MLP up to the output of its second projection, the activation `product`.
static void mlp_chunks_forward(struct gpt *m, enum pass pass, int l, enum activation_id product) {
    const int64_t N = extent_of(m, pass).N, tokens = mlp_chunk_tokens(m, pass, l);
    const int chunk_phases = m->timeline.phase;
    for (int64_t first = 0; first < (timeline_plans(&m->timeline) ? 1 : N); first += tokens) {
        m->timeline.phase = chunk_phases;
        mlp_forward_chunk(m, pass, l, product, chunk_at(first, tokens, N));
    }
}

// ---- Backward ----

// Whether a branch joins the residual stream without dropout and multiplier.
static bool branch_is_added_as_it_is(const struct gpt *m) {
    return (!m->dropout || m->config.hidden_dropout == 0) && residual_scale(m) == 1;
}
// (N, C) the gradient of what the MLP adds to the residual stream.
static floatX *d_mlp_added(struct gpt *m, int l) {
    return branch_is_added_as_it_is(m) ? d_residual(m) : d_buffer(m, l, SLOT_D_MLP_ADDED, m->shape.layer.C);
}
// (N, C) what the MLP reads, before its norm.
static floatX *mlp_source(struct gpt *m, int l) {
    const bool parallel = m->shape.layer.parallel;
    return activation(m, PASS_BACKWARD, parallel ? l - 1 : l, parallel ? ACT_OUT : ACT_MID);
}
// Rows of the MLP's input: of the whole one, where that is kept or there is no norm, or a chunk's.
static bool mlp_input_is_whole(const struct gpt *m, int l) {
    return !m->shape.layer.norm_before || kept_activations(m, l) & BIT(NORM2);
}
static floatX *mlp_whole_input(struct gpt *m, int l) {
    return m->shape.layer.norm_before ? activation(m, PASS_BACKWARD, l, ACT_NORM2) : mlp_source(m, l);
}
static floatX *chunk_input(struct gpt *m, int l, struct chunk c) {
    return mlp_input_is_whole(m, l) ? mlp_whole_input(m, l) + c.first * m->shape.layer.C
                                    : chunk_activation(m, l, ACT_NORM2, c);
}
// Rows of the gradient of the MLP's input: a chunk's, or, with parallel branches, of the whole one.
static floatX *chunk_d_input(struct gpt *m, int l, struct chunk c) {
    const int C = m->shape.layer.C;
    return m->shape.layer.parallel ? d_buffer(m, l, SLOT_D_NORM2, C) + c.first * C
                                   : chunk_buffer(m, PASS_TRAIN, l, SLOT_D_NORM2, C, c, "d norm 2");
}

// Begins a phase of a chunk's backward, in which all that outlives the chunk is live.
static void chunk_phase(struct gpt *m, enum phase_group group, int l, const char *name) {
    const struct layer_shape *s = &m->shape.layer;
    phase(m, group, l, name);
    timeline_touch(d_residual(m));
    timeline_touch(d_mlp_added(m, l));
    timeline_touch(mlp_source(m, l));
    if (mlp_input_is_whole(m, l))
        timeline_touch(mlp_whole_input(m, l));
    if (s->norm_before)
        timeline_touch(activation_stats(m, PASS_BACKWARD, l, ACT_NORM2_STATS));
    if (s->norm_after && kept_activations(m, l) & BIT(POST2_STATS))
        timeline_touch(activation_stats(m, PASS_BACKWARD, l, ACT_POST2_STATS));
    if (s->parallel)
        timeline_touch(d_buffer(m, l, SLOT_D_NORM2, s->C));
}

// norm_backward of a chunk's rows; residual: may be dx; NULL: 0; stats (n) reciprocal standard deviations, then, for
// LayerNorm, (n) means, of which the chunk's begin at `first`.
static void chunk_norm_gradient(struct gpt *m, int l, floatX *dx, const floatX *residual, const floatX *dout,
                                const floatX *x, float *stats, int64_t n, int64_t first, struct norm_weights weights,
                                struct chunk c) {
    const int C = m->shape.layer.C;
    const floatX *w = param(m, PASS_BACKWARD, l, weights.weight);
    float *dw = grad(m, l, weights.weight), *db = grad(m, l, weights.bias), *mean = mean_of(m, stats, n);
    void *ws = workspace(
        m, larger(norm_backward_workspace_bytes(c.most, C, m->dev), norm_backward_workspace_bytes(c.last, C, m->dev)));
    RUN(m, norm_backward(dx, NULL, dw, db, residual, dout, x, w, mean ? mean + first : NULL, stats + first, c.rows, C,
                         adds(m) || c.first > 0, norm_options_of(m, NULL), ws, m->dev));
}

// What a chunk's backward reads, from the MLP's norm to its activation.
static void chunk_recompute(struct gpt *m, int l, struct chunk c) {
    const struct layer_shape *s = &m->shape.layer;
    const enum phase_group group = forward_group(PASS_BACKWARD);
    if (!mlp_input_is_whole(m, l)) {
        chunk_phase(m, group, l, "norm 2 of a chunk");
        floatX *in = chunk_input(m, l, c);
        const floatX *x = mlp_source(m, l), *w = param(m, PASS_BACKWARD, l, NORM_2.weight),
                     *b = param(m, PASS_BACKWARD, l, NORM_2.bias);
        RUN(m, norm_forward(in, NULL, NULL, x + c.first * s->C, w, b, c.rows, s->C, norm_options_of(m, NULL), m->dev));
    }
    chunk_phase(m, group, l, "fc of a chunk");
    const floatX *in = chunk_input(m, l, c);
    floatX *fc = chunk_activation(m, l, ACT_FC, c);
    chunk_linear_forward(m, PASS_BACKWARD, l, LINEAR_FC, fc, in, c);

    chunk_phase(m, group, l, "activation of a chunk");
    fc = chunk_activation(m, l, ACT_FC, c);
    floatX *act = chunk_activation(m, l, ACT_ACT, c);
    RUN(m, mlp_activation_forward(act, fc, c.rows, &m->shape, NULL, m->dev));
}
// The gradient of the second projection's output, through the norm after it.
static void chunk_norm_after_backward(struct gpt *m, int l, struct chunk c) {
    const int C = m->shape.layer.C;
    const bool kept = kept_activations(m, l) & BIT(POST2_STATS);
    chunk_phase(m, forward_group(PASS_BACKWARD), l, "mlp projection of a chunk");
    const floatX *act = chunk_activation(m, l, ACT_ACT, c);
    floatX *proj = chunk_activation(m, l, ACT_MLP_PROJ, c);
    chunk_linear_forward(m, PASS_BACKWARD, l, LINEAR_MLP_PROJ, proj, act, c);

    chunk_phase(m, GROUP_BACKWARD, l, "post-mlp norm of a chunk");
    proj = chunk_activation(m, l, ACT_MLP_PROJ, c);
    float *stats = kept ? activation_stats(m, PASS_BACKWARD, l, ACT_POST2_STATS)
                        : (float *)chunk_activation(m, l, ACT_POST2_STATS, c);
    const int64_t n = kept ? extent_of(m, PASS_TRAIN).N : c.most;
    if (!kept) {
        const floatX *w = param(m, PASS_BACKWARD, l, NORM_POST_2.weight),
                     *b = param(m, PASS_BACKWARD, l, NORM_POST_2.bias);
        RUN(m,
            norm_forward(NULL, mean_of(m, stats, n), stats, proj, w, b, c.rows, C, norm_options_of(m, NULL), m->dev));
    }
    const floatX *dadded = d_mlp_added(m, l);
    floatX *dproj = chunk_buffer(m, PASS_TRAIN, l, SLOT_D_MLP_PROJ, C, c, "d mlp projection");
    chunk_norm_gradient(m, l, dproj, NULL, dadded + c.first * C, proj, stats, n, kept ? c.first : 0, NORM_POST_2, c);
}
static void mlp_backward_chunk(struct gpt *m, int l, struct chunk c) {
    const struct layer_shape *s = &m->shape.layer;
    const int C = s->C;
    chunk_recompute(m, l, c);
    if (s->norm_after)
        chunk_norm_after_backward(m, l, c);

    chunk_phase(m, GROUP_BACKWARD, l, "mlp projection of a chunk");
    const floatX *dproj =
        s->norm_after ? chunk_buffer(m, PASS_TRAIN, l, SLOT_D_MLP_PROJ, C, c, NULL) : d_mlp_added(m, l) + c.first * C;
    const floatX *act = chunk_activation(m, l, ACT_ACT, c);
    timeline_touch(chunk_activation(m, l, ACT_FC, c));
    floatX *dact = chunk_buffer(m, PASS_TRAIN, l, SLOT_D_ACT, s->F, c, "d activation");
    chunk_linear_backward(m, l, LINEAR_MLP_PROJ, dact, dproj, act, c);

    chunk_phase(m, GROUP_BACKWARD, l, "activation of a chunk");
    const enum slot slot_dfc = s->gated ? SLOT_D_FC : SLOT_D_ACT; // as in mlp_branch_backward
    const floatX *fc = chunk_activation(m, l, ACT_FC, c);
    dact = chunk_buffer(m, PASS_TRAIN, l, SLOT_D_ACT, s->F, c, NULL);
    floatX *dfc = chunk_buffer(m, PASS_TRAIN, l, slot_dfc, fc_width(s), c, "d fc");
    RUN(m, mlp_activation_backward(dfc, NULL, dact, fc, c.rows, &m->shape, NULL, m->dev));

    chunk_phase(m, GROUP_BACKWARD, l, "fc of a chunk");
    dfc = chunk_buffer(m, PASS_TRAIN, l, slot_dfc, fc_width(s), c, NULL);
    const floatX *in = chunk_input(m, l, c);
    floatX *din = chunk_d_input(m, l, c);
    chunk_linear_backward(m, l, LINEAR_FC, din, dfc, in, c);
    if (s->parallel)
        return;

    chunk_phase(m, GROUP_BACKWARD, l, "norm 2 of a chunk");
    din = chunk_d_input(m, l, c);
    floatX *dres = d_residual(m) + c.first * C;
    if (s->norm_before) {
        const floatX *x = mlp_source(m, l) + c.first * C;
        float *stats = activation_stats(m, PASS_BACKWARD, l, ACT_NORM2_STATS);
        chunk_norm_gradient(m, l, dres, dres, din, x, stats, extent_of(m, PASS_TRAIN).N, c.first, NORM_2, c);
    } else {
        const struct dropout none = {0, 0, 0, 0, 0, NULL};
        RUN(m, residual_forward(dres, din, dres, c.rows, C, 1, none, m->dev));
    }
}
// The gradients of the MLP's parameters; d_residual becomes the gradient of the middle of the residual stream, or, with
// parallel branches, D_NORM2 that of the MLP's input. D_MLP_ADDED is the gradient of what the MLP adds.
static void mlp_chunks_backward(struct gpt *m, int l) {
    const int64_t N = extent_of(m, PASS_TRAIN).N, tokens = mlp_chunk_tokens(m, PASS_BACKWARD, l);
    const int chunk_phases = m->timeline.phase;
    for (int64_t first = 0; first < (timeline_plans(&m->timeline) ? 1 : N); first += tokens) {
        m->timeline.phase = chunk_phases;
        mlp_backward_chunk(m, l, chunk_at(first, tokens, N));
    }
}
