// A model's memory: planned from its timeline, allocated, filled with initial parameters, freed.
#pragma once
#include "generation.cuh" // struct gpt, gpt_prefill, gpt_decode

static int add_flat(struct gpt *m, enum plan_arena arena, const char *name, size_t element_bytes, bool sharded) {
    return plan_add(&m->timeline.plan, arena, name, name, -1,
                    (size_t)shards_elements(&m->zero.shards, sharded) * element_bytes);
}

static void *gpt_pointer(const struct gpt *m, int id) {
    return plan_pointer(&m->timeline.plan, &m->timeline.arenas, id);
}

// The library that does the collectives.
static enum collectives_kind collectives_kind_of(const struct config *c) {
#ifdef TARGET_CUDA
    switch (c->collectives) {
    case BY_AUTO: return COLLECTIVES_HAVE_NCCL ? COLLECTIVES_NCCL : COLLECTIVES_HOST;
    case BY_NCCL: return COLLECTIVES_NCCL;
    case BY_MPI:
    case BY_SOCKETS: return COLLECTIVES_HOST;
    }
#endif
    return COLLECTIVES_HOST;
}

// Makes the memory plan: runs the timeline in planning mode and places the buffers. Allocates no memory of the model.
static void gpt_make_plan(struct gpt *m, bool keeps_copy) {
    const struct shards *s = &m->zero.shards;
    struct plan *plan = &m->timeline.plan;
    timeline_begin_planning(&m->timeline, m->dev);
    for (int i = 0; i < PASS_COUNT * (m->shape.L + 1) * SLOT_COUNT; i++)
        m->slots[i] = -1;
    m->params_id = add_flat(m, ARENA_PARAMETERS, "parameters", sizeof(floatX), shards_parameters(s));
    m->rope_id = m->scratch_id = m->grads_id = -1;
    if (uses_rope(&m->shape))
        m->rope_id = plan_add(plan, ARENA_PARAMETERS, "rotary table", "rotary table", -1,
                              (size_t)m->config.seq_length * (size_t)m->shape.layer.D * sizeof(float));
    if (m->trains)
        m->grads_id = add_flat(m, ARENA_GRADIENTS, "gradients", sizeof(float), shards_gradients(s));
    optimizer_plan(&m->optimizer, &m->zero, m->trains, keeps_copy);
    if (s->ranks > 1)
        m->scratch_id = plan_add(plan, ARENA_GRADIENTS, "collectives", "collectives' scratch", -1,
                                 collectives_scratch_bytes(s->largest_shard, s->ranks, collectives_kind_of(&m->config),
                                                           m->config.grad_reduce_in_bf16));
    m->results_id = plan_add(plan, ARENA_OPTIMIZER, "step results", "step results", -1, sizeof(struct step_results));
    m->reports_id = plan_add(plan, ARENA_OPTIMIZER, "step results", "reports of the ranks", -1,
                             (size_t)s->ranks * (size_t)report_width(m) * sizeof(double));

    if (m->trains) {
        gpt_micro_step(m, 0, NULL, NULL, 1);
        gpt_update(m, 1, 0);
    }
    if (m->config.val_every > 0 || m->config.eval_only)
        gpt_evaluate(m, NULL, NULL);
    if (m->config.sample_every > 0 || *m->config.generate) {
        gpt_prefill(m, NULL, NULL);
        gpt_decode(m, NULL, NULL);
    }
    if (m->trains && optimizer_is_sharded(&m->optimizer))
        optimizer_gathered_buffer(&m->optimizer);
    m->timeline.planning = false;
    m->micro_step = 0;
    plan_place(plan);
}

// Bytes of a chunk of logits, about: large enough for the matmuls to run at full speed, small beside the rest.
// A chunk's fixed cost, two reads of the head's weight and a pass over its fp32 gradient, is on a CPU that of the
// matmuls of 20 to 30 tokens: with LOGITS_CHUNK_TOKENS at least it stays below 3 %, however large the vocabulary.
enum { LOGITS_CHUNK_TOKENS = 1024 };
#ifdef TARGET_CUDA
enum { LOGITS_CHUNK_BYTES = 512 << 20 }; // larger, since each chunk adds to the fp32 gradient of the whole head
#else
enum { LOGITS_CHUNK_BYTES = 128 << 20 };
#endif

