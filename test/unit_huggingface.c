// config.json of a model's folder, as the program reads it: what its members mean, and what missing members mean. What
// is not supported is refused in words that name the setting. unit_architectures.c tests what is written.
#include "formats/huggingface.h" // under test
#include "test/config_json.h"    // parse_bytes
#include "test/fails.h"          // assert_error
#include "test/testing.h"        // cmocka

#include <jansson.h> // json_loads

static const char GPT2[] =
    "{\"model_type\": \"gpt2\", \"vocab_size\": 101, \"n_layer\": 2, \"n_embd\": 32, \"n_head\": 2,"
    " \"n_positions\": 40}";
static const char LLAMA[] =
    "{\"model_type\": \"llama\", \"vocab_size\": 101, \"num_hidden_layers\": 2, \"hidden_size\": 32,"
    " \"num_attention_heads\": 4, \"intermediate_size\": 24, \"max_position_embeddings\": 40}";
// A config with only the sizes and model_type.
#define SIZES(model_type)                                                                                              \
    "{\"model_type\": \"" model_type "\", \"vocab_size\": 101, \"num_hidden_layers\": 4, \"hidden_size\": 256,"        \
    " \"num_attention_heads\": 16, \"intermediate_size\": 24, \"max_position_embeddings\": 40}"
static const char QWEN2[] =
    "{\"model_type\": \"qwen2\", \"vocab_size\": 101, \"num_hidden_layers\": 2, \"hidden_size\": 32,"
    " \"num_attention_heads\": 4, \"num_key_value_heads\": 4, \"intermediate_size\": 24,"
    " \"max_position_embeddings\": 40}";
static const char MISTRAL[] = SIZES("mistral"), MINISTRAL[] = SIZES("ministral"), CWM[] = SIZES("cwm"),
                  SMOLLM3[] = SIZES("smollm3"), GRANITE[] = SIZES("granite"), OLMO2[] = SIZES("olmo2"),
                  OLMO3[] = SIZES("olmo3"), GEMMA[] = SIZES("gemma"), GEMMA2[] = SIZES("gemma2"),
                  GEMMA3[] = SIZES("gemma3_text"), PHI3[] = SIZES("phi3"), NEOX[] = SIZES("gpt_neox");
static const char QWEN3[] =
    "{\"model_type\": \"qwen3\", \"vocab_size\": 101, \"num_hidden_layers\": 4, \"hidden_size\": 256,"
    " \"num_attention_heads\": 16, \"num_key_value_heads\": null, \"intermediate_size\": 24,"
    " \"max_position_embeddings\": 40}";

// Parses the config `base` with `members` in place of its own members of these names; null removes a member.
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

// ---- What it means -------------------------------------------------------------------------------------------------

