// Defines what kernels/cudnn/attention.cuh declares; in a build for fp32 or the CPU, stand-ins that refuse.
#include "kernels/cudnn/attention.cuh"
#include "kernels/cudnn/attention_rules.cuh" // fused_refuses, fused_planned_bytes
#if defined(TARGET_CUDA) && defined(PRECISION_BF16)
#include "kernels/cudnn/library.cuh"          // struct fused_library
#include "kernels/cudnn/attention_graphs.cuh" // fused_forward_operation, fused_forward_graph, fused_backward_graph
#include "kernels/cudnn/fp8_graphs.cuh"       // fused_fp8_forward_graph, fused_fp8_backward_graph
#include "kernels/device.cuh"                 // floatX, struct device, cuda_check
#include "kernels/device_memory.cuh"          // device_zero
#include "kernels/fp8/cast.cuh"               // fp8_amax
#include <float.h>                            // FLT_MAX
#include <math.h>                             // INFINITY
#include <stdlib.h>                           // calloc, free
#include <time.h>                             // clock_gettime

// ---- the library ----

// Returns how many bytes of dP backward may keep where it has a choice: cudnn-frontend's 256 MiB, or its environment
// variable's number, with INFINITY for -1. Ends the program if the variable is no such number.
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
// Loads cuDNN and fills *library, which must be zero, with a handle, still without a stream, and with what is known of
// cuDNN and the GPU. If that fails, sets `obstacle`. Ends the program for a malformed environment variable.
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
    library->composes = library->version < 92100; // older versions can't mask within the operation
    snprintf(library->name, sizeof library->name, "cuDNN %d.%d.%d", (int)(library->version / 10000),
             (int)(library->version / 100 % 100), (int)(library->version % 100));
    cuda_check(cudaGetDeviceProperties(&properties, dev->index));
    library->major = properties.major;
    library->minor = properties.minor;
    struct cudnn_builder b;
    memset(&b, 0, sizeof b);
    b.functions = &library->functions;
    if (!cudnn_ok(&b, library->functions.create(&library->handle), "can't be opened")) { // as when a part is missing
        library->handle = NULL;
        snprintf(library->obstacle, sizeof library->obstacle, "%s %s", library->name, b.reason);
    }
}
struct fused_library *fused_library_of(struct device *dev) {
    if (dev->fused == NULL) {
        dev->fused = (struct fused_library *)calloc(1, sizeof *dev->fused);
        if (dev->fused == NULL)
            fail("no memory for cuDNN's plans");
        fused_open(dev->fused, dev);
    }
    return dev->fused;
}
void fused_forget_plans(struct fused_library *library) {
    for (int i = 0; i < library->planned; i++)
        cudnn_close(&library->plans[i].builder);
    memset(library->plans, 0, sizeof library->plans);
    library->planned = 0;
}
void fused_close(struct device *dev) {
    struct fused_library *library = dev->fused;
    if (library == NULL)
        return;
    fused_forget_plans(library);
    if (library->handle)
        library->functions.destroy(library->handle);
    free(library);
    dev->fused = NULL;
}
uint64_t fused_installed(void) { return cudnn_installed(); }
const char *fused_describe(struct device *dev) { return dev->open ? fused_library_of(dev)->name : "cuDNN"; }

// ---- plans ----

// Returns the engine for deterministic backward in this order that cuDNN's heuristics do not propose; NULL: there is
// none, ask the heuristics. The engines' numbers are cudnn-frontend's (3929da2, and its pull request 398 for compute
// capability 9.0). From cuDNN 9.23 on a kernel is described by its tiles.
static const struct cudnn_engine *fused_own_engine(const struct fused_library *library, enum fused_order order) {
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
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i].major == library->major && rows[i].minor <= library->minor && rows[i].version <= library->version &&
            rows[i].order == order)
            return &rows[i].engine;
    return NULL;
}

