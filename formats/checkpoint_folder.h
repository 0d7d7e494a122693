// The folder of a run's checkpoints, called the root: what the names in it mean, and how entries are removed.
//  OUT/checkpoints/step_00001000/               complete: its manifest names each file with its length and its hash
//  OUT/checkpoints/.step_00001000.PID.partial   being written, or left unfinished by process PID
//  OUT/checkpoints/.step_00001000.PID.replaced  complete, set aside for a moment while the same step is saved again
//  OUT/checkpoints/.step_00001000.PID.removing  being removed
// One process writes into a root, from one thread at a time; any number may read. While a writer may have temporary
// folders there, it locks the byte of the root whose offset is its PID. The lock ends with the process. That a PID
// exists would say too little: a killed process may stay as a zombie, and PIDs are used again. On most file systems of
// several hosts, a host sees only its own locks. Functions that return int return 0 or an errno.
#pragma once
#include <stdbool.h>   // bool
#include <stdint.h>    // int64_t
#include <sys/cdefs.h> // __BEGIN_DECLS
#include <sys/types.h> // pid_t

enum { CHECKPOINT_NAME = 64 }; // bytes of the longest name

enum checkpoint_kind { CHECKPOINT_STEP, CHECKPOINT_REPLACED, CHECKPOINT_PARTIAL, CHECKPOINT_REMOVING };

struct checkpoint_entry {
    enum checkpoint_kind kind;
    int64_t step;
    pid_t pid; // 0 for CHECKPOINT_STEP
    char name[CHECKPOINT_NAME];
};
struct checkpoint_entries {
    int count;
    struct checkpoint_entry *all; // the newest first, a step before what it .replaced; the caller frees it
};

static const int64_t CHECKPOINT_LAST_STEP = 999999999999999999; // 18 digits: what a name is read back from

__BEGIN_DECLS
// Returns the entry, with its name, of the folder of a step and kind. pid: of the writer; unused for CHECKPOINT_STEP.
struct checkpoint_entry checkpoint_entry_make(enum checkpoint_kind kind, int64_t step, pid_t pid);
// Parses a name in the root. False, *entry undefined: this program makes no such name, and must not touch the file.
bool checkpoint_entry_parse(struct checkpoint_entry *entry, const char *name);
// Marks this process as a writer in the open root, by locking its byte, until `root_fd` is closed. Keeps no writer out.
// Has no effect where the file system has no locks: there any process's temporary folder passes for a leftover.
void checkpoint_lock(int root_fd);
// Whether a process still writes the temporary folder: another descriptor than `root_fd` holds the lock of its PID.
// False where locks can't be asked for, and for this process's leftovers if it locked no other descriptor.
bool checkpoint_entry_is_in_use(int root_fd, const struct checkpoint_entry *entry);
// name = the file in a partial folder that marks the part of process `number`, from 1, as missing. The process removes
// the file when the part is written. After a failure it renames the file to the `failed` name, which needs no room.
void checkpoint_part_name(char name[CHECKPOINT_NAME], int number, bool failed);
int checkpoint_fsync(int fd);
// Flushes a folder to the disk. Returns 0 or an errno; 0, too, where the file system doesn't flush folders.
int checkpoint_fsync_folder(int fd);
// Closes *fd, which becomes -1 even after an error. Returns 0 or an errno.
int checkpoint_close(int *fd);
// Lists the root's entries, the newest step first. The caller frees entries->all even after an error. 0 or an errno.
int checkpoint_list(struct checkpoint_entries *entries, int root_fd);

// Removes a file, a link (not its target) or a folder with its content, 32 deep at most. An error may leave a rest.
int checkpoint_remove_tree(int parent_fd, const char *name);
// Removes a checkpoint, renamed .removing first: readers find all or none. 0 or an errno. Call checkpoint_lock before.
int checkpoint_remove(int root_fd, const struct checkpoint_entry *entry);
// Removes what dead writers and failed saves left, as far as possible. A checkpoint that was set aside gets its name
// back where its replacement was never published. The caller has called checkpoint_lock.
void checkpoint_remove_leftovers(int root_fd);
__END_DECLS
