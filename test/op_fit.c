// --recompute-granularity auto on the model: what it chooses fits, is kept in options that plan the same, and takes the
// predicted time.
#include <time.h> // clock_gettime

// What a clock shows beside this process's CPU time: the time that it would have slept. So other processes do not
// advance the clock.
static double slept_s;
static inline double work_clock_s(void) {
    struct timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec + slept_s;
}
static inline void work_sleep_until(double at_s) {
    const double left_s = at_s - work_clock_s();
    slept_s += left_s > 0 ? left_s : 0;
}
#define TRANSFER_CLOCK_S work_clock_s
#define TRANSFER_SLEEP_UNTIL work_sleep_until
#include "test/model.h" // before gpt.cuh, which it looks into

#include "run/fit_auto.cuh"
#include "test/fails.h" // assert_fails
#include "test/setup.h" // setup_of

#define H200 "--plan-gpu H200 " // one word; and an H100's bus
#define LLAMA_8B "--preset llama3-8b --seq-length 2048 --micro-batch-size 3 --global-batch-size 255 "
static const double GIB = 0x1p30;

// A choice that auto makes, for options that --plan takes.
struct auto_case {
    struct device dev;
    struct config config;
    struct fit fit;
    struct fit_chosen chosen;
};
static void auto_open(struct auto_case *a, const char *shape, const char *options) {
    memset(a, 0, sizeof *a);
    a->dev.threads = 2;
    a->config = config_of_options(shape, options);
    a->dev.planned = planned_capability(&a->config);
    a->dev.matmul = matmul_create(&a->dev);
    a->fit = fit_of(&a->config, ATTENTION_FLASH, &a->dev);
}
static void auto_choose(struct auto_case *a, size_t device, size_t host) {
    const struct fit_limits limits = {device, host, SIZE_MAX};
    struct fit_rates rates = fit_rates_of(&a->config, SIZE_MAX, &a->dev);
    a->chosen = fit_choose(&a->fit, &a->config, limits, &rates, NULL);
}
static void auto_close(struct auto_case *a) { matmul_destroy(a->dev.matmul); }
static struct fit_bytes auto_bytes(const struct auto_case *a) { return fit_peaks(&a->fit, fit_policy(&a->fit)); }
static double predicted_s(const struct auto_case *a) {
    const struct fit_rates rates = fit_rates_of(&a->config, SIZE_MAX, a->fit.dev);
    struct gpt *m = gpt_create(&a->config, fit_policy(&a->fit), ATTENTION_FLASH, a->fit.dev);
    const struct fit_time time = fit_predict(m, &rates);
    gpt_destroy(m);
    return time.step_s;
}

#define AUTO "--recompute-granularity auto --memory-budget 1GiB " // the tests replace the budget

// Checks, with and without room in the host's memory, that a choice fits, and that a larger budget never costs time.
static void a_choice_fits_and_more_memory_never_costs_time(void **state) {
    struct auto_case a;
    auto_open(&a, "--preset gpt2-124m", "");
    const struct fit_bytes most = fit_peaks(&a.fit, policy_keep_all(12)),
                           least = fit_peaks(&a.fit, policy_uniform(12, 1));
    auto_close(&a);
    for (int room = 0; room < 2; room++) {
        const size_t host = room ? (size_t)8 << 30 : most.host;
        double before = INFINITY;
        for (int i = 0; i <= 6; i++) {
            const size_t device = least.device + (most.device - least.device) / 6 * (size_t)i + (i == 6 ? 64 : 0);
            auto_open(&a, "--preset gpt2-124m", AUTO);
            auto_choose(&a, device, host);
            const struct fit_bytes bytes = auto_bytes(&a);
            const double seconds = predicted_s(&a);
            assert_true(bytes.device <= device && bytes.host <= host);
            assert_true(a.config.recompute.recompute_granularity != RECOMPUTE_AUTO);
            assert_true(a.config.states.main_grads_dtype == MAIN_FP32 && a.config.states.exp_avg_dtype == MOMENT_FP32);
            if (!(seconds <= (1 + 1e-7) * before))
                fail_msg("%zu bytes: %g s, with fewer bytes %g s", device, seconds, before);
            before = seconds < before ? seconds : before;
            auto_close(&a);
        }
        assert_true(a.config.recompute.recompute_granularity == RECOMPUTE_NONE &&
                    !a.config.states.optimizer_cpu_offload);
    }
}

