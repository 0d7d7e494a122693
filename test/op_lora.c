// LoRA and frozen parameters in the model. Adapters beside frozen weights compute what merged weights compute, forward
// and backward. Freezing changes no bit of what is trained. Neither recomputation nor offload nor dead memory changes a
// bit. The plan holds no gradient and no state of frozen parameters.
#include "test/model.h"   // before gpt.cuh, which it looks into
#include "test/forms.h"   // the forms of the block
#include "test/setup.h"   // models of a few layers, and what a step makes of them
#include "test/testing.h" // assertions

#define LORA " --lora-rank 4 --lora-alpha 6 "
#define NO_DROPOUT " --hidden-dropout 0 --attention-dropout 0 "
enum { OPTIONS = 512 };
#ifndef PRECISION_BF16
static const unsigned SOME = LORA_Q | LORA_V | LORA_UP;
#endif
static const unsigned SEPARATE = LORA_Q | LORA_K | LORA_V | LORA_ATT_PROJ | LORA_GATE | LORA_UP | LORA_MLP_PROJ,
                      FUSED = LORA_QKV | LORA_ATT_PROJ | LORA_FC | LORA_MLP_PROJ;

// Opens a model with adapters whose B is not zero.
static struct setup adapted(const char *shape, const char *options, unsigned modules) {
    setup_lora_modules = modules;
    struct setup s = setup_of(shape, options);
    setup_lora_modules = 0;
    struct gpt *m = s.model;
    for (int i = 0; i < m->table.num_tensors; i++) {
        const struct tensor *t = &m->table.tensors[i];
        float *values = (float *)test_alloc((size_t)t->count * sizeof *values);
        floatX *rounded = (floatX *)test_alloc(2 * (size_t)t->count * sizeof *rounded);
        random_normal(values, t->count, 0.1f, 99, (uint64_t)i, 0);
        gpt_set_parameters(m, t, 0, values, t->count, rounded);
        device_synchronize(m->dev);
        free(values);
        free(rounded);
    }
    return s;
}

