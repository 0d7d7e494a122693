// A model's memory: planned from its timeline, allocated, filled with initial parameters, freed.
#pragma once
#include "config/layers.h"        // config_layer_is_windowed, config_layer_is_rotary
#include "kernels/rope_table.cuh" // rope_table, struct rope_settings
#include "model/generation.cuh"   // struct gpt, gpt_prefill, gpt_decode
#include "run/freezing.cuh"       // freezing_of

static void *gpt_pointer(const struct gpt *m, int id) {
    return plan_pointer(&m->timeline.plan, &m->timeline.arenas, id);
}

// The library that does the collectives, on a GPU that is planned for NCCL where nothing else is asked for.
static enum collectives_kind collectives_kind_of(const struct config *c, const struct device *dev) {
    if (!device_is_gpu(dev))
        return COLLECTIVES_HOST;
    switch (c->collectives) {
    case BY_AUTO: return COLLECTIVES_HAVE_NCCL ? COLLECTIVES_NCCL : COLLECTIVES_HOST;
    case BY_NCCL: return COLLECTIVES_NCCL;
    case BY_MPI:
    case BY_SOCKETS: return COLLECTIVES_HOST;
    }
    return COLLECTIVES_HOST;
}

// Plans the pinned memory of batches on their way to the device and of results on their way back: two of each in
// flight.
static void plan_staging(struct gpt *m) {
    struct plan *plan = &m->timeline.plan;
    const size_t reports_bytes = (size_t)m->zero.shards.ranks * (size_t)report_width(m) * sizeof(double);
    m->host_batches_id = plan_add(plan, ARENA_HOST_STAGING, "staging", "batches in flight", -1,
                                  6 * (size_t)m->host_batch_tokens * sizeof(int32_t));
    m->host_results_id =
        plan_add(plan, ARENA_HOST_STAGING, "staging", "step results in flight", -1, 2 * sizeof(struct step_results));
    m->host_reports_id =
        plan_add(plan, ARENA_HOST_STAGING, "staging", "reports of the ranks in flight", -1, 2 * reports_bytes);
    m->host_requests_id = plan_add(plan, ARENA_HOST_STAGING, "staging", "requests in flight", -1, 2 * sizeof(double));
}

