// Memory of the device: allocation, only at start-up, and copies, which are enqueued like any op. On the cuda target a
// host buffer that is copied from must stay until the copy is done (device_event_record, device_event_wait), and must
// be pinned (host_allocate, host_reserve) for the host not to wait for the copy.
#pragma once
#include "kernels/device.cuh"              // struct device, cuda_check
#include "runtime/machine/error.h"         // fail
#include "runtime/machine/memory_limits.h" // memory_available_bytes
#include "runtime/machine/numa.h"          // numa_bind_thread, numa_node_of_pci
#include <errno.h>                         // errno
#include <stdio.h>                         // snprintf
#include <stdlib.h>                        // malloc, free
#include <sys/mman.h>                      // mmap, madvise
#include <sys/resource.h>                  // getrlimit
#include <unistd.h>                        // sysconf

// Allocates `bytes` of the device's memory, aligned to 256 at least, zero on the cpu target and unset on a GPU; returns
// NULL for 0 bytes. The caller frees it by device_free. Ends the program where there is too little.
static void *device_allocate(size_t bytes);
// Frees memory of device_allocate or device_allocate_untouched, or NULL. The cpu target unmaps the allocated `bytes`.
static void device_free(void *memory, size_t bytes);
// Allocates as device_allocate does, but touches nothing: on the cpu target a page lies on the NUMA node of the thread
// that touches it first. The caller calls device_touch for each buffer in the memory.
static void *device_allocate_untouched(size_t bytes);
// Touches the pages of a buffer in device_allocate_untouched's memory, on the threads that ops use for them. It zeroes
// each page's first byte, which may be another buffer's: touch all before any is used. Does nothing on the cuda target.
static void device_touch(void *memory, size_t bytes);

// Allocates zeroed host memory, pinned on the cuda target, never NULL; host_free frees it. Ends the program on failure.
static void *host_allocate(size_t bytes, struct device *dev);
// Frees memory of host_allocate; does nothing for NULL.
static void host_free(void *memory);

// Allocates zeroed memory of the host in one mapping, for what is offloaded; NULL for 0 bytes. The caller frees it by
// host_release. Threads touch a part of its pages each. The cuda target takes pages of the GPU's NUMA node, if known,
// and pins them, so that copies do not wait. Ends the program where memory is too little or can't be pinned.
static void *host_reserve(size_t bytes);
// Unpins and frees memory of host_reserve, with the same `bytes`; does nothing for NULL.
static void host_release(void *memory, size_t bytes);

// Enqueues a copy of `bytes` from host memory, which must not change until it is done. Waits if that is not pinned.
static inline void device_upload(void *device_memory, const void *host, size_t bytes, struct device *dev);
// Enqueues a copy of `bytes` to the host, which has them after device_synchronize or the wait for a later event.
static inline void device_download_begin(void *host, const void *device_memory, size_t bytes, struct device *dev);
// Enqueues a copy of `bytes` within the device's memory, between ranges that do not overlap.
static inline void device_copy(void *to, const void *from, size_t bytes, struct device *dev);
// Copies `bytes` to the host; returns when the copy, and all work enqueued before it, is done.
static inline void device_download(void *host, const void *device_memory, size_t bytes, struct device *dev);
static inline void device_zero(void *device_memory, size_t bytes, struct device *dev);

__attribute__((noreturn)) static void device_out_of_memory(size_t bytes, const char *why) {
    fail("cannot allocate %.2f GiB (%zu bytes) of memory: %s; lower --micro-batch-size or --seq-length, or recompute "
         "activations (--recompute-granularity full); --plan shows what takes how much",
         (double)bytes / (1 << 30), bytes, why);
}

// Ends the program, as `bytes` of host memory can't be allocated, or pinned. `why` is the system's message or CUDA's.
__attribute__((noreturn)) static void host_out_of_memory(size_t bytes, const char *why) {
    struct rlimit limit;
    char lockable[32] = "all of it";
    if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
        snprintf(lockable, sizeof lockable, "%.2f GiB", (double)limit.rlim_cur / (1 << 30));
    fail(
        "cannot %s %.2f GiB (%zu bytes) of the host's memory: %s; the machine and its cgroup (memory.max) leave %.2f GiB, "
        "and a process may lock %s (ulimit -l, --ulimit memlock=-1 of a container; WSL2 pins about 1 GiB); offload less "
        "by a smaller --optimizer-offload-fraction or --cpu-offloading-num-layers; --plan shows what takes how much",
        DEVICE_MEMORY_IS_HOSTS ? "allocate" : "pin", (double)bytes / (1 << 30), bytes, why,
        (double)memory_available_bytes() / (1 << 30), lockable);
}

// ---- mappings of the host's memory ----

