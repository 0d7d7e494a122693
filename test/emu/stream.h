// Streams, events and graphs of the emulator, as late as a program allows: what is enqueued on a stream that was
// created runs when the host waits for it and not before, so that a host buffer that is changed too early, or read
// without waiting, gives wrong data. On the stream NULL, and with CUDA_LAUNCH_BLOCKING=1, all runs at once.
//
// With EMU_STREAMS=eager the streams beside the first one run as early as they may instead, with EMU_STREAMS=N the Nth
// of them alone: when work is enqueued on them, or as soon as the event that they wait for has happened, before the
// first stream goes on. The late order finds a missing wait for another stream, the eager one what another stream does
// too early, such as refilling a buffer in use; one early and one late, a missing wait between those two. A graph's
// work runs in the order in which it was recorded.
//
// What a capture must not do is refused by CUDA's own error, and spoils what is recorded: waits of the host, waits for
// an event from outside, two captures that meet, a fork that is not joined again, use of the stream NULL beside a
// stream that waits for it.
//
// Device memory can be touched only while work runs (test/emu/memory.h).
#pragma once
#include "test/emu/services.h" // struct emu_services
#include "test/emu/warp.h"     // emu_report, emu_memory_open
#include <algorithm>           // std::max
#include "test/emu/fault.h"    // emu_fault_stops
#include <deque>               // std::deque
#include <functional>          // std::function
#include <map>                 // std::map
#include <memory>              // std::shared_ptr
#include <string>              // std::string

