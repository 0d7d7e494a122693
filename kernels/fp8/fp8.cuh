// The two 8-bit floating point formats, their scales, and matrices of them.
//             sign/exponent/mantissa  bias  largest  smallest normal  smallest subnormal  infinities  NaN
//   E4M3 (fn)        1/4/3              7      448        2^-6              2^-9            none       7f, ff
//   E5M2             1/5/2             15    57344        2^-14             2^-16          7c, fc      7d..7f, fd..ff
// (Micikevicius et al. 2022, arXiv 2209.05433.) A value x is stored as code fp8(x scale) and read as its value times
// `inverse`, 1 / scale. What makes x rounds it to floatX, so fused and other casts have the same bits on all targets.
#pragma once
#include "kernels/device.cuh" // floatX, HOST_DEVICE

typedef uint8_t fp8;
enum fp8_format { FP8_E4M3, FP8_E5M2 };

HOST_DEVICE float fp8_largest(enum fp8_format format) { // the largest finite value
    switch (format) {
    case FP8_E4M3: return 448.0f;
    case FP8_E5M2: return 57344.0f;
    }
    return 0;
}

// Returns the code of x itself, without a scale: rounded to nearest, ties to even, and limited to the largest finite
// magnitude, infinities too. Every NaN becomes 7f. A zero keeps its sign. As PTX's cvt.rn.satfinite.
HOST_DEVICE fp8 fp8_encode(float x, enum fp8_format format);
// Returns a code's value, without a scale, exactly; NaN and E5M2's infinities stay what they are.
HOST_DEVICE float fp8_decode(fp8 code, enum fp8_format format);

// ---- the scale of a tensor ----

// Returns the bits of |x|. As integers they are ordered as the magnitudes are, with infinity and NaN on top, so that a
// maximum of them carries an overflow and does not depend on the order in which it is taken.
HOST_DEVICE uint32_t fp8_magnitude(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x7fffffffu;
}

// The scale of one tensor of one layer, in the device's memory. A cast takes `delayed`, or, where that is 0, the scale
// of `amax`, and writes `scale` and `inverse`. The first forward of a micro-batch collects amax, which stays until the
// next micro-batch begins: casts of recomputed values find the same amax, and write the same scale again.
struct fp8_scale {
    uint32_t amax;        // fp8_magnitude of the tensor's largest element in this micro-batch; a weight's in this step
    uint32_t step_amax;   // of the step's earlier micro-batches; in fp8_scales_update the ranks' largest of the step
    float delayed;        // the scale by the history of amaxes; 0: there is no history, or it has only zeros
    float scale, inverse; // of the last cast; `inverse` is what a product multiplies by
    uint32_t unused[3];   // 32 bytes: members at 16-byte boundaries stay there in an array
};

// Returns fp8_largest / amax (fp8_magnitude's bits), at most 2^126, so that scale and inverse are normal numbers. For 0
// returns 1, and for infinity or NaN NaN: products become NaN and the update is skipped. Saturation would hide it.
HOST_DEVICE float fp8_scale_of(uint32_t amax, enum fp8_format format) {
    float largest, scale;
    memcpy(&largest, &amax, sizeof largest);
    if (amax == 0)
        return 1.0f;
    if (amax >= 0x7f800000u)
        return largest - largest;
    scale = fp8_largest(format) / largest;
    return scale < 0x1p126f ? scale : 0x1p126f;
}

// Returns the scale that a cast takes: `delayed`, or where that is 0 the scale of amax.
HOST_DEVICE float fp8_scale_for(const struct fp8_scale *scale, enum fp8_format format) {
    return scale->delayed != 0 ? scale->delayed : fp8_scale_of(scale->amax, format);
}

// ---- matrices ----

// The elements that one scale covers: a whole matrix; 128 of a row; 128 x 128. `inverse` is laid out as cuBLASLt reads
// it: one float; (ceil(depth / 128), rows rounded up to 4); (ceil(rows / 128), ceil(depth / 128) rounded up to 4).
enum fp8_granularity { FP8_PER_TENSOR, FP8_1X128, FP8_128X128 };
enum { FP8_BLOCK = 128 };

