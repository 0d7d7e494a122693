// The linear layers of a block: their products forward and backward, of all tokens or of a range.
#pragma once
#include "kernels/matmul/matmul.cuh" // matmul_forward, matmul_backward_input, matmul_backward_weight
#include "model/fp8_linear.cuh"      // linear_forward_fp8, linear_backward_fp8, cast_input
#include "model/lora.cuh"            // lora_forward, lora_backward
#include "model/parameters.cuh"      // enum linear
#include "model/at.cuh"              // struct gpt and its buffers, struct at

// ---- Inputs ----

// Whether a linear layer's input is to be made: at.produce has it or, in an FP8 layer, the product that reads it.
static bool linear_input_is_wanted(struct at at, enum linear linear) {
    const struct linear_source source = linear_row(linear, &at.m->shape.layer).source;
    const uint32_t product = is_quantized(at.m, at.pass, at.l) ? 1u << source.product : 0;
    return produces(at, 1u << source.id | product);
}
// Returns a linear layer's floatX input (rows, inputs), live in this phase; NULL if planning or producer_writes_fp8.
static floatX *linear_input(struct at at, enum linear linear) {
    const struct linear_source source = linear_row(linear, &at.m->shape.layer).source;
    return is_quantized(at.m, at.pass, at.l) ? fp8_linear_input(at, linear)
                                             : rows_of(source.below ? at_layer_below(at) : at, source.id);
}
// Returns where an op puts a linear layer's input: linear_input and, in FP8 training, its amax. There are no sums.
static struct sink input_sink(struct at at, enum linear linear) {
    struct sink sink = plain_sink(linear_input(at, linear));
    sink.amax = amax_of(at.m, at.pass, at.l, linear, FP8_INPUT);
    return sink;
}

// ---- Products ----

// The number of bytes of scratch memory that linear_weight needs: 0 unless the weight is stored in FP8 or NF4.
static size_t linear_weight_bytes(const struct gpt *m, int l, enum linear linear) {
    const struct tensor *t = parameters_find(&m->table, l, linear_row(linear, &m->shape.layer).weight);
    return tensor_is_stored(t) ? frozen_bytes(FROZEN_FLOATX, t->rows, t->cols) : 0;
}
// Returns a linear layer's weight (outputs, inputs); NULL when planning. Call use_unit for its unit before. A weight
// stored in FP8 or NF4 is dequantized into `workspace` (linear_weight_bytes), in this phase.
static const floatX *linear_weight(struct gpt *m, enum pass pass, int l, enum linear linear, void *workspace) {
    const struct tensor *t = parameters_find(&m->table, l, linear_row(linear, &m->shape.layer).weight);
    floatX *w = (floatX *)workspace;
    if (!tensor_is_stored(t))
        return param(m, pass, l, t->parameter);
    RUN(m, frozen_dequantize(w, m->stored.memory + t->stored_at, t->format, t->rows, t->cols, 0, t->rows, m->dev));
    return w;
}
// Whether a linear layer's backward overwrites the gradient of its input, or adds to what is there.
enum din_use { DIN_WRITTEN, DIN_ADDED };
// The number of bytes of scratch memory that any one product of a linear layer on `rows` tokens needs outside FP8.
static size_t products_bytes(const struct gpt *m, const struct linear_row *row, int64_t rows, enum din_use use) {
    const size_t written = matmul_workspace_bytes(rows, row->outputs, row->inputs, m->dev);
    switch (use) {
    case DIN_WRITTEN: return written;
    case DIN_ADDED:
        return larger(written, matmul_strided_workspace_bytes(row->inputs, row->outputs, rows, row->outputs,
                                                              row->inputs, m->dev));
    }
    return written;
}
// Returns this phase's scratch memory for a linear layer outside FP8, enough for every range; NULL when planning. Its
// first linear_weight_bytes are for the weight. The products and the adapter use the rest one after the other.
static void *linear_workspace(struct at at, enum linear linear, enum din_use use) {
    struct gpt *m = at.m;
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const size_t products =
        larger(products_bytes(m, &row, at.largest_range_rows, use), products_bytes(m, &row, at.last_range_rows, use));
    const size_t bytes = larger(products, lora_workspace_bytes(m, linear, at.largest_range_rows, at.last_range_rows));
    return workspace(m, linear_weight_bytes(m, at.l, linear) + bytes);
}

