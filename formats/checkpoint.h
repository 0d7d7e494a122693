// Checkpoint folders that survive anything: a kill at any moment, a full disk, a power cut, a flipped bit.
//
//   OUT/checkpoints/step_00001000/               complete: its manifest names each file with its length and its XXH3
//   OUT/checkpoints/.step_00001000.PID.partial   being written, or left by process PID, which ended before it was done
//   OUT/checkpoints/.step_00001000.PID.replaced  complete, set aside for a moment while the same step is saved again
//   OUT/checkpoints/.step_00001000.PID.removing  being removed
//
// A save writes and fsyncs every file under the partial name, the manifest last, then fsyncs the folder, renames it, and
// fsyncs the root. Before the rename nothing looks like a checkpoint; after it everything is on the disk. A step that is
// saved again is exchanged with what was there in one call, or, on file systems that can't, by two renames, between
// which the .replaced folder is the checkpoint.
//
// One process writes into a root, from one thread at a time; any number may read. Nothing here ends the process: each
// function returns NULL or a text that says what failed, why, and what remains true, so that a failed save leaves the
// training alive. What is inside the files is their writers' business.
#pragma once
#include <dirent.h>    // fdopendir, readdir
#include <errno.h>     // errno, EINTR
#include <fcntl.h>     // openat, sync_file_range, posix_fadvise
#include <inttypes.h>  // PRId64
#include <limits.h>    // PATH_MAX
#include <signal.h>    // kill
#include <stdbool.h>   // bool
#include <stdint.h>    // uint64_t
#include <stdio.h>     // renameat, renameat2
#include <stdlib.h>    // malloc, free, qsort
#include <string.h>    // strerror
#include <sys/stat.h>  // mkdirat, fstat
#include <sys/types.h> // pid_t
#include <unistd.h>    // write, fsync, getpid, unlinkat

#define XXH_INLINE_ALL // no library to link, and compiled for this CPU
#include <xxhash.h>

#include "runtime/machine/error_text.h" // struct error_text
#include "formats/manifest.h"           // struct manifest

enum {
    CHECKPOINT_NAME = 64,       // bytes of step_N and of its temporary names
    CHECKPOINT_PIECE = 1 << 20, // hashed and written at a time: what is hashed is still in the cache when it is copied
    CHECKPOINT_WINDOW = 32 << 20, // dirty bytes that are sent to the disk at a time
};

// ---- names ----

static const int64_t CHECKPOINT_LAST_STEP = 999999999999999999; // 18 digits: what a name is read back from

// What a name in the root means.
enum checkpoint_kind { CHECKPOINT_STEP, CHECKPOINT_REPLACED, CHECKPOINT_PARTIAL, CHECKPOINT_REMOVING };

struct checkpoint_entry {
    enum checkpoint_kind kind;
    int64_t step;
    pid_t pid; // 0 for CHECKPOINT_STEP
    char name[CHECKPOINT_NAME];
};

static inline struct checkpoint_entry checkpoint_entry_of(enum checkpoint_kind kind, int64_t step, pid_t pid) {
    static const char *const endings[] = {"", "replaced", "partial", "removing"};
    struct checkpoint_entry entry;
    memset(&entry, 0, sizeof entry);
    entry.kind = kind;
    entry.step = step;
    if (kind == CHECKPOINT_STEP) {
        snprintf(entry.name, sizeof entry.name, "step_%08" PRId64, step);
        return entry;
    }
    entry.pid = pid;
    snprintf(entry.name, sizeof entry.name, ".step_%08" PRId64 ".%d.%s", step, (int)pid, endings[kind]);
    return entry;
}

// Whether a name is exactly one that checkpoint_entry_of makes: nothing else is ever read as a checkpoint or removed.
static bool checkpoint_entry_parse(struct checkpoint_entry *entry, const char *name) {
    int64_t step = -1;
    int pid = 0;
    if (strlen(name) >= CHECKPOINT_NAME)
        return false;
    if (sscanf(name, "step_%18" SCNd64, &step) == 1 && step >= 0) {
        *entry = checkpoint_entry_of(CHECKPOINT_STEP, step, 0);
        return strcmp(entry->name, name) == 0;
    }
    if (sscanf(name, ".step_%18" SCNd64 ".%9d.", &step, &pid) != 2 || step < 0 || pid <= 0)
        return false;
    for (int kind = CHECKPOINT_REPLACED; kind <= CHECKPOINT_REMOVING; kind++) {
        *entry = checkpoint_entry_of((enum checkpoint_kind)kind, step, (pid_t)pid);
        if (strcmp(entry->name, name) == 0)
            return true;
    }
    return false;
}

