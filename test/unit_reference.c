// The double-precision reference model against PyTorch's golden data and, where there are none (other shapes, dropout),
// against finite differences. Whatever is compared with the reference relies on this.
#include "test/golden.h"           // golden_open, golden_tensor
#include "test/reference.h"        // reference_forward, reference_backward, reference_adamw_step
#include "test/reference_golden.h" // reference_of
#include "test/testing.h"          // cmocka, assert_close, test_random

// The golden values and the reference are each computed in fp64. They differ by the golden values' one rounding to
// fp32, half a unit in the last place: 2^-24 of the norm; and by sums in another order, far less.
static const double GOLDEN_ROUNDING = 0x1p-24 * 1.001;

static void compare(const double *ours, const struct golden *g, const char *name) {
    double *expected = golden_doubles(g, name);
    assert_close_at(ours, expected, golden_tensor(g, name)->count, GOLDEN_ROUNDING, name, g->path, 0);
    free(expected);
}

static void compare_gradients(const struct reference *r, const struct golden *g) {
    for (int i = 0; i < r->num_tensors; i++) {
        char name[64];
        snprintf(name, sizeof name, "grad.%s", r->tensors[i].name);
        compare(r->tensors[i].gradient, g, name);
    }
}

static void equals_pytorch(const char *path) {
    struct golden *g = golden_open(path);
    struct reference *r = reference_of(g);
    const int B = golden_int(g, "micro_batch_size"), T = golden_int(g, "seq_length"),
              steps = golden_int(g, "train_steps");
    // Each parameter in the file, and its gradient, belongs to a tensor; five other tensors are data.
    assert_int_equal(g->num_tensors, 2 * r->num_tensors + 5);
    double *losses = test_doubles(steps), *norms = test_doubles(steps);
    for (int step = 0; step < steps; step++) {
        struct reference_activations *a =
            reference_forward(r, golden_batch(g, "tokens", step), golden_batch(g, "targets", step), B, T);
        reference_zero_gradients(r);
        reference_backward(r, a);
        if (step == 0) {
            compare(a->logits, g, "logits");
            compare_gradients(r, g);
        }
        losses[step] = a->loss;
        norms[step] = reference_adamw_step(r, reference_adamw_of(g), step + 1);
        reference_activations_destroy(a);
    }
    compare(losses, g, "losses");
    compare(norms, g, "grad_norms");
    free(losses);
    free(norms);
    reference_destroy(r);
    golden_close(g);
}
static void gpt2_equals_pytorch(void **state) { equals_pytorch("test/golden/gpt2.golden"); }
static void llama_equals_pytorch(void **state) { equals_pytorch("test/golden/llama.golden"); }
static void qwen2_equals_pytorch(void **state) { equals_pytorch("test/golden/qwen2.golden"); }

// Returns 0 for a third of the elements, by a mask that depends on all that names an element, through the tests' own
// generator.
static double a_third_dropped(const void *context, enum reference_dropout_use use, int layer, int64_t element) {
    uint64_t state = (uint64_t)use << 56 | (uint64_t)layer << 48 | (uint64_t)element;
    return test_uniform(&state) < -1.0 / 3 ? 0 : 1.5;
}

static double loss_at(struct reference *r, struct reference_tensor *tensor, const double *origin,
                      const double *direction, double h, const int32_t *tokens, int B, int T) {
    for (int64_t i = 0; i < tensor->rows * tensor->cols; i++)
        tensor->value[i] = origin[i] + h * direction[i];
    struct reference_activations *a = reference_forward(r, tokens, tokens + B * T, B, T);
    const double loss = a->loss;
    reference_activations_destroy(a);
    return loss;
}

