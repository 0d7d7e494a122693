#include "formats/trainer_state.h"
#include "formats/mixture.h"         // MIXTURE_PARTS
#include "runtime/files/file_read.h" // read_whole
#include "runtime/machine/error.h"   // fail
#include "runtime/text/json.h"       // json_writer
#include "runtime/text/json_parse.h" // json_parse_object, json_get_*
#include <limits.h>                  // PATH_MAX
#include <math.h>                    // NAN
#include <stdlib.h>                  // calloc, free
#include <string.h>                  // memset, strcmp

void trainer_state_free(struct trainer_state *state) {
    for (int i = 0; i < state->num_parts; i++)
        free(state->parts[i].changes);
    free(state->files);
    free(state->parts);
    json_decref(state->root);
    memset(state, 0, sizeof *state);
}

// ---- writing ----

// Writes two objects of options, as texts: "given" from `asked`, where given[i] is true; "resolved" from `resolved`.
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

// Writes "data_changes" of a part: from which epoch on how many of its files are used.
static void trainer_state_write_changes(struct json *json, const struct trainer_part *part) {
    json_array_begin(json, "data_changes");
    for (int i = 0; i < part->num_changes; i++) {
        json_object_begin(json, NULL);
        json_uint(json, "first_epoch", part->changes[i].first_epoch);
        json_int(json, "files", part->changes[i].files);
        json_object_end(json);
    }
    json_array_end(json);
}
// Writes "data_start" and "parts". For a run that always had one set, writes only that set's "data_changes".
static void trainer_state_write_parts(struct json *json, const struct trainer_state *state) {
    if (state->num_parts == 1 && state->data_start == 0) {
        trainer_state_write_changes(json, state->parts);
        return;
    }
    json_uint(json, "data_start", state->data_start);
    json_array_begin(json, "parts");
    for (int i = 0; i < state->num_parts; i++) {
        json_object_begin(json, NULL);
        json_str(json, "name", state->parts[i].name);
        json_uint(json, "weight", state->parts[i].weight);
        json_uint(json, "before", state->parts[i].before);
        json_int(json, "files", state->parts[i].num_files);
        trainer_state_write_changes(json, &state->parts[i]);
        json_object_end(json);
    }
    json_array_end(json);
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
    trainer_state_write_parts(&json, state);
    trainer_state_write_options(&json, options, asked, given, resolved);
    json_object_end(&json);
}

// ---- reading ----

// The limit of counts in a state: far above what a run reaches, and so low that sums of a few fit in 63 bits.
static const int64_t TRAINER_MAX = (int64_t)1 << 60;

// *value = the member `key`, a count from 0 to below TRAINER_MAX, which must be there.
static const char *trainer_state_count(const json_t *object, const char *key, uint64_t *value, const char *name,
                                       struct error_text *error) {
    int64_t count = 0;
    RETURN_PROBLEM(json_get_int(object, key, 0, TRAINER_MAX, &count, name, error));
    *value = (uint64_t)count;
    return NULL;
}

// Sets files and num_files from root, which owns the names. A file without "digest" has 0 as digest.
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

