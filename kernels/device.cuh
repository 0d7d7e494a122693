// Defines what depends on target and precision: floatX, the type of parameters and activations; the device that ops run
// on; CUDA's launches and error checks. A translation unit is compiled once per precision: with PRECISION_BF16 defined
// floatX is bf16, else float. Sums are fp32 in both. With TARGET_CUDA defined ops are CUDA kernels, else OpenMP loops.
//
// An op is two files. NAME.cuh declares it: one documented prototype for both targets. NAME.cu defines it, kernel and
// loop side by side, and is compiled once for each target, precision and level of instruction sets; the engine and the
// tests link the same object. Headers without a .cu of their name hold what several ops inline, and the device itself.
//
// Every op looks like this: outputs first, then inputs, then sizes, then `workspace` where the op needs scratch memory
// (the op exports NAME_workspace_bytes, and the caller plans it), then the device. Ops allocate nothing. Pointers are
// to memory of the device. On the cuda target an op only enqueues (device_synchronize, device_download wait).
#pragma once
#include "kernels/wait_limit.cuh"     // wait_limit_open, wait_limit_message
#include "runtime/machine/error.h"    // fail
#include "runtime/machine/launched.h" // launched_record, launched_last
#include <stdbool.h>                  // bool
#include <stddef.h>                   // size_t
#include <stdint.h>                   // uint16_t, uint32_t, int64_t
#include <string.h>                   // memcpy

#ifdef TARGET_CUDA
#include <cuda_runtime.h> // streams, events, launches
#if CUDART_VERSION < 12040
#error "CUDA 12.4 or newer is needed: CUDA_HOME= names one, make CUDA= builds for the cpu only"
#endif
#ifdef __CUDACC__
#include <cuda_bf16.h> // __float2bfloat16_rn
#endif
#define HOST_DEVICE static inline __host__ __device__
#define DEVICE_FUNCTION static __device__ __forceinline__
#else
#define HOST_DEVICE static inline
#endif

// Brain floating point: the upper half of a float. A struct, so that the compiler refuses arithmetic on the bits.
typedef struct {
    uint16_t bits;
} bf16;

