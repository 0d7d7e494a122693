// The model: the embedding, the blocks, the head, and the steps that are made of them: a micro-step, the update, an
// evaluation. Generation is made of them in model/generation.cuh, one block is in block.cuh.
#pragma once
#include "block.cuh"                   // block_forward, block_backward
#include "kernels/attention/spans.cuh" // attention_spans
#include "kernels/device_memory.cuh"   // device_upload, device_download, device_copy
#include "kernels/device_queue.cuh"    // device_event_record, device_event_wait, work graphs
#include "kernels/embedding.cuh"       // embedding_forward, embedding_backward
#include "kernels/loss.cuh"            // cross_entropy, losses_sum
#include "kernels/work_segments.cuh"   // segments_begin
#include "model/offload.cuh"           // offload_layer, fetch_group

// ---- Embedding and head ----

// Uploads n integers by way of pinned memory, so that the caller may reuse `from` at once.
static void upload_integers(struct gpt *m, int32_t *to, int32_t *pinned, const int32_t *from, int64_t n) {
    if (from) // planning passes none, which gcc would warn of
        memcpy(pinned, from, (size_t)n * sizeof *to);
    else
        memset(pinned, 0, (size_t)n * sizeof *to);
    device_upload(to, pinned, (size_t)n * sizeof *to, m->dev);
}
// Begins the upload of a batch: its inputs (B, T). Two batches can be in flight; a third waits for the first. Returns
// the pinned memory of what is uploaded beside the inputs, host_batch_tokens apart.
static int32_t *upload_begin(struct gpt *m, enum pass pass, const int32_t *inputs) {
    const int slot = (int)(m->batches % 2);
    phase(m, pass_name(pass), -1, "batch");
    int32_t *pinned = m->host_batches + (int64_t)slot * 3 * m->host_batch_tokens;
    int32_t *tokens = tokens_buffer(m, pass);
    RUN(m, device_event_wait(m->dev, EVENT_BATCH + slot));
    RUN(m, upload_integers(m, tokens, pinned, inputs, extent_of(m, pass).N));
    return pinned + m->host_batch_tokens;
}
static void upload_end(struct gpt *m) {
    RUN(m, device_event_record(m->dev, EVENT_BATCH + (int)(m->batches % 2)));
    if (!m->timeline.planning)
        m->batches++;
}
// Uploads a batch of a training step or an evaluation.
static void upload_batch(struct gpt *m, enum pass pass, struct batch batch) {
    const int64_t N = extent_of(m, pass).N;
    int32_t *pinned = upload_begin(m, pass, batch.inputs);
    int32_t *targets = targets_buffer(m, pass);
    RUN(m, upload_integers(m, targets, pinned, batch.targets, N));
    if (has_documents(m, pass)) {
        int32_t *documents = documents_buffer(m, pass);
        RUN(m, upload_integers(m, documents, pinned + m->host_batch_tokens, batch.document_starts, N));
    }
    upload_end(m);
}

// Makes the spans of attention of the layers with the window, or of those without, where there are any.
static void make_spans(struct gpt *m, enum pass pass, bool window) {
    const struct extent e = extent_of(m, pass);
    bool used = false;
    for (int l = 0; l < m->shape.L; l++)
        used = used || shows_window(m, pass, l) == window;
    if (!used || !has_spans(m, pass, window))
        return;
    const struct spans spans = spans_buffers(m, pass, window);
    const int32_t *documents = masks_documents(m, pass) ? documents_buffer(m, pass) : NULL;
    RUN(m, attention_spans(spans.first_key, spans.last_query, documents, window ? m->window : 0, e.B, e.T, m->dev));
}

static void embed(struct gpt *m, enum pass pass) {
    const struct extent e = extent_of(m, pass);
    use_unit(m, pass, unit_of_embeddings(&m->table));
    phase(m, pass_name(pass), -1, "embedding");
    prefetch_unit(m, pass, unit_of_layer(&m->table, 0));
    make_spans(m, pass, false);
    make_spans(m, pass, true);
    const floatX *wte = param(m, pass, -1, PARAM_WTE), *wpe = param(m, pass, -1, PARAM_WPE);
    const int32_t *tokens = tokens_buffer(m, pass);
    if (!generates(pass))
        timeline_touch(targets_buffer(m, pass));
    const struct token_positions positions = positions_of(m, pass);
    floatX *out = (floatX *)activation(m, pass, -1, ACT_OUT);
    RUN(m, embedding_forward(out, tokens, wte, wpe, positions, e.B, e.T, m->shape.layer.C, embedding_scale(m),
                             dropout_of(m, m->config.hidden_dropout, 0, DROPOUT_EMBEDDING), m->dev));
}

