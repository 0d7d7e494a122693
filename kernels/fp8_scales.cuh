// The scales of a model's FP8 tensors over a step: collected amaxes, and delayed scales by their history.
#pragma once
#include "kernels/adamw.cuh" // struct gradient_check
#include "kernels/fp8.cuh"   // struct fp8_scale

// How the history makes a scale (TransformerEngine's DelayedScaling, common/recipe): fp8_largest / amax / 2^margin, with
// the largest of the last `length` steps' amaxes, or the last one.
struct fp8_delay {
    int length; // steps; 0: scales are not delayed
    int margin;
    bool most_recent;
};

// Begins a micro-batch: each scale's amax moves into step_amax, where it is larger, and becomes 0. A weight's, of which
// is_weight(i) = i % 3 == 1, becomes that of weight_amaxes, where this is given.
static void fp8_scales_begin(struct fp8_scale *scales,      // (n)
                             const uint32_t *weight_amaxes, // (ranks, n / 3)
                             int n, int ranks, struct device *dev);

// Writes what this rank reports of a step: `counts` as doubles and, where there are scales to delay (n > 0), the step's
// amaxes; counts become 0.
static void fp8_scales_report(double *report,                 // (num_counts + n)
                              uint64_t *counts,               // (num_counts)
                              const struct fp8_scale *scales, // (n)
                              int num_counts, int n, struct device *dev);

// Ends a step of delayed scales, by the amaxes in the ranks' reports, from column `first` on. check->finite becomes 0
// where one is infinite or NaN. Where the check then is finite, each scale's largest amax enters its history, which
// drops its oldest, and `delayed` follows from the history; an amax of 0 leaves `delayed` as it is. In any case amax
// (but a weight's) and step_amax become 0.
static void fp8_scales_update(struct fp8_scale *scales,     // (n)
                              float *history,               // (n, delay.length) newest first; 0: no step
                              struct gradient_check *check, // (1)
                              const double *reports,        // (ranks, width)
                              int ranks, int width, int first, int n, struct fp8_delay delay,
                              enum fp8_format gradients, // of scale i where i % 3 == 2; others are FP8_E4M3
                              struct device *dev);
