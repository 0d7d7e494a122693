// Parameters and gradients in host memory, a unit at a time on the device, on one rank. They change no bit, whatever
// lies in memory that the plan calls dead, and whether copies are early or late. Gradients in bf16 have the same bits
// wherever they lie. The plan falls by what left the device. op_zero tests several ranks.
#include "test/model.h"   // before gpt.cuh, which it looks into
#include "test/setup.h"   // models of a few layers, and what a step makes of them
#include "test/testing.h" // assertions

#define CLIPPED " --clip-grad 0.01 --bucket-mib 0.03 "
#ifdef CUDA_EMULATED
#define THREE_BATCHES "3"
#else
#define THREE_BATCHES "9"
#endif
// With the larger vocabulary, stored gradients of head and embeddings are streamed.
#define LARGE_VOCABULARY " --vocab-size 700 "

static const char *const offloads[] = {
    "--offload-gradients --offload-weights --optimizer-cpu-offload",
    "--offload-gradients --offload-weights --cpu-offloading-num-layers 2",
#ifndef CUDA_EMULATED
    "--offload-gradients",
    "--offload-weights",
#endif
};
static const char *const policies[] = {
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
#ifndef CUDA_EMULATED
    "",
#endif
};
static const char *const dtypes[] = {"", "--main-grads-dtype bf16"};
enum { OFFLOADS = sizeof offloads / sizeof *offloads, POLICIES = sizeof policies / sizeof *policies, OPTIONS = 512 };

// What two steps and an evaluation leave. Gradients on the host are what the first micro-step finds there.
struct result {
    struct outcome outcome;
    double norm, evaluation;
};
static struct result result_of(struct setup *s) {
    const double *reports;
    struct result r;
    if (s->model->zero.grads_on_host)
        memset(s->model->zero.grads, 0xff, zero_gradients_bytes(&s->model->zero));
    r.outcome = two_steps(s);
    gpt_fetch_results(s->model, 0);
    const struct step_results results = gpt_results(s->model, 0, &reports);
    assert_true(results.check.finite);
    assert_true(results.check.grad_norm > s->config.training.clip_grad);
    r.norm = results.check.grad_norm;
    r.evaluation = loss_mean(gpt_evaluate(s->model, setup_batch(s, 0)));
    return r;
}
// Checks that offload changes no bit of `plain`. late: the direction whose copies run as they are waited for;
// TRANSFER_DIRECTIONS: none.
static void offload_changes_no_bit(const struct result *plain, const char *shape, const char *options, int late,
                                   void (*watch)(struct gpt *)) {
    struct setup s = setup_of(shape, options);
    if (late < TRANSFER_DIRECTIONS) // the emulator has orders of its own
        transfers_postpone_copies(&s.model->timeline.transfers, (enum transfer_direction)late);
    watch_phases(s.model, watch);
    struct result r = result_of(&s);
    assert_same_bits(&plain->outcome, &r.outcome, options);
    if (r.norm != plain->norm || r.evaluation != plain->evaluation)
        fail_msg("%s: the gradient norm is %.17g, not %.17g, evaluation gives %.17g, not %.17g", options, r.norm,
                 plain->norm, r.evaluation, plain->evaluation);
    setup_free(&s);
    outcome_free(&r.outcome);
}
static void same_bits(const char *shape, void (*watch)(struct gpt *)) {
    const int step = test_slowness() > 1 ? 3 : 1; // an emulated CPU takes each policy with one type of gradients
    for (int i = 0; i < 2 * POLICIES; i += step) {
        char base[OPTIONS], options[2 * OPTIONS];
        snprintf(base, sizeof base, CLIPPED "%s %s", dtypes[i % 2], policies[i / 2]);
        struct setup s = setup_of(shape, base);
        struct result plain = result_of(&s);
        setup_free(&s);
        for (int offload = 0; offload < OFFLOADS; offload++) {
            if ((i + offload) % 2 && !in_long_run()) // half of the sets with each type of gradients
                continue;
            snprintf(options, sizeof options, "%s %s", base, offloads[offload]);
            offload_changes_no_bit(&plain, shape, options, (i + offload) % (TRANSFER_DIRECTIONS + 1), watch);
        }
        outcome_free(&plain.outcome);
    }
}
// Skips on emulated hardware what only the long run has time for: in the short run each kind of model meets units and
// gradients once.
static void skip_where_emulated(void) {
    if (!takes_case(1, 2))
        skip();
}
static void offloaded_units_change_no_bit_gpt2(void **state) {
    skip_where_emulated();
    same_bits(GPT2, poison);
}
static void offloaded_units_change_no_bit_llama(void **state) { same_bits(LLAMA, poison); }
static void streamed_gradients_change_no_bit_gpt2(void **state) { same_bits(GPT2 LARGE_VOCABULARY, poison); }
static void streamed_gradients_change_no_bit_llama(void **state) {
    skip_where_emulated();
    same_bits(LLAMA LARGE_VOCABULARY, poison);
}
#if defined(PRECISION_BF16) && !defined(CUDA_EMULATED) // there is no FP8 with fp32
// Checks FP8: with offloaded units the amaxes of weights are taken as the weights are cast, not by the update.
static void offloaded_units_change_no_bit_fp8(void **state) {
    static const char *const recipes[] = {"tensorwise", "delayed"};
    for (int i = 0; i < 2; i++) {
        char shape[OPTIONS];
        snprintf(shape, sizeof shape,
                 "--vocab-size 150 --loss-chunk-tokens 50 --micro-batch-size 1 --global-batch-size 2 --num-layers 3 "
                 "--hidden-size 48 --kv-channels 16 --num-attention-heads 4 --num-query-groups 2 "
                 "--ffn-hidden-size 80 --normalization RMSNorm --position-embedding-type rope --activation swiglu "
                 "--add-bias-linear=false --seq-length 32 --fp8-format hybrid --fp8-recipe %s",
                 recipes[i]);
        same_bits(shape, poison);
    }
}
#endif
// Checks micro-steps that are not watched, and so recorded where the target has graphs: all three, in the second of two
// steps.
static void recorded_micro_steps_have_the_same_bits(void **state) {
    if (takes_case(1, 2))
        same_bits(GPT2, NULL);
    same_bits(LLAMA " --global-batch-size " THREE_BATCHES, NULL);
}

