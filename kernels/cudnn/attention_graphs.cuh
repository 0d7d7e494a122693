// The graphs of attention, forward and backward, that cuDNN is asked for (cudnn/attention.cuh).
//
// From 9.21 on forward is asked for as one operation, as NVIDIA's frontend does. From older versions, where no engine
// takes the operation, and where fused_check finds it wrong, forward is asked for by the graph of operations that
// cuDNN's engines recognize: two products and a softmax written out as maximum, difference, exponential, sum and
// quotient. Backward is asked for by the five products of the gradient: the frontend has no other form. Sources: the
// graphs that cudnn-frontend makes and the conditions under which it refuses to (github.com/NVIDIA/cudnn-frontend,
// 1.2x: node/scaled_dot_product_flash_attention.h, node/sdpa_support_surface.h).
#pragma once
#include "kernels/cudnn/graph.h" // cudnn_matmul, cudnn_pointwise, cudnn_subgraph

// The unique ids of the graphs' tensors.
enum fused_tensor {
    FUSED_Q = 1,
    FUSED_K,
    FUSED_V,
    FUSED_OUT,
    FUSED_LSE,    // (B, H, T) fp32
    FUSED_SCALE,  // number: attention_shape's
    FUSED_HIDDEN, // number: the score of a key that is not seen
    FUSED_ONE,    // number: what undoes dropout's scale, 1 without dropout
    FUSED_DOUT,
    FUSED_DQ,
    FUSED_DK,
    FUSED_DV,
    FUSED_ROW_SUMS, // (B, H, T) fp32, scratch: the sums of dout * out
    FUSED_DQ_SUM,   // (B, H, T, D) fp32, scratch: dQ as it is summed
    // of FP8 attention, one fp32 number in device memory each: what a tensor's codes are multiplied by to be read,
    // what its values are multiplied by before they are encoded, the largest magnitude of its values
    FUSED_DESCALE_Q,
    FUSED_DESCALE_K,
    FUSED_DESCALE_V,
    FUSED_DESCALE_P,
    FUSED_DESCALE_OUT,
    FUSED_DESCALE_DOUT,
    FUSED_DESCALE_DS,
    FUSED_SCALE_P,
    FUSED_SCALE_OUT,
    FUSED_SCALE_DS,
    FUSED_SCALE_DQ,
    FUSED_SCALE_DK,
    FUSED_SCALE_DV,
    FUSED_AMAX_P,
    FUSED_AMAX_OUT,
    FUSED_AMAX_DS,
    FUSED_AMAX_DQ,
    FUSED_AMAX_DK,
    FUSED_AMAX_DV,
    FUSED_TENSORS,
};

// How backward sums dQ over the tiles of keys. Only FUSED_SUM_ANY may give other bits in another run; 9.19 puts no note
// on it. The others need fused_own_engine's engines, but for FUSED_SUM_NONE on compute capability 9.0.
enum fused_order {
    FUSED_SUM_ANY,  // in fp32 in memory, as the tiles are done
    FUSED_SUM_NONE, // the graph has no sum in memory; on compute capability 9.0 it keeps all of dP, B * H * T * T * 2 B
    FUSED_SUM_TURNS, // in fp32 in memory, tile after tile: memory linear in T, and slower; on 9.0, from 9.25 on
};

// The types of attention's tensors. In both kinds of FP8 attention q, k, v, P and out are E4M3.
enum fused_types {
    FUSED_BF16,
    FUSED_HYBRID, // dout, dS and the gradients are E5M2
    FUSED_E4M3,   // dout, dS and the gradients are E4M3
};

// Every member is an int64, so that keys compare by their bytes.
struct fused_key {
    int64_t B, T, heads, groups, head_dim, full, backward, order; // order: enum fused_order, of backward
    int64_t types, wide; // types: enum fused_types; wide: of FP8 attention, outputs are bf16
};

