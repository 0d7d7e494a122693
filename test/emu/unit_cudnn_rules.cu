// The stand-in for cuDNN (test/emu/cudnn.cpp): each of its rules refuses what breaks it, with a message.
#include "test/emu/cudnn_graphs.h" // struct cudnn_builder
#include "test/testing.h"          // cmocka

static struct cudnn_library cudnn;
static cudnnHandle_t handle;

static int set_up(void **state) {
    if (!cudnn_open(&cudnn, "libcudnn.so.9"))
        fail_msg("%s", dlerror());
    assert_int_equal(cudnn.Create(&handle), CUDNN_STATUS_SUCCESS);
    return 0;
}
static int tear_down(void **state) {
    assert_int_equal(cudnn.Destroy(handle), CUDNN_STATUS_SUCCESS);
    return 0;
}
typedef struct cudnn_builder B;

// Checks that these tests load the stand-in, though LD_LIBRARY_PATH may lead to the real library.
static void the_stand_in_is_loaded(void **state) {
    assert_non_null(dlsym(cudnn.library, "emu_cudnn_is_the_emulators"));
    assert_int_equal(cudnn.GetVersion(), 91900);
    setenv("EMU_CUDNN_VERSION", "90100", 1);
    assert_int_equal(cudnn.GetVersion(), 90100);
    unsetenv("EMU_CUDNN_VERSION");
}

