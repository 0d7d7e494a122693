// Muon in the whole model: which tensors it updates, and in which matrices, against the update in double from the
// model's own gradients; once a step, whatever the number of micro-batches; to the same bits under each policy of
// recomputation.
//
// Tolerances: three deviations of what random roundings do to an iteration (test/svd.h), and the roundings of the
// parameters.
#include "test/model.h" // before gpt.cuh, which it looks into
#include "test/setup.h"
#include "test/svd.h"
#include "test/testing.h"

// Rows [first, first + rows) of a tensor, as a matrix of their own.
struct rows {
    int first, rows;
};
// The number of matrices of a tensor, which go to `list`, written here independently of the engine; 0: AdamW updates
// it.
static int expected_matrices(struct rows *list, const struct gpt *m, const struct tensor *t) {
    const struct layer_shape *s = &m->shape.layer;
    const int q = s->H * s->D, kv = s->G * s->D;
    int n = 0;
    if (strstr(t->name, "qkv.weight")) {
        const struct rows whole = {0, t->rows}, parts[] = {{0, q}, {q, kv}, {q + kv, kv}};
        switch (m->config.training.muon_split_qkv) {
        case MUON_SPLIT_NONE: list[n++] = whole; break;
        case MUON_SPLIT_QKV:
            for (; n < 3; n++)
                list[n] = parts[n];
            break;
        case MUON_SPLIT_GROUPS:
            for (int part = 0; part < 3; part++)
                for (int g = 0; g < s->G; g++) {
                    const struct rows rows = {parts[part].first + g * (parts[part].rows / s->G),
                                              parts[part].rows / s->G};
                    list[n++] = rows;
                }
            break;
        }
    } else if (strstr(t->name, "fc.weight") && s->gated) {
        const struct rows gate = {0, s->F}, up = {s->F, s->F};
        list[n++] = gate;
        list[n++] = up;
    } else if (strstr(t->name, "proj.weight") || strstr(t->name, "fc.weight")) {
        const struct rows whole = {0, t->rows};
        list[n++] = whole;
    }
    return n;
}
// Checks the first update of a matrix, whose momentum is a multiple of its gradient.
static void check_matrix(const struct gpt *m, const struct tensor *t, struct rows rows, const double *before,
                         const double *after, const double *grads, double lr) {
    const struct newton_schulz ns =
        newton_schulz_of(m->config.training.muon_coefficient_type, m->config.training.muon_num_ns_steps);
    const int64_t at = (int64_t)rows.first * t->cols, n = (int64_t)rows.rows * t->cols;
    const double scale = 0.2 * sqrt(rows.rows > t->cols ? rows.rows : t->cols);
    double *u = test_doubles(n), *factor = test_doubles(n), *expected = test_doubles(n), largest = 0;
    for (int64_t i = 0; i < n; i++)
        u[i] = to_float(to_floatX((float)grads[at + i]));
    newton_schulz_exact(factor, u, rows.rows, t->cols, &ns);
    for (int64_t i = 0; i < n; i++) {
        factor[i] *= lr * scale;
        expected[i] = (1 - lr * (double)m->config.training.weight_decay) * before[at + i] - after[at + i];
        largest = fmax(largest, fabs(before[at + i]));
    }
    double norm = 0;
    for (int64_t i = 0; i < n; i++)
        norm += factor[i] * factor[i];
    // Here the momentum, not the gradient, is rounded to floatX, at another size.
    const double deviation = newton_schulz_deviation(u, factor, rows.rows, t->cols, &ns) + FLOATX_ROUNDING * 10;
    const double stored = 0x1p-23 * largest * sqrt((double)n) / sqrt(norm);
    test_case_without_seed("%s, rows %d to %d", t->name, rows.first, rows.first + rows.rows - 1);
    assert_close(expected, factor, n, 3 * (deviation < 1 ? deviation : 1) + stored);
    free(u);
    free(factor);
    free(expected);
}
// Checks the first update by AdamW: the gradient's sign, but for epsilon.
static void check_adamw(const struct gpt *m, const struct tensor *t, const double *before, const double *after,
                        const double *grads, double grad_scale, double lr) {
    const bool decays = t->cols > 1;
    test_case_without_seed("%s", t->name);
    for (int64_t i = 0; i < t->count; i++) {
        const double g = grads[i] * grad_scale, change = lr * g / (fabs(g) + (double)m->config.training.adam_eps);
        const double expected = (decays ? 1 - lr * (double)m->config.training.weight_decay : 1) * before[i] - change;
        assert_near(after[i], expected, 1e-6 * (fabs(before[i]) + lr) + (fabs(g) < 1e-6 ? lr : 0), i);
    }
}
static double *values_of(const struct gpt *m) {
    float *values = state_values(m, STATE_MASTER);
    double *result = floats_to_doubles(values, m->table.trained.flat);
    free(values);
    return result;
}
static void check_first_step(const char *shape, const char *options) {
    const double lr = 0x1p-7;
    struct setup s = setup_of(shape, options);
    struct gpt *m = s.model;
    struct rows list[32];
    int matrices = 0;
    for (int i = 0; i < 2; i++)
        setup_micro_step(&s, i, 0.5);
    device_synchronize(m->dev);
    double *before = values_of(m), *grads = floats_to_doubles(fp32_gradients(m), m->table.trained.flat);
    const double norm = update_norm(m, 1, lr), clip = (double)m->config.training.clip_grad / (norm + 1e-6);
    double *after = values_of(m);
    for (int i = 0; i < m->table.num_tensors; i++) {
        const struct tensor *t = &m->table.tensors[i];
        const int64_t at = t->offset;
        const int count = expected_matrices(list, m, t);
        for (int k = 0; k < count; k++)
            check_matrix(m, t, list[k], before + at, after + at, grads + at, lr);
        if (count == 0)
            check_adamw(m, t, before + at, after + at, grads + at, clip < 1 ? clip : 1, lr);
        matrices += count;
    }
    assert_int_equal(matrices, m->muon.count);
    free(before);
    free(grads);
    free(after);
    setup_free(&s);
}
#define MUON "--optimizer muon --hidden-dropout 0 --attention-dropout 0 "
static void the_first_step_of_gpt2(void **state) { check_first_step(GPT2, MUON "--muon-coefficient-type quintic"); }
static void the_first_step_of_llama(void **state) { check_first_step(LLAMA, MUON "--muon-coefficient-type quintic"); }
static void the_first_step_of_query_groups(void **state) {
    check_first_step(LLAMA, MUON "--muon-split-qkv groups --muon-coefficient-type simple");
}
static void the_first_step_of_qkv_as_one(void **state) {
    check_first_step(LLAMA, MUON "--muon-split-qkv none --muon-coefficient-type simple");
}

