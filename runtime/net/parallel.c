#include "runtime/net/parallel.h"
#include <stdlib.h> // malloc
#include <string.h> // memcmp, strcspn

#include "runtime/machine/error.h" // fail
#include "runtime/net/mpi.h"       // mpi_open

// Starts MPI, whose ranks must equal the launch's. Rank 0 opens *listener; all get its *address. NULL, or the problem.
static const char *parallel_open_mpi(const struct launch *launch, struct control_address *address, int *listener,
                                     struct error_text *error) {
    int rank, ranks;
    const char *problem = mpi_open(&rank, &ranks, error);
    if (problem)
        return problem;
    if (rank != launch->rank || ranks != launch->ranks)
        return error_format(
            error,
            "mpirun started rank %d of %d, but its MPI library says %d of %d: mpirun and the library that "
            "train_gpt was built with are not of the same MPI",
            launch->rank, launch->ranks, rank, ranks);
    memset(address, 0, sizeof *address);
    if (rank == 0)
        problem = control_listen(address, listener, error);
    return problem ? problem : mpi_broadcast(address, sizeof *address, error);
}

const char *parallel_open(struct parallel *p, const char *rendezvous, const char *secret_file, double timeout_s,
                          struct error_text *error) {
    struct control_address address;
    int listener = -1;
    memset(p, 0, sizeof *p);
    const char *problem = launch_find(&p->launch, rendezvous, error);
    if (problem || p->launch.ranks == 1)
        return problem;
    const bool by_mpi = p->launch.kind == LAUNCH_MPI;
    problem = launch_read_secret(&p->launch, secret_file, error);
    if (!problem && by_mpi)
        problem = parallel_open_mpi(&p->launch, &address, &listener, error);
    return problem ? problem
                   : control_open(&p->control, &p->launch, by_mpi ? &address : NULL, listener, timeout_s, error);
}

const char *parallel_open_exchange(struct parallel *p, enum exchange_kind kind, struct error_text *error) {
    if (kind == EXCHANGE_MPI && p->launch.kind != LAUNCH_MPI)
        return error_format(error,
                            "--collectives mpi: the ranks were not started by mpirun%s; start them by mpirun, without "
                            "--rendezvous, or leave the option out",
                            p->launch.kind == LAUNCH_RENDEZVOUS ? " or find each other by --rendezvous" : "");
    const char *problem = exchange_open(&p->exchange, kind, p->launch.rank, p->launch.ranks, p->control, error);
    if (!problem)
        p->work = work_thread_start(p->control);
    return problem;
}

void parallel_close(struct parallel *p) {
    if (p->work) {
        work_thread_stop(p->work);
        exchange_close(&p->exchange);
    }
    control_close(p->control);
    if (p->launch.kind == LAUNCH_MPI && p->launch.ranks > 1)
        mpi_close();
}

int parallel_largest(struct parallel *p, int value, const char *what) {
    if (!p)
        return value;
    int *all = (int *)malloc((size_t)p->launch.ranks * sizeof *all), largest = value;
    if (!all)
        fail("out of memory");
    control_all_gather(p->control, all, &value, sizeof value, what, false);
    for (int r = 0; r < p->launch.ranks; r++)
        largest = all[r] > largest ? all[r] : largest;
    free(all);
    return largest;
}

void parallel_barrier(struct parallel *p, const char *what) {
    if (p)
        control_barrier(p->control, what, true);
}

char *parallel_share_text(struct parallel *p, const char *text, uint64_t *bytes, const char *what, bool patient) {
    control_broadcast(p->control, bytes, sizeof *bytes, what, patient);
    if (*bytes > PARALLEL_MAX_TEXT)
        fail("%s: rank 0 has a text of %llu bytes, of at most %d", what, (unsigned long long)*bytes,
             (int)PARALLEL_MAX_TEXT);
    char *const copy = (char *)calloc(1, *bytes + 1);
    if (!copy)
        fail("out of memory");
    if (p->launch.rank == 0)
        memcpy(copy, text, *bytes);
    control_broadcast(p->control, copy, *bytes, what, patient);
    return copy;
}

void parallel_check_same(struct parallel *p, const char *text, const char *what) {
    if (!p)
        return;
    uint64_t bytes = strlen(text);
    char *const first = parallel_share_text(p, text, &bytes, what, false);
    const char *a = text, *b = first; // rather than hashes, so that the line can be named
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
