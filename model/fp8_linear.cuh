// The linear layers of a block in FP8. A product multiplies matrices row by row: in forward x (N, k) and W (n, k), for
// din dout (N, n) and W^T (k, n), for dW dout^T (n, N) and x^T (k, N). So a tensor has two forms: row form, as it is,
// and column form, transposed. It is cast at most once in forward and once in backward, into the forms read there. A
// row form lives until its product. An input that no other op of the backward reads is kept only in column form: its
// producer writes floatX, which lives until the cast, or, with delayed scales, both forms.
#pragma once
#include "kernels/activation_fp8.cuh" // gelu_forward_fp8, swiglu_forward_fp8 and the like, and their backward
#include "kernels/fp8/cast.cuh"       // fp8_cast
#include "kernels/matmul/matmul.cuh"  // matmul_fp8
#include "kernels/norm.cuh"           // residual_forward
#include "model/activations.cuh"      // ACTIVATION_SWITCH
#include "model/at.cuh"               // struct gpt and its buffers, struct at, struct sink

// ---- Buffers ----

// Returns a buffer of a linear layer, live in this phase; NULL when planning. Only planning reads `bytes`.
static void *fp8_buffer(struct gpt *m, enum pass pass, int l, enum linear linear, enum fp8_buffer which, size_t bytes) {
    static const char *const categories[] = {
#define CATEGORY_ROW(id, category) category,
        FP8_BUFFER_ROWS(CATEGORY_ROW)
#undef CATEGORY_ROW
    };
    const int slot = SLOT_FP8 + (int)which * LINEAR_COUNT + (int)linear;
    return buffer(m, pass, l, slot, bytes, categories[which], linear_row(linear, &m->shape.layer).name);
}
// Returns an operand's matrix (rows, depth), with its scale, live in this phase; its codes are NULL when planning.
static struct fp8_matrix fp8_matrix_buffer(struct gpt *m, enum pass pass, int l, enum linear linear,
                                           enum fp8_buffer which, enum fp8_operand operand, int64_t rows,
                                           int64_t depth) {
    void *memory = fp8_buffer(m, pass, l, linear, which, fp8_matrix_bytes(&m->fp8, operand, rows, depth));
    return fp8_matrix_in(&m->fp8, memory, operand, rows, depth, fp8_scale(&m->fp8, l, linear, operand));
}
// Returns where an operand's amax is collected; NULL outside PASS_TRAIN, in bf16, with block scales and when planning.
static uint32_t *amax_of(const struct gpt *m, enum pass pass, int l, enum linear linear, enum fp8_operand operand) {
    struct fp8_scale *scale =
        pass == PASS_TRAIN && is_quantized(m, pass, l) ? fp8_scale(&m->fp8, l, linear, operand) : NULL;
    return scale ? &scale->amax : NULL;
}
// Returns the counts (FP8_COUNTS) that a cast adds to; NULL outside PASS_TRAIN, without FP8, and when planning.
static uint64_t *counts_of(const struct gpt *m, enum pass pass, enum linear linear, enum fp8_operand operand) {
    return pass == PASS_TRAIN ? fp8_counts(&m->fp8, linear, operand) : NULL;
}

// ---- Inputs ----

// How a linear layer's input is kept for the weight's gradient: in floatX, if other ops of the backward read it, too;
// in row form, if it is the output of attention in FP8, whose backward reads it; else in column form.
enum input_form { INPUT_FLOATX, INPUT_COLUMNS, INPUT_ROWS };
// Returns the form in which FP8 layer l keeps the input of `linear` from forward for the weight's gradient.
static enum input_form input_form(const struct gpt *m, enum pass pass, int l, enum linear linear) {
    if (linear == LINEAR_ATT_PROJ && attends_in_fp8(m, pass, l))
        return INPUT_ROWS;
    return linear_row(linear, &m->shape.layer).source.shared ? INPUT_FLOATX : INPUT_COLUMNS;
}
// Whether the op that makes the input of `linear` writes it in FP8 itself: a norm, the MLP's activation or FP8 attention,
// in FP8 layers whose scales are delayed.
static bool producer_writes_fp8(struct at at, enum linear linear) {
    return is_quantized(at.m, at.pass, at.l) && fp8_is_delayed(&at.m->fp8) &&
           input_form(at.m, at.pass, at.l, linear) != INPUT_FLOATX;
}
// Returns an FP8 layer's floatX input (rows, inputs), live in this phase; NULL if planning or producer_writes_fp8.
static floatX *fp8_linear_input(struct at at, enum linear linear) {
    const struct linear_source source = linear_row(linear, &at.m->shape.layer).source;
    if (input_form(at.m, at.pass, at.l, linear) == INPUT_FLOATX)
        return rows_of(source.below ? at_layer_below(at) : at, source.id);
    if (producer_writes_fp8(at, linear))
        return NULL;
    const int64_t elements = at.rows * linear_row(linear, &at.m->shape.layer).inputs;
    return (floatX *)fp8_buffer(at.m, at.pass, at.l, linear, FP8_VALUES, (size_t)elements * sizeof(floatX));
}

