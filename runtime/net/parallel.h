// The ranks of a job, one process per GPU or socket. Control connections (control.h): small exchanges of all ranks, and
// the watch for lost or late ones. Data connections (exchange.h): the host's collectives, if the device's library has
// none. Where opening fails, the caller ends the process. `what`: an exchange's name in messages, equal on all ranks.
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
// Sets *p: finds this process's rank and, of several, reads the secret and opens p->control; all ranks call it. Returns
// NULL or the problem. rendezvous, secret_file, timeout_s: as in launch_find, launch_read_secret, control_open.
const char *parallel_open(struct parallel *p, const char *rendezvous, const char *secret_file, double timeout_s,
                          struct error_text *error);
// Opens data connections (MPI's only for LAUNCH_MPI) and starts p->work; all ranks call it. Returns NULL or why not.
const char *parallel_open_exchange(struct parallel *p, enum exchange_kind kind, struct error_text *error);
// Runs the work that waits, closes what was opened, and ends MPI; every rank calls it, once, and waits for the others.
void parallel_close(struct parallel *p);

// Returns the largest `value` of any rank; all ranks call it, within parallel_open's timeout. p NULL: returns `value`.
int parallel_largest(struct parallel *p, int value, const char *what);
// Waits, without a timeout, until all ranks have called it: one may write a large file. p NULL: returns at once.
void parallel_barrier(struct parallel *p, const char *what);
enum { PARALLEL_MAX_TEXT = 64 << 20 };
// Returns, on each rank, a copy of rank 0's *bytes of text, ended with a 0 byte, for the caller to free. Sets *bytes on
// other ranks, whose `text` is not read. More than PARALLEL_MAX_TEXT end the job. p: not NULL. patient: no timeout.
char *parallel_share_text(struct parallel *p, const char *text, uint64_t *bytes, const char *what, bool patient);
// Ends the job, printing both, where a line of a rank's text is not rank 0's; else returns when all have compared. All
// ranks call it. what: a plural, for the message. p NULL: no effect.
void parallel_check_same(struct parallel *p, const char *text, const char *what);
__END_DECLS
