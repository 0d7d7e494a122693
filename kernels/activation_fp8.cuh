// The MLP's activations, forward and backward, that write FP8 themselves: the same bits as the op of activation.cuh,
// fp8_amax and fp8_cast one after the other, without a floatX result in memory. Only for casts by one scale of a whole
// matrix: where to.scale->delayed is 0 the result's amax is taken by a pass of its own first.
#pragma once
#include "kernels/activation.cuh" // the functions
#include "kernels/fp8_cast.cuh"   // struct fp8_cast

// Forward: casts act (N, F), to.scale->amax included. in: fc (N, F), or gate and up (N, 2F).
// Backward: casts the gradient of fc, (N, F) or (N, 2F), of which to.dbias sums the columns.
// Workspace: fp8_cast_workspace_bytes of what is cast.
typedef void activation_forward_fp8(struct fp8_cast to, const floatX *fc, int64_t N, int F, void *workspace,
                                    struct device *dev);
typedef void activation_backward_fp8(struct fp8_cast to, const floatX *dact, const floatX *fc, int64_t N, int F,
                                     void *workspace, struct device *dev);
static activation_forward_fp8 gelu_forward_fp8, gelu_erf_forward_fp8, squared_relu_forward_fp8, swiglu_forward_fp8,
    geglu_forward_fp8;
static activation_backward_fp8 gelu_backward_fp8, gelu_erf_backward_fp8, squared_relu_backward_fp8, swiglu_backward_fp8,
    geglu_backward_fp8;
