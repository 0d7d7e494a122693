// Names of the work that this process enqueued last on a device: what may have caused an error that is reported late.
#pragma once
#include <stddef.h>    // size_t
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// Records what is about to be enqueued, from any thread. name: an expression as text, which is not copied and must stay
// as long as the process runs. Of it the first word that ends with _kernel is shown, or all if there is none.
void launched_record(const char *name);
// text (size bytes, cut to fit) = the last 12 names noted, newest first, equal neighbors once: "a, b". Returns text.
const char *launched_last(char *text, size_t size);
__END_DECLS
