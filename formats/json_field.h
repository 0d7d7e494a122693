// One text of a line of JSON (RFC 8259), without a tree of the rest: for JSONL files of many gigabytes.
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// Finds the string that a line (bytes), one JSON object, has in a field, a name, or names that dots separate for an
// object within an object, "meta.text", which one name may be too: text (*text_bytes; room for `bytes`). False, text
// undefined: the line is malformed, has no such string, or is for a parser to decide: an escape in a key, the field
// twice, half a surrogate pair, NaN, a number over 256 characters, 64 levels of nesting. Where true, json.loads agrees.
bool json_field_find(unsigned char *text, size_t *text_bytes, const unsigned char *line, size_t bytes,
                     const char *field);
__END_DECLS
