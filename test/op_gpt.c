// The whole model: accumulation, the memory plan against what runs, sampling. op_golden.c compares it with PyTorch.
#include <malloc.h>     // mallinfo2; before testing.h, which may redefine free
#include "test/model.h" // before gpt.cuh, which it looks into
#include "kernels/device.cuh"
#include "test/forms.h" // the forms of the block
#include "test/setup.h" // models of a few layers, and what a step makes of them
#include "test/testing.h"

#include "run/sample.cuh"
#include <string.h>

// ---- recomputation ----

static void every_module_drops_an_activation(void **state) {
    const struct config config = config_of_options("--preset demo", "");
    const struct layer_shape shape = model_shape_of(&config, sizeof(floatX), false).layer;
    uint32_t all = 0;
    for (int i = 0; i < NUM_MODULES; i++) {
        const uint32_t module = recompute_modules_of(module_names[i], false), dropped = modules_dropped(module, &shape);
        char text[sizeof(MODULE_LIST)];
        assert_true(module != 0 && (module & all) == 0);
        assert_string_equal(modules_text(text, sizeof text, module), module_names[i]);
        if (dropped == 0)
            fail_msg("no row of activations names the module %s", module_names[i]);
        // What is dropped is recomputed, and so none of it stays from forward to backward.
        struct recompute_policy policy = policy_selective(1, module, &shape);
        assert_true((policy.kept[0] & dropped) == 0 && (policy_recomputed(&policy, 0, &shape) & dropped) == dropped);
        policy_free(&policy);
        all |= module;
    }
    char text[sizeof(MODULE_LIST)];
    assert_string_equal(modules_text(text, sizeof text, all), MODULE_LIST);
    assert_true(recompute_modules_of("", false) == (MODULE_NORM | MODULE_ACTIVATION));
    assert_true(recompute_modules_of("", true) == MODULE_CORE_ATTN);
    assert_true(recompute_modules_of("mlp", true) == MODULE_MLP);
}

// Checks the bytes that a layer keeps for a token, by the formula of the modern transformer layer, in 16 bits: 4h norm
// inputs, 4h norm outputs, 2d(a + 2kv) q, k, v, 2ad attention output, 4a log-sum-exps, 4f GELU or 6f SwiGLU, and the
// norms' statistics.
static void test_activation_bytes(void **state) {
    static const struct {
        int h, a, kv, f;
        bool swiglu;
    } shapes[] = {
        {768, 12, 12, 3072, false}, {768, 12, 3, 3072, false}, {768, 12, 1, 2048, true}, {4096, 32, 8, 14336, true}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int wide = 1; wide <= 2; wide++) { // fp32 doubles everything except log-sum-exps and statistics
            const int h = shapes[i].h, a = shapes[i].a, kv = shapes[i].kv, f = shapes[i].f, d = h / a;
            const bool swiglu = shapes[i].swiglu;
            const struct layer_shape s = {h, a, kv, d, f, 1024, 2 * wide, swiglu, "act", swiglu ? 1 : 2, false, true};
            const int64_t statistics = swiglu ? 2 * 4 : 2 * 8;
            const int64_t norm_inputs = 4 * h * wide, norm_outputs = 4 * h * wide, qkv = 2 * d * (a + 2 * kv) * wide;
            const int64_t core = 2 * a * d * wide + 4 * a, act = 2 * f * wide, fc = (swiglu ? 4 : 2) * f * wide;
            const int64_t all = norm_inputs + norm_outputs + qkv + core + act + fc + statistics;
            struct expected {
                struct recompute_policy policy;
                int64_t bytes;
            } cases[] = {
                {policy_keep_all(2), all},
                {policy_uniform(2, 1), 2 * h * wide},
                {policy_selective(2, MODULE_CORE_ATTN, &s), all - core},
                {policy_selective(2, MODULE_NORM, &s), all - norm_outputs},
                {policy_selective(2, MODULE_ACTIVATION, &s), all - act},
                {policy_selective(2, MODULE_MLP, &s), all - act - fc},
                {policy_selective(2, MODULE_QKV, &s), all - qkv},
                {policy_selective(2, MODULE_NORM | MODULE_ACTIVATION, &s), all - norm_outputs - act},
                {policy_full_in_first_layers(2, 1), (all + 2 * h * wide) / 2},
            };
            for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
                assert_int_equal(policy_bytes_per_token(&cases[k].policy, &s), 2 * cases[k].bytes);
                policy_free(&cases[k].policy);
            }
            if (!swiglu && kv == a && wide == 1) // llm.c with cuDNN attention at -r 0: 32C + 4NH + 16
                assert_int_equal(all, 32 * h + 4 * a + 16);
        }
}

