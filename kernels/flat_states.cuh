// Holds what updates of flat ranges of states share: access to stored states' elements in fp32, and amaxes of tensors.
#pragma once
#include "kernels/amax.cuh"         // amax_larger
#include "kernels/flat_tensors.cuh" // struct flat_tensors
#include "kernels/four.cuh"         // four_load, four_store, FLAT_THREADS
#include "kernels/state_format.cuh" // enum state_format, STATE_BLOCK
#include <assert.h>                 // static_assert

#ifdef TARGET_CUDA

static_assert(STATE_BLOCK == 4 * 32, "a warp's elements are a block of one tensor");

DEVICE_FUNCTION four<float> four_floats(const four<bf16> &x) {
    four<float> result;
    for (int i = 0; i < 4; i++)
        result.x[i] = bf16_to_float(x.x[i]);
    return result;
}
// Returns the block of an 8-bit state that element `at` is in: a warp has a block, four elements a lane.
DEVICE_FUNCTION const char *code_block_at(const void *state, int64_t at) {
    return (const char *)state + at / STATE_BLOCK * (int64_t)sizeof(struct code_block);
}
// Returns elements [at, at + 4) of a state in fp32, zeros from number `count` on. at % 4 = 0. Not for FORMAT_REMAINDER.
DEVICE_FUNCTION four<float> state_four_load(const void *state, enum state_format format, int64_t at, int count) {
    four<float> x = {};
    if (count <= 0)
        return x;
    if (format == FORMAT_FP32)
        return four_load((const float *)state + at, count);
    if (format == FORMAT_BF16)
        return four_floats(four_load((const bf16 *)state + at, count));
    const struct code_block *block = (const struct code_block *)code_block_at(state, at);
    const four<uint8_t> codes = four_load(block->codes + at % STATE_BLOCK, count);
    const float scale = block->scale;
    for (int i = 0; i < 4; i++)
        x.x[i] = format == FORMAT_8BIT ? code_value(codes.x[i], scale) : root_code_value(codes.x[i], scale);
    return x;
}
// Stores the first `count` of elements [at, at + 4). All lanes of a warp call, lane l for element 4 l of a block, as an
// 8-bit block gets a new scale. Rounds bf16 to nearest or, where `stochastic`, by the upper halves of `random`.
DEVICE_FUNCTION void state_four_store(void *state, enum state_format format, int64_t at, const four<float> &x,
                                      int count, bool stochastic, const struct philox_words &random) {
    if (format == FORMAT_FP32) {
        four_store((float *)state + at, x, count);
        return;
    }
    if (format == FORMAT_BF16) {
        four<bf16> rounded;
        for (int i = 0; i < 4; i++)
            rounded.x[i] = stochastic ? bf16_stochastic(x.x[i], random.word[i] >> 16) : bf16_from_float(x.x[i]);
        four_store((bf16 *)state + at, rounded, count);
        return;
    }
    struct code_block *block = (struct code_block *)code_block_at(state, at);
    uint32_t largest = 0;
    for (int i = 0; i < 4; i++)
        largest = i < count ? code_larger_bits(largest, x.x[i]) : largest;
    largest = __reduce_max_sync(0xffffffffu, largest);
    const float scale = format == FORMAT_8BIT ? code_scale(largest) : root_code_scale(largest);
    const float inverse = code_scale_inverse(scale);
    four<uint8_t> codes;
    for (int i = 0; i < 4; i++)
        codes.x[i] = format == FORMAT_8BIT ? code_of(x.x[i], inverse) : root_code_of(x.x[i], inverse);
    if (count > 0) {
        if (at % STATE_BLOCK == 0)
            block->scale = scale;
        four_store(block->codes + at % STATE_BLOCK, codes, count);
    }
}
enum { FLAT_WARPS = FLAT_THREADS / 32, FLAT_AMAX_BYTES = 2 * FLAT_WARPS * (int)sizeof(uint32_t) };
// Merges each thread's `largest` into its tensor's amax, if not NULL, by one atomic operation for each tensor of the
// block. All threads call. index: the row of the warp's tensor. shared: FLAT_AMAX_BYTES, unused since the last barrier.
DEVICE_FUNCTION void flat_merge_amaxes(const struct flat_tensors &tensors, int index, uint32_t largest,
                                       uint32_t shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t indices = shared + 4 * FLAT_WARPS;
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (lane == 0) {
        store_shared_word(shared + 4 * (uint32_t)warp, largest);
        store_shared_word(indices + 4 * (uint32_t)warp, (uint32_t)index);
    }
    __syncthreads();
    if (threadIdx.x >= FLAT_WARPS) // thread i: the tensor of warp i, where warp i is its first
        return;
    const uint32_t mine = load_shared_word(indices + 4 * threadIdx.x);
    uint32_t *const amax = tensors.rows[mine].amax;
    if (amax == NULL || (threadIdx.x > 0 && load_shared_word(indices + 4 * (threadIdx.x - 1)) == mine))
        return;
    largest = 0;
    for (unsigned i = threadIdx.x; i < FLAT_WARPS && load_shared_word(indices + 4 * i) == mine; i++)
        largest = amax_larger(largest, load_shared_word(shared + 4 * i));
    atomicMax(amax, largest);
}

#else

// Elements that a thread takes at a time: a page of fp32, whole blocks of states and of random numbers.
enum { FLAT_PART = 1024 };
static_assert(FLAT_PART % STATE_BLOCK == 0 && FLAT_PART % PHILOX_CHUNK == 0, "a part is whole blocks");

// Returns the address of the block of a state that begins at element `at`, a multiple of STATE_BLOCK.
static inline void *state_at(void *state, enum state_format format, int64_t at) {
    return (char *)state + at / STATE_BLOCK * (int64_t)state_block_bytes(format);
}
// Returns the first `count` elements of `blocks` in fp32: FORMAT_FP32 where they lie, others decoded into room (count).
static inline float *state_decoded(void *blocks, enum state_format format, float *room, int count) {
    if (format == FORMAT_FP32)
        return (float *)blocks;
    for (int i = 0; i < count; i += STATE_BLOCK)
        state_decode_block(room + i, state_at(blocks, format, i), format,
                           count - i < STATE_BLOCK ? count - i : (int)STATE_BLOCK);
    return room;
}
// Encodes room (count) into `blocks`; does nothing for FORMAT_FP32, which is updated where it lies. Rounds bf16 by the
// upper halves of words (count); to nearest where words is NULL.
static inline void state_encode_decoded(void *blocks, enum state_format format, const float *room, int count,
                                        const uint32_t *words) {
    if (format == FORMAT_FP32)
        return;
    if (format == FORMAT_BF16 && words) {
        bf16 *rounded = (bf16 *)blocks;
#pragma omp simd
        for (int i = 0; i < count; i++)
            rounded[i] = bf16_stochastic(room[i], words[i] >> 16);
        return;
    }
    for (int i = 0; i < count; i += STATE_BLOCK)
        state_encode_block(state_at(blocks, format, i), room + i, format,
                           count - i < STATE_BLOCK ? count - i : (int)STATE_BLOCK);
}

#endif
