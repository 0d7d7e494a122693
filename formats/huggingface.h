// Hugging Face folders as this engine reads and writes them: config.json against struct config, and which tensor of
// model.safetensors holds which of our parameters, under which name, transposed or not.
//
// Three architectures: GPT2LMHeadModel, LlamaForCausalLM and Qwen2ForCausalLM. A model that none of them can express (a
// LayerNorm with rotary positions, say) is written under our own names, as model_type train_gpt, which only we read.
// Where an architecture has no word for something but has an exact equivalent, that is written: GPT-2 has as many KV
// heads as heads, so fewer are repeated; it has biases everywhere, so absent ones are zeros. huggingface_note says so.
//
// Names and layouts: transformers' models/{gpt2,llama,qwen2}/modeling_*.py and configuration_*.py.
#pragma once
#include "config.h"                  // struct config
#include "parameters.cuh"            // struct parameters, struct tensor
#include "runtime/text/json.h"       // config.json as written
#include "runtime/text/json_parse.h" // config.json as read
#include <stdio.h>                   // snprintf

enum architecture { ARCHITECTURE_OURS, ARCHITECTURE_GPT2, ARCHITECTURE_LLAMA, ARCHITECTURE_QWEN2, ARCHITECTURE_COUNT };
static const struct {
    const char *model_type, *class_name;
} architectures[ARCHITECTURE_COUNT] = {{"train_gpt", "TrainGPT"},
                                       {"gpt2", "GPT2LMHeadModel"},
                                       {"llama", "LlamaForCausalLM"},
                                       {"qwen2", "Qwen2ForCausalLM"}};

// The architecture that a model of these options is written as.
static enum architecture architecture_of(const struct config *c) {
    const bool gpt2 = c->normalization == NORMALIZATION_LAYERNORM && c->position_embedding_type == POSITION_LEARNED &&
                      c->activation == ACTIVATION_GELU && c->num_attention_heads * c->kv_channels == c->hidden_size;
    const bool llama = c->normalization == NORMALIZATION_RMSNORM && c->position_embedding_type == POSITION_ROPE &&
                       c->activation == ACTIVATION_SWIGLU;
    if (gpt2)
        return ARCHITECTURE_GPT2;
    if (llama)
        return c->add_qkv_bias && !c->add_bias_linear ? ARCHITECTURE_QWEN2 : ARCHITECTURE_LLAMA;
    return ARCHITECTURE_OURS;
}

// What a run says about the form of its checkpoints; "" where there is nothing to say.
static const char *huggingface_note(const struct config *c) {
    const enum architecture a = architecture_of(c);
    if (a == ARCHITECTURE_OURS)
        return "of a kind that Hugging Face has no model for: written under our own names, for this program alone";
    if (a == ARCHITECTURE_GPT2 && c->num_query_groups < c->num_attention_heads)
        return c->add_bias_linear
                   ? "GPT2LMHeadModel, with each KV head repeated for its queries, since it has no groups"
                   : "GPT2LMHeadModel, with each KV head repeated for its queries and zeros as biases";
    if (a == ARCHITECTURE_GPT2 && !c->add_bias_linear)
        return "GPT2LMHeadModel, with zeros as biases, which it always has";
    return "";
}

// ---------------------------------------------------------------------------------------------------------------------
// config.json

