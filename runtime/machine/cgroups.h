// The control groups of this process, in which a container or a batch system bounds its memory and its CPU time.
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// text (n bytes) = the beginning of the kernel file root/path, ended by a 0; false where it is empty or can't be read.
bool read_kernel_file(const char *root, const char *path, char *text, size_t n);

// Calls `look` with the folder in /sys of each of the process's groups for a controller ("memory", "cpu") and of each
// ancestor, existing or not: a container may see its own group at the root of the mount while /proc names the path
// outside. unified: of version 2. root: where /proc and /sys are, "" except in tests; `folder` is without it.
void cgroups_each(const char *root, const char *controller,
                  void (*look)(const char *root, const char *folder, bool unified, void *context), void *context);
__END_DECLS
