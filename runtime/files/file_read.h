// Reads files, of which nothing is trusted. Functions with an `error` return NULL, or what is wrong, in `error`
// (runtime/machine/error_text.h), beginning with the file's name.
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
// Opens a regular file to read. The caller closes *fd (error: -1). *bytes: its length. expected: "a key", for messages.
const char *open_regular(int *fd, uint64_t *bytes, const char *path, const char *expected, struct error_text *error);
// Whether the path is a pipe: a program that opens it to write would wait for a reader.
bool is_pipe(const char *path);
// out (bytes) = the open file's bytes from `offset` on; fewer are an error. name: for messages. Threads may share fd.
const char *read_exactly(int fd, unsigned char *out, uint64_t bytes, uint64_t offset, const char *name,
                         struct error_text *error);
// *data (*bytes, no 0 added) = a regular file of at most most_bytes. The caller frees *data, NULL only after an error.
const char *read_whole(unsigned char **data, uint64_t *bytes, uint64_t most_bytes, const char *path,
                       const char *expected, struct error_text *error);
__END_DECLS
