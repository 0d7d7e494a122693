// matmul_forward, matmul_backward_input and matmul_backward_weight of every backend that is compiled in, against naive
// double loops: values, accumulation, writes out of bounds, reads of memory that was not given, equal bits for the same
// operands and, where the backend promises them, for any number of threads.
#ifdef TARGET_CUDA
#include "kernels/gpu_sizes.cuh"    // GPU_MATMUL_BYTES
#include "kernels/matmul/matmul.cu" // the plans and choices under test
#else
#include "kernels/matmul/matmul.cuh"
#if defined HAVE_ONEDNN && defined PRECISION_BF16
#include "kernels/matmul/onednn.cuh" // struct onednn
#include "kernels/matmul/rows.cuh"   // FEW_ROWS_MAX
#endif
#endif
#include "test/fails.h"           // run_in_child
#include "test/matmul_backends.h" // for_each_backend, guarded
#include "test/testing.h"         // cmocka, random data, comparison

struct shape {
    int64_t M;
    int N, K;
};
// Awkward sizes; depths beyond every backend's depth block, in each of the three calls; more columns than a panel has;
// more rows than one part of dbias's sum has.
static const struct shape shapes[] = {{1, 1, 1},     {1, 5, 3},      {33, 17, 65},  {64, 384, 100}, {257, 129, 770},
                                      {7, 40, 1700}, {1700, 31, 40}, {5, 1700, 65}, {20, 33, 2100}, {20, 2100, 33},
                                      {96, 64, 64},  {2, 32, 32},    {2600, 3, 5},  {4000, 64, 33}, {9000, 40, 3}};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

// Returns the tolerance, relative to the result. A sum of K products of random signs has a standard deviation of s
// sqrt(K). Its K roundings, each at most 2^-24 of a partial sum of s sqrt(k), add up to at most s K 2^-24 / sqrt(2),
// which is sqrt(K) 2^-24 of the sum. Two more are for the product and for what the sum is added to; and one is the
// rounding to the output.
static double tolerance(int64_t depth, double output_rounding) {
    return (sqrt((double)depth) + 2) * 0x1p-24 + output_rounding;
}
// What tensor cores add to the tolerance. They cut a sum off where others round it, after each block of a depth of 8:
// by at most 2^-23 of it, on average by half of that, and always towards 0, so that these errors add up (Fasi, Higham,
// Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ Computer Science 7:e330, 2021). They show
// only where the output is fp32: in dweight.
#if defined(TARGET_CUDA) && !defined(CUDA_EMULATED)
static const double CUT_OFFS = sizeof(floatX) == 2 ? 1.0 / 8 : 0; // for each product of a sum
#else
static const double CUT_OFFS = 0;
#endif
static double dweight_tolerance(int64_t depth) { return tolerance(depth, CUT_OFFS * (double)depth * 0x1p-24); }

static floatX *random_input(double **exact, int64_t n, uint64_t *state) {
    floatX *x = (floatX *)guarded((size_t)n * sizeof *x, NAN_BYTE);
    *exact = test_doubles(n);
    for (int64_t i = 0; i < n; i++) {
        x[i] = to_floatX((float)test_uniform(state));
        (*exact)[i] = to_float(x[i]);
    }
    return x;
}

// ---- the naive reference ----

struct naive {
    double *in, *weight, *bias, *dout;   // given
    double *out, *din, *dweight, *dbias; // computed
};