static void huggingface_write_gpt2(struct json *json, const struct config *c) {
    json_int(json, "n_layer", c->num_layers);
    json_int(json, "n_embd", c->hidden_size);
    json_int(json, "n_head", c->num_attention_heads);
    json_int(json, "n_inner", c->ffn_hidden_size);
    json_int(json, "n_positions", c->max_position_embeddings);
    json_int(json, "n_ctx", c->max_position_embeddings);
    json_str(json, "activation_function", "gelu_new");
    json_decimal(json, "layer_norm_epsilon", c->norm_epsilon);
    json_decimal(json, "resid_pdrop", c->hidden_dropout);
    json_decimal(json, "embd_pdrop", c->hidden_dropout);
    json_decimal(json, "attn_pdrop", c->attention_dropout);
    json_bool(json, "scale_attn_weights", true);
}
// Readers before transformers 5 take rope_theta, later ones rope_parameters.
static void huggingface_write_llama(struct json *json, const struct config *c, enum architecture a) {
    json_int(json, "num_hidden_layers", c->num_layers);
    json_int(json, "hidden_size", c->hidden_size);
    json_int(json, "num_attention_heads", c->num_attention_heads);
    json_int(json, "num_key_value_heads", c->num_query_groups);
    json_int(json, "head_dim", c->kv_channels);
    json_int(json, "intermediate_size", c->ffn_hidden_size);
    json_int(json, "max_position_embeddings", c->max_position_embeddings);
    json_str(json, "hidden_act", "silu");
    json_decimal(json, "rms_norm_eps", c->norm_epsilon);
    json_decimal(json, "attention_dropout", c->attention_dropout);
    json_decimal(json, "rope_theta", c->rotary_base);
    json_object_begin(json, "rope_parameters");
    json_str(json, "rope_type", "default");
    json_decimal(json, "rope_theta", c->rotary_base);
    json_object_end(json);
    if (a == ARCHITECTURE_LLAMA) {
        json_bool(json, "attention_bias", c->add_bias_linear);
        json_bool(json, "mlp_bias", c->add_bias_linear);
    } else
        json_bool(json, "use_sliding_window", false);
}
// The rows of the options that are members of config.json where the model is only ours, in the order of the file. Returns
// their number.
static int huggingface_own_options(const struct option_row *rows[CONFIG_ROWS]) {
    int count = 0;
    for (int i = 0; i < CONFIG_ROWS; i++)
        if (config_rows[i].flags & CONFIG_BLOCKS)
            rows[count++] = &config_rows[i];
    for (int i = 0; i < CONFIG_ROWS; i++)
        if (config_rows[i].flags & CONFIG_EMBEDDING)
            rows[count++] = &config_rows[i];
    return count;
}
static void huggingface_write_ours(struct json *json, const struct config *c) {
    const struct option_row *rows[CONFIG_ROWS];
    char text[OPTION_TEXT];
    const int count = huggingface_own_options(rows);
    for (int i = 0; i < count; i++)
        json_str(json, rows[i]->name, option_text(text, rows[i], c));
}

// config.json of a checkpoint. end_of_text: the token, -1 where there is none. bf16: the type of model.safetensors.
static void huggingface_write_config(FILE *out, const struct config *c, int end_of_text, bool bf16) {
    const enum architecture a = architecture_of(c);
    struct json json = json_writer(out, true);
    json_object_begin(&json, NULL);
    json_array_begin(&json, "architectures");
    json_str(&json, NULL, architectures[a].class_name);
    json_array_end(&json);
    json_str(&json, "model_type", architectures[a].model_type);
    json_int(&json, "vocab_size", c->vocab_size);
    json_bool(&json, "tie_word_embeddings", !c->untie_embeddings_and_output_weights);
    if (a == ARCHITECTURE_GPT2)
        huggingface_write_gpt2(&json, c);
    else if (a == ARCHITECTURE_OURS)
        huggingface_write_ours(&json, c);
    else
        huggingface_write_llama(&json, c, a);
    json_decimal(&json, "initializer_range", c->init_method_std);
    // Readers take GPT-2's or Llama's own tokens where these are left out.
    static const char *const ends[] = {"bos_token_id", "eos_token_id"};
    for (int i = 0; i < 2; i++)
        if (end_of_text >= 0 && end_of_text < c->vocab_size)
            json_int(&json, ends[i], end_of_text);
        else
            json_none(&json, ends[i]);
    json_str(&json, "torch_dtype", bf16 ? "bfloat16" : "float32");
    json_object_end(&json);
}

// The options that a config.json stands for, as a preset would give them.
struct huggingface_config {
    enum architecture architecture;
    int num_settings;
    char settings[24][64]; // "num-layers=12"
};

__attribute__((format(printf, 2, 3))) static void huggingface_set(struct huggingface_config *h, const char *format,
                                                                  ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(h->settings[h->num_settings++], sizeof h->settings[0], format, arguments);
    va_end(arguments);
}

enum { HUGGINGFACE_LARGEST = 1 << 26 }; // of any size; the options' own limits are at most this