// Checks that gradients a power of two as large move the matrices equally far: they are clipped before the momentum,
// which is then orthogonalized.
static void the_size_of_gradients_does_not_matter(void **state) {
    struct setup a = setup_of(LLAMA, MUON "--clip-grad 0"), b = setup_of(LLAMA, MUON "--clip-grad 0");
    setup_micro_step(&a, 0, 1);
    setup_micro_step(&b, 0, 0x1p-30);
    for (int i = 1; i < a.model->steps.most; i++) {
        setup_micro_step(&a, i, 0);
        setup_micro_step(&b, i, 0);
    }
    update_norm(a.model, 1, 1e-2);
    update_norm(b.model, 1, 1e-2);
    double *x = values_of(a.model), *y = values_of(b.model);
    for (int i = 0; i < a.model->table.num_tensors; i++) {
        const struct tensor *t = &a.model->table.tensors[i];
        if (muon_updates(&a.config, t))
            assert_close_at(y + t->offset, x + t->offset, t->count, sizeof(floatX) == 2 ? 2e-3 : 1e-5, t->name,
                            __FILE__, __LINE__);
    }
    free(x);
    free(y);
    setup_free(&a);
    setup_free(&b);
}
// Checks two micro-batches against one with all their samples: matrices are orthogonalized once a step, from the sum.
static void micro_batches_are_summed_first(void **state) {
    if (sizeof(floatX) == 2)
        skip(); // small singular values come from rounding of the gradients
    struct setup one = setup_of(LLAMA, MUON), two = setup_of(LLAMA, MUON "--micro-batch-size " TWO_BATCHES);
    for (int i = 0; i < 2; i++)
        micro_step_loss(one.model, i, one.inputs + i * one.tokens, one.targets + i * one.tokens, 0.5);
    micro_step_loss(two.model, 0, one.inputs, one.targets, 1);
    double *before = values_of(one.model);
    update_norm(one.model, 1, 1e-2);
    update_norm(two.model, 1, 1e-2);
    double *x = values_of(one.model), *y = values_of(two.model);
    for (int i = 0; i < one.model->table.num_tensors; i++) {
        const struct tensor *t = &one.model->table.tensors[i];
        for (int64_t k = t->offset; k < t->offset + t->count; k++) {
            x[k] -= before[k];
            y[k] -= before[k];
        }
        if (muon_updates(&one.config, t))
            assert_close_at(y + t->offset, x + t->offset, t->count, 5e-3, t->name, __FILE__, __LINE__);
    }
    free(before);
    free(x);
    free(y);
    setup_free(&one);
    setup_free(&two);
}
static void recomputation_changes_no_bit(void **state) {
    struct outcome a = outcome_of(LLAMA, "--optimizer muon"),
                   b = outcome_of(LLAMA, "--optimizer muon --recompute-granularity full"),
                   c = outcome_of(LLAMA, "--optimizer muon --recompute-granularity selective --recompute-modules mlp");
    assert_same_bits(&a, &b, "everything recomputed");
    assert_same_bits(&a, &c, "the MLP recomputed");
    outcome_free(&a);
    outcome_free(&b);
    outcome_free(&c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_first_step_of_gpt2),
        cmocka_unit_test(the_first_step_of_llama),
        cmocka_unit_test(the_first_step_of_query_groups),
        cmocka_unit_test(the_first_step_of_qkv_as_one),
        cmocka_unit_test(the_size_of_gradients_does_not_matter),
        cmocka_unit_test(micro_batches_are_summed_first),
        cmocka_unit_test(recomputation_changes_no_bit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
