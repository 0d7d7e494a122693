// Reads the members of config.json: sizes, norms, biases, windows, factors. huggingface_rope.c reads rotary settings. A
// member that is absent or null has the class's default (architecture_traits), but a null window or cap means none.
#include <math.h>   // sqrt
#include <stdlib.h> // calloc, free
#include <string.h> // strcmp

#include "formats/huggingface_traits.h"
#include "runtime/machine/error.h" // fail

enum { MAX_LAYERS = 1 << 16, MAX_WINDOW = 1 << 24 };

// Returns an error if the flag `key` is present and isn't `wanted`, else NULL. name: the file's, for messages.
static const char *check_flag(const json_t *root, const char *key, bool wanted, const char *name,
                              struct error_text *error) {
    bool value;
    const char *problem = json_opt_bool(root, key, wanted, &value, name, error);
    if (!problem && value != wanted)
        problem = error_format(error, "%s: %s is %s, which is not supported", name, key, value ? "true" : "false");
    return problem;
}
// Refuses a member that is present and not null.
static const char *check_absent(const json_t *root, const char *key, const char *name, struct error_text *error) {
    return json_has(root, key) ? error_format(error, "%s: %s is set, which is not supported", name, key) : NULL;
}
// Whether the member `key` is there and is null; false where the member is absent.
static bool is_null(const json_t *root, const char *key) { return json_is_null(json_object_get(root, key)); }

// Sets an option, and *value, from the member `key`. It must be there, from 1 to HUGGINGFACE_LARGEST - 1.
static const char *read_size(struct huggingface_config *h, const json_t *root, const char *key, const char *option,
                             int64_t *value, const char *name, struct error_text *error) {
    RETURN_PROBLEM(json_get_int(root, key, 1, HUGGINGFACE_LARGEST, value, name, error));
    huggingface_add_setting(h, "%s=%lld", option, (long long)*value);
    return NULL;
}
// Sets an option from the member `key`, a number from `least` to `most`, by default `fallback`.
static const char *read_number(struct huggingface_config *h, const json_t *root, const char *key, double least,
                               double most, double fallback, const char *option, const char *name,
                               struct error_text *error) {
    double value;
    RETURN_PROBLEM(json_opt_number(root, key, least, most, fallback, &value, name, error));
    huggingface_add_setting(h, "%s=%s", option, huggingface_show(value).text);
    return NULL;
}

// Sets the number of KV heads and the head size. Refuses a size that is no multiple of 8, in a message with the file.
static const char *set_heads(struct huggingface_config *h, int64_t groups, int64_t head_dim, const char *name,
                             struct error_text *error) {
    if (head_dim % 8 != 0)
        return error_format(error, "%s: has heads of size %lld, which is not supported; expected a multiple of 8", name,
                            (long long)head_dim);
    huggingface_add_setting(h, "num-query-groups=%lld", (long long)groups);
    huggingface_add_setting(h, "kv-channels=%lld", (long long)head_dim);
    return NULL;
}

static const struct {
    const char *word;
    bool gated; // in a class whose MLP has a gate
    const char *activation;
} activation_words[] = {
    {"silu", true, "swiglu"},
    {"swish", true, "swiglu"},
    {"gelu_pytorch_tanh", true, "geglu"},
    {"gelu_new", true, "geglu"},
    {"gelu_fast", true, "geglu"},
    {"gelu", false, "gelu_erf"},
    {"gelu_new", false, "gelu"},
    {"gelu_pytorch_tanh", false, "gelu"},
    {"gelu_fast", false, "gelu"},
    {"relu2", false, "squared_relu"},
};
// Sets the activation from the member `key`, a word of transformers. usual: the word where the member is absent. gated:
// whether the class's MLP has a gate, which gives a word another meaning.
static const char *set_activation(struct huggingface_config *h, const json_t *root, const char *key, const char *usual,
                                  bool gated, const char *name, struct error_text *error) {
    const char *word;
    RETURN_PROBLEM(json_opt_string(root, key, usual, &word, name, error));
    for (size_t i = 0; i < sizeof activation_words / sizeof *activation_words; i++)
        if (activation_words[i].gated == gated && strcmp(activation_words[i].word, word) == 0) {
            huggingface_add_setting(h, "activation=%s", activation_words[i].activation);
            return NULL;
        }
    return error_format(error, "%s: %s is '%s', which is not supported; expected %s", name, key, json_show(word).text,
                        gated ? "silu or gelu_pytorch_tanh" : "gelu_new, gelu or relu2");
}

