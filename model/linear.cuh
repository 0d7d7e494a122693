// The linear layers of a block, in floatX or FP8: where their inputs are, their products forward and backward.
//
// In FP8 (model/fp8.cuh) all three products multiply matrices by rows: forward x (N, k) and W (n, k), for din dout (N,
// n) and W^T (k, n), for dW dout^T (n, N) and x^T (k, N). A tensor is cast at most once in forward and once in
// backward, into the forms that are read there: its row form is the matrix as it is, its column form the transposed
// one. A row form lives until its product. An input that no other op of the backward reads is kept in its column form
// alone, one byte an element: the op that produces it writes floatX values into a buffer that lives until they are
// cast, or, with delayed scales, the MLP's activation writes the FP8 forms itself. Weights are cast where they are
// used.
#pragma once
#include "kernels/fp8/cast.cuh"      // fp8_cast
#include "kernels/matmul/matmul.cuh" // matmul_forward, matmul_fp8
#include "model/lora.cuh"            // lora_forward, lora_backward
#include "model/parameters.cuh"      // enum linear
#include "model/state.cuh"           // struct gpt and its buffers

// ---- Inputs ----

// What a linear layer of layer l reads. `shared`: other ops of the backward read it too, so that it is kept in floatX.
struct linear_source {
    enum activation_id id;
    int layer;
    bool shared;
};
static struct linear_source linear_source(const struct gpt *m, int l, enum linear linear) {
    const struct layer_shape *s = &m->shape.layer;
    struct linear_source source = {ACT_OUT, l, false};
    switch (linear) {
    case LINEAR_QKV:
        source.id = s->norm_before ? ACT_NORM1 : ACT_OUT;
        source.layer = s->norm_before ? l : l - 1;
        source.shared = !s->norm_before;
        break;
    case LINEAR_ATT_PROJ:
        source.id = ACT_ATT;
        source.shared = true;
        break;
    case LINEAR_FC:
        source.id = s->norm_before ? ACT_NORM2 : ACT_MID;
        source.shared = !s->norm_before;
        break;
    case LINEAR_MLP_PROJ: source.id = ACT_ACT; break;
    case LINEAR_COUNT: break;
    }
    return source;
}

// A buffer of a linear layer in FP8.
static void *fp8_buffer(struct gpt *m, enum pass pass, int l, enum linear linear, enum fp8_buffer which, size_t bytes) {
    static const char *const categories[] = {
#define CATEGORY_ROW(id, category) category,
        FP8_BUFFER_ROWS(CATEGORY_ROW)
#undef CATEGORY_ROW
    };
    const int slot = SLOT_FP8 + (int)which * LINEAR_COUNT + (int)linear;
    return buffer(m, pass, l, slot, bytes, categories[which], linear_row(linear, &m->shape.layer).name);
}
// A matrix (rows, depth) of a linear layer in FP8, in its buffer.
static struct fp8_matrix fp8_matrix_buffer(struct gpt *m, enum pass pass, int l, enum linear linear,
                                           enum fp8_buffer which, enum fp8_operand operand, int64_t rows,
                                           int64_t depth) {
    void *at = fp8_buffer(m, pass, l, linear, which, fp8_matrix_bytes(&m->fp8, operand, rows, depth));
    return fp8_matrix_in(&m->fp8, at, operand, rows, depth, fp8_scale(&m->fp8, l, linear, operand));
}

