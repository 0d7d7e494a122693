// Muon's parts: Newton-Schulz iterations (optimizer/orthogonalize.cuh) against singular values in double; the momentum
// and the step (kernels/muon.cuh) against double; and ten steps of torch.optim.Muon (test/golden/muon.golden).
//
// Tolerances. An iteration: three deviations by random roundings (newton_schulz_deviation). Elementwise ops: one
// rounding of each number that is stored, and a few in fp32.
#include "kernels/amax.cuh" // amax_with
#include "kernels/muon.cuh"
#include "optimizer/orthogonalize.cuh"
#include "test/amax.h"
#include "test/fails.h"
#include "test/golden.h"
#include "test/svd.h"
#include <omp.h>

static struct device device;
static struct timeline timeline;
static struct plan_phase phases[1];
static const enum config_muon_coefficient_type types[] = {MUON_SIMPLE, MUON_QUINTIC, MUON_POLAR_EXPRESS,
                                                          MUON_DEEPSEEKV4, MUON_CLASSIC};
enum { TYPES = sizeof types / sizeof *types };
#ifdef CUDA_EMULATED
enum { EMULATED = 1 };
#else
enum { EMULATED = 0 };
#endif

static void orthogonalize_once(floatX *x, int rows, int cols, const struct newton_schulz *ns) {
    void *workspace = test_alloc(orthogonalize_workspace_bytes(rows, cols, &device));
    memset(workspace, 0xff, orthogonalize_workspace_bytes(rows, cols, &device)); // NaN
    orthogonalize(&timeline, x, rows, cols, ns, workspace);
    device_synchronize(&device);
    free(workspace);
}

// ---- Newton-Schulz iterations ----