static floatX *logits_buffer(struct gpt *m, enum pass pass, int64_t rows) {
    return (floatX *)buffer(m, pass, -1, SLOT_LOGITS, (size_t)rows * m->shape.Vp * sizeof(floatX), "logits and loss",
                            "logits");
}
static float *losses_buffer(struct gpt *m, enum pass pass) {
    return (float *)buffer(m, pass, -1, SLOT_LOSSES, (size_t)extent_of(m, pass).N * sizeof(float), "logits and loss",
                           "losses");
}
static int32_t *largest_buffer(struct gpt *m, enum pass pass) {
    return (int32_t *)buffer(m, pass, -1, SLOT_LARGEST, (size_t)extent_of(m, pass).N * sizeof(int32_t),
                             "logits and loss", "targets with the largest logit");
}

// The workspace of the head's matmuls, for the largest chunk and for a shorter last one.
static size_t head_workspace_bytes(const struct gpt *m, enum pass pass) {
    const int C = m->shape.layer.C, Vp = m->shape.Vp;
    const int64_t rest = extent_of(m, pass).N % m->chunk;
    const size_t whole = matmul_workspace_bytes(m->chunk, Vp, C, m->dev);
    const size_t last = rest > 0 ? matmul_workspace_bytes(rest, Vp, C, m->dev) : 0;
    return whole > last ? whole : last;
}

// Logits, loss and, in training, their gradients for `rows` tokens from `first` on, in two phases.
static void head_chunk(struct gpt *m, enum pass pass, int64_t first, int64_t rows, float dloss) {
    const int C = m->shape.layer.C, Vp = m->shape.Vp;
    const enum parameter weight = head_weight(m);
    const int64_t row = first * C;

    phase(m, "head", -1, "logits and loss");
    floatX *logits = logits_buffer(m, pass, m->chunk);
    const floatX *lnf = final_norm_buffer(m, pass);
    float *losses = losses_buffer(m, pass);
    int32_t *largest = m->scores ? largest_buffer(m, pass) : NULL;
    const int32_t *targets = targets_buffer(m, pass);
    const floatX *w = param(m, head_pass(m, pass), -1, weight);
    void *ws = workspace(m, head_workspace_bytes(m, pass));
    MATMUL(m, matmul_forward(logits, lnf + row, w, NULL, rows, Vp, C, ws, m->dev));
    RUN(m, cross_entropy(losses + first, logits, targets + first, dloss, (float)m->config.z_loss, rows, m->shape.V, Vp,
                         logit_transform_of(m), pass == PASS_TRAIN, m->dev));
    if (m->scores)
        RUN(m, targets_are_largest(largest + first, logits, targets + first, rows, m->shape.V, Vp, m->dev));
    if (pass != PASS_TRAIN)
        return;

    phase(m, "head", -1, "gradients");
    logits = logits_buffer(m, pass, m->chunk);
    lnf = final_norm_buffer(m, pass);
    floatX *dlnf = d_buffer(m, -1, SLOT_D_LNF, C);
    w = param(m, head_pass(m, pass), -1, weight);
    float *dw = grad(m, -1, weight);
    ws = workspace(m, head_workspace_bytes(m, pass));
    if (is_trained(m, -1, weight))
        MATMUL(m, matmul_backward_weight(dw, NULL, logits, lnf + row, rows, Vp, C, adds(m) || first > 0, ws, m->dev));
    MATMUL(m, matmul_backward_input(dlnf + row, logits, w, rows, Vp, C, ws, m->dev));
}

