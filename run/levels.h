// The levels of instruction sets that this program has cpu engines for, lowest first; scripts/levels.mk has a table.
#pragma once
#include "run/engine.h"                   // engine_entry
#include "runtime/machine/cpu_features.h" // struct cpu_feature
#include "runtime/machine/text_add.h"     // text_add
#include <string.h>                       // strcmp, strlen

// The Makefile defines the rows: X(what the level's symbols end in, its name). The whole program needs the first level.
#ifndef LEVELS
#define LEVELS(X) X(, "native")
#endif

struct level {
    const char *name;
    const struct cpu_feature *features; // what the level's engines are compiled for
    engine_entry *fp32, *bf16;
};

#ifdef __cplusplus
extern "C" {
#endif
extern const char build_commit[]; // git describe, or "unknown"
#define LEVEL_SYMBOLS(suffix, name)                                                                                    \
    extern const struct cpu_feature cpu_features_needed##suffix[];                                                     \
    engine_entry train_cpu_fp32##suffix, train_cpu_bf16##suffix;
LEVELS(LEVEL_SYMBOLS)
#undef LEVEL_SYMBOLS
#ifdef __cplusplus
}
#endif

#define LEVEL_ROW(suffix, name) {name, cpu_features_needed##suffix, train_cpu_fp32##suffix, train_cpu_bf16##suffix},
static const struct level levels[] = {LEVELS(LEVEL_ROW)};
#undef LEVEL_ROW
enum { NUM_LEVELS = sizeof levels / sizeof *levels };

static bool level_runs_here(const struct level *level) { return cpu_has_features(level->features); }
// text (bytes) = the names of the levels that this CPU can run, with a comma between two, cut to what fits.
static void levels_list_here(char *text, size_t bytes) {
    text[0] = 0;
    for (int i = 0; i < NUM_LEVELS; i++)
        if (level_runs_here(&levels[i]))
            text_add(text, bytes, "%s%s", *text ? ", " : "", levels[i].name);
}

// text (bytes) = instruction sets that the level is compiled for, each after a space, cut to fit; "": what any CPU has.
static void level_list_features(char *text, size_t bytes, const struct level *level) {
    text[0] = 0;
    for (const struct cpu_feature *f = level->features; f->name; f++)
        if (cpu_feature_is_compiled(f))
            text_add(text, bytes, " %s", f->name);
}

// Returns the level's compiled feature that multiplies bf16, by name, or NULL. AMX is of no level: call amx_available.
static const char *level_bf16_products(const struct level *level) {
    for (const struct cpu_feature *f = level->features; f->name; f++)
        if (f->multiplies_bf16 && cpu_feature_is_compiled(f))
            return f->name;
    return NULL;
}
