// Models from elsewhere and back. Folders that transformers wrote, and llm.c's checkpoints, give the logits that
// transformers computes; what is saved is loaded as the same bits.
//
// Logits are compared by the largest difference over the largest logit. In fp32 that is within 1e-5: transformers' own
// fp32 is within 1e-6 (test/golden/README.md). The bound of bf16 is computed as in op_golden.c: the double-precision
// reference runs on the same parameters with a random relative error, uniform within one unit roundoff, on every number
// that the engine stores as bf16; the bound is three times the root mean square of the logits' changes.

#include "test/model.h"     // before gpt.cuh, which it looks into
#include "run/load.cuh"     // under test
#include "run/save.cuh"     // under test
#include "run/start.h"      // start_find: a folder's settings as options
#include "test/fails.h"     // assert_fails
#include "test/golden.h"    // golden_open, golden_tensor
#include "test/reference.h" // reference_forward
#include "test/testing.h"   // cmocka

#include <omp.h> // omp_set_num_threads

enum { DRAWS = 8, MAX_WORDS = 64 };
static const double FP32_BOUND = 1e-5, DEVIATIONS = 3;

// ---- A model -------------------------------------------------------------------------------------------------------

struct setup {
    char *words; // the config points into these
    struct device *dev;
    struct config config;
    struct gpt *m;
};

// Opens the model that a line of options describes. Evaluation and generation are planned too.
static struct setup setup_of(const char *options) {
    char *words[MAX_WORDS];
    int n = 0;
    struct setup s;
    s.words = (char *)test_alloc(strlen(options) + 256);
    sprintf(s.words, "train_gpt --plan --micro-batch-size 1 --sample-every 1 --sample-tokens 999 %s", options);
    char *rest = NULL;
    for (char *word = strtok_r(s.words, " ", &rest); word && n < MAX_WORDS - 1; word = strtok_r(NULL, " ", &rest))
        words[n++] = word;
    words[n] = NULL;
    s.config = config_read(n, words, NULL);
    config_given(&s.config, evaluation.sample_tokens) = false; // so that it is as long as the sequence
    start_find(&s.config);
    config_resolve(&s.config);
    s.config.evaluation.val_every = 1;
    s.dev = (struct device *)calloc(1, sizeof *s.dev);
    assert_non_null(s.dev);
    s.dev->threads = 1; // barriers would take most of the time of ops this small
    omp_set_num_threads(s.dev->threads);
    device_open(s.dev, 0, false);
    s.dev->matmul = matmul_create(s.dev);
    s.m = gpt_create(&s.config, policy_keep_all(s.config.model.num_layers), ATTENTION_FLASH, s.dev);
    gpt_allocate(s.m);
    return s;
}
static void setup_free(struct setup *s) {
    gpt_destroy(s->m);
    matmul_destroy(s->dev->matmul);
    device_close(s->dev);
    (free)(s->dev);
    free(s->words);
}

static struct setup setup_from(const char *path, int T, const char *more) {
    char options[2 * PATH_MAX];
    snprintf(options, sizeof options, "--init-from %s --seq-length %d %s", path, T, more);
    return setup_of(options);
}

// Returns the exact values of the parameters, which the caller frees.
static float *exact(const struct gpt *m) { return state_values(m, STATE_MASTER); }

// ---- Logits --------------------------------------------------------------------------------------------------------

// Returns the logits (T, V) of an evaluation in which one chunk holds all of them; the caller frees them.
static double *evaluated(struct gpt *m, const int32_t *tokens) {
    const int V = m->shape.V, Vp = m->shape.Vp, T = m->config.model.seq_length;
    assert_int_equal(m->loss_chunk, T);
    gpt_evaluate(m, batch_of(tokens, tokens));
    const int id = m->slots[PASS_EVALUATE * (m->shape.L + 1) * SLOT_COUNT + SLOT_LOGITS];
    const floatX *logits = (const floatX *)plan_pointer(&m->timeline.plan, &m->timeline.arenas, id);
    double *result = test_doubles((int64_t)T * V);
    for (int t = 0; t < T; t++)
        for (int v = 0; v < V; v++)
            result[t * V + v] = to_float(logits[t * Vp + v]);
    return result;
}
// Returns the logits (T, V) that come token by token through the KV cache; the caller frees them.
static double *decoded(struct gpt *m, const int32_t *tokens) {
    const int V = m->shape.V, T = m->config.model.seq_length;
    double *result = test_doubles((int64_t)T * V);
    for (int t = 0; t < T; t++) {
        const int32_t position = t;
        const floatX *logits = gpt_decode(m, &tokens[t], &position);
        device_synchronize(m->dev);
        for (int v = 0; v < V; v++)
            result[t * V + v] = to_float(logits[v]);
    }
    return result;
}
static double largest_error(const double *x, const double *expected, int64_t n) {
    double error = 0, largest = 0;
    for (int64_t i = 0; i < n; i++) {
        error = fabs(x[i] - expected[i]) <= error ? error : fabs(x[i] - expected[i]); // a NaN stays
        largest = fmax(largest, fabs(expected[i]));
    }
    return error / largest;
}

