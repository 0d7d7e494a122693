// kernels/adamw.cuh against torch.optim.AdamW's algorithm in double: states of each format, stochastic rounding.
// kernels/gradients.cuh: sums over micro-steps, sums of squares, the check of a step.
//
// Tolerances. Each step rounds every state a few times, by 2^-24 each, and the errors of 20 steps add up like a random
// walk: 1e-6 for m, v and the parameters. Means over stochastic roundings: 5 standard deviations.
#include "kernels/adamw.cuh"
#include "test/amax.h" // amax_case_set, amax_new, amax_expected
#include "test/fails.h"
#include <omp.h> // omp_set_num_threads

static const double FP32_STEPS = 1e-6;
static struct device device = {2, NULL};
// Updates elements [r.begin, r.begin + r.n) of tensor number `tensor`, which comes after smaller tensors in the flat
// buffers. amax: of the parameters; NULL: none is taken.
static void update_of(struct adamw_range r, uint32_t tensor, uint32_t *amax, struct adamw adamw,
                      const struct gradient_check *check) {
    struct flat_tensors tensors = {NULL, (int)tensor + 1, amax != NULL};
    struct flat_tensor *rows = (struct flat_tensor *)test_alloc(((size_t)tensor + 1) * sizeof *rows);
    for (uint32_t i = 0; i <= tensor; i++) {
        rows[i].begin = (int64_t)i * STATE_BLOCK;
        rows[i].end = i < tensor ? rows[i].begin + 1 : rows[i].begin + r.begin + r.n;
        rows[i].amax = i < tensor ? NULL : amax;
        rows[i].decays = i == tensor;
        rows[i].lr_scale = 1;
    }
    tensors.rows = rows;
    r.begin += (int64_t)tensor * STATE_BLOCK;
    adamw_update(r, tensors, adamw, check, &device);
    free(rows);
}
static void update(struct adamw_range r, struct adamw adamw, const struct gradient_check *check) {
    update_of(r, 0, NULL, adamw, check);
}
static float *floats_of(int64_t n, const float *values) { // a copy in memory that the device reads
    float *x = (float *)test_alloc((size_t)n * sizeof *x);
    memcpy(x, values, (size_t)n * sizeof *x);
    return x;
}
enum { STEPS = 20 };
#ifdef CUDA_EMULATED
enum { SLOW = 1 };
#else
enum { SLOW = 0 };
#endif

// Updates one element by the lines of torch's _single_tensor_adamw.
static void reference_step(double *p, double *m, double *v, double g, struct adamw a) {
    *p *= 1 - (double)a.lr * a.weight_decay;
    *m += (g - *m) * (1 - (double)a.beta1);
    *v = *v * a.beta2 + (1 - (double)a.beta2) * g * g;
    const double correction1 = 1 - pow(a.beta1, (double)a.step), correction2 = 1 - pow(a.beta2, (double)a.step);
    *p -= a.lr / correction1 * *m / (sqrt(*v) / sqrt(correction2) + a.eps);
}

// Returns a range of fp32 moments and gradients. remainder: NULL in fp32.
static struct adamw_range range_of(floatX *params, uint16_t *remainder, const float *grads, float *m, float *v,
                                   int64_t n) {
    struct adamw_range r;
    memset(&r, 0, sizeof r);
    r.params = params;
    r.remainder = remainder;
    r.grads = grads;
    r.m = m;
    r.v = v;
    r.grads_format = r.m_format = r.v_format = FORMAT_FP32;
    r.n = n;
    return r;
}
enum { BF16_BUILD = sizeof(floatX) == 2 };

