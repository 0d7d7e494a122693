// kernels/adamw.cuh against torch.optim.AdamW's algorithm in double over 20 steps, the sum of squares, and the
// check of a step.
//
// Tolerances. Each step rounds every state a few times, 2^-24 each, and the errors of 20 steps add up like a random
// walk: 1e-6 for m, v and the parameters. bf16 parameters are exactly the rounded master.
#include "kernels/adamw.cuh"
#include "test/amax.h" // amax_case_set, amax_new, amax_expected
#include "test/testing.h"
#include <omp.h> // omp_set_num_threads

static const double FP32_STEPS = 1e-6;
static struct device device = {2, NULL};
static float *floats_of(int64_t n, const float *values) { // in the device's memory
    float *x = (float *)test_alloc((size_t)n * sizeof *x);
    memcpy(x, values, (size_t)n * sizeof *x);
    return x;
}
enum { STEPS = 20 };
#ifdef CUDA_EMULATED
enum { SLOW = 1 };
#else
enum { SLOW = 0 };
#endif

// The lines of torch's _single_tensor_adamw, one element.
static void reference_step(double *p, double *m, double *v, double g, struct adamw a) {
    *p *= 1 - (double)a.lr * a.weight_decay;
    *m += (g - *m) * (1 - (double)a.beta1);
    *v = *v * a.beta2 + (1 - (double)a.beta2) * g * g;
    const double correction1 = 1 - pow(a.beta1, (double)a.step), correction2 = 1 - pow(a.beta2, (double)a.step);
    *p -= a.lr / correction1 * *m / (sqrt(*v) / sqrt(correction2) + a.eps);
}

// The arrays begin `offset` elements after an aligned place, params `params_offset`: ranges of flat buffers, and arrays
// that are not.
static void check(int64_t n, bool with_master, float weight_decay, int offset, int params_offset) {
    uint64_t random = (uint64_t)n;
    test_case(random, "n %lld, %s, weight decay %g, states %d and parameters %d elements off alignment", (long long)n,
              with_master ? "master weights" : "no master weights", (double)weight_decay, offset, params_offset);
    double *p = test_doubles(n), *m = test_doubles(n), *v = test_doubles(n);
    float *master = (float *)test_alloc((size_t)(n + offset) * sizeof *master) + offset;
    float *grads = (float *)test_alloc((size_t)(n + offset) * sizeof *grads) + offset;
    float *m_got = (float *)test_alloc((size_t)(n + offset) * sizeof *m_got) + offset;
    float *v_got = (float *)test_alloc((size_t)(n + offset) * sizeof *v_got) + offset;
    floatX *params = (floatX *)test_alloc((size_t)(params_offset + n + 4) * sizeof *params) + params_offset;
    struct gradient_check *clip = (struct gradient_check *)test_alloc(sizeof *clip);
    memset(params - params_offset, 0x5a, (size_t)(params_offset + n + 4) * sizeof *params);
    for (int i = 0; i < offset; i++)
        master[i - offset] = grads[i - offset] = m_got[i - offset] = v_got[i - offset] = 77;
    clip->grad_norm = 2;
    clip->grad_scale = 0.5f;
    clip->finite = 1;
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
            reference_step(&p[i], &m[i], &v[i], (double)grads[i] * (step % 2 ? 0.25 : 0.125), adamw);
        }
        adamw_update(params, with_master ? master : NULL, grads, m_got, v_got, n, adamw, step % 2 ? NULL : clip,
                     &device);
    }
    double *m_result = floats_to_doubles(m_got, n), *v_result = floats_to_doubles(v_got, n);
    double *p_result = with_master ? floats_to_doubles(master, n) : to_doubles(params, n);
    assert_close(m_result, m, n, FP32_STEPS);
    assert_close(v_result, v, n, FP32_STEPS);
    assert_close(p_result, p, n, FP32_STEPS);
    if (with_master)
        for (int64_t i = 0; i < n; i++)
            assert_true(to_float(params[i]) == to_float(to_floatX(master[i])));
    for (int i = 0; i < offset; i++)
        assert_true(master[i - offset] == 77 && m_got[i - offset] == 77 && v_got[i - offset] == 77);
    for (size_t i = 0; i < params_offset * sizeof *params; i++)
        assert_int_equal(((unsigned char *)(params - params_offset))[i], 0x5a);
    for (size_t i = 0; i < 4 * sizeof *params; i++)
        assert_int_equal(((unsigned char *)&params[n])[i], 0x5a);
    void *all[] = {p,
                   m,
                   v,
                   m_result,
                   v_result,
                   p_result,
                   clip,
                   master - offset,
                   grads - offset,
                   m_got - offset,
                   v_got - offset,
                   params - params_offset};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static void twenty_steps(void **state) {
    const int64_t sizes[] = {1, 15, 16, 17, 1000, 1023, 1024, 1025, 5000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int decay = 0; decay < 2; decay++) {
            check(sizes[i], true, decay ? 0.1f : 0, 0, 0);
            if (sizeof(floatX) == 4)
                check(sizes[i], false, decay ? 0.1f : 0, 0, 0);
        }
}

