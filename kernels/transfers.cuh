// Copies between device and host memory while the device computes: what offloading moves.
//
//   cuda target   one stream for each direction beside the device's; host memory must be pinned
//   cpu target    copied at once; with a bus rate a wait lasts until a bus of that rate would have carried the bytes
//
// A transfer begins when all work that was enqueued on the device before it is done; transfers of one direction run in
// order. Until transfer_wait, which must follow, nobody else may write its operands, nor read what it writes. A
// transfer that began within a graph's recording is waited for within it, and only such a transfer is.
#pragma once
#include "kernels/device.cuh"         // struct device, cuda_check
#include "kernels/device_memory.cuh"  // device_allocate, host_reserve
#include "kernels/device_queue.cuh"   // device_synchronize
#include "kernels/work_segments.cuh"  // segments_cut
#include "runtime/machine/deadline.h" // deadline_clock_s
#include <stdio.h>                    // fprintf
#include <stdlib.h>                   // abort
#include <time.h>                     // nanosleep

enum transfer_direction { TRANSFER_TO_HOST, TRANSFER_TO_DEVICE };
// TRANSFER_EVENTS: beyond so many in flight of one direction, a wait may last until a later transfer is done.
enum { TRANSFER_DIRECTIONS = 2, TRANSFER_EVENTS = 64, TRANSFER_MEASURED_BYTES = 64 << 20 };

struct transfers; // one per process; its members are the target's own

// Opens *t, zeroed or not. bus_gbps: of the bus that the cpu target imitates, 1e9 bytes a second each way; 0: no bus.
static void transfers_open(struct transfers *t, double bus_gbps, struct device *dev);
// Waits for the transfers in flight, then closes `t`; does nothing where `t` is zeroed.
static void transfers_close(struct transfers *t, struct device *dev);
// Begins a copy from or to pinned host memory, after the work enqueued so far. Not within an op (work_segments.cuh).
// Returns a ticket, never 0. Until transfer_wait nobody else may write the copy's operands, nor read its result.
static uint64_t transfer_begin(struct transfers *t, enum transfer_direction direction, void *to, const void *from,
                               size_t bytes, struct device *dev);
// Makes work that is enqueued from here on wait until the transfer is done; the cpu target waits at once. Not within an
// op. Ticket 0: no wait. Aborts unless transfer and wait are in the same recording of a graph, or in none.
static void transfer_wait(struct transfers *t, uint64_t ticket, struct device *dev);
// Returns the seconds since transfers_open that the device waited for transfers. Counts waits that are over and in no
// graph; on the cpu target it is 0 without a bus rate. Must not be called while a graph is recorded.
static double transfers_waited_s(struct transfers *t);
// Measures each direction's rate in 1e9 bytes a second, gbps, by copies of `bytes` both ways at once; on the cpu target
// one after the other. TRANSFER_MEASURED_BYTES are enough. Takes 2 * bytes of device and of host memory meanwhile.
static void transfers_measure(struct transfers *t, struct device *dev, size_t bytes, double gbps[TRANSFER_DIRECTIONS]);
// Makes the cpu target's copies of this direction as late as possible, so that tests find a missing wait: when it or a
// later one is waited for, or when TRANSFER_EVENTS later ones have begun. Other targets ignore the call.
static void transfers_postpone_copies(struct transfers *t, enum transfer_direction direction);

// A ticket: the transfer's number in its direction, from 1, the recording in which it began (0: none), the direction.
enum { TICKET_RECORDING_BITS = 16, TICKET_NUMBER_SHIFT = TICKET_RECORDING_BITS + 1 };
static inline uint64_t transfer_ticket(enum transfer_direction direction, uint64_t recording, uint64_t number) {
    return number << TICKET_NUMBER_SHIFT | recording << 1 | (direction == TRANSFER_TO_DEVICE);
}
static inline enum transfer_direction transfer_direction_of(uint64_t ticket) {
    return ticket % 2 ? TRANSFER_TO_DEVICE : TRANSFER_TO_HOST;
}
static inline uint64_t transfer_recording_of(uint64_t ticket) {
    return ticket >> 1 & ((1u << TICKET_RECORDING_BITS) - 1);
}
static inline uint64_t transfer_number_of(uint64_t ticket) { return ticket >> TICKET_NUMBER_SHIFT; }

