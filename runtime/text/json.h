// Writes JSON (RFC 8259) to a stream: whatever the values are, the text parses. A call writes a member; the writer adds
// commas, indentation and escapes. In an object `key` names the member; in an array, and for the outermost value, it is
// NULL. Write errors stay in the stream, for ferror or fclose to report.
#pragma once
#include <stdbool.h>   // bool
#include <stdint.h>    // int64_t
#include <stdio.h>     // FILE
#include <sys/cdefs.h> // __BEGIN_DECLS

enum { JSON_DEPTH = 16 }; // the deepest nesting of objects and arrays; a deeper one aborts

struct json {
    FILE *out;
    bool pretty; // a line for each member, indented; otherwise all in one line
    int depth;
    bool has_members[JSON_DEPTH]; // for each open object or array: a comma is due
};

__BEGIN_DECLS
// Returns a writer to `out`, which stays the caller's. The end of the outermost object or array also ends the line.
struct json json_writer(FILE *out, bool pretty);
void json_object_begin(struct json *json, const char *key);
void json_object_end(struct json *json);
void json_array_begin(struct json *json, const char *key);
void json_array_end(struct json *json);

void json_str(struct json *json, const char *key, const char *value); // bytes that are not UTF-8 become U+FFFD
void json_int(struct json *json, const char *key, int64_t value);
void json_uint(struct json *json, const char *key, uint64_t value);
void json_bool(struct json *json, const char *key, bool value);
void json_none(struct json *json, const char *key); // null (json_null is jansson's)
// Writes a short decimal that reads back as the same double (json_float: the same float). NaN and infinities: null.
void json_double(struct json *json, const char *key, double value);
void json_float(struct json *json, const char *key, float value);
// Writes as json_float does, but a whole number without exponent as 1.0: some readers tell reals from integers.
void json_decimal(struct json *json, const char *key, float value);
void json_decimal_double(struct json *json, const char *key, double value);

// Writes only the quoted string; the caller lays the text out. Bytes that are not UTF-8 become U+FFFD.
void json_quote(FILE *out, const char *value);
__END_DECLS