// Where the producer of a linear layer's input writes it, (N, inputs): the activation itself, or, where that is kept in
// FP8, a buffer until the input is cast.
static floatX *linear_input(struct gpt *m, enum pass pass, int l, enum linear linear) {
    const struct linear_source source = linear_source(m, l, linear);
    if (source.shared || !is_quantised(m, pass, l))
        return activation(m, pass, source.layer, source.id);
    const int64_t elements = extent_of(m, pass).N * linear_row(linear, &m->shape.layer).inputs;
    return (floatX *)fp8_buffer(m, pass, l, linear, FP8_VALUES, (size_t)elements * sizeof(floatX));
}
// Where a producer puts the amax of an operand; NULL: nowhere. Recomputed values have the amax of the first ones.
static uint32_t *amax_of(const struct gpt *m, enum pass pass, int l, enum linear linear, enum fp8_operand operand) {
    struct fp8_scale *scale =
        pass == PASS_TRAIN && is_quantised(m, pass, l) ? fp8_scale(&m->fp8, l, linear, operand) : NULL;
    return scale ? &scale->amax : NULL;
}
// Whether `produce` asks for the input of a product, which, where it is kept in FP8, its product needs too.
static bool input_is_wanted(const struct gpt *m, enum pass pass, int l, uint32_t produce, uint32_t input,
                            uint32_t product) {
    return produce & (is_quantised(m, pass, l) ? input | product : input);
}
// Where a cast counts; NULL: nowhere. Recomputation casts the same values again, which are not counted twice.
static uint64_t *counts_of(const struct gpt *m, enum pass pass, enum linear linear, enum fp8_operand operand) {
    return pass == PASS_TRAIN ? fp8_counts(&m->fp8, linear, operand) : NULL;
}

// A cast that makes nothing yet.
static struct fp8_cast cast_by(struct fp8_scale *scale, uint64_t *counts) {
    struct fp8_cast to;
    memset(&to, 0, sizeof to);
    to.scale = scale;
    to.counts = counts;
    return to;
}

// Describes the cast of an input. `rows`: its product is to run. `columns`: `produce` asks for the input; a first
// forward makes the column form only of an input that the policy keeps.
static struct fp8_cast input_cast(struct gpt *m, enum pass pass, int l, enum linear linear, bool rows, bool columns) {
    const struct linear_source source = linear_source(m, l, linear);
    const int64_t N = extent_of(m, pass).N;
    const int k = linear_row(linear, &m->shape.layer).inputs;
    struct fp8_cast to = cast_by(fp8_scale(&m->fp8, l, linear, FP8_INPUT), counts_of(m, pass, linear, FP8_INPUT));
    if (rows)
        to.rows = fp8_matrix_buffer(m, pass, l, linear, FP8_ROWS, FP8_INPUT, N, k);
    const bool kept = pass == PASS_BACKWARD || m->policy.kept[l] & (1u << source.id);
    if (columns && kept && !source.shared)
        to.columns = fp8_matrix_in(&m->fp8, activation_memory(m, pass, l, source.id), FP8_INPUT, k, N, to.scale);
    return to;
}
// Casts the input of a linear layer, in a phase of its own, where the layer is in FP8.
static void quantise_input(struct gpt *m, enum pass pass, int l, enum linear linear, bool rows, bool columns) {
    const struct linear_source source = linear_source(m, l, linear);
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const int64_t N = extent_of(m, pass).N;
    char name[PLAN_NAME_CHARS];
    if (!is_quantised(m, pass, l) || !(rows || (columns && !source.shared)))
        return;
    snprintf(name, sizeof name, "cast for %s", row.name);
    phase(m, forward_group(pass), l, name);
    const floatX *in = linear_input(m, pass, l, linear);
    const struct fp8_cast to = input_cast(m, pass, l, linear, rows, columns);
    uint32_t *amax = amax_of(m, pass, l, linear, FP8_INPUT);
    if (amax && source.shared && source.id != ACT_ATT) // the residual stream has many readers: its amax is taken here
        RUN(m, fp8_amax(amax, in, N * row.inputs, m->dev));
    RUN(m, fp8_cast(to, in, N, row.inputs, NULL, m->dev));
}

// ---- Products ----

// A linear layer's weight (outputs, inputs) in a pass. One that is stored in FP8 or NF4 is read back into scratch
// memory of this phase: the first linear_weight_bytes of its workspace, 0 for others.
static size_t linear_weight_bytes(const struct gpt *m, int l, enum linear linear) {
    const struct tensor *t = parameters_find(&m->table, l, linear_row(linear, &m->shape.layer).weight);
    return tensor_is_stored(t) ? frozen_bytes(FROZEN_FLOATX, t->rows, t->cols) : 0;
}
static const floatX *linear_weight(struct gpt *m, enum pass pass, int l, enum linear linear, void *workspace) {
    const struct tensor *t = parameters_find(&m->table, l, linear_row(linear, &m->shape.layer).weight);
    floatX *w = (floatX *)workspace;
    if (!tensor_is_stored(t))
        return param(m, pass, l, t->parameter);
    RUN(m, frozen_dequantise(w, m->stored.memory + t->stored_at, t->format, t->rows, t->cols, 0, t->rows, m->dev));
    return w;
}