// Draws a model, a batch and a card, and writes their options (n bytes).
static void random_case(char *options, size_t n, uint64_t *random) {
    static const char *const shapes[] = {
        "--preset gpt2-124m --seq-length 512 ",
        "--preset smollm2-135m --seq-length 1024 ",
        "--preset gemma3-270m --seq-length 512 ",
        "--preset qwen3-0.6b --seq-length 2048 ",
        "--vocab-size 3000 --num-layers 9 --hidden-size 768 --num-attention-heads 6 --seq-length 333 ",
        "--vocab-size 70000 --num-layers 3 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024 ",
    };
    static const char *const cards[] = {"--plan-gpu H200 ", "--plan-gpu H200 --bus-gbps 12 ",
                                        "--plan-gpu L40S ", "--plan-gpu A100-SXM4-40GB --bus-gbps 3 ",
                                        "--plan-gpu L4 ",   ""};
    const int batch = 1 << test_random(random) % 4, micro_steps = 1 << test_random(random) % 4;
    snprintf(options, n, "%s%s--micro-batch-size %d --global-batch-size %d " AUTO,
             shapes[test_random(random) % (sizeof shapes / sizeof *shapes)],
             cards[test_random(random) % (sizeof cards / sizeof *cards)], batch, batch * micro_steps);
}
static double random_up_to(uint64_t *random, double most) {
    return floor(most * (double)(test_random(random) % 100001) / 100000);
}
// Lets the budgets of the device's and the host's memory grow in turn, by random steps.
static void grow_budgets(struct fit_auto *a, const char *options, uint64_t *random) {
    const struct fit_choice nothing = {0, 0, 0, 0, 0, 0};
    const struct fit_outcome most = fit_plan_choice(a, &nothing, true);
    double before = INFINITY;
    a->space.device = 0.2 * most.device + random_up_to(random, 0.6 * most.device);
    a->space.host = random_up_to(random, 0.8 * most.device);
    for (int k = 0; k < 6; k++) {
        const struct fit_found found = fit_search(&a->space, FIT_SECONDS, 0);
        if (found.count > 0) {
            const struct fit_outcome *o = &found.outcome[0];
            assert_true(o->device <= a->space.device && o->host <= a->space.host);
        }
        const double seconds = found.count > 0 ? found.outcome[0].seconds : INFINITY;
        if (seconds > before * (1 + 1e-7))
            fail_msg("%s: %.0f bytes of the device and %.0f of the host: %g s, with less memory %g s", options,
                     a->space.device, a->space.host, seconds, before);
        before = seconds;
        *(k % 2 ? &a->space.device : &a->space.host) *= 1 + random_up_to(random, 1000) / 5000;
    }
}
// Checks the least budget of one memory, where the other one's budget stays: it fits, and a byte less does not.
static void check_least(struct fit_auto *a, const char *options, enum fit_objective objective) {
    double *limit = objective == FIT_DEVICE ? &a->space.device : &a->space.host, was = *limit;
    const struct fit_found least = fit_search(&a->space, objective, 0);
    if (least.count == 0)
        return;
    *limit = objective == FIT_DEVICE ? least.outcome[0].device : least.outcome[0].host;
    const int fits = fit_search(&a->space, FIT_SECONDS, 0).count;
    *limit -= 1;
    const int fits_less = fit_search(&a->space, FIT_SECONDS, 0).count;
    if (fits == 0 || fits_less > 0)
        fail_msg("%s: of the %s %.0f bytes are named, %s", options, objective == FIT_DEVICE ? "device" : "host",
                 *limit + 1, fits == 0 ? "which do not fit" : "and a byte less fits");
    *limit = was;
}
// Checks what the search relies on: the time that it estimates for a choice, with and without the plans of its group,
// is less than the time of the choice's plan.
static void check_estimates(const struct fit_auto *a, const char *options, uint64_t *random) {
    static struct fit_queue q;
    memset(&q, 0, sizeof q);
    q.space = &a->space;
    for (int k = 0; k < a->space.kinds; k++)
        fit_plan_group(&q, FIT_GROUP_PLAIN, k);
    for (int i = 0; i < 6; i++) {
        struct fit_node n;
        memset(&n, 0, sizeof n);
        n.c.recompute = (int)random_up_to(random, a->space.most.recompute);
        n.c.layers = (int)random_up_to(random, a->space.most.layers);
        n.c.percent = (int)random_up_to(random, 100);
        n.c.gradients = (int)(test_random(random) % 2);
        n.c.weights = (int)(test_random(random) % 2);
        const struct fit_outcome o = fit_plan_choice(a->space.context, &n.c, false);
        for (int known = FIT_BY_FORMULA; known <= FIT_BY_GROUP; known++) {
            n.known = (enum fit_known)known;
            const struct fit_outcome e = fit_estimate(&q, &n);
            if (e.seconds > o.seconds * (1 + 1e-9))
                fail_msg(
                    "%s: recompute %d, %d layers, %d %%, gradients %d, weights %d, known %d: estimated %g s, planned %g",
                    options, n.c.recompute, n.c.layers, n.c.percent, n.c.gradients, n.c.weights, known, e.seconds,
                    o.seconds);
            fit_plan_groups_of(&q, &n.c);
        }
    }
}
static void budgets_of_random_cases_are_kept(void **state) {
    const struct fit_limits none = {SIZE_MAX, SIZE_MAX, SIZE_MAX};
    const int cases = in_long_run() ? 200 : 8;
    uint64_t random = 1;
    for (int i = 0; i < cases; i++) {
        struct auto_case c;
        char options[512];
        random_case(options, sizeof options, &random);
        auto_open(&c, options, "");
        const struct fit_rates rates = fit_rates_of(&c.config, SIZE_MAX, &c.dev);
        struct fit_auto *a = fit_auto_open(&c.fit, &rates, none);
        check_estimates(a, options, &random);
        grow_budgets(a, options, &random);
        a->space.device *= 0.5;
        a->space.host *= 0.5;
        check_least(a, options, FIT_DEVICE);
        check_least(a, options, FIT_HOST);
        fit_auto_close(a);
        auto_close(&c);
    }
}

