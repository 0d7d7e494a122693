// Jobs run in order, one at a time, each with a copy of its arguments; a thread that waits for a job sees all that it
// wrote.
#include "runtime/net/control_internal.h" // struct control
#include "runtime/net/work_thread.c"      // under test
#include "test/testing.h"                 // cmocka
#include <time.h>                         // nanosleep
#include <unistd.h>                       // alarm

static void sleep_ms(int ms) {
    const struct timespec time = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&time, NULL);
}

// What jobs write to. There is no lock, since every reader has waited.
struct trace {
    int64_t runs;
    int64_t out_of_order;
    bool held; // read and written atomically: the first job waits while it is set
};
struct step {
    struct trace *trace;
    int64_t number;
};
static void run_step(void *arguments) {
    const struct step *const step = (const struct step *)arguments;
    step->trace->out_of_order += step->trace->runs != step->number;
    step->trace->runs++;
}
static void run_held(void *arguments) {
    const struct step *const step = (const struct step *)arguments;
    while (__atomic_load_n(&step->trace->held, __ATOMIC_ACQUIRE))
        sleep_ms(1);
}
static uint64_t add_step(struct work_thread *w, struct trace *trace, int64_t number) {
    struct step step = {trace, number};
    const uint64_t ticket = work_thread_add(w, run_step, &step, sizeof step, "step");
    step.number = -1; // the job has a copy
    return ticket;
}

static void jobs_run_in_order(void **state) {
    struct trace trace = {0};
    struct work_thread *const w = work_thread_start(NULL);
    work_thread_wait(w, 0);
    uint64_t ticket = 0;
    for (int i = 0; i < 5000; i++) { // several times around the queue
        const uint64_t next = add_step(w, &trace, i);
        assert_int_equal(next, ticket + 1);
        ticket = next;
    }
    work_thread_wait(w, ticket);
    assert_int_equal(trace.runs, 5000);
    assert_int_equal(trace.out_of_order, 0);
    work_thread_wait(w, 1);
    work_thread_wait(w, 0);
    work_thread_stop(w);
}

// Fills one of several buffers in a job while the others are read, as buckets are used.
static void fill(void *arguments) {
    const struct step *const step = (const struct step *)arguments;
    *(int64_t *)step->trace = step->number;
}
static void a_wait_shows_what_the_job_wrote(void **state) {
    int64_t buffers[4] = {0};
    uint64_t tickets[4] = {0};
    struct work_thread *const w = work_thread_start(NULL);
    for (int64_t i = 0; i < 2000; i++) {
        work_thread_wait(w, tickets[i % 4]);
        assert_int_equal(buffers[i % 4], i < 4 ? 0 : i - 4);
        buffers[i % 4] = -1;
        const struct step step = {(struct trace *)&buffers[i % 4], i};
        tickets[i % 4] = work_thread_add(w, fill, &step, sizeof step, "fill");
    }
    work_thread_stop(w);
    assert_int_equal(buffers[3], 1999); // stop runs what is left
}

struct adder {
    struct work_thread *w;
    struct trace *trace;
    int64_t added; // added to atomically
};
static void *add_until_full(void *argument) {
    struct adder *const adder = (struct adder *)argument;
    for (int64_t i = 0; i < WORK_JOBS + 100; i++) {
        add_step(adder->w, adder->trace, i);
        __atomic_add_fetch(&adder->added, 1, __ATOMIC_RELEASE);
    }
    return NULL;
}
static void add_blocks_while_the_queue_is_full(void **state) {
    struct trace trace = {0, 0, true};
    const struct step held = {&trace, 0};
    pthread_t thread;
    struct work_thread *const w = work_thread_start(NULL);
    struct adder adder = {w, &trace, 0};
    work_thread_add(w, run_held, &held, sizeof held, "held");
    assert_int_equal(pthread_create(&thread, NULL, add_until_full, &adder), 0);
    for (int ms = 0; ms < 10000 && __atomic_load_n(&adder.added, __ATOMIC_ACQUIRE) < WORK_JOBS - 1; ms++)
        sleep_ms(1);
    sleep_ms(50);
    assert_int_equal(__atomic_load_n(&adder.added, __ATOMIC_ACQUIRE), WORK_JOBS - 1); // and the held one
    __atomic_store_n(&trace.held, false, __ATOMIC_RELEASE);
    assert_int_equal(pthread_join(thread, NULL), 0);
    work_thread_wait(w, 1 + WORK_JOBS + 100);
    assert_int_equal(trace.runs, WORK_JOBS + 100);
    assert_int_equal(trace.out_of_order, 0);
    work_thread_stop(w);
}

