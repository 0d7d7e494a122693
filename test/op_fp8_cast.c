// kernels/fp8/fp8.cuh's formats and kernels/fp8/cast.cuh's casts by one scale, against tables of the formats' values in
// double and plain loops: codes, scales and counts to the bit, the sums of columns within the worst case of their
// roundings.
#include "kernels/amax.cuh" // amax_with
#include "kernels/fp8/cast.cuh"
#include "test/fp8_reference.h"
#include "test/testing.h"
#include <omp.h> // omp_set_num_threads

static struct device device = {2, NULL};
static const enum fp8_format formats[] = {FP8_E4M3, FP8_E5M2};
static const char *const format_names[] = {"E4M3", "E5M2"};
enum { FORMATS = 2 };

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// ---- Formats ----

static void vectors_have_their_codes(void **state) {
    static const struct {
        float x;
        fp8 codes[FORMATS];
    } vectors[] = {{0, {0x00, 0x00}},
                   {-0.0f, {0x80, 0x80}},
                   {1, {0x38, 0x3c}},
                   {1.0625f, {0x38, 0x3c}},
                   {1.0626f, {0x39, 0x3c}},
                   {1.125f, {0x39, 0x3c}},
                   {1.1875f, {0x3a, 0x3d}},
                   {1.25f, {0x3a, 0x3d}},
                   {1.375f, {0x3b, 0x3e}},
                   {17, {0x58, 0x4c}},
                   {18, {0x59, 0x4c}},
                   {19, {0x5a, 0x4d}},
                   {0.3952f, {0x2d, 0x36}},
                   {-3.3f, {0xc5, 0xc3}},
                   {448, {0x7e, 0x5f}},
                   {464, {0x7e, 0x5f}},
                   {480, {0x7e, 0x60}},
                   {57344, {0x7e, 0x7b}},
                   {61440, {0x7e, 0x7b}},
                   {INFINITY, {0x7e, 0x7b}},
                   {-INFINITY, {0xfe, 0xfb}},
                   {0x1p-6f, {0x08, 0x24}},
                   {0x1.cp-7f, {0x07, 0x23}},
                   {0x1.ep-7f, {0x08, 0x24}},
                   {0x1.4p-8f, {0x02, 0x1d}},
                   {0x1.8p-9f, {0x02, 0x1a}},
                   {0x1p-9f, {0x01, 0x18}},
                   {0x1p-10f, {0x00, 0x14}},
                   {0x1.000002p-10f, {0x01, 0x14}},
                   {0x1p-14f, {0x00, 0x04}},
                   {0x1.8p-16f, {0x00, 0x02}},
                   {0x1p-16f, {0x00, 0x01}},
                   {0x1p-17f, {0x00, 0x00}},
                   {0x1.000002p-17f, {0x00, 0x01}}};
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++)
        for (int f = 0; f < FORMATS; f++) {
            test_case_without_seed("%a in %s", vectors[i].x, format_names[f]);
            assert_int_equal(fp8_encode(vectors[i].x, formats[f]), vectors[i].codes[f]);
        }
    for (uint32_t payload = 1; payload < 0x800000u; payload = payload * 3 + 1)
        for (int f = 0; f < 2 * FORMATS; f++)
            assert_int_equal(fp8_encode(float_of(0x7f800000u | payload | (uint32_t)f << 31), formats[f / 2]), 0x7f);
}

// Checks all codes, of which 254 and 248 are finite; sums of magnitudes are exact in double.
static void codes_are_decoded_and_encoded_back(void **state) {
    const double expected_sums[] = {10815.75, 720895.99951171875};
    const int expected_finite[] = {254, 248};
    for (int f = 0; f < FORMATS; f++) {
        double sum = 0;
        int finite = 0;
        for (int code = 0; code < 256; code++) {
            const float value = fp8_decode((fp8)code, formats[f]);
            const double expected = fp8_reference_decode(code, formats[f]);
            test_case_without_seed("code %02x of %s", (unsigned)code, format_names[f]);
            assert_true(isnan(expected) ? isnan(value) : value == expected && !signbit(value) == !signbit(expected));
            if (isfinite(value)) {
                sum += fabs(value);
                finite++;
                assert_int_equal(fp8_encode(value, formats[f]), code);
            } else if (isnan(value))
                assert_int_equal(fp8_encode(value, formats[f]), 0x7f);
            else
                assert_int_equal(fp8_encode(value, formats[f]), code - 1); // infinity becomes the largest finite value
        }
        assert_true(sum == expected_sums[f]);
        assert_int_equal(finite, expected_finite[f]);
    }
}

