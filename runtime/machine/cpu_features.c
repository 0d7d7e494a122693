// This file and error.c are compiled for any CPU: they may call nothing from a file that is compiled for fewer CPUs.
#include "runtime/machine/cpu_features.h"
#include "runtime/machine/error.h" // fail
#include <stdio.h>                 // snprintf
#include <string.h>                // memset, strlen

struct cpu {
    uint64_t words[CPU_WORDS];
};

#if defined(__x86_64__)
#include <cpuid.h> // __get_cpuid_count

// Returns the words of enum cpu_word, by cpuid. CPU_XCR0 is 0 where the system does not say which registers it saves.
static struct cpu cpu_read(void) {
    enum { OSXSAVE = 1 << 27 };
    struct cpu cpu;
    unsigned a, b, c, d;
    memset(&cpu, 0, sizeof cpu);
    if (__get_cpuid(1, &a, &b, &c, &d))
        cpu.words[CPU_1_ECX] = c;
    if (cpu.words[CPU_1_ECX] & OSXSAVE) {
        __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
        cpu.words[CPU_XCR0] = a;
    }
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        const bool has_subleaf = a >= 1;
        cpu.words[CPU_7_EBX] = b;
        cpu.words[CPU_7_ECX] = c;
        cpu.words[CPU_7_EDX] = d;
        if (has_subleaf && __get_cpuid_count(7, 1, &a, &b, &c, &d))
            cpu.words[CPU_7_1_EAX] = a;
    }
    if (__get_cpuid(0x80000001, &a, &b, &c, &d))
        cpu.words[CPU_EXTENDED_1_ECX] = c;
    return cpu;
}
// Whether the CPU has the feature, and the operating system saves the registers that the feature needs.
static bool cpu_has(const struct cpu *cpu, const struct cpu_feature *f) {
    return (cpu->words[f->word] >> f->bit & 1) && (cpu->words[CPU_XCR0] & f->state) == f->state;
}
// arch = what to give make ARCH= for this CPU: the highest level of x86-64 up to which it has all of `features`.
static void cpu_arch(char *arch, size_t bytes, const struct cpu *cpu, const struct cpu_feature *features) {
    int level = 4;
    for (const struct cpu_feature *f = features; f->name; f++)
        if (f->level > 0 && f->level <= level && !cpu_has(cpu, f))
            level = f->level - 1;
    snprintf(arch, bytes, level > 1 ? "x86-64-v%d" : "x86-64", level);
}
#else
#include <sys/auxv.h> // getauxval

static struct cpu cpu_read(void) {
    struct cpu cpu;
    cpu.words[CPU_HWCAP] = getauxval(AT_HWCAP);
    cpu.words[CPU_HWCAP2] = getauxval(AT_HWCAP2);
    return cpu;
}
static bool cpu_has(const struct cpu *cpu, const struct cpu_feature *f) { return cpu->words[f->word] >> f->bit & 1; }
// arch = what to give make ARCH= for any CPU of 64-bit Arm; cpu and features are not used.
static void cpu_arch(char *arch, size_t bytes, const struct cpu *cpu, const struct cpu_feature *features) {
    snprintf(arch, bytes, "armv8-a");
}
#endif

bool cpu_feature_is_compiled(const struct cpu_feature *f) { return f->compiled[0] >= '0' && f->compiled[0] <= '9'; }

// The number of features that the program was compiled for and that the CPU lacks.
static int cpu_missing(const struct cpu *cpu, const struct cpu_feature *needed) {
    int missing = 0;
    for (const struct cpu_feature *f = needed; f->name; f++)
        missing += cpu_feature_is_compiled(f) && !cpu_has(cpu, f);
    return missing;
}
bool cpu_has_features(const struct cpu_feature *table) {
    const struct cpu cpu = cpu_read();
    return cpu_missing(&cpu, table) == 0;
}

// Returns NULL if the CPU has all features compiled for, else text (bytes): what it lacks, and how to build for it.
static const char *cpu_problem(char *text, size_t bytes, const struct cpu *cpu, const struct cpu_feature *needed) {
    enum { NAMED = 6 };
    char names[128] = "", arch[16];
    const int missing = cpu_missing(cpu, needed);
    if (missing == 0)
        return NULL;
    int named = 0;
    for (const struct cpu_feature *f = needed; f->name && named < NAMED; f++) {
        const size_t used = strlen(names);
        if (cpu_feature_is_compiled(f) && !cpu_has(cpu, f))
            snprintf(names + used, sizeof names - used, "%s%s", named++ > 0 ? ", " : "", f->name);
    }
    cpu_arch(arch, sizeof arch, cpu, needed);
    snprintf(text, bytes,
             "built for a CPU with %s%s, which this one lacks; build it here, by make ARCH=native, or anywhere "
             "by make ARCH=%s",
             names, missing > NAMED ? " and more" : "", arch);
    return text;
}

// Ends the process if this CPU lacks a feature compiled for, before engines' constructors run, which may use one.
__attribute__((constructor(101))) static void cpu_check(void) {
    char text[512];
    const struct cpu cpu = cpu_read();
    if (cpu_problem(text, sizeof text, &cpu, cpu_features_needed))
        fail("%s", text);
}