// A view of some heads in the rows of tokens: (B, heads, T, D) or, transposed, (B, heads, D, T).
struct fused_view {
    struct cudnn_tensor tensor;
    int64_t strides[CUDNN_RANK];
};
// Creates a view of `heads` heads, by its id, in rows of `row` elements: (B, heads, T, D), transposed (B, heads, D, T).
static struct fused_view fused_view_as(struct cudnn_builder *b, const struct fused_key *k, enum cudnn_data_type type,
                                       enum fused_tensor id, int64_t heads, int64_t row, bool transposed) {
    struct fused_view view = {{NULL, {0}}, {k->T * row, k->head_dim, row, 1}};
    int64_t dims[CUDNN_RANK] = {k->B, heads, k->T, k->head_dim};
    if (transposed) {
        dims[2] = k->head_dim;
        dims[3] = k->T;
        view.strides[2] = 1;
        view.strides[3] = row;
    }
    view.tensor = cudnn_tensor_of(b, id, type, dims, view.strides, CUDNN_IN_MEMORY, CUDNN_ALIGNMENT);
    return view;
}
// Creates a view as fused_view_as does, in bf16.
static struct fused_view fused_view_of(struct cudnn_builder *b, const struct fused_key *k, enum fused_tensor id,
                                       int64_t heads, int64_t row, bool transposed) {
    return fused_view_as(b, k, CUDNN_DATA_BFLOAT16, id, heads, row, transposed);
}
// Creates a tensor (B, H, T, 1) in memory, by its id, of one fp32 number for each row of the scores.
static struct cudnn_tensor fused_rows(struct cudnn_builder *b, const struct fused_key *k, enum fused_tensor id) {
    const int64_t dims[CUDNN_RANK] = {k->B, k->heads, k->T, 1};
    return cudnn_dense(b, id, CUDNN_DATA_FLOAT, dims, CUDNN_IN_MEMORY);
}

// Returns a virtual tensor of each score's index along an axis: 2, the score's query; 3, the score's key.
static struct cudnn_tensor fused_index(struct cudnn_builder *b, struct cudnn_tensor scores, int64_t axis) {
    const struct cudnn_function index = {CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_FLOAT, axis};
    const struct cudnn_tensor y = cudnn_virtual(b, CUDNN_DATA_INT32, scores.dims);
    cudnn_pointwise_to(b, index, scores, NULL, NULL, y);
    return y;
}
// Returns the scores, with FUSED_HIDDEN where a query doesn't see the key; unchanged where k->full.
static struct cudnn_tensor fused_masked(struct cudnn_builder *b, const struct fused_key *k,
                                        struct cudnn_tensor scores) {
    const struct cudnn_function not_later = {CUDNN_POINTWISE_CMP_GE, CUDNN_DATA_BOOLEAN, 0};
    const struct cudnn_function select = {CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT, 0};
    if (k->full)
        return scores;
    const struct cudnn_tensor hidden = cudnn_number(b, FUSED_HIDDEN);
    const struct cudnn_tensor query = fused_index(b, scores, 2), key = fused_index(b, scores, 3);
    const struct cudnn_tensor seen = cudnn_virtual(b, CUDNN_DATA_BOOLEAN, scores.dims);
    cudnn_pointwise_to(b, not_later, query, &key, NULL, seen);
    const struct cudnn_tensor masked = cudnn_virtual(b, CUDNN_DATA_FLOAT, scores.dims);
    cudnn_pointwise_to(b, select, scores, &hidden, &seen, masked);
    return masked;
}

// Returns the softmax of each row of scores, as a virtual tensor of `type`. The rows' log-sum-exps go to lse.
static struct cudnn_tensor fused_softmax(struct cudnn_builder *b, struct cudnn_tensor scores, struct cudnn_tensor lse,
                                         enum cudnn_data_type type) {
    const enum cudnn_data_type F = CUDNN_DATA_FLOAT;
    const struct cudnn_function add = {CUDNN_POINTWISE_ADD, F, 0};
    const struct cudnn_tensor largest = cudnn_reduce_rows(b, CUDNN_REDUCE_TENSOR_MAX, scores);
    const struct cudnn_tensor below = cudnn_pointwise(b, CUDNN_POINTWISE_SUB, scores, &largest, F);
    const struct cudnn_tensor weights = cudnn_pointwise(b, CUDNN_POINTWISE_EXP, below, NULL, F);
    const struct cudnn_tensor sum = cudnn_reduce_rows(b, CUDNN_REDUCE_TENSOR_ADD, weights);
    const struct cudnn_tensor log_sum = cudnn_pointwise(b, CUDNN_POINTWISE_LOG, sum, NULL, F);
    cudnn_pointwise_to(b, add, largest, &log_sum, NULL, lse);
    return cudnn_pointwise(b, CUDNN_POINTWISE_DIV, weights, &sum, type);
}

