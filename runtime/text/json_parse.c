#include "runtime/text/json_parse.h"
#include <inttypes.h> // PRId64
#include <stdio.h>    // snprintf
#include <string.h>   // strlen

// Real files nest less than 10 deep, and the largest tokenizer has a million values. jansson takes up to 250 bytes for
// the two bytes of an empty object, so that without the second limit 100 MB of them would take all memory.
enum { JSON_MAX_DEPTH = 64, JSON_MAX_VALUES = 4 << 20 };

// Returns `length` bytes, of which any but printable ASCII is shown as \xNN. "..." ends a text that was cut to fit.
struct json_shown json_show_bytes(const char *text, size_t length) {
    struct json_shown shown;
    size_t used = 0;
    for (size_t i = 0; i < length; i++) {
        const unsigned char c = (unsigned char)text[i];
        if (used + 8 > sizeof shown.text) { // room for \xNN, three points and the end
            memcpy(shown.text + used, "...", 3);
            used += 3;
            break;
        }
        if (c >= 0x20 && c < 0x7f)
            shown.text[used++] = (char)c;
        else
            used += (size_t)snprintf(shown.text + used, 5, "\\x%02x", c);
    }
    shown.text[used] = '\0';
    return shown;
}
struct json_shown json_show(const char *text) {
    return json_show_bytes(text, strlen(text));
}

// Refuses too many levels or values (an empty {} or [] is two). Exact up to the first fault, at which jansson stops.
static const char *json_limits_check(const unsigned char *data, uint64_t bytes, const char *name,
                                     struct error_text *error) {
    uint64_t values = 1;
    int depth = 0;
    bool quoted = false;
    for (uint64_t i = 0; i < bytes; i++) {
        const unsigned char c = data[i];
        if (quoted && c == '\\')
            i++;
        else if (c == '"')
            quoted = !quoted;
        else if (!quoted && (c == '{' || c == '[')) {
            values++;
            if (++depth > JSON_MAX_DEPTH)
                return error_format(error, "%s: byte %" PRIu64 ": is nested too deep; expected at most %d levels", name,
                                    i, JSON_MAX_DEPTH);
        } else if (!quoted && (c == '}' || c == ']'))
            depth -= depth > 0;
        else if (!quoted && c == ',')
            values++;
        if (values > JSON_MAX_VALUES)
            return error_format(error, "%s: byte %" PRIu64 ": has too many values; expected at most %d", name, i,
                                JSON_MAX_VALUES);
    }
    return NULL;
}

const char *json_parse(json_t **root, const unsigned char *data, uint64_t bytes, const char *name,
                       struct error_text *error) {
    *root = NULL;
    if (bytes == 0)
        return error_format(error, "%s: is empty; expected JSON", name);
    const char *problem = json_limits_check(data, bytes, name, error);
    if (problem)
        return problem;
    json_error_t json_error;
    *root = json_loadb((const char *)data, (size_t)bytes, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | JSON_ALLOW_NUL,
                       &json_error);
    if (!*root)
        return error_format(error, "%s: line %d, column %d: is not valid JSON: %s", name, json_error.line,
                            json_error.column, json_show(json_error.text).text); // jansson's text quotes the file
    return NULL;
}

const char *json_type_name(const json_t *value) {
    if (!value)
        return "absent";
    switch (json_typeof(value)) {
    case JSON_OBJECT: return "an object";
    case JSON_ARRAY: return "an array";
    case JSON_STRING: return "a string";
    case JSON_INTEGER: return "an integer";
    case JSON_REAL: return "a number with a fraction or exponent";
    case JSON_TRUE: return "true";
    case JSON_FALSE: return "false";
    case JSON_NULL: return "null";
    }
    return "unknown";
}

const char *json_parse_object(json_t **root, const unsigned char *data, uint64_t bytes, const char *name,
                              struct error_text *error) {
    const char *problem = json_parse(root, data, bytes, name, error);
    if (problem || json_is_object(*root))
        return problem;
    problem = error_format(error, "%s: is %s; expected an object", name, json_type_name(*root));
    json_decref(*root);
    *root = NULL;
    return problem;
}

// ---- one value: of a member `key`, or of an array, for which the caller makes up a key ("shape[1]") ----

static const char *json_wrong_type(const json_t *value, const char *key, const char *expected, const char *name,
                                   struct error_text *error) {
    return error_format(error, "%s: %s is %s; expected %s", name, json_show(key).text, json_type_name(value), expected);
}

