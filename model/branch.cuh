// The two ends of a residual branch: norms, projection, addition. Its middle: model/attend.cuh or model/mlp.cuh.
#pragma once
#include "kernels/norm.cuh"         // norm_forward, norm_backward, residual_forward, residual_norm_forward
#include "model/at.cuh"             // struct at, struct sink
#include "model/bias_gradients.cuh" // bias_partial
#include "model/fp8_norm.cuh"       // fp8_norm_of, norm_in_fp8, residual_norm_in_fp8
#include "model/linear.cuh"         // linear_forward, input_sink
#include "model/mlp_ranges.cuh"     // mlp_range_tokens

// ---- Ops: each fetches its parameters and workspace and runs in the phase that its caller began ----

// out.data = norm(x), both (rows, C); also writes stats and merges out.amax. Skips any that is NULL. Makes no out.sums.
static void norm(struct at at, struct sink out, struct norm_stats stats, const floatX *x, struct norm_weights weights) {
    struct gpt *m = at.m;
    const floatX *w = param(m, at.pass, at.l, weights.weight), *b = param(m, at.pass, at.l, weights.bias);
    RUN(m, norm_forward(out.data, stats.mean, stats.rstd, x, w, b, at.rows, m->shape.layer.C,
                        norm_options_of(m, out.amax), m->dev));
}
// dx.data = residual + the gradient of a norm's input x, all (rows, C). residual may be dx.data; NULL is 0. Writes
// weight's and bias's gradients or, if accumulates(m) or after the first range, adds to them. at.l -1: the final norm.
static void norm_gradient(struct at at, struct sink dx, const floatX *residual, const floatX *dout, const floatX *x,
                          struct norm_stats stats, struct norm_weights weights) {
    struct gpt *m = at.m;
    const int C = m->shape.layer.C;
    const floatX *w = param(m, at.pass, at.l, weights.weight);
    float *dw = grad(m, at.l, weights.weight), *db = grad(m, at.l, weights.bias);
    void *ws = workspace(m, larger(norm_backward_workspace_bytes(at.largest_range_rows, C, m->dev),
                                   norm_backward_workspace_bytes(at.last_range_rows, C, m->dev)));
    RUN(m, norm_backward(dx.data, dx.sums, dw, db, residual, dout, x, w, stats.mean, stats.rstd, at.rows, C,
                         accumulates(m) || at.first > 0, norm_options_of(m, dx.amax), ws, m->dev));
}
// A branch of the residual stream x, which becomes x + after(output(... input(before(x)))). before, after: norms.
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
// Whether a branch reads the layer's input; else it reads the stream after attention's branch.
static bool reads_layer_input(struct at at, const struct branch *b) { return !is_mlp(b) || at.m->shape.layer.parallel; }
// Returns the residual stream as a branch reads it, before any norm, (rows, C), live in this phase; NULL when planning.
static const floatX *branch_input(struct at at, const struct branch *b) {
    return reads_layer_input(at, b) ? rows_of(at_layer_below(at), ACT_OUT) : rows_of(at, ACT_MID);
}
// Returns norm_stats_of(at, id) if at.produce has these statistics; else, and when planning, both pointers are NULL.
static struct norm_stats wanted_statistics(struct at at, enum activation_id id) {
    const struct norm_stats none = {NULL, NULL};
    return produces(at, 1u << id) ? norm_stats_of(at, id) : none;
}

// ---- Forward ----

