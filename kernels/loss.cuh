// Cross entropy of softmax(logits) against one target per row, and its gradient in the logits' place.
#pragma once
#include "kernels/device.cuh"      // floatX
#include "kernels/vector_math.cuh" // vector_expf
#include <float.h>                 // FLT_MAX
#include <math.h>                  // logf

// Logits whose maximum is taken before their exponentials are added: the second reading comes from the first-level cache.
enum { LOSS_BLOCK = 1024 };

struct softmax_row {
    float max, sum; // sum of e^(x - max)
};

// One pass with a running maximum (Milakov and Gimelshein 2018). A NaN, and an infinity through infinity - infinity, ends up
// in `sum`. The maximum begins at a finite number, so that logits of -infinity count as 0.
static inline struct softmax_row softmax_statistics(const floatX *__restrict__ x, int V) {
    struct softmax_row row = {-FLT_MAX, 0};
    for (int begin = 0; begin < V; begin += LOSS_BLOCK) {
        const int end = V - begin < LOSS_BLOCK ? V : begin + LOSS_BLOCK;
        float max = row.max, sum = 0;
#pragma omp simd reduction(max : max)
        for (int i = begin; i < end; i++)
            max = to_float(x[i]) > max ? to_float(x[i]) : max;
#pragma omp simd reduction(+ : sum)
        for (int i = begin; i < end; i++)
            sum += vector_expf(to_float(x[i]) - max);
        row.sum = row.sum * vector_expf(row.max - max) + sum;
        row.max = max;
    }
    return row;
}

// losses = ln(sum_{j < V} e^logits[j]) - logits[target]; the padded columns V <= j < Vp are not read.
// backward: logits <- dloss * (softmax(logits) - onehot(target)), padded columns <- 0.
static void cross_entropy(float *losses,          // (N)
                          floatX *logits,         // (N, Vp): in logits, out dlogits
                          const int32_t *targets, // (N)
                          float dloss, int64_t N, int V, int Vp, bool backward, struct device *dev) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        floatX *__restrict__ row = logits + n * Vp;
        const struct softmax_row softmax = softmax_statistics(row, V);
        // The target's logit is taken off before the logarithm is added: both may be 1e4 where the loss is 1.
        const float target_logit = to_float(row[targets[n]]) - softmax.max;
        losses[n] = logf(softmax.sum) - target_logit;
        if (!backward)
            continue;
        const float scale = dloss / softmax.sum;
#pragma omp simd
        for (int i = 0; i < V; i++)
            row[i] = to_floatX(scale * vector_expf(to_float(row[i]) - softmax.max));
        row[targets[n]] = to_floatX(scale * vector_expf(target_logit) - dloss);
        memset(row + V, 0, (size_t)(Vp - V) * sizeof *row);
    }
}

// In double and in the order of the rows.
static double losses_sum(const float *losses, // (N)
                         int64_t N, struct device *dev) {
    double sum = 0;
    for (int64_t n = 0; n < N; n++)
        sum += losses[n];
    return sum;
}
