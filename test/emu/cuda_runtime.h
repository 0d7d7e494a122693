// Stand-ins for the part of the CUDA runtime that kernels, the engine and their tests use, on host memory.
//
// There is no __shared__: kernels take shared memory from kernels/ptx.cuh, whose wrappers see each access. Environment:
//   EMU_MEMORY_BYTES         the device's memory; 8 GiB if unset
//   CUDA_VISIBLE_DEVICES     empty or -1: no device
//   EMU_DEVICES              the number of devices; 1 if unset. All share the process's memory. They differ only in
//   that
//                            two ranks of test/emu/nccl.h can't share one.
//   EMU_CAPABILITY           the compute capability; 8.0 if unset
//   EMU_PINNED_BYTES         how much of the host's memory can be registered
//   EMU_GRAPH_NODES          the largest number of nodes of a graph that there is memory for
//   EMU_STREAMS              eager, or N: test/emu/stream.h
//   CUDA_LAUNCH_BLOCKING     1: each call runs its work before it returns, as calls on the stream NULL do
#pragma once
#include "test/emu/stream.h" // streams, events, graphs
#include "test/emu/warp.h"   // blocks, warps, shared memory
#include <tuple>             // std::tuple
#include <type_traits>       // std::decay

// The toolkit that is modeled. A test of an older one sets its number before it includes this header.
#ifndef CUDART_VERSION
#define CUDART_VERSION 13000
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__ __restrict
#define __align__(n) alignas(n)

typedef struct emu_dim3 dim3;

// --- What a kernel sees -------------------------------------------------------------------------------------------

// blockIdx, threadIdx and the like are objects, not macros, because cudaLaunchConfig_t has members of these names.
namespace {
#define EMU_DIM(name, of)                                                                                              \
    const struct emu_##name {                                                                                          \
        struct X {                                                                                                     \
            operator unsigned() const { return (of).x; }                                                               \
        } x;                                                                                                           \
        struct Y {                                                                                                     \
            operator unsigned() const { return (of).y; }                                                               \
        } y;                                                                                                           \
        struct Z {                                                                                                     \
            operator unsigned() const { return (of).z; }                                                               \
        } z;                                                                                                           \
    } name = {}
EMU_DIM(threadIdx, emu->fibers[emu->current].index);
EMU_DIM(blockIdx, emu->block_index);
EMU_DIM(blockDim, emu->size);
EMU_DIM(gridDim, emu->grid);
} // namespace
static const int warpSize = 32;

#define EMU_VECTOR(type, name, bytes)                                                                                  \
    struct alignas(bytes) name##2 {                                                                                    \
        type x, y;                                                                                                     \
    };                                                                                                                 \
    static inline struct name##2 make_##name##2(type x, type y) {                                                      \
        const struct name##2 result = {x, y};                                                                          \
        return result;                                                                                                 \
    }                                                                                                                  \
    struct alignas(2 * bytes < 16 ? 2 * bytes : 16) name##4 {                                                          \
        type x, y, z, w;                                                                                               \
    };                                                                                                                 \
    static inline struct name##4 make_##name##4(type x, type y, type z, type w) {                                      \
        const struct name##4 result = {x, y, z, w};                                                                    \
        return result;                                                                                                 \
    }
EMU_VECTOR(float, float, 8)
EMU_VECTOR(double, double, 16)
EMU_VECTOR(int, int, 8)
EMU_VECTOR(unsigned, uint, 8)

template <class To, class From> static inline To emu_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "a change of type, not of bits");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
static inline float __uint_as_float(uint32_t bits) { return emu_bits<float>(bits); }

static inline void __syncthreads(void) { emu_syncthreads(); }
static inline void __syncwarp(unsigned mask = ~0u) { emu_syncwarp(mask); }