// Returns bytes rounded up to a multiple of the system's page size, which is not a huge page's.
static size_t whole_pages_bytes(size_t bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (bytes / page + (bytes % page != 0)) * page;
}
// Maps `bytes` > 0 of zeroed memory, with huge pages where Linux has them, and touches no page. The caller unmaps
// whole_pages_bytes(bytes). Returns NULL, with errno set, where Linux refuses.
static char *mapping_reserve(size_t bytes) {
    // A huge page begins at a multiple of its size: map that much more, give the ends back.
    const size_t huge_page = 2u << 20, slack = bytes >= huge_page ? huge_page : 0;
    size_t mapped_bytes;
    char *mapped = (char *)MAP_FAILED;
    errno = ENOMEM;
    if (!__builtin_add_overflow(bytes, slack, &mapped_bytes))
        mapped = (char *)mmap(NULL, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == (char *)MAP_FAILED)
        return NULL;
    const size_t before = slack ? (huge_page - (uintptr_t)mapped % huge_page) % huge_page : 0;
    char *base = mapped + before;
    const size_t after = slack - before, used = whole_pages_bytes(bytes);
    if (before > 0)
        munmap(mapped, before);
    if (after > 0)
        munmap(base + used, after);
    madvise(base, used, MADV_HUGEPAGE); // a wish: kernels without huge pages refuse it
    return base;
}
// Zeroes the first byte of each page of [memory, memory + bytes). Threads share the pages by a static loop. Meanwhile
// they run on the CPUs of NUMA node `node`, whose memory then has the pages; -1 leaves threads where they run.
static void mapping_touch(void *memory, size_t bytes, int node) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = (uintptr_t)memory / page;
    const int64_t pages = bytes > 0 ? (int64_t)(((uintptr_t)memory + bytes - 1) / page - first) + 1 : 0;
#pragma omp parallel
    {
        struct numa_binding binding;
        numa_bind_thread(&binding, NUMA_NODES, node);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < pages; i++)
            *(volatile char *)((first + (uintptr_t)i) * page) = 0;
        numa_restore_thread(&binding);
    }
}

#ifdef TARGET_CUDA

static void *device_allocate_untouched(size_t bytes) {
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
static void *device_allocate(size_t bytes) { return device_allocate_untouched(bytes); }
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

// Returns the NUMA node of this thread's GPU, or -1 if it is not known.
static int device_numa_node(void) {
    int index;
    char address[32]; // domain:bus:device.function
    cuda_check(cudaGetDevice(&index));
    cuda_check(cudaDeviceGetPCIBusId(address, sizeof address, index));
    return numa_node_of_pci(PCI_DEVICES, address);
}
// Maps and touches zeroed pages, then pins them: 21 s for 500 GB, where cudaHostAlloc, in one thread, takes 398 s.
static void *host_reserve(size_t bytes) {
    char *memory = bytes > 0 ? mapping_reserve(bytes) : NULL;
    if (bytes == 0)
        return NULL;
    if (!memory)
        host_out_of_memory(bytes, strerror(errno));
    mapping_touch(memory, bytes, device_numa_node());
    const cudaError_t status = cudaHostRegister(memory, whole_pages_bytes(bytes), cudaHostRegisterDefault);
    if (status != cudaSuccess) {
        cudaGetLastError(); // clears the error, which the next check would find
        munmap(memory, whole_pages_bytes(bytes));
        host_out_of_memory(bytes, cudaGetErrorString(status));
    }
    return memory;
}
static void host_release(void *memory, size_t bytes) {
    if (!memory)
        return;
    cuda_check(cudaHostUnregister(memory));
    munmap(memory, whole_pages_bytes(bytes));
}

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

static void *device_allocate_untouched(size_t bytes) {
    char *memory = bytes > 0 ? mapping_reserve(bytes) : NULL;
    if (bytes > 0 && !memory)
        device_out_of_memory(bytes, strerror(errno));
    return memory;
}
static void device_touch(void *memory, size_t bytes) { mapping_touch(memory, bytes, -1); }
static void *device_allocate(size_t bytes) {
    void *memory = device_allocate_untouched(bytes);
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

static void *host_reserve(size_t bytes) {
    char *memory = bytes > 0 ? mapping_reserve(bytes) : NULL;
    if (bytes > 0 && !memory)
        host_out_of_memory(bytes, strerror(errno));
    mapping_touch(memory, bytes, -1);
    return memory;
}
static void host_release(void *memory, size_t bytes) { device_free(memory, bytes); }

// Copies bytes, to a range that does not overlap, in all threads: one thread does not reach the memory's bandwidth.
static inline void memory_copy(void *to, const void *from, size_t bytes) {
    const int64_t chunk = 1 << 20, chunks = ((int64_t)bytes + chunk - 1) / chunk;
#pragma omp parallel for if (chunks > 1)
    for (int64_t i = 0; i < chunks; i++) {
        const int64_t begin = i * chunk, rest = (int64_t)bytes - begin;
        memcpy((char *)to + begin, (const char *)from + begin, (size_t)(rest < chunk ? rest : chunk));
    }
}

static inline void device_upload(void *device_memory, const void *host, size_t bytes, struct device *dev) {
    memory_copy(device_memory, host, bytes);
}
static inline void device_download_begin(void *host, const void *device_memory, size_t bytes, struct device *dev) {
    memory_copy(host, device_memory, bytes);
}
static inline void device_download(void *host, const void *device_memory, size_t bytes, struct device *dev) {
    memory_copy(host, device_memory, bytes);
}
static inline void device_copy(void *to, const void *from, size_t bytes, struct device *dev) {
    memory_copy(to, from, bytes);
}
static inline void device_zero(void *device_memory, size_t bytes, struct device *dev) {
    const int64_t chunk = 1 << 20, chunks = ((int64_t)bytes + chunk - 1) / chunk;
#pragma omp parallel for
    for (int64_t i = 0; i < chunks; i++) {
        const int64_t begin = i * chunk, rest = (int64_t)bytes - begin;
        memset((char *)device_memory + begin, 0, (size_t)(rest < chunk ? rest : chunk));
    }
}

#endif
