// The optimizer's state in every format, on the device and in the host's memory. An update that streams its state, in
// pieces of any size, has the bits of an update that does not. The plan falls by what left the device.
#include "test/model.h" // before gpt.cuh, which it looks into
#include "test/setup.h"
#include "test/testing.h"
#include <string.h>

// Each option gives one dtype; the default is FP32. With 8-bit states, head and embeddings have bf16. The emulator's
// threads are fibers, so it takes only a part of the cases.
static const char *const formats[] = {
    "",
    "--exp-avg-dtype 8bit --exp-avg-sq-dtype bf16",
    "--optimizer muon --exp-avg-dtype 8bit --ema-decay 0.9",
#ifdef PRECISION_BF16
    "--main-params-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype 8bit",
#endif
#ifndef CUDA_EMULATED
    "--exp-avg-dtype bf16",
    "--exp-avg-sq-dtype bf16",
    "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "--exp-avg-dtype 8bit --exp-avg-sq-dtype 8bit",
    "--optimizer muon",
    "--optimizer muon --exp-avg-dtype bf16 --muon-split-qkv groups",
#ifdef PRECISION_BF16
    "--main-params-dtype bf16",
    "--main-params-dtype bf16 --optimizer muon",
#endif
#endif
};
enum { FORMATS = sizeof formats / sizeof *formats };
// Fractions at which the cut lies within a layer, within the first tensors, or near the end; the last one: everything.
static const char *const fractions[] = {
    "0.37",
#ifndef CUDA_EMULATED
    "0.99",
    "0.02",
    "1",
#endif
};
enum { FRACTIONS = sizeof fractions / sizeof *fractions };

// What updates leave: parameters, and each state as it is stored.
struct states {
    struct outcome steps;
    char *native[STATE_COUNT];
    size_t bytes[STATE_COUNT];
};
static struct states states_of_now(struct setup *s) {
    struct states r;
    const struct optimizer *o = &s->model->optimizer;
    memset(&r, 0, sizeof r);
    r.steps.flat = s->model->table.trained.flat;
    r.steps.params = (floatX *)test_alloc((size_t)r.steps.flat * sizeof *r.steps.params);
    r.steps.grads = (float *)calloc((size_t)r.steps.flat, sizeof *r.steps.grads);
    memcpy(r.steps.params, s->model->zero.params, (size_t)r.steps.flat * sizeof *r.steps.params);
    for (int id = 0; id < STATE_COUNT; id++) {
        if (!optimizer_holds(o, (enum optimizer_state)id))
            continue;
        r.bytes[id] = state_offset(o, (enum optimizer_state)id, o->elements);
        r.native[id] = (char *)test_alloc(r.bytes[id]);
        optimizer_download(o, (enum optimizer_state)id, 0, o->elements, r.native[id]);
    }
    return r;
}
// Returns the states after two steps.
static struct states states_of(struct setup *s) {
    struct outcome steps = two_steps(s);
    struct states r = states_of_now(s);
    outcome_free(&r.steps);
    r.steps = steps;
    return r;
}
static void states_free(struct states *r) {
    outcome_free(&r->steps);
    for (int id = 0; id < STATE_COUNT; id++)
        free(r->native[id]);
}
static void assert_same_states(const struct states *a, const struct states *b, const char *what) {
    assert_same_bits(&a->steps, &b->steps, what);
    for (int id = 0; id < STATE_COUNT; id++) {
        assert_true(a->bytes[id] == b->bytes[id]);
        if (a->bytes[id] > 0 && memcmp(a->native[id], b->native[id], a->bytes[id]) != 0)
            fail_msg("%s: %s differ", what, optimizer_state_rows[id].name);
    }
}

