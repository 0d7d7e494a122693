// kernels/rope.cuh against rotations in double, and its backward, which must be the transpose, against finite
// differences. The frequencies of kernels/rope_table.cuh against the reference's formulas, and against its numbers.
//
// Tolerances. fp32: table entries and two products, each rounded once: 3e-7. bf16: one rounding of the result, and a
// tenth more.
#include "kernels/rope.cuh"
#include "kernels/rope_table.cuh" // rope_table
#include "test/testing.h"

#define TOLERANCE (sizeof(floatX) == 2 ? 1.1 * FLOATX_ROUNDING : 3e-7)
static struct device device = {2, NULL};

// Documents begin at each multiple of `document`, less the sequence's number; 0: there are no documents. RoPE rotates
// `rotary` elements of a head.
struct shape {
    int B, T, start, H, Hkv, D, document, rotary;
};
static const struct shape shapes[] = {
    {1, 1, 0, 1, 1, 2, 0, 2},    {1, 1, 5, 2, 1, 8, 0, 8},    {2, 3, 0, 3, 1, 6, 0, 2},
    {2, 17, 9, 4, 2, 64, 0, 64}, {3, 33, 0, 2, 2, 80, 7, 20}, {1, 7, 8000, 5, 1, 34, 0, 34},
    {2, 5, 3, 5, 2, 32, 1, 24},  {1, 9, 2, 9, 9, 128, 4, 96}, {2, 4, 1, 3, 1, 20, 5, 20}};
enum { SHAPES = sizeof shapes / sizeof *shapes };
static const double THETA = 10000, AMPLITUDE = 1.2079;

static void test_case_shape(uint64_t seed, struct shape s) {
    test_case(seed, "B %d, T %d from %d, %d heads, %d KV heads of %d, of which %d are rotated, documents of %d", s.B,
              s.T, s.start, s.H, s.Hkv, s.D, s.rotary, s.document);
}
static int document_start(struct shape s, int b, int t) {
    return s.document && t >= s.document - b ? (t + b) / s.document * s.document - b : 0;
}
// Returns the row (B, T) at which each token's document begins, which the caller frees; NULL where there are no
// documents.
static int32_t *document_starts(struct shape s) {
    int32_t *starts = s.document ? (int32_t *)test_alloc(sizeof *starts * (size_t)(s.B * s.T)) : NULL;
    for (int row = 0; row < s.B * s.T && starts; row++)
        starts[row] = document_start(s, row / s.T, row % s.T);
    return starts;
}
// Returns a table by yarn with a factor of 1, which scales no frequency, and gives rotated pairs an amplitude. The
// caller frees it.
static float *test_table(struct shape s) {
    const int T = s.start + s.B + s.T;
    float *table = (float *)test_alloc((size_t)T * (size_t)s.D * sizeof *table);
    struct rope_settings settings = rope_unscaled(s.D, THETA);
    settings.rotary_dims = s.rotary;
    settings.scaling = ROPE_YARN;
    settings.factor = 1;
    settings.max_positions = 4096;
    settings.attention_factor = AMPLITUDE;
    rope_table(table, T, &settings);
    return table;
}

// Computes rotate_half of Hugging Face: x cos + (-second half, first half) sin, with the angles repeated in each half.
static void reference(double *out, const double *in, struct shape s) {
    const int heads = s.H + 2 * s.Hkv;
    for (int b = 0; b < s.B; b++)
        for (int t = 0; t < s.T; t++)
            for (int h = 0; h < heads; h++)
                for (int i = 0; i < s.D; i++) {
                    const int64_t head = (((int64_t)b * s.T + t) * heads + h) * s.D;
                    const int pair = i % (s.D / 2);
                    const int position = test_start(s.start, b) + t - document_start(s, b, t);
                    const double angle = position / pow(THETA, 2.0 * pair / s.rotary);
                    const double half = i < s.D / 2 ? -in[head + i + s.D / 2] : in[head + i - s.D / 2];
                    const bool turns = h < s.H + s.Hkv && pair < s.rotary / 2;
                    out[head + i] = turns ? AMPLITUDE * (in[head + i] * cos(angle) + half * sin(angle)) : in[head + i];
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
        float *table = test_table(s);
        int32_t *starts = test_starts(s.B, s.start), *documents = document_starts(s);
        const struct token_positions positions = {starts, documents};
        reference(expected, exact, s);
        rope_forward(qkv, table, positions, s.B, s.T, s.H, s.Hkv, s.D, &device);
        double *result = to_doubles(qkv, n);
        assert_close(result, expected, n, TOLERANCE);
        // v is not touched.
        for (int64_t token = 0; token < (int64_t)s.B * s.T; token++)
            for (int i = (s.H + s.Hkv) * s.D; i < (s.H + 2 * s.Hkv) * s.D; i++)
                assert_true(result[token * (s.H + 2 * s.Hkv) * s.D + i] == exact[token * (s.H + 2 * s.Hkv) * s.D + i]);
        void *all[] = {exact, expected, qkv, table, starts, documents, result};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            free(all[i]);
    }
}

