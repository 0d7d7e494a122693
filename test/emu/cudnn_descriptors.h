// Descriptors of test/emu/cudnn.cpp: which attributes each type has, and what these are held to when they are set, got
// and finalized. Where cuDNN 9.19 refuses too, the status is the one that it returns.
#pragma once
#include "test/emu/cudnn.h"
#include "test/emu/services.h"
#include <map>      // std::map
#include <memory>   // std::shared_ptr
#include <mutex>    // std::mutex
#include <stdarg.h> // va_list
#include <stdio.h>  // vsnprintf
#include <stdlib.h> // getenv, _Exit
#include <string.h> // memcpy
#include <vector>   // std::vector

struct cudnnContext {
    struct emu_stream *stream;
    const struct emu_services *services; // of `stream`
};

static thread_local char emu_cudnn_error[1024]; // what cudnnGetLastErrorString returns
__attribute__((format(printf, 2, 3))) static cudnnStatus_t emu_cudnn_fail(cudnnStatus_t status, const char *format,
                                                                          ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(emu_cudnn_error, sizeof emu_cudnn_error, format, arguments);
    va_end(arguments);
    return status;
}
// Reports a fault that would do harm and that the library can't see, or does not look for. Ends the program with status
// 3.
__attribute__((noreturn, format(printf, 1, 2))) static void emu_cudnn_report(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fflush(stdout);
    fputs("emu: cuDNN: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    fflush(stderr);
    _Exit(3);
}
#define EMU_CUDNN_HOLD(condition, status, ...)                                                                         \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            return emu_cudnn_fail(status, __VA_ARGS__);                                                                \
    } while (0)

static size_t emu_cudnn_version(void) {
    const char *text = getenv("EMU_CUDNN_VERSION");
    return text ? (size_t)strtoull(text, NULL, 0) : 91900;
}
// Whether EMU_CUDNN_REFUSE names `what`.
static bool emu_cudnn_refuses(const char *what) {
    const char *refused = getenv("EMU_CUDNN_REFUSE");
    return refused && strcmp(refused, what) == 0;
}

struct emu_cudnn_graph;
struct emu_cudnn_descriptor;
typedef std::shared_ptr<emu_cudnn_descriptor> emu_cudnn_reference;
struct emu_cudnn_value {
    int64_t count;
    std::vector<char> bytes;
    std::vector<emu_cudnn_reference> others; // where the type is BACKEND_DESCRIPTOR
};
struct emu_cudnn_descriptor {
    cudnnBackendDescriptorType_t type;
    bool finalized;
    std::map<int, emu_cudnn_value> values;           // by attribute
    std::shared_ptr<const emu_cudnn_graph> graph;    // an operation graph's
    std::vector<emu_cudnn_reference> configurations; // a heuristics descriptor's
};

// ---- attributes ----

enum emu_cudnn_rule_flags { EMU_REQUIRED = 1, EMU_READ_ONLY = 2 };
struct emu_cudnn_rule {
    cudnnBackendDescriptorType_t descriptor;
    cudnnBackendAttributeName_t name;
    cudnnBackendAttributeType_t type;
    int64_t least, most; // number of elements
    int flags;
    int other; // type of the descriptors that it refers to; -1: none
};
#define OPERATION(kind, name, flags, other)                                                                            \
    {                                                                                                                  \
        CUDNN_BACKEND_OPERATION_##kind##_DESCRIPTOR, CUDNN_ATTR_OPERATION_##kind##_##name,                             \
            CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, 1, flags, CUDNN_BACKEND_##other##_DESCRIPTOR                             \
    }
