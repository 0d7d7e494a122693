// A learned scale for each channel.
#pragma once
#include "kernels/device.cuh" // floatX
#include <sys/cdefs.h>        // __BEGIN_DECLS

__BEGIN_DECLS
// out[n, c] = in[n, c] * scale[c]; out may be in.
void channel_scale_forward(floatX *out, const floatX *in, // (N, C)
                           const floatX *scale,           // (C)
                           int64_t N, int C, struct device *dev);
// din = dout * scale; dscale[c] = sum over n of dout[n, c] * in[n, c], or += where `add`: the first micro-step of a step
// overwrites gradients. din may be in.
void channel_scale_backward(floatX *din, float *dscale, const floatX *dout, const floatX *in, const floatX *scale,
                            int64_t N, int C, bool add, struct device *dev);
__END_DECLS
