// A CPU that lacks what the program was compiled for gets a message, with the build that it can run.
#include "runtime/machine/cpu_features.c"        // under test
#include "runtime/machine/cpu_features_needed.c" // under test; its check of this program itself passes
#include "test/testing.h"                        // cmocka

// Builds with all features of the table up to a level, and the build of that name.
enum { FEATURES = sizeof cpu_features_needed / sizeof *cpu_features_needed };
static void build_for(struct cpu_feature *build, int level, const char *name) {
    memcpy(build, cpu_features_needed, sizeof cpu_features_needed);
    for (struct cpu_feature *f = build; f->name; f++)
        f->compiled = (f->level > 0 && f->level <= level) || strcmp(f->name, name) == 0 ? "1" : "__NOT__";
}
// Returns a CPU with the build's features.
static struct cpu cpu_for(const struct cpu_feature *build) {
    struct cpu cpu;
    memset(&cpu, 0, sizeof cpu);
    for (const struct cpu_feature *f = build; f->name; f++)
        if (cpu_feature_is_compiled(f))
            cpu.words[f->word] |= (uint64_t)1 << f->bit;
#if defined(__x86_64__)
    cpu.words[CPU_XCR0] = CPU_ZMM;
#endif
    return cpu;
}

static void a_name_has_one_bit(void **state) {
    for (const struct cpu_feature *f = cpu_features_needed; f->name; f++)
        for (const struct cpu_feature *g = cpu_features_needed; g < f; g++) {
            assert_string_not_equal(f->name, g->name);
            assert_false(f->word == g->word && f->bit == g->bit);
        }
}

static void this_cpu_has_what_this_program_needs(void **state) {
    char text[512];
    const struct cpu cpu = cpu_read();
    assert_null(cpu_problem(text, sizeof text, &cpu, cpu_features_needed));
    assert_true(cpu_has_features(cpu_features_needed));
}

static void a_level_is_had_where_its_features_are(void **state) {
    const struct cpu cpu = cpu_read();
    for (const struct cpu_feature *f = cpu_features_needed; f->name; f++) {
        struct cpu_feature level[FEATURES];
        build_for(level, 0, f->name);
        assert_int_equal(cpu_has_features(level), cpu_has(&cpu, f));
    }
}

static void one_feature_multiplies_bf16(void **state) {
    int count = 0;
    for (const struct cpu_feature *f = cpu_features_needed; f->name; f++)
        count += f->multiplies_bf16;
    assert_int_equal(count, 1);
}

static void each_missing_feature_is_named(void **state) {
    for (const struct cpu_feature *f = cpu_features_needed; f->name; f++) {
        struct cpu_feature build[FEATURES];
        char text[512], named[64];
        build_for(build, 4, f->name);
        struct cpu cpu = cpu_for(build);
        assert_null(cpu_problem(text, sizeof text, &cpu, build));
        cpu.words[f->word] &= ~((uint64_t)1 << f->bit);
        assert_non_null(cpu_problem(text, sizeof text, &cpu, build));
        snprintf(named, sizeof named, "built for a CPU with %s, which this one lacks;", f->name);
        assert_non_null(strstr(text, named));
    }
}

#if defined(__x86_64__)
static void the_highest_level_that_fits_is_named(void **state) {
    static const char *const arch[] = {"ARCH=x86-64", "ARCH=x86-64-v2", "ARCH=x86-64-v3", "ARCH=x86-64-v4"};
    for (int level = 1; level <= 4; level++) {
        struct cpu_feature build[FEATURES];
        char text[512];
        build_for(build, level, "");
        struct cpu cpu = cpu_for(build);
        build_for(build, 4, "avx512bf16");
        assert_non_null(cpu_problem(text, sizeof text, &cpu, build));
        assert_string_equal(strrchr(text, ' ') + 1, arch[level - 1]);
        assert_int_equal(strstr(text, "and more") != NULL, level < 3);
    }
}

// Checks that instructions count as missing where a kernel or a hypervisor does not save their registers, whatever
// cpuid says.
static void registers_that_nobody_saves(void **state) {
    struct cpu_feature build[FEATURES];
    char text[512];
    build_for(build, 4, "");
    struct cpu cpu = cpu_for(build);
    cpu.words[CPU_XCR0] = CPU_YMM;
    assert_non_null(cpu_problem(text, sizeof text, &cpu, build));
    assert_non_null(strstr(text, "with avx512f, avx512bw, avx512cd, avx512dq, avx512vl, which"));
    assert_non_null(strstr(text, "ARCH=x86-64-v3"));
    cpu.words[CPU_XCR0] = 0;
    assert_non_null(cpu_problem(text, sizeof text, &cpu, build));
    assert_non_null(strstr(text, "with avx, avx2,"));
    assert_non_null(strstr(text, "ARCH=x86-64-v2"));
}
#endif

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_name_has_one_bit),
        cmocka_unit_test(this_cpu_has_what_this_program_needs),
        cmocka_unit_test(a_level_is_had_where_its_features_are),
        cmocka_unit_test(one_feature_multiplies_bf16),
        cmocka_unit_test(each_missing_feature_is_named),
#if defined(__x86_64__)
        cmocka_unit_test(the_highest_level_that_fits_is_named),
        cmocka_unit_test(registers_that_nobody_saves),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
