// The shape that every attention backend takes.
#pragma once

#include "kernels/positions.cuh" // struct token_positions
#include <stdbool.h>             // bool
#include <stdint.h>              // int32_t

// Self-attention. num_query_groups, the number of KV heads, divides num_heads: query head h reads KV head
// h / (num_heads / num_query_groups). A token's row of qkv is num_heads query heads, then the key heads, then the value
// heads, head_dim elements each. scale > 0 multiplies the scores.
struct attention_shape {
    int B, T, num_heads, num_query_groups, head_dim;
    float scale;
    bool full;     // every query sees every key, not only those up to its own position
    float softcap; // > 0: a scaled score s becomes softcap * tanh(s / softcap) before the mask (Gemma 2); 0: none
    // Which keys a query sees, where documents or a window hide some (kernels/attention/spans.cuh makes both): the
    // query at t sees keys first_key[b, t] to t, the key at t is seen by queries t to last_query[b, t]. Both rise with
    // t or stay. (B, T) in device memory each; both NULL: a query sees every key up to its own position.
    const int32_t *first_key, *last_query;
};

// What backward does besides the gradient of attention itself.
struct attention_backward_options {
    // rope.cuh's table, of all the tokens' positions: backward undoes RoPE on dQ and dK. NULL: it does not.
    const float *rotary;
    bool any_order;                   // dQ may be summed in an order, and so with bits, that differ from call to call
    struct token_positions positions; // what the table is read at
    uint32_t *amax;                   // kernels/amax.cuh's, of dqkv after RoPE is undone; NULL: not taken
    // (attention_bias_chunks, (H + 2 Hkv) D): the sums of dqkv's columns as stored, over runs of rows; NULL: not made
    float *bias_partial;
};
