// kernels/fp8/scales.cuh against a plain model that keeps every step's amaxes, to the bit: scales over steps of several
// micro-batches and ranks, some of them skipped.
#include "kernels/fp8/scales.cuh"
#include "test/testing.h"

static struct device device = {2, NULL};

enum { MAX_STEPS = 40, MAX_SCALES = 36 };
static const uint32_t INFINITE = 0x7f800000u, QUIET_NAN = 0x7fc00001u;
static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// One rank's state, in the device's memory, and all ranks' reports, in which amaxes begin at column `first`.
struct model {
    struct fp8_scale *scales;
    uint32_t *weight_amaxes;
    float *history;
    struct gradient_check *check;
    double *reports;
    uint64_t *counts;
    int n, ranks, width, first;
    struct fp8_delay delay;
    struct fp8_scales_order order; // in a model of many scales the last are attention's
};
enum { COUNTS = 5 };
static struct model model_make(int n, int ranks, struct fp8_delay delay, enum fp8_format gradients) {
    struct model m;
    const size_t history_bytes = (size_t)n * (size_t)delay.length * sizeof *m.history;
    m.first = 3 + COUNTS;
    m.width = m.first + n + 1;
    m.n = n;
    m.ranks = ranks;
    m.delay = delay;
    m.order.linears = n < 12 ? n : n / 2 / 3 * 3;
    m.order.attention_gradients = m.order.linears + (n - m.order.linears) / 3;
    m.order.gradients = gradients;
    m.scales = (struct fp8_scale *)test_alloc((size_t)n * sizeof *m.scales);
    m.weight_amaxes = (uint32_t *)test_alloc((size_t)(n / 3) * sizeof *m.weight_amaxes);
    m.history = (float *)test_alloc(history_bytes + 4);
    m.check = (struct gradient_check *)test_alloc(sizeof *m.check);
    m.reports = test_doubles((int64_t)ranks * m.width);
    m.counts = (uint64_t *)test_alloc(COUNTS * sizeof *m.counts);
    memset(m.scales, 0, (size_t)n * sizeof *m.scales);
    memset(m.weight_amaxes, 0, (size_t)(n / 3) * sizeof *m.weight_amaxes);
    memset(m.history, 0, history_bytes);
    memset(m.counts, 0, COUNTS * sizeof *m.counts);
    m.history[(int64_t)n * delay.length] = 77; // what lies after must stay
    m.check->grad_norm = 2;
    m.check->grad_scale = 0.5f;
    m.check->finite = 1;
    // Columns beside the amaxes hold what must not be taken for an amax.
    for (int64_t i = 0; i < (int64_t)ranks * m.width; i++)
        m.reports[i] = i % 2 ? NAN : 1e30;
    return m;
}
static void model_free(struct model *m) {
    assert_true(m->history[(int64_t)m->n * m->delay.length] == 77);
    assert_true(m->check->grad_norm == 2 && m->check->grad_scale == 0.5f);
    void *all[] = {m->scales, m->weight_amaxes, m->history, m->check, m->reports, m->counts};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}
static void model_update(struct model *m) {
    fp8_scales_update(m->scales, m->history, m->check, m->reports, m->ranks, m->width, m->first, m->n, m->delay,
                      m->order, &device);
}
static double *report_of(struct model *m, int rank) { return m->reports + (int64_t)rank * m->width + m->first; }

static bool is_weight(const struct model *m, int i) { return i < m->order.linears && i % 3 == 1; }
static double expected_scale(double amax, int i, const struct model *m) {
    const double largest =
        (i < m->order.linears ? i % 3 == 2 : i >= m->order.attention_gradients) && m->order.gradients == FP8_E5M2
            ? 57344
            : 448;
    const double scale = (float)(largest / amax / pow(2, m->delay.margin));
    return scale > 0x1p126 ? 0x1p126 : scale < 0x1p-126 ? 0x1p-126 : scale;
}

// Returns the largest element of a tensor in a step: zero, subnormal, tiny, usual or huge.
static uint32_t some_amax(uint64_t *random) {
    const double x = fabs(test_uniform(random));
    switch (test_random(random) % 8) {
    case 0: return 0;
    case 1: return 1 + (uint32_t)(x * 1000);
    case 2: return bits_of((float)(x * 1e-30));
    case 3: return bits_of((float)(x * 3e38));
    default: return bits_of((float)(x * 8));
    }
}