// Whether a product may sum in the tensor cores' fewer bits.
static bool fast_accumulation(const struct gpt *m, bool forward) {
    switch (m->config.fp8_fast_accumulation) {
    case FP8_FAST_FORWARD: return forward && !fp8_by_blocks(&m->fp8);
    case FP8_FAST_NONE: return false;
    case FP8_FAST_ALL: return !fp8_by_blocks(&m->fp8);
    }
    return false;
}
// Casts a weight (outputs, inputs), or its transpose where `which` is FP8_WEIGHT_COLUMNS, in this phase.
static struct fp8_matrix quantise_weight(struct gpt *m, enum pass pass, int l, enum linear linear,
                                         enum fp8_buffer which, const floatX *w) {
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const bool transposed = which == FP8_WEIGHT_COLUMNS;
    const struct fp8_matrix matrix =
        fp8_matrix_buffer(m, pass, l, linear, which, FP8_WEIGHT, transposed ? row.inputs : row.outputs,
                          transposed ? row.outputs : row.inputs);
    struct fp8_cast to =
        cast_by(fp8_scale(&m->fp8, l, linear, FP8_WEIGHT), transposed ? NULL : counts_of(m, pass, linear, FP8_WEIGHT));
    if (transposed)
        to.columns = matrix;
    else
        to.rows = matrix;
    if (m->fp8.weights_sharded && !transposed && amax_of(m, pass, l, linear, FP8_WEIGHT))
        RUN(m, fp8_amax(&to.scale->amax, w, (int64_t)row.outputs * row.inputs, m->dev));
    RUN(m, fp8_cast(to, w, row.outputs, row.inputs, NULL, m->dev));
    return matrix;
}
// out (N, outputs) = in weight^T + bias, in the phase that the caller began. In FP8 quantise_input ran before.
static void linear_forward(struct gpt *m, enum pass pass, int l, enum linear linear, floatX *out) {
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const int64_t N = extent_of(m, pass).N;
    const int n = row.outputs, k = row.inputs;
    const floatX *b = param(m, pass, l, row.bias);
    if (!is_quantised(m, pass, l)) {
        const floatX *in = linear_input(m, pass, l, linear);
        const size_t weight_bytes = linear_weight_bytes(m, l, linear);
        const size_t bytes = larger(matmul_workspace_bytes(N, n, k, m->dev), lora_workspace_bytes(m, linear, N, N));
        void *memory = workspace(m, weight_bytes + bytes), *ws = bytes_behind(memory, weight_bytes);
        const floatX *w = linear_weight(m, pass, l, linear, memory);
        MATMUL(m, matmul_forward(out, in, w, b, N, n, k, ws, m->dev));
        lora_forward(m, pass, l, linear, out, in, N, ws);
        return;
    }
    void *ws = workspace(m, matmul_fp8_workspace_bytes(N, n, k, m->dev));
    const floatX *w = param(m, pass, l, row.weight);
    const struct fp8_matrix x = fp8_matrix_buffer(m, pass, l, linear, FP8_ROWS, FP8_INPUT, N, k);
    const struct fp8_matrix weight = quantise_weight(m, pass, l, linear, FP8_WEIGHT_ROWS, w);
    MATMUL(m, matmul_fp8(out, x, weight, b, N, n, k, fast_accumulation(m, true), ws, m->dev));
}

// ---- Backward ----