// Writes the sum of the tokens' losses into results->loss and, in training, the gradient of the residual stream. Logits
// are materialised for one chunk of tokens at a time.
static void head(struct gpt *m, enum pass pass, float dloss) {
    const int64_t N = extent_of(m, pass).N;
    use_unit(m, head_pass(m, pass), head_unit(m));
    if (pass == PASS_TRAIN) {
        zero_begin_gradients(&m->zero, unit_of_head());
        if (m->shape.tied)
            zero_begin_gradients(&m->zero, unit_of_embeddings(&m->table));
    }
    // One chunk is planned, and every chunk runs in its two phases. Buffers that outlive a chunk must be live in both
    // phases: the phase before touches those that chunks write, the phase after those that they read.
    phase(m, "head", -1, "begin");
    timeline_touch(final_norm_buffer(m, pass));
    timeline_touch(losses_buffer(m, pass));
    if (m->scores)
        timeline_touch(largest_buffer(m, pass));
    if (pass == PASS_TRAIN)
        timeline_touch(d_buffer(m, -1, SLOT_D_LNF, m->shape.layer.C));
    const int chunk_phase = m->timeline.phase;
    for (int64_t first = 0; first < (timeline_plans(&m->timeline) ? 1 : N); first += m->chunk) {
        m->timeline.phase = chunk_phase;
        head_chunk(m, pass, first, N - first < m->chunk ? N - first : m->chunk, dloss);
    }
    phase(m, "head", -1, "final norm");
    timeline_touch(final_norm_buffer(m, pass));
    const int32_t *targets = targets_buffer(m, pass);
    const float *losses = losses_buffer(m, pass);
    RUN(m, losses_sum(&m->results->loss, losses, targets, N, m->dev));
    if (pass == PASS_TRAIN) {
        const floatX *dlnf = d_buffer(m, -1, SLOT_D_LNF, m->shape.layer.C);
        floatX *dres = d_residual(m);
        const floatX *x = (const floatX *)activation(m, pass, m->shape.L - 1, ACT_OUT);
        norm_gradient(m, -1, dres, stream_bias_partial(m, m->shape.L - 1, LINEAR_MLP_PROJ), NULL, dlnf, x,
                      final_norm_stats(m, pass), NORM_FINAL, stream_amax(m, m->shape.L - 1, LINEAR_MLP_PROJ));
        if (next_backward_layer(m, m->shape.L) >= 0)
            prefetch_unit(m, PASS_RECOMPUTE, unit_of_layer(&m->table, next_backward_layer(m, m->shape.L)));
        zero_reduce(&m->zero, unit_of_head());
    }
}

// ---- The step ----

static struct table_gradient table_gradient(struct gpt *m, enum parameter id) {
    const struct tensor *t = parameters_find(&m->table, -1, id);
    const struct table_gradient table = {grad(m, -1, id), t && !t->frozen ? t->rows : 0, adds(m)};
    return table;
}
static void embedding_gradients(struct gpt *m) {
    const struct extent e = extent_of(m, PASS_TRAIN);
    const int unit = unit_of_embeddings(&m->table);
    if (!m->shape.tied)
        zero_begin_gradients(&m->zero, unit);
    phase(m, "backward", -1, "embedding");
    struct table_gradient dwte = table_gradient(m, PARAM_WTE), dwpe = table_gradient(m, PARAM_WPE);
    dwte.add = dwte.add || m->shape.tied; // to the gradient of the tied head
    const floatX *dres = d_residual(m);
    const int32_t *tokens = tokens_buffer(m, PASS_TRAIN);
    const struct token_positions positions = positions_of(m, PASS_TRAIN);
    void *ws = workspace(m, embedding_backward_workspace_bytes(e.B, e.T, m->dev));
    RUN(m, embedding_backward(dwte, dwpe, dres, tokens, positions, e.B, e.T, m->shape.layer.C, embedding_scale(m),
                              dropout_of(m, m->config.hidden_dropout, 0, DROPOUT_EMBEDDING), ws, m->dev));
    zero_reduce(&m->zero, unit);
}

