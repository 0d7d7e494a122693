// kernels/fp8/blocks.cuh against plain loops in double: scales, codes, padding and counts to the bit, the sums of
// columns within rounding, and the values that codes are read back as.
#include "kernels/fp8/blocks.cuh"
#include "test/fp8_reference.h"
#include "test/testing.h"
#include <omp.h> // omp_set_num_threads

static struct device device = {2, NULL};
enum { TILE = 128, GUARD = 64 };

// ---- The reference ----

static double largest_of(enum fp8_format format) { return format == FP8_E4M3 ? 448 : 57344; }
// Returns the largest power of two, at most 2^126, by which amax stays in the format's range.
static double scale_of(double amax, enum fp8_format format) {
    int exponent = -126;
    if (!isfinite(amax))
        return NAN;
    if (amax == 0)
        return 1;
    while (exponent < 126 && ldexp(amax, exponent + 1) <= largest_of(format))
        exponent++;
    return ldexp(1, exponent);
}

// A form of x (rows, depth), whose element (row, at) is x[row * row_stride + at * depth_stride].
struct form {
    const floatX *x;
    int64_t rows, depth, row_stride, depth_stride;
    enum fp8_granularity granularity;
    enum fp8_format format;
};
static double form_value(const struct form *f, int64_t row, int64_t at) {
    return to_float(f->x[row * f->row_stride + at * f->depth_stride]);
}
static double form_scale(const struct form *f, int64_t row, int64_t at) {
    const int64_t height = f->granularity == FP8_128X128 ? TILE : 1;
    double amax = 0;
    for (int64_t r = row / height * height; r < (row / height + 1) * height; r++)
        for (int64_t a = at / TILE * TILE; a < (at / TILE + 1) * TILE; a++) {
            const double size = fabs(form_value(f, r, a));
            amax = size <= amax ? amax : isnan(amax) ? amax : size;
        }
    return scale_of(amax, f->format);
}
static int64_t form_inverse_place(const struct form *f, int64_t row, int64_t at) {
    return f->granularity == FP8_128X128 ? row / TILE * ((f->depth / TILE + 3) / 4 * 4) + at / TILE
                                         : at / TILE * f->rows + row;
}

// Checks a value that is read back: a bf16 number, off by at most half of the distance between neighboring codes.
static void check_read_back(double x, fp8 code, double inverse, enum fp8_format format) {
    const double y = fp8_reference_decode(code, format) * inverse;
    const double relative = format == FP8_E4M3 ? 0x1p-4 : 0x1p-3, absolute = format == FP8_E4M3 ? 0x1p-10 : 0x1p-17;
    const double bound = fmax(fabs(x) * relative, absolute * inverse);
    assert_true(fabs(y - x) <= bound);
    if (fabs(x) >= 0x1.ep+127 && fabs(y) == 0x1p128) // such codes round to a number past bf16's range
        return;
    assert_true(y == (float)y);
    // In fp32, numbers below bf16's smallest normal one are multiples of a smaller unit.
    if (sizeof(floatX) == 2 || fabs(y) >= 0x1p-126)
        assert_true(bf16_to_float(bf16_from_float((float)y)) == (float)y);
    assert_true((float)y == fp8_decode(code, format) * (float)inverse);
}

// Checks the codes and scales of one form; returns how many values were flushed to 0.
static int64_t check_form(const struct form *f, const struct fp8_matrix *got) {
    const int64_t count = fp8_inverse_count(f->granularity, f->rows, f->depth);
    double *scales = test_doubles(count);
    int64_t flushed = 0;
    for (int64_t row = 0; row < f->rows; row++) {
        double scale = 0;
        for (int64_t at = 0; at < f->depth; at++) {
            const int64_t place = form_inverse_place(f, row, at);
            if (at % TILE == 0)
                scale = scales[place] = scales[place] == 0 ? form_scale(f, row, at) : scales[place];
            const double x = form_value(f, row, at);
            const fp8 expected = fp8_reference_encode((float)(x * scale), f->format);
            const fp8 code = got->codes[row * f->depth + at];
            if (code != expected)
                fail_msg("code of element (%lld, %lld), %g: %02x, expected %02x", (long long)row, (long long)at, x,
                         code, expected);
            assert_true(isnan(scale) ? isnan(got->inverse[place]) : got->inverse[place] == 1 / scale);
            if (!isnan(scale)) {
                check_read_back(x, code, 1 / scale, f->format);
                flushed += x != 0 && (code & 0x7f) == 0;
            }
        }
    }
    for (int64_t i = 0; i < count; i++)
        assert_true(scales[i] != 0 || got->inverse[i] == 0); // the padding
    free(scales);
    return flushed;
}