// A range that begins anywhere, params at the same place or at another.
static void ranges(void **state) {
    for (int offset = 0; offset < 4; offset++)
        for (int64_t n = 1; n < 12; n += SLOW ? 3 : 1) {
            check(n, true, 0.1f, offset, offset);
            check(n, true, 0.1f, offset, 2);
            if (sizeof(floatX) == 4) {
                check(n, false, 0.1f, offset, offset);
                check(n, false, 0.1f, offset, 2);
            }
        }
}

// At step 1 the update is lr * sign(g), whatever the gradient's size: the corrections undo 1 - beta exactly.
static void first_step(void **state) {
    const float start[] = {1, -1}, gradients[] = {1e-3f, -50}, zeroes[] = {0, 0};
    floatX *params = (floatX *)test_alloc(2 * sizeof *params);
    float *master = floats_of(2, start), *grads = floats_of(2, gradients);
    float *m = floats_of(2, zeroes), *v = floats_of(2, zeroes);
    const struct adamw adamw = {0.125f, 0.9f, 0.999f, 0, 0, 1, 1};
    adamw_update(params, master, grads, m, v, 2, adamw, NULL, &device);
    assert_near(master[0], 0.875, 2e-7, 0);
    assert_near(master[1], -0.875, 2e-7, 1);
    void *all[] = {params, master, grads, m, v};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

// A bf16 parameter without a master: it is the rounded result of its own value.
static void without_master(void **state) {
    enum { N = 37 };
    uint64_t random = 6;
    test_case(random, "n %d, parameters without master weights", N);
    double *exact;
    floatX *params = test_floats(&exact, N, 1, &random);
    float *grads = (float *)test_alloc(N * sizeof *grads), *m = (float *)test_alloc(N * sizeof *m);
    float *v = (float *)test_alloc(N * sizeof *v);
    double *m_exact = test_doubles(N), *v_exact = test_doubles(N);
    const struct adamw adamw = {0.1f, 0.9f, 0.95f, 1e-8f, 0.1f, 1, 1};
    for (int i = 0; i < N; i++) {
        grads[i] = (float)test_uniform(&random);
        m[i] = v[i] = 0;
        reference_step(&exact[i], &m_exact[i], &v_exact[i], grads[i], adamw);
    }
    adamw_update(params, NULL, grads, m, v, N, adamw, NULL, &device);
    double *result = to_doubles(params, N);
    assert_close(result, exact, N, FLOATX_ROUNDING + FP32_STEPS);
    void *all[] = {params, exact, grads, m, v, m_exact, v_exact, result};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

// Where the check found a NaN or an infinity nothing is changed, to the bit.
static void nothing_changes(void **state) {
    enum { N = 1030 };
    uint64_t random = 3;
    test_case(random, "n %d, a gradient that is not finite", N);
    double *exact;
    floatX *params = test_floats(&exact, N, 1, &random), *params_before = (floatX *)test_alloc(N * sizeof *params);
    float *arrays[4], *before[4]; // master, grads, m, v
    struct gradient_check *check = (struct gradient_check *)test_alloc(sizeof *check);
    check->grad_norm = INFINITY;
    check->grad_scale = 0;
    check->finite = 0;
    memcpy(params_before, params, N * sizeof *params);
    for (int k = 0; k < 4; k++) {
        arrays[k] = (float *)test_alloc(N * sizeof(float));
        for (int i = 0; i < N; i++)
            arrays[k][i] = (float)fabs(test_uniform(&random));
        before[k] = floats_of(N, arrays[k]);
    }
    const struct adamw adamw = {0.1f, 0.9f, 0.95f, 1e-8f, 0.1f, 3, 1};
    for (int with_master = 0; with_master < 2; with_master++) {
        adamw_update(params, with_master ? arrays[0] : NULL, arrays[1], arrays[2], arrays[3], N, adamw, check, &device);
        assert_memory_equal(params, params_before, N * sizeof *params);
        for (int k = 0; k < 4; k++)
            assert_memory_equal(arrays[k], before[k], N * sizeof(float));
    }
    for (int k = 0; k < 4; k++) {
        free(arrays[k]);
        free(before[k]);
    }
    free(params);
    free(params_before);
    free(exact);
    free(check);
}

// The parameters' amax, as they are after an update and where it is skipped, does not change their bits. What stands
// around them is larger.
static void check_amax(int64_t n, bool with_master, bool finite, int offset, int amax_case, uint32_t before) {
    uint64_t random = (uint64_t)n;
    test_case(random, "amax, n %lld, %s, %s, %d elements off alignment, %s, from %x", (long long)n,
              with_master ? "master weights" : "no master weights", finite ? "updated" : "skipped", offset,
              amax_case_names[amax_case], before);
    const int64_t count = n + offset + 4;
    floatX *params[2];
    float *arrays[4] = {NULL}; // master, grads, m, v
    struct gradient_check *check = (struct gradient_check *)test_alloc(sizeof *check);
    uint32_t *amax = amax_new(before);
    check->grad_norm = 1;
    check->grad_scale = 1;
    check->finite = finite;
    for (int k = 0; k < 4; k++)
        arrays[k] = (float *)test_alloc((size_t)count * sizeof(float));
    for (int with_amax = 0; with_amax < 2; with_amax++) {
        random = (uint64_t)n;
        floatX *const p = params[with_amax] = (floatX *)test_alloc((size_t)count * sizeof *p);
        for (int64_t i = 0; i < count; i++) {
            p[i] = to_floatX(1e30f);
            arrays[0][i] = 1e30f;
            arrays[1][i] = arrays[2][i] = arrays[3][i] = 0;
        }
        for (int64_t i = offset; i < offset + n; i++) {
            p[i] = to_floatX((float)test_uniform(&random));
            arrays[1][i] = amax_case == AMAX_ZEROS ? 0 : (float)test_uniform(&random);
        }
        amax_case_set(p + offset, n, amax_case);
        for (int64_t i = offset; i < offset + n; i++)
            arrays[0][i] = to_float(p[i]);
        struct adamw adamw = {0.1f, 0.9f, 0.95f, 1e-8f, 0.1f, 1, 1};
        adamw.amax = with_amax ? amax : NULL;
        adamw_update(p + offset, with_master ? arrays[0] + offset : NULL, arrays[1] + offset, arrays[2] + offset,
                     arrays[3] + offset, n, adamw, check, &device);
    }
    assert_memory_equal(params[1], params[0], (size_t)count * sizeof **params);
    assert_int_equal(*amax, amax_expected(before, params[1] + offset, n));
    void *all[] = {params[0], params[1], arrays[0], arrays[1], arrays[2], arrays[3], check, amax};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}
static void amax_is_of_the_parameters_afterwards(void **state) {
    const int64_t sizes[] = {1, 2, 5, 15, 1023, 1024, 1025, 5000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int k = 0; k < 4 * AMAX_CASES; k++) {
            const int offset = (int)(i + (size_t)k) % 4;
            check_amax(sizes[i], k & 1, k & 2, offset, k / 4, 0);
            check_amax(sizes[i], k & 1, k & 2, offset, k / 4, 0x7f000000u); // larger than any that is finite
        }
}

// What gradient_check makes of a sum of squares and of losses of which one may be broken, each over 8 targets of which
// `counted` counted.
enum { TARGETS = 8 };
static struct gradient_check checked_counted(double squares, int num_losses, int broken_at, double broken, double clip,
                                             int counted) {
    struct gradient_check *check = (struct gradient_check *)test_alloc(sizeof *check), result;
    const int width = REPORT_LOSSES + 2 * num_losses + 1;
    double *reports = test_doubles(width), *losses = reports + REPORT_LOSSES;
    reports[REPORT_SQUARES] = squares;
    reports[width - 1] = NAN; // is no loss
    for (int i = 0; i < num_losses; i++) {
        losses[2 * i] = i == broken_at ? broken : 4 - 0.01 * i;
        losses[2 * i + 1] = counted;
    }
    losses[2 * num_losses] = NAN; // one behind the end
    memset(check, 0xff, sizeof *check);
    gradient_check(check, reports, 1, width, num_losses, (double)num_losses * TARGETS, clip, &device);
    result = *check;
    free(check);
    free(reports);
    return result;
}
static struct gradient_check checked(double squares, int num_losses, int broken_at, double broken, double clip) {
    return checked_counted(squares, num_losses, broken_at, broken, clip, TARGETS);
}
// The gradients of a mean over fewer targets are larger, and are clipped as those.
static void checks_of_targets_that_do_not_count(void **state) {
    struct gradient_check c = checked_counted(16, 3, -1, 0, 0, 2);
    assert_true(c.grad_norm == 16 && c.grad_scale == 4 && c.finite == 1);
    c = checked_counted(16, 3, -1, 0, 1, 2);
    assert_true(c.grad_norm == 16 && c.grad_scale == (float)(4 / (16 + 1e-6)) && c.finite == 1);
    c = checked_counted(16, 3, -1, 0, 1, 0); // none counts
    assert_true(c.grad_norm == 0 && c.grad_scale == 0 && c.finite == 1);
}
static void checks(void **state) {
    const int counts[] = {0, 1, 2, 31, 32, 33, 70};
    for (size_t k = 0; k < sizeof counts / sizeof *counts; k++) {
        const int n = counts[k];
        test_case_without_seed("%d losses", n);
        struct gradient_check c = checked(16, n, -1, 0, 1); // clipped from 4 to 1
        assert_true(c.grad_norm == 4 && c.grad_scale == (float)(1 / (4 + 1e-6)) && c.finite == 1);
        c = checked(16, n, -1, 0, 5); // short enough
        assert_true(c.grad_norm == 4 && c.grad_scale == 1 && c.finite == 1);
        c = checked(1e200, n, -1, 0, 0); // never clipped
        assert_true(c.grad_norm == 1e100 && c.grad_scale == 1 && c.finite == 1);
        c = checked(0, n, -1, 0, 1e-7); // torch's 1e-6
        assert_true(c.grad_norm == 0 && c.grad_scale == (float)(1e-7 / 1e-6) && c.finite == 1);
        assert_int_equal(checked(INFINITY, n, -1, 0, 1).finite, 0);
        assert_int_equal(checked(NAN, n, -1, 0, 0).finite, 0);
        for (int at = 0; at < n; at++) {
            assert_int_equal(checked(16, n, at, NAN, 1).finite, 0);
            assert_int_equal(checked(16, n, at, -INFINITY, 1).finite, 0);
        }
    }
}

// The squares of all ranks are added in their order, and any rank's losses can break the step.
static void checks_of_ranks(void **state) {
    enum { RANKS = 3, LOSSES = 2, WIDTH = REPORT_LOSSES + 2 * LOSSES + 1 };
    struct gradient_check *check = (struct gradient_check *)test_alloc(sizeof *check);
    double *reports = test_doubles(RANKS * WIDTH);
    const double squares[RANKS] = {1, 1e-16, 1e-16}; // together nothing, if 1 comes first
    for (int broken = -1; broken < RANKS * LOSSES; broken++) {
        for (int r = 0; r < RANKS; r++) {
            reports[r * WIDTH + REPORT_SQUARES] = squares[r];
            reports[r * WIDTH + WIDTH - 1] = NAN;
            for (int i = 0; i < LOSSES; i++) {
                reports[r * WIDTH + REPORT_LOSSES + 2 * i] = r * LOSSES + i == broken ? INFINITY : 3;
                reports[r * WIDTH + REPORT_LOSSES + 2 * i + 1] = r + i; // 9 of 18 together
            }
        }
        gradient_check(check, reports, RANKS, WIDTH, LOSSES, 18, 0, &device);
        assert_true(check->grad_norm == 2);
        assert_int_equal(check->finite, broken < 0);
    }
    free(check);
    free(reports);
}

static void additions(void **state) {
    const int64_t sizes[] = {0, 1, 3, 4, 1023, 1024, 1025, 10007};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        const int64_t n = sizes[k];
        test_case_without_seed("n %lld", (long long)n);
        float *out = (float *)test_alloc((size_t)(n + 4) * sizeof *out),
              *in = (float *)test_alloc((size_t)(n + 4) * sizeof *in);
        for (int64_t i = 0; i < n + 4; i++) {
            out[i] = (float)i;
            in[i] = 0.5f;
        }
        add_floats(out, in, n, &device);
        for (int64_t i = 0; i < n + 4; i++)
            assert_true(out[i] == (float)i + (i < n ? 0.5f : 0));
        free(out);
        free(in);
    }
}

static double squares_of(const float *x, int64_t n) {
    double *total = test_doubles(1);
    void *workspace = test_alloc(sum_of_squares_workspace_bytes());
    *total = NAN;
    sum_of_squares(total, x, n, false, workspace, &device);
    const double result = *total;
    sum_of_squares(total, x, n, true, workspace, &device); // the same again on top
    assert_true(*total == 2 * result || isnan(result));
    free(workspace);
    free(total);
    return result;
}
enum { ALIGNMENTS = SLOW ? 1 : 4 }; // of each size: a thousand blocks a sum take the emulator a quarter of a second
static void sums(void **state) {
    const int64_t sizes[] = {0, 1, 2, 4, 5, 255, 256, 257, 100003, 1100007};
    for (size_t k = 0; k < ALIGNMENTS * sizeof sizes / sizeof *sizes; k++) {
        const int64_t n = sizes[k / ALIGNMENTS];
        uint64_t random = 2;
        test_case(random, "n %lld, %zu elements off alignment", (long long)n, k % 4);
        float *memory = (float *)test_alloc((size_t)(n + 8) * sizeof *memory), *x = memory + k % 4; // aligned or not
        double expected = 0;
        for (int64_t i = 0; i < n + 4; i++) {             // 4 that do not belong to it
            x[i] = (float)(1e20 * test_uniform(&random)); // whose squares no float holds
            expected += i < n ? (double)x[i] * x[i] : 0;
        }
        const int threads = omp_get_max_threads();
        omp_set_num_threads(1);
        const double one = squares_of(x, n);
        omp_set_num_threads(7);
        const double seven = squares_of(x, n);
        omp_set_num_threads(threads);
        assert_true(one == seven);
        assert_near(one, expected, 1e-12 * expected, 0);
        if (n > 256) {
            x[n - 1] = INFINITY;
            assert_true(squares_of(x, n) == INFINITY);
            x[n / 2] = NAN;
            assert_true(isnan(squares_of(x, n)));
        }
        free(memory);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(twenty_steps),
        cmocka_unit_test(ranges),
        cmocka_unit_test(first_step),
        cmocka_unit_test(without_master),
        cmocka_unit_test(nothing_changes),
        cmocka_unit_test(amax_is_of_the_parameters_afterwards),
        cmocka_unit_test(sums),
        cmocka_unit_test(checks),
        cmocka_unit_test(checks_of_targets_that_do_not_count),
        cmocka_unit_test(checks_of_ranks),
        cmocka_unit_test(additions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