// The work of a micro-step that never changes, and so can be recorded: forward and backward of scale times the loss.
static void forward_backward(struct gpt *m, double scale) {
    const struct layer_shape *s = &m->shape.layer;
    const int L = m->shape.L;
    if (m->fp8.scales)
        RUN(m, fp8_scales_begin(m->fp8.scales, m->fp8.weight_amaxes, fp8_num_scales(&m->fp8), m->dev));
    embed(m, PASS_TRAIN);
    offload_layer(m, -1);
    for (int l = 0; l < L; l++) {
        block_forward(m, l, ACT_ALL, PASS_TRAIN);
        offload_layer(m, l);
    }
    head(m, PASS_TRAIN, (float)(scale / (double)extent_of(m, PASS_TRAIN).N));
    int reduced = unit_of_head(); // unit whose reduction is in flight while the next unit's gradients are computed
    for (int l = L - 1; l >= 0 && l >= m->lowest_trained; l--) {
        if (policy_is_group_last(&m->policy, l)) {
            fetch_group(m, l);
            for (int k = m->policy.group_first[l]; k <= l; k++)
                block_forward(m, k, policy_missing(&m->policy, k, s), PASS_RECOMPUTE);
        }
        block_backward(m, l);
        zero_reduce(&m->zero, unit_of_layer(&m->table, l));
        zero_add_reduced(&m->zero, reduced);
        reduced = unit_of_layer(&m->table, l);
    }
    if (m->lowest_trained < 0)
        embedding_gradients(m);
    zero_add_reduced(&m->zero, reduced);
    zero_add_reduced(&m->zero, unit_of_embeddings(&m->table));
    zero_end_gradients(&m->zero);
}

// Whether micro-step `index` of a step begins collectives, or waits for any.
static bool has_collectives(const struct gpt *m, int index) {
    const struct shards *s = &m->zero.shards;
    return s->ranks > 1 && (shards_gradients(s) || m->last_micro_step || (shards_optimizer(s) && index == 0));
}
// The kind of a micro-step: the last one of a step reduces whole gradients, or sums the squares of those that are on
// the host; else it is as others. Sharded gradients are reduced in each.
static struct micro_step_graph *graph_of_micro_step(struct gpt *m) {
    const struct shards *s = &m->zero.shards;
    const bool reduces = s->ranks > 1 && !shards_gradients(s);
    const bool last = m->last_micro_step && (reduces || m->zero.grads_on_host);
    return &m->graphs[(m->zero.adds_up ? MICRO_STEP_ADDS : 0) | (last ? MICRO_STEP_LAST : 0)];
}
static void gpt_free_graphs(struct gpt *m) {
    for (int i = 0; i < MICRO_STEP_KINDS; i++) {
        graph_free(&m->graphs[i].work);
        segments_free(&m->graphs[i].segments);
    }
}
// Returns whether the work is enqueued: not where it was recorded and CUDA does not take the graph.
static bool forward_backward_as_graph(struct gpt *m, struct micro_step_graph *graph, double scale) {
    if (!graph_recorded(&graph->work)) {
        const bool begun = graph_begin(m->dev);
        forward_backward(m, scale);
        if (!begun || !graph_end(&graph->work, m->dev))
            return !begun;
    }
    graph_launch(&graph->work, m->dev);
    return true;
}
static void forward_backward_as_segments(struct gpt *m, struct micro_step_graph *graph, double scale) {
    segments_begin(&graph->segments, m->dev);
    forward_backward(m, scale);
    segments_end(m->dev);
}
// forward_backward as a graph: recorded once, then enqueued by one call, or, with collectives, by one call for what is
// between two of them. Not recorded are the first micro-step of each kind, since the libraries' first calls can't be,
// and one that is watched phase by phase. Returns as forward_backward_as_graph does.
static bool forward_backward_recorded(struct gpt *m, int index, double scale) {
    const bool watched = m->timeline.planning || TIMELINE_IS_WATCHED;
    struct micro_step_graph *const graph = graph_of_micro_step(m);
    if (!DEVICE_HAS_GRAPHS || !m->config.cuda_graphs || graphs_are_refused(m->dev) || !graph->warm || watched) {
        forward_backward(m, scale);
        graph->warm = !m->timeline.planning;
        return true;
    }
    if (m->graphs_scale != scale) { // the batch has grown: all kinds are freed, also those that will not run again
        gpt_free_graphs(m);
        m->graphs_scale = scale;
    }
    if (!has_collectives(m, index))
        return forward_backward_as_graph(m, graph, scale);
    forward_backward_as_segments(m, graph, scale);
    return true;
}

