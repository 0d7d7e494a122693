// kernels/loss.cuh against the formula in double, its gradient against finite differences; logits that are scaled and
// capped, targets that do not count, and logits that are huge or broken.
//
// Tolerances. The loss is an fp32 sum of exponentials, each off by one unit, its logarithm, and a difference of numbers
// as large as the largest logit's distance: 1e-6 of (1 + loss). The gradient in fp32: x - shift is rounded once before
// the exponential, and |x - shift| <= 34 for all terms that count: 34 * 2^-24 = 2e-6 relative, random over the row, and
// the rest is smaller: 2e-6. In bf16: one rounding, and a tenth more. A factor adds the rounding of the product, 2^-24
// of the largest. A cap adds its tanh's error, 3.2e-7: of the cap in z, and twice in the slope 1 - tanh^2, which may be
// small.
#include "kernels/loss.cuh"
#include "test/testing.h"

#define TOLERANCE (sizeof(floatX) == 2 ? 1.1 * FLOATX_ROUNDING : 2e-6)
static struct device device = {2, NULL};
static const struct logit_transform PLAIN = {1, 0};

static double reference_z(double logit, struct logit_transform t) {
    const double z = (double)t.scale * logit, cap = t.softcap;
    return cap > 0 ? cap * tanh(z / cap) : z;
}
// Returns dz/dlogit / scale.
static double reference_slope(double logit, struct logit_transform t) {
    const double tangent = t.softcap > 0 ? tanh((double)t.scale * logit / (double)t.softcap) : 0;
    return 1 - tangent * tangent;
}
static double reference_loss(const double *logits, int target, int V, struct logit_transform t) {
    double max = reference_z(logits[0], t), sum = 0;
    for (int i = 0; i < V; i++)
        max = fmax(max, reference_z(logits[i], t));
    for (int i = 0; i < V; i++)
        sum += exp(reference_z(logits[i], t) - max);
    return max + log(sum) - reference_z(logits[target], t);
}
// Returns the loss plus z_loss times the squared logarithm of the sum, for logits (V).
static double reference_objective(const double *logits, int target, int V, struct logit_transform t, double z_loss) {
    const double loss = reference_loss(logits, target, V, t), log_sum = loss + reference_z(logits[target], t);
    return loss + z_loss * log_sum * log_sum;
}
// Returns the error of z.
static double z_error(double largest, struct logit_transform t) {
    return t.softcap > 0 ? 3.2e-7 * (double)t.softcap : t.scale != 1 ? 0x1p-24 * (double)t.scale * largest : 0;
}

struct problem {
    int N, V, Vp;
    floatX *logits;
    double *exact;
    int32_t *targets;
    float *losses;
};
// Makes a problem whose padded columns hold what would spoil every sum that reads them.
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

static struct loss_sum sum_of(const float *losses, const int32_t *targets, int64_t N) {
    struct loss_sum *total = (struct loss_sum *)test_alloc(sizeof *total);
    losses_sum(total, losses, targets, N, &device);
    const struct loss_sum result = *total;
    free(total);
    return result;
}

