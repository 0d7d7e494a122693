// kernels/state_format.cuh: the split of a master weight over all finite floats, the code tables against their formula,
// and what states of each format make of numbers.
#include "kernels/state_format.cuh"
#include "test/fails.h"
#include <omp.h> // omp_set_num_threads

// All finite floats take seconds where loops vectorize, so only one of the programs goes through them; the others take
// a sample.
#if defined(CUDA_EMULATED) || !defined(PRECISION_BF16)
enum { STRIDE = 251 };
#else
enum { STRIDE = 1 };
#endif

// ---- Parameters and remainders ----

static int64_t wrong_splits(uint32_t first, uint32_t last, uint32_t stride) {
    int64_t wrong = 0;
#pragma omp parallel for simd schedule(static) reduction(+ : wrong)
    for (uint32_t bits = first; bits < last; bits += stride) {
        const float x = float_from_bits(bits);
        const uint32_t high = (uint32_t)split_high(x).bits << 16,
                       back = float_bits(split_join(split_high(x), split_low(x)));
        wrong += back != bits || bits - high + 0x8000u > 0xffffu; // within half a unit; a tie goes to the upper half
    }
    return wrong;
}
static int64_t wrong_splits_ties_to_even(uint32_t first, uint32_t last, uint32_t stride) {
    int64_t wrong = 0;
#pragma omp parallel for simd schedule(static) reduction(+ : wrong)
    for (uint32_t bits = first; bits < last; bits += stride) {
        const float x = float_from_bits(bits);
        wrong += float_bits(split_join(bf16_from_float(x), split_low(x))) != bits;
    }
    return wrong;
}
static void a_split_is_exact_for_all_finite_floats(void **state) {
    assert_int_equal(wrong_splits(0, 0x7f800000u, STRIDE), 0);
    assert_int_equal(wrong_splits(0x80000000u, 0xff800000u, STRIDE), 0);
}
// Checks that with ties to even each even upper half loses its tie.
static void a_split_with_ties_to_even_is_not(void **state) {
    const int64_t wrong = wrong_splits_ties_to_even(0, 0x7f800000u, 0x8000u);
    assert_int_equal(2 * wrong, 32640);
    assert_int_equal(wrong_splits(0, 0x7f800000u, 0x8000u), 0);
}
static void parameters_are_rounded_to_the_nearest_with_ties_away_from_zero(void **state) {
    const float values[][2] = {{1, 1},
                               {1 + 0x1p-8f, 1 + 0x1p-7f},
                               {1 + 0x1.8p-7f, 1 + 0x1p-6f},
                               {1 + 0x1.fep-9f, 1},
                               {-1 - 0x1p-8f, -1 - 0x1p-7f},
                               {0, 0}};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        assert_true(bf16_to_float(split_high(values[i][0])) == values[i][1]);
        assert_true(to_float(parameter_rounded(values[i][0])) == values[i][sizeof(floatX) == 2]);
    }
    assert_true(float_bits(bf16_to_float(split_high(-0.0f))) == 0x80000000u);
}

// ---- Stochastic rounding ----

static void stochastic_rounding_goes_up_for_as_many_numbers_as_the_lower_half_says(void **state) {
    uint64_t random = 1;
    for (int i = 0; i < 64; i++) {
        uint32_t bits = (uint32_t)test_random(&random);
        bits = i < 2 ? bits & 0xffff0000u : i < 4 ? (bits & 0xffff0000u) | 1 : i < 6 ? bits | 0xffffu : bits;
        if ((bits & 0x7f800000u) == 0x7f800000u)
            continue;
        test_case(1, "bits %x", bits);
        int64_t up = 0;
        for (uint32_t r = 0; r < 65536; r++) {
            const uint32_t got = bf16_stochastic(float_from_bits(bits), r).bits;
            assert_true(got == bits >> 16 || got == (bits >> 16) + 1);
            up += got != bits >> 16;
        }
        assert_int_equal(up, bits & 0xffff);
    }
}
static void stochastic_rounding_keeps_what_is_not_finite(void **state) {
    for (uint32_t r = 0; r < 65536; r++) {
        assert_true(bf16_stochastic(INFINITY, r).bits == 0x7f80 && bf16_stochastic(-INFINITY, r).bits == 0xff80);
        assert_true(isnan(bf16_to_float(bf16_stochastic(float_from_bits(0x7fffffffu), r))));
        assert_true(isnan(bf16_to_float(bf16_stochastic(float_from_bits(0xffffffffu), r))));
        assert_true(isnan(bf16_to_float(bf16_stochastic(float_from_bits(0x7f800001u), r))));
    }
}

// ---- Codes ----

