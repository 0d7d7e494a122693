// Builds the graphs of operations that cuDNN's engines take for attention, forward and backward, for tests of
// test/emu/cudnn.cpp. The library is called through the functions that dlsym finds.
#pragma once
#include "test/emu/cudnn.h"
#include <cmath>   // INFINITY
#include <dlfcn.h> // dlopen
#include <string>  // std::string
#include <vector>  // std::vector

struct cudnn_library {
    void *library;
    size_t (*GetVersion)(void);
    void (*GetLastErrorString)(char *, size_t);
    cudnnStatus_t (*Create)(cudnnHandle_t *);
    cudnnStatus_t (*Destroy)(cudnnHandle_t);
    cudnnStatus_t (*SetStream)(cudnnHandle_t, struct emu_stream *);
    cudnnStatus_t (*CreateDescriptor)(cudnnBackendDescriptorType_t, cudnnBackendDescriptor_t *);
    cudnnStatus_t (*DestroyDescriptor)(cudnnBackendDescriptor_t);
    cudnnStatus_t (*Finalize)(cudnnBackendDescriptor_t);
    cudnnStatus_t (*SetAttribute)(cudnnBackendDescriptor_t, cudnnBackendAttributeName_t, cudnnBackendAttributeType_t,
                                  int64_t, const void *);
    cudnnStatus_t (*GetAttribute)(cudnnBackendDescriptor_t, cudnnBackendAttributeName_t, cudnnBackendAttributeType_t,
                                  int64_t, int64_t *, void *);
    cudnnStatus_t (*Execute)(cudnnHandle_t, cudnnBackendDescriptor_t, cudnnBackendDescriptor_t);
};
// Loads a library; returns false where there is none.
static bool cudnn_open(struct cudnn_library *cudnn, const char *name) {
    cudnn->library = dlopen(name, RTLD_NOW);
    if (!cudnn->library)
        return false;
#define CUDNN_FIND(member, symbol) *(void **)&cudnn->member = dlsym(cudnn->library, symbol)
    CUDNN_FIND(GetVersion, "cudnnGetVersion");
    CUDNN_FIND(GetLastErrorString, "cudnnGetLastErrorString");
    CUDNN_FIND(Create, "cudnnCreate");
    CUDNN_FIND(Destroy, "cudnnDestroy");
    CUDNN_FIND(SetStream, "cudnnSetStream");
    CUDNN_FIND(CreateDescriptor, "cudnnBackendCreateDescriptor");
    CUDNN_FIND(DestroyDescriptor, "cudnnBackendDestroyDescriptor");
    CUDNN_FIND(Finalize, "cudnnBackendFinalize");
    CUDNN_FIND(SetAttribute, "cudnnBackendSetAttribute");
    CUDNN_FIND(GetAttribute, "cudnnBackendGetAttribute");
    CUDNN_FIND(Execute, "cudnnBackendExecute");
#undef CUDNN_FIND
    return true;
}

// Descriptors of one graph, destroyed together. status: the first that was not success; message: what the library said
// of it; at: which call returned it.
struct cudnn_builder {
    const struct cudnn_library *cudnn;
    std::vector<cudnnBackendDescriptor_t> all, ops;
    std::vector<int64_t> uids; // of tensors that are not virtual
    cudnnStatus_t status = CUDNN_STATUS_SUCCESS;
    std::string message, at;

    explicit cudnn_builder(const struct cudnn_library *library) : cudnn(library) {}
    ~cudnn_builder() {
        for (size_t i = all.size(); i-- > 0;)
            cudnn->DestroyDescriptor(all[i]);
    }
    bool hold(cudnnStatus_t found, const std::string &what) {
        if (found != CUDNN_STATUS_SUCCESS && status == CUDNN_STATUS_SUCCESS) {
            char text[1024] = "";
            cudnn->GetLastErrorString(text, sizeof text);
            status = found;
            message = text;
            at = what;
        }
        return found == CUDNN_STATUS_SUCCESS;
    }
    cudnnBackendDescriptor_t make(cudnnBackendDescriptorType_t type) {
        cudnnBackendDescriptor_t made = nullptr;
        if (hold(cudnn->CreateDescriptor(type, &made), "create"))
            all.push_back(made);
        return made;
    }
    void set(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
             int64_t count, const void *values) {
        hold(cudnn->SetAttribute(d, name, type, count, values), "attribute " + std::to_string((int)name));
    }
    void set(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name, cudnnBackendDescriptor_t other) {
        set(d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &other);
    }
    cudnnBackendDescriptor_t finalize(cudnnBackendDescriptor_t d, const char *what) {
        hold(cudnn->Finalize(d), what);
        return d;
    }