// Checks 20 steps of n elements. The arrays begin `offset` elements after an aligned place, params `params_offset`
// elements: as ranges of flat buffers do, and as arrays may.
static void check(int64_t n, float weight_decay, int offset, int params_offset) {
    uint64_t random = (uint64_t)n;
    test_case(random, "n %lld, weight decay %g, states %d and parameters %d elements off alignment", (long long)n,
              (double)weight_decay, offset, params_offset);
    double *p = test_doubles(n), *m = test_doubles(n), *v = test_doubles(n), *p_result = test_doubles(n);
    float *grads = (float *)test_alloc((size_t)(n + offset) * sizeof *grads) + offset;
    float *m_got = (float *)test_alloc((size_t)(n + offset) * sizeof *m_got) + offset;
    float *v_got = (float *)test_alloc((size_t)(n + offset) * sizeof *v_got) + offset;
    uint16_t *remainder = (uint16_t *)test_alloc((size_t)(n + offset) * sizeof *remainder) + offset;
    floatX *params = (floatX *)test_alloc((size_t)(params_offset + n + 4) * sizeof *params) + params_offset;
    struct gradient_check *clip = (struct gradient_check *)test_alloc(sizeof *clip);
    memset(params - params_offset, 0x5a, (size_t)(params_offset + n + 4) * sizeof *params);
    for (int i = 0; i < offset; i++)
        remainder[i - offset] = grads[i - offset] = m_got[i - offset] = v_got[i - offset] = 77;
    clip->grad_norm = 2;
    clip->grad_scale = 0.5f;
    clip->finite = 1;
    for (int64_t i = 0; i < n; i++) {
        const float value = (float)test_uniform(&random);
        p[i] = value;
        params[i] = parameter_rounded(value);
        remainder[i] = split_low(value);
        m_got[i] = v_got[i] = 0;
    }
    for (int step = 1; step <= STEPS; step++) {
        const struct adamw adamw = {1e-2f / (float)step, 0.9f, 0.95f, 1e-8f, weight_decay, step, 0.25f};
        for (int64_t i = 0; i < n; i++) {
            grads[i] = (float)(test_uniform(&random) * (i % 7 == 3 ? 1e-6 : 2)); // some near eps
            if (i % 11 == 5)
                grads[i] = 0;
            reference_step(&p[i], &m[i], &v[i], (double)grads[i] * (step % 2 ? 0.25 : 0.125), adamw);
        }
        update(range_of(params, BF16_BUILD ? remainder : NULL, grads, m_got, v_got, n), adamw, step % 2 ? NULL : clip);
    }
    double *m_result = floats_to_doubles(m_got, n), *v_result = floats_to_doubles(v_got, n);
    for (int64_t i = 0; i < n; i++)
        p_result[i] = parameter_joined(params[i], remainder[i]);
    assert_close(m_result, m, n, FP32_STEPS);
    assert_close(v_result, v, n, FP32_STEPS);
    assert_close(p_result, p, n, FP32_STEPS);
    for (int i = 0; i < offset; i++)
        assert_true(remainder[i - offset] == 77 && m_got[i - offset] == 77 && v_got[i - offset] == 77);
    for (size_t i = 0; i < params_offset * sizeof *params; i++)
        assert_int_equal(((unsigned char *)(params - params_offset))[i], 0x5a);
    for (size_t i = 0; i < 4 * sizeof *params; i++)
        assert_int_equal(((unsigned char *)&params[n])[i], 0x5a);
    void *all[] = {p,
                   m,
                   v,
                   m_result,
                   v_result,
                   p_result,
                   clip,
                   remainder - offset,
                   grads - offset,
                   m_got - offset,
                   v_got - offset,
                   params - params_offset};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static void twenty_steps(void **state) {
    const int64_t sizes[] = {1, 15, 16, 17, 1000, 1023, 1024, 1025, 5000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int decay = 0; decay < 2; decay++)
            check(sizes[i], decay ? 0.1f : 0, 0, 0);
}

// Checks ranges that begin anywhere, with params at the same place or at another.
static void ranges(void **state) {
    for (int offset = 0; offset < 4; offset++)
        for (int64_t n = 1; n < 12; n += SLOW ? 3 : 1) {
            check(n, 0.1f, offset, offset);
            check(n, 0.1f, offset, 2);
        }
}

// Checks that the update at step 1 is lr * sign(g), whatever the gradient's size: the corrections undo 1 - beta
// exactly.
static void first_step(void **state) {
    const float gradients[] = {1e-3f, -50}, zeroes[] = {0, 0};
    floatX *params = (floatX *)test_alloc(2 * sizeof *params);
    uint16_t *remainder = (uint16_t *)test_alloc(2 * sizeof *remainder);
    float *grads = floats_of(2, gradients), *m = floats_of(2, zeroes), *v = floats_of(2, zeroes);
    const struct adamw adamw = {0.125f, 0.9f, 0.999f, 0, 0, 1, 1};
    params[0] = to_floatX(1);
    params[1] = to_floatX(-1);
    remainder[0] = remainder[1] = 0;
    update(range_of(params, BF16_BUILD ? remainder : NULL, grads, m, v, 2), adamw, NULL);
    assert_near(parameter_joined(params[0], remainder[0]), 0.875, 2e-7, 0);
    assert_near(parameter_joined(params[1], remainder[1]), -0.875, 2e-7, 1);
    void *all[] = {params, remainder, grads, m, v};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

// ---- States of each format ----

// Everything that an update reads and writes, each with a format of its own, and 128 elements after the end, which it
// must not touch.
enum { ARRAYS = 5, BEHIND = STATE_BLOCK };
struct everything {
    struct adamw_range r;
    uint32_t tensor;      // its index
    int64_t room;         // in elements; whole blocks
    char *arrays[ARRAYS]; // params, remainder, m, v, grads
    size_t bytes[ARRAYS];
};
enum { MOMENT_FORMATS = 3, FORMAT_CASES = 2 * 2 * MOMENT_FORMATS * MOMENT_FORMATS };
static const enum state_format m_formats[MOMENT_FORMATS] = {FORMAT_FP32, FORMAT_BF16, FORMAT_8BIT};
static const enum state_format v_formats[MOMENT_FORMATS] = {FORMAT_FP32, FORMAT_BF16, FORMAT_8BIT_ROOT};
static const char *format_name(enum state_format format) {
    switch (format) {
    case FORMAT_FP32: return "fp32";
    case FORMAT_BF16: return "bf16";
    case FORMAT_8BIT:
    case FORMAT_8BIT_ROOT: return "8bit";
    case FORMAT_REMAINDER: return "remainder";
    case FORMAT_NONE: return "none";
    }
    return NULL;
}
static void everything_new(struct everything *e, int64_t n, int format_case) {
    const bool split = BF16_BUILD && format_case % 2;
    memset(e, 0, sizeof *e);
    e->room = (n + STATE_BLOCK - 1) / STATE_BLOCK * STATE_BLOCK + BEHIND;
    e->r.grads_format = format_case / 2 % 2 ? FORMAT_BF16 : FORMAT_FP32;
    e->r.m_format = m_formats[format_case / 4 % MOMENT_FORMATS];
    e->r.v_format = v_formats[format_case / 4 / MOMENT_FORMATS];
    e->bytes[0] = (size_t)e->room * sizeof(floatX);
    e->bytes[1] = state_bytes(FORMAT_REMAINDER, e->room);
    e->bytes[2] = state_bytes(e->r.m_format, e->room);
    e->bytes[3] = state_bytes(e->r.v_format, e->room);
    e->bytes[4] = state_bytes(e->r.grads_format, e->room);
    for (int k = 0; k < ARRAYS; k++)
        memset(e->arrays[k] = (char *)test_alloc(e->bytes[k]), 0, e->bytes[k]);
    e->r.params = (floatX *)e->arrays[0];
    e->r.remainder = split ? (uint16_t *)e->arrays[1] : NULL;
    e->r.m = e->arrays[2];
    e->r.v = e->arrays[3];
    e->r.grads = e->arrays[4];
    e->r.n = n;
    e->tensor = 5;
}
static void everything_free(struct everything *e) {
    for (int k = 0; k < ARRAYS; k++)
        free(e->arrays[k]);
}
static void everything_case(const struct everything *e, uint64_t seed) {
    test_case(seed, "n %lld, %s, gradients %s, m %s, v %s", (long long)e->r.n, e->r.remainder ? "split" : "not split",
              format_name(e->r.grads_format), format_name(e->r.m_format), format_name(e->r.v_format));
}
// Fills parameters and gradients with values of different sizes, some gradients 0.
static void everything_fill(struct everything *e, uint64_t *random) {
    float *values = (float *)malloc((size_t)e->room * sizeof *values);
    for (int64_t i = 0; i < e->r.n; i++) {
        const float value = (float)test_uniform(random);
        e->r.params[i] = parameter_rounded(value);
        ((uint16_t *)e->arrays[1])[i] = split_low(value);
    }
    for (int64_t i = 0; i < e->room; i++)
        values[i] = i % 11 == 5 || i >= e->r.n ? 0 : (float)(test_uniform(random) * (i % 7 == 3 ? 1e-3 : 2));
    state_encode(e->arrays[4], values, e->r.grads_format, e->room);
    free(values);
}
static double *everything_decoded(const void *at, enum state_format format, int64_t n) {
    float *values = (float *)malloc((size_t)n * sizeof *values);
    state_decode(values, at, format, n);
    double *result = floats_to_doubles(values, n);
    free(values);
    return result;
}
static double *everything_values(const struct everything *e) {
    double *result = test_doubles(e->r.n);
    for (int64_t i = 0; i < e->r.n; i++)
        result[i] = e->r.remainder ? parameter_joined(e->r.params[i], e->r.remainder[i]) : to_float(e->r.params[i]);
    return result;
}

// Checks that what is stored is the exact value but for fp32 arithmetic and the format's one rounding. An 8-bit code
// must be as near as the code that the host finds; for a format of square roots, near in the square root. terms: the
// largest term of the sums that make a value.
static void check_state(const double *got, const double *exact, int64_t n, enum state_format format, bool stochastic,
                        double terms, const char *what) {
    // calloc, since gcc sees an n of 0 under the sanitizers
    float *nearest = (float *)calloc((size_t)n, sizeof *nearest);
    char *coded = (char *)malloc(state_bytes(format, n));
    for (int64_t i = 0; i < n; i++)
        nearest[i] = (float)exact[i];
    state_encode(coded, nearest, format, n);
    state_decode(nearest, coded, format, n);
    for (int64_t i = 0; i < n; i++) {
        const bool root = format == FORMAT_8BIT_ROOT;
        const double x = root ? sqrt(exact[i]) : exact[i], near = root ? sqrt((double)nearest[i]) : (double)nearest[i];
        const double rounding = stochastic ? 0x1p-7 * fabs(x) : fabs(near - x);
        assert_near_at(root ? sqrt(got[i]) : got[i], x, rounding * 1.001 + 1e-5 * fabs(x) + 0x1p-24 * terms, i, what,
                       __FILE__, __LINE__);
    }
    free(nearest);
    free(coded);
}
static void check_formats(int64_t n, int format_case) {
    uint64_t random = (uint64_t)(n + format_case);
    struct everything e;
    everything_new(&e, n, format_case);
    everything_case(&e, random);
    char *behind[ARRAYS];
    for (int step = 1; step <= 4; step++) {
        const struct adamw adamw = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, step, 0.25f, 77};
        everything_fill(&e, &random);
        double *p = everything_values(&e), *m = everything_decoded(e.r.m, e.r.m_format, n);
        double *v = everything_decoded(e.r.v, e.r.v_format, n);
        double *grads = everything_decoded(e.r.grads, e.r.grads_format, n);
        for (int64_t i = 0; i < n; i++)
            reference_step(&p[i], &m[i], &v[i], grads[i] * 0.25, adamw);
        for (int k = 0; k < ARRAYS; k++) {
            behind[k] = (char *)malloc(e.bytes[k]);
            memcpy(behind[k], e.arrays[k], e.bytes[k]);
        }
        update_of(e.r, e.tensor, NULL, adamw, NULL);
        double *p_got = everything_values(&e), *m_got = everything_decoded(e.r.m, e.r.m_format, n);
        double *v_got = everything_decoded(e.r.v, e.r.v_format, n);
        check_state(m_got, m, n, e.r.m_format, false, 1, "m");
        check_state(v_got, v, n, e.r.v_format, e.r.v_format == FORMAT_BF16, 1e-6, "v");
        check_state(p_got, p, n, FORMAT_FP32, BF16_BUILD && !e.r.remainder, 1, "the parameters");
        const enum state_format formats[ARRAYS] = {BF16_BUILD ? FORMAT_BF16 : FORMAT_FP32, FORMAT_REMAINDER,
                                                   e.r.m_format, e.r.v_format, e.r.grads_format};
        for (int k = 0; k < ARRAYS; k++) { // what lies after n in whole blocks, and what is not written
            const size_t used = k == 4 || (k == 1 && !e.r.remainder) ? 0 : state_bytes(formats[k], n);
            assert_memory_equal(e.arrays[k] + used, behind[k] + used, e.bytes[k] - used);
            free(behind[k]);
        }
        void *all[] = {p, m, v, grads, p_got, m_got, v_got};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            free(all[i]);
    }
    everything_free(&e);
}
static void each_format_is_stepped_in_fp32_and_rounded_once(void **state) {
    const int64_t sizes[] = {1, 130, 1157, 5000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes - SLOW; i++)
        for (int format_case = 0; format_case < FORMAT_CASES; format_case++)
            check_formats(sizes[i], format_case);
}

// Checks a split master weight against an update with fp32 master weights that are stored whole, each rounded to its
// parameter.
static void a_split_master_has_the_bits_of_a_whole_one(void **state) {
    enum { N = 3000, MANY = SLOW ? 20 : 300 };
    uint64_t random = 11;
    test_case(random, "n %d, %d steps", N, MANY);
    struct everything e;
    everything_new(&e, N, 1);
    float *master = (float *)test_alloc(N * sizeof *master), *m = (float *)test_alloc(N * sizeof *m);
    float *v = (float *)test_alloc(N * sizeof *v);
    everything_fill(&e, &random);
    for (int64_t i = 0; i < N; i++) {
        master[i] = parameter_joined(e.r.params[i], e.r.remainder ? e.r.remainder[i] : 0);
        m[i] = v[i] = 0;
    }
    for (int step = 1; step <= MANY; step++) {
        struct adamw adamw = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, step, 1};
        const struct adamw_factors f = adamw_factors_of(adamw);
        float *grads = (float *)e.arrays[4];
        for (int64_t i = 0; i < N; i++)
            grads[i] = (float)test_uniform(&random);
        update_of(e.r, e.tensor, NULL, adamw, NULL);
#pragma omp simd
        for (int64_t i = 0; i < N; i++)
            master[i] = adamw_element(master[i], grads[i], &m[i], &v[i], f);
    }
    for (int64_t i = 0; i < N; i++) {
        const floatX rounded = parameter_rounded(master[i]);
        const float joined = parameter_joined(e.r.params[i], e.r.remainder ? e.r.remainder[i] : 0);
        assert_true(to_float(e.r.params[i]) == to_float(rounded));
        assert_true(float_bits(joined) == float_bits(master[i]));
    }
    assert_memory_equal(e.r.m, m, N * sizeof *m);
    assert_memory_equal(e.r.v, v, N * sizeof *v);
    everything_free(&e);
    free(master);
    free(m);
    free(v);
}