static void same_bits(const char *shape) {
    for (int f = 0; f < FORMATS; f++) {
        if (!takes_case(f, 2))
            continue;
        struct setup whole = setup_of(shape, formats[f]);
        struct states expected = states_of(&whole);
        assert_true(whole.model->optimizer.piece == 0);
        for (int k = 0; k < FRACTIONS; k++) {
            char options[256];
            if ((f + k) % 2 && FRACTIONS > 1 && !in_long_run())
                continue;
            snprintf(options, sizeof options, "%s --optimizer-cpu-offload --optimizer-offload-fraction %s", formats[f],
                     fractions[k]);
            struct setup s = setup_of(shape, options);
            assert_true(s.model->optimizer.piece > 0 && s.model->optimizer.cut < s.model->optimizer.elements);
            for (int direction = 0; direction < k % 4; direction++) // none, one or both directions are copied late
                transfers_postpone_copies(&s.model->timeline.transfers, (enum transfer_direction)(direction % 2));
            struct states streamed = states_of(&s);
            assert_same_states(&expected, &streamed, options);
            states_free(&streamed);
            setup_free(&s);
        }
        states_free(&expected);
        setup_free(&whole);
    }
}
static void streamed_updates_have_the_bits_of_whole_ones_gpt2(void **state) { same_bits(GPT2); }
static void streamed_updates_have_the_bits_of_whole_ones_llama(void **state) { same_bits(LLAMA); }

// Checks that every tensor's state changes in a step, wherever it lies.
static void each_state_is_updated_by(const char *optimizer) {
    char options[256];
    snprintf(options, sizeof options, "%s --optimizer-cpu-offload --optimizer-offload-fraction 0.5", optimizer);
    struct setup s = setup_of(LLAMA, options);
    float *before[STATE_COUNT];
    for (int id = 0; id < STATE_COUNT; id++)
        before[id] = state_values(s.model, (enum optimizer_state)id);
    struct outcome o = two_steps(&s);
    for (int id = 0; id < STATE_COUNT; id++) {
        float *after = state_values(s.model, (enum optimizer_state)id);
        for (int i = 0; i < s.model->table.num_tensors; i++) {
            const struct tensor *t = &s.model->table.tensors[i];
            if (optimizer_state_rows[id].start != STATE_FROM_PARAMETERS &&
                optimizer_format(&s.model->optimizer, (enum optimizer_state)id, t) == FORMAT_NONE)
                continue;
            if (!memcmp(before[id] + t->offset, after + t->offset, (size_t)t->count * sizeof *after))
                fail_msg("a step leaves the %s of %s as they were", optimizer_state_rows[id].name, t->name);
        }
        free(after);
        free(before[id]);
    }
    outcome_free(&o);
    setup_free(&s);
}

static void each_state_is_updated(void **state) {
    each_state_is_updated_by("");
    each_state_is_updated_by("--optimizer muon");
}

// Checks that averages equal averages in double after each step. In the parameters' place they are what the parameters'
// type rounds them to, wherever states and parameters lie; a second swap gives every byte back.
static void check_averages(const char *options) {
    struct setup s = setup_of(LLAMA, options);
    struct gpt *m = s.model;
    const int64_t n = m->table.trained.flat;
    float *start = state_values(m, STATE_MASTER);
    double *expected = floats_to_doubles(start, n);
    free(start);
    for (int step = 0; step < 3; step++) {
        for (int i = 0; i < m->steps.most; i++)
            setup_micro_step(&s, i % 2, 1.0 / m->steps.most);
        gpt_update(m, step + 1, 1e-2);
        device_synchronize(m->dev);
        float *values = state_values(m, STATE_MASTER);
        const double early = (1.0 + step + 1) / (10.0 + step + 1), decay = early < 0.2 ? early : 0.2;
        for (int64_t i = 0; i < n; i++)
            expected[i] = decay * expected[i] + (1 - decay) * values[i];
        free(values);
    }
    struct states before = states_of_now(&s);
    float *values = state_values(m, STATE_AVERAGES);
    for (int i = 0; i < m->table.num_tensors; i++) {
        const struct tensor *t = &m->table.tensors[i];
        double *got = floats_to_doubles(values + t->offset, t->count);
        assert_close_at(got, expected + t->offset, t->count, 1e-6, t->name, __FILE__, __LINE__);
        free(got);
    }
    gpt_swap_averages(m);
    device_synchronize(m->dev);
    for (int i = 0; i < m->table.num_tensors; i++)
        for (int64_t at = m->table.tensors[i].offset; at < m->table.tensors[i].offset + m->table.tensors[i].count; at++)
            assert_true(to_float(m->zero.params[at]) == to_float(parameter_rounded(values[at])));
    gpt_swap_averages(m);
    device_synchronize(m->dev);
    struct states after = states_of_now(&s);
    assert_same_states(&before, &after, "two swaps");
    free(values);
    free(expected);
    states_free(&before);
    states_free(&after);
    setup_free(&s);
}
static void averages_take_the_parameters_place(void **state) {
    check_averages("--ema-decay 0.2");
    check_averages(
        "--ema-decay 0.2 --optimizer muon --optimizer-cpu-offload --optimizer-offload-fraction 0.4 --offload-weights");
}

