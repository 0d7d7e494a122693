#include "runtime/net/exchange.h"
#include <stdlib.h> // calloc
#include <string.h> // memset

#include "runtime/net/exchange_internal.h" // exchange_mpi_all_to_all, exchange_sockets_all_to_all

const char *exchange_open(struct exchange *x, enum exchange_kind kind, int rank, int ranks, struct control *control,
                          struct error_text *error) {
    const char *problem = NULL;
    memset(x, 0, sizeof *x);
    x->kind = kind;
    x->rank = rank;
    x->ranks = ranks;
    x->send = (struct exchange_block *)calloc((size_t)ranks, sizeof *x->send);
    x->receive = (struct exchange_block *)calloc((size_t)ranks, sizeof *x->receive);
    if (!x->send || !x->receive)
        problem = error_format(error, "no memory for an exchange between %d ranks", ranks);
    else
        switch (kind) {
        case EXCHANGE_MPI: problem = exchange_mpi_open(&x->mpi, rank, ranks, error); break;
        case EXCHANGE_SOCKETS: problem = exchange_sockets_open(&x->sockets, rank, ranks, control, error); break;
        }
    if (problem) {
        free(x->send);
        free(x->receive);
        x->send = x->receive = NULL;
    }
    return problem;
}

void exchange_all_to_all(struct exchange *x, const struct exchange_block *send, const struct exchange_block *receive) {
    for (int r = 0; r < x->ranks; r++)
        x->sent_bytes += r == x->rank ? 0 : send[r].bytes;
    switch (x->kind) {
    case EXCHANGE_MPI: exchange_mpi_all_to_all(x->mpi, send, receive); break;
    case EXCHANGE_SOCKETS: exchange_sockets_all_to_all(x->sockets, send, receive); break;
    }
}

// Closes the connections and frees x's memory. exchange_open must have returned NULL. By MPI, every rank calls it.
void exchange_close(struct exchange *x) {
    switch (x->kind) {
    case EXCHANGE_MPI: exchange_mpi_close(x->mpi); break;
    case EXCHANGE_SOCKETS: exchange_sockets_close(x->sockets); break;
    }
    free(x->send);
    free(x->receive);
}
