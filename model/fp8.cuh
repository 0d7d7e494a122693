// FP8 training: which tensors are quantized, and the state of their scales. In the layers of --fp8-format, products of
// linear layers multiply FP8 matrices: inputs and weights in E4M3, gradients of outputs in E5M2 (hybrid) or E4M3. With
// --fp8-dot-product-attention so does attention. Validation and generation use bf16, and don't touch the scales.
#pragma once
#include "config/config.h"           // struct config
#include "config/layers.h"           // config_fp8_layers, config_attention_in_fp8
#include "kernels/fp8/attention.cuh" // enum fp8_attention_tensor
#include "kernels/fp8/fp8.cuh"       // struct fp8_matrix, enum fp8_count
#include "kernels/fp8/scales.cuh"    // struct fp8_delay
#include "memory.cuh"                // plan_add, plan_pointer
#include "model/parameters.cuh"      // enum linear

enum fp8_operand { FP8_INPUT, FP8_WEIGHT, FP8_GRADIENT, FP8_OPERANDS }; // what a linear layer's products multiply
enum { FP8_KINDS = LINEAR_COUNT * FP8_OPERANDS };                       // kinds of tensors; a layer has one of each
static_assert((int)FP8_WEIGHT == 1 && (int)FP8_GRADIENT == 2 && (int)FP8_OPERANDS == 3,
              "kernels/fp8/scales.cuh takes scale i as that of operand i % 3");

struct fp8_state {
    enum config_fp8_recipe recipe;
    enum fp8_format gradients; // format of FP8_GRADIENT; the others' is E4M3
    enum config_fp8_attention attention;
    int attention_tensors; // how many of enum fp8_attention_tensor, the first ones, have a scale in each layer
    // Whether a scale that attention needs before it runs may be unknown: its history is empty, or has only zeros.
    bool calibrates;
    struct fp8_delay delay;
    int first_layer, end_layer;      // the layers in FP8; none where they are equal
    const struct layer_shape *shape; // not owned
    int num_layers;
    bool weights_sharded; // no rank updates a whole weight on the device: amaxes are taken where weights are cast
    bool caches_weights;  // a step's first micro-step casts weights, the others multiply what it kept
    int scales_id, amaxes_id, counts_id, history_id, cache_id; // buffers in the plan, -1: none
    // These are in the device's memory; NULL when planning or without FP8. With scales of blocks there are only counts.
    struct fp8_scale *scales; // (L, LINEAR_COUNT, FP8_OPERANDS), then attention's (attention_tensors, L)
    uint32_t *weight_amaxes;  // (L, LINEAR_COUNT), collected by the update; NULL: weights_sharded
    uint64_t *counts;         // (LINEAR_COUNT, FP8_OPERANDS, FP8_COUNTS) of this rank, in this step
    float *history;           // (delayed scales, their length); NULL: no scales are delayed
    char *cache;              // weights in FP8 (FP8 layers, LINEAR_COUNT, 2 forms); NULL: caches_weights is false
    bool weights_known;       // weight_amaxes are of the present weights
};

// Whether any layer trains in FP8 (--fp8-format); weights that are stored in FP8 do not count.
static bool fp8_is_on(const struct fp8_state *f) { return f->end_layer > f->first_layer; }
static bool fp8_has_layer(const struct fp8_state *f, int l) { return l >= f->first_layer && l < f->end_layer; }
// The number of per-tensor scales, of bf16 layers too; 0 without FP8. With block scales too it isn't 0, but none exist.
static int fp8_num_scales(const struct fp8_state *f) {
    return fp8_is_on(f) ? f->num_layers * (FP8_KINDS + f->attention_tensors) : 0;
}

// Returns the index in `scales` of the scale of a linear layer's operand. With layer 0 also the index of its counts.
static int fp8_index(int layer, enum linear linear, enum fp8_operand operand) {
    return (layer * LINEAR_COUNT + (int)linear) * FP8_OPERANDS + (int)operand;
}
// Returns the index in `scales` of the scale of attention's `tensor`. Only the first attention_tensors have scales.
static int fp8_attention_index(const struct fp8_state *f, int layer, enum fp8_attention_tensor tensor) {
    return f->num_layers * (FP8_KINDS + (int)tensor) + layer;
}

