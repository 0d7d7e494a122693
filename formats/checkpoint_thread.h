// A thread that writes while the training goes on: one job at a time, handed over with all that it needs.
//
// All signals are blocked in it, so that they arrive in the thread that trains, whose system calls they may interrupt.
#pragma once
#include <pthread.h> // pthread_create
#include <signal.h>  // sigfillset
#include <stdbool.h> // bool
#include <string.h>  // memset

#include "runtime/machine/error_text.h" // struct error_text

// Returns NULL or a text, in `error`, like everything that may fail here.
typedef const char *checkpoint_job(void *argument, struct error_text *error);

struct checkpoint_thread {
    checkpoint_job *job; // NULL: none is running, and no result is waiting to be taken
    void *argument;
    bool has_thread; // false: the job has run already, in the caller's thread
    pthread_t thread;
    pthread_mutex_t mutex; // over `done`; the join is what makes the rest visible
    bool done;
    const char *result;
    struct error_text error; // where the job's text lies, until the next start
};

static inline void checkpoint_thread_init(struct checkpoint_thread *worker) {
    memset(worker, 0, sizeof *worker);
    pthread_mutex_init(&worker->mutex, NULL);
}

static void *checkpoint_thread_run(void *argument) {
    struct checkpoint_thread *const worker = (struct checkpoint_thread *)argument;
    worker->result = worker->job(worker->argument, &worker->error);
    pthread_mutex_lock(&worker->mutex);
    worker->done = true;
    pthread_mutex_unlock(&worker->mutex);
    return NULL;
}

// A job is at work.
static bool checkpoint_thread_busy(struct checkpoint_thread *worker) {
    if (!worker->job)
        return false;
    pthread_mutex_lock(&worker->mutex);
    const bool done = worker->done;
    pthread_mutex_unlock(&worker->mutex);
    return !done;
}

// A job has ended, and its result has not been taken: checkpoint_thread_wait gives it at once.
static bool checkpoint_thread_done(struct checkpoint_thread *worker) {
    return worker->job && !checkpoint_thread_busy(worker);
}

// Waits for the job's end and takes its result: NULL, or a text that stays until the next start. NULL if there was none.
static const char *checkpoint_thread_wait(struct checkpoint_thread *worker) {
    if (!worker->job)
        return NULL;
    if (worker->has_thread)
        pthread_join(worker->thread, NULL);
    worker->job = NULL;
    return worker->result;
}

// Starts a job; `argument` is the job's until its result is taken. False, and nothing is started, while there is one
// whose result was not. Where no thread can be made, the job runs here and now: a save that takes the training's time
// is better than none.
static bool checkpoint_thread_start(struct checkpoint_thread *worker, checkpoint_job *job, void *argument) {
    if (worker->job)
        return false;
    worker->job = job;
    worker->argument = argument;
    worker->done = false;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // a new thread has its maker's mask
    worker->has_thread = pthread_create(&worker->thread, NULL, checkpoint_thread_run, worker) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!worker->has_thread)
        checkpoint_thread_run(worker);
    return true;
}

// Waits for what is at work; its result is lost.
static inline void checkpoint_thread_destroy(struct checkpoint_thread *worker) {
    checkpoint_thread_wait(worker);
    pthread_mutex_destroy(&worker->mutex);
}
