// Stand-ins for the part of the CUDA runtime that kernels, the engine and their tests use, on host memory.
//
// There is no __shared__: kernels take shared memory from kernels/ptx.cuh, whose wrappers see each access. Environment:
//   EMU_MEMORY_BYTES         the device's memory; 8 GiB if unset
//   CUDA_VISIBLE_DEVICES     empty or -1: no device
//   EMU_DEVICES              the number of devices; 1 if unset. All share the process's memory. They differ only in
//   that
//                            two ranks of test/emu/nccl.h can't share one.
//   EMU_CAPABILITY           the compute capability; 8.0 if unset
//   EMU_NO_CODE              set: the program has no code for the device
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
static inline uint32_t __float_as_uint(float value) { return emu_bits<uint32_t>(value); }

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
    int managedMemory, concurrentManagedAccess;
};
// Few multiprocessors, and not a power of two, so that what is divided among them doesn't divide evenly.
enum { EMU_DEFAULT_SHARED_BYTES = 48 * 1024 };

const char *cudaGetErrorString(cudaError_t status);
cudaError_t cudaGetLastError(void);
cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device);
static inline cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
static inline cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
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

// Allocates what cudaMalloc and its like give.
cudaError_t emu_allocate(void **memory, size_t bytes, enum emu_memory_kind kind);
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
cudaError_t cudaFree(void *memory);
cudaError_t cudaFreeHost(void *memory);
cudaError_t cudaMemGetInfo(size_t *available, size_t *total);
enum { cudaHostRegisterDefault = 0 };
cudaError_t cudaHostRegister(void *memory, size_t bytes, unsigned flags);
cudaError_t cudaHostUnregister(void *memory);
cudaError_t cudaDeviceGetPCIBusId(char *address, int length, int device);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream = NULL);
cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream = NULL);

// --- Launches -----------------------------------------------------------------------------------------------------

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
typedef struct {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
} cudaLaunchConfig_t;

// Lets a kernel have more dynamic shared memory than others.
cudaError_t emu_set_shared_limit(const void *kernel, int bytes);
template <class Kernel>
static inline cudaError_t cudaFuncSetAttribute(Kernel *kernel, enum cudaFuncAttribute attribute, int value) {
    return emu_set_shared_limit((const void *)kernel, value);
}
struct cudaFuncAttributes {
    int binaryVersion;
};
template <class Kernel>
static inline cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, Kernel *kernel) {
    return getenv("EMU_NO_CODE") ? cudaErrorNoKernelImageForDevice : cudaSuccess;
}

inline uint64_t emu_conflicts; // of ldmatrix, in all kernels that ran so far

// Enqueues a launch; body(call) is what a thread of it does. The work holds a copy of the call (bytes bytes).
cudaError_t emu_launch_call(const char *name, const cudaLaunchConfig_t *config, const void *kernel,
                            void (*body)(void *), const void *call, size_t bytes);
template <class... Parameters, class... Arguments>
static cudaError_t emu_launch(const char *name, const cudaLaunchConfig_t *config, void (*kernel)(Parameters...),
                              Arguments &&...arguments) {
    typedef std::tuple<typename std::decay<Parameters>::type...> values_type;
    struct call_type {
        void (*kernel)(Parameters...);
        values_type values;
    };
    static_assert((std::is_trivially_copyable<typename std::decay<Parameters>::type>::value && ...),
                  "CUDA copies a kernel's arguments byte by byte");
    const call_type call = {kernel, values_type(static_cast<Parameters>(arguments)...)};
    const auto body = [](void *argument) {
        const call_type *mine = (const call_type *)argument;
        std::apply(mine->kernel, mine->values);
    };
    return emu_launch_call(name, config, (const void *)kernel, body, &call, sizeof call);
}
#define cudaLaunchKernelEx(config, kernel, ...) emu_launch(#kernel, config, kernel, ##__VA_ARGS__)
