// The 8-bit codes of a block of moments stand for magnitudes in units of the block's scale, its largest magnitude
// (Dettmers, "8-bit approximations for parallelism in deep learning", 2015). Decade i = 0..6 has n 2^i magnitudes, the
// midpoints of as many equal parts of [0.1, 1], times 10^(i - 6). For first moments n = 1, bit 7 is the sign, and the
// largest of the 127 is 1, not 0.993: so a block's extreme and scale are exact, and quantizing twice changes nothing.
// For roots of second moments n = 2, and 1 follows the 254. Of these only 0 becomes 0, or m would be divided by eps.
#pragma once
#include "kernels/device.cuh"      // HOST_DEVICE
#include "kernels/vector_math.cuh" // float_bits, float_from_bits
#include <math.h>                  // sqrtf, fabsf

enum { CODE_LAST = 127, ROOT_CODE_LAST = 255, CODE_NEGATIVE = 0x80 };

// clang-format off
#define CODE_MAGNITUDES \
    0.0f, 5.5e-7f, 3.25e-6f, 7.75e-6f, 2.125e-5f, 4.375e-5f, 6.625e-5f, 8.875e-5f, 0.00015625f, 0.00026875f, \
    0.00038125f, 0.00049375f, 0.00060625f, 0.00071875f, 0.00083125f, 0.00094375f, 0.00128125f, 0.00184375f, \
    0.00240625f, 0.00296875f, 0.00353125f, 0.00409375f, 0.00465625f, 0.00521875f, 0.00578125f, 0.00634375f, \
    0.00690625f, 0.00746875f, 0.00803125f, 0.00859375f, 0.00915625f, 0.00971875f, 0.01140625f, 0.01421875f, \
    0.01703125f, 0.01984375f, 0.02265625f, 0.02546875f, 0.02828125f, 0.03109375f, 0.03390625f, 0.03671875f, \
    0.03953125f, 0.04234375f, 0.04515625f, 0.04796875f, 0.05078125f, 0.05359375f, 0.05640625f, 0.05921875f, \
    0.06203125f, 0.06484375f, 0.06765625f, 0.07046875f, 0.07328125f, 0.07609375f, 0.07890625f, 0.08171875f, \
    0.08453125f, 0.08734375f, 0.09015625f, 0.09296875f, 0.09578125f, 0.09859375f, 0.10703125f, 0.12109375f, \
    0.13515624f, 0.14921875f, 0.16328125f, 0.17734376f, 0.19140625f, 0.20546874f, 0.21953125f, 0.23359375f, \
    0.24765626f, 0.26171875f, 0.27578124f, 0.28984374f, 0.30390626f, 0.31796876f, 0.33203125f, 0.34609374f, \
    0.36015624f, 0.37421876f, 0.38828126f, 0.40234375f, 0.41640624f, 0.43046874f, 0.44453126f, 0.45859376f, \
    0.47265625f, 0.48671874f, 0.50078124f, 0.51484376f, 0.5289062f, 0.54296875f, 0.5570313f, 0.57109374f, \
    0.58515626f, 0.5992187f, 0.61328125f, 0.6273438f, 0.64140624f, 0.65546876f, 0.6695312f, 0.68359375f, \
    0.6976563f, 0.71171874f, 0.72578126f, 0.7398437f, 0.75390625f, 0.7679688f, 0.78203124f, 0.79609376f, \
    0.8101562f, 0.82421875f, 0.8382813f, 0.85234374f, 0.86640626f, 0.8804687f, 0.89453125f, 0.9085938f, \
    0.92265624f, 0.93671876f, 0.9507812f, 0.96484375f, 0.9789063f, 1.0f

