// The model's state: struct gpt, and functions that return its buffers by pass, layer and slot. Layer l's input is the
// OUT of layer l - 1, and layer -1 is the embedding. The same code plans and runs (model/timeline.cuh): a phase first
// gets all its buffers, which are NULL when planning except in a dry run, then runs its ops by RUN.
#pragma once
#include "attention.cuh"             // enum attention_backend
#include "config/config.h"           // struct config
#include "kernels/device_queue.cuh"  // struct work_graph
#include "kernels/loss.cuh"          // struct loss_sum
#include "kernels/work_segments.cuh" // struct work_segments
#include "model/fp8.cuh"             // struct fp8_state
#include "model/frozen_weights.cuh"  // struct frozen_weights
#include "model/parameters.cuh"      // struct parameters, struct model_shape
#include "model/timeline.cuh"        // phases and their buffers
#include "optimizer/copy.cuh"        // struct optimizer_copy
#include "optimizer/optimizer.cuh"   // struct optimizer
#include "recompute.cuh"             // struct recompute_policy
#include "zero/gradients.cuh"        // struct zero: parameters and gradients, whole or sharded

// Numbers for device_event_record; add slot 0 or 1 to BATCH and RESULTS. START: a step begins, with none in flight.
enum device_event { EVENT_BATCH = 0, EVENT_RESULTS = 2, EVENT_START = 4 };

// The gradients of activations. Columns: id; name in plans. D_LNF and D_RESIDUAL are the whole model's (layer -1).
#define GRADIENT_SLOTS(ROW)                                                                                            \
    ROW(D_MLP_ADDED, "d mlp addend")    /* before residual dropout and multiplier */                                   \
    ROW(D_MLP_PROJ, "d mlp projection") /* before the norm after it */                                                 \
    ROW(D_ACT, "d activation")                                                                                         \
    ROW(D_FC, "d fc")                                                                                                  \
    ROW(D_NORM2, "d norm 2")                                                                                           \
    ROW(D_ATT_ADDED, "d attention addend")                                                                             \
    ROW(D_ATT_PROJ, "d attention projection")                                                                          \
    ROW(D_ATT, "d attention")                                                                                          \
    ROW(D_QKV, "d qkv")                                                                                                \
    ROW(D_NORM1, "d norm 1")                                                                                           \
    ROW(D_LNF, "d final norm")                                                                                         \
    ROW(D_RESIDUAL, "d residual") /* of the residual stream, from the head down to the embedding */

static const char *const gradient_slot_names[] = {
#define NAME_ROW(id, name) name,
    GRADIENT_SLOTS(NAME_ROW)
#undef NAME_ROW
};

// The buffers of an FP8 linear layer, besides kept activations. Columns: id; category in plans. COLUMNS are transposed.
#define FP8_BUFFER_ROWS(ROW)                                                                                           \
    ROW(VALUES, "fp8 sources")      /* the input in floatX, until it is cast */                                        \
    ROW(ROWS, "fp8 row form")       /* the input */                                                                    \
    ROW(COLUMNS, "fp8 column form") /* the input, where it is kept in floatX */                                        \
    ROW(WEIGHT_ROWS, "fp8 weight")                                                                                     \
    ROW(WEIGHT_COLUMNS, "fp8 weight")                                                                                  \
    ROW(GRADIENT_ROWS, "fp8 gradients") /* of the output */                                                            \
    ROW(GRADIENT_COLUMNS, "fp8 gradients")
enum fp8_buffer {
#define ENUM_ROW(id, category) FP8_##id,
    FP8_BUFFER_ROWS(ENUM_ROW)
#undef ENUM_ROW
        FP8_BUFFERS
};
// The buffers of FP8 attention, besides the activations that it keeps in FP8. Columns: id; category; name in plans.
#define FP8_ATTENTION_BUFFER_ROWS(ROW)                                                                                 \
    ROW(VALUES, "fp8 sources", "q, k and v") /* in floatX, until they are cast */                                      \
    ROW(DOUT, "fp8 attention", "d attention in fp8")
