// Collectives between the ranks, on memory of the device: asynchronous, so that the device computes meanwhile.
//
//   cpu target                the work thread moves the data (runtime/net/host_collectives.h)
//   cuda, COLLECTIVES_NCCL    NCCL on a stream of its own (kernels/collectives_nccl.cuh)
//   cuda, COLLECTIVES_HOST    through the host's memory, nothing overlapped: ranks may share one GPU, for tests
//
// A collective begins when all work that was enqueued on the device before it is done. Until collective_wait nobody
// else may touch its buffers. Every rank begins the same collectives in the same order, none while a graph is recorded,
// and none with one rank. Recorded segments are cut where a collective begins and at each collective_wait.
#pragma once
#include "kernels/collectives_nccl.cuh"   // struct nccl_queue
#include "kernels/device.cuh"             // struct device
#include "kernels/device_memory.cuh"      // host_allocate, device_download, device_upload
#include "kernels/device_queue.cuh"       // device_synchronize
#include "kernels/transfers.cuh"          // transfer_wait
#include "kernels/work_segments.cuh"      // segments_cut
#include "runtime/machine/deadline.h"     // deadline_clock_s
#include "runtime/net/host_collectives.h" // host_reduce_scatter, host_all_gather, host_exchange
#include "runtime/net/parallel.h"         // struct parallel
#include <stdlib.h>                       // calloc

enum collectives_kind { COLLECTIVES_NCCL, COLLECTIVES_HOST };

struct collectives; // one per process; its members are the target's own

// Returns the bytes of scratch that collectives need in the device's memory; it may be 0. largest_shard: elements of a
// rank's shard in the largest reduce-scatter. wire_bf16: gradients travel as bf16. largest_exchanged_bytes: of the
// messages that a rank sends and receives in the largest exchange, the same on all ranks; 0 without exchanges.
static size_t collectives_scratch_bytes(int64_t largest_shard, int ranks, enum collectives_kind kind, bool wire_bf16,
                                        size_t largest_exchanged_bytes, const struct device *dev);
// Opens the collectives between the ranks of `parallel`; every rank calls this, then collectives_set_scratch. All kinds
// but NCCL need parallel_open_exchange first. *c must not move until closed. largest_gathered_bytes is a rank's part of
// the largest all-gather, other sizes are collectives_scratch_bytes's. On return NCCL has its memory.
static void collectives_open(struct collectives *c, struct parallel *parallel, enum collectives_kind kind,
                             bool wire_bf16, int64_t largest_shard, size_t largest_gathered_bytes,
                             size_t largest_exchanged_bytes, struct device *dev);
// Sets `scratch`, collectives_scratch_bytes of the device's memory, aligned to 16, before the first collective.
static inline void collectives_set_scratch(struct collectives *c, void *scratch);
// Waits for the collectives in flight, such as the last step's all-gathers; closes and zeroes *c, which must be open.
static void collectives_close(struct collectives *c, struct device *dev);

// Begins a reduce-scatter; every rank calls this. out (shard) = the sum over the ranks of this rank's row of buffer
// (ranks, shard); with wire_bf16 terms and sum are rounded to bf16. `out` may be that row, and the rest of `buffer`
// becomes scratch. Copies `name`, for messages. Returns a ticket for collective_wait, 0 if the work is done already.
static uint64_t collective_reduce_scatter(struct collectives *c, float *out, float *buffer, int64_t shard,
                                          const char *name, struct device *dev);
// Begins an all-gather; every rank calls this. buffer (ranks, bytes) = every rank's `own` (bytes), which may be its row
// of `buffer`. Copies `name`, for messages. Returns a ticket for collective_wait, 0 if the work is done already.
static uint64_t collective_all_gather(struct collectives *c, void *buffer, const void *own, size_t bytes,
                                      const char *name, struct device *dev);
// Begins an exchange of messages in the device's memory; every rank calls this, even with empty lists. The i-th message
// that rank a sends to rank b, or to itself, becomes the i-th that b receives from a, of as many bytes. Messages do not
// overlap, and have largest_exchanged_bytes at most in all. Copies lists and name. Returns a ticket, 0 if done already.
static uint64_t collective_exchange(struct collectives *c, const struct exchange_message *sends, int num_sends,
                                    const struct exchange_message *receives, int num_receives, const char *name,
                                    struct device *dev);