static int64_t loss_chunk(const struct config *c, int Vp) {
    const int64_t N = (int64_t)c->micro_batch_size * c->seq_length;
    if (c->loss_chunk_tokens > 0)
        return c->loss_chunk_tokens < N ? c->loss_chunk_tokens : N;
    const int64_t by_bytes = (N * Vp * (int64_t)sizeof(floatX) + LOGITS_CHUNK_BYTES - 1) / LOGITS_CHUNK_BYTES;
    const int64_t by_tokens = (N + LOGITS_CHUNK_TOKENS - 1) / LOGITS_CHUNK_TOKENS;
    const int64_t chunks = by_bytes < by_tokens ? by_bytes : by_tokens;
    const int64_t chunk = ((N + chunks - 1) / chunks + 63) / 64 * 64;
    return chunk < N ? chunk : N;
}

// Makes a model with its memory plan; gpt_allocate allocates its memory, gpt_destroy frees it. Takes over the policy.
static struct gpt *gpt_create(const struct config *config, struct recompute_policy policy,
                              enum attention_backend backend, struct device *dev) {
    struct gpt *m = (struct gpt *)calloc(1, sizeof *m);
    if (!m)
        fail("out of memory");
    m->config = *config;
    m->shape = model_shape_of(config, sizeof(floatX), backend == ATTENTION_UNFUSED);
    const int ranks = config->ranks > 1 ? config->ranks : 1;
    m->table = parameters_create(&m->shape, ranks);
    zero_create(&m->zero, &m->table, &m->timeline, config->rank, ranks, config->zero_stage,
                (int64_t)(config->bucket_mib * 0x1p20));
    m->policy = policy;
    m->backend = backend;
    m->dev = dev;
    m->chunk = loss_chunk(config, m->shape.Vp);
    m->trains = config_trains(config);
    m->sequences = config->sample_count * (*config->generate ? option_list_count(config->generate) : 1);
    m->prompt_tokens = config->prompt_tokens > 0 ? config->prompt_tokens : 1;
    m->decode_tokens = config->sample_tokens;
    m->host_batch_tokens = (int64_t)config->micro_batch_size * config->seq_length;
    if (extent_of(m, PASS_PREFILL).N > m->host_batch_tokens)
        m->host_batch_tokens = extent_of(m, PASS_PREFILL).N;
    m->micro_steps = config->global_batch_size / (config->micro_batch_size * ranks);
    m->slots = (int *)calloc((size_t)PASS_COUNT * (size_t)(m->shape.L + 1) * SLOT_COUNT, sizeof *m->slots);
    if (!m->slots)
        fail("out of memory");
    // Sharded state is gathered into the copy of rank 0, which writes the checkpoints.
    const bool async = config->checkpoint_async && config->checkpoint_every < config->train_steps;
    gpt_make_plan(m, m->trains && config->checkpoint_every > 0 && config->rank == 0 &&
                         (shards_optimizer(&m->zero.shards) || async));
    return m;
}

// Sets the initial parameters and state, by GPT-2's scheme, computed by the host a chunk at a time.
static void gpt_initialise(struct gpt *m) {
    const int64_t CHUNK = 1 << 20; // elements
    const bool sharded = shards_parameters(&m->zero.shards);
    float *exact = (float *)host_allocate((size_t)CHUNK * sizeof *exact, m->dev);
    floatX *rounded = (floatX *)host_allocate((size_t)CHUNK * sizeof *rounded, m->dev);
    // The gaps between tensors are zeroes too.
    device_zero(m->zero.params, (size_t)shards_elements(&m->zero.shards, sharded) * sizeof *m->zero.params, m->dev);
    optimizer_initialise(&m->optimizer);
    for (int i = 0; i < m->table.num_tensors; i++) {
        const struct tensor *t = &m->table.tensors[i];
        for (int64_t first = 0; first < t->count; first += CHUNK) {
            const int64_t n = t->count - first < CHUNK ? t->count - first : CHUNK;
            if (!zero_holds(&m->zero, sharded, t->offset + first, n))
                continue;
            tensor_initialise(exact, first, n, t, m->config.init_method_std, m->shape.L, m->config.seed);
            optimizer_set_parameters(&m->optimizer, t->offset + first, exact, n, rounded);
            device_synchronize(m->dev);
        }
    }
    if (m->trains)
        gpt_zero_gradients(m);
    host_free(exact);
    host_free(rounded);
}
// Sets the rotary table, computed by the host.
static void gpt_initialise_rope(struct gpt *m) {
    const size_t bytes = (size_t)m->config.seq_length * (size_t)m->shape.layer.D * sizeof(float);
    float *table = (float *)host_allocate(bytes, m->dev), *to = (float *)gpt_pointer(m, m->rope_id);
    const struct rope_settings settings = rope_unscaled(m->shape.layer.D, m->config.rotary_base);
    rope_table(table, m->config.seq_length, &settings);
    device_upload(to, table, bytes, m->dev);
    device_synchronize(m->dev);
    host_free(table);
    m->rope = to;
}