// One of the words or absent; another would be another model.
static const char *huggingface_word(const json_t *root, const char *key, const char *wanted, const char *also,
                                    const char *name, struct error_text *error) {
    const char *value = wanted;
    const char *problem = json_opt_string(root, key, wanted, &value, name, error);
    if (!problem && strcmp(value, wanted) != 0 && strcmp(value, also) != 0)
        problem = error_format(error, "%s: %s is '%s', which is not supported; expected %s", name, key,
                               json_show(value).text, wanted);
    return problem;
}
static const char *huggingface_flag(const json_t *root, const char *key, bool wanted, const char *name,
                                    struct error_text *error) {
    bool value;
    const char *problem = json_opt_bool(root, key, wanted, &value, name, error);
    if (!problem && value != wanted)
        problem = error_format(error, "%s: %s is %s, which is not supported", name, key, value ? "true" : "false");
    return problem;
}
static const char *huggingface_absent(const json_t *root, const char *key, const char *name, struct error_text *error) {
    return json_has(root, key) ? error_format(error, "%s: %s is set, which is not supported", name, key) : NULL;
}

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        const char *const problem_ = (call);                                                                           \
        if (problem_)                                                                                                  \
            return problem_;                                                                                           \
    } while (0)

static const char *huggingface_size(struct huggingface_config *h, const json_t *root, const char *key,
                                    const char *option, const char *name, struct error_text *error) {
    int64_t value;
    CHECK(json_get_int(root, key, 1, HUGGINGFACE_LARGEST, &value, name, error));
    huggingface_set(h, "%s=%lld", option, (long long)value);
    return NULL;
}
static const char *huggingface_number(struct huggingface_config *h, const json_t *root, const char *key, double least,
                                      double most, double fallback, const char *option, const char *name,
                                      struct error_text *error) {
    double value;
    CHECK(json_opt_number(root, key, least, most, fallback, &value, name, error));
    huggingface_set(h, "%s=%.9g", option, value);
    return NULL;
}

// Head sizes that no kernel here takes are refused while the file that has them can be named.
static const char *huggingface_set_heads(struct huggingface_config *h, int64_t groups, int64_t head_dim,
                                         const char *name, struct error_text *error) {
    if (head_dim % 8 != 0)
        return error_format(error, "%s: has heads of size %lld, which is not supported; expected a multiple of 8", name,
                            (long long)head_dim);
    huggingface_set(h, "num-query-groups=%lld", (long long)groups);
    huggingface_set(h, "kv-channels=%lld", (long long)head_dim);
    return NULL;
}

static const char *huggingface_read_gpt2(struct huggingface_config *h, const json_t *root, const char *name,
                                         struct error_text *error) {
    int64_t hidden, heads, inner;
    CHECK(huggingface_word(root, "activation_function", "gelu_new", "gelu_pytorch_tanh", name, error));
    CHECK(huggingface_flag(root, "scale_attn_weights", true, name, error));
    CHECK(huggingface_flag(root, "scale_attn_by_inverse_layer_idx", false, name, error));
    CHECK(huggingface_flag(root, "add_cross_attention", false, name, error));
    CHECK(huggingface_size(h, root, "n_layer", "num-layers", name, error));
    CHECK(huggingface_size(h, root, "n_embd", "hidden-size", name, error));
    CHECK(huggingface_size(h, root, "n_head", "num-attention-heads", name, error));
    CHECK(huggingface_size(h, root, "n_positions", "max-position-embeddings", name, error));
    CHECK(json_get_int(root, "n_embd", 1, HUGGINGFACE_LARGEST, &hidden, name, error));
    CHECK(json_get_int(root, "n_head", 1, HUGGINGFACE_LARGEST, &heads, name, error));
    if (hidden % heads != 0)
        return error_format(error, "%s: n_head is %lld, which does not divide n_embd, %lld", name, (long long)heads,
                            (long long)hidden);
    CHECK(huggingface_set_heads(h, heads, hidden / heads, name, error));
    CHECK(json_opt_int(root, "n_inner", 1, HUGGINGFACE_LARGEST, 4 * hidden, &inner, name, error));
    CHECK(huggingface_number(h, root, "layer_norm_epsilon", 1e-12, 0.9, 1e-5, "norm-epsilon", name, error));
    huggingface_set(h, "ffn-hidden-size=%lld", (long long)inner);
    huggingface_set(h, "normalization=LayerNorm");
    huggingface_set(h, "position-embedding-type=learned_absolute");
    huggingface_set(h, "activation=gelu");
    huggingface_set(h, "add-bias-linear=true");
    return NULL;
}

