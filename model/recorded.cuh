// A micro-step's forward and backward as a recorded CUDA graph or, if it has collectives, as several between these.
#pragma once
#include "kernels/device_queue.cuh"  // work graphs
#include "kernels/work_segments.cuh" // segments_begin
#include "model/state.cuh"           // struct gpt

// Whether the current micro-step, number `index` of its step, begins or awaits collectives, which no graph can hold.
static bool micro_step_has_collectives(const struct gpt *m, int index) {
    const struct shards *s = &m->zero.shards;
    return s->ranks > 1 && (shards_gradients(s) || m->steps.is_last || (shards_optimizer(s) && index == 0));
}
// Whether a step's last micro-step enqueues other work than those before it.
static bool last_micro_step_differs(const struct gpt *m) {
    const struct shards *s = &m->zero.shards;
    return (s->ranks > 1 && !shards_gradients(s)) || m->zero.grads_on_host;
}
// Returns the kind, below MICRO_STEP_KINDS, of micro-step `index` of a step of of_step: all of a kind share a graph.
static int micro_step_kind(const struct gpt *m, int index, int of_step) {
    const bool last = index == of_step - 1 && last_micro_step_differs(m);
    return (index > 0 ? MICRO_STEP_ADDS : 0) | (last ? MICRO_STEP_LAST : 0);
}
static void gpt_free_graphs(struct gpt *m) {
    for (int i = 0; i < MICRO_STEP_KINDS; i++) {
        graph_free(&m->steps.graphs[i].work);
        segments_free(&m->steps.graphs[i].segments);
    }
}
// The part of a micro-step that is the same each time, and so can be recorded.
typedef void micro_step_work(struct gpt *m, double scale);

// Enqueues the work as one graph, which the first call records and later calls launch. Later calls ignore scale. Where
// CUDA can't record, just runs the work. Returns false, with nothing enqueued, if CUDA refuses the recorded graph.
static bool enqueue_as_graph(struct gpt *m, struct micro_step_graph *graph, micro_step_work *work, double scale) {
    if (!graph_recorded(&graph->work)) {
        const bool begun = graph_begin(m->dev);
        work(m, scale);
        if (!begun || !graph_end(&graph->work, m->dev))
            return !begun;
    }
    graph_launch(&graph->work, m->dev);
    return true;
}
// Enqueues the work as several graphs, cut at collectives and transfers. The first call records them. Later calls run
// `work` too, for its collectives and transfers, but skip its ops and launch the graphs. Later calls ignore scale.
static void enqueue_as_segments(struct gpt *m, struct micro_step_graph *graph, micro_step_work *work, double scale) {
    segments_begin(&graph->segments, m->dev);
    work(m, scale);
    segments_end(m->dev);
}
// Enqueues the work of micro-step `index`. The first of a kind runs unrecorded, as libraries' first calls must. The
// next records graphs, reused until `scale` changes. Planning, calibration, watched phases and --cuda-graphs=false run
// unrecorded. Returns false, with nothing enqueued, if CUDA refuses a graph of the whole work: call again.
static bool enqueue_recorded(struct gpt *m, int index, micro_step_work *work, double scale) {
    const bool watched = m->timeline.planning || TIMELINE_IS_WATCHED || m->fp8.calibrates;
    struct micro_step_graph *const graph = &m->steps.graphs[micro_step_kind(m, index, m->steps.of_step)];
    if (!DEVICE_HAS_GRAPHS || !m->config.device.cuda_graphs || *graphs_refusal(m->dev) || !graph->warm || watched) {
        work(m, scale);
        graph->warm = !m->timeline.planning;
        return true;
    }
    if (m->steps.graphs_scale != scale) {
        gpt_free_graphs(m); // the batch has grown: all kinds, also those that will not run again
        m->steps.graphs_scale = scale;
    }
    if (!micro_step_has_collectives(m, index))
        return enqueue_as_graph(m, graph, work, scale);
    enqueue_as_segments(m, graph, work, scale);
    return true;
}
