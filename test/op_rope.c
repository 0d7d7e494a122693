// kernels/rope.cuh against rotations in double, and the transpose that backward must be, by finite differences.
//
// Tolerances. fp32: table entries and two products rounded once each: 3e-7. bf16: one rounding of the result, and a
// tenth.
#include "kernels/rope.cuh"
#include "test/testing.h"

#define TOLERANCE (sizeof(floatX) == 2 ? 1.1 * FLOATX_ROUNDING : 3e-7)
static struct device device = {2, NULL};

struct shape {
    int B, T, start, H, Hkv, D;
};
static const struct shape shapes[] = {{1, 1, 0, 1, 1, 2},   {1, 1, 5, 2, 1, 8},     {2, 3, 0, 3, 1, 6},
                                      {2, 17, 9, 4, 2, 64}, {3, 33, 100, 2, 2, 80}, {1, 7, 8000, 5, 1, 34},
                                      {2, 5, 3, 5, 2, 32},  {1, 9, 2, 9, 9, 128},   {2, 4, 1, 3, 1, 20}};
enum { SHAPES = sizeof shapes / sizeof *shapes };
static const double THETA = 10000;
static struct token_positions positions_of(const int32_t *starts) {
    const struct token_positions positions = {starts, NULL};
    return positions;
}

static void test_case_shape(uint64_t seed, struct shape s) {
    test_case(seed, "B %d, T %d from %d, %d heads, %d KV heads of %d", s.B, s.T, s.start, s.H, s.Hkv, s.D);
}

// rotate_half of Hugging Face: x cos + (-second half, first half) sin, with the angles repeated in both halves.
static void reference(double *out, const double *in, struct shape s) {
    const int heads = s.H + 2 * s.Hkv;
    for (int b = 0; b < s.B; b++)
        for (int t = 0; t < s.T; t++)
            for (int h = 0; h < heads; h++)
                for (int i = 0; i < s.D; i++) {
                    const int64_t head = (((int64_t)b * s.T + t) * heads + h) * s.D;
                    const double angle = (test_start(s.start, b) + t) / pow(THETA, 2.0 * (i % (s.D / 2)) / s.D);
                    const double half = i < s.D / 2 ? -in[head + i + s.D / 2] : in[head + i - s.D / 2];
                    out[head + i] = h < s.H + s.Hkv ? in[head + i] * cos(angle) + half * sin(angle) : in[head + i];
                }
}

static void forward(void **state) {
    for (int k = 0; k < SHAPES; k++) {
        const struct shape s = shapes[k];
        const int64_t n = (int64_t)s.B * s.T * (s.H + 2 * s.Hkv) * s.D;
        uint64_t random = (uint64_t)n;
        test_case_shape(random, s);
        double *exact, *expected = test_doubles(n);
        floatX *qkv = test_floats(&exact, n, 2, &random);
        float *table = (float *)test_alloc((size_t)(s.start + s.B + s.T) * (size_t)s.D * sizeof *table);
        rope_table(table, s.start + s.B + s.T, s.D, (float)THETA);
        int32_t *starts = test_starts(s.B, s.start);
        reference(expected, exact, s);
        rope_forward(qkv, table, positions_of(starts), s.B, s.T, s.H, s.Hkv, s.D, &device);
        double *result = to_doubles(qkv, n);
        assert_close(result, expected, n, TOLERANCE);
        // v is not touched
        for (int64_t token = 0; token < (int64_t)s.B * s.T; token++)
            for (int i = (s.H + s.Hkv) * s.D; i < (s.H + 2 * s.Hkv) * s.D; i++)
                assert_true(result[token * (s.H + 2 * s.Hkv) * s.D + i] == exact[token * (s.H + 2 * s.Hkv) * s.D + i]);
        void *all[] = {exact, expected, qkv, table, starts, result};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            free(all[i]);
    }
}

// dqkv[j] = sum_i dout[i] d out[i] / d in[j]. The op is linear, so that a central difference is exact but for rounding.
static void backward(void **state) {
    const struct shape s = {2, 3, 4, 2, 1, 6};
    enum { COUNT = 2 * 3 * 4 * 6 };
    uint64_t random = 11;
    test_case_shape(random, s);
    double *dout_exact, in[COUNT], out[COUNT], expected[COUNT];
    floatX *dqkv = test_floats(&dout_exact, COUNT, 1, &random);
    float *table = (float *)test_alloc(sizeof *table * 8 * 6);
    rope_table(table, 8, 6, (float)THETA);
    int32_t *starts = test_starts(s.B, s.start);
    for (int i = 0; i < COUNT; i++)
        in[i] = test_uniform(&random);
    for (int j = 0; j < COUNT; j++) {
        const double before = in[j];
        expected[j] = 0;
        for (int sign = -1; sign <= 1; sign += 2) {
            in[j] = before + sign * 0.5;
            reference(out, in, s);
            for (int i = 0; i < COUNT; i++)
                expected[j] += sign * dout_exact[i] * out[i];
        }
        in[j] = before;
    }
    rope_backward(dqkv, table, positions_of(starts), s.B, s.T, s.H, s.Hkv, s.D, &device);
    double *result = to_doubles(dqkv, COUNT);
    assert_close(result, expected, COUNT, TOLERANCE);
    free(result);
    free(dqkv);
    free(dout_exact);
    free(table);
    free(starts);
}

// An array that begins anywhere; nothing beside it is written.
static void misaligned(void **state) {
    const struct shape s = {2, 3, 1, 5, 2, 64};
    enum { COUNT = 2 * 3 * 9 * 64 };
    uint64_t random = 3;
    test_case_shape(random, s);
    double *exact;
    floatX *aligned = test_floats(&exact, COUNT, 1, &random),
           *memory = (floatX *)test_alloc(sizeof(floatX) * (COUNT + 2));
    float *table = (float *)test_alloc(sizeof *table * 5 * 64);
    rope_table(table, 5, 64, (float)THETA);
    int32_t *starts = test_starts(s.B, s.start);
    memcpy(memory + 1, aligned, sizeof(floatX) * COUNT);
    memory[0] = memory[COUNT + 1] = to_floatX(7);
    rope_forward(aligned, table, positions_of(starts), s.B, s.T, s.H, s.Hkv, s.D, &device);
    rope_forward(memory + 1, table, positions_of(starts), s.B, s.T, s.H, s.Hkv, s.D, &device);
    double *result = to_doubles(memory + 1, COUNT), *expected = to_doubles(aligned, COUNT);
    assert_close(result, expected, COUNT, TOLERANCE);
    assert_true(to_float(memory[0]) == 7 && to_float(memory[COUNT + 1]) == 7);
    void *all[] = {aligned, memory, table, starts, exact, result, expected};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

// The angle of a far position is right to fp32 although it is many turns.
static void far_positions(void **state) {
    enum { T = 131072, D = 4 };
    test_case_without_seed("table of T %d, heads of %d", T, D);
    float *table = (float *)test_alloc((size_t)T * D * sizeof *table);
    rope_table(table, T, D, 500000);
    for (int position = T - 5; position < T; position++)
        for (int i = 0; i < D / 2; i++) {
            const double angle = position * pow(500000, -2.0 * i / D);
            assert_near(table[position * D + i], cos(angle), 1e-7, position * D + i);
            assert_near(table[position * D + D / 2 + i], sin(angle), 1e-7, position * D + D / 2 + i);
        }
    free(table);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forward),
        cmocka_unit_test(backward),
        cmocka_unit_test(misaligned),
        cmocka_unit_test(far_positions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
