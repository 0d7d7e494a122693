#include "runtime/schedule.h"
#include <math.h> // cos, fma, pow, sqrt

// Returns the share of lr - min_lr that is left after the fraction `done` (0 to 1) of a decay.
static double cosine_decay(double done) { return 0.5 * (cos(3.14159265358979323846 * done) + 1); }

// Returns the share of lr - min_lr that is left after the fraction `done` (0 to 1) of WSD's decay.
static double wsd_decay(enum lr_wsd_decay_style style, double done) {
    switch (style) {
    case WSD_DECAY_EXPONENTIAL: return 2 * pow(0.5, done) - 1; // halves, shifted so that it ends at 0
    case WSD_DECAY_LINEAR: return 1 - done;
    case WSD_DECAY_COSINE: return cosine_decay(done);
    case WSD_DECAY_MINUS_SQRT: return 1 - sqrt(done);
    }
    __builtin_unreachable();
}

// Returns the share of lr - min_lr that is left at a step between the warm-up's end and decay_steps.
static double decay_of_step(const struct schedule *s, int64_t step) {
    const double done = (double)(step - s->warmup_steps) / (double)(s->decay_steps - s->warmup_steps);
    const int64_t wsd_start = s->decay_steps - s->wsd_decay_steps;
    switch (s->style) {
    case LR_DECAY_COSINE: return cosine_decay(done);
    case LR_DECAY_LINEAR: return 1 - done;
    case LR_DECAY_CONSTANT: return 1;
    case LR_DECAY_WSD:
        return step > wsd_start ? wsd_decay(s->wsd_style, (double)(step - wsd_start) / (double)s->wsd_decay_steps) : 1;
    }
    __builtin_unreachable();
}

double schedule_lr(const struct schedule *s, int64_t step) {
    if (step < s->warmup_steps)
        return s->lr * (double)(step + 1) / (double)s->warmup_steps;
    if (s->style == LR_DECAY_CONSTANT)
        return s->lr;
    if (step >= s->decay_steps)
        return s->min_lr;
    return fma(decay_of_step(s, step), s->lr - s->min_lr,
               s->min_lr); // fma: one rounding on every CPU, with or without the instruction
}

int ramp_batch(const struct batch_ramp *ramp, uint64_t consumed) {
    if (consumed >= (uint64_t)ramp->samples)
        return ramp->batch;
    const uint64_t increments = (uint64_t)((ramp->batch - ramp->start) / ramp->increment);
    return ramp->start + (int)(consumed * increments / (uint64_t)ramp->samples) * ramp->increment;
}

uint64_t ramp_samples(const struct batch_ramp *ramp, int64_t steps) {
    uint64_t consumed = 0;
    for (; steps > 0 && consumed < (uint64_t)ramp->samples; steps--)
        consumed += (uint64_t)ramp_batch(ramp, consumed);
    return consumed + (uint64_t)steps * (uint64_t)ramp->batch;
}
