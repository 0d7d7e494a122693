// Links that lead out of a folder: of a stranger's folder, no file that lies elsewhere must be copied.
#pragma once
#include <stdbool.h>   // bool
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// Whether a path begins with a folder's and a slash; false for the folder "". No link is followed.
bool path_is_below(const char *path, const char *folder);
// Whether the file at `path`, all links followed, lies below the folder before the last / of `path`, or below blobs/
// two folders above, as in the cache of Hugging Face, whose snapshots are links. False where it can't be found.
bool file_stays_in_folder(const char *path);
__END_DECLS
