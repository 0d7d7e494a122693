#include "runtime/machine/signals.h"
#include <signal.h>   // sigaction, sig_atomic_t
#include <string.h>   // memset
#include <sys/mman.h> // mmap
#include <time.h>     // clock_gettime

// One press of a key, one kill or one job limit often arrives as two signals: timeout(1) and mpirun signal the process
// and then its group. A signal within this time of the first is the same request.
enum { SAME_REQUEST_CENTISECONDS = 50 };

enum { HANDLER_STACK_BYTES = 64 << 10 }; // a frame with AMX's tiles takes 11 KiB

// A mutable global, the only place where a handler, which gets nothing but the signal's number, can record a request.
static struct {
    volatile sig_atomic_t save;                        // a save was asked for and not taken yet
    volatile sig_atomic_t stop_signal;                 // the signal that asked to stop, 0: none
    volatile sig_atomic_t stop_requested_centiseconds; // when, by clock_centiseconds
    volatile sig_atomic_t interrupt_taken;             // an interrupt was, at least once
} received;

// Returns the monotonic clock in centiseconds. It wraps after 497 days, so only differences count.
static unsigned clock_centiseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now); // one of the few calls that a handler may make
    return (unsigned)now.tv_sec * 100u + (unsigned)(now.tv_nsec / 10000000);
}

static void on_save_signal(int number) { received.save = 1; }

// Whether a stop signal may come again without a new request, so that a second one must not end the process at once.
// The kernel repeats SIGXCPU every second, and a closed terminal sends SIGHUP twice.
static bool repeats_itself(int number) { return number == SIGHUP || number == SIGXCPU; }

// Records a request to stop. A second one, 0.5 s or more later, ends the process by its signal, unless repeats_itself.
static void on_stop_signal(int number) {
    const bool same_request =
        clock_centiseconds() - (unsigned)received.stop_requested_centiseconds < SAME_REQUEST_CENTISECONDS;
    if (!received.stop_signal) {
        if (same_request && received.interrupt_taken && number == SIGINT)
            return;
        received.stop_requested_centiseconds = (sig_atomic_t)clock_centiseconds();
        received.stop_signal = number;
        return;
    }
    if (repeats_itself(number) || same_request)
        return;
    signal(number, SIG_DFL);
    raise(number); // blocked until this handler returns, then ends the process with the signal's exit status
}

// Gives this thread's handlers an alternate stack. oneDNN's gemm computes with the stack pointer in a heap buffer (seen
// in 2.6.3): a handler's frame, some KiB of registers that the kernel pushes, would overwrite other heap memory.
static void use_alternate_stack(void) {
    stack_t stack;
    memset(&stack, 0, sizeof stack);
    stack.ss_size = HANDLER_STACK_BYTES;
    stack.ss_sp = mmap(NULL, stack.ss_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack.ss_sp != MAP_FAILED)
        sigaltstack(&stack, NULL);
}

void signals_install(void) {
    static const int unless_ignored[] = {SIGINT, SIGHUP, SIGXCPU};
    struct sigaction action, before;
    memset(&action, 0, sizeof action);
    use_alternate_stack();
    action.sa_flags = SA_RESTART | SA_ONSTACK; // reads and waits go on
    sigfillset(&action.sa_mask);
    action.sa_handler = on_save_signal;
    sigaction(SIGUSR1, &action, NULL);
    action.sa_handler = on_stop_signal;
    sigaction(SIGTERM, &action, NULL);
    for (size_t i = 0; i < sizeof unless_ignored / sizeof *unless_ignored; i++)
        if (sigaction(unless_ignored[i], NULL, &before) != 0 || before.sa_handler != SIG_IGN)
            sigaction(unless_ignored[i], &action, NULL);
    signal(SIGXFSZ, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
}

bool signals_take_save_request(void) {
    if (!received.save)
        return false;
    received.save = 0; // before the save begins
    return true;
}

int signals_stop_requested(void) { return received.stop_signal; }

bool signals_take_interrupt(void) {
    if (received.stop_signal != SIGINT)
        return false;
    received.interrupt_taken = 1; // before another one may come
    received.stop_signal = 0;
    return true;
}

void signals_interrupt_reads(void) {
    static const int numbers[] = {SIGTERM, SIGINT, SIGHUP, SIGXCPU};
    struct sigaction action;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (sigaction(numbers[i], NULL, &action) == 0 && action.sa_handler == on_stop_signal) {
            action.sa_flags &= ~SA_RESTART;
            sigaction(numbers[i], &action, NULL);
        }
}

int signals_start_thread(pthread_t *thread, void *(*run)(void *), void *argument) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // a new thread inherits the mask
    const int problem = pthread_create(thread, NULL, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return problem;
}
