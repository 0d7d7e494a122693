// A file of options: config.json, which a run writes into --out, or a file that a user wrote; --config reads either. It
// is an object with a member for each option; an option without one has its default. A run's file has all options as
// resolved. Two more members tell what the user gave: "given" names these options, "left_open" has values that the run
// chose for others. A value edited later counts as given. In a file without "given" all options count as given.
#pragma once
#include "config/config.h"            // struct config
#include "runtime/files/file_read.h"  // is_pipe, read_whole
#include "runtime/machine/error.h"    // fail
#include "runtime/machine/text_add.h" // text_copy
#include "runtime/text/json.h"        // json_writer
#include "runtime/text/json_parse.h"  // json_parse_object
#include <errno.h>                    // errno
#include <stdlib.h>                   // free
#include <string.h>                   // strerror

enum { CONFIG_FILE_BYTES = 1 << 20 }; // the most that is read
#define CONFIG_FILE_GIVEN "given"
#define CONFIG_FILE_LEFT_OPEN "left_open"

// Whether a row is --recompute-granularity or an option that its auto may set: layer modules, state types, offloading.
static inline bool config_auto_chooses(int row) {
    const int rows[] = {CONFIG_ROW(recompute.recompute_layer_modules), CONFIG_ROW(states.main_params_dtype),
                        CONFIG_ROW(states.main_grads_dtype),           CONFIG_ROW(states.exp_avg_dtype),
                        CONFIG_ROW(states.exp_avg_sq_dtype),           CONFIG_ROW(states.optimizer_cpu_offload),
                        CONFIG_ROW(states.optimizer_offload_fraction), CONFIG_ROW(states.cpu_offloading_num_layers),
                        CONFIG_ROW(states.offload_gradients),          CONFIG_ROW(states.offload_weights),
                        CONFIG_ROW(recompute.recompute_granularity)};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i] == row)
            return true;
    return false;
}

static inline bool config_is_default(const struct config *config, int row) {
    struct config defaults;
    char text[OPTION_TEXT], default_text[OPTION_TEXT];
    memset(&defaults, 0, sizeof defaults);
    option_set(&config_rows[row], &defaults, config_rows[row].default_text);
    if (config_rows[row].kind == OPTION_LIST)
        return *(const char *const *)((const char *)config + config_rows[row].offset) == NULL ||
               **(const char *const *)((const char *)config + config_rows[row].offset) == 0;
    return strcmp(option_text(text, &config_rows[row], config),
                  option_text(default_text, &config_rows[row], &defaults)) == 0;
}
static inline bool config_names_first_weights(int row) {
    return row == CONFIG_ROW(checkpoints.init_from) || row == CONFIG_ROW(checkpoints.init_from_ema) ||
           row == CONFIG_ROW(finetuning.lora_adapter);
}
// Whether config.json lists a row's option as "given": the user gave it, or it differs from its default and was chosen
// by --recompute-granularity auto or names the first weights. Never lists --out, --resume, --new-data and --config.
static inline bool config_file_lists_as_given(const struct config *config, int row) {
    const bool of_one_run = row == CONFIG_ROW(data.out) || row == CONFIG_ROW(checkpoints.resume) ||
                            row == CONFIG_ROW(data.new_data) || row == CONFIG_ROW(data.config);
    const bool by_auto = config->asked && config->asked->recompute.recompute_granularity == RECOMPUTE_AUTO &&
                         config_auto_chooses(row) && !config_is_default(config, row);
    const bool found = config_names_first_weights(row) && !config_is_default(config, row);
    return !of_one_run && (config->typed[row] || by_auto || found);
}

// Writes config.json, which has all options, to `path`, also over an old file. A pipe or a failure ends the program.
static inline void config_write_json(const struct config *config, const char *path) {
    if (is_pipe(path))
        fail("%s: is a pipe, not a regular file; remove it", path);
    FILE *const file = fopen(path, "w");
    if (!file)
        fail("%s: cannot be written: %s", path, strerror(errno));
    struct json json = json_writer(file, true);
    json_object_begin(&json, NULL);
    options_write_json(&config_options, config, &json);
    json_array_begin(&json, CONFIG_FILE_GIVEN);
    for (int row = 0; row < CONFIG_ROWS; row++)
        if (config_rows[row].kind != OPTION_GROUP && config_file_lists_as_given(config, row))
            json_str(&json, NULL, config_rows[row].name);
    json_array_end(&json);
    json_object_begin(&json, CONFIG_FILE_LEFT_OPEN);
    for (int row = 0; row < CONFIG_ROWS; row++)
        if (config_rows[row].kind != OPTION_GROUP && !config_file_lists_as_given(config, row) &&
            !config_is_default(config, row))
            option_write_json(&config_rows[row], config, &json);
    json_object_end(&json);
    json_object_end(&json);
    const bool written = !ferror(file);
    if (fclose(file) != 0 || !written)
        fail("%s: cannot be written: %s", path, strerror(errno));
}

// Returns the row of an option by its whole name, with dashes or underscores; ends the program where there is none.
static inline int config_file_row(const char *path, const char *name) {
    char wanted[OPTION_NAME], display[OPTION_NAME], hint[OPTION_TEXT];
    option_display(wanted, name);
    for (int row = 0; row < CONFIG_ROWS; row++)
        if (config_rows[row].kind != OPTION_GROUP &&
            strcmp(option_display(display, config_rows[row].name), wanted) == 0 && strlen(name) < OPTION_NAME)
            return row;
    fail("--config %s: '%s' is no option; %s", path, json_show(name).text, options_hint(&config_options, name, hint));
}

