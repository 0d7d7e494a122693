// MPI as this program uses it: started and ended with the process, a broadcast for the start, and the exchange. Without
// HAVE_MPI all are here too, and opening says that there is none.
//
// Calls come from one thread at a time, so MPI_THREAD_SERIALIZED is enough. A thread that waits sleeps between two looks:
// MPI's own waits spin, and take a core from the threads that compute.
#pragma once
#include <stdint.h> // uint64_t
#include <string.h> // memset

#include "runtime/machine/error_text.h" // struct error_text
#include "runtime/net/exchange_part.h"  // struct exchange_part, exchange_lost

#ifdef HAVE_MPI
#define OMPI_SKIP_MPICXX 1 // C++ gets the C interface too
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>    // MPI_Isend
#include <sched.h>  // sched_yield
#include <stdlib.h> // malloc
#include <time.h>   // nanosleep

enum {
    MPI_MESSAGE_BYTES = 1 << 30, // at most, since counts are int
    MPI_LOOKS_AWAKE = 100,       // yielding only, before a wait sleeps: some 50 us
    MPI_SLEEP_NS = 20000
};

static const char *mpi_error(int code, const char *call, struct error_text *error) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, text, &length);
    return error_format(error, "%s: %s", call, text);
}

// Before any other call; the rank and ranks are those of the mpirun that started the process, or 0 of 1.
static inline const char *mpi_open(int *rank, int *ranks, struct error_text *error) {
    int provided = 0;
    const int code = MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided);
    if (code != MPI_SUCCESS)
        return mpi_error(code, "MPI_Init_thread", error);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    if (provided < MPI_THREAD_SERIALIZED)
        return error_format(error, "this MPI can't be called from several threads, which needs MPI_THREAD_SERIALIZED");
    MPI_Comm_rank(MPI_COMM_WORLD, rank);
    MPI_Comm_size(MPI_COMM_WORLD, ranks);
    return NULL;
}

// From rank 0 to all, at the start; bytes fit an int.
static inline const char *mpi_broadcast(void *data, size_t bytes, struct error_text *error) {
    const int code = MPI_Bcast(data, (int)bytes, MPI_BYTE, 0, MPI_COMM_WORLD);
    return code == MPI_SUCCESS ? NULL : mpi_error(code, "MPI_Bcast", error);
}

// All ranks end together here.
static inline void mpi_close(void) { MPI_Finalize(); }

struct exchange_mpi {
    int rank, ranks;
    size_t message_bytes; // a part is sent in messages of at most so many
    MPI_Comm communicator;
    MPI_Request *requests; // (2, ranks - 1): the receives by step, then the sends
    MPI_Status *statuses;
};

static const char *exchange_mpi_open(struct exchange_mpi *m, int rank, int ranks, struct error_text *error) {
    memset(m, 0, sizeof *m);
    m->rank = rank;
    m->ranks = ranks;
    m->message_bytes = MPI_MESSAGE_BYTES;
    int mpi_rank = 0, mpi_ranks = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &mpi_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &mpi_ranks);
    if (rank != mpi_rank || ranks != mpi_ranks)
        return error_format(
            error,
            "MPI knows this process as rank %d of %d, the launcher as rank %d of %d; is the mpirun that "
            "started it of the MPI that it was built with?",
            mpi_rank, mpi_ranks, rank, ranks);
    const int code = MPI_Comm_dup(MPI_COMM_WORLD, &m->communicator); // no other message is taken for one of these
    if (code != MPI_SUCCESS)
        return mpi_error(code, "MPI_Comm_dup", error);
    MPI_Comm_set_errhandler(m->communicator, MPI_ERRORS_RETURN);
    m->requests = (MPI_Request *)malloc(2 * (size_t)ranks * sizeof *m->requests);
    m->statuses = (MPI_Status *)malloc(2 * (size_t)ranks * sizeof *m->statuses);
    return m->requests && m->statuses ? NULL : error_format(error, "no memory for an exchange between %d ranks", ranks);
}

static void exchange_mpi_close(struct exchange_mpi *m) {
    MPI_Comm_free(&m->communicator);
    free(m->requests);
    free(m->statuses);
}

// The bytes of a part's nth message; 0 past its end.
static int mpi_message_bytes(const struct exchange_mpi *m, size_t bytes, size_t n) {
    const size_t before = n * m->message_bytes;
    return bytes <= before ? 0 : (int)(bytes - before < m->message_bytes ? bytes - before : m->message_bytes);
}

__attribute__((noreturn)) static void exchange_mpi_lost(const struct exchange_mpi *m, int peer, int code,
                                                        const char *call) {
    struct error_text error;
    exchange_lost(m->rank, peer, mpi_error(code, call, &error));
}

