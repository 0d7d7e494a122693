// One transformer block: its ops, its forward pass, which recomputation calls again, and its backward pass.
#pragma once
#include "attention.cuh"            // attention_forward, attention_backward, attention_decode
#include "kernels/norm.cuh"         // norm_forward, norm_backward, residual_forward, residual_norm_forward
#include "kernels/qk_norm.cuh"      // qk_norm_forward, qk_norm_backward
#include "kernels/rope.cuh"         // rope_forward
#include "model/bias_gradients.cuh" // bias_partial, bias_finish
#include "model/linear.cuh"         // linear_forward, linear_backward, quantise_input
#include "model/mlp.cuh"            // mlp_activation_forward, mlp_chunks_forward and their backward
#include "model/state.cuh"          // struct gpt and its buffers

// ---- Ops: each fetches its parameters and workspace and runs in the phase that its caller began ----

// amax: of the result, where it is cast to FP8; NULL: not taken.
static void norm(struct gpt *m, enum pass pass, int l, floatX *out, float *stats, const floatX *x,
                 struct norm_weights weights, uint32_t *amax) {
    const int64_t N = extent_of(m, pass).N;
    const floatX *w = param(m, pass, l, weights.weight), *b = param(m, pass, l, weights.bias);
    const struct norm_options options = norm_options_of(m, amax);
    RUN(m, norm_forward(out, mean_of(m, stats, N), stats, x, w, b, N, m->shape.layer.C, options, m->dev));
}
// sum = x + multiplier * dropout(delta).
static void residual(struct gpt *m, enum pass pass, floatX *sum, const floatX *x, const floatX *delta,
                     struct dropout dropout) {
    RUN(m, residual_forward(sum, x, delta, extent_of(m, pass).N, m->shape.layer.C, residual_scale(m), dropout, m->dev));
}
// Residual addition of the delta that `sum` holds, fused with the norm of the result: sum = x + multiplier *
// dropout(sum), out = norm(sum); out and stats may be NULL.
static void residual_norm(struct gpt *m, enum pass pass, int l, floatX *sum, floatX *out, float *stats, const floatX *x,
                          struct norm_weights weights, struct dropout dropout, uint32_t *amax) {
    const int64_t N = extent_of(m, pass).N;
    const floatX *w = param(m, pass, l, weights.weight), *b = param(m, pass, l, weights.bias);
    RUN(m, residual_norm_forward(sum, out, mean_of(m, stats, N), stats, x, sum, w, b, N, m->shape.layer.C,
                                 norm_options_of(m, amax), residual_scale(m), dropout, m->dev));
}
// RoPE, in place, on q and k of layer l, where that layer has rotary positions.
static void rotate(struct gpt *m, enum pass pass, int l, floatX *qkv) {
    const struct layer_shape *s = &m->shape.layer;
    const struct extent e = extent_of(m, pass);
    if (!m->kinds[l].rotary)
        return;
    const struct token_positions positions = positions_of(m, pass);
    RUN(m, rope_forward(qkv, rope_of(m, l), positions, e.B, e.T, s->H, s->G, s->D, m->dev));
}
// RoPE of layer l as the norm of q and k applies it.
static struct qk_norm_rotary qk_norm_rotary_of(struct gpt *m, enum pass pass, int l) {
    struct qk_norm_rotary rotary = {NULL, {NULL, NULL}, 0};
    if (m->kinds[l].rotary) {
        rotary.table = rope_of(m, l);
        rotary.positions = positions_of(m, pass);
        rotary.T = extent_of(m, pass).T;
    }
    return rotary;
}
static struct qk_norm_shape qk_norm_shape_of(const struct gpt *m) {
    struct qk_norm_shape shape;
    shape.H = m->shape.layer.H;
    shape.Hkv = m->shape.layer.G;
    shape.D = m->shape.layer.D;
    shape.full_width = false;
    switch (m->shape.qk_norm_width) {
    case QK_LAYERNORM_HEAD: break;
    case QK_LAYERNORM_FULL: shape.full_width = true; break;
    }
    shape.one_plus = m->shape.norm_one_plus;
    shape.epsilon = (float)m->config.norm_epsilon;
    return shape;
}
// What attention reads: q, k and v of layer l.
static floatX *attention_input(struct gpt *m, enum pass pass, int l) {
    return activation(m, pass, l, m->shape.layer.qk_statistics ? ACT_QKN : ACT_QKV);
}
static void attention(struct gpt *m, enum pass pass, int l, floatX *att, void *saved, const floatX *qkv) {
    const struct attention_shape shape = layer_attention_shape(m, pass, l);
    const struct dropout dropout = dropout_of(m, m->config.attention_dropout, l, DROPOUT_ATTENTION);
    void *ws = workspace(m, attention_forward_workspace_bytes(m->backend, shape, m->dev));
    uint32_t *amax = amax_of(m, pass, l, LINEAR_ATT_PROJ, FP8_INPUT);
    RUN(m, attention_forward(att, saved, qkv, m->backend, shape, dropout, amax, ws, m->dev));
}
// Tokens of a sequence that the KV cache of layer l holds: all, or those of the window, in a ring.
static int kv_capacity(const struct gpt *m, int l) {
    return m->kinds[l].windowed && m->window < m->decode_tokens ? m->window : m->decode_tokens;
}
// The keys or values of the last kv_capacity positions, (B, G, capacity, D), which live from one token to the next.
static floatX *kv_cache(struct gpt *m, int l, enum slot slot) {
    const struct layer_shape *s = &m->shape.layer;
    const size_t rows = (size_t)m->sequences * (size_t)kv_capacity(m, l);
    return (floatX *)buffer(m, PASS_GENERATE, l, slot, rows * (size_t)(s->G * s->D) * sizeof(floatX), "kv cache",
                            slot == SLOT_KEYS ? "keys" : "values");
}
// Generation: the k and v of the pass's tokens join the cache. A prompt's tokens attend to each other, a later one to
// the whole cache.
static void attention_with_cache(struct gpt *m, enum pass pass, int l, floatX *att, const floatX *qkv) {
    const struct extent e = extent_of(m, pass);
    const int capacity = kv_capacity(m, l);
    floatX *keys = kv_cache(m, l, SLOT_KEYS), *values = kv_cache(m, l, SLOT_VALUES);
    const int32_t *positions = positions_buffer(m, pass);
    const struct attention_shape shape = attention_shape_of(&m->config, e.B, e.T);
    if (pass == PASS_PREFILL) {
        RUN(m, kv_cache_append(keys, values, qkv, NULL, positions, capacity, shape, m->dev));
        attention(m, pass, l, att, activation_memory(m, pass, l, ACT_SOFTMAX), qkv);
        return;
    }
    RUN(m, kv_cache_append(keys, values, qkv, positions, NULL, capacity, shape, m->dev));
    void *ws = workspace(m, attention_decode_workspace_bytes(shape, capacity, m->dev));
    RUN(m, attention_decode(att, qkv, keys, values, positions, capacity, shape, ws, m->dev));
}