// ---- what is quantized, and how ----

static enum fp8_format fp8_format_of(const struct fp8_state *f, enum fp8_operand operand) {
    switch (operand) {
    case FP8_INPUT:
    case FP8_WEIGHT: return FP8_E4M3;
    case FP8_GRADIENT: return f->gradients;
    case FP8_OPERANDS: break;
    }
    return FP8_E4M3;
}
static enum fp8_granularity fp8_granularity_of(const struct fp8_state *f, enum fp8_operand operand) {
    switch (f->recipe) {
    case FP8_RECIPE_TENSORWISE:
    case FP8_RECIPE_DELAYED: break;
    case FP8_RECIPE_BLOCKWISE: return operand == FP8_WEIGHT ? FP8_128X128 : FP8_1X128;
    }
    return FP8_PER_TENSOR;
}
// Whether there is a scale for each block, which the cast makes of the block's own elements: no amax is collected.
static bool fp8_is_blockwise(const struct fp8_state *f) { return fp8_granularity_of(f, FP8_WEIGHT) != FP8_PER_TENSOR; }
// Whether all scales come from earlier steps' amaxes. While a tensor has no scale from these, its own amax makes one.
static bool fp8_is_delayed(const struct fp8_state *f) { return fp8_is_on(f) && f->delay.length > 0; }

// The scales that are computed from histories of amaxes: [first, first + count) of `scales`.
struct fp8_delayed {
    int first, count; // count 0: there are none
    struct fp8_delay delay;
    struct fp8_scales_order order; // of these
};
// Returns which scales come from histories: all if delayed; else only dS's in full FP8 attention, by the last step.
static struct fp8_delayed fp8_delayed_scales(const struct fp8_state *f) {
    const int linears = f->num_layers * FP8_KINDS, gradients = fp8_attention_index(f, 0, FP8_ATTENTION_DOUT);
    const bool only_ds = fp8_is_on(f) && !fp8_is_delayed(f) && f->attention == FP8_ATTENTION_FULL;
    struct fp8_delayed delayed = {0, 0, f->delay, {linears, gradients, f->gradients}};
    if (fp8_is_delayed(f))
        delayed.count = fp8_num_scales(f);
    if (only_ds) {
        delayed.first = fp8_attention_index(f, 0, FP8_ATTENTION_DS);
        delayed.count = f->num_layers;
        delayed.delay.length = 1;
        delayed.delay.most_recent = true;
        delayed.order.linears = delayed.order.attention_gradients = 0;
    }
    return delayed;
}

// Returns a tensor's scale on the device, for bf16 layers too; NULL when planning, without FP8, or with block scales.
static struct fp8_scale *fp8_scale(const struct fp8_state *f, int layer, enum linear linear, enum fp8_operand operand) {
    return f->scales ? &f->scales[fp8_index(layer, linear, operand)] : NULL;
}
// Returns the scale of attention's `tensor`, for bf16 layers too; NULL when planning, and if the tensor has no scale.
static struct fp8_scale *fp8_attention_scale(const struct fp8_state *f, int layer, enum fp8_attention_tensor tensor) {
    return f->scales && (int)tensor < f->attention_tensors ? &f->scales[fp8_attention_index(f, layer, tensor)] : NULL;
}
// Returns where updates collect a weight's amax; NULL for bf16 layers and block scales, if weights_sharded or planning.
static uint32_t *fp8_weight_amax(const struct fp8_state *f, int layer, enum linear linear) {
    return f->weight_amaxes && fp8_has_layer(f, layer) ? &f->weight_amaxes[layer * LINEAR_COUNT + (int)linear] : NULL;
}
// Returns a step's counts (FP8_COUNTS) of one kind of tensor, on the device; NULL when planning, and without FP8.
static uint64_t *fp8_counts(const struct fp8_state *f, enum linear linear, enum fp8_operand operand) {
    return f->counts ? &f->counts[fp8_index(0, linear, operand) * FP8_COUNTS] : NULL;
}

