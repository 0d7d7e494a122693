#include "formats/peft_config.h"
#include "runtime/files/file_read.h" // read_whole
#include "runtime/text/json.h"       // json_writer
#include "runtime/text/json_parse.h" // json_parse_object, json_get_*
#include <limits.h>                  // PATH_MAX
#include <math.h>                    // floorf
#include <stdlib.h>                  // malloc, free
#include <string.h>                  // memset, strcmp

enum { PEFT_MAX_BYTES = 16 << 20, PEFT_MAX_RANK = 1 << 20 };

void peft_config_free(struct peft_config *c) {
    free(c->targets);
    free(c->base);
    memset(c, 0, sizeof *c);
}

static const char *const read_keys[] = {"peft_type",
                                        "task_type",
                                        "r",
                                        "lora_alpha",
                                        "lora_dropout",
                                        "bias",
                                        "use_rslora",
                                        "fan_in_fan_out",
                                        "target_modules",
                                        "init_lora_weights",
                                        "base_model_name_or_path"};
// These settings have no effect on what trained adapters compute.
static const char *const idle_keys[] = {
    "auto_mapping",      "revision",   "peft_version",   "inference_mode", "megatron_core",       "layers_pattern",
    "qalora_group_size", "eva_config", "runtime_config", "loftq_config",   "ensure_weight_tying",
};

static bool is_among(const char *key, const char *const *keys, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (strcmp(key, keys[i]) == 0)
            return true;
    return false;
}
// Whether a setting's value says that the setting is not used: null, false, an empty list or object.
static bool is_off(const json_t *value) {
    return json_is_null(value) || json_is_false(value) || (json_is_array(value) && json_array_size(value) == 0) ||
           (json_is_object(value) && json_object_size(value) == 0);
}
static struct json_shown shown(const json_t *value) {
    char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT | JSON_ENSURE_ASCII);
    struct json_shown s = json_show(text ? text : "?");
    free(text);
    return s;
}
// Refuses settings that this program neither reads nor may ignore, unless they are off.
static const char *check_others(const json_t *root, const char *name, struct error_text *error) {
    const char *key;
    json_t *value;
    json_object_foreach ((json_t *)root, key, value) {
        const bool known = is_among(key, read_keys, sizeof read_keys / sizeof *read_keys) ||
                           is_among(key, idle_keys, sizeof idle_keys / sizeof *idle_keys);
        if (!known && !is_off(value))
            return error_format(error,
                                "%s: %s is %s, which this program does not compute; expected null, false or nothing in "
                                "it",
                                name, json_show(key).text, shown(value).text);
    }
    return NULL;
}
// Refuses a text other than `wanted`. With `optional`, the member may be absent or null.
static const char *check_text(const json_t *root, const char *key, const char *wanted, bool optional, const char *name,
                              struct error_text *error) {
    const char *value;
    RETURN_PROBLEM(optional ? json_opt_string(root, key, wanted, &value, name, error)
                            : json_get_string(root, key, &value, name, error));
    if (strcmp(value, wanted) != 0)
        return error_format(error, "%s: %s is '%s'; expected '%s'", name, key, json_show(value).text, wanted);
    return NULL;
}
// Refuses an init_lora_weights with which peft changes the base's weights, or needs more than the two matrices.
static const char *check_initialization(const json_t *root, const char *name, struct error_text *error) {
    static const char *const plain[] = {"gaussian", "orthogonal", "eva"};
    const json_t *value = json_object_get(root, "init_lora_weights");
    if (!value || json_is_boolean(value) || json_is_null(value) ||
        (json_is_string(value) && is_among(json_string_value(value), plain, sizeof plain / sizeof *plain)))
        return NULL;
    return error_format(
        error,
        "%s: init_lora_weights is %s, with which peft changes the base's weights; expected true, false, "
        "\"gaussian\", \"orthogonal\" or \"eva\"",
        name, shown(value).text);
}

// Appends `value`, element `number`, to c->targets (*used bytes). Refuses all but an ASCII name without space or comma.
static const char *add_target(struct peft_config *c, size_t *used, const json_t *value, int number, const char *name,
                              struct error_text *error) {
    char key[48];
    const char *target;
    snprintf(key, sizeof key, "target_modules[%d]", number);
    RETURN_PROBLEM(json_check_string(value, key, &target, name, error));
    const size_t length = strlen(target);
    for (size_t i = 0; i < length; i++)
        if ((unsigned char)target[i] <= ' ' || (unsigned char)target[i] >= 0x7f || target[i] == ',')
            return error_format(error, "%s: %s is '%s'; expected the name of a module", name, key,
                                json_show(target).text);
    if (length == 0)
        return error_format(error, "%s: %s is empty; expected the name of a module", name, key);
    char *targets = (char *)realloc(c->targets, *used + length + 2);
    if (!targets)
        return error_format(error, "%s: out of memory", name);
    c->targets = targets;
    if (*used > 0)
        targets[(*used)++] = ',';
    memcpy(targets + *used, target, length + 1);
    *used += length;
    return NULL;
}
// Sets c->targets from target_modules: names or PEFT_ALL_LINEAR, no regular expression. An error may leave some there.
static const char *read_targets(struct peft_config *c, const json_t *root, const char *name, struct error_text *error) {
    const json_t *value = json_object_get(root, "target_modules");
    size_t used = 0;
    if (json_is_string(value) && strcmp(json_string_value(value), PEFT_ALL_LINEAR) == 0) {
        c->targets = strdup(PEFT_ALL_LINEAR);
        return c->targets ? NULL : error_format(error, "%s: out of memory", name);
    }
    if (json_is_string(value))
        return error_format(error,
                            "%s: target_modules is '%s', which peft takes as a regular expression; expected a list of "
                            "names, or \"" PEFT_ALL_LINEAR "\"",
                            name, json_show(json_string_value(value)).text);
    if (!json_is_array(value) || json_array_size(value) == 0)
        return error_format(error, "%s: target_modules is %s; expected a list of names, or \"" PEFT_ALL_LINEAR "\"",
                            name, json_is_array(value) ? "an empty list" : json_type_name(value));
    for (size_t i = 0; i < json_array_size(value); i++)
        RETURN_PROBLEM(add_target(c, &used, json_array_get(value, i), (int)i, name, error));
    return NULL;
}

