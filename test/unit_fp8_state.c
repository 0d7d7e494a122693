// The state of FP8 in a run: delayed scales in checkpoints' files, shares of values, and a row for the reports.
#include "config/resolve.h"       // config_parse
#include "run/fp8_checkpoint.cuh" // fp8_load
#include "run/fp8_report.cuh"     // fp8_shares, fp8_describe
#include "test/fails.h"           // assert_error
#include "test/testing.h"         // cmocka

enum { LAYERS = 3, STEPS = 2, SCALES = LAYERS * FP8_KINDS, FLOATS = SCALES * (1 + STEPS) };
enum { MOST_SCALES = SCALES + LAYERS * FP8_ATTENTION_TENSORS, MOST_FLOATS = MOST_SCALES * (1 + STEPS) };

static struct device dev;

// Delayed scales of the middle one of three layers, whose values tell their places.
struct delayed {
    struct fp8_state f;
    struct fp8_scale scales[MOST_SCALES];
    float history[MOST_SCALES * STEPS];
};
// Sets attention to FP8, and its scales and histories to values that tell their places.
static void delayed_begin_attention(struct delayed *d, enum config_fp8_attention attention, float unit) {
    d->f.attention = attention;
    d->f.attention_tensors = fp8_attention_tensors_of(&d->f);
    for (int i = SCALES; i < SCALES + LAYERS * d->f.attention_tensors; i++)
        d->scales[i].delayed = unit * (float)(i + 1);
    d->scales[fp8_index(1, LINEAR_ATT_PROJ, FP8_INPUT)].delayed = unit; // attention's output
    const struct fp8_delayed delayed = fp8_delayed_scales(&d->f);
    for (int i = 0; i < delayed.count * delayed.delay.length; i++)
        d->history[i] = unit * (float)(7 * i + 1);
}
static void delayed_begin(struct delayed *d, float unit) {
    memset(d, 0, sizeof *d);
    d->f.recipe = FP8_RECIPE_DELAYED;
    d->f.delay.length = STEPS;
    d->f.first_layer = 1;
    d->f.end_layer = 2;
    d->f.num_layers = LAYERS;
    d->f.scales = d->scales;
    d->f.history = d->history;
    for (int i = 0; i < SCALES; i++) {
        d->scales[i].amax = 7;
        d->scales[i].scale = 3;
        d->scales[i].delayed = i % 5 == 0 ? 0 : unit * (float)(i + 1);
        for (int step = 0; step < STEPS; step++)
            d->history[i * STEPS + step] = unit * (float)(1000 * i + step);
    }
}
static bool delayed_are_equal(const struct delayed *a, const struct delayed *b) {
    return memcmp(a->scales, b->scales, sizeof a->scales) == 0 &&
           memcmp(a->history, b->history, sizeof a->history) == 0;
}

// A file of the two tensors, after `damage` has changed what is to be written; entries without a name are left out.
struct file {
    struct safetensors_tensor entries[FP8_TENSORS];
    float values[MOST_FLOATS];
};
static void write_file(char path[TEST_PATH], const struct delayed *d, void (*damage)(struct file *)) {
    struct file file;
    struct safetensors_layout layout;
    struct error_text error;
    int count = 0;
    for (int t = 0; t < FP8_TENSORS; t++) {
        file.entries[t] = fp8_tensor_entry(&d->f, (enum fp8_tensor)t, t);
        if (fp8_tensor_values(&d->f, (enum fp8_tensor)t) == 0)
            file.entries[t].name = NULL;
    }
    fp8_state_download(&d->f, file.values, &dev);
    if (damage)
        damage(&file);
    for (int t = 0; t < FP8_TENSORS; t++)
        if (file.entries[t].name)
            file.entries[count++] = file.entries[t];
    assert_null(safetensors_lay_out(&layout, file.entries, count, NULL, 0, "file", &error));
    const int fd = mkstemp(test_template(path, "unit_fp8"));
    FILE *out = fdopen(fd, "w");
    assert_non_null(out);
    fwrite(layout.header, 1, layout.header_bytes, out);
    for (int i = 0; i < count; i++)
        fwrite(file.values + fp8_tensor_begin(&d->f, (enum fp8_tensor)file.entries[i].id), 1, file.entries[i].bytes,
               out);
    assert_int_equal(fclose(out), 0);
    free(layout.header);
}
static const char *load_file(struct delayed *to, bool *found, const char *path, struct error_text *error) {
    struct safetensors file;
    assert_null(safetensors_open(&file, path, error));
    const char *problem = fp8_load(&to->f, found, &file, "the file", &dev, error);
    safetensors_close(&file);
    return problem;
}

