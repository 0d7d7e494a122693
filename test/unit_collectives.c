// kernels/collectives.cuh between ranks: sums and gathered bytes against loops; the order of a collective and the work
// before and after it; and, on the emulator, what its NCCL must find.
//
// Each test starts this program again under mpirun, as ranks that check what they get.
//
//   unit_collectives           every test          mpirun -np N unit_collectives SCENARIO [nccl|host]    one of them
//
// Tolerances. A sum of n terms rounds n - 1 times, by at most 2^-24 of the sum of the terms' absolute values. Through
// bf16 each term is rounded once more, and so is the sum, all by 2^-8.
// each term is rounded once more, and the sum, all by 2^-8.
#include "kernels/collectives.cuh"  // under test
#include "kernels/device_queue.cuh" // device_open, device_synchronize
#include "test/testing.h"           // cmocka
#include <sys/wait.h>               // waitpid
#include <unistd.h>                 // fork, readlink, usleep

#ifdef HAVE_MPI

#ifdef TARGET_CUDA
enum { KINDS = 2, HAS_NCCL = 1 }; // nccl and host
#else
enum { KINDS = 1, HAS_NCCL = 0 }; // only host
#endif
static const double TIMEOUT_S = 30, SHORT_TIMEOUT_S = 8; // of a collective; SHORT: for a rank that never comes
enum { LARGEST_PART = 4099 };
// Messages of an exchange, from each rank to each: the n-th one has (from * 3 + to + n) % 4 * 777 bytes.
enum { MESSAGES = 3, MAX_RANKS = 4, LARGEST_EXCHANGED = 2 * MAX_RANKS * MESSAGES * 4 * 777 };
static size_t message_bytes(int from, int to, int n) { return (size_t)((from * 3 + to + n) % 4) * 777; }

// --- A rank -------------------------------------------------------------------------------------------------------

struct rank {
    struct parallel parallel;
    struct device device;
    struct collectives collectives;
    int rank, ranks;
    void *scratch;
    size_t scratch_bytes;
};

static void demand(const char *error) {
    if (error)
        fail("%s", error);
}

static void rank_open(struct rank *r, double timeout_s) {
    struct parallel *const p = &r->parallel;
    struct error_text error;
    memset(r, 0, sizeof *r);
    demand(parallel_open(p, "", "", timeout_s, &error));
    demand(parallel_open_exchange(p, EXCHANGE_MPI, &error));
    r->rank = p->launch.rank;
    r->ranks = p->launch.ranks;
    r->device.threads = 1;
    device_open(&r->device, r->rank, true);
}
static void rank_close(struct rank *r) {
    device_close(&r->device);
    parallel_close(&r->parallel);
}
static void collectives_begin(struct rank *r, enum collectives_kind kind, bool wire_bf16) {
    collectives_open(&r->collectives, &r->parallel, kind, wire_bf16, LARGEST_PART, 4 * LARGEST_PART, LARGEST_EXCHANGED,
                     &r->device);
    r->scratch_bytes =
        collectives_scratch_bytes(LARGEST_PART, r->ranks, kind, wire_bf16, LARGEST_EXCHANGED, &r->device);
    r->scratch = device_allocate(r->scratch_bytes);
    collectives_set_scratch(&r->collectives, r->scratch);
}
static void collectives_end(struct rank *r) {
    collectives_close(&r->collectives, &r->device);
    device_free(r->scratch, r->scratch_bytes);
}

// --- Values -------------------------------------------------------------------------------------------------------

