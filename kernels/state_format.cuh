// Says how a state of the training is stored for each parameter: gradients, moments, master weights.
//
// A stored state is a run of blocks of STATE_BLOCK elements, each of state_block_bytes. Blocks never depend on ranks or
// on what is offloaded: ranges that are updated, sharded or copied begin at whole blocks (TENSOR_ALIGNMENT).
//
//   FORMAT_FP32       4 bytes an element
//   FORMAT_BF16       2
//   FORMAT_8BIT       1, and an fp32 scale in front of each block: its largest magnitude. First moments: 127 magnitudes
//                     of both signs and 0
//   FORMAT_8BIT_ROOT  1, and a scale: the square root of second moments, 256 magnitudes; what is not 0 never becomes 0
//   FORMAT_NONE       0: the element does not have the state
//   FORMAT_REMAINDER  2: the lower half of an fp32 master weight whose upper half, rounded, is the bf16 parameter
//
// The split of a master weight is exact for all finite floats: hi = (bits + 0x8000) >> 16, lo = bits & 0xffff. Ties
// round away from zero: with ties to even an even hi has 65,537 preimages, and no 16 bits tell them apart. So every
// parameter is rounded by parameter_rounded; only an update without a remainder rounds by parameter_stochastic.
#pragma once
#include "kernels/device.cuh"      // floatX, bf16, HOST_DEVICE
#include "kernels/random.cuh"      // bf16_stochastic
#include "kernels/state_codes.cuh" // code_of, code_value
#include <sys/cdefs.h>             // __BEGIN_DECLS

enum { STATE_BLOCK = 128 };
enum state_format { FORMAT_FP32, FORMAT_BF16, FORMAT_8BIT, FORMAT_8BIT_ROOT, FORMAT_REMAINDER, FORMAT_NONE };

// Returns the bytes of a block of STATE_BLOCK elements, with an 8-bit block's scale; 0 for FORMAT_NONE.
HOST_DEVICE size_t state_block_bytes(enum state_format format) {
    switch (format) {
    case FORMAT_FP32: return STATE_BLOCK * sizeof(float);
    case FORMAT_BF16:
    case FORMAT_REMAINDER: return STATE_BLOCK * sizeof(uint16_t);
    case FORMAT_8BIT:
    case FORMAT_8BIT_ROOT: return sizeof(float) + STATE_BLOCK;
    case FORMAT_NONE: return 0;
    }
    return 0;
}
// Returns the bytes of a state of n elements, rounded up to whole blocks of STATE_BLOCK elements; 0 for FORMAT_NONE.
HOST_DEVICE size_t state_bytes(enum state_format format, int64_t n) { // of whole blocks
    return (size_t)((n + STATE_BLOCK - 1) / STATE_BLOCK) * state_block_bytes(format);
}

// Rounds a master weight to its bf16 parameter, to nearest, ties away from zero. A NaN may become a number.
HOST_DEVICE bf16 split_high(float master) {
    uint32_t bits;
    bf16 high;
    memcpy(&bits, &master, sizeof bits);
    high.bits = (uint16_t)((bits + 0x8000u) >> 16);
    return high;
}
HOST_DEVICE uint16_t split_low(float master) {
    uint32_t bits;
    memcpy(&bits, &master, sizeof bits);
    return (uint16_t)bits;
}
HOST_DEVICE float split_join(bf16 high, uint16_t low) {
    const uint32_t bits = ((uint32_t)high.bits - (low >> 15)) << 16 | low;
    float master;
    memcpy(&master, &bits, sizeof master);
    return master;
}
// Rounds a parameter to floatX. In bf16 by split_high, which may make a number of a NaN; in fp32 it stays as it is.
HOST_DEVICE floatX parameter_rounded(float exact) {
#ifdef PRECISION_BF16
    return split_high(exact);
#else
    return exact;
#endif
}
// Rounds a parameter to floatX. In bf16 by bf16_stochastic, with `random` in [0, 65535]; in fp32 it stays as it is.
HOST_DEVICE floatX parameter_stochastic(float exact, uint32_t random) {
#ifdef PRECISION_BF16
    return bf16_stochastic(exact, random);
#else
    return exact;
#endif
}
// Returns a parameter's master weight: in bf16 `rounded` joined with its stored lower half, `low`; in fp32 `rounded`.
HOST_DEVICE float parameter_joined(floatX rounded, uint16_t low) {
#ifdef PRECISION_BF16
    return split_join(rounded, low);
#else
    return rounded;
#endif
}

