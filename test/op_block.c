// The block in every form that options give it: recomputation changes no bit; gradients are the loss's; prompts and KV
// cache give the losses of whole sequences; packed documents give the losses and gradients of single documents.
#include <malloc.h>       // before testing.h, which may redefine free
#include "test/model.h"   // before gpt.cuh, which it looks into
#include "test/forms.h"   // the forms of the block
#include "test/setup.h"   // models of a few layers, and what a step makes of them
#include "test/testing.h" // assertions

// ---- every form ----

static int64_t trained_elements(const struct gpt *m) {
    int64_t count = 0;
    for (int i = 0; i < m->table.num_tensors; i++)
        count += m->table.tensors[i].count;
    return count;
}
// Checks that each option of a form changes the model: an option that is accepted but lost on its way would not.
static void each_option_of_a_form_changes_it(void **state) {
    for (int i = 0; i < FORMS; i++) {
        char less[FORM_OPTIONS];
        struct setup form = setup_of(form_options(&forms[i]), "");
        const double loss = setup_micro_step(&form, 0, 1);
        for (int part = 0; form_write(less, &forms[i], part); part++) {
            struct setup without = setup_of(less, "");
            if (setup_micro_step(&without, 0, 1) == loss &&
                trained_elements(without.model) == trained_elements(form.model))
                fail_msg("%s: part %d of '%s' changes neither the loss nor the parameters", forms[i].name, part,
                         forms[i].added);
            setup_free(&without);
        }
        setup_free(&form);
    }
}
// Checks the flops in the table of activations, which the predicted time and MFU count, against each matrix of a layer
// and attention's two products.
static void the_table_counts_the_flops_of_every_product(void **state) {
    for (int i = 0; i < FORMS; i++) {
        struct setup s = setup_of(form_options(&forms[i]), "");
        const struct layer_shape *layer = &s.model->shape.layer;
        double flops = 4.0 * layer->H * layer->D * layer->keys, counted = 0;
        for (int t = 0; t < s.model->table.num_tensors; t++) {
            const struct tensor *tensor = &s.model->table.tensors[t];
            flops += tensor->layer == 0 && tensor->cols > 1 ? 2.0 * tensor->rows * tensor->cols : 0;
        }
        for (int id = 0; id < ACT_COUNT; id++)
            if (activation_present(layer) & 1u << id)
                counted += activation_row((enum activation_id)id, layer).flops_per_token;
        assert_near(counted, flops, 1e-9 * flops, 0);
        setup_free(&s);
    }
}
// Checks that every matrix of a layer belongs to a linear layer: else it would have no adapter under all-linear, and no
// FP8.
static void each_matrix_of_a_layer_is_a_linear_layers(void **state) {
    for (int i = 0; i < FORMS; i++) {
        struct setup s = setup_of(form_options(&forms[i]), "");
        for (int t = 0; t < s.model->table.num_tensors; t++) {
            const struct tensor *tensor = &s.model->table.tensors[t];
            if (tensor->layer >= 0 && tensor->cols > 1 && !parameter_is_linear_weight(tensor->parameter))
                fail_msg("%s: %s is no linear layer's weight", forms[i].name, tensor->name);
        }
        setup_free(&s);
    }
}

// ---- recomputation ----

