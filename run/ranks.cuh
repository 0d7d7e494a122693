// What a run of several ranks adds: shares of threads and memory, connections, checks that all ranks hold the same data
// and parameters, and requests to save or stop, which reach one rank and are followed by all.
#pragma once
#include "kernels/collectives.cuh"     // enum collectives_kind
#include "run/planned_gpu.cuh"         // planned_gpu_bytes
#include "run/run.cuh"                 // struct run
#include "runtime/files/file_read.h"   // open_regular, read_exactly
#include "runtime/files/hash.h"        // hash64
#include "runtime/machine/cpu_quota.h" // cpu_quota
#include "runtime/net/parallel.h"      // parallel_check_same
#include <omp.h>                       // omp_get_num_procs, omp_get_thread_limit
#include <string.h>                    // strsignal
#include <unistd.h>                    // sysconf

// ---- start-up ----

// The number of threads for this rank: one for each CPU that it is bound to or, if unbound, a share of the machine's
// CPUs. No more than a share of the CPUs that a container grants: the kernel would pause more threads again and again.
static int threads_of_rank(const struct run *r) {
    const int mine = omp_get_num_procs(), all = (int)sysconf(_SC_NPROCESSORS_ONLN), granted = cpu_quota();
    const int sharing = r->parallel ? r->parallel->launch.local_ranks : 1;
    const int cores = mine == all ? mine / sharing : mine, share = granted > 0 ? granted / sharing : cores;
    const int threads = cores < share ? cores : share;
    return threads > 0 ? threads : 1;
}
// The number of threads that --threads asks for or, without it, threads_of_rank's. Except with --plan, OMP_THREAD_LIMIT
// caps it, and ends the program if --threads is larger.
static int threads_to_take(const struct run *r) {
    const struct config *c = r->config;
    const int threads = c->device.threads > 0 ? c->device.threads : threads_of_rank(r), most = omp_get_thread_limit();
    if (threads <= most || c->memory.plan)
        return threads;
    if (c->device.threads > 0)
        fail("--threads %d: OMP_THREAD_LIMIT in the environment allows %d; lower the one or raise the other", threads,
             most);
    return most;
}
// Returns the bytes that this rank may take of the device's memory, of the host's, and of both if they are one;
// SIZE_MAX: no limit. They are what is free (a share of the host's), but within budgets. With --plan only budgets
// count; for auto without one, --plan-gpu's memory is the device's.
static struct fit_limits limits_of(struct run *r) {
    const struct config *c = r->config;
    const int sharing = r->parallel ? r->parallel->launch.local_ranks : 1;
    struct fit_limits limits = {SIZE_MAX, SIZE_MAX, SIZE_MAX};
    if (!c->memory.plan) {
        limits.host = host_available_bytes(sharing);
        limits.device = DEVICE_MEMORY_IS_HOSTS ? limits.host : device_available_bytes(&r->dev);
        limits.both = DEVICE_MEMORY_IS_HOSTS ? limits.host : SIZE_MAX;
    }
    if (*c->memory.plan_gpu && c->recompute.memory_budget == 0 &&
        (c->recompute.recompute_granularity == RECOMPUTE_AUTO || r->chosen.count > 0))
        limits.device = planned_gpu_bytes(c);
    if (c->recompute.memory_budget > 0 && (size_t)c->recompute.memory_budget < limits.device)
        limits.device = (size_t)c->recompute.memory_budget;
    if (c->states.host_memory_budget > 0 && (size_t)c->states.host_memory_budget < limits.host)
        limits.host = (size_t)c->states.host_memory_budget;
    return limits;
}

// Sets the bytes of each memory that reports compare a plan with: its budget or, without one for the device,
// --plan-gpu's memory; else, with free_here on a CPU, what is free on this machine. SIZE_MAX: not known.
static void budgets_of(const struct run *r, bool free_here, size_t budget[MEMORY_COUNT]) {
    const struct config *c = r->config;
    budget[MEMORY_HOST] = c->states.host_memory_budget > 0 ? (size_t)c->states.host_memory_budget : SIZE_MAX;
    budget[MEMORY_DEVICE] = SIZE_MAX;
    if (c->recompute.memory_budget > 0)
        budget[MEMORY_DEVICE] = (size_t)c->recompute.memory_budget;
    else if (*c->memory.plan_gpu)
        budget[MEMORY_DEVICE] = planned_gpu_bytes(c);
    else if (free_here && !device_is_gpu(&r->dev))
        budget[MEMORY_DEVICE] = host_available_bytes(1);
}

// Returns what COLLECTIVES_HOST sends by: MPI if asked for, or by default in a job that MPI launched; else sockets.
static enum exchange_kind exchange_of(enum config_collectives collectives, const struct launch *launch) {
    switch (collectives) {
    case BY_MPI: return EXCHANGE_MPI;
    case BY_SOCKETS: return EXCHANGE_SOCKETS;
    case BY_NCCL: // between GPUs; their hosts use the default
    case BY_AUTO: return launch->kind == LAUNCH_MPI ? EXCHANGE_MPI : EXCHANGE_SOCKETS;
    }
    __builtin_unreachable();
}

