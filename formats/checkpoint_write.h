// Writes a checkpoint so that a kill at any moment, a full disk or a power cut leaves a complete one, new or old: every
// file is written and fsynced in the partial folder (checkpoint_folder.h), the manifest last, then the folder is
// fsynced and renamed, and the root fsynced. A step that is saved again is exchanged with its older checkpoint in one
// call or, on file systems that can't, by two renames, between which the .replaced folder is the checkpoint.
//
// Several processes may write a checkpoint together: this writer lays out the files that they share, waits until each
// has written its part (checkpoint_part.h), and reads these files back for their hashes before it writes the manifest.
//
// No function here ends the process: each returns NULL or, in the writer, what failed and the checkpoints' state. After
// a failure the writer holds nothing, the partial folder is removed if possible, and later calls return that text.
#pragma once
#include "formats/checkpoint_folder.h"  // struct checkpoint_entry
#include "formats/manifest.h"           // struct manifest
#include "runtime/files/hash.h"         // struct hash128
#include "runtime/machine/error_text.h" // struct error_text
#include <limits.h>                     // PATH_MAX
#include <stdbool.h>                    // bool
#include <stddef.h>                     // size_t
#include <stdint.h>                     // uint64_t
#include <sys/cdefs.h>                  // __BEGIN_DECLS

struct checkpoint_writer { // others read only `failed`
    char root[PATH_MAX];
    struct checkpoint_entry step, partial; // the folder's final name, and its name during the save
    struct manifest manifest;              // of the files that are complete
    int root_fd, folder_fd, file_fd;       // -1: not open
    bool failed;                           // `error` says why
    int parts;                             // other processes that write a part, 1 to `parts`
    struct error_text error;
    // the file that is being written
    char file[MANIFEST_FILE_NAME];
    uint64_t file_bytes; // handed to the kernel
    uint64_t synced;     // bytes of the file whose write was waited for
    unsigned char *buffer;
    size_t buffered;
    struct hash128 *hash;
};

__BEGIN_DECLS
// Begins to save `step`, until checkpoint_commit or checkpoint_abandon. First makes the root and the folder above it,
// if missing, and removes unfinished saves, to free the disk. A problem, here or in a later call, ends the save.
const char *checkpoint_begin(struct checkpoint_writer *writer, const char *root, int64_t step);
// Begins a file of a new name (manifest_name_is_allowed). checkpoint_file_end precedes the next. NULL or the problem.
const char *checkpoint_file_begin(struct checkpoint_writer *writer, const char *name);
// Appends `count` bytes to the file. The caller may reuse `bytes` on return. Returns NULL or the problem.
const char *checkpoint_file_write(struct checkpoint_writer *writer, const void *bytes, uint64_t count);
// Ends the file. It is on the disk then, and the manifest will list it. Returns NULL or the problem.
const char *checkpoint_file_end(struct checkpoint_writer *writer);
// Writes a whole file, `count` bytes, from memory: begins it, writes it and ends it. Returns NULL or the problem.
const char *checkpoint_write_file(struct checkpoint_writer *writer, const char *name, const void *bytes,
                                  uint64_t count);
// Creates, on process 0, a file of `bytes` bytes that several processes write. The first `count` bytes are `begin`; the
// parts write the rest. Process 0's part must open and close the file even if it writes nothing: that flushes `begin`.
const char *checkpoint_shared_file(struct checkpoint_writer *writer, const char *name, const void *begin,
                                   uint64_t count, uint64_t bytes);
// Prepares for parts of processes 1 to `parts`; this is process 0. Call it after all shared files and before any part.
const char *checkpoint_expect_parts(struct checkpoint_writer *writer, int parts);
// Waits until the other processes have written their parts. A part that could not be written is an error. A process
// that ends without a word is waited for: who watches over the processes ends this one too. NULL or the problem.
const char *checkpoint_wait_for_parts(struct checkpoint_writer *writer);
// Publishes the checkpoint, and ends the save in any case. Shared files must be whole (checkpoint_wait_for_parts). If
// only the root's fsync fails, that is an error too: a power cut may undo the checkpoint.
const char *checkpoint_commit(struct checkpoint_writer *writer);
// Abandons a save that was begun, and removes what was written, as far as possible. Does nothing if it has ended.
void checkpoint_abandon(struct checkpoint_writer *writer);
__END_DECLS
