// kernels/loss.cuh against the formula in double, its gradient by finite differences, and logits that are huge or
// broken.
//
// Tolerances. The loss is an fp32 sum of exponentials of one unit's error each, its logarithm, and a difference of
// numbers of the size of the largest logit's distance: 1e-6 of (1 + loss). Gradient in fp32: x - shift is rounded once
// before the exponential, where |x - shift| <= 34 for all that counts: 34 * 2^-24 = 2e-6 relative, random over the row,
// and the rest is smaller: 2e-6. In bf16: one rounding, and a tenth.
#include "kernels/loss.cuh"
#include "test/testing.h"

#define TOLERANCE (sizeof(floatX) == 2 ? 1.1 * FLOATX_ROUNDING : 2e-6)
static struct device device = {2, NULL};

static double reference_loss(const double *logits, int target, int V) {
    double max = logits[0], sum = 0;
    for (int i = 0; i < V; i++)
        max = fmax(max, logits[i]);
    for (int i = 0; i < V; i++)
        sum += exp(logits[i] - max);
    return max + log(sum) - logits[target];
}

struct problem {
    int N, V, Vp;
    floatX *logits;
    double *exact;
    int32_t *targets;
    float *losses;
};
// The padded columns hold what would spoil every sum that reads them.
static struct problem problem_create(int N, int V, int Vp, double scale, double shift, double slope) {
    struct problem p;
    uint64_t random = (uint64_t)(V + N);
    test_case(random, "N %d, V %d, padded to %d, logits of %g around %g, growing by %g", N, V, Vp, scale, shift, slope);
    p.N = N;
    p.V = V;
    p.Vp = Vp;
    p.logits = test_floats(&p.exact, (int64_t)N * Vp, scale, &random);
    p.targets = (int32_t *)test_alloc((size_t)N * sizeof *p.targets);
    p.losses = (float *)test_alloc((size_t)N * sizeof *p.losses);
    for (int n = 0; n < N; n++) {
        p.targets[n] = n == 0 ? V - 1 : n == 1 ? 0 : (int32_t)(test_random(&random) % (uint64_t)V);
        for (int i = 0; i < Vp; i++) {
            const int64_t at = (int64_t)n * Vp + i;
            p.logits[at] = i < V ? to_floatX((float)(p.exact[at] + shift + slope * i)) : to_floatX(i % 2 ? NAN : 1e30f);
            p.exact[at] = to_float(p.logits[at]);
        }
    }
    return p;
}
static void problem_free(struct problem p) {
    void *all[] = {p.logits, p.exact, p.targets, p.losses};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static double sum_of(const float *losses, int64_t N, double scale) {
    double *total = test_doubles(1);
    losses_sum(total, losses, N, scale, &device);
    const double result = *total;
    free(total);
    return result;
}

static void check(int N, int V, int Vp, double scale, double shift, double slope) {
    struct problem p = problem_create(N, V, Vp, scale, shift, slope);
    const float dloss = 0.37f;
    floatX *before = (floatX *)test_alloc((size_t)N * Vp * sizeof *before);
    memcpy(before, p.logits, (size_t)N * Vp * sizeof *before);
    cross_entropy(p.losses, p.logits, p.targets, dloss, N, V, Vp, false, &device);
    assert_memory_equal(before, p.logits, (size_t)N * Vp * sizeof *before); // without backward nothing is written
    float *losses = (float *)test_alloc((size_t)N * sizeof *losses);
    memcpy(losses, p.losses, (size_t)N * sizeof *losses);
    cross_entropy(p.losses, p.logits, p.targets, dloss, N, V, Vp, true, &device);
    assert_memory_equal(losses, p.losses, (size_t)N * sizeof *losses);

    double *expected = test_doubles((int64_t)N * Vp), total = 0;
    for (int n = 0; n < N; n++) {
        const double *row = p.exact + (int64_t)n * Vp;
        const double loss = reference_loss(row, p.targets[n], V), log_sum = loss + row[p.targets[n]];
        assert_near(p.losses[n], loss, 1e-6 * (1 + fabs(loss)), n);
        total += p.losses[n];
        for (int i = 0; i < V; i++)
            expected[(int64_t)n * Vp + i] = (double)dloss * (exp(row[i] - log_sum) - (i == p.targets[n]));
    }
    double *result = to_doubles(p.logits, (int64_t)N * Vp);
    if (V > 1)
        assert_close(result, expected, (int64_t)N * Vp, TOLERANCE);
    for (int n = 0; n < N; n++)
        for (int i = V; i < Vp; i++)
            assert_true(result[(int64_t)n * Vp + i] == 0);
    assert_near(sum_of(p.losses, N, 0.25), 0.25 * total, 1e-12 * fabs(total), 0);
    void *all[] = {before, losses, expected, result};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
    problem_free(p);
}

static void sizes(void **state) {
    const int shapes[][3] = {{1, 1, 1},       {2, 2, 128},     {3, 17, 17},     {5, 100, 128},
                             {2, 1023, 1024}, {3, 1025, 1152}, {2, 4096, 4096}, {3, 50257, 50304}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        check(shapes[i][0], shapes[i][1], shapes[i][2], 8, 0, 0);
}

// Rows that begin anywhere: the same as at an aligned place. To the bit where a thread takes the same columns either way.
static void rows_anywhere(void **state) {
    enum { V = 1003, VP = 1009, N = 3 };
    struct problem p = problem_create(N, V, VP, 8, 0, 0);
    floatX *moved = (floatX *)test_alloc((size_t)(N * VP + 1) * sizeof *moved);
    float *losses = (float *)test_alloc(N * sizeof *losses);
    memcpy(moved + 1, p.logits, (size_t)N * VP * sizeof *moved);
    cross_entropy(p.losses, p.logits, p.targets, 1, N, V, VP, true, &device);
    cross_entropy(losses, moved + 1, p.targets, 1, N, V, VP, true, &device);
    assert_memory_equal(losses, p.losses, N * sizeof *losses);
    assert_memory_equal(moved + 1, p.logits, (size_t)N * VP * sizeof *moved);
    free(moved);
    free(losses);
    problem_free(p);
}

// Many losses: more than the threads of a block.
static void sums_of_losses(void **state) {
    const int64_t sizes[] = {0, 1, 2, 31, 1000, 1024, 1025, 20011};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        uint64_t random = 8;
        test_case(random, "%lld losses", (long long)sizes[k]);
        float *losses = (float *)test_alloc((size_t)sizes[k] * sizeof *losses + 1);
        double expected = 0;
        for (int64_t i = 0; i < sizes[k]; i++)
            expected += losses[i] = (float)(11 + test_uniform(&random));
        assert_near(sum_of(losses, sizes[k], 3), 3 * expected, 1e-12 * expected, 0);
        free(losses);
    }
}

// Logits of 1e4 and -1e4: the loss is a difference of numbers near each other.
static void huge_logits(void **state) {
    const double scale = sizeof(floatX) == 2 ? 64 : 4; // bf16's spacing at 1e4 is 64
    check(4, 300, 384, scale, 1e4, 0);
    check(4, 2100, 2176, scale, -1e4, 0);
    check(4, 300, 384, 1e4, 0, 0);
}

// Logits that grow or fall along the row, so that the shift of the running sum must move: now and then, often, at each
// block.
static void growing_logits(void **state) {
    const double per_thousand[] = {12, 25, 40, 300, 1e5, -12, -300};
    for (size_t i = 0; i < sizeof per_thousand / sizeof *per_thousand; i++)
        check(3, 7000, 7040, 4, 0, per_thousand[i] / 1000);
}

// The reference gradient by central differences of the reference loss: 1e-10 for truncation and rounding at h = 1e-5.
static void gradient_by_finite_differences(void **state) {
    enum { V = 23 };
    uint64_t random = 4;
    test_case(random, "N 1, V %d", V);
    double *logits;
    floatX *x = test_floats(&logits, V, 3, &random);
    double numeric[V];
    for (int i = 0; i < V; i++) {
        const double before = logits[i];
        logits[i] = before + 1e-5;
        numeric[i] = reference_loss(logits, 7, V);
        logits[i] = before - 1e-5;
        numeric[i] = (numeric[i] - reference_loss(logits, 7, V)) / 2e-5;
        logits[i] = before;
    }
    float *loss = (float *)test_alloc(sizeof *loss);
    int32_t *target = (int32_t *)test_alloc(sizeof *target);
    *target = 7;
    cross_entropy(loss, x, target, 1, 1, V, V, true, &device);
    double *result = to_doubles(x, V);
    assert_close(result, numeric, V, TOLERANCE);
    void *all[] = {x, logits, loss, target, result};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

// A NaN or an infinity anywhere in a row, the target's column or not, makes the loss of this row, and no other, not
// finite.
static void broken_logits(void **state) {
    enum { V = 2100, VP = 2176 };
    const float broken[] = {NAN, INFINITY};
    const int places[] = {0, 5, 1023, 1024, 2050, V - 1};
    for (int k = 0; k < 2; k++)
        for (int at = 0; at < 6; at++)
            for (int target = 0; target < 2; target++) {
                struct problem p = problem_create(2, V, VP, 8, 0, 0);
                p.logits[places[at]] = to_floatX(broken[k]);
                p.targets[0] = target ? places[at] : 77;
                cross_entropy(p.losses, p.logits, p.targets, 1, 2, V, VP, true, &device);
                assert_true(!isfinite(p.losses[0]) && isfinite(p.losses[1]));
                assert_true(!isfinite(to_float(p.logits[places[at]])) && isfinite(to_float(p.logits[VP + places[at]])));
                assert_true(!isfinite(sum_of(p.losses, 2, 0.5)));
                for (int i = V; i < VP; i++)
                    assert_true(to_float(p.logits[i]) == 0);
                problem_free(p);
            }
    // -infinity is the logit of a probability of 0: allowed, unless it is the target's.
    struct problem p = problem_create(2, V, VP, 8, 0, 0);
    for (int i = 0; i < 1500; i++)
        p.logits[i] = p.logits[VP + i] = to_floatX(-INFINITY);
    p.targets[0] = 1600;
    p.targets[1] = 3;
    cross_entropy(p.losses, p.logits, p.targets, 1, 2, V, VP, true, &device);
    assert_true(isfinite(p.losses[0]) && p.losses[1] == INFINITY && to_float(p.logits[0]) == 0);
    problem_free(p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes),          cmocka_unit_test(rows_anywhere),
        cmocka_unit_test(sums_of_losses), cmocka_unit_test(huge_logits),
        cmocka_unit_test(growing_logits), cmocka_unit_test(gradient_by_finite_differences),
        cmocka_unit_test(broken_logits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
