// matmul_fp8 and matmul_fp8_sum of every backend that is compiled in, against double loops over the decoded values: all
// combinations of scalings, each format, bias, accumulation, scales that are NaN, writes out of bounds, and equal bits
// for any number of threads where the backend promises them.
#ifdef TARGET_CUDA
#include "kernels/gpu_sizes.cuh"    // GPU_MATMUL_BYTES
#include "kernels/matmul/matmul.cu" // the plans and choices under test
#else
#include "kernels/matmul/matmul.cuh"
#if defined HAVE_ONEDNN && defined PRECISION_BF16
#include "kernels/matmul/onednn.cuh" // struct onednn
#endif
#endif
#include "test/fails.h"           // run_in_child
#include "test/matmul_backends.h" // for_each_backend, guarded
#include "test/testing.h"         // cmocka, random data, comparison

#if !defined TARGET_CUDA || defined PRECISION_BF16 // on a GPU FP8 products write bf16

struct shape {
    int64_t M, N, K;
};
// Sizes that end within a block of 128; then sizes beyond the cpu target's blocks of each dimension.
static const struct shape shapes[] = {{16, 16, 16},   {48, 80, 272},    {128, 256, 384},
                                      {272, 32, 144}, {1040, 16, 1168}, {16, 1040, 1168}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

// The combinations of scalings, and the formats of a and b.
static const struct kind {
    const char *name;
    enum fp8_granularity a, b;
    enum fp8_format a_format, b_format;
} kinds[] = {{"whole, e4m3", FP8_PER_TENSOR, FP8_PER_TENSOR, FP8_E4M3, FP8_E4M3},
             {"whole, e5m2 by e4m3", FP8_PER_TENSOR, FP8_PER_TENSOR, FP8_E5M2, FP8_E4M3},
             {"whole, e4m3 by e5m2", FP8_PER_TENSOR, FP8_PER_TENSOR, FP8_E4M3, FP8_E5M2},
             {"1x128 by 128x128", FP8_1X128, FP8_128X128, FP8_E4M3, FP8_E4M3},
             {"1x128 by 1x128", FP8_1X128, FP8_1X128, FP8_E4M3, FP8_E4M3},
             {"1x128 by 1x128, e5m2 by e4m3", FP8_1X128, FP8_1X128, FP8_E5M2, FP8_E4M3}};
enum { KINDS = sizeof kinds / sizeof *kinds };

// INTEGERS: at most 2, with scales that are powers of two near 1, so that every sum of products is exact in fp32.
enum values { RANDOM, INTEGERS };

// ---- scales, which a GPU reads from its own memory ----

#ifdef TARGET_CUDA
static float *scales_alloc(int64_t n) {
    void *memory = NULL;
    assert_int_equal(cudaMallocManaged(&memory, (size_t)n * sizeof(float)), cudaSuccess);
    memset(memory, NAN_BYTE, (size_t)n * sizeof(float));
    return (float *)memory;
}
static void scales_free(float *scales) { assert_int_equal(cudaFree(scales), cudaSuccess); }
#else
static float *scales_alloc(int64_t n) { return (float *)guarded((size_t)n * sizeof(float), NAN_BYTE); }
static void scales_free(float *scales) { guarded_free(scales); }
#endif

// ---- a problem ----

struct operand {
    struct fp8_matrix matrix;
    int64_t rows, depth;
    double *exact; // (rows, depth) the values of the codes, scaled
};
struct problem {
    struct shape shape;
    enum fp8_granularity granularity;
    struct operand a, b;
    floatX *bias;
    double *sums, *magnitudes; // (M, N) the sums of products, and of their magnitudes
};

// Returns the place of the inverse scale of element (row, k).
static float *inverse_of(const struct operand *x, int64_t row, int64_t k) {
    const int64_t depth_blocks = (x->depth + 127) / 128;
    switch (x->matrix.granularity) {
    case FP8_PER_TENSOR: return x->matrix.inverse;
    case FP8_1X128: return x->matrix.inverse + k / 128 * ((x->rows + 3) / 4 * 4) + row;
    case FP8_128X128: return x->matrix.inverse + row / 128 * ((depth_blocks + 3) / 4 * 4) + k / 128;
    }
    return NULL;
}

static void operand_exact(struct operand *x) {
    for (int64_t i = 0; i < x->rows; i++)
        for (int64_t k = 0; k < x->depth; k++)
            x->exact[i * x->depth + k] =
                (double)fp8_decode(x->matrix.codes[i * x->depth + k], x->matrix.format) * *inverse_of(x, i, k);
}

static struct operand operand_make(int64_t rows, int64_t depth, enum fp8_format format,
                                   enum fp8_granularity granularity, enum values values, uint64_t *seed) {
    const int64_t n = rows * depth, scales = fp8_inverse_count(granularity, rows, depth);
    struct operand x;
    memset(&x, 0, sizeof x);
    x.rows = rows;
    x.depth = depth;
    x.exact = test_doubles(n);
    x.matrix.format = format;
    x.matrix.granularity = granularity;
    x.matrix.codes = (fp8 *)guarded((size_t)n, NAN_BYTE);
    x.matrix.inverse = scales_alloc(scales);
    for (int64_t i = 0; i < n; i++) // of random signs and sizes, some of them subnormal
        x.matrix.codes[i] = values == INTEGERS
                                ? fp8_encode((float)(test_random(seed) % 5) - 2, format)
                                : fp8_encode((float)(fp8_largest(format) * pow(test_uniform(seed), 5)), format);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t k = 0; k < depth; k += 128)
            if (granularity == FP8_PER_TENSOR && values == RANDOM)
                *inverse_of(&x, i, k) = 0.0123f;
            else
                *inverse_of(&x, i, k) = ldexpf(1, (int)((i / 128 * 3 + i % 128 + k / 128 * 5) % 4) - 2);
    operand_exact(&x);
    return x;
}

