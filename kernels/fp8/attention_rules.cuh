// States the rules of FP8 attention by cuDNN that need no library: what GPU and version take, and what a plan of memory
// counts for it. All is host arithmetic, compiled into every build, so that a build without CUDA plans a GPU's memory.
#pragma once
#include "kernels/cudnn/attention_rules.cuh" // fused_rounded
#include "kernels/fp8/attention.cuh"         // struct fp8_attention_demands
#include <stdint.h>                          // SIZE_MAX
#include <stdio.h>                           // snprintf

// cuDNN 9.25 is the first version whose FP8 graphs were asked for here; 9.24's forward gives zeros on 10.x
// (cudnn-frontend's issue 414). SIZE_MAX: the newest version.
enum { FP8_ATTENTION_CUDNN = 92500 };

// Writes to `reason` (size bytes) why no device takes the shape, as the end of a sentence about FP8 attention; writes
// "" if devices may take it. A build for fp32 refuses any shape.
static inline void fp8_attention_refuses_shape(char *reason, size_t size, struct attention_shape s) {
    const char *feature = attention_feature_name(attention_asked(s, 0));
    reason[0] = 0;
    if (sizeof(floatX) == sizeof(float))
        snprintf(reason, size, "needs --precision bf16");
    else if (feature)
        snprintf(reason, size, "has no %s", feature);
    else if (s.T == 1)
        snprintf(reason, size, "takes no sequences of one token: raise --seq-length");
    else if (s.head_dim % 16 != 0)
        snprintf(reason, size, "takes heads of multiples of 16, not %d: change --kv-channels", s.head_dim);
}
// Writes to `reason` (size bytes) why FP8 attention can't be computed, by no device or not by cuDNN of `version` (92500
// is 9.25.0) on this GPU, and mostly which option to change; empty where it can be. Conditions: TransformerEngine's
// (d0067d0, fused_attn.cpp and dot_product_attention/utils.py), and what cuDNN 9.28 answered to the graphs.
static inline void fp8_attention_refuses(char *reason, size_t size, size_t version, struct compute_capability gpu,
                                         struct attention_shape s, struct fp8_attention_demands demands) {
    fp8_attention_refuses_shape(reason, size, s);
    if (*reason)
        return;
    if (gpu.major != 9 && gpu.major != 10)
        snprintf(reason, size, "needs compute capability 9.0 or 10.x, and this GPU has %d.%d", gpu.major, gpu.minor);
    else if (version < FP8_ATTENTION_CUDNN)
        snprintf(reason, size, "needs cuDNN %d.%d, and %d.%d.%d is installed: install a newer one",
                 FP8_ATTENTION_CUDNN / 10000, FP8_ATTENTION_CUDNN / 100 % 100, (int)(version / 10000),
                 (int)(version / 100 % 100), (int)(version % 100));
    else if (gpu.major == 9 && !demands.delayed)
        snprintf(reason, size, "on compute capability 9.0 needs --fp8-recipe delayed: its outputs are FP8");
    else if (gpu.major == 9 && demands.full && s.head_dim != 128)
        snprintf(reason, size, "on compute capability 9.0 has a backward for heads of 128, not %d: take forward",
                 s.head_dim);
    else if (gpu.major == 9 && demands.full && !demands.any_order)
        snprintf(
            reason, size,
            "on compute capability 9.0 has no deterministic backward: take forward, or --deterministic-mode=false");
    else if (gpu.major == 10 && s.head_dim > 128)
        snprintf(reason, size, "on compute capability 10.x takes heads of up to 128, not %d", s.head_dim);
    else if (s.head_dim > 256)
        snprintf(reason, size, "takes heads of up to 256, not %d", s.head_dim);
}

// The number of bytes of a shape's codes of dQ, dK and dV, rounded up by fused_rounded.
static inline size_t fp8_attention_codes_bytes(struct attention_shape s) {
    const int heads = s.num_heads + 2 * s.num_query_groups;
    return fused_rounded((size_t)s.B * (size_t)s.T * (size_t)heads * (size_t)s.head_dim);
}
// The number of bytes of workspace to plan where cuDNN can't be asked: one fp32 number a row of scores. Backward adds
// dQ in fp32, for groups also each head's dK and dV in fp32, as cuDNN 9.28's engine on 9.0, and FP8 outputs' codes.
static inline size_t fp8_attention_planned_bytes(struct attention_shape s, struct fp8_attention_demands demands,
                                                 bool backward) {
    const size_t elements = (size_t)s.B * (size_t)s.num_heads * (size_t)s.T * (size_t)s.head_dim;
    const size_t sums = s.num_query_groups < s.num_heads ? 3 : 1;
    const size_t row_sums = fused_sums_bytes(s.B, s.num_heads, s.T);
    if (!backward)
        return row_sums;
    return row_sums + fused_rounded(sums * elements * sizeof(float)) +
           (demands.delayed ? fp8_attention_codes_bytes(s) : 0);
}
