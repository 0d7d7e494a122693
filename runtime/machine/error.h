// The one way in which a user's mistake ends: a message on stderr, exit status 2.
#pragma once
#include <stdarg.h> // va_list
#include <stdio.h>  // fprintf, vfprintf, stderr
#include <stdlib.h> // exit, getenv
#include <unistd.h> // usleep

enum { EXIT_USAGE = 2 };

// -1 where the launcher's environment (runtime/net/launch.h) does not say that this is one of several ranks.
static int error_rank(void) {
    static const char *const names[][2] = {{"RANK", "WORLD_SIZE"},
                                           {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
                                           {"PMI_RANK", "PMI_SIZE"},
                                           {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *const rank = getenv(names[i][0]), *const ranks = getenv(names[i][1]);
        if (rank && ranks && atoi(ranks) > 1)
            return atoi(rank);
    }
    return -1;
}

// Says what is wrong, in which file or option, what was expected and what to change; one line without a full stop.
__attribute__((noreturn, format(printf, 1, 2))) static void fail(const char *format, ...) {
    const int rank = error_rank();
    va_list arguments;
    va_start(arguments, format);
    fflush(stdout); // so that the message comes after what was printed before it, in a pipe too
    if (rank > 0)
        usleep(500000); // most mistakes are every rank's: rank 0 says so, and its end is that of the others
    fputs("train_gpt: ", stderr);
    if (rank >= 0)
        fprintf(stderr, "rank %d: ", rank);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(EXIT_USAGE);
}