// Enqueues what gpt_micro_step does, but for its end. Returns as forward_backward_as_graph does.
static bool enqueue_micro_step(struct gpt *m, int index, struct batch batch, double scale) {
    region(m, REGION_MICRO_STEP);
    m->dropout = true;
    m->last_micro_step = index == m->step_micro_steps - 1;
    zero_begin_micro_step(&m->zero, m->timeline.planning ? m->micro_steps > 1 : index > 0, m->last_micro_step);
    upload_batch(m, PASS_TRAIN, batch);
    RUN(m, optimizer_know_weights(&m->optimizer));
    // Counted over all ranks' micro-batches, so that a sample's dropout does not depend on the rank that trains on it.
    RUN(m, dropout_step_set(&m->results->micro_step, m->micro_step + (uint64_t)m->zero.shards.rank, m->dev));
    return forward_backward_recorded(m, index, scale);
}
// Enqueues forward and backward of micro-batch `index` of a step. The gradients of scale / (B * T) times the sum of the
// losses overwrite those of the step before where index is 0, and are added to the step's where it is not; gpt_update
// makes up for targets that are not counted.
static void gpt_micro_step(struct gpt *m, int index, struct batch batch, double scale) {
    if (!enqueue_micro_step(m, index, batch, scale))
        enqueue_micro_step(m, index, batch, scale); // from now on nothing is recorded
    RUN(m, device_copy(&m->losses[index], &m->results->loss, sizeof *m->losses, m->dev));
    m->dropout = false;
    m->micro_step += (uint64_t)m->zero.shards.ranks;
}

// Fills in this rank's report and, with several ranks, all-gathers the reports.
static void gather_reports(struct gpt *m, void *ws) {
    double *row = m->reports + m->zero.shards.rank * report_width(m);
    if (!m->zero.grads_on_host) // else the last micro-step has summed them
        optimizer_sum_squares(&m->optimizer, &row[REPORT_SQUARES], ws);
    if (fp8_is_on(&m->fp8))
        fp8_scales_report(&row[report_fp8_counts(m)], m->fp8.counts, m->fp8.scales, FP8_KINDS * FP8_COUNTS,
                          report_width(m) - report_fp8_amaxes(m), m->dev);
    if (m->zero.shards.ranks == 1)
        return;
    double *request = &m->host_requests[m->updates++ % 2];
    *request = m->request;
    device_upload(&row[report_request(m)], request, sizeof *request, m->dev);
    collective_wait(m->zero.collectives,
                    collective_all_gather(m->zero.collectives, m->reports, row, (size_t)report_width(m) * sizeof *row,
                                          "losses and gradient norms", m->dev),
                    m->dev);
}