// Whether the gradient of a linear layer's output has its amax from its producer; else the cast takes it by a pass.
static bool gradient_has_amax(const struct gpt *m, enum linear linear) {
    const struct layer_shape *s = &m->shape.layer;
    const bool stream = m->config.hidden_dropout == 0 && residual_scale(m) == 1; // d_added is the stream's gradient
    switch (linear) {
    case LINEAR_QKV: return s->qk_statistics == 0;
    case LINEAR_ATT_PROJ: return s->norm_after || (stream && !s->parallel);
    case LINEAR_FC: return true;
    case LINEAR_MLP_PROJ: return s->norm_after || stream;
    case LINEAR_COUNT: break;
    }
    return false;
}
// Where the producer of the gradient of a linear layer's output puts its amax; NULL: nowhere.
static uint32_t *gradient_amax(const struct gpt *m, int l, enum linear linear) {
    return gradient_has_amax(m, linear) ? amax_of(m, PASS_TRAIN, l, linear, FP8_GRADIENT) : NULL;
}
// As gradient_amax, for the op that makes the residual stream's gradient: without a norm after a projection that is the
// gradient of the projection's output.
static uint32_t *stream_amax(const struct gpt *m, int l, enum linear projection) {
    return m->shape.layer.norm_after ? NULL : gradient_amax(m, l, projection);
}

// Describes the cast of the gradient of a linear layer's output, which sums dbias too.
static struct fp8_cast gradient_cast(struct gpt *m, int l, enum linear linear) {
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const int64_t N = extent_of(m, PASS_TRAIN).N;
    struct fp8_cast to =
        cast_by(fp8_scale(&m->fp8, l, linear, FP8_GRADIENT), counts_of(m, PASS_TRAIN, linear, FP8_GRADIENT));
    to.rows = fp8_matrix_buffer(m, PASS_TRAIN, l, linear, FP8_GRADIENT_ROWS, FP8_GRADIENT, N, row.outputs);
    to.columns = fp8_matrix_buffer(m, PASS_TRAIN, l, linear, FP8_GRADIENT_COLUMNS, FP8_GRADIENT, row.outputs, N);
    to.dbias = grad(m, l, row.bias);
    to.add_dbias = adds(m);
    return to;
}
// The scratch memory of that cast; none without a bias.
static void *gradient_cast_workspace(struct gpt *m, int l, enum linear linear) {
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const bool sums = is_trained(m, l, row.bias);
    return workspace(m, sums ? fp8_cast_workspace_bytes(extent_of(m, PASS_TRAIN).N, row.outputs) : 0);
}
static void quantise_gradient(struct gpt *m, int l, enum linear linear, const floatX *dout) {
    const int64_t N = extent_of(m, PASS_TRAIN).N;
    const int n = linear_row(linear, &m->shape.layer).outputs;
    const struct fp8_cast to = gradient_cast(m, l, linear);
    void *ws = gradient_cast_workspace(m, l, linear);
    if (!gradient_has_amax(m, linear) && to.scale)
        RUN(m, fp8_amax(&to.scale->amax, dout, N * n, m->dev));
    RUN(m, fp8_cast(to, dout, N, n, ws, m->dev));
}
// The column form of the input, for the gradient of the weight: kept or recomputed, or, of an input kept in floatX,
// cast in this phase by the scale of forward's cast.
static struct fp8_matrix input_columns(struct gpt *m, int l, enum linear linear) {
    const struct linear_source source = linear_source(m, l, linear);
    const int64_t N = extent_of(m, PASS_TRAIN).N;
    const int k = linear_row(linear, &m->shape.layer).inputs;
    struct fp8_scale *scale = fp8_scale(&m->fp8, l, linear, FP8_INPUT);
    if (!source.shared)
        return fp8_matrix_in(&m->fp8, activation_memory(m, PASS_BACKWARD, l, source.id), FP8_INPUT, k, N, scale);
    struct fp8_cast to = cast_by(scale, NULL);
    to.columns = fp8_matrix_buffer(m, PASS_TRAIN, l, linear, FP8_COLUMNS, FP8_INPUT, k, N);
    const floatX *in = activation(m, PASS_BACKWARD, source.layer, source.id);
    RUN(m, fp8_cast(to, in, N, k, NULL, m->dev));
    return to.columns;
}
// The two products of a linear layer's backward in FP8, a phase each, after quantise_gradient.
static void linear_backward_fp8(struct gpt *m, int l, enum linear linear, enum slot din_slot) {
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const int64_t N = extent_of(m, PASS_TRAIN).N;
    const int n = row.outputs, k = row.inputs;
    const bool fast = fast_accumulation(m, false);
    char name[PLAN_NAME_CHARS];

    snprintf(name, sizeof name, "%s, input", row.name);
    phase(m, GROUP_BACKWARD, l, name);
    floatX *din = d_buffer(m, l, din_slot, k);
    const floatX *w = param(m, PASS_BACKWARD, l, row.weight);
    void *ws = workspace(m, matmul_fp8_workspace_bytes(N, k, n, m->dev));
    const struct fp8_matrix dout = fp8_matrix_buffer(m, PASS_TRAIN, l, linear, FP8_GRADIENT_ROWS, FP8_GRADIENT, N, n);
    const struct fp8_matrix weight = quantise_weight(m, PASS_TRAIN, l, linear, FP8_WEIGHT_COLUMNS, w);
    MATMUL(m, matmul_fp8(din, dout, weight, NULL, N, k, n, fast, ws, m->dev));

    snprintf(name, sizeof name, "%s, weight", row.name);
    phase(m, GROUP_BACKWARD, l, name);
    float *dw = grad(m, l, row.weight);
    ws = workspace(m, matmul_fp8_workspace_bytes(n, k, N, m->dev));
    const struct fp8_matrix x = input_columns(m, l, linear);
    const struct fp8_matrix dout_columns =
        fp8_matrix_buffer(m, PASS_TRAIN, l, linear, FP8_GRADIENT_COLUMNS, FP8_GRADIENT, n, N);
    MATMUL(m, matmul_fp8_sum(dw, dout_columns, x, n, k, N, adds(m), fast, ws, m->dev));
}
// pre (N, inputs), of which GELU in its tanh form made a linear layer's input, where the layer's backward may go on to
// the gradient of that; NULL elsewhere, and when planning. sums: those of this gradient's columns are wanted next.
struct gelu_input {
    const floatX *pre;
    bool sums;
};
static const struct gelu_input NO_GELU = {NULL, false};

