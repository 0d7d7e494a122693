// FP8 training: which tensors are quantised, and the state of their scales.
//
// In the layers that --fp8-format quantises, the three products of each linear layer multiply FP8 matrices: input and
// weight in E4M3, the gradient of the output in E5M2 (hybrid) or E4M3. Everything else is as without: attention, norms,
// residual stream, embedding and head in bf16; master weights, moments, gradients of parameters and sums in fp32.
// Validation and generation compute in bf16, so that they leave no trace in the scales.
#pragma once
#include "config.h"                  // struct config
#include "kernels/device_memory.cuh" // device_download
#include "kernels/fp8_cast.cuh"      // enum fp8_count
#include "kernels/fp8_scales.cuh"    // struct fp8_delay
#include "memory.cuh"                // plan_add, plan_pointer
#include "parameters.cuh"            // enum linear
#include "runtime/machine/error.h"   // fail
#include <stdlib.h>                  // malloc, free

// What a linear layer's products multiply.
enum fp8_operand { FP8_INPUT, FP8_WEIGHT, FP8_GRADIENT, FP8_OPERANDS };
enum { FP8_KINDS = LINEAR_COUNT * FP8_OPERANDS }; // kinds of tensors; a layer has one of each

struct fp8_state {
    enum config_fp8_recipe recipe;
    enum fp8_format gradients; // format of FP8_GRADIENT; the others' is E4M3
    struct fp8_delay delay;
    int first_layer, end_layer; // the layers in FP8; none where they are equal
    int num_layers, ranks;
    int scales_id, amaxes_id, counts_id, history_id; // buffers in the plan, -1: none
    // In the device's memory; NULL while planning, and without FP8:
    struct fp8_scale *scales; // (L, LINEAR_COUNT, FP8_OPERANDS)
    uint32_t *weight_amaxes;  // (ranks, L, LINEAR_COUNT) each rank's, over what it updates
    uint64_t *counts;         // (LINEAR_COUNT, FP8_OPERANDS, FP8_COUNTS) of this rank, in this step
    float *history;           // (L, LINEAR_COUNT, FP8_OPERANDS, delay.length); NULL: scales are not delayed
};

static bool fp8_is_on(const struct fp8_state *f) { return f->end_layer > f->first_layer; }
static bool fp8_has_layer(const struct fp8_state *f, int l) { return l >= f->first_layer && l < f->end_layer; }
static int fp8_num_scales(const struct fp8_state *f) { return fp8_is_on(f) ? f->num_layers * FP8_KINDS : 0; }

static int fp8_index(int layer, enum linear linear, enum fp8_operand operand) {
    return (layer * LINEAR_COUNT + (int)linear) * FP8_OPERANDS + (int)operand;
}

// ---- what a checkpoint holds ----

// Delayed scales as a checkpoint holds them, in host memory: scales (fp8_num_scales), 0 where a history is empty, then
// histories (fp8_num_scales, delay.length), all in the order of fp8_index. Floats of both; 0: scales are not delayed.
static int64_t fp8_state_floats(const struct fp8_state *f) {
    return f->delay.length > 0 ? (int64_t)fp8_num_scales(f) * (1 + f->delay.length) : 0;
}
// The host's copy of the scales' structs. Fails without memory.
static struct fp8_scale *fp8_host_scales(const struct fp8_state *f, struct device *dev) {
    const size_t bytes = (size_t)fp8_num_scales(f) * sizeof(struct fp8_scale);
    struct fp8_scale *scales = (struct fp8_scale *)malloc(bytes);
    if (!scales)
        fail("out of memory for the scales of FP8");
    device_download(scales, f->scales, bytes, dev);
    return scales;
}
static void fp8_state_download(const struct fp8_state *f, float *to, struct device *dev) {
    const int n = fp8_num_scales(f);
    struct fp8_scale *scales = fp8_host_scales(f, dev);
    for (int i = 0; i < n; i++)
        to[i] = scales[i].delayed;
    device_download(to + n, f->history, (size_t)n * (size_t)f->delay.length * sizeof *to, dev);
    free(scales);
}
static void fp8_state_upload(struct fp8_state *f, const float *from, struct device *dev) {
    const int n = fp8_num_scales(f);
    struct fp8_scale *scales = fp8_host_scales(f, dev);
    for (int i = 0; i < n; i++)
        scales[i].delayed = from[i];
    device_upload(f->scales, scales, (size_t)n * sizeof *scales, dev);
    device_upload(f->history, from + n, (size_t)n * (size_t)f->delay.length * sizeof *from, dev);
    device_synchronize(dev);
    free(scales);
}
