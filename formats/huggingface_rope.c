// Reads the rotary settings of config.json. Before transformers 5 they are rope_theta at the top and rope_scaling,
// later all in rope_parameters; files have either or both, which then must agree. Gemma 3 and OLMo 3 have an object for
// each kind of layer in rope_parameters; the rest is the full layers'. Source: transformers' modeling_rope_utils.py.
#include <stdlib.h> // atoi
#include <string.h> // strcmp

#include "formats/huggingface_traits.h"

// Whether two JSON values are equal; an integer equals a real of the same value, but not within a list.
static bool values_equal(const json_t *a, const json_t *b) {
    if (json_is_number(a) && json_is_number(b))
        return json_number_value(a) == json_number_value(b);
    return json_equal((json_t *)a, (json_t *)b);
}
// Whether a member is known. An unknown one might change the frequencies. `finetuned` is only a remark.
static bool rope_member_is_known(const char *key) {
    static const char *const known[] = {
        "rope_type",      "type",
        "rope_theta",     "partial_rotary_factor",
        "factor",         "low_freq_factor",
        "beta_fast",      "high_freq_factor",
        "beta_slow",      "original_max_position_embeddings",
        "truncate",       "mscale",
        "mscale_all_dim", "attention_factor",
        "short_factor",   "long_factor",
        "finetuned",
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(key, known[i]) == 0)
            return true;
    return false;
}
// Adds the members of `from` (NULL: none) to `rope`. Renames `type` to rope_type, and leaves out null members. Refuses
// an unknown member, an object, and a value other than the one that `rope` has. where: what messages call `from`.
static const char *rope_add(json_t *rope, json_t *from, const char *where, const char *name, struct error_text *error) {
    const char *key;
    json_t *value;
    json_object_foreach (from, key, value) {
        const char *to = strcmp(key, "type") == 0 ? "rope_type" : key; // an older name
        if (json_is_object(value))
            return error_format(error, "%s: %s has %s for layers of a kind, which is not supported", name, where,
                                json_show(key).text);
        if (!rope_member_is_known(key))
            return error_format(error, "%s: %s has '%s', which is not supported", name, where, json_show(key).text);
        if (json_is_null(value) || (to != key && json_has(from, to)))
            continue;
        if (json_has(rope, to) && !values_equal(json_object_get(rope, to), value))
            return error_format(error, "%s: rope_scaling and %s have another %s each; remove one of them", name, where,
                                to);
        json_object_set(rope, to, value);
    }
    return NULL;
}

// *type = the scaling that rope_type names; absent: none. It is an error if the class does not take the word.
static const char *rope_type_of(enum rope_scaling_type *type, const json_t *rope, enum architecture a, const char *name,
                                struct error_text *error) {
    static const struct {
        const char *word;
        enum rope_scaling_type type;
        bool of_phi3;
    } words[] = {
        {"default", SCALING_NONE, true},  {"linear", SCALING_LINEAR, false},    {"llama3", SCALING_LLAMA3, false},
        {"yarn", SCALING_YARN, false},    {"longrope", SCALING_LONGROPE, true}, {"su", SCALING_LONGROPE, true},
        {"yarn", SCALING_LONGROPE, true}, // older names, only Phi-3's
    };
    const char *word;
    RETURN_PROBLEM(json_opt_string(rope, "rope_type", "default", &word, name, error));
    const bool phi3 = a == ARCHITECTURE_PHI3;
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strcmp(word, words[i].word) == 0 && (phi3 ? words[i].of_phi3 : i < 5)) {
            *type = words[i].type;
            return NULL;
        }
    return error_format(error, "%s: rope_type is '%s', which is not supported; expected %s", name, json_show(word).text,
                        phi3 ? "default or longrope" : "default, linear, llama3, yarn or longrope");
}

