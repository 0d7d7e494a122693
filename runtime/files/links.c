#include "runtime/files/links.h"
#include <limits.h> // PATH_MAX
#include <stdio.h>  // snprintf
#include <stdlib.h> // realpath
#include <string.h> // strrchr

bool path_is_below(const char *path, const char *folder) {
    const size_t length = strlen(folder);
    return length > 0 && strncmp(path, folder, length) == 0 && (path[length] == '/' || folder[length - 1] == '/');
}

// Whether the resolved path lies below the folder, whose links are followed; false where the folder does not exist.
static bool lies_in(const char *resolved, const char *folder) {
    char real[PATH_MAX];
    if (!realpath(folder, real))
        return false;
    return path_is_below(resolved, real);
}

bool file_stays_in_folder(const char *path) {
    char resolved[PATH_MAX], folder[PATH_MAX], blobs[PATH_MAX + 16];
    const char *const slash = strrchr(path, '/');
    if (!realpath(path, resolved) ||
        (size_t)snprintf(folder, sizeof folder, "%.*s", slash ? (int)(slash - path) + 1 : 1, slash ? path : ".") >=
            sizeof folder)
        return false;
    snprintf(blobs, sizeof blobs, "%s/../../blobs", folder);
    return lies_in(resolved, folder) || lies_in(resolved, blobs);
}
