// The self-check of CUDA graphs: a micro-step of each kind in a start's first step is computed kernel by kernel, then as
// a graph, over NaNs and zeros, so that lost work shows. If loss or squares of gradients differ in a bit, the run uses
// no graph.
#pragma once
#include "run/check_deadline.cuh" // deadline_begin
#include "run/self_check.cuh"     // self_check_any_rank_wants

#ifdef TARGET_CUDA

enum { GRAPH_CHECK_KINDS = 3 }; // of micro-steps: the first, one that adds to its gradients, the last
struct graph_check_result {
    struct loss_sum loss;
    double squares; // of this rank's gradients; 0: they are not complete
};
struct graph_check_results {
    struct graph_check_result kinds[GRAPH_CHECK_KINDS]; // 0: the step has none of this kind
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

// Returns the sum of this rank's squared gradients after a micro-step, or 0 if they are not complete: not reduced over
// ranks yet, or on the host, where a step's last micro-step sums them. Waits for the device.
static double graph_check_squares(struct gpt *m) {
    const struct shards *s = &m->zero.shards;
    double result = 0, *const squares = &m->io.reports[s->rank * report_width(m) + REPORT_SQUARES];
    if (!m->steps.is_last && (m->zero.grads_on_host || (s->ranks > 1 && !shards_gradients(s))))
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
// Runs a micro-step of each of the step's kinds, all on one batch, over gradients of 0. The first call launches each
// kernel, later ones graphs, unless these are refused. Changes FP8's scales. Waits. Every rank calls this.
static struct graph_check_results graph_check_pass(struct run *r, struct batch batch, double scale) {
    struct gpt *m = r->model;
    const struct arenas *arenas = &m->timeline.arenas;
    const uint64_t before = m->steps.micro_step;
    const int last = m->steps.of_step - 1, indices[] = {0, last > 0 && last_micro_step_differs(m) ? 1 : last, last};
    struct graph_check_results results;
    memset(&results, 0, sizeof results);
    cuda_check(cudaDeviceSynchronize());
    if (arenas->bytes[ARENA_GRADIENTS] > 0)
        device_zero(arenas->base[ARENA_GRADIENTS], arenas->bytes[ARENA_GRADIENTS],
                    m->dev); // gaps between tensors stay 0
    for (int kind = 0; kind < GRAPH_CHECK_KINDS; kind++)
        if (kind == 0 || indices[kind] > indices[kind - 1])
            results.kinds[kind] = graph_check_micro_step(m, indices[kind], batch, scale);
    m->steps.micro_step = before;
    cuda_check(cudaDeviceSynchronize());
    return results;
}
// Whether two results have the same bits on every rank. Every rank calls this.
static bool graph_check_equal(struct run *r, const struct graph_check_results *a, const struct graph_check_results *b) {
    return !parallel_largest(r->parallel, memcmp(a, b, sizeof *a) != 0, "the self-check of graphs");
}

// Writes the key of a verdict on this run's graphs (SELF_CHECK_KEY bytes). It also changes with ranks, plan, options
// that hold for more than one start, and the kinds of micro-steps in a step of so many.
static void graph_check_key(char *key, struct run *r, int micro_steps) {
    char text[OPTION_TEXT], request[SELF_CHECK_REQUEST];
    const int kinds = micro_steps < GRAPH_CHECK_KINDS ? micro_steps : (int)GRAPH_CHECK_KINDS;
    uint64_t digest = r->model->timeline.plan.peak_bytes;
    for (int i = 0; i < CONFIG_ROWS; i++)
        if (!(config_rows[i].flags & (CONFIG_THIS_START | CONFIG_PER_RANK))) {
            option_text(text, &config_rows[i], r->config);
            digest = hash64(text, strlen(text), digest);
        }
    snprintf(request, sizeof request, " backend=%d ranks=%d graphs=%016" PRIx64 " kinds=%d", (int)r->attention.backend,
             r->config->ranks, digest, kinds);
    self_check_write_key(key, request, &r->dev);
}
// Looks for an earlier start's verdict on the graphs, before self_check_save. Every rank calls this.
static void graphs_recall(struct run *r) {
    const struct config *c = r->config;
    char key[SELF_CHECK_KEY];
    struct self_verdict verdict;
    if (!self_check_any_rank_wants(r))
        return;
    if (!r->self_check.is_read)
        self_check_read(r);
    graph_check_key(key, r,
                    ramp_batch(&c->ramp, dataloader_position(r->train)) / (c->training.micro_batch_size * c->ranks));
    const bool known = c->device.self_check == CHECK_AUTO && self_check_find(&verdict, r->self_check.known, key) &&
                       verdict.kind == SELF_CHECK_RIGHT;
    r->self_check.graphs_known = !parallel_largest(r->parallel, !known, "earlier checks of graphs");
}
// Keeps, in --out, that graphs are right, unless some rank's were refused. Every rank calls this.
static void graphs_keep(struct run *r) {
    const struct self_verdict right = {SELF_CHECK_RIGHT, "graphs", 0, true};
    char key[SELF_CHECK_KEY], *line = NULL;
    if (parallel_largest(r->parallel, *graphs_refusal(&r->dev) != '\0', "the self-check of graphs"))
        return;
    graph_check_key(key, r, r->model->steps.of_step);
    self_check_add(&line, &right, key);
    self_check_append(r, line);
    free(line);
}

// Prints a warning, with results of the first kind of micro-step that differs on this rank, or of the last kind.
static void graph_check_warn(const char *what, const struct graph_check_results *plain,
                             const struct graph_check_results *graph) {
    static const char *const names[GRAPH_CHECK_KINDS] = {"the first", "one that adds to its gradients", "the last"};
    int kind = 0;
    while (kind < GRAPH_CHECK_KINDS - 1 && memcmp(&plain->kinds[kind], &graph->kinds[kind], sizeof *plain->kinds) == 0)
        kind++;
    const struct graph_check_result *a = &plain->kinds[kind], *b = &graph->kinds[kind];
    say_warning("self-check: %s (of a step's micro-steps %s: loss %.9g and %.9g, squares of gradients %.9g and %.9g): "
                "each kernel is launched by a call of its own, as by --cuda-graphs=false",
                what, names[kind], a->loss.sum, b->loss.sum, a->squares, b->squares);
}

// Checks the graphs of the step's micro-steps, with --self-check, --cuda-graphs and --deterministic-mode. If results
// differ, warns and uses none. batch, scale: of the next gpt_micro_step. Restarts the step's time. Every rank calls this.
static void check_graphs(struct run *r, struct batch batch, double scale) {
    struct gpt *m = r->model;
    if (!m->config.device.cuda_graphs || !m->config.attention.deterministic_mode || r->self_check.graphs_known ||
        !self_check_any_rank_wants(r))
        return;
    const uint64_t sent_bytes = r->collectives.sent_bytes;
    const struct graph_check_scales scales = graph_check_save(m);
    const struct timed_check check = {"a micro-step, enqueued as a graph,", "start again with --cuda-graphs=false"};
    const double begin = seconds_now();
    const struct graph_check_results plain = graph_check_pass(r, batch, scale);
    graph_check_restore(&scales, m);
    deadline_begin(r, &check, 2 * (seconds_now() - begin));
    const struct graph_check_results graph = graph_check_pass(r, batch, scale);
    deadline_end(r);
    graph_check_restore(&scales, m);
    if (graph_check_equal(r, &plain, &graph))
        graphs_keep(r);
    else {
        snprintf(m->dev->graphs_refusal, sizeof m->dev->graphs_refusal, "graphs differ"); // until the next pass
        gpt_free_graphs(m);
        const struct graph_check_results again = graph_check_pass(r, batch, scale);
        graph_check_restore(&scales, m);
        const char *const what = graph_check_equal(r, &plain, &again)
                                     ? "a micro-step that is enqueued as a graph gives another loss or other gradients"
                                     : "a micro-step that is computed again gives other bits";
        snprintf(m->dev->graphs_refusal, sizeof m->dev->graphs_refusal, "%s", what);
        graph_check_warn(what, &plain, &graph);
    }
    r->collectives.sent_bytes = sent_bytes;
    if (r->parallel)
        collectives_times(&r->collectives, &r->comm_busy_s, &r->comm_waited_s);
    step_starts(r); // the first step's time is its own
    for (int i = 0; i < 4; i++)
        free(scales.host[i]);
}

#else

static void check_graphs(struct run *r, struct batch batch, double scale) {}
static void graphs_recall(struct run *r) {}

#endif