#ifdef TARGET_CUDA

// Transfer n of a direction has events n % TRANSFER_EVENTS. `reached`: the device's stream came to its first wait.
struct transfers {
    cudaStream_t streams[TRANSFER_DIRECTIONS];
    cudaEvent_t ready[TRANSFER_DIRECTIONS];
    cudaEvent_t done[TRANSFER_DIRECTIONS][TRANSFER_EVENTS], reached[TRANSFER_DIRECTIONS][TRANSFER_EVENTS];
    bool reaching[TRANSFER_DIRECTIONS][TRANSFER_EVENTS]; // done and reached were recorded; waited_s lacks this wait
    uint64_t begun[TRANSFER_DIRECTIONS];
    double waited_s;
    bool open;
};
// Opens a stream for each direction, without priority: by it CUDA orders only kernels, not copies.
static void transfers_open(struct transfers *t, double bus_gbps, struct device *dev) {
    memset(t, 0, sizeof *t);
    for (int d = 0; d < TRANSFER_DIRECTIONS; d++) {
        cuda_check(cudaStreamCreateWithFlags(&t->streams[d], cudaStreamNonBlocking));
        cuda_check(cudaEventCreateWithFlags(&t->ready[d], cudaEventDisableTiming));
        for (int i = 0; i < TRANSFER_EVENTS; i++) {
            cuda_check(cudaEventCreate(&t->done[d][i]));
            cuda_check(cudaEventCreate(&t->reached[d][i]));
        }
    }
    t->open = true;
}
static void transfers_close(struct transfers *t, struct device *dev) {
    for (int d = 0; d < TRANSFER_DIRECTIONS && t->open; d++) {
        cuda_check(cudaStreamSynchronize(t->streams[d]));
        for (int i = 0; i < TRANSFER_EVENTS; i++) {
            cuda_check(cudaEventDestroy(t->done[d][i]));
            cuda_check(cudaEventDestroy(t->reached[d][i]));
        }
        cuda_check(cudaEventDestroy(t->ready[d]));
        cuda_check(cudaStreamDestroy(t->streams[d]));
    }
    t->open = false;
}

// Returns the number that tickets have for the recording of a graph that is under way; 0 where no graph is recorded.
static uint64_t transfer_recording(const struct device *dev) {
    return dev->recording ? 1 + dev->recordings % ((1u << TICKET_RECORDING_BITS) - 1) : 0;
}
// Adds a transfer's wait to waited_s, once, if the wait is over. Must not be called while a graph is recorded.
static void transfer_measure_wait(struct transfers *t, int direction, int event) {
    float milliseconds = 0;
    if (!t->reaching[direction][event])
        return;
    const cudaError_t status =
        cudaEventElapsedTime(&milliseconds, t->reached[direction][event], t->done[direction][event]);
    if (status == cudaErrorNotReady)
        return;
    cuda_check(status);
    t->reaching[direction][event] = false;
    t->waited_s += milliseconds > 0 ? 1e-3 * milliseconds : 0;
}
static double transfers_waited_s(struct transfers *t) {
    for (int d = 0; d < TRANSFER_DIRECTIONS; d++)
        for (int i = 0; i < TRANSFER_EVENTS; i++)
            transfer_measure_wait(t, d, i);
    return t->waited_s;
}

