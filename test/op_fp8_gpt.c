// Training in FP8, on the whole model: recomputation changes no bit, evaluation leaves no trace, gradients are near
// bf16's, kept inputs take the bytes that the table says, and delayed scales follow the amaxes of the steps. There is
// no FP8 with fp32.
#include <malloc.h>       // before testing.h, which may redefine free
#include "test/model.h"   // before gpt.cuh, which it looks into
#include "test/forms.h"   // the forms of the block
#include "test/setup.h"   // models of a few layers, and what a step makes of them
#include "test/testing.h" // assertions

// Widths, and the tokens of a micro-batch, are multiples of 16; in WIDE, for blocks, multiples of 128.
#ifdef CUDA_EMULATED // the emulator's threads are fibers
#define FP8_BATCH " --micro-batch-size 1 --global-batch-size 2 --seq-length 32 --num-layers 2 "
#define WIDE_BATCH " --micro-batch-size 1 --global-batch-size 2 --seq-length 128 --num-layers 2 "
#else
#define FP8_BATCH " --micro-batch-size 4 --global-batch-size 8 --seq-length 20 --num-layers 4 "
#define WIDE_BATCH " --micro-batch-size 2 --global-batch-size 4 --seq-length 64 --num-layers 3 "
#endif
#define FP8_SIZES FP8_BATCH "--ffn-hidden-size 80 --sample-every 0 --sample-tokens 1 "
#define SMALL_FP8 "--vocab-size 150 --loss-chunk-tokens 50" FP8_BATCH "--hidden-size 48 --kv-channels 16 "
#define ROTARY_FP8                                                                                                     \
    SMALL_FP8 "--num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 80 --normalization RMSNorm "             \
              "--position-embedding-type rope --activation swiglu --add-bias-linear=false "
#define GPT2_FP8 SMALL_FP8 "--num-attention-heads 3 --hidden-dropout 0.1 --attention-dropout 0.2 "
#define WIDE                                                                                                           \
    "--vocab-size 150 --loss-chunk-tokens 50" WIDE_BATCH "--hidden-size 128 --num-attention-heads 4 --kv-channels 32 "
#define TENSORWISE " --fp8-format hybrid "
#define DELAYED                                                                                                        \
    " --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 3 --fp8-amax-compute-algo max --fp8-margin 1 "
#define BLOCKWISE " --fp8-format e4m3 --fp8-recipe blockwise "
#define FORWARD "--fp8-dot-product-attention forward "
#define FULL "--fp8-dot-product-attention full "
// Which forms of attention in FP8 run. A GPU's are cuDNN's, whose backward on compute capability 9.0 takes only heads of
// 128: the emulator runs one form with forward, by cuDNN's stand-in.
#ifdef CUDA_EMULATED
enum { ATTENTION_FIRST = 2, ATTENTION_FORMS = 1, FULL_ATTENTION = 0 };
#elif defined(TARGET_CUDA)
enum { ATTENTION_FIRST = 0, ATTENTION_FORMS = 0, FULL_ATTENTION = 0 };
#else
enum { ATTENTION_FIRST = 0, FULL_ATTENTION = 1 };
#define ATTENTION_FORMS (test_slowness() > 1 ? 2 : 6)
#endif