// Sets all shape options of a GPT-2, defaults too, except its vocabulary and whether it ties its embeddings.
static const char *read_gpt2(struct huggingface_config *h, const json_t *root, const char *name,
                             struct error_text *error) {
    int64_t hidden, heads, inner, ignored;
    RETURN_PROBLEM(set_activation(h, root, "activation_function", "gelu_new", false, name, error));
    RETURN_PROBLEM(check_flag(root, "scale_attn_weights", true, name, error));
    RETURN_PROBLEM(check_flag(root, "scale_attn_by_inverse_layer_idx", false, name, error));
    RETURN_PROBLEM(check_flag(root, "add_cross_attention", false, name, error));
    RETURN_PROBLEM(read_size(h, root, "n_layer", "num-layers", &ignored, name, error));
    RETURN_PROBLEM(read_size(h, root, "n_embd", "hidden-size", &hidden, name, error));
    RETURN_PROBLEM(read_size(h, root, "n_head", "num-attention-heads", &heads, name, error));
    RETURN_PROBLEM(read_size(h, root, "n_positions", "max-position-embeddings", &ignored, name, error));
    if (hidden % heads != 0)
        return error_format(error, "%s: n_head is %lld, which does not divide n_embd, %lld", name, (long long)heads,
                            (long long)hidden);
    RETURN_PROBLEM(set_heads(h, heads, hidden / heads, name, error));
    RETURN_PROBLEM(json_opt_int(root, "n_inner", 1, HUGGINGFACE_LARGEST, 4 * hidden, &inner, name, error));
    RETURN_PROBLEM(read_number(h, root, "layer_norm_epsilon", 1e-12, 0.9, 1e-5, "norm-epsilon", name, error));
    huggingface_add_setting(h, "ffn-hidden-size=%lld", (long long)inner);
    huggingface_complete_gpt2(h);
    return NULL;
}

// marks (layers) = which layers have a window where the file has no layer_types. Gemma 3's files may set the period.
static const char *usual_windows(bool *marks, int64_t layers, const json_t *root, const struct architecture_traits *t,
                                 enum architecture a, const char *name, struct error_text *error) {
    int64_t full_each = t->full_each;
    if (a == ARCHITECTURE_GEMMA3) {
        RETURN_PROBLEM(
            json_opt_int(root, "_sliding_window_pattern", 1, MAX_LAYERS, full_each, &full_each, name, error));
        RETURN_PROBLEM(json_opt_int(root, "sliding_window_pattern", 1, MAX_LAYERS, full_each, &full_each, name, error));
    }
    const int64_t first = a == ARCHITECTURE_CWM ? 0 : full_each - 1; // of the layers without a window
    for (int64_t l = 0; l < layers; l++)
        marks[l] = full_each == 0 || l % full_each != first;
    return NULL;
}
// marks (layers) = which layers have a window by the member layer_types. Without that member, marks is not changed.
static const char *read_layer_types(bool *marks, int64_t layers, const json_t *root, const char *name,
                                    struct error_text *error) {
    json_t *types;
    RETURN_PROBLEM(json_opt_array(root, "layer_types", &types, name, error));
    if (types && (int64_t)json_array_size(types) != layers)
        return error_format(error, "%s: layer_types has %zu layers; expected %lld", name, json_array_size(types),
                            (long long)layers);
    for (size_t l = 0; types && l < (size_t)layers; l++) {
        const char *type = "";
        RETURN_PROBLEM(json_check_string(json_array_get(types, l), "layer_types", &type, name, error));
        marks[l] = strcmp(type, "sliding_attention") == 0;
        if (!marks[l] && strcmp(type, "full_attention") != 0)
            return error_format(error,
                                "%s: layer_types has '%s', which is not supported; expected full_attention or "
                                "sliding_attention",
                                name, json_show(type).text);
    }
    return NULL;
}
// marks (layers) = the layers without RoPE: no_rope_layers' 0s, else each no_rope_layer_interval-th, by default 4th.
static const char *read_no_rope_layers(bool *marks, int64_t layers, const json_t *root, const char *name,
                                       struct error_text *error) {
    json_t *list;
    int64_t interval, value;
    RETURN_PROBLEM(json_opt_int(root, "no_rope_layer_interval", 1, MAX_LAYERS, 4, &interval, name, error));
    RETURN_PROBLEM(json_opt_array(root, "no_rope_layers", &list, name, error));
    if (list && (int64_t)json_array_size(list) != layers)
        return error_format(error, "%s: no_rope_layers has %zu layers; expected %lld", name, json_array_size(list),
                            (long long)layers);
    for (int64_t l = 0; l < layers; l++) {
        marks[l] = (l + 1) % interval == 0;
        if (!list)
            continue;
        RETURN_PROBLEM(json_check_int(json_array_get(list, (size_t)l), "no_rope_layers", 0, 2, &value, name, error));
        marks[l] = value == 0;
    }
    return NULL;
}

