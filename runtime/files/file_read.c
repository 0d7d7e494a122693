// Reading files that may be anything: opening, reading a range, reading a whole small file, each with an error text for
// its caller (runtime/machine/error_text.h). Little-endian numbers from bytes that need not be aligned.
#pragma once
#include <errno.h>     // errno, EINTR
#include <fcntl.h>     // open
#include <inttypes.h>  // PRIu64
#include <stdint.h>    // uint64_t
#include <stdlib.h>    // malloc, free
#include <string.h>    // memcpy, strerror
#include <sys/stat.h>  // stat
#include <sys/types.h> // off_t
#include <unistd.h>    // pread, close

#include "runtime/machine/error_text.h" // struct error_text

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the files are little-endian and read by memcpy"
#endif
enum { OFF_T_HAS_64_BITS = 1 / (sizeof(off_t) == 8) };

static inline uint32_t load_u32(const unsigned char *p) {
    uint32_t value;
    memcpy(&value, p, sizeof value);
    return value;
}
static inline uint64_t load_u64(const unsigned char *p) {
    uint64_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

// Reads exactly `bytes` at `offset`, or says why not. Not from a mapping: a file that shrinks during the run is then
// an error with a message instead of a SIGBUS, and no page stays in this process's resident memory.
static const char *read_exactly(int fd, unsigned char *out, uint64_t bytes, uint64_t offset, const char *name,
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

// Opens a regular file for reading; *bytes is its length. Looks before it opens, since to open a pipe can block.
// `expected` ends the message: what the file should have been.
static const char *open_regular(int *fd, uint64_t *bytes, const char *path, const char *expected,
                                struct error_text *error) {
    struct stat status;
    *fd = -1;
    *bytes = 0;
    if (stat(path, &status) != 0)
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

// The whole of a file of at most `most_bytes`, in memory that the caller frees.
static const char *read_whole(unsigned char **data, uint64_t *bytes, uint64_t most_bytes, const char *path,
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
