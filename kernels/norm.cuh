// LayerNorm (Ba, Kiros and Hinton 2016), RMSNorm (Zhang and Sennrich 2019), and the residual additions that stand
// before them. The mean of a row is rounded to fp32, which costs half a unit of the mean itself: much, where |mean| is
// far above the standard deviation. So each pass over a row also takes the mean of what is left after subtracting the
// first mean, and subtracts that too: the result is as if the mean were known exactly.
#pragma once
#include "kernels/device.cuh"    // floatX
#include "kernels/norm_kind.cuh" // struct norm_options, norm_weight_offset
#include "kernels/random.cuh"    // struct dropout, dropout_scales
#include <sys/cdefs.h>           // __BEGIN_DECLS

__BEGIN_DECLS
// out = (x - mean) * rstd * weight + bias, rstd = 1 / sqrt(variance + epsilon), with 1 + weight in fp32 in place of
// weight where one_plus is set. RMSNorm has a mean of 0, and as variance the mean square. options.amax: out's amax.
void norm_forward(floatX *out,          // (N, C); NULL: only the statistics are written
                  float *mean,          // (N); NULL: not written
                  float *rstd,          // (N); NULL: not written
                  const floatX *x,      // (N, C)
                  const floatX *weight, // (C)
                  const floatX *bias,   // (C); NULL: none
                  int64_t N, int C, struct norm_options options, struct device *dev);

// The number of parts of N rows over which norm_backward sums dx's columns: the rows of dx_partial.
int64_t norm_backward_num_runs(int64_t N, int C, const struct device *dev);
size_t norm_backward_workspace_bytes(int64_t N, int C, const struct device *dev);
// Writes the gradient of norm_forward. With y the normalized row and g = dout * weight, or dout * (1 + weight):
//   dx = residual + rstd * (g - mean(g) - y * mean(g * y)), without mean(g) for RMSNorm
//   dweight = sum over rows of dout * y;  dbias = sum over rows of dout;  += these where `add`
// dx_partial = the sums of dx's columns, as stored, over parts of the rows: where dx is the gradient of a linear
// layer's output, column_sums (kernels/column_sums.cuh) makes of them the bias's gradient. options.amax is of dx.
void norm_backward(floatX *dx,             // (N, C)
                   float *dx_partial,      // (norm_backward_num_runs, C); NULL: not taken
                   float *dweight,         // (C); NULL: not wanted
                   float *dbias,           // (C); NULL: none
                   const floatX *residual, // (N, C); may be dx; NULL: 0
                   const floatX *dout,     // (N, C)
                   const floatX *x,        // (N, C)
                   const floatX *weight,   // (C)
                   const float *mean,      // (N); not read for RMSNorm
                   const float *rstd,      // (N)
                   int64_t N, int C, bool add, struct norm_options options, void *workspace, struct device *dev);

// sum = x + scale * dropout(delta), the addition of a residual branch.
void residual_forward(floatX *sum,         // (N, C); may be x or delta
                      const floatX *x,     // (N, C)
                      const floatX *delta, // (N, C)
                      int64_t N, int C, float scale, struct dropout dropout, struct device *dev);

// Does residual_forward, then norm_forward of the rounded sum, in one pass over memory, with the two calls' bits.
void residual_norm_forward(floatX *sum,          // (N, C); may be delta
                           floatX *out,          // (N, C); NULL: only the statistics are written
                           float *mean,          // (N); NULL: not written
                           float *rstd,          // (N); NULL: not written
                           const floatX *x,      // (N, C)
                           const floatX *delta,  // (N, C)
                           const floatX *weight, // (C)
                           const floatX *bias,   // (C); NULL: none
                           int64_t N, int C, struct norm_options options, float scale, struct dropout dropout,
                           struct device *dev);

// The number of parts of N rows over which residual_backward sums ddelta's columns: the rows of `partial`.
int64_t residual_backward_num_runs(int64_t N, int C, const struct device *dev);
// ddelta = dout times `scale` and the dropout scales that forward applied, the gradient of residual_forward's delta.
// `partial` = sums of ddelta's columns, as stored, over parts of the rows.
void residual_backward(floatX *ddelta,     // (N, C); may be dout
                       float *partial,     // (residual_backward_num_runs, C); NULL: not taken
                       const floatX *dout, // (N, C)
                       int64_t N, int C, float scale, struct dropout dropout, struct device *dev);
__END_DECLS
