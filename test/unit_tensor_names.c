// Which tensor of a model's folder holds which parameters. Every parameter of each architecture is in one tensor, and
// is written and read as the same bits; heads that are turned in part give the scores of the file's order; the folders
// of test/golden agree in names and shapes.
#define PRECISION_BF16
#include "config/layers.h"       // config_rotary_dims
#include "config/resolve.h"      // config_parse
#include "formats/safetensors.h" // safetensors_open
#include "run/start.h"           // start_find
#include "run/tensor_names.cuh"  // under test
#include "test/config_strings.h" // config_free_strings
#include "test/testing.h"        // cmocka
#include <dirent.h>              // opendir

static uint64_t random_state;
static float random_value(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (float)(random_state >> 40) / (float)(1 << 24) - 0.5f;
}

// ---- a model's parameters in host memory ----

struct folder_model {
    char words[1024];
    struct config config;
    struct model_shape shape;
    struct parameters table;
    struct huggingface_tensors tensors;
    float *values, *again; // (table.trained.flat)
};
static void model_open(struct folder_model *m, const char *options) {
    char *words[64], *rest = NULL;
    int n = 0;
    memset(m, 0, sizeof *m);
    snprintf(m->words, sizeof m->words, "train_gpt --plan %s", options);
    for (char *word = strtok_r(m->words, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        words[n++] = word;
    words[n] = NULL;
    m->config = config_read(n, words, NULL);
    start_find(&m->config);
    config_resolve(&m->config);
    m->shape = model_shape_of(&m->config, 4, false);
    m->table = parameters_create(&m->shape, 1, NULL);
    m->values = (float *)calloc((size_t)m->table.trained.flat, sizeof(float));
    m->again = (float *)calloc((size_t)m->table.trained.flat, sizeof(float));
}
static void model_list(struct folder_model *m, enum architecture a) {
    m->tensors = huggingface_tensors_of(&m->table, &m->shape, a, config_rotary_dims(&m->config));
}
static void model_close(struct folder_model *m) {
    huggingface_tensors_free(&m->tensors);
    parameters_free(&m->table);
    free(m->values);
    free(m->again);
    config_free_strings(&m->config, m->words, sizeof m->words);
}

// ---- each architecture ----

#define LLAMA_LIKE "--normalization RMSNorm --activation swiglu --position-embedding-type rope --no-add-bias-linear "
#define GEMMA_LIKE LLAMA_LIKE "--activation geglu --apply-layernorm-1p --embedding-multiplier 8 "
#define OLMO_LIKE LLAMA_LIKE "--norm-placement post --qk-layernorm --qk-layernorm-width full "
#define NEOX_LIKE "--position-embedding-type rope --rotary-percent 0.25 --activation gelu_erf "
#define GROUPS "--num-query-groups 2 "
#define UNTIED "--untie-embeddings-and-output-weights "
static const struct {
    enum architecture architecture;
    const char *options;
    int tensors;         // number of layer 1's tensors
    const char *some[4]; // some of their names
} models[] = {
    {ARCHITECTURE_OURS, "--position-embedding-type rope --no-add-bias-linear", 8, {"layer.1.qkv.weight"}},
    {ARCHITECTURE_GPT2, UNTIED, 12, {"transformer.h.1.attn.c_attn.weight"}},
    {ARCHITECTURE_LLAMA, LLAMA_LIKE GROUPS "--kv-channels 24", 9, {"model.layers.1.self_attn.q_proj.weight"}},
    {ARCHITECTURE_LLAMA,
     LLAMA_LIKE "--add-qkv-bias --add-attention-proj-bias",
     13,
     {"model.layers.1.self_attn.o_proj.bias"}},
    {ARCHITECTURE_LLAMA, LLAMA_LIKE "--add-mlp-bias", 12, {"model.layers.1.mlp.down_proj.bias"}},
    {ARCHITECTURE_QWEN2, LLAMA_LIKE GROUPS UNTIED "--add-qkv-bias", 12, {"model.layers.1.self_attn.v_proj.bias"}},
    {ARCHITECTURE_QWEN3, LLAMA_LIKE GROUPS "--qk-layernorm", 11, {"model.layers.1.self_attn.k_norm.weight"}},
    {ARCHITECTURE_MISTRAL, LLAMA_LIKE "--window-size 4", 9, {"model.layers.1.input_layernorm.weight"}},
    {ARCHITECTURE_MINISTRAL, LLAMA_LIKE "--window-size 4 --window-attn-skip-freq 2", 9, {""}},
    {ARCHITECTURE_CWM, LLAMA_LIKE "--window-size 4 --window-attn-skip-freq 2 --add-mlp-bias", 12, {""}},
    {ARCHITECTURE_SMOLLM3, LLAMA_LIKE "--no-rope-freq 2", 9, {""}},
    {ARCHITECTURE_GRANITE, LLAMA_LIKE "--residual-multiplier 0.5", 9, {""}},
    {ARCHITECTURE_OLMO2,
     OLMO_LIKE GROUPS UNTIED,
     11,
     {"model.layers.1.post_attention_layernorm.weight", "model.layers.1.post_feedforward_layernorm.weight",
      "model.layers.1.self_attn.q_norm.weight"}},
    {ARCHITECTURE_OLMO3, OLMO_LIKE "--window-size 4 --window-attn-skip-freq 2", 11, {""}},
    {ARCHITECTURE_GEMMA, GEMMA_LIKE, 9, {"model.layers.1.post_attention_layernorm.weight"}},
    {ARCHITECTURE_GEMMA2,
     GEMMA_LIKE "--norm-placement sandwich --final-logit-softcapping 30",
     11,
     {"model.layers.1.input_layernorm.weight", "model.layers.1.post_attention_layernorm.weight",
      "model.layers.1.pre_feedforward_layernorm.weight", "model.layers.1.post_feedforward_layernorm.weight"}},
    {ARCHITECTURE_GEMMA3, GEMMA_LIKE GROUPS "--norm-placement sandwich --qk-layernorm", 13, {""}},
    {ARCHITECTURE_PHI3,
     LLAMA_LIKE GROUPS "--rotary-percent 0.75",
     6,
     {"model.layers.1.self_attn.qkv_proj.weight", "model.layers.1.mlp.gate_up_proj.weight"}},
    {ARCHITECTURE_GPT_NEOX,
     NEOX_LIKE UNTIED "--parallel-residual",
     12,
     {"gpt_neox.layers.1.attention.query_key_value.bias", "gpt_neox.layers.1.mlp.dense_4h_to_h.weight"}},
};
enum { MODELS = sizeof models / sizeof *models };
static const char SIZES[] =
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 24 --vocab-size 67 "
    "--seq-length 12 ";

static const struct huggingface_tensor *find_tensor(const struct huggingface_tensors *tensors, const char *name) {
    for (int i = 0; i < tensors->count; i++)
        if (strcmp(tensors->list[i].name, name) == 0)
            return &tensors->list[i];
    return NULL;
}
// Checks that every tensor is gathered, a few rows at a time, from random parameters, and that scattering it restores
// them.
static void assert_comes_back(struct folder_model *m, const char *what) {
    for (int i = 0; i < m->tensors.count; i++) {
        const struct huggingface_tensor *t = &m->tensors.list[i];
        const int cols = t->cols ? t->cols : 1, rows = 5;
        float *some = (float *)malloc((size_t)rows * (size_t)cols * sizeof *some);
        for (int row = 0; row < t->rows; row += rows) {
            const int n = t->rows - row < rows ? t->rows - row : rows;
            huggingface_gather(some, t, t->ours ? m->values + t->ours->offset : NULL, row, n);
            if (t->ours)
                huggingface_scatter(m->again + t->ours->offset, t, some, row, n);
        }
        free(some);
    }
    for (int i = 0; i < m->table.num_tensors; i++) {
        const struct tensor *t = &m->table.tensors[i];
        if (memcmp(m->values + t->offset, m->again + t->offset, (size_t)t->visible_rows * (size_t)t->cols * 4) != 0)
            fail_msg("%s: %s comes back as other bits", what, t->name);
    }
}
static void every_architecture_holds_every_parameter_once(void **state) {
    for (int i = 0; i < MODELS; i++) {
        struct folder_model m;
        char options[900];
        snprintf(options, sizeof options, "%s%s", SIZES, models[i].options);
        model_open(&m, options);
        if (architecture_of(&m.config) != models[i].architecture)
            fail_msg("%s is of %s", options, architecture_class(architecture_of(&m.config)));
        model_list(&m, models[i].architecture);
        for (int64_t k = 0; k < m.table.trained.flat; k++)
            m.values[k] = random_value();
        assert_comes_back(&m, options);
        int of_layer = 0;
        for (int k = 0; k < m.tensors.count; k++)
            of_layer += strstr(m.tensors.list[k].name, ".1.") != NULL;
        if (of_layer != models[i].tensors)
            fail_msg("%s: layer 1 has %d tensors, expected %d", options, of_layer, models[i].tensors);
        for (int k = 0; k < 4 && models[i].some[k] && *models[i].some[k]; k++)
            if (!find_tensor(&m.tensors, models[i].some[k]))
                fail_msg("%s: has no tensor %s", options, models[i].some[k]);
        model_close(&m);
    }
}

// ---- heads that are turned in part ----

// Turns the pairs (i, i + apart), i < R / 2, of a head by angles of its position.
static void turn(double *head, int R, int apart, double position) {
    for (int i = 0; i < R / 2; i++) {
        const double angle = position * pow(100, -2.0 * i / R), x = head[i], y = head[i + apart];
        head[i] = x * cos(angle) - y * sin(angle);
        head[i + apart] = y * cos(angle) + x * sin(angle);
    }
}
// Checks that a query and a key have the same score in the file's order, turned half split over R, as in ours.
static void turned_heads_give_the_same_scores(void **state) {
    static const int dims[][2] = {{20, 80}, {96, 128}, {24, 96}, {2, 8}, {8, 8}, {12, 16}};
    for (int i = 0; i < 6; i++) {
        const int R = dims[i][0], D = dims[i][1];
        double q[2][128], k[2][128], score[2] = {0, 0};
        bool used[128] = {false};
        for (int d = 0; d < D; d++) {
            const int ours = huggingface_permuted(d, R, D);
            assert_true(ours >= 0 && ours < D && !used[ours]);
            used[ours] = true;
            q[1][ours] = q[0][d] = random_value();
            k[1][ours] = k[0][d] = random_value();
        }
        for (int of = 0; of < 2; of++) {
            turn(q[of], R, of == 0 ? R / 2 : D / 2, 7);
            turn(k[of], R, of == 0 ? R / 2 : D / 2, 3);
            for (int d = 0; d < D; d++)
                score[of] += q[of][d] * k[of][d];
        }
        assert_true(fabs(score[0] - score[1]) < 1e-12);
    }
}
// Checks GPT-NeoX's interleaved heads: row (3 h + p) D + d of query_key_value is element d of part p of head h. v is
// never permuted; biases are ordered like weights.
static void gpt_neox_interleaves_heads(void **state) {
    struct folder_model m;
    char options[900];
    snprintf(options, sizeof options, "%s" NEOX_LIKE, SIZES);
    model_open(&m, options);
    model_list(&m, ARCHITECTURE_GPT_NEOX);
    const struct huggingface_tensor *t = find_tensor(&m.tensors, "gpt_neox.layers.0.attention.query_key_value.bias");
    const int H = 4, D = 16, R = 4, C = 64;
    assert_non_null(t);
    for (int row = 0; row < 3 * C; row++) {
        const int d = row % D, part = row / D % 3, head = row / D / 3;
        const int at = part < 2 ? huggingface_permuted(d, R, D) : d;
        assert_int_equal(huggingface_row(t, row), part * H * D + head * D + at);
    }
    model_close(&m);
}

// ---- folders ----

// Checks that the list has each tensor of a file, with its shape, and that the tensors' bytes come back; returns the
// number of tensors.
static int assert_file_comes_back(struct folder_model *m, const char *path) {
    struct safetensors file;
    struct error_text error;
    const char *problem = safetensors_open(&file, path, &error);
    if (problem)
        fail_msg("%s", problem);
    for (int i = 0; i < file.count; i++) {
        const struct safetensors_tensor *tensor = &file.tensors[i];
        const struct huggingface_tensor *t = find_tensor(&m->tensors, tensor->name);
        if (!t || tensor->dims != (t->cols ? 2 : 1) || (int)tensor->shape[0] != t->rows ||
            (t->cols && (int)tensor->shape[1] != t->cols))
            fail_msg("%s: %s %s", path, tensor->name, t ? "has another shape" : "is in no list");
        const uint64_t count = (uint64_t)huggingface_elements(t);
        unsigned char *raw = (unsigned char *)malloc((size_t)tensor->bytes);
        float *values = (float *)malloc((size_t)count * 4), *again = (float *)malloc((size_t)count * 4);
        assert_null(safetensors_read(&file, tensor, 0, tensor->bytes, raw, &error));
        assert_true(safetensors_to_floats(values, raw, tensor->dtype, count));
        huggingface_scatter(m->values + t->ours->offset, t, values, 0, t->rows);
        huggingface_gather(again, t, m->values + t->ours->offset, 0, t->rows);
        if (memcmp(values, again, (size_t)count * 4) != 0)
            fail_msg("%s: %s comes back as other bits", path, tensor->name);
        free(raw);
        free(values);
        free(again);
    }
    const int count = file.count;
    safetensors_close(&file);
    return count;
}
static void assert_folder_comes_back(const char *folder) {
    struct folder_model m;
    struct huggingface_config h;
    struct error_text error;
    char options[900], path[900];
    int found = 0;
    assert_null(start_read_model(&h, folder, &error));
    snprintf(options, sizeof options, "--init-from %s", folder);
    model_open(&m, options);
    model_list(&m, h.architecture);
    if (architecture_of(&m.config) == ARCHITECTURE_OURS)
        fail_msg("%s: no architecture fits it", folder);
    if (!architecture_fits(h.architecture, &m.config))
        fail_msg("%s: its own architecture does not fit it", folder);
    DIR *files = opendir(folder);
    for (struct dirent *entry; (entry = readdir(files));)
        if (strstr(entry->d_name, ".safetensors") && !strstr(entry->d_name, ".json")) {
            snprintf(path, sizeof path, "%s/%.200s", folder, entry->d_name);
            found += assert_file_comes_back(&m, path);
        }
    closedir(files);
    if (found != m.tensors.count)
        fail_msg("%s: has %d tensors, the list %d", folder, found, m.tensors.count);
    assert_comes_back(&m, folder);
    huggingface_free(&h);
    model_close(&m);
}
static void the_folders_that_transformers_wrote_come_back(void **state) {
    static const char *const roots[] = {"test/golden/huggingface", "test/golden/zoo"};
    for (int i = 0; i < 2; i++) {
        char path[600], config[700];
        DIR *folders = opendir(roots[i]);
        for (struct dirent *entry; folders && (entry = readdir(folders));) {
            snprintf(path, sizeof path, "%s/%.200s", roots[i], entry->d_name);
            snprintf(config, sizeof config, "%s/config.json", path);
            if (entry->d_name[0] != '.' && access(config, R_OK) == 0)
                assert_folder_comes_back(path);
        }
        if (folders)
            closedir(folders);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_architecture_holds_every_parameter_once),
        cmocka_unit_test(turned_heads_give_the_same_scores),
        cmocka_unit_test(gpt_neox_interleaves_heads),
        cmocka_unit_test(the_folders_that_transformers_wrote_come_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