// Whether the MLP's activation writes FP8 itself in a pass of layer l.
static bool activation_is_fused(const struct gpt *m, enum pass pass, int l) {
    return is_quantised(m, pass, l) && fp8_is_delayed(&m->fp8);
}

// ---- Forward ----

// The sum of the residual stream and attention's branch, which the MLP's branch joins: an activation, or, where
// attention and MLP read the same stream, a buffer of the forward pass alone.
static floatX *middle(struct gpt *m, enum pass pass, int l) {
    if (!m->shape.layer.parallel)
        return activation(m, pass, l, ACT_MID);
    return (floatX *)buffer(m, pass, l, SLOT_PARALLEL_SUM,
                            (size_t)extent_of(m, pass).N * m->shape.layer.C * sizeof(floatX), pass_name(pass),
                            "residual after attention");
}

// The ops of the attention branch, from the layer's input to the sum of residual stream and branch; `produce` is
// block_forward's.
static void attention_branch_forward(struct gpt *m, int l, uint32_t produce, enum pass pass) {
#define ACT(id) activation(m, pass, l, ACT_##id)
#define STATS(id) activation_stats(m, pass, l, ACT_##id)
#define WANTED_STATS(id) (produce & BIT(id) ? STATS(id) : NULL)
    const struct layer_shape *s = &m->shape.layer;
    const int64_t N = extent_of(m, pass).N;
    const enum phase_group group = forward_group(pass);
    const bool norm_1 = s->norm_before && input_is_wanted(m, pass, l, produce, BIT(NORM1), BIT(QKV));
    // in a first forward the layer before has computed norm 1, with its own residual addition
    if ((norm_1 || produce & BIT(NORM1_STATS)) && (pass == PASS_BACKWARD || l == 0)) {
        phase(m, group, l, "norm 1");
        floatX *out = norm_1 ? linear_input(m, pass, l, LINEAR_QKV) : NULL;
        float *stats = WANTED_STATS(NORM1_STATS);
        const floatX *x = activation(m, pass, l - 1, ACT_OUT);
        norm(m, pass, l, out, stats, x, NORM_1, amax_of(m, pass, l, LINEAR_QKV, FP8_INPUT));
    }
    quantise_input(m, pass, l, LINEAR_QKV, produce & BIT(QKV), produce & BIT(NORM1));
    if (produce & BIT(QKV)) {
        phase(m, group, l, "qkv");
        floatX *qkv = ACT(QKV);
        linear_forward(m, pass, l, LINEAR_QKV, qkv);
        if (!s->qk_statistics)
            rotate(m, pass, l, qkv);
    }
    if (produce & (BIT(QKN) | BIT(QKN_STATS))) {
        phase(m, group, l, "q and k norm");
        floatX *qkn = ACT(QKN);
        float *stats = STATS(QKN_STATS); // where they are kept, the same bits are written again
        const floatX *qkv = ACT(QKV);
        const floatX *wq = param(m, pass, l, PARAM_QNORM_W), *wk = param(m, pass, l, PARAM_KNORM_W);
        const struct qk_norm_rotary rotary = qk_norm_rotary_of(m, pass, l);
        RUN(m, qk_norm_forward(qkn, stats, qkv, wq, wk, N, qk_norm_shape_of(m), rotary, m->dev));
    }
    if (produce & (BIT(ATT) | BIT(SOFTMAX))) {
        phase(m, group, l, "attention");
        floatX *att = ACT(ATT);
        const floatX *qkv = attention_input(m, pass, l);
        if (generates(pass))
            attention_with_cache(m, pass, l, att, qkv);
        else
            attention(m, pass, l, att, activation_memory(m, pass, l, ACT_SOFTMAX), qkv);
    }
    const bool sum = produce & (s->parallel ? BIT(OUT) : BIT(MID)); // of the stream and the branch
    quantise_input(m, pass, l, LINEAR_ATT_PROJ, produce & BIT(ATT_PROJ) || (sum && !s->norm_after), false);
    if (produce & BIT(ATT_PROJ)) {
        phase(m, group, l, "attention projection");
        linear_forward(m, pass, l, LINEAR_ATT_PROJ, ACT(ATT_PROJ));
    }
    const struct dropout dropout = dropout_of(m, m->config.hidden_dropout, l, DROPOUT_ATTENTION_PROJECTION);
    const bool norm_2 = s->norm_before && input_is_wanted(m, pass, l, produce, BIT(NORM2), BIT(FC)),
               norm_2_runs = norm_2 || produce & BIT(NORM2_STATS);
    uint32_t *amax = amax_of(m, pass, l, LINEAR_FC, FP8_INPUT);
    if (sum) {
        phase(m, group, l, s->norm_after ? "post-attention norm" : "attention projection");
        floatX *mid = middle(m, pass, l);
        if (s->norm_after)
            norm(m, pass, l, mid, WANTED_STATS(POST1_STATS), ACT(ATT_PROJ), NORM_POST_1, NULL);
        else
            linear_forward(m, pass, l, LINEAR_ATT_PROJ, mid);
        const floatX *x = activation(m, pass, l - 1, ACT_OUT);
        if (norm_2_runs && !s->parallel) {
            // Asked for before the call: compilers differ in the order of arguments, and the plan in that of its buffers.
            float *const stats = WANTED_STATS(NORM2_STATS);
            residual_norm(m, pass, l, mid, norm_2 ? linear_input(m, pass, l, LINEAR_FC) : NULL, stats, x, NORM_2,
                          dropout, amax);
        } else
            residual(m, pass, mid, x, mid, dropout);
    } else if (produce & BIT(POST1_STATS)) {
        phase(m, group, l, "post-attention norm");
        norm(m, pass, l, NULL, STATS(POST1_STATS), ACT(ATT_PROJ), NORM_POST_1, NULL);
    }
    if (norm_2_runs && (s->parallel || !sum)) {
        phase(m, group, l, "norm 2");
        floatX *out = norm_2 ? linear_input(m, pass, l, LINEAR_FC) : NULL;
        float *stats = WANTED_STATS(NORM2_STATS);
        const floatX *x = s->parallel ? activation(m, pass, l - 1, ACT_OUT) : ACT(MID);
        norm(m, pass, l, out, stats, (const floatX *)x, NORM_2, amax);
    }
}