// Heads that are rotated in part only, whichever of the two places says so.
static const char *huggingface_check_partial_rotary(const json_t *object, const char *name, struct error_text *error) {
    double partial;
    CHECK(json_opt_number(object, "partial_rotary_factor", 0, 1, 1, &partial, name, error));
    return partial == 1 ? NULL
                        : error_format(error, "%s: partial_rotary_factor is %g, which is not supported; expected 1",
                                       name, partial);
}
// theta stands at the top (transformers 4) or in rope_parameters (5); scaled frequencies are another model.
static const char *huggingface_read_rope(struct huggingface_config *h, const json_t *root, const char *name,
                                         struct error_text *error) {
    json_t *rope, *value;
    const char *key;
    CHECK(json_opt_object(root, "rope_parameters", &rope, name, error));
    CHECK(huggingface_absent(root, "rope_scaling", name, error));
    CHECK(huggingface_check_partial_rotary(root, name, error));
    if (rope) {
        CHECK(huggingface_word(rope, "rope_type", "default", "default", name, error));
        CHECK(huggingface_word(rope, "type", "default", "default", name, error)); // its older name
        CHECK(huggingface_check_partial_rotary(rope, name, error));
    }
    json_object_foreach (rope, key, value)
        if (json_is_object(value))
            return error_format(error, "%s: rope_parameters has %s for layers of a kind, which is not supported", name,
                                json_show(key).text);
    return huggingface_number(h, rope && json_has(rope, "rope_theta") ? rope : root, "rope_theta", 1, 1e30, 10000,
                              "rotary-base", name, error);
}

// Layers of one kind each: full attention in all of them.
static const char *huggingface_check_layer_types(const json_t *root, const char *name, struct error_text *error) {
    json_t *types;
    CHECK(json_opt_array(root, "layer_types", &types, name, error));
    for (size_t i = 0; types && i < json_array_size(types); i++) {
        const char *type = "";
        CHECK(json_check_string(json_array_get(types, i), "layer_types", &type, name, error));
        if (strcmp(type, "full_attention") != 0)
            return error_format(error, "%s: layer_types has '%s', which is not supported; expected full_attention",
                                name, json_show(type).text);
    }
    return NULL;
}

static const char *huggingface_read_llama(struct huggingface_config *h, const json_t *root, const char *name,
                                          struct error_text *error) {
    int64_t heads, hidden, groups, head_dim;
    bool biases, mlp_bias;
    CHECK(huggingface_word(root, "hidden_act", "silu", "swish", name, error));
    CHECK(huggingface_flag(root, "use_sliding_window", false, name, error));
    CHECK(huggingface_check_layer_types(root, name, error));
    CHECK(huggingface_read_rope(h, root, name, error));
    CHECK(huggingface_size(h, root, "num_hidden_layers", "num-layers", name, error));
    CHECK(huggingface_size(h, root, "hidden_size", "hidden-size", name, error));
    CHECK(huggingface_size(h, root, "num_attention_heads", "num-attention-heads", name, error));
    CHECK(huggingface_size(h, root, "intermediate_size", "ffn-hidden-size", name, error));
    CHECK(huggingface_size(h, root, "max_position_embeddings", "max-position-embeddings", name, error));
    CHECK(json_get_int(root, "hidden_size", 1, HUGGINGFACE_LARGEST, &hidden, name, error));
    CHECK(json_get_int(root, "num_attention_heads", 1, HUGGINGFACE_LARGEST, &heads, name, error));
    CHECK(json_opt_int(root, "num_key_value_heads", 1, heads + 1, heads, &groups, name, error));
    CHECK(json_opt_int(root, "head_dim", 1, HUGGINGFACE_LARGEST, hidden / heads, &head_dim, name, error));
    CHECK(huggingface_number(h, root, "rms_norm_eps", 1e-12, 0.9, 1e-6, "norm-epsilon", name, error));
    if (heads % groups != 0)
        return error_format(error, "%s: num_key_value_heads is %lld, which does not divide the %lld heads", name,
                            (long long)groups, (long long)heads);
    const bool qwen2 = h->architecture == ARCHITECTURE_QWEN2; // whose biases are q's, k's and v's
    CHECK(json_opt_bool(root, "attention_bias", qwen2, &biases, name, error));
    CHECK(json_opt_bool(root, "mlp_bias", false, &mlp_bias, name, error));
    if (mlp_bias != (biases && !qwen2) || (qwen2 && !biases))
        return error_format(error, "%s: attention_bias is %s and mlp_bias %s, which is not supported; expected %s",
                            name, biases ? "true" : "false", mlp_bias ? "true" : "false",
                            qwen2 ? "true and false" : "both alike");
    CHECK(huggingface_set_heads(h, groups, head_dim, name, error));
    huggingface_set(h, "normalization=RMSNorm");
    huggingface_set(h, "position-embedding-type=rope");
    huggingface_set(h, "activation=swiglu");
    huggingface_set(h, "add-bias-linear=%s", mlp_bias ? "true" : "false");
    huggingface_set(h, "add-qkv-bias=%s", biases ? "true" : "false");
    return NULL;
}
static const char *huggingface_read_ours(struct huggingface_config *h, const json_t *root, const char *name,
                                         struct error_text *error) {
    const struct option_row *rows[CONFIG_ROWS];
    const int count = huggingface_own_options(rows);
    for (int i = 0; i < count; i++) {
        const char *option = rows[i]->name, *value = "";
        CHECK(json_get_string(root, option, &value, name, error));
        if (strlen(value) > 20)
            return error_format(error, "%s: %s is '%s'; expected an option's value", name, option,
                                json_show(value).text);
        huggingface_set(h, "%s=%s", option, value);
    }
    return NULL;
}

