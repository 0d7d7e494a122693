// kernels/qk_norm.cuh against the formulas in double, finite differences of these formulas, and other numbers of
// threads.
//
// Tolerances as in op_norm.c. fp32: about five roundings of 2^-24 an element, and sums whose errors walk randomly over
// up to 4096 terms of a vector lane's or thread's share: 2e-6. bf16: the result is rounded once, and a tenth more is
// for the work in fp32 before.
#include "kernels/qk_norm.cuh"
#include "kernels/rope.cuh"       // rope_forward
#include "kernels/rope_table.cuh" // rope_table
#include "test/testing.h"
#include <omp.h> // omp_set_num_threads

static const double FP32_SUMS = 2e-6;
#define TOLERANCE (sizeof(floatX) == 2 ? 1.1 * FLOATX_ROUNDING : FP32_SUMS)
static struct device device = {2, NULL};
static const double EPS = 1e-5;
static const struct qk_norm_rotary no_rotary = {NULL, {NULL, NULL}, 1};

// Elements that share a mean: of a token's row, `count` rows of `width` from element `first` on.
struct part {
    int first, count, width;
};
static struct part part_of(struct qk_norm_shape s, bool k) {
    const int heads = k ? s.Hkv : s.H, first = k ? s.H * s.D : 0;
    const struct part by_head = {first, heads, s.D}, whole = {first, 1, heads * s.D};
    return s.full_width ? whole : by_head;
}
static int token_width(struct qk_norm_shape s) { return (s.H + 2 * s.Hkv) * s.D; }

static double reference_rstd(const double *x, int width) {
    double squares = 0;
    for (int c = 0; c < width; c++)
        squares += x[c] * x[c];
    return 1 / sqrt(squares / width + EPS);
}
static void reference_forward(double *out, double *rstd, const double *qkv, const double *wq, const double *wk, int N,
                              struct qk_norm_shape s) {
    const int columns = token_width(s);
    memcpy(out, qkv, sizeof *out * (size_t)(N * columns));
    int at = 0;
    for (int n = 0; n < N; n++)
        for (int k = 0; k < 2; k++) {
            const struct part part = part_of(s, k);
            const double *weight = k ? wk : wq;
            for (int row = 0; row < part.count; row++) {
                const int64_t first = (int64_t)n * columns + part.first + row * part.width;
                const double r = reference_rstd(qkv + first, part.width);
                rstd[at++] = r;
                for (int c = 0; c < part.width; c++)
                    out[first + c] = qkv[first + c] * r * (s.one_plus + weight[c]);
            }
        }
}
// Computes backward from the definition: d out[c] / d x[j] = w[c] * (rstd * (c == j) - x[c] x[j] rstd^3 / width).
static void reference_backward(double *dqkv, double *dwq, double *dwk, const double *dout, const double *qkv,
                               const double *wq, const double *wk, int N, struct qk_norm_shape s) {
    const int columns = token_width(s);
    memcpy(dqkv, dout, sizeof *dqkv * (size_t)(N * columns));
    for (int n = 0; n < N; n++)
        for (int k = 0; k < 2; k++) {
            const struct part part = part_of(s, k);
            for (int row = 0; row < part.count; row++) {
                const int64_t first = (int64_t)n * columns + part.first + row * part.width;
                const double *x = qkv + first, *d = dout + first, *weight = k ? wk : wq;
                const double r = reference_rstd(x, part.width);
                for (int j = 0; j < part.width; j++) {
                    (k ? dwk : dwq)[j] += d[j] * x[j] * r;
                    double sum = 0;
                    for (int c = 0; c < part.width; c++)
                        sum += d[c] * (s.one_plus + weight[c]) * (r * (c == j) - x[c] * x[j] * r * r * r / part.width);
                    dqkv[first + j] = sum;
                }
            }
        }
}

