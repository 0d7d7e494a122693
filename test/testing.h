// What all tests share: cmocka, random data, comparison by norm.
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
// cmocka's macro `fail` would hide the function of that name in runtime/machine/error.h; cmocka's fail_msg is built on
// it.
#undef fail
#undef fail_msg
#define fail_msg(...) (test_case_print(), print_error(__VA_ARGS__), print_error("\n"), _fail(__FILE__, __LINE__))
#include <fcntl.h>    // open
#include <limits.h>   // INT_MAX
#include <malloc.h>   // mallopt
#include <signal.h>   // sigaction
#include <stdbool.h>  // bool
#include <stdio.h>    // printf
#include <stdlib.h>   // malloc, getenv
#include <string.h>   // memcmp
#include <sys/stat.h> // umask
#include <unistd.h>   // close

// Prepares a test that is started on its own, such as in a script's background: standard files are open, signals are
// neither ignored nor blocked, the umask is usual, lines are written as they end. test/environment.py prepares this and
// more where all tests run. SIGHUP stays ignored where it is, so that a run under nohup goes on, as do the signals that
// stop a background job.
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
    setvbuf(stdout, NULL, _IOLBF, 0); // so that a limit that ends this program loses nothing that a test has printed
    if (getenv("TEST_FILTER"))        // of a cmocka program's tests, only those whose names match this pattern run
        cmocka_set_test_filter(getenv("TEST_FILTER"));
}

// Has malloc keep what is freed, for tests that fill a large workspace for each call of an op: the kernel would hand out
// its pages anew each time.
static inline void test_keep_memory(void) {
#ifdef __GLIBC__
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TRIM_THRESHOLD, INT_MAX);
#endif
}

// Whether AddressSanitizer is compiled in. It keeps freed memory for a while.
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
// Skips the case that it begins, unless this is the long run. Stands before the case allocates anything, since skip()
// does not return.
#define long_test() (in_long_run() ? (void)0 : skip())
// Returns the factor by which limits of time are extended: 5 where TEST_RUNNER runs the test on an emulated CPU.
static inline int test_slowness(void) { return getenv("TEST_RUNNER") ? 5 : 1; }
// Whether a test takes the i-th of its cases. On emulated hardware, where a case takes long, the short run takes only
// every `every`-th. Choose `every` such that these cases meet everything that the loop is about, though not every
// combination.
static inline bool takes_case(int i, int every) {
#if defined(CUDA_EMULATED) || defined(AMX_EMULATE) || defined(BF16_DOT_EMULATE)
    return i % every == 0 || in_long_run();
#else
    return i % every == 0 || test_slowness() == 1 || in_long_run();
#endif
}

// LeakSanitizer's hook. A process never frees the texts of its options, and a test's process reads many configurations.
#ifdef __cplusplus
extern "C"
#endif
    __attribute__((weak)) const char *
    __lsan_default_suppressions(void) {
    return "leak:start_set\nleak:start_take_beginning\nleak:fit_apply_all\nleak:option_append\n";
}

// ---- The case under test, and comparison ----

#ifdef FLOATX_NAME // in a test that includes kernels/device.cuh first
#define TEST_PRECISION FLOATX_NAME
#else
#define TEST_PRECISION "of no one precision"
#endif

// Shape and seed of the current case, which any assertion of this header prints when it fails; empty as a test begins.
static char test_case_text[512];
// Sets the current case: `shape` is a format of printf for `arguments`; `seed` is "" or ends in ", ".
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
// The name of the running test, for TEST_FILTER; NULL in a test that has a setup function of its own.
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

// cmocka's assertions, which print the case first.
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
        print_error("%s differs from %s, compared over %zu bytes\n", a_name, b_name, bytes);
    }
    _assert_memory_equal(a, b, bytes, file, line);
}

// Returns |x - reference| / |reference| in the 2-norm of n elements, or |x| where the reference is 0. A NaN anywhere
// gives NaN, which no `<` accepts.
static inline double relative_error(const double *x, const double *reference, int64_t n) {
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        difference += (x[i] - reference[i]) * (x[i] - reference[i]);
        norm += reference[i] * reference[i];
    }
    return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}

// The largest difference between n numbers and the expected ones, or the first that is NaN.
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

