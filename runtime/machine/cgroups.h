// The control groups of this process, in which a container or a batch system bounds its memory and its CPU time.
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// text (n bytes) = the beginning of the file root + path ("/proc/..."), and a 0. False: empty, or unreadable.
bool read_kernel_file(const char *root, const char *path, char *text, size_t n);

// Calls `look` with the folder "/sys/..." of each of the process's groups, of version 2 (unified) and of version 1's
// controller ("memory", "cpu"), and of each ancestor. Some may not exist: a container may see its own group at the
// mount's root while /proc names the path outside. root: before /proc and /sys, "" except in tests; not in `folder`.
void cgroups_each(const char *root, const char *controller,
                  void (*look)(const char *root, const char *folder, bool unified, void *context), void *context);
__END_DECLS