// Returns a cast that makes nothing yet: the caller sets its `rows` or `columns`.
static struct fp8_cast empty_cast(struct fp8_scale *scale, uint64_t *counts) {
    struct fp8_cast to;
    memset(&to, 0, sizeof to);
    to.scale = scale;
    to.counts = counts;
    return to;
}
// Returns the row form of an FP8 layer's input, (rows, inputs), live in this phase; its codes are NULL when planning.
static struct fp8_matrix input_rows(struct at at, enum linear linear) {
    struct gpt *m = at.m;
    const int k = linear_row(linear, &m->shape.layer).inputs;
    if (input_form(m, at.pass, at.l, linear) != INPUT_ROWS)
        return fp8_matrix_buffer(m, at.pass, at.l, linear, FP8_ROWS, FP8_INPUT, at.rows, k);
    return fp8_matrix_in(&m->fp8, activation_memory(m, at.pass, at.l, linear_row(linear, &m->shape.layer).source.id),
                         FP8_INPUT, at.rows, k, fp8_scale(&m->fp8, at.l, linear, FP8_INPUT));
}
// Returns the cast of an FP8 layer's input to the forms that are to be made. The row form is made if at.produce has the
// product. With INPUT_ROWS the row form is the activation, and is made if at.produce has the input. The column form is
// made only with INPUT_COLUMNS, if at.produce has the input and, in PASS_TRAIN, the layer keeps the input.
static struct fp8_cast input_cast(struct at at, enum linear linear) {
    struct gpt *m = at.m;
    const struct linear_source source = linear_row(linear, &m->shape.layer).source;
    const int k = linear_row(linear, &m->shape.layer).inputs;
    struct fp8_cast to =
        empty_cast(fp8_scale(&m->fp8, at.l, linear, FP8_INPUT), counts_of(m, at.pass, linear, FP8_INPUT));
    const enum input_form form = input_form(m, at.pass, at.l, linear);
    if (produces(at, 1u << (form == INPUT_ROWS ? source.id : source.product)))
        to.rows = input_rows(at, linear);
    const bool kept = at.pass == PASS_BACKWARD || m->policy.kept[at.l] & (1u << source.id);
    if (produces(at, 1u << source.id) && kept && form == INPUT_COLUMNS)
        to.columns =
            fp8_matrix_in(&m->fp8, activation_memory(m, at.pass, at.l, source.id), FP8_INPUT, k, at.rows, to.scale);
    return to;
}
// Casts a linear layer's input in a new phase, if wanted. Does nothing in bf16 layers, or if producer_writes_fp8.
static void cast_input(struct at at, enum linear linear) {
    struct gpt *m = at.m;
    const struct linear_source source = linear_row(linear, &m->shape.layer).source;
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    char name[PLAN_NAME_CHARS];
    if (!is_quantized(m, at.pass, at.l) || producer_writes_fp8(at, linear))
        return;
    switch (input_form(m, at.pass, at.l, linear)) {
    case INPUT_FLOATX:
        if (!produces(at, 1u << source.product))
            return;
        break;
    case INPUT_COLUMNS:
        if (!produces(at, 1u << source.product | 1u << source.id))
            return;
        break;
    case INPUT_ROWS:
        if (!produces(at, 1u << source.id))
            return;
        break;
    }
    snprintf(name, sizeof name, "cast for %s", row.name);
    phase(m, forward_group(at.pass), at.l, name);
    const floatX *in = fp8_linear_input(at, linear);
    const struct fp8_cast to = input_cast(at, linear);
    uint32_t *amax = amax_of(m, at.pass, at.l, linear, FP8_INPUT);
    if (amax && source.shared && source.id != ACT_ATT) // the residual stream has many readers: its amax is taken here
        RUN(m, fp8_amax(amax, in, at.rows * row.inputs, m->dev));
    RUN(m, fp8_cast(to, in, at.rows, row.inputs, NULL, m->dev));
}
// Writes the MLP's activation of fc (rows, fc_width) in input_cast's forms, in this phase. Needs producer_writes_fp8.
static void activate_in_fp8(struct at at, const floatX *fc) {
    struct gpt *m = at.m;
    const struct fp8_cast to = input_cast(at, LINEAR_MLP_PROJ);
#define IN_FP8(name) RUN(m, name##_forward_fp8(to, fc, at.rows, m->shape.layer.F, NULL, m->dev))
    ACTIVATION_SWITCH(m->shape.activation, IN_FP8, IN_FP8)
#undef IN_FP8
}

