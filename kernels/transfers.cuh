// Copies between device and host memory while the device computes: what offloading moves.
//
//   cuda target   one stream for each direction beside the device's; host memory must be pinned
//   cpu target    copied at once; with a bus rate a wait lasts until a bus of that rate would have carried the bytes
//
// A transfer begins when all work that was enqueued on the device before it is done. From there to transfer_wait nobody
// else may write its operands, nor read what it writes. Transfers of one direction run in the order in which they began.
// Every transfer is waited for; one that began while a graph is recorded, before the recording ends.
#pragma once
#include "kernels/device.cuh"         // struct device, cuda_check
#include "kernels/device_memory.cuh"  // device_free
#include "runtime/machine/deadline.h" // deadline_clock_s
#include <unistd.h>                   // usleep

enum transfer_direction { TRANSFER_TO_HOST, TRANSFER_TO_DEVICE };
enum { TRANSFER_DIRECTIONS = 2, TRANSFER_EVENTS = 64 }; // transfers in flight of one direction, at most

struct transfers; // one per process; its members are the target's own

// bus_gbps: 1e9 bytes a second each way that the cpu target's copies seem to take; 0, and on the cuda target: as fast as
// they are. Closing waits for the transfers in flight.
static void transfers_open(struct transfers *t, double bus_gbps, struct device *dev);
static void transfers_close(struct transfers *t, struct device *dev);
// Begins a copy; returns a ticket for transfer_wait, never 0.
static uint64_t transfer_begin(struct transfers *t, enum transfer_direction direction, void *to, const void *from,
                               size_t bytes, struct device *dev);
// Makes all work that is enqueued on the device from here on wait for the transfer. Ticket 0: nothing to wait for.
static void transfer_wait(struct transfers *t, uint64_t ticket, struct device *dev);
// Seconds so far in which the device waited for transfers: known on the cpu target with a bus rate, else 0.
static double transfers_waited_s(const struct transfers *t);

// A ticket is the transfer's number in its direction, from 1, and the direction.
static inline uint64_t transfer_ticket(enum transfer_direction direction, uint64_t number) {
    return 2 * number + (direction == TRANSFER_TO_DEVICE);
}
static inline enum transfer_direction transfer_direction_of(uint64_t ticket) {
    return ticket % 2 ? TRANSFER_TO_DEVICE : TRANSFER_TO_HOST;
}

#ifdef TARGET_CUDA

struct transfers {
    cudaStream_t streams[TRANSFER_DIRECTIONS];
    cudaEvent_t ready[TRANSFER_DIRECTIONS];
    cudaEvent_t done[TRANSFER_DIRECTIONS][TRANSFER_EVENTS];
    uint64_t begun[TRANSFER_DIRECTIONS];
    bool open;
};
static void transfers_open(struct transfers *t, double bus_gbps, struct device *dev) {
    memset(t, 0, sizeof *t);
    for (int d = 0; d < TRANSFER_DIRECTIONS; d++) {
        cuda_check(cudaStreamCreateWithFlags(&t->streams[d], cudaStreamNonBlocking));
        cuda_check(cudaEventCreateWithFlags(&t->ready[d], cudaEventDisableTiming));
        for (int i = 0; i < TRANSFER_EVENTS; i++)
            cuda_check(cudaEventCreateWithFlags(&t->done[d][i], cudaEventDisableTiming));
    }
    t->open = true;
}
static void transfers_close(struct transfers *t, struct device *dev) {
    for (int d = 0; d < TRANSFER_DIRECTIONS && t->open; d++) {
        cuda_check(cudaStreamSynchronize(t->streams[d]));
        for (int i = 0; i < TRANSFER_EVENTS; i++)
            cuda_check(cudaEventDestroy(t->done[d][i]));
        cuda_check(cudaEventDestroy(t->ready[d]));
        cuda_check(cudaStreamDestroy(t->streams[d]));
    }
    t->open = false;
}
static uint64_t transfer_begin(struct transfers *t, enum transfer_direction direction, void *to, const void *from,
                               size_t bytes, struct device *dev) {
    const uint64_t number = ++t->begun[direction];
    cuda_check(cudaEventRecord(t->ready[direction], dev->stream));
    cuda_check(cudaStreamWaitEvent(t->streams[direction], t->ready[direction], 0));
    cuda_check(cudaMemcpyAsync(to, from, bytes,
                               direction == TRANSFER_TO_HOST ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice,
                               t->streams[direction]));
    cuda_check(cudaEventRecord(t->done[direction][number % TRANSFER_EVENTS], t->streams[direction]));
    return transfer_ticket(direction, number);
}
// An event that was recorded again since is a later transfer's of the same stream: waiting for it waits for both.
static void transfer_wait(struct transfers *t, uint64_t ticket, struct device *dev) {
    if (ticket != 0)
        cuda_check(
            cudaStreamWaitEvent(dev->stream, t->done[transfer_direction_of(ticket)][ticket / 2 % TRANSFER_EVENTS], 0));
}
static double transfers_waited_s(const struct transfers *t) { return 0; }
// What a stream other than the device's waits for before it reads what the transfer wrote.
static cudaEvent_t transfer_event(const struct transfers *t, uint64_t ticket) {
    return t->done[transfer_direction_of(ticket)][ticket / 2 % TRANSFER_EVENTS];
}

#else

struct transfers {
    double bytes_per_s; // of the bus that copies seem to take; 0: none
    uint64_t begun[TRANSFER_DIRECTIONS];
    double free_s[TRANSFER_DIRECTIONS];                  // when the bus has carried all that began
    double done_s[TRANSFER_DIRECTIONS][TRANSFER_EVENTS]; // when a transfer seems done
    double waited_s;
};
static void transfers_open(struct transfers *t, double bus_gbps, struct device *dev) {
    memset(t, 0, sizeof *t);
    t->bytes_per_s = 1e9 * bus_gbps;
}
static void transfers_close(struct transfers *t, struct device *dev) {}
static uint64_t transfer_begin(struct transfers *t, enum transfer_direction direction, void *to, const void *from,
                               size_t bytes, struct device *dev) {
    const uint64_t number = ++t->begun[direction];
    if (t->bytes_per_s > 0) {
        const double now_s = deadline_clock_s(), *free_s = &t->free_s[direction];
        t->free_s[direction] = (*free_s > now_s ? *free_s : now_s) + (double)bytes / t->bytes_per_s;
        t->done_s[direction][number % TRANSFER_EVENTS] = t->free_s[direction];
    }
    memcpy(to, from, bytes);
    return transfer_ticket(direction, number);
}
static void transfer_wait(struct transfers *t, uint64_t ticket, struct device *dev) {
    if (ticket == 0 || t->bytes_per_s == 0)
        return;
    const double begin_s = deadline_clock_s(),
                 rest_s = t->done_s[transfer_direction_of(ticket)][ticket / 2 % TRANSFER_EVENTS] - begin_s;
    if (rest_s > 0)
        usleep((useconds_t)(1e6 * rest_s));
    t->waited_s += deadline_clock_s() - begin_s;
}
static double transfers_waited_s(const struct transfers *t) { return t->waited_s; }

#endif
