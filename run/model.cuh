// Makes a run's model: plans it with the parameters that the run freezes, connects it to other ranks, and dry-runs it.
#pragma once
#include "gpt.cuh"          // struct gpt
#include "run/freezing.cuh" // freezing_of

// Creates a model whose plan is recorded but not placed; gpt_destroy frees both it and the policy. *dev must stay.
static struct gpt *gpt_record(const struct config *config, struct recompute_policy policy,
                              enum attention_backend backend, struct device *dev) {
    const struct model_shape shape =
        model_shape_of(config, sizeof(floatX), attention_row(backend)->keeps_probabilities);
    bool *frozen = freezing_of(config, &shape);
    struct gpt *m = gpt_plan(config, frozen, policy, backend, dev);
    free(frozen);
    return m;
}
// Creates a model with a placed plan; gpt_destroy frees it and `policy`. *dev and *config's texts must stay until then.
static struct gpt *gpt_create(const struct config *config, struct recompute_policy policy,
                              enum attention_backend backend, struct device *dev) {
    struct gpt *m = gpt_record(config, policy, backend, dev);
    plan_place(&m->timeline.plan);
    return m;
}

// Sets the bytes that a step of the full batch copies each way for offloading, by the plan; 0 without training.
static void gpt_step_transfer_bytes(const struct gpt *m, size_t bytes[TRANSFER_DIRECTIONS]) {
    const struct plan *plan = &m->timeline.plan;
    const int *first = m->timeline.region_first, update = first[REGION_UPDATE];
    int end = plan->phase_count; // of the update
    for (int r = 0; r < REGION_COUNT; r++)
        end = first[r] > update && first[r] < end ? first[r] : end;
    memset(bytes, 0, TRANSFER_DIRECTIONS * sizeof *bytes);
    for (int i = 0; i < plan->transfer_count && m->trains; i++) {
        const struct plan_transfer *transfer = &plan->transfers[i];
        if (transfer->phase < end)
            bytes[transfer->direction] += transfer->bytes * (transfer->phase < update ? (size_t)m->steps.most : 1);
    }
    if (m->trains && m->zero.grads_on_host && m->steps.most > 1) // the first micro-step's gradients start from zero
        bytes[TRANSFER_TO_DEVICE] -= zero_gradients_bytes(&m->zero);
}

// Calls only the matmuls of a training step, and of an evaluation if the run has any, in the allocated memory, so that
// a matmul library can list them (model/timeline.cuh). Call this before the first step.
static void gpt_dry_run(struct gpt *m) {
    const uint64_t micro_step = m->steps.micro_step;
    timeline_dry_run(&m->timeline, true);
    gpt_micro_step(m, 0, batch_of(NULL, NULL), 1);
    gpt_update(m, 1, 0);
    if (m->config.evaluation.val_every > 0 || config_scores(&m->config))
        gpt_plan_evaluation(m);
    timeline_dry_run(&m->timeline, false);
    m->steps.micro_step = micro_step;
}

// Opens the collectives, for collectives_close. Call this only where there are several ranks, in every rank. They take
// device memory, so call it before the check whether the plan fits and before gpt_allocate. gpt_connect follows.
static void gpt_open_collectives(const struct gpt *m, struct collectives *collectives, struct parallel *parallel,
                                 enum collectives_kind kind) {
    const struct shards *s = &m->zero.shards, *frozen = &m->frozen.shards;
    size_t gathered = larger((size_t)s->largest_shard * sizeof(float), (size_t)report_width(m) * sizeof *m->io.reports);
    if (shards_parameters(frozen))
        gathered = larger(gathered, (size_t)frozen->largest_shard * sizeof(floatX));
    collectives_open(collectives, parallel, kind, m->config.processes.grad_reduce_in_bf16, s->largest_shard, gathered,
                     muon_exchanged_bytes(&m->muon), m->dev);
}