// Compares the slope of the loss along a random unit direction of one tensor, by the central difference of fourth
// order, with the gradient's component. With h = 1e-3 the truncation is h^4 / 30 = 3e-14 times a fifth derivative,
// which may be some thousands of gradients: hence 1e-9 of the gradient's norm. Rounding of losses of about 5, over h,
// is 1e-12.
static void check_slope(struct reference *r, struct reference_tensor *tensor, const int32_t *tokens, int B, int T,
                        uint64_t *state) {
    const int64_t count = tensor->rows * tensor->cols;
    double *direction = test_doubles(count), *origin = test_doubles(count);
    double length = 0, component = 0, gradient_norm = 0;
    for (int64_t i = 0; i < count; i++) {
        direction[i] = test_uniform(state);
        length += direction[i] * direction[i];
        origin[i] = tensor->value[i];
    }
    for (int64_t i = 0; i < count; i++) {
        direction[i] /= sqrt(length);
        component += direction[i] * tensor->gradient[i];
        gradient_norm += tensor->gradient[i] * tensor->gradient[i];
    }
    const double h = 1e-3;
    double loss[4];
    for (int i = 0; i < 4; i++)
        loss[i] = loss_at(r, tensor, origin, direction, (i < 2 ? i - 2 : i - 1) * h, tokens, B, T);
    const double slope = (loss[0] - 8 * loss[1] + 8 * loss[2] - loss[3]) / (12 * h);
    if (!(fabs(slope - component) <= 1e-9 * sqrt(gradient_norm) + 1e-12)) {
        print_error("%s: slope %.12g, gradient's component %.12g, gradient's norm %.3g\n", tensor->name, slope,
                    component, sqrt(gradient_norm));
        _fail(__FILE__, __LINE__);
    }
    memcpy(tensor->value, origin, (size_t)count * sizeof *origin);
    free(direction);
    free(origin);
}

static void gradients_are_slopes_with(struct reference_config config, struct reference_attention_options attention,
                                      double z_loss, int B, int T, reference_dropout *dropout) {
    uint64_t state = 7;
    struct reference *r = reference_create(config);
    r->attention = attention;
    r->z_loss = z_loss;
    r->dropout = dropout;
    for (int i = 0; i < r->num_tensors; i++)
        for (int64_t j = 0; j < r->tensors[i].rows * r->tensors[i].cols; j++)
            r->tensors[i].value[j] = (r->tensors[i].cols > 1 ? 0.5 : 0.3) * test_uniform(&state) +
                                     (strstr(r->tensors[i].name, "ln") != NULL);
    int32_t *tokens = (int32_t *)test_alloc(sizeof(int32_t) * 2 * (size_t)(B * T)); // tokens, then targets
    for (int i = 0; i < 2 * B * T; i++)
        tokens[i] = (int32_t)(test_random(&state) % (uint64_t)config.V);
    struct reference_activations *a = reference_forward(r, tokens, tokens + B * T, B, T);
    reference_backward(r, a);
    reference_activations_destroy(a);
    for (int i = 0; i < r->num_tensors; i++)
        check_slope(r, &r->tensors[i], tokens, B, T, &state);
    free(tokens);
    reference_destroy(r);
}

static void gradients_are_slopes(struct reference_config config, int B, int T, reference_dropout *dropout) {
    struct reference_attention_options causal;
    memset(&causal, 0, sizeof causal);
    gradients_are_slopes_with(config, causal, 0, B, T, dropout);
}

//                                          L  C   H  Hkv D  F   V  positions layernorm swiglu qkv_bias biases tied  eps
//                                          base
static const struct reference_config GPT2_WITH_GQA = {2,    12,    6,    2,    4,    10,   17, 9,
                                                      true, false, true, true, true, 1e-5, 0};
static const struct reference_config LLAMA_WITH_MQA = {3,     10,   3,     1,     6,    9,    13, 0,
                                                       false, true, false, false, true, 1e-6, 100};
static const struct reference_config EVERY_BIAS = {1, 7, 2, 2, 2, 5, 11, 0, true, true, true, true, false, 1e-3, 1e4};
static const struct reference_config RMSNORM_AND_GELU = {2,     8,     4,     4,     2,     6,    12, 8,
                                                         false, false, false, false, false, 1e-5, 0};