static void assert_setting(const char *base, const char *members, const char *option, const char *value) {
    struct huggingface_config h;
    struct error_text error;
    const char *problem = parse_with(&h, base, members, &error);
    if (problem)
        fail_msg("%s with %s: %s", base, members, problem);
    const char *found = huggingface_setting(&h, option);
    assert_string_equal(found ? found : "absent", value);
    huggingface_free(&h);
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
// Checks each class's own defaults: transformers' configuration_*.py.
static void test_what_is_absent_is_the_class_default(void **state) {
    const struct {
        const char *base, *tied, *groups, *head_dim, *epsilon, *theta;
    } rows[] = {
        {MISTRAL, "true", "8", "16", "1e-06", "10000"},  {MINISTRAL, "true", "8", "16", "1e-06", "10000"},
        {CWM, "true", "8", "128", "1e-05", "1000000"},   {SMOLLM3, "false", "4", "16", "1e-06", "2000000"},
        {GRANITE, "true", "16", "16", "1e-06", "10000"}, {OLMO2, "true", "16", "16", "1e-05", "10000"},
        {OLMO3, "true", "16", "16", "1e-05", "500000"},  {GEMMA, "false", "16", "256", "1e-06", "10000"},
        {GEMMA2, "false", "4", "256", "1e-06", "10000"}, {GEMMA3, "false", "4", "256", "1e-06", "1000000"},
        {PHI3, "true", "16", "16", "1e-05", "10000"},    {NEOX, "true", "16", "16", "1e-05", "10000"},
        {QWEN3, "true", "16", "128", "1e-06", "10000"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        assert_setting(rows[i].base, "{}", "untie-embeddings-and-output-weights", rows[i].tied);
        assert_setting(rows[i].base, "{}", "num-query-groups", rows[i].groups);
        assert_setting(rows[i].base, "{}", "kv-channels", rows[i].head_dim);
        assert_setting(rows[i].base, "{}", "norm-epsilon", rows[i].epsilon);
        assert_setting(rows[i].base, "{}", "rotary-base", rows[i].theta);
    }
}
static void test_biases_are_where_the_class_has_them(void **state) {
    const struct {
        const char *base, *members, *qkv, *proj, *mlp;
    } rows[] = {
        {LLAMA, "{}", "false", "false", "false"},
        {LLAMA, "{\"attention_bias\": true}", "true", "true", "false"},
        {LLAMA, "{\"mlp_bias\": true}", "false", "false", "true"},
        {QWEN2, "{}", "true", "false", "false"},
        {QWEN3, "{\"attention_bias\": true}", "true", "true", "false"},
        {SMOLLM3, "{\"attention_bias\": true, \"mlp_bias\": true}", "true", "true", "true"},
        {GRANITE, "{\"mlp_bias\": true}", "false", "false", "true"},
        {GEMMA2, "{\"attention_bias\": true}", "true", "true", "false"},
        {CWM, "{\"mlp_bias\": true}", "false", "false", "true"},
        {NEOX, "{}", "true", "true", "true"},
        {NEOX, "{\"attention_bias\": false}", "false", "false", "true"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        assert_setting(rows[i].base, rows[i].members, "add-qkv-bias", rows[i].qkv);
        assert_setting(rows[i].base, rows[i].members, "add-attention-proj-bias", rows[i].proj);
        assert_setting(rows[i].base, rows[i].members, "add-mlp-bias", rows[i].mlp);
    }
}
static void test_windows(void **state) {
    const struct {
        const char *base, *members, *window, *layers;
    } rows[] = {
        {MISTRAL, "{}", "4096", "none"},
        {MISTRAL, "{\"sliding_window\": null}", "none", "none"},
        {MISTRAL, "{\"sliding_window\": 7}", "7", "none"},
        {PHI3, "{}", "none", "none"},
        {PHI3, "{\"sliding_window\": 2047}", "2047", "none"},
        {QWEN3, "{\"sliding_window\": 7}", "none", "none"},
        {QWEN3, "{\"use_sliding_window\": true, \"max_window_layers\": 1}", "4096", "0,1,1,1"},
        {QWEN3, "{\"use_sliding_window\": true}", "none", "none"}, // after layer 28
        {QWEN3,
         "{\"use_sliding_window\": true, \"sliding_window\": 3, \"layer_types\": [\"full_attention\","
         " \"sliding_attention\", \"full_attention\", \"full_attention\"]}",
         "3", "0,1,0,0"},
        {MINISTRAL, "{\"sliding_window\": 5}", "5", "none"},
        {CWM, "{}", "8192", "0,1,1,1"},
        {OLMO3, "{}", "4096", "4"},
        {GEMMA2, "{\"sliding_window\": 1}", "1", "2"},
        {GEMMA3, "{}", "4096", "none"}, // the 6th layer is the first one without
        {GEMMA3, "{\"sliding_window_pattern\": 3}", "4096", "3"},
        {GEMMA3, "{\"_sliding_window_pattern\": 2}", "4096", "2"},
        {SMOLLM3, "{\"use_sliding_window\": true, \"sliding_window\": 9}", "9", "0,0,0,1"},
        {LLAMA, "{\"sliding_window\": 5}", "none", "none"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        assert_setting(rows[i].base, rows[i].members, "window-size", rows[i].window);
        assert_setting(rows[i].base, rows[i].members, "window-attn-skip-freq", rows[i].layers);
    }
    assert_setting(SMOLLM3, "{}", "no-rope-freq", "4");
    assert_setting(SMOLLM3, "{\"no_rope_layer_interval\": 2}", "no-rope-freq", "2");
    assert_setting(SMOLLM3, "{\"no_rope_layers\": [0, 1, 1, 0]}", "no-rope-freq", "1,0,0,1");
    assert_setting(SMOLLM3, "{\"no_rope_layers\": [1, 1, 1, 1]}", "no-rope-freq", "none");
}
static void test_factors(void **state) {
    assert_setting(GRANITE, "{}", "softmax-scale", "1");
    // the default scale for heads of 16
    assert_setting(GRANITE, "{\"attention_multiplier\": 0.25}", "softmax-scale", "0");
    assert_setting(GRANITE, "{\"logits_scaling\": 8}", "logit-multiplier", "0.125");
    assert_setting(GRANITE, "{\"residual_multiplier\": 0.22}", "residual-multiplier", "0.22");
    assert_setting(GRANITE, "{\"embedding_multiplier\": 12}", "embedding-multiplier", "12");
    assert_setting(GEMMA, "{}", "embedding-multiplier", "16");
    assert_setting(GEMMA, "{\"hidden_size\": 3072}", "embedding-multiplier", "55.42562584220407");
    assert_setting(GEMMA, "{}", "apply-layernorm-1p", "true");
    assert_setting(GEMMA, "{\"hidden_act\": \"gelu\"}", "activation", "geglu");
    assert_setting(GEMMA2, "{}", "softmax-scale", "0"); // 256 is the size of a head
    assert_setting(GEMMA2, "{\"query_pre_attn_scalar\": 144}", "softmax-scale", "0.08333333333333333");
    assert_setting(GEMMA2, "{}", "attn-logit-softcapping", "50");
    assert_setting(GEMMA2, "{}", "final-logit-softcapping", "30");
    assert_setting(GEMMA2, "{\"attn_logit_softcapping\": null}", "attn-logit-softcapping", "0");
    assert_setting(GEMMA3, "{}", "final-logit-softcapping", "0");
    assert_setting(GEMMA3, "{\"final_logit_softcapping\": 12}", "final-logit-softcapping", "12");
    assert_setting(NEOX, "{}", "parallel-residual", "true");
    assert_setting(NEOX, "{}", "activation", "gelu_erf");
    assert_setting(NEOX, "{\"hidden_act\": \"gelu_fast\"}", "activation", "gelu");
    assert_setting(GPT2, "{\"activation_function\": \"gelu\"}", "activation", "gelu_erf");
    assert_setting(OLMO2, "{}", "qk-layernorm-width", "full");
    assert_setting(OLMO2, "{}", "norm-placement", "post");
    assert_setting(GEMMA3, "{}", "norm-placement", "sandwich");
}
#define LLAMA3                                                                                                         \
    "\"rope_type\": \"llama3\", \"factor\": 32.0, \"low_freq_factor\": 2, \"high_freq_factor\": 5,"                    \
    " \"original_max_position_embeddings\": 8192"
static void test_rotary_scaling_in_either_form(void **state) {
    static const char *const forms[] = {
        "{\"rope_theta\": 5e5, \"rope_scaling\": {" LLAMA3 "}}",
        "{\"rope_parameters\": {\"rope_theta\": 5e5, " LLAMA3 "}}",
        "{\"rope_theta\": 5e5, \"rope_scaling\": {" LLAMA3 "}, \"rope_parameters\": {\"rope_theta\": 5e5, " LLAMA3 "}}",
    };
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        assert_setting(LLAMA, forms[i], "rotary-base", "500000");
        assert_setting(LLAMA, forms[i], "rope-scaling-type", "llama3");
        assert_setting(LLAMA, forms[i], "rope-scaling-factor", "32");
        assert_setting(LLAMA, forms[i], "rope-low-freq-factor", "2");
        assert_setting(LLAMA, forms[i], "rope-high-freq-factor", "5");
        assert_setting(LLAMA, forms[i], "rope-original-max-position-embeddings", "8192");
    }
    assert_setting(LLAMA, "{\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}}", "rope-scaling-type", "linear");
    assert_setting(LLAMA, "{\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}}", "rope-scaling-factor", "2");
#define YARN "\"rope_type\": \"yarn\", \"factor\": null, \"original_max_position_embeddings\": 10"
    assert_setting(QWEN2, "{\"rope_scaling\": {" YARN "}}", "rope-scaling-factor", "4");
    assert_setting(QWEN2, "{\"rope_scaling\": {" YARN "}}", "yarn-beta-fast", "32");
    assert_setting(QWEN2, "{\"rope_scaling\": {" YARN ", \"truncate\": false}}", "yarn-truncate", "false");
    assert_setting(QWEN2, "{\"rope_scaling\": {" YARN ", \"attention_factor\": 1.5}}", "rope-attention-factor", "1.5");
    assert_setting(QWEN2, "{\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4}}",
                   "rope-original-max-position-embeddings", "40");
    // In OLMo 3 the scaling, in whatever form, is only for full layers.
    static const char *const olmo3[] = {
        "{\"rope_theta\": 5e5, \"rope_scaling\": {" YARN "}}",
        "{\"rope_parameters\": {\"rope_theta\": 5e5, " YARN "}}",
        "{\"rope_parameters\": {\"full_attention\": {\"rope_theta\": 5e5, " YARN "}, \"sliding_attention\":"
        " {\"rope_type\": \"default\", \"rope_theta\": 5e5}}}",
    };
    for (size_t i = 0; i < sizeof olmo3 / sizeof *olmo3; i++) {
        assert_setting(OLMO3, olmo3[i], "rope-scaling-type", "yarn");
        assert_setting(OLMO3, olmo3[i], "rotary-base-local", "500000");
    }
    assert_setting(OLMO3, "{}", "rotary-base-local", "0");
    assert_setting(GEMMA3, "{}", "rotary-base-local", "10000");
    assert_setting(GEMMA3, "{\"rope_theta\": 10000}", "rotary-base-local", "0");
    assert_setting(GEMMA3, "{\"rope_local_base_freq\": 77}", "rotary-base-local", "77");
    assert_setting(GEMMA3, "{\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 8}}", "rope-scaling-factor",
                   "8");
    // CWM's class has a scaling of its own where the file has no rotary settings except rope_theta.
    assert_setting(CWM, "{\"rope_theta\": 9}", "rope-scaling-type", "llama3");
    assert_setting(CWM, "{\"rope_theta\": 9}", "rotary-base", "1000000");
    assert_setting(CWM, "{\"rope_parameters\": {\"rope_theta\": 9}}", "rope-scaling-type", "none");
    assert_setting(CWM, "{\"rope_parameters\": {\"rope_theta\": 9}}", "rotary-base", "9");
}
static void test_partial_rotary(void **state) {
    assert_setting(NEOX, "{}", "rotary-percent", "0.25");
    assert_setting(NEOX, "{\"rotary_pct\": 0.5, \"rotary_emb_base\": 55, \"rope_theta\": 9}", "rotary-percent", "0.5");
    assert_setting(NEOX, "{\"rotary_pct\": 0.5, \"rotary_emb_base\": 55, \"rope_theta\": 9}", "rotary-base", "55");
    assert_setting(NEOX, "{\"rope_parameters\": {\"partial_rotary_factor\": 0.75, \"rope_theta\": 9}}",
                   "rotary-percent", "0.75");
    assert_setting(PHI3, "{\"partial_rotary_factor\": 0.75}", "rotary-percent", "0.75");
    static const char longrope[] =
        "{\"partial_rotary_factor\": 0.25, \"original_max_position_embeddings\": 20, \"rope_scaling\": {\"type\": \"su\","
        " \"short_factor\": [1, 1.5], \"long_factor\": [2, 64.25]}}";
    assert_setting(PHI3, longrope, "rope-scaling-type", "longrope");
    assert_setting(PHI3, longrope, "rope-short-factors", "1,1.5");
    assert_setting(PHI3, longrope, "rope-long-factors", "2,64.25");
    assert_setting(PHI3, longrope, "rope-scaling-factor", "2");
    assert_setting(PHI3, longrope, "rope-original-max-position-embeddings", "20");
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
        {LLAMA, "{\"rope_scaling\": {\"rope_type\": \"dynamic\", \"factor\": 2}}",
         "rope_type is 'dynamic', which is not supported; expected default, linear, llama3, yarn or longrope"},
        {LLAMA, "{\"rope_parameters\": {\"rope_type\": \"proportional\"}}", "rope_type is 'proportional'"},
        {QWEN2, "{\"rope_scaling\": {\"type\": \"mrope\"}}", "rope_type is 'mrope'"},
        {QWEN2, "{\"rope_scaling\": {\"type\": \"default\", \"mrope_section\": [16]}}",
         "rope_scaling has 'mrope_section'"},
        {LLAMA, "{\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8}}", "low_freq_factor is absent"},
        {LLAMA, "{\"rope_scaling\": {\"type\": \"linear\"}}", "factor is absent"},
        {LLAMA,
         "{\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}, \"rope_parameters\": {\"rope_type\": \"linear\","
         " \"factor\": 3}}",
         "rope_scaling and rope_parameters have another factor each"},
        {PHI3, "{\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}}", "rope_type is 'linear'"},
        {PHI3, "{\"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": [1, 2], \"long_factor\": [1]}}",
         "short_factor has 2 numbers; expected 8"},
        {OLMO3,
         "{\"rope_parameters\": {\"sliding_attention\": {\"rope_type\": \"linear\", \"factor\": 2, \"rope_theta\": 9}}}",
         "sliding_attention has a scaling of its own"},
        {OLMO3, "{\"rope_parameters\": {\"full_attention\": {\"rope_type\": \"yarn\", \"truncate\": false}}}",
         "truncate is false in full_attention, but true in rope_parameters"},
        {NEOX, "{\"rotary_pct\": 0.1}", "rotates 1 elements of a head"},
        {LLAMA, "{\"rope_parameters\": {\"full_attention\": {\"rope_theta\": 7}}}",
         "rope_parameters has full_attention"},
        {LLAMA, "{\"rope_parameters\": {\"partial_rotary_factor\": 0.5}}", "partial_rotary_factor is 0.5"},
        {LLAMA, "{\"partial_rotary_factor\": 0.25}", "partial_rotary_factor is 0.25"},
        {LLAMA, "{\"rope_theta\": 0.5}", "rope_theta is 0.5"},
        {LLAMA, "{\"use_sliding_window\": true}", "use_sliding_window is true"},
        {QWEN2, "{\"use_sliding_window\": true, \"sliding_window\": 0}", "sliding_window is 0"},
        {MISTRAL, "{\"sliding_window\": 0}", "sliding_window is 0"},
        {QWEN2, "{\"layer_types\": [\"full_attention\", \"sliding_attention\"]}",
         "layer_types has 'sliding_attention', but use_sliding_window is false"},
        {LLAMA, "{\"layer_types\": [\"full_attention\", \"sliding_attention\"]}",
         "layer_types has 'sliding_attention'"},
        {QWEN2, "{\"layer_types\": [\"full_attention\", \"chunked_attention\"]}",
         "layer_types has 'chunked_attention'"},
        {QWEN2, "{\"layer_types\": [\"full_attention\"]}", "layer_types has 1 layers; expected 2"},
        {MISTRAL, "{\"layer_types\": [\"full_attention\", \"full_attention\", \"full_attention\", \"full_attention\"]}",
         "all layers of this class have the window"},
        {SMOLLM3, "{\"no_rope_layers\": [1, 1]}", "no_rope_layers has 2 layers; expected 4"},
        {SMOLLM3, "{\"no_rope_layers\": [1, 1, 1, 2]}", "no_rope_layers is 2"},
        {GEMMA3, "{\"attn_logit_softcapping\": 50.0}", "attn_logit_softcapping is set"},
        {GEMMA3, "{\"use_bidirectional_attention\": true}", "use_bidirectional_attention is true"},
        {GEMMA2, "{\"query_pre_attn_scalar\": 1.5}", "query_pre_attn_scalar is 1.5"},
        {GEMMA3, "{\"model_type\": \"gemma3\"}", "gemma3_text, as Gemma 3 270M and 1B"},
        {MISTRAL, "{\"attention_bias\": true}", "attention_bias is true"},
        {LLAMA, "{\"quantization_config\": {\"bits\": 4}}", "quantization_config is set"},
        {LLAMA, "{\"hidden_act\": \"gelu\"}", "hidden_act is 'gelu'"},
        {QWEN2, "{\"attention_bias\": false}", "attention_bias is false"},
        {QWEN2, "{\"mlp_bias\": true}", "mlp_bias is true"},
        {LLAMA, "{\"num_key_value_heads\": 3}", "num_key_value_heads is 3"},
        {LLAMA, "{\"num_key_value_heads\": 8}", "num_key_value_heads is 8"},
        {LLAMA, "{\"head_dim\": 12}", "heads of size 12"},
        {GPT2, "{\"activation_function\": \"silu\"}",
         "activation_function is 'silu', which is not supported; expected gelu_new, gelu or relu2"},
        {GPT2, "{\"scale_attn_by_inverse_layer_idx\": true}", "scale_attn_by_inverse_layer_idx is true"},
        {GPT2, "{\"scale_attn_weights\": false}", "scale_attn_weights is false"},
        {GPT2, "{\"add_cross_attention\": true}", "add_cross_attention is true"},
        {GPT2, "{\"n_head\": 3}", "n_head is 3"},
        {GPT2, "{\"n_head\": 8}", "heads of size 4"},
        {GPT2, "{\"n_layer\": 0}", "n_layer is 0"},
        {GPT2, "{\"n_layer\": 70000}", "num_layers would be '70000', which is out of range"},
        {GPT2, "{\"model_type\": \"mixtral\"}",
         "model_type is 'mixtral', which is not supported; expected one of gpt2, llama, qwen2, qwen3, mistral"},
        {GPT2, "{\"model_type\": \"phi\"}", "model_type is 'phi'"},
        {GPT2, "{\"model_type\": null}", "model_type is null"},
        {GPT2, "{\"vocab_size\": null}", "vocab_size is null"},
        {GPT2, "{\"model_type\": \"train_gpt\"}", "num_layers is absent"},
        {GPT2, "{\"model_type\": \"train_gpt\", \"num_layers\": \"1234567890123456789012345678901\"}",
         "expected an option's value"},
    };
    struct huggingface_config h;
    struct error_text error;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_error(parse_with(&h, bad[i].base, bad[i].members, &error), bad[i].words);
        assert_error(error.text, "config.json: ");
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_absent_is_transformers_default),
        cmocka_unit_test(test_what_is_absent_is_the_class_default),
        cmocka_unit_test(test_biases_are_where_the_class_has_them),
        cmocka_unit_test(test_windows),
        cmocka_unit_test(test_factors),
        cmocka_unit_test(test_rotary_scaling_in_either_form),
        cmocka_unit_test(test_partial_rotary),
        cmocka_unit_test(test_theta_in_either_place),
        cmocka_unit_test(test_refusals_name_the_setting),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