// Sets an option from a text, to which a string then points, or adds a copy to a list. A wrong text ends the program.
static inline void config_file_set_text(const char *path, struct config *config, int row, const char *text) {
    char expected[OPTION_TEXT];
    const struct option_value *const meant = options_value_of(&config_options, &config_rows[row], text);
    option_expected(&config_rows[row], expected);
    if (meant && !meant->value)
        fail("--config %s: %s is '%s', which is not offered, since %s; expected %s", path, config_rows[row].name,
             json_show(text).text, meant->why, expected);
    const char *const problem =
        option_read(&config_rows[row], option_field(&config_rows[row], config), meant ? meant->value : text);
    if (!problem)
        return;
    fail("--config %s: %s is '%s', which is %s; expected %s", path, config_rows[row].name, json_show(text).text,
         problem, expected);
}
// Adds copies of the elements in a text to a list. OPTION_LIST_END separates elements, and may end the last one too.
static inline void config_file_add_elements(const char *path, struct config *config, int row, const char *text) {
    while (*text) {
        const size_t length = strcspn(text, "\x1e");
        char *const element = text_copy(text);
        element[length] = 0;
        config_file_set_text(path, config, row, element);
        free(element);
        text += length + (text[length] != 0);
    }
}
// Sets an option by a JSON value, into which strings point, or adds the elements to a list. Bad values end the program.
static inline void config_file_set(const char *path, struct config *config, int row, const json_t *value) {
    char text[OPTION_TEXT], expected[OPTION_TEXT];
    const char *string = NULL;
    struct error_text error;
    const bool list = config_rows[row].kind == OPTION_LIST;
    switch (json_typeof(value)) {
    case JSON_TRUE: snprintf(text, sizeof text, "true"); break;
    case JSON_FALSE: snprintf(text, sizeof text, "false"); break;
    case JSON_INTEGER: snprintf(text, sizeof text, "%lld", (long long)json_integer_value(value)); break;
    case JSON_REAL: snprintf(text, sizeof text, "%.17g", json_real_value(value)); break;
    case JSON_STRING: {
        const char *const problem = json_check_string(value, config_rows[row].name, &string, path, &error);
        if (problem)
            fail("--config %s", problem);
        break;
    }
    case JSON_ARRAY:
        for (size_t i = 0; list && i < json_array_size(value); i++)
            config_file_set(path, config, row, json_array_get(value, i));
        if (list)
            return;
        // fall through
    case JSON_OBJECT:
    case JSON_NULL:
        if (json_is_null(value) && options_value_of(&config_options, &config_rows[row], "null")) {
            snprintf(text, sizeof text, "null");
            break;
        }
        option_expected(&config_rows[row], expected);
        fail("--config %s: %s is %s; expected %s", path, config_rows[row].name, json_type_name(value), expected);
    }
    if (!string && config_rows[row].kind == OPTION_STRING)
        string = text_copy(text); // "window_size": 4096
    if (list)
        config_file_add_elements(path, config, row, string ? string : text);
    else
        config_file_set_text(path, config, row, string ? string : text);
}

// Whether the run, not the user, chose a value in the file: `given` is not NULL and doesn't list the option, and
// left_open has this value or, if it lacks the option, the value is the default. A wrong member ends the program.
static inline bool config_file_leaves_open(const char *path, int row, const json_t *value, const json_t *given,
                                           const json_t *left_open) {
    struct config now;
    if (!given)
        return false;
    for (size_t i = 0; i < json_array_size(given); i++) {
        const char *const name = json_string_value(json_array_get(given, i));
        if (name && config_file_row(path, name) == row)
            return false;
    }
    const json_t *const then = left_open ? json_object_get(left_open, config_rows[row].name) : NULL;
    if (then)
        return json_equal(then, value);
    memset(&now, 0, sizeof now);
    option_set(&config_rows[row], &now, config_rows[row].default_text);
    config_file_set(path, &now, row, value);
    return config_is_default(&now, row);
}

// Sets the options in --config's file, and marks them as given. Skips options that are given already, and values that
// the file's run chose. Strings point into config->file, which is set here. Ends the program without a valid file.
static inline void config_read_file(struct config *config) {
    const char *const path = config->data.config, *name;
    unsigned char *data = NULL;
    uint64_t bytes;
    struct error_text error;
    json_t *root = NULL, *given = NULL, *left_open = NULL, *value;
    const char *problem = read_whole(&data, &bytes, CONFIG_FILE_BYTES, path, "a JSON file of options", &error);
    if (!problem)
        problem = json_parse_object(&root, data, bytes, path, &error);
    if (!problem)
        problem = json_opt_array(root, CONFIG_FILE_GIVEN, &given, path, &error);
    if (!problem)
        problem = json_opt_object(root, CONFIG_FILE_LEFT_OPEN, &left_open, path, &error);
    if (problem)
        fail("--config %s", problem);
    json_object_foreach (root, name, value) {
        if (strcmp(name, CONFIG_FILE_GIVEN) == 0 || strcmp(name, CONFIG_FILE_LEFT_OPEN) == 0)
            continue;
        const int row = config_file_row(path, name);
        if (row == CONFIG_ROW(data.config) && !given)
            fail("--config %s: names another file by '%s'; put its options here", path, json_show(name).text);
        if (config->given[row] || config_file_leaves_open(path, row, value, given, left_open))
            continue;
        config_file_set(path, config, row, value);
        config->given[row] = true;
    }
    config->file = root;
    free(data);
}
