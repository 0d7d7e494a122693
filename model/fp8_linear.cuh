// The linear layers of a block in FP8: what is cast where, and their products. Without FP8 cast_input does nothing. All
// three products multiply matrices by rows: forward x (N, k) and W (n, k), for din dout (N, n) and W^T (k, n), for dW
// dout^T (n, N) and x^T (k, N). A tensor is cast at most once in forward and once in backward, into the forms that are
// read there: its row form, as it is, and its column form, transposed. A row form lives until its product. An input
// that no other op of the backward reads is kept only in its column form: its producer writes floatX values that live
// until they are cast or, with delayed scales, the MLP's activation writes FP8. Weights are cast at use.
#pragma once
#include "kernels/activation_fp8.cuh" // gelu_forward_fp8, swiglu_forward_fp8 and the like, and their backward
#include "kernels/fp8/cast.cuh"       // fp8_cast
#include "kernels/matmul/matmul.cuh"  // matmul_fp8
#include "kernels/norm.cuh"           // residual_forward
#include "model/activations.cuh"      // ACTIVATION_SWITCH
#include "model/at.cuh"               // struct gpt and its buffers, struct at, struct sink

// ---- Buffers ----

// Returns a buffer of a linear layer, live in this phase; NULL when planning, which only then reads `bytes`.
static void *fp8_buffer(struct gpt *m, enum pass pass, int l, enum linear linear, enum fp8_buffer which, size_t bytes) {
    static const char *const categories[] = {
#define CATEGORY_ROW(id, category) category,
        FP8_BUFFER_ROWS(CATEGORY_ROW)
#undef CATEGORY_ROW
    };
    const int slot = SLOT_FP8 + (int)which * LINEAR_COUNT + (int)linear;
    return buffer(m, pass, l, slot, bytes, categories[which], linear_row(linear, &m->shape.layer).name);
}
// Returns an operand's matrix (rows, depth), live in this phase, with its tensor's scale; codes NULL when planning.
static struct fp8_matrix fp8_matrix_buffer(struct gpt *m, enum pass pass, int l, enum linear linear,
                                           enum fp8_buffer which, enum fp8_operand operand, int64_t rows,
                                           int64_t depth) {
    void *memory = fp8_buffer(m, pass, l, linear, which, fp8_matrix_bytes(&m->fp8, operand, rows, depth));
    return fp8_matrix_in(&m->fp8, memory, operand, rows, depth, fp8_scale(&m->fp8, l, linear, operand));
}
// Returns where an operand's producer merges its amax; NULL: not PASS_TRAIN, a bf16 layer, scales of blocks, planning.
static uint32_t *amax_of(const struct gpt *m, enum pass pass, int l, enum linear linear, enum fp8_operand operand) {
    struct fp8_scale *scale =
        pass == PASS_TRAIN && is_quantized(m, pass, l) ? fp8_scale(&m->fp8, l, linear, operand) : NULL;
    return scale ? &scale->amax : NULL;
}
// Returns the counts (FP8_COUNTS) that a cast adds to, of all layers; NULL: none, not PASS_TRAIN, planning, or no FP8.
static uint64_t *counts_of(const struct gpt *m, enum pass pass, enum linear linear, enum fp8_operand operand) {
    return pass == PASS_TRAIN ? fp8_counts(&m->fp8, linear, operand) : NULL;
}

// ---- Inputs ----