static void policies_change_no_bit(const char *shape, bool all) {
    static const char *const policies[] = {
        "--recompute-granularity selective --recompute-modules " MODULE_LIST,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", // 2 divides neither 5 nor 3
        "--recompute-granularity full",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
        "--recompute-granularity full --recompute-layers 0,2",
    };
    enum { POLICIES = sizeof policies / sizeof *policies, FEW = 2 };
    static const char *const backends[] = {"--attention-backend flash", "--attention-backend unfused"};
    for (int b = 0; b < 2; b++) {
        struct outcome none = outcome_of(shape, backends[b]);
        for (int i = 0; i < (all ? POLICIES + NUM_MODULES : FEW); i++) {
            char options[256];
            if (i < POLICIES)
                snprintf(options, sizeof options, "%s %s", backends[b], policies[i]);
            else
                snprintf(options, sizeof options, "%s --recompute-granularity selective --recompute-modules %s",
                         backends[b], module_names[i - POLICIES]);
            struct outcome o = outcome_of(shape, options);
            assert_same_bits(&none, &o, options);
            outcome_free(&o);
        }
        outcome_free(&none);
    }
}
static void recomputation_changes_no_bit(void **state) {
    for (int i = 0; i < FORMS; i++)
        if (test_slowness() == 1 || takes_case(i, 4))
            policies_change_no_bit(form_options(&forms[i]), i < FORMS_IN_FULL && test_slowness() == 1);
}

// ---- the MLP in chunks of tokens ----

// A number of tokens that does not divide the tokens of a batch: the last chunk is shorter.
#ifdef CUDA_EMULATED
#define CHUNK "--mlp-chunk-tokens 17 "
#else
#define CHUNK "--mlp-chunk-tokens 40 "
#endif
#define CHUNKS_FULL CHUNK "--recompute-granularity full "
// Checks that a micro-step by chunks gives each tensor's gradients as at once, within the rounding of the activations'
// gradients.
static void assert_gradients_of_chunks(const char *shape, const char *options) {
    const double tolerance = sizeof(floatX) == 2 ? 3e-2 : 1e-5; // as in op_gpt.c for accumulation
    char chunked[512];
    snprintf(chunked, sizeof chunked, CHUNKS_FULL "%s", options);
    struct setup whole = setup_of(shape, options), chunks = setup_of(shape, chunked);
    struct setup *const setups[] = {&whole, &chunks};
    double loss[2], validation[2];
    for (int i = 0; i < 2; i++) {
        loss[i] = setup_micro_step(setups[i], 0, 1);
        validation[i] = loss_mean(gpt_evaluate(setups[i]->model, setup_batch(setups[i], 0)));
    }
    const double bound = 1e-2 * tolerance; // a library may choose another kernel for fewer rows
    assert_near(loss[1], loss[0], bound * loss[0], 0);
    assert_near(validation[1], validation[0], bound * validation[0], 0);
    assert_close_gradients(chunks.model, whole.model, tolerance);
    setup_free(&whole);
    setup_free(&chunks);
}
static void chunks_of_the_mlp_have_its_gradients(void **state) {
    static const char *const activations[] = {
#define NAME_OF(enumerator, name, gated) name,
        ACTIVATIONS(NAME_OF)
#undef NAME_OF
    };
    for (int i = 0; i < FORMS; i++)
        if (takes_case(i, 4))
            assert_gradients_of_chunks(form_options(&forms[i]), "");
    for (size_t i = 0; i < sizeof activations / sizeof *activations; i++) {
        char options[128];
        snprintf(options, sizeof options, "--activation %s --add-mlp-bias", activations[i]);
        if (takes_case((int)i, 3))
            assert_gradients_of_chunks(LLAMA, options);
    }
    assert_gradients_of_chunks(ROTARY, "--norm-placement sandwich --hidden-dropout 0.2 --residual-multiplier 0.7");
    assert_gradients_of_chunks(ROTARY, "--parallel-residual --hidden-dropout 0.2 --add-mlp-bias");
    // Without dropout, norms leave the sums of biases on a GPU.
    assert_gradients_of_chunks(GPT2, "--hidden-dropout 0 --attention-dropout 0");
}
// Checks that a chunk computes again what it needs, whatever else is recomputed, and reads no memory that is dead.
static void policies_that_drop_the_mlp_give_chunks_the_same_bits(void **state) {
    static const char *const policies[] = {
        CHUNK "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        CHUNK "--recompute-granularity selective --recompute-modules mlp",
        CHUNK "--recompute-granularity selective --recompute-modules norm,mlp",
        CHUNK "--recompute-granularity selective --recompute-modules " MODULE_LIST,
    };
    static const char *const shapes[] = {GPT2, LLAMA, ROTARY "--norm-placement sandwich --hidden-dropout 0.2",
                                         ROTARY "--norm-placement post",
                                         ROTARY "--parallel-residual --residual-multiplier 0.5"};
    for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++) {
        if (!takes_case((int)k, 2))
            continue;
        struct outcome full = outcome_of(shapes[k], CHUNKS_FULL);
        for (size_t i = 0; i < sizeof policies / sizeof *policies; i++) {
            if (!takes_case((int)(k / 2 + i), 4)) // each shape has policies of its own
                continue;
            struct setup s = setup_of(shapes[k], policies[i]);
            watch_phases(s.model, poison);
            struct outcome o = two_steps(&s);
            assert_same_bits(&full, &o, policies[i]);
            setup_free(&s);
            outcome_free(&o);
        }
        outcome_free(&full);
    }
}

