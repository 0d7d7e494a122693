// The model: one block forward, one block backward, the embedding, the head, and the steps that are made of them: a
// micro-step, the update, an evaluation. Generation is made of them in generation.cuh.
//
// Functions run in two modes (timeline.cuh): when planning, a phase only records the buffers that it touches; when
// running, it finds them at their planned addresses. A phase fetches all its buffers first, then runs its ops by RUN.
//
// Layer l's input is the OUT of layer l - 1; the embedding's output is the OUT of layer -1.
#pragma once
#include "attention.cuh"             // attention_forward, attention_backward, attention_decode
#include "config.h"                  // struct config
#include "kernels/activation.cuh"    // gelu, squared_relu, swiglu
#include "kernels/device_memory.cuh" // device_upload, device_download, device_zero
#include "kernels/device_queue.cuh"  // device_event_record, device_event_wait, work graphs
#include "kernels/embedding.cuh"     // embedding_forward, embedding_backward
#include "kernels/loss.cuh"          // cross_entropy
#include "kernels/matmul.cuh"        // matmul_forward, matmul_backward_input, matmul_backward_weight
#include "kernels/norm.cuh"          // norm_forward, norm_backward, residual_forward, residual_norm_forward
#include "kernels/rope.cuh"          // rope_forward
#include "optimizer.cuh"             // struct optimizer
#include "parameters.cuh"            // struct parameters, struct model_shape
#include "recompute.cuh"             // struct recompute_policy
#include "runtime/machine/error.h"   // fail
#include "timeline.cuh"              // phases and their buffers
#include "zero.cuh"                  // parameters and gradients, whole or sharded
#include <math.h>                    // sqrt, isfinite

// The first of two device events (device_event_record): EVENT + slot, slot 0 or 1.
enum device_event { EVENT_BATCH = 0, EVENT_RESULTS = 2 };

// Gradients of a layer's activations, and of the model's (layer -1): id, name in plans.
#define GRADIENT_SLOTS(ROW)                                                                                            \
    ROW(D_MLP_PROJ, "d mlp projection") /* behind the residual dropout of the MLP's projection */                      \
    ROW(D_ACT, "d activation")                                                                                         \
    ROW(D_FC, "d fc")                                                                                                  \
    ROW(D_NORM2, "d norm 2")                                                                                           \
    ROW(D_ATT_PROJ, "d attention projection")                                                                          \
    ROW(D_ATT, "d attention")                                                                                          \
    ROW(D_QKV, "d qkv")                                                                                                \
    ROW(D_NORM1, "d norm 1")                                                                                           \
    ROW(D_LNF, "d final norm")                                                                                         \
    ROW(D_RESIDUAL, "d residual") /* of the residual stream, from the head down to the embedding */

// Buffers of a layer besides its activations, and of the whole model.
enum slot {
    SLOT_BEFORE_GRADIENTS = ACT_COUNT - 1,
#define ENUM_ROW(id, name) SLOT_##id,
    GRADIENT_SLOTS(ENUM_ROW)
#undef ENUM_ROW
        SLOT_KEYS, // the KV cache
    SLOT_VALUES,
    SLOT_TOKENS,
    SLOT_TARGETS,
    SLOT_POSITIONS,
    SLOT_LNF,
    SLOT_LAST_ROWS, // of LNF: of each prompt's last token
    SLOT_LNF_STATS,
    SLOT_LOGITS,
    SLOT_LOSSES,
    SLOT_COUNT
};

// The results of a step, in the device's memory until the host fetches them, up to a step later.
struct step_results {
    struct gradient_check check;
    double loss;         // mean over the last micro-batch
    uint64_t micro_step; // counted over the run: the counter of the dropout masks
};

struct gpt {
    struct config config;
    struct model_shape shape;
    struct parameters table;
    struct recompute_policy policy;
    enum attention_backend backend;
    struct device *dev;
    struct timeline timeline;
    struct zero zero; // parameters and gradients
    struct optimizer optimizer;

    int *slots; // (PASS_COUNT, L + 1, SLOT_COUNT) buffer ids, -1: none
    int params_id, grads_id, rope_id, results_id, reports_id, scratch_id;
    const float *rope;            // (T, D) cosines and sines
    struct step_results *results; // device memory
    double *reports;              // (ranks, report_width) device memory: each rank's report of a step
    double *losses;               // (micro_steps) device memory: the losses within this rank's report

    bool trains;             // has gradients and an optimizer; false: validates and generates only
    int sequences;           // generation: sequences at a time
    int prompt_tokens;       // generation: of the longest prompt
    int decode_tokens;       // generation: capacity of the KV cache, tokens of a sequence
    int64_t chunk;           // tokens of a logits chunk
    int micro_steps;         // of a step, on each rank
    uint64_t micro_step;     // micro-batches so far in the run, over all ranks
    bool last_micro_step;    // the current micro-step is its step's last: gradients are reduced
    bool dropout;            // on in training, off in evaluation and generation
    struct work_graph graph; // the recorded work of a micro-step
    double graph_scale;      // the loss scale that the graph was recorded with
    bool warm;               // a micro-step has run, and with it the libraries' first calls, which can't be recorded

