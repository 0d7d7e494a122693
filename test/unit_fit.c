// The search for what fits, on made-up spaces whose best choice is known, since every choice is tried.
#include "run/fit_search.cuh"
#include "test/testing.h" // cmocka, test_random

// A made-up model. It is linear, as the search estimates it, except for a constant that the search does not know,
// buffers that some kinds of offload need, more time for a group, and gaps of placement that grow and shrink from
// choice to choice.
struct made {
    struct fit_space space;
    double constant, staging, gap;
    int plans;
};
static const double MB = 1e6;
static struct fit_outcome made_plan(void *context, const struct fit_choice *c, bool placed) {
    struct made *made = (struct made *)context;
    const struct fit_space *s = &made->space;
    const struct fit_estimate e = fit_formula(s, c);
    struct fit_outcome o = {e.device, e.host,
                            s->micro_steps * e.micro_step_s * (1.01 + 0.03 * c->weights) + e.update_s};
    made->plans++;
    o.device += made->constant + made->staging * (c->gradients + c->weights + (c->layers > 0));
    if (placed)
        o.device += made->gap * ((c->recompute * 7 + c->layers * 3 + (c->percent > 0)) % 5) / 5;
    o.device = ceil(o.device);
    o.host = ceil(o.host);
    return o;
}
static struct made made_of(uint64_t *random) {
    struct made made;
    struct fit_space *s = &made.space;
    memset(&made, 0, sizeof made);
    s->num_layers = 2 + (int)(test_random(random) % 7);
    s->kinds = 3;
    for (int k = 0; k < s->kinds; k++) {
        s->kept_bytes[k] = 100.0 * MB / (1 + 2 * k);
        s->recompute_s[k] = 0.02 * k * k;
    }
    s->forward_s = 0.1;
    s->backward_s = 0.2;
    s->head_s = 0.05;
    s->outside = 0.1 * (double)(test_random(random) % 5);
    s->tied = test_random(random) % 2;
    s->weights_bytes = s->updated_bytes = 200 * MB;
    for (int i = 0; i < 3; i++) {
        s->gradients_bytes[i] = (i > 1 ? 200 : 400) * MB;
        for (int percent = 0; percent < FIT_PERCENTAGES; percent++)
            s->states_bytes[i][percent] = (i > 0 ? 600 : 1000) * MB * percent / 100;
        s->update_s[i] = i > 0 ? 0.07 : 0.1;
    }
    s->bus.bytes_s = 100 * MB * (1 + (double)(test_random(random) % 40));
    s->bus.copy_s = test_random(random) % 4 ? 0 : 1e-10;
    s->bus.piece_bytes = 10 * MB;
    s->micro_steps = 1 + (double)(test_random(random) % 4);
    s->most.recompute = (s->kinds - 1) * s->num_layers;
    s->most.layers = s->num_layers - 1;
    s->most.percent = 100;
    s->most.gradients = s->most.weights = 1;
    made.constant = 50 * MB;
    made.staging = 20 * MB;
    made.gap = (test_random(random) % 5 ? 4 : 40) * MB;
    s->device = (400 + (double)(test_random(random) % 1600)) * MB;
    s->host = test_random(random) % 3 ? (200 + (double)(test_random(random) % 1800)) * MB : INFINITY;
    s->both = test_random(random) % 4 ? INFINITY : (1700 + (double)(test_random(random) % 600)) * MB;
    s->plan = made_plan;
    return made;
}

// Returns the best value of all choices that fit; INFINITY: none fits.
static double best_of_all(struct made *made, enum fit_objective objective, int formats_most) {
    struct fit_space *s = &made->space;
    struct fit_choice c;
    double best = INFINITY;
    memset(&c, 0, sizeof c);
    for (c.formats = s->least.formats; c.formats <= formats_most; c.formats++)
        for (c.gradients = s->least.gradients; c.gradients <= s->most.gradients; c.gradients++)
            for (c.weights = s->least.weights; c.weights <= s->most.weights; c.weights++)
                for (c.layers = s->least.layers; c.layers <= s->most.layers; c.layers++)
                    for (c.percent = s->least.percent; c.percent <= s->most.percent; c.percent++)
                        for (c.recompute = 0; c.recompute <= s->most.recompute; c.recompute++) {
                            const struct fit_outcome o = made_plan(made, &c, true);
                            const double value = fit_value(&c, &o, objective);
                            if (fit_meets_limits(s, &o, objective) && value < best)
                                best = value;
                        }
    return best;
}