#define ROOT_CODE_MAGNITUDES \
    0.0f, 3.25e-7f, 7.75e-7f, 2.125e-6f, 4.375e-6f, 6.625e-6f, 8.875e-6f, 1.5625e-5f, 2.6875e-5f, 3.8125e-5f, \
    4.9375e-5f, 6.0625e-5f, 7.1875e-5f, 8.3125e-5f, 9.4375e-5f, 0.000128125f, 0.000184375f, 0.000240625f, \
    0.000296875f, 0.000353125f, 0.000409375f, 0.000465625f, 0.000521875f, 0.000578125f, 0.000634375f, \
    0.000690625f, 0.000746875f, 0.000803125f, 0.000859375f, 0.000915625f, 0.000971875f, 0.001140625f, \
    0.001421875f, 0.001703125f, 0.001984375f, 0.002265625f, 0.002546875f, 0.002828125f, 0.003109375f, \
    0.003390625f, 0.003671875f, 0.003953125f, 0.004234375f, 0.004515625f, 0.004796875f, 0.005078125f, \
    0.005359375f, 0.005640625f, 0.005921875f, 0.006203125f, 0.006484375f, 0.006765625f, 0.007046875f, \
    0.007328125f, 0.007609375f, 0.007890625f, 0.008171875f, 0.008453125f, 0.008734375f, 0.009015625f, \
    0.009296875f, 0.009578125f, 0.009859375f, 0.010703125f, 0.012109375f, 0.013515625f, 0.014921875f, \
    0.016328124f, 0.017734375f, 0.019140625f, 0.020546876f, 0.021953125f, 0.023359375f, 0.024765626f, \
    0.026171874f, 0.027578125f, 0.028984375f, 0.030390626f, 0.031796876f, 0.033203125f, 0.034609374f, \
    0.036015626f, 0.037421875f, 0.038828123f, 0.040234376f, 0.041640624f, 0.043046877f, 0.044453125f, \
    0.045859374f, 0.047265626f, 0.048671875f, 0.050078124f, 0.051484376f, 0.052890625f, 0.054296874f, \
    0.055703126f, 0.057109375f, 0.058515623f, 0.059921876f, 0.061328124f, 0.06273437f, 0.064140625f, \
    0.06554688f, 0.06695312f, 0.068359375f, 0.06976563f, 0.07117187f, 0.072578125f, 0.07398438f, 0.07539062f, \
    0.076796874f, 0.07820313f, 0.07960937f, 0.081015624f, 0.08242188f, 0.08382812f, 0.085234374f, 0.086640626f, \
    0.08804688f, 0.08945312f, 0.090859376f, 0.09226563f, 0.09367187f, 0.095078126f, 0.09648438f, 0.09789062f, \
    0.099296875f, 0.103515625f, 0.11054687f, 0.11757813f, 0.12460937f, 0.13164063f, 0.13867188f, 0.14570312f, \
    0.15273437f, 0.15976563f, 0.16679688f, 0.17382812f, 0.18085937f, 0.18789062f, 0.19492188f, 0.20195313f, \
    0.20898438f, 0.21601562f, 0.22304687f, 0.23007813f, 0.23710938f, 0.24414062f, 0.2511719f, 0.25820312f, \
    0.26523438f, 0.2722656f, 0.27929688f, 0.28632814f, 0.29335937f, 0.30039063f, 0.30742186f, 0.31445312f, \
    0.3214844f, 0.32851562f, 0.33554688f, 0.3425781f, 0.34960938f, 0.35664064f, 0.36367187f, 0.37070313f, \
    0.37773436f, 0.38476562f, 0.3917969f, 0.39882812f, 0.40585938f, 0.4128906f, 0.41992188f, 0.42695314f, \
    0.43398437f, 0.44101563f, 0.44804686f, 0.45507812f, 0.4621094f, 0.46914062f, 0.47617188f, 0.4832031f, \
    0.49023438f, 0.49726564f, 0.5042969f, 0.5113281f, 0.51835936f, 0.5253906f, 0.5324219f, 0.53945315f, \
    0.54648435f, 0.5535156f, 0.5605469f, 0.56757814f, 0.5746094f, 0.5816406f, 0.58867186f, 0.5957031f, \
    0.6027344f, 0.60976565f, 0.61679685f, 0.6238281f, 0.6308594f, 0.63789064f, 0.6449219f, 0.6519531f, \
    0.65898436f, 0.6660156f, 0.6730469f, 0.68007815f, 0.68710935f, 0.6941406f, 0.7011719f, 0.70820314f, \
    0.7152344f, 0.7222656f, 0.72929686f, 0.7363281f, 0.7433594f, 0.75039065f, 0.75742185f, 0.7644531f, \
    0.7714844f, 0.77851564f, 0.7855469f, 0.7925781f, 0.79960936f, 0.8066406f, 0.8136719f, 0.82070315f, \
    0.82773435f, 0.8347656f, 0.8417969f, 0.84882814f, 0.8558594f, 0.8628906f, 0.86992186f, 0.8769531f, \
    0.8839844f, 0.89101565f, 0.89804685f, 0.9050781f, 0.9121094f, 0.91914064f, 0.9261719f, 0.9332031f, \
    0.94023436f, 0.9472656f, 0.9542969f, 0.96132815f, 0.96835935f, 0.9753906f, 0.9824219f, 0.98945314f, \
    0.9964844f, 1.0f