// Checks that a step with a NaN leaves every byte as it was, in every format.
static void a_step_that_is_not_finite_changes_nothing(void **state) {
    for (int f = 0; f < FORMATS; f++)
        for (int offload = 0; offload < 2; offload++) {
            char options[256];
            if (!takes_case(f + offload, 2))
                continue;
            snprintf(options, sizeof options, "%s %s", formats[f],
                     offload ? "--optimizer-cpu-offload --optimizer-offload-fraction 0.6" : "");
            struct setup s = setup_of(GPT2, options);
            struct states before = states_of(&s);
            struct gpt *m = s.model;
            setup_micro_step(&s, 0, NAN);
            setup_micro_step(&s, 1, 0.5);
            update_norm(m, 3, 1e-3);
            device_synchronize(m->dev);
            assert_memory_equal(before.steps.params, m->zero.params, (size_t)m->table.trained.flat * sizeof(floatX));
            for (int id = 0; id < STATE_COUNT; id++) {
                if (before.bytes[id] == 0)
                    continue;
                char *now = (char *)test_alloc(before.bytes[id]);
                optimizer_download(&m->optimizer, (enum optimizer_state)id, 0, m->optimizer.elements, now);
                assert_memory_equal(now, before.native[id], before.bytes[id]);
                free(now);
            }
            states_free(&before);
            setup_free(&s);
        }
}

// ---- Learning-rate multipliers ----

// Returns the master weights after one step.
static float *masters_after_a_step(const char *shape, const char *options, double lr, struct setup *s) {
    *s = setup_of(shape, options);
    for (int i = 0; i < s->model->steps.most; i++)
        setup_micro_step(s, i % 2, 1.0 / s->model->steps.most);
    update_norm(s->model, 1, lr);
    return state_values(s->model, STATE_MASTER);
}
// Returns the option of a tensor's multiplier, by the tensor's name.
static const char *multiplier_of(const char *name) {
    if (strcmp(name, "wte") == 0 || strcmp(name, "wpe") == 0)
        return "embedding";
    if (strcmp(name, "lm_head") == 0)
        return "head";
    return strstr(name, "ln") || strstr(name, "norm") || strstr(name, "bias") ? "vector" : "matrix";
}
// Checks a multiplier of 0.5: the tensors of its group are as after a step with half the learning rate, but for the
// rounding of 1 - lr weight_decay; the others have the bits of a step without multipliers.
static void check_multiplier(const char *shape, const char *group, int expected_tensors) {
    char options[64];
    snprintf(options, sizeof options, "--%s-lr-mult 0.5", group);
    struct setup with, whole, half;
    float *got = masters_after_a_step(shape, options, 1e-2, &with);
    float *at_lr = masters_after_a_step(shape, "", 1e-2, &whole),
          *at_half = masters_after_a_step(shape, "", 5e-3, &half);
    int tensors = 0;
    for (int i = 0; i < with.model->table.num_tensors; i++) {
        const struct tensor *t = &with.model->table.tensors[i];
        const bool scaled = strcmp(multiplier_of(t->name), group) == 0;
        tensors += scaled;
        for (int64_t k = t->offset; k < t->offset + t->count; k++) {
            const double expected = scaled ? at_half[k] : at_lr[k];
            if (fabs(got[k] - expected) > (scaled ? 0x1p-22 * (fabs(expected) + 5e-3) : 0))
                fail_msg("%s: %s[%lld] is %.9g, not %.9g", options, t->name, (long long)(k - t->offset), (double)got[k],
                         expected);
        }
    }
    assert_int_equal(tensors, expected_tensors);
    free(got);
    free(at_lr);
    free(at_half);
    setup_free(&with);
    setup_free(&whole);
    setup_free(&half);
}
static void multipliers_are_of_their_groups_alone(void **state) {
    const int layers = atoi(LAYERS);
    check_multiplier(GPT2, "embedding", 2);
    check_multiplier(GPT2, "vector", 8 * layers + 2);
#ifndef CUDA_EMULATED
    check_multiplier(GPT2, "matrix", 4 * layers);
    check_multiplier(LLAMA, "embedding", 1);
    check_multiplier(LLAMA, "head", 1);
    check_multiplier(LLAMA, "vector", 3 * layers + 1);
    check_multiplier(LLAMA, "matrix", 4 * layers);
    setup_lora_modules = LORA_QKV | LORA_MLP_PROJ;
    check_multiplier(LLAMA " --lora-rank 1", "matrix", 4 * layers); // only the adapters
    setup_lora_modules = 0;
#endif
}

