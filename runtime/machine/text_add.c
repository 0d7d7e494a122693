#include "runtime/machine/text_add.h"
#include "runtime/machine/error.h" // fail
#include <stdarg.h>                // va_list
#include <stdio.h>                 // vsnprintf
#include <string.h>                // strlen

void text_add(char *text, size_t size, const char *format, ...) {
    const size_t used = strlen(text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + used, size - used, format, arguments);
    va_end(arguments);
}

char *text_copy(const char *text) {
    char *const copy = strdup(text);
    if (!copy)
        fail("out of memory for a text of %zu bytes", strlen(text));
    return copy;
}
