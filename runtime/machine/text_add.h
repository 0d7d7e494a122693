// Makes texts part by part, as sentences of which a part may be missing, and copies texts.
#pragma once
#include <stddef.h>    // size_t
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// Appends in printf's form to a text, which ends with a 0 byte, in `size` bytes of memory. Cuts what does not fit.
void text_add(char *text, size_t size, const char *format, ...) __attribute__((format(printf, 3, 4)));
// Returns a copy of a text, which the caller frees. Ends the program where there is no memory for it.
char *text_copy(const char *text);
__END_DECLS
