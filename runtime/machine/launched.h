// Names of the work that this process enqueued last on a device: what may have caused an error that is reported late.
#pragma once
#include <stddef.h>    // size_t
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// Notes that work has been enqueued; from any thread. `name` stays as long as the process runs: the text of an
// expression, whose first word that ends with _kernel is the name, or, without such a word, the name itself.
void launched_note(const char *name);
// text (size bytes) = the last 12 names noted, newest first: "a, b"; equal neighbors once; "": none. Returns `text`.
const char *launched_last(char *text, size_t size);
__END_DECLS