// Gradients of a linear layer, from the phase in which dout (N, outputs) is live: its input's (N, inputs) is written to
// the slot; its weight's, where that is trained, and where `sums_bias` its bias's, join the unit's gradients, as those
// of its adapter do. In FP8 two further phases follow. Returns whether what was written is the gradient of gelu.pre.
static bool linear_backward(struct gpt *m, int l, enum linear linear, enum slot din_slot, const floatX *dout,
                            bool sums_bias, struct gelu_input gelu) {
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const int64_t N = extent_of(m, PASS_TRAIN).N;
    const int n = row.outputs, k = row.inputs;
    if (is_quantised(m, PASS_TRAIN, l)) {
        quantise_gradient(m, l, linear, dout);
        linear_backward_fp8(m, l, linear, din_slot);
        return false;
    }
    const struct linear_source source = linear_source(m, l, linear);
    const bool trains = is_trained(m, l, row.weight);
    floatX *din = d_buffer(m, l, din_slot, k);
    const floatX *in = NULL; // what a frozen layer without an adapter read is not kept for it
    if (trains || has_adapter(m, linear))
        in = activation(m, PASS_BACKWARD, source.layer, source.id);
    const size_t weight_bytes = linear_weight_bytes(m, l, linear);
    const size_t bytes = larger(matmul_workspace_bytes(N, n, k, m->dev), lora_workspace_bytes(m, linear, N, N));
    float *dw = grad(m, l, row.weight), *db = sums_bias ? grad(m, l, row.bias) : NULL;
    void *memory = workspace(m, weight_bytes + bytes), *ws = bytes_behind(memory, weight_bytes);
    const floatX *w = linear_weight(m, PASS_BACKWARD, l, linear, memory);
    bool applied = false;
    if (gelu.pre)
        MATMUL(m, applied = matmul_backward_input_gelu(din, dout, w, gelu.pre, gelu.sums, N, n, k, ws, m->dev));
    else
        MATMUL(m, matmul_backward_input(din, dout, w, N, n, k, ws, m->dev));
    if (trains)
        MATMUL(m, matmul_backward_weight(dw, db, dout, in, N, n, k, adds(m), ws, m->dev));
    lora_backward(m, l, linear, din, dout, in, N, adds(m), ws);
    return applied;
}
