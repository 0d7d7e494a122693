#include "formats/huggingface.h"

#include <stdarg.h> // va_list
#include <string.h> // strcmp, memset

#include "config.h"                  // struct config
#include "runtime/machine/error.h"   // fail
#include "runtime/text/json.h"       // config.json as written
#include "runtime/text/json_parse.h" // config.json as read

// ---------------------------------------------------------------------------------------------------------------------
// Architectures

const char *architecture_class(enum architecture a) {
    switch (a) {
#define CASE_ROW(id, model_type, class_name)                                                                           \
    case ARCHITECTURE_##id: return class_name;
        ARCHITECTURE_ROWS(CASE_ROW)
#undef CASE_ROW
    }
    __builtin_unreachable();
}
static const char *architecture_model_type(enum architecture a) {
    switch (a) {
#define CASE_ROW(id, model_type, class_name)                                                                           \
    case ARCHITECTURE_##id: return model_type;
        ARCHITECTURE_ROWS(CASE_ROW)
#undef CASE_ROW
    }
    __builtin_unreachable();
}
// *a = the architecture of a model_type; false: unknown.
static bool architecture_find(enum architecture *a, const char *type) {
#define FIND_ROW(id, model_type, class_name)                                                                           \
    if (strcmp(type, model_type) == 0) {                                                                               \
        *a = ARCHITECTURE_##id;                                                                                        \
        return true;                                                                                                   \
    }
    ARCHITECTURE_ROWS(FIND_ROW)
#undef FIND_ROW
    return false;
}