static void check_z_loss(int N, int V, int Vp, double scale, double shift, double slope, struct logit_transform t,
                         float z_loss) {
    struct problem p = problem_create(N, V, Vp, scale, shift, slope);
    test_case((uint64_t)(V + N),
              "N %d, V %d, padded to %d, logits of %g around %g, growing by %g, times %g, cap %g, z-loss %g", N, V, Vp,
              scale, shift, slope, (double)t.scale, (double)t.softcap, (double)z_loss);
    const double error = z_error(scale + fabs(shift) + fabs(slope) * V, t);
    const float dloss = 0.37f;
    floatX *before = (floatX *)test_alloc((size_t)N * Vp * sizeof *before);
    memcpy(before, p.logits, (size_t)N * Vp * sizeof *before);
    cross_entropy(p.losses, p.logits, p.targets, dloss, z_loss, N, V, Vp, t, false, &device);
    assert_memory_equal(before, p.logits, (size_t)N * Vp * sizeof *before); // without backward nothing is written
    float *losses = (float *)test_alloc((size_t)N * sizeof *losses);
    memcpy(losses, p.losses, (size_t)N * sizeof *losses);
    cross_entropy(p.losses, p.logits, p.targets, dloss, z_loss, N, V, Vp, t, true, &device);
    assert_memory_equal(losses, p.losses, (size_t)N * sizeof *losses);

    double *expected = test_doubles((int64_t)N * Vp), total = 0, squares = 0, squares_by_z = 0;
    for (int n = 0; n < N; n++) {
        const double *row = p.exact + (int64_t)n * Vp;
        const double loss = reference_loss(row, p.targets[n], V, t);
        const double log_sum = loss + reference_z(row[p.targets[n]], t);
        assert_near(p.losses[n], loss, 1e-6 * (1 + fabs(loss)) + 2 * error, n);
        total += p.losses[n];
        for (int i = 0; i < V; i++) {
            const double by_z =
                (double)dloss * (double)t.scale *
                ((1 + 2 * (double)z_loss * log_sum) * exp(reference_z(row[i], t) - log_sum) - (i == p.targets[n]));
            const double by_logit = by_z * reference_slope(row[i], t);
            expected[(int64_t)n * Vp + i] = by_logit;
            squares += by_logit * by_logit;
            squares_by_z += by_z * by_z;
        }
    }
    const double slope_error = t.softcap > 0 ? 6.4e-7 * sqrt(squares_by_z / squares) : 0;
    double *result = to_doubles(p.logits, (int64_t)N * Vp);
    if (V > 1)
        assert_close(result, expected, (int64_t)N * Vp, TOLERANCE + 2 * error + slope_error);
    for (int n = 0; n < N; n++)
        for (int i = V; i < Vp; i++)
            assert_true(result[(int64_t)n * Vp + i] == 0);
    assert_near(sum_of(p.losses, p.targets, N).sum, total, 1e-12 * fabs(total), 0);
    assert_true(sum_of(p.losses, p.targets, N).count == N);
    void *all[] = {before, losses, expected, result};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
    problem_free(p);
}

static void check_transformed(int N, int V, int Vp, double scale, double shift, double slope,
                              struct logit_transform t) {
    check_z_loss(N, V, Vp, scale, shift, slope, t, 0);
}
static void check(int N, int V, int Vp, double scale, double shift, double slope) {
    check_transformed(N, V, Vp, scale, shift, slope, PLAIN);
}

static void sizes(void **state) {
    const int shapes[][3] = {{1, 1, 1},       {2, 2, 128},     {3, 17, 17},       {5, 100, 128},      {2, 1023, 1024},
                             {3, 1025, 1152}, {2, 4096, 4096}, {3, 50257, 50304}, {1, 151669, 151936}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        check(shapes[i][0], shapes[i][1], shapes[i][2], 8, 0, 0);
}

// Checks rows that begin anywhere: they have the results of rows at aligned places; the same bits where a thread takes
// the same columns either way.
static void rows_anywhere(void **state) {
    enum { V = 1003, VP = 1009, N = 3 };
    struct problem p = problem_create(N, V, VP, 8, 0, 0);
    floatX *moved = (floatX *)test_alloc((size_t)(N * VP + 1) * sizeof *moved);
    float *losses = (float *)test_alloc(N * sizeof *losses);
    memcpy(moved + 1, p.logits, (size_t)N * VP * sizeof *moved);
    cross_entropy(p.losses, p.logits, p.targets, 1, 0, N, V, VP, PLAIN, true, &device);
    cross_entropy(losses, moved + 1, p.targets, 1, 0, N, V, VP, PLAIN, true, &device);
    assert_memory_equal(losses, p.losses, N * sizeof *losses);
    assert_memory_equal(moved + 1, p.logits, (size_t)N * VP * sizeof *moved);
    free(moved);
    free(losses);
    problem_free(p);
}

// Checks sums of more losses than a block has threads.
static void sums_of_losses(void **state) {
    const int64_t sizes[] = {0, 1, 2, 31, 1000, 1024, 1025, 20011};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        uint64_t random = 8;
        test_case(random, "%lld losses", (long long)sizes[k]);
        float *losses = (float *)test_alloc((size_t)sizes[k] * sizeof *losses + 1);
        int32_t *targets = (int32_t *)test_alloc((size_t)sizes[k] * sizeof *targets + 1);
        double expected = 0, count = 0;
        for (int64_t i = 0; i < sizes[k]; i++) {
            expected += losses[i] = (float)(11 + test_uniform(&random));
            targets[i] = (int32_t)(test_random(&random) % 5) - 1;
            count += targets[i] >= 0;
        }
        assert_near(sum_of(losses, targets, sizes[k]).sum, expected, 1e-12 * expected, 0);
        assert_true(sum_of(losses, targets, sizes[k]).count == count);
        free(losses);
        free(targets);
    }
}