static double cpu_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// Checks that Llama 3 8B fits into 80 GB: 6 bytes a parameter on the device, the states on the host, which costs 1.5 s
// of a step of half a million tokens.
static void llama3_8b_fits_80_gb_with_its_states_on_the_host(void **state) {
    struct auto_case a;
    auto_open(&a, LLAMA_8B, H200 AUTO);
    const double begin = cpu_s();
    auto_choose(&a, (size_t)(78.5 * GIB), (size_t)(100 * GIB));
    const double search_s = cpu_s() - begin;
    print_message("%s\n%d plans, %.2f s\n", a.chosen.best[0], a.chosen.plans, search_s);
    if (sizeof(floatX) == 2) {
        assert_true(a.config.recompute.recompute_granularity != RECOMPUTE_FULL &&
                    a.config.states.optimizer_cpu_offload);
        assert_true(!a.config.states.offload_gradients && !a.config.states.offload_weights);
    }
    assert_true(a.chosen.count > 0 && a.chosen.plans <= 250);
    assert_true(!a.config.checkpoints.checkpoint_async); // whose copy would take the host's memory too
    auto_close(&a);
}

// Checks that options that the user gave stay, and that the rest is chosen accordingly.
static void options_that_were_given_stay(void **state) {
    struct auto_case a;
    auto_open(&a, "--preset gpt2-124m",
              AUTO "--no-optimizer-cpu-offload --cpu-offloading-num-layers 3 --offload-gradients --exp-avg-dtype bf16 "
                   "--allow-lossy-states");
    auto_choose(&a, (size_t)(1.9 * GIB), SIZE_MAX);
    assert_true(!a.config.states.optimizer_cpu_offload && a.config.states.cpu_offloading_num_layers == 3);
    assert_true(a.config.states.offload_gradients && a.config.states.exp_avg_dtype == MOMENT_BF16);
    auto_close(&a);
    auto_open(&a, "--preset gpt2-124m", AUTO "--optimizer-cpu-offload --optimizer-offload-fraction 0.333");
    auto_choose(&a, (size_t)(1.9 * GIB), SIZE_MAX); // no whole percentage
    assert_true(a.config.states.optimizer_cpu_offload && a.config.states.optimizer_offload_fraction == 0.333);
    auto_close(&a);
    // Without --optimizer-cpu-offload the fraction has no use: auto chooses as if it were not given.
    static const char *const options[] = {AUTO, AUTO "--optimizer-offload-fraction 1"};
    double fractions[2];
    for (int i = 0; i < 2; i++) {
        auto_open(&a, "--preset gpt2-124m", options[i]);
        auto_choose(&a, (size_t)(2.2 * GIB), SIZE_MAX);
        fractions[i] = a.config.states.optimizer_cpu_offload ? a.config.states.optimizer_offload_fraction : 0;
        auto_close(&a);
    }
    assert_true(fractions[0] > 0 && fractions[0] < 1);
    assert_true(fractions[1] == fractions[0]);
}

