// The engine against PyTorch: logits, loss, every gradient and ten AdamW steps of the golden models, with each
// attention backend; logits through the KV cache as well.
//
// A tensor is compared by the norm of its difference over its norm, a number by its relative difference. In fp32 every
// result is within 1e-5: PyTorch's own fp32 is within 1.5e-6 of the golden values (test/golden/README.md).
//
// In bf16 the bounds are computed: the double-precision reference runs with a random relative error, uniform within one
// unit roundoff up or down, on every number that the engine stores as bf16 (Monte Carlo arithmetic: Parker, "Monte
// Carlo Arithmetic", UCLA CSD-970002, 1997). The root mean square of a result's change over DRAWS runs is the standard
// deviation of what bf16 does to this result. Each result must be within three of these deviations. Rounding to nearest
// is milder than such errors by a factor of about sqrt(2): its relative error is as large only at the lower end of a
// binade. A tensor's norm varies little from draw to draw, so that a few draws are enough. A loss is one number, whose
// deviation a few draws tell only to a quarter: all steps take the largest deviation of the ten.

#include "test/model.h"            // before gpt.cuh, which it looks into
#include "test/golden.h"           // golden_open, golden_tensor
#include "test/reference.h"        // reference_forward, reference_backward, reference_adamw_step
#include "test/reference_golden.h" // reference_of, golden_batch
#include "test/testing.h"          // cmocka, relative_error

#include <omp.h> // omp_set_num_threads

enum { DRAWS = 8 };
static const double FP32_BOUND = 1e-5, DEVIATIONS = 3;

// The number of results that are compared. In an array they are: the logits; each step's loss and gradient norm; each
// gradient, in the order of the file's tensors.
static int comparisons(const struct golden *g) { return 1 + 2 * golden_int(g, "train_steps") + (int)g->num_tensors; }
static int place_of_loss(int step) { return 1 + 2 * step; }
static int place_of_norm(int step) { return 2 + 2 * step; }
static int place_of_gradients(const struct golden *g) { return 1 + 2 * golden_int(g, "train_steps"); }

static const char *comparison_name(const struct golden *g, int place, char *text, size_t size) {
    const int first_gradient = place_of_gradients(g);
    if (place == 0)
        snprintf(text, size, "logits");
    else if (place < first_gradient)
        snprintf(text, size, "%s of step %d", place % 2 == 1 ? "loss" : "gradient norm", (place - 1) / 2 + 1);
    else
        snprintf(text, size, "%s", g->tensors[place - first_gradient].name);
    return text;
}

// A comparison's result: the error that is held against a bound, and where the largest difference lies.
struct comparison {
    double error;
    struct difference largest;
};
static struct comparison tensor_error(const struct golden *g, const char *name, const double *ours) {
    double *expected = golden_doubles(g, name);
    const int64_t n = golden_tensor(g, name)->count;
    const struct comparison c = {relative_error(ours, expected, n), largest_difference(ours, expected, n)};
    free(expected);
    return c;
}
static struct comparison number_error(const struct golden *g, const char *name, int step, double ours) {
    const double expected = golden_floats(g, name)[step], size = fabs(ours - expected);
    const struct comparison c = {size / fabs(expected), {size, ours, expected, step}};
    return c;
}
static struct comparison *comparisons_alloc(const struct golden *g) {
    struct comparison *all = (struct comparison *)calloc((size_t)comparisons(g), sizeof *all);
    assert_non_null(all);
    return all;
}

// ---- Bounds --------------------------------------------------------------------------------------------------------

static double perturbed(void *context, double x) {
    return x * (1 + FLOATX_ROUNDING * test_uniform((uint64_t *)context));
}

