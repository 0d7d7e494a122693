// Stand-in for libcudnn.so.9, for programs of the emulator: cuDNN's backend API as far as attention needs it, with
// cuDNN's names and numbers, on host memory. It is a library of its own, because the program loads the real one at run
// time, too.
//
// A call that breaks a rule returns the library's status, and cudnnGetLastErrorString says what it broke.
// test/emu/cudnn_descriptors.h has the rules of attributes; cudnn_operations.h has the rules of tensors, operations and
// graphs; cudnn_sdpa.h and cudnn_sdpa_fp8.h have the graphs that the engines take. Results are computed from the graph's operations only
// (cudnn_run.h).
//
// It is stricter than the library. cuDNN 9.19 lets these pass: dimensions of 0, elements one on another, tensors
// without a type or unique id, two tensors of one id, operands that a mode does not take or that can't be broadcast,
// virtual tensors that nothing writes, addresses that are NULL or given twice, strides that are not multiples of 16
// bytes, and graphs whose operations or operands are ordered otherwise than cudnn-frontend orders them. The stand-in
// ends the program with status 3 at
// - descriptors and handles that were never made or were destroyed, a handle without a stream of the emulator,
// - tensors or a workspace that no allocation of the device holds, elements that are written and overlap others,
// - a plan that is finalized while a graph is recorded, if its handle has a stream.
// Like the library, it loads libcudnn_graph.so.9 at the first call, and aborts where that is missing or damaged. The
// workspace and all that is written hold NaN first. Environment:
//   EMU_CUDNN_VERSION  the library's version; 91900 if unset. Where a version computes a wrong result, the result is
//   NaN:
//                      up to 9.15.0, the backward pass where the number of keys is not a multiple of 128; below 9.10.0,
//                      scores that are masked by -infinity; below 9.26 on compute capability 9.0 without a mask, if the
//                      keys are 64 more than a multiple of 128, dQ in rows of a low log-sum-exp
//   EMU_CUDNN_REFUSE   create: no handle can be made; graph: no engine takes any graph; plan: no plan can be finalized;
//                      execute: no plan runs; operation, execute operation: no engine takes, or no plan runs,
//                      attention's
//                      forward as one operation
//   EMU_CUDNN_FAULT    forward: O is too large by a tenth; operation: O is, only where forward is one operation;
//                      backward: dV is too large by a tenth; nan: one element of dQ is NaN; bits: an element of O
//                      differs
//                      from run to run; order: an element of dQ does
// A sum of dQ in memory, which in FP8 the graph does not show, is added in another order each time, as the library's is,
// so that its bits differ; the engines that add in turn have the same bits each time.
#include "test/emu/cudnn_run.h"
#include <dlfcn.h> // dlopen

