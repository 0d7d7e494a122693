// The self-check of CUDA graphs: in a start's first step with micro-steps of a kind, one is computed kernel by kernel,
// then twice as a graph, over NaNs and zeros, so that lost work shows. If loss or squares of gradients differ, the run
// uses no graph. self_check.txt tells a later start of a check that did not end.
#pragma once
#include "run/check_deadline.cuh" // deadline_begin
#include "run/self_check.cuh"     // self_check_any_rank_wants
#include "run/self_known.cuh"     // self_check_known, self_check_hash_run

#ifdef TARGET_CUDA
#include "kernels/matmul/choices.cuh" // matmul_products_hash

struct graph_check_result {
    struct loss_sum loss;
    double squares; // of this rank's gradients; 0: they are not complete
};
struct graph_check_results {
    struct graph_check_result kinds[MICRO_STEP_KINDS]; // 0: the step has none of this kind
};

struct graph_check_scales {
    void *device[4], *host[4]; // NULL: not there
    size_t bytes[4];
    bool weights_known;
};
// Returns a host copy of the state of FP8's scales; the caller frees each s.host[i]. Waits for the device.
static struct graph_check_scales graph_check_save(struct gpt *m) {
    struct fp8_state *f = &m->fp8;
    struct graph_check_scales s = {
        {f->scales, f->weight_amaxes, f->counts, f->history},
        {NULL, NULL, NULL, NULL},
        {fp8_scales_bytes(f), fp8_weight_amaxes_bytes(f), FP8_COUNTS_BYTES, fp8_history_bytes(f)},
        f->weights_known};
    for (int i = 0; i < 4; i++)
        if (s.device[i]) {
            s.host[i] = malloc(s.bytes[i]);
            if (!s.host[i])
                fail("out of memory");
            device_download(s.host[i], s.device[i], s.bytes[i], m->dev);
        }
    return s;
}
// Sets the state of FP8's scales back to what graph_check_save copied, and frees nothing. Waits for the device.
static void graph_check_restore(const struct graph_check_scales *s, struct gpt *m) {
    for (int i = 0; i < 4; i++)
        if (s->device[i])
            device_upload(s->device[i], s->host[i], s->bytes[i], m->dev);
    m->fp8.weights_known = s->weights_known;
    device_synchronize(m->dev);
}

struct graph_check_work {
    struct batch batch;
    double scale;
    struct graph_check_scales before; // graph_check_pass sets them back
};

enum { GRAPH_CHECK_STEPS = 3 };
// indices (GRAPH_CHECK_STEPS) = micro-steps of a step of of_step, with at least one of each kind of that step.
static void graph_check_indices(int *indices, const struct gpt *m, int of_step) {
    const int last = of_step - 1;
    indices[0] = 0;
    indices[1] = last > 0 && last_micro_step_differs(m) ? 1 : last;
    indices[2] = last;
}
// Returns kinds (bits 1 << kind) to check in a step of of_step micro-steps; 0 while FP8 calibrates, which records none.
static unsigned graph_check_due(const struct run *r, int of_step) {
    const struct gpt *m = r->model;
    int indices[GRAPH_CHECK_STEPS];
    unsigned kinds = 0;
    graph_check_indices(indices, m, of_step);
    for (int i = 0; i < GRAPH_CHECK_STEPS; i++)
        kinds |= 1u << micro_step_kind(m, indices[i], of_step);
    return m->fp8.calibrates ? 0 : kinds & ~r->self_check.graphs_checked;
}