static void reference_errors(struct comparison *errors, const struct golden *g, uint64_t seed) {
    const int B = golden_int(g, "micro_batch_size"), T = golden_int(g, "seq_length");
    struct reference *r = reference_of(g);
    r->rounding = perturbed;
    r->rounding_context = &seed;
    for (int step = 0; step < golden_int(g, "train_steps"); step++) {
        struct reference_activations *a =
            reference_forward(r, golden_batch(g, "tokens", step), golden_batch(g, "targets", step), B, T);
        reference_zero_gradients(r);
        reference_backward(r, a);
        if (step == 0)
            errors[0] = tensor_error(g, "logits", a->logits);
        for (int i = 0; step == 0 && i < (int)g->num_tensors; i++)
            if (strncmp(g->tensors[i].name, "grad.", 5) == 0)
                errors[place_of_gradients(g) + i] =
                    tensor_error(g, g->tensors[i].name, reference_find(r, g->tensors[i].name + 5)->gradient);
        errors[place_of_loss(step)] = number_error(g, "losses", step, a->loss);
        errors[place_of_norm(step)] =
            number_error(g, "grad_norms", step, reference_adamw_step(r, reference_adamw_of(g), step + 1));
        reference_activations_destroy(a);
    }
    reference_destroy(r);
}

// Sets every second bound, of the losses or of the gradient norms, to the largest one of all steps.
static void widen_to_largest_step(double *bounds, int steps) {
    double largest = 0;
    for (int step = 0; step < steps; step++)
        largest = fmax(largest, bounds[2 * step]);
    for (int step = 0; step < steps; step++)
        bounds[2 * step] = largest;
}
static double *bounds_of(const struct golden *g) {
    const int n = comparisons(g), steps = golden_int(g, "train_steps");
    double *bounds = test_doubles(n);
    struct comparison *errors = comparisons_alloc(g);
    for (int draw = 0; sizeof(floatX) == 2 && draw < DRAWS; draw++) {
        reference_errors(errors, g, (uint64_t)draw);
        for (int i = 0; i < n; i++)
            bounds[i] += errors[i].error * errors[i].error / DRAWS;
    }
    for (int i = 0; i < n; i++)
        bounds[i] = sizeof(floatX) == 2 ? DEVIATIONS * sqrt(bounds[i]) : FP32_BOUND;
    widen_to_largest_step(bounds + place_of_loss(0), steps);
    widen_to_largest_step(bounds + place_of_norm(0), steps);
    free(errors);
    return bounds;
}

// ---- The engine ----------------------------------------------------------------------------------------------------

static struct config config_of(const struct golden *g) {
    struct config c;
    memset(&c, 0, sizeof c);
    options_set_defaults(&config_options, &c);
    c.model.num_layers = golden_int(g, "num_layers");
    c.model.hidden_size = golden_int(g, "hidden_size");
    c.model.num_attention_heads = golden_int(g, "num_attention_heads");
    c.model.num_query_groups = golden_int(g, "num_query_groups");
    c.model.kv_channels = golden_int(g, "kv_channels");
    c.model.ffn_hidden_size = golden_int(g, "ffn_hidden_size");
    c.model.vocab_size = golden_int(g, "vocab_size");
    c.model.seq_length = golden_int(g, "seq_length");
    c.model.max_position_embeddings = golden_int(g, "max_position_embeddings");
    c.training.micro_batch_size = c.training.global_batch_size = golden_int(g, "micro_batch_size");
    c.model.normalization =
        golden_is(g, "normalization", "LayerNorm") ? NORMALIZATION_LAYERNORM : NORMALIZATION_RMSNORM;
    c.model.norm_epsilon = (float)golden_double(g, "norm_epsilon");
    c.model.position_embedding_type =
        golden_is(g, "position_embedding_type", "rope") ? POSITION_ROPE : POSITION_LEARNED;
    if (c.model.position_embedding_type == POSITION_ROPE)
        c.model.rotary_base = (float)golden_double(g, "rotary_base");
    c.model.activation = golden_int(g, "swiglu") ? ACTIVATION_SWIGLU : ACTIVATION_GELU;
    c.model.add_bias_linear = golden_int(g, "add_bias_linear");
    c.model.add_attention_proj_bias = c.model.add_mlp_bias = c.model.add_bias_linear;
    c.model.add_qkv_bias = golden_int(g, "add_qkv_bias");
    c.model.untie_embeddings_and_output_weights = golden_int(g, "untie_embeddings_and_output_weights");
    c.training.weight_decay = (float)golden_double(g, "weight_decay");
    c.training.adam_beta1 = (float)golden_double(g, "adam_beta1");
    c.training.adam_beta2 = (float)golden_double(g, "adam_beta2");
    c.training.adam_eps = (float)golden_double(g, "adam_eps");
    c.training.clip_grad = (float)golden_double(g, "clip_grad");
    c.evaluation.val_every = c.evaluation.sample_every = 1; // so that evaluation and generation are planned
    c.evaluation.sample_count = c.training.micro_batch_size;
    c.evaluation.sample_tokens = c.model.seq_length;
    return c;
}