// ---- gradients ----

// Checks each kind of tensor by central differences: along its gradient the loss changes as the gradient says. In fp32
// the loss is known to about 2^-24 of itself, and a step of `h` changes it by 2 h |gradient|.
static void assert_gradients(const char *shape, const char *options) {
    struct setup s = setup_of(shape, options);
    struct gpt *m = s.model;
    setup_micro_step(&s, 0, 1);
    for (int t = 0; t < m->table.num_tensors; t++) {
        const struct tensor *tensor = &m->table.tensors[t];
        const float *g = fp32_gradients(m) + tensor->offset;
        float *p = (float *)m->zero.params + tensor->offset;
        double norm = 0, slope = 0;
        for (int64_t j = 0; j < tensor->count; j++)
            norm += (double)g[j] * g[j];
        norm = sqrt(norm);
        float *before = (float *)test_alloc((size_t)tensor->count * sizeof *before);
        memcpy(before, p, (size_t)tensor->count * sizeof *before);
        // A step that changes the loss by little, so that the loss is nearly linear along it; where it is not, a
        // smaller step follows.
        bool good = false;
        for (double h = fmin(8e-3, 2e-2 / norm); norm > 1e-5 && !good && h > fmin(8e-3, 2e-2 / norm) / 100; h /= 4) {
            double loss[2];
            for (int side = 0; side < 2; side++) {
                for (int64_t j = 0; j < tensor->count; j++)
                    p[j] = (float)(before[j] + (side ? h : -h) * g[j] / norm);
                loss[side] = loss_mean(gpt_evaluate(m, setup_batch(&s, 0)));
            }
            slope = (loss[1] - loss[0]) / (2 * h);
            good = fabs(slope - norm) <= 0.01 * norm + 3e-4;
        }
        memcpy(p, before, (size_t)tensor->count * sizeof *before);
        free(before);
        if (!good)
            fail_msg("%s %s: along its gradient of norm %g, %s changes the loss by %g", shape, options, norm,
                     tensor->name, slope);
    }
    setup_free(&s);
}
#ifndef TARGET_CUDA
static void each_tensor_has_its_gradient(void **state) {
    static const char *const activations[] = {
#define NAME_OF(enumerator, name, gated) name,
        ACTIVATIONS(NAME_OF)
#undef NAME_OF
    };
    static const char no_dropout[] = "--hidden-dropout 0 --attention-dropout 0 --num-layers 2";
    const char *const shapes[] = {GPT2, LLAMA};
    if (sizeof(floatX) != sizeof(float)) // a parameter in bf16 can't be changed by little
        return;
    for (size_t i = 0; i < 2 * sizeof activations / sizeof *activations; i++) {
        char options[160];
        snprintf(options, sizeof options, "%s --activation %s", no_dropout, activations[i / 2]);
        assert_gradients(shapes[i % 2], options);
    }
    for (int i = 0; i < FORMS; i++) {
        const char *shape = form_options(&forms[i]);
        const bool attention = strstr(shape, "window") || strstr(shape, "softcap") || strstr(shape, "documents");
        for (int unfused = 0; unfused < 1 + attention; unfused++)
            assert_gradients(shape, unfused ? "--hidden-dropout 0 --attention-dropout 0 --attention-backend unfused"
                                            : "--hidden-dropout 0 --attention-dropout 0");
    }
}
static void each_tensor_has_its_gradient_in_chunks(void **state) {
    if (sizeof(floatX) != sizeof(float))
        return;
    assert_gradients(GPT2, CHUNKS_FULL "--hidden-dropout 0 --attention-dropout 0 --num-layers 2");
    assert_gradients(LLAMA, CHUNKS_FULL "--hidden-dropout 0 --attention-dropout 0 --num-layers 2");
    assert_gradients(ROTARY, CHUNKS_FULL "--norm-placement sandwich --add-mlp-bias");
}
#endif

