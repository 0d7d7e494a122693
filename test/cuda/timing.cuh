// Helpers for programs that time the GPU: data, and the time of a call.
#pragma once
#include "kernels/device_memory.cuh" // device_allocate, device_upload
#include "kernels/device_queue.cuh"  // device_synchronize
#include <stdlib.h>                  // malloc, free, qsort
#include <string.h>                  // memcpy

static int by_value(const void *x, const void *y) { return *(const float *)x < *(const float *)y ? -1 : 1; }
// Returns the median time of call(argument) on the device's stream, by events, after calls that are not timed.
static float median_ms(void (*call)(void *), void *argument, struct device *dev) {
    enum { WARM_UP = 3, REPEATS = 11 };
    float times[REPEATS];
    cudaEvent_t events[REPEATS][2];
    for (int i = 0; i < 2 * REPEATS; i++)
        cuda_check(cudaEventCreate(&events[i / 2][i % 2]));
    for (int i = 0; i < WARM_UP; i++)
        call(argument);
    for (int i = 0; i < REPEATS; i++) { // without a wait in between, so that the host's work is hidden
        cuda_check(cudaEventRecord(events[i][0], dev->stream));
        call(argument);
        cuda_check(cudaEventRecord(events[i][1], dev->stream));
    }
    cuda_check(cudaEventSynchronize(events[REPEATS - 1][1]));
    for (int i = 0; i < REPEATS; i++)
        cuda_check(cudaEventElapsedTime(&times[i], events[i][0], events[i][1]));
    for (int i = 0; i < 2 * REPEATS; i++)
        cuda_check(cudaEventDestroy(events[i / 2][i % 2]));
    qsort(times, REPEATS, sizeof times[0], by_value);
    return times[REPEATS / 2];
}

// Returns n numbers in the device's memory, uniform in [-1.73, 1.73), whose deviation of 1 is PyTorch's randn's: the
// power that a GPU draws, and so its clock, depends on the data. A million numbers repeat. device_free frees them.
static bf16 *random_array(int64_t n, struct device *dev) {
    bf16 *host = (bf16 *)malloc((size_t)n * sizeof *host), *memory = (bf16 *)device_allocate((size_t)n * sizeof *host);
    const int64_t period = 1000003;
    uint32_t x = 1;
    for (int64_t i = 0; i < n && i < period; i++) {
        x = x * 1664525u + 1013904223u;
        host[i] = bf16_from_float(((float)(x >> 8) * 0x1p-23f - 1) * 1.7320508f);
    }
    for (int64_t i = period; i < n; i += period)
        memcpy(host + i, host, (size_t)(n - i < period ? n - i : period) * sizeof *host);
    device_upload(memory, host, (size_t)n * sizeof *host, dev);
    device_synchronize(dev);
    free(host);
    return memory;
}