// Builds forward of attention in bf16 as a graph of operations, which write out and lse.
static void fused_forward_graph(struct cudnn_builder *b, const struct fused_key *k) {
    const enum cudnn_data_type F = CUDNN_DATA_FLOAT;
    const int64_t row = (k->heads + 2 * k->groups) * k->head_dim, out_row = k->heads * k->head_dim;
    const struct cudnn_tensor q = fused_view_of(b, k, FUSED_Q, k->heads, row, false).tensor;
    const struct cudnn_tensor kt = fused_view_of(b, k, FUSED_K, k->groups, row, true).tensor;
    const struct cudnn_tensor v = fused_view_of(b, k, FUSED_V, k->groups, row, false).tensor;
    const struct cudnn_tensor out = fused_view_of(b, k, FUSED_OUT, k->heads, out_row, false).tensor;
    const struct cudnn_tensor lse = fused_rows(b, k, FUSED_LSE), scale = cudnn_number(b, FUSED_SCALE);

    const struct cudnn_tensor products = cudnn_matmul(b, q, kt, F);
    const struct cudnn_tensor scores = fused_masked(b, k, cudnn_pointwise(b, CUDNN_POINTWISE_MUL, products, &scale, F));
    cudnn_matmul_to(b, fused_softmax(b, scores, lse, CUDNN_DATA_BFLOAT16), v, out);
}

// Builds forward as one operation, in an empty builder. Unless k->full, the causal mask is a graph within it.
static void fused_forward_operation(struct cudnn_builder *b, const struct fused_key *k) {
    const int64_t row = (k->heads + 2 * k->groups) * k->head_dim, out_row = k->heads * k->head_dim;
    const int64_t dims[CUDNN_RANK] = {k->B, k->heads, k->T, k->T};
    const struct {
        enum cudnn_attribute_name name;
        struct cudnn_tensor tensor;
    } operands[] = {
        {CUDNN_ATTR_OPERATION_SDPA_FWD_QDESC, fused_view_of(b, k, FUSED_Q, k->heads, row, false).tensor},
        {CUDNN_ATTR_OPERATION_SDPA_FWD_KDESC, fused_view_of(b, k, FUSED_K, k->groups, row, false).tensor},
        {CUDNN_ATTR_OPERATION_SDPA_FWD_VDESC, fused_view_of(b, k, FUSED_V, k->groups, row, false).tensor},
        {CUDNN_ATTR_OPERATION_SDPA_FWD_ODESC, fused_view_of(b, k, FUSED_OUT, k->heads, out_row, false).tensor},
        {CUDNN_ATTR_OPERATION_SDPA_FWD_STATSDESC, fused_rows(b, k, FUSED_LSE)},
        {CUDNN_ATTR_OPERATION_SDPA_FWD_SCALEDESC, cudnn_number(b, FUSED_SCALE)},
    };
    struct cudnn_descriptor *operation = cudnn_make(b, CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR);
    for (size_t i = 0; i < sizeof operands / sizeof *operands; i++)
        cudnn_set_descriptor(b, operation, operands[i].name, operands[i].tensor.descriptor);
    if (!k->full) {
        const struct cudnn_tensor scores = cudnn_virtual(b, CUDNN_DATA_FLOAT, dims),
                                  masked = fused_masked(b, k, scores);
        cudnn_set_descriptor(b, operation, CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH, cudnn_subgraph(b, 0));
        cudnn_set_int64(b, operation, CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_INPUT_UID, scores.id);
        cudnn_set_int64(b, operation, CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_OUTPUT_UID, masked.id);
    }
    cudnn_operation(b, operation, "attention");
}

