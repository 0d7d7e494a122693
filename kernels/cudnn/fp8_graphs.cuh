// The graphs of FP8 attention, forward and backward, that cuDNN is asked for (cudnn/fp8_attention.cu).
//
// Each product multiplies codes, and its sums are multiplied by both operands' descales, in fp32. P and dS are
// multiplied by their scales and encoded between two products. An output is multiplied by its scale, after its amax was
// taken, and written as codes or, by a scale of 1, in bf16 (key.wide). Scales, descales and amaxes are tensors of
// one fp32 number in the device's memory. The order of the operations is the one by which cuDNN's engines recognize the
// graphs, and is cudnn-frontend's (3929da2, node/scaled_dot_product_flash_attention.h, node/sdpa_fp8_bwd.h and
// node/matmul_fp8.h). Forward as one operation is left out: NVRTC fails where the mask is within it (cuDNN 9.28).
#pragma once
#include "kernels/cudnn/attention_graphs.cuh" // struct fused_key, fused_view_as, fused_softmax

// Returns the type of the codes of q, k, v, P and out.
static enum cudnn_data_type fused_fp8_input_type(const struct fused_key *k) { return CUDNN_DATA_FP8_E4M3; }
// Returns the type of the codes of dout, dS, dQ, dK and dV.
static enum cudnn_data_type fused_fp8_gradient_type(const struct fused_key *k) {
    return k->types == FUSED_HYBRID ? CUDNN_DATA_FP8_E5M2 : CUDNN_DATA_FP8_E4M3;
}

// Returns x times the number `cell`, as a virtual tensor of `type`.
static struct cudnn_tensor fused_fp8_times(struct cudnn_builder *b, struct cudnn_tensor x, struct cudnn_tensor cell,
                                           enum cudnn_data_type type) {
    return cudnn_pointwise(b, CUDNN_POINTWISE_MUL, x, &cell, type);
}
// Appends the amax of x, fp32, which goes to the cell `id`.
static void fused_fp8_amax(struct cudnn_builder *b, struct cudnn_tensor x, enum fused_tensor id) {
    cudnn_reduce_to(b, CUDNN_REDUCE_TENSOR_AMAX, x, cudnn_cell(b, id));
}
// The inputs that forward and backward share, and the descales by which codes are multiplied to be read.
struct fused_fp8_inputs {
    struct cudnn_tensor q, v, lse, scale; // v: of backward (B, groups, D, T)
    struct fused_view kt;                 // (B, groups, D, T)
    struct cudnn_tensor descale_q, descale_k, descale_v, descale_p;
};
// Creates the tensors of struct fused_fp8_inputs only. lse is among them for forward too, which writes it.
static struct fused_fp8_inputs fused_fp8_inputs_of(struct cudnn_builder *b, const struct fused_key *k) {
    const enum cudnn_data_type type = fused_fp8_input_type(k);
    const int64_t row = (k->heads + 2 * k->groups) * k->head_dim;
    struct fused_fp8_inputs x;
    x.q = fused_view_as(b, k, type, FUSED_Q, k->heads, row, false).tensor;
    x.kt = fused_view_as(b, k, type, FUSED_K, k->groups, row, true);
    x.v = fused_view_as(b, k, type, FUSED_V, k->groups, row, k->backward != 0).tensor;
    x.lse = fused_rows(b, k, FUSED_LSE);
    x.scale = cudnn_number(b, FUSED_SCALE);
    x.descale_q = cudnn_cell(b, FUSED_DESCALE_Q);
    x.descale_k = cudnn_cell(b, FUSED_DESCALE_K);
    x.descale_v = cudnn_cell(b, FUSED_DESCALE_V);
    x.descale_p = cudnn_cell(b, FUSED_DESCALE_P);
    return x;
}
// Returns the masked scores of q and k, (B, H, T, T) fp32: the product of codes times attention's scale and descales.
static struct cudnn_tensor fused_fp8_scores(struct cudnn_builder *b, const struct fused_key *k,
                                            const struct fused_fp8_inputs *x) {
    const enum cudnn_data_type F = CUDNN_DATA_FLOAT;
    const struct cudnn_tensor scaled = fused_fp8_times(b, cudnn_matmul(b, x->q, x->kt.tensor, F), x->scale, F);
    return fused_masked(b, k, fused_fp8_times(b, fused_fp8_times(b, scaled, x->descale_q, F), x->descale_k, F));
}

