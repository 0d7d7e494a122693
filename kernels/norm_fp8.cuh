// Norms that write FP8: the input of a linear layer, for which floatX would be stored only to be cast.
#pragma once
#include "kernels/fp8/fp8.cuh" // struct fp8_cast
#include "kernels/norm.cuh"    // struct norm_options, struct dropout
#include <sys/cdefs.h>         // __BEGIN_DECLS

__BEGIN_DECLS
// The number of bytes of workspace: 0 on a GPU for rows of up to GPU_NORM_FP8_COLUMNS, else N rows of floatX.
size_t norm_forward_fp8_workspace_bytes(int64_t N, int C, const struct device *dev);
// Does residual_norm_forward or, where delta is NULL, norm_forward; then fp8_cast of `out`, which is not stored, by one
// scale for the whole matrix. Merges out's amax into to.scale->amax, and where to.scale->delayed is 0 casts by it: with
// the bits of the op, fp8_amax and fp8_cast. to.dbias and options.amax are NULL. N and C are multiples of 16; on a GPU
// arrays start at multiples of 16 bytes.
void norm_forward_fp8(struct fp8_cast to,
                      floatX *sum,          // (N, C); may be delta; not written where delta is NULL
                      float *mean,          // (N); NULL: not written
                      float *rstd,          // (N); NULL: not written
                      const floatX *x,      // (N, C)
                      const floatX *delta,  // (N, C); NULL: no residual is added
                      const floatX *weight, // (C)
                      const floatX *bias,   // (C); NULL: none
                      int64_t N, int C, struct norm_options options, float scale, struct dropout dropout,
                      void *workspace, struct device *dev);
__END_DECLS