enum kind { NORMAL, RANK_DEFICIENT, CONDITION_1000, RANK_ONE };
// Returns a matrix (rows, cols) of floatX, and in *exact the same values in double; the caller frees them.
static floatX *matrix_of(double **exact, int rows, int cols, enum kind kind, double size, uint64_t *random) {
    const int64_t n = (int64_t)rows * cols;
    const int side = rows < cols ? rows : cols, rank = kind == RANK_DEFICIENT ? (side + 2) / 3
                                                       : kind == RANK_ONE     ? 1
                                                                              : side;
    double *x = test_doubles(n), *a = test_doubles((int64_t)rows * rank), *b = test_doubles((int64_t)rank * cols);
    for (int64_t i = 0; i < (int64_t)rows * rank; i++)
        a[i] = test_uniform(random) + test_uniform(random) + test_uniform(random);
    for (int64_t i = 0; i < (int64_t)rank * cols; i++)
        b[i] = test_uniform(random) + test_uniform(random) + test_uniform(random);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++)
            for (int k = 0; k < rank && kind != NORMAL; k++)
                x[(int64_t)i * cols + j] +=
                    a[(int64_t)i * rank + k] * b[(int64_t)k * cols + j] *
                    (kind == CONDITION_1000 ? pow(1e-3, (double)k / (side > 1 ? side - 1 : 1)) : 1);
    for (int64_t i = 0; i < n && kind == NORMAL; i++)
        x[i] = test_uniform(random) + test_uniform(random) + test_uniform(random);
    floatX *result = (floatX *)test_alloc((size_t)n * sizeof *result);
    *exact = test_doubles(n);
    for (int64_t i = 0; i < n; i++) {
        result[i] = to_floatX((float)(size * x[i]));
        (*exact)[i] = to_float(result[i]);
    }
    free(x);
    free(a);
    free(b);
    return result;
}
static void check_iteration(int rows, int cols, enum kind kind, double size, enum config_muon_coefficient_type type,
                            int steps) {
    const struct newton_schulz ns = newton_schulz_of(type, steps);
    const int64_t n = (int64_t)rows * cols;
    uint64_t random = (uint64_t)(rows * 100 + cols);
    double *exact, *expected = test_doubles(n);
    floatX *x = matrix_of(&exact, rows, cols, kind, size, &random);
    test_case(random, "%d x %d of kind %d times %g, type %d, %d steps", rows, cols, (int)kind, size, (int)type,
              ns.steps);
    newton_schulz_exact(expected, exact, rows, cols, &ns);
    orthogonalize_once(x, rows, cols, &ns);
    double *got = to_doubles(x, n);
    assert_close(got, expected, n, 3 * newton_schulz_deviation(exact, expected, rows, cols, &ns));
    for (int64_t i = 0; i < n; i++)
        assert_true(isfinite(got[i]));
    free(x);
    free(exact);
    free(expected);
    free(got);
}
static void iterations_are_polynomials_of_the_singular_values(void **state) {
    static const int shapes[][2] = {{24, 24}, {24, 40}, {40, 24}, {8, 64}, {33, 17},
                                    {1, 40},  {40, 1},  {1, 1},   {16, 17}};
    const int kinds = EMULATED ? NORMAL : RANK_ONE; // the emulator's threads are fibers
    for (int t = 0; t < TYPES; t += EMULATED ? 2 : 1)
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
            for (int kind = NORMAL; kind <= kinds; kind++)
                check_iteration(shapes[s][0], shapes[s][1], (enum kind)kind, 1, types[t], 0);
}
// Checks any number of steps: one step shows a wrong coefficient at once; more steps than the type's list has repeat
// the list or its last step.
static void any_number_of_steps(void **state) {
    static const int steps[] = {1, 2, 3, 7, 11};
    for (int t = 0; t < TYPES; t++)
        for (int k = 0; k < (EMULATED ? 2 : 5); k++)
            check_iteration(12, 20, NORMAL, 1, types[t], steps[k]);
    const struct newton_schulz quintic = newton_schulz_of(MUON_QUINTIC, 12),
                               polar = newton_schulz_of(MUON_POLAR_EXPRESS, 12);
    assert_true(newton_schulz_step_of(&quintic, 6).a == quintic.list[1].a);
    assert_true(newton_schulz_step_of(&polar, 6).a == polar.list[4].a);
}
// Checks that singular values from 1e-2 of the norm on end near 1, within the bounds that each type's list gives.
static void singular_values_end_near_1(void **state) {
    static const double least[TYPES] = {0.68, 0.97, 0.84, 0.99, 0.99}, most[TYPES] = {1.14, 1.04, 1.15, 1.01, 1.01};
    for (int t = 0; t < TYPES; t++) {
        const struct newton_schulz ns = newton_schulz_of(types[t], 0);
        for (double x = 1e-2; x <= 1; x *= 1.01) {
            double y = x / ns.divisor;
            for (int k = 0; k < ns.steps; k++)
                y = newton_schulz_value(y, newton_schulz_step_of(&ns, k));
            if (!(y >= least[t] && y <= most[t]))
                fail_msg("type %d takes %g to %g", (int)types[t], x, y);
        }
    }
}
// Checks that a power of two changes no bit, and another factor at most the roundings of U.
static void size_does_not_matter(void **state) {
    static const double sizes[] = {1e-30, 1e-8, 1e8, 1e30};
    const struct newton_schulz ns = newton_schulz_of(MUON_POLAR_EXPRESS, 0);
    uint64_t random = 3, again = 3;
    double *exact_x, *exact_y;
    floatX *x = matrix_of(&exact_x, 16, 24, NORMAL, 1, &random);
    floatX *y = matrix_of(&exact_y, 16, 24, NORMAL, 0x1p-40, &again);
    orthogonalize_once(x, 16, 24, &ns);
    orthogonalize_once(y, 16, 24, &ns);
    assert_memory_equal(x, y, 16 * 24 * sizeof *x);
    for (int i = 0; i < 4; i++)
        check_iteration(16, 24, NORMAL, sizes[i], MUON_POLAR_EXPRESS, 0);
    free(exact_x);
    free(exact_y);
    free(x);
    free(y);
}
static void zero_stays_zero(void **state) {
    for (int t = 0; t < TYPES; t++) {
        const struct newton_schulz ns = newton_schulz_of(types[t], 0);
        floatX *x = (floatX *)test_alloc(20 * 12 * sizeof *x);
        memset(x, 0, 20 * 12 * sizeof *x);
        orthogonalize_once(x, 20, 12, &ns);
        for (int i = 0; i < 20 * 12; i++)
            assert_true(to_float(x[i]) == 0);
        free(x);
    }
}
// Checks a momentum whose gradients are 0 from some step on: it decays through the subnormal floats, and stays finite.
static void subnormal_stays_finite(void **state) {
    const struct newton_schulz ns = newton_schulz_of(MUON_POLAR_EXPRESS, 0);
    floatX *x = (floatX *)test_alloc(12 * 20 * sizeof *x);
    for (int i = 0; i < 12 * 20; i++)
        x[i] = to_floatX(i % 21 == 0 ? 1e-40f : 0.0f);
    orthogonalize_once(x, 12, 20, &ns);
    for (int i = 0; i < 12 * 20; i++)
        assert_true(fabsf(to_float(x[i])) < 2);
    free(x);
}