// Records the memory plan: runs the timeline in planning mode. Allocates no memory of the model.
static void gpt_record_plan(struct gpt *m, bool keeps_copy) {
    const struct shards *s = &m->zero.shards;
    struct plan *plan = &m->timeline.plan;
    timeline_begin_planning(&m->timeline, m->dev);
    for (int i = 0; i < PASS_COUNT * (m->shape.L + 1) * SLOT_COUNT; i++)
        m->slots[i] = -1;
    const enum plan_arena params_arena = m->zero.params_on_host ? ARENA_HOST_PARAMETERS : ARENA_PARAMETERS;
    m->params_id = plan_add(plan, params_arena, "parameters", "parameters", -1,
                            (size_t)shards_elements(s, shards_parameters(s)) * sizeof(floatX));
    m->frozen_id = -1;
    if (m->table.num_frozen > 0)
        m->frozen_id = plan_add(plan, params_arena, "frozen parameters", "frozen parameters", -1,
                                (size_t)shards_elements(&m->frozen.shards, shards_parameters(s)) * sizeof(floatX));
    m->stored_id = -1;
    if (m->table.stored_bytes > 0)
        m->stored_id =
            plan_add(plan, ARENA_PARAMETERS, "frozen weights", "frozen weights", -1, (size_t)m->table.stored_bytes);
    m->rope_id = m->local_rope_id = m->scratch_id = m->grads_id = -1;
    const size_t rope_bytes = (size_t)m->config.seq_length * (size_t)m->shape.layer.D * sizeof(float);
    if (uses_rope(&m->shape))
        m->rope_id = plan_add(plan, ARENA_PARAMETERS, "rotary table", "rotary table", -1, rope_bytes);
    if (m->config.rotary_base_local > 0)
        m->local_rope_id =
            plan_add(plan, ARENA_PARAMETERS, "rotary table", "rotary table of windowed layers", -1, rope_bytes);
    if (m->trains)
        m->grads_id = plan_add(plan, m->zero.grads_on_host ? ARENA_HOST_GRADIENTS : ARENA_GRADIENTS, "gradients",
                               "gradients", -1, zero_gradients_bytes(&m->zero));
    optimizer_plan(&m->optimizer, &m->zero, &m->fp8, &m->config, m->trains);
    muon_plan(&m->muon, &m->optimizer, &m->shape.layer, m->trains);
    optimizer_copy_plan(&m->copy, &m->optimizer, keeps_copy);
    if (s->ranks > 1)
        m->scratch_id =
            plan_add(plan, ARENA_GRADIENTS, "collectives", "collectives' scratch", -1,
                     collectives_scratch_bytes(s->largest_shard, s->ranks, collectives_kind_of(&m->config, m->dev),
                                               m->config.grad_reduce_in_bf16, muon_exchanged_bytes(&m->muon), m->dev));
    m->results_id = plan_add(plan, ARENA_OPTIMIZER, "step results", "step results", -1, sizeof(struct step_results));
    m->reports_id = plan_add(plan, ARENA_OPTIMIZER, "step results", "reports of the ranks", -1,
                             (size_t)s->ranks * (size_t)report_width(m) * sizeof(double));
    fp8_plan(&m->fp8, plan);
    plan_staging(m);

    if (m->trains) {
        gpt_micro_step(m, 0, batch_of(NULL, NULL), 1);
        gpt_update(m, 1, 0);
        gpt_swap_averages(m);
    }
    if (m->config.val_every > 0 || m->config.eval_only || config_scores(&m->config))
        gpt_evaluate_nothing(m);
    if (m->config.sample_every > 0 || config_generates(&m->config)) {
        gpt_prefill(m, NULL, NULL);
        gpt_decode(m, NULL, NULL);
    }
    m->timeline.planning = false;
    m->micro_step = 0;
}

// Sets the bytes that a training step copies between device and host in each direction.
static void gpt_transfer_bytes(const struct gpt *m, size_t bytes[TRANSFER_DIRECTIONS]) {
    const struct plan *plan = &m->timeline.plan;
    const int *first = m->timeline.region_first, update = first[REGION_UPDATE];
    int end = plan->phase_count; // of the update
    for (int r = 0; r < REGION_COUNT; r++)
        end = first[r] > update && first[r] < end ? first[r] : end;
    memset(bytes, 0, TRANSFER_DIRECTIONS * sizeof *bytes);
    for (int i = 0; i < plan->transfer_count && m->trains; i++) {
        const struct plan_transfer *transfer = &plan->transfers[i];
        if (transfer->phase < end)
            bytes[transfer->direction] += transfer->bytes * (transfer->phase < update ? (size_t)m->micro_steps : 1);
    }
    if (m->trains && m->zero.grads_on_host && m->micro_steps > 1) // the first micro-step's gradients start from zero
        bytes[TRANSFER_TO_DEVICE] -= zero_gradients_bytes(&m->zero);
}

// Bytes of a chunk of logits, about: large enough for the matmuls to run at full speed, small beside the rest. On a GPU
// each chunk but the first adds to the fp32 gradient of the whole head, 8 bytes an element: where memory is free,
// chunks are larger (fit_loss_chunk).
// A chunk's fixed cost, two reads of the head's weight and a pass over its fp32 gradient, is on a CPU that of the
// matmuls of 20 to 30 tokens: with LOGITS_CHUNK_TOKENS at least it stays below 3 %, however large the vocabulary.
enum { LOGITS_CHUNK_TOKENS = 1024, LOGITS_CHUNK_BYTES_GPU = 512 << 20, LOGITS_CHUNK_BYTES_CPU = 128 << 20 };

