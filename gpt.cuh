// The model: one block forward, one block backward, the head, the micro-step, the update, evaluation and generation.
//
// The schedule below is run in two ways. In planning mode each phase records which buffers it touches and executes
// nothing: that is where the memory plan comes from (memory.cuh). In a real run the same code finds those buffers at
// their planned places. A phase looks like this:
//
//     phase(m, "norm 1", l);                                 // the next phase of the schedule begins
//     floatX *out = activation(m, pass, l, ACT_NORM1);       // all its buffers are fetched: touched, when planning
//     RUN(m, norm_forward(out, ...));                        // the op: skipped, when planning
//
// Layer l's input is the OUT of layer l - 1; the embedding's output is the OUT of layer -1.
#pragma once
#include "attention.cuh"             // attention_forward, attention_backward, attention_decode
#include "config.h"                  // struct config
#include "kernels/activation.cuh"    // gelu, swiglu
#include "kernels/adamw.cuh"         // adamw_update, sum_of_squares, gradient_check
#include "kernels/collectives.cuh"   // collective_reduce_scatter, collective_all_gather
#include "kernels/device_memory.cuh" // device_upload, device_download, host_allocate
#include "kernels/device_queue.cuh"  // device_event_record, device_event_wait, work graphs
#include "kernels/embedding.cuh"     // embedding_forward, embedding_backward
#include "kernels/loss.cuh"          // cross_entropy
#include "kernels/matmul.cuh"        // matmul_forward, matmul_backward_input, matmul_backward_weight
#include "kernels/norm.cuh"          // norm_forward, norm_backward, residual_forward, residual_norm_forward
#include "kernels/rope.cuh"          // rope_table, rope_forward
#include "memory.cuh"                // struct plan, struct arenas
#include "parameters.cuh"            // struct parameters, struct model_shape
#include "recompute.cuh"             // struct recompute_policy
#include "runtime/machine/error.h"   // fail
#include "zero.cuh"                  // struct shards: whose range is what
#include <math.h>                    // sqrt, isfinite
#include <time.h>                    // clock_gettime

// What runs the schedule, which decides where activations live: a training step's first forward; the forward of some
// activations again before a layer's backward; validation; one token a sequence against the KV cache.
enum pass { PASS_TRAIN, PASS_RECOMPUTE, PASS_EVALUATE, PASS_GENERATE, PASS_COUNT };

// The parts of the schedule, each entered at its own first phase.
enum region { REGION_MICRO_STEP, REGION_UPDATE, REGION_EVALUATE, REGION_GENERATE, REGION_SAVE, REGION_COUNT };

// Events of the device (device_event_record), two of each.
enum device_event { EVENT_BATCH = 0, EVENT_RESULTS = 2 };

// Buffers of a layer besides its activations, and of the whole model (layer -1).
enum slot {
    SLOT_KEYS = ACT_COUNT, // the KV cache
    SLOT_VALUES,
    SLOT_TOKENS,
    SLOT_TARGETS,
    SLOT_LNF,
    SLOT_LNF_STATS,
    SLOT_LOGITS,
    SLOT_LOSSES,
    SLOT_D_MLP_PROJ, // gradients: behind the residual dropout,
    SLOT_D_ACT,      // of the activation's output, and so on
    SLOT_D_FC,
    SLOT_D_NORM2,
    SLOT_D_ATT_PROJ,
    SLOT_D_ATT,
    SLOT_D_QKV,
    SLOT_D_NORM1,
    SLOT_D_LNF,
    SLOT_D_RESIDUAL, // of the residual stream, from the head down to the embedding
    SLOT_UNIT,       // ZeRO: a layer's parameters (or the head's), gathered; the same of the embeddings
    SLOT_UNIT_EMBEDDINGS,
    SLOT_D_UNIT, // their gradients, until they are reduced
    SLOT_D_UNIT_EMBEDDINGS,
    SLOT_GATHERED, // a piece of sharded state on its way into a checkpoint
    SLOT_COUNT
};

// The fp32 flat buffers that a checkpoint holds: moments, and master weights (in fp32 the parameters themselves).
enum flat { FLAT_M, FLAT_V, FLAT_MASTER, FLAT_COUNT };

// What a step leaves in the device's memory until the host asks for it, which can be a step later.
struct step_results {
    struct gradient_check check;
    double loss;         // mean of the last batch
    uint64_t micro_step; // of the run: the step of dropout masks
};

// A unit's gathered parameters, in one pass.
enum unit_state { UNIT_ABSENT, UNIT_COMES, UNIT_IS_THERE };

struct gpt {
    struct config config;
    struct model_shape shape;
    struct parameters table;
    struct shards shards;
    struct collectives *collectives; // NULL with one rank, or where it is only planned
    struct recompute_policy policy;
    enum attention_backend backend;
    struct device *dev;

    struct plan plan;
    struct arenas arenas;
    bool planning;
    int phase;                      // index in the plan
    int region_first[REGION_COUNT]; // first phase of each region
    int *slots;                     // (PASS_COUNT, L + 1, SLOT_COUNT) buffer ids, -1: none
    int *workspaces;                // (phases) buffer id of the phase's workspace, -1: none
    int workspaces_capacity;
    double *seconds;                // (phases) time spent so far, where profiling is on; else NULL
    bool matmuls_only;              // a benchmark's: skip all but the matmuls
    void (*on_phase)(struct gpt *); // called as each phase begins, where set: a test's look at the schedule

    int params_id, grads_id, master_id, m_id, v_id, rope_id, results_id, reports_id, scratch_id, copy_ids[FLAT_COUNT];
    // Each whole, or the own shard, by the ZeRO stage.
    floatX *params;
    float *grads, *master, *m, *v; // master is NULL in fp32, where the parameters are their own
    float *copy[FLAT_COUNT];       // of exact parameters and moments in the host's memory, for a checkpoint; or NULL
    const float *rope;             // (T, D) cosines and sines
    struct step_results *results;  // in the device's memory, like
    double *reports;               // (ranks, report_width) of the step: squares, requests, losses of the micro-batches
    double *losses;                // (micro-steps) the own ones
    uint64_t *params_tickets;      // (pieces) collectives that are under way: the gathering of an updated piece,
    uint64_t *grads_tickets;       // the reduction of a piece's gradients
    enum unit_state *units;        // (PASS_COUNT, units) where parameters are sharded

    bool trains;             // has gradients and an optimizer; else it validates and generates
    bool copies;             // checkpoints are written from a copy, while the training goes on
    int sequences;           // generation: that many at a time,
    int decode_tokens;       // each of at most so many
    int64_t chunk;           // tokens of a logits chunk
    int micro_steps;         // of a step, on each rank
    uint64_t micro_step;     // counts micro-batches of the whole run, on all ranks
    bool last_micro_step;    // of its step: gradients are reduced
    bool dropout;            // on in training, off in evaluation and generation
    int position;            // generation: place of the current token
    struct work_graph graph; // the work of a micro-step, recorded
    double graph_scale;      // what it was recorded with
    bool warm;               // a micro-step has run: nothing is left that can't be recorded

    // Pinned host memory: two batches under way to the device, the results of two steps on their way back.
    int32_t *host_batches; // (2, 2, host_batch_tokens): batch; inputs, targets
    int64_t host_batch_tokens;
    unsigned batches;                  // sent so far
    unsigned updates;                  // enqueued so far
    struct step_results *host_results; // (2)
    double *host_reports;              // (2, ranks, report_width)
    int request;           // what this rank asks of all in the next update: a code of the caller's, 0: nothing
    double *host_requests; // (2) those under way
    // Host memory for sampling: a row of logits as it comes and as (3, Vp) floats, a token of each sequence.
    floatX *host_row;
    float *host_logits;
    int32_t *host_tokens;
};

// Of the reports of one rank: the squares of the gradients, what the rank asks of all, and a loss a micro-batch.
static int report_width(const struct gpt *m) { return REPORT_LOSSES + m->micro_steps; }

// ---------------------------------------------------------------------------------------------------------------------
// Phases and buffers

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void region(struct gpt *m, enum region r) {
    if (m->planning)
        m->region_first[r] = m->phase + 1;
    m->phase = m->region_first[r] - 1;
    memset(m->units, 0, (size_t)PASS_COUNT * (size_t)m->shards.units * sizeof *m->units); // UNIT_ABSENT
}
static const char *const pass_names[PASS_COUNT] = {"forward", "recompute", "evaluate", "generate"};
static void phase_named(struct gpt *m, const char *part, int layer, const char *op) {
    m->phase++;
    if (!m->planning) {
        if (m->on_phase)
            m->on_phase(m);
        return;
    }
    char name[96];
    if (layer >= 0)
        snprintf(name, sizeof name, "%s layer %d: %s", part, layer, op);
    else
        snprintf(name, sizeof name, "%s: %s", part, op);
    plan_phase(&m->plan, name);
}
static void phase(struct gpt *m, const char *part, const char *op) { phase_named(m, part, -1, op); }

// Runs an op, unless the schedule is only planned. MATMUL is the same for the matmuls, which a benchmark runs alone.
#define EXECUTE(m, always, op)                                                                                         \
    do {                                                                                                               \
        if (!(m)->planning && ((always) || !(m)->matmuls_only)) {                                                      \
            const double begin_ = (m)->seconds ? seconds_now() : 0;                                                    \
            range_begin((m)->plan.phases[(m)->phase]);                                                                 \
            op;                                                                                                        \
            range_end();                                                                                               \
            if ((m)->seconds) {                                                                                        \
                device_synchronize((m)->dev);                                                                          \
                (m)->seconds[(m)->phase] += seconds_now() - begin_;                                                    \
            }                                                                                                          \
        }                                                                                                              \
    } while (0)
#define RUN(m, op) EXECUTE(m, false, op)
#define MATMUL(m, op) EXECUTE(m, true, op)

// Planned in this phase, or a bug: a buffer that the phase did not touch when planning may lie under another.
static void *planned(const struct gpt *m, int id) {
    const struct plan_buffer *b = id < 0 ? NULL : &m->plan.buffers[id];
    if (!b || m->phase < b->first_phase || m->phase > b->last_phase) {
        fprintf(stderr, "train_gpt: internal error: phase %d uses buffer '%s', which is not planned there\n", m->phase,
                b ? b->name : "?");
        abort();
    }
    return plan_pointer(&m->plan, &m->arenas, id);
}