// clang-format on
static const float code_magnitudes[CODE_LAST + 1] = {CODE_MAGNITUDES};
static const float root_code_magnitudes[ROOT_CODE_LAST + 1] = {ROOT_CODE_MAGNITUDES};

// The tables that device code reads: not in constant memory, which serves one address at a time.
#ifdef TARGET_CUDA
static __device__ const float device_code_magnitudes[CODE_LAST + 1] = {CODE_MAGNITUDES};
static __device__ const float device_root_code_magnitudes[ROOT_CODE_LAST + 1] = {ROOT_CODE_MAGNITUDES};
#endif
#ifdef __CUDA_ARCH__
#define CODES(table) device_##table
#else
#define CODES(table) table
#endif

// Returns the larger of `largest` and |x|, as bits, which compare as the magnitudes do.
HOST_DEVICE uint32_t code_larger_bits(uint32_t largest, float x) {
    const uint32_t bits = float_bits(x) & 0x7fffffffu;
    return bits > largest ? bits : largest;
}
// Returns the scale of a block: its largest magnitude, given by its bits. Infinity and NaN become FLT_MAX, so that no
// code decodes to NaN; less than 2^-100 becomes 0, so that every code of another block decodes to a normal number.
HOST_DEVICE float code_scale(uint32_t largest) {
    const float scale = float_from_bits(largest < 0x7f7fffffu ? largest : 0x7f7fffffu);
    return scale < 0x1p-100f ? 0 : scale;
}
// Returns the scale of a block of roots, the square root of code_scale. largest: the bits of the largest second moment.
HOST_DEVICE float root_code_scale(uint32_t largest) { return sqrtf(code_scale(largest)); }
HOST_DEVICE float code_scale_inverse(float scale) { return scale > 0 ? 1 / scale : 0; }

// Returns the index of the magnitude nearest to y >= 0: in code_magnitudes where n = 1 and last = CODE_LAST, in
// root_code_magnitudes where n = 2 and last = ROOT_CODE_LAST. Halfway it returns either; for NaN, and y below half the
// first magnitude above 0, 0. The border of two decades is one part of the lower decade above the power of ten.
HOST_DEVICE int code_nearest(float y, float n, int last) {
    float power = 1e6f, count = n;
#define DECADE(border, factor, size)                                                                                   \
    if (y >= (border) * (1 + 1.8f / ((size)*n))) {                                                                     \
        power = factor;                                                                                                \
        count = (size)*n;                                                                                              \
    }
    DECADE(1e-6f, 1e5f, 2)
    DECADE(1e-5f, 1e4f, 4)
    DECADE(1e-4f, 1e3f, 8)
    DECADE(1e-3f, 1e2f, 16)
    DECADE(1e-2f, 1e1f, 32)
    DECADE(1e-1f, 1.0f, 64)
#undef DECADE
    float part = (y * power - 0.1f) * (count * (1 / 0.9f));
    part = part < count - 1 ? part : count - 1;
    int index = (int)(part + (count - n + 1));
    index = index < last ? index : last - 1;
    index = y >= 0.5f + 0.5f * (1 - (n < 2 ? 1.35f : 0.45f) / (64 * n)) ? last : index;
    return y >= 0.5e-6f * (0.1f + 0.45f / n) ? index : 0;
}

HOST_DEVICE uint8_t code_of(float x, float inverse) {
    const int index = code_nearest(fabsf(x) * inverse, 1, CODE_LAST);
    return (uint8_t)(index > 0 && x < 0 ? index | CODE_NEGATIVE : index);
}
HOST_DEVICE float code_value(uint8_t code, float scale) {
    const float value = CODES(code_magnitudes)[code & CODE_LAST] * scale;
    return float_from_bits(float_bits(value) | (uint32_t)(code & CODE_NEGATIVE) << 24);
}
// Returns sqrt(x)'s code for x >= 0, a second moment; only 0 and NaN get 0. inverse: the scale's code_scale_inverse.
HOST_DEVICE uint8_t root_code_of(float x, float inverse) {
    const int index = code_nearest(sqrtf(x) * inverse, 2, ROOT_CODE_LAST), least = x > 0;
    return (uint8_t)(index > least ? index : least);
}
// Returns the second moment that a code of its root stands for, at least 2^-149 if not 0. scale: root_code_scale's.
HOST_DEVICE float root_code_value(uint8_t code, float scale) {
    const float root = CODES(root_code_magnitudes)[code] * scale, least = code > 0 ? 0x1p-149f : 0;
    return root * root > least ? root * root : least;
}
#undef CODES
