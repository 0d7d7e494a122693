// Attention by cuDNN, on a GPU, bf16: memory linear in T, causal or full, grouped queries, without dropout. The library
// is loaded at run time and may be absent.
//
// Forward is asked for as one operation, as NVIDIA's frontend does, from 9.21 on; where no engine takes that, or where
// fused_check finds it wrong, and by older versions, by the graph of operations that cuDNN's engines recognise: two
// products and a softmax written out as maximum, difference, exponential, sum and quotient. Backward is asked for by
// the five products of the gradient, of which the frontend makes no other. Sources: the graphs that cudnn-frontend
// makes and the conditions under which it refuses to (github.com/NVIDIA/cudnn-frontend, 1.2x:
// node/scaled_dot_product_flash_attention.h, node/sdpa_support_surface.h).
//
// Q, K and V are read from packed qkv and their gradients written to packed dqkv, by strides. What forward keeps for
// backward is the log-sum-exp of each row, as flash attention's.
//
// An execution plan is made the first time that a shape is asked for, which takes the host some time, and kept until
// the library is closed: recorded graphs hold its kernels. A call with a plan allocates nothing on the GPU and
// synchronizes nothing, so that it can be recorded.
//
// Determinism. cuDNN states that most of its routines give the same bits in every run of one version on one
// architecture (its developer guide, "Reproducibility"); an engine that does not carries a note. Forward: the report
// says whether the engine has the note; without it recomputation should change no bit. Backward: enum fused_order.
#pragma once
#include "kernels/attention_shape.cuh" // struct attention_shape
#include "kernels/cudnn_graph.h"       // cudnn_matmul, cudnn_pointwise, cudnn_plan_of
#include "kernels/device.cuh"          // floatX, struct device, cuda_check
#include "kernels/device_memory.cuh"   // device_zero
#include "kernels/fp8_cast.cuh"        // fp8_amax
#include <float.h>                     // FLT_MAX
#include <math.h>                      // INFINITY
#include <stdlib.h>                    // calloc, free
#include <time.h>                      // clock_gettime

// The unique ids of the graphs' tensors.
enum fused_tensor {
    FUSED_Q = 1,
    FUSED_K,
    FUSED_V,
    FUSED_OUT,
    FUSED_LSE,    // (B, H, T) fp32
    FUSED_SCALE,  // number: attention_shape's
    FUSED_HIDDEN, // number: the score of a key that is not seen
    FUSED_ONE,    // number: what undoes dropout's scale, which there is none of
    FUSED_DOUT,
    FUSED_DQ,
    FUSED_DK,
    FUSED_DV,
    FUSED_ROW_SUMS, // (B, H, T) fp32, scratch: the sums of dout * out
    FUSED_DQ_SUM,   // (B, H, T, D) fp32, scratch: dQ as it is summed in any order
    FUSED_TENSORS,
};

// How backward sums dQ over the tiles of keys. Only the first may give other bits in another run; 9.19 puts no note on
// it. The other two are deterministic by engines that, but for FUSED_SUM_NONE on compute capability 9.0, heuristics do
// not propose (fused_own_engine).
enum fused_order {
    FUSED_SUM_ANY,  // in fp32 in memory, as the tiles are done
    FUSED_SUM_NONE, // the graph has no sum in memory; on compute capability 9.0 it keeps all of dP, B * H * T * T * 2 B
    FUSED_SUM_TURNS, // in fp32 in memory, tile after tile: memory linear in T, and slower; on 9.0, from 9.25 on
};

enum {
    FUSED_PLANS = 64, // one model has one shape, two of evaluation's, and one for each length of a prompt
    FUSED_SCRATCH_ALIGNMENT = 256,
};

// Every member is an int64, so that keys compare by their bytes.
struct fused_key {
    int64_t B, T, heads, groups, head_dim, full, backward, order; // order: enum fused_order, of backward
};
struct fused_plan {
    struct fused_key key;
    struct cudnn_builder builder;
    struct cudnn_descriptor *plan; // NULL: builder.reason says why there is none
    int64_t workspace_bytes;
    bool may_differ; // the engine says that its bits may differ from run to run
    bool operation;  // forward, as one operation
};
struct fused_library {
    struct cudnn_functions functions;
    struct cudnn_context *handle; // NULL: `obstacle` says why
    char obstacle[256], name[24]; // name: with the version
    bool composes;                // forward is asked for by a graph of operations alone
    bool checks;                  // what a call breaks goes to `broken`; else it ends the program
    char broken[192];
    size_t version;
    double most_dp_bytes; // of FUSED_SUM_NONE, where there is a choice
    int major, minor;     // of the GPU's compute capability
    cudaStream_t stream;  // the handle's
    double planning_s;    // what plans took to make, so far
    double distance;      // the largest from flash attention that attention_cudnn_check.cuh has seen
    int planned;
    struct fused_plan plans[FUSED_PLANS];
};

