#include "formats/checkpoint_folder.h"
#include "runtime/files/file_lock.h" // file_lock_byte
#include <dirent.h>                  // fdopendir, readdir
#include <errno.h>                   // errno
#include <fcntl.h>                   // openat, F_RDLCK
#include <inttypes.h>                // PRId64
#include <stdio.h>                   // renameat, snprintf
#include <stdlib.h>                  // realloc, free, qsort
#include <string.h>                  // strcmp
#include <unistd.h>                  // fsync, getpid, unlinkat

// The names' endings, in the order in which a search for the newest looks at entries of one step.
static const struct checkpoint_kind_row {
    enum checkpoint_kind kind;
    const char *ending;
} checkpoint_kinds[] = {
    {CHECKPOINT_STEP, ""},
    {CHECKPOINT_REPLACED, "replaced"},
    {CHECKPOINT_PARTIAL, "partial"},
    {CHECKPOINT_REMOVING, "removing"},
};
enum { CHECKPOINT_KINDS = sizeof checkpoint_kinds / sizeof *checkpoint_kinds };

static const struct checkpoint_kind_row *checkpoint_kind_row(enum checkpoint_kind kind) {
    for (int i = 0; i < CHECKPOINT_KINDS; i++)
        if (checkpoint_kinds[i].kind == kind)
            return &checkpoint_kinds[i];
    abort(); // a kind without a row
}

struct checkpoint_entry checkpoint_entry_make(enum checkpoint_kind kind, int64_t step, pid_t pid) {
    struct checkpoint_entry entry;
    memset(&entry, 0, sizeof entry);
    entry.kind = kind;
    entry.step = step;
    if (kind == CHECKPOINT_STEP) {
        snprintf(entry.name, sizeof entry.name, "step_%08" PRId64, step);
        return entry;
    }
    entry.pid = pid;
    snprintf(entry.name, sizeof entry.name, ".step_%08" PRId64 ".%d.%s", step, (int)pid,
             checkpoint_kind_row(kind)->ending);
    return entry;
}

bool checkpoint_entry_parse(struct checkpoint_entry *entry, const char *name) {
    int64_t step = -1;
    int pid = 0;
    if (strlen(name) >= CHECKPOINT_NAME)
        return false;
    if (sscanf(name, "step_%18" SCNd64, &step) == 1 && step >= 0) {
        *entry = checkpoint_entry_make(CHECKPOINT_STEP, step, 0);
        return strcmp(entry->name, name) == 0;
    }
    if (sscanf(name, ".step_%18" SCNd64 ".%9d.", &step, &pid) != 2 || step < 0 || pid <= 0)
        return false;
    for (int i = 0; i < CHECKPOINT_KINDS; i++) {
        *entry = checkpoint_entry_make(checkpoint_kinds[i].kind, step, (pid_t)pid);
        if (strcmp(entry->name, name) == 0)
            return true;
    }
    return false;
}

// Takes a read lock of this process's PID: processes of two containers may have the same one at once. Ignores errors.
void checkpoint_lock(int root_fd) { file_lock_byte(root_fd, F_RDLCK, getpid()); }

bool checkpoint_entry_is_in_use(int root_fd, const struct checkpoint_entry *entry) {
    return file_byte_is_locked(root_fd, entry->pid);
}

void checkpoint_part_name(char name[CHECKPOINT_NAME], int number, bool failed) {
    snprintf(name, CHECKPOINT_NAME, failed ? ".failed_%05d" : ".part_%05d", number);
}

// Orders entries for qsort: the newest step first, then by the rows of their kinds, then by name.
static int checkpoint_compare_entries(const void *a, const void *b) {
    const struct checkpoint_entry *const x = (const struct checkpoint_entry *)a;
    const struct checkpoint_entry *const y = (const struct checkpoint_entry *)b;
    return x->step != y->step   ? (x->step < y->step ? 1 : -1)
           : x->kind != y->kind ? (checkpoint_kind_row(x->kind) < checkpoint_kind_row(y->kind) ? -1 : 1)
                                : strcmp(x->name, y->name);
}