#ifndef PRECISION_BF16
static const floatX *values_of(const struct gpt *m, const struct tensor *t) {
    return (t->frozen ? m->frozen.params : m->zero.params) + t->offset;
}
// An adapted part: its own rows of W, B and A.
struct visited {
    const struct tensor *w, *a, *b;
    // first, rows: outputs of W; above_a, above_b: the rows of A and of B above the part's
    int first, rows, above_a, above_b;
};
static void visit_parts(const struct gpt *m, void (*visit)(const struct visited *, void *), void *context) {
    const struct lora_shape *lora = &m->shape.lora;
    for (int l = 0; l < m->shape.L; l++)
        for (int i = 0; i < LINEAR_COUNT; i++) {
            const struct linear_row row = linear_row((enum linear)i, &m->shape.layer);
            int above = 0;
            for (int p = 0; p < lora->linear[i].count; p++) {
                const struct lora_part part = lora->linear[i].parts[p];
                const struct visited v = {parameters_find(&m->table, l, row.weight),
                                          parameters_find(&m->table, l, row.lora_a),
                                          parameters_find(&m->table, l, row.lora_b),
                                          part.first,
                                          part.rows,
                                          p * lora->rank,
                                          above};
                visit(&v, context);
                above += part.rows;
            }
        }
}
struct pair {
    const struct gpt *adapted;
    struct gpt *merged;
    double scale;
    double *da, *db; // (flat of the adapters) computed from the merged weights' gradients
};
// Adds s B A of a part to W in the merged model.
static void merge_part(const struct visited *v, void *context) {
    const struct pair *p = (const struct pair *)context;
    const struct tensor *to = parameters_find(&p->merged->table, v->w->layer, v->w->parameter);
    const floatX *a = values_of(p->adapted, v->a), *b = values_of(p->adapted, v->b);
    floatX *w = p->merged->zero.params + to->offset;
    const int r = p->adapted->shape.lora.rank, k = v->w->cols;
    for (int row = 0; row < v->rows; row++)
        for (int c = 0; c < k; c++) {
            double sum = 0;
            for (int j = 0; j < r; j++)
                sum += (double)b[(v->above_b + row) * r + j] * a[(int64_t)(v->above_a + j) * k + c];
            w[(int64_t)(v->first + row) * k + c] += (float)(p->scale * sum);
        }
}
// Computes dA = s B^T dW and dB = s dW A^T of a part.
static void chain_part(const struct visited *v, void *context) {
    const struct pair *p = (const struct pair *)context;
    const struct tensor *from = parameters_find(&p->merged->table, v->w->layer, v->w->parameter);
    const floatX *a = values_of(p->adapted, v->a), *b = values_of(p->adapted, v->b);
    const float *dw = fp32_gradients(p->merged) + from->offset;
    const int r = p->adapted->shape.lora.rank, k = v->w->cols;
    for (int row = 0; row < v->rows; row++)
        for (int c = 0; c < k; c++)
            for (int j = 0; j < r; j++) {
                const double d = p->scale * dw[(int64_t)(v->first + row) * k + c];
                p->da[v->a->offset + (int64_t)(v->above_a + j) * k + c] += d * b[(v->above_b + row) * r + j];
                p->da[v->b->offset + (int64_t)(v->above_b + row) * r + j] += d * a[(int64_t)(v->above_a + j) * k + c];
            }
}
static void adapters_are_as_merged_weights(const char *shape, const char *options, unsigned modules) {
    struct setup s = adapted(shape, options, modules), merged = setup_of(shape, "");
    struct pair p = {s.model, merged.model, config_lora_scale(&s.config), NULL, NULL};
    visit_parts(s.model, merge_part, &p);
    for (int i = 0; i < 2; i++) {
        const double loss = setup_micro_step(&s, i, 0.5), expected = setup_micro_step(&merged, i, 0.5);
        if (fabs(loss - expected) > 4e-6 * expected)
            fail_msg("%s %s: the loss is %.9g, of merged weights %.9g", shape, options, loss, expected);
    }
    const int64_t n = s.model->table.trained.flat;
    p.da = (double *)test_alloc((size_t)n * sizeof *p.da);
    memset(p.da, 0, (size_t)n * sizeof *p.da);
    visit_parts(s.model, chain_part, &p);
    for (int i = 0; i < s.model->table.num_tensors; i++) {
        const struct tensor *t = &s.model->table.tensors[i];
        double *x = floats_to_doubles(fp32_gradients(s.model) + t->offset, t->count);
        double *y = (double *)test_alloc((size_t)t->count * sizeof *y);
        memcpy(y, p.da + t->offset, (size_t)t->count * sizeof *y);
        assert_close_at(x, y, t->count, 3e-5, t->name, __FILE__, __LINE__);
        free(x);
        free(y);
    }
    free(p.da);
    setup_free(&s);
    setup_free(&merged);
}
static void adapters_compute_what_merged_weights_do(void **state) {
    adapters_are_as_merged_weights(GPT2 NO_DROPOUT, LORA, FUSED);
    adapters_are_as_merged_weights(LLAMA, LORA, SEPARATE);
    adapters_are_as_merged_weights(LLAMA, LORA "--lora-use-rslora", SOME);
    adapters_are_as_merged_weights(LLAMA, LORA "--recompute-granularity full --mlp-chunk-tokens 30", SEPARATE);
}
#endif