// Checks logits of 1e4 and -1e4: the loss is a difference of numbers near each other.
static void huge_logits(void **state) {
    const double scale = sizeof(floatX) == 2 ? 64 : 4; // bf16's spacing at 1e4 is 64
    check(4, 300, 384, scale, 1e4, 0);
    check(4, 2100, 2176, scale, -1e4, 0);
    check(4, 300, 384, 1e4, 0, 0);
}

// Checks logits that grow or fall along the row, so that the shift of the running sum must move: now and then, often,
// or at each block.
static void growing_logits(void **state) {
    const double per_thousand[] = {12, 25, 40, 300, 1e5, -12, -300};
    for (size_t i = 0; i < sizeof per_thousand / sizeof *per_thousand; i++)
        check(3, 7000, 7040, 4, 0, per_thousand[i] / 1000);
}

static const struct logit_transform transforms[] = {{1, 0}, {0.125f, 0}, {1, 2.5f}, {3, 4}};

// Checks the reference's gradient by central differences of its loss: 1e-10 for truncation and rounding at h = 1e-5.
static void gradient_by_finite_differences(void **state) {
    enum { V = 23 };
    for (int k = 0; k < 8; k++) {
        const struct logit_transform t = transforms[k % 4];
        const float z_loss = k < 4 ? 0 : 0.1f;
        uint64_t random = 4;
        test_case(random, "N 1, V %d, scale %g, softcap %g, z-loss %g", V, (double)t.scale, (double)t.softcap,
                  (double)z_loss);
        double *logits;
        floatX *x = test_floats(&logits, V, 3, &random);
        double numeric[V];
        for (int i = 0; i < V; i++) {
            const double before = logits[i];
            logits[i] = before + 1e-5;
            numeric[i] = reference_objective(logits, 7, V, t, z_loss);
            logits[i] = before - 1e-5;
            numeric[i] = (numeric[i] - reference_objective(logits, 7, V, t, z_loss)) / 2e-5;
            logits[i] = before;
        }
        float *loss = (float *)test_alloc(sizeof *loss);
        int32_t *target = (int32_t *)test_alloc(sizeof *target);
        *target = 7;
        cross_entropy(loss, x, target, 1, z_loss, 1, V, V, t, true, &device);
        double *result = to_doubles(x, V);
        assert_close(result, numeric, V, TOLERANCE + 2 * z_error(3, t));
        void *all[] = {x, logits, loss, target, result};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            free(all[i]);
    }
}