typedef enum cudaError {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
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

inline cudaError_t emu_last_error = cudaSuccess;
inline thread_local int emu_device; // of this thread: a new one begins with the first
static inline cudaError_t emu_error(cudaError_t status) {
    if (emu_is_broken)
        return cudaErrorIllegalAddress;
    if (status != cudaSuccess && status != cudaErrorNotReady)
        emu_last_error = status;
    return status;
}

struct emu_work {
    const char *name;
    std::function<void()> run;
    const struct emu_stream *other; // a wait: until so much of it is done; NULL: none
    uint64_t position;
};
struct emu_graph {
    std::vector<struct emu_work> works;
    bool spoiled; // by a call that can't be recorded
    bool ended;
};
// Work of a capture that other work is behind: of each of its streams so many works.
typedef std::map<const struct emu_stream *, uint64_t> emu_recorded_work;
struct emu_stream {
    const struct emu_services *services; // the first member: a library's stand-in looks there
    bool follows_null; // made without cudaStreamNonBlocking: waits for the stream NULL, which waits for it
    int priority;      // of no effect here
    int beside;        // made while there were so many others
    bool computes;     // a kernel or a memset ran in it: it is no stream of copies alone
    std::deque<struct emu_work> queue;
    uint64_t enqueued, done;                   // so far
    std::shared_ptr<struct emu_graph> capture; // what it records, if it does
    bool began_capture;
    emu_recorded_work behind; // the stream's next work
    double modeled_seconds;   // of its work so far that has a time of its own (emu_model_time)
    uint64_t copies;          // of its work so far
};
struct emu_event {
    bool has_time, recorded;
    int device;
    struct emu_stream *stream; // recorded there, behind so many works
    uint64_t position;
    double time, modeled;                      // of its stream
    uint64_t copies;                           // of its stream
    std::shared_ptr<struct emu_graph> capture; // recorded while it was open
    emu_recorded_work behind;
};
typedef struct emu_stream *cudaStream_t;
typedef struct emu_event *cudaEvent_t;
struct emu_graph_handle {
    std::shared_ptr<struct emu_graph> graph;
};
typedef struct emu_graph_handle *cudaGraph_t;
typedef struct emu_graph_handle *cudaGraphExec_t;

inline std::vector<struct emu_stream *> emu_streams;
inline thread_local int emu_captures = 0;     // that this thread has begun
inline const char *emu_running = "(nothing)"; // the name of the work at hand

// EMU_WORK_COUNTS names a file, to which the program's end appends a line for each kind of work that ran: how often,
// and its name. scripts/count_launches.py reads it.
struct emu_work_counts {
    std::map<std::string, uint64_t> counts;
    const char *path = getenv("EMU_WORK_COUNTS");
    ~emu_work_counts() {
        FILE *file = path && !counts.empty() ? fopen(path, "a") : NULL;
        for (const auto &count : counts)
            if (file)
                fprintf(file, "%llu %s\n", (unsigned long long)count.second, count.first.c_str());
        if (file)
            fclose(file);
    }
};
inline struct emu_work_counts emu_work_counts;

static void emu_run_work(const struct emu_work *work) {
    const char *outer = emu_running;
    if (emu_fault_stops(work->name))
        return;
    emu_running = work->name;
    if (emu_work_counts.path)
        emu_work_counts.counts[work->name]++;
    work->run();
    emu_check_red_zones(work->name);
    emu_running = outer;
}
static void emu_run_eager(void);
// Runs a stream's work until so much is done.
static void emu_run_until(struct emu_stream *stream, uint64_t position) {
    if (stream->done >= position)
        return;
    emu_memory_open();
    while (stream->done < position && !stream->queue.empty()) {
        const struct emu_work work = std::move(stream->queue.front());
        stream->queue.pop_front();
        __atomic_store_n(&stream->done, stream->done + 1, __ATOMIC_RELEASE); // cudaEventQuery looks from any thread
        emu_run_work(&work);
        emu_run_eager();
    }
    emu_memory_close();
}
static bool emu_is_early(const struct emu_stream *stream) {
    const char *which = getenv("EMU_STREAMS");
    return which && stream->beside > 0 && (strcmp(which, "eager") == 0 || atoi(which) == stream->beside);
}
// Runs what the early streams have to do and need not wait for.
inline bool emu_runs_eager = false; // so that what they run does not begin it anew
static void emu_run_eager(void) {
    if (emu_runs_eager)
        return;
    emu_runs_eager = true;
    for (bool any = true; any;) {
        any = false;
        for (struct emu_stream *stream : emu_streams)
            while (!stream->queue.empty() && emu_is_early(stream)) {
                const struct emu_work *next = &stream->queue.front();
                if (next->other && next->other->done < next->position)
                    break;
                emu_run_until(stream, stream->done + 1);
                any = true;
            }
    }
    emu_runs_eager = false;
}
static void emu_run_all(struct emu_stream *stream) { emu_run_until(stream, stream->enqueued); }
static void emu_run_following_null(void) {
    for (struct emu_stream *stream : emu_streams)
        if (stream->follows_null)
            emu_run_all(stream);
}
static void emu_run_everything(void) {
    for (struct emu_stream *stream : emu_streams)
        emu_run_all(stream);
}
static bool emu_blocking(void) {
    const char *text = getenv("CUDA_LAUNCH_BLOCKING");
    return text && strcmp(text, "1") == 0;
}
// Of any stream: then some calls are forbidden, and spoil what is recorded.
static cudaError_t emu_forbid_while_recording(void) {
    bool recording = false;
    for (struct emu_stream *stream : emu_streams)
        if (stream->capture)
            recording = stream->capture->spoiled = true;
    return recording ? emu_error(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

// A call that CUDA refuses in a capture, which is lost by that.
static cudaError_t emu_spoil(struct emu_graph *capture, cudaError_t status) {
    const cudaError_t found = capture->spoiled ? cudaErrorStreamCaptureInvalidated : status;
    capture->spoiled = true;
    return emu_error(found);
}
// Work on the stream NULL would wait for what a stream that it waits for only records.
static cudaError_t emu_forbid_null_while_recording(void) {
    for (struct emu_stream *stream : emu_streams)
        if (stream->capture && stream->follows_null)
            return emu_spoil(stream->capture.get(), cudaErrorStreamCaptureImplicit);
    return cudaSuccess;
}

// All that the device does goes through here; a library's stand-in calls it as well. `run` holds its arguments by
// value.
static cudaError_t emu_enqueue(cudaStream_t stream, const char *name, std::function<void()> run,
                               const struct emu_stream *other = NULL, uint64_t position = 0) {
    struct emu_work work = {name, std::move(run), other, position};
    if (stream && stream->capture) {
        if (stream->capture->spoiled)
            return emu_error(cudaErrorStreamCaptureInvalidated);
        stream->capture->works.push_back(std::move(work));
        stream->behind[stream]++;
        return cudaSuccess;
    }
    if (!stream) {
        const cudaError_t status = emu_forbid_null_while_recording();
        if (status != cudaSuccess)
            return status;
        emu_run_following_null();
        emu_memory_open();
        emu_run_work(&work);
        emu_memory_close();
        return cudaSuccess;
    }
    stream->queue.push_back(std::move(work));
    stream->enqueued++;
    if (emu_blocking())
        emu_run_all(stream);
    emu_run_eager();
    return emu_error(cudaSuccess);
}

static int emu_enqueue_for_library(struct emu_stream *stream, const char *name, std::function<void()> run) {
    stream->computes = true;
    return emu_enqueue(stream, name, std::move(run));
}
static int emu_forbid_for_library(void) { return emu_forbid_while_recording(); }
// An op's test gives memory of its own, too, which no allocation surrounds.
inline bool emu_host_memory_serves = false;
#ifdef DEVICE_MEMORY_MANAGED
static const bool emu_host_memory_is_said_to_serve = (emu_host_memory_serves = true);
#endif
static bool emu_holds(const void *begin, size_t bytes) {
    const struct emu_allocation *a = emu_find_allocation(begin);
    if (!a)
        return emu_host_memory_serves;
    return a->kind != EMU_PINNED && (const char *)begin >= a->begin &&
           (const char *)begin + bytes <= a->begin + a->bytes;
}
static const struct emu_services emu_services = {EMU_SERVICES_MADE, emu_enqueue_for_library, emu_forbid_for_library,
                                                 emu_holds};

// --- Streams ------------------------------------------------------------------------------------------------------

enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1 };

// The lower the number, the greater the priority; 0 where none is given.
enum { EMU_LEAST_PRIORITY = 0, EMU_GREATEST_PRIORITY = -5 };

static inline cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = EMU_LEAST_PRIORITY;
    *greatest = EMU_GREATEST_PRIORITY;
    return cudaSuccess;
}
static inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    *stream = new emu_stream();
    (*stream)->services = &emu_services;
    (*stream)->follows_null = !(flags & cudaStreamNonBlocking);
    (*stream)->beside = (int)emu_streams.size();
    (*stream)->priority = priority > EMU_LEAST_PRIORITY      ? (int)EMU_LEAST_PRIORITY
                          : priority < EMU_GREATEST_PRIORITY ? (int)EMU_GREATEST_PRIORITY
                                                             : priority;
    emu_streams.push_back(*stream);
    return cudaSuccess;
}
static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, EMU_LEAST_PRIORITY);
}
static inline cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = stream ? stream->priority : (int)EMU_LEAST_PRIORITY;
    return cudaSuccess;
}
static inline cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, 0); }
static inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    const cudaError_t status = emu_forbid_while_recording();
    if (status != cudaSuccess)
        return status;
    if (stream)
        emu_run_all(stream);
    else
        emu_run_following_null();
    return emu_error(cudaSuccess);
}
static inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    emu_run_all(stream);
    for (size_t i = 0; i < emu_streams.size(); i++)
        if (emu_streams[i] == stream)
            emu_streams.erase(emu_streams.begin() + (long)i);
    delete stream;
    return cudaSuccess;
}
// Not ready as long as anything is left; one piece of it is done with each call, so that who asks again comes to an
// end.
static inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
    if (!stream || stream->done == stream->enqueued)
        return cudaSuccess;
    emu_run_until(stream, stream->done + 1);
    return cudaErrorNotReady;
}
static inline cudaError_t cudaDeviceSynchronize(void) {
    const cudaError_t status = emu_forbid_while_recording();
    if (status == cudaSuccess)
        emu_run_everything();
    return emu_error(status);
}

