// Moving averages of the parameters over the steps, for evaluation.
#pragma once
#include "kernels/gradients.cuh" // struct gradient_check
#include <sys/cdefs.h>           // __BEGIN_DECLS

struct averages_range {
    floatX *params;
    uint16_t *remainder; // FORMAT_REMAINDER, which bf16 parameters must have; NULL: they are fp32
    float *averages;
    int64_t n;
};
__BEGIN_DECLS
// averages = decay averages + (1 - decay) params, joined with remainders, if check (1) is NULL or finite.
void averages_update(struct averages_range r, float decay, const struct gradient_check *check, struct device *dev);
// Swaps the averages with the parameters and their remainders. No bit is lost: a second call undoes the first.
void averages_swap(struct averages_range r, struct device *dev);
__END_DECLS

HOST_DEVICE float average_of(float average, float value, float decay, float rest) {
    return decay * average + rest * value;
}