// Each is what its option takes: so it is the file that is named where it is not.
static const char *huggingface_check_settings(const struct huggingface_config *h, const char *name,
                                              struct error_text *error) {
    struct config config;
    char option[OPTION_NAME], expected[OPTION_TEXT];
    for (int i = 0; i < h->num_settings; i++) {
        const char *value = strchr(h->settings[i], '=') + 1;
        snprintf(option, sizeof option, "%.*s", (int)(value - 1 - h->settings[i]), h->settings[i]);
        const struct option_row *row = &config_rows[option_find(&config_options, option, false)];
        const char *problem = option_read(row, option_field(row, &config), value);
        if (!problem)
            continue;
        option_expected(row, expected);
        return error_format(error, "%s: %s would be '%s', which is %s; expected %s", name, row->name,
                            json_show(value).text, problem, expected);
    }
    return NULL;
}

static const char *huggingface_read_object(struct huggingface_config *h, const json_t *root, const char *name,
                                           struct error_text *error) {
    const char *type = "";
    bool tied = false;
    CHECK(json_get_string(root, "model_type", &type, name, error));
    int a = 0;
    while (a < ARCHITECTURE_COUNT && strcmp(type, architectures[a].model_type) != 0)
        a++;
    if (a == ARCHITECTURE_COUNT)
        return error_format(error, "%s: model_type is '%s', which is not supported; expected gpt2, llama or qwen2",
                            name, json_show(type).text);
    h->architecture = (enum architecture)a;
    CHECK(huggingface_absent(root, "quantization_config", name, error));
    CHECK(huggingface_size(h, root, "vocab_size", "vocab-size", name, error));
    CHECK(json_opt_bool(root, "tie_word_embeddings", a == ARCHITECTURE_GPT2, &tied, name, error));
    if (a == ARCHITECTURE_OURS)
        return huggingface_read_ours(h, root, name, error);
    huggingface_set(h, "untie-embeddings-and-output-weights=%s", tied ? "false" : "true");
    return a == ARCHITECTURE_GPT2 ? huggingface_read_gpt2(h, root, name, error)
                                  : huggingface_read_llama(h, root, name, error);
}

// Reads a config.json from memory. Returns what is wrong with it, or what of it is not supported; NULL: nothing.
static const char *huggingface_parse_config(struct huggingface_config *h, const unsigned char *data, uint64_t bytes,
                                            const char *name, struct error_text *error) {
    json_t *root;
    memset(h, 0, sizeof *h);
    CHECK(json_parse_object(&root, data, bytes, name, error));
    const char *problem = huggingface_read_object(h, root, name, error);
    json_decref(root);
    return problem ? problem : huggingface_check_settings(h, name, error);
}

// ---------------------------------------------------------------------------------------------------------------------
// llm.c's .bin checkpoints: a header of 256 int32, then the tensors of a GPT-2.

enum { LLMC_MODEL_HEADER = 1024 }; // bytes
struct llmc_header {
    int positions, vocab_size, layers, heads, channels, padded_vocab_size;
    bool bf16;
};

