#include "formats/tokenizer_reader.h"

#include <stdio.h>  // snprintf
#include <string.h> // strchr, strstr, strcmp

const char *reader_only_members(struct tokenizer_reader *r, const json_t *object, const char *where,
                                const char *allowed) {
    if (!json_is_object(object))
        return error_format(r->error, "%s: %s is not an object; expected a tokenizer.json of Hugging Face", r->name,
                            where);
    for (void *i = json_object_iter((json_t *)object); i; i = json_object_iter_next((json_t *)object, i)) {
        char wanted[64];
        snprintf(wanted, sizeof wanted, " %.60s ", json_object_iter_key(i));
        if (strchr(json_object_iter_key(i), ' ') || !strstr(allowed, wanted))
            return error_format(r->error, "%s: %s has '%.100s', which is not supported", r->name, where,
                                json_object_iter_key(i));
    }
    return NULL;
}

const char *reader_sequence(struct tokenizer_reader *r, const json_t *object, const char *where, const char *key,
                            const json_t **parts) {
    char allowed[64];
    snprintf(allowed, sizeof allowed, " type %.50s ", key);
    *parts = json_object_get(object, key);
    if (!json_is_array(*parts))
        return error_format(r->error, "%s: %s.%s is not a list", r->name, where, key);
    return reader_only_members(r, object, where, allowed);
}

const char *reader_flag(struct tokenizer_reader *r, const json_t *object, const char *where, const char *key,
                        bool *value) {
    const json_t *member = json_object_get(object, key);
    if (!member || json_is_null(member))
        return NULL;
    if (!json_is_boolean(member))
        return error_format(r->error, "%s: %s.%s is not true or false", r->name, where, key);
    *value = json_is_true(member);
    return NULL;
}
const char *reader_refuse_flag(struct tokenizer_reader *r, const json_t *object, const char *where, const char *key,
                               bool refused) {
    bool value = !refused;
    const char *problem = reader_flag(r, object, where, key, &value);
    if (!problem && value == refused)
        problem = error_format(r->error, "%s: %s.%s is %s, which is not supported", r->name, where, key,
                               refused ? "true" : "false");
    return problem;
}
const char *reader_refuse_text(struct tokenizer_reader *r, const json_t *object, const char *where, const char *key) {
    const json_t *member = json_object_get(object, key);
    if (!member || json_is_null(member) || (json_is_string(member) && json_string_length(member) == 0))
        return NULL;
    return error_format(r->error, "%s: %s.%s is set, which is not supported", r->name, where, key);
}
const char *reader_type(const json_t *object) {
    const char *type = json_string_value(json_object_get(object, "type"));
    return type ? type : "";
}
const char *reader_refuse_type(struct tokenizer_reader *r, const json_t *object, const char *where,
                               const char *expected) {
    return error_format(r->error, "%s: %s is %.100s, which is not supported; expected %s", r->name, where,
                        json_is_null(object) || !object ? "null"
                        : *reader_type(object)          ? reader_type(object)
                                                        : "without a type",
                        expected);
}

const char *reader_id(struct tokenizer_reader *r, const json_t *number, const char *token, int32_t *id) {
    const json_int_t value = json_is_integer(number) ? json_integer_value(number) : -1;
    if (value < 0 || value >= TOKENIZER_MAX_IDS)
        return error_format(r->error, "%s: the id of token '%.100s' is not a number from 0 to %d", r->name, token,
                            TOKENIZER_MAX_IDS - 1);
    *id = (int32_t)value;
    return NULL;
}

const char *reader_expect_text(struct tokenizer_reader *r, const json_t *object, const char *where, const char *key,
                               const char *expected) {
    const char *text = json_string_value(json_object_get(object, key));
    if (text && strcmp(text, expected) == 0)
        return NULL;
    return error_format(r->error, "%s: %s.%s is '%.100s', which is not supported; expected '%s'", r->name, where, key,
                        text ? text : "", expected);
}
