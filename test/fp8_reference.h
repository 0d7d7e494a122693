// The FP8 formats by their definition, in double: a code's value is a mantissa times a power of two, and the code for a
// value is found by a search among all codes' values. Slow, and independent of the code under test.
#pragma once
#include "kernels/fp8/fp8.cuh" // enum fp8_format
#include <math.h>              // ldexp, fabs

// Returns the value of a magnitude's code as if the format had no infinities and NaN. So the first code past the
// largest finite one has the value that rounding without a limit would take next.
static inline double fp8_reference_value(int magnitude, enum fp8_format format) {
    const int mantissa_bits = format == FP8_E4M3 ? 3 : 2, bias = format == FP8_E4M3 ? 7 : 15;
    const int exponent = magnitude >> mantissa_bits, mantissa = magnitude & ((1 << mantissa_bits) - 1);
    if (exponent == 0)
        return ldexp(mantissa, 1 - bias - mantissa_bits);
    return ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}
static inline int fp8_reference_largest(enum fp8_format format) { return format == FP8_E4M3 ? 0x7e : 0x7b; }

static inline double fp8_reference_decode(int code, enum fp8_format format) {
    const int magnitude = code & 0x7f, most = fp8_reference_largest(format);
    const bool infinite = format == FP8_E5M2 && magnitude == most + 1;
    const double size = magnitude <= most ? fp8_reference_value(magnitude, format) : infinite ? INFINITY : NAN;
    return code & 0x80 ? -size : size;
}

// Returns the code of the nearest magnitude, of two equally near ones the even one; at most the first code past the
// largest finite one.
static inline int fp8_reference_nearest(double size, enum fp8_format format) {
    int low = 0, high = fp8_reference_largest(format) + 1;
    if (size >= fp8_reference_value(high, format))
        return high;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (size >= fp8_reference_value(middle, format))
            low = middle;
        else
            high = middle;
    }
    const double below = size - fp8_reference_value(low, format), above = fp8_reference_value(high, format) - size;
    return below < above || (below == above && low % 2 == 0) ? low : high;
}
static inline int fp8_reference_saturates(float x, enum fp8_format format) {
    return !isnan(x) && fp8_reference_nearest(fabs((double)x), format) > fp8_reference_largest(format);
}
static inline fp8 fp8_reference_encode(float x, enum fp8_format format) {
    if (isnan(x))
        return 0x7f;
    const int nearest = fp8_reference_nearest(fabs((double)x), format), most = fp8_reference_largest(format);
    return (fp8)((signbit(x) ? 0x80 : 0) | (nearest < most ? nearest : most));
}