// Computes the magnitudes of a format: 0, then for decades i = 0..6 the midpoints of n 2^i equal parts of [0.1, 1],
// times 10^(i - 6). Returns their number.
static int formula(double *magnitudes, int n) {
    int count = 0;
    magnitudes[count++] = 0;
    for (int i = 0; i < 7; i++)
        for (int j = 0; j < n << i; j++)
            magnitudes[count++] = pow(10, i - 6) * (0.1 + 0.9 * (j + 0.5) / (n << i));
    return count;
}
static void tables_are_their_formula(void **state) {
    double expected[256];
    assert_int_equal(formula(expected, 1), 128);
    expected[127] = 1;
    for (int i = 0; i < 128; i++)
        assert_near(code_magnitudes[i], expected[i], 0x1p-24 * expected[i], i);
    assert_int_equal(formula(expected, 2), 255);
    expected[255] = 1;
    for (int i = 0; i < 256; i++)
        assert_near(root_code_magnitudes[i], expected[i], 0x1p-24 * expected[i], i);
    for (int i = 1; i < 256; i++)
        assert_true(root_code_magnitudes[i] > root_code_magnitudes[i - 1]);
    assert_true(code_magnitudes[127] == 1 && root_code_magnitudes[255] == 1);
}

enum { SCALES = 9 };
static const float scales[SCALES] = {1, 0.7f, 3e-5f, 1e-8f, 123.4f, 0x1p-100f, 1e30f, 0x1.fffffep127f, 3e-30f};
// Checks a block that holds one code again and again, after the largest, which fixes the scale.
static void every_code_decodes_and_encodes_to_itself(void **state) {
    for (int s = 0; s < SCALES; s++)
        for (int root = 0; root < 2; root++)
            for (int code = 0; code < 256; code++) {
                const enum state_format format = root ? FORMAT_8BIT_ROOT : FORMAT_8BIT;
                const float scale = root ? scales[s] < 1e-18f ? 1e-9f : sqrtf(scales[s]) : scales[s];
                if (!root && code == CODE_NEGATIVE) // -0, which nothing encodes to
                    continue;
                test_case_without_seed("%s code %d, scale %g", root ? "root" : "signed", code, (double)scale);
                struct code_block block, again;
                float values[STATE_BLOCK];
                memset(block.codes, code, sizeof block.codes);
                block.codes[5] = root ? ROOT_CODE_LAST : CODE_LAST | (code & CODE_NEGATIVE);
                block.scale = scale;
                state_decode(values, &block, format, STATE_BLOCK);
                state_encode(&again, values, format, STATE_BLOCK);
                assert_memory_equal(&again, &block, sizeof block);
            }
}

// Fills values (n) with normal numbers times log-normal ones, as moments are; `squared`, for v: with their squares.
static void moments(float *values, int64_t n, bool squared, double spread, uint64_t *random) {
    for (int64_t i = 0; i < n; i++) {
        double normal[2] = {0, 0};
        for (int k = 0; k < 24; k++)
            normal[k % 2] += test_uniform(random) / 2;
        const double x = normal[0] * exp(spread * normal[1]) * 1e-3;
        values[i] = (float)(squared ? x * x : x);
    }
}
static void quantizing_twice_is_quantizing_once(void **state) {
    enum { N = 1 << 16 };
    uint64_t random = 3;
    float *values = (float *)test_alloc(N * sizeof *values);
    for (int root = 0; root < 2; root++) {
        const enum state_format format = root ? FORMAT_8BIT_ROOT : FORMAT_8BIT;
        const size_t bytes = state_bytes(format, N);
        char *once = (char *)test_alloc(bytes), *twice = (char *)test_alloc(bytes);
        moments(values, N, root, 2, &random);
        state_encode(once, values, format, N);
        state_decode(values, once, format, N);
        state_encode(twice, values, format, N);
        assert_memory_equal(twice, once, bytes);
        free(once);
        free(twice);
    }
    free(values);
}

