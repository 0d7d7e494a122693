#include "runtime/net/work_thread.h"
#include <pthread.h> // pthread_mutex_lock
#include <stdbool.h> // bool
#include <stdio.h>   // snprintf
#include <stdlib.h>  // calloc
#include <string.h>  // memcpy, strerror

#include "runtime/machine/deadline.h" // deadline_clock_s
#include "runtime/machine/error.h"    // fail
#include "runtime/machine/signals.h"  // signals_start_thread
#include "runtime/net/control.h"      // control_collective_begun

enum {
    WORK_JOBS = 1024, // most jobs that wait or run
    WORK_NAME_BYTES = 64
};

struct work_entry {
    union {
        unsigned char bytes[WORK_ARGUMENT_BYTES];
        double alignment_double;
        void *alignment_pointer;
    } arguments;
    work_job *job;
    char name[WORK_NAME_BYTES];
};

struct work_thread {
    struct control *control;    // told of jobs as collectives; NULL: none
    struct work_entry *entries; // (WORK_JOBS) ring: ticket t is at (t - 1) % WORK_JOBS until it is done
    pthread_t thread;
    pthread_mutex_t mutex; // guards what follows
    pthread_cond_t has_job, job_done;
    uint64_t added, done; // jobs so far
    bool stop;
    double busy_s, waited_s; // as of work_thread_times
};

// Runs all jobs in order, without the mutex, until work_thread_stop is called and none waits. argument: a work_thread.
static void *run_jobs(void *argument) {
    struct work_thread *const w = (struct work_thread *)argument;
    pthread_mutex_lock(&w->mutex);
    for (;;) {
        while (w->done == w->added && !w->stop)
            pthread_cond_wait(&w->has_job, &w->mutex);
        if (w->done == w->added)
            break;
        struct work_entry *const entry = &w->entries[w->done % WORK_JOBS];
        pthread_mutex_unlock(&w->mutex);
        const double begun_s = deadline_clock_s();
        control_collective_begun(w->control, entry->name);
        entry->job(&entry->arguments);
        control_collective_done(w->control);
        pthread_mutex_lock(&w->mutex);
        w->busy_s += deadline_clock_s() - begun_s;
        w->done++;
        pthread_cond_broadcast(&w->job_done);
    }
    pthread_mutex_unlock(&w->mutex);
    return NULL;
}

struct work_thread *work_thread_start(struct control *control) {
    struct work_thread *const w = (struct work_thread *)calloc(1, sizeof *w);
    if (w) {
        w->control = control;
        w->entries = (struct work_entry *)calloc(WORK_JOBS, sizeof *w->entries);
    }
    if (!w || !w->entries)
        fail("no memory for the queue of collectives");
    pthread_mutex_init(&w->mutex, NULL);
    pthread_cond_init(&w->has_job, NULL);
    pthread_cond_init(&w->job_done, NULL);
    const int failed = signals_start_thread(&w->thread, run_jobs, w);
    if (failed)
        fail("can't start the thread of the collectives: %s", strerror(failed));
    return w;
}

void work_thread_times(struct work_thread *w, double *busy_s, double *waited_s) {
    pthread_mutex_lock(&w->mutex);
    *busy_s = w->busy_s;
    *waited_s = w->waited_s;
    pthread_mutex_unlock(&w->mutex);
}

uint64_t work_thread_add(struct work_thread *w, work_job *job, const void *arguments, size_t bytes, const char *name) {
    if (bytes > WORK_ARGUMENT_BYTES)
        fail("'%s' has %zu bytes of arguments, a job takes %d", name, bytes, (int)WORK_ARGUMENT_BYTES);
    pthread_mutex_lock(&w->mutex);
    while (w->added - w->done == WORK_JOBS)
        pthread_cond_wait(&w->job_done, &w->mutex);
    struct work_entry *const entry = &w->entries[w->added % WORK_JOBS];
    entry->job = job;
    if (bytes)
        memcpy(entry->arguments.bytes, arguments, bytes);
    snprintf(entry->name, sizeof entry->name, "%s", name);
    const uint64_t ticket = ++w->added;
    pthread_cond_signal(&w->has_job);
    pthread_mutex_unlock(&w->mutex);
    return ticket;
}

void work_thread_wait(struct work_thread *w, uint64_t ticket) {
    pthread_mutex_lock(&w->mutex);
    if (w->done < ticket) {
        const double begun_s = deadline_clock_s();
        while (w->done < ticket)
            pthread_cond_wait(&w->job_done, &w->mutex);
        w->waited_s += deadline_clock_s() - begun_s;
    }
    pthread_mutex_unlock(&w->mutex);
}

void work_thread_stop(struct work_thread *w) {
    pthread_mutex_lock(&w->mutex);
    w->stop = true;
    pthread_cond_signal(&w->has_job);
    pthread_mutex_unlock(&w->mutex);
    pthread_join(w->thread, NULL);
    pthread_cond_destroy(&w->job_done);
    pthread_cond_destroy(&w->has_job);
    pthread_mutex_destroy(&w->mutex);
    free(w->entries);
    free(w);
}
