// Reads files of any content. Functions with an `error` return NULL or, in `error`, the file's name and what is wrong.
#pragma once
#include "runtime/machine/error_text.h" // struct error_text
#include <stdbool.h>                    // bool
#include <stdint.h>                     // uint64_t
#include <string.h>                     // memcpy
#include <sys/cdefs.h>                  // __BEGIN_DECLS

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the files are little-endian and read by memcpy"
#endif

// Returns the little-endian number at p, which need not be aligned; inline, for loops over large files.
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

__BEGIN_DECLS
// Opens a regular file to read; *bytes = its length. The caller closes *fd (-1: error). expected: a noun for messages.
const char *open_regular(int *fd, uint64_t *bytes, const char *path, const char *expected, struct error_text *error);
// Whether the path is a pipe. A program that opens a pipe to write would wait for a reader.
bool is_pipe(const char *path);
// out (bytes) = an open file's bytes from `offset` on; a shorter file is an error. name: for messages. Thread-safe.
const char *read_exactly(int fd, unsigned char *out, uint64_t bytes, uint64_t offset, const char *name,
                         struct error_text *error);
// Reads a regular file of at most most_bytes to *data (*bytes), no 0 added. The caller frees it; NULL after an error.
const char *read_whole(unsigned char **data, uint64_t *bytes, uint64_t most_bytes, const char *path,
                       const char *expected, struct error_text *error);
__END_DECLS
