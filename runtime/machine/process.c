#include "runtime/machine/process.h"
#include "runtime/machine/error.h" // fail
#include <errno.h>                 // errno
#include <fcntl.h>                 // open, fcntl
#include <pthread.h>               // pthread_getattr_np
#include <sched.h>                 // sched_getaffinity
#include <stdlib.h>                // getenv, setenv
#include <string.h>                // strerror
#include <sys/resource.h>          // getrlimit
#include <unistd.h>                // STDIN_FILENO

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
    // Turns of its loop: where cores were free, steps took as long as by its own 300,000 (4 layers of 512, two threads).
    static const char variable[] = "GOMP_SPINCOUNT", count[] = "1000";
    enum { MOST_CPUS = 8 };
    cpu_set_t cpus;
    char path[4096];
    const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    path[length > 0 ? length : 0] = '\0';
    if (strstr(path, "/ld-") || !*path) // started by way of the dynamic linker, which takes other arguments
        return;
    if (getenv(variable) || getenv("OMP_WAIT_POLICY") || sched_getaffinity(0, sizeof cpus, &cpus) != 0 ||
        CPU_COUNT(&cpus) > MOST_CPUS || setenv(variable, count, 1) != 0)
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
