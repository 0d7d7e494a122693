// The ranks of a job: one process a GPU or a socket, which find, agree with and watch each other here.
//
// Two kinds of connections. Control (runtime/net/control.h): small things that all must know, and who is gone or late. Data
// (runtime/net/exchange.h): what is reduced and gathered on the host, opened only where the device's library does not do it.
// With one rank there are neither, and all calls are trivial.
#pragma once
#include "runtime/net/control.h"         // struct control
#include "runtime/machine/error.h"       // fail
#include "runtime/net/exchange.h"        // struct exchange
#include "runtime/net/launch.h"          // struct launch
#include "runtime/machine/work_thread.h" // struct work_thread

struct parallel {
    struct launch launch;
    struct control control;
    struct exchange exchange;
    bool has_exchange;       // and the thread that uses it
    struct work_thread work; // runs what is begun on the host
};

// Under mpirun the ranks learn from MPI where rank 0 listens.
static const char *parallel_find_by_mpi(struct parallel *p, struct error_text *error) {
    int rank, ranks;
    const char *problem = mpi_open(&rank, &ranks, error);
    if (problem)
        return problem;
    if (rank != p->launch.rank || ranks != p->launch.ranks)
        return error_format(
            error,
            "mpirun started rank %d of %d, but its MPI library says %d of %d: mpirun and the library that "
            "train_gpt was built with are not of the same MPI",
            p->launch.rank, p->launch.ranks, rank, ranks);
    if (rank == 0)
        problem = control_listen(&p->control, error);
    struct control_address address;
    memset(&address, 0, sizeof address);
    if (rank == 0 && !problem)
        address = p->control.address;
    if (problem)
        return problem;
    problem = mpi_broadcast(&address, sizeof address, error);
    p->control.address = address;
    return problem;
}

// Who this is, and the control connections to the others. `timeout_s`: how long a rank may keep the others waiting.
static const char *parallel_open(struct parallel *p, const char *rendezvous, double timeout_s,
                                 struct error_text *error) {
    memset(p, 0, sizeof *p);
    const char *problem = launch_find(&p->launch, rendezvous, launch_getenv, error);
    if (problem || p->launch.ranks == 1)
        return problem;
    if (p->launch.kind == LAUNCH_MPI)
        problem = parallel_find_by_mpi(p, error);
    return problem ? problem : control_open(&p->control, &p->launch, timeout_s, error);
}

// The data path on the host, for who needs it.
static const char *parallel_open_exchange(struct parallel *p, enum exchange_kind kind, struct error_text *error) {
    if (kind == EXCHANGE_MPI && p->launch.kind != LAUNCH_MPI)
        return error_format(
            error, "--collectives mpi: the ranks were not started by mpirun; start them so, or leave the option out");
    const char *problem = exchange_open(&p->exchange, kind, p->launch.rank, p->launch.ranks, &p->control, error);
    if (problem)
        return problem;
    p->has_exchange = true;
    work_thread_start(&p->work, &p->control);
    return NULL;
}

static void parallel_close(struct parallel *p) {
    if (p->has_exchange) {
        work_thread_stop(&p->work);
        exchange_close(&p->exchange);
    }
    if (p->launch.ranks > 1)
        control_close(&p->control);
    if (p->launch.kind == LAUNCH_MPI && p->launch.ranks > 1)
        mpi_close();
}

// ---- agreement; p may be NULL, where there is one rank ----

// The largest value that a rank has.
static int parallel_largest(struct parallel *p, int value, const char *what) {
    if (!p)
        return value;
    int *all = (int *)malloc((size_t)p->launch.ranks * sizeof *all), largest = value;
    if (!all)
        fail("out of memory");
    control_all_gather(&p->control, all, &value, sizeof value, what, false);
    for (int r = 0; r < p->launch.ranks; r++)
        largest = all[r] > largest ? all[r] : largest;
    free(all);
    return largest;
}

// Waits until all ranks are here, however long one of them writes or reads a file.
static void parallel_barrier(struct parallel *p, const char *what) {
    if (p)
        control_barrier(&p->control, what, true);
}

// Ends the job where a line of this rank's text is another than rank 0's. Texts, rather than their hashes, so that the line
// can be named.
static void parallel_check_same(struct parallel *p, const char *text, const char *what) {
    if (!p)
        return;
    uint64_t bytes = strlen(text) + 1;
    control_broadcast(&p->control, &bytes, sizeof bytes, what, false);
    char *first = (char *)malloc(bytes);
    if (!first)
        fail("out of memory");
    if (p->launch.rank == 0)
        memcpy(first, text, bytes);
    control_broadcast(&p->control, first, bytes, what, false);
    const char *a = text, *b = first;
    while (*a || *b) {
        const int of_a = (int)strcspn(a, "\n"), of_b = (int)strcspn(b, "\n");
        if (of_a != of_b || memcmp(a, b, (size_t)of_a) != 0)
            fail("the %s differ between ranks: here '%.*s', on rank 0 '%.*s'; start all ranks with the same", what,
                 of_a, a, of_b, b);
        a += of_a + (a[of_a] == '\n');
        b += of_b + (b[of_b] == '\n');
    }
    free(first);
    parallel_barrier(p, what); // nobody goes on before all have compared
}