// ---- the library ----

// The bytes of dP that backward may keep where it has a choice: the limit of cudnn-frontend, and its variable.
static double fused_most_dp_bytes(void) {
    static const char variable[] = "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT";
    const char *text = getenv(variable);
    char *end;
    if (!text || !*text)
        return 256 << 20;
    const long long bytes = strtoll(text, &end, 10);
    if (*end || bytes < -1)
        fail("%s=%s in the environment: expected bytes, or -1 for any number; change it or unset it", variable, text);
    return bytes < 0 ? INFINITY : (double)bytes;
}
static void fused_open(struct fused_library *library, struct device *dev) {
    struct cudaDeviceProp properties;
    char error[224];
    if (!dev->open) {
        snprintf(library->obstacle, sizeof library->obstacle, "no GPU is here");
        return;
    }
    if (!cudnn_load(&library->functions, error, sizeof error)) {
        snprintf(library->obstacle, sizeof library->obstacle, "%s", error);
        return;
    }
    library->version = library->functions.get_version();
    library->most_dp_bytes = fused_most_dp_bytes();
    library->composes = library->version < 92100; // which can't mask within the operation
    snprintf(library->name, sizeof library->name, "cuDNN %d.%d.%d", (int)(library->version / 10000),
             (int)(library->version / 100 % 100), (int)(library->version % 100));
    cuda_check(cudaGetDeviceProperties(&properties, dev->index));
    library->major = properties.major;
    library->minor = properties.minor;
    struct cudnn_builder b;
    memset(&b, 0, sizeof b);
    b.functions = &library->functions;
    if (!cudnn_ok(&b, library->functions.create(&library->handle), "can't be opened")) { // also: a part is missing
        library->handle = NULL;
        snprintf(library->obstacle, sizeof library->obstacle, "%s %s", library->name, b.reason);
    }
}
static struct fused_library *fused_library_of(struct device *dev) {
    if (dev->fused == NULL) {
        dev->fused = (struct fused_library *)calloc(1, sizeof *dev->fused);
        if (dev->fused == NULL)
            fail("no memory for cuDNN's plans");
        fused_open(dev->fused, dev);
    }
    return dev->fused;
}
static void fused_forget_plans(struct fused_library *library) {
    for (int i = 0; i < library->planned; i++)
        cudnn_close(&library->plans[i].builder);
    memset(library->plans, 0, sizeof library->plans);
    library->planned = 0;
}
static void fused_close(struct device *dev) {
    struct fused_library *library = dev->fused;
    if (library == NULL)
        return;
    fused_forget_plans(library);
    if (library->handle)
        library->functions.destroy(library->handle);
    free(library);
    dev->fused = NULL;
}
static const char *fused_describe(struct device *dev) { return dev->open ? fused_library_of(dev)->name : "cuDNN"; }

// ---- graphs ----

// A view of `heads` heads in rows of `row` elements a token: (B, heads, T, D), or, transposed, (B, heads, D, T).
struct fused_view {
    struct cudnn_tensor tensor;
    int64_t strides[CUDNN_RANK];
};
static struct fused_view fused_view_of(struct cudnn_builder *b, const struct fused_key *k, enum fused_tensor id,
                                       int64_t heads, int64_t row, bool transposed) {
    struct fused_view view = {{NULL, {0}}, {k->T * row, k->head_dim, row, 1}};
    int64_t dims[CUDNN_RANK] = {k->B, heads, k->T, k->head_dim};
    if (transposed) {
        dims[2] = k->head_dim;
        dims[3] = k->T;
        view.strides[2] = 1;
        view.strides[3] = row;
    }
    view.tensor = cudnn_tensor_of(b, id, CUDNN_DATA_BFLOAT16, dims, view.strides, CUDNN_IN_MEMORY);
    return view;
}
// One fp32 number for each row of the scores.
static struct cudnn_tensor fused_rows(struct cudnn_builder *b, const struct fused_key *k, enum fused_tensor id) {
    const int64_t dims[CUDNN_RANK] = {k->B, k->heads, k->T, 1};
    return cudnn_dense(b, id, CUDNN_DATA_FLOAT, dims, CUDNN_IN_MEMORY);
}