// Prints what every failed comparison with a reference says: `error` of `what`, with a word on how it is measured (""
// for a plain difference), is above `bound`.
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

// Checks that x (n) differs from expected (n) by at most `bound`, relative, in the norm.
#define assert_close(x, expected, n, bound) assert_close_at((x), (expected), (n), (bound), #x, __FILE__, __LINE__)
static inline void assert_close_at(const double *x, const double *expected, int64_t n, double bound, const char *what,
                                   const char *file, int line) {
    const double error = relative_error(x, expected, n);
    if (!(error <= bound))
        fail_comparison(what, error, " (relative, in the norm)", bound, largest_difference(x, expected, n), file, line);
}
// Checks that one number differs by at most `bound`. place: its index among several, which is printed.
#define assert_near(x, expected, bound, place) assert_near_at((x), (expected), (bound), (place), #x, __FILE__, __LINE__)
static inline void assert_near_at(double x, double expected, double bound, int64_t place, const char *what,
                                  const char *file, int line) {
    const struct difference difference = {fabs(x - expected), x, expected, place};
    if (!(difference.size <= bound))
        fail_comparison(what, difference.size, "", bound, difference, file, line);
}

enum { TEST_PATH = 192 }; // bytes of a path by test_template
// Fills path with a name for mkdtemp or mkstemp, TMPDIR/NAME.XXXXXX, or /tmp/NAME.XXXXXX without TMPDIR. Returns path.
static inline char *test_template(char path[TEST_PATH], const char *name) {
    const char *const folder = getenv("TMPDIR");
    snprintf(path, TEST_PATH, "%s/%s.XXXXXX", folder && *folder ? folder : "/tmp", name);
    return path;
}

// Opens a file without a name in TMPDIR, where tmpfile would use /tmp. Returns NULL where none can be made.
static inline FILE *test_file(void) {
    char path[TEST_PATH];
    const int file = mkstemp(test_template(path, "test"));
    if (file >= 0)
        unlink(path);
    return file >= 0 ? fdopen(file, "w+") : NULL;
}

// Makes a folder for the sessions of this process, which becomes mpirun, in the test's folder (test/run.py). In a
// common folder one mpirun may remove what another has just found.
static inline void test_own_session_folder(void) {
    const char *const folder = getenv("OMPI_MCA_orte_tmpdir_base");
    char path[TEST_PATH];
    if (!folder || (size_t)snprintf(path, sizeof path, "%s/mpirun.XXXXXX", folder) >= sizeof path || !mkdtemp(path))
        return;
    setenv("OMPI_MCA_orte_tmpdir_base", path, 1);
    setenv("PRTE_MCA_prte_tmpdir_base", path, 1);
}

// Returns the next number of a generator of the tests' own (splitmix64), so that test data does not depend on code
// under test.
static inline uint64_t test_random(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
// Returns a number that is uniform in [-1, 1).
static inline double test_uniform(uint64_t *state) { return (double)(test_random(state) >> 11) * 0x1p-52 - 1.0; }

// Memory that ops and the test both read and write; free() frees it. On a GPU it is managed memory or pinned memory of
// the host (test/cuda/host_visible_memory.h), and the test runs under CUDA_LAUNCH_BLOCKING=1, so that an op is done
// when it returns.
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
static inline void *test_alloc(size_t bytes) { // aligned as cudaMalloc and the memory plan align
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

// Returns the position of sequence b's first token: start + b, or 0 in each sequence where `start` is 0.
static inline int test_start(int start, int b) { return start ? start + b : 0; }
// Returns test_start of each sequence (B), which the caller frees; NULL where `start` is 0.
static inline int32_t *test_starts(int B, int start) {
    int32_t *starts = start ? (int32_t *)test_alloc((size_t)B * sizeof *starts) : NULL;
    for (int b = 0; b < B && starts; b++)
        starts[b] = test_start(start, b);
    return starts;
}

#ifdef FLOATX_NAME // for tests that include kernels/device.cuh first
// Returns a random array (n) of floatX in [-scale, scale), and in *exact the same values in double (n). The caller
// frees both.
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
// The largest relative error of one rounding to floatX: half a unit in the last place.
static const double FLOATX_ROUNDING = sizeof(floatX) == 2 ? 0x1p-8 : 0x1p-24;
#endif
