// kernels/norm.cuh against the formulas in double, finite differences of these formulas, and other numbers of threads.
//
// Tolerances. fp32: an element has about five roundings of 2^-24 = 6e-8 each. Where the compiler makes no vector lanes
// of the sums after it, these walk randomly over C <= 1000 terms, sqrt(1000) 6e-8 = 2e-6. bf16: sums are fp32 and the
// result is rounded once, so that FLOATX_ROUNDING bounds each element's relative error, and so the norm's; a tenth more
// is for the work in fp32 before. A row of one element is special: all terms of LayerNorm's dx cancel, and what remains
// is rstd = 316 times their roundings. rstd itself: a lane of the vector, of which the narrowest has four, sums C / 4
// squares, with a standard deviation of at most sqrt(C / 4) 2^-24; the worst row is within four of these deviations,
// and the root halves the error.
#include "kernels/device_queue.cuh" // device_synchronize
#include "kernels/norm.cuh"
#include "test/amax.h" // amax_case_set, amax_new, amax_expected
#include "test/testing.h"
#include <omp.h> // omp_set_num_threads

static const double FP32_SUMS = 2e-6;
static double rstd_tolerance(int C) { return fmax(FP32_SUMS, sqrt(C) * 0x1p-24); }
#define TOLERANCE (sizeof(floatX) == 2 ? 1.1 * FLOATX_ROUNDING : FP32_SUMS)
#define ONE_ELEMENT 10
static struct device device = {2, NULL};
static const double EPS = 1e-5;

// LayerNorm and RMSNorm, each with the weight as it is and with 1 added to it.
enum { VARIANTS = 4 };
static struct norm_options options_of(int variant) {
    const struct norm_options options = {variant % 2 == 0 ? NORM_LAYERNORM : NORM_RMSNORM, variant >= 2, (float)EPS};
    return options;
}
static const char *options_name(struct norm_options options) {
    if (options.kind == NORM_LAYERNORM)
        return options.one_plus ? "LayerNorm, 1 + weight" : "LayerNorm";
    return options.one_plus ? "RMSNorm, 1 + weight" : "RMSNorm";
}

static void reference_statistics(double *mean, double *rstd, const double *x, int C, enum norm_kind kind) {
    double sum = 0, squares = 0;
    for (int c = 0; c < C; c++)
        sum += x[c];
    *mean = kind == NORM_LAYERNORM ? sum / C : 0;
    for (int c = 0; c < C; c++)
        squares += (x[c] - *mean) * (x[c] - *mean);
    *rstd = 1 / sqrt(squares / C + EPS);
}

static void reference_forward(double *out, const double *x, const double *weight, const double *bias, int N, int C,
                              struct norm_options options) {
    for (int n = 0; n < N; n++) {
        double mean, rstd;
        reference_statistics(&mean, &rstd, x + n * C, C, options.kind);
        for (int c = 0; c < C; c++)
            out[n * C + c] =
                (x[n * C + c] - mean) * rstd * (options.one_plus + weight[c]) + (bias != NULL ? bias[c] : 0);
    }
}

// Computes backward from the derivative of out with respect to x[j], which is written from the definition, without the
// means that the op computes: d y[c] / d x[j] = rstd * ((c == j) - 1/C) - y[c] y[j] rstd / C.
static void reference_backward(double *dx, double *dweight, double *dbias, const double *dout, const double *x,
                               const double *weight, int N, int C, struct norm_options options) {
    for (int n = 0; n < N; n++) {
        double mean, rstd;
        const double *row = x + n * C, *d = dout + n * C;
        reference_statistics(&mean, &rstd, row, C, options.kind);
        for (int c = 0; c < C; c++) {
            dweight[c] += d[c] * (row[c] - mean) * rstd;
            dbias[c] += d[c];
        }
        for (int j = 0; j < C; j++) {
            const double y_j = (row[j] - mean) * rstd;
            double sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int c = 0; c < C; c++) {
                const double y = (row[c] - mean) * rstd;
                sum += d[c] * (options.one_plus + weight[c]) * rstd *
                       ((c == j) - (options.kind == NORM_LAYERNORM ? 1.0 / C : 0) - y * y_j / C);
            }
            dx[n * C + j] += sum;
        }
    }
}

