// The device's queue of work: opening the device, waiting for it, and work that is recorded to be enqueued again.
#pragma once
#include "kernels/device.cuh"         // struct device, cuda_check
#include "kernels/gpu_peak.cuh"       // gpu_peak_flops
#include "runtime/machine/deadline.h" // deadline_clock_s
#include "runtime/machine/say.h"      // say_warning
#include <stdio.h>                    // snprintf

// Opens the GPU of process local_rank, from 0, of this host: number local_rank modulo the visible GPUs, now current.
// Ends the program where none is visible, where that one can't run the program, and, unless may_share, where several are
// visible, but at most local_rank. *dev is zero but for `threads` and `planned`. matmul_create and device_close follow.
static void device_open(struct device *dev, int local_rank, bool may_share);
// Closes the device, after matmul_destroy and attention_close; does nothing where it is not open.
static void device_close(struct device *dev);
// Writes a line like "cuda: NVIDIA H200, compute capability 9.0, bf16" about the device to text (n); returns text.
static const char *device_describe(char *text, size_t n, const struct device *dev);
// Writes the GPU's name, by its driver, to text (n bytes), or "" on the cpu target and without a GPU. Returns text.
static const char *device_name(char *text, size_t n, const struct device *dev);
// Returns the data sheet's peak flop/s of dense matmuls in bf16, or in fp32 without TF32; 0 if not known or no GPU.
static double device_data_sheet_flops(const struct device *dev);

// Waits for all work enqueued on the device, but not for collectives and transfers, which have queues of their own.
static inline void device_synchronize(struct device *dev);
// Records event i, below DEVICE_EVENTS: it happens when all work enqueued so far is done.
static inline void device_event_record(struct device *dev, int i);
// Blocks the host until event i, as last recorded, has happened. Returns at once where it never was recorded.
static inline void device_event_wait(struct device *dev, int i);
// Returns the seconds from event i to event j, as they were last recorded; both have happened.
static inline double device_event_seconds(struct device *dev, int i, int j);

// A graph is what the host enqueued between graph_begin and graph_end, recorded instead of run. graph_launch enqueues
// it by one call, any number of times; graph_free frees it. Zeroed, it is empty. The cpu target records nothing.
struct work_graph;
// Begins to record what is enqueued, instead of running it, until graph_end. Where CUDA refuses, warns and returns
// false: work then runs as usual, and graph_end must not be called. The cpu target returns true, and runs everything.
static bool graph_begin(struct device *dev);
// Ends the recording as *graph, zero before; nothing of it has run. Where CUDA refuses, warns and returns false: the
// caller enqueues the work again. Ends the program if some work can't be recorded. The cpu target returns true.
static bool graph_end(struct work_graph *graph, struct device *dev);
// Returns why a graph was refused, after which the caller records none, or "" where none was.
static inline const char *graphs_refusal(const struct device *dev);
// Whether the graph holds recorded work, which graph_launch enqueues; always false on the cpu target.
static inline bool graph_recorded(const struct work_graph *graph);
// Enqueues a recorded graph's work; on the cpu target nothing. Ends the program if the GPU has no memory left for it.
static void graph_launch(struct work_graph *graph, struct device *dev);
// Frees the graph and makes it zero; does nothing where it is zero.
static void graph_free(struct work_graph *graph);

// Named ranges for a profiler (NVTX), around what the host enqueues. The work of a graph is not in them.
#if defined(TARGET_CUDA) && defined(__CUDACC__)
#include <nvtx3/nvToolsExt.h>
static inline void range_begin(const char *name) { nvtxRangePushA(name); }
static inline void range_end(void) { nvtxRangePop(); }
#else
static inline void range_begin(const char *name) {}
static inline void range_end(void) {}
#endif

#ifdef TARGET_CUDA

struct work_graph {
    cudaGraphExec_t executable; // NULL: nothing recorded
};

// Returns why the first GPU can't be used, or that there is none; an empty string where it can.
static const char *device_unavailable_reason(void) {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess) {
        cudaGetLastError(); // clears the error, which the next check would find
        return cudaGetErrorString(status);
    }
    struct cudaDeviceProp properties;
    if (count == 0)
        return "no GPU is visible";
    cuda_check(cudaGetDeviceProperties(&properties, 0));
    return properties.major >= 8 ? "" : "the GPU's compute capability is below 8.0";
}

