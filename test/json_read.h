// A strict reader of JSON (RFC 8259) for the tests: whether a text is well formed, and what a member's value is.
#pragma once
#include <stdbool.h> // bool
#include <stdio.h>   // FILE
#include <stdlib.h>  // malloc
#include <string.h>  // strncmp, strspn

static const char *json_read_value(const char *c);

static inline const char *json_read_space(const char *c) { return c + strspn(c, " \t\n\r"); }

// Reads a string. Like each json_read_*, returns the place after what it read, or NULL where the text is malformed.
static inline const char *json_read_string(const char *c) {
    if (*c++ != '"')
        return NULL;
    while (*c != '"') {
        const unsigned char first = (unsigned char)*c;
        int more = 0;
        if (first < 0x20)
            return NULL;
        if (first == '\\' && c[1] == 'u' && strspn(c + 2, "0123456789abcdefABCDEF") >= 4)
            more = 5;
        else if (first == '\\' && c[1] && strchr("\"\\/bfnrt", c[1]))
            more = 1;
        else if (first == '\\')
            return NULL;
        else if (first >= 0x80) { // a well-formed character, decoded and held against its range
            more = first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : 1;
            unsigned code = first & (0x3fu >> more);
            if (first < 0xc0 || first > 0xf7)
                return NULL;
            for (int i = 1; i <= more; i++) {
                if (((unsigned char)c[i] & 0xc0) != 0x80)
                    return NULL;
                code = code << 6 | ((unsigned char)c[i] & 0x3f);
            }
            const unsigned least[] = {0, 0x80, 0x800, 0x10000};
            if (code < least[more] || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff))
                return NULL;
        }
        c += 1 + more;
    }
    return c + 1;
}
static inline const char *json_read_number(const char *c) {
    static const char digits[] = "0123456789";
    c += *c == '-';
    if (!strspn(c, digits) || (*c == '0' && strspn(c, digits) > 1))
        return NULL;
    c += strspn(c, digits);
    if (*c == '.') {
        if (!strspn(++c, digits))
            return NULL;
        c += strspn(c, digits);
    }
    if (*c == 'e' || *c == 'E') {
        c++;
        c += *c == '-' || *c == '+';
        if (!strspn(c, digits))
            return NULL;
        c += strspn(c, digits);
    }
    return c;
}
// Reads the members of an object (which have keys) or the elements of an array, from its opening to its closing
// bracket.
static inline const char *json_read_members(const char *c, char closing) {
    c = json_read_space(c + 1);
    if (*c == closing)
        return c + 1;
    for (;;) {
        if (closing == '}') {
            c = json_read_string(json_read_space(c));
            c = c ? json_read_space(c) : NULL;
            if (!c || *c++ != ':')
                return NULL;
        }
        c = json_read_value(c);
        if (!c)
            return NULL;
        if (*c == closing)
            return c + 1;
        if (*c++ != ',')
            return NULL;
    }
}
// Reads a value and the space around it.
static const char *json_read_value(const char *c) {
    c = json_read_space(c);
    if (*c == '{')
        c = json_read_members(c, '}');
    else if (*c == '[')
        c = json_read_members(c, ']');
    else if (*c == '"')
        c = json_read_string(c);
    else if (strncmp(c, "true", 4) == 0 || strncmp(c, "null", 4) == 0)
        c += 4;
    else if (strncmp(c, "false", 5) == 0)
        c += 5;
    else
        c = json_read_number(c);
    return c ? json_read_space(c) : NULL;
}
static inline bool json_is_valid(const char *text) {
    const char *end = json_read_value(text);
    return end && !*end;
}

// The number of members of the outermost object that have this key; -1: the text is malformed. `value` gets the last
// such member's value as it is written, cut to 255 characters, or "".
static inline int json_member(const char *object, const char *key, char value[256]) {
    int found = 0;
    const char *c = json_read_space(object) + 1;
    value[0] = 0;
    while (c && *c && *c != '}') {
        const char *const name = json_read_space(c) + 1;
        const char *const name_end = json_read_string(name - 1);
        if (!name_end)
            return -1;
        const char *const begin = json_read_space(json_read_space(name_end) + 1);
        c = json_read_value(begin);
        if (!c)
            return -1;
        if ((size_t)(name_end - 1 - name) == strlen(key) && strncmp(name, key, strlen(key)) == 0) {
            found++;
            const char *end = c;
            while (end > begin && strchr(" \t\r\n", end[-1]))
                end--;
            snprintf(value, 256, "%.*s", (int)(end - begin), begin);
        }
        c += *c == ',';
    }
    return found;
}

// Returns a file's first MiB as text, which the caller frees; NULL if the file can't be read.
static inline char *read_text(const char *path) {
    FILE *const file = fopen(path, "r");
    if (!file)
        return NULL;
    size_t length = 0, room = 1 << 20;
    char *const text = (char *)malloc(room);
    if (text) {
        length = fread(text, 1, room - 1, file);
        text[length] = 0;
    }
    fclose(file);
    return text;
}
