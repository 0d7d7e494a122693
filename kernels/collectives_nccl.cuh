// Collectives by NCCL, on a stream beside the device's: a collective begins when all work enqueued on the device's
// stream by then is done; that stream waits where it needs the result. The host waits for nothing. NCCL never gives up
// on a missing rank: the control thread polls this queue, and tells the others how far it is (runtime/net/control.h).
#pragma once
#include "kernels/device.cuh"             // struct device, cuda_check, LAUNCH
#include "runtime/machine/error.h"        // fail
#include "runtime/net/host_collectives.h" // struct exchange_message
#include "runtime/net/parallel.h"         // struct parallel, control_broadcast

#if defined(TARGET_CUDA) && defined(HAVE_NCCL)
#include "kernels/device_memory.cuh" // device_allocate
#include "kernels/packed.cuh"        // packed_aligned, packed_check
#include "kernels/ptx.cuh"           // pack_bf16x2
#include <nccl.h>                    // ncclReduceScatter, ncclAllGather
#include <pthread.h>                 // pthread_mutex_t
#include <unistd.h>                  // _exit

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 16, 0)
#error "NCCL 2.16, the first one of CUDA 12, or a newer one is needed: NCCL_HOME= names its folder"
#endif

enum { COLLECTIVES_HAVE_NCCL = 1 };
// The largest number of collectives in flight: each has its own events, and with so many the host waits for the oldest.
// A step of llama3-8b at stage 1 begins 1980 (990 buckets of 32 MiB): the host may be half a step ahead of the GPU.
enum { NCCL_EVENTS = 1024 };

struct nccl_queue {
    ncclComm_t comm;
    int rank, ranks;
    struct device device; // the caller's, but for the stream
    int device_index;
    cudaEvent_t ready; // of the device's stream, for which a collective waits
    // Collective n has events n % NCCL_EVENTS. `reached`: the device's stream came to its first wait for it.
    cudaEvent_t started[NCCL_EVENTS], done[NCCL_EVENTS], reached[NCCL_EVENTS];
    struct control *control;
    pthread_mutex_t mutex;            // guards what follows, and recording the events, which the control thread queries
    uint64_t begun, finished;         // collectives so far
    uint64_t waited_for[NCCL_EVENTS]; // the collective that `reached` is of
    double busy_s, waited_s;          // as collectives_times has them
};

static const char *nccl_hint(ncclResult_t status) {
    if (status == ncclInvalidUsage)
        return "each rank needs a GPU of its own: start one for each GPU, or let ranks share one for a test by "
               "--collectives sockets";
    return "NCCL_DEBUG=INFO shows what NCCL tried";
}
// Ends the program if `status` is an error; the message has the call and its place. comm is NULL before there is one.
static void nccl_check_at(ncclResult_t status, ncclComm_t comm, const char *call, const char *file, int line) {
    if (status != ncclSuccess)
        fail("%s:%d: %s: %s: %s; %s", file, line, call, ncclGetErrorString(status), ncclGetLastError(comm),
             nccl_hint(status));
}
#define nccl_check(comm, call) nccl_check_at(call, comm, #call, __FILE__, __LINE__)

// --- What the control thread sees ---------------------------------------------------------------------------------

