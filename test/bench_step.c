// Measures the speed and memory of whole training steps: tokens a second, a step against only its own matmuls,
// recomputation policies and attention backends against no recomputation and flash, the plan against what the process
// holds.
//
//     bench_step [--json FILE] [--rounds N] [options of train_gpt]       (without options: gpt2-124m, B4 T1024)
//
// Whatever is compared runs in turn, round after round, in one process; figures are medians.
#include <stdbool.h> // bool
#include <stddef.h>  // NULL

// How ops run: only the matmuls, or all, with the time of each phase.
static bool matmuls_only;
static double *phase_seconds; // (phases); NULL: not measured
#define TIMELINE_ON_PHASE(t) ((void)(t))
#define TIMELINE_IS_WATCHED (matmuls_only || phase_seconds)
#define TIMELINE_EXECUTE(t, is_matmul, op)                                                                             \
    do {                                                                                                               \
        if ((is_matmul) || !matmuls_only) {                                                                            \
            const double begin_ = phase_seconds ? seconds_now() : 0;                                                   \
            op;                                                                                                        \
            if (phase_seconds) {                                                                                       \
                device_synchronize((t)->dev);                                                                          \
                phase_seconds[(t)->phase] += seconds_now() - begin_;                                                   \
            }                                                                                                          \
        }                                                                                                              \
    } while (0)
#include "config/resolve.h"
#include "run/fit.cuh"
#include "run/model.cuh"
#include "run/utilization.cuh"
#include "runtime/sort.h" // compare_doubles
#include <omp.h>
#include <stdio.h>

enum { MAX_SAMPLES = 64, MAX_CASES = 8, STEPS_A_ROUND = 2 };

struct samples {
    double ms[MAX_SAMPLES];
    int n;
};
static void sample_add(struct samples *s, double ms) {
    if (s->n < MAX_SAMPLES)
        s->ms[s->n++] = ms;
}
static double median(struct samples s) {
    qsort(s.ms, (size_t)s.n, sizeof *s.ms, compare_doubles);
    return s.n == 0 ? 0 : s.n % 2 ? s.ms[s.n / 2] : (s.ms[s.n / 2 - 1] + s.ms[s.n / 2]) / 2;
}

struct bench_case {
    const char *name;
    enum attention_backend backend;
    char policy[256];
    size_t plan_bytes, arena_bytes, resident_bytes;
    double activation_bytes_per_token_layer;
    struct samples step, matmuls;
};

struct bench {
    struct config config;
    struct device dev;
    int32_t *inputs, *targets;
    struct bench_case cases[MAX_CASES];
    int num_cases;
};

static struct recompute_policy case_policy(const struct bench *b, int which, const struct layer_shape *s) {
    const int L = b->config.model.num_layers;
    switch (which) {
    case 1: return policy_selective(L, MODULE_NORM | MODULE_ACTIVATION, s);
    case 2: return policy_uniform(L, 1);
    default: return policy_keep_all(L);
    }
}

static double one_step(const struct bench *b, struct gpt *m, int64_t step) {
    const double begin = seconds_now();
    gpt_micro_step(m, 0, batch_of(b->inputs, b->targets), 1);
    if (!matmuls_only)
        gpt_update(m, step, 1e-4);
    return 1e3 * (seconds_now() - begin);
}

// Prints the time of each op in one step, over all layers.
static void print_profile(struct gpt *m) {
    struct entry {
        char name[64];
        double seconds;
    } entries[64];
    int n = 0;
    double total = 0;
    for (int p = 0; p < m->timeline.plan.phase_count; p++) {
        char name[64] = "";
        const char *full = m->timeline.plan.phases[p].name, *op = strstr(full, ": ");
        if (!op || phase_seconds[p] == 0)
            continue;
        snprintf(name, sizeof name, "%.*s%s", (int)strcspn(full, " :"), full, op);
        int i = 0;
        while (i < n && strcmp(entries[i].name, name))
            i++;
        if (i == n) {
            snprintf(entries[n].name, sizeof entries[n].name, "%s", name);
            entries[n++].seconds = 0;
        }
        entries[i].seconds += phase_seconds[p];
        total += phase_seconds[p];
    }
    printf("\none step by op (no recomputation)\n");
    for (int i = 0; i < n; i++)
        printf("  %-36s %9.2f ms  %5.1f %%\n", entries[i].name, 1e3 * entries[i].seconds,
               100 * entries[i].seconds / total);
}