enum fp8_attention_buffer {
#define ENUM_ROW(id, category, name) FP8_ATTENTION_BUFFER_##id,
    FP8_ATTENTION_BUFFER_ROWS(ENUM_ROW)
#undef ENUM_ROW
        FP8_ATTENTION_BUFFERS
};

// Numbers of buffers: a layer's, besides its activations, whose numbers are below ACT_COUNT, and the whole model's.
enum slot {
    SLOT_BEFORE_GRADIENTS = ACT_COUNT - 1,
#define ENUM_ROW(id, name) SLOT_##id,
    GRADIENT_SLOTS(ENUM_ROW)
#undef ENUM_ROW
        SLOT_PARALLEL_SUM, // residual stream and attention's branch, which the MLP's joins
    SLOT_KEYS,             // the KV cache
    SLOT_VALUES,
    SLOT_TOKENS,
    SLOT_TARGETS,
    SLOT_POSITIONS,       // (B) generation: of the new tokens; prefill: the lengths of the prompts
    SLOT_DOCUMENT_STARTS, // (B, T) the row of its sequence at which a token's document begins
    SLOT_FIRST_KEY,       // the spans of kernels/attention/spans.cuh, of layers without a window
    SLOT_LAST_QUERY,
    SLOT_WINDOW_FIRST_KEY, // of layers with the window
    SLOT_WINDOW_LAST_QUERY,
    SLOT_LNF,
    SLOT_LAST_ROWS, // (B, C) prefill: LNF's rows of the prompts' last tokens
    SLOT_LNF_STATS,
    SLOT_LOGITS,
    SLOT_LOSSES,
    SLOT_LARGEST, // (N) evaluation that scores tasks: whether the target's logit is the largest
    SLOT_FP8,     // the buffers of linear layers in FP8: enum fp8_buffer, by enum linear
    SLOT_FP8_ATTENTION = SLOT_FP8 + FP8_BUFFERS * LINEAR_COUNT, // enum fp8_attention_buffer
    SLOT_HOST =
        SLOT_FP8_ATTENTION + FP8_ATTENTION_BUFFERS, // offloaded activations in host memory, by enum activation_id
    SLOT_RANGE = SLOT_HOST + ACT_COUNT, // what backward recomputes of a range of the MLP, by enum activation_id
    SLOT_BIAS_SUMS =
        SLOT_RANGE + ACT_COUNT, // partial sums of bias gradients (model/bias_gradients.cuh), by enum linear
    SLOT_COUNT = SLOT_BIAS_SUMS + LINEAR_COUNT
};

// The results of a step, in the device's memory until the host fetches them, up to a step later.
struct step_results {
    struct gradient_check check;
    struct loss_sum loss; // of the last micro-batch
    uint64_t micro_step;  // counted over the run: the counter of the dropout masks
};

// Returns the mean loss of the targets that count; 0 if none counts.
static double loss_mean(struct loss_sum loss) { return loss.count > 0 ? loss.sum / loss.count : 0; }

struct layer_kind {
    bool windowed, rotary;
};

// A batch in host memory; it may be reused as soon as the function that takes it returns.
struct batch {
    const int32_t *inputs;          // (B, T)
    const int32_t *targets;         // (B, T); a target below 0 is not counted
    const int32_t *document_starts; // (B, T) the row at which a token's document begins; NULL: all 0
};
// Returns a batch that points to `inputs` and `targets`, (B, T), and in which each sequence is one document.
static struct batch batch_of(const int32_t *inputs, const int32_t *targets) {
    const struct batch batch = {inputs, targets, NULL};
    return batch;
}

// An evaluation writes these scores of each target to the caller's host memory.
struct token_scores {
    float *losses;    // (B, T); 0 where the target is not counted
    int32_t *largest; // (B, T) whether its logit is the largest, and the first of equal ones
};

