// config.json of a model's folder, as the program writes it: it names the architecture that fits the model, and is read
// as the same options, none of which is dropped. No file makes the parser read beyond its bytes.
#include "config/layers.h"       // config_layer_is_windowed
#include "config/resolve.h"      // config_parse, config_resolve
#include "formats/huggingface.h" // under test
#include "test/config_json.h"    // config_of, written, parse_bytes
#include "test/fails.h"          // assert_error
#include "test/testing.h"        // cmocka

#include <jansson.h> // json_loads

#define ROPE "--position-embedding-type rope --rotary-base 1234.5 "
#define LLAMA_LIKE "--normalization RMSNorm --activation swiglu --position-embedding-type rope --no-add-bias-linear "
#define QK_NORM "--qk-layernorm "
#define GEMMA_LIKE                                                                                                     \
    "--normalization RMSNorm --activation geglu --position-embedding-type rope --no-add-bias-linear "                  \
    "--apply-layernorm-1p --embedding-multiplier 8 "
#define LOCAL "--window-size 5 --window-attn-skip-freq 3 --rotary-base-local 99.25 "
#define SCALED_YARN "--rope-scaling-type yarn --rope-scaling-factor 3.3 --rope-original-max-position-embeddings 7 "
#define SCALED_LLAMA3                                                                                                  \
    "--rope-scaling-type llama3 --rope-scaling-factor 32 --rope-original-max-position-embeddings 8192 "
#define SCALED_LONGROPE                                                                                                \
    "--rope-scaling-type longrope --rope-scaling-factor 2 --rope-original-max-position-embeddings 9 "                  \
    "--rope-short-factors 1,1.5 --rope-long-factors 1.25,64.1 --rotary-percent 0.25 "
