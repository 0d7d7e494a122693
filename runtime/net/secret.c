// The secret that the ranks of a launch share: read, and kept only as its hash.
#include <stdint.h> // uint64_t
#include <stdlib.h> // getenv, free
#include <string.h> // strlen, memset

#include "runtime/files/file_read.h" // read_whole
#include "runtime/net/launch.h"      // struct launch
#include "runtime/net/sha256.h"      // sha256

enum {
    LEAST_BYTES = 16, // fewer can be guessed by whoever has read a handshake
    MAX_BYTES = 4096,
};
static const char SECRET_VARIABLE[] = "TRAIN_GPT_SECRET";

// Sets launch->secret to the hash of a trimmed text. If that has not LEAST_BYTES to MAX_BYTES: an error about `from`.
static const char *secret_take(struct launch *launch, const char *text, size_t bytes, const char *from,
                               struct error_text *error) {
    static const char space[] = " \t\r\n";
    while (bytes > 0 && memchr(space, text[bytes - 1], sizeof space - 1))
        bytes--;
    while (bytes > 0 && memchr(space, *text, sizeof space - 1)) {
        text++;
        bytes--;
    }
    if (bytes < LEAST_BYTES || bytes > MAX_BYTES)
        return error_format(error,
                            "%s: a secret of %zu bytes; expected %d to %d that nobody can guess, as of: head -c 32 "
                            "/dev/urandom | od -An -v -tx1 | tr -d ' \\n'",
                            from, bytes, LEAST_BYTES, MAX_BYTES);
    sha256(launch->secret, text, bytes);
    return NULL;
}

const char *launch_read_secret(struct launch *launch, const char *file, struct error_text *error) {
    const char *const variable = getenv(SECRET_VARIABLE);
    unsigned char *data = NULL;
    uint64_t bytes = 0;
    memset(launch->secret, 0, sizeof launch->secret);
    if (!*file)
        return variable ? secret_take(launch, variable, strlen(variable), SECRET_VARIABLE, error) : NULL;
    const char *problem = read_whole(&data, &bytes, 2 * MAX_BYTES, file, "a file with a secret", error);
    if (!problem)
        problem = secret_take(launch, (const char *)data, bytes, file, error);
    free(data);
    return problem;
}

bool launch_has_no_secret(const struct launch *launch) {
    static const unsigned char none[SHA256_BYTES] = {0};
    return launch->kind != LAUNCH_MPI && launch->ranks > 1 && memcmp(launch->secret, none, sizeof none) == 0;
}