// Kinds of micro-steps, as sums of these bits. All micro-steps of a kind enqueue the same work. MICRO_STEP_ADDS: adds
// to the gradients of the step's earlier micro-steps. MICRO_STEP_LAST: does what only a step's last micro-step does.
enum { MICRO_STEP_ADDS = 1, MICRO_STEP_LAST = 2, MICRO_STEP_KINDS = 4 };
struct micro_step_graph {
    struct work_graph work;
    struct work_segments segments;
    bool warm; // one has run, and with it the libraries' first calls, which can't be recorded
};

struct micro_steps {
    int most;            // of a step, on each rank
    int of_step;         // of this step: fewer while the batch warms up
    uint64_t micro_step; // micro-batches so far in the run, over all ranks
    bool is_last;        // the current one is its step's last: gradients are reduced
    bool dropout;        // on in training, off in evaluation and generation
    struct micro_step_graph graphs[MICRO_STEP_KINDS];
    double graphs_scale; // scale of the loss that the graphs were recorded with
};
// The buffers by which a step moves data between host and device. Pinned host memory is double-buffered.
struct step_io {
    int results_id, reports_id, host_batches_id, host_results_id, host_reports_id, host_requests_id; // in the plan
    struct step_results *results;                                                                    // device memory
    double *reports;         // (ranks, report_width) device memory: each rank's report of a step
    struct loss_sum *losses; // (micro_steps.most) device memory: the losses within this rank's report
    int32_t *host_batches;   // (2, 3, host_batch_tokens): batch; inputs, targets, document starts
    int64_t host_batch_tokens;
    unsigned batches;                  // uploaded so far
    unsigned updates;                  // enqueued so far
    struct step_results *host_results; // (2)
    double *host_reports;              // (2, ranks, report_width)
    int request;           // what this rank asks of all ranks with the next update, in the caller's code; 0: nothing
    double *host_requests; // (2) requests in flight
};
struct generation {
    int sequences;     // at a time
    int prompt_tokens; // of the longest prompt
    int decode_tokens; // capacity of the KV cache, tokens of a sequence
};
struct rotary {
    int id, local_id;
    const float *table; // (T, D) cosines and sines
    const float *local; // (T, D) of windowed layers; NULL: `table`
};
// Ids of the whole model's buffers in the plan, -1: none.
struct flat_ids {
    int params, frozen, stored, grads, scratch;
};

struct gpt {
    struct config config;
    struct model_shape shape;
    struct parameters table;
    struct recompute_policy policy;
    enum attention_backend backend;
    struct device *dev;
    struct timeline timeline;
    int *slots; // (PASS_COUNT, L + 1, SLOT_COUNT) buffer ids, -1: none
    struct flat_ids ids;

    struct zero zero;             // the trained parameters and their gradients
    struct zero frozen;           // the frozen parameters in floatX
    struct frozen_weights stored; // the frozen weights in FP8 or NF4
    int lowest_trained; // the lowest layer with a trained tensor; -1: the embeddings have one; L: only the head has
    struct optimizer optimizer;
    struct muon muon;           // without Muon it has no matrices
    struct optimizer_copy copy; // for checkpoints
    struct fp8_state fp8;

    struct layer_kind *kinds; // (L)
    int window;               // keys that a query of a windowed layer sees; 0: no layer has a window
    struct rotary rotary;
    int64_t loss_chunk; // tokens of a chunk of logits

    bool trains; // has gradients and an optimizer; false: validates and generates only
    bool scores; // an evaluation that also looks whether targets have the largest logits
    struct micro_steps steps;
    struct generation generation;
    struct step_io io;
    uint64_t transfers[TRANSFER_DIRECTIONS]; // tickets of the last activation to the host, and from there; 0: none
};