// Loads the golden parameters. Rows that pad the vocabulary become ones, which must have no effect.
static void load_parameters(struct gpt *m, const struct golden *g) {
    for (int i = 0; i < m->table.num_tensors; i++) {
        const struct tensor *t = &m->table.tensors[i];
        const int64_t visible = (int64_t)t->visible_rows * t->cols;
        const float *values = golden_floats(g, t->name);
        float *padded = (float *)test_alloc((size_t)t->count * sizeof *padded);
        floatX *rounded = (floatX *)test_alloc(2 * (size_t)t->count * sizeof *rounded);
        assert_int_equal(golden_tensor(g, t->name)->count, visible);
        for (int64_t j = 0; j < t->count; j++)
            padded[j] = j < visible ? values[j] : 1;
        optimizer_set_parameters(&m->optimizer, t->offset, padded, t->count, rounded);
        device_synchronize(m->dev);
        free(padded);
        free(rounded);
    }
    assert_int_equal(g->num_tensors, 2 * m->table.num_tensors + 5); // so the model has every parameter of the file
}

static void engine_gradient_errors(struct comparison *errors, const struct gpt *m, const struct golden *g) {
    for (int i = 0; i < (int)g->num_tensors; i++)
        for (int k = 0; k < m->table.num_tensors; k++) {
            const struct tensor *t = &m->table.tensors[k];
            if (strncmp(g->tensors[i].name, "grad.", 5) != 0 || strcmp(g->tensors[i].name + 5, t->name) != 0)
                continue;
            const int64_t visible = (int64_t)t->visible_rows * t->cols;
            double *gradient = test_doubles(t->count);
            for (int64_t j = 0; j < t->count; j++)
                gradient[j] = fp32_gradients(m)[t->offset + j];
            errors[place_of_gradients(g) + i] = tensor_error(g, g->tensors[i].name, gradient);
            for (int64_t j = visible; j < t->count; j++)
                assert_true(gradient[j] == 0);
            free(gradient);
        }
}

// Compares the logits of an evaluation in which one chunk holds all of them.
static struct comparison evaluation_error(struct gpt *m, const struct golden *g) {
    const int V = m->shape.V, Vp = m->shape.Vp;
    const int64_t N = extent_of(m, PASS_EVALUATE).N;
    assert_int_equal(m->loss_chunk, N);
    gpt_evaluate(m, batch_of(golden_batch(g, "tokens", 0), golden_batch(g, "targets", 0)));
    const int id = m->slots[PASS_EVALUATE * (m->shape.L + 1) * SLOT_COUNT + SLOT_LOGITS];
    const floatX *logits = (const floatX *)plan_pointer(&m->timeline.plan, &m->timeline.arenas, id);
    double *ours = test_doubles(N * V);
    for (int64_t n = 0; n < N; n++)
        for (int v = 0; v < V; v++)
            ours[n * V + v] = to_float(logits[n * Vp + v]);
    const struct comparison error = tensor_error(g, "logits", ours);
    free(ours);
    return error;
}

// Compares the logits that come token by token through the KV cache.
static struct comparison decoding_error(struct gpt *m, const struct golden *g) {
    const int B = m->config.training.micro_batch_size, T = m->config.model.seq_length, V = m->shape.V, Vp = m->shape.Vp;
    const int32_t *batch = golden_batch(g, "tokens", 0);
    int32_t *tokens = (int32_t *)test_alloc((size_t)B * sizeof *tokens);
    int32_t *positions = (int32_t *)test_alloc((size_t)B * sizeof *positions);
    double *ours = test_doubles((int64_t)B * T * V);
    for (int t = 0; t < T; t++) {
        for (int b = 0; b < B; b++) {
            tokens[b] = batch[b * T + t];
            positions[b] = t;
        }
        const floatX *logits = gpt_decode(m, tokens, positions);
        device_synchronize(m->dev);
        for (int b = 0; b < B; b++)
            for (int v = 0; v < V; v++)
                ours[(int64_t)(b * T + t) * V + v] = to_float(logits[b * Vp + v]);
    }
    const struct comparison error = tensor_error(g, "logits", ours);
    free(tokens);
    free(positions);
    free(ours);
    return error;
}