// Checks that what is trained has the same gradients whatever is frozen.
static void freezing_changes_no_gradient(void **state) {
    static const char *const freezes[] = {
        "transformer.h.[01].*,transformer.w?e.weight", // backward ends at layer 2
        "*.attn.c_attn.weight,transformer.h.2.*",      // matrices within layers
        "*ln_*,*.mlp.c_fc.*",                          // norms, the MLP
        "transformer.h.*,transformer.w?e.weight",      // all but the final norm
        "transformer.wte.weight",                      // the tied head
    };
    static const char *const policies[] = {
        "", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        "--cpu-offloading-num-layers 3"};
    for (int policy = 0; policy < 3; policy++) {
        char base[OPTIONS];
        snprintf(base, sizeof base, "%s", policies[policy]);
        struct setup whole = setup_of(GPT2, base);
        const double loss = setup_micro_step(&whole, 0, 0.5);
        setup_micro_step(&whole, 1, 0.5);
        for (int i = 0; i < 5; i++) {
            if (!takes_case(policy + i, 3)) // each set of frozen parameters under one policy
                continue;
            char options[2 * OPTIONS];
            snprintf(options, sizeof options, "%s --freeze %s", base, freezes[i]);
            struct setup s = setup_of(GPT2, options);
            watch_phases(s.model, poison);
            assert_true(s.model->table.num_frozen > 0);
            const double frozen_loss = setup_micro_step(&s, 0, 0.5);
            setup_micro_step(&s, 1, 0.5);
            if (frozen_loss != loss)
                fail_msg("%s: the loss is %.17g, not %.17g", options, frozen_loss, loss);
            for (int k = 0; k < s.model->table.num_tensors; k++) {
                const struct tensor *t = &s.model->table.tensors[k],
                                    *other = parameters_find(&whole.model->table, t->layer, t->parameter);
                assert_same_floats(floats_to_doubles(fp32_gradients(s.model) + t->offset, t->count),
                                   floats_to_doubles(fp32_gradients(whole.model) + other->offset, t->count), t->count,
                                   t->name, options);
            }
            setup_free(&s);
        }
        setup_free(&whole);
    }
}

// Checks that neither recomputation nor offload nor memory that the plan calls dead changes a bit of the adapters'
// training.
static void policies_change_no_bit(void **state) {
    static const char *const shapes[] = {GPT2 LORA "--lora-dropout 0.2", LLAMA LORA "--lora-dropout 0.1"};
    static const char *const policies[] = {
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        "--recompute-granularity selective",
        "--offload-weights --offload-gradients --optimizer-cpu-offload --cpu-offloading-num-layers 2",
    };
    for (int i = 0; i < 2; i++) {
        struct setup s = adapted(shapes[i], "", i ? SEPARATE : FUSED);
        struct outcome plain = two_steps(&s);
        setup_free(&s);
        for (int k = 0; k < 3; k++) {
            if (!takes_case(i + k, 2))
                continue;
            s = adapted(shapes[i], policies[k], i ? SEPARATE : FUSED);
            watch_phases(s.model, poison);
            struct outcome o = two_steps(&s);
            assert_same_bits(&plain, &o, policies[k]);
            outcome_free(&o);
            setup_free(&s);
        }
        outcome_free(&plain);
    }
}

// Sets the frozen weights of `to` to the values that from's, stored in FP8 or NF4, are read back as.
static void set_read_back(struct gpt *to, const struct gpt *from) {
    for (int i = from->table.num_tensors; i < from->table.num_tensors + from->table.num_frozen; i++) {
        const struct tensor *t = &from->table.tensors[i], *other = parameters_find(&to->table, t->layer, t->parameter);
        if (!tensor_is_stored(t))
            continue;
        floatX *back = (floatX *)test_alloc((size_t)t->count * sizeof *back),
               *rounded = (floatX *)test_alloc(2 * (size_t)t->count * sizeof *rounded);
        float *values = (float *)test_alloc((size_t)t->count * sizeof *values);
        frozen_dequantize(back, from->stored.memory + t->stored_at, t->format, t->rows, t->cols, 0, t->rows, from->dev);
        device_synchronize(from->dev);
        for (int64_t k = 0; k < t->count; k++)
            values[k] = to_float(back[k]);
        gpt_set_parameters(to, other, 0, values, t->count, rounded);
        device_synchronize(to->dev);
        free(values);
        free(rounded);
        free(back);
    }
}
// Checks that training beside weights in FP8 or NF4 has, to the bit, the results of training beside the weights that
// they are read back as.
static void stored_weights_are_those_that_they_are_read_back_as(void **state) {
    static const char *const shapes[] = {GPT2 LORA, LLAMA LORA "--recompute-granularity full --mlp-chunk-tokens 30"};
    static const char *const formats[] = {"--frozen-weights-format nf4", "--frozen-weights-format fp8"};
    for (int i = 0; i < 2; i++) {
        struct setup s = adapted(shapes[i], formats[i], i ? SEPARATE : FUSED),
                     plain = adapted(shapes[i], "", i ? SEPARATE : FUSED);
        struct setup before = adapted(shapes[i], "", i ? SEPARATE : FUSED);
        const double exact = setup_micro_step(&before, 0, 0.5);
        setup_free(&before);
        set_read_back(plain.model, s.model);
        watch_phases(s.model, poison);
        struct outcome o = two_steps(&s);
        watch_phases(NULL, NULL);
        struct outcome expected = two_steps(&plain);
        assert_same_bits(&expected, &o, formats[i]);
        assert_true(s.model->table.stored_bytes > 0 && s.model->table.frozen.flat < plain.model->table.frozen.flat);
        if (exact == o.loss[0] || fabs(exact - o.loss[0]) > 0.2 * exact)
            fail_msg("%s: the loss is %.9g, of the weights before %.9g", formats[i], o.loss[0], exact);
        outcome_free(&expected);
        outcome_free(&o);
        setup_free(&plain);
        setup_free(&s);
    }
}