// Makes p->plan of a configuration. If cuDNN refuses, returns false and sets p->builder.reason, empty before. `checked`
// asks if the engine's bits may differ, for p->may_differ, and refuses that in deterministic backward.
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
// Sets p->plan for the builder's operations: by fused_own_engine's engine only or, without one, by the heuristics'
// first proposal that is taken. If none is, leaves p->plan NULL: p->builder.reason has the last refusal.
static void fused_plan_operations(const struct fused_library *library, struct fused_plan *p) {
    struct cudnn_builder *b = &p->builder;
    struct cudnn_descriptor *configurations[CUDNN_MAX_CONFIGURATIONS];
    struct cudnn_descriptor *graph = cudnn_operation_graph(b, library->handle);
    const struct cudnn_engine *own_engine =
        p->key.backward ? fused_own_engine(library, (enum fused_order)p->key.order) : NULL;
    const int count = own_engine ? 1 : cudnn_proposals(b, graph, configurations);
    if (own_engine)
        configurations[0] = cudnn_configuration_of(b, graph, own_engine);
    if (!*b->reason && count == 0)
        snprintf(b->reason, sizeof b->reason, "the library has no engine for it");
    if (*b->reason)
        return;
    for (int i = 0; i < count; i++) {
        b->reason[0] = 0; // the last configuration's
        if (fused_try(library, p, configurations[i], !own_engine))
            return;
    }
}
// Makes the plan of p->key; the rest of p must be zero. Asks for bf16 forward as one operation where that is taken, and
// otherwise for a graph of operations. p->plan stays NULL where the library refuses.
static void fused_make_plan(const struct fused_library *library, struct fused_plan *p) {
    struct cudnn_builder *b = &p->builder;
    b->functions = &library->functions;
    if (!p->key.backward && p->key.types == FUSED_BF16 && !library->composes) {
        fused_forward_operation(b, &p->key);
        fused_plan_operations(library, p);
        p->operation = p->plan != NULL;
        if (p->operation)
            return;
        cudnn_close(b);
        b->reason[0] = 0;
    }
    if (p->key.types != FUSED_BF16)
        p->key.backward ? fused_fp8_backward_graph(b, &p->key) : fused_fp8_forward_graph(b, &p->key);
    else
        p->key.backward ? fused_backward_graph(b, &p->key) : fused_forward_graph(b, &p->key);
    fused_plan_operations(library, p);
}