// Runs three steps of the whole range, or of its parts [0, cuts[0]), [cuts[0], cuts[1]) and so on, on num_threads
// threads.
static void three_steps(struct everything *e, const int64_t *cuts, int num_cuts, int num_threads) {
    uint64_t random = 21;
    const int threads = omp_get_max_threads();
    omp_set_num_threads(num_threads);
    for (int step = 1; step <= 3; step++) {
        const struct adamw adamw = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, step, 1, 1234567890123u};
        if (step == 1)
            everything_fill(e, &random);
        for (int part = 0; part <= num_cuts; part++) {
            const int64_t begin = part > 0 ? cuts[part - 1] : 0, end = part < num_cuts ? cuts[part] : e->r.n;
            struct adamw_range r = e->r;
            r.params += begin;
            r.remainder = r.remainder ? r.remainder + begin : NULL;
            r.grads = (const char *)r.grads + state_bytes(r.grads_format, begin);
            r.m = (char *)r.m + state_bytes(r.m_format, begin);
            r.v = (char *)r.v + state_bytes(r.v_format, begin);
            r.n = end - begin;
            r.begin = begin;
            update_of(r, e->tensor, NULL, adamw, NULL);
        }
    }
    omp_set_num_threads(threads);
}
static void neither_ranges_nor_threads_change_a_bit(void **state) {
    const int64_t cuts[] = {128, 384, 1280, 2304}, n = 2500;
    for (int format_case = 0; format_case < FORMAT_CASES; format_case++) {
        struct everything whole, parts;
        everything_new(&whole, n, format_case);
        everything_new(&parts, n, format_case);
        everything_case(&whole, 21);
        three_steps(&whole, NULL, 0, 1);
        three_steps(&parts, cuts, sizeof cuts / sizeof *cuts, 7);
        for (int k = 0; k < ARRAYS; k++)
            assert_memory_equal(parts.arrays[k], whole.arrays[k], whole.bytes[k]);
        everything_free(&whole);
        everything_free(&parts);
    }
}

// ---- Ranges of many tensors ----

