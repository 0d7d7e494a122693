// --train-epochs: the number of steps that take the data so many times.
#pragma once
#include "config/config.h" // struct config
#include <limits.h>        // INT_MAX

// Returns the fewest steps, at least 1, that take `samples` samples with c->ramp's batches; INT_MAX: too many to count.
static inline int config_steps_for_samples(const struct config *c, uint64_t samples) {
    int64_t low = 0, high = INT_MAX; // too few, enough or all that can be counted
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (ramp_samples(&c->ramp, middle) < samples)
            low = middle;
        else
            high = middle;
    }
    return (int)high;
}
// Sets --train-steps to the fewest steps that take --train-epochs, if that is given and the run trains. The batch must
// be resolved. Ends the program if other --train-steps are given, or if --train-data or samples_of_epochs is missing.
static inline void config_resolve_epochs(struct config *c) {
    if (c->training.train_epochs <= 0 || !config_trains(c))
        return;
    if (!*c->data.train_data || !c->samples_of_epochs)
        fail("--train-epochs %g needs --train-data, whose samples it counts; or give --train-steps",
             c->training.train_epochs);
    const int steps = config_steps_for_samples(c, c->samples_of_epochs(c));
    if (steps == INT_MAX)
        fail("--train-epochs %g makes more steps than can be counted; lower it", c->training.train_epochs);
    if (config_given(c, training.train_steps) && c->training.train_steps != steps)
        fail("--train-epochs %g makes %d steps of these data, but --train-steps is %d; leave one of them out, "
             "as by --train-epochs 0",
             c->training.train_epochs, steps, c->training.train_steps);
    c->training.train_steps = steps;
}