// Checks steps of a random number of micro-batches on several ranks. This rank's amaxes pass through begin and report;
// the other ranks' stand in their reports. Some steps are skipped, because of the losses or an amax of any rank.
static void check_steps(int n, int ranks, struct fp8_delay delay, enum fp8_format gradients, int steps) {
    uint64_t random = (uint64_t)(n + 100 * ranks + 1000 * delay.length + delay.margin);
    test_case(random, "%d scales, %d ranks, history %d, %s, margin %d, %s gradients", n, ranks, delay.length,
              delay.most_recent ? "most recent" : "max", delay.margin, gradients == FP8_E4M3 ? "E4M3" : "E5M2");
    struct model m = model_make(n, ranks, delay, gradients);
    static float entered[MAX_STEPS][MAX_SCALES];
    float delayed[MAX_SCALES] = {0};
    int num_entered = 0;
    const bool weights_given = ranks == 1;
    for (int step = 0; step < steps; step++) {
        uint32_t amax[MAX_SCALES], weights[MAX_SCALES] = {0};
        const int micro_batches = 1 + (int)(test_random(&random) % 3), mine = (int)(test_random(&random) % ranks);
        for (int i = 0; i < n; i++)
            amax[i] = 0;
        for (int w = 0; w < n / 3; w++)
            weights[3 * w + 1] = m.weight_amaxes[w] = some_amax(&random);
        for (int micro_batch = 0; micro_batch < micro_batches; micro_batch++) {
            fp8_scales_begin(m.scales, weights_given ? m.weight_amaxes : NULL, m.order.linears, n, &device);
            for (int i = 0; i < n; i++) {
                if (is_weight(&m, i) && weights_given) {
                    assert_int_equal(m.scales[i].amax, weights[i]);
                    amax[i] = weights[i];
                    continue;
                }
                assert_int_equal(m.scales[i].amax, 0);
                assert_int_equal(m.scales[i].step_amax, amax[i]);
                m.scales[i].amax = some_amax(&random); // as a forward leaves it
                amax[i] = m.scales[i].amax > amax[i] ? m.scales[i].amax : amax[i];
            }
        }
        double *report = report_of(&m, mine);
        for (int i = 0; i < COUNTS; i++)
            m.counts[i] = ((uint64_t)1 << 40) * (uint64_t)i + (uint64_t)step;
        fp8_scales_report(report - COUNTS, m.counts, m.scales, COUNTS, n, &device);
        for (int i = 0; i < COUNTS; i++) {
            assert_true(report[i - COUNTS] == 0x1p40 * i + step);
            assert_int_equal(m.counts[i], 0);
        }
        for (int i = 0; i < n; i++)
            assert_true(report[i] == float_of(amax[i]));
        for (int rank = 0; rank < ranks; rank++)
            for (int i = 0; i < n && rank != mine; i++) {
                const uint32_t other = is_weight(&m, i) ? amax[i] : some_amax(&random);
                report_of(&m, rank)[i] = float_of(other);
                amax[i] = other > amax[i] ? other : amax[i];
            }
        // 0: none, 1: in the losses, 2: an infinity, 3: a NaN
        const int fault = step % 5 == 2 ? 1 + (int)(test_random(&random) % 3) : 0;
        m.check->finite = fault != 1;
        if (fault > 1)
            report_of(&m, (int)(test_random(&random) % ranks))[test_random(&random) % n] = fault == 2 ? INFINITY : NAN;
        model_update(&m);
        assert_int_equal(m.check->finite, fault == 0);
        for (int i = 0; i < n && fault == 0; i++)
            entered[num_entered][i] = float_of(amax[i]);
        num_entered += fault == 0;
        for (int i = 0; i < n; i++) {
            double largest = 0;
            for (int j = 0; j < delay.length; j++) {
                const float expected = j < num_entered ? entered[num_entered - 1 - j][i] : 0;
                assert_true(m.history[(int64_t)i * delay.length + j] == expected);
                if (j == 0 || !delay.most_recent)
                    largest = expected > largest ? expected : largest;
            }
            if (fault == 0 && largest > 0)
                delayed[i] = (float)expected_scale(largest, i, &m);
            assert_true(m.scales[i].delayed == delayed[i]);
            assert_true(delayed[i] == 0 || (isnormal(delayed[i]) && isnormal(1 / delayed[i])));
            assert_int_equal(m.scales[i].amax, 0);
            assert_int_equal(m.scales[i].step_amax, 0);
        }
    }
    model_free(&m);
}
static void steps_of_micro_batches_and_ranks(void **state) {
    const int lengths[] = {1, 2, 5, 32, 1024, 1025};
    for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++)
        for (int most_recent = 0; most_recent < 2; most_recent++) {
            const struct fp8_delay delay = {lengths[l], (int)l % 3, most_recent != 0};
            check_steps(12, 1, delay, FP8_E5M2, lengths[l] > 32 ? 8 : MAX_STEPS);
            check_steps(MAX_SCALES, 3, delay, FP8_E4M3, lengths[l] > 32 ? 8 : MAX_STEPS);
        }
    const struct fp8_delay with_margin = {4, 64, false};
    check_steps(MAX_SCALES, 2, with_margin, FP8_E5M2, MAX_STEPS);
}

