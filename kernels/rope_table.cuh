// The table of cosines and sines that rotary embedding reads, for each way of scaling the frequencies of a model that
// is to reach further than it was trained for. In double: at position 100,000 an angle in fp32 would be off by 0.004.
#pragma once
#include <math.h>    // pow, log, cos, sin
#include <stdbool.h> // bool
#include <stdint.h>  // int64_t
#include <string.h>  // memset

// The frequency of pair i < R/2, R = rotary_dims, where w = theta^(-2i/R) is the frequency without scaling:
enum rope_scaling {
    ROPE_UNSCALED, // w
    ROPE_LINEAR,   // w / factor: position interpolation (Chen et al. 2023)
    ROPE_LLAMA3, // by the rotations that a pair makes in original_positions: w from high_freq_factor up, w / factor up
                 // to low_freq_factor, between them by the rotations (Llama 3.1)
    ROPE_YARN, // by the pair's number: w up to where a pair makes beta_fast rotations in original_positions, w / factor
               // from where it makes beta_slow, between them by the number (Peng et al. 2023, arXiv 2309.00071)
    ROPE_LONGROPE, // w / a factor of the pair's own (Ding et al. 2024, arXiv 2402.13753)
};

// Only the fields of the chosen scaling are read. Where a comment names a default, 0 stands for it.
struct rope_settings {
    int head_dim;    // D, even
    int rotary_dims; // R, even, at most D: the pairs i >= R/2 are not rotated
    double theta;
    enum rope_scaling scaling;
    double factor; // linear, llama3, yarn, longrope's amplitude; of the last two 0: max_positions / original_positions
    double low_freq_factor, high_freq_factor;   // llama3
    double original_positions;                  // llama3; yarn and longrope, where 0 means max_positions
    double beta_fast, beta_slow;                // yarn; 0: 32 and 1
    bool truncate;                              // yarn: the two pairs' numbers are rounded outwards
    double attention_factor;                    // yarn, longrope: the amplitude; 0: derived
    double mscale, mscale_all_dim;              // yarn: of the derived amplitude, where neither is 0
    const double *short_factors, *long_factors; // longrope: (R/2) each
    int max_positions;                          // that the model is made for: yarn, longrope
    int longest; // longrope: the longest sequence of the run; above original_positions the long factors are taken
};

static inline struct rope_settings rope_unscaled(int head_dim, double theta);

// Returns the angle, in radians, between neighboring positions of pair i < D/2; 0 for a pair that is not rotated.
static inline double rope_frequency(const struct rope_settings *settings, int i);
// Returns what rotated pairs are multiplied by; 1 unless scaled by YaRN or LongRoPE.
static inline double rope_amplitude(const struct rope_settings *settings);

// table[p] = amplitude * D/2 cosines, then amplitude * D/2 sines, of the angles of position p. A pair that is not
// rotated has angle 0 and amplitude 1. `table` is memory of the host.
static inline void rope_table(float *table, // (T, D)
                              int T, const struct rope_settings *settings);

static inline struct rope_settings rope_unscaled(int head_dim, double theta) {
    struct rope_settings settings;
    memset(&settings, 0, sizeof settings);
    settings.head_dim = settings.rotary_dims = head_dim;
    settings.theta = theta;
    settings.scaling = ROPE_UNSCALED;
    return settings;
}

static inline double rope_clamp(double x, double low, double high) { return fmin(fmax(x, low), high); }
static inline double rope_original_positions(const struct rope_settings *s) { // 0: max_positions
    return s->original_positions > 0 ? s->original_positions : s->max_positions;
}
static inline double rope_factor(const struct rope_settings *s) { // 0: max_positions / original_positions
    return s->factor > 0 ? s->factor : s->max_positions / rope_original_positions(s);
}