// An output of a graph: its ids, and the type of its codes.
struct fused_fp8_output {
    enum fused_tensor id, scale, amax;
    enum cudnn_data_type type;
    int64_t heads, row; // as fused_view_as takes them
};
// Appends what makes an output of a product's sums, (B, H, T, D) fp32: adds up groups if the output has fewer heads,
// applies both descales, writes the amax to to.amax and the result, times to.scale, as codes or, if k->wide, in bf16.
static void fused_fp8_write(struct cudnn_builder *b, const struct fused_key *k, struct cudnn_tensor sums,
                            struct cudnn_tensor descale_a, struct cudnn_tensor descale_b, struct fused_fp8_output to) {
    const enum cudnn_data_type F = CUDNN_DATA_FLOAT;
    const struct cudnn_function multiply = {CUDNN_POINTWISE_MUL, F, 0};
    const enum cudnn_data_type type = k->wide ? CUDNN_DATA_BFLOAT16 : to.type;
    const struct cudnn_tensor out = fused_view_as(b, k, type, to.id, to.heads, to.row, false).tensor;
    struct cudnn_tensor x = sums;
    if (to.heads != sums.dims[1]) {
        x = cudnn_virtual(b, F, out.dims);
        cudnn_reduce_to(b, CUDNN_REDUCE_TENSOR_ADD, sums, x);
    }
    x = fused_fp8_times(b, fused_fp8_times(b, x, descale_a, F), descale_b, F);
    const struct cudnn_tensor scale = cudnn_cell(b, to.scale);
    cudnn_pointwise_to(b, multiply, x, &scale, NULL, out);
    fused_fp8_amax(b, x, to.amax);
}

// Builds forward, which writes out, the amax of out, lse and the amax of P. Causal attention takes 22 operations.
static void fused_fp8_forward_graph(struct cudnn_builder *b, const struct fused_key *k) {
    const enum cudnn_data_type F = CUDNN_DATA_FLOAT, type = fused_fp8_input_type(k);
    const int64_t out_row = k->heads * k->head_dim;
    const struct fused_fp8_inputs x = fused_fp8_inputs_of(b, k);
    const struct fused_fp8_output out = {FUSED_OUT, FUSED_SCALE_OUT, FUSED_AMAX_OUT, type, k->heads, out_row};

    const struct cudnn_tensor p = fused_softmax(b, fused_fp8_scores(b, k, &x), x.lse, F);
    fused_fp8_amax(b, p, FUSED_AMAX_P);
    const struct cudnn_tensor codes = fused_fp8_times(b, p, cudnn_cell(b, FUSED_SCALE_P), type);
    fused_fp8_write(b, k, cudnn_matmul(b, codes, x.v, F), x.descale_p, x.descale_v, out);
}

