// What the tests share: cmocka, random data, comparison by norm.
#pragma once
#include <math.h>   // sqrt, fabs, isnan
#include <setjmp.h> // cmocka.h needs these four before it
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#include <cmocka.h>
}
#else
#include <cmocka.h>
#endif
// cmocka's macro would hide the function of that name in runtime/machine/error.h; fail_msg is built on it.
#undef fail
#undef fail_msg
#define fail_msg(...) (test_case_print(), print_error(__VA_ARGS__), print_error("\n"), _fail(__FILE__, __LINE__))
#include <fcntl.h>    // open
#include <signal.h>   // sigaction
#include <stdbool.h>  // bool
#include <stdio.h>    // printf
#include <stdlib.h>   // malloc, getenv
#include <string.h>   // memcmp
#include <sys/stat.h> // umask
#include <unistd.h>   // close

// What a test relies on where it is started alone, such as in a script's background: standard files that are open,
// signals that are neither ignored nor blocked, a umask, lines that are written as they end. test/environment.py
// prepares these and the rest where all tests run. SIGHUP stays ignored, so that a run under nohup goes on, as do those
// that stop a background job.
__attribute__((constructor)) static inline void test_prepare(void) {
    int file;
    while ((file = open("/dev/null", O_RDWR)) >= 0 && file <= STDERR_FILENO)
        continue;
    close(file);
    for (int number = 1; number < NSIG; number++) {
        const int kept = number == SIGHUP || number == SIGTSTP || number == SIGTTIN || number == SIGTTOU;
        struct sigaction action;
        if (!kept && sigaction(number, NULL, &action) == 0 && action.sa_handler == SIG_IGN)
            signal(number, SIG_DFL);
    }
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    umask(022);
    setvbuf(stdout, NULL, _IOLBF, 0); // what a test said stays said where a limit ends this program
    if (getenv("TEST_FILTER"))        // of the tests of a cmocka program, only those whose name has this pattern
        cmocka_set_test_filter(getenv("TEST_FILTER"));
}

// Whether AddressSanitizer is compiled in, which keeps what was freed for a while.
#if defined(__SANITIZE_ADDRESS__)
enum { UNDER_ADDRESS_SANITIZER = 1 };
#elif defined(__has_feature)
enum { UNDER_ADDRESS_SANITIZER = __has_feature(address_sanitizer) };
#else
enum { UNDER_ADDRESS_SANITIZER = 0 };
#endif

// Whether LONG_TESTS asks for the long run: more shapes, seeds and kills than the short run has time for.
static inline bool in_long_run(void) {
    const char *const long_tests = getenv("LONG_TESTS");
    return long_tests && *long_tests;
}
// Begins a case that the short run skips, before it allocates anything: skip() does not return.
#define long_test() (in_long_run() ? (void)0 : skip())
// How many times a limit of time is extended: where TEST_RUNNER runs the test on an emulated CPU.
static inline int test_slowness(void) { return getenv("TEST_RUNNER") ? 5 : 1; }
// Whether a test takes the i-th of its cases. On emulated hardware, where each takes long, the short run takes every
// `every`-th: all that a loop is about should be met by some of these, where not all combinations are.
static inline bool takes_case(int i, int every) {
#if defined(CUDA_EMULATED) || defined(AMX_EMULATE) || defined(BF16_DOT_EMULATE)
    return i % every == 0 || in_long_run();
#else
    return i % every == 0 || test_slowness() == 1 || in_long_run();
#endif
}

// LeakSanitizer's hook. The texts of a process's options are never freed, and a test's process has many configurations.
#ifdef __cplusplus
extern "C"
#endif
    __attribute__((weak)) const char *
    __lsan_default_suppressions(void) {
    return "leak:start_set\nleak:fit_keep\nleak:option_append\n";
}

// ---- The case under test, and comparison ----

#ifdef FLOATX_NAME // a test that includes kernels/device.cuh first
#define TEST_PRECISION FLOATX_NAME
#else
#define TEST_PRECISION "of no one precision"
#endif

