// Names of the work that this process enqueued last on a device, so that an error which the device reports late can say
// what may have caused it.
#pragma once
#include <stddef.h>    // size_t
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// Notes that work of this name has been enqueued. `name` must stay as it is as long as the process runs: the text of an
// expression whose first word that ends with _kernel is the name, or, without one, the name itself. Any thread may call this.
void launched_note(const char *name);
// Writes the names of what was enqueued last to `text` (size bytes), the newest first, as "a, b, c"; a name noted several
// times in a row is written once. Returns the text: empty where nothing was noted.
const char *launched_last(char *text, size_t size);
__END_DECLS
