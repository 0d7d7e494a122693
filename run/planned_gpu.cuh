// The GPU that --plan-gpu names, whose memory is planned and whose times are predicted.
#pragma once
#include "config/config.h"         // struct config
#include "kernels/device.cuh"      // struct compute_capability
#include "kernels/gpu_peak.cuh"    // gpu_peak_find
#include "runtime/machine/error.h" // fail

// Returns the row of the GPU that --plan-gpu names; NULL: none is named. Ends the program where the name is not known.
static const struct gpu_peak *planned_gpu(const struct config *c) {
    const struct gpu_peak *gpu = *c->memory.plan_gpu ? gpu_peak_find(c->memory.plan_gpu) : NULL;
    if (*c->memory.plan_gpu && gpu == NULL)
        fail("--plan-gpu '%s' is not a GPU whose data sheet is known; expected a name like 'H100 80GB HBM3', 'A100' or "
             "'GeForce RTX 4090'",
             c->memory.plan_gpu);
    return gpu;
}
// Returns the compute capability of the GPU that --plan-gpu names; major 0: none is named.
static struct compute_capability planned_capability(const struct config *c) {
    const struct gpu_peak *gpu = planned_gpu(c);
    struct compute_capability capability = {0, 0};
    if (gpu) {
        capability.major = gpu->capability / 10;
        capability.minor = gpu->capability % 10;
    }
    return capability;
}
enum { PLANNED_DRIVER_BYTES = 1 << 30 };
// The number of bytes of the named GPU's memory that a plan may take. A driver's context and the kernels take about
// PLANNED_DRIVER_BYTES, an estimate, not measured. A GPU must be named.
static size_t planned_gpu_bytes(const struct config *c) {
    return (size_t)(planned_gpu(c)->memory_gib * 0x1p30) - PLANNED_DRIVER_BYTES;
}
