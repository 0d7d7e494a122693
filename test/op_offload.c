// Activations in host memory between forward and backward. They change no bit, whatever lies in memory that the plan
// calls dead, and whether copies are early or late. The plan falls by what left the device.
#include <malloc.h>       // before testing.h, which may redefine free
#include "test/model.h"   // before gpt.cuh, which it looks into
#include "test/forms.h"   // the forms of the block
#include "test/setup.h"   // models of a few layers, and what a step makes of them
#include "test/testing.h" // assertions

#define CLIPPED " --clip-grad 0.01 "
#define FP8                                                                                                            \
    "--vocab-size 150 --loss-chunk-tokens 50 --micro-batch-size 1 --global-batch-size 2 --num-layers 3 "               \
    "--hidden-dropout 0.1 "
#define FP8_LLAMA                                                                                                      \
    FP8 "--hidden-size 48 --kv-channels 16 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 80 "         \
        "--normalization RMSNorm --position-embedding-type rope --activation swiglu --add-bias-linear=false "

#define FP8_DELAYED FP8_LLAMA "--seq-length 32 --fp8-format hybrid --fp8-recipe delayed "

// Cases beside the forms. They are tested under each policy_step-th policy, from first_policy on.
static const struct offload_case {
    const char *options;
    int first_policy, policy_step;
} more_cases[] = {
#ifdef CUDA_EMULATED
#ifdef PRECISION_BF16 // there is no FP8 with fp32
    {FP8_DELAYED, 1, 2},
#endif
#else
#ifdef PRECISION_BF16
    {FP8_DELAYED, 0, 1},
    {FP8_LLAMA "--seq-length 32 --fp8-format hybrid", 0, 2},
    {FP8 "--hidden-size 128 --num-attention-heads 4 --kv-channels 32 --ffn-hidden-size 256 --seq-length 128 "
         "--fp8-format e4m3 --fp8-recipe blockwise",
     0, 1},
#endif
    {GPT2 " --attention-backend unfused", 0, 2},
#endif
    {NULL, 0, 1},
};
// The number of cases, which go to `cases`: the forms that take part, and the cases beside them.
static int offload_cases(struct offload_case cases[FORMS + 8]) {
#ifdef CUDA_EMULATED
    const unsigned takes_part = FORM_OFFLOADED_EMULATED;
#else
    const unsigned takes_part = FORM_OFFLOADED;
#endif
    int count = 0;
    for (int i = 0; i < FORMS; i++)
        if (forms[i].taken_by & takes_part) {
            const struct offload_case form = {form_options(&forms[i]), 0,
                                              forms[i].taken_by & FORM_OFFLOADED_LESS ? 2 : 1};
            cases[count++] = form;
        }
    for (int i = 0; more_cases[i].options; i++)
        cases[count++] = more_cases[i];
    return count;
}
static const char *const policies[] = {
    "",
    "--recompute-granularity selective --recompute-modules " MODULE_LIST,
    "--recompute-granularity full",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
#ifndef CUDA_EMULATED
    "--recompute-granularity selective",
    "--recompute-granularity selective --recompute-modules core_attn",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
#endif
};
#ifdef CUDA_EMULATED
enum { FEWEST = 2 }; // the fewest offloaded layers
#else
enum { FEWEST = 1 };
#endif
enum { POLICIES = sizeof policies / sizeof *policies, OPTIONS = 640 };

// ---- the same bits ----

struct result {
    struct outcome outcome;
    double norm; // the last step's
    int layers;
};
static struct result result_of(struct setup *s) {
    const double *reports;
    struct result r;
    r.layers = s->model->shape.L;
    r.outcome = two_steps(s);
    gpt_fetch_results(s->model, 0);
    r.norm = gpt_results(s->model, 0, &reports).check.grad_norm;
    return r;
}
static struct result plain_result(const char *shape, const char *options) {
    struct setup s = setup_of(shape, options);
    const struct result r = result_of(&s);
    assert_int_equal(s.model->timeline.plan.host_peak_bytes, s.model->timeline.plan.arena_bytes[ARENA_HOST_STAGING]);
    assert_int_equal(s.model->timeline.plan.transfer_count, 0);
    setup_free(&s);
    return r;
}
// When copies run, to the host and to the device: each as it is begun, or as it is waited for.
enum { ORDERS = 4 };
static void set_order(struct gpt *m, int order) {
#ifdef CUDA_EMULATED // without the variable the emulator's streams are late
    static const char *const early[ORDERS] = {"eager", "2", "1", "0"};
    setenv("EMU_STREAMS", early[order], 1);
#endif
    if (order & 1)
        transfers_postpone_copies(&m->timeline.transfers, TRANSFER_TO_HOST);
    if (order & 2)
        transfers_postpone_copies(&m->timeline.transfers, TRANSFER_TO_DEVICE);
}
// Checks two steps and an evaluation with `layers` layers offloaded. watch: is called as each phase begins; NULL:
// nothing is, so that micro-steps may be recorded.
static void offload_changes_no_bit(const struct result *plain, const char *shape, const char *options, int layers,
                                   int order, void (*watch)(struct gpt *)) {
    char with[OPTIONS + 64];
    snprintf(with, sizeof with, "%s --cpu-offloading-num-layers %d", options, layers);
    struct setup s = setup_of(shape, with);
    set_order(s.model, order);
    watch_phases(s.model, watch);
    struct result r = result_of(&s);
    assert_same_bits(&plain->outcome, &r.outcome, with);
    if (r.norm != plain->norm)
        fail_msg("%s: the gradient norm is %.17g, not %.17g", with, r.norm, plain->norm);
    assert_true(isfinite(loss_mean(gpt_evaluate(s.model, setup_batch(&s, 0)))));
    setup_free(&s);
    outcome_free(&r.outcome);
}

