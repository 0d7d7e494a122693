// Memory of the device: allocation, which happens at start-up alone, and copies.
//
// Copies and zeroing are enqueued like any op. On the cuda target a host buffer that is copied from must stay as it is
// until the copy is done (device_event_record, device_event_wait), and must come from host_allocate for the copy to run
// by itself.
#pragma once
#include "kernels/device.cuh"      // struct device, cuda_check
#include "runtime/machine/error.h" // fail
#include <errno.h>                 // errno
#include <stdio.h>                 // snprintf
#include <stdlib.h>                // malloc, free
#include <sys/mman.h>              // mmap, madvise
#include <unistd.h>                // sysconf

// `bytes` of the device's memory, aligned to 256 at least, zero on the cpu target and unset on a GPU; NULL for 0 bytes.
// The caller frees them, and says how many they are. Fails where there are not so many.
static void *device_allocate(size_t bytes);
static void device_free(void *memory, size_t bytes);
// device_allocate in two steps, for memory that holds several buffers: on the cpu target a page lies on the NUMA node of
// the thread that touches it first. device_reserve touches nothing. device_touch divides the pages of `bytes` among the
// threads by a static loop, as ops divide their operands; it writes, and so comes before all use of the memory.
static void *device_reserve(size_t bytes);
static void device_touch(void *memory, size_t bytes);

// Memory of the host, zeroed, pinned on the cuda target; never NULL. The caller frees it. Fails where there is too
// little.
static void *host_allocate(size_t bytes, struct device *dev);
static void host_free(void *memory);

// Memory of the host in one mapping, zeroed, for what is offloaded: pinned on the cuda target, its pages touched by all
// threads; NULL for 0 bytes. The caller releases it, and says how many bytes they are. Fails where there is too little.
static void *host_reserve(size_t bytes);
static void host_release(void *memory, size_t bytes);

// Each enqueues one copy of `bytes`: from host to device, from device to host, within the device.
static inline void device_upload(void *device_memory, const void *host, size_t bytes, struct device *dev);
static inline void device_download_begin(void *host, const void *device_memory, size_t bytes, struct device *dev);
static inline void device_copy(void *to, const void *from, size_t bytes, struct device *dev);
// As device_download_begin; returns when the copy, and all work enqueued before it, is done.
static inline void device_download(void *host, const void *device_memory, size_t bytes, struct device *dev);
// Enqueues the zeroing of `bytes`.
static inline void device_zero(void *device_memory, size_t bytes, struct device *dev);

__attribute__((noreturn)) static void device_out_of_memory(size_t bytes, const char *why) {
    fail("cannot allocate %.2f GiB (%zu bytes) of memory: %s; lower --micro-batch-size or --seq-length, or recompute "
         "activations (--recompute-granularity full); --plan shows what takes how much",
         (double)bytes / (1 << 30), bytes, why);
}

#ifdef TARGET_CUDA

static void *device_reserve(size_t bytes) {
    void *memory = NULL;
    if (bytes == 0)
        return NULL;
#ifdef DEVICE_MEMORY_MANAGED // for tests, which look at the device's memory from the host
    const cudaError_t status = cudaMallocManaged(&memory, bytes, cudaMemAttachGlobal);
#else
    const cudaError_t status = cudaMalloc(&memory, bytes);
#endif
    if (status != cudaSuccess)
        device_out_of_memory(bytes, cudaGetErrorString(status));
    return memory;
}
static void device_touch(void *memory, size_t bytes) {}
static void *device_allocate(size_t bytes) { return device_reserve(bytes); }
static void device_free(void *memory, size_t bytes) {
    if (memory)
        cuda_check(cudaFree(memory));
}

static void *host_allocate(size_t bytes, struct device *dev) {
    void *memory = NULL;
    if (bytes == 0)
        bytes = 1;
    cuda_check(cudaMallocHost(&memory, bytes));
    memset(memory, 0, bytes);
    return memory;
}
static void host_free(void *memory) {
    if (memory)
        cuda_check(cudaFreeHost(memory));
}

static void *host_reserve(size_t bytes) { return bytes > 0 ? host_allocate(bytes, NULL) : NULL; }
static void host_release(void *memory, size_t bytes) { host_free(memory); }