// Checks whether the target's logit counts as the largest: in rows with one largest logit anywhere, with several equal
// ones, with NaN, and without a target. Padded columns, which hold larger numbers, do not count.
static void targets_with_the_largest_logit(void **state) {
    const int widths[][2] = {{1, 1}, {17, 17}, {100, 128}, {1029, 1152}, {9000, 9001}};
    for (int k = 0; k < 5; k++) {
        enum { N = 12 };
        const int V = widths[k][0], Vp = widths[k][1];
        struct problem p = problem_create(N, V, Vp, 2, 0, 0);
        int32_t *largest = (int32_t *)test_alloc(N * sizeof *largest), expected[N];
        for (int n = 0; n < N; n++) {
            floatX *row = p.logits + (int64_t)n * Vp;
            const int target = p.targets[n], other = (target + 1 + n) % V;
            if (n % 6 > 0)
                row[target] = to_floatX(9);
            if (n % 6 == 2)
                row[other] = to_floatX(9);
            if (n % 6 == 3)
                row[other] = to_floatX(NAN);
            if (n % 6 == 4)
                row[other] = to_floatX(9.5f);
            if (n % 6 == 5)
                p.targets[n] = -1;
            expected[n] = p.targets[n] >= 0;
            for (int i = 0; i < V && p.targets[n] >= 0; i++) {
                const float x = to_float(row[i]), y = to_float(row[target]);
                expected[n] = expected[n] && !isnan(x) && !(x > y) && !(x == y && i < target);
            }
        }
        targets_are_largest(largest, p.logits, p.targets, N, V, Vp, &device);
        for (int n = 0; n < N; n++)
            assert_int_equal(largest[n], expected[n]);
        free(largest);
        problem_free(p);
    }
}

// Checks caps far above the logits, near them and below them, in rows of all sizes and rows whose shift moves.
static void scaled_and_capped_logits(void **state) {
    const int shapes[][3] = {{1, 1, 1}, {4, 9, 128}, {3, 17, 17}, {5, 100, 128}, {5, 1025, 1152}, {4, 50257, 50304}};
    const struct logit_transform all[] = {{0.125f, 0}, {12, 0}, {1, 30}, {1, 5}, {0.25f, 50}, {2, 4}};
    for (int k = 0; k < 6; k++) {
        for (int i = 0; i < 6; i++)
            check_transformed(shapes[i][0], shapes[i][1], shapes[i][2], 8, 0, 0, all[k]);
        check_transformed(3, 7000, 7040, 4, 0, 0.025, all[k]);
        check_transformed(3, 7000, 7040, 4, -60, 0.012, all[k]);
    }
}

// Checks z-losses of PaLM's size and far larger ones, with the logarithm of the sum above and below 0, where they
// reduce or enlarge the softmax's part. No bit of the losses depends on them.
static void gradients_of_z_losses(void **state) {
    const int shapes[][3] = {{2, 2, 128}, {3, 17, 17}, {5, 100, 128}, {5, 1025, 1152}, {4, 50257, 50304}};
    const float z_losses[] = {1e-4f, 0.01f, 0.5f};
    for (int k = 0; k < 4; k++)
        for (int i = 0; i < 5; i++)
            for (int z = 0; z < 3; z++) {
                check_z_loss(shapes[i][0], shapes[i][1], shapes[i][2], 8, 0, 0, transforms[k], z_losses[z]);
                check_z_loss(shapes[i][0], shapes[i][1], shapes[i][2], 2, -9, 0, transforms[k], z_losses[z]);
            }
}

// Checks that logits_transform gives the logits that cross_entropy takes the softmax of, and leaves padded columns as
// they are.
static void transformed_logits(void **state) {
    const int widths[][2] = {{1, 1}, {17, 17}, {100, 128}, {1029, 1152}, {9000, 9001}};
    for (int k = 0; k < 4; k++)
        for (int i = 0; i < 5; i++) {
            const int N = 3, V = widths[i][0], Vp = widths[i][1];
            struct problem p = problem_create(N, V, Vp, 8, 0, 0);
            double *expected = test_doubles(N * V), *result = test_doubles(N * V);
            logits_transform(p.logits, N, V, Vp, transforms[k], &device);
            for (int n = 0; n < N; n++)
                for (int j = 0; j < Vp; j++) {
                    const float got = to_float(p.logits[n * Vp + j]);
                    if (j >= V) {
                        assert_true(j % 2 ? isnan(got) : got == to_float(to_floatX(1e30f)));
                        continue;
                    }
                    expected[n * V + j] = reference_z(p.exact[n * Vp + j], transforms[k]);
                    result[n * V + j] = got;
                }
            assert_close(result, expected, N * V, (sizeof(floatX) == 2 ? FLOATX_ROUNDING : 0) + 4e-7);
            free(expected);
            free(result);
            problem_free(p);
        }
}

