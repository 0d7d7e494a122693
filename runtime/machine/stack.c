#include "runtime/machine/stack.h"
#include "runtime/machine/error.h" // fail
#include <pthread.h>               // pthread_getattr_np
#include <sys/resource.h>          // getrlimit

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
