// The elementwise parts of a Newton-Schulz iteration (optimizer/orthogonalize.cuh), between its matrix products.
#pragma once
#include "kernels/device.cuh" // floatX, struct device, LAUNCH
#include <float.h>            // FLT_MAX
#include <math.h>             // fmin, sqrt
#include <sys/cdefs.h>        // __BEGIN_DECLS

__BEGIN_DECLS
// x = x / (divisor sqrt(*squares)), rounded; 0 where *squares is 0 or not finite.
void newton_schulz_normalize(floatX *x,             // (n)
                             const double *squares, // (1): the sum of squares of x
                             double divisor, int64_t n, struct device *dev);
// out = in, rounded to floatX.
void newton_schulz_round(floatX *out,     // (n)
                         const float *in, // (n)
                         int64_t n, struct device *dev);
// square = a I + b gram + c square, in fp32 and rounded once.
void newton_schulz_polynomial(floatX *square,     // (side, side)
                              const floatX *gram, // (side, side)
                              float a, float b, float c, int side, struct device *dev);
__END_DECLS

// Returns 1 / (divisor sqrt(squares)), at most FLT_MAX, computed in double; 0 where squares is 0 or not finite. Only
// subnormal elements reach FLT_MAX, as in a momentum whose gradients stay 0: times FLT_MAX they stay below 1.
HOST_DEVICE float newton_schulz_factor(double squares, double divisor) {
    return squares > 0 ? (float)fmin(1 / (divisor * sqrt(squares)), (double)FLT_MAX) : 0;
}
