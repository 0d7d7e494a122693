// A field of a line of JSON: the text that is found is the text that jansson finds. The data's first line is the
// field's name.
#include "formats/json_field.h" // under test
#include "test/fuzz/fuzz.h"     // fuzz_require
#include <jansson.h>            // json_loadb

enum { NAME_BYTES = 64 };

// Whether the field of `value` is this text: a member of the whole name, or of an object that the name's part before a
// dot names.
static bool holds(const json_t *value, const char *field, const unsigned char *text, size_t bytes) {
    const json_t *const member = json_object_get(value, field);
    if (json_is_string(member) && json_string_length(member) == bytes &&
        memcmp(json_string_value(member), text, bytes) == 0)
        return true;
    for (const char *dot = strchr(field, '.'); dot; dot = strchr(dot + 1, '.')) {
        char name[NAME_BYTES];
        memcpy(name, field, (size_t)(dot - field));
        name[dot - field] = 0;
        if (holds(json_object_get(value, name), dot + 1, text, bytes))
            return true;
    }
    return false;
}

static const char *fuzz_parse(const unsigned char *data, size_t bytes, struct error_text *error) {
    const unsigned char *const end = (const unsigned char *)memchr(data, '\n', bytes);
    const size_t name_bytes = end ? (size_t)(end - data) : 0;
    if (!end || name_bytes >= NAME_BYTES || memchr(data, 0, name_bytes))
        return error_format(error, "no line with a field's name");
    char field[NAME_BYTES];
    memcpy(field, data, name_bytes);
    field[name_bytes] = 0;
    // a copy that begins where the line begins, and room for as many bytes as the line has
    const size_t line_bytes = bytes - name_bytes - 1;
    unsigned char *const line = (unsigned char *)malloc(line_bytes ? line_bytes : 1);
    unsigned char *const text = (unsigned char *)malloc(line_bytes ? line_bytes : 1);
    fuzz_require(line && text);
    memcpy(line, end + 1, line_bytes);
    size_t text_bytes;
    const char *problem = NULL;
    if (!json_field_find(text, &text_bytes, line, line_bytes, field)) {
        problem = error_format(error, "no such text, or a parser must look");
    } else {
        json_error_t why;
        json_t *const tree = json_loadb((char *)line, line_bytes, JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL, &why);
        // Python has an infinity, or every digit, for the numbers that jansson refuses
        fuzz_require(tree || json_error_code(&why) == json_error_numeric_overflow);
        fuzz_require(!tree || holds(tree, field, text, text_bytes));
        json_decref(tree);
    }
    free(text);
    free(line);
    return problem;
}