// The forms in sizes for FP8, and ROTARY with some layers in bf16.
enum { FP8_FORMS_MAX = FORMS + 1 };
struct fp8_form {
    char options[FORM_OPTIONS + 256];
    const char *fp8; // options that only FP8 has
};
static int fp8_forms(struct fp8_form list[FP8_FORMS_MAX]) {
    int count = 0;
    for (int i = 0; i < FORMS; i++)
        if (forms[i].taken_by & FORM_IN_FP8) {
            snprintf(list[count].options, sizeof list->options, "%s %s", form_options(&forms[i]), FP8_SIZES);
            list[count++].fp8 = "";
        }
    snprintf(list[count].options, sizeof list->options, ROTARY_FP8 "--activation geglu ");
    list[count++].fp8 = " --first-last-layers-bf16";
#ifdef CUDA_EMULATED // the emulator's threads are fibers: only GPT-2 by tensors, and Llama with delayed scales
    return 2;
#else
    return count;
#endif
}
static const char *const recipes[] = {TENSORWISE, DELAYED};
static const char *const wide_forms[] = {
    WIDE "--hidden-dropout 0.1 --ffn-hidden-size 256 ",
    WIDE "--num-query-groups 2 --ffn-hidden-size 128 --normalization RMSNorm --activation swiglu "
         "--position-embedding-type rope --add-bias-linear=false ",
};
// Attention in FP8: with and without RoPE, with a norm of q and k, with heads that share K and V, beside layers in bf16.
static const char *const attention_forms[][2] = {
    {ROTARY_FP8, DELAYED FULL},
    {SMALL_FP8 "--num-attention-heads 3 --hidden-dropout 0.1 ", TENSORWISE FULL},
    {ROTARY_FP8 "--qk-layernorm ", DELAYED FORWARD},
    {ROTARY_FP8 "--norm-placement post --qk-layernorm --qk-layernorm-width full ", TENSORWISE FULL},
    {ROTARY_FP8 "--parallel-residual ", TENSORWISE FORWARD},
    {ROTARY_FP8, DELAYED FULL "--first-last-layers-bf16 "},
};
#ifdef CUDA_EMULATED
enum { FORM_STEP = 1, RECIPES = 1, WIDE_FORMS = 1 };
#else
#define FORM_STEP (test_slowness() > 1 ? 2 : 1)
#define RECIPES (test_slowness() > 1 ? 1 : 2)
enum { WIDE_FORMS = sizeof wide_forms / sizeof *wide_forms };
#endif

// Calls f for every form and recipe whose attention is in bf16.
static void for_each_form_of_linear_layers(void (*f)(const char *shape, const char *recipe)) {
    static struct fp8_form list[FP8_FORMS_MAX];
    const int count = fp8_forms(list);
    char recipe[256];
    for (int i = 0; i < count; i += FORM_STEP)
        for (int r = 0; r < RECIPES; r++) {
            const char *name = recipes[RECIPES == 1 ? i / FORM_STEP % 2 : r];
            snprintf(recipe, sizeof recipe, "%s%s", name, list[i].fp8);
            f(list[i].options, recipe);
        }
    for (int i = 0; i < WIDE_FORMS; i++)
        f(wide_forms[i], BLOCKWISE);
}
// Calls f for every form and recipe whose attention is in FP8.
static void for_each_form_of_attention(void (*f)(const char *shape, const char *recipe)) {
    for (int i = ATTENTION_FIRST; i < ATTENTION_FIRST + ATTENTION_FORMS; i++)
        f(attention_forms[i][0], attention_forms[i][1]);
}
static void for_each_form(void (*f)(const char *shape, const char *recipe)) {
    for_each_form_of_linear_layers(f);
    for_each_form_of_attention(f);
}
// Calls f for every form and recipe or, where a call takes long, only for Llama with delayed scales: its histories are
// what is most likely to go wrong.
static void for_each_form_or_delayed(void (*f)(const char *shape, const char *recipe)) {
    if (takes_case(1, 2))
        for_each_form(f);
    else
        f(LLAMA " " FP8_SIZES, DELAYED);
}
// Returns a and b joined, in memory that the next call reuses.
static const char *joined(const char *a, const char *b) {
    static char text[1024];
    snprintf(text, sizeof text, "%s %s", a, b);
    return text;
}

// ---- recomputation and memory ----

