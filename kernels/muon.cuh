// The elementwise halves of Muon's update (Jordan et al. 2024, kellerjordan.github.io/posts/muon): the momentum, before
// the matrix is orthogonalized (optimizer/orthogonalize.cuh), and the step along its orthogonal factor.
#pragma once
#include "kernels/gradients.cuh" // struct gradient_check, struct rounding, tensor_rounding
#include <sys/cdefs.h>           // __BEGIN_DECLS

struct muon_momentum_range {
    const void *grads; // (n) FORMAT_FP32 or FORMAT_BF16
    enum state_format grads_format;
    void *momentum;           // state_bytes(format, n)
    enum state_format format; // FORMAT_FP32, FORMAT_BF16 or FORMAT_8BIT
    floatX *update;           // (n)
    int64_t n;
    int64_t begin; // the range's first element in the flat buffers, a multiple of STATE_BLOCK
    float mu;
    bool nesterov;
};
__BEGIN_DECLS
// With g = grads * check->grad_scale:
//   momentum = mu momentum + (1 - mu) g
//   update = mu momentum + (1 - mu) g, of the new momentum, with nesterov; else momentum
// in fp32, before the stored momentum is rounded to nearest. Where check (1) is not finite the momentum keeps every
// byte, and the update is 0. NULL is a finite check of scale 1. In gaps only the update may be written, as 0.
void muon_momentum(struct muon_momentum_range r, struct flat_tensors tensors, const struct gradient_check *check,
                   struct device *dev);

struct muon_step_range {
    floatX *params;       // (n)
    uint16_t *remainder;  // (n) FORMAT_REMAINDER, only in bf16 builds; NULL: none
    const floatX *factor; // (n) orthogonal factors of the matrices
    int64_t n;
    int64_t begin; // the range's first element in the flat buffers, a multiple of STATE_BLOCK
    float lr, weight_decay;
    struct rounding rounding; // of bf16 parameters without a remainder
};
// Updates along the factors: value = (1 - lr weight_decay) value - lr scale factor, in fp32. value is the fp32
// parameter, or the bf16 parameter joined with its remainder; a bf16 parameter without a remainder is rounded
// stochastically. The rows of tensors give lr_scale and decays, and where to merge the parameters' amax, as in
// adamw_update. Where check (1) is not finite only the amax is merged; NULL is finite. matrices is the table of Muon's
// matrices, whose rows have `scale`. A matrix begins anywhere, and each element of the range is in one, except in gaps.
void muon_step(struct muon_step_range r, struct flat_tensors tensors, struct flat_tensors matrices,
               const struct gradient_check *check, struct device *dev);
__END_DECLS

// Returns an element's new momentum, and sets *update. grad is scaled already, and rest is 1 - mu.
HOST_DEVICE float muon_momentum_element(float momentum, float grad, float mu, float rest, bool nesterov,
                                        float *update) {
    const float next = mu * momentum + rest * grad;
    *update = nesterov ? mu * next + rest * grad : next;
    return next;
}
struct muon_factors {
    float lr, decay, keep; // decay: lr weight_decay; keep: 1 - decay
};
static inline struct muon_factors muon_factors_of(const struct muon_step_range *r) {
    const double decay = (double)r->lr * r->weight_decay;
    const struct muon_factors f = {r->lr, (float)decay, (float)(1 - decay)};
    return f;
}
HOST_DEVICE struct muon_factors muon_tensor_factors(struct muon_factors f, const struct flat_tensor *tensor) {
    f.lr *= tensor->lr_scale;
    f.keep = flat_tensor_keep(tensor, f.keep, f.decay);
    return f;
}
HOST_DEVICE bool muon_is_stochastic(const struct muon_step_range *r) {
    return sizeof(floatX) < sizeof(float) && !r->remainder;
}