static const int64_t four[4] = {1, 2, 8, 8}, four_strides[4] = {128, 64, 8, 1};
// Makes a tensor with all attributes but one.
static cudnnBackendDescriptor_t tensor_without(B *g, cudnnBackendAttributeName_t left_out) {
    cudnnBackendDescriptor_t d = g->make(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    const cudnnDataType_t type = CUDNN_DATA_FLOAT;
    const int64_t uid = 5, alignment = 16;
    if (left_out != CUDNN_ATTR_TENSOR_DATA_TYPE)
        g->set(d, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    if (left_out != CUDNN_ATTR_TENSOR_DIMENSIONS)
        g->set(d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, four);
    if (left_out != CUDNN_ATTR_TENSOR_STRIDES)
        g->set(d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, four_strides);
    if (left_out != CUDNN_ATTR_TENSOR_UNIQUE_ID)
        g->set(d, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &uid);
    if (left_out != CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT)
        g->set(d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment);
    return d;
}
static void finalize_without(B *g, cudnnBackendAttributeName_t left_out) {
    g->finalize(tensor_without(g, left_out), "tensor");
}
static const cudnnBackendAttributeName_t NONE = CUDNN_ATTR_MATMUL_COMP_TYPE; // an attribute that no tensor has
static cudnnBackendDescriptor_t memory(B *g, int64_t uid, const B::sizes &dims,
                                       cudnnDataType_t type = CUDNN_DATA_FLOAT) {
    return g->tensor(uid, type, dims, B::packed(dims), B::MEMORY);
}
static cudnnBackendDescriptor_t config_of(B *g, cudnnBackendDescriptor_t graph, int64_t index) {
    cudnnBackendDescriptor_t engine = g->make(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    g->set(engine, CUDNN_ATTR_ENGINE_OPERATION_GRAPH, graph);
    g->set(engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &index);
    g->finalize(engine, "engine");
    cudnnBackendDescriptor_t config = g->make(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    g->set(config, CUDNN_ATTR_ENGINECFG_ENGINE, engine);
    return g->finalize(config, "configuration");
}
static const struct cudnn_attention small = {1, 2, 2, 8, 8, 8, 16, 16, true, false, CUDNN_DATA_BFLOAT16};
static void pack_of(B *g, int64_t ids, int64_t pointers, int64_t second_id, void *second_pointer) {
    static char places[64];
    cudnnBackendDescriptor_t pack = g->make(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    const int64_t uids[3] = {1, second_id, 3};
    void *const at[3] = {places, second_pointer, places + 32};
    g->set(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, ids, uids);
    g->set(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, pointers, at);
    g->finalize(pack, "variant pack");
}

// Asks for an engine for attention as one operation, after `change` has changed its attributes.
static void sdpa_with(B *g, void (*change)(B *g, struct cudnn_sdpa_operation *s)) {
    setenv("EMU_CUDNN_VERSION", "92100", 1);
    struct cudnn_sdpa_operation s = cudnn_sdpa_of(g, &small);
    change(g, &s);
    cudnn_add_sdpa(g, s);
    if (g->status == CUDNN_STATUS_SUCCESS)
        config_of(g, g->graph(handle), 0);
    unsetenv("EMU_CUDNN_VERSION");
}

static const struct breach {
    const char *name;
    cudnnStatus_t status;
    void (*commit)(B *g);
} breaches[] = {
    {"no rule is broken", CUDNN_STATUS_SUCCESS, [](B *g) { finalize_without(g, NONE); }},
    {"a descriptor of no type", CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED,
     [](B *g) { g->make((cudnnBackendDescriptorType_t)99); }},
    {"no descriptor", CUDNN_STATUS_BAD_PARAM_NULL_POINTER, [](B *g) { g->finalize(NULL, "none"); }},
    {"another descriptor's attribute", CUDNN_STATUS_BAD_PARAM,
     [](B *g) {
         const cudnnDataType_t type = CUDNN_DATA_FLOAT;
         g->set(tensor_without(g, NONE), CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
     }},
    {"an attribute of another type", CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE,
     [](B *g) { g->set(tensor_without(g, NONE), CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_INT64, 1, four); }},
    {"two elements for one", CUDNN_STATUS_BAD_PARAM,
     [](B *g) {
         const cudnnDataType_t types[2] = {CUDNN_DATA_FLOAT, CUDNN_DATA_FLOAT};
         g->set(tensor_without(g, NONE), CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 2, types);
     }},
    {"no elements", CUDNN_STATUS_BAD_PARAM,
     [](B *g) { g->set(tensor_without(g, NONE), CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, NULL); }},
    {"nine dimensions", CUDNN_STATUS_BAD_PARAM,
     [](B *g) {
         const int64_t nine[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
         g->set(tensor_without(g, NONE), CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 9, nine);
     }},
    {"a tensor without a type", CUDNN_STATUS_BAD_PARAM, [](B *g) { finalize_without(g, CUDNN_ATTR_TENSOR_DATA_TYPE); }},
    {"a tensor without dimensions", CUDNN_STATUS_BAD_PARAM,
     [](B *g) { finalize_without(g, CUDNN_ATTR_TENSOR_DIMENSIONS); }},
    {"a tensor without strides", CUDNN_STATUS_BAD_PARAM, [](B *g) { finalize_without(g, CUDNN_ATTR_TENSOR_STRIDES); }},
    {"a tensor without a unique id", CUDNN_STATUS_BAD_PARAM,
     [](B *g) { finalize_without(g, CUDNN_ATTR_TENSOR_UNIQUE_ID); }},
    {"a tensor without an alignment", CUDNN_STATUS_BAD_PARAM,
     [](B *g) { finalize_without(g, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT); }},
    {"more dimensions than strides", CUDNN_STATUS_BAD_PARAM,
     [](B *g) {
         g->tensor(1, CUDNN_DATA_FLOAT, {2, 2, 2}, {4, 2}, B::MEMORY);
     }},
    {"a dimension of 0", CUDNN_STATUS_BAD_PARAM,
     [](B *g) {
         g->tensor(1, CUDNN_DATA_FLOAT, {1, 0, 2}, {2, 2, 1}, B::MEMORY);
     }},
    {"a negative stride", CUDNN_STATUS_BAD_PARAM,
     [](B *g) {
         g->tensor(1, CUDNN_DATA_FLOAT, {2, 2, 2}, {4, -2, 1}, B::MEMORY);
     }},
    {"elements one on another", CUDNN_STATUS_BAD_PARAM,
     [](B *g) {
         g->tensor(1, CUDNN_DATA_FLOAT, {2, 4, 4}, {16, 3, 1}, B::MEMORY);
     }},
    {"an alignment to half an element", CUDNN_STATUS_BAD_PARAM,
     [](B *g) {
         g->tensor(1, CUDNN_DATA_FLOAT, {1, 2}, {2, 1}, B::MEMORY, 2);
     }},
    {"a value of two elements", CUDNN_STATUS_BAD_PARAM,
     [](B *g) {
         g->tensor(1, CUDNN_DATA_FLOAT, {1, 2}, {2, 1}, B::VALUE);
     }},
    {"set after it was finalized", CUDNN_STATUS_BAD_PARAM,
     [](B *g) {
         g->set(memory(g, 1, {1, 2}), CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, four);
     }},
    {"finalized twice", CUDNN_STATUS_BAD_PARAM,
     [](B *g) {
         g->finalize(memory(g, 1, {1, 2}), "again");
     }},
    {"got before it was finalized", CUDNN_STATUS_NOT_INITIALIZED,
     [](B *g) {
         int64_t uid = 0, count = 0;
         g->hold(cudnn.GetAttribute(tensor_without(g, NONE), CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &count,
                                    &uid),
                 "get");
     }},
    {"an operation of a tensor that was not finalized", CUDNN_STATUS_BAD_PARAM,
     [](B *g) {
         g->reshape(tensor_without(g, NONE), memory(g, 2, {1, 2, 8, 8}));
     }},
    {"a tensor in place of a pointwise function", CUDNN_STATUS_BAD_PARAM,
     [](B *g) {
         g->set(g->make(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR), CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR,
                memory(g, 1, {1, 2}));
     }},
    {"an index of no axis", CUDNN_STATUS_BAD_PARAM,
     [](B *g) {
         g->pointwise(CUDNN_POINTWISE_GEN_INDEX, memory(g, 1, {2, 2}), NULL, NULL, memory(g, 2, {2, 2}));
     }},
    {"a sum of one operand", CUDNN_STATUS_BAD_PARAM,
     [](B *g) {
         g->pointwise(CUDNN_POINTWISE_ADD, memory(g, 1, {2, 2}), NULL, NULL, memory(g, 2, {2, 2}));
     }},
    {"an exponential of two operands", CUDNN_STATUS_BAD_PARAM,
     [](B *g) {
         g->pointwise(CUDNN_POINTWISE_EXP, memory(g, 1, {2, 2}), memory(g, 3, {2, 2}), NULL, memory(g, 2, {2, 2}));
     }},
    {"a selection by floats", CUDNN_STATUS_BAD_PARAM,
     [](B *g) {
         g->pointwise(CUDNN_POINTWISE_BINARY_SELECT, memory(g, 1, {2, 2}), memory(g, 2, {2, 2}), memory(g, 3, {2, 2}),
                      memory(g, 4, {2, 2}));
     }},
    {"a broadcast of two to three", CUDNN_STATUS_BAD_PARAM,
     [](B *g) {
         g->pointwise(CUDNN_POINTWISE_EXP, memory(g, 1, {2, 2}), NULL, NULL, memory(g, 2, {2, 3}));
     }},
    {"a product of matrices that do not fit", CUDNN_STATUS_BAD_PARAM,
     [](B *g) {
         g->matmul(memory(g, 1, {1, 2, 3}), memory(g, 2, {1, 4, 5}), memory(g, 3, {1, 2, 5}));
     }},
    {"three heads of two", CUDNN_STATUS_BAD_PARAM,
     [](B *g) {
         g->matmul(memory(g, 1, {3, 2, 4}), memory(g, 2, {2, 4, 5}), memory(g, 3, {3, 2, 5}));
     }},
    {"a reduction of three to two", CUDNN_STATUS_BAD_PARAM,
     [](B *g) {
         g->reduction(CUDNN_REDUCE_TENSOR_ADD, memory(g, 1, {1, 3}), memory(g, 2, {1, 2}));
     }},
    {"a reshape to fewer elements", CUDNN_STATUS_BAD_PARAM,
     [](B *g) {
         g->reshape(memory(g, 1, {1, 4}), memory(g, 2, {1, 2}));
     }},
    {"a graph without operations", CUDNN_STATUS_BAD_PARAM, [](B *g) { g->graph(handle); }},
    {"two tensors of one id", CUDNN_STATUS_BAD_PARAM_DUPLICATED_ENTRIES,
     [](B *g) {
         g->pointwise(CUDNN_POINTWISE_EXP, memory(g, 1, {2, 2}), NULL, NULL, memory(g, 2, {2, 2}));
         g->pointwise(CUDNN_POINTWISE_EXP, memory(g, 1, {2, 2}, CUDNN_DATA_HALF), NULL, NULL, memory(g, 3, {2, 2}));
         g->graph(handle);
     }},
    {"a tensor that two operations write", CUDNN_STATUS_BAD_PARAM,
     [](B *g) {
         cudnnBackendDescriptor_t x = memory(g, 1, {2, 2}), y = memory(g, 2, {2, 2});
         g->pointwise(CUDNN_POINTWISE_EXP, x, NULL, NULL, y);
         g->pointwise(CUDNN_POINTWISE_LOG, x, NULL, NULL, y);
         g->graph(handle);
     }},
    {"a virtual tensor that nothing writes", CUDNN_STATUS_BAD_PARAM,
     [](B *g) {
         g->pointwise(CUDNN_POINTWISE_EXP, g->between({2, 2}), NULL, NULL, memory(g, 2, {2, 2}));
         g->graph(handle);
     }},
    {"operations in a circle", CUDNN_STATUS_BAD_PARAM,
     [](B *g) {
         cudnnBackendDescriptor_t x = memory(g, 1, {2, 2}), y = memory(g, 2, {2, 2});
         g->pointwise(CUDNN_POINTWISE_EXP, x, NULL, NULL, y);
         g->pointwise(CUDNN_POINTWISE_LOG, y, NULL, NULL, x);
         g->graph(handle);
     }},
    {"an engine of a graph that is not attention", CUDNN_STATUS_NOT_SUPPORTED,
     [](B *g) {
         g->pointwise(CUDNN_POINTWISE_EXP, memory(g, 1, {2, 2}), NULL, NULL, memory(g, 2, {2, 2}));
         config_of(g, g->graph(handle), 0);
     }},
    {"an engine that there is not", CUDNN_STATUS_NOT_SUPPORTED,
     [](B *g) { config_of(g, cudnn_forward_graph(g, &small, handle), 1); }},
    {"attention as one operation", CUDNN_STATUS_SUCCESS,
     [](B *g) { sdpa_with(g, [](B *, struct cudnn_sdpa_operation *) {}); }},
    {"attention without keys", CUDNN_STATUS_BAD_PARAM,
     [](B *g) { sdpa_with(g, [](B *, struct cudnn_sdpa_operation *s) { s->k = NULL; }); }},
    {"attention without the log-sum-exp", CUDNN_STATUS_NOT_SUPPORTED,
     [](B *g) { sdpa_with(g, [](B *, struct cudnn_sdpa_operation *s) { s->stats = NULL; }); }},
    {"attention of keys that are transposed", CUDNN_STATUS_BAD_PARAM,
     [](B *g) {
         sdpa_with(g, [](B *g, struct cudnn_sdpa_operation *s) {
             s->k = g->tensor(UID_K, CUDNN_DATA_BFLOAT16, {1, 2, 8, 16}, {256, 8, 1, 16}, B::MEMORY);
         });
     }},
    {"attention whose mask has no input", CUDNN_STATUS_BAD_PARAM,
     [](B *g) { sdpa_with(g, [](B *, struct cudnn_sdpa_operation *s) { s->in = -1; }); }},
    {"attention whose mask's output is no tensor of it", CUDNN_STATUS_BAD_PARAM,
     [](B *g) { sdpa_with(g, [](B *, struct cudnn_sdpa_operation *s) { s->out = 7; }); }},
    {"attention whose mask's ids are exchanged", CUDNN_STATUS_BAD_PARAM,
     [](B *g) { sdpa_with(g, [](B *, struct cudnn_sdpa_operation *s) { std::swap(s->in, s->out); }); }},
    {"a mask's ids without a mask", CUDNN_STATUS_BAD_PARAM,
     [](B *g) { sdpa_with(g, [](B *, struct cudnn_sdpa_operation *s) { s->mask = NULL; }); }},
    {"an engine of a graph without a handle", CUDNN_STATUS_NOT_SUPPORTED,
     [](B *g) { config_of(g, cudnn_forward_graph(g, &small, NULL), 0); }},
    {"a plan without a configuration", CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED,
     [](B *g) {
         cudnnBackendDescriptor_t plan = g->make(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
         g->set(plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
         g->finalize(plan, "plan");
     }},
    {"a variant pack with more ids than pointers", CUDNN_STATUS_BAD_PARAM, [](B *g) { pack_of(g, 3, 2, 2, g); }},
    {"a variant pack with an id twice", CUDNN_STATUS_BAD_PARAM, [](B *g) { pack_of(g, 3, 3, 1, g); }},
    {"a variant pack without an address", CUDNN_STATUS_BAD_PARAM_NULL_POINTER, [](B *g) { pack_of(g, 3, 3, 2, NULL); }},
};
static void each_breach_is_refused_and_said(void **state) {
    for (const struct breach &breach : breaches) {
        B g(&cudnn);
        breach.commit(&g);
        if (g.status != breach.status || (g.status != CUDNN_STATUS_SUCCESS && g.message.empty()))
            fail_msg("%s: status %d, expected %d, at %s: %s", breach.name, g.status, breach.status, g.at.c_str(),
                     g.message.c_str());
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_stand_in_is_loaded),
        cmocka_unit_test(each_breach_is_refused_and_said),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