    // Pinned host memory, double-buffered: batches in flight to the device, results in flight to the host.
    int32_t *host_batches; // (2, 2, host_batch_tokens): batch; inputs, targets
    int64_t host_batch_tokens;
    unsigned batches;                  // uploaded so far
    unsigned updates;                  // enqueued so far
    struct step_results *host_results; // (2)
    double *host_reports;              // (2, ranks, report_width)
    int request;           // what this rank asks of all ranks with the next update, in the caller's code; 0: nothing
    double *host_requests; // (2) requests in flight
};

// The report of one rank, report_width doubles: the sum of its gradients' squares (at REPORT_SQUARES), the loss of each
// micro-batch (from REPORT_LOSSES on), and its request (at report_request).
static int report_width(const struct gpt *m) { return REPORT_LOSSES + m->micro_steps + 1; }
static int report_request(const struct gpt *m) { return REPORT_LOSSES + m->micro_steps; }

// ---- Phases and buffers ----

#define RUN(m, op) TIMELINE_RUN(&(m)->timeline, op)
#define MATMUL(m, op) TIMELINE_MATMUL(&(m)->timeline, op) // RUN of a matmul, which benchmarks time apart
#define phase(m, group, layer, op) timeline_phase(&(m)->timeline, group, layer, op)

static void region(struct gpt *m, enum region r) {
    timeline_region(&m->timeline, r);
    zero_begin_region(&m->zero);
}
// A buffer of a layer (-1: of the whole model) in a pass; NULL when planning. slot: enum slot or enum activation_id.
static void *buffer(struct gpt *m, enum pass pass, int layer, int slot, size_t bytes, const char *category,
                    const char *name) {
    int *id = &m->slots[((int)pass * (m->shape.L + 1) + layer + 1) * SLOT_COUNT + slot];
    return timeline_buffer(&m->timeline, id, bytes, category, name, layer);
}
static void *workspace(struct gpt *m, size_t bytes) { return timeline_workspace(&m->timeline, bytes); }

static bool generates(enum pass pass) { return pass == PASS_PREFILL || pass == PASS_GENERATE; }

// The tokens of a pass: B sequences of T tokens.
struct extent {
    int B, T;
    int64_t N; // B * T
};
static struct extent extent_of(const struct gpt *m, enum pass pass) {
    const int B = generates(pass) ? m->sequences : m->config.micro_batch_size;
    const int T = !generates(pass) ? m->config.seq_length : pass == PASS_PREFILL ? m->prompt_tokens : 1;
    const struct extent e = {B, T, (int64_t)B * T};
    return e;
}

// By slot: a pass's tokens, or what is uploaded beside them: targets, or the positions of new tokens.
static int32_t *token_buffer(struct gpt *m, enum pass pass, enum slot slot) {
    const size_t bytes = (size_t)extent_of(m, pass).N * sizeof(int32_t);
    const char *beside = slot == SLOT_TARGETS ? "targets" : "positions";
    return (int32_t *)buffer(m, pass, -1, slot, bytes, "tokens", slot == SLOT_TOKENS ? "inputs" : beside);
}
// (B) positions of the sequences' first tokens; NULL: all 0.
static const int32_t *starts_of(struct gpt *m, enum pass pass) {
    return pass == PASS_GENERATE ? token_buffer(m, pass, SLOT_POSITIONS) : NULL;
}

// An activation of layer l. One that the policy keeps has one buffer for forward and backward; one that it drops has a
// buffer in the forward and another in the backward, for the recomputed values.
static void *activation(struct gpt *m, enum pass pass, int l, enum activation_id id) {
    const uint32_t kept = l < 0 ? BIT(OUT) : m->policy.kept[l];
    if (pass == PASS_RECOMPUTE && kept & (1u << id))
        pass = PASS_TRAIN;
    if (!m->timeline.planning)
        return buffer(m, pass, l, id, 0, NULL, NULL);
    const struct activation_row row = activation_row(id, &m->shape.layer);
    const size_t bytes = (size_t)row.bytes_per_token * (size_t)extent_of(m, pass).N;
    char category[64];
    if (pass == PASS_TRAIN)
        snprintf(category, sizeof category, "activations: %s", row.category);
    else
        snprintf(category, sizeof category, "%s", pass == PASS_RECOMPUTE ? "recomputed activations" : pass_name(pass));
    return buffer(m, pass, l, id, bytes, category, row.name);
}
// The buffer of the gradient of an activation, (N, width).
static floatX *d_buffer(struct gpt *m, int l, enum slot slot, int64_t width) {
    static const char *const names[] = {
#define NAME_ROW(id, name) name,
        GRADIENT_SLOTS(NAME_ROW)
#undef NAME_ROW
    };
    const size_t bytes = (size_t)extent_of(m, PASS_TRAIN).N * (size_t)width * sizeof(floatX);
    return (floatX *)buffer(m, PASS_TRAIN, l, slot, bytes, "gradients of activations", names[slot - ACT_COUNT]);
}

