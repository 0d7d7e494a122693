// The sequences of a pass: tokens, targets, positions, documents and windows, and the shape of attention over them.
#pragma once
#include "attention.cuh"         // struct attention_shape
#include "kernels/positions.cuh" // struct token_positions
#include "model/state.cuh"       // struct gpt and its buffers
#include <math.h>                // sqrt

// Returns the pass whose tokens, targets and spans a pass reads: backward reads the buffers of PASS_TRAIN.
static enum pass input_pass(enum pass pass) { return pass == PASS_BACKWARD ? PASS_TRAIN : pass; }
// Returns (N) integers, one for each token of a pass, in backward PASS_TRAIN's, live in this phase; NULL when planning.
static int32_t *integer_buffer(struct gpt *m, enum pass pass, enum slot slot, const char *category, const char *name) {
    const size_t bytes = (size_t)extent_of(m, pass).N * sizeof(int32_t);
    return (int32_t *)buffer(m, input_pass(pass), -1, slot, bytes, category, name);
}
// Returns a pass's tokens, (N), live in this phase; backward reads PASS_TRAIN's. NULL when planning.
static int32_t *tokens_buffer(struct gpt *m, enum pass pass) {
    return integer_buffer(m, pass, SLOT_TOKENS, "tokens", "inputs");
}
static int32_t *targets_buffer(struct gpt *m, enum pass pass) {
    return integer_buffer(m, pass, SLOT_TARGETS, "tokens", "targets");
}
// Returns (B) integers, live in this phase: the new tokens' positions, in a prefill prompts' lengths; NULL: planning.
static int32_t *positions_buffer(struct gpt *m, enum pass pass) {
    return (int32_t *)buffer(m, pass, -1, SLOT_POSITIONS, (size_t)m->generation.sequences * sizeof(int32_t), "tokens",
                             pass == PASS_PREFILL ? "lengths" : "positions");
}
// Whether attention is confined to documents: --reset-attention-mask, and when tasks are scored; never in generation.
static bool masks_documents(const struct gpt *m, enum pass pass) {
    return !generates(pass) && (m->config.data.reset_attention_mask || (pass == PASS_EVALUATE && m->scores));
}
// Whether positions begin anew in each document: --reset-position-ids, and when tasks are scored; not in generation.
static bool restarts_positions(const struct gpt *m, enum pass pass) {
    return !generates(pass) && (m->config.data.reset_position_ids || (pass == PASS_EVALUATE && m->scores));
}
static bool has_documents(const struct gpt *m, enum pass pass) {
    return masks_documents(m, pass) || restarts_positions(m, pass);
}
// Returns (N), each token's document's first row in its sequence, live in this phase; NULL: planning, !has_documents.
static int32_t *documents_buffer(struct gpt *m, enum pass pass) {
    return has_documents(m, pass) ? integer_buffer(m, pass, SLOT_DOCUMENT_STARTS, "tokens", "document starts") : NULL;
}
// Returns what makes positions, live in this phase: PASS_GENERATE's own, documents' begins if they restart, or NULLs.
static struct token_positions positions_of(struct gpt *m, enum pass pass) {
    struct token_positions positions = {NULL, NULL};
    if (pass == PASS_GENERATE)
        positions.starts = positions_buffer(m, pass);
    else if (restarts_positions(m, pass))
        positions.document_starts = documents_buffer(m, pass);
    return positions;
}

// Whether layer l has a window shorter than a pass's sequences; never in PASS_GENERATE, whose KV cache is as short.
static bool window_hides_keys(const struct gpt *m, enum pass pass, int l) {
    return m->kinds[l].windowed && extent_of(m, pass).T > m->window;
}
// Whether attention needs spans in a pass: where window_hides_keys (`window`) or documents do not see each other.
static bool has_spans(const struct gpt *m, enum pass pass, bool window) { return window || masks_documents(m, pass); }
struct spans {
    int32_t *first_key, *last_query; // (B, T)
};
// Returns spans, live in this phase, of layers whose window hides keys or not. Called if has_spans. NULL: planning.
static struct spans spans_buffers(struct gpt *m, enum pass pass, bool window) {
    struct spans spans;
    spans.first_key = integer_buffer(m, pass, window ? SLOT_WINDOW_FIRST_KEY : SLOT_FIRST_KEY, "attention spans",
                                     window ? "first keys, window" : "first keys");
    spans.last_query = integer_buffer(m, pass, window ? SLOT_WINDOW_LAST_QUERY : SLOT_LAST_QUERY, "attention spans",
                                      window ? "last queries, window" : "last queries");
    return spans;
}
// Returns the shape of a model's attention, of B sequences of T tokens, by the options: without spans.
static struct attention_shape attention_shape_of(const struct config *c, int B, int T) {
    struct attention_shape shape;
    memset(&shape, 0, sizeof shape);
    shape.B = B;
    shape.T = T;
    shape.num_heads = c->model.num_attention_heads;
    shape.num_query_groups = c->model.num_query_groups;
    shape.head_dim = c->model.kv_channels;
    shape.scale = (float)(c->model.softmax_scale > 0 ? c->model.softmax_scale : 1 / sqrt((double)c->model.kv_channels));
    shape.softcap = (float)c->model.attn_logit_softcapping;
    return shape;
}
// Returns the shape of layer l's attention in a pass; where has_spans, its spans are live in this phase, else NULL.
static struct attention_shape layer_attention_shape(struct gpt *m, enum pass pass, int l) {
    const struct extent e = extent_of(m, pass);
    struct attention_shape shape = attention_shape_of(&m->config, e.B, e.T);
    const bool window = window_hides_keys(m, pass, l);
    if (has_spans(m, pass, window)) {
        const struct spans spans = spans_buffers(m, pass, window);
        shape.first_key = spans.first_key;
        shape.last_query = spans.last_query;
    }
    return shape;
}
// Returns the rotary table (seq_length, D) of layer l, in device memory; NULL: planning, or q and k are not rotated.
static const float *rope_of(const struct gpt *m, int l) {
    if (!m->kinds[l].rotary)
        return NULL;
    return m->kinds[l].windowed && m->rotary.local ? m->rotary.local : m->rotary.table;
}
