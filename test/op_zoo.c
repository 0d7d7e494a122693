// The zoo: a model of every architecture that --init-from takes, compared with what transformers computes with it
// (test/golden/zoo): logits of evaluation, and of a prompt that is continued through the KV cache; the loss and every
// gradient, with each attention backend; the same with documents that do not see each other.
//
// Tensors are compared by the norm of their difference over their norm, gradients by their projections
// (test/golden/README.md). In fp32, logits are within 1e-5. So are gradients, beside a share for what each rounding of
// the forward pass does to them: fp32's unit roundoff over bf16's times what bf16 does to them. In bf16 the bound is
// three times what random errors of one unit roundoff on every stored number do.

#include "test/model.h"          // before gpt.cuh, which it looks into
#include "test/config_strings.h" // config_free_strings
#include "run/load.cuh"          // model_load_folder, huggingface_gather
#include "run/start.h"           // start_find: a folder's settings as options
#include "test/golden.h"         // golden_open, golden_tensor
#include "test/testing.h"        // cmocka

#include <dirent.h> // scandir
#include <omp.h>    // omp_set_num_threads

#define ZOO "test/golden/zoo"
enum { MAX_WORDS = 64, PROJECTIONS = 8, END_OF_TEXT = 256, FEWEST_FOLDERS = 20 };
static const double FP32_BOUND = 1e-5, DEVIATIONS = 3, FP32_OVER_BF16 = 0x1p-16;
static const int PROMPTS[] = {13, 5}; // tokens: more than the smallest window, and fewer

// ---- A model -------------------------------------------------------------------------------------------------------

struct zoo_model {
    struct golden *golden;
    char words[1024]; // the config points into these
    struct device dev;
    struct config config;
    struct gpt *m;
    const char *what;
};

static int rows_in(const struct zoo_model *z) { return z->config.training.micro_batch_size; }

static void read_options(struct zoo_model *z, const char *folder, const char *more) {
    char *words[MAX_WORDS];
    int n = 0;
    snprintf(z->words, sizeof z->words,
             "train_gpt --plan --init-from " ZOO "/%s --seq-length %d --micro-batch-size %d --sample-every 1 "
             "--sample-tokens %d --sample-count %d %s",
             folder, golden_int(z->golden, "seq_length"), golden_int(z->golden, "micro_batch_size"),
             golden_int(z->golden, "seq_length"), golden_int(z->golden, "micro_batch_size"), more);
    char *rest = NULL;
    for (char *word = strtok_r(z->words, " ", &rest); word && n < MAX_WORDS - 1; word = strtok_r(NULL, " ", &rest))
        words[n++] = word;
    words[n] = NULL;
    z->config = config_read(n, words, NULL);
    start_find(&z->config);
    config_resolve(&z->config);
    z->config.evaluation.val_every = 1;
    z->config.prompt_tokens = PROMPTS[0];
}

static struct zoo_model *model_open(const char *folder, enum attention_backend backend, const char *more) {
    char path[256];
    struct error_text error;
    bool exact;
    struct zoo_model *z = (struct zoo_model *)test_alloc(sizeof *z);
    memset(z, 0, sizeof *z);
    z->what = backend == ATTENTION_FLASH ? "flash attention" : "unfused attention";
    test_case_without_seed("%s, %s %s", folder, z->what, more);
    snprintf(path, sizeof path, ZOO "/%s/expected.golden", folder);
    z->golden = golden_open(path);
    read_options(z, folder, more);
    z->dev.threads = 1; // barriers would take most of the time of ops this small
    omp_set_num_threads(z->dev.threads);
    device_open(&z->dev, 0, false);
    z->dev.matmul = matmul_create(&z->dev);
    z->m = gpt_create(&z->config, policy_keep_all(z->config.model.num_layers), backend, &z->dev);
    gpt_allocate(z->m);
    forget_gradients(z->m);
    const char *problem = model_load_folder(z->m, z->config.checkpoints.init_from, &exact, &error);
    if (problem)
        fail_msg("%s", problem);
    return z;
}
static void model_close(struct zoo_model *z) {
    gpt_destroy(z->m);
    matmul_destroy(z->dev.matmul);
    device_close(&z->dev);
    golden_close(z->golden);
    config_free_strings(&z->config, z->words, sizeof z->words);
    free(z);
}

// ---- Comparison ----------------------------------------------------------------------------------------------------

