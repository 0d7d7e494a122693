// Small models with batches, and what two steps compute of them, for tests that compare models.
#pragma once
#include "run/fit.cuh"    // fit_of, fit_policy
#include "test/model.h"   // config_of_options, micro_step_loss
#include "test/testing.h" // test_case, assertions
#include <omp.h>          // omp_get_max_threads, omp_set_num_threads
#include <string.h>       // memcpy

// On the emulator, whose threads are fibers, models are a fifth of the size.
#ifdef CUDA_EMULATED
#define BATCH "1"
#define TWO_BATCHES "2"
#define LAYERS "3"
#else
#define BATCH "3"
#define TWO_BATCHES "6"
#define LAYERS "5"
#endif
#define SMALL                                                                                                          \
    "--vocab-size 150 --micro-batch-size " BATCH " --global-batch-size " TWO_BATCHES                                   \
    " --seq-length 37 --loss-chunk-tokens 50 --sample-every 1 --sample-tokens 37 --sample-count " BATCH " "
#define GPT2                                                                                                           \
    SMALL "--num-layers " LAYERS " --hidden-size 48 --num-attention-heads 3 --hidden-dropout 0.1 "                     \
          "--attention-dropout 0.2"
#define LLAMA                                                                                                          \
    SMALL "--num-layers " LAYERS " --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 "                     \
          "--ffn-hidden-size 104 --normalization RMSNorm --position-embedding-type rope --activation swiglu "          \
          "--add-bias-linear=false --add-qkv-bias --untie-embeddings-and-output-weights"
#define MQA SMALL "--num-layers 3 --hidden-size 48 --num-attention-heads 6 --num-query-groups 1 --hidden-dropout 0.3"

enum { PROMPT_TOKENS = 30 };
struct setup {
    struct device *dev; // the model points to it
    struct config config;
    struct gpt *model;
    int32_t *inputs, *targets, *document_starts; // of two batches
    int64_t tokens;                              // of one batch
};

static unsigned setup_lora_modules; // enum lora_module: modules of the next models that get adapters
static struct setup setup_of(const char *shape, const char *options) {
    struct setup s;
    memset(&s, 0, sizeof s);
    s.dev = (struct device *)test_alloc(sizeof *s.dev);
    memset(s.dev, 0, sizeof *s.dev);
    if (!in_long_run()) // barriers would take most of the time of ops this small
        omp_set_num_threads(1);
    s.dev->threads = omp_get_max_threads();
    device_open(s.dev, 0, false);
    s.dev->matmul = matmul_create(s.dev);
    s.config = config_of_options(shape, options);
    s.config.evaluation.val_every = 1; // config_parse sets 0, since there is no --val-data
    s.config.prompt_tokens = PROMPT_TOKENS;
    s.config.lora_modules = setup_lora_modules;
    const enum attention_backend backend =
        s.config.attention.attention_backend == BACKEND_UNFUSED ? ATTENTION_UNFUSED : ATTENTION_FLASH;
    const struct fit f = fit_of(&s.config, backend, s.dev);
    s.model = gpt_create(&s.config, fit_policy(&f), backend, s.dev);
    gpt_allocate(s.model);
    forget_gradients(s.model);
    s.tokens = (int64_t)s.config.training.micro_batch_size * s.config.model.seq_length;
    s.inputs = (int32_t *)test_alloc(2 * (size_t)s.tokens * sizeof *s.inputs);
    s.targets = (int32_t *)test_alloc(2 * (size_t)s.tokens * sizeof *s.targets);
    s.document_starts = (int32_t *)test_alloc(2 * (size_t)s.tokens * sizeof *s.document_starts);
    uint64_t random = 5;
    test_case(random, "%s %s", shape, options);
    for (int64_t i = 0; i < 2 * s.tokens; i++) { // documents of 6 tokens on average, other ones in each row
        const int32_t t = (int32_t)(i % s.config.model.seq_length);
        s.document_starts[i] = t == 0 || test_random(&random) % 6 == 0 ? t : s.document_starts[i - 1];
    }
    for (int64_t i = 0; i < 2 * s.tokens; i++) {
        s.inputs[i] = (int32_t)(test_random(&random) % (uint64_t)s.config.model.vocab_size);
        s.targets[i] = (int32_t)(test_random(&random) % (uint64_t)s.config.model.vocab_size);
    }
    enlarge_parameters(s.model);
    return s;
}
static void setup_free(struct setup *s) {
    watch_phases(NULL, NULL); // or the next model's phases would look into this model's memory
    gpt_destroy(s->model);
    matmul_destroy(s->dev->matmul);
    device_close(s->dev);
    free(s->dev);
    free(s->inputs);
    free(s->targets);
    free(s->document_starts);
}
static struct batch setup_batch(const struct setup *s, int index) {
    const int64_t at = index * s->tokens;
    const struct batch batch = {s->inputs + at, s->targets + at, s->document_starts + at};
    return batch;
}
// Runs a micro-step of batch 0 or 1 as micro_step_loss_of does.
static double setup_micro_step(struct setup *s, int index, double scale) {
    return micro_step_loss_of(s->model, index, setup_batch(s, index), scale);
}