static struct cudnn_tensor fused_index(struct cudnn_builder *b, struct cudnn_tensor scores, int64_t axis) {
    const struct cudnn_function index = {CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_FLOAT, axis};
    const struct cudnn_tensor y = cudnn_virtual(b, CUDNN_DATA_INT32, scores.dims);
    cudnn_pointwise_to(b, index, scores, NULL, NULL, y);
    return y;
}
// The scores of keys that a query sees, and FUSED_HIDDEN in place of the others.
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

static void fused_forward_graph(struct cudnn_builder *b, const struct fused_key *k) {
    const enum cudnn_data_type F = CUDNN_DATA_FLOAT;
    const int64_t row = (k->heads + 2 * k->groups) * k->head_dim, out_row = k->heads * k->head_dim;
    const struct cudnn_tensor q = fused_view_of(b, k, FUSED_Q, k->heads, row, false).tensor;
    const struct cudnn_tensor kt = fused_view_of(b, k, FUSED_K, k->groups, row, true).tensor;
    const struct cudnn_tensor v = fused_view_of(b, k, FUSED_V, k->groups, row, false).tensor;
    const struct cudnn_tensor out = fused_view_of(b, k, FUSED_OUT, k->heads, out_row, false).tensor;
    const struct cudnn_tensor lse = fused_rows(b, k, FUSED_LSE), scale = cudnn_number(b, FUSED_SCALE);
    const struct cudnn_function add = {CUDNN_POINTWISE_ADD, F, 0};

    const struct cudnn_tensor products = cudnn_matmul(b, q, kt, F);
    const struct cudnn_tensor scores = fused_masked(b, k, cudnn_pointwise(b, CUDNN_POINTWISE_MUL, products, &scale, F));
    const struct cudnn_tensor largest = cudnn_reduce_rows(b, CUDNN_REDUCE_TENSOR_MAX, scores);
    const struct cudnn_tensor below = cudnn_pointwise(b, CUDNN_POINTWISE_SUB, scores, &largest, F);
    const struct cudnn_tensor weights = cudnn_pointwise(b, CUDNN_POINTWISE_EXP, below, NULL, F);
    const struct cudnn_tensor sum = cudnn_reduce_rows(b, CUDNN_REDUCE_TENSOR_ADD, weights);
    const struct cudnn_tensor log_sum = cudnn_pointwise(b, CUDNN_POINTWISE_LOG, sum, NULL, F);
    cudnn_pointwise_to(b, add, largest, &log_sum, NULL, lse);
    const struct cudnn_tensor p = cudnn_pointwise(b, CUDNN_POINTWISE_DIV, weights, &sum, CUDNN_DATA_BFLOAT16);
    cudnn_matmul_to(b, p, v, out);
}

// The same as one operation, with the mask as a graph within it.
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

// The transposed of scores, in bf16, times x (B, H, T, D): the gradient of K or V, of each group's heads added.
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
    const struct cudnn_tensor centred = cudnn_pointwise(b, CUDNN_POINTWISE_SUB, dp, &row_sums, F);
    const struct cudnn_tensor unscaled = cudnn_pointwise(b, CUDNN_POINTWISE_MUL, centred, &p, F);
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

// ---- plans ----