static void problem_sum(struct problem *p) {
    const struct shape s = p->shape;
#pragma omp parallel for
    for (int64_t m = 0; m < s.M; m++)
        for (int64_t n = 0; n < s.N; n++) {
            double sum = 0, magnitude = 0;
#pragma omp simd reduction(+ : sum, magnitude)
            for (int64_t k = 0; k < s.K; k++) {
                const double product = p->a.exact[m * s.K + k] * p->b.exact[n * s.K + k];
                sum += product;
                magnitude += fabs(product);
            }
            p->sums[m * s.N + n] = sum;
            p->magnitudes[m * s.N + n] = magnitude;
        }
}
static struct problem problem_make(struct shape s, struct kind kind, enum values values, uint64_t seed) {
    struct problem p;
    memset(&p, 0, sizeof p);
    test_case(seed, "%s, %s, M %lld, N %lld, K %lld", backend_under_test, kind.name, (long long)s.M, (long long)s.N,
              (long long)s.K);
    p.shape = s;
    p.granularity = kind.a;
    p.a = operand_make(s.M, s.K, kind.a_format, kind.a, values, &seed);
    p.b = operand_make(s.N, s.K, kind.b_format, kind.b, values, &seed);
    p.bias = (floatX *)guarded((size_t)s.N * sizeof(floatX), NAN_BYTE);
    for (int64_t n = 0; n < s.N; n++)
        p.bias[n] = to_floatX((float)(values == INTEGERS ? (double)(n % 7) : test_uniform(&seed)));
    p.sums = test_doubles(s.M * s.N);
    p.magnitudes = test_doubles(s.M * s.N);
    problem_sum(&p);
    return p;
}
static void problem_free(struct problem *p) {
    guarded_free(p->a.matrix.codes);
    scales_free(p->a.matrix.inverse);
    guarded_free(p->b.matrix.codes);
    scales_free(p->b.matrix.inverse);
    guarded_free(p->bias);
    free(p->a.exact);
    free(p->b.exact);
    free(p->sums);
    free(p->magnitudes);
}

