// The GPU that --plan-gpu names, whose memory is planned and whose times are predicted.
#pragma once
#include "config/config.h"    // struct config
#include "kernels/device.cuh" // struct compute_capability
#include "run/gpu_names.h"    // gpu_asked, gpu_name

// Returns the row of --plan-gpu, of alike ones the slowest, or NULL if none is named. Ends the program for a bad name.
static const struct gpu_peak *planned_gpu(const struct config *c) { return gpu_asked(c->memory.plan_gpu); }
// Returns the compute capability of the GPU that --plan-gpu names; major is 0 if none is named.
static struct compute_capability planned_capability(const struct config *c) {
    const struct gpu_peak *gpu = planned_gpu(c);
    struct compute_capability capability = {0, 0};
    if (gpu) {
        capability.major = gpu->capability / 10;
        capability.minor = gpu->capability % 10;
    }
    return capability;
}
enum { PLANNED_DRIVER_MIB = 1 << 10 };
// The number of bytes that a plan may take on --plan-gpu's GPU, which must be given: all but PLANNED_DRIVER_MIB.
static size_t planned_gpu_bytes(const struct config *c) {
    return (size_t)(planned_gpu(c)->memory_mib - PLANNED_DRIVER_MIB) << 20;
}
