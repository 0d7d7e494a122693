// config.json of a model's folder: what is written is read back as the same options; what is not supported is refused in
// words that name the setting; no file makes the parser read beyond its bytes. The header of llm.c's checkpoints.
#include "config_resolve.h" // config_parse, config_resolve
#include "formats/huggingface.h" // under test
#include "formats/llmc.h"        // under test
#include "test/fails.h"          // assert_error
#include "test/testing.h"        // cmocka

#include <jansson.h> // json_loads

static const char GPT2[] =
    "{\"model_type\": \"gpt2\", \"vocab_size\": 101, \"n_layer\": 2, \"n_embd\": 32, \"n_head\": 2,"
    " \"n_positions\": 40}";
static const char LLAMA[] =
    "{\"model_type\": \"llama\", \"vocab_size\": 101, \"num_hidden_layers\": 2, \"hidden_size\": 32,"
    " \"num_attention_heads\": 4, \"intermediate_size\": 24, \"max_position_embeddings\": 40}";
static const char QWEN2[] =
    "{\"model_type\": \"qwen2\", \"vocab_size\": 101, \"num_hidden_layers\": 2, \"hidden_size\": 32,"
    " \"num_attention_heads\": 4, \"intermediate_size\": 24, \"max_position_embeddings\": 40}";

// In memory of exactly that size, so that the sanitizer sees a read beyond it.
static const char *parse_bytes(struct huggingface_config *h, const char *text, size_t bytes, struct error_text *error) {
    unsigned char *copy = (unsigned char *)malloc(bytes ? bytes : 1);
    memcpy(copy, text, bytes);
    const char *problem = huggingface_parse_config(h, copy, bytes, "config.json", error);
    free(copy);
    return problem;
}
// The config of `base` with other members, or null, in the place of its own.
static const char *parse_with(struct huggingface_config *h, const char *base, const char *members,
                              struct error_text *error) {
    json_t *root = json_loads(base, 0, NULL), *more = json_loads(members, 0, NULL);
    assert_non_null(root);
    assert_non_null(more);
    json_object_update(root, more);
    char *text = json_dumps(root, 0);
    const char *problem = parse_bytes(h, text, strlen(text), error);
    free(text);
    json_decref(root);
    json_decref(more);
    return problem;
}

// ---- What it stands for --------------------------------------------------------------------------------------------