// ---- momentum ----

// Three tensors with gaps; one is longer than what a thread takes at a time.
enum { TENSORS = 3, FLAT = 128 + 256 + 24 * 128 };
static struct flat_tensors tensors_of(struct flat_tensor rows[TENSORS], uint32_t *amax) {
    static const int64_t begins[TENSORS] = {0, 128, 384}, counts[TENSORS] = {100, 256, 24 * 128 - 5};
    const struct flat_tensors tensors = {rows, TENSORS, amax != NULL};
    memset(rows, 0, TENSORS * sizeof *rows);
    for (int i = 0; i < TENSORS; i++) {
        rows[i].begin = begins[i];
        rows[i].end = begins[i] + counts[i];
        rows[i].decays = i != 1;
        rows[i].amax = amax && i > 0 ? amax + i : NULL;
        rows[i].lr_scale = i == 2 ? 0.5f : 1;
    }
    return tensors;
}
static bool in_a_tensor(const struct flat_tensors *tensors, int64_t at) {
    for (int i = 0; i < tensors->count; i++)
        if (at >= tensors->rows[i].begin && at < tensors->rows[i].end)
            return true;
    return false;
}
// Returns the error of a rounding to a stored format, relative to the largest element of a block.
static double format_error(enum state_format format) {
    return format == FORMAT_8BIT ? 1.0 / 50 : format == FORMAT_BF16 ? 0x1p-8 : 0x1p-22;
}
static void check_momentum(enum state_format format, enum state_format grads_format, bool nesterov, bool finite) {
    struct flat_tensor *rows = (struct flat_tensor *)test_alloc(TENSORS * sizeof *rows);
    const struct flat_tensors tensors = tensors_of(rows, NULL);
    struct gradient_check *check = (struct gradient_check *)test_alloc(sizeof *check);
    const struct gradient_check value = {1, 0.25f, finite};
    const float mu = 0.9f;
    uint64_t random = 11;
    float *start = (float *)test_alloc(FLAT * sizeof *start), *g = (float *)test_alloc(FLAT * sizeof *g);
    char *m = (char *)test_alloc(state_bytes(format, FLAT)), *before = (char *)test_alloc(state_bytes(format, FLAT));
    char *grads = (char *)test_alloc(state_bytes(grads_format, FLAT));
    floatX *update = (floatX *)test_alloc(FLAT * sizeof *update);
    test_case(random, "momentum in format %d, gradients in %d, nesterov %d, finite %d", (int)format, (int)grads_format,
              nesterov, finite);
    *check = value;
    for (int i = 0; i < FLAT; i++) {
        start[i] = in_a_tensor(&tensors, i) ? (float)test_uniform(&random) : 0;
        g[i] = (float)(3 * test_uniform(&random));
    }
    state_encode(m, start, format, FLAT);
    state_decode(start, m, format, FLAT);
    state_encode(grads, g, grads_format, FLAT);
    state_decode(g, grads, grads_format, FLAT);
    memcpy(before, m, state_bytes(format, FLAT));
    memset(update, 0x11, FLAT * sizeof *update);
    struct muon_momentum_range r = {grads, grads_format, m, format, update, FLAT, 0, mu, nesterov};
    muon_momentum(r, tensors, check, &device);
    device_synchronize(&device);
    if (!finite)
        assert_memory_equal(m, before, state_bytes(format, FLAT));
    float *got = (float *)test_alloc(FLAT * sizeof *got);
    state_decode(got, m, format, FLAT);
    for (int i = 0; i < FLAT; i++) {
        if (!in_a_tensor(&tensors, i))
            continue;
        const double grad = 0.25 * g[i], next = mu * (double)start[i] + (1 - (double)mu) * grad;
        const double u = !finite ? 0 : nesterov ? mu * next + (1 - (double)mu) * grad : next;
        if (finite)
            assert_near(got[i], next, 2 * format_error(format), i);
        assert_near(to_float(update[i]), u, 2 * FLOATX_ROUNDING + 1e-6, i);
    }
    free(start);
    free(g);
    free(m);
    free(before);
    free(grads);
    free(update);
    free(got);
    free(check);
    free(rows);
}
static void momentum_in_each_format(void **state) {
    static const enum state_format formats[] = {FORMAT_FP32, FORMAT_BF16, FORMAT_8BIT};
    for (int f = 0; f < 3; f++)
        for (int variant = 0; variant < 8; variant++)
            check_momentum(formats[f], variant & 1 ? FORMAT_BF16 : FORMAT_FP32, variant & 2, variant & 4);
}