// *window = sliding_window, by default the class's. 0: it is null or switched off, or the class has no windows.
static const char *read_window(int64_t *window, const json_t *root, const struct architecture_traits *t,
                               const char *name, struct error_text *error) {
    bool used = t->windows != WINDOWS_NONE;
    *window = 0;
    if (t->windows == WINDOWS_SWITCHED)
        RETURN_PROBLEM(json_opt_bool(root, "use_sliding_window", false, &used, name, error));
    else
        RETURN_PROBLEM(check_flag(root, "use_sliding_window", used, name, error));
    if (!used || is_null(root, "sliding_window"))
        return NULL;
    *window = t->window;
    return json_has(root, "sliding_window")
               ? json_get_int(root, "sliding_window", 1, MAX_WINDOW + 1, window, name, error)
               : NULL;
}
// Sets marks (layers) to the layers that have a window: none if `window`, its number of keys, is 0. SmolLM3's are the
// layers in without_rope, which have no rotary positions. Refuses a layer_types that contradicts `window` or the class.
static const char *read_windows(bool *marks, int64_t window, const bool *without_rope, int64_t layers,
                                const json_t *root, const struct architecture_traits *t, enum architecture a,
                                const char *name, struct error_text *error) {
    int64_t first = 0; // max_window_layers, after which Qwen has windows
    if (t->windows == WINDOWS_SWITCHED && !t->no_rope_layers)
        RETURN_PROBLEM(json_opt_int(root, "max_window_layers", 0, HUGGINGFACE_LARGEST, 28, &first, name, error));
    if (window > 0)
        RETURN_PROBLEM(usual_windows(marks, layers, root, t, a, name, error));
    for (int64_t l = 0; l < layers; l++)
        marks[l] = window > 0 &&
                   (t->windows == WINDOWS_SWITCHED ? (t->no_rope_layers ? without_rope[l] : l >= first) : marks[l]);
    RETURN_PROBLEM(read_layer_types(marks, layers, root, name, error));
    for (int64_t l = 0; l < layers; l++)
        if (marks[l] != (window > 0) && (window == 0 || t->windows == WINDOWS_ALL))
            return error_format(
                error, "%s: layer_types has '%s', but %s", name, marks[l] ? "sliding_attention" : "full_attention",
                window > 0                   ? "all layers of this class have the window"
                : t->windows == WINDOWS_NONE ? "no layer of this class has a window, which is not supported"
                : json_object_get(root, "use_sliding_window") == json_true() || t->windows == WINDOWS_LAYERS
                    ? "sliding_window is not set"
                    : "use_sliding_window is false");
    return NULL;
}
// Sets what differs between layers: windows and rotary positions. windows, without_rope (layers): zeroed scratch.
static const char *set_layer_kinds(struct huggingface_config *h, bool *windows, bool *without_rope, int64_t layers,
                                   const json_t *root, const struct architecture_traits *t, const char *name,
                                   struct error_text *error) {
    int64_t window = 0;
    bool any = false;
    char *text;
    if (t->no_rope_layers) {
        RETURN_PROBLEM(read_no_rope_layers(without_rope, layers, root, name, error));
        text = huggingface_marks_text(without_rope, (int)layers, false);
        huggingface_add_setting(h, "no-rope-freq=%s", text);
        free(text);
    }
    RETURN_PROBLEM(read_window(&window, root, t, name, error));
    RETURN_PROBLEM(read_windows(windows, window, without_rope, layers, root, t, h->architecture, name, error));
    for (int64_t l = 0; l < layers; l++)
        any = any || windows[l];
    if (!any)
        return NULL;
    text = huggingface_marks_text(windows, (int)layers, true);
    huggingface_add_setting(h, "window-size=%lld", (long long)window);
    huggingface_add_setting(h, "window-attn-skip-freq=%s", text);
    free(text);
    return NULL;
}
// Sets what differs between layers. Does nothing above MAX_LAYERS layers, which huggingface_check_settings refuses.
static const char *set_layers(struct huggingface_config *h, const json_t *root, const struct architecture_traits *t,
                              int64_t layers, const char *name, struct error_text *error) {
    if (layers > MAX_LAYERS)
        return NULL; // huggingface_check_settings refuses so many
    bool *marks = (bool *)calloc(2 * (size_t)layers, sizeof *marks);
    if (!marks)
        return error_format(error, "%s: out of memory for %lld layers", name, (long long)layers);
    const char *problem = set_layer_kinds(h, marks, marks + layers, layers, root, t, name, error);
    free(marks);
    return problem;
}

