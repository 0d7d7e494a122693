// Learning-rate schedules: values computed by hand, and what holds for every schedule.
#include "runtime/schedule.h" // under test
#include "test/testing.h"     // cmocka, test_random
#include <float.h>            // DBL_EPSILON
#include <stdbool.h>          // bool

static const struct schedule base = {LR_DECAY_COSINE, WSD_DECAY_LINEAR, 1, 0.1, 10, 110, 20};

static void check(struct schedule s, int64_t step, double expected) {
    const double lr = schedule_lr(&s, step);
    if (!(fabs(lr - expected) < 1e-12)) {
        print_error("step %lld: %.17g, expected %.17g\n", (long long)step, lr, expected);
        _fail(__FILE__, __LINE__);
    }
}

static void warmup_is_linear_and_spends_no_step_on_zero(void **state) {
    check(base, 0, 0.1);
    check(base, 1, 0.2);
    check(base, 8, 0.9);
    check(base, 9, 1);
    check(base, 10, 1);
    struct schedule s = base;
    s.warmup_steps = 0;
    check(s, 0, 1);
}

static void decays_have_the_values_of_their_formulas(void **state) {
    struct schedule s = base; // 0.1 + 0.9 times what is left
    check(s, 35, 0.1 + 0.45 * (1 + sqrt(0.5)));
    check(s, 60, 0.55);
    check(s, 85, 0.1 + 0.45 * (1 - sqrt(0.5)));
    s.style = LR_DECAY_LINEAR;
    check(s, 35, 0.775);
    check(s, 109, 0.109);
    s.style = LR_DECAY_CONSTANT;
    check(s, 9, 1);
    check(s, 109, 1);
    check(s, 100000, 1);
    for (int style = LR_DECAY_COSINE; style <= LR_DECAY_WSD; style++) {
        s.style = (enum lr_decay_style)style;
        check(s, 110, style == LR_DECAY_CONSTANT ? 1 : 0.1);
        check(s, 100000, style == LR_DECAY_CONSTANT ? 1 : 0.1);
    }
}

static void wsd_is_stable_and_then_falls(void **state) {
    struct schedule s = base;
    s.style = LR_DECAY_WSD;
    const double left_at_half[] = {sqrt(2) - 1, 0.5, 0.5, 1 - sqrt(0.5)};
    // 2^0.75 - 1, ..., (2 + sqrt 2)/4
    const double left_at_quarter[] = {0.6817928305074291, 0.75, 0.8535533905932737, 0.5};
    for (int style = WSD_DECAY_EXPONENTIAL; style <= WSD_DECAY_MINUS_SQRT; style++) {
        s.wsd_style = (enum lr_wsd_decay_style)style;
        check(s, 10, 1);
        check(s, 90, 1);
        check(s, 95, 0.1 + 0.9 * left_at_quarter[style]);
        check(s, 100, 0.1 + 0.9 * left_at_half[style]);
        check(s, 110, 0.1);
    }
}

// Returns the most of lr - min_lr that a decay of n steps loses in one step: the steepest slope of each formula over n.
static double steepest(const struct schedule *s) {
    const double pi = 3.14159265358979323846;
    const int64_t n = s->style == LR_DECAY_WSD ? s->wsd_decay_steps : s->decay_steps - s->warmup_steps;
    if (s->style == LR_DECAY_CONSTANT || n == 0)
        return n == 0 ? 1 : 0;
    const bool cosine = s->style == LR_DECAY_COSINE || (s->style == LR_DECAY_WSD && s->wsd_style == WSD_DECAY_COSINE);
    if (cosine)
        return pi / 2 / (double)n;
    if (s->style == LR_DECAY_WSD && s->wsd_style == WSD_DECAY_EXPONENTIAL)
        return 2 * log(2) / (double)n;
    if (s->style == LR_DECAY_WSD && s->wsd_style == WSD_DECAY_MINUS_SQRT)
        return 1 / sqrt((double)n); // the slope is infinite at first: the first step's loss
    return 1 / (double)n;
}

static void rates_rise_then_fall_without_jumps_between_their_bounds(void **state) {
    uint64_t random = 1;
    for (int trial = 0; trial < 3000; trial++) {
        struct schedule s;
        s.style = (enum lr_decay_style)(test_random(&random) % 4);
        s.wsd_style = (enum lr_wsd_decay_style)(test_random(&random) % 4);
        s.lr = 1e-3 * (1 + test_uniform(&random));
        s.min_lr = test_random(&random) % 3 ? s.lr * 0.5 * (1 + test_uniform(&random)) : 0;
        s.warmup_steps = (int64_t)(test_random(&random) % 40);
        s.decay_steps = s.warmup_steps + (int64_t)(test_random(&random) % 60);
        s.wsd_decay_steps = (int64_t)(test_random(&random) % (uint64_t)(s.decay_steps - s.warmup_steps + 1));
        const double rounding = 16 * DBL_EPSILON * s.lr;
        const double slope = steepest(&s) * (s.lr - s.min_lr);
        for (int64_t step = 0; step < s.decay_steps + 5; step++) {
            const double lr = schedule_lr(&s, step), next = schedule_lr(&s, step + 1);
            const bool warm = step + 1 < s.warmup_steps;
            assert_true(lr > 0 || s.min_lr == 0);
            assert_true(lr <= s.lr + rounding);
            assert_true(step < s.warmup_steps || lr >= s.min_lr - rounding);
            if (warm) // equal rises
                assert_true(fabs(next - lr - s.lr / (double)s.warmup_steps) <= rounding);
            else
                assert_true(next <= lr + rounding && lr - next <= slope + rounding);
        }
    }
}

// Checks Megatron-LM's sizes: start + increment floor(consumed / (samples / increments)), up to the whole batch. No
// step is smaller than its predecessor, and a run that begins in the middle goes on with the same sizes.
static void batches_grow_in_equal_parts(void **state) {
    const struct batch_ramp ramp = {16, 8, 48, 1000}; // 16, 24, 32 and 40, for 250 samples each
    assert_int_equal(ramp_batch(&ramp, 0), 16);
    assert_int_equal(ramp_batch(&ramp, 249), 16);
    assert_int_equal(ramp_batch(&ramp, 250), 24);
    assert_int_equal(ramp_batch(&ramp, 999), 40);
    assert_int_equal(ramp_batch(&ramp, 1000), 48);
    const struct batch_ramp whole = {0, 0, 48, 0}, flat = {48, 8, 48, 1000},
                            long_one = {1, 1, 1 << 24, ((int64_t)1 << 38) - 1};
    assert_int_equal(ramp_batch(&whole, 0), 48);
    assert_int_equal(ramp_batch(&flat, 10), 48);
    assert_int_equal(ramp_batch(&long_one, (uint64_t)long_one.samples - 1), (1 << 24) - 1);
    uint64_t consumed = 0;
    for (int step = 0; step < 60; step++) {
        assert_int_equal(ramp_samples(&ramp, step), consumed);
        const int batch = ramp_batch(&ramp, consumed);
        assert_true(batch <= ramp_batch(&ramp, consumed + (uint64_t)batch));
        consumed += (uint64_t)batch;
    }
    assert_int_equal(ramp_samples(&whole, 7), 7 * 48);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(warmup_is_linear_and_spends_no_step_on_zero),
        cmocka_unit_test(decays_have_the_values_of_their_formulas),
        cmocka_unit_test(wsd_is_stable_and_then_falls),
        cmocka_unit_test(rates_rise_then_fall_without_jumps_between_their_bounds),
        cmocka_unit_test(batches_grow_in_equal_parts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