static void engine_errors(struct comparison *errors, struct gpt *m, const struct golden *g) {
    for (int step = 0; step < golden_int(g, "train_steps"); step++) {
        const double loss = micro_step_loss(m, 0, golden_batch(g, "tokens", step), golden_batch(g, "targets", step), 1);
        if (step == 0)
            engine_gradient_errors(errors, m, g);
        const double norm_before_clipping = update_norm(m, step + 1, golden_double(g, "lr"));
        errors[place_of_loss(step)] = number_error(g, "losses", step, loss);
        errors[place_of_norm(step)] = number_error(g, "grad_norms", step, norm_before_clipping);
    }
}

// ---- The comparison ------------------------------------------------------------------------------------------------

static void check(const struct comparison *errors, const double *bounds, const struct golden *g, const char *what) {
    char name[80];
    int nearest = 0, failures = 0;
    test_case_without_seed("%s, %s", g->path, what);
    for (int i = 0; i < comparisons(g); i++) {
        if (!(errors[i].error <= bounds[i])) {
            if (failures++ == 0)
                test_case_print();
            print_difference(comparison_name(g, i, name, sizeof name), errors[i].error, " (relative)", bounds[i],
                             errors[i].largest);
        }
        if (errors[i].error * bounds[nearest] > errors[nearest].error * bounds[i])
            nearest = i;
    }
    print_message("%s, %s: nearest to its bound is %s with %.2g of %.2g\n", g->path, what,
                  comparison_name(g, nearest, name, sizeof name), errors[nearest].error, bounds[nearest]);
    if (failures > 0)
        _fail(__FILE__, __LINE__);
}

static struct gpt *engine_create(struct device *dev, const struct golden *g, const struct config *config,
                                 enum attention_backend backend) {
    memset(dev, 0, sizeof *dev);
    dev->threads = 1; // barriers would take most of the time of ops this small
    omp_set_num_threads(dev->threads);
    device_open(dev, 0, false);
    dev->matmul = matmul_create(dev);
    struct gpt *m = gpt_create(config, policy_keep_all(config->model.num_layers), backend, dev);
    gpt_allocate(m);
    forget_gradients(m);
    load_parameters(m, g);
    return m;
}
static void engine_destroy(struct gpt *m) {
    struct device *dev = m->dev;
    gpt_destroy(m);
    matmul_destroy(dev->matmul);
    device_close(dev);
}
// Compares one backend. The logits are of evaluation or of decoding: a training step overwrites its logits by their
// gradients.
static void compare_backend(const struct golden *g, const double *bounds, enum attention_backend backend,
                            int loss_chunk_tokens, const char *what) {
    struct device dev;
    struct config config = config_of(g);
    config.memory.loss_chunk_tokens = loss_chunk_tokens;
    struct gpt *m = engine_create(&dev, g, &config, backend);
    struct comparison *errors = comparisons_alloc(g);
    errors[0] = loss_chunk_tokens == 0 ? evaluation_error(m, g) : decoding_error(m, g);
    engine_errors(errors, m, g);
    check(errors, bounds, g, what);
    free(errors);
    engine_destroy(m);
}

static void equals_pytorch(const char *path) {
    struct golden *g = golden_open(path);
    double *bounds = bounds_of(g);
    compare_backend(g, bounds, ATTENTION_FLASH, 0, "flash attention, logits of an evaluation");
    compare_backend(g, bounds, ATTENTION_UNFUSED, 17, "unfused attention, head in chunks, logits of decoding");
    free(bounds);
    golden_close(g);
}
static void gpt2_equals_pytorch(void **state) { equals_pytorch("test/golden/gpt2.golden"); }
static void llama_equals_pytorch(void **state) { equals_pytorch("test/golden/llama.golden"); }
static void qwen2_equals_pytorch(void **state) { equals_pytorch("test/golden/qwen2.golden"); }

