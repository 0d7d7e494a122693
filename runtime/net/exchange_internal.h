// The two implementations of an exchange, and what they share. exchange_*_open return NULL or the problem, in `error`.
#pragma once
#include "runtime/net/exchange.h" // struct exchange_block

// Returns the rank to which this one sends in `step`, 1 to ranks - 1. No two ranks send to the same one in a step.
static inline int exchange_to(int rank, int ranks, int step) { return (rank + step) % ranks; }
static inline int exchange_from(int rank, int ranks, int step) { return (rank + ranks - step) % ranks; }

__BEGIN_DECLS
// Ends the process after the loss of a peer, and prints the reason, `what`. Waits a second first: the control thread,
// which mostly knows more, may end it with a better message. Uses _exit, since exit() may wait for threads and locks.
void exchange_end_lost(int rank, int peer, const char *what) __attribute__((noreturn));

const char *exchange_mpi_open(struct exchange_mpi **m, int rank, int ranks, struct error_text *error);
void exchange_mpi_all_to_all(struct exchange_mpi *m, const struct exchange_block *send,
                             const struct exchange_block *receive);
void exchange_mpi_close(struct exchange_mpi *m);

const char *exchange_sockets_open(struct exchange_sockets **s, int rank, int ranks, struct control *control,
                                  struct error_text *error);
void exchange_sockets_all_to_all(struct exchange_sockets *s, const struct exchange_block *send,
                                 const struct exchange_block *receive);
void exchange_sockets_close(struct exchange_sockets *s);
__END_DECLS