// Returns what a rank's buffer holds at i in a round; any rank can compute it.
static float value_at(int round, int rank, int64_t i) {
    uint64_t state = (uint64_t)i * 64 + (uint64_t)rank * 8 + (uint64_t)round;
    return (float)test_uniform(&state);
}
static float *values_of(int round, int rank, int64_t n) {
    float *x = (float *)malloc((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = value_at(round, rank, i);
    return x;
}
static void check_sums(const float *got, int round, const struct rank *r, int64_t part) {
    for (int64_t i = 0; i < part; i++) {
        double sum = 0, magnitude = 0;
        for (int rank = 0; rank < r->ranks; rank++) {
            sum += value_at(round, rank, part * r->rank + i);
            magnitude += fabs((double)value_at(round, rank, part * r->rank + i));
        }
        const double rounding = r->collectives.bf16 ? 0x1p-8 : 0x1p-24;
        const double tolerance = (r->ranks + (r->collectives.bf16 ? 1 : 0)) * rounding * magnitude;
        if (!(fabs(got[i] - sum) <= tolerance))
            fail("rank %d of %d, part of %lld, element %lld: %.9g, expected %.9g, within %.3g", r->rank, r->ranks,
                 (long long)part, (long long)i, (double)got[i], sum, tolerance);
    }
}

// Checks a reduce-scatter whose result goes to its place in the buffer, or elsewhere. The buffer begins `offset`
// elements after an aligned place.
static void check_reduce_scatter(struct rank *r, int64_t part, int offset, bool in_place) {
    struct device *const dev = &r->device;
    const size_t part_bytes = (size_t)part * sizeof(float), bytes = part_bytes * (size_t)r->ranks;
    const size_t allocated = bytes + (size_t)offset * sizeof(float);
    float *const memory = (float *)device_allocate(allocated), *const buffer = memory + offset;
    float *const elsewhere = (float *)device_allocate(part_bytes);
    float *const out = in_place ? buffer + part * r->rank : elsewhere;
    float *const host = (float *)host_allocate(part_bytes, dev), *const values = values_of(1, r->rank, part * r->ranks);
    const uint64_t sent = r->collectives.sent_bytes;
    device_upload(buffer, values, bytes, dev);
    const uint64_t ticket = collective_reduce_scatter(&r->collectives, out, buffer, part, "a test's sum", dev);
    collective_wait(&r->collectives, ticket, dev);
    device_download(host, out, part_bytes, dev);
    check_sums(host, 1, r, part);
    const uint64_t expected = (uint64_t)(r->ranks - 1) * part_bytes / (r->collectives.bf16 ? 2 : 1);
    if (r->collectives.sent_bytes - sent != expected)
        fail("%llu bytes are counted as sent, not %llu", (unsigned long long)(r->collectives.sent_bytes - sent),
             (unsigned long long)expected);
    device_free(memory, allocated);
    device_free(elsewhere, part_bytes);
    host_free(host);
    free(values);
}
static void check_all_gather(struct rank *r, size_t bytes, bool in_place) {
    struct device *const dev = &r->device;
    const size_t all_bytes = bytes * (size_t)r->ranks;
    unsigned char *const buffer = (unsigned char *)device_allocate(all_bytes);
    unsigned char *const elsewhere = (unsigned char *)device_allocate(bytes);
    unsigned char *const own = in_place ? buffer + bytes * (size_t)r->rank : elsewhere;
    unsigned char *const host = (unsigned char *)host_allocate(all_bytes, dev);
    for (size_t i = 0; i < bytes; i++)
        host[i] = (unsigned char)(i * 7 + (size_t)r->rank * 31 + 1);
    device_upload(own, host, bytes, dev);
    collective_wait(&r->collectives, collective_all_gather(&r->collectives, buffer, own, bytes, "a test's bytes", dev),
                    dev);
    device_download(host, buffer, all_bytes, dev);
    for (size_t i = 0; i < all_bytes; i++)
        if (host[i] != (unsigned char)(i % bytes * 7 + i / bytes * 31 + 1))
            fail("rank %d of %d, %zu bytes of each: byte %zu is wrong", r->rank, r->ranks, bytes, i);
    device_free(buffer, all_bytes);
    device_free(elsewhere, bytes);
    host_free(host);
}
static unsigned char message_byte(int from, int to, int n, size_t i) {
    return (unsigned char)(i * 7 + i / 251 + (size_t)(31 * from + 11 * to + 3 * n + 1));
}
// Checks that a rank receives from each rank what was there before the sender began the exchange, and that work after
// the wait sees what was received.
static void check_exchange(struct rank *r) {
    struct device *const dev = &r->device;
    const size_t room = 4 * 777, bytes = room * MESSAGES * (size_t)r->ranks;
    struct exchange_message sends[MAX_RANKS * MESSAGES], receives[MAX_RANKS * MESSAGES];
    unsigned char *const out = (unsigned char *)device_allocate(bytes), *const in =
                                                                            (unsigned char *)device_allocate(bytes);
    unsigned char *const host = (unsigned char *)host_allocate(bytes, dev);
    const int count = r->ranks * MESSAGES;
    uint64_t sent = r->collectives.sent_bytes;
    for (int i = 0; i < count; i++) {
        const int to = i % r->ranks, n = i / r->ranks, from = i / MESSAGES;
        const struct exchange_message send = {to, out + (size_t)i * room, message_bytes(r->rank, to, n)},
                                      receive = {from, in + (size_t)i * room,
                                                 message_bytes(from, r->rank, i % MESSAGES)};
        sends[i] = send;
        receives[i] = receive;
        sent += to == r->rank ? 0 : send.bytes;
        for (size_t k = 0; k < send.bytes; k++)
            host[(size_t)i * room + k] = message_byte(r->rank, to, n, k);
    }
    device_upload(out, host, bytes, dev);
    device_zero(in, bytes, dev);
    const uint64_t ticket =
        collective_exchange(&r->collectives, sends, count, receives, count, "a test's messages", dev);
    memset(sends, 0, sizeof sends); // the lists belong to the caller
    collective_wait(&r->collectives, ticket, dev);
    device_zero(out, bytes, dev);
    device_download(host, in, bytes, dev);
    if (r->collectives.sent_bytes != sent)
        fail("%llu bytes are counted as sent, not %llu", (unsigned long long)r->collectives.sent_bytes,
             (unsigned long long)sent);
    for (int i = 0; i < count; i++)
        for (size_t k = 0; k < room; k++)
            if (host[(size_t)i * room + k] !=
                (k < receives[i].bytes ? message_byte(receives[i].rank, r->rank, i % MESSAGES, k) : 0))
                fail("rank %d: message %d of rank %d: byte %zu is wrong", r->rank, i % MESSAGES, receives[i].rank, k);
    device_free(out, bytes);
    device_free(in, bytes);
    host_free(host);
}
// Checks messages between only two ranks: the others begin the exchange with empty lists.
static void check_pair(struct rank *r) {
    struct device *const dev = &r->device;
    int *const memory = (int *)device_allocate(2 * sizeof *memory), value = 40 + r->rank, got = 0;
    const struct exchange_message send = {1, memory, sizeof *memory}, receive = {0, memory + 1, sizeof *memory};
    device_upload(memory, &value, sizeof value, dev);
    const uint64_t ticket =
        collective_exchange(&r->collectives, &send, r->rank == 0, &receive, r->rank == 1, "a pair", dev);
    collective_wait(&r->collectives, ticket, dev);
    device_download(&got, memory + 1, sizeof got, dev);
    if (r->rank == 1 && got != 40)
        fail("rank 0's message is %d", got);
    device_free(memory, 2 * sizeof *memory);
}
static void values_are_right(struct rank *r, enum collectives_kind kind) {
    static const int64_t parts[] = {1, 7, 1000, LARGEST_PART};
    for (int bf16 = 0; bf16 < 2; bf16++) {
        collectives_begin(r, kind, bf16);
        for (int i = 0; i < 4; i++)
            for (int in_place = 0; in_place < 2; in_place++)
                check_reduce_scatter(r, parts[i], i % 2 + in_place, in_place);
        for (int i = 0; i < 4; i++)
            for (int in_place = 0; in_place < 2; in_place++)
                check_all_gather(r, (size_t)parts[i], in_place);
        for (int round = 0; round < 2; round++) {
            check_exchange(r);
            check_pair(r);
        }
        collectives_end(r);
    }
}

// --- Order --------------------------------------------------------------------------------------------------------

// Checks two sums at once, while the device goes on. Each must see work that was enqueued before it. Work that is
// enqueued after the wait must see the sum, and be unseen by it. The host waits for nothing until the end, so that on
// the emulator only the queues' own waits make work run.
static void order_is_kept(struct rank *r, enum collectives_kind kind) {
    enum { PART = 1000 };
    struct device *const dev = &r->device;
    struct collectives *const c = &r->collectives;
    const size_t bytes = PART * sizeof(float), all_bytes = bytes * (size_t)r->ranks;
    float *values[2], *buffer[2], *out[2], *taken[2], *host = (float *)host_allocate(bytes, dev);
    uint64_t ticket[2];
    collectives_begin(r, kind, false);
    for (int i = 0; i < 2; i++) {
        values[i] = values_of(i, r->rank, PART * r->ranks);
        buffer[i] = (float *)device_allocate(all_bytes);
        out[i] = (float *)device_allocate(bytes);
        taken[i] = (float *)device_allocate(bytes);
        device_zero(buffer[i], all_bytes, dev);
        device_zero(out[i], bytes, dev);
    }
    device_synchronize(dev);
    for (int i = 0; i < 2; i++) {
        device_upload(buffer[i], values[i], all_bytes, dev);
        ticket[i] = collective_reduce_scatter(c, out[i], buffer[i], PART, i ? "the second" : "the first", dev);
        device_zero(taken[i], bytes, dev); // what the device computes meanwhile
    }
#ifdef TARGET_CUDA
    if (kind == COLLECTIVES_NCCL) // before any work of the device's stream
        cuda_check(cudaStreamSynchronize(c->nccl.device.stream));
#endif
    for (int i = 0; i < 2; i++) {
        collective_wait(c, ticket[i], dev);
        device_copy(taken[i], out[i], bytes, dev);
        device_zero(buffer[i], all_bytes, dev);
        device_zero(out[i], bytes, dev);
    }
    for (int i = 0; i < 2; i++) {
        device_download(host, taken[i], bytes, dev);
        check_sums(host, i, r, PART);
        device_free(buffer[i], all_bytes);
        device_free(out[i], bytes);
        device_free(taken[i], bytes);
        free(values[i]);
    }
    host_free(host);
    collectives_end(r);
}
// Checks the same order without a wait of the host in between: only the device's stream makes the collective run.
static void wait_is_enough(struct rank *r, enum collectives_kind kind) {
    struct device *const dev = &r->device;
    const size_t all_bytes = sizeof(float) * (size_t)r->ranks;
    float *const buffer = (float *)device_allocate(all_bytes), *const taken = (float *)device_allocate(all_bytes);
    float *const host = (float *)host_allocate(all_bytes, dev);
    collectives_begin(r, kind, false);
    for (int round = 0; round < 8; round++) {
        host[0] = value_at(round, r->rank, 0);
        device_upload(buffer + r->rank, host, sizeof *host, dev);
        const uint64_t ticket =
            collective_all_gather(&r->collectives, buffer, buffer + r->rank, sizeof *host, "a number", dev);
        collective_wait(&r->collectives, ticket, dev);
        device_copy(taken, buffer, all_bytes, dev);
        device_zero(buffer, all_bytes, dev);
        device_download(host, taken, all_bytes, dev);
        for (int rank = 0; rank < r->ranks; rank++)
            if (host[rank] != value_at(round, rank, 0))
                fail("round %d: rank %d's number is %g, not %g", round, rank, (double)host[rank],
                     (double)value_at(round, rank, 0));
    }
    collectives_end(r);
    device_free(buffer, all_bytes);
    device_free(taken, all_bytes);
    host_free(host);
}
// Checks more collectives than can be under way: when the last one begins, the first is long done, and waiting for it
// is still right.
static void many_are_under_way(struct rank *r, enum collectives_kind kind) {
    enum { MANY = 1100 };
    struct device *const dev = &r->device;
    const size_t bytes = MANY * sizeof(int), all_bytes = bytes * (size_t)r->ranks;
    int *const own = (int *)device_allocate(bytes), *const all = (int *)device_allocate(all_bytes);
    int *const host = (int *)host_allocate(all_bytes, dev), *const early = (int *)device_allocate(all_bytes);
    uint64_t first = 0, last = 0;
    collectives_begin(r, kind, false);
    for (int i = 0; i < MANY; i++)
        host[i] = r->rank * MANY + i;
    device_upload(own, host, bytes, dev);
    for (int i = 0; i < MANY; i++) {
        last = collective_all_gather(&r->collectives, all + i * r->ranks, own + i, sizeof *own, "one of many", dev);
        first = i == 0 ? last : first;
    }
    collective_wait(&r->collectives, first, dev);
    device_copy(early, all, sizeof *early * (size_t)r->ranks, dev);
    collective_wait(&r->collectives, last, dev);
    device_copy(early + r->ranks, all + r->ranks, all_bytes - sizeof *early * (size_t)r->ranks, dev);
    device_download(host, early, all_bytes, dev);
    for (int i = 0; i < MANY * r->ranks; i++)
        if (host[i] != i % r->ranks * MANY + i / r->ranks)
            fail("number %d is %d", i, host[i]);
    collectives_end(r);
    device_free(early, all_bytes);
    device_free(own, bytes);
    device_free(all, all_bytes);
    host_free(host);
}

// Checks that closing the collectives waits for those that nobody has waited for: their memory may then be freed.
static void closing_waits(struct rank *r, enum collectives_kind kind) {
    const size_t all_bytes = (size_t)r->ranks;
    unsigned char *const buffer = (unsigned char *)device_allocate(all_bytes);
    unsigned char *const host = (unsigned char *)host_allocate(all_bytes, &r->device);
    collectives_begin(r, kind, false);
    memset(host, r->rank + 1, all_bytes);
    device_upload(buffer, host, all_bytes, &r->device);
    if (r->rank == 1)
        usleep(100000); // so that the others' collective can't be done before
    collective_all_gather(&r->collectives, buffer, buffer + r->rank, 1, "a byte", &r->device);
    collectives_end(r);
    device_download(host, buffer, all_bytes, &r->device);
    for (int i = 0; i < r->ranks; i++)
        if (host[i] != i + 1)
            fail("rank %d's byte is %d", i, host[i]);
    device_free(buffer, all_bytes);
    host_free(host);
}

// Waits until what was begun is done, while nothing of the device waits for it.
static void others_finish(struct collectives *c, enum collectives_kind kind) {
#ifdef TARGET_CUDA
    if (kind == COLLECTIVES_NCCL)
        cuda_check(cudaStreamSynchronize(c->nccl.device.stream));
#else
    usleep(400000);
#endif
}
// Checks the times where one rank is late. First the others wait only once the collective is done, then while it runs.
// The late rank itself finds each collective done.
static void times_are_known(struct rank *r, enum collectives_kind kind) {
    static const double LATE_S = 0.2;
    struct device *const dev = &r->device;
    struct collectives *const c = &r->collectives;
    const bool late = r->rank == 1;
    const size_t all_bytes = sizeof(float) * (size_t)r->ranks;
    float *const buffer = (float *)device_allocate(all_bytes);
    collectives_begin(r, kind, false);
    device_zero(buffer, all_bytes, dev);
    for (int waits = 0; waits < 2; waits++) {
        double busy_s, waited_s, busy_before_s, waited_before_s;
        collectives_times(c, &busy_before_s, &waited_before_s);
        control_barrier(r->parallel.control, "the same begin", false);
        if (late)
            usleep((useconds_t)(1e6 * LATE_S));
        const uint64_t ticket = collective_all_gather(c, buffer, buffer + r->rank, sizeof *buffer, "a number", dev);
        if (!waits)
            others_finish(c, kind);
        collective_wait(c, ticket, dev);
        device_synchronize(dev);
        collectives_times(c, &busy_s, &waited_s);
        busy_s -= busy_before_s;
        waited_s -= waited_before_s;
        // on a GPU the host's collectives overlap nothing
        const bool exposed = waits || (HAS_NCCL && kind == COLLECTIVES_HOST);
        if (late ? busy_s > LATE_S * 3 / 4 : busy_s < LATE_S / 4 || busy_s > 20 * LATE_S)
            fail("the collective ran for %.3f s", busy_s);
        const double least_s = exposed && !late ? LATE_S / 4 : 0;
        const double most_s =
            // it may come to its wait before the collective starts
            exposed || late ? busy_s + LATE_S * 3 / 4 : LATE_S / 8;
        if (waited_s < least_s || waited_s > most_s)
            fail("the device waited for %.3f s of %.3f s", waited_s, busy_s);
    }
    collectives_end(r);
    device_free(buffer, all_bytes);
}

#ifdef TARGET_CUDA
// Checks that the control thread finds out by itself how far the GPU is: nothing else is left to do.
static void control_is_told(struct rank *r, enum collectives_kind kind) {
    struct nccl_queue *const q = &r->collectives.nccl;
    const size_t all_bytes = sizeof(float) * (size_t)r->ranks;
    float *const buffer = (float *)device_allocate(all_bytes);
    collectives_begin(r, kind, false);
    device_zero(buffer, all_bytes, &r->device);
    for (int i = 0; i < 3; i++)
        collective_all_gather(&r->collectives, buffer, buffer + r->rank, sizeof *buffer, "a number", &r->device);
    cuda_check(cudaStreamSynchronize(q->device.stream));
    uint64_t finished = 0;
    for (int i = 0; i < 400 && finished < 3; i++) {
        usleep(10000);
        pthread_mutex_lock(&q->mutex);
        finished = q->finished;
        pthread_mutex_unlock(&q->mutex);
    }
    if (finished != 3)
        fail("the control thread saw %llu of 3 collectives done", (unsigned long long)finished);
    collectives_end(r);
    device_free(buffer, all_bytes);
}

// Checks that the blocks of NCCL's stream go before the blocks of the device's own stream.
static void collectives_go_first(struct rank *r, enum collectives_kind kind) {
    int least, greatest, priority, others;
    collectives_begin(r, kind, false);
    cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cuda_check(cudaStreamGetPriority(r->collectives.nccl.device.stream, &priority));
    cuda_check(cudaStreamGetPriority(r->device.stream, &others));
    if (priority != greatest || others <= priority)
        fail("NCCL's stream has priority %d, the device's own %d, of %d to %d", priority, others, greatest, least);
    collectives_end(r);
}

#ifdef CUDA_EMULATED
// Checks that opening the collectives takes all memory of the device that collectives ever hold, so that the check
// whether a plan fits counts this memory. On a GPU, kernels that are loaded later take some more, for which the check
// has a reserve.
static void memory_is_taken_first(struct rank *r, enum collectives_kind kind) {
    const size_t all_bytes = sizeof(float) * LARGEST_PART * (size_t)r->ranks;
    for (int bf16 = 0; bf16 < 2; bf16++) {
        const size_t free_before = device_free_bytes(&r->device);
        collectives_begin(r, kind, bf16);
        const size_t free_bytes = device_free_bytes(&r->device), taken = free_before - free_bytes - r->scratch_bytes;
        if (taken < EMU_NCCL_COMMUNICATOR_BYTES)
            fail("%zu bytes are taken by opening, fewer than the communicator's", taken);
        float *const buffer = (float *)device_allocate(all_bytes);
        device_zero(buffer, all_bytes, &r->device);
        static const int64_t parts[] = {1, 100, 2048, LARGEST_PART};
        for (int i = 0; i < 4; i++) {
            const int64_t part = parts[i];
            collective_reduce_scatter(&r->collectives, buffer + part * r->rank, buffer, part, "a sum", &r->device);
            collective_all_gather(&r->collectives, buffer, buffer + part * r->rank, (size_t)part * sizeof *buffer,
                                  "a gathering", &r->device);
        }
        const size_t later = free_bytes - all_bytes - device_free_bytes(&r->device);
        if (later > 0)
            fail("the collectives took %zu bytes more of the device's memory after they were opened", later);
        collectives_end(r);
        device_free(buffer, all_bytes);
    }
}
#endif

// --- What the emulator's NCCL finds -------------------------------------------------------------------------------

static float *begin_fault(struct rank *r) {
    collectives_begin(r, COLLECTIVES_NCCL, false);
    return (float *)device_allocate(4096);
}
static void counts_differ(struct rank *r, enum collectives_kind kind) {
    float *const x = begin_fault(r);
    collective_reduce_scatter(&r->collectives, x, x + 512, 8 + r->rank, "unequal parts", &r->device);
    collectives_end(r);
}
static void order_differs(struct rank *r, enum collectives_kind kind) {
    float *const x = begin_fault(r);
    for (int i = 0; i < 2; i++)
        if (i == r->rank)
            collective_reduce_scatter(&r->collectives, x, x + 512, 8, "a sum", &r->device);
        else
            collective_all_gather(&r->collectives, x, x + 512, 32, "bytes", &r->device);
    collectives_end(r);
}
static void host_memory(struct rank *r, enum collectives_kind kind) {
    float *const x = begin_fault(r), values[8] = {0};
    collective_all_gather(&r->collectives, x, values, sizeof values, "bytes", &r->device);
    collectives_end(r);
}
static void parts_overlap(struct rank *r, enum collectives_kind kind) {
    float *const x = begin_fault(r);
    collective_reduce_scatter(&r->collectives, x + 8 * r->rank + 1, x, 8, "a sum", &r->device);
    collectives_end(r);
}
static void messages_overlap(struct rank *r, enum collectives_kind kind) {
    float *const x = begin_fault(r);
    const struct exchange_message send = {1 - r->rank, x, 16}, receive = {1 - r->rank, x + 2, 16};
    collective_exchange(&r->collectives, &send, 1, &receive, 1, "messages", &r->device);
    collectives_end(r);
}
static void messages_differ(struct rank *r, enum collectives_kind kind) {
    float *const x = begin_fault(r);
    const struct exchange_message send = {1 - r->rank, x, 16}, receive = {1 - r->rank, x + 32, 20};
    collective_exchange(&r->collectives, &send, 1, &receive, 1, "messages", &r->device);
    collectives_end(r);
}
// Checks what neither NCCL nor its stand-in can find: one rank's collective is missing. The control thread, which knows
// what each rank has begun, finds it.
static void one_is_missing(struct rank *r, enum collectives_kind kind) {
    float *const x = begin_fault(r);
    for (int i = 0; i < 2 - r->rank; i++)
        collective_all_gather(&r->collectives, x, x + 512, 32, i ? "the second" : "the first", &r->device);
    cuda_check(cudaStreamSynchronize(r->collectives.nccl.device.stream));
    usleep(20 * 1000000);
}
static void recorded(struct rank *r, bool wait) {
    float *const x = begin_fault(r);
    uint64_t ticket = 0;
    if (wait)
        ticket = collective_all_gather(&r->collectives, x, x + 512, 32, "bytes", &r->device);
    graph_begin(&r->device);
    if (wait)
        collective_wait(&r->collectives, ticket, &r->device);
    else
        collective_all_gather(&r->collectives, x, x + 512, 32, "bytes", &r->device);
    collectives_end(r);
}
static void wait_is_recorded(struct rank *r, enum collectives_kind kind) { recorded(r, true); }
static void begin_is_recorded(struct rank *r, enum collectives_kind kind) { recorded(r, false); }
static void device_is_shared(struct rank *r, enum collectives_kind kind) {
    cuda_check(cudaSetDevice(0));
    begin_fault(r);
}
#endif

// --- Starting ranks -----------------------------------------------------------------------------------------------

static const struct scenario {
    const char *name;
    void (*run)(struct rank *r, enum collectives_kind kind);
} scenarios[] = {
    {"values", values_are_right},
    {"order", order_is_kept},
    {"wait", wait_is_enough},
    {"many", many_are_under_way},
    {"times", times_are_known},
    {"close", closing_waits},
#ifdef TARGET_CUDA
    {"control", control_is_told},
    {"priority", collectives_go_first},
#ifdef CUDA_EMULATED
    {"memory", memory_is_taken_first},
#endif
    {"counts_differ", counts_differ},
    {"order_differs", order_differs},
    {"host_memory", host_memory},
    {"parts_overlap", parts_overlap},
    {"messages_overlap", messages_overlap},
    {"messages_differ", messages_differ},
    {"device_is_shared", device_is_shared},
    {"wait_is_recorded", wait_is_recorded},
    {"begin_is_recorded", begin_is_recorded},
    {"one_is_missing", one_is_missing},
#endif
};
enum { SCENARIOS = sizeof scenarios / sizeof *scenarios };

// Runs scenarios one after another; names: "a,b,c".
static void run_rank(const char *names, const char *kind_name) {
    static struct rank rank;
    const enum collectives_kind kind = strcmp(kind_name, "nccl") == 0 ? COLLECTIVES_NCCL : COLLECTIVES_HOST;
    rank_open(&rank, strcmp(names, "one_is_missing") == 0 ? SHORT_TIMEOUT_S : TIMEOUT_S);
    for (int i = 0; i < SCENARIOS; i++) {
        const char *at = strstr(names, scenarios[i].name);
        const size_t n = strlen(scenarios[i].name);
        if (at && (at == names || at[-1] == ',') && (at[n] == 0 || at[n] == ','))
            scenarios[i].run(&rank, kind);
    }
    rank_close(&rank);
}
// An mpirun. `said` has what it and its ranks print.
struct ranks_job {
    pid_t mpirun;
    FILE *said;
};
// Turns this process into mpirun. MPI leaves memory behind, which is no leak of ours.
static void become_mpirun(int ranks, const char *names, const char *kind) {
    char program[512] = "", number[16];
    test_own_session_folder();
    snprintf(number, sizeof number, "%d", ranks);
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    setenv("OMP_NUM_THREADS", "1", 1);
    setenv("ASAN_OPTIONS", "detect_leaks=0", 1);
    setenv("EMU_DEVICES", number, 1);
    if (readlink("/proc/self/exe", program, sizeof program - 1) > 0)
        execlp("timeout", "timeout", "60", "mpirun", "--oversubscribe", "-np", number, program, names, kind,
               (char *)NULL);
}
static struct ranks_job start_ranks(int ranks, const char *names, const char *kind) {
    struct ranks_job job;
    int ends[2];
    fflush(stdout);
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    job.mpirun = fork();
    assert_true(job.mpirun >= 0);
    if (job.mpirun == 0) {
        dup2(ends[1], STDOUT_FILENO);
        dup2(ends[1], STDERR_FILENO);
        become_mpirun(ranks, names, kind);
        _exit(126);
    }
    close(ends[1]);
    job.said = fdopen(ends[0], "r");
    assert_non_null(job.said);
    return job;
}
// Waits for a job, and puts all that its ranks printed into message (size bytes); returns its status as wait() gives
// it.
static int end_ranks(struct ranks_job job, char *message, size_t size) {
    int status = 0;
    message[fread(message, 1, size - 1, job.said)] = 0;
    fclose(job.said);
    assert_int_equal(waitpid(job.mpirun, &status, 0), job.mpirun);
    return status;
}
static void need_mpirun(void) {
    if (system("command -v mpirun >/dev/null 2>&1") != 0) {
        print_message("no mpirun\n");
        skip();
    }
}
static void check_ranks(int ranks, const char *names, const char *kind) {
    char message[8192];
    need_mpirun();
    const int status = end_ranks(start_ranks(ranks, names, kind), message, sizeof message);
    if (status != 0)
        fail_msg("%d ranks, %s, %s: status %d: %s", ranks, names, kind, status, message);
}
static const char *const host_scenarios = "values,order,wait,many,times,close";
static void two_ranks_over_the_host(void **state) { check_ranks(2, host_scenarios, "host"); }
static void three_ranks_over_the_host(void **state) { check_ranks(3, host_scenarios, "host"); }

#ifdef TARGET_CUDA
static const char *const nccl_scenarios = "values,order,wait,many,times,close,control,priority,memory";
static void two_ranks_over_nccl(void **state) { check_ranks(2, nccl_scenarios, "nccl"); }
static void three_ranks_over_nccl(void **state) { check_ranks(3, nccl_scenarios, "nccl"); }

static const struct fault {
    const char *name, *words, *other_words; // words, other_words: parts of the message
    const char *planted;                    // EMU_FAULT; NULL: none
} faults[] = {
    // Call 5 is the first one after the four that open the collectives.
    {"counts_differ", "call 5 is ncclReduceScatter of 8 ncclFloat32", "call 5 is ncclReduceScatter of 9 ncclFloat32"},
    {"order_differs", "call 5 is ncclReduceScatter of 8 ncclFloat32", "call 5 is ncclAllGather of 32 ncclUint8"},
    {"host_memory", "ncclAllGather: what is sent", "is no memory of the device"},
    {"parts_overlap", "ncclReduceScatter: its buffers overlap", "part is at byte"},
    {"messages_overlap", "NCCL: a message from rank", "overlaps one to rank"},
    {"messages_differ", "receives 20 bytes from rank", "which sends 16"},
    {"one_is_missing", "train_gpt: rank 1 (host", "has not reached 'the second' (collective 4)"},
    {"device_is_shared", "Duplicate GPU detected : rank 0 and rank 1", "--collectives sockets"},
    {"wait_is_recorded", "a wait for a collective while a graph is recorded", ""},
    {"begin_is_recorded", "bytes while a graph is recorded", ""},
    {"close", "NCCL's reduce-scatter of 1 elements on known numbers gave 1 wrong", "NCCL_P2P_DISABLE=1",
     "wrong:ncclReduceScatter"},
    {"close", "NCCL's all-gather of 1 elements on known numbers gave 1 wrong", "NCCL_P2P_DISABLE=1",
     "wrong:ncclAllGather"},
    {"close", "NCCL's exchange of 1 elements on known numbers gave 1 wrong", "NCCL_P2P_DISABLE=1", "wrong:messages"},
};
enum { FAULTS = sizeof faults / sizeof *faults };
// Runs all faults at once: mpirun takes a second or two to end a job that failed.
static void faults_are_found(void **state) {
    char message[8192];
    struct ranks_job jobs[FAULTS];
    need_mpirun();
    for (int i = 0; i < FAULTS; i++) {
        if (faults[i].planted)
            setenv("EMU_FAULT", faults[i].planted, 1); // this process has already read the variable
        jobs[i] = start_ranks(2, faults[i].name, "nccl");
        unsetenv("EMU_FAULT");
    }
    for (int i = 0; i < FAULTS; i++) {
        const int status = end_ranks(jobs[i], message, sizeof message);
        if (status == 0 || !strstr(message, faults[i].words) || !strstr(message, faults[i].other_words))
            fail_msg("%s: status %d, expected \"%s\" and \"%s\": %s", faults[i].name, status, faults[i].words,
                     faults[i].other_words, message);
    }
}
#endif

int main(int argc, char **argv) {
    if (argc > 1) {
        run_rank(argv[1], argc > 2 ? argv[2] : HAS_NCCL ? "nccl" : "host");
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_ranks_over_the_host), cmocka_unit_test(three_ranks_over_the_host),
#ifdef TARGET_CUDA
        cmocka_unit_test(two_ranks_over_nccl),     cmocka_unit_test(three_ranks_over_nccl),
        cmocka_unit_test(faults_are_found),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#else

static void built_without_mpi(void **state) { skip(); }
int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(built_without_mpi)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#endif
