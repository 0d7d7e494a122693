#include "formats/checkpoint_thread.h"
#include <signal.h> // sigfillset
#include <string.h> // memset
#include <time.h>   // nanosleep

#include "runtime/machine/before_exit.h" // before_exit_set

// The thread that runs a job, of all workers of the process. A process that ends by an error waits for it.
static pthread_mutex_t flight_mutex = PTHREAD_MUTEX_INITIALIZER;
static bool in_flight;
static pthread_t flight_thread;

// Whether a thread other than the caller's is running a job of any worker.
static bool is_in_flight(void) {
    pthread_mutex_lock(&flight_mutex);
    const bool waits = in_flight && !pthread_equal(flight_thread, pthread_self());
    pthread_mutex_unlock(&flight_mutex);
    return waits;
}
// Waits until no other thread runs a job, for at most `seconds`. The process's end calls it, by before_exit_set.
static void wait_for_flight(double seconds) {
    const struct timespec pause = {0, 2000000};
    for (int waited = 0; waited * 0.002 < seconds && is_in_flight(); waited++)
        nanosleep(&pause, NULL);
}

void checkpoint_thread_init(struct checkpoint_thread *worker) {
    memset(worker, 0, sizeof *worker);
    pthread_mutex_init(&worker->mutex, NULL);
}

// Runs the job of `argument`, a worker, in the calling thread. Then no job is in flight, and the worker is done.
static void *checkpoint_thread_run(void *argument) {
    struct checkpoint_thread *const worker = (struct checkpoint_thread *)argument;
    worker->result = worker->job(worker->argument, &worker->error);
    pthread_mutex_lock(&flight_mutex);
    in_flight = false;
    pthread_mutex_unlock(&flight_mutex);
    pthread_mutex_lock(&worker->mutex);
    worker->done = true;
    pthread_mutex_unlock(&worker->mutex);
    return NULL;
}

bool checkpoint_thread_busy(struct checkpoint_thread *worker) {
    if (!worker->job)
        return false;
    pthread_mutex_lock(&worker->mutex);
    const bool done = worker->done;
    pthread_mutex_unlock(&worker->mutex);
    return !done;
}

bool checkpoint_thread_done(struct checkpoint_thread *worker) { return worker->job && !checkpoint_thread_busy(worker); }

const char *checkpoint_thread_wait(struct checkpoint_thread *worker) {
    if (!worker->job)
        return NULL;
    if (worker->has_thread)
        pthread_join(worker->thread, NULL);
    worker->job = NULL;
    return worker->result;
}

// Sets the worker's job. False, and nothing is set, while an earlier job runs or its result was not taken.
static bool checkpoint_thread_take(struct checkpoint_thread *worker, checkpoint_job *job, void *argument) {
    if (worker->job)
        return false;
    worker->job = job;
    worker->argument = argument;
    worker->done = worker->has_thread = false;
    return true;
}
bool checkpoint_thread_call(struct checkpoint_thread *worker, checkpoint_job *job, void *argument) {
    if (!checkpoint_thread_take(worker, job, argument))
        return false;
    checkpoint_thread_run(worker);
    return true;
}
bool checkpoint_thread_start(struct checkpoint_thread *worker, checkpoint_job *job, void *argument) {
    if (!checkpoint_thread_take(worker, job, argument))
        return false;
    sigset_t all, before;
    before_exit_set(wait_for_flight);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // a new thread has its maker's mask
    pthread_mutex_lock(&flight_mutex);           // which the thread takes at its end
    worker->has_thread = in_flight = pthread_create(&worker->thread, NULL, checkpoint_thread_run, worker) == 0;
    flight_thread = worker->thread;
    pthread_mutex_unlock(&flight_mutex);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!worker->has_thread)
        checkpoint_thread_run(worker);
    return true;
}

void checkpoint_thread_destroy(struct checkpoint_thread *worker) {
    checkpoint_thread_wait(worker);
    pthread_mutex_destroy(&worker->mutex);
}