// Returns the sum of this rank's squared gradients after a micro-step, or 0 if they are not complete: not reduced over
// ranks yet, or on the host, where a step's last micro-step sums them. Waits for the device.
static double graph_check_squares(struct gpt *m) {
    const struct shards *s = &m->zero.shards;
    double result = 0, *const squares = &m->io.reports[s->rank * report_width(m) + REPORT_SQUARES];
    if (!m->steps.is_last && last_micro_step_differs(m))
        return 0;
    region(m, REGION_UPDATE);
    phase(m, PHASES_UPDATE, -1, "gradient norm");
    void *const ws = workspace(m, optimizer_squares_workspace_bytes(&m->optimizer));
    if (!m->zero.grads_on_host)
        RUN(m, optimizer_sum_squares(&m->optimizer, squares, ws));
    RUN(m, device_download(&result, squares, sizeof result, m->dev));
    return result;
}
// Runs the step's micro-step `index` over activations of NaNs. Returns its loss, and graph_check_squares.
static struct graph_check_result graph_check_micro_step(struct gpt *m, int index, struct batch batch, double scale) {
    const struct arenas *arenas = &m->timeline.arenas;
    struct graph_check_result result;
    memset(&result, 0, sizeof result);
    cuda_check(cudaDeviceSynchronize()); // copies and collectives have streams of their own
    judge_fill_with_nans(arenas->base[ARENA_ACTIVATIONS], arenas->bytes[ARENA_ACTIVATIONS], m->dev);
    device_zero(&m->io.results->loss, sizeof m->io.results->loss, m->dev);
    gpt_micro_step(m, index, batch, scale);
    result.squares = graph_check_squares(m);
    RUN(m, device_download(&result.loss, &m->io.results->loss, sizeof result.loss, m->dev));
    return result;
}
// Runs a micro-step of each of the step's kinds, all on one batch, over gradients of 0. Waits. Every rank calls this.
static struct graph_check_results graph_check_pass(struct run *r, const struct graph_check_work *work) {
    struct gpt *m = r->model;
    const struct arenas *arenas = &m->timeline.arenas;
    const uint64_t micro_step = m->steps.micro_step;
    const int of_step = m->steps.of_step;
    int indices[GRAPH_CHECK_STEPS];
    struct graph_check_results results;
    unsigned done = 0;
    memset(&results, 0, sizeof results);
    graph_check_indices(indices, m, of_step);
    cuda_check(cudaDeviceSynchronize());
    if (arenas->bytes[ARENA_GRADIENTS] > 0)
        device_zero(arenas->base[ARENA_GRADIENTS], arenas->bytes[ARENA_GRADIENTS],
                    m->dev); // gaps between tensors stay 0
    for (int i = 0; i < GRAPH_CHECK_STEPS; i++) {
        const int kind = micro_step_kind(m, indices[i], of_step);
        if (!(done >> kind & 1))
            results.kinds[kind] = graph_check_micro_step(m, indices[i], work->batch, work->scale);
        done |= 1u << kind;
    }
    m->steps.micro_step = micro_step;
    cuda_check(cudaDeviceSynchronize());
    graph_check_restore(&work->before, m);
    return results;
}
// Runs graph_check_pass with a launch of each kernel, and leaves graphs as they are. Every rank calls this.
static struct graph_check_results graph_check_plain(struct run *r, const struct graph_check_work *work) {
    char refusal[sizeof r->dev.graphs_refusal];
    memcpy(refusal, r->dev.graphs_refusal, sizeof refusal);
    snprintf(r->dev.graphs_refusal, sizeof refusal, "not in this pass");
    const struct graph_check_results results = graph_check_pass(r, work);
    memcpy(r->dev.graphs_refusal, refusal, sizeof refusal);
    return results;
}
// Whether two results are equal, losses to the bit. Backward's sums in another order round to a neighbor in bf16, up to
// 2^-7 away, so squares differ by up to 2^-6. FP8's neighbors are farther away, but as many times fewer values change.
static bool graph_check_same(struct run *r, const struct graph_check_result *a, const struct graph_check_result *b) {
    const double bound = r->config->attention.deterministic_mode ? 0 : ldexp(a->squares, -6);
    return a->loss.sum == b->loss.sum && a->loss.count == b->loss.count && fabs(a->squares - b->squares) <= bound;
}
// Whether results of all kinds are equal on every rank. *kind: the first that differs on this rank, or the last kind.
static bool graph_check_equal(struct run *r, const struct graph_check_results *a, const struct graph_check_results *b,
                              int *kind) {
    *kind = 0;
    while (*kind < MICRO_STEP_KINDS && graph_check_same(r, &a->kinds[*kind], &b->kinds[*kind]))
        ++*kind;
    const bool differs = *kind < MICRO_STEP_KINDS;
    *kind -= !differs;
    return !parallel_largest(r->parallel, differs, "the self-check of graphs");
}