// Elements of all tensors: (Vp + T) C, then 12 C^2 + 13 C of each layer, then 2 C.
static double llmc_elements(const struct llmc_header *h) {
    const double C = h->channels;
    return ((double)h->padded_vocab_size + h->positions + 2) * C + h->layers * (12 * C * C + 13 * C);
}
// Parses the first `available` bytes of a file of `file_bytes`.
static const char *llmc_parse(struct llmc_header *h, const unsigned char *data, uint64_t available, uint64_t file_bytes,
                              const char *name, struct error_text *error) {
    int32_t words[8];
    memset(h, 0, sizeof *h);
    if (available < LLMC_MODEL_HEADER)
        return error_format(error, "%s: is %llu bytes long; expected an llm.c checkpoint, whose header has %d", name,
                            (unsigned long long)file_bytes, LLMC_MODEL_HEADER);
    memcpy(words, data, sizeof words);
    if (words[0] != 20240326 || (words[1] != 3 && words[1] != 5))
        return error_format(error,
                            "%s: begins with %d and version %d; expected an llm.c checkpoint, 20240326 and version 3 "
                            "(fp32) or 5 (bf16)",
                            name, (int)words[0], (int)words[1]);
    for (int i = 2; i < 8; i++)
        if (words[i] < 1 || words[i] >= HUGGINGFACE_LARGEST)
            return error_format(error, "%s: header word %d is %d; expected 1 to %d", name, i, (int)words[i],
                                HUGGINGFACE_LARGEST - 1);
    h->positions = words[2], h->vocab_size = words[3], h->layers = words[4];
    h->heads = words[5], h->channels = words[6], h->padded_vocab_size = words[7];
    h->bf16 = words[1] == 5;
    if (h->padded_vocab_size < h->vocab_size || h->channels % h->heads != 0 || h->channels / h->heads % 8 != 0)
        return error_format(error,
                            "%s: has a vocabulary of %d padded to %d, %d heads and width %d; expected as many or more, "
                            "and heads of a size that is a multiple of 8",
                            name, h->vocab_size, h->padded_vocab_size, h->heads, h->channels);
    const double expected = LLMC_MODEL_HEADER + llmc_elements(h) * (h->bf16 ? 2 : 4);
    if (expected >= 0x1p53 || (double)file_bytes != expected)
        return error_format(error, "%s: is %llu bytes long; expected %.0f by its header; it was cut off: copy it again",
                            name, (unsigned long long)file_bytes, expected);
    return NULL;
}
static void llmc_settings(struct huggingface_config *h, const struct llmc_header *header) {
    memset(h, 0, sizeof *h);
    h->architecture = ARCHITECTURE_GPT2;
    huggingface_set(h, "vocab-size=%d", header->vocab_size);
    huggingface_set(h, "num-layers=%d", header->layers);
    huggingface_set(h, "hidden-size=%d", header->channels);
    huggingface_set(h, "num-attention-heads=%d", header->heads);
    huggingface_set(h, "num-query-groups=%d", header->heads);
    huggingface_set(h, "kv-channels=%d", header->channels / header->heads);
    huggingface_set(h, "max-position-embeddings=%d", header->positions);
    huggingface_set(h, "ffn-hidden-size=%d", 4 * header->channels);
    huggingface_set(h, "norm-epsilon=1e-5");
    huggingface_set(h, "untie-embeddings-and-output-weights=false");
    huggingface_set(h, "normalization=LayerNorm");
    huggingface_set(h, "position-embedding-type=learned_absolute");
    huggingface_set(h, "activation=gelu");
    huggingface_set(h, "add-bias-linear=true");
}

// ---------------------------------------------------------------------------------------------------------------------
// Tensors

// One tensor of model.safetensors.
struct huggingface_tensor {
    char name[96];
    const struct tensor *ours;             // whose rows it holds; NULL: zeros
    int rows, cols;                        // its shape; cols 0: a vector of `rows`
    int first_row;                         // of ours
    bool transposed;                       // GPT-2's Conv1D: (in, out), while ours is (out, in)
    int repeat, q_rows, kv_rows, head_dim; // repeat > 1: its out-rows are q, k, v with each KV head repeated
};

struct huggingface_tensors {
    struct huggingface_tensor *list;
    int count;
};

// The row of ours that out-row `row` of the tensor is.
static int huggingface_row(const struct huggingface_tensor *t, int row) {
    if (t->repeat <= 1 || row < t->q_rows)
        return t->first_row + row;
    const int repeated = t->kv_rows * t->repeat, part = (row - t->q_rows) / repeated, at = (row - t->q_rows) % repeated;
    const int head = at / t->head_dim / t->repeat;
    return t->q_rows + part * t->kv_rows + head * t->head_dim + at % t->head_dim;
}

// What the list is made of while it is built.
struct huggingface_builder {
    struct huggingface_tensors *tensors;
    const struct parameters *table;
    const struct model_shape *shape;
};