// Returns codes of scores, (B, H, T, T), transposed.
static struct cudnn_tensor fused_fp8_turned(struct cudnn_builder *b, const struct fused_key *k,
                                            struct cudnn_tensor scores, enum cudnn_data_type type) {
    const int64_t strides[CUDNN_RANK] = {k->heads * k->T * k->T, k->T * k->T, k->T, 1};
    return cudnn_transposed(b, scores, type, strides);
}
// Builds backward, which writes dQ, dK, dV and their amaxes, and the amax of dS. Causal attention with groups takes 43
// operations, two of which sum over groups. The sum of dQ is in no tensor of the graph: cuDNN keeps it itself.
static void fused_fp8_backward_graph(struct cudnn_builder *b, const struct fused_key *k) {
    const enum cudnn_data_type F = CUDNN_DATA_FLOAT, type = fused_fp8_input_type(k), dtype = fused_fp8_gradient_type(k);
    const int64_t row = (k->heads + 2 * k->groups) * k->head_dim, out_row = k->heads * k->head_dim;
    const struct fused_fp8_inputs x = fused_fp8_inputs_of(b, k);
    const struct cudnn_tensor out = fused_view_as(b, k, type, FUSED_OUT, k->heads, out_row, false).tensor;
    const struct cudnn_tensor dout = fused_view_as(b, k, dtype, FUSED_DOUT, k->heads, out_row, false).tensor;
    const struct cudnn_tensor descale_out = cudnn_cell(b, FUSED_DESCALE_OUT);
    const struct cudnn_tensor descale_dout = cudnn_cell(b, FUSED_DESCALE_DOUT);
    const struct cudnn_tensor descale_ds = cudnn_cell(b, FUSED_DESCALE_DS);
    const struct fused_fp8_output dq = {FUSED_DQ, FUSED_SCALE_DQ, FUSED_AMAX_DQ, dtype, k->heads, row};
    const struct fused_fp8_output dk = {FUSED_DK, FUSED_SCALE_DK, FUSED_AMAX_DK, dtype, k->groups, row};
    const struct fused_fp8_output dv = {FUSED_DV, FUSED_SCALE_DV, FUSED_AMAX_DV, dtype, k->groups, row};

    const struct cudnn_tensor weighed = cudnn_pointwise(b, CUDNN_POINTWISE_MUL, dout, &out, F);
    struct cudnn_tensor row_sums = cudnn_reduce_rows(b, CUDNN_REDUCE_TENSOR_ADD, weighed);
    row_sums = fused_fp8_times(b, fused_fp8_times(b, row_sums, descale_dout, F), descale_out, F);

    const struct cudnn_tensor scores = fused_fp8_scores(b, k, &x);
    const struct cudnn_tensor logs = cudnn_pointwise(b, CUDNN_POINTWISE_SUB, scores, &x.lse, F);
    const struct cudnn_tensor p = cudnn_pointwise(b, CUDNN_POINTWISE_EXP, logs, NULL, F);
    const struct cudnn_tensor p_codes = fused_fp8_times(b, p, cudnn_cell(b, FUSED_SCALE_P), type);
    const struct cudnn_tensor p_turned = fused_fp8_turned(b, k, p_codes, type);
    fused_fp8_write(b, k, cudnn_matmul(b, p_turned, dout, F), x.descale_p, descale_dout, dv);

    const struct cudnn_tensor dp_sums = cudnn_matmul(b, dout, x.v, F);
    const struct cudnn_tensor dp = fused_fp8_times(b, fused_fp8_times(b, dp_sums, descale_dout, F), x.descale_v, F);
    const struct cudnn_tensor centered = cudnn_pointwise(b, CUDNN_POINTWISE_SUB, dp, &row_sums, F);
    const struct cudnn_tensor unscaled = cudnn_pointwise(b, CUDNN_POINTWISE_MUL, centered, &p, F);
    const struct cudnn_tensor ds = fused_fp8_times(b, unscaled, x.scale, F);
    fused_fp8_amax(b, ds, FUSED_AMAX_DS);
    const struct cudnn_tensor ds_codes = fused_fp8_times(b, ds, cudnn_cell(b, FUSED_SCALE_DS), dtype);

    const struct cudnn_tensor keys = cudnn_transposed(b, x.kt.tensor, type, x.kt.strides);
    fused_fp8_write(b, k, cudnn_matmul(b, ds_codes, keys, F), descale_ds, x.descale_k, dq);
    const struct cudnn_tensor ds_turned = fused_fp8_turned(b, k, ds_codes, dtype);
    fused_fp8_write(b, k, cudnn_matmul(b, ds_turned, x.q, F), descale_ds, x.descale_q, dk);
}