// Checks that in every form a step changes each matrix of adapters, and leaves the base, which has no gradient in
// memory, as it is.
static void adapters_train_in_every_form(void **state) {
    for (int i = 0; i < FORMS; i++) {
        if (!takes_case(i, 3))
            continue;
        struct setup s =
            adapted(form_options(&forms[i]), LORA, strstr(form_options(&forms[i]), "glu") ? SEPARATE : FUSED);
        const struct parameters *table = &s.model->table;
        const size_t frozen_bytes = (size_t)table->frozen.flat * sizeof(floatX);
        floatX *base = (floatX *)test_alloc(frozen_bytes);
        memcpy(base, s.model->frozen.params, frozen_bytes);
        struct outcome o = two_steps(&s);
        assert_memory_equal(base, s.model->frozen.params, frozen_bytes);
        for (int t = 0; t < table->num_tensors; t++) {
            bool moves = false;
            for (int64_t j = 0; j < table->tensors[t].count; j++)
                moves = moves || o.grads[table->tensors[t].offset + j] != 0;
            if (!moves)
                fail_msg("%s: %s has no gradient", forms[i].name, table->tensors[t].name);
        }
        outcome_free(&o);
        free(base);
        setup_free(&s);
    }
}

// Checks that the plan has only floatX for frozen parameters.
static void the_plan_holds_no_state_of_the_frozen(void **state) {
    struct setup s = adapted(LLAMA, LORA, SEPARATE);
    const struct plan *plan = &s.model->timeline.plan;
    const struct parameters *table = &s.model->table;
    size_t gradients = 0, moments = 0, frozen = 0;
    for (int i = 0; i < plan->count; i++) {
        const struct plan_buffer *b = &plan->buffers[i];
        gradients += strcmp(b->name, "gradients") == 0 ? b->bytes : 0;
        moments += strcmp(b->name, "first moments") == 0 ? b->bytes : 0;
        frozen += strcmp(b->name, "frozen parameters") == 0 ? b->bytes : 0;
    }
    assert_int_equal(gradients, (size_t)table->trained.flat * sizeof(float));
    assert_int_equal(moments, (size_t)table->trained.flat * sizeof(float));
    assert_int_equal(frozen, (size_t)table->frozen.flat * sizeof(floatX));
    assert_int_equal(s.model->lowest_trained, 0);
    setup_free(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
#ifndef PRECISION_BF16
        cmocka_unit_test(adapters_compute_what_merged_weights_do),
#endif
        cmocka_unit_test(freezing_changes_no_gradient),
        cmocka_unit_test(policies_change_no_bit),
        cmocka_unit_test(stored_weights_are_those_that_they_are_read_back_as),
        cmocka_unit_test(adapters_train_in_every_form),
        cmocka_unit_test(the_plan_holds_no_state_of_the_frozen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
