// Megatron-LM's learning-rate schedules, linear warm-up, then decay from lr to min_lr, and its warm-up of the batch.
#pragma once
#include <stdint.h>    // int64_t
#include <sys/cdefs.h> // __BEGIN_DECLS

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
    enum lr_wsd_decay_style wsd_style; // the shape of the decay at the end of LR_DECAY_WSD
    double lr, min_lr;
    int64_t warmup_steps;    // the first steps, in which the rate rises to lr
    int64_t decay_steps;     // the step, counted from the run's start, from which on the rate is min_lr (not CONSTANT)
    int64_t wsd_decay_steps; // LR_DECAY_WSD (warm-up, stable, decay): length of the decay, which ends at decay_steps
};

// The sequences of a step: `start`, then `increment` more up to `batch`, after equal parts of `samples` sequences.
struct batch_ramp {
    int start, increment, batch; // batch - start is a multiple of increment
    int64_t samples;             // below 2^38; 0: every step has `batch`
};

__BEGIN_DECLS
// Returns the learning rate of a step, counted from 0. The warm-up has lr (step + 1) / warmup_steps, not Megatron-LM's
// step / warmup_steps, which is 0 at step 0. Then it follows `style`; from decay_steps on it is min_lr (CONSTANT: lr).
double schedule_lr(const struct schedule *s, int64_t step);
// The number of sequences of the step that begins after `consumed` sequences.
int ramp_batch(const struct batch_ramp *ramp, uint64_t consumed);
// The number of sequences of the first `steps` steps together.
uint64_t ramp_samples(const struct batch_ramp *ramp, int64_t steps);
__END_DECLS
