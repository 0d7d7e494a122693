// The instruction sets that the program was compiled for. Where this CPU lacks one, cpu_features.c ends the program
// before anything else runs, with a message that names a build for this CPU. Engines for higher levels (run/levels.h)
// have a table each, by which main chooses. A table has what compilers use unasked; engines check for AMX.
#pragma once
#include <stdbool.h>   // bool
#include <stdint.h>    // uint64_t
#include <sys/cdefs.h> // __BEGIN_DECLS

// The word that has a feature's bit: a register that cpuid fills, or a word of the kernel's auxiliary vector.
enum cpu_word {
#if defined(__x86_64__)
    CPU_1_ECX,
    CPU_7_EBX,
    CPU_7_ECX,
    CPU_7_EDX,
    CPU_7_1_EAX,
    CPU_EXTENDED_1_ECX,
    CPU_XCR0, // the register sets that the operating system saves
#else
    CPU_HWCAP,
    CPU_HWCAP2,
#endif
    CPU_WORDS
};
enum { CPU_YMM = 0x6, CPU_ZMM = 0xe6 }; // bits of CPU_XCR0: the registers of AVX, of AVX-512

struct cpu_feature {
    const char *name;     // as -m and -march call it
    const char *compiled; // a number where the compiler was allowed to use it
    int level;            // level of x86-64 that the feature belongs to, 2 to 4; 0: none
    enum cpu_word word;
    int bit;
    uint64_t state;       // bits of CPU_XCR0 that the feature needs as well
    bool multiplies_bf16; // the feature has products of bf16 that are faster than fp32's
};

__BEGIN_DECLS
// The table of what the whole program needs, ended by a row whose name is NULL.
extern const struct cpu_feature cpu_features_needed[];
// Whether the compiler was allowed to use the feature in the code that the feature's table describes.
bool cpu_feature_is_compiled(const struct cpu_feature *feature);
// Whether this CPU has every feature of `table` that was compiled for. A row whose name is NULL ends the table.
bool cpu_has_features(const struct cpu_feature *table);
__END_DECLS
