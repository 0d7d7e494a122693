// Keeps the scales of a model's FP8 tensors over a step: collects amaxes, and makes delayed scales of their history.
#pragma once
#include "kernels/adamw.cuh"   // struct gradient_check
#include "kernels/fp8/fp8.cuh" // struct fp8_scale
#include <math.h>              // ldexpf
#include <sys/cdefs.h>         // __BEGIN_DECLS

// Says how the history makes a scale (TransformerEngine's DelayedScaling, common/recipe): fp8_largest / amax /
// 2^margin, where amax is the largest of the last `length` steps or, if most_recent, the last step's.
struct fp8_delay {
    int length; // steps; 0: scales are not delayed
    int margin;
    bool most_recent;
};

// The order of n scales. Scale i < linears is of a linear layer's input, weight or gradient where i % 3 is 0, 1 or 2
// (enum fp8_operand in model/fp8.cuh). The scales of attention follow, of gradients from number attention_gradients on.
struct fp8_scales_order {
    int linears, attention_gradients;
    enum fp8_format gradients; // of gradients; others are FP8_E4M3
};

__BEGIN_DECLS
// Begins a micro-batch. Merges each scale's amax into its step_amax, then sets amax to 0. If weight_amaxes are given,
// sets amax of a scale i of a linear layer's weight to weight_amaxes[i / 3] instead.
void fp8_scales_begin(struct fp8_scale *scales,      // (n)
                      const uint32_t *weight_amaxes, // (linears / 3); NULL: none is given
                      int linears,                   // as in struct fp8_scales_order
                      int n, struct device *dev);

// Writes a rank's report of a step: `counts`, which become 0, then each scale's largest amax as a number; scales stay.
void fp8_scales_report(double *report,                 // (num_counts + n)
                       uint64_t *counts,               // (num_counts)
                       const struct fp8_scale *scales, // (n); not read where n is 0
                       int num_counts, int n, struct device *dev);

// Ends a step of delayed scales, by the ranks' amaxes: scale i's are in column first + i of `reports`. If one of them
// is infinite or NaN, check->finite becomes 0. Where it is 0, histories and `delayed` stay. Otherwise each scale's
// largest amax enters its history, and sets `delayed` if the history's amax is > 0. Always zeroes amax and step_amax.
void fp8_scales_update(struct fp8_scale *scales,     // (n)
                       float *history,               // (n, delay.length > 0) newest first; 0: no step
                       struct gradient_check *check, // (1)
                       const double *reports,        // (ranks, width)
                       int ranks, int width, int first, int n, struct fp8_delay delay, struct fp8_scales_order order,
                       struct device *dev);
__END_DECLS

// Returns fp8_largest / 2^margin / amax, limited to 2^-126 to 2^126. fp8_scale_of has no lower limit; a large margin
// asks for one. amax is the history's, finite and > 0. Dividing by 2^margin first is exact.
HOST_DEVICE float fp8_delayed_scale(float amax, enum fp8_format format, int margin) {
    const float scale = ldexpf(fp8_largest(format), -margin) / amax;
    return scale < 0x1p-126f ? 0x1p-126f : scale < 0x1p126f ? scale : 0x1p126f;
}
HOST_DEVICE enum fp8_format fp8_scale_format(int i, struct fp8_scales_order order) {
    const bool is_gradient = i < order.linears ? i % 3 == 2 : i >= order.attention_gradients;
    return is_gradient ? order.gradients : FP8_E4M3;
}
HOST_DEVICE float fp8_float_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
// Returns the bits of the largest magnitude in column i of `amaxes` (ranks, width), NaN on top, on all targets alike.
HOST_DEVICE uint32_t fp8_largest_report(const double *amaxes, int ranks, int width, int i) {
    uint32_t largest = 0;
    for (int rank = 0; rank < ranks; rank++) {
        const uint32_t amax = fp8_magnitude((float)amaxes[(int64_t)rank * width + i]);
        largest = amax > largest ? amax : largest;
    }
    return largest;
}
// Does fp8_scales_begin's work for scale i: raises step_amax to amax, then sets amax to 0, or to the weight's if given.
HOST_DEVICE void fp8_begin_one(struct fp8_scale *scale, const uint32_t *weight_amaxes, int linears, int i) {
    if (scale->amax > scale->step_amax)
        scale->step_amax = scale->amax;
    scale->amax = i < linears && i % 3 == 1 && weight_amaxes != NULL ? weight_amaxes[i / 3] : 0;
}
// Returns the scale's largest amax of the step so far, as a number.
HOST_DEVICE double fp8_report_one(const struct fp8_scale *scale) {
    return (double)fp8_float_from_bits(scale->amax > scale->step_amax ? scale->amax : scale->step_amax);
}
// Ends a step of scale i: if `finite` and history_amax, the step's included, is > 0, sets `delayed`. Zeroes the amaxes.
HOST_DEVICE void fp8_end_one(struct fp8_scale *scale, int i, float history_amax, bool finite, int margin,
                             struct fp8_scales_order order) {
    if (finite && history_amax > 0)
        scale->delayed = fp8_delayed_scale(history_amax, fp8_scale_format(i, order), margin);
    scale->amax = 0;
    scale->step_amax = 0;
}
