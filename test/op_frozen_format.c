// kernels/frozen_format.cuh. NF4 against what bitsandbytes stores (test/golden/nf4.golden); its levels, borders and map
// against their definitions; FP8 blocks against plain loops in double; reading back any rows of any shape.
#include "kernels/frozen_format.cuh"
#include "test/fails.h"
#include "test/fp8_reference.h"
#include "test/golden.h"
#include "test/testing.h"
#include <omp.h> // omp_set_num_threads

static struct device device = {2, NULL};
static const enum frozen_format formats[] = {FROZEN_FLOATX, FROZEN_FP8, FROZEN_NF4};
enum { FORMATS = sizeof formats / sizeof *formats, GUARD = 64 };

// Returns weights as make_nf4.py makes them: four uniform numbers summed; row 3 is zero, and each 97th element is an
// outlier. The caller frees them.
static float *weights(int64_t rows, int64_t cols) {
    float *values = (float *)test_alloc((size_t)(rows * cols) * sizeof *values);
    uint64_t random = (uint64_t)rows;
    for (int64_t i = 0; i < rows * cols; i++) {
        double x = test_uniform(&random);
        for (int k = 0; k < 3; k++)
            x += test_uniform(&random);
        values[i] = i / cols == 3 ? 0 : (float)(x * (i % 97 == 0 ? 0.1 : 0.02));
    }
    return values;
}
// Returns the stored bytes, quantized `chunk` rows at a time; the caller frees them.
static char *quantized(const float *values, enum frozen_format format, int64_t rows, int64_t cols, int64_t chunk) {
    const size_t bytes = frozen_bytes(format, rows, cols);
    char *stored = (char *)test_alloc(bytes + GUARD);
    void *workspace = test_alloc(frozen_quantize_workspace_bytes(format, rows, cols) + 1);
    memset(stored, 0x5a, bytes + GUARD);
    for (int64_t first = 0; first < rows; first += chunk)
        frozen_quantize_rows(stored, values + first * cols, format, rows, cols, first,
                             rows - first < chunk ? rows - first : chunk, workspace);
    frozen_quantize_end(stored, format, rows, cols, workspace);
    for (int i = 0; i < GUARD; i++)
        assert_int_equal(stored[bytes + (size_t)i], 0x5a);
    free(workspace);
    return stored;
}
// Returns rows [first, first + n), read back between guards; the caller frees them.
static floatX *read_back(const void *stored, enum frozen_format format, int64_t rows, int64_t cols, int64_t first,
                         int64_t n) {
    const size_t bytes = (size_t)(n * cols) * sizeof(floatX);
    floatX *out = (floatX *)test_alloc(bytes + GUARD);
    memset(out, 0x5a, bytes + GUARD);
    frozen_dequantize(out, stored, format, rows, cols, first, n, &device);
    for (size_t i = 0; i < GUARD; i++)
        assert_int_equal(((char *)out)[bytes + i], 0x5a);
    return out;
}

// ---- NF4 ----

static void the_map_of_absmaxes_is_its_formula(void **state) {
    assert_true(nf4_map_values[0] == 0 && nf4_map_values[NF4_MAP_ZERO + 1] == 1);
    for (int i = 0, k = 1; i < 7; i++)
        for (int j = 0; j < 1 << i; j++, k++) {
            const double exact = pow(10, i - 6) * (0.1 + 0.9 * (j + 0.5) / (1 << i));
            assert_near(nf4_map_values[k], exact, 2 * 0x1p-23 * exact, k);
        }
    for (int code = 1; code < 256; code++) {
        assert_true(nf4_map_value((uint8_t)code) > nf4_map_value((uint8_t)(code - 1)));
        assert_int_equal(nf4_map_code(nf4_map_value((uint8_t)code)), code);
    }
    assert_true(nf4_map_value(0) == -nf4_map_values[NF4_MAP_ZERO] && nf4_map_code(-1) == 0);
}
// Checks each border and its neighbors, in a block whose absmax is 1.
static void codes_are_of_the_nearest_level_and_a_tie_has_the_lower(void **state) {
    for (int i = 0; i + 1 < NF4_LEVELS; i++) {
        float x[4] = {1, nf4_border(i), nextafterf(nf4_border(i), 2), nextafterf(nf4_border(i), -2)};
        uint8_t codes[2];
        assert_true(nf4_encode_block(codes, x, 4) == 1);
        assert_int_equal(codes[0] >> 4, 15);
        assert_int_equal(codes[0] & 15, i);
        assert_int_equal(codes[1] >> 4, i + 1);
        assert_int_equal(codes[1] & 15, i);
    }
}

