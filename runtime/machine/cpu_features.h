// The instruction sets that the program was compiled for. cpu_features.c ends a program that this CPU can't run before
// anything else runs: by a message with the build that it can, instead of an illegal instruction somewhere.
//
// The preprocessor makes the table in cpu_features_needed.c, which is compiled as the engines are. Only what compilers
// use unasked is in it: the engines ask for AMX themselves.
#pragma once
#include <stdbool.h>   // bool
#include <stdint.h>    // uint64_t
#include <sys/cdefs.h> // __BEGIN_DECLS

// Where the bit of a feature is: a register that cpuid fills, or a word of the kernel's auxiliary vector.
enum cpu_word {
#if defined(__x86_64__)
    CPU_1_ECX,
    CPU_7_EBX,
    CPU_7_ECX,
    CPU_7_EDX,
    CPU_7_1_EAX,
    CPU_EXTENDED_1_ECX,
    CPU_XCR0, // registers that the operating system saves
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
    int level;            // of x86-64 that the feature belongs to, 2 to 4; 0: to none
    enum cpu_word word;
    int bit;
    uint64_t state; // bits of CPU_XCR0 that the feature needs as well
};

__BEGIN_DECLS
// Ended by a row whose name is NULL.
extern const struct cpu_feature cpu_features_needed[];
// Whether the compiler was allowed to use it.
bool cpu_feature_is_compiled(const struct cpu_feature *feature);
__END_DECLS
