// Checks copies between the memories of host and device, as offloading makes them, with known numbers.
#pragma once
#include "kernels/device_memory.cuh" // host_allocate, device_copy
#include "kernels/device_queue.cuh"  // device_synchronize
#include "kernels/transfers.cuh"     // transfer_begin, transfer_wait
#include "runtime/machine/error.h"   // fail

enum { COPIES = 8 };
// Whether numbers are the same after being copied to the device, within it, and back. Makes COPIES copies of `bytes`
// each way by t, which is open, and waits for them. Overwrites 2 COPIES * bytes of the device, at `memory`.
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
