// AdamW (Loshchilov and Hutter 2019) as torch.optim.AdamW computes it, on states of any format.
#pragma once
#include "kernels/flat_tensors.cuh" // struct flat_tensors
#include "kernels/gradients.cuh"    // struct gradient_check, struct rounding, enum state_format
#include <math.h>                   // pow, sqrt, sqrtf
#include <sys/cdefs.h>              // __BEGIN_DECLS

struct adamw {
    float lr, beta1, beta2, eps, weight_decay;
    int64_t step;     // from 1
    float grad_scale; // what the gradients are multiplied by first
    uint64_t seed;    // of stochastic rounding
};

// A range of the flat buffers. Moments are FORMAT_FP32, FORMAT_BF16, or FORMAT_8BIT for m and FORMAT_8BIT_ROOT for v.
struct adamw_range {
    floatX *params;      // (n)
    uint16_t *remainder; // (n) FORMAT_REMAINDER, only in bf16 builds; NULL: none
    const void *grads;   // (n) FORMAT_FP32 or FORMAT_BF16
    enum state_format grads_format;
    void *m; // state_bytes(m_format, n)
    enum state_format m_format;
    void *v; // state_bytes(v_format, n)
    enum state_format v_format;
    int64_t n;
    int64_t begin; // the range's first element in the flat buffers, a multiple of STATE_BLOCK
};

// The factors of a step. adamw_tensor_factors turns them into a tensor's factors.
struct adamw_factors {
    float grad_scale, beta1, rest1, beta2, rest2, eps; // rest = 1 - beta
    float step_size;                                   // lr / (1 - beta1^step)
    float inverse_root;                                // 1 / sqrt(1 - beta2^step)
    float decay, keep;                                 // lr weight_decay, 1 - lr weight_decay
};
// Returns a step's factors. Computes them in double: 1 - beta2^step loses three digits in fp32 at step 1.
static inline struct adamw_factors adamw_factors_of(struct adamw a) {
    const double correction1 = 1 - pow((double)a.beta1, (double)a.step);
    const double correction2 = 1 - pow((double)a.beta2, (double)a.step);
    struct adamw_factors f;
    f.grad_scale = a.grad_scale;
    f.beta1 = a.beta1;
    f.rest1 = (float)(1 - (double)a.beta1);
    f.beta2 = a.beta2;
    f.rest2 = (float)(1 - (double)a.beta2);
    f.eps = a.eps;
    f.step_size = (float)(a.lr / correction1);
    f.inverse_root = (float)(1 / sqrt(correction2));
    f.decay = (float)((double)a.lr * a.weight_decay);
    f.keep = (float)(1 - (double)a.lr * a.weight_decay);
    return f;
}
// Updates an element's *m and *v, and returns its new value, by its tensor's factors f. f.grad_scale multiplies grad.
HOST_DEVICE float adamw_element(float value, float grad, float *m, float *v, struct adamw_factors f) {
    const float g = grad * f.grad_scale;
    const float first = f.beta1 * *m + f.rest1 * g, second = f.beta2 * *v + f.rest2 * (g * g);
    *m = first;
    *v = second;
    const float change = f.step_size * first / (sqrtf(second) * f.inverse_root + f.eps);
    return f.keep * value - change;
}

__BEGIN_DECLS
// With g = grads * grad_scale:
//   m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
//   value = (1 - lr weight_decay) value - lr / (1 - beta1^step) * m / (sqrt(v / (1 - beta2^step)) + eps)
// in fp32. value is the fp32 parameter, or the bf16 parameter joined exactly with its remainder. A bf16 parameter
// without a remainder is rounded stochastically, as rounding to nearest would lose changes below 2^-9 of it. The step
// takes the moments before they are rounded. A bf16 m is rounded to nearest, a bf16 v stochastically: at beta2 = 0.998
// and more v falls by less than rounding to nearest notices. 8-bit moments get the nearest code.
// One launch moves 20 bytes per parameter for fp32 gradients and moments, and 8 for the parameter with its remainder.
// tensors is the table of the flat buffers. A row says what its tensor's lr is multiplied by, whether the tensor
// decays, and where to take the amax of its parameters after the update; its index is the key of rounding. The amax is
// taken even if nothing changes, so that it may be cleared before each update. Gaps between tensors are not written.
// check's (1) grad_scale multiplies adamw's. If check is not finite nothing in r changes. NULL: finite, scale 1.
void adamw_update(struct adamw_range r, struct flat_tensors tensors, struct adamw adamw,
                  const struct gradient_check *check, struct device *dev);
__END_DECLS

// Returns the rounding of an update, with its seed and step. tensor_rounding then sets the tensor.
static inline struct rounding adamw_rounding(const struct adamw *adamw) {
    struct rounding rounding;
    rounding.seed = adamw->seed;
    rounding.step = (uint64_t)adamw->step;
    rounding.counter = NULL;
    rounding.tensor = 0;
    rounding.use = ROUNDING_UPDATE;
    rounding.first = 0;
    return rounding;
}
HOST_DEVICE struct adamw_factors adamw_tensor_factors(struct adamw_factors f, const struct flat_tensor *tensor) {
    f.step_size *= tensor->lr_scale;
    f.keep = flat_tensor_keep(tensor, f.keep, f.decay);
    return f;
}
// Whether parameters are rounded stochastically: in bf16 builds, without a remainder that keeps what rounding loses.
HOST_DEVICE bool adamw_params_are_stochastic(const struct adamw_range *r) {
    return sizeof(floatX) < sizeof(float) && r->remainder == NULL;
}
HOST_DEVICE bool adamw_needs_random_words(const struct adamw_range *r) {
    return adamw_params_are_stochastic(r) || r->v_format == FORMAT_BF16;
}