static struct huggingface_tensor *huggingface_add(struct huggingface_builder *b, int layer, enum parameter id,
                                                  int first_row, int rows, const char *prefix, const char *name) {
    struct huggingface_tensor *t = &b->tensors->list[b->tensors->count++];
    memset(t, 0, sizeof *t);
    if (layer >= 0)
        snprintf(t->name, sizeof t->name, "%s%d.%s", prefix, layer, name);
    else
        snprintf(t->name, sizeof t->name, "%s%s", prefix, name);
    t->ours = parameters_find(b->table, layer, id);
    t->first_row = first_row;
    t->rows = rows;
    t->cols = t->ours && t->ours->cols > 1 ? t->ours->cols : 0;
    t->repeat = 1;
    return t;
}
// GPT-2's weight (in, out) and bias (out).
static void huggingface_add_conv1d(struct huggingface_builder *b, int layer, enum parameter weight, enum parameter bias,
                                   int out, int in, const char *name) {
    char text[64];
    const struct layer_shape *s = &b->shape->layer;
    snprintf(text, sizeof text, "%s.weight", name);
    struct huggingface_tensor *w = huggingface_add(b, layer, weight, 0, in, "transformer.h.", text);
    w->cols = out;
    w->transposed = true;
    snprintf(text, sizeof text, "%s.bias", name);
    struct huggingface_tensor *v = huggingface_add(b, layer, bias, 0, out, "transformer.h.", text);
    if (weight == PARAM_QKV_W && s->G < s->H)
        for (int i = 0; i < 2; i++) {
            struct huggingface_tensor *t = i ? v : w;
            t->repeat = s->H / s->G;
            t->q_rows = s->H * s->D;
            t->kv_rows = s->G * s->D;
            t->head_dim = s->D;
        }
}
static void huggingface_list_gpt2(struct huggingface_builder *b) {
    static const char prefix[] = "transformer.h.";
    const struct layer_shape *s = &b->shape->layer;
    huggingface_add(b, -1, PARAM_WTE, 0, b->shape->V, "", "transformer.wte.weight");
    huggingface_add(b, -1, PARAM_WPE, 0, b->shape->P, "", "transformer.wpe.weight");
    for (int l = 0; l < b->shape->L; l++) {
        huggingface_add(b, l, PARAM_LN1_W, 0, s->C, prefix, "ln_1.weight");
        huggingface_add(b, l, PARAM_LN1_B, 0, s->C, prefix, "ln_1.bias");
        huggingface_add_conv1d(b, l, PARAM_QKV_W, PARAM_QKV_B, 3 * s->H * s->D, s->C, "attn.c_attn");
        huggingface_add_conv1d(b, l, PARAM_ATTPROJ_W, PARAM_ATTPROJ_B, s->C, s->H * s->D, "attn.c_proj");
        huggingface_add(b, l, PARAM_LN2_W, 0, s->C, prefix, "ln_2.weight");
        huggingface_add(b, l, PARAM_LN2_B, 0, s->C, prefix, "ln_2.bias");
        huggingface_add_conv1d(b, l, PARAM_FC_W, PARAM_FC_B, s->F, s->C, "mlp.c_fc");
        huggingface_add_conv1d(b, l, PARAM_FCPROJ_W, PARAM_FCPROJ_B, s->C, s->F, "mlp.c_proj");
    }
    huggingface_add(b, -1, PARAM_LNF_W, 0, s->C, "", "transformer.ln_f.weight");
    huggingface_add(b, -1, PARAM_LNF_B, 0, s->C, "", "transformer.ln_f.bias");
}
// A linear layer's weight (out, in) and, where the model has one, its bias (out): rows [first, first + out) of ours.
static void huggingface_add_linear(struct huggingface_builder *b, int layer, enum parameter weight, enum parameter bias,
                                   int first, int out, const char *name) {
    char text[64];
    snprintf(text, sizeof text, "%s.weight", name);
    huggingface_add(b, layer, weight, first, out, "model.layers.", text);
    snprintf(text, sizeof text, "%s.bias", name);
    if (parameters_find(b->table, layer, bias))
        huggingface_add(b, layer, bias, first, out, "model.layers.", text);
}
static void huggingface_list_llama(struct huggingface_builder *b) {
    const struct layer_shape *s = &b->shape->layer;
    const int q = s->H * s->D, kv = s->G * s->D;
    huggingface_add(b, -1, PARAM_WTE, 0, b->shape->V, "", "model.embed_tokens.weight");
    for (int l = 0; l < b->shape->L; l++) {
        huggingface_add(b, l, PARAM_LN1_W, 0, s->C, "model.layers.", "input_layernorm.weight");
        huggingface_add_linear(b, l, PARAM_QKV_W, PARAM_QKV_B, 0, q, "self_attn.q_proj");
        huggingface_add_linear(b, l, PARAM_QKV_W, PARAM_QKV_B, q, kv, "self_attn.k_proj");
        huggingface_add_linear(b, l, PARAM_QKV_W, PARAM_QKV_B, q + kv, kv, "self_attn.v_proj");
        huggingface_add_linear(b, l, PARAM_ATTPROJ_W, PARAM_ATTPROJ_B, 0, s->C, "self_attn.o_proj");
        huggingface_add(b, l, PARAM_LN2_W, 0, s->C, "model.layers.", "post_attention_layernorm.weight");
        huggingface_add_linear(b, l, PARAM_FC_W, PARAM_FC_B, 0, s->F, "mlp.gate_proj");
        huggingface_add_linear(b, l, PARAM_FC_W, PARAM_FC_B, s->F, s->F, "mlp.up_proj");
        huggingface_add_linear(b, l, PARAM_FCPROJ_W, PARAM_FCPROJ_B, 0, s->C, "mlp.down_proj");
    }
    huggingface_add(b, -1, PARAM_LNF_W, 0, s->C, "", "model.norm.weight");
}
// Our own tensors as they are, without the padding of the vocabulary.
static void huggingface_list_ours(struct huggingface_builder *b) {
    for (int i = 0; i < b->table->num_tensors; i++) {
        const struct tensor *t = &b->table->tensors[i];
        huggingface_add(b, t->layer, t->parameter, 0, t->visible_rows, "", t->name);
        snprintf(b->tensors->list[i].name, sizeof b->tensors->list[i].name, "%s", t->name);
    }
}

