// Tensors, operations and graphs of test/emu/cudnn.cpp: what each is held to when it is finalized.
#pragma once
#include "test/emu/cudnn_descriptors.h"
#include <algorithm> // std::sort
#include <set>       // std::set

struct emu_cudnn_tensor {
    int64_t uid, alignment;
    cudnnDataType_t type;
    std::vector<int64_t> dims, strides;
    bool is_virtual, by_value;
};
static bool emu_cudnn_same(const emu_cudnn_tensor &a, const emu_cudnn_tensor &b) {
    return a.uid == b.uid && a.alignment == b.alignment && a.type == b.type && a.dims == b.dims &&
           a.strides == b.strides && a.is_virtual == b.is_virtual && a.by_value == b.by_value;
}
static emu_cudnn_tensor emu_cudnn_tensor_of(const emu_cudnn_descriptor &d) {
    return {emu_cudnn_get<int64_t>(d, CUDNN_ATTR_TENSOR_UNIQUE_ID, 0),
            emu_cudnn_get<int64_t>(d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, 0),
            emu_cudnn_get(d, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_DATA_FLOAT),
            emu_cudnn_get_all<int64_t>(d, CUDNN_ATTR_TENSOR_DIMENSIONS),
            emu_cudnn_get_all<int64_t>(d, CUDNN_ATTR_TENSOR_STRIDES),
            emu_cudnn_get(d, CUDNN_ATTR_TENSOR_IS_VIRTUAL, false),
            emu_cudnn_get(d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, false)};
}
// Returns the bytes of an element; 0: the type is not modeled.
static int64_t emu_cudnn_type_bytes(cudnnDataType_t type) {
    switch (type) {
    case CUDNN_DATA_FLOAT:
    case CUDNN_DATA_INT32: return 4;
    case CUDNN_DATA_HALF:
    case CUDNN_DATA_BFLOAT16: return 2;
    case CUDNN_DATA_BOOLEAN:
    case CUDNN_DATA_FP8_E4M3:
    case CUDNN_DATA_FP8_E5M2: return 1;
    case CUDNN_DATA_DOUBLE:
    case CUDNN_DATA_INT64: return 8;
    }
    return 0;
}
static bool emu_cudnn_is_16bit(cudnnDataType_t type) { return type == CUDNN_DATA_HALF || type == CUDNN_DATA_BFLOAT16; }
static bool emu_cudnn_is_fp8(cudnnDataType_t type) {
    return type == CUDNN_DATA_FP8_E4M3 || type == CUDNN_DATA_FP8_E5M2;
}
static int64_t emu_cudnn_count(const emu_cudnn_tensor &t) {
    int64_t count = 1;
    for (const int64_t dim : t.dims)
        count *= dim;
    return count;
}
// The number of elements from a tensor's first to its last one in memory.
static int64_t emu_cudnn_extent(const emu_cudnn_tensor &t) {
    int64_t extent = 1;
    for (size_t i = 0; i < t.dims.size(); i++)
        extent += (t.dims[i] - 1) * t.strides[i];
    return extent;
}

