// Cross entropy of softmax(logits) against one target per row, and its gradient in the logits' place.
#pragma once
#include "kernels/device.cuh" // floatX
#include <math.h>             // logf
#include <sys/cdefs.h>        // __BEGIN_DECLS

// z = scale * logit or, for softcap > 0 (Gemma 2), softcap * tanh(scale * logit / softcap), before softmax. scale > 0.
struct logit_transform {
    float scale, softcap;
};

__BEGIN_DECLS
// losses = ln(sum_{j < V} e^z[j]) - z[target], z: the transformed logits; padded columns V <= j < Vp are not read. A
// target below 0 is not counted: its row's loss and gradient are 0.
// If `backward`, a logit becomes dloss * dz/dlogit times the derivative by z of loss + z_loss lse^2 (PaLM: Chowdhery
// et al. 2022, arXiv 2204.02311, section 5), lse = ln(sum_{j < V} e^z[j]), which is
//   (1 + 2 z_loss lse) softmax(z) - onehot(target)
// and padded columns become 0. `losses` leave the z_loss term out. A z_loss of 0 costs nothing, and changes no bit.
void cross_entropy(float *losses,          // (N)
                   floatX *logits,         // (N, Vp): in logits, out dlogits if `backward`
                   const int32_t *targets, // (N), each below V
                   float dloss, float z_loss, int64_t N, int V, int Vp, struct logit_transform transform, bool backward,
                   struct device *dev);

// logits <- scale * logits or, for softcap > 0, softcap * tanh(scale * logits / softcap); padded columns stay.
void logits_transform(floatX *logits, // (N, Vp)
                      int64_t N, int V, int Vp, struct logit_transform transform, struct device *dev);

struct loss_sum {
    double sum, count;
};
// total (1) = the sum of the losses, and the number of targets that are 0 or more
void losses_sum(struct loss_sum *total,
                const float *losses,    // (N)
                const int32_t *targets, // (N)
                int64_t N, struct device *dev);

// largest = 1 where the target's logit is the row's largest, and the first of several that are equal; else 0, also
// where the target is below 0 or a logit is NaN. The logits need no transform, as it keeps their order.
void targets_are_largest(int32_t *largest,       // (N)
                         const floatX *logits,   // (N, Vp)
                         const int32_t *targets, // (N), each below V
                         int64_t N, int V, int Vp, struct device *dev);
__END_DECLS

// Each kind has its own code: most models take their logits as they are, at no cost.
enum logit_kind { LOGITS_PLAIN, LOGITS_SCALED, LOGITS_CAPPED };
static inline enum logit_kind logit_kind_of(struct logit_transform transform) {
    if (transform.softcap > 0)
        return LOGITS_CAPPED;
    return transform.scale == 1 ? LOGITS_PLAIN : LOGITS_SCALED;
}

struct softmax_row {
    float shift, sum; // sum of e^(z - shift)
};
// Returns what the gradient multiplies the softmax by: 1 + 2 z_loss lse, lse = shift + ln(sum).
HOST_DEVICE float z_loss_factor(struct softmax_row row, float z_loss) {
    return z_loss > 0 ? 1 + 2 * z_loss * (row.shift + logf(row.sum)) : 1;
}
