// LoRA's adapters beside the linear layers of a block (Hu et al. 2021, arXiv 2106.09685). For each adapted part p of a
// layer's outputs, in the phase of the layer's own products and from scratch memory of that phase, forward computes
//   out_p += h_p B_p^T,  h = s drop(in) A^T
// with A (parts x rank, inputs), B (outputs of the parts, rank), s = config_lora_scale, all parts one below the other.
// h (N, parts x rank) is small, and so recomputed by backward, which, with d for out's gradient, computes
//   dB_p = d_p^T h_p;  dh_p = s d_p B_p;  dA = dh^T drop(in);  din += drop(dh A)
#pragma once
#include "kernels/matmul/matmul.cuh" // matmul_forward_strided and the like
#include "kernels/norm.cuh"          // residual_forward, residual_backward: dropout
#include "model/parameters.cuh"      // struct lora_layer
#include "model/state.cuh"           // struct gpt and its buffers

static bool has_adapter(const struct gpt *m, enum linear linear) { return m->shape.lora.linear[linear].count > 0; }

static struct dropout lora_dropout(const struct gpt *m, int l, enum linear linear) {
    return dropout_of(m, m->config.finetuning.lora_dropout, l, DROPOUT_USES + (int)linear);
}

struct lora_scratch {
    floatX *h, *dh;  // (N, parts x rank)
    floatX *dropped; // (N, inputs) the input after dropout; without dropout not used
    void *products;  // scratch memory of the matrix products
    size_t bytes;    // of all of this
};
// Divides memory for a linear layer's adapter on N tokens into its parts. If `memory` is NULL, only `bytes` is valid.
static struct lora_scratch lora_scratch_at(const struct gpt *m, enum linear linear, int64_t N, void *memory) {
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const int width = lora_a_rows(&m->shape.lora, linear), rank = m->shape.lora.rank;
    const size_t h = plan_aligned((size_t)N * (size_t)width * sizeof(floatX));
    const size_t dropped =
        m->config.finetuning.lora_dropout > 0 ? plan_aligned((size_t)N * (size_t)row.inputs * sizeof(floatX)) : 0;
    size_t products = matmul_strided_workspace_bytes(row.inputs, width, N, width, row.inputs, m->dev);
    for (int p = 0; p < m->shape.lora.linear[linear].count; p++) {
        const int outputs = m->shape.lora.linear[linear].parts[p].rows;
        products = larger(products, matmul_strided_workspace_bytes(width, row.outputs, N, outputs, rank, m->dev));
    }
    char *at = (char *)memory;
    struct lora_scratch s;
    s.h = (floatX *)at;
    s.dh = (floatX *)address_after(at, h);
    s.dropped = (floatX *)address_after(at, 2 * h);
    s.products = address_after(at, 2 * h + dropped);
    s.bytes = 2 * h + dropped + products;
    return s;
}
// The number of bytes of scratch memory that serve a layer's adapter on `most` and on `last` tokens; 0 without one.
static size_t lora_workspace_bytes(const struct gpt *m, enum linear linear, int64_t most, int64_t last) {
    if (!has_adapter(m, linear))
        return 0;
    return larger(lora_scratch_at(m, linear, most, NULL).bytes, lora_scratch_at(m, linear, last, NULL).bytes);
}

// Multiplies x (N, width) by config_lora_scale, in place.
static void lora_scale(struct gpt *m, floatX *x, int64_t N, int width) {
    const struct dropout none = {0, 0, 0, 0, 0, NULL};
    const float scale = (float)config_lora_scale(&m->config);
    if (scale != 1)
        RUN(m, residual_backward(x, NULL, x, N, width, scale, none, m->dev));
}
// s->h (N, parts x rank) = config_lora_scale * drop(in) a^T, with in (N, inputs) and a (parts x rank, inputs). Returns
// drop(in), (N, inputs): it is s->dropped or, without dropout, `in` itself.
static const floatX *lora_project(struct gpt *m, int l, enum linear linear, const struct lora_scratch *s,
                                  const floatX *in, const floatX *a, int64_t N) {
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const int width = lora_a_rows(&m->shape.lora, linear);
    const struct dropout dropout = lora_dropout(m, l, linear);
    const floatX *x = in;
    if (dropout.p > 0) {
        RUN(m, residual_backward(s->dropped, NULL, in, N, row.inputs, 1, dropout, m->dev));
        x = s->dropped;
    }
    MATMUL(m, matmul_forward_strided(s->h, width, x, row.inputs, a, N, width, row.inputs, false, s->products, m->dev));
    lora_scale(m, s->h, N, width);
    return x;
}