// Checks that a cast takes the current amax until a step has entered its tensor's history: `delayed` is 0, also after
// steps of zeros and after skipped ones.
static void first_step(void **state) {
    const struct fp8_delay delay = {3, 0, false};
    struct model m = model_make(3, 2, delay, FP8_E5M2);
    test_case_without_seed("an empty history");
    for (int step = 0; step < 3; step++) {
        for (int i = 0; i < 3; i++) {
            report_of(&m, 0)[i] = step == 1 ? 4 : 0;
            report_of(&m, 1)[i] = step == 1 && i == 2 ? INFINITY : 0;
        }
        m.check->finite = 1;
        model_update(&m);
        assert_int_equal(m.check->finite, step != 1);
        for (int i = 0; i < 3; i++) {
            assert_true(m.scales[i].delayed == 0);
            for (int j = 0; j < 3; j++)
                assert_true(m.history[3 * i + j] == 0);
        }
    }
    for (int i = 0; i < 3; i++)
        report_of(&m, 1)[i] = 7;
    model_update(&m);
    for (int i = 0; i < 3; i++)
        assert_true(m.scales[i].delayed == (i == 2 ? 8192 : 64) && m.history[3 * i] == 7);
    model_free(&m);
}

// Checks that an amax of zero leaves the former scale: where only the newest step's is zero, and where the whole
// history is.
static void zeros_keep_the_scale(void **state) {
    for (int most_recent = 0; most_recent < 2; most_recent++) {
        const struct fp8_delay delay = {2, 0, most_recent != 0};
        const double amaxes[] = {7, 3.5, 0, 0, 0, 14};
        const float largest[2][6] = {{7, 7, 3.5f, 3.5f, 3.5f, 14}, {7, 3.5f, 3.5f, 3.5f, 3.5f, 14}};
        struct model m = model_make(3, 1, delay, FP8_E4M3);
        for (int step = 0; step < 6; step++) {
            test_case_without_seed("zeros, %s, step %d", most_recent ? "most recent" : "max", step);
            for (int i = 0; i < 3; i++)
                report_of(&m, 0)[i] = amaxes[step];
            model_update(&m);
            for (int i = 0; i < 3; i++)
                assert_true(m.scales[i].delayed == 448 / largest[most_recent][step]);
        }
        model_free(&m);
    }
}

// Checks that without a margin a delayed scale is the one that the same amax gives at once, for every exponent and in
// each format; and that with any margin the scale and its inverse are normal numbers.
static void delayed_scale_of_any_amax(void **state) {
    uint64_t random = 3;
    test_case(random, "amaxes of every exponent");
    const enum fp8_format formats[] = {FP8_E4M3, FP8_E5M2};
    for (uint32_t exponent = 0; exponent < 255; exponent++)
        for (int i = 0; i < 20; i++)
            for (int f = 0; f < 2; f++) {
                const uint32_t mantissa = i == 0 ? exponent == 0 : i == 1 ? 0x7fffff : test_random(&random) >> 41;
                const uint32_t amax = exponent << 23 | mantissa;
                const float scale = fp8_delayed_scale(float_of(amax), formats[f], 0);
                assert_true(amax == 0 || scale == fp8_scale_of(amax, formats[f]));
                for (int margin = 0; margin <= 64; margin += 16) {
                    const float with_margin = fp8_delayed_scale(float_of(amax), formats[f], margin);
                    assert_true(amax == 0 || (isnormal(with_margin) && isnormal(1 / with_margin)));
                }
            }
}