// Allocates the arenas and fills in initial parameters.
static void gpt_allocate(struct gpt *m) {
    arenas_allocate(&m->timeline.arenas, &m->timeline.plan);
    m->zero.params = (floatX *)gpt_pointer(m, m->params_id);
    m->zero.grads = (float *)gpt_pointer(m, m->grads_id);
    optimizer_allocate(&m->optimizer);
    m->results = (struct step_results *)gpt_pointer(m, m->results_id);
    m->reports = (double *)gpt_pointer(m, m->reports_id);
    m->losses = m->reports + m->zero.shards.rank * report_width(m) + REPORT_LOSSES;
    const size_t reports_bytes = (size_t)m->zero.shards.ranks * (size_t)report_width(m) * sizeof *m->reports;
    device_zero(m->results, sizeof *m->results, m->dev);
    device_zero(m->reports, reports_bytes, m->dev);
    if (uses_rope(&m->shape))
        gpt_initialise_rope(m);
    m->host_batches = (int32_t *)host_allocate(4 * (size_t)m->host_batch_tokens * sizeof(int32_t), m->dev);
    m->host_results = (struct step_results *)host_allocate(2 * sizeof *m->host_results, m->dev);
    m->host_reports = (double *)host_allocate(2 * reports_bytes, m->dev);
    m->host_requests = (double *)host_allocate(2 * sizeof *m->host_requests, m->dev);
    gpt_initialise(m);
    device_synchronize(m->dev);
}

// Opens the model's collectives. They allocate device memory that is not in the plan, and so are opened before the
// check whether the plan fits, and before gpt_allocate.
static void gpt_open_collectives(const struct gpt *m, struct collectives *collectives, struct parallel *parallel,
                                 enum collectives_kind kind) {
    const size_t shard_bytes = (size_t)m->zero.shards.largest_shard * sizeof(float);
    const size_t report_bytes = (size_t)report_width(m) * sizeof *m->reports;
    collectives_open(collectives, parallel, kind, m->config.grad_reduce_in_bf16, m->zero.shards.largest_shard,
                     shard_bytes > report_bytes ? shard_bytes : report_bytes, m->dev);
}
// Connects the model with those of the other ranks. The collectives must outlive the model.
static void gpt_connect(struct gpt *m, struct collectives *collectives) {
    m->zero.collectives = collectives;
    collectives_set_scratch(collectives, gpt_pointer(m, m->scratch_id));
}

// Copies the state that a checkpoint holds into the copy, in host memory, of the rank that keeps one. Every rank calls
// it.
static void gpt_copy_state(struct gpt *m) {
    zero_wait_for_updates(&m->zero);
    optimizer_copy_state(&m->optimizer);
}

static void gpt_destroy(struct gpt *m) {
    optimizer_free(&m->optimizer);
    graph_free(&m->graph);
    host_free(m->host_batches);
    host_free(m->host_results);
    host_free(m->host_reports);
    host_free(m->host_requests);
    timeline_free(&m->timeline);
    policy_free(&m->policy);
    zero_free(&m->zero);
    parameters_free(&m->table);
    free(m->slots);
    free(m);
}