// Opens r->collectives for r->model and sets r->connected, for several ranks, or ends the job. Every rank calls this.
static void connect_ranks(struct run *r) {
    const struct config *c = r->config;
    const enum collectives_kind kind = collectives_kind_of(c, &r->dev);
    struct error_text error;
    if (!r->parallel)
        return;
    if (c->processes.collectives == BY_NCCL && kind != COLLECTIVES_NCCL)
        fail("--collectives nccl is for GPUs, and this run is on the CPU; leave the option out");
    if (kind == COLLECTIVES_HOST) {
        const char *problem =
            parallel_open_exchange(r->parallel, exchange_of(c->processes.collectives, &r->parallel->launch), &error);
        if (problem)
            fail("%s", problem);
    }
    gpt_open_collectives(r->model, &r->collectives, r->parallel, kind);
    r->connected = true;
}

// Returns a hash of a file's first, middle and last 64 KiB. Ends the program where they can't be read.
static uint64_t hash_of_ends(const char *path) {
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
    const uint64_t hash = hash64(data, 3 * BYTES, 0);
    free(data);
    return hash;
}

// Ends the job if ranks' training or validation shards differ in name, length or hash_of_ends. Every rank calls this.
static void check_same_data(struct run *r) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = r->parallel ? open_memstream(&text, &bytes) : NULL;
    if (!r->parallel)
        return;
    if (!out)
        fail("out of memory for the names of data files");
    for (int which = 0; which < 2; which++) {
        struct dataloader *loader = which ? r->val : r->train;
        for (int i = 0; loader && i < dataloader_num_files(loader); i++)
            fprintf(out, "%s, %llu tokens, sample %016llx\n", dataloader_name(loader, i),
                    (unsigned long long)loader->files[i].tokens,
                    (unsigned long long)hash_of_ends(dataloader_path(loader, i)));
    }
    fclose(out);
    parallel_check_same(r->parallel, text, "data files");
    free(text);
}

// ---- during the run ----

static uint64_t hash_of_device_memory(struct gpt *m, const void *memory, size_t bytes) {
    const size_t CHUNK = 16u << 20;
    if (DEVICE_MEMORY_IS_HOSTS)
        return hash64(memory, bytes, 0);
    char *chunk = (char *)host_allocate(CHUNK, m->dev);
    uint64_t hash = 0;
    for (size_t at = 0; at < bytes; at += CHUNK) {
        const size_t n = bytes - at < CHUNK ? bytes - at : CHUNK;
        device_download(chunk, (const char *)memory + at, n, m->dev);
        hash = hash64(chunk, n, hash);
    }
    host_free(chunk);
    return hash;
}

// Returns a hash of this rank's part of a state, on device and host; 0 without such a state. The device must be idle.
static uint64_t hash_of_state(struct gpt *m, enum optimizer_state id) {
    const struct optimizer *o = &m->optimizer;
    const size_t below = state_offset(o, id, o->cut), all = state_offset(o, id, o->elements);
    const uint64_t hash = o->states[id].device ? hash_of_device_memory(m, o->states[id].device, below) : 0;
    return o->states[id].host ? hash64(o->states[id].host, all - below, hash) : hash;
}

// Finds the most frequent of rows (ranks, width); *right = the first rank with it. Returns the first without it, or -1.
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

static const char *const replica_names[] = {"parameters", "frozen parameters", "frozen weights"};
enum { REPLICA_PARAMETERS, REPLICA_FROZEN, REPLICA_STORED, REPLICA_STATES };
// Ends the job where the ranks' replicas of unsharded parameters, stored weights or optimizer state differ in a bit.
// Waits for the updates in flight and the device. Every rank of several calls this.
static void check_replicas(struct run *r) {
    enum { BUFFERS = REPLICA_STATES + STATE_COUNT };
    struct gpt *m = r->model;
    const struct shards *s = &m->zero.shards;
    uint64_t mine[BUFFERS] = {0}, *all = (uint64_t *)calloc((size_t)s->ranks * BUFFERS, sizeof *all);
    if (!all)
        fail("out of memory");
    zero_wait_for_updates(&m->zero);
    device_synchronize(m->dev);
    if (!shards_parameters(s))
        mine[REPLICA_PARAMETERS] = hash_of_device_memory(m, m->zero.params, (size_t)s->flat * sizeof *m->zero.params);
    if (!shards_parameters(s) && m->frozen.params)
        mine[REPLICA_FROZEN] =
            hash_of_device_memory(m, m->frozen.params, (size_t)m->frozen.shards.flat * sizeof *m->frozen.params);
    if (m->table.stored_bytes > 0)
        mine[REPLICA_STORED] = hash_of_device_memory(m, m->stored.memory, (size_t)m->table.stored_bytes);
    for (int id = 0; id < STATE_COUNT; id++)
        if (!optimizer_is_sharded(&m->optimizer))
            mine[REPLICA_STATES + id] = hash_of_state(m, (enum optimizer_state)id);
    control_all_gather(r->parallel->control, all, mine, sizeof mine, "check of the replicas", false);
    int right = 0;
    const int culprit = odd_rank(all, s->ranks, BUFFERS, &right);
    for (int i = 0; i < BUFFERS && culprit >= 0; i++)
        if (all[culprit * BUFFERS + i] != all[right * BUFFERS + i])
            fail("step %d: the %s of rank %d are not those of the other ranks: its memory, its GPU or its network is "
                 "at fault; go on without it from the last checkpoint",
                 r->finished, i < REPLICA_STATES ? replica_names[i] : optimizer_state_rows[i - REPLICA_STATES].name,
                 culprit);
    free(all);
}

