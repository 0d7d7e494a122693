// Finds links that lead out of a folder: of a stranger's folder, no file that lies elsewhere must be copied.
#pragma once
#include <stdbool.h>   // bool
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// Whether `path` begins with `folder` and a slash, which may end `folder` itself. False for folder "". Follows no link.
bool path_is_below(const char *path, const char *folder);
// Whether the file at `path`, with all links followed, lies below the folder in which `path` names it. blobs/ two
// folders above counts too: in Hugging Face's cache, snapshots have links into it. False if there is no such file.
bool file_stays_in_folder(const char *path);
__END_DECLS
