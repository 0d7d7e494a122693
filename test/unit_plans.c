// The engine's model as far as it is planned. Every preset, recomputation, ZeRO stage, number of ranks and set of what
// is offloaded is placed close to its lower bound, in the device's memory and the host's, and quickly, since the search
// for a policy plans many times. And the flops that MFU counts.
#define PRECISION_BF16
#include "test/model.h" // before gpt.cuh, which it looks into
#include "kernels/device.cuh"
#include "test/testing.h" // cmocka

// Nothing here runs what is planned, so that gcc finds that the batch is always the planning mode's NULL.
#pragma GCC diagnostic ignored "-Wnonnull"
#include "run/fit.cuh"
#include "run/utilization.cuh"
#include <omp.h>
#include <time.h> // clock_gettime

// Returns the CPU time of this process: others may keep the machine busy.
static double cpu_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

struct quality {
    int plans, above;
    double worst, seconds; // worst: the largest ratio of a packed arena to its bound; seconds: for all plans together
    char worst_options[512];
};

// Returns the ratio of a memory's packed arena to its bound. The other arenas have no gaps; with them a loss would look
// small.
static double packed_ratio(const struct plan *plan, enum plan_arena packed, size_t peak, size_t bound) {
    const size_t others = peak - plan->arena_bytes[packed];
    return bound > others ? (double)plan->arena_bytes[packed] / (double)(bound - others) : 1;
}

// Opens a device for plans of a GPU: on the CPU, workspaces depend on its instructions, and so plans on the machine
// that runs the test.
static void open_device(struct device *dev) {
    memset(dev, 0, sizeof *dev);
    dev->planned.major = 8;
    dev->threads = 1;
    omp_set_num_threads(1);
    dev->matmul = matmul_create(dev);
}
static void close_device(struct device *dev) { matmul_destroy(dev->matmul); }
static void expect_quality(const struct quality *quality, double most) {
    print_message("%d plans, %d above their bound, by %.2f %% at most (%s); %.1f ms a plan\n", quality->plans,
                  quality->above, 100 * (quality->worst - 1), quality->worst_options,
                  1e3 * quality->seconds / quality->plans);
    assert_true(quality->worst <= most);
}

// Fails where two packed buffers that are live together share bytes.
static void expect_sound(const struct plan *plan) {
    for (int i = 0; i < plan->count; i++) {
        const struct plan_buffer *a = &plan->buffers[i];
        if (!plan_is_packed(a))
            continue;
        assert_true(a->offset + a->bytes <= plan->arena_bytes[a->arena]);
        for (int j = 0; j < i; j++) {
            const struct plan_buffer *b = &plan->buffers[j];
            if (b->first_phase <= a->last_phase && a->first_phase <= b->last_phase && b->arena == a->arena &&
                plan_is_packed(b) && a->offset < b->offset + b->bytes && b->offset < a->offset + a->bytes)
                fail_msg("%s and %s share bytes", a->name, b->name);
        }
    }
}

