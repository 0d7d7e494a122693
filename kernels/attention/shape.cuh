// The shape of a call of attention, and the features by which a backend may refuse a shape.
#pragma once

#include "kernels/positions.cuh" // struct token_positions
#include <assert.h>              // static_assert
#include <stdbool.h>             // bool
#include <stddef.h>              // NULL, offsetof
#include <stdint.h>              // int32_t

// The features beyond causal attention with grouped queries: id, words for messages. A backend's row lists its own.
#define ATTENTION_FEATURES(FEATURE)                                                                                    \
    FEATURE(DROPOUT, "--attention-dropout")                                                                            \
    FEATURE(SOFTCAP, "--attn-logit-softcapping")                                                                       \
    FEATURE(FULL, "attention without a causal mask")                                                                   \
    FEATURE(HIDDEN_KEYS, "keys that are hidden by documents or a window")                                              \
    ATTENTION_PLANTED_FEATURES(FEATURE)
// The fields by which a shape asks for a feature: type, name, feature. A field that is 0 or NULL asks for nothing.
//   full        every query sees every key, not only those up to its own position
//   softcap     > 0: a scaled score s becomes softcap * tanh(s / softcap) before the mask (Gemma 2)
//   first_key, last_query  tables (B, T) in device memory of what documents or a window leave visible, which
//               attention_spans fills (kernels/attention/spans.cuh): the query at t sees the keys first_key[b, t] to t,
//               the key at t is seen by the queries t to last_query[b, t]. Neither table falls along T. NULL, in both
//               fields: a query sees every key up to its own position.
#define ATTENTION_ASKS(FIELD)                                                                                          \
    FIELD(bool, full, FULL)                                                                                            \
    FIELD(float, softcap, SOFTCAP)                                                                                     \
    FIELD(const int32_t *, first_key, HIDDEN_KEYS)                                                                     \
    FIELD(const int32_t *, last_query, HIDDEN_KEYS)                                                                    \
    ATTENTION_PLANTED_FIELDS(FIELD)
// test/unit_attention_rows.c defines these two, to plant a feature that no backend knows.
#ifndef ATTENTION_PLANTED_FEATURES
#define ATTENTION_PLANTED_FEATURES(FEATURE)
#define ATTENTION_PLANTED_FIELDS(FIELD)
#endif

enum attention_feature_index {
#define INDEX_ROW(id, words) FEATURE_INDEX_##id,
    ATTENTION_FEATURES(INDEX_ROW)
#undef INDEX_ROW
};
enum attention_feature {
#define BIT_ROW(id, words) FEATURE_##id = 1 << FEATURE_INDEX_##id,
    ATTENTION_FEATURES(BIT_ROW)
#undef BIT_ROW
};
// Returns the words of the first feature of `features`, bits of enum attention_feature, or NULL where there is none.
static inline const char *attention_feature_name(unsigned features) {
#define NAME_ROW(id, words)                                                                                            \
    if (features & FEATURE_##id)                                                                                       \
        return words;
    ATTENTION_FEATURES(NAME_ROW)
#undef NAME_ROW
    return NULL;
}

// Says what a call of self-attention computes. num_query_groups, the number of KV heads, divides num_heads: query head
// h reads KV head h / (num_heads / num_query_groups). A token's row of qkv has its query heads, then its key heads,
// then its value heads, of head_dim elements each, 256 at most. scale > 0 multiplies the scores.
struct attention_shape {
    int B, T, num_heads, num_query_groups, head_dim;
    float scale;
#define FIELD_ROW(type, name, feature) type name;
    ATTENTION_ASKS(FIELD_ROW)
#undef FIELD_ROW
};
// Has the size of attention_shape while each field that asks for a feature is a row of ATTENTION_ASKS: see below.
struct attention_shape_size {
    int sizes[5];
    float scale;
#define FIELD_ROW(type, name, feature) type name;
    ATTENTION_ASKS(FIELD_ROW)
#undef FIELD_ROW
};
static_assert(sizeof(struct attention_shape) == sizeof(struct attention_shape_size) &&
                  offsetof(struct attention_shape, full) == offsetof(struct attention_shape_size, full),
              "a field by which a shape asks for something is a row of ATTENTION_ASKS, so that backends refuse it");

// Returns the features that a call asks for, as bits of enum attention_feature. dropout: the probability.
static inline unsigned attention_asked(struct attention_shape shape, float dropout) {
    unsigned asked = dropout > 0 ? FEATURE_DROPOUT : 0;
#define ASK_ROW(type, name, feature)                                                                                   \
    if (shape.name)                                                                                                    \
        asked |= FEATURE_##feature;
    ATTENTION_ASKS(ASK_ROW)
#undef ASK_ROW
    return asked;
}

// The options of attention's backward: what the backward does besides computing dQ, dK and dV.
struct attention_backward_options {
    const float *rotary;              // kernels/rope.cuh's, of all positions, to undo RoPE on dQ, dK; NULL: not undone
    bool any_order;                   // dQ may be summed in an order, and so with bits, that differ from call to call
    struct token_positions positions; // of the tokens: which rows of rotary they take
    uint32_t *amax;                   // kernels/amax.cuh's, of dqkv after RoPE is undone; NULL: not taken
    // (attention_bias_num_runs, (H + 2 Hkv) D): the sums of dqkv's columns as stored, over runs of rows; NULL: not made
    float *bias_partial;
};
