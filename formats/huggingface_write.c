// Writes the members of config.json. An option for which an architecture has no member is not written. A value that its
// member can't have is written as another value: architecture_fits finds that the file reads back otherwise.
#include <math.h>   // sqrt, nextafter
#include <stdlib.h> // calloc, free
#include <string.h> // strcmp

#include "config/layers.h" // config_window
#include "formats/huggingface_traits.h"
#include "runtime/machine/error.h" // fail

// Returns config.json's word for the activation, a constant. An architecture may read the word otherwise, or refuse it.
static const char *activation_word(const struct config *c) {
    switch (c->model.activation) {
    case ACTIVATION_GELU: return "gelu_new";
    case ACTIVATION_GELU_ERF: return "gelu";
    case ACTIVATION_SQUARED_RELU: return "relu2";
    case ACTIVATION_SWIGLU: return "silu";
    case ACTIVATION_GEGLU: return "gelu_pytorch_tanh";
    }
    __builtin_unreachable();
}

static void write_gpt2(struct json *json, const struct config *c) {
    json_int(json, "n_layer", c->model.num_layers);
    json_int(json, "n_embd", c->model.hidden_size);
    json_int(json, "n_head", c->model.num_attention_heads);
    json_int(json, "n_inner", c->model.ffn_hidden_size);
    json_int(json, "n_positions", c->model.max_position_embeddings);
    json_int(json, "n_ctx", c->model.max_position_embeddings);
    json_str(json, "activation_function", activation_word(c));
    json_decimal(json, "layer_norm_epsilon", c->model.norm_epsilon);
    json_decimal(json, "resid_pdrop", c->model.hidden_dropout);
    json_decimal(json, "embd_pdrop", c->model.hidden_dropout);
    json_decimal(json, "attn_pdrop", c->model.attention_dropout);
    json_bool(json, "scale_attn_weights", true);
}

// Writes the member `key`, an array of the numbers in a list with commas.
static void write_numbers(struct json *json, const char *key, const char *list) {
    double value;
    json_array_begin(json, key);
    for (const char *at = list; *at && config_next_number(&at, &value);)
        json_decimal_double(json, NULL, value);
    json_array_end(json);
}
// Writes YaRN's members except the type, the factor, the original length and the attention factor.
static void write_yarn(struct json *json, const struct config *c) {
    json_decimal_double(json, "beta_fast", c->model.yarn_beta_fast);
    json_decimal_double(json, "beta_slow", c->model.yarn_beta_slow);
    if (!c->model.yarn_truncate)
        json_bool(json, "truncate", false);
    if (c->model.rope_attention_factor == 0 && c->model.yarn_mscale != 0 && c->model.yarn_mscale_all_dim != 0) {
        json_decimal_double(json, "mscale", c->model.yarn_mscale);
        json_decimal_double(json, "mscale_all_dim", c->model.yarn_mscale_all_dim);
    }
}
// Whether longrope's factor is the quotient of the lengths, which readers assume where it is absent.
static bool longrope_factor_follows(const struct config *c) {
    return c->model.rope_scaling_factor ==
           (double)c->model.max_position_embeddings / c->model.rope_original_max_position_embeddings;
}
// Writes the scaling's members. phi3: as in transformers 4, with `type` for rope_type, and the factor only if needed.
static void write_scaling(struct json *json, const struct config *c, bool phi3) {
    const int original = c->model.rope_original_max_position_embeddings;
    switch (c->model.rope_scaling_type) {
    case SCALING_NONE: json_str(json, "rope_type", "default"); return;
    case SCALING_LINEAR:
        json_str(json, "rope_type", "linear");
        json_decimal_double(json, "factor", c->model.rope_scaling_factor);
        return;
    case SCALING_LLAMA3:
        json_str(json, "rope_type", "llama3");
        json_decimal_double(json, "factor", c->model.rope_scaling_factor);
        json_decimal_double(json, "low_freq_factor", c->model.rope_low_freq_factor);
        json_decimal_double(json, "high_freq_factor", c->model.rope_high_freq_factor);
        json_int(json, "original_max_position_embeddings", original);
        return;
    case SCALING_YARN:
        json_str(json, "rope_type", "yarn");
        json_decimal_double(json, "factor", c->model.rope_scaling_factor);
        json_int(json, "original_max_position_embeddings", original);
        write_yarn(json, c);
        break;
    case SCALING_LONGROPE:
        json_str(json, phi3 ? "type" : "rope_type", "longrope");
        write_numbers(json, "short_factor", c->model.rope_short_factors);
        write_numbers(json, "long_factor", c->model.rope_long_factors);
        if (!phi3)
            json_int(json, "original_max_position_embeddings", original);
        if (!phi3 || !longrope_factor_follows(c))
            json_decimal_double(json, "factor", c->model.rope_scaling_factor);
        break;
    }
    if (c->model.rope_attention_factor != 0)
        json_decimal_double(json, "attention_factor", c->model.rope_attention_factor);
}
// Writes rotary settings as transformers 5 reads them: scaling, theta, and the rotated fraction if the class has it.
static void write_parameters(struct json *json, const char *key, const struct config *c,
                             const struct architecture_traits *t) {
    json_object_begin(json, key);
    write_scaling(json, c, false);
    json_decimal(json, "rope_theta", c->model.rotary_base);
    if (t->partial_rotary != 0)
        json_decimal_double(json, "partial_rotary_factor", c->model.rotary_percent);
    json_object_end(json);
}
// Writes the member `key`: the theta of layers with a window. A local theta of 0 means the other layers' theta.
static void write_local(struct json *json, const char *key, const struct config *c) {
    if (c->model.rotary_base_local == 0)
        json_decimal(json, key, c->model.rotary_base);
    else
        json_decimal_double(json, key, c->model.rotary_base_local);
}