// Makes the MLP's activation, the input of `product`: in floatX, or, where the scale is known before, in FP8 at once.
static void activate(struct gpt *m, enum pass pass, int l, uint32_t produce, uint32_t product) {
    const int64_t N = extent_of(m, pass).N;
    const bool rows = produce & product, kept = produce & BIT(ACT);
    phase(m, forward_group(pass), l, "activation");
    const floatX *fc = ACT(FC);
    if (activation_is_fused(m, pass, l)) {
        const struct fp8_cast to = input_cast(m, pass, l, LINEAR_MLP_PROJ, rows, kept);
        RUN(m, mlp_activation_forward_fp8(to, fc, N, &m->shape, m->dev));
        return;
    }
    floatX *act = linear_input(m, pass, l, LINEAR_MLP_PROJ);
    uint32_t *amax = amax_of(m, pass, l, LINEAR_MLP_PROJ, FP8_INPUT);
    RUN(m, mlp_activation_forward(act, fc, N, &m->shape, amax, m->dev));
    quantise_input(m, pass, l, LINEAR_MLP_PROJ, rows, kept);
}
// The MLP up to its second projection, all tokens at once; a projection straight into the layer's output is left to
// mlp_branch_forward. product: what the second projection makes.
static void mlp_forward(struct gpt *m, int l, uint32_t produce, uint32_t product, enum pass pass) {
    const enum phase_group group = forward_group(pass);
    quantise_input(m, pass, l, LINEAR_FC, produce & BIT(FC), produce & BIT(NORM2));
    if (produce & BIT(FC)) {
        phase(m, group, l, "fc");
        linear_forward(m, pass, l, LINEAR_FC, ACT(FC));
    }
    if (input_is_wanted(m, pass, l, produce, BIT(ACT), product))
        activate(m, pass, l, produce, product);
    if (produce & BIT(MLP_PROJ)) {
        phase(m, group, l, "mlp projection");
        linear_forward(m, pass, l, LINEAR_MLP_PROJ, ACT(MLP_PROJ));
    }
}
// The ops of the MLP branch, up to the layer's output; `produce` is block_forward's. next: the unit of parameters after
// the layer's.
static void mlp_branch_forward(struct gpt *m, int l, uint32_t produce, enum pass pass, int next) {
    const struct layer_shape *s = &m->shape.layer;
    const enum phase_group group = forward_group(pass);
    const uint32_t product = s->norm_after ? BIT(MLP_PROJ) : BIT(OUT); // what the second projection makes
    const bool chunks = mlp_chunk_tokens(m, pass, l) > 0;
    if (!chunks)
        mlp_forward(m, l, produce, product, pass);
    else if (produce & product)
        mlp_chunks_forward(m, pass, l, s->norm_after ? ACT_MLP_PROJ : ACT_OUT);
    if (produce & BIT(OUT)) {
        if (pass != PASS_BACKWARD) // the fused norm's weights are the next unit's
            use_unit(m, pass, next);
        phase(m, group, l, s->norm_after ? "post-mlp norm" : chunks ? "residual after mlp" : "mlp projection");
        floatX *out = ACT(OUT);
        if (s->norm_after)
            norm(m, pass, l, out, WANTED_STATS(POST2_STATS), ACT(MLP_PROJ), NORM_POST_2, NULL);
        else if (!chunks)
            linear_forward(m, pass, l, LINEAR_MLP_PROJ, out);
        const floatX *mid = middle(m, pass, l);
        const struct dropout dropout = dropout_of(m, m->config.hidden_dropout, l, DROPOUT_MLP_PROJECTION);
        const bool last = l + 1 == m->shape.L;
        if (pass == PASS_BACKWARD || (!last && !s->norm_before))
            residual(m, pass, out, mid, out, dropout);
        else if (!last) {
            float *const stats = activation_stats(m, pass, l + 1, ACT_NORM1_STATS);
            residual_norm(m, pass, l + 1, out, linear_input(m, pass, l + 1, LINEAR_QKV), stats, mid, NORM_1, dropout,
                          amax_of(m, pass, l + 1, LINEAR_QKV, FP8_INPUT));
        } else {
            float *const stats = final_norm_stats(m, pass);
            residual_norm(m, pass, -1, out, final_norm_buffer(m, pass), stats, mid, NORM_FINAL, dropout, NULL);
        }
    } else if (produce & BIT(POST2_STATS)) {
        phase(m, group, l, "post-mlp norm");
        norm(m, pass, l, NULL, STATS(POST2_STATS), ACT(MLP_PROJ), NORM_POST_2, NULL);
    }
#undef WANTED_STATS
#undef STATS
#undef ACT
}

