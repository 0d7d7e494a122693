// Names of the work that this process enqueued last on a device, so that an error which the device reports late can say
// what may have caused it.
#pragma once
#include <stddef.h>    // size_t
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// Notes that work has been enqueued; from any thread. `name` stays as long as the process runs: the text of an
// expression, whose first word that ends with _kernel is the name, or, without such a word, the name itself.
void launched_note(const char *name);
// text (size bytes) = the names of the last 12 that were noted, the newest first, as "a, b, c"; a name noted several
// times in a row is written once. Returns `text`: "" where nothing was noted.
const char *launched_last(char *text, size_t size);
__END_DECLS