// Makes the collectives that begin from here on wait for a transfer to the device. The device itself goes on, where
// collectives run beside it. `transfer` is the ticket, not 0; the caller still calls transfer_wait for it.
static void collectives_begin_after(struct collectives *c, struct transfers *t, uint64_t transfer, struct device *dev);
// Makes the work that is enqueued from here on wait for the ticket's collective; the cpu target waits at once. Ticket 0
// waits for nothing. Any ticket cuts recorded segments. While a graph is recorded, all but 0 end the program.
static void collective_wait(struct collectives *c, uint64_t ticket, struct device *dev);

// Sets *busy_s to the seconds so far in which collectives ran, their waits for other ranks included, and *waited_s to
// the seconds in which the device waited for them. Only finished collectives count, maybe of a step just enqueued.
static void collectives_times(struct collectives *c, double *busy_s, double *waited_s);

// Returns the bytes that each rank sends in a reduce-scatter or an all-gather of shards of shard_bytes.
static inline uint64_t collective_sent_bytes(const struct parallel *parallel, uint64_t shard_bytes) {
    return (uint64_t)(parallel->launch.ranks - 1) * shard_bytes;
}
// Returns the bytes that this rank sends to other ranks in an exchange of sends (count).
static inline uint64_t exchange_sent_bytes(const struct parallel *parallel, const struct exchange_message *sends,
                                           int count) {
    uint64_t bytes = 0;
    for (int i = 0; i < count; i++)
        bytes += sends[i].rank == parallel->launch.rank ? 0 : sends[i].bytes;
    return bytes;
}
// Returns the bytes that each rank sends in a reduce-scatter. shard: the elements of one rank's part.
static inline uint64_t reduce_scatter_sent_bytes(const struct parallel *parallel, int64_t shard, bool bf16) {
    return collective_sent_bytes(parallel, (uint64_t)shard * (bf16 ? sizeof(uint16_t) : sizeof(float)));
}

static inline size_t gpu_collectives_scratch_bytes(int64_t largest_shard, int ranks, enum collectives_kind kind,
                                                   bool wire_bf16) {
    return kind == COLLECTIVES_NCCL && wire_bf16 ? (size_t)largest_shard * (size_t)ranks * sizeof(bf16) : 0;
}

#ifdef TARGET_CUDA

struct collectives {
    struct parallel *parallel;
    enum collectives_kind kind;
    bool bf16;           // gradients on the wire
    uint64_t sent_bytes; // so far
    void *scratch;       // in the device's memory
    struct nccl_queue nccl;
    // Only of COLLECTIVES_HOST, in the host's memory, pinned.
    char *staging; // the buffer of a collective, all ranks' shards
    size_t staging_bytes;
    void *host_scratch;
    double staged_s; // in which the host moved data and the device was idle
};

static size_t collectives_scratch_bytes(int64_t largest_shard, int ranks, enum collectives_kind kind, bool wire_bf16,
                                        size_t largest_exchanged_bytes, const struct device *dev) {
    return gpu_collectives_scratch_bytes(largest_shard, ranks, kind, wire_bf16);
}
static void collectives_open(struct collectives *c, struct parallel *parallel, enum collectives_kind kind,
                             bool wire_bf16, int64_t largest_shard, size_t largest_gathered_bytes,
                             size_t largest_exchanged_bytes, struct device *dev) {
    const int ranks = parallel->launch.ranks;
    const size_t reduced_bytes = (size_t)largest_shard * sizeof(float);
    memset(c, 0, sizeof *c);
    c->parallel = parallel;
    c->kind = kind;
    c->bf16 = wire_bf16;
    if (kind == COLLECTIVES_NCCL) {
        nccl_queue_open(&c->nccl, parallel, largest_shard, wire_bf16, largest_gathered_bytes,
                        largest_exchanged_bytes > 0, dev);
        return;
    }
    const size_t scratch_bytes = host_reduce_scatter_scratch_bytes(largest_shard, ranks, c->bf16);
    c->staging_bytes =
        (size_t)ranks * (reduced_bytes > largest_gathered_bytes ? reduced_bytes : largest_gathered_bytes);
    if (c->staging_bytes < largest_exchanged_bytes)
        c->staging_bytes = largest_exchanged_bytes;
    c->staging = (char *)host_allocate(c->staging_bytes, dev);
    c->host_scratch =
        host_allocate(scratch_bytes > largest_exchanged_bytes ? scratch_bytes : largest_exchanged_bytes, dev);
}
static inline void collectives_set_scratch(struct collectives *c, void *scratch) { c->scratch = scratch; }
static void collectives_close(struct collectives *c, struct device *dev) {
    if (c->kind == COLLECTIVES_NCCL)
        nccl_queue_close(&c->nccl);
    host_free(c->staging);
    host_free(c->host_scratch);
    memset(c, 0, sizeof *c);
}