// Whether the process that made a temporary folder may still be at work on it. One of our own number is from a process
// before us (in a container they all have the same) or from a save of ours that failed.
static bool checkpoint_entry_is_in_use(const struct checkpoint_entry *entry) {
    return entry->pid != getpid() && (kill(entry->pid, 0) == 0 || errno == EPERM);
}

struct checkpoint_entries {
    int count;
    struct checkpoint_entry *all; // the newest first, a step before what it .replaced; owned
};

static int checkpoint_compare_entries(const void *a, const void *b) {
    const struct checkpoint_entry *const x = (const struct checkpoint_entry *)a;
    const struct checkpoint_entry *const y = (const struct checkpoint_entry *)b;
    return x->step != y->step   ? (x->step < y->step ? 1 : -1)
           : x->kind != y->kind ? (x->kind < y->kind ? -1 : 1)
                                : strcmp(x->name, y->name);
}

// A stream over a folder that is open already; the descriptor stays the caller's.
static DIR *checkpoint_open_stream(int folder_fd) {
    const int fd = openat(folder_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *const stream = fd < 0 ? NULL : fdopendir(fd);
    if (!stream && fd >= 0)
        close(fd);
    return stream;
}

// What of ours lies in the root; other names are not looked at. 0 or an errno; `entries` is to be freed in both cases.
static int checkpoint_list(struct checkpoint_entries *entries, int root_fd) {
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

// ---- removing ----

// Removes a file, a link (not what it points to), or a folder and all in it. 0 or an errno; the descent is relative to
// open folders and follows no links, so that it can't leave the root whatever is renamed meanwhile.
static int checkpoint_remove_tree(int parent_fd, const char *name, int depth) {
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
                checkpoint_remove_tree(fd, found->d_name, depth + 1);
        closedir(stream);
        error = unlinkat(parent_fd, name, AT_REMOVEDIR) == 0 ? 0 : errno;
        if (error != ENOTEMPTY && error != EEXIST)
            break;
    }
    close(fd);
    return error;
}

// Removes a whole checkpoint: under a name that nobody takes for one before its first file goes.
static int checkpoint_remove(int root_fd, const struct checkpoint_entry *entry) {
    const struct checkpoint_entry removing = checkpoint_entry_of(CHECKPOINT_REMOVING, entry->step, getpid());
    checkpoint_remove_tree(root_fd, removing.name, 0); // one left by a process of our number
    if (renameat(root_fd, entry->name, root_fd, removing.name) != 0)
        return errno;
    return checkpoint_remove_tree(root_fd, removing.name, 0);
}

// Removes what dead writers and failed saves left, as far as it can. A checkpoint that was set aside comes back if its
// replacement never took its place.
static void checkpoint_remove_leftovers(int root_fd) {
    struct checkpoint_entries entries;
    if (checkpoint_list(&entries, root_fd) == 0)
        for (int i = 0; i < entries.count; i++) {
            const struct checkpoint_entry *const entry = &entries.all[i];
            if (entry->kind == CHECKPOINT_STEP || checkpoint_entry_is_in_use(entry))
                continue;
            if (entry->kind != CHECKPOINT_REPLACED) {
                checkpoint_remove_tree(root_fd, entry->name, 0);
                continue;
            }
            const struct checkpoint_entry step = checkpoint_entry_of(CHECKPOINT_STEP, entry->step, 0);
            if (renameat(root_fd, entry->name, root_fd, step.name) != 0 && (errno == ENOTEMPTY || errno == EEXIST))
                checkpoint_remove(root_fd, entry);
        }
    free(entries.all);
}

// ---- writing ----

struct checkpoint_writer {
    char root[PATH_MAX];
    struct checkpoint_entry step, partial; // the name it will have, the name it has
    struct manifest manifest;              // of the files that are ended
    int root_fd, folder_fd, file_fd;       // -1: not open
    bool failed;                           // then `error` says why, and every call returns it again
    struct error_text error;
    // the file that is being written
    char file[MANIFEST_FILE_NAME];
    uint64_t file_bytes; // handed over to the kernel
    uint64_t synced;     // of which the writing to the disk was waited for
    unsigned char *buffer;
    size_t buffered;
    XXH3_state_t *hash; // by its own allocation, since it must lie on 64 bytes
};

// Ends the writer: closes all, frees all. The partial folder stays as it is.
static void checkpoint_release(struct checkpoint_writer *writer) {
    int *const fds[] = {&writer->file_fd, &writer->folder_fd, &writer->root_fd};
    for (int i = 0; i < 3; i++) {
        if (*fds[i] >= 0)
            close(*fds[i]);
        *fds[i] = -1;
    }
    manifest_free(&writer->manifest);
    free(writer->buffer);
    XXH3_freeState(writer->hash);
    writer->buffer = NULL;
    writer->hash = NULL;
}

// Gives up a save: what was written of it is removed, as far as it can be. Nothing if the writer has ended.
static void checkpoint_abandon(struct checkpoint_writer *writer) {
    if (writer->root_fd >= 0 && writer->folder_fd >= 0)
        checkpoint_remove_tree(writer->root_fd, writer->partial.name, 0);
    checkpoint_release(writer);
}

// Gives up the save with a text. `file` may be empty: then the folder itself is meant.
static const char *checkpoint_fail(struct checkpoint_writer *writer, const char *file, const char *what, int error) {
    const char *const hint =
        error == ENOSPC || error == EDQUOT ? "; free space, or keep fewer by --keep-checkpoints" : "";
    checkpoint_abandon(writer);
    writer->failed = true;
    return error_format(
        &writer->error,
        "%.500s/%s%s%s: %s: %s; step %" PRId64 " is not saved, the checkpoints before it are untouched%s", writer->root,
        writer->step.name, *file ? "/" : "", file, what, strerror(error), writer->step.step, hint);
}

static int checkpoint_fsync(int fd) {
    while (fsync(fd) != 0)
        if (errno != EINTR)
            return errno;
    return 0;
}
// Some file systems have nothing to do for a folder, and say so.
static int checkpoint_fsync_folder(int fd) {
    const int error = checkpoint_fsync(fd);
    return error == EINVAL || error == ENOTSUP ? 0 : error;
}

// Makes the root if it is missing, and its name last. The folder above it (the run's --out) is there already.
static int checkpoint_open_root(const char *root) {
    const int refused = mkdir(root, 0777) == 0 ? 0 : errno;
    if (!refused) {
        char above[PATH_MAX + 4];
        snprintf(above, sizeof above, "%s/..", root);
        const int fd = open(above, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd >= 0) {
            checkpoint_fsync_folder(fd);
            close(fd);
        }
    }
    const int fd = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT && refused)
        errno = refused; // why it is not there says more
    return fd;
}

