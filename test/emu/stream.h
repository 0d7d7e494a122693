// Streams, events and graphs of the emulator. Work that is enqueued on a created stream runs as late as the program
// allows: when the host waits for it, and not before. So a host buffer that is changed too early, or read without
// waiting, gives wrong data. On the stream NULL, and with CUDA_LAUNCH_BLOCKING=1, work runs at once.
//
// With EMU_STREAMS=eager the streams beside the first one run as early as they may instead; with EMU_STREAMS=N, only
// the Nth stream beside it does. Early means: when work is enqueued on them, or as soon as the event that they wait for
// has happened, before the first stream goes on. The late order shows a missing wait for another stream. The early
// order shows what another stream does too early, such as refilling a buffer in use. One early and one late stream show
// a missing wait between the two. A graph's work runs in the order in which it was recorded.
//
// What a capture must not do is refused with CUDA's own error, and spoils what is recorded: waits of the host, waits
// for an event from outside, two captures that meet, a fork that is not joined again, use of the stream NULL beside a
// stream that waits for it.
//
// Device memory can be touched only while work runs (test/emu/memory.h).
#pragma once
#include "test/emu/warp.h" // struct emu_block

typedef enum cudaError {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorNoKernelImageForDevice = 209,
    cudaErrorECCUncorrectable = 214,
    cudaErrorNvlinkUncorrectable = 220,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorNotReady = 600,
    cudaErrorIllegalAddress = 700,
    cudaErrorLaunchTimeout = 702,
    cudaErrorAssert = 710,
    cudaErrorHostMemoryAlreadyRegistered = 712,
    cudaErrorHostMemoryNotRegistered = 713,
    cudaErrorHardwareStackError = 714,
    cudaErrorIllegalInstruction = 715,
    cudaErrorMisalignedAddress = 716,
    cudaErrorInvalidAddressSpace = 717,
    cudaErrorInvalidPc = 718,
    cudaErrorLaunchFailure = 719,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorStreamCaptureInvalidated = 901,
    cudaErrorStreamCaptureMerge = 902,
    cudaErrorStreamCaptureUnmatched = 903,
    cudaErrorStreamCaptureUnjoined = 904,
    cudaErrorStreamCaptureIsolation = 905,
    cudaErrorStreamCaptureImplicit = 906,
    cudaErrorIllegalState = 401,
    cudaErrorCapturedEvent = 907
} cudaError_t;

inline thread_local int emu_device; // of this thread; a new thread begins with device 0
// Whether memory outside all allocations is taken for the device's: an op's test passes memory of its own.
inline bool emu_host_memory_serves = false;
#ifdef DEVICE_MEMORY_MANAGED
static const bool emu_host_memory_is_said_to_serve = (emu_host_memory_serves = true);
#endif

typedef struct emu_stream *cudaStream_t;
typedef struct emu_event *cudaEvent_t;
typedef struct emu_graph_handle *cudaGraph_t;
typedef struct emu_graph_handle *cudaGraphExec_t;

enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1 };

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority);
cudaError_t cudaStreamCreate(cudaStream_t *stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaDeviceSynchronize(void);

enum { cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2, cudaEventRecordDefault = 0 };

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventCreate(cudaEvent_t *event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = NULL);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end);
cudaError_t cudaEventDestroy(cudaEvent_t event);

enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal,
    cudaStreamCaptureModeThreadLocal,
    cudaStreamCaptureModeRelaxed
};

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags = 0);
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable);
