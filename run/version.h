// --version prints, for bug reports: the commit, the compiler, its target, and the host's libraries.
#pragma once
#include "run/libraries.cuh"  // libraries_print
#include "run/levels.h"       // levels, level_list_features, build_commit
#include "runtime/text/log.h" // log_row
#include <stdio.h>            // printf

// Prints the levels of CPU instruction sets that this program has engines for, a line each.
static void version_print_levels(void) {
    char text[512];
    for (int i = 0; i < NUM_LEVELS; i++) {
        level_list_features(text, sizeof text, &levels[i]);
        log_row("cpu", "fp32 and bf16, for %s:%s", levels[i].name, *text ? text : " any CPU");
    }
}

// Prints all of --version but the cuda target's libraries: first the commit, which ends the line of the version.
static void version_print(void) {
    printf(" (commit %s)\n", build_commit);
#ifdef __clang__
    log_row("compiler", "%s", __VERSION__);
#else
    log_row("compiler", "gcc %s", __VERSION__);
#endif
    version_print_levels();
    libraries_print();
}
