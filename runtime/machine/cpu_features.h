// The instruction sets that a program was compiled for, and whether this CPU has them: a program for others would end by an
// illegal instruction, at a place that says nothing.
//
// The table is made by the preprocessor in a file that is compiled as the engines are, and read by runtime/machine/cpu_features.c,
// which is compiled for the oldest CPU of its architecture and runs before anything else. Only what compilers use
// unasked is in it: the engines ask for AMX themselves.
#pragma once
#include <stdbool.h> // bool
#include <stddef.h>  // NULL
#include <stdint.h>  // uint64_t

// Where the bit of a feature is: a register that cpuid fills, or a word of the kernel's.
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

struct cpu_feature {
    const char *name;     // as -m and -march call it
    const char *compiled; // a number where the compiler was allowed to use it
    int level;            // of x86-64 that it belongs to, 2 to 4; 0: to none
    enum cpu_word word;
    int bit;
    uint64_t state; // bits of CPU_XCR0 that it needs as well
};
static inline bool cpu_feature_is_compiled(const struct cpu_feature *f) {
    return f->compiled[0] >= '0' && f->compiled[0] <= '9';
}

// A predefined macro is a number where the compiler may use the feature, else stays its own name.
#define CPU_COMPILED(value) #value
#define CPU_FEATURE(name, macro, level, word, bit, state)                                                              \
    { name, CPU_COMPILED(macro), level, word, bit, state }

#if defined(__x86_64__)
enum { CPU_YMM = 0x6, CPU_ZMM = 0xe6 };
// Bits: Intel SDM, volume 2, CPUID. Levels: the x86-64 psABI.
#define CPU_FEATURES                                                                                                   \
    {                                                                                                                  \
        CPU_FEATURE("sse3", __SSE3__, 2, CPU_1_ECX, 0, 0), CPU_FEATURE("ssse3", __SSSE3__, 2, CPU_1_ECX, 9, 0),        \
            CPU_FEATURE("sse4.1", __SSE4_1__, 2, CPU_1_ECX, 19, 0),                                                    \
            CPU_FEATURE("sse4.2", __SSE4_2__, 2, CPU_1_ECX, 20, 0),                                                    \
            CPU_FEATURE("popcnt", __POPCNT__, 2, CPU_1_ECX, 23, 0),                                                    \
            CPU_FEATURE("avx", __AVX__, 3, CPU_1_ECX, 28, CPU_YMM),                                                    \
            CPU_FEATURE("avx2", __AVX2__, 3, CPU_7_EBX, 5, CPU_YMM),                                                   \
            CPU_FEATURE("fma", __FMA__, 3, CPU_1_ECX, 12, CPU_YMM),                                                    \
            CPU_FEATURE("f16c", __F16C__, 3, CPU_1_ECX, 29, CPU_YMM), CPU_FEATURE("bmi", __BMI__, 3, CPU_7_EBX, 3, 0), \
            CPU_FEATURE("bmi2", __BMI2__, 3, CPU_7_EBX, 8, 0),                                                         \
            CPU_FEATURE("lzcnt", __LZCNT__, 3, CPU_EXTENDED_1_ECX, 5, 0),                                              \
            CPU_FEATURE("movbe", __MOVBE__, 3, CPU_1_ECX, 22, 0),                                                      \
            CPU_FEATURE("avx512f", __AVX512F__, 4, CPU_7_EBX, 16, CPU_ZMM),                                            \
            CPU_FEATURE("avx512bw", __AVX512BW__, 4, CPU_7_EBX, 30, CPU_ZMM),                                          \
            CPU_FEATURE("avx512cd", __AVX512CD__, 4, CPU_7_EBX, 28, CPU_ZMM),                                          \
            CPU_FEATURE("avx512dq", __AVX512DQ__, 4, CPU_7_EBX, 17, CPU_ZMM),                                          \
            CPU_FEATURE("avx512vl", __AVX512VL__, 4, CPU_7_EBX, 31, CPU_ZMM),                                          \
            CPU_FEATURE("avx512ifma", __AVX512IFMA__, 0, CPU_7_EBX, 21, CPU_ZMM),                                      \
            CPU_FEATURE("avx512vbmi", __AVX512VBMI__, 0, CPU_7_ECX, 1, CPU_ZMM),                                       \
            CPU_FEATURE("avx512vbmi2", __AVX512VBMI2__, 0, CPU_7_ECX, 6, CPU_ZMM),                                     \
            CPU_FEATURE("avx512vnni", __AVX512VNNI__, 0, CPU_7_ECX, 11, CPU_ZMM),                                      \
            CPU_FEATURE("avx512bitalg", __AVX512BITALG__, 0, CPU_7_ECX, 12, CPU_ZMM),                                  \
            CPU_FEATURE("avx512vpopcntdq", __AVX512VPOPCNTDQ__, 0, CPU_7_ECX, 14, CPU_ZMM),                            \
            CPU_FEATURE("avx512bf16", __AVX512BF16__, 0, CPU_7_1_EAX, 5, CPU_ZMM),                                     \
            CPU_FEATURE("avx512fp16", __AVX512FP16__, 0, CPU_7_EDX, 23, CPU_ZMM),                                      \
            CPU_FEATURE("avxvnni", __AVXVNNI__, 0, CPU_7_1_EAX, 4, CPU_YMM),                                           \
            CPU_FEATURE("avxifma", __AVXIFMA__, 0, CPU_7_1_EAX, 23, CPU_YMM),                                          \
            CPU_FEATURE("gfni", __GFNI__, 0, CPU_7_ECX, 8, 0),                                                         \
            CPU_FEATURE("fma4", __FMA4__, 0, CPU_EXTENDED_1_ECX, 16, CPU_YMM),                                         \
            CPU_FEATURE("xop", __XOP__, 0, CPU_EXTENDED_1_ECX, 11, CPU_YMM),                                           \
            CPU_FEATURE("tbm", __TBM__, 0, CPU_EXTENDED_1_ECX, 21, 0), {NULL, NULL, 0, CPU_1_ECX, 0, 0},               \
    }
