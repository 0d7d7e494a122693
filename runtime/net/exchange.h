// Moves bytes between ranks on the host: each rank sends a block to every other and receives one from each, by MPI or
// over TCP. All that data parallelism does on the host is built of it; who sends what to whom is agreed in advance.
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
    uint64_t sent_bytes;                  // of blocks; what carries them comes on top
    struct exchange_block *send, *receive; // (ranks) each, for the callers of exchange_run to fill in
    struct exchange_mpi *mpi;             // one of these two is there
    struct exchange_sockets *sockets;
};

__BEGIN_DECLS
// All ranks at once. TCP's addresses are exchanged over `control`; MPI is open (mpi_open) and needs none. Returns NULL
// or a text.
const char *exchange_open(struct exchange *x, enum exchange_kind kind, int rank, int ranks, struct control *control,
                          struct error_text *error);
// The blocks to and from each rank, (ranks) each; the own rank's entries are ignored. Returns when all is sent and
// received. A rank that is lost ends the process, with a message that names it. One caller at a time.
void exchange_run(struct exchange *x, const struct exchange_block *send, const struct exchange_block *receive);
void exchange_close(struct exchange *x);
__END_DECLS
