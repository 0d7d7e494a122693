// The ranks of a job, one process per GPU or socket. They have control connections (control.h), for small exchanges of
// all ranks and the watch for lost or late ranks, and data connections (exchange.h), for the host's collectives, if the
// device's library has none. If opening fails, the caller ends the process. `what`: an exchange's name in messages.
#pragma once
#include "runtime/net/control.h"     // struct control
#include "runtime/net/exchange.h"    // struct exchange
#include "runtime/net/launch.h"      // struct launch
#include "runtime/net/work_thread.h" // struct work_thread

struct parallel {
    struct launch launch;
    struct control *control;  // NULL where there is one rank
    struct exchange exchange; // after parallel_open_exchange
    struct work_thread *work; // runs the host's collectives; NULL before parallel_open_exchange
};

__BEGIN_DECLS
// Finds this process's rank and, if there are several, reads the secret and opens p->control; all ranks call it.
// Returns NULL or the problem. rendezvous, secret_file, timeout_s: as in launch_find, launch_read_secret, control_open.
const char *parallel_open(struct parallel *p, const char *rendezvous, const char *secret_file, double timeout_s,
                          struct error_text *error);
// Opens the data connections and starts p->work. All ranks call it. EXCHANGE_MPI needs LAUNCH_MPI. NULL or the problem.
const char *parallel_open_exchange(struct parallel *p, enum exchange_kind kind, struct error_text *error);
// Runs the jobs that wait, closes what was opened, and ends MPI. Every rank calls it once and waits for the others.
void parallel_close(struct parallel *p);

// Returns the largest `value` of all ranks, which call it within parallel_open's timeout. p NULL: returns `value`.
int parallel_largest(struct parallel *p, int value, const char *what);
// Waits until all ranks call it, without a timeout, since one may be writing a large file. p NULL: returns at once.
void parallel_barrier(struct parallel *p, const char *what);
enum { PARALLEL_MAX_TEXT = 64 << 20 };
// Returns, on each rank, a copy of rank 0's text (*bytes and a 0 byte), which the caller frees. Other ranks' `text` is
// not read, and their *bytes is set. More than PARALLEL_MAX_TEXT end the job. p: not NULL. patient: no timeout.
char *parallel_share_text(struct parallel *p, const char *text, uint64_t *bytes, const char *what, bool patient);
// Compares each rank's text with rank 0's; all ranks call it. Ends the job where a line differs, and prints the two
// lines; else returns when all ranks have compared. what: a plural noun, for the message. Does nothing if p is NULL.
void parallel_check_same(struct parallel *p, const char *text, const char *what);
__END_DECLS
