// Reads and hashes a checkpoint's files.
#pragma once
#include "runtime/files/hash.h" // HASH128_DIGITS
#include <stddef.h>             // size_t
#include <stdint.h>             // uint64_t
#include <sys/cdefs.h>          // __BEGIN_DECLS
#include <sys/types.h>          // ssize_t

__BEGIN_DECLS
// Reads the next `count` bytes of fd, fewer only at the file's end. Returns how many it read; -1 and errno: an error.
ssize_t checkpoint_read(int fd, unsigned char *bytes, size_t count);
// hash = XXH3-128, as text, of the rest of fd's file. *bytes = bytes read, after an error too. Returns 0, or an errno.
int checkpoint_hash_file(char hash[HASH128_DIGITS + 1], uint64_t *bytes, int fd);
__END_DECLS