// Sets an option from the member `key`, a number of at least `least`, by default `fallback`.
static const char *rope_number(struct huggingface_config *h, const json_t *rope, const char *key, double least,
                               double fallback, const char *option, const char *name, struct error_text *error) {
    double value;
    RETURN_PROBLEM(json_opt_number(rope, key, least, 1e30, fallback, &value, name, error));
    huggingface_add_setting(h, "%s=%s", option, huggingface_show(value).text);
    return NULL;
}
// Sets an option from the member `key`, a number of at least 1e-6, which must be there.
static const char *rope_needs(struct huggingface_config *h, const json_t *rope, const char *key, const char *option,
                              const char *name, struct error_text *error) {
    double value;
    RETURN_PROBLEM(json_get_number(rope, key, 1e-6, 1e30, &value, name, error));
    huggingface_add_setting(h, "%s=%s", option, huggingface_show(value).text);
    return NULL;
}
// Sets an option from the member `key`, a list with a number for each of `pairs` pairs of rotated elements.
static const char *rope_list(struct huggingface_config *h, const json_t *rope, const char *key, size_t pairs,
                             const char *option, const char *name, struct error_text *error) {
    json_t *list;
    char *text = NULL;
    size_t bytes = 0;
    RETURN_PROBLEM(json_get_array(rope, key, &list, name, error));
    if (json_array_size(list) != pairs)
        return error_format(error, "%s: %s has %zu numbers; expected %zu, one for each pair of rotated elements", name,
                            key, json_array_size(list), pairs);
    FILE *out = open_memstream(&text, &bytes);
    bool good = out != NULL;
    for (size_t i = 0; i < pairs && good; i++) {
        const json_t *value = json_array_get(list, i);
        good = json_is_number(value) && json_number_value(value) >= 1e-6;
        fprintf(out, "%s%s", i ? "," : "", huggingface_show(json_number_value(value)).text);
    }
    if (out)
        fclose(out);
    if (good)
        huggingface_add_setting(h, "%s=%s", option, text);
    free(text);
    return good ? NULL : error_format(error, "%s: %s is not a list of numbers of at least 1e-6", name, key);
}