struct problem {
    int N, C;
    floatX *x, *weight, *bias, *dout, *dx;
    double *x_exact, *weight_exact, *bias_exact, *dout_exact, *dx_exact;
};
static struct problem problem_create(int N, int C, struct norm_options options, double shift) {
    struct problem p;
    uint64_t random = (uint64_t)(N * 1000 + C);
    test_case(random, "N %d, C %d, %s, mean %g", N, C, options_name(options), shift);
    p.N = N;
    p.C = C;
    p.x = test_floats(&p.x_exact, (int64_t)N * C, 1, &random);
    p.weight = test_floats(&p.weight_exact, C, 2, &random);
    p.bias = test_floats(&p.bias_exact, C, 2, &random);
    p.dout = test_floats(&p.dout_exact, (int64_t)N * C, 1, &random);
    p.dx = test_floats(&p.dx_exact, (int64_t)N * C, 1, &random);
    for (int i = 0; i < N * C; i++) {
        p.x[i] = to_floatX((float)(p.x_exact[i] + shift));
        p.x_exact[i] = to_float(p.x[i]);
    }
    return p;
}
static void problem_free(struct problem p) {
    void *all[] = {p.x,       p.weight,       p.bias,       p.dout,       p.dx,
                   p.x_exact, p.weight_exact, p.bias_exact, p.dout_exact, p.dx_exact};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static void check_forward(int N, int C, struct norm_options options, double shift, double tolerance) {
    struct problem p = problem_create(N, C, options, shift);
    floatX *out = (floatX *)test_alloc((size_t)N * C * sizeof *out);
    float *mean = (float *)test_alloc((size_t)N * sizeof *mean), *rstd = (float *)test_alloc((size_t)N * sizeof *rstd);
    double *expected = test_doubles((int64_t)N * C), *means = test_doubles(N), *rstds = test_doubles(N);
    for (int n = 0; n < N; n++)
        reference_statistics(&means[n], &rstds[n], p.x_exact + n * C, C, options.kind);

    for (int with_bias = 0; with_bias < 2; with_bias++) {
        memset(out, 0xff, (size_t)N * C * sizeof *out);
        memset(rstd, 0xff, (size_t)N * sizeof *rstd);
        norm_forward(out, options.kind == NORM_LAYERNORM ? mean : NULL, rstd, p.x, p.weight, with_bias ? p.bias : NULL,
                     N, C, options, &device);
        reference_forward(expected, p.x_exact, p.weight_exact, with_bias ? p.bias_exact : NULL, N, C, options);
        double *result = to_doubles(out, (int64_t)N * C), *got_rstd = floats_to_doubles(rstd, N);
        assert_close(result, expected, (int64_t)N * C, tolerance);
        assert_close(got_rstd, rstds, N, rstd_tolerance(C));
        if (options.kind == NORM_LAYERNORM) {
            // The mean of values of size 1 + |shift| may be near 0, so its error is absolute.
            for (int n = 0; n < N; n++)
                assert_near(mean[n], means[n], (1 + fabs(shift)) * 0x1p-21, n);
        }
        free(result);
        free(got_rstd);
    }
    // Without out only the statistics are computed, without these only out: the same bits.
    float *alone = (float *)test_alloc((size_t)N * sizeof *alone);
    norm_forward(NULL, NULL, alone, p.x, p.weight, p.bias, N, C, options, &device);
    assert_memory_equal(alone, rstd, (size_t)N * sizeof *alone);
    floatX *out_alone = (floatX *)test_alloc((size_t)N * C * sizeof *out_alone);
    norm_forward(out_alone, NULL, NULL, p.x, p.weight, p.bias, N, C, options, &device);
    assert_memory_equal(out_alone, out, (size_t)N * C * sizeof *out);

    void *all[] = {out, mean, rstd, expected, means, rstds, alone, out_alone};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
    problem_free(p);
}

// Returns memory for the partial sums of columns that an op leaves, and a number after them, which must stay.
static float *partial_new(int64_t chunks, int C) {
    float *partial = (float *)test_alloc(sizeof *partial * (size_t)(chunks * C + 1));
    memset(partial, 0xff, sizeof *partial * (size_t)(chunks * C));
    partial[chunks * C] = 7;
    return partial;
}
static void assert_column_sums(const float *partial, int64_t chunks, const floatX *x, int N, int C) {
    double *expected = test_doubles(C), *sums = test_doubles(C);
    for (int c = 0; c < C; c++)
        expected[c] = sums[c] = 0;
    for (int64_t i = 0; i < (int64_t)N * C; i++)
        expected[i % C] += to_float(x[i]);
    for (int64_t i = 0; i < chunks * C; i++)
        sums[i % C] += partial[i];
    assert_close(sums, expected, C, FP32_SUMS);
    assert_true(partial[chunks * C] == 7);
    free(expected);
    free(sums);
}

// Checks backward without a residual, with one elsewhere or in place; overwriting or adding; with and without sums of
// dx's columns: the values are always the same. Outputs that must not be read hold NaN.
static void check_backward_forms(struct problem p, const float *mean, const float *rstd, struct norm_options options,
                                 void *workspace) {
    const int N = p.N, C = p.C;
    const int64_t n = (int64_t)N * C, chunks = norm_backward_num_runs(N, C, &device);
    const size_t bytes = (size_t)n * sizeof(floatX), row_bytes = (size_t)C * sizeof(float);
    floatX *zero = (floatX *)test_alloc(bytes), *dx = (floatX *)test_alloc(bytes),
           *in_place = (floatX *)test_alloc(bytes);
    float *dweight[3], *dbias[3], *partial = partial_new(chunks, C);
    for (int i = 0; i < 3; i++) {
        dweight[i] = (float *)test_alloc(row_bytes);
        dbias[i] = (float *)test_alloc(row_bytes);
        memset(dweight[i], i == 0 ? 0 : 0xff, row_bytes);
        memset(dbias[i], i == 0 ? 0 : 0xff, row_bytes);
    }
    memset(zero, 0, bytes);
    memset(dx, 0xff, bytes);
    norm_backward(zero, NULL, dweight[0], dbias[0], zero, p.dout, p.x, p.weight, mean, rstd, N, C, true, options,
                  workspace, &device);
    norm_backward(dx, partial, dweight[1], dbias[1], NULL, p.dout, p.x, p.weight, mean, rstd, N, C, false, options,
                  workspace, &device);
    for (int64_t i = 0; i < n; i++)
        assert_true(to_float(dx[i]) == to_float(zero[i]));
    assert_column_sums(partial, chunks, dx, N, C);

    memset(dx, 0xff, bytes);
    memcpy(in_place, p.dx, bytes);
    norm_backward(dx, NULL, dweight[2], dbias[2], p.dx, p.dout, p.x, p.weight, mean, rstd, N, C, false, options,
                  workspace, &device);
    for (int c = 0; c < C; c++)
        for (int i = 1; i < 3; i++)
            assert_true(dweight[i][c] == dweight[0][c] && dbias[i][c] == dbias[0][c]);
    memset(partial, 0xff, sizeof *partial * (size_t)(chunks * C));
    norm_backward(in_place, partial, dweight[2], dbias[2], in_place, p.dout, p.x, p.weight, mean, rstd, N, C, false,
                  options, workspace, &device);
    assert_memory_equal(in_place, dx, bytes);
    assert_column_sums(partial, chunks, dx, N, C);
    void *all[] = {zero, dx, in_place, dweight[0], dweight[1], dweight[2], dbias[0], dbias[1], dbias[2], partial};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static void check_backward(int N, int C, struct norm_options options, double shift, double tolerance) {
    struct problem p = problem_create(N, C, options, shift);
    const int64_t n = (int64_t)N * C;
    float *mean = (float *)test_alloc((size_t)N * sizeof *mean), *rstd = (float *)test_alloc((size_t)N * sizeof *rstd);
    float *dweight = (float *)test_alloc((size_t)C * sizeof *dweight);
    float *dbias = (float *)test_alloc((size_t)C * sizeof *dbias);
    double *dweight_expected = test_doubles(C), *dbias_expected = test_doubles(C);
    for (int c = 0; c < C; c++) // each is added to
        dweight_expected[c] = dweight[c] = dbias_expected[c] = dbias[c] = 0.5f * (float)(c % 5);
    norm_forward(NULL, mean, rstd, p.x, p.weight, NULL, N, C, options, &device);
    char *workspace = (char *)test_alloc(norm_backward_workspace_bytes(N, C, &device) + 1);
    memset(workspace, 0xff, norm_backward_workspace_bytes(N, C, &device) + 1);
    check_backward_forms(p, mean, rstd, options, workspace);
    norm_backward(p.dx, NULL, dweight, dbias, p.dx, p.dout, p.x, p.weight, options.kind == NORM_LAYERNORM ? mean : NULL,
                  rstd, N, C, true, options, workspace, &device);
    assert_int_equal((unsigned char)workspace[norm_backward_workspace_bytes(N, C, &device)], 0xff);
    reference_backward(p.dx_exact, dweight_expected, dbias_expected, p.dout_exact, p.x_exact, p.weight_exact, N, C,
                       options);
    double *dx = to_doubles(p.dx, n), *dw = floats_to_doubles(dweight, C), *db = floats_to_doubles(dbias, C);
    assert_close(dx, p.dx_exact, n, tolerance);
    assert_close(dw, dweight_expected, C, FP32_SUMS);
    assert_close(db, dbias_expected, C, FP32_SUMS);

    // Without dbias, dweight is the same.
    double *dw_before = dw;
    for (int c = 0; c < C; c++)
        dweight[c] = 0.5f * (float)(c % 5);
    norm_backward(p.dx, NULL, dweight, NULL, p.dx, p.dout, p.x, p.weight, mean, rstd, N, C, true, options, workspace,
                  &device);
    for (int c = 0; c < C; c++)
        assert_true(dweight[c] == (float)dw_before[c]);

    void *all[] = {mean, rstd, dweight, dbias, dweight_expected, dbias_expected, workspace, dx, dw, db};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
    problem_free(p);
}

// Rows for a warp and for a block of each size, of whole 16-byte accesses or not; more rows than backward has runs.
static const int sizes[][2] = {{1, 1},    {1, 5},    {3, 16},   {2, 33},   {7, 48},   {5, 768},  {129, 100},
                               {300, 31}, {3, 1000}, {9, 1024}, {5, 1600}, {3, 4096}, {6, 8192}, {4300, 16}};
enum { SIZES = sizeof sizes / sizeof *sizes };
// Backward's reference takes time with the square of C.
static const int long_sizes[][2] = {{2, 16384}, {2, 32776}};
static void forward(void **state) {
    for (int i = 0; i < SIZES; i++)
        for (int variant = 0; variant < VARIANTS; variant++)
            check_forward(sizes[i][0], sizes[i][1], options_of(variant), 0.1,
                          TOLERANCE * (sizes[i][1] == 1 ? ONE_ELEMENT : 1));
    for (int i = 0; i < 2; i++)
        for (int variant = 0; variant < VARIANTS; variant++)
            check_forward(long_sizes[i][0], long_sizes[i][1], options_of(variant), 0.1, TOLERANCE);
}
static void backward(void **state) {
    for (int i = 0; i < SIZES; i++)
        for (int variant = 0; variant < VARIANTS; variant++)
            if (takes_case(i + variant, 3))
                check_backward(sizes[i][0], sizes[i][1], options_of(variant), 0.1,
                               TOLERANCE * (sizes[i][1] == 1 ? ONE_ELEMENT : 1));
}

// Checks noise of size 1 on a mean of 1000, where fp32's spacing is 6e-5. bf16's noise there is a few steps of 4.
static void large_mean(void **state) {
    const double scale = sizeof(floatX) == 2 ? 4096 : 1000;
    check_forward(4, 768, options_of(0), scale, TOLERANCE);
    check_forward(4, 100, options_of(0), -scale, TOLERANCE);
    check_backward(4, 768, options_of(0), scale, TOLERANCE);
    check_backward(4, 100, options_of(0), -scale, TOLERANCE);
}

// Checks the reference's backward by central differences of the reference's forward, in double: h^2 for the truncation
// and 1e-16 / h for the rounding are each below 1e-9 at h = 1e-5.
static void reference_by_finite_differences(void **state) {
    enum { N = 2, C = 7 };
    for (int variant = 0; variant < VARIANTS; variant++) {
        const struct norm_options options = options_of(variant);
        uint64_t random = 5;
        test_case(random, "the reference, N %d, C %d, %s", N, C, options_name(options));
        double x[N * C], weight[C], bias[C], dout[N * C], out[N * C];
        double dx[N * C] = {0}, dweight[C] = {0}, dbias[C] = {0}, numeric[N * C + 2 * C], exact[N * C + 2 * C];
        for (int i = 0; i < N * C; i++) {
            x[i] = test_uniform(&random);
            dout[i] = test_uniform(&random);
        }
        for (int c = 0; c < C; c++) {
            weight[c] = test_uniform(&random);
            bias[c] = test_uniform(&random);
        }
        reference_backward(dx, dweight, dbias, dout, x, weight, N, C, options);
        for (int i = 0; i < N * C + 2 * C; i++) {
            double *at = i < N * C ? &x[i] : i < N * C + C ? &weight[i - N * C] : &bias[i - N * C - C];
            exact[i] = i < N * C ? dx[i] : i < N * C + C ? dweight[i - N * C] : dbias[i - N * C - C];
            const double before = *at, h = 1e-5;
            double difference = 0;
            for (int sign = -1; sign <= 1; sign += 2) {
                *at = before + sign * h;
                reference_forward(out, x, weight, bias, N, C, options);
                for (int k = 0; k < N * C; k++)
                    difference += sign * dout[k] * out[k];
            }
            *at = before;
            numeric[i] = difference / (2 * h);
        }
        assert_close(numeric, exact, N * C + 2 * C, 1e-8);
    }
}

static void same_bits_for_any_threads(void **state) {
    const int shapes[][2] = {{301, 70}, {301, 72}, {40, 1600}};
    for (int k = 0; k < 3; k++) {
        const int N = shapes[k][0], C = shapes[k][1];
        struct problem p = problem_create(N, C, options_of(0), 0.1);
        const size_t bytes = sizeof(floatX) * (size_t)(N * C), row_bytes = sizeof(float) * (size_t)C;
        float *mean = (float *)test_alloc(sizeof(float) * (size_t)N),
              *rstd = (float *)test_alloc(sizeof(float) * (size_t)N);
        float *dweight[2], *dbias[2], *partial[2];
        floatX *dx[2];
        const int64_t chunks = norm_backward_num_runs(N, C, &device);
        void *workspace = test_alloc(norm_backward_workspace_bytes(N, C, &device));
        norm_forward(NULL, mean, rstd, p.x, p.weight, NULL, N, C, options_of(0), &device);
        const int threads = omp_get_max_threads();
        for (int i = 0; i < 2; i++) {
            dx[i] = (floatX *)test_alloc(bytes);
            dweight[i] = (float *)test_alloc(row_bytes);
            dbias[i] = (float *)test_alloc(row_bytes);
            memcpy(dx[i], p.dx, bytes);
            memset(dweight[i], 0, row_bytes);
            memset(dbias[i], 0, row_bytes);
            omp_set_num_threads(i == 0 ? 1 : 5);
            partial[i] = partial_new(chunks, C);
            norm_backward(dx[i], partial[i], dweight[i], dbias[i], dx[i], p.dout, p.x, p.weight, mean, rstd, N, C, true,
                          options_of(0), workspace, &device);
        }
        omp_set_num_threads(threads);
        assert_memory_equal(dx[0], dx[1], bytes);
        assert_memory_equal(dweight[0], dweight[1], row_bytes);
        assert_memory_equal(dbias[0], dbias[1], row_bytes);
        assert_memory_equal(partial[0], partial[1], (size_t)chunks * row_bytes);
        void *all[] = {mean,  rstd,  dweight[0], dweight[1], dbias[0], dbias[1],
                       dx[0], dx[1], partial[0], partial[1], workspace};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            free(all[i]);
        problem_free(p);
    }
}

// Checks the amax, which begins at `before`. Only the last element is NaN or infinite: forward, because of the bias;
// backward, because of what dx holds before. Values lie far from 0, so that a row's mean is larger than its results.
static void check_amax(int N, int C, struct norm_options options, int amax_case, uint32_t before) {
    struct problem p = problem_create(N, C, options, 100);
    test_case((uint64_t)(N * 1000 + C), "amax, N %d, C %d, %s, %s, from %x", N, C, options_name(options),
              amax_case_names[amax_case], before);
    const size_t bytes = sizeof(floatX) * (size_t)(N * C), row_bytes = sizeof(float) * (size_t)C;
    const struct dropout no_dropout = {0};
    struct norm_options with_amax = options;
    floatX *sum = (floatX *)test_alloc(bytes), *out[2], *dx[2], *fused[2];
    float *mean = (float *)test_alloc(sizeof(float) * (size_t)N),
          *rstd = (float *)test_alloc(sizeof(float) * (size_t)N);
    float *gradients = (float *)test_alloc(2 * row_bytes);
    float *partial = partial_new(norm_backward_num_runs(N, C, &device), C);
    void *workspace = test_alloc(norm_backward_workspace_bytes(N, C, &device));
    memset(gradients, 0, 2 * row_bytes);
    amax_case_set(p.bias, C, amax_case);
    amax_case_set(p.dx, (int64_t)N * C, amax_case);
    if (amax_case == AMAX_ZEROS) {
        amax_case_set(p.x, (int64_t)N * C, amax_case);
        amax_case_set(p.dout, (int64_t)N * C, amax_case);
    }
    for (int i = 0; i < 2; i++) {
        out[i] = (floatX *)test_alloc(bytes);
        dx[i] = (floatX *)test_alloc(bytes);
        fused[i] = (floatX *)test_alloc(bytes);
        memcpy(dx[i], p.dx, bytes);
        with_amax.amax = i == 0 ? NULL : amax_new(before);
        norm_forward(out[i], mean, rstd, p.x, p.weight, p.bias, N, C, with_amax, &device);
        if (i > 0) {
            assert_memory_equal(out[0], out[1], bytes);
            assert_int_equal(*with_amax.amax, amax_expected(before, out[1], (int64_t)N * C));
            *with_amax.amax = before;
        }
        norm_backward(dx[i], i == 0 ? NULL : partial, gradients, gradients + C, dx[i], p.dout, p.x, p.weight, mean,
                      rstd, N, C, true, with_amax, workspace, &device);
        if (i > 0) {
            if (amax_case == AMAX_FINITE)
                assert_column_sums(partial, norm_backward_num_runs(N, C, &device), dx[1], N, C);
            assert_memory_equal(dx[0], dx[1], bytes);
            assert_int_equal(*with_amax.amax, amax_expected(before, dx[1], (int64_t)N * C));
            *with_amax.amax = before;
        }
        residual_norm_forward(sum, fused[i], mean, rstd, p.x, p.dout, p.weight, p.bias, N, C, with_amax, 1, no_dropout,
                              &device);
    }
    assert_memory_equal(fused[0], fused[1], bytes);
    assert_int_equal(*with_amax.amax, amax_expected(before, fused[1], (int64_t)N * C));
    *with_amax.amax = before;
    norm_forward(NULL, NULL, rstd, p.x, p.weight, p.bias, N, C, with_amax, &device); // it writes no out
    assert_int_equal(*with_amax.amax, before);
    void *all[] = {sum,  out[0], out[1],    dx[0],     dx[1],          fused[0], fused[1],
                   mean, rstd,   gradients, workspace, with_amax.amax, partial};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
    problem_free(p);
}
static void amax_is_of_what_is_stored(void **state) {
    for (int i = 0; i < SIZES + 2; i++) {
        if (!takes_case(i, 3))
            continue;
        const int *size = i < SIZES ? sizes[i] : long_sizes[i - SIZES];
        for (int k = 0; k < AMAX_CASES; k++) // of each variant one case, another one for each size
            check_amax(size[0], size[1], options_of((i + k) % VARIANTS), k, k == AMAX_FINITE ? 0 : 1);
        check_amax(size[0], size[1], options_of(i % VARIANTS), AMAX_FINITE, 0x7f000000u); // larger than any element
    }
    for (int variant = 0; variant < VARIANTS; variant++)
        for (int k = 0; k < AMAX_CASES; k++)
            check_amax(7, 45, options_of(variant), k, 0);
}

// Checks that a row has the same bits by itself as among others: decoding and recomputation compute a row by itself, or
// among other rows than training's forward.
static void a_row_alone_has_the_bits_that_it_has_among_others(void **state) {
    const int shapes[][2] = {{7, 1}, {7, 45}, {8, 64}, {9, 768}};
    for (int k = 0; k < 4 * VARIANTS; k++) {
        const int N = shapes[k / VARIANTS][0], C = shapes[k / VARIANTS][1];
        const struct norm_options options = options_of(k % VARIANTS);
        struct problem p = problem_create(N, C, options, 1);
        floatX *out = (floatX *)test_alloc((size_t)N * C * sizeof *out), *row = (floatX *)test_alloc(C * sizeof *row);
        float *rstd = (float *)test_alloc((size_t)(N + 1) * sizeof *rstd), *row_rstd = rstd + N;
        norm_forward(out, NULL, rstd, p.x, p.weight, p.bias, N, C, options, &device);
        for (int n = 0; n < N; n++) {
            norm_forward(row, NULL, row_rstd, p.x + n * C, p.weight, p.bias, 1, C, options, &device);
            assert_memory_equal(row, out + n * C, (size_t)C * sizeof *row);
            assert_memory_equal(row_rstd, &rstd[n], sizeof *rstd);
        }
        problem_free(p);
        free(out);
        free(row);
        free(rstd);
    }
}

// Checks arrays that begin anywhere: results are the same, but for the order of sums.
static void misaligned(void **state) {
    enum { N = 5, C = 72 };
    const float SCALE = 0.22f;
    struct problem p = problem_create(N, C, options_of(0), 0.1);
    const struct dropout dropout = {0.3f, 9, 8, 7, DROPOUT_MLP_PROJECTION};
    floatX *arrays[2][7]; // sum, out, dx, x, delta, weight, bias
    float *statistics[2], *gradients[2];
    void *workspace = test_alloc(norm_backward_workspace_bytes(N, C, &device));
    for (int shift = 0; shift < 2; shift++) {
        floatX **a = arrays[shift];
        const floatX *from[] = {p.x, p.x, p.dx, p.x, p.dout, p.weight, p.bias};
        for (int i = 0; i < 7; i++) {
            a[i] = (floatX *)test_alloc(sizeof(floatX) * (N * C + 1)) + shift;
            memcpy(a[i], from[i], sizeof(floatX) * (size_t)(i < 5 ? N * C : C));
        }
        statistics[shift] = (float *)test_alloc(sizeof(float) * 2 * N);
        gradients[shift] = (float *)test_alloc(sizeof(float) * 2 * C);
        memset(gradients[shift], 0, sizeof(float) * 2 * C);
        residual_norm_forward(a[0], a[1], statistics[shift], statistics[shift] + N, a[3], a[4], a[5], a[6], N, C,
                              options_of(0), SCALE, dropout, &device);
        float *partial = partial_new(norm_backward_num_runs(N, C, &device), C);
        norm_backward(a[2], partial, gradients[shift], gradients[shift] + C, a[2], a[4], a[0], a[5], statistics[shift],
                      statistics[shift] + N, N, C, true, options_of(0), workspace, &device);
        assert_column_sums(partial, norm_backward_num_runs(N, C, &device), a[2], N, C);
        free(partial);
        residual_forward(a[3], a[3], a[4], N, C, SCALE, dropout, &device);
        partial = partial_new(residual_backward_num_runs(N, C, &device), C);
        residual_backward(a[4], partial, a[4], N, C, SCALE, dropout, &device);
        assert_column_sums(partial, residual_backward_num_runs(N, C, &device), a[4], N, C);
        free(partial);
    }
    assert_memory_equal(arrays[0][0], arrays[1][0], sizeof(floatX) * N * C);
    assert_memory_equal(arrays[0][0], arrays[1][3], sizeof(floatX) * N * C);
    assert_memory_equal(arrays[0][4], arrays[1][4], sizeof(floatX) * N * C);
    for (int i = 1; i < 3; i++) {
        double *result = to_doubles(arrays[1][i], N * C), *expected = to_doubles(arrays[0][i], N * C);
        assert_close(result, expected, N * C, TOLERANCE);
        free(result);
        free(expected);
    }
    double *result = floats_to_doubles(gradients[1], 2 * C), *expected = floats_to_doubles(gradients[0], 2 * C);
    assert_close(result, expected, 2 * C, FP32_SUMS);
    free(result);
    free(expected);
    for (int shift = 0; shift < 2; shift++) {
        for (int i = 0; i < 7; i++)
            free(arrays[shift][i] - shift);
        free(statistics[shift]);
        free(gradients[shift]);
    }
    free(workspace);
    problem_free(p);
}

static void residual(void **state) {
    const int residual_sizes[][2] = {{1, 1}, {3, 5}, {7, 300}, {5, 1024}, {613, 24}, {37, 1600}};
    for (int i = 0; i < 6; i++)
        for (int variant = 0; variant < 4; variant++) {
            const int N = residual_sizes[i][0], C = residual_sizes[i][1];
            const float scale = variant & 2 ? 0.22f : 1;
            const struct dropout dropout = {variant & 1 ? 0.3f : 0, 9, 8, 7, DROPOUT_MLP_PROJECTION};
            uint64_t random = 3;
            test_case(random, "residual, N %d, C %d, dropout %g, scale %g", N, C, (double)dropout.p, (double)scale);
            double *x_exact, *delta_exact, *expected = test_doubles(N * C), *expected_backward = test_doubles(N * C);
            floatX *x = test_floats(&x_exact, N * C, 1, &random), *delta = test_floats(&delta_exact, N * C, 1, &random);
            floatX *out = (floatX *)test_alloc(sizeof(floatX) * (size_t)(N * C));
            for (int k = 0; k < N * C; k++) {
                expected[k] = x_exact[k] + scale * dropout_scale(dropout, (uint64_t)k) * delta_exact[k];
                expected_backward[k] = scale * dropout_scale(dropout, (uint64_t)k) * delta_exact[k];
            }
            residual_forward(out, x, delta, N, C, scale, dropout, &device);
            double *result = to_doubles(out, N * C);
            assert_close(result, expected, N * C, TOLERANCE);
            for (int k = 0; k < N * C && variant == 0; k++) // the plain sum, rounded once
                assert_true(to_float(out[k]) == to_float(to_floatX(to_float(x[k]) + to_float(delta[k]))));

            residual_backward(out, NULL, delta, N, C, scale, dropout, &device);
            device_synchronize(&device); // without dropout it is a copy, for which CUDA_LAUNCH_BLOCKING does not wait
            double *result_backward = to_doubles(out, N * C);
            assert_close(result_backward, expected_backward, N * C, TOLERANCE);
            // In place; backward comes first, while delta is still intact.
            floatX *copy = (floatX *)test_alloc(sizeof(floatX) * (size_t)(N * C));
            memcpy(copy, delta, sizeof(floatX) * (size_t)(N * C));
            residual_backward(copy, NULL, copy, N, C, scale, dropout, &device);
            assert_memory_equal(copy, out, sizeof(floatX) * (size_t)(N * C));
            // With sums of columns, elsewhere and in place.
            const int64_t chunks = residual_backward_num_runs(N, C, &device);
            float *partial = partial_new(chunks, C);
            memset(copy, 0xff, sizeof(floatX) * (size_t)(N * C));
            residual_backward(copy, partial, delta, N, C, scale, dropout, &device);
            assert_memory_equal(copy, out, sizeof(floatX) * (size_t)(N * C));
            assert_column_sums(partial, chunks, out, N, C);
            memset(partial, 0xff, sizeof *partial * (size_t)(chunks * C));
            memcpy(copy, delta, sizeof(floatX) * (size_t)(N * C));
            residual_backward(copy, partial, copy, N, C, scale, dropout, &device);
            assert_memory_equal(copy, out, sizeof(floatX) * (size_t)(N * C));
            assert_column_sums(partial, chunks, out, N, C);
            free(partial);
            // The step's second part lies in the device's memory.
            struct dropout in_parts = dropout;
            uint64_t *micro_step = (uint64_t *)test_alloc(sizeof *micro_step);
            *micro_step = 3;
            in_parts.step -= 3;
            in_parts.micro_step = micro_step;
            residual_forward(out, x, delta, N, C, scale, in_parts, &device);
            free(micro_step);
            residual_forward(delta, x, delta, N, C, scale, dropout, &device);
            assert_memory_equal(delta, out, sizeof(floatX) * (size_t)(N * C));
            void *all[] = {x_exact, delta_exact, expected, expected_backward, x,
                           delta,   out,         result,   result_backward,   copy};
            for (size_t k = 0; k < sizeof all / sizeof *all; k++)
                free(all[k]);
        }
}

// Checks that the fused op gives the bits of the two separate ops, whatever is asked for, also in place.
static void residual_norm(void **state) {
    const int shapes[][2] = {{1, 1}, {3, 5}, {7, 300}, {9, 256}, {5, 1024}, {3, 1600}, {2, 3001}, {2, 6144}};
    for (int i = 0; i < 8; i++)
        for (int variant = 0; variant < 128; variant++) {
            const int N = shapes[i][0], C = shapes[i][1];
            const struct norm_options options = options_of((variant & 1) + (variant & 32 ? 2 : 0));
            const float scale = variant & 64 ? 0.22f : 1;
            const struct dropout dropout = {variant & 2 ? 0.3f : 0, 9, 8, 7, DROPOUT_MLP_PROJECTION};
            const bool with_bias = variant & 4, in_place = variant & 8, all_outputs = variant & 16;
            const size_t bytes = sizeof(floatX) * (size_t)(N * C), row_bytes = sizeof(float) * (size_t)N;
            struct problem p = problem_create(N, C, options, 0.1);
            test_case((uint64_t)(N * 1000 + C), "fused with the residual, N %d, C %d, %s, dropout %g, scale %g%s%s%s",
                      N, C, options_name(options), (double)dropout.p, (double)scale, with_bias ? ", bias" : "",
                      in_place ? ", in place" : "", all_outputs ? ", all outputs" : "");
            const floatX *delta = p.dout, *bias = with_bias ? p.bias : NULL;
            floatX *sum = (floatX *)test_alloc(bytes), *out = (floatX *)test_alloc(bytes);
            floatX *sum_apart = (floatX *)test_alloc(bytes), *out_apart = (floatX *)test_alloc(bytes);
            float *mean = (float *)test_alloc(row_bytes), *mean_apart = (float *)test_alloc(row_bytes);
            float *rstd = (float *)test_alloc(row_bytes), *rstd_apart = (float *)test_alloc(row_bytes);
            residual_forward(sum_apart, p.x, delta, N, C, scale, dropout, &device);
            norm_forward(out_apart, mean_apart, rstd_apart, sum_apart, p.weight, bias, N, C, options, &device);
            if (in_place)
                memcpy(sum, delta, bytes);
            residual_norm_forward(sum, all_outputs ? out : NULL, all_outputs ? mean : NULL, rstd, p.x,
                                  in_place ? sum : delta, p.weight, bias, N, C, options, scale, dropout, &device);
            assert_memory_equal(sum, sum_apart, bytes);
            assert_memory_equal(rstd, rstd_apart, row_bytes);
            if (all_outputs) {
                assert_memory_equal(out, out_apart, bytes);
                assert_memory_equal(mean, mean_apart, row_bytes);
            }
            residual_norm_forward(sum, out, NULL, NULL, p.x, delta, p.weight, bias, N, C, options, scale, dropout,
                                  &device);
            assert_memory_equal(out, out_apart, bytes);
            void *all[] = {sum, out, sum_apart, out_apart, mean, mean_apart, rstd, rstd_apart};
            for (size_t k = 0; k < sizeof all / sizeof *all; k++)
                free(all[k]);
            problem_free(p);
        }
}

// Checks 1 + w of small weights: w's digits below 2^-8, for which bf16 has no room beside a 1, must all enter the
// result. It may differ from the reference where that is near the middle between two numbers.
static void one_plus_is_added_in_fp32(void **state) {
    enum { N = 9, C = 520 };
    struct problem p = problem_create(N, C, options_of(3), 0.1);
    floatX *out = (floatX *)test_alloc(sizeof *out * N * C);
    double *expected = test_doubles(N * C);
    for (int c = 0; c < C; c++) {
        p.weight[c] = to_floatX((float)(0.01 * p.weight_exact[c]));
        p.weight_exact[c] = to_float(p.weight[c]);
    }
    reference_forward(expected, p.x_exact, p.weight_exact, NULL, N, C, options_of(3));
    norm_forward(out, NULL, NULL, p.x, p.weight, NULL, N, C, options_of(3), &device);
    int different = 0;
    for (int i = 0; i < N * C && sizeof *out == 2; i++)
        different += to_float(out[i]) != to_float(to_floatX((float)expected[i]));
    assert_true(different <= N * C / 100);
    double *result = to_doubles(out, N * C);
    assert_close(result, expected, N * C, TOLERANCE);
    free(out);
    free(expected);
    free(result);
    problem_free(p);
}

static void nan_is_not_hidden(void **state) {
    enum { C = 40 };
    floatX *x = (floatX *)test_alloc(sizeof(floatX) * 2 * C), *weight = (floatX *)test_alloc(sizeof(floatX) * C);
    floatX *out = (floatX *)test_alloc(sizeof(floatX) * 2 * C);
    for (int i = 0; i < 2 * C; i++) {
        x[i] = to_floatX((float)i);
        weight[i % C] = to_floatX(1);
    }
    x[7] = to_floatX(NAN);
    for (int variant = 0; variant < VARIANTS; variant++) {
        norm_forward(out, NULL, NULL, x, weight, NULL, 2, C, options_of(variant), &device);
        for (int c = 0; c < C; c++)
            assert_true(isnan(to_float(out[c])) && !isnan(to_float(out[C + c])));
    }
    free(x);
    free(weight);
    free(out);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forward),
        cmocka_unit_test(backward),
        cmocka_unit_test(large_mean),
        cmocka_unit_test(reference_by_finite_differences),
        cmocka_unit_test(same_bits_for_any_threads),
        cmocka_unit_test(amax_is_of_what_is_stored),
        cmocka_unit_test(a_row_alone_has_the_bits_that_it_has_among_others),
        cmocka_unit_test(misaligned),
        cmocka_unit_test(residual),
        cmocka_unit_test(residual_norm),
        cmocka_unit_test(one_plus_is_added_in_fp32),
        cmocka_unit_test(nan_is_not_hidden),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