// Runs the ops whose outputs are in the set `produce`: all in a first forward, the dropped ones in recomputation.
//
// A residual addition is fused with the norm that reads it where both are in `produce`. In a first forward the fusion
// crosses layers: a layer's last addition computes the next layer's NORM1, or the final norm after the last layer; only
// layer 0 computes its own NORM1. A norm that runs unfused has the same bits.
static void block_forward(struct gpt *m, int l, uint32_t produce, enum pass pass) {
    const int unit = unit_of_layer(&m->table, l),
              next = l + 1 < m->shape.L ? unit_of_layer(&m->table, l + 1) : unit_of_head();
    produce &= activation_present(&m->shape.layer) & ~left_to_chunks(m, pass, l, produce);
    if (produce)
        use_unit(m, pass, unit);
    if (pass != PASS_BACKWARD) {
        prefetch_unit(m, pass, next);
        if (next == unit_of_head())
            prefetch_unit(m, head_pass(m, pass), head_unit(m));
        if (next == unit_of_head() && pass == PASS_TRAIN) {
            zero_prefetch_gradients(&m->zero, unit_of_head());
            zero_prefetch_gradients(&m->zero, head_unit(m));
        }
    }
    attention_branch_forward(m, l, produce, pass);
    mlp_branch_forward(m, l, produce, pass, next);
}

