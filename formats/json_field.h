// One text of a line of JSON (RFC 8259), without a tree of the rest: for JSONL files of many gigabytes.
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// Finds one field's string in a line (bytes), a JSON object: text (*text_bytes; room for `bytes`) = the string. field:
// a member's name, or a path as "meta.text": the member text of the member meta, or one member of this whole name.
// False, text undefined: the line is malformed, has no such string, or needs a full parser: a key with an escape, the
// field twice, half a surrogate pair, NaN, a long number, deep nesting. Where true, json.loads agrees.
bool json_field_find(unsigned char *text, size_t *text_bytes, const unsigned char *line, size_t bytes,
                     const char *field);
__END_DECLS
