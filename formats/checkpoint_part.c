#include "formats/checkpoint_part.h"
#include <errno.h>    // errno, EINTR
#include <fcntl.h>    // openat, sync_file_range
#include <inttypes.h> // PRId64
#include <stdio.h>    // snprintf
#include <stdlib.h>   // malloc, free
#include <string.h>   // strerror, memcpy
#include <unistd.h>   // pwrite, unlinkat

enum {
    PART_CHUNK = 1 << 20,   // bytes written at a time
    PART_WINDOW = 32 << 20, // bytes that are sent to the disk at a time
};

// Closes the open descriptors and frees the buffer. Tells process 0 nothing. Harmless a second time.
static void part_release(struct checkpoint_part *part) {
    int *const fds[] = {&part->file_fd, &part->folder_fd};
    for (int i = 0; i < 2; i++) {
        if (*fds[i] >= 0)
            close(*fds[i]);
        *fds[i] = -1;
    }
    free(part->buffer);
    part->buffer = NULL;
}

void checkpoint_part_abandon(struct checkpoint_part *part) { part_release(part); }

// Ends the part as failed and returns the text. Tells process 0 if the folder is open. file: its name; "": the folder.
static const char *part_fail(struct checkpoint_part *part, const char *file, const char *what, int error) {
    const char *const hint =
        error == ENOSPC || error == EDQUOT ? "; free space, or keep fewer by --keep-checkpoints" : "";
    if (part->folder_fd >= 0 && part->number > 0) {
        char name[CHECKPOINT_NAME], failed[CHECKPOINT_NAME];
        checkpoint_part_name(name, part->number, false);
        checkpoint_part_name(failed, part->number, true);
        const bool told = renameat(part->folder_fd, name, part->folder_fd, failed) == 0;
        part->given_up = !told && errno == ENOENT;
        part->unheard = !told && errno != ENOENT;
    }
    part_release(part);
    part->failed = true;
    return error_format(&part->error,
                        "%.500s/%s%s%s: %s: %s; step %" PRId64 " is not saved, the checkpoints before it are "
                        "untouched%s",
                        part->root, part->partial.name, *file ? "/" : "", file, what, strerror(error),
                        part->partial.step, hint);
}

const char *checkpoint_part_begin(struct checkpoint_part *part, const char *root, int64_t step, pid_t writer,
                                  int number) {
    char path[PATH_MAX + CHECKPOINT_NAME];
    memset(part, 0, sizeof *part);
    part->folder_fd = part->file_fd = -1;
    part->number = number;
    part->partial = checkpoint_entry_make(CHECKPOINT_PARTIAL, step, writer);
    snprintf(part->root, sizeof part->root, "%s", root);
    snprintf(path, sizeof path, "%s/%s", root, part->partial.name);
    part->folder_fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (part->folder_fd < 0)
        return part_fail(part, "", "cannot be opened", errno);
    part->buffer = (unsigned char *)malloc(PART_CHUNK);
    return part->buffer ? NULL : part_fail(part, "", "cannot be written", ENOMEM);
}

const char *checkpoint_part_open(struct checkpoint_part *part, const char *name) {
    if (part->failed)
        return part->error.text;
    snprintf(part->file, sizeof part->file, "%s", name);
    part->buffered = 0;
    part->begun_end = part->dirty_end = part->dirty_bytes = 0;
    part->file_fd = openat(part->folder_fd, name, O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
    return part->file_fd >= 0 ? NULL : part_fail(part, name, "cannot be opened", errno);
}

// Notes that bytes [begin, end) were handed to the kernel, and writes PART_WINDOW bytes at a time to the disk as
// checkpoint_write_back does, but leaves them in the page cache, to be hashed. Returns 0 or an errno.
static int part_write_back(struct checkpoint_part *part, uint64_t begin, uint64_t end) {
    part->dirty = part->dirty_end == 0 || begin < part->dirty ? begin : part->dirty;
    part->dirty_end = end > part->dirty_end ? end : part->dirty_end;
    part->dirty_bytes += end - begin;
    if (part->dirty_bytes < PART_WINDOW)
        return 0;
    int failed = sync_file_range(part->file_fd, (off_t)part->dirty, (off_t)(part->dirty_end - part->dirty),
                                 SYNC_FILE_RANGE_WRITE);
    if (!failed && part->begun_end > 0)
        failed = sync_file_range(part->file_fd, (off_t)part->begun, (off_t)(part->begun_end - part->begun),
                                 SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
    part->begun = part->dirty;
    part->begun_end = part->dirty_end;
    part->dirty_end = part->dirty_bytes = 0;
    // The kernel reports a failed write once, here or by fsync. Other errors (not supported, say) leave it to fsync.
    return failed && (errno == EIO || errno == ENOSPC || errno == EDQUOT) ? errno : 0;
}

// Writes the buffered bytes at their place in the file, and empties the buffer. Returns NULL, or the text of part_fail.
static const char *part_flush(struct checkpoint_part *part) {
    const size_t count = part->buffered;
    int error = 0;
    part->buffered = 0;
    for (size_t done = 0; done < count && !error;) {
        const ssize_t written =
            pwrite(part->file_fd, part->buffer + done, count - done, (off_t)(part->at + (uint64_t)done));
        if (written > 0)
            done += (size_t)written;
        else if (written == 0 || errno != EINTR)
            error = written == 0 ? EIO : errno;
    }
    if (!error && count > 0)
        error = part_write_back(part, part->at, part->at + count);
    if (!error)
        return NULL;
    char what[64];
    snprintf(what, sizeof what, "cannot be written at byte %" PRIu64, part->at);
    return part_fail(part, part->file, what, error);
}

const char *checkpoint_part_write(struct checkpoint_part *part, uint64_t offset, const void *bytes, uint64_t count) {
    const unsigned char *rest = (const unsigned char *)bytes;
    const char *problem = NULL;
    if (part->failed)
        return part->error.text;
    if (part->file_fd < 0)
        return part_fail(part, "", "written to with no file open", EINVAL); // a fault of the program
    while (count > 0 && !problem) {
        if (part->buffered == PART_CHUNK || (part->buffered > 0 && offset != part->at + part->buffered))
            problem = part_flush(part);
        if (problem)
            break;
        if (part->buffered == 0)
            part->at = offset;
        const size_t room = PART_CHUNK - part->buffered, now = count < room ? (size_t)count : room;
        memcpy(part->buffer + part->buffered, rest, now);
        part->buffered += now;
        offset += now;
        rest += now;
        count -= now;
    }
    return problem;
}

const char *checkpoint_part_close(struct checkpoint_part *part) {
    if (part->failed)
        return part->error.text;
    const char *const problem = part_flush(part);
    if (problem)
        return problem;
    int error = checkpoint_fsync(part->file_fd);
    if (error)
        return part_fail(part, part->file, "cannot be written to the disk", error);
    error = checkpoint_close(&part->file_fd);
    return error ? part_fail(part, part->file, "cannot be closed", error) : NULL;
}

const char *checkpoint_part_end(struct checkpoint_part *part) {
    if (part->failed)
        return part->error.text;
    if (part->file_fd >= 0)
        return part_fail(part, part->file, "ended within a file", EINVAL); // a fault of the program
    char name[CHECKPOINT_NAME];
    checkpoint_part_name(name, part->number, false);
    if (part->number > 0 && unlinkat(part->folder_fd, name, 0) != 0)
        return part_fail(part, "", "cannot be marked as written", errno);
    part_release(part);
    return NULL;
}