// What `sum` holds before a backend computes a problem. Other outputs, and the workspace before each call, are NaN.
static const float START = 3;
struct result {
    floatX *out, *without_bias;
    float *sum, *overwritten;
    size_t out_bytes, sum_bytes;
};
static struct result run(const struct problem *p, bool fast, struct device *dev) {
    const struct shape s = p->shape;
    const size_t bytes = matmul_fp8_workspace_bytes(s.M, s.N, s.K, dev);
    void *workspace = guarded(bytes, NAN_BYTE);
    struct result r;
    r.out_bytes = (size_t)(s.M * s.N) * sizeof *r.out;
    r.sum_bytes = (size_t)(s.M * s.N) * sizeof *r.sum;
    r.out = (floatX *)guarded(r.out_bytes, NAN_BYTE);
    r.without_bias = (floatX *)guarded(r.out_bytes, NAN_BYTE);
    r.sum = (float *)guarded(r.sum_bytes, NAN_BYTE);
    r.overwritten = (float *)guarded(r.sum_bytes, NAN_BYTE);
    for (int64_t i = 0; i < s.M * s.N; i++)
        r.sum[i] = START;
    matmul_fp8(r.out, p->a.matrix, p->b.matrix, p->bias, s.M, s.N, s.K, fast, workspace, dev);
    wait_for(dev);
    memset(workspace, NAN_BYTE, bytes);
    matmul_fp8(r.without_bias, p->a.matrix, p->b.matrix, NULL, s.M, s.N, s.K, fast, workspace, dev);
    wait_for(dev);
    memset(workspace, NAN_BYTE, bytes);
    matmul_fp8_sum(r.sum, p->a.matrix, p->b.matrix, s.M, s.N, s.K, true, fast, workspace, dev);
    wait_for(dev);
    memset(workspace, NAN_BYTE, bytes);
    matmul_fp8_sum(r.overwritten, p->a.matrix, p->b.matrix, s.M, s.N, s.K, false, fast, workspace, dev);
    wait_for(dev);
    assert_guards(workspace, bytes, NAN_BYTE);
    assert_guards(r.overwritten, r.sum_bytes, NAN_BYTE);
    assert_guards(r.out, r.out_bytes, NAN_BYTE);
    assert_guards(r.without_bias, r.out_bytes, NAN_BYTE);
    assert_guards(r.sum, r.sum_bytes, NAN_BYTE);
    guarded_free(workspace);
    return r;
}
static void result_free(struct result *r) {
    guarded_free(r->out);
    guarded_free(r->without_bias);
    guarded_free(r->sum);
    guarded_free(r->overwritten);
}

// ---- against double precision ----

// Returns the tolerance of |err| / sum of |a b|. A sum of K products has K roundings of random signs, each at most
// 2^-24 of a partial sum, which is no larger than the sum of magnitudes: sqrt(K) 2^-24. Three more are the rounding of
// the scales' product, the product with it, and the bias. On a GPU a run of 128 of the depth has 132 truncations to 13
// bits.
static double tolerance(int64_t K) {
#if defined TARGET_CUDA && !defined CUDA_EMULATED
    return 132 * 0x1p-13;
#else
    return (sqrt((double)K) + 3) * 0x1p-24;
#endif
}

static void assert_as_double(const struct problem *p, const struct result *r) {
    const struct shape s = p->shape;
    for (int64_t i = 0; i < s.M * s.N; i++) {
        const double bias = to_float(p->bias[i % s.N]), bound = tolerance(s.K) * p->magnitudes[i];
        const double with = p->sums[i] + bias, added = p->sums[i] + START;
        assert_near(to_float(r->out[i]), with, bound + 0x1p-24 * fabs(bias) + FLOATX_ROUNDING * (fabs(with) + bound),
                    i);
        assert_near(to_float(r->without_bias[i]), p->sums[i], bound + FLOATX_ROUNDING * (fabs(p->sums[i]) + bound), i);
        assert_near(r->sum[i], added, bound + 0x1p-24 * fabs(added), i);
        assert_near(r->overwritten[i], p->sums[i], bound + 0x1p-24 * fabs(p->sums[i]), i);
    }
}
static void assert_exact(const struct problem *p, const struct result *r) {
    const struct shape s = p->shape;
    for (int64_t i = 0; i < s.M * s.N; i++) {
        const double bias = to_float(p->bias[i % s.N]);
        assert_near(to_float(r->out[i]), to_float(to_floatX((float)(p->sums[i] + bias))), 0, i);
        assert_near(to_float(r->without_bias[i]), to_float(to_floatX((float)p->sums[i])), 0, i);
        assert_near(r->sum[i], p->sums[i] + START, 0, i);
        assert_near(r->overwritten[i], p->sums[i], 0, i);
    }
}

// Whether a width is not a multiple of 128: cuBLASLt takes blocks only where all are.
static bool is_ragged(struct shape s, struct kind kind) {
    return kind.a != FP8_PER_TENSOR && (s.M % 128 || s.N % 128 || s.K % 128);
}
static bool here(struct shape s, struct kind kind) {
#if defined TARGET_CUDA && !defined CUDA_EMULATED
    return !is_ragged(s, kind);
#else
    return true;
#endif
}