// Returns FNV-1a of n bytes.
static uint64_t fnv(const fp8 *bytes, int n) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (int i = 0; i < n; i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash;
}
// Checks the codes of all bf16 in order, by fp8_encode and by a cast on the device, against their hashes.
static void every_bf16_has_its_code(void **state) {
    enum { COUNT = 65536, SIDE = 256 };
    const uint64_t hashes[] = {0xd8b2feb674a31125u, 0x22c10a2b6f34bb85u};
    floatX *x = (floatX *)test_alloc(COUNT * sizeof *x);
    fp8 *codes = (fp8 *)test_alloc(COUNT), *rows = (fp8 *)test_alloc(COUNT);
    struct fp8_scale *scale = (struct fp8_scale *)test_alloc(sizeof *scale);
    memset(scale, 0, sizeof *scale);
    scale->delayed = 1;
    for (int i = 0; i < COUNT; i++)
        x[i] = to_floatX(float_of((uint32_t)i << 16));
    for (int f = 0; f < FORMATS; f++) {
        const struct fp8_cast to = {{rows, &scale->inverse, formats[f], FP8_PER_TENSOR}, {}, NULL, false, scale, NULL};
        for (int i = 0; i < COUNT; i++)
            codes[i] = fp8_encode(float_of((uint32_t)i << 16), formats[f]);
        test_case_without_seed("all bf16 in %s", format_names[f]);
        assert_true(fnv(codes, COUNT) == hashes[f]);
        fp8_cast(to, x, SIDE, SIDE, NULL, &device);
        assert_memory_equal(rows, codes, COUNT);
    }
    void *all[] = {x, codes, rows, scale};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

// Checks each code's value, the middle between it and the next one, and the floats beside the middle; and floats of any
// bits.
static void rounding_is_to_nearest_even(void **state) {
    for (int f = 0; f < FORMATS; f++) {
        const int most = fp8_reference_largest(formats[f]);
        uint64_t random = 1;
        for (int code = 0; code <= most; code++) {
            const double value = fp8_reference_value(code, formats[f]);
            const float edges[] = {(float)value, (float)((value + fp8_reference_value(code + 1, formats[f])) / 2)};
            for (int e = 0; e < 2; e++)
                for (int side = -1; side <= 1; side++) {
                    const float x = side == 0 ? edges[e] : nextafterf(edges[e], side < 0 ? -INFINITY : INFINITY);
                    test_case_without_seed("%a in %s", x, format_names[f]);
                    assert_int_equal(fp8_encode(x, formats[f]), fp8_reference_encode(x, formats[f]));
                    assert_int_equal(fp8_encode(-x, formats[f]), fp8_reference_encode(-x, formats[f]));
                }
        }
        for (int i = 0; i < 200000; i++) {
            const float x = float_of((uint32_t)test_random(&random));
            test_case_without_seed("%a in %s", x, format_names[f]);
            assert_int_equal(fp8_encode(x, formats[f]), fp8_reference_encode(x, formats[f]));
        }
    }
}

// ---- Scales ----

static void scales_and_inverses_are_normal(void **state) {
    const uint32_t amaxes[] = {1, 0x7fffff, 0x800000, 0x3f800000, 0x43e00000, 0x47600000, 0x7f000000, 0x7f7fffff};
    for (int f = 0; f < FORMATS; f++) {
        for (size_t i = 0; i < sizeof amaxes / sizeof *amaxes; i++) {
            const float scale = fp8_scale_of(amaxes[i], formats[f]), inverse = 1 / scale;
            test_case_without_seed("amax %08x in %s", amaxes[i], format_names[f]);
            assert_true(isnormal(scale) && isnormal(inverse));
            assert_true(float_of(amaxes[i]) * scale <= 1.000001f * fp8_largest(formats[f]));
        }
        assert_true(fp8_scale_of(0, formats[f]) == 1);
        assert_true(isnan(fp8_scale_of(0x7f800000, formats[f])) && isnan(fp8_scale_of(0x7fc00000, formats[f])));
    }
}

static void amax_is_of_bits(void **state) {
    const int64_t sizes[] = {1, 2, 7, 8, 9, 255, 4096, 4097, 20000};
    const float largest[] = {0, -0.0f, 0x1p-149f, -0x1p-133f, 3, -3, INFINITY, -INFINITY, NAN};
    uint32_t *amax = (uint32_t *)test_alloc(sizeof *amax);
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (size_t k = 0; k < sizeof largest / sizeof *largest; k++)
            for (int place = 0; place < 3; place++) {
                const int64_t n = sizes[s], at = place == 0 ? 0 : place == 1 ? n / 2 : n - 1;
                floatX *x = (floatX *)test_alloc((size_t)n * sizeof *x);
                const float limit = isnan(largest[k]) ? 1e30f : fminf(1e30f, 0.5f * fabsf(largest[k]));
                uint64_t random = (uint64_t)(n + at);
                for (int64_t i = 0; i < n; i++)
                    x[i] = to_floatX(limit * (float)test_uniform(&random));
                x[at] = to_floatX(largest[k]);
                const uint32_t expected = fp8_magnitude(to_float(x[at]));
                test_case(random, "%lld elements, %g at %lld", (long long)n, largest[k], (long long)at);
                *amax = 0;
                fp8_amax(amax, x, n, &device);
                assert_int_equal(*amax, expected);
                *amax = 0x7fffffff; // a larger value stays
                fp8_amax(amax, x, n, &device);
                assert_int_equal(*amax, 0x7fffffff);
                *amax = expected > 0 ? expected - 1 : 0;
                fp8_amax(amax, x, n, &device);
                assert_int_equal(*amax, expected);
                free(x);
            }
    free(amax);
}

// ---- Casts ----

enum values { ORDINARY, WIDE, ZEROES, OVERFLOWN, NOT_A_NUMBER };
static const char *const values_names[] = {"ordinary", "wide", "zeroes", "with an infinity", "with a NaN"};
enum { VALUES = 5 };

// Returns a value. Wide ones go by powers of two from below the formats' smallest value to above their largest.
static float one_value(enum values values, int64_t i, uint64_t *random) {
    const float uniform = (float)test_uniform(random);
    const int kind = (int)(test_random(random) % 16);
    switch (values) {
    case ORDINARY: return kind == 0 ? 0 : 0.02f * uniform;
    case WIDE: return kind == 0 ? -0.0f : ldexpf(uniform, (int)(test_random(random) % 60) - 40);
    case ZEROES: return i % 2 == 0 ? 0 : -0.0f;
    case OVERFLOWN: return i == 37 ? -INFINITY : uniform;
    case NOT_A_NUMBER: return i == 137 ? NAN : uniform;
    }
    return 0;
}

// What a cast writes. Bytes past its end, and forms that are not asked for, must stay as they are.
struct outputs {
    fp8 *rows, *columns;
    float *dbias;
    uint64_t *counts;
    struct fp8_scale *scale;
};
enum { MARGIN = 64, UNTOUCHED = 0x5a };
static struct outputs outputs_create(int64_t M, int64_t N, uint32_t amax, float delayed) {
    struct outputs o;
    o.rows = (fp8 *)test_alloc((size_t)(M * N + MARGIN));
    o.columns = (fp8 *)test_alloc((size_t)(M * N + MARGIN));
    o.dbias = (float *)test_alloc((size_t)N * sizeof *o.dbias);
    o.counts = (uint64_t *)test_alloc(FP8_COUNTS * sizeof *o.counts);
    o.scale = (struct fp8_scale *)test_alloc(sizeof *o.scale);
    memset(o.rows, UNTOUCHED, (size_t)(M * N + MARGIN));
    memset(o.columns, UNTOUCHED, (size_t)(M * N + MARGIN));
    for (int64_t i = 0; i < N; i++)
        o.dbias[i] = (float)(i % 7);
    o.counts[FP8_SATURATED] = 1000;
    o.counts[FP8_FLUSHED] = (uint64_t)1 << 33;
    memset(o.scale, 0, sizeof *o.scale);
    o.scale->amax = amax;
    o.scale->delayed = delayed;
    return o;
}
static void outputs_destroy(struct outputs *o) {
    void *all[] = {o->rows, o->columns, o->dbias, o->counts, o->scale};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}
enum { ROWS = 1, COLUMNS = 2, DBIAS = 4, COUNTS = 8, EVERYTHING = 15 };
static struct fp8_cast cast_to(const struct outputs *o, int what, enum fp8_format format) {
    const struct fp8_cast to = {{what & ROWS ? o->rows : NULL, &o->scale->inverse, format, FP8_PER_TENSOR},
                                {what & COLUMNS ? o->columns : NULL, &o->scale->inverse, format, FP8_PER_TENSOR},
                                what & DBIAS ? o->dbias : NULL,
                                true,
                                o->scale,
                                what & COUNTS ? o->counts : NULL};
    return to;
}
static void outputs_expect(struct outputs *o, const floatX *x, int64_t M, int64_t N, int what, float scale,
                           enum fp8_format format) {
    for (int64_t i = 0; i < M * N; i++) {
        const float value = to_float(x[i]), scaled = value * scale;
        const fp8 code = fp8_reference_encode(scaled, format);
        if (what & ROWS)
            o->rows[i] = code;
        if (what & COLUMNS)
            o->columns[i % N * M + i / N] = code;
        if (what & COUNTS) {
            o->counts[FP8_SATURATED] += (uint64_t)fp8_reference_saturates(scaled, format);
            o->counts[FP8_FLUSHED] += value != 0 && (code & 0x7f) == 0;
        }
    }
    o->scale->scale = scale;
    o->scale->inverse = 1 / scale;
}
// Checks sums of M values and what was there before: M roundings of at most half a unit each.
static void check_dbias(const float *dbias, const floatX *x, int64_t M, int64_t N, bool wanted) {
    for (int64_t i = 0; i < N; i++) {
        double sum = (double)(i % 7), size = sum;
        for (int64_t m = 0; wanted && m < M; m++) {
            sum += to_float(x[m * N + i]);
            size += fabs(to_float(x[m * N + i]));
        }
        if (isfinite(sum))
            assert_near(dbias[i], sum, (double)M * 0x1p-24 * size, i);
        else
            assert_true(!isfinite(dbias[i]));
    }
}
static bool same_float(float a, float b) { return isnan(a) ? isnan(b) : a == b; }

static void check_cast(const floatX *x, int64_t M, int64_t N, int what, uint32_t amax, float delayed,
                       enum fp8_format format) {
    struct outputs got = outputs_create(M, N, amax, delayed), expected = outputs_create(M, N, amax, delayed);
    const size_t bytes = (size_t)(M * N + MARGIN);
    void *workspace = test_alloc(fp8_cast_workspace_bytes(M, N));
    outputs_expect(&expected, x, M, N, what, delayed != 0 ? delayed : fp8_scale_of(amax, format), format);
    fp8_cast(cast_to(&got, what, format), x, M, N, workspace, &device);
    assert_memory_equal(got.rows, expected.rows, bytes);
    assert_memory_equal(got.columns, expected.columns, bytes);
    assert_memory_equal(got.counts, expected.counts, FP8_COUNTS * sizeof *got.counts);
    assert_int_equal(got.scale->amax, amax);
    assert_true(same_float(got.scale->delayed, delayed));
    assert_true(same_float(got.scale->scale, expected.scale->scale));
    assert_true(same_float(got.scale->inverse, expected.scale->inverse));
    check_dbias(got.dbias, x, M, N, what & DBIAS);
    outputs_destroy(&got);
    outputs_destroy(&expected);
    free(workspace);
}

static const int shapes[][2] = {{16, 16}, {64, 64}, {48, 80}, {16, 272}, {272, 16}, {128, 192}, {1040, 112}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static floatX *matrix(enum values values, int64_t M, int64_t N, uint64_t *random, uint32_t *amax) {
    floatX *x = (floatX *)test_alloc((size_t)(M * N) * sizeof *x);
    *amax = 0;
    for (int64_t i = 0; i < M * N; i++) {
        x[i] = to_floatX(one_value(values, i, random));
        *amax = amax_with(*amax, x[i]);
    }
    return x;
}

static void casts_have_the_codes_of_plain_loops(void **state) {
    const float scales[] = {0, 1, 0.37f, 0x1p20f, 3e-7f}; // 0: the amax's scale
    for (int s = 0; s < SHAPES; s++)
        for (int v = 0; v < VALUES; v++) {
            const int64_t M = shapes[s][0], N = shapes[s][1];
            uint64_t random = (uint64_t)(M * 1000 + N);
            uint32_t amax;
            floatX *x = matrix((enum values)v, M, N, &random, &amax);
            for (size_t k = 0; k < sizeof scales / sizeof *scales; k++)
                for (int f = 0; f < FORMATS; f++) {
                    test_case(random, "%s, %lld x %lld, %s values, delayed scale %g", format_names[f], (long long)M,
                              (long long)N, values_names[v], scales[k]);
                    check_cast(x, M, N, EVERYTHING, amax, scales[k], formats[f]);
                }
            free(x);
        }
}
static void any_form_may_be_absent(void **state) {
    const int64_t M = 80, N = 144;
    uint64_t random = 1;
    uint32_t amax;
    floatX *x = matrix(WIDE, M, N, &random, &amax);
    for (int what = 0; what < EVERYTHING; what++)
        for (int f = 0; f < FORMATS; f++) {
            if (!(what & (ROWS | COLUMNS)))
                continue;
            test_case(random, "%s, forms %d", format_names[f], what);
            check_cast(x, M, N, what, amax, 0, formats[f]);
        }
    free(x);
}

// Checks values whose products with the scale lie on every middle between two codes, and beside it.
static void casts_round_as_the_formats_do(void **state) {
    enum { SIDE = 64 };
    const float scales[] = {1, 0x1p-20f, 1.5f, 1.0f / 3};
    floatX *x = (floatX *)test_alloc(SIDE * SIDE * sizeof *x);
    for (int f = 0; f < FORMATS; f++)
        for (size_t k = 0; k < sizeof scales / sizeof *scales; k++) {
            const int most = fp8_reference_largest(formats[f]);
            for (int i = 0; i < SIDE * SIDE; i++) {
                const int code = i / 6 % (most + 1), side = i % 3 - 1;
                const double value = fp8_reference_value(code, formats[f]);
                const double middle = (value + fp8_reference_value(code + 1, formats[f])) / 2;
                const float edge = (float)(i % 6 < 3 ? value : middle) / scales[k];
                const float near = side == 0 ? edge : nextafterf(edge, side < 0 ? -INFINITY : INFINITY);
                x[i] = to_floatX(i / 6 / (most + 1) % 2 ? -near : near);
            }
            test_case_without_seed("edges of %s, scale %g", format_names[f], scales[k]);
            check_cast(x, SIDE, SIDE, EVERYTHING, 0, scales[k], formats[f]);
        }
    free(x);
}

// Checks that the sums of columns have the same bits for any number of threads.
static void dbias_does_not_depend_on_threads(void **state) {
    const int64_t M = 1040, N = 208;
    const int threads = omp_get_max_threads();
    uint64_t random = 1;
    uint32_t amax;
    floatX *x = matrix(ORDINARY, M, N, &random, &amax);
    struct outputs one = outputs_create(M, N, amax, 0), three = outputs_create(M, N, amax, 0);
    void *workspace = test_alloc(fp8_cast_workspace_bytes(M, N));
    omp_set_num_threads(1);
    fp8_cast(cast_to(&one, EVERYTHING, FP8_E5M2), x, M, N, workspace, &device);
    omp_set_num_threads(3);
    fp8_cast(cast_to(&three, EVERYTHING, FP8_E5M2), x, M, N, workspace, &device);
    omp_set_num_threads(threads);
    assert_memory_equal(one.dbias, three.dbias, (size_t)N * sizeof *one.dbias);
    assert_memory_equal(one.columns, three.columns, (size_t)(M * N));
    assert_memory_equal(one.counts, three.counts, FP8_COUNTS * sizeof *one.counts);
    outputs_destroy(&one);
    outputs_destroy(&three);
    free(workspace);
    free(x);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(vectors_have_their_codes),
        cmocka_unit_test(codes_are_decoded_and_encoded_back),
        cmocka_unit_test(every_bf16_has_its_code),
        cmocka_unit_test(rounding_is_to_nearest_even),
        cmocka_unit_test(scales_and_inverses_are_normal),
        cmocka_unit_test(amax_is_of_bits),
        cmocka_unit_test(casts_have_the_codes_of_plain_loops),
        cmocka_unit_test(any_form_may_be_absent),
        cmocka_unit_test(casts_round_as_the_formats_do),
        cmocka_unit_test(dbias_does_not_depend_on_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
