// UTF-8 (RFC 3629) in buffers that are not ended by a zero.
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <stdint.h>    // uint32_t
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// Decodes the character at `text`, where `left` bytes may be read: *code = its code point. Returns its length in bytes;
// 0 where none is left, or one is cut short, overlong, a surrogate or above U+10FFFF. Reads nothing after a zero byte.
int utf8_decode(const unsigned char *text, size_t left, uint32_t *code);
// Encodes a code point, at most U+10FFFF, maybe a surrogate, as 1 to 4 bytes at `out`. Returns how many.
int utf8_encode(uint32_t code, unsigned char *out);
bool unicode_is_space(uint32_t code);
__END_DECLS