// ---- Products ----

// Whether FP8 products of forward or, if not `forward`, of backward may sum in fewer bits; never with block scales.
static bool fast_accumulation(const struct gpt *m, bool forward) {
    switch (m->config.fp8.fp8_fast_accumulation) {
    case FP8_FAST_FORWARD: return forward && !fp8_is_blockwise(&m->fp8);
    case FP8_FAST_NONE: return false;
    case FP8_FAST_ALL: return !fp8_is_blockwise(&m->fp8);
    }
    return false;
}
// Returns w (outputs, inputs) in FP8, transposed if `which` is FP8_WEIGHT_COLUMNS. Casts w in this phase, unless an
// earlier micro-step's cast is kept. If weights_sharded, forward first takes w's amax; else the amax is known already.
static struct fp8_matrix cast_weight(struct gpt *m, enum pass pass, int l, enum linear linear, enum fp8_buffer which,
                                     const floatX *w) {
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const bool transposed = which == FP8_WEIGHT_COLUMNS;
    const int64_t rows = transposed ? row.inputs : row.outputs, depth = transposed ? row.outputs : row.inputs;
    const struct fp8_matrix matrix =
        m->fp8.caches_weights ? fp8_matrix_in(&m->fp8, fp8_cached_weight(&m->fp8, l, linear, transposed), FP8_WEIGHT,
                                              rows, depth, fp8_scale(&m->fp8, l, linear, FP8_WEIGHT))
                              : fp8_matrix_buffer(m, pass, l, linear, which, FP8_WEIGHT, rows, depth);
    if (m->fp8.caches_weights && m->zero.adds_up)
        return matrix;
    struct fp8_cast to = empty_cast(fp8_scale(&m->fp8, l, linear, FP8_WEIGHT),
                                    transposed ? NULL : counts_of(m, pass, linear, FP8_WEIGHT));
    if (transposed)
        to.columns = matrix;
    else
        to.rows = matrix;
    if (m->fp8.weights_sharded && !transposed && amax_of(m, pass, l, linear, FP8_WEIGHT))
        RUN(m, fp8_amax(&to.scale->amax, w, (int64_t)row.outputs * row.inputs, m->dev));
    RUN(m, fp8_cast(to, w, row.outputs, row.inputs, NULL, m->dev));
    return matrix;
}
// out (rows, outputs) = in weight^T + bias in FP8, in this phase. Casts the weight; the caller has cast the input.
static void linear_forward_fp8(struct at at, enum linear linear, floatX *out) {
    struct gpt *m = at.m;
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const int n = row.outputs, k = row.inputs;
    const floatX *b = param(m, at.pass, at.l, row.bias);
    void *ws = workspace(m, matmul_fp8_workspace_bytes(at.rows, n, k, m->dev));
    const floatX *w = param(m, at.pass, at.l, row.weight);
    const struct fp8_matrix x = input_rows(at, linear);
    const struct fp8_matrix weight = cast_weight(m, at.pass, at.l, linear, FP8_WEIGHT_ROWS, w);
    MATMUL(m, matmul_fp8(out, x, weight, b, at.rows, n, k, fast_accumulation(m, true), ws, m->dev));
}

// ---- Backward ----

