// kernels/norm_fp8.cuh: a norm that writes FP8 itself writes the bits of the norm, fp8_amax and fp8_cast one after the
// other. Codes, scales, counts, statistics and the sum with the residual are compared byte by byte.
#include "kernels/fp8/cast.cuh"  // fp8_cast, fp8_amax
#include "kernels/gpu_sizes.cuh" // GPU_NORM_FP8_COLUMNS
#include "kernels/norm_fp8.cuh"  // under test
#include "test/fp8_outputs.h"    // struct outputs

static struct device device = {2, NULL};

enum forms { ROWS, COLUMNS, ROWS_AND_COLUMNS, FORMS };
struct example {
    int64_t N;
    int C;
    enum fp8_format format;
    float delayed;
    uint32_t amax; // left by an earlier part of the micro-batch
    bool finite;
};
// How an example's norm is called.
struct call {
    enum norm_kind kind;
    enum forms forms;
    bool residual, dropout, bias, counts, statistics;
};
// The results of a call besides its codes.
struct rows {
    floatX *sum;
    float *mean, *rstd;
};
static struct rows rows_create(int64_t N, int C, const floatX *delta, const struct call *how) {
    struct rows r;
    r.sum = (floatX *)test_alloc((size_t)(N * C) * sizeof *r.sum);
    memcpy(r.sum, delta, (size_t)(N * C) * sizeof *r.sum);
    r.mean = how->statistics ? (float *)test_alloc((size_t)N * sizeof *r.mean) : NULL;
    r.rstd = how->statistics ? (float *)test_alloc((size_t)N * sizeof *r.rstd) : NULL;
    for (int64_t i = 0; how->statistics && i < N; i++)
        r.mean[i] = r.rstd[i] = 0;
    return r;
}
// Returns a cast to the call's forms, with counts if it has any.
static struct fp8_cast cast_of(const struct outputs *o, const struct call *how) {
    struct fp8_cast to = o->to;
    to.dbias = NULL;
    if (how->forms == COLUMNS)
        to.rows.codes = NULL;
    if (how->forms == ROWS)
        to.columns.codes = NULL;
    if (!how->counts)
        to.counts = NULL;
    return to;
}

