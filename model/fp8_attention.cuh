// A block's attention in FP8 (--fp8-dot-product-attention, kernels/fp8/attention.cuh). For a layer in bf16, and in
// evaluation, these do nothing or return bf16's buffers. Kept in FP8 are q, k and v, rotated, and attention's output,
// which is the projection's input. With delayed scales attention itself writes its output in FP8; else the projection's
// cast does. If only forward is in FP8 (`forward`), the bf16 backend computes backward from the kept values.
#pragma once
#include "attention.cuh"             // attention_backward, attention_undo_rope
#include "kernels/fp8/attention.cuh" // fp8_attention_forward, fp8_attention_backward
#include "model/at.cuh"              // struct at
#include "model/fp8_linear.cuh"      // fp8_linear_input, amax_of
#include "model/sequence.cuh"        // layer_attention_shape

// Returns what the options demand of FP8 attention: backward too, FP8 outputs, sums in any order, gradients' format.
static struct fp8_attention_demands fp8_attention_demands_of(const struct config *c) {
    const struct fp8_attention_demands demands = {
        config_attention_in_fp8(c) == FP8_ATTENTION_FULL, c->fp8.fp8_recipe == FP8_RECIPE_DELAYED,
        !c->attention.deterministic_mode, c->fp8.fp8_format == FP8_FORMAT_HYBRID ? FP8_E5M2 : FP8_E4M3};
    return demands;
}
// Returns what layer l's FP8 attention kernels take in training. The pointers to scales are NULL when planning.
static struct fp8_attention fp8_attention_of(struct gpt *m, int l) {
    const struct fp8_state *f = &m->fp8;
    struct fp8_attention a;
    a.shape = layer_attention_shape(m, PASS_TRAIN, l);
    a.gradients = f->gradients;
    a.outputs_in_fp8 = fp8_is_delayed(f);
    a.full = f->attention == FP8_ATTENTION_FULL;
    a.any_order = !m->config.attention.deterministic_mode;
    a.calibrates = f->calibrates;
    for (int t = 0; t < FP8_ATTENTION_TENSORS; t++)
        a.scales[t] = fp8_attention_scale(f, l, (enum fp8_attention_tensor)t);
    a.out = fp8_scale(f, l, LINEAR_ATT_PROJ, FP8_INPUT);
    return a;
}
// Returns a buffer of layer l's attention, live in this phase; NULL when planning. Only planning reads `bytes`.
static void *fp8_attention_buffer(struct gpt *m, enum pass pass, int l, enum fp8_attention_buffer which, size_t bytes) {
    static const char *const categories[] = {
#define CATEGORY_ROW(id, category, name) category,
        FP8_ATTENTION_BUFFER_ROWS(CATEGORY_ROW)
#undef CATEGORY_ROW
    };
    static const char *const names[] = {
#define NAME_ROW(id, category, name) name,
        FP8_ATTENTION_BUFFER_ROWS(NAME_ROW)
#undef NAME_ROW
    };
    return buffer(m, pass, l, SLOT_FP8_ATTENTION + (int)which, bytes, categories[which], names[which]);
}
// Returns the activation that attention reads: QKN if the model norms q and k, else QKV.
static enum activation_id attention_input_id(const struct gpt *m) {
    return m->shape.layer.qk_statistics ? ACT_QKN : ACT_QKV;
}
// Returns q, k and v in FP8, (N, qkv_width), live in this phase; NULL when planning. Needs attends_in_fp8.
static fp8 *attention_codes(struct gpt *m, enum pass pass, int l) {
    return (fp8 *)activation_memory(m, pass, l, attention_input_id(m));
}