static cudnnStatus_t emu_cudnn_finalize_tensor(const emu_cudnn_descriptor &d) {
    const emu_cudnn_tensor t = emu_cudnn_tensor_of(d);
    const int64_t bytes = emu_cudnn_type_bytes(t.type);
    EMU_CUDNN_HOLD(bytes > 0, CUDNN_STATUS_NOT_SUPPORTED, "tensor %lld: type %d is not modeled", (long long)t.uid,
                   t.type);
    EMU_CUDNN_HOLD(t.dims.size() == t.strides.size(), CUDNN_STATUS_BAD_PARAM,
                   "tensor %lld: %zu dimensions and %zu strides", (long long)t.uid, t.dims.size(), t.strides.size());
    EMU_CUDNN_HOLD(t.alignment > 0 && t.alignment % bytes == 0, CUDNN_STATUS_BAD_PARAM,
                   "tensor %lld: an alignment of %lld bytes, elements of %lld", (long long)t.uid,
                   (long long)t.alignment, (long long)bytes);
    EMU_CUDNN_HOLD(!t.is_virtual || !t.by_value, CUDNN_STATUS_BAD_PARAM, "tensor %lld is virtual and a value",
                   (long long)t.uid);
    EMU_CUDNN_HOLD(!t.by_value || emu_cudnn_count(t) == 1, CUDNN_STATUS_BAD_PARAM,
                   "tensor %lld: a value of %lld elements", (long long)t.uid, (long long)emu_cudnn_count(t));
    std::vector<std::pair<int64_t, int64_t>> steps;
    for (size_t i = 0; i < t.dims.size(); i++) {
        EMU_CUDNN_HOLD(t.dims[i] >= 1 && t.strides[i] >= 1, CUDNN_STATUS_BAD_PARAM,
                       "tensor %lld: dimension %zu is %lld, its stride %lld", (long long)t.uid, i, (long long)t.dims[i],
                       (long long)t.strides[i]);
        if (t.dims[i] > 1)
            steps.push_back({t.strides[i], t.dims[i]});
    }
    std::sort(steps.begin(), steps.end());
    int64_t covered = 1;
    for (const auto &step : steps) {
        EMU_CUDNN_HOLD(step.first >= covered, CUDNN_STATUS_BAD_PARAM,
                       "tensor %lld: a stride of %lld, within which %lld elements lie", (long long)t.uid,
                       (long long)step.first, (long long)covered);
        covered += (step.second - 1) * step.first;
    }
    return CUDNN_STATUS_SUCCESS;
}

// ---- operations ----

enum emu_cudnn_kind { EMU_POINTWISE, EMU_MATMUL, EMU_REDUCTION, EMU_RESHAPE };
// An operation; x, b, t and y are unique ids of tensors. Pointwise: operands x, b, t and output y. Products: x is A, b
// is B, y is C. has_b, has_t: whether there are such operands.
struct emu_cudnn_operation {
    enum emu_cudnn_kind kind;
    cudnnPointwiseMode_t mode;
    cudnnReduceTensorOp_t sum;
    cudnnDataType_t compute;
    int64_t axis, x, b, t, y;
    bool has_b, has_t;
};

// The number of operands of a mode, without y; 0: the mode is not modeled.
static int emu_cudnn_operands(cudnnPointwiseMode_t mode) {
    switch (mode) {
    case CUDNN_POINTWISE_ADD:
    case CUDNN_POINTWISE_MUL:
    case CUDNN_POINTWISE_MIN:
    case CUDNN_POINTWISE_MAX:
    case CUDNN_POINTWISE_DIV:
    case CUDNN_POINTWISE_SUB:
    case CUDNN_POINTWISE_CMP_EQ:
    case CUDNN_POINTWISE_CMP_NEQ:
    case CUDNN_POINTWISE_CMP_GT:
    case CUDNN_POINTWISE_CMP_GE:
    case CUDNN_POINTWISE_CMP_LT:
    case CUDNN_POINTWISE_CMP_LE:
    case CUDNN_POINTWISE_LOGICAL_AND:
    case CUDNN_POINTWISE_LOGICAL_OR: return 2;
    case CUDNN_POINTWISE_SQRT:
    case CUDNN_POINTWISE_EXP:
    case CUDNN_POINTWISE_LOG:
    case CUDNN_POINTWISE_NEG:
    case CUDNN_POINTWISE_RSQRT:
    case CUDNN_POINTWISE_IDENTITY:
    case CUDNN_POINTWISE_RECIPROCAL:
    case CUDNN_POINTWISE_LOGICAL_NOT:
    case CUDNN_POINTWISE_GEN_INDEX: return 1;
    case CUDNN_POINTWISE_BINARY_SELECT: return 3;
    }
    return 0;
}
static cudnnStatus_t emu_cudnn_finalize_compute(const emu_cudnn_descriptor &d, cudnnBackendAttributeName_t name) {
    const cudnnDataType_t compute = emu_cudnn_get(d, name, CUDNN_DATA_FLOAT);
    const bool integers =
        d.type == CUDNN_BACKEND_POINTWISE_DESCRIPTOR && (compute == CUDNN_DATA_INT32 || compute == CUDNN_DATA_BOOLEAN);
    EMU_CUDNN_HOLD(compute == CUDNN_DATA_FLOAT || integers, CUDNN_STATUS_NOT_SUPPORTED, "computed in type %d", compute);
    return CUDNN_STATUS_SUCCESS;
}
static cudnnStatus_t emu_cudnn_finalize_pointwise(const emu_cudnn_descriptor &d) {
    const cudnnPointwiseMode_t mode = emu_cudnn_get(d, CUDNN_ATTR_POINTWISE_MODE, CUDNN_POINTWISE_ADD);
    const bool has_axis = d.values.count(CUDNN_ATTR_POINTWISE_AXIS) > 0;
    EMU_CUDNN_HOLD(emu_cudnn_operands(mode) > 0, CUDNN_STATUS_NOT_SUPPORTED, "pointwise mode %d is not modeled", mode);
    EMU_CUDNN_HOLD(mode != CUDNN_POINTWISE_GEN_INDEX || has_axis, CUDNN_STATUS_BAD_PARAM, "GEN_INDEX without an axis");
    EMU_CUDNN_HOLD(emu_cudnn_get<int64_t>(d, CUDNN_ATTR_POINTWISE_AXIS, 0) >= 0, CUDNN_STATUS_BAD_PARAM,
                   "a negative axis");
    return emu_cudnn_finalize_compute(d, CUDNN_ATTR_POINTWISE_MATH_PREC);
}

