// This file is compiled for any CPU, as error.c, which calls it before anything is known of this one.
#include "runtime/machine/say.h"
#include <stdlib.h> // malloc, free
#include <string.h> // memcpy

// Returns the bytes of the character at `text` if it is printed as it is; 0 if its first byte is shown as \xNN.
static size_t say_length(const unsigned char *text) {
    const unsigned char c = *text;
    if (c == '\n')
        return !text[1] || (text[1] == ' ' && text[2] == ' ');
    if (c < 0x80)
        return c >= 0x20 && c != 0x7f;
    const size_t length = c >= 0xc2 && c <= 0xdf ? 2 : c >= 0xe0 && c <= 0xef ? 3 : c >= 0xf0 && c <= 0xf4 ? 4 : 0;
    // The second byte's bounds leave out control characters, overlong forms, surrogates and what is above U+10FFFF.
    const unsigned char least = c == 0xc2 || c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80;
    const unsigned char most = c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;
    for (size_t i = 1; i < length; i++)
        if (text[i] < (i == 1 ? least : 0x80) || text[i] > (i == 1 ? most : 0xbf))
            return 0;
    return length;
}

void say_escape(char *to, size_t size, const char *text) {
    size_t used = 0;
    while (*text) {
        char hex[5];
        const size_t plain = say_length((const unsigned char *)text), length = plain ? plain : 4;
        if (!plain)
            snprintf(hex, sizeof hex, "\\x%02x", (unsigned)(unsigned char)*text);
        if (used + length >= size)
            break;
        memcpy(to + used, plain ? text : hex, length);
        used += length;
        text += plain ? plain : 1;
    }
    to[used] = '\0';
}

// Prints as vfprintf does, escaped as by say. When out of memory, prints only the text's beginning.
void say_list(FILE *file, const char *format, va_list arguments) {
    char text[1024], shown[4 * sizeof text];
    va_list again;
    va_copy(again, arguments);
    const int bytes = vsnprintf(text, sizeof text, format, arguments);
    const size_t size = bytes < (int)sizeof text ? 0 : (size_t)bytes + 1;
    char *const longer = size ? (char *)malloc(5 * size) : NULL; // the text, then what is shown of it
    if (longer) {
        vsnprintf(longer, size, format, again);
        say_escape(longer + size, 4 * size, longer);
    } else
        say_escape(shown, sizeof shown, text);
    fputs(longer ? longer + size : shown, file);
    free(longer);
    va_end(again);
}

void say(FILE *file, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    say_list(file, format, arguments);
    va_end(arguments);
}

void say_warning(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("train_gpt: ", stderr);
    say_list(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
}