// Says how long the work at hand takes on the device. The time between two events of a stream is that of all such work
// between them, or what really went by where there is none, or where something is copied between them, too.
static inline void emu_model_time(cudaStream_t stream, double seconds) {
    if (stream)
        stream->modeled_seconds += seconds;
}

// --- Events -------------------------------------------------------------------------------------------------------

enum { cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2, cudaEventRecordDefault = 0 };

static inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = new emu_event();
    (*event)->has_time = !(flags & cudaEventDisableTiming);
    (*event)->device = emu_device;
    return cudaSuccess;
}
static inline cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
static inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = NULL) {
    event->capture = stream ? stream->capture : NULL;
    if (event->capture) {
        event->behind = stream->behind;
        return cudaSuccess;
    }
    event->recorded = true;
    event->stream = stream;
    event->time = 0;
    const cudaError_t status = emu_enqueue(stream, "an event", [event, stream] {
        const double now = emu_seconds();
        event->modeled = stream ? stream->modeled_seconds : 0;
        event->copies = stream ? stream->copies : 0;
        __atomic_store(&event->time, &now, __ATOMIC_RELEASE);
    });
    event->position = stream ? stream->enqueued : 0;
    return status;
}
static inline bool emu_event_done(cudaEvent_t event) {
    return !event->recorded || !event->stream ||
           __atomic_load_n(&event->stream->done, __ATOMIC_ACQUIRE) >= event->position;
}
// A stream counts its work before it runs it: another thread may see an event passed whose time is not there yet.
static inline double emu_event_time(cudaEvent_t event) {
    double time = 0;
    do
        __atomic_load(&event->time, &time, __ATOMIC_ACQUIRE);
    while (time == 0);
    return time;
}
// Runs nothing, so that a thread beside the one that enqueues may ask. CUDA would let a thread ask that never chose its
// device, and open the first device for it: memory taken there, by a process that uses another.
static inline cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (event->device != emu_device)
        emu_report("cudaEventQuery: an event of device %d, from a thread whose device is %d", event->device,
                   emu_device);
    if (event->capture)
        return emu_error(cudaErrorCapturedEvent);
    return emu_event_done(event) ? cudaSuccess : cudaErrorNotReady;
}
static inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (event->capture)
        return emu_error(cudaErrorCapturedEvent);
    const cudaError_t status = emu_forbid_while_recording();
    if (status != cudaSuccess)
        return status;
    if (!emu_event_done(event))
        emu_run_until(event->stream, event->position);
    return emu_error(cudaSuccess);
}
// An event of a capture makes the stream part of that capture. From a stream of a capture any other event is refused,
// one that was never recorded too: CUDA's manual exempts none.
static inline cudaError_t emu_wait_captured(cudaStream_t stream, cudaEvent_t event) {
    struct emu_graph *const capture = event->capture.get();
    if (capture->ended)
        return emu_error(cudaErrorCapturedEvent);
    if (!stream)
        return emu_spoil(capture, cudaErrorStreamCaptureImplicit);
    if (stream->capture && stream->capture != event->capture) {
        emu_spoil(stream->capture.get(), cudaErrorStreamCaptureMerge);
        return emu_spoil(capture, cudaErrorStreamCaptureMerge);
    }
    if (!stream->capture)
        stream->behind.clear();
    stream->capture = event->capture;
    for (const auto &done : event->behind)
        stream->behind[done.first] = std::max(stream->behind[done.first], done.second);
    return cudaSuccess;
}
static inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0) {
    if (event->capture)
        return emu_wait_captured(stream, event);
    if (stream && stream->capture)
        return emu_spoil(stream->capture.get(), cudaErrorStreamCaptureIsolation);
    if (!event->recorded || !event->stream)
        return cudaSuccess;
    struct emu_stream *other = event->stream;
    const uint64_t position = event->position;
    return emu_enqueue(
        stream, "a wait for an event", [other, position] { emu_run_until(other, position); }, other, position);
}
static inline cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    if (!begin->has_time || !end->has_time || !begin->recorded || !end->recorded)
        return emu_error(cudaErrorInvalidResourceHandle);
    if (emu_captures > 0) // of this thread: it asks what cudaEventQuery asks, which a capture forbids
        return emu_forbid_while_recording();
    if (!emu_event_done(begin) || !emu_event_done(end))
        return cudaErrorNotReady;
    const double passed = emu_event_time(end) - emu_event_time(begin), modeled = end->modeled - begin->modeled;
    const bool is_modeled = begin->stream == end->stream && modeled > 0 && begin->copies == end->copies;
    *milliseconds = (float)((is_modeled ? modeled : passed) * 1e3);
    return cudaSuccess;
}
static inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
    if (!emu_event_done(event))
        emu_run_until(event->stream, event->position);
    delete event;
    return cudaSuccess;
}