// Returns a stream that lists an open folder, which stays the caller's. closedir frees the stream. NULL: see errno.
static DIR *checkpoint_open_stream(int folder_fd) {
    const int fd = openat(folder_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *const stream = fd < 0 ? NULL : fdopendir(fd);
    if (!stream && fd >= 0)
        close(fd);
    return stream;
}

int checkpoint_list(struct checkpoint_entries *entries, int root_fd) {
    int room = 0, error = 0;
    entries->count = 0;
    entries->all = NULL;
    DIR *const stream = checkpoint_open_stream(root_fd);
    if (!stream)
        return errno;
    for (;;) {
        struct checkpoint_entry entry;
        errno = 0;
        const struct dirent *const found = readdir(stream);
        error = errno;
        if (!found)
            break;
        if (!checkpoint_entry_parse(&entry, found->d_name))
            continue;
        if (entries->count == room) {
            room = room ? 2 * room : 64;
            void *const all = realloc(entries->all, (size_t)room * sizeof *entries->all);
            if (!all) {
                error = ENOMEM;
                break;
            }
            entries->all = (struct checkpoint_entry *)all;
        }
        entries->all[entries->count++] = entry;
    }
    closedir(stream);
    if (entries->count)
        qsort(entries->all, (size_t)entries->count, sizeof *entries->all, checkpoint_compare_entries);
    return error;
}

// Removes a file, or a folder with its content. depth: how many folders it lies below checkpoint_remove_tree's. Returns
// 0 or an errno. Descends by open folders and follows no links, so that no rename can lead it out of the root.
static int checkpoint_remove_below(int parent_fd, const char *name, int depth) {
    enum { DEPTH = 32, PASSES = 16 };
    if (unlinkat(parent_fd, name, 0) == 0)
        return 0;
    if (errno != EISDIR)
        return errno;
    if (depth == DEPTH)
        return ELOOP;
    const int fd = openat(parent_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return errno;
    int error = 0;
    for (int pass = 0; pass < PASSES; pass++) { // a listing may miss names while others are removed
        DIR *const stream = checkpoint_open_stream(fd);
        if (!stream) {
            error = errno;
            break;
        }
        for (const struct dirent *found = readdir(stream); found; found = readdir(stream))
            if (strcmp(found->d_name, ".") != 0 && strcmp(found->d_name, "..") != 0)
                checkpoint_remove_below(fd, found->d_name, depth + 1);
        closedir(stream);
        error = unlinkat(parent_fd, name, AT_REMOVEDIR) == 0 ? 0 : errno;
        if (error != ENOTEMPTY && error != EEXIST)
            break;
    }
    close(fd);
    return error;
}

int checkpoint_remove_tree(int parent_fd, const char *name) { return checkpoint_remove_below(parent_fd, name, 0); }

int checkpoint_remove(int root_fd, const struct checkpoint_entry *entry) {
    const struct checkpoint_entry removing = checkpoint_entry_make(CHECKPOINT_REMOVING, entry->step, getpid());
    checkpoint_remove_tree(root_fd, removing.name); // a leftover of a process with the same number
    if (renameat(root_fd, entry->name, root_fd, removing.name) != 0)
        return errno;
    return checkpoint_remove_tree(root_fd, removing.name);
}

int checkpoint_fsync(int fd) {
    while (fsync(fd) != 0)
        if (errno != EINTR)
            return errno;
    return 0;
}
int checkpoint_fsync_folder(int fd) {
    const int error = checkpoint_fsync(fd);
    return error == EINVAL || error == ENOTSUP ? 0 : error;
}
int checkpoint_close(int *fd) {
    const int error = close(*fd) == 0 || errno == EINTR ? 0 : errno; // the descriptor is closed in any case
    *fd = -1;
    return error;
}

void checkpoint_remove_leftovers(int root_fd) {
    struct checkpoint_entries entries;
    if (checkpoint_list(&entries, root_fd) == 0)
        for (int i = 0; i < entries.count; i++) {
            const struct checkpoint_entry *const entry = &entries.all[i];
            if (entry->kind == CHECKPOINT_STEP || checkpoint_entry_is_in_use(root_fd, entry))
                continue;
            if (entry->kind != CHECKPOINT_REPLACED) {
                checkpoint_remove_tree(root_fd, entry->name);
                continue;
            }
            const struct checkpoint_entry step = checkpoint_entry_make(CHECKPOINT_STEP, entry->step, 0);
            if (renameat(root_fd, entry->name, root_fd, step.name) != 0 && (errno == ENOTEMPTY || errno == EEXIST))
                checkpoint_remove(root_fd, entry);
        }
    free(entries.all);
}
