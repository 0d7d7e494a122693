// Lists what sets each architecture's config.json apart, a row each. The reader and the writer share the table.
#pragma once
#include "config/config.h"           // struct config
#include "formats/huggingface.h"     // enum architecture
#include "runtime/text/json.h"       // config.json as written
#include "runtime/text/json_parse.h" // config.json as read

// Says which layers have a window, and how config.json says so.
enum huggingface_windows {
    WINDOWS_NONE,
    WINDOWS_ALL,      // every layer, unless sliding_window is null
    WINDOWS_SWITCHED, // by layer_types, if use_sliding_window
    WINDOWS_LAYERS,   // by layer_types
};
// Whose names config.json uses.
enum huggingface_form { FORM_OURS, FORM_GPT2, FORM_LLAMA, FORM_GPT_NEOX };

enum { NO_CAP = -1 };

struct architecture_traits {
    enum huggingface_form form;
    // What an absent member means.
    bool tied;
    int groups, head_dim; // num_key_value_heads; 0: as heads. head_dim; 0: hidden_size over heads
    double epsilon, theta;
    // Biases: whether there are any by default, and whether attention_bias and mlp_bias say so.
    bool qkv_bias, proj_bias, mlp_bias, has_attention_bias, has_mlp_bias;
    // Windows. window: sliding_window where absent, 0: null. full_each: where layer_types is absent, each full_each-th
    // layer has no window, 0: all have one.
    enum huggingface_windows windows;
    int window, full_each;
    enum norm_placement norm_placement;
    bool qk_layernorm;
    enum qk_layernorm_width qk_layernorm_width;
    bool gemma;            // norm weights 1 + w, GeGLU, "gelu" is its tanh form, the embedding times sqrt(hidden_size)
    bool no_rope_layers;   // no_rope_layers, no_rope_layer_interval
    bool rope_by_layers;   // layers with a window have rotary settings of their own
    double local_theta;    // theta of the layers with a window, where absent; 0: the other layers' theta
    double partial_rotary; // rotary_pct, partial_rotary_factor; 0: there is no such member
    bool multipliers;      // Granite's four
    bool query_pre_attn_scalar; // 256 where absent
    double attn_cap, final_cap; // attn_logit_softcapping, final_logit_softcapping; NO_CAP: none; 0: no such member
};

__BEGIN_DECLS
const struct architecture_traits *architecture_traits_of(enum architecture a);

struct huggingface_number {
    char text[32];
};
// Returns the shortest decimal that reads back as the value.
struct huggingface_number huggingface_show(double value);

// marks (num_layers) = which layers a valid text marks. A list marks the layers at its 1s; the word none sets all to
// `others`. N sets layers N-1, 2N-1, ... to !others, the rest to `others`, which is true for --window-attn-skip-freq.
void huggingface_marks(bool *marks, const char *text, int num_layers, bool others);
// Returns the shortest text (none, N or a list) from which huggingface_marks makes `marks`. The caller frees the text.
char *huggingface_marks_text(const bool *marks, int num_layers, bool others);

// Adds the defaults of all huggingface_own_options that are not set, so that a contrary command line is noticed.
void huggingface_set_defaults(struct huggingface_config *h);

// Writes the rotary settings of architecture `a`, whose row is `t`, as members of the open object.
void huggingface_write_rope(struct json *json, const struct config *c, const struct architecture_traits *t,
                            enum architecture a);
// Adds the rotary settings of `root`, the config.json, to h, whose architecture, sizes and windows are set already.
const char *huggingface_read_rope(struct huggingface_config *h, const json_t *root, const struct architecture_traits *t,
                                  const char *name, struct error_text *error);
// Adds the settings that the config.json `root` or its class determines, except vocab_size. Not for ARCHITECTURE_OURS.
const char *huggingface_read_members(struct huggingface_config *h, const json_t *root, const char *name,
                                     struct error_text *error);
// Writes all that huggingface_read_members reads but tie_word_embeddings; also writes members only for transformers.
void huggingface_write_members(struct json *json, const struct config *c, enum architecture a);
__END_DECLS
