// Writes JSON (RFC 8259) to a stream: whatever it is given, what comes out parses.
//
// Members are written by a call each; commas, indentation and escapes are this file's business. In an object `key`
// names the member; in an array (and for the outermost value) it is NULL.
#pragma once
#include <math.h>    // isfinite
#include <stdbool.h> // bool
#include <stdint.h>  // int64_t
#include <stdio.h>   // FILE, fputs
#include <stdlib.h>  // strtod
#include <string.h>  // strlen

enum { JSON_DEPTH = 16 };

struct json {
    FILE *out;
    bool pretty; // one member a line, indented; otherwise all on one line
    int depth;
    bool filled[JSON_DEPTH]; // per open object or array: it has a member already
};

static inline struct json json_writer(FILE *out, bool pretty) {
    struct json json;
    memset(&json, 0, sizeof json);
    json.out = out;
    json.pretty = pretty;
    return json;
}

// Bytes of the well-formed UTF-8 sequence at `text` (RFC 3629: no overlong forms, no surrogates), 0 if it is not one.
static inline int json_utf8_length(const unsigned char *text) {
    const unsigned char c = text[0];
    const int length = c < 0x80 ? 1 : c < 0xc2 ? 0 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : c < 0xf5 ? 4 : 0;
    for (int i = 1; i < length; i++)
        if ((text[i] & 0xc0) != 0x80)
            return 0;
    const bool overlong = (c == 0xe0 && text[1] < 0xa0) || (c == 0xf0 && text[1] < 0x90);
    const bool surrogate = c == 0xed && text[1] >= 0xa0;
    const bool too_large = c == 0xf4 && text[1] >= 0x90;
    return overlong || surrogate || too_large ? 0 : length;
}

// A quoted string. Each byte that is not UTF-8 becomes U+FFFD: file names and sampled text may hold any bytes.
static inline void json_quote(FILE *out, const char *value) {
    fputc('"', out);
    for (const unsigned char *c = (const unsigned char *)value; *c;) {
        const int length = json_utf8_length(c);
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

static inline void json_newline(struct json *json) {
    if (!json->pretty)
        return;
    fputc('\n', json->out);
    for (int i = 0; i < json->depth; i++)
        fputs("  ", json->out);
}
// What comes before every value: the comma after the previous one, and the key.
static inline void json_begin_value(struct json *json, const char *key) {
    if (json->depth > 0) {
        if (json->filled[json->depth - 1])
            fputs(json->pretty ? "," : ", ", json->out);
        json->filled[json->depth - 1] = true;
        json_newline(json);
    }
    if (key) {
        json_quote(json->out, key);
        fputs(": ", json->out);
    }
}

static inline void json_open(struct json *json, const char *key, char bracket) {
    json_begin_value(json, key);
    fputc(bracket, json->out);
    if (json->depth == JSON_DEPTH)
        abort(); // a fault of the program: nothing here nests by its input
    json->filled[json->depth++] = false;
}
static inline void json_close(struct json *json, char bracket) {
    const bool filled = json->filled[--json->depth];
    if (filled)
        json_newline(json);
    fputc(bracket, json->out);
    if (json->depth == 0)
        fputc('\n', json->out);
}
static inline void json_object_begin(struct json *json, const char *key) { json_open(json, key, '{'); }
static inline void json_object_end(struct json *json) { json_close(json, '}'); }
static inline void json_array_begin(struct json *json, const char *key) { json_open(json, key, '['); }
static inline void json_array_end(struct json *json) { json_close(json, ']'); }

static inline void json_str(struct json *json, const char *key, const char *value) {
    json_begin_value(json, key);
    json_quote(json->out, value);
}
static inline void json_int(struct json *json, const char *key, int64_t value) {
    json_begin_value(json, key);
    fprintf(json->out, "%lld", (long long)value);
}
static inline void json_uint(struct json *json, const char *key, uint64_t value) {
    json_begin_value(json, key);
    fprintf(json->out, "%llu", (unsigned long long)value);
}
static inline void json_bool(struct json *json, const char *key, bool value) {
    json_begin_value(json, key);
    fputs(value ? "true" : "false", json->out);
}
static inline void json_none(struct json *json, const char *key) { // json_null is jansson's
    json_begin_value(json, key);
    fputs("null", json->out);
}

// The shortest decimal that reads back as the same double; null for NaN and infinities, which JSON has no words for.
static inline void json_double(struct json *json, const char *key, double value) {
    char text[32] = "null";
    if (isfinite(value))
        for (int digits = 15; digits <= 17; digits++) {
            snprintf(text, sizeof text, "%.*g", digits, value);
            if (strtod(text, NULL) == value)
                break;
        }
    json_begin_value(json, key);
    fputs(text, json->out);
}
// A float with a point even where it is whole: readers that tell integers from reals by it see a real.
static inline void json_decimal(struct json *json, const char *key, float value) {
    char text[32] = "null";
    if (isfinite(value))
        for (int digits = 6; digits <= 9; digits++) {
            snprintf(text, sizeof text, "%.*g", digits, (double)value);
            if (strtof(text, NULL) == value)
                break;
        }
    json_begin_value(json, key);
    fputs(text, json->out);
    if (!text[strcspn(text, ".en")])
        fputs(".0", json->out);
}
// The same for a float: 0.1f is written 0.1, not 0.10000000149011612.
static inline void json_float(struct json *json, const char *key, float value) {
    char text[32] = "null";
    if (isfinite(value))
        for (int digits = 6; digits <= 9; digits++) {
            snprintf(text, sizeof text, "%.*g", digits, (double)value);
            if (strtof(text, NULL) == value)
                break;
        }
    json_begin_value(json, key);
    fputs(text, json->out);
}