// An operand of a product, in the device's memory: rows of `depth` codes, dense; the product sums over the depth.
struct fp8_matrix {
    fp8 *codes; // NULL: there is no such matrix
    float *inverse;
    enum fp8_format format;
    enum fp8_granularity granularity;
};
// The number of floats of a row of `inverse`. FP8_1X128 has a row per 128 of depth, FP8_128X128 per 128 rows, else one.
HOST_DEVICE int64_t fp8_inverse_pitch(enum fp8_granularity granularity, int64_t rows, int64_t depth) {
    switch (granularity) {
    case FP8_PER_TENSOR: return 1;
    case FP8_1X128: return (rows + 3) / 4 * 4;
    case FP8_128X128: return ((depth + FP8_BLOCK - 1) / FP8_BLOCK + 3) / 4 * 4;
    }
    return 0;
}
// The number of floats of `inverse` of a matrix (rows, depth), its padding included.
static inline int64_t fp8_inverse_count(enum fp8_granularity granularity, int64_t rows, int64_t depth) {
    const int64_t pitch = fp8_inverse_pitch(granularity, rows, depth);
    switch (granularity) {
    case FP8_PER_TENSOR: return 1;
    case FP8_1X128: return (depth + FP8_BLOCK - 1) / FP8_BLOCK * pitch;
    case FP8_128X128: return (rows + FP8_BLOCK - 1) / FP8_BLOCK * pitch;
    }
    return 0;
}

// ---- casts (kernels/fp8/cast.cuh) ----

// Values that a cast changed by more than rounding: limited to the largest finite value, or made zero.
enum fp8_count { FP8_SATURATED, FP8_FLUSHED, FP8_COUNTS };

// The results of a cast of x (M, N); NULL: not made. The row form and the column form have one format and granularity.
struct fp8_cast {
    struct fp8_matrix rows;    // (M, N): the row form
    struct fp8_matrix columns; // (N, M): the column form, x transposed
    float *dbias;              // (N) = column sums of x, before the cast, or
    bool add_dbias;            // += these
    struct fp8_scale *scale;   // FP8_PER_TENSOR: x's; amax or delayed must be there. Other granularities: NULL
    uint64_t *counts;          // (FP8_COUNTS) += the counts of one form: the row form, where it is made
};

// ---- formats, computed ----

// A format's mantissa bits, and the exponent of its smallest normal number.
struct fp8_precision {
    int mantissa, least;
};
HOST_DEVICE struct fp8_precision fp8_precision_of(enum fp8_format format) {
    struct fp8_precision bits = {3, -6};
    switch (format) {
    case FP8_E4M3: break;
    case FP8_E5M2:
        bits.mantissa = 2;
        bits.least = -14;
        break;
    }
    return bits;
}

HOST_DEVICE fp8 fp8_encode(float x, enum fp8_format format) {
    const struct fp8_precision f = fp8_precision_of(format);
    uint32_t bits, sign, magnitude;
    memcpy(&bits, &x, sizeof bits);
    sign = bits >> 24 & 0x80u;
    magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return 0x7f;
    const float largest = fp8_largest(format);
    float absolute;
    memcpy(&absolute, &magnitude, sizeof absolute);
    absolute = absolute < largest ? absolute : largest;
    const float least = format == FP8_E4M3 ? 0x1p-6f : 0x1p-14f;
    if (absolute < least) {
        // subnormals are multiples of 2^(least - mantissa): added to a float whose unit that is, they are rounded to it
        const float unit = format == FP8_E4M3 ? 0x1p14f : 0x1p7f; // 2^(23 + least - mantissa)
        const float sum = absolute + unit;
        uint32_t rounded, base;
        memcpy(&rounded, &sum, sizeof rounded);
        memcpy(&base, &unit, sizeof base);
        return (fp8)(sign | (rounded - base));
    }
    memcpy(&magnitude, &absolute, sizeof magnitude);
    const int drop = 23 - f.mantissa;
    const uint32_t rounded = magnitude + ((1u << (drop - 1)) - 1) + (magnitude >> drop & 1u);
    const uint32_t code = (rounded >> drop) - ((uint32_t)(127 + f.least - 1) << f.mantissa);
    return (fp8)(sign | code);
}

HOST_DEVICE float fp8_decode(fp8 code, enum fp8_format format) {
    const struct fp8_precision f = fp8_precision_of(format);
    const uint32_t sign = (uint32_t)(code & 0x80u) << 24, magnitude = code & 0x7fu;
    const uint32_t exponent = magnitude >> f.mantissa;
    uint32_t bits;
    float value;
    const bool e4m3 = format == FP8_E4M3;
    if (e4m3 ? magnitude == 0x7fu : magnitude > 0x7cu)
        bits = 0x7fc00000u;
    else if (!e4m3 && magnitude == 0x7cu)
        bits = 0x7f800000u;
    else if (exponent == 0) {
        value = (float)magnitude * (e4m3 ? 0x1p-9f : 0x1p-16f);
        memcpy(&bits, &value, sizeof bits);
    } else
        bits = (magnitude << (23 - f.mantissa)) + ((uint32_t)(127 + f.least - 1) << 23);
    bits |= sign;
    memcpy(&value, &bits, sizeof value);
    return value;
}