// Checks that each policy, and weights that are cast once a step, give the bits of a run that keeps everything and
// casts each time, whatever lies in memory that the plan calls dead.
static void policies_change_no_bit(const char *shape, const char *recipe) {
    static const char *const policies[] = {
        "--fp8-weight-cache always",
        "--recompute-granularity full --fp8-weight-cache always",
        "--recompute-granularity selective --recompute-modules " MODULE_LIST,
#ifndef CUDA_EMULATED
        "",
        "--recompute-granularity full",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        "--recompute-granularity selective",
        "--recompute-granularity selective --recompute-modules qkv",
        "--recompute-granularity selective --recompute-modules mlp",
        "--recompute-granularity selective --recompute-modules activation",
        "--recompute-granularity selective --recompute-modules norm",
#endif
    };
    struct outcome plain = outcome_of(shape, recipe);
    for (size_t i = 0; i < sizeof policies / sizeof *policies; i++) {
        if (!takes_case((int)i + 1, 2))
            continue;
        struct setup s = setup_of(shape, joined(recipe, policies[i]));
        watch_phases(s.model, poison);
        struct outcome o = two_steps(&s);
        assert_same_bits(&plain, &o, policies[i]);
        setup_free(&s);
        outcome_free(&o);
    }
    outcome_free(&plain);
}
static void recomputation_and_poisoned_memory_change_no_bit(void **state) {
    for_each_form(policies_change_no_bit);
#ifndef CUDA_EMULATED
    policies_change_no_bit(GPT2_FP8, DELAYED "--attention-backend unfused");
#endif
}

// Returns the bytes of the layers' buffers that are live in the head's first phase.
static int64_t kept_bytes(const struct gpt *m) {
    const struct plan *plan = &m->timeline.plan;
    int head = 0;
    int64_t kept = 0;
    while (plan->phases[head].group != PHASES_HEAD)
        head++;
    for (int b = 0; b < plan->count; b++) {
        const struct plan_buffer *buffer = &plan->buffers[b];
        if (buffer->arena == ARENA_ACTIVATIONS && buffer->layer >= 0 && buffer->first_phase < head &&
            buffer->last_phase > head)
            kept += (int64_t)buffer->bytes;
    }
    return kept;
}
static void the_plan_keeps_the_table(const char *shape, const char *recipe) {
    static const char *const policies[] = {"", "--recompute-granularity full", "--recompute-granularity selective"};
    for (int i = 0; i < 3; i++) {
        struct setup s = setup_of(shape, joined(recipe, policies[i]));
        assert_int_equal(kept_bytes(s.model),
                         policy_bytes_per_token(&s.model->policy, &s.model->shape.layer) * s.tokens);
        setup_free(&s);
    }
}
// Checks the bytes that are kept per token and layer: GPT-2's 32 C + 4 H + 16 become 26 C + 4 H + 16; a layer with a
// gate keeps 2 C + F fewer. Attention in FP8 saves a byte of each element of q, k, v and of its output.
static void inputs_are_kept_at_a_byte_an_element(void **state) {
    for_each_form(the_plan_keeps_the_table);
    const struct {
        const char *options, *recipe;
        int64_t saved; // bytes per token and layer
    } cases[] = {{SMALL_FP8 "--num-attention-heads 3 ", TENSORWISE, 6 * 48},
                 {ROTARY_FP8, TENSORWISE, 2 * 48 + 80},
                 {SMALL_FP8 "--num-attention-heads 3 ", TENSORWISE FORWARD, 6 * 48 + 3 * 48 + 48},
                 {ROTARY_FP8, DELAYED FULL, 2 * 48 + 80 + 8 * 16 + 4 * 16},
                 {ROTARY_FP8 "--qk-layernorm ", DELAYED FULL, 2 * 48 + 80 + 8 * 16 + 4 * 16}};
    for (int i = 0; i < (FULL_ATTENTION ? 5 : 2); i++) {
        struct setup bf16 = setup_of(cases[i].options, ""), fp8 = setup_of(cases[i].options, cases[i].recipe);
        assert_int_equal(kept_bytes(bf16.model) - kept_bytes(fp8.model),
                         cases[i].saved * bf16.model->shape.L * bf16.tokens);
        setup_free(&bf16);
        setup_free(&fp8);
    }
}

