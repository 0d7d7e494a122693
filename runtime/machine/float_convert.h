// Converts bits of bf16 and f16 to float, and float to bf16, on the host. Inline, so that loops are vectorized.
#pragma once
#include <stdint.h> // uint16_t, uint32_t
#include <string.h> // memcpy

static inline float f32_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline uint32_t f32_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_from_bf16_bits(uint16_t bf16) { return f32_from_bits((uint32_t)bf16 << 16); }
// Rounds to nearest, ties to even, too large values to infinity. A NaN becomes quiet, since it could round to infinity.
static inline uint16_t float_to_bf16_bits(float value) {
    const uint32_t bits = f32_to_bits(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x40u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

// Widens an IEEE half: 1 sign, 5 exponent (bias 15) and 10 fraction bits. Exact, and a NaN keeps its payload.
static inline float float_from_f16_bits(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16, magnitude = half & 0x7fffu, exponent = magnitude >> 10;
    uint32_t bits;
    if (exponent == 0) // zero, or subnormal: multiples of 2^-24, which are normal floats
        bits = f32_to_bits((float)magnitude * 0x1p-24f);
    else
        bits = (magnitude << 13) + ((exponent == 31 ? 255u - 31u : 127u - 15u) << 23);
    return f32_from_bits(sign | bits);
}