static void check_each(struct device *dev, enum values values,
                       void (*check)(const struct problem *, const struct result *)) {
    static const struct shape blocks[] = {{128, 128, 128}, {384, 128, 1280}, {128, 1152, 256}};
    for (int k = 0; k < KINDS; k++)
        for (int i = 0; i < SHAPES + 3; i++) {
            const struct shape s = i < SHAPES ? shapes[i] : blocks[i - SHAPES];
            const bool large = s.M * s.N * s.K > 15000000; // once a scaling is enough
            if (!here(s, kinds[k]) || (large && (kinds[k].a_format == FP8_E5M2 || kinds[k].b_format == FP8_E5M2)))
                continue;
            struct problem p = problem_make(s, kinds[k], values, (uint64_t)(100 * k + i + 1));
            for (int fast = 0; fast < (kinds[k].a == FP8_PER_TENSOR && DEVICE_RUNS_AHEAD ? 2 : 1); fast++) {
                struct result r = run(&p, fast, dev);
                check(&p, &r);
                result_free(&r);
            }
            problem_free(&p);
        }
}
static void check_random(struct device *dev, const struct matmul_backend *backend) {
    check_each(dev, RANDOM, assert_as_double);
}
static void random_values_are_as_close_as_sums_in_fp32_are(void **state) { for_each_backend(2, check_random); }
static void check_integers(struct device *dev, const struct matmul_backend *backend) {
    check_each(dev, INTEGERS, assert_exact);
}
static void products_of_integers_are_exact(void **state) { for_each_backend(2, check_integers); }

// Checks every code of a format times 1, with a block's scale at each end of what is exact.
static void check_codes(struct device *dev, const struct matmul_backend *backend) {
    const struct shape s = {128, 128, 128};
    const struct kind kind = kinds[4];
    for (int format = 0; format < 2; format++)
        for (int end = 0; end < 2; end++) {
            struct problem p = problem_make(s, kind, INTEGERS, 1);
            const int least = format ? -16 : -9, most = format ? 16 : 9; // of the codes' exponents
            const float inverse = ldexpf(1, end ? 127 - most : -126 - least);
            const enum fp8_format formats[] = {FP8_E4M3, FP8_E5M2};
            p.a.matrix.format = formats[format];
            for (int64_t i = 0; i < s.M; i++) {
                for (int64_t k = 0; k < s.K; k++) {
                    const fp8 code = (fp8)(2 * i + k % 2);
                    const bool finite = isfinite(fp8_decode(code, p.a.matrix.format));
                    p.a.matrix.codes[i * s.K + k] = finite ? code : 0;
                    p.b.matrix.codes[i * s.K + k] = fp8_encode(k == i % 2 ? 1 : 0, FP8_E4M3);
                }
                *inverse_of(&p.a, i, 0) = inverse;
                *inverse_of(&p.b, i, 0) = 1;
            }
            operand_exact(&p.a);
            operand_exact(&p.b);
            problem_sum(&p);
            struct result r = run(&p, false, dev);
            for (int64_t i = 0; i < s.M * s.N; i++)
                assert_near(to_float(r.without_bias[i]), p.sums[i], 0, i);
            result_free(&r);
            problem_free(&p);
        }
}
static void scales_of_blocks_keep_every_code_exact(void **state) { for_each_backend(1, check_codes); }

// Checks that an inverse scale that is NaN makes all outputs of its matrix, or its row, NaN, and no others.
static void check_nan(struct device *dev, const struct matmul_backend *backend) {
    const struct shape s = {128, 256, 384};
    for (int k = 0; k < KINDS; k++)
        for (int of_b = 0; of_b < 2; of_b++) {
            struct problem p = problem_make(s, kinds[k], RANDOM, 7);
            *inverse_of(of_b ? &p.b : &p.a, 70, 130) = NAN;
            struct result r = run(&p, false, dev);
            const enum fp8_granularity granularity = of_b ? kinds[k].b : kinds[k].a;
            for (int64_t i = 0; i < s.M * s.N; i++) {
                const int64_t line = of_b ? i % s.N : i / s.N;
                const bool hit = granularity == FP8_PER_TENSOR || (granularity == FP8_1X128 ? line == 70 : line < 128);
                assert_int_equal(isnan(to_float(r.out[i])), hit);
                assert_int_equal(isnan(r.sum[i]), hit);
            }
            result_free(&r);
            problem_free(&p);
        }
}
static void an_inverse_of_nan_reaches_what_it_scales_alone(void **state) { for_each_backend(2, check_nan); }