static struct reference *reference_of_model(const struct gpt *m) {
    const struct model_shape *s = &m->shape;
    struct reference_config c;
    c.L = s->L, c.C = s->layer.C, c.H = s->layer.H, c.Hkv = s->layer.G, c.D = s->layer.D, c.F = s->layer.F, c.V = s->V;
    c.positions = s->P;
    c.layernorm = s->normalization == NORMALIZATION_LAYERNORM;
    c.swiglu = s->activation == ACTIVATION_SWIGLU;
    c.qkv_bias = s->qkv_bias;
    c.biases = s->mlp_bias;
    c.tied = s->tied;
    c.norm_epsilon = m->config.model.norm_epsilon;
    c.rotary_base = m->config.model.rotary_base;
    struct reference *r = reference_create(c);
    float *values = exact(m);
    for (int i = 0; i < m->table.num_tensors; i++) {
        const struct tensor *t = &m->table.tensors[i];
        struct reference_tensor *to = reference_find(r, t->name);
        assert_non_null(to);
        for (int64_t j = 0; j < to->rows * to->cols; j++)
            to->value[j] = values[t->offset + j];
    }
    free(values);
    return r;
}
static double perturbed(void *context, double x) {
    return x * (1 + FLOATX_ROUNDING * test_uniform((uint64_t *)context));
}
static double bound_of(const struct gpt *m, const int32_t *tokens, const double *expected) {
    if (sizeof(floatX) == 4)
        return FP32_BOUND;
    const int T = m->config.model.seq_length;
    double squares = 0;
    struct reference *r = reference_of_model(m);
    r->rounding = perturbed;
    for (int draw = 0; draw < DRAWS; draw++) {
        uint64_t seed = (uint64_t)draw;
        r->rounding_context = &seed;
        struct reference_activations *a = reference_forward(r, tokens, tokens, 1, T);
        const double error = largest_error(a->logits, expected, (int64_t)T * m->shape.V);
        squares += error * error / DRAWS;
        reference_activations_destroy(a);
    }
    reference_destroy(r);
    return DEVIATIONS * sqrt(squares);
}

static void assert_logits(struct gpt *m, const int32_t *tokens, const double *expected, const char *what) {
    const int64_t n = (int64_t)m->config.model.seq_length * m->shape.V;
    const double bound = bound_of(m, tokens, expected);
    double *of_evaluation = evaluated(m, tokens), *of_decoding = decoded(m, tokens);
    const double a = largest_error(of_evaluation, expected, n), b = largest_error(of_decoding, expected, n);
    print_message("%s: logits differ by %.2g in evaluation, %.2g in decoding, allowed %.2g\n", what, a, b, bound);
    test_case_without_seed("%s", what);
    if (!(a <= bound))
        fail_comparison("a logit of evaluation", a, " of the largest one", bound,
                        largest_difference(of_evaluation, expected, n), __FILE__, __LINE__);
    if (!(b <= bound))
        fail_comparison("a logit of decoding", b, " of the largest one", bound,
                        largest_difference(of_decoding, expected, n), __FILE__, __LINE__);
    free(of_evaluation);
    free(of_decoding);
}

// ---- What transformers wrote ---------------------------------------------------------------------------------------

static const char *load(struct setup *s, struct error_text *error) {
    bool all_fp32;
    return model_load_folder(s->m, s->config.checkpoints.init_from, &all_fp32, error);
}
static void equals_golden(struct setup *s, const char *problem, const char *path) {
    struct golden *g = golden_open(path);
    assert_string_equal(problem ? problem : "", "");
    assert_int_equal(golden_tensor(g, "logits")->count,
                     (int64_t)s->config.model.seq_length * s->config.model.vocab_size);
    double *expected = golden_doubles(g, "logits");
    assert_logits(s->m, golden_ints(g, "tokens"), expected, path);
    free(expected);
    golden_close(g);
}
static void equals_transformers(const char *name) {
    char path[256], expected[320];
    struct error_text error;
    snprintf(path, sizeof path, "test/golden/huggingface/%s", name);
    snprintf(expected, sizeof expected, "%s/expected.golden", path);
    struct setup s = setup_from(path, 24, "");
    equals_golden(&s, load(&s, &error), expected);
    setup_free(&s);
}
static void gpt2_equals_transformers(void **state) { equals_transformers("gpt2"); }
static void llama_equals_transformers(void **state) { equals_transformers("llama"); }
static void sharded_equals_transformers(void **state) { equals_transformers("llama_sharded"); }
static void qwen2_equals_transformers(void **state) { equals_transformers("qwen2"); }
static void bf16_equals_transformers(void **state) { equals_transformers("qwen2_bf16"); }

