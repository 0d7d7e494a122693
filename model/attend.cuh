// Attention in a block, forward and backward: q, k and v, their norm and rotation, attention itself, the KV cache.
#pragma once
#include "attention.cuh"            // attention_forward, attention_backward, attention_decode
#include "kernels/qk_norm.cuh"      // qk_norm_forward, qk_norm_backward
#include "kernels/rope.cuh"         // rope_forward
#include "model/at.cuh"             // struct at, struct sink
#include "model/bias_gradients.cuh" // bias_partial
#include "model/fp8_attention.cuh"  // attend_in_fp8, qkv_destination
#include "model/linear.cuh"         // linear_forward, linear_backward, input_sink
#include "model/sequence.cuh"       // position_starts_of, layer_attention_shape, rope_of

// Rotates q and k in qkv (N, qkv_width) in place, in the caller's phase. Does nothing if layer l has no RoPE.
static void rotate(struct gpt *m, enum pass pass, int l, floatX *qkv) {
    const struct layer_shape *s = &m->shape.layer;
    const struct extent e = extent_of(m, pass);
    if (!m->kinds[l].rotary)
        return;
    const struct token_positions positions = position_starts_of(m, pass);
    RUN(m, rope_forward(qkv, rope_of(m, l), positions, e.B, e.T, s->H, s->G, s->D, m->dev));
}
// Returns the RoPE that qk_norm_forward applies, live in this phase. `table` is NULL without RoPE, and when planning.
static struct qk_norm_rotary qk_norm_rotary_of(struct gpt *m, enum pass pass, int l) {
    struct qk_norm_rotary rotary = {NULL, {NULL, NULL}, 0};
    if (m->kinds[l].rotary) {
        rotary.table = rope_of(m, l);
        rotary.positions = position_starts_of(m, pass);
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
    shape.epsilon = (float)m->config.model.norm_epsilon;
    return shape;
}
// Returns q, k and v (N, qkv_width) in floatX, as attention outside FP8 reads them, in this phase; NULL when planning.
static floatX *attention_input(struct gpt *m, enum pass pass, int l) {
    return activation(m, pass, l, attention_input_id(m));
}
// att.data (N, H D) = attention of qkv (N, qkv_width), in this phase. Always fills `saved`. Merges amax; makes no sums.
static void attention(struct gpt *m, enum pass pass, int l, struct sink att, void *saved, const floatX *qkv) {
    const struct attention_shape shape = layer_attention_shape(m, pass, l);
    const struct dropout dropout = dropout_of(m, m->config.model.attention_dropout, l, DROPOUT_ATTENTION);
    void *ws = workspace(m, attention_forward_workspace_bytes(m->backend, shape, m->dev));
    RUN(m, attention_forward(att.data, saved, qkv, m->backend, shape, dropout, att.amax, ws, m->dev));
}
// The number of tokens of a sequence that layer l's KV cache holds: decode_tokens or, if smaller, the layer's window.
static int kv_capacity(const struct gpt *m, int l) {
    return m->kinds[l].windowed && m->window < m->generation.decode_tokens ? m->window : m->generation.decode_tokens;
}
// Returns the cached keys or values, by `slot`, (sequences, G, kv_capacity, D), live in this phase; NULL when planning.
static floatX *kv_cache(struct gpt *m, int l, enum slot slot) {
    const struct layer_shape *s = &m->shape.layer;
    const size_t rows = (size_t)m->generation.sequences * (size_t)kv_capacity(m, l);
    return (floatX *)buffer(m, PASS_GENERATE, l, slot, rows * (size_t)(s->G * s->D) * sizeof(floatX), "kv cache",
                            slot == SLOT_KEYS ? "keys" : "values");
}
// Stores the k and v of qkv (N, qkv_width) in layer l's KV cache, and computes attention into att.data (N, H D), in
// this phase. A prefill attends within qkv; a decode's q attend to the cache.
static void attention_with_cache(struct gpt *m, enum pass pass, int l, struct sink att, const floatX *qkv) {
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
    RUN(m, attention_decode(att.data, qkv, keys, values, positions, capacity, shape, ws, m->dev));
}

// Makes QKV, then QKN (q and k normed) with its statistics, then the FP8 cast that attention reads. Each is made in a
// new phase, if at.produce asks for it. RoPE is applied to QKN or, in a model without QK norm, to QKV.
static void make_qkv(struct at at) {
    struct gpt *m = at.m;
    const enum phase_group group = forward_group(at.pass);
    if (produces(at, BIT(QKV))) {
        phase_at(at, group, "qkv");
        floatX *qkv = qkv_destination(at, ACT_QKV);
        linear_forward(at, LINEAR_QKV, qkv);
        if (!m->shape.layer.qk_statistics)
            rotate(m, at.pass, at.l, qkv);
    }
    if (produces(at, BIT(QKN) | BIT(QKN_STATS))) {
        phase_at(at, group, "q and k norm");
        floatX *qkn = qkv_destination(at, ACT_QKN);
        float *stats = activation_stats(m, at.pass, at.l, ACT_QKN_STATS); // where kept, the same bits are written again
        const floatX *qkv = rows_of(at, ACT_QKV);
        const floatX *wq = param(m, at.pass, at.l, PARAM_QNORM_W), *wk = param(m, at.pass, at.l, PARAM_KNORM_W);
        const struct qk_norm_rotary rotary = qk_norm_rotary_of(m, at.pass, at.l);
        RUN(m, qk_norm_forward(qkn, stats, qkv, wq, wk, at.rows, qk_norm_shape_of(m), rotary, m->dev));
    }
    cast_attention_input(at);
}
// Computes attention in a new phase, if at.produce has ATT, its output, or SOFTMAX, which its backward reads. Writes
// the output where the projection reads it. In generation also stores k and v in the KV cache.
static void attend(struct at at) {
    struct gpt *m = at.m;
    if (!produces(at, BIT(ATT) | BIT(SOFTMAX)))
        return;
    phase_at(at, forward_group(at.pass), "attention");
    const struct sink att = input_sink(at, LINEAR_ATT_PROJ);
    if (attends_in_fp8(m, at.pass, at.l)) {
        attend_in_fp8(at, att);
        return;
    }
    const floatX *qkv = attention_input(m, at.pass, at.l);
    if (generates(at.pass))
        attention_with_cache(m, at.pass, at.l, att, qkv);
    else
        attention(m, at.pass, at.l, att, activation_memory(m, at.pass, at.l, ACT_SOFTMAX), qkv);
}
// Returns the options of attention's backward in layer l. The buffers that they point to are live in this phase.
static struct attention_backward_options attention_options_of(struct gpt *m, int l) {
    struct attention_backward_options options;
    options.rotary = rope_of(m, l);
    options.positions = position_starts_of(m, PASS_TRAIN);
    options.any_order = !m->config.attention.deterministic_mode;
    options.amax = gradient_amax(m, l, LINEAR_QKV);
    options.bias_partial = bias_partial(m, l, LINEAR_QKV, BIAS_BY_ATTENTION);
    return options;
}
// Writes D_QKV from D_ATT, or in full FP8 attention from D_ATT's cast, in this phase. Undoes RoPE, but not QK norm.
// Also makes D_QKV's amax and partial bias sums, where they are wanted.
static void attention_gradient(struct at at) {
    struct gpt *m = at.m;
    const struct layer_shape *s = &m->shape.layer;
    const int l = at.l;
    floatX *dqkv = d_rows(at, SLOT_D_QKV, qkv_width(s));
    const struct attention_backward_options options = attention_options_of(m, l);
    if (attends_in_fp8(m, PASS_BACKWARD, l)) {
        attend_backward_in_fp8(at, dqkv, options);
        return;
    }
    const floatX *datt = d_rows(at, SLOT_D_ATT, s->H * s->D);
    const floatX *qkv = attention_input(m, PASS_BACKWARD, l), *att = rows_of(at, ACT_ATT);
    const void *saved = activation_memory(m, PASS_BACKWARD, l, ACT_SOFTMAX);
    const struct attention_shape shape = layer_attention_shape(m, PASS_TRAIN, l);
    const struct dropout dropout = dropout_of(m, m->config.model.attention_dropout, l, DROPOUT_ATTENTION);
    void *ws = workspace(m, attention_backward_workspace_bytes(m->backend, shape, options.any_order, m->dev));
    RUN(m, attention_backward(dqkv, datt, qkv, att, saved, m->backend, shape, dropout, options, ws, m->dev));
}
// Goes back from dproj (rows, C), the attention projection's output gradient, to D_QKV, also through QK norm. Begins in
// this phase, where dproj is live, then opens others. Writes parameters' gradients or, if accumulates(m), adds to them.
static void attend_backward(struct at at, const floatX *dproj) {
    struct gpt *m = at.m;
    const struct layer_shape *s = &m->shape.layer;
    const int l = at.l;
    const bool sums_bias = !bias_finish(m, l, LINEAR_ATT_PROJ);
    linear_backward(at, LINEAR_ATT_PROJ, SLOT_D_ATT, DIN_WRITTEN, dproj, sums_bias, NO_GELU);

    cast_attention_gradient(at);
    phase_at(at, PHASES_BACKWARD, "attention");
    attention_gradient(at);
    if (!s->qk_statistics)
        return;

    phase_at(at, PHASES_BACKWARD, "q and k norm");
    const struct qk_norm_shape norm_shape = qk_norm_shape_of(m);
    floatX *dqkv = d_rows(at, SLOT_D_QKV, qkv_width(s));
    const floatX *raw = rows_of(at, ACT_QKV);
    const float *stats = activation_stats(m, PASS_BACKWARD, l, ACT_QKN_STATS);
    const floatX *wq = param(m, PASS_BACKWARD, l, PARAM_QNORM_W), *wk = param(m, PASS_BACKWARD, l, PARAM_KNORM_W);
    float *dwq = grad(m, l, PARAM_QNORM_W), *dwk = grad(m, l, PARAM_KNORM_W);
    void *ws = workspace(m, qk_norm_backward_workspace_bytes(at.rows, norm_shape, m->dev));
    RUN(m, qk_norm_backward(dqkv, dwq, dwk, raw, wq, wk, stats, at.rows, norm_shape, accumulates(m), ws, m->dev));
}
// Goes back from D_QKV to D_NORM1, in new phases. Writes parameters' gradients or, if accumulates(m), adds to them.
static void qkv_backward(struct at at) {
    phase_at(at, PHASES_BACKWARD, "qkv");
    const floatX *dqkv = d_rows(at, SLOT_D_QKV, qkv_width(&at.m->shape.layer));
    const bool sums_bias = !bias_finish(at.m, at.l, LINEAR_QKV);
    linear_backward(at, LINEAR_QKV, SLOT_D_NORM1, DIN_WRITTEN, dqkv, sums_bias, NO_GELU);
}