// Checks that the device holds less by what left it, and that the host holds that; units' buffers take back a part on
// the device.
static void the_plan_falls_by_what_left(void **state) {
    for (int i = 0; i < 2; i++) {
        char options[OPTIONS];
        const char *shape = LLAMA " --num-layers 24";
        snprintf(options, sizeof options, "--recompute-granularity full %s", dtypes[i]);
        struct setup whole = setup_of(shape, options);
        snprintf(options, sizeof options, "--recompute-granularity full --offload-gradients --offload-weights %s",
                 dtypes[i]);
        struct setup s = setup_of(shape, options);
        const struct plan *before = &whole.model->timeline.plan, *after = &s.model->timeline.plan;
        const size_t params = before->arena_bytes[ARENA_PARAMETERS] - after->arena_bytes[ARENA_PARAMETERS];
        const size_t grads = before->arena_bytes[ARENA_GRADIENTS];
        assert_int_equal(params, (size_t)s.model->table.trained.flat * sizeof(floatX));
        assert_int_equal(grads, zero_gradients_bytes(&s.model->zero));
        assert_int_equal(after->arena_bytes[ARENA_GRADIENTS], 0);
        assert_int_equal(after->arena_bytes[ARENA_HOST_PARAMETERS], params);
        assert_int_equal(after->arena_bytes[ARENA_HOST_GRADIENTS], grads);
        assert_true(before->peak_bytes - after->peak_bytes > (params + grads) / 2);
        assert_true(after->peak_bytes < 1.02 * (double)after->lower_bound_bytes);
        setup_free(&s);
        setup_free(&whole);
    }
}

// Checks that a step with one, two and three micro-steps begins to copy as many bytes as planned.
static void a_step_copies_what_is_planned(void **state) {
    static const char *const what[] = {
        "--offload-gradients --offload-weights --optimizer-cpu-offload --exp-avg-dtype 8bit --exp-avg-sq-dtype bf16",
        "--offload-gradients --main-grads-dtype bf16 --optimizer-cpu-offload --optimizer-offload-fraction 0.3",
        "--offload-weights --cpu-offloading-num-layers 2",
    };
    for (size_t i = 0; i < sizeof what / sizeof *what; i++)
        for (int micro_steps = 1; micro_steps <= 3; micro_steps++) {
            char options[OPTIONS];
            size_t planned[TRANSFER_DIRECTIONS];
            snprintf(options, sizeof options,
                     "--bucket-mib 0.03 --allow-lossy-states --cuda-graphs=false %s "
                     "--global-batch-size %d",
                     what[i], micro_steps * atoi(BATCH));
            struct setup s = setup_of(LLAMA LARGE_VOCABULARY, options);
            gpt_step_transfer_bytes(s.model, planned);
            memset(transfer_watch, 0, sizeof transfer_watch);
            struct outcome o = two_steps(&s);
            for (int d = 0; d < TRANSFER_DIRECTIONS; d++)
                if (transfer_watch[d] != 2 * planned[d])
                    fail_msg("%s: direction %d: %zu bytes in two steps, %zu planned", options, d, transfer_watch[d],
                             2 * planned[d]);
            outcome_free(&o);
            setup_free(&s);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(offloaded_units_change_no_bit_gpt2),
        cmocka_unit_test(offloaded_units_change_no_bit_llama),
        cmocka_unit_test(streamed_gradients_change_no_bit_gpt2),
        cmocka_unit_test(streamed_gradients_change_no_bit_llama),
#if defined(PRECISION_BF16) && !defined(CUDA_EMULATED)
        cmocka_unit_test(offloaded_units_change_no_bit_fp8),
#endif
        cmocka_unit_test(recorded_micro_steps_have_the_same_bits),
        cmocka_unit_test(the_plan_falls_by_what_left),
#ifndef CUDA_EMULATED
        cmocka_unit_test(a_step_copies_what_is_planned),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