static void *buffer(struct gpt *m, enum pass pass, int layer, int slot, size_t bytes, const char *category,
                    const char *name) {
    int *id = &m->slots[((int)pass * (m->shape.L + 1) + layer + 1) * SLOT_COUNT + slot];
    if (!m->planning)
        return planned(m, *id);
    if (*id < 0)
        *id = plan_add(&m->plan, ARENA_ACTIVATIONS, category, name, layer, bytes);
    plan_touch(&m->plan, *id);
    return NULL;
}

// Scratch memory of this phase alone.
static void *workspace(struct gpt *m, size_t bytes) {
    if (bytes == 0)
        return NULL;
    if (!m->planning)
        return planned(m, m->workspaces[m->phase]);
    if (m->phase >= m->workspaces_capacity) {
        const int capacity = 2 * m->phase + 64;
        m->workspaces = (int *)realloc(m->workspaces, (size_t)capacity * sizeof *m->workspaces);
        if (!m->workspaces)
            fail("out of memory for the schedule");
        for (int i = m->workspaces_capacity; i < capacity; i++)
            m->workspaces[i] = -1;
        m->workspaces_capacity = capacity;
    }
    m->workspaces[m->phase] = plan_add(&m->plan, ARENA_ACTIVATIONS, "workspace", "workspace", -1, bytes);
    plan_touch(&m->plan, m->workspaces[m->phase]);
    return NULL;
}

// The tokens that a pass works on: B sequences of T, the first at position `start`.
struct extent {
    int B, T, start;
    int64_t N; // B * T
};
static struct extent extent_of(const struct gpt *m, enum pass pass) {
    struct extent e;
    e.B = pass == PASS_GENERATE ? m->sequences : m->config.micro_batch_size;
    e.T = pass == PASS_GENERATE ? 1 : m->config.seq_length;
    e.start = pass == PASS_GENERATE ? m->position : 0;
    e.N = (int64_t)e.B * e.T;
    return e;
}

// An activation of layer l. What the policy keeps is one buffer for forward and backward; what it drops is one buffer
// in the forward and, made again, another in the backward.
static void *activation(struct gpt *m, enum pass pass, int l, enum activation_id id) {
    const uint32_t kept = l < 0 ? BIT(OUT) : m->policy.kept[l];
    if (pass == PASS_RECOMPUTE && kept & (1u << id))
        pass = PASS_TRAIN;
    if (!m->planning)
        return buffer(m, pass, l, id, 0, NULL, NULL);
    const struct activation_row row = activation_row(id, &m->shape.layer);
    const size_t bytes = (size_t)row.bytes_per_token * (size_t)extent_of(m, pass).N;
    char category[64];
    if (pass == PASS_TRAIN)
        snprintf(category, sizeof category, "activations: %s", row.category);
    else
        snprintf(category, sizeof category, "%s", pass == PASS_RECOMPUTE ? "recomputed activations" : pass_names[pass]);
    return buffer(m, pass, l, id, bytes, category, row.name);
}
// A gradient of an activation, (N, width).
static floatX *d_buffer(struct gpt *m, int l, enum slot slot, int64_t width) {
    static const char *const names[SLOT_COUNT - SLOT_D_MLP_PROJ] = {
        "d mlp projection", "d activation", "d fc",     "d norm 2",     "d attention projection",
        "d attention",      "d qkv",        "d norm 1", "d final norm", "d residual"};
    const size_t bytes = (size_t)extent_of(m, PASS_TRAIN).N * (size_t)width * sizeof(floatX);
    return (floatX *)buffer(m, PASS_TRAIN, l, slot, bytes, "gradients of activations", names[slot - SLOT_D_MLP_PROJ]);
}

// Where a unit's gathered parameters and its gradients lie while they are whole, if the stage shards them.
static void *unit_buffer(struct gpt *m, enum pass pass, int unit, bool gradients) {
    const bool embeddings = unit == unit_of_embeddings(&m->table), layer = unit != unit_of_head() && !embeddings;
    const int slot = gradients ? (embeddings ? SLOT_D_UNIT_EMBEDDINGS : SLOT_D_UNIT)
                               : (embeddings ? SLOT_UNIT_EMBEDDINGS : SLOT_UNIT);
    const size_t elements = (size_t)(m->table.unit_begin[unit + 1] - m->table.unit_begin[unit]);
    return buffer(m, pass, layer ? m->shape.L - unit : -1, slot,
                  elements * (gradients ? sizeof(float) : sizeof(floatX)),
                  gradients ? "gradients of a unit" : "parameters of a unit",
                  gradients ? "unit's gradients" : "unit's parameters");
}

// A parameter and its gradient; NULL where this model has none, and when planning.
static floatX *param(struct gpt *m, enum pass pass, int l, enum parameter id) {
    const struct tensor *t = parameters_find(&m->table, l, id);
    if (!t)
        return NULL;
    if (shards_parameters(&m->shards)) {
        const int unit = unit_of(&m->table, l, id);
        floatX *gathered = (floatX *)unit_buffer(m, pass, unit, false);
        return gathered ? gathered + t->offset - m->table.unit_begin[unit] : NULL;
    }
    return m->params ? m->params + t->offset : NULL;
}
static float *grad(struct gpt *m, int l, enum parameter id) {
    const struct tensor *t = parameters_find(&m->table, l, id);
    if (!t)
        return NULL;
    if (shards_gradients(&m->shards)) {
        const int unit = unit_of(&m->table, l, id);
        float *whole = (float *)unit_buffer(m, PASS_TRAIN, unit, true);
        return whole ? whole + t->offset - m->table.unit_begin[unit] : NULL;
    }
    return m->grads ? m->grads + t->offset : NULL;
}

static struct dropout dropout_of(const struct gpt *m, double p, int layer, enum dropout_use use) {
    struct dropout d;
    d.p = m->dropout ? (float)p : 0;
    d.seed = m->config.seed;
    d.step = 0;
    d.micro_step = m->results ? &m->results->micro_step : NULL;
    d.layer = (uint32_t)layer;
    d.use = use;
    return d;
}
static enum norm_kind norm_kind_of(const struct gpt *m) {
    return m->shape.layer.rmsnorm ? NORM_RMSNORM : NORM_LAYERNORM;
}
// Statistics of a norm: (N) reciprocal standard deviations, then, for LayerNorm, (N) means.
static float *mean_of(const struct gpt *m, float *stats, int64_t N) {
    return stats && !m->shape.layer.rmsnorm ? stats + N : NULL;
}
static struct attention_shape attention_shape_of(const struct gpt *m, struct extent e) {
    const struct layer_shape *s = &m->shape.layer;
    struct attention_shape shape;
    shape.B = e.B;
    shape.T = e.T;
    shape.num_heads = s->H;
    shape.num_query_groups = s->G;
    shape.head_dim = s->D;
    shape.scale = (float)(1 / sqrt((double)s->D));
    shape.full = false;
    return shape;
}

// ---------------------------------------------------------------------------------------------------------------------
// Between ranks

static const char *unit_name(const struct gpt *m, int unit, char text[64], const char *what) {
    if (unit == unit_of_head())
        snprintf(text, 64, "%s of the head", what);
    else if (unit == unit_of_embeddings(&m->table))
        snprintf(text, 64, "%s of the embeddings", what);
    else
        snprintf(text, 64, "%s of layer %d", what, m->shape.L - unit);
    return text;
}

// Begins to gather a unit's parameters from their shards.
static void unit_gather(struct gpt *m, enum pass pass, int unit) {
    const struct shards *s = &m->shards;
    floatX *whole = (floatX *)unit_buffer(m, pass, unit, false);
    char name[64];
    unit_name(m, unit, name, "parameters");
    for (int i = s->first[unit]; i < s->first[unit + 1] && !m->planning; i++) {
        const struct piece *p = &s->pieces[i];
        m->params_tickets[i] =
            collective_all_gather(m->collectives, whole + p->begin - m->table.unit_begin[unit],
                                  m->params + p->begin / s->ranks, (size_t)p->part * sizeof *whole, name, m->dev);
    }
    m->units[(int)pass * s->units + unit] = UNIT_COMES;
}
// A unit is waited for once: later work is enqueued behind the wait. Later micro-steps then wait for no collective, so
// that they can be recorded as a graph.
static void unit_wait(struct gpt *m, uint64_t *tickets, int unit) {
    for (int i = m->shards.first[unit]; i < m->shards.first[unit + 1]; i++) {
        collective_wait(m->collectives, tickets[i], m->dev);
        tickets[i] = 0;
    }
}

// The parameters of a unit are used soon: sharded ones begin to be gathered, in the current phase.
static void parameters_soon(struct gpt *m, enum pass pass, int unit) {
    if (shards_parameters(&m->shards) && m->units[(int)pass * m->shards.units + unit] == UNIT_ABSENT)
        unit_gather(m, pass, unit);
}
// They are used from here on. What the last update began to gather is waited for, or what parameters_soon did.
static void parameters_ready(struct gpt *m, enum pass pass, int unit) {
    if (m->shards.ranks == 1)
        return;
    if (!shards_parameters(&m->shards)) {
        if (!m->planning)
            unit_wait(m, m->params_tickets, unit);
        return;
    }
    phase(m, pass_names[pass], "parameters");
    parameters_soon(m, pass, unit);
    unit_buffer(m, pass, unit, false);
    enum unit_state *state = &m->units[(int)pass * m->shards.units + unit];
    if (*state == UNIT_COMES && !m->planning)
        unit_wait(m, m->params_tickets, unit);
    *state = UNIT_IS_THERE;
}

// A unit's gradients begin to be added to: from zero where the stage shards them, since what came before was reduced.
static void gradients_begin(struct gpt *m, int unit) {
    if (!shards_gradients(&m->shards))
        return;
    phase(m, "backward", "zero gradients");
    void *whole = unit_buffer(m, PASS_TRAIN, unit, true);
    const size_t elements = (size_t)(m->table.unit_begin[unit + 1] - m->table.unit_begin[unit]);
    RUN(m, device_zero(whole, elements * sizeof(float), m->dev));
}