// Returns the seconds from one event to another: negative where `to` came first, 0 where one has not happened yet.
static double nccl_seconds(cudaEvent_t from, cudaEvent_t to) {
    float milliseconds = 0;
    return cudaEventElapsedTime(&milliseconds, from, to) == cudaSuccess ? 1e-3 * milliseconds : 0;
}
// Adds the times of finished collective n to q's; the caller holds q->mutex. A wait that is not reached yet counts 0 s.
static void nccl_queue_measure(struct nccl_queue *q, uint64_t n) {
    const uint64_t i = n % NCCL_EVENTS;
    q->busy_s += nccl_seconds(q->started[i], q->done[i]);
    if (q->waited_for[i] == n) {
        const double waited_s = nccl_seconds(q->reached[i], q->done[i]);
        q->waited_s += waited_s > 0 ? waited_s : 0;
    }
}
// Returns how many are in flight. Adds newly finished collectives' times to q's, and tells q->control. Locks q->mutex.
static uint64_t nccl_queue_in_flight(struct nccl_queue *q) {
    pthread_mutex_lock(&q->mutex);
    while (q->finished < q->begun && cudaEventQuery(q->done[(q->finished + 1) % NCCL_EVENTS]) == cudaSuccess) {
        nccl_queue_measure(q, ++q->finished);
        control_collective_done(q->control);
    }
    const uint64_t in_flight = q->begun - q->finished;
    pthread_mutex_unlock(&q->mutex);
    return in_flight;
}
// Polls the collectives and NCCL's error, on the control thread. Ends the process where NCCL has failed, which the
// other ranks' control threads notice: its kernels would wait for ever, and with them the thread that trains.
static void nccl_queue_poll(void *argument) {
    struct nccl_queue *const q = (struct nccl_queue *)argument;
    cudaSetDevice(q->device_index); // for this thread, whose queries would otherwise open the first device
    nccl_queue_in_flight(q);
    ncclResult_t error = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(q->comm, &error);
    if (asked == ncclSuccess && (error == ncclSuccess || error == ncclInProgress))
        return;
    // The message does not go through stdio, whose lock the thread that trains may hold.
    dprintf(STDERR_FILENO, "train_gpt: rank %d: NCCL: %s: %s; %s\n", q->rank,
            ncclGetErrorString(asked == ncclSuccess ? error : asked), ncclGetLastError(q->comm), nccl_hint(error));
    _exit(EXIT_FAILURE);
}

// --- Opening and closing ------------------------------------------------------------------------------------------

// The first collectives carry numbers that every rank knows of every other, so that a wrong one is found. In a sum all
// addends but one are 0, and the other is exact in bf16: an addend that is left out, added twice or moved shows.
enum { KNOWN_THREADS = 256 };
// Returns what a rank adds to element i of the sum: 1 + i % 97 on rank (i + 1) % ranks, else 0.
static __host__ __device__ inline float known_addend(int64_t i, int rank, int ranks) {
    return (i + 1) % ranks == rank ? (float)(1 + i % 97) : 0;
}
// Returns byte i of what rank `from` sends to rank `to`, or to all (-1).
static __host__ __device__ inline uint8_t known_byte(int64_t i, int from, int to) {
    return (uint8_t)(131 * i + 29 * from + 11 * to + 7);
}
static __device__ inline void known_store(float *to, float x) { *to = x; }
static __device__ inline void known_store(bf16 *to, float x) { *to = bf16_from_float(x); }
static __device__ inline float known_load(const float *from) { return *from; }
static __device__ inline float known_load(const bf16 *from) { return bf16_to_float(*from); }
template <typename T> static __global__ void known_fill_addends_kernel(T *buffer, int64_t n, int rank, int ranks) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        known_store(&buffer[i], known_addend(i, rank, ranks));
}
// *wrong += the number of wrong elements in shard (n), the sum's elements [begin, begin + n).
template <typename T>
static __global__ void known_check_sums_kernel(unsigned *wrong, const T *shard, int64_t n, int64_t begin, int ranks) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && known_load(&shard[i]) != known_addend(begin + i, (int)((begin + i + 1) % ranks), ranks))
        atomicAdd(wrong, 1u);
}
// Sets each of n bytes to its known_byte; `from` and `to` are ranks, as there, not bounds.
static __global__ void known_fill_bytes_kernel(uint8_t *bytes, int64_t n, int from, int to) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        bytes[i] = known_byte(i, from, to);
}
static __global__ void known_check_bytes_kernel(unsigned *wrong, const uint8_t *bytes, int64_t n, int from, int to) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && bytes[i] != known_byte(i, from, to))
        atomicAdd(wrong, 1u);
}

