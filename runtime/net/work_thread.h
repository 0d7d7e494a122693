// A thread that runs jobs in the order in which they were added: the cpu target's stream for collectives.
#pragma once
#include <stddef.h>    // size_t
#include <stdint.h>    // uint64_t
#include <sys/cdefs.h> // __BEGIN_DECLS

struct control;
struct work_thread;

enum { WORK_ARGUMENT_BYTES = 128 };     // most bytes of a job's arguments
typedef void work_job(void *arguments); // a copy of what work_thread_add was given

__BEGIN_DECLS
// Starts a thread, which work_thread_stop ends; ends the process if it can't. Tells `control` (NULL for none) when each
// job begins and is done, as a collective. All signals are blocked in it, so that the training thread receives them.
struct work_thread *work_thread_start(struct control *control);
// Adds a job, with a copy of its arguments, and returns its ticket: 1, 2, ... Blocks while 1024 jobs wait or run; a
// step has fewer collectives. More than WORK_ARGUMENT_BYTES of arguments end the process. name: for messages, copied.
uint64_t work_thread_add(struct work_thread *w, work_job *job, const void *arguments, size_t bytes, const char *name);
// Waits until the ticket's job and all before it are done; ticket 0: returns at once.
void work_thread_wait(struct work_thread *w, uint64_t ticket);
// *busy_s = the seconds that finished jobs took since the start; *waited_s = the seconds that work_thread_wait blocked.
void work_thread_times(struct work_thread *w, double *busy_s, double *waited_s);
// Runs the jobs that were added, ends the thread and frees w.
void work_thread_stop(struct work_thread *w);
__END_DECLS
