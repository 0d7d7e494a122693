#include "runtime/machine/process.h"
#include "runtime/machine/error.h" // fail
#include <errno.h>                 // errno
#include <fcntl.h>                 // open, fcntl
#include <pthread.h>               // pthread_getattr_np
#include <sched.h>                 // sched_getaffinity
#include <signal.h>                // signal
#include <stdbool.h>               // bool
#include <stdlib.h>                // getenv, setenv
#include <string.h>                // strerror
#include <sys/resource.h>          // getrlimit
#include <sys/time.h>              // setitimer
#include <unistd.h>                // STDIN_FILENO

// Handles SIGPROF: ends the process, whose libraries could not start in time, with status 2 and a message.
static void on_start_timeout(int number) {
    static const char text[] =
        "train_gpt: the libraries that this program needs do not get the memory that they start with, and would wait for "
        "it without end: raise the limit of ulimit -v or ulimit -d; OpenBLAS takes 128 MiB a core\n";
    const ssize_t written = write(STDERR_FILENO, text, sizeof text - 1);
    _exit(written > 0 ? EXIT_USAGE : EXIT_FAILURE);
}
static bool is_limited(int resource) {
    struct rlimit limit;
    return getrlimit((__rlimit_resource_t)resource, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
}
// Ends a process of limited memory after two seconds of CPU time, unless libraries_have_started comes first: before
// main, OpenBLAS 0.3.21 was seen to ask for its buffers again and again until it got them.
static void watch_libraries(int argc, char **argv, char **environment) {
    const struct itimerval seconds = {{0, 0}, {2, 0}};
    if (!is_limited(RLIMIT_AS) && !is_limited(RLIMIT_DATA))
        return;
    signal(SIGPROF, on_start_timeout);
    setitimer(ITIMER_PROF, &seconds, NULL);
}
// Called before the constructors of all libraries.
__attribute__((section(".preinit_array"), used)) static void (*const watch)(int, char **, char **) = watch_libraries;

void libraries_have_started(void) {
    const struct itimerval never = {{0, 0}, {0, 0}};
    struct sigaction action;
    if (sigaction(SIGPROF, NULL, &action) != 0 || action.sa_handler != on_start_timeout)
        return; // not watched, or a profiler has taken the timer
    setitimer(ITIMER_PROF, &never, NULL);
    signal(SIGPROF, SIG_DFL);
}

void standard_files_open(void) {
    for (int number = STDIN_FILENO; number <= STDERR_FILENO; number++) {
        if (fcntl(number, F_GETFD) >= 0)
            continue;
        // The lowest number that is free, which is this one.
        if (open("/dev/null", number == STDIN_FILENO ? O_RDONLY : O_WRONLY) != number)
            fail("/dev/null: cannot be opened in place of a standard file that is closed: %s", strerror(errno));
    }
}

void spin_briefly(char *const *argv) {
    // Turns of a spin: with free cores, steps took as long as by the default, 300,000 (4 layers of 512, 2 threads).
    static const char variable[] = "GOMP_SPINCOUNT", count[] = "1000";
    enum { MAX_CPUS = 8 };
    cpu_set_t cpus;
    char path[4096];
    const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    path[length > 0 ? length : 0] = '\0';
    if (strstr(path, "/ld-") || !*path) // started by way of the dynamic linker, which takes other arguments
        return;
    if (getenv(variable) || getenv("OMP_WAIT_POLICY") || sched_getaffinity(0, sizeof cpus, &cpus) != 0 ||
        CPU_COUNT(&cpus) > MAX_CPUS || setenv(variable, count, 1) != 0)
        return;
    execv(path, argv);
}

void stack_check_limit(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_STACK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < STACK_BYTES)
        fail("the stack is limited to %llu KiB, and at least %d KiB are needed: raise the limit by ulimit -s 8192",
             (unsigned long long)limit.rlim_cur >> 10, STACK_BYTES >> 10);
}

size_t stack_bytes_here(void) {
    pthread_attr_t attributes;
    void *lowest;
    size_t bytes = 0;
    if (pthread_getattr_np(pthread_self(), &attributes) != 0)
        return STACK_BYTES; // not known
    pthread_attr_getstack(&attributes, &lowest, &bytes);
    pthread_attr_destroy(&attributes);
    return bytes;
}