// ---- The data ----

enum kind { ORDINARY, ZEROS, SUBNORMAL, HUGE_VALUES, NOT_FINITE, ANY_EXPONENT, SOME_ZEROS, AT_THE_LIMIT, KINDS };
// Fills a tile with values of one kind, whose rows and columns have different sizes.
static void fill_tile(floatX *x, int64_t N, enum kind kind, uint64_t *random) {
    int rows[TILE], columns[TILE];
    for (int i = 0; i < TILE; i++) {
        rows[i] = (int)(test_random(random) % 17) - 8;
        columns[i] = (int)(test_random(random) % 9) - 4;
    }
    const int zero_row = (int)(test_random(random) % TILE), zero_column = (int)(test_random(random) % TILE);
    for (int r = 0; r < TILE; r++)
        for (int c = 0; c < TILE; c++) {
            const double unit = test_uniform(random), ordinary = ldexp(unit, rows[r] + columns[c]);
            double value = ordinary;
            switch (kind) {
            case ORDINARY: break;
            case ZEROS: value = c % 3 ? 0 : -0.0; break;
            case SUBNORMAL: value = ldexp(floor(unit * 100), sizeof(floatX) == 2 ? -133 : -149); break;
            case HUGE_VALUES: value = unit * 3.3e38; break;
            case NOT_FINITE: break;
            case ANY_EXPONENT: value = ldexp(unit, (int)(test_random(random) % 270) - 145); break;
            case SOME_ZEROS: value = r == zero_row || c == zero_column ? 0 : ordinary; break;
            case AT_THE_LIMIT: { // 1.75 2^k, and a unit in the last place above and below it
                const double step = sizeof(floatX) == 2 ? 0x1p-7 : 0x1p-23;
                value = c == r ? ldexp(1.75 + step * (double)(r % 3 - 1), rows[r]) : ldexp(unit, rows[r]);
                break;
            }
            case KINDS: break;
            }
            x[r * N + c] = to_floatX((float)value);
        }
    if (kind == NOT_FINITE) {
        x[zero_row * N + zero_column] = to_floatX(INFINITY);
        x[(zero_row + 5) % TILE * N + (zero_column + 77) % TILE] = to_floatX(-NAN);
    }
}

static void *guarded(size_t bytes) {
    unsigned char *memory = (unsigned char *)test_alloc(bytes + GUARD);
    memset(memory, 0xa5, bytes + GUARD);
    return memory;
}
static void guarded_free(void *memory, size_t bytes) {
    for (int i = 0; i < GUARD && memory; i++)
        assert_int_equal(((unsigned char *)memory)[bytes + (size_t)i], 0xa5);
    free(memory);
}

static struct fp8_matrix matrix_make(bool made, int64_t rows, int64_t depth, enum fp8_granularity granularity,
                                     enum fp8_format format) {
    struct fp8_matrix m = {NULL, NULL, format, granularity};
    if (made) {
        m.codes = (fp8 *)guarded((size_t)(rows * depth));
        m.inverse = (float *)guarded((size_t)fp8_inverse_count(granularity, rows, depth) * sizeof *m.inverse);
    }
    return m;
}
static void matrix_free(struct fp8_matrix *m, int64_t rows, int64_t depth) {
    guarded_free(m->codes, (size_t)(rows * depth));
    guarded_free(m->inverse, (size_t)fp8_inverse_count(m->granularity, rows, depth) * sizeof *m->inverse);
}