// *original = the longest sequence before the scaling: root's member, else rope's, else max_position_embeddings.
// Without root's member, Phi-3 has 4096. It is an error if root and rope differ.
static const char *rope_original(int64_t *original, const json_t *root, const json_t *rope, enum architecture a,
                                 const char *name, struct error_text *error) {
    static const char key[] = "original_max_position_embeddings";
    const bool at_top = a == ARCHITECTURE_PHI3 || json_has(root, key);
    int64_t longest, inner;
    RETURN_PROBLEM(json_get_int(root, "max_position_embeddings", 1, HUGGINGFACE_LARGEST, &longest, name, error));
    if (a == ARCHITECTURE_PHI3)
        longest = 4096; // the class's default
    RETURN_PROBLEM(json_opt_int(at_top ? root : rope, key, 1, HUGGINGFACE_LARGEST, longest, original, name, error));
    RETURN_PROBLEM(json_opt_int(rope, key, 1, HUGGINGFACE_LARGEST, *original, &inner, name, error));
    return inner == *original ? NULL
                              : error_format(error,
                                             "%s: %s is %lld among the rotary settings, but %lld at the top, which "
                                             "transformers takes; make them equal",
                                             name, key, (long long)inner, (long long)*original);
}
// Sets the scaling's factor to the member of `rope`; where absent, to max_position_embeddings / original.
static const char *rope_factor(struct huggingface_config *h, const json_t *root, const json_t *rope, int64_t original,
                               const char *name, struct error_text *error) {
    int64_t longest;
    RETURN_PROBLEM(json_get_int(root, "max_position_embeddings", 1, HUGGINGFACE_LARGEST, &longest, name, error));
    return rope_number(h, rope, "factor", 1e-6, (double)longest / (double)original, "rope-scaling-factor", name, error);
}
// Sets YaRN's options except factor, original length and attention factor. Absent members: transformers' defaults.
static const char *rope_yarn(struct huggingface_config *h, const json_t *rope, const char *name,
                             struct error_text *error) {
    double fast, slow, mscale, all_dim;
    bool truncate;
    RETURN_PROBLEM(json_opt_number(rope, "beta_fast", 0, 1e30, 32, &fast, name, error));
    RETURN_PROBLEM(json_opt_number(rope, "beta_slow", 0, 1e30, 1, &slow, name, error));
    RETURN_PROBLEM(json_opt_number(rope, "mscale", 0, 1e30, 0, &mscale, name, error));
    RETURN_PROBLEM(json_opt_number(rope, "mscale_all_dim", 0, 1e30, 0, &all_dim, name, error));
    RETURN_PROBLEM(json_opt_bool(rope, "truncate", true, &truncate, name, error));
    huggingface_add_setting(h, "yarn-beta-fast=%s", huggingface_show(fast != 0 ? fast : 32).text); // 0 counts as absent
    huggingface_add_setting(h, "yarn-beta-slow=%s", huggingface_show(slow != 0 ? slow : 1).text);
    huggingface_add_setting(h, "yarn-mscale=%s", huggingface_show(mscale).text);
    huggingface_add_setting(h, "yarn-mscale-all-dim=%s", huggingface_show(all_dim).text);
    huggingface_add_setting(h, "yarn-truncate=%s", truncate ? "true" : "false");
    return NULL;
}
static const char *rope_attention_factor(struct huggingface_config *h, const json_t *rope, const char *name,
                                         struct error_text *error) {
    return json_has(rope, "attention_factor")
               ? rope_needs(h, rope, "attention_factor", "rope-attention-factor", name, error)
               : NULL;
}
// Sets the scaling's type and options. pairs: the number of rotated pairs of a head, and of longrope's factors.
static const char *rope_scaling(struct huggingface_config *h, const json_t *root, const json_t *rope,
                                enum rope_scaling_type type, size_t pairs, const char *name, struct error_text *error) {
    char word[OPTION_NAME];
    int64_t original = 0;
    const bool has_original = type == SCALING_LLAMA3 || type == SCALING_YARN || type == SCALING_LONGROPE;
    huggingface_add_setting(h, "rope-scaling-type=%s",
                            option_choice_name(CHOICES(ROPE_SCALING_TYPES), (int)type, word));
    if (has_original) {
        RETURN_PROBLEM(rope_original(&original, root, rope, h->architecture, name, error));
        huggingface_add_setting(h, "rope-original-max-position-embeddings=%lld", (long long)original);
    }
    switch (type) {
    case SCALING_NONE: return NULL;
    case SCALING_LINEAR: return rope_needs(h, rope, "factor", "rope-scaling-factor", name, error);
    case SCALING_LLAMA3:
        RETURN_PROBLEM(rope_needs(h, rope, "factor", "rope-scaling-factor", name, error));
        RETURN_PROBLEM(rope_needs(h, rope, "low_freq_factor", "rope-low-freq-factor", name, error));
        return rope_needs(h, rope, "high_freq_factor", "rope-high-freq-factor", name, error);
    case SCALING_YARN:
        RETURN_PROBLEM(rope_factor(h, root, rope, original, name, error));
        RETURN_PROBLEM(rope_yarn(h, rope, name, error));
        return rope_attention_factor(h, rope, name, error);
    case SCALING_LONGROPE:
        RETURN_PROBLEM(rope_factor(h, root, rope, original, name, error));
        RETURN_PROBLEM(rope_list(h, rope, "short_factor", pairs, "rope-short-factors", name, error));
        RETURN_PROBLEM(rope_list(h, rope, "long_factor", pairs, "rope-long-factors", name, error));
        return rope_attention_factor(h, rope, name, error);
    }
    __builtin_unreachable();
}