// Checks each form under each of its policies, with one, some and all layers offloaded; the orders of copies take
// turns.
static void offload_and_poisoned_memory_change_no_bit(void **state) {
    struct offload_case cases[FORMS + 8];
    const int count = offload_cases(cases);
    int order = 0;
    for (int f = 0; f < count; f++)
        for (int p = cases[f].first_policy; p < POLICIES; p += cases[f].policy_step) {
            char options[OPTIONS];
            snprintf(options, sizeof options, CLIPPED "%s", policies[p]);
            struct result plain = plain_result(cases[f].options, options);
            for (int n = FEWEST; n <= 3; n++, order++)
                if (takes_case(f + p + n, 5))
                    offload_changes_no_bit(&plain, cases[f].options, options, n < 3 ? n : plain.layers, order % ORDERS,
                                           poison);
            outcome_free(&plain.outcome);
        }
}
// Checks micro-steps that are not watched, so that on a GPU the later ones are graphs.
static void recorded_micro_steps_change_no_bit(void **state) {
    static const char *const graphs[] = {"--cuda-graphs", "--cuda-graphs=false"};
    struct result plain = plain_result(GPT2, CLIPPED);
    for (int i = 0; i < 2; i++)
        for (int layers = 2; layers <= 3; layers++) {
            if (!takes_case(i + layers, 2))
                continue;
            char options[OPTIONS];
            snprintf(options, sizeof options, CLIPPED "%s", graphs[i]);
            offload_changes_no_bit(&plain, GPT2, options, layers, 0, NULL);
        }
    outcome_free(&plain.outcome);
}

// ---- the plan ----

// A model that is planned and not allocated.
struct planned {
    struct device *dev;
    struct config config;
    struct gpt *model;
};
static struct planned plan_of(const char *shape, const char *options) {
    struct planned p;
    p.dev = (struct device *)test_alloc(sizeof *p.dev);
    memset(p.dev, 0, sizeof *p.dev);
    p.dev->threads = 2;
    p.dev->matmul = matmul_create(p.dev);
    test_case(1, "%s %s", shape, options);
    p.config = config_of_options(shape, options);
    const struct fit f = fit_of(&p.config, ATTENTION_FLASH, p.dev);
    p.model = gpt_create(&p.config, fit_policy(&f), ATTENTION_FLASH, p.dev);
    return p;
}
static void planned_free(struct planned *p) {
    gpt_destroy(p->model);
    matmul_destroy(p->dev->matmul);
    free(p->dev);
}
static size_t bytes_of_transfers(const struct plan *plan, enum transfer_direction direction) {
    size_t bytes = 0;
    for (int i = 0; i < plan->transfer_count; i++)
        bytes += plan->transfers[i].direction == direction ? plan->transfers[i].bytes : 0;
    return bytes;
}

static size_t activations_bound(const struct plan *plan) {
    return plan->lower_bound_bytes - (plan->peak_bytes - plan->arena_bytes[ARENA_ACTIVATIONS]);
}

// Models of 4 layers and 2 x 32 tokens, whose peak is in the head. The bytes per token that a layer keeps, of elements
// of 2 bytes and of 4, computed by hand. GPT-2: 4 C norm inputs, 4 C norm outputs, 6 C q, k, v, 2 C attention, 16 C
// MLP; 4 x 4 log-sum-exps, 2 x 8 statistics. Llama, with 2 KV heads of 16, 4 heads and an MLP of 128: 4 C, 4 C, 256 q,
// k, v, 2 C, 512 gate and up, 256 MLP; 16 log-sum-exps, 2 x 4 statistics.
#define PLANNED                                                                                                        \
    "--vocab-size 32768 --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "                      \
    "--micro-batch-size 2 --global-batch-size 2 --loss-chunk-tokens 64 "