// ---- generation ----

// Checks that prompts of different lengths, fed whole, and then one token of each sequence at a time through the KV
// cache give the losses of whole sequences.
static void generation_equals_forward_of(const char *shape) {
    static const int lengths[] = {PROMPT_TOKENS, 1, 12};
    struct setup s = setup_of(shape, "--separate-documents=false");
    struct gpt *m = s.model;
    const int B = s.config.training.micro_batch_size, T = s.config.model.seq_length, V = s.config.model.vocab_size,
              Vp = m->shape.Vp;
    assert_true(B == s.config.evaluation.sample_count && B <= 3 && m->generation.prompt_tokens == PROMPT_TOKENS);
    int32_t prompts[3 * PROMPT_TOKENS], tokens[3], positions[3]; // of each sequence's latest token
    double *losses = test_doubles((int64_t)B * T), whole[3 * 37];
    for (int b = 0; b < B; b++) {
        positions[b] = lengths[b] - 1;
        for (int t = 0; t < PROMPT_TOKENS; t++) // what follows a shorter prompt counts for nothing
            prompts[b * PROMPT_TOKENS + t] = t < lengths[b] ? s.inputs[b * T + t] : 3;
    }
    gpt_evaluate(m, batch_of(s.inputs, s.targets));
    const int id = m->slots[PASS_EVALUATE * (m->shape.L + 1) * SLOT_COUNT + SLOT_LOSSES];
    const float *evaluated = (const float *)plan_pointer(&m->timeline.plan, &m->timeline.arenas, id);
    for (int i = 0; i < B * T; i++)
        whole[i] = losses[i] = evaluated[i];
    watch_phases(m, poison);
    for (int i = 0; i < T; i++) {
        const floatX *logits = i == 0 ? gpt_prefill(m, prompts, lengths) : gpt_decode(m, tokens, positions);
        device_synchronize(m->dev);
        for (int b = 0; b < B; b++) {
            const int t = positions[b];
            double total = 0;
            for (int v = 0; v < V; v++)
                total += exp((double)to_float(logits[b * Vp + v]));
            losses[b * T + t] = log(total) - (double)to_float(logits[b * Vp + s.targets[b * T + t]]);
            positions[b] = t + 1 < T ? t + 1 : t; // a sequence at its end is fed its last token again
            tokens[b] = s.inputs[b * T + positions[b]];
        }
    }
    assert_close(losses, whole, B * T, sizeof(floatX) == 2 ? 2e-2 : 1e-5);
    free(losses);
    setup_free(&s);
}
static void generation_equals_forward(void **state) {
#ifdef CUDA_EMULATED // op_zoo goes through the architectures there
    enum { EACH = 5 };
#else
    enum { EACH = 1 };
#endif
    for (int i = 0; i < FORMS; i += EACH)
        if (takes_case(i, 2))
            generation_equals_forward_of(form_options(&forms[i]));
}
// Checks that a windowed layer's cache holds only the window.
static void a_windowed_layer_caches_its_window(void **state) {
    struct setup s = setup_of(ROTARY "--window-size 11 --window-attn-skip-freq 0,1,0", "");
    for (int l = 0; l < 3; l++) {
        const int id = s.model->slots[(PASS_GENERATE * 4 + l + 1) * SLOT_COUNT + SLOT_KEYS];
        assert_int_equal(s.model->timeline.plan.buffers[id].bytes,
                         (size_t)s.model->generation.sequences * (l == 1 ? 11 : 37) * 2 * 16 * sizeof(floatX));
    }
    setup_free(&s);
}

