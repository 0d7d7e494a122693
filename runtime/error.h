// The one way in which a user's mistake ends: a message on stderr, exit status 2.
#pragma once
#include <stdarg.h> // va_list
#include <stdio.h>  // fprintf, vfprintf, stderr
#include <stdlib.h> // exit

enum { EXIT_USAGE = 2 };

// Says what is wrong, in which file or option, what was expected and what to change; one line without a full stop.
__attribute__((noreturn, format(printf, 1, 2))) static void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fflush(stdout); // so that the message comes after what was printed before it, in a pipe too
    fputs("train_gpt: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(EXIT_USAGE);
}