static void llmc_equals_transformers(void **state) {
    for (int version = 3; version <= 5; version += 2) {
        char path[256], expected[320];
        struct error_text error;
        snprintf(path, sizeof path, "test/golden/huggingface/gpt2.%d.bin", version);
        snprintf(expected, sizeof expected, "test/golden/huggingface/gpt2.%d.golden", version);
        struct setup s = setup_from(path, 24, "");
        equals_golden(&s, model_load_llmc(s.m, path, &error), expected);
        setup_free(&s);
    }
}

// ---- Saved and loaded ----------------------------------------------------------------------------------------------

static char folder[TEST_PATH]; // the folder that the tests write to

static int make_folder(void **state) { return mkdtemp(test_template(folder, "op_huggingface")) ? 0 : -1; }
static int remove_folder(void **state) {
    char *const slash = strrchr(folder, '/');
    *slash = '\0';
    const int above = open(folder, O_RDONLY | O_DIRECTORY);
    const int failed = checkpoint_remove_tree(above, slash + 1);
    close(above);
    return failed;
}

// Fills the moments with random values, stored as the model stores them. Behind the visible rows they stay 0.
static void randomize_moments(struct gpt *m) {
    uint64_t random = 8;
    struct optimizer *o = &m->optimizer;
    for (int i = 0; i < m->table.num_tensors; i++) {
        const struct tensor *t = &m->table.tensors[i];
        const int64_t room = state_blocks(t->count) * STATE_BLOCK;
        float *values = (float *)test_alloc((size_t)room * sizeof *values);
        char *native = (char *)test_alloc((size_t)room * sizeof *values);
        for (int id = 0; id < STATE_COUNT; id++) {
            const enum state_format format = optimizer_format(o, (enum optimizer_state)id, t);
            if (optimizer_state_rows[id].start == STATE_FROM_PARAMETERS || format == FORMAT_NONE)
                continue;
            for (int64_t j = 0; j < room; j++) {
                const double sign = id == STATE_MOMENT1 ? test_uniform(&random) : fabs(test_uniform(&random));
                values[j] = j < tensor_visible_elements(t) ? (float)(sign * exp(4 * test_uniform(&random))) : 0;
            }
            state_encode(native, values, format, room);
            optimizer_upload(o, (enum optimizer_state)id, t->offset, t->count, native);
        }
        free(values);
        free(native);
    }
}
// Fills all that a checkpoint holds with values that no initialization gives. Padding stays zero.
static void randomize(struct gpt *m) {
    uint64_t random = 7;
    for (int i = 0; i < m->table.num_tensors; i++) {
        const struct tensor *t = &m->table.tensors[i];
        float *values = (float *)calloc((size_t)t->count + STATE_BLOCK, sizeof *values); // whole blocks
        floatX *rounded = (floatX *)test_alloc(2 * (size_t)t->count * sizeof *rounded);
        const int64_t visible = (int64_t)t->visible_rows * t->cols;
        for (int64_t j = 0; j < visible; j++)
            values[j] = (float)(0.4 * test_uniform(&random) + (t->init == INIT_ONE));
        optimizer_set_parameters(&m->optimizer, t->offset, values, t->count, rounded);
        device_synchronize(m->dev);
        free(values);
        free(rounded);
    }
    randomize_moments(m);
}

static void save_into(struct setup *s, int64_t step) {
    struct saver saver;
    s->m->config.data.out = folder;
    saver_open(&saver, s->m, -1);
    assert_null(saver_begin(&saver, step, strdup("{}"), 2));
    saver_save(&saver);
    const char *problem = saver_wait(&saver);
    assert_string_equal(problem ? problem : "", "");
    saver_close(&saver);
}

static bool same_bits(const void *a, const void *b, int64_t elements, size_t width) {
    return memcmp(a, b, (size_t)elements * width) == 0;
}