HOST_DEVICE float bf16_to_float(bf16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Rounds to nearest, ties to even; a NaN stays a NaN (its payload could round to infinity otherwise).
HOST_DEVICE bf16 bf16_from_float(float value) {
    bf16 result;
#ifdef __CUDA_ARCH__
    result.bits = __bfloat16_as_ushort(__float2bfloat16_rn(value)); // one instruction; every NaN becomes 0x7fff
#else
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x40u;
    result.bits = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
#endif
    return result;
}

#ifdef PRECISION_BF16
typedef bf16 floatX;
#define FLOATX_NAME "bf16"
HOST_DEVICE float to_float(floatX x) { return bf16_to_float(x); }
HOST_DEVICE floatX to_floatX(float x) { return bf16_from_float(x); }
#else
typedef float floatX;
#define FLOATX_NAME "fp32"
HOST_DEVICE float to_float(floatX x) { return x; }
HOST_DEVICE floatX to_floatX(float x) { return x; }
#endif

// The compute capability of a GPU; major is 0 where there is none.
struct compute_capability {
    int major, minor;
};

struct matmul_library; // kernels/matmul/matmul.cuh
struct fused_library;  // kernels/cudnn/attention.cuh
struct work_segments;  // kernels/work_segments.cuh

enum { DEVICE_EVENTS = 5 }; // points in the device's queue that the host can wait for, and take the time of

// The device that an op runs on. A process has one, which is every op's last argument. Each target also defines:
//   DEVICE_RUNS_AHEAD        the host enqueues a step before it knows the previous step's results
//   DEVICE_HAS_GRAPHS        work can be recorded and enqueued again
//   DEVICE_MEMORY_IS_HOSTS   the device's memory is the host's
//   DEVICE_PEAK_MATMUL       size of a square matmul that shows the peak; DEVICE_PEAK_REPEATS are long enough to time
struct device;

#ifdef TARGET_CUDA

struct device {
    int threads;                       // OpenMP threads of the host
    struct matmul_library *matmul;     // handles and cached plans of the matmul library, made by matmul_create
    struct fused_library *fused;       // handle and plans of cuDNN, made when attention first asks; attention_close
    cudaStream_t stream;               // all work goes here, in order
    cudaEvent_t events[DEVICE_EVENTS]; // device_event_record, device_event_wait
    int index;                         // of the GPU
    size_t free_bytes;                 // of the GPU's memory when the device was opened
    bool recording;                    // what is enqueued becomes part of a graph
    uint32_t recordings;               // begun so far
    char graphs_refusal[160];          // why no graph is made any more; "": none was refused
    struct work_segments *segments;    // being recorded or enqueued again (kernels/work_segments.cuh); NULL: none
    bool open;                         // false: nothing is run, only planned, and no GPU is needed
    struct compute_capability
        planned; // of the GPU that --plan-gpu names; major 0: none, the device itself is planned for
};
enum { DEVICE_RUNS_AHEAD = 1, DEVICE_HAS_GRAPHS = 1, DEVICE_MEMORY_IS_HOSTS = 0 };
#ifdef CUDA_EMULATED
enum { DEVICE_PEAK_MATMUL = 4096, DEVICE_PEAK_REPEATS = 1 }; // on the host one takes long enough
#else
enum { DEVICE_PEAK_MATMUL = 4096, DEVICE_PEAK_REPEATS = 10 };
#endif
// Whether memory is planned for a GPU: always on the cuda target, on the cpu target where --plan-gpu names one.
static inline bool device_is_gpu(const struct device *dev) { return true; }

// Whether a call returns `status` for a fault of a kernel that was enqueued earlier.
static bool cuda_is_late(cudaError_t status) {
    return status == cudaErrorIllegalAddress || status == cudaErrorLaunchTimeout || status == cudaErrorAssert ||
           status == cudaErrorECCUncorrectable || status == cudaErrorNvlinkUncorrectable ||
           (status >= cudaErrorHardwareStackError && status <= cudaErrorLaunchFailure);
}
#define CUDA_LATE_TEXT "the fault is of work that was enqueued before" // in the message about a late fault
// Ends the program if `status` is an error; the message has the call, its place and, for a late fault, the kernels.
static void cuda_check_at(cudaError_t status, const char *call, const char *file, int line) {
    char last[512];
    if (status == cudaSuccess)
        return;
    if (cuda_is_late(status))
        fail("%s:%d: %s: %s%s; " CUDA_LATE_TEXT ", the newest first: %s; with "
             "CUDA_LAUNCH_BLOCKING=1 in the environment and --cuda-graphs=false the first of them is the culprit",
             file, line, call, cudaGetErrorString(status), wait_limit_message(), launched_last(last, sizeof last));
    fail("%s:%d: %s: %s%s", file, line, call, cudaGetErrorString(status), wait_limit_message());
}
#define cuda_check(call) cuda_check_at(call, #call, __FILE__, __LINE__)

// Enqueues kernel(arguments) on the device's stream; ends the program where CUDA refuses. Arguments have the kernel's
// own types; grid and block are numbers or dim3. Name all instances: scripts/count_launches.py reads this text.
#define LAUNCH(dev, kernel, grid, block, shared_bytes, ...)                                                            \
    do {                                                                                                               \
        cudaLaunchConfig_t launch_ = {};                                                                               \
        launch_.gridDim = dim3(grid);                                                                                  \
        launch_.blockDim = dim3(block);                                                                                \
        launch_.dynamicSmemBytes = (shared_bytes);                                                                     \
        launch_.stream = (dev)->stream;                                                                                \
        cuda_check(wait_limit_open());                                                                                 \
        launched_record(#kernel);                                                                                      \
        cuda_check(cudaLaunchKernelEx(&launch_, kernel, __VA_ARGS__));                                                 \
    } while (0)
// The number of blocks that n elements take, `each` elements a block. It is 0 for n = 0, which LAUNCH can't take.
static inline unsigned blocks_for(int64_t n, int64_t each) { return (unsigned)((n + each - 1) / each); }

#else

struct device {
    int threads;                       // OpenMP threads
    struct matmul_library *matmul;     // handles and cached plans of the matmul library, made by matmul_create
    struct compute_capability planned; // of the GPU that --plan-gpu names, which this build cannot run; major 0: none
    double events[DEVICE_EVENTS];      // deadline_clock_s() when they were recorded
};
enum { DEVICE_RUNS_AHEAD = 0, DEVICE_HAS_GRAPHS = 0, DEVICE_MEMORY_IS_HOSTS = 1 };
enum { DEVICE_PEAK_MATMUL = 1536, DEVICE_PEAK_REPEATS = 1 };
static inline bool device_is_gpu(const struct device *dev) { return dev->planned.major > 0; }

#endif
