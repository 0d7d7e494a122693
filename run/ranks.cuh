// What a run does because it may be one of several ranks: who has which threads and memory, the connections, the checks
// that all ranks are about the same thing, and what asks one of them for a save or an end, which all must do.
#pragma once
#include "kernels/collectives.cuh"   // collectives_open
#include "run/run.cuh"               // struct run
#include "runtime/files/file_read.h" // open_regular, read_exactly
#include "formats/checkpoint.h"      // XXH3_64bits
#include "runtime/net/parallel.h"    // parallel_check_same
#include <omp.h>                     // omp_get_num_procs
#include <string.h>                  // strsignal
#include <unistd.h>                  // sysconf

// ---- start-up ----

// Ranks that are not bound to cores of their own share those of the machine.
static int threads_of_rank(const struct run *r) {
    const int mine = omp_get_num_procs(), all = (int)sysconf(_SC_NPROCESSORS_ONLN);
    const int share = r->parallel && mine == all ? mine / r->parallel->launch.local_ranks : mine;
    return share > 0 ? share : 1;
}
// What this process may take: the host's memory is shared with the ranks beside it.
static size_t available_bytes(struct run *r) {
    const size_t bytes = device_available_bytes(&r->dev);
    return r->parallel && DEVICE_MEMORY_IS_HOSTS ? bytes / (size_t)r->parallel->launch.local_ranks : bytes;
}

static void connect_ranks(struct run *r) {
    const struct config *c = r->config;
    const enum collectives_kind kind = collectives_kind_of(c);
    struct error_text error;
    if (!r->parallel)
        return;
    if (c->collectives == BY_NCCL && kind != COLLECTIVES_NCCL)
        fail("--collectives nccl is for GPUs, and this run is on the CPU; leave the option out");
    if (kind == COLLECTIVES_HOST) {
        const bool by_mpi =
            c->collectives == BY_MPI || (c->collectives != BY_SOCKETS && r->parallel->launch.kind == LAUNCH_MPI);
        const char *problem = parallel_open_exchange(r->parallel, by_mpi ? EXCHANGE_MPI : EXCHANGE_SOCKETS, &error);
        if (problem)
            fail("%s", problem);
    }
    gpt_open_collectives(r->model, &r->collectives, r->parallel, kind);
}
// Connects the ranks, then allocates the model's memory where its plan fits: into what the communication leaves free. From
// here on the ranks work together.
static void allocate_model(struct run *r) {
    connect_ranks(r);
    fit_check(&r->fit, r->model->plan.peak_bytes, available_bytes(r));
    gpt_allocate(r->model);
    if (r->parallel)
        gpt_connect(r->model, &r->collectives);
}

// Of a file's first, middle and last bytes.
static uint64_t sample_hash(const char *path) {
    enum { BYTES = 1 << 16 };
    unsigned char *data = (unsigned char *)calloc(3, BYTES);
    struct error_text error;
    uint64_t bytes = 0;
    int fd;
    if (!data)
        fail("out of memory");
    const char *problem = open_regular(&fd, &bytes, path, "a token shard", &error);
    const uint64_t n = bytes < BYTES ? bytes : (uint64_t)BYTES;
    for (uint64_t i = 0; i < 3 && !problem; i++)
        problem = read_exactly(fd, data + i * BYTES, n, (bytes - n) / 2 * i, path, &error);
    if (problem)
        fail("%s", problem);
    close(fd);
    const uint64_t hash = XXH3_64bits(data, 3 * BYTES);
    free(data);
    return hash;
}

// All ranks must read the same shards: their names, lengths and a sample of their bytes.
static void check_same_data(struct run *r) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = r->parallel ? open_memstream(&text, &bytes) : NULL;
    if (!out)
        return;
    for (int which = 0; which < 2; which++) {
        struct dataloader *loader = which ? r->val : r->train;
        for (int i = 0; loader && i < dataloader_num_files(loader); i++)
            fprintf(out, "%s, %llu tokens, sample %016llx\n", dataloader_name(loader, i),
                    (unsigned long long)loader->files[i].tokens,
                    (unsigned long long)sample_hash(dataloader_path(loader, i)));
    }
    fclose(out);
    parallel_check_same(r->parallel, text, "data files");
    free(text);
}

// ---- during the run ----

// Hash of a buffer in the device's memory.
static uint64_t hash_of(struct gpt *m, const void *memory, size_t bytes) {
    const size_t PIECE = 16u << 20;
    if (DEVICE_MEMORY_IS_HOSTS)
        return XXH3_64bits(memory, bytes);
    char *piece = (char *)host_allocate(PIECE, m->dev);
    uint64_t hash = 0;
    for (size_t at = 0; at < bytes; at += PIECE) {
        const size_t n = bytes - at < PIECE ? bytes - at : PIECE;
        device_download(piece, (const char *)memory + at, n, m->dev);
        hash = XXH3_64bits_withSeed(piece, n, hash);
    }
    host_free(piece);
    return hash;
}