// Begins the checkpoint of `step`, and removes what earlier writers left unfinished: a full disk needs the room now.
static const char *checkpoint_begin(struct checkpoint_writer *writer, const char *root, int64_t step) {
    memset(writer, 0, sizeof *writer);
    writer->root_fd = writer->folder_fd = writer->file_fd = -1;
    writer->step = checkpoint_entry_of(CHECKPOINT_STEP, step, 0);
    writer->partial = checkpoint_entry_of(CHECKPOINT_PARTIAL, step, getpid());
    writer->manifest.step = step;
    if ((size_t)snprintf(writer->root, sizeof writer->root, "%s", root) >= sizeof writer->root)
        return checkpoint_fail(writer, "", "the folder cannot be made", ENAMETOOLONG);
    if (step < 0 || step > CHECKPOINT_LAST_STEP)
        return checkpoint_fail(writer, "", "the folder cannot be made", EINVAL); // a fault of the program
    writer->buffer = (unsigned char *)malloc(CHECKPOINT_PIECE);
    writer->hash = XXH3_createState();
    if (!writer->buffer || !writer->hash)
        return checkpoint_fail(writer, "", "the folder cannot be made", ENOMEM);
    writer->root_fd = checkpoint_open_root(root);
    if (writer->root_fd < 0)
        return checkpoint_fail(writer, "", "the folder above it cannot be made or opened", errno);
    checkpoint_remove_leftovers(writer->root_fd);
    if (mkdirat(writer->root_fd, writer->partial.name, 0777) != 0)
        return checkpoint_fail(writer, "", "the folder cannot be made", errno);
    writer->folder_fd = openat(writer->root_fd, writer->partial.name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (writer->folder_fd >= 0)
        return NULL;
    const int error = errno;
    unlinkat(writer->root_fd, writer->partial.name, AT_REMOVEDIR);
    return checkpoint_fail(writer, "", "the folder cannot be opened", error);
}

static const char *checkpoint_open_file(struct checkpoint_writer *writer, const char *name) {
    snprintf(writer->file, sizeof writer->file, "%s", name);
    writer->file_bytes = writer->synced = 0;
    writer->buffered = 0;
    XXH3_128bits_reset(writer->hash);
    writer->file_fd = openat(writer->folder_fd, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    return writer->file_fd >= 0 ? NULL : checkpoint_fail(writer, name, "cannot be made", errno);
}

// Begins a file of the checkpoint; the one before it has been ended.
static const char *checkpoint_file_begin(struct checkpoint_writer *writer, const char *name) {
    if (writer->failed)
        return writer->error.text;
    if (!manifest_name_is_allowed(name) || writer->file_fd >= 0 || writer->manifest.num_files == MANIFEST_FILES ||
        manifest_find(&writer->manifest, name))
        return checkpoint_fail(writer, name, "cannot be made", EINVAL); // a fault of the program
    return checkpoint_open_file(writer, name);
}

// Sends what was written to the disk a window at a time and waits for the window before: a save of many gigabytes
// neither fills the memory with dirty pages, which stalls every writer of the machine, nor leaves all the work to the
// fsync at its end. What is on the disk leaves the page cache to the training data. 0 or an errno.
static int checkpoint_write_back(struct checkpoint_writer *writer) {
    if (writer->file_bytes % CHECKPOINT_WINDOW != 0)
        return 0;
    const off_t end = (off_t)writer->file_bytes, middle = end - CHECKPOINT_WINDOW, begin = (off_t)writer->synced;
    int failed = sync_file_range(writer->file_fd, middle, CHECKPOINT_WINDOW, SYNC_FILE_RANGE_WRITE);
    if (!failed && middle > begin) {
        failed = sync_file_range(writer->file_fd, begin, middle - begin,
                                 SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
        if (!failed)
            posix_fadvise(writer->file_fd, begin, middle - begin, POSIX_FADV_DONTNEED);
        writer->synced = (uint64_t)middle;
    }
    // A failed write is reported once, here or by fsync. Whatever else this says (not supported, say), fsync decides.
    return failed && (errno == EIO || errno == ENOSPC || errno == EDQUOT) ? errno : 0;
}

// `count` bytes, CHECKPOINT_PIECE at most.
static const char *checkpoint_write_piece(struct checkpoint_writer *writer, const unsigned char *bytes, size_t count) {
    XXH3_128bits_update(writer->hash, bytes, count);
    int error = 0;
    for (size_t done = 0; done < count && !error;) {
        const ssize_t written = write(writer->file_fd, bytes + done, count - done);
        if (written > 0)
            done += (size_t)written, writer->file_bytes += (uint64_t)written;
        else if (written == 0 || errno != EINTR)
            error = written == 0 ? EIO : errno;
    }
    if (!error)
        error = checkpoint_write_back(writer);
    if (!error)
        return NULL;
    char what[64];
    snprintf(what, sizeof what, "cannot be written at byte %" PRIu64, writer->file_bytes);
    return checkpoint_fail(writer, writer->file, what, error);
}

static const char *checkpoint_flush(struct checkpoint_writer *writer) {
    const size_t count = writer->buffered;
    writer->buffered = 0;
    return count ? checkpoint_write_piece(writer, writer->buffer, count) : NULL;
}

// Appends to the file. Any number of bytes: they leave in pieces of one size, so that the windows stay aligned.
static const char *checkpoint_file_write(struct checkpoint_writer *writer, const void *bytes, uint64_t count) {
    const unsigned char *rest = (const unsigned char *)bytes;
    const char *problem = NULL;
    if (writer->failed)
        return writer->error.text;
    if (writer->file_fd < 0)
        return checkpoint_fail(writer, "", "written to with no file begun", EINVAL); // a fault of the program
    while (count > 0 && !problem) {
        const size_t room = CHECKPOINT_PIECE - writer->buffered, part = count < room ? (size_t)count : room;
        if (part == CHECKPOINT_PIECE) {
            problem = checkpoint_write_piece(writer, rest, part);
        } else {
            memcpy(writer->buffer + writer->buffered, rest, part);
            writer->buffered += part;
            if (writer->buffered == CHECKPOINT_PIECE)
                problem = checkpoint_flush(writer);
        }
        rest += part;
        count -= part;
    }
    return problem;
}

// Everything of the file is on the disk after it.
static const char *checkpoint_close_file(struct checkpoint_writer *writer) {
    const char *const problem = checkpoint_flush(writer);
    if (problem)
        return problem;
    int error = checkpoint_fsync(writer->file_fd);
    if (error)
        return checkpoint_fail(writer, writer->file, "cannot be written to the disk", error);
    posix_fadvise(writer->file_fd, 0, 0, POSIX_FADV_DONTNEED);
    error = close(writer->file_fd) == 0 || errno == EINTR ? 0 : errno; // it is closed in every case
    writer->file_fd = -1;
    return error ? checkpoint_fail(writer, writer->file, "cannot be closed", error) : NULL;
}

static void checkpoint_hash_text(char text[MANIFEST_HASH + 1], const XXH3_state_t *state) {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state));
    for (int i = 0; i < MANIFEST_HASH / 2; i++)
        snprintf(text + 2 * i, 3, "%02x", canonical.digest[i]);
}

// Ends the file: it is on the disk, and in the manifest.
static const char *checkpoint_file_end(struct checkpoint_writer *writer) {
    if (writer->failed)
        return writer->error.text;
    if (writer->file_fd < 0)
        return checkpoint_fail(writer, "", "ended with no file begun", EINVAL); // a fault of the program
    const char *const problem = checkpoint_close_file(writer);
    if (problem)
        return problem;
    struct manifest_file *const file = manifest_add(&writer->manifest, writer->file);
    if (!file)
        return checkpoint_fail(writer, writer->file, "cannot be listed", ENOMEM);
    file->bytes = writer->file_bytes;
    checkpoint_hash_text(file->xxh3_128, writer->hash);
    return NULL;
}

// A file whose bytes are all there.
static const char *checkpoint_file(struct checkpoint_writer *writer, const char *name, const void *bytes,
                                   uint64_t count) {
    const char *problem = checkpoint_file_begin(writer, name);
    if (!problem)
        problem = checkpoint_file_write(writer, bytes, count);
    return problem ? problem : checkpoint_file_end(writer);
}

static const char *checkpoint_write_manifest(struct checkpoint_writer *writer) {
    size_t bytes = 0;
    char *const text = manifest_text(&writer->manifest, &bytes);
    if (!text)
        return checkpoint_fail(writer, MANIFEST_NAME, "cannot be made", ENOMEM);
    const char *problem = checkpoint_open_file(writer, MANIFEST_NAME);
    if (!problem)
        problem = checkpoint_file_write(writer, text, bytes);
    free(text);
    return problem ? problem : checkpoint_close_file(writer);
}

// Gives the partial folder its name. 0 or an errno; `aside` is then what the checkpoint of the same step that was there
// is called now, with an empty name if there was none.
static int checkpoint_rename_in(const struct checkpoint_writer *writer, struct checkpoint_entry *aside) {
    const int root = writer->root_fd;
    const char *const name = writer->step.name, *const partial = writer->partial.name;
    *aside = writer->partial;
    aside->name[0] = 0;
    if (renameat(root, partial, root, name) == 0)
        return 0;
    if (errno != ENOTEMPTY && errno != EEXIST && errno != ENOTDIR)
        return errno;
    if (renameat2(root, partial, root, name, RENAME_EXCHANGE) == 0) {
        *aside = writer->partial;
        return 0;
    }
    // Not every file system can exchange. Between the next two calls, the old one counts under its .replaced name.
    const struct checkpoint_entry replaced = checkpoint_entry_of(CHECKPOINT_REPLACED, writer->step.step, getpid());
    if (renameat(root, name, root, replaced.name) != 0)
        return errno;
    if (renameat(root, partial, root, name) != 0) {
        const int error = errno;
        renameat(root, replaced.name, root, name);
        return error;
    }
    *aside = replaced;
    return 0;
}

// Ends the save: from here on there is a checkpoint of this step. The writer has ended, whatever is returned.
static const char *checkpoint_commit(struct checkpoint_writer *writer) {
    if (writer->failed)
        return writer->error.text;
    if (writer->file_fd >= 0 || writer->manifest.num_files == 0)
        return checkpoint_fail(writer, "", "committed within a file or without any", EINVAL); // a fault of the program
    const char *const problem = checkpoint_write_manifest(writer);
    if (problem)
        return problem;
    int error = checkpoint_fsync_folder(writer->folder_fd);
    if (error)
        return checkpoint_fail(writer, "", "cannot be written to the disk", error);
    struct checkpoint_entry aside;
    error = checkpoint_rename_in(writer, &aside);
    if (error)
        return checkpoint_fail(writer, "", "cannot be given its name", error);
    error = checkpoint_fsync_folder(writer->root_fd);
    if (!error && aside.name[0])
        checkpoint_remove(writer->root_fd, &aside); // what can't be removed now is a leftover, for the next writer
    checkpoint_release(writer);
    if (!error)
        return NULL;
    writer->failed = true; // both are complete, but which of them a power cut leaves is not known: neither is removed
    return error_format(
        &writer->error,
        "%.500s: cannot be written to the disk: %s; step %" PRId64
        " is saved and complete, but may be lost if the machine goes down; the checkpoints before it are "
        "untouched",
        writer->root, strerror(error), writer->step.step);
}

// ---- verifying ----

// Opens a regular file without waiting for the other end of a pipe. 0 or an errno.
static int checkpoint_open_regular(int *fd, uint64_t *bytes, int folder_fd, const char *name) {
    struct stat status;
    *bytes = 0;
    *fd = openat(folder_fd, name, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (*fd < 0)
        return errno;
    int error = fstat(*fd, &status) == 0 ? 0 : errno;
    if (!error && !S_ISREG(status.st_mode))
        error = S_ISDIR(status.st_mode) ? EISDIR : EINVAL;
    if (error)
        close(*fd);
    else
        *bytes = (uint64_t)status.st_size;
    return error;
}

// Up to `count` bytes; fewer only at the end of the file. -1 and errno where it can't be read.
static ssize_t checkpoint_read(int fd, unsigned char *bytes, size_t count) {
    size_t done = 0;
    while (done < count) {
        const ssize_t got = read(fd, bytes + done, count - done);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return -1;
        if (got == 0)
            break;
        done += (size_t)got;
    }
    return (ssize_t)done;
}

static const char *checkpoint_read_manifest(struct manifest *manifest, int folder_fd, const char *folder,
                                            struct error_text *error) {
    char name[PATH_MAX + 32];
    int fd;
    uint64_t bytes;
    snprintf(name, sizeof name, "%s/" MANIFEST_NAME, folder);
    const int problem = checkpoint_open_regular(&fd, &bytes, folder_fd, MANIFEST_NAME);
    if (problem)
        return error_format(error, "%.500s: %s; it is no complete checkpoint", name, strerror(problem));
    // A byte more than may be: the parser refuses what is too long.
    const size_t room = bytes <= MANIFEST_BYTES ? (size_t)bytes : MANIFEST_BYTES + 1;
    char *const text = (char *)malloc(room + 1);
    const ssize_t got = text ? checkpoint_read(fd, (unsigned char *)text, room) : -1;
    const char *failed = NULL;
    if (got < 0)
        failed = error_format(error, "%.500s: cannot be read: %s", name, strerror(text ? errno : ENOMEM));
    else
        failed = manifest_parse(manifest, text, (size_t)got, name, error);
    free(text);
    close(fd);
    return failed;
}

// The XXH3 of the rest of the file, and its length. 0 or an errno.
static int checkpoint_hash_file(char hash[MANIFEST_HASH + 1], uint64_t *bytes, int fd) {
    unsigned char *const piece = (unsigned char *)malloc(CHECKPOINT_PIECE);
    XXH3_state_t *const state = XXH3_createState();
    ssize_t got = -1;
    errno = ENOMEM;
    *bytes = 0;
    if (piece && state) {
        XXH3_128bits_reset(state);
        do {
            got = checkpoint_read(fd, piece, CHECKPOINT_PIECE);
            if (got > 0) {
                XXH3_128bits_update(state, piece, (size_t)got);
                *bytes += (uint64_t)got;
            }
        } while (got > 0);
    }
    const int error = got < 0 ? errno : 0;
    if (!error)
        checkpoint_hash_text(hash, state);
    free(piece);
    XXH3_freeState(state);
    return error;
}

// One file against its entry; `hash` false: its presence and length alone.
static const char *checkpoint_check_file(const struct manifest_file *file, int folder_fd, const char *folder, bool hash,
                                         struct error_text *error) {
    int fd;
    uint64_t bytes;
    char found[MANIFEST_HASH + 1];
    int problem = checkpoint_open_regular(&fd, &bytes, folder_fd, file->name);
    if (problem)
        return error_format(error, "%.400s/%s: %s; its manifest lists it", folder, file->name, strerror(problem));
    const bool sized = bytes == file->bytes;
    if (sized && hash)
        problem = checkpoint_hash_file(found, &bytes, fd); // it may have changed since
    close(fd);
    if (problem)
        return error_format(error, "%.400s/%s: cannot be read at byte %" PRIu64 ": %s", folder, file->name, bytes,
                            strerror(problem));
    if (bytes != file->bytes)
        return error_format(error, "%.400s/%s: is %" PRIu64 " bytes long; its manifest says %" PRIu64, folder,
                            file->name, bytes, file->bytes);
    if (hash && strcmp(found, file->xxh3_128) != 0)
        return error_format(error, "%.400s/%s: is damaged: its XXH3 is %s; its manifest says %s", folder, file->name,
                            found, file->xxh3_128);
    return NULL;
}

static const char *checkpoint_check(struct manifest *manifest, const char *folder, bool hash,
                                    struct error_text *error) {
    memset(manifest, 0, sizeof *manifest);
    const int folder_fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder_fd < 0)
        return error_format(error, "%.500s: cannot be opened: %s", folder, strerror(errno));
    const char *problem = checkpoint_read_manifest(manifest, folder_fd, folder, error);
    for (int i = 0; i < manifest->num_files && !problem; i++)
        problem = checkpoint_check_file(&manifest->files[i], folder_fd, folder, hash, error);
    close(folder_fd);
    if (problem)
        manifest_free(manifest);
    return problem;
}

// Whether the folder is a complete checkpoint: each file that its manifest lists is there, as long as it should be, and
// has its XXH3. Files that it doesn't list may lie beside them. On success the manifest is the caller's to free.
static const char *checkpoint_verify(struct manifest *manifest, const char *folder, struct error_text *error) {
    return checkpoint_check(manifest, folder, true, error);
}

// ---- finding ----

// Told why something newer than what is found is passed over, and of leftovers.
struct checkpoint_listener {
    void (*say)(void *context, const char *text); // may be NULL
    void *context;
};
static inline void checkpoint_say(const struct checkpoint_listener *listener, const char *text) {
    if (listener && listener->say)
        listener->say(listener->context, text);
}

static void checkpoint_say_leftover(const struct checkpoint_listener *listener, const char *root,
                                    const struct checkpoint_entry *entry) {
    struct error_text text;
    if (checkpoint_entry_is_in_use(entry))
        error_format(&text, "%.500s/%s: is being written or removed by process %d; it is not looked at", root,
                     entry->name, (int)entry->pid);
    else
        error_format(&text, "%.500s/%s: was left by a save that did not end; the next save removes it", root,
                     entry->name);
    checkpoint_say(listener, text.text);
}

// One that goes by another step than its name says would be resumed at the wrong place.
static const char *checkpoint_check_entry(struct manifest *manifest, const char *folder,
                                          const struct checkpoint_entry *entry, bool hash, struct error_text *error) {
    const char *const problem = checkpoint_check(manifest, folder, hash, error);
    if (problem || manifest->step == entry->step)
        return problem;
    const int64_t step = manifest->step;
    manifest_free(manifest);
    return error_format(error, "%.500s/" MANIFEST_NAME ": is of step %" PRId64 ", not of the folder's", folder, step);
}

static const char *checkpoint_path(char path[PATH_MAX], const char *folder, const char *name,
                                   struct error_text *error) {
    if ((size_t)snprintf(path, PATH_MAX, "%s/%s", folder, name) < PATH_MAX)
        return NULL;
    return error_format(error, "%.500s...: the name is too long", folder);
}

static const char *checkpoint_newest_of(char path[PATH_MAX], struct manifest *manifest, const char *root,
                                        const struct checkpoint_entries *entries,
                                        const struct checkpoint_listener *listener, struct error_text *error) {
    int candidates = 0;
    for (int i = 0; i < entries->count; i++) {
        const struct checkpoint_entry *const entry = &entries->all[i];
        if (entry->kind == CHECKPOINT_PARTIAL || entry->kind == CHECKPOINT_REMOVING) {
            checkpoint_say_leftover(listener, root, entry);
            continue;
        }
        candidates++;
        const char *problem = checkpoint_path(path, root, entry->name, error);
        if (!problem)
            problem = checkpoint_check_entry(manifest, path, entry, true, error);
        if (!problem)
            return NULL;
        checkpoint_say(listener, problem);
        path[0] = 0;
    }
    if (!candidates)
        return NULL;
    return error_format(error, "%.500s: none of its %d checkpoints is complete", root, candidates);
}

// The newest checkpoint that verifies: its folder and its manifest, to be freed. The listener hears why each newer one
// is passed over. An empty path and NULL: there is none, nor anything that looks like one. Where there are some and
// none verifies, that is a problem: to begin anew beside them is the user's decision.
static const char *checkpoint_newest(char path[PATH_MAX], struct manifest *manifest, const char *root,
                                     const struct checkpoint_listener *listener, struct error_text *error) {
    struct checkpoint_entries entries;
    memset(manifest, 0, sizeof *manifest);
    path[0] = 0;
    const int root_fd = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root_fd < 0)
        return errno == ENOENT ? NULL : error_format(error, "%.500s: cannot be opened: %s", root, strerror(errno));
    const int listed = checkpoint_list(&entries, root_fd);
    close(root_fd);
    const char *const problem = listed ? error_format(error, "%.500s: cannot be read: %s", root, strerror(listed))
                                       : checkpoint_newest_of(path, manifest, root, &entries, listener, error);
    free(entries.all);
    return problem;
}