// *partial = the fraction of a head's elements that is rotated: from `rope`, else from `root`, else the class's. For a
// class that always rotates all, refuses a fraction other than 1 in either place.
static const char *rope_partial(double *partial, const json_t *root, const json_t *rope,
                                const struct architecture_traits *t, const char *name, struct error_text *error) {
    static const char key[] = "partial_rotary_factor";
    const bool neox = t->form == FORM_GPT_NEOX;
    const double usual = t->partial_rotary != 0 ? t->partial_rotary : 1;
    RETURN_PROBLEM(json_opt_number(root, neox ? "rotary_pct" : key, 0, 1, usual, partial, name, error));
    if (t->partial_rotary == 0 && *partial == 1)
        RETURN_PROBLEM(json_opt_number(rope, key, 0, 1, 1, partial, name, error));
    if (t->partial_rotary == 0 && *partial != 1)
        return error_format(error, "%s: partial_rotary_factor is %g, which is not supported; expected 1", name,
                            *partial);
    return json_opt_number(rope, key, 0, 1, *partial, partial, name, error);
}
// *theta = rope_theta among the rotary settings, else at the top, else the class's default.
static const char *rope_theta_of(double *theta, const json_t *root, const json_t *rope,
                                 const struct architecture_traits *t, const char *name, struct error_text *error) {
    const char *top = t->form == FORM_GPT_NEOX ? "rotary_emb_base" : "rope_theta";
    RETURN_PROBLEM(json_opt_number(root, top, 1, 1e30, t->theta, theta, name, error));
    return json_opt_number(rope, "rope_theta", 1, 1e30, *theta, theta, name, error);
}

// Sets, if a window was set, the windowed layers' theta where their settings, `sliding`, differ from the full layers'.
// sliding NULL: they have no scaling, and the default theta. Refuses a scaling of theirs that is not the full layers'.
static const char *rope_local(struct huggingface_config *h, const json_t *root, const json_t *full, double full_theta,
                              json_t *sliding, const struct architecture_traits *t, const char *name,
                              struct error_text *error) {
    json_t *local = json_object();
    enum rope_scaling_type type = SCALING_NONE, full_type = SCALING_NONE;
    double theta = full_theta, usual = t->local_theta != 0 ? t->local_theta : full_theta;
    const char *problem = rope_add(local, sliding, "rope_parameters.sliding_attention", name, error);
    if (!problem)
        problem = rope_type_of(&type, local, h->architecture, name, error);
    if (!problem)
        problem = rope_type_of(&full_type, full, h->architecture, name, error);
    if (!problem && t->local_theta != 0)
        problem = json_opt_number(root, "rope_local_base_freq", 1, 1e30, usual, &usual, name, error);
    if (!problem)
        problem = json_opt_number(local, "rope_theta", 1, 1e30, usual, &theta, name, error);
    const bool same =
        full_type == type && theta == full_theta && (type == SCALING_NONE || json_equal(local, (json_t *)full));
    if (!problem && type != SCALING_NONE && !same)
        problem = error_format(error,
                               "%s: rope_parameters.sliding_attention has a scaling of its own, which is not "
                               "supported; expected rope_type default",
                               name);
    const char *window = huggingface_setting(h, "window-size");
    if (!problem && !same && window && strcmp(window, "none") != 0)
        huggingface_add_setting(h, "rotary-base-local=%s", huggingface_show(theta).text);
    json_decref(local);
    return problem;
}