// Collectives through the staging memory are synchronous: collective_wait finds them done. Their last copy reads the
// staging memory after they return; the next collective's download waits for it on the device's stream.

static void staged_reduce_scatter(struct collectives *c, float *out, const float *buffer, int64_t shard,
                                  const char *name, struct device *dev) {
    const struct launch *launch = &c->parallel->launch;
    const size_t bytes = (size_t)shard * sizeof *out;
    float *const staged = (float *)c->staging, *const own = staged + shard * launch->rank;
    control_collective_begun(c->parallel->control, name);
    device_download(staged, buffer, bytes * (size_t)launch->ranks, dev);
    const double begin_s = deadline_clock_s();
    host_reduce_scatter(own, staged, shard, c->bf16, c->host_scratch, &c->parallel->exchange);
    device_upload(out, own, bytes, dev);
    c->staged_s += deadline_clock_s() - begin_s;
    control_collective_done(c->parallel->control);
}
static void staged_all_gather(struct collectives *c, void *buffer, const void *own, size_t bytes, const char *name,
                              struct device *dev) {
    const struct launch *launch = &c->parallel->launch;
    char *const staged_own = c->staging + bytes * (size_t)launch->rank;
    control_collective_begun(c->parallel->control, name);
    device_download(staged_own, own, bytes, dev);
    const double begin_s = deadline_clock_s();
    host_all_gather(c->staging, staged_own, bytes, &c->parallel->exchange);
    device_upload(buffer, c->staging, bytes * (size_t)launch->ranks, dev);
    c->staged_s += deadline_clock_s() - begin_s;
    control_collective_done(c->parallel->control);
}

// Returns a copy of list (count), to be freed, with unfilled data in staging memory from *at on, and advances *at.
static struct exchange_message *staged_messages(const struct exchange_message *list, int count, char **at) {
    struct exchange_message *staged = (struct exchange_message *)calloc((size_t)count + 1, sizeof *staged);
    if (!staged)
        fail("no memory for the messages of an exchange");
    for (int i = 0; i < count; i++) {
        staged[i] = list[i];
        staged[i].data = *at;
        *at += list[i].bytes;
    }
    return staged;
}
// Does collective_exchange by way of the staging memory; ends the program where that is too small for the messages.
static void staged_exchange(struct collectives *c, const struct exchange_message *sends, int num_sends,
                            const struct exchange_message *receives, int num_receives, const char *name,
                            struct device *dev) {
    char *at = c->staging;
    struct exchange_message *const out = staged_messages(sends, num_sends, &at), *const in = staged_messages(
                                                                                     receives, num_receives, &at);
    if ((size_t)(at - c->staging) > c->staging_bytes)
        fail("%s: %zu bytes of messages, of at most %zu", name, (size_t)(at - c->staging), c->staging_bytes);
    control_collective_begun(c->parallel->control, name);
    for (int i = 0; i < num_sends; i++)
        device_download_begin(out[i].data, sends[i].data, sends[i].bytes, dev);
    device_synchronize(dev);
    const double begin_s = deadline_clock_s();
    host_exchange(out, num_sends, in, num_receives, c->host_scratch, &c->parallel->exchange);
    for (int i = 0; i < num_receives; i++)
        device_upload(receives[i].data, in[i].data, in[i].bytes, dev);
    c->staged_s += deadline_clock_s() - begin_s;
    control_collective_done(c->parallel->control);
    free(out);
    free(in);
}

