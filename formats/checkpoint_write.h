// Writing a checkpoint so that it survives anything: a kill at any moment, a full disk, a power cut.
//
// A save writes and fsyncs every file under the partial name (checkpoint_folder.h), the manifest last, then fsyncs the
// folder, renames it, and fsyncs the root. Before the rename nothing looks like a checkpoint; after it everything is on
// the disk. A step that is saved again is exchanged with what was there in one call, or, on file systems that can't, by
// two renames, between which the .replaced folder is the checkpoint.
//
// Nothing here ends the process: each function returns NULL, or a text in the writer that says what failed, why, and
// what remains true, so that a failed save leaves the training alive. After a failure the writer holds nothing, what
// is not yet a checkpoint is removed as far as possible, and every later call returns the same text.
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

struct checkpoint_writer { // for checkpoint_write.c alone
    char root[PATH_MAX];
    struct checkpoint_entry step, partial; // the name that the folder will have, the name that it has
    struct manifest manifest;              // of the files that are ended
    int root_fd, folder_fd, file_fd;       // -1: not open
    bool failed;                           // for the reason that `error` holds
    struct error_text error;
    // the file that is being written
    char file[MANIFEST_FILE_NAME];
    uint64_t file_bytes; // handed to the kernel
    uint64_t synced;     // of which are known to be on the disk
    unsigned char *buffer;
    size_t buffered;
    struct hash128 *hash;
};

__BEGIN_DECLS
// Begins the checkpoint of `step`, making the root if it is missing (the folder above it is there), and removes what
// earlier writers left unfinished, since a full disk needs the room now.
const char *checkpoint_begin(struct checkpoint_writer *writer, const char *root, int64_t step);
// The files, one after the other: begin, any number of writes of any size, end. After the end the file is on the disk.
const char *checkpoint_file_begin(struct checkpoint_writer *writer, const char *name);
const char *checkpoint_file_write(struct checkpoint_writer *writer, const void *bytes, uint64_t count);
const char *checkpoint_file_end(struct checkpoint_writer *writer);
// A file whose bytes are all in memory.
const char *checkpoint_file(struct checkpoint_writer *writer, const char *name, const void *bytes, uint64_t count);
// Ends the save: from here on there is a checkpoint of this step. The writer has ended, whatever is returned.
const char *checkpoint_commit(struct checkpoint_writer *writer);
// Gives the save up and removes what was written, as far as possible. Does nothing to a writer that has ended.
void checkpoint_abandon(struct checkpoint_writer *writer);
__END_DECLS