// Waits for the queue, and ends the program where *wrong, on the device, is not 0: it counts wrong elements.
static void nccl_check_known(struct nccl_queue *q, unsigned *wrong, const char *name, size_t elements) {
    unsigned count = 0;
    cuda_check(cudaMemcpyAsync(&count, wrong, sizeof count, cudaMemcpyDeviceToHost, q->device.stream));
    cuda_check(cudaMemsetAsync(wrong, 0, sizeof count, q->device.stream));
    cuda_check(cudaStreamSynchronize(q->device.stream));
    if (count > 0)
        fail(
            "rank %d: NCCL's %s of %zu elements on known numbers gave %u wrong ones; NCCL_P2P_DISABLE=1, NCCL_ALGO=Ring "
            "or NCCL_PROTO=Simple in the environment may avoid what is broken, and NCCL_DEBUG=INFO shows what NCCL chose",
            q->rank, name, elements, count);
}
// Tests a reduce-scatter of known numbers in buffer (ranks, elements). A wrong sum ends the program. *wrong must be 0.
template <typename T>
static void nccl_warm_up_sum(struct nccl_queue *q, T *buffer, int64_t elements, ncclDataType_t type, unsigned *wrong) {
    const int64_t all = elements * q->ranks, begin = elements * q->rank;
    LAUNCH(&q->device, known_fill_addends_kernel<T>, blocks_for(all, KNOWN_THREADS), KNOWN_THREADS, 0, buffer, all,
           q->rank, q->ranks);
    nccl_check(q->comm,
               ncclReduceScatter(buffer, buffer + begin, (size_t)elements, type, ncclSum, q->comm, q->device.stream));
    LAUNCH(&q->device, known_check_sums_kernel<T>, blocks_for(elements, KNOWN_THREADS), KNOWN_THREADS, 0, wrong,
           (const T *)buffer + begin, elements, begin, q->ranks);
    nccl_check_known(q, wrong, "reduce-scatter", (size_t)elements);
}
// Tests an all-gather of known bytes in buffer (ranks, bytes). A wrong byte ends the program. *wrong must be 0.
static void nccl_warm_up_gather(struct nccl_queue *q, uint8_t *buffer, size_t bytes, unsigned *wrong) {
    uint8_t *const own = buffer + bytes * (size_t)q->rank;
    cuda_check(cudaMemsetAsync(buffer, 0, bytes * (size_t)q->ranks, q->device.stream));
    LAUNCH(&q->device, known_fill_bytes_kernel, blocks_for((int64_t)bytes, KNOWN_THREADS), KNOWN_THREADS, 0, own,
           (int64_t)bytes, q->rank, -1);
    nccl_check(q->comm, ncclAllGather(own, buffer, bytes, ncclUint8, q->comm, q->device.stream));
    for (int r = 0; r < q->ranks; r++)
        LAUNCH(&q->device, known_check_bytes_kernel, blocks_for((int64_t)bytes, KNOWN_THREADS), KNOWN_THREADS, 0, wrong,
               (const uint8_t *)buffer + bytes * (size_t)r, (int64_t)bytes, r, -1);
    nccl_check_known(q, wrong, "all-gather", bytes);
}
// Tests messages of known bytes between every two ranks, which NCCL connects when they first send. Each has 1 byte or,
// with `largest`, as many as fit into buffer (bytes). A wrong byte ends the program. Does nothing below 2 bytes a rank.
static void nccl_warm_up_messages(struct nccl_queue *q, uint8_t *buffer, size_t bytes, bool largest, unsigned *wrong) {
    const size_t of_each = bytes / (2 * (size_t)q->ranks), count = largest && of_each > 0 ? of_each : 1;
    if (of_each == 0)
        return;
    cuda_check(cudaMemsetAsync(buffer, 0, bytes, q->device.stream));
    for (int r = 0; r < q->ranks; r++)
        LAUNCH(&q->device, known_fill_bytes_kernel, blocks_for((int64_t)count, KNOWN_THREADS), KNOWN_THREADS, 0,
               buffer + 2 * of_each * (size_t)r, (int64_t)count, q->rank, r);
    nccl_check(q->comm, ncclGroupStart());
    for (int r = 0; r < q->ranks; r++) {
        uint8_t *const at = buffer + 2 * of_each * (size_t)r;
        if (r == q->rank)
            continue;
        nccl_check(q->comm, ncclSend(at, count, ncclUint8, r, q->comm, q->device.stream));
        nccl_check(q->comm, ncclRecv(at + of_each, count, ncclUint8, r, q->comm, q->device.stream));
    }
    nccl_check(q->comm, ncclGroupEnd());
    for (int r = 0; r < q->ranks; r++)
        if (r != q->rank)
            LAUNCH(&q->device, known_check_bytes_kernel, blocks_for((int64_t)count, KNOWN_THREADS), KNOWN_THREADS, 0,
                   wrong, (const uint8_t *)buffer + 2 * of_each * (size_t)r + of_each, (int64_t)count, r, q->rank);
    nccl_check_known(q, wrong, "exchange", count);
}
// Runs each kind of collective once at its smallest and once at its largest size, so that NCCL connects the ranks and
// allocates its buffers now. NCCL 2.22 and later do so when a collective first takes an algorithm, which its function,
// type and size decide. Every rank calls this. Returns when all are done. A wrong result of the known numbers ends the
// program. Sizes and wire_bf16 are as in collectives_open. With `exchanges` every two ranks send to each other too.
static void nccl_queue_warm_up(struct nccl_queue *q, int64_t largest_shard, bool wire_bf16,
                               size_t largest_gathered_bytes, bool exchanges) {
    enum { COUNTER_BYTES = 256 };
    const size_t shard_bytes = (size_t)largest_shard * (wire_bf16 ? sizeof(bf16) : sizeof(float));
    const size_t bytes =
        (size_t)q->ranks * (shard_bytes > largest_gathered_bytes ? shard_bytes : largest_gathered_bytes);
    char *const memory = (char *)device_allocate(COUNTER_BYTES + bytes), *const buffer = memory + COUNTER_BYTES;
    unsigned *const wrong = (unsigned *)memory;
    control_collective_begun(q->control, "NCCL's first collectives");
    cuda_check(cudaMemsetAsync(wrong, 0, COUNTER_BYTES, q->device.stream));
    for (int largest = 0; largest < 2; largest++) {
        const int64_t elements = largest ? largest_shard : 1;
        if (wire_bf16)
            nccl_warm_up_sum(q, (bf16 *)buffer, elements, ncclBfloat16, wrong);
        else
            nccl_warm_up_sum(q, (float *)buffer, elements, ncclFloat32, wrong);
        nccl_warm_up_gather(q, (uint8_t *)buffer, largest ? largest_gathered_bytes : 1, wrong);
        if (exchanges)
            nccl_warm_up_messages(q, (uint8_t *)buffer, bytes, largest, wrong);
    }
    cuda_check(cudaStreamSynchronize(q->device.stream));
    control_collective_done(q->control);
    device_free(memory, COUNTER_BYTES + bytes);
}
// Creates the queue's stream with the greatest priority, so that NCCL's few blocks need not wait for a matmul's to end.
static void nccl_queue_make_stream(struct nccl_queue *q) {
    int least, greatest;
    cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cuda_check(cudaStreamCreateWithPriority(&q->device.stream, cudaStreamNonBlocking, greatest));
}
// Opens NCCL between the ranks of `parallel`, has the control thread poll it, and runs nccl_queue_warm_up. Every rank
// calls this. *q must not move until nccl_queue_close. Ends the program on failure. `exchanges`: there will be some.
static void nccl_queue_open(struct nccl_queue *q, struct parallel *parallel, int64_t largest_shard, bool wire_bf16,
                            size_t largest_gathered_bytes, bool exchanges, struct device *dev) {
    memset(q, 0, sizeof *q);
    q->rank = parallel->launch.rank;
    q->ranks = parallel->launch.ranks;
    q->control = parallel->control;
    q->device = *dev;
    pthread_mutex_init(&q->mutex, NULL);
    ncclUniqueId id;
    memset(&id, 0, sizeof id);
    if (q->rank == 0)
        nccl_check(NULL, ncclGetUniqueId(&id));
    control_broadcast(q->control, &id, sizeof id, "the start of NCCL", false);
    control_collective_begun(q->control, "ncclCommInitRank");
    nccl_check(NULL, ncclCommInitRank(&q->comm, q->ranks, id, q->rank));
    control_collective_done(q->control);
    cuda_check(cudaGetDevice(&q->device_index));
    nccl_queue_make_stream(q);
    cuda_check(cudaEventCreateWithFlags(&q->ready, cudaEventDisableTiming));
    for (int i = 0; i < NCCL_EVENTS; i++) {
        cuda_check(cudaEventCreate(&q->started[i]));
        cuda_check(cudaEventCreate(&q->done[i]));
        cuda_check(cudaEventCreate(&q->reached[i]));
    }
    control_set_poll(q->control, nccl_queue_poll, q);
    nccl_queue_warm_up(q, largest_shard, wire_bf16, largest_gathered_bytes, exchanges);
}
// Waits for the queue's collectives, ends the control thread's polls, and frees what nccl_queue_open made.
static void nccl_queue_close(struct nccl_queue *q) {
    cuda_check(cudaStreamSynchronize(q->device.stream));
    control_set_poll(q->control, NULL, NULL);
    nccl_queue_in_flight(q);
    nccl_check(NULL, ncclCommDestroy(q->comm));
    for (int i = 0; i < NCCL_EVENTS; i++) {
        cuda_check(cudaEventDestroy(q->started[i]));
        cuda_check(cudaEventDestroy(q->done[i]));
        cuda_check(cudaEventDestroy(q->reached[i]));
    }
    cuda_check(cudaEventDestroy(q->ready));
    cuda_check(cudaStreamDestroy(q->device.stream));
    pthread_mutex_destroy(&q->mutex);
}

