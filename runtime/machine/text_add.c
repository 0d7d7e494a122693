#include "runtime/machine/text_add.h"
#include <stdarg.h> // va_list
#include <stdio.h>  // vsnprintf
#include <string.h> // strlen

void text_add(char *text, size_t size, const char *format, ...) {
    const size_t used = strlen(text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + used, size - used, format, arguments);
    va_end(arguments);
}
