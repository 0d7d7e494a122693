// The shape that every attention backend takes.
#pragma once

// Causal self-attention. num_query_groups, the number of KV heads, divides num_heads: query head h reads KV head
// h / (num_heads / num_query_groups). A token's row of qkv is num_heads query heads, then the key heads, then the value
// heads, head_dim elements each. scale > 0 multiplies the scores.
struct attention_shape {
    int B, T, num_heads, num_query_groups, head_dim;
    float scale;
};
