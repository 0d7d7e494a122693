// Reads untrusted JSON by jansson: parsing with limits, then members by name, whose type and bounds are checked. Each
// function returns NULL, or what is wrong, in `error` (runtime/machine/error_text.h), with the file and the place.
//     json_t *root;
//     const char *problem = json_parse_object(&root, data, bytes, "config.json", &error);
//     if (!problem)
//         problem = json_get_int(root, "hidden_size", 1, 1 << 20, &hidden_size, "config.json", &error);
//     ...
//     json_decref(root); // NULL is fine
// `name` begins each message: the file, or the file and the object's place in it. Keys may be from the file.
#pragma once
#include "runtime/machine/error_text.h" // struct error_text
#include <jansson.h>                    // json_t
#include <stdbool.h>                    // bool
#include <stddef.h>                     // size_t
#include <stdint.h>                     // int64_t
#include <sys/cdefs.h>                  // __BEGIN_DECLS

// A string of a file in a form that is safe on a terminal: other bytes than printable ASCII as \xNN, long strings cut.
struct json_shown {
    char text[128];
};

__BEGIN_DECLS
struct json_shown json_show(const char *text);
struct json_shown json_show_bytes(const char *text, size_t length);

// Parses any value: *root is the caller's, NULL after an error. Refuses duplicate keys, bytes after the value,
// malformed UTF-8, integers beyond 64 bits, more than 64 levels or 2^22 values. json_check_string refuses \u0000.
const char *json_parse(json_t **root, const unsigned char *data, uint64_t bytes, const char *name,
                       struct error_text *error);
// Parses an object. Refuses any other value, and what json_parse refuses. *root is the caller's, NULL after an error.
const char *json_parse_object(json_t **root, const unsigned char *data, uint64_t bytes, const char *name,
                              struct error_text *error);

// Returns the type in words for a message: "a string", but "true", "false", "null", and "absent" for NULL.
const char *json_type_name(const json_t *value);

// *result = the value, an integer from `least` to below - 1. Anything else, NULL too, is an error: then *result stays.
// key: the value's name in messages; for an array's element the caller makes one up ("shape[1]").
const char *json_check_int(const json_t *value, const char *key, int64_t least, int64_t below, int64_t *result,
                           const char *name, struct error_text *error);
const char *json_check_string(const json_t *value, const char *key, const char **result, const char *name,
                              struct error_text *error);

// *result = an integer member, from `least` to below - 1. If absent or anything else: an error, and *result stays.
const char *json_get_int(const json_t *object, const char *key, int64_t least, int64_t below, int64_t *result,
                         const char *name, struct error_text *error);
// *result = a member that must be there and be a number from least to most. Else: an error, and *result stays.
const char *json_get_number(const json_t *object, const char *key, double least, double most, double *result,
                            const char *name, struct error_text *error);
// *result = a member that must be there and be true or false. Else: an error, and *result stays.
const char *json_get_bool(const json_t *object, const char *key, bool *result, const char *name,
                          struct error_text *error);
// *result = the text of a member that must be there; `object` owns the text. After an error *result stays.
const char *json_get_string(const json_t *object, const char *key, const char **result, const char *name,
                            struct error_text *error);
// *result = a member, which must be an object, and which `object` owns. After an error: what is there instead, or NULL.
const char *json_get_object(const json_t *object, const char *key, json_t **result, const char *name,
                            struct error_text *error);
// *result = a member, which must be an array, and which `object` owns. After an error: what is there instead, or NULL.
const char *json_get_array(const json_t *object, const char *key, json_t **result, const char *name,
                           struct error_text *error);

// Whether a member is there and not null. Hugging Face's files have null for what is not set.
bool json_has(const json_t *object, const char *key);
// *result = a member that json_get_int takes, or `fallback` where it is absent or null. A wrong member is an error.
const char *json_opt_int(const json_t *object, const char *key, int64_t least, int64_t below, int64_t fallback,
                         int64_t *result, const char *name, struct error_text *error);
const char *json_opt_number(const json_t *object, const char *key, double least, double most, double fallback,
                            double *result, const char *name, struct error_text *error);
const char *json_opt_bool(const json_t *object, const char *key, bool fallback, bool *result, const char *name,
                          struct error_text *error);
const char *json_opt_string(const json_t *object, const char *key, const char *fallback, const char **result,
                            const char *name, struct error_text *error);
// *result = a member, an object, which `object` owns; NULL where absent or null. After an error: what is there instead.
const char *json_opt_object(const json_t *object, const char *key, json_t **result, const char *name,
                            struct error_text *error);
// *result = a member, an array, which `object` owns; NULL where absent or null. After an error: what is there instead.
const char *json_opt_array(const json_t *object, const char *key, json_t **result, const char *name,
                           struct error_text *error);
__END_DECLS
