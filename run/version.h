// What --version prints, for bug reports: the commit, the compiler, its target, and the host's libraries.
#pragma once
#include "run/libraries.cuh"              // libraries_print
#include "runtime/machine/cpu_features.h" // cpu_features_needed
#include "runtime/text/log.h"             // log_row

extern const char build_commit[]; // git describe, or "unknown"

// text = the names of the optional instruction sets that the engines are compiled for, each after a space.
static void version_instructions(char *text, size_t bytes) {
    size_t used = 0;
    text[0] = 0;
    for (const struct cpu_feature *f = cpu_features_needed; f->name; f++)
        if (cpu_feature_is_compiled(f) && used < bytes)
            used += (size_t)snprintf(text + used, bytes - used, " %s", f->name);
}

// Prints all rows but those of the cuda target's libraries.
static void version_print(void) {
    char instructions[512];
    version_instructions(instructions, sizeof instructions);
    log_row("commit", "%s", build_commit);
#ifdef __clang__
    log_row("compiler", "%s", __VERSION__);
#else
    log_row("compiler", "gcc %s", __VERSION__);
#endif
    log_row("cpu", "fp32 and bf16, for%s", *instructions ? instructions : " any CPU");
    libraries_print();
}