// Returns the peak of a preset's plan; checks that it is at most 2 % above the plan's bound.
static size_t peak_of(const char *preset, const char *recipe, struct device *dev) {
    char options[256];
    snprintf(options, sizeof options, "--preset %s --micro-batch-size 8 %s", preset, recipe);
    const struct config c = config_of_options(options, "");
    const struct fit f = fit_of(&c, ATTENTION_FLASH, dev);
    struct gpt *m = gpt_create(&c, fit_policy(&f), ATTENTION_FLASH, dev);
    const size_t peak = m->timeline.plan.peak_bytes;
    assert_true((double)peak <= 1.02 * (double)m->timeline.plan.lower_bound_bytes);
    gpt_destroy(m);
    return peak;
}
static bool preset_takes_blocks(const char *preset) {
    const struct config c = config_of_options("--preset", preset);
    const int attention = c.model.num_attention_heads * c.model.kv_channels,
              keys = 2 * c.model.num_query_groups * c.model.kv_channels;
    return c.model.hidden_size % 128 == 0 && c.model.ffn_hidden_size % 128 == 0 && attention % 128 == 0 &&
           (attention + keys) % 128 == 0;
}
static bool preset_has_a_window(const char *preset) {
    const struct config c = config_of_options("--preset", preset);
    return config_window(&c) > 0;
}
static void each_presets_peak_is_below_that_of_bf16(void **state) {
    static const char *const with[] = {TENSORWISE, DELAYED, BLOCKWISE};
    struct device dev;
    memset(&dev, 0, sizeof dev);
    dev.threads = 2;
    dev.matmul = matmul_create(&dev);
    for (int i = 0; i < CONFIG_PRESETS; i++) {
        const char *name = presets[i].name;
        const size_t without = peak_of(name, "", &dev);
        for (int k = 0; k < (preset_takes_blocks(name) ? 3 : 2); k++) {
            const size_t peak = peak_of(name, with[k], &dev);
            if (peak >= without)
                fail_msg("%s%s: the peak of %zu bytes is not below bf16's %zu", name, with[k], peak, without);
            if (k == 2 || !FULL_ATTENTION || preset_has_a_window(name))
                continue;
            const size_t with_attention = peak_of(name, joined(with[k], k == 0 ? FULL : FORWARD), &dev);
            if (with_attention >= peak)
                fail_msg("%s%s: attention in FP8 raises the peak from %zu bytes to %zu", name, with[k], peak,
                         with_attention);
        }
    }
    matmul_destroy(dev.matmul);
}

#ifndef TARGET_CUDA // the driver and the emulator use the same heap
// Checks the case of TransformerEngine's issue 1935: delayed scales under full recomputation.
static void steps_allocate_nothing(void **state) {
    struct setup s = setup_of(ROTARY_FP8, DELAYED FULL "--recompute-granularity full");
    struct outcome o = two_steps(&s);
    outcome_free(&o);
    const struct mallinfo2 before = mallinfo2();
    for (int step = 0; step < 30; step++) {
        gpt_micro_step(s.model, 0, batch_of(s.inputs, s.targets), 1);
        gpt_update(s.model, step + 3, 1e-3);
    }
    const struct mallinfo2 after = mallinfo2();
    assert_int_equal(after.uordblks, before.uordblks);
    assert_int_equal(after.hblkhd, before.hblkhd);
    setup_free(&s);
}
#endif

#ifndef TARGET_CUDA
static void threads_change_no_bit_of(const char *shape, const char *recipe) {
    struct outcome one = outcome_of(shape, recipe);
    omp_set_num_threads(3);
    struct outcome three = outcome_of(shape, recipe);
    omp_set_num_threads(1);
    assert_same_bits(&one, &three, "3 threads");
    outcome_free(&one);
    outcome_free(&three);
}
static void threads_change_no_bit(void **state) {
    threads_change_no_bit_of(GPT2_FP8, DELAYED);
    threads_change_no_bit_of(ROTARY_FP8, TENSORWISE);
    threads_change_no_bit_of(wide_forms[0], BLOCKWISE);
    threads_change_no_bit_of(ROTARY_FP8, DELAYED FULL);
}
#endif

// ---- values ----

