#include "runtime/text/json.h"
#include "runtime/text/utf8.h" // utf8_decode
#include <math.h>              // isfinite
#include <stdlib.h>            // strtod, abort
#include <string.h>            // memset

struct json json_writer(FILE *out, bool pretty) {
    struct json json;
    memset(&json, 0, sizeof json);
    json.out = out;
    json.pretty = pretty;
    return json;
}

void json_quote(FILE *out, const char *value) {
    fputc('"', out);
    for (const unsigned char *c = (const unsigned char *)value; *c;) {
        uint32_t code;
        const int length = utf8_decode(c, 4, &code);
        if (length == 0)
            fputs("\\ufffd", out);
        else if (*c == '"' || *c == '\\')
            fprintf(out, "\\%c", *c);
        else if (*c == '\n')
            fputs("\\n", out);
        else if (*c == '\t')
            fputs("\\t", out);
        else if (*c < 0x20 || *c == 0x7f)
            fprintf(out, "\\u%04x", *c);
        else
            fwrite(c, 1, (size_t)length, out);
        c += length ? length : 1;
    }
    fputc('"', out);
}

// Begins an indented line where the writer is pretty, else does nothing.
static void json_newline(struct json *json) {
    if (!json->pretty)
        return;
    fputc('\n', json->out);
    for (int i = 0; i < json->depth; i++)
        fputs("  ", json->out);
}
// Writes what precedes a value: a comma after another value, a new line where pretty, and the key (NULL for none).
static void json_begin_value(struct json *json, const char *key) {
    if (json->depth > 0) {
        if (json->has_members[json->depth - 1])
            fputs(json->pretty ? "," : ", ", json->out);
        json->has_members[json->depth - 1] = true;
        json_newline(json);
    }
    if (key) {
        json_quote(json->out, key);
        fputs(": ", json->out);
    }
}

// Begins an object or an array as a value; aborts where JSON_DEPTH are open.
static void json_open(struct json *json, const char *key, char bracket) {
    json_begin_value(json, key);
    fputc(bracket, json->out);
    if (json->depth == JSON_DEPTH)
        abort(); // a fault of the program: no input decides how deep it nests
    json->has_members[json->depth++] = false;
}
// Ends the innermost open object or array, and with the outermost one the line.
static void json_close(struct json *json, char bracket) {
    const bool has_members = json->has_members[--json->depth];
    if (has_members)
        json_newline(json);
    fputc(bracket, json->out);
    if (json->depth == 0)
        fputc('\n', json->out);
}
void json_object_begin(struct json *json, const char *key) { json_open(json, key, '{'); }
void json_object_end(struct json *json) { json_close(json, '}'); }
void json_array_begin(struct json *json, const char *key) { json_open(json, key, '['); }
void json_array_end(struct json *json) { json_close(json, ']'); }

void json_str(struct json *json, const char *key, const char *value) {
    json_begin_value(json, key);
    json_quote(json->out, value);
}
void json_int(struct json *json, const char *key, int64_t value) {
    json_begin_value(json, key);
    fprintf(json->out, "%lld", (long long)value);
}
void json_uint(struct json *json, const char *key, uint64_t value) {
    json_begin_value(json, key);
    fprintf(json->out, "%llu", (unsigned long long)value);
}
void json_bool(struct json *json, const char *key, bool value) {
    json_begin_value(json, key);
    fputs(value ? "true" : "false", json->out);
}
void json_none(struct json *json, const char *key) {
    json_begin_value(json, key);
    fputs("null", json->out);
}

enum { JSON_NUMBER = 32 };
// text = the value in the fewest of 6 to 9 digits that read back as the same float; "null" for NaN and infinities.
static void json_shortest_float(char text[JSON_NUMBER], float value) {
    strcpy(text, "null");
    if (isfinite(value))
        for (int digits = 6; digits <= 9; digits++) {
            snprintf(text, JSON_NUMBER, "%.*g", digits, (double)value);
            if (strtof(text, NULL) == value)
                break;
        }
}
// Writes a short decimal that reads back as the same float: 0.1f is 0.1. NaN and infinities become null.
void json_float(struct json *json, const char *key, float value) {
    char text[JSON_NUMBER];
    json_shortest_float(text, value);
    json_begin_value(json, key);
    fputs(text, json->out);
}
// text = the value in the fewest of 15 to 17 digits that read back as the same double; "null" for NaN and infinities.
static void json_shortest_double(char text[JSON_NUMBER], double value) {
    strcpy(text, "null");
    if (isfinite(value))
        for (int digits = 15; digits <= 17; digits++) {
            snprintf(text, JSON_NUMBER, "%.*g", digits, value);
            if (strtod(text, NULL) == value)
                break;
        }
}
void json_double(struct json *json, const char *key, double value) {
    char text[JSON_NUMBER];
    json_shortest_double(text, value);
    json_begin_value(json, key);
    fputs(text, json->out);
}

// Writes a member whose value is a number's text, with ".0" after a whole one, but not after null or an exponent.
static void json_with_point(struct json *json, const char *key, const char *text) {
    json_begin_value(json, key);
    fputs(text, json->out);
    if (!text[strcspn(text, ".en")]) // neither a point, nor an exponent, nor null
        fputs(".0", json->out);
}
void json_decimal(struct json *json, const char *key, float value) {
    char text[JSON_NUMBER];
    json_shortest_float(text, value);
    json_with_point(json, key, text);
}
// Writes a number as json_double does, with ".0" where json_decimal adds that.
void json_decimal_double(struct json *json, const char *key, double value) {
    char text[JSON_NUMBER];
    json_shortest_double(text, value);
    json_with_point(json, key, text);
}