// What a user names: a checkpoint, which then must verify; or a folder of checkpoints, or a run's --out folder, of which
// it is the newest. That there is none is a problem here.
static const char *checkpoint_resolve(char path[PATH_MAX], struct manifest *manifest, const char *given,
                                      const struct checkpoint_listener *listener, struct error_text *error) {
    char inside[PATH_MAX];
    struct stat status;
    memset(manifest, 0, sizeof *manifest);
    path[0] = 0;
    if (stat(given, &status) != 0)
        return error_format(error, "%.500s: cannot be opened: %s", given, strerror(errno));
    if (!S_ISDIR(status.st_mode))
        return error_format(error, "%.500s: is no folder; expected a checkpoint or a run's --out folder", given);
    const char *problem = checkpoint_path(inside, given, MANIFEST_NAME, error);
    if (problem)
        return problem;
    if (lstat(inside, &status) == 0) {
        snprintf(path, PATH_MAX, "%s", given);
        problem = checkpoint_verify(manifest, given, error);
    } else {
        problem = checkpoint_path(inside, given, "checkpoints", error);
        if (!problem)
            problem = checkpoint_newest(path, manifest, stat(inside, &status) == 0 ? inside : given, listener, error);
        if (!problem && !path[0])
            problem = error_format(error,
                                   "%.500s: holds no checkpoint: no " MANIFEST_NAME ", no step_NNNNNNNN, no "
                                   "checkpoints/step_NNNNNNNN",
                                   given);
    }
    if (problem)
        path[0] = 0;
    return problem;
}