// All tensors of the model's folder, in the order in which they are written.
static struct huggingface_tensors huggingface_tensors_of(const struct parameters *table,
                                                         const struct model_shape *shape, enum architecture a) {
    struct huggingface_tensors tensors;
    struct huggingface_builder b = {&tensors, table, shape};
    tensors.count = 0;
    tensors.list =
        (struct huggingface_tensor *)calloc((size_t)(shape->L + 1) * (PARAM_COUNT + 4), sizeof *tensors.list);
    if (!tensors.list)
        fail("out of memory for the table of parameters");
    if (a == ARCHITECTURE_OURS)
        huggingface_list_ours(&b);
    else if (a == ARCHITECTURE_GPT2)
        huggingface_list_gpt2(&b);
    else
        huggingface_list_llama(&b);
    if (!shape->tied && a != ARCHITECTURE_OURS)
        huggingface_add(&b, -1, PARAM_LM_HEAD, 0, shape->V, "", "lm_head.weight");
    return tensors;
}
static void huggingface_tensors_free(struct huggingface_tensors *tensors) {
    free(tensors->list);
    memset(tensors, 0, sizeof *tensors);
}

static int64_t huggingface_count(const struct huggingface_tensor *t) {
    return (int64_t)t->rows * (t->cols ? t->cols : 1);
}

// out: elements of rows [first, first + n) of the tensor, from the values of ours (all of its rows).
static void huggingface_gather(float *out, const struct huggingface_tensor *t, const float *ours, int first, int n) {
    const int cols = t->cols ? t->cols : 1;
    if (!t->ours) {
        memset(out, 0, (size_t)n * (size_t)cols * sizeof *out);
        return;
    }
    const int64_t width = t->ours->cols;
#pragma omp parallel for
    for (int r = first; r < first + n; r++) {
        float *row = out + (int64_t)(r - first) * cols;
        if (!t->transposed)
            memcpy(row, ours + huggingface_row(t, r) * width, (size_t)cols * sizeof *row);
        else
            for (int c = 0; c < cols; c++)
                row[c] = ours[huggingface_row(t, c) * width + r];
    }
}
// The other way: puts rows [first, first + n) of the tensor where they belong in ours. Repeated heads are equal.
static void huggingface_scatter(float *ours, const struct huggingface_tensor *t, const float *in, int first, int n) {
    const int cols = t->cols ? t->cols : 1;
    const int64_t width = t->ours->cols;
    for (int r = first; r < first + n; r++) {
        const float *row = in + (int64_t)(r - first) * cols;
        if (!t->transposed)
            memcpy(ours + huggingface_row(t, r) * width, row, (size_t)cols * sizeof *row);
        else
            for (int c = 0; c < cols; c++)
                ours[huggingface_row(t, c) * width + r] = row[c];
    }
}
