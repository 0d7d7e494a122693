#include "formats/json_field.h"

#include <stdint.h> // uint64_t
#include <string.h> // memcpy, strchr

#include "runtime/text/utf8.h" // utf8_decode, utf8_encode

enum { DEEPEST = 64, LONGEST_NUMBER = 256 };

// A scan of a line. Functions advance `at` over what they take. They return false where the line needs another parser.
struct json_scan {
    const unsigned char *at, *end;
    unsigned char *text; // where the field's text goes
    size_t text_bytes;
    int found; // how often the field was met
};

static bool scan_value(struct json_scan *scan, const char *field, int depth);

static void skip_space(struct json_scan *scan) {
    while (scan->at < scan->end && (*scan->at == ' ' || *scan->at == '\t' || *scan->at == '\n' || *scan->at == '\r'))
        scan->at++;
}
// Takes white space and the next character, whichever it is. Returns whether there was one and it was `character`.
static bool take(struct json_scan *scan, int character) {
    skip_space(scan);
    return scan->at < scan->end && *(scan->at++) == character;
}
// Takes white space. Returns whether the next character, which is not taken, is this one.
static bool is_next(struct json_scan *scan, int character) {
    skip_space(scan);
    return scan->at < scan->end && *scan->at == character;
}

static bool take_if_next(struct json_scan *scan, int character) {
    return is_next(scan, character) && take(scan, character);
}

// Whether all 8 bytes surely stand for themselves in a string: ASCII, no control character, neither " nor \.
static bool are_plain(const unsigned char *bytes) {
    const uint64_t ones = 0x0101010101010101u, tops = 0x8080808080808080u;
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    const uint64_t quote = word ^ ones * '"', backslash = word ^ ones * '\\';
    // A byte below n borrows in x - n, and its own top bit is clear (Mycroft 1987); a borrow from the byte below may
    // only name a plain byte in vain.
    const uint64_t other = ((word - ones * 0x20) | (quote - ones) | (backslash - ones) | word) & tops;
    return other == 0;
}