static void delayed_scales_come_back_from_a_file(void **state) {
    struct delayed saved, loaded;
    struct error_text error;
    char path[TEST_PATH];
    bool found;
    delayed_begin(&saved, 1);
    delayed_begin(&loaded, 0.5f);
    assert_int_equal(fp8_state_floats(&saved.f), FLOATS);
    assert_false(delayed_are_equal(&saved, &loaded));
    write_file(path, &saved, NULL);
    assert_null(load_file(&loaded, &found, path, &error));
    assert_true(found && delayed_are_equal(&saved, &loaded));
    unlink(path);
}

// Checks that attention's scales and histories come back: all with delayed scales, dS's with current ones. A run with
// other scales of attention than the file's loads only those of linear layers.
static void attentions_scales_come_back_from_a_file(void **state) {
    static const struct {
        int length;
        enum config_fp8_attention saved, loaded;
        bool found;
    } cases[] = {
        {STEPS, FP8_ATTENTION_FULL, FP8_ATTENTION_FULL, true},
        {STEPS, FP8_ATTENTION_FORWARD, FP8_ATTENTION_FORWARD, true},
        {0, FP8_ATTENTION_FULL, FP8_ATTENTION_FULL, true},
        {STEPS, FP8_ATTENTION_FULL, FP8_ATTENTION_FORWARD, false},
        {STEPS, FP8_ATTENTION_NONE, FP8_ATTENTION_FULL, false},
        {STEPS, FP8_ATTENTION_FULL, FP8_ATTENTION_NONE, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct delayed saved, loaded, before;
        struct error_text error;
        char path[TEST_PATH];
        bool found;
        test_case_without_seed("case %d", (int)i);
        delayed_begin(&saved, 1);
        delayed_begin(&loaded, 0);
        saved.f.delay.length = loaded.f.delay.length = cases[i].length;
        delayed_begin_attention(&saved, cases[i].saved, 1);
        delayed_begin_attention(&loaded, cases[i].loaded, 0);
        before = loaded;
        write_file(path, &saved, NULL);
        assert_null(load_file(&loaded, &found, path, &error));
        assert_int_equal(found, cases[i].found);
        const struct fp8_delayed delayed = fp8_delayed_scales(&loaded.f);
        for (int j = 0; j < delayed.count; j++) {
            const int at = delayed.first + j;
            const bool comes = at < SCALES || cases[i].saved == cases[i].loaded;
            assert_true(loaded.scales[at].delayed == (comes ? saved.scales[at].delayed : 0));
            for (int k = 0; k < delayed.delay.length; k++)
                assert_true(loaded.history[j * delayed.delay.length + k] ==
                            (comes ? saved.history[j * delayed.delay.length + k] : 0));
        }
        for (int at = 0; at < delayed.first; at++)
            assert_memory_equal(&loaded.scales[at], &before.scales[at], sizeof *loaded.scales);
        assert_int_equal(loaded.f.calibrates, loaded.f.attention == FP8_ATTENTION_FULL && !cases[i].found);
        unlink(path);
    }
}

static void a_run_without_delayed_scales_ignores_them(void **state) {
    struct delayed saved, loaded, before;
    struct error_text error;
    char path[TEST_PATH];
    bool found;
    delayed_begin(&saved, 1);
    delayed_begin(&loaded, 0.5f);
    loaded.f.delay.length = 0;
    before = loaded;
    write_file(path, &saved, NULL);
    assert_int_equal(fp8_state_floats(&loaded.f), 0);
    assert_null(load_file(&loaded, &found, path, &error));
    assert_true(delayed_are_equal(&loaded, &before));
    loaded.f.delay.length = STEPS;
    loaded.f.end_layer = loaded.f.first_layer; // FP8 is off
    assert_int_equal(fp8_state_floats(&loaded.f), 0);
    assert_null(load_file(&loaded, &found, path, &error));
    assert_true(delayed_are_equal(&loaded, &before));
    unlink(path);
}

static void leave_both_out(struct file *file) { file->entries[0].name = file->entries[1].name = NULL; }
static void a_file_without_histories_leaves_them_empty(void **state) {
    struct delayed saved, loaded, before;
    struct error_text error;
    char path[TEST_PATH];
    bool found = true;
    delayed_begin(&saved, 1);
    delayed_begin(&loaded, 0);
    before = loaded;
    write_file(path, &saved, leave_both_out);
    assert_null(load_file(&loaded, &found, path, &error));
    assert_true(!found && delayed_are_equal(&loaded, &before));
    unlink(path);
}

static void leave_scales_out(struct file *file) { file->entries[FP8_TENSOR_SCALE].name = NULL; }
static void leave_histories_out(struct file *file) { file->entries[FP8_TENSOR_HISTORY].name = NULL; }
static void make_scale_nan(struct file *file) { file->values[SCALES - 1] = NAN; }
static void make_scale_negative(struct file *file) { file->values[0] = -1; }
static void make_history_infinite(struct file *file) { file->values[FLOATS - 1] = INFINITY; }
static void make_history_negative(struct file *file) { file->values[SCALES] = -0x1p-149f; }
static void make_integers(struct file *file) { file->entries[FP8_TENSOR_SCALE].dtype = SAFETENSORS_I32; }
static void make_history_shorter(struct file *file) { file->entries[FP8_TENSOR_HISTORY].shape[3] = STEPS - 1; }
static void make_fewer_layers(struct file *file) { file->entries[FP8_TENSOR_SCALE].shape[0] = LAYERS - 1; }
static void damaged_scales_are_refused_and_change_nothing(void **state) {
    static const struct {
        void (*damage)(struct file *);
        const char *words;
    } damages[] = {
        {leave_scales_out, "the file: has no tensor 'fp8.scale'"},
        {leave_histories_out, "the file: has no tensor 'fp8.amax_history'"},
        {make_scale_nan, "the file: tensor 'fp8.scale' has the value nan; expected finite ones of at least 0"},
        {make_scale_negative, "the file: tensor 'fp8.scale' has the value -1"},
        {make_history_infinite, "the file: tensor 'fp8.amax_history' has the value inf"},
        {make_history_negative, "the file: tensor 'fp8.amax_history' has the value -1.4013e-45"},
        {make_integers, "the file: tensor 'fp8.scale' is of type I32; expected F32"},
        {make_history_shorter, "tensor 'fp8.amax_history' has the shape (3, 4, 3, 1); expected (3, 4, 3, 2)"},
        {make_fewer_layers, "tensor 'fp8.scale' has the shape (2, 4, 3); expected (3, 4, 3)"},
    };
    for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
        struct delayed saved, loaded, before;
        struct error_text error;
        char path[TEST_PATH];
        bool found;
        delayed_begin(&saved, 1);
        delayed_begin(&loaded, 0.5f);
        before = loaded;
        write_file(path, &saved, damages[i].damage);
        assert_error(load_file(&loaded, &found, path, &error), damages[i].words);
        assert_true(delayed_are_equal(&loaded, &before));
        unlink(path);
    }
}