// Returns the bytes of the GPU's memory that nobody has allocated now.
static size_t device_free_bytes(struct device *dev) {
    size_t available = 0, total = 0;
    cuda_check(cudaMemGetInfo(&available, &total));
    return available;
}
// Returns the bytes of the GPU's memory taken since device_open: by buffers, libraries, graphs, and other processes.
static size_t device_used_bytes(struct device *dev) {
    const size_t available = device_free_bytes(dev);
    return available < dev->free_bytes ? dev->free_bytes - available : 0;
}

static __global__ void device_code_kernel(void) {}
// Ends the program if it has no machine code, nor PTX that the driver takes, for the current GPU, number `index`.
static void device_check_code(int index) {
    struct cudaFuncAttributes attributes;
    struct cudaDeviceProp properties;
    const cudaError_t status = cudaFuncGetAttributes(&attributes, device_code_kernel);
    if (status == cudaSuccess)
        return;
    cuda_check(cudaGetDeviceProperties(&properties, index));
    fail("this program does not run on %s, of compute capability %d.%d: %s; `make cuda GPU_ARCH=release` builds one "
         "for GPUs from 8.0 on, --device cpu trains on the CPU",
         properties.name, properties.major, properties.minor, cudaGetErrorString(status));
}
static void device_open(struct device *dev, int local_rank, bool may_share) {
    int count = 0;
    cuda_check(cudaGetDeviceCount(&count));
    if (count > 1 && local_rank >= count && !may_share)
        fail("this is process %d on this host, which has %d GPUs: start as many as there are GPUs "
             "(--collectives sockets lets them share one, for tests)",
             local_rank + 1, count);
    dev->index = local_rank % count;
    cuda_check(cudaSetDevice(dev->index));
    device_check_code(dev->index);
    cuda_check(cudaStreamCreateWithFlags(&dev->stream, cudaStreamNonBlocking));
    for (int i = 0; i < DEVICE_EVENTS; i++)
        cuda_check(cudaEventCreate(&dev->events[i]));
    dev->free_bytes = device_free_bytes(dev);
    dev->open = true;
}
static void device_close(struct device *dev) {
    if (!dev->open)
        return;
    for (int i = 0; i < DEVICE_EVENTS; i++)
        cuda_check(cudaEventDestroy(dev->events[i]));
    cuda_check(cudaStreamDestroy(dev->stream));
    dev->open = false;
}
static const char *device_describe(char *text, size_t n, const struct device *dev) {
    struct cudaDeviceProp properties;
    if (!dev->open) {
        snprintf(text, n, "cuda, %s", FLOATX_NAME);
        return text;
    }
    cuda_check(cudaGetDeviceProperties(&properties, dev->index));
    snprintf(text, n, "cuda: %s, compute capability %d.%d, %s", properties.name, properties.major, properties.minor,
             FLOATX_NAME);
    return text;
}

static const char *device_name(char *text, size_t n, const struct device *dev) {
    struct cudaDeviceProp properties;
    text[0] = 0;
    if (!dev->open)
        return text;
    cuda_check(cudaGetDeviceProperties(&properties, dev->index));
    snprintf(text, n, "%s", properties.name);
    return text;
}
static double device_data_sheet_flops(const struct device *dev) {
    struct cudaDeviceProp properties;
    if (!dev->open)
        return 0;
    cuda_check(cudaGetDeviceProperties(&properties, dev->index));
    return gpu_peak_flops(properties.name, properties.totalGlobalMem, sizeof(floatX) == 2);
}

static inline void device_synchronize(struct device *dev) { cuda_check(cudaStreamSynchronize(dev->stream)); }
static inline void device_event_record(struct device *dev, int i) {
    cuda_check(cudaEventRecord(dev->events[i], dev->stream));
}
static inline void device_event_wait(struct device *dev, int i) { cuda_check(cudaEventSynchronize(dev->events[i])); }
static inline double device_event_seconds(struct device *dev, int i, int j) {
    float milliseconds;
    cuda_check(cudaEventElapsedTime(&milliseconds, dev->events[i], dev->events[j]));
    return 1e-3 * (double)milliseconds;
}

