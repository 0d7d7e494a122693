// Learning-rate schedules, as Megatron-LM defines them: linear warm-up, then a decay from lr to min_lr.
#pragma once
#include <math.h>   // cos, pow, sqrt
#include <stdint.h> // int64_t

// X(enumerator, name that users write)
#define LR_DECAY_STYLES(X)                                                                                             \
    X(LR_DECAY_COSINE, "cosine")                                                                                       \
    X(LR_DECAY_LINEAR, "linear")                                                                                       \
    X(LR_DECAY_CONSTANT, "constant")                                                                                   \
    X(LR_DECAY_WSD, "WSD")
#define LR_WSD_DECAY_STYLES(X)                                                                                         \
    X(WSD_DECAY_EXPONENTIAL, "exponential")                                                                            \
    X(WSD_DECAY_LINEAR, "linear")                                                                                      \
    X(WSD_DECAY_COSINE, "cosine")                                                                                      \
    X(WSD_DECAY_MINUS_SQRT, "minus_sqrt")

#define SCHEDULE_ENUMERATOR(enumerator, name) enumerator,
enum lr_decay_style { LR_DECAY_STYLES(SCHEDULE_ENUMERATOR) };
enum lr_wsd_decay_style { LR_WSD_DECAY_STYLES(SCHEDULE_ENUMERATOR) };
#undef SCHEDULE_ENUMERATOR

struct schedule {
    enum lr_decay_style style;
    enum lr_wsd_decay_style wsd_style; // the shape of WSD's last part
    double lr, min_lr;
    int64_t warmup_steps;    // the first steps, rising to lr
    int64_t decay_steps;     // the step, counted from the run's start, from which on the rate is min_lr
    int64_t wsd_decay_steps; // warm-up, stable, decay: the last ones of decay_steps, in which the rate falls
};

// How much of lr - min_lr is left after the fraction `done` (0 to 1) of a decay.
static inline double schedule_cosine(double done) { return 0.5 * (cos(3.14159265358979323846 * done) + 1); }
static inline double schedule_wsd(enum lr_wsd_decay_style style, double done) {
    switch (style) {
    case WSD_DECAY_EXPONENTIAL: return 2 * pow(0.5, done) - 1; // halves, shifted so that it ends at 0
    case WSD_DECAY_LINEAR: return 1 - done;
    case WSD_DECAY_COSINE: return schedule_cosine(done);
    case WSD_DECAY_MINUS_SQRT: return 1 - sqrt(done);
    }
    __builtin_unreachable();
}

// How much of lr - min_lr is left in a step between warm-up and decay_steps.
static inline double schedule_left(const struct schedule *s, int64_t step) {
    const double done = (double)(step - s->warmup_steps) / (double)(s->decay_steps - s->warmup_steps);
    const int64_t wsd_start = s->decay_steps - s->wsd_decay_steps;
    switch (s->style) {
    case LR_DECAY_COSINE: return schedule_cosine(done);
    case LR_DECAY_LINEAR: return 1 - done;
    case LR_DECAY_CONSTANT: return 1;
    case LR_DECAY_WSD:
        return step > wsd_start ? schedule_wsd(s->wsd_style, (double)(step - wsd_start) / (double)s->wsd_decay_steps)
                                : 1;
    }
    __builtin_unreachable();
}

// The rate of the given step (the first is 0). Megatron warms up by step/warmup_steps, so that its first step is spent
// on lr 0; here it is (step + 1)/warmup_steps, and the decay's first step, step == warmup_steps, has lr in both.
static inline double schedule_lr(const struct schedule *s, int64_t step) {
    if (step < s->warmup_steps)
        return s->lr * (double)(step + 1) / (double)s->warmup_steps;
    if (s->style == LR_DECAY_CONSTANT)
        return s->lr;
    if (step >= s->decay_steps)
        return s->min_lr;
    return s->min_lr + schedule_left(s, step) * (s->lr - s->min_lr);
}