// Runs one round of a case: a fresh model, a warm-up step, then steps; in the first case, in turn with only their
// matmuls.
static void run_case(struct bench *b, int which, bool last_round) {
    struct bench_case *k = &b->cases[which];
    const struct layer_shape s = model_shape_of(&b->config, sizeof(floatX), k->backend == ATTENTION_UNFUSED).layer;
    struct gpt *m = gpt_create(&b->config, case_policy(b, which, &s), k->backend, &b->dev);
    memcpy(k->policy, m->policy.description, sizeof k->policy);
    k->plan_bytes = m->timeline.plan.peak_bytes;
    k->activation_bytes_per_token_layer = (double)policy_bytes_per_token(&m->policy, &s) / b->config.model.num_layers;
    gpt_allocate(m);
    k->arena_bytes = 0;
    for (int a = 0; a < ARENA_COUNT; a++)
        if (plan_arena_memory((enum plan_arena)a) == MEMORY_DEVICE)
            k->arena_bytes += m->timeline.arenas.bytes[a];
    one_step(b, m, 1);
    for (int i = 0; i < STEPS_A_ROUND; i++) {
        sample_add(&k->step, one_step(b, m, i + 2));
        if (which == 0) {
            matmuls_only = true;
            sample_add(&k->matmuls, one_step(b, m, i + 2));
            matmuls_only = false;
        }
    }
    k->resident_bytes = memory_resident_bytes();
    if (which == 0 && last_round) {
        phase_seconds = (double *)calloc((size_t)m->timeline.plan.phase_count, sizeof *phase_seconds);
        one_step(b, m, 9);
        print_profile(m);
        free(phase_seconds);
        phase_seconds = NULL;
    }
    gpt_destroy(m);
}

static void print_table(const struct bench *b, double peak_flops, struct flops_per_token per_token) {
    const struct bench_case *base = &b->cases[0];
    const double tokens = (double)b->config.training.micro_batch_size * b->config.model.seq_length;
    printf("\n%-28s %9s %9s %8s %12s %12s %12s %14s\n", "case", "ms/step", "tok/s", "x none", "planned", "allocated",
           "resident", "B/token/layer");
    for (int i = 0; i < b->num_cases; i++) {
        const struct bench_case *k = &b->cases[i];
        char plan[LOG_NUMBER], arena[LOG_NUMBER], resident[LOG_NUMBER];
        printf("%-28s %9.1f %9.1f %8.3f %12s %12s %12s %14.1f\n", k->name, median(k->step),
               1e3 * tokens / median(k->step), median(k->step) / median(base->step),
               log_bytes(plan, (int64_t)k->plan_bytes), log_bytes(arena, (int64_t)k->arena_bytes),
               log_bytes(resident, (int64_t)k->resident_bytes), k->activation_bytes_per_token_layer);
    }
    const double ratio = median(base->step) / median(base->matmuls);
    printf("\nthe step's matmuls alone, same calls: %.1f ms; the step takes %.3f x that\n", median(base->matmuls),
           ratio);
    if (!(ratio > 0.9 && ratio < 100)) // the matmuls are a part of the step, and most of it except in tiny models
        fail("the step can't take %.3f x its own matmuls: the machine was busy, or a part of one of both is missing",
             ratio);
    const double flops = per_token.done * tokens, percent = 100 * 1e3 * flops / median(base->step) / peak_flops;
    printf("model flops: %.0f GFLOP a step, %.1f GFLOP/s; a large matmul reaches %.1f GFLOP/s here: MFU %.1f %%, by "
           "PaLM's convention %.1f %%\n",
           1e-9 * flops, 1e-6 * flops / median(base->step), 1e-9 * peak_flops, percent,
           percent * per_token.palm / per_token.done);
}

