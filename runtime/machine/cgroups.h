// The control groups of this process, in which a container or a batch system bounds its memory and its CPU time.
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// text (n bytes) = the beginning of the file root + path ("/proc/..."), and a 0. False: empty, or unreadable.
bool read_kernel_file(const char *root, const char *path, char *text, size_t n);

// Calls `look` for each control group of the process and for each group above it. folder: the group's, "/sys/...",
// which may not exist: in a container /proc may name a path outside. unified: it is of version 2, else of version 1's
// `controller` ("memory", "cpu"). root: stands before /proc, /sys and `folder`; "" except in tests.
void cgroups_each(const char *root, const char *controller,
                  void (*look)(const char *root, const char *folder, bool unified, void *context), void *context);
__END_DECLS