// Checks the sums of columns, in which each addition rounds once. Sums that overflow or are not finite are not
// compared.
static void check_dbias(const float *dbias, const floatX *x, int64_t M, int64_t N) {
    for (int64_t n = 0; n < N; n++) {
        double sum = (double)n, size = (double)n;
        for (int64_t m = 0; m < M; m++) {
            sum += to_float(x[m * N + n]);
            size += fabs(to_float(x[m * N + n]));
        }
        if (size < 3e38)
            assert_near(dbias[n], sum, 0x1p-24 * size * (double)(TILE + M / TILE + 1), n);
        else if (!isfinite(size))
            assert_true(!isfinite(dbias[n]));
    }
}

static void check(int64_t M, int64_t N, enum fp8_granularity granularity, enum fp8_format format, bool rows,
                  bool columns, uint64_t seed) {
    uint64_t random = seed;
    test_case(seed, "M %lld, N %lld, %s, %s, %s%s", (long long)M, (long long)N,
              granularity == FP8_1X128 ? "1 x 128" : "128 x 128", format == FP8_E4M3 ? "E4M3" : "E5M2",
              rows ? "rows" : "", columns ? " columns" : "");
    const size_t x_bytes = (size_t)(M * N) * sizeof(floatX), dbias_bytes = (size_t)N * sizeof(float);
    const size_t workspace_bytes = fp8_cast_blocks_workspace_bytes(M, N);
    floatX *x = (floatX *)guarded(x_bytes);
    float *dbias = (float *)guarded(dbias_bytes);
    uint64_t *counts = (uint64_t *)guarded(FP8_COUNTS * sizeof *counts);
    void *workspace = guarded(workspace_bytes);
    const bool sums = seed % 2 == 0;
    for (int64_t m = 0; m < M; m += TILE)
        for (int64_t n = 0; n < N; n += TILE)
            fill_tile(x + m * N + n, N, (enum kind)((seed + (uint64_t)(m / TILE * 3 + n / TILE)) % KINDS), &random);
    for (int64_t n = 0; n < N; n++)
        dbias[n] = (float)n;
    counts[FP8_SATURATED] = 5;
    counts[FP8_FLUSHED] = (uint64_t)1 << 40;
    struct fp8_cast to = {matrix_make(rows, M, N, granularity, format),
                          matrix_make(columns, N, M, granularity, format),
                          sums ? dbias : NULL,
                          true,
                          NULL,
                          seed % 3 ? counts : NULL};
    fp8_cast_blocks(to, x, M, N, sums ? workspace : NULL, &device);
    const struct form row_form = {x, M, N, N, 1, granularity, format},
                      column_form = {x, N, M, 1, N, granularity, format};
    const int64_t in_columns = columns ? check_form(&column_form, &to.columns) : 0;
    const int64_t flushed = rows ? check_form(&row_form, &to.rows) : in_columns;
    assert_int_equal(counts[FP8_SATURATED], 5);
    assert_int_equal(counts[FP8_FLUSHED], ((uint64_t)1 << 40) + (to.counts ? (uint64_t)flushed : 0));
    if (sums)
        check_dbias(dbias, x, M, N);
    else
        assert_true(dbias[N - 1] == (float)(N - 1));
    matrix_free(&to.rows, M, N);
    matrix_free(&to.columns, N, M);
    guarded_free(x, x_bytes);
    guarded_free(dbias, dbias_bytes);
    guarded_free(counts, FP8_COUNTS * sizeof *counts);
    guarded_free(workspace, workspace_bytes);
}

// ---- Tests ----

static const enum fp8_format formats[] = {FP8_E4M3, FP8_E5M2};
static const enum fp8_granularity scalings[] = {FP8_1X128, FP8_128X128};

static void every_kind_of_data_and_form(void **state) {
    const int64_t shapes[][2] = {{128, 128}, {256, 384}, {384, 128}, {128, 640}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int f = 0; f < 2; f++)
            for (int k = 0; k < 2; k++)
                for (int forms = 1; forms < 4; forms++)
                    check(shapes[s][0], shapes[s][1], scalings[k], formats[f], forms & 1, forms & 2,
                          (uint64_t)(s + 5 * (size_t)f + 7 * (size_t)k + 11 * (size_t)forms));
    for (int kind = 0; kind < KINDS; kind++)
        for (int k = 0; k < 2; k++)
            check(128, 128, scalings[k], formats[kind % 2], true, true, (uint64_t)kind);
}