static int64_t loss_chunk(const struct config *c, int Vp, const struct device *dev) {
    const int64_t chunk_bytes = device_is_gpu(dev) ? LOGITS_CHUNK_BYTES_GPU : LOGITS_CHUNK_BYTES_CPU;
    const int64_t N = (int64_t)c->micro_batch_size * c->seq_length;
    if (c->loss_chunk_tokens > 0)
        return c->loss_chunk_tokens < N ? c->loss_chunk_tokens : N;
    const int64_t by_bytes = (N * Vp * (int64_t)sizeof(floatX) + chunk_bytes - 1) / chunk_bytes;
    const int64_t by_tokens = (N + LOGITS_CHUNK_TOKENS - 1) / LOGITS_CHUNK_TOKENS;
    const int64_t chunks = by_bytes < by_tokens ? by_bytes : by_tokens;
    const int64_t chunk = ((N + chunks - 1) / chunks + 63) / 64 * 64;
    return chunk < N ? chunk : N;
}

static struct zero_options zero_options_of(const struct config *c) {
    struct zero_options options = {c->offload_weights, c->offload_gradients, FORMAT_FP32, c->seed};
    switch (c->main_grads_dtype) {
    case MAIN_FP32: break;
    case MAIN_BF16: options.grads_format = FORMAT_BF16; break;
    }
    return options;
}

// The lowest layer with a trained tensor; -1: the embeddings have one; L: no layer has.
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
// A model whose plan is recorded and not placed.
static struct gpt *gpt_record(const struct config *config, struct recompute_policy policy,
                              enum attention_backend backend, struct device *dev) {
    struct gpt *m = (struct gpt *)calloc(1, sizeof *m);
    if (!m)
        fail("out of memory");
    m->config = *config;
    m->shape = model_shape_of(config, sizeof(floatX), backend == ATTENTION_UNFUSED);
    const int ranks = config->ranks > 1 ? config->ranks : 1;
    bool *frozen = freezing_of(config, &m->shape);
    m->table = parameters_create(&m->shape, ranks, frozen);
    free(frozen);
    const int64_t bucket_bytes = (int64_t)(config->bucket_mib * 0x1p20);
    zero_create(&m->zero, &m->table, &m->table.trained, &m->timeline, config->rank, ranks, config->zero_stage,
                bucket_bytes, zero_options_of(config));
    zero_create(&m->frozen, &m->table, &m->table.frozen, &m->timeline, config->rank, ranks, config->zero_stage,
                bucket_bytes, zero_options_of(config));
    m->lowest_trained = lowest_trained(&m->table);
    fp8_create(&m->fp8, config, &m->shape.layer, shards_optimizer(&m->zero.shards) || m->zero.params_on_host);
    m->policy = policy;
    m->backend = backend;
    m->dev = dev;
    m->chunk = loss_chunk(config, m->shape.Vp, dev);
    m->trains = config_trains(config);
    m->sequences =
        config->chat ? 1 : config->sample_count * (*config->generate ? option_list_count(config->generate) : 1);
    m->prompt_tokens = config->prompt_tokens > 0 ? config->prompt_tokens : 1;
    m->decode_tokens = config->sample_tokens;
    m->host_batch_tokens = (int64_t)config->micro_batch_size * config->seq_length;
    if (extent_of(m, PASS_PREFILL).N > m->host_batch_tokens)
        m->host_batch_tokens = extent_of(m, PASS_PREFILL).N;
    m->micro_steps = m->step_micro_steps = config->global_batch_size / (config->micro_batch_size * ranks);
    m->slots = (int *)calloc((size_t)PASS_COUNT * (size_t)(m->shape.L + 1) * SLOT_COUNT, sizeof *m->slots);
    m->kinds = (struct layer_kind *)calloc((size_t)m->shape.L, sizeof *m->kinds);
    if (!m->slots || !m->kinds)
        fail("out of memory");
    m->window = config_window(config);
    for (int l = 0; l < m->shape.L; l++) {
        m->kinds[l].windowed = config_layer_is_windowed(config, l);
        m->kinds[l].rotary = config_layer_is_rotary(config, l);
    }
    // Checkpoints within the run are written from a copy, by every rank that holds a part of the state. It has no
    // frozen parameters, which are in a checkpoint unless it is one of adapters.
    gpt_record_plan(m, m->trains && config->checkpoint_async && !*config->freeze && config->checkpoint_every > 0 &&
                           config->checkpoint_every < config->train_steps && optimizer_copy_writes(&m->zero.shards));
    return m;
}
// Makes a model with its memory plan; gpt_allocate allocates its memory, gpt_destroy frees it. Takes over the policy.
static struct gpt *gpt_create(const struct config *config, struct recompute_policy policy,
                              enum attention_backend backend, struct device *dev) {
    struct gpt *m = gpt_record(config, policy, backend, dev);
    plan_place(&m->timeline.plan);
    return m;
}