// What two steps leave, each of at least two micro-batches, which take both batches in turn: the losses of the last two
// micro-batches of each step, all gradients of the last step, all parameters.
struct outcome {
    double loss[4];
    float *grads;
    floatX *params;
    int64_t flat;
};
static struct outcome two_steps(struct setup *s) {
    struct outcome o;
    struct gpt *m = s->model;
    for (int step = 0; step < 2; step++) {
        for (int i = 0; i < m->steps.most; i++)
            o.loss[2 * step + i % 2] = micro_step_loss_of(m, i, setup_batch(s, i % 2), 1.0 / m->steps.most);
        gpt_update(m, step + 1, 1e-3);
    }
    device_synchronize(m->dev);
    o.flat = m->table.trained.flat;
    o.grads = (float *)test_alloc((size_t)o.flat * sizeof *o.grads);
    o.params = (floatX *)test_alloc((size_t)o.flat * sizeof *o.params);
    state_decode(o.grads, m->zero.grads, m->zero.grads_format, o.flat);
    memcpy(o.params, m->zero.params, (size_t)o.flat * sizeof *o.params);
    return o;
}
// Checks that all gradients of two models agree within `tolerance`, relative, in each tensor's norm. Both models hold
// unsharded fp32 gradients.
static void assert_close_gradients(const struct gpt *m, const struct gpt *expected, double tolerance) {
    for (int t = 0; t < m->table.num_tensors; t++) {
        const struct tensor *tensor = &m->table.tensors[t];
        double *x = floats_to_doubles(fp32_gradients(m) + tensor->offset, tensor->count);
        double *y = floats_to_doubles(fp32_gradients(expected) + tensor->offset, tensor->count);
        assert_close_at(x, y, tensor->count, tolerance, tensor->name, __FILE__, __LINE__);
        free(x);
        free(y);
    }
}
static struct outcome outcome_of(const char *shape, const char *options) {
    struct setup s = setup_of(shape, options);
    const struct outcome o = two_steps(&s);
    setup_free(&s);
    return o;
}
static void outcome_free(struct outcome *o) {
    free(o->grads);
    free(o->params);
}
// Checks that x (n) and expected (n) have the same bits. Frees both arrays. name: of the values; what: of the case.
static void assert_same_floats(double *x, double *expected, int64_t n, const char *name, const char *what) {
    char text[512];
    const struct difference largest = largest_difference(x, expected, n);
    snprintf(text, sizeof text, "%s: %s", what, name);
    if (memcmp(x, expected, (size_t)n * sizeof *x) != 0)
        fail_comparison(text, largest.size, "", 0, largest, __FILE__, __LINE__);
    free(x);
    free(expected);
}
static void assert_same_bits(const struct outcome *a, const struct outcome *b, const char *what) {
    for (int i = 0; i < 4; i++)
        if (!(isfinite(a->loss[i]) && a->loss[i] == b->loss[i]))
            fail_msg("%s: loss %d is %.17g, not %.17g", what, i, b->loss[i], a->loss[i]);
    assert_same_floats(floats_to_doubles(b->grads, a->flat), floats_to_doubles(a->grads, a->flat), a->flat,
                       "a gradient", what);
    assert_same_floats(to_doubles(b->params, a->flat), to_doubles(a->params, a->flat), a->flat, "a parameter", what);
}
