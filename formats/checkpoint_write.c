#include "formats/checkpoint_write.h"
#include "formats/checkpoint_hash.h" // checkpoint_hash_file
#include <errno.h>                   // errno, EINTR
#include <fcntl.h>                   // openat, sync_file_range, posix_fadvise
#include <inttypes.h>                // PRId64
#include <stdio.h>                   // renameat, renameat2
#include <stdlib.h>                  // malloc, free
#include <string.h>                  // strerror
#include <sys/stat.h>                // mkdirat
#include <time.h>                    // nanosleep
#include <unistd.h>                  // write, getpid, unlinkat

enum {
    CHECKPOINT_CHUNK = 1 << 20,   // bytes hashed and written at a time: still in the cache when the kernel copies them
    CHECKPOINT_WINDOW = 32 << 20, // dirty bytes that are sent to the disk at a time
};

// Ends the writer: closes its open descriptors and frees all that it holds. The partial folder stays.
static void checkpoint_release(struct checkpoint_writer *writer) {
    int *const fds[] = {&writer->file_fd, &writer->folder_fd, &writer->root_fd};
    for (int i = 0; i < 3; i++) {
        if (*fds[i] >= 0)
            close(*fds[i]);
        *fds[i] = -1;
    }
    manifest_free(&writer->manifest);
    free(writer->buffer);
    hash128_free(writer->hash);
    writer->buffer = NULL;
    writer->hash = NULL;
}

void checkpoint_abandon(struct checkpoint_writer *writer) {
    if (writer->root_fd >= 0 && writer->folder_fd >= 0)
        checkpoint_remove_tree(writer->root_fd, writer->partial.name);
    checkpoint_release(writer);
}

// Abandons the save as failed, and returns the problem's text. file: the name of the file that has the problem, or ""
// for the folder. It must not point into the manifest, which is freed before the text is written.
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

// Creates the root. Also creates the folder above it, the run's --out, where that was removed or renamed since the run
// began: the checkpoints are all that is left of the run. Returns 0 or an errno; EEXIST: the root is there already.
static int checkpoint_make_root(const char *root) {
    char above[PATH_MAX];
    const char *const slash = strrchr(root, '/');
    if (mkdir(root, 0777) == 0)
        return 0;
    if (errno != ENOENT || !slash || (size_t)(slash - root) >= sizeof above)
        return errno;
    snprintf(above, sizeof above, "%.*s", (int)(slash - root), root);
    return mkdir(above, 0777) == 0 && mkdir(root, 0777) == 0 ? 0 : errno;
}
// Opens the root. If it is missing, makes it and flushes the folder above it. Returns the descriptor, or -1 and errno.
static int checkpoint_open_root(const char *root) {
    const int refused = checkpoint_make_root(root);
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
        errno = refused; // the error that says why the root is missing
    return fd;
}

