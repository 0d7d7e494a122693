// Collectives between the ranks, on memory of the device, as the model sees them: begun here, waited for there, and
// meanwhile the device computes.
//
//   cpu target                the work thread moves the data (runtime/net/host_collectives.h)
//   cuda, COLLECTIVES_NCCL    NCCL on a stream of its own (kernels/collectives_nccl.cuh)
//   cuda, COLLECTIVES_HOST    through the host's memory, nothing overlapped: ranks may share one GPU, for tests
//
// A collective begins when all that was enqueued on the device before it is done. Until collective_wait its buffers are
// its own. Every rank calls the same ones in the same order, none while a graph is recorded, and none at all where there
// is one rank.
#pragma once
#include "kernels/collectives_nccl.cuh"   // struct nccl_queue
#include "kernels/device.cuh"             // struct device
#include "kernels/device_memory.cuh"      // host_allocate, device_download, device_upload
#include "runtime/machine/deadline.h"     // deadline_clock_s
#include "runtime/net/host_collectives.h" // host_reduce_scatter, host_all_gather
#include "runtime/net/parallel.h"         // struct parallel

enum collectives_kind { COLLECTIVES_NCCL, COLLECTIVES_HOST };

// (ranks - 1) parts: what a rank sends of a collective by the direct algorithm, and by the ring.
static inline uint64_t collective_sent_bytes(const struct parallel *parallel, uint64_t part_bytes) {
    return (uint64_t)(parallel->launch.ranks - 1) * part_bytes;
}
static inline uint64_t reduce_scatter_sent_bytes(const struct parallel *parallel, int64_t part, bool bf16) {
    return collective_sent_bytes(parallel, (uint64_t)part * (bf16 ? sizeof(uint16_t) : sizeof(float)));
}

#ifdef TARGET_CUDA

struct collectives {
    struct parallel *parallel;
    enum collectives_kind kind;
    bool bf16;           // gradients on the wire
    uint64_t sent_bytes; // so far
    void *scratch;       // of the device
    struct nccl_queue nccl;
    // COLLECTIVES_HOST: pinned
    char *staging; // a buffer of all ranks
    size_t staging_bytes;
    void *host_scratch;
    double staged_s; // the host was at it, and the device idle
};

// Bytes of the device's memory; `largest_part`: elements of the largest that is reduced.
static size_t collectives_scratch_bytes(int64_t largest_part, int ranks, enum collectives_kind kind, bool wire_bf16) {
    return kind == COLLECTIVES_NCCL && wire_bf16 ? (size_t)largest_part * (size_t)ranks * sizeof(bf16) : 0;
}
// The largest of all collectives, of one rank: elements that are reduced, bytes that are gathered. Once this returns, what
// collectives of the largest and of the smallest size hold of the device's memory is taken.
static void collectives_open(struct collectives *c, struct parallel *parallel, enum collectives_kind kind,
                             bool wire_bf16, int64_t largest_part, size_t largest_gathered_bytes, struct device *dev) {
    const int ranks = parallel->launch.ranks;
    const size_t reduced_bytes = (size_t)largest_part * sizeof(float);
    memset(c, 0, sizeof *c);
    c->parallel = parallel;
    c->kind = kind;
    c->bf16 = wire_bf16;
    if (kind == COLLECTIVES_NCCL) {
        nccl_queue_open(&c->nccl, parallel, largest_part, wire_bf16, largest_gathered_bytes, dev);
        return;
    }
    c->staging_bytes =
        (size_t)ranks * (reduced_bytes > largest_gathered_bytes ? reduced_bytes : largest_gathered_bytes);
    c->staging = (char *)host_allocate(c->staging_bytes, dev);
    c->host_scratch = host_allocate(host_reduce_scatter_scratch_bytes(largest_part, ranks, c->bf16), dev);
}
// Before the first collective: `scratch` of collectives_scratch_bytes, aligned to 16.
static inline void collectives_set_scratch(struct collectives *c, void *scratch) { c->scratch = scratch; }
static void collectives_close(struct collectives *c, struct device *dev) {
    if (c->kind == COLLECTIVES_NCCL)
        nccl_queue_close(&c->nccl);
    host_free(c->staging);
    host_free(c->host_scratch);
    memset(c, 0, sizeof *c);
}