static void write_json(const struct bench *b, const char *path, double peak_flops) {
    FILE *out = fopen(path, "w");
    if (!out)
        fail("cannot write %s", path);
    const double tokens = (double)b->config.training.micro_batch_size * b->config.model.seq_length;
    fprintf(out, "{\"precision\": \"%s\", \"threads\": %d, \"tokens_per_step\": %.0f, \"matmul\": \"%s\", ",
            FLOATX_NAME, b->dev.threads, tokens, matmul_describe(b->dev.matmul));
    fprintf(out, "\"peak_gflops\": %.1f, \"matmuls_ms\": %.2f, \"cases\": [", 1e-9 * peak_flops,
            median(b->cases[0].matmuls));
    for (int i = 0; i < b->num_cases; i++) {
        const struct bench_case *k = &b->cases[i];
        fprintf(out,
                "%s\n  {\"case\": \"%s\", \"policy\": \"%s\", \"step_ms\": %.2f, \"samples\": %d, "
                "\"tokens_per_second\": %.1f, "
                "\"planned_bytes\": %zu, \"allocated_bytes\": %zu, \"resident_bytes\": %zu, "
                "\"activation_bytes_per_token_per_layer\": %.2f}",
                i ? "," : "", k->name, k->policy, median(k->step), k->step.n, 1e3 * tokens / median(k->step),
                k->plan_bytes, k->arena_bytes, k->resident_bytes, k->activation_bytes_per_token_layer);
    }
    fprintf(out, "\n]}\n");
    if (fclose(out))
        fail("cannot write %s", path);
}

int main(int argc, char **argv) {
    const char *json = NULL;
    char *defaults[] = {argv[0], (char *)"--preset", (char *)"gpt2-124m"}, *options[64];
    int rounds = 2, n = 0;
    while (argc > 2 && (!strcmp(argv[1], "--json") || !strcmp(argv[1], "--rounds"))) {
        if (!strcmp(argv[1], "--json"))
            json = argv[2];
        else
            rounds = atoi(argv[2]);
        argv += 2;
        argc -= 2;
    }
    options[n++] = defaults[0];
    if (argc == 1)
        for (int i = 1; i < 3; i++)
            options[n++] = defaults[i];
    for (int i = 1; i < argc && n < 60; i++)
        options[n++] = argv[i];
    options[n++] = (char *)"--plan"; // so that no data is needed
    options[n++] = (char *)"--val-every=0";
    options[n] = NULL;

    struct bench b;
    memset(&b, 0, sizeof b);
    b.config = config_parse(n, options);
    b.dev.threads = b.config.device.threads > 0 ? b.config.device.threads : omp_get_num_procs();
    omp_set_num_threads(b.dev.threads);
    b.dev.matmul = matmul_create(&b.dev);
    const size_t tokens = (size_t)b.config.training.micro_batch_size * (size_t)b.config.model.seq_length;
    b.inputs = (int32_t *)calloc(tokens, sizeof *b.inputs);
    b.targets = (int32_t *)calloc(tokens, sizeof *b.targets);
    if (!b.inputs || !b.targets)
        fail("out of memory for a batch");
    for (size_t i = 0; i < tokens; i++) {
        b.inputs[i] = (int32_t)(random_uniform(1, 0, i) * (float)b.config.model.vocab_size);
        b.targets[i] = (int32_t)(random_uniform(1, 1, i) * (float)b.config.model.vocab_size);
    }
    b.num_cases = 3;
    b.cases[0].name = "none";
    b.cases[1].name = "selective: norm, activation";
    b.cases[2].name = "full, uniform 1";
    for (int i = 0; i < b.num_cases; i++)
        b.cases[i].backend = ATTENTION_FLASH;

    printf("%s, B%d T%d, %s, %d threads, matmul: %s\n", argc == 1 ? "gpt2-124m" : "model as given",
           b.config.training.micro_batch_size, b.config.model.seq_length, FLOATX_NAME, b.dev.threads,
           matmul_describe(b.dev.matmul));
    for (int round = 0; round < rounds; round++)
        for (int i = 0; i < b.num_cases; i++)
            run_case(&b, i, round == rounds - 1);
    struct gpt *m = gpt_create(&b.config, policy_keep_all(b.config.model.num_layers), ATTENTION_FLASH, &b.dev);
    gpt_allocate(m);
    const double peak = gpt_measure_peak(m);
    print_table(&b, peak, gpt_flops_per_token(m));
    if (json)
        write_json(&b, json, peak);
    gpt_destroy(m);
    matmul_destroy(b.dev.matmul);
    free(b.inputs);
    free(b.targets);
    return 0;
}