// The engines that heuristics do not propose, by number, of the deterministic backward; the numbers are those of
// cudnn-frontend (3929da2, and its pull request 398 for compute capability 9.0). From 9.23 on a kernel is described by
// its tiles. Returns a configuration; NULL: the heuristics are asked.
static struct cudnn_descriptor *fused_own_engine(const struct fused_library *library, const struct fused_key *k,
                                                 struct cudnn_builder *b, struct cudnn_descriptor *graph) {
    static const struct cudnn_knob numbered[] = {{CUDNN_KNOB_TYPE_KERNEL_CFG, 31}, {CUDNN_KNOB_TYPE_STAGES, 2}};
    static const struct cudnn_knob tiles[] = {{CUDNN_KNOB_TYPE_TILE_M, 3},     {CUDNN_KNOB_TYPE_TILE_N, 2},
                                              {CUDNN_KNOB_TYPE_KERNEL_CFG, 2}, {CUDNN_KNOB_TYPE_STREAM_K, 0},
                                              {CUDNN_KNOB_TYPE_TILE_CGA_M, 0}, {CUDNN_KNOB_TYPE_STAGES, 2}};
    static const struct cudnn_knob turns[] = {{CUDNN_KNOB_TYPE_TILE_M, 2},     {CUDNN_KNOB_TYPE_TILE_N, 1}, // 64 x 64
                                              {CUDNN_KNOB_TYPE_KERNEL_CFG, 2}, {CUDNN_KNOB_TYPE_STREAM_K, 0},
                                              {CUDNN_KNOB_TYPE_TILE_CGA_M, 0}, {CUDNN_KNOB_TYPE_STAGES, 4}};
    static const struct {
        int major, minor; // the GPU's, or a later minor
        size_t version;   // the library's, or a later one
        enum fused_order order;
        struct cudnn_engine engine;
    } rows[] = {
        // the first that fits is taken
        {9, 0, 92500, FUSED_SUM_TURNS, {6, turns, sizeof turns / sizeof *turns}},
        {10, 4, 92300, FUSED_SUM_NONE, {17, tiles, sizeof tiles / sizeof *tiles}},
        {10, 4, 0, FUSED_SUM_NONE, {17, numbered, sizeof numbered / sizeof *numbered}},
        {10, 0, 92300, FUSED_SUM_NONE, {5, tiles, sizeof tiles / sizeof *tiles}},
        {10, 0, 0, FUSED_SUM_NONE, {5, numbered, sizeof numbered / sizeof *numbered}},
    };
    for (size_t i = 0; k->backward && i < sizeof rows / sizeof *rows; i++)
        if (rows[i].major == library->major && rows[i].minor <= library->minor && rows[i].version <= library->version &&
            rows[i].order == (enum fused_order)k->order)
            return cudnn_configuration_of(b, graph, &rows[i].engine);
    return NULL;
}

// Makes p->plan of a configuration; false: p->builder.reason says why not.
static bool fused_try(const struct fused_library *library, struct fused_plan *p, struct cudnn_descriptor *configuration,
                      bool checked) {
    struct cudnn_builder *b = &p->builder;
    int64_t count = 0;
    const bool may_differ = checked && cudnn_may_differ(b, configuration);
    if (may_differ && p->key.backward && p->key.order != FUSED_SUM_ANY && !*b->reason)
        snprintf(b->reason, sizeof b->reason, "the engine is not deterministic");
    struct cudnn_descriptor *plan = cudnn_plan_of(b, library->handle, configuration);
    if (*b->reason || !cudnn_ok(b,
                                b->functions->get_attribute(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                                            CUDNN_TYPE_INT64, 1, &count, &p->workspace_bytes),
                                "the plan's workspace"))
        return false;
    p->plan = plan;
    p->may_differ = may_differ;
    return true;
}
// Makes p->plan of what the builder has; none: p->builder.reason says why not.
static void fused_plan_operations(const struct fused_library *library, struct fused_plan *p) {
    struct cudnn_builder *b = &p->builder;
    struct cudnn_descriptor *configurations[CUDNN_MOST_CONFIGURATIONS];
    struct cudnn_descriptor *graph = cudnn_operation_graph(b, library->handle);
    struct cudnn_descriptor *const own_engine = fused_own_engine(library, &p->key, b, graph);
    const int count = own_engine || *b->reason ? 1 : cudnn_proposals(b, graph, configurations);
    if (own_engine)
        configurations[0] = own_engine;
    if (!*b->reason && count == 0)
        snprintf(b->reason, sizeof b->reason, "the library has no engine for it");
    if (*b->reason)
        return;
    for (int i = 0; i < count; i++) {
        b->reason[0] = 0; // of the configuration before
        if (fused_try(library, p, configurations[i], !own_engine))
            return;
    }
}
static void fused_make_plan(const struct fused_library *library, struct fused_plan *p) {
    struct cudnn_builder *b = &p->builder;
    b->functions = &library->functions;
    if (!p->key.backward && !library->composes) {
        fused_forward_operation(b, &p->key);
        fused_plan_operations(library, p);
        p->operation = p->plan != NULL;
        if (p->operation)
            return;
        cudnn_close(b);
        b->reason[0] = 0;
    }
    if (p->key.backward)
        fused_backward_graph(b, &p->key);
    else
        fused_forward_graph(b, &p->key);
    fused_plan_operations(library, p);
}