// Checks known figures: in 16 bits Llama3-8B's layer keeps 34h, without log-sum-exps and statistics. Megatron's and the
// paper's unfused attention also keeps the probabilities.
static void test_activation_bytes_known(void **state) {
    const struct layer_shape llama = {4096, 32, 8, 128, 14336, 4096, 2, true, "swiglu", 1, false, true};
    assert_int_equal(activation_bytes(ACT_ALL, &llama), 34 * 4096 + 4 * 32 + 8);
    const struct layer_shape unfused = {768, 12, 12, 64, 3072, 1024, 2, false, "gelu", 2, true, true};
    assert_int_equal(activation_bytes(ACT_ALL, &unfused), 32 * 768 + 2 * 12 * 1024 + 16);
}

// Checks that the plan keeps, from the last forward to the first backward, the table's sum, and stores nothing twice: a
// layer's input is the output of the layer before.
static void test_plan_keeps_what_the_table_says(void **state) {
    static const char *const policies[] = {"", "--recompute-granularity full", "--recompute-granularity selective"};
    for (int i = 0; i < 3; i++) {
        struct setup s = setup_of(LLAMA, policies[i]);
        const struct gpt *m = s.model;
        int head = 0;
        while (m->timeline.plan.phases[head].group != PHASES_HEAD)
            head++;
        int64_t kept = 0;
        for (int b = 0; b < m->timeline.plan.count; b++) {
            const struct plan_buffer *buffer = &m->timeline.plan.buffers[b];
            if (buffer->arena == ARENA_ACTIVATIONS && buffer->layer >= 0 && buffer->first_phase < head &&
                buffer->last_phase > head)
                kept += (int64_t)buffer->bytes;
        }
        assert_int_equal(kept, policy_bytes_per_token(&m->policy, &m->shape.layer) * s.tokens);
        setup_free(&s);
    }
}

// ---- the plan ----

static void poisoned_memory_changes_no_bit(const char *shape) {
    static const char *const policies[] = {
        "", "--recompute-granularity selective",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        "--attention-backend unfused"};
    for (size_t i = 0; i < sizeof policies / sizeof *policies; i++) {
        if (!takes_case((int)i + (strcmp(shape, GPT2) == 0),
                        2)) // GPT-2 under the second policy and the last one, Llama under the others
            continue;
        struct outcome plain = outcome_of(shape, policies[i]);
        struct setup s = setup_of(shape, policies[i]);
        watch_phases(s.model, poison);
        struct outcome poisoned = two_steps(&s);
        assert_same_bits(&plain, &poisoned, policies[i]);
        assert_true(isfinite(loss_mean(gpt_evaluate(s.model, batch_of(s.inputs, s.targets)))));
        setup_free(&s);
        outcome_free(&plain);
        outcome_free(&poisoned);
    }
}
static void test_poison_gpt2(void **state) { poisoned_memory_changes_no_bit(GPT2); }
static void test_poison_llama(void **state) { poisoned_memory_changes_no_bit(LLAMA); }