// Returns another lane's value. A source lane outside the mask gives an undefined value on a GPU, and here a report.
template <class T> static inline T emu_shuffle(unsigned mask, T value, int source, const char *what) {
    const T *values = (const T *)emu_warp_exchange_among(mask, &value, sizeof value, what);
    if (!(mask & emu->warps[emu->current / 32].lanes & 1u << source))
        emu_report("%s reads lane %d, which is not in its mask", what, source);
    return values[source];
}
template <class T> static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    return emu_shuffle(mask, value, (emu_lane() & ~(width - 1)) | (source & (width - 1)), "__shfl_sync");
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
    const int source = emu_lane() ^ lane_mask, section = emu_lane() & ~(width - 1);
    return emu_shuffle(mask, value, source < section + width ? source : emu_lane(), "__shfl_xor_sync");
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int source = emu_lane() + (int)delta, section = emu_lane() & ~(width - 1);
    return emu_shuffle(mask, value, source < section + width ? source : emu_lane(), "__shfl_down_sync");
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int source = emu_lane() - (int)delta, section = emu_lane() & ~(width - 1);
    return emu_shuffle(mask, value, source >= section ? source : emu_lane(), "__shfl_up_sync");
}
static inline unsigned emu_ballot(unsigned mask, int predicate, const char *what) {
    const int mine = predicate != 0;
    const int *all = (const int *)emu_warp_exchange_among(mask, &mine, sizeof mine, what);
    const uint32_t lanes = mask & emu->warps[emu->current / 32].lanes;
    unsigned result = 0;
    for (int i = 0; i < 32; i++)
        if (lanes >> i & 1u)
            result |= (unsigned)all[i] << i;
    return result;
}
static inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return emu_ballot(mask, predicate, "__ballot_sync");
}
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __any_sync(unsigned mask, int predicate) { return emu_ballot(mask, predicate, "__any_sync") != 0; }
static inline int __all_sync(unsigned mask, int predicate) { return emu_ballot(mask, !predicate, "__all_sync") == 0; }

static inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    const unsigned *all = (const unsigned *)emu_warp_exchange_among(mask, &value, sizeof value, "__reduce_max_sync");
    const uint32_t lanes = mask & emu->warps[emu->current / 32].lanes;
    unsigned result = 0;
    for (int i = 0; i < 32; i++)
        if (lanes >> i & 1u && all[i] > result)
            result = all[i];
    return result;
}

// Changes a value atomically, since blocks run on several host threads. Returns the value before.
template <class T> static inline T emu_atomic(T *at, T (*change)(T, T), T operand) {
    emu_access_global(at, sizeof *at, true);
    T before, after;
    __atomic_load(at, &before, __ATOMIC_RELAXED);
    do
        after = change(before, operand);
    while (!__atomic_compare_exchange(at, &before, &after, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
    return before;
}
template <class T> static inline T atomicAdd(T *at, T x) {
    return emu_atomic<T>(
        at, [](T a, T b) -> T { return a + b; }, x);
}
template <class T> static inline T atomicMax(T *at, T x) {
    return emu_atomic<T>(
        at, [](T a, T b) -> T { return a > b ? a : b; }, x);
}
template <class T> static inline T atomicCAS(T *at, T expected, T x) {
    emu_access_global(at, sizeof *at, true);
    __atomic_compare_exchange(at, &expected, &x, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
    return expected;
}

// --- The device ---------------------------------------------------------------------------------------------------

struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin;
    int major, minor, multiProcessorCount, warpSize, maxThreadsPerBlock, l2CacheSize;
};
// Few multiprocessors, and not a power of two, so that what is divided among them doesn't divide evenly.
enum { EMU_DEFAULT_SHARED_BYTES = 48 * 1024 };

static inline const char *cudaGetErrorString(cudaError_t status) {
    switch (status) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorECCUncorrectable: return "uncorrectable ECC error encountered";
    case cudaErrorNvlinkUncorrectable: return "uncorrectable NVLink error detected during the execution";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorIllegalState: return "the operation cannot be performed in the present state";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorLaunchTimeout: return "the launch timed out and was terminated";
    case cudaErrorAssert: return "device-side assert triggered";
    case cudaErrorHardwareStackError: return "hardware stack error";
    case cudaErrorIllegalInstruction: return "an illegal instruction was encountered";
    case cudaErrorMisalignedAddress: return "misaligned address";
    case cudaErrorInvalidAddressSpace: return "operation not supported on global/shared address space";
    case cudaErrorInvalidPc: return "invalid program counter";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureMerge: return "operation would result in a merge of separate capture sequences";
    case cudaErrorStreamCaptureUnmatched: return "capture was not ended in the same stream as it began";
    case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
    case cudaErrorStreamCaptureImplicit:
        return "operation would make the legacy stream depend on a capturing blocking stream";
    case cudaErrorCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
    }
    return "unrecognized error code";
}
static inline cudaError_t cudaGetLastError(void) {
    const cudaError_t status = emu_last_error;
    emu_last_error = cudaSuccess;
    return status;
}
static inline cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
static inline cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
static inline cudaError_t cudaGetDeviceCount(int *count) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    const bool none = visible && (visible[0] == 0 || strcmp(visible, "-1") == 0);
    const char *devices = getenv("EMU_DEVICES");
    *count = none ? 0 : devices ? atoi(devices) : 1;
    return none ? emu_error(cudaErrorNoDevice) : cudaSuccess;
}
static inline cudaError_t cudaSetDevice(int device) {
    int count;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess)
        return status;
    if (device < 0 || device >= count)
        return emu_error(cudaErrorInvalidDevice);
    emu_device = device;
    return cudaSuccess;
}
static inline cudaError_t cudaGetDevice(int *device) {
    *device = emu_device;
    return cudaSuccess;
}
static inline cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "emulated GPU");
    properties->totalGlobalMem = emu_memory_bytes();
    properties->sharedMemPerBlock = EMU_DEFAULT_SHARED_BYTES;
    properties->sharedMemPerBlockOptin = EMU_MAX_SHARED_BYTES;
    const char *capability = getenv("EMU_CAPABILITY");
    if (sscanf(capability ? capability : "8.0", "%d.%d", &properties->major, &properties->minor) != 2)
        emu_report("EMU_CAPABILITY is not of the form 9.0: %s", capability);
    const char *multiprocessors = getenv("EMU_MULTIPROCESSORS");
    properties->multiProcessorCount = multiprocessors ? atoi(multiprocessors) : 3;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = EMU_MAX_THREADS;
    properties->l2CacheSize = 1 << 17; // small, so that tests run the schedules for tensors that exceed it
    int count;
    const cudaError_t status = cudaGetDeviceCount(&count);
    return status != cudaSuccess ? status
                                 : emu_error(device >= 0 && device < count ? cudaSuccess : cudaErrorInvalidDevice);
}

