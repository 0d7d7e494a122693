// The model: the steps that it runs (micro-step, update, evaluation), the plan of its memory, and its memory.
#pragma once
#include "block.cuh"                 // block_forward, block_backward
#include "config/layers.h"           // config_layer_is_windowed, config_layer_is_rotary
#include "kernels/device_memory.cuh" // device_upload, device_download, device_copy
#include "kernels/device_queue.cuh"  // device_event_record, device_event_wait
#include "model/embedding.cuh"       // embed, embedding_gradients
#include "model/generation.cuh"      // gpt_prefill, gpt_decode
#include "model/head.cuh"            // head
#include "model/initial.cuh"         // gpt_initialize
#include "model/offload.cuh"         // offload_layer_to_host, fetch_group
#include "model/recorded.cuh"        // enqueue_recorded

// ---- The step ----

// Enqueues what CUDA graphs record of a micro-step: forward, backward, gradient reductions. Sets m->io.results->loss.
// The gradients are of the losses' sum times scale / (B * T). Every rank calls this, by enqueue_micro_step.
static void recorded_micro_step(struct gpt *m, double scale) {
    const struct layer_shape *s = &m->shape.layer;
    const int L = m->shape.L;
    if (m->fp8.scales)
        RUN(m, fp8_scales_begin(m->fp8.scales, m->fp8.weight_amaxes, m->shape.L * FP8_KINDS, fp8_num_scales(&m->fp8),
                                m->dev));
    embed(m, PASS_TRAIN);
    offload_layer_to_host(m, -1);
    for (int l = 0; l < L; l++) {
        block_forward(m, l, ACT_ALL, PASS_TRAIN);
        offload_layer_to_host(m, l);
    }
    head(m, PASS_TRAIN, (float)(scale / (double)extent_of(m, PASS_TRAIN).N));
    int reduced = unit_of_head(); // unit whose reduction is in flight while the next unit's gradients are computed
    for (int l = L - 1; l >= 0 && l >= m->lowest_trained; l--) {
        if (policy_is_group_last(&m->policy, l)) {
            fetch_group(m, l);
            for (int k = m->policy.group_first[l]; k <= l; k++)
                block_forward(m, k, policy_recomputed(&m->policy, k, s), PASS_BACKWARD);
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

// Enqueues a micro-step. The caller then copies its loss from m->io.results to m->io.losses, and sets m->steps.dropout
// to false. Returns false, with forward and backward not enqueued, if CUDA refused a graph: then repeat the call.
static bool enqueue_micro_step(struct gpt *m, int index, struct batch batch, double scale) {
    region(m, REGION_MICRO_STEP);
    m->steps.dropout = true;
    m->steps.is_last = index == m->steps.of_step - 1;
    zero_begin_micro_step(&m->zero, m->timeline.planning ? m->steps.most > 1 : index > 0, m->steps.is_last);
    upload_batch(m, PASS_TRAIN, batch);
    RUN(m, optimizer_compute_weight_amaxes(&m->optimizer));
    // Counted over all ranks' micro-batches, so that a sample's dropout does not depend on the rank that trains on it.
    RUN(m, dropout_step_set(&m->io.results->micro_step, m->steps.micro_step + (uint64_t)m->zero.shards.rank, m->dev));
    return enqueue_recorded(m, index, recorded_micro_step, scale);
}
// Enqueues forward and backward of a step's micro-batch `index`, below m->steps.of_step, which the caller sets. Puts
// this rank's sum of losses into m->io.losses[index], on the device. The gradients are of this sum times scale / (B T);
// scale is 1 / (ranks * of_step). They overwrite the last step's for index 0, else add up. Every rank calls this.
static void gpt_micro_step(struct gpt *m, int index, struct batch batch, double scale) {
    if (!enqueue_micro_step(m, index, batch, scale))
        enqueue_micro_step(m, index, batch, scale); // from now on nothing is recorded
    RUN(m, device_copy(&m->io.losses[index], &m->io.results->loss, sizeof *m->io.losses, m->dev));
    m->steps.dropout = false;
    m->steps.micro_step += (uint64_t)m->zero.shards.ranks;
}

// Enqueues the rest of this rank's report: squares of gradients not on the host, FP8's counts, amaxes. With several
// ranks adds m->io.request and gathers all reports. ws has optimizer_squares_workspace_bytes. Every rank calls this.
static void gather_reports(struct gpt *m, void *ws) {
    const struct fp8_delayed delayed = fp8_delayed_scales(&m->fp8);
    double *row = m->io.reports + m->zero.shards.rank * report_width(m);
    if (!m->zero.grads_on_host) // else the last micro-step has summed them
        optimizer_sum_squares(&m->optimizer, &row[REPORT_SQUARES], ws);
    if (fp8_is_on(&m->fp8))
        fp8_scales_report(&row[report_fp8_counts_column(m)], m->fp8.counts, m->fp8.scales + delayed.first,
                          FP8_KINDS * FP8_COUNTS, delayed.count, m->dev);
    if (m->zero.shards.ranks == 1)
        return;
    double *request = &m->io.host_requests[m->io.updates++ % 2];
    *request = m->io.request;
    device_upload(&row[report_request_column(m)], request, sizeof *request, m->dev);
    collective_wait(m->zero.collectives,
                    collective_all_gather(m->zero.collectives, m->io.reports, row,
                                          (size_t)report_width(m) * sizeof *row, "losses and gradient norms", m->dev),
                    m->dev);
}

// Enqueues the update of parameters and averages after a step's last gpt_micro_step, with gradients clipped to
// --clip-grad. Sends m->io.request to all ranks. Skips the update, and sets gpt_results' check.finite to 0, if a loss,
// the gradient norm or a delayed FP8 amax is not finite, or if no target counts. step, for AdamW, is 1 + the number of
// updates that were not skipped. Waits for the device while FP8 calibrates. Every rank must call this.
static void gpt_update(struct gpt *m, int64_t step, double lr) {
    const struct config *c = &m->config;
    struct adamw adamw;
    adamw.lr = (float)lr;
    adamw.beta1 = (float)c->training.adam_beta1;
    adamw.beta2 = (float)c->training.adam_beta2;
    adamw.eps = (float)c->training.adam_eps;
    adamw.weight_decay = (float)c->training.weight_decay;
    adamw.step = step;
    adamw.grad_scale = 1;
    adamw.seed = c->training.seed;
    region(m, REGION_UPDATE);
    phase(m, PHASES_UPDATE, -1, "gradient norm");
    void *ws = workspace(m, optimizer_squares_workspace_bytes(&m->optimizer));
    RUN(m, gather_reports(m, ws));
    const double targets = (double)m->zero.shards.ranks * m->steps.of_step * (double)extent_of(m, PASS_TRAIN).N;
    RUN(m, gradient_check(&m->io.results->check, m->io.reports, m->zero.shards.ranks, report_width(m), m->steps.of_step,
                          targets, c->training.clip_grad, m->dev));
    const struct fp8_delayed delayed = fp8_delayed_scales(&m->fp8);
    if (delayed.count > 0)
        RUN(m, fp8_scales_update(m->fp8.scales + delayed.first, m->fp8.history, &m->io.results->check, m->io.reports,
                                 m->zero.shards.ranks, report_width(m), report_fp8_amaxes_column(m), delayed.count,
                                 delayed.delay, delayed.order, m->dev));
    RUN(m, fp8_update_calibrates(&m->fp8, m->dev));
    phase(m, PHASES_UPDATE, -1, "adamw");
    void *slots = optimizer_slots(&m->optimizer, true);
    RUN(m, optimizer_update(&m->optimizer, adamw, &m->io.results->check, slots));
    if (m->muon.count > 0) {
        phase(m, PHASES_UPDATE, -1, "muon");
        slots = optimizer_slots(&m->optimizer, false);
        const struct gradient_check *check = m->io.results ? &m->io.results->check : NULL; // NULL when planning
        optimizer_update_matrices(&m->muon, adamw, check, slots);
    }
    if (c->training.ema_decay > 0) {
        phase(m, PHASES_UPDATE, -1, "moving averages");
        slots = optimizer_slots(&m->optimizer, false);
        RUN(m, optimizer_update_averages(&m->optimizer, adamw, &m->io.results->check, slots));
    }
}
// Enqueues a swap of the parameters with their moving averages (--ema-decay). A second call swaps back; no step and no
// gpt_copy_state may come in between. Does nothing unless the model trains with averages. Every rank calls this.
static void gpt_swap_averages(struct gpt *m) {
    if (m->config.training.ema_decay <= 0 || !m->trains)
        return;
    region(m, REGION_AVERAGES);
    phase(m, PHASES_AVERAGES, -1, "swap");
    void *slots = optimizer_slots(&m->optimizer, false);
    RUN(m, optimizer_swap_averages(&m->optimizer, slots));
}

// Begins to download the step's results and reports into slot 0 or 1. Call this after gpt_update; gpt_results waits.
static void gpt_fetch_results(struct gpt *m, int slot) {
    const size_t doubles = (size_t)m->zero.shards.ranks * (size_t)report_width(m);
    device_download_begin(&m->io.host_results[slot], m->io.results, sizeof *m->io.results, m->dev);
    device_download_begin(m->io.host_reports + (size_t)slot * doubles, m->io.reports, doubles * sizeof *m->io.reports,
                          m->dev);
    device_event_record(m->dev, EVENT_RESULTS + slot);
}
// Waits for the slot's last gpt_fetch_results and returns the step's results. *reports gets the reports of all ranks
// (ranks, report_width), which stay until the slot's next fetch.
static struct step_results gpt_results(struct gpt *m, int slot, const double **reports) {
    device_event_wait(m->dev, EVENT_RESULTS + slot);
    *reports = m->io.host_reports + (size_t)slot * (size_t)m->zero.shards.ranks * (size_t)report_width(m);
    return m->io.host_results[slot];
}

// Returns the sum of the losses of this rank's batch, and how many targets count. Waits for the device. Every rank
// calls this, and only in a run that validates or scores: no other run plans the memory.
static struct loss_sum gpt_evaluate(struct gpt *m, struct batch batch) {
    struct loss_sum loss = {0, 0};
    region(m, REGION_EVALUATE);
    upload_batch(m, PASS_EVALUATE, batch);
    embed(m, PASS_EVALUATE);
    for (int l = 0; l < m->shape.L; l++)
        block_forward(m, l, ACT_ALL, PASS_EVALUATE);
    head(m, PASS_EVALUATE, 0);
    RUN(m, device_download(&loss, &m->io.results->loss, sizeof loss, m->dev));
    return loss;
}
// Evaluates a batch as gpt_evaluate does, each document by itself, and fills in `scores`. config_scores must be true.
static struct loss_sum gpt_score(struct gpt *m, struct batch batch, struct token_scores scores) {
    const size_t N = (size_t)extent_of(m, PASS_EVALUATE).N;
    m->scores = true;
    const struct loss_sum loss = gpt_evaluate(m, batch);
    m->scores = false;
    const float *losses = losses_buffer(m, PASS_EVALUATE); // live in the last phase
    const int32_t *largest = target_is_largest_buffer(m, PASS_EVALUATE);
    RUN(m, device_download(scores.losses, losses, N * sizeof *losses, m->dev));
    RUN(m, device_download(scores.largest, largest, N * sizeof *largest, m->dev));
    return loss;
}
// Plans an evaluation, or makes its dry run: calls gpt_score if config_scores, else gpt_evaluate, without a batch.
static void gpt_plan_evaluation(struct gpt *m) {
    const struct token_scores none = {NULL, NULL};
    if (config_scores(&m->config))
        gpt_score(m, batch_of(NULL, NULL), none);
    else
        gpt_evaluate(m, batch_of(NULL, NULL));
}

// ---- The plan ----

// Returns what does the collectives: NCCL on a GPU with --collectives nccl or, if built in, auto; else the host.
static enum collectives_kind collectives_kind_of(const struct config *c, const struct device *dev) {
    if (!device_is_gpu(dev))
        return COLLECTIVES_HOST;
    switch (c->processes.collectives) {
    case BY_AUTO: return COLLECTIVES_HAVE_NCCL ? COLLECTIVES_NCCL : COLLECTIVES_HOST;
    case BY_NCCL: return COLLECTIVES_NCCL;
    case BY_MPI:
    case BY_SOCKETS: return COLLECTIVES_HOST;
    }
    return COLLECTIVES_HOST;
}

// Plans pinned host memory, two buffers for each kind of data that a step moves: batches, results, reports, requests.
static void plan_staging(struct gpt *m) {
    struct plan *plan = &m->timeline.plan;
    const size_t reports_bytes = (size_t)m->zero.shards.ranks * (size_t)report_width(m) * sizeof(double);
    m->io.host_batches_id = plan_add(plan, ARENA_HOST_STAGING, "staging", "batches in flight", -1,
                                     6 * (size_t)m->io.host_batch_tokens * sizeof(int32_t));
    m->io.host_results_id =
        plan_add(plan, ARENA_HOST_STAGING, "staging", "step results in flight", -1, 2 * sizeof(struct step_results));
    m->io.host_reports_id =
        plan_add(plan, ARENA_HOST_STAGING, "staging", "reports of the ranks in flight", -1, 2 * reports_bytes);
    m->io.host_requests_id =
        plan_add(plan, ARENA_HOST_STAGING, "staging", "requests in flight", -1, 2 * sizeof(double));
}

// Records the memory plan: plans each kind of step once. keeps_copy: also plans the copy that checkpoints come from.
static void gpt_record_plan(struct gpt *m, bool keeps_copy) {
    const struct shards *s = &m->zero.shards;
    struct plan *plan = &m->timeline.plan;
    timeline_begin_planning(&m->timeline, m->dev);
    for (int i = 0; i < PASS_COUNT * (m->shape.L + 1) * SLOT_COUNT; i++)
        m->slots[i] = -1;
    const enum plan_arena params_arena = m->zero.params_on_host ? ARENA_HOST_PARAMETERS : ARENA_PARAMETERS;
    m->ids.params = plan_add(plan, params_arena, "parameters", "parameters", -1,
                             (size_t)shards_elements(s, shards_parameters(s)) * sizeof(floatX));
    m->ids.frozen = -1;
    if (m->table.num_frozen > 0)
        m->ids.frozen = plan_add(plan, params_arena, "frozen parameters", "frozen parameters", -1,
                                 (size_t)shards_elements(&m->frozen.shards, shards_parameters(s)) * sizeof(floatX));
    m->ids.stored = -1;
    if (m->table.stored_bytes > 0)
        m->ids.stored =
            plan_add(plan, ARENA_PARAMETERS, "frozen weights", "frozen weights", -1, (size_t)m->table.stored_bytes);
    m->rotary.id = m->rotary.local_id = m->ids.scratch = m->ids.grads = -1;
    const size_t rope_bytes = (size_t)m->config.model.seq_length * (size_t)m->shape.layer.D * sizeof(float);
    if (config_rotates(&m->config))
        m->rotary.id = plan_add(plan, ARENA_PARAMETERS, "rotary table", "rotary table", -1, rope_bytes);
    if (m->config.model.rotary_base_local > 0)
        m->rotary.local_id =
            plan_add(plan, ARENA_PARAMETERS, "rotary table", "rotary table of windowed layers", -1, rope_bytes);
    if (m->trains)
        m->ids.grads = plan_add(plan, m->zero.grads_on_host ? ARENA_HOST_GRADIENTS : ARENA_GRADIENTS, "gradients",
                                "gradients", -1, zero_gradients_bytes(&m->zero));
    optimizer_plan(&m->optimizer, &m->zero, &m->fp8, &m->config, m->trains);
    muon_plan(&m->muon, &m->optimizer, &m->shape.layer, m->trains);
    optimizer_copy_plan(&m->copy, &m->optimizer, keeps_copy);
    if (s->ranks > 1)
        m->ids.scratch = plan_add(
            plan, ARENA_GRADIENTS, "collectives", "collectives' scratch", -1,
            collectives_scratch_bytes(s->largest_shard, s->ranks, collectives_kind_of(&m->config, m->dev),
                                      m->config.processes.grad_reduce_in_bf16, muon_exchanged_bytes(&m->muon), m->dev));
    m->io.results_id = plan_add(plan, ARENA_OPTIMIZER, "step results", "step results", -1, sizeof(struct step_results));
    m->io.reports_id = plan_add(plan, ARENA_OPTIMIZER, "step results", "reports of the ranks", -1,
                                (size_t)s->ranks * (size_t)report_width(m) * sizeof(double));
    fp8_plan(&m->fp8, plan);
    plan_staging(m);

    if (m->trains) {
        gpt_micro_step(m, 0, batch_of(NULL, NULL), 1);
        gpt_update(m, 1, 0);
        gpt_swap_averages(m);
    }
    if (m->config.evaluation.val_every > 0 || m->config.evaluation.eval_only || config_scores(&m->config))
        gpt_plan_evaluation(m);
    if (config_samples(&m->config)) {
        gpt_prefill(m, NULL, NULL);
        gpt_decode(m, NULL, NULL);
    }
    m->timeline.planning = false;
    m->steps.micro_step = 0;
}

static struct zero_options zero_options_of(const struct config *c) {
    struct zero_options options = {c->states.offload_weights, c->states.offload_gradients, FORMAT_FP32,
                                   c->training.seed};
    switch (c->states.main_grads_dtype) {
    case MAIN_FP32: break;
    case MAIN_BF16: options.grads_format = FORMAT_BF16; break;
    }
    return options;
}

// Returns the lowest layer with a trained tensor, where backward stops; -1: the embeddings have one; L: neither has.
static int lowest_trained(const struct parameters *table) {
    int lowest = table->L;
    for (int i = 0; i < table->num_tensors; i++) {
        const struct tensor *t = &table->tensors[i];
        switch (t->unit) {
        case UNIT_HEAD: break;
        case UNIT_LAYER: lowest = t->layer < lowest ? t->layer : lowest; break;
        case UNIT_EMBEDDINGS: lowest = -1; break;
        }
    }
    return lowest;
}
// Creates a model and plans its memory; plan_place and gpt_allocate come next. gpt_destroy frees the model and
// `policy`. config is copied, but its strings and *dev must outlive the model. frozen (L + 1, PARAM_COUNT), read only
// here, marks the tensors not trained, the last row the whole model's; NULL: none. Too large a model ends the program.
static struct gpt *gpt_plan(const struct config *config, const bool *frozen, struct recompute_policy policy,
                            enum attention_backend backend, struct device *dev) {
    struct gpt *m = (struct gpt *)calloc(1, sizeof *m);
    if (!m)
        fail("out of memory");
    m->config = *config;
    m->shape = model_shape_of(config, sizeof(floatX), attention_row(backend)->keeps_probabilities);
    const int ranks = config->ranks > 1 ? config->ranks : 1;
    m->table = parameters_create(&m->shape, ranks, frozen);
    const int64_t bucket_bytes = (int64_t)(config->processes.bucket_mib * 0x1p20);
    zero_create(&m->zero, &m->table, &m->table.trained, &m->timeline, config->rank, ranks, config->processes.zero_stage,
                bucket_bytes, zero_options_of(config));
    zero_create(&m->frozen, &m->table, &m->table.frozen, &m->timeline, config->rank, ranks,
                config->processes.zero_stage, bucket_bytes, zero_options_of(config));
    m->lowest_trained = lowest_trained(&m->table);
    fp8_create(&m->fp8, config, &m->shape.layer, shards_optimizer(&m->zero.shards) || m->zero.params_on_host,
               config->training.global_batch_size / (config->training.micro_batch_size * ranks));
    m->policy = policy;
    m->backend = backend;
    m->dev = dev;
    m->loss_chunk = loss_chunk(config, m->shape.Vp, dev);
    m->trains = config_trains(config);
    m->generation.sequences =
        config->evaluation.chat
            ? 1
            : config->evaluation.sample_count *
                  (*config->evaluation.generate ? option_list_count(config->evaluation.generate) : 1);
    m->generation.prompt_tokens = config->prompt_tokens > 0 ? config->prompt_tokens : 1;
    m->generation.decode_tokens = config->evaluation.sample_tokens;
    m->io.host_batch_tokens = (int64_t)config->training.micro_batch_size * config->model.seq_length;
    if (extent_of(m, PASS_PREFILL).N > m->io.host_batch_tokens)
        m->io.host_batch_tokens = extent_of(m, PASS_PREFILL).N;
    m->steps.most = m->steps.of_step = config->training.global_batch_size / (config->training.micro_batch_size * ranks);
    m->slots = (int *)calloc((size_t)PASS_COUNT * (size_t)(m->shape.L + 1) * SLOT_COUNT, sizeof *m->slots);
    m->kinds = (struct layer_kind *)calloc((size_t)m->shape.L, sizeof *m->kinds);
    if (!m->slots || !m->kinds)
        fail("out of memory");
    m->window = config_window(config);
    for (int l = 0; l < m->shape.L; l++) {
        m->kinds[l].windowed = config_layer_is_windowed(config, l);
        m->kinds[l].rotary = config_layer_is_rotary(config, l);
    }
    // Checkpoints before the run's end are written from a copy, on every rank that writes a part of the state. The copy
    // has no frozen parameters, which a checkpoint needs unless it is of adapters.
    gpt_record_plan(m, m->trains && config->checkpoints.checkpoint_async && !*config->finetuning.freeze &&
                           (config->checkpoints.save_best ||
                            (config->checkpoints.checkpoint_every > 0 &&
                             config->checkpoints.checkpoint_every < config->training.train_steps)) &&
                           rank_writes_checkpoint(&m->zero.shards));
    return m;
}

// ---- Memory ----

// Allocates the memory of the placed plan, and sets initial parameters and optimizer states. Waits for the device. With
// several ranks, gpt_connect comes next. Ends the program if the memory does not fit.
static void gpt_allocate(struct gpt *m) {
    arenas_allocate(&m->timeline.arenas, &m->timeline.plan);
    transfers_open(&m->timeline.transfers, m->config.states.bus_gbps, m->dev);
    m->zero.params = (floatX *)gpt_pointer(m, m->ids.params);
    m->frozen.params = (floatX *)gpt_pointer(m, m->ids.frozen);
    m->stored.memory = (char *)gpt_pointer(m, m->ids.stored);
    m->zero.grads = gpt_pointer(m, m->ids.grads);
    fp8_allocate(&m->fp8, &m->timeline.plan, &m->timeline.arenas, m->dev);
    optimizer_allocate(&m->optimizer);
    muon_allocate(&m->muon);
    optimizer_copy_allocate(&m->copy, &m->optimizer);
    m->io.results = (struct step_results *)gpt_pointer(m, m->io.results_id);
    m->io.reports = (double *)gpt_pointer(m, m->io.reports_id);
    m->io.losses = (struct loss_sum *)(m->io.reports + m->zero.shards.rank * report_width(m) + REPORT_LOSSES);
    m->zero.squares = m->io.reports + m->zero.shards.rank * report_width(m) + REPORT_SQUARES;
    m->zero.micro_step = &m->io.results->micro_step;
    m->zero.tensors = m->optimizer.tensors;
    const size_t reports_bytes = (size_t)m->zero.shards.ranks * (size_t)report_width(m) * sizeof *m->io.reports;
    device_zero(m->io.results, sizeof *m->io.results, m->dev);
    device_zero(m->io.reports, reports_bytes, m->dev);
    if (config_rotates(&m->config))
        m->rotary.table = gpt_initialize_rope(m, m->rotary.id, false);
    if (m->config.model.rotary_base_local > 0)
        m->rotary.local = gpt_initialize_rope(m, m->rotary.local_id, true);
    m->io.host_batches = (int32_t *)gpt_pointer(m, m->io.host_batches_id);
    m->io.host_results = (struct step_results *)gpt_pointer(m, m->io.host_results_id);
    m->io.host_reports = (double *)gpt_pointer(m, m->io.host_reports_id);
    m->io.host_requests = (double *)gpt_pointer(m, m->io.host_requests_id);
    gpt_initialize(m);
    device_synchronize(m->dev);
}

// Connects the model to open collectives, which get scratch in the model's memory: close them before gpt_destroy.
static void gpt_connect(struct gpt *m, struct collectives *collectives) {
    m->zero.collectives = m->frozen.collectives = collectives;
    collectives_set_scratch(collectives, gpt_pointer(m, m->ids.scratch));
}

// Copies this rank's part of the training state to host memory, from which checkpoints are then written, and returns
// when that is done. First waits for all updates and the device. Copies nothing if the model keeps no copy.
static void gpt_copy_state(struct gpt *m) {
    zero_wait_for_updates(&m->zero);
    device_synchronize(m->dev);
    if (m->copy.keeps)
        optimizer_copy_take(&m->copy, &m->optimizer);
}

// Frees the model, its memory and its policy. Close the collectives before. The device stays open.
static void gpt_destroy(struct gpt *m) {
    gpt_free_graphs(m);
    timeline_free(&m->timeline);
    policy_free(&m->policy);
    zero_free(&m->zero);
    zero_free(&m->frozen);
    frozen_weights_free(&m->stored);
    optimizer_free(&m->optimizer);
    muon_free(&m->muon);
    parameters_free(&m->table);
    free(m->slots);
    free(m->kinds);
    free(m);
}