// Returns a bound for how far gradients are from the same model's gradients without FP8. Rounding to m bits of mantissa
// has a relative error of at most 2^-(m+1), evenly spread: on average sqrt(1/3) of it, over a binade two thirds of
// that. Errors are independent: on the way to a gradient of L layers there are at most 4 L products, each of a gradient
// and of an input and a weight.
static double fp8_distance(const struct gpt *m) {
    const double e4m3 = 0x1p-4 * 0.577 * 0.7, gradient = m->fp8.gradients == FP8_E5M2 ? 2 * e4m3 : e4m3;
    const double one = gradient * gradient + 2 * e4m3 * e4m3;
    return 1.5 * sqrt(4 * m->shape.L * one); // attention subtracts near values, and gates multiply two inexact ones
}
// Undoes enlarge_parameters: with larger logits of attention, errors of q and k would choose other keys altogether.
static void restore_parameters(struct gpt *m) {
    for (int64_t i = 0; i < m->table.trained.flat; i++)
        m->zero.params[i] = to_floatX(to_float(m->zero.params[i]) / 3);
}
static void near_without_fp8(const char *shape, const char *recipe) {
    struct setup with = setup_of(shape, joined(recipe, "--hidden-dropout 0 --attention-dropout 0")),
                 without = setup_of(shape, "--hidden-dropout 0 --attention-dropout 0");
    restore_parameters(with.model);
    restore_parameters(without.model);
    const double a = setup_micro_step(&with, 0, 1), b = setup_micro_step(&without, 0, 1);
    assert_true(isfinite(a) && isfinite(b));
    bool differs = false;
    for (int i = 0; i < with.model->table.num_tensors; i++) {
        const struct tensor *t = &with.model->table.tensors[i];
        const float *x = fp32_gradients(with.model) + t->offset, *y = fp32_gradients(without.model) + t->offset;
        double error = 0, norm = 0;
        for (int64_t j = 0; j < t->count; j++) {
            error += ((double)x[j] - y[j]) * ((double)x[j] - y[j]);
            norm += (double)y[j] * y[j];
        }
        differs = differs || error > 0;
        if (sqrt(error) > fp8_distance(with.model) * sqrt(norm))
            fail_msg("%s%s: the gradient of %s is %.3f of its norm away from bf16's", shape, recipe, t->name,
                     sqrt(error / norm));
    }
    assert_true(differs);
    setup_free(&with);
    setup_free(&without);
}
static void gradients_are_near_those_without_fp8(void **state) { for_each_form_of_linear_layers(near_without_fp8); }
static void attention_in_fp8_has_near_gradients(void **state) { for_each_form_of_attention(near_without_fp8); }

// Checks that a first step, whose histories are empty, casts by the amaxes of its own micro-batch, as tensorwise does.
// The bits are the same, though with delayed scales the activations write FP8 themselves.
static void a_first_delayed_step_has_the_bits_of_tensorwise(void **state) {
    static struct fp8_form list[FP8_FORMS_MAX];
    const int count = fp8_forms(list);
    for (int i = 0; i < count; i += FORM_STEP) {
        struct setup a = setup_of(list[i].options, TENSORWISE), b = setup_of(list[i].options, DELAYED);
        for (int batch = 0; batch < 2; batch++)
            assert_true(setup_micro_step(&a, batch, 1) == setup_micro_step(&b, batch, 1));
        device_synchronize(a.dev);
        device_synchronize(b.dev);
        assert_memory_equal(fp32_gradients(a.model), fp32_gradients(b.model),
                            (size_t)a.model->table.trained.flat * sizeof(float));
        setup_free(&a);
        setup_free(&b);
    }
}

// ---- delayed scales ----