static void plan_options(struct device *dev, const char *options, struct quality *quality) {
    const struct config config = config_of_options(options, "");
    const double begin = cpu_seconds();
    const struct fit f = fit_of(&config, ATTENTION_FLASH, dev);
    struct gpt *m = gpt_create(&config, fit_policy(&f), ATTENTION_FLASH, dev);
    quality->seconds += cpu_seconds() - begin;
    const struct plan *plan = &m->timeline.plan;
    const double device = packed_ratio(plan, ARENA_ACTIVATIONS, plan->peak_bytes, plan->lower_bound_bytes),
                 host = packed_ratio(plan, ARENA_HOST_ACTIVATIONS, plan->host_peak_bytes, plan->host_lower_bound_bytes),
                 ratio = device > host ? device : host;
    expect_sound(plan);
    quality->plans++;
    quality->above += ratio > 1;
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
    static const int ranks[] = {1, 2, 7, 1024};
    enum { POLICIES = sizeof policies / sizeof *policies, STAGES = 4, RANKS = sizeof ranks / sizeof *ranks };
    struct quality quality = {0, 0, 1, 0, ""};
    struct device dev;
    open_device(&dev);
    for (int preset = 0; preset < CONFIG_PRESETS; preset++)
        for (int policy = 0; policy < POLICIES; policy++)
            for (int i = 0; i < RANKS; i++)
                for (int stage = 0; stage < (ranks[i] > 1 ? STAGES : 1); stage++) {
                    if ((preset + policy + i + stage) % 4 && !in_long_run())
                        continue;
                    char options[256];
                    snprintf(options, sizeof options,
                             "--preset %s --world-size %d --zero-stage %d --recompute-granularity %s",
                             presets[preset].name, ranks[i], stage, policies[policy]);
                    plan_options(&dev, options, &quality);
                }
    // Here the parameters of ZeRO's units, which are gathered in a chain, outweigh the activations.
    for (int i = 1; i < RANKS; i++)
        for (int policy = 3; policy < POLICIES; policy++) {
            char options[256];
            snprintf(options, sizeof options,
                     "--preset llama3-8b --world-size %d --zero-stage 3 --micro-batch-size 1 --seq-length 2048 "
                     "--recompute-granularity %s",
                     ranks[i], policies[policy]);
            plan_options(&dev, options, &quality);
        }
    close_device(&dev);
    expect_quality(&quality, 1.02);
}

// Sets of what is offloaded, each with more than the set before; %d is the number of layers.
static const char *const offloads[] = {
    "--optimizer-cpu-offload",
    "--optimizer-cpu-offload --cpu-offloading-num-layers %d",
    "--optimizer-cpu-offload --cpu-offloading-num-layers %d --offload-gradients --offload-weights",
};
enum { OFFLOADS = sizeof offloads / sizeof *offloads };
// Plans sets of what is offloaded. Chains of what arrives and leaves overlap: of units, where these are sharded; of
// what layers keep until it is offloaded. test_plan.py draws others at random, as GPUs train them in bf16.
static void plan_offloads_of(struct device *dev, const char *model, int layers, struct quality *quality) {
    static const char *const policies[] = {"none", "selective", "full"};
    for (int policy = 0; policy < 3; policy++)
        for (int sharded = 0; sharded < (policy == 1 ? 1 : 2); sharded++)
            for (int i = 0; i < OFFLOADS; i++) {
                static int plans;
                if (plans++ % 4 && !in_long_run())
                    continue;
                char options[512], set[128];
                snprintf(set, sizeof set, offloads[i], layers);
                snprintf(options, sizeof options, "%s --recompute-granularity %s %s %s", model, policies[policy],
                         sharded ? "--world-size 64 --zero-stage 3" : "", set);
                plan_options(dev, options, quality);
            }
}
static void offloads_are_planned_within_2_percent_of_their_bound(void **state) {
    struct quality quality = {0, 0, 1, 0, ""};
    struct device dev;
    open_device(&dev);
    for (int preset = 0; preset < CONFIG_PRESETS; preset++) {
        char model[128];
        snprintf(model, sizeof model, "--preset %s", presets[preset].name);
        const struct config config = config_of_options(model, "");
        plan_offloads_of(&dev, model, config.model.num_layers, &quality);
    }
    close_device(&dev);
    expect_quality(&quality, 1.02);
}
// Checks models of 14 to 405 billion parameters: a unit's parameters outweigh a micro-batch's activations.
static void large_models_are_planned_within_2_percent_of_their_bound(void **state) {
    static const struct {
        const char *options;
        int layers;
    } models[] = {
        {"--hidden-size 5120 --num-attention-heads 40 --ffn-hidden-size 13824 --num-layers 48", 48},
        {"--hidden-size 5120 --num-attention-heads 40 --ffn-hidden-size 27648 --num-layers 64", 64},
        {"--hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 28672 --num-layers 80", 80},
        {"--hidden-size 16384 --num-attention-heads 128 --ffn-hidden-size 53248 --num-layers 126", 126},
    };
    static const int lengths[] = {4096, 65536};
    struct quality quality = {0, 0, 1, 0, ""};
    struct device dev;
    open_device(&dev);
    for (int i = 0; i < (int)(sizeof models / sizeof *models); i++)
        for (int length = 0; length < (int)(sizeof lengths / sizeof *lengths); length++) {
            char model[256];
            snprintf(model, sizeof model, "--preset llama3-8b %s --micro-batch-size 1 --seq-length %d",
                     models[i].options, lengths[length]);
            plan_offloads_of(&dev, model, models[i].layers, &quality);
        }
    close_device(&dev);
    expect_quality(&quality, 1.02);
}