const char *checkpoint_begin(struct checkpoint_writer *writer, const char *root, int64_t step) {
    memset(writer, 0, sizeof *writer);
    writer->root_fd = writer->folder_fd = writer->file_fd = -1;
    writer->step = checkpoint_entry_make(CHECKPOINT_STEP, step, 0);
    writer->partial = checkpoint_entry_make(CHECKPOINT_PARTIAL, step, getpid());
    writer->manifest.step = step;
    if ((size_t)snprintf(writer->root, sizeof writer->root, "%s", root) >= sizeof writer->root)
        return checkpoint_fail(writer, "", "the folder cannot be made", ENAMETOOLONG);
    if (step < 0 || step > CHECKPOINT_LAST_STEP)
        return checkpoint_fail(writer, "", "the folder cannot be made", EINVAL); // a fault of the program
    writer->buffer = (unsigned char *)malloc(CHECKPOINT_CHUNK);
    writer->hash = hash128_new();
    if (!writer->buffer || !writer->hash)
        return checkpoint_fail(writer, "", "the folder cannot be made", ENOMEM);
    writer->root_fd = checkpoint_open_root(root);
    if (writer->root_fd < 0)
        return checkpoint_fail(writer, "", "the folder above it cannot be made or opened", errno);
    checkpoint_lock(writer->root_fd);
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

// Creates a file of a new name in the partial folder, and resets the writer's count and hash. NULL or the problem.
static const char *checkpoint_open_file(struct checkpoint_writer *writer, const char *name) {
    snprintf(writer->file, sizeof writer->file, "%s", name);
    writer->file_bytes = writer->synced = 0;
    writer->buffered = 0;
    hash128_reset(writer->hash);
    writer->file_fd = openat(writer->folder_fd, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    return writer->file_fd >= 0 ? NULL : checkpoint_fail(writer, name, "cannot be made", errno);
}

// Checks that a file of that name may begin now. If it may not, the save ends as failed. Returns NULL or the problem.
static const char *checkpoint_file_refusal(struct checkpoint_writer *writer, const char *name) {
    if (writer->failed)
        return writer->error.text;
    if (!manifest_name_is_allowed(name) || writer->file_fd >= 0 || writer->manifest.num_files == MANIFEST_FILES ||
        manifest_find(&writer->manifest, name))
        return checkpoint_fail(writer, name, "cannot be made", EINVAL); // a fault of the program
    return NULL;
}
const char *checkpoint_file_begin(struct checkpoint_writer *writer, const char *name) {
    const char *const problem = checkpoint_file_refusal(writer, name);
    return problem ? problem : checkpoint_open_file(writer, name);
}

// Starts to write each window of CHECKPOINT_WINDOW bytes to the disk once it is full, and waits for the window before
// it. A large save then neither fills the memory with dirty pages, which stalls every writer of the machine, nor leaves
// all to the last fsync. Drops written pages from the page cache, for the training data. Returns 0 or an errno.
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
    // The kernel reports a failed write once, here or by fsync. Other errors (not supported, say) leave it to fsync.
    return failed && (errno == EIO || errno == ENOSPC || errno == EDQUOT) ? errno : 0;
}

// Hashes and writes CHECKPOINT_CHUNK bytes; only a file's last chunk has fewer. NULL, or the problem: the save ends.
static const char *checkpoint_write_chunk(struct checkpoint_writer *writer, const unsigned char *bytes, size_t count) {
    hash128_update(writer->hash, bytes, count);
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

// Writes the buffered bytes, if there are any, to the file, and empties the buffer. Returns NULL or the problem.
static const char *checkpoint_flush(struct checkpoint_writer *writer) {
    const size_t count = writer->buffered;
    writer->buffered = 0;
    return count ? checkpoint_write_chunk(writer, writer->buffer, count) : NULL;
}

const char *checkpoint_file_write(struct checkpoint_writer *writer, const void *bytes, uint64_t count) {
    const unsigned char *rest = (const unsigned char *)bytes;
    const char *problem = NULL;
    if (writer->failed)
        return writer->error.text;
    if (writer->file_fd < 0)
        return checkpoint_fail(writer, "", "written to with no file begun", EINVAL); // a fault of the program
    while (count > 0 && !problem) { // all chunks but the file's last have one size, so that windows stay aligned
        const size_t room = CHECKPOINT_CHUNK - writer->buffered, part = count < room ? (size_t)count : room;
        if (part == CHECKPOINT_CHUNK) {
            problem = checkpoint_write_chunk(writer, rest, part);
        } else {
            memcpy(writer->buffer + writer->buffered, rest, part);
            writer->buffered += part;
            if (writer->buffered == CHECKPOINT_CHUNK)
                problem = checkpoint_flush(writer);
        }
        rest += part;
        count -= part;
    }
    return problem;
}

// Writes the rest of the file and, once it is all on the disk, closes it. Adds nothing to the manifest.
static const char *checkpoint_close_file(struct checkpoint_writer *writer) {
    const char *const problem = checkpoint_flush(writer);
    if (problem)
        return problem;
    int error = checkpoint_fsync(writer->file_fd);
    if (error)
        return checkpoint_fail(writer, writer->file, "cannot be written to the disk", error);
    posix_fadvise(writer->file_fd, 0, 0, POSIX_FADV_DONTNEED);
    error = checkpoint_close(&writer->file_fd);
    return error ? checkpoint_fail(writer, writer->file, "cannot be closed", error) : NULL;
}

const char *checkpoint_file_end(struct checkpoint_writer *writer) {
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
    hash128_text(file->xxh3_128, writer->hash);
    return NULL;
}

const char *checkpoint_write_file(struct checkpoint_writer *writer, const char *name, const void *bytes,
                                  uint64_t count) {
    const char *problem = checkpoint_file_begin(writer, name);
    if (!problem)
        problem = checkpoint_file_write(writer, bytes, count);
    return problem ? problem : checkpoint_file_end(writer);
}

// ---- files that several processes write ----

// Writes the file's buffered beginning, makes the file `bytes` long and closes it. The writers of its parts fsync it.
static const char *checkpoint_lay_out(struct checkpoint_writer *writer, uint64_t bytes) {
    const char *const problem = checkpoint_flush(writer);
    if (problem)
        return problem;
    int error = writer->file_bytes <= bytes ? 0 : EINVAL;
    while (!error && ftruncate(writer->file_fd, (off_t)bytes) != 0)
        error = errno == EINTR ? 0 : errno;
    if (error)
        return checkpoint_fail(writer, writer->file, "cannot be given its length", error);
    error = checkpoint_close(&writer->file_fd);
    return error ? checkpoint_fail(writer, writer->file, "cannot be closed", error) : NULL;
}
const char *checkpoint_shared_file(struct checkpoint_writer *writer, const char *name, const void *begin,
                                   uint64_t count, uint64_t bytes) {
    const char *problem = checkpoint_file_begin(writer, name);
    if (!problem)
        problem = checkpoint_file_write(writer, begin, count);
    if (!problem)
        problem = checkpoint_lay_out(writer, bytes);
    if (problem)
        return problem;
    struct manifest_file *const file = manifest_add(&writer->manifest, name); // its hash follows in the commit
    if (!file)
        return checkpoint_fail(writer, name, "cannot be listed", ENOMEM);
    file->bytes = bytes;
    return NULL;
}

const char *checkpoint_expect_parts(struct checkpoint_writer *writer, int parts) {
    char name[CHECKPOINT_NAME];
    if (writer->failed)
        return writer->error.text;
    for (int number = 1; number <= parts; number++) {
        checkpoint_part_name(name, number, false);
        const int fd = openat(writer->folder_fd, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd < 0)
            return checkpoint_fail(writer, name, "cannot be made", errno);
        close(fd);
    }
    writer->parts = parts;
    return NULL;
}

// *found = whether the file of checkpoint_part_name(number, failed) is there. Returns 0 or an errno.
static int checkpoint_look_for(bool *found, const struct checkpoint_writer *writer, int number, bool failed) {
    char name[CHECKPOINT_NAME];
    struct stat status;
    checkpoint_part_name(name, number, failed);
    *found = fstatat(writer->folder_fd, name, &status, AT_SYMLINK_NOFOLLOW) == 0;
    return *found || errno == ENOENT ? 0 : errno;
}
// Waits until each part's file is removed. Looks by name: a listing could miss files while others are removed.
const char *checkpoint_wait_for_parts(struct checkpoint_writer *writer) {
    const long SHORTEST_NS = 1000000, LONGEST_NS = 100000000;
    if (writer->failed)
        return writer->error.text;
    struct timespec pause = {0, SHORTEST_NS};
    for (int number = 1; number <= writer->parts;) {
        bool waiting, failed = false;
        int error = checkpoint_look_for(&waiting, writer, number, false);
        if (!error && !waiting)
            error = checkpoint_look_for(&failed, writer, number, true);
        if (error)
            return checkpoint_fail(writer, "", "the parts of other ranks cannot be looked for", error);
        if (failed) {
            char what[64];
            snprintf(what, sizeof what, "rank %d could not write its part and says why", number);
            return checkpoint_fail(writer, "", what, ECANCELED);
        }
        if (!waiting) {
            number++;
            continue;
        }
        nanosleep(&pause, NULL);
        pause.tv_nsec = 2 * pause.tv_nsec < LONGEST_NS ? 2 * pause.tv_nsec : LONGEST_NS;
    }
    return NULL;
}

// Hashes the shared files for the manifest. Each must have the length that it was given. Returns NULL or the problem.
static const char *checkpoint_hash_shared(struct checkpoint_writer *writer) {
    for (int i = 0; i < writer->manifest.num_files; i++) {
        struct manifest_file *const file = &writer->manifest.files[i];
        uint64_t bytes = 0;
        if (*file->xxh3_128)
            continue;
        memcpy(writer->file, file->name, sizeof writer->file); // the manifest is gone after a failure
        const int fd = openat(writer->folder_fd, file->name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
        if (fd < 0)
            return checkpoint_fail(writer, writer->file, "cannot be opened", errno);
        int error = checkpoint_hash_file(file->xxh3_128, &bytes, fd);
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
        if (!error && bytes != file->bytes)
            error = EIO;
        if (error)
            return checkpoint_fail(writer, writer->file, "cannot be read back", error);
    }
    return NULL;
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

// Gives the partial folder its step's name. *displaced = the folder that had this name before, under its new name,
// .partial or .replaced; if there was none, an entry with the name "". Returns 0 or an errno.
static int checkpoint_publish(const struct checkpoint_writer *writer, struct checkpoint_entry *displaced) {
    const int root = writer->root_fd;
    const char *const name = writer->step.name, *const partial = writer->partial.name;
    *displaced = writer->partial;
    displaced->name[0] = 0;
    if (renameat(root, partial, root, name) == 0)
        return 0;
    if (errno != ENOTEMPTY && errno != EEXIST && errno != ENOTDIR)
        return errno;
    if (renameat2(root, partial, root, name, RENAME_EXCHANGE) == 0) {
        *displaced = writer->partial;
        return 0;
    }
    // Not every file system can exchange names. Between the next two calls the .replaced folder is the checkpoint.
    const struct checkpoint_entry replaced = checkpoint_entry_make(CHECKPOINT_REPLACED, writer->step.step, getpid());
    if (renameat(root, name, root, replaced.name) != 0)
        return errno;
    if (renameat(root, partial, root, name) != 0) {
        const int error = errno;
        renameat(root, replaced.name, root, name);
        return error;
    }
    *displaced = replaced;
    return 0;
}

const char *checkpoint_commit(struct checkpoint_writer *writer) {
    if (writer->failed)
        return writer->error.text;
    if (writer->file_fd >= 0 || writer->manifest.num_files == 0)
        return checkpoint_fail(writer, "", "committed within a file or without any", EINVAL); // a fault of the program
    const char *problem = checkpoint_hash_shared(writer);
    if (!problem)
        problem = checkpoint_write_manifest(writer);
    if (problem)
        return problem;
    int error = checkpoint_fsync_folder(writer->folder_fd);
    if (error)
        return checkpoint_fail(writer, "", "cannot be written to the disk", error);
    struct checkpoint_entry displaced;
    error = checkpoint_publish(writer, &displaced);
    if (error)
        return checkpoint_fail(writer, "", "cannot be given its name", error);
    error = checkpoint_fsync_folder(writer->root_fd);
    if (!error && displaced.name[0])
        checkpoint_remove(writer->root_fd, &displaced); // what can't be removed now is a leftover, for the next writer
    checkpoint_release(writer);
    if (!error)
        return NULL;
    writer->failed = true; // a power cut may leave the new folder or the displaced one, each complete: both stay
    return error_format(
        &writer->error,
        "%.500s: cannot be written to the disk: %s; step %" PRId64
        " is saved and complete, but may be lost if the machine goes down; the checkpoints before it are "
        "untouched",
        writer->root, strerror(error), writer->step.step);
}
