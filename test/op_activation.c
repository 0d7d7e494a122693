// kernels/activation.cuh against the formulas in double (with tanh and exp as the papers write them), and against
// finite differences of the formulas.
//
// Tolerances. fp32: exp is off by one unit in the last place of a value that is added to 1, and every formula has about
// six more roundings of 2^-24: 1e-6 covers these in the norm. bf16: one rounding of the result, and a tenth more for
// the work in fp32.
#include "kernels/activation.cuh"
#include "test/amax.h" // amax_case_set, amax_new, amax_expected
#include "test/testing.h"

#define TOLERANCE (sizeof(floatX) == 2 ? 1.1 * FLOATX_ROUNDING : 1e-6)
static struct device device = {2, NULL};

static double gelu_reference(double x) { return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }
static double gelu_erf_reference(double x) { return 0.5 * x * (1 + erf(x * M_SQRT1_2)); }
static double squared_relu_reference(double x) { return x > 0 ? x * x : 0; }
static double silu_reference(double x) { return x / (1 + exp(-x)); }
// Returns the central difference: h^2 f''' / 6 + 1e-16 / h is below 1e-9 at h = 1e-5.
static double slope(double (*f)(double), double x) { return (f(x + 1e-5) - f(x - 1e-5)) / 2e-5; }

static const int64_t sizes[] = {1, 2, 15, 16, 17, 100, 4095, 4096, 4097, 9001};
enum { SIZES = sizeof sizes / sizeof *sizes };

// Checks a pointwise activation against its formula, and its gradient against the formula's differences.
static void check_pointwise(const char *name, pointwise_forward *forward, pointwise_backward *backward,
                            double (*reference)(double)) {
    for (int k = 0; k < SIZES; k++) {
        const int64_t n = sizes[k];
        uint64_t random = (uint64_t)n;
        double *in_exact, *dout_exact, *expected = test_doubles(n), *expected_backward = test_doubles(n);
        test_case(random, "%s, n %lld", name, (long long)n);
        floatX *in = test_floats(&in_exact, n, 6, &random), *dout = test_floats(&dout_exact, n, 1, &random);
        floatX *out = (floatX *)test_alloc((size_t)(n + 1) * sizeof *out);
        memset(&out[n], 0x5a, sizeof *out);
        for (int64_t i = 0; i < n; i++) {
            expected[i] = reference(in_exact[i]);
            expected_backward[i] = dout_exact[i] * slope(reference, in_exact[i]);
        }
        forward(out, in, n, NULL, &device);
        double *result = to_doubles(out, n);
        assert_close(result, expected, n, TOLERANCE);
        backward(out, NULL, dout, in, 1, (int)n, NULL, &device);
        double *result_backward = to_doubles(out, n);
        assert_close(result_backward, expected_backward, n, TOLERANCE);
        backward(dout, NULL, dout, in, 1, (int)n, NULL, &device); // in place
        assert_memory_equal(dout, out, (size_t)n * sizeof *out);
        assert_int_equal(((unsigned char *)&out[n])[0], 0x5a);
        void *all[] = {in_exact, dout_exact, expected, expected_backward, in, dout, out, result, result_backward};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            free(all[i]);
    }
}
// Checks that an amax changes no bit of the results, and becomes the amax of what is stored, or stays if it was larger
// before.
static void check_amaxes(const char *name, pointwise_forward *forward, pointwise_backward *backward) {
    for (int k = 0; k < SIZES * AMAX_CASES * 2; k++) {
        const int64_t n = sizes[k / 2 % SIZES];
        const int amax_case = k / 2 / SIZES;
        const uint32_t before = k % 2 ? 0x7f000000u : 0;
        uint64_t random = (uint64_t)k;
        double *in_exact, *dout_exact;
        test_case(random, "amax of %s, n %lld, %s, from %x", name, (long long)n, amax_case_names[amax_case], before);
        floatX *in = test_floats(&in_exact, n, 6, &random), *dout = test_floats(&dout_exact, n, 1, &random);
        floatX *out = (floatX *)test_alloc((size_t)n * sizeof *out),
               *with = (floatX *)test_alloc((size_t)n * sizeof *out);
        uint32_t *amax = amax_new(before);
        amax_case_set(in, n, amax_case);
        forward(out, in, n, NULL, &device);
        forward(with, in, n, amax, &device);
        assert_memory_equal(with, out, (size_t)n * sizeof *out);
        assert_int_equal(*amax, amax_expected(before, out, n));
        *amax = before;
        amax_case_set(dout, n, amax_case);
        backward(out, NULL, dout, in, 1, (int)n, NULL, &device);
        backward(with, NULL, dout, in, 1, (int)n, amax, &device);
        assert_memory_equal(with, out, (size_t)n * sizeof *out);
        assert_int_equal(*amax, amax_expected(before, out, n));
        void *all[] = {in_exact, dout_exact, in, dout, out, with, amax};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            free(all[i]);
    }
}
static void amaxes_of_pointwise(void **state) {
    check_amaxes("GELU", gelu_forward, gelu_backward);
    check_amaxes("GELU by erf", gelu_erf_forward, gelu_erf_backward);
    check_amaxes("squared ReLU", squared_relu_forward, squared_relu_backward);
}
static void gelu_both_ways(void **state) { check_pointwise("GELU", gelu_forward, gelu_backward, gelu_reference); }
static void gelu_erf_both_ways(void **state) {
    check_pointwise("GELU by erf", gelu_erf_forward, gelu_erf_backward, gelu_erf_reference);
}
static void squared_relu_both_ways(void **state) {
    check_pointwise("squared ReLU", squared_relu_forward, squared_relu_backward, squared_relu_reference);
    floatX *x = (floatX *)test_alloc(2 * sizeof *x);
    x[0] = x[1] = to_floatX(NAN);
    squared_relu_forward(x, x, 1, NULL, &device);
    assert_true(isnan(to_float(x[0])));
    squared_relu_backward(x, NULL, x + 1, x + 1, 1, 1, NULL, &device);
    assert_true(isnan(to_float(x[0])));
    free(x);
}