// Cuts recorded segments (segments_cut), before anything of a collective is enqueued. Ends the program while a graph is
// recorded: each of its runs would wait for the same collective, and begin none. `what` is for the message.
static void collectives_leave_graph(struct device *dev, const char *what) {
    segments_cut(dev);
    if (dev->recording)
        fail("%s while a graph is recorded: collectives can't be part of one", what);
}
static uint64_t collective_reduce_scatter(struct collectives *c, float *out, float *buffer, int64_t shard,
                                          const char *name, struct device *dev) {
    collectives_leave_graph(dev, name);
    c->sent_bytes += reduce_scatter_sent_bytes(c->parallel, shard, c->bf16);
    if (c->kind == COLLECTIVES_NCCL)
        return nccl_queue_reduce_scatter(&c->nccl, out, buffer, shard, c->bf16 ? (bf16 *)c->scratch : NULL, name, dev);
    staged_reduce_scatter(c, out, buffer, shard, name, dev);
    return 0;
}
static uint64_t collective_all_gather(struct collectives *c, void *buffer, const void *own, size_t bytes,
                                      const char *name, struct device *dev) {
    collectives_leave_graph(dev, name);
    c->sent_bytes += collective_sent_bytes(c->parallel, bytes);
    if (c->kind == COLLECTIVES_NCCL)
        return nccl_queue_all_gather(&c->nccl, buffer, own, bytes, name, dev);
    staged_all_gather(c, buffer, own, bytes, name, dev);
    return 0;
}
static uint64_t collective_exchange(struct collectives *c, const struct exchange_message *sends, int num_sends,
                                    const struct exchange_message *receives, int num_receives, const char *name,
                                    struct device *dev) {
    collectives_leave_graph(dev, name);
    c->sent_bytes += exchange_sent_bytes(c->parallel, sends, num_sends);
    if (c->kind == COLLECTIVES_NCCL)
        return nccl_queue_exchange(&c->nccl, sends, num_sends, receives, num_receives, name, dev);
    staged_exchange(c, sends, num_sends, receives, num_receives, name, dev);
    return 0;
}
static void collective_wait(struct collectives *c, uint64_t ticket, struct device *dev) {
    segments_cut(dev);
    if (ticket == 0)
        return;
    collectives_leave_graph(dev, "a wait for a collective");
    nccl_queue_wait(&c->nccl, ticket, dev);
}
static void collectives_begin_after(struct collectives *c, struct transfers *t, uint64_t transfer, struct device *dev) {
    if (c->kind == COLLECTIVES_NCCL)
        nccl_queue_begin_after(&c->nccl, transfer_event(t, transfer));
    else
        transfer_wait(t, transfer, dev);
}
static void collectives_times(struct collectives *c, double *busy_s, double *waited_s) {
    *busy_s = *waited_s = c->staged_s;
    if (c->kind == COLLECTIVES_NCCL)
        nccl_queue_times(&c->nccl, busy_s, waited_s);
}

#else

struct collectives {
    struct parallel *parallel;
    bool bf16;            // gradients on the wire
    uint64_t sent_bytes;  // so far
    uint64_t last_ticket; // of the collective that was begun last
    void *scratch;
    size_t exchanged_bytes; // of a rank's messages in the largest exchange
};

static size_t collectives_scratch_bytes(int64_t largest_shard, int ranks, enum collectives_kind kind, bool wire_bf16,
                                        size_t largest_exchanged_bytes, const struct device *dev) {
    if (device_is_gpu(dev))
        return gpu_collectives_scratch_bytes(largest_shard, ranks, kind, wire_bf16);
    const size_t reduced_bytes = host_reduce_scatter_scratch_bytes(largest_shard, ranks, wire_bf16);
    return reduced_bytes > largest_exchanged_bytes ? reduced_bytes : largest_exchanged_bytes;
}
static void collectives_open(struct collectives *c, struct parallel *parallel, enum collectives_kind kind,
                             bool wire_bf16, int64_t largest_shard, size_t largest_gathered_bytes,
                             size_t largest_exchanged_bytes, struct device *dev) {
    memset(c, 0, sizeof *c);
    c->parallel = parallel;
    c->bf16 = wire_bf16;
    c->exchanged_bytes = largest_exchanged_bytes;
}
static inline void collectives_set_scratch(struct collectives *c, void *scratch) { c->scratch = scratch; }
static void collectives_close(struct collectives *c, struct device *dev) {
    work_thread_wait(c->parallel->work, c->last_ticket);
    memset(c, 0, sizeof *c);
}