// A linear layer's input is kept for the gradient of the weight: in floatX, which other ops of the backward read too;
// in column form; or in row form, as attention's output where attention is in FP8 and its backward reads it.
enum input_form { INPUT_FLOATX, INPUT_COLUMNS, INPUT_ROWS };
// Returns the form in which the input of a linear layer in FP8 is kept for the gradient of its weight.
static enum input_form input_form(const struct gpt *m, enum pass pass, int l, enum linear linear) {
    if (linear == LINEAR_ATT_PROJ && attends_in_fp8(m, pass, l))
        return INPUT_ROWS;
    return linear_row(linear, &m->shape.layer).source.shared ? INPUT_FLOATX : INPUT_COLUMNS;
}
// Whether attention writes the input of `linear`, its projection, in FP8: attention is in FP8 and scales are delayed.
static bool attention_writes_fp8(struct at at, enum linear linear) {
    return input_form(at.m, at.pass, at.l, linear) == INPUT_ROWS && fp8_is_delayed(&at.m->fp8);
}
// Returns an FP8 layer's input in floatX, (rows, inputs), live in this phase; NULL: planning, or attention_writes_fp8.
static floatX *fp8_linear_input(struct at at, enum linear linear) {
    const struct linear_source source = linear_row(linear, &at.m->shape.layer).source;
    if (input_form(at.m, at.pass, at.l, linear) == INPUT_FLOATX)
        return rows_of(source.below ? at_below(at) : at, source.id);
    if (attention_writes_fp8(at, linear))
        return NULL;
    const int64_t elements = at.rows * linear_row(linear, &at.m->shape.layer).inputs;
    return (floatX *)fp8_buffer(at.m, at.pass, at.l, linear, FP8_VALUES, (size_t)elements * sizeof(floatX));
}

