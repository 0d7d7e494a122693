// What a parser says about malformed input: a text for its caller, which decides whether the process ends.
// A parser returns NULL when all is well, and otherwise the text, so that it can be run on any bytes by a test or a
// fuzzer, and in a thread that must not end the process.
#pragma once
#include <stdarg.h> // va_list
#include <stdio.h>  // vsnprintf

struct error_text {
    char text[1024];
};

__attribute__((format(printf, 2, 3), returns_nonnull)) static const char *error_format(struct error_text *error,
                                                                                       const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    return error->text;
}