const char *json_check_int(const json_t *value, const char *key, int64_t least, int64_t below, int64_t *result,
                           const char *name, struct error_text *error) {
    if (!json_is_integer(value))
        return json_wrong_type(value, key, "an integer", name, error);
    const int64_t number = json_integer_value(value);
    if (number < least || number >= below)
        return error_format(error, "%s: %s is %" PRId64 "; expected %" PRId64 " to %" PRId64, name, json_show(key).text,
                            number, least, below - 1);
    *result = number;
    return NULL;
}
// *result = an integer or real, `least` to `most`; else an error, and *result stays. jansson takes no NaN or infinity.
static const char *json_check_number(const json_t *value, const char *key, double least, double most, double *result,
                                     const char *name, struct error_text *error) {
    if (!json_is_number(value))
        return json_wrong_type(value, key, "a number", name, error);
    const double number = json_number_value(value);
    if (!(number >= least && number <= most))
        return error_format(error, "%s: %s is %g; expected %g to %g", name, json_show(key).text, number, least, most);
    *result = number;
    return NULL;
}
static const char *json_check_bool(const json_t *value, const char *key, bool *result, const char *name,
                                   struct error_text *error) {
    if (!json_is_boolean(value))
        return json_wrong_type(value, key, "true or false", name, error);
    *result = json_is_true(value);
    return NULL;
}
// *result = a string's text, which the value owns; NULL, another type, or a NUL byte in it is an error: *result stays.
const char *json_check_string(const json_t *value, const char *key, const char **result, const char *name,
                              struct error_text *error) {
    if (!json_is_string(value))
        return json_wrong_type(value, key, "a string", name, error);
    const char *text = json_string_value(value);
    if (strlen(text) != json_string_length(value))
        return error_format(error, "%s: %s is a string with a NUL byte; expected text", name, json_show(key).text);
    *result = text;
    return NULL;
}

// ---- members that must be there; the outer object owns objects, arrays and strings ----

const char *json_get_int(const json_t *object, const char *key, int64_t least, int64_t below, int64_t *result,
                         const char *name, struct error_text *error) {
    return json_check_int(json_object_get(object, key), key, least, below, result, name, error);
}
const char *json_get_number(const json_t *object, const char *key, double least, double most, double *result,
                            const char *name, struct error_text *error) {
    return json_check_number(json_object_get(object, key), key, least, most, result, name, error);
}
const char *json_get_bool(const json_t *object, const char *key, bool *result, const char *name,
                          struct error_text *error) {
    return json_check_bool(json_object_get(object, key), key, result, name, error);
}
const char *json_get_string(const json_t *object, const char *key, const char **result, const char *name,
                            struct error_text *error) {
    return json_check_string(json_object_get(object, key), key, result, name, error);
}
const char *json_get_object(const json_t *object, const char *key, json_t **result, const char *name,
                            struct error_text *error) {
    *result = json_object_get(object, key);
    return json_is_object(*result) ? NULL : json_wrong_type(*result, key, "an object", name, error);
}
const char *json_get_array(const json_t *object, const char *key, json_t **result, const char *name,
                           struct error_text *error) {
    *result = json_object_get(object, key);
    return json_is_array(*result) ? NULL : json_wrong_type(*result, key, "an array", name, error);
}

// ---- members that may be absent: *result is `fallback` or NULL then, and for null, as Hugging Face's files write ----

bool json_has(const json_t *object, const char *key) {
    const json_t *value = json_object_get(object, key);
    return value && !json_is_null(value);
}
const char *json_opt_int(const json_t *object, const char *key, int64_t least, int64_t below, int64_t fallback,
                         int64_t *result, const char *name, struct error_text *error) {
    *result = fallback;
    return json_has(object, key) ? json_get_int(object, key, least, below, result, name, error) : NULL;
}
const char *json_opt_number(const json_t *object, const char *key, double least, double most, double fallback,
                            double *result, const char *name, struct error_text *error) {
    *result = fallback;
    return json_has(object, key) ? json_get_number(object, key, least, most, result, name, error) : NULL;
}
const char *json_opt_bool(const json_t *object, const char *key, bool fallback, bool *result, const char *name,
                          struct error_text *error) {
    *result = fallback;
    return json_has(object, key) ? json_get_bool(object, key, result, name, error) : NULL;
}
const char *json_opt_string(const json_t *object, const char *key, const char *fallback, const char **result,
                            const char *name, struct error_text *error) {
    *result = fallback;
    return json_has(object, key) ? json_get_string(object, key, result, name, error) : NULL;
}
const char *json_opt_object(const json_t *object, const char *key, json_t **result, const char *name,
                            struct error_text *error) {
    *result = NULL;
    return json_has(object, key) ? json_get_object(object, key, result, name, error) : NULL;
}
const char *json_opt_array(const json_t *object, const char *key, json_t **result, const char *name,
                           struct error_text *error) {
    *result = NULL;
    return json_has(object, key) ? json_get_array(object, key, result, name, error) : NULL;
}
