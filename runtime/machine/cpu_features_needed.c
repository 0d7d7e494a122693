// The table of cpu_features.h, compiled with the engines' flags, unlike cpu_features.c, which reads it, and once more
// for each higher level of engines, whose table then has the name CPU_FEATURES.
#include "runtime/machine/cpu_features.h"
#include <stddef.h> // NULL

// A predefined macro expands to a number where the compiler may use the feature, else to its own name.
#define MACRO_TEXT(value) #value
#define FEATURE(name, macro, level, word, bit, ...)                                                                    \
    { name, MACRO_TEXT(macro), level, word, bit, __VA_ARGS__ }

#ifndef CPU_FEATURES
#define CPU_FEATURES cpu_features_needed
#endif
extern const struct cpu_feature CPU_FEATURES[];
const struct cpu_feature CPU_FEATURES[] = {
#if defined(__x86_64__)
    // Bits: Intel SDM, volume 2, CPUID. Levels: the x86-64 psABI.
    FEATURE("sse3", __SSE3__, 2, CPU_1_ECX, 0, 0),
    FEATURE("ssse3", __SSSE3__, 2, CPU_1_ECX, 9, 0),
    FEATURE("sse4.1", __SSE4_1__, 2, CPU_1_ECX, 19, 0),
    FEATURE("sse4.2", __SSE4_2__, 2, CPU_1_ECX, 20, 0),
    FEATURE("popcnt", __POPCNT__, 2, CPU_1_ECX, 23, 0),
    FEATURE("avx", __AVX__, 3, CPU_1_ECX, 28, CPU_YMM),
    FEATURE("avx2", __AVX2__, 3, CPU_7_EBX, 5, CPU_YMM),
    FEATURE("fma", __FMA__, 3, CPU_1_ECX, 12, CPU_YMM),
    FEATURE("f16c", __F16C__, 3, CPU_1_ECX, 29, CPU_YMM),
    FEATURE("bmi", __BMI__, 3, CPU_7_EBX, 3, 0),
    FEATURE("bmi2", __BMI2__, 3, CPU_7_EBX, 8, 0),
    FEATURE("lzcnt", __LZCNT__, 3, CPU_EXTENDED_1_ECX, 5, 0),
    FEATURE("movbe", __MOVBE__, 3, CPU_1_ECX, 22, 0),
    FEATURE("avx512f", __AVX512F__, 4, CPU_7_EBX, 16, CPU_ZMM),
    FEATURE("avx512bw", __AVX512BW__, 4, CPU_7_EBX, 30, CPU_ZMM),
    FEATURE("avx512cd", __AVX512CD__, 4, CPU_7_EBX, 28, CPU_ZMM),
    FEATURE("avx512dq", __AVX512DQ__, 4, CPU_7_EBX, 17, CPU_ZMM),
    FEATURE("avx512vl", __AVX512VL__, 4, CPU_7_EBX, 31, CPU_ZMM),
    FEATURE("avx512ifma", __AVX512IFMA__, 0, CPU_7_EBX, 21, CPU_ZMM),
    FEATURE("avx512vbmi", __AVX512VBMI__, 0, CPU_7_ECX, 1, CPU_ZMM),
    FEATURE("avx512vbmi2", __AVX512VBMI2__, 0, CPU_7_ECX, 6, CPU_ZMM),
    FEATURE("avx512vnni", __AVX512VNNI__, 0, CPU_7_ECX, 11, CPU_ZMM),
    FEATURE("avx512bitalg", __AVX512BITALG__, 0, CPU_7_ECX, 12, CPU_ZMM),
    FEATURE("avx512vpopcntdq", __AVX512VPOPCNTDQ__, 0, CPU_7_ECX, 14, CPU_ZMM),
    FEATURE("avx512bf16", __AVX512BF16__, 0, CPU_7_1_EAX, 5, CPU_ZMM, true),
    FEATURE("avx512fp16", __AVX512FP16__, 0, CPU_7_EDX, 23, CPU_ZMM),
    FEATURE("avxvnni", __AVXVNNI__, 0, CPU_7_1_EAX, 4, CPU_YMM),
    FEATURE("avxifma", __AVXIFMA__, 0, CPU_7_1_EAX, 23, CPU_YMM),
    FEATURE("gfni", __GFNI__, 0, CPU_7_ECX, 8, 0),
    FEATURE("fma4", __FMA4__, 0, CPU_EXTENDED_1_ECX, 16, CPU_YMM),
    FEATURE("xop", __XOP__, 0, CPU_EXTENDED_1_ECX, 11, CPU_YMM),
    FEATURE("tbm", __TBM__, 0, CPU_EXTENDED_1_ECX, 21, 0),
    {NULL, NULL, 0, CPU_1_ECX, 0, 0},
#elif defined(__aarch64__)
    // Bits: Linux, arch/arm64/include/uapi/asm/hwcap.h. Macros: the Arm C Language Extensions.
    FEATURE("crc", __ARM_FEATURE_CRC32, 0, CPU_HWCAP, 7, 0),
    FEATURE("lse", __ARM_FEATURE_ATOMICS, 0, CPU_HWCAP, 8, 0),
    FEATURE("fp16", __ARM_FEATURE_FP16_VECTOR_ARITHMETIC, 0, CPU_HWCAP, 10, 0),
    FEATURE("rdm", __ARM_FEATURE_QRDMX, 0, CPU_HWCAP, 12, 0),
    FEATURE("fcma", __ARM_FEATURE_COMPLEX, 0, CPU_HWCAP, 14, 0),
    FEATURE("rcpc", __ARM_FEATURE_RCPC, 0, CPU_HWCAP, 15, 0),
    FEATURE("dotprod", __ARM_FEATURE_DOTPROD, 0, CPU_HWCAP, 20, 0),
    FEATURE("sve", __ARM_FEATURE_SVE, 0, CPU_HWCAP, 22, 0),
    FEATURE("fp16fml", __ARM_FEATURE_FP16_FML, 0, CPU_HWCAP, 23, 0),
    FEATURE("sve2", __ARM_FEATURE_SVE2, 0, CPU_HWCAP2, 1, 0),
    FEATURE("i8mm", __ARM_FEATURE_MATMUL_INT8, 0, CPU_HWCAP2, 13, 0),
    FEATURE("bf16", __ARM_FEATURE_BF16_VECTOR_ARITHMETIC, 0, CPU_HWCAP2, 14, 0, true),
    {NULL, NULL, 0, CPU_HWCAP, 0, 0},
#else
    {NULL, NULL, 0, CPU_HWCAP, 0, 0},
#endif
};