// Checks every preset and policy: the peak is within 2 % of the largest live sum. Planning allocates nothing of a
// model.
static void test_plans_are_tight(void **state) {
    static const char *const names[] = {"gpt2-124m", "gpt2-350m",    "gpt2-774m",    "gpt2-1558m", "llama3.2-1b",
                                        "llama3-8b", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "demo"};
    static const char *const policies[] = {
        "",
        "--recompute-granularity selective",
        "--recompute-granularity selective --recompute-modules mlp,qkv",
        "--recompute-granularity full",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 4",
        "--recompute-granularity full --mlp-chunk-tokens 256"};
    struct device dev;
    memset(&dev, 0, sizeof dev);
    dev.threads = 2;
    dev.matmul = matmul_create(&dev);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        for (size_t k = 0; k < sizeof policies / sizeof *policies; k++) {
            char options[256];
            snprintf(options, sizeof options, "--preset %s --sample-every 1 %s", names[i], policies[k]);
            const struct config config = config_of_options(options, "");
            const struct fit f = fit_of(&config, ATTENTION_FLASH, &dev);
            struct gpt *m = gpt_create(&config, fit_policy(&f), ATTENTION_FLASH, &dev);
            const double ratio = (double)m->timeline.plan.peak_bytes / (double)m->timeline.plan.lower_bound_bytes;
            if (!(ratio <= 1.02))
                fail_msg("%s: the peak is %.4f x the largest live sum", options, ratio);
            gpt_destroy(m);
        }
    matmul_destroy(dev.matmul);
}

// Checks that chunks of the MLP lower the peak of long sequences. At 128k tokens under full recomputation the MLP's
// activations and their gradients are most of the peak; in chunks they are not.
static void chunks_lower_the_peak_of_long_sequences(void **state) {
    struct device dev;
    size_t peak[2];
    memset(&dev, 0, sizeof dev);
    dev.threads = 2;
    dev.matmul = matmul_create(&dev);
    for (int i = 0; i < 2; i++) {
        const struct config config = config_of_options(
            "--preset llama3-8b --seq-length 131072 --max-position-embeddings 131072 --recompute-granularity full",
            i ? "--mlp-chunk-tokens 8192" : "");
        const struct fit f = fit_of(&config, ATTENTION_FLASH, &dev);
        struct gpt *m = gpt_create(&config, fit_policy(&f), ATTENTION_FLASH, &dev);
        const struct plan *plan = &m->timeline.plan;
        int phase = 0;
        for (int p = 0; p < plan->phase_count; p++)
            phase = strstr(plan->phases[p].name, "of a chunk") ? p : phase;
        assert_int_equal(phase > 0, i);
        peak[i] = plan->arena_bytes[ARENA_ACTIVATIONS];
        assert_true((double)plan->peak_bytes <= 1.02 * (double)plan->lower_bound_bytes);
        const struct layer_shape *s = &m->shape.layer;
        const int64_t n = mlp_chunk_default(s, 131072, 200);
        assert_true(n >= 4096 && n <= 16384);
        gpt_destroy(m);
    }
    const size_t width = (size_t)131072 * 4096 * sizeof(floatX);
    assert_true(peak[1] + 12 * width <= peak[0]);
    matmul_destroy(dev.matmul);
}

// ---- the step ----

// Checks that k micro-batches with scale 1/k equal one batch of k: losses and gradients, within rounding.
static void accumulation_equals_batch(const char *shape) {
    const double tolerance = sizeof(floatX) == 2 ? 3e-2 : 1e-5; // bf16: a token's gradients are rounded to 2^-8
    char options[160];
    snprintf(options, sizeof options, "--hidden-dropout 0 --attention-dropout 0");
    struct setup one = setup_of(shape, options);
    snprintf(options, sizeof options, "--hidden-dropout 0 --attention-dropout 0 --micro-batch-size " TWO_BATCHES);
    struct setup two = setup_of(shape, options);
    double loss = 0;
    for (int i = 0; i < 2; i++)
        loss += 0.5 * micro_step_loss_of(one.model, i, setup_batch(&one, i), 0.5);
    const double whole = micro_step_loss_of(two.model, 0, setup_batch(&one, 0), 1);
    assert_near(loss, whole, tolerance * whole, 0);
    assert_close_gradients(one.model, two.model, tolerance);
    setup_free(&one);
    setup_free(&two);
}
static void accumulation_equals_a_batch_in_every_form(void **state) {
    for (int i = 0; i < FORMS; i++)
        if (takes_case(i, 4))
            accumulation_equals_batch(form_options(&forms[i]));
}

