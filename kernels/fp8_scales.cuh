// The scales of a model's FP8 tensors over a step: collected amaxes, and delayed scales by their history.
#pragma once
#include "kernels/adamw.cuh"  // struct gradient_check
#include "kernels/fp8.cuh"    // struct fp8_scale
#include "kernels/ptx.cuh"    // shared memory
#include "kernels/reduce.cuh" // lanes_max
#include <math.h>             // ldexpf

// How the history makes a scale (TransformerEngine's DelayedScaling, common/recipe): fp8_largest / amax / 2^margin,
// with the largest of the last `length` steps' amaxes, or the last one.
struct fp8_delay {
    int length; // steps; 0: scales are not delayed
    int margin;
    bool most_recent;
};

// Scale i is of an input, a weight or a gradient where i % 3 is 0, 1 or 2 (enum fp8_operand in fp8.cuh).
//
// Begins a micro-batch: each scale's step_amax becomes the larger of itself and amax, and amax becomes 0; that of
// weight i / 3 becomes weight_amaxes[i / 3], where weight_amaxes are given.
static void fp8_scales_begin(struct fp8_scale *scales,      // (n)
                             const uint32_t *weight_amaxes, // (n / 3); NULL: none is given
                             int n, struct device *dev);

// Writes what this rank reports of a step: `counts` as doubles and, where there are scales to delay (n > 0), the step's
// amaxes; counts become 0.
static void fp8_scales_report(double *report,                 // (num_counts + n)
                              uint64_t *counts,               // (num_counts)
                              const struct fp8_scale *scales, // (n)
                              int num_counts, int n, struct device *dev);

// Ends a step of delayed scales, by the amaxes in the ranks' reports, from column `first` on. check->finite becomes 0
// where one is infinite or NaN. Where the check then is finite, each scale's largest amax enters its history, which
// drops its oldest, and `delayed` follows from the history; an amax of 0 leaves `delayed` as it is. In any case amax
// and step_amax become 0.
static void fp8_scales_update(struct fp8_scale *scales,     // (n)
                              float *history,               // (n, delay.length) newest first; 0: no step
                              struct gradient_check *check, // (1)
                              const double *reports,        // (ranks, width)
                              int ranks, int width, int first, int n, struct fp8_delay delay,
                              enum fp8_format gradients, // of scale i where i % 3 == 2; others are FP8_E4M3
                              struct device *dev);

// The delayed scale by the history's amax > 0, limited as fp8_scale_of limits, at both ends, since a margin may make it
// small. Dividing by 2^margin first is exact.
HOST_DEVICE float fp8_delayed_scale(float amax, enum fp8_format format, int margin) {
    const float scale = ldexpf(fp8_largest(format), -margin) / amax;
    return scale < 0x1p-126f ? 0x1p-126f : scale < 0x1p126f ? scale : 0x1p126f;
}
HOST_DEVICE enum fp8_format fp8_scale_format(int i, enum fp8_format gradients) {
    return i % 3 == 2 ? gradients : FP8_E4M3;
}
HOST_DEVICE float fp8_float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
// The largest magnitude of column i of the reports' amaxes; on the host and on the device the same bits, NaN on top.
HOST_DEVICE uint32_t fp8_largest_report(const double *amaxes, int ranks, int width, int i) {
    uint32_t largest = 0;
    for (int rank = 0; rank < ranks; rank++) {
        const uint32_t amax = fp8_magnitude((float)amaxes[(int64_t)rank * width + i]);
        largest = amax > largest ? amax : largest;
    }
    return largest;
}
HOST_DEVICE void fp8_begin_one(struct fp8_scale *scale, const uint32_t *weight_amaxes, int i) {
    if (scale->amax > scale->step_amax)
        scale->step_amax = scale->amax;
    scale->amax = i % 3 == 1 && weight_amaxes != NULL ? weight_amaxes[i / 3] : 0;
}
HOST_DEVICE double fp8_report_one(const struct fp8_scale *scale) {
    return (double)fp8_float_of(scale->amax > scale->step_amax ? scale->amax : scale->step_amax);
}
// The end of a step of scale i, whose history has its new amax already, where the step was not skipped.
HOST_DEVICE void fp8_end_one(struct fp8_scale *scale, int i, float history_amax, bool finite, int margin,
                             enum fp8_format gradients) {
    if (finite && history_amax > 0)
        scale->delayed = fp8_delayed_scale(history_amax, fp8_scale_format(i, gradients), margin);
    scale->amax = 0;
    scale->step_amax = 0;
}

#ifdef TARGET_CUDA

enum { FP8_SCALES_THREADS = 256, FP8_HISTORY_EACH = 4 }; // a thread takes so many entries of a history at a time

static __global__ void fp8_scales_begin_kernel(struct fp8_scale *scales, const uint32_t *weight_amaxes, int n) {
    const int i = (int)(blockIdx.x * FP8_SCALES_THREADS + threadIdx.x);
    if (i < n)
        fp8_begin_one(scales + i, weight_amaxes, i);
}
static void fp8_scales_begin(struct fp8_scale *scales, const uint32_t *weight_amaxes, int n, struct device *dev) {
    LAUNCH(dev, fp8_scales_begin_kernel, blocks_for(n, FP8_SCALES_THREADS), FP8_SCALES_THREADS, 0, scales,
           weight_amaxes, n);
}