// Sets the biases' options. attention_bias is of q, k, v and the projection after attention, mlp_bias of the MLP. A
// member that the class doesn't have is an error, unless it says what is true of the class anyway.
static const char *read_biases(struct huggingface_config *h, const json_t *root, const struct architecture_traits *t,
                               const char *name, struct error_text *error) {
    bool qkv = t->qkv_bias, proj = t->proj_bias, mlp = t->mlp_bias;
    if (t->has_attention_bias) {
        RETURN_PROBLEM(json_opt_bool(root, "attention_bias", qkv, &qkv, name, error));
        proj = qkv;
    } else
        RETURN_PROBLEM(check_flag(root, "attention_bias", qkv, name, error));
    if (t->has_mlp_bias)
        RETURN_PROBLEM(json_opt_bool(root, "mlp_bias", mlp, &mlp, name, error));
    else
        RETURN_PROBLEM(check_flag(root, "mlp_bias", mlp, name, error));
    huggingface_add_setting(h, "add-bias-linear=%s", qkv && proj && mlp ? "true" : "false");
    huggingface_add_setting(h, "add-qkv-bias=%s", qkv ? "true" : "false");
    huggingface_add_setting(h, "add-attention-proj-bias=%s", proj ? "true" : "false");
    huggingface_add_setting(h, "add-mlp-bias=%s", mlp ? "true" : "false");
    return NULL;
}
// Sets a cap; a null member means none. usual: the cap if the member is absent (NO_CAP: none); 0 refuses the member.
static const char *read_cap(struct huggingface_config *h, const json_t *root, const char *key, double usual,
                            const char *option, const char *name, struct error_text *error) {
    if (usual == 0)
        return check_absent(root, key, name, error);
    return is_null(root, key) || (usual == NO_CAP && !json_has(root, key))
               ? NULL
               : read_number(h, root, key, 1e-6, 1e30, usual, option, name, error);
}
// Sets the scale of attention scores, unless it is the engine's default, 1 / sqrt(head_dim).
static void set_softmax_scale(struct huggingface_config *h, double scale, int64_t head_dim) {
    if (scale != 1 / sqrt((double)head_dim))
        huggingface_add_setting(h, "softmax-scale=%s", huggingface_show(scale).text);
}
// Sets the caps of scores and logits, the scale of scores and the multipliers, as far as the class has them.
static const char *read_factors(struct huggingface_config *h, const json_t *root, const struct architecture_traits *t,
                                int64_t hidden, int64_t head_dim, const char *name, struct error_text *error) {
    double scale, divisor;
    RETURN_PROBLEM(read_cap(h, root, "attn_logit_softcapping", t->attn_cap, "attn-logit-softcapping", name, error));
    RETURN_PROBLEM(read_cap(h, root, "final_logit_softcapping", t->final_cap, "final-logit-softcapping", name, error));
    if (t->gemma)
        huggingface_add_setting(h, "embedding-multiplier=%s", huggingface_show(sqrt((double)hidden)).text);
    if (t->query_pre_attn_scalar) {
        RETURN_PROBLEM(
            json_opt_number(root, "query_pre_attn_scalar", 1, HUGGINGFACE_LARGEST, 256, &scale, name, error));
        if (scale != floor(scale))
            return error_format(error, "%s: query_pre_attn_scalar is %g; expected a whole number", name, scale);
        set_softmax_scale(h, scale == (double)head_dim ? 1 / sqrt((double)head_dim) : 1 / sqrt(scale), head_dim);
    }
    if (!t->multipliers)
        return NULL;
    RETURN_PROBLEM(json_opt_number(root, "attention_multiplier", 1e-9, 1e9, 1, &scale, name, error));
    RETURN_PROBLEM(json_opt_number(root, "logits_scaling", 1e-9, 1e9, 1, &divisor, name, error));
    set_softmax_scale(h, scale, head_dim);
    huggingface_add_setting(h, "logit-multiplier=%s",
                            huggingface_show(1 / divisor).text); // logits are divided by the member
    RETURN_PROBLEM(read_number(h, root, "embedding_multiplier", 1e-9, 1e9, 1, "embedding-multiplier", name, error));
    return read_number(h, root, "residual_multiplier", 1e-9, 1e9, 1, "residual-multiplier", name, error);
}