    enum kind { VIRTUAL, MEMORY, VALUE };
    typedef std::vector<int64_t> sizes;
    static sizes packed(const sizes &dims) {
        sizes strides(dims.size(), 1);
        for (size_t i = dims.size() - 1; i-- > 0;)
            strides[i] = strides[i + 1] * dims[i + 1];
        return strides;
    }
    cudnnBackendDescriptor_t tensor(int64_t uid, cudnnDataType_t type, const sizes &dims, const sizes &strides,
                                    enum kind kind, int64_t alignment = 16) {
        cudnnBackendDescriptor_t d = make(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
        const bool is_virtual = kind == VIRTUAL, is_value = kind == VALUE;
        set(d, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
        set(d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, (int64_t)dims.size(), dims.data());
        set(d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, (int64_t)strides.size(), strides.data());
        set(d, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &uid);
        set(d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment);
        set(d, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &is_virtual);
        set(d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &is_value);
        if (!is_virtual)
            uids.push_back(uid);
        return finalize(d, "tensor");
    }
    int64_t next_uid = 1000;
    cudnnBackendDescriptor_t between(const sizes &dims, cudnnDataType_t type = CUDNN_DATA_FLOAT, sizes strides = {}) {
        return tensor(next_uid++, type, dims, strides.empty() ? packed(dims) : strides, VIRTUAL);
    }
    void matmul(cudnnBackendDescriptor_t a, cudnnBackendDescriptor_t b, cudnnBackendDescriptor_t c) {
        const cudnnDataType_t compute = CUDNN_DATA_FLOAT;
        cudnnBackendDescriptor_t how = make(CUDNN_BACKEND_MATMUL_DESCRIPTOR);
        set(how, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &compute);
        finalize(how, "matmul");
        cudnnBackendDescriptor_t op = make(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
        set(op, CUDNN_ATTR_OPERATION_MATMUL_DESC, how);
        set(op, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
        set(op, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
        set(op, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
        ops.push_back(finalize(op, "matmul operation"));
    }
    // Adds a pointwise operation. b, t: NULL where the mode has no such operand; axis: -1 where it has none.
    void pointwise(cudnnPointwiseMode_t mode, cudnnBackendDescriptor_t x, cudnnBackendDescriptor_t b,
                   cudnnBackendDescriptor_t t, cudnnBackendDescriptor_t y, int64_t axis = -1,
                   cudnnDataType_t compute = CUDNN_DATA_FLOAT) {
        cudnnBackendDescriptor_t how = make(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
        set(how, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
        set(how, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &compute);
        if (axis >= 0)
            set(how, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &axis);
        finalize(how, "pointwise");
        cudnnBackendDescriptor_t op = make(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
        set(op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how);
        set(op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
        if (b)
            set(op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
        if (t)
            set(op, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t);
        set(op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
        ops.push_back(finalize(op, "pointwise operation"));
    }
    void reduction(cudnnReduceTensorOp_t sum, cudnnBackendDescriptor_t x, cudnnBackendDescriptor_t y) {
        const cudnnDataType_t compute = CUDNN_DATA_FLOAT;
        cudnnBackendDescriptor_t how = make(CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
        set(how, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &sum);
        set(how, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &compute);
        finalize(how, "reduction");
        cudnnBackendDescriptor_t op = make(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
        set(op, CUDNN_ATTR_OPERATION_REDUCTION_DESC, how);
        set(op, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
        set(op, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
        ops.push_back(finalize(op, "reduction operation"));
    }
    void reshape(cudnnBackendDescriptor_t x, cudnnBackendDescriptor_t y) {
        cudnnBackendDescriptor_t op = make(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
        set(op, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
        set(op, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
        ops.push_back(finalize(op, "reshape operation"));
    }
    cudnnBackendDescriptor_t graph(cudnnHandle_t handle) {
        cudnnBackendDescriptor_t d = make(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
        set(d, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, (int64_t)ops.size(), ops.data());
        if (handle)
            set(d, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
        return finalize(d, "graph");
    }
};

// Flaws of a graph that no engine takes: p in fp32, no stats, an operation beside attention's.
enum cudnn_flaw { CUDNN_NO_FLAW, CUDNN_FP32_P, CUDNN_NO_STATS, CUDNN_MORE };
// Sizes of an attention. Tensors are (batch, heads, queries or keys, width), and lie in memory as (batch, sequence,
// heads, width).
struct cudnn_attention {
    int64_t batch, heads, kv_heads, queries, keys, width;
    int64_t row, kv_row; // elements from one position to the next: row of q, kv_row of k and v
    bool causal, add_dq; // add_dq: dQ is summed in memory, in no fixed order
    cudnnDataType_t type;
    enum cudnn_flaw flaw; // the forward graph's
    bool operation;       // forward is one operation
};
enum {
    UID_Q = 1,
    UID_K,
    UID_V,
    UID_O,
    UID_STATS,
    UID_SCALE,
    UID_MASKED,
    UID_DO,
    UID_DQ,
    UID_DK,
    UID_DV,
    UID_DQ_SUM,
    UID_ROW_SUM,
    UID_ONE
};

static cudnn_builder::sizes cudnn_strides(int64_t length, int64_t row, int64_t width, bool transposed) {
    if (transposed)
        return {length * row, width, 1, row};
    return {length * row, width, row, 1};
}
static cudnnBackendDescriptor_t cudnn_mask(struct cudnn_builder *g, const struct cudnn_attention *a,
                                           cudnnBackendDescriptor_t scores) {
    if (!a->causal)
        return scores;
    const cudnn_builder::sizes dims = {a->batch, a->heads, a->queries, a->keys};
    cudnnBackendDescriptor_t row = g->between(dims, CUDNN_DATA_INT32), column = g->between(dims, CUDNN_DATA_INT32);
    cudnnBackendDescriptor_t seen = g->between(dims, CUDNN_DATA_BOOLEAN), masked = g->between(dims);
    cudnnBackendDescriptor_t none = g->tensor(UID_MASKED, CUDNN_DATA_FLOAT, {1, 1, 1, 1}, {1, 1, 1, 1}, g->VALUE, 4);
    g->pointwise(CUDNN_POINTWISE_GEN_INDEX, scores, nullptr, nullptr, row, 2);
    g->pointwise(CUDNN_POINTWISE_GEN_INDEX, scores, nullptr, nullptr, column, 3);
    g->pointwise(CUDNN_POINTWISE_CMP_GE, row, column, nullptr, seen, -1, CUDNN_DATA_BOOLEAN);
    g->pointwise(CUDNN_POINTWISE_BINARY_SELECT, scores, none, seen, masked);
    return masked;
}
// The attributes and the mask of forward as one operation; a test may change them before they are used.
struct cudnn_sdpa_operation {
    cudnnBackendDescriptor_t q, k, v, o, stats, scale, mask; // NULL: not set
    int64_t in, out;                                         // unique ids of the mask's input and output; -1: not set
};
static void cudnn_add_sdpa(struct cudnn_builder *g, const struct cudnn_sdpa_operation &s) {
    const std::pair<cudnnBackendAttributeName_t, cudnnBackendDescriptor_t> all[] = {
        {CUDNN_ATTR_OPERATION_SDPA_FWD_QDESC, s.q},         {CUDNN_ATTR_OPERATION_SDPA_FWD_KDESC, s.k},
        {CUDNN_ATTR_OPERATION_SDPA_FWD_VDESC, s.v},         {CUDNN_ATTR_OPERATION_SDPA_FWD_ODESC, s.o},
        {CUDNN_ATTR_OPERATION_SDPA_FWD_STATSDESC, s.stats}, {CUDNN_ATTR_OPERATION_SDPA_FWD_SCALEDESC, s.scale},
        {CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH, s.mask}};
    cudnnBackendDescriptor_t op = g->make(CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR);
    for (const auto &one : all)
        if (one.second && op)
            g->set(op, one.first, one.second);
    if (s.in >= 0)
        g->set(op, CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_INPUT_UID, CUDNN_TYPE_INT64, 1, &s.in);
    if (s.out >= 0)
        g->set(op, CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_OUTPUT_UID, CUDNN_TYPE_INT64, 1, &s.out);
    g->ops = {g->finalize(op, "attention")};
}
static struct cudnn_sdpa_operation cudnn_sdpa_of(struct cudnn_builder *g, const struct cudnn_attention *a) {
    const int64_t B = a->batch, H = a->heads, G = a->kv_heads, T = a->queries, S = a->keys, D = a->width;
    struct cudnn_sdpa_operation s = {};
    s.q = g->tensor(UID_Q, a->type, {B, H, T, D}, cudnn_strides(T, a->row, D, false), g->MEMORY);
    s.k = g->tensor(UID_K, a->type, {B, G, S, D}, cudnn_strides(S, a->kv_row, D, false), g->MEMORY);
    s.v = g->tensor(UID_V, a->type, {B, G, S, D}, cudnn_strides(S, a->kv_row, D, false), g->MEMORY);
    s.o = g->tensor(UID_O, a->type, {B, H, T, D}, cudnn_strides(T, H * D, D, false), g->MEMORY);
    s.stats = g->tensor(UID_STATS, CUDNN_DATA_FLOAT, {B, H, T, 1}, {H * T, T, 1, 1}, g->MEMORY);
    s.scale = g->tensor(UID_SCALE, CUDNN_DATA_FLOAT, {1, 1, 1, 1}, {1, 1, 1, 1}, g->VALUE, 4);
    s.in = s.out = -1;
    if (a->causal) {
        s.in = g->next_uid;
        cudnn_mask(g, a, g->between({B, H, T, S}));
        s.out = g->next_uid - 1; // the mask's last tensor
        s.mask = g->graph(NULL);
        g->ops.clear();
    }
    return s;
}
static cudnnBackendDescriptor_t cudnn_forward_graph(struct cudnn_builder *g, const struct cudnn_attention *a,
                                                    cudnnHandle_t handle) {
    if (a->operation) {
        cudnn_add_sdpa(g, cudnn_sdpa_of(g, a));
        return g->graph(handle);
    }
    const int64_t B = a->batch, H = a->heads, G = a->kv_heads, T = a->queries, S = a->keys, D = a->width;
    const cudnn_builder::sizes scores = {B, H, T, S}, rows = {B, H, T, 1};
    auto q = g->tensor(UID_Q, a->type, {B, H, T, D}, cudnn_strides(T, a->row, D, false), g->MEMORY);
    auto k = g->tensor(UID_K, a->type, {B, G, D, S}, cudnn_strides(S, a->kv_row, D, true), g->MEMORY);
    auto v = g->tensor(UID_V, a->type, {B, G, S, D}, cudnn_strides(S, a->kv_row, D, false), g->MEMORY);
    auto scale = g->tensor(UID_SCALE, CUDNN_DATA_FLOAT, {1, 1, 1, 1}, {1, 1, 1, 1}, g->VALUE, 4);
    auto s = g->between(scores), scaled = g->between(scores);
    g->matmul(q, k, s);
    g->pointwise(CUDNN_POINTWISE_MUL, s, scale, nullptr, scaled);
    auto masked = cudnn_mask(g, a, scaled);
    auto max = g->between(rows), shifted = g->between(scores), e = g->between(scores), sum = g->between(rows);
    g->reduction(CUDNN_REDUCE_TENSOR_MAX, masked, max);
    g->pointwise(CUDNN_POINTWISE_SUB, masked, max, nullptr, shifted);
    g->pointwise(CUDNN_POINTWISE_EXP, shifted, nullptr, nullptr, e);
    g->reduction(CUDNN_REDUCE_TENSOR_ADD, e, sum);
    auto log = g->between(rows);
    auto stats = g->tensor(UID_STATS, CUDNN_DATA_FLOAT, rows, {H * T, T, 1, 1}, g->MEMORY);
    if (a->flaw != CUDNN_NO_STATS) {
        g->pointwise(CUDNN_POINTWISE_LOG, sum, nullptr, nullptr, log);
        g->pointwise(CUDNN_POINTWISE_ADD, max, log, nullptr, stats);
    }
    auto p = g->between(scores, a->flaw == CUDNN_FP32_P ? CUDNN_DATA_FLOAT : a->type);
    g->pointwise(CUDNN_POINTWISE_DIV, e, sum, nullptr, p);
    auto o = g->tensor(UID_O, a->type, {B, H, T, D}, cudnn_strides(T, H * D, D, false), g->MEMORY);
    g->matmul(p, v, o);
    if (a->flaw == CUDNN_MORE)
        g->pointwise(CUDNN_POINTWISE_NEG, sum, nullptr, nullptr,
                     g->tensor(UID_ROW_SUM, CUDNN_DATA_FLOAT, rows, {H * T, T, 1, 1}, g->MEMORY));
    return g->graph(handle);
}
static cudnnBackendDescriptor_t cudnn_backward_graph(struct cudnn_builder *g, const struct cudnn_attention *a,
                                                     cudnnHandle_t handle) {
    const int64_t B = a->batch, H = a->heads, G = a->kv_heads, T = a->queries, S = a->keys, D = a->width;
    const cudnn_builder::sizes scores = {B, H, T, S}, turned = {B, H, S, T}, rows = {B, H, T, 1}, one = {1, 1, 1, 1};
    const cudnn_builder::sizes turned_strides = {H * T * S, T * S, 1, S};
    auto q = g->tensor(UID_Q, a->type, {B, H, T, D}, cudnn_strides(T, a->row, D, false), g->MEMORY);
    auto k = g->tensor(UID_K, a->type, {B, G, D, S}, cudnn_strides(S, a->kv_row, D, true), g->MEMORY);
    auto v = g->tensor(UID_V, a->type, {B, G, D, S}, cudnn_strides(S, a->kv_row, D, true), g->MEMORY);
    auto o = g->tensor(UID_O, a->type, {B, H, T, D}, cudnn_strides(T, H * D, D, false), g->MEMORY);
    auto d_o = g->tensor(UID_DO, a->type, {B, H, T, D}, cudnn_strides(T, H * D, D, false), g->MEMORY);
    auto stats = g->tensor(UID_STATS, CUDNN_DATA_FLOAT, rows, {H * T, T, 1, 1}, g->MEMORY);
    auto scale = g->tensor(UID_SCALE, CUDNN_DATA_FLOAT, one, one, g->VALUE, 4);
    auto unit = g->tensor(UID_ONE, CUDNN_DATA_FLOAT, one, one, g->VALUE, 4);
    auto product = g->between({B, H, T, D}), product_sum = g->between(rows);
    auto row_sum = g->tensor(UID_ROW_SUM, CUDNN_DATA_FLOAT, rows, {H * T, T, 1, 1}, g->MEMORY);
    g->pointwise(CUDNN_POINTWISE_MUL, d_o, o, nullptr, product);
    g->reduction(CUDNN_REDUCE_TENSOR_ADD, product, product_sum);
    g->pointwise(CUDNN_POINTWISE_MUL, product_sum, unit, nullptr, row_sum);
    auto s = g->between(scores), scaled = g->between(scores), shifted = g->between(scores), p = g->between(scores);
    g->matmul(q, k, s);
    g->pointwise(CUDNN_POINTWISE_MUL, s, scale, nullptr, scaled);
    g->pointwise(CUDNN_POINTWISE_SUB, scaled, stats, nullptr, shifted);
    g->pointwise(CUDNN_POINTWISE_EXP, cudnn_mask(g, a, shifted), nullptr, nullptr, p);
    auto dv = g->tensor(UID_DV, a->type, {B, G, S, D}, cudnn_strides(S, a->kv_row, D, false), g->MEMORY);
    auto dk = g->tensor(UID_DK, a->type, {B, G, S, D}, cudnn_strides(S, a->kv_row, D, false), g->MEMORY);
    auto dq = g->tensor(UID_DQ, a->type, {B, H, T, D}, cudnn_strides(T, a->row, D, false), g->MEMORY);
    auto dv_heads = H == G ? dv : g->between({B, H, S, D}, a->type),
         dk_heads = H == G ? dk : g->between({B, H, S, D}, a->type);
    auto p_turned = g->between(turned, a->type, turned_strides),
         ds_turned = g->between(turned, a->type, turned_strides);
    g->reshape(p, p_turned);
    g->matmul(p_turned, d_o, dv_heads);
    if (H != G)
        g->reduction(CUDNN_REDUCE_TENSOR_ADD, dv_heads, dv);
    auto dp = g->between(scores), less = g->between(scores), times = g->between(scores), ds = g->between(scores);
    g->matmul(d_o, v, dp);
    g->pointwise(CUDNN_POINTWISE_SUB, dp, row_sum, nullptr, less);
    g->pointwise(CUDNN_POINTWISE_MUL, less, p, nullptr, times);
    g->pointwise(CUDNN_POINTWISE_MUL, times, scale, nullptr, ds);
    g->reshape(ds, ds_turned);
    g->matmul(ds_turned, q, dk_heads);
    if (H != G)
        g->reduction(CUDNN_REDUCE_TENSOR_ADD, dk_heads, dk);
    auto k_turned = g->between({B, G, S, D}, a->type, cudnn_strides(S, a->kv_row, D, false));
    g->reshape(k, k_turned);
    if (a->add_dq) {
        auto dq_sum = g->tensor(UID_DQ_SUM, CUDNN_DATA_FLOAT, {B, H, T, D}, g->packed({B, H, T, D}), g->MEMORY);
        g->matmul(ds, k_turned, dq_sum);
        g->pointwise(CUDNN_POINTWISE_IDENTITY, dq_sum, nullptr, nullptr, dq);
    } else
        g->matmul(ds, k_turned, dq);
    return g->graph(handle);
}