// Updates elements [begin, end) of the flat buffers, which begin where `e` does.
static void flat_step(const struct everything *e, struct flat_tensors tensors, int64_t begin, int64_t end,
                      struct adamw adamw, const struct gradient_check *check) {
    struct adamw_range r = e->r;
    r.params += begin;
    r.remainder = r.remainder ? r.remainder + begin : NULL;
    r.grads = (const char *)r.grads + state_bytes(r.grads_format, begin);
    r.m = (char *)r.m + state_bytes(r.m_format, begin);
    r.v = (char *)r.v + state_bytes(r.v_format, begin);
    r.n = end - begin;
    r.begin = begin;
    adamw_update(r, tensors, adamw, check, &device);
}
// Checks tensors of many sizes with gaps after them, of which every third has no decay and every second an amax. One
// range of all of them, and ranges that begin and end within tensors, must give the bits of each tensor's own update,
// with a decay of 0 where the tensor has none. Gaps keep what they hold.
static void check_tensors(int count, int format_case, bool finite) {
    struct flat_tensor *rows = (struct flat_tensor *)test_alloc((size_t)count * sizeof *rows);
    uint32_t *amaxes = (uint32_t *)test_alloc(3 * (size_t)count * sizeof *amaxes);
    struct gradient_check *clip = (struct gradient_check *)test_alloc(sizeof *clip);
    const struct gradient_check clipped = {2, 0.5f, finite};
    *clip = clipped;
    int64_t flat = 0;
    for (int i = 0; i < count; i++) {
        rows[i].begin = flat;
        rows[i].end = flat + 1 + (count > 100 ? i % 130 : 37 * i * i % 1500);
        rows[i].decays = i % 3 != 0;
        rows[i].lr_scale = 1;
        flat = (rows[i].end + STATE_BLOCK - 1) / STATE_BLOCK * STATE_BLOCK + (i % 5 == 4 ? STATE_BLOCK : 0);
    }
    struct everything each[3]; // tensor by tensor, in one range, in three ranges
    for (int k = 0; k < 3; k++) {
        uint64_t random = 5;
        everything_new(&each[k], flat, format_case);
        everything_case(&each[k], random);
        everything_fill(&each[k], &random);
        for (int step = 1; step <= 2; step++) {
            memset(amaxes + k * count, 0, (size_t)count * sizeof *amaxes);
            struct adamw adamw = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, step, 1, 77};
            struct flat_tensors tensors = {rows, count, true};
            for (int i = 0; i < count; i++)
                rows[i].amax = i % 2 ? &amaxes[k * count + i] : NULL;
            for (int i = 0; i < count && k == 0; i++) {
                struct flat_tensors alone = {rows, i + 1, true};
                adamw.weight_decay = rows[i].decays ? 0.1f : 0;
                flat_step(&each[k], alone, rows[i].begin, rows[i].end, adamw, clip);
            }
            const int64_t cuts[] = {0, rows[count / 3].begin / 256 * STATE_BLOCK, rows[count / 2].begin, flat};
            for (int i = 0; i < 3 && k == 2; i++)
                flat_step(&each[k], tensors, cuts[i], cuts[i + 1], adamw, clip);
            if (k == 1)
                flat_step(&each[k], tensors, 0, flat, adamw, clip);
        }
    }
    for (int k = 1; k < 3; k++) {
        for (int a = 0; a < ARRAYS; a++)
            assert_memory_equal(each[k].arrays[a], each[0].arrays[a], each[0].bytes[a]);
        assert_memory_equal(amaxes + k * count, amaxes, (size_t)count * sizeof *amaxes);
    }
    for (int i = 0; i < count; i++)
        assert_int_equal(amaxes[i],
                         i % 2 ? amax_expected(0, each[0].r.params + rows[i].begin, rows[i].end - rows[i].begin) : 0);
    for (int k = 0; k < 3; k++)
        everything_free(&each[k]);
    free(rows);
    free(amaxes);
    free(clip);
}
static void a_range_of_tensors_has_the_bits_of_each(void **state) {
    for (int format_case = 0; format_case < FORMAT_CASES; format_case++)
        check_tensors(format_case % 2 ? 33 : 7, format_case, format_case % 5 != 4);
    check_tensors(1030, FORMAT_CASES - 1, true); // so many that a search takes three rounds
}

// Checks that a tensor's multiplier multiplies its learning rate, and so its decay. Moments have the bits of an update
// with the other lr. Parameters differ by the rounding of the factor 1 - lr weight_decay: half of 2^-23 in each of two
// formulas. A multiplier of 1 changes no bit.
static void a_multiplier_is_that_of_the_learning_rate(void **state) {
    enum { COUNT = 12, N = 1000 };
    const float scales[] = {1, 0.5f, 3, 0.3f};
    const struct adamw adamw = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 2, 1, 77};
    struct flat_tensor *rows = (struct flat_tensor *)test_alloc(COUNT * sizeof *rows);
    struct everything together, alone;
    uint64_t random = 7;
    everything_new(&together, COUNT * STATE_BLOCK * 8, 1);
    everything_new(&alone, COUNT * STATE_BLOCK * 8, 1);
    everything_fill(&together, &random);
    random = 7;
    everything_fill(&alone, &random);
    memset(rows, 0, COUNT * sizeof *rows);
    for (int i = 0; i < COUNT; i++) {
        rows[i].begin = (int64_t)i * STATE_BLOCK * 8;
        rows[i].end = rows[i].begin + N;
        rows[i].decays = i % 3 != 0;
        rows[i].lr_scale = scales[i % 4];
    }
    const struct flat_tensors tensors = {rows, COUNT, false};
    flat_step(&together, tensors, 0, together.r.n, adamw, NULL);
    for (int i = 0; i < COUNT; i++) {
        struct adamw scaled = adamw;
        scaled.lr *= scales[i % 4];
        rows[i].lr_scale = 1;
        flat_step(&alone, tensors, rows[i].begin, rows[i].end, scaled, NULL);
    }
    for (int i = 0; i < COUNT; i++)
        for (int64_t at = rows[i].begin; at < rows[i].end; at++) {
            const double got = parameter_joined(together.r.params[at], BF16_BUILD ? together.r.remainder[at] : 0);
            const double expected = parameter_joined(alone.r.params[at], BF16_BUILD ? alone.r.remainder[at] : 0);
            if (fabs(got - expected) > 0x1p-22 * (fabs(expected) + scales[i % 4] * adamw.lr))
                fail_msg("tensor %d, element %lld: %.9g, not %.9g", i, (long long)at, got, expected);
        }
    assert_memory_equal(together.r.m, alone.r.m, (size_t)together.r.n * sizeof(float));
    assert_memory_equal(together.r.v, alone.r.v, (size_t)together.r.n * sizeof(float));
    const struct adamw_factors factors = adamw_factors_of(adamw), same = adamw_tensor_factors(factors, &rows[1]);
    assert_memory_equal(&same, &factors, sizeof same);
    everything_free(&together);
    everything_free(&alone);
    free(rows);
}

// Checks that nothing changes, to the bit, where the gradients' check found a NaN or an infinity.
static void nothing_changes(void **state) {
    enum { N = 1030 };
    struct gradient_check *check = (struct gradient_check *)test_alloc(sizeof *check);
    check->grad_norm = INFINITY;
    check->grad_scale = 0;
    check->finite = 0;
    for (int format_case = 0; format_case < FORMAT_CASES; format_case++) {
        struct everything e;
        uint64_t random = 3;
        everything_new(&e, N, format_case);
        everything_case(&e, random);
        const struct adamw adamw = {0.1f, 0.9f, 0.95f, 1e-8f, 0.1f, 3, 1};
        for (int k = 0; k < ARRAYS; k++) // bytes that every rounding would change
            for (size_t i = 0; i < e.bytes[k]; i++)
                e.arrays[k][i] = (char)(test_random(&random) & 0x3f);
        char *before[ARRAYS];
        for (int k = 0; k < ARRAYS; k++)
            memcpy(before[k] = (char *)malloc(e.bytes[k]), e.arrays[k], e.bytes[k]);
        update_of(e.r, e.tensor, NULL, adamw, check);
        for (int k = 0; k < ARRAYS; k++) {
            assert_memory_equal(e.arrays[k], before[k], e.bytes[k]);
            (free)(before[k]);
        }
        everything_free(&e);
    }
    free(check);
}

// ---- Stochastic rounding ----