static __global__ void fp8_scales_report_kernel(double *report, uint64_t *counts, const struct fp8_scale *scales,
                                                int num_counts, int n) {
    const int i = (int)(blockIdx.x * FP8_SCALES_THREADS + threadIdx.x);
    if (i < num_counts) {
        report[i] = (double)counts[i];
        counts[i] = 0;
    } else if (i < num_counts + n)
        report[i] = fp8_report_one(scales + (i - num_counts));
}
static void fp8_scales_report(double *report, uint64_t *counts, const struct fp8_scale *scales, int num_counts, int n,
                              struct device *dev) {
    LAUNCH(dev, fp8_scales_report_kernel, blocks_for(num_counts + n, FP8_SCALES_THREADS), FP8_SCALES_THREADS, 0, report,
           counts, scales, num_counts, n);
}

// Leaves the ranks' largest amax in step_amax. The check is settled when this kernel ends: the next one reads it.
static __global__ void fp8_scales_check_kernel(struct fp8_scale *scales, struct gradient_check *check,
                                               const double *amaxes, int ranks, int width, int n) {
    const int i = (int)(blockIdx.x * FP8_SCALES_THREADS + threadIdx.x);
    if (i >= n)
        return;
    const uint32_t amax = fp8_largest_report(amaxes, ranks, width, i);
    scales[i].step_amax = amax;
    if (amax >= 0x7f800000u)
        check->finite = 0; // the one value that any thread writes
}
// A block a scale. The history moves by one, from its end on: a chunk is read before it and the entry below it, which
// belongs to the next chunk, are overwritten.
static __global__ void __launch_bounds__(FP8_SCALES_THREADS)
    fp8_scales_update_kernel(struct fp8_scale *scales, float *history, const struct gradient_check *check,
                             struct fp8_delay delay, enum fp8_format gradients) {
    const int i = (int)blockIdx.x, thread = (int)threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int chunk = FP8_SCALES_THREADS * FP8_HISTORY_EACH;
    const bool finite = check->finite != 0;
    const float newest = fp8_float_of(scales[i].step_amax);
    float *entries = history + (int64_t)i * delay.length;
    float largest = 0;
    for (int begin = (delay.length - 1) / chunk * chunk; finite && begin >= 0; begin -= chunk) {
        float moved[FP8_HISTORY_EACH];
#pragma unroll
        for (int j = 0; j < FP8_HISTORY_EACH; j++) {
            const int at = begin + j * FP8_SCALES_THREADS + thread;
            moved[j] = at == 0 ? newest : at < delay.length ? entries[at - 1] : 0;
            largest = fmaxf(largest, moved[j]);
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < FP8_HISTORY_EACH; j++) {
            const int at = begin + j * FP8_SCALES_THREADS + thread;
            if (at < delay.length)
                entries[at] = moved[j];
        }
    }
    largest = lanes_max(largest, 32);
    if (lane == 0)
        store_shared_float(shared_memory() + 4 * (uint32_t)warp, largest);
    __syncthreads(); // scales[i] was read, too
    if (warp == 0) {
        largest =
            lanes_max(lane < FP8_SCALES_THREADS / 32 ? load_shared_float(shared_memory() + 4 * (uint32_t)lane) : 0, 32);
        if (lane == 0)
            fp8_end_one(scales + i, i, delay.most_recent ? newest : largest, finite, delay.margin, gradients);
    }
}
static void fp8_scales_update(struct fp8_scale *scales, float *history, struct gradient_check *check,
                              const double *reports, int ranks, int width, int first, int n, struct fp8_delay delay,
                              enum fp8_format gradients, struct device *dev) {
    LAUNCH(dev, fp8_scales_check_kernel, blocks_for(n, FP8_SCALES_THREADS), FP8_SCALES_THREADS, 0, scales, check,
           reports + first, ranks, width, n);
    LAUNCH(dev, fp8_scales_update_kernel, (unsigned)n, FP8_SCALES_THREADS, FP8_SCALES_THREADS / 32 * sizeof(float),
           scales, history, check, delay, gradients);
}

#else

static void fp8_scales_begin(struct fp8_scale *scales, const uint32_t *weight_amaxes, int n, struct device *dev) {
    for (int i = 0; i < n; i++)
        fp8_begin_one(scales + i, weight_amaxes, i);
}

static void fp8_scales_report(double *report, uint64_t *counts, const struct fp8_scale *scales, int num_counts, int n,
                              struct device *dev) {
    for (int i = 0; i < num_counts; i++) {
        report[i] = (double)counts[i];
        counts[i] = 0;
    }
    for (int i = 0; i < n; i++)
        report[num_counts + i] = fp8_report_one(scales + i);
}

// Puts `newest` in front; returns the largest entry.
static float fp8_history_enter(float *history, int length, float newest) {
    float largest = newest;
    memmove(history + 1, history, (size_t)(length - 1) * sizeof *history);
    history[0] = newest;
#pragma omp simd reduction(max : largest)
    for (int j = 1; j < length; j++)
        largest = history[j] > largest ? history[j] : largest;
    return largest;
}
static void fp8_scales_update(struct fp8_scale *scales, float *history, struct gradient_check *check,
                              const double *reports, int ranks, int width, int first, int n, struct fp8_delay delay,
                              enum fp8_format gradients, struct device *dev) {
    for (int i = 0; i < n; i++) {
        scales[i].step_amax = fp8_largest_report(reports + first, ranks, width, i);
        if (scales[i].step_amax >= 0x7f800000u)
            check->finite = 0;
    }
    const bool finite = check->finite != 0;
#pragma omp parallel for schedule(static)
    for (int i = 0; i < n; i++) {
        const float newest = fp8_float_of(scales[i].step_amax);
        float largest = 0;
        if (finite)
            largest = fp8_history_enter(history + (int64_t)i * delay.length, delay.length, newest);
        fp8_end_one(scales + i, i, delay.most_recent ? newest : largest, finite, delay.margin, gradients);
    }
}

#endif
