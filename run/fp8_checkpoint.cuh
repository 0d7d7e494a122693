// FP8's delayed scales in a checkpoint: F32 tensors of optimizer.safetensors. Linear layers have fp8.scale, which is 0
// where a history is empty, and fp8.amax_history: (layers, enum linear, enum fp8_operand). Attention has
// fp8.attention_scale and fp8.attention_amax_history: (the first of enum fp8_attention_tensor, layers), or (1, layers)
// where only dS's scale is delayed. Histories have the steps as their last dimension, newest first.
#pragma once
#include "formats/safetensors.h"        // struct safetensors_tensor
#include "model/fp8.cuh"                // struct fp8_state
#include "runtime/machine/error_text.h" // RETURN_PROBLEM

enum fp8_tensor {
    FP8_TENSOR_SCALE,
    FP8_TENSOR_HISTORY,
    FP8_TENSOR_ATTENTION_SCALE,
    FP8_TENSOR_ATTENTION_HISTORY,
    FP8_TENSORS
};
static bool fp8_saved_is_attention(enum fp8_tensor t) { return t >= FP8_TENSOR_ATTENTION_SCALE; }
static bool fp8_tensor_is_history(enum fp8_tensor t) {
    return t == FP8_TENSOR_HISTORY || t == FP8_TENSOR_ATTENTION_HISTORY;
}

// The number of delayed scales of linear layers.
static int64_t fp8_delayed_linears(const struct fp8_state *f) {
    return fp8_is_delayed(f) ? f->num_layers * FP8_KINDS : 0;
}
// The number of values in a tensor; 0 where this run has no such tensor.
static int64_t fp8_tensor_values(const struct fp8_state *f, enum fp8_tensor t) {
    const struct fp8_delayed delayed = fp8_delayed_scales(f);
    const int64_t linears = fp8_delayed_linears(f);
    return (fp8_saved_is_attention(t) ? delayed.count - linears : linears) *
           (fp8_tensor_is_history(t) ? delayed.delay.length : 1);
}
// Returns where a tensor begins in the array of fp8_state_download: the index of its first value.
static int64_t fp8_tensor_begin(const struct fp8_state *f, enum fp8_tensor t) {
    return (fp8_tensor_is_history(t) ? fp8_delayed_scales(f).count : 0) +
           (fp8_saved_is_attention(t) ? fp8_tensor_values(f, (enum fp8_tensor)(t - 2)) : 0);
}
// Returns a tensor's name, type and shape in the file. `id` becomes entry.id, which only the caller reads.
static struct safetensors_tensor fp8_tensor_entry(const struct fp8_state *f, enum fp8_tensor t, int id) {
    static const char *const names[FP8_TENSORS] = {"fp8.scale", "fp8.amax_history", "fp8.attention_scale",
                                                   "fp8.attention_amax_history"};
    const struct fp8_delayed delayed = fp8_delayed_scales(f);
    struct safetensors_tensor entry;
    memset(&entry, 0, sizeof entry);
    entry.name = names[t];
    entry.dtype = SAFETENSORS_F32;
    if (fp8_saved_is_attention(t)) {
        entry.shape[0] = (uint64_t)((delayed.count - fp8_delayed_linears(f)) / f->num_layers);
        entry.shape[1] = (uint64_t)f->num_layers;
        entry.dims = 2;
    } else {
        entry.shape[0] = (uint64_t)f->num_layers;
        entry.shape[1] = LINEAR_COUNT;
        entry.shape[2] = FP8_OPERANDS;
        entry.dims = 3;
    }
    if (fp8_tensor_is_history(t))
        entry.shape[entry.dims++] = (uint64_t)delayed.delay.length;
    entry.id = id;
    return entry;
}

