// The ranks of a job: one process a GPU or a socket, which find, agree with and watch each other here.
//
// There are two kinds of connections. Control (control.h): small things that all must know, and who is gone or late.
// Data (exchange.h): what is reduced and gathered on the host, opened only where the device's library does not do it.
#pragma once
#include "runtime/net/control.h"     // struct control
#include "runtime/net/exchange.h"    // struct exchange
#include "runtime/net/launch.h"      // struct launch
#include "runtime/net/work_thread.h" // struct work_thread

struct parallel {
    struct launch launch;
    struct control *control;  // NULL where there is one rank
    struct exchange exchange; // after parallel_open_exchange
    struct work_thread *work; // runs what is begun on the host; NULL before parallel_open_exchange
};

__BEGIN_DECLS
// Who this is, and the control connections to the others. `timeout_s`: as of control_open. Returns NULL or a text.
const char *parallel_open(struct parallel *p, const char *rendezvous, double timeout_s, struct error_text *error);
// The data connections, for a target that needs them. Returns NULL or a text.
const char *parallel_open_exchange(struct parallel *p, enum exchange_kind kind, struct error_text *error);
// Returns when all ranks have called it.
void parallel_close(struct parallel *p);

// Agreement. p: NULL where there is one rank. `what` names it in messages.
// The largest value that a rank has.
int parallel_largest(struct parallel *p, int value, const char *what);
// Waits until all ranks are here, however long one of them writes or reads a file.
void parallel_barrier(struct parallel *p, const char *what);
// Ends the job where a line of this rank's text is another than rank 0's, by a message with both.
void parallel_check_same(struct parallel *p, const char *text, const char *what);
__END_DECLS