struct problem {
    int N, q_weights, k_weights, rstds;
    int64_t n;
    struct qk_norm_shape s;
    floatX *qkv, *wq, *wk, *dout;
    double *qkv_exact, *wq_exact, *wk_exact, *dout_exact;
};
static struct problem problem_create(int N, struct qk_norm_shape s) {
    uint64_t random = (uint64_t)(N * 1000 + s.D);
    test_case(random, "N %d, H %d, Hkv %d, D %d%s%s", N, s.H, s.Hkv, s.D, s.full_width ? ", full width" : "",
              s.one_plus ? ", 1 + weight" : "");
    struct problem p;
    memset(&p, 0, sizeof p);
    p.N = N;
    p.s = s;
    p.n = (int64_t)N * token_width(s);
    p.q_weights = part_of(s, false).width;
    p.k_weights = part_of(s, true).width;
    p.rstds = N * (part_of(s, false).count + part_of(s, true).count);
    p.qkv = test_floats(&p.qkv_exact, p.n, 1, &random);
    p.wq = test_floats(&p.wq_exact, p.q_weights, 2, &random);
    p.wk = test_floats(&p.wk_exact, p.k_weights, 2, &random);
    p.dout = test_floats(&p.dout_exact, p.n, 1, &random);
    // Rows have different sizes, so that no rstd can stand for another.
    for (int64_t i = 0; i < p.n; i++) {
        p.qkv[i] = to_floatX((float)(p.qkv_exact[i] * (1 + (double)(i / s.D % 5))));
        p.qkv_exact[i] = to_float(p.qkv[i]);
    }
    return p;
}
static void problem_free(struct problem p) {
    void *all[] = {p.qkv, p.wq, p.wk, p.dout, p.qkv_exact, p.wq_exact, p.wk_exact, p.dout_exact};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

// Head sizes of whole vectors or not; groups; more tokens than backward has runs; rows of any number of packs.
static const int sizes[][4] = {{1, 1, 1, 8},   {3, 4, 2, 24},  {5, 12, 12, 64}, {2, 6, 1, 80},   {3, 3, 3, 96},
                               {2, 9, 3, 128}, {4, 5, 2, 256}, {300, 2, 1, 8},  {700, 3, 1, 16}, {2, 7, 7, 40}};
enum { SIZES = sizeof sizes / sizeof *sizes, VARIANTS = 4 };
static struct qk_norm_shape shape_of(const int size[4], int variant) {
    const struct qk_norm_shape s = {size[1], size[2], size[3], variant % 2 == 1, variant >= 2, (float)EPS};
    return s;
}

static void check_forward(int N, struct qk_norm_shape s) {
    struct problem p = problem_create(N, s);
    const size_t bytes = (size_t)p.n * sizeof(floatX);
    floatX *out = (floatX *)test_alloc(bytes + 1), *alone = (floatX *)test_alloc(bytes);
    float *rstd = (float *)test_alloc((size_t)(p.rstds + 1) * sizeof *rstd);
    double *expected = test_doubles(p.n), *expected_rstd = test_doubles(p.rstds);
    memset(out, 0xff, bytes + 1);
    rstd[p.rstds] = 7;
    reference_forward(expected, expected_rstd, p.qkv_exact, p.wq_exact, p.wk_exact, N, s);
    qk_norm_forward(out, rstd, p.qkv, p.wq, p.wk, N, s, no_rotary, &device);
    double *result = to_doubles(out, p.n), *got_rstd = floats_to_doubles(rstd, p.rstds);
    assert_close(result, expected, p.n, TOLERANCE);
    assert_close(got_rstd, expected_rstd, p.rstds, FP32_SUMS);
    assert_true(((unsigned char *)out)[bytes] == 0xff && rstd[p.rstds] == 7);
    for (int n = 0; n < N; n++) { // the values are as they were
        const int64_t v = (int64_t)n * token_width(s) + (s.H + s.Hkv) * s.D;
        assert_memory_equal(out + v, p.qkv + v, sizeof *out * (size_t)(s.Hkv * s.D));
    }
    // Without rstd, and in place: the same bits.
    qk_norm_forward(alone, NULL, p.qkv, p.wq, p.wk, N, s, no_rotary, &device);
    assert_memory_equal(alone, out, bytes);
    qk_norm_forward(p.qkv, NULL, p.qkv, p.wq, p.wk, N, s, no_rotary, &device);
    assert_memory_equal(p.qkv, out, bytes);
    void *all[] = {out, alone, rstd, expected, expected_rstd, result, got_rstd};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
    problem_free(p);
}
static void forward(void **state) {
    for (int i = 0; i < SIZES * VARIANTS; i++)
        check_forward(sizes[i / VARIANTS][0], shape_of(sizes[i / VARIANTS], i % VARIANTS));
    // of more elements than a block holds in registers
    const int long_row[] = {2, 40, 10, 256}, longer[] = {3, 72, 1, 256};
    check_forward(2, shape_of(long_row, 1));
    check_forward(3, shape_of(longer, 3));
}

// Checks that overwriting gives what adding to zeros gives; the gradients hold NaN before.
static void check_overwritten_gradients(struct problem p, const float *rstd, void *workspace) {
    const size_t weights = (size_t)(p.q_weights + p.k_weights), bytes = (size_t)p.n * sizeof(floatX);
    float *dw[2];
    floatX *d[2];
    for (int i = 0; i < 2; i++) {
        dw[i] = (float *)test_alloc(weights * sizeof *dw[i]);
        d[i] = (floatX *)test_alloc(bytes);
        memset(dw[i], i == 0 ? 0 : 0xff, weights * sizeof *dw[i]);
        memcpy(d[i], p.dout, bytes);
        qk_norm_backward(d[i], dw[i], dw[i] + p.q_weights, p.qkv, p.wq, p.wk, rstd, p.N, p.s, i == 0, workspace,
                         &device);
    }
    assert_memory_equal(d[0], d[1], bytes);
    for (size_t i = 0; i < weights; i++)
        assert_true(dw[0][i] == dw[1][i]);
    void *all[] = {dw[0], dw[1], d[0], d[1]};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static void check_backward(int N, struct qk_norm_shape s) {
    struct problem p = problem_create(N, s);
    float *rstd = (float *)test_alloc((size_t)p.rstds * sizeof *rstd);
    float *dwq = (float *)test_alloc((size_t)(p.q_weights + 1) * sizeof *dwq);
    float *dwk = (float *)test_alloc((size_t)(p.k_weights + 1) * sizeof *dwk);
    floatX *out = (floatX *)test_alloc((size_t)p.n * sizeof *out);
    double *expected = test_doubles(p.n), *dwq_expected = test_doubles(p.q_weights),
           *dwk_expected = test_doubles(p.k_weights);
    for (int c = 0; c <= p.q_weights; c++) { // the gradients are added to
        dwq[c] = 0.5f * (float)(c % 5);
        if (c < p.q_weights)
            dwq_expected[c] = dwq[c];
    }
    for (int c = 0; c <= p.k_weights; c++) {
        dwk[c] = 0.25f * (float)(c % 3);
        if (c < p.k_weights)
            dwk_expected[c] = dwk[c];
    }
    const float dwq_end = dwq[p.q_weights], dwk_end = dwk[p.k_weights];
    reference_backward(expected, dwq_expected, dwk_expected, p.dout_exact, p.qkv_exact, p.wq_exact, p.wk_exact, N, s);
    const size_t workspace_bytes = qk_norm_backward_workspace_bytes(N, s, &device);
    unsigned char *workspace = (unsigned char *)test_alloc(workspace_bytes + 1);
    memset(workspace, 0xff, workspace_bytes + 1);
    qk_norm_forward(out, rstd, p.qkv, p.wq, p.wk, N, s, no_rotary, &device);
    memcpy(out, p.dout, (size_t)p.n * sizeof *out);
    qk_norm_backward(out, dwq, dwk, p.qkv, p.wq, p.wk, rstd, N, s, true, workspace, &device);
    assert_int_equal(workspace[workspace_bytes], 0xff);
    assert_true(dwq[p.q_weights] == dwq_end && dwk[p.k_weights] == dwk_end);
    check_overwritten_gradients(p, rstd, workspace);
    double *dqkv = to_doubles(out, p.n), *dwq_got = floats_to_doubles(dwq, p.q_weights),
           *dwk_got = floats_to_doubles(dwk, p.k_weights);
    assert_close(dqkv, expected, p.n, TOLERANCE);
    assert_close(dwq_got, dwq_expected, p.q_weights, FP32_SUMS);
    assert_close(dwk_got, dwk_expected, p.k_weights, FP32_SUMS);
    for (int n = 0; n < N; n++) {
        const int64_t v = (int64_t)n * token_width(s) + (s.H + s.Hkv) * s.D;
        assert_memory_equal(out + v, p.dout + v, sizeof *out * (size_t)(s.Hkv * s.D));
    }
    void *all[] = {rstd, dwq, dwk, out, expected, dwq_expected, dwk_expected, workspace, dqkv, dwq_got, dwk_got};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
    problem_free(p);
}
static void backward(void **state) {
    for (int i = 0; i < SIZES * VARIANTS; i++)
        check_backward(sizes[i / VARIANTS][0], shape_of(sizes[i / VARIANTS], i % VARIANTS));
    const int long_row[] = {2, 20, 10, 256}, longer[] = {3, 72, 1, 256};
    check_backward(2, shape_of(long_row, 1));
    check_backward(3, shape_of(longer, 3));
}

// Checks the reference by its central differences in double: h^2 for the truncation and 1e-16 / h for the rounding are
// each below 1e-9 at h = 1e-5.
static void reference_by_finite_differences(void **state) {
    enum { N = 2, H = 3, HKV = 2, D = 2, COLUMNS = (H + 2 * HKV) * D, MAX = N * COLUMNS + (H + HKV) * D };
    for (int variant = 0; variant < VARIANTS; variant++) {
        const int size[] = {N, H, HKV, D};
        const struct qk_norm_shape s = shape_of(size, variant);
        uint64_t random = 5;
        test_case(random, "the reference, variant %d", variant);
        double qkv[N * COLUMNS], wq[H * D], wk[HKV * D], dout[N * COLUMNS], out[N * COLUMNS], rstd[N * (H + HKV)];
        double dqkv[N * COLUMNS], dwq[H * D] = {0}, dwk[HKV * D] = {0}, numeric[MAX], exact[MAX];
        for (int i = 0; i < N * COLUMNS; i++) {
            qkv[i] = test_uniform(&random);
            dout[i] = test_uniform(&random);
        }
        for (int c = 0; c < H * D; c++)
            wq[c] = test_uniform(&random);
        for (int c = 0; c < HKV * D; c++)
            wk[c] = test_uniform(&random);
        reference_backward(dqkv, dwq, dwk, dout, qkv, wq, wk, N, s);
        for (int i = 0; i < MAX; i++) {
            const int c = i - N * COLUMNS;
            double *at = c < 0 ? &qkv[i] : c < H * D ? &wq[c] : &wk[c - H * D];
            exact[i] = c < 0 ? dqkv[i] : c < H * D ? dwq[c] : dwk[c - H * D];
            const double before = *at, h = 1e-5;
            double difference = 0;
            for (int sign = -1; sign <= 1; sign += 2) {
                *at = before + sign * h;
                reference_forward(out, rstd, qkv, wq, wk, N, s);
                for (int k = 0; k < N * COLUMNS; k++)
                    difference += sign * dout[k] * out[k];
            }
            *at = before;
            numeric[i] = difference / (2 * h);
        }
        assert_close(numeric, exact, MAX, 1e-8);
    }
}

static void same_bits_for_any_threads(void **state) {
    const int all_sizes[][4] = {{301, 5, 2, 24}, {40, 6, 6, 64}};
    for (int i = 0; i < 4; i++) {
        const int *size = all_sizes[i / 2];
        const struct qk_norm_shape s = shape_of(size, i % 2);
        struct problem p = problem_create(size[0], s);
        const size_t bytes = (size_t)p.n * sizeof(floatX);
        float *rstd = (float *)test_alloc((size_t)p.rstds * sizeof *rstd), *dw[2];
        floatX *d[2];
        void *workspace = test_alloc(qk_norm_backward_workspace_bytes(p.N, s, &device));
        const size_t weights = (size_t)(p.q_weights + p.k_weights);
        const int threads = omp_get_max_threads();
        for (int k = 0; k < 2; k++) {
            d[k] = (floatX *)test_alloc(bytes);
            dw[k] = (float *)test_alloc(weights * sizeof *dw[k]);
            memset(dw[k], 0, weights * sizeof *dw[k]);
            omp_set_num_threads(k == 0 ? 1 : 5);
            qk_norm_forward(d[k], rstd, p.qkv, p.wq, p.wk, p.N, s, no_rotary, &device);
            memcpy(d[k], p.dout, bytes);
            qk_norm_backward(d[k], dw[k], dw[k] + p.q_weights, p.qkv, p.wq, p.wk, rstd, p.N, s, true, workspace,
                             &device);
        }
        omp_set_num_threads(threads);
        assert_memory_equal(d[0], d[1], bytes);
        assert_memory_equal(dw[0], dw[1], weights * sizeof *dw[0]);
        void *all[] = {rstd, workspace, d[0], d[1], dw[0], dw[1]};
        for (size_t k = 0; k < sizeof all / sizeof *all; k++)
            free(all[k]);
        problem_free(p);
    }
}

// Checks that the norm that rotates has the bits of the norm and rope_forward in turn, elsewhere and in place, at any
// alignment.
static void check_rotary(int B, int T, struct qk_norm_shape s, int start, bool documents, int shift) {
    struct problem p = problem_create(B * T, s);
    const int N = B * T, position_count = start + B + T;
    const size_t bytes = (size_t)p.n * sizeof(floatX);
    float *table = (float *)test_alloc((size_t)(position_count * s.D) * sizeof *table);
    const struct rope_settings settings = rope_unscaled(s.D, 10000);
    rope_table(table, position_count, &settings);
    int32_t *starts = test_starts(B, start), *document_starts = (int32_t *)test_alloc((size_t)N * sizeof *starts);
    for (int n = 0; n < N; n++)
        document_starts[n] = n % T / 3 * 3;
    const struct qk_norm_rotary rotary = {table, {starts, documents ? document_starts : NULL}, T};
    floatX *memory = (floatX *)test_alloc(bytes + 2 * sizeof(floatX)), *out = memory + shift,
           *apart = (floatX *)test_alloc(bytes);
    float *rstd = (float *)test_alloc(sizeof *rstd * (size_t)p.rstds),
          *rstd_apart = (float *)test_alloc(sizeof *rstd * (size_t)p.rstds);
    // A misaligned row is summed in another order, so each norm writes to the same address.
    qk_norm_forward(out, rstd_apart, p.qkv, p.wq, p.wk, N, s, no_rotary, &device);
    memcpy(apart, out, bytes);
    rope_forward(apart, table, rotary.positions, B, T, s.H, s.Hkv, s.D, &device);
    memset(memory, 0xff, bytes + 2 * sizeof(floatX));
    qk_norm_forward(out, rstd, p.qkv, p.wq, p.wk, N, s, rotary, &device);
    assert_memory_equal(out, apart, bytes);
    assert_memory_equal(rstd, rstd_apart, sizeof *rstd * (size_t)p.rstds);
    for (size_t i = 0; i < sizeof(floatX); i++) // nothing beside it is written
        assert_true(((unsigned char *)(out + p.n))[i] == 0xff && (shift == 0 || ((unsigned char *)memory)[i] == 0xff));
    memcpy(out, p.qkv, bytes);
    qk_norm_forward(out, NULL, out, p.wq, p.wk, N, s, rotary, &device);
    assert_memory_equal(out, apart, bytes);
    void *all[] = {table, starts, document_starts, memory, apart, rstd, rstd_apart};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
    problem_free(p);
}
static void rotary_has_the_bits_of_a_pass_of_its_own(void **state) {
    const int all_sizes[][5] = {{1, 1, 1, 1, 8},  {2, 3, 4, 2, 24},  {1, 7, 12, 12, 64}, {2, 5, 6, 1, 80},
                                {3, 3, 3, 3, 96}, {1, 9, 9, 3, 128}, {2, 2, 5, 2, 256},  {3, 50, 2, 1, 8},
                                {2, 5, 3, 1, 16}, {1, 2, 7, 7, 40}};
    for (int i = 0; i < 10 * VARIANTS; i++) {
        const int *size = all_sizes[i / VARIANTS];
        for (int shift = 0; shift < 2; shift++)
            check_rotary(size[0], size[1], shape_of(size + 1, i % VARIANTS), i % 3, i % 2, shift);
    }
    const int long_rows[][4] = {{2, 20, 10, 128}, {2, 40, 10, 256}, {3, 72, 1, 256}};
    for (int i = 0; i < 3; i++)
        check_rotary(1, long_rows[i][0], shape_of(long_rows[i], 1), 5, false, 0);
}

// Checks arrays that begin anywhere: results are the same, but for the order of sums.
static void misaligned(void **state) {
    for (int variant = 0; variant < VARIANTS; variant++) {
        const int size[] = {5, 7, 3, 40};
        const struct qk_norm_shape s = shape_of(size, variant);
        struct problem p = problem_create(5, s);
        floatX *arrays[2][5]; // out, qkv, wq, wk, dqkv
        float *rstd[2], *dw[2];
        void *workspace = test_alloc(qk_norm_backward_workspace_bytes(5, s, &device));
        const int weights = p.q_weights + p.k_weights;
        for (int shift = 0; shift < 2; shift++) {
            const floatX *from[] = {p.qkv, p.qkv, p.wq, p.wk, p.dout};
            const int64_t counts[] = {p.n, p.n, p.q_weights, p.k_weights, p.n};
            floatX **a = arrays[shift];
            for (int i = 0; i < 5; i++) {
                a[i] = (floatX *)test_alloc(sizeof(floatX) * (size_t)(counts[i] + 1)) + shift;
                memcpy(a[i], from[i], sizeof(floatX) * (size_t)counts[i]);
            }
            rstd[shift] = (float *)test_alloc((size_t)p.rstds * sizeof(float));
            dw[shift] = (float *)test_alloc((size_t)weights * sizeof(float));
            memset(dw[shift], 0, (size_t)weights * sizeof(float));
            qk_norm_forward(a[0], rstd[shift], a[1], a[2], a[3], 5, s, no_rotary, &device);
            qk_norm_backward(a[4], dw[shift], dw[shift] + p.q_weights, a[1], a[2], a[3], rstd[shift], 5, s, true,
                             workspace, &device);
        }
        for (int i = 0; i < 5; i += 4) {
            double *result = to_doubles(arrays[1][i], p.n), *expected = to_doubles(arrays[0][i], p.n);
            assert_close(result, expected, p.n, TOLERANCE);
            free(result);
            free(expected);
        }
        double *result = floats_to_doubles(dw[1], weights), *expected = floats_to_doubles(dw[0], weights);
        assert_close(result, expected, weights, FP32_SUMS);
        free(result);
        free(expected);
        free(workspace);
        for (int shift = 0; shift < 2; shift++) {
            for (int i = 0; i < 5; i++)
                free(arrays[shift][i] - shift);
            free(rstd[shift]);
            free(dw[shift]);
        }
        problem_free(p);
    }
}

// Checks that a token has the same bits by itself, as in decoding; and that a NaN is seen only in its own head or, with
// a full-width norm, in its own token's q.
static void a_token_has_its_bits_alone_and_keeps_its_nan(void **state) {
    for (int variant = 0; variant < VARIANTS; variant++) {
        const int size[] = {5, 7, 3, 40};
        const struct qk_norm_shape s = shape_of(size, variant);
        struct problem p = problem_create(5, s);
        const int columns = token_width(s);
        floatX *out = (floatX *)test_alloc((size_t)p.n * sizeof *out);
        floatX *token = (floatX *)test_alloc((size_t)columns * sizeof *token);
        qk_norm_forward(out, NULL, p.qkv, p.wq, p.wk, 5, s, no_rotary, &device);
        for (int n = 0; n < 5; n++) {
            qk_norm_forward(token, NULL, p.qkv + n * columns, p.wq, p.wk, 1, s, no_rotary, &device);
            assert_memory_equal(token, out + n * columns, (size_t)columns * sizeof *token);
        }
        p.qkv[2 * columns + 4 * s.D + 3] = to_floatX(NAN); // query head 4 of token 2
        qk_norm_forward(out, NULL, p.qkv, p.wq, p.wk, 5, s, no_rotary, &device);
        for (int i = 0; i < p.n; i++) {
            const int column = i - 2 * columns, head = column / s.D;
            const bool hit = column >= 0 && (s.full_width ? head < s.H : head == 4);
            assert_true(isnan(to_float(out[i])) == (hit && column < columns));
        }
        free(out);
        free(token);
        problem_free(p);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forward),
        cmocka_unit_test(backward),
        cmocka_unit_test(reference_by_finite_differences),
        cmocka_unit_test(same_bits_for_any_threads),
        cmocka_unit_test(rotary_has_the_bits_of_a_pass_of_its_own),
        cmocka_unit_test(misaligned),
        cmocka_unit_test(a_token_has_its_bits_alone_and_keeps_its_nan),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