static uint64_t transfer_begin(struct transfers *t, enum transfer_direction direction, void *to, const void *from,
                               size_t bytes, struct device *dev) {
    const uint64_t number = ++t->begun[direction];
    const int event = (int)(number % TRANSFER_EVENTS);
    segments_cut(dev);
    if (!dev->recording) // CUDA refuses questions about events then, and the recording would be lost
        transfer_measure_wait(t, direction, event);
    t->reaching[direction][event] = false; // its events are about to be recorded again
    cuda_check(cudaEventRecord(t->ready[direction], dev->stream));
    cuda_check(cudaStreamWaitEvent(t->streams[direction], t->ready[direction], 0));
    cuda_check(cudaMemcpyAsync(to, from, bytes,
                               direction == TRANSFER_TO_HOST ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice,
                               t->streams[direction]));
    cuda_check(cudaEventRecord(t->done[direction][event], t->streams[direction]));
    return transfer_ticket(direction, transfer_recording(dev), number);
}
// Enqueues a wait for the transfer's event, or for a later transfer's event in its place. Aborts unless transfer and
// wait are in the same recording, or in none: no event orders across recordings.
static void transfer_wait(struct transfers *t, uint64_t ticket, struct device *dev) {
    const enum transfer_direction direction = transfer_direction_of(ticket);
    const int event = (int)(transfer_number_of(ticket) % TRANSFER_EVENTS);
    if (ticket == 0)
        return;
    segments_cut(dev);
    if (transfer_recording_of(ticket) != transfer_recording(dev)) {
        fprintf(stderr,
                "train_gpt: internal error: a transfer that began %s the recording of a graph is waited for %s\n",
                transfer_recording_of(ticket) ? "in" : "before", dev->recording ? "in another" : "after it");
        abort();
    }
    if (!dev->recording && !t->reaching[direction][event]) {
        cuda_check(cudaEventRecord(t->reached[direction][event], dev->stream));
        t->reaching[direction][event] = true;
    }
    cuda_check(cudaStreamWaitEvent(dev->stream, t->done[direction][event], 0));
}
static void transfers_postpone_copies(struct transfers *t, enum transfer_direction direction) {}

// Copies `bytes` each way, both at once, and sets gbps[direction] to the gigabytes a second of each.
static void transfers_measure_copies(struct transfers *t, char *device_memory, char *host, size_t bytes,
                                     struct device *dev, double gbps[TRANSFER_DIRECTIONS]) {
    uint64_t tickets[TRANSFER_DIRECTIONS];
    cudaEvent_t begin;
    cuda_check(cudaEventCreate(&begin));
    cuda_check(cudaEventRecord(begin, dev->stream));
    tickets[TRANSFER_TO_HOST] = transfer_begin(t, TRANSFER_TO_HOST, host, device_memory, bytes, dev);
    tickets[TRANSFER_TO_DEVICE] =
        transfer_begin(t, TRANSFER_TO_DEVICE, device_memory + bytes, host + bytes, bytes, dev);
    for (int d = 0; d < TRANSFER_DIRECTIONS; d++)
        transfer_wait(t, tickets[d], dev);
    device_synchronize(dev);
    for (int d = 0; d < TRANSFER_DIRECTIONS; d++) {
        float milliseconds;
        cuda_check(
            cudaEventElapsedTime(&milliseconds, begin, t->done[d][transfer_number_of(tickets[d]) % TRANSFER_EVENTS]));
        gbps[d] = 1e-6 * (double)bytes / milliseconds;
    }
    cuda_check(cudaEventDestroy(begin));
}
// Returns the event of a transfer, ticket > 0. Streams other than the device's wait for it to read what the copy wrote.
static cudaEvent_t transfer_event(const struct transfers *t, uint64_t ticket) {
    return t->done[transfer_direction_of(ticket)][transfer_number_of(ticket) % TRANSFER_EVENTS];
}

#else

struct transfer_copy {
    void *to;
    const void *from;
    size_t bytes;
    double done_s; // when the bus has carried it
};
struct transfers {
    double bytes_per_s; // of the bus that copies seem to take; 0: none
    bool late[TRANSFER_DIRECTIONS];
    struct transfer_copy copies[TRANSFER_DIRECTIONS][TRANSFER_EVENTS]; // number n at n % TRANSFER_EVENTS
    uint64_t begun[TRANSFER_DIRECTIONS], copied[TRANSFER_DIRECTIONS];  // so far
    double free_s[TRANSFER_DIRECTIONS];                                // when the bus has carried all that began
    double waited_s;
};
static void transfers_open(struct transfers *t, double bus_gbps, struct device *dev) {
    memset(t, 0, sizeof *t);
    t->bytes_per_s = 1e9 * bus_gbps;
}
static void transfers_postpone_copies(struct transfers *t, enum transfer_direction direction) {
    t->late[direction] = true;
}
static double transfers_waited_s(struct transfers *t) { return t->waited_s; }