// Returns the distance from y to the nearest of table[0 .. last], by bisection.
static double nearest_distance(double y, const float *table, int last) {
    int low = 0, high = last; // table[low] <= y <= table[high]
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (table[middle] <= y)
            low = middle;
        else
            high = middle;
    }
    return fmin(fabs(y - (double)table[low]), fabs((double)table[high] - y));
}
// Checks that y's code is the nearest, except at the borders between two codes, which are rounded by 4 units in the
// last place.
static void check_nearest(float y) {
    const double code = code_magnitudes[code_nearest(y, 1, CODE_LAST)];
    const double root_code = root_code_magnitudes[code_nearest(y, 2, ROOT_CODE_LAST)];
    if (!(fabs(code - (double)y) <= nearest_distance(y, code_magnitudes, CODE_LAST) + 1e-6 * (double)y))
        fail_msg("%.9g becomes %.9g", (double)y, code);
    if (!(fabs(root_code - (double)y) <= nearest_distance(y, root_code_magnitudes, ROOT_CODE_LAST) + 1e-6 * (double)y))
        fail_msg("%.9g becomes %.9g of roots", (double)y, root_code);
}
static void codes_are_the_nearest(void **state) {
    check_nearest(0);
    for (uint32_t bits = float_bits(0x1p-24f); bits <= float_bits(1.0f); bits += STRIDE == 1 ? 100 : 1000)
        check_nearest(float_from_bits(bits));
    for (int i = 1; i < 256; i++)
        for (int near = -20; near <= 20; near++) {
            const float between = 0.5f * (root_code_magnitudes[i - 1] + root_code_magnitudes[i]);
            check_nearest(float_from_bits(float_bits(between) + (uint32_t)near));
            if (i < 128)
                check_nearest(
                    float_from_bits(float_bits(0.5f * (code_magnitudes[i - 1] + code_magnitudes[i])) + (uint32_t)near));
        }
}

static void decode_block_of(float *values, enum state_format format, const float *from, int n) {
    char block[STATE_BLOCK * sizeof(float)];
    state_encode(block, from, format, n);
    state_decode(values, block, format, n);
}
static void zeros_stay_zeros(void **state) {
    float values[STATE_BLOCK] = {0}, got[STATE_BLOCK];
    const enum state_format formats[] = {FORMAT_FP32, FORMAT_BF16, FORMAT_8BIT, FORMAT_8BIT_ROOT};
    for (int f = 0; f < 4; f++) {
        decode_block_of(got, formats[f], values, STATE_BLOCK);
        assert_memory_equal(got, values, sizeof got);
    }
    for (int i = 0; i < STATE_BLOCK; i++)
        values[i] = i % 2 ? -0.0f : i % 3 ? 0.0f : 1.0f;
    for (int f = 2; f < 4; f++) {
        struct code_block block;
        state_encode(&block, values, formats[f], STATE_BLOCK);
        for (int i = 0; i < STATE_BLOCK; i++)
            assert_int_equal(block.codes[i], i % 2 == 0 && i % 3 == 0 ? formats[f] == FORMAT_8BIT ? 127 : 255 : 0);
    }
}
static void the_extreme_of_a_block_is_exact_whatever_its_sign(void **state) {
    for (int sign = -1; sign <= 1; sign += 2)
        for (int n = 1; n <= STATE_BLOCK; n += 9) {
            float values[STATE_BLOCK], got[STATE_BLOCK];
            for (int i = 0; i < n; i++)
                values[i] = (float)-sign * 0.001f * (float)i;
            values[n / 2] = (float)sign * 0.777f;
            decode_block_of(got, FORMAT_8BIT, values, n);
            assert_true(got[n / 2] == values[n / 2]);
        }
}
static void second_moments_that_are_not_zero_never_become_zero(void **state) {
    const float least[] = {1e-30f, 0x1p-126f, 0x1p-149f, 1e-14f, 1e-10f};
    for (size_t k = 0; k < sizeof least / sizeof *least; k++) {
        float values[STATE_BLOCK], got[STATE_BLOCK];
        for (int i = 0; i < STATE_BLOCK; i++)
            values[i] = i == 3 ? 100.0f : i == 4 ? 0 : least[k];
        decode_block_of(got, FORMAT_8BIT_ROOT, values, STATE_BLOCK);
        for (int i = 0; i < STATE_BLOCK; i++)
            assert_true(i == 4 ? got[i] == 0 : got[i] > 0);
        values[3] = least[k];
        decode_block_of(got, FORMAT_8BIT_ROOT, values, STATE_BLOCK);
        for (int i = 0; i < STATE_BLOCK; i++)
            assert_true(i == 4 ? got[i] == 0 : got[i] > 0);
    }
}
static void no_code_makes_a_nan(void **state) {
    const float hard[] = {INFINITY, NAN, 0x1.fffffep127f, 0x1p-149f, 0, 1, 0x1p-126f, 1e-40f};
    enum { HARD = sizeof hard / sizeof *hard };
    for (int a = 0; a < HARD; a++)
        for (int b = 0; b < HARD; b++)
            for (int format = 0; format < 2; format++) {
                float values[STATE_BLOCK], got[STATE_BLOCK];
                for (int i = 0; i < STATE_BLOCK; i++)
                    values[i] = (i % 3 && !format ? -1.0f : 1.0f) * hard[i % 2 ? a : b];
                decode_block_of(got, format ? FORMAT_8BIT_ROOT : FORMAT_8BIT, values, STATE_BLOCK);
                for (int i = 0; i < STATE_BLOCK; i++)
                    assert_true(isfinite(got[i]));
            }
}