// ---- the step ----

// Returns matrices that cut the tensors at any element.
static struct flat_tensors matrices_of(struct flat_tensor rows[5]) {
    static const int64_t begins[5] = {0, 128, 128 + 77, 384, 384 + 1501},
                         ends[5] = {100, 128 + 77, 384, 384 + 1501, 384 + 24 * 128 - 5};
    static const float scales[5] = {1, 0.5f, 2, 3, 0.25f};
    const struct flat_tensors matrices = {rows, 5, false};
    memset(rows, 0, 5 * sizeof *rows);
    for (int i = 0; i < 5; i++) {
        rows[i].begin = begins[i];
        rows[i].end = ends[i];
        rows[i].scale = scales[i];
    }
    return matrices;
}
// Checks a step of range [begin, end) of the flat buffers.
static void check_step(bool remainder, bool finite, int begin, int end) {
    struct flat_tensor *rows = (struct flat_tensor *)test_alloc(TENSORS * sizeof *rows),
                       *matrix_rows = (struct flat_tensor *)test_alloc(5 * sizeof *rows);
    uint32_t *amax = (uint32_t *)test_alloc(TENSORS * sizeof *amax);
    struct gradient_check *check = (struct gradient_check *)test_alloc(sizeof *check);
    const struct gradient_check value = {1, 0.25f, finite};
    const struct flat_tensors tensors = tensors_of(rows, amax), matrices = matrices_of(matrix_rows);
    floatX *params = (floatX *)test_alloc(FLAT * sizeof *params), *factor = (floatX *)test_alloc(FLAT * sizeof *factor),
           *before = (floatX *)test_alloc(FLAT * sizeof *before);
    uint16_t *low = (uint16_t *)test_alloc(FLAT * sizeof *low),
             *low_before = (uint16_t *)test_alloc(FLAT * sizeof *low);
    double *exact = test_doubles(FLAT);
    uint64_t random = 5;
    memset(amax, 0, TENSORS * sizeof *amax);
    *check = value;
    test_case(random, "remainder %d, finite %d, elements %d to %d", remainder, finite, begin, end);
    for (int i = 0; i < FLAT; i++) {
        const float x = (float)test_uniform(&random);
        params[i] = before[i] = parameter_rounded(x);
        low[i] = low_before[i] = split_low(x);
        exact[i] = remainder ? parameter_joined(params[i], low[i]) : to_float(params[i]);
        factor[i] = to_floatX((float)test_uniform(&random));
    }
    const struct rounding rounding = {42, 3, NULL, 0, ROUNDING_UPDATE, 0};
    struct muon_step_range r = {
        params + begin, remainder ? low + begin : NULL, factor + begin, end - begin, begin, 0.125f, 0.5f, rounding};
    muon_step(r, tensors, matrices, check, &device);
    device_synchronize(&device);
    uint32_t largest[TENSORS] = {0};
    for (int i = 0; i < FLAT; i++) {
        int tensor = 0, matrix = 0;
        while (tensor < TENSORS && i >= rows[tensor].end)
            tensor++;
        while (matrix < 5 && i >= matrix_rows[matrix].end)
            matrix++;
        const bool inside = i >= begin && i < end && in_a_tensor(&tensors, i);
        if (!inside || !finite) {
            assert_memory_equal(&params[i], &before[i], sizeof *params);
            assert_int_equal(low[i], low_before[i]);
        } else {
            const double got = remainder ? parameter_joined(params[i], low[i]) : to_float(params[i]);
            const double lr = 0.125 * (double)rows[tensor].lr_scale;
            const double expected = (rows[tensor].decays ? 1 - lr * 0.5 : 1) * exact[i] -
                                    lr * (double)matrix_rows[matrix].scale * to_float(factor[i]);
            assert_near(got, expected, remainder ? 2e-7 : 2e-7 + 2 * FLOATX_ROUNDING * fabs(expected), i);
        }
        if (inside && rows[tensor].amax)
            largest[tensor] = amax_with(largest[tensor], params[i]);
    }
    for (int i = 1; i < TENSORS; i++)
        assert_int_equal(amax[i], largest[i]);
    free(rows);
    free(matrix_rows);
    free(amax);
    free(check);
    free(params);
    free(factor);
    free(before);
    free(low);
    free(low_before);
    free(exact);
}
static void steps_with_and_without_a_remainder(void **state) {
    for (int variant = 0; variant < 4; variant++) {
        const bool remainder = sizeof(floatX) == 2 && variant & 1;
        check_step(remainder, variant & 2, 0, FLAT);
        check_step(remainder, variant & 2, 128, 384 + 1920);
        check_step(remainder, variant & 2, 384, 384 + 24 * 128 - 5);
    }
}
// Checks that without a remainder a bf16 parameter moves, in the mean, by less than its spacing.
static void small_steps_are_kept_in_the_mean(void **state) {
    enum { N = 24 * 128 - 5 };
    struct flat_tensor *rows = (struct flat_tensor *)test_alloc(sizeof *rows);
    floatX *params = (floatX *)test_alloc(N * sizeof *params), *factor = (floatX *)test_alloc(N * sizeof *factor);
    struct flat_tensors tensors = {rows, 1, false};
    memset(rows, 0, sizeof *rows);
    rows->end = N;
    rows->scale = rows->lr_scale = 1;
    for (int i = 0; i < N; i++) {
        params[i] = to_floatX(1);
        factor[i] = to_floatX(-1);
    }
    const struct rounding rounding = {42, 3, NULL, 0, ROUNDING_UPDATE, 0};
    struct muon_step_range r = {params, NULL, factor, N, 0, 0x1p-10f, 0, rounding};
    muon_step(r, tensors, tensors, NULL, &device);
    device_synchronize(&device);
    double sum = 0;
    for (int i = 0; i < N; i++)
        sum += to_float(params[i]) - 1.0;
    assert_near(sum / N, 0x1p-10, 5 * 0x1p-7 * 0.5 / sqrt((double)N),
                0); // 5 deviations of a mean of numbers that are 2^-7 apart
    free(rows);
    free(params);
    free(factor);
}