// Returns the number, not whole and of any sign, of the pair that makes `turns` rotations in rope_original_positions.
static inline double rope_yarn_pair(const struct rope_settings *s, double turns) {
    return s->rotary_dims * log(rope_original_positions(s) / (turns * 2 * M_PI)) / (2 * log(s->theta));
}
static inline double rope_yarn_frequency(const struct rope_settings *s, int i, double w) {
    double low = rope_yarn_pair(s, s->beta_fast > 0 ? s->beta_fast : 32);
    double high = rope_yarn_pair(s, s->beta_slow > 0 ? s->beta_slow : 1);
    if (s->truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = fmax(low, 0);
    high = fmin(high, s->rotary_dims - 1); // not R/2 - 1: the paper's code counts elements here
    if (low == high)
        high += 0.001;
    const double scaled = rope_clamp((i - low) / (high - low), 0, 1);
    return w * (1 - scaled + scaled / rope_factor(s));
}
static inline double rope_llama3_frequency(const struct rope_settings *s, double w) {
    const double turns = s->original_positions * w / (2 * M_PI);
    const double kept = rope_clamp((turns - s->low_freq_factor) / (s->high_freq_factor - s->low_freq_factor), 0, 1);
    return w * (kept + (1 - kept) / s->factor);
}
static inline double rope_longrope_frequency(const struct rope_settings *s, int i, double w) {
    const double *factors = s->longest > rope_original_positions(s) ? s->long_factors : s->short_factors;
    return w / factors[i];
}
static inline double rope_frequency(const struct rope_settings *s, int i) {
    if (i >= s->rotary_dims / 2)
        return 0;
    const double w = pow(s->theta, -2.0 * i / s->rotary_dims);
    switch (s->scaling) {
    case ROPE_UNSCALED: return w;
    case ROPE_LINEAR: return w / s->factor;
    case ROPE_LLAMA3: return rope_llama3_frequency(s, w);
    case ROPE_YARN: return rope_yarn_frequency(s, i, w);
    case ROPE_LONGROPE: return rope_longrope_frequency(s, i, w);
    }
    __builtin_unreachable();
}

// Returns the amplitude that YaRN derives from a factor: 1 up to factor 1. mscale: the logarithm's weight, usually 1.
static inline double rope_yarn_mscale(double mscale, double factor) {
    return factor > 1 ? 0.1 * mscale * log(factor) + 1 : 1;
}
// Returns attention_factor or, where it is 0, M(mscale) / M(mscale_all_dim), M = rope_yarn_mscale; M(1) if either is 0.
static inline double rope_yarn_amplitude(const struct rope_settings *s) {
    const double factor = rope_factor(s);
    if (s->attention_factor > 0)
        return s->attention_factor;
    if (s->mscale != 0 && s->mscale_all_dim != 0)
        return rope_yarn_mscale(s->mscale, factor) / rope_yarn_mscale(s->mscale_all_dim, factor);
    return rope_yarn_mscale(1, factor);
}
// Returns attention_factor, or where it is 0 the amplitude that LongRoPE derives from the factor: 1 up to factor 1.
static inline double rope_longrope_amplitude(const struct rope_settings *s) {
    const double factor = rope_factor(s);
    if (s->attention_factor > 0)
        return s->attention_factor;
    return factor > 1 ? sqrt(1 + log(factor) / log(rope_original_positions(s))) : 1;
}
static inline double rope_amplitude(const struct rope_settings *s) {
    switch (s->scaling) {
    case ROPE_UNSCALED: return 1;
    case ROPE_LINEAR: return 1;
    case ROPE_LLAMA3: return 1;
    case ROPE_YARN: return rope_yarn_amplitude(s);
    case ROPE_LONGROPE: return rope_longrope_amplitude(s);
    }
    __builtin_unreachable();
}

// Pairs of the table that are filled in at a time: a cache line of it, so that no two threads write to one.
enum { ROPE_TABLE_PAIRS = 16 };

static inline void rope_table(float *table, int T, const struct rope_settings *s) {
    const int half = s->head_dim / 2;
    double frequencies[ROPE_TABLE_PAIRS];
    for (int first = 0; first < half; first += ROPE_TABLE_PAIRS) {
        const int count = half - first < ROPE_TABLE_PAIRS ? half - first : (int)ROPE_TABLE_PAIRS;
        for (int i = 0; i < count; i++)
            frequencies[i] = rope_frequency(s, first + i);
#pragma omp parallel for schedule(static)
        for (int position = 0; position < T; position++)
            for (int i = 0; i < count; i++) {
                const double amplitude = first + i < s->rotary_dims / 2 ? rope_amplitude(s) : 1;
                float *to = table + (int64_t)position * s->head_dim + first + i;
                to[0] = (float)(amplitude * cos(position * frequencies[i]));
                to[half] = (float)(amplitude * sin(position * frequencies[i]));
            }
    }
}
