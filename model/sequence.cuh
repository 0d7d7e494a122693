// The sequences of a pass: tokens, targets, positions, documents and windows, and the shape of attention over them.
#pragma once
#include "attention.cuh"         // struct attention_shape
#include "kernels/positions.cuh" // struct token_positions
#include "model/state.cuh"       // struct gpt and its buffers
#include <math.h>                // sqrt

// Returns the pass whose buffers of tokens, targets and spans a pass reads: for PASS_BACKWARD that is PASS_TRAIN.
static enum pass input_pass(enum pass pass) { return pass == PASS_BACKWARD ? PASS_TRAIN : pass; }
// Returns a buffer of integers, one a token, (N), of input_pass's pass and live in this phase; NULL when planning.
static int32_t *integer_buffer(struct gpt *m, enum pass pass, enum slot slot, const char *category, const char *name) {
    const size_t bytes = (size_t)extent_of(m, pass).N * sizeof(int32_t);
    return (int32_t *)buffer(m, input_pass(pass), -1, slot, bytes, category, name);
}
// Returns a pass's tokens, (N), live in this phase; NULL when planning. Backward reads PASS_TRAIN's.
static int32_t *tokens_buffer(struct gpt *m, enum pass pass) {
    return integer_buffer(m, pass, SLOT_TOKENS, "tokens", "inputs");
}
static int32_t *targets_buffer(struct gpt *m, enum pass pass) {
    return integer_buffer(m, pass, SLOT_TARGETS, "tokens", "targets");
}
// Returns the new tokens' positions or, in a prefill, prompts' lengths: (B), live in this phase; NULL when planning.
static int32_t *positions_buffer(struct gpt *m, enum pass pass) {
    return (int32_t *)buffer(m, pass, -1, SLOT_POSITIONS, (size_t)m->generation.sequences * sizeof(int32_t), "tokens",
                             pass == PASS_PREFILL ? "lengths" : "positions");
}
// Whether tokens see only their own document: with --reset-attention-mask or when tasks are scored, not in generation.
static bool masks_documents(const struct gpt *m, enum pass pass) {
    return !generates(pass) && (m->config.data.reset_attention_mask || (pass == PASS_EVALUATE && m->scores));
}
// Whether positions begin at 0 in each document: with --reset-position-ids or when tasks are scored, not in generation.
static bool restarts_positions(const struct gpt *m, enum pass pass) {
    return !generates(pass) && (m->config.data.reset_position_ids || (pass == PASS_EVALUATE && m->scores));
}
// Whether a pass needs to know where documents begin, because it masks documents or restarts positions.
static bool has_documents(const struct gpt *m, enum pass pass) {
    return masks_documents(m, pass) || restarts_positions(m, pass);
}
// Returns the index at which each token's document begins, (N), live in this phase; NULL when planning or unneeded.
static int32_t *documents_buffer(struct gpt *m, enum pass pass) {
    return has_documents(m, pass) ? integer_buffer(m, pass, SLOT_DOCUMENT_STARTS, "tokens", "document starts") : NULL;
}
// Returns the starts that tokens' positions count from, live in this phase. Each is NULL when planning or unneeded.
static struct token_positions position_starts_of(struct gpt *m, enum pass pass) {
    struct token_positions positions = {NULL, NULL};
    if (pass == PASS_GENERATE)
        positions.starts = positions_buffer(m, pass);
    else if (restarts_positions(m, pass))
        positions.document_starts = documents_buffer(m, pass);
    return positions;
}

// Whether layer l's window is shorter than a pass's sequences. Never in PASS_GENERATE, where the KV cache is as short.
static bool window_hides_keys(const struct gpt *m, enum pass pass, int l) {
    return m->kinds[l].windowed && extent_of(m, pass).T > m->window;
}
// Whether a layer's attention needs spans in a pass: if its window hides keys (`window`), or if documents are masked.
static bool needs_spans(const struct gpt *m, enum pass pass, bool window) { return window || masks_documents(m, pass); }
struct spans {
    int32_t *first_key, *last_query; // (B, T)
};
// Returns the spans of layers of this `window`, live in this phase; NULL when planning. Call it only if needs_spans.
static struct spans spans_buffers(struct gpt *m, enum pass pass, bool window) {
    struct spans spans;
    spans.first_key = integer_buffer(m, pass, window ? SLOT_WINDOW_FIRST_KEY : SLOT_FIRST_KEY, "attention spans",
                                     window ? "first keys, window" : "first keys");
    spans.last_query = integer_buffer(m, pass, window ? SLOT_WINDOW_LAST_QUERY : SLOT_LAST_QUERY, "attention spans",
                                      window ? "last queries, window" : "last queries");
    return spans;
}
// Returns the options' shape of attention over B sequences of T tokens, as if no document or window hid any keys.
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
// Returns the shape of layer l's attention in a pass. Its spans are live in this phase; NULL when planning or unneeded.
static struct attention_shape layer_attention_shape(struct gpt *m, enum pass pass, int l) {
    const struct extent e = extent_of(m, pass);
    struct attention_shape shape = attention_shape_of(&m->config, e.B, e.T);
    const bool window = window_hides_keys(m, pass, l);
    if (needs_spans(m, pass, window)) {
        const struct spans spans = spans_buffers(m, pass, window);
        shape.first_key = spans.first_key;
        shape.last_query = spans.last_query;
    }
    return shape;
}
// Returns layer l's rotary table, (seq_length, D), in device memory; NULL when planning, or if q and k aren't rotated.
static const float *rope_of(const struct gpt *m, int l) {
    if (!m->kinds[l].rotary)
        return NULL;
    return m->kinds[l].windowed && m->rotary.local ? m->rotary.local : m->rotary.table;
}
