// Locks of files, which end with their holder. A lock belongs to the open file (an open-file-description lock, Linux
// 3.15), not to the process: it stays when a thread or a child ends, or another descriptor of the file is closed. An
// NFS server keeps locks for all its hosts; most shared file systems for each host.
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
// Takes the lock of the file at `path`, which it makes if missing, without waiting. On TAKEN and IMPOSSIBLE the file
// has this host, process and time, and the caller closes *fd, which frees the lock; otherwise *fd is -1. text: after
// HELD it names the holder; after IMPOSSIBLE, NO_FOLDER and NO_FILE it is the problem.
enum file_lock file_lock_take(int *fd, const char *path, struct error_text *text);

// text = "HOST PROCESS TIME\n" of the lock's last taker, who may have freed it. False and "": unreadable or empty.
bool file_lock_read(char text[FILE_LOCK_TEXT], const char *path);

// Locks one byte of an open file, maybe beyond the file's end, until the file is closed, without waiting. type: F_WRLCK
// (exclusive; fd must be writable) or F_RDLCK (shared). Returns 0 or an errno; EAGAIN: another has a lock.
int file_lock_byte(int fd, short type, off_t byte);
// Whether a lock by another opening of the file would prevent an F_WRLCK of the byte; false where that is not known.
bool file_byte_is_locked(int fd, off_t byte);
__END_DECLS