// Writes a verdict's key (SELF_CHECK_KEY bytes), which also changes with ranks, plan, lasting options and algorithms.
static void graph_check_key(char *key, struct run *r, int kind) {
    char request[SELF_CHECK_REQUEST];
    const struct config *c = r->config;
    const bool by_cudnn = r->attention.backend == ATTENTION_FUSED || config_attention_in_fp8(c) != FP8_ATTENTION_NONE;
    snprintf(request, sizeof request,
             " backend=%d ranks=%d by=%s products=%016" PRIx64 " graphs=%016" PRIx64 " kind=%d",
             (int)r->attention.backend, c->ranks, by_cudnn ? fused_describe(&r->dev) : "ours",
             matmul_products_hash(r->dev.matmul), self_check_hash_run(r), kind);
    self_check_write_key(key, request, &r->dev);
}
// Refuses graphs in this start, which needs no check of them any more.
static void graphs_refuse(struct run *r, const char *why) {
    snprintf(r->dev.graphs_refusal, sizeof r->dev.graphs_refusal, "%s", why);
    r->self_check.graphs_checked = ~0u;
}
// Looks for earlier starts' verdicts on the graphs, after tune_matmuls. Refuses graphs whose check ended badly, or did
// not end, as where it hung. Every rank calls this.
static void graphs_recall(struct run *r) {
    struct self_check *s = &r->self_check;
    char key[SELF_CHECK_KEY];
    s->graphs_checked = ~0u;
    if (!r->config->device.cuda_graphs || !self_check_any_rank_wants(r))
        return;
    s->graphs_checked = 0;
    for (int kind = 0; kind < MICRO_STEP_KINDS; kind++) {
        graph_check_key(key, r, kind);
        const enum self_verdict_kind known = self_check_known(r, key);
        s->graphs_checked |= known == SELF_CHECK_RIGHT ? 1u << kind : 0;
        if (known == SELF_CHECK_WRONG)
            graphs_refuse(r, "an earlier start's check of graphs failed, hung or was killed, by " SELF_CHECK_NAME
                             " in --out; --self-check always checks again");
    }
}
// Keeps a verdict on graphs of some kinds (bits) in --out, before any rank goes on. Every rank calls this.
static void graphs_keep(struct run *r, unsigned kinds, enum self_verdict_kind kind_of_verdict) {
    const struct self_verdict verdict = {kind_of_verdict, "graphs", 0, true};
    char key[SELF_CHECK_KEY], *lines = NULL;
    for (int kind = 0; kind < MICRO_STEP_KINDS; kind++)
        if (kinds >> kind & 1) {
            graph_check_key(key, r, kind);
            self_check_add(&lines, &verdict, key);
        }
    self_check_append(r, lines);
    free(lines);
    parallel_barrier(r->parallel, "the self-check of graphs");
}