enum { CROWD = SLOW ? 1024 : 16384 };
// Makes CROWD equal parameters and second moments, without remainders, v in bf16.
static void crowd_new(struct everything *e, float value, float moment2) {
    everything_new(e, CROWD, 4 * MOMENT_FORMATS);
    for (int64_t i = 0; i < CROWD; i++) {
        e->r.params[i] = to_floatX(value);
        ((bf16 *)e->r.v)[i] = bf16_from_float(moment2);
    }
}
static double mean_of_params(const struct everything *e) {
    double sum = 0;
    for (int64_t i = 0; i < e->r.n; i++)
        sum += to_float(e->r.params[i]);
    return sum / (double)e->r.n;
}
// Returns the standard deviation of a mean over the crowd, after `steps` steps of length `change`, each rounded to
// multiples of `unit`: up or not.
static double mean_deviation(int steps, double change, double unit) {
    return unit * sqrt(steps * fabs(change) / unit / CROWD);
}
// Checks only weight decay, which moves a weight near 1 by less than its last bit in each step.
static void weight_decay_shrinks_the_mean_as_it_would_in_fp32(void **state) {
    enum { MANY = 1000 };
    struct everything e;
    crowd_new(&e, 1, 0);
    for (int step = 1; step <= MANY; step++) {
        const struct adamw adamw = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, step, 1, 5};
        update_of(e.r, e.tensor, NULL, adamw, NULL);
    }
    assert_near(mean_of_params(&e), pow(1 - 1e-4, MANY), 5 * mean_deviation(MANY, 1e-4, 0x1p-8) + 1e-5, 0);
    everything_free(&e);
}
// Checks a learning rate whose steps are a 4000th of a weight's last bit.
static void a_tiny_learning_rate_moves_the_mean_as_it_would_in_fp32(void **state) {
    enum { MANY = 1000 };
    struct everything e, split;
    crowd_new(&e, 0.75f, 0);
    everything_new(&split, CROWD, 1);
    for (int64_t i = 0; i < CROWD; i++) {
        ((float *)e.arrays[4])[i] = ((float *)split.arrays[4])[i] = 2;
        split.r.params[i] = to_floatX(0.75f);
    }
    for (int step = 1; step <= MANY; step++) {
        const struct adamw adamw = {1e-6f, 0.9f, 0.95f, 1e-8f, 0, step, 1, 5};
        update_of(e.r, e.tensor, NULL, adamw, NULL);
        update_of(split.r, split.tensor, NULL, adamw, NULL);
    }
    double *exact = everything_values(&split);
    assert_near(exact[7], 0.749, 3e-5, 7); // 1000 roundings of 2^-25 each
    assert_near(mean_of_params(&e), 0.749, 5 * mean_deviation(MANY, 1e-6, BF16_BUILD ? 0x1p-8 : 0x1p-24) + 3e-5, 0);
    assert_true(bf16_to_float(bf16_from_float(0.75f - 1e-6f)) == 0.75f); // rounding to nearest would move nothing
    everything_free(&e);
    everything_free(&split);
    free(exact);
}
// Checks that v without gradients falls by 1 - beta2. Rounded to nearest at 0.999 it never would.
static void bf16_second_moments_fall_at_large_beta2(void **state) {
    enum { MANY = 500 };
    struct everything e;
    double sum = 0;
    crowd_new(&e, 1, 1);
    for (int step = 1; step <= MANY; step++) {
        const struct adamw adamw = {0, 0.9f, 0.999f, 1e-8f, 0, step, 1, 5};
        update_of(e.r, e.tensor, NULL, adamw, NULL);
    }
    for (int64_t i = 0; i < CROWD; i++)
        sum += bf16_to_float(((const bf16 *)e.r.v)[i]);
    assert_near(sum / CROWD, pow(0.999, MANY), 5 * mean_deviation(MANY, 1e-3, 0x1p-8) + 1e-5, 0);
    assert_true(bf16_to_float(bf16_from_float(0.999f)) == 1);
    everything_free(&e);
}

// Tells how each of a crowd of values halfway between two bf16 was rounded: -1 down, 1 up. params (CROWD), v (CROWD).
static void crowd_signs(double *params, double *v, uint64_t seed, int step, uint32_t tensor) {
    struct everything e;
    crowd_new(&e, 1, 1);
    e.tensor = tensor;
    // Halfway down to the next number below 1: lr weight_decay = 1 - beta2 = 2^-9, exactly.
    const struct adamw adamw = {0x1p-6f, 0.5f, 1 - 0x1p-9f, 1e-8f, 0x1p-3f, step, 1, seed};
    update_of(e.r, e.tensor, NULL, adamw, NULL);
    for (int64_t i = 0; i < CROWD; i++) {
        params[i] = to_float(e.r.params[i]) < 1 ? -1 : 1;
        v[i] = bf16_to_float(((const bf16 *)e.r.v)[i]) < 1 ? -1 : 1;
    }
    everything_free(&e);
}
static double correlation(const double *a, const double *b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum / (double)n;
}
static void roundings_are_even_and_of_nothing_else(void **state) {
    enum { OTHERS = 5 };
    double *params[OTHERS], *v[OTHERS], bound = 4.5 / sqrt((double)CROWD); // wide enough for 44 comparisons
    for (int k = 0; k < OTHERS; k++) {
        params[k] = test_doubles(CROWD);
        v[k] = test_doubles(CROWD);
        // k: 0 itself, 1 another seed, 2 another step, 3 another tensor, 4 a tensor whose number differs in the next
        // byte
        crowd_signs(params[k], v[k], k == 1 ? 8 : 7, k == 2 ? 4 : 3, k == 3 ? 1 : k == 4 ? 256 : 0);
    }
    double one = 0;
    for (int k = 0; k < OTHERS; k++) {
        one = 0;
        for (int64_t i = 0; i < CROWD && BF16_BUILD; i++)
            one += params[k][i];
        assert_near(one / CROWD, 0, bound, k);
        assert_near(correlation(v[k], v[k] + 1, CROWD - 1), 0, bound, k);
        for (int near = 1; near <= 4 && BF16_BUILD; near++)
            assert_near(correlation(params[k], params[k] + near, CROWD - near), 0, bound, near);
        if (BF16_BUILD)
            assert_near(correlation(params[k], v[k], CROWD), 0, bound, k);
        for (int other = 0; other < k; other++) {
            assert_near(correlation(v[k], v[other], CROWD), 0, bound, other);
            if (BF16_BUILD)
                assert_near(correlation(params[k], params[other], CROWD), 0, bound, other);
        }
    }
    for (int k = 0; k < OTHERS; k++) {
        free(params[k]);
        free(v[k]);
    }
}

