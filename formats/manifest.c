#include "formats/manifest.h"
#include "runtime/text/json.h" // json_writer
#include <jansson.h>           // json_loadb
#include <stdio.h>             // open_memstream
#include <stdlib.h>            // realloc, free
#include <string.h>            // memset, strspn

enum { MANIFEST_VERSION = 1 };

void manifest_free(struct manifest *manifest) {
    free(manifest->files);
    memset(manifest, 0, sizeof *manifest);
}

const struct manifest_file *manifest_find(const struct manifest *manifest, const char *name) {
    for (int i = 0; i < manifest->num_files; i++)
        if (strcmp(manifest->files[i].name, name) == 0)
            return &manifest->files[i];
    return NULL;
}

bool manifest_name_is_allowed(const char *name) {
    static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.";
    const size_t length = strlen(name);
    return length > 0 && length < MANIFEST_FILE_NAME && strspn(name, allowed) == length && name[0] != '.' &&
           strcmp(name, MANIFEST_NAME) != 0;
}

struct manifest_file *manifest_add(struct manifest *manifest, const char *name) {
    const size_t count = (size_t)manifest->num_files;
    if ((count & (count - 1)) == 0) { // full at every power of two: doubled there
        const size_t room = count ? 2 * count : 1;
        struct manifest_file *const files =
            (struct manifest_file *)realloc(manifest->files, room * sizeof *manifest->files);
        if (!files)
            return NULL;
        manifest->files = files;
    }
    struct manifest_file *const file = &manifest->files[manifest->num_files++];
    memset(file, 0, sizeof *file);
    snprintf(file->name, sizeof file->name, "%s", name);
    return file;
}

char *manifest_text(const struct manifest *manifest, size_t *bytes) {
    char *text = NULL;
    FILE *const memory = open_memstream(&text, bytes);
    if (!memory)
        return NULL;
    struct json json = json_writer(memory, true);
    json_object_begin(&json, NULL);
    json_int(&json, "version", MANIFEST_VERSION);
    json_int(&json, "step", manifest->step);
    json_array_begin(&json, "files");
    for (int i = 0; i < manifest->num_files; i++) {
        json_object_begin(&json, NULL);
        json_str(&json, "name", manifest->files[i].name);
        json_uint(&json, "bytes", manifest->files[i].bytes);
        json_str(&json, "xxh3_128", manifest->files[i].xxh3_128);
        json_object_end(&json);
    }
    json_array_end(&json);
    json_object_end(&json);
    if (fclose(memory) == 0)
        return text;
    free(text);
    return NULL;
}

// Refuses what is not an object with exactly the members `keys`; jansson refuses duplicates. what: for messages.
static const char *manifest_members(const json_t *object, const char *const keys[3], const char *what,
                                    struct error_text *error) {
    if (!json_is_object(object))
        return error_format(error, "%s is not an object", what);
    for (int i = 0; i < 3; i++)
        if (!json_object_get(object, keys[i]))
            return error_format(error, "%s has no \"%s\"", what, keys[i]);
    void *const all = json_object_iter((json_t *)object);
    for (void *member = all; member; member = json_object_iter_next((json_t *)object, member)) {
        const char *const key = json_object_iter_key(member);
        if (strcmp(key, keys[0]) != 0 && strcmp(key, keys[1]) != 0 && strcmp(key, keys[2]) != 0)
            return error_format(error, "%s has the unknown member \"%.40s\"", what, key);
    }
    return NULL;
}

// *value = the member `key`, an integer of 0 or more; jansson refuses what 64 bits can't hold. what: for messages.
static const char *manifest_count(int64_t *value, const json_t *object, const char *key, const char *what,
                                  struct error_text *error) {
    const json_t *const member = json_object_get(object, key);
    if (!json_is_integer(member) || json_integer_value(member) < 0)
        return error_format(error, "\"%s\" of %s is not an integer of 0 or more", key, what);
    *value = json_integer_value(member);
    return NULL;
}