// The plan of a key, made where it is not there yet; NULL: there is no room for one.
static struct fused_plan *fused_plan_for(struct fused_library *library, const struct fused_key *key) {
    for (int i = 0; i < library->planned; i++)
        if (memcmp(&library->plans[i].key, key, sizeof *key) == 0)
            return &library->plans[i];
    if (library->planned == FUSED_PLANS)
        return NULL;
    struct fused_plan *p = &library->plans[library->planned++];
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    p->key = *key;
    fused_make_plan(library, p);
    clock_gettime(CLOCK_MONOTONIC, &end);
    library->planning_s += (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
    return p;
}
static struct fused_key fused_key_of(struct attention_shape s, bool backward, enum fused_order order) {
    const struct fused_key key = {s.B,        s.T,    s.num_heads, s.num_query_groups,
                                  s.head_dim, s.full, backward,    backward ? (int64_t)order : 0};
    return key;
}
// How backward sums dQ for a shape. As cudnn-frontend (pull request 398) says that it is faster, dP is kept up to a
// limit.
static enum fused_order fused_order_of(struct attention_shape s, bool any_order, struct device *dev) {
    const struct fused_library *library = fused_library_of(dev);
    const double dp_bytes = (double)s.B * s.num_heads * s.T * s.T * sizeof(floatX);
    const bool has_turns = library->major == 9 && library->version >= 92500;
    if (any_order)
        return FUSED_SUM_ANY;
    return has_turns && dp_bytes > library->most_dp_bytes ? FUSED_SUM_TURNS : FUSED_SUM_NONE;
}

// The first version that takes heads of up to 256 on compute capability major.x; SIZE_MAX: none does.
static size_t fused_wide_from(int major) {
    static const struct {
        int major;
        size_t version;
    } wide[] = {{9, 90500}, {10, 92600}};
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++)
        if (wide[i].major == major)
            return wide[i].version;
    return SIZE_MAX;
}