// The number of bytes of an operand's matrix: its codes, followed in memory by its blocks' scales.
static size_t fp8_matrix_bytes(const struct fp8_state *f, enum fp8_operand operand, int64_t rows, int64_t depth) {
    const enum fp8_granularity granularity = fp8_granularity_of(f, operand);
    const size_t floats = granularity == FP8_PER_TENSOR ? 0 : (size_t)fp8_inverse_count(granularity, rows, depth);
    return (size_t)rows * (size_t)depth + floats * sizeof(float);
}
// Returns the matrix (rows, depth) in `buffer` (fp8_matrix_bytes). Its `inverse` points to the scales of blocks in the
// buffer, if there are any, else into the tensor's `scale`. buffer and scale are NULL when planning.
static struct fp8_matrix fp8_matrix_in(const struct fp8_state *f, void *buffer, enum fp8_operand operand, int64_t rows,
                                       int64_t depth, struct fp8_scale *scale) {
    struct fp8_matrix matrix = {(fp8 *)buffer, NULL, fp8_format_of(f, operand), fp8_granularity_of(f, operand)};
    if (buffer && matrix.granularity != FP8_PER_TENSOR)
        matrix.inverse = (float *)(matrix.codes + rows * depth);
    else if (scale)
        matrix.inverse = &scale->inverse;
    return matrix;
}

// Returns the bytes of a weight's two forms in the cache, the row form first, each aligned.
static size_t fp8_cached_bytes(const struct fp8_state *f, enum linear linear, bool both) {
    const struct linear_row row = linear_row(linear, f->shape);
    return plan_aligned(fp8_matrix_bytes(f, FP8_WEIGHT, row.outputs, row.inputs)) +
           (both ? plan_aligned(fp8_matrix_bytes(f, FP8_WEIGHT, row.inputs, row.outputs)) : 0);
}
static size_t fp8_cached_layer_bytes(const struct fp8_state *f) {
    size_t bytes = 0;
    for (int i = 0; i < LINEAR_COUNT; i++)
        bytes += fp8_cached_bytes(f, (enum linear)i, true);
    return bytes;
}
// Returns where the cache has a form of FP8 layer l's weight; NULL when planning.
static void *fp8_cached_weight(const struct fp8_state *f, int l, enum linear linear, bool transposed) {
    size_t at = (size_t)(l - f->first_layer) * fp8_cached_layer_bytes(f);
    for (int i = 0; i < (int)linear; i++)
        at += fp8_cached_bytes(f, (enum linear)i, true);
    return f->cache ? f->cache + at + (transposed ? fp8_cached_bytes(f, linear, false) : 0) : NULL;
}

// ---- the state ----

// The number of scales of each layer's attention: 3 in FP8 forward, 5 in full FP8, 8 if that is delayed, else 0.
static int fp8_attention_tensors_of(const struct fp8_state *f) {
    switch (f->attention) {
    case FP8_ATTENTION_NONE: return 0;
    case FP8_ATTENTION_FORWARD: return FP8_ATTENTION_V + 1;
    case FP8_ATTENTION_FULL: return f->delay.length > 0 ? FP8_ATTENTION_TENSORS : FP8_ATTENTION_DS + 1;
    }
    return 0;
}
// Sets up the state. Call fp8_plan and fp8_allocate next. shape must outlive f. micro_steps: a step's.
static void fp8_create(struct fp8_state *f, const struct config *c, const struct layer_shape *shape,
                       bool weights_sharded, int micro_steps) {
    memset(f, 0, sizeof *f);
    f->shape = shape;
    f->recipe = c->fp8.fp8_recipe;
    f->gradients = FP8_E4M3;
    switch (c->fp8.fp8_format) {
    case FP8_FORMAT_NONE:
    case FP8_FORMAT_E4M3: break;
    case FP8_FORMAT_HYBRID: f->gradients = FP8_E5M2; break;
    }
    config_fp8_layers(c, &f->first_layer, &f->end_layer);
    f->num_layers = c->model.num_layers;
    f->weights_sharded = weights_sharded;
    f->caches_weights = fp8_is_on(f) && c->fp8.fp8_weight_cache == FP8_CACHE_ALWAYS && micro_steps > 1;
    switch (c->fp8.fp8_recipe) {
    case FP8_RECIPE_TENSORWISE:
    case FP8_RECIPE_BLOCKWISE: break;
    case FP8_RECIPE_DELAYED:
        f->delay.length = c->fp8.fp8_amax_history_len;
        f->delay.margin = c->fp8.fp8_margin;
        switch (c->fp8.fp8_amax_compute_algo) {
        case FP8_AMAX_MOST_RECENT: f->delay.most_recent = true; break;
        case FP8_AMAX_MAX: break;
        }
        break;
    }
    f->attention = config_attention_in_fp8(c);
    f->attention_tensors = fp8_attention_tensors_of(f);
    f->calibrates = f->attention_tensors > 0;
    f->scales_id = f->amaxes_id = f->counts_id = f->history_id = f->cache_id = -1;
}

