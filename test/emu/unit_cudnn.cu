// The stand-in for cuDNN (test/emu/cudnn.cpp): attention equals double precision's, forward and backward, on streams
// and in graphs; graphs that no engine takes are refused; faults of a call are found.
#include "test/apart.h"            // run_with_and_without
#include "test/emu/cudnn_graphs.h" // cudnn_forward_graph, cudnn_backward_graph
#include "test/testing.h"          // cmocka
#include <algorithm>               // std::find
#include <cuda_runtime.h>          // cudaStreamCreate
#include <float.h>                 // FLT_MAX
#include <map>                     // std::map

static struct cudnn_library cudnn;
static cudnnHandle_t handle;
static cudaStream_t stream;

static int set_up(void **state) {
    if (!cudnn_open(&cudnn, "libcudnn.so.9"))
        fail_msg("%s", dlerror());
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    assert_int_equal(cudnn.Create(&handle), CUDNN_STATUS_SUCCESS);
    assert_int_equal(cudnn.SetStream(handle, stream), CUDNN_STATUS_SUCCESS);
    return 0;
}
static int tear_down(void **state) {
    assert_int_equal(cudnn.Destroy(handle), CUDNN_STATUS_SUCCESS);
    cudaStreamDestroy(stream);
    return 0;
}
typedef struct cudnn_builder B;

// --- Attention ----------------------------------------------------------------------------------------------------

// Returns a float in fp16 or bf16.
static uint16_t to_16bit(float x, cudnnDataType_t type) {
    if (type == CUDNN_DATA_BFLOAT16)
        return emu_to_bf16(x);
    _Float16 half = (_Float16)x;
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}
static double from_16bit(uint16_t bits, cudnnDataType_t type) {
    if (type == CUDNN_DATA_BFLOAT16)
        return emu_bf16(bits);
    _Float16 half;
    memcpy(&half, &bits, sizeof half);
    return (double)half;
}
static uint16_t *random_memory(int64_t count, cudnnDataType_t type, uint64_t seed) {
    uint16_t *memory = NULL;
    cudaMallocManaged(&memory, (size_t)count * sizeof *memory);
    for (int64_t i = 0; i < count && seed; i++)
        memory[i] = to_16bit((float)test_uniform(&seed), type);
    return memory;
}

// An attention's tensors. k and v lie side by side, and so do their gradients.
struct attention {
    struct cudnn_attention of;
    float scale, masked, one;
    uint16_t *q, *kv, *o, *d_o, *dq, *dkv;
    float *stats, *row_sum, *dq_sum;
};
static int64_t q_count(const struct attention *a) { return a->of.batch * a->of.queries * a->of.row; }
static int64_t o_count(const struct attention *a) { return a->of.batch * a->of.queries * a->of.heads * a->of.width; }
static int64_t kv_count(const struct attention *a) { return a->of.batch * a->of.keys * a->of.kv_row; }
static struct attention make_attention(struct cudnn_attention of) {
    struct attention a = {of, 0.3f, -INFINITY, 1, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL};
    a.of.row = of.heads * of.width + 8; // a gap that no kernel may touch
    a.of.kv_row = 2 * of.kv_heads * of.width;
    a.q = random_memory(q_count(&a), of.type, 1);
    a.kv = random_memory(kv_count(&a), of.type, 2);
    a.d_o = random_memory(o_count(&a), of.type, 3);
    a.o = random_memory(o_count(&a), of.type, 0);
    a.dq = random_memory(q_count(&a), of.type, 0);
    a.dkv = random_memory(kv_count(&a), of.type, 0);
    const size_t rows = (size_t)(of.batch * of.heads * of.queries) * sizeof(float);
    cudaMallocManaged(&a.stats, rows);
    cudaMallocManaged(&a.row_sum, rows);
    cudaMallocManaged(&a.dq_sum, rows * (size_t)of.width);
    return a;
}
static void free_attention(struct attention *a) {
    void *const all[] = {a->q, a->kv, a->o, a->d_o, a->dq, a->dkv, a->stats, a->row_sum, a->dq_sum};
    for (void *memory : all)
        assert_int_equal(cudaFree(memory), cudaSuccess);
}