static void test_same_bits_again(void **state) {
    struct outcome a = outcome_of(GPT2, ""), b = outcome_of(GPT2, "");
    assert_same_bits(&a, &b, "the same run again");
    outcome_free(&a);
    outcome_free(&b);
}

// ---- every row of a table is used ----

// Checks that a step writes each state of the optimizer, for each tensor that has it.
static void step_updates_each_state(const char *options) {
    struct setup s = setup_of(LLAMA, options);
    struct gpt *m = s.model;
    float *before[STATE_COUNT];
    for (int id = 0; id < STATE_COUNT; id++)
        before[id] = state_values(m, (enum optimizer_state)id);
    struct outcome o = two_steps(&s);
    for (int id = 0; id < STATE_COUNT; id++) {
        float *after = state_values(m, (enum optimizer_state)id);
        for (int t = 0; t < m->table.num_tensors; t++) {
            const struct tensor *tensor = &m->table.tensors[t];
            if (optimizer_state_rows[id].start != STATE_FROM_PARAMETERS &&
                optimizer_format(&m->optimizer, (enum optimizer_state)id, tensor) == FORMAT_NONE)
                continue;
            if (!memcmp(before[id] + tensor->offset, after + tensor->offset, (size_t)tensor->count * sizeof(float)))
                fail_msg("a step leaves the %s of %s as they were", optimizer_state_rows[id].name, tensor->name);
        }
        free(after);
        free(before[id]);
    }
    outcome_free(&o);
    setup_free(&s);
}

static void a_step_updates_each_state(void **state) {
    step_updates_each_state("");
    step_updates_each_state("--optimizer muon --ema-decay 0.9");
}

// Checks that padded rows of the vocabulary are zero at the start, get no gradient, and stay zero.
static void test_padding_is_invisible(void **state) {
    struct setup s = setup_of(LLAMA, "");
    struct outcome o = two_steps(&s);
    outcome_free(&o);
    const enum parameter tables[] = {PARAM_WTE, PARAM_LM_HEAD};
    for (int i = 0; i < 2; i++) {
        const struct tensor *t = parameters_find(&s.model->table, -1, tables[i]);
        assert_int_equal(t->rows, 256);
        assert_int_equal(t->visible_rows, 150);
        for (int64_t j = (int64_t)t->visible_rows * t->cols; j < t->count; j++) {
            assert_true(fp32_gradients(s.model)[t->offset + j] == 0);
            assert_true(to_float(s.model->zero.params[t->offset + j]) == 0);
        }
    }
    setup_free(&s);
}

// Returns the gradient norm of a step of one micro-batch, after a step of `before` micro-batches.
static double norm_of_one(struct setup *s, int before) {
    for (int i = 0; i < before; i++)
        setup_micro_step(s, i % 2, 1.0 / before);
    if (before > 0)
        update_norm(s->model, 1, 0);
    s->model->steps.of_step = 1;
    setup_micro_step(s, 0, 1);
    return update_norm(s->model, 2, 1e-3);
}
// Checks that a step of fewer micro-batches than planned equals, to the bit, a step of a model with the smaller batch.
// What larger steps left behind counts only in two ways. Stochastic rounding depends on the step. And delayed scales of
// a larger step, whose micro-batches have smaller gradients, saturate.
static void steps_of_fewer_micro_batches_are_those_of_a_smaller_batch(void **state) {
    static const struct {
        const char *options;
        double tolerance; // after a larger step; INFINITY: any difference will do
    } cases[] = {
        {"", 0},
        {"--offload-gradients", 0},
        {"--main-grads-dtype bf16", 0.01},
#ifdef PRECISION_BF16
        {"--fp8-format hybrid --ffn-hidden-size 96 --seq-length 48", 0},
        {"--fp8-format hybrid --fp8-recipe delayed --ffn-hidden-size 96 --seq-length 48", INFINITY},
#endif
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (!takes_case((int)i, 2))
            continue;
        char small[256];
        snprintf(small, sizeof small, "%s --global-batch-size %s", cases[i].options, BATCH);
        struct setup one = setup_of(LLAMA, small), two = setup_of(LLAMA, cases[i].options),
                     fresh = setup_of(LLAMA, cases[i].options);
        assert_true(one.model->steps.most == 1 && two.model->steps.most == 2);
        const double expected = norm_of_one(&one, 0), got = norm_of_one(&two, 2);
        assert_true(norm_of_one(&fresh, 0) == expected);
        if (!(fabs(got / expected - 1) <= cases[i].tolerance))
            fail_msg("%s: a gradient norm of %.9g, not %.9g", cases[i].options, got, expected);
        setup_free(&one);
        setup_free(&two);
        setup_free(&fresh);
    }
}