// Returns what bf16 does to a tensor of the file. `deviations` has it for each tensor that follows, in the file's
// order.
static double deviation_of(const struct golden *g, const char *name) {
    const struct golden_tensor *all = golden_tensor(g, "deviations"), *t = golden_tensor(g, name);
    const int64_t place = t - all - 1;
    assert_true(place >= 0 && place < all->count && all + 1 + all->count == g->tensors + g->num_tensors);
    return all->floats[place];
}
// Compares a tensor with the file's. share: added to the bound in fp32, for the number of roundings.
static void compare(const struct zoo_model *z, const char *name, const double *ours, double share) {
    const struct golden *g = z->golden;
    const double deviation = deviation_of(g, name);
    const double bound =
        DEVIATIONS * deviation * (sizeof(floatX) == 2 ? 1 : FP32_OVER_BF16) + (sizeof(floatX) == 2 ? 0 : share);
    double *expected = golden_doubles(g, name);
    const int64_t n = golden_tensor(g, name)->count;
    const double error = relative_error(ours, expected, n);
    if (!(error <= bound)) {
        char text[160];
        snprintf(text, sizeof text, "%s of %s, %s", name, g->path, z->what);
        fail_comparison(text, error, " (relative)", bound, largest_difference(ours, expected, n), __FILE__, __LINE__);
    }
    free(expected);
}

// Returns the row of logits, counted through the batch, that is the file's row i.
static int row_of_logits(const struct golden *g, int i) { return golden_ints(g, "positions")[i]; }
static int shown_rows(const struct golden *g) { return (int)golden_tensor(g, "positions")->count; }

// ---- Evaluation ----------------------------------------------------------------------------------------------------

// Returns a logit as cross_entropy sees it, in double.
static double transformed(const struct config *c, double logit) {
    const double scaled = c->model.logit_multiplier * logit, cap = c->model.final_logit_softcapping;
    return cap > 0 ? cap * tanh(scaled / cap) : scaled;
}
static struct batch batch_of_golden(const struct golden *g, const int32_t *document_starts) {
    const struct batch batch = {golden_ints(g, "tokens"), golden_ints(g, "targets"), document_starts};
    return batch;
}
static void evaluation_equals(struct zoo_model *z) {
    struct gpt *m = z->m;
    const int V = m->shape.V, Vp = m->shape.Vp, rows = shown_rows(z->golden);
    assert_int_equal(m->loss_chunk, rows_in(z) * z->config.model.seq_length); // one chunk holds all logits
    const struct loss_sum loss = gpt_evaluate(m, batch_of_golden(z->golden, NULL));
    const double mean = loss_mean(loss);
    compare(z, "loss", &mean, FP32_BOUND / 10);
    const int id = m->slots[PASS_EVALUATE * (m->shape.L + 1) * SLOT_COUNT + SLOT_LOGITS];
    const floatX *logits = (const floatX *)plan_pointer(&m->timeline.plan, &m->timeline.arenas, id);
    double *ours = test_doubles((int64_t)rows * V);
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < V; v++)
            ours[i * V + v] = transformed(&z->config, to_float(logits[(int64_t)row_of_logits(z->golden, i) * Vp + v]));
    compare(z, "logits", ours, FP32_BOUND);
    free(ours);
}

// ---- Generation ----------------------------------------------------------------------------------------------------

// Takes into ours (shown rows, V) the rows of logits (rows, Vp) that the file shows, which follow row b's token at
// positions[b].
static void take_shown(struct zoo_model *z, double *ours, const floatX *logits, const int32_t *positions) {
    const int V = z->m->shape.V, Vp = z->m->shape.Vp, T = z->config.model.seq_length;
    device_synchronize(&z->dev);
    for (int i = 0; i < shown_rows(z->golden); i++) {
        const int n = row_of_logits(z->golden, i), b = n / T;
        for (int v = 0; v < V && positions[b] == n % T; v++)
            ours[i * V + v] = to_float(logits[(int64_t)b * Vp + v]);
    }
}
// Checks decoding: rows are fed as prompts of different lengths, then token by token to their ends.
static void decoding_equals(struct zoo_model *z) {
    const int B = rows_in(z), T = z->config.model.seq_length, prompt = PROMPTS[0];
    const int32_t *tokens = golden_ints(z->golden, "tokens");
    int32_t *next = (int32_t *)test_alloc((size_t)B * sizeof *next);
    int32_t *positions = (int32_t *)test_alloc((size_t)B * sizeof *positions);
    int32_t *prompts = (int32_t *)test_alloc((size_t)(B * prompt) * sizeof *prompts);
    double *ours = test_doubles((int64_t)shown_rows(z->golden) * z->m->shape.V);
    assert_int_equal(B, (int)(sizeof PROMPTS / sizeof *PROMPTS));
    for (int i = 0; i < B * prompt; i++)
        prompts[i] = i % prompt < PROMPTS[i / prompt] ? tokens[i / prompt * T + i % prompt] : 0;
    gpt_prefill(z->m, prompts, PROMPTS);
    for (int i = 0; PROMPTS[B - 1] + i < T; i++) {
        for (int b = 0; b < B; b++) { // a row at its end is fed its last token again
            positions[b] = PROMPTS[b] + i < T ? PROMPTS[b] + i : T - 1;
            next[b] = tokens[b * T + positions[b]];
        }
        take_shown(z, ours, gpt_decode(z->m, next, positions), positions);
    }
    compare(z, "logits", ours, FP32_BOUND);
    free(ours);
    free(prompts);
    free(positions);
    free(next);
}

// ---- Gradients -----------------------------------------------------------------------------------------------------