// Shape and seed of what a test does just now: any assertion of this header that fails says it. A test begins with none.
static char test_case_text[512];
__attribute__((format(printf, 2, 0))) static inline void test_case_set(const char *seed, const char *shape,
                                                                       va_list arguments) {
    char text[sizeof test_case_text - 64];
    vsnprintf(text, sizeof text, shape, arguments);
    snprintf(test_case_text, sizeof test_case_text, "%s, %s%s", text, seed, TEST_PRECISION);
}
__attribute__((format(printf, 2, 3))) static inline void test_case(uint64_t seed, const char *shape, ...) {
    char text[48];
    va_list arguments;
    va_start(arguments, shape);
    snprintf(text, sizeof text, "seed %llu, ", (unsigned long long)seed);
    test_case_set(text, shape, arguments);
    va_end(arguments);
}
__attribute__((format(printf, 1, 2))) static inline void test_case_without_seed(const char *shape, ...) {
    va_list arguments;
    va_start(arguments, shape);
    test_case_set("", shape, arguments);
    va_end(arguments);
}
// The name of the test that runs, which TEST_FILTER takes; NULL in a test that has a setup of its own.
static const char *test_name;
static inline int test_case_none(void **state) {
    test_case_text[0] = '\0';
    test_name = (const char *)*state;
    *state = NULL;
    return 0;
}
#undef cmocka_unit_test
#define cmocka_unit_test(test) cmocka_unit_test_prestate_setup_teardown(test, test_case_none, NULL, (void *)#test)
static inline void test_case_print(void) {
    if (*test_case_text)
        print_error("in the case %s:\n", test_case_text);
}

// cmocka's own, after the case.
#undef assert_true
#define assert_true(c) ((c) ? (void)0 : (test_case_print(), _assert_true(0, #c, __FILE__, __LINE__)))
#undef assert_int_equal
#define assert_int_equal(a, b)                                                                                         \
    assert_int_equal_at(cast_to_largest_integral_type(a), cast_to_largest_integral_type(b), __FILE__, __LINE__)
static inline void assert_int_equal_at(LargestIntegralType a, LargestIntegralType b, const char *file, int line) {
    if (a != b)
        test_case_print();
    _assert_int_equal(a, b, file, line);
}
#undef assert_memory_equal
#define assert_memory_equal(a, b, bytes) assert_memory_equal_at((a), (b), (bytes), #a, #b, __FILE__, __LINE__)
static inline void assert_memory_equal_at(const void *a, const void *b, size_t bytes, const char *a_name,
                                          const char *b_name, const char *file, int line) {
    if (bytes > 0 && memcmp(a, b, bytes) != 0) {
        test_case_print();
        print_error("%s has not the bytes of %s, of which it has %zu\n", a_name, b_name, bytes);
    }
    _assert_memory_equal(a, b, bytes, file, line);
}

// |x - reference| / |reference| in the 2-norm; NaN anywhere gives NaN, which no `<` accepts.
static inline double relative_error(const double *x, const double *reference, int64_t n) {
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        difference += (x[i] - reference[i]) * (x[i] - reference[i]);
        norm += reference[i] * reference[i];
    }
    return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}

// The largest difference between n numbers and the expected ones, or the first NaN.
struct difference {
    double size, got, expected;
    int64_t place;
};
static inline struct difference largest_difference(const double *x, const double *expected, int64_t n) {
    struct difference largest = {-1, NAN, NAN, -1};
    for (int64_t i = 0; i < n && !isnan(largest.size); i++) {
        const double size = fabs(x[i] - expected[i]);
        if (!(size <= largest.size)) {
            const struct difference here = {size, x[i], expected[i], i};
            largest = here;
        }
    }
    return largest;
}

// Every comparison with a reference that fails says this: `error` of `what`, in the measure's words, is above `bound`.
static inline void print_difference(const char *what, double error, const char *measure, double bound,
                                    struct difference largest) {
    print_error("%s is off by %.3g%s, allowed %.3g: largest difference %.3g at [%lld], %.9g where %.9g is expected\n",
                what, error, measure, bound, largest.size, (long long)largest.place, largest.got, largest.expected);
}
static inline void fail_comparison(const char *what, double error, const char *measure, double bound,
                                   struct difference largest, const char *file, int line) {
    test_case_print();
    print_difference(what, error, measure, bound, largest);
    _fail(file, line);
}

// n elements whose relative error in the norm is at most `bound`.
#define assert_close(x, expected, n, bound) assert_close_at((x), (expected), (n), (bound), #x, __FILE__, __LINE__)
static inline void assert_close_at(const double *x, const double *expected, int64_t n, double bound, const char *what,
                                   const char *file, int line) {
    const double error = relative_error(x, expected, n);
    if (!(error <= bound))
        fail_comparison(what, error, " (relative, in the norm)", bound, largest_difference(x, expected, n), file, line);
}
// One number, or the element `place` of some, whose difference is at most `bound`.
#define assert_near(x, expected, bound, place) assert_near_at((x), (expected), (bound), (place), #x, __FILE__, __LINE__)
static inline void assert_near_at(double x, double expected, double bound, int64_t place, const char *what,
                                  const char *file, int line) {
    const struct difference difference = {fabs(x - expected), x, expected, place};
    if (!(difference.size <= bound))
        fail_comparison(what, difference.size, "", bound, difference, file, line);
}

