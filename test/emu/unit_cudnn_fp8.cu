// The stand-in for cuDNN (test/emu/cudnn.cpp) takes the graphs of attention in FP8 as cuDNN 9.28 does, and no others:
// each of its demands refuses a graph that breaks it.
#include "kernels/cudnn/fp8_graphs.cuh" // fused_fp8_forward_graph, fused_fp8_backward_graph
#include "test/testing.h"               // cmocka

static struct cudnn_functions cudnn;
static struct cudnn_context *handle;

static int set_up(void **state) {
    char reason[512];
    if (!cudnn_load(&cudnn, reason, sizeof reason))
        fail_msg("%s", reason);
    assert_int_equal(cudnn.create(&handle), CUDNN_STATUS_SUCCESS);
    return 0;
}
static int tear_down(void **state) {
    assert_int_equal(cudnn.destroy(handle), CUDNN_STATUS_SUCCESS);
    return 0;
}

// What is changed on the way from the graph's builder to the library.
static struct change {
    enum { NOTHING, TYPE, CODES, IDENTITY, BY_VALUE, LATE_AMAX } what;
    int64_t id;    // of the tensor
    int64_t value; // its type (TYPE; CODES: of all virtual tensors of that type) or its id (IDENTITY)
} change;
static struct {
    int64_t id, reduction;
    struct cudnn_descriptor *written; // by the last pointwise operation
} last;
static cudnn_status set_changed(struct cudnn_descriptor *d, enum cudnn_attribute_name name,
                                enum cudnn_attribute_type type, int64_t count, const void *elements) {
    const bool yes = true;
    const int32_t wanted = (int32_t)change.value;
    if (name == CUDNN_ATTR_TENSOR_UNIQUE_ID)
        memcpy(&last.id, elements, sizeof last.id);
    if (name == CUDNN_ATTR_REDUCTION_OPERATOR)
        last.reduction = *(const int32_t *)elements;
    if (name == CUDNN_ATTR_OPERATION_POINTWISE_YDESC)
        memcpy(&last.written, elements, sizeof last.written);
    const bool here = last.id == change.id;
    if (change.what == change::TYPE && here && name == CUDNN_ATTR_TENSOR_DATA_TYPE)
        elements = &wanted;
    if (change.what == change::CODES && last.id >= CUDNN_VIRTUAL_IDS && name == CUDNN_ATTR_TENSOR_DATA_TYPE &&
        *(const int32_t *)elements == (int32_t)change.id)
        elements = &wanted;
    if (change.what == change::IDENTITY && here && name == CUDNN_ATTR_TENSOR_UNIQUE_ID)
        elements = &change.value;
    if (change.what == change::BY_VALUE && here && name == CUDNN_ATTR_TENSOR_IS_BY_VALUE)
        elements = &yes;
    if (change.what == change::LATE_AMAX && name == CUDNN_ATTR_OPERATION_REDUCTION_XDESC &&
        last.reduction == CUDNN_REDUCE_TENSOR_AMAX && last.written)
        elements = &last.written;
    return cudnn.set_attribute(d, name, type, count, elements);
}

// Builds a graph in *b. Returns its plan by the heuristics' first configuration or by `engine`; NULL: message (256) says
// why there is none.
static struct cudnn_descriptor *plan_of(struct cudnn_builder *b, const struct fused_key *key,
                                        const struct cudnn_engine *engine, char message[256]) {
    static struct cudnn_functions changed;
    struct cudnn_descriptor *configurations[CUDNN_MAX_CONFIGURATIONS];
    changed = cudnn;
    changed.set_attribute = set_changed;
    memset(b, 0, sizeof *b);
    memset(&last, 0, sizeof last);
    b->functions = &changed;
    key->backward ? fused_fp8_backward_graph(b, key) : fused_fp8_forward_graph(b, key);
    struct cudnn_descriptor *graph = cudnn_operation_graph(b, handle);
    const int count = engine ? 1 : cudnn_proposals(b, graph, configurations);
    if (engine)
        configurations[0] = cudnn_configuration_of(b, graph, engine);
    struct cudnn_descriptor *plan = count > 0 ? cudnn_plan_of(b, handle, configurations[0]) : NULL;
    if (*b->reason)
        snprintf(message, 256, "%s", b->reason);
    else
        cudnn.get_last_error_string(message, 256);
    return *b->reason ? NULL : plan;
}