// Checks that rows with a negative target have a loss and a gradient of 0, whatever their logits are, and that the
// other rows do not depend on them.
static void targets_that_do_not_count(void **state) {
    enum { N = 7, V = 1003, VP = 1024 };
    for (int k = 0; k < 4; k++) {
        struct problem p = problem_create(N, V, VP, 8, 0, 0);
        floatX *all = (floatX *)test_alloc(N * VP * sizeof *all), *before = (floatX *)test_alloc(N * VP * sizeof *all);
        float *losses = (float *)test_alloc(N * sizeof *losses);
        memcpy(all, p.logits, N * VP * sizeof *all);
        cross_entropy(losses, all, p.targets, 1, 0, N, V, VP, transforms[k], true, &device);
        p.targets[0] = p.targets[4] = -1;
        p.targets[6] = -100;
        p.logits[4 * VP + 5] = to_floatX(NAN);
        memcpy(before, p.logits, N * VP * sizeof *all);
        for (int backward = 0; backward < 2; backward++) {
            for (int n = 0; n < N; n++)
                p.losses[n] = NAN;
            cross_entropy(p.losses, p.logits, p.targets, 1, 0, N, V, VP, transforms[k], backward, &device);
            for (int n = 0; n < N; n++)
                assert_true(p.losses[n] == (p.targets[n] < 0 ? 0 : losses[n]));
            if (!backward)
                assert_memory_equal(p.logits, before, N * VP * sizeof *all);
        }
        for (int n = 0; n < N; n++)
            for (int i = 0; i < VP; i++) {
                const float gradient = to_float(p.logits[n * VP + i]);
                assert_true(gradient == (p.targets[n] < 0 ? 0 : to_float(all[n * VP + i])));
            }
        assert_true(sum_of(p.losses, p.targets, N).count == 4);
        free(all);
        free(before);
        free(losses);
        problem_free(p);
    }
}

// Checks that a NaN or an infinity anywhere in a row, in the target's column or not, makes only this row's loss not
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
                cross_entropy(p.losses, p.logits, p.targets, 1, 0, 2, V, VP, PLAIN, true, &device);
                assert_true(!isfinite(p.losses[0]) && isfinite(p.losses[1]));
                assert_true(!isfinite(to_float(p.logits[places[at]])) && isfinite(to_float(p.logits[VP + places[at]])));
                assert_true(!isfinite(sum_of(p.losses, p.targets, 2).sum));
                for (int i = V; i < VP; i++)
                    assert_true(to_float(p.logits[i]) == 0);
                problem_free(p);
            }
    // -infinity is the logit of a probability of 0. It is allowed, except for the target.
    struct problem p = problem_create(2, V, VP, 8, 0, 0);
    for (int i = 0; i < 1500; i++)
        p.logits[i] = p.logits[VP + i] = to_floatX(-INFINITY);
    p.targets[0] = 1600;
    p.targets[1] = 3;
    cross_entropy(p.losses, p.logits, p.targets, 1, 0, 2, V, VP, PLAIN, true, &device);
    assert_true(isfinite(p.losses[0]) && p.losses[1] == INFINITY && to_float(p.logits[0]) == 0);
    problem_free(p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes),
        cmocka_unit_test(rows_anywhere),
        cmocka_unit_test(sums_of_losses),
        cmocka_unit_test(targets_with_the_largest_logit),
        cmocka_unit_test(huge_logits),
        cmocka_unit_test(growing_logits),
        cmocka_unit_test(gradient_by_finite_differences),
        cmocka_unit_test(broken_logits),
        cmocka_unit_test(scaled_and_capped_logits),
        cmocka_unit_test(gradients_of_z_losses),
        cmocka_unit_test(transformed_logits),
        cmocka_unit_test(targets_that_do_not_count),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