// --- Collectives --------------------------------------------------------------------------------------------------

// Begins a collective. What the queue's stream gets until nccl_queue_end belongs to it, and starts when dev's work so
// far is done. Waits while NCCL_EVENTS collectives are in flight. Copies `name`.
static void nccl_queue_begin(struct nccl_queue *q, const char *name, struct device *dev) {
    while (nccl_queue_in_flight(q) >= NCCL_EVENTS) // the next events are the oldest collective's
        cuda_check(cudaEventSynchronize(q->done[(q->begun + 1) % NCCL_EVENTS]));
    control_collective_begun(q->control, name);
    cuda_check(cudaEventRecord(q->ready, dev->stream));
    cuda_check(cudaStreamWaitEvent(q->device.stream, q->ready, 0));
    cuda_check(cudaEventRecord(q->started[(q->begun + 1) % NCCL_EVENTS], q->device.stream));
}
// Ends what nccl_queue_begin began; returns the collective's ticket, never 0.
static uint64_t nccl_queue_end(struct nccl_queue *q) {
    pthread_mutex_lock(&q->mutex);
    const uint64_t ticket = ++q->begun;
    cuda_check(cudaEventRecord(q->done[ticket % NCCL_EVENTS], q->device.stream));
    pthread_mutex_unlock(&q->mutex);
    return ticket;
}
// Makes the device's stream wait for the ticket's collective. Does nothing where NCCL_EVENTS or more collectives began
// later: the ticket's collective is done then, and a later one has its events.
static void nccl_queue_wait(struct nccl_queue *q, uint64_t ticket, struct device *dev) {
    const uint64_t i = ticket % NCCL_EVENTS;
    if (q->begun - ticket >= NCCL_EVENTS)
        return;
    pthread_mutex_lock(&q->mutex);
    if (q->waited_for[i] != ticket) {
        cuda_check(cudaEventRecord(q->reached[i], dev->stream));
        q->waited_for[i] = ticket;
    }
    pthread_mutex_unlock(&q->mutex);
    cuda_check(cudaStreamWaitEvent(dev->stream, q->done[i], 0));
}
// Enqueues only a wait for an event, on the queue's stream. Collectives from here on wait for it, the device does not.
static void nccl_queue_begin_after(struct nccl_queue *q, cudaEvent_t event) {
    cuda_check(cudaStreamWaitEvent(q->device.stream, event, 0));
}
// Sets *busy_s and *waited_s to collectives_times's two sums of seconds, with all collectives that are done by now.
static void nccl_queue_times(struct nccl_queue *q, double *busy_s, double *waited_s) {
    nccl_queue_in_flight(q);
    pthread_mutex_lock(&q->mutex);
    *busy_s = q->busy_s;
    *waited_s = q->waited_s;
    pthread_mutex_unlock(&q->mutex);
}

