#include "kernels/newton_schulz.cuh"
#include "kernels/four.cuh" // FLAT_THREADS

#ifdef TARGET_CUDA

static __global__ void newton_schulz_normalize_kernel(floatX *x, const double *squares, double divisor, int64_t n) {
    const int64_t at = ((int64_t)blockIdx.x * FLAT_THREADS + threadIdx.x) * 4;
    const int count = n - at >= 4 ? 4 : n > at ? (int)(n - at) : 0;
    const float factor = newton_schulz_factor(*squares, divisor);
    four<floatX> y = four_load(x + at, count);
    for (int i = 0; i < 4; i++)
        y.x[i] = to_floatX(factor > 0 ? factor * to_float(y.x[i]) : 0.0f);
    four_store(x + at, y, count);
}
void newton_schulz_normalize(floatX *x, const double *squares, double divisor, int64_t n, struct device *dev) {
    LAUNCH(dev, newton_schulz_normalize_kernel, blocks_for(n, 4 * FLAT_THREADS), FLAT_THREADS, 0, x, squares, divisor,
           n);
}

static __global__ void newton_schulz_round_kernel(floatX *out, const float *in, int64_t n) {
    const int64_t at = ((int64_t)blockIdx.x * FLAT_THREADS + threadIdx.x) * 4;
    const int count = n - at >= 4 ? 4 : n > at ? (int)(n - at) : 0;
    const four<float> y = four_load(in + at, count);
    four<floatX> rounded;
    for (int i = 0; i < 4; i++)
        rounded.x[i] = to_floatX(y.x[i]);
    four_store(out + at, rounded, count);
}
void newton_schulz_round(floatX *out, const float *in, int64_t n, struct device *dev) {
    LAUNCH(dev, newton_schulz_round_kernel, blocks_for(n, 4 * FLAT_THREADS), FLAT_THREADS, 0, out, in, n);
}

static __global__ void newton_schulz_polynomial_kernel(floatX *square, const floatX *gram, float a, float b, float c,
                                                       int side, int64_t n) {
    const int64_t at = ((int64_t)blockIdx.x * FLAT_THREADS + threadIdx.x) * 4;
    const int count = n - at >= 4 ? 4 : n > at ? (int)(n - at) : 0;
    const four<floatX> first = four_load(gram + at, count);
    four<floatX> second = four_load(square + at, count);
    for (int i = 0; i < 4; i++) {
        const float diagonal = (at + i) % (side + 1) == 0 ? a : 0;
        second.x[i] = to_floatX(diagonal + b * to_float(first.x[i]) + c * to_float(second.x[i]));
    }
    four_store(square + at, second, count);
}
void newton_schulz_polynomial(floatX *square, const floatX *gram, float a, float b, float c, int side,
                              struct device *dev) {
    const int64_t n = (int64_t)side * side;
    LAUNCH(dev, newton_schulz_polynomial_kernel, blocks_for(n, 4 * FLAT_THREADS), FLAT_THREADS, 0, square, gram, a, b,
           c, side, n);
}

#else

void newton_schulz_normalize(floatX *x, const double *squares, double divisor, int64_t n, struct device *dev) {
    const float factor = newton_schulz_factor(*squares, divisor);
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++)
        x[i] = to_floatX(factor > 0 ? factor * to_float(x[i]) : 0.0f);
}
void newton_schulz_round(floatX *out, const float *in, int64_t n, struct device *dev) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++)
        out[i] = to_floatX(in[i]);
}
void newton_schulz_polynomial(floatX *square, const floatX *gram, float a, float b, float c, int side,
                              struct device *dev) {
#pragma omp parallel for schedule(static)
    for (int row = 0; row < side; row++) {
        floatX *to = square + (int64_t)row * side;
        const floatX *from = gram + (int64_t)row * side;
        const float diagonal = a + b * to_float(from[row]) + c * to_float(to[row]);
#pragma omp simd
        for (int i = 0; i < side; i++)
            to[i] = to_floatX(b * to_float(from[i]) + c * to_float(to[i]));
        to[row] = to_floatX(diagonal);
    }
}

#endif