// --- Memory -------------------------------------------------------------------------------------------------------

enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum { cudaMemAttachGlobal = 1 };

static inline cudaError_t emu_allocate(void **memory, size_t bytes, enum emu_memory_kind kind) {
    const cudaError_t status = emu_forbid_while_recording();
    *memory = NULL;
    if (status != cudaSuccess || bytes == 0)
        return status;
    *memory = emu_memory_allocate(bytes, kind);
    return emu_error(*memory ? cudaSuccess : cudaErrorMemoryAllocation);
}
static inline cudaError_t emu_free(void *memory, bool pinned) {
    const cudaError_t status = emu_forbid_while_recording();
    if (status != cudaSuccess || !memory)
        return status;
    emu_run_everything();
    emu_memory_open();
    emu_check_red_zones("(or the host, since the last)");
    emu_memory_close();
    return emu_error(emu_memory_free(memory, pinned) ? cudaSuccess : cudaErrorInvalidValue);
}
template <class T> static inline cudaError_t cudaMalloc(T **memory, size_t bytes) {
    return emu_allocate((void **)memory, bytes, EMU_DEVICE);
}
template <class T>
static inline cudaError_t cudaMallocManaged(T **memory, size_t bytes, unsigned flags = cudaMemAttachGlobal) {
    return emu_allocate((void **)memory, bytes, EMU_MANAGED);
}
template <class T> static inline cudaError_t cudaMallocHost(T **memory, size_t bytes) {
    return emu_allocate((void **)memory, bytes, EMU_PINNED);
}
static inline cudaError_t cudaFree(void *memory) { return emu_free(memory, false); }
static inline cudaError_t cudaFreeHost(void *memory) { return emu_free(memory, true); }
static inline cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *total = emu_memory_bytes();
    *available = *total > emu_allocated_bytes ? *total - emu_allocated_bytes : 0;
    return cudaSuccess;
}

// Memory of the host, allocated elsewhere, whose pages were then pinned.
struct emu_registration {
    const char *begin, *end;
};
inline std::vector<struct emu_registration> emu_registrations;
enum { cudaHostRegisterDefault = 0 };

