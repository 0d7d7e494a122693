// The streams, events and graphs of test/emu/stream.h. Only test/emu/emulator.cpp includes this file.
#pragma once
#include "test/emu/allocations.h" // emu_memory_open
#include "test/emu/enqueue.h"     // emu_enqueue
#include "test/emu/fault.h"       // emu_fault_stops
#include "test/emu/stream.h"      // cudaStream_t
#include <algorithm>              // std::max
#include <deque>                  // std::deque
#include <map>                    // std::map
#include <memory>                 // std::shared_ptr
#include <string>                 // std::string
#include <vector>                 // std::vector

static cudaError_t emu_last_error = cudaSuccess;
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
    const struct emu_stream *other; // for a wait: the stream whose first `position` works must be done; NULL: no wait
    uint64_t position;
};
struct emu_graph {
    std::vector<struct emu_work> works;
    bool spoiled; // by a call that can't be recorded
    bool ended;
    std::string name; // "a graph (N)": the Nth that was made
};
// Recorded work of a capture that other work comes after: for each stream, so many of its works.
typedef std::map<const struct emu_stream *, uint64_t> emu_recorded_work;
struct emu_stream {
    const struct emu_services *services; // the first member, at which a library's stand-in looks
    bool follows_null; // created without cudaStreamNonBlocking: it and the stream NULL wait for each other
    int priority;      // has no effect here
    int beside;        // how many streams there were when it was created
    bool computes;     // a kernel or a memset ran in it, so it is not only for copies
    std::deque<struct emu_work> queue;
    uint64_t enqueued, done;                   // works so far
    std::shared_ptr<struct emu_graph> capture; // what it records; NULL: nothing
    bool began_capture;
    emu_recorded_work behind; // what the stream's next work comes after
    double modeled_seconds;   // of its work so far for which emu_model_time gave a time
    uint64_t copies;          // done so far
};
struct emu_event {
    bool has_time, recorded;
    int device;
    struct emu_stream *stream; // where it was recorded, after `position` works
    uint64_t position;
    double time, modeled;                      // the host's clock, and its stream's modeled_seconds, when it happened
    uint64_t copies;                           // its stream's copies when it happened
    std::shared_ptr<struct emu_graph> capture; // the capture in which it was recorded; NULL: none
    emu_recorded_work behind;
};
struct emu_graph_handle {
    std::shared_ptr<struct emu_graph> graph;
};
static std::vector<struct emu_stream *> emu_streams;
static thread_local int emu_captures = 0;     // begun by this thread and not ended
static const char *emu_running = "(nothing)"; // the name of the work that runs

// Counts of the work that ran, by name. As the program ends they are appended to the file that EMU_WORK_COUNTS names, a
// line for each name: the count and the name. scripts/count_launches.py reads it.
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
static struct emu_work_counts emu_work_counts;

static void emu_run_now(const struct emu_work *work) {
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
static std::deque<struct emu_work> emu_unwaited; // work with the fault EMU_UNWAITED that has not run yet
static void emu_run_work(const struct emu_work *work) {
    if (emu_planted.kind == EMU_UNWAITED && strstr(work->name, emu_planted.name))
        emu_unwaited.push_back(*work);
    else
        emu_run_now(work);
}
// Runs what nothing waited for, as the host's wait ends.
static void emu_run_unwaited(void) {
    while (!emu_unwaited.empty()) {
        const struct emu_work work = std::move(emu_unwaited.front());
        emu_unwaited.pop_front();
        emu_run_now(&work);
    }
}
static void emu_run_eager(void);
// Runs a stream's work until its first `position` works are done.
static void emu_run_until(struct emu_stream *stream, uint64_t position) {
    if (stream->done >= position)
        return;
    emu_memory_open();
    while (stream->done < position && !stream->queue.empty()) {
        const struct emu_work work = std::move(stream->queue.front());
        stream->queue.pop_front();
        __atomic_store_n(&stream->done, stream->done + 1, __ATOMIC_RELEASE); // cudaEventQuery reads it from any thread
        emu_run_work(&work);
        emu_run_eager();
    }
    if (emu_memory_opened == 1)
        emu_run_unwaited();
    emu_memory_close();
}
static bool emu_is_early(const struct emu_stream *stream) {
    const char *which = getenv("EMU_STREAMS");
    return which && stream->beside > 0 && (strcmp(which, "eager") == 0 || atoi(which) == stream->beside);
}
// Whether early streams run just now, so that what they run does not begin them again.
static bool emu_runs_eager = false;
// Runs the work of early streams that need not wait for anything.
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
cudaError_t emu_forbid_while_recording(void) {
    bool recording = false;
    for (struct emu_stream *stream : emu_streams)
        if (stream->capture)
            recording = stream->capture->spoiled = true;
    return recording ? emu_error(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

// Marks a capture as spoiled by a call that CUDA refuses in it. Returns `status`, or the error of a capture that was
// spoiled before.
static cudaError_t emu_spoil(struct emu_graph *capture, cudaError_t status) {
    const cudaError_t found = capture->spoiled ? cudaErrorStreamCaptureInvalidated : status;
    capture->spoiled = true;
    return emu_error(found);
}
// Refuses work on the stream NULL while a stream that it waits for records: it would wait for work that never runs.
static cudaError_t emu_forbid_null_while_recording(void) {
    for (struct emu_stream *stream : emu_streams)
        if (stream->capture && stream->follows_null)
            return emu_spoil(stream->capture.get(), cudaErrorStreamCaptureImplicit);
    return cudaSuccess;
}

cudaError_t emu_enqueue(cudaStream_t stream, const char *name, std::function<void()> run,
                        const struct emu_stream *other, uint64_t position) {
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
        emu_run_unwaited();
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

// A lower number is a greater priority; 0 where none is given.
enum { EMU_LEAST_PRIORITY = 0, EMU_GREATEST_PRIORITY = -5 };

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = EMU_LEAST_PRIORITY;
    *greatest = EMU_GREATEST_PRIORITY;
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
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
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, EMU_LEAST_PRIORITY);
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = stream ? stream->priority : (int)EMU_LEAST_PRIORITY;
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, 0); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    const cudaError_t status = emu_forbid_while_recording();
    if (status != cudaSuccess)
        return status;
    if (stream)
        emu_run_all(stream);
    else
        emu_run_following_null();
    return emu_error(cudaSuccess);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    emu_run_all(stream);
    for (size_t i = 0; i < emu_streams.size(); i++)
        if (emu_streams[i] == stream)
            emu_streams.erase(emu_streams.begin() + (long)i);
    delete stream;
    return cudaSuccess;
}
// Returns cudaErrorNotReady as long as work is left. Each call does one piece of it, so that a caller that asks again
// and again comes to an end.
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    if (!stream || stream->done == stream->enqueued)
        return cudaSuccess;
    emu_run_until(stream, stream->done + 1);
    return cudaErrorNotReady;
}
cudaError_t cudaDeviceSynchronize(void) {
    const cudaError_t status = emu_forbid_while_recording();
    if (status == cudaSuccess)
        emu_run_everything();
    return emu_error(status);
}