// Returns the residual stream after attention's branch, (N, C), live in this phase; NULL when planning.
static floatX *residual_after_attention(struct at at) {
    if (!at.m->shape.layer.parallel)
        return rows_of(at, ACT_MID);
    return (floatX *)buffer(at.m, at.pass, at.l, SLOT_PARALLEL_SUM,
                            (size_t)extent_of(at.m, at.pass).N * at.m->shape.layer.C * sizeof(floatX),
                            forward_group_name(at.pass), "residual after attention");
}
// Whether the residual after attention is to be made: at.produce has MID or, with parallel branches, OUT, its sum.
static bool residual_after_attention_is_wanted(struct at at) {
    return produces(at, at.m->shape.layer.parallel ? BIT(OUT) : BIT(MID));
}
// Whether there is a norm before a branch, and its output, which the branch's first linear layer reads, is to be made.
static bool norm_output_is_wanted(struct at at, const struct branch *b) {
    return at.m->shape.layer.norm_before && linear_input_is_wanted(at, b->input);
}
// Whether the norm before a branch has to run, for its output or for its statistics.
static bool norm_is_wanted(struct at at, const struct branch *b) {
    return norm_output_is_wanted(at, b) || produces(at, 1u << b->before_statistics);
}
// Returns where the norm before a branch puts its output. `data` is NULL if the output isn't wanted, if norm_fp8_sink
// has a place for it, and when planning.
static struct sink norm_sink(struct at at, const struct branch *b) {
    return norm_output_is_wanted(at, b) ? input_sink(at, b->input) : plain_sink(NULL);
}
// Returns where the norm before a branch puts an output that is wanted in FP8, live in this phase.
static struct fp8_norm norm_fp8_sink(struct at at, const struct branch *b) {
    return fp8_norm_of(at, b->input, norm_output_is_wanted(at, b));
}
// Runs the norm before a branch in a new phase, if its output or statistics are wanted and no fused_norm makes them.
static void branch_norm(struct at at, const struct branch *b) {
    const bool fused = is_mlp(b) ? residual_after_attention_is_wanted(at) && !at.m->shape.layer.parallel
                                 : at.pass != PASS_BACKWARD && at.l > 0;
    if (!norm_is_wanted(at, b) || fused)
        return;
    phase_at(at, forward_group(at.pass), b->before_name);
    const struct sink out = norm_sink(at, b);
    const struct fp8_norm fp8 = norm_fp8_sink(at, b);
    const struct norm_stats stats = wanted_statistics(at, b->before_statistics);
    const floatX *x = branch_input(at, b);
    if (fp8.runs)
        norm_in_fp8(at, &fp8, stats, x, b->before_weights);
    else
        norm(at, out, stats, x, b->before_weights);
}