// Checks the scales of amaxes near the limit, for all exponents: the largest power of two by which the amax stays in
// range. The scale and its inverse are normal numbers.
static void scale_is_the_largest_power_of_two(void **state) {
    test_case_without_seed("amaxes around 1.75 2^k, and at the ends");
    for (int f = 0; f < 2; f++) {
        for (uint32_t exponent = 0; exponent < 255; exponent++)
            for (int i = 0; i < 9; i++) {
                const uint32_t mantissas[] = {0, 1, 2, 0x5ffffe, 0x5fffff, 0x600000, 0x600001, 0x600002, 0x7fffff};
                const uint32_t bits = exponent << 23 | mantissas[i];
                float amax, scale = fp8_block_scale(bits, formats[f]);
                memcpy(&amax, &bits, sizeof amax);
                assert_true(scale == scale_of(amax, formats[f]) && isnormal(scale) && isnormal(1 / scale));
            }
        assert_true(isnan(fp8_block_scale(0x7f800000u, formats[f])) && isnan(fp8_block_scale(0x7fc00000u, formats[f])));
    }
}

// Checks that the two forms of a tile with one scale have the same codes. A tile with a scale for each 128 elements
// need not.
static void tile_has_the_same_codes_in_both_forms(void **state) {
    enum { M = 256, N = 128 };
    uint64_t random = 9;
    test_case(random, "M %d, N %d, 128 x 128", M, N);
    floatX *x = (floatX *)test_alloc(M * N * sizeof *x);
    for (int64_t m = 0; m < M; m += TILE)
        fill_tile(x + m * N, N, ORDINARY, &random);
    struct fp8_cast to = {matrix_make(true, M, N, FP8_128X128, FP8_E4M3),
                          matrix_make(true, N, M, FP8_128X128, FP8_E4M3),
                          NULL,
                          false,
                          NULL,
                          NULL};
    fp8_cast_blocks(to, x, M, N, NULL, &device);
    for (int64_t m = 0; m < M; m++)
        for (int64_t n = 0; n < N; n++)
            assert_int_equal(to.rows.codes[m * N + n], to.columns.codes[n * M + m]);
    matrix_free(&to.rows, M, N);
    matrix_free(&to.columns, N, M);
    free(x);
}

// Checks that the sums of columns have the same bits in a second call, and on another number of threads.
static void sums_of_columns_are_the_same_again(void **state) {
    enum { M = 640, N = 256 };
    uint64_t random = 4;
    test_case(random, "M %d, N %d", M, N);
    double *exact;
    floatX *x = test_floats(&exact, M * N, 3, &random);
    float *first = (float *)test_alloc(N * sizeof *first), *again = (float *)test_alloc(N * sizeof *again);
    void *workspace = test_alloc(fp8_cast_blocks_workspace_bytes(M, N));
    struct fp8_cast to = {
        matrix_make(true, M, N, FP8_1X128, FP8_E4M3), {NULL, NULL, FP8_E4M3, FP8_1X128}, first, false, NULL, NULL};
    const int threads = omp_get_max_threads();
    fp8_cast_blocks(to, x, M, N, workspace, &device);
    for (int turn = 1; turn < 4; turn++) {
        omp_set_num_threads(turn);
        to.dbias = again;
        fp8_cast_blocks(to, x, M, N, workspace, &device);
        assert_memory_equal(first, again, N * sizeof *again);
    }
    omp_set_num_threads(threads);
    matrix_free(&to.rows, M, N);
    void *all[] = {x, exact, first, again, workspace};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_kind_of_data_and_form),
        cmocka_unit_test(scale_is_the_largest_power_of_two),
        cmocka_unit_test(tile_has_the_same_codes_in_both_forms),
        cmocka_unit_test(sums_of_columns_are_the_same_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
