// The folder of a run's checkpoints, the root: what its names mean, and removing.
//
//   OUT/checkpoints/step_00001000/               complete: its manifest names each file with its length and its hash
//   OUT/checkpoints/.step_00001000.PID.partial   being written, or left unfinished by process PID
//   OUT/checkpoints/.step_00001000.PID.replaced  complete, set aside for a moment while the same step is saved again
//   OUT/checkpoints/.step_00001000.PID.removing  being removed
//
// One process writes into a root, from one thread at a time; any number may read. Functions that return int return 0 or
// an errno.
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
struct checkpoint_entry checkpoint_entry_of(enum checkpoint_kind kind, int64_t step, pid_t pid);
// Parses a name; false where it is not exactly one that checkpoint_entry_of makes. Others are neither read nor removed.
bool checkpoint_entry_parse(struct checkpoint_entry *entry, const char *name);
// Whether the process that made a temporary folder may still be writing it. A folder with this process's own number is
// left by a process before it (in a container all have the same number) or by a failed save.
bool checkpoint_entry_is_in_use(const struct checkpoint_entry *entry);
// The file in a partial folder that stands for the part of process `number` until it is written, when that process
// removes it; where it can't be written, the process gives it the name of a failed one. Neither takes room on a disk
// that is full. No file of a checkpoint has such a name.
void checkpoint_part_name(char name[CHECKPOINT_NAME], int number, bool failed);
// Lists the entries of the root that is open as `root_fd`; other names are skipped. The caller frees entries->all,
// after an error too.
int checkpoint_list(struct checkpoint_entries *entries, int root_fd);

// Removes a file, a link (not what it points to), or a folder and all in it.
int checkpoint_remove_tree(int parent_fd, const char *name);
// Removes a whole checkpoint, which is renamed first: no reader finds it incomplete under its own name.
int checkpoint_remove(int root_fd, const struct checkpoint_entry *entry);
// Removes what dead writers and failed saves left, as far as possible. A checkpoint that was set aside gets its name
// back where its replacement was never published.
void checkpoint_remove_leftovers(int root_fd);
__END_DECLS