// Appends K's or V's gradient, `id`: scores (dS or P), made bf16 and transposed, times x (B, H, T, D), summed by group.
static void fused_group_gradient(struct cudnn_builder *b, const struct fused_key *k, enum fused_tensor id,
                                 struct cudnn_tensor scores, struct cudnn_tensor x) {
    const int64_t row = (k->heads + 2 * k->groups) * k->head_dim;
    const int64_t strides[CUDNN_RANK] = {k->heads * k->T * k->T, k->T * k->T, k->T, 1};
    const struct cudnn_tensor turned = cudnn_transposed(b, scores, CUDNN_DATA_BFLOAT16, strides);
    const struct cudnn_tensor gradient = fused_view_of(b, k, id, k->groups, row, false).tensor;
    if (k->heads == k->groups)
        cudnn_matmul_to(b, turned, x, gradient);
    else
        cudnn_reduce_to(b, CUDNN_REDUCE_TENSOR_ADD, cudnn_matmul(b, turned, x, CUDNN_DATA_BFLOAT16), gradient);
}
// Builds backward in bf16. It writes dQ, dK, dV, FUSED_ROW_SUMS and, unless k->order is FUSED_SUM_NONE, FUSED_DQ_SUM.
static void fused_backward_graph(struct cudnn_builder *b, const struct fused_key *k) {
    const enum cudnn_data_type F = CUDNN_DATA_FLOAT;
    const int64_t row = (k->heads + 2 * k->groups) * k->head_dim, out_row = k->heads * k->head_dim;
    const struct cudnn_tensor q = fused_view_of(b, k, FUSED_Q, k->heads, row, false).tensor;
    const struct fused_view kt = fused_view_of(b, k, FUSED_K, k->groups, row, true);
    const struct cudnn_tensor vt = fused_view_of(b, k, FUSED_V, k->groups, row, true).tensor;
    const struct cudnn_tensor out = fused_view_of(b, k, FUSED_OUT, k->heads, out_row, false).tensor;
    const struct cudnn_tensor dout = fused_view_of(b, k, FUSED_DOUT, k->heads, out_row, false).tensor;
    const struct cudnn_tensor dq = fused_view_of(b, k, FUSED_DQ, k->heads, row, false).tensor;
    const struct cudnn_tensor lse = fused_rows(b, k, FUSED_LSE), row_sums = fused_rows(b, k, FUSED_ROW_SUMS);
    const struct cudnn_tensor scale = cudnn_number(b, FUSED_SCALE), one = cudnn_number(b, FUSED_ONE);
    const struct cudnn_function multiply = {CUDNN_POINTWISE_MUL, F, 0}, copy = {CUDNN_POINTWISE_IDENTITY, F, 0};

    const struct cudnn_tensor weighed = cudnn_pointwise(b, CUDNN_POINTWISE_MUL, dout, &out, F);
    cudnn_pointwise_to(b, multiply, cudnn_reduce_rows(b, CUDNN_REDUCE_TENSOR_ADD, weighed), &one, NULL, row_sums);

    const struct cudnn_tensor products = cudnn_matmul(b, q, kt.tensor, F);
    const struct cudnn_tensor scores = cudnn_pointwise(b, CUDNN_POINTWISE_MUL, products, &scale, F);
    const struct cudnn_tensor logs = cudnn_pointwise(b, CUDNN_POINTWISE_SUB, scores, &lse, F);
    const struct cudnn_tensor p = cudnn_pointwise(b, CUDNN_POINTWISE_EXP, fused_masked(b, k, logs), NULL, F);
    fused_group_gradient(b, k, FUSED_DV, p, dout);

    const struct cudnn_tensor dp = cudnn_matmul(b, dout, vt, F);
    const struct cudnn_tensor centered = cudnn_pointwise(b, CUDNN_POINTWISE_SUB, dp, &row_sums, F);
    const struct cudnn_tensor unscaled = cudnn_pointwise(b, CUDNN_POINTWISE_MUL, centered, &p, F);
    const struct cudnn_tensor ds = cudnn_pointwise(b, CUDNN_POINTWISE_MUL, unscaled, &scale, F);
    fused_group_gradient(b, k, FUSED_DK, ds, q);

    const struct cudnn_tensor keys = cudnn_transposed(b, kt.tensor, CUDNN_DATA_BFLOAT16, kt.strides);
    if (k->order == FUSED_SUM_NONE) {
        cudnn_matmul_to(b, ds, keys, dq);
        return;
    }
    const int64_t dims[CUDNN_RANK] = {k->B, k->heads, k->T, k->head_dim};
    const struct cudnn_tensor dq_sum = cudnn_dense(b, FUSED_DQ_SUM, F, dims, CUDNN_IN_MEMORY);
    cudnn_matmul_to(b, ds, keys, dq_sum);
    cudnn_pointwise_to(b, copy, dq_sum, NULL, NULL, dq);
}