static void check_adds(struct device *dev, const struct matmul_backend *backend) {
    const struct shape s = {128, 128, 256};
    for (int k = 0; k < KINDS; k++) {
        struct problem p = problem_make(s, kinds[k], INTEGERS, 3);
        struct result r = run(&p, false, dev);
        void *workspace = test_alloc(matmul_fp8_workspace_bytes(s.M, s.N, s.K, dev));
        matmul_fp8_sum(r.sum, p.a.matrix, p.b.matrix, s.M, s.N, s.K, true, false, workspace, dev);
        wait_for(dev);
        for (int64_t i = 0; i < s.M * s.N; i++)
            assert_near(r.sum[i], 2 * p.sums[i] + START, 0, i);
        free(workspace);
        result_free(&r);
        problem_free(&p);
    }
}
static void a_second_product_adds_to_the_first(void **state) { for_each_backend(2, check_adds); }

// Checks products of one shape, which share a plan on a GPU, each with scales and a bias of its own.
static void check_pointers(struct device *dev, const struct matmul_backend *backend) {
    const struct shape s = {128, 128, 256};
    for (int k = 0; k < KINDS; k++) {
        struct problem p[] = {problem_make(s, kinds[k], INTEGERS, 3), problem_make(s, kinds[k], INTEGERS, 4)};
        for (int64_t i = 0; i < fp8_inverse_count(kinds[k].a, s.M, s.K); i++)
            p[1].a.matrix.inverse[i] *= 2;
        for (int64_t n = 0; n < s.N; n++)
            p[1].bias[n] = to_floatX(9);
        operand_exact(&p[1].a);
        problem_sum(&p[1]);
        for (int i = 0; i < 2; i++) {
            struct result r = run(&p[i], false, dev);
            assert_exact(&p[i], &r);
            result_free(&r);
        }
        problem_free(&p[0]);
        problem_free(&p[1]);
    }
}
static void products_of_one_shape_have_their_own_scales(void **state) { for_each_backend(2, check_pointers); }

#ifndef TARGET_CUDA

static void check_threads(struct device *dev, const struct matmul_backend *backend) {
    const struct shape s = {1040, 80, 1168};
    if (!backend->same_bits_for_any_threads)
        return;
    for (int k = 0; k < KINDS; k += 3) {
        struct problem p = problem_make(s, kinds[k], RANDOM, 9);
        struct device other = {3, dev->matmul};
        struct result r[] = {run(&p, false, dev), run(&p, false, &other)};
        assert_memory_equal(r[0].out, r[1].out, r[0].out_bytes);
        assert_memory_equal(r[0].sum, r[1].sum, r[0].sum_bytes);
        result_free(&r[0]);
        result_free(&r[1]);
        problem_free(&p);
    }
}
static void any_number_of_threads_gives_the_same_bits(void **state) { for_each_backend(1, check_threads); }

// Checks that the workspace does not depend on sizes, where blocks are whole. oneDNN's primitives need what they choose
// for a shape.
static void check_workspace(struct device *dev, const struct matmul_backend *backend) {
    const size_t bytes = matmul_fp8_workspace_bytes(2048, 2048, 2048, dev);
    assert_int_equal(matmul_fp8_workspace_bytes(1 << 20, 2048, 2048, dev), bytes);
    assert_int_equal(matmul_fp8_workspace_bytes(2048, 1 << 16, 2048, dev), bytes);
    assert_int_equal(matmul_fp8_workspace_bytes(2048, 2048, 1 << 20, dev), bytes);
}
static void scratch_memory_depends_on_no_size(void **state) { for_each_backend(2, check_workspace); }

#endif

#ifdef CUDA_EMULATED

// ---- what is refused, and by which words ----