// Checks that the options in config.json plan what was chosen.
static void what_is_kept_plans_the_same(void **state) {
    static const double budgets[] = {1.2, 1.6, 2.0, 2.4, 2.8};
    for (size_t i = 0; i < sizeof budgets / sizeof *budgets; i++)
        for (int lossy = 0; lossy < 2; lossy++) {
            static const char *const kept[] = {"recompute_granularity",
                                               "recompute_layer_modules",
                                               "main_params_dtype",
                                               "main_grads_dtype",
                                               "exp_avg_dtype",
                                               "exp_avg_sq_dtype",
                                               "optimizer_cpu_offload",
                                               "optimizer_offload_fraction",
                                               "cpu_offloading_num_layers",
                                               "offload_gradients",
                                               "offload_weights",
                                               "checkpoint_async"};
            char options[1024] = "", text[OPTION_TEXT], value[OPTION_TEXT + OPTION_NAME];
            struct auto_case a, b;
            auto_open(&a, "--preset gpt2-124m", lossy ? AUTO "--allow-lossy-states" : AUTO);
            auto_choose(&a, (size_t)(budgets[i] * GIB), (size_t)(1.3 * GIB));
            for (size_t k = 0; k < sizeof kept / sizeof *kept; k++) {
                const int row = option_find(&config_options, kept[k], false);
                const char *is = option_text(text, &config_rows[row], &a.config);
                snprintf(value, sizeof value, "--%s=%s ", config_rows[row].name, is);
                if (*is)
                    strncat(options, value, sizeof options - strlen(options) - 1);
            }
            auto_open(&b, "--preset gpt2-124m", options);
            const struct fit_bytes chosen = auto_bytes(&a), again = auto_bytes(&b);
            if (chosen.device != again.device || chosen.host != again.host)
                fail_msg("%s: plans %zu and %zu bytes, not %zu and %zu", options, again.device, again.host,
                         chosen.device, chosen.host);
            auto_close(&a);
            auto_close(&b);
        }
}

static void choose_too_little(void *unused) {
    struct auto_case a;
    auto_open(&a, "--preset gpt2-124m", AUTO);
    auto_choose(&a, 200 << 20, 64 << 20);
}
// Chooses with too little of the host's memory for anything: batches lie there too.
static void choose_far_too_little(void *unused) {
    struct auto_case a;
    auto_open(&a, "--preset gpt2-124m", AUTO);
    auto_choose(&a, 200 << 20, 100);
}
static void budgets_that_nothing_meets_name_the_nearest(void **state) {
    assert_fails(choose_too_little, NULL, "200.00 MiB|64.00 MiB|the least is --memory-budget|--micro-batch-size");
    assert_fails(choose_far_too_little, NULL, "100 B|the least is --memory-budget|with --host-memory-budget");
}

// ---- prediction and measurement ----

#define TIMED                                                                                                          \
    "--vocab-size 1000 --micro-batch-size 4 --global-batch-size 8 --seq-length 128 --num-layers 4 --hidden-size 256 "  \
    "--num-attention-heads 4 --bus-gbps 0.25 "