struct reduce_scatter_job {
    float *out;
    const float *buffer;
    int64_t shard;
    bool bf16;
    void *scratch;
    struct exchange *exchange;
};
static void reduce_scatter_run(void *arguments) {
    const struct reduce_scatter_job *job = (const struct reduce_scatter_job *)arguments;
    host_reduce_scatter(job->out, job->buffer, job->shard, job->bf16, job->scratch, job->exchange);
}
static uint64_t collective_reduce_scatter(struct collectives *c, float *out, float *buffer, int64_t shard,
                                          const char *name, struct device *dev) {
    const struct reduce_scatter_job job = {out, buffer, shard, c->bf16, c->scratch, &c->parallel->exchange};
    c->sent_bytes += reduce_scatter_sent_bytes(c->parallel, shard, c->bf16);
    return c->last_ticket = work_thread_add(c->parallel->work, reduce_scatter_run, &job, sizeof job, name);
}

struct all_gather_job {
    void *buffer;
    const void *own;
    size_t bytes;
    struct exchange *exchange;
};
static void all_gather_run(void *arguments) {
    const struct all_gather_job *job = (const struct all_gather_job *)arguments;
    host_all_gather(job->buffer, job->own, job->bytes, job->exchange);
}
static uint64_t collective_all_gather(struct collectives *c, void *buffer, const void *own, size_t bytes,
                                      const char *name, struct device *dev) {
    const struct all_gather_job job = {buffer, own, bytes, &c->parallel->exchange};
    c->sent_bytes += collective_sent_bytes(c->parallel, bytes);
    return c->last_ticket = work_thread_add(c->parallel->work, all_gather_run, &job, sizeof job, name);
}
struct exchange_job {
    struct exchange_message *messages; // the job's copy of both lists: the sends, then the receives
    int num_sends, num_receives;
    void *scratch;
    struct exchange *exchange;
};
static void exchange_job_run(void *arguments) {
    const struct exchange_job *job = (const struct exchange_job *)arguments;
    host_exchange(job->messages, job->num_sends, job->messages + job->num_sends, job->num_receives, job->scratch,
                  job->exchange);
    free(job->messages);
}
static uint64_t collective_exchange(struct collectives *c, const struct exchange_message *sends, int num_sends,
                                    const struct exchange_message *receives, int num_receives, const char *name,
                                    struct device *dev) {
    const size_t count = (size_t)num_sends + (size_t)num_receives;
    struct exchange_message *messages = (struct exchange_message *)calloc(count + 1, sizeof *messages);
    const struct exchange_job job = {messages, num_sends, num_receives, c->scratch, &c->parallel->exchange};
    if (!messages)
        fail("no memory for the messages of an exchange");
    size_t bytes = 0;
    for (size_t i = 0; i < count; i++) {
        messages[i] = i < (size_t)num_sends ? sends[i] : receives[i - (size_t)num_sends];
        bytes += messages[i].bytes;
    }
    if (bytes > c->exchanged_bytes)
        fail("%s: %zu bytes of messages, of at most %zu", name, bytes, c->exchanged_bytes);
    c->sent_bytes += exchange_sent_bytes(c->parallel, sends, num_sends);
    return c->last_ticket = work_thread_add(c->parallel->work, exchange_job_run, &job, sizeof job, name);
}
static void collective_wait(struct collectives *c, uint64_t ticket, struct device *dev) {
    work_thread_wait(c->parallel->work, ticket);
}
// Makes the copies up to this transfer now. The work thread does not wait for an imitated bus; only the device does.
static void collectives_begin_after(struct collectives *c, struct transfers *t, uint64_t transfer, struct device *dev) {
    transfers_copy_until(t, transfer_direction_of(transfer), transfer_number_of(transfer));
}
static void collectives_times(struct collectives *c, double *busy_s, double *waited_s) {
    work_thread_times(c->parallel->work, busy_s, waited_s);
}

#endif