// Enqueues update `step` (from 1) with learning rate lr, the gradients clipped to --clip-grad. Where a loss or
// the gradient norm is NaN or infinite nothing is updated, and gpt_results says so.
static void gpt_update(struct gpt *m, int64_t step, double lr) {
    const struct config *c = &m->config;
    struct adamw adamw;
    adamw.lr = (float)lr;
    adamw.beta1 = (float)c->adam_beta1;
    adamw.beta2 = (float)c->adam_beta2;
    adamw.eps = (float)c->adam_eps;
    adamw.weight_decay = (float)c->weight_decay;
    adamw.step = step;
    adamw.grad_scale = 1;
    adamw.seed = c->seed;
    region(m, REGION_UPDATE);
    phase(m, "update", -1, "gradient norm");
    void *ws = workspace(m, optimizer_squares_workspace_bytes(&m->optimizer));
    RUN(m, gather_reports(m, ws));
    const double targets = (double)m->zero.shards.ranks * m->step_micro_steps * (double)extent_of(m, PASS_TRAIN).N;
    RUN(m, gradient_check(&m->results->check, m->reports, m->zero.shards.ranks, report_width(m), m->step_micro_steps,
                          targets, c->clip_grad, m->dev));
    if (fp8_is_delayed(&m->fp8))
        RUN(m, fp8_scales_update(m->fp8.scales, m->fp8.history, &m->results->check, m->reports, m->zero.shards.ranks,
                                 report_width(m), report_fp8_amaxes(m), fp8_num_scales(&m->fp8), m->fp8.delay,
                                 m->fp8.gradients, m->dev));
    phase(m, "update", -1, "adamw");
    void *slots = optimizer_slots(&m->optimizer, true);
    RUN(m, optimizer_update(&m->optimizer, adamw, &m->results->check, slots));
    if (m->muon.count > 0) {
        phase(m, "update", -1, "muon");
        slots = optimizer_slots(&m->optimizer, false);
        const struct gradient_check *check = m->results ? &m->results->check : NULL; // NULL when planning
        optimizer_update_matrices(&m->muon, adamw, check, slots);
    }
    if (c->ema_decay > 0) {
        phase(m, "update", -1, "moving averages");
        slots = optimizer_slots(&m->optimizer, false);
        RUN(m, optimizer_update_averages(&m->optimizer, adamw, &m->results->check, slots));
    }
}
// With --ema-decay: puts the moving averages into the parameters' place, and at the next call back. No step may be
// enqueued in between.
static void gpt_swap_averages(struct gpt *m) {
    if (m->config.ema_decay <= 0 || !m->trains)
        return;
    region(m, REGION_AVERAGES);
    phase(m, "averages", -1, "swap");
    void *slots = optimizer_slots(&m->optimizer, false);
    RUN(m, optimizer_swap_averages(&m->optimizer, slots));
}

// Enqueues the download of the last enqueued step's results into slot 0 or 1.
static void gpt_fetch_results(struct gpt *m, int slot) {
    const size_t doubles = (size_t)m->zero.shards.ranks * (size_t)report_width(m);
    device_download_begin(&m->host_results[slot], m->results, sizeof *m->results, m->dev);
    device_download_begin(m->host_reports + (size_t)slot * doubles, m->reports, doubles * sizeof *m->reports, m->dev);
    device_event_record(m->dev, EVENT_RESULTS + slot);
}
// Waits for gpt_fetch_results of that slot. *reports (ranks, report_width) stays valid until the slot's next fetch.
static struct step_results gpt_results(struct gpt *m, int slot, const double **reports) {
    device_event_wait(m->dev, EVENT_RESULTS + slot);
    *reports = m->host_reports + (size_t)slot * (size_t)m->zero.shards.ranks * (size_t)report_width(m);
    return m->host_results[slot];
}

// The losses of a batch, without gradients and dropout. Waits for the device.
static struct loss_sum gpt_evaluate(struct gpt *m, struct batch batch) {
    struct loss_sum loss = {0, 0};
    region(m, REGION_EVALUATE);
    upload_batch(m, PASS_EVALUATE, batch);
    embed(m, PASS_EVALUATE);
    for (int l = 0; l < m->shape.L; l++)
        block_forward(m, l, ACT_ALL, PASS_EVALUATE);
    head(m, PASS_EVALUATE, 0);
    RUN(m, device_download(&loss, &m->results->loss, sizeof loss, m->dev));
    return loss;
}
// gpt_evaluate of a run that scores tasks, which also gives what it finds of each target.
static struct loss_sum gpt_score(struct gpt *m, struct batch batch, struct token_scores scores) {
    const size_t N = (size_t)extent_of(m, PASS_EVALUATE).N;
    m->scores = true;
    const struct loss_sum loss = gpt_evaluate(m, batch);
    m->scores = false;
    const float *losses = losses_buffer(m, PASS_EVALUATE); // of the last phase
    const int32_t *largest = largest_buffer(m, PASS_EVALUATE);
    RUN(m, device_download(scores.losses, losses, N * sizeof *losses, m->dev));
    RUN(m, device_download(scores.largest, largest, N * sizeof *largest, m->dev));
    return loss;
}
// Plans, or rehearses, what the run evaluates by.
static void gpt_evaluate_nothing(struct gpt *m) {
    const struct token_scores none = {NULL, NULL};
    if (config_scores(&m->config))
        gpt_score(m, batch_of(NULL, NULL), none);
    else
        gpt_evaluate(m, batch_of(NULL, NULL));
}
