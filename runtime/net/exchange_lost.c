// The end of a process that has lost a peer.
#include <stdio.h>  // snprintf
#include <stdlib.h> // EXIT_FAILURE
#include <string.h> // strlen
#include <time.h>   // nanosleep
#include <unistd.h> // write, _exit

#include "runtime/net/exchange_internal.h" // exchange_end_lost

void exchange_end_lost(int rank, int peer, const char *what) {
    char line[512];
    const struct timespec second = {1, 0};
    nanosleep(&second, NULL);
    snprintf(line, sizeof line, "train_gpt: rank %d: the exchange with rank %d failed: %s\n", rank, peer, what);
    const ssize_t written = write(STDERR_FILENO, line, strlen(line));
    _exit(written < 0 ? EXIT_FAILURE + 1 : EXIT_FAILURE);
}
