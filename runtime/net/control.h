// The control connections: every rank to rank 0, for small exchanges between all ranks, and for the watch over the job.
//
// A thread in each rank owns its connections. What the others do reaches rank 0 as a heartbeat, several times a second,
// and rank 0 ends the job where
//   - a connection closes without a goodbye: that rank died, was killed, or ended itself
//   - a collective, or an exchange that is not patient, is unfinished for longer than the timeout
//   - a rank's heartbeats are missing for longer than the timeout: it is stopped, or its host is gone
// It prints one line that names the rank and what that was in, tells the others, and all end by _exit, since whatever
// they were in may never return. When rank 0 itself ends or falls silent the others notice, and rank 1 prints the line.
// A process that is stopped (SIGSTOP) can't end itself: it does when it goes on, or by the launcher, which kills what
// remains of a job when one of its processes has failed.
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <stdint.h>    // uint64_t
#include <sys/cdefs.h> // __BEGIN_DECLS

#include "runtime/machine/error_text.h" // struct error_text
#include "runtime/net/launch.h"         // struct launch
#include "runtime/net/sockets.h"        // struct socket_address

// A rank's connections. NULL stands for those of a job of one rank: every function takes it and does what one rank
// needs.
struct control;

// What rank 0 tells the others by MPI. The token is the job's own: a process that answers without it is of another job.
struct control_address {
    struct socket_address at;
    uint64_t token;
};

__BEGIN_DECLS
// Rank 0 under MPI, first of all. Gives the address that the other ranks need, and a listening socket for control_open.
// Returns NULL or a text.
const char *control_listen(struct control_address *address, int *listener, struct error_text *error);
// Connects this rank with rank 0 and starts the thread. address, listener: of control_listen, under MPI; NULL and -1
// where the launch says where rank 0 listens. timeout_s: how long a rank may keep the others waiting, at the start too;
// 0: for ever, and five minutes at the start. Where rank 0 gives up the start it says why, and the others end. Returns
// NULL or a text.
const char *control_open(struct control **control, const struct launch *launch, const struct control_address *address,
                         int listener, double timeout_s, struct error_text *error);
// Says goodbye, and returns when all ranks have, so that the end of one is no death to another. Frees c.
void control_close(struct control *c);

// An exchange goes to rank 0 and comes back from there, so none is done before every rank has begun it. One at a time;
// all ranks call the same ones. `what` names it where the job ends in it. A patient one may wait for as long as the
// others live.
//
// all (ranks, bytes): every rank's `mine`, which may be its place in `all`.
void control_all_gather(struct control *c, void *all, const void *mine, size_t bytes, const char *what, bool patient);
// Rank 0's data to all.
void control_broadcast(struct control *c, void *data, size_t bytes, const char *what, bool patient);
void control_barrier(struct control *c, const char *what, bool patient);

// What the watch is told of the data path's collectives: one more begins, one more is done, in order. All ranks begin
// the same ones in the same order. From any thread.
void control_collective_begun(struct control *c, const char *name);
void control_collective_done(struct control *c);
// `poll` is called by the thread before each heartbeat, to look for collectives that are done; NULL: nothing is. When
// this returns the poll before no longer runs, and its context may go.
void control_set_poll(struct control *c, void (*poll)(void *context), void *context);
__END_DECLS
