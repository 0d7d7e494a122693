// kernels/random.cuh: Random123's known answers, the vector form against the scalar one, and statistics. The bounds of
// statistics are in standard deviations of the estimate. Data are fixed, so that a test passes always or never.
#include "kernels/random.cuh"
#include "test/testing.h"

static void known_answers(void **state) {
    static const uint32_t cases[3][10] = {{0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
                                          {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff,
                                           0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
                                          {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0,
                                           0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}};
    for (int i = 0; i < 3; i++) {
        const uint32_t *c = cases[i];
        const struct philox_words four = philox4x32(c[0], c[1], c[2], c[3], c[4], c[5]);
        for (int w = 0; w < 4; w++)
            assert_int_equal(four.word[w], c[6 + w]);
        // The vector form counts in the two lower words.
        uint32_t words[PHILOX_CHUNK];
        const uint64_t block = (uint64_t)c[1] << 32 | c[0];
        philox_chunk(words, block - 5, c[2], c[3], (uint64_t)c[5] << 32 | c[4]);
        for (int w = 0; w < 4; w++)
            assert_int_equal(words[4 * 5 + w], c[6 + w]);
    }
}

static struct dropout mask(float p, uint64_t seed, uint64_t step, uint32_t layer, uint32_t use) {
    const struct dropout d = {p, seed, step, layer, use};
    return d;
}

static void row_equals_elements(void **state) {
    const uint64_t firsts[] = {0, 1, 2, 3, 4, 61, 63, 64, 65, 1023, 0xfffffffffu, ((uint64_t)1 << 34) - 7};
    const int counts[] = {0, 1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 127, 128, 200};
    const struct dropout d = mask(0.37f, 0x0123456789abcdefu, 12345, 7, DROPOUT_ATTENTION);
    for (size_t f = 0; f < sizeof firsts / sizeof *firsts; f++)
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
            float row[202];
            for (int i = 0; i < 202; i++)
                row[i] = -7;
            dropout_scales(row + 1, d, firsts[f], counts[c]);
            assert_true(row[0] == -7 && row[counts[c] + 1] == -7);
            for (int i = 0; i < counts[c]; i++)
                assert_true(row[i + 1] == dropout_scale(d, firsts[f] + (uint64_t)i));
        }
}

// Checks that elements are dropped below p and kept from p on: p at an element's own number, and at the next float,
// which may lie between two numbers.
static void threshold(void **state) {
    for (uint64_t element = 0; element < 1000; element++) {
        const struct philox_words four = philox4x32((uint32_t)(element / 4), 0, 5, 6 << 8 | DROPOUT_ATTENTION, 77, 0);
        const float u = uniform_from_word(four.word[element % 4]);
        for (int above = 0; above < 2; above++) {
            const struct dropout d = mask(above ? nextafterf(u, 1) : u, 77, 5, 6, DROPOUT_ATTENTION);
            float scale;
            dropout_scales(&scale, d, element, 1);
            assert_true((scale == 0) == above && (dropout_scale(d, element) == 0) == above);
        }
    }
}

static void limits_of_p(void **state) {
    float row[100];
    dropout_scales(row, mask(0, 1, 2, 3, DROPOUT_EMBEDDING), 0, 100);
    for (int i = 0; i < 100; i++)
        assert_true(row[i] == 1 && dropout_scale(mask(0, 1, 2, 3, 0), (uint64_t)i) == 1);
    dropout_scales(row, mask(1, 1, 2, 3, DROPOUT_EMBEDDING), 0, 100);
    for (int i = 0; i < 100; i++)
        assert_true(row[i] == 0 && dropout_scale(mask(1, 1, 2, 3, 0), (uint64_t)i) == 0);
}

enum { MANY = 1 << 18 };

// Returns the share of elements at which two masks agree; for independent masks with keep probability q: q^2 + (1-q)^2.
static double agreement(struct dropout a, struct dropout b) {
    static float scales_a[MANY], scales_b[MANY];
    dropout_scales(scales_a, a, 0, MANY);
    dropout_scales(scales_b, b, 0, MANY);
    int equal = 0;
    for (int i = 0; i < MANY; i++)
        equal += (scales_a[i] == 0) == (scales_b[i] == 0);
    return (double)equal / MANY;
}

static void masks_differ(void **state) {
    const struct dropout base = mask(0.5f, 42, 10, 3, DROPOUT_ATTENTION);
    test_case(42, "masks of %d elements, p 0.5", MANY);
    assert_true(agreement(base, base) == 1);
    const struct dropout others[] = {mask(0.5f, 43, 10, 3, DROPOUT_ATTENTION),
                                     mask(0.5f, 42 + ((uint64_t)1 << 32), 10, 3, DROPOUT_ATTENTION),
                                     mask(0.5f, 42, 11, 3, DROPOUT_ATTENTION),
                                     mask(0.5f, 42, 10, 4, DROPOUT_ATTENTION),
                                     mask(0.5f, 42, 10, 3, DROPOUT_ATTENTION_PROJECTION),
                                     mask(0.5f, 42, 10, 3, DROPOUT_MLP_PROJECTION),
                                     mask(0.5f, 42, 10, 3, DROPOUT_EMBEDDING)};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        assert_near(agreement(base, others[i]), 0.5, 5 * 0.5 / sqrt((double)MANY), (int64_t)i);
}

static void statistics_of_masks(void **state) {
    static float scales[MANY];
    const float ps[] = {0.001f, 0.1f, 0.5f, 0.9f};
    for (int k = 0; k < 4; k++) {
        const double p = ps[k], deviation = sqrt(p * (1 - p) / MANY);
        test_case(1, "masks of %d elements, p %g", MANY, p);
        dropout_scales(scales, mask(ps[k], 1, 1, 0, DROPOUT_MLP_PROJECTION), 17, MANY);
        int dropped = 0, pairs = 0;
        for (int i = 0; i < MANY; i++) {
            dropped += scales[i] == 0;
            pairs += scales[i] == 0 && scales[(i + 1) % MANY] == 0;
            assert_true(scales[i] == 0 || scales[i] == 1.0f / (1.0f - ps[k]));
        }
        assert_near((double)dropped / MANY, p, 4 * deviation, k);
        assert_near((double)pairs / MANY, p * p, 4 * sqrt(3 * p * p * (1 - p) / MANY) + 4.0 / MANY, k);
    }
}

static void uniform_numbers(void **state) {
    double sum = 0, squares = 0, lowest = 1, highest = 0;
    test_case(9, "%d uniform numbers", MANY);
    for (uint64_t i = 0; i < MANY; i++) {
        const double u = random_uniform(9, 1, i);
        sum += u;
        squares += u * u;
        lowest = u < lowest ? u : lowest;
        highest = u > highest ? u : highest;
    }
    assert_true(lowest >= 0 && highest < 1 && lowest < 40.0 / MANY && highest > 1 - 40.0 / MANY);
    assert_near(sum / MANY, 0.5, 4 * sqrt(1.0 / 12 / MANY), 1);
    assert_near(squares / MANY, 1.0 / 3, 4 * sqrt(4.0 / 45 / MANY), 2);
    assert_true(random_uniform(9, 1, 5) != random_uniform(9, 2, 5));
    assert_true(random_uniform(9, 1, 5) != random_uniform(8, 1, 5));
    assert_true(random_uniform(9, 1, 5) != random_uniform(9, 1 + ((uint64_t)1 << 32), 5));
}

// Checks the moments of normal numbers: 0, 1, 0, 3, with the deviations 1, sqrt 2, sqrt 15, sqrt 96 of one draw.
static void normal_numbers(void **state) {
    static float z[MANY];
    random_normal(z, MANY, 2.0f, 5, 6, 0);
    test_case(5, "%d normal numbers of deviation 2", MANY);
    double moment[5] = {0, 0, 0, 0, 0};
    int beyond_two = 0;
    for (int i = 0; i < MANY; i++) {
        const double x = z[i] / 2.0;
        assert_true(fabs(x) < 6.8);
        for (int k = 1; k <= 4; k++)
            moment[k] += pow(x, k) / MANY;
        beyond_two += fabs(x) > 2;
    }
    assert_near(moment[1], 0, 4 * 1 / sqrt((double)MANY), 1);
    assert_near(moment[2], 1, 4 * sqrt(2.0 / MANY), 2);
    assert_near(moment[3], 0, 4 * sqrt(15.0 / MANY), 3);
    assert_near(moment[4], 3, 4 * sqrt(96.0 / MANY), 4);
    assert_near((double)beyond_two / MANY, 0.0455003, 4 * sqrt(0.0455 * 0.9545 / MANY), 0);
}

// Checks that a value depends only on its place: any part of a tensor that is filled by itself has the same bits.
static void normal_parts(void **state) {
    static float whole[1000], part[1000];
    random_normal(whole, 1000, 0.02f, 77, 3, 0);
    for (int first = 0; first < 140; first += 7)
        for (int n = 0; n < 200; n += 13) {
            part[n] = -7;
            random_normal(part, n, 0.02f, 77, 3, (uint64_t)first);
            assert_memory_equal(part, whole + first, (size_t)n * sizeof *part);
            assert_true(part[n] == -7);
        }
}

// Checks the formula, in double, on the generator's words.
static void normal_formula(void **state) {
    float z[64];
    random_normal(z, 64, 1.0f, 123, 45, 0);
    test_case(123, "64 normal numbers");
    for (uint32_t block = 0; block < 16; block++) {
        const struct philox_words four = philox4x32(block, 0, 45, 0x80000000u, 123, 0);
        for (int pair = 0; pair < 2; pair++) {
            const double u1 = (four.word[2 * pair] + 0.5) / 0x1p32;
            const double angle = 2 * M_PI * (four.word[2 * pair + 1] / 0x1p32);
            // u2 is rounded to 2^-25, an angle of 2e-7; beside this, the radius has a few roundings.
            const double radius = sqrt(-2 * log(u1));
            const uint32_t at = 4 * block + 2 * (uint32_t)pair;
            assert_near(z[at], radius * cos(angle), 1e-6 * (1 + radius), at);
            assert_near(z[at + 1], radius * sin(angle), 1e-6 * (1 + radius), at + 1);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_answers),   cmocka_unit_test(row_equals_elements), cmocka_unit_test(limits_of_p),
        cmocka_unit_test(threshold),       cmocka_unit_test(masks_differ),        cmocka_unit_test(statistics_of_masks),
        cmocka_unit_test(uniform_numbers), cmocka_unit_test(normal_numbers),      cmocka_unit_test(normal_parts),
        cmocka_unit_test(normal_formula),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