// The value that the config sets an option to.
static const char *setting(const struct huggingface_config *h, const char *option) {
    for (int i = 0; i < h->num_settings; i++)
        if (strncmp(h->settings[i], option, strlen(option)) == 0 && h->settings[i][strlen(option)] == '=')
            return h->settings[i] + strlen(option) + 1;
    return "absent";
}
static void assert_setting(const char *base, const char *members, const char *option, const char *value) {
    struct huggingface_config h;
    struct error_text error;
    const char *problem = parse_with(&h, base, members, &error);
    assert_string_equal(problem ? problem : "", "");
    assert_string_equal(setting(&h, option), value);
}
static void test_what_is_absent_is_transformers_default(void **state) {
    assert_setting(GPT2, "{}", "ffn-hidden-size", "128");
    assert_setting(GPT2, "{\"n_inner\": null}", "ffn-hidden-size", "128");
    assert_setting(GPT2, "{\"n_inner\": 24}", "ffn-hidden-size", "24");
    assert_setting(GPT2, "{}", "untie-embeddings-and-output-weights", "false");
    assert_setting(GPT2, "{\"tie_word_embeddings\": false}", "untie-embeddings-and-output-weights", "true");
    assert_setting(GPT2, "{}", "num-query-groups", "2");
    assert_setting(GPT2, "{}", "kv-channels", "16");
    assert_setting(GPT2, "{}", "norm-epsilon", "1e-05");
    assert_setting(LLAMA, "{}", "untie-embeddings-and-output-weights", "true");
    assert_setting(LLAMA, "{}", "rotary-base", "10000");
    assert_setting(LLAMA, "{}", "norm-epsilon", "1e-06");
    assert_setting(LLAMA, "{}", "num-query-groups", "4");
    assert_setting(LLAMA, "{}", "kv-channels", "8");
    assert_setting(LLAMA, "{\"num_key_value_heads\": 1, \"head_dim\": 64}", "num-query-groups", "1");
    assert_setting(LLAMA, "{\"num_key_value_heads\": 1, \"head_dim\": 64}", "kv-channels", "64");
    assert_setting(LLAMA, "{}", "add-qkv-bias", "false");
    assert_setting(LLAMA, "{\"attention_bias\": true, \"mlp_bias\": true}", "add-bias-linear", "true");
    assert_setting(QWEN2, "{}", "add-qkv-bias", "true");
    assert_setting(QWEN2, "{}", "add-bias-linear", "false");
    assert_setting(QWEN2, "{\"use_sliding_window\": false, \"sliding_window\": 4096}", "num-layers", "2");
    assert_setting(QWEN2, "{\"layer_types\": [\"full_attention\", \"full_attention\"]}", "num-layers", "2");
}
static void test_theta_in_either_place(void **state) {
    assert_setting(LLAMA, "{\"rope_theta\": 500000.0}", "rotary-base", "500000");
    assert_setting(LLAMA, "{\"rope_theta\": 500000, \"rope_scaling\": null}", "rotary-base", "500000");
    assert_setting(LLAMA, "{\"rope_parameters\": {\"rope_theta\": 300.5}}", "rotary-base", "300.5");
    assert_setting(LLAMA, "{\"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 2e6}}", "rotary-base",
                   "2000000");
    assert_setting(LLAMA, "{\"rope_theta\": 9, \"rope_parameters\": {\"rope_theta\": 7}}", "rotary-base", "7");
    assert_setting(LLAMA, "{\"rope_theta\": 9, \"rope_parameters\": {\"partial_rotary_factor\": 1.0}}", "rotary-base",
                   "9");
}

// ---- What is refused -----------------------------------------------------------------------------------------------