bool peft_name_matches(const char *name, size_t length, const char *module) {
    const size_t whole = strlen(module);
    return whole >= length && strncmp(module + whole - length, name, length) == 0 &&
           (whole == length || module[whole - length - 1] == '.');
}

// Fills the zeroed *c from the file's object; after an error the caller frees what was set.
static const char *read_root(struct peft_config *c, const json_t *root, const char *name, struct error_text *error) {
    int64_t rank;
    double alpha, dropout;
    const char *base;
    RETURN_PROBLEM(check_text(root, "peft_type", "LORA", false, name, error));
    RETURN_PROBLEM(check_text(root, "task_type", "CAUSAL_LM", true, name, error));
    RETURN_PROBLEM(json_get_int(root, "r", 1, PEFT_MAX_RANK + 1, &rank, name, error));
    RETURN_PROBLEM(json_get_number(root, "lora_alpha", 1e-6, 1e9, &alpha, name, error));
    RETURN_PROBLEM(json_opt_number(root, "lora_dropout", 0, 0.999999, 0, &dropout, name, error));
    RETURN_PROBLEM(json_opt_bool(root, "use_rslora", false, &c->rslora, name, error));
    RETURN_PROBLEM(json_opt_bool(root, "fan_in_fan_out", false, &c->fan_in_fan_out, name, error));
    RETURN_PROBLEM(check_text(root, "bias", "none", true, name, error));
    RETURN_PROBLEM(check_initialization(root, name, error));
    RETURN_PROBLEM(check_others(root, name, error));
    RETURN_PROBLEM(json_opt_string(root, "base_model_name_or_path", "", &base, name, error));
    c->rank = (int)rank;
    c->alpha = (float)alpha;
    c->dropout = (float)dropout;
    c->base = strdup(base);
    if (!c->base)
        return error_format(error, "%s: out of memory", name);
    return read_targets(c, root, name, error);
}
const char *peft_config_parse(struct peft_config *c, const unsigned char *data, uint64_t bytes, const char *name,
                              struct error_text *error) {
    json_t *root;
    memset(c, 0, sizeof *c);
    const char *problem = json_parse_object(&root, data, bytes, name, error);
    if (!problem)
        problem = read_root(c, root, name, error);
    json_decref(root);
    if (problem)
        peft_config_free(c);
    return problem;
}
const char *peft_config_read(struct peft_config *c, const char *folder, struct error_text *error) {
    char path[PATH_MAX];
    unsigned char *data = NULL;
    uint64_t bytes;
    memset(c, 0, sizeof *c);
    if ((size_t)snprintf(path, sizeof path, "%s/" PEFT_CONFIG_NAME, folder) >= sizeof path)
        return error_format(error, "%.500s: the name is too long", folder);
    RETURN_PROBLEM(read_whole(&data, &bytes, PEFT_MAX_BYTES, path, "the settings of peft's adapters", error));
    const char *problem = peft_config_parse(c, data, bytes, path, error);
    free(data);
    return problem;
}

// Writes lora_alpha, as an integer where it is whole: peft declares an integer, but takes any number.
static void write_alpha(struct json *json, float alpha) {
    if (alpha == floorf(alpha))
        json_int(json, "lora_alpha", (int64_t)alpha);
    else
        json_float(json, "lora_alpha", alpha);
}
static void write_targets(struct json *json, const char *targets) {
    if (strcmp(targets, PEFT_ALL_LINEAR) == 0) {
        json_str(json, "target_modules", targets);
        return;
    }
    json_array_begin(json, "target_modules");
    while (*targets) {
        const size_t length = strcspn(targets, ",");
        char *const name = strndup(targets, length);
        json_str(json, NULL, name ? name : "");
        free(name);
        targets += length + (targets[length] == ',');
    }
    json_array_end(json);
}
void peft_config_write(FILE *out, const struct peft_config *c) {
    static const char *const empty_objects[] = {"alpha_pattern", "rank_pattern"};
    static const char *const none[] = {"layers_to_transform", "modules_to_save"};
    struct json json = json_writer(out, true);
    json_object_begin(&json, NULL);
    json_str(&json, "peft_type", "LORA");
    json_str(&json, "task_type", "CAUSAL_LM");
    if (*c->base)
        json_str(&json, "base_model_name_or_path", c->base);
    else
        json_none(&json, "base_model_name_or_path");
    json_int(&json, "r", c->rank);
    write_alpha(&json, c->alpha);
    json_decimal(&json, "lora_dropout", c->dropout);
    json_bool(&json, "use_rslora", c->rslora);
    write_targets(&json, c->targets);
    json_bool(&json, "fan_in_fan_out", c->fan_in_fan_out);
    json_str(&json, "bias", "none");
    json_bool(&json, "use_dora", false);
    json_bool(&json, "inference_mode", true);
    json_bool(&json, "init_lora_weights", true);
    for (size_t i = 0; i < sizeof empty_objects / sizeof *empty_objects; i++) {
        json_object_begin(&json, empty_objects[i]);
        json_object_end(&json);
    }
    for (size_t i = 0; i < sizeof none / sizeof *none; i++)
        json_none(&json, none[i]);
    json_object_end(&json);
}
