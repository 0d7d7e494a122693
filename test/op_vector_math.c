// kernels/vector_math.cuh against libm in double, over the whole range of floats: every STRIDE-th bit pattern (a prime,
// so that all exponents and all kinds of mantissa come) or, when the program has an argument, every one.
#include "kernels/vector_math.cuh"
#include "kernels/device.cuh"
#include "test/testing.h"

static uint64_t stride = 251;

// Returns the error in units of the last place of the true value; denormals have the unit of the smallest normal
// number.
static double ulps(float got, double expected) {
    if (isnan(expected))
        return isnan(got) ? 0 : INFINITY;
    if (isinf((float)expected)) // rounds to infinity
        return got == (float)expected ? 0 : INFINITY;
    if (got == 0 && fabs(expected) < 0x1.7p-126) // vector_expf flushes such results to zero; 2^-125.5 = 0x1.6ap-126
        return 0;
    int exponent;
    frexp(expected, &exponent);
    const double unit = ldexp(1, exponent - 24 < -149 ? -149 : exponent - 24);
    return fabs(got - expected) / unit;
}

// The number of values at a time in the loops that vectorize, as the ops use them.
enum { LANES = 4096 };
static double worst(double (*reference)(double), void (*many)(float *, const float *), const char *name) {
    static float x[LANES], y[LANES];
    double largest = 0;
    float at = 0;
    for (uint64_t begin = 0; begin < (uint64_t)1 << 32; begin += LANES * stride) {
        for (uint64_t i = 0; i < LANES; i++)
            x[i] = float_from_bits((uint32_t)(begin + i * stride));
        many(y, x);
        for (int i = 0; i < LANES; i++) {
            const double error = ulps(y[i], reference(x[i]));
            if (error > largest) {
                largest = error;
                at = x[i];
            }
        }
    }
    printf("%s: at most %.3f ulp, at %a\n", name, largest, (double)at);
    return largest;
}
static void many_exp(float *y, const float *x) {
#pragma omp simd
    for (int i = 0; i < LANES; i++)
        y[i] = vector_expf(x[i]);
}
static void many_log(float *y, const float *x) {
#pragma omp simd
    for (int i = 0; i < LANES; i++)
        y[i] = vector_logf(x[i]);
}
static void many_tanh(float *y, const float *x) {
#pragma omp simd
    for (int i = 0; i < LANES; i++)
        y[i] = vector_tanhf(x[i]);
}

// Checks vector_expf. The last step's rounding is half a unit; roundings before it reach the result multiplied by r <=
// 0.35; r's own error, two roundings of up to 0.35, enters in full. Without fused multiply-add it is a little more.
static void exponential(void **state) { assert_true(worst(exp, many_exp, "vector_expf") <= 1.25); }
static void logarithm(void **state) { assert_true(worst(log, many_log, "vector_logf") <= 1.25); }
static void hyperbolic_tangent(void **state) { assert_true(worst(tanh, many_tanh, "vector_tanhf") <= 2); }

static void special_values(void **state) {
    assert_true(vector_expf(0) == 1 && vector_expf(-0.0f) == 1);
    assert_true(vector_expf(INFINITY) == INFINITY && vector_expf(-INFINITY) == 0 && isnan(vector_expf(NAN)));
    assert_true(vector_expf(88.72283f) < INFINITY && vector_expf(88.72284f) == INFINITY);
    assert_true(vector_expf(3e38f) == INFINITY);
    assert_true(vector_expf(-86.98f) >= 0x1p-126f && vector_expf(-87.1f) == 0 && vector_expf(-3e38f) == 0);
    assert_true(vector_logf(1) == 0 && vector_logf(0) == -INFINITY && vector_logf(-0.0f) == -INFINITY);
    assert_true(vector_logf(INFINITY) == INFINITY && isnan(vector_logf(NAN)) && isnan(vector_logf(-INFINITY)));
    assert_true(vector_tanhf(INFINITY) == 1 && vector_tanhf(-INFINITY) == -1 && isnan(vector_tanhf(NAN)));
    assert_true(vector_tanhf(0) == 0 && vector_tanhf(3e38f) == 1);
    assert_true(isnan(vector_logf(-1)) && isnan(vector_logf(-0x1p-149f)));
}

static void sine_and_cosine(void **state) {
    double largest = 0;
    for (int64_t i = 0; i <= (int64_t)1 << 22; i++) {
        const float u = (float)i * 0x1p-22f;
        float sine, cosine;
        vector_sincos_turn(&sine, &cosine, u);
        const double angle = 6.28318530717958647693 * u;
        largest = fmax(largest, fmax(fabs(sine - sin(angle)), fabs(cosine - cos(angle))));
        assert_near(sine, sin(angle), 1.5e-7, i);
        assert_near(cosine, cos(angle), 1.5e-7, i);
        // The quarter turns are exact.
        if (i % (1 << 20) == 0)
            assert_true(fabsf(sine) + fabsf(cosine) == 1);
    }
    printf("vector_sincos_turn: at most %.3g\n", largest);
}

int main(int argc, char **argv) {
    if (argc > 1)
        stride = 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exponential),    cmocka_unit_test(logarithm),       cmocka_unit_test(hyperbolic_tangent),
        cmocka_unit_test(special_values), cmocka_unit_test(sine_and_cosine),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
