// The MLP's activations. Pointwise: GELU (Hendrycks and Gimpel 2016) in its tanh form (GPT-2's "gelu_new") and as it
// was defined, by the error function; squared ReLU (So et al. 2021, arXiv 2109.08668). Gated: SwiGLU and GeGLU (Shazeer
// 2020, arXiv 2002.05202), with GELU in its tanh form.
//
// A pointwise one is a function NAME and its derivative NAME_derivative: of a float for the cuda target, and by the
// names vecs_NAME and vecs_NAME_derivative of FLOATX_VECS vectors for the cpu. POINTWISE_ACTIVATION(NAME) makes of them
//
//   NAME_forward(out, in, n, amax, dev)                               out = NAME(in)
//   NAME_backward(din, bias_partial, dout, in, N, F, amax, dev)       din = dout * NAME_derivative(in); din may be dout
//
// A gated one is a function f(x) = x s(x), of which NAME_gradient (of a float) and vecs_NAME_gradient give s and f'.
// GATED_ACTIVATION(NAME, f) makes of them
//
//   NAME_forward    out = f(gate) * up
//   NAME_backward   dgate = dout * up * f'(gate), dup = dout * f(gate)
//
// All take a parameter `amax`, of what they write, as kernels/amax.cuh says; NULL: not taken. Backward takes
// `bias_partial`, (activation_bias_chunks(N), width): the sums of din's columns as stored, over runs of rows, which
// column_sums adds up to the gradient of the bias before the activation; NULL: not made.
#pragma once
#include "kernels/device.cuh" // floatX
#include <sys/cdefs.h>        // __BEGIN_DECLS

typedef void pointwise_forward(floatX *out, const floatX *in, int64_t n, uint32_t *amax, struct device *dev);
typedef void pointwise_backward(floatX *din, float *bias_partial, const floatX *dout, const floatX *in, int64_t N,
                                int F, uint32_t *amax, struct device *dev);
// A gated activation's arrays: gate_up (N, 2F) has the gate's row, then the up projection's; out and dout are (N, F).
// dgate_up may be gate_up.
typedef void gated_forward(floatX *out, const floatX *gate_up, int64_t N, int F, uint32_t *amax, struct device *dev);
typedef void gated_backward(floatX *dgate_up, float *bias_partial, const floatX *dout, const floatX *gate_up, int64_t N,
                            int F, uint32_t *amax, struct device *dev);

// Rows whose sums are one chunk of bias_partial: 2 % of what backward moves, and three waves of blocks on an H200 at
// 16,384 rows of 3072.
enum { ACTIVATION_BIAS_ROWS = 64 };
static inline int64_t activation_bias_chunks(int64_t N) {
    return (N + ACTIVATION_BIAS_ROWS - 1) / ACTIVATION_BIAS_ROWS;
}
__BEGIN_DECLS
// bias_partial, or nothing where that is NULL, of a din (N, width) that lies there already: backward's, bit by bit.
void activation_bias_sums(float *bias_partial, const floatX *din, int64_t N, int width, struct device *dev);

// The ops, by their functions, a row each: POINTWISE(NAME), GATED(NAME, f). kernels/activation_fp8.cuh has those that write
// FP8 of the same rows.
#define ACTIVATION_OPS(POINTWISE, GATED)                                                                               \
    POINTWISE(gelu)                                                                                                    \
    POINTWISE(gelu_erf)                                                                                                \
    POINTWISE(squared_relu)                                                                                            \
    GATED(swiglu, silu)                                                                                                \
    GATED(geglu, gelu)
#define DECLARE_POINTWISE(name)                                                                                        \
    pointwise_forward name##_forward;                                                                                  \
    pointwise_backward name##_backward;
#define DECLARE_GATED(name, function)                                                                                  \
    gated_forward name##_forward;                                                                                      \
    gated_backward name##_backward;
ACTIVATION_OPS(DECLARE_POINTWISE, DECLARE_GATED)
__END_DECLS
#undef DECLARE_POINTWISE
#undef DECLARE_GATED
