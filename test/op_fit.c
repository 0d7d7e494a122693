// --recompute-granularity auto on the model: what it chooses fits, is kept in options that plan the same, and takes the
// time that is predicted.
#include <time.h> // clock_gettime

// A clock that other processes' work does not advance: the processor's time of this process, and what it would have slept.
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

#define H200 "--plan-gpu H200 " // one word, and the bus of an H100
#define LLAMA_8B "--preset llama3-8b --seq-length 2048 --micro-batch-size 3 --global-batch-size 255 "
static const double GIB = 0x1p30;

// A choice by options that --plan takes.
struct auto_case {
    struct device dev;
    struct config config;
    struct fit fit;
    struct fit_chosen chosen;
};
static void auto_open(struct auto_case *a, const char *shape, const char *options) {
    memset(a, 0, sizeof *a);
    a->dev.threads = 2;
    a->dev.matmul = matmul_create(&a->dev);
    a->config = config_of_options(shape, options);
    a->fit = fit_of(&a->config, ATTENTION_FLASH, &a->dev);
}
static void auto_choose(struct auto_case *a, size_t device, size_t host) {
    const struct fit_limits limits = {device, host, SIZE_MAX};
    struct fit_rates rates = fit_rates_of(&a->config, &a->dev);
    a->chosen = fit_choose(&a->fit, &a->config, limits, &rates, NULL);
}
static void auto_close(struct auto_case *a) { matmul_destroy(a->dev.matmul); }
static struct fit_bytes auto_bytes(const struct auto_case *a) { return fit_peaks(&a->fit, fit_policy(&a->fit)); }
static double predicted_s(const struct auto_case *a) {
    const struct fit_rates rates = fit_rates_of(&a->config, a->fit.dev);
    struct gpt *m = gpt_create(&a->config, fit_policy(&a->fit), ATTENTION_FLASH, a->fit.dev);
    const struct fit_time time = fit_predict(m, &rates);
    gpt_destroy(m);
    return time.step_s;
}

#define AUTO "--recompute-granularity auto --memory-budget 1GiB " // which the tests' limits replace

// With and without room in the host's memory: what is chosen fits, and a larger budget never costs time.
static void a_choice_fits_and_more_memory_never_costs_time(void **state) {
    struct auto_case a;
    auto_open(&a, "--preset gpt2-124m", "");
    const struct fit_bytes most = fit_peaks(&a.fit, policy_none(12)), least = fit_peaks(&a.fit, policy_uniform(12, 1));
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
            assert_true(a.config.recompute_granularity != RECOMPUTE_AUTO);
            assert_true(a.config.main_grads_dtype == MAIN_FP32 && a.config.exp_avg_dtype == MOMENT_FP32);
            if (!(seconds <= 1.005 * before))
                fail_msg("%zu bytes: %g s, with fewer bytes %g s", device, seconds, before);
            before = seconds < before ? seconds : before;
            auto_close(&a);
        }
        assert_true(a.config.recompute_granularity == RECOMPUTE_NONE && !a.config.optimizer_cpu_offload);
    }
}

static double cpu_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// 6 bytes a parameter on the device, the states on the host: 1.5 s of a step of half a million tokens.
static void llama3_8b_fits_80_gb_with_its_states_on_the_host(void **state) {
    struct auto_case a;
    auto_open(&a, LLAMA_8B, H200 AUTO);
    const double begin = cpu_s();
    auto_choose(&a, (size_t)(78.5 * GIB), (size_t)(100 * GIB));
    const double search_s = cpu_s() - begin;
    print_message("%s\n%d plans, %.2f s\n", a.chosen.best[0], a.chosen.plans, search_s);
    if (sizeof(floatX) == 2) {
        assert_true(a.config.recompute_granularity == RECOMPUTE_NONE && a.config.optimizer_cpu_offload);
        assert_true(!a.config.offload_gradients && !a.config.offload_weights);
    }
    assert_true(a.chosen.count > 1 && a.chosen.plans <= 120);
    assert_true(!a.config.checkpoint_async); // whose copy would take the host's memory too
    auto_close(&a);
}

// What the user gave stays as it is, and the rest is chosen around it.
static void options_that_were_given_stay(void **state) {
    struct auto_case a;
    auto_open(&a, "--preset gpt2-124m",
              AUTO "--no-optimizer-cpu-offload --cpu-offloading-num-layers 3 --offload-gradients --exp-avg-dtype bf16 "
                   "--allow-lossy-states");
    auto_choose(&a, (size_t)(1.9 * GIB), SIZE_MAX);
    assert_true(!a.config.optimizer_cpu_offload && a.config.cpu_offloading_num_layers == 3);
    assert_true(a.config.offload_gradients && a.config.exp_avg_dtype == MOMENT_BF16);
    auto_close(&a);
    auto_open(&a, "--preset gpt2-124m", AUTO "--optimizer-cpu-offload --optimizer-offload-fraction 0.333");
    auto_choose(&a, (size_t)(1.9 * GIB), SIZE_MAX); // which is no whole percentage
    assert_true(a.config.optimizer_cpu_offload && a.config.optimizer_offload_fraction == 0.333);
    auto_close(&a);
}

// Options as text, as config.json has them, plan what was chosen.
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
// Too little of the host's memory for anything: batches lie there too.
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
// The fastest steps of two models so far, in turns, after a first one.
static void measure_steps(struct setup *a, struct setup *b, double *a_s, double *b_s) {
    for (int step = 0; step < 5; step++) {
        const double a_took = step_s(a, step), b_took = step_s(b, step);
        *a_s = step > 0 && a_took < *a_s ? a_took : *a_s;
        *b_s = step > 0 && b_took < *b_s ? b_took : *b_s;
    }
}
// The relative error of a step's prediction, by rates at which one without offload takes as long as it did.
static double prediction_error(struct setup *none, struct setup *s, const char *options, double none_s, double took_s) {
    struct fit_rates rates = {100e9, 100e9 / fit_flops_per_byte(s->dev), 1e9 * s->config.bus_gbps, ""};
    const double factor = fit_predict(none->model, &rates).step_s / none_s;
    rates.flops *= factor;
    rates.traffic *= factor;
    const double predicted = fit_predict(s->model, &rates).step_s;
    print_message("%-100s predicted %7.1f ms, measured %7.1f ms, %+5.1f %%\n", options, 1e3 * predicted, 1e3 * took_s,
                  100 * (predicted / took_s - 1));
    return fabs(predicted / took_s - 1);
}
static void steps_over_a_slow_bus_take_the_predicted_time(void **state) {
    enum { ROUNDS = 12 }; // at most: other work on the machine takes room in caches, so that the fastest steps count
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
    omp_set_num_threads(1); // one thread, whose processor time is the process's
    struct setup none = setup_of(TIMED, "");
    // In fp32, whose steps take longer, every other: the prediction is the same code. Every third in the short run: what an
    // optimizer's states, activations and weights take.
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
        cmocka_unit_test(llama3_8b_fits_80_gb_with_its_states_on_the_host),
        cmocka_unit_test(options_that_were_given_stay),
        cmocka_unit_test(what_is_kept_plans_the_same),
        cmocka_unit_test(budgets_that_nothing_meets_name_the_nearest),
        cmocka_unit_test(steps_over_a_slow_bus_take_the_predicted_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
