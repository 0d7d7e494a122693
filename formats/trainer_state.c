#include "formats/trainer_state.h"
#include "runtime/files/file_read.h" // read_whole
#include "runtime/machine/error.h"   // fail
#include "runtime/text/json.h"       // json_writer
#include "runtime/text/json_parse.h" // json_parse_object, json_get_*
#include <limits.h>                  // PATH_MAX
#include <math.h>                    // NAN
#include <stdlib.h>                  // calloc, free
#include <string.h>                  // memset, strcmp

void trainer_state_free(struct trainer_state *state) {
    free(state->files);
    free(state->changes);
    json_decref(state->root);
    memset(state, 0, sizeof *state);
}

// ---------------------------------------------------------------------------------------------------------------------
// Writing

// Writes the objects "given" and "resolved": options as texts, by their names with underscores.
static void trainer_state_write_options(struct json *json, const struct options *options, const void *asked,
                                        const bool *given, const void *resolved) {
    char text[OPTION_TEXT];
    json_object_begin(json, "given");
    for (int i = 0; i < options->count; i++)
        if (given[i])
            json_str(json, options->rows[i].name, option_text(text, &options->rows[i], asked));
    json_object_end(json);
    json_object_begin(json, "resolved");
    for (int i = 0; i < options->count; i++)
        if (options->rows[i].kind != OPTION_GROUP)
            json_str(json, options->rows[i].name, option_text(text, &options->rows[i], resolved));
    json_object_end(json);
}

void trainer_state_write(FILE *out, const struct trainer_state *state, const struct options *options, const void *asked,
                         const bool *given, const void *resolved) {
    struct json json = json_writer(out, true);
    json_object_begin(&json, NULL);
    json_int(&json, "version", 1);
    json_int(&json, "step", state->step);
    json_int(&json, "skipped", state->skipped);
    json_int(&json, "empty", state->empty);
    json_uint(&json, "samples", state->samples);
    json_uint(&json, "micro_steps", state->micro_steps);
    json_double(&json, "best_val_loss", state->best_val_loss);
    json_int(&json, "best_val_step", state->best_val_step);
    json_bool(&json, "validation_due", state->validation_due);
    json_str(&json, "precision", state->precision);
    if (state->base_folder) {
        json_object_begin(&json, "base");
        json_str(&json, "folder", state->base_folder);
        json_str(&json, "digest", state->base_digest);
        json_object_end(&json);
    }
    json_array_begin(&json, "files");
    for (int i = 0; i < state->num_files; i++) {
        json_object_begin(&json, NULL);
        json_str(&json, "name", state->files[i].name);
        json_uint(&json, "tokens", state->files[i].tokens);
        if (state->files[i].digest)
            json_uint(&json, "digest", state->files[i].digest);
        json_object_end(&json);
    }
    json_array_end(&json);
    json_array_begin(&json, "data_changes");
    for (int i = 0; i < state->num_changes; i++) {
        json_object_begin(&json, NULL);
        json_uint(&json, "first_epoch", state->changes[i].first_epoch);
        json_int(&json, "files", state->changes[i].files);
        json_object_end(&json);
    }
    json_array_end(&json);
    trainer_state_write_options(&json, options, asked, given, resolved);
    json_object_end(&json);
}

// ---------------------------------------------------------------------------------------------------------------------
// Reading

// The limit of counts in a state: far above what a run reaches, and far below what 63 bits hold.
static const int64_t TRAINER_MAX = (int64_t)1 << 60;

// *value = the member `key`, a count from 0 to below TRAINER_MAX, which must be there.
static const char *trainer_state_count(const json_t *object, const char *key, uint64_t *value, const char *name,
                                       struct error_text *error) {
    int64_t count = 0;
    RETURN_PROBLEM(json_get_int(object, key, 0, TRAINER_MAX, &count, name, error));
    *value = (uint64_t)count;
    return NULL;
}

// Sets files and num_files; the names are root's.
static const char *trainer_state_read_files(struct trainer_state *state, const char *name, struct error_text *error) {
    json_t *files;
    RETURN_PROBLEM(json_get_array(state->root, "files", &files, name, error));
    if (json_array_size(files) == 0 || json_array_size(files) > 1 << 24)
        return error_format(error, "%s: files has %zu members; expected 1 to 2^24", name, json_array_size(files));
    state->num_files = (int)json_array_size(files);
    state->files = (struct trainer_file *)calloc((size_t)state->num_files, sizeof *state->files);
    if (!state->files)
        return error_format(error, "%s: out of memory for %d files", name, state->num_files);
    for (int i = 0; i < state->num_files; i++) {
        const json_t *file = json_array_get(files, (size_t)i);
        RETURN_PROBLEM(json_get_string(file, "name", &state->files[i].name, name, error));
        RETURN_PROBLEM(trainer_state_count(file, "tokens", &state->files[i].tokens, name, error));
        int64_t digest;
        RETURN_PROBLEM(json_opt_int(file, "digest", 1, INT64_MAX, 0, &digest, name, error));
        state->files[i].digest = (uint64_t)digest;
    }
    return NULL;
}

