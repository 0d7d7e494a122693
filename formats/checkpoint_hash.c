#include "formats/checkpoint_hash.h"
#include <errno.h>  // errno, EINTR
#include <stdlib.h> // malloc, free
#include <unistd.h> // read

enum { CHECKPOINT_READ = 1 << 20 }; // bytes read and hashed at a time

ssize_t checkpoint_read(int fd, unsigned char *bytes, size_t count) {
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

int checkpoint_hash_file(char hash[HASH128_DIGITS + 1], uint64_t *bytes, int fd) {
    unsigned char *const chunk = (unsigned char *)malloc(CHECKPOINT_READ);
    struct hash128 *const state = hash128_new();
    ssize_t got = -1;
    errno = ENOMEM;
    *bytes = 0;
    if (chunk && state) {
        do {
            got = checkpoint_read(fd, chunk, CHECKPOINT_READ);
            if (got > 0) {
                hash128_update(state, chunk, (size_t)got);
                *bytes += (uint64_t)got;
            }
        } while (got > 0);
    }
    const int error = got < 0 ? errno : 0;
    if (!error)
        hash128_text(hash, state);
    free(chunk);
    hash128_free(state);
    return error;
}