// Returns the column of a rank's io.request in its report. A report is a row of report_width doubles: the sum of
// squares of the rank's gradients (at REPORT_SQUARES), a struct loss_sum for each micro-batch (from REPORT_LOSSES on),
// the request and, with FP8, counts (FP8_KINDS, FP8_COUNTS) and the amaxes of delayed scales (fp8_delayed_scales).
static int report_request_column(const struct gpt *m) { return REPORT_LOSSES + 2 * m->steps.most; }
static int report_fp8_counts_column(const struct gpt *m) { return report_request_column(m) + 1; }
static int report_fp8_amaxes_column(const struct gpt *m) {
    return report_fp8_counts_column(m) + (fp8_is_on(&m->fp8) ? FP8_KINDS * FP8_COUNTS : 0);
}
// The number of doubles in a rank's report, which the comment on report_request_column lists.
static int report_width(const struct gpt *m) { return report_fp8_amaxes_column(m) + fp8_delayed_scales(&m->fp8).count; }

// ---- Phases and buffers ----

#define RUN(m, op) TIMELINE_RUN(&(m)->timeline, op)
#define MATMUL(m, op) TIMELINE_MATMUL(&(m)->timeline, op) // RUN of a matmul, which benchmarks time apart
#define phase(m, group, layer, op) timeline_phase(&(m)->timeline, group, layer, op)

// Enters a region of the timeline, whose first phase comes next. From here on units' buffers count as empty.
static void region(struct gpt *m, enum region r) {
    timeline_enter_region(&m->timeline, r);
    zero_forget_buffers(&m->zero);
    zero_forget_buffers(&m->frozen);
}
// Returns buffer `slot` (enum slot or enum activation_id) of a layer, or of the whole model for -1, live in this phase;
// NULL when planning. Only the first call for a buffer, when planning, reads bytes, category and name.
static void *buffer(struct gpt *m, enum pass pass, int layer, int slot, size_t bytes, const char *category,
                    const char *name) {
    int *id = &m->slots[((int)pass * (m->shape.L + 1) + layer + 1) * SLOT_COUNT + slot];
    return timeline_buffer(&m->timeline, id, bytes, category, name, layer);
}
static size_t larger(size_t a, size_t b) { return a > b ? a : b; }
// Returns scratch memory that all calls in this phase share (timeline_workspace); NULL for 0 bytes, and when planning.
static void *workspace(struct gpt *m, size_t bytes) { return timeline_workspace(&m->timeline, bytes); }

static bool generates(enum pass pass) { return pass == PASS_PREFILL || pass == PASS_GENERATE; }

struct extent {
    int B, T;
    int64_t N; // B * T
};
// Returns the size of a pass's input on this rank. Prompts are padded to the longest; in PASS_GENERATE T is 1.
static struct extent extent_of(const struct gpt *m, enum pass pass) {
    const int B = generates(pass) ? m->generation.sequences : m->config.training.micro_batch_size;
    const int T = !generates(pass)       ? m->config.model.seq_length
                  : pass == PASS_PREFILL ? m->generation.prompt_tokens
                                         : 1;
    const struct extent e = {B, T, (int64_t)B * T};
    return e;
}

// Whether the linear layers of layer l multiply FP8 matrices in a pass: only in training and its backward.
static bool is_quantized(const struct gpt *m, enum pass pass, int l) {
    return (pass == PASS_TRAIN || pass == PASS_BACKWARD) && fp8_has_layer(&m->fp8, l);
}
// Whether layer l's attention has q, k, v and output in FP8; its backward multiplies FP8 only with FP8_ATTENTION_FULL.
static bool attends_in_fp8(const struct gpt *m, enum pass pass, int l) {
    return m->fp8.attention != FP8_ATTENTION_NONE && is_quantized(m, pass, l);
}

// ---- Activations ----

