// Signals become requests that are each seen once; reads go on; a second Ctrl-C ends the process; deadlines.
#include "runtime/machine/deadline.h" // under test
#include "runtime/machine/signals.h"  // under test
#include "test/testing.h"             // cmocka
#include <errno.h>                    // EFBIG, EPIPE
#include <pthread.h>                  // pthread_create
#include <string.h>                   // memset
#include <sys/resource.h>             // setrlimit
#include <sys/wait.h>                 // waitpid
#include <ucontext.h>                 // makecontext
#include <unistd.h>                   // fork, pipe, alarm

// Runs a function in a process of its own, since signals act on whole processes. Returns its status as waitpid gives
// it.
static int in_child(int (*run)(void *), void *argument) {
    int status = 0;
    fflush(stdout);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        alarm(60); // a child that hangs is a failure
        _exit(run(argument));
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    return status;
}
// Ends a child unless a condition holds. The exit status is the line, so lines above 255 won't do.
#define check(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            return __LINE__;                                                                                           \
    } while (0)
static void sleep_ms(int ms) {
    const struct timespec time = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&time, NULL);
}

static int run_save(void *unused) {
    signals_install();
    check(!signals_take_save_request());
    raise(SIGUSR1);
    check(signals_take_save_request());
    check(!signals_take_save_request());
    raise(SIGUSR1);
    raise(SIGUSR1);
    check(signals_take_save_request()); // two requests that nobody looked at in between are one
    check(!signals_take_save_request());
    check(!signals_stop_requested());
    return 0;
}
static void a_save_request_is_taken_once(void **state) { assert_int_equal(in_child(run_save, NULL), 0); }

static int run_stop(void *number) {
    signal(SIGHUP, SIG_DFL); // under nohup it is ignored
    signals_install();
    check(signals_stop_requested() == 0);
    raise(*(int *)number);
    check(signals_stop_requested() == *(int *)number);
    check(signals_stop_requested() == *(int *)number); // it stays
    raise(SIGTERM);                                    // another signal for an equal request
    raise(SIGINT);
    check(signals_stop_requested() == *(int *)number);
    raise(SIGUSR1); // a save while stopping is still a save
    check(signals_take_save_request());
    return 0;
}
static void a_stop_request_stays(void **state) {
    int numbers[] = {SIGTERM, SIGINT, SIGHUP, SIGXCPU};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        assert_int_equal(in_child(run_stop, &numbers[i]), 0);
}

// Checks repeated signals, which do not cut the save short: the kernel sends SIGXCPU each second, and a terminal that
// goes sends SIGHUP more than once.
static int run_stop_repeated(void *number) {
    signal(SIGHUP, SIG_DFL); // under nohup it is ignored
    signals_install();
    for (int i = 0; i < 2; i++) {
        raise(*(int *)number);
        sleep_ms(600);
    }
    check(signals_stop_requested() == *(int *)number);
    return 0;
}
static void what_repeats_itself_ends_nothing(void **state) {
    int numbers[] = {SIGHUP, SIGXCPU};
    assert_int_equal(in_child(run_stop_repeated, &numbers[0]), 0);
    assert_int_equal(in_child(run_stop_repeated, &numbers[1]), 0);
}
static int run_ignored(void *number) {
    signal(*(int *)number, SIG_IGN);
    signals_install();
    raise(*(int *)number);
    sleep_ms(600);
    raise(*(int *)number); // this does not count as a second one either
    check(signals_stop_requested() == 0);
    return 0;
}
static void what_was_ignored_stays_so(void **state) {
    int numbers[] = {SIGINT, SIGHUP, SIGXCPU};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        assert_int_equal(in_child(run_ignored, &numbers[i]), 0);
}

static int run_interrupt(void *unused) {
    signals_install();
    raise(SIGINT);
    check(signals_take_interrupt());
    raise(SIGINT); // as mpirun sends it once more
    check(!signals_take_interrupt() && !signals_stop_requested());
    sleep_ms(600);
    raise(SIGINT);
    check(signals_take_interrupt());
    raise(SIGTERM);
    check(!signals_take_interrupt() && signals_stop_requested() == SIGTERM);
    return 0;
}
static void an_interrupt_is_taken_once(void **state) { assert_int_equal(in_child(run_interrupt, NULL), 0); }

static int run_stop_twice(void *numbers) {
    signals_install();
    raise(((int *)numbers)[0]);
    sleep_ms(600);
    raise(((int *)numbers)[1]);
    return 1; // never reached
}
static void a_second_one_ends_the_process(void **state) {
    int numbers[4][2] = {{SIGINT, SIGINT}, {SIGTERM, SIGTERM}, {SIGTERM, SIGINT}, {SIGINT, SIGTERM}};
    for (int i = 0; i < 4; i++) {
        const int status = in_child(run_stop_twice, numbers[i]);
        assert_true(WIFSIGNALED(status)); // so that a shell, mpirun or Slurm sees which signal it was
        assert_int_equal(WTERMSIG(status), numbers[i][1]);
    }
}