// Writes the settings twice: in rope_parameters, and, for readers before transformers 5, as rope_theta at the top and
// the rest in rope_scaling. transformers 5, too, reads rope_scaling first where it is there.
void huggingface_write_rope(struct json *json, const struct config *c, const struct architecture_traits *t,
                            enum architecture a) {
    const bool neox = t->form == FORM_GPT_NEOX, phi3 = a == ARCHITECTURE_PHI3;
    json_decimal(json, neox ? "rotary_emb_base" : "rope_theta", c->model.rotary_base);
    if (t->partial_rotary != 0)
        json_decimal_double(json, neox ? "rotary_pct" : "partial_rotary_factor", c->model.rotary_percent);
    if (t->local_theta != 0)
        write_local(json, "rope_local_base_freq", c);
    if (phi3)
        json_int(json, "original_max_position_embeddings",
                 c->model.rope_scaling_type == SCALING_NONE ? c->model.max_position_embeddings
                                                            : c->model.rope_original_max_position_embeddings);
    if (c->model.rope_scaling_type == SCALING_NONE)
        json_none(json, "rope_scaling");
    else {
        json_object_begin(json, "rope_scaling");
        write_scaling(json, c, phi3);
        json_object_end(json);
    }
    if (!t->rope_by_layers) {
        write_parameters(json, "rope_parameters", c, t);
        return;
    }
    json_object_begin(json, "rope_parameters");
    write_parameters(json, "full_attention", c, t);
    json_object_begin(json, "sliding_attention");
    json_str(json, "rope_type", "default");
    write_local(json, "rope_theta", c);
    json_object_end(json);
    if (c->model.rope_scaling_type == SCALING_YARN && !c->model.yarn_truncate) // where transformers 5 looks for it
        json_bool(json, "truncate", false);
    json_object_end(json);
}

// Writes the windows' members. A class of WINDOWS_LAYERS needs a number as sliding_window even without windows.
static void write_windows(struct json *json, const struct config *c, const struct architecture_traits *t) {
    const int window = config_window(c);
    bool *marks = (bool *)calloc((size_t)c->model.num_layers, sizeof *marks);
    if (!marks)
        fail("out of memory");
    huggingface_marks(marks, c->model.window_attn_skip_freq, c->model.num_layers, true);
    if (window > 0)
        json_int(json, "sliding_window", window);
    else if (t->windows == WINDOWS_LAYERS)
        json_int(json, "sliding_window", t->window);
    else
        json_none(json, "sliding_window");
    if (t->windows == WINDOWS_SWITCHED)
        json_bool(json, "use_sliding_window", window > 0);
    if (t->windows != WINDOWS_ALL) {
        int full = 0; // the layers before the first one with a window, for readers without layer_types
        json_array_begin(json, "layer_types");
        for (int l = 0; l < c->model.num_layers; l++) {
            full += full == l && !(window > 0 && marks[l]);
            json_str(json, NULL, window > 0 && marks[l] ? "sliding_attention" : "full_attention");
        }
        json_array_end(json);
        if (t->windows == WINDOWS_SWITCHED && !t->no_rope_layers)
            json_int(json, "max_window_layers", full);
    }
    free(marks);
}
// Writes no_rope_layers, a list that has 1 for each layer with rotary positions and 0 for each layer without.
static void write_no_rope_layers(struct json *json, const struct config *c) {
    bool *marks = (bool *)calloc((size_t)c->model.num_layers, sizeof *marks);
    if (!marks)
        fail("out of memory");
    huggingface_marks(marks, c->model.no_rope_freq, c->model.num_layers, false);
    json_array_begin(json, "no_rope_layers"); // 1: rotary positions are applied
    for (int l = 0; l < c->model.num_layers; l++)
        json_int(json, NULL, !marks[l]);
    json_array_end(json);
    free(marks);
}

