// Builds graphs of operations for cuDNN, and execution plans of them (cudnn/api.h says what those are).
//
// What fails is kept: the first refusal's words go to the builder's `reason`, later calls do nothing, so that a graph
// is written down straight and asked about once, at its end. All descriptors belong to the builder, until it is closed.
#pragma once
#include "kernels/cudnn/api.h" // struct cudnn_functions, the API's numbers
#include <assert.h>            // assert

enum {
    CUDNN_RANK = 4,               // of every tensor
    CUDNN_MAX_DESCRIPTORS = 224,  // attention's backward graph in FP8 has 146, and a few for each configuration tried
    CUDNN_MAX_OPERATIONS = 48,    // of attention's backward in FP8: 43
    CUDNN_MAX_CONFIGURATIONS = 8, // tried for one graph
    CUDNN_VIRTUAL_IDS = 1000,     // unique ids of tensors that are never in memory; the caller's are below
    CUDNN_ALIGNMENT = 16,         // bytes, of tensors in memory
};

struct cudnn_builder {
    const struct cudnn_functions *functions;
    char reason[192]; // empty: nothing was refused
    struct cudnn_descriptor *made[CUDNN_MAX_DESCRIPTORS], *operations[CUDNN_MAX_OPERATIONS];
    int made_count, operation_count;
};

// A tensor as operations take it. A transposed one is the same elements with two dimensions exchanged.
struct cudnn_tensor {
    struct cudnn_descriptor *descriptor;
    int64_t dims[CUDNN_RANK];
    int64_t id;
};
enum cudnn_place { CUDNN_IN_MEMORY, CUDNN_BY_VALUE, CUDNN_VIRTUAL };

// Whether the status is a success. If not, overwrites `reason` with `what` and the library's words, in one line.
static inline bool cudnn_ok(struct cudnn_builder *b, cudnn_status status, const char *what) {
    char message[128] = "";
    if (status == CUDNN_STATUS_SUCCESS)
        return true;
    b->functions->get_last_error_string(message, sizeof message);
    for (char *c = message; *c; c++) // one line
        *c = (char)(*c == '\n' ? ' ' : *c);
    snprintf(b->reason, sizeof b->reason, "%s: %s%s%s", what, b->functions->get_error_string(status),
             *message ? ": " : "", message);
    return false;
}

// ---- descriptors ----