#define OF(kind, name, type, least, most, flags, other)                                                                \
    { CUDNN_BACKEND_##kind##_DESCRIPTOR, CUDNN_ATTR_##kind##_##name, CUDNN_TYPE_##type, least, most, flags, other }
enum { EMU_CUDNN_MAX = 4096, EMU_CUDNN_DIMS = 8 };
static const emu_cudnn_rule emu_cudnn_rules[] = {
    OF(TENSOR, DATA_TYPE, DATA_TYPE, 1, 1, EMU_REQUIRED, -1),
    OF(TENSOR, DIMENSIONS, INT64, 1, EMU_CUDNN_DIMS, EMU_REQUIRED, -1),
    OF(TENSOR, STRIDES, INT64, 1, EMU_CUDNN_DIMS, EMU_REQUIRED, -1),
    OF(TENSOR, UNIQUE_ID, INT64, 1, 1, EMU_REQUIRED, -1),
    OF(TENSOR, BYTE_ALIGNMENT, INT64, 1, 1, EMU_REQUIRED, -1),
    OF(TENSOR, IS_VIRTUAL, BOOLEAN, 1, 1, 0, -1),
    OF(TENSOR, IS_BY_VALUE, BOOLEAN, 1, 1, 0, -1),
    OF(POINTWISE, MODE, POINTWISE_MODE, 1, 1, EMU_REQUIRED, -1),
    OF(POINTWISE, MATH_PREC, DATA_TYPE, 1, 1, EMU_REQUIRED, -1),
    OF(POINTWISE, AXIS, INT64, 1, 1, 0, -1),
    OF(MATMUL, COMP_TYPE, DATA_TYPE, 1, 1, EMU_REQUIRED, -1),
    OF(MATMUL, PADDING_VALUE, DOUBLE, 1, 1, 0, -1),
    OF(REDUCTION, OPERATOR, REDUCTION_OPERATOR_TYPE, 1, 1, EMU_REQUIRED, -1),
    OF(REDUCTION, COMP_TYPE, DATA_TYPE, 1, 1, EMU_REQUIRED, -1),
    OF(REDUCTION, IS_DETERMINISTIC, BOOLEAN, 1, 1, 0, -1),
    OPERATION(POINTWISE, PW_DESCRIPTOR, EMU_REQUIRED, POINTWISE),
    OPERATION(POINTWISE, XDESC, EMU_REQUIRED, TENSOR),
    OPERATION(POINTWISE, BDESC, 0, TENSOR),
    OPERATION(POINTWISE, TDESC, 0, TENSOR),
    OPERATION(POINTWISE, YDESC, EMU_REQUIRED, TENSOR),
    OPERATION(MATMUL, DESC, EMU_REQUIRED, MATMUL),
    OPERATION(MATMUL, ADESC, EMU_REQUIRED, TENSOR),
    OPERATION(MATMUL, BDESC, EMU_REQUIRED, TENSOR),
    OPERATION(MATMUL, CDESC, EMU_REQUIRED, TENSOR),
    OPERATION(REDUCTION, DESC, EMU_REQUIRED, REDUCTION),
    OPERATION(REDUCTION, XDESC, EMU_REQUIRED, TENSOR),
    OPERATION(REDUCTION, YDESC, EMU_REQUIRED, TENSOR),
    OPERATION(RESHAPE, XDESC, EMU_REQUIRED, TENSOR),
    OPERATION(RESHAPE, YDESC, EMU_REQUIRED, TENSOR),
    OPERATION(SDPA_FWD, QDESC, EMU_REQUIRED, TENSOR),
    OPERATION(SDPA_FWD, KDESC, EMU_REQUIRED, TENSOR),
    OPERATION(SDPA_FWD, VDESC, EMU_REQUIRED, TENSOR),
    OPERATION(SDPA_FWD, ODESC, EMU_REQUIRED, TENSOR),
    OPERATION(SDPA_FWD, STATSDESC, 0, TENSOR),
    OPERATION(SDPA_FWD, SCALEDESC, 0, TENSOR),
    OPERATION(SDPA_FWD, SUBGRAPH, 0, OPERATIONGRAPH),
    OF(OPERATION_SDPA_FWD, SUBGRAPH_INPUT_UID, INT64, 1, 1, 0, -1),
    OF(OPERATION_SDPA_FWD, SUBGRAPH_OUTPUT_UID, INT64, 1, 1, 0, -1),
    OF(OPERATIONGRAPH, HANDLE, HANDLE, 1, 1, 0, -1), // a graph within an operation has no handle
    OF(OPERATIONGRAPH, OPS, BACKEND_DESCRIPTOR, 1, EMU_CUDNN_MAX, EMU_REQUIRED, -1),
    OF(OPERATIONGRAPH, ENGINE_GLOBAL_COUNT, INT64, 1, 1, EMU_READ_ONLY, -1),
    OF(ENGINEHEUR, MODE, HEUR_MODE, 1, 1, EMU_REQUIRED, -1),
    OF(ENGINEHEUR, OPERATION_GRAPH, BACKEND_DESCRIPTOR, 1, 1, EMU_REQUIRED, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR),
    OF(ENGINEHEUR, RESULTS, BACKEND_DESCRIPTOR, 0, EMU_CUDNN_MAX, EMU_READ_ONLY, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR),
    OF(ENGINE, OPERATION_GRAPH, BACKEND_DESCRIPTOR, 1, 1, EMU_REQUIRED, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR),
    OF(ENGINE, GLOBAL_INDEX, INT64, 1, 1, EMU_REQUIRED, -1),
    OF(ENGINE, NUMERICAL_NOTE, NUMERICAL_NOTE, 0, EMU_CUDNN_MAX, EMU_READ_ONLY, -1),
    OF(ENGINE, BEHAVIOR_NOTE, BEHAVIOR_NOTE, 0, EMU_CUDNN_MAX, EMU_READ_ONLY, -1),
    OF(ENGINECFG, ENGINE, BACKEND_DESCRIPTOR, 1, 1, EMU_REQUIRED, CUDNN_BACKEND_ENGINE_DESCRIPTOR),
    OF(ENGINECFG, KNOB_CHOICES, BACKEND_DESCRIPTOR, 0, EMU_CUDNN_MAX, 0, CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR),
    OF(ENGINECFG, WORKSPACE_SIZE, INT64, 1, 1, EMU_READ_ONLY, -1),
    OF(KNOB_CHOICE, KNOB_TYPE, KNOB_TYPE, 1, 1, EMU_REQUIRED, -1),
    OF(KNOB_CHOICE, KNOB_VALUE, INT64, 1, 1, EMU_REQUIRED, -1),
    OF(EXECUTION_PLAN, HANDLE, HANDLE, 1, 1, EMU_REQUIRED, -1),
    OF(EXECUTION_PLAN, ENGINE_CONFIG, BACKEND_DESCRIPTOR, 1, 1, EMU_REQUIRED, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR),
    OF(EXECUTION_PLAN, WORKSPACE_SIZE, INT64, 1, 1, EMU_READ_ONLY, -1),
    OF(VARIANT_PACK, UNIQUE_IDS, INT64, 1, EMU_CUDNN_MAX, EMU_REQUIRED, -1),
    OF(VARIANT_PACK, DATA_POINTERS, VOID_PTR, 1, EMU_CUDNN_MAX, EMU_REQUIRED, -1),
    OF(VARIANT_PACK, WORKSPACE, VOID_PTR, 1, 1, 0, -1),
};
#undef OF
#undef OPERATION

static const emu_cudnn_rule *emu_cudnn_rule_of(cudnnBackendDescriptorType_t type, cudnnBackendAttributeName_t name) {
    for (const emu_cudnn_rule &rule : emu_cudnn_rules)
        if (rule.descriptor == type && rule.name == name)
            return &rule;
    return NULL;
}
static bool emu_cudnn_has_type(cudnnBackendDescriptorType_t type) {
    if (type == CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR && emu_cudnn_version() < 92100)
        return false; // the operation came with 9.13, graphs within it with 9.21
    for (const emu_cudnn_rule &rule : emu_cudnn_rules)
        if (rule.descriptor == type)
            return true;
    return false;
}
static size_t emu_cudnn_element_bytes(cudnnBackendAttributeType_t type) {
    switch (type) {
    case CUDNN_TYPE_BOOLEAN:
    case CUDNN_TYPE_CHAR: return 1;
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_DOUBLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR: return 8;
    case CUDNN_TYPE_DATA_TYPE:
    case CUDNN_TYPE_FLOAT:
    case CUDNN_TYPE_HEUR_MODE:
    case CUDNN_TYPE_KNOB_TYPE:
    case CUDNN_TYPE_NUMERICAL_NOTE:
    case CUDNN_TYPE_POINTWISE_MODE:
    case CUDNN_TYPE_REDUCTION_OPERATOR_TYPE:
    case CUDNN_TYPE_BEHAVIOR_NOTE:
    case CUDNN_TYPE_INT32: return 4;
    }
    return 0;
}

// ---- which descriptors there are ----

static std::mutex emu_cudnn_mutex;
static std::map<const void *, emu_cudnn_reference> emu_cudnn_descriptors;
static std::map<const void *, bool> emu_cudnn_handles;

static emu_cudnn_reference emu_cudnn_find(const void *descriptor) {
    const std::lock_guard<std::mutex> lock(emu_cudnn_mutex);
    const auto found = emu_cudnn_descriptors.find(descriptor);
    if (found == emu_cudnn_descriptors.end())
        emu_cudnn_report("%p is no descriptor, or one that was destroyed", descriptor);
    return found->second;
}
static bool emu_cudnn_is_handle(const void *handle) {
    const std::lock_guard<std::mutex> lock(emu_cudnn_mutex);
    return emu_cudnn_handles.count(handle) > 0;
}

// ---- values ----

template <class T>
static T emu_cudnn_get(const emu_cudnn_descriptor &d, cudnnBackendAttributeName_t name, T otherwise) {
    const auto found = d.values.find(name);
    if (found == d.values.end())
        return otherwise;
    T value;
    memcpy(&value, found->second.bytes.data(), sizeof value);
    return value;
}
template <class T>
static std::vector<T> emu_cudnn_get_all(const emu_cudnn_descriptor &d, cudnnBackendAttributeName_t name) {
    const auto found = d.values.find(name);
    std::vector<T> values;
    if (found == d.values.end())
        return values;
    values.resize((size_t)found->second.count);
    memcpy(values.data(), found->second.bytes.data(), found->second.bytes.size());
    return values;
}
// Returns the descriptor that an attribute refers to; NULL: it was not set.
static emu_cudnn_reference emu_cudnn_other(const emu_cudnn_descriptor &d, cudnnBackendAttributeName_t name) {
    const auto found = d.values.find(name);
    return found == d.values.end() || found->second.others.empty() ? NULL : found->second.others[0];
}

// Whether an attribute's element is valid: a boolean is a byte of 0 or 1, an enumeration's value must be modeled here.
static bool emu_cudnn_is_valid(cudnnBackendAttributeType_t type, const void *element) {
    int32_t value = 0;
    if (emu_cudnn_element_bytes(type) == 4)
        memcpy(&value, element, 4);
    switch (type) {
    case CUDNN_TYPE_BOOLEAN: return *(const unsigned char *)element < 2;
    case CUDNN_TYPE_HANDLE: {
        const void *handle = *(void *const *)element;
        return emu_cudnn_is_handle(handle);
    }
    case CUDNN_TYPE_DATA_TYPE: return value >= 0 && value <= 21;
    case CUDNN_TYPE_HEUR_MODE: return value >= 0 && value <= CUDNN_HEUR_MODE_A;
    case CUDNN_TYPE_KNOB_TYPE: return value >= 0 && value < 44;
    case CUDNN_TYPE_REDUCTION_OPERATOR_TYPE: return value >= 0 && value <= 8;
    case CUDNN_TYPE_POINTWISE_MODE: return value >= 0 && value <= CUDNN_POINTWISE_BINARY_SELECT;
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_FLOAT:
    case CUDNN_TYPE_DOUBLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_NUMERICAL_NOTE:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR:
    case CUDNN_TYPE_BEHAVIOR_NOTE:
    case CUDNN_TYPE_INT32:
    case CUDNN_TYPE_CHAR: return true;
    }
    return false;
}
static cudnnStatus_t emu_cudnn_hold_other(const emu_cudnn_rule *rule, const emu_cudnn_reference &other) {
    EMU_CUDNN_HOLD(rule->other < 0 || other->type == (cudnnBackendDescriptorType_t)rule->other, CUDNN_STATUS_BAD_PARAM,
                   "attribute %d: a descriptor of type %d, not %d", rule->name, other->type, rule->other);
    const bool operand = other->type == CUDNN_BACKEND_TENSOR_DESCRIPTOR;
    EMU_CUDNN_HOLD(other->finalized, operand ? CUDNN_STATUS_BAD_PARAM : CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED,
                   "attribute %d: a descriptor of type %d that was not finalized", rule->name, other->type);
    return CUDNN_STATUS_SUCCESS;
}
static cudnnStatus_t emu_cudnn_hold_call(const emu_cudnn_reference &d, cudnnBackendAttributeName_t name,
                                         cudnnBackendAttributeType_t type, const emu_cudnn_rule **rule) {
    *rule = emu_cudnn_rule_of(d->type, name);
    EMU_CUDNN_HOLD(*rule, CUDNN_STATUS_BAD_PARAM, "descriptors of type %d have no attribute %d", d->type, name);
    EMU_CUDNN_HOLD((*rule)->type == type, CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE, "attribute %d has type %d, not %d",
                   name, (*rule)->type, type);
    return CUDNN_STATUS_SUCCESS;
}
static cudnnStatus_t emu_cudnn_set(const emu_cudnn_reference &d, cudnnBackendAttributeName_t name,
                                   cudnnBackendAttributeType_t type, int64_t count, const void *elements) {
    const emu_cudnn_rule *rule = NULL;
    EMU_CUDNN_HOLD(!d->finalized, CUDNN_STATUS_BAD_PARAM, "attribute %d is set after the descriptor was finalized",
                   name);
    cudnnStatus_t status = emu_cudnn_hold_call(d, name, type, &rule);
    if (status != CUDNN_STATUS_SUCCESS)
        return status;
    EMU_CUDNN_HOLD(!(rule->flags & EMU_READ_ONLY), CUDNN_STATUS_BAD_PARAM, "attribute %d can't be set", name);
    EMU_CUDNN_HOLD(count >= rule->least && count <= rule->most, CUDNN_STATUS_BAD_PARAM,
                   "attribute %d has %lld to %lld elements, not %lld", name, (long long)rule->least,
                   (long long)rule->most, (long long)count);
    EMU_CUDNN_HOLD(elements || count == 0, CUDNN_STATUS_BAD_PARAM, "attribute %d: no elements", name);
    EMU_CUDNN_HOLD(name != CUDNN_ATTR_REDUCTION_IS_DETERMINISTIC || emu_cudnn_version() >= 91100,
                   CUDNN_STATUS_BAD_PARAM, "deterministic reductions came with 9.11");
    const size_t bytes = emu_cudnn_element_bytes(type);
    emu_cudnn_value value;
    value.count = count;
    value.bytes.assign((const char *)elements, (const char *)elements + bytes * (size_t)count);
    for (int64_t i = 0; i < count; i++) {
        const char *element = (const char *)elements + bytes * (size_t)i;
        EMU_CUDNN_HOLD(emu_cudnn_is_valid(type, element), CUDNN_STATUS_BAD_PARAM,
                       "attribute %d: element %lld is not valid", name, (long long)i);
        if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
            const void *const other = *(void *const *)element;
            EMU_CUDNN_HOLD(other, CUDNN_STATUS_BAD_PARAM_NULL_POINTER, "attribute %d: no descriptor", name);
            value.others.push_back(emu_cudnn_find(other));
            status = emu_cudnn_hold_other(rule, value.others.back());
            if (status != CUDNN_STATUS_SUCCESS)
                return status;
        }
    }
    d->values[name] = value;
    return CUDNN_STATUS_SUCCESS;
}
static cudnnStatus_t emu_cudnn_hold_required(const emu_cudnn_descriptor &d) {
    EMU_CUDNN_HOLD(!d.finalized, CUDNN_STATUS_BAD_PARAM, "the descriptor was finalized before");
    for (const emu_cudnn_rule &rule : emu_cudnn_rules)
        EMU_CUDNN_HOLD(rule.descriptor != d.type || !(rule.flags & EMU_REQUIRED) || d.values.count(rule.name),
                       rule.name == CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG ? CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED
                                                                            : CUDNN_STATUS_BAD_PARAM,
                       "attribute %d is required of descriptors of type %d", rule.name, d.type);
    return CUDNN_STATUS_SUCCESS;
}