static void without_hopper_fp8_is_refused_by_name(void **state) {
    static const struct {
        const char *capability, *version;
        enum fp8_granularity granularity;
        const char *words; // NULL: not refused
    } cases[] = {{"8.0", NULL, FP8_PER_TENSOR, "capability 8.9 or more, and this one has 8.0: leave out --fp8-format"},
                 {"8.0", NULL, FP8_1X128, "leave out --fp8-format"},
                 {"8.9", NULL, FP8_PER_TENSOR, NULL},
                 {"8.9", NULL, FP8_1X128, "capability 9.0, and this one has 8.9: leave out --fp8-recipe blockwise"},
                 {"10.0", NULL, FP8_PER_TENSOR, NULL},
                 {"10.0", NULL, FP8_128X128, "this one has 10.0: leave out --fp8-recipe blockwise"},
                 {"9.0", NULL, FP8_1X128, NULL},
                 {"9.0", "120803", FP8_PER_TENSOR, NULL},
                 {"9.0", "120803", FP8_1X128, "12.9 or newer; this program was built with 13.0 and runs with 12.8"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct device dev = {1, NULL};
        char text[512];
        dev.open = true;
        setenv("EMU_CAPABILITY", cases[i].capability, 1);
        if (cases[i].version)
            setenv("EMU_CUBLASLT_VERSION", cases[i].version, 1);
        const char *said = matmul_fp8_refusal(text, sizeof text, cases[i].granularity, &dev);
        test_case_without_seed("case %zu", i);
        if (cases[i].words)
            assert_error(said, cases[i].words);
        else
            assert_null(said);
        dev.open = false; // it is only planned
        assert_null(matmul_fp8_refusal(text, sizeof text, cases[i].granularity, &dev));
        unsetenv("EMU_CUBLASLT_VERSION");
    }
    setenv("EMU_CAPABILITY", "9.0", 1);
}

static void run_problem(void *argument) {
    struct device dev = {1, NULL};
    dev.matmul = matmul_create(&dev);
    run((const struct problem *)argument, false, &dev);
}
static void assert_refused(struct shape s, const char *words) {
    struct problem p = problem_make(s, kinds[0], RANDOM, 1);
    assert_fails(run_problem, &p, words);
    problem_free(&p);
}
static void what_has_no_algorithm_is_refused_by_name(void **state) {
    const struct shape odd[] = {{24, 16, 16}, {16, 24, 16}, {16, 16, 24}}, whole = {16, 32, 48};
    for (int i = 0; i < 3; i++)
        assert_refused(odd[i], "multiples of 16|--micro-batch-size|--seq-length|--hidden-size|--fp8-format");
    setenv("EMU_CAPABILITY", "8.0", 1);
    assert_refused(whole, "no algorithm for an FP8 product of (16 x 48) by (48 x 32) transposed|--fp8-format");
    setenv("EMU_CAPABILITY", "9.0", 1);
}

// Returns the error of a product with fast sums, or without, by 13 bits of mantissa as on Hopper: with fast sums it
// grows with the depth.
static double error_of(const struct problem *p, bool fast, struct device *dev) {
    struct result r = run(p, fast, dev);
    const int64_t n = p->shape.M * p->shape.N;
    double *sum = floats_to_doubles(r.sum, n);
    for (int64_t i = 0; i < n; i++)
        sum[i] -= START;
    const double error = relative_error(sum, p->sums, n);
    free(sum);
    result_free(&r);
    return error;
}
static void fast_sums_cost_bits_on_the_emulated_hopper(void **state) {
    const struct shape s = {32, 32, 4096};
    struct device dev = {2, NULL};
    dev.matmul = matmul_create(&dev);
    struct problem p = problem_make(s, kinds[0], RANDOM, 1);
    assert_true(error_of(&p, true, &dev) < 0x1p-18);
    setenv("EMU_CUBLASLT_TRUNCATE", "1", 1);
    const double slow = error_of(&p, false, &dev), fast = error_of(&p, true, &dev);
    unsetenv("EMU_CUBLASLT_TRUNCATE");
    print_message("           relative errors: %.2g, fast %.2g\n", slow, fast);
    assert_true(slow > 0x1p-16 && slow < 2 * sqrt(128) * 0x1p-13);
    assert_true(fast > 2 * slow && fast < 2 * sqrt((double)s.K) * 0x1p-13);
    problem_free(&p);
    matmul_destroy(dev.matmul);
}

// Misuses, at which the stand-in for cuBLASLt ends the program where the library would fail, or give a wrong result
// without an error.
enum misuse {
    BOTH_E5M2,
    OTHER_TYPE,
    SCALES_WITHOUT_FP8,
    ACROSS,
    ODD_DEPTH,
    ODD_WIDTH,
    ODD_LEADING_DIMENSION,
    FP8_OUTPUT,
    NO_SCALE,
    HOST_SCALE,
    SCALE_OF_D,
    AMAX_OF_D,
    OTHER_EPILOGUE,
    VERY_FAST,
    FP32_BIAS,
    UNALIGNED,
    WIDE_FAST,
    NARROW_POINTER,
    WIDE_MODE,
    OTHER_SPEED,
    LOW_WORKSPACE,
    ONE_BLOCK, // from here on with scales of blocks
    OTHER_MODE,
    TWO_SQUARE_BLOCKS,
    FAST_BLOCKS,
    MICROSCALES,
    UNALIGNED_SCALES,
    UNPADDED_SCALES,
    GOOD
};
static const char *const misuse_words[] = {"both operands are E5M2",
                                           "FP8 by another type",
                                           "scales, but no FP8",
                                           "along the depth",
                                           "depth 24",
                                           "width 24",
                                           "leading dimension 56",
                                           "an output of type 28",
                                           "no scale of A",
                                           "not in the device's memory",
                                           "a scale of C or D",
                                           "amax of D",
                                           "epilogue 2 with FP8",
                                           "FAST_ACCUM is 2",
                                           "a bias of type 0",
                                           "B is aligned to 8 bytes, FP8 needs 16",
                                           "attribute 25 has not 4 bytes",
                                           "attribute 17 has not 4 bytes",
                                           "attribute 31 has not 8 bytes",
                                           "another operation",
                                           "not aligned to 256",
                                           "do not meet",
                                           "another operation",
                                           "both operands have scales of 128 x 128",
                                           "a fast sum by scales of blocks",
                                           "scale mode 2 needs another GPU",
                                           "not aligned to 16 bytes",
                                           "past an allocation"};
struct misused {
    struct problem problem;
    struct matmul_library *library;
    char *workspace;
    floatX *out;
    enum misuse which;
};

static void misuse_plan(struct matmul_plan *plan, const struct misused *m) {
    static const float one = 1;
    const float *const host = &one, *const none = NULL, *const moved = m->problem.b.matrix.inverse + 1;
    const cublasOperation_t as_stored = CUBLAS_OP_N;
    const int32_t fp32 = CUDA_R_32F, micro = CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0,
                  square = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F,
                  scalar = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
    const int64_t wide = 0;
    const int8_t fast = 1, very_fast = 2;
    const int32_t relu = 2;
    switch (m->which) {
    case ACROSS:
        matmul_set(plan, CUBLASLT_MATMUL_DESC_TRANSA, &as_stored, sizeof as_stored);
        cublasLtMatrixLayoutInit(&plan->b, CUDA_R_8F_E4M3, (uint64_t)plan->key.cols, (uint64_t)plan->key.depth,
                                 plan->key.cols);
        break;
    case ODD_LEADING_DIMENSION: plan->a.ld = 56; break;
    case FP8_OUTPUT: plan->c.type = CUDA_R_8F_E4M3; break;
    case NO_SCALE: matmul_set(plan, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &none, sizeof none); break;
    case HOST_SCALE: matmul_set(plan, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &host, sizeof host); break;
    case SCALE_OF_D: matmul_set(plan, CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, &host, sizeof host); break;
    case AMAX_OF_D: matmul_set(plan, CUBLASLT_MATMUL_DESC_AMAX_D_POINTER, &host, sizeof host); break;
    case OTHER_TYPE: plan->a.type = CUDA_R_16BF; break;
    case SCALES_WITHOUT_FP8: plan->a.type = plan->b.type = CUDA_R_16BF; break;
    case OTHER_EPILOGUE: matmul_set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE, &relu, sizeof relu); break;
    case VERY_FAST: matmul_set(plan, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &very_fast, sizeof very_fast); break;
    case FP32_BIAS: matmul_set(plan, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &fp32, sizeof fp32); break;
    case UNALIGNED: plan->key.a_alignment = 8; break;
    case WIDE_FAST: matmul_set(plan, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fp32, 4); break;
    case NARROW_POINTER: matmul_set(plan, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &host, 4); break;
    case WIDE_MODE: matmul_set(plan, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &wide, 8); break;
    case ONE_BLOCK: matmul_set(plan, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &scalar, sizeof scalar); break;
    case TWO_SQUARE_BLOCKS: matmul_set(plan, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &square, sizeof square); break;
    case FAST_BLOCKS: matmul_set(plan, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast); break;
    case MICROSCALES: matmul_set(plan, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &micro, sizeof micro); break;
    case UNALIGNED_SCALES: matmul_set(plan, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &moved, sizeof moved); break;
    default: break;
    }
}
static void misuse_call(struct matmul_plan *plan, const struct misused *m) {
    const int8_t fast = 1;
    const int32_t vector = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    if (m->which == OTHER_SPEED)
        matmul_set(plan, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast);
    if (m->which == OTHER_MODE)
        matmul_set(plan, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &vector, sizeof vector);
}
static void misuse_run(void *argument) {
    struct misused *m = (struct misused *)argument;
    const struct shape s = m->problem.shape;
    const float one = 1, zero = 0;
    struct fp8_matrix a = m->problem.a.matrix, b = m->problem.b.matrix;
    if (m->which == BOTH_E5M2)
        a.format = b.format = FP8_E5M2;
    if (m->which == UNPADDED_SCALES) {
        const int64_t padded = fp8_inverse_count(FP8_128X128, s.N, s.K); // no row of the scales is as long as this
        b.inverse = scales_alloc(padded - 1);
    }
    const int64_t N = m->which == ODD_WIDTH ? 24 : s.N, K = m->which == ODD_DEPTH ? 24 : s.K;
    const struct gemm gemm = {s.M, N, K, {NULL, s.K, false, &a}, {NULL, s.K, true, &b}, m->out, N, m->problem.bias};
    struct matmul_plan plan;
    matmul_plan_product(&plan, &gemm, NULL, false);
    misuse_plan(&plan, m);
    cublas_check(matmul_choose_algorithm(&plan, m->library));
    misuse_call(&plan, m);
    cublas_check(cublasLtMatmul(m->library->handle, &plan.operation, &one, b.codes, &plan.b, a.codes, &plan.a, &zero,
                                m->out, &plan.c, m->out, &plan.c, &plan.algorithm,
                                m->workspace + (m->which == LOW_WORKSPACE ? 128 : 0), GPU_MATMUL_BYTES, NULL));
}
static void the_stand_in_refuses_what_the_library_refuses(void **state) {
    const struct shape s = {32, 48, 48}; // so small that the stand-in starts no threads, which a forked child could not
    struct misused m;
    memset(&m, 0, sizeof m);
    struct device dev = {1, NULL};
    m.library = matmul_create(&dev);
    m.workspace = (char *)test_alloc(GPU_MATMUL_BYTES + 128);
    m.out = (floatX *)test_alloc((size_t)(s.M * s.N) * sizeof *m.out);
    char message[1024];
    for (int which = 0; which <= GOOD; which++) {
        m.which = (enum misuse)which;
        for (int blocks = which >= ONE_BLOCK && which < GOOD; blocks <= (which >= ONE_BLOCK); blocks++) {
            m.problem = problem_make(s, kinds[blocks ? 3 : 0], RANDOM, 1);
            test_case_without_seed("misuse %d", which);
            assert_int_equal(run_in_child(misuse_run, &m, message, sizeof message), which == GOOD ? 0 : 3);
            if (which < GOOD && !strstr(message, misuse_words[which]))
                fail_msg("expected '%s', got: %s", misuse_words[which], message);
            problem_free(&m.problem);
        }
    }
    free(m.workspace);
    free(m.out);
    matmul_destroy(m.library);
}

