// Draws the next token of each sequence from the logits, and generates texts token by token through the KV cache.
#pragma once
#include "run/long_wait.h"         // long_wait_begin
#include "run/model.cuh"           // gpt_prefill, gpt_decode
#include "kernels/random.cuh"      // random_uniform
#include "kernels/vector_math.cuh" // vector_expf

// Returns the k-th largest (k from 1 to n) of values (n), by quickselect, which reorders them.
static float kth_largest(float *values, int n, int k) {
    int low = 0, high = n - 1;
    while (low < high) {
        const float pivot = values[low + (high - low) / 2];
        int i = low, j = high;
        while (i <= j) {
            while (values[i] > pivot)
                i++;
            while (values[j] < pivot)
                j--;
            if (i <= j) {
                const float swapped = values[i];
                values[i++] = values[j];
                values[j--] = swapped;
            }
        }
        if (k - 1 <= j)
            high = j;
        else if (k - 1 >= i)
            low = i;
        else
            break;
    }
    return values[k - 1];
}

// Returns the least of the largest weights (V, >= 0) that make up `share` of the sum; 0 if they never do. scratch: (V).
static float smallest_of_share(const float *weights, int V, double share, float *scratch) {
    int n = 0;
    double wanted = 0; // the sum that the largest weights in [low, high] have yet to reach
    for (int i = 0; i < V; i++)
        if (weights[i] > 0) {
            scratch[n++] = weights[i];
            wanted += weights[i];
        }
    wanted *= share;
    int low = 0, high = n - 1;
    while (low < high) {
        const float pivot = scratch[low + (high - low) / 2];
        int above = low, below = high; // [low, above) are larger, (below, high] smaller than the pivot
        double sum_above = 0, sum_equal = 0;
        for (int i = low; i <= below;) {
            const float x = scratch[i];
            if (x > pivot) {
                sum_above += x;
                scratch[i++] = scratch[above];
                scratch[above++] = x;
            } else if (x < pivot) {
                scratch[i] = scratch[below];
                scratch[below--] = x;
            } else {
                sum_equal += x;
                i++;
            }
        }
        if (above > low && wanted <= sum_above)
            high = above - 1;
        else if (wanted <= sum_above + sum_equal)
            return pivot;
        else {
            wanted -= sum_above + sum_equal;
            low = below + 1;
        }
    }
    return low == high ? scratch[low] : 0;
}

static double sum_of(const float *x, int n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++)
        sum += x[i];
    return sum;
}

// Draws index i of weights (n, none negative) with the probability weights[i] / sum; u is uniform in [0, 1).
static int draw(const float *weights, int n, double u) {
    enum { BLOCK_SIZE = 256 };
    double left = u * sum_of(weights, n);
    int last = 0; // of a positive weight: `left` may stay above 0 by rounding
    for (int begin = 0; begin < n; begin += BLOCK_SIZE) {
        const int end = n - begin < BLOCK_SIZE ? n : begin + BLOCK_SIZE;
        const double sum = sum_of(weights + begin, end - begin);
        if (sum <= left && end < n) {
            left -= sum;
            last = sum > 0 ? end - 1 : last;
            continue;
        }
        for (int i = begin; i < end; i++)
            if (weights[i] > 0) {
                last = i;
                left -= weights[i];
                if (left < 0)
                    return i;
            }
    }
    while (last > 0 && weights[last] <= 0)
        last--;
    return last;
}

// Draws a token from softmax(logits / temperature), logits (V), among the top_k largest logits (0: all) and, of these,
// among the likeliest tokens that together have the probability top_p (1: all; Holtzman et al. 2020). Temperature 0
// takes the first largest. Equal logits stay or go together. `u` is uniform in [0, 1); `scratch` holds 2 V floats.
static int sample_token(const float *logits, int V, double temperature, int top_k, double top_p, double u,
                        float *scratch) {
    float largest = -INFINITY, threshold = -INFINITY;
#pragma omp simd reduction(max : largest)
    for (int i = 0; i < V; i++)
        largest = logits[i] > largest ? logits[i] : largest;
    if (temperature <= 0) {
        int i = 0;
        while (i < V - 1 && logits[i] != largest)
            i++;
        return i;
    }
    if (top_k > 0 && top_k < V) {
        memcpy(scratch, logits, (size_t)V * sizeof *scratch);
        threshold = kth_largest(scratch, V, top_k);
    }
    const float divisor = (float)temperature;
#pragma omp simd
    for (int i = 0; i < V; i++) {
        const float weight = vector_expf((logits[i] - largest) / divisor);
        scratch[i] = logits[i] < threshold ? 0 : weight;
    }
    if (top_p < 1) {
        const float least = smallest_of_share(scratch, V, top_p, scratch + V);
#pragma omp simd
        for (int i = 0; i < V; i++)
            scratch[i] = scratch[i] < least ? 0 : scratch[i];
    }
    return draw(scratch, V, u);
}