// The number of multiply-adds of a sequence's forward, counted one by one.
static int64_t naive_multiply_adds(const struct config *c, bool causal) {
    const int T = c->model.seq_length, H = c->model.num_attention_heads, D = c->model.kv_channels,
              C = c->model.hidden_size, F = c->model.ffn_hidden_size;
    const int qkv = (H + 2 * c->model.num_query_groups) * D, fc = c->model.activation == ACTIVATION_SWIGLU ? 2 * F : F;
    const int matmuls[4][2] = {{C, qkv}, {H * D, C}, {C, fc}, {F, C}};
    int64_t count = 0;
    for (int t = 0; t < T; t++) {
        for (int l = 0; l < c->model.num_layers; l++) {
            for (int i = 0; i < 4; i++)
                for (int in = 0; in < matmuls[i][0]; in++)
                    for (int out = 0; out < matmuls[i][1]; out++)
                        count++;
            for (int h = 0; h < H; h++)
                for (int key = 0; key <= (causal ? t : T - 1); key++)
                    for (int d = 0; d < D; d++)
                        count += 2; // q k into a score, and the score's share of v
        }
        for (int in = 0; in < C; in++)
            for (int out = 0; out < c->model.vocab_size; out++)
                count++;
    }
    return count;
}

static void flops_are_the_multiply_adds_of_a_naive_count(void **state) {
    static const char *const shapes[] = {
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 50 --seq-length 13",
        "--num-layers 3 --hidden-size 48 --num-attention-heads 3 --num-query-groups 1 --ffn-hidden-size 104 "
        "--activation swiglu "
        "--normalization RMSNorm --position-embedding-type rope --add-bias-linear=false --vocab-size 70 --seq-length 1 "
        "--untie-embeddings-and-output-weights",
        "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --kv-channels 8 --vocab-size 50 --seq-length 300",
    };
    struct device dev;
    memset(&dev, 0, sizeof dev);
    dev.threads = 1;
    dev.matmul = matmul_create(&dev);
    for (int i = 0; i < (int)(sizeof shapes / sizeof *shapes); i++) {
        // recomputation does not count
        const struct config c = config_of_options(shapes[i], "--recompute-granularity full");
        const struct fit f = fit_of(&c, ATTENTION_FLASH, &dev);
        struct gpt *m = gpt_create(&c, fit_policy(&f), ATTENTION_FLASH, &dev);
        const struct flops_per_token flops = gpt_flops_per_token(m);
        assert_true(flops.done * c.model.seq_length ==
                    6 * (double)naive_multiply_adds(&c, true)); // 2 each, three times the forward's
        assert_true(flops.palm * c.model.seq_length == 6 * (double)naive_multiply_adds(&c, false));
        gpt_destroy(m);
    }
    matmul_destroy(dev.matmul);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_preset_is_planned_within_2_percent_of_its_bound),
        cmocka_unit_test(offloads_are_planned_within_2_percent_of_their_bound),
        cmocka_unit_test(large_models_are_planned_within_2_percent_of_their_bound),
        cmocka_unit_test(flops_are_the_multiply_adds_of_a_naive_count),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