// Writes why cuDNN of a version can't take a shape on a GPU of compute capability major.x; an empty text where it may.
// Of the conditions of cudnn-frontend (3929da2) and TransformerEngine (d0067d0, nvte_get_fused_attn_backend and
// pytorch/attention/dot_product_attention/utils.py) the stricter. TransformerEngine takes no deterministic backward on
// 8.x and 12.x; on 11.x NVIDIA's frontend names no engine for it.
static void fused_refuses(char *reason, size_t size, size_t version, int major, struct attention_shape s,
                          bool any_order) {
    const size_t wide_from = fused_wide_from(major);
    const int widest = wide_from != SIZE_MAX && version >= wide_from ? 256 : 128;
    char before[32] = "";
    if (wide_from != SIZE_MAX)
        snprintf(before, sizeof before, " before 9.%d", (int)(wide_from / 100 % 100));
    reason[0] = 0;
    if (major < 8)
        snprintf(reason, size, "needs compute capability 8.0");
    else if (major >= 10 && version < 90700)
        snprintf(reason, size, "before 9.7 takes no compute capability from 10.0 on");
    else if (major == 12 && version < 91801)
        snprintf(reason, size, "before 9.18.1 does not take compute capability 12.x");
    else if (version == 91000 || version == 91001)
        snprintf(reason, size, "versions 9.10.0 and 9.10.1 have known bugs");
    else if (s.softcap > 0)
        snprintf(reason, size, "has no --attn-logit-softcapping");
    else if (s.first_key)
        snprintf(reason, size, "has no documents and no windows");
    else if (s.head_dim > widest)
        snprintf(reason, size, "takes heads of up to %d on this GPU%s, not %d", widest, before, s.head_dim);
    else if (s.T == 1)
        snprintf(reason, size, "takes no sequences of one token");
    else if (s.T % 128 != 0 && version <= 91500)
        snprintf(reason, size, "before 9.15.1 takes only multiples of 128 tokens, not %d", s.T);
    else if (s.full && major == 9 && s.T % 128 == 64 && version < 92600)
        // The keys past the end of the last tile have a score of 0: exp(0 - lse) is infinite where lse is below -88
        // (cudnn-frontend's pull request 628, PyTorch's issue 196678). NVIDIA names a mend for 9.26.
        snprintf(reason, size, "before 9.26 without a causal mask gives NaN for some inputs of %d tokens", s.T);
    else if (major == 10 && version < 91801 && !any_order)
        snprintf(reason, size,
                 "before 9.18.1 has no deterministic backward here (--deterministic-mode=false allows any)");
    else if (major != 9 && major != 10 && !any_order)
        snprintf(reason, size,
                 "its deterministic backward is not proven on compute capability %d.x (--deterministic-mode=false "
                 "allows any)",
                 major);
}
// The same of one direction here, by asking the library for a plan.
static void fused_refuses_direction(char *reason, size_t size, struct attention_shape s, bool backward,
                                    enum fused_order order, struct device *dev) {
    struct fused_library *library = fused_library_of(dev);
    const struct fused_key key = fused_key_of(s, backward, order);
    const bool any_order = order == FUSED_SUM_ANY || !backward;
    reason[0] = 0;
    if (!dev->open) { // planned for a machine that may have all that is needed
        fused_refuses(reason, size, SIZE_MAX, 9, s, any_order);
        return;
    }
    if (!library->handle) {
        snprintf(reason, size, "%s", library->obstacle);
        return;
    }
    char why[224];
    fused_refuses(why, sizeof why, library->version, library->major, s, any_order);
    const struct fused_plan *p = *why ? NULL : fused_plan_for(library, &key);
    if (!*why && p == NULL)
        snprintf(why, sizeof why, "keeps no more than %d plans", FUSED_PLANS);
    else if (!*why && p->plan == NULL)
        snprintf(why, sizeof why, "refuses %s: %s", backward ? "backward" : "forward", p->builder.reason);
    if (*why)
        snprintf(reason, size, "%s: %s", library->name, why);
}
static void fused_refuses_order(char *reason, size_t size, struct attention_shape shape, enum fused_order order,
                                struct device *dev) {
    fused_refuses_direction(reason, size, shape, false, order, dev);
    if (!*reason)
        fused_refuses_direction(reason, size, shape, true, order, dev);
}
static void fused_unavailable_reason(char *reason, size_t size, struct attention_shape shape, bool any_order,
                                     struct device *dev) {
    fused_refuses_order(reason, size, shape, fused_order_of(shape, any_order, dev), dev);
}
// Whether fused is by published figures faster than our kernels on this GPU; own: those of compute capability 9.0 are
// there. On 10.x cuDNN's kernels are written for its tensor cores, ours for those of 8.0; on 9.0 it is twice as fast as
// kernels like those of 8.0. On 8.x and 12.x figures disagree or are against it (docs/gpu/attention-cudnn.md).
static bool fused_leads(bool own, struct device *dev) {
    struct cudaDeviceProp properties;
    if (!dev->open)
        return false;
    cuda_check(cudaGetDeviceProperties(&properties, dev->index));
    return properties.major == 10 || (properties.major == 9 && !own);
}
// The GPU in words, for the report.
static const char *fused_gpu(char *text, size_t size, struct device *dev) {
    struct cudaDeviceProp properties;
    if (!dev->open)
        return "a GPU that is not open";
    cuda_check(cudaGetDeviceProperties(&properties, dev->index));
    snprintf(text, size, "%d.%d", properties.major, properties.minor);
    return text;
}
static bool fused_takes(struct attention_shape shape, struct device *dev) {
    char reason[256];
    fused_refuses_direction(reason, sizeof reason, shape, false, FUSED_SUM_ANY, dev);
    return !*reason;
}

// ---- calls ----

// Parts of the workspace: the caller's scratch tensors, then cuDNN's own.
static size_t fused_rounded(size_t bytes) {
    return (bytes + FUSED_SCRATCH_ALIGNMENT - 1) / FUSED_SCRATCH_ALIGNMENT * FUSED_SCRATCH_ALIGNMENT;
}
static size_t fused_rows_bytes(const struct fused_key *k) {
    return fused_rounded((size_t)(k->B * k->heads * k->T) * sizeof(float));
}
static size_t fused_dq_sum_bytes(const struct fused_key *k) {
    const bool sums = k->backward && k->order != FUSED_SUM_NONE;
    return sums ? fused_rounded((size_t)(k->B * k->heads * k->T * k->head_dim) * sizeof(float)) : 0;
}
static size_t fused_scratch_bytes(const struct fused_key *k) { return fused_rows_bytes(k) + fused_dq_sum_bytes(k); }

