// The frozen weights of linear layers in FP8 or NF4 (--frozen-weights-format). Every rank has them whole. They are
// quantized as they are set, a matrix at a time, and read back as floatX before each product (linear_weight).
#pragma once
#include "kernels/device_memory.cuh" // device_upload
#include "kernels/device_queue.cuh"  // device_synchronize
#include "model/parameters.cuh"      // struct tensor

struct frozen_weights {
    char *memory;                 // (stored_bytes of the table) of the device; NULL while planning
    const struct tensor *filling; // the matrix of which some elements are set; NULL: none
    float *values;                // (filling->count) on the host
    int64_t filled;               // elements set
};

// Whether a tensor is kept in FP8 or NF4, outside the flat buffers.
static inline bool tensor_is_stored(const struct tensor *t) { return t->format != FROZEN_FLOATX; }

// Frees the values on the host and zeroes f. The stored weights are in an arena, which is not freed here.
static void frozen_weights_free(struct frozen_weights *f) {
    free(f->values);
    memset(f, 0, sizeof *f);
}
// Quantizes f->filling, all of whose elements are set, uploads it and waits for the device. Frees f->values.
static void frozen_weights_store(struct frozen_weights *f, struct device *dev) {
    const struct tensor *t = f->filling;
    const size_t bytes = frozen_bytes(t->format, t->rows, t->cols);
    void *stored = malloc(bytes), *workspace = malloc(frozen_quantize_workspace_bytes(t->format, t->rows, t->cols) + 1);
    if (!stored || !workspace)
        fail("out of memory for the frozen weight %s", t->name);
    frozen_quantize_rows(stored, f->values, t->format, t->rows, t->cols, 0, t->rows, workspace);
    frozen_quantize_end(stored, t->format, t->rows, t->cols, workspace);
    device_upload(f->memory + t->stored_at, stored, bytes, dev);
    device_synchronize(dev);
    free(workspace);
    free(stored);
    free(f->values);
    f->values = NULL;
    f->filling = NULL;
}
// Sets elements [first, first + n) of a stored tensor to values (n), on the host. Set each element once, in any order.
// The call that completes t uploads it and waits for the device. Ends the program if another tensor is incomplete.
static void frozen_weights_set(struct frozen_weights *f, const struct tensor *t, int64_t first, const float *values,
                               int64_t n, struct device *dev) {
    if (!f->filling) {
        f->filling = t;
        f->filled = 0;
        f->values = (float *)malloc((size_t)t->count * sizeof *f->values);
        if (!f->values)
            fail("out of memory for the frozen weight %s: its %lld values in fp32", t->name, (long long)t->count);
    }
    if (f->filling != t)
        fail("the frozen weight %s is set before %s is complete", t->name, f->filling->name);
    memcpy(f->values + first, values, (size_t)n * sizeof *values);
    f->filled += n;
    if (f->filled == t->count)
        frozen_weights_store(f, dev);
}
