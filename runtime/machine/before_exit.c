#include "runtime/machine/before_exit.h"
#include <stddef.h> // NULL
#include <stdlib.h> // atexit

// A save to a slow disk is worth waiting for; one that can't end, as of ranks that are gone, is not.
enum { LONGEST_S = 120 };

static void (*finish_function)(double seconds);

static void finish_at_exit(void) { before_exit_finish(LONGEST_S); }

void before_exit_set(void (*finish)(double seconds)) {
    void (*const former)(double) = __atomic_exchange_n(&finish_function, finish, __ATOMIC_ACQ_REL);
    if (former == NULL)
        atexit(finish_at_exit); // where that fails, the save that is under way is lost, as without this file
}

void before_exit_finish(double seconds) {
    void (*const finish)(double) = __atomic_load_n(&finish_function, __ATOMIC_ACQUIRE);
    if (finish != NULL)
        finish(seconds);
}