struct sampler {
    int32_t *fed;            // (sequences, prompt_tokens): the prompts, then (sequences) current tokens
    int32_t *positions;      // (sequences) of the current tokens
    floatX *row;             // (Vp) logits in the device's type
    float *logits;           // (3, Vp) of one sequence, then sample_token's scratch
    struct long_wait *watch; // of the waits for logits; NULL: none
};
static void sampler_open(struct sampler *sampler, const struct gpt *m, struct long_wait *watch) {
    sampler->watch = watch;
    sampler->fed =
        (int32_t *)calloc((size_t)m->generation.sequences * (size_t)m->generation.prompt_tokens, sizeof *sampler->fed);
    sampler->positions = (int32_t *)calloc((size_t)m->generation.sequences, sizeof *sampler->positions);
    sampler->row = (floatX *)calloc((size_t)m->shape.Vp, sizeof *sampler->row);
    sampler->logits = (float *)calloc(3 * (size_t)m->shape.Vp, sizeof *sampler->logits);
    if (!sampler->fed || !sampler->positions || !sampler->row || !sampler->logits)
        fail("out of memory for samples");
}
static void sampler_close(struct sampler *sampler) {
    free(sampler->fed);
    free(sampler->positions);
    free(sampler->row);
    free(sampler->logits);
}

// Draws the token after position t of sequence b, by seed and stream. Waits for the device's logits (sequences, Vp).
static int32_t sample_next(const struct gpt *m, struct sampler *sampler, const floatX *logits, int b, int t,
                           uint64_t stream) {
    const struct config *c = &m->config;
    const int Vp = m->shape.Vp;
    long_wait_begin(sampler->watch);
    device_download(sampler->row, logits + (int64_t)b * Vp, (size_t)Vp * sizeof *sampler->row, m->dev);
    long_wait_end(sampler->watch);
#pragma omp simd
    for (int i = 0; i < Vp; i++)
        sampler->logits[i] = to_float(sampler->row[i]);
    const double u =
        random_uniform(c->training.seed, stream, (uint64_t)t * (uint64_t)m->generation.sequences + (uint64_t)b);
    return sample_token(sampler->logits, m->shape.V, c->evaluation.temperature, c->evaluation.top_k,
                        c->evaluation.top_p, u, sampler->logits + Vp);
}

// Writes tokens after prompts. Row b of tokens (sequences, n) begins with a prompt of lengths[b] (1 to prompt_tokens).
// Each row gets n minus the longest prompt's length more; n - 1 is at most decode_tokens. A seed and stream give one
// text. Returns false once `stop` (NULL: never) is true. Every rank calls this, with a `stop` that says the same.
static bool gpt_generate(struct gpt *m, struct sampler *sampler, int32_t *tokens, const int *lengths, int n,
                         uint64_t stream, bool (*stop)(void)) {
    const int B = m->generation.sequences, T = m->generation.prompt_tokens;
    int longest = 0;
    for (int b = 0; b < B; b++) {
        longest = lengths[b] > longest ? lengths[b] : longest;
        for (int t = 0; t < T; t++)
            sampler->fed[(int64_t)b * T + t] = t < lengths[b] ? tokens[(int64_t)b * n + t] : 0;
    }
    const floatX *logits = NULL;
    for (int i = 0; i < n - longest; i++) {
        if (stop && stop())
            return false;
        long_wait_begin(sampler->watch); // for an upload; sample_next goes on with it
        logits = i == 0 ? gpt_prefill(m, sampler->fed, lengths) : gpt_decode(m, sampler->fed, sampler->positions);
        for (int b = 0; b < B; b++) {
            const int t = lengths[b] + i; // the new token's position
            sampler->fed[b] = tokens[(int64_t)b * n + t] = sample_next(m, sampler, logits, b, t - 1, stream);
            sampler->positions[b] = t;
        }
    }
    return true;
}