#define SCALED_LINEAR "--rope-scaling-type linear --rope-scaling-factor 8 "
#define NEOX_LIKE "--position-embedding-type rope --rotary-percent 0.25 --activation gelu_erf "
static const struct {
    const char *options;
    enum architecture architecture;
} shapes[] = {
    {"", ARCHITECTURE_GPT2},
    {"--num-query-groups 2 --no-add-bias-linear --untie-embeddings-and-output-weights", ARCHITECTURE_GPT2},
    {"--ffn-hidden-size 72 --max-position-embeddings 32 --norm-epsilon 0.1234567", ARCHITECTURE_GPT2},
    {"--activation gelu_erf", ARCHITECTURE_GPT2},
    {"--activation squared_relu", ARCHITECTURE_GPT2},
    {LLAMA_LIKE ROPE "--num-query-groups 1 --kv-channels 24", ARCHITECTURE_LLAMA},
    {LLAMA_LIKE "--add-bias-linear --untie-embeddings-and-output-weights", ARCHITECTURE_LLAMA},
    {LLAMA_LIKE "--add-qkv-bias --add-attention-proj-bias", ARCHITECTURE_LLAMA},
    {LLAMA_LIKE "--add-mlp-bias", ARCHITECTURE_LLAMA},
    {LLAMA_LIKE SCALED_LLAMA3 "--rope-low-freq-factor 1.5 --rope-high-freq-factor 4.5", ARCHITECTURE_LLAMA},
    {LLAMA_LIKE SCALED_LINEAR, ARCHITECTURE_LLAMA},
    {LLAMA_LIKE SCALED_YARN "--yarn-beta-fast 20 --no-yarn-truncate --rope-attention-factor 1.2079441541679836",
     ARCHITECTURE_LLAMA},
    {LLAMA_LIKE SCALED_YARN "--yarn-mscale 0.707 --yarn-mscale-all-dim 1.5", ARCHITECTURE_LLAMA},
    {LLAMA_LIKE "--activation geglu --softmax-scale 0.25", ARCHITECTURE_LLAMA}, // the default scale for heads of 16
    {LLAMA_LIKE "--add-qkv-bias --rotary-base 1e6", ARCHITECTURE_QWEN2},
    {LLAMA_LIKE "--add-qkv-bias --window-size 4 --window-attn-skip-freq 0,1,1", ARCHITECTURE_QWEN2},
    {LLAMA_LIKE QK_NORM "--kv-channels 128 --num-query-groups 2", ARCHITECTURE_QWEN3},
    {LLAMA_LIKE QK_NORM "--add-qkv-bias --add-attention-proj-bias --window-size 11 --window-attn-skip-freq 0,1,0",
     ARCHITECTURE_QWEN3},
    {LLAMA_LIKE "--window-size 12", ARCHITECTURE_MISTRAL},
    {LLAMA_LIKE "--window-size 12 --window-attn-skip-freq 2", ARCHITECTURE_MINISTRAL},
    {LLAMA_LIKE "--window-size 11,0 --window-attn-skip-freq 1,0,1 --add-mlp-bias", ARCHITECTURE_CWM},
    {LLAMA_LIKE "--no-rope-freq 2 --add-mlp-bias", ARCHITECTURE_SMOLLM3},
    {LLAMA_LIKE "--no-rope-freq 1,1,0 --window-size 9 --window-attn-skip-freq 1,1,0", ARCHITECTURE_SMOLLM3},
    {LLAMA_LIKE "--softmax-scale 0.015625 --logit-multiplier 0.1111111111111111 --embedding-multiplier 12 "
                "--residual-multiplier 0.22",
     ARCHITECTURE_GRANITE},
    {LLAMA_LIKE QK_NORM "--qk-layernorm-width full --norm-placement post", ARCHITECTURE_OLMO2},
    {LLAMA_LIKE QK_NORM SCALED_YARN "--qk-layernorm-width full --norm-placement post --window-size 5 "
                                    "--window-attn-skip-freq 2 --rotary-base-local 10000 --no-yarn-truncate",
     ARCHITECTURE_OLMO3},
    {LLAMA_LIKE QK_NORM "--qk-layernorm-width full --norm-placement post --window-size 5", ARCHITECTURE_OLMO3},
    {GEMMA_LIKE "--kv-channels 256", ARCHITECTURE_GEMMA},
    {GEMMA_LIKE "--norm-placement sandwich --attn-logit-softcapping 50 --window-size 4 --window-attn-skip-freq 2 "
                "--softmax-scale 0.08333333333333333",
     ARCHITECTURE_GEMMA2},
    {GEMMA_LIKE "--norm-placement sandwich --final-logit-softcapping 1.1", ARCHITECTURE_GEMMA2},
    {GEMMA_LIKE QK_NORM LOCAL SCALED_LINEAR "--norm-placement sandwich --final-logit-softcapping 30",
     ARCHITECTURE_GEMMA3},
    {GEMMA_LIKE QK_NORM "--norm-placement sandwich --window-size 4", ARCHITECTURE_GEMMA3},
    {LLAMA_LIKE "--rotary-percent 0.75 --window-size 11", ARCHITECTURE_PHI3},
    {LLAMA_LIKE SCALED_LONGROPE, ARCHITECTURE_PHI3},
    {LLAMA_LIKE SCALED_LONGROPE "--rope-scaling-factor 7 --rope-attention-factor 1.19", ARCHITECTURE_PHI3},
    {NEOX_LIKE "--parallel-residual --untie-embeddings-and-output-weights", ARCHITECTURE_GPT_NEOX},
    {NEOX_LIKE "--activation gelu --no-add-qkv-bias --no-add-attention-proj-bias", ARCHITECTURE_GPT_NEOX},
    {ROPE, ARCHITECTURE_GPT_NEOX},
    // Settings that no class of transformers has.
    {"--num-query-groups 2 " ROPE, ARCHITECTURE_OURS},
    {NEOX_LIKE "--no-add-bias-linear", ARCHITECTURE_OURS},
    {"--normalization RMSNorm --no-add-bias-linear --kv-channels 8", ARCHITECTURE_OURS},
    {LLAMA_LIKE "--window-size 12 --no-rope-freq 2 --add-qkv-bias", ARCHITECTURE_OURS},
    {LLAMA_LIKE "--embedding-multiplier 12 --qk-layernorm", ARCHITECTURE_OURS},
    {LLAMA_LIKE "--add-attention-proj-bias", ARCHITECTURE_OURS},
    {GEMMA_LIKE "--embedding-multiplier 7.9", ARCHITECTURE_OURS},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static void read_into(struct config *read, const struct huggingface_config *h) {
    for (int k = 0; k < h->num_settings; k++) {
        char name[OPTION_NAME];
        const char *value = strchr(h->settings[k], '=') + 1;
        snprintf(name, sizeof name, "%.*s", (int)(value - 1 - h->settings[k]), h->settings[k]);
        option_set(&config_rows[option_find(&config_options, name, false)], read, value);
    }
}
// Whether an option of the model is the same in the two configs, or means the same: add_bias_linear means that all
// biases are there.
static bool same_option(const struct option_row *row, const struct config *wrote, const struct config *read,
                        enum architecture a) {
    char x[OPTION_TEXT], y[OPTION_TEXT];
    const char *name = row->name;
    const bool gpt2 = a == ARCHITECTURE_GPT2;
    if (strcmp(name, "add_bias_linear") == 0 || (gpt2 && strstr(name, "_bias")) ||
        (gpt2 && strcmp(name, "rotary_base") == 0))
        return true;
    if (strcmp(name, "window_size") == 0)
        return config_window(wrote) == config_window(read);
    if (strcmp(name, "window_attn_skip_freq") == 0 || strcmp(name, "no_rope_freq") == 0) {
        for (int l = 0; l < wrote->model.num_layers; l++)
            if (config_layer_is_windowed(wrote, l) != config_layer_is_windowed(read, l) ||
                config_layer_is_rotary(wrote, l) != config_layer_is_rotary(read, l))
                return false;
        return true;
    }
    if (strcmp(name, "softmax_scale") == 0 && wrote->model.softmax_scale == 0.25 && wrote->model.kv_channels == 16)
        return read->model.softmax_scale == 0;
    const char *before = option_text(x, row, wrote), *after = option_text(y, row, read);
    if (gpt2 && strcmp(name, "num_query_groups") == 0)
        return read->model.num_query_groups == wrote->model.num_attention_heads;
    return strcmp(before, after) == 0;
}
// Writes the options and reads them; fails unless all come back.
static void assert_comes_back(const char *options, enum architecture architecture) {
    const struct config wrote = config_of(options);
    struct config read = config_of("");
    struct huggingface_config h;
    struct error_text error;
    size_t bytes;
    char *text = written(&wrote, -1, &bytes);
    const char *problem = parse_bytes(&h, text, bytes, &error);
    if (problem)
        fail_msg("%s: %s\n%s", options, problem, text);
    if (h.architecture != architecture)
        fail_msg("%s: is of %s, expected %s", options, architecture_class(h.architecture),
                 architecture_class(architecture));
    assert_int_equal(h.architecture, architecture_of(&wrote));
    read_into(&read, &h);
    const struct option_row *rows[CONFIG_ROWS];
    const int count = huggingface_own_options(rows);
    char a[OPTION_TEXT], b[OPTION_TEXT];
    for (int k = 0; k < count; k++)
        if (!same_option(rows[k], &wrote, &read, architecture))
            fail_msg("%s, of %s: %s is %s, but %s was written\n%s", options, architecture_class(architecture),
                     rows[k]->name, option_text(b, rows[k], &read), option_text(a, rows[k], &wrote), text);
    huggingface_free(&h);
    free(text);
}
static void test_written_is_read_as_the_same_options(void **state) {
    bool seen[CONFIG_ROWS] = {false};
    for (int i = 0; i < SHAPES; i++) {
        assert_comes_back(shapes[i].options, shapes[i].architecture);
        seen[shapes[i].architecture] = true;
    }
#define SEEN_ROW(id, model_type, class_name) assert_true(seen[ARCHITECTURE_##id]);
    ARCHITECTURE_ROWS(SEEN_ROW)
#undef SEEN_ROW
}

// Checks each option of the model with a value other than its default, on models of several architectures: none is
// dropped silently. A new option needs a row here.
static void test_no_option_is_dropped(void **state) {
    static const struct {
        const char *name, *options; // options: they give it an effect and another value
    } changed[] = {
        {"num_layers", "--num-layers 3"},
        {"hidden_size", "--hidden-size 64"},
        {"num_attention_heads", "--num-attention-heads 4"},
        {"num_query_groups", "--num-query-groups 2"},
        {"kv_channels", "--kv-channels 32"},
        {"ffn_hidden_size", "--ffn-hidden-size 88"},
        {"normalization", "--normalization RMSNorm"},
        {"norm_epsilon", "--norm-epsilon 0.002"},
        {"position_embedding_type", "--position-embedding-type rope"},
        {"rotary_base", ROPE},
        {"rotary_percent", ROPE "--rotary-percent 0.5"},
        {"rotary_base_local", ROPE LOCAL},
        {"rope_scaling_type", ROPE "--rope-scaling-type linear"},
        {"rope_scaling_factor", ROPE SCALED_LINEAR},
        {"rope_low_freq_factor", ROPE SCALED_LLAMA3 "--rope-low-freq-factor 1.1"},
        {"rope_high_freq_factor", ROPE SCALED_LLAMA3 "--rope-high-freq-factor 4.1"},
        {"rope_original_max_position_embeddings", ROPE SCALED_LLAMA3},
        {"yarn_beta_fast", ROPE SCALED_YARN "--yarn-beta-fast 31.5"},
        {"yarn_beta_slow", ROPE SCALED_YARN "--yarn-beta-slow 0.9"},
        {"yarn_truncate", ROPE SCALED_YARN "--no-yarn-truncate"},
        {"yarn_mscale", ROPE SCALED_YARN "--yarn-mscale 0.7 --yarn-mscale-all-dim 1.1"},
        {"yarn_mscale_all_dim", ROPE SCALED_YARN "--yarn-mscale 0.7 --yarn-mscale-all-dim 1.1"},
        {"rope_attention_factor", ROPE SCALED_YARN "--rope-attention-factor 1.3"},
        {"rope_short_factors", ROPE SCALED_LONGROPE},
        {"rope_long_factors", ROPE SCALED_LONGROPE},
        {"no_rope_freq", ROPE "--no-rope-freq 0,1,1"},
        {"window_size", "--window-size 7"},
        {"window_attn_skip_freq", "--window-size 7 --window-attn-skip-freq 0,0,1"},
        {"norm_placement", "--norm-placement sandwich"},
        {"apply_layernorm_1p", "--apply-layernorm-1p"},
        {"qk_layernorm", "--normalization RMSNorm --qk-layernorm"},
        {"qk_layernorm_width", "--normalization RMSNorm --qk-layernorm --qk-layernorm-width full"},
        {"parallel_residual", "--parallel-residual --norm-placement pre"},
        {"softmax_scale", "--softmax-scale 0.3"},
        {"attn_logit_softcapping", "--attn-logit-softcapping 2.5"},
        {"activation", "--activation geglu"},
        {"add_bias_linear", "--add-bias-linear"},
        {"add_qkv_bias", "--add-qkv-bias"},
        {"add_attention_proj_bias", "--add-attention-proj-bias"},
        {"add_mlp_bias", "--add-mlp-bias"},
        {"residual_multiplier", "--residual-multiplier 0.9"},
        {"max_position_embeddings", "--max-position-embeddings 77"},
        {"embedding_multiplier", "--embedding-multiplier 3.3"},
        {"logit_multiplier", "--logit-multiplier 0.7"},
        {"final_logit_softcapping", "--final-logit-softcapping 4"},
        {"untie_embeddings_and_output_weights", "--untie-embeddings-and-output-weights"},
    };
    static const char *const models[] = {
        "",
        LLAMA_LIKE,
        LLAMA_LIKE QK_NORM "--add-qkv-bias",
        LLAMA_LIKE QK_NORM "--qk-layernorm-width full --norm-placement post",
        GEMMA_LIKE,
        GEMMA_LIKE QK_NORM "--norm-placement sandwich",
        NEOX_LIKE,
    };
    const struct option_row *rows[CONFIG_ROWS];
    const int count = huggingface_own_options(rows);
    for (int k = 0; k < count; k++) {
        size_t i = 0;
        while (i < sizeof changed / sizeof *changed && strcmp(changed[i].name, rows[k]->name) != 0)
            i++;
        if (i == sizeof changed / sizeof *changed)
            fail_msg("%s has no row here: add how an architecture of Hugging Face writes it, or that none does",
                     rows[k]->name);
        for (size_t m = 0; m < sizeof models / sizeof *models; m++) {
            char options[900];
            snprintf(options, sizeof options, "%s %s", models[m], changed[i].options);
            if (strstr(options, QK_NORM) && strstr(options, "--parallel-residual"))
                continue;
            const struct config c = config_of(options);
            assert_comes_back(options, architecture_of(&c));
        }
    }
}
// Checks that a preset's checkpoints are of the class that its model was published as. Mistral 7B without a window is a
// Llama.
static void test_presets_are_of_their_class(void **state) {
    static const struct {
        const char *begins;
        enum architecture architecture;
    } families[] = {
        {"gpt2", ARCHITECTURE_GPT2},     {"llama", ARCHITECTURE_LLAMA},   {"mistral", ARCHITECTURE_LLAMA},
        {"smollm2", ARCHITECTURE_LLAMA}, {"qwen2.5", ARCHITECTURE_QWEN2}, {"qwen3", ARCHITECTURE_QWEN3},
        {"gemma3", ARCHITECTURE_GEMMA3}, {"olmo2", ARCHITECTURE_OLMO2},   {"pythia", ARCHITECTURE_GPT_NEOX},
        {"demo", ARCHITECTURE_LLAMA},
    };
    for (int i = 0; i < CONFIG_PRESETS; i++) {
        char options[80];
        snprintf(options, sizeof options, "train_gpt --plan --preset %s", presets[i].name);
        char *words[5] = {options}, *rest = NULL;
        int n = 0;
        for (char *word = strtok_r(options, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
            words[n++] = word;
        const struct config c = config_parse(n, words);
        size_t k = 0;
        while (k < sizeof families / sizeof *families &&
               strncmp(presets[i].name, families[k].begins, strlen(families[k].begins)) != 0)
            k++;
        assert_true(k < sizeof families / sizeof *families);
        if (architecture_of(&c) != families[k].architecture)
            fail_msg("%s is of %s", presets[i].name, architecture_class(architecture_of(&c)));
    }
}
// Checks a checkpoint of our own kind, from a version before an option: the option has its default; a missing bias
// option is as the one for all biases.
static void test_older_checkpoints_lack_options(void **state) {
    struct huggingface_config h;
    struct error_text error;
    const struct config c = config_of("--position-embedding-type rope --num-query-groups 2");
    size_t bytes;
    char *text = written(&c, -1, &bytes);
    static const char *const later[] = {"add_mlp_bias", "add_attention_proj_bias", "window_size", "norm_placement"};
    json_t *root = json_loads(text, 0, NULL);
    for (int i = 0; i < 4; i++)
        assert_int_equal(json_object_del(root, later[i]), 0);
    char *older = json_dumps(root, 0);
    assert_null(parse_bytes(&h, older, strlen(older), &error));
    assert_string_equal(huggingface_setting(&h, "add-mlp-bias"), "true");
    assert_string_equal(huggingface_setting(&h, "add-attention-proj-bias"), "true");
    assert_string_equal(huggingface_setting(&h, "window-size"), "none");
    assert_string_equal(huggingface_setting(&h, "norm-placement"), "pre");
    huggingface_free(&h);
    free(older);
    free(text);
    json_decref(root);
}
static void test_end_of_text(void **state) {
    const struct config c = config_of("");
    size_t bytes;
    char *none = written(&c, -1, &bytes), *some = written(&c, 776, &bytes), *beyond = written(&c, 777, &bytes);
    assert_non_null(strstr(none, "\"eos_token_id\": null"));
    assert_non_null(strstr(none, "\"bos_token_id\": null"));
    assert_non_null(strstr(some, "\"eos_token_id\": 776"));
    assert_non_null(strstr(beyond, "\"eos_token_id\": null"));
    free(none);
    free(some);
    free(beyond);
}

// Checks that an object that does not end is refused, whatever it lacks, and that a file of each kind, cut at every
// byte, does no harm.
static void test_truncation_at_every_byte(void **state) {
    struct huggingface_config h;
    struct error_text error;
    for (int i = 0; i < SHAPES; i++) {
        const struct config c = config_of(shapes[i].options);
        size_t bytes;
        char *text = written(&c, -1, &bytes);
        assert_null(parse_bytes(&h, text, bytes, &error));
        huggingface_free(&h);
        for (size_t count = 0; count + 1 < bytes; count++) // the last byte ends the line
            assert_error(parse_bytes(&h, text, count, &error), count ? "is not valid JSON" : "is empty");
        free(text);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_written_is_read_as_the_same_options),
        cmocka_unit_test(test_no_option_is_dropped),
        cmocka_unit_test(test_presets_are_of_their_class),
        cmocka_unit_test(test_older_checkpoints_lack_options),
        cmocka_unit_test(test_end_of_text),
        cmocka_unit_test(test_truncation_at_every_byte),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