// Which of the two has a tensor.
static struct zero *zero_of(struct gpt *m, const struct tensor *t) { return t->frozen ? &m->frozen : &m->zero; }
// Whether this rank holds anything of elements [first, first + n) of a tensor's parameters.
static bool gpt_holds(struct gpt *m, const struct tensor *t, int64_t first, int64_t n) {
    const struct zero *z = zero_of(m, t);
    return tensor_is_stored(t) || zero_holds(z, shards_parameters(&z->shards), t->offset + first, n);
}
// Sets elements [first, first + n) of a tensor, those that this rank holds: exactly in the master weights of a trained
// one, rounded in the parameters. rounded: room for 2 n values, in use until the device was waited for.
static void gpt_set_parameters(struct gpt *m, const struct tensor *t, int64_t first, const float *values, int64_t n,
                               floatX *rounded) {
    if (!t->frozen) {
        optimizer_set_parameters(&m->optimizer, t->offset + first, values, n, rounded);
        return;
    }
    if (tensor_is_stored(t)) {
        frozen_weights_set(&m->stored, t, first, values, n, m->dev);
        return;
    }
    for (int64_t i = 0; i < n; i++)
        rounded[i] = to_floatX(values[i]);
    zero_upload(&m->frozen, m->frozen.params, shards_parameters(&m->frozen.shards), t->offset + first, rounded, n,
                sizeof *rounded);
}