// Reads tensor t of file `name` into values (fp8_tensor_values). Returns NULL, or what is wrong, also negative values.
static const char *fp8_read_tensor(float *values, const struct fp8_state *f, enum fp8_tensor t,
                                   const struct safetensors *file, const char *name, struct error_text *error) {
    const struct safetensors_tensor wanted = fp8_tensor_entry(f, t, 0), *tensor;
    const int64_t n = fp8_tensor_values(f, t);
    RETURN_PROBLEM(safetensors_get(&tensor, file, wanted.name, wanted.shape, wanted.dims, name, error));
    if (tensor->dtype != SAFETENSORS_F32)
        return error_format(error, "%s: tensor '%s' is of type %s; expected F32", name, wanted.name,
                            safetensors_dtype_name(tensor->dtype));
    RETURN_PROBLEM(safetensors_read(file, tensor, 0, (uint64_t)n * sizeof *values, values, error));
    for (int64_t i = 0; i < n; i++)
        if (!(values[i] >= 0 && isfinite(values[i])))
            return error_format(error, "%s: tensor '%s' has the value %g; expected finite ones of at least 0", name,
                                wanted.name, (double)values[i]);
    return NULL;
}
// Whether a file has scales or a history of linear layers (first: FP8_TENSOR_SCALE) or of attention (first:
// FP8_TENSOR_ATTENTION_SCALE). Attention's must be for as many of its tensors as this run's.
static bool fp8_file_has(const struct fp8_state *f, enum fp8_tensor first, const struct safetensors *file) {
    for (int t = (int)first; t < (int)first + 2; t++) {
        const struct safetensors_tensor wanted = fp8_tensor_entry(f, (enum fp8_tensor)t, 0);
        const struct safetensors_tensor *tensor = safetensors_find(file, wanted.name);
        if (tensor && (!fp8_saved_is_attention(first) || tensor->dims == 0 || tensor->shape[0] == wanted.shape[0]))
            return true;
    }
    return false;
}
// Loads the state of linear layers and of attention from an open optimizer.safetensors, called `name` in messages.
// Zeroes the part that the file lacks, but changes nothing if it lacks both. *found: it has all; false if this run
// delays no scales. Waits for the device. Returns NULL, or what is wrong: also scales without a history.
static const char *fp8_load(struct fp8_state *f, bool *found, const struct safetensors *file, const char *name,
                            struct device *dev, struct error_text *error) {
    const int64_t floats = fp8_state_floats(f);
    const char *problem = NULL;
    bool any = false;
    *found = floats > 0;
    float *values = (float *)calloc(floats > 0 ? (size_t)floats : 1, sizeof *values);
    if (!values)
        return error_format(error, "out of memory for the histories of FP8");
    for (int t = 0; t < FP8_TENSORS && !problem; t++) {
        const enum fp8_tensor tensor = (enum fp8_tensor)t;
        const bool has = fp8_file_has(f, (enum fp8_tensor)(t / 2 * 2), file);
        if (fp8_tensor_values(f, tensor) == 0)
            continue;
        *found = *found && has;
        any = any || has;
        if (has)
            problem = fp8_read_tensor(values + fp8_tensor_begin(f, tensor), f, tensor, file, name, error);
    }
    if (!problem && any)
        fp8_state_upload(f, values, dev);
    free(values);
    return problem;
}

// Zeroes all delayed scales, which are from a run with other options (fp8_scales_hold). The next step casts by its own
// amaxes, later ones by the histories, which stay. Waits for the device. Does nothing without delayed scales.
static void fp8_forget_scales(struct fp8_state *f, struct device *dev) {
    const int64_t floats = fp8_state_floats(f), scales = fp8_delayed_scales(f).count;
    float *values = floats > 0 ? (float *)malloc((size_t)floats * sizeof *values) : NULL;
    if (floats > 0 && !values)
        fail("out of memory for the histories of FP8");
    if (floats == 0)
        return;
    fp8_state_download(f, values, dev);
    memset(values, 0, (size_t)scales * sizeof *values);
    fp8_state_upload(f, values, dev);
    free(values);
}
