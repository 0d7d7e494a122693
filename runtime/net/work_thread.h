// A thread that runs jobs one after another in the order in which they were added: the stream on which the cpu target's
// collectives run while the threads that compute go on.
#pragma once
#include <stddef.h>    // size_t
#include <stdint.h>    // uint64_t
#include <sys/cdefs.h> // __BEGIN_DECLS

struct control;
struct work_thread;

enum { WORK_ARGUMENT_BYTES = 128 };     // at most, of a job's arguments
typedef void work_job(void *arguments); // a copy of what work_thread_add was given

__BEGIN_DECLS
// Ends the process where there is no memory or no thread. `control` (NULL: nobody) is told of each job as a collective
// that begins and is done. All signals are blocked in the thread, so that they arrive in the one that trains.
struct work_thread *work_thread_start(struct control *control);
// Returns the job's ticket: 1, 2, ... Blocks while 1024 jobs wait, more than a step has collectives.
uint64_t work_thread_add(struct work_thread *w, work_job *job, const void *arguments, size_t bytes, const char *name);
// Returns when that job and all before it are done; at once for ticket 0.
void work_thread_wait(struct work_thread *w, uint64_t ticket);
// How long jobs ran so far, and how long work_thread_wait blocked.
void work_thread_times(struct work_thread *w, double *busy_s, double *waited_s);
// Runs what was added, ends the thread and frees w.
void work_thread_stop(struct work_thread *w);
__END_DECLS
