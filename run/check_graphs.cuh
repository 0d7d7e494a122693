// The self-check of CUDA graphs: a start's first micro-step is computed kernel by kernel, then as a graph, each over
// NaNs and zeros, so that lost work shows. If loss or squares of gradients differ in a bit, the run uses no graph.
#pragma once
#include "run/check_deadline.cuh" // deadline_begin
#include "run/self_check.cuh"     // self_check_any_rank_wants

#ifdef TARGET_CUDA

struct graph_check_result {
    struct loss_sum loss;
    double squares; // of this rank's gradients; 0: they are not complete
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

// Whether this rank's gradients are on the device, reduced over ranks, after a step's first micro-step, to be squared.
static bool graph_check_sums(const struct gpt *m) {
    const struct shards *s = &m->zero.shards;
    return !m->zero.grads_on_host && (s->ranks == 1 || shards_gradients(s) || m->steps.is_last);
}
// Runs the step's first micro-step, over activations of NaNs and gradients of 0. The first call launches each kernel,
// later ones a graph, unless graphs are refused. Returns the loss, and the sum of this rank's squared gradients, 0 if
// they aren't complete. Changes FP8's scales. Waits for the device. Every rank calls this.
static struct graph_check_result graph_check_pass(struct run *r, struct batch batch, double scale) {
    struct gpt *m = r->model;
    const struct arenas *arenas = &m->timeline.arenas;
    struct graph_check_result result;
    memset(&result, 0, sizeof result);
    cuda_check(cudaDeviceSynchronize()); // copies and collectives have streams of their own
    judge_fill_with_nans(arenas->base[ARENA_ACTIVATIONS], arenas->bytes[ARENA_ACTIVATIONS], m->dev);
    if (arenas->bytes[ARENA_GRADIENTS] > 0)
        device_zero(arenas->base[ARENA_GRADIENTS], arenas->bytes[ARENA_GRADIENTS],
                    m->dev); // gaps between tensors stay 0
    device_zero(&m->io.results->loss, sizeof m->io.results->loss, m->dev);
    gpt_micro_step(m, 0, batch, scale);
    m->steps.micro_step -= (uint64_t)m->zero.shards.ranks;
    double *const squares = &m->io.reports[m->zero.shards.rank * report_width(m) + REPORT_SQUARES];
    if (graph_check_sums(m)) {
        region(m, REGION_UPDATE);
        phase(m, PHASES_UPDATE, -1, "gradient norm");
        void *const ws = workspace(m, optimizer_squares_workspace_bytes(&m->optimizer));
        RUN(m, optimizer_sum_squares(&m->optimizer, squares, ws));
        RUN(m, device_download(&result.squares, squares, sizeof result.squares, m->dev));
    }
    RUN(m, device_download(&result.loss, &m->io.results->loss, sizeof result.loss, m->dev));
    cuda_check(cudaDeviceSynchronize());
    return result;
}
// Whether two results have the same bits on every rank. Every rank calls this.
static bool graph_check_equal(struct run *r, const struct graph_check_result *a, const struct graph_check_result *b) {
    return !parallel_largest(r->parallel, memcmp(a, b, sizeof *a) != 0, "the self-check of graphs");
}

// Writes the key of a verdict on this run's graphs (SELF_CHECK_KEY bytes). It also changes with ranks, plan, and options
// that hold for more than one start.
static void graph_check_key(char *key, struct run *r) {
    char text[OPTION_TEXT], request[SELF_CHECK_REQUEST];
    uint64_t digest = r->model->timeline.plan.peak_bytes;
    for (int i = 0; i < CONFIG_ROWS; i++)
        if (!(config_rows[i].flags & (CONFIG_THIS_START | CONFIG_PER_RANK))) {
            option_text(text, &config_rows[i], r->config);
            digest = hash64(text, strlen(text), digest);
        }
    snprintf(request, sizeof request, " backend=%d ranks=%d graphs=%016" PRIx64, (int)r->attention.backend,
             r->config->ranks, digest);
    self_check_write_key(key, request, &r->dev);
}
// Looks for an earlier start's verdict on the graphs, before self_check_save. Every rank calls this.
static void graphs_recall(struct run *r) {
    char key[SELF_CHECK_KEY];
    struct self_verdict verdict;
    if (!self_check_any_rank_wants(r))
        return;
    if (!r->self_check.is_read)
        self_check_read(r);
    graph_check_key(key, r);
    const bool known = r->config->device.self_check == CHECK_AUTO &&
                       self_check_find(&verdict, r->self_check.known, key) && verdict.kind == SELF_CHECK_RIGHT;
    r->self_check.graphs_known = !parallel_largest(r->parallel, !known, "earlier checks of graphs");
}
// Keeps, in --out, that graphs are right, unless some rank's were refused. Every rank calls this.
static void graphs_keep(struct run *r) {
    const struct self_verdict right = {SELF_CHECK_RIGHT, "graphs", 0, true};
    char key[SELF_CHECK_KEY], *line = NULL;
    if (parallel_largest(r->parallel, *graphs_refusal(&r->dev) != '\0', "the self-check of graphs"))
        return;
    graph_check_key(key, r);
    self_check_add(&line, &right, key);
    self_check_append(r, line);
    free(line);
}

// Checks the first micro-step's graph, with --self-check, --cuda-graphs and --deterministic-mode. If results differ,
// warns and uses no graphs. batch, scale: of the next gpt_micro_step. Restarts the step's time. Every rank calls this.
static void check_graphs(struct run *r, struct batch batch, double scale) {
    struct gpt *m = r->model;
    if (!m->config.device.cuda_graphs || !m->config.attention.deterministic_mode || r->self_check.graphs_known ||
        !self_check_any_rank_wants(r))
        return;
    const uint64_t sent_bytes = r->collectives.sent_bytes;
    const struct graph_check_scales scales = graph_check_save(m);
    const struct timed_check check = {"the first micro-step, enqueued as a graph,",
                                      "start again with --cuda-graphs=false"};
    const double begin = seconds_now();
    const struct graph_check_result plain = graph_check_pass(r, batch, scale);
    graph_check_restore(&scales, m);
    deadline_begin(r, &check, 2 * (seconds_now() - begin));
    const struct graph_check_result graph = graph_check_pass(r, batch, scale);
    deadline_end(r);
    graph_check_restore(&scales, m);
    if (graph_check_equal(r, &plain, &graph))
        graphs_keep(r);
    else {
        snprintf(m->dev->graphs_refusal, sizeof m->dev->graphs_refusal, "graphs differ"); // until the next pass
        gpt_free_graphs(m);
        const struct graph_check_result again = graph_check_pass(r, batch, scale);
        graph_check_restore(&scales, m);
        const char *const what = graph_check_equal(r, &plain, &again)
                                     ? "a micro-step that is enqueued as a graph gives another loss or other gradients"
                                     : "a micro-step that is computed again gives other bits";
        snprintf(m->dev->graphs_refusal, sizeof m->dev->graphs_refusal, "%s", what);
        say_warning(
            "self-check: %s (loss %.9g and %.9g, squares of gradients %.9g and %.9g): each kernel is launched by a "
            "call of its own, as by --cuda-graphs=false",
            what, plain.loss.sum, graph.loss.sum, plain.squares, graph.squares);
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

static void write_graphs_refusal(struct json *json, const void *why) { json_str(json, "graphs", (const char *)why); }
// Says why a graph was refused, once: in the report's row "graphs", which is rank 0's, and in log.jsonl.
static void report_graphs_refusal(struct run *r) {
    const char *const why = graphs_refusal(&r->dev);
    if (!*why || r->graphs_reported)
        return;
    r->graphs_reported = true;
    log_object(&r->log, r->finished, "self_check", write_graphs_refusal, why);
    if (r->config->rank == 0) {
        log_end_line(&r->log);
        log_row("graphs", "none: %s", why);
    }
}