// Returns the set of layer l's activations that its policy keeps from forward to backward. l -1: the embedding.
static uint32_t kept_activations(const struct gpt *m, int l) { return l < 0 ? BIT(OUT) : m->policy.kept[l]; }
// Returns the lowest layer whose input backward reads: the first of the lowest group it reaches. L if it reaches none.
static int lowest_backward_layer(const struct gpt *m) {
    if (m->lowest_trained <= 0)
        return 0;
    return m->lowest_trained < m->shape.L ? m->policy.group_first[m->lowest_trained] : m->shape.L;
}
// Returns the layer whose parameters backward needs after layer l's backward, or after the head's if l is L: l - 1 or,
// if a recomputed group ends with l - 1, the group's first recomputed layer. Returns -1 if backward needs none.
static int next_backward_layer(const struct gpt *m, int l) {
    const int below = l - 1;
    if (below < m->lowest_trained)
        return -1;
    if (below < 0 || !policy_is_group_last(&m->policy, below))
        return below;
    for (int k = m->policy.group_first[below]; k < below; k++)
        if (policy_recomputed(&m->policy, k, &m->shape.layer))
            return k;
    return below;
}

// Returns which of layer l's (-1: the embedding's) kept activations are on the host until backward: OUT if layer l + 1
// is offloaded, the others if layer l is. The last group's, and those that backward doesn't read, are never there.
static uint32_t offloaded_activations(const struct gpt *m, int l) {
    const int wanted = m->config.states.cpu_offloading_num_layers, last_group = m->policy.group_first[m->shape.L - 1];
    const int layers = wanted < last_group ? wanted : last_group;
    const int first = lowest_backward_layer(m);
    if (l < first - 1)
        return 0;
    const uint32_t away = (l < layers ? ACT_ALL & ~BIT(OUT) : 0) | (l + 1 < layers ? BIT(OUT) : 0);
    return kept_activations(m, l) & away & (l < first ? BIT(OUT) : ACT_ALL);
}
// Returns the row of recompute.cuh's table for an activation of layer l in a pass. Where the layer's linear layers
// multiply FP8 in that pass (is_quantized), the row describes the activation as it is kept in FP8.
static struct activation_row activation_row_of(const struct gpt *m, enum pass pass, int l, enum activation_id id) {
    const struct layer_shape s = is_quantized(m, pass, l) ? layer_shape_at(&m->shape.layer, l) : m->shape.layer;
    return activation_row(id, &s);
}
// The number of bytes of a whole activation: of all tokens of a pass. `row` is its row in recompute.cuh's table.
static size_t activation_row_bytes(const struct gpt *m, enum pass pass, const struct activation_row *row) {
    return (size_t)row->bytes_per_token * (size_t)extent_of(m, pass).N;
}
// Returns the memory of an activation, live in this phase, whatever its elements are; NULL when planning. An activation
// that is dropped or offloaded after forward has a second buffer in PASS_BACKWARD.
static void *activation_memory(struct gpt *m, enum pass pass, int l, enum activation_id id) {
    const uint32_t kept = kept_activations(m, l), offloaded = offloaded_activations(m, l);
    if (pass == PASS_BACKWARD && kept & ~offloaded & (1u << id))
        pass = PASS_TRAIN;
    if (!m->timeline.planning)
        return buffer(m, pass, l, id, 0, NULL, NULL);
    const struct activation_row row = activation_row_of(m, pass, l, id);
    char category[64];
    if (pass == PASS_TRAIN)
        snprintf(category, sizeof category, "activations: %s", row.category);
    else if (pass == PASS_BACKWARD)
        snprintf(category, sizeof category, "%s activations", offloaded & (1u << id) ? "offloaded" : "recomputed");
    else
        snprintf(category, sizeof category, "%s", forward_group_name(pass));
    return buffer(m, pass, l, id, activation_row_bytes(m, pass, &row), category, row.name);
}
// Aborts, when planning, unless an activation has elements of the kind that the caller is going to read.
static void activation_expect(const struct gpt *m, enum pass pass, int l, enum activation_id id,
                              enum elements elements) {
    if (!m->timeline.planning)
        return;
    const struct activation_row row = activation_row_of(m, pass, l, id);
    const bool may_be_floatx = (row.elements == ELEMENTS_INPUT && !is_quantized(m, pass, l)) ||
                               (row.elements == ELEMENTS_ATTENTION && !attends_in_fp8(m, pass, l));
    const enum elements held = may_be_floatx ? ELEMENTS_FLOATX : row.elements;
    if (held != elements) {
        fprintf(stderr,
                "train_gpt: internal error: activation '%s' of layer %d is read as %s, which it does not hold\n",
                row.name, l, elements == ELEMENTS_FP32 ? "fp32" : FLOATX_NAME);
        abort();
    }
}
// Returns an activation, (N, width), live in this phase; NULL when planning. Planning aborts if it isn't in floatX.
static floatX *activation(struct gpt *m, enum pass pass, int l, enum activation_id id) {
    activation_expect(m, pass, l, id, ELEMENTS_FLOATX);
    return (floatX *)activation_memory(m, pass, l, id);
}
// Returns a norm's statistics in fp32, live in this phase; NULL when planning. They are (norm_statistics, N) or, for
// the norm of q and k, (N, qk_statistics). Planning aborts if activation `id` is not in fp32.
static float *activation_stats(struct gpt *m, enum pass pass, int l, enum activation_id id) {
    activation_expect(m, pass, l, id, ELEMENTS_FP32);
    return (float *)activation_memory(m, pass, l, id);
}
// Returns the host memory of an offloaded activation, live in this phase; NULL when planning.
static void *host_activation(struct gpt *m, int l, enum activation_id id) {
    const struct activation_row row = activation_row_of(m, PASS_TRAIN, l, id);
    int *slot = &m->slots[((int)PASS_TRAIN * (m->shape.L + 1) + l + 1) * SLOT_COUNT + SLOT_HOST + (int)id];
    return timeline_host_buffer(&m->timeline, slot, activation_row_bytes(m, PASS_TRAIN, &row), "offloaded activations",
                                row.name, l);
}
// Returns layer l's buffer of an activation's gradient, (N, width), live in this phase; NULL when planning. N is the
// number of a micro-batch's tokens. `slot` is one of SLOT_D_...; for the model's D_LNF and D_RESIDUAL l is -1.
static floatX *d_buffer(struct gpt *m, int l, enum slot slot, int64_t width) {
    const size_t bytes = (size_t)extent_of(m, PASS_TRAIN).N * (size_t)width * sizeof(floatX);
    return (floatX *)buffer(m, PASS_TRAIN, l, slot, bytes, "gradients of activations",
                            gradient_slot_names[slot - ACT_COUNT]);
}
// Returns the residual stream's gradient, (N, C), which all layers share, live in this phase; NULL when planning.
static floatX *d_residual(struct gpt *m) { return d_buffer(m, -1, SLOT_D_RESIDUAL, m->shape.layer.C); }

