#include "runtime/machine/error.h"
#include "runtime/machine/say.h" // say_list
#include <stdarg.h>              // va_list
#include <stddef.h>              // size_t
#include <stdio.h>               // fputs
#include <stdlib.h>              // exit, getenv
#include <unistd.h>              // usleep

// Returns this process's rank by the launcher's variables; -1: none says that there are several. runtime/net/launch.c
// reads the same variables but may not be called here: fail() runs before anything is known of the CPU.
static int rank_in_environment(void) {
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

void fail(const char *format, ...) {
    const int rank = rank_in_environment();
    va_list arguments;
    va_start(arguments, format);
    fflush(stdout); // so that the message follows what was printed before it, in a pipe too
    if (rank > 0)
        usleep(500000); // most mistakes are every rank's: rank 0 prints the message, and its end ends the others
    fputs("train_gpt: ", stderr);
    if (rank >= 0)
        fprintf(stderr, "rank %d: ", rank);
    say_list(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(EXIT_USAGE);
}
