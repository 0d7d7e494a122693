// Moving averages of the parameters over the steps, for evaluation.
#pragma once
#include "kernels/gradients.cuh" // struct gradient_check
#include <sys/cdefs.h>           // __BEGIN_DECLS

// A range of n elements of the flat buffers.
struct averages_range {
    floatX *params;
    uint16_t *remainder; // FORMAT_REMAINDER, which bf16 parameters must have; NULL: they are fp32
    float *averages;
    int64_t n;
};
__BEGIN_DECLS
// averages = decay averages + (1 - decay) value, with the fp32 value of each parameter, its remainder joined. Where the
// check is not finite nothing changes; check (1) NULL: there is none.
void averages_update(struct averages_range r, float decay, const struct gradient_check *check, struct device *dev);
// Swaps the averages and the parameters, to the bit, so that a second call undoes the first.
void averages_swap(struct averages_range r, struct device *dev);
__END_DECLS

// Returns an average after one more value. rest: 1 - decay.
HOST_DEVICE float average_of(float average, float value, float decay, float rest) {
    return decay * average + rest * value;
}