// Adds the adapter's output for in (N, inputs), if there is an adapter, to out (N, outputs). ws: lora_workspace_bytes.
static void lora_forward(struct gpt *m, enum pass pass, int l, enum linear linear, floatX *out, const floatX *in,
                         int64_t N, void *ws) {
    const struct lora_layer *adapter = &m->shape.lora.linear[linear];
    if (adapter->count == 0)
        return;
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const int rank = m->shape.lora.rank, width = lora_a_rows(&m->shape.lora, linear);
    const floatX *a = param(m, pass, l, row.lora_a), *b = param(m, pass, l, row.lora_b);
    const struct lora_scratch s = lora_scratch_at(m, linear, N, ws);
    lora_project(m, l, linear, &s, in, a, N);
    for (int p = 0, below = 0; p < adapter->count; below += adapter->parts[p++].rows) {
        const struct lora_part part = adapter->parts[p];
        MATMUL(m, matmul_forward_strided(out + part.first, row.outputs, s.h + p * rank, width,
                                         b + (int64_t)below * rank, N, part.rows, rank, true, s.products, m->dev));
    }
}

// Writes the adapter's gradients or, if `add`, adds to them, from dout (N, outputs) and in (N, inputs). Adds the
// adapter's part of the input's gradient to din (N, inputs). Does nothing without an adapter. ws: lora_workspace_bytes.
static void lora_backward(struct gpt *m, int l, enum linear linear, floatX *din, const floatX *dout, const floatX *in,
                          int64_t N, bool add, void *ws) {
    const struct lora_layer *adapter = &m->shape.lora.linear[linear];
    if (adapter->count == 0)
        return;
    const struct linear_row row = linear_row(linear, &m->shape.layer);
    const int rank = m->shape.lora.rank, width = lora_a_rows(&m->shape.lora, linear), k = row.inputs;
    const floatX *a = param(m, PASS_BACKWARD, l, row.lora_a), *b = param(m, PASS_BACKWARD, l, row.lora_b);
    float *da = grad(m, l, row.lora_a), *db = grad(m, l, row.lora_b);
    const struct lora_scratch s = lora_scratch_at(m, linear, N, ws);
    const floatX *x = lora_project(m, l, linear, &s, in, a, N);
    for (int p = 0, below = 0; p < adapter->count; below += adapter->parts[p++].rows) {
        const struct lora_part part = adapter->parts[p];
        MATMUL(m, matmul_backward_weight_strided(db + (int64_t)below * rank, dout + part.first, row.outputs,
                                                 s.h + p * rank, width, N, part.rows, rank, add, s.products, m->dev));
        MATMUL(m,
               matmul_backward_input_strided(s.dh + p * rank, width, dout + part.first, row.outputs,
                                             b + (int64_t)below * rank, N, part.rows, rank, false, s.products, m->dev));
    }
    lora_scale(m, s.dh, N, width);
    MATMUL(m, matmul_backward_weight_strided(da, s.dh, width, x, k, N, width, k, add, s.products, m->dev));
    const struct dropout dropout = lora_dropout(m, l, linear);
    if (dropout.p == 0) {
        MATMUL(m, matmul_backward_input_strided(din, k, s.dh, width, a, N, width, k, true, s.products, m->dev));
        return;
    }
    MATMUL(m, matmul_backward_input_strided(s.dropped, k, s.dh, width, a, N, width, k, false, s.products, m->dev));
    RUN(m, residual_forward(din, din, s.dropped, N, k, 1, dropout, m->dev));
}