enum { SHAPES = 6 };
static const int shapes[SHAPES][2] = {{1, 1}, {1, 16}, {3, 17}, {5, 100}, {4, 688}, {33, 31}};
static void check_gated(const char *name, gated_forward *forward, gated_backward *backward,
                        double (*reference)(double)) {
    for (int k = 0; k < SHAPES; k++) {
        const int N = shapes[k][0], F = shapes[k][1];
        const int64_t n = (int64_t)N * F;
        uint64_t random = (uint64_t)n;
        double *in_exact, *dout_exact, *expected = test_doubles(n), *expected_backward = test_doubles(2 * n);
        test_case(random, "%s, N %d, F %d", name, N, F);
        floatX *in = test_floats(&in_exact, 2 * n, 6, &random), *dout = test_floats(&dout_exact, n, 1, &random);
        floatX *out = (floatX *)test_alloc((size_t)n * sizeof *out);
        floatX *din = (floatX *)test_alloc((size_t)(2 * n) * sizeof *din);
        for (int row = 0; row < N; row++)
            for (int f = 0; f < F; f++) {
                const double gate = in_exact[row * 2 * F + f], up = in_exact[row * 2 * F + F + f];
                const double d = dout_exact[row * F + f];
                expected[row * F + f] = reference(gate) * up;
                expected_backward[row * 2 * F + f] = d * up * slope(reference, gate);
                expected_backward[row * 2 * F + F + f] = d * reference(gate);
            }
        forward(out, in, N, F, NULL, &device);
        double *result = to_doubles(out, n);
        assert_close(result, expected, n, TOLERANCE);
        backward(din, NULL, dout, in, N, F, NULL, &device);
        double *result_backward = to_doubles(din, 2 * n);
        assert_close(result_backward, expected_backward, 2 * n, TOLERANCE);
        backward(in, NULL, dout, in, N, F, NULL, &device); // in place
        assert_memory_equal(in, din, (size_t)(2 * n) * sizeof *in);
        void *all[] = {in_exact, dout_exact, expected, expected_backward, in, dout, out, din, result, result_backward};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            free(all[i]);
    }
}
static void swiglu_both_ways(void **state) { check_gated("SwiGLU", swiglu_forward, swiglu_backward, silu_reference); }
static void geglu_both_ways(void **state) { check_gated("GeGLU", geglu_forward, geglu_backward, gelu_reference); }

