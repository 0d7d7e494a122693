#include "formats/huggingface.h"

#include "runtime/machine/text_add.h" // text_add
#include <stdlib.h>                   // malloc, calloc, free
#include <string.h>                   // strcmp, memset

#include "config/layers.h"              // config_window
#include "formats/huggingface_traits.h" // architecture_traits_of, huggingface_marks
#include "runtime/machine/error.h"      // fail

// ---- architectures ----

const char *architecture_class(enum architecture a) {
    switch (a) {
#define CASE_ROW(id, model_type, class_name)                                                                           \
    case ARCHITECTURE_##id: return class_name;
        ARCHITECTURE_ROWS(CASE_ROW)
#undef CASE_ROW
    }
    __builtin_unreachable();
}
const char *architecture_model_type(enum architecture a) {
    switch (a) {
#define CASE_ROW(id, model_type, class_name)                                                                           \
    case ARCHITECTURE_##id: return model_type;
        ARCHITECTURE_ROWS(CASE_ROW)
#undef CASE_ROW
    }
    __builtin_unreachable();
}
bool architecture_find(enum architecture *a, const char *type) {
#define FIND_ROW(id, model_type, class_name)                                                                           \
    if (strcmp(type, model_type) == 0) {                                                                               \
        *a = ARCHITECTURE_##id;                                                                                        \
        return true;                                                                                                   \
    }
    ARCHITECTURE_ROWS(FIND_ROW)
#undef FIND_ROW
    return false;
}

// ---- which architecture fits ----

// A model in its plainest form: options without an effect have their default, lists their shortest form.
struct plain_model {
    struct config config;
    char *no_rope, *windows, *window, *factors[2]; // owned
};
static void plain_model_free(struct plain_model *m) {
    free(m->no_rope);
    free(m->windows);
    free(m->window);
    free(m->factors[0]);
    free(m->factors[1]);
}