// The rank whose row of hashes is not that of the most, of which `right` is one; -1: they are all the same. Where two rows
// are as frequent, that of the lower rank is right.
static int odd_rank(const uint64_t *rows, int ranks, int width, int *right) {
    int most = 0;
    for (int r = 0; r < ranks; r++) {
        int same = 0;
        for (int k = 0; k < ranks; k++)
            same += memcmp(rows + r * width, rows + k * width, (size_t)width * sizeof *rows) == 0;
        if (same > most) {
            most = same;
            *right = r;
        }
    }
    for (int r = 0; r < ranks; r++)
        if (memcmp(rows + r * width, rows + *right * width, (size_t)width * sizeof *rows) != 0)
            return r;
    return -1;
}

// Ends the run where a rank holds other bits than the others of what all hold.
static void check_replicas(struct run *r) {
    static const char *const names[] = {"parameters", "master weights", "first moments", "second moments"};
    enum { BUFFERS = sizeof names / sizeof *names };
    struct gpt *m = r->model;
    const struct shards *s = &m->shards;
    uint64_t mine[BUFFERS] = {0}, *all = (uint64_t *)calloc((size_t)s->ranks * BUFFERS, sizeof *all);
    if (!all)
        fail("out of memory");
    gpt_settle(m);
    device_synchronize(m->dev);
    if (!shards_parameters(s))
        mine[0] = hash_of(m, m->params, (size_t)s->flat * sizeof *m->params);
    if (!shards_optimizer(s)) {
        mine[1] = m->master ? hash_of(m, m->master, (size_t)s->flat * sizeof *m->master) : 0;
        mine[2] = hash_of(m, m->m, (size_t)s->flat * sizeof *m->m);
        mine[3] = hash_of(m, m->v, (size_t)s->flat * sizeof *m->v);
    }
    control_all_gather(r->parallel->control, all, mine, sizeof mine, "check of the replicas", false);
    int right = 0;
    const int culprit = odd_rank(all, s->ranks, BUFFERS, &right);
    for (int i = 0; i < BUFFERS && culprit >= 0; i++)
        if (all[culprit * BUFFERS + i] != all[right * BUFFERS + i])
            fail("step %d: the %s of rank %d are not those of the other ranks: its memory, its GPU or its network is "
                 "at fault; go on without it from the last checkpoint",
                 r->finished, names[i], culprit);
    free(all);
}

// What asks from outside for a save or an end, as one number: 0 where nothing does. Takes the request for a save.
enum { REQUEST_SAVE = 1, REQUEST_TIME_IS_UP = 2, REQUEST_SIGNAL = 4 }; // the signal's number times that
static int take_request(struct run *r) {
    return (signals_take_save_request() ? REQUEST_SAVE : 0) |
           (deadline_allows(r->deadline, 2 * r->slowest_step) ? 0 : REQUEST_TIME_IS_UP) |
           signals_stop_requested() * REQUEST_SIGNAL;
}
static void grant_request(struct run *r, int request, int rank) {
    const int signal = request / REQUEST_SIGNAL;
    char whom[32] = "";
    if (request & REQUEST_SAVE)
        r->save_wanted = true;
    if (request < REQUEST_TIME_IS_UP || r->stopped)
        return;
    if (r->parallel)
        snprintf(whom, sizeof whom, " (rank %d)", rank);
    log_event(&r->log, "%s%s: the run is saved and ends", signal ? strsignal(signal) : "--exit-after", whom);
    r->stopped = true;
}
// Looks, once a step. Several ranks tell each other in their reports of the step, and so all act after the same one.
static void look_for_requests(struct run *r) {
    if (r->parallel)
        r->model->request |= take_request(r);
    else
        grant_request(r, take_request(r), 0);
}

// What the collectives did since the last finished step.
static void measure_collectives(struct run *r, struct log_step *entry, int slot) {
    double busy_s, waited_s;
    if (!r->parallel)
        return;
    collectives_times(&r->collectives, &busy_s, &waited_s);
    entry->has_comm = true;
    entry->comm_bytes = (int64_t)(r->comm_sent_by_step[slot] - r->comm_sent_bytes);
    entry->comm_ms = 1e3 * (busy_s - r->comm_busy_s);
    entry->comm_exposed_ms = 1e3 * (waited_s - r->comm_waited_s);
    r->comm_busy_s = busy_s;
    r->comm_waited_s = waited_s;
    r->comm_sent_bytes = r->comm_sent_by_step[slot];
}

// The losses of one batch of each rank, and whether a signal asked one of them to stop.
static int share_losses(struct run *r, double *losses, double loss) {
    struct {
        double loss;
        int stop;
    } mine = {loss, stop_asked_here(r)}, *all;
    const size_t ranks = (size_t)r->config->ranks;
    losses[0] = loss;
    if (!r->parallel)
        return mine.stop;
    all = (__typeof__(all))calloc(ranks, sizeof *all);
    if (!all)
        fail("out of memory");
    control_all_gather(r->parallel->control, all, &mine, sizeof mine, "losses of a validation", false);
    int stop = 0;
    for (size_t i = 0; i < ranks; i++) {
        losses[i] = all[i].loss;
        stop = all[i].stop > stop ? all[i].stop : stop;
    }
    free(all);
    return stop;
}
