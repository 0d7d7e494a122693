// trainer_state.json of a checkpoint: where the run stands, what its data was, and the options it was given. All that a
// run needs, besides the parameters and the optimizer's moments, to go on as if it had never stopped.
#pragma once
#include "runtime/machine/error.h"      // fail
#include "runtime/machine/error_text.h" // struct error_text
#include "runtime/files/file_read.h"    // read_whole
#include "runtime/text/json.h"          // as written
#include "runtime/text/json_parse.h"    // as read
#include "runtime/text/options.h"       // option_text
#include <limits.h>                     // PATH_MAX
#include <math.h>                       // NAN
#include <stdint.h>                     // uint64_t
#include <stdlib.h>                     // calloc

// A shard, as far as it must be the same when the run goes on.
struct trainer_file {
    const char *name; // without its folder, which may be another
    uint64_t tokens;
};
// From this epoch on, the data is the first `files` of the shards: files added later join in at the next epoch.
struct trainer_data_change {
    uint64_t first_epoch;
    int files;
};

struct trainer_state {
    int64_t step;         // finished
    int64_t skipped;      // of them, those that updated nothing
    uint64_t samples;     // position in the data's order
    uint64_t micro_steps; // the step of dropout's random numbers
    double best_val_loss; // NAN before the first validation
    int64_t best_val_step;
    bool validation_due;   // of this step: a signal came before its end
    const char *precision; // bf16 or fp32
    struct trainer_file *files;
    int num_files;
    struct trainer_data_change *changes;
    int num_changes;
    json_t *root; // names lie in it, and the options: owned, NULL where the state was not read
};

static void trainer_state_free(struct trainer_state *state) {
    free(state->files);
    free(state->changes);
    json_decref(state->root);
    memset(state, 0, sizeof *state);
}

// ---------------------------------------------------------------------------------------------------------------------
// Writing

// Options are written as the user would: `asked` by those that were given, `resolved` by all.
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