static floatX *param(struct gpt *m, enum pass pass, int l, enum parameter id) {
    return zero_parameter(&m->zero, pass, l, id);
}
static float *grad(struct gpt *m, int l, enum parameter id) { return zero_gradient(&m->zero, l, id); }

static struct dropout dropout_of(const struct gpt *m, double p, int layer, enum dropout_use use) {
    const struct dropout d = {m->dropout ? (float)p : 0, m->config.seed, 0,
                              (uint32_t)layer,           (uint32_t)use,  m->results ? &m->results->micro_step : NULL};
    return d;
}
static enum norm_kind norm_kind_of(const struct gpt *m) {
    switch (m->shape.normalization) {
    case NORMALIZATION_LAYERNORM: return NORM_LAYERNORM;
    case NORMALIZATION_RMSNORM: return NORM_RMSNORM;
    }
    return NORM_LAYERNORM;
}
// Statistics of a norm: (N) reciprocal standard deviations, then, for LayerNorm, (N) means.
static float *mean_of(const struct gpt *m, float *stats, int64_t N) {
    return stats && m->shape.layer.norm_statistics > 1 ? stats + N : NULL;
}
static struct attention_shape attention_shape_of(const struct layer_shape *s, int B, int T) {
    const struct attention_shape shape = {B, T, s->H, s->G, s->D, (float)(1 / sqrt((double)s->D)), false};
    return shape;
}

static enum parameter head_weight(const struct gpt *m) { return m->shape.tied ? PARAM_WTE : PARAM_LM_HEAD; }
// The pass whose gathered parameters hold the head's weight. In training a tied weight, the embeddings', is gathered
// again for the head, as in PASS_RECOMPUTE, rather than kept in memory through all layers.
static enum pass head_pass(const struct gpt *m, enum pass pass) {
    return m->shape.tied && pass == PASS_TRAIN ? PASS_RECOMPUTE : pass;
}
static int head_unit(const struct gpt *m) { return m->shape.tied ? unit_of_embeddings(&m->table) : unit_of_head(); }

static floatX *final_norm_buffer(struct gpt *m, enum pass pass) {
    return (floatX *)buffer(m, pass, -1, SLOT_LNF, (size_t)extent_of(m, pass).N * m->shape.layer.C * sizeof(floatX),
                            pass == PASS_TRAIN ? "activations: norm" : pass_name(pass), "final norm");
}
static float *final_norm_stats(struct gpt *m, enum pass pass) {
    const size_t floats = (size_t)m->shape.layer.norm_statistics;
    return (float *)buffer(m, pass, -1, SLOT_LNF_STATS, (size_t)extent_of(m, pass).N * floats * sizeof(float),
                           pass == PASS_TRAIN ? "activations: norm" : pass_name(pass), "final norm statistics");
}

// ---- One block ----

// These ops fetch their parameters and workspace and run in the phase that their caller began.
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
    const struct attention_shape shape = attention_shape_of(&m->shape.layer, e.B, e.T);
    const struct dropout dropout = dropout_of(m, m->config.attention_dropout, l, DROPOUT_ATTENTION);
    void *ws = workspace(m, attention_forward_workspace_bytes(m->backend, shape, m->dev));
    RUN(m, attention_forward(att, saved, qkv, m->backend, shape, dropout, ws, m->dev));
}
// The keys or values of every position so far, (B, G, capacity, D), which live from one token to the next.
static floatX *kv_cache(struct gpt *m, int l, enum slot slot) {
    const struct layer_shape *s = &m->shape.layer;
    const size_t rows = (size_t)m->sequences * (size_t)m->decode_tokens;
    return (floatX *)buffer(m, PASS_GENERATE, l, slot, rows * (size_t)(s->G * s->D) * sizeof(floatX), "kv cache",
                            slot == SLOT_KEYS ? "keys" : "values");
}
// Generation: the k and v of the pass's tokens join the cache. A prompt's tokens attend to each other, a later one to
// the whole cache.
static void attention_with_cache(struct gpt *m, enum pass pass, int l, floatX *att, const floatX *qkv) {
    const struct extent e = extent_of(m, pass);
    const int capacity = m->decode_tokens;
    floatX *keys = kv_cache(m, l, SLOT_KEYS), *values = kv_cache(m, l, SLOT_VALUES);
    const int32_t *positions = starts_of(m, pass);
    const struct attention_shape shape = attention_shape_of(&m->shape.layer, e.B, e.T);
    RUN(m, kv_cache_append(keys, values, qkv, positions, NULL, capacity, shape, m->dev));
    if (pass == PASS_PREFILL) {
        attention(m, pass, l, att, activation(m, pass, l, ACT_SOFTMAX), qkv);
        return;
    }
    void *ws = workspace(m, attention_decode_workspace_bytes(shape, capacity, m->dev));
    RUN(m, attention_decode(att, qkv, keys, values, positions, capacity, shape, ws, m->dev));
}

