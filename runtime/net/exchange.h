// Moves bytes between ranks on the host: each rank sends a part to every other and receives one from each, by MPI or by
// sockets. All that data parallelism does on the host is built of it; who sends what to whom is agreed in advance.
#pragma once
#include <stdint.h> // uint64_t
#include <stdlib.h> // calloc
#include <string.h> // memset

#include "runtime/net/exchange_mpi.h"     // exchange_mpi_run
#include "runtime/net/exchange_sockets.h" // exchange_sockets_run

enum exchange_kind { EXCHANGE_MPI, EXCHANGE_SOCKETS };

struct exchange {
    enum exchange_kind kind;
    int rank, ranks;
    uint64_t sent_bytes;                  // of parts; what carries them comes on top
    struct exchange_part *send, *receive; // (ranks) each, for the callers of exchange_run to fill in
    struct exchange_mpi mpi;
    struct exchange_sockets sockets;
};

// All ranks at once. Sockets find each other over the control connections; MPI is open (mpi_open) and needs none.
static inline const char *exchange_open(struct exchange *x, enum exchange_kind kind, int rank, int ranks,
                                        struct control *control, struct error_text *error) {
    memset(x, 0, sizeof *x);
    x->kind = kind;
    x->rank = rank;
    x->ranks = ranks;
    x->send = (struct exchange_part *)calloc((size_t)ranks, sizeof *x->send);
    x->receive = (struct exchange_part *)calloc((size_t)ranks, sizeof *x->receive);
    if (!x->send || !x->receive)
        return error_format(error, "no memory for an exchange between %d ranks", ranks);
    return kind == EXCHANGE_MPI ? exchange_mpi_open(&x->mpi, rank, ranks, error)
                                : exchange_sockets_open(&x->sockets, rank, ranks, control, error);
}

// send and receive are (ranks) each, the own rank's entries are ignored. Returns when all is sent and received. A rank that
// is lost ends the process, with a message that names it. One caller at a time.
static void exchange_run(struct exchange *x, const struct exchange_part *send, const struct exchange_part *receive) {
    for (int r = 0; r < x->ranks; r++)
        x->sent_bytes += r == x->rank ? 0 : send[r].bytes;
    if (x->kind == EXCHANGE_MPI)
        exchange_mpi_run(&x->mpi, send, receive);
    else
        exchange_sockets_run(&x->sockets, send, receive);
}

static inline void exchange_close(struct exchange *x) {
    if (x->kind == EXCHANGE_MPI)
        exchange_mpi_close(&x->mpi);
    else
        exchange_sockets_close(&x->sockets);
    free(x->send);
    free(x->receive);
}