static inline cudaError_t cudaHostRegister(void *memory, size_t bytes, unsigned flags) {
    const cudaError_t status = emu_forbid_while_recording();
    const char *limit = getenv("EMU_PINNED_BYTES"), *begin = (const char *)memory, *end = begin + bytes;
    size_t pinned = bytes;
    if (status != cudaSuccess)
        return status;
    if (!memory || bytes == 0 || flags != cudaHostRegisterDefault)
        return emu_error(cudaErrorInvalidValue);
    for (const struct emu_registration &r : emu_registrations) {
        if (begin < r.end && r.begin < end)
            return emu_error(cudaErrorHostMemoryAlreadyRegistered);
        pinned += (size_t)(r.end - r.begin);
    }
    if (limit && pinned > (size_t)strtoull(limit, NULL, 0))
        return emu_error(cudaErrorMemoryAllocation);
    for (const char *page = begin; page < end; page += EMU_PAGE) {
        unsigned char resident = 0;
        if (mincore((void *)((uintptr_t)page / EMU_PAGE * EMU_PAGE), 1, &resident) != 0 || !(resident & 1))
            emu_report("cudaHostRegister: the page at %p was never touched: one thread would touch them all", page);
    }
    const struct emu_registration registration = {begin, end};
    emu_registrations.push_back(registration);
    return cudaSuccess;
}
static inline cudaError_t cudaHostUnregister(void *memory) {
    const cudaError_t status = emu_forbid_while_recording();
    if (status != cudaSuccess)
        return status;
    emu_run_everything();
    for (size_t i = 0; i < emu_registrations.size(); i++)
        if (emu_registrations[i].begin == memory) {
            emu_registrations.erase(emu_registrations.begin() + (long)i);
            return cudaSuccess;
        }
    return emu_error(cudaErrorHostMemoryNotRegistered);
}
static bool emu_is_pinned(const void *memory, size_t bytes) {
    const struct emu_allocation *a = emu_find_allocation(memory);
    bool pinned = a && a->kind != EMU_DEVICE;
    for (const struct emu_registration &r : emu_registrations)
        pinned = pinned || ((const char *)memory >= r.begin && (const char *)memory + bytes <= r.end);
    return pinned;
}
static inline cudaError_t cudaDeviceGetPCIBusId(char *address, int length, int device) {
    snprintf(address, (size_t)length, "0000:FF:1F.%d", device % 8); // an address at which no machine has a device
    return cudaSuccess;
}

// Reports a copy whose `kind` contradicts what is known of an address, or that leaves an allocation.
static inline void emu_check_copy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    const struct emu_allocation *target = emu_find_allocation(to), *source = emu_find_allocation(from);
    emu_check_range(to, bytes, "a copy writes");
    emu_check_range(from, bytes, "a copy reads");
    if (target && target->kind == EMU_DEVICE && (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyHostToHost))
        emu_report("a copy to the host writes to device memory");
    if (source && source->kind == EMU_DEVICE && (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyHostToHost))
        emu_report("a copy from the host reads device memory");
    if (target && target->kind == EMU_PINNED && (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice))
        emu_report("a copy to the device writes to memory of the host");
    if (source && source->kind == EMU_PINNED && (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice))
        emu_report("a copy from the device reads memory of the host");
}
static inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                                          cudaStream_t stream = NULL) {
    emu_check_copy(to, from, bytes, kind);
    // CUDA stages such a copy through memory of its own while the host waits, so that it would not run beside the
    // stream that computes.
    if (stream && stream->beside && !stream->computes && bytes > 0 &&
        ((kind == cudaMemcpyHostToDevice && !emu_is_pinned(from, bytes)) ||
         (kind == cudaMemcpyDeviceToHost && !emu_is_pinned(to, bytes))))
        emu_report("a copy on a stream beside the first one uses memory of the host that is not pinned");
    return bytes == 0 ? cudaSuccess : emu_enqueue(stream, "a copy", [=] {
        if (stream)
            stream->copies++;
        memmove(to, from, bytes);
    });
}
static inline cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream = NULL) {
    emu_check_range(memory, bytes, "cudaMemset writes");
    if (stream)
        stream->computes = true;
    return bytes == 0 ? cudaSuccess : emu_enqueue(stream, "cudaMemset", [=] { memset(memory, value, bytes); });
}