static void the_search_finds_the_best_of_all_choices(void **state) {
    uint64_t random = 7;
    int found_some = 0, found_none = 0, most_plans = 0;
    for (int i = 0; i < 150; i++) {
        struct made made = made_of(&random);
        made.space.most.formats = i % 3 == 0 ? 2 : 0;
        made.space.context = &made;
        const struct fit_found found = fit_search(&made.space, FIT_SECONDS, 3);
        assert_true(found.plans == made.plans);
        most_plans = found.plans > most_plans ? found.plans : most_plans;
        const double best = best_of_all(&made, FIT_SECONDS, made.space.most.formats),
                     value = found.count == 0 ? INFINITY : fit_value(&found.best[0], &found.outcome[0], FIT_SECONDS);
        if (value != best)
            fail_msg("space %d: found %g s, but %g s fits (%d plans)", i, value, best, found.plans);
        found_some += found.count > 0;
        found_none += found.count == 0;
        for (int k = 0; k < found.count; k++) {
            const struct fit_outcome *o = &found.outcome[k], planned = made_plan(&made, &found.best[k], true);
            assert_true(o->device == planned.device && o->host == planned.host);
            assert_true(fit_meets_limits(&made.space, o, FIT_SECONDS));
        }
    }
    print_message("%d spaces with a choice that fits, %d without; at most %d plans\n", found_some, found_none,
                  most_plans);
    assert_true(found_some > 50 && found_none > 5 && most_plans < 300);
}

static void where_all_fits_nothing_is_recomputed_or_offloaded_or_lossy(void **state) {
    uint64_t random = 3;
    struct made made = made_of(&random);
    made.space.context = &made;
    made.space.device = made.space.host = made.space.both = 1e6 * MB;
    made.space.most.formats = 2;
    made.space.update_s[1] = made.space.update_s[2] = 0.999 * made.space.update_s[0]; // less than a format must gain
    const struct fit_found found = fit_search(&made.space, FIT_SECONDS, 3);
    const struct fit_choice nothing = {0, 0, 0, 0, 0, 0};
    assert_true(found.count > 0 && memcmp(&found.best[0], &nothing, sizeof nothing) == 0);
}

static void what_was_asked_for_stays(void **state) {
    uint64_t random = 11;
    for (int i = 0; i < 40; i++) {
        struct made made = made_of(&random);
        made.space.context = &made;
        made.space.host = made.space.both = INFINITY;
        made.space.least.layers = made.space.most.layers = 1;
        made.space.least.percent = made.space.most.percent = 37;
        made.space.least.gradients = 1;
        made.space.most.weights = 0;
        const struct fit_found found = fit_search(&made.space, FIT_SECONDS, 3);
        for (int k = 0; k < found.count; k++) {
            const struct fit_choice *c = &found.best[k];
            assert_true(c->layers == 1 && c->percent == 37 && c->gradients == 1 && c->weights == 0 && c->formats == 0);
        }
        assert_true((found.count > 0) == (best_of_all(&made, FIT_SECONDS, 0) < INFINITY));
    }
}

static void the_least_needs_are_those_of_all_choices(void **state) {
    uint64_t random = 5;
    for (int i = 0; i < 40; i++)
        for (int o = 0; o < 2; o++) {
            const enum fit_objective objective = o ? FIT_DEVICE : FIT_HOST;
            struct made made = made_of(&random);
            made.space.context = &made;
            made.space.both = INFINITY;
            const struct fit_found found = fit_search(&made.space, objective, 0);
            const double best = best_of_all(&made, objective, 0);
            assert_true((found.count > 0) == (best < INFINITY));
            if (found.count == 0)
                continue;
            assert_true(fit_value(&found.best[0], &found.outcome[0], objective) == best);
            // With this much a step fits, and with a byte less none does.
            double *limit = o ? &made.space.device : &made.space.host;
            *limit = best;
            assert_true(fit_search(&made.space, FIT_SECONDS, 3).count > 0);
            *limit = best - 1;
            assert_true(fit_search(&made.space, FIT_SECONDS, 3).count == 0);
        }
}

// Checks budgets that grow by random shares, the device's and the host's in turn.
static void more_memory_never_costs_time(void **state) {
    uint64_t random = 13;
    for (int i = 0; i < 60; i++) {
        struct made made = made_of(&random);
        double before = INFINITY;
        made.space.context = &made;
        made.space.both = INFINITY;
        made.space.host = 300 * MB;
        for (int k = 0; k < 12; k++) {
            const struct fit_found found = fit_search(&made.space, FIT_SECONDS, 3);
            const double seconds = found.count > 0 ? found.outcome[0].seconds : INFINITY;
            if (seconds > before * (1 + 1e-7))
                fail_msg("space %d: %g s, with less memory %g s", i, seconds, before);
            before = seconds;
            *(k % 2 ? &made.space.device : &made.space.host) *= 1 + 0.001 * (double)(test_random(&random) % 200);
        }
    }
}

static void a_format_that_would_help_is_named(void **state) {
    uint64_t random = 3;
    struct made made = made_of(&random);
    made.space.context = &made;
    made.space.host = made.space.both = INFINITY;
    made.space.device = 1200 * MB;
    made.space.bus.bytes_s = 100 * MB;
    const struct fit_found found = fit_search(&made.space, FIT_SECONDS, 3);
    assert_true(found.count > 0 && found.best[0].formats == 0 && found.gain.formats > 0);
    assert_true(found.gain_estimate.seconds < found.outcome[0].seconds);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_search_finds_the_best_of_all_choices),
        cmocka_unit_test(where_all_fits_nothing_is_recomputed_or_offloaded_or_lossy),
        cmocka_unit_test(what_was_asked_for_stays),
        cmocka_unit_test(the_least_needs_are_those_of_all_choices),
        cmocka_unit_test(more_memory_never_costs_time),
        cmocka_unit_test(a_format_that_would_help_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