// A unit's gradients are complete: their reduction begins. Without sharded gradients that is in the last micro-step only.
static void gradients_complete(struct gpt *m, int unit) {
    const struct shards *s = &m->shards;
    char name[64];
    float *whole = NULL;
    if (shards_gradients(s)) {
        phase(m, "backward", "reduce gradients");
        whole = (float *)unit_buffer(m, PASS_TRAIN, unit, true);
    } else if (s->ranks == 1 || !m->last_micro_step)
        return;
    else if (m->grads)
        whole = m->grads + m->table.unit_begin[unit];
    for (int i = s->first[unit]; i < s->first[unit + 1] && !m->planning; i++) {
        const struct piece *p = &s->pieces[i];
        float *at = whole + p->begin - m->table.unit_begin[unit], *own = at + s->rank * p->part;
        m->grads_tickets[i] = collective_reduce_scatter(m->collectives, own, at, p->part,
                                                        unit_name(m, unit, name, "reduction of gradients"), m->dev);
        if (s->stage == 0)
            m->grads_tickets[i] = collective_all_gather(m->collectives, at, own, (size_t)p->part * sizeof *at,
                                                        unit_name(m, unit, name, "gathering of gradients"), m->dev);
    }
}
// Adds the own parts of a unit's reduced gradients to the shard.
static void gradients_collect(struct gpt *m, int unit) {
    const struct shards *s = &m->shards;
    if (!shards_gradients(s))
        return;
    phase(m, "backward", "collect gradients");
    const float *whole = (const float *)unit_buffer(m, PASS_TRAIN, unit, true);
    for (int i = s->first[unit]; i < s->first[unit + 1] && !m->planning; i++) {
        const struct piece *p = &s->pieces[i];
        collective_wait(m->collectives, m->grads_tickets[i], m->dev);
        RUN(m, add_floats(m->grads + p->begin / s->ranks, whole + shards_own_begin(s, p) - m->table.unit_begin[unit],
                          p->part, m->dev));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// One block

// The ops below fetch their buffers and run in the phase that their caller began.
static void norm(struct gpt *m, enum pass pass, int l, floatX *out, float *stats, const floatX *x,
                 enum parameter weight, enum parameter bias) {
    const int64_t N = extent_of(m, pass).N;
    const floatX *w = param(m, pass, l, weight), *b = param(m, pass, l, bias);
    RUN(m, norm_forward(out, mean_of(m, stats, N), stats, x, w, b, N, m->shape.layer.C, (float)m->config.norm_epsilon,
                        norm_kind_of(m), m->dev));
}
// sum = x + dropout(delta), and its norm.
static void residual_norm(struct gpt *m, enum pass pass, int l, floatX *sum, floatX *out, float *stats, const floatX *x,
                          enum parameter weight, enum parameter bias, struct dropout dropout) {
    const int64_t N = extent_of(m, pass).N;
    const floatX *w = param(m, pass, l, weight), *b = param(m, pass, l, bias);
    RUN(m, residual_norm_forward(sum, out, mean_of(m, stats, N), stats, x, sum, w, b, N, m->shape.layer.C,
                                 (float)m->config.norm_epsilon, norm_kind_of(m), dropout, m->dev));
}
static void linear(struct gpt *m, enum pass pass, int l, floatX *out, const floatX *in, enum parameter weight,
                   enum parameter bias, int n, int k) {
    const int64_t N = extent_of(m, pass).N;
    const floatX *w = param(m, pass, l, weight), *b = param(m, pass, l, bias);
    void *ws = workspace(m, matmul_workspace_bytes(N, n, k, m->dev));
    MATMUL(m, matmul_forward(out, in, w, b, N, n, k, ws, m->dev));
}
static void attention(struct gpt *m, enum pass pass, int l, floatX *att, void *saved, const floatX *qkv) {
    const struct extent e = extent_of(m, pass);
    const struct attention_shape shape = attention_shape_of(m, e);
    const struct dropout dropout = dropout_of(m, m->config.attention_dropout, l, DROPOUT_ATTENTION);
    void *ws = workspace(m, attention_forward_workspace_bytes(m->backend, shape, m->dev));
    RUN(m, attention_forward(att, saved, qkv, m->backend, shape, dropout, ws, m->dev));
}
// Keys or values of every position so far, (B, capacity, G*D). They live from one token to the next.
static floatX *kv_cache(struct gpt *m, int l, enum slot slot) {
    const struct layer_shape *s = &m->shape.layer;
    const size_t rows = (size_t)m->sequences * (size_t)m->decode_tokens;
    return (floatX *)buffer(m, PASS_GENERATE, l, slot, rows * (size_t)(s->G * s->D) * sizeof(floatX), "kv cache",
                            slot == SLOT_KEYS ? "keys" : "values");
}
// Generation: the new token's k and v go into the cache, then its q attends to all that is there.
static void attention_with_cache(struct gpt *m, int l, floatX *att, const floatX *qkv) {
    const int capacity = m->decode_tokens;
    floatX *keys = kv_cache(m, l, SLOT_KEYS), *values = kv_cache(m, l, SLOT_VALUES);
    const struct attention_shape shape = attention_shape_of(m, extent_of(m, PASS_GENERATE));
    void *ws = workspace(m, attention_decode_workspace_bytes(shape, capacity, m->dev));
    RUN(m, kv_cache_append(keys, values, qkv, m->position, capacity, shape, m->dev));
    RUN(m, attention_decode(att, qkv, keys, values, m->position, capacity, shape, ws, m->dev));
}

static floatX *final_norm_buffer(struct gpt *m, enum pass pass);
static float *final_norm_stats(struct gpt *m, enum pass pass);
static enum pass head_pass(const struct gpt *m, enum pass pass);
static int head_unit(const struct gpt *m);

// Runs the ops whose outputs are in `produce`: all of them in a first forward, those that were not kept before backward.
// A residual addition and the norm that reads it are one op where both are wanted. Across layers that is so in a first
// forward: a layer then makes the norm that comes next, the next layer's first or the final one, and only layer 0 makes
// its own. A norm made alone has the same bits.
static void block_forward(struct gpt *m, int l, uint32_t produce, enum pass pass) {
#define ACT(id) activation(m, pass, l, ACT_##id)
#define WANTED(id) (produce & BIT(id) ? ACT(id) : NULL)
    const struct layer_shape *s = &m->shape.layer;
    const struct extent e = extent_of(m, pass);
    const int64_t N = e.N;
    const int qkv_width = (s->H + 2 * s->G) * s->D, fc_width = (s->swiglu ? 2 : 1) * s->F;
    const char *part = pass_names[pass];
    // What follows: a layer, or the head.
    const int unit = unit_of_layer(&m->table, l),
              next = l + 1 < m->shape.L ? unit_of_layer(&m->table, l + 1) : unit_of_head();

    if (produce)
        parameters_ready(m, pass, unit);
    if (pass != PASS_RECOMPUTE) {
        parameters_soon(m, pass, next);
        if (next == unit_of_head())
            parameters_soon(m, head_pass(m, pass), head_unit(m));
    }
    if (pass != PASS_RECOMPUTE && l > 0)
        produce &= ~(BIT(NORM1) | BIT(NORM1_STATS));
    if (produce & (BIT(NORM1) | BIT(NORM1_STATS))) {
        phase_named(m, part, l, "norm 1");
        floatX *out = (floatX *)WANTED(NORM1);
        float *stats = (float *)WANTED(NORM1_STATS);
        const floatX *x = (const floatX *)activation(m, pass, l - 1, ACT_OUT);
        norm(m, pass, l, out, stats, x, PARAM_LN1_W, PARAM_LN1_B);
    }
    if (produce & BIT(QKV)) {
        phase_named(m, part, l, "qkv");
        floatX *qkv = (floatX *)ACT(QKV);
        linear(m, pass, l, qkv, (const floatX *)ACT(NORM1), PARAM_QKV_W, PARAM_QKV_B, qkv_width, s->C);
        if (m->shape.P == 0)
            RUN(m, rope_forward(qkv, m->rope, e.B, e.T, e.start, s->H, s->G, s->D, m->dev));
    }
    if (produce & (BIT(ATT) | BIT(SOFTMAX))) {
        phase_named(m, part, l, "attention");
        floatX *att = (floatX *)ACT(ATT);
        const floatX *qkv = (const floatX *)ACT(QKV);
        if (pass == PASS_GENERATE)
            attention_with_cache(m, l, att, qkv);
        else
            attention(m, pass, l, att, ACT(SOFTMAX), qkv);
    }
    if (produce & BIT(MID)) {
        phase_named(m, part, l, "attention projection");
        floatX *mid = (floatX *)ACT(MID);
        linear(m, pass, l, mid, (const floatX *)ACT(ATT), PARAM_ATTPROJ_W, PARAM_ATTPROJ_B, s->C, s->H * s->D);
        const floatX *x = (const floatX *)activation(m, pass, l - 1, ACT_OUT);
        const struct dropout dropout = dropout_of(m, m->config.hidden_dropout, l, DROPOUT_ATTENTION_PROJECTION);
        if (produce & (BIT(NORM2) | BIT(NORM2_STATS)))
            residual_norm(m, pass, l, mid, (floatX *)WANTED(NORM2), (float *)WANTED(NORM2_STATS), x, PARAM_LN2_W,
                          PARAM_LN2_B, dropout);
        else
            RUN(m, residual_forward(mid, x, mid, N, s->C, dropout, m->dev));
    } else if (produce & (BIT(NORM2) | BIT(NORM2_STATS))) {
        phase_named(m, part, l, "norm 2");
        floatX *out = (floatX *)WANTED(NORM2);
        float *stats = (float *)WANTED(NORM2_STATS);
        norm(m, pass, l, out, stats, (const floatX *)ACT(MID), PARAM_LN2_W, PARAM_LN2_B);
    }
    if (produce & BIT(FC)) {
        phase_named(m, part, l, "fc");
        floatX *fc = (floatX *)ACT(FC);
        linear(m, pass, l, fc, (const floatX *)ACT(NORM2), PARAM_FC_W, PARAM_FC_B, fc_width, s->C);
    }
    if (produce & BIT(ACT)) {
        phase_named(m, part, l, "activation");
        floatX *act = (floatX *)ACT(ACT);
        const floatX *fc = (const floatX *)ACT(FC);
        if (s->swiglu)
            RUN(m, swiglu_forward(act, fc, N, s->F, m->dev));
        else
            RUN(m, gelu_forward(act, fc, N * s->F, m->dev));
    }
    if (produce & BIT(OUT)) {
        if (pass != PASS_RECOMPUTE) // for the norm that the addition is fused with
            parameters_ready(m, pass, next);
        phase_named(m, part, l, "mlp projection");
        floatX *out = (floatX *)ACT(OUT);
        linear(m, pass, l, out, (const floatX *)ACT(ACT), PARAM_FCPROJ_W, PARAM_FCPROJ_B, s->C, s->F);
        const floatX *mid = (const floatX *)ACT(MID);
        const struct dropout dropout = dropout_of(m, m->config.hidden_dropout, l, DROPOUT_MLP_PROJECTION);
        if (pass == PASS_RECOMPUTE)
            RUN(m, residual_forward(out, mid, out, N, s->C, dropout, m->dev));
        else if (l + 1 < m->shape.L)
            residual_norm(m, pass, l + 1, out, (floatX *)activation(m, pass, l + 1, ACT_NORM1),
                          (float *)activation(m, pass, l + 1, ACT_NORM1_STATS), mid, PARAM_LN1_W, PARAM_LN1_B, dropout);
        else
            residual_norm(m, pass, -1, out, final_norm_buffer(m, pass), final_norm_stats(m, pass), mid, PARAM_LNF_W,
                          PARAM_LNF_B, dropout);
    }
#undef WANTED
#undef ACT
}

// Gradients of a linear layer: din (N, k), and dweight (n, k) and dbias (n), which add up over micro-batches.
static void linear_backward(struct gpt *m, int l, floatX *din, const floatX *dout, const floatX *in,
                            enum parameter weight, enum parameter bias, int n, int k) {
    const int64_t N = extent_of(m, PASS_TRAIN).N;
    const floatX *w = param(m, PASS_RECOMPUTE, l, weight);
    float *dw = grad(m, l, weight), *db = grad(m, l, bias);
    void *ws = workspace(m, matmul_workspace_bytes(N, n, k, m->dev));
    MATMUL(m, matmul_backward_input(din, dout, w, N, n, k, ws, m->dev));
    MATMUL(m, matmul_backward_weight(dw, db, dout, in, N, n, k, ws, m->dev));
}
// dx += the norm's gradient.
static void norm_gradient(struct gpt *m, int l, floatX *dx, const floatX *dout, const floatX *x, const float *stats,
                          enum parameter weight, enum parameter bias) {
    const int64_t N = extent_of(m, PASS_TRAIN).N;
    const int C = m->shape.layer.C;
    const floatX *w = param(m, l < 0 ? PASS_TRAIN : PASS_RECOMPUTE, l, weight);
    float *dw = grad(m, l, weight), *db = grad(m, l, bias);
    void *ws = workspace(m, norm_backward_workspace_bytes(N, C));
    RUN(m,
        norm_backward(dx, dw, db, dout, x, w, mean_of(m, (float *)stats, N), stats, N, C, norm_kind_of(m), ws, m->dev));
}

static floatX *d_residual(struct gpt *m) { return d_buffer(m, -1, SLOT_D_RESIDUAL, m->shape.layer.C); }

// The gradient of what a projection added to the residual stream: behind the dropout, where there is one, else the
// residual's own, which is then not stored twice.
static const floatX *d_projection(struct gpt *m, int l, enum slot slot, enum dropout_use use) {
    const floatX *dres = d_residual(m);
    const struct dropout dropout = dropout_of(m, m->config.hidden_dropout, l, use);
    if (dropout.p == 0)
        return dres;
    floatX *dproj = d_buffer(m, l, slot, m->shape.layer.C);
    RUN(m, dropout_backward(dproj, dres, extent_of(m, PASS_TRAIN).N * m->shape.layer.C, dropout, m->dev));
    return dproj;
}

// The layer whose parameters the backward needs first after that of layer l: the first that is recomputed, or the one
// below. -1: none.
static int layer_after(const struct gpt *m, int l) {
    const int below = l - 1;
    if (below < 0 || !policy_is_group_last(&m->policy, below))
        return below;
    for (int k = m->policy.group_first[below]; k < below; k++)
        if (policy_missing(&m->policy, k, &m->shape.layer))
            return k;
    return below;
}

// Gradients of layer l's parameters, and of its input, which takes the place of that of its output.
static void block_backward(struct gpt *m, int l) {
#define ACT(id) activation(m, PASS_RECOMPUTE, l, ACT_##id)
    const struct layer_shape *s = &m->shape.layer;
    const struct extent e = extent_of(m, PASS_TRAIN);
    const int att_width = s->H * s->D, qkv_width = (s->H + 2 * s->G) * s->D, fc_width = (s->swiglu ? 2 : 1) * s->F;

    gradients_begin(m, unit_of_layer(&m->table, l));
    parameters_ready(m, PASS_RECOMPUTE, unit_of_layer(&m->table, l));
    if (layer_after(m, l) >= 0)
        parameters_soon(m, PASS_RECOMPUTE, unit_of_layer(&m->table, layer_after(m, l)));
    phase_named(m, "backward", l, "mlp projection");
    const floatX *dproj = d_projection(m, l, SLOT_D_MLP_PROJ, DROPOUT_MLP_PROJECTION);
    floatX *dact = d_buffer(m, l, SLOT_D_ACT, s->F);
    linear_backward(m, l, dact, dproj, (const floatX *)ACT(ACT), PARAM_FCPROJ_W, PARAM_FCPROJ_B, s->C, s->F);

    phase_named(m, "backward", l, "activation");
    dact = d_buffer(m, l, SLOT_D_ACT, s->F);
    const floatX *fc = (const floatX *)ACT(FC);
    // GELU's gradient replaces the one it is made from; SwiGLU's is twice as wide.
    const enum slot slot_dfc = s->swiglu ? SLOT_D_FC : SLOT_D_ACT;
    floatX *dfc = d_buffer(m, l, slot_dfc, fc_width);
    if (s->swiglu)
        RUN(m, swiglu_backward(dfc, dact, fc, e.N, s->F, m->dev));
    else
        RUN(m, gelu_backward(dfc, dact, fc, e.N * s->F, m->dev));

    phase_named(m, "backward", l, "fc");
    dfc = d_buffer(m, l, slot_dfc, fc_width);
    floatX *dnorm2 = d_buffer(m, l, SLOT_D_NORM2, s->C);
    linear_backward(m, l, dnorm2, dfc, (const floatX *)ACT(NORM2), PARAM_FC_W, PARAM_FC_B, fc_width, s->C);

    phase_named(m, "backward", l, "norm 2");
    dnorm2 = d_buffer(m, l, SLOT_D_NORM2, s->C);
    norm_gradient(m, l, d_residual(m), dnorm2, (const floatX *)ACT(MID), (const float *)ACT(NORM2_STATS), PARAM_LN2_W,
                  PARAM_LN2_B);

    phase_named(m, "backward", l, "attention projection");
    dproj = d_projection(m, l, SLOT_D_ATT_PROJ, DROPOUT_ATTENTION_PROJECTION);
    floatX *datt = d_buffer(m, l, SLOT_D_ATT, att_width);
    linear_backward(m, l, datt, dproj, (const floatX *)ACT(ATT), PARAM_ATTPROJ_W, PARAM_ATTPROJ_B, s->C, att_width);

    phase_named(m, "backward", l, "attention");
    datt = d_buffer(m, l, SLOT_D_ATT, att_width);
    floatX *dqkv = d_buffer(m, l, SLOT_D_QKV, qkv_width);
    const floatX *qkv = (const floatX *)ACT(QKV), *att = (const floatX *)ACT(ATT);
    const void *saved = ACT(SOFTMAX);
    const struct attention_shape shape = attention_shape_of(m, e);
    const struct dropout dropout = dropout_of(m, m->config.attention_dropout, l, DROPOUT_ATTENTION);
    struct attention_backward_options options;
    options.rotary = m->shape.P == 0 ? m->rope : NULL;
    options.any_order = !m->config.deterministic_mode;
    void *ws = workspace(m, attention_backward_workspace_bytes(m->backend, shape, m->dev));
    RUN(m, attention_backward(dqkv, datt, qkv, att, saved, m->backend, shape, dropout, options, ws, m->dev));

    phase_named(m, "backward", l, "qkv");
    dqkv = d_buffer(m, l, SLOT_D_QKV, qkv_width);
    floatX *dnorm1 = d_buffer(m, l, SLOT_D_NORM1, s->C);
    linear_backward(m, l, dnorm1, dqkv, (const floatX *)ACT(NORM1), PARAM_QKV_W, PARAM_QKV_B, qkv_width, s->C);

    phase_named(m, "backward", l, "norm 1");
    dnorm1 = d_buffer(m, l, SLOT_D_NORM1, s->C);
    const floatX *x = (const floatX *)activation(m, PASS_RECOMPUTE, l - 1, ACT_OUT);
    norm_gradient(m, l, d_residual(m), dnorm1, x, (const float *)ACT(NORM1_STATS), PARAM_LN1_W, PARAM_LN1_B);
#undef ACT
}

// ---------------------------------------------------------------------------------------------------------------------
// Embedding and head

static int32_t *token_buffer(struct gpt *m, enum pass pass, enum slot slot) {
    const size_t bytes = (size_t)extent_of(m, pass).N * sizeof(int32_t);
    return (int32_t *)buffer(m, pass, -1, slot, bytes, "tokens", slot == SLOT_TOKENS ? "inputs" : "targets");
}

// A batch goes to the device by way of pinned memory, so that the caller's arrays are free at once. Two can be under way.
static void upload_tokens(struct gpt *m, int32_t *to, int32_t *pinned, const int32_t *from, int64_t n) {
    memcpy(pinned, from, (size_t)n * sizeof *to);
    device_upload(to, pinned, (size_t)n * sizeof *to, m->dev);
}
static void upload_batch(struct gpt *m, enum pass pass, const int32_t *inputs, const int32_t *targets) {
    const int64_t N = extent_of(m, pass).N;
    const int slot = (int)(m->batches % 2);
    phase(m, pass_names[pass], "batch");
    int32_t *pinned = m->host_batches + (int64_t)slot * 2 * m->host_batch_tokens;
    int32_t *tokens = token_buffer(m, pass, SLOT_TOKENS);
    RUN(m, device_event_wait(m->dev, EVENT_BATCH + slot));
    RUN(m, upload_tokens(m, tokens, pinned, inputs, N));
    if (pass != PASS_GENERATE) {
        int32_t *expected = token_buffer(m, pass, SLOT_TARGETS);
        RUN(m, upload_tokens(m, expected, pinned + m->host_batch_tokens, targets, N));
    }
    RUN(m, device_event_record(m->dev, EVENT_BATCH + slot));
    if (!m->planning)
        m->batches++;
}

static void embed(struct gpt *m, enum pass pass) {
    const struct extent e = extent_of(m, pass);
    parameters_ready(m, pass, unit_of_embeddings(&m->table));
    phase(m, pass_names[pass], "embedding");
    parameters_soon(m, pass, unit_of_layer(&m->table, 0));
    const floatX *wte = param(m, pass, -1, PARAM_WTE), *wpe = param(m, pass, -1, PARAM_WPE);
    const int32_t *tokens = token_buffer(m, pass, SLOT_TOKENS);
    if (pass != PASS_GENERATE)
        token_buffer(m, pass, SLOT_TARGETS);
    floatX *out = (floatX *)activation(m, pass, -1, ACT_OUT);
    RUN(m, embedding_forward(out, tokens, wte, wpe, e.B, e.T, e.start, m->shape.layer.C,
                             dropout_of(m, m->config.hidden_dropout, 0, DROPOUT_EMBEDDING), m->dev));
}

static enum parameter head_weight(const struct gpt *m) { return m->shape.tied ? PARAM_WTE : PARAM_LM_HEAD; }
// Under which pass the head finds its weight where parameters are gathered. A tied one is the embeddings': in training it
// comes again, rather than to stay from the embedding through all layers to here.
static enum pass head_pass(const struct gpt *m, enum pass pass) {
    return m->shape.tied && pass == PASS_TRAIN ? PASS_RECOMPUTE : pass;
}
static int head_unit(const struct gpt *m) { return m->shape.tied ? unit_of_embeddings(&m->table) : unit_of_head(); }

static floatX *final_norm_buffer(struct gpt *m, enum pass pass) {
    return (floatX *)buffer(m, pass, -1, SLOT_LNF, (size_t)extent_of(m, pass).N * m->shape.layer.C * sizeof(floatX),
                            pass == PASS_TRAIN ? "activations: norm" : pass_names[pass], "final norm");
}
static float *final_norm_stats(struct gpt *m, enum pass pass) {
    const size_t floats = m->shape.layer.rmsnorm ? 1 : 2;
    return (float *)buffer(m, pass, -1, SLOT_LNF_STATS, (size_t)extent_of(m, pass).N * floats * sizeof(float),
                           pass == PASS_TRAIN ? "activations: norm" : pass_names[pass], "final norm statistics");
}
static floatX *logits_buffer(struct gpt *m, enum pass pass, int64_t rows) {
    return (floatX *)buffer(m, pass, -1, SLOT_LOGITS, (size_t)rows * m->shape.Vp * sizeof(floatX), "logits and loss",
                            "logits");
}
static float *losses_buffer(struct gpt *m, enum pass pass) {
    return (float *)buffer(m, pass, -1, SLOT_LOSSES, (size_t)extent_of(m, pass).N * sizeof(float), "logits and loss",
                           "losses");
}

// All chunks have m->chunk rows but the last, which may be short.
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

    phase(m, "head", "logits and loss");
    floatX *logits = logits_buffer(m, pass, m->chunk);
    const floatX *lnf = final_norm_buffer(m, pass);
    float *losses = losses_buffer(m, pass);
    const int32_t *targets = token_buffer(m, pass, SLOT_TARGETS);
    const floatX *w = param(m, head_pass(m, pass), -1, weight);
    void *ws = workspace(m, head_workspace_bytes(m, pass));
    MATMUL(m, matmul_forward(logits, lnf + row, w, NULL, rows, Vp, C, ws, m->dev));
    RUN(m, cross_entropy(losses + first, logits, targets + first, dloss, rows, m->shape.V, Vp, pass == PASS_TRAIN,
                         m->dev));
    if (pass != PASS_TRAIN)
        return;

    phase(m, "head", "gradients");
    logits = logits_buffer(m, pass, m->chunk);
    lnf = final_norm_buffer(m, pass);
    floatX *dlnf = d_buffer(m, -1, SLOT_D_LNF, C);
    w = param(m, head_pass(m, pass), -1, weight);
    float *dw = grad(m, -1, weight);
    ws = workspace(m, head_workspace_bytes(m, pass));
    MATMUL(m, matmul_backward_weight(dw, NULL, logits, lnf + row, rows, Vp, C, ws, m->dev));
    MATMUL(m, matmul_backward_input(dlnf + row, logits, w, rows, Vp, C, ws, m->dev));
}

// The mean loss of all tokens, into the step's results, and in training the gradient of the residual stream. The logits
// exist for one chunk at a time.
static void head(struct gpt *m, enum pass pass, float dloss) {
    const int64_t N = extent_of(m, pass).N;
    parameters_ready(m, head_pass(m, pass), head_unit(m));
    if (pass == PASS_TRAIN) {
        gradients_begin(m, unit_of_head());
        if (m->shape.tied)
            gradients_begin(m, unit_of_embeddings(&m->table));
    }
    // One chunk is planned; each runs in the same two phases. What one chunk leaves for a later one or for what follows
    // must live through both: the phase before touches what the chunks write, the phase after what they read.
    phase(m, "head", "begin");
    final_norm_buffer(m, pass);
    losses_buffer(m, pass);
    if (pass == PASS_TRAIN)
        d_buffer(m, -1, SLOT_D_LNF, m->shape.layer.C);
    const int chunk_phase = m->phase;
    for (int64_t first = 0; first < (m->planning ? 1 : N); first += m->chunk) {
        m->phase = chunk_phase;
        head_chunk(m, pass, first, N - first < m->chunk ? N - first : m->chunk, dloss);
    }
    phase(m, "head", "final norm");
    final_norm_buffer(m, pass);
    token_buffer(m, pass, SLOT_TARGETS);
    const float *losses = losses_buffer(m, pass);
    RUN(m, losses_sum(&m->results->loss, losses, N, 1.0 / (double)N, m->dev));
    if (pass == PASS_TRAIN) {
        const floatX *dlnf = d_buffer(m, -1, SLOT_D_LNF, m->shape.layer.C);
        floatX *dres = d_residual(m);
        RUN(m, device_zero(dres, (size_t)N * m->shape.layer.C * sizeof *dres, m->dev));
        const floatX *x = (const floatX *)activation(m, pass, m->shape.L - 1, ACT_OUT);
        norm_gradient(m, -1, dres, dlnf, x, final_norm_stats(m, pass), PARAM_LNF_W, PARAM_LNF_B);
        parameters_soon(m, PASS_RECOMPUTE, unit_of_layer(&m->table, layer_after(m, m->shape.L)));
        gradients_complete(m, unit_of_head());
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The step

static void embedding_gradients(struct gpt *m) {
    const struct extent e = extent_of(m, PASS_TRAIN);
    const int unit = unit_of_embeddings(&m->table);
    if (!m->shape.tied)
        gradients_begin(m, unit);
    phase(m, "backward", "embedding");
    float *dwte = grad(m, -1, PARAM_WTE), *dwpe = grad(m, -1, PARAM_WPE);
    const floatX *dres = d_residual(m);
    const int32_t *tokens = token_buffer(m, PASS_TRAIN, SLOT_TOKENS);
    void *ws = workspace(m, embedding_backward_workspace_bytes(e.B, e.T));
    RUN(m, embedding_backward(dwte, dwpe, dres, tokens, e.B, e.T, m->shape.layer.C,
                              dropout_of(m, m->config.hidden_dropout, 0, DROPOUT_EMBEDDING), ws, m->dev));
    gradients_complete(m, unit);
}

// Everything of a micro-step that is the same work each time.
static void forward_backward(struct gpt *m, double scale) {
    const struct layer_shape *s = &m->shape.layer;
    const int L = m->shape.L;
    embed(m, PASS_TRAIN);
    for (int l = 0; l < L; l++)
        block_forward(m, l, ACT_ALL, PASS_TRAIN);
    head(m, PASS_TRAIN, (float)(scale / (double)extent_of(m, PASS_TRAIN).N));
    int reduced = unit_of_head(); // while the next unit's gradients are made
    for (int l = L - 1; l >= 0; l--) {
        if (policy_is_group_last(&m->policy, l))
            for (int k = m->policy.group_first[l]; k <= l; k++)
                block_forward(m, k, policy_missing(&m->policy, k, s), PASS_RECOMPUTE);
        block_backward(m, l);
        gradients_complete(m, unit_of_layer(&m->table, l));
        gradients_collect(m, reduced);
        reduced = unit_of_layer(&m->table, l);
    }
    embedding_gradients(m);
    gradients_collect(m, reduced);
    gradients_collect(m, unit_of_embeddings(&m->table));
}

// Whether a micro-step begins or waits for collectives, which can't be part of a graph.
static bool communicates(const struct gpt *m, int index) {
    const struct shards *s = &m->shards;
    return s->ranks > 1 && (shards_gradients(s) || m->last_micro_step || (shards_optimizer(s) && index == 0));
}

// The same by way of a graph: recorded once, then enqueued by one call. The first micro-step runs as it is, since what
// the libraries do at their first call can't be recorded; so does one that is watched phase by phase.
static void forward_backward_recorded(struct gpt *m, int index, double scale) {
    const bool watched = m->planning || m->seconds || m->on_phase || m->matmuls_only;
    if (!DEVICE_HAS_GRAPHS || !m->config.cuda_graphs || !m->warm || watched || communicates(m, index)) {
        forward_backward(m, scale);
        m->warm = !m->planning;
        return;
    }
    if (!graph_recorded(&m->graph) || m->graph_scale != scale) {
        graph_free(&m->graph);
        graph_begin(m->dev);
        forward_backward(m, scale);
        graph_end(&m->graph, m->dev);
        m->graph_scale = scale;
    }
    graph_launch(&m->graph, m->dev);
}

// Enqueues forward and backward of micro-batch `index` of a step, (B, T) inputs and targets in host memory. Gradients of
// `scale` times the mean loss are added to the gradient buffer.
static void gpt_micro_step(struct gpt *m, int index, const int32_t *inputs, const int32_t *targets, double scale) {
    region(m, REGION_MICRO_STEP);
    m->dropout = true;
    m->last_micro_step = index == m->micro_steps - 1;
    upload_batch(m, PASS_TRAIN, inputs, targets);
    // Of all ranks' micro-batches: a sample's dropout does not depend on the rank that it falls to.
    RUN(m, dropout_step_set(&m->results->micro_step, m->micro_step + (uint64_t)m->shards.rank, m->dev));
    forward_backward_recorded(m, index, scale);
    RUN(m, device_copy(&m->losses[index], &m->results->loss, sizeof *m->losses, m->dev));
    m->dropout = false;
    m->micro_step += (uint64_t)m->shards.ranks;
}

static void gpt_zero_gradients(struct gpt *m) {
    const int64_t n = shards_elements(&m->shards, shards_gradients(&m->shards));
    device_zero(m->grads, (size_t)n * sizeof *m->grads, m->dev);
}

// One optimizer step on elements [begin, end) of the flat buffers, which belong to piece p (NULL: this rank holds all):
// tensor by tensor, since some decay and some do not.
static void gpt_update_range(struct gpt *m, struct adamw adamw, int64_t begin, int64_t end, const struct piece *p) {
    const struct shards *s = &m->shards;
    for (int i = 0; i < m->table.num_tensors; i++) {
        const struct tensor *t = &m->table.tensors[i];
        const int64_t first = t->offset > begin ? t->offset : begin;
        const int64_t last = t->offset + t->count < end ? t->offset + t->count : end;
        if (first >= last)
            continue;
        struct adamw a = adamw;
        a.weight_decay = tensor_decays(t) ? adamw.weight_decay : 0;
        const int64_t parameter = p ? shards_place(s, p, first, shards_parameters(s)) : first;
        const int64_t gradient = p ? shards_place(s, p, first, shards_gradients(s)) : first;
        const int64_t moment = p ? shards_place(s, p, first, shards_optimizer(s)) : first;
        adamw_update(m->params + parameter, m->master ? m->master + moment : NULL, m->grads + gradient, m->m + moment,
                     m->v + moment, last - first, a, &m->results->check, m->dev);
    }
}
// The own parts, the embeddings' first: what the next forward needs first is gathered first, while the rest is updated.
static void gpt_update_parts(struct gpt *m, struct adamw adamw) {
    const struct shards *s = &m->shards;
    char name[64];
    for (int i = s->count - 1; i >= 0; i--) {
        const struct piece *p = &s->pieces[i];
        const int64_t own = shards_own_begin(s, p);
        gpt_update_range(m, adamw, own, own + p->part, p);
        if (!shards_parameters(s))
            m->params_tickets[i] = collective_all_gather(m->collectives, m->params + p->begin, m->params + own,
                                                         (size_t)p->part * sizeof *m->params,
                                                         unit_name(m, p->unit, name, "updated parameters"), m->dev);
    }
}

// The own row of the reports: the squares of the own parts' gradients, whatever the stage, so that the norm has the same
// bits in all of them.
static void report_gradients(struct gpt *m, void *ws) {
    const struct shards *s = &m->shards;
    double *row = m->reports + s->rank * report_width(m);
    for (int i = 0; i < s->count; i++) {
        const struct piece *p = &s->pieces[i];
        if (s->ranks > 1 && !shards_gradients(s))
            collective_wait(m->collectives, m->grads_tickets[i], m->dev);
        const int64_t at = shards_place(s, p, shards_own_begin(s, p), shards_gradients(s));
        sum_of_squares(&row[REPORT_SQUARES], m->grads + at, p->part, i > 0, ws, m->dev);
    }
    if (s->ranks == 1)
        return;
    double *request = &m->host_requests[m->updates++ % 2];
    *request = m->request;
    device_upload(&row[REPORT_REQUEST], request, sizeof *request, m->dev);
    collective_wait(m->collectives,
                    collective_all_gather(m->collectives, m->reports, row, (size_t)report_width(m) * sizeof *row,
                                          "losses and gradient norms", m->dev),
                    m->dev);
}

// Enqueues step `step` (from 1) of AdamW with learning rate lr, the gradients clipped to --clip-grad. Nothing is updated
// where a loss or the norm is NaN or infinite: gpt_results says so.
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
    region(m, REGION_UPDATE);
    phase(m, "update", "gradient norm");
    void *ws = workspace(m, sum_of_squares_workspace_bytes());
    RUN(m, report_gradients(m, ws));
    RUN(m, gradient_check(&m->results->check, m->reports, m->shards.ranks, m->micro_steps, c->clip_grad, m->dev));
    phase(m, "update", "adamw");
    if (shards_optimizer(&m->shards))
        RUN(m, gpt_update_parts(m, adamw));
    else
        RUN(m, gpt_update_range(m, adamw, 0, m->table.flat, NULL));
}

// Starts to fetch the results of the step that was enqueued last into slot 0 or 1.
static void gpt_fetch_results(struct gpt *m, int slot) {
    const size_t doubles = (size_t)m->shards.ranks * (size_t)report_width(m);
    device_download_begin(&m->host_results[slot], m->results, sizeof *m->results, m->dev);
    device_download_begin(m->host_reports + (size_t)slot * doubles, m->reports, doubles * sizeof *m->reports, m->dev);
    device_event_record(m->dev, EVENT_RESULTS + slot);
}
// Waits for them. *reports is (ranks, report_width).
static struct step_results gpt_results(struct gpt *m, int slot, const double **reports) {
    device_event_wait(m->dev, EVENT_RESULTS + slot);
    *reports = m->host_reports + (size_t)slot * (size_t)m->shards.ranks * (size_t)report_width(m);
    return m->host_results[slot];
}

// Mean loss of a (B, T) batch, no gradients, no dropout.
static double gpt_evaluate(struct gpt *m, const int32_t *inputs, const int32_t *targets) {
    double loss = 0;
    region(m, REGION_EVALUATE);
    upload_batch(m, PASS_EVALUATE, inputs, targets);
    embed(m, PASS_EVALUATE);
    for (int l = 0; l < m->shape.L; l++)
        block_forward(m, l, ACT_ALL, PASS_EVALUATE);
    head(m, PASS_EVALUATE, 0);
    RUN(m, device_download(&loss, &m->results->loss, sizeof loss, m->dev));
    return loss;
}

// The cache is live in the first and in the last phase of a token, and so from one token to the next.
static void kv_cache_touch(struct gpt *m) {
    for (int l = 0; l < m->shape.L; l++) {
        kv_cache(m, l, SLOT_KEYS);
        kv_cache(m, l, SLOT_VALUES);
    }
}

// Feeds one token of each sequence, at `position`, to the model. Returns where the logits for the next ones are:
// (sequences, Vp) on the device.
static const floatX *gpt_decode(struct gpt *m, const int32_t *tokens, int position) {
    const struct layer_shape *s = &m->shape.layer;
    const int B = m->sequences;
    m->position = position;
    region(m, REGION_GENERATE);
    upload_batch(m, PASS_GENERATE, tokens, NULL);
    kv_cache_touch(m);
    embed(m, PASS_GENERATE);
    for (int l = 0; l < m->shape.L; l++)
        block_forward(m, l, ACT_ALL & ~BIT(SOFTMAX), PASS_GENERATE);
    parameters_ready(m, PASS_GENERATE, head_unit(m));
    phase(m, "generate", "logits");
    const floatX *lnf = final_norm_buffer(m, PASS_GENERATE);
    floatX *logits = logits_buffer(m, PASS_GENERATE, B);
    const floatX *w = param(m, PASS_GENERATE, -1, head_weight(m));
    void *ws = workspace(m, matmul_workspace_bytes(B, m->shape.Vp, s->C, m->dev));
    MATMUL(m, matmul_forward(logits, lnf, w, NULL, B, m->shape.Vp, s->C, ws, m->dev));
    kv_cache_touch(m);
    return logits;
}

// ---------------------------------------------------------------------------------------------------------------------
// Making one

static int add_flat(struct gpt *m, enum plan_arena arena, const char *name, size_t element_bytes, bool sharded) {
    return plan_add(&m->plan, arena, name, name, -1, (size_t)shards_elements(&m->shards, sharded) * element_bytes);
}

// What collectives go by.
static enum collectives_kind collectives_kind_of(const struct config *c) {
#ifdef TARGET_CUDA
    const bool nccl = c->collectives == BY_NCCL || (c->collectives == BY_AUTO && COLLECTIVES_HAVE_NCCL);
    return nccl ? COLLECTIVES_NCCL : COLLECTIVES_HOST;
#else
    return COLLECTIVES_HOST;
#endif
}

static floatX *gathered_buffer(struct gpt *m) {
    const size_t bytes = (size_t)m->shards.ranks * (size_t)m->shards.largest_part * sizeof(float);
    return (floatX *)buffer(m, PASS_TRAIN, -1, SLOT_GATHERED, bytes, "checkpoint", "a piece of sharded state");
}

// Runs the schedule in planning mode and places all that it touched. Allocates nothing of the model's.
static void gpt_make_plan(struct gpt *m) {
    plan_begin(&m->plan);
    m->planning = true;
    m->phase = -1;
    for (int i = 0; i < PASS_COUNT * (m->shape.L + 1) * SLOT_COUNT; i++)
        m->slots[i] = -1;
    for (int i = 0; i < m->workspaces_capacity; i++)
        m->workspaces[i] = -1;
    const struct shards *s = &m->shards;
    m->params_id = add_flat(m, ARENA_PARAMETERS, "parameters", sizeof(floatX), shards_parameters(s));
    m->rope_id = m->scratch_id = -1;
    if (m->shape.P == 0)
        m->rope_id = plan_add(&m->plan, ARENA_PARAMETERS, "rotary table", "rotary table", -1,
                              (size_t)m->config.seq_length * (size_t)m->shape.layer.D * sizeof(float));
    m->grads_id = m->master_id = m->m_id = m->v_id = -1;
    for (int i = 0; i < FLAT_COUNT; i++)
        m->copy_ids[i] = -1;
    if (m->trains) {
        const bool sharded = shards_optimizer(s);
        m->grads_id = add_flat(m, ARENA_GRADIENTS, "gradients", sizeof(float), shards_gradients(s));
        m->master_id = sizeof(floatX) < 4 ? add_flat(m, ARENA_OPTIMIZER, "master weights", sizeof(float), sharded) : -1;
        m->m_id = add_flat(m, ARENA_OPTIMIZER, "first moments", sizeof(float), sharded);
        m->v_id = add_flat(m, ARENA_OPTIMIZER, "second moments", sizeof(float), sharded);
        for (int i = 0; i < FLAT_COUNT && m->copies && DEVICE_MEMORY_IS_HOSTS; i++)
            m->copy_ids[i] = add_flat(m, ARENA_OPTIMIZER, "copy for checkpoints", sizeof(float), false);
    }
    if (s->ranks > 1)
        m->scratch_id = plan_add(&m->plan, ARENA_GRADIENTS, "collectives", "collectives' scratch", -1,
                                 collectives_scratch_bytes(s->largest_part, s->ranks, collectives_kind_of(&m->config),
                                                           m->config.grad_reduce_in_bf16));
    m->results_id =
        plan_add(&m->plan, ARENA_OPTIMIZER, "step results", "step results", -1, sizeof(struct step_results));
    m->reports_id = plan_add(&m->plan, ARENA_OPTIMIZER, "step results", "reports of the ranks", -1,
                             (size_t)s->ranks * (size_t)report_width(m) * sizeof(double));

    if (m->trains) {
        gpt_micro_step(m, 0, NULL, NULL, 1);
        gpt_update(m, 1, 0);
    }
    if (m->config.val_every > 0 || m->config.eval_only)
        gpt_evaluate(m, NULL, NULL);
    if (m->config.sample_every > 0 || *m->config.generate)
        gpt_decode(m, NULL, 0);
    if (m->trains && shards_optimizer(s)) {
        region(m, REGION_SAVE);
        phase(m, "save", "gather");
        gathered_buffer(m);
    }
    m->planning = false;
    m->micro_step = 0;
    plan_place(&m->plan);
}

// Chunks of about this many bytes of logits: large enough for the matmuls to run at full speed, small beside the rest.
#ifdef TARGET_CUDA
enum { LOGITS_CHUNK_BYTES = 512 << 20 }; // each chunk adds to the fp32 gradient of the whole head: few chunks
#else
enum { LOGITS_CHUNK_BYTES = 128 << 20 };
#endif

static int64_t loss_chunk(const struct config *c, int Vp) {
    const int64_t N = (int64_t)c->micro_batch_size * c->seq_length;
    if (c->loss_chunk_tokens > 0)
        return c->loss_chunk_tokens < N ? c->loss_chunk_tokens : N;
    const int64_t chunks = (N * Vp * (int64_t)sizeof(floatX) + LOGITS_CHUNK_BYTES - 1) / LOGITS_CHUNK_BYTES;
    const int64_t chunk = ((N + chunks - 1) / chunks + 63) / 64 * 64;
    return chunk < N ? chunk : N;
}

// A planned model; nothing of its memory is allocated yet. Takes over the policy.
static struct gpt *gpt_create(const struct config *config, struct recompute_policy policy,
                              enum attention_backend backend, struct device *dev) {
    struct gpt *m = (struct gpt *)calloc(1, sizeof *m);
    if (!m)
        fail("out of memory");
    m->config = *config;
    m->shape = model_shape_of(config, sizeof(floatX), backend == ATTENTION_UNFUSED);
    const int ranks = config->ranks > 1 ? config->ranks : 1;
    m->table = parameters_create(&m->shape, ranks);
    m->shards =
        shards_create(&m->table, config->rank, ranks, config->zero_stage, (int64_t)(config->bucket_mib * 0x1p20));
    m->policy = policy;
    m->backend = backend;
    m->dev = dev;
    m->chunk = loss_chunk(config, m->shape.Vp);
    m->trains = config_trains(config);
    // Sharded state is gathered into the copy of rank 0, which writes.
    m->copies =
        m->trains && config->checkpoint_every > 0 && config->rank == 0 &&
        (shards_optimizer(&m->shards) || (config->checkpoint_async && config->checkpoint_every < config->train_steps));
    m->sequences = config->sample_count * (*config->generate ? option_list_count(config->generate) : 1);
    m->decode_tokens = config->sample_tokens;
    m->host_batch_tokens = (int64_t)config->micro_batch_size * config->seq_length;
    if (m->sequences > m->host_batch_tokens)
        m->host_batch_tokens = m->sequences;
    m->micro_steps = config->global_batch_size / (config->micro_batch_size * ranks);
    m->slots = (int *)calloc((size_t)PASS_COUNT * (size_t)(m->shape.L + 1) * SLOT_COUNT, sizeof *m->slots);
    m->params_tickets = (uint64_t *)calloc((size_t)m->shards.count + 1, sizeof *m->params_tickets);
    m->grads_tickets = (uint64_t *)calloc((size_t)m->shards.count + 1, sizeof *m->grads_tickets);
    m->units = (enum unit_state *)calloc((size_t)PASS_COUNT * (size_t)m->shards.units, sizeof *m->units);
    if (!m->slots || !m->params_tickets || !m->grads_tickets || !m->units)
        fail("out of memory");
    gpt_make_plan(m);
    return m;
}

// Whether this rank holds anything of elements [at, at + n) of a flat buffer.
static bool gpt_holds(const struct gpt *m, bool sharded, int64_t at, int64_t n) {
    int64_t place;
    return shards_next(&m->shards, sharded, &at, at + n, &place) > 0;
}
// Elements [at, at + n) of a flat buffer from the host's memory, as far as this rank holds them.
static void gpt_upload(struct gpt *m, void *flat, bool sharded, int64_t at, const void *values, int64_t n,
                       size_t element_bytes) {
    int64_t first = at, place, count;
    for (; (count = shards_next(&m->shards, sharded, &first, at + n, &place)) > 0; first += count)
        device_upload((char *)flat + (size_t)place * element_bytes,
                      (const char *)values + (size_t)(first - at) * element_bytes, (size_t)count * element_bytes,
                      m->dev);
}
// Values of the parameters: exact for the master weights, and rounded, for which `rounded` has room. Both must stay until
// the device was waited for.
static void gpt_upload_parameters(struct gpt *m, int64_t at, const float *exact, int64_t n, floatX *rounded) {
    for (int64_t i = 0; i < n; i++)
        rounded[i] = to_floatX(exact[i]);
    if (m->master)
        gpt_upload(m, m->master, shards_optimizer(&m->shards), at, exact, n, sizeof *exact);
    gpt_upload(m, m->params, shards_parameters(&m->shards), at, rounded, n, sizeof *rounded);
}

static void zero_flat(struct gpt *m, void *flat, bool sharded, size_t element_bytes) {
    device_zero(flat, (size_t)shards_elements(&m->shards, sharded) * element_bytes, m->dev);
}

// Initial parameters: GPT-2's scheme, made by the host a piece at a time.
static void gpt_initialise(struct gpt *m) {
    const int64_t PIECE = 1 << 20; // elements
    const bool sharded = shards_optimizer(&m->shards);
    float *exact = (float *)host_allocate((size_t)PIECE * sizeof *exact, m->dev);
    floatX *rounded = (floatX *)host_allocate((size_t)PIECE * sizeof *rounded, m->dev);
    zero_flat(m, m->params, shards_parameters(&m->shards), sizeof *m->params); // what lies between tensors too
    if (m->master)
        zero_flat(m, m->master, sharded, sizeof *m->master);
    for (int i = 0; i < m->table.num_tensors; i++) {
        const struct tensor *t = &m->table.tensors[i];
        for (int64_t first = 0; first < t->count; first += PIECE) {
            const int64_t n = t->count - first < PIECE ? t->count - first : PIECE;
            if (!gpt_holds(m, shards_parameters(&m->shards), t->offset + first, n))
                continue;
            tensor_initialise(exact, first, n, t, m->config.init_method_std, m->shape.L, m->config.seed);
            gpt_upload_parameters(m, t->offset + first, exact, n, rounded);
            device_synchronize(m->dev);
        }
    }
    if (m->trains) {
        zero_flat(m, m->m, sharded, sizeof *m->m);
        zero_flat(m, m->v, sharded, sizeof *m->v);
        gpt_zero_gradients(m);
    }
    host_free(exact);
    host_free(rounded);
}
// The rotary table is made by the host too.
static void gpt_initialise_rope(struct gpt *m) {
    const size_t bytes = (size_t)m->config.seq_length * (size_t)m->shape.layer.D * sizeof(float);
    float *table = (float *)host_allocate(bytes, m->dev), *to = (float *)plan_pointer(&m->plan, &m->arenas, m->rope_id);
    rope_table(table, m->config.seq_length, m->shape.layer.D, (float)m->config.rotary_base);
    device_upload(to, table, bytes, m->dev);
    device_synchronize(m->dev);
    host_free(table);
    m->rope = to;
}

// Allocates the arenas and fills in initial parameters.
static void gpt_allocate(struct gpt *m) {
    const struct plan *plan = &m->plan;
    arenas_allocate(&m->arenas, plan);
    m->params = (floatX *)plan_pointer(plan, &m->arenas, m->params_id);
    m->grads = (float *)plan_pointer(plan, &m->arenas, m->grads_id);
    m->master = (float *)plan_pointer(plan, &m->arenas, m->master_id);
    m->m = (float *)plan_pointer(plan, &m->arenas, m->m_id);
    m->v = (float *)plan_pointer(plan, &m->arenas, m->v_id);
    for (int i = 0; i < FLAT_COUNT && m->copies; i++) {
        const size_t bytes = (size_t)m->table.flat * sizeof(float);
        m->copy[i] =
            DEVICE_MEMORY_IS_HOSTS ? (float *)plan_pointer(plan, &m->arenas, m->copy_ids[i]) : (float *)malloc(bytes);
        if (!m->copy[i])
            fail("out of the host's memory for the copy that checkpoints are written from; --no-checkpoint-async does "
                 "without");
    }
    m->results = (struct step_results *)plan_pointer(plan, &m->arenas, m->results_id);
    m->reports = (double *)plan_pointer(plan, &m->arenas, m->reports_id);
    m->losses = m->reports + m->shards.rank * report_width(m) + REPORT_LOSSES;
    const size_t reports_bytes = (size_t)m->shards.ranks * (size_t)report_width(m) * sizeof *m->reports;
    device_zero(m->results, sizeof *m->results, m->dev);
    device_zero(m->reports, reports_bytes, m->dev);
    if (m->rope_id >= 0)
        gpt_initialise_rope(m);
    m->host_batches = (int32_t *)host_allocate(4 * (size_t)m->host_batch_tokens * sizeof(int32_t), m->dev);
    m->host_results = (struct step_results *)host_allocate(2 * sizeof *m->host_results, m->dev);
    m->host_reports = (double *)host_allocate(2 * reports_bytes, m->dev);
    m->host_requests = (double *)host_allocate(2 * sizeof *m->host_requests, m->dev);
    m->host_row = (floatX *)calloc((size_t)m->shape.Vp, sizeof *m->host_row);
    m->host_logits = (float *)calloc(3 * (size_t)m->shape.Vp, sizeof *m->host_logits);
    m->host_tokens = (int32_t *)calloc((size_t)m->sequences + 1, sizeof *m->host_tokens);
    if (!m->host_row || !m->host_logits || !m->host_tokens)
        fail("out of memory");
    gpt_initialise(m);
    device_synchronize(m->dev);
}

// What the model's collectives hold of the device's memory besides the plan's is taken by this: before the check whether
// the plan fits, and before gpt_allocate.
static void gpt_open_collectives(const struct gpt *m, struct collectives *collectives, struct parallel *parallel,
                                 enum collectives_kind kind) {
    const size_t part_bytes = (size_t)m->shards.largest_part * sizeof(float);
    const size_t report_bytes = (size_t)report_width(m) * sizeof *m->reports;
    collectives_open(collectives, parallel, kind, m->config.grad_reduce_in_bf16, m->shards.largest_part,
                     part_bytes > report_bytes ? part_bytes : report_bytes, m->dev);
}
// From here on the ranks work together.
static void gpt_connect(struct gpt *m, struct collectives *collectives) {
    m->collectives = collectives;
    collectives_set_scratch(collectives, plan_pointer(&m->plan, &m->arenas, m->scratch_id));
}
// Waits for the updated parameters that are on their way.
static void gpt_settle(struct gpt *m) {
    for (int unit = 0; unit < m->shards.units && m->shards.ranks > 1; unit++)
        unit_wait(m, m->params_tickets, unit);
}

// One of the flat buffers of a checkpoint, in the device's memory: whole, or this rank's shard.
static const float *gpt_flat(const struct gpt *m, enum flat flat) {
    if (flat == FLAT_MASTER)
        return m->master ? m->master : (const float *)m->params;
    return flat == FLAT_M ? m->m : m->v;
}
static bool gpt_flat_is_sharded(const struct gpt *m, enum flat flat) {
    return flat == FLAT_MASTER && !m->master ? shards_parameters(&m->shards) : shards_optimizer(&m->shards);
}

// Gathers one of them from all ranks into rank 0's copy. Every rank calls it.
static void gather_state(struct gpt *m, enum flat flat) {
    const struct shards *s = &m->shards;
    region(m, REGION_SAVE);
    phase(m, "save", "gather");
    float *gathered = (float *)gathered_buffer(m);
    for (int i = 0; i < s->count; i++) {
        const struct piece *p = &s->pieces[i];
        const size_t bytes = (size_t)p->part * sizeof *gathered;
        collective_wait(m->collectives,
                        collective_all_gather(m->collectives, gathered, gpt_flat(m, flat) + p->begin / s->ranks, bytes,
                                              "state for a checkpoint", m->dev),
                        m->dev);
        if (m->copies)
            device_download(m->copy[flat] + p->begin, gathered, (size_t)s->ranks * bytes, m->dev);
    }
}

// Copies one of them into the host's memory. Pinned memory is copied to at the bus' full speed: while one piece comes,
// the one before goes to its place.
static void copy_state(struct gpt *m, enum flat flat) {
    const int64_t PIECE = DEVICE_MEMORY_IS_HOSTS ? 1 << 16 : 4 << 20, n = m->table.flat,
                  pieces = (n + PIECE - 1) / PIECE;
    if (DEVICE_MEMORY_IS_HOSTS) {
        const float *from = gpt_flat(m, flat);
#pragma omp parallel for schedule(static)
        for (int64_t first = 0; first < n; first += PIECE)
            memcpy(m->copy[flat] + first, from + first, (size_t)(n - first < PIECE ? n - first : PIECE) * sizeof *from);
        return;
    }
    float *pinned = (float *)host_allocate(2 * (size_t)PIECE * sizeof *pinned, m->dev);
    for (int64_t i = 0; i <= pieces; i++) {
        if (i > 0)
            device_synchronize(m->dev);
        if (i < pieces) {
            const int64_t first = i * PIECE, count = n - first < PIECE ? n - first : PIECE;
            device_download_begin(pinned + i % 2 * PIECE, gpt_flat(m, flat) + first, (size_t)count * sizeof *pinned,
                                  m->dev);
        }
        if (i > 0) {
            const int64_t first = (i - 1) * PIECE, count = n - first < PIECE ? n - first : PIECE;
            memcpy(m->copy[flat] + first, pinned + (i + 1) % 2 * PIECE, (size_t)count * sizeof *pinned);
        }
    }
    host_free(pinned);
}

// Copies what a checkpoint holds into the host's memory of the rank that has a copy. Takes the time of the copy and no
// more. Every rank calls it.
static void gpt_copy_state(struct gpt *m) {
    gpt_settle(m);
    for (int flat = 0; flat < FLAT_COUNT; flat++) {
        if (gpt_flat_is_sharded(m, (enum flat)flat))
            gather_state(m, (enum flat)flat);
        else if (m->copies)
            copy_state(m, (enum flat)flat);
    }
    device_synchronize(m->dev); // the gathering is over on every rank that goes on
}

static void gpt_destroy(struct gpt *m) {
    for (int i = 0; i < FLAT_COUNT && !DEVICE_MEMORY_IS_HOSTS; i++)
        free(m->copy[i]);
    graph_free(&m->graph);
    host_free(m->host_batches);
    host_free(m->host_results);
    host_free(m->host_reports);
    host_free(m->host_requests);
    arenas_free(&m->arenas);
    plan_free(&m->plan);
    policy_free(&m->policy);
    shards_free(&m->shards);
    parameters_free(&m->table);
    free(m->slots);
    free(m->params_tickets);
    free(m->grads_tickets);
    free(m->units);
    free(m->workspaces);
    free(m->host_row);
    free(m->host_logits);
    free(m->host_tokens);
    free(m->seconds);
    free(m);
}

// Floating-point operations of one token in forward and backward, a multiply-add counted as two, backward as twice the
// forward, and nothing for what is computed again. Matmuls: 6 W, W the weights that they read, with the vocabulary's own
// rows of the head. Attention's two products, of L layers with H heads of D at sequence length T:
//   done  6 L H D (T + 1): a token attends to (T + 1) / 2 on average, itself included
//   palm  12 L H D T: each token with all T, as PaLM counts (Chowdhery et al. 2022, arXiv 2204.02311, appendix B) and
//         nanoGPT does too; it exceeds what a causal kernel computes, up to twice where T is long
struct flops_per_token {
    double done, palm;
};
static struct flops_per_token gpt_flops_per_token(const struct gpt *m) {
    const struct layer_shape *s = &m->shape.layer;
    double weights = (double)m->shape.V * s->C;
    for (int i = 0; i < m->table.num_tensors; i++) {
        const struct tensor *t = &m->table.tensors[i];
        if (t->layer >= 0 && t->cols > 1)
            weights += (double)t->count;
    }
    const double width = (double)m->shape.L * s->H * s->D;
    const struct flops_per_token flops = {6 * weights + 6 * width * (s->T + 1), 6 * weights + 12 * width * s->T};
    return flops;
}

// The largest rate that a square matmul reaches here, flop/s: what MFU is held against where the hardware's own peak is
// not known, as on every CPU. It is a lower bound of the peak: other work may have slowed the matmul, a small arena allows
// a small one only, and attention's own kernels may be faster where bf16 matmuls convert their operands. Works in the
// activations' arena, so it runs before anything else does or between steps; the operands are noise, since zeros
// multiply faster. 0 where the arena is too small to tell.
static double gpt_measure_peak(struct gpt *m) {
    const size_t bytes = m->arenas.bytes[ARENA_ACTIVATIONS];
    int n = DEVICE_PEAK_MATMUL;
    while (n > 128 && 3 * (size_t)n * n * sizeof(floatX) + matmul_workspace_bytes(n, n, n, m->dev) > bytes)
        n -= 128;
    if (3 * (size_t)n * n * sizeof(floatX) + matmul_workspace_bytes(n, n, n, m->dev) > bytes)
        return 0;
    floatX *out = (floatX *)m->arenas.base[ARENA_ACTIVATIONS], *in = out + (size_t)n * n, *weight = in + (size_t)n * n;
    floatX *noise = (floatX *)host_allocate(2 * (size_t)n * n * sizeof *noise, m->dev);
    for (int64_t i = 0; i < 2 * (int64_t)n * n; i++)
        noise[i] = to_floatX(random_uniform(m->config.seed, 1, (uint64_t)i) - 0.5f);
    device_upload(in, noise, 2 * (size_t)n * n * sizeof *noise, m->dev);
    device_synchronize(m->dev);
    host_free(noise);
    double best = 0;
    for (int i = 0; i < 6; i++) {
        const double begin = seconds_now();
        for (int k = 0; k < DEVICE_PEAK_REPEATS; k++)
            matmul_forward(out, in, weight, NULL, n, n, n, weight + (size_t)n * n, m->dev);
        device_synchronize(m->dev);
        const double rate = DEVICE_PEAK_REPEATS * 2.0 * n * n * n / (seconds_now() - begin);
        best = rate > best ? rate : best;
    }
    return best;
}