// Zeroes in all parameters: the gaps between tensors are read too.
static void zero_clear_parameters(struct zero *z, struct device *dev) {
    const size_t bytes = (size_t)shards_elements(&z->shards, shards_parameters(&z->shards)) * sizeof *z->params;
    if (z->params_on_host && bytes > 0)
        memset(z->params, 0, bytes);
    else if (bytes > 0)
        device_zero(z->params, bytes, dev);
}
// Sets the initial parameters and state, by GPT-2's scheme, computed by the host a chunk at a time.
static void gpt_initialise(struct gpt *m) {
    const int64_t CHUNK = 1 << 20; // elements
    float *exact = (float *)host_allocate((size_t)CHUNK * sizeof *exact, m->dev);
    floatX *rounded = (floatX *)host_allocate(2 * (size_t)CHUNK * sizeof *rounded, m->dev);
    zero_clear_parameters(&m->zero, m->dev);
    zero_clear_parameters(&m->frozen, m->dev);
    optimizer_initialise(&m->optimizer);
    for (int i = 0; i < m->table.num_tensors + m->table.num_frozen; i++) {
        const struct tensor *t = &m->table.tensors[i];
        if (t->frozen && *m->config.init_from) // the base model, which is still to be loaded
            continue;
        for (int64_t first = 0; first < t->count; first += CHUNK) {
            const int64_t n = t->count - first < CHUNK ? t->count - first : CHUNK;
            if (!gpt_holds(m, t, first, n))
                continue;
            tensor_initialise(exact, first, n, t, m->config.init_method_std, m->shape.L, m->config.seed);
            gpt_set_parameters(m, t, first, exact, n, rounded);
            device_synchronize(m->dev);
        }
    }
    if (m->trains && !m->zero.grads_on_host) // zeroes between tensors, where nothing is written later
        device_zero(m->zero.grads, zero_gradients_bytes(&m->zero), m->dev);
    host_free(exact);
    host_free(rounded);
}
// The settings of the rotary table of the layers with rotary positions, or of those of them with a window where they
// have their own base. *factors, which the caller frees, holds the lists of longrope.
static struct rope_settings rope_settings_of(const struct config *c, bool local, double **factors) {
    struct rope_settings s;
    memset(&s, 0, sizeof s);
    s.head_dim = c->kv_channels;
    s.rotary_dims = config_rotary_dims(c);
    s.theta = local ? c->rotary_base_local : c->rotary_base;
    s.scaling = ROPE_UNSCALED;
    *factors = NULL;
    if (local)
        return s;
    s.factor = c->rope_scaling_factor;
    s.low_freq_factor = c->rope_low_freq_factor;
    s.high_freq_factor = c->rope_high_freq_factor;
    s.original_positions = c->rope_original_max_position_embeddings;
    s.beta_fast = c->yarn_beta_fast;
    s.beta_slow = c->yarn_beta_slow;
    s.truncate = c->yarn_truncate;
    s.attention_factor = c->rope_attention_factor;
    s.mscale = c->yarn_mscale;
    s.mscale_all_dim = c->yarn_mscale_all_dim;
    s.max_positions = c->max_position_embeddings;
    s.longest = c->seq_length;
    switch (c->rope_scaling_type) {
    case SCALING_NONE: break;
    case SCALING_LINEAR: s.scaling = ROPE_LINEAR; break;
    case SCALING_LLAMA3: s.scaling = ROPE_LLAMA3; break;
    case SCALING_YARN: s.scaling = ROPE_YARN; break;
    case SCALING_LONGROPE: {
        const int pairs = s.rotary_dims / 2;
        s.scaling = ROPE_LONGROPE;
        *factors = (double *)calloc(2 * (size_t)pairs, sizeof **factors);
        if (!*factors)
            fail("out of memory for the rotary table");
        config_numbers(*factors, pairs, "--rope-short-factors", c->rope_short_factors, 1e-6);
        config_numbers(*factors + pairs, pairs, "--rope-long-factors", c->rope_long_factors, 1e-6);
        s.short_factors = *factors;
        s.long_factors = *factors + pairs;
        break;
    }
    }
    return s;
}
// Sets a rotary table, computed by the host. Returns its address in device memory.
static const float *gpt_initialise_rope(struct gpt *m, int id, bool local) {
    const size_t bytes = (size_t)m->config.seq_length * (size_t)m->shape.layer.D * sizeof(float);
    float *table = (float *)host_allocate(bytes, m->dev), *to = (float *)gpt_pointer(m, id);
    double *factors;
    const struct rope_settings settings = rope_settings_of(&m->config, local, &factors);
    rope_table(table, m->config.seq_length, &settings);
    device_upload(to, table, bytes, m->dev);
    device_synchronize(m->dev);
    host_free(table);
    free(factors);
    return to;
}