// Reads the data changes: the first must begin at epoch 0, each have more files than its predecessor, and the last have
// all.
static const char *trainer_state_read_changes(struct trainer_state *state, const char *name, struct error_text *error) {
    json_t *changes;
    RETURN_PROBLEM(json_get_array(state->root, "data_changes", &changes, name, error));
    if (json_array_size(changes) == 0 || json_array_size(changes) > (size_t)state->num_files)
        return error_format(error, "%s: data_changes has %zu members; expected 1 to %d", name, json_array_size(changes),
                            state->num_files);
    state->num_changes = (int)json_array_size(changes);
    state->changes = (struct trainer_data_change *)calloc((size_t)state->num_changes, sizeof *state->changes);
    if (!state->changes)
        return error_format(error, "%s: out of memory for %d changes of the data", name, state->num_changes);
    for (int i = 0; i < state->num_changes; i++) {
        const json_t *change = json_array_get(changes, (size_t)i);
        const int before = i ? state->changes[i - 1].files : 0;
        const int64_t least = i ? (int64_t)state->changes[i - 1].first_epoch + 1 : 0;
        int64_t files, epoch;
        RETURN_PROBLEM(json_get_int(change, "files", before + 1, (int64_t)state->num_files + 1, &files, name, error));
        RETURN_PROBLEM(json_get_int(change, "first_epoch", least, i ? TRAINER_MAX : 1, &epoch, name, error));
        state->changes[i].files = (int)files;
        state->changes[i].first_epoch = (uint64_t)epoch;
    }
    if (state->changes[state->num_changes - 1].files != state->num_files)
        return error_format(error, "%s: data_changes ends with %d of %d files", name,
                            state->changes[state->num_changes - 1].files, state->num_files);
    return NULL;
}

// Checks that the member `key` is an object of texts, for trainer_state_option; nothing is stored.
static const char *trainer_state_read_options(const struct trainer_state *state, const char *key, const char *name,
                                              struct error_text *error) {
    json_t *options, *value;
    const char *option, *text;
    RETURN_PROBLEM(json_get_object(state->root, key, &options, name, error));
    json_object_foreach (options, option, value)
        RETURN_PROBLEM(json_check_string(value, option, &text, name, error));
    return NULL;
}

// Sets base_folder and base_digest, which are root's, where the checkpoint has only adapters.
static const char *trainer_state_read_base(struct trainer_state *state, const char *name, struct error_text *error) {
    json_t *base;
    RETURN_PROBLEM(json_opt_object(state->root, "base", &base, name, error));
    if (!base)
        return NULL;
    RETURN_PROBLEM(json_get_string(base, "folder", &state->base_folder, name, error));
    return json_get_string(base, "digest", &state->base_digest, name, error);
}

// Fills the state, zeroed but for root, from root. After an error the caller frees the state.
static const char *trainer_state_read_root(struct trainer_state *state, const char *name, struct error_text *error) {
    int64_t version;
    RETURN_PROBLEM(json_get_int(state->root, "version", 1, 2, &version, name, error));
    RETURN_PROBLEM(json_get_int(state->root, "step", 0, TRAINER_MAX, &state->step, name, error));
    RETURN_PROBLEM(json_get_int(state->root, "skipped", 0, state->step + 1, &state->skipped, name, error));
    RETURN_PROBLEM(json_opt_int(state->root, "empty", 0, state->skipped + 1, 0, &state->empty, name, error));
    RETURN_PROBLEM(trainer_state_count(state->root, "samples", &state->samples, name, error));
    RETURN_PROBLEM(trainer_state_count(state->root, "micro_steps", &state->micro_steps, name, error));
    RETURN_PROBLEM(
        json_opt_number(state->root, "best_val_loss", -1e300, 1e300, NAN, &state->best_val_loss, name, error));
    RETURN_PROBLEM(json_get_int(state->root, "best_val_step", 0, state->step + 1, &state->best_val_step, name, error));
    RETURN_PROBLEM(json_get_bool(state->root, "validation_due", &state->validation_due, name, error));
    RETURN_PROBLEM(json_get_string(state->root, "precision", &state->precision, name, error));
    if (strcmp(state->precision, "bf16") != 0 && strcmp(state->precision, "fp32") != 0)
        return error_format(error, "%s: precision is '%s'; expected bf16 or fp32", name,
                            json_show(state->precision).text);
    RETURN_PROBLEM(trainer_state_read_base(state, name, error));
    RETURN_PROBLEM(trainer_state_read_files(state, name, error));
    RETURN_PROBLEM(trainer_state_read_changes(state, name, error));
    RETURN_PROBLEM(trainer_state_read_options(state, "given", name, error));
    return trainer_state_read_options(state, "resolved", name, error);
}

const char *trainer_state_parse(struct trainer_state *state, const unsigned char *data, uint64_t bytes,
                                const char *name, struct error_text *error) {
    memset(state, 0, sizeof *state);
    RETURN_PROBLEM(json_parse_object(&state->root, data, bytes, name, error));
    const char *problem = trainer_state_read_root(state, name, error);
    if (problem)
        trainer_state_free(state);
    return problem;
}

struct trainer_state trainer_state_read(const char *folder) {
    enum { MAX_BYTES = 64 << 20 };
    char path[PATH_MAX];
    unsigned char *data = NULL;
    uint64_t bytes;
    struct trainer_state state;
    struct error_text error;
    if ((size_t)snprintf(path, sizeof path, "%s/trainer_state.json", folder) >= sizeof path)
        fail("%s: the name is too long", folder);
    const char *problem = read_whole(&data, &bytes, MAX_BYTES, path, "a checkpoint's state", &error);
    if (!problem)
        problem = trainer_state_parse(&state, data, bytes, path, &error);
    if (problem)
        fail("%s", problem);
    free(data);
    return state;
}

const char *trainer_state_option(const struct trainer_state *state, const char *which, const char *option) {
    return json_string_value(json_object_get(json_object_get(state->root, which), option));
}