// Checks that with --zero-init-projections a model of any depth begins as a model of one layer, to the bit, and that
// all other parameters begin as without the option.
static void projections_that_begin_at_0_make_blocks_the_identity(void **state) {
    static const char *const shapes[] = {GPT2, LLAMA, LLAMA " --norm-placement sandwich"};
    for (int k = 0; k < 3; k++) {
        struct setup s[] = {setup_of(shapes[k], "--zero-init-projections"),
                            setup_of(shapes[k], "--zero-init-projections --num-layers 1"), setup_of(shapes[k], "")};
        double losses[3];
        for (int i = 0; i < 3; i++) {
            gpt_initialize(s[i].model);
            losses[i] = gpt_evaluate(s[i].model, setup_batch(&s[i], 0)).sum;
        }
        assert_true(isfinite(losses[0]) && losses[0] == losses[1] && losses[0] != losses[2]);
        for (int i = 0; i < s[0].model->table.num_tensors; i++) {
            const struct tensor *t = &s[0].model->table.tensors[i];
            const bool projection = strstr(t->name, "proj.weight") != NULL;
            const floatX *with = s[0].model->zero.params + t->offset, *without = s[2].model->zero.params + t->offset;
            for (int64_t j = 0; j < t->count && projection; j++)
                assert_true(to_float(with[j]) == 0);
            if ((memcmp(with, without, (size_t)t->count * sizeof *with) == 0) == projection)
                fail_msg("%s: initial values", t->name);
        }
        for (int i = 0; i < 3; i++)
            setup_free(&s[i]);
    }
}

#ifndef TARGET_CUDA // the driver and the emulator use the same heap
// Checks that from the second step on the heap's size stays. LLVM's OpenMP runtime allocates 512 bytes as a thread
// enters a loop, and a thread other than the measuring one may still hold these. So one of several rounds must find the
// heap unchanged, which none does if a step keeps memory.
static void test_steps_allocate_nothing(void **state) {
#ifdef __clang__
    enum { ROUNDS = 10 };
#else
    enum { ROUNDS = 1 };
#endif
    struct setup s = setup_of(LLAMA, "--recompute-granularity selective");
    struct outcome o = two_steps(&s);
    outcome_free(&o);
    struct mallinfo2 before, after;
    int round = 0;
    do {
        before = mallinfo2();
        for (int step = 0; step < 3; step++) {
            gpt_micro_step(s.model, 0, batch_of(s.inputs, s.targets), 1);
            gpt_update(s.model, step + 3, 1e-3);
            gpt_evaluate(s.model, batch_of(s.inputs, s.targets));
        }
        after = mallinfo2();
    } while (++round < ROUNDS && (after.uordblks != before.uordblks || after.hblkhd != before.hblkhd));
    assert_int_equal(after.uordblks, before.uordblks);
    assert_int_equal(after.hblkhd, before.hblkhd);
    setup_free(&s);
}
#endif

// Checks that the model learns: on a fixed batch the loss falls by a lot.
static void test_overfits_a_batch(void **state) {
    struct setup s = setup_of(LLAMA, "");
    double first = 0, last = 0;
    for (int step = 0; step < 60; step++) {
        last = micro_step_loss(s.model, 0, s.inputs, s.targets, 1);
        first = step == 0 ? last : first;
        gpt_update(s.model, step + 1, 3e-3);
    }
    assert_true(last < 0.5 * first);
    setup_free(&s);
}