// ---- Backward ----

// dx = residual + the gradient of a norm's input; those of its weight and bias join the unit's gradients. residual: may
// be dx; NULL: 0. dx_partial, amax: of dx; NULL: not taken.
static void norm_gradient(struct gpt *m, int l, floatX *dx, float *dx_partial, const floatX *residual,
                          const floatX *dout, const floatX *x, const float *stats, struct norm_weights weights,
                          uint32_t *amax) {
    const int64_t N = extent_of(m, PASS_TRAIN).N;
    const int C = m->shape.layer.C;
    const floatX *w = param(m, l < 0 ? PASS_TRAIN : PASS_BACKWARD, l, weights.weight);
    float *dw = grad(m, l, weights.weight), *db = grad(m, l, weights.bias);
    void *ws = workspace(m, norm_backward_workspace_bytes(N, C, m->dev));
    RUN(m, norm_backward(dx, dx_partial, dw, db, residual, dout, x, w, mean_of(m, (float *)stats, N), stats, N, C,
                         adds(m), norm_options_of(m, amax), ws, m->dev));
}

// The gradient of what a branch adds to the residual stream, before dropout and multiplier. Without these two that is
// the gradient of the stream itself, which is then not stored twice. partial: gets the partial sums of its columns;
// NULL: not made.
static const floatX *d_added(struct gpt *m, int l, enum slot slot, enum dropout_use use, float *partial) {
    const floatX *dres = d_residual(m);
    if (branch_is_added_as_it_is(m))
        return dres;
    const struct dropout dropout = dropout_of(m, m->config.hidden_dropout, l, use);
    const float scale = residual_scale(m);
    floatX *dadded = d_buffer(m, l, slot, m->shape.layer.C);
    RUN(m,
        residual_backward(dadded, partial, dres, extent_of(m, PASS_TRAIN).N, m->shape.layer.C, scale, dropout, m->dev));
    return dadded;
}
// A branch: the slots of its gradients, its use of dropout, and its projection with the norm after it.
struct branch {
    enum linear linear;
    enum slot d_added, d_projection;
    enum dropout_use use;
    enum activation_id projection, statistics;
    struct norm_weights norm;
    const char *name;
};
static const struct branch ATTENTION_BRANCH = {LINEAR_ATT_PROJ,
                                               SLOT_D_ATT_ADDED,
                                               SLOT_D_ATT_PROJ,
                                               DROPOUT_ATTENTION_PROJECTION,
                                               ACT_ATT_PROJ,
                                               ACT_POST1_STATS,
                                               {PARAM_POST1_W, PARAM_POST1_B},
                                               "post-attention norm"};