// The number of bytes of f->scales; 0 only without FP8. With block scales it is above 0, though f->scales is NULL.
static size_t fp8_scales_bytes(const struct fp8_state *f) {
    return (size_t)fp8_num_scales(f) * sizeof(struct fp8_scale);
}
static size_t fp8_weight_amaxes_bytes(const struct fp8_state *f) {
    return (size_t)f->num_layers * LINEAR_COUNT * sizeof(uint32_t);
}
enum { FP8_COUNTS_BYTES = FP8_KINDS * FP8_COUNTS * sizeof(uint64_t) };
// The number of bytes of the amax histories of the scales that fp8_delayed_scales returns; 0 if no scale has one.
static size_t fp8_history_bytes(const struct fp8_state *f) {
    const struct fp8_delayed delayed = fp8_delayed_scales(f);
    return (size_t)delayed.count * (size_t)delayed.delay.length * sizeof(float);
}

static void fp8_plan(struct fp8_state *f, struct plan *plan) {
    const char *const category = "fp8 scales";
    if (!fp8_is_on(f))
        return;
    f->counts_id =
        plan_add(plan, ARENA_OPTIMIZER, category, "counts of saturated and flushed values", -1, FP8_COUNTS_BYTES);
    if (f->caches_weights)
        f->cache_id = plan_add(plan, ARENA_OPTIMIZER, "fp8 weights", "weights in FP8", -1,
                               (size_t)(f->end_layer - f->first_layer) * fp8_cached_layer_bytes(f));
    if (fp8_is_blockwise(f))
        return;
    f->scales_id = plan_add(plan, ARENA_OPTIMIZER, category, "scales", -1, fp8_scales_bytes(f));
    if (!f->weights_sharded)
        f->amaxes_id = plan_add(plan, ARENA_OPTIMIZER, category, "amaxes of weights", -1, fp8_weight_amaxes_bytes(f));
    if (fp8_history_bytes(f) > 0)
        f->history_id = plan_add(plan, ARENA_OPTIMIZER, category, "amax history", -1, fp8_history_bytes(f));
}
// Sets the state's addresses and enqueues zeroing it: no amaxes, empty histories. Call it after arenas_allocate.
static void fp8_allocate(struct fp8_state *f, const struct plan *plan, const struct arenas *arenas,
                         struct device *dev) {
    f->scales = (struct fp8_scale *)plan_pointer(plan, arenas, f->scales_id);
    f->weight_amaxes = (uint32_t *)plan_pointer(plan, arenas, f->amaxes_id);
    f->counts = (uint64_t *)plan_pointer(plan, arenas, f->counts_id);
    f->history = (float *)plan_pointer(plan, arenas, f->history_id);
    f->cache = (char *)plan_pointer(plan, arenas, f->cache_id);
    if (f->scales)
        device_zero(f->scales, fp8_scales_bytes(f), dev);
    if (f->weight_amaxes)
        device_zero(f->weight_amaxes, fp8_weight_amaxes_bytes(f), dev);
    if (f->counts)
        device_zero(f->counts, FP8_COUNTS_BYTES, dev);
    if (f->history)
        device_zero(f->history, fp8_history_bytes(f), dev);
}