// Checks dqkv[j] = sum_i dout[i] d out[i] / d in[j]. The op is linear, so that a central difference is exact but for
// rounding.
static void backward(void **state) {
    const struct shape s = {2, 5, 0, 2, 1, 6, 3, 4};
    enum { COUNT = 2 * 5 * 4 * 6 };
    uint64_t random = 11;
    test_case_shape(random, s);
    double *dout_exact, in[COUNT], out[COUNT], expected[COUNT];
    floatX *dqkv = test_floats(&dout_exact, COUNT, 1, &random);
    float *table = test_table(s);
    int32_t *documents = document_starts(s);
    const struct token_positions positions = {NULL, documents};
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
    rope_backward(dqkv, table, positions, s.B, s.T, s.H, s.Hkv, s.D, NULL, &device);
    double *result = to_doubles(dqkv, COUNT);
    assert_close(result, expected, COUNT, TOLERANCE);
    void *all[] = {result, dqkv, dout_exact, table, documents};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

// Checks an array that begins anywhere; nothing beside it is written.
static void misaligned(void **state) {
    const struct shape s = {2, 3, 1, 5, 2, 64, 0, 64};
    enum { COUNT = 2 * 3 * 9 * 64 };
    uint64_t random = 3;
    test_case_shape(random, s);
    double *exact;
    floatX *aligned = test_floats(&exact, COUNT, 1, &random),
           *memory = (floatX *)test_alloc(sizeof(floatX) * (COUNT + 2));
    float *table = test_table(s);
    int32_t *starts = test_starts(s.B, s.start);
    const struct token_positions positions = {starts, NULL};
    memcpy(memory + 1, aligned, sizeof(floatX) * COUNT);
    memory[0] = memory[COUNT + 1] = to_floatX(7);
    rope_forward(aligned, table, positions, s.B, s.T, s.H, s.Hkv, s.D, &device);
    rope_forward(memory + 1, table, positions, s.B, s.T, s.H, s.Hkv, s.D, &device);
    double *result = to_doubles(memory + 1, COUNT), *expected = to_doubles(aligned, COUNT);
    assert_close(result, expected, COUNT, TOLERANCE);
    assert_true(to_float(memory[0]) == 7 && to_float(memory[COUNT + 1]) == 7);
    void *all[] = {aligned, memory, table, starts, exact, result, expected};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

// Checks that the angle of a far position is right to fp32, though it is many rotations.
static void far_positions(void **state) {
    enum { T = 131072, D = 4 };
    test_case_without_seed("table of T %d, heads of %d", T, D);
    float *table = (float *)test_alloc((size_t)T * D * sizeof *table);
    const struct rope_settings settings = rope_unscaled(D, 500000);
    rope_table(table, T, &settings);
    for (int position = T - 5; position < T; position++)
        for (int i = 0; i < D / 2; i++) {
            const double angle = position * pow(500000, -2.0 * i / D);
            assert_near(table[position * D + i], cos(angle), 1e-7, position * D + i);
            assert_near(table[position * D + D / 2 + i], sin(angle), 1e-7, position * D + D / 2 + i);
        }
    free(table);
}

// ---- Scaled frequencies ----

static struct rope_settings settings_of(int rotary, double theta, enum rope_scaling scaling, double factor,
                                        double original_positions) {
    struct rope_settings s = rope_unscaled(rotary, theta);
    s.scaling = scaling;
    s.factor = factor;
    s.original_positions = original_positions;
    s.low_freq_factor = 1;
    s.high_freq_factor = 4;
    s.truncate = true;
    s.max_positions = (int)(original_positions * (factor > 0 ? factor : 6));
    return s;
}

// Checks frequencies against numbers that transformers 5.23.0 computed in fp32
// (modeling_rope_utils.ROPE_INIT_FUNCTIONS): 2e-6.
static void assert_frequencies(const struct rope_settings *s, double amplitude, const int pairs[4],
                               const double frequencies[4]) {
    assert_near(rope_amplitude(s), amplitude, 1e-8 * amplitude, -1);
    for (int i = 0; i < 4; i++)
        assert_near(rope_frequency(s, pairs[i]), frequencies[i], 2e-6 * frequencies[i], pairs[i]);
}
// Checks the frequencies of published models: Llama 3.2 1B and 3.1 8B, Qwen3, OLMo 3; Phi-4-mini without its long
// factors.
static void published_models(void **state) {
    {
        const struct rope_settings s = settings_of(64, 500000, ROPE_LLAMA3, 32, 8192);
        const int pairs[] = {8, 16, 17, 31};
        const double frequencies[] = {0.0376060307, 0.000429556705, 9.70828623e-05, 9.41830649e-08};
        assert_frequencies(&s, 1, pairs, frequencies);
    }
    {
        const struct rope_settings s = settings_of(128, 500000, ROPE_LLAMA3, 8, 8192);
        const int pairs[] = {24, 29, 32, 63};
        const double frequencies[] = {0.00729266508, 0.00216657063, 0.000524846022, 3.06892588e-07};
        assert_frequencies(&s, 1, pairs, frequencies);
    }
    {
        const struct rope_settings s = settings_of(128, 1e6, ROPE_YARN, 4, 32768);
        const int pairs[] = {17, 24, 32, 63};
        const double frequencies[] = {0.0254829675, 0.00537532149, 0.000602941145, 3.10234441e-07};
        assert_frequencies(&s, 1.13862944, pairs, frequencies);
    }
    {
        struct rope_settings s = settings_of(128, 500000, ROPE_YARN, 8, 8192);
        s.attention_factor = 1.2079441541679836;
        const int pairs[] = {17, 20, 32, 63};
        const double frequencies[] = {0.0306345206, 0.0148556903, 0.000395147857, 3.06892588e-07};
        assert_frequencies(&s, 1.2079441541679836, pairs, frequencies);
    }
    double short_factors[48], long_factors[48];
    for (int i = 0; i < 48; i++) {
        short_factors[i] = 1;
        long_factors[i] = 1 + 0.05 * i;
    }
    struct rope_settings s = settings_of(96, 10000, ROPE_LONGROPE, 0, 4096);
    s.head_dim = 128;
    s.max_positions = 131072;
    s.short_factors = short_factors;
    s.long_factors = long_factors;
    s.longest = 4096;
    const int pairs[] = {1, 12, 29, 47};
    const double frequencies[] = {0.825404167, 0.100000001, 0.0038311861, 0.000121152749};
    assert_frequencies(&s, 1.19023807, pairs, frequencies);
    s.longest = 4097;
    const double long_frequencies[] = {0.786099255, 0.0625, 0.00156374939, 3.61650018e-05};
    assert_frequencies(&s, 1.19023807, pairs, long_frequencies);
    s.factor = 1;
    assert_true(rope_amplitude(&s) == 1);
    s.attention_factor = 1.25;
    assert_true(rope_amplitude(&s) == 1.25);
}

// Checks what yarn's settings change: its limits, which are rounded or not, lie within R - 1 and differ, and its
// amplitude.
static void yarn_settings(void **state) {
    const int pairs[] = {20, 24, 29, 32}, all[] = {0, 1, 2, 3};
    struct rope_settings s = settings_of(128, 1e6, ROPE_YARN, 4, 32768);
    s.truncate = false;
    const double not_rounded[] = {0.0133352149, 0.00551727042, 0.00142853614, 0.000607408001};
    assert_frequencies(&s, 1.13862944, pairs, not_rounded);
    s.truncate = true;
    s.beta_fast = 16;
    s.beta_slow = 2;
    s.mscale = 1.3;
    const double betas[] = {0.0133352149, 0.00562341325, 0.00152007618, 0.000590909098};
    assert_frequencies(&s, 1.13862944, pairs, betas); // mscale counts only with mscale_all_dim
    s.mscale_all_dim = 0.7;
    assert_frequencies(&s, 1.07582004, pairs, betas);
    s.attention_factor = 1.5;
    assert_frequencies(&s, 1.5, pairs, betas);

    s = settings_of(8, 10, ROPE_YARN, 4, 6236); // the upper limit, 12 turns, becomes R - 1
    s.beta_fast = 300;
    const double limited[] = {1, 0.562341332, 0.316227764, 0.151153743};
    assert_frequencies(&s, 1.13862944, all, limited);
    s = settings_of(8, 10, ROPE_YARN, 4, 6); // each limit is 0
    const double equal[] = {1, 0.140585333, 0.079056941, 0.0444569848};
    assert_frequencies(&s, 1.13862944, all, equal);
    s = settings_of(8, 10000, ROPE_YARN, 0, 4000); // the factor follows from the model's length: 6
    const double derived[] = {1, 0.1, 0.00583333336, 0.000166666665};
    assert_frequencies(&s, 1.17917595, all, derived);
    s.factor = 6;
    s.original_positions = 0;
    s.max_positions = 4000;
    assert_frequencies(&s, 1.17917595, all, derived);
    s.factor = 1;
    assert_true(rope_amplitude(&s) == 1);
}

// Returns llama3's frequency in place of w by wavelengths, as the reference writes the formula.
static double reference_llama3(const struct rope_settings *s, double w) {
    const double wavelength = 2 * M_PI / w, T0 = s->original_positions;
    if (wavelength < T0 / s->high_freq_factor)
        return w;
    if (wavelength > T0 / s->low_freq_factor)
        return w / s->factor;
    const double smooth = (T0 / wavelength - s->low_freq_factor) / (s->high_freq_factor - s->low_freq_factor);
    return (1 - smooth) * w / s->factor + smooth * w;
}
// Returns yarn's frequency of pair i as a mean of two frequencies, as the reference writes the formula.
static double reference_yarn(const struct rope_settings *s, int i) {
    const double frequency = pow(s->theta, 2.0 * i / s->rotary_dims), R = s->rotary_dims;
    double low = floor(R * log(s->original_positions / (32 * 2 * M_PI)) / (2 * log(s->theta)));
    double high = ceil(R * log(s->original_positions / (1 * 2 * M_PI)) / (2 * log(s->theta)));
    low = low < 0 ? 0 : low;
    high = high > R - 1 ? R - 1 : high;
    double ramp = (i - low) / (high - low);
    ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
    return ramp / (s->factor * frequency) + (1 - ramp) / frequency;
}
static void scaled_frequencies(void **state) {
    for (int variant = 0; variant < 24; variant++) {
        const int R = variant % 3 == 0 ? 64 : variant % 3 == 1 ? 128 : 20;
        const double theta = variant % 2 ? 10000 : 5e5, factor = 1.5 + variant % 5, T0 = 1024 << variant % 4;
        test_case_without_seed("R %d, theta %g, factor %g, T0 %g", R, theta, factor, T0);
        const struct rope_settings linear = settings_of(R, theta, ROPE_LINEAR, factor, 0),
                                   llama3 = settings_of(R, theta, ROPE_LLAMA3, factor, T0),
                                   yarn = settings_of(R, theta, ROPE_YARN, factor, T0);
        for (int i = 0; i < R / 2; i++) {
            const double w = 1 / pow(theta, 2.0 * i / R);
            assert_near(rope_frequency(&linear, i) / w, 1 / factor, 1e-14, i);
            assert_near(rope_frequency(&llama3, i) / w, reference_llama3(&llama3, w) / w, 1e-13, i);
            assert_near(rope_frequency(&yarn, i) / w, reference_yarn(&yarn, i) / w, 1e-13, i);
        }
        assert_true(rope_amplitude(&linear) == 1 && rope_amplitude(&llama3) == 1);
        assert_near(rope_amplitude(&yarn), 0.1 * log(factor) + 1, 1e-14, 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forward),
        cmocka_unit_test(backward),
        cmocka_unit_test(misaligned),
        cmocka_unit_test(far_positions),
        cmocka_unit_test(published_models),
        cmocka_unit_test(yarn_settings),
        cmocka_unit_test(scaled_frequencies),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