static void check_gated_amaxes(const char *name, gated_forward *forward, gated_backward *backward) {
    for (int k = 0; k < SHAPES * AMAX_CASES * 2; k++) {
        const int N = shapes[k / 2 % SHAPES][0], F = shapes[k / 2 % SHAPES][1], amax_case = k / 2 / SHAPES;
        const int64_t n = (int64_t)N * F;
        const uint32_t before = k % 2 ? 0x7f000000u : 0;
        uint64_t random = (uint64_t)k;
        double *in_exact, *dout_exact;
        test_case(random, "amax of %s, N %d, F %d, %s, from %x", name, N, F, amax_case_names[amax_case], before);
        floatX *in = test_floats(&in_exact, 2 * n, 6, &random), *dout = test_floats(&dout_exact, n, 1, &random);
        const size_t bytes = (size_t)(2 * n) * sizeof(floatX);
        floatX *out = (floatX *)test_alloc(bytes), *with = (floatX *)test_alloc(bytes);
        uint32_t *amax = amax_new(before);
        amax_case_set(in, 2 * n, amax_case);
        forward(out, in, N, F, NULL, &device);
        forward(with, in, N, F, amax, &device);
        assert_memory_equal(with, out, bytes / 2);
        assert_int_equal(*amax, amax_expected(before, out, n));
        for (int half = 0; half < 2; half++) { // the largest element is in dgate, then in dup
            in[2 * n - 1 - half * F] = to_floatX(20);
            *amax = before;
            backward(out, NULL, dout, in, N, F, NULL, &device);
            backward(with, NULL, dout, in, N, F, amax, &device);
            assert_memory_equal(with, out, bytes);
            assert_int_equal(*amax, amax_expected(before, out, 2 * n));
        }
        void *all[] = {in_exact, dout_exact, in, dout, out, with, amax};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            free(all[i]);
    }
}
static void amaxes_of_gated(void **state) {
    check_gated_amaxes("SwiGLU", swiglu_forward, swiglu_backward);
    check_gated_amaxes("GeGLU", geglu_forward, geglu_backward);
}

// Checks that far out the functions are 0 or x and the slopes 0 or 1, and that the left tail keeps its relative
// precision.
static void tails_and_nan(void **state) {
    const float values[] = {-1e4f, -300, -100, 100, 300, 1e4f, 1e10f, NAN};
    enum { COUNT = 8 };
    floatX *in = (floatX *)test_alloc(6 * COUNT * sizeof *in), *out = in + 2 * COUNT, *one = out + COUNT,
           *din = one + COUNT;
    for (int i = 0; i < COUNT; i++) {
        in[i] = to_floatX(values[i]);
        in[COUNT + i] = one[i] = to_floatX(1);
    }
    for (int kind = 0; kind < 4; kind++) {
        const char *const names[] = {"GELU", "GELU by erf", "SwiGLU", "GeGLU"};
        test_case_without_seed("tails of %s", names[kind]);
        switch (kind) {
        case 0:
            gelu_forward(out, in, COUNT, NULL, &device);
            gelu_backward(din, NULL, one, in, 1, COUNT, NULL, &device);
            break;
        case 1:
            gelu_erf_forward(out, in, COUNT, NULL, &device);
            gelu_erf_backward(din, NULL, one, in, 1, COUNT, NULL, &device);
            break;
        case 2:
            swiglu_forward(out, in, 1, COUNT, NULL, &device);
            swiglu_backward(din, NULL, one, in, 1, COUNT, NULL, &device);
            break;
        default:
            geglu_forward(out, in, 1, COUNT, NULL, &device);
            geglu_backward(din, NULL, one, in, 1, COUNT, NULL, &device);
        }
        for (int i = 0; i < 3; i++)
            assert_true(fabs(to_float(out[i])) < 1e-38 && fabs(to_float(din[i])) < 1e-38);
        for (int i = 3; i < COUNT - 1; i++)
            assert_true(to_float(out[i]) == to_float(in[i]) && to_float(din[i]) == 1);
        assert_true(isnan(to_float(out[COUNT - 1])) && isnan(to_float(din[COUNT - 1])));
    }
    free(in);
}

