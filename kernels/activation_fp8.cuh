// Forward and backward of the MLP's activations that write FP8. They give the bits of activation.cuh's op followed by
// fp8_amax and fp8_cast, but store no floatX result. They make only casts with one scale for the whole matrix. Where
// to.scale->delayed is 0 they first read their inputs once more, to take the amax.
#pragma once
#include "kernels/activation.cuh" // ACTIVATION_OPS
#include "kernels/fp8/fp8.cuh"    // struct fp8_cast
#include <sys/cdefs.h>            // __BEGIN_DECLS

// For each NAME of ACTIVATION_OPS:
//
//   NAME_forward_fp8(to, fc, N, F, workspace, dev)         casts act (N, F); fc: (N, F), or gate and up, (N, 2F)
//   NAME_backward_fp8(to, dact, fc, N, F, workspace, dev)  casts the gradient of fc, of which to.dbias sums the columns
//
// N and F are multiples of 16. Each merges the amax of the matrix that it casts into to.scale->amax. `workspace` has
// fp8_cast_workspace_bytes of that matrix; it may be NULL where to.dbias is NULL.
typedef void activation_forward_fp8(struct fp8_cast to, const floatX *fc, int64_t N, int F, void *workspace,
                                    struct device *dev);
typedef void activation_backward_fp8(struct fp8_cast to, const floatX *dact, const floatX *fc, int64_t N, int F,
                                     void *workspace, struct device *dev);
#define DECLARE_POINTWISE(name)                                                                                        \
    activation_forward_fp8 name##_forward_fp8;                                                                         \
    activation_backward_fp8 name##_backward_fp8;
#define DECLARE_GATED(name, function) DECLARE_POINTWISE(name)
__BEGIN_DECLS
ACTIVATION_OPS(DECLARE_POINTWISE, DECLARE_GATED)
__END_DECLS
#undef DECLARE_POINTWISE
#undef DECLARE_GATED
