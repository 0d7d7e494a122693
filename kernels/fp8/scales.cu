#include "kernels/fp8/scales.cuh"
#include "kernels/ptx.cuh"    // shared memory
#include "kernels/reduce.cuh" // lanes_max

#ifdef TARGET_CUDA

enum { FP8_SCALES_THREADS = 256, FP8_HISTORY_EACH = 4 }; // entries of a history that a thread takes at a time

static __global__ void fp8_scales_begin_kernel(struct fp8_scale *scales, const uint32_t *weight_amaxes, int linears,
                                               int n) {
    const int i = (int)(blockIdx.x * FP8_SCALES_THREADS + threadIdx.x);
    if (i < n)
        fp8_begin_one(scales + i, weight_amaxes, linears, i);
}
void fp8_scales_begin(struct fp8_scale *scales, const uint32_t *weight_amaxes, int linears, int n, struct device *dev) {
    LAUNCH(dev, fp8_scales_begin_kernel, blocks_for(n, FP8_SCALES_THREADS), FP8_SCALES_THREADS, 0, scales,
           weight_amaxes, linears, n);
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
void fp8_scales_report(double *report, uint64_t *counts, const struct fp8_scale *scales, int num_counts, int n,
                       struct device *dev) {
    LAUNCH(dev, fp8_scales_report_kernel, blocks_for(num_counts + n, FP8_SCALES_THREADS), FP8_SCALES_THREADS, 0, report,
           counts, scales, num_counts, n);
}

// Sets step_amax to the ranks' largest amax, and check->finite to 0 if one isn't finite. The next kernel reads these.
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
// Ends the step of one scale per block: where check->finite, step_amax enters the scale's history. The history moves by
// one entry, in chunks from its end on, and a chunk is read before any of it is overwritten.
static __global__ void __launch_bounds__(FP8_SCALES_THREADS)
    fp8_scales_update_kernel(struct fp8_scale *scales, float *history, const struct gradient_check *check,
                             struct fp8_delay delay, struct fp8_scales_order order) {
    const int i = (int)blockIdx.x, thread = (int)threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int chunk = FP8_SCALES_THREADS * FP8_HISTORY_EACH;
    const bool finite = check->finite != 0;
    const float newest = fp8_float_from_bits(scales[i].step_amax);
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
            fp8_end_one(scales + i, i, delay.most_recent ? newest : largest, finite, delay.margin, order);
    }
}
void fp8_scales_update(struct fp8_scale *scales, float *history, struct gradient_check *check, const double *reports,
                       int ranks, int width, int first, int n, struct fp8_delay delay, struct fp8_scales_order order,
                       struct device *dev) {
    LAUNCH(dev, fp8_scales_check_kernel, blocks_for(n, FP8_SCALES_THREADS), FP8_SCALES_THREADS, 0, scales, check,
           reports + first, ranks, width, n);
    LAUNCH(dev, fp8_scales_update_kernel, (unsigned)n, FP8_SCALES_THREADS, FP8_SCALES_THREADS / 32 * sizeof(float),
           scales, history, check, delay, order);
}

#else

void fp8_scales_begin(struct fp8_scale *scales, const uint32_t *weight_amaxes, int linears, int n, struct device *dev) {
    for (int i = 0; i < n; i++)
        fp8_begin_one(scales + i, weight_amaxes, linears, i);
}

void fp8_scales_report(double *report, uint64_t *counts, const struct fp8_scale *scales, int num_counts, int n,
                       struct device *dev) {
    for (int i = 0; i < num_counts; i++) {
        report[i] = (double)counts[i];
        counts[i] = 0;
    }
    for (int i = 0; i < n; i++)
        report[num_counts + i] = fp8_report_one(scales + i);
}

// Puts `newest` in front of the history (length), whose last entry it drops. Returns the largest entry.
static float fp8_history_enter(float *history, int length, float newest) {
    float largest = newest;
    memmove(history + 1, history, (size_t)(length - 1) * sizeof *history);
    history[0] = newest;
#pragma omp simd reduction(max : largest)
    for (int j = 1; j < length; j++)
        largest = history[j] > largest ? history[j] : largest;
    return largest;
}
void fp8_scales_update(struct fp8_scale *scales, float *history, struct gradient_check *check, const double *reports,
                       int ranks, int width, int first, int n, struct fp8_delay delay, struct fp8_scales_order order,
                       struct device *dev) {
    for (int i = 0; i < n; i++) {
        scales[i].step_amax = fp8_largest_report(reports + first, ranks, width, i);
        if (scales[i].step_amax >= 0x7f800000u)
            check->finite = 0;
    }
    const bool finite = check->finite != 0;
#pragma omp parallel for schedule(static)
    for (int i = 0; i < n; i++) {
        const float newest = fp8_float_from_bits(scales[i].step_amax);
        float largest = 0;
        if (finite)
            largest = fp8_history_enter(history + (int64_t)i * delay.length, delay.length, newest);
        fp8_end_one(scales + i, i, delay.most_recent ? newest : largest, finite, delay.margin, order);
    }
}

#endif
