// One process's part of a checkpoint that several write: its ranges of files that checkpoint_write.h has laid out.
//   process 0: checkpoint_begin, checkpoint_shared_file ..., checkpoint_expect_parts; then tells the others
//   each:      checkpoint_part_begin, for each file checkpoint_part_open, _write ..., _close; checkpoint_part_end
//   process 0: checkpoint_wait_for_parts, checkpoint_commit
// Every byte of a part is on the disk before checkpoint_part_end says so. Processes may be of several hosts, where the
// file system lets them write different ranges of one file.
//
// No function ends the process: each returns NULL or, in the part, what failed. After a failure the part has ended, and
// later calls return its text. Process 0 is told (`unheard`: it could not be), except by checkpoint_part_begin.
#pragma once
#include "formats/checkpoint_folder.h"  // struct checkpoint_entry
#include "formats/manifest.h"           // MANIFEST_FILE_NAME
#include "runtime/machine/error_text.h" // struct error_text
#include <limits.h>                     // PATH_MAX
#include <stdbool.h>                    // bool
#include <stddef.h>                     // size_t
#include <stdint.h>                     // uint64_t
#include <sys/cdefs.h>                  // __BEGIN_DECLS

struct checkpoint_part { // run/resume.cuh reads given_up and unheard; the rest is checkpoint_part.c's
    char root[PATH_MAX];
    struct checkpoint_entry partial;
    int number;             // of the process
    int folder_fd, file_fd; // -1: not open
    bool failed;            // `error` says why
    bool given_up;          // process 0 had given up the checkpoint before, and says why
    bool unheard;           // it failed, and process 0, which waits for it, could not be told
    struct error_text error;
    char file[MANIFEST_FILE_NAME];
    unsigned char *buffer;
    uint64_t at; // offset of the buffer's first byte in the file
    size_t buffered;
    uint64_t begun, begun_end; // range that is on its way to the disk
    uint64_t dirty, dirty_end; // range that was written since then; dirty_end 0: empty
    uint64_t dirty_bytes;
};

__BEGIN_DECLS
// Opens the partial folder of `step`, which process 0 (PID: writer) has made. Process 0 calls it too. number: this
// process's, from 0. After NULL, checkpoint_part_end or _abandon must follow; on a problem tell process 0.
const char *checkpoint_part_begin(struct checkpoint_part *part, const char *root, int64_t step, pid_t writer,
                                  int number);
// Opens a file that process 0 has laid out by checkpoint_shared_file. Only one may be open. NULL or the problem.
const char *checkpoint_part_open(struct checkpoint_part *part, const char *name);
// Copies `count` bytes for `offset` of the open file, to write them now or later. A problem may be of earlier bytes.
const char *checkpoint_part_write(struct checkpoint_part *part, uint64_t offset, const void *bytes, uint64_t count);
// Closes the file. All that this process wrote to it is then on the disk. Returns NULL or the problem.
const char *checkpoint_part_close(struct checkpoint_part *part);
// Ends the part and tells process 0 that it is written. After a problem only returns that. All files must be closed.
const char *checkpoint_part_end(struct checkpoint_part *part);
// Abandons a part that was begun; does nothing if it has ended. Process 0 is not told, and must give up as well.
void checkpoint_part_abandon(struct checkpoint_part *part);
__END_DECLS