// Takes 4 hexadecimal digits: *code = their value.
static bool take_hex(struct json_scan *scan, uint32_t *code) {
    *code = 0;
    if (scan->end - scan->at < 4)
        return false;
    for (int i = 0; i < 4; i++) {
        const unsigned char c = *scan->at++;
        const int digit = c >= '0' && c <= '9'   ? c - '0'
                          : c >= 'a' && c <= 'f' ? c - 'a' + 10
                          : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                                 : -1;
        if (digit < 0)
            return false;
        *code = *code << 4 | (uint32_t)digit;
    }
    return true;
}
// Takes what follows a backslash: out = the *count bytes (at most 4) that the escape stands for.
static bool take_escape(struct json_scan *scan, unsigned char *out, int *count) {
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    if (scan->at == scan->end)
        return false;
    const unsigned char name = *scan->at++;
    uint32_t code, low;
    *count = 1;
    if (name != 'u') {
        const char *place = name ? strchr(names, name) : NULL;
        if (place)
            out[0] = (unsigned char)values[place - names];
        return place != NULL;
    }
    if (!take_hex(scan, &code) || (code >= 0xdc00 && code < 0xe000))
        return false;
    if (code >= 0xd800 && code < 0xdc00) {
        if (scan->end - scan->at < 6 || scan->at[0] != '\\' || scan->at[1] != 'u')
            return false;
        scan->at += 2;
        if (!take_hex(scan, &low) || low < 0xdc00 || low >= 0xe000)
            return false;
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    *count = utf8_encode(code, out);
    return true;
}
// Takes a quoted string. out (*out_bytes) = its text, no longer than in the line. With out NULL, sets *out_bytes to 0.
static bool take_string(struct json_scan *scan, unsigned char *out, size_t *out_bytes) {
    const unsigned char *const begin = out;
    if (!take(scan, '"'))
        return false;
    while (scan->at < scan->end) {
        if (scan->end - scan->at >= 8 && are_plain(scan->at)) {
            if (out)
                memcpy(out, scan->at, 8), out += 8;
            scan->at += 8;
            continue;
        }
        unsigned char escaped[4];
        const unsigned char *from = scan->at;
        const unsigned char c = *from;
        int count = 1;
        if (c == '"') {
            scan->at++;
            *out_bytes = out ? (size_t)(out - begin) : 0;
            return true;
        }
        scan->at++;
        if (c == '\\') {
            if (!take_escape(scan, escaped, &count))
                return false;
            from = escaped;
        } else if (c >= 0x80) {
            uint32_t code;
            count = utf8_decode(from, (size_t)(scan->end - from), &code);
            if (count == 0)
                return false;
            scan->at = from + count;
        } else if (c < 0x20) {
            return false;
        }
        if (out)
            memcpy(out, from, (size_t)count), out += count;
    }
    return false;
}

static bool take_digits(struct json_scan *scan) {
    const unsigned char *begin = scan->at;
    while (scan->at < scan->end && *scan->at >= '0' && *scan->at <= '9')
        scan->at++;
    return scan->at > begin;
}
// Takes a number. False: what comes next is no number of JSON, or it has more than LONGEST_NUMBER characters.
static bool scan_number(struct json_scan *scan) {
    const unsigned char *begin = scan->at;
    scan->at += *scan->at == '-';
    if (scan->at < scan->end && *scan->at == '0')
        scan->at++; // no digit may follow
    else if (!take_digits(scan))
        return false;
    if (scan->at < scan->end && *scan->at == '.') {
        scan->at++;
        if (!take_digits(scan))
            return false;
    }
    if (scan->at < scan->end && (*scan->at == 'e' || *scan->at == 'E')) {
        scan->at++;
        scan->at += scan->at < scan->end && (*scan->at == '+' || *scan->at == '-');
        if (!take_digits(scan))
            return false;
    }
    return scan->at - begin <= LONGEST_NUMBER;
}

// Scans a member. If its name is `field`, copies the string. If the name begins the path `field`, scans for the rest.
static bool scan_member(struct json_scan *scan, const char *field, int depth) {
    const unsigned char *key = scan->at + 1;
    size_t unused;
    if (!take_string(scan, NULL, &unused))
        return false;
    const size_t key_bytes = (size_t)(scan->at - 1 - key);
    if (memchr(key, '\\', key_bytes) || !take(scan, ':'))
        return false;
    const size_t name_bytes = field ? strlen(field) : 0;
    const char *dot = field ? strchr(field, '.') : NULL;
    if (field && key_bytes == name_bytes && memcmp(key, field, name_bytes) == 0) {
        if (scan->found++ || !is_next(scan, '"'))
            return false;
        return take_string(scan, scan->text, &scan->text_bytes);
    }
    const bool on_the_way = dot && key_bytes == (size_t)(dot - field) && memcmp(key, field, key_bytes) == 0;
    if (on_the_way && scan->found)
        return false; // of a key that is there twice the last value counts
    return scan_value(scan, on_the_way ? dot + 1 : NULL, depth);
}
// Scans an object that begins at scan->at, as scan_value does. depth: how many values enclose a member, this one too.
static bool scan_object(struct json_scan *scan, const char *field, int depth) {
    scan->at++;
    if (take_if_next(scan, '}'))
        return true;
    do {
        if (!is_next(scan, '"') || !scan_member(scan, field, depth))
            return false;
    } while (take_if_next(scan, ','));
    return take(scan, '}');
}
static bool scan_array(struct json_scan *scan, int depth) {
    scan->at++;
    if (take_if_next(scan, ']'))
        return true;
    do {
        if (!scan_value(scan, NULL, depth))
            return false;
    } while (take_if_next(scan, ','));
    return take(scan, ']');
}
// Scans the next value, which lies inside `depth` others. If it has the field, a name or a path with dots, copies the
// field's string to scan->text. field NULL: seeks none. Returns false where the line needs another parser.
static bool scan_value(struct json_scan *scan, const char *field, int depth) {
    static const char *const words[] = {"true", "false", "null"};
    size_t unused;
    skip_space(scan);
    if (scan->at == scan->end || depth == DEEPEST)
        return false;
    switch (*scan->at) {
    case '{': return scan_object(scan, field, depth + 1);
    case '[': return scan_array(scan, depth + 1);
    case '"': return take_string(scan, NULL, &unused);
    case 't':
    case 'f':
    case 'n':
        for (size_t i = 0; i < 3; i++) {
            const size_t length = strlen(words[i]);
            if ((size_t)(scan->end - scan->at) >= length && memcmp(scan->at, words[i], length) == 0)
                return scan->at += length, true;
        }
        return false;
    default: return scan_number(scan);
    }
}

bool json_field_find(unsigned char *text, size_t *text_bytes, const unsigned char *line, size_t bytes,
                     const char *field) {
    struct json_scan scan;
    memset(&scan, 0, sizeof scan);
    scan.at = line;
    scan.end = line + bytes;
    scan.text = text;
    *text_bytes = 0;
    if (!is_next(&scan, '{') || !scan_value(&scan, field, 0))
        return false;
    skip_space(&scan);
    *text_bytes = scan.text_bytes;
    return scan.at == scan.end && scan.found == 1;
}