// sums (PROJECTIONS) = the projections of x (n): each element is added or subtracted as in the file.
static void project(double *sums, const float *x, int64_t n) {
    uint64_t state = 0; // test_random is SplitMix64: its i-th output depends only on i
    for (int k = 0; k < PROJECTIONS; k++)
        sums[k] = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint64_t bits = test_random(&state);
        for (int k = 0; k < PROJECTIONS; k++)
            sums[k] += bits >> k & 1 ? -(double)x[i] : (double)x[i];
    }
}
static int gradients_in(const struct golden *g, const char *prefix) {
    int count = 0;
    for (uint32_t i = 0; i < g->num_tensors; i++)
        count += strncmp(g->tensors[i].name, prefix, strlen(prefix)) == 0;
    return count;
}
// Checks the gradient of each tensor of the folder, in the form in which the folder would save it as a parameter.
static void gradients_equal(const struct zoo_model *z, const char *prefix) {
    const struct gpt *m = z->m;
    struct error_text error;
    enum architecture a = ARCHITECTURE_OURS;
    const char *problem = model_folder_architecture(&a, z->config.checkpoints.init_from, &error);
    assert_null(problem);
    struct huggingface_tensors tensors =
        huggingface_tensors_of(&m->table, &m->shape, a, config_rotary_dims(&z->config));
    int compared = 0;
    for (int i = 0; i < tensors.count; i++) {
        const struct huggingface_tensor *t = &tensors.list[i];
        char name[160];
        double sums[PROJECTIONS];
        snprintf(name, sizeof name, "%s%s", prefix, t->name);
        if (!golden_find(z->golden, name))
            continue; // zero but for rounding
        const int64_t n = huggingface_elements(t);
        float *values = (float *)test_alloc((size_t)n * sizeof *values);
        assert_non_null(t->ours);
        huggingface_gather(values, t, fp32_gradients(m) + t->ours->offset, 0, t->rows);
        project(sums, values, n);
        compare(z, name, sums, FP32_BOUND);
        free(values);
        compared++;
    }
    assert_int_equal(compared, gradients_in(z->golden, prefix));
    huggingface_tensors_free(&tensors);
}
static void training_equals(struct zoo_model *z, struct batch batch, const char *loss_name, const char *prefix) {
    const double loss = micro_step_loss_of(z->m, 0, batch, 1);
    device_synchronize(&z->dev);
    compare(z, loss_name, &loss, FP32_BOUND / 10);
    gradients_equal(z, prefix);
}

// ---- Tests ---------------------------------------------------------------------------------------------------------

static void with_backend(const char *folder, enum attention_backend backend) {
    struct zoo_model *z = model_open(folder, backend, "");
    evaluation_equals(z);
    decoding_equals(z);
    training_equals(z, batch_of_golden(z->golden, NULL), "loss", "grad.");
    model_close(z);
}
// Checks documents: one begins at every end of a text, and at the front of a row.
static void with_documents(const char *folder, enum attention_backend backend) {
    struct zoo_model *z = model_open(folder, backend, "--reset-attention-mask --reset-position-ids --eod-token 256");
    const int T = z->config.model.seq_length, N = rows_in(z) * T;
    const int32_t *tokens = golden_ints(z->golden, "tokens");
    int32_t *starts = (int32_t *)test_alloc((size_t)N * sizeof *starts);
    for (int i = 0; i < N && golden_find(z->golden, "documents.loss"); i++)
        starts[i] = i % T == 0 || tokens[i] == END_OF_TEXT ? i % T : starts[i - 1];
    if (golden_find(z->golden, "documents.loss"))
        training_equals(z, batch_of_golden(z->golden, starts), "documents.loss", "documents.grad.");
    free(starts);
    model_close(z);
}
static void equals_transformers(void **state) {
    const char *folder = (const char *)*state;
    static int models;
    with_backend(folder, ATTENTION_FLASH);
    with_documents(folder, ATTENTION_FLASH);
    if (takes_case(models++, 3)) {
        with_backend(folder, ATTENTION_UNFUSED);
        with_documents(folder, ATTENTION_UNFUSED);
    }
}

static int is_folder(const struct dirent *entry) { return entry->d_name[0] != '.'; }

int main(void) {
    struct dirent **folders;
    const int count = scandir(ZOO, &folders, is_folder, alphasort);
    struct CMUnitTest *tests = (struct CMUnitTest *)calloc((size_t)(count > 0 ? count : 0) + 1, sizeof *tests);
    if (count < FEWEST_FOLDERS || !tests) {
        fprintf(stderr, ZOO ": has %d folders; tests run in the root of the repository\n", count);
        return 1;
    }
    for (int i = 0; i < count; i++) {
        tests[i].name = folders[i]->d_name;
        tests[i].test_func = equals_transformers;
        tests[i].initial_state = folders[i]->d_name;
    }
    const int failed = _cmocka_run_group_tests("zoo", tests, (size_t)count, NULL, NULL);
    for (int i = 0; i < count; i++)
        (free)(folders[i]);
    (free)(folders);
    (free)(tests);
    return failed;
}