// Returns a cast that makes nothing yet: the caller sets its forms, rows or columns.
static struct fp8_cast empty_cast(struct fp8_scale *scale, uint64_t *counts) {
    struct fp8_cast to;
    memset(&to, 0, sizeof to);
    to.scale = scale;
    to.counts = counts;
    return to;
}
// Returns the place of an input's row form, (rows, inputs), live in this phase; codes NULL when planning.
static struct fp8_matrix input_rows(struct at at, enum linear linear) {
    struct gpt *m = at.m;
    const int k = linear_row(linear, &m->shape.layer).inputs;
    if (input_form(m, at.pass, at.l, linear) != INPUT_ROWS)
        return fp8_matrix_buffer(m, at.pass, at.l, linear, FP8_ROWS, FP8_INPUT, at.rows, k);
    return fp8_matrix_in(&m->fp8, activation_memory(m, at.pass, at.l, linear_row(linear, &m->shape.layer).source.id),
                         FP8_INPUT, at.rows, k, fp8_scale(&m->fp8, at.l, linear, FP8_INPUT));
}
// Returns the cast of an input to the forms that are wanted: its row form, where the product (INPUT_ROWS: the input) is
// in at.produce; of INPUT_COLUMNS also its column form, where the input is and, in a first forward, is kept.
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
// Whether the MLP's activation, and its derivative, write FP8 themselves: in FP8 layers whose scales are delayed.
static bool activation_is_fused(struct at at) {
    return is_quantized(at.m, at.pass, at.l) && fp8_is_delayed(&at.m->fp8);
}
// Casts an FP8 layer's input in a new phase, if wanted and its producer has not; first takes a residual stream's amax.
static void cast_input(struct at at, enum linear linear) {
    struct gpt *m = at.m;
    const struct linear_source source = linear_row(linear, &m->shape.layer).source;
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    char name[PLAN_NAME_CHARS];
    if (!is_quantized(m, at.pass, at.l) || (linear == LINEAR_MLP_PROJ && activation_is_fused(at)))
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
        if (!produces(at, 1u << source.id) || attention_writes_fp8(at, linear))
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
// Casts the MLP's activation of fc (rows, fc_width), as input_cast says, in this phase. Needs activation_is_fused.
static void activate_in_fp8(struct at at, const floatX *fc) {
    struct gpt *m = at.m;
    const struct fp8_cast to = input_cast(at, LINEAR_MLP_PROJ);
#define IN_FP8(name) RUN(m, name##_forward_fp8(to, fc, at.rows, m->shape.layer.F, NULL, m->dev))
    ACTIVATION_SWITCH(m->shape.activation, IN_FP8, IN_FP8)
#undef IN_FP8
}

// ---- Products ----

// Whether a product, of forward or of backward, may sum in the tensor cores' fewer bits; with scales of blocks: false.
static bool fast_accumulation(const struct gpt *m, bool forward) {
    switch (m->config.fp8.fp8_fast_accumulation) {
    case FP8_FAST_FORWARD: return forward && !fp8_is_blockwise(&m->fp8);
    case FP8_FAST_NONE: return false;
    case FP8_FAST_ALL: return !fp8_is_blockwise(&m->fp8);
    }
    return false;
}
// Casts w (outputs, inputs), in this phase, and returns its matrix, transposed where `which` is FP8_WEIGHT_COLUMNS. The
// amax is there from fp8_scales_begin; where weights_sharded, each PASS_TRAIN cast to FP8_WEIGHT_ROWS takes the amax.
static struct fp8_matrix cast_weight(struct gpt *m, enum pass pass, int l, enum linear linear, enum fp8_buffer which,
                                     const floatX *w) {
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const bool transposed = which == FP8_WEIGHT_COLUMNS;
    const struct fp8_matrix matrix =
        fp8_matrix_buffer(m, pass, l, linear, which, FP8_WEIGHT, transposed ? row.inputs : row.outputs,
                          transposed ? row.outputs : row.inputs);
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
// out (rows, outputs) = in weight^T + bias in FP8, in the caller's phase. The weight is cast there, the input before.
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

// Whether the op that makes a linear layer's output gradient takes any amax of the gradient; else cast_gradient does.
static bool gradient_has_amax(const struct gpt *m, enum linear linear) {
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
// Returns amax_of the gradient of a linear layer's output, for the gradient's producer; NULL also if the cast takes it.
static uint32_t *gradient_amax(const struct gpt *m, int l, enum linear linear) {
    return gradient_has_amax(m, linear) ? amax_of(m, PASS_TRAIN, l, linear, FP8_GRADIENT) : NULL;
}
// Returns gradient_amax of a projection whose output's gradient is the residual stream's; NULL: it is not, or l is -1.
static uint32_t *stream_amax(const struct gpt *m, int l, enum linear projection) {
    return m->shape.layer.norm_after || l < 0 ? NULL : gradient_amax(m, l, projection);
}

// Returns the cast, live in this phase, of an output's gradient to both forms and (accumulates: +=) a trained dbias.
static struct fp8_cast gradient_cast(struct gpt *m, int l, enum linear linear) {
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
// Returns the scratch memory of gradient_cast's cast; NULL when planning, and where no bias is trained.
static void *gradient_cast_workspace(struct gpt *m, int l, enum linear linear) {
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const bool sums = is_trained(m, l, row.bias);
    return workspace(m, sums ? fp8_cast_workspace_bytes(extent_of(m, PASS_TRAIN).N, row.outputs) : 0);
}
// Casts dout (N, outputs) and sums a trained dbias (gradient_cast), in this phase; before, any amax not yet taken.
static void cast_gradient(struct gpt *m, int l, enum linear linear, const floatX *dout) {
    const int64_t N = extent_of(m, PASS_TRAIN).N;
    const int n = linear_row(linear, &m->shape.layer).outputs;
    const struct fp8_cast to = gradient_cast(m, l, linear);
    void *ws = gradient_cast_workspace(m, l, linear);
    if (!gradient_has_amax(m, linear) && to.scale)
        RUN(m, fp8_amax(&to.scale->amax, dout, N * n, m->dev));
    RUN(m, fp8_cast(to, dout, N, n, ws, m->dev));
}
// Returns the input's column form (inputs, rows), for dW: kept or recomputed, else made in this phase of what was kept.
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
// Runs the two products of a linear layer's backward, in a new phase each, after gradient_cast's cast was made.
// din_slot gets the input's gradient, written or (add_din) added. Writes or (accumulates) adds the weight's gradient.
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
    void *ws = bytes_behind(memory, sum);
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
// Casts fc's gradient, of dact (rows, F) and the MLP's activation at fc (rows, fc_width), in this phase, with a trained
// bias's gradient. Then calls linear_backward_fp8, to D_NORM2, in two more phases. activation_is_fused holds.
static void activation_backward_in_fp8(struct at at, const floatX *dact, const floatX *fc) {
    struct gpt *m = at.m;
    const struct fp8_cast to = gradient_cast(m, at.l, LINEAR_FC);
    void *ws = gradient_cast_workspace(m, at.l, LINEAR_FC);
#define IN_FP8(name) RUN(m, name##_backward_fp8(to, dact, fc, at.rows, m->shape.layer.F, ws, m->dev))
    ACTIVATION_SWITCH(m->shape.activation, IN_FP8, IN_FP8)
#undef IN_FP8
    linear_backward_fp8(at, LINEAR_FC, SLOT_D_NORM2, false);
}