// Checks the parameters' amax after an update, or a skipped one. The amax changes no bit of the parameters, around
// which larger numbers lie.
static void check_amax(int64_t n, bool with_remainder, bool finite, int offset, int amax_case, uint32_t before) {
    uint64_t random = (uint64_t)n;
    test_case(random, "amax, n %lld, %s, %s, %d elements off alignment, %s, from %x", (long long)n,
              with_remainder ? "remainders" : "no remainders", finite ? "updated" : "skipped", offset,
              amax_case_names[amax_case], before);
    const int64_t count = n + offset + 4;
    floatX *params[2];
    float *arrays[3] = {NULL}; // grads, m, v
    uint16_t *remainder = (uint16_t *)test_alloc((size_t)count * sizeof *remainder);
    struct gradient_check *check = (struct gradient_check *)test_alloc(sizeof *check);
    uint32_t *amax = amax_new(before);
    check->grad_norm = 1;
    check->grad_scale = 1;
    check->finite = finite;
    for (int k = 0; k < 3; k++)
        arrays[k] = (float *)test_alloc((size_t)count * sizeof(float));
    for (int with_amax = 0; with_amax < 2; with_amax++) {
        random = (uint64_t)n;
        floatX *const p = params[with_amax] = (floatX *)test_alloc((size_t)count * sizeof *p);
        for (int64_t i = 0; i < count; i++) {
            p[i] = to_floatX(1e30f);
            remainder[i] = 0;
            arrays[0][i] = arrays[1][i] = arrays[2][i] = 0;
        }
        for (int64_t i = offset; i < offset + n; i++) {
            p[i] = to_floatX((float)test_uniform(&random));
            arrays[0][i] = amax_case == AMAX_ZEROS ? 0 : (float)test_uniform(&random);
        }
        amax_case_set(p + offset, n, amax_case);
        const struct adamw adamw = {0.1f, 0.9f, 0.95f, 1e-8f, 0.1f, 1, 1};
        update_of(range_of(p + offset, with_remainder && BF16_BUILD ? remainder + offset : NULL, arrays[0] + offset,
                           arrays[1] + offset, arrays[2] + offset, n),
                  0, with_amax ? amax : NULL, adamw, check);
    }
    assert_memory_equal(params[1], params[0], (size_t)count * sizeof **params);
    assert_int_equal(*amax, amax_expected(before, params[1] + offset, n));
    void *all[] = {params[0], params[1], arrays[0], arrays[1], arrays[2], remainder, check, amax};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}
static void amax_is_of_the_parameters_afterwards(void **state) {
    const int64_t sizes[] = {1, 2, 5, 15, 1023, 1024, 1025, 5000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int k = 0; k < 4 * AMAX_CASES; k++) {
            const int offset = (int)(i + (size_t)k) % 4;
            check_amax(sizes[i], k & 1, k & 2, offset, k / 4, 0);
            check_amax(sizes[i], k & 1, k & 2, offset, k / 4, 0x7f000000u); // larger than any finite number
        }
}

// Targets of each loss of a check.
enum { TARGETS = 8 };
// Returns what gradient_check finds for a sum of squares and num_losses losses, each over TARGETS targets of which
// `counted` count. broken_at: the loss that is `broken`; -1: none is.
static struct gradient_check checked_counted(double squares, int num_losses, int broken_at, double broken, double clip,
                                             int counted) {
    struct gradient_check *check = (struct gradient_check *)test_alloc(sizeof *check), result;
    const int width = REPORT_LOSSES + 2 * num_losses + 1;
    double *reports = test_doubles(width), *losses = reports + REPORT_LOSSES;
    reports[REPORT_SQUARES] = squares;
    reports[width - 1] = NAN; // not a loss
    for (int i = 0; i < num_losses; i++) {
        losses[2 * i] = i == broken_at ? broken : 4 - 0.01 * i;
        losses[2 * i + 1] = counted;
    }
    losses[2 * num_losses] = NAN; // after the last loss
    memset(check, 0xff, sizeof *check);
    gradient_check(check, reports, 1, width, num_losses, (double)num_losses * TARGETS, clip, &device);
    result = *check;
    free(check);
    free(reports);
    return result;
}
static struct gradient_check checked(double squares, int num_losses, int broken_at, double broken, double clip) {
    return checked_counted(squares, num_losses, broken_at, broken, clip, TARGETS);
}
// Checks that the gradients of a mean over fewer targets are larger, and are clipped accordingly.
static void checks_of_targets_that_do_not_count(void **state) {
    struct gradient_check c = checked_counted(16, 3, -1, 0, 0, 2);
    assert_true(c.grad_norm == 16 && c.grad_scale == 4 && c.finite == 1);
    c = checked_counted(16, 3, -1, 0, 1, 2);
    assert_true(c.grad_norm == 16 && c.grad_scale == (float)(4 / (16 + 1e-6)) && c.finite == 1);
    c = checked_counted(16, 3, -1, 0, 1, 0);                         // no target counts
    assert_true(c.grad_norm == 0 && c.grad_scale == 0 && !c.finite); // so there is no update
}
static void checks(void **state) {
    const int counts[] = {0, 1, 2, 31, 32, 33, 70};
    for (size_t k = 0; k < sizeof counts / sizeof *counts; k++) {
        const int n = counts[k];
        test_case_without_seed("%d losses", n);
        struct gradient_check c = checked(16, n, -1, 0, 1); // clipped from 4 to 1
        assert_true(c.grad_norm == 4 && c.grad_scale == (float)(1 / (4 + 1e-6)) && c.finite == 1);
        c = checked(16, n, -1, 0, 5); // short enough
        assert_true(c.grad_norm == 4 && c.grad_scale == 1 && c.finite == 1);
        c = checked(1e200, n, -1, 0, 0); // 0: never clipped
        assert_true(c.grad_norm == 1e100 && c.grad_scale == 1 && c.finite == 1);
        c = checked(0, n, -1, 0, 1e-7); // torch adds 1e-6
        assert_true(c.grad_norm == 0 && c.grad_scale == (float)(1e-7 / 1e-6) && c.finite == 1);
        assert_int_equal(checked(INFINITY, n, -1, 0, 1).finite, 0);
        assert_int_equal(checked(NAN, n, -1, 0, 0).finite, 0);
        for (int at = 0; at < n; at++) {
            assert_int_equal(checked(16, n, at, NAN, 1).finite, 0);
            assert_int_equal(checked(16, n, at, -INFINITY, 1).finite, 0);
        }
    }
}

// Checks that the squares of all ranks are added in the ranks' order, and that any rank's losses can break the step.
static void checks_of_ranks(void **state) {
    enum { RANKS = 3, LOSSES = 2, WIDTH = REPORT_LOSSES + 2 * LOSSES + 1 };
    struct gradient_check *check = (struct gradient_check *)test_alloc(sizeof *check);
    double *reports = test_doubles(RANKS * WIDTH);
    const double squares[RANKS] = {1, 1e-16, 1e-16}; // added to 1 they change nothing
    for (int broken = -1; broken < RANKS * LOSSES; broken++) {
        for (int r = 0; r < RANKS; r++) {
            reports[r * WIDTH + REPORT_SQUARES] = squares[r];
            reports[r * WIDTH + WIDTH - 1] = NAN;
            for (int i = 0; i < LOSSES; i++) {
                reports[r * WIDTH + REPORT_LOSSES + 2 * i] = r * LOSSES + i == broken ? INFINITY : 3;
                reports[r * WIDTH + REPORT_LOSSES + 2 * i + 1] = r + i; // 9 of the 18 targets count
            }
        }
        gradient_check(check, reports, RANKS, WIDTH, LOSSES, 18, 0, &device);
        assert_true(check->grad_norm == 2);
        assert_int_equal(check->finite, broken < 0);
    }
    free(check);
    free(reports);
}

// ---- Gradients ----