// ---- torch.optim.Muon ----

// Checks ten steps of a matrix of the golden file by the ops, against torch's.
static void golden_steps(const struct golden *g, int index) {
    char name[32];
    snprintf(name, sizeof name, "start.%d", index);
    const struct golden_tensor *start = golden_tensor(g, name);
    snprintf(name, sizeof name, "grads.%d", index);
    const struct golden_tensor *grads = golden_tensor(g, name);
    snprintf(name, sizeof name, "values.%d", index);
    const struct golden_tensor *values = golden_tensor(g, name);
    const int rows = (int)start->dims[0], cols = (int)start->dims[1], steps = (int)grads->dims[0];
    const int64_t n = start->count;
    const struct newton_schulz ns = newton_schulz_of(MUON_SIMPLE, 5);
    struct flat_tensor *row = (struct flat_tensor *)test_alloc(sizeof *row);
    struct flat_tensors tensors = {row, 1, false};
    memset(row, 0, sizeof *row);
    row->end = n;
    row->decays = true;
    row->lr_scale = 1;
    row->scale = (float)(0.2 * muon_scale(MUON_SCALE_SPECTRAL, rows, cols));
    floatX *params = (floatX *)test_alloc((size_t)n * sizeof *params),
           *update = (floatX *)test_alloc((size_t)n * sizeof *update);
    uint16_t *low = (uint16_t *)test_alloc((size_t)n * sizeof *low);
    float *momentum = (float *)test_alloc((size_t)n * sizeof *momentum),
          *grad = (float *)test_alloc((size_t)n * sizeof *grad);
    double *got = test_doubles(n), *expected = test_doubles(n);
    memset(momentum, 0, (size_t)n * sizeof *momentum);
    for (int64_t i = 0; i < n; i++) {
        params[i] = parameter_rounded(start->floats[i]);
        low[i] = split_low(start->floats[i]);
    }
    double error = 0; // the sum over the steps of what rounding does to a factor
    for (int step = 0; step < steps; step++) {
        memcpy(grad, grads->floats + step * n, (size_t)n * sizeof *grad);
        struct muon_momentum_range r = {grad, FORMAT_FP32, momentum, FORMAT_FP32, update, n, 0, 0.95f, true};
        muon_momentum(r, tensors, NULL, &device);
        device_synchronize(&device);
        double *exact = to_doubles(update, n), *factor = test_doubles(n);
        newton_schulz_exact(factor, exact, rows, cols, &ns);
        error += 3 * newton_schulz_deviation(exact, factor, rows, cols, &ns);
        orthogonalize_once(update, rows, cols, &ns);
        const struct rounding rounding = {42, 3, NULL, 0, ROUNDING_UPDATE, 0};
        struct muon_step_range s = {params, sizeof(floatX) == 2 ? low : NULL, update, n,
                                    0,      golden_floats(g, "lr")[step],     0.1f,   rounding};
        muon_step(s, tensors, tensors, NULL, &device);
        device_synchronize(&device);
        double scale = 0; // of the updates so far, at most: RMS 0.2 lr
        for (int k = 0; k <= step; k++)
            scale += 0.2 * golden_floats(g, "lr")[k];
        for (int64_t i = 0; i < n; i++) {
            got[i] = sizeof(floatX) == 2 ? parameter_joined(params[i], low[i]) : to_float(params[i]);
            expected[i] = values->floats[step * n + i];
        }
        test_case_without_seed("matrix %d, %d x %d, step %d", index, rows, cols, step + 1);
        double squares = 0;
        for (int64_t i = 0; i < n; i++)
            squares += (got[i] - expected[i]) * (got[i] - expected[i]);
        const double bound = error / (step + 1) * scale + 1e-6;
        if (!(sqrt(squares / (double)n) <= bound))
            fail_msg("off by %.3g in the root mean square, allowed %.3g", sqrt(squares / (double)n), bound);
        free(exact);
        free(factor);
    }
    free(row);
    free(params);
    free(update);
    free(low);
    free(momentum);
    free(grad);
    free(got);
    free(expected);
}
static void steps_of_torch(void **state) {
    struct golden *g = golden_open("test/golden/muon.golden");
    for (int i = 0; i < golden_int(g, "matrices"); i++)
        golden_steps(g, i);
    golden_close(g);
}

int main(void) {
    test_keep_memory();
    device.threads = omp_get_max_threads();
    device_open(&device, 0, false);
    device.matmul = matmul_create(&device);
    timeline.dev = &device;
    timeline.plan.phases = phases;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(iterations_are_polynomials_of_the_singular_values),
        cmocka_unit_test(any_number_of_steps),
        cmocka_unit_test(singular_values_end_near_1),
        cmocka_unit_test(size_does_not_matter),
        cmocka_unit_test(zero_stays_zero),
        cmocka_unit_test(subnormal_stays_finite),
        cmocka_unit_test(momentum_in_each_format),
        cmocka_unit_test(steps_with_and_without_a_remainder),
        cmocka_unit_test(small_steps_are_kept_in_the_mean),
        cmocka_unit_test(steps_of_torch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