// Sets every scale's `inverse`, for products that are timed without a cast before them. Waits for the device.
static void fp8_set_inverses(struct fp8_state *f, float inverse, struct device *dev) {
    if (f->scales == NULL)
        return;
    struct fp8_scale *scales = (struct fp8_scale *)plan_allocate((size_t)fp8_num_scales(f), sizeof *scales);
    device_download(scales, f->scales, fp8_scales_bytes(f), dev);
    for (int i = 0; i < fp8_num_scales(f); i++)
        scales[i].inverse = inverse;
    device_upload(f->scales, scales, fp8_scales_bytes(f), dev);
    device_synchronize(dev);
    free(scales);
}

// Clears f->calibrates once all FP8 layers have the scales that attention takes from earlier steps: dS's and, if
// delayed, its outputs'. Call it after fp8_scales_update. Waits for the device if f->calibrates and there are scales.
static void fp8_update_calibrates(struct fp8_state *f, struct device *dev) {
    if (!f->calibrates || !f->scales)
        return;
    struct fp8_scale *scales = (struct fp8_scale *)plan_allocate((size_t)fp8_num_scales(f), sizeof *scales);
    device_download(scales, f->scales, fp8_scales_bytes(f), dev);
    f->calibrates = false;
    for (int l = f->first_layer; l < f->end_layer; l++) {
        for (int t = FP8_ATTENTION_DS; t < f->attention_tensors; t++)
            f->calibrates |= scales[fp8_attention_index(f, l, (enum fp8_attention_tensor)t)].delayed == 0;
        f->calibrates |= fp8_is_delayed(f) && scales[fp8_index(l, LINEAR_ATT_PROJ, FP8_INPUT)].delayed == 0;
    }
    free(scales);
}

// ---- the checkpoint's state: of delayed scales, each scale's `delayed`, then the history ----

// The number of floats that a checkpoint has of FP8's state; 0 without delayed scales.
static int64_t fp8_state_floats(const struct fp8_state *f) {
    const struct fp8_delayed delayed = fp8_delayed_scales(f);
    return (int64_t)delayed.count * (1 + delayed.delay.length);
}
// Copies FP8's state of a checkpoint from the device to `to` (fp8_state_floats), and waits. Call it only if it has any.
static void fp8_state_download(const struct fp8_state *f, float *to, struct device *dev) {
    const struct fp8_delayed delayed = fp8_delayed_scales(f);
    struct fp8_scale *scales = (struct fp8_scale *)plan_allocate((size_t)fp8_num_scales(f), sizeof *scales);
    device_download(scales, f->scales, fp8_scales_bytes(f), dev);
    for (int i = 0; i < delayed.count; i++)
        to[i] = scales[delayed.first + i].delayed;
    device_download(to + delayed.count, f->history, fp8_history_bytes(f), dev);
    free(scales);
}
// Sets delayed scales, histories and `calibrates` by a checkpoint's state (fp8_state_floats > 0). Waits for the device.
static void fp8_state_upload(struct fp8_state *f, const float *from, struct device *dev) {
    const struct fp8_delayed delayed = fp8_delayed_scales(f);
    struct fp8_scale *scales = (struct fp8_scale *)plan_allocate((size_t)fp8_num_scales(f), sizeof *scales);
    device_download(scales, f->scales, fp8_scales_bytes(f), dev);
    for (int i = 0; i < delayed.count; i++)
        scales[delayed.first + i].delayed = from[i];
    device_upload(f->scales, scales, fp8_scales_bytes(f), dev);
    device_upload(f->history, from + delayed.count, fp8_history_bytes(f), dev);
    device_synchronize(dev);
    free(scales);
    f->calibrates = f->attention_tensors > 0;
    fp8_update_calibrates(f, dev);
}