static void step_of(struct setup *s, int step) {
    for (int i = 0; i < 2; i++)
        setup_micro_step(s, i, 0.5);
    gpt_update(s->model, step + 1, 1e-3);
    device_synchronize(s->dev);
}
// Checks that after each step a scale is the largest finite value over the largest amax of the last three steps, halved
// by the margin. The history has the larger amax of the two micro-batches.
static void scales_follow_the_history_of(const char *recipe) {
    enum { LENGTH = 3, STEPS = 5 };
    struct setup s = setup_of(ROTARY_FP8, recipe);
    struct fp8_state *f = &s.model->fp8;
    const int n = fp8_num_scales(f), linears = s.model->shape.L * FP8_KINDS;
    float *seen = (float *)test_alloc((size_t)STEPS * (size_t)n * sizeof *seen);
    for (int step = 0; step < STEPS; step++) {
        for (int i = 0; i < n; i++)
            seen[step * n + i] = 0;
        for (int batch = 0; batch < 2; batch++) {
            setup_micro_step(&s, batch, 0.5);
            for (int i = 0; i < n; i++) {
                float amax;
                memcpy(&amax, &f->scales[i].amax, sizeof amax);
                seen[step * n + i] = amax > seen[step * n + i] ? amax : seen[step * n + i];
            }
        }
        gpt_update(s.model, step + 1, 1e-3);
        device_synchronize(s.dev);
        for (int i = 0; i < n; i++) {
            float largest = 0;
            for (int k = step; k >= 0 && k > step - LENGTH; k--)
                largest = seen[k * n + i] > largest ? seen[k * n + i] : largest;
            assert_true(seen[step * n + i] > 0 && f->history[i * LENGTH] == seen[step * n + i]);
            const bool gradient =
                i < linears ? i % FP8_OPERANDS == FP8_GRADIENT : (i - linears) / s.model->shape.L >= FP8_ATTENTION_DOUT;
            assert_true(f->scales[i].delayed == (gradient ? 57344.0f : 448.0f) / largest / 2);
        }
        assert_int_equal(f->calibrates, false);
    }
    free(seen);
    setup_free(&s);
}
static void scales_follow_the_history(void **state) {
    scales_follow_the_history_of(DELAYED);
    if (FULL_ATTENTION)
        scales_follow_the_history_of(DELAYED FULL);
}

// Checks that validation between steps changes nothing.
static void evaluation_leaves_no_trace(const char *shape, const char *recipe) {
    struct setup a = setup_of(shape, recipe), b = setup_of(shape, recipe);
    for (int step = 0; step < 3; step++) {
        step_of(&a, step);
        step_of(&b, step);
        gpt_evaluate(b.model, setup_batch(&b, 1));
    }
    assert_memory_equal(a.model->zero.params, b.model->zero.params,
                        (size_t)a.model->table.trained.flat * sizeof(floatX));
    setup_free(&a);
    setup_free(&b);
}
static void validation_leaves_no_trace(void **state) { for_each_form_or_delayed(evaluation_leaves_no_trace); }

// Checks a step with an infinite activation: it updates neither parameters nor histories, and the steps after it are as
// in a run without that step.
static void a_skipped_step_leaves_no_trace(const char *shape, const char *recipe) {
    struct setup a = setup_of(shape, recipe), b = setup_of(shape, recipe);
    step_of(&a, 0);
    step_of(&b, 0);
    const struct tensor *t = parameters_find(&b.model->table, -1, PARAM_WTE);
    floatX *p = b.model->zero.params + t->offset + (int64_t)b.inputs[3] * t->cols;
    const floatX before = *p;
    *p = to_floatX(INFINITY);
    step_of(&b, 1);
    assert_int_equal(b.model->io.results->check.finite, 0);
    *p = before;
    for (int step = 1; step < 4; step++) {
        step_of(&a, step);
        b.model->steps.micro_step = a.model->steps.micro_step - 2; // the counter of the dropout masks
        step_of(&b, step);
        assert_int_equal(b.model->io.results->check.finite, 1);
    }
    assert_memory_equal(a.model->zero.params, b.model->zero.params,
                        (size_t)a.model->table.trained.flat * sizeof(floatX));
    setup_free(&a);
    setup_free(&b);
}
static void skipped_steps_leave_no_trace(void **state) { for_each_form_or_delayed(a_skipped_step_leaves_no_trace); }

