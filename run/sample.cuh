// Sampling: draws the next token of each sequence from the logits, one token at a time through the KV cache.
#pragma once
#include "run/model.cuh"      // gpt_prefill, gpt_decode
#include "kernels/random.cuh" // random_uniform

// The k-th largest of n values (k from 1), by quickselect; reorders them.
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

static int compare_descending(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}
// The smallest of the largest weights that together reach `share` of the sum. `sorted` has room for V floats.
static float smallest_of_share(const float *weights, int V, double share, float *sorted) {
    int n = 0;
    double sum = 0, reached = 0;
    for (int i = 0; i < V; i++)
        if (weights[i] > 0) {
            sorted[n++] = weights[i];
            sum += weights[i];
        }
    qsort(sorted, (size_t)n, sizeof *sorted, compare_descending);
    for (int i = 0; i < n; i++) {
        reached += sorted[i];
        if (reached >= share * sum)
            return sorted[i];
    }
    return 0;
}

// Draws a token from softmax(logits / temperature) over the top_k largest logits (0: all) and, of these, over the
// likeliest tokens that together have the probability top_p (1: all; Holtzman et al. 2020). Temperature 0 takes the
// largest logit. `u` is uniform in [0, 1); `scratch` has room for 2 V floats.
static int sample_token(const float *logits, int V, double temperature, int top_k, double top_p, double u,
                        float *scratch) {
    int largest = 0;
    for (int i = 1; i < V; i++)
        if (logits[i] > logits[largest])
            largest = i;
    if (temperature <= 0)
        return largest;
    float threshold = -INFINITY;
    if (top_k > 0 && top_k < V) {
        memcpy(scratch, logits, (size_t)V * sizeof *scratch);
        threshold = kth_largest(scratch, V, top_k);
    }
    double sum = 0;
    for (int i = 0; i < V; i++) {
        scratch[i] = logits[i] < threshold ? 0 : (float)exp((logits[i] - logits[largest]) / temperature);
        sum += scratch[i];
    }
    if (top_p < 1) {
        const float least = smallest_of_share(scratch, V, top_p, scratch + V);
        sum = 0;
        for (int i = 0; i < V; i++) {
            scratch[i] = scratch[i] < least ? 0 : scratch[i];
            sum += scratch[i];
        }
    }
    double left = u * sum;
    int last = largest;
    for (int i = 0; i < V; i++)
        if (scratch[i] > 0) {
            last = i;
            left -= scratch[i];
            if (left < 0)
                break;
        }
    return last;
}

// Host memory for sampling, allocated by sampler_open, so that nothing is allocated between training steps.
struct sampler {
    int32_t *fed;       // (sequences, prompt_tokens): the prompts, then (sequences) current tokens
    int32_t *positions; // (sequences) of the current tokens
    floatX *row;        // (Vp) logits in the device's type
    float *logits;      // (3, Vp) of one sequence, then sample_token's scratch
};
static void sampler_open(struct sampler *sampler, const struct gpt *m) {
    sampler->fed = (int32_t *)calloc((size_t)m->sequences * (size_t)m->prompt_tokens, sizeof *sampler->fed);
    sampler->positions = (int32_t *)calloc((size_t)m->sequences, sizeof *sampler->positions);
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

// Draws the token of sequence b that follows position t.
static int32_t sample_next(const struct gpt *m, struct sampler *sampler, const floatX *logits, int b, int t,
                           uint64_t stream) {
    const struct config *c = &m->config;
    const int Vp = m->shape.Vp;
    device_download(sampler->row, logits + (int64_t)b * Vp, (size_t)Vp * sizeof *sampler->row, m->dev);
    for (int i = 0; i < Vp; i++)
        sampler->logits[i] = to_float(sampler->row[i]);
    const double u = random_uniform(c->seed, stream, (uint64_t)t * (uint64_t)m->sequences + (uint64_t)b);
    return sample_token(sampler->logits, m->shape.V, c->temperature, c->top_k, c->top_p, u, sampler->logits + Vp);
}

// Continues tokens (sequences, n), of which row b begins with a prompt of lengths[b] >= 1 tokens, by as many tokens as
// the longest prompt, of at most prompt_tokens, leaves of n; n - 1 is at most decode_tokens. The same seed and stream
// give the same text. `stop` (NULL: never) is called before each token; where it returns true, generation ends and
// returns false.
static bool gpt_generate(struct gpt *m, struct sampler *sampler, int32_t *tokens, const int *lengths, int n,
                         uint64_t stream, bool (*stop)(void)) {
    const int B = m->sequences, T = m->prompt_tokens;
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
        logits = i == 0 ? gpt_prefill(m, sampler->fed, lengths) : gpt_decode(m, sampler->fed, sampler->positions);
        for (int b = 0; b < B; b++) {
            const int t = lengths[b] + i; // the new token's position
            sampler->fed[b] = tokens[(int64_t)b * n + t] = sample_next(m, sampler, logits, b, t - 1, stream);
            sampler->positions[b] = t;
        }
    }
    return true;
}