static void test_refusals_name_the_setting(void **state) {
    const struct {
        const char *base, *members, *words;
    } bad[] = {
        {LLAMA, "{\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 2}}", "rope_scaling is set"},
        {LLAMA, "{\"rope_parameters\": {\"rope_type\": \"llama3\"}}", "rope_type is 'llama3', which is not supported"},
        {QWEN2, "{\"rope_parameters\": {\"rope_type\": \"yarn\"}}", "rope_type is 'yarn', which is not supported"},
        {LLAMA, "{\"rope_parameters\": {\"type\": \"linear\"}}", "type is 'linear', which is not supported"},
        {LLAMA, "{\"rope_parameters\": {\"full_attention\": {\"rope_theta\": 7}}}",
         "rope_parameters has full_attention"},
        {LLAMA, "{\"rope_parameters\": {\"partial_rotary_factor\": 0.5}}", "partial_rotary_factor is 0.5"},
        {LLAMA, "{\"partial_rotary_factor\": 0.25}", "partial_rotary_factor is 0.25"},
        {LLAMA, "{\"rope_theta\": 0.5}", "rope_theta is 0.5"},
        {QWEN2, "{\"use_sliding_window\": true}", "use_sliding_window is true"},
        {QWEN2, "{\"layer_types\": [\"full_attention\", \"sliding_attention\"]}",
         "layer_types has 'sliding_attention'"},
        {LLAMA, "{\"quantization_config\": {\"bits\": 4}}", "quantization_config is set"},
        {LLAMA, "{\"hidden_act\": \"gelu\"}", "hidden_act is 'gelu'"},
        {LLAMA, "{\"attention_bias\": true}", "attention_bias is true and mlp_bias false"},
        {LLAMA, "{\"mlp_bias\": true}", "attention_bias is false and mlp_bias true"},
        {QWEN2, "{\"attention_bias\": false}", "attention_bias is false"},
        {QWEN2, "{\"mlp_bias\": true}", "mlp_bias true"},
        {LLAMA, "{\"num_key_value_heads\": 3}", "num_key_value_heads is 3"},
        {LLAMA, "{\"num_key_value_heads\": 8}", "num_key_value_heads is 8"},
        {LLAMA, "{\"head_dim\": 12}", "heads of size 12"},
        {GPT2, "{\"activation_function\": \"gelu\"}",
         "activation_function is 'gelu', which is not supported; expected gelu_new"},
        {GPT2, "{\"scale_attn_by_inverse_layer_idx\": true}", "scale_attn_by_inverse_layer_idx is true"},
        {GPT2, "{\"scale_attn_weights\": false}", "scale_attn_weights is false"},
        {GPT2, "{\"add_cross_attention\": true}", "add_cross_attention is true"},
        {GPT2, "{\"n_head\": 3}", "n_head is 3"},
        {GPT2, "{\"n_head\": 8}", "heads of size 4"},
        {GPT2, "{\"n_layer\": 0}", "n_layer is 0"},
        {GPT2, "{\"n_layer\": 70000}", "num_layers would be '70000', which is out of range"},
        {GPT2, "{\"model_type\": \"mistral\"}",
         "model_type is 'mistral', which is not supported; expected gpt2, llama or qwen2"},
        {GPT2, "{\"model_type\": \"phi\"}", "model_type is 'phi'"},
        {GPT2, "{\"model_type\": null}", "model_type is null"},
        {GPT2, "{\"vocab_size\": null}", "vocab_size is null"},
        {GPT2, "{\"model_type\": \"train_gpt\"}", "num_layers is absent"},
        {GPT2, "{\"model_type\": \"train_gpt\", \"num_layers\": \"123456789012345678901\"}",
         "expected an option's value"},
    };
    struct huggingface_config h;
    struct error_text error;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_error(parse_with(&h, bad[i].base, bad[i].members, &error), bad[i].words);
        assert_error(error.text, "config.json: ");
    }
}

// ---- Written and read ----------------------------------------------------------------------------------------------

