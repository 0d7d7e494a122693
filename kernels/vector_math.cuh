// expf, logf, tanhf, and sine and cosine of a fraction of a turn, which the compiler vectorizes: no branch, no table,
// no call. libm's are calls, and their vector forms come only with -ffast-math, under which NaN is lost. Each is a
// range reduction and a polynomial: coefficients are weighted minimax fits of the relative error over the reduced range
// (iteratively reweighted least squares on Chebyshev nodes), with the fit's own error beside each. The errors in units
// in the last place (ulp) are measured by test/op_vector_math.c over the whole range.
#pragma once
#include "kernels/device.cuh" // HOST_DEVICE
#include <math.h>             // INFINITY, NAN
#include <stdint.h>           // uint32_t
#include <string.h>           // memcpy

#define LOG2E 1.4426950409f // e^x = 2^(x LOG2E)

HOST_DEVICE uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
HOST_DEVICE float float_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// Adding 1.5 * 2^23 to a small float leaves its nearest integer in the low bits.
#define ROUNDING_MAGIC 0x1.8p23f

// e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln(2) / 2. At most 0.9 ulp with fused multiply-add, 1.25 without.
// Infinity above the largest float; 0 below 2^-125.5 (x < -87), as denormals would take a second scaling; e^NaN = NaN.
HOST_DEVICE float vector_expf(float x) {
    // The magic's extra 126 makes the low bits n + 126, 2^(n - 1)'s exponent field: 2^128 is no float. So p is 2 e^r.
    const float shifted = x * 0x1.715476p0f + (ROUNDING_MAGIC + 126.0f);
    const float n = shifted - (ROUNDING_MAGIC + 126.0f);
    // ln 2 in two parts; the first has 9 bits, so that its product with n is exact without a fused multiply-add too.
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    // relative error 2^-28.3
    float p = 0x1.6a23f0p-9f;
    p = p * r + 0x1.123a0ap-6f;
    p = p * r + 0x1.5558f2p-4f;
    p = p * r + 0x1.555492p-2f;
    p = p * r + 0x1.fffffcp-1f;
    p = p * r + 2.0f;
    p = p * r + 2.0f;
    const float in_range = p * float_from_bits(float_bits(shifted) << 23);
    // A NaN passes both comparisons. Results outside the range are computed too, wrongly, and replaced.
    const float not_above = x > 88.8f ? INFINITY : in_range;
    return x < -87.0f ? 0.0f : not_above;
}

// ln x = n ln 2 + ln(1 + f), sqrt(1/2) <= 1 + f < sqrt(2). At most 0.9 ulp; 0: -infinity; < 0: NaN; infinity, NaN stay.
HOST_DEVICE float vector_logf(float x) {
    const int denormal = x < 0x1p-126f;
    const uint32_t bits = float_bits(denormal ? x * 0x1p23f : x);
    const int32_t exponent = (int32_t)(bits - 0x3f3504f3u) >> 23; // 0x3f3504f3 is sqrt(1/2)
    const float f = float_from_bits(bits - ((uint32_t)exponent << 23)) - 1.0f;
    const float n = (float)(exponent - (denormal ? 23 : 0));
    // (ln(1 + f) - f + f^2 / 2) / f^3, relative error of ln(1 + f) 2^-30.3
    float p = 0x1.1457a2p-4f;
    p = p * f - 0x1.de3c14p-4f;
    p = p * f + 0x1.e6f06cp-4f;
    p = p * f - 0x1.fc2208p-4f;
    p = p * f + 0x1.233768p-3f;
    p = p * f - 0x1.555c4ep-3f;
    p = p * f + 0x1.99a4b6p-3f;
    p = p * f - 0x1.000006p-2f;
    p = p * f + 0x1.555548p-2f;
    const float square = f * f;
    const float result = n * 0.693359375f + (f + (p * f * square - 0.5f * square - n * 2.12194440e-4f));
    const float at_zero = x == 0 ? -INFINITY : result;
    const float in_domain = x < 0 ? NAN : at_zero;
    return x < INFINITY ? in_domain : x; // infinity and NaN: themselves
}

// Returns tanh x: below 0.55 by an odd polynomial, above it by one exponential, (1 - e) / (1 + e) with e = e^(-2 |x|),
// which near 0 would lose its digits to cancellation. At most 1.6 ulp; tanh(+-infinity) = +-1, tanh NaN = NaN.
HOST_DEVICE float vector_tanhf(float x) {
    const float size = x < 0 ? -x : x, e = vector_expf(-2.0f * size), above = (1.0f - e) / (1.0f + e);
    // (tanh x / x - 1) / x^2, relative error of tanh x 2^-29.8
    const float square = x * x;
    float p = -0x1.9b3044p-8f;
    p = p * square + 0x1.593d06p-6f;
    p = p * square - 0x1.b9287ap-5f;
    p = p * square + 0x1.110d26p-3f;
    p = p * square - 0x1.55554ap-2f;
    const float below = x + x * square * p, with_sign = x < 0 ? -above : above;
    return size < 0.55f ? below : with_sign;
}

// Computes sin(2 pi u) and cos(2 pi u) for 0 <= u <= 1, off by at most 1.5e-7. The turn is cut at odd eighths into
// quarters. In each quarter sine and cosine are polynomials of 2 pi f, where f is u less the middle of the quarter, |f|
// <= 1/8, exact in fp32. Which is which, and with which sign, depends on the quarter.
HOST_DEVICE void vector_sincos_turn(float *sine, float *cosine, float u) {
    const float shifted = 4.0f * u + ROUNDING_MAGIC;
    const uint32_t quarter = float_bits(shifted);
    const float a = (u - 0.25f * (shifted - ROUNDING_MAGIC)) * 6.283185307f, square = a * a;
    // relative errors 2^-28.0 and 2^-33.0
    const float s = a + a * square * ((-0x1.9943e2p-13f * square + 0x1.11073ap-7f) * square - 0x1.555546p-3f);
    const float fourth = (0x1.99eb9cp-16f * square - 0x1.6c0c34p-10f) * square + 0x1.55554ap-5f;
    const float c = 1.0f - 0.5f * square + square * square * fourth;
    const float swapped_s = quarter & 1u ? c : s, swapped_c = quarter & 1u ? s : c;
    *sine = quarter & 2u ? -swapped_s : swapped_s;
    *cosine = (quarter + 1u) & 2u ? -swapped_c : swapped_c;
}