#elif defined(__aarch64__)
// Bits: Linux, arch/arm64/include/uapi/asm/hwcap.h. Macros: the Arm C Language Extensions.
#define CPU_FEATURES                                                                                                   \
    {                                                                                                                  \
        CPU_FEATURE("crc", __ARM_FEATURE_CRC32, 0, CPU_HWCAP, 7, 0),                                                   \
            CPU_FEATURE("lse", __ARM_FEATURE_ATOMICS, 0, CPU_HWCAP, 8, 0),                                             \
            CPU_FEATURE("fp16", __ARM_FEATURE_FP16_VECTOR_ARITHMETIC, 0, CPU_HWCAP, 10, 0),                            \
            CPU_FEATURE("rdm", __ARM_FEATURE_QRDMX, 0, CPU_HWCAP, 12, 0),                                              \
            CPU_FEATURE("fcma", __ARM_FEATURE_COMPLEX, 0, CPU_HWCAP, 14, 0),                                           \
            CPU_FEATURE("rcpc", __ARM_FEATURE_RCPC, 0, CPU_HWCAP, 15, 0),                                              \
            CPU_FEATURE("dotprod", __ARM_FEATURE_DOTPROD, 0, CPU_HWCAP, 20, 0),                                        \
            CPU_FEATURE("sve", __ARM_FEATURE_SVE, 0, CPU_HWCAP, 22, 0),                                                \
            CPU_FEATURE("fp16fml", __ARM_FEATURE_FP16_FML, 0, CPU_HWCAP, 23, 0),                                       \
            CPU_FEATURE("sve2", __ARM_FEATURE_SVE2, 0, CPU_HWCAP2, 1, 0),                                              \
            CPU_FEATURE("i8mm", __ARM_FEATURE_MATMUL_INT8, 0, CPU_HWCAP2, 13, 0),                                      \
            CPU_FEATURE("bf16", __ARM_FEATURE_BF16_VECTOR_ARITHMETIC, 0, CPU_HWCAP2, 14, 0),                           \
            {NULL, NULL, 0, CPU_HWCAP, 0, 0},                                                                          \
    }
#else
#define CPU_FEATURES                                                                                                   \
    {                                                                                                                  \
        { NULL, NULL, 0, CPU_HWCAP, 0, 0 }                                                                             \
    }
#endif

#ifdef __cplusplus
extern "C" {
#endif
// What the engines are compiled for; the program defines it as CPU_FEATURES. Ended by a feature without a name.
extern const struct cpu_feature cpu_features_needed[];
#ifdef __cplusplus
}
#endif
