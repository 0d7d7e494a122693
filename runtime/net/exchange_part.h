// What both ways of an exchange share: the part that goes to or comes from a rank, the order of peers, and the end when a
// peer is lost.
#pragma once
#include <stddef.h> // size_t
#include <stdio.h>  // snprintf
#include <stdlib.h> // EXIT_FAILURE
#include <string.h> // strlen
#include <time.h>   // nanosleep
#include <unistd.h> // write, _exit

struct exchange_part {
    void *data;
    size_t bytes;
};

// Step s = 1, ..., ranks - 1 of an exchange sends to one rank and receives from another, so that not all send to rank 0
// first.
static int exchange_to(int rank, int ranks, int step) { return (rank + step) % ranks; }
static int exchange_from(int rank, int ranks, int step) { return (rank + ranks - step) % ranks; }

// Nothing can be done without a peer. Whoever watches the ranks mostly knows more of why it ended, and ends this process
// with that; so it is given a second. No exit(), which would wait for threads and stdio locks that may never be free.
__attribute__((noreturn)) static void exchange_lost(int rank, int peer, const char *what) {
    char line[512];
    const struct timespec second = {1, 0};
    nanosleep(&second, NULL);
    snprintf(line, sizeof line, "train_gpt: rank %d: the exchange with rank %d failed: %s\n", rank, peer, what);
    const ssize_t written = write(STDERR_FILENO, line, strlen(line));
    _exit(written < 0 ? EXIT_FAILURE + 1 : EXIT_FAILURE);
}
