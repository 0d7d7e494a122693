// Memory for op tests on a GPU, which the host reads and writes too; scripts/gpu_check.mk includes this before each of
// them.
//
// It is managed memory or, with TEST_MEMORY=pinned in the environment, pinned memory of the host, which the GPU reads
// and writes over PCIe at the same address (CUDA C++ Programming Guide, "Unified Virtual Address Space"). Some virtual
// machines refuse managed memory, or hang on it; test/cuda/memory_probe.cu finds out.
#pragma once
#include <cuda_runtime.h> // cudaMallocManaged, cudaMallocHost
#include <stdlib.h>       // getenv
#include <string.h>       // strcmp

static inline cudaError_t host_visible_allocate(void **memory, size_t bytes, unsigned flags = cudaMemAttachGlobal) {
    const char *kind = getenv("TEST_MEMORY");
    return kind && strcmp(kind, "pinned") == 0 ? cudaMallocHost(memory, bytes)
                                               : cudaMallocManaged(memory, bytes, flags);
}
static inline cudaError_t host_visible_free(void *memory) {
    struct cudaPointerAttributes attributes;
    const cudaError_t status = cudaPointerGetAttributes(&attributes, memory);
    if (status != cudaSuccess)
        return status;
    return attributes.type == cudaMemoryTypeHost ? cudaFreeHost(memory) : cudaFree(memory);
}
#define cudaMallocManaged host_visible_allocate
#define cudaFree host_visible_free
