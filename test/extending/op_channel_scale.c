// kernels/channel_scale.cuh against its formula in double. Tolerances: one rounding of a product to floatX, and for dscale
// roundings of N summands of at most 1 to 2^-24 each.
#include "kernels/channel_scale.cuh"
#include "test/testing.h"

static struct device device = {2, NULL};

static void both_ways(void **state) {
    enum { N = 33, C = 17 };
    uint64_t random = 5;
    test_case(5, "N %d, C %d", N, C);
    double *in_exact, *dout_exact, *scale_exact, *out_wanted = test_doubles(N * C), *din_wanted = test_doubles(N * C);
    double *dscale_wanted = test_doubles(C);
    floatX *in = test_floats(&in_exact, N * C, 1, &random), *dout = test_floats(&dout_exact, N * C, 1, &random);
    floatX *scale = test_floats(&scale_exact, C, 1, &random);
    floatX *out = (floatX *)test_alloc(N * C * sizeof *out);
    float *dscale = (float *)test_alloc(C * sizeof *dscale);
    memset(dscale, 0xff, C * sizeof *dscale); // NaN, which the first call overwrites
    memset(dscale_wanted, 0, C * sizeof *dscale_wanted);
    for (int i = 0; i < N * C; i++) {
        out_wanted[i] = in_exact[i] * scale_exact[i % C];
        din_wanted[i] = dout_exact[i] * scale_exact[i % C];
        dscale_wanted[i % C] += 2 * dout_exact[i] * in_exact[i];
    }
    channel_scale_forward(out, in, scale, N, C, &device);
    assert_close(to_doubles(out, N * C), out_wanted, N * C, 1.1 * FLOATX_ROUNDING);
    for (int add = 0; add < 2; add++)
        channel_scale_backward(out, dscale, dout, in, scale, N, C, add, &device);
    assert_close(to_doubles(out, N * C), din_wanted, N * C, 1.1 * FLOATX_ROUNDING);
    assert_close(floats_to_doubles(dscale, C), dscale_wanted, C, 2 * N * 0x1p-24);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(both_ways)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