// act (N, F) = the MLP's activation of fc (N, fc_width); backward: dfc from dact.
static void mlp_activation_forward(floatX *act, const floatX *fc, int64_t N, const struct model_shape *s,
                                   struct device *dev) {
    switch (s->activation) {
    case ACTIVATION_GELU: gelu_forward(act, fc, N * s->layer.F, dev); break;
    case ACTIVATION_SQUARED_RELU: squared_relu_forward(act, fc, N * s->layer.F, dev); break;
    case ACTIVATION_SWIGLU: swiglu_forward(act, fc, N, s->layer.F, dev); break;
    }
}
static void mlp_activation_backward(floatX *dfc, const floatX *dact, const floatX *fc, int64_t N,
                                    const struct model_shape *s, struct device *dev) {
    switch (s->activation) {
    case ACTIVATION_GELU: gelu_backward(dfc, dact, fc, N * s->layer.F, dev); break;
    case ACTIVATION_SQUARED_RELU: squared_relu_backward(dfc, dact, fc, N * s->layer.F, dev); break;
    case ACTIVATION_SWIGLU: swiglu_backward(dfc, dact, fc, N, s->layer.F, dev); break;
    }
}

// Runs the ops whose outputs are in the set `produce`: all in a first forward, the dropped ones in recomputation.
//
// A residual addition is fused with the norm that reads it where both are in `produce`. In a first forward the fusion
// crosses layers: a layer's last addition computes the next layer's NORM1, or the final norm after the last layer; only
// layer 0 computes its own NORM1. A norm that runs unfused has the same bits.
static void block_forward(struct gpt *m, int l, uint32_t produce, enum pass pass) {
#define ACT(id) activation(m, pass, l, ACT_##id)
#define WANTED(id) (produce & BIT(id) ? ACT(id) : NULL)
    const struct layer_shape *s = &m->shape.layer;
    const struct extent e = extent_of(m, pass);
    const int64_t N = e.N;
    const char *group = pass_name(pass);
    const int unit = unit_of_layer(&m->table, l),
              next = l + 1 < m->shape.L ? unit_of_layer(&m->table, l + 1) : unit_of_head();

    if (produce)
        zero_use(&m->zero, pass, unit);
    if (pass != PASS_RECOMPUTE) {
        zero_prefetch(&m->zero, pass, next);
        if (next == unit_of_head())
            zero_prefetch(&m->zero, head_pass(m, pass), head_unit(m));
    }
    if (pass != PASS_RECOMPUTE && l > 0)
        produce &= ~(BIT(NORM1) | BIT(NORM1_STATS));
    if (produce & (BIT(NORM1) | BIT(NORM1_STATS))) {
        phase(m, group, l, "norm 1");
        floatX *out = (floatX *)WANTED(NORM1);
        float *stats = (float *)WANTED(NORM1_STATS);
        const floatX *x = (const floatX *)activation(m, pass, l - 1, ACT_OUT);
        norm(m, pass, l, out, stats, x, PARAM_LN1_W, PARAM_LN1_B);
    }
    if (produce & BIT(QKV)) {
        phase(m, group, l, "qkv");
        floatX *qkv = (floatX *)ACT(QKV);
        linear(m, pass, l, qkv, (const floatX *)ACT(NORM1), PARAM_QKV_W, PARAM_QKV_B, qkv_width(s), s->C);
        const int32_t *starts = starts_of(m, pass);
        if (uses_rope(&m->shape))
            RUN(m, rope_forward(qkv, m->rope, starts, e.B, e.T, s->H, s->G, s->D, m->dev));
    }
    if (produce & (BIT(ATT) | BIT(SOFTMAX))) {
        phase(m, group, l, "attention");
        floatX *att = (floatX *)ACT(ATT);
        const floatX *qkv = (const floatX *)ACT(QKV);
        if (generates(pass))
            attention_with_cache(m, pass, l, att, qkv);
        else
            attention(m, pass, l, att, ACT(SOFTMAX), qkv);
    }
    if (produce & BIT(MID)) {
        phase(m, group, l, "attention projection");
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
        phase(m, group, l, "norm 2");
        floatX *out = (floatX *)WANTED(NORM2);
        float *stats = (float *)WANTED(NORM2_STATS);
        norm(m, pass, l, out, stats, (const floatX *)ACT(MID), PARAM_LN2_W, PARAM_LN2_B);
    }
    if (produce & BIT(FC)) {
        phase(m, group, l, "fc");
        floatX *fc = (floatX *)ACT(FC);
        linear(m, pass, l, fc, (const floatX *)ACT(NORM2), PARAM_FC_W, PARAM_FC_B, fc_width(s), s->C);
    }
    if (produce & BIT(ACT)) {
        phase(m, group, l, "activation");
        floatX *act = (floatX *)ACT(ACT);
        const floatX *fc = (const floatX *)ACT(FC);
        RUN(m, mlp_activation_forward(act, fc, N, &m->shape, m->dev));
    }
    if (produce & BIT(OUT)) {
        if (pass != PASS_RECOMPUTE) // the fused norm's weights are the next unit's
            zero_use(&m->zero, pass, next);
        phase(m, group, l, "mlp projection");
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

// Gradients of a linear layer: din (N, k) is written; dweight (n, k) and dbias (n) are added to the unit's gradients.
static void linear_backward(struct gpt *m, int l, floatX *din, const floatX *dout, const floatX *in,
                            enum parameter weight, enum parameter bias, int n, int k) {
    const int64_t N = extent_of(m, PASS_TRAIN).N;
    const floatX *w = param(m, PASS_RECOMPUTE, l, weight);
    float *dw = grad(m, l, weight), *db = grad(m, l, bias);
    void *ws = workspace(m, matmul_workspace_bytes(N, n, k, m->dev));
    MATMUL(m, matmul_backward_input(din, dout, w, N, n, k, ws, m->dev));
    MATMUL(m, matmul_backward_weight(dw, db, dout, in, N, n, k, ws, m->dev));
}
// dx += the gradient of a norm's input; those of its weight and bias are added to the unit's gradients.
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

// The gradient of a projection's output, before dropout. Without dropout that is the gradient of the residual stream
// itself, which is then not stored twice.
static const floatX *d_projection(struct gpt *m, int l, enum slot slot, enum dropout_use use) {
    const floatX *dres = d_residual(m);
    const struct dropout dropout = dropout_of(m, m->config.hidden_dropout, l, use);
    if (dropout.p == 0)
        return dres;
    floatX *dproj = d_buffer(m, l, slot, m->shape.layer.C);
    RUN(m, dropout_backward(dproj, dres, extent_of(m, PASS_TRAIN).N * m->shape.layer.C, dropout, m->dev));
    return dproj;
}

// The layer whose parameters are needed next after the backward of layer l: the first that is recomputed for layer
// l - 1, or l - 1 itself; -1: none.
static int next_backward_layer(const struct gpt *m, int l) {
    const int below = l - 1;
    if (below < 0 || !policy_is_group_last(&m->policy, below))
        return below;
    for (int k = m->policy.group_first[below]; k < below; k++)
        if (policy_missing(&m->policy, k, &m->shape.layer))
            return k;
    return below;
}

// Adds the gradients of layer l's parameters and turns d_residual, the gradient of its output, into that of its input.
static void block_backward(struct gpt *m, int l) {
#define ACT(id) activation(m, PASS_RECOMPUTE, l, ACT_##id)
    const struct layer_shape *s = &m->shape.layer;
    const struct extent e = extent_of(m, PASS_TRAIN);
    const int att_width = s->H * s->D;

    zero_begin_gradients(&m->zero, unit_of_layer(&m->table, l));
    zero_use(&m->zero, PASS_RECOMPUTE, unit_of_layer(&m->table, l));
    if (next_backward_layer(m, l) >= 0)
        zero_prefetch(&m->zero, PASS_RECOMPUTE, unit_of_layer(&m->table, next_backward_layer(m, l)));
    phase(m, "backward", l, "mlp projection");
    const floatX *dproj = d_projection(m, l, SLOT_D_MLP_PROJ, DROPOUT_MLP_PROJECTION);
    floatX *dact = d_buffer(m, l, SLOT_D_ACT, s->F);
    linear_backward(m, l, dact, dproj, (const floatX *)ACT(ACT), PARAM_FCPROJ_W, PARAM_FCPROJ_B, s->C, s->F);

    phase(m, "backward", l, "activation");
    dact = d_buffer(m, l, SLOT_D_ACT, s->F);
    const floatX *fc = (const floatX *)ACT(FC);
    // dfc overwrites dact, unless a gated activation makes it twice as wide.
    const enum slot slot_dfc = s->gated ? SLOT_D_FC : SLOT_D_ACT;
    floatX *dfc = d_buffer(m, l, slot_dfc, fc_width(s));
    RUN(m, mlp_activation_backward(dfc, dact, fc, e.N, &m->shape, m->dev));

    phase(m, "backward", l, "fc");
    dfc = d_buffer(m, l, slot_dfc, fc_width(s));
    floatX *dnorm2 = d_buffer(m, l, SLOT_D_NORM2, s->C);
    linear_backward(m, l, dnorm2, dfc, (const floatX *)ACT(NORM2), PARAM_FC_W, PARAM_FC_B, fc_width(s), s->C);

    phase(m, "backward", l, "norm 2");
    dnorm2 = d_buffer(m, l, SLOT_D_NORM2, s->C);
    norm_gradient(m, l, d_residual(m), dnorm2, (const floatX *)ACT(MID), (const float *)ACT(NORM2_STATS), PARAM_LN2_W,
                  PARAM_LN2_B);

    phase(m, "backward", l, "attention projection");
    dproj = d_projection(m, l, SLOT_D_ATT_PROJ, DROPOUT_ATTENTION_PROJECTION);
    floatX *datt = d_buffer(m, l, SLOT_D_ATT, att_width);
    linear_backward(m, l, datt, dproj, (const floatX *)ACT(ATT), PARAM_ATTPROJ_W, PARAM_ATTPROJ_B, s->C, att_width);

    phase(m, "backward", l, "attention");
    datt = d_buffer(m, l, SLOT_D_ATT, att_width);
    floatX *dqkv = d_buffer(m, l, SLOT_D_QKV, qkv_width(s));
    const floatX *qkv = (const floatX *)ACT(QKV), *att = (const floatX *)ACT(ATT);
    const void *saved = ACT(SOFTMAX);
    const struct attention_shape shape = attention_shape_of(&m->shape.layer, e.B, e.T);
    const struct dropout dropout = dropout_of(m, m->config.attention_dropout, l, DROPOUT_ATTENTION);
    struct attention_backward_options options;
    options.rotary = uses_rope(&m->shape) ? m->rope : NULL;
    options.any_order = !m->config.deterministic_mode;
    void *ws = workspace(m, attention_backward_workspace_bytes(m->backend, shape, m->dev));
    RUN(m, attention_backward(dqkv, datt, qkv, att, saved, m->backend, shape, dropout, options, ws, m->dev));

    phase(m, "backward", l, "qkv");
    dqkv = d_buffer(m, l, SLOT_D_QKV, qkv_width(s));
    floatX *dnorm1 = d_buffer(m, l, SLOT_D_NORM1, s->C);
    linear_backward(m, l, dnorm1, dqkv, (const floatX *)ACT(NORM1), PARAM_QKV_W, PARAM_QKV_B, qkv_width(s), s->C);

    phase(m, "backward", l, "norm 1");
    dnorm1 = d_buffer(m, l, SLOT_D_NORM1, s->C);
    const floatX *x = (const floatX *)activation(m, PASS_RECOMPUTE, l - 1, ACT_OUT);
    norm_gradient(m, l, d_residual(m), dnorm1, x, (const float *)ACT(NORM1_STATS), PARAM_LN1_W, PARAM_LN1_B);
#undef ACT
}

// ---- Embedding and head ----

// Uploads n tokens by way of pinned memory, so that the caller may reuse `from` at once.
static void upload_tokens(struct gpt *m, int32_t *to, int32_t *pinned, const int32_t *from, int64_t n) {
    if (from) // planning passes none, which gcc would warn of
        memcpy(pinned, from, (size_t)n * sizeof *to);
    device_upload(to, pinned, (size_t)n * sizeof *to, m->dev);
}
// Uploads a batch of (B, T) inputs, and beside them (B, T) targets, or (B) positions of new tokens; nothing in a
// prefill. Two can be in flight; a third waits for the first.
static void upload_batch(struct gpt *m, enum pass pass, const int32_t *inputs, const int32_t *beside) {
    const int64_t N = extent_of(m, pass).N;
    const int slot = (int)(m->batches % 2);
    phase(m, pass_name(pass), -1, "batch");
    int32_t *pinned = m->host_batches + (int64_t)slot * 2 * m->host_batch_tokens;
    int32_t *tokens = token_buffer(m, pass, SLOT_TOKENS);
    RUN(m, device_event_wait(m->dev, EVENT_BATCH + slot));
    RUN(m, upload_tokens(m, tokens, pinned, inputs, N));
    if (pass != PASS_PREFILL) {
        int32_t *to = token_buffer(m, pass, pass == PASS_GENERATE ? SLOT_POSITIONS : SLOT_TARGETS);
        RUN(m, upload_tokens(m, to, pinned + m->host_batch_tokens, beside, N));
    }
    RUN(m, device_event_record(m->dev, EVENT_BATCH + slot));
    if (!m->timeline.planning)
        m->batches++;
}

static void embed(struct gpt *m, enum pass pass) {
    const struct extent e = extent_of(m, pass);
    zero_use(&m->zero, pass, unit_of_embeddings(&m->table));
    phase(m, pass_name(pass), -1, "embedding");
    zero_prefetch(&m->zero, pass, unit_of_layer(&m->table, 0));
    const floatX *wte = param(m, pass, -1, PARAM_WTE), *wpe = param(m, pass, -1, PARAM_WPE);
    const int32_t *tokens = token_buffer(m, pass, SLOT_TOKENS);
    if (!generates(pass))
        timeline_touch(token_buffer(m, pass, SLOT_TARGETS));
    const int32_t *starts = starts_of(m, pass);
    floatX *out = (floatX *)activation(m, pass, -1, ACT_OUT);
    RUN(m, embedding_forward(out, tokens, wte, wpe, starts, e.B, e.T, m->shape.layer.C,
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
    const int32_t *targets = token_buffer(m, pass, SLOT_TARGETS);
    const floatX *w = param(m, head_pass(m, pass), -1, weight);
    void *ws = workspace(m, head_workspace_bytes(m, pass));
    MATMUL(m, matmul_forward(logits, lnf + row, w, NULL, rows, Vp, C, ws, m->dev));
    RUN(m, cross_entropy(losses + first, logits, targets + first, dloss, rows, m->shape.V, Vp, pass == PASS_TRAIN,
                         m->dev));
    if (pass != PASS_TRAIN)
        return;

    phase(m, "head", -1, "gradients");
    logits = logits_buffer(m, pass, m->chunk);
    lnf = final_norm_buffer(m, pass);
    floatX *dlnf = d_buffer(m, -1, SLOT_D_LNF, C);
    w = param(m, head_pass(m, pass), -1, weight);
    float *dw = grad(m, -1, weight);
    ws = workspace(m, head_workspace_bytes(m, pass));
    MATMUL(m, matmul_backward_weight(dw, NULL, logits, lnf + row, rows, Vp, C, ws, m->dev));
    MATMUL(m, matmul_backward_input(dlnf + row, logits, w, rows, Vp, C, ws, m->dev));
}

// Writes the mean loss of all tokens into results->loss and, in training, the gradient of the residual stream. Logits
// are materialised for one chunk of tokens at a time.
static void head(struct gpt *m, enum pass pass, float dloss) {
    const int64_t N = extent_of(m, pass).N;
    zero_use(&m->zero, head_pass(m, pass), head_unit(m));
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
    if (pass == PASS_TRAIN)
        timeline_touch(d_buffer(m, -1, SLOT_D_LNF, m->shape.layer.C));
    const int chunk_phase = m->timeline.phase;
    for (int64_t first = 0; first < (m->timeline.planning ? 1 : N); first += m->chunk) {
        m->timeline.phase = chunk_phase;
        head_chunk(m, pass, first, N - first < m->chunk ? N - first : m->chunk, dloss);
    }
    phase(m, "head", -1, "final norm");
    timeline_touch(final_norm_buffer(m, pass));
    timeline_touch(token_buffer(m, pass, SLOT_TARGETS));
    const float *losses = losses_buffer(m, pass);
    RUN(m, losses_sum(&m->results->loss, losses, N, 1.0 / (double)N, m->dev));
    if (pass == PASS_TRAIN) {
        const floatX *dlnf = d_buffer(m, -1, SLOT_D_LNF, m->shape.layer.C);
        floatX *dres = d_residual(m);
        RUN(m, device_zero(dres, (size_t)N * m->shape.layer.C * sizeof *dres, m->dev));
        const floatX *x = (const floatX *)activation(m, pass, m->shape.L - 1, ACT_OUT);
        norm_gradient(m, -1, dres, dlnf, x, final_norm_stats(m, pass), PARAM_LNF_W, PARAM_LNF_B);
        zero_prefetch(&m->zero, PASS_RECOMPUTE, unit_of_layer(&m->table, next_backward_layer(m, m->shape.L)));
        zero_reduce(&m->zero, unit_of_head(), m->last_micro_step);
    }
}

// ---- The step ----

static void embedding_gradients(struct gpt *m) {
    const struct extent e = extent_of(m, PASS_TRAIN);
    const int unit = unit_of_embeddings(&m->table);
    if (!m->shape.tied)
        zero_begin_gradients(&m->zero, unit);
    phase(m, "backward", -1, "embedding");
    float *dwte = grad(m, -1, PARAM_WTE), *dwpe = grad(m, -1, PARAM_WPE);
    const floatX *dres = d_residual(m);
    const int32_t *tokens = token_buffer(m, PASS_TRAIN, SLOT_TOKENS);
    void *ws = workspace(m, embedding_backward_workspace_bytes(e.B, e.T));
    RUN(m, embedding_backward(dwte, dwpe, dres, tokens, e.B, e.T, m->shape.layer.C,
                              dropout_of(m, m->config.hidden_dropout, 0, DROPOUT_EMBEDDING), ws, m->dev));
    zero_reduce(&m->zero, unit, m->last_micro_step);
}

// The work of a micro-step that never changes, and so can be recorded: forward and backward of scale times the loss.
static void forward_backward(struct gpt *m, double scale) {
    const struct layer_shape *s = &m->shape.layer;
    const int L = m->shape.L;
    embed(m, PASS_TRAIN);
    for (int l = 0; l < L; l++)
        block_forward(m, l, ACT_ALL, PASS_TRAIN);
    head(m, PASS_TRAIN, (float)(scale / (double)extent_of(m, PASS_TRAIN).N));
    int reduced = unit_of_head(); // unit whose reduction is in flight while the next unit's gradients are computed
    for (int l = L - 1; l >= 0; l--) {
        if (policy_is_group_last(&m->policy, l))
            for (int k = m->policy.group_first[l]; k <= l; k++)
                block_forward(m, k, policy_missing(&m->policy, k, s), PASS_RECOMPUTE);
        block_backward(m, l);
        zero_reduce(&m->zero, unit_of_layer(&m->table, l), m->last_micro_step);
        zero_add_reduced(&m->zero, reduced);
        reduced = unit_of_layer(&m->table, l);
    }
    embedding_gradients(m);
    zero_add_reduced(&m->zero, reduced);
    zero_add_reduced(&m->zero, unit_of_embeddings(&m->table));
}

// Whether micro-step `index` of a step starts or waits for collectives, which can't be part of a graph.
static bool communicates(const struct gpt *m, int index) {
    const struct shards *s = &m->zero.shards;
    return s->ranks > 1 && (shards_gradients(s) || m->last_micro_step || (shards_optimizer(s) && index == 0));
}

// forward_backward as a graph: recorded once, then enqueued by one call. Not recorded are the first micro-step, since
// the libraries' first calls can't be, and one that is watched phase by phase.
static void forward_backward_recorded(struct gpt *m, int index, double scale) {
    const bool watched = m->timeline.planning || TIMELINE_IS_WATCHED;
    if (!DEVICE_HAS_GRAPHS || !m->config.cuda_graphs || !m->warm || watched || communicates(m, index)) {
        forward_backward(m, scale);
        m->warm = !m->timeline.planning;
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

// Enqueues forward and backward of micro-batch `index` of a step, (B, T) inputs and targets in host memory. Gradients
// of `scale` times the mean loss are added to the gradient buffer.
static void gpt_micro_step(struct gpt *m, int index, const int32_t *inputs, const int32_t *targets, double scale) {
    region(m, REGION_MICRO_STEP);
    m->dropout = true;
    m->last_micro_step = index == m->micro_steps - 1;
    upload_batch(m, PASS_TRAIN, inputs, targets);
    // Counted over all ranks' micro-batches, so that a sample's dropout does not depend on the rank that trains on it.
    RUN(m, dropout_step_set(&m->results->micro_step, m->micro_step + (uint64_t)m->zero.shards.rank, m->dev));
    forward_backward_recorded(m, index, scale);
    RUN(m, device_copy(&m->losses[index], &m->results->loss, sizeof *m->losses, m->dev));
    m->dropout = false;
    m->micro_step += (uint64_t)m->zero.shards.ranks;
}

static void gpt_zero_gradients(struct gpt *m) {
    const int64_t n = shards_elements(&m->zero.shards, shards_gradients(&m->zero.shards));
    device_zero(m->zero.grads, (size_t)n * sizeof *m->zero.grads, m->dev);
}

// Fills in this rank's report and, with several ranks, all-gathers the reports.
static void gather_reports(struct gpt *m, void *ws) {
    double *row = m->reports + m->zero.shards.rank * report_width(m);
    optimizer_sum_squares(&m->optimizer, &row[REPORT_SQUARES], ws);
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

// Enqueues update `step` (from 1) of AdamW with learning rate lr, the gradients clipped to --clip-grad. Where a loss or
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
    region(m, REGION_UPDATE);
    phase(m, "update", -1, "gradient norm");
    void *ws = workspace(m, sum_of_squares_workspace_bytes());
    RUN(m, gather_reports(m, ws));
    RUN(m, gradient_check(&m->results->check, m->reports, m->zero.shards.ranks, report_width(m), m->micro_steps,
                          c->clip_grad, m->dev));
    phase(m, "update", -1, "adamw");
    RUN(m, optimizer_update(&m->optimizer, adamw, &m->results->check));
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

// The mean loss of a (B, T) batch in host memory, without gradients and dropout. Waits for the device.
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
