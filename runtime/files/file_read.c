#include "runtime/files/file_read.h"
#include <assert.h>    // static_assert
#include <errno.h>     // errno, EINTR
#include <fcntl.h>     // open
#include <inttypes.h>  // PRIu64
#include <stdlib.h>    // malloc, free
#include <sys/stat.h>  // stat
#include <sys/types.h> // off_t
#include <unistd.h>    // pread, close

static_assert(sizeof(off_t) == 8, "files above 2 GiB are normal");

// Reads exactly `bytes` at `offset`, by pread rather than a mapping: a file that shrinks during the run is then an
// error with a message instead of a SIGBUS, and its pages don't count as this process's resident memory.
const char *read_exactly(int fd, unsigned char *out, uint64_t bytes, uint64_t offset, const char *name,
                         struct error_text *error) {
    for (uint64_t done = 0; done < bytes;) {
        const ssize_t got = pread(fd, out + done, bytes - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return error_format(error, "%s: can't be read at byte %" PRIu64 ": %s", name, offset + done,
                                strerror(errno));
        if (got == 0)
            return error_format(
                error, "%s: ends at byte %" PRIu64 "; it was longer when it was opened; don't change it during the run",
                name, offset + done);
        done += (uint64_t)got;
    }
    return NULL;
}

bool is_pipe(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 && S_ISFIFO(status.st_mode);
}

const char *open_regular(int *fd, uint64_t *bytes, const char *path, const char *expected, struct error_text *error) {
    struct stat status;
    *fd = -1;
    *bytes = 0;
    if (stat(path, &status) != 0) // before open, which can block at a pipe
        return error_format(error, "%s: can't be opened: %s", path, strerror(errno));
    if (S_ISDIR(status.st_mode))
        return error_format(error, "%s: is a folder; expected %s", path, expected);
    if (!S_ISREG(status.st_mode))
        return error_format(error, "%s: is not a regular file; expected %s", path, expected);
    *fd = open(path, O_RDONLY | O_CLOEXEC);
    if (*fd < 0)
        return error_format(error, "%s: can't be opened: %s", path, strerror(errno));
    *bytes = (uint64_t)status.st_size;
    return NULL;
}

const char *read_whole(unsigned char **data, uint64_t *bytes, uint64_t most_bytes, const char *path,
                       const char *expected, struct error_text *error) {
    int fd;
    *data = NULL;
    const char *problem = open_regular(&fd, bytes, path, expected, error);
    if (problem)
        return problem;
    if (*bytes > most_bytes)
        problem = error_format(error, "%s: is %" PRIu64 " bytes long; expected %s of at most %" PRIu64 " bytes", path,
                               *bytes, expected, most_bytes);
    else if (!(*data = (unsigned char *)malloc(*bytes ? *bytes : 1)))
        problem = error_format(error, "%s: out of memory for its %" PRIu64 " bytes", path, *bytes);
    else
        problem = read_exactly(fd, *data, *bytes, 0, path, error);
    close(fd);
    if (problem) {
        free(*data);
        *data = NULL;
    }
    return problem;
}