// Prints a warning, with results of a kind of micro-step.
static void graph_check_warn(const char *what, int kind, const struct graph_check_results *plain,
                             const struct graph_check_results *graph) {
    static const char *const names[MICRO_STEP_KINDS] = {"the first", "one that adds to its gradients", "the only one",
                                                        "the last"};
    const struct graph_check_result *a = &plain->kinds[kind], *b = &graph->kinds[kind];
    say_warning("self-check: %s (of a step's micro-steps %s: loss %.9g and %.9g, squares of gradients %.9g and %.9g): "
                "each kernel is launched by a call of its own, as by --cuda-graphs=false",
                what, names[kind], a->loss.sum, b->loss.sum, a->squares, b->squares);
}
// Whether plain results are finite on all ranks. If not, warns, and refuses graphs. Every rank calls this.
static bool graph_check_can_judge(struct run *r, const struct graph_check_results *plain) {
    bool finite = true;
    for (int kind = 0; kind < MICRO_STEP_KINDS && finite; kind++) {
        const struct graph_check_result *a = &plain->kinds[kind];
        finite = isfinite(a->loss.sum) && isfinite(a->squares);
        if (!finite)
            say_warning("self-check: a micro-step has loss %g and squares of gradients %g: a kernel left NaNs that its "
                        "memory held before, or the data or the weights have NaNs or Infs",
                        a->loss.sum, a->squares);
    }
    if (!parallel_largest(r->parallel, !finite, "the self-check of graphs"))
        return true;
    graphs_refuse(r, "a micro-step's loss or gradients are not finite, so that its graph can't be judged");
    return false;
}
// Whether this rank has graphs of the kinds (bits).
static bool graph_check_recorded(struct gpt *m, unsigned kinds) {
    bool all = !*graphs_refusal(m->dev);
    for (int kind = 0; kind < MICRO_STEP_KINDS; kind++)
        if (kinds >> kind & 1)
            all = all && (graph_recorded(&m->steps.graphs[kind].work) || m->steps.graphs[kind].segments.recorded);
    return all;
}
// Compares the step's graphs, as they are recorded and then again, with plain results, which took `seconds`. Returns
// RIGHT, WRONG, after a warning and with graphs refused, or UNKNOWN if a rank recorded none. Every rank calls this.
static enum self_verdict_kind graph_check_judge(struct run *r, const struct graph_check_work *work, unsigned kinds,
                                                const struct graph_check_results *plain, double seconds) {
    const struct timed_check check = {"a micro-step, enqueued as a graph,",
                                      "the next start uses no graphs, as with --cuda-graphs=false"};
    struct graph_check_results graph;
    bool equal = true;
    int differs = 0, again_differs;
    deadline_begin(r, &check, 4 * seconds);
    for (int i = 0; i < 2 && equal; i++) {
        graph = graph_check_pass(r, work);
        equal = graph_check_equal(r, plain, &graph, &differs);
    }
    deadline_end(r);
    if (equal)
        return parallel_largest(r->parallel, !graph_check_recorded(r->model, kinds), "the self-check of graphs")
                   ? SELF_CHECK_UNKNOWN
                   : SELF_CHECK_RIGHT;
    gpt_free_graphs(r->model);
    const struct graph_check_results again = graph_check_plain(r, work);
    const char *const what = graph_check_equal(r, plain, &again, &again_differs)
                                 ? "a micro-step that is enqueued as a graph gives another loss or other gradients"
                                 : "a micro-step that is computed again gives other bits";
    graphs_refuse(r, what);
    graph_check_warn(what, differs, plain, &graph);
    return SELF_CHECK_WRONG;
}
// Checks graphs of the step's micro-steps, of kinds not known to be right. If results differ, warns and uses none.
// batch, scale: of the next gpt_micro_step. No step may be in flight. Restarts the step's time. Every rank calls this.
static void check_graphs(struct run *r, struct batch batch, double scale) {
    struct gpt *m = r->model;
    const unsigned kinds = graph_check_due(r, m->steps.of_step);
    if (!kinds)
        return;
    const uint64_t sent_bytes = r->collectives.sent_bytes;
    const struct graph_check_work work = {batch, scale, graph_check_save(m)};
    const double begin = seconds_now();
    const struct graph_check_results plain = graph_check_plain(r, &work);
    const double seconds = seconds_now() - begin;
    if (graph_check_can_judge(r, &plain)) {
        r->self_check.graphs_checked |= kinds;
        graphs_keep(r, kinds, SELF_CHECK_BEGUN); // so that after a hang or a fault the next start knows
        graphs_keep(r, kinds, graph_check_judge(r, &work, kinds, &plain, seconds));
    }
    r->collectives.sent_bytes = sent_bytes;
    if (r->parallel)
        collectives_times(&r->collectives, &r->comm_busy_s, &r->comm_waited_s);
    step_starts(r); // the step's time is its own
    for (int i = 0; i < 4; i++)
        free(work.before.host[i]);
}

#else

static void check_graphs(struct run *r, struct batch batch, double scale) {}
static void graphs_recall(struct run *r) {}
static unsigned graph_check_due(const struct run *r, int of_step) { return 0; }

#endif