enum { WIRE_PACK = 8, WIRE_THREADS = 256 }; // bf16 in 16 bytes; threads of a block
// to[i] = from[i], rounded to bf16, i < n, WIRE_PACK a thread; `to` is aligned to 16 bytes.
static __global__ void round_to_wire_kernel(bf16 *to, const float *from, int64_t n) {
    const int64_t begin = WIRE_PACK * ((int64_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (begin + WIRE_PACK <= n && packed_aligned(from)) {
        packed_check(from + begin, false);
        packed_check(from + begin + 4, false);
        packed_check(to + begin, true);
        const float4 low = *(const float4 *)(from + begin), high = *(const float4 *)(from + begin + 4);
        const uint4 words = {pack_bf16x2(low.x, low.y), pack_bf16x2(low.z, low.w), pack_bf16x2(high.x, high.y),
                             pack_bf16x2(high.z, high.w)};
        *(uint4 *)(to + begin) = words;
        return;
    }
    for (int64_t i = begin; i < begin + WIRE_PACK && i < n; i++)
        to[i] = bf16_from_float(from[i]);
}
// to[i] = from[i], i < n, one element a thread.
static __global__ void widen_from_wire_kernel(float *to, const bf16 *from, int64_t n) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        to[i] = bf16_to_float(from[i]);
}

// Enqueues collective_reduce_scatter; returns its ticket, never 0. Where wire is NULL the sum is in fp32. Else it is in
// bf16, and NCCL's ring rounds it after each addition; wire (ranks, shard) is scratch, aligned to 16 bytes.
static uint64_t nccl_queue_reduce_scatter(struct nccl_queue *q, float *out, const float *buffer, int64_t shard,
                                          bf16 *wire, const char *name, struct device *dev) {
    cudaStream_t stream = q->device.stream;
    const int64_t all = shard * q->ranks;
    nccl_queue_begin(q, name, dev);
    if (wire) {
        bf16 *const own = wire + shard * q->rank;
        LAUNCH(&q->device, round_to_wire_kernel, blocks_for(all, WIRE_PACK * WIRE_THREADS), WIRE_THREADS, 0, wire,
               buffer, all);
        nccl_check(q->comm, ncclReduceScatter(wire, own, (size_t)shard, ncclBfloat16, ncclSum, q->comm, stream));
        LAUNCH(&q->device, widen_from_wire_kernel, blocks_for(shard, WIRE_THREADS), WIRE_THREADS, 0, out, own, shard);
    } else {
        nccl_check(q->comm, ncclReduceScatter(buffer, out, (size_t)shard, ncclFloat32, ncclSum, q->comm, stream));
    }
    return nccl_queue_end(q);
}
static uint64_t nccl_queue_all_gather(struct nccl_queue *q, void *buffer, const void *own, size_t bytes,
                                      const char *name, struct device *dev) {
    nccl_queue_begin(q, name, dev);
    nccl_check(q->comm, ncclAllGather(own, buffer, bytes, ncclUint8, q->comm, q->device.stream));
    return nccl_queue_end(q);
}
// Enqueues copies of this rank's messages to itself, in order. Ends the program where the next receive's size differs.
static void nccl_queue_copy_to_self(struct nccl_queue *q, const struct exchange_message *sends, int num_sends,
                                    const struct exchange_message *receives, int num_receives) {
    for (int i = 0, k = 0; i < num_sends; i++) {
        if (sends[i].rank != q->rank)
            continue;
        while (k < num_receives && receives[k].rank != q->rank)
            k++;
        if (k == num_receives || receives[k].bytes != sends[i].bytes)
            fail("an exchange whose messages of rank %d to itself are not those that it receives", q->rank);
        cuda_check(cudaMemcpyAsync(receives[k++].data, sends[i].data, sends[i].bytes, cudaMemcpyDeviceToDevice,
                                   q->device.stream));
    }
}
// Enqueues collective_exchange; returns its ticket. Copies messages to this rank first; the others are one NCCL group.
static uint64_t nccl_queue_exchange(struct nccl_queue *q, const struct exchange_message *sends, int num_sends,
                                    const struct exchange_message *receives, int num_receives, const char *name,
                                    struct device *dev) {
    cudaStream_t stream = q->device.stream;
    nccl_queue_begin(q, name, dev);
    nccl_queue_copy_to_self(q, sends, num_sends, receives, num_receives);
    nccl_check(q->comm, ncclGroupStart());
    for (int i = 0; i < num_sends; i++)
        if (sends[i].rank != q->rank)
            nccl_check(q->comm, ncclSend(sends[i].data, sends[i].bytes, ncclUint8, sends[i].rank, q->comm, stream));
    for (int i = 0; i < num_receives; i++)
        if (receives[i].rank != q->rank)
            nccl_check(q->comm,
                       ncclRecv(receives[i].data, receives[i].bytes, ncclUint8, receives[i].rank, q->comm, stream));
    nccl_check(q->comm, ncclGroupEnd());
    return nccl_queue_end(q);
}

#elif defined(TARGET_CUDA)

enum { COLLECTIVES_HAVE_NCCL = 0 };
// Without NCCL nccl_queue_open ends the program, and nothing else is called.
struct nccl_queue {
    int unused;
};
static void nccl_queue_open(struct nccl_queue *q, struct parallel *parallel, int64_t largest_shard, bool wire_bf16,
                            size_t largest_gathered_bytes, bool exchanges, struct device *dev) {
    fail("--collectives nccl: this program was built without NCCL; build it where nccl.h and libnccl are (NCCL_HOME= "
         "names their folder), or give --collectives mpi or sockets, which are slow");
}
static void nccl_queue_close(struct nccl_queue *q) {}
static void nccl_queue_wait(struct nccl_queue *q, uint64_t ticket, struct device *dev) {}
static void nccl_queue_begin_after(struct nccl_queue *q, cudaEvent_t event) {}
static void nccl_queue_times(struct nccl_queue *q, double *busy_s, double *waited_s) {}
static uint64_t nccl_queue_reduce_scatter(struct nccl_queue *q, float *out, const float *buffer, int64_t shard,
                                          bf16 *wire, const char *name, struct device *dev) {
    return 0;
}
static uint64_t nccl_queue_all_gather(struct nccl_queue *q, void *buffer, const void *own, size_t bytes,
                                      const char *name, struct device *dev) {
    return 0;
}
static uint64_t nccl_queue_exchange(struct nccl_queue *q, const struct exchange_message *sends, int num_sends,
                                    const struct exchange_message *receives, int num_receives, const char *name,
                                    struct device *dev) {
    return 0;
}

#else

enum { COLLECTIVES_HAVE_NCCL = 1 }; // plans of a GPU's memory assume a build with NCCL

#endif
