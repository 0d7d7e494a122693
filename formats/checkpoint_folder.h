// The folder of a run's checkpoints, the root: what its names mean, and removing.
//   OUT/checkpoints/step_00001000/               complete: its manifest names each file with its length and its hash
//   OUT/checkpoints/.step_00001000.PID.partial   being written, or left unfinished by process PID
//   OUT/checkpoints/.step_00001000.PID.replaced  complete, set aside for a moment while the same step is saved again
//   OUT/checkpoints/.step_00001000.PID.removing  being removed
// One process writes into a root, from one thread at a time; any number may read. A writer holds a lock while it may
// have temporary folders there: the byte of the root whose offset is its PID, by an open-file-description lock, which
// ends with the process. That a process has that PID would say too little: a killed one stays as a zombie until its
// parent asks for its status (never, in a container without an init), and PIDs are used again. File systems of several
// hosts keep a folder's locks to each host. Functions that return int return 0 or an errno.
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
// Returns the entry, with its name, of a step's folder of that kind, and of process pid, unused for CHECKPOINT_STEP.
struct checkpoint_entry checkpoint_entry_of(enum checkpoint_kind kind, int64_t step, pid_t pid);
// Parses a name. False, with *entry undefined: checkpoint_entry_of makes no such name, and files of other names stay.
bool checkpoint_entry_parse(struct checkpoint_entry *entry, const char *name);
// Locks this process's byte of the root that is open as `root_fd`, until the descriptor is closed: a sign that keeps no
// other writer out. Has no effect where the file system has no locks: folders of any process are leftovers there.
void checkpoint_lock(int root_fd);
// Whether a process is writing the temporary folder: another descriptor than `root_fd` holds the lock of the entry's
// PID. False where locks can't be asked for, and for what this process left, if it has locked no other descriptor.
bool checkpoint_entry_is_in_use(int root_fd, const struct checkpoint_entry *entry);
// name = the file that stands in a partial folder for the part of process `number`, from 1: the process removes it when
// the part is written, else renames it to the `failed` name, which needs no room. No checkpoint's file is named so.
void checkpoint_part_name(char name[CHECKPOINT_NAME], int number, bool failed);
// Flushes a file to the disk. Returns 0 or an errno.
int checkpoint_fsync(int fd);
// Flushes a folder to the disk; ignores the error of file systems that don't need it. Returns 0 or an errno.
int checkpoint_fsync_folder(int fd);
// Closes *fd, which is open and becomes -1, after an error too. Returns 0 or an errno.
int checkpoint_close(int *fd);
// Lists the root's entries, the newest step first; the caller frees entries->all in any case. Returns 0 or an errno.
int checkpoint_list(struct checkpoint_entries *entries, int root_fd);

// Removes a file, a link itself, or a folder with all in it, 32 deep at most. 0, or an errno: some may then be left.
int checkpoint_remove_tree(int parent_fd, const char *name);
// Removes a checkpoint, after checkpoint_lock; renames it .removing first: readers find all or none. 0 or an errno.
int checkpoint_remove(int root_fd, const struct checkpoint_entry *entry);
// Removes, after checkpoint_lock, what dead writers and failed saves left, as far as possible. A checkpoint that was
// set aside gets its name back where its replacement was never published.
void checkpoint_remove_leftovers(int root_fd);
__END_DECLS