__BEGIN_DECLS
// Decodes the first n elements of a state, on the host. Ends the program for FORMAT_NONE and FORMAT_REMAINDER.
void state_decode(float *out,        // (n)
                  const void *state, // state_bytes(format, n)
                  enum state_format format, int64_t n);
// Encodes n values to nearest, on the host. The last block's rest is 0 in 8 bits, else stays. Fails as state_decode.
void state_encode(void *state,         // state_bytes(format, n)
                  const float *values, // (n)
                  enum state_format format, int64_t n);
__END_DECLS

// ---- One block, by one thread of the host ----

struct code_block {
    float scale;
    uint8_t codes[STATE_BLOCK];
};

// Decodes the first `count` <= STATE_BLOCK elements of a block. Ends the program for FORMAT_REMAINDER and FORMAT_NONE.
static inline void state_decode_block(float *out, const void *block, enum state_format format, int count) {
    const bf16 *rounded = (const bf16 *)block;
    const struct code_block *coded = (const struct code_block *)block;
    float scale;
    switch (format) {
    case FORMAT_FP32: memcpy(out, block, (size_t)count * sizeof *out); return;
    case FORMAT_BF16:
#pragma omp simd
        for (int i = 0; i < count; i++)
            out[i] = bf16_to_float(rounded[i]);
        return;
    case FORMAT_8BIT: scale = coded->scale;
#pragma omp simd
        for (int i = 0; i < count; i++)
            out[i] = code_value(coded->codes[i], scale);
        return;
    case FORMAT_8BIT_ROOT: scale = coded->scale;
#pragma omp simd
        for (int i = 0; i < count; i++)
            out[i] = root_code_value(coded->codes[i], scale);
        return;
    case FORMAT_REMAINDER:
    case FORMAT_NONE: break;
    }
    fail("%s", format == FORMAT_NONE ? "there is no such state of these elements"
                                     : "remainders of master weights are no numbers without their parameters");
}

// Returns the largest magnitude among the values, as the bits of a float.
static inline uint32_t values_largest_bits(const float *values, int count) {
    uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int i = 0; i < count; i++)
        largest = code_larger_bits(largest, values[i]);
    return largest;
}
// Encodes values (count), to nearest, as a block's first elements. The other elements' bytes stay, but an 8-bit block
// gets these values' scale, which changes what they stand for. Ends the program for FORMAT_REMAINDER and FORMAT_NONE.
static inline void state_encode_block(void *block, const float *values, enum state_format format, int count) {
    bf16 *rounded = (bf16 *)block;
    struct code_block *coded = (struct code_block *)block;
    float scale, inverse;
    switch (format) {
    case FORMAT_FP32: memcpy(block, values, (size_t)count * sizeof *values); return;
    case FORMAT_BF16:
#pragma omp simd
        for (int i = 0; i < count; i++)
            rounded[i] = bf16_from_float(values[i]);
        return;
    case FORMAT_8BIT:
        scale = code_scale(values_largest_bits(values, count));
        inverse = code_scale_inverse(scale);
        coded->scale = scale;
#pragma omp simd
        for (int i = 0; i < count; i++)
            coded->codes[i] = code_of(values[i], inverse);
        return;
    case FORMAT_8BIT_ROOT:
        scale = root_code_scale(values_largest_bits(values, count));
        inverse = code_scale_inverse(scale);
        coded->scale = scale;
#pragma omp simd
        for (int i = 0; i < count; i++)
            coded->codes[i] = root_code_of(values[i], inverse);
        return;
    case FORMAT_REMAINDER:
    case FORMAT_NONE: break;
    }
    fail("%s", format == FORMAT_NONE ? "there is no such state of these elements"
                                     : "remainders of master weights are no numbers without their parameters");
}