// Makes the copies of this direction that have begun and are not made yet, up to transfer `number`.
static void transfers_copy_until(struct transfers *t, enum transfer_direction direction, uint64_t number) {
    while (t->copied[direction] < number) {
        const struct transfer_copy *copy = &t->copies[direction][++t->copied[direction] % TRANSFER_EVENTS];
        memory_copy(copy->to, copy->from, copy->bytes);
    }
}
static void transfers_close(struct transfers *t, struct device *dev) {
    transfers_copy_until(t, TRANSFER_TO_HOST, t->begun[TRANSFER_TO_HOST]);
    transfers_copy_until(t, TRANSFER_TO_DEVICE, t->begun[TRANSFER_TO_DEVICE]);
}

#ifndef TRANSFER_CLOCK_S // a test has a clock that other processes' work does not advance
#define TRANSFER_CLOCK_S deadline_clock_s
#define TRANSFER_SLEEP_UNTIL transfer_sleep_until
// Sleeps until deadline_clock_s() is at_s. Spins at the end: a sleep ends up to 0.1 ms late, megabytes on a bus.
static void transfer_sleep_until(double at_s) {
    const double spun_s = 2e-4;
    for (double left_s; (left_s = at_s - deadline_clock_s()) > 0;)
        if (left_s > spun_s) {
            struct timespec time;
            time.tv_sec = (time_t)(left_s - spun_s);
            time.tv_nsec = (long)(1e9 * (left_s - spun_s - (double)time.tv_sec));
            nanosleep(&time, NULL);
        }
}
#endif

static uint64_t transfer_begin(struct transfers *t, enum transfer_direction direction, void *to, const void *from,
                               size_t bytes, struct device *dev) {
    const uint64_t number = ++t->begun[direction];
    if (number > TRANSFER_EVENTS)
        transfers_copy_until(t, direction, number - TRANSFER_EVENTS); // whose place this one takes
    const struct transfer_copy copy = {to, from, bytes, 0};
    struct transfer_copy *mine = &t->copies[direction][number % TRANSFER_EVENTS];
    *mine = copy;
    if (t->bytes_per_s > 0) {
        const double now_s = TRANSFER_CLOCK_S(), free_s = t->free_s[direction];
        mine->done_s = t->free_s[direction] = (free_s > now_s ? free_s : now_s) + (double)bytes / t->bytes_per_s;
    }
    if (!t->late[direction])
        transfers_copy_until(t, direction, number);
    return transfer_ticket(direction, 0, number);
}
static void transfer_wait(struct transfers *t, uint64_t ticket, struct device *dev) {
    const enum transfer_direction direction = transfer_direction_of(ticket);
    const uint64_t number = transfer_number_of(ticket);
    if (ticket == 0)
        return;
    transfers_copy_until(t, direction, number);
    if (t->bytes_per_s > 0) {
        const double begin_s = TRANSFER_CLOCK_S();
        TRANSFER_SLEEP_UNTIL(t->copies[direction][number % TRANSFER_EVENTS].done_s);
        t->waited_s += TRANSFER_CLOCK_S() - begin_s;
    }
}

static void transfers_measure_copies(struct transfers *t, char *device_memory, char *host, size_t bytes,
                                     struct device *dev, double gbps[TRANSFER_DIRECTIONS]) {
    for (int d = 0; d < TRANSFER_DIRECTIONS; d++) {
        const bool to_host = d == TRANSFER_TO_HOST;
        const double begin_s = TRANSFER_CLOCK_S();
        const uint64_t ticket =
            transfer_begin(t, to_host ? TRANSFER_TO_HOST : TRANSFER_TO_DEVICE, to_host ? host : device_memory + bytes,
                           to_host ? device_memory : host + bytes, bytes, dev);
        transfer_wait(t, ticket, dev);
        gbps[d] = 1e-9 * (double)bytes / (TRANSFER_CLOCK_S() - begin_s);
    }
}

#endif

static void transfers_measure(struct transfers *t, struct device *dev, size_t bytes, double gbps[TRANSFER_DIRECTIONS]) {
    char *device_memory = (char *)device_allocate(2 * bytes), *host = (char *)host_reserve(2 * bytes);
    for (int round = 0; round < 2; round++) // the first one is slow: the driver's first copies
        transfers_measure_copies(t, device_memory, host, bytes, dev, gbps);
    host_release(host, 2 * bytes);
    device_free(device_memory, 2 * bytes);
}