static inline void device_upload(void *device_memory, const void *host, size_t bytes, struct device *dev) {
    cuda_check(cudaMemcpyAsync(device_memory, host, bytes, cudaMemcpyHostToDevice, dev->stream));
}
static inline void device_download_begin(void *host, const void *device_memory, size_t bytes, struct device *dev) {
    cuda_check(cudaMemcpyAsync(host, device_memory, bytes, cudaMemcpyDeviceToHost, dev->stream));
}
static inline void device_download(void *host, const void *device_memory, size_t bytes, struct device *dev) {
    device_download_begin(host, device_memory, bytes, dev);
    cuda_check(cudaStreamSynchronize(dev->stream));
}
static inline void device_copy(void *to, const void *from, size_t bytes, struct device *dev) {
    cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, dev->stream));
}
static inline void device_zero(void *device_memory, size_t bytes, struct device *dev) {
    cuda_check(cudaMemsetAsync(device_memory, 0, bytes, dev->stream));
}

#else

// One mapping, with huge pages where the kernel has them.
static void *device_reserve(size_t bytes) {
    if (bytes == 0)
        return NULL;
    // A huge page begins at a multiple of its size: map that much more, give the ends back.
    const size_t huge_page = 2u << 20, slack = bytes >= huge_page ? huge_page : 0;
    size_t mapped_bytes;
    char *mapped = (char *)MAP_FAILED;
    errno = ENOMEM;
    if (!__builtin_add_overflow(bytes, slack, &mapped_bytes))
        mapped = (char *)mmap(NULL, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == (char *)MAP_FAILED)
        device_out_of_memory(bytes, strerror(errno));
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), pages = bytes / page + (bytes % page != 0);
    const size_t before = slack ? (huge_page - (uintptr_t)mapped % huge_page) % huge_page : 0;
    char *base = mapped + before;
    const size_t after = slack - before, used = pages * page;
    if (before > 0)
        munmap(mapped, before);
    if (after > 0)
        munmap(base + used, after);
    madvise(base, used, MADV_HUGEPAGE); // a wish: kernels without huge pages refuse it
    return base;
}
static void device_touch(void *memory, size_t bytes) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = (uintptr_t)memory / page;
    const int64_t pages = bytes > 0 ? (int64_t)(((uintptr_t)memory + bytes - 1) / page - first) + 1 : 0;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < pages; i++)
        *(volatile char *)((first + (uintptr_t)i) * page) = 0;
}
static void *device_allocate(size_t bytes) {
    void *memory = device_reserve(bytes);
    device_touch(memory, bytes);
    return memory;
}
static void device_free(void *memory, size_t bytes) {
    if (memory)
        munmap(memory, bytes);
}

static void *host_allocate(size_t bytes, struct device *dev) {
    void *memory = calloc(1, bytes ? bytes : 1);
    if (!memory)
        device_out_of_memory(bytes, strerror(errno));
    return memory;
}
static void host_free(void *memory) { free(memory); }

static void *host_reserve(size_t bytes) { return device_allocate(bytes); }
static void host_release(void *memory, size_t bytes) { device_free(memory, bytes); }

static inline void device_upload(void *device_memory, const void *host, size_t bytes, struct device *dev) {
    memcpy(device_memory, host, bytes);
}
static inline void device_download_begin(void *host, const void *device_memory, size_t bytes, struct device *dev) {
    memcpy(host, device_memory, bytes);
}
static inline void device_download(void *host, const void *device_memory, size_t bytes, struct device *dev) {
    memcpy(host, device_memory, bytes);
}
static inline void device_copy(void *to, const void *from, size_t bytes, struct device *dev) {
    memcpy(to, from, bytes);
}
static inline void device_zero(void *device_memory, size_t bytes, struct device *dev) {
    // Memory bandwidth takes every thread.
    const int64_t chunk = 1 << 20, chunks = ((int64_t)bytes + chunk - 1) / chunk;
#pragma omp parallel for
    for (int64_t i = 0; i < chunks; i++) {
        const int64_t begin = i * chunk, rest = (int64_t)bytes - begin;
        memset((char *)device_memory + begin, 0, (size_t)(rest < chunk ? rest : chunk));
    }
}

#endif
