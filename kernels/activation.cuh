// The MLP's activations. Pointwise: GELU (Hendrycks and Gimpel 2016) in its tanh form (GPT-2's "gelu_new") and as it
// was defined, by the error function; squared ReLU (So et al. 2021, arXiv 2109.08668). Gated: SwiGLU and GeGLU (Shazeer
// 2020, arXiv 2002.05202), with GELU in its tanh form.
//
// A pointwise activation is a function and its derivative: NAME and NAME_derivative, of a float, for the cuda target;
// vecs_NAME and vecs_NAME_derivative, of FLOATX_VECS vectors, for the cpu. POINTWISE_ACTIVATION(NAME) makes of them
//
//   NAME_forward(out, in, n, amax, dev)                               out = NAME(in)
//   NAME_backward(din, bias_partial, dout, in, N, F, amax, dev)       din = dout * NAME_derivative(in); din may be dout
//
// A gated activation NAME has a function f(x) = x s(x); f_gradient (of a float) and vecs_f_gradient give s and f'.
// GATED_ACTIVATION(NAME, f) makes of them
//
//   NAME_forward    out = f(gate) * up
//   NAME_backward   dgate = dout * up * f'(gate), dup = dout * f(gate)
//
// Each merges the largest magnitude of what it stores into *amax (kernels/amax.cuh), unless amax is NULL. Backward also
// stores the sums of din's columns over chunks of rows in bias_partial (activation_bias_num_runs(N), width), unless
// that is NULL. column_sums adds these up to the gradient of the bias before the activation.
#pragma once
#include "kernels/device.cuh" // floatX
#include <sys/cdefs.h>        // __BEGIN_DECLS

typedef void pointwise_forward(floatX *out, const floatX *in, int64_t n, uint32_t *amax, struct device *dev);
typedef void pointwise_backward(floatX *din, float *bias_partial, const floatX *dout, const floatX *in, int64_t N,
                                int F, uint32_t *amax, struct device *dev);
// A row of gate_up (N, 2F) is the gate's F columns, then up's; out and dout are (N, F). dgate_up may be gate_up.
typedef void gated_forward(floatX *out, const floatX *gate_up, int64_t N, int F, uint32_t *amax, struct device *dev);
typedef void gated_backward(floatX *dgate_up, float *bias_partial, const floatX *dout, const floatX *gate_up, int64_t N,
                            int F, uint32_t *amax, struct device *dev);

// Rows of a chunk of bias_partial. Its sums are 2 % of backward's bytes. 16,384 rows of 3072 make 3 waves on an H200.
enum { ACTIVATION_BIAS_ROWS = 64 };
// The number of runs of ACTIVATION_BIAS_ROWS rows that N rows make. A run of din has a row of bias_partial.
static inline int64_t activation_bias_num_runs(int64_t N) {
    return (N + ACTIVATION_BIAS_ROWS - 1) / ACTIVATION_BIAS_ROWS;
}
__BEGIN_DECLS
// bias_partial (activation_bias_num_runs(N), width) = the sums of din's (N, width) columns over each
// ACTIVATION_BIAS_ROWS rows. Does nothing where bias_partial is NULL.
void activation_bias_sums(float *bias_partial, const floatX *din, int64_t N, int width, struct device *dev);

// A row for each activation: POINTWISE(NAME) or GATED(NAME, f). kernels/activation_fp8.cuh takes the same rows.
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
