// Delayed scales of FP8 in a checkpoint: two tensors of optimizer.safetensors, F32, whose first three dimensions are
// layers, linear layers (enum linear) and operands (enum fp8_operand): fp8.scale, 0 where a history is empty, and
// fp8.amax_history, whose fourth is the steps, the newest first.
#pragma once
#include "formats/safetensors.h"        // struct safetensors_tensor
#include "model/fp8.cuh"                // struct fp8_state
#include "runtime/machine/error_text.h" // RETURN_PROBLEM

enum fp8_tensor { FP8_TENSOR_SCALE, FP8_TENSOR_HISTORY, FP8_TENSORS };

// Returns the name, type and shape of a tensor, for a file that is written or read; `id` is the caller's.
static struct safetensors_tensor fp8_tensor_entry(const struct fp8_state *f, enum fp8_tensor t, int id) {
    struct safetensors_tensor entry;
    memset(&entry, 0, sizeof entry);
    entry.name = t == FP8_TENSOR_SCALE ? "fp8.scale" : "fp8.amax_history";
    entry.dtype = SAFETENSORS_F32;
    entry.dims = t == FP8_TENSOR_SCALE ? 3 : 4;
    entry.shape[0] = (uint64_t)f->num_layers;
    entry.shape[1] = LINEAR_COUNT;
    entry.shape[2] = FP8_OPERANDS;
    entry.shape[3] = (uint64_t)f->delay.length;
    entry.id = id;
    return entry;
}
// Returns the index of a tensor's first value in fp8_state_download's array.
static int64_t fp8_tensor_begin(const struct fp8_state *f, enum fp8_tensor t) {
    return t == FP8_TENSOR_SCALE ? 0 : fp8_num_tensors(f);
}
static int64_t fp8_tensor_values(const struct fp8_state *f, enum fp8_tensor t) {
    return (int64_t)fp8_num_tensors(f) * (t == FP8_TENSOR_SCALE ? 1 : f->delay.length);
}

// values (fp8_tensor_values) = a tensor of the open file, named `name` in messages. Returns NULL, or what is wrong.
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
// Loads the scales and histories from a checkpoint's open optimizer.safetensors; *found: the file has them. Loads
// nothing where this run's scales are not delayed. Waits for the device. Returns NULL, or what is wrong.
static const char *fp8_load(struct fp8_state *f, bool *found, const struct safetensors *file, const char *name,
                            struct device *dev, struct error_text *error) {
    const int64_t floats = fp8_state_floats(f);
    const char *problem = NULL;
    *found = false;
    for (int t = 0; t < FP8_TENSORS; t++)
        *found = *found || safetensors_find(file, fp8_tensor_entry(f, (enum fp8_tensor)t, 0).name);
    if (floats == 0 || !*found)
        return NULL;
    float *values = (float *)malloc((size_t)floats * sizeof *values);
    if (!values)
        return error_format(error, "out of memory for the histories of FP8");
    for (int t = 0; t < FP8_TENSORS && !problem; t++)
        problem =
            fp8_read_tensor(values + fp8_tensor_begin(f, (enum fp8_tensor)t), f, (enum fp8_tensor)t, file, name, error);
    if (!problem)
        fp8_state_upload(f, values, dev);
    free(values);
    return problem;
}

// Drops all delayed scales, if there are any: other options than this run's made them (fp8_scales_hold). The next step
// casts by its own amaxes; after it scales follow from the histories, which stay. Waits for the device.
static void fp8_forget_scales(struct fp8_state *f, struct device *dev) {
    const int64_t floats = fp8_state_floats(f), scales = fp8_num_tensors(f);
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