static void forgotten_scales_leave_their_histories(void **state) {
    struct delayed d, before;
    delayed_begin(&d, 1);
    before = d;
    fp8_forget_scales(&d.f, &dev);
    assert_memory_equal(d.history, before.history, sizeof d.history);
    for (int i = 0; i < SCALES; i++)
        assert_true(d.scales[i].delayed == 0 && d.scales[i].amax == 7);
    d.f.delay.length = 0;
    before = d;
    fp8_forget_scales(&d.f, &dev);
    assert_true(delayed_are_equal(&d, &before));
}

// ---- reports ----

// Checks the shares over two ranks and two micro-batches of 32 tokens, for layers 1 and 2 of 4: each operand is cast 8
// times, a weight that is kept over micro-batches 4 times.
static void shares_are_of_all_ranks_casts(void **state) {
    enum { RANKS = 2, MICRO_STEPS = 2, TOKENS = 32, CASTS = 8, COUNTS = FP8_KINDS * FP8_COUNTS, WIDTH = COUNTS + 5 };
    struct layer_shape s;
    struct fp8_state f;
    struct log_fp8 shares[LINEAR_COUNT];
    double reports[RANKS * WIDTH];
    memset(&s, 0, sizeof s);
    memset(&f, 0, sizeof f);
    s.C = 48;
    s.H = 3;
    s.G = 1;
    s.D = 16;
    s.F = 80;
    s.gated = true;
    f.num_layers = 4;
    f.first_layer = 1;
    f.end_layer = 3;
    for (int rank = 0; rank < RANKS; rank++)
        for (int i = 0; i < WIDTH; i++) // what surrounds the counts must not be counted
            reports[rank * WIDTH + i] = i < 3 || i >= 3 + COUNTS ? 1e9 : (rank + 1) * (i - 3);
    static const int inputs[] = {48, 48, 48, 80}, outputs[] = {80, 48, 160, 48};
    for (int cached = 0; cached < 2; cached++) {
        f.caches_weights = cached;
        fp8_shares(shares, &f, &s, reports + 3, RANKS, WIDTH, MICRO_STEPS, TOKENS);
        for (int l = 0; l < LINEAR_COUNT; l++) {
            const double weights = 1.0 * outputs[l] * inputs[l] / (cached ? MICRO_STEPS : 1);
            const double elements[] = {1.0 * TOKENS * inputs[l], weights, 1.0 * TOKENS * outputs[l]};
            assert_string_equal(shares[l].linear, linear_row((enum linear)l, &s).name);
            for (int o = 0; o < FP8_OPERANDS; o++) {
                const int first = 2 * (3 * l + o); // the column of `saturated`, before the one of `flushed`
                assert_true(shares[l].saturated[o] == 3 * first / (CASTS * elements[o]));
                assert_true(shares[l].flushed[o] == 3 * (first + 1) / (CASTS * elements[o]));
            }
        }
    }
    f.attention = FP8_ATTENTION_FORWARD;
    for (int delayed = 0; delayed < 2; delayed++) { // attention writes the projection's input itself
        f.delay.length = delayed;
        fp8_shares(shares, &f, &s, reports + 3, RANKS, WIDTH, MICRO_STEPS, TOKENS);
        for (int l = 0; l < LINEAR_COUNT; l++)
            for (int o = 0; o < FP8_OPERANDS; o++) {
                const bool uncounted = delayed && l == LINEAR_ATT_PROJ && o == FP8_INPUT;
                assert_int_equal(isnan(shares[l].saturated[o]), uncounted);
                assert_int_equal(isnan(shares[l].flushed[o]), uncounted);
            }
    }
}