static void gradients_without_dropout(void **state) {
    gradients_are_slopes(GPT2_WITH_GQA, 2, 5, NULL);
    gradients_are_slopes(LLAMA_WITH_MQA, 2, 6, NULL);
    gradients_are_slopes(EVERY_BIAS, 3, 4, NULL);
    gradients_are_slopes(RMSNORM_AND_GELU, 1, 8, NULL);
    gradients_are_slopes(LLAMA_WITH_MQA, 2, 1, NULL);
}
static void gradients_with_dropout(void **state) {
    gradients_are_slopes(GPT2_WITH_GQA, 2, 5, a_third_dropped);
    gradients_are_slopes(LLAMA_WITH_MQA, 1, 7, a_third_dropped);
}

static void gradients_with_a_z_loss(void **state) {
    struct reference_attention_options causal;
    memset(&causal, 0, sizeof causal);
    gradients_are_slopes_with(GPT2_WITH_GQA, causal, 0.1, 2, 5, NULL);
    gradients_are_slopes_with(EVERY_BIAS, causal, 0.1, 3, 4, NULL);
}

// Checks gradients with a scale of scores, and a cap so low that it bends them.
static void gradients_with_masks(void **state) {
    static const int32_t starts[] = {0, 0, 2, 2, 2, 2, 2, 0, 1, 2, 2, 2, 5, 5};
    struct reference_attention_options attention;
    memset(&attention, 0, sizeof attention);
    attention.document_starts = starts;
    gradients_are_slopes_with(LLAMA_WITH_MQA, attention, 0, 2, 7, NULL);
    attention.windows[1] = 3;
    attention.scale = 0.7;
    attention.softcap = 0.8;
    gradients_are_slopes_with(LLAMA_WITH_MQA, attention, 0, 2, 7, a_third_dropped);
    attention.document_starts = NULL;
    gradients_are_slopes_with(RMSNORM_AND_GELU, attention, 0, 1, 8, NULL);
}

// Checks that tokens of another document change no logit of this document, and tokens outside the windows of all layers
// change none either.
static void logits_do_not_see_what_is_masked(void **state) {
    enum { T = 7, FIRST = 3 };
    const struct reference_config config = LLAMA_WITH_MQA;
    uint64_t seed = 11;
    for (int windowed = 0; windowed < 2; windowed++) {
        static const int32_t starts[T] = {0, 0, 0, FIRST, FIRST, FIRST, FIRST};
        struct reference *r = reference_create(config);
        for (int i = 0; i < r->num_tensors; i++)
            for (int64_t j = 0; j < r->tensors[i].rows * r->tensors[i].cols; j++)
                r->tensors[i].value[j] = test_uniform(&seed);
        r->attention.document_starts = windowed ? NULL : starts;
        for (int l = 0; l < config.L && windowed; l++)
            r->attention.windows[l] = l == 0 ? FIRST : 1; // what reaches FIRST begins at token 1
        int32_t tokens[T] = {1, 2, 3, 4, 5, 6, 7};
        struct reference_activations *before = reference_forward(r, tokens, tokens, 1, T);
        tokens[0] = 9;
        struct reference_activations *after = reference_forward(r, tokens, tokens, 1, T);
        for (int t = 0; t < T; t++) {
            const size_t bytes = (size_t)config.V * sizeof(double);
            const bool same = memcmp(before->logits + t * config.V, after->logits + t * config.V, bytes) == 0;
            assert_int_equal(same, t >= FIRST);
        }
        reference_activations_destroy(before);
        reference_activations_destroy(after);
        reference_destroy(r);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gpt2_equals_pytorch),    cmocka_unit_test(llama_equals_pytorch),
        cmocka_unit_test(qwen2_equals_pytorch),   cmocka_unit_test(gradients_without_dropout),
        cmocka_unit_test(gradients_with_dropout), cmocka_unit_test(gradients_with_a_z_loss),
        cmocka_unit_test(gradients_with_masks),   cmocka_unit_test(logits_do_not_see_what_is_masked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