// ---- keeping few ----

// The newest step that verifies, -1 if none does.
static int64_t checkpoint_newest_step(const char *root, const struct checkpoint_entries *entries) {
    struct error_text unused;
    struct manifest manifest;
    char path[PATH_MAX];
    for (int i = 0; i < entries->count; i++) {
        const struct checkpoint_entry *const entry = &entries->all[i];
        if (entry->kind != CHECKPOINT_STEP || checkpoint_path(path, root, entry->name, &unused) ||
            checkpoint_check_entry(&manifest, path, entry, true, &unused))
            continue;
        manifest_free(&manifest);
        return entry->step;
    }
    return -1;
}

static const char *checkpoint_prune_entries(const char *root, int root_fd, const struct checkpoint_entries *entries,
                                            int keep, int64_t newest, struct error_text *error) {
    const char *failed = NULL;
    int kept = 0;
    for (int i = 0; i < entries->count; i++) {
        const struct checkpoint_entry *const entry = &entries->all[i];
        struct manifest manifest;
        struct error_text unused;
        char path[PATH_MAX];
        if (entry->kind != CHECKPOINT_STEP || entry->step > newest)
            continue;
        if (kept < keep) {
            // One that lacks a file doesn't count: it would push out one that could be resumed from.
            const bool whole =
                entry->step == newest || (!checkpoint_path(path, root, entry->name, &unused) &&
                                          !checkpoint_check_entry(&manifest, path, entry, false, &unused));
            if (whole && entry->step != newest)
                manifest_free(&manifest);
            kept += whole;
            continue;
        }
        const int problem = checkpoint_remove(root_fd, entry);
        if (problem && problem != ENOENT)
            failed = error_format(error, "%.500s/%s: cannot be removed: %s; the newer checkpoints are untouched", root,
                                  entry->name, strerror(problem));
    }
    return failed;
}

// Removes the oldest checkpoints beyond `keep` (0: none), and leftovers. `newest` is the step that was just saved and so
// is known to be complete; -1: the newest that verifies, which takes reading it. It always stays, and what is newer than
// it is not touched: a run that went back to an earlier step may still be wanted from its later one.
static const char *checkpoint_prune(const char *root, int keep, int64_t newest, struct error_text *error) {
    struct checkpoint_entries entries;
    const int root_fd = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root_fd < 0)
        return error_format(error, "%.500s: cannot be opened: %s", root, strerror(errno));
    checkpoint_remove_leftovers(root_fd);
    const int listed = checkpoint_list(&entries, root_fd);
    const char *problem = NULL;
    if (listed)
        problem = error_format(error, "%.500s: cannot be read: %s", root, strerror(listed));
    else if (keep > 0)
        problem = checkpoint_prune_entries(root, root_fd, &entries, keep,
                                           newest >= 0 ? newest : checkpoint_newest_step(root, &entries), error);
    free(entries.all);
    close(root_fd);
    return problem;
}
