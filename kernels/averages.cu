#include "kernels/averages.cuh"
#include "kernels/four.cuh"         // four_load, four_store, FLAT_THREADS
#include "kernels/state_format.cuh" // parameter_joined, split_low

#ifdef TARGET_CUDA

// Returns r's parameters [at, at + 4) in fp32, joined with any remainders; all but the first `count` are 0.
DEVICE_FUNCTION four<float> parameters_four(const struct averages_range &r, int64_t at, int count) {
    const four<floatX> rounded = four_load(r.params + at, count);
    four<uint16_t> low = {};
    four<float> value;
    if (r.remainder != NULL)
        low = four_load(r.remainder + at, count);
    for (int i = 0; i < 4; i++)
        value.x[i] = r.remainder != NULL ? parameter_joined(rounded.x[i], low.x[i]) : to_float(rounded.x[i]);
    return value;
}
static __global__ void averages_update_kernel(struct averages_range r, float decay, float rest,
                                              const struct gradient_check *check) {
    const int64_t at = ((int64_t)blockIdx.x * FLAT_THREADS + threadIdx.x) * 4;
    const int count = r.n - at >= 4 ? 4 : r.n > at ? (int)(r.n - at) : 0;
    four<float> average = four_load(r.averages + at, count);
    const four<float> value = parameters_four(r, at, count);
    for (int i = 0; i < 4; i++)
        average.x[i] = average_of(average.x[i], value.x[i], decay, rest);
    if (check == NULL || check->finite)
        four_store(r.averages + at, average, count);
}
void averages_update(struct averages_range r, float decay, const struct gradient_check *check, struct device *dev) {
    if (r.n > 0)
        LAUNCH(dev, averages_update_kernel, blocks_for(r.n, 4 * FLAT_THREADS), FLAT_THREADS, 0, r, decay,
               (float)(1 - (double)decay), check);
}
static __global__ void averages_swap_kernel(struct averages_range r) {
    const int64_t at = ((int64_t)blockIdx.x * FLAT_THREADS + threadIdx.x) * 4;
    const int count = r.n - at >= 4 ? 4 : r.n > at ? (int)(r.n - at) : 0;
    const four<float> average = four_load(r.averages + at, count), value = parameters_four(r, at, count);
    four<floatX> rounded;
    four<uint16_t> low;
    for (int i = 0; i < 4; i++) {
        rounded.x[i] = parameter_rounded(average.x[i]);
        low.x[i] = split_low(average.x[i]);
    }
    four_store(r.averages + at, value, count);
    four_store(r.params + at, rounded, count);
    if (r.remainder != NULL)
        four_store(r.remainder + at, low, count);
}
void averages_swap(struct averages_range r, struct device *dev) {
    if (r.n > 0)
        LAUNCH(dev, averages_swap_kernel, blocks_for(r.n, 4 * FLAT_THREADS), FLAT_THREADS, 0, r);
}

#else

static inline float parameter_value(const struct averages_range *r, int64_t i) {
    return r->remainder ? parameter_joined(r->params[i], r->remainder[i]) : to_float(r->params[i]);
}
void averages_update(struct averages_range r, float decay, const struct gradient_check *check, struct device *dev) {
    const float rest = (float)(1 - (double)decay);
    if (check != NULL && !check->finite)
        return;
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < r.n; i++)
        r.averages[i] = average_of(r.averages[i], parameter_value(&r, i), decay, rest);
}
void averages_swap(struct averages_range r, struct device *dev) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < r.n; i++) {
        const float average = r.averages[i], value = parameter_value(&r, i);
        r.averages[i] = value;
        r.params[i] = parameter_rounded(average);
        if (r.remainder)
            r.remainder[i] = split_low(average);
    }
}

#endif
