// One text of a line of JSON (RFC 8259), without a tree of the rest: for JSONL files of many gigabytes.
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// Finds the string that a line (bytes), one JSON object, has in a field, a name, or names that dots separate for an
// object within an object, "meta.text": text (*text_bytes; room for `bytes`). False: the line is malformed, has no such
// text, or is one that a parser must decide: a key with an escape, the field twice, half of a surrogate pair, NaN, a
// number of hundreds of digits, objects nested deeper than 64. Where true, json.loads of Python finds the same text.
bool json_field_find(unsigned char *text, size_t *text_bytes, const unsigned char *line, size_t bytes,
                     const char *field);
__END_DECLS
