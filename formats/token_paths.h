// The files that a list of patterns names. Commas separate patterns, except inside {a,b} or after a backslash. A
// pattern that matches nothing, or a list with commas, may be the name of a file as it is.
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// Returns the paths of all matching files, each once, in byte order (glob's order depends on the locale); an .idx
// stands for its .bin. The caller frees the *count paths and the list. A pattern that no file matches ends the program,
// by a message that begins with `option`.
char **paths_find(const char *patterns, const char *option, int *count);
// path (size bytes) = a file that one of the patterns matches; false: none does, or its name is too long. Unlike
// paths_find it never ends the program.
bool paths_any(const char *patterns, char *path, size_t size);
__END_DECLS
