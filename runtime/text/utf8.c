#include "runtime/text/utf8.h"

int utf8_decode(const unsigned char *text, size_t left, uint32_t *code) {
    static const uint32_t smallest[] = {0, 0, 0x80, 0x800, 0x10000}; // by length: anything less is overlong
    const unsigned char c = left ? text[0] : 0xff;
    *code = c;
    if (c < 0x80)
        return 1;
    const int length = c < 0xc2 ? 0 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : c < 0xf5 ? 4 : 0;
    if (length == 0 || left < (size_t)length)
        return 0;
    uint32_t value = c & (0xffu >> (length + 1));
    for (int i = 1; i < length; i++) {
        if ((text[i] & 0xc0) != 0x80)
            return 0;
        value = value << 6 | (text[i] & 0x3fu);
    }
    *code = value;
    return value < smallest[length] || (value >= 0xd800 && value < 0xe000) || value > 0x10ffff ? 0 : length;
}

int utf8_encode(uint32_t code, unsigned char *out) {
    const int length = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    static const unsigned char lead[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (int i = length - 1; i > 0; i--, code >>= 6)
        out[i] = (unsigned char)(0x80 | (code & 0x3f));
    out[0] = (unsigned char)(lead[length] | code);
    return length;
}

bool unicode_is_space(uint32_t code) {
    return (code >= 9 && code <= 13) || code == ' ' || code == 0x85 || code == 0xa0 || code == 0x1680 ||
           (code >= 0x2000 && code <= 0x200a) || code == 0x2028 || code == 0x2029 || code == 0x202f || code == 0x205f ||
           code == 0x3000;
}