static struct rounding rounding_of(uint64_t seed, uint64_t step) {
    struct rounding r;
    memset(&r, 0, sizeof r);
    r.seed = seed;
    r.step = step;
    r.use = ROUNDING_GRADIENTS;
    return r;
}
// Adds n gradients of tensor r.tensor, from its element r.first on.
static void add_of(void *store, enum state_format format, const float *in, int64_t n, bool add, struct rounding r) {
    struct flat_tensors tensors = {NULL, (int)r.tensor + 1, false};
    struct flat_tensor *rows = (struct flat_tensor *)test_alloc(((size_t)r.tensor + 1) * sizeof *rows);
    for (uint32_t i = 0; i <= r.tensor; i++) {
        rows[i].begin = (int64_t)i * STATE_BLOCK;
        rows[i].end = rows[i].begin + (i < r.tensor ? 1 : r.first + n);
    }
    tensors.rows = rows;
    add_gradients(store, format, in, (int64_t)r.tensor * STATE_BLOCK + r.first, n, tensors, add, r, &device);
    free(rows);
}
static void additions(void **state) {
    const int64_t sizes[] = {0, 1, 3, 4, 1023, 1024, 1025, 10007};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
        for (int add = 0; add < 2; add++) {
            const int64_t n = sizes[k];
            test_case_without_seed("n %lld, %s", (long long)n, add ? "added" : "stored");
            float *out = (float *)test_alloc((size_t)(n + 4) * sizeof *out),
                  *in = (float *)test_alloc((size_t)(n + 4) * sizeof *in);
            bf16 *rounded = (bf16 *)test_alloc((size_t)(n + 4) * sizeof *rounded);
            for (int64_t i = 0; i < n + 4; i++) {
                out[i] = (float)i;
                rounded[i] = bf16_from_float((float)(i % 64)); // bf16 holds these exactly, and their sums
                in[i] = 0.5f;
            }
            add_of(out, FORMAT_FP32, in, n, add, rounding_of(1, 1));
            add_of(rounded, FORMAT_BF16, in, n, add, rounding_of(1, 1));
            for (int64_t i = 0; i < n + 4; i++) {
                assert_true(out[i] == (i < n ? (add ? (float)i : 0) + 0.5f : (float)i));
                assert_true(bf16_to_float(rounded[i]) ==
                            (i < n ? (add ? (float)(i % 64) : 0) + 0.5f : (float)(i % 64)));
            }
            free(out);
            free(in);
            free(rounded);
        }
}
// Checks that 256 + 1 in bf16 is 256 or 258, so that 16 such additions give 272 in the mean over seeds.
static void sums_over_micro_steps_have_the_mean_of_one_sum(void **state) {
    enum { N = 128, SEEDS = 64, MICRO_STEPS = 16 };
    bf16 *store = (bf16 *)test_alloc(N * sizeof *store);
    float *in = (float *)test_alloc(N * sizeof *in);
    uint64_t *counter = (uint64_t *)test_alloc(sizeof *counter);
    double sum = 0;
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        for (int i = 0; i < N; i++) {
            store[i] = bf16_from_float(256);
            in[i] = 1;
        }
        struct rounding r = rounding_of(seed, 100);
        r.counter = counter;
        for (*counter = 0; *counter < MICRO_STEPS; ++*counter)
            add_of(store, FORMAT_BF16, in, N, true, r);
        for (int i = 0; i < N; i++)
            sum += bf16_to_float(store[i]);
    }
    const double deviation = sqrt((double)MICRO_STEPS / (N * SEEDS)); // a sum of MICRO_STEPS times 0 or 2
    assert_near(sum / (N * SEEDS), 256 + MICRO_STEPS, 5 * deviation, 0);
    assert_true(bf16_to_float(bf16_from_float(257)) == 256); // rounding to nearest would add nothing
    free(store);
    free(in);
    free(counter);
}
// Checks that random numbers depend only on the element, the tensor and step + counter, in whatever ranges a store is
// added to.
static void additions_are_rounded_by_element_and_step(void **state) {
    enum { N = 1200, CUT = 512 };
    bf16 *stores[6];
    float *in = (float *)test_alloc(N * sizeof *in);
    uint64_t *counter = (uint64_t *)test_alloc(sizeof *counter), random = 9;
    *counter = 3;
    for (int i = 0; i < N; i++)
        in[i] = (float)test_uniform(&random);
    for (int k = 0; k < 6; k++) {
        struct rounding r = rounding_of(1, k == 3 ? 8 : 10);
        if (k == 2) {
            r.step = 7;
            r.counter = counter;
        }
        r.tensor = k == 4;
        r.use = k == 5 ? ROUNDING_UPDATE : ROUNDING_GRADIENTS;
        stores[k] = (bf16 *)test_alloc(N * sizeof *stores[k]);
        add_of(stores[k], FORMAT_BF16, in, k == 1 ? CUT : N, false, r);
        r.first = CUT;
        if (k == 1)
            add_of(stores[k] + CUT, FORMAT_BF16, in + CUT, N - CUT, false, r);
    }
    assert_memory_equal(stores[1], stores[0], N * sizeof **stores); // in two ranges
    assert_memory_equal(stores[2], stores[0], N * sizeof **stores); // step 7 and counter 3
    for (int k = 3; k < 6; k++)
        assert_true(memcmp(stores[k], stores[0], N * sizeof **stores) != 0);
    for (int k = 0; k < 6; k++)
        free(stores[k]);
    free(in);
    free(counter);
}
// Checks that a range of many tensors, in one call or cut within tensors, gives the bits of each tensor's own addition,
// and keeps the gaps.
static void additions_to_a_range_have_the_bits_of_each_tensor(void **state) {
    enum { COUNT = 40 };
    uint64_t random = 6;
    struct flat_tensor *rows = (struct flat_tensor *)test_alloc(COUNT * sizeof *rows);
    const struct flat_tensors tensors = {rows, COUNT, false};
    int64_t flat = 0;
    for (int i = 0; i < COUNT; i++) {
        rows[i].begin = flat;
        rows[i].end = flat + 1 + 61 * i * i % 900;
        flat = (rows[i].end + STATE_BLOCK) / STATE_BLOCK * STATE_BLOCK;
    }
    const int64_t cut = flat / 2 / STATE_BLOCK * STATE_BLOCK;
    float *in = (float *)test_alloc((size_t)flat * sizeof *in);
    for (int64_t i = 0; i < flat; i++)
        in[i] = (float)test_uniform(&random);
    for (int is_bf16 = 0; is_bf16 < 2; is_bf16++) {
        const enum state_format format = is_bf16 ? FORMAT_BF16 : FORMAT_FP32;
        char *stores[3];
        for (int k = 0; k < 3; k++) {
            struct rounding r = rounding_of(1, 10);
            stores[k] = (char *)test_alloc(state_bytes(format, flat));
            memset(stores[k], 0x31, state_bytes(format, flat));
            for (uint32_t i = 0; i < COUNT && k == 0; i++) {
                r.tensor = i;
                add_of(stores[k] + state_bytes(format, rows[i].begin), format, in + rows[i].begin,
                       rows[i].end - rows[i].begin, true, r);
            }
            if (k == 1)
                add_gradients(stores[k], format, in, 0, flat, tensors, true, r, &device);
            if (k == 2) {
                add_gradients(stores[k], format, in, 0, cut, tensors, true, r, &device);
                add_gradients(stores[k] + state_bytes(format, cut), format, in + cut, cut, flat - cut, tensors, true, r,
                              &device);
            }
        }
        for (int k = 1; k < 3; k++)
            assert_memory_equal(stores[k], stores[0], state_bytes(format, flat));
        for (int k = 0; k < 3; k++)
            free(stores[k]);
    }
    free(rows);
    free(in);
}
static void additions_keep_what_is_not_finite(void **state) {
    enum { N = 1024 };
    bf16 *store = (bf16 *)test_alloc(N * sizeof *store);
    float *in = (float *)test_alloc(N * sizeof *in);
    for (int i = 0; i < N; i++) {
        store[i] = bf16_from_float(1);
        in[i] = i % 2 ? INFINITY : float_from_bits(0x7fffffffu); // a GPU's NaN
    }
    add_of(store, FORMAT_BF16, in, N, true, rounding_of(1, 1));
    for (int i = 0; i < N; i++)
        assert_true(i % 2 ? bf16_to_float(store[i]) == INFINITY : isnan(bf16_to_float(store[i])));
    free(store);
    free(in);
}