// Signals this process some time later, and then ends the read that it is in.
struct interruption {
    pthread_t reader;
    int pipe;
};
static void *interrupt_read(void *argument) {
    const struct interruption *const interruption = (const struct interruption *)argument;
    for (int i = 0; i < 2; i++) { // of two signals that ask to stop, the kernel might deliver the later one first
        sleep_ms(20);
        pthread_kill(interruption->reader, i == 0 ? SIGUSR1 : SIGTERM);
    }
    sleep_ms(20);
    return write(interruption->pipe, "x", 1) == 1 ? NULL : argument;
}
static int run_read(void *unused) {
    int ends[2];
    char byte = 0;
    pthread_t thread;
    signals_install();
    check(pipe(ends) == 0);
    struct interruption interruption = {pthread_self(), ends[1]};
    check(pthread_create(&thread, NULL, interrupt_read, &interruption) == 0);
    check(read(ends[0], &byte, 1) == 1 && byte == 'x'); // no EINTR
    void *failed = NULL;
    check(pthread_join(thread, &failed) == 0 && !failed);
    check(signals_take_save_request() && signals_stop_requested() == SIGTERM);
    return 0;
}
static void reads_go_on(void **state) { assert_int_equal(in_child(run_read, NULL), 0); }

// Sizes of a stack. A handler's frame is not put where the stack pointer is, here in a small piece of a larger buffer,
// as in oneDNN's gemm.
enum { BUFFER_BYTES = 1 << 16, SMALL_STACK_BYTES = 2048 }; // smaller than the registers of AVX-512
static void raise_save(void) { raise(SIGUSR1); }
static int run_small_stack(void *unused) {
    static unsigned char buffer[BUFFER_BYTES];
    ucontext_t here, there;
    signals_install();
    raise(SIGUSR1); // the loader finds it once, which takes much stack
    check(signals_take_save_request());
    memset(buffer, 0xa5, sizeof buffer);
    check(getcontext(&there) == 0);
    there.uc_stack.ss_sp = buffer + BUFFER_BYTES - SMALL_STACK_BYTES;
    there.uc_stack.ss_size = SMALL_STACK_BYTES;
    there.uc_link = &here;
    makecontext(&there, raise_save, 0);
    check(swapcontext(&here, &there) == 0);
    check(signals_take_save_request());
    for (int i = 0; i < BUFFER_BYTES - SMALL_STACK_BYTES; i++)
        check(buffer[i] == 0xa5);
    return 0;
}
static void handlers_have_their_own_stack(void **state) { assert_int_equal(in_child(run_small_stack, NULL), 0); }

static int run_failed_writes(void *unused) {
    int ends[2];
    signals_install();
    check(pipe(ends) == 0 && close(ends[0]) == 0);
    check(write(ends[1], "x", 1) == -1 && errno == EPIPE);
    FILE *const file = test_file();
    const struct rlimit limit = {1, 1};
    check(file && setrlimit(RLIMIT_FSIZE, &limit) == 0);
    check(write(fileno(file), "x", 1) == 1);
    check(write(fileno(file), "x", 1) == -1 && errno == EFBIG);
    return 0;
}
static void failed_writes_are_errors(void **state) { assert_int_equal(in_child(run_failed_writes, NULL), 0); }

static void deadlines(void **state) {
    const double now = deadline_clock_s();
    const struct deadline never = deadline_after_minutes(now, 0), far = deadline_after_minutes(now, 10),
                          past = deadline_after_minutes(now - 61, 1);
    assert_true(deadline_allows(never, 1e18));
    assert_true(isinf(deadline_left_s(never)));
    assert_true(deadline_allows(deadline_after_minutes(now, -1), 1e18));
    assert_true(deadline_allows(far, 500));
    assert_false(deadline_allows(far, 600.001));
    assert_true(deadline_left_s(far) > 500 && deadline_left_s(far) <= 600);
    assert_false(deadline_allows(past, 0));
    assert_true(deadline_left_s(past) < -0.99);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_save_request_is_taken_once),
        cmocka_unit_test(a_stop_request_stays),
        cmocka_unit_test(what_repeats_itself_ends_nothing),
        cmocka_unit_test(what_was_ignored_stays_so),
        cmocka_unit_test(an_interrupt_is_taken_once),
        cmocka_unit_test(a_second_one_ends_the_process),
        cmocka_unit_test(reads_go_on),
        cmocka_unit_test(handlers_have_their_own_stack),
        cmocka_unit_test(failed_writes_are_errors),
        cmocka_unit_test(deadlines),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