#endif

int main(void) {
    test_keep_memory();
#ifdef CUDA_EMULATED
    setenv("EMU_CAPABILITY", "9.0", 1);
#endif
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_values_are_as_close_as_sums_in_fp32_are),
        cmocka_unit_test(products_of_integers_are_exact),
        cmocka_unit_test(scales_of_blocks_keep_every_code_exact),
        cmocka_unit_test(an_inverse_of_nan_reaches_what_it_scales_alone),
        cmocka_unit_test(a_second_product_adds_to_the_first),
        cmocka_unit_test(products_of_one_shape_have_their_own_scales),
#ifndef TARGET_CUDA
        cmocka_unit_test(any_number_of_threads_gives_the_same_bits),
        cmocka_unit_test(scratch_memory_depends_on_no_size),
#endif
#ifdef CUDA_EMULATED
        cmocka_unit_test(without_hopper_fp8_is_refused_by_name),
        cmocka_unit_test(what_has_no_algorithm_is_refused_by_name),
        cmocka_unit_test(fast_sums_cost_bits_on_the_emulated_hopper),
        cmocka_unit_test(the_stand_in_refuses_what_the_library_refuses),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#else

static void fp32_is_refused_by_name(void **state) {
    struct device dev = {1, NULL};
    char text[256];
    assert_error(matmul_fp8_refusal(text, sizeof text, FP8_PER_TENSOR, &dev), "--fp8-format needs --precision bf16");
}
int main(void) {
    test_keep_memory();
    const struct CMUnitTest tests[] = {cmocka_unit_test(fp32_is_refused_by_name)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#endif