// Whether the op that makes a linear layer's output gradient takes its amax, if needed; else cast_gradient takes it.
static bool op_takes_gradient_amax(const struct gpt *m, enum linear linear) {
    const struct layer_shape *s = &m->shape.layer;
    const bool stream =
        m->config.model.hidden_dropout == 0 && residual_scale(m) == 1; // addend_gradient is the stream's gradient
    switch (linear_row(linear, s).gradient_by) {
    case GRADIENT_BY_ATTENTION: return s->qk_statistics == 0;
    case GRADIENT_BY_STREAM: return s->norm_after || (stream && !(linear == LINEAR_ATT_PROJ && s->parallel));
    case GRADIENT_BY_ACTIVATION: return true;
    case GRADIENT_BY_OTHERS: return false;
    }
    return false;
}
// Returns where the op that makes the gradient of a linear layer's output merges the gradient's amax. Returns NULL if
// the op is to take none: cast_gradient then takes it, or it is not needed.
static uint32_t *gradient_amax(const struct gpt *m, int l, enum linear linear) {
    return op_takes_gradient_amax(m, linear) ? amax_of(m, PASS_TRAIN, l, linear, FP8_GRADIENT) : NULL;
}
// Returns gradient_amax of layer l's projection, if its output's gradient is the stream's; else, and for l -1, NULL.
static uint32_t *stream_amax(const struct gpt *m, int l, enum linear projection) {
    return m->shape.layer.norm_after || l < 0 ? NULL : gradient_amax(m, l, projection);
}