static struct config config_of(const char *options) {
    static char text[1024];
    char *words[64], *rest = NULL;
    int n = 0;
    snprintf(text, sizeof text,
             "train_gpt --plan --num-layers 3 --hidden-size 64 --num-attention-heads 4 --vocab-size 777 "
             "--seq-length 20 %s",
             options);
    for (char *word = strtok_r(text, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        words[n++] = word;
    words[n] = NULL;
    return config_parse(n, words);
}
static char *written(const struct config *c, int end_of_text, size_t *bytes) {
    char *text = NULL;
    FILE *out = open_memstream(&text, bytes);
    huggingface_write_config(out, c, end_of_text, true);
    fclose(out);
    return text;
}

#define ROPE "--position-embedding-type rope --rotary-base 1234.5 "
static const char *const shapes[] = {
    "",
    "--num-query-groups 2 --no-add-bias-linear --untie-embeddings-and-output-weights",
    "--ffn-hidden-size 72 --max-position-embeddings 32 --norm-epsilon 0.1234567",
    ("--normalization RMSNorm --activation swiglu --no-add-bias-linear " ROPE "--num-query-groups 1 --kv-channels 24"),
    "--normalization RMSNorm --activation swiglu --untie-embeddings-and-output-weights --position-embedding-type rope",
    "--normalization RMSNorm --activation swiglu --no-add-bias-linear --add-qkv-bias --rotary-base 1e6 "
    "--position-embedding-type rope",
    "--num-query-groups 2 " ROPE,
    "--normalization RMSNorm --no-add-bias-linear --kv-channels 8",
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

// A model that no architecture of Hugging Face fits is written under the options' names.
static void test_our_own_config_keeps_the_order_of_its_members(void **state) {
    static const char *const members[] = {"num_layers",
                                          "hidden_size",
                                          "num_attention_heads",
                                          "num_query_groups",
                                          "kv_channels",
                                          "ffn_hidden_size",
                                          "normalization",
                                          "norm_epsilon",
                                          "position_embedding_type",
                                          "rotary_base",
                                          "activation",
                                          "add_bias_linear",
                                          "add_qkv_bias",
                                          "max_position_embeddings",
                                          "untie_embeddings_and_output_weights"};
    const struct option_row *rows[CONFIG_ROWS];
    assert_int_equal(huggingface_own_options(rows), sizeof members / sizeof *members);
    for (size_t i = 0; i < sizeof members / sizeof *members; i++)
        assert_string_equal(rows[i]->name, members[i]);
}

// GPT-2 says less than there was: KV heads are then as many as heads, biases there, and nothing is said of theta.
static void test_written_is_read_as_the_same_options(void **state) {
    for (int i = 0; i < SHAPES; i++) {
        const struct config wrote = config_of(shapes[i]);
        struct config read = config_of("");
        struct huggingface_config h;
        struct error_text error;
        size_t bytes;
        char *text = written(&wrote, -1, &bytes), a[OPTION_TEXT], b[OPTION_TEXT];
        const char *problem = parse_bytes(&h, text, bytes, &error);
        if (problem)
            fail_msg("%s: %s\n%s", shapes[i], problem, text);
        assert_int_equal(h.architecture, architecture_of(&wrote));
        for (int k = 0; k < h.num_settings; k++) {
            char name[OPTION_NAME];
            const char *value = strchr(h.settings[k], '=') + 1;
            snprintf(name, sizeof name, "%.*s", (int)(value - 1 - h.settings[k]), h.settings[k]);
            option_set(&config_rows[option_find(&config_options, name, false)], &read, value);
        }
        const struct option_row *rows[CONFIG_ROWS];
        const int options = huggingface_own_options(rows);
        for (int k = 0; k < options; k++) {
            const char *name = rows[k]->name;
            const bool gpt2 = h.architecture == ARCHITECTURE_GPT2;
            option_text(a, rows[k], &wrote);
            option_text(b, rows[k], &read);
            if (gpt2 && strcmp(name, "num_query_groups") == 0)
                snprintf(a, sizeof a, "%d", wrote.num_attention_heads);
            if (gpt2 && (strcmp(name, "add_bias_linear") == 0 || strcmp(name, "rotary_base") == 0))
                continue;
            if (gpt2 && strcmp(name, "add_qkv_bias") == 0)
                continue;
            if (strcmp(a, b) != 0)
                fail_msg("%s: %s is %s, but %s was written", shapes[i], name, b, a);
        }
        free(text);
    }
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

// Whatever was left out, an object that doesn't end is none; and a file of each kind, cut at every byte, does no harm.
static void test_truncation_at_every_byte(void **state) {
    struct huggingface_config h;
    struct error_text error;
    for (int i = 0; i < SHAPES; i++) {
        const struct config c = config_of(shapes[i]);
        size_t bytes;
        char *text = written(&c, -1, &bytes);
        assert_null(parse_bytes(&h, text, bytes, &error));
        for (size_t count = 0; count + 1 < bytes; count++) // the last byte ends the line
            assert_error(parse_bytes(&h, text, count, &error), count ? "is not valid JSON" : "is empty");
        free(text);
    }
}

// ---- llm.c ---------------------------------------------------------------------------------------------------------

static const int32_t LLMC[8] = {20240326, 3, 40, 101, 2, 2, 32, 128};
static const uint64_t LLMC_BYTES = LLMC_MODEL_HEADER + 4 * ((128 + 40 + 2) * 32 + 2 * (12 * 32 * 32 + 13 * 32));

static const char *parse_llmc(struct llmc_header *h, int word, int32_t value, size_t available, uint64_t file_bytes,
                              struct error_text *error) {
    unsigned char *header = (unsigned char *)calloc(1, available ? available : 1);
    int32_t words[8];
    memcpy(words, LLMC, sizeof words);
    if (word >= 0)
        words[word] = value;
    memcpy(header, words, available < sizeof words ? available : sizeof words);
    const char *problem = llmc_parse(h, header, available, file_bytes, "m.bin", error);
    free(header);
    return problem;
}
static void test_llmc_header(void **state) {
    struct llmc_header h;
    struct error_text error;
    struct huggingface_config settings;
    assert_null(parse_llmc(&h, -1, 0, LLMC_MODEL_HEADER, LLMC_BYTES, &error));
    llmc_settings(&settings, &h);
    assert_null(huggingface_check_settings(&settings, "m.bin", &error));
    assert_string_equal(setting(&settings, "vocab-size"), "101");
    assert_string_equal(setting(&settings, "max-position-embeddings"), "40");
    assert_string_equal(setting(&settings, "ffn-hidden-size"), "128");
    assert_string_equal(setting(&settings, "num-query-groups"), "2");
    assert_null(
        parse_llmc(&h, 1, 5, LLMC_MODEL_HEADER, LLMC_MODEL_HEADER + (LLMC_BYTES - LLMC_MODEL_HEADER) / 2, &error));
    assert_true(h.bf16);

    for (size_t available = 0; available < LLMC_MODEL_HEADER; available++)
        assert_error(parse_llmc(&h, -1, 0, available, available, &error), "expected an llm.c checkpoint, whose header");
    assert_error(parse_llmc(&h, 0, 20240520, LLMC_MODEL_HEADER, LLMC_BYTES, &error), "begins with 20240520");
    assert_error(parse_llmc(&h, 1, 4, LLMC_MODEL_HEADER, LLMC_BYTES, &error), "version 4; expected");
    for (int word = 2; word < 8; word++) {
        assert_error(parse_llmc(&h, word, 0, LLMC_MODEL_HEADER, LLMC_BYTES, &error), "is 0; expected 1 to");
        assert_error(parse_llmc(&h, word, -5, LLMC_MODEL_HEADER, LLMC_BYTES, &error), "is -5; expected 1 to");
        assert_error(parse_llmc(&h, word, INT32_MAX, LLMC_MODEL_HEADER, LLMC_BYTES, &error),
                     "is 2147483647; expected 1 to");
    }
    assert_error(parse_llmc(&h, 7, 100, LLMC_MODEL_HEADER, LLMC_BYTES, &error), "a vocabulary of 101 padded to 100");
    assert_error(parse_llmc(&h, 5, 3, LLMC_MODEL_HEADER, LLMC_BYTES, &error), "3 heads and width 32");
    assert_error(parse_llmc(&h, 5, 8, LLMC_MODEL_HEADER, LLMC_BYTES, &error), "a multiple of 8");
    assert_error(parse_llmc(&h, -1, 0, LLMC_MODEL_HEADER, LLMC_BYTES - 1, &error), "it was cut off");
    assert_error(parse_llmc(&h, -1, 0, LLMC_MODEL_HEADER, LLMC_BYTES + 1, &error), "expected 124416 by its header");
    assert_error(parse_llmc(&h, 6, 1 << 25, LLMC_MODEL_HEADER, UINT64_MAX, &error), "by its header");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_absent_is_transformers_default),
        cmocka_unit_test(test_theta_in_either_place),
        cmocka_unit_test(test_refusals_name_the_setting),
        cmocka_unit_test(test_written_is_read_as_the_same_options),
        cmocka_unit_test(test_our_own_config_keeps_the_order_of_its_members),
        cmocka_unit_test(test_end_of_text),
        cmocka_unit_test(test_truncation_at_every_byte),
        cmocka_unit_test(test_llmc_header),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