// Sets the number of KV heads (null: `heads`) and the head size, also in *head_dim. Absent: the class's defaults.
static const char *read_heads(struct huggingface_config *h, const json_t *root, const struct architecture_traits *t,
                              int64_t hidden, int64_t heads, int64_t *head_dim, const char *name,
                              struct error_text *error) {
    int64_t groups = t->groups != 0 && !is_null(root, "num_key_value_heads") ? t->groups : heads;
    *head_dim = t->head_dim != 0 ? t->head_dim : hidden / heads;
    if (t->form == FORM_LLAMA) {
        if (json_has(root, "num_key_value_heads"))
            RETURN_PROBLEM(json_get_int(root, "num_key_value_heads", 1, heads + 1, &groups, name, error));
        RETURN_PROBLEM(json_opt_int(root, "head_dim", 1, HUGGINGFACE_LARGEST, *head_dim, head_dim, name, error));
    } else
        groups = heads;
    if (heads % groups != 0)
        return error_format(error, "%s: num_key_value_heads is %lld%s, which does not divide the %lld heads", name,
                            (long long)groups, json_has(root, "num_key_value_heads") ? "" : " where it is absent",
                            (long long)heads);
    if (t->form != FORM_LLAMA && hidden % heads != 0)
        return error_format(error, "%s: num_attention_heads is %lld, which does not divide hidden_size, %lld", name,
                            (long long)heads, (long long)hidden);
    return set_heads(h, groups, *head_dim, name, error);
}
// Sets the options of the norms, and whether the residual is parallel, which only GPT-NeoX's form has.
static const char *read_norms(struct huggingface_config *h, const json_t *root, const struct architecture_traits *t,
                              const char *name, struct error_text *error) {
    char word[OPTION_NAME];
    const bool neox = t->form == FORM_GPT_NEOX;
    RETURN_PROBLEM(read_number(h, root, neox ? "layer_norm_eps" : "rms_norm_eps", 1e-12, 0.9, t->epsilon,
                               "norm-epsilon", name, error));
    huggingface_add_setting(h, "normalization=%s", neox ? "LayerNorm" : "RMSNorm");
    huggingface_add_setting(h, "norm-placement=%s",
                            option_choice_name(CHOICES(NORM_PLACEMENTS), (int)t->norm_placement, word));
    huggingface_add_setting(h, "apply-layernorm-1p=%s", t->gemma ? "true" : "false");
    huggingface_add_setting(h, "qk-layernorm=%s", t->qk_layernorm ? "true" : "false");
    huggingface_add_setting(h, "qk-layernorm-width=%s",
                            option_choice_name(CHOICES(QK_LAYERNORM_WIDTHS), (int)t->qk_layernorm_width, word));
    bool parallel = false;
    if (neox)
        RETURN_PROBLEM(json_opt_bool(root, "use_parallel_residual", true, &parallel, name, error));
    huggingface_add_setting(h, "parallel-residual=%s", parallel ? "true" : "false");
    return NULL;
}
// Reads hidden_act or, of Gemma 2 and 3, hidden_activation. Gemma 1 has either, and by "gelu" means the tanh form.
static const char *read_activation(struct huggingface_config *h, const json_t *root,
                                   const struct architecture_traits *t, const char *name, struct error_text *error) {
    const bool gemma1 = t->gemma && !t->query_pre_attn_scalar;
    const char *word = "";
    if (t->form == FORM_GPT_NEOX)
        return set_activation(h, root, "hidden_act", "gelu", false, name, error);
    if (!t->gemma)
        return set_activation(h, root, "hidden_act", "silu", true, name, error);
    if (!gemma1)
        return set_activation(h, root, "hidden_activation", "gelu_pytorch_tanh", true, name, error);
    const char *key = json_has(root, "hidden_activation") ? "hidden_activation" : "hidden_act";
    RETURN_PROBLEM(json_opt_string(root, key, "gelu", &word, name, error));
    if (strcmp(word, "gelu") != 0)
        return set_activation(h, root, key, "", true, name, error);
    huggingface_add_setting(h, "activation=geglu");
    return NULL;
}
// Sets all model options, from sizes to RoPE, of a class other than GPT-2's, except its vocabulary and tied embeddings.
static const char *read_block(struct huggingface_config *h, const json_t *root, const struct architecture_traits *t,
                              const char *name, struct error_text *error) {
    int64_t layers, hidden, heads, head_dim, ignored;
    RETURN_PROBLEM(check_flag(root, "use_bidirectional_attention", false, name, error));
    RETURN_PROBLEM(read_activation(h, root, t, name, error));
    RETURN_PROBLEM(read_size(h, root, "num_hidden_layers", "num-layers", &layers, name, error));
    RETURN_PROBLEM(read_size(h, root, "hidden_size", "hidden-size", &hidden, name, error));
    RETURN_PROBLEM(read_size(h, root, "num_attention_heads", "num-attention-heads", &heads, name, error));
    RETURN_PROBLEM(read_size(h, root, "intermediate_size", "ffn-hidden-size", &ignored, name, error));
    RETURN_PROBLEM(read_size(h, root, "max_position_embeddings", "max-position-embeddings", &ignored, name, error));
    RETURN_PROBLEM(read_heads(h, root, t, hidden, heads, &head_dim, name, error));
    RETURN_PROBLEM(read_norms(h, root, t, name, error));
    RETURN_PROBLEM(read_biases(h, root, t, name, error));
    RETURN_PROBLEM(read_factors(h, root, t, hidden, head_dim, name, error));
    huggingface_add_setting(h, "position-embedding-type=rope");
    RETURN_PROBLEM(set_layers(h, root, t, layers, name, error));
    return huggingface_read_rope(h, root, t, name, error);
}

const char *huggingface_read_members(struct huggingface_config *h, const json_t *root, const char *name,
                                     struct error_text *error) {
    const struct architecture_traits *t = architecture_traits_of(h->architecture);
    bool tied;
    RETURN_PROBLEM(json_opt_bool(root, "tie_word_embeddings", t->tied, &tied, name, error));
    huggingface_add_setting(h, "untie-embeddings-and-output-weights=%s", tied ? "false" : "true");
    return t->form == FORM_GPT2 ? read_gpt2(h, root, name, error) : read_block(h, root, t, name, error);
}