static void naive_forward(double *out, const struct naive *x, struct shape s) {
    for (int64_t m = 0; m < s.M; m++)
        for (int n = 0; n < s.N; n++) {
            double sum = x->bias[n];
#pragma omp simd reduction(+ : sum)
            for (int k = 0; k < s.K; k++)
                sum += x->in[m * s.K + k] * x->weight[(int64_t)n * s.K + k];
            out[m * s.N + n] = sum;
        }
}
static void naive_backward(struct naive *x, struct shape s) {
    for (int64_t m = 0; m < s.M; m++)
        for (int n = 0; n < s.N; n++) {
            const double dout = x->dout[m * s.N + n];
            x->dbias[n] += dout;
#pragma omp simd
            for (int k = 0; k < s.K; k++) {
                x->din[m * s.K + k] += dout * x->weight[(int64_t)n * s.K + k];
                x->dweight[(int64_t)n * s.K + k] += dout * x->in[m * s.K + k];
            }
        }
}
static void naive_free(struct naive *x) {
    double *all[] = {x->in, x->weight, x->bias, x->dout, x->out, x->din, x->dweight, x->dbias};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

// One shape's inputs, and what naive loops compute from them.
struct problem {
    struct shape shape;
    floatX *in, *weight, *bias, *dout;
    struct naive naive;
};

static struct problem problem_make(struct shape s, uint64_t seed) {
    struct problem p;
    memset(&p, 0, sizeof p);
    p.shape = s;
    test_case(seed, "%s, M %lld, N %d, K %d", backend_under_test, (long long)s.M, s.N, s.K);
    p.in = random_input(&p.naive.in, s.M * s.K, &seed);
    p.weight = random_input(&p.naive.weight, (int64_t)s.N * s.K, &seed);
    p.bias = random_input(&p.naive.bias, s.N, &seed);
    p.dout = random_input(&p.naive.dout, s.M * s.N, &seed);
    p.naive.out = test_doubles(s.M * s.N);
    p.naive.din = test_doubles(s.M * s.K);
    p.naive.dweight = test_doubles((int64_t)s.N * s.K);
    p.naive.dbias = test_doubles(s.N);
    naive_forward(p.naive.out, &p.naive, s);
    naive_backward(&p.naive, s);
    return p;
}
static void problem_free(struct problem *p) {
    guarded_free(p->in);
    guarded_free(p->weight);
    guarded_free(p->bias);
    guarded_free(p->dout);
    naive_free(&p->naive);
}

// What a backend computes from a problem's inputs. Outputs, sums and each call's workspace are NaN before.
struct result {
    floatX *out, *out_without_bias, *din;
    float *dweight, *dbias;
    size_t out_bytes, din_bytes, dweight_bytes, dbias_bytes;
};

static struct result result_make(struct shape s) {
    struct result r;
    r.out_bytes = (size_t)s.M * s.N * sizeof *r.out;
    r.din_bytes = (size_t)s.M * s.K * sizeof *r.din;
    r.dweight_bytes = (size_t)s.N * s.K * sizeof *r.dweight;
    r.dbias_bytes = (size_t)s.N * sizeof *r.dbias;
    r.out = (floatX *)guarded(r.out_bytes, NAN_BYTE);
    r.out_without_bias = (floatX *)guarded(r.out_bytes, NAN_BYTE);
    r.din = (floatX *)guarded(r.din_bytes, NAN_BYTE);
    r.dweight = (float *)guarded(r.dweight_bytes, NAN_BYTE);
    r.dbias = (float *)guarded(r.dbias_bytes, NAN_BYTE);
    return r;
}
static void result_check_guards(const struct result *r) {
    assert_guards(r->out, r->out_bytes, NAN_BYTE);
    assert_guards(r->out_without_bias, r->out_bytes, NAN_BYTE);
    assert_guards(r->din, r->din_bytes, NAN_BYTE);
    assert_guards(r->dweight, r->dweight_bytes, NAN_BYTE);
    assert_guards(r->dbias, r->dbias_bytes, NAN_BYTE);
}
static void result_free(struct result *r) {
    guarded_free(r->out);
    guarded_free(r->out_without_bias);
    guarded_free(r->din);
    guarded_free(r->dweight);
    guarded_free(r->dbias);
}

static void spoil(void *workspace, size_t bytes, struct device *dev) {
    wait_for(dev);
    memset(workspace, NAN_BYTE, bytes);
}

static void run_into(struct result *r, const struct problem *p, int backward_weight_calls, void *workspace,
                     struct device *dev) {
    const struct shape s = p->shape;
    const size_t bytes = matmul_workspace_bytes(s.M, s.N, s.K, dev);
    spoil(workspace, bytes, dev);
    matmul_forward(r->out, p->in, p->weight, p->bias, s.M, s.N, s.K, workspace, dev);
    spoil(workspace, bytes, dev);
    matmul_forward(r->out_without_bias, p->in, p->weight, NULL, s.M, s.N, s.K, workspace, dev);
    spoil(workspace, bytes, dev);
    matmul_backward_input(r->din, p->dout, p->weight, s.M, s.N, s.K, workspace, dev);
    for (int i = 0; i < backward_weight_calls; i++) {
        spoil(workspace, bytes, dev);
        matmul_backward_weight(r->dweight, i % 2 ? NULL : r->dbias, p->dout, p->in, s.M, s.N, s.K, i > 0, workspace,
                               dev);
    }
    wait_for(dev);
    assert_guards(workspace, bytes, NAN_BYTE);
    result_check_guards(r);
}
static struct result run(const struct problem *p, int backward_weight_calls, struct device *dev) {
    const struct shape s = p->shape;
    struct result r = result_make(s);
    void *workspace = guarded(matmul_workspace_bytes(s.M, s.N, s.K, dev), NAN_BYTE);
    run_into(&r, p, backward_weight_calls, workspace, dev);
    guarded_free(workspace);
    return r;
}

// Whether a backend can't compute all of a problem. cuBLASLt promises no shape: it is asked, and a shape that it
// refuses is printed and skipped, unless it is of a usual model, whose widths are multiples of 8.
#ifdef TARGET_CUDA
static bool refused(const struct problem *p, struct device *dev) {
    const struct shape s = p->shape;
    struct result r = result_make(s);
    const struct gemm gemms[] = {gemm_forward(r.out, p->in, p->weight, p->bias, s.M, s.N, s.K),
                                 gemm_forward(r.out_without_bias, p->in, p->weight, NULL, s.M, s.N, s.K),
                                 gemm_backward_input(r.din, s.K, p->dout, s.N, p->weight, s.M, s.N, s.K, false),
                                 gemm_backward_weight(r.dweight, p->dout, s.N, p->in, s.K, s.M, s.N, s.K, false),
                                 gemm_backward_weight(r.dweight, p->dout, s.N, p->in, s.K, s.M, s.N, s.K, true)};
    char text[512];
    const char *why = NULL;
    for (size_t i = 0; i < sizeof gemms / sizeof *gemms && !why; i++)
        why = matmul_refusal(text, sizeof text, &gemms[i], dev->matmul);
    result_free(&r);
    if (why && s.N % 8 == 0 && s.K % 8 == 0)
        fail_msg("%s", why);
    if (why)
        print_message("           passed over: %s\n", why);
    return why != NULL;
}
#else
static bool refused(const struct problem *p, struct device *dev) { return false; }
#endif

static void assert_same_as_naive(const struct result *r, const struct problem *p) {
    const struct shape s = p->shape;
    double *out = to_doubles(r->out, s.M * s.N), *din = to_doubles(r->din, s.M * s.K);
    double *dweight = floats_to_doubles(r->dweight, (int64_t)s.N * s.K), *dbias = floats_to_doubles(r->dbias, s.N);
    assert_close(out, p->naive.out, s.M * s.N, tolerance(s.K, FLOATX_ROUNDING));
    assert_close(din, p->naive.din, s.M * s.K, tolerance(s.N, FLOATX_ROUNDING));
    assert_close(dweight, p->naive.dweight, (int64_t)s.N * s.K, dweight_tolerance(s.M));
    assert_close(dbias, p->naive.dbias, s.N, tolerance(s.M, 0));
    double *without = to_doubles(r->out_without_bias, s.M * s.N), *expected = test_doubles(s.M * s.N);
    for (int64_t i = 0; i < s.M * s.N; i++)
        expected[i] = p->naive.out[i] - p->naive.bias[i % s.N];
    assert_close(without, expected, s.M * s.N, tolerance(s.K, FLOATX_ROUNDING));
    double *all[] = {out, din, dweight, dbias, without, expected};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

// Whether a shape is slow where tiles are emulated: once is enough.
static bool is_large(struct shape s) { return s.M * s.N * s.K > 10000000; }

static void check_values(struct device *dev, const struct matmul_backend *backend) {
    for (int i = 0; i < SHAPES; i++) {
        if (is_large(shapes[i]) && dev->threads == 1)
            continue;
        struct problem p = problem_make(shapes[i], (uint64_t)i + 1);
        if (!refused(&p, dev)) {
            struct result r = run(&p, 1, dev);
            assert_same_as_naive(&r, &p);
            result_free(&r);
        }
        problem_free(&p);
    }
}
static void test_values(void **state) {
    for_each_backend(1, check_values);
    for_each_backend(3, check_values);
}

#ifndef TARGET_CUDA
// Checks that the table's first backend for this machine is taken, and that the description names the same backend.
static void the_first_backend_that_is_there_is_taken(void **state) {
    struct device dev = {1, NULL};
    struct matmul_library *chosen = matmul_create(&dev), *first = NULL;
    for (int b = 0; b < matmul_backends_count && first == NULL; b++)
        first = matmul_create_backend(&dev, &matmul_backends[b]);
    assert_non_null(chosen);
    assert_string_equal(matmul_describe(chosen), matmul_describe(first));
    matmul_destroy(chosen);
    matmul_destroy(first);
}
#endif

// Checks that the first call overwrites NaN, and later ones add: dweight in each call, dbias where it is asked for.
static void check_accumulates_at(struct shape s, struct device *dev) {
    struct problem p = problem_make(s, 77);
    if (refused(&p, dev)) {
        problem_free(&p);
        return;
    }
    struct result r = run(&p, 3, dev); // dbias only in the first and the third
    double *dweight = floats_to_doubles(r.dweight, (int64_t)s.N * s.K), *dbias = floats_to_doubles(r.dbias, s.N);
    for (int i = 0; i < s.N * s.K; i++)
        p.naive.dweight[i] *= 3;
    for (int i = 0; i < s.N; i++)
        p.naive.dbias[i] *= 2;
    assert_close(dweight, p.naive.dweight, (int64_t)s.N * s.K, dweight_tolerance(s.M));
    assert_close(dbias, p.naive.dbias, s.N, tolerance(s.M, 0));
    free(dweight);
    free(dbias);
    result_free(&r);
    problem_free(&p);
}
static void check_accumulates(struct device *dev, const struct matmul_backend *backend) {
    static const struct shape awkward = {100, 50, 70}, usual = {96, 48, 64};
    check_accumulates_at(awkward, dev);
    check_accumulates_at(usual, dev);
}
static void test_accumulates(void **state) { for_each_backend(2, check_accumulates); }

static void check_threads(struct device *dev, const struct matmul_backend *backend) {
    if (!backend->same_bits_for_any_threads)
        return;
    for (int i = 0; i < SHAPES; i++) {
        if (is_large(shapes[i]))
            continue;
        struct problem p = problem_make(shapes[i], (uint64_t)i + 1);
        if (refused(&p, dev)) {
            problem_free(&p);
            continue;
        }
        struct result first = run(&p, 1, dev);
        for (int threads = 2; threads <= 4; threads++) {
            struct device other = {threads, NULL};
            other.matmul = matmul_create_backend(&other, backend);
            struct result r = run(&p, 1, &other);
            assert_memory_equal(r.out, first.out, r.out_bytes);
            assert_memory_equal(r.din, first.din, r.din_bytes);
            assert_memory_equal(r.dweight, first.dweight, r.dweight_bytes);
            assert_memory_equal(r.dbias, first.dbias, r.dbias_bytes);
            result_free(&r);
            matmul_destroy(other.matmul);
        }
        result_free(&first);
        problem_free(&p);
    }
}
static void test_threads(void **state) { for_each_backend(1, check_threads); }

#ifndef TARGET_CUDA // cuBLASLt chooses its algorithm by the operands' alignment

// A problem whose inputs, a result and a workspace each begin `offset` elements after memory of malloc.
struct moved {
    struct problem problem;
    struct result result;
    void *workspace;
    int offset;
};

static void *moved_memory(size_t bytes, size_t offset_bytes) {
    return (char *)guarded(bytes + offset_bytes, NAN_BYTE) + offset_bytes;
}
static void moved_free(void *memory, size_t offset_bytes) { guarded_free((char *)memory - offset_bytes); }
static floatX *moved_input(const floatX *from, int64_t n, int offset) {
    floatX *to = (floatX *)moved_memory((size_t)n * sizeof *to, (size_t)offset * sizeof *to);
    memcpy(to, from, (size_t)n * sizeof *to);
    return to;
}
static float *moved_sums(float *unmoved, size_t bytes, int offset) {
    float *to = (float *)moved_memory(bytes, (size_t)offset * sizeof *to);
    guarded_free(unmoved);
    return to;
}
static floatX *moved_output(floatX *unmoved, size_t bytes, int offset) {
    guarded_free(unmoved);
    return (floatX *)moved_memory(bytes, (size_t)offset * sizeof(floatX));
}
static size_t workspace_offset(int offset) { return (size_t)offset * 64; }

static struct moved moved_make(const struct problem *p, int offset, struct device *dev) {
    const struct shape s = p->shape;
    struct moved m = {*p, result_make(s), NULL, offset};
    m.problem.in = moved_input(p->in, s.M * s.K, offset);
    m.problem.weight = moved_input(p->weight, (int64_t)s.N * s.K, offset);
    m.problem.bias = moved_input(p->bias, s.N, offset);
    m.problem.dout = moved_input(p->dout, s.M * s.N, offset);
    m.result.out = moved_output(m.result.out, m.result.out_bytes, offset);
    m.result.out_without_bias = moved_output(m.result.out_without_bias, m.result.out_bytes, offset);
    m.result.din = moved_output(m.result.din, m.result.din_bytes, offset);
    m.result.dweight = moved_sums(m.result.dweight, m.result.dweight_bytes, offset);
    m.result.dbias = moved_sums(m.result.dbias, m.result.dbias_bytes, offset);
    m.workspace = moved_memory(matmul_workspace_bytes(s.M, s.N, s.K, dev), workspace_offset(offset));
    return m;
}
static void moved_destroy(struct moved *m) {
    floatX *const elements[] = {m->problem.in, m->problem.weight, m->problem.bias,           m->problem.dout,
                                m->result.out, m->result.din,     m->result.out_without_bias};
    float *const sums[] = {m->result.dweight, m->result.dbias};
    for (size_t i = 0; i < sizeof elements / sizeof *elements; i++)
        moved_free(elements[i], (size_t)m->offset * sizeof(floatX));
    for (size_t i = 0; i < sizeof sums / sizeof *sums; i++)
        moved_free(sums[i], (size_t)m->offset * sizeof(float));
    moved_free(m->workspace, workspace_offset(m->offset));
}

// Checks a second call, and calls with operands, results and workspace elsewhere in memory: a layer that is computed
// again in backward must give what forward gave.
static void check_same_bits_of(const struct problem *p, struct device *dev) {
    static const int offsets[] = {0, 1, 8};
    struct result first = run(p, 2, dev);
    for (size_t o = 0; o < sizeof offsets / sizeof *offsets; o++) {
        struct moved m = moved_make(p, offsets[o], dev);
        run_into(&m.result, &m.problem, 2, m.workspace, dev);
        assert_memory_equal(m.result.out, first.out, first.out_bytes);
        assert_memory_equal(m.result.out_without_bias, first.out_without_bias, first.out_bytes);
        assert_memory_equal(m.result.din, first.din, first.din_bytes);
        assert_memory_equal(m.result.dweight, first.dweight, first.dweight_bytes);
        assert_memory_equal(m.result.dbias, first.dbias, first.dbias_bytes);
        moved_destroy(&m);
    }
    result_free(&first);
}
static void check_same_bits(struct device *dev, const struct matmul_backend *backend) {
    static const struct shape split = {4096, 64, 64}; // oneDNN sums its dweight in parts, one for each thread
    for (int i = 0; i <= SHAPES; i++) {
        if (i < SHAPES && is_large(shapes[i]))
            continue;
        struct problem p = problem_make(i < SHAPES ? shapes[i] : split, (uint64_t)i + 1);
        for (int threads = 1; threads <= 3; threads += 2) {
            struct device other = {threads, NULL};
            other.matmul = matmul_create_backend(&other, backend);
            check_same_bits_of(&p, &other);
            matmul_destroy(other.matmul);
        }
        problem_free(&p);
    }
}
static void the_same_operands_give_the_same_bits_wherever_they_lie(void **state) {
    for_each_backend(1, check_same_bits);
}
#endif
#if defined PRECISION_BF16 && defined HAVE_ONEDNN && !defined TARGET_CUDA

static bool open_onednn(struct device *dev) {
    for (int i = 0; i < matmul_backends_count; i++)
        if (strcmp(matmul_backends[i].name, "onednn-bf16") == 0)
            dev->matmul = matmul_create_backend(dev, &matmul_backends[i]);
    return dev->matmul != NULL;
}

// Checks that planning makes the primitives that running takes, so that running allocates none. Where oneDNN has no
// fast primitive for a product, the product is computed in fp32.
static void planning_makes_the_primitives_that_running_takes(void **state) {
    struct device dev = {2, NULL};
    if (!open_onednn(&dev))
        skip();
    struct onednn *onednn = (struct onednn *)dev.matmul->state;
    struct problem p = problem_make(shapes[4], 1);
    matmul_workspace_bytes(p.shape.M, p.shape.N, p.shape.K, &dev);
    const int64_t planned = onednn->made;
    struct result by_primitives = run(&p, 1, &dev);
    assert_int_equal(onednn->made, planned);
    for (int64_t i = 0; i < planned; i++) {
        assert_non_null(onednn->products[i].primitive);
        onednn_product_free(&onednn->products[i]);
        onednn->products[i].primitive = NULL;
    }
    struct result in_fp32 = run(&p, 1, &dev);
    assert_int_equal(onednn->made, planned);
    assert_same_as_naive(&in_fp32, &p);
    assert_memory_not_equal(by_primitives.dweight, in_fp32.dweight, in_fp32.dweight_bytes);
    result_free(&by_primitives);
    result_free(&in_fp32);
    problem_free(&p);
    matmul_destroy(dev.matmul);
}

// Checks more products than are kept: a primitive that was dropped is made again, with the same bits.
static void a_dropped_primitive_is_made_again_with_the_same_bits(void **state) {
    enum { FEWEST = FEW_ROWS_MAX + 1, MAX = FEW_ROWS_MAX + ONEDNN_PRODUCTS + 10, N = 8, K = 16 };
    static const struct shape largest = {MAX, N, K};
    struct device dev = {2, NULL};
    if (!open_onednn(&dev))
        skip();
    struct onednn *onednn = (struct onednn *)dev.matmul->state;
    struct problem p = problem_make(largest, 1);
    struct result r[2] = {result_make(largest), result_make(largest)};
    const size_t bytes = 1 << 20;
    void *workspace = test_alloc(bytes);
    for (int round = 0; round < 2; round++)
        for (int M = FEWEST; M <= MAX; M++)
            for (int again = 0; again < 2; again++)
                matmul_forward(r[round].out, p.in, p.weight, p.bias, M, N, K, workspace, &dev);
    assert_int_equal(onednn->made, 2 * (MAX - FEW_ROWS_MAX));
    for (int i = 0; i < ONEDNN_PRODUCTS; i++)
        assert_true(onednn->products[i].scratch_bytes <= bytes);
    assert_memory_equal(r[0].out, r[1].out, r[0].out_bytes);
    for (int i = 0; i < 2; i++)
        result_free(&r[i]);
    free(workspace);
    matmul_destroy(dev.matmul);
    problem_free(&p);
}

#endif

// Checks that a NaN or an infinity in one input element reaches exactly the outputs that depend on it.
static void check_nonfinite_at(struct shape s, struct device *dev) {
    struct problem p = problem_make(s, 5);
    if (refused(&p, dev)) {
        problem_free(&p);
        return;
    }
    p.in[3 * s.K + 7] = to_floatX(NAN);
    p.dout[4 * s.N + 11] = to_floatX(INFINITY);
    struct result r = run(&p, 1, dev);
    for (int m = 0; m < s.M; m++)
        for (int n = 0; n < s.N; n++)
            assert_int_equal(isnan(to_float(r.out[m * s.N + n])), m == 3);
    for (int m = 0; m < s.M; m++)
        for (int k = 0; k < s.K; k++)
            assert_int_equal(isfinite(to_float(r.din[m * s.K + k])), m != 4);
    for (int n = 0; n < s.N; n++) {
        assert_int_equal(isfinite(r.dbias[n]), n != 11);
        for (int k = 0; k < s.K; k++)
            assert_int_equal(isfinite(r.dweight[n * s.K + k]), n != 11 && k != 7);
    }
    result_free(&r);
    problem_free(&p);
}
static void check_nonfinite(struct device *dev, const struct matmul_backend *backend) {
    static const struct shape awkward = {40, 37, 50}, usual = {40, 32, 48};
    check_nonfinite_at(awkward, dev);
    check_nonfinite_at(usual, dev);
}
static void test_nonfinite(void **state) { for_each_backend(2, check_nonfinite); }

// ---- products of matrices whose rows lie apart ----

// Columns [first, first + cols) of a matrix (rows, ld), whose other columns are NaN.
struct part {
    floatX *data;
    double *start; // (rows, cols) its values at first
    int64_t rows, cols, ld;
    int first;
};
static size_t part_bytes(const struct part *x) { return (size_t)(x->rows * x->ld) * sizeof *x->data; }
static struct part part_make(int64_t rows, int64_t cols, int64_t ld, int first, uint64_t *seed) {
    struct part x = {NULL, test_doubles(rows * cols), rows, cols, ld, first};
    x.data = (floatX *)guarded(part_bytes(&x), NAN_BYTE) + first;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++) {
            x.data[i * ld + j] = to_floatX((float)test_uniform(seed));
            x.start[i * cols + j] = to_float(x.data[i * ld + j]);
        }
    return x;
}
static void part_free(struct part *x) {
    guarded_free(x->data - x->first);
    free(x->start);
}
static void part_check_gaps(const struct part *x) {
    const floatX *memory = x->data - x->first;
    unsigned char untouched[sizeof *memory];
    memset(untouched, NAN_BYTE, sizeof untouched);
    assert_guards(memory, part_bytes(x), NAN_BYTE);
    for (int64_t i = 0; i < x->rows; i++)
        for (int64_t j = 0; j < x->ld; j++)
            if (j < x->first || j >= x->first + x->cols)
                assert_memory_equal(&memory[i * x->ld + j], untouched, sizeof untouched);
}
// Checks a part's values: product (rows, cols), added to the first values where `add`.
static void part_check_values(const struct part *x, const double *product, bool add, int64_t depth) {
    double *values = test_doubles(x->rows * x->cols), *expected = test_doubles(x->rows * x->cols);
    for (int64_t i = 0; i < x->rows * x->cols; i++) {
        values[i] = to_float(x->data[i / x->cols * x->ld + i % x->cols]);
        expected[i] = product[i] + (add ? x->start[i] : 0);
    }
    assert_close(values, expected, x->rows * x->cols, tolerance(depth, FLOATX_ROUNDING));
    free(values);
    free(expected);
}

struct strides {
    struct shape shape;
    int64_t ld_in, ld_out;
    int first_in, first_out;
};
// Products that are thin on either side, as adapters' of rank 1 to 256 are, some at odd places; products of few rows;
// and products that are not thin, with rows, columns and depths beyond every backend's blocks.
static const struct strides strides[] = {
    {{1, 1, 1}, 3, 2, 1, 1},          {{40, 65, 1}, 3, 130, 2, 65},      {{70, 100, 5}, 5, 333, 0, 17},
    {{33, 128, 8}, 24, 384, 8, 128},  {{65, 97, 16}, 48, 200, 16, 97},   {{64, 64, 64}, 64, 64, 0, 0},
    {{9, 70, 12}, 13, 71, 1, 1},      {{150, 33, 256}, 257, 40, 1, 3},   {{70, 3, 1100}, 1100, 9, 0, 5},
    {{96, 16, 200}, 200, 32, 0, 16},  {{40, 2100, 7}, 21, 2111, 7, 11},  {{300, 250, 4}, 4, 250, 0, 0},
    {{1700, 17, 33}, 34, 18, 1, 1},   {{64, 31, 768}, 768, 62, 0, 31},   {{70, 100, 90}, 97, 333, 5, 17},
    {{1100, 66, 70}, 210, 67, 70, 0}, {{40, 1700, 72}, 72, 1711, 0, 11},
};
enum { STRIDES = sizeof strides / sizeof *strides };
// Whether a shape is slow by naive loops: then only its values are checked.
static bool is_slow(struct shape s) { return s.M * s.N * s.K > 1000000; }

struct strided {
    struct strides strides;
    floatX *weight;
    struct part in, dout, out, din;
    float *dweight;
    double *dweight_start;
    struct naive naive; // without a bias
};

static struct strided strided_make(struct strides strides, uint64_t seed) {
    const struct shape s = strides.shape;
    struct strided x;
    memset(&x, 0, sizeof x);
    x.strides = strides;
    test_case(seed, "%s, M %lld, N %d, K %d, rows %lld and %lld apart", backend_under_test, (long long)s.M, s.N, s.K,
              (long long)strides.ld_in, (long long)strides.ld_out);
    x.weight = random_input(&x.naive.weight, (int64_t)s.N * s.K, &seed);
    x.in = part_make(s.M, s.K, strides.ld_in, strides.first_in, &seed);
    x.din = part_make(s.M, s.K, strides.ld_in, strides.first_in, &seed);
    x.dout = part_make(s.M, s.N, strides.ld_out, strides.first_out, &seed);
    x.out = part_make(s.M, s.N, strides.ld_out, strides.first_out, &seed);
    x.dweight = (float *)guarded((size_t)s.N * s.K * sizeof *x.dweight, NAN_BYTE);
    for (int i = 0; i < s.N * s.K; i++)
        x.dweight[i] = (float)test_uniform(&seed);
    x.dweight_start = floats_to_doubles(x.dweight, (int64_t)s.N * s.K);
    x.naive.in = x.in.start;
    x.naive.dout = x.dout.start;
    x.naive.bias = test_doubles(s.N);
    x.naive.dbias = test_doubles(s.N);
    x.naive.out = test_doubles(s.M * s.N);
    x.naive.din = test_doubles(s.M * s.K);
    x.naive.dweight = test_doubles((int64_t)s.N * s.K);
    naive_forward(x.naive.out, &x.naive, s);
    naive_backward(&x.naive, s);
    return x;
}
static void strided_free(struct strided *x) {
    x->in.start = x->dout.start = NULL; // naive_free frees them
    struct part *const parts[] = {&x->in, &x->dout, &x->out, &x->din};
    for (int i = 0; i < 4; i++)
        part_free(parts[i]);
    guarded_free(x->weight);
    guarded_free(x->dweight);
    free(x->dweight_start);
    naive_free(&x->naive);
}

static void strided_run(struct strided *x, bool add, struct device *dev) {
    const struct shape s = x->strides.shape;
    const int64_t ld_in = x->strides.ld_in, ld_out = x->strides.ld_out;
    const size_t bytes = matmul_strided_workspace_bytes(ld_in, ld_out, s.M, s.N, s.K, dev);
    void *workspace = guarded(bytes, NAN_BYTE);
    matmul_forward_strided(x->out.data, ld_out, x->in.data, ld_in, x->weight, s.M, s.N, s.K, add, workspace, dev);
    spoil(workspace, bytes, dev);
    matmul_backward_input_strided(x->din.data, ld_in, x->dout.data, ld_out, x->weight, s.M, s.N, s.K, add, workspace,
                                  dev);
    spoil(workspace, bytes, dev);
    matmul_backward_weight_strided(x->dweight, x->dout.data, ld_out, x->in.data, ld_in, s.M, s.N, s.K, add, workspace,
                                   dev);
    wait_for(dev);
    assert_guards(workspace, bytes, NAN_BYTE);
    guarded_free(workspace);
}

#ifdef TARGET_CUDA
// Whether a backend refuses the products that strided_run asks for, as `refused`.
static bool strided_refused(const struct strided *x, bool add, struct device *dev) {
    const struct shape s = x->strides.shape;
    const int64_t ld_in = x->strides.ld_in, ld_out = x->strides.ld_out;
    const struct gemm gemms[] = {
        gemm_forward_strided(x->out.data, ld_out, x->in.data, ld_in, x->weight, s.M, s.N, s.K, add),
        gemm_backward_input(x->din.data, ld_in, x->dout.data, ld_out, x->weight, s.M, s.N, s.K, add),
        gemm_backward_weight(x->dweight, x->dout.data, ld_out, x->in.data, ld_in, s.M, s.N, s.K, add)};
    char text[512];
    const char *why = NULL;
    for (size_t i = 0; i < sizeof gemms / sizeof *gemms && !why; i++)
        why = matmul_refusal(text, sizeof text, &gemms[i], dev->matmul);
    if (why && s.N % 8 == 0 && s.K % 8 == 0 && ld_in % 8 == 0 && ld_out % 8 == 0)
        fail_msg("%s", why);
    if (why)
        print_message("           passed over: %s\n", why);
    return why != NULL;
}
#else
static bool strided_refused(const struct strided *x, bool add, struct device *dev) { return false; }
#endif

static void strided_check(const struct strided *x, bool add) {
    const struct shape s = x->strides.shape;
    const struct part *const parts[] = {&x->in, &x->dout, &x->out, &x->din};
    for (int i = 0; i < 4; i++)
        part_check_gaps(parts[i]);
    assert_guards(x->dweight, (size_t)s.N * s.K * sizeof *x->dweight, NAN_BYTE);
    part_check_values(&x->out, x->naive.out, add, s.K);
    part_check_values(&x->din, x->naive.din, add, s.N);
    double *dweight = floats_to_doubles(x->dweight, (int64_t)s.N * s.K), *expected = test_doubles((int64_t)s.N * s.K);
    for (int i = 0; i < s.N * s.K; i++)
        expected[i] = x->naive.dweight[i] + (add ? x->dweight_start[i] : 0);
    assert_close(dweight, expected, (int64_t)s.N * s.K, dweight_tolerance(s.M));
    free(dweight);
    free(expected);
}
static void check_strides(struct device *dev, const struct matmul_backend *backend) {
    for (int i = 0; i < 2 * STRIDES; i++) {
        const bool add = i % 2;
        struct strided x = strided_make(strides[i / 2], (uint64_t)i + 1);
        if (!strided_refused(&x, add, dev)) {
            strided_run(&x, add, dev);
            strided_check(&x, add);
        }
        strided_free(&x);
    }
}
static void rows_may_lie_apart_and_be_added_to(void **state) {
    for_each_backend(1, check_strides);
    for_each_backend(3, check_strides);
}

static void check_strides_threads(struct device *dev, const struct matmul_backend *backend) {
    for (int i = 0; i < STRIDES && backend->same_bits_for_any_threads; i++) {
        if (is_slow(strides[i].shape))
            continue;
        struct strided first = strided_make(strides[i], 1);
        const struct shape s = strides[i].shape;
        if (strided_refused(&first, true, dev)) {
            strided_free(&first);
            continue;
        }
        strided_run(&first, true, dev);
        for (int threads = 2; threads <= 4; threads++) {
            struct device other = {threads, NULL};
            other.matmul = matmul_create_backend(&other, backend);
            struct strided x = strided_make(strides[i], 1);
            strided_run(&x, true, &other);
            assert_memory_equal(x.out.data - x.out.first, first.out.data - x.out.first, part_bytes(&x.out));
            assert_memory_equal(x.din.data - x.din.first, first.din.data - x.din.first, part_bytes(&x.din));
            assert_memory_equal(x.dweight, first.dweight, (size_t)s.N * s.K * sizeof *x.dweight);
            strided_free(&x);
            matmul_destroy(other.matmul);
        }
        strided_free(&first);
    }
}
static void rows_apart_give_the_same_bits_for_any_threads(void **state) { for_each_backend(1, check_strides_threads); }

// Where cuBLASLt rounds a product before it adds: its kernels for Hopper do (nvjet, algorithm 66). Then adding the
// product's rounded negative does not leave exactly what rounding took from the product: on a GPU the difference may be
// all of that.
#if defined(TARGET_CUDA) && !defined(CUDA_EMULATED)
enum { ROUNDS_TWICE = 1 };
#else
enum { ROUNDS_TWICE = 0 };
#endif
static void check_rounded_once(struct device *dev, const struct matmul_backend *backend) {
    for (int i = 0; i < STRIDES; i++) {
        if (is_slow(strides[i].shape))
            continue;
        struct strided x = strided_make(strides[i], 3);
        const struct shape s = strides[i].shape;
        struct part *const outputs[] = {&x.out, &x.din};
        const double *const products[] = {x.naive.out, x.naive.din};
        for (int o = 0; o < 2; o++)
            for (int64_t j = 0; j < outputs[o]->rows * outputs[o]->cols; j++) {
                floatX *at = &outputs[o]->data[j / outputs[o]->cols * outputs[o]->ld + j % outputs[o]->cols];
                *at = to_floatX(-(float)products[o][j]);
                outputs[o]->start[j] = to_float(*at);
            }
        if (!strided_refused(&x, true, dev)) {
            strided_run(&x, true, dev);
            // o = 0: relative to what is left, the product's rounding; 1: relative to the product
            for (int o = 0; o < 2; o++) {
                const struct part *p = outputs[o];
                const int64_t depth = o == 0 ? s.K : s.N;
                double *values = test_doubles(p->rows * p->cols), *expected = test_doubles(p->rows * p->cols);
                for (int64_t j = 0; j < p->rows * p->cols; j++) {
                    const double product = ROUNDS_TWICE ? products[o][j] : 0;
                    values[j] = product + to_float(p->data[j / p->cols * p->ld + j % p->cols]);
                    expected[j] = product + products[o][j] + p->start[j];
                }
                assert_close(values, expected, p->rows * p->cols,
                             FLOATX_ROUNDING + (ROUNDS_TWICE ? 1 : 0x1p11) * tolerance(depth, 0));
                free(values);
                free(expected);
            }
        }
        strided_free(&x);
    }
}
static void a_sum_onto_an_output_is_rounded_once(void **state) {
    if (sizeof(floatX) == sizeof(float))
        skip(); // the product is not rounded
    for_each_backend(2, check_rounded_once);
}

// Checks that the naive backward is the derivative of the naive forward. out is linear in each input, so that a
// difference quotient with any step is exact but for the rounding of doubles.
static void test_naive_by_differences(void **state) {
    const struct shape s = {3, 4, 5};
    struct problem p = problem_make(s, 9);
    double *moved = test_doubles(s.M * s.N);
    double *inputs[] = {p.naive.in, p.naive.weight, p.naive.bias};
    double *gradients[] = {p.naive.din, p.naive.dweight, p.naive.dbias};
    const int64_t sizes[] = {s.M * s.K, (int64_t)s.N * s.K, s.N};
    for (int x = 0; x < 3; x++)
        for (int64_t i = 0; i < sizes[x]; i++) {
            inputs[x][i] += 1;
            naive_forward(moved, &p.naive, s);
            inputs[x][i] -= 1;
            double difference = 0;
            for (int64_t o = 0; o < s.M * s.N; o++)
                difference += p.naive.dout[o] * (moved[o] - p.naive.out[o]);
            assert_near(difference, gradients[x][i], 1e-12, i);
        }
    free(moved);
    problem_free(&p);
}

#ifdef TARGET_CUDA

// Checks more shapes than the table of plans holds: a plan that was dropped is made again, with the same bits; another
// plan is found.
static void test_plans(void **state) {
    enum { ROUNDS = 2, MAX = MATMUL_PLANS + 10, DEPTH = 8, BIASES = 8 * (MAX / 64 + 1) };
    struct device dev = {2, NULL};
    dev.matmul = matmul_create(&dev);
    struct problem p = problem_make(shapes[3], 1);
    struct result r[ROUNDS] = {result_make(p.shape), result_make(p.shape)};
    void *workspace = test_alloc(matmul_workspace_bytes(8 * 64, BIASES, DEPTH, &dev));
    // The second call of a shape has another bias, aligned as well.
    char *memory = (char *)test_alloc(4 * MATMUL_ALIGNMENT);
    floatX *bias[2];
    for (int i = 0; i < 2; i++) {
        bias[i] =
            (floatX *)(memory + MATMUL_ALIGNMENT - (uintptr_t)memory % MATMUL_ALIGNMENT + (size_t)i * MATMUL_ALIGNMENT);
        for (int j = 0; j < BIASES; j++)
            bias[i][j] = to_floatX((float)(i + 1));
    }
    for (int round = 0; round < ROUNDS; round++)
        for (int M = 1; M <= MAX; M++)
            for (int again = 0; again < 2; again++)
                matmul_forward(r[round].out, p.in, p.weight, bias[again], 8 * (M % 64 + 1), 8 * (M / 64 + 1), DEPTH,
                               workspace, &dev);
    wait_for(&dev);
    assert_int_equal(dev.matmul->planned, ROUNDS * MAX);
    assert_memory_equal(r[0].out, r[1].out, r[0].out_bytes);
    double first = to_float(bias[1][0]), magnitude = first;
    for (int k = 0; k < DEPTH; k++) {
        first += (double)to_float(p.in[k]) * to_float(p.weight[k]);
        magnitude += fabs((double)to_float(p.in[k]) * to_float(p.weight[k]));
    }
    assert_near(to_float(r[0].out[0]), first, (FLOATX_ROUNDING + (DEPTH + 1) * 0x1p-24) * magnitude, 0);
    free(memory);
    for (int i = 0; i < ROUNDS; i++)
        result_free(&r[i]);
    free(workspace);
    problem_free(&p);
    matmul_destroy(dev.matmul);
}

// Checks views that begin at any element, of rows of any length, against whole buffers of the same shape.
static void test_alignment(void **state) {
    struct device dev = {2, NULL};
    dev.matmul = matmul_create(&dev);
    const struct shape s = {65, 48, 64};
    struct problem p = problem_make(s, 3);
    floatX *whole[] = {p.in, p.weight, p.bias, p.dout};
    const int64_t sizes[] = {s.M * s.K, (int64_t)s.N * s.K, s.N, s.M * s.N};
    for (int offset = 0; offset <= 16; offset = offset ? 2 * offset : 1) {
        floatX *shifted[4];
        for (int i = 0; i < 4; i++) {
            shifted[i] = (floatX *)guarded((size_t)(sizes[i] + offset) * sizeof(floatX), NAN_BYTE) + offset;
            memcpy(shifted[i], whole[i], (size_t)sizes[i] * sizeof(floatX));
        }
        struct problem view = p;
        view.in = shifted[0], view.weight = shifted[1], view.bias = shifted[2], view.dout = shifted[3];
        if (!refused(&view, &dev)) {
            struct result r = run(&view, 1, &dev);
            assert_same_as_naive(&r, &view);
            result_free(&r);
        }
        for (int i = 0; i < 4; i++)
            guarded_free(shifted[i] - offset);
    }
    problem_free(&p);
    matmul_destroy(dev.matmul);
}

// Checks that the plan of a training run can ask for the products' scratch memory where there is no GPU; no handle is
// made.
static void test_without_gpu(void **state) {
    struct device dev = {2, NULL};
    dev.matmul = matmul_create(&dev);
    assert_null(dev.matmul->handle);
    assert_int_equal(matmul_workspace_bytes(1, 1, 1, &dev), GPU_MATMUL_BYTES);
    assert_true(matmul_workspace_bytes(1 << 20, 1 << 14, 64, &dev) >=
                (size_t)(1 << 20) / DBIAS_ROWS * (1 << 14) * sizeof(float));
    assert_null(dev.matmul->handle);
    assert_non_null(strstr(matmul_describe(dev.matmul), "cuBLASLt 1"));
    assert_non_null(strstr(matmul_describe(dev.matmul), FLOATX_NAME));
    matmul_destroy(dev.matmul);
}

#endif
#ifdef CUDA_EMULATED

// Runs a product that the library has no algorithm for: the run ends with a message that names the product and what to
// change.
static void run_refused(void *argument) {
    const struct problem *p = (const struct problem *)argument;
    struct device dev = {1, NULL};
    dev.matmul = matmul_create(&dev);
    matmul_forward(NULL, p->in, p->weight, NULL, p->shape.M, p->shape.N, p->shape.K, NULL, &dev);
}
static void test_refused(void **state) {
    static const struct {
        struct shape shape;
        const char *words;
    } cases[] = {
        {{5, 1, 3}, "(5 x 3) by (3 x 1) transposed: CUBLAS_STATUS_NOT_SUPPORTED|multiples of 8 for --hidden-size"},
        {{1, 24, 16}, "(1 x 16) by (16 x 24) transposed|another --micro-batch-size, --seq-length or --sample-count"}};
    struct device dev = {1, NULL};
    dev.matmul = matmul_create(&dev);
    for (int i = 0; i < 2; i++) {
        struct problem p = problem_make(cases[i].shape, 1);
        const struct gemm gemm = gemm_forward(NULL, p.in, p.weight, NULL, p.shape.M, p.shape.N, p.shape.K);
        char text[512];
        assert_null(matmul_refusal(text, sizeof text, &gemm, dev.matmul));
        setenv("EMU_CUBLASLT_LEAST", "2", 1);
        assert_fails(run_refused, &p, cases[i].words);
        assert_non_null(matmul_refusal(text, sizeof text, &gemm, dev.matmul));
        if (i == 0)
            assert_true(refused(&p, &dev));
        unsetenv("EMU_CUBLASLT_LEAST");
        assert_false(refused(&p, &dev));
        problem_free(&p);
    }
    matmul_destroy(dev.matmul);
}

// A misuse, at which the stand-in for cuBLASLt ends the program where the library would fail, or give a wrong result
// without an error.
struct misuse {
    struct matmul_library *library;
    struct problem problem;
    struct result result;
    char *workspace;
    struct gemm gemm;
    int which;
};
enum misuses {
    OTHER_DEPTH,
    SHORT_ROWS,
    LESS_ALIGNED,
    SMALL_WORKSPACE,
    IN_PLACE,
    OTHER_EPILOGUE,
    ROUNDED_PARTS,
    LOW_WORKSPACE,
    OTHER_LD,
    OTHER_SUM,
    MISUSES
};
static void misuse(void *argument) {
    struct misuse *m = (struct misuse *)argument;
    struct device dev = {1, m->library};
    const float one = 1, beta = m->which == OTHER_SUM ? 1 : 0;
    struct gemm gemm = m->gemm;
    const struct gemm *g = &gemm;
    if (m->which == IN_PLACE)
        gemm.a.data = gemm.out;
    struct matmul_plan *plan = matmul_plan_for(g, NULL, m->library);
    size_t workspace_bytes = GPU_MATMUL_BYTES;
    char *const workspace = m->workspace + (m->which == LOW_WORKSPACE ? 128 : 0);
    const void *a = g->a.data, *sum = g->out;
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasLtMatmulHeuristicResult_t result;
    int found;
    matmul_prefer(&preference, plan);
    switch (m->which) {
    case OTHER_DEPTH: plan->a.rows--; break;
    case SHORT_ROWS: cublasLtMatrixLayoutInit(&plan->a, MATMUL_TYPE, 10, 10, 9); break;
    case LESS_ALIGNED: a = g->a.data + 1; break;
    case SMALL_WORKSPACE: workspace_bytes--; break;
    case OTHER_LD: plan->c.ld++; break;
    case OTHER_SUM: sum = m->workspace; break;
    case OTHER_EPILOGUE: matmul_set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue); break;
    case ROUNDED_PARTS:
        preference.reductions = 7;
        cublasLtMatmulAlgoGetHeuristic(m->library->handle, &plan->operation, &plan->b, &plan->a, &plan->c, &plan->c,
                                       &preference, 1, &result, &found);
    }
    cublasLtMatmul(m->library->handle, &plan->operation, &one, g->b.data, &plan->b, a, &plan->a, &beta, sum, &plan->c,
                   g->out, &plan->c, &plan->algorithm, workspace, workspace_bytes, dev.stream);
}
static void test_stand_in(void **state) {
    const struct shape s = {32, 32, 32};
    const char *words[] = {
        "(32 x 32) by (31 x 32)", "can't begin 9 apart", "B is aligned to",  "the algorithm needs 33554432",
        "B overlaps D",           "another operation",   "rounds the parts", "is not aligned to 256",
        "another layout of C",    "C is not D"};
    struct device dev = {1, NULL};
    struct misuse m;
    memset(&m, 0, sizeof m);
    m.library = dev.matmul = matmul_create(&dev);
    m.problem = problem_make(s, 1);
    m.result = result_make(s);
    m.workspace = (char *)test_alloc(GPU_MATMUL_BYTES + 128);
    m.gemm = gemm_forward(m.result.out, m.problem.in, m.problem.weight, m.problem.bias, s.M, s.N, s.K);
    char message[1024];
    for (m.which = 0; m.which < MISUSES; m.which++) {
        assert_int_equal(run_in_child(misuse, &m, message, sizeof message), 3);
        if (!strstr(message, words[m.which]))
            fail_msg("expected '%s', got: %s", words[m.which], message);
    }
    assert_int_equal(run_in_child(misuse, &m, message, sizeof message), 0); // MISUSES: no misuse
    free(m.workspace);
    result_free(&m.result);
    problem_free(&m.problem);
    matmul_destroy(m.library);
}

#endif

int main(void) {
    test_keep_memory();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_naive_by_differences),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_accumulates),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_nonfinite),
        cmocka_unit_test(rows_may_lie_apart_and_be_added_to),
        cmocka_unit_test(rows_apart_give_the_same_bits_for_any_threads),
        cmocka_unit_test(a_sum_onto_an_output_is_rounded_once),
#ifdef TARGET_CUDA
        cmocka_unit_test(test_plans),
        cmocka_unit_test(test_alignment),
        cmocka_unit_test(test_without_gpu),
#else
        cmocka_unit_test(the_same_operands_give_the_same_bits_wherever_they_lie),
        cmocka_unit_test(the_first_backend_that_is_there_is_taken),
#if defined PRECISION_BF16 && defined HAVE_ONEDNN
        cmocka_unit_test(planning_makes_the_primitives_that_running_takes),
        cmocka_unit_test(a_dropped_primitive_is_made_again_with_the_same_bits),
#endif
#endif
#ifdef CUDA_EMULATED
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_stand_in),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