enum architecture architecture_of(const struct config *c) {
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

static const char *huggingface_note_gpt2(const struct config *c) {
    if (c->num_query_groups < c->num_attention_heads)
        return c->add_bias_linear
                   ? "GPT2LMHeadModel, with each KV head repeated for its queries, since it has no groups"
                   : "GPT2LMHeadModel, with each KV head repeated for its queries and zeros as biases";
    return c->add_bias_linear ? "" : "GPT2LMHeadModel, with zeros as biases, which it always has";
}
const char *huggingface_note(const struct config *c) {
    switch (architecture_of(c)) {
    case ARCHITECTURE_OURS:
        return "of a kind that Hugging Face has no model for: written under our own names, for this program alone";
    case ARCHITECTURE_GPT2: return huggingface_note_gpt2(c);
    case ARCHITECTURE_LLAMA:
    case ARCHITECTURE_QWEN2: return "";
    }
    __builtin_unreachable();
}

// ---------------------------------------------------------------------------------------------------------------------
// config.json as written

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
// rope_theta is for readers before transformers 5, rope_parameters for later ones.
static void huggingface_write_llama(struct json *json, const struct config *c) {
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
}
int huggingface_own_options(const struct option_row **rows) {
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

void huggingface_write_config(FILE *out, const struct config *c, int end_of_text, bool bf16) {
    const enum architecture a = architecture_of(c);
    struct json json = json_writer(out, true);
    json_object_begin(&json, NULL);
    json_array_begin(&json, "architectures");
    json_str(&json, NULL, architecture_class(a));
    json_array_end(&json);
    json_str(&json, "model_type", architecture_model_type(a));
    json_int(&json, "vocab_size", c->vocab_size);
    json_bool(&json, "tie_word_embeddings", !c->untie_embeddings_and_output_weights);
    switch (a) {
    case ARCHITECTURE_OURS: huggingface_write_ours(&json, c); break;
    case ARCHITECTURE_GPT2: huggingface_write_gpt2(&json, c); break;
    case ARCHITECTURE_LLAMA:
        huggingface_write_llama(&json, c);
        json_bool(&json, "attention_bias", c->add_bias_linear);
        json_bool(&json, "mlp_bias", c->add_bias_linear);
        break;
    case ARCHITECTURE_QWEN2:
        huggingface_write_llama(&json, c);
        json_bool(&json, "use_sliding_window", false);
        break;
    }
    json_decimal(&json, "initializer_range", c->init_method_std);
    // Without these members readers would take GPT-2's or Llama's own tokens.
    static const char *const ends[] = {"bos_token_id", "eos_token_id"};
    for (int i = 0; i < 2; i++)
        if (end_of_text >= 0 && end_of_text < c->vocab_size)
            json_int(&json, ends[i], end_of_text);
        else
            json_none(&json, ends[i]);
    json_str(&json, "torch_dtype", bf16 ? "bfloat16" : "float32");
    json_object_end(&json);
}

// ---------------------------------------------------------------------------------------------------------------------
// config.json as read

void huggingface_set(struct huggingface_config *h, const char *format, ...) {
    va_list arguments;
    if (h->num_settings == (int)(sizeof h->settings / sizeof *h->settings))
        fail("a model's file sets more options than struct huggingface_config has room for");
    va_start(arguments, format);
    vsnprintf(h->settings[h->num_settings++], sizeof h->settings[0], format, arguments);
    va_end(arguments);
}
void huggingface_set_gpt2(struct huggingface_config *h) {
    huggingface_set(h, "normalization=LayerNorm");
    huggingface_set(h, "position-embedding-type=learned_absolute");
    huggingface_set(h, "activation=gelu");
    huggingface_set(h, "add-bias-linear=true");
}

// Refuses a member that is present and neither of the two words.
static const char *huggingface_word(const json_t *root, const char *key, const char *wanted, const char *also,
                                    const char *name, struct error_text *error) {
    const char *value = wanted;
    const char *problem = json_opt_string(root, key, wanted, &value, name, error);
    if (!problem && strcmp(value, wanted) != 0 && strcmp(value, also) != 0)
        problem = error_format(error, "%s: %s is '%s', which is not supported; expected %s", name, key,
                               json_show(value).text, wanted);
    return problem;
}
// Refuses a flag that is present and not as wanted.
static const char *huggingface_flag(const json_t *root, const char *key, bool wanted, const char *name,
                                    struct error_text *error) {
    bool value;
    const char *problem = json_opt_bool(root, key, wanted, &value, name, error);
    if (!problem && value != wanted)
        problem = error_format(error, "%s: %s is %s, which is not supported", name, key, value ? "true" : "false");
    return problem;
}
// Refuses a member that is present and not null.
static const char *huggingface_absent(const json_t *root, const char *key, const char *name, struct error_text *error) {
    return json_has(root, key) ? error_format(error, "%s: %s is set, which is not supported", name, key) : NULL;
}

// Sets an option from a member that must be a size.
static const char *huggingface_size(struct huggingface_config *h, const json_t *root, const char *key,
                                    const char *option, const char *name, struct error_text *error) {
    int64_t value;
    RETURN_PROBLEM(json_get_int(root, key, 1, HUGGINGFACE_LARGEST, &value, name, error));
    huggingface_set(h, "%s=%lld", option, (long long)value);
    return NULL;
}
// Sets an option from a member that is a number, or absent.
static const char *huggingface_number(struct huggingface_config *h, const json_t *root, const char *key, double least,
                                      double most, double fallback, const char *option, const char *name,
                                      struct error_text *error) {
    double value;
    RETURN_PROBLEM(json_opt_number(root, key, least, most, fallback, &value, name, error));
    huggingface_set(h, "%s=%.9g", option, value);
    return NULL;
}

// Sets the options of the heads. Head sizes that no kernel takes are refused here, where the message can name the file.
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
    RETURN_PROBLEM(huggingface_word(root, "activation_function", "gelu_new", "gelu_pytorch_tanh", name, error));
    RETURN_PROBLEM(huggingface_flag(root, "scale_attn_weights", true, name, error));
    RETURN_PROBLEM(huggingface_flag(root, "scale_attn_by_inverse_layer_idx", false, name, error));
    RETURN_PROBLEM(huggingface_flag(root, "add_cross_attention", false, name, error));
    RETURN_PROBLEM(huggingface_size(h, root, "n_layer", "num-layers", name, error));
    RETURN_PROBLEM(huggingface_size(h, root, "n_embd", "hidden-size", name, error));
    RETURN_PROBLEM(huggingface_size(h, root, "n_head", "num-attention-heads", name, error));
    RETURN_PROBLEM(huggingface_size(h, root, "n_positions", "max-position-embeddings", name, error));
    RETURN_PROBLEM(json_get_int(root, "n_embd", 1, HUGGINGFACE_LARGEST, &hidden, name, error));
    RETURN_PROBLEM(json_get_int(root, "n_head", 1, HUGGINGFACE_LARGEST, &heads, name, error));
    if (hidden % heads != 0)
        return error_format(error, "%s: n_head is %lld, which does not divide n_embd, %lld", name, (long long)heads,
                            (long long)hidden);
    RETURN_PROBLEM(huggingface_set_heads(h, heads, hidden / heads, name, error));
    RETURN_PROBLEM(json_opt_int(root, "n_inner", 1, HUGGINGFACE_LARGEST, 4 * hidden, &inner, name, error));
    RETURN_PROBLEM(huggingface_number(h, root, "layer_norm_epsilon", 1e-12, 0.9, 1e-5, "norm-epsilon", name, error));
    huggingface_set(h, "ffn-hidden-size=%lld", (long long)inner);
    huggingface_set_gpt2(h);
    return NULL;
}

// Refuses rotary positions on a part of each head, which config.json or its rope_parameters may ask for.
static const char *huggingface_check_partial_rotary(const json_t *object, const char *name, struct error_text *error) {
    double partial;
    RETURN_PROBLEM(json_opt_number(object, "partial_rotary_factor", 0, 1, 1, &partial, name, error));
    return partial == 1 ? NULL
                        : error_format(error, "%s: partial_rotary_factor is %g, which is not supported; expected 1",
                                       name, partial);
}
// Reads rope_theta, which is at the top (transformers 4) or in rope_parameters (5). Scaled frequencies are refused.
static const char *huggingface_read_rope(struct huggingface_config *h, const json_t *root, const char *name,
                                         struct error_text *error) {
    json_t *rope, *value;
    const char *key;
    RETURN_PROBLEM(json_opt_object(root, "rope_parameters", &rope, name, error));
    RETURN_PROBLEM(huggingface_absent(root, "rope_scaling", name, error));
    RETURN_PROBLEM(huggingface_check_partial_rotary(root, name, error));
    if (rope) {
        RETURN_PROBLEM(huggingface_word(rope, "rope_type", "default", "default", name, error));
        RETURN_PROBLEM(huggingface_word(rope, "type", "default", "default", name, error)); // an older name of rope_type
        RETURN_PROBLEM(huggingface_check_partial_rotary(rope, name, error));
    }
    json_object_foreach (rope, key, value)
        if (json_is_object(value))
            return error_format(error, "%s: rope_parameters has %s for layers of a kind, which is not supported", name,
                                json_show(key).text);
    return huggingface_number(h, rope && json_has(rope, "rope_theta") ? rope : root, "rope_theta", 1, 1e30, 10000,
                              "rotary-base", name, error);
}

// Refuses layers with another attention than full_attention.
static const char *huggingface_check_layer_types(const json_t *root, const char *name, struct error_text *error) {
    json_t *types;
    RETURN_PROBLEM(json_opt_array(root, "layer_types", &types, name, error));
    for (size_t i = 0; types && i < json_array_size(types); i++) {
        const char *type = "";
        RETURN_PROBLEM(json_check_string(json_array_get(types, i), "layer_types", &type, name, error));
        if (strcmp(type, "full_attention") != 0)
            return error_format(error, "%s: layer_types has '%s', which is not supported; expected full_attention",
                                name, json_show(type).text);
    }
    return NULL;
}

// Reads Llama's config or, with `qwen2`, Qwen2's, which always has biases of q, k and v and no others; Llama has biases
// in every linear layer or in none.
static const char *huggingface_read_llama(struct huggingface_config *h, const json_t *root, bool qwen2,
                                          const char *name, struct error_text *error) {
    int64_t heads, hidden, groups, head_dim;
    bool biases, mlp_bias;
    RETURN_PROBLEM(huggingface_word(root, "hidden_act", "silu", "swish", name, error));
    RETURN_PROBLEM(huggingface_flag(root, "use_sliding_window", false, name, error));
    RETURN_PROBLEM(huggingface_check_layer_types(root, name, error));
    RETURN_PROBLEM(huggingface_read_rope(h, root, name, error));
    RETURN_PROBLEM(huggingface_size(h, root, "num_hidden_layers", "num-layers", name, error));
    RETURN_PROBLEM(huggingface_size(h, root, "hidden_size", "hidden-size", name, error));
    RETURN_PROBLEM(huggingface_size(h, root, "num_attention_heads", "num-attention-heads", name, error));
    RETURN_PROBLEM(huggingface_size(h, root, "intermediate_size", "ffn-hidden-size", name, error));
    RETURN_PROBLEM(huggingface_size(h, root, "max_position_embeddings", "max-position-embeddings", name, error));
    RETURN_PROBLEM(json_get_int(root, "hidden_size", 1, HUGGINGFACE_LARGEST, &hidden, name, error));
    RETURN_PROBLEM(json_get_int(root, "num_attention_heads", 1, HUGGINGFACE_LARGEST, &heads, name, error));
    RETURN_PROBLEM(json_opt_int(root, "num_key_value_heads", 1, heads + 1, heads, &groups, name, error));
    RETURN_PROBLEM(json_opt_int(root, "head_dim", 1, HUGGINGFACE_LARGEST, hidden / heads, &head_dim, name, error));
    RETURN_PROBLEM(huggingface_number(h, root, "rms_norm_eps", 1e-12, 0.9, 1e-6, "norm-epsilon", name, error));
    if (heads % groups != 0)
        return error_format(error, "%s: num_key_value_heads is %lld, which does not divide the %lld heads", name,
                            (long long)groups, (long long)heads);
    RETURN_PROBLEM(json_opt_bool(root, "attention_bias", qwen2, &biases, name, error));
    RETURN_PROBLEM(json_opt_bool(root, "mlp_bias", false, &mlp_bias, name, error));
    if (mlp_bias != (biases && !qwen2) || (qwen2 && !biases))
        return error_format(error, "%s: attention_bias is %s and mlp_bias %s, which is not supported; expected %s",
                            name, biases ? "true" : "false", mlp_bias ? "true" : "false",
                            qwen2 ? "true and false" : "both alike");
    RETURN_PROBLEM(huggingface_set_heads(h, groups, head_dim, name, error));
    huggingface_set(h, "normalization=RMSNorm");
    huggingface_set(h, "position-embedding-type=rope");
    huggingface_set(h, "activation=swiglu");
    huggingface_set(h, "add-bias-linear=%s", mlp_bias ? "true" : "false");
    huggingface_set(h, "add-qkv-bias=%s", biases ? "true" : "false");
    return NULL;
}
static const char *huggingface_read_ours(struct huggingface_config *h, const json_t *root, const char *name,
                                         struct error_text *error) {
    bool tied; // the member is only checked: the model's value is in an option
    RETURN_PROBLEM(json_opt_bool(root, "tie_word_embeddings", false, &tied, name, error));
    const struct option_row *rows[CONFIG_ROWS];
    const int count = huggingface_own_options(rows);
    for (int i = 0; i < count; i++) {
        const char *option = rows[i]->name, *value = "";
        RETURN_PROBLEM(json_get_string(root, option, &value, name, error));
        if (strlen(value) > 20)
            return error_format(error, "%s: %s is '%s'; expected an option's value", name, option,
                                json_show(value).text);
        huggingface_set(h, "%s=%s", option, value);
    }
    return NULL;
}

const char *huggingface_check_settings(const struct huggingface_config *h, const char *name, struct error_text *error) {
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

// Sets whether the head is tied. usual: the architecture's value where tie_word_embeddings is absent.
static const char *huggingface_set_tied(struct huggingface_config *h, const json_t *root, bool usual, const char *name,
                                        struct error_text *error) {
    bool tied;
    RETURN_PROBLEM(json_opt_bool(root, "tie_word_embeddings", usual, &tied, name, error));
    huggingface_set(h, "untie-embeddings-and-output-weights=%s", tied ? "false" : "true");
    return NULL;
}
static const char *huggingface_read_object(struct huggingface_config *h, const json_t *root, const char *name,
                                           struct error_text *error) {
    const char *type = "";
    RETURN_PROBLEM(json_get_string(root, "model_type", &type, name, error));
    if (!architecture_find(&h->architecture, type))
        return error_format(error, "%s: model_type is '%s', which is not supported; expected gpt2, llama or qwen2",
                            name, json_show(type).text);
    RETURN_PROBLEM(huggingface_absent(root, "quantization_config", name, error));
    RETURN_PROBLEM(huggingface_size(h, root, "vocab_size", "vocab-size", name, error));
    switch (h->architecture) {
    case ARCHITECTURE_OURS: return huggingface_read_ours(h, root, name, error);
    case ARCHITECTURE_GPT2:
        RETURN_PROBLEM(huggingface_set_tied(h, root, true, name, error));
        return huggingface_read_gpt2(h, root, name, error);
    case ARCHITECTURE_LLAMA:
        RETURN_PROBLEM(huggingface_set_tied(h, root, false, name, error));
        return huggingface_read_llama(h, root, false, name, error);
    case ARCHITECTURE_QWEN2:
        RETURN_PROBLEM(huggingface_set_tied(h, root, false, name, error));
        return huggingface_read_llama(h, root, true, name, error);
    }
    __builtin_unreachable();
}

const char *huggingface_parse_config(struct huggingface_config *h, const unsigned char *data, uint64_t bytes,
                                     const char *name, struct error_text *error) {
    json_t *root;
    memset(h, 0, sizeof *h);
    RETURN_PROBLEM(json_parse_object(&root, data, bytes, name, error));
    const char *problem = huggingface_read_object(h, root, name, error);
    json_decref(root);
    return problem ? problem : huggingface_check_settings(h, name, error);
}
