// fp32 values for the elements of a 16-byte access of floatX: converted elements, fp32 arrays, dropout scales.
#pragma once
#include "kernels/device.cuh"      // floatX, DEVICE_FUNCTION
#include "kernels/packed.cuh"      // struct packed, PACK
#include "kernels/ptx.cuh"         // pack_bf16x2, struct float_x4
#include "kernels/random.cuh"      // philox4x32, dropout_step
#include "kernels/vector_math.cuh" // float_from_bits

#ifdef TARGET_CUDA

struct packed_floats {
    float x[PACK];
};

DEVICE_FUNCTION struct packed_floats packed_to_floats(const struct packed &from) {
    struct packed_floats result;
#ifdef PRECISION_BF16
    uint32_t words[PACK / 2]; // of which each half takes one instruction: a shift, a mask
    memcpy(words, &from, sizeof words);
#pragma unroll
    for (int i = 0; i < PACK / 2; i++) {
        result.x[2 * i] = float_from_bits(words[i] << 16);
        result.x[2 * i + 1] = float_from_bits(words[i] & 0xffff0000u);
    }
#else
    memcpy(&result, &from, sizeof result);
#endif
    return result;
}
// Rounds PACK floats to a pack of floatX, as to_floatX does: in bf16 two by one instruction, in fp32 unchanged.
DEVICE_FUNCTION struct packed packed_from_floats(const struct packed_floats &from) {
    struct packed result;
#ifdef PRECISION_BF16
    uint32_t words[PACK / 2];
#pragma unroll
    for (int i = 0; i < PACK / 2; i++)
        words[i] = pack_bf16x2(from.x[2 * i], from.x[2 * i + 1]);
    memcpy(&result, words, sizeof result);
#else
    memcpy(&result, &from, sizeof result);
#endif
    return result;
}

// Loads PACK floats in 16-byte accesses; `from` is aligned to 16 bytes.
DEVICE_FUNCTION struct packed_floats floats_load(const float *from) {
    struct packed_floats result;
#pragma unroll
    for (int i = 0; i < PACK; i += 4) {
        packed_check(from + i, false);
        const uint4 words = *(const uint4 *)(from + i);
        memcpy(&result.x[i], &words, sizeof words);
    }
    return result;
}
// Stores PACK floats in 16-byte accesses; `to` is aligned to 16 bytes.
DEVICE_FUNCTION void floats_store(float *to, const struct packed_floats &value) {
#pragma unroll
    for (int i = 0; i < PACK; i += 4) {
        uint4 words;
        memcpy(&words, &value.x[i], sizeof words);
        packed_check(to + i, true);
        *(uint4 *)(to + i) = words;
    }
}
// Loads PACK floats at any alignment, with 0 in place of floats from `count` on, which are not read.
DEVICE_FUNCTION struct packed_floats floats_load_some(const float *from, int64_t count) {
    if (count >= PACK && packed_aligned(from))
        return floats_load(from);
    struct packed_floats result;
#pragma unroll
    for (int i = 0; i < PACK; i++)
        result.x[i] = i < count ? from[i] : 0.0f;
    return result;
}
// Stores the first min(count, PACK) floats, at any alignment. count: what is left of an array.
DEVICE_FUNCTION void floats_store_some(float *to, const struct packed_floats &value, int64_t count) {
    if (count >= PACK && packed_aligned(to)) {
        floats_store(to, value);
        return;
    }
#pragma unroll
    for (int i = 0; i < PACK; i++)
        if (i < count)
            to[i] = value.x[i];
}
// Stores PACK floats in shared memory, in fours that are `stride` bytes apart; `to` and `stride` are multiples of 16.
DEVICE_FUNCTION void floats_store_shared(uint32_t to, const struct packed_floats &value, uint32_t stride = 16) {
#pragma unroll
    for (int i = 0; i < PACK; i += 4) {
        const struct float_x4 four = {{value.x[i], value.x[i + 1], value.x[i + 2], value.x[i + 3]}};
        store_shared_floats(to + (uint32_t)(i / 4) * stride, four);
    }
}
DEVICE_FUNCTION struct packed_floats floats_load_shared(uint32_t from, uint32_t stride = 16) {
    struct packed_floats result;
#pragma unroll
    for (int i = 0; i < PACK; i += 4) {
        const struct float_x4 four = load_shared_floats(from + (uint32_t)(i / 4) * stride);
        memcpy(&result.x[i], &four, sizeof four);
    }
    return result;
}

// Returns dropout_scale(d, element + i), i < PACK. Evaluates Philox once for four, once more unless element % 4 is 0.
DEVICE_FUNCTION struct packed_floats dropout_scales_packed(const struct dropout &d, uint64_t element) {
    const float kept = 1.0f / (1.0f - d.p);
    const uint32_t step = (uint32_t)dropout_step(d), skip = (uint32_t)element % 4;
    uint32_t words[PACK + 4];
#pragma unroll
    for (int i = 0; i <= PACK; i += 4) {
        const uint64_t block = element / 4 + (uint64_t)(i / 4);
        struct philox_words four = {{0, 0, 0, 0}};
        if (i < PACK || skip > 0)
            four = philox4x32((uint32_t)block, (uint32_t)(block >> 32), step, d.layer << 8 | d.use, (uint32_t)d.seed,
                              (uint32_t)(d.seed >> 32));
        memcpy(&words[i], &four, sizeof four);
    }
    struct packed_floats result;
#pragma unroll
    for (int i = 0; i < PACK; i++) { // words are selected, not indexed, so that they stay in registers
        const uint32_t even = skip & 2 ? words[i + 2] : words[i], odd = skip & 2 ? words[i + 3] : words[i + 1];
        result.x[i] = uniform_from_word(skip & 1 ? odd : even) >= d.p ? kept : 0.0f;
    }
    return result;
}

#endif