// Returns a parameter of layer l, or of the whole model for -1, live in this phase; NULL if absent or when planning.
// Call use_unit for its unit before. For a linear weight, which may be stored in FP8 or NF4, call linear_weight.
static floatX *param(struct gpt *m, enum pass pass, int l, enum parameter id) {
    const struct tensor *t = parameters_find(&m->table, l, id);
    return t ? zero_parameter(t->frozen ? &m->frozen : &m->zero, pass, t) : NULL;
}
// Whether the model has this parameter, of layer l or, for -1, of the whole model, and trains it.
static bool is_trained(const struct gpt *m, int l, enum parameter id) {
    const struct tensor *t = parameters_find(&m->table, l, id);
    return t && !t->frozen;
}
// Returns where a parameter's fp32 gradient goes, live in this phase; NULL if it is frozen or absent, and when
// planning. If accumulates(m), add to it, else overwrite it. Call zero_begin_gradients for the parameter's unit before.
static float *grad(struct gpt *m, int l, enum parameter id) {
    return is_trained(m, l, id) ? zero_gradient(&m->zero, parameters_find(&m->table, l, id)) : NULL;
}
// Makes a unit's parameters, trained and frozen, ready for later device work. May open phases. Every rank calls this.
static void use_unit(struct gpt *m, enum pass pass, int unit) {
    zero_use(&m->zero, pass, unit);
    zero_use(&m->frozen, pass, unit);
}
// Begins in this phase to bring in a unit's parameters, for which use_unit then waits. Every rank calls this.
static void prefetch_unit(struct gpt *m, enum pass pass, int unit) {
    zero_prefetch(&m->zero, pass, unit);
    zero_prefetch(&m->frozen, pass, unit);
}
// Whether backward adds to the values in a gradient's memory. If not, as in a first micro-step, it overwrites them.
static bool accumulates(const struct gpt *m) { return zero_adds(&m->zero); }