// Without a GPU cuDNN can't be asked: backward is planned with dQ in fp32 and, for groups, each head's own dK and dV.
static size_t fused_workspace_bytes(const struct fused_key *k, struct device *dev) {
    const size_t elements = (size_t)(k->B * k->heads * k->T * k->head_dim);
    if (!dev->open)
        return fused_rows_bytes(k) + (k->backward ? fused_rounded(elements * (sizeof(float) + 2 * sizeof(floatX))) : 0);
    const struct fused_plan *p = fused_plan_for(fused_library_of(dev), k);
    return p && p->plan ? fused_scratch_bytes(k) + (size_t)p->workspace_bytes : 0;
}
static size_t fused_forward_workspace_bytes(struct attention_shape shape, struct device *dev) {
    const struct fused_key key = fused_key_of(shape, false, FUSED_SUM_ANY);
    return fused_workspace_bytes(&key, dev);
}
static size_t fused_backward_workspace_bytes(struct attention_shape shape, bool any_order, struct device *dev) {
    const struct fused_key key = fused_key_of(shape, true, fused_order_of(shape, any_order, dev));
    return fused_workspace_bytes(&key, dev);
}

// Writes what the plans take and, of forward, whether it gives the same bits when it is computed again.
static const char *fused_describe_plans(char *text, size_t size, struct attention_shape shape, bool any_order,
                                        struct device *dev) {
    const struct fused_key key = fused_key_of(shape, false, FUSED_SUM_ANY);
    if (!dev->open)
        return "planned without asking it: no GPU is open";
    const double forward = (double)fused_forward_workspace_bytes(shape, dev) / (1 << 20);
    const double backward = (double)fused_backward_workspace_bytes(shape, any_order, dev) / (1 << 20);
    const struct fused_library *library = fused_library_of(dev);
    const struct fused_plan *p = fused_plan_for(fused_library_of(dev), &key);
    const bool turns = fused_order_of(shape, any_order, dev) == FUSED_SUM_TURNS;
    char held[48] = "";
    if (library->distance > 0)
        snprintf(held, sizeof held, "here within %.2g of flash; ", library->distance);
    snprintf(text, size,
             "forward as %s, plans made in %.2f s, with %.3g MiB of workspace forward and %.3g MiB backward%s; %s%s",
             p && p->operation ? "one operation" : "a graph of operations", library->planning_s, forward, backward,
             turns ? ", which sums dQ in turn" : "", held,
             p && p->plan && !p->may_differ
                 ? "by its own notes its forward is deterministic: recomputation changes no bit"
                 : "that recomputation changes no bit is not promised");
    return text;
}

// The addresses of a call's tensors, by their ids; NULL: not in the graph.
struct fused_call {
    const void *tensors[FUSED_TENSORS];
    float scale, hidden, one;
};
static struct fused_call fused_call_of(const struct fused_library *library, struct attention_shape shape,
                                       const floatX *qkv) {
    struct fused_call call;
    const int64_t keys = (int64_t)shape.num_heads * shape.head_dim;
    memset(&call, 0, sizeof call);
    call.scale = shape.scale;
    call.hidden = library->version < 91000 ? -FLT_MAX : -INFINITY; // which the older ones can't have in a softmax
    call.one = 1;
    call.tensors[FUSED_Q] = qkv;
    call.tensors[FUSED_K] = qkv + keys;
    call.tensors[FUSED_V] = qkv + keys + (int64_t)shape.num_query_groups * shape.head_dim;
    return call;
}