static double squares_of(const void *x, enum state_format format, int64_t n) {
    double *total = test_doubles(1);
    void *workspace = test_alloc(sum_of_squares_workspace_bytes(&device));
    *total = NAN;
    sum_of_squares(total, x, format, n, false, workspace, &device);
    const double result = *total;
    sum_of_squares(total, x, format, n, true, workspace, &device); // adds the same squares once more
    assert_true(*total == 2 * result || isnan(result));
    free(workspace);
    free(total);
    return result;
}
// of each size; the emulator takes a quarter of a second for a sum of a thousand blocks
enum { ALIGNMENTS = SLOW ? 1 : 4 };
static void sums(void **state) {
    const int64_t sizes[] = {0, 1, 2, 4, 5, 255, 256, 257, 100003, 1100007};
    for (size_t k = 0; k < ALIGNMENTS * sizeof sizes / sizeof *sizes; k++) {
        const int64_t n = sizes[k / ALIGNMENTS];
        uint64_t random = 2;
        test_case(random, "n %lld, %zu elements off alignment", (long long)n, k % 4);
        float *memory = (float *)test_alloc((size_t)(n + 8) * sizeof *memory), *x = memory + k % 4; // aligned or not
        double expected = 0;
        for (int64_t i = 0; i < n + 4; i++) {             // the last 4 do not belong to it
            x[i] = (float)(1e20 * test_uniform(&random)); // no float holds their squares
            expected += i < n ? (double)x[i] * x[i] : 0;
        }
        const int threads = omp_get_max_threads();
        omp_set_num_threads(1);
        const double one = squares_of(x, FORMAT_FP32, n);
        omp_set_num_threads(7);
        const double seven = squares_of(x, FORMAT_FP32, n);
        omp_set_num_threads(threads);
        assert_true(one == seven);
        assert_near(one, expected, 1e-12 * expected, 0);
        if (n > 256) {
            x[n - 1] = INFINITY;
            assert_true(squares_of(x, FORMAT_FP32, n) == INFINITY);
            x[n / 2] = NAN;
            assert_true(isnan(squares_of(x, FORMAT_FP32, n)));
        }
        free(memory);
    }
}
static void sums_of_bf16(void **state) {
    const int64_t sizes[] = {0, 1, 2, 5, 257, 100003};
    for (size_t k = 0; k < ALIGNMENTS * sizeof sizes / sizeof *sizes; k++) {
        const int64_t n = sizes[k / ALIGNMENTS];
        uint64_t random = 2;
        test_case(random, "n %lld, %zu elements off alignment", (long long)n, k % 4);
        bf16 *memory = (bf16 *)test_alloc((size_t)(n + 8) * sizeof *memory), *x = memory + k % 4;
        double expected = 0;
        for (int64_t i = 0; i < n + 4; i++) { // the last 4 do not belong to it
            x[i] = bf16_from_float((float)test_uniform(&random));
            expected += i < n ? (double)bf16_to_float(x[i]) * bf16_to_float(x[i]) : 0;
        }
        assert_near(squares_of(x, FORMAT_BF16, n), expected, 1e-12 * expected, 0);
        if (n > 256) {
            x[n / 2] = bf16_from_float(NAN);
            assert_true(isnan(squares_of(x, FORMAT_BF16, n)));
        }
        free(memory);
    }
}
// Checks the squares of ranges, in two groups, some of the ranges empty or shorter than a group of threads: their total
// is the sum of the ranges' sums in order, to the bit.
static void sums_of_ranges_are_those_of_each(void **state) {
    enum { COUNT = SLOW ? 5 : 35 };
    for (int is_bf16 = 0; is_bf16 < 2; is_bf16++) {
        const enum state_format format = is_bf16 ? FORMAT_BF16 : FORMAT_FP32;
        uint64_t random = 4;
        test_case(random, "%s", format_name(format));
        struct gradient_range *ranges = (struct gradient_range *)test_alloc(COUNT * sizeof *ranges);
        int64_t flat = 0;
        for (int i = 0; i < COUNT; i++) {
            ranges[i].at = flat;
            ranges[i].n = i % 4 == 3 ? 0 : 1 + 977 * i;
            flat += (ranges[i].n / STATE_BLOCK + 2) * STATE_BLOCK;
        }
        float *values = (float *)malloc((size_t)flat * sizeof *values);
        char *x = (char *)test_alloc(state_bytes(format, flat));
        for (int64_t i = 0; i < flat; i++)
            values[i] = (float)(1e3 * test_uniform(&random));
        state_encode(x, values, format, flat);
        double *total = test_doubles(2);
        void *workspace = test_alloc(squares_of_ranges_workspace_bytes(COUNT, &device));
        memset(workspace, 0xff, squares_of_ranges_workspace_bytes(COUNT, &device));
        squares_of_ranges(workspace, x, format, ranges, 0, 2, &device);
        squares_of_ranges(workspace, x, format, ranges, 2, 2, &device);
        squares_of_ranges(workspace, x, format, ranges, 2, COUNT, &device);
        squares_total(&total[0], COUNT, workspace, &device);
        for (int i = 0; i < COUNT; i++)
            sum_of_squares(&total[1], x + state_bytes(format, ranges[i].at), format, ranges[i].n, i > 0, workspace,
                           &device);
        assert_true(total[0] > 0 && memcmp(&total[0], &total[1], sizeof *total) == 0);
        free(values);
        void *all[] = {ranges, x, total, workspace};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            free(all[i]);
    }
}
static void sum_8bit(void *unused) { squares_of(NULL, FORMAT_8BIT, 0); }
static void gradients_are_fp32_or_bf16(void **state) { assert_fails(sum_8bit, NULL, "gradients|fp32 or bf16"); }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(twenty_steps),
        cmocka_unit_test(ranges),
        cmocka_unit_test(first_step),
        cmocka_unit_test(each_format_is_stepped_in_fp32_and_rounded_once),
        cmocka_unit_test(a_split_master_has_the_bits_of_a_whole_one),
        cmocka_unit_test(neither_ranges_nor_threads_change_a_bit),
        cmocka_unit_test(a_range_of_tensors_has_the_bits_of_each),
        cmocka_unit_test(a_multiplier_is_that_of_the_learning_rate),
        cmocka_unit_test(nothing_changes),
        cmocka_unit_test(weight_decay_shrinks_the_mean_as_it_would_in_fp32),
        cmocka_unit_test(a_tiny_learning_rate_moves_the_mean_as_it_would_in_fp32),
        cmocka_unit_test(bf16_second_moments_fall_at_large_beta2),
        cmocka_unit_test(roundings_are_even_and_of_nothing_else),
        cmocka_unit_test(amax_is_of_the_parameters_afterwards),
        cmocka_unit_test(sums),
        cmocka_unit_test(checks),
        cmocka_unit_test(checks_of_targets_that_do_not_count),
        cmocka_unit_test(checks_of_ranks),
        cmocka_unit_test(additions),
        cmocka_unit_test(sums_over_micro_steps_have_the_mean_of_one_sum),
        cmocka_unit_test(additions_are_rounded_by_element_and_step),
        cmocka_unit_test(additions_to_a_range_have_the_bits_of_each_tensor),
        cmocka_unit_test(additions_keep_what_is_not_finite),
        cmocka_unit_test(sums_of_bf16),
        cmocka_unit_test(sums_of_ranges_are_those_of_each),
        cmocka_unit_test(gradients_are_fp32_or_bf16),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