struct emu_cudnn_status_name {
    cudnnStatus_t status;
    const char *name;
};
#define NAMED(status)                                                                                                  \
    { status, #status }
static const emu_cudnn_status_name emu_cudnn_status_names[] = {
    NAMED(CUDNN_STATUS_SUCCESS),
    NAMED(CUDNN_STATUS_NOT_INITIALIZED),
    NAMED(CUDNN_STATUS_BAD_PARAM),
    NAMED(CUDNN_STATUS_BAD_PARAM_NULL_POINTER),
    NAMED(CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER),
    NAMED(CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED),
    NAMED(CUDNN_STATUS_BAD_PARAM_OUT_OF_BOUND),
    NAMED(CUDNN_STATUS_BAD_PARAM_SIZE_INSUFFICIENT),
    NAMED(CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH),
    NAMED(CUDNN_STATUS_BAD_PARAM_DUPLICATED_ENTRIES),
    NAMED(CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE),
    NAMED(CUDNN_STATUS_BAD_PARAM_DESCRIPTOR_TYPE),
    NAMED(CUDNN_STATUS_NOT_SUPPORTED),
    NAMED(CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN),
    NAMED(CUDNN_STATUS_NOT_SUPPORTED_SHAPE),
    NAMED(CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE),
    NAMED(CUDNN_STATUS_NOT_SUPPORTED_LAYOUT),
    NAMED(CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH),
    NAMED(CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED),
    NAMED(CUDNN_STATUS_EXECUTION_FAILED_CUDART),
};
#undef NAMED

// ---- the library and its handles ----

static void emu_cudnn_load_graph(const char *symbol) {
    static void *const graph = dlopen("libcudnn_graph.so.9", RTLD_NOW);
    if (graph)
        return;
    fprintf(stderr, "%s\nInvalid handle. Cannot load symbol %s\n", dlerror(), symbol);
    abort();
}
extern "C" size_t cudnnGetVersion(void) {
    emu_cudnn_load_graph("cudnnGetVersion");
    return emu_cudnn_version();
}
extern "C" const char *cudnnGetErrorString(cudnnStatus_t status) {
    emu_cudnn_load_graph("cudnnGetErrorString");
    for (const emu_cudnn_status_name &named : emu_cudnn_status_names)
        if (named.status == status)
            return named.name;
    return "CUDNN_UNKNOWN_STATUS";
}
extern "C" void cudnnGetLastErrorString(char *message, size_t bytes) {
    if (bytes > 0)
        snprintf(message, bytes, "%s", emu_cudnn_error);
    emu_cudnn_error[0] = 0;
}
extern "C" cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) {
    emu_cudnn_load_graph("cudnnCreate");
    EMU_CUDNN_HOLD(handle, CUDNN_STATUS_BAD_PARAM_NULL_POINTER, "no place for a handle");
    EMU_CUDNN_HOLD(!emu_cudnn_refuses("create"), CUDNN_STATUS_NOT_INITIALIZED, "EMU_CUDNN_REFUSE=create");
    *handle = new cudnnContext();
    const std::lock_guard<std::mutex> lock(emu_cudnn_mutex);
    emu_cudnn_handles[*handle] = true;
    return CUDNN_STATUS_SUCCESS;
}
extern "C" cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
    const std::lock_guard<std::mutex> lock(emu_cudnn_mutex);
    if (emu_cudnn_handles.erase(handle) == 0)
        emu_cudnn_report("cudnnDestroy: %p is no handle, or one that was destroyed", (void *)handle);
    delete handle;
    return CUDNN_STATUS_SUCCESS;
}
extern "C" cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, struct emu_stream *stream) {
    if (!emu_cudnn_is_handle(handle))
        emu_cudnn_report("cudnnSetStream: %p is no handle", (void *)handle);
    if (!stream)
        emu_cudnn_report("cudnnSetStream: the stream NULL is not modeled");
    const struct emu_services *const services = *(const struct emu_services *const *)stream;
    if (!services || services->made != EMU_SERVICES_MADE)
        emu_cudnn_report("cudnnSetStream: %p is no stream of the emulator", (void *)stream);
    handle->stream = stream;
    handle->services = services;
    return CUDNN_STATUS_SUCCESS;
}

// ---- descriptors ----

extern "C" cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                                      cudnnBackendDescriptor_t *descriptor) {
    emu_cudnn_load_graph("cudnnBackendCreateDescriptor");
    EMU_CUDNN_HOLD(descriptor, CUDNN_STATUS_BAD_PARAM_NULL_POINTER, "no place for a descriptor");
    EMU_CUDNN_HOLD(emu_cudnn_has_type(type), CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED,
                   "descriptors of type %d are not modeled", type);
    const emu_cudnn_reference made = std::make_shared<emu_cudnn_descriptor>();
    made->type = type;
    made->finalized = false;
    *descriptor = made.get();
    const std::lock_guard<std::mutex> lock(emu_cudnn_mutex);
    emu_cudnn_descriptors[made.get()] = made;
    return CUDNN_STATUS_SUCCESS;
}
extern "C" cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
    if (!descriptor)
        return CUDNN_STATUS_SUCCESS;
    const emu_cudnn_reference found = emu_cudnn_find(descriptor); // descriptors that refer to it keep it alive
    const std::lock_guard<std::mutex> lock(emu_cudnn_mutex);
    emu_cudnn_descriptors.erase(descriptor);
    return CUDNN_STATUS_SUCCESS;
}
extern "C" cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                                  cudnnBackendAttributeType_t type, int64_t count,
                                                  const void *elements) {
    EMU_CUDNN_HOLD(descriptor, CUDNN_STATUS_BAD_PARAM_NULL_POINTER, "no descriptor");
    return emu_cudnn_set(emu_cudnn_find(descriptor), name, type, count, elements);
}

