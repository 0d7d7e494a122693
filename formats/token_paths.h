// The files that a list of patterns names. Commas separate patterns, except inside {a,b} or after a backslash. A
// pattern that matches nothing, or a list with commas, may be the name of a file as it is.
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// Returns the *count paths that match a list of patterns, each once, in byte order; an .idx becomes its .bin. The
// caller frees the paths and the list. A pattern without a match ends the program, naming `option`.
char **paths_find(const char *patterns, const char *option, int *count);
// path (size bytes) = a file that a pattern matches, maybe an .idx. False: none, or path is too short. Never exits.
bool paths_find_file(const char *patterns, char *path, size_t size);
__END_DECLS