static const struct fused_key FORWARD = {1, 24, 4, 2, 128, false, false, FUSED_SUM_ANY, FUSED_HYBRID, false},
                              BACKWARD = {1, 24, 4, 2, 128, false, true, FUSED_SUM_ANY, FUSED_HYBRID, false};
// A case: a key with some members changed, on a GPU, with a change on the way. words: of the refusal; NULL: it is taken.
static const struct demand {
    const char *name, *capability;
    bool backward;
    int head_dim;
    enum fused_types types;
    bool wide;
    struct change change;
    const char *words;
} demands[] = {
    {"hybrid", "9.0", false, 128, FUSED_HYBRID, false, {}, NULL},
    {"hybrid", "9.0", true, 128, FUSED_HYBRID, false, {}, NULL},
    {"all in E4M3", "9.0", true, 128, FUSED_E4M3, false, {}, NULL},
    {"outputs in bf16", "10.0", false, 64, FUSED_HYBRID, true, {}, NULL},
    {"outputs in bf16", "10.3", true, 64, FUSED_E4M3, true, {}, NULL},
    {"outputs in FP8", "10.0", true, 64, FUSED_HYBRID, false, {}, NULL},
    {"a head of 256", "9.0", false, 256, FUSED_HYBRID, false, {}, NULL},
    {"outputs in bf16 on Hopper", "9.0", false, 128, FUSED_HYBRID, true, {}, "only supported on Blackwell"},
    {"gradients in bf16 on Hopper", "9.0", true, 128, FUSED_HYBRID, true, {}, "only supported on Blackwell"},
    {"a head of 64, backward", "9.0", true, 64, FUSED_HYBRID, false, {}, "Only D=128 for BPROP fp8"},
    {"a head of 24", "9.0", false, 24, FUSED_HYBRID, false, {}, "16 bytes"},
    {"a head of 144, backward", "10.0", true, 144, FUSED_HYBRID, true, {}, "heads of 144"},
    {"Ada", "8.9", false, 128, FUSED_HYBRID, false, {}, "compute capability 89"},
    {"GeForce Blackwell, backward", "12.0", true, 128, FUSED_HYBRID, false, {}, "no pattern"},
    {"bf16 q", "9.0", false, 128, FUSED_HYBRID, false, {change::TYPE, FUSED_Q, CUDNN_DATA_BFLOAT16}, "type 9, not 12"},
    {"E5M2 v", "9.0", true, 128, FUSED_HYBRID, false, {change::TYPE, FUSED_V, CUDNN_DATA_FP8_E5M2}, "type 13, not 12"},
    {"bf16 out of backward",
     "10.0",
     true,
     128,
     FUSED_HYBRID,
     true,
     {change::TYPE, FUSED_OUT, CUDNN_DATA_BFLOAT16},
     "type 9, not 12"},
    {"E4M3 dout beside E5M2 dS",
     "9.0",
     true,
     128,
     FUSED_HYBRID,
     false,
     {change::TYPE, FUSED_DOUT, CUDNN_DATA_FP8_E4M3},
     "type 13, not 12"},
    {"E4M3 dK beside E5M2 dQ",
     "9.0",
     true,
     128,
     FUSED_HYBRID,
     false,
     {change::TYPE, FUSED_DK, CUDNN_DATA_FP8_E4M3},
     "type 12, not 13"},
    {"P in bf16",
     "9.0",
     false,
     128,
     FUSED_HYBRID,
     false,
     {change::CODES, CUDNN_DATA_FP8_E4M3, CUDNN_DATA_BFLOAT16},
     "type 9, not 12"},
    {"dS in bf16",
     "9.0",
     true,
     128,
     FUSED_HYBRID,
     false,
     {change::CODES, CUDNN_DATA_FP8_E5M2, CUDNN_DATA_BFLOAT16},
     "type 9, not 13"},
    {"a descale by value",
     "9.0",
     false,
     128,
     FUSED_HYBRID,
     false,
     {change::BY_VALUE, FUSED_DESCALE_K, 0},
     "descale of k is not one fp32 number in the device's memory"},
    {"a scale by value",
     "9.0",
     true,
     128,
     FUSED_HYBRID,
     false,
     {change::BY_VALUE, FUSED_SCALE_DS, 0},
     "scale of ds is not one fp32 number in the device's memory"},
    {"a descale in bf16",
     "9.0",
     true,
     128,
     FUSED_HYBRID,
     false,
     {change::TYPE, FUSED_DESCALE_DOUT, CUDNN_DATA_BFLOAT16},
     "descale of do is not one fp32 number"},
    {"q's descale for k's",
     "9.0",
     false,
     128,
     FUSED_HYBRID,
     false,
     {change::IDENTITY, FUSED_DESCALE_K, FUSED_DESCALE_Q},
     "descale of q is another role's tensor, too"},
    {"P's scale for its descale",
     "9.0",
     true,
     128,
     FUSED_HYBRID,
     false,
     {change::IDENTITY, FUSED_DESCALE_P, FUSED_SCALE_P},
     "scale of p is another role's tensor, too"},
    {"O's amax after the scale",
     "9.0",
     false,
     128,
     FUSED_HYBRID,
     false,
     {change::LATE_AMAX, 0, 0},
     "no amax of o is taken before the scale"},
    {"the gradients' amaxes after the scale",
     "9.0",
     true,
     128,
     FUSED_HYBRID,
     false,
     {change::LATE_AMAX, 0, 0},
     "no amax of dv is taken before the scale"},
};
static void each_demand_is_made(void **state) {
    setenv("EMU_CUDNN_VERSION", "92500", 1);
    for (const struct demand &demand : demands) {
        struct fused_key key = demand.backward ? BACKWARD : FORWARD;
        struct cudnn_builder b;
        char message[256] = "";
        key.head_dim = demand.head_dim;
        key.types = demand.types;
        key.wide = demand.wide;
        change = demand.change;
        setenv("EMU_CAPABILITY", demand.capability, 1);
        const bool taken = plan_of(&b, &key, NULL, message) != NULL;
        if (taken == (demand.words != NULL) || (demand.words && !strstr(message, demand.words)))
            fail_msg("%s, backward %d: \"%s\", expected \"%s\"", demand.name, demand.backward, message,
                     demand.words ? demand.words : "a plan");
        if (taken)
            assert_int_equal(b.operation_count, demand.backward ? 43 : 22);
        assert_true(b.made_count <= CUDNN_MAX_DESCRIPTORS - 24); // for the configurations of the heuristics
        cudnn_close(&b);
    }
    memset(&change, 0, sizeof change);
    unsetenv("EMU_CAPABILITY");
    unsetenv("EMU_CUDNN_VERSION");
}
static void full_attention_has_four_operations_less(void **state) {
    setenv("EMU_CAPABILITY", "9.0", 1);
    for (int backward = 0; backward < 2; backward++) {
        struct fused_key key = backward ? BACKWARD : FORWARD;
        struct cudnn_builder b;
        char message[256] = "";
        key.full = true;
        if (!plan_of(&b, &key, NULL, message))
            fail_msg("%s", message);
        assert_int_equal(b.operation_count, backward ? 39 : 18);
        cudnn_close(&b);
    }
    unsetenv("EMU_CAPABILITY");
}
// Checks which numbers of stages cuDNN's engines take: on 9.0 one, on 10.x two.
static void each_engine_demands_its_stages(void **state) {
    static const struct {
        const char *capability;
        int64_t engine, stages;
        bool taken;
    } rows[] = {{"9.0", 6, 1, true},   {"9.0", 6, 4, false}, {"9.0", 6, 2, false}, {"10.0", 5, 2, true},
                {"10.0", 5, 4, false}, {"9.0", 5, 2, false}, {"10.0", 6, 1, false}};
    setenv("EMU_CUDNN_VERSION", "92500", 1);
    for (const auto &row : rows) {
        const struct cudnn_knob knobs[] = {{CUDNN_KNOB_TYPE_KERNEL_CFG, 2}, {CUDNN_KNOB_TYPE_STAGES, row.stages}};
        const struct cudnn_engine engine = {row.engine, knobs, 2};
        struct cudnn_builder b;
        char message[256] = "";
        setenv("EMU_CAPABILITY", row.capability, 1);
        if ((plan_of(&b, &BACKWARD, &engine, message) != NULL) != row.taken)
            fail_msg("%s, engine %d, stages %d: %s", row.capability, (int)row.engine, (int)row.stages, message);
        cudnn_close(&b);
    }
    unsetenv("EMU_CAPABILITY");
    unsetenv("EMU_CUDNN_VERSION");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_demand_is_made),
        cmocka_unit_test(full_attention_has_four_operations_less),
        cmocka_unit_test(each_engine_demands_its_stages),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
