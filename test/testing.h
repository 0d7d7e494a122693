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
#define fail_msg(...) (print_error(__VA_ARGS__), print_error("\n"), _fail(__FILE__, __LINE__))
#include <fcntl.h>    // open
#include <signal.h>   // sigaction
#include <stdio.h>    // printf
#include <stdlib.h>   // malloc, getenv
#include <sys/stat.h> // umask
#include <unistd.h>   // close

// What a test relies on where it is started alone, such as in a script's background: standard files that are open, signals
// that are neither ignored nor blocked, a umask. test/environment.py prepares these and the rest where all tests run.
// SIGHUP stays ignored, so that a run under nohup goes on, as do those that stop a background job.
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

// For a process that becomes mpirun, where test/run.sh gave the test a folder for mpirun's sessions: one of its own in it.
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

// |x - reference| / |reference| in the 2-norm; NaN anywhere gives NaN, which no `<` accepts.
static inline double relative_error(const double *x, const double *reference, int64_t n) {
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        difference += (x[i] - reference[i]) * (x[i] - reference[i]);
        norm += reference[i] * reference[i];
    }
    return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}
#define assert_close(x, reference, n, tolerance)                                                                       \
    assert_close_at((x), (reference), (n), (tolerance), #x, __FILE__, __LINE__)
static inline void assert_close_at(const double *x, const double *reference, int64_t n, double tolerance,
                                   const char *name, const char *file, int line) {
    const double error = relative_error(x, reference, n);
    if (!(error <= tolerance)) {
        print_error("%s:%d: %s differs by %.3g, allowed %.3g\n", file, line, name, error, tolerance);
        _fail(file, line);
    }
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
