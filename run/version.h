// What --version prints, for bug reports: the commit, the compiler, its target, and the host's libraries.
#pragma once
#include "run/libraries.cuh"  // libraries_print
#include "run/levels.h"       // levels
#include "runtime/text/log.h" // log_row

extern const char build_commit[]; // git describe, or "unknown"

// Prints a row for each level of the cpu engines: its name, and the instruction sets beyond the architecture's first
// that the level is compiled for.
static void version_levels(void) {
    char text[512];
    for (int i = 0; i < NUM_LEVELS; i++) {
        size_t used = 0;
        text[0] = 0;
        for (const struct cpu_feature *f = levels[i].features; f->name; f++)
            if (cpu_feature_is_compiled(f) && used < sizeof text)
                used += (size_t)snprintf(text + used, sizeof text - used, " %s", f->name);
        log_row("cpu", "fp32 and bf16, for %s:%s", levels[i].name, *text ? text : " any CPU");
    }
}

// Prints all rows but those of the cuda target's libraries.
static void version_print(void) {
    log_row("commit", "%s", build_commit);
#ifdef __clang__
    log_row("compiler", "%s", __VERSION__);
#else
    log_row("compiler", "gcc %s", __VERSION__);
#endif
    version_levels();
    libraries_print();
}