// Returns where to write ACT_QKV or ACT_QKN (`id`), (rows, qkv_width), live in this phase; NULL when planning. It is
// the activation itself or, if attention reads it in FP8, a buffer from which cast_attention_input casts.
static floatX *qkv_destination(struct at at, enum activation_id id) {
    struct gpt *m = at.m;
    const size_t bytes = (size_t)at.rows * (size_t)qkv_width(&m->shape.layer) * sizeof(floatX);
    if (!attends_in_fp8(m, at.pass, at.l) || id != attention_input_id(m))
        return rows_of(at, id);
    return (floatX *)fp8_attention_buffer(m, at.pass, at.l, FP8_ATTENTION_BUFFER_VALUES, bytes);
}
// Casts q, k and v in a new phase, if attention reads FP8 and at.produce has them. In PASS_TRAIN first takes amaxes.
static void cast_attention_input(struct at at) {
    struct gpt *m = at.m;
    const enum activation_id id = attention_input_id(m);
    if (!attends_in_fp8(m, at.pass, at.l) || !produces(at, 1u << id))
        return;
    phase_at(at, forward_group(at.pass), "cast for attention");
    const floatX *qkv = qkv_destination(at, id);
    fp8 *codes = attention_codes(m, at.pass, at.l);
    RUN(m, fp8_attention_cast(codes, qkv, fp8_attention_of(m, at.l), at.pass == PASS_TRAIN, m->dev));
}
// Computes attention of attention_codes, in this phase. Writes the log-sum-exps to ACT_SOFTMAX. Writes the output to
// ACT_ATT in FP8, with delayed scales, else to att.data (N, H D). Recomputation uses the first forward's scales.
static void attend_in_fp8(struct at at, struct sink att) {
    struct gpt *m = at.m;
    const struct fp8_attention a = fp8_attention_of(m, at.l);
    const struct fp8_attention_demands demands = fp8_attention_demands_of(&m->config);
    fp8 *out8 = a.outputs_in_fp8 ? (fp8 *)activation_memory(m, at.pass, at.l, ACT_ATT) : NULL;
    float *lse = (float *)activation_memory(m, at.pass, at.l, ACT_SOFTMAX);
    const fp8 *codes = attention_codes(m, at.pass, at.l);
    void *ws = workspace(m, fp8_attention_forward_workspace_bytes(a.shape, demands, m->dev));
    RUN(m, fp8_attention_forward(out8, att.data, lse, codes, a, at.pass == PASS_TRAIN, ws, m->dev));
}