void emu_model_time(cudaStream_t stream, double seconds) {
    if (stream)
        stream->modeled_seconds += seconds;
}

// --- Events -------------------------------------------------------------------------------------------------------

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = new emu_event();
    (*event)->has_time = !(flags & cudaEventDisableTiming);
    (*event)->device = emu_device;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    event->capture = stream ? stream->capture : NULL;
    if (event->capture) {
        event->behind = stream->behind;
        return cudaSuccess;
    }
    event->recorded = true;
    event->stream = stream;
    event->time = 0;
    const cudaError_t status = emu_enqueue(stream, "an event", [event, stream] {
        double now = emu_seconds(); // not const: clang's builtin takes none
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
// Returns an event's time. A stream counts work as done before it runs it, so that another thread may see an event as
// happened whose time is still to come: that is waited for.
static inline double emu_event_time(cudaEvent_t event) {
    double time = 0;
    do
        __atomic_load(&event->time, &time, __ATOMIC_ACQUIRE);
    while (time == 0);
    return time;
}
// Runs nothing, so that a second thread may ask. Reports a thread that has not chosen the event's device: on a GPU its
// question would open device 0, and take memory there.
cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (event->device != emu_device)
        emu_report("cudaEventQuery: an event of device %d, from a thread whose device is %d", event->device,
                   emu_device);
    if (event->capture)
        return emu_error(cudaErrorCapturedEvent);
    return emu_event_done(event) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (event->capture)
        return emu_error(cudaErrorCapturedEvent);
    const cudaError_t status = emu_forbid_while_recording();
    if (status != cudaSuccess)
        return status;
    if (!emu_event_done(event))
        emu_run_until(event->stream, event->position);
    return emu_error(cudaSuccess);
}
// Makes a stream part of the capture in which an event was recorded. A stream of a capture may wait for no other
// events, not even for one that was never recorded: CUDA's manual exempts none.
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
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
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
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    if (!begin->has_time || !end->has_time || !begin->recorded || !end->recorded)
        return emu_error(cudaErrorInvalidResourceHandle);
    if (emu_captures > 0) // begun by this thread: like cudaEventQuery, this asks what a capture forbids
        return emu_forbid_while_recording();
    if (!emu_event_done(begin) || !emu_event_done(end))
        return cudaErrorNotReady;
    const double passed = emu_event_time(end) - emu_event_time(begin), modeled = end->modeled - begin->modeled;
    const bool is_modeled = begin->stream == end->stream && modeled > 0 && begin->copies == end->copies;
    *milliseconds = (float)((is_modeled ? modeled : passed) * 1e3);
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    if (!emu_event_done(event))
        emu_run_until(event->stream, event->position);
    delete event;
    return cudaSuccess;
}

// --- Graphs -------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
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
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
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
    for (struct emu_stream *other : emu_streams) // also the streams that became part of the capture
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
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    const char *most = getenv("EMU_GRAPH_NODES");
    *executable = NULL;
    if (most && graph->graph->works.size() > strtoull(most, NULL, 0))
        return emu_error(cudaErrorMemoryAllocation);
    static int made = 0;
    *executable = new emu_graph_handle(*graph);
    graph->graph->name = "a graph (" + std::to_string(++made) + ")";
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    const std::shared_ptr<struct emu_graph> graph = executable->graph;
    return emu_enqueue(stream, graph->name.c_str(), [graph] {
        for (const struct emu_work &work : graph->works)
            emu_run_work(&work);
    });
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    delete executable;
    return cudaSuccess;
}