static struct fused_plan *fused_plan_to_run(struct fused_library *library, const struct fused_key *key) {
    struct fused_plan *p = library->handle ? fused_plan_for(library, key) : NULL;
    if (p == NULL || p->plan == NULL)
        fail("cuDNN's attention can't run: %s",
             p ? p->builder.reason : (library->handle ? "too many shapes" : library->obstacle));
    return p;
}
static void fused_run(struct fused_library *library, const struct fused_plan *p, struct fused_call *call,
                      void *workspace, struct device *dev) {
    struct cudnn_builder b;
    int64_t ids[FUSED_TENSORS];
    void *pointers[FUSED_TENSORS];
    int count = 0;
    memset(&b, 0, sizeof b);
    b.functions = &library->functions;
    call->tensors[FUSED_SCALE] = &call->scale;
    call->tensors[FUSED_HIDDEN] = p->key.full ? NULL : &call->hidden;
    call->tensors[FUSED_ONE] = p->key.backward ? &call->one : NULL;
    for (int id = 0; id < FUSED_TENSORS; id++)
        if (call->tensors[id]) {
            ids[count] = id;
            pointers[count++] = (void *)(uintptr_t)call->tensors[id];
        }
    struct cudnn_descriptor *pack = cudnn_make(&b, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    cudnn_set(&b, pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, ids);
    cudnn_set(&b, pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, pointers);
    cudnn_set(&b, pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
    cudnn_finish(&b, pack, "the variant pack");
    if (!*b.reason && library->stream != dev->stream &&
        cudnn_ok(&b, library->functions.set_stream(library->handle, dev->stream), "the stream"))
        library->stream = dev->stream;
    if (!*b.reason)
        cudnn_ok(&b, library->functions.execute(library->handle, p->plan, pack), "the call");
    if (*b.reason && !library->checks)
        fail("cuDNN's attention: %s", b.reason);
    if (*b.reason)
        snprintf(library->broken, sizeof library->broken, "%s", b.reason);
    cudnn_close(&b);
}

// out = softmax(scale Q K^T + causal mask) V, without the mask where shape.full; lse = ln(sum of e^s) of each row's
// masked, scaled scores s.
static void fused_forward(floatX *out,       // (B, T, H * D)
                          float *lse,        // (B, H, T); NULL: not written
                          const floatX *qkv, // (B, T, (H + 2 Hkv) * D)
                          struct attention_shape shape, uint32_t *amax, void *workspace, struct device *dev) {
    struct fused_library *library = fused_library_of(dev);
    const struct fused_key key = fused_key_of(shape, false, FUSED_SUM_ANY);
    const struct fused_plan *p = fused_plan_to_run(library, &key);
    struct fused_call call = fused_call_of(library, shape, qkv);
    call.tensors[FUSED_OUT] = out;
    call.tensors[FUSED_LSE] = lse ? (void *)lse : workspace;
    fused_run(library, p, &call, (char *)workspace + fused_scratch_bytes(&key), dev);
    if (amax)
        fp8_amax(amax, out, key.B * key.T * key.heads * key.head_dim, dev);
}
// The gradient of fused_forward; dqkv is written in full.
static void fused_backward_by(enum fused_order order,
                              floatX *dqkv,       // (B, T, (H + 2 Hkv) * D)
                              const floatX *dout, // (B, T, H * D)
                              const floatX *qkv,  // (B, T, (H + 2 Hkv) * D)
                              const floatX *out,  // (B, T, H * D)
                              const float *lse,   // (B, H, T)
                              struct attention_shape shape, uint32_t *amax, void *workspace, struct device *dev) {
    struct fused_library *library = fused_library_of(dev);
    const struct fused_key key = fused_key_of(shape, true, order);
    const struct fused_plan *p = fused_plan_to_run(library, &key);
    struct fused_call call = fused_call_of(library, shape, qkv);
    char *dq_sum = (char *)workspace + fused_rows_bytes(&key);
    floatX *dk = dqkv + key.heads * key.head_dim;
    call.tensors[FUSED_OUT] = out;
    call.tensors[FUSED_LSE] = lse;
    call.tensors[FUSED_DOUT] = dout;
    call.tensors[FUSED_DQ] = dqkv;
    call.tensors[FUSED_DK] = dk;
    call.tensors[FUSED_DV] = dk + key.groups * key.head_dim;
    call.tensors[FUSED_ROW_SUMS] = workspace;
    call.tensors[FUSED_DQ_SUM] = order != FUSED_SUM_NONE ? dq_sum : NULL;
    if (order != FUSED_SUM_NONE && library->version < 90600) // the later ones zero it themselves
        device_zero(dq_sum, fused_dq_sum_bytes(&key), dev);
    fused_run(library, p, &call, (char *)workspace + fused_scratch_bytes(&key), dev);
    if (amax)
        fp8_amax(amax, dqkv, key.B * key.T * (key.heads + 2 * key.groups) * key.head_dim, dev);
}
static void fused_backward(floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out, const float *lse,
                           struct attention_shape shape, bool any_order, uint32_t *amax, void *workspace,
                           struct device *dev) {
    fused_backward_by(fused_order_of(shape, any_order, dev), dqkv, dout, qkv, out, lse, shape, amax, workspace, dev);
}