// Sets a part's changes from its object, or root. Epochs must rise from 0, and files must rise to the part's num_files.
static const char *trainer_state_read_changes(struct trainer_part *part, const json_t *object, const char *name,
                                              struct error_text *error) {
    json_t *changes;
    RETURN_PROBLEM(json_get_array(object, "data_changes", &changes, name, error));
    if (json_array_size(changes) == 0 || json_array_size(changes) > (size_t)part->num_files)
        return error_format(error, "%s: data_changes has %zu members; expected 1 to %d", name, json_array_size(changes),
                            part->num_files);
    part->num_changes = (int)json_array_size(changes);
    part->changes = (struct data_change *)calloc((size_t)part->num_changes, sizeof *part->changes);
    if (!part->changes)
        return error_format(error, "%s: out of memory for %d changes of the data", name, part->num_changes);
    for (int i = 0; i < part->num_changes; i++) {
        const json_t *change = json_array_get(changes, (size_t)i);
        const int before = i ? part->changes[i - 1].files : 0;
        const int64_t least = i ? (int64_t)part->changes[i - 1].first_epoch + 1 : 0;
        int64_t files, epoch;
        RETURN_PROBLEM(json_get_int(change, "files", before + 1, (int64_t)part->num_files + 1, &files, name, error));
        RETURN_PROBLEM(json_get_int(change, "first_epoch", least, i ? TRAINER_MAX : 1, &epoch, name, error));
        part->changes[i].files = (int)files;
        part->changes[i].first_epoch = (uint64_t)epoch;
    }
    if (part->changes[part->num_changes - 1].files != part->num_files)
        return error_format(error, "%s: data_changes ends with %d of %d files", name,
                            part->changes[part->num_changes - 1].files, part->num_files);
    return NULL;
}
// Sets a part from its object. left: the number of files that no part before it has.
static const char *trainer_state_read_part(struct trainer_part *part, const json_t *object, int left, const char *name,
                                           struct error_text *error) {
    int64_t weight, files;
    RETURN_PROBLEM(json_get_string(object, "name", &part->name, name, error));
    RETURN_PROBLEM(json_get_int(object, "weight", 0, (int64_t)MIXTURE_WEIGHTS, &weight, name, error));
    RETURN_PROBLEM(trainer_state_count(object, "before", &part->before, name, error));
    RETURN_PROBLEM(json_get_int(object, "files", 1, (int64_t)left + 1, &files, name, error));
    part->weight = (uint64_t)weight;
    part->num_files = (int)files;
    return trainer_state_read_changes(part, object, name, error);
}
// Sets data_start, parts and num_parts. num_files and samples must be set. No "parts": the run had one set all along.
static const char *trainer_state_read_parts(struct trainer_state *state, const char *name, struct error_text *error) {
    json_t *parts;
    uint64_t weights = 0;
    RETURN_PROBLEM(json_opt_array(state->root, "parts", &parts, name, error));
    const size_t count = parts ? json_array_size(parts) : 1;
    if (count == 0 || count > MIXTURE_PARTS)
        return error_format(error, "%s: parts has %zu members; expected 1 to %d", name, count, MIXTURE_PARTS);
    state->parts = (struct trainer_part *)calloc(count, sizeof *state->parts);
    if (!state->parts)
        return error_format(error, "%s: out of memory for %zu parts", name, count);
    state->num_parts = (int)count;
    if (!parts) {
        state->parts[0].name = "";
        state->parts[0].weight = 1;
        state->parts[0].num_files = state->num_files;
        return trainer_state_read_changes(state->parts, state->root, name, error);
    }
    RETURN_PROBLEM(trainer_state_count(state->root, "data_start", &state->data_start, name, error));
    int left = state->num_files;
    for (size_t i = 0; i < count; i++) {
        RETURN_PROBLEM(trainer_state_read_part(&state->parts[i], json_array_get(parts, i), left, name, error));
        left -= state->parts[i].num_files;
        weights += state->parts[i].weight;
    }
    if (left > 0)
        return error_format(error, "%s: parts have %d of %d files", name, state->num_files - left, state->num_files);
    if (weights == 0 || weights >= MIXTURE_WEIGHTS)
        return error_format(error, "%s: weights are %llu together; expected 1 to 2^31 - 1", name,
                            (unsigned long long)weights);
    if (state->data_start > state->samples)
        return error_format(error, "%s: data_start is %llu; expected at most samples, %llu", name,
                            (unsigned long long)state->data_start, (unsigned long long)state->samples);
    return NULL;
}

// Checks that member `key` is an object of texts, as trainer_state_option needs. Stores nothing. NULL or the problem.
static const char *trainer_state_read_options(const struct trainer_state *state, const char *key, const char *name,
                                              struct error_text *error) {
    json_t *options, *value;
    const char *option, *text;
    RETURN_PROBLEM(json_get_object(state->root, key, &options, name, error));
    json_object_foreach (options, option, value)
        RETURN_PROBLEM(json_check_string(value, option, &text, name, error));
    return NULL;
}

// Sets base_folder and base_digest, which root owns, if the checkpoint has only adapters.
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
    RETURN_PROBLEM(trainer_state_read_parts(state, name, error));
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