// Returns the buffers and settings for an op that casts an output gradient to both forms, live in this phase. The
// caller runs the op, which also writes or adds a trained bias's gradient.
static struct fp8_cast gradient_cast_buffers(struct gpt *m, int l, enum linear linear) {
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const int64_t N = extent_of(m, PASS_TRAIN).N;
    struct fp8_cast to =
        empty_cast(fp8_scale(&m->fp8, l, linear, FP8_GRADIENT), counts_of(m, PASS_TRAIN, linear, FP8_GRADIENT));
    to.rows = fp8_matrix_buffer(m, PASS_TRAIN, l, linear, FP8_GRADIENT_ROWS, FP8_GRADIENT, N, row.outputs);
    to.columns = fp8_matrix_buffer(m, PASS_TRAIN, l, linear, FP8_GRADIENT_COLUMNS, FP8_GRADIENT, row.outputs, N);
    to.dbias = grad(m, l, row.bias);
    to.add_dbias = accumulates(m);
    return to;
}
// Returns scratch memory for gradient_cast_buffers' cast; NULL when planning, or if `linear` has no trained bias.
static void *gradient_cast_workspace(struct gpt *m, int l, enum linear linear) {
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const bool sums = is_trained(m, l, row.bias);
    return workspace(m, sums ? fp8_cast_workspace_bytes(extent_of(m, PASS_TRAIN).N, row.outputs) : 0);
}
// Casts dout (N, outputs) to both forms, in this phase. Also writes a trained bias's gradient or, if accumulates(m),
// adds to it. First takes dout's amax, unless dout's producer has or scales are of blocks.
static void cast_gradient(struct gpt *m, int l, enum linear linear, const floatX *dout) {
    const int64_t N = extent_of(m, PASS_TRAIN).N;
    const int n = linear_row(linear, &m->shape.layer).outputs;
    const struct fp8_cast to = gradient_cast_buffers(m, l, linear);
    void *ws = gradient_cast_workspace(m, l, linear);
    if (!op_takes_gradient_amax(m, linear) && to.scale)
        RUN(m, fp8_amax(&to.scale->amax, dout, N * n, m->dev));
    RUN(m, fp8_cast(to, dout, N, n, ws, m->dev));
}
// Returns an input's column form (inputs, rows), for dW's product. Makes it in this phase, if another form was kept.
static struct fp8_matrix input_columns(struct at at, enum linear linear) {
    struct gpt *m = at.m;
    const struct linear_source source = linear_row(linear, &m->shape.layer).source;
    const int k = linear_row(linear, &m->shape.layer).inputs;
    struct fp8_scale *scale = fp8_scale(&m->fp8, at.l, linear, FP8_INPUT);
    const enum input_form form = input_form(m, PASS_BACKWARD, at.l, linear);
    if (form == INPUT_COLUMNS)
        return fp8_matrix_in(&m->fp8, activation_memory(m, PASS_BACKWARD, at.l, source.id), FP8_INPUT, k, at.rows,
                             scale);
    struct fp8_cast to = empty_cast(scale, NULL);
    to.columns = fp8_matrix_buffer(m, PASS_TRAIN, at.l, linear, FP8_COLUMNS, FP8_INPUT, k, at.rows);
    if (form == INPUT_ROWS) {
        const fp8 *rows = input_rows(at, linear).codes;
        RUN(m, fp8_transpose(to.columns.codes, rows, at.rows, k, m->dev));
        return to.columns;
    }
    const floatX *in = fp8_linear_input(at, linear);
    RUN(m, fp8_cast(to, in, at.rows, k, NULL, m->dev));
    return to.columns;
}
// Runs the two products of an FP8 layer's backward, each in a new phase; dout is cast already. Writes the input's
// gradient to din_slot or, if add_din, adds it. Writes the weight's gradient or, if accumulates(m), adds to it.
static void linear_backward_fp8(struct at at, enum linear linear, enum slot din_slot, bool add_din) {
    struct gpt *m = at.m;
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const int64_t N = at.rows;
    const int n = row.outputs, k = row.inputs;
    const bool fast = fast_accumulation(m, false);
    char name[PLAN_NAME_CHARS];

    snprintf(name, sizeof name, "%s, input", row.name);
    phase(m, PHASES_BACKWARD, at.l, name);
    floatX *din = d_rows(at, din_slot, k);
    const floatX *w = param(m, PASS_BACKWARD, at.l, row.weight);
    const size_t sum = add_din ? plan_aligned((size_t)(N * k) * sizeof(floatX)) : 0;
    floatX *memory = (floatX *)workspace(m, sum + matmul_fp8_workspace_bytes(N, k, n, m->dev));
    floatX *product = add_din ? memory : din;
    void *ws = address_after(memory, sum);
    const struct fp8_matrix dout =
        fp8_matrix_buffer(m, PASS_TRAIN, at.l, linear, FP8_GRADIENT_ROWS, FP8_GRADIENT, N, n);
    const struct fp8_matrix weight = cast_weight(m, PASS_TRAIN, at.l, linear, FP8_WEIGHT_COLUMNS, w);
    MATMUL(m, matmul_fp8(product, dout, weight, NULL, N, k, n, fast, ws, m->dev));
    const struct dropout none = {0, 0, 0, 0, 0, NULL};
    if (add_din)
        RUN(m, residual_forward(din, product, din, N, k, 1, none, m->dev));

    snprintf(name, sizeof name, "%s, weight", row.name);
    phase(m, PHASES_BACKWARD, at.l, name);
    float *dw = grad(m, at.l, row.weight);
    ws = workspace(m, matmul_fp8_workspace_bytes(n, k, N, m->dev));
    const struct fp8_matrix x = input_columns(at, linear);
    const struct fp8_matrix dout_columns =
        fp8_matrix_buffer(m, PASS_TRAIN, at.l, linear, FP8_GRADIENT_COLUMNS, FP8_GRADIENT, n, N);
    MATMUL(m, matmul_fp8_sum(dw, dout_columns, x, n, k, N, accumulates(m), fast, ws, m->dev));
}
// Makes the gradient of FC's output from dact (rows, F) and fc (rows, fc_width), and casts it to FP8, in this phase.
// Then runs linear_backward_fp8 for FC, in two new ones, to D_NORM2. Call it only if producer_writes_fp8.
static void activation_backward_in_fp8(struct at at, const floatX *dact, const floatX *fc) {
    struct gpt *m = at.m;
    const struct fp8_cast to = gradient_cast_buffers(m, at.l, LINEAR_FC);
    void *ws = gradient_cast_workspace(m, at.l, LINEAR_FC);
#define IN_FP8(name) RUN(m, name##_backward_fp8(to, dact, fc, at.rows, m->shape.layer.F, ws, m->dev))
    ACTIVATION_SWITCH(m->shape.activation, IN_FP8, IN_FP8)
#undef IN_FP8
    linear_backward_fp8(at, LINEAR_FC, SLOT_D_NORM2, false);
}