// Checks GELU of negative numbers, each by itself, and that a value's place makes no difference: an op takes elements
// in groups, of which the last may not be whole.
static void gelu_of_negatives_is_exact_at_any_place(void **state) {
    enum { COUNT = 500 };
    floatX *in = (floatX *)test_alloc(COUNT * sizeof *in), *out = (floatX *)test_alloc(COUNT * sizeof *out);
    for (int i = 0; i < COUNT; i++)
        in[i] = to_floatX(-5 + 0.01f * (float)i);
    test_case_without_seed("GELU of -5 to 0, by hundredths");
    gelu_forward(out, in, COUNT, NULL, &device);
    // 2u is at most 17, and was rounded 4 times by 2^-24.
    const double tolerance = sizeof(floatX) == 2 ? 1.1 * FLOATX_ROUNDING : 5e-6;
    for (int i = 0; i < COUNT; i++) {
        // The reference in a form without cancellation: 0.5 x (1 + tanh(u)) = x e^2u / (1 + e^2u).
        const double x = to_float(in[i]), y = exp(2 * sqrt(2 / M_PI) * (x + 0.044715 * pow(x, 3)));
        assert_near(to_float(out[i]) / (x * y / (1 + y)), 1, tolerance, i);
    }
    floatX *one = (floatX *)test_alloc(2 * sizeof *one);
    for (int i = 0; i < COUNT; i++) {
        gelu_forward(one, in + i, 1, NULL, &device);
        assert_memory_equal(one, out + i, sizeof *one);
    }
    floatX *all[] = {in, out, one};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

// Checks GELU by erf and its derivative from -12 to 5, by hundredths, in relative precision. e^(-x^2 / 2) is off by
// 9e-6, since its exponent is up to 72 after 2 roundings of 2^-24. The derivative passes 0 at -0.75.
static void gelu_erf_of_negatives_is_exact(void **state) {
    enum { COUNT = 1700 };
    floatX *in = (floatX *)test_alloc(COUNT * sizeof *in), *out = (floatX *)test_alloc(COUNT * sizeof *out);
    floatX *one = (floatX *)test_alloc(COUNT * sizeof *one), *din = (floatX *)test_alloc(COUNT * sizeof *din);
    for (int i = 0; i < COUNT; i++) {
        in[i] = to_floatX(-12 + 0.01f * (float)i);
        one[i] = to_floatX(1);
    }
    test_case_without_seed("GELU by erf of -12 to 5, by hundredths");
    gelu_erf_forward(out, in, COUNT, NULL, &device);
    gelu_erf_backward(din, NULL, one, in, 1, COUNT, NULL, &device);
    const double tolerance = sizeof(floatX) == 2 ? 1.1 * FLOATX_ROUNDING : 1e-5;
    const double near_0 = sizeof(floatX) == 2 ? 4e-5 : 2e-7; // each of the derivative's two terms is 0.2 there
    for (int i = 0; i < COUNT; i++) {
        const double x = to_float(in[i]), cdf = 0.5 * erfc(-x * M_SQRT1_2);
        const double derivative = cdf + x * exp(-x * x / 2) / sqrt(2 * M_PI);
        if (x != 0)
            assert_near(to_float(out[i]) / (x * cdf), 1, tolerance, i);
        assert_near(to_float(din[i]), derivative, tolerance * fabs(derivative) + (fabs(x) < 2 ? near_0 : 0), i);
    }
    in[0] = to_floatX(INFINITY);
    in[1] = to_floatX(-INFINITY);
    gelu_erf_forward(out, in, 2, NULL, &device);
    assert_true(to_float(out[0]) == INFINITY);
    floatX *all[] = {in, out, one, din};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

// ---- sums of the gradient's columns ----

// Checks bias_partial against sums in double of what is stored. The stored values have the same bits with and without
// it. The sums have the same bits in a second call, and by a pass over the stored values. A sum has at most 64 terms:
// 64 roundings of a partial sum.
static void check_bias(const char *name, pointwise_backward *pointwise, gated_backward *gated) {
    static const int sizes[][2] = {{1, 1}, {3, 17}, {64, 264}, {65, 512}, {200, 40}, {129, 600}};
    for (int k = 0; k < 6 * 2; k++) {
        const int N = sizes[k / 2][0], F = sizes[k / 2][1], width = gated ? 2 * F : F;
        const int64_t n = (int64_t)N * width, chunks = activation_bias_num_runs(N);
        const size_t partial_bytes = (size_t)(chunks * width) * sizeof(float);
        uint64_t random = (uint64_t)k;
        double *in_exact, *dout_exact;
        test_case(random, "sums of %s, N %d, F %d%s", name, N, F, k % 2 ? ", with an amax" : "");
        floatX *in = test_floats(&in_exact, n, 6, &random), *dout = test_floats(&dout_exact, n, 1, &random);
        floatX *without = (floatX *)test_alloc((size_t)n * sizeof *without),
               *with = (floatX *)test_alloc((size_t)n * sizeof *with);
        float *partial[2];
        uint32_t *amax = k % 2 ? amax_new(0) : NULL;
        for (int i = 0; i < 2; i++) {
            partial[i] = (float *)test_alloc(partial_bytes);
            memset(partial[i], 0xff, partial_bytes); // NaN
            if (gated)
                gated(with, partial[i], dout, in, N, F, amax, &device);
            else
                pointwise(with, partial[i], dout, in, N, F, amax, &device);
        }
        if (gated)
            gated(without, NULL, dout, in, N, F, NULL, &device);
        else
            pointwise(without, NULL, dout, in, N, F, NULL, &device);
        assert_memory_equal(with, without, (size_t)n * sizeof *with);
        assert_memory_equal(partial[0], partial[1], partial_bytes);
        memset(partial[1], 0xff, partial_bytes);
        activation_bias_sums(partial[1], with, N, width, &device);
        assert_memory_equal(partial[0], partial[1], partial_bytes);
        if (amax)
            assert_int_equal(*amax, amax_expected(0, with, n));
        for (int64_t chunk = 0; chunk < chunks; chunk++)
            for (int c = 0; c < width; c++) {
                double sum = 0, size = 0;
                for (int64_t row = chunk * ACTIVATION_BIAS_ROWS; row < N && row < (chunk + 1) * ACTIVATION_BIAS_ROWS;
                     row++) {
                    sum += to_float(with[row * width + c]);
                    size += fabs(to_float(with[row * width + c]));
                }
                assert_near(partial[0][chunk * width + c], sum, ACTIVATION_BIAS_ROWS * 0x1p-24 * size, c);
            }
        void *all[] = {in_exact, dout_exact, in, dout, with, without, partial[0], partial[1], amax};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            free(all[i]);
    }
}
static void sums_of_columns(void **state) {
    check_bias("GELU", gelu_backward, NULL);
    check_bias("GELU by erf", gelu_erf_backward, NULL);
    check_bias("squared ReLU", squared_relu_backward, NULL);
    check_bias("SwiGLU", NULL, swiglu_backward);
    check_bias("GeGLU", NULL, geglu_backward);
}

// ---- every bf16 ----

// How much a logistic function is off. In bf16 the GPU's is off by 91 * 2^-24 of itself, down to 2^-40
// (kernels/activation.cuh), and by half a unit more where it is stored. The cpu target's is a polynomial made for bf16,
// which a twentieth of bf16's rounding covers. A derivative is a sum of terms of at most 1 + 8 sigma (1 - sigma): it is
// off by five times as much of 1.
#ifdef TARGET_CUDA
#define LOGISTIC_ERROR (119 * 0x1p-24)
#define NORMAL_ERROR (sizeof(floatX) == 2 ? 5e-5 : 3e-5) // of Phi(-z); in fp32 the exponent's error, z^2 2^-24
#else
#define LOGISTIC_ERROR (sizeof(floatX) == 2 ? FLOATX_ROUNDING / 20 : 119 * 0x1p-24)
#define NORMAL_ERROR (sizeof(floatX) == 2 ? FLOATX_ROUNDING / 20 : 3e-5)
#endif
// Returns half a unit in the last place of floatX.
static double half_unit(double y) {
    int exponent;
    if (y == 0 || !isfinite(y)) // 0 has no exponent
        return 0;
    frexp(y, &exponent);
    return 1.001 * ldexp(FLOATX_ROUNDING, exponent - 1);
}
// Checks an activation of every bf16. error: of the function's factor, relative; below it the factor is off by up to
// smallest / |x|.
static void check_every_bf16(const char *name, pointwise_forward *forward, pointwise_backward *backward,
                             double (*reference)(double), double (*derivative)(double), double error, double smallest) {
    enum { COUNT = 1 << 16 };
    floatX *in = (floatX *)test_alloc(4 * COUNT * sizeof *in), *out = in + COUNT, *one = out + COUNT,
           *din = one + COUNT;
    test_case_without_seed("%s of every bf16", name);
    for (uint32_t i = 0; i < COUNT; i++) {
        float x;
        const uint32_t bits = i << 16;
        memcpy(&x, &bits, sizeof x);
        in[i] = to_floatX(isnan(x) ? NAN : x); // the emulator marks registers by other NaNs
        one[i] = to_floatX(1);
    }
    forward(out, in, COUNT, NULL, &device);
    backward(din, NULL, one, in, 1, COUNT, NULL, &device);
    for (int i = 0; i < COUNT; i++) {
        const double x = to_float(in[i]), y = reference(x), slope = derivative(x);
        if (isnan(x)) {
            assert_true(isnan(to_float(out[i])) && isnan(to_float(din[i])));
            continue;
        }
        if (fabs(x) > 1e18) // there an intermediate square is infinite
            continue;
        assert_near(to_float(out[i]), y, half_unit(y) + error * fabs(y) + fabs(x) * smallest + 0x1p-126, i);
        assert_near(to_float(din[i]), slope, half_unit(slope) + 5 * error, i);
    }
    free(in);
}
static double gelu_exact(double x) { return x / (1 + exp(-2 * sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }
static double gelu_slope(double x) {
    const double s = 1 / (1 + exp(-2 * sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    return fabs(x) > 1e3 ? (x > 0) : s + x * s * (1 - s) * 2 * sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
}
// A gated activation's function of the gate, with up = 1.
#define GATE_ALONE(name)                                                                                               \
    static floatX *name##_gate_up(const floatX *gate, int64_t n) {                                                     \
        floatX *both = (floatX *)test_alloc((size_t)(2 * n) * sizeof *both);                                           \
        memcpy(both, gate, (size_t)n * sizeof *both);                                                                  \
        for (int64_t i = 0; i < n; i++)                                                                                \
            both[n + i] = to_floatX(1);                                                                                \
        return both;                                                                                                   \
    }                                                                                                                  \
    static void name##_alone_forward(floatX *out, const floatX *in, int64_t n, uint32_t *amax, struct device *dev) {   \
        floatX *both = name##_gate_up(in, n);                                                                          \
        name##_forward(out, both, 1, (int)n, amax, dev);                                                               \
        free(both);                                                                                                    \
    }                                                                                                                  \
    static void name##_alone_backward(floatX *din, float *partial, const floatX *dout, const floatX *in, int64_t N,    \
                                      int F, uint32_t *amax, struct device *dev) {                                     \
        floatX *both = name##_gate_up(in, F);                                                                          \
        name##_backward(both, partial, dout, both, N, F, amax, dev);                                                   \
        memcpy(din, both, (size_t)F * sizeof *din);                                                                    \
        free(both);                                                                                                    \
    }
GATE_ALONE(swiglu)
GATE_ALONE(geglu)
static double silu_exact(double x) { return isinf(x) && x < 0 ? 0 : x / (1 + exp(-x)); }
static double silu_slope(double x) {
    const double s = 1 / (1 + exp(-x));
    return fabs(x) > 1e3 ? (x > 0) : s + x * s * (1 - s);
}
static double gelu_erf_exact(double x) { return isinf(x) && x < 0 ? 0 : 0.5 * x * erfc(-x * M_SQRT1_2); }
static double gelu_erf_slope(double x) {
    return fabs(x) > 1e3 ? (x > 0) : 0.5 * erfc(-x * M_SQRT1_2) + x * exp(-0.5 * x * x) / sqrt(2 * M_PI);
}
static void gelu_of_every_bf16(void **state) {
    check_every_bf16("GELU", gelu_forward, gelu_backward, gelu_exact, gelu_slope, LOGISTIC_ERROR, 0x1p-40);
    check_every_bf16("GELU by erf", gelu_erf_forward, gelu_erf_backward, gelu_erf_exact, gelu_erf_slope, NORMAL_ERROR,
                     0x1p-120);
}
static void gates_of_every_bf16(void **state) {
    check_every_bf16("SwiGLU's gate", swiglu_alone_forward, swiglu_alone_backward, silu_exact, silu_slope,
                     LOGISTIC_ERROR, 0x1p-40);
    check_every_bf16("GeGLU's gate", geglu_alone_forward, geglu_alone_backward, gelu_exact, gelu_slope, LOGISTIC_ERROR,
                     0x1p-40);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gelu_both_ways),
        cmocka_unit_test(gelu_erf_both_ways),
        cmocka_unit_test(squared_relu_both_ways),
        cmocka_unit_test(swiglu_both_ways),
        cmocka_unit_test(geglu_both_ways),
        cmocka_unit_test(amaxes_of_pointwise),
        cmocka_unit_test(amaxes_of_gated),
        cmocka_unit_test(tails_and_nan),
        cmocka_unit_test(gelu_of_negatives_is_exact_at_any_place),
        cmocka_unit_test(gelu_erf_of_negatives_is_exact),
        cmocka_unit_test(sums_of_columns),
        cmocka_unit_test(gelu_of_every_bf16),
        cmocka_unit_test(gates_of_every_bf16),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