static const struct branch MLP_BRANCH = {LINEAR_MLP_PROJ,
                                         SLOT_D_MLP_ADDED,
                                         SLOT_D_MLP_PROJ,
                                         DROPOUT_MLP_PROJECTION,
                                         ACT_MLP_PROJ,
                                         ACT_POST2_STATS,
                                         {PARAM_POST2_W, PARAM_POST2_B},
                                         "post-mlp norm"};
// The gradient of the output of a branch's projection, through the norm after it where there is one. Opens the phase
// `name`, in which the result is live.
static const floatX *d_projection(struct gpt *m, int l, const struct branch *branch, const char *name) {
    if (!m->shape.layer.norm_after) {
        phase(m, GROUP_BACKWARD, l, name);
        return d_added(m, l, branch->d_added, branch->use, bias_partial(m, l, branch->linear, BIAS_BY_RESIDUAL));
    }
    phase(m, GROUP_BACKWARD, l, branch->name);
    const int C = m->shape.layer.C;
    const floatX *dadded = d_added(m, l, branch->d_added, branch->use, NULL);
    float *partial = bias_partial(m, l, branch->linear, BIAS_BY_NORM);
    floatX *dproj = d_buffer(m, l, branch->d_projection, C);
    norm_gradient(m, l, dproj, partial, NULL, dadded, activation(m, PASS_BACKWARD, l, branch->projection),
                  activation_stats(m, PASS_BACKWARD, l, branch->statistics), branch->norm,
                  gradient_amax(m, l, branch->linear));
    phase(m, GROUP_BACKWARD, l, name);
    return d_buffer(m, l, branch->d_projection, C);
}

// The layer whose parameters are needed next after the backward of layer l: the first that is recomputed for layer
// l - 1, or l - 1 itself; -1: none, since backward ends at the lowest layer with a trained parameter.
static int next_backward_layer(const struct gpt *m, int l) {
    const int below = l - 1;
    if (below < m->lowest_trained)
        return -1;
    if (below < 0 || !policy_is_group_last(&m->policy, below))
        return below;
    for (int k = m->policy.group_first[below]; k < below; k++)
        if (policy_missing(&m->policy, k, &m->shape.layer))
            return k;
    return below;
}

// The gradient of the input of a branch joins d_residual: through the norm before it, or as it is.
// x: the norm's input; next, projection: layer and projection whose output's gradient the result is, -1: of none.
// Runs in a phase of its own.
static void d_branch_input(struct gpt *m, int l, enum slot slot, const char *name, enum activation_id statistics,
                           struct norm_weights weights, int x_layer, enum activation_id x, int next,
                           enum linear projection) {
    const struct layer_shape *s = &m->shape.layer;
    phase(m, GROUP_BACKWARD, l, name);
    floatX *din = d_buffer(m, l, slot, s->C), *dres = d_residual(m);
    if (s->norm_before)
        norm_gradient(m, l, dres, stream_bias_partial(m, next, projection), dres, din,
                      activation(m, PASS_BACKWARD, x_layer, x), activation_stats(m, PASS_BACKWARD, l, statistics),
                      weights, stream_amax(m, next, projection));
    else {
        const struct dropout none = {0, 0, 0, 0, 0, NULL};
        RUN(m, residual_forward(dres, din, dres, extent_of(m, PASS_TRAIN).N, s->C, 1, none, m->dev));
    }
}

