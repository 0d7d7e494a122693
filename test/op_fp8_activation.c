// kernels/activation_fp8.cuh: where an activation writes FP8 itself, it writes the bits of the op, fp8_amax and
// fp8_cast one after the other. Codes, scales, counts and the sums of columns are compared byte by byte.
#include "kernels/activation_fp8.cuh"
#include "kernels/fp8/tiles.cuh" // FP8_TILE
#include "kernels/fp8/cast.cuh"  // fp8_cast, fp8_amax
#include "test/fp8_outputs.h"    // struct outputs

static struct device device = {2, NULL};

typedef void forward_fp8_op(struct fp8_cast to, const floatX *fc, int64_t N, int F, void *workspace,
                            struct device *dev);
typedef void backward_fp8_op(struct fp8_cast to, const floatX *dact, const floatX *fc, int64_t N, int F,
                             void *workspace, struct device *dev);

struct activation {
    const char *name;
    pointwise_forward *forward; // NULL: it is gated
    pointwise_backward *backward;
    gated_forward *forward_gated;
    gated_backward *backward_gated;
    forward_fp8_op *forward_fp8;
    backward_fp8_op *backward_fp8;
};
#define POINTWISE(name)                                                                                                \
    { #name, name##_forward, name##_backward, NULL, NULL, name##_forward_fp8, name##_backward_fp8 }
#define GATED(name)                                                                                                    \
    { #name, NULL, NULL, name##_forward, name##_backward, name##_forward_fp8, name##_backward_fp8 }
static const struct activation activations[] = {POINTWISE(gelu), POINTWISE(gelu_erf), POINTWISE(squared_relu),
                                                GATED(swiglu), GATED(geglu)};
enum { ACTIVATIONS = sizeof activations / sizeof *activations };

// Gives all NaNs the same sign: it depends on the order of a product's operands, which the compiler chooses.
static void make_nans_equal(float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (isnan(x[i]))
            x[i] = NAN;
}

// Returns n values. In each 16, two are 0, one is tiny and one is large; the last of all is the largest. The caller
// frees them.
static floatX *inputs(int64_t n, float size, bool finite, uint64_t *random) {
    floatX *x = (floatX *)test_alloc((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++) {
        const float uniform = size * (float)test_uniform(random);
        const int kind = (int)(test_random(random) % 16);
        x[i] = to_floatX(kind < 2 ? 0 : kind == 2 ? uniform * 0x1p-20f : kind == 3 ? uniform * 16 : uniform);
    }
    x[n - 1] = to_floatX(20 * size);
    if (!finite)
        x[n / 3] = to_floatX(NAN);
    return x;
}

struct example {
    int64_t N;
    int F;
    enum fp8_format format;
    float delayed;
    uint32_t amax; // left by an earlier part of the micro-batch
    bool finite;
};
static void check(const struct activation *a, bool backward, const struct example *e) {
    const int wide = a->forward ? e->F : 2 * e->F; // columns of fc
    const int64_t N = e->N, n = N * e->F, columns = backward ? wide : e->F;
    uint64_t random = (uint64_t)(n + columns);
    test_case(random, "%s %s, %lld x %d, delayed scale %g, amax %08x%s", a->name, backward ? "backward" : "forward",
              (long long)N, e->F, e->delayed, e->amax, e->finite ? "" : ", with a NaN");
    floatX *fc = inputs(N * wide, 3, e->finite, &random), *dact = inputs(n, 1e-3f, true, &random);
    floatX *result = (floatX *)test_alloc((size_t)(N * columns) * sizeof *result);
    void *workspace = test_alloc(fp8_cast_workspace_bytes(N, columns));
    struct outputs fused = outputs_create(N, columns, e->format, e->delayed, e->amax);
    struct outputs apart = outputs_create(N, columns, e->format, e->delayed, e->amax);

    if (a->forward && backward)
        a->backward(result, NULL, dact, fc, N, e->F, NULL, &device);
    else if (a->forward)
        a->forward(result, fc, n, NULL, &device);
    else if (backward)
        a->backward_gated(result, NULL, dact, fc, N, e->F, NULL, &device);
    else
        a->forward_gated(result, fc, N, e->F, NULL, &device);
    fp8_amax(&apart.to.scale->amax, result, N * columns, &device);
    fp8_cast(apart.to, result, N, columns, workspace, &device);

    if (backward)
        a->backward_fp8(fused.to, dact, fc, N, e->F, workspace, &device);
    else
        a->forward_fp8(fused.to, fc, N, e->F, workspace, &device);
    make_nans_equal(fused.to.dbias, columns);
    make_nans_equal(apart.to.dbias, columns);
    assert_memory_equal(fused.to.scale, apart.to.scale, sizeof *apart.to.scale);
    assert_memory_equal(fused.bytes, apart.bytes, apart.count);
    void *all[] = {fc, dact, result, workspace, fused.bytes, apart.bytes};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static void check_all(bool backward) {
    const struct example examples[] = {
        {16, 16, FP8_E4M3, 0, 0, true},          {48, 80, FP8_E4M3, 0, 0, true},
        {48, 80, FP8_E5M2, 0, 0x45000000, true}, {48, 80, FP8_E4M3, 100, 0, true},
        {16, 272, FP8_E5M2, 3e7f, 0, true},      {144, 112, FP8_E4M3, 0.25f, 0x45000000, true},
        {144, 112, FP8_E5M2, 0x1p40f, 0, true},  {80, 64, FP8_E4M3, 0, 0, false},
        {80, 64, FP8_E4M3, 2, 0, false}};
    for (int i = 0; i < ACTIVATIONS; i++)
        for (size_t k = 0; k < sizeof examples / sizeof *examples; k++)
            check(&activations[i], backward, &examples[k]);
}
static void forward_is_op_amax_and_cast(void **state) { check_all(false); }
static void backward_is_op_amax_and_cast(void **state) { check_all(true); }

// Checks more tiles than the pass for the amax has blocks on a GPU.
static void every_tile_counts(void **state) {
    const struct example e = {FP8_TILE * 1100, 16, FP8_E4M3, 0, 0, true};
    check(&activations[2], false, &e);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forward_is_op_amax_and_cast),
        cmocka_unit_test(backward_is_op_amax_and_cast),
        cmocka_unit_test(every_tile_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