// The next norm, where the op that adds a branch computes it too: norm 2, the next layer's norm 1, or the final norm.
struct fused_norm {
    bool runs;
    int l; // the layer whose weights it has; -1: it is the final norm
    struct norm_weights weights;
    struct norm_stats stats;
    struct sink out;
    struct fp8_norm fp8;
};
// Returns the norm that add_branch computes in the op that adds b, its buffers live in this phase; `runs` false: none.
static struct fused_norm fused_norm(struct at at, const struct branch *b) {
    struct gpt *m = at.m;
    const struct layer_shape *s = &m->shape.layer;
    const bool last = at.l + 1 == m->shape.L;
    struct at reader = at; // where the sum is read
    struct fused_norm f;
    memset(&f, 0, sizeof f);
    f.runs = is_mlp(b) ? at.pass != PASS_BACKWARD && (last || s->norm_before)
                       : !s->parallel && norm_is_wanted(at, &MLP_BRANCH);
    if (!f.runs)
        return f;
    if (is_mlp(b) && last) {
        f.l = -1;
        f.weights = NORM_FINAL;
        f.stats = final_norm_stats_of(m, at.pass);
        f.out = plain_sink(final_norm_buffer(m, at.pass));
        return f;
    }
    const struct branch *next = is_mlp(b) ? &ATTENTION_BRANCH : &MLP_BRANCH;
    reader.l += is_mlp(b);
    f.l = reader.l;
    f.weights = next->before_weights;
    f.stats = wanted_statistics(reader, next->before_statistics);
    f.out = norm_sink(reader, next);
    f.fp8 = norm_fp8_sink(reader, next);
    return f;
}
// sum = x + multiplier * dropout(sum), all (rows, C), in this phase. Also computes the fused_norm, if there is one:
// call use_unit before for the unit that has the norm's weights.
static void add_branch(struct at at, const struct branch *b, floatX *sum, const floatX *x) {
    struct gpt *m = at.m;
    const int C = m->shape.layer.C;
    const struct dropout dropout = dropout_of(m, m->config.model.hidden_dropout, at.l, b->use);
    const struct fused_norm f = fused_norm(at, b);
    if (!f.runs) {
        RUN(m, residual_forward(sum, x, sum, at.rows, C, residual_scale(m), dropout, m->dev));
        return;
    }
    const floatX *w = param(m, at.pass, f.l, f.weights.weight), *bias = param(m, at.pass, f.l, f.weights.bias);
    if (f.fp8.runs)
        residual_norm_in_fp8(at, &f.fp8, sum, f.stats, x, w, bias, dropout);
    else
        RUN(m, residual_norm_forward(sum, f.out.data, f.stats.mean, f.stats.rstd, x, sum, w, bias, at.rows, C,
                                     norm_options_of(m, f.out.amax), residual_scale(m), dropout, m->dev));
}
// Runs b's projection in a new phase, if at.produce has its output. Does nothing if no norm follows the projection.
static void branch_project(struct at at, const struct branch *b) {
    if (!produces(at, 1u << b->projection))
        return;
    phase_at(at, forward_group(at.pass), linear_row(b->output, &at.m->shape.layer).name);
    linear_forward(at, b->output, rows_of(at, b->projection));
}
// Returns the unit that comes after layer at.l in a forward: the next layer's, or the head's.
static int next_unit(struct at at) {
    return at.l + 1 < at.m->shape.L ? unit_of_layer(&at.m->table, at.l + 1) : unit_of_head();
}
// Runs the end of a branch in new phases, as at.produce asks: the projection, the norm after it, and the addition to
// the stream with the fused_norm. In FP8 first casts the projection's input. Skips a projection that the MLP's ranges
// have done. Outside PASS_BACKWARD, calls use_unit(next_unit) before the MLP's addition.
static void branch_end(struct at at, const struct branch *b) {
    const struct layer_shape *s = &at.m->shape.layer;
    const enum phase_group group = forward_group(at.pass);
    const bool projected = is_mlp(b) && mlp_range_tokens(at.m, at.pass, at.l) > 0; // range by range, by now
    const char *name = linear_row(b->output, s).name;
    if (!projected) {
        cast_input(at, b->output);
        branch_project(at, b);
    }
    if (is_mlp(b) ? produces(at, BIT(OUT)) : residual_after_attention_is_wanted(at)) {
        if (is_mlp(b) && at.pass != PASS_BACKWARD) // the fused norm's weights are the next unit's
            use_unit(at.m, at.pass, next_unit(at));
        phase_at(at, group, s->norm_after ? b->after_name : projected ? "residual after mlp" : name);
        floatX *sum = is_mlp(b) ? rows_of(at, ACT_OUT) : residual_after_attention(at);
        if (s->norm_after) {
            const floatX *projection = rows_of(at, b->projection);
            norm(at, plain_sink(sum), wanted_statistics(at, b->after_statistics), projection, b->after_weights);
        } else if (!projected)
            linear_forward(at, b->output, sum);
        add_branch(at, b, sum, is_mlp(b) ? residual_after_attention(at) : branch_input(at, b));
    } else if (produces(at, 1u << b->after_statistics)) {
        phase_at(at, group, b->after_name);
        const floatX *projection = rows_of(at, b->projection);
        norm(at, plain_sink(NULL), norm_stats_of(at, b->after_statistics), projection, b->after_weights);
    }
}

// ---- Backward ----