static const struct golden_tensor *part(const struct golden *g, const char *name, const char *what) {
    char full[64];
    snprintf(full, sizeof full, "%s.%s", name, what);
    return golden_tensor(g, full);
}
static void check_golden(const struct golden *g, const char *name) {
    const struct golden_tensor *shape = part(g, name, "shape"), *back = part(g, name, FLOATX_NAME);
    const int64_t rows = shape->ints[0], cols = shape->ints[1], n = rows * cols, blocks = nf4_blocks(n);
    test_case_without_seed("%s: %lld rows, %lld columns", name, (long long)rows, (long long)cols);
    float *values = weights(rows, cols);
    char *stored = quantized(values, FROZEN_NF4, rows, cols, rows);
    const struct nf4_matrix m = frozen_nf4(stored, n),
                            theirs = {(uint8_t *)(uintptr_t)part(g, name, "codes")->ints, NULL, NULL, NULL};
    for (int64_t i = 0; i < n; i++) // of an odd n, the last half byte belongs to no element
        assert_int_equal(nf4_code_at(&m, i), nf4_code_at(&theirs, i));
    assert_memory_equal(m.absmax_codes, part(g, name, "absmax_codes")->ints, (size_t)blocks);
    for (int64_t b = 0; b < nf4_absmax_blocks(n); b++)
        assert_near(m.absmax_scales[b], part(g, name, "absmax_scales")->floats[b], 1e-7, b);
    assert_near(*m.absmax_mean, *part(g, name, "absmax_mean")->floats, 1e-8, 0);
    // The mean's last bit depends on the order of its sum: with their mean, elements are read back as theirs.
    *m.absmax_mean = *part(g, name, "absmax_mean")->floats;
    memcpy(m.absmax_scales, part(g, name, "absmax_scales")->floats, (size_t)nf4_absmax_blocks(n) * sizeof(float));
    floatX *out = read_back(stored, FROZEN_NF4, rows, cols, 0, rows);
    for (int64_t i = 0; i < back->count; i++)
        assert_near(to_float(out[i]), back->floats[i], 0, i);
    free(out);
    free(stored);
    free(values);
}
static void nf4_is_what_bitsandbytes_stores(void **state) {
    struct golden *g = golden_open("test/golden/nf4.golden");
    check_golden(g, "even");
    check_golden(g, "odd");
    golden_close(g);
}
static void nf4_keeps_weights_to_its_precision(void **state) {
    enum { ROWS = 256, COLS = 512 };
    float *values = weights(ROWS, COLS);
    char *stored = quantized(values, FROZEN_NF4, ROWS, COLS, FROZEN_ROWS);
    floatX *out = read_back(stored, FROZEN_NF4, ROWS, COLS, 0, ROWS);
    for (int64_t i = 0; i < ROWS * COLS; i++) { // half of the widest gap, 0.304, and 0.7 % of the absmaxes' range
        const float absmax = floats_largest(values + i / NF4_BLOCK * NF4_BLOCK, NF4_BLOCK);
        assert_near(to_float(out[i]), values[i], 0.1525 * absmax + 0.01 * 0.4 + 0x1p-8 * absmax, i);
    }
    free(out);
    free(stored);
    free(values);
}

// ---- FP8 ----

static void fp8_blocks_are_codes_and_inverses_of_powers_of_two(void **state) {
    enum { ROWS = 200, COLS = 300 };
    float *values = weights(ROWS, COLS);
    char *stored = quantized(values, FROZEN_FP8, ROWS, COLS, FROZEN_ROWS);
    const struct fp8_matrix m = frozen_fp8(stored, ROWS, COLS);
    for (int64_t r = 0; r < ROWS; r++)
        for (int64_t c = 0; c < COLS; c++) {
            double amax = 0;
            for (int64_t i = r / 128 * 128; i < (r / 128 + 1) * 128 && i < ROWS && c % 128 == 0; i++)
                for (int64_t j = c; j < c + 128 && j < COLS; j++)
                    amax = fmax(amax, fabs(values[i * COLS + j]));
            const double inverse = m.inverse[r / 128 * 4 + c / 128];
            if (c % 128 == 0)
                assert_true(amax / inverse <= 448 && amax / inverse > 224 && exp2(round(log2(inverse))) == inverse);
            assert_true(fp8_reference_decode(m.codes[r * COLS + c], FP8_E4M3) ==
                        fp8_reference_decode(fp8_encode((float)(values[r * COLS + c] / inverse), FP8_E4M3), FP8_E4M3));
        }
    floatX *out = read_back(stored, FROZEN_FP8, ROWS, COLS, 0, ROWS);
    for (int64_t i = 0; i < ROWS * COLS; i++) {
        const double inverse = m.inverse[i / COLS / 128 * 4 + i % COLS / 128];
        assert_true(to_float(out[i]) == fp8_reference_decode(m.codes[i], FP8_E4M3) * inverse);
        assert_near(to_float(out[i]), values[i], fmax(0x1p-4 * fabs(values[i]), 0x1p-10 * inverse), i);
    }
    free(out);
    free(stored);
    free(values);
}

