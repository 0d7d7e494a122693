// What optimizer.safetensors holds. A state of a tensor is named STATE.TENSOR, with our own tensors' names, and has no
// padded rows. Its type is the stored format's: F32, BF16, or U8 for 8-bit codes (kernels/state_format.cuh). 8-bit
// states have scales beside the codes, STATE.TENSOR.scale in F32, one for each 128 elements in flat order; the last
// block is filled up with 0. Master weights are F32, and are left out where model.safetensors has them exactly.
#pragma once
#include "formats/safetensors.h" // struct safetensors_tensor
#include "optimizer/state.cuh"   // enum optimizer_state, optimizer_format
#include <stdio.h>               // snprintf

static const char optimizer_file_name[] = "optimizer.safetensors";

// Whether the run has its weights in fp32: as parameters, or as master weights.
static bool has_exact_weights(const struct optimizer *o) {
    return sizeof(floatX) == sizeof(float) || optimizer_holds(o, STATE_MASTER);
}
// Whether optimizer.safetensors has this state of a tensor. model_is_exact: model.safetensors has fp32 parameters.
static bool state_is_in_file(const struct optimizer *o, enum optimizer_state id, const struct tensor *t,
                             bool model_is_exact) {
    switch (optimizer_state_rows[id].start) {
    case STATE_FROM_PARAMETERS: return has_exact_weights(o) && !model_is_exact;
    case STATE_COPY:
    case STATE_ZERO: return optimizer_format(o, id, t) != FORMAT_NONE;
    }
    return false;
}

static bool format_has_scales(enum state_format format) {
    switch (format) {
    case FORMAT_FP32:
    case FORMAT_BF16:
    case FORMAT_REMAINDER:
    case FORMAT_NONE: return false;
    case FORMAT_8BIT:
    case FORMAT_8BIT_ROOT: return true;
    }
    return false;
}
// Returns what messages call the format of a moment or an average, as "8bit" for either format of 8 bits.
static const char *format_name(enum state_format format) {
    switch (format) {
    case FORMAT_FP32: return "fp32";
    case FORMAT_BF16: return "bf16";
    case FORMAT_8BIT:
    case FORMAT_8BIT_ROOT: return "8bit";
    case FORMAT_REMAINDER:
    case FORMAT_NONE: break;
    }
    return "";
}
// Returns the file's type of a state's values: F32 for FORMAT_REMAINDER too, as the file has whole master weights.
static enum safetensors_dtype format_dtype(enum state_format format) {
    switch (format) {
    case FORMAT_FP32:
    case FORMAT_REMAINDER: // of the whole master weight
    case FORMAT_NONE: return SAFETENSORS_F32;
    case FORMAT_BF16: return SAFETENSORS_BF16;
    case FORMAT_8BIT:
    case FORMAT_8BIT_ROOT: return SAFETENSORS_U8;
    }
    return SAFETENSORS_F32;
}
// *format = the format of moment `id` that a file stores as this type. Returns false, and sets nothing, if none is.
static bool format_of_dtype(enum state_format *format, enum optimizer_state id, enum safetensors_dtype dtype) {
    if (dtype == SAFETENSORS_F32)
        *format = FORMAT_FP32;
    else if (dtype == SAFETENSORS_BF16)
        *format = FORMAT_BF16;
    else if (dtype == SAFETENSORS_U8)
        *format = id == STATE_MOMENT2 ? FORMAT_8BIT_ROOT : FORMAT_8BIT;
    else
        return false;
    return true;
}

// The number of elements that files have of a whole tensor: all except its padding rows.
static int64_t tensor_visible_elements(const struct tensor *t) { return (int64_t)t->visible_rows * t->cols; }
static int64_t state_blocks(int64_t elements) { return (elements + STATE_BLOCK - 1) / STATE_BLOCK; }

enum { STATE_NAME = sizeof(((struct tensor *)0)->name) + 24 };
// Returns the file's entry of a state's tensor, or its scales. Sets `name`, which must stay. `id` is the caller's own.
static struct safetensors_tensor state_tensor_entry(char name[STATE_NAME], enum optimizer_state state,
                                                    const struct tensor *t, enum state_format format, bool scales,
                                                    int id) {
    struct safetensors_tensor entry;
    memset(&entry, 0, sizeof entry);
    snprintf(name, STATE_NAME, "%s.%s%s", optimizer_state_rows[state].file_name, t->name, scales ? ".scale" : "");
    entry.name = name;
    entry.dtype = scales ? SAFETENSORS_F32 : format_dtype(format);
    entry.dims = t->cols > 1 && !scales ? 2 : 1;
    entry.shape[0] = scales ? (uint64_t)state_blocks(tensor_visible_elements(t)) : (uint64_t)t->visible_rows;
    entry.shape[1] = (uint64_t)t->cols;
    entry.id = id;
    return entry;
}

// ---- blocks as they are stored, and the bytes of a file ----

static size_t block_elements(int64_t b, int64_t n) {
    const int64_t rest = n - b * STATE_BLOCK;
    return rest < STATE_BLOCK ? (size_t)rest : (size_t)STATE_BLOCK;
}
// out (blocks) = the scales of an 8-bit state. stored: blocks, each a float scale and STATE_BLOCK codes.
static void state_extract_scales(float *out, const void *stored, int64_t blocks) {
    const size_t bytes = sizeof *out + STATE_BLOCK;
    for (int64_t b = 0; b < blocks; b++)
        memcpy(&out[b], (const char *)stored + (size_t)b * bytes, sizeof *out);
}
// out (n) = the codes of an 8-bit state. stored: blocks, each a float scale and STATE_BLOCK codes.
static void state_extract_codes(unsigned char *out, const void *stored, int64_t n) {
    const size_t bytes = sizeof(float) + STATE_BLOCK;
    for (int64_t b = 0; b * STATE_BLOCK < n; b++)
        memcpy(out + b * STATE_BLOCK, (const char *)stored + (size_t)b * bytes + sizeof(float), block_elements(b, n));
}
// stored (state_bytes) = blocks made of a file's values (n) and scales, if any. Fills up the last block with zeros.
static void state_from_file(void *stored, const unsigned char *values, const float *scales, enum state_format format,
                            int64_t n) {
    const size_t block = state_block_bytes(format);
    memset(stored, 0, state_bytes(format, n));
    if (!format_has_scales(format)) {
        memcpy(stored, values, (size_t)n * (block / STATE_BLOCK));
        return;
    }
    for (int64_t b = 0; b * STATE_BLOCK < n; b++) {
        char *to = (char *)stored + (size_t)b * block;
        memcpy(to, &scales[b], sizeof *scales);
        memcpy(to + sizeof *scales, values + b * STATE_BLOCK, block_elements(b, n));
    }
}