static double step_s(struct setup *s, int step) {
    const double begin = work_clock_s();
    for (int i = 0; i < 2; i++)
        setup_micro_step(s, i, 0.5);
    gpt_update(s->model, step + 1, 1e-3);
    device_synchronize(s->model->dev);
    return work_clock_s() - begin;
}
// Measures the fastest step so far of two models, in turns, after a first step of each.
static void measure_steps(struct setup *a, struct setup *b, double *a_s, double *b_s) {
    for (int step = 0; step < 5; step++) {
        const double a_took = step_s(a, step), b_took = step_s(b, step);
        *a_s = step > 0 && a_took < *a_s ? a_took : *a_s;
        *b_s = step > 0 && b_took < *b_s ? b_took : *b_s;
    }
}
// Returns the relative error of a step's predicted time, by rates at which the step without offload takes as long as it
// did.
static double prediction_error(struct setup *none, struct setup *s, const char *options, double none_s, double took_s) {
    struct fit_rates rates = {100e9, 100e9 / fit_flops_per_byte(s->dev), 1e9 * s->config.states.bus_gbps, 1, ""};
    const double factor = fit_predict(none->model, &rates).step_s / none_s;
    rates.flops *= factor;
    rates.traffic *= factor;
    const double predicted = fit_predict(s->model, &rates).step_s;
    print_message("%-100s predicted %7.1f ms, measured %7.1f ms, %+5.1f %%\n", options, 1e3 * predicted, 1e3 * took_s,
                  100 * (predicted / took_s - 1));
    return fabs(predicted / took_s - 1);
}
static void steps_over_a_slow_bus_take_the_predicted_time(void **state) {
#ifdef TARGET_CUDA
    skip(); // a GPU's bus has a rate of its own, whatever --bus-gbps says, and an emulated one none
#endif
    if (UNDER_ADDRESS_SANITIZER) // to which most of a step's time goes; op_offload and op_zero see the same code
        skip();
    if (test_slowness() > 1) // under an emulator of a CPU a step takes 100 s
        skip();
    enum { ROUNDS = 12 }; // at most; the fastest steps count, since other work on the machine takes room in caches
    static const char *const cases[] = {
        "--optimizer-cpu-offload",
        "--optimizer-cpu-offload --optimizer-offload-fraction 0.4",
        "--cpu-offloading-num-layers 3",
        "--cpu-offloading-num-layers 3 --recompute-granularity full",
        "--cpu-offloading-num-layers 3 --optimizer-cpu-offload",
        "--offload-gradients",
        "--offload-weights",
        "--optimizer-cpu-offload --offload-gradients --offload-weights --cpu-offloading-num-layers 3",
    };
    omp_set_num_threads(1); // one thread, so that its CPU time is the process's
    struct setup none = setup_of(TIMED, "");
    // Every second case in fp32, whose steps take longer: the prediction is the same code. Every third in the short
    // run: the optimizer's states, activations and weights each occur.
    const size_t every = sizeof(floatX) / 2 * (in_long_run() ? 1 : 3);
    for (size_t i = sizeof(floatX) == 4; i < sizeof cases / sizeof *cases; i += every) {
        struct setup s = setup_of(TIMED, cases[i]);
        double none_s = INFINITY, took_s = INFINITY, error = INFINITY;
        for (int round = 0; round < ROUNDS && error > 0.15; round++) {
            measure_steps(&none, &s, &none_s, &took_s);
            error = prediction_error(&none, &s, cases[i], none_s, took_s);
        }
        if (!(error <= 0.15))
            fail_msg("%s: the prediction is off by %.1f %%", cases[i], 100 * error);
        setup_free(&s);
    }
    setup_free(&none);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_choice_fits_and_more_memory_never_costs_time),
        cmocka_unit_test(budgets_of_random_cases_are_kept),
        cmocka_unit_test(llama3_8b_fits_80_gb_with_its_states_on_the_host),
        cmocka_unit_test(options_that_were_given_stay),
        cmocka_unit_test(what_is_kept_plans_the_same),
        cmocka_unit_test(budgets_that_nothing_meets_name_the_nearest),
        cmocka_unit_test(steps_over_a_slow_bus_take_the_predicted_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
