// The ranks of a job, one process per GPU or socket: their connections, and agreement between them. There are two kinds
// of connections. Control (control.h): small exchanges between all ranks, and the watch for ranks that are lost or
// late. Data (exchange.h): the host's collectives, opened where the device's library has none.
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
// Finds this process's rank and opens the control connections of several ranks, each of which calls it. secret_file: as
// in launch_read_secret. timeout_s: as in control_open. Returns NULL, or what is wrong, in `error`.
const char *parallel_open(struct parallel *p, const char *rendezvous, const char *secret_file, double timeout_s,
                          struct error_text *error);
// Opens the data connections of several ranks and starts p->work; each rank calls it. Returns NULL or the problem.
const char *parallel_open_exchange(struct parallel *p, enum exchange_kind kind, struct error_text *error);
// Runs the work that waits, closes all connections and ends MPI; returns when all ranks have called it.
void parallel_close(struct parallel *p);

// Returns the largest `value` of any rank; every rank calls it. what: for messages. p NULL: returns `value`.
int parallel_largest(struct parallel *p, int value, const char *what);
// Waits, without a timeout, until all ranks have called it: one may write a large file. p NULL: returns at once.
void parallel_barrier(struct parallel *p, const char *what);
enum { PARALLEL_MAX_TEXT = 64 << 20 };
// Gives rank 0's *bytes of text to all; every rank calls it, p not NULL. Returns a copy that ends with a 0 byte, which
// the caller frees; sets *bytes on other ranks, whose `text` is not read. More than PARALLEL_MAX_TEXT end the job.
// what: the text's name in messages. patient: without a timeout.
char *parallel_share_text(struct parallel *p, const char *text, uint64_t *bytes, const char *what, bool patient);
// Ends the job, printing both, where a line of a rank's text is not rank 0's. Every rank calls it. p NULL: no effect.
void parallel_check_same(struct parallel *p, const char *text, const char *what);
__END_DECLS