static void test_sampling(void **state) {
    const float logits[6] = {0, 1, 2, 3, 4, 5};
    float scratch[12];
    assert_int_equal(sample_token(logits, 6, 0, 0, 1, 0.5, scratch), 5);
    int counts[6] = {0};
    for (int i = 0; i < 1000; i++)
        counts[sample_token(logits, 6, 1, 3, 1, i / 1000.0, scratch)]++;
    assert_int_equal(counts[0] + counts[1] + counts[2], 0);
    const double sum = exp(0) + exp(-1) + exp(-2);
    for (int v = 3; v < 6; v++)
        assert_near(counts[v] / 1000.0, exp(v - 5) / sum, 0.002, v); // u takes each thousandth once
    assert_int_equal(sample_token(logits, 6, 1, 0, 1, 0.9999999, scratch), 5);
    // Of all six, the last one has the probability 0.634, and the last two have 0.867.
    int seen[6] = {0};
    for (int i = 0; i < 1000; i++) {
        assert_int_equal(sample_token(logits, 6, 1, 0, 0.63, i / 1000.0, scratch), 5);
        seen[sample_token(logits, 6, 1, 0, 0.86, i / 1000.0, scratch)]++;
        assert_int_equal(sample_token(logits, 6, 1, 2, 0.7, i / 1000.0, scratch), 5); // of the top two it has 0.731
    }
    assert_int_equal(seen[4] + seen[5], 1000);
    assert_near(seen[5] / 1000.0, 1 / (1 + exp(-1)), 0.002, 5);
}

static int descending(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}
// Checks selections against sorted values, many of them equal, and draws against sums from the first weight on.
static void selections_and_draws_equal_those_of_sorted_weights(void **state) {
    enum { N = 1000 };
    float x[N], sorted[N], scratch[N];
    uint64_t random = 9;
    for (int round = 0; round < 40; round++) {
        double sum = 0, reached = 0;
        for (int i = 0; i < N; i++) {
            x[i] = (float)(test_random(&random) % (uint64_t)(2 + round * round));
            sum += x[i];
        }
        memcpy(sorted, x, sizeof x);
        qsort(sorted, N, sizeof *sorted, descending);
        for (int i = 0; i < N && sorted[i] > 0; i++) {
            reached += sorted[i]; // integers, whose sums are exact
            assert_true(smallest_of_share(x, N, (reached - 0.5) / sum, scratch) == sorted[i]);
            memcpy(scratch, x, sizeof x);
            assert_true(kth_largest(scratch, N, i + 1) == sorted[i]);
        }
        assert_true(smallest_of_share(x, N, 0, scratch) == sorted[0]);
        reached = 0;
        for (int i = 0; i < N; i++) {
            reached += x[i];
            if (x[i] > 0)
                assert_int_equal(draw(x, N, (reached - 0.5) / sum), i);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_module_drops_an_activation),
        cmocka_unit_test(test_activation_bytes),
        cmocka_unit_test(test_activation_bytes_known),
        cmocka_unit_test(test_plan_keeps_what_the_table_says),
        cmocka_unit_test(test_plans_are_tight),
        cmocka_unit_test(chunks_lower_the_peak_of_long_sequences),
#ifndef CUDA_EMULATED // training runs test these on the emulator (test_cuda_engine.py)
        cmocka_unit_test(test_overfits_a_batch),
#endif
#ifndef TARGET_CUDA
        cmocka_unit_test(test_steps_allocate_nothing),
#endif
        cmocka_unit_test(a_step_updates_each_state),
        cmocka_unit_test(test_poison_gpt2),
        cmocka_unit_test(test_poison_llama),
        cmocka_unit_test(accumulation_equals_a_batch_in_every_form),
        cmocka_unit_test(test_same_bits_again),
        cmocka_unit_test(test_padding_is_invisible),
        cmocka_unit_test(steps_of_fewer_micro_batches_are_those_of_a_smaller_batch),
        cmocka_unit_test(projections_that_begin_at_0_make_blocks_the_identity),
        cmocka_unit_test(test_sampling),
        cmocka_unit_test(selections_and_draws_equal_those_of_sorted_weights),
    };
    setenv("EMU_CAPABILITY", "8.9", 1); // the emulated GPU's: it has FP8
    return cmocka_run_group_tests(tests, NULL, NULL);
}