// ---- Whole states ----

static void bytes(void **state) {
    assert_int_equal(state_bytes(FORMAT_FP32, 256), 1024);
    assert_int_equal(state_bytes(FORMAT_BF16, 256), 512);
    assert_int_equal(state_bytes(FORMAT_REMAINDER, 256), 512);
    assert_int_equal(state_bytes(FORMAT_8BIT, 256), 264);
    assert_int_equal(state_bytes(FORMAT_8BIT_ROOT, 129), 264);
    assert_int_equal(state_bytes(FORMAT_8BIT, 0), 0);
    assert_int_equal(sizeof(struct code_block), state_block_bytes(FORMAT_8BIT));
}
// Checks states of each format that are encoded and decoded again: how much they lose, and that nothing after the end
// is read or written.
static void states_hold_what_was_encoded(void **state) {
    const enum state_format formats[] = {FORMAT_FP32, FORMAT_BF16, FORMAT_8BIT, FORMAT_8BIT_ROOT};
    const double bounds[] = {0, 0x1p-9, 0.05, 0.02}; // of the square root, for formats of square roots
    const int64_t sizes[] = {1, 127, 128, 129, 1000, 5003};
    for (int f = 0; f < 4; f++)
        for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
            const int64_t n = sizes[k];
            const bool root = formats[f] == FORMAT_8BIT_ROOT;
            const size_t size = formats[f] == FORMAT_FP32   ? (size_t)n * 4
                                : formats[f] == FORMAT_BF16 ? (size_t)n * 2
                                                            : state_bytes(formats[f], n);
            uint64_t random = 7;
            test_case(random, "format %d, n %lld", f, (long long)n);
            float *values = (float *)malloc((size_t)n * sizeof *values),
                  *got = (float *)malloc((size_t)n * sizeof *got);
            char *coded = (char *)malloc(size + 1), *again = (char *)malloc(size);
            double *expected = test_doubles(n), *result = test_doubles(n);
            moments(values, n, root, 0.3, &random);
            coded[size] = 77;
            memset(again, 1, size);
            state_encode(coded, values, formats[f], n);
            omp_set_num_threads(1);
            state_encode(again, values, formats[f], n);
            omp_set_num_threads(omp_get_num_procs());
            state_decode(got, coded, formats[f], n);
            for (int64_t i = 0; i < n; i++) {
                expected[i] = root ? sqrt((double)values[i]) : (double)values[i];
                result[i] = root ? sqrt((double)got[i]) : (double)got[i];
            }
            assert_int_equal(coded[size], 77);
            assert_memory_equal(again, coded, size);
            assert_close(result, expected, n, bounds[f]);
            free(values);
            free(got);
            free(coded);
            free(again);
            free(expected);
            free(result);
        }
}

static void decode_remainders(void *unused) {
    float x[4];
    const uint16_t remainders[4] = {1, 2, 3, 4};
    state_decode(x, remainders, FORMAT_REMAINDER, 4);
}
static void encode_remainders(void *unused) {
    const float x[4] = {1, 2, 3, 4};
    uint16_t remainders[4];
    state_encode(remainders, x, FORMAT_REMAINDER, 4);
}
static void remainders_alone_are_no_numbers(void **state) {
    assert_fails(decode_remainders, NULL, "remainders|parameters");
    assert_fails(encode_remainders, NULL, "remainders|parameters");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_split_is_exact_for_all_finite_floats),
        cmocka_unit_test(a_split_with_ties_to_even_is_not),
        cmocka_unit_test(parameters_are_rounded_to_the_nearest_with_ties_away_from_zero),
        cmocka_unit_test(stochastic_rounding_goes_up_for_as_many_numbers_as_the_lower_half_says),
        cmocka_unit_test(stochastic_rounding_keeps_what_is_not_finite),
        cmocka_unit_test(tables_are_their_formula),
        cmocka_unit_test(every_code_decodes_and_encodes_to_itself),
        cmocka_unit_test(quantizing_twice_is_quantizing_once),
        cmocka_unit_test(codes_are_the_nearest),
        cmocka_unit_test(zeros_stay_zeros),
        cmocka_unit_test(the_extreme_of_a_block_is_exact_whatever_its_sign),
        cmocka_unit_test(second_moments_that_are_not_zero_never_become_zero),
        cmocka_unit_test(no_code_makes_a_nan),
        cmocka_unit_test(bytes),
        cmocka_unit_test(states_hold_what_was_encoded),
        cmocka_unit_test(remainders_alone_are_no_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