// Sets the windows' options to their shortest form, and a local theta without effect to 0. marks (num_layers): scratch.
static void plain_windows(struct plain_model *m, bool *marks) {
    struct config *c = &m->config;
    const int window = config_window(c), L = c->model.num_layers;
    huggingface_marks(marks, c->model.window_attn_skip_freq, L, true);
    bool any = false;
    for (int l = 0; l < L && window > 0; l++)
        any = any || marks[l];
    m->windows = any ? huggingface_marks_text(marks, L, true) : NULL;
    if (any && asprintf(&m->window, "%d", window) < 0)
        fail("out of memory");
    c->model.window_size = any ? m->window : "none";
    c->model.window_attn_skip_freq = any ? m->windows : "none";
    if (!any ||
        (c->model.rope_scaling_type == SCALING_NONE && c->model.rotary_base_local == (double)c->model.rotary_base))
        c->model.rotary_base_local = 0;
}
// Returns the numbers of `list` in their shortest form, a text that the caller frees. Out of memory ends the program.
static char *plain_numbers(const char *list) {
    const size_t room = strlen(list) * 32 + 32; // a number takes a digit and a comma at least
    char *text = (char *)malloc(room);
    double value;
    if (!text)
        fail("out of memory");
    text[0] = '\0';
    for (const char *at = list; *at && config_next_number(&at, &value);)
        text_add(text, room, "%s%s", *text ? "," : "", huggingface_show(value).text);
    return text;
}
// Resets rotary options without effect to their defaults, and brings longrope's lists to their shortest form.
static void plain_rope(struct plain_model *m, const struct config *defaults) {
    struct config *c = &m->config;
    const enum rope_scaling_type type = c->model.rope_scaling_type;
    const bool rope = config_rotates(c), yarn = type == SCALING_YARN;
    if (!rope)
        c->model.rotary_base = defaults->model.rotary_base;
    if (type == SCALING_NONE || type == SCALING_LINEAR)
        c->model.rope_original_max_position_embeddings = defaults->model.rope_original_max_position_embeddings;
    if (type != SCALING_LLAMA3) {
        c->model.rope_low_freq_factor = defaults->model.rope_low_freq_factor;
        c->model.rope_high_freq_factor = defaults->model.rope_high_freq_factor;
    }
    if (!yarn) {
        c->model.yarn_beta_fast = defaults->model.yarn_beta_fast;
        c->model.yarn_beta_slow = defaults->model.yarn_beta_slow;
        c->model.yarn_truncate = defaults->model.yarn_truncate;
    }
    if (!yarn || c->model.yarn_mscale == 0 || c->model.yarn_mscale_all_dim == 0 || c->model.rope_attention_factor != 0)
        c->model.yarn_mscale = c->model.yarn_mscale_all_dim = 0;
    if (!yarn && type != SCALING_LONGROPE)
        c->model.rope_attention_factor = defaults->model.rope_attention_factor;
    if (type == SCALING_LONGROPE) {
        c->model.rope_short_factors = m->factors[0] = plain_numbers(c->model.rope_short_factors);
        c->model.rope_long_factors = m->factors[1] = plain_numbers(c->model.rope_long_factors);
    }
}
// Returns c, but options without effect have defaults, lists one form. plain_model_free frees that. c must outlive it.
static struct plain_model plain_model_of(const struct config *c) {
    struct plain_model m;
    struct config defaults;
    bool *marks = (bool *)calloc((size_t)c->model.num_layers, sizeof *marks);
    if (!marks)
        fail("out of memory");
    memset(&m, 0, sizeof m);
    memset(&defaults, 0, sizeof defaults);
    options_set_defaults(&config_options, &defaults);
    m.config = *c;
    plain_rope(&m, &defaults);
    plain_windows(&m, marks);
    huggingface_marks(marks, c->model.no_rope_freq, c->model.num_layers, false);
    m.config.model.no_rope_freq = m.no_rope = huggingface_marks_text(marks, c->model.num_layers, false);
    if (m.config.model.softmax_scale == 1 / sqrt((double)c->model.kv_channels))
        m.config.model.softmax_scale = 0;
    if (!c->model.qk_layernorm)
        m.config.model.qk_layernorm_width = defaults.model.qk_layernorm_width;
    m.config.model.add_bias_linear = c->model.add_qkv_bias && c->model.add_attention_proj_bias && c->model.add_mlp_bias;
    free(marks);
    return m;
}
// Whether two models have equal options of the kinds CONFIG_BLOCKS and CONFIG_EMBEDDING; other options are ignored.
static bool plain_models_equal(const struct plain_model *a, const struct plain_model *b) {
    char text_a[OPTION_TEXT], text_b[OPTION_TEXT];
    for (int i = 0; i < CONFIG_ROWS; i++)
        if (config_rows[i].flags & (CONFIG_BLOCKS | CONFIG_EMBEDDING) &&
            strcmp(option_text(text_a, &config_rows[i], &a->config), option_text(text_b, &config_rows[i], &b->config)))
            return false;
    return true;
}

// Sets options of c from h's settings, which huggingface_check_settings accepted. Other options stay. h owns the texts.
static void huggingface_apply(struct config *c, const struct huggingface_config *h) {
    char name[OPTION_NAME];
    for (int i = 0; i < h->num_settings; i++) {
        const char *value = strchr(h->settings[i], '=') + 1;
        snprintf(name, sizeof name, "%.*s", (int)(value - 1 - h->settings[i]), h->settings[i]);
        option_set(&config_rows[option_find(&config_options, name, false)], c, value);
    }
}
static void huggingface_write_as(FILE *out, const struct config *c, enum architecture a, int end_of_text, bool bf16);