// Creates a descriptor, which belongs to the builder; NULL where it or anything before was refused.
static inline struct cudnn_descriptor *cudnn_make(struct cudnn_builder *b, enum cudnn_descriptor_type type) {
    struct cudnn_descriptor *made = NULL;
    if (*b->reason)
        return NULL;
    if (b->made_count == CUDNN_MAX_DESCRIPTORS) {
        snprintf(b->reason, sizeof b->reason, "more than %d descriptors", CUDNN_MAX_DESCRIPTORS);
        return NULL;
    }
    if (!cudnn_ok(b, b->functions->create_descriptor(type, &made), "a descriptor"))
        return NULL;
    b->made[b->made_count++] = made;
    return made;
}
// Sets an attribute of `count` elements of the type. Does nothing where something was refused.
static inline void cudnn_set(struct cudnn_builder *b, struct cudnn_descriptor *d, enum cudnn_attribute_name name,
                             enum cudnn_attribute_type type, int64_t count, const void *elements) {
    char what[32];
    snprintf(what, sizeof what, "attribute %d", (int)name);
    if (!*b->reason)
        cudnn_ok(b, b->functions->set_attribute(d, name, type, count, elements), what);
}
static inline void cudnn_set_int64(struct cudnn_builder *b, struct cudnn_descriptor *d, enum cudnn_attribute_name name,
                                   int64_t value) {
    cudnn_set(b, d, name, CUDNN_TYPE_INT64, 1, &value);
}
static inline void cudnn_set_bool(struct cudnn_builder *b, struct cudnn_descriptor *d, enum cudnn_attribute_name name,
                                  bool value) {
    cudnn_set(b, d, name, CUDNN_TYPE_BOOLEAN, 1, &value);
}
static inline void cudnn_set_type(struct cudnn_builder *b, struct cudnn_descriptor *d, enum cudnn_attribute_name name,
                                  enum cudnn_data_type value) {
    cudnn_set(b, d, name, CUDNN_TYPE_DATA_TYPE, 1, &value);
}
static inline void cudnn_set_descriptor(struct cudnn_builder *b, struct cudnn_descriptor *d,
                                        enum cudnn_attribute_name name, struct cudnn_descriptor *value) {
    cudnn_set(b, d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}
// Finishes a descriptor, by finalizing it; what: its name in a refusal. Does nothing where something was refused.
static inline void cudnn_finish(struct cudnn_builder *b, struct cudnn_descriptor *d, const char *what) {
    if (!*b->reason)
        cudnn_ok(b, b->functions->finalize(d), what);
}
// Destroys the builder's descriptors, the newest first, and empties it; `reason` stays.
static inline void cudnn_close(struct cudnn_builder *b) {
    while (b->made_count > 0)
        b->functions->destroy_descriptor(b->made[--b->made_count]);
    b->operation_count = 0;
}

// ---- tensors ----

// Creates and finishes a tensor. strides count elements, alignment bytes. The descriptor is NULL after a refusal.
static inline struct cudnn_tensor cudnn_tensor_of(struct cudnn_builder *b, int64_t id, enum cudnn_data_type type,
                                                  const int64_t dims[CUDNN_RANK], const int64_t strides[CUDNN_RANK],
                                                  enum cudnn_place place, int64_t alignment) {
    struct cudnn_tensor t;
    char what[32];
    snprintf(what, sizeof what, "tensor %d", (int)id);
    t.descriptor = cudnn_make(b, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    memcpy(t.dims, dims, sizeof t.dims);
    t.id = id;
    cudnn_set_int64(b, t.descriptor, CUDNN_ATTR_TENSOR_UNIQUE_ID, id);
    cudnn_set_type(b, t.descriptor, CUDNN_ATTR_TENSOR_DATA_TYPE, type);
    cudnn_set_int64(b, t.descriptor, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, alignment);
    cudnn_set(b, t.descriptor, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, CUDNN_RANK, dims);
    cudnn_set(b, t.descriptor, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, CUDNN_RANK, strides);
    cudnn_set_bool(b, t.descriptor, CUDNN_ATTR_TENSOR_IS_VIRTUAL, place == CUDNN_VIRTUAL);
    cudnn_set_bool(b, t.descriptor, CUDNN_ATTR_TENSOR_IS_BY_VALUE, place == CUDNN_BY_VALUE);
    cudnn_finish(b, t.descriptor, what);
    return t;
}
// Creates a tensor without gaps, whose last dimension is the innermost.
static inline struct cudnn_tensor cudnn_dense(struct cudnn_builder *b, int64_t id, enum cudnn_data_type type,
                                              const int64_t dims[CUDNN_RANK], enum cudnn_place place) {
    const int64_t strides[CUDNN_RANK] = {dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1};
    return cudnn_tensor_of(b, id, type, dims, strides, place, CUDNN_ALIGNMENT);
}
// Creates a virtual tensor, which is never in memory, without gaps and with an id of its own.
static inline struct cudnn_tensor cudnn_virtual(struct cudnn_builder *b, enum cudnn_data_type type,
                                                const int64_t dims[CUDNN_RANK]) {
    return cudnn_dense(b, CUDNN_VIRTUAL_IDS + b->made_count, type, dims, CUDNN_VIRTUAL);
}
// Creates a tensor of one fp32 number in the device's memory, which a graph may read or write.
static inline struct cudnn_tensor cudnn_cell(struct cudnn_builder *b, int64_t id) {
    const int64_t one[CUDNN_RANK] = {1, 1, 1, 1};
    return cudnn_tensor_of(b, id, CUDNN_DATA_FLOAT, one, one, CUDNN_IN_MEMORY, sizeof(float));
}
// Creates a tensor of one fp32 number in the host's memory, whose address the variant pack has.
static inline struct cudnn_tensor cudnn_number(struct cudnn_builder *b, int64_t id) {
    const int64_t one[CUDNN_RANK] = {1, 1, 1, 1};
    return cudnn_tensor_of(b, id, CUDNN_DATA_FLOAT, one, one, CUDNN_BY_VALUE, sizeof(float));
}

// ---- operations: each writes a tensor that the caller describes, and computes in fp32 if it is not said ----

// Finishes an operation, called `what` in a refusal, and appends it unless anything was refused. Asserts that it fits.
static inline void cudnn_operation(struct cudnn_builder *b, struct cudnn_descriptor *operation, const char *what) {
    cudnn_finish(b, operation, what);
    if (*b->reason)
        return;
    assert(b->operation_count < CUDNN_MAX_OPERATIONS);
    b->operations[b->operation_count++] = operation;
}

// Appends c = a b, of the last two dimensions. Where b has fewer heads than a, several of a's heads read one of b's.
static inline void cudnn_matmul_to(struct cudnn_builder *b, struct cudnn_tensor a_in, struct cudnn_tensor b_in,
                                   struct cudnn_tensor c) {
    struct cudnn_descriptor *matmul = cudnn_make(b, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    cudnn_set_type(b, matmul, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_DATA_FLOAT);
    cudnn_finish(b, matmul, "a matrix product");
    struct cudnn_descriptor *operation = cudnn_make(b, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    cudnn_set_descriptor(b, operation, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a_in.descriptor);
    cudnn_set_descriptor(b, operation, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b_in.descriptor);
    cudnn_set_descriptor(b, operation, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c.descriptor);
    cudnn_set_descriptor(b, operation, CUDNN_ATTR_OPERATION_MATMUL_DESC, matmul);
    cudnn_operation(b, operation, "a matrix product");
}
// Multiplies as cudnn_matmul_to does, into a virtual tensor of `type`, which it returns.
static inline struct cudnn_tensor cudnn_matmul(struct cudnn_builder *b, struct cudnn_tensor a_in,
                                               struct cudnn_tensor b_in, enum cudnn_data_type type) {
    const int64_t dims[CUDNN_RANK] = {a_in.dims[0], a_in.dims[1], a_in.dims[2], b_in.dims[3]};
    const struct cudnn_tensor c = cudnn_virtual(b, type, dims);
    cudnn_matmul_to(b, a_in, b_in, c);
    return c;
}

// An elementwise function.
struct cudnn_function {
    enum cudnn_pointwise_mode mode;
    enum cudnn_data_type computes;
    int64_t axis; // of GEN_INDEX
};
// Appends y = f(x), y = f(x, with) or y = where ? x : with. NULL: no operand. Dimensions of 1 in `with` repeat.
static inline void cudnn_pointwise_to(struct cudnn_builder *b, struct cudnn_function f, struct cudnn_tensor x,
                                      const struct cudnn_tensor *with, const struct cudnn_tensor *where,
                                      struct cudnn_tensor y) {
    char what[32];
    snprintf(what, sizeof what, "pointwise function %d", (int)f.mode);
    struct cudnn_descriptor *function = cudnn_make(b, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    cudnn_set(b, function, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &f.mode);
    cudnn_set_type(b, function, CUDNN_ATTR_POINTWISE_MATH_PREC, f.computes);
    if (f.mode == CUDNN_POINTWISE_GEN_INDEX)
        cudnn_set_int64(b, function, CUDNN_ATTR_POINTWISE_AXIS, f.axis);
    cudnn_finish(b, function, what);
    struct cudnn_descriptor *operation = cudnn_make(b, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    cudnn_set_descriptor(b, operation, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, function);
    cudnn_set_descriptor(b, operation, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x.descriptor);
    if (with)
        cudnn_set_descriptor(b, operation, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, with->descriptor);
    if (where)
        cudnn_set_descriptor(b, operation, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, where->descriptor);
    cudnn_set_descriptor(b, operation, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y.descriptor);
    cudnn_operation(b, operation, what);
}
// Returns f(x) or, unless `with` is NULL, f(x, with), computed in fp32, as a virtual tensor of x's shape and of `type`.
static inline struct cudnn_tensor cudnn_pointwise(struct cudnn_builder *b, enum cudnn_pointwise_mode mode,
                                                  struct cudnn_tensor x, const struct cudnn_tensor *with,
                                                  enum cudnn_data_type type) {
    const struct cudnn_function f = {mode, CUDNN_DATA_FLOAT, 0};
    const struct cudnn_tensor y = cudnn_virtual(b, type, x.dims);
    cudnn_pointwise_to(b, f, x, with, NULL, y);
    return y;
}

// Appends y = x, reduced over dimensions that are 1 in y only. Where y has fewer heads, each reduces a group of x's.
static inline void cudnn_reduce_to(struct cudnn_builder *b, enum cudnn_reduction reduction, struct cudnn_tensor x,
                                   struct cudnn_tensor y) {
    struct cudnn_descriptor *function = cudnn_make(b, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    cudnn_set(b, function, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &reduction);
    cudnn_set_type(b, function, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_DATA_FLOAT);
    cudnn_finish(b, function, "a reduction");
    struct cudnn_descriptor *operation = cudnn_make(b, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    cudnn_set_descriptor(b, operation, CUDNN_ATTR_OPERATION_REDUCTION_DESC, function);
    cudnn_set_descriptor(b, operation, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x.descriptor);
    cudnn_set_descriptor(b, operation, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y.descriptor);
    cudnn_operation(b, operation, "a reduction");
}
// Reduces rows, (.., n) to (.., 1), into a virtual fp32 tensor, which it returns.
static inline struct cudnn_tensor cudnn_reduce_rows(struct cudnn_builder *b, enum cudnn_reduction reduction,
                                                    struct cudnn_tensor x) {
    const int64_t dims[CUDNN_RANK] = {x.dims[0], x.dims[1], x.dims[2], 1};
    const struct cudnn_tensor y = cudnn_virtual(b, CUDNN_DATA_FLOAT, dims);
    cudnn_reduce_to(b, reduction, x, y);
    return y;
}

// Appends a reshape. Returns its output, virtual and of `type`: x with the last two dimensions exchanged. strides: x's.
static inline struct cudnn_tensor cudnn_transposed(struct cudnn_builder *b, struct cudnn_tensor x,
                                                   enum cudnn_data_type type, const int64_t strides[CUDNN_RANK]) {
    const int64_t dims[CUDNN_RANK] = {x.dims[0], x.dims[1], x.dims[3], x.dims[2]};
    const int64_t turned[CUDNN_RANK] = {strides[0], strides[1], strides[3], strides[2]};
    const struct cudnn_tensor y =
        cudnn_tensor_of(b, CUDNN_VIRTUAL_IDS + b->made_count, type, dims, turned, CUDNN_VIRTUAL, CUDNN_ALIGNMENT);
    struct cudnn_descriptor *operation = cudnn_make(b, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    cudnn_set_descriptor(b, operation, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x.descriptor);
    cudnn_set_descriptor(b, operation, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y.descriptor);
    cudnn_operation(b, operation, "a reshape");
    return y;
}

// Moves the builder's operations from number `before` on to a graph, which it returns to be set within an operation.
static inline struct cudnn_descriptor *cudnn_subgraph(struct cudnn_builder *b, int before) {
    struct cudnn_descriptor *graph = cudnn_make(b, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    cudnn_set(b, graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, b->operation_count - before,
              b->operations + before);
    cudnn_finish(b, graph, "the graph within an operation");
    b->operation_count = before;
    return graph;
}

// ---- execution plans ----

// An engine by its number, and its knobs.
struct cudnn_knob {
    enum cudnn_knob_type type;
    int64_t value;
};
struct cudnn_engine {
    int64_t index;
    const struct cudnn_knob *knobs;
    int knob_count;
};

// Returns the graph of all the builder's operations, not to be used where b->reason is not empty.
static inline struct cudnn_descriptor *cudnn_operation_graph(struct cudnn_builder *b, struct cudnn_context *handle) {
    struct cudnn_descriptor *graph = cudnn_make(b, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    cudnn_set(b, graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, b->operation_count,
              b->operations);
    cudnn_set(b, graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
    cudnn_finish(b, graph, "the graph");
    return graph;
}

// Returns the wanted engine's configuration, of 8 knobs at most, for a graph, not to be used if b->reason is not empty.
static inline struct cudnn_descriptor *cudnn_configuration_of(struct cudnn_builder *b, struct cudnn_descriptor *graph,
                                                              const struct cudnn_engine *wanted) {
    struct cudnn_descriptor *knobs[8];
    assert(wanted->knob_count <= 8);
    struct cudnn_descriptor *engine = cudnn_make(b, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    cudnn_set_descriptor(b, engine, CUDNN_ATTR_ENGINE_OPERATION_GRAPH, graph);
    cudnn_set_int64(b, engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, wanted->index);
    cudnn_finish(b, engine, "the engine");
    for (int i = 0; i < wanted->knob_count; i++) {
        knobs[i] = cudnn_make(b, CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR);
        cudnn_set(b, knobs[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, 1, &wanted->knobs[i].type);
        cudnn_set_int64(b, knobs[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, wanted->knobs[i].value);
        cudnn_finish(b, knobs[i], "a knob");
    }
    struct cudnn_descriptor *configuration = cudnn_make(b, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    cudnn_set_descriptor(b, configuration, CUDNN_ATTR_ENGINECFG_ENGINE, engine);
    cudnn_set(b, configuration, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, CUDNN_TYPE_BACKEND_DESCRIPTOR, wanted->knob_count,
              knobs);
    cudnn_finish(b, configuration, "the engine's configuration");
    return configuration;
}
// Asks the heuristics for configurations of a graph, best first. Returns how many came; after a refusal 0.
static inline int cudnn_proposals(struct cudnn_builder *b, struct cudnn_descriptor *graph,
                                  struct cudnn_descriptor *configurations[CUDNN_MAX_CONFIGURATIONS]) {
    const enum cudnn_heuristics_mode mode = CUDNN_HEUR_MODE_A;
    int64_t count = 0;
    struct cudnn_descriptor *heuristics = cudnn_make(b, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    cudnn_set_descriptor(b, heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
    cudnn_set(b, heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    cudnn_finish(b, heuristics, "the heuristics");
    for (int i = 0; i < CUDNN_MAX_CONFIGURATIONS; i++)
        configurations[i] = cudnn_make(b, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    if (*b->reason ||
        !cudnn_ok(b,
                  b->functions->get_attribute(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                              CUDNN_MAX_CONFIGURATIONS, &count, configurations),
                  "the heuristics' results"))
        return 0;
    return count < CUDNN_MAX_CONFIGURATIONS ? (int)count : (int)CUDNN_MAX_CONFIGURATIONS;
}
// Whether an engine says that its bits may differ from run to run. True also where it can't be asked: see b->reason.
static inline bool cudnn_may_differ(struct cudnn_builder *b, struct cudnn_descriptor *configuration) {
    enum cudnn_numerical_note notes[CUDNN_NUMERICAL_NOTE_TYPE_COUNT];
    int64_t count = 0;
    struct cudnn_descriptor *engine = cudnn_make(b, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    if (*b->reason ||
        !cudnn_ok(b,
                  b->functions->get_attribute(configuration, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                              1, &count, &engine),
                  "the configuration's engine") ||
        !cudnn_ok(b,
                  b->functions->get_attribute(engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                                              CUDNN_NUMERICAL_NOTE_TYPE_COUNT, &count, notes),
                  "the engine's notes"))
        return true;
    for (int64_t i = 0; i < count && i < CUDNN_NUMERICAL_NOTE_TYPE_COUNT; i++)
        if (notes[i] == CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC)
            return true;
    return false;
}
// Returns the execution plan of a configuration, not to be used where b->reason is not empty.
static inline struct cudnn_descriptor *cudnn_plan_of(struct cudnn_builder *b, struct cudnn_context *handle,
                                                     struct cudnn_descriptor *configuration) {
    struct cudnn_descriptor *plan = cudnn_make(b, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    cudnn_set(b, plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
    cudnn_set_descriptor(b, plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration);
    cudnn_finish(b, plan, "the plan");
    return plan;
}