// ---- documents ----

// A batch's gradients, and its tokens' losses.
struct result {
    double *grads, *losses;
};
static struct result result_of(struct setup *s, struct batch batch) {
    struct gpt *m = s->model;
    struct result r;
    gpt_evaluate(m, batch);
    const int id = m->slots[PASS_EVALUATE * (m->shape.L + 1) * SLOT_COUNT + SLOT_LOSSES];
    const float *evaluated = (const float *)plan_pointer(&m->timeline.plan, &m->timeline.arenas, id);
    r.losses = floats_to_doubles(evaluated, s->tokens);
    gpt_micro_step(m, 0, batch, (double)s->tokens); // so that the gradients are of the sum of the losses
    device_synchronize(m->dev);
    r.grads = floats_to_doubles(fp32_gradients(m), m->table.trained.flat);
    return r;
}
static void result_free(struct result *r) {
    free(r->grads);
    free(r->losses);
}
// Computes a packed batch's documents separately: each becomes a sequence of its own, whose remaining tokens count for
// nothing. Returns the sum of the gradients, and the losses at their places in the batch.
static struct result alone(struct setup *s, struct batch batch) {
    const int T = s->config.model.seq_length, B = s->config.training.micro_batch_size;
    const int64_t flat = s->model->table.trained.flat;
    struct result sum = {test_doubles(flat), test_doubles(s->tokens)};
    memset(sum.grads, 0, (size_t)flat * sizeof *sum.grads);
    int32_t *inputs = (int32_t *)test_alloc((size_t)s->tokens * sizeof *inputs);
    int32_t *targets = (int32_t *)test_alloc((size_t)s->tokens * sizeof *targets);
    for (int64_t first = 0, end; first < s->tokens; first = end) {
        const int64_t row = first / T * T;
        for (end = first + 1; end < row + T && batch.document_starts[end] == (int32_t)(first - row);)
            end++;
        for (int64_t i = 0; i < s->tokens; i++) {
            const bool counts = i < end - first;
            inputs[i] = counts ? batch.inputs[first + i] : 1;
            targets[i] = counts ? batch.targets[first + i] : -1;
        }
        struct result r = result_of(s, batch_of(inputs, targets));
        for (int64_t i = 0; i < flat; i++)
            sum.grads[i] += r.grads[i];
        memcpy(sum.losses + first, r.losses, (size_t)(end - first) * sizeof *r.losses);
        result_free(&r);
    }
    assert_true(B >= 1);
    free(inputs);
    free(targets);
    return sum;
}
static const char *const packed[] = {ROTARY "--separate-documents", ROTARY "--separate-documents --window-size 5",
                                     GPT2 " --separate-documents --hidden-dropout 0 --attention-dropout 0"};
enum { PACKED = sizeof packed / sizeof *packed };

static void packed_documents_equal_documents_alone(void **state) {
    for (int i = 0; i < 2 * PACKED; i++) {
        if (!takes_case(i, 5)) // the first form by the first backend, the last one by the second
            continue;
        const char *backend = i % 2 ? "--attention-backend unfused" : "";
        struct setup s = setup_of(packed[i / 2], backend);
        struct result together = result_of(&s, setup_batch(&s, 0)), apart = alone(&s, setup_batch(&s, 0));
        assert_close(together.losses, apart.losses, s.tokens, sizeof(floatX) == 2 ? 2e-2 : 1e-5);
        for (int t = 0; t < s.model->table.num_tensors; t++) {
            const struct tensor *tensor = &s.model->table.tensors[t];
            assert_close_at(together.grads + tensor->offset, apart.grads + tensor->offset, tensor->count,
                            sizeof(floatX) == 2 ? 3e-2 : 1e-5, tensor->name, __FILE__, __LINE__);
        }
        result_free(&together);
        result_free(&apart);
        setup_free(&s);
    }
}

