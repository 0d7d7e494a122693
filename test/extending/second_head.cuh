// What a head that predicts the token after the next needs besides the ops of the first head.
#pragma once
#include "kernels/device.cuh" // struct device
#include <sys/cdefs.h>        // __BEGIN_DECLS

__BEGIN_DECLS
// after[b, t] = targets[b, t + 1], (B, T); -1, which is not counted, at the end of a sequence.
// -1 also where targets[b, t] is -1, since losses_sum skips that token.
void targets_after(int32_t *after, const int32_t *targets, int B, int T, struct device *dev);
// losses[n] += more[n], (N).
void losses_add(float *losses, const float *more, int64_t N, struct device *dev);
__END_DECLS