// Returns n uniform values in [-scale, scale), the last of them 20 times as large; the caller frees them.
static floatX *values(int64_t n, float scale, uint64_t *random) {
    floatX *x = (floatX *)test_alloc((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = to_floatX(scale * (float)test_uniform(random));
    x[n - 1] = to_floatX(20 * scale);
    return x;
}

static void check(const struct example *e, const struct call *how) {
    const int64_t N = e->N, n = N * e->C;
    uint64_t random = (uint64_t)(n + e->C);
    test_case(random, "%lld x %d, %s%s%s%s, forms %d, delayed scale %g, amax %08x%s", (long long)N, e->C,
              how->kind == NORM_LAYERNORM ? "LayerNorm" : "RMSNorm", how->residual ? ", residual" : "",
              how->dropout ? ", dropout" : "", how->bias ? ", bias" : "", how->forms, e->delayed, e->amax,
              e->finite ? "" : ", with a NaN");
    struct norm_options options = {how->kind, how->bias, 1e-5f, NULL};
    struct dropout dropout = {0.25f, 9, 8, 7, DROPOUT_MLP_PROJECTION, NULL};
    floatX *x = values(n, 1, &random), *delta = values(n, 1, &random);
    floatX *weight = values(e->C, 2, &random), *bias = values(e->C, 1, &random);
    floatX *result = (floatX *)test_alloc((size_t)n * sizeof *result);
    void *workspace = test_alloc(norm_forward_fp8_workspace_bytes(N, e->C, &device) + 1);
    struct outputs fused = outputs_create(N, e->C, e->format, e->delayed, e->amax);
    struct outputs apart = outputs_create(N, e->C, e->format, e->delayed, e->amax);
    const struct rows a = rows_create(N, e->C, delta, how), b = rows_create(N, e->C, delta, how);
    if (!how->dropout)
        dropout.p = 0;
    if (!e->finite)
        x[n / 3] = to_floatX(NAN);

    const floatX *biases = how->bias ? bias : NULL;
    if (how->residual)
        residual_norm_forward(a.sum, result, a.mean, a.rstd, x, a.sum, weight, biases, N, e->C, options, 0.75f, dropout,
                              &device);
    else
        norm_forward(result, a.mean, a.rstd, x, weight, biases, N, e->C, options, &device);
    fp8_amax(&apart.to.scale->amax, result, n, &device);
    fp8_cast(cast_of(&apart, how), result, N, e->C, NULL, &device);

    norm_forward_fp8(cast_of(&fused, how), how->residual ? b.sum : NULL, b.mean, b.rstd, x,
                     how->residual ? b.sum : NULL, weight, biases, N, e->C, options, 0.75f, dropout, workspace,
                     &device);
    assert_memory_equal(fused.to.scale, apart.to.scale, sizeof *apart.to.scale);
    assert_memory_equal(fused.bytes, apart.bytes, apart.count);
    assert_memory_equal(b.sum, a.sum, (size_t)n * sizeof *a.sum);
    if (how->statistics) {
        assert_memory_equal(b.mean, a.mean, (size_t)N * sizeof *a.mean);
        assert_memory_equal(b.rstd, a.rstd, (size_t)N * sizeof *a.rstd);
    }
    void *all[] = {x,           delta, weight, bias,   result, workspace, fused.bytes,
                   apart.bytes, a.sum, a.mean, a.rstd, b.sum,  b.mean,    b.rstd};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

// The widest rows of each kind of row on a GPU (kernels/norm_fp8.cu), and the next width.
enum { WARP_ROW = 8 * 32 * GPU_PACK };
static void bits_are_those_of_norm_amax_and_cast(void **state) {
    const struct example examples[] = {
        {16, 16, FP8_E4M3, 0, 0, true},
        {48, 80, FP8_E5M2, 0, 0x45000000, true},
        {48, 2 * 32 * GPU_PACK, FP8_E4M3, 100, 0, true},
        {80, 2 * 32 * GPU_PACK + 16, FP8_E4M3, 0, 0, true},
        {16, 4 * 32 * GPU_PACK + 16, FP8_E5M2, 3e7f, 0, true},
        {80, WARP_ROW, FP8_E4M3, 0.25f, 0x45000000, true},
        {48, WARP_ROW + 16, FP8_E4M3, 0, 0, true},
        {16, GPU_NORM_FP8_COLUMNS, FP8_E5M2, 0x1p40f, 0, true},
        {32, GPU_NORM_FP8_COLUMNS + 16, FP8_E4M3, 2, 0, true},
        {80, 64, FP8_E4M3, 0, 0, false},
        {32, WARP_ROW + 32, FP8_E4M3, 2, 0, false},
    };
    for (size_t k = 0; k < sizeof examples / sizeof *examples; k++)
        for (int i = 0; i < FORMS; i++) {
            const struct call plain = {NORM_RMSNORM, (enum forms)i, false, false, false, true, true};
            const struct call added = {NORM_LAYERNORM, (enum forms)i, true, i == ROWS, true, i != COLUMNS, i != ROWS};
            check(&examples[k], &plain);
            check(&examples[k], &added);
        }
}
// Checks more rows than the pass for the amax has warps on a GPU, with the largest element in the last row.
static void every_row_counts(void **state) {
    const struct example e = {16 * 1100, 16, FP8_E4M3, 0, 0, true};
    const struct call how = {NORM_RMSNORM, ROWS, true, false, false, true, true};
    check(&e, &how);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bits_are_those_of_norm_amax_and_cast),
        cmocka_unit_test(every_row_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
