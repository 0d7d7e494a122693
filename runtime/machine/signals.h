// Signals as requests: the training looks at them where it can act on them, between two steps or two batches.
//
//   SIGUSR1          save a checkpoint, and go on
//   SIGTERM, SIGINT  save a checkpoint, and stop; a second one while stopping ends the process at once
//   SIGXFSZ, SIGPIPE ignored, so that a write that fails returns an error, which has a message
//
// The flags are the one mutable global of the project: a handler is given nothing but the signal's number, so what it
// says can only lie where it finds it by name. They are weak symbols, so that they are the same in every copy of the
// engine and in main, whichever of them installs the handlers.
#pragma once
#include <signal.h>   // sigaction, sig_atomic_t
#include <stdbool.h>  // bool
#include <string.h>   // memset
#include <sys/mman.h> // mmap
#include <time.h>     // clock_gettime

// One press of a key, one kill, one job limit often arrives twice: timeout(1) and mpirun signal the process and then its
// group. What comes within this time of the first is the same request.
enum { SIGNALS_SAME_REQUEST_CENTISECONDS = 50 };

enum { SIGNALS_STACK_BYTES = 64 << 10 }; // a frame with AMX's tiles takes 11 KiB

struct signals {
    volatile sig_atomic_t save;       // asked for, and not yet taken
    volatile sig_atomic_t stop;       // the number of the signal that asked to stop, 0 before
    volatile sig_atomic_t stop_asked; // when, in centiseconds
};
__attribute__((weak)) struct signals signals_received = {0, 0, 0};

// Of the monotonic clock; it wraps, after 248 days, so only differences count.
static unsigned signals_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now); // one of the few calls that a handler may make
    return (unsigned)now.tv_sec * 100u + (unsigned)(now.tv_nsec / 10000000);
}

static void signals_on_save(int number) { signals_received.save = 1; }

static void signals_on_stop(int number) {
    if (!signals_received.stop) {
        signals_received.stop_asked = (sig_atomic_t)signals_clock();
        signals_received.stop = number;
        return;
    }
    if (signals_clock() - (unsigned)signals_received.stop_asked < SIGNALS_SAME_REQUEST_CENTISECONDS)
        return;
    signal(number, SIG_DFL);
    raise(number); // held back until this returns, and then ends the process with the status that says why
}

// A stack for this thread's handlers, which the kernel prefers to others. oneDNN's gemm computes with the stack pointer in
// a buffer of the heap (seen in 2.6.3): what the kernel pushes there for a handler, some KiB of registers, would lie on
// other memory of the heap.
static void signals_own_stack(void) {
    stack_t stack;
    memset(&stack, 0, sizeof stack);
    stack.ss_size = SIGNALS_STACK_BYTES;
    stack.ss_sp = mmap(NULL, stack.ss_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack.ss_sp != MAP_FAILED)
        sigaltstack(&stack, NULL);
}

// From here on the signals are requests. SIGINT stays ignored where it was: a shell starts what runs in its background
// so, and the key is not meant for it. Called by the first thread, which the kernel gives a process's signals to.
static void signals_install(void) {
    struct sigaction action, before;
    memset(&action, 0, sizeof action);
    signals_own_stack();
    action.sa_flags = SA_RESTART | SA_ONSTACK; // reads and waits go on
    sigfillset(&action.sa_mask);
    action.sa_handler = signals_on_save;
    sigaction(SIGUSR1, &action, NULL);
    action.sa_handler = signals_on_stop;
    sigaction(SIGTERM, &action, NULL);
    if (sigaction(SIGINT, NULL, &before) != 0 || before.sa_handler != SIG_IGN)
        sigaction(SIGINT, &action, NULL);
    signal(SIGXFSZ, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
}

// Whether a save was asked for since the last call. The flag is cleared before the save begins, so that a signal that
// comes during it asks for another, of a later step.
static bool signals_take_save_request(void) {
    if (!signals_received.save)
        return false;
    signals_received.save = 0;
    return true;
}

// The number of the signal that asked to stop, 0 if none did.
static int signals_stop_requested(void) { return signals_received.stop; }