// Checks that the host has what leaves the device, to the byte, and that the device's arena of states falls by it. The
// slots of the update lie where activations were.
static void the_plan_falls_by_what_left(void **state) {
    struct setup whole = setup_of(LLAMA, ""),
                 half = setup_of(LLAMA, "--optimizer-cpu-offload --optimizer-offload-fraction 0.5"),
                 none = setup_of(LLAMA, "--optimizer-cpu-offload");
    const struct plan *a = &whole.model->timeline.plan, *b = &half.model->timeline.plan,
                      *c = &none.model->timeline.plan;
    const size_t flat = (size_t)whole.model->table.trained.flat, each = sizeof(floatX) == 2 ? 2 + 4 + 4 : 4 + 4;
    assert_int_equal(a->arena_bytes[ARENA_HOST_OPTIMIZER], 0);
    assert_int_equal(c->arena_bytes[ARENA_HOST_OPTIMIZER], flat * each);
    assert_int_equal(a->arena_bytes[ARENA_OPTIMIZER] - c->arena_bytes[ARENA_OPTIMIZER], flat * each);
    assert_int_equal(b->arena_bytes[ARENA_OPTIMIZER] + b->arena_bytes[ARENA_HOST_OPTIMIZER],
                     a->arena_bytes[ARENA_OPTIMIZER]);
    assert_true(b->arena_bytes[ARENA_HOST_OPTIMIZER] * 2 >= flat * each - 2 * STATE_BLOCK * each &&
                b->arena_bytes[ARENA_HOST_OPTIMIZER] * 2 <= flat * each + 2 * STATE_BLOCK * each);
    assert_int_equal(a->arena_bytes[ARENA_ACTIVATIONS], c->arena_bytes[ARENA_ACTIVATIONS]);
    size_t moved[TRANSFER_DIRECTIONS] = {0, 0};
    for (int i = 0; i < c->transfer_count; i++)
        moved[c->transfers[i].direction] += c->transfers[i].bytes;
    assert_int_equal(moved[TRANSFER_TO_HOST], flat * each);
    assert_int_equal(moved[TRANSFER_TO_DEVICE], flat * each);
    setup_free(&whole);
    setup_free(&half);
    setup_free(&none);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(streamed_updates_have_the_bits_of_whole_ones_gpt2),
#ifndef CUDA_EMULATED
        cmocka_unit_test(streamed_updates_have_the_bits_of_whole_ones_llama),
#endif
        cmocka_unit_test(each_state_is_updated),
        cmocka_unit_test(averages_take_the_parameters_place),
        cmocka_unit_test(a_step_that_is_not_finite_changes_nothing),
        cmocka_unit_test(multipliers_are_of_their_groups_alone),
        cmocka_unit_test(the_plan_falls_by_what_left),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
