#include "formats/chat_format.h"
#include "runtime/files/file_read.h" // read_whole
#include "runtime/text/json_parse.h" // json_parse_object, json_get_*
#include <stdio.h>                   // snprintf
#include <stdlib.h>                  // free
#include <string.h>                  // strdup, memset

enum { CHAT_MAX_BYTES = 1 << 20, CHAT_VERSION = 1 };

void chat_format_free(struct chat_format *format) {
    free(format->begin);
    for (int role = 0; role < CHAT_ROLES; role++) {
        free(format->roles[role].before);
        free(format->roles[role].after);
    }
    free(format->default_system);
    for (int i = 0; i < format->stop_count; i++)
        free(format->stops[i]);
    memset(format, 0, sizeof *format);
}

// Copies `text` to *to, a field of the format: chat_format_free frees the copy. Returns NULL or the problem.
static const char *chat_copy(char **to, const char *text, const char *name, struct error_text *error) {
    *to = strdup(text);
    return *to ? NULL : error_format(error, "%s: out of memory", name);
}
// Copies the text of the member `key`, which must be there, as chat_copy does.
static const char *chat_copy_member(char **to, const json_t *object, const char *key, const char *name,
                                    struct error_text *error) {
    const char *text;
    RETURN_PROBLEM(json_get_string(object, key, &text, name, error));
    return chat_copy(to, text, name, error);
}

static const char *chat_fill_roles(struct chat_format *format, const json_t *root, const char *name,
                                   struct error_text *error) {
    static const char *const names[CHAT_ROLES] = {"system", "user", "assistant"};
    json_t *roles;
    RETURN_PROBLEM(json_get_object(root, "roles", &roles, name, error));
    for (int i = 0; i < CHAT_ROLES; i++) {
        json_t *role;
        char place[512];
        RETURN_PROBLEM(json_get_object(roles, names[i], &role, name, error));
        snprintf(place, sizeof place, "%.400s: roles.%s", name, names[i]);
        RETURN_PROBLEM(chat_copy_member(&format->roles[i].before, role, "before", place, error));
        RETURN_PROBLEM(chat_copy_member(&format->roles[i].after, role, "after", place, error));
    }
    return NULL;
}
static const char *chat_fill_stops(struct chat_format *format, const json_t *root, const char *name,
                                   struct error_text *error) {
    json_t *stops;
    RETURN_PROBLEM(json_get_array(root, "stop", &stops, name, error));
    const size_t count = json_array_size(stops);
    if (count == 0 || count > CHAT_MAX_STOPS)
        return error_format(error, "%s: stop has %zu tokens; expected 1 to %d, such as an end-of-turn token", name,
                            count, CHAT_MAX_STOPS);
    for (size_t i = 0; i < count; i++) {
        const char *text;
        RETURN_PROBLEM(json_check_string(json_array_get(stops, i), "stop", &text, name, error));
        RETURN_PROBLEM(chat_copy(&format->stops[format->stop_count], text, name, error));
        format->stop_count++;
    }
    return NULL;
}
// Fills the zeroed format, which the caller frees even after an error. Returns NULL or the problem.
static const char *chat_fill(struct chat_format *format, const json_t *root, const char *name,
                             struct error_text *error) {
    int64_t version;
    const char *system;
    RETURN_PROBLEM(json_get_int(root, "version", 0, 1 << 30, &version, name, error));
    if (version != CHAT_VERSION)
        return error_format(error, "%s: has version %d; expected %d; make it again with scripts/chat_format.py", name,
                            (int)version, CHAT_VERSION);
    RETURN_PROBLEM(chat_copy_member(&format->begin, root, "begin", name, error));
    RETURN_PROBLEM(chat_fill_roles(format, root, name, error));
    RETURN_PROBLEM(json_opt_string(root, "default_system", NULL, &system, name, error));
    if (system)
        RETURN_PROBLEM(chat_copy(&format->default_system, system, name, error));
    RETURN_PROBLEM(json_get_bool(root, "trim", &format->trim, name, error));
    return chat_fill_stops(format, root, name, error);
}

const char *chat_format_parse(struct chat_format *format, const unsigned char *data, uint64_t bytes, const char *name,
                              struct error_text *error) {
    json_t *root;
    memset(format, 0, sizeof *format);
    RETURN_PROBLEM(json_parse_object(&root, data, bytes, name, error));
    const char *problem = chat_fill(format, root, name, error);
    json_decref(root);
    if (problem)
        chat_format_free(format);
    return problem;
}
const char *chat_format_read(struct chat_format *format, const char *path, struct error_text *error) {
    unsigned char *data;
    uint64_t bytes;
    memset(format, 0, sizeof *format);
    RETURN_PROBLEM(read_whole(&data, &bytes, CHAT_MAX_BYTES, path, "the form of a chat", error));
    const char *problem = chat_format_parse(format, data, bytes, path, error);
    free(data);
    return problem;
}