// ---- All formats ----

static void bytes(void **state) {
    assert_int_equal(frozen_bytes(FROZEN_FLOATX, 3, 5), 256);
    assert_int_equal(frozen_bytes(FROZEN_FP8, 128, 256), 128 * 256 + 256);
    assert_int_equal(frozen_bytes(FROZEN_NF4, 1024, 4096), (1 << 21) + (1 << 16) + 256 * 4 + 256);
    for (int f = 0; f < FORMATS; f++)
        assert_int_equal(frozen_bytes(formats[f], 0, 7) / 512, 0);
}
// Checks rows that are read back in any groups, and stored in any chunks and on any number of threads.
static void check_rows(enum frozen_format format, int64_t rows, int64_t cols) {
    test_case_without_seed("format %d: %lld rows, %lld columns", format, (long long)rows, (long long)cols);
    float *values = weights(rows, cols);
    char *stored = quantized(values, format, rows, cols, rows);
    omp_set_num_threads(1);
    char *again = quantized(values, format, rows, cols, FROZEN_ROWS);
    floatX *one = read_back(stored, format, rows, cols, 0, rows);
    omp_set_num_threads(2);
    floatX *two = read_back(stored, format, rows, cols, 0, rows);
    assert_memory_equal(again, stored, frozen_bytes(format, rows, cols));
    assert_memory_equal(two, one, (size_t)(rows * cols) * sizeof *one);
    for (int64_t first = 0; first < rows; first += 1 + first / 2)
        for (int64_t n = 1; first + n <= rows; n += 1 + n) {
            floatX *some = read_back(stored, format, rows, cols, first, n);
            assert_memory_equal(some, one + first * cols, (size_t)(n * cols) * sizeof *one);
            free(some);
        }
    free(two);
    free(one);
    free(again);
    free(stored);
    free(values);
}
static void any_rows_of_any_shape_are_read_back(void **state) {
    const int64_t shapes[][2] = {{1, 1}, {4, 1}, {5, 64}, {9, 63}, {130, 65}, {300, 24}, {131, 200}, {12, 515}};
    for (int f = 0; f < FORMATS; f++)
        for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++)
            check_rows(formats[f], shapes[k][0], shapes[k][1]);
}
static void zeros_stay_zeros(void **state) {
    float values[3 * 70] = {0};
    for (int f = 0; f < FORMATS; f++) {
        char *stored = quantized(values, formats[f], 3, 70, 3);
        floatX *out = read_back(stored, formats[f], 3, 70, 0, 3);
        for (int i = 0; i < 3 * 70; i++)
            assert_true(to_float(out[i]) == 0);
        free(out);
        free(stored);
    }
}
static void what_is_not_finite_is_seen(void **state) {
    const union {
        uint32_t bits[3];
        float values[3];
    } bad = {{0x7f800000, 0x7fc00000, 0x7fffffff}}; // infinity, C's NaN, CUDA's
    for (int f = 0; f < FORMATS; f++)
        for (int k = 0; k < (formats[f] == FROZEN_FLOATX ? 2 : 3); k++) { // parameter_rounded may make a NaN a number
            float *values = weights(2, 70);
            values[77] = bad.values[k];
            char *stored = quantized(values, formats[f], 2, 70, 2);
            floatX *out = read_back(stored, formats[f], 2, 70, 0, 2);
            assert_true(!isfinite(to_float(out[77])));
            free(out);
            free(stored);
            free(values);
        }
}
static void quantize_half_blocks(void *unused) {
    float values[64] = {0};
    char stored[1024];
    frozen_quantize_rows(stored, values, FROZEN_FP8, 64, 1, 32, 32, NULL);
}
static void rows_are_quantized_in_whole_blocks(void **state) {
    assert_fails(quantize_half_blocks, NULL, "rows 32 to 64|whole blocks");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_map_of_absmaxes_is_its_formula),
        cmocka_unit_test(codes_are_of_the_nearest_level_and_a_tie_has_the_lower),
        cmocka_unit_test(nf4_is_what_bitsandbytes_stores),
        cmocka_unit_test(nf4_keeps_weights_to_its_precision),
        cmocka_unit_test(fp8_blocks_are_codes_and_inverses_of_powers_of_two),
        cmocka_unit_test(bytes),
        cmocka_unit_test(any_rows_of_any_shape_are_read_back),
        cmocka_unit_test(zeros_stay_zeros),
        cmocka_unit_test(what_is_not_finite_is_seen),
        cmocka_unit_test(rows_are_quantized_in_whole_blocks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