// Checks that a state that is moved through the host's memory into another model gives the same bits there, and that
// without it the bits are others.
static void the_state_can_be_moved(const char *recipe) {
    struct setup a = setup_of(ROTARY_FP8, recipe);
    float *scales = (float *)test_alloc((size_t)fp8_state_floats(&a.model->fp8) * sizeof *scales);
    for (int step = 0; step < 4; step++)
        step_of(&a, step);
    fp8_state_download(&a.model->fp8, scales, a.dev);
    const size_t bytes = (size_t)a.model->table.trained.flat * sizeof(float);
    for (int with = 0; with < 2; with++) {
        struct setup b = setup_of(ROTARY_FP8, recipe);
        copy_states(b.model, a.model);
        if (with)
            fp8_state_upload(&b.model->fp8, scales, b.dev);
        const double loss = setup_micro_step(&a, 0, 1), same = setup_micro_step(&b, 0, 1);
        assert_int_equal(loss == same && memcmp(fp32_gradients(a.model), fp32_gradients(b.model), bytes) == 0, with);
        setup_free(&b);
    }
    free(scales);
    setup_free(&a);
}

static void the_state_of_scales_can_be_moved(void **state) {
    the_state_can_be_moved(DELAYED);
    if (FULL_ATTENTION) {
        the_state_can_be_moved(DELAYED FULL);
        the_state_can_be_moved(TENSORWISE FULL);
    }
}

// Checks that each kind of tensor of each layer was cast: its scale is set, and the counts are of all these tensors.
static void each_kind_of_tensor_is_cast(const char *shape, const char *recipe) {
    struct setup s = setup_of(shape, recipe);
    const struct fp8_state *f = &s.model->fp8;
    setup_micro_step(&s, 0, 1);
    device_synchronize(s.dev);
    for (int l = 0; l < s.model->shape.L; l++)
        for (int i = 0; i < FP8_KINDS && f->scales; i++) {
            const struct fp8_scale *scale = &f->scales[l * FP8_KINDS + i];
            if ((scale->scale > 0) != fp8_has_layer(f, l))
                fail_msg("%s%s: layer %d, tensor %d has the scale %g", shape, recipe, l, i, (double)scale->scale);
        }
    for (int l = 0; l < s.model->shape.L; l++)
        for (int t = 0; t < f->attention_tensors; t++) {
            const struct fp8_scale *scale = fp8_attention_scale(f, l, (enum fp8_attention_tensor)t);
            if ((scale->scale > 0 && scale->amax > 0) != fp8_has_layer(f, l))
                fail_msg("%s%s: layer %d, attention's tensor %d has the scale %g", shape, recipe, l, t,
                         (double)scale->scale);
        }
    setup_free(&s);
}
static void every_kind_of_tensor_is_cast(void **state) { for_each_form(each_kind_of_tensor_is_cast); }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_kind_of_tensor_is_cast),
        cmocka_unit_test(gradients_are_near_those_without_fp8),
        cmocka_unit_test(attention_in_fp8_has_near_gradients),
        cmocka_unit_test(recomputation_and_poisoned_memory_change_no_bit),
        cmocka_unit_test(inputs_are_kept_at_a_byte_an_element),
        cmocka_unit_test(each_presets_peak_is_below_that_of_bf16),
#ifndef TARGET_CUDA
        cmocka_unit_test(threads_change_no_bit),
        cmocka_unit_test(steps_allocate_nothing),
#endif
        cmocka_unit_test(a_first_delayed_step_has_the_bits_of_tensorwise),
        cmocka_unit_test(scales_follow_the_history),
        cmocka_unit_test(the_state_of_scales_can_be_moved),
        cmocka_unit_test(validation_leaves_no_trace),
        cmocka_unit_test(skipped_steps_leave_no_trace),
    };
    setenv("EMU_CAPABILITY", "9.0", 1); // the emulated GPU's
    setenv("EMU_CUDNN_VERSION", "92800", 1);
    omp_set_num_threads(1); // barriers would take most of the time of ops this small
    return cmocka_run_group_tests(tests, NULL, NULL);
}