// d_branch_input of the MLP, unless parallel branches leave that to the layer's end.
static void d_mlp_input(struct gpt *m, int l) {
    if (!m->shape.layer.parallel)
        d_branch_input(m, l, SLOT_D_NORM2, "norm 2", ACT_NORM2_STATS, NORM_2, l, ACT_MID, l, LINEAR_ATT_PROJ);
}
// What the MLP's activation reads, where the product behind it may apply the activation's derivative: not where an
// adapter adds to that product.
static struct gelu_input gelu_input_of(struct gpt *m, int l) {
    if (m->shape.activation != ACTIVATION_GELU || has_adapter(m, LINEAR_MLP_PROJ) || is_quantised(m, PASS_TRAIN, l))
        return NO_GELU;
    const struct gelu_input gelu = {activation(m, PASS_BACKWARD, l, ACT_FC),
                                    bias_source(m, l, LINEAR_FC) == BIAS_BY_ACTIVATION};
    return gelu;
}
// The gradients of the MLP's parameters; d_residual becomes the gradient of the middle of the residual stream. With
// parallel branches the gradient of the MLP's input is left in D_NORM2: attention reads d_residual as it is, first.
static void mlp_branch_backward(struct gpt *m, int l) {
#define ACT(id) activation(m, PASS_BACKWARD, l, ACT_##id)
    const struct layer_shape *s = &m->shape.layer;
    const int64_t N = extent_of(m, PASS_TRAIN).N;
    if (mlp_chunk_tokens(m, PASS_BACKWARD, l) > 0) {
        phase(m, GROUP_BACKWARD, l, "mlp");
        d_added(m, l, MLP_BRANCH.d_added, MLP_BRANCH.use, NULL);
        mlp_chunks_backward(m, l);
        return;
    }
    const floatX *dproj = d_projection(m, l, &MLP_BRANCH, "mlp projection");
    const bool sums_bias = !bias_finish(m, l, LINEAR_MLP_PROJ);
    const bool applied = linear_backward(m, l, LINEAR_MLP_PROJ, SLOT_D_ACT, dproj, sums_bias, gelu_input_of(m, l));

    phase(m, GROUP_BACKWARD, l, "activation");
    floatX *dact = d_buffer(m, l, SLOT_D_ACT, s->F);
    const floatX *fc = ACT(FC);
    if (activation_is_fused(m, PASS_TRAIN, l)) {
        const struct fp8_cast to = gradient_cast(m, l, LINEAR_FC);
        void *ws = gradient_cast_workspace(m, l, LINEAR_FC);
        RUN(m, mlp_activation_backward_fp8(to, dact, fc, N, &m->shape, ws, m->dev));
        linear_backward_fp8(m, l, LINEAR_FC, SLOT_D_NORM2);
        d_mlp_input(m, l);
        return;
    }
    // dfc overwrites dact, unless a gated activation makes it twice as wide.
    const enum slot slot_dfc = s->gated ? SLOT_D_FC : SLOT_D_ACT;
    floatX *dfc = d_buffer(m, l, slot_dfc, fc_width(s));
    float *partial = bias_partial(m, l, LINEAR_FC, BIAS_BY_ACTIVATION);
    if (applied)
        RUN(m, activation_bias_sums(partial, dfc, N, fc_width(s), m->dev));
    else
        RUN(m, mlp_activation_backward(dfc, partial, dact, fc, N, &m->shape, gradient_amax(m, l, LINEAR_FC), m->dev));

    phase(m, GROUP_BACKWARD, l, "fc");
    dfc = d_buffer(m, l, slot_dfc, fc_width(s));
    linear_backward(m, l, LINEAR_FC, SLOT_D_NORM2, dfc, !bias_finish(m, l, LINEAR_FC), NO_GELU);
    d_mlp_input(m, l);
}
// The gradient of what attention reads, through attention and the norm of q and k, into D_QKV.
static void attention_core_backward(struct gpt *m, int l) {
    const struct layer_shape *s = &m->shape.layer;
    phase(m, GROUP_BACKWARD, l, "attention");
    const floatX *datt = d_buffer(m, l, SLOT_D_ATT, s->H * s->D);
    floatX *dqkv = d_buffer(m, l, SLOT_D_QKV, qkv_width(s));
    const floatX *qkv = attention_input(m, PASS_BACKWARD, l), *att = ACT(ATT);
    const void *saved = activation_memory(m, PASS_BACKWARD, l, ACT_SOFTMAX);
    const struct attention_shape shape = layer_attention_shape(m, PASS_TRAIN, l);
    const struct dropout dropout = dropout_of(m, m->config.attention_dropout, l, DROPOUT_ATTENTION);
    struct attention_backward_options options;
    options.rotary = rope_of(m, l);
    options.positions = positions_of(m, PASS_TRAIN);
    options.any_order = !m->config.deterministic_mode;
    options.amax = gradient_amax(m, l, LINEAR_QKV);
    options.bias_partial = bias_partial(m, l, LINEAR_QKV, BIAS_BY_ATTENTION);
    void *ws = workspace(m, attention_backward_workspace_bytes(m->backend, shape, options.any_order, m->dev));
    RUN(m, attention_backward(dqkv, datt, qkv, att, saved, m->backend, shape, dropout, options, ws, m->dev));
    if (!s->qk_statistics)
        return;

    phase(m, GROUP_BACKWARD, l, "q and k norm");
    const int64_t N = extent_of(m, PASS_TRAIN).N;
    const struct qk_norm_shape norm_shape = qk_norm_shape_of(m);
    dqkv = d_buffer(m, l, SLOT_D_QKV, qkv_width(s));
    const floatX *raw = ACT(QKV);
    const float *stats = activation_stats(m, PASS_BACKWARD, l, ACT_QKN_STATS);
    const floatX *wq = param(m, PASS_BACKWARD, l, PARAM_QNORM_W), *wk = param(m, PASS_BACKWARD, l, PARAM_KNORM_W);
    float *dwq = grad(m, l, PARAM_QNORM_W), *dwk = grad(m, l, PARAM_KNORM_W);
    ws = workspace(m, qk_norm_backward_workspace_bytes(N, norm_shape, m->dev));
    RUN(m, qk_norm_backward(dqkv, dwq, dwk, raw, wq, wk, stats, N, norm_shape, adds(m), ws, m->dev));
}

