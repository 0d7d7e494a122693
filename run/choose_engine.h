// The choice of the engine's copy: by --device, --precision, and what this build and this machine have.
#pragma once
#include "config.h"                // struct config
#include "kernels/amx.cuh"         // amx_available
#include "run/engine.h"            // the copies of the engine
#include "runtime/machine/error.h" // fail
#include "runtime/text/log.h"      // log_row
#include <stdio.h>                 // printf

// The engines for CUDA, where the build has them; why they can't be used ("": they can); their rows of --version.
#ifdef HAVE_CUDA
enum { CUDA_IS_BUILT = 1 };
static engine_entry *cuda_engine(enum config_precision precision) {
    switch (precision) {
    case WITH_FP32: return train_cuda_fp32;
    case WITH_BF16:
    case WITH_AUTO: return train_cuda_bf16;
    }
    __builtin_unreachable();
}
static const char *cuda_unavailable_reason(void) { return train_cuda_bf16_unavailable_reason(); }
static void cuda_describe(void) {
    log_row("cuda", "fp32 and bf16, for %s", GPU_ARCHITECTURES);
    train_cuda_bf16_libraries();
}
#else
enum { CUDA_IS_BUILT = 0 };
static engine_entry *cuda_engine(enum config_precision precision) { return NULL; }
static const char *cuda_unavailable_reason(void) { return "this train_gpt was built without it (make cuda builds it)"; }
static void cuda_describe(void) { log_row("cuda", "%s", cuda_unavailable_reason()); }
#endif
static engine_entry *cpu_engine(enum config_precision precision) {
    switch (precision) {
    case WITH_FP32: return train_cpu_fp32;
    case WITH_BF16: return train_cpu_bf16;
    case WITH_AUTO: return amx_available() ? train_cpu_bf16 : train_cpu_fp32;
    }
    __builtin_unreachable();
}

// The device of --device auto: a GPU where one can be used. Where a build for GPUs finds none, prints why.
static enum config_device choose_device(void) {
    const char *reason = cuda_unavailable_reason();
    if (CUDA_IS_BUILT && *reason)
        printf("no GPU is used: %s\n", reason);
    return *reason ? DEVICE_CPU : DEVICE_CUDA;
}
// Ends the program where --device cuda can't be used. A plan needs a build for CUDA, but no GPU.
static void check_cuda(bool plans) {
    const char *reason = cuda_unavailable_reason();
    if (*reason && !(CUDA_IS_BUILT && plans))
        fail("--device cuda: %s; --device cpu trains on the CPU", reason);
}

// The engine for the options' target and precision; auto is decided by this machine. Sets config->device.
static engine_entry *choose_engine(struct config *config) {
    switch (config->device) {
    case DEVICE_AUTO: config->device = choose_device(); break;
    case DEVICE_CUDA: check_cuda(config->plan); break;
    case DEVICE_CPU: break;
    }
    return config->device == DEVICE_CUDA ? cuda_engine(config->precision) : cpu_engine(config->precision);
}