static void describe(const char *words, bool on_gpu, const char *expected) {
    char text[FP8_TEXT], copy[512], *argv[32] = {(char *)"train_gpt"}, *rest = NULL;
    int argc = 1;
    snprintf(copy, sizeof copy, "%s", words);
    for (char *word = strtok_r(copy, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        argv[argc++] = word;
    struct config c = config_parse(argc, argv);
    c.device.device = on_gpu ? DEVICE_CUDA : DEVICE_CPU;
    assert_string_equal(fp8_describe(text, &c, false), expected);
    if (config_trains(&c))
        assert_string_equal(fp8_describe(text, &c, true) + strlen(expected), "; weights cast once a step");
}
static void the_report_says_what_is_in_fp8(void **state) {
    describe(
        "--plan --fp8-format hybrid", true,
        "hybrid, tensorwise: inputs and weights in E4M3, gradients in E5M2, in the linear layers of 12 of 12 layers; "
        "attention, norms, embedding and head in bf16; fast accumulation in forward");
    describe(
        "--plan --fp8-format e4m3 --fp8-recipe blockwise --first-last-layers-bf16", true,
        "e4m3, blockwise: inputs, weights and gradients in E4M3, in the linear layers of 10 of 12 layers, 1 to 10; "
        "attention, norms, embedding and head in bf16; sums in fp32, to which tensor cores add theirs at intervals");
    describe(
        "--plan --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 32 --fp8-amax-compute-algo max "
        "--fp8-margin 1 --fp8-fast-accumulation all",
        true,
        "hybrid, delayed by the largest amax of 32 steps, scales 2^1 smaller: inputs and weights in E4M3, gradients "
        "in E5M2, in the linear layers of 12 of 12 layers; attention, norms, embedding and head in bf16; fast "
        "accumulation in forward and backward");
    describe("--plan --fp8-format hybrid --fp8-recipe delayed", false,
             "hybrid, delayed by the last step's amax: inputs and weights in E4M3, gradients in E5M2, in the linear "
             "layers of 12 of 12 layers; attention, norms, embedding and head in bf16; sums in fp32");
    describe("--plan --fp8-format hybrid --fp8-dot-product-attention full", false,
             "hybrid, tensorwise: inputs and weights in E4M3, gradients in E5M2, in the linear layers of 12 of 12 "
             "layers; attention in FP8, forward and backward; norms, embedding and head in bf16; sums in fp32");
    setenv("NVTE_FP8_DPA_BWD", "0", 1);
    describe("--plan --fp8-format hybrid --fp8-dot-product-attention full", false,
             "hybrid, tensorwise: inputs and weights in E4M3, gradients in E5M2, in the linear layers of 12 of 12 "
             "layers; attention's forward in FP8, its backward in bf16 of FP8's values, by NVTE_FP8_DPA_BWD=0 in the "
             "environment; norms, embedding and head in bf16; sums in fp32");
    describe("--plan --fp8-format hybrid --fp8-dot-product-attention forward", false,
             "hybrid, tensorwise: inputs and weights in E4M3, gradients in E5M2, in the linear layers of 12 of 12 "
             "layers; attention's forward in FP8, its backward in bf16 of FP8's values; norms, embedding and head in "
             "bf16; sums in fp32");
    unsetenv("NVTE_FP8_DPA_BWD");
    describe("--fp8-format hybrid --eval-only --init-from m --val-data v", true,
             "not used: validation and generation compute without it");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(delayed_scales_come_back_from_a_file),
        cmocka_unit_test(attentions_scales_come_back_from_a_file),
        cmocka_unit_test(a_run_without_delayed_scales_ignores_them),
        cmocka_unit_test(a_file_without_histories_leaves_them_empty),
        cmocka_unit_test(damaged_scales_are_refused_and_change_nothing),
        cmocka_unit_test(forgotten_scales_leave_their_histories),
        cmocka_unit_test(shares_are_of_all_ranks_casts),
        cmocka_unit_test(the_report_says_what_is_in_fp8),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
