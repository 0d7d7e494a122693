// Copies between the memories of host and device on known numbers, as offloading makes them.
#pragma once
#include "kernels/device_memory.cuh" // host_allocate, device_copy
#include "kernels/device_queue.cuh"  // device_synchronize
#include "kernels/transfers.cuh"     // transfer_begin, transfer_wait
#include "runtime/machine/error.h"   // fail

enum { COPIES = 8 };
// Whether numbers that are copied to the device, there to another place and back are what they were. Makes and awaits
// COPIES copies of `bytes` each way, by t, which is open; overwrites 2 COPIES * bytes at `memory` of the device.
static bool copies_are_right(struct transfers *t, char *memory, size_t bytes, struct device *dev) {
    const size_t all = COPIES * bytes;
    char *const host = (char *)host_allocate(2 * all, dev);
    uint64_t back[COPIES];
    for (size_t i = 0; i < all / sizeof(uint32_t); i++)
        ((uint32_t *)host)[i] = (uint32_t)i * 2654435761u + 1;
    memset(host + all, 0, all);
    for (size_t i = 0; i < COPIES; i++) {
        transfer_wait(t, transfer_begin(t, TRANSFER_TO_DEVICE, memory + i * bytes, host + i * bytes, bytes, dev), dev);
        device_copy(memory + all + i * bytes, memory + i * bytes, bytes, dev);
        back[i] = transfer_begin(t, TRANSFER_TO_HOST, host + all + i * bytes, memory + all + i * bytes, bytes, dev);
    }
    for (size_t i = 0; i < COPIES; i++)
        transfer_wait(t, back[i], dev);
    device_synchronize(dev);
    const bool equal = memcmp(host, host + all, all) == 0;
    host_free(host);
    return equal;
}
