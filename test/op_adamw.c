// kernels/adamw.cuh against torch.optim.AdamW's algorithm in double over 20 steps, and the sum of squares.
//
// Tolerances. Each step rounds every state a few times, 2^-24 each, and the errors of 20 steps add up like a random
// walk: 1e-6 for m, v and the parameters. bf16 parameters are exactly the rounded master.
#include "kernels/adamw.cuh"
#include "test/testing.h"
#include <omp.h> // omp_set_num_threads

static const double FP32_STEPS = 1e-6;
static struct device device = {2, NULL};
enum { STEPS = 20 };

// The lines of torch's _single_tensor_adamw, one element.
static void reference_step(double *p, double *m, double *v, double g, struct adamw a) {
    *p *= 1 - (double)a.lr * a.weight_decay;
    *m += (g - *m) * (1 - (double)a.beta1);
    *v = *v * a.beta2 + (1 - (double)a.beta2) * g * g;
    const double correction1 = 1 - pow(a.beta1, (double)a.step), correction2 = 1 - pow(a.beta2, (double)a.step);
    *p -= a.lr / correction1 * *m / (sqrt(*v) / sqrt(correction2) + a.eps);
}

static void check(int64_t n, bool with_master, float weight_decay) {
    uint64_t random = (uint64_t)n;
    double *p = test_doubles(n), *m = test_doubles(n), *v = test_doubles(n);
    float *master = (float *)test_alloc((size_t)n * sizeof *master);
    float *grads = (float *)test_alloc((size_t)n * sizeof *grads);
    float *m_got = (float *)test_alloc((size_t)n * sizeof *m_got);
    float *v_got = (float *)test_alloc((size_t)n * sizeof *v_got);
    floatX *params = (floatX *)test_alloc((size_t)(n + 1) * sizeof *params);
    memset(params, 0x5a, (size_t)(n + 1) * sizeof *params);
    for (int64_t i = 0; i < n; i++) {
        p[i] = master[i] = (float)test_uniform(&random);
        if (!with_master)
            params[i] = to_floatX(master[i]);
        m_got[i] = v_got[i] = 0;
    }
    for (int step = 1; step <= STEPS; step++) {
        const struct adamw adamw = {1e-2f / (float)step, 0.9f, 0.95f, 1e-8f, weight_decay, step, 0.25f};
        for (int64_t i = 0; i < n; i++) {
            grads[i] = (float)(test_uniform(&random) * (i % 7 == 3 ? 1e-6 : 2)); // some near eps
            if (i % 11 == 5)
                grads[i] = 0;
            reference_step(&p[i], &m[i], &v[i], (double)grads[i] * 0.25, adamw);
        }
        adamw_update(params, with_master ? master : NULL, grads, m_got, v_got, n, adamw, &device);
    }
    double *m_result = floats_to_doubles(m_got, n), *v_result = floats_to_doubles(v_got, n);
    double *p_result = with_master ? floats_to_doubles(master, n) : to_doubles(params, n);
    assert_close(m_result, m, n, FP32_STEPS);
    assert_close(v_result, v, n, FP32_STEPS);
    assert_close(p_result, p, n, FP32_STEPS);
    if (with_master)
        for (int64_t i = 0; i < n; i++)
            assert_true(to_float(params[i]) == to_float(to_floatX(master[i])));
    assert_int_equal(((unsigned char *)&params[n])[0], 0x5a);
    void *all[] = {p, m, v, master, grads, m_got, v_got, params, m_result, v_result, p_result};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static void twenty_steps(void **state) {
    const int64_t sizes[] = {1, 15, 16, 17, 1000, 1023, 1024, 1025, 5000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int decay = 0; decay < 2; decay++) {
            check(sizes[i], true, decay ? 0.1f : 0);
            if (sizeof(floatX) == 4)
                check(sizes[i], false, decay ? 0.1f : 0);
        }
}

// At step 1 the update is lr * sign(g), whatever the gradient's size: the corrections undo 1 - beta exactly.
static void first_step(void **state) {
    floatX params[2];
    float master[2] = {1, -1}, grads[2] = {1e-3f, -50}, m[2] = {0, 0}, v[2] = {0, 0};
    const struct adamw adamw = {0.125f, 0.9f, 0.999f, 0, 0, 1, 1};
    adamw_update(params, master, grads, m, v, 2, adamw, &device);
    assert_true(fabsf(master[0] - 0.875f) < 2e-7 && fabsf(master[1] + 0.875f) < 2e-7);
}

static void sums(void **state) {
    const int64_t sizes[] = {0, 1, 255, 256, 257, 1000, 100003};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        const int64_t n = sizes[k];
        uint64_t random = 2;
        float *x = (float *)test_alloc((size_t)(n + 1) * sizeof *x);
        double expected = 0;
        for (int64_t i = 0; i < n; i++) {
            x[i] = (float)(1e20 * test_uniform(&random)); // whose squares no float holds
            expected += (double)x[i] * x[i];
        }
        const int threads = omp_get_max_threads();
        omp_set_num_threads(1);
        const double one = sum_of_squares(x, n, &device);
        omp_set_num_threads(7);
        const double seven = sum_of_squares(x, n, &device);
        omp_set_num_threads(threads);
        assert_true(one == seven && fabs(one - expected) <= 1e-12 * expected);
        if (n > 0) {
            x[n - 1] = INFINITY;
            assert_true(sum_of_squares(x, n, &device) == INFINITY);
            x[n / 2] = NAN;
            assert_true(isnan(sum_of_squares(x, n, &device)));
        }
        free(x);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(twenty_steps),
        cmocka_unit_test(first_step),
        cmocka_unit_test(sums),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
