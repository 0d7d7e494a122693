// Prints what the program says on stdout and stderr. Names of files and hosts, and texts out of files, may hold bytes
// that act on a terminal: control characters, C1's as UTF-8 too, and bytes that are no UTF-8 are shown as \xNN. Line
// breaks stay at the end of what is said, and before an indented line, as in a list.
#pragma once
#include <stdarg.h>    // va_list
#include <stddef.h>    // size_t
#include <stdio.h>     // FILE
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// Prints as fprintf does, but shows as \xNN the bytes that act on a terminal, most line breaks among them.
void say(FILE *file, const char *format, ...) __attribute__((format(printf, 2, 3)));
void say_list(FILE *file, const char *format, va_list arguments) __attribute__((format(printf, 2, 0)));
// Prints "train_gpt: ", the text, escaped as by say, and a newline on stderr; the program goes on.
void say_warning(const char *format, ...) __attribute__((format(printf, 1, 2)));
// to (size > 0 bytes) = the text, escaped as by say, and a 0. Ends before the first character that does not fit.
void say_escape(char *to, size_t size, const char *text);
__END_DECLS