static emu_cudnn_reference emu_cudnn_engine_of(const emu_cudnn_descriptor &configuration) {
    return emu_cudnn_other(configuration, CUDNN_ATTR_ENGINECFG_ENGINE);
}
// An engine of the deterministic backward pass that heuristics do not propose.
struct emu_cudnn_engine {
    int64_t index;
    int first, last;                  // compute capabilities, times 10
    size_t version;                   // the oldest version that has it
    bool sums_dq;                     // sums dQ in memory, one tile after another
    std::map<int32_t, int64_t> knobs; // the choices that it demands; empty: any choice of a kernel
};
static const emu_cudnn_engine emu_cudnn_engines[] = {
    {5, 100, 103, 91800, false, {}},
    {17, 104, 109, 91800, false, {}},
    {6,
     90,
     90,
     92500,
     true,
     {{CUDNN_KNOB_TYPE_TILE_M, 2},
      {CUDNN_KNOB_TYPE_TILE_N, 1},
      {CUDNN_KNOB_TYPE_KERNEL_CFG, 2},
      {CUDNN_KNOB_TYPE_STREAM_K, 0},
      {CUDNN_KNOB_TYPE_TILE_CGA_M, 0},
      {CUDNN_KNOB_TYPE_STAGES, 4}}},
};
static const emu_cudnn_engine *emu_cudnn_engine_here(int64_t index) {
    for (const emu_cudnn_engine &engine : emu_cudnn_engines)
        if (engine.index == index && engine.first <= emu_cudnn_capability() && engine.last >= emu_cudnn_capability() &&
            engine.version <= emu_cudnn_version())
            return &engine;
    return NULL;
}
static std::map<int32_t, int64_t> emu_cudnn_knobs_of(const emu_cudnn_descriptor &configuration) {
    std::map<int32_t, int64_t> knobs;
    const auto choices = configuration.values.find(CUDNN_ATTR_ENGINECFG_KNOB_CHOICES);
    if (choices != configuration.values.end())
        for (const emu_cudnn_reference &choice : choices->second.others)
            knobs[emu_cudnn_get<int32_t>(*choice, CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, -1)] =
                emu_cudnn_get<int64_t>(*choice, CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, -1);
    return knobs;
}
// Checks that a configuration's engine takes its graph, in which *match gets attention's tensors. Engine 0 takes every
// graph that emu_cudnn_supports takes.
static cudnnStatus_t emu_cudnn_configuration_supports(const emu_cudnn_descriptor &configuration,
                                                      emu_cudnn_match *match) {
    const emu_cudnn_descriptor &chosen = *emu_cudnn_engine_of(configuration);
    const int64_t index = emu_cudnn_get<int64_t>(chosen, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, 0);
    if (emu_cudnn_supports(emu_cudnn_other(chosen, CUDNN_ATTR_ENGINE_OPERATION_GRAPH)->graph.get(), match) !=
        CUDNN_STATUS_SUCCESS)
        return CUDNN_STATUS_NOT_SUPPORTED; // emu_cudnn_supports has set the message
    if (index == 0)
        return CUDNN_STATUS_SUCCESS;
    const emu_cudnn_engine *engine = emu_cudnn_engine_here(index);
    EMU_CUDNN_HOLD(engine, CUDNN_STATUS_NOT_SUPPORTED, "no engine %lld on compute capability %d", (long long)index,
                   emu_cudnn_capability());
    EMU_CUDNN_HOLD(match->backward && (match->dq_product >= 0 || (match->dq_sum >= 0) == engine->sums_dq),
                   CUDNN_STATUS_NOT_SUPPORTED, "engine %lld takes the backward pass %s a sum of dQ in memory",
                   (long long)index, engine->sums_dq ? "with" : "without");
    std::map<int32_t, int64_t> knobs = emu_cudnn_knobs_of(configuration);
    if (match->dq_product >= 0) { // in FP8
        EMU_CUDNN_HOLD(knobs.count(CUDNN_KNOB_TYPE_STAGES) && knobs[CUDNN_KNOB_TYPE_STAGES] == (index == 6 ? 1 : 2),
                       CUDNN_STATUS_NOT_SUPPORTED, "engine %lld in FP8 with other STAGES", (long long)index);
        match->in_turn = index != 6;
        return CUDNN_STATUS_SUCCESS;
    }
    EMU_CUDNN_HOLD(engine->knobs.empty() ? knobs.count(CUDNN_KNOB_TYPE_KERNEL_CFG) > 0 : knobs == engine->knobs,
                   CUDNN_STATUS_NOT_SUPPORTED, "engine %lld without the choice of a kernel", (long long)index);
    match->in_turn = engine->sums_dq;
    return CUDNN_STATUS_SUCCESS;
}
// Finds the configurations for a graph: one, or none where the engine does not take it. As in the library, these are
// fewer than EMU_CUDNN_HEURISTICS, the number that the heuristics give at first.
static void emu_cudnn_find_configurations(emu_cudnn_descriptor *heuristics) {
    emu_cudnn_match match = emu_cudnn_match_none(NULL);
    const emu_cudnn_value &graph = heuristics->values[CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH];
    if (emu_cudnn_supports(graph.others[0]->graph.get(), &match) != CUDNN_STATUS_SUCCESS)
        return;
    const int64_t index = 0;
    const emu_cudnn_reference engine = std::make_shared<emu_cudnn_descriptor>(),
                              configuration = std::make_shared<emu_cudnn_descriptor>();
    engine->type = CUDNN_BACKEND_ENGINE_DESCRIPTOR;
    engine->values[CUDNN_ATTR_ENGINE_OPERATION_GRAPH] = graph;
    engine->values[CUDNN_ATTR_ENGINE_GLOBAL_INDEX] = {
        1, std::vector<char>((const char *)&index, (const char *)&index + sizeof index), {}};
    configuration->type = CUDNN_BACKEND_ENGINECFG_DESCRIPTOR;
    configuration->values[CUDNN_ATTR_ENGINECFG_ENGINE] = {1, std::vector<char>(8), {engine}};
    engine->finalized = configuration->finalized = true;
    heuristics->configurations.push_back(configuration);
}
static cudnnStatus_t emu_cudnn_finalize_plan(const emu_cudnn_descriptor &plan) {
    const cudnnHandle_t handle = emu_cudnn_get<cudnnHandle_t>(plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, NULL);
    emu_cudnn_match match = emu_cudnn_match_none(NULL);
    EMU_CUDNN_HOLD(!emu_cudnn_refuses("plan"), CUDNN_STATUS_NOT_SUPPORTED, "EMU_CUDNN_REFUSE=plan");
    if (handle->services && handle->services->forbid_while_recording() != 0)
        emu_cudnn_report("a plan is finalized while a graph is recorded");
    return emu_cudnn_configuration_supports(*emu_cudnn_other(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG), &match);
}
static cudnnStatus_t emu_cudnn_finalize_pack(const emu_cudnn_descriptor &pack) {
    const std::vector<int64_t> uids = emu_cudnn_get_all<int64_t>(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    const std::vector<void *> pointers = emu_cudnn_get_all<void *>(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
    EMU_CUDNN_HOLD(uids.size() == pointers.size(), CUDNN_STATUS_BAD_PARAM, "%zu unique ids and %zu pointers",
                   uids.size(), pointers.size());
    const std::set<int64_t> different(uids.begin(), uids.end());
    EMU_CUDNN_HOLD(different.size() == uids.size(), CUDNN_STATUS_BAD_PARAM, "a unique id is given twice");
    for (size_t i = 0; i < pointers.size(); i++)
        EMU_CUDNN_HOLD(pointers[i], CUDNN_STATUS_BAD_PARAM_NULL_POINTER, "tensor %lld has no address",
                       (long long)uids[i]);
    return CUDNN_STATUS_SUCCESS;
}
static cudnnStatus_t emu_cudnn_finalize_by_type(emu_cudnn_descriptor *d) {
    emu_cudnn_match match = emu_cudnn_match_none(NULL);
    switch (d->type) {
    case CUDNN_BACKEND_TENSOR_DESCRIPTOR: return emu_cudnn_finalize_tensor(*d);
    case CUDNN_BACKEND_POINTWISE_DESCRIPTOR: return emu_cudnn_finalize_pointwise(*d);
    case CUDNN_BACKEND_MATMUL_DESCRIPTOR: return emu_cudnn_finalize_compute(*d, CUDNN_ATTR_MATMUL_COMP_TYPE);
    case CUDNN_BACKEND_REDUCTION_DESCRIPTOR: return emu_cudnn_finalize_compute(*d, CUDNN_ATTR_REDUCTION_COMP_TYPE);
    case CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR: return emu_cudnn_finalize_pointwise_operation(*d);
    case CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR: return emu_cudnn_finalize_matmul_operation(*d);
    case CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR: return emu_cudnn_finalize_reduction_operation(*d);
    case CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR: return emu_cudnn_finalize_reshape_operation(*d);
    case CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR: return emu_cudnn_finalize_sdpa_operation(*d);
    case CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR: return emu_cudnn_finalize_graph(d);
    case CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR: emu_cudnn_find_configurations(d); break;
    case CUDNN_BACKEND_ENGINECFG_DESCRIPTOR: return emu_cudnn_configuration_supports(*d, &match);
    case CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR: return emu_cudnn_finalize_plan(*d);
    case CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR: return emu_cudnn_finalize_pack(*d);
    case CUDNN_BACKEND_ENGINE_DESCRIPTOR:
    case CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR:
    case CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR: break;
    }
    return CUDNN_STATUS_SUCCESS;
}
extern "C" cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
    EMU_CUDNN_HOLD(descriptor, CUDNN_STATUS_BAD_PARAM_NULL_POINTER, "no descriptor");
    const emu_cudnn_reference d = emu_cudnn_find(descriptor);
    cudnnStatus_t status = emu_cudnn_hold_required(*d);
    if (status == CUDNN_STATUS_SUCCESS)
        status = emu_cudnn_finalize_by_type(d.get());
    d->finalized = d->finalized || status == CUDNN_STATUS_SUCCESS;
    return status;
}

// ---- what descriptors tell ----

enum { EMU_CUDNN_HEURISTICS = 3 }; // the number of configurations that the heuristics give at first

// Fills descriptors that the caller has made, up to `room` of them; *count: how many. elements (room): pointers to the
// descriptors.
static cudnnStatus_t emu_cudnn_fill(const std::vector<emu_cudnn_reference> &from, int64_t room, int64_t *count,
                                    void *elements) {
    *count = 0;
    for (int64_t i = 0; i < room && i < (int64_t)from.size(); i++) {
        const void *const place = ((void **)elements)[i];
        EMU_CUDNN_HOLD(place, CUDNN_STATUS_BAD_PARAM_NULL_POINTER, "no descriptor to fill");
        const emu_cudnn_reference to = emu_cudnn_find(place), other = from[(size_t)i];
        EMU_CUDNN_HOLD(to->type == other->type && !to->finalized, CUDNN_STATUS_BAD_PARAM,
                       "a descriptor of type %d that was not finalized is to be filled", other->type);
        *to = *other;
        ++*count;
    }
    return CUDNN_STATUS_SUCCESS;
}
// Returns the workspace bytes of a plan or configuration.
static int64_t emu_cudnn_workspace_of(const emu_cudnn_descriptor &d) {
    emu_cudnn_match match = emu_cudnn_match_none(NULL);
    const emu_cudnn_reference configuration = emu_cudnn_other(d, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
    emu_cudnn_configuration_supports(configuration ? *configuration : d, &match);
    return emu_cudnn_workspace_bytes(&match);
}
extern "C" cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                                  cudnnBackendAttributeType_t type, int64_t room, int64_t *count,
                                                  void *elements) {
    EMU_CUDNN_HOLD(descriptor, CUDNN_STATUS_BAD_PARAM_NULL_POINTER, "no descriptor");
    const emu_cudnn_reference d = emu_cudnn_find(descriptor);
    const emu_cudnn_rule *rule = NULL;
    int64_t unasked = 0, *const found = count ? count : &unasked;
    EMU_CUDNN_HOLD(d->finalized, CUDNN_STATUS_NOT_INITIALIZED,
                   "attribute %d is asked for before the descriptor was finalized", name);
    EMU_CUDNN_PASS(emu_cudnn_hold_call(d, name, type, &rule));
    EMU_CUDNN_HOLD(room >= 0 && (elements || room == 0), CUDNN_STATUS_BAD_PARAM, "no room for attribute %d", name);
    if (name == CUDNN_ATTR_ENGINEHEUR_RESULTS && room == 0) {
        *found = EMU_CUDNN_HEURISTICS;
        return CUDNN_STATUS_SUCCESS;
    }
    if (name == CUDNN_ATTR_ENGINEHEUR_RESULTS)
        return emu_cudnn_fill(d->configurations, room, found, elements);
    if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR)
        return emu_cudnn_fill(d->values[name].others, room, found, elements);
    std::vector<char> bytes = d->values.count(name) ? d->values[name].bytes : std::vector<char>();
    const int32_t tensor_cores = CUDNN_NUMERICAL_NOTE_TENSOR_CORE, compiled = CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION;
    const int64_t engines = 1;
    if (name == CUDNN_ATTR_ENGINE_NUMERICAL_NOTE)
        bytes.assign((const char *)&tensor_cores, (const char *)(&tensor_cores + 1));
    if (name == CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE)
        bytes.assign((const char *)&compiled, (const char *)(&compiled + 1));
    if (name == CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT)
        bytes.assign((const char *)&engines, (const char *)(&engines + 1));
    if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE || name == CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE) {
        const int64_t workspace_bytes = emu_cudnn_workspace_of(*d);
        bytes.assign((const char *)&workspace_bytes, (const char *)(&workspace_bytes + 1));
    }
    *found = (int64_t)(bytes.size() / emu_cudnn_element_bytes(type));
    const size_t most = (size_t)room * emu_cudnn_element_bytes(type);
    if (room > 0)
        memcpy(elements, bytes.data(), bytes.size() < most ? bytes.size() : most);
    return CUDNN_STATUS_SUCCESS;
}