// Returns when all requests are done, or not at all.
static void exchange_mpi_wait(struct exchange_mpi *m) {
    const int steps = m->ranks - 1;
    const struct timespec sleep = {0, MPI_SLEEP_NS};
    for (int looks = 0, done = 0;; looks++) {
        const int code = MPI_Testall(2 * steps, m->requests, &done, m->statuses);
        for (int i = 0; code == MPI_ERR_IN_STATUS && i < 2 * steps; i++) {
            const int step = i % steps + 1, failed = m->statuses[i].MPI_ERROR;
            if (failed != MPI_SUCCESS && failed != MPI_ERR_PENDING)
                exchange_mpi_lost(
                    m, i < steps ? exchange_from(m->rank, m->ranks, step) : exchange_to(m->rank, m->ranks, step),
                    failed, i < steps ? "a receive" : "a send");
        }
        if (code != MPI_SUCCESS)
            exchange_mpi_lost(m, m->rank, code, "MPI_Testall");
        if (done)
            return;
        if (looks < MPI_LOOKS_AWAKE)
            sched_yield();
        else
            nanosleep(&sleep, NULL);
    }
}

// A longer message is MPI's error; a shorter one is found here.
static void exchange_mpi_check_lengths(struct exchange_mpi *m, const struct exchange_part *receive, size_t n) {
    for (int step = 1; step < m->ranks; step++) {
        const int peer = exchange_from(m->rank, m->ranks, step),
                  expected = mpi_message_bytes(m, receive[peer].bytes, n);
        int bytes = 0;
        MPI_Get_count(&m->statuses[step - 1], MPI_BYTE, &bytes);
        if (bytes != expected) {
            struct error_text error;
            exchange_lost(m->rank, peer,
                          error_format(&error, "it sent %d bytes where %d were expected", bytes, expected));
        }
    }
}

// The nth messages of all parts. The first goes out for an empty part too: who sends what must agree on all ranks.
static void exchange_mpi_messages(struct exchange_mpi *m, const struct exchange_part *send,
                                  const struct exchange_part *receive, size_t n) {
    const int steps = m->ranks - 1;
    for (int step = 1; step < m->ranks; step++) {
        const int from = exchange_from(m->rank, m->ranks, step), to = exchange_to(m->rank, m->ranks, step);
        const int from_bytes = mpi_message_bytes(m, receive[from].bytes, n),
                  to_bytes = mpi_message_bytes(m, send[to].bytes, n);
        m->requests[step - 1] = m->requests[steps + step - 1] = MPI_REQUEST_NULL;
        int code = MPI_SUCCESS;
        if (from_bytes || n == 0)
            code = MPI_Irecv((char *)receive[from].data + n * m->message_bytes, from_bytes, MPI_BYTE, from, 0,
                             m->communicator, &m->requests[step - 1]);
        if (code != MPI_SUCCESS)
            exchange_mpi_lost(m, from, code, "MPI_Irecv");
        if (to_bytes || n == 0)
            code = MPI_Isend((char *)send[to].data + n * m->message_bytes, to_bytes, MPI_BYTE, to, 0, m->communicator,
                             &m->requests[steps + step - 1]);
        if (code != MPI_SUCCESS)
            exchange_mpi_lost(m, to, code, "MPI_Isend");
    }
    exchange_mpi_wait(m);
    exchange_mpi_check_lengths(m, receive, n);
}

static void exchange_mpi_run(struct exchange_mpi *m, const struct exchange_part *send,
                             const struct exchange_part *receive) {
    size_t most = 0;
    for (int r = 0; r < m->ranks; r++) {
        most = r != m->rank && send[r].bytes > most ? send[r].bytes : most;
        most = r != m->rank && receive[r].bytes > most ? receive[r].bytes : most;
    }
    for (size_t n = 0; n == 0 || n * m->message_bytes < most; n++)
        exchange_mpi_messages(m, send, receive, n);
}

#else
static inline const char *mpi_open(int *rank, int *ranks, struct error_text *error) {
    return error_format(error,
                        "this build has no MPI; install one (its mpicc) and build again, or start by srun or with "
                        "--rendezvous HOST:PORT");
}
static inline const char *mpi_broadcast(void *data, size_t bytes, struct error_text *error) {
    return error_format(error, "this build has no MPI");
}
static inline void mpi_close(void) {}

struct exchange_mpi {
    int ranks;
};
static const char *exchange_mpi_open(struct exchange_mpi *m, int rank, int ranks, struct error_text *error) {
    return error_format(error, "this build has no MPI; --collectives mpi needs one");
}
static void exchange_mpi_close(struct exchange_mpi *m) {}
static void exchange_mpi_run(struct exchange_mpi *m, const struct exchange_part *send,
                             const struct exchange_part *receive) {}
#endif