// Returns the gradient of what a branch adds to the stream, (rows, C). That is the stream's gradient itself or, with
// dropout or a multiplier, a buffer. Only a call for all tokens computes this buffer, in this phase, and writes the
// sums of its columns to `partial` unless that is NULL. Without a buffer `partial` is not written.
static const floatX *addend_gradient(struct at at, const struct branch *b, float *partial) {
    struct gpt *m = at.m;
    if (branch_is_added_unscaled(m))
        return d_residual_rows(at);
    const floatX *dres = d_residual(m);
    const struct dropout dropout = dropout_of(m, m->config.model.hidden_dropout, at.l, b->use);
    const int C = m->shape.layer.C;
    floatX *dadded = d_rows(at, b->d_added, C);
    if (!at_is_range(at))
        RUN(m, residual_backward(dadded, partial, dres, at.rows, C, residual_scale(m), dropout, m->dev));
    return dadded;
}
// Takes the gradient back through dropout, multiplier and norm after b, if any, and opens the projection's backward
// phase. Returns the projection's dout, (rows, C). A caller by ranges calls addend_gradient for all tokens before.
static const floatX *begin_projection_backward(struct at at, const struct branch *b) {
    struct gpt *m = at.m;
    const int C = m->shape.layer.C;
    const char *name = linear_row(b->output, &m->shape.layer).name;
    if (!m->shape.layer.norm_after) {
        phase_at(at, PHASES_BACKWARD, name);
        return addend_gradient(at, b, bias_partial(m, at.l, b->output, BIAS_BY_RESIDUAL));
    }
    phase_at(at, PHASES_BACKWARD, b->after_name);
    const floatX *projection = rows_of(at, b->projection);
    const struct norm_stats stats = norm_stats_of(at, b->after_statistics);
    if (at.ranged & 1u << b->after_statistics)
        norm(at, plain_sink(NULL), stats, projection, b->after_weights);
    const floatX *dadded = addend_gradient(at, b, NULL);
    struct sink dproj = plain_sink(NULL);
    dproj.sums = bias_partial(m, at.l, b->output, BIAS_BY_NORM);
    dproj.data = d_rows(at, b->d_projection, C);
    dproj.amax = gradient_amax(m, at.l, b->output);
    norm_gradient(at, dproj, NULL, dadded, projection, stats, b->after_weights);
    phase_at(at, PHASES_BACKWARD, name);
    return d_rows(at, b->d_projection, C);
}

// Returns a sink of dres (rows, C), the stream's gradient. If dres is also the output gradient of layer l's projection,
// the sink has the amax and bias sums that are wanted of dres. l -1: dres is incomplete, or no projection is left.
static struct sink stream_sink(struct gpt *m, floatX *dres, int l, enum linear projection) {
    struct sink sink = plain_sink(dres);
    sink.sums = stream_bias_partial(m, l, projection);
    sink.amax = stream_amax(m, l, projection);
    return sink;
}
// Takes the gradient in slot b->d_input back through the norm before b, if there is one, and adds it to d_residual, in
// a new phase. With parallel branches, call this for attention first: the MLP's call completes d_residual.
static void branch_input_backward(struct at at, const struct branch *b) {
    struct gpt *m = at.m;
    const struct layer_shape *s = &m->shape.layer;
    const struct dropout none = {0, 0, 0, 0, 0, NULL};
    phase_at(at, PHASES_BACKWARD, b->before_name);
    floatX *din = d_rows(at, b->d_input, s->C), *dres = d_residual_rows(at);
    if (!s->norm_before) {
        RUN(m, residual_forward(dres, din, dres, at.rows, s->C, 1, none, m->dev));
        return;
    }
    // `next` is the layer of the next branch on the way back: attention's, or the MLP's of the layer below.
    const bool below = reads_layer_input(at, b), last_reader = is_mlp(b) || !s->parallel;
    const int next = !last_reader ? -1 : below ? at.l - 1 : at.l;
    const struct sink sink = stream_sink(m, dres, next, below ? LINEAR_MLP_PROJ : LINEAR_ATT_PROJ);
    const floatX *x = branch_input(at, b);
    norm_gradient(at, sink, dres, din, x, norm_stats_of(at, b->before_statistics), b->before_weights);
}