// ---- z-loss --------------------------------------------------------------------------------------------------------

// Returns the reference after forward and backward of the first batch. seed: of its rounding; NULL: it does not round.
static struct reference *reference_with_z_loss(const struct golden *g, double z_loss, uint64_t *seed) {
    struct reference *r = reference_of(g);
    r->z_loss = z_loss;
    r->rounding = seed ? perturbed : NULL;
    r->rounding_context = seed;
    struct reference_activations *a = reference_forward(r, golden_batch(g, "tokens", 0), golden_batch(g, "targets", 0),
                                                        golden_int(g, "micro_batch_size"), golden_int(g, "seq_length"));
    reference_backward(r, a);
    reference_activations_destroy(a);
    return r;
}
// Returns a bound for each tensor's gradient (num_tensors), in the order of the reference's tensors; the caller frees
// them.
static double *z_loss_bounds(const struct golden *g, const struct reference *exact, double z_loss) {
    double *bounds = test_doubles(exact->num_tensors);
    for (uint64_t draw = 0; sizeof(floatX) == 2 && draw < DRAWS; draw++) {
        uint64_t seed = draw;
        struct reference *r = reference_with_z_loss(g, z_loss, &seed);
        for (int i = 0; i < r->num_tensors; i++) {
            const struct reference_tensor *t = &exact->tensors[i];
            const double error = relative_error(r->tensors[i].gradient, t->gradient, t->rows * t->cols);
            bounds[i] += error * error / DRAWS;
        }
        reference_destroy(r);
    }
    for (int i = 0; i < exact->num_tensors; i++)
        bounds[i] = sizeof(floatX) == 2 ? DEVIATIONS * sqrt(bounds[i]) : FP32_BOUND;
    return bounds;
}
// Checks that a z-loss changes no bit of the reported losses, and that each gradient is of the sum of loss and z-loss.
static void z_loss_has_the_gradients_of_the_reference(const char *path) {
    const double z_loss = 0.1; // so that it is as large a part of the gradients as the cross entropy
    struct golden *g = golden_open(path);
    struct config config = config_of(g);
    struct device dev;
    struct gpt *plain = engine_create(&dev, g, &config, ATTENTION_UNFUSED);
    const double loss = micro_step_loss(plain, 0, golden_batch(g, "tokens", 0), golden_batch(g, "targets", 0), 1);
    engine_destroy(plain);
    config.training.z_loss = z_loss;
    struct gpt *m = engine_create(&dev, g, &config, ATTENTION_UNFUSED);
    assert_true(micro_step_loss(m, 0, golden_batch(g, "tokens", 0), golden_batch(g, "targets", 0), 1) == loss);
    struct reference *exact = reference_with_z_loss(g, z_loss, NULL);
    double *bounds = z_loss_bounds(g, exact, z_loss);
    for (int i = 0; i < m->table.num_tensors; i++) {
        const struct tensor *t = &m->table.tensors[i];
        double *ours = floats_to_doubles(fp32_gradients(m) + t->offset, t->count);
        const struct reference_tensor *r = reference_find(exact, t->name);
        const double error = relative_error(ours, r->gradient, r->rows * r->cols), bound = bounds[r - exact->tensors];
        if (!(error <= bound))
            fail_msg("%s, z-loss: gradient of %s errs by %.3g, more than %.3g", path, t->name, error, bound);
        free(ours);
    }
    free(bounds);
    reference_destroy(exact);
    engine_destroy(m);
    golden_close(g);
}
static void gradients_with_a_z_loss_equal_the_reference(void **state) {
    z_loss_has_the_gradients_of_the_reference("test/golden/gpt2.golden");
    z_loss_has_the_gradients_of_the_reference("test/golden/llama.golden");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gpt2_equals_pytorch),
        cmocka_unit_test(llama_equals_pytorch),
        cmocka_unit_test(qwen2_equals_pytorch),
        cmocka_unit_test(gradients_with_a_z_loss_equal_the_reference),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