static void run_sleep(void *arguments) { sleep_ms(*(int *)arguments); }
static void times_are_counted(void **state) {
    const int ms = 60;
    struct work_thread *const w = work_thread_start(NULL);
    const uint64_t first = work_thread_add(w, run_sleep, &ms, sizeof ms, "first");
    work_thread_wait(w, first);
    assert_true(w->busy_s >= 1e-3 * ms);
    assert_true(w->waited_s > 0 && w->waited_s <= w->busy_s + 1);
    const uint64_t second = work_thread_add(w, run_sleep, &ms, sizeof ms, "second");
    work_thread_wait(w, second);
    const double waited_s = w->waited_s;
    work_thread_wait(w, first);
    work_thread_wait(w, second);
    assert_true(w->waited_s == waited_s); // there was nothing to wait for: all was hidden
    assert_true(w->busy_s >= 2e-3 * ms);
    work_thread_stop(w);
}

static void run_signal_mask(void *arguments) { pthread_sigmask(SIG_SETMASK, NULL, *(sigset_t **)arguments); }
static void no_signal_arrives_in_the_thread(void **state) {
    sigset_t mask, *const mask_pointer = &mask;
    struct work_thread *const w = work_thread_start(NULL);
    work_thread_wait(w, work_thread_add(w, run_signal_mask, &mask_pointer, sizeof mask_pointer, "mask"));
    assert_true(sigismember(&mask, SIGTERM) && sigismember(&mask, SIGUSR1) && sigismember(&mask, SIGINT));
    work_thread_stop(w);
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    assert_false(sigismember(&mask, SIGTERM));
}

// The part of the control connections' state that the watch over the ranks is told; the connections themselves are not
// needed.
struct watched {
    struct control control;
    int64_t wrong;
};
static void look_at_control(void *arguments) {
    struct watched *const watched = *(struct watched **)arguments;
    const struct control *const c = &watched->control;
    const char *const name = c->names[c->collectives_done % CONTROL_IN_FLIGHT];
    watched->wrong += c->collectives_begun != c->collectives_done + 1;
    watched->wrong += strcmp(name, c->collectives_done % 2 ? "odd" : "even") != 0;
}
static void jobs_are_announced_to_the_watch(void **state) {
    struct watched *const watched = (struct watched *)calloc(1, sizeof *watched);
    assert_non_null(watched);
    watched->control.ranks = 2;
    pthread_mutex_init(&watched->control.mutex, NULL);
    struct work_thread *const w = work_thread_start(&watched->control);
    for (int i = 0; i < 10; i++) {
        char name[8]; // the caller's: the job has a copy
        snprintf(name, sizeof name, "%s", i % 2 ? "odd" : "even");
        work_thread_add(w, look_at_control, &watched, sizeof watched, name);
    }
    work_thread_stop(w);
    assert_int_equal(watched->wrong, 0);
    assert_int_equal(watched->control.collectives_begun, 10);
    assert_int_equal(watched->control.collectives_done, 10);
    pthread_mutex_destroy(&watched->control.mutex);
    free(watched);
}

int main(void) {
    alarm(60); // a wait that never ends is a failure
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(jobs_run_in_order),
        cmocka_unit_test(a_wait_shows_what_the_job_wrote),
        cmocka_unit_test(add_blocks_while_the_queue_is_full),
        cmocka_unit_test(times_are_counted),
        cmocka_unit_test(no_signal_arrives_in_the_thread),
        cmocka_unit_test(jobs_are_announced_to_the_watch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
