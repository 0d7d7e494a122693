#include "runtime/machine/error_text.h"
#include <stdarg.h> // va_list
#include <stdio.h>  // vsnprintf

const char *error_format(struct error_text *error, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    return error->text;
}
