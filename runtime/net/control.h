// The control connections: every rank to rank 0, for small exchanges between all ranks, and for watching over the job.
// A thread in each rank owns its connections. Each rank reports to rank 0 by heartbeats, several times a second, and
// rank 0 ends the job where
//   - a connection closes without a goodbye: that rank died, was killed, or ended itself
//   - a collective, or an exchange that is not patient, is unfinished for longer than the timeout
//   - a rank's heartbeats are missing for longer than the timeout: it is stopped, or its host is gone
// Rank 0 prints one line, with the rank and the operation that the rank was in, and tells the others. All end by _exit,
// since that operation may never return, with the status of the rank that ended itself by an error, else 1. When rank 0
// ends or falls silent, rank 1 prints the line. A stopped process ends when continued or killed by the launcher.
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <stdint.h>    // uint64_t
#include <sys/cdefs.h> // __BEGIN_DECLS

#include "runtime/machine/error_text.h" // struct error_text
#include "runtime/net/handshake.h"      // struct handshake_key
#include "runtime/net/launch.h"         // struct launch
#include "runtime/net/sockets.h"        // struct socket_address

// A rank's connections. NULL is valid in every function and means a job of one rank.
struct control;

// Rank 0's address, which the others get by MPI, with a key of the job: a process without it is of another job.
struct control_address {
    struct socket_address at;
    unsigned char key[SHA256_BYTES];
};

__BEGIN_DECLS
// Opens rank 0's listener, under MPI. The caller sends *address to all ranks, for control_open, which closes *listener.
const char *control_listen(struct control_address *address, int *listener, struct error_text *error);
// Connects this rank with rank 0 and starts the control thread; every rank calls it. Returns NULL or the problem; ranks
// that have connected exit in here if rank 0 can't start. address: control_listen's under MPI, else NULL, for launch's.
// listener: control_listen's on rank 0 under MPI, else -1. timeout_s: how long a rank may keep the others waiting, also
// to connect; 0: five minutes to connect, then no limit. control_close frees *control, NULL for one rank.
const char *control_open(struct control **control, const struct launch *launch, const struct control_address *address,
                         int listener, double timeout_s, struct error_text *error);
// Returns the job's key, for further handshakes; zeros if c is NULL.
struct handshake_key control_key(const struct control *c);
// Says goodbye, waits until all ranks have, so that no rank's end looks like a failure, and frees c, which may be NULL.
void control_close(struct control *c);

// all (ranks, bytes) = every rank's `mine` (bytes, at most 64 MiB), which may lie at its place in `all`. It passes
// through rank 0, so that no rank is done before every rank has begun. All ranks make the same exchanges, one at a
// time: if `bytes` or `what`, the name in messages, differs, the job ends. patient: the timeout does not apply.
void control_all_gather(struct control *c, void *all, const void *mine, size_t bytes, const char *what, bool patient);
// data (bytes) = rank 0's data. All ranks call it with equal `bytes` and `what`. patient: the timeout does not apply.
void control_broadcast(struct control *c, void *data, size_t bytes, const char *what, bool patient);
void control_barrier(struct control *c, const char *what, bool patient);

// Tells the watch that a collective begins, from any thread, in one order on all ranks. Copies `name`. c may be NULL.
void control_collective_begun(struct control *c, const char *name);
// Tells the watch that the oldest collective is done, from any thread. Does nothing if c is NULL.
void control_collective_done(struct control *c);
// Sets what the control thread calls before each heartbeat, to look for collectives that are done; NULL: nothing. poll
// must neither wait nor call this. On return the former poll no longer runs, and its context may be freed.
void control_set_poll(struct control *c, void (*poll)(void *context), void *context);
__END_DECLS