// Checks that another token in one document changes no bit of another document's losses.
static void documents_do_not_see_each_other(void **state) {
    for (int i = 0; i < 2 * PACKED; i++) {
        if (!takes_case(i + 3, 5)) // the second form
            continue;
        struct setup s = setup_of(packed[i / 2], i % 2 ? "--attention-backend unfused" : "");
        const int T = s.config.model.seq_length, V = s.config.model.vocab_size;
        const struct batch batch = setup_batch(&s, 0);
        struct result before = result_of(&s, batch);
        const int32_t changed = s.document_starts[T / 2]; // the first token of a document in the middle
        s.inputs[changed] = (s.inputs[changed] + 1) % V;
        struct result after = result_of(&s, batch);
        bool differs = false;
        for (int64_t t = 0; t < s.tokens; t++) {
            const bool same_document = t < T && s.document_starts[t] == changed;
            differs = differs || (same_document && before.losses[t] != after.losses[t]);
            if (!same_document && before.losses[t] != after.losses[t])
                fail_msg("%s: token %d changes the loss of token %lld of another document", packed[i / 2], (int)changed,
                         (long long)t);
        }
        assert_true(differs);
        result_free(&before);
        result_free(&after);
        setup_free(&s);
    }
}

// Checks that a target of -1 changes neither loss nor gradient, and that the step is of the mean over the other
// targets.
static void targets_that_do_not_count(void **state) {
    struct setup s = setup_of(LLAMA, "");
    struct gpt *m = s.model;
    int counted = 0;
    double sum = 0;
    struct result all = result_of(&s, setup_batch(&s, 0));
    for (int64_t i = 0; i < s.tokens; i++)
        if (i % 3 == 1)
            s.targets[i] = -1;
        else {
            counted++;
            sum += all.losses[i];
        }
    const double loss = setup_micro_step(&s, 0, 0.5);
    assert_near(loss, sum / counted, 1e-6 * loss, 0);
    setup_micro_step(&s, 0, 0.5);
    setup_micro_step(&s, 1, 0.5);
    double squares = 0;
    for (int64_t i = 0; i < m->table.trained.flat; i++)
        squares += (double)fp32_gradients(m)[i] * fp32_gradients(m)[i];
    // Of the two micro-batches only the first one lacks targets.
    const double mean = 2.0 * (double)s.tokens / (double)(counted + s.tokens);
    const double norm = update_norm(m, 1, 1e-3);
    assert_near(norm, mean * sqrt(squares), 1e-6 * norm, 0);
    result_free(&all);
    setup_free(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
#ifndef CUDA_EMULATED // training runs test these on the emulator (test_cuda_engine.py)
        cmocka_unit_test(each_option_of_a_form_changes_it),
        cmocka_unit_test(the_table_counts_the_flops_of_every_product),
        cmocka_unit_test(each_matrix_of_a_layer_is_a_linear_layers),
        cmocka_unit_test(recomputation_changes_no_bit),
#endif
        cmocka_unit_test(chunks_of_the_mlp_have_its_gradients),
        cmocka_unit_test(policies_that_drop_the_mlp_give_chunks_the_same_bits),
#ifndef TARGET_CUDA
        cmocka_unit_test(each_tensor_has_its_gradient),
        cmocka_unit_test(each_tensor_has_its_gradient_in_chunks),
#endif
        cmocka_unit_test(generation_equals_forward),
        cmocka_unit_test(a_windowed_layer_caches_its_window),
        cmocka_unit_test(packed_documents_equal_documents_alone),
        cmocka_unit_test(documents_do_not_see_each_other),
        cmocka_unit_test(targets_that_do_not_count),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