// --- Launches -----------------------------------------------------------------------------------------------------

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
typedef struct {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
} cudaLaunchConfig_t;

// A kernel that may have more dynamic shared memory than others.
struct emu_shared_limit {
    const void *kernel;
    int bytes;
};
inline std::vector<struct emu_shared_limit> emu_shared_limits;
static inline int emu_shared_limit_of(const void *kernel) {
    for (const struct emu_shared_limit &limit : emu_shared_limits)
        if (limit.kernel == kernel)
            return limit.bytes;
    return EMU_DEFAULT_SHARED_BYTES;
}
template <class Kernel>
static inline cudaError_t cudaFuncSetAttribute(Kernel *kernel, enum cudaFuncAttribute attribute, int value) {
    if (value < 0 || value > EMU_MAX_SHARED_BYTES)
        return emu_error(cudaErrorInvalidValue);
    for (struct emu_shared_limit &limit : emu_shared_limits)
        if (limit.kernel == (const void *)kernel) {
            limit.bytes = value;
            return cudaSuccess;
        }
    const struct emu_shared_limit limit = {(const void *)kernel, value};
    emu_shared_limits.push_back(limit);
    return cudaSuccess;
}

// Reports a launch that no GPU takes.
static inline void emu_check_launch(const char *name, const cudaLaunchConfig_t *config, const void *kernel) {
    const dim3 grid = config->gridDim, block = config->blockDim;
    const uint64_t threads = (uint64_t)block.x * block.y * block.z;
    if (threads < 1 || threads > EMU_MAX_THREADS || block.z > 64)
        emu_report("kernel %s: launched with a block of %u x %u x %u threads; 1 to 1024 are possible, and 64 in z",
                   name, block.x, block.y, block.z);
    if (grid.x < 1 || grid.y < 1 || grid.z < 1 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
        emu_report(
            "kernel %s: launched with a grid of %u x %u x %u blocks; 1 to 2147483647 x 65535 x 65535 are possible",
            name, grid.x, grid.y, grid.z);
    if (config->dynamicSmemBytes > (size_t)EMU_MAX_SHARED_BYTES)
        emu_report("kernel %s: launched with %zu bytes of shared memory; a block can have %d", name,
                   config->dynamicSmemBytes, (int)EMU_MAX_SHARED_BYTES);
    if (config->dynamicSmemBytes > (size_t)emu_shared_limit_of(kernel))
        emu_report("kernel %s: launched with %zu bytes of shared memory; without cudaFuncSetAttribute it can have %d",
                   name, config->dynamicSmemBytes, emu_shared_limit_of(kernel));
}

inline uint64_t emu_launches;  // launches that ran so far
inline uint64_t emu_conflicts; // of ldmatrix, in all kernels that ran so far

template <class... Parameters, class... Arguments>
static cudaError_t emu_launch(const char *name, const cudaLaunchConfig_t *config, void (*kernel)(Parameters...),
                              Arguments &&...arguments) {
    typedef std::tuple<typename std::decay<Parameters>::type...> values_type;
    struct call_type {
        void (*kernel)(Parameters...);
        values_type values;
    };
    emu_check_launch(name, config, (const void *)kernel);
    if (emu_planted.kind == EMU_REFUSED && strstr(name, emu_planted.name))
        return emu_error(cudaErrorInvalidValue);
    if (config->stream)
        config->stream->computes = true;
    const dim3 grid = config->gridDim, size = config->blockDim;
    const uint32_t shared_bytes = (uint32_t)config->dynamicSmemBytes;
    const call_type call = {kernel, values_type(static_cast<Parameters>(arguments)...)};
    return emu_enqueue(config->stream, name, [=] {
        const auto body = [](void *argument) {
            const call_type *mine = (const call_type *)argument;
            std::apply(mine->kernel, mine->values);
        };
        struct emu_kernel launch = {name, grid, size, shared_bytes, body, (void *)&call, emu_launches++, NULL};
        emu_conflicts += emu_run_kernel(&launch);
    });
}
#define cudaLaunchKernelEx(config, kernel, ...) emu_launch(#kernel, config, kernel, ##__VA_ARGS__)