// A plan, a variant pack of the attention's tensors, and a workspace.
struct work {
    B g;
    cudnnBackendDescriptor_t plan, pack;
    char *workspace;
    int64_t workspace_bytes;
    explicit work(struct attention *a, bool backward) : g(&cudnn), workspace(NULL), workspace_bytes(-1) {
        cudnnBackendDescriptor_t graph =
            backward ? cudnn_backward_graph(&g, &a->of, handle) : cudnn_forward_graph(&g, &a->of, handle);
        plan = g.make(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        g.set(plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
        g.set(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, best_config(graph));
        g.finalize(plan, "plan");
        int64_t count = 0;
        if (g.status == CUDNN_STATUS_SUCCESS)
            g.hold(cudnn.GetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &count,
                                      &workspace_bytes),
                   "workspace");
        if (workspace_bytes > 0)
            cudaMallocManaged(&workspace, (size_t)workspace_bytes);
        pack = g.make(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
        fill(a);
        g.set(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
        g.finalize(pack, "variant pack");
    }
    ~work() {
        if (workspace)
            cudaFree(workspace);
    }
    cudnnBackendDescriptor_t best_config(cudnnBackendDescriptor_t graph) {
        const cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
        cudnnBackendDescriptor_t heuristics = g.make(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
        g.set(heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
        g.set(heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
        g.finalize(heuristics, "heuristics");
        int64_t count = 0;
        cudnnBackendDescriptor_t config = g.make(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
        if (g.status == CUDNN_STATUS_SUCCESS)
            g.hold(cudnn.GetAttribute(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
                                      &count, &config),
                   "results");
        if (g.status == CUDNN_STATUS_SUCCESS && count == 0)
            g.hold(CUDNN_STATUS_NOT_SUPPORTED, "no configuration");
        return config;
    }
    void fill(struct attention *a) {
        const int64_t v = a->of.kv_heads * a->of.width;
        const std::map<int64_t, void *> places = {{UID_Q, a->q},
                                                  {UID_K, a->kv},
                                                  {UID_V, a->kv + v},
                                                  {UID_O, a->o},
                                                  {UID_STATS, a->stats},
                                                  {UID_SCALE, &a->scale},
                                                  {UID_MASKED, &a->masked},
                                                  {UID_DO, a->d_o},
                                                  {UID_DQ, a->dq},
                                                  {UID_DK, a->dkv},
                                                  {UID_DV, a->dkv + v},
                                                  {UID_DQ_SUM, a->dq_sum},
                                                  {UID_ROW_SUM, a->row_sum},
                                                  {UID_ONE, &a->one}};
        std::vector<void *> pointers;
        for (const int64_t uid : g.uids)
            pointers.push_back(places.at(uid));
        g.set(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, (int64_t)g.uids.size(), g.uids.data());
        g.set(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, (int64_t)pointers.size(),
              pointers.data());
    }
    void enqueue() {
        g.hold(cudnn.Execute(handle, plan, pack), "execute");
        if (g.status != CUDNN_STATUS_SUCCESS)
            fail_msg("status %d at %s: %s", g.status, g.at.c_str(), g.message.c_str());
    }
};
static void run(struct attention *a, bool backward) {
    work work(a, backward);
    work.enqueue();
    assert_int_equal(cudaStreamSynchronize(stream), cudaSuccess);
}

// The results in double precision. The gradients follow from o as it was rounded.
struct expected {
    std::vector<double> o, stats, dq, dk, dv;
};
static struct expected expect(const struct attention *a) {
    const int64_t H = a->of.heads, G = a->of.kv_heads, T = a->of.queries, S = a->of.keys, D = a->of.width;
    const size_t rows = (size_t)(a->of.batch * H * T), kv_rows = (size_t)(a->of.batch * S * G);
    struct expected e = {std::vector<double>(rows * (size_t)D), std::vector<double>(rows),
                         std::vector<double>(rows * (size_t)D), std::vector<double>(kv_rows * (size_t)D),
                         std::vector<double>(kv_rows * (size_t)D)};
    std::vector<double> p((size_t)S);
    for (int64_t row = 0; row < (int64_t)rows; row++) {
        const int64_t b = row / (H * T), h = row / T % H, t = row % T, end = a->of.causal && t + 1 < S ? t + 1 : S;
        const uint16_t *q = a->q + (b * T + t) * a->of.row + h * D;
        const uint16_t *k = a->kv + b * S * a->of.kv_row + h / (H / G) * D, *v = k + G * D;
        const int64_t out = ((b * T + t) * H + h) * D;
        double sum = 0, row_sum = 0;
        for (int64_t s = 0; s < end; s++) {
            double score = 0;
            for (int64_t i = 0; i < D; i++)
                score += from_16bit(q[i], a->of.type) * from_16bit(k[s * a->of.kv_row + i], a->of.type);
            sum += p[(size_t)s] = exp(score * a->scale);
        }
        e.stats[(size_t)row] = log(sum);
        for (int64_t s = 0; s < end; s++)
            for (int64_t i = 0; i < D; i++)
                e.o[(size_t)(out + i)] += p[(size_t)s] / sum * from_16bit(v[s * a->of.kv_row + i], a->of.type);
        for (int64_t i = 0; i < D; i++)
            row_sum += e.o[(size_t)(out + i)] * from_16bit(a->d_o[out + i], a->of.type);
        for (int64_t s = 0; s < end; s++) {
            const size_t kv = (size_t)(((b * S + s) * G + h / (H / G)) * D);
            double dp = 0;
            for (int64_t i = 0; i < D; i++)
                dp += from_16bit(a->d_o[out + i], a->of.type) * from_16bit(v[s * a->of.kv_row + i], a->of.type);
            const double ds = (dp - row_sum) * p[(size_t)s] / sum * a->scale;
            for (int64_t i = 0; i < D; i++) {
                e.dv[kv + (size_t)i] += p[(size_t)s] / sum * from_16bit(a->d_o[out + i], a->of.type);
                e.dk[kv + (size_t)i] += ds * from_16bit(q[i], a->of.type);
                e.dq[(size_t)(out + i)] += ds * from_16bit(k[s * a->of.kv_row + i], a->of.type);
            }
        }
    }
    return e;
}
// Checks `positions` positions of `heads` rows of `width`; positions are `row` elements apart in x.
static void assert_rows(const uint16_t *x, const std::vector<double> &expected, int64_t positions, int64_t row,
                        int64_t heads, int64_t width, const struct attention *a) {
    std::vector<double> got;
    for (int64_t t = 0; t < positions; t++)
        for (int64_t i = 0; i < heads * width; i++)
            got.push_back(from_16bit(x[t * row + i], a->of.type));
    assert_close(got.data(), expected.data(), (int64_t)got.size(), a->of.type == CUDNN_DATA_HALF ? 8e-4 : 6e-3);
}

static const struct cudnn_attention shapes[] = {
    {2, 2, 2, 24, 24, 16, 0, 0, true, false, CUDNN_DATA_BFLOAT16},
    {2, 4, 2, 20, 20, 8, 0, 0, true, true, CUDNN_DATA_BFLOAT16},
    {1, 6, 1, 7, 33, 24, 0, 0, false, false, CUDNN_DATA_BFLOAT16},
    {1, 3, 3, 17, 9, 64, 0, 0, true, false, CUDNN_DATA_HALF},
    {1, 2, 1, 65, 65, 128, 0, 0, true, false, CUDNN_DATA_BFLOAT16},
};
static void check_both_passes(bool operation) {
    for (struct cudnn_attention shape : shapes) {
        shape.operation = operation;
        struct attention a = make_attention(shape);
        test_case_without_seed("%lld heads of %lld, %lld queries, %lld keys, width %lld, causal %d, one operation %d",
                               (long long)shape.heads, (long long)shape.kv_heads, (long long)shape.queries,
                               (long long)shape.keys, (long long)shape.width, shape.causal, operation);
        run(&a, false);
        const struct expected e = expect(&a);
        const int64_t B = shape.batch, H = shape.heads, G = shape.kv_heads, T = shape.queries, S = shape.keys,
                      D = shape.width;
        assert_rows(a.o, e.o, B * T, H * D, H, D, &a);
        const std::vector<double> stats(a.stats, a.stats + B * H * T);
        assert_close(stats.data(), e.stats.data(), B * H * T, 1e-5);
        run(&a, true);
        assert_rows(a.dq, e.dq, B * T, a.of.row, H, D, &a);
        assert_rows(a.dkv, e.dk, B * S, a.of.kv_row, G, D, &a);
        assert_rows(a.dkv + G * D, e.dv, B * S, a.of.kv_row, G, D, &a);
        for (int64_t t = 0; t < B * T; t++)
            for (int64_t i = H * D; i < a.of.row; i++)
                assert_int_equal(a.dq[t * a.of.row + i], 0xffff); // the gap
        free_attention(&a);
    }
}
static void both_passes_are_attention(void **state) { check_both_passes(false); }
static void one_operation_is_attention(void **state) {
    setenv("EMU_CUDNN_VERSION", "92100", 1);
    check_both_passes(true);
    unsetenv("EMU_CUDNN_VERSION");
}
// Checks that the graph's own values decide the result: a mask's value of 0 masks nothing.
static void values_and_masks_are_the_graphs(void **state) {
    struct attention a = make_attention(shapes[0]);
    run(&a, false);
    const std::vector<uint16_t> before(a.o, a.o + o_count(&a));
    a.masked = 0;
    run(&a, false);
    assert_true(memcmp(before.data(), a.o, before.size() * 2) != 0);
    free_attention(&a);
}
static void dq_summed_in_memory_has_other_bits_each_time(void **state) {
    for (const bool add_dq : {false, true}) {
        struct cudnn_attention shape = shapes[4];
        shape.add_dq = add_dq;
        struct attention a = make_attention(shape);
        run(&a, false);
        bool same = true;
        run(&a, true);
        const std::vector<float> sums(a.dq_sum, a.dq_sum + o_count(&a));
        const std::vector<uint16_t> dq(a.dq, a.dq + q_count(&a)), dkv(a.dkv, a.dkv + kv_count(&a));
        for (int i = 0; i < 4; i++) {
            run(&a, true);
            same = same && memcmp(sums.data(), a.dq_sum, sums.size() * sizeof sums[0]) == 0;
            assert_true(add_dq || memcmp(dq.data(), a.dq, dq.size() * 2) == 0);
            assert_memory_equal(a.dkv, dkv.data(), dkv.size() * 2);
        }
        assert_true(same == !add_dq);
        free_attention(&a);
    }
}
static void runs_in_its_turn_and_is_recorded(void **state) {
    struct attention a = make_attention(shapes[0]);
    const size_t bytes = (size_t)o_count(&a) * 2;
    setenv("EMU_CAPABILITY", "9.0", 1); // there a workspace is needed
    work work(&a, false);
    memset(work.workspace, 0, (size_t)work.workspace_bytes);
    work.enqueue();
    assert_int_equal(a.o[0], 0xffff); // it has not run yet
    a.scale = 100;                    // the call has taken the former value
    cudaStreamSynchronize(stream);
    assert_true(a.o[0] != 0xffff && a.o[0] != 0x7fff);
    for (int64_t i = 0; i < work.workspace_bytes; i++)
        assert_int_equal((unsigned char)work.workspace[i], 0xff);
    const std::vector<uint16_t> first(a.o, a.o + o_count(&a));
    a.scale = 0.3f;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    memset(a.o, 0, bytes);
    assert_int_equal(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    work.enqueue();
    assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    cudaGraphInstantiate(&executable, graph);
    cudaGraphDestroy(graph);
    assert_int_equal(a.o[0], 0);
    for (int i = 0; i < 2; i++) {
        memset(a.o, 0, bytes);
        cudaGraphLaunch(executable, stream);
        cudaStreamSynchronize(stream);
        assert_memory_equal(a.o, first.data(), bytes);
    }
    unsetenv("EMU_CAPABILITY");
    cudaGraphExecDestroy(executable);
    free_attention(&a);
}

// --- What no engine takes -----------------------------------------------------------------------------------------

static const struct refusal {
    const char *name, *variable, *value; // variable, value: of the environment
    struct cudnn_attention of;
    bool forward, backward; // whether cuDNN still takes the graph
} refusals[] = {
    {"nothing is wrong", "EMU_NONE", "", {1, 2, 2, 8, 8, 8, 0, 0, true, false, CUDNN_DATA_BFLOAT16}, true, true},
    {"a width of 12", "EMU_NONE", "", {1, 1, 1, 8, 8, 12, 0, 0, true, false, CUDNN_DATA_BFLOAT16}, false, false},
    {"a width of 136", "EMU_NONE", "", {1, 2, 2, 8, 8, 136, 0, 0, true, false, CUDNN_DATA_BFLOAT16}, false, false},
    {"a width of 136 on Hopper",
     "EMU_CAPABILITY",
     "9.0",
     {1, 2, 2, 8, 8, 136, 0, 0, true, false, CUDNN_DATA_BFLOAT16},
     true,
     true},
    {"a width of 136 on Blackwell before 9.26",
     "EMU_CAPABILITY",
     "10.0",
     {1, 2, 2, 8, 8, 136, 0, 0, true, false, CUDNN_DATA_BFLOAT16},
     false,
     false},
    {"fp32", "EMU_NONE", "", {1, 2, 2, 8, 8, 8, 0, 0, true, false, CUDNN_DATA_FLOAT}, false, false},
    {"p in fp32",
     "EMU_NONE",
     "",
     {1, 2, 2, 8, 8, 8, 0, 0, true, false, CUDNN_DATA_BFLOAT16, CUDNN_FP32_P},
     false,
     true},
    {"no stats",
     "EMU_NONE",
     "",
     {1, 2, 2, 8, 8, 8, 0, 0, true, false, CUDNN_DATA_BFLOAT16, CUDNN_NO_STATS},
     false,
     true},
    {"one more operation",
     "EMU_NONE",
     "",
     {1, 2, 2, 8, 8, 8, 0, 0, true, false, CUDNN_DATA_BFLOAT16, CUDNN_MORE},
     false,
     true},
    {"one query of one key", "EMU_NONE", "", {1, 2, 2, 1, 1, 8, 0, 0, true, false, CUDNN_DATA_BFLOAT16}, true, false},
    {"Turing", "EMU_CAPABILITY", "7.5", {1, 2, 2, 8, 8, 8, 0, 0, true, false, CUDNN_DATA_BFLOAT16}, false, false},
    {"9.10.0", "EMU_CUDNN_VERSION", "91000", {1, 2, 2, 8, 8, 8, 0, 0, true, false, CUDNN_DATA_BFLOAT16}, true, false},
    {"one operation before 9.21",
     "EMU_CUDNN_VERSION",
     "92099",
     {1, 2, 2, 8, 8, 8, 0, 0, true, false, CUDNN_DATA_BFLOAT16, CUDNN_NO_FLAW, true},
     false,
     true},
    {"one operation",
     "EMU_CUDNN_VERSION",
     "92100",
     {1, 2, 2, 8, 8, 8, 0, 0, true, false, CUDNN_DATA_BFLOAT16, CUDNN_NO_FLAW, true},
     true,
     true},
    {"no graph is taken",
     "EMU_CUDNN_REFUSE",
     "graph",
     {1, 2, 2, 8, 8, 8, 0, 0, true, false, CUDNN_DATA_BFLOAT16},
     false,
     false},
    {"no plan is made",
     "EMU_CUDNN_REFUSE",
     "plan",
     {1, 2, 2, 8, 8, 8, 0, 0, true, false, CUDNN_DATA_BFLOAT16},
     false,
     false},
};
static void what_no_engine_takes_is_refused(void **state) {
    for (const struct refusal &refusal : refusals) {
        struct cudnn_attention of = refusal.of;
        struct attention a = make_attention(shapes[0]);
        of.row = (of.heads * of.width + 7) / 8 * 8;
        of.kv_row = 2 * of.row;
        a.of = of;
        setenv(refusal.variable, refusal.value, 1);
        for (const bool backward : {false, true}) {
            work work(&a, backward);
            if ((work.g.status == CUDNN_STATUS_SUCCESS) != (backward ? refusal.backward : refusal.forward))
                fail_msg("%s, backward %d: status %d at %s: %s", refusal.name, backward, work.g.status,
                         work.g.at.c_str(), work.g.message.c_str());
        }
        unsetenv(refusal.variable);
        free_attention(&a);
    }
}
// A choice of an engine that heuristics do not propose.
struct knob {
    cudnnBackendKnobType_t type;
    int64_t value;
};
static cudnnStatus_t status_of_engine(int64_t index, bool add_dq, const std::vector<struct knob> &knobs) {
    struct cudnn_attention of = {1, 2, 2, 8, 8, 8, 16, 16, true, add_dq, CUDNN_DATA_BFLOAT16};
    B g(&cudnn);
    cudnnBackendDescriptor_t engine = g.make(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    g.set(engine, CUDNN_ATTR_ENGINE_OPERATION_GRAPH, cudnn_backward_graph(&g, &of, handle));
    g.set(engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &index);
    g.finalize(engine, "engine");
    std::vector<cudnnBackendDescriptor_t> choices;
    for (const struct knob &knob : knobs) {
        choices.push_back(g.make(CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR));
        g.set(choices.back(), CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, 1, &knob.type);
        g.set(choices.back(), CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, CUDNN_TYPE_INT64, 1, &knob.value);
        g.finalize(choices.back(), "choice");
    }
    cudnnBackendDescriptor_t config = g.make(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    g.set(config, CUDNN_ATTR_ENGINECFG_ENGINE, engine);
    g.set(config, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, CUDNN_TYPE_BACKEND_DESCRIPTOR, (int64_t)choices.size(),
          choices.data());
    g.finalize(config, "configuration");
    return g.status;
}
static void an_engine_by_number_and_knobs(void **state) {
    const std::vector<struct knob> kernel = {{CUDNN_KNOB_TYPE_KERNEL_CFG, 31}};
    assert_int_equal(status_of_engine(5, false, kernel), CUDNN_STATUS_NOT_SUPPORTED); // on compute capability 8.0
    setenv("EMU_CAPABILITY", "10.0", 1);
    assert_int_equal(status_of_engine(5, false, kernel), CUDNN_STATUS_SUCCESS);
    assert_int_equal(status_of_engine(5, false, {}), CUDNN_STATUS_NOT_SUPPORTED);
    assert_int_equal(status_of_engine(5, true, kernel), CUDNN_STATUS_NOT_SUPPORTED);
    assert_int_equal(status_of_engine(17, false, kernel), CUDNN_STATUS_NOT_SUPPORTED);
    setenv("EMU_CUDNN_VERSION", "91700", 1);
    assert_int_equal(status_of_engine(5, false, kernel), CUDNN_STATUS_NOT_SUPPORTED);
    unsetenv("EMU_CUDNN_VERSION");
    unsetenv("EMU_CAPABILITY");
}
static void an_engine_that_sums_dq_in_turn(void **state) {
    const std::vector<struct knob> turns = {{CUDNN_KNOB_TYPE_TILE_M, 2},     {CUDNN_KNOB_TYPE_TILE_N, 1},
                                            {CUDNN_KNOB_TYPE_KERNEL_CFG, 2}, {CUDNN_KNOB_TYPE_STREAM_K, 0},
                                            {CUDNN_KNOB_TYPE_TILE_CGA_M, 0}, {CUDNN_KNOB_TYPE_STAGES, 4}};
    static const char *const capabilities[] = {"8.0", "10.0", "9.0"};
    for (const char *capability : capabilities) {
        const bool here = strcmp(capability, "9.0") == 0;
        setenv("EMU_CAPABILITY", capability, 1);
        setenv("EMU_CUDNN_VERSION", "92500", 1);
        assert_int_equal(status_of_engine(6, true, turns), here ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_NOT_SUPPORTED);
        assert_int_equal(status_of_engine(6, false, turns), CUDNN_STATUS_NOT_SUPPORTED);
        for (size_t i = 0; i < turns.size(); i++) {
            std::vector<struct knob> other = turns;
            other[i].value++;
            assert_int_equal(status_of_engine(6, true, other), CUDNN_STATUS_NOT_SUPPORTED);
            other.erase(other.begin() + (long)i);
            assert_int_equal(status_of_engine(6, true, other), CUDNN_STATUS_NOT_SUPPORTED);
        }
        setenv("EMU_CUDNN_VERSION", "92499", 1);
        assert_int_equal(status_of_engine(6, true, turns), CUDNN_STATUS_NOT_SUPPORTED);
    }
    unsetenv("EMU_CUDNN_VERSION");
    unsetenv("EMU_CAPABILITY");
}
static void a_version_that_is_wrong_gives_nan(void **state) {
    struct attention a = make_attention(shapes[0]);
    setenv("EMU_CUDNN_VERSION", "91500", 1);
    run(&a, false);
    assert_true(a.o[0] != 0x7fff);
    run(&a, true);
    assert_int_equal(a.dq[0], 0x7fff);
    setenv("EMU_CUDNN_VERSION", "90900", 1);
    run(&a, false);
    assert_int_equal(a.o[0], 0x7fff);
    a.masked = -FLT_MAX;
    run(&a, false);
    assert_true(a.o[0] != 0x7fff);
    unsetenv("EMU_CUDNN_VERSION");
    free_attention(&a);
}

// --- What ends the program ----------------------------------------------------------------------------------------

enum { WITHOUT_WORKSPACE = 1, SHORT_WORKSPACE, HOST_MEMORY, SHORT_OUTPUT, OVERLAP, MISALIGNED, DESTROYED, NO_POINTER };
static const struct call_fault {
    const char *name, *words;
    int fault;
    cudnnStatus_t status; // CUDNN_STATUS_SUCCESS: the program ends with status 3
} call_faults[] = {
    {"without_workspace", "needs a workspace", WITHOUT_WORKSPACE, CUDNN_STATUS_BAD_PARAM_NULL_POINTER},
    {"misaligned", "is not aligned to 16 bytes", MISALIGNED, CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER},
    {"no_pointer", "has no tensor 4", NO_POINTER, CUDNN_STATUS_BAD_PARAM},
    {"short_workspace", "no allocation of the device has all of the workspace", SHORT_WORKSPACE, CUDNN_STATUS_SUCCESS},
    {"host_memory", "no allocation of the device", HOST_MEMORY, CUDNN_STATUS_SUCCESS},
    {"short_output", "tensor 4: no allocation of the device", SHORT_OUTPUT, CUDNN_STATUS_SUCCESS},
    {"overlap", "overlap, and one is written", OVERLAP, CUDNN_STATUS_SUCCESS},
    {"destroyed", "is no descriptor, or one that was destroyed", DESTROYED, CUDNN_STATUS_SUCCESS},
};
static int commit_fault(const struct call_fault *fault, bool well) {
    static uint16_t host[4096];
    setenv("EMU_CAPABILITY", "9.0", 1); // there a workspace is needed
    set_up(NULL);
    struct attention a = make_attention(shapes[0]);
    work work(&a, false);
    B g(&cudnn); // for a second variant pack
    struct attention other = a;
    cudnnBackendDescriptor_t pack = g.make(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    const int what = well ? 0 : fault->fault;
    other.o = what == HOST_MEMORY    ? host
              : what == SHORT_OUTPUT ? a.o + 8
              : what == OVERLAP      ? a.q
              : what == MISALIGNED   ? a.o + 1
                                     : a.o;
    cudnnBackendDescriptor_t kept = work.pack;
    work.pack = pack;
    if (what == NO_POINTER)
        work.g.uids.erase(std::find(work.g.uids.begin(), work.g.uids.end(), (int64_t)UID_O));
    work.fill(&other);
    if (what == SHORT_WORKSPACE) {
        char *const late = work.workspace + 16;
        g.set(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &late);
    } else if (what != WITHOUT_WORKSPACE)
        g.set(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &work.workspace);
    g.finalize(pack, "variant pack");
    if (what == DESTROYED)
        cudnn.DestroyDescriptor(kept);
    g.hold(cudnn.Execute(handle, work.plan, what == DESTROYED ? kept : pack), "execute");
    fprintf(stderr, "%s\n", g.message.c_str());
    if (g.status == CUDNN_STATUS_SUCCESS)
        cudaStreamSynchronize(stream);
    _exit(g.status == CUDNN_STATUS_SUCCESS ? 0 : g.status == fault->status && !well ? 3 : 4);
}
static void each_fault_of_a_call_is_found(void **state) {
    for (const struct call_fault &fault : call_faults) {
        char message[4096];
        const int status = run_with_and_without(fault.name, message, sizeof message);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 3 || !strstr(message, fault.words))
            fail_msg("%s: status %d, expected one that says \"%s\": %s", fault.name, status, fault.words, message);
    }
}

int main(int argc, char **argv) {
    for (const struct call_fault &fault : call_faults)
        if (argc > 1 && strcmp(argv[1], fault.name) == 0)
            return commit_fault(&fault, argc > 2 && strcmp(argv[2], "well") == 0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(both_passes_are_attention),
        cmocka_unit_test(one_operation_is_attention),
        cmocka_unit_test(values_and_masks_are_the_graphs),
        cmocka_unit_test(dq_summed_in_memory_has_other_bits_each_time),
        cmocka_unit_test(runs_in_its_turn_and_is_recorded),
        cmocka_unit_test(what_no_engine_takes_is_refused),
        cmocka_unit_test(an_engine_by_number_and_knobs),
        cmocka_unit_test(an_engine_that_sums_dq_in_turn),
        cmocka_unit_test(a_version_that_is_wrong_gives_nan),
        cmocka_unit_test(each_fault_of_a_call_is_found),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