// Ends the program if a graph's launch failed; where the GPU has no memory left, the message says what to change.
static void graph_check(cudaError_t status) {
    if (status == cudaErrorMemoryAllocation)
        fail("the GPU has no memory left for what a micro-step enqueues as recorded work: --cuda-graphs=false records "
             "none and trains the same, or a lower --memory-budget leaves more");
    cuda_check(status);
}
static inline const char *graphs_refusal(const struct device *dev) { return dev->graphs_refusal; }
// Whether a graph's call succeeded; else warns and sets dev->graphs_refusal. A late fault of a kernel ends the program.
static bool graph_is_taken(cudaError_t status, const char *call, struct device *dev) {
    if (status == cudaSuccess)
        return true;
    if (cuda_is_late(status))
        cuda_check_at(status, call, __FILE__, __LINE__);
    cudaGetLastError(); // clears the error, which the next check would find
    snprintf(dev->graphs_refusal, sizeof dev->graphs_refusal, "the GPU's work can't be recorded (%s: %s)", call,
             cudaGetErrorString(status));
    say_warning("%s: each kernel is launched by a call of its own, as by --cuda-graphs=false, which trains the same",
                dev->graphs_refusal);
    return false;
}
static bool graph_begin(struct device *dev) {
    dev->recording = graph_is_taken(cudaStreamBeginCapture(dev->stream, cudaStreamCaptureModeThreadLocal),
                                    "cudaStreamBeginCapture", dev);
    dev->recordings += dev->recording;
    return dev->recording;
}
static bool graph_end(struct work_graph *graph, struct device *dev) {
    cudaGraph_t recorded = NULL;
    dev->recording = false;
    const cudaError_t status = cudaStreamEndCapture(dev->stream, &recorded);
    if (status != cudaSuccess &&
        !cuda_is_late(status)) // a mistake in what was recorded, which should not pass in silence
        fail("cudaStreamEndCapture: %s; --cuda-graphs=false records no work, and trains the same",
             cudaGetErrorString(status));
    cuda_check(status);
    const bool taken =
        graph_is_taken(cudaGraphInstantiate(&graph->executable, recorded, 0), "cudaGraphInstantiate", dev);
    if (!taken)
        graph->executable = NULL;
    cuda_check(cudaGraphDestroy(recorded));
    return taken;
}
static inline bool graph_recorded(const struct work_graph *graph) { return graph->executable != NULL; }
static void graph_launch(struct work_graph *graph, struct device *dev) {
    launched_record("a graph");
    graph_check(cudaGraphLaunch(graph->executable, dev->stream));
}
static void graph_free(struct work_graph *graph) {
    if (graph->executable)
        cuda_check(cudaGraphExecDestroy(graph->executable));
    graph->executable = NULL;
}

#else

// The cpu target runs each op when it is called, so that there is nothing to record and nothing to wait for.
struct work_graph {
    int unused;
};
static void device_open(struct device *dev, int local_rank, bool may_share) {}
static void device_close(struct device *dev) {}
static const char *device_describe(char *text, size_t n, const struct device *dev) {
    snprintf(text, n, "cpu, %d threads, %s", dev->threads, FLOATX_NAME);
    return text;
}
static const char *device_name(char *text, size_t n, const struct device *dev) {
    text[0] = 0;
    return text;
}
static double device_data_sheet_flops(const struct device *dev) { return 0; }
static inline void device_synchronize(struct device *dev) {}
static inline void device_event_record(struct device *dev, int i) { dev->events[i] = deadline_clock_s(); }
static inline void device_event_wait(struct device *dev, int i) {}
static inline double device_event_seconds(struct device *dev, int i, int j) { return dev->events[j] - dev->events[i]; }
static bool graph_begin(struct device *dev) { return true; }
static bool graph_end(struct work_graph *graph, struct device *dev) { return true; }
static inline const char *graphs_refusal(const struct device *dev) { return ""; }
static inline bool graph_recorded(const struct work_graph *graph) { return false; }
static void graph_launch(struct work_graph *graph, struct device *dev) {}
static void graph_free(struct work_graph *graph) {}

#endif