// Adds the gradients of layer l's parameters and turns d_residual, the gradient of its output, into that of its input.
static void block_backward(struct gpt *m, int l) {
    const struct layer_shape *s = &m->shape.layer;

    zero_begin_gradients(&m->zero, unit_of_layer(&m->table, l));
    use_unit(m, PASS_BACKWARD, unit_of_layer(&m->table, l));
    if (next_backward_layer(m, l) >= 0)
        prefetch_unit(m, PASS_BACKWARD, unit_of_layer(&m->table, next_backward_layer(m, l)));
    mlp_branch_backward(m, l);

    const floatX *dproj = d_projection(m, l, &ATTENTION_BRANCH, "attention projection");
    linear_backward(m, l, LINEAR_ATT_PROJ, SLOT_D_ATT, dproj, !bias_finish(m, l, LINEAR_ATT_PROJ), NO_GELU);
    attention_core_backward(m, l);

    phase(m, GROUP_BACKWARD, l, "qkv");
    const floatX *dqkv = d_buffer(m, l, SLOT_D_QKV, qkv_width(s));
    linear_backward(m, l, LINEAR_QKV, SLOT_D_NORM1, dqkv, !bias_finish(m, l, LINEAR_QKV), NO_GELU);
    d_branch_input(m, l, SLOT_D_NORM1, "norm 1", ACT_NORM1_STATS, NORM_1, l - 1, ACT_OUT, s->parallel ? -1 : l - 1,
                   LINEAR_MLP_PROJ);
    if (s->parallel)
        d_branch_input(m, l, SLOT_D_NORM2, "norm 2", ACT_NORM2_STATS, NORM_2, l - 1, ACT_OUT, l - 1, LINEAR_MLP_PROJ);
#undef ACT
}