struct fused_plan *fused_plan_for(struct fused_library *library, const struct fused_key *key) {
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
struct fused_key fused_key_of(struct attention_shape s, bool backward, enum fused_order order) {
    const struct fused_key key = {s.B,        s.T,    s.num_heads, s.num_query_groups,
                                  s.head_dim, s.full, backward,    backward ? (int64_t)order : 0,
                                  FUSED_BF16, false};
    return key;
}
enum fused_order fused_order_of(struct attention_shape s, bool any_order, struct device *dev) {
    const struct fused_library *library = fused_library_of(dev);
    const double dp_bytes = (double)s.B * s.num_heads * s.T * s.T * sizeof(floatX);
    const bool has_turns = fused_own_engine(library, FUSED_SUM_TURNS) != NULL;
    if (any_order)
        return FUSED_SUM_ANY;
    return has_turns && dp_bytes > library->most_dp_bytes ? FUSED_SUM_TURNS : FUSED_SUM_NONE;
}

// Writes why cuDNN can't take a shape in one direction; else empty. Makes the plan, or without a GPU uses rules.
static void fused_refuses_direction(char *reason, size_t size, struct attention_shape s, bool backward,
                                    enum fused_order order, struct device *dev) {
    struct fused_library *library = fused_library_of(dev);
    const struct fused_key key = fused_key_of(s, backward, order);
    const bool any_order = order == FUSED_SUM_ANY || !backward;
    reason[0] = 0;
    if (!dev->open) {
        fused_refuses_planned(reason, size, s, any_order, dev);
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
void fused_refuses_order(char *reason, size_t size, struct attention_shape shape, enum fused_order order,
                         struct device *dev) {
    fused_refuses_direction(reason, size, shape, false, order, dev);
    if (!*reason)
        fused_refuses_direction(reason, size, shape, true, order, dev);
}
void fused_unavailable_reason(char *reason, size_t size, struct attention_shape shape, bool any_order,
                              struct device *dev) {
    fused_refuses_order(reason, size, shape, fused_order_of(shape, any_order, dev), dev);
}
bool fused_leads(bool own, struct device *dev) {
    struct cudaDeviceProp properties;
    if (!dev->open)
        return false;
    cuda_check(cudaGetDeviceProperties(&properties, dev->index));
    return fused_leads_on(properties.major, own);
}
const char *fused_gpu(char *text, size_t size, struct device *dev) {
    struct cudaDeviceProp properties;
    if (!dev->open)
        return fused_planned_gpu(text, size, dev);
    cuda_check(cudaGetDeviceProperties(&properties, dev->index));
    snprintf(text, size, "%d.%d", properties.major, properties.minor);
    return text;
}
bool fused_takes(struct attention_shape shape, struct device *dev) {
    char reason[256];
    fused_refuses_direction(reason, sizeof reason, shape, false, FUSED_SUM_ANY, dev);
    return !*reason;
}

// ---- calls ----

// The number of bytes of one fp32 number a row: the workspace's first part, before dQ's sum and cuDNN's own part.
static size_t fused_row_numbers_bytes(const struct fused_key *k) { return fused_sums_bytes(k->B, k->heads, k->T); }
// The number of bytes of dQ's fp32 sum in memory; 0 for forward, and for FUSED_SUM_NONE, which has none.
static size_t fused_dq_sum_bytes(const struct fused_key *k) {
    const bool sums = k->backward && k->order != FUSED_SUM_NONE;
    return sums ? fused_rounded((size_t)(k->B * k->heads * k->T * k->head_dim) * sizeof(float)) : 0;
}
// The number of bytes of the workspace before cuDNN's own part.
static size_t fused_scratch_bytes(const struct fused_key *k) {
    return fused_row_numbers_bytes(k) + fused_dq_sum_bytes(k);
}

size_t fused_workspace_bytes(const struct fused_key *k, struct device *dev) {
    const struct fused_plan *p = fused_plan_for(fused_library_of(dev), k);
    return p && p->plan ? fused_scratch_bytes(k) + (size_t)p->workspace_bytes : 0;
}
size_t fused_forward_workspace_bytes(struct attention_shape shape, struct device *dev) {
    if (!dev->open)
        return fused_planned_bytes(shape, false);
    const struct fused_key key = fused_key_of(shape, false, FUSED_SUM_ANY);
    return fused_workspace_bytes(&key, dev);
}
size_t fused_backward_workspace_bytes(struct attention_shape shape, bool any_order, struct device *dev) {
    if (!dev->open)
        return fused_planned_bytes(shape, true);
    const struct fused_key key = fused_key_of(shape, true, fused_order_of(shape, any_order, dev));
    return fused_workspace_bytes(&key, dev);
}

const char *fused_describe_plans(char *text, size_t size, struct attention_shape shape, bool any_order,
                                 struct device *dev) {
    const struct fused_key key = fused_key_of(shape, false, FUSED_SUM_ANY);
    if (!dev->open)
        return FUSED_NOT_ASKED;
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

struct fused_call fused_call_of(const struct fused_library *library, float scale) {
    struct fused_call call;
    memset(&call, 0, sizeof call);
    call.scale = scale;
    call.hidden = library->version < 91000 ? -FLT_MAX : -INFINITY; // older versions can't have infinity in a softmax
    call.one = 1;
    return call;
}
// Returns fused_call_of's numbers with the addresses of Q, K and V in qkv.
static struct fused_call fused_call_with(const struct fused_library *library, struct attention_shape shape,
                                         const floatX *qkv) {
    struct fused_call call = fused_call_of(library, shape.scale);
    const int64_t keys = (int64_t)shape.num_heads * shape.head_dim;
    call.tensors[FUSED_Q] = qkv;
    call.tensors[FUSED_K] = qkv + keys;
    call.tensors[FUSED_V] = qkv + keys + (int64_t)shape.num_query_groups * shape.head_dim;
    return call;
}

struct fused_plan *fused_plan_to_run(struct fused_library *library, const struct fused_key *key) {
    struct fused_plan *p = library->handle ? fused_plan_for(library, key) : NULL;
    if (p == NULL || p->plan == NULL)
        fail("cuDNN's attention can't run: %s",
             p ? p->builder.reason : (library->handle ? "too many shapes" : library->obstacle));
    return p;
}
void fused_run(struct fused_library *library, const struct fused_plan *p, struct fused_call *call, void *workspace,
               struct device *dev) {
    struct cudnn_builder b;
    int64_t ids[FUSED_TENSORS];
    void *pointers[FUSED_TENSORS];
    int count = 0;
    memset(&b, 0, sizeof b);
    b.functions = &library->functions;
    call->tensors[FUSED_SCALE] = &call->scale;
    call->tensors[FUSED_HIDDEN] = p->key.full ? NULL : &call->hidden;
    call->tensors[FUSED_ONE] = p->key.backward && p->key.types == FUSED_BF16 ? &call->one : NULL;
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
    launched_record("cuDNN's attention");
    if (!*b.reason)
        cudnn_ok(&b, library->functions.execute(library->handle, p->plan, pack), "the call");
    if (*b.reason && !library->checks)
        fail("cuDNN's attention: %s", b.reason);
    if (*b.reason)
        snprintf(library->broken, sizeof library->broken, "%s", b.reason);
    cudnn_close(&b);
}

void fused_forward(floatX *out,       // (B, T, H * D)
                   float *lse,        // (B, H, T); NULL: not written
                   const floatX *qkv, // (B, T, (H + 2 Hkv) * D)
                   struct attention_shape shape, uint32_t *amax, void *workspace, struct device *dev) {
    struct fused_library *library = fused_library_of(dev);
    const struct fused_key key = fused_key_of(shape, false, FUSED_SUM_ANY);
    const struct fused_plan *p = fused_plan_to_run(library, &key);
    struct fused_call call = fused_call_with(library, shape, qkv);
    call.tensors[FUSED_OUT] = out;
    call.tensors[FUSED_LSE] = lse ? (void *)lse : workspace;
    fused_run(library, p, &call, (char *)workspace + fused_scratch_bytes(&key), dev);
    if (amax)
        fp8_amax(amax, out, key.B * key.T * key.heads * key.head_dim, dev);
}
void fused_backward_by(enum fused_order order,
                       floatX *dqkv,       // (B, T, (H + 2 Hkv) * D)
                       const floatX *dout, // (B, T, H * D)
                       const floatX *qkv,  // (B, T, (H + 2 Hkv) * D)
                       const floatX *out,  // (B, T, H * D)
                       const float *lse,   // (B, H, T)
                       struct attention_shape shape, uint32_t *amax, void *workspace, struct device *dev) {
    struct fused_library *library = fused_library_of(dev);
    const struct fused_key key = fused_key_of(shape, true, order);
    const struct fused_plan *p = fused_plan_to_run(library, &key);
    struct fused_call call = fused_call_with(library, shape, qkv);
    char *dq_sum = (char *)workspace + fused_row_numbers_bytes(&key);
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
void fused_backward(floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out, const float *lse,
                    struct attention_shape shape, bool any_order, uint32_t *amax, void *workspace, struct device *dev) {
    fused_backward_by(fused_order_of(shape, any_order, dev), dqkv, dout, qkv, out, lse, shape, amax, workspace, dev);
}

#else
#include "runtime/machine/error.h" // fail
#include <stdio.h>                 // snprintf

// Whether memory is planned in bf16 for a GPU, whose own build may have the library.
static bool plans_fused(const struct device *dev) { return sizeof(floatX) == 2 && device_is_gpu(dev); }

void fused_unavailable_reason(char *reason, size_t size, struct attention_shape shape, bool any_order,
                              struct device *dev) {
    if (plans_fused(dev))
        fused_refuses_planned(reason, size, shape, any_order, dev);
    else
        snprintf(reason, size, "takes only bf16 on a GPU");
}
void fused_check(char *reason, size_t size, struct attention_shape like, bool any_order, struct device *dev) {}
void fp8_attention_check(char *reason, size_t size, struct attention_shape like, struct fp8_attention_demands demands,
                         struct device *dev) {
    reason[0] = 0;
}
uint64_t fused_installed(void) { return 0; }
const char *fused_describe(struct device *dev) { return "cuDNN"; }
bool fused_leads(bool own, struct device *dev) { return false; }
const char *fused_gpu(char *text, size_t size, struct device *dev) { return fused_planned_gpu(text, size, dev); }
const char *fused_describe_plans(char *text, size_t size, struct attention_shape shape, bool any_order,
                                 struct device *dev) {
    return FUSED_NOT_ASKED;
}
bool fused_takes(struct attention_shape shape, struct device *dev) {
    char reason[256];
    fused_unavailable_reason(reason, sizeof reason, shape, true, dev);
    return !*reason;
}
void fused_close(struct device *dev) {}
size_t fused_forward_workspace_bytes(struct attention_shape shape, struct device *dev) {
    return fused_planned_bytes(shape, false);
}
size_t fused_backward_workspace_bytes(struct attention_shape shape, bool any_order, struct device *dev) {
    return fused_planned_bytes(shape, true);
}
void fused_forward(floatX *out, float *lse, const floatX *qkv, struct attention_shape shape, uint32_t *amax,
                   void *workspace, struct device *dev) {
    fail("attention by cuDNN takes only bf16 on a GPU");
}
void fused_backward(floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out, const float *lse,
                    struct attention_shape shape, bool any_order, uint32_t *amax, void *workspace, struct device *dev) {
    fail("attention by cuDNN takes only bf16 on a GPU");
}

#endif