// Allocates the arenas and fills in initial parameters.
static void gpt_allocate(struct gpt *m) {
    arenas_allocate(&m->timeline.arenas, &m->timeline.plan);
    transfers_open(&m->timeline.transfers, m->config.bus_gbps, m->dev);
    m->zero.params = (floatX *)gpt_pointer(m, m->params_id);
    m->frozen.params = (floatX *)gpt_pointer(m, m->frozen_id);
    m->stored.memory = (char *)gpt_pointer(m, m->stored_id);
    m->zero.grads = gpt_pointer(m, m->grads_id);
    fp8_allocate(&m->fp8, &m->timeline.plan, &m->timeline.arenas, m->dev);
    optimizer_allocate(&m->optimizer);
    muon_allocate(&m->muon);
    optimizer_copy_allocate(&m->copy, &m->optimizer);
    m->results = (struct step_results *)gpt_pointer(m, m->results_id);
    m->reports = (double *)gpt_pointer(m, m->reports_id);
    m->losses = (struct loss_sum *)(m->reports + m->zero.shards.rank * report_width(m) + REPORT_LOSSES);
    m->zero.squares = m->reports + m->zero.shards.rank * report_width(m) + REPORT_SQUARES;
    m->zero.micro_step = &m->results->micro_step;
    m->zero.tensors = m->optimizer.tensors;
    const size_t reports_bytes = (size_t)m->zero.shards.ranks * (size_t)report_width(m) * sizeof *m->reports;
    device_zero(m->results, sizeof *m->results, m->dev);
    device_zero(m->reports, reports_bytes, m->dev);
    if (uses_rope(&m->shape))
        m->rope = gpt_initialise_rope(m, m->rope_id, false);
    if (m->config.rotary_base_local > 0)
        m->local_rope = gpt_initialise_rope(m, m->local_rope_id, true);
    m->host_batches = (int32_t *)gpt_pointer(m, m->host_batches_id);
    m->host_results = (struct step_results *)gpt_pointer(m, m->host_results_id);
    m->host_reports = (double *)gpt_pointer(m, m->host_reports_id);
    m->host_requests = (double *)gpt_pointer(m, m->host_requests_id);
    gpt_initialise(m);
    device_synchronize(m->dev);
}

// Calls the matmuls of a training step, and of an evaluation where the run has some, on their planned memory; nothing
// else runs (model/timeline.cuh). For a matmul library that lists its calls, before the first step.
static void gpt_rehearse(struct gpt *m) {
    const uint64_t micro_step = m->micro_step;
    timeline_rehearse(&m->timeline, true);
    gpt_micro_step(m, 0, batch_of(NULL, NULL), 1);
    gpt_update(m, 1, 0);
    if (m->config.val_every > 0 || config_scores(&m->config))
        gpt_evaluate_nothing(m);
    timeline_rehearse(&m->timeline, false);
    m->micro_step = micro_step;
}

// Opens the model's collectives. They allocate device memory that is not in the plan, and so are opened before the
// check whether the plan fits, and before gpt_allocate.
static void gpt_open_collectives(const struct gpt *m, struct collectives *collectives, struct parallel *parallel,
                                 enum collectives_kind kind) {
    const struct shards *s = &m->zero.shards, *frozen = &m->frozen.shards;
    size_t gathered = larger((size_t)s->largest_shard * sizeof(float), (size_t)report_width(m) * sizeof *m->reports);
    if (shards_parameters(frozen))
        gathered = larger(gathered, (size_t)frozen->largest_shard * sizeof(floatX));
    collectives_open(collectives, parallel, kind, m->config.grad_reduce_in_bf16, s->largest_shard, gathered,
                     muon_exchanged_bytes(&m->muon), m->dev);
}
// Connects the model with those of the other ranks. The collectives must outlive the model.
static void gpt_connect(struct gpt *m, struct collectives *collectives) {
    m->zero.collectives = m->frozen.collectives = collectives;
    collectives_set_scratch(collectives, gpt_pointer(m, m->scratch_id));
}

// Makes the state that a checkpoint holds complete, and copies this rank's part of it where there is a copy.
static void gpt_copy_state(struct gpt *m) {
    zero_wait_for_updates(&m->zero);
    device_synchronize(m->dev);
    if (m->copy.keeps)
        optimizer_copy_take(&m->copy, &m->optimizer);
}

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