// Fills the empty `rope` from rope_scaling and rope_parameters. *sliding = the windowed layers' own object, or NULL.
static const char *rope_gather(json_t *rope, json_t **sliding, const json_t *root, const struct architecture_traits *t,
                               const char *name, struct error_text *error) {
    json_t *scaling, *parameters, *full;
    *sliding = NULL;
    RETURN_PROBLEM(json_opt_object(root, "rope_scaling", &scaling, name, error));
    RETURN_PROBLEM(json_opt_object(root, "rope_parameters", &parameters, name, error));
    RETURN_PROBLEM(rope_add(rope, scaling, "rope_scaling", name, error));
    const bool nested = t->rope_by_layers && parameters &&
                        (json_has(parameters, "full_attention") || json_has(parameters, "sliding_attention"));
    if (!nested)
        return rope_add(rope, parameters, "rope_parameters", name, error);
    const char *key;
    json_t *value;
    json_object_foreach (parameters, key, value)
        if (strcmp(key, "full_attention") != 0 && strcmp(key, "sliding_attention") != 0 && strcmp(key, "truncate") != 0)
            return error_format(error, "%s: rope_parameters has '%s' beside full_attention, which is not supported",
                                name, json_show(key).text);
    RETURN_PROBLEM(json_opt_object(parameters, "full_attention", &full, name, error));
    RETURN_PROBLEM(json_opt_object(parameters, "sliding_attention", sliding, name, error));
    RETURN_PROBLEM(rope_add(rope, full, "rope_parameters.full_attention", name, error));
    // transformers takes truncate only from the outer object.
    bool inner, outer;
    RETURN_PROBLEM(json_opt_bool(rope, "truncate", true, &inner, name, error));
    RETURN_PROBLEM(json_opt_bool(parameters, "truncate", true, &outer, name, error));
    if (json_has(rope, "truncate") && inner != outer)
        return error_format(error, "%s: truncate is %s in full_attention, but %s in rope_parameters", name,
                            inner ? "true" : "false", outer ? "true" : "false");
    if (!outer)
        json_object_set_new(rope, "truncate", json_false());
    return NULL;
}

// Sets the rotary settings of a CWM whose file has no rope_parameters or rope_scaling. Its rope_theta is ignored.
static void rope_set_cwm(json_t *rope) {
    json_object_set_new(rope, "rope_type", json_string("llama3"));
    json_object_set_new(rope, "rope_theta", json_real(1e6));
    json_object_set_new(rope, "factor", json_real(16));
    json_object_set_new(rope, "low_freq_factor", json_real(1));
    json_object_set_new(rope, "high_freq_factor", json_real(4));
    json_object_set_new(rope, "original_max_position_embeddings", json_integer(8192));
}
// Sets all options of rotary positions. Heads and windows are set before. rope: an empty object, to gather settings in.
static const char *rope_read(struct huggingface_config *h, const json_t *root, json_t *rope,
                             const struct architecture_traits *t, const char *name, struct error_text *error) {
    json_t *sliding;
    enum rope_scaling_type type = SCALING_NONE;
    double theta = 0, partial = 1;
    RETURN_PROBLEM(rope_gather(rope, &sliding, root, t, name, error));
    if (h->architecture == ARCHITECTURE_CWM && json_object_size(rope) == 0)
        rope_set_cwm(rope);
    RETURN_PROBLEM(rope_type_of(&type, rope, h->architecture, name, error));
    RETURN_PROBLEM(rope_partial(&partial, root, rope, t, name, error));
    RETURN_PROBLEM(rope_theta_of(&theta, root, rope, t, name, error));
    const int rotated = (int)(atoi(huggingface_setting(h, "kv-channels")) * partial);
    if (rotated < 2 || rotated % 2 != 0)
        return error_format(error, "%s: RoPE rotates %d elements of a head; expected an even number", name, rotated);
    huggingface_add_setting(h, "rotary-base=%s", huggingface_show(theta).text);
    huggingface_add_setting(h, "rotary-percent=%s", huggingface_show(partial).text);
    RETURN_PROBLEM(rope_scaling(h, root, rope, type, (size_t)rotated / 2, name, error));
    return t->rope_by_layers ? rope_local(h, root, rope, theta, sliding, t, name, error) : NULL;
}
const char *huggingface_read_rope(struct huggingface_config *h, const json_t *root, const struct architecture_traits *t,
                                  const char *name, struct error_text *error) {
    json_t *rope = json_object();
    const char *problem = rope_read(h, root, rope, t, name, error);
    json_decref(rope);
    return problem;
}