// Returns the shortest x with 1 / x == reciprocal; where there is none, a number near it.
static double reciprocal_of(double reciprocal) {
    const double near = 1 / reciprocal;
    const double tries[3] = {near, nextafter(near, 0), nextafter(near, 2 * near)};
    for (int digits = 1; digits <= 17; digits++)
        for (int i = 0; i < 3; i++) {
            char text[32];
            snprintf(text, sizeof text, "%.*g", digits, tries[i]);
            if (1 / strtod(text, NULL) == reciprocal)
                return strtod(text, NULL);
        }
    return near;
}
static void write_multipliers(struct json *json, const struct config *c) {
    json_decimal_double(json, "embedding_multiplier", c->model.embedding_multiplier);
    json_decimal_double(json, "residual_multiplier", c->model.residual_multiplier);
    json_decimal_double(json, "logits_scaling", reciprocal_of(c->model.logit_multiplier));
    json_decimal_double(json, "attention_multiplier",
                        c->model.softmax_scale == 0 ? 1 / sqrt((double)c->model.kv_channels) : c->model.softmax_scale);
}
// Writes a cap of scores or logits; a cap of 0 is none, and written as null.
static void write_cap(struct json *json, const char *key, double cap) {
    if (cap == 0)
        json_none(json, key);
    else
        json_decimal_double(json, key, cap);
}

// Writes the members of Llama's form that huggingface_write_members doesn't write itself, except rotary settings.
static void write_llama(struct json *json, const struct config *c, const struct architecture_traits *t,
                        enum architecture a) {
    const bool gemma_later = t->gemma && t->query_pre_attn_scalar;
    json_int(json, "num_key_value_heads", c->model.num_query_groups);
    json_int(json, "head_dim", c->model.kv_channels);
    json_str(json, gemma_later ? "hidden_activation" : "hidden_act", activation_word(c));
    json_decimal(json, "rms_norm_eps", c->model.norm_epsilon);
    if (t->windows != WINDOWS_NONE)
        write_windows(json, c, t);
    if (t->no_rope_layers)
        write_no_rope_layers(json, c);
    if (t->has_mlp_bias)
        json_bool(json, "mlp_bias", c->model.add_mlp_bias);
    if (t->multipliers)
        write_multipliers(json, c);
    if (t->query_pre_attn_scalar) {
        const double scalar =
            c->model.softmax_scale == 0 ? c->model.kv_channels : 1 / (c->model.softmax_scale * c->model.softmax_scale);
        json_int(json, "query_pre_attn_scalar", scalar < HUGGINGFACE_LARGEST ? (int)(scalar + 0.5) : 1);
    }
    if (t->attn_cap != 0)
        write_cap(json, "attn_logit_softcapping", c->model.attn_logit_softcapping);
    if (t->final_cap != 0)
        write_cap(json, "final_logit_softcapping", c->model.final_logit_softcapping);
    if (a == ARCHITECTURE_PHI3) {
        json_decimal(json, "resid_pdrop", c->model.hidden_dropout);
        json_decimal(json, "embd_pdrop", c->model.hidden_dropout);
    }
}
// Writes the members that GPT-NeoX has and other forms lack or name otherwise, except rotary settings.
static void write_gpt_neox(struct json *json, const struct config *c) {
    json_str(json, "hidden_act", activation_word(c));
    json_decimal(json, "layer_norm_eps", c->model.norm_epsilon);
    json_bool(json, "use_parallel_residual", c->model.parallel_residual);
    json_decimal(json, "hidden_dropout", c->model.hidden_dropout);
}
void huggingface_write_members(struct json *json, const struct config *c, enum architecture a) {
    const struct architecture_traits *t = architecture_traits_of(a);
    if (t->form == FORM_GPT2) {
        write_gpt2(json, c);
        return;
    }
    json_int(json, "num_hidden_layers", c->model.num_layers);
    json_int(json, "hidden_size", c->model.hidden_size);
    json_int(json, "num_attention_heads", c->model.num_attention_heads);
    json_int(json, "intermediate_size", c->model.ffn_hidden_size);
    json_int(json, "max_position_embeddings", c->model.max_position_embeddings);
    json_decimal(json, "attention_dropout", c->model.attention_dropout);
    if (t->has_attention_bias)
        json_bool(json, "attention_bias", c->model.add_qkv_bias);
    if (t->form == FORM_GPT_NEOX)
        write_gpt_neox(json, c);
    else
        write_llama(json, c, t, a);
    huggingface_write_rope(json, c, t, a);
}
