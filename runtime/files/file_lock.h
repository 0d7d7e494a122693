// Locks of files, which end with their holder, whatever way it ends. A lock belongs to the open file (an
// open-file-description lock, Linux 3.15), not to the process: a thread that ends, a child, and another descriptor of
// the same file that is closed leave it. An NFS server keeps locks for all its hosts; most other file systems of
// several hosts keep them to each host.
#pragma once
#include "runtime/machine/error_text.h" // struct error_text
#include <stdbool.h>                    // bool
#include <sys/cdefs.h>                  // __BEGIN_DECLS
#include <sys/types.h>                  // off_t

enum file_lock {
    FILE_LOCK_TAKEN,
    FILE_LOCK_HELD,       // by another, whom the text names
    FILE_LOCK_IMPOSSIBLE, // neither the file system nor the kernel has locks; the text says why
    FILE_LOCK_NO_FOLDER,  // the folder of the file is missing
    FILE_LOCK_NO_FILE,    // it can't be opened or made for writing; the text says why
};

enum { FILE_LOCK_TEXT = 320 }; // bytes of "HOST PROCESS TIME\n", of which a host's name has at most 253

__BEGIN_DECLS
// Takes the lock of the file at `path`, created where missing, and writes this host and process into it. *fd: TAKEN:
// the open file, whose closing frees the lock; IMPOSSIBLE: the open file; else -1. text: set unless TAKEN.
enum file_lock file_lock_take(int *fd, const char *path, struct error_text *text);

// text = what the process that last took the lock of `path` wrote, never twice the same. False: unreadable or empty.
bool file_lock_read(char text[FILE_LOCK_TEXT], const char *path);

// Locks one byte of an open file, or beyond its end, without waiting: as F_WRLCK exclusively, or as F_RDLCK together
// with others, for which the file need not be open for writing. Returns 0 or an errno; EAGAIN: another has the byte.
int file_lock_byte(int fd, short type, off_t byte);
// Whether a lock of another open file is in the way of an F_WRLCK of that byte; false where that can't be found.
bool file_byte_is_locked(int fd, off_t byte);
__END_DECLS