// Returns cast_attention_gradient's buffer for D_ATT in FP8, (N, H D), live in this phase; NULL when planning.
static fp8 *dout_codes(struct gpt *m, int l) {
    const struct layer_shape *s = &m->shape.layer;
    const size_t bytes = (size_t)extent_of(m, PASS_TRAIN).N * (size_t)(s->H * s->D);
    return (fp8 *)fp8_attention_buffer(m, PASS_TRAIN, l, FP8_ATTENTION_BUFFER_DOUT, bytes);
}
// Takes D_ATT's amax and casts D_ATT to dout_codes, in a new phase. Does nothing unless attention is in full FP8.
static void cast_attention_gradient(struct at at) {
    struct gpt *m = at.m;
    const struct layer_shape *s = &m->shape.layer;
    const int64_t N = at.rows, width = s->H * s->D;
    if (!attends_in_fp8(m, PASS_BACKWARD, at.l) || m->fp8.attention != FP8_ATTENTION_FULL)
        return;
    phase_at(at, PHASES_BACKWARD, "cast for attention");
    const floatX *datt = d_rows(at, SLOT_D_ATT, width);
    struct fp8_scale *scale = fp8_attention_scale(&m->fp8, at.l, FP8_ATTENTION_DOUT);
    fp8 *codes = dout_codes(m, at.l);
    RUN(m, fp8_cast_with_amax(codes, scale, m->fp8.gradients, datt, N, width, m->dev));
}
// Computes attention's gradient dqkv (N, qkv_width) from dout_codes, in FP8, in this phase. Undoes RoPE.
static void attend_backward_in_full_fp8(struct at at, floatX *dqkv, struct attention_backward_options options) {
    struct gpt *m = at.m;
    const struct fp8_attention a = fp8_attention_of(m, at.l);
    const fp8 *dout = dout_codes(m, at.l), *codes = attention_codes(m, PASS_BACKWARD, at.l);
    const fp8 *out = (const fp8 *)activation_memory(m, PASS_BACKWARD, at.l, ACT_ATT);
    const float *lse = (const float *)activation_memory(m, PASS_BACKWARD, at.l, ACT_SOFTMAX);
    const struct fp8_attention_demands demands = fp8_attention_demands_of(&m->config);
    void *ws = workspace(m, fp8_attention_backward_workspace_bytes(a.shape, demands, m->dev));
    uint32_t *amax = attention_amax_before_rope(options);
    RUN(m, fp8_attention_backward(dqkv, dout, codes, out, lse, a, amax, ws, m->dev));
    RUN(m, attention_undo_rope(dqkv, options, a.shape, m->dev));
}
// Computes attention's gradient dqkv (N, qkv_width) in bf16, from D_ATT and kept FP8 codes, in this phase. Undoes RoPE.
static void attend_backward_in_bf16(struct at at, floatX *dqkv, struct attention_backward_options options) {
    struct gpt *m = at.m;
    const struct fp8_attention a = fp8_attention_of(m, at.l);
    const int64_t width = m->shape.layer.H * m->shape.layer.D, rows = at.rows * m->shape.layer.H;
    const size_t qkv_bytes = plan_aligned((size_t)at.rows * (size_t)qkv_width(&m->shape.layer) * sizeof(floatX));
    const size_t out_bytes = plan_aligned((size_t)(at.rows * width) * sizeof(floatX)),
                 lse_bytes = plan_aligned((size_t)rows * sizeof(float));
    const floatX *datt = d_rows(at, SLOT_D_ATT, width);
    const fp8 *codes = attention_codes(m, PASS_BACKWARD, at.l);
    const fp8 *out8 = (const fp8 *)activation_memory(m, PASS_BACKWARD, at.l, ACT_ATT);
    const float *lse = (const float *)activation_memory(m, PASS_BACKWARD, at.l, ACT_SOFTMAX); // FP8 is exact in bf16
    const size_t bytes = attention_backward_workspace_bytes(m->backend, a.shape, options.any_order, m->dev);
    floatX *qkv = (floatX *)workspace(m, qkv_bytes + out_bytes + lse_bytes + bytes);
    floatX *out = (floatX *)address_after(qkv, qkv_bytes);
    float *own_lse = (float *)address_after(out, out_bytes);
    void *ws = address_after(own_lse, lse_bytes);
    const struct dropout none = dropout_of(m, 0, at.l, DROPOUT_ATTENTION);
    RUN(m, fp8_attention_read_back(qkv, codes, a.scales, FP8_E4M3, a.shape, m->dev));
    RUN(m, fp8_read_back(out, out8, a.out, FP8_E4M3, at.rows * width, m->dev));
    RUN(m, fp8_attention_scale_lse(own_lse, lse, attention_lse_factor(m->backend), rows, m->dev));
    RUN(m, attention_backward(dqkv, datt, qkv, out, own_lse, m->backend, a.shape, none, options, ws, m->dev));
}
// Writes FP8 attention's gradient dqkv (N, qkv_width), in this phase. With FP8_ATTENTION_FULL computes it in FP8, after
// cast_attention_gradient, else in bf16 from D_ATT. Undoes RoPE. Merges dqkv's amax into options.amax.
static void attend_backward_in_fp8(struct at at, floatX *dqkv, struct attention_backward_options options) {
    switch (at.m->fp8.attention) {
    case FP8_ATTENTION_NONE: break;
    case FP8_ATTENTION_FORWARD: attend_backward_in_bf16(at, dqkv, options); break;
    case FP8_ATTENTION_FULL: attend_backward_in_full_fp8(at, dqkv, options); break;
    }
}