// Checks a full history, longer than what is moved at once: all entries move by one, and the maximum is over those that
// stay, wherever it is.
static void full_history(void **state) {
    const int lengths[] = {2, 32, 33, 1024, 1025, 5000, 1 << 16};
    for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++) {
        const struct fp8_delay delay = {lengths[l], 0, false};
        const int length = delay.length, places[] = {length - 1, length - 2, length / 2, 31 % length, 0};
        uint64_t random = (uint64_t)length;
        for (size_t place = 0; place < sizeof places / sizeof *places; place++) {
            test_case(random, "history %d, the largest at %d", length, places[place]);
            struct model m = model_make(3, 1, delay, FP8_E4M3);
            float *before = (float *)malloc((size_t)(3 * length) * sizeof *before);
            assert_non_null(before);
            for (int j = 0; j < 3 * length; j++)
                before[j] = m.history[j] = (float)fabs(test_uniform(&random));
            for (int i = 0; i < 3; i++) {
                before[i * length + places[place]] = m.history[i * length + places[place]] = 100 + (float)i;
                report_of(&m, 0)[i] = 0.5;
            }
            model_update(&m);
            for (int i = 0; i < 3; i++) {
                float largest = 0.5f;
                for (int j = 1; j < length; j++)
                    largest = before[i * length + j - 1] > largest ? before[i * length + j - 1] : largest;
                assert_memory_equal(m.history + i * length + 1, before + i * length,
                                    (size_t)(length - 1) * sizeof *before);
                assert_true(m.history[i * length] == 0.5f && m.scales[i].delayed == 448 / largest);
            }
            model_free(&m);
            (free)(before);
        }
    }
}

// Checks that infinity and NaN, left by a micro-batch before the last one, are in the report; there zero counts as
// zero.
static void report_carries_an_overflow(void **state) {
    const struct fp8_delay delay = {1, 0, false};
    struct model m = model_make(6, 1, delay, FP8_E4M3);
    const uint32_t amaxes[] = {INFINITE, 0, QUIET_NAN, 0, 0, 1};
    test_case_without_seed("an overflow in a micro-batch before the last one");
    for (int i = 0; i < 6; i++)
        m.scales[i].amax = amaxes[i];
    fp8_scales_begin(m.scales, m.weight_amaxes, 6, 6, &device);
    m.scales[0].amax = m.scales[2].amax = bits_of(3);
    fp8_scales_report(report_of(&m, 0), m.counts, m.scales, 0, 6, &device);
    assert_true(report_of(&m, 0)[0] == INFINITY && isnan(report_of(&m, 0)[2]));
    assert_true(report_of(&m, 0)[1] == 0 && report_of(&m, 0)[3] == 0 && report_of(&m, 0)[5] == 0x1p-149);
    model_update(&m);
    assert_int_equal(m.check->finite, 0);
    for (int i = 0; i < 6; i++)
        assert_true(m.scales[i].delayed == 0 && m.history[i] == 0 && m.scales[i].step_amax == 0);
    // Without delayed scales a report has only counts.
    m.counts[0] = 5;
    report_of(&m, 0)[1] = 9;
    fp8_scales_report(report_of(&m, 0), m.counts, NULL, 1, 0, &device);
    assert_true(report_of(&m, 0)[0] == 5 && report_of(&m, 0)[1] == 9);
    model_free(&m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_of_micro_batches_and_ranks),
        cmocka_unit_test(first_step),
        cmocka_unit_test(zeros_keep_the_scale),
        cmocka_unit_test(delayed_scale_of_any_amax),
        cmocka_unit_test(full_history),
        cmocka_unit_test(report_carries_an_overflow),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