static void trainer_state_write(FILE *out, const struct trainer_state *state, const struct options *options,
                                const void *asked, const bool *given, const void *resolved) {
    struct json json = json_writer(out, true);
    json_object_begin(&json, NULL);
    json_int(&json, "version", 1);
    json_int(&json, "step", state->step);
    json_int(&json, "skipped", state->skipped);
    json_uint(&json, "samples", state->samples);
    json_uint(&json, "micro_steps", state->micro_steps);
    json_double(&json, "best_val_loss", state->best_val_loss);
    json_int(&json, "best_val_step", state->best_val_step);
    json_bool(&json, "validation_due", state->validation_due);
    json_str(&json, "precision", state->precision);
    json_array_begin(&json, "files");
    for (int i = 0; i < state->num_files; i++) {
        json_object_begin(&json, NULL);
        json_str(&json, "name", state->files[i].name);
        json_uint(&json, "tokens", state->files[i].tokens);
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

#define STATE_CHECK(call)                                                                                              \
    do {                                                                                                               \
        const char *const problem_ = (call);                                                                           \
        if (problem_)                                                                                                  \
            return problem_;                                                                                           \
    } while (0)

// Positions are counted in 63 bits, and far below.
static const int64_t TRAINER_MOST = (int64_t)1 << 60;

static const char *trainer_state_count(const json_t *object, const char *key, uint64_t *value, const char *name,
                                       struct error_text *error) {
    int64_t count = 0;
    STATE_CHECK(json_get_int(object, key, 0, TRAINER_MOST, &count, name, error));
    *value = (uint64_t)count;
    return NULL;
}

static const char *trainer_state_read_files(struct trainer_state *state, const char *name, struct error_text *error) {
    json_t *files;
    STATE_CHECK(json_get_array(state->root, "files", &files, name, error));
    if (json_array_size(files) == 0 || json_array_size(files) > 1 << 24)
        return error_format(error, "%s: files has %zu members; expected 1 to 2^24", name, json_array_size(files));
    state->num_files = (int)json_array_size(files);
    state->files = (struct trainer_file *)calloc((size_t)state->num_files, sizeof *state->files);
    if (!state->files)
        return error_format(error, "%s: out of memory for %d files", name, state->num_files);
    for (int i = 0; i < state->num_files; i++) {
        const json_t *file = json_array_get(files, (size_t)i);
        STATE_CHECK(json_get_string(file, "name", &state->files[i].name, name, error));
        STATE_CHECK(trainer_state_count(file, "tokens", &state->files[i].tokens, name, error));
    }
    return NULL;
}

// The first begins at epoch 0, and each has more files than the one before.
static const char *trainer_state_read_changes(struct trainer_state *state, const char *name, struct error_text *error) {
    json_t *changes;
    STATE_CHECK(json_get_array(state->root, "data_changes", &changes, name, error));
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
        STATE_CHECK(json_get_int(change, "files", before + 1, (int64_t)state->num_files + 1, &files, name, error));
        STATE_CHECK(json_get_int(change, "first_epoch", least, i ? TRAINER_MOST : 1, &epoch, name, error));
        state->changes[i].files = (int)files;
        state->changes[i].first_epoch = (uint64_t)epoch;
    }
    if (state->changes[state->num_changes - 1].files != state->num_files)
        return error_format(error, "%s: data_changes ends with %d of %d files", name,
                            state->changes[state->num_changes - 1].files, state->num_files);
    return NULL;
}

static const char *trainer_state_read_options(const struct trainer_state *state, const char *key, const char *name,
                                              struct error_text *error) {
    json_t *options, *value;
    const char *option, *text;
    STATE_CHECK(json_get_object(state->root, key, &options, name, error));
    json_object_foreach (options, option, value)
        STATE_CHECK(json_check_string(value, option, &text, name, error));
    return NULL;
}

static const char *trainer_state_read_root(struct trainer_state *state, const char *name, struct error_text *error) {
    int64_t version;
    STATE_CHECK(json_get_int(state->root, "version", 1, 2, &version, name, error));
    STATE_CHECK(json_get_int(state->root, "step", 0, TRAINER_MOST, &state->step, name, error));
    STATE_CHECK(json_get_int(state->root, "skipped", 0, state->step + 1, &state->skipped, name, error));
    STATE_CHECK(trainer_state_count(state->root, "samples", &state->samples, name, error));
    STATE_CHECK(trainer_state_count(state->root, "micro_steps", &state->micro_steps, name, error));
    STATE_CHECK(json_opt_number(state->root, "best_val_loss", -1e300, 1e300, NAN, &state->best_val_loss, name, error));
    STATE_CHECK(json_get_int(state->root, "best_val_step", 0, state->step + 1, &state->best_val_step, name, error));
    STATE_CHECK(json_get_bool(state->root, "validation_due", &state->validation_due, name, error));
    STATE_CHECK(json_get_string(state->root, "precision", &state->precision, name, error));
    if (strcmp(state->precision, "bf16") != 0 && strcmp(state->precision, "fp32") != 0)
        return error_format(error, "%s: precision is '%s'; expected bf16 or fp32", name,
                            json_show(state->precision).text);
    STATE_CHECK(trainer_state_read_files(state, name, error));
    STATE_CHECK(trainer_state_read_changes(state, name, error));
    STATE_CHECK(trainer_state_read_options(state, "given", name, error));
    return trainer_state_read_options(state, "resolved", name, error);
}

// Reads a trainer_state.json from memory. On success the caller frees it; on failure nothing is held.
static const char *trainer_state_parse(struct trainer_state *state, const unsigned char *data, uint64_t bytes,
                                       const char *name, struct error_text *error) {
    memset(state, 0, sizeof *state);
    STATE_CHECK(json_parse_object(&state->root, data, bytes, name, error));
    const char *problem = trainer_state_read_root(state, name, error);
    if (problem)
        trainer_state_free(state);
    return problem;
}

// That of a checkpoint that was verified, or the end of the program.
static struct trainer_state trainer_state_open(const char *folder) {
    enum { MOST_BYTES = 64 << 20 };
    char path[PATH_MAX];
    unsigned char *data = NULL;
    uint64_t bytes;
    struct trainer_state state;
    struct error_text error;
    if ((size_t)snprintf(path, sizeof path, "%s/trainer_state.json", folder) >= sizeof path)
        fail("%s: the name is too long", folder);
    const char *problem = read_whole(&data, &bytes, MOST_BYTES, path, "a checkpoint's state", &error);
    if (!problem)
        problem = trainer_state_parse(&state, data, bytes, path, &error);
    if (problem)
        fail("%s", problem);
    free(data);
    return state;
}

// An option's text among those given ("given") or all of them ("resolved"), by its name with underscores; NULL: none.
static const char *trainer_state_option(const struct trainer_state *state, const char *which, const char *option) {
    return json_string_value(json_object_get(json_object_get(state->root, which), option));
}
#undef STATE_CHECK
