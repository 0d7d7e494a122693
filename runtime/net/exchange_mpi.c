// The exchange by MPI. Without HAVE_MPI, opening says that the build has none. A waiting thread tests and sleeps in
// turn: MPI's own waits spin, and take a core from the threads that compute.
#include "runtime/net/exchange_internal.h"
#include "runtime/net/mpi.h" // mpi_error

#ifdef HAVE_MPI
#define OMPI_SKIP_MPICXX 1 // C++ gets the C interface too
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>    // MPI_Isend
#include <sched.h>  // sched_yield
#include <stdlib.h> // calloc
#include <time.h>   // nanosleep

enum {
    MAX_MESSAGE_BYTES = 1 << 30, // MPI's counts are int
    TESTS_BEFORE_SLEEP = 100,    // tests, with a yield after each, before a wait sleeps: some 50 us
    SLEEP_NS = 20000
};

struct exchange_mpi {
    int rank, ranks;
    size_t message_bytes; // the most bytes of a message; a block is sent in several
    MPI_Comm communicator;
    MPI_Request *requests; // (2, ranks - 1): the receives by step, then the sends
    MPI_Status *statuses;
};

// Opens the exchange by MPI, after mpi_open. Every rank calls it. An error frees nothing, since the process then ends.
const char *exchange_mpi_open(struct exchange_mpi **opened, int rank, int ranks, struct error_text *error) {
    struct exchange_mpi *const m = (struct exchange_mpi *)calloc(1, sizeof *m);
    if (!m)
        return error_format(error, "no memory for an exchange between %d ranks", ranks);
    *opened = m;
    m->rank = rank;
    m->ranks = ranks;
    m->message_bytes = MAX_MESSAGE_BYTES;
    int mpi_rank = 0, mpi_ranks = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &mpi_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &mpi_ranks);
    if (rank != mpi_rank || ranks != mpi_ranks)
        return error_format(
            error,
            "MPI knows this process as rank %d of %d, the launcher as rank %d of %d; is the mpirun that "
            "started it of the MPI that it was built with?",
            mpi_rank, mpi_ranks, rank, ranks);
    const int code =
        MPI_Comm_dup(MPI_COMM_WORLD, &m->communicator); // so that no other message is taken for an exchange's
    if (code != MPI_SUCCESS)
        return mpi_error(code, "MPI_Comm_dup", error);
    MPI_Comm_set_errhandler(m->communicator, MPI_ERRORS_RETURN);
    m->requests = (MPI_Request *)malloc(2 * (size_t)ranks * sizeof *m->requests);
    m->statuses = (MPI_Status *)malloc(2 * (size_t)ranks * sizeof *m->statuses);
    return m->requests && m->statuses ? NULL : error_format(error, "no memory for an exchange between %d ranks", ranks);
}

// Frees m and its communicator; every rank calls it, as MPI_Comm_free asks.
void exchange_mpi_close(struct exchange_mpi *m) {
    MPI_Comm_free(&m->communicator);
    free(m->requests);
    free(m->statuses);
    free(m);
}

// Returns the bytes of the nth message (n from 0) of a block of `bytes`; 0 past its end.
static int mpi_message_bytes(const struct exchange_mpi *m, size_t bytes, size_t n) {
    const size_t before = n * m->message_bytes;
    return bytes <= before ? 0 : (int)(bytes - before < m->message_bytes ? bytes - before : m->message_bytes);
}

// Ends the process after the loss of a peer. code: MPI's, returned by `call`.
__attribute__((noreturn)) static void exchange_mpi_end_lost(const struct exchange_mpi *m, int peer, int code,
                                                            const char *call) {
    struct error_text error;
    exchange_end_lost(m->rank, peer, mpi_error(code, call, &error));
}

// Waits until all requests are done, and fills m->statuses. Ends the process where one fails.
static void exchange_mpi_wait(struct exchange_mpi *m) {
    const int steps = m->ranks - 1;
    const struct timespec sleep = {0, SLEEP_NS};
    for (int tests = 0, done = 0;; tests++) {
        const int code = MPI_Testall(2 * steps, m->requests, &done, m->statuses);
        for (int i = 0; code == MPI_ERR_IN_STATUS && i < 2 * steps; i++) {
            const int step = i % steps + 1, failed = m->statuses[i].MPI_ERROR;
            if (failed != MPI_SUCCESS && failed != MPI_ERR_PENDING)
                exchange_mpi_end_lost(
                    m, i < steps ? exchange_from(m->rank, m->ranks, step) : exchange_to(m->rank, m->ranks, step),
                    failed, i < steps ? "a receive" : "a send");
        }
        if (code != MPI_SUCCESS)
            exchange_mpi_end_lost(m, m->rank, code, "MPI_Testall");
        if (done)
            return;
        if (tests < TESTS_BEFORE_SLEEP)
            sched_yield();
        else
            nanosleep(&sleep, NULL);
    }
}

// Ends the process if the nth message of a block of `receive` (ranks) was too short. MPI itself reports too long ones.
static void exchange_mpi_check_lengths(struct exchange_mpi *m, const struct exchange_block *receive, size_t n) {
    for (int step = 1; step < m->ranks; step++) {
        const int peer = exchange_from(m->rank, m->ranks, step),
                  expected = mpi_message_bytes(m, receive[peer].bytes, n);
        int bytes = 0;
        MPI_Get_count(&m->statuses[step - 1], MPI_BYTE, &bytes);
        if (bytes != expected) {
            struct error_text error;
            exchange_end_lost(m->rank, peer,
                              error_format(&error, "it sent %d bytes where %d were expected", bytes, expected));
        }
    }
}

// Sends and receives each block's nth message, and waits. An empty block has a first one too: a peer may expect bytes.
static void exchange_mpi_messages(struct exchange_mpi *m, const struct exchange_block *send,
                                  const struct exchange_block *receive, size_t n) {
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
            exchange_mpi_end_lost(m, from, code, "MPI_Irecv");
        if (to_bytes || n == 0)
            code = MPI_Isend((char *)send[to].data + n * m->message_bytes, to_bytes, MPI_BYTE, to, 0, m->communicator,
                             &m->requests[steps + step - 1]);
        if (code != MPI_SUCCESS)
            exchange_mpi_end_lost(m, to, code, "MPI_Isend");
    }
    exchange_mpi_wait(m);
    exchange_mpi_check_lengths(m, receive, n);
}

void exchange_mpi_all_to_all(struct exchange_mpi *m, const struct exchange_block *send,
                             const struct exchange_block *receive) {
    size_t most = 0;
    for (int r = 0; r < m->ranks; r++) {
        most = r != m->rank && send[r].bytes > most ? send[r].bytes : most;
        most = r != m->rank && receive[r].bytes > most ? receive[r].bytes : most;
    }
    for (size_t n = 0; n == 0 || n * m->message_bytes < most; n++)
        exchange_mpi_messages(m, send, receive, n);
}

#else

const char *exchange_mpi_open(struct exchange_mpi **m, int rank, int ranks, struct error_text *error) {
    return error_format(error, "this build has no MPI; --collectives mpi needs one");
}
void exchange_mpi_all_to_all(struct exchange_mpi *m, const struct exchange_block *send,
                             const struct exchange_block *receive) {}
void exchange_mpi_close(struct exchange_mpi *m) {}

#endif