static const struct {
    const char *options;
    size_t narrow, wide;
} planned_shapes[] = {
    {PLANNED, 2080, 4128},
    {PLANNED "--num-query-groups 2 --ffn-hidden-size 128 --normalization RMSNorm --position-embedding-type rope "
             "--activation swiglu --add-bias-linear=false",
     1688, 3352},
};
static void the_plan_falls_by_what_left(void **state) {
    for (size_t i = 0; i < sizeof planned_shapes / sizeof *planned_shapes; i++) {
        struct planned none = plan_of(planned_shapes[i].options, "");
        const size_t tokens = 64,
                     layer = tokens * (sizeof(floatX) == 2 ? planned_shapes[i].narrow : planned_shapes[i].wide);
        for (int layers = 1; layers <= 4; layers++) {
            char options[64];
            snprintf(options, sizeof options, "--cpu-offloading-num-layers %d", layers);
            struct planned p = plan_of(planned_shapes[i].options, options);
            const struct plan *plan = &p.model->timeline.plan;
            // the last layer's backward comes next, so that it does not leave
            const size_t left = (size_t)(layers < 4 ? layers : 3) * layer;
            assert_int_equal(plan->arena_bytes[ARENA_HOST_ACTIVATIONS], left);
            assert_int_equal(bytes_of_transfers(plan, TRANSFER_TO_HOST), left);
            assert_int_equal(bytes_of_transfers(plan, TRANSFER_TO_DEVICE), left);
            assert_int_equal(none.model->timeline.plan.lower_bound_bytes - plan->lower_bound_bytes, left);
            assert_int_equal(none.model->timeline.plan.peak_bytes - plan->peak_bytes, left);
            planned_free(&p);
        }
        planned_free(&none);
    }
}

// Finds the largest number of layers' outputs, with the embedding's, that are on the device in a phase of training.
static int most_outputs(const struct planned *p) {
    const struct plan *plan = &p->model->timeline.plan;
    int most = 0;
    for (int phase = 0; phase < plan->phase_count; phase++) {
        int live = 0;
        for (int i = 0; i < plan->count; i++) {
            const struct plan_buffer *b = &plan->buffers[i];
            live += b->arena == ARENA_ACTIVATIONS && b->first_phase <= phase && phase <= b->last_phase &&
                    b->first_phase >= 0 && !strcmp(b->name, "residual after mlp");
        }
        most = live > most ? live : most;
    }
    return most;
}
// Checks full recomputation with all layers offloaded: two inputs of layers are on the device where all of them were.
// And under no policy do activations on the device grow with the number of layers.
static void offloaded_layers_take_no_memory(void **state) {
    static const char *const many[] = {"", "--recompute-granularity selective", "--recompute-granularity full",
                                       ("--recompute-granularity full --recompute-method uniform "
                                        "--recompute-num-layers 2")};
    for (size_t i = 0; i < sizeof planned_shapes / sizeof *planned_shapes; i++) {
        struct planned none = plan_of(planned_shapes[i].options, "--recompute-granularity full");
        struct planned all =
            plan_of(planned_shapes[i].options, "--recompute-granularity full --cpu-offloading-num-layers 4");
        assert_int_equal(most_outputs(&none), 5);
        assert_int_equal(most_outputs(&all), 2);
        assert_int_equal(all.model->timeline.plan.arena_bytes[ARENA_HOST_ACTIVATIONS], 3 * 64 * 64 * sizeof(floatX));
        planned_free(&none);
        planned_free(&all);
        for (size_t k = 0; k < sizeof many / sizeof *many; k++) {
            size_t bounds[2];
            for (int twice = 0; twice < 2; twice++) {
                char options[256];
                snprintf(options, sizeof options, "%s --vocab-size 256 --num-layers %d --cpu-offloading-num-layers %d",
                         many[k], 8 << twice, 8 << twice);
                struct planned p = plan_of(planned_shapes[i].options, options);
                bounds[twice] = activations_bound(&p.model->timeline.plan);
                planned_free(&p);
            }
            assert_int_equal(bounds[0], bounds[1]);
        }
    }
}

#ifndef CUDA_EMULATED
static void plans_are_tight(void **state) {
    static const char *const names[] = {"gpt2-124m", "llama3-8b", "qwen2.5-7b"};
    static const char *const layers[] = {"1", "6", "12"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        for (size_t k = 0; k < 4; k++)
            for (size_t n = 0; n < sizeof layers / sizeof *layers; n++) {
                char options[OPTIONS];
                snprintf(options, sizeof options, "--preset %s --sample-every 1 %s --cpu-offloading-num-layers %s",
                         names[i], policies[k], layers[n]);
                struct planned p = plan_of(options, "");
                const struct plan *plan = &p.model->timeline.plan;
                const double device = (double)plan->peak_bytes / (double)plan->lower_bound_bytes,
                             host = (double)plan->host_peak_bytes / (double)plan->host_lower_bound_bytes;
                if (!(device <= 1.02 && host <= 1.02))
                    fail_msg("%s: the peaks are %.4f x and %.4f x the largest live sums", options, device, host);
                planned_free(&p);
            }
}
#endif

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_plan_falls_by_what_left),
        cmocka_unit_test(offloaded_layers_take_no_memory),
#ifndef CUDA_EMULATED
        cmocka_unit_test(plans_are_tight),
#endif
        cmocka_unit_test(recorded_micro_steps_change_no_bit),
        cmocka_unit_test(offload_and_poisoned_memory_change_no_bit),
    };
    setenv("EMU_CAPABILITY", "8.9", 1); // the emulated GPU's: it has FP8
    omp_set_num_threads(1);             // barriers would take most of the time of ops this small
    return cmocka_run_group_tests(tests, NULL, NULL);
}