enum { TEST_PATH = 192 }; // bytes of a template
// A name for mkdtemp or mkstemp to fill in, in the folder for files that TMPDIR names: TMPDIR/NAME.XXXXXX. Returns path.
static inline char *test_template(char path[TEST_PATH], const char *name) {
    const char *const folder = getenv("TMPDIR");
    snprintf(path, TEST_PATH, "%s/%s.XXXXXX", folder && *folder ? folder : "/tmp", name);
    return path;
}

// A file without a name, in that folder, where tmpfile would take /tmp. NULL where it can't be made.
static inline FILE *test_file(void) {
    char path[TEST_PATH];
    const int file = mkstemp(test_template(path, "test"));
    if (file >= 0)
        unlink(path);
    return file >= 0 ? fdopen(file, "w+") : NULL;
}

// For a process that becomes mpirun, where test/run.py gave the test a folder for mpirun's sessions: one of its own in it.
// Of several mpiruns in one folder, one may make or remove a part that another has just looked for.
static inline void test_own_session_folder(void) {
    const char *const folder = getenv("OMPI_MCA_orte_tmpdir_base");
    char path[TEST_PATH];
    if (!folder || (size_t)snprintf(path, sizeof path, "%s/mpirun.XXXXXX", folder) >= sizeof path || !mkdtemp(path))
        return;
    setenv("OMPI_MCA_orte_tmpdir_base", path, 1);
    setenv("PRTE_MCA_prte_tmpdir_base", path, 1);
}

// A small generator of the tests' own (splitmix64), so that test data does not lean on code under test.
static inline uint64_t test_random(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
// Uniform in [-1, 1).
static inline double test_uniform(uint64_t *state) { return (double)(test_random(state) >> 11) * 0x1p-52 - 1.0; }

// Memory that ops and the test both read and write; free() takes it. On a GPU it is managed memory or pinned memory of the
// host (test/cuda/host_visible_memory.h), and the test runs under CUDA_LAUNCH_BLOCKING=1, so that an op is done when it
// returns.
#if defined(TARGET_CUDA) && !defined(CUDA_EMULATED)
static inline void *test_alloc(size_t bytes) {
    void *memory = NULL;
    assert_int_equal(cudaMallocManaged(&memory, bytes + 1), cudaSuccess);
    return memory;
}
static inline void test_release(void *memory) {
    struct cudaPointerAttributes attributes;
    if (memory && cudaPointerGetAttributes(&attributes, memory) == cudaSuccess &&
        attributes.type != cudaMemoryTypeUnregistered)
        assert_int_equal(cudaFree(memory), cudaSuccess);
    else
        (free)(memory);
}
#define free(memory) test_release(memory)
#else
static inline void *test_alloc(size_t bytes) { // aligned as cudaMalloc aligns, and the memory plan
    void *memory = aligned_alloc(256, (bytes + 511) / 256 * 256);
    assert_non_null(memory);
    return memory;
}
#endif
static inline double *test_doubles(int64_t n) {
    double *x = (double *)test_alloc((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = 0;
    return x;
}

// The position of sequence b's first token, of sequences that begin one position after each other, or all at 0 where
// `start` is; and (B) of them, NULL where all are 0, which the caller frees.
static inline int test_start(int start, int b) { return start ? start + b : 0; }
static inline int32_t *test_starts(int B, int start) {
    int32_t *starts = start ? (int32_t *)test_alloc((size_t)B * sizeof *starts) : NULL;
    for (int b = 0; b < B && starts; b++)
        starts[b] = test_start(start, b);
    return starts;
}

#ifdef FLOATX_NAME // for tests that include kernels/device.cuh first
// A random floatX array and the same values (rounded to floatX) in double.
static inline floatX *test_floats(double **exact, int64_t n, double scale, uint64_t *state) {
    floatX *x = (floatX *)test_alloc((size_t)n * sizeof *x);
    *exact = test_doubles(n);
    for (int64_t i = 0; i < n; i++) {
        x[i] = to_floatX((float)(scale * test_uniform(state)));
        (*exact)[i] = to_float(x[i]);
    }
    return x;
}
static inline double *to_doubles(const floatX *x, int64_t n) {
    double *result = test_doubles(n);
    for (int64_t i = 0; i < n; i++)
        result[i] = to_float(x[i]);
    return result;
}
static inline double *floats_to_doubles(const float *x, int64_t n) {
    double *result = test_doubles(n);
    for (int64_t i = 0; i < n; i++)
        result[i] = x[i];
    return result;
}
// Half a unit in the last place of floatX, relative: what one rounding costs at most.
static const double FLOATX_ROUNDING = sizeof(floatX) == 2 ? 0x1p-8 : 0x1p-24;
#endif