// Through the staging memory, here and now: whoever waits for it finds it done. The last copy reads the staging memory
// after this returns; what next writes there waits for the device's stream first.
static void staged_reduce_scatter(struct collectives *c, float *out, const float *buffer, int64_t part,
                                  const char *name, struct device *dev) {
    const struct launch *launch = &c->parallel->launch;
    const size_t bytes = (size_t)part * sizeof *out;
    float *const staged = (float *)c->staging, *const own = staged + part * launch->rank;
    control_collective_begun(c->parallel->control, name);
    device_download(staged, buffer, bytes * (size_t)launch->ranks, dev);
    const double begin_s = deadline_clock_s();
    host_reduce_scatter(own, staged, part, c->bf16, c->host_scratch, &c->parallel->exchange);
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

// A graph would wait for the same collective each time that it runs, and begin none.
static void collectives_check_recording(const struct device *dev, const char *what) {
    if (dev->recording)
        fail("%s while a graph is recorded: collectives can't be part of one", what);
}
// out (part) = sum over the ranks of buffer[own part]; `out` is that part of `buffer`, or elsewhere. `buffer` (ranks, part) may
// be overwritten.
static uint64_t collective_reduce_scatter(struct collectives *c, float *out, float *buffer, int64_t part,
                                          const char *name, struct device *dev) {
    collectives_check_recording(dev, name);
    c->sent_bytes += reduce_scatter_sent_bytes(c->parallel, part, c->bf16);
    if (c->kind == COLLECTIVES_NCCL)
        return nccl_queue_reduce_scatter(&c->nccl, out, buffer, part, c->bf16 ? (bf16 *)c->scratch : NULL, name, dev);
    staged_reduce_scatter(c, out, buffer, part, name, dev);
    return 0;
}
// buffer (ranks, bytes) = every rank's own; `own` is its place in `buffer`, or elsewhere.
static uint64_t collective_all_gather(struct collectives *c, void *buffer, const void *own, size_t bytes,
                                      const char *name, struct device *dev) {
    collectives_check_recording(dev, name);
    c->sent_bytes += collective_sent_bytes(c->parallel, bytes);
    if (c->kind == COLLECTIVES_NCCL)
        return nccl_queue_all_gather(&c->nccl, buffer, own, bytes, name, dev);
    staged_all_gather(c, buffer, own, bytes, name, dev);
    return 0;
}
// What is enqueued from here on finds the collective's result. 0: nothing to wait for.
static void collective_wait(struct collectives *c, uint64_t ticket, struct device *dev) {
    if (ticket == 0)
        return;
    collectives_check_recording(dev, "a wait for a collective");
    nccl_queue_wait(&c->nccl, ticket, dev);
}
// So far: collectives ran, waiting for other ranks included; the device waited for them. Of those that are done by now, which
// may be some of a step that is enqueued already.
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
    uint64_t last_ticket; // what was begun last
    void *scratch;
};

static size_t collectives_scratch_bytes(int64_t largest_part, int ranks, enum collectives_kind kind, bool wire_bf16) {
    return host_reduce_scatter_scratch_bytes(largest_part, ranks, wire_bf16);
}
static void collectives_open(struct collectives *c, struct parallel *parallel, enum collectives_kind kind,
                             bool wire_bf16, int64_t largest_part, size_t largest_gathered_bytes, struct device *dev) {
    memset(c, 0, sizeof *c);
    c->parallel = parallel;
    c->bf16 = wire_bf16;
}
static inline void collectives_set_scratch(struct collectives *c, void *scratch) { c->scratch = scratch; }
// Ends what is under way: the last step's parameters may be, which nobody waits for.
static void collectives_close(struct collectives *c, struct device *dev) {
    work_thread_wait(c->parallel->work, c->last_ticket);
    memset(c, 0, sizeof *c);
}

struct reduce_scatter_job {
    float *out;
    const float *buffer;
    int64_t part;
    bool bf16;
    void *scratch;
    struct exchange *exchange;
};
static void reduce_scatter_run(void *arguments) {
    const struct reduce_scatter_job *job = (const struct reduce_scatter_job *)arguments;
    host_reduce_scatter(job->out, job->buffer, job->part, job->bf16, job->scratch, job->exchange);
}
static uint64_t collective_reduce_scatter(struct collectives *c, float *out, float *buffer, int64_t part,
                                          const char *name, struct device *dev) {
    const struct reduce_scatter_job job = {out, buffer, part, c->bf16, c->scratch, &c->parallel->exchange};
    c->sent_bytes += reduce_scatter_sent_bytes(c->parallel, part, c->bf16);
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
static void collective_wait(struct collectives *c, uint64_t ticket, struct device *dev) {
    work_thread_wait(c->parallel->work, ticket);
}
static void collectives_times(struct collectives *c, double *busy_s, double *waited_s) {
    work_thread_times(c->parallel->work, busy_s, waited_s);
}

#endif
