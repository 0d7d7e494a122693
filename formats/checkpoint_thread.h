// A thread that writes checkpoints while the training goes on. Of all workers in a process only one has a job at a
// time. All signals are blocked in the thread, so that the training thread receives them. A process that ends by
// exit(), as fail() does, waits up to 120 s for the job that is under way in a thread (runtime/machine/before_exit.h).
#pragma once
#include "runtime/machine/error_text.h" // struct error_text
#include <pthread.h>                    // pthread_t
#include <stdbool.h>                    // bool
#include <sys/cdefs.h>                  // __BEGIN_DECLS

// A job returns NULL, or what went wrong, in `error`.
typedef const char *checkpoint_job(void *argument, struct error_text *error);

struct checkpoint_thread { // used only by checkpoint_thread.c
    checkpoint_job *job;   // NULL: none is running, and no result is waiting to be taken
    void *argument;
    bool has_thread; // false: the job has run already, in the caller's thread
    pthread_t thread;
    pthread_mutex_t mutex; // guards `done`; the join makes the rest visible
    bool done;
    const char *result;
    struct error_text error; // holds the job's text until the next start
};

__BEGIN_DECLS
// Sets up *worker, without a job; checkpoint_thread_destroy ends the use of *worker.
void checkpoint_thread_init(struct checkpoint_thread *worker);
// Starts a job in a thread; if none can be made, runs it. No other worker may have a job, which is not checked. False:
// this worker has a job or a result, and nothing starts. `argument` must stay until the result is taken.
bool checkpoint_thread_start(struct checkpoint_thread *worker, checkpoint_job *job, void *argument);
// Runs a job in the caller's thread and keeps the result. If *worker has a job or a result, only returns false.
bool checkpoint_thread_call(struct checkpoint_thread *worker, checkpoint_job *job, void *argument);
// Whether a job runs; false also where it has ended and its result is waiting.
bool checkpoint_thread_busy(struct checkpoint_thread *worker);
// Whether a job has ended and its result is waiting: checkpoint_thread_wait returns at once.
bool checkpoint_thread_done(struct checkpoint_thread *worker);
// Waits for the job's end and takes its result: NULL, or a text that stays until the next start. NULL without a job.
const char *checkpoint_thread_wait(struct checkpoint_thread *worker);
// Waits for the job's end and drops its result. *worker needs checkpoint_thread_init before it can be used again.
void checkpoint_thread_destroy(struct checkpoint_thread *worker);
__END_DECLS
