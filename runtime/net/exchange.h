// Moves bytes between ranks on the host: each rank sends a block to every other and receives one from each, by MPI or
// over TCP. The host's collectives are built of exchanges. A block of another size than expected ends its receiver.
#pragma once
#include <stddef.h>    // size_t
#include <stdint.h>    // uint64_t
#include <sys/cdefs.h> // __BEGIN_DECLS

#include "runtime/machine/error_text.h" // struct error_text

struct control;

enum exchange_kind { EXCHANGE_MPI, EXCHANGE_SOCKETS };

struct exchange_block {
    void *data;
    size_t bytes;
};

struct exchange {
    enum exchange_kind kind;
    int rank, ranks;
    uint64_t sent_bytes;                   // bytes of blocks sent, without headers
    struct exchange_block *send, *receive; // (ranks) each, for the callers of exchange_all_to_all to fill in
    struct exchange_mpi *mpi;              // by `kind` one of the two is not NULL
    struct exchange_sockets *sockets;
};

__BEGIN_DECLS
// Opens the connections; every rank calls it. TCP's addresses are exchanged over `control`; MPI must be open
// (mpi_open). Returns NULL or the problem, after which the caller ends the process without exchange_close.
const char *exchange_open(struct exchange *x, enum exchange_kind kind, int rank, int ranks, struct control *control,
                          struct error_text *error);
// Sends a block to each other rank and receives one from each; every rank calls it. send, receive (ranks): entry `rank`
// is ignored. Returns when all is done. A lost rank ends the process; a message names it. One caller at a time.
void exchange_all_to_all(struct exchange *x, const struct exchange_block *send, const struct exchange_block *receive);
void exchange_close(struct exchange *x); // by MPI, every rank calls it
__END_DECLS