// ---- runs ----

// Takes the addresses of the variant pack. Every tensor of the graph that is not virtual must have one, as aligned as
// the tensor says. Values of tensors by value are read now.
static cudnnStatus_t emu_cudnn_take_pointers(const emu_cudnn_descriptor &pack, emu_cudnn_run *run) {
    const std::vector<int64_t> uids = emu_cudnn_get_all<int64_t>(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    const std::vector<void *> pointers = emu_cudnn_get_all<void *>(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
    for (size_t i = 0; i < uids.size(); i++) {
        const auto found = run->graph->tensors.find(uids[i]);
        EMU_CUDNN_HOLD(found != run->graph->tensors.end() && !found->second.is_virtual, CUDNN_STATUS_BAD_PARAM,
                       "the graph has no tensor %lld in memory", (long long)uids[i]);
        EMU_CUDNN_HOLD((uintptr_t)pointers[i] % (uintptr_t)found->second.alignment == 0,
                       CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER, "tensor %lld at %p is not aligned to %lld bytes",
                       (long long)uids[i], pointers[i], (long long)found->second.alignment);
        if (found->second.by_value)
            run->values[uids[i]] = emu_cudnn_load(pointers[i], 0, found->second.type);
        else
            run->pointers[uids[i]] = pointers[i];
    }
    for (const auto &tensor : run->graph->tensors)
        EMU_CUDNN_HOLD(tensor.second.is_virtual || run->values.count(tensor.first) || run->pointers.count(tensor.first),
                       CUDNN_STATUS_BAD_PARAM, "the variant pack has no tensor %lld", (long long)tensor.first);
    return CUDNN_STATUS_SUCCESS;
}
static cudnnStatus_t emu_cudnn_hold_execute(cudnnHandle_t handle, const emu_cudnn_descriptor &plan,
                                            const emu_cudnn_descriptor &pack) {
    EMU_CUDNN_HOLD(
        plan.type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR && pack.type == CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR,
        CUDNN_STATUS_BAD_PARAM, "descriptors of type %d and %d are no plan and variant pack", plan.type, pack.type);
    EMU_CUDNN_HOLD(plan.finalized && pack.finalized, CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED,
                   "the plan or the variant pack was not finalized");
    EMU_CUDNN_HOLD(emu_cudnn_get<cudnnHandle_t>(plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, NULL) == handle,
                   CUDNN_STATUS_BAD_PARAM, "the plan is another handle's");
    EMU_CUDNN_HOLD(!emu_cudnn_refuses("execute"), CUDNN_STATUS_EXECUTION_FAILED_CUDART, "EMU_CUDNN_REFUSE=execute");
    const emu_cudnn_descriptor &engine =
        *emu_cudnn_engine_of(*emu_cudnn_other(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG));
    EMU_CUDNN_HOLD(!emu_cudnn_refuses("execute operation") ||
                       !emu_cudnn_other(engine, CUDNN_ATTR_ENGINE_OPERATION_GRAPH)->graph->single,
                   CUDNN_STATUS_EXECUTION_FAILED_CUDART, "EMU_CUDNN_REFUSE=execute operation");
    return CUDNN_STATUS_SUCCESS;
}
// Whether this version's result is known to be wrong for the run's graph.
static bool emu_cudnn_is_broken(const emu_cudnn_run *run) {
    const size_t version = emu_cudnn_version();
    const auto hidden = run->values.find(run->match.hidden);
    const bool infinite = hidden != run->values.end() && hidden->second == -INFINITY;
    const bool rest = run->graph->tensors.at(run->match.k).dims[3] % 128 != 0;
    return (version < 91000 && infinite) || (version <= 91500 && run->match.backward && rest);
}
static bool emu_cudnn_breaks_low_scores(const emu_cudnn_run *run) {
    return run->match.backward && !run->match.causal && emu_cudnn_version() < 92600 &&
           emu_cudnn_capability() / 10 == 9 && run->graph->tensors.at(run->match.k).dims[3] % 128 == 64;
}
extern "C" cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan_descriptor,
                                             cudnnBackendDescriptor_t pack_descriptor) {
    EMU_CUDNN_HOLD(handle && plan_descriptor && pack_descriptor, CUDNN_STATUS_BAD_PARAM_NULL_POINTER,
                   "no handle, plan or variant pack");
    if (!emu_cudnn_is_handle(handle) || !handle->stream)
        emu_cudnn_report("cudnnBackendExecute: %p is no handle, or has no stream", (void *)handle);
    const emu_cudnn_reference plan = emu_cudnn_find(plan_descriptor), pack = emu_cudnn_find(pack_descriptor);
    EMU_CUDNN_PASS(emu_cudnn_hold_execute(handle, *plan, *pack));
    const std::shared_ptr<emu_cudnn_run> run = std::make_shared<emu_cudnn_run>();
    const emu_cudnn_descriptor &configuration = *emu_cudnn_other(*plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
    run->graph = emu_cudnn_other(*emu_cudnn_engine_of(configuration), CUDNN_ATTR_ENGINE_OPERATION_GRAPH)->graph;
    EMU_CUDNN_PASS(emu_cudnn_configuration_supports(configuration, &run->match));
    EMU_CUDNN_PASS(emu_cudnn_take_pointers(*pack, run.get()));
    run->services = handle->services;
    run->workspace_bytes = emu_cudnn_workspace_bytes(&run->match);
    run->workspace = emu_cudnn_get<char *>(*pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, NULL);
    EMU_CUDNN_HOLD(run->workspace || run->workspace_bytes == 0, CUDNN_STATUS_BAD_PARAM_NULL_POINTER,
                   "the plan needs a workspace of %lld bytes", (long long)run->workspace_bytes);
    EMU_CUDNN_HOLD((uintptr_t)run->workspace % 16 == 0, CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER,
                   "the workspace %p is not aligned to 16 bytes", (void *)run->workspace);
    run->broken = emu_cudnn_is_broken(run.get());
    run->broken_low_scores = emu_cudnn_breaks_low_scores(run.get());
    const int status =
        handle->services->enqueue(handle->stream, "cudnnBackendExecute", [run] { emu_cudnn_run_graph(run.get()); });
    EMU_CUDNN_HOLD(status == 0, CUDNN_STATUS_EXECUTION_FAILED_CUDART, "the stream answers with CUDA's error %d",
                   status);
    return CUDNN_STATUS_SUCCESS;
}

// Tells a program that this is not the library itself.
extern "C" int emu_cudnn_is_the_emulators(void) { return 1; }