static void write_graphs_refusal(struct json *json, const void *why) { json_str(json, "graphs", (const char *)why); }
// Says why `rank` refused a graph, unless a refusal was said before: in the report's row "graphs", which is rank 0's,
// and in log.jsonl. Every rank calls this.
static void say_graphs_refusal(struct run *r, int rank) {
    enum { TEXT = 192 };
    char mine[TEXT], why[TEXT + 32], *all;
    if (r->graphs_reported)
        return;
    r->graphs_reported = true;
    all = (char *)calloc((size_t)r->config->ranks, TEXT);
    if (!all)
        fail("out of memory");
    memset(mine, 0, sizeof mine);
    snprintf(mine, sizeof mine, "%s", graphs_refusal(&r->dev));
    control_all_gather(r->parallel ? r->parallel->control : NULL, all, mine, TEXT, "why no graph is made", false);
    snprintf(why, sizeof why, "%s", all);
    if (rank > 0)
        snprintf(why, sizeof why, "rank %d: %s", rank, all + (size_t)rank * TEXT);
    free(all);
    log_object(&r->log, r->finished, "self_check", write_graphs_refusal, why);
    if (r->config->rank == 0) {
        log_end_line(&r->log);
        log_row("graphs", "none: %s", why);
    }
}

// A request is a sum of these, with REQUEST_SIGNAL times a stopping signal. Time is up if two slowest steps don't fit.
enum { REQUEST_SAVE = 1, REQUEST_NO_GRAPHS = 2, REQUEST_TIME_IS_UP = 4, REQUEST_SIGNAL = 8 };
// Returns what signals and --exit-after ask of this process, a sum of REQUEST_*. Returns each REQUEST_SAVE only once.
static int take_request(struct run *r) {
    return (signals_take_save_request() ? REQUEST_SAVE : 0) |
           (deadline_allows(r->deadline, 2 * r->slowest_step) ? 0 : REQUEST_TIME_IS_UP) |
           signals_stop_requested() * REQUEST_SIGNAL;
}
// Does what `request` asks, which reached `rank`: sets r->save_wanted or r->stopped. Logs why a run stops, or has no
// graphs.
static void grant_request(struct run *r, int request, int rank) {
    const int signal = request / REQUEST_SIGNAL;
    char whom[32] = "";
    if (request & REQUEST_SAVE)
        r->save_wanted = true;
    if (request & REQUEST_NO_GRAPHS)
        say_graphs_refusal(r, rank);
    if (request < REQUEST_TIME_IS_UP || r->stopped)
        return;
    if (r->parallel)
        snprintf(whom, sizeof whom, " (rank %d)", rank);
    log_event(&r->log, "%s%s: the run %s", signal ? strsignal(signal) : "--exit-after", whom,
              config_trains(r->config) ? "is saved and ends" : "ends without a result");
    r->stopped = true;
}
// Grants a single rank's request at once. Of several, hands this rank's to io.request: by the reports of the next step
// to be updated, all ranks grant it together (finish_step).
static void send_request(struct run *r, int request) {
    if (r->parallel)
        r->model->io.request |= request;
    else
        grant_request(r, request, 0);
}
// Takes this rank's requests to save or stop, between steps.
static void look_for_requests(struct run *r) { send_request(r, take_request(r)); }
// Asks all ranks to report that this rank has refused a graph, if it has, until they have reported one.
static void look_for_graphs_refusal(struct run *r) {
    if (*graphs_refusal(&r->dev) && !r->graphs_reported)
        send_request(r, REQUEST_NO_GRAPHS);
}

// Sets, with several ranks, the entry's times and bytes of collectives since the last call; bytes: up to `slot`'s step.
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

// losses (ranks) = each rank's `loss`. Returns the largest stop_asked_here of any rank, or 0. Every rank calls this.
static int share_losses(struct run *r, struct loss_sum *losses, struct loss_sum loss) {
    struct {
        struct loss_sum loss;
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
