#include "runtime/machine/process.h"
#include "runtime/machine/error.h" // fail
#include <errno.h>                 // errno
#include <fcntl.h>                 // open, fcntl
#include <pthread.h>               // pthread_getattr_np
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
