// Links that lead out of a folder: what lies in a folder from elsewhere must not take other files along.
#pragma once
#include <stdbool.h>   // bool
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// Whether the file at `path` lies, all links of its last name followed, in the folder of that path. As in the cache of
// Hugging Face, whose snapshots are links, it may lie in blobs/, two folders above, too. False where it can't be found.
bool link_stays_in_folder(const char *path);
__END_DECLS