// Adds the file that entry `number`, from 0, describes. Refuses a bad name, length or hash, and a name that is there.
static const char *manifest_parse_file(struct manifest *manifest, const json_t *entry, int number,
                                       struct error_text *error) {
    static const char *const keys[] = {"name", "bytes", "xxh3_128"};
    char what[32];
    snprintf(what, sizeof what, "file %d", number);
    const char *problem = manifest_members(entry, keys, what, error);
    if (problem)
        return problem;
    const char *const name = json_string_value(json_object_get(entry, "name"));
    if (!name || !manifest_name_is_allowed(name))
        return error_format(error,
                            "\"name\" of %s is%s%.100s; expected a plain file name of 1 to %d letters, digits, '_', "
                            "'-' and '.'",
                            what, name ? " " : " no string", name ? name : "", MANIFEST_FILE_NAME - 1);
    if (manifest_find(manifest, name))
        return error_format(error, "lists %.100s twice", name);
    int64_t bytes = 0;
    problem = manifest_count(&bytes, entry, "bytes", what, error);
    if (problem)
        return problem;
    const char *const hash = json_string_value(json_object_get(entry, "xxh3_128"));
    if (!hash || strlen(hash) != HASH128_DIGITS || strspn(hash, "0123456789abcdef") != HASH128_DIGITS)
        return error_format(error, "\"xxh3_128\" of %s is not a string of %d lower-case hexadecimal digits", what,
                            HASH128_DIGITS);
    struct manifest_file *const file = manifest_add(manifest, name);
    if (!file)
        return error_format(error, "out of memory");
    file->bytes = (uint64_t)bytes;
    memcpy(file->xxh3_128, hash, HASH128_DIGITS);
    return NULL;
}

// Fills the empty manifest from the file's JSON. An error may leave some files in it; its text lacks the file's name.
static const char *manifest_parse_json(struct manifest *manifest, const json_t *root, struct error_text *error) {
    static const char *const keys[] = {"version", "step", "files"};
    int64_t version = 0;
    // The version comes first: another one may have other members.
    if (json_is_object(root) && json_object_get(root, "version")) {
        const char *const problem = manifest_count(&version, root, "version", "the manifest", error);
        if (problem)
            return problem;
        if (version != MANIFEST_VERSION)
            return error_format(error, "has version %lld; this engine reads version %d", (long long)version,
                                MANIFEST_VERSION);
    }
    const char *problem = manifest_members(root, keys, "the manifest", error);
    if (!problem)
        problem = manifest_count(&manifest->step, root, "step", "the manifest", error);
    if (problem)
        return problem;
    const json_t *const files = json_object_get(root, "files");
    if (!json_is_array(files) || json_array_size(files) == 0 || json_array_size(files) > MANIFEST_FILES)
        return error_format(error, "\"files\" is not a list of 1 to %d files", MANIFEST_FILES);
    for (size_t i = 0; i < json_array_size(files) && !problem; i++)
        problem = manifest_parse_file(manifest, json_array_get(files, i), (int)i, error);
    return problem;
}

const char *manifest_parse(struct manifest *manifest, const char *text, size_t bytes, const char *name,
                           struct error_text *error) {
    struct error_text reason;
    const char *problem;
    memset(manifest, 0, sizeof *manifest);
    if (bytes > MANIFEST_BYTES)
        return error_format(error, "%.400s: is %zu bytes long; expected a manifest of %d at most", name, bytes,
                            MANIFEST_BYTES);
    json_error_t where;
    json_t *const root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &where);
    if (root)
        problem = manifest_parse_json(manifest, root, &reason);
    else
        problem = error_format(&reason, "is not JSON, at line %d: %s", where.line, where.text);
    json_decref(root);
    if (!problem)
        return NULL;
    manifest_free(manifest);
    for (char *c = reason.text; *c; c++) // may quote the file: no control character reaches a terminal
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            *c = '?';
    return error_format(error, "%.400s: %.500s", name, reason.text);
}