// --- Graphs -------------------------------------------------------------------------------------------------------

enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal,
    cudaStreamCaptureModeThreadLocal,
    cudaStreamCaptureModeRelaxed
};

static inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    if (!stream || emu_planted.kind == EMU_CAPTURE)
        return emu_error(cudaErrorStreamCaptureUnsupported);
    if (stream->capture)
        return emu_error(cudaErrorIllegalState);
    stream->capture = std::make_shared<struct emu_graph>();
    stream->began_capture = true;
    emu_captures++;
    stream->behind.clear();
    return cudaSuccess;
}
static inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    *graph = NULL;
    if (!stream || !stream->capture)
        return emu_error(cudaErrorIllegalState);
    const std::shared_ptr<struct emu_graph> recorded = stream->capture;
    if (!stream->began_capture)
        return emu_spoil(recorded.get(), cudaErrorStreamCaptureUnmatched);
    bool joined = true;
    stream->began_capture = false;
    emu_captures--;
    recorded->ended = true;
    for (struct emu_stream *other : emu_streams) // the streams that became part of it, too
        if (other->capture == recorded) {
            joined = joined && stream->behind[other] >= other->behind[other];
            other->capture = NULL;
        }
    if (!joined)
        return emu_spoil(recorded.get(), cudaErrorStreamCaptureUnjoined);
    if (recorded->spoiled)
        return emu_error(cudaErrorStreamCaptureInvalidated);
    *graph = new emu_graph_handle();
    (*graph)->graph = recorded;
    return cudaSuccess;
}
static inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph,
                                               unsigned long long flags = 0) {
    const char *most = getenv("EMU_GRAPH_NODES");
    *executable = NULL;
    if (most && graph->graph->works.size() > strtoull(most, NULL, 0))
        return emu_error(cudaErrorMemoryAllocation);
    *executable = new emu_graph_handle(*graph);
    return cudaSuccess;
}
static inline cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    const std::shared_ptr<struct emu_graph> graph = executable->graph;
    return emu_enqueue(stream, "a graph", [graph] {
        for (const struct emu_work &work : graph->works)
            emu_run_work(&work);
    });
}
static inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}
static inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    delete executable;
    return cudaSuccess;
}
