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

// out = norm(x), statistics into stats. out.data NULL: statistics only; stats.rstd NULL: not written.
static void norm(struct at at, struct sink out, struct norm_rows stats, const floatX *x, struct norm_weights weights) {
    struct gpt *m = at.m;
    const floatX *w = param(m, at.pass, at.l, weights.weight), *b = param(m, at.pass, at.l, weights.bias);
    RUN(m, norm_forward(out.data, stats.mean, stats.rstd, x, w, b, at.rows, m->shape.layer.C,
                        norm_options_of(m, out.amax), m->dev));
}
// dx = residual + the gradient of a norm's input x; those of its weight and bias join the unit's gradients. residual:
// may be dx; NULL: 0.
static void norm_gradient(struct at at, struct sink dx, const floatX *residual, const floatX *dout, const floatX *x,
                          struct norm_rows stats, struct norm_weights weights) {
    struct gpt *m = at.m;
    const int C = m->shape.layer.C;
    const floatX *w = param(m, at.pass, at.l, weights.weight);
    float *dw = grad(m, at.l, weights.weight), *db = grad(m, at.l, weights.bias);
    void *ws = workspace(m, larger(norm_backward_workspace_bytes(at.most, C, m->dev),
                                   norm_backward_workspace_bytes(at.last, C, m->dev)));
    RUN(m, norm_backward(dx.data, dx.sums, dw, db, residual, dout, x, w, stats.mean, stats.rstd, at.rows, C,
                         adds(m) || at.first > 0, norm_options_of(m, dx.amax), ws, m->dev));
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
static void attention(struct gpt *m, enum pass pass, int l, struct sink att, void *saved, const floatX *qkv) {
    const struct attention_shape shape = layer_attention_shape(m, pass, l);
    const struct dropout dropout = dropout_of(m, m->config.attention_dropout, l, DROPOUT_ATTENTION);
    void *ws = workspace(m, attention_forward_workspace_bytes(m->backend, shape, m->dev));
    RUN(m, attention_forward(att.data, saved, qkv, m->backend, shape, dropout, att.amax, ws, m->dev));
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

// ---- Branches ----

// A branch of the residual stream: x + after(output(...input(before(x)))).
struct branch {
    enum linear input, output; // its first and its last linear layer
    enum activation_id before, before_statistics;
    struct norm_weights before_weights;
    const char *before_name;
    enum activation_id projection, after_statistics; // of the norm after the output, where there is one
    struct norm_weights after_weights;
    const char *after_name;
    enum slot d_input, d_projection, d_added; // gradients of the input, the output, and of what is added to the stream
    enum dropout_use use;
};
static const struct branch ATTENTION_BRANCH = {LINEAR_QKV,
                                               LINEAR_ATT_PROJ,
                                               ACT_NORM1,
                                               ACT_NORM1_STATS,
                                               {PARAM_LN1_W, PARAM_LN1_B},
                                               "norm 1",
                                               ACT_ATT_PROJ,
                                               ACT_POST1_STATS,
                                               {PARAM_POST1_W, PARAM_POST1_B},
                                               "post-attention norm",
                                               SLOT_D_NORM1,
                                               SLOT_D_ATT_PROJ,
                                               SLOT_D_ATT_ADDED,
                                               DROPOUT_ATTENTION_PROJECTION};
static const struct branch MLP_BRANCH = {LINEAR_FC,
                                         LINEAR_MLP_PROJ,
                                         ACT_NORM2,
                                         ACT_NORM2_STATS,
                                         {PARAM_LN2_W, PARAM_LN2_B},
                                         "norm 2",
                                         ACT_MLP_PROJ,
                                         ACT_POST2_STATS,
                                         {PARAM_POST2_W, PARAM_POST2_B},
                                         "post-mlp norm",
                                         SLOT_D_NORM2,
                                         SLOT_D_MLP_PROJ,
                                         SLOT_D_MLP_ADDED,
                                         DROPOUT_MLP_PROJECTION};

static bool is_mlp(const struct branch *b) { return b->input == LINEAR_FC; }
// Whether a branch reads the layer's input, and not the sum of that and attention's branch.
static bool reads_layer_input(struct at at, const struct branch *b) { return !is_mlp(b) || at.m->shape.layer.parallel; }
// The rows of the residual stream that a branch reads.
static const floatX *branch_input(struct at at, const struct branch *b) {
    return reads_layer_input(at, b) ? rows_of(at_below(at), ACT_OUT) : rows_of(at, ACT_MID);
}
// The statistics of a norm where they are wanted.
static struct norm_rows wanted_statistics(struct at at, enum activation_id id) {
    const struct norm_rows none = {NULL, NULL};
    return wants(at, 1u << id) ? norm_rows_of(at, id) : none;
}

// ---- Forward ----

// The sum of the residual stream and attention's branch, which the MLP's branch joins: an activation, or, where
// attention and MLP read the same stream, a buffer of the forward pass.
static floatX *middle(struct at at) {
    if (!at.m->shape.layer.parallel)
        return rows_of(at, ACT_MID);
    return (floatX *)buffer(at.m, at.pass, at.l, SLOT_PARALLEL_SUM,
                            (size_t)extent_of(at.m, at.pass).N * at.m->shape.layer.C * sizeof(floatX),
                            pass_name(at.pass), "residual after attention");
}
// Whether the addition of attention's branch to the stream runs.
static bool adds_attention(struct at at) { return wants(at, at.m->shape.layer.parallel ? BIT(OUT) : BIT(MID)); }
// Whether the norm before a branch, or its statistics, is wanted.
static bool norm_is_wanted(struct at at, const struct branch *b) {
    const bool input = at.m->shape.layer.norm_before && input_is_wanted(at, b->input);
    return input || wants(at, 1u << b->before_statistics);
}
static struct sink norm_sink(struct at at, const struct branch *b) {
    const bool input = at.m->shape.layer.norm_before && input_is_wanted(at, b->input);
    struct sink sink = input ? input_sink(at, b->input) : plain_sink(NULL);
    return sink;
}
// Norms the input of a branch, where the addition before it has not (fused_norm).
static void branch_norm(struct at at, const struct branch *b) {
    const bool fused =
        is_mlp(b) ? adds_attention(at) && !at.m->shape.layer.parallel : at.pass != PASS_BACKWARD && at.l > 0;
    if (!norm_is_wanted(at, b) || fused)
        return;
    phase_at(at, forward_group(at.pass), b->before_name);
    const struct sink out = norm_sink(at, b);
    const struct norm_rows stats = wanted_statistics(at, b->before_statistics);
    norm(at, out, stats, branch_input(at, b), b->before_weights);
}

// The norm of the sum that a branch's addition makes, where the same op computes it: attention's addition norm 2, the
// MLP's, in a first forward, the next layer's norm 1 or the final norm.
struct fused_norm {
    bool runs;
    int l; // whose weights it has; -1: the model's
    struct norm_weights weights;
    struct norm_rows stats;
    struct sink out;
};
static struct fused_norm fused_norm(struct at at, const struct branch *b) {
    struct gpt *m = at.m;
    const struct layer_shape *s = &m->shape.layer;
    const bool last = at.l + 1 == m->shape.L;
    struct at reader = at; // of the sum
    struct fused_norm f;
    memset(&f, 0, sizeof f);
    f.runs = is_mlp(b) ? at.pass != PASS_BACKWARD && (last || s->norm_before)
                       : !s->parallel && norm_is_wanted(at, &MLP_BRANCH);
    if (!f.runs)
        return f;
    if (is_mlp(b) && last) {
        f.l = -1;
        f.weights = NORM_FINAL;
        f.stats = final_norm_rows(m, at.pass);
        f.out = plain_sink(final_norm_buffer(m, at.pass));
        return f;
    }
    const struct branch *next = is_mlp(b) ? &ATTENTION_BRANCH : &MLP_BRANCH;
    reader.l += is_mlp(b);
    f.l = reader.l;
    f.weights = next->before_weights;
    f.stats = wanted_statistics(reader, next->before_statistics);
    f.out = norm_sink(reader, next);
    return f;
}
// sum = x + multiplier * dropout(sum), and the norm of that.
static void add_branch(struct at at, const struct branch *b, floatX *sum, const floatX *x) {
    struct gpt *m = at.m;
    const int C = m->shape.layer.C;
    const struct dropout dropout = dropout_of(m, m->config.hidden_dropout, at.l, b->use);
    const struct fused_norm f = fused_norm(at, b);
    if (!f.runs) {
        RUN(m, residual_forward(sum, x, sum, at.rows, C, residual_scale(m), dropout, m->dev));
        return;
    }
    const floatX *w = param(m, at.pass, f.l, f.weights.weight), *bias = param(m, at.pass, f.l, f.weights.bias);
    RUN(m, residual_norm_forward(sum, f.out.data, f.stats.mean, f.stats.rstd, x, sum, w, bias, at.rows, C,
                                 norm_options_of(m, f.out.amax), residual_scale(m), dropout, m->dev));
}
// The output of a branch into its activation of its own, which the norm after it reads.
static void branch_project(struct at at, const struct branch *b) {
    if (!wants(at, 1u << b->projection))
        return;
    phase_at(at, forward_group(at.pass), linear_row(b->output, &at.m->shape.layer).name);
    linear_forward(at, b->output, rows_of(at, b->projection));
}
// Ends a branch: its output, the norm after that, its addition to the residual stream x, whose sum is `sum`.
static void branch_end(struct at at, const struct branch *b) {
    const struct layer_shape *s = &at.m->shape.layer;
    const enum phase_group group = forward_group(at.pass);
    const bool projected = is_mlp(b) && mlp_range_tokens(at.m, at.pass, at.l) > 0; // range by range, by now
    const char *name = linear_row(b->output, s).name;
    if (!projected) {
        cast_input(at, b->output);
        branch_project(at, b);
    }
    if (is_mlp(b) ? wants(at, BIT(OUT)) : adds_attention(at)) {
        phase_at(at, group, s->norm_after ? b->after_name : projected ? "residual after mlp" : name);
        floatX *sum = is_mlp(b) ? rows_of(at, ACT_OUT) : middle(at);
        if (s->norm_after) {
            const floatX *projection = rows_of(at, b->projection);
            norm(at, plain_sink(sum), wanted_statistics(at, b->after_statistics), projection, b->after_weights);
        } else if (!projected)
            linear_forward(at, b->output, sum);
        add_branch(at, b, sum, is_mlp(b) ? middle(at) : branch_input(at, b));
    } else if (wants(at, 1u << b->after_statistics)) {
        phase_at(at, group, b->after_name);
        const floatX *projection = rows_of(at, b->projection);
        norm(at, plain_sink(NULL), norm_rows_of(at, b->after_statistics), projection, b->after_weights);
    }
}

// q, k and v as attention reads them, rotated and normed where the model does so.
static void make_qkv(struct at at) {
    struct gpt *m = at.m;
    const enum phase_group group = forward_group(at.pass);
    if (wants(at, BIT(QKV))) {
        phase_at(at, group, "qkv");
        floatX *qkv = rows_of(at, ACT_QKV);
        linear_forward(at, LINEAR_QKV, qkv);
        if (!m->shape.layer.qk_statistics)
            rotate(m, at.pass, at.l, qkv);
    }
    if (wants(at, BIT(QKN) | BIT(QKN_STATS))) {
        phase_at(at, group, "q and k norm");
        floatX *qkn = rows_of(at, ACT_QKN);
        float *stats = activation_stats(m, at.pass, at.l, ACT_QKN_STATS); // where kept, the same bits are written again
        const floatX *qkv = rows_of(at, ACT_QKV);
        const floatX *wq = param(m, at.pass, at.l, PARAM_QNORM_W), *wk = param(m, at.pass, at.l, PARAM_KNORM_W);
        const struct qk_norm_rotary rotary = qk_norm_rotary_of(m, at.pass, at.l);
        RUN(m, qk_norm_forward(qkn, stats, qkv, wq, wk, at.rows, qk_norm_shape_of(m), rotary, m->dev));
    }
}
static void attend(struct at at) {
    struct gpt *m = at.m;
    if (!wants(at, BIT(ATT) | BIT(SOFTMAX)))
        return;
    phase_at(at, forward_group(at.pass), "attention");
    const struct sink att = input_sink(at, LINEAR_ATT_PROJ);
    const floatX *qkv = attention_input(m, at.pass, at.l);
    if (generates(at.pass))
        attention_with_cache(m, at.pass, at.l, att, qkv);
    else
        attention(m, at.pass, at.l, att, activation_memory(m, at.pass, at.l, ACT_SOFTMAX), qkv);
}
// The MLP's forward range by range.
static void mlp_forward_ranges(struct at at) {
    struct at range = at_forward_ranges(at);
    const struct linear_source output = linear_source(&at.m->shape.layer, LINEAR_MLP_PROJ);
    struct timeline_loop loop = timeline_loop_of(&at.m->timeline, range.most, at.rows);
    if (!wants(at, 1u << output.product))
        return;
    while (at_next(&range, &loop)) {
        mlp_forward(range);
        phase_at(range, forward_group(at.pass), "mlp projection");
        linear_forward(range, LINEAR_MLP_PROJ, rows_of(range, output.product));
    }
}
// Parameters that the layer needs now, and those that are needed next.
static void block_units(struct at at) {
    struct gpt *m = at.m;
    const int next = at.l + 1 < m->shape.L ? unit_of_layer(&m->table, at.l + 1) : unit_of_head();
    if (at.produce)
        use_unit(m, at.pass, unit_of_layer(&m->table, at.l));
    if (at.pass == PASS_BACKWARD)
        return;
    prefetch_unit(m, at.pass, next);
    if (next == unit_of_head())
        prefetch_unit(m, head_pass(m, at.pass), head_unit(m));
    if (next == unit_of_head() && at.pass == PASS_TRAIN) {
        zero_prefetch_gradients(&m->zero, unit_of_head());
        zero_prefetch_gradients(&m->zero, head_unit(m));
    }
}

// Runs the ops whose outputs are in the set `produce`: all in a first forward, the dropped ones in recomputation.
//
// A residual addition is fused with the norm that reads it where both are in `produce`. In a first forward the fusion
// crosses layers: a layer's last addition computes the next layer's NORM1, or the final norm after the last layer; only
// layer 0 computes its own NORM1. A norm that runs unfused has the same bits.
static void block_forward(struct gpt *m, int l, uint32_t produce, enum pass pass) {
    const uint32_t made = produce & activation_present(&m->shape.layer) & ~left_to_ranges(m, pass, l, produce);
    const struct at at = at_layer(m, pass, l, made);
    block_units(at);

    branch_norm(at, &ATTENTION_BRANCH);
    cast_input(at, LINEAR_QKV);
    make_qkv(at);
    attend(at);
    branch_end(at, &ATTENTION_BRANCH);

    branch_norm(at, &MLP_BRANCH);
    if (mlp_range_tokens(m, pass, l) > 0)
        mlp_forward_ranges(at);
    else
        mlp_forward(at);
    if (wants(at, BIT(OUT)) && pass != PASS_BACKWARD) // the fused norm's weights are the next unit's
        use_unit(m, pass, l + 1 < m->shape.L ? unit_of_layer(&m->table, l + 1) : unit_of_head());
    branch_end(at, &MLP_BRANCH);
}

// ---- Backward ----

// The gradient of what a branch adds to the residual stream, before dropout and multiplier. Without these two that is
// the gradient of the stream itself, which is then not stored twice. Of a range it was made before the ranges.
// partial: gets the partial sums of its columns; NULL: not made.
static const floatX *d_added(struct at at, const struct branch *b, float *partial) {
    struct gpt *m = at.m;
    if (branch_is_added_as_it_is(m))
        return d_residual_rows(at);
    const floatX *dres = d_residual(m);
    const struct dropout dropout = dropout_of(m, m->config.hidden_dropout, at.l, b->use);
    const int C = m->shape.layer.C;
    floatX *dadded = d_rows(at, b->d_added, C);
    if (!at_is_range(at))
        RUN(m, residual_backward(dadded, partial, dres, at.rows, C, residual_scale(m), dropout, m->dev));
    return dadded;
}
// The gradient of the output of a branch's last linear layer, through the norm after it where there is one. Opens the
// phase of that linear layer, in which the result is live.
static const floatX *d_projection(struct at at, const struct branch *b) {
    struct gpt *m = at.m;
    const int C = m->shape.layer.C;
    const char *name = linear_row(b->output, &m->shape.layer).name;
    if (!m->shape.layer.norm_after) {
        phase_at(at, GROUP_BACKWARD, name);
        return d_added(at, b, at_is_range(at) ? NULL : bias_partial(m, at.l, b->output, BIAS_BY_RESIDUAL));
    }
    phase_at(at, GROUP_BACKWARD, b->after_name);
    const floatX *projection = rows_of(at, b->projection);
    const struct norm_rows stats = norm_rows_of(at, b->after_statistics);
    if (at.ranged & 1u << b->after_statistics)
        norm(at, plain_sink(NULL), stats, projection, b->after_weights);
    const floatX *dadded = d_added(at, b, NULL);
    struct sink dproj = plain_sink(NULL);
    dproj.sums = bias_partial(m, at.l, b->output, BIAS_BY_NORM);
    dproj.data = d_rows(at, b->d_projection, C);
    dproj.amax = gradient_amax(m, at.l, b->output);
    norm_gradient(at, dproj, NULL, dadded, projection, stats, b->after_weights);
    phase_at(at, GROUP_BACKWARD, name);
    return d_rows(at, b->d_projection, C);
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

// The residual stream's gradient, which is that of the output of a projection as it is where that is added as it is:
// the projection's amax and bias sums are taken on the way. l -1: of no projection.
static struct sink stream_sink(struct gpt *m, floatX *dres, int l, enum linear projection) {
    struct sink sink = plain_sink(dres);
    sink.sums = stream_bias_partial(m, l, projection);
    sink.amax = stream_amax(m, l, projection);
    return sink;
}
// The gradient of the input of a branch joins the residual stream's: through the norm before it, or as it is. Runs in a
// phase of its own.
static void d_branch_input(struct at at, const struct branch *b) {
    struct gpt *m = at.m;
    const struct layer_shape *s = &m->shape.layer;
    const struct dropout none = {0, 0, 0, 0, 0, NULL};
    phase_at(at, GROUP_BACKWARD, b->before_name);
    floatX *din = d_rows(at, b->d_input, s->C), *dres = d_residual_rows(at);
    if (!s->norm_before) {
        RUN(m, residual_forward(dres, din, dres, at.rows, s->C, 1, none, m->dev));
        return;
    }
    // What is added to the stream next below: attention's output, or the MLP's of the layer below.
    const bool below = reads_layer_input(at, b), last_reader = is_mlp(b) || !s->parallel;
    const struct sink sink = at_is_range(at) ? plain_sink(dres)
                                             : stream_sink(m, dres,
                                                           !last_reader ? -1
                                                           : below      ? at.l - 1
                                                                        : at.l,
                                                           below ? LINEAR_MLP_PROJ : LINEAR_ATT_PROJ);
    const floatX *x = branch_input(at, b);
    norm_gradient(at, sink, dres, din, x, norm_rows_of(at, b->before_statistics), b->before_weights);
}

// The gradients of the MLP's parameters; d_residual becomes the gradient of the middle of the residual stream. With
// parallel branches the gradient of the MLP's input is left in D_NORM2: attention reads d_residual as it is, first.
static void mlp_branch_backward(struct at at) {
    mlp_backward(at, d_projection(at, &MLP_BRANCH));
    if (!at.m->shape.layer.parallel)
        d_branch_input(at, &MLP_BRANCH);
}
// The same range by range, each of which first makes again what it reads.
static void mlp_branch_backward_ranges(struct at at) {
    struct at range = at_backward_ranges(at);
    phase(at.m, GROUP_BACKWARD, at.l, "mlp");
    d_added(at, &MLP_BRANCH, NULL);
    struct timeline_loop loop = timeline_loop_of(&at.m->timeline, range.most, at.rows);
    while (at_next(&range, &loop)) {
        branch_norm(range, &MLP_BRANCH);
        mlp_forward(range);
        branch_project(range, &MLP_BRANCH);
        mlp_branch_backward(range);
    }
}
// The gradient of what attention reads, through attention and the norm of q and k, into D_QKV.
static void attention_backward_phase(struct at at) {
    struct gpt *m = at.m;
    const struct layer_shape *s = &m->shape.layer;
    const int l = at.l;
    phase_at(at, GROUP_BACKWARD, "attention");
    const floatX *datt = d_rows(at, SLOT_D_ATT, s->H * s->D);
    floatX *dqkv = d_rows(at, SLOT_D_QKV, qkv_width(s));
    const floatX *qkv = attention_input(m, PASS_BACKWARD, l), *att = rows_of(at, ACT_ATT);
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

    phase_at(at, GROUP_BACKWARD, "q and k norm");
    const struct qk_norm_shape norm_shape = qk_norm_shape_of(m);
    dqkv = d_rows(at, SLOT_D_QKV, qkv_width(s));
    const floatX *raw = rows_of(at, ACT_QKV);
    const float *stats = activation_stats(m, PASS_BACKWARD, l, ACT_QKN_STATS);
    const floatX *wq = param(m, PASS_BACKWARD, l, PARAM_QNORM_W), *wk = param(m, PASS_BACKWARD, l, PARAM_KNORM_W);
    float *dwq = grad(m, l, PARAM_QNORM_W), *dwk = grad(m, l, PARAM_KNORM_W);
    ws = workspace(m, qk_norm_backward_workspace_bytes(at.rows, norm_shape, m->dev));
    RUN(m, qk_norm_backward(dqkv, dwq, dwk, raw, wq, wk, stats, at.rows, norm_shape, adds(m), ws, m->dev));
}

// Adds the gradients of layer l's parameters and turns d_residual, the gradient of its output, into that of its input.
static void block_backward(struct gpt *m, int l) {
    const struct layer_shape *s = &m->shape.layer;
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

    const floatX *dproj = d_projection(at, &ATTENTION_BRANCH);
    linear_backward(at, LINEAR_ATT_PROJ, SLOT_D_ATT, dproj, !bias_finish(m, l, LINEAR_ATT_PROJ), NO_GELU);
    attention_backward_phase(at);
    phase_at(at, GROUP_BACKWARD, "qkv");
    const floatX *dqkv = d_rows(at, SLOT_D_QKV, qkv_width(s));
    linear_backward(at, LINEAR_QKV, SLOT_D_NORM1, dqkv, !bias_finish(m, l, LINEAR_QKV), NO_GELU);
    d_branch_input(at, &ATTENTION_BRANCH);
    if (s->parallel)
        d_branch_input(at, &MLP_BRANCH);
}
