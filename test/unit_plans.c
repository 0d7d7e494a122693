// The engine's own schedules, planned: every preset, recomputation, ZeRO stage and number of ranks is placed close to its
// lower bound, and quickly, since the search for a policy plans many times.
#define PRECISION_BF16
#include "kernels/device.cuh"
#include "test/testing.h" // cmocka

// Nothing here runs what is planned, so that gcc finds the planning mode's NULL batch to be the only one.
#pragma GCC diagnostic ignored "-Wnonnull"
#include "fit.cuh"
#include "gpt.cuh"
#include "test/model.h" // config_of_options
#include <omp.h>
#include <time.h> // clock_gettime

// Of this process: others may keep the machine busy.
static double cpu_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

struct quality {
    int plans, above;
    double worst, seconds; // the largest ratio of the activations' arena to its bound; of all plans together
    char worst_options[256];
};

static void plan_options(struct device *dev, const char *options, struct quality *quality) {
    const struct config config = config_of_options(options, "");
    const double begin = cpu_seconds();
    const struct fit f = fit_of(&config, ATTENTION_FLASH, dev);
    struct gpt *m = gpt_create(&config, fit_policy(&f), ATTENTION_FLASH, dev);
    quality->seconds += cpu_seconds() - begin;
    // The other arenas have no gaps; beside them a loss would look small.
    const size_t activations = m->plan.arena_bytes[ARENA_ACTIVATIONS], others = m->plan.peak_bytes - activations;
    const double ratio = (double)activations / (double)(m->plan.lower_bound_bytes - others);
    quality->plans++;
    quality->above += m->plan.peak_bytes > m->plan.lower_bound_bytes;
    if (ratio > quality->worst) {
        quality->worst = ratio;
        snprintf(quality->worst_options, sizeof quality->worst_options, "%s", options);
    }
    gpt_destroy(m);
}

static void every_preset_is_planned_within_2_percent_of_its_bound(void **state) {
    static const char *const policies[] = {
        "none",
        "selective",
        "selective --recompute-modules core_attn,norm,activation,mlp,qkv",
        "full",
        "full --recompute-method uniform --recompute-num-layers 3",
        "full --recompute-method block --recompute-num-layers 3",
        "full --recompute-layers 0-1,3",
    };
    static const int ranks[] = {1, 2, 7, 8, 64, 1024};
    enum { POLICIES = sizeof policies / sizeof *policies, STAGES = 4, RANKS = sizeof ranks / sizeof *ranks };
    struct quality quality = {0, 0, 1, 0, ""};
    struct device dev;
    memset(&dev, 0, sizeof dev);
    dev.threads = 1;
    omp_set_num_threads(1);
    dev.matmul = matmul_create(&dev);
    for (int preset = 0; preset < CONFIG_PRESETS; preset++)
        for (int policy = 0; policy < POLICIES; policy++)
            for (int i = 0; i < RANKS; i++)
                for (int stage = 0; stage < (ranks[i] > 1 ? STAGES : 1); stage++) {
                    char options[256];
                    snprintf(options, sizeof options, "--preset %s --world-size %d --zero-stage %d --recompute-granularity %s",
                             presets[preset].name, ranks[i], stage, policies[policy]);
                    plan_options(&dev, options, &quality);
                }
    // Where the parameters of ZeRO's units, gathered in a chain, outweigh the activations.
    for (int i = 1; i < RANKS; i++)
        for (int policy = 3; policy < POLICIES; policy++) {
            char options[256];
            snprintf(options, sizeof options,
                     "--preset llama3-8b --world-size %d --zero-stage 3 --micro-batch-size 1 --seq-length 2048 "
                     "--recompute-granularity %s",
                     ranks[i], policies[policy]);
            plan_options(&dev, options, &quality);
        }
    matmul_destroy(dev.matmul);
    print_message("%d plans, %d above their bound, activations by %.2f %% at most (%s); %.1f ms a plan\n", quality.plans,
                  quality.above, 100 * (quality.worst - 1), quality.worst_options, 1e3 * quality.seconds / quality.plans);
    assert_true(quality.worst <= 1.02);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_preset_is_planned_within_2_percent_of_its_bound),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