static const char SMALL[] = "--vocab-size 67 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 12 "
                            "--max-position-embeddings 14 --ffn-hidden-size 40 --norm-epsilon 1e-4 ";
#define LLAMA "--normalization RMSNorm --position-embedding-type rope --activation swiglu --rotary-base 300 "
#define NO_BIAS "--no-add-bias-linear "
#define UNTIED "--untie-embeddings-and-output-weights "
static const struct {
    const char *name, *options;
    enum architecture architecture;
    bool of_others; // of a model that the reference of these tests does not compute
} shapes[] = {
    {"gpt2", "", ARCHITECTURE_GPT2},
    {"gpt2 with 2 KV heads", "--num-query-groups 2", ARCHITECTURE_GPT2},
    {"gpt2 with a KV head, untied, without biases", "--num-query-groups 1 " UNTIED NO_BIAS, ARCHITECTURE_GPT2},
    {"gpt2 with biases of q, k and v alone", NO_BIAS "--add-qkv-bias", ARCHITECTURE_GPT2},
    {"llama, wide heads", LLAMA NO_BIAS "--num-query-groups 2 --kv-channels 16", ARCHITECTURE_LLAMA},
    {"llama, untied, all biases", LLAMA UNTIED, ARCHITECTURE_LLAMA},
    {"qwen2", LLAMA NO_BIAS "--add-qkv-bias --num-query-groups 1", ARCHITECTURE_QWEN2},
    {"LayerNorm with rope", "--position-embedding-type rope --num-query-groups 2 " UNTIED, ARCHITECTURE_OURS},
    {"RMSNorm with positions and wide heads", "--normalization RMSNorm --kv-channels 16 " NO_BIAS, ARCHITECTURE_OURS},
    {"qwen3", LLAMA NO_BIAS "--qk-layernorm --num-query-groups 2 --kv-channels 16", ARCHITECTURE_QWEN3, true},
    {"olmo2", LLAMA NO_BIAS UNTIED "--qk-layernorm --qk-layernorm-width full --norm-placement post", ARCHITECTURE_OLMO2,
     true},
    {"gemma3",
     LLAMA NO_BIAS "--activation geglu --apply-layernorm-1p --norm-placement sandwich --qk-layernorm --window-size 5 "
                   "--embedding-multiplier 5.656854249492381 --rotary-base-local 70",
     ARCHITECTURE_GEMMA3, true},
    {"phi3", LLAMA NO_BIAS "--num-query-groups 2 --kv-channels 16 --rotary-percent 0.75", ARCHITECTURE_PHI3, true},
    {"gpt_neox, untied",
     UNTIED "--position-embedding-type rope --rotary-base 300 --rotary-percent 0.25 --activation gelu_erf "
            "--parallel-residual",
     ARCHITECTURE_GPT_NEOX, true},
    {"norms after, with biases", "--norm-placement post --no-add-mlp-bias", ARCHITECTURE_OURS, true},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static struct setup setup_of_shape(int shape, const char *more) {
    char options[1024];
    snprintf(options, sizeof options, "%s %s %s", SMALL, shapes[shape].options, more);
    struct setup s = setup_of(options);
    assert_int_equal(architecture_of(&s.config), shapes[shape].architecture);
    return s;
}

static void resumes_as_the_same_bits(const char *options) {
    char path[256];
    struct error_text error;
    for (int i = 0; i < SHAPES; i++) {
        struct setup a = setup_of_shape(i, options), b = setup_of_shape(i, options);
        const int64_t n = a.m->table.trained.flat;
        randomize(a.m);
        save_into(&a, i);
        snprintf(path, sizeof path, "%s/checkpoints/step_%08d", folder, i);
        const char *problem = model_load_checkpoint(b.m, path, &error);
        if (problem)
            fail_msg("%s, %s: %s", shapes[i].name, options, problem);
        if (!same_bits(a.m->zero.params, b.m->zero.params, n, sizeof(floatX)))
            fail_msg("%s, %s: parameters differ", shapes[i].name, options);
        for (int id = 0; id < STATE_COUNT; id++) {
            float *saved = state_values(a.m, (enum optimizer_state)id),
                  *loaded = state_values(b.m, (enum optimizer_state)id);
            if (!same_bits(saved, loaded, n, sizeof(float)))
                fail_msg("%s, %s: %s differ", shapes[i].name, options, optimizer_state_rows[id].name);
            free(saved);
            free(loaded);
        }
        setup_free(&a);
        setup_free(&b);
    }
}
static void resumes_from_bf16(void **state) { resumes_as_the_same_bits("--checkpoint-dtype bf16"); }
static void resumes_from_fp32(void **state) { resumes_as_the_same_bits("--checkpoint-dtype fp32"); }
static void resumes_from_shards(void **state) {
    resumes_as_the_same_bits("--max-shard-gib 1e-5");
    char path[256];
    snprintf(path, sizeof path, "%s/checkpoints/step_00000000/model.safetensors.index.json", folder);
    assert_int_equal(access(path, R_OK), 0);
}
// Checks a save as of a run that goes on meanwhile: from a copy, which later changes don't reach.
static void saves_from_a_copy(void **state) {
    struct error_text error;
    char path[256];
    struct setup a = setup_of_shape(1, "--checkpoint-every 1"), b = setup_of_shape(1, "");
    struct saver saver;
    assert_true(a.m->copy.keeps);
    randomize(a.m);
    a.m->config.data.out = folder;
    saver_open(&saver, a.m, 66);
    assert_null(saver_begin(&saver, 77, strdup("{}"), 2));
    saver_save(&saver);
    const int64_t n = a.m->table.trained.flat;
    float *kept = exact(a.m);
    memset(a.m->zero.params, 0xff, (size_t)n * sizeof *a.m->zero.params);
    if (a.m->optimizer.states[STATE_MASTER].device)
        memset(a.m->optimizer.states[STATE_MASTER].device, 0xff, (size_t)n * sizeof(uint16_t));
    const char *problem = saver_wait(&saver);
    assert_string_equal(problem ? problem : "", "");
    saver_close(&saver);
    snprintf(path, sizeof path, "%s/checkpoints/step_00000077", folder);
    problem = model_load_checkpoint(b.m, path, &error);
    assert_string_equal(problem ? problem : "", "");
    // In bf16, model.safetensors has bf16, and the exact values are in the optimizer's file.
    float *loaded = exact(b.m);
    assert_true(same_bits(kept, loaded, n, sizeof(float)));
    free(loaded);
    free(kept);
    setup_free(&a);
    setup_free(&b);
}

// ---- States in other formats ----------------------------------------------------------------------------------------

static const char *const state_options[] = {
    "",
    "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "--exp-avg-dtype 8bit --exp-avg-sq-dtype 8bit",
    "--exp-avg-dtype 8bit --exp-avg-sq-dtype bf16 --optimizer-cpu-offload --optimizer-offload-fraction 0.4",
    "--optimizer-cpu-offload --offload-weights --checkpoint-dtype fp32",
    "--ema-decay 0.9",
#ifdef PRECISION_BF16
    "--main-params-dtype bf16 --exp-avg-sq-dtype bf16",
#endif
};
enum { STATE_OPTIONS = sizeof state_options / sizeof *state_options };
static const char *const muon_options[] = {
    "--optimizer muon",
    "--optimizer muon --exp-avg-dtype bf16 --optimizer-cpu-offload --optimizer-offload-fraction 0.4",
    "--optimizer muon --exp-avg-dtype 8bit --ema-decay 0.9",
};
enum { MUON_OPTIONS = sizeof muon_options / sizeof *muon_options };

// Checks that each state of two models is stored as the same bytes. Only visible elements count: padding's bytes may
// differ where each stands for 0.
static void assert_same_states(struct gpt *a, struct gpt *b, const char *what) {
    for (int id = 0; id < STATE_COUNT; id++)
        for (int i = 0; i < a->table.num_tensors && optimizer_holds(&a->optimizer, (enum optimizer_state)id); i++) {
            const struct tensor *t = &a->table.tensors[i];
            const enum state_format format = optimizer_format(&a->optimizer, (enum optimizer_state)id, t);
            const int64_t n = tensor_visible_elements(t);
            char *x = (char *)test_alloc((size_t)(n + STATE_BLOCK) * 4),
                 *y = (char *)test_alloc((size_t)(n + STATE_BLOCK) * 4);
            optimizer_download(&a->optimizer, (enum optimizer_state)id, t->offset, n, x);
            optimizer_download(&b->optimizer, (enum optimizer_state)id, t->offset, n, y);
            if (memcmp(x, y,
                       format_has_scales(format) ? state_bytes(format, n)
                                                 : state_bytes(format, 128) / 128 * (size_t)n) != 0)
                fail_msg("%s: %s of %s differ", what, optimizer_state_rows[id].name, t->name);
            free(x);
            free(y);
        }
}
// Checks what a checkpoint of `a` becomes in `b`, a model that stores states in other formats: a's values, rounded
// once.
static void assert_converted(struct gpt *a, struct gpt *b, const char *what) {
    for (int id = 0; id < STATE_COUNT; id++)
        for (int i = 0; i < a->table.num_tensors && optimizer_state_rows[id].start != STATE_FROM_PARAMETERS; i++) {
            const struct tensor *t = &a->table.tensors[i];
            const enum optimizer_state state = (enum optimizer_state)id;
            const enum state_format format = optimizer_format(&b->optimizer, state, t);
            if (format == FORMAT_NONE || optimizer_format(&a->optimizer, state, t) == FORMAT_NONE)
                continue;
            const int64_t n = tensor_visible_elements(t), room = state_blocks(n) * STATE_BLOCK;
            float *values = (float *)test_alloc((size_t)room * sizeof *values);
            char *expected = (char *)test_alloc((size_t)room * sizeof *values),
                 *got = (char *)test_alloc((size_t)room * sizeof *values);
            optimizer_download(&a->optimizer, state, t->offset, room, expected);
            state_decode(values, expected, optimizer_format(&a->optimizer, state, t), room);
            state_encode(expected, values, format, room);
            optimizer_download(&b->optimizer, state, t->offset, room, got);
            if (memcmp(expected, got, state_bytes(format, room)) != 0)
                fail_msg("%s: %s of %s", what, optimizer_state_rows[id].name, t->name);
            free(values);
            free(expected);
            free(got);
        }
}
// Checks resuming from every format in every format, with the states anywhere; in the same format, to the bit.
static void resume_in_every_format(const char *const *options, int count, int shapes, int step) {
    char path[256], what[400];
    struct error_text error;
    for (int shape = 0; shape < shapes; shape++)
        for (int from = 0; from < count; from++) {
            struct setup a = setup_of_shape(shape, options[from]);
            randomize(a.m);
            save_into(&a, step + 10 * shape + from);
            snprintf(path, sizeof path, "%s/checkpoints/step_%08d", folder, step + 10 * shape + from);
            for (int to = 0; to < count; to++) {
                struct setup b = setup_of_shape(shape, options[to]);
                snprintf(what, sizeof what, "'%s' to '%s'", options[from], options[to]);
                const char *problem = model_load_checkpoint(b.m, path, &error);
                if (problem)
                    fail_msg("%s: %s", what, problem);
                if (!same_bits(a.m->zero.params, b.m->zero.params, a.m->table.trained.flat, sizeof(floatX)))
                    fail_msg("%s: parameters differ", what);
                if (to == from)
                    assert_same_states(a.m, b.m, what);
                assert_converted(a.m, b.m, what);
                setup_free(&b);
            }
            setup_free(&a);
        }
}

static void states_resume_in_every_format(void **state) {
    resume_in_every_format(state_options, STATE_OPTIONS, 2, 0);
    resume_in_every_format(muon_options, MUON_OPTIONS, 1, 20);
}
// Checks that a checkpoint of the other optimizer is refused by the name of the missing state; and that averages of
// such a checkpoint take the parameters' place where the user asks for averages.
static void states_of_the_other_optimizer_are_missed(void **state) {
    char path[256];
    struct error_text error;
    struct setup a = setup_of_shape(1, "--ema-decay 0.9"), b = setup_of_shape(1, "--optimizer muon"),
                 c = setup_of_shape(1, "");
    randomize(a.m);
    save_into(&a, 30);
    save_into(&b, 31);
    snprintf(path, sizeof path, "%s/checkpoints/step_00000030", folder);
    const char *problem = model_load_checkpoint(b.m, path, &error);
    assert_true(problem && strstr(problem, "'momentum.layer."));
    assert_null(model_load_averages(c.m, path, &error));
    float *averages = state_values(a.m, STATE_AVERAGES), *loaded = state_values(c.m, STATE_MASTER);
    for (int i = 0; i < a.m->table.num_tensors; i++) {
        const struct tensor *t = &a.m->table.tensors[i];
        assert_memory_equal(loaded + t->offset, averages + t->offset,
                            (size_t)tensor_visible_elements(t) * sizeof *loaded);
    }
    snprintf(path, sizeof path, "%s/checkpoints/step_00000031", folder);
    problem = model_load_checkpoint(a.m, path, &error);
    assert_true(problem && strstr(problem, "'exp_avg.layer."));
    problem = model_load_averages(c.m, path, &error);
    assert_true(problem && strstr(problem, "has no moving averages"));
    free(averages);
    free(loaded);
    setup_free(&a);
    setup_free(&b);
    setup_free(&c);
}

// Writes optimizer.safetensors of a checkpoint whose states have 8 bits anew, without tensor `omitted`, and with codes
// of `retyped` as another type or, where it is of floats, with a NaN. "": no tensor.
static void copy_without(const char *path, const char *omitted, const char *retyped) {
    char name[300];
    struct safetensors file;
    struct safetensors_layout layout;
    struct error_text error;
    snprintf(name, sizeof name, "%s/optimizer.safetensors", path);
    assert_null(safetensors_open(&file, name, &error));
    struct safetensors_tensor *entries = (struct safetensors_tensor *)calloc((size_t)file.count, sizeof *entries);
    unsigned char **data = (unsigned char **)calloc((size_t)file.count, sizeof *data);
    int count = 0;
    for (int i = 0; i < file.count; i++) {
        if (strcmp(file.tensors[i].name, omitted) == 0)
            continue;
        data[i] = (unsigned char *)malloc((size_t)file.tensors[i].bytes + 1);
        assert_null(safetensors_read(&file, &file.tensors[i], 0, file.tensors[i].bytes, data[i], &error));
        entries[count] = file.tensors[i];
        entries[count].id = i;
        if (strcmp(entries[count].name, retyped) == 0 && entries[count].dtype == SAFETENSORS_U8)
            entries[count].dtype = SAFETENSORS_I8;
        else if (strcmp(entries[count].name, retyped) == 0)
            memset(data[i], 0xff, 4); // NaN
        count++;
    }
    assert_null(safetensors_lay_out(&layout, entries, count, NULL, 0, name, &error));
    assert_int_equal(unlink(name), 0);
    FILE *out = fopen(name, "wb");
    assert_non_null(out);
    fwrite(layout.header, 1, (size_t)layout.header_bytes, out);
    for (int i = 0; i < count; i++)
        fwrite(data[entries[i].id], 1, (size_t)entries[i].bytes, out);
    assert_int_equal(fclose(out), 0);
    for (int i = 0; i < file.count; i++)
        (free)(data[i]);
    (free)(data);
    (free)(entries);
    (free)(layout.header);
    safetensors_close(&file);
}
static void bad_states_are_refused(void **state) {
    static const struct {
        const char *omitted, *retyped, *message;
    } cases[] = {
        {"exp_avg.layer.0.fc.weight.scale", "", "has no tensor 'exp_avg.layer.0.fc.weight.scale'"},
        {"exp_avg_sq.layer.1.fc.weight", "", "has no tensor 'exp_avg_sq.layer.1.fc.weight'"},
        {"", "exp_avg.layer.0.fc.weight", "'exp_avg.layer.0.fc.weight' is of type I8; expected F32, BF16 or U8"},
        {"", "exp_avg.layer.0.fc.weight.scale", "'exp_avg.layer.0.fc.weight.scale' has the scale"},
#ifdef PRECISION_BF16
        {"master.wte", "", "has no tensor 'master.wte'"},
#endif
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char path[256];
        struct error_text error;
        struct setup a = setup_of_shape(0, state_options[2]), b = setup_of_shape(0, state_options[2]);
        randomize(a.m);
        save_into(&a, (int64_t)(500 + i));
        snprintf(path, sizeof path, "%s/checkpoints/step_%08d", folder, (int)(500 + i));
        copy_without(path, cases[i].omitted, cases[i].retyped);
        assert_error(model_load_checkpoint(b.m, path, &error), cases[i].message);
        setup_free(&a);
        setup_free(&b);
    }
}

// Checks that a checkpoint's config.json describes a model that computes the same results. A GPT-2 has as many KV heads
// as heads there, and its missing biases are zeros.
static void begins_as_the_same_model(void **state) {
    char path[256];
    struct error_text error;
    int32_t tokens[12];
    for (int t = 0; t < 12; t++)
        tokens[t] = (5 + 31 * t) % 67;
    for (int i = 0; i < SHAPES; i++) {
        if (shapes[i].of_others)
            continue;
        struct setup a = setup_of_shape(i, "--checkpoint-dtype fp32");
        randomize(a.m);
        save_into(&a, i);
        snprintf(path, sizeof path, "%s/checkpoints/step_%08d", folder, i);
        struct setup b = setup_from(path, 12, "");
        const char *problem = load(&b, &error);
        if (problem)
            fail_msg("%s: %s", shapes[i].name, problem);
        struct reference *r = reference_of_model(a.m);
        struct reference_activations *expected = reference_forward(r, tokens, tokens, 1, 12);
        assert_logits(b.m, tokens, expected->logits, shapes[i].name);
        reference_activations_destroy(expected);
        reference_destroy(r);
        setup_free(&a);
        setup_free(&b);
    }
}

// ---- A tied model's output layer -----------------------------------------------------------------------------------

// Adds lm_head.weight to the file of a tied model's folder: the embedding's values, with another last value if `other`.
static void add_head(const char *path, bool other) {
    char name[300];
    struct safetensors file;
    struct safetensors_layout layout;
    struct error_text error;
    snprintf(name, sizeof name, "%s/model.safetensors", path);
    assert_null(safetensors_open(&file, name, &error));
    const int count = file.count;
    struct safetensors_tensor *entries = (struct safetensors_tensor *)calloc((size_t)count + 1, sizeof *entries);
    unsigned char **data = (unsigned char **)calloc((size_t)count + 1, sizeof *data);
    for (int i = 0; i <= count; i++) {
        const struct safetensors_tensor *from =
            i < count ? &file.tensors[i] : safetensors_find(&file, "model.embed_tokens.weight");
        assert_non_null(from);
        entries[i] = *from;
        entries[i].id = i;
        data[i] = (unsigned char *)malloc((size_t)from->bytes);
        assert_null(safetensors_read(&file, from, 0, from->bytes, data[i], &error));
    }
    entries[count].name = "lm_head.weight";
    data[count][entries[count].bytes - 1] ^= (unsigned char)other;
    assert_null(safetensors_lay_out(&layout, entries, count + 1, NULL, 0, name, &error));
    assert_int_equal(unlink(name), 0);
    FILE *out = fopen(name, "wb");
    assert_non_null(out);
    fwrite(layout.header, 1, (size_t)layout.header_bytes, out);
    for (int i = 0; i <= count; i++)
        fwrite(data[entries[i].id], 1, (size_t)entries[i].bytes, out);
    assert_int_equal(fclose(out), 0);
    for (int i = 0; i <= count; i++)
        (free)(data[i]);
    (free)(data);
    (free)(entries);
    (free)(layout.header);
    safetensors_close(&file);
}
static void a_tied_head_has_the_values_of_the_embedding(void **state) {
    for (int other = 0; other < 2; other++) {
        char path[256];
        struct error_text error;
        struct setup a = setup_of_shape(4, "--checkpoint-dtype fp32"), b = setup_of_shape(4, "");
        bool exact_file;
        randomize(a.m);
        save_into(&a, 1000 + other);
        snprintf(path, sizeof path, "%s/checkpoints/step_%08d", folder, 1000 + other);
        add_head(path, other);
        const char *problem = model_load_folder(b.m, path, &exact_file, &error);
        if (!other)
            assert_string_equal(problem ? problem : "", "");
        else
            assert_error(problem, "'lm_head.weight' has other values than 'model.embed_tokens.weight'");
        setup_free(&a);
        setup_free(&b);
    }
}

// ---- A parameter that an architecture has no tensor for ------------------------------------------------------------

// Lists tensors of a model with learned positions as if its architecture were `argument`, such as Llama, which has
// none.
static void list_tensors(void *argument) {
    struct setup s = setup_of_shape(0, "");
    struct huggingface_tensors tensors =
        huggingface_tensors_of(&s.m->table, &s.m->shape, *(const enum architecture *)argument, s.m->shape.layer.D);
    if (tensors.count == 0)
        fail("no tensors");
    huggingface_tensors_free(&tensors);
    setup_free(&s);
}
static void forgets_no_parameter(void **state) {
    enum architecture ours = ARCHITECTURE_OURS, gpt2 = ARCHITECTURE_GPT2, llama = ARCHITECTURE_LLAMA;
    list_tensors(&ours);
    list_tensors(&gpt2);
    assert_fails(list_tensors, &llama,
                 "LlamaForCausalLM has no tensor for 32 of the 32 rows of the parameter lnf.bias");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gpt2_equals_transformers),
        cmocka_unit_test(llama_equals_transformers),
        cmocka_unit_test(sharded_equals_transformers),
        cmocka_unit_test(qwen2_equals_transformers),
        cmocka_unit_test(bf16_equals_transformers),
        cmocka_unit_test(llmc_equals_transformers),
        cmocka_unit_test_setup_teardown(resumes_from_bf16, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(resumes_from_fp32, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(resumes_from_shards, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(saves_from_a_copy, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(states_resume_in_every_format, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(states_of_the_other_optimizer_are_missed, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(bad_states_are_refused, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(begins_as_the_same_model, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(a_tied_head_has_the_values_of_the_embedding, make_folder, remove_folder),
        cmocka_unit_test(forgets_no_parameter),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
