// The MLP's activations, forward and backward, that write FP8 themselves: the same bits as the op of activation.cuh,
// fp8_amax and fp8_cast one after the other, without a floatX result in memory. Only for casts by one scale of a whole
// matrix: where to.scale->delayed is 0 the result's amax is taken by a pass of its own first.
#pragma once
#include "kernels/activation.cuh" // ACTIVATION_OPS
#include "kernels/fp8/fp8.cuh"    // struct fp8_cast
#include <sys/cdefs.h>            // __BEGIN_DECLS

// For each NAME of ACTIVATION_OPS:
//
//   NAME_forward_fp8(to, fc, N, F, workspace, dev)         casts act (N, F); fc: (N, F), or gate and up, (N, 2F)
//   NAME_backward_fp8(to, dact, fc, N, F, workspace, dev)  casts the gradient of fc, of which to.dbias sums the columns
//
// to.scale->amax is taken on the way. workspace: as fp8_cast's, of what is cast.
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