static emu_cudnn_tensor emu_cudnn_operand(const emu_cudnn_descriptor &d, cudnnBackendAttributeName_t name) {
    return emu_cudnn_tensor_of(*emu_cudnn_other(d, name));
}
static cudnnStatus_t emu_cudnn_finalize_pointwise_operation(const emu_cudnn_descriptor &d) {
    const emu_cudnn_descriptor &how = *emu_cudnn_other(d, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
    const cudnnPointwiseMode_t mode = emu_cudnn_get(how, CUDNN_ATTR_POINTWISE_MODE, CUDNN_POINTWISE_ADD);
    const bool has_b = d.values.count(CUDNN_ATTR_OPERATION_POINTWISE_BDESC) > 0;
    const bool has_t = d.values.count(CUDNN_ATTR_OPERATION_POINTWISE_TDESC) > 0;
    const int operands = emu_cudnn_operands(mode);
    EMU_CUDNN_HOLD(has_b == (operands >= 2) && has_t == (operands >= 3), CUDNN_STATUS_BAD_PARAM,
                   "pointwise mode %d takes %d operands, not %d", mode, operands, 1 + has_b + has_t);
    const emu_cudnn_tensor y = emu_cudnn_operand(d, CUDNN_ATTR_OPERATION_POINTWISE_YDESC);
    std::vector<emu_cudnn_tensor> from = {emu_cudnn_operand(d, CUDNN_ATTR_OPERATION_POINTWISE_XDESC)};
    if (has_b)
        from.push_back(emu_cudnn_operand(d, CUDNN_ATTR_OPERATION_POINTWISE_BDESC));
    if (has_t)
        from.push_back(emu_cudnn_operand(d, CUDNN_ATTR_OPERATION_POINTWISE_TDESC));
    for (const emu_cudnn_tensor &x : from) {
        EMU_CUDNN_HOLD(x.uid != y.uid, CUDNN_STATUS_BAD_PARAM, "tensor %lld is read and written", (long long)y.uid);
        EMU_CUDNN_HOLD(x.dims.size() == y.dims.size(), CUDNN_STATUS_BAD_PARAM, "%zu dimensions and %zu", x.dims.size(),
                       y.dims.size());
        for (size_t i = 0; i < y.dims.size(); i++)
            EMU_CUDNN_HOLD(x.dims[i] == y.dims[i] || x.dims[i] == 1, CUDNN_STATUS_BAD_PARAM,
                           "dimension %zu: %lld of tensor %lld can't be broadcast to %lld", i, (long long)x.dims[i],
                           (long long)x.uid, (long long)y.dims[i]);
    }
    EMU_CUDNN_HOLD(emu_cudnn_get<int64_t>(how, CUDNN_ATTR_POINTWISE_AXIS, 0) < (int64_t)y.dims.size(),
                   CUDNN_STATUS_BAD_PARAM, "the axis is not one of the %zu dimensions", y.dims.size());
    const bool to_boolean = mode >= CUDNN_POINTWISE_CMP_EQ && mode <= CUDNN_POINTWISE_LOGICAL_NOT;
    EMU_CUDNN_HOLD(!to_boolean || y.type == CUDNN_DATA_BOOLEAN, CUDNN_STATUS_BAD_PARAM,
                   "pointwise mode %d gives booleans, tensor %lld holds type %d", mode, (long long)y.uid, y.type);
    EMU_CUDNN_HOLD(!has_t || from[2].type == CUDNN_DATA_BOOLEAN, CUDNN_STATUS_BAD_PARAM,
                   "BINARY_SELECT by tensor %lld of type %d", (long long)from.back().uid, from.back().type);
    EMU_CUDNN_HOLD(!y.by_value, CUDNN_STATUS_BAD_PARAM, "the output %lld is a value", (long long)y.uid);
    return CUDNN_STATUS_SUCCESS;
}
// Checks a product. Along a batch dimension, such as heads, the operand that has fewer is shared by the other's.
static cudnnStatus_t emu_cudnn_finalize_matmul_operation(const emu_cudnn_descriptor &d) {
    const emu_cudnn_tensor a = emu_cudnn_operand(d, CUDNN_ATTR_OPERATION_MATMUL_ADESC),
                           b = emu_cudnn_operand(d, CUDNN_ATTR_OPERATION_MATMUL_BDESC),
                           c = emu_cudnn_operand(d, CUDNN_ATTR_OPERATION_MATMUL_CDESC);
    const size_t n = c.dims.size();
    EMU_CUDNN_HOLD(n >= 3 && a.dims.size() == n && b.dims.size() == n, CUDNN_STATUS_BAD_PARAM,
                   "a product of %zu and %zu dimensions to %zu", a.dims.size(), b.dims.size(), n);
    EMU_CUDNN_HOLD(a.dims[n - 1] == b.dims[n - 2] && a.dims[n - 2] == c.dims[n - 2] && b.dims[n - 1] == c.dims[n - 1],
                   CUDNN_STATUS_BAD_PARAM, "a product of %lld x %lld by %lld x %lld to %lld x %lld",
                   (long long)a.dims[n - 2], (long long)a.dims[n - 1], (long long)b.dims[n - 2],
                   (long long)b.dims[n - 1], (long long)c.dims[n - 2], (long long)c.dims[n - 1]);
    for (size_t i = 0; i + 2 < n; i++)
        EMU_CUDNN_HOLD((a.dims[i] % b.dims[i] == 0 || b.dims[i] % a.dims[i] == 0) &&
                           c.dims[i] == std::max(a.dims[i], b.dims[i]),
                       CUDNN_STATUS_BAD_PARAM, "batch dimension %zu: %lld by %lld to %lld", i, (long long)a.dims[i],
                       (long long)b.dims[i], (long long)c.dims[i]);
    EMU_CUDNN_HOLD(c.uid != a.uid && c.uid != b.uid && !c.by_value, CUDNN_STATUS_BAD_PARAM,
                   "the output %lld is an operand or a value", (long long)c.uid);
    return CUDNN_STATUS_SUCCESS;
}
static cudnnStatus_t emu_cudnn_finalize_reduction_operation(const emu_cudnn_descriptor &d) {
    const emu_cudnn_tensor x = emu_cudnn_operand(d, CUDNN_ATTR_OPERATION_REDUCTION_XDESC),
                           y = emu_cudnn_operand(d, CUDNN_ATTR_OPERATION_REDUCTION_YDESC);
    EMU_CUDNN_HOLD(x.dims.size() == y.dims.size() && x.uid != y.uid && !y.by_value, CUDNN_STATUS_BAD_PARAM,
                   "a reduction of %zu dimensions to %zu, or in place", x.dims.size(), y.dims.size());
    for (size_t i = 0; i < y.dims.size(); i++)
        EMU_CUDNN_HOLD(x.dims[i] % y.dims[i] == 0, CUDNN_STATUS_BAD_PARAM, "dimension %zu: a reduction of %lld to %lld",
                       i, (long long)x.dims[i], (long long)y.dims[i]);
    return CUDNN_STATUS_SUCCESS;
}
static cudnnStatus_t emu_cudnn_finalize_reshape_operation(const emu_cudnn_descriptor &d) {
    const emu_cudnn_tensor x = emu_cudnn_operand(d, CUDNN_ATTR_OPERATION_RESHAPE_XDESC),
                           y = emu_cudnn_operand(d, CUDNN_ATTR_OPERATION_RESHAPE_YDESC);
    EMU_CUDNN_HOLD(emu_cudnn_count(x) == emu_cudnn_count(y) && emu_cudnn_extent(x) == emu_cudnn_extent(y) &&
                       x.uid != y.uid && !y.by_value,
                   CUDNN_STATUS_BAD_PARAM, "tensor %lld can't be reshaped to %lld: they don't hold the same elements",
                   (long long)x.uid, (long long)y.uid);
    return CUDNN_STATUS_SUCCESS;
}

// ---- graphs ----

struct emu_cudnn_graph {
    // each comes after those whose results it reads; in a graph within an operation, in any order
    std::vector<emu_cudnn_operation> operations;
    bool single; // it was one operation, which was expanded
    std::map<int64_t, emu_cudnn_tensor> tensors;
    std::map<int64_t, size_t> written_by; // unique id -> index of the operation
};

static emu_cudnn_operation emu_cudnn_operation_of(const emu_cudnn_descriptor &d) {
    emu_cudnn_operation o = {};
    const auto uid = [&d](cudnnBackendAttributeName_t name) {
        return d.values.count(name) ? emu_cudnn_operand(d, name).uid : 0;
    };
    if (d.type == CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR) {
        const emu_cudnn_descriptor &how = *emu_cudnn_other(d, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
        o.kind = EMU_POINTWISE;
        o.mode = emu_cudnn_get(how, CUDNN_ATTR_POINTWISE_MODE, CUDNN_POINTWISE_ADD);
        o.compute = emu_cudnn_get(how, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_DATA_FLOAT);
        o.axis = emu_cudnn_get<int64_t>(how, CUDNN_ATTR_POINTWISE_AXIS, 0);
        o.x = uid(CUDNN_ATTR_OPERATION_POINTWISE_XDESC);
        o.b = uid(CUDNN_ATTR_OPERATION_POINTWISE_BDESC);
        o.t = uid(CUDNN_ATTR_OPERATION_POINTWISE_TDESC);
        o.y = uid(CUDNN_ATTR_OPERATION_POINTWISE_YDESC);
        o.has_b = emu_cudnn_operands(o.mode) >= 2;
        o.has_t = emu_cudnn_operands(o.mode) >= 3;
    } else if (d.type == CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR) {
        o.kind = EMU_MATMUL;
        o.x = uid(CUDNN_ATTR_OPERATION_MATMUL_ADESC);
        o.b = uid(CUDNN_ATTR_OPERATION_MATMUL_BDESC);
        o.y = uid(CUDNN_ATTR_OPERATION_MATMUL_CDESC);
        o.has_b = true;
    } else if (d.type == CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR) {
        const emu_cudnn_descriptor &how = *emu_cudnn_other(d, CUDNN_ATTR_OPERATION_REDUCTION_DESC);
        o.kind = EMU_REDUCTION;
        o.sum = emu_cudnn_get(how, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_REDUCE_TENSOR_ADD);
        o.x = uid(CUDNN_ATTR_OPERATION_REDUCTION_XDESC);
        o.y = uid(CUDNN_ATTR_OPERATION_REDUCTION_YDESC);
    } else {
        o.kind = EMU_RESHAPE;
        o.x = uid(CUDNN_ATTR_OPERATION_RESHAPE_XDESC);
        o.y = uid(CUDNN_ATTR_OPERATION_RESHAPE_YDESC);
    }
    return o;
}
static std::vector<int64_t> emu_cudnn_reads(const emu_cudnn_operation &o) {
    std::vector<int64_t> reads = {o.x};
    if (o.has_b)
        reads.push_back(o.b);
    if (o.has_t)
        reads.push_back(o.t);
    return reads;
}
static cudnnStatus_t emu_cudnn_collect(emu_cudnn_graph *graph, const emu_cudnn_descriptor &operation) {
    for (const auto &value : operation.values)
        for (const emu_cudnn_reference &other : value.second.others) {
            if (other->type != CUDNN_BACKEND_TENSOR_DESCRIPTOR)
                continue;
            const emu_cudnn_tensor t = emu_cudnn_tensor_of(*other);
            const auto known = graph->tensors.emplace(t.uid, t).first;
            EMU_CUDNN_HOLD(emu_cudnn_same(known->second, t), CUDNN_STATUS_BAD_PARAM_DUPLICATED_ENTRIES,
                           "two different tensors have unique id %lld", (long long)t.uid);
        }
    return CUDNN_STATUS_SUCCESS;
}
// Checks the operations, and puts them in an order in which they can run.
static cudnnStatus_t emu_cudnn_order(emu_cudnn_graph *graph, std::vector<emu_cudnn_operation> waiting) {
    std::set<int64_t> outputs, done;
    for (const emu_cudnn_operation &o : waiting)
        EMU_CUDNN_HOLD(outputs.insert(o.y).second, CUDNN_STATUS_BAD_PARAM, "two operations write tensor %lld",
                       (long long)o.y);
    std::set<int64_t> read;
    for (const emu_cudnn_operation &o : waiting)
        for (const int64_t uid : emu_cudnn_reads(o)) {
            read.insert(uid);
            EMU_CUDNN_HOLD(outputs.count(uid) || !graph->tensors[uid].is_virtual, CUDNN_STATUS_BAD_PARAM,
                           "the virtual tensor %lld is read and not written", (long long)uid);
        }
    for (const int64_t uid : outputs)
        EMU_CUDNN_HOLD(read.count(uid) || !graph->tensors[uid].is_virtual, CUDNN_STATUS_NOT_SUPPORTED,
                       "the virtual tensor %lld is written and not read", (long long)uid);
    while (!waiting.empty()) {
        const size_t before = waiting.size();
        for (size_t i = 0; i < waiting.size();) {
            bool ready = true;
            for (const int64_t uid : emu_cudnn_reads(waiting[i]))
                ready = ready && (!outputs.count(uid) || done.count(uid));
            if (!ready) {
                i++;
                continue;
            }
            done.insert(waiting[i].y);
            graph->written_by[waiting[i].y] = graph->operations.size();
            graph->operations.push_back(waiting[i]);
            waiting.erase(waiting.begin() + (long)i);
        }
        EMU_CUDNN_HOLD(waiting.size() < before, CUDNN_STATUS_BAD_PARAM, "the operations wait for each other");
    }
    return CUDNN_STATUS_SUCCESS;
}

// ---- attention as one operation ----

static cudnnStatus_t emu_cudnn_finalize_sdpa_operation(const emu_cudnn_descriptor &d) {
    const emu_cudnn_tensor q = emu_cudnn_operand(d, CUDNN_ATTR_OPERATION_SDPA_FWD_QDESC),
                           k = emu_cudnn_operand(d, CUDNN_ATTR_OPERATION_SDPA_FWD_KDESC),
                           v = emu_cudnn_operand(d, CUDNN_ATTR_OPERATION_SDPA_FWD_VDESC),
                           o = emu_cudnn_operand(d, CUDNN_ATTR_OPERATION_SDPA_FWD_ODESC);
    EMU_CUDNN_HOLD(q.dims.size() == 4 && k.dims.size() == 4 && v.dims.size() == 4 && o.dims.size() == 4,
                   CUDNN_STATUS_BAD_PARAM, "attention of tensors that don't have four dimensions");
    EMU_CUDNN_HOLD(q.dims[0] == k.dims[0] && q.dims[3] == k.dims[3] && q.dims[1] % k.dims[1] == 0 && k.dims == v.dims &&
                       o.dims == q.dims,
                   CUDNN_STATUS_BAD_PARAM,
                   "attention of %lld heads of %lld queries of width %lld, %lld of %lld keys of %lld",
                   (long long)q.dims[1], (long long)q.dims[2], (long long)q.dims[3], (long long)k.dims[1],
                   (long long)k.dims[2], (long long)k.dims[3]);
    const emu_cudnn_reference within = emu_cudnn_other(d, CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH);
    const cudnnBackendAttributeName_t names[] = {CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_INPUT_UID,
                                                 CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_OUTPUT_UID};
    for (const cudnnBackendAttributeName_t name : names) {
        EMU_CUDNN_HOLD(d.values.count(name) == (within ? 1u : 0u), CUDNN_STATUS_BAD_PARAM,
                       "a graph within attention goes with the ids of its input and output");
        if (!within)
            continue;
        const auto found = within->graph->tensors.find(emu_cudnn_get<int64_t>(d, name, 0));
        EMU_CUDNN_HOLD(found != within->graph->tensors.end() && found->second.is_virtual, CUDNN_STATUS_BAD_PARAM,
                       "the graph within attention has no virtual tensor %lld",
                       (long long)emu_cudnn_get<int64_t>(d, name, 0));
        EMU_CUDNN_HOLD(found->second.dims == std::vector<int64_t>({q.dims[0], q.dims[1], q.dims[2], k.dims[2]}),
                       CUDNN_STATUS_BAD_PARAM, "tensor %lld of the graph within attention is not of the scores' shape",
                       (long long)found->first);
    }
    EMU_CUDNN_HOLD(!within || !within->values.count(CUDNN_ATTR_OPERATIONGRAPH_HANDLE), CUDNN_STATUS_BAD_PARAM,
                   "the graph within attention has a handle");
    return CUDNN_STATUS_SUCCESS;
}
// Replaces attention as one operation by the operations of the engine's pattern, with virtual tensors of their own.
static cudnnStatus_t emu_cudnn_expand_sdpa(emu_cudnn_graph *graph, const emu_cudnn_descriptor &d,
                                           std::vector<emu_cudnn_operation> *operations) {
    const emu_cudnn_tensor q = emu_cudnn_operand(d, CUDNN_ATTR_OPERATION_SDPA_FWD_QDESC),
                           v = emu_cudnn_operand(d, CUDNN_ATTR_OPERATION_SDPA_FWD_VDESC);
    emu_cudnn_tensor &k = graph->tensors[emu_cudnn_operand(d, CUDNN_ATTR_OPERATION_SDPA_FWD_KDESC).uid];
    const std::vector<int64_t> scores = {q.dims[0], q.dims[1], q.dims[2], k.dims[2]},
                               rows = {q.dims[0], q.dims[1], q.dims[2], 1};
    const emu_cudnn_reference within = emu_cudnn_other(d, CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH);
    const auto between = [graph](const std::vector<int64_t> &dims, cudnnDataType_t type) {
        const int64_t uid = (int64_t(1) << 40) + (int64_t)graph->tensors.size();
        graph->tensors[uid] = {uid, 16, type, dims, std::vector<int64_t>(dims.size(), 1), true, false};
        return uid;
    };
    const auto pointwise = [operations](cudnnPointwiseMode_t mode, int64_t x, int64_t b, int64_t y) {
        const int operands = emu_cudnn_operands(mode);
        operations->push_back(
            {EMU_POINTWISE, mode, CUDNN_REDUCE_TENSOR_ADD, CUDNN_DATA_FLOAT, 0, x, b, 0, y, operands >= 2, false});
        return y;
    };
    const auto product = [operations](int64_t x, int64_t b, int64_t y) {
        operations->push_back(
            {EMU_MATMUL, CUDNN_POINTWISE_ADD, CUDNN_REDUCE_TENSOR_ADD, CUDNN_DATA_FLOAT, 0, x, b, 0, y, true, false});
        return y;
    };
    const auto reduce = [&](cudnnReduceTensorOp_t sum, int64_t x) {
        const int64_t y = between(rows, CUDNN_DATA_FLOAT);
        operations->push_back({EMU_REDUCTION, CUDNN_POINTWISE_ADD, sum, CUDNN_DATA_FLOAT, 0, x, 0, 0, y, false, false});
        return y;
    };
    std::swap(k.dims[2], k.dims[3]); // transposed, as the first product takes it
    std::swap(k.strides[2], k.strides[3]);
    if (within)
        for (const auto &tensor : within->graph->tensors)
            EMU_CUDNN_HOLD(emu_cudnn_same(graph->tensors.insert(tensor).first->second, tensor.second),
                           CUDNN_STATUS_BAD_PARAM_DUPLICATED_ENTRIES, "two different tensors have unique id %lld",
                           (long long)tensor.first);
    const int64_t in = within ? emu_cudnn_get<int64_t>(d, CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_INPUT_UID, 0)
                              : between(scores, CUDNN_DATA_FLOAT);
    const bool scaled = d.values.count(CUDNN_ATTR_OPERATION_SDPA_FWD_SCALEDESC) > 0;
    const int64_t first = product(q.uid, k.uid, scaled ? between(scores, CUDNN_DATA_FLOAT) : in);
    if (scaled)
        pointwise(CUDNN_POINTWISE_MUL, first, emu_cudnn_operand(d, CUDNN_ATTR_OPERATION_SDPA_FWD_SCALEDESC).uid, in);
    if (within)
        operations->insert(operations->end(), within->graph->operations.begin(), within->graph->operations.end());
    const int64_t masked =
        within ? emu_cudnn_get<int64_t>(d, CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_OUTPUT_UID, 0) : in;
    const int64_t max = reduce(CUDNN_REDUCE_TENSOR_MAX, masked);
    const int64_t less = pointwise(CUDNN_POINTWISE_SUB, masked, max, between(scores, CUDNN_DATA_FLOAT));
    const int64_t e = pointwise(CUDNN_POINTWISE_EXP, less, 0, between(scores, CUDNN_DATA_FLOAT));
    const int64_t sum = reduce(CUDNN_REDUCE_TENSOR_ADD, e);
    if (d.values.count(CUDNN_ATTR_OPERATION_SDPA_FWD_STATSDESC))
        pointwise(CUDNN_POINTWISE_ADD, max, pointwise(CUDNN_POINTWISE_LOG, sum, 0, between(rows, CUDNN_DATA_FLOAT)),
                  emu_cudnn_operand(d, CUDNN_ATTR_OPERATION_SDPA_FWD_STATSDESC).uid);
    const int64_t p = pointwise(CUDNN_POINTWISE_DIV, e, sum, between(scores, q.type));
    product(p, v.uid, emu_cudnn_operand(d, CUDNN_ATTR_OPERATION_SDPA_FWD_ODESC).uid);
    graph->single = true;
    return CUDNN_STATUS_SUCCESS;
}

static cudnnStatus_t emu_cudnn_finalize_graph(emu_cudnn_descriptor *d) {
    const std::shared_ptr<emu_cudnn_graph> graph = std::make_shared<emu_cudnn_graph>();
    std::vector<emu_cudnn_operation> operations;
    for (const emu_cudnn_reference &other : d->values[CUDNN_ATTR_OPERATIONGRAPH_OPS].others) {
        EMU_CUDNN_HOLD(other->type == CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR ||
                           other->type == CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR ||
                           other->type == CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR ||
                           other->type == CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR ||
                           other->type == CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR,
                       CUDNN_STATUS_BAD_PARAM, "a descriptor of type %d is no operation", other->type);
        cudnnStatus_t status = emu_cudnn_collect(graph.get(), *other);
        if (status == CUDNN_STATUS_SUCCESS && other->type == CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR)
            status = emu_cudnn_expand_sdpa(graph.get(), *other, &operations);
        else
            operations.push_back(emu_cudnn_operation_of(*other));
        if (status != CUDNN_STATUS_SUCCESS)
            return status;
    }
    // a graph within an operation is checked with the graph around it
    if (!d->values.count(CUDNN_ATTR_OPERATIONGRAPH_HANDLE)) {
        graph->operations = operations;
        d->graph = graph;
        return CUDNN_STATUS_SUCCESS;
    }
    const cudnnStatus_t status = emu_cudnn_order(graph.get(), operations);
    if (status == CUDNN_STATUS_SUCCESS)
        d->graph = graph;
    return status;
}