// out (rows, outputs) = linear_input weight^T + bias + the adapter's output, in this phase. FP8 needs cast_input first.
static void linear_forward(struct at at, enum linear linear, floatX *out) {
    struct gpt *m = at.m;
    if (is_quantized(m, at.pass, at.l)) {
        linear_forward_fp8(at, linear, out);
        return;
    }
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const floatX *b = param(m, at.pass, at.l, row.bias), *in = linear_input(at, linear);
    void *memory = linear_workspace(at, linear, DIN_WRITTEN);
    void *ws = address_after(memory, linear_weight_bytes(m, at.l, linear));
    const floatX *w = linear_weight(m, at.pass, at.l, linear, memory);
    MATMUL(m, matmul_forward(out, in, w, b, at.rows, row.outputs, row.inputs, ws, m->dev));
    lora_forward(m, at.pass, at.l, linear, out, in, at.rows, ws);
}

// Where a linear layer's input is GELU (tanh) of `pre` (rows, inputs), its backward may go on to pre's gradient. `pre`
// is NULL where it must not, and when planning. sums: the caller will want the sums of that gradient's columns.
struct gelu_input {
    const floatX *pre;
    bool sums;
};
static const struct gelu_input NO_GELU = {NULL, false};

// Runs a linear layer's backward from dout (rows, outputs) in this phase; FP8 layers open two more. By `use`, writes or
// adds the input's gradient in din_slot. Writes the gradients of weight, adapter and, if sums_bias or in FP8, bias;
// adds them if accumulates(m), and in later ranges. Returns whether din_slot has gelu.pre's gradient instead.
static bool linear_backward(struct at at, enum linear linear, enum slot din_slot, enum din_use use, const floatX *dout,
                            bool sums_bias, struct gelu_input gelu) {
    struct gpt *m = at.m;
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const int n = row.outputs, k = row.inputs;
    if (is_quantized(m, PASS_TRAIN, at.l)) {
        cast_gradient(m, at.l, linear, dout);
        linear_backward_fp8(at, linear, din_slot, use == DIN_ADDED);
        return false;
    }
    const bool trains = is_trained(m, at.l, row.weight), add = accumulates(m) || at.first > 0;
    floatX *din = d_rows(at, din_slot, k);
    const floatX *in = NULL; // the input of a frozen layer without an adapter is not kept
    if (trains || has_adapter(m, linear))
        in = linear_input(at, linear);
    float *dw = grad(m, at.l, row.weight), *db = sums_bias ? grad(m, at.l, row.bias) : NULL;
    void *memory = linear_workspace(at, linear, use), *ws = address_after(memory, linear_weight_bytes(m, at.l, linear));
    const floatX *w = linear_weight(m, PASS_BACKWARD, at.l, linear, memory);
    bool applied = false;
    if (use == DIN_ADDED)
        MATMUL(m, matmul_backward_input_strided(din, k, dout, n, w, at.rows, n, k, true, ws, m->dev));
    else if (gelu.pre)
        MATMUL(m, applied = matmul_backward_input_gelu(din, dout, w, gelu.pre, gelu.sums, at.rows, n, k, ws, m->dev));
    else
        MATMUL(m, matmul_backward_input(din, dout, w, at.rows, n, k, ws, m->dev));
    if (trains)
        MATMUL(m, matmul_backward_weight(dw, db, dout, in, at.rows, n, k, add, ws, m->dev));
    lora_backward(m, at.l, linear, din, dout, in, at.rows, add, ws);
    return applied;
}