// Returns dropout with probability p, or 0 outside training steps. `use`, enum dropout_use or LoRA's, selects the mask.
static struct dropout dropout_of(const struct gpt *m, double p, int layer, int use) {
    const struct dropout d = {m->steps.dropout ? (float)p : 0,
                              m->config.training.seed,
                              0,
                              (uint32_t)layer,
                              (uint32_t)use,
                              m->io.results ? &m->io.results->micro_step : NULL};
    return d;
}
// Returns the factor by which attention's and the MLP's outputs are multiplied before they join the residual stream.
static float residual_scale(const struct gpt *m) { return (float)m->config.model.residual_multiplier; }
// Whether a branch, after its last norm if any, joins the stream unmultiplied and, in training, without dropout.
static bool branch_is_added_unscaled(const struct gpt *m) {
    return (!m->steps.dropout || m->config.model.hidden_dropout == 0) && residual_scale(m) == 1;
}
// Returns the embedding's multiplier, rounded to floatX, as Hugging Face rounds Gemma's.
static float embedding_scale(const struct gpt *m) {
    return to_float(to_floatX((float)m->config.model.embedding_multiplier));
}
static struct logit_transform logit_transform_of(const struct gpt *m) {
    const struct logit_transform transform = {(float)m->config.model.logit_multiplier,
                                              (float)m->config.model.final_logit_softcapping};
    return transform;
}
struct norm_weights {
    enum parameter weight, bias;
};
static const struct norm_weights NORM_FINAL = {PARAM_LNF_W, PARAM_LNF_B};
static enum parameter head_weight(const struct gpt *m) { return m->shape.tied ? PARAM_WTE : PARAM_LM_HEAD; }
// Returns the pass whose buffer has the head's weight. In training a tied weight is dropped after the embedding and
// gathered again for the head, into PASS_BACKWARD's buffer, so that it takes no memory while the layers run.
static enum pass head_pass(const struct gpt *m, enum pass pass) {
    return m->shape.tied && pass == PASS_TRAIN ? PASS_BACKWARD : pass;
}
static int unit_with_head_weight(const struct gpt *m) {
    return m->shape.tied ? unit_of_embeddings(&m->table) : unit_of_head();
}

// Returns the final norm's output, (N, C), live in this phase; NULL when planning.
static floatX *final_norm_buffer(struct gpt *m, enum pass pass) {
    return (floatX *)buffer(m, pass, -1, SLOT_LNF, (size_t)extent_of(m, pass).N * m->shape.layer.C * sizeof(floatX),
                            pass == PASS_TRAIN ? "activations: norm" : forward_group_name(pass), "final norm");
}
// Returns the final norm's statistics, (norm_statistics, N), live in this phase; NULL when planning.
static float *final_norm_stats(struct gpt *m, enum pass pass) {
    const size_t floats = (size_t)m->shape.layer.norm_statistics;
    return (float *)buffer(m, pass, -1, SLOT_LNF_STATS, (size_t)extent_of(m, pass).N * floats * sizeof(float),
                           pass == PASS_TRAIN ? "activations: norm" : forward_group_name(pass),
                           "final norm statistics");
}