bool architecture_fits(enum architecture a, const struct config *c) {
    struct config wanted = *c, found;
    struct huggingface_config h;
    struct error_text error;
    char *text = NULL;
    size_t bytes = 0;
    if (architecture_traits_of(a)->form == FORM_GPT2) { // which repeats KV heads, and has zeros as biases
        wanted.model.num_query_groups = wanted.model.num_attention_heads;
        wanted.model.add_qkv_bias = wanted.model.add_attention_proj_bias = wanted.model.add_mlp_bias = true;
    }
    FILE *out = open_memstream(&text, &bytes);
    if (!out)
        fail("out of memory");
    huggingface_write_as(out, &wanted, a, -1, false);
    fclose(out);
    const char *problem = huggingface_parse_config(&h, (const unsigned char *)text, bytes, "config.json", &error);
    free(text);
    if (problem)
        return false;
    memset(&found, 0, sizeof found);
    options_set_defaults(&config_options, &found);
    huggingface_apply(&found, &h);
    struct plain_model x = plain_model_of(&wanted), y = plain_model_of(&found);
    const bool equal = plain_models_equal(&x, &y);
    plain_model_free(&x);
    plain_model_free(&y);
    huggingface_free(&h);
    return equal;
}
enum architecture architecture_of(const struct config *c) {
    enum architecture wanted;
    if (architecture_find(&wanted, c->checkpoints.checkpoint_architecture) &&
        (wanted == ARCHITECTURE_OURS || architecture_fits(wanted, c)))
        return wanted;
#define TRY_ROW(id, model_type, class_name)                                                                            \
    if (ARCHITECTURE_##id != ARCHITECTURE_OURS && architecture_fits(ARCHITECTURE_##id, c))                             \
        return ARCHITECTURE_##id;
    ARCHITECTURE_ROWS(TRY_ROW)
#undef TRY_ROW
    return ARCHITECTURE_OURS;
}

static const char *huggingface_note_gpt2(const struct config *c) {
    const bool biases = c->model.add_qkv_bias && c->model.add_attention_proj_bias && c->model.add_mlp_bias;
    if (c->model.num_query_groups < c->model.num_attention_heads)
        return biases ? "GPT2LMHeadModel, with each KV head repeated for its queries, since it has no groups"
                      : "GPT2LMHeadModel, with each KV head repeated for its queries and zeros as biases";
    return biases ? "" : "GPT2LMHeadModel, with zeros as biases, which it always has";
}
const char *huggingface_note(const struct config *c) {
    switch (architecture_traits_of(architecture_of(c))->form) {
    case FORM_OURS:
        return "of a kind that Hugging Face has no model for: written under our own names, for this program only";
    case FORM_GPT2: return huggingface_note_gpt2(c);
    case FORM_LLAMA:
    case FORM_GPT_NEOX: return "";
    }
    __builtin_unreachable();
}

// ---- config.json as written ----

// Writes each of huggingface_own_options as a member, always as a text.
static void huggingface_write_ours(struct json *json, const struct config *c) {
    const struct option_row *rows[CONFIG_ROWS];
    char text[OPTION_TEXT];
    const int count = huggingface_own_options(rows);
    for (int i = 0; i < count; i++)
        json_str(json, rows[i]->name, option_text(text, rows[i], c));
}
// Writes config.json as architecture `a`, which need not fit. An end_of_text outside the vocabulary, as -1, means none.
static void huggingface_write_as(FILE *out, const struct config *c, enum architecture a, int end_of_text, bool bf16) {
    struct json json = json_writer(out, true);
    json_object_begin(&json, NULL);
    json_array_begin(&json, "architectures");
    json_str(&json, NULL, architecture_class(a));
    json_array_end(&json);
    json_str(&json, "model_type", architecture_model_type(a));
    json_int(&json, "vocab_size", c->model.vocab_size);
    json_bool(&json, "tie_word_embeddings", !c->model.untie_embeddings_and_output_weights);
    if (a == ARCHITECTURE_OURS)
        huggingface_write_ours(&json, c);
    else
        huggingface_write_members(&json, c, a);
    json_decimal(&json, "initializer_range", c->model.init_method_std);
    // Without these members readers would take the class's own tokens, which the vocabulary may not have.
    static const char *const tokens[] = {"bos_token_id", "eos_token_id", "pad_token_id"};
    for (int i = 0; i < 3; i++)
        if (i < 2 && end_of_text >= 0 && end_of_text < c->model.vocab_size)
            json_int(&json, tokens[i], end_of_text);
        else
            json_none(&json, tokens[i]);
    json_str(&json, "torch_dtype", bf16 ? "bfloat16" : "float32");
    json_object_end(&json);
}
void huggingface_write_config(FILE *out, const struct config *c, int end_of_text, bool bf16) {
    huggingface_write_as(out, c, architecture_of(c), end_of_text, bf16);
}

// ---- config.json as read ----

// Switches on the biases of the attention's projection and of the MLP if the settings read have add-bias-linear=true
// and no add-mlp-bias. A config.json of ARCHITECTURE_OURS is then older than the separate options.
static void huggingface_set_older_biases(struct huggingface_config *h) {
    const char *all = huggingface_setting(h, "add-bias-linear");
    if (all && strcmp(all, "true") == 0 && !huggingface_setting(h, "add-mlp-bias")) {
        huggingface_add_setting(h, "add-attention-proj-bias=true");
        huggingface_add_setting(h, "add-mlp-bias=true");
    }
}
// Adds a setting for each shape option in `root`, unchecked. Only num_layers and hidden_size must be there.
static const char *huggingface_read_ours(struct huggingface_config *h, const json_t *root, const char *name,
                                         struct error_text *error) {
    bool tied; // the member is only checked: the model's value is in an option
    RETURN_PROBLEM(json_opt_bool(root, "tie_word_embeddings", false, &tied, name, error));
    const struct option_row *rows[CONFIG_ROWS];
    char display[OPTION_NAME];
    const int count = huggingface_own_options(rows);
    for (int i = 0; i < count; i++) {
        const char *option = rows[i]->name, *value = "";
        // A file that is older than an option lacks it; sizes were always there.
        if (!json_object_get(root, option) && strcmp(option, "num_layers") != 0 && strcmp(option, "hidden_size") != 0)
            continue;
        RETURN_PROBLEM(json_get_string(root, option, &value, name, error));
        if (rows[i]->kind != OPTION_STRING && strlen(value) > 30)
            return error_format(error, "%s: %s is '%s'; expected an option's value", name, option,
                                json_show(value).text);
        huggingface_add_setting(h, "%s=%s", option_display(display, option), value);
    }
    huggingface_set_older_biases(h);
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

static const char *huggingface_refuse_type(const char *type, const char *name, struct error_text *error) {
#define NAME_ROW(id, model_type, class_name) ", " model_type
    static const char known[] = ARCHITECTURE_ROWS(NAME_ROW);
#undef NAME_ROW
    static const char ours[] = ", train_gpt, ";
    if (strcmp(type, "gemma3") == 0)
        return error_format(error,
                            "%s: model_type is 'gemma3', a model of images too, which is not supported; expected "
                            "gemma3_text, as Gemma 3 270M and 1B are",
                            name);
    return error_format(error, "%s: model_type is '%s', which is not supported; expected one of %s", name,
                        json_show(type).text, known + sizeof ours - 1);
}
// Reads the config.json `root` into h, zeroed before. Options that it says nothing of are left to the caller, which
// calls huggingface_set_defaults; only a GPT-2's are all set here. The caller frees h in any case.
static const char *huggingface_read_object(struct huggingface_config *h, const json_t *root, const char *name,
                                           struct error_text *error) {
    const char *type = "";
    int64_t vocabulary;
    RETURN_PROBLEM(json_get_string(root, "model_type", &type, name, error));
    if (!architecture_find(&h->architecture, type))
        return huggingface_refuse_type(type, name, error);
    if (json_has(root, "quantization_config"))
        return error_format(error, "%s: quantization_config is set, which is not supported", name);
    RETURN_PROBLEM(json_get_int(root, "vocab_size", 1, HUGGINGFACE_LARGEST, &vocabulary, name, error));
    huggingface_add_setting(h, "vocab-size=%lld", (long long)vocabulary);
    return h->architecture == ARCHITECTURE_OURS ? huggingface_read_ours(h, root, name, error)
                                                : huggingface_read_members(h, root, name, error);
}

const char *huggingface_parse_config(struct huggingface_config *h, const unsigned char *data, uint64_t bytes,
                                     const char *name, struct error_text *error) {
    json_t *root;
    memset(h, 0, sizeof *h);
    RETURN_PROBLEM(json_parse_object(&root, data, bytes, name, error));
    const char *problem = huggingface_read_object(h, root, name, error);
    json_decref(root);
    if (!problem) {
        huggingface_set_defaults(h);
        problem = huggingface_check_settings(h, name, error);
    }
    if (problem)
        huggingface_free(h);
    return problem;
}
