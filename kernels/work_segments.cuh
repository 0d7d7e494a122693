// Work that is recorded in segments: what the device computes between two things that the host begins or waits for
// each time anew, a collective or a transfer, is a graph (kernels/device_queue.cuh). Collectives stay outside of graphs
// so that the control thread can query their events, which it could not if they were captured (docs/parallel.md).
//
//     segments_begin(&segments, dev);              // records the first time, enqueues what it recorded from then on
//     if (segments_op_begin(dev)) {                // false: the op is in a graph already
//         an_op(..., dev);
//         segments_op_end(dev);
//     }
//     collective_all_gather(...);                  // calls segments_cut, which enqueues the ops so far as one graph
//     segments_end(dev);
//
// The host runs the same code each time, with the same ops and cuts; what differs is that ops are skipped once they are
// recorded. Ops must enqueue the same work each time. An op begins no collective and no transfer, and waits for none.
#pragma once
#include "kernels/device.cuh"       // struct device
#include "kernels/device_queue.cuh" // struct work_graph
#include "runtime/machine/error.h"  // fail
#include <stdio.h>                  // fprintf
#include <stdlib.h>                 // realloc, abort

// A zeroed struct has recorded nothing. The caller frees it with segments_free.
struct work_segments;

// Begins to record `segments` or, once they are recorded, to enqueue them. *segments must not move until segments_end.
static void segments_begin(struct work_segments *segments, struct device *dev);
// Ends what segments_begin began: cuts the last segment (segments_cut). All count as recorded from then on. Aborts if
// there are fewer segments than were recorded. Does nothing where CUDA refused to begin a recording on the way.
static void segments_end(struct device *dev);
// Whether the caller must run an op, then call segments_op_end. Returns false only if segments_cut enqueues the op in a
// recorded graph: never on the cpu target, within an op, without segments_begin, or once CUDA refused to record.
static inline bool segments_op_begin(struct device *dev);
static inline void segments_op_end(struct device *dev);
// Ends a segment, and enqueues its graph. Call this before anything but an op is enqueued. Does nothing if the segment
// has no ops, or no segments were begun. Ends the program if CUDA refuses the graph. Aborts within an op, and where ops
// differ from what was recorded, or segments are more.
static inline void segments_cut(struct device *dev);
// Frees the recorded work and zeroes the struct.
static void segments_free(struct work_segments *segments);

#ifdef TARGET_CUDA

struct work_segment {
    struct work_graph work;
    int ops;
};
struct work_segments {
    struct work_segment *list; // (count)
    int count, capacity;
    bool recorded; // all of them
    int at;        // the segment at hand
    int ops;       // of the segment at hand, so far
    int depth;     // of ops within ops
};

static void segments_begin(struct work_segments *segments, struct device *dev) {
    segments->at = segments->ops = segments->depth = 0;
    dev->segments = segments;
}

static inline bool segments_op_begin(struct device *dev) {
    struct work_segments *const s = dev->segments;
    if (!s || s->depth++ > 0)
        return true;
    if (s->recorded)
        s->depth = 0;
    else if (s->ops == 0 && !graph_begin(dev)) {
        dev->segments = NULL; // what comes runs as it is enqueued
        return true;
    }
    s->ops++;
    return !s->recorded;
}
static inline void segments_op_end(struct device *dev) {
    if (dev->segments)
        dev->segments->depth--;
}

static void segments_abort(const char *how) {
    fprintf(stderr, "train_gpt: internal error: %s\n", how);
    abort();
}
// Returns the segment at hand, added while recording. Aborts past the recorded list, ends the program without memory.
static struct work_segment *segment_at_hand(struct work_segments *s) {
    if (s->at == s->count && s->recorded)
        segments_abort("recorded work is enqueued again with more segments than were recorded");
    if (s->at == s->capacity) {
        s->capacity = 2 * s->capacity + 16;
        s->list = (struct work_segment *)realloc(s->list, (size_t)s->capacity * sizeof *s->list);
        if (!s->list)
            fail("out of memory for the list of recorded segments");
    }
    if (s->at == s->count)
        memset(&s->list[s->count++], 0, sizeof *s->list);
    return &s->list[s->at];
}
// Ends the recording, if any, of the segment at hand, enqueues its graph, and goes to the next. Fails as segments_cut.
static void segment_enqueue(struct work_segments *s, struct device *dev) {
    struct work_segment *const segment = segment_at_hand(s);
    if (!s->recorded) {
        if (!graph_end(&segment->work, dev)) // its ops can't be run again
            fail("a part of a micro-step was lost, which can't be repeated between collectives or transfers; start "
                 "again with --cuda-graphs=false, or with a lower --memory-budget where memory was short");
        segment->ops = s->ops;
    } else if (segment->ops != s->ops)
        segments_abort("recorded work is enqueued again with other ops between two collectives or transfers");
    graph_launch(&segment->work, dev);
    s->at++;
    s->ops = 0;
}
static inline void segments_cut(struct device *dev) {
    struct work_segments *const s = dev->segments;
    if (!s)
        return;
    if (s->depth > 0)
        segments_abort("a collective or a transfer within an op of recorded work");
    if (s->ops > 0)
        segment_enqueue(s, dev);
}
static void segments_end(struct device *dev) {
    struct work_segments *const s = dev->segments;
    if (!s) // recording was refused on the way
        return;
    segments_cut(dev);
    if (s->at != s->count)
        segments_abort("recorded work is enqueued again with fewer segments than were recorded");
    s->recorded = true;
    dev->segments = NULL;
}
static void segments_free(struct work_segments *segments) {
    for (int i = 0; i < segments->count; i++)
        graph_free(&segments->list[i].work);
    free(segments->list);
    memset(segments, 0, sizeof *segments);
}

#else

struct work_segments {
    int unused;
};
static void segments_begin(struct work_segments *segments, struct device *dev) {}
static void segments_end(struct device *dev) {}
static inline bool segments_op_begin(struct device *dev) { return true; }
static inline void segments_op_end(struct device *dev) {}
static inline void segments_cut(struct device *dev) {}
static void segments_free(struct work_segments *segments) {}

#endif
