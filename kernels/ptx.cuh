// Inline PTX, one wrapper an instruction, and beside each its model on the host. With CUDA_EMULATED defined (test/emu/)
// the host compiler compiles these functions: a model says which lane holds which element, as the PTX ISA's fragment
// layouts do (sections "Matrix Fragments for mma.m16n8k16", "ldmatrix"). Shared memory has 32-bit byte addresses, and
// is accessed only through these wrappers, so that the emulator sees each access. g = lane / 4, t = lane % 4.
#pragma once
#include "kernels/fp8/fp8.cuh" // fp8_encode
#include <stdint.h>            // uint32_t

#if defined(__CUDACC__)
#define PTX_FUNCTION static __device__ __forceinline__
#elif defined(CUDA_EMULATED)
#include "test/emu/warp.h" // emu_*: what the lanes of a warp exchange, shared memory, asynchronous copies
#define PTX_FUNCTION static inline
#endif

#if defined(__CUDACC__) || defined(CUDA_EMULATED)

struct float_x4 {
    float x[4];
};
struct word_x4 {
    uint32_t x[4];
};

// Returns x as a value unknown to the compiler, which then computes again what depends on it, rather than keep it.
PTX_FUNCTION int hide_value(int x) {
#if defined(__CUDACC__)
    asm volatile("" : "+r"(x));
#endif
    return x;
}

// Returns the lower 32 bits of the clock of all blocks, in ns: 0 again after 4.3 s. The emulator's gains 10 us a call.
PTX_FUNCTION uint32_t global_timer(void) {
    uint32_t result;
#if defined(__CUDACC__)
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(result)::"memory");
#else
    static __thread uint32_t now;
    result = now += 10000;
#endif
    return result;
}

// Returns the shared-memory address of the block's dynamic shared memory: a multiple of 1024, as swizzles need.
PTX_FUNCTION uint32_t shared_memory(void) {
#if defined(__CUDACC__)
    extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];
    return (uint32_t)__cvta_generic_to_shared(dynamic_shared_memory);
#else
    return emu_shared_base();
#endif
}

// Starts a copy of 16 bytes from global to shared memory, past L1. Addresses are multiples of 16. Unless `valid`, reads
// nothing and writes zeros. cp_async_commit and cp_async_wait must follow.
PTX_FUNCTION void cp_async_16(uint32_t to, const void *from, bool valid) {
#if defined(__CUDACC__)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(valid ? 16 : 0)
                 : "memory");
#else
    emu_copy_async(to, from, 16, valid);
#endif
}
// Starts a copy of 8 bytes as cp_async_16 does, but through L1, addresses multiples of 8.
PTX_FUNCTION void cp_async_8(uint32_t to, const void *from, bool valid) {
#if defined(__CUDACC__)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
                 "r"(valid ? 8 : 0)
                 : "memory");
#else
    emu_copy_async(to, from, 8, valid);
#endif
}
// Closes a group of this thread's copies, for cp_async_wait.
PTX_FUNCTION void cp_async_commit(void) {
#if defined(__CUDACC__)
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    emu_commit_async();
#endif
}
// Waits until all but the latest PENDING of this thread's groups are copied. Other threads see that after a barrier.
template <int PENDING> PTX_FUNCTION void cp_async_wait(void) {
#if defined(__CUDACC__)
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#else
    emu_wait_async(PENDING);
#endif
}

PTX_FUNCTION void store_shared_word(uint32_t to, uint32_t value) {
#if defined(__CUDACC__)
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
#else
    emu_store_shared(to, &value, 4);
#endif
}
PTX_FUNCTION uint32_t load_shared_word(uint32_t from) {
    uint32_t result;
#if defined(__CUDACC__)
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(result) : "r"(from) : "memory");
#else
    emu_load_shared(&result, from, 4);
#endif
    return result;
}
PTX_FUNCTION void store_shared_float(uint32_t to, float value) {
#if defined(__CUDACC__)
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
#else
    emu_store_shared(to, &value, 4);
#endif
}
PTX_FUNCTION float load_shared_float(uint32_t from) {
    float result;
#if defined(__CUDACC__)
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(result) : "r"(from) : "memory");
#else
    emu_load_shared(&result, from, 4);
#endif
    return result;
}
PTX_FUNCTION void store_shared_double(uint32_t to, double value) {
#if defined(__CUDACC__)
    asm volatile("st.shared.f64 [%0], %1;" ::"r"(to), "d"(value) : "memory");
#else
    emu_store_shared(to, &value, 8);
#endif
}
PTX_FUNCTION double load_shared_double(uint32_t from) {
    double result;
#if defined(__CUDACC__)
    asm volatile("ld.shared.f64 %0, [%1];" : "=d"(result) : "r"(from) : "memory");
#else
    emu_load_shared(&result, from, 8);
#endif
    return result;
}
// Returns `value` of the lane whose number is this lane's xor lane_mask. All lanes of the warp call.
PTX_FUNCTION double shuffle_xor_double(double value, int lane_mask) {
#if defined(__CUDACC__)
    return __shfl_xor_sync(0xffffffffu, value, lane_mask);
#else
    return ((const double *)emu_warp_exchange(&value, sizeof value))[emu_lane() ^ lane_mask];
#endif
}
// Loads four words from shared memory; `from` is aligned to 16 bytes.
PTX_FUNCTION struct word_x4 load_shared_words(uint32_t from) {
    struct word_x4 result;
#if defined(__CUDACC__)
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(result.x[0]), "=r"(result.x[1]), "=r"(result.x[2]), "=r"(result.x[3])
                 : "r"(from)
                 : "memory");
#else
    emu_load_shared(&result, from, 16);
#endif
    return result;
}
// Loads a word from each of four addresses in shared memory. All lanes call. Their i-th words should differ in banks.
PTX_FUNCTION struct word_x4 load_words_apart(uint32_t from0, uint32_t from1, uint32_t from2, uint32_t from3) {
    struct word_x4 result;
#if defined(__CUDACC__)
    result.x[0] = load_shared_word(from0);
    result.x[1] = load_shared_word(from1);
    result.x[2] = load_shared_word(from2);
    result.x[3] = load_shared_word(from3);
#else
    const uint32_t from[4] = {from0, from1, from2, from3};
    emu_load_words_apart(result.x, from);
#endif
    return result;
}
// Loads four floats from shared memory; `from` is aligned to 16 bytes.
PTX_FUNCTION struct float_x4 load_shared_floats(uint32_t from) {
    struct float_x4 result;
#if defined(__CUDACC__)
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(result.x[0]), "=f"(result.x[1]), "=f"(result.x[2]), "=f"(result.x[3])
                 : "r"(from)
                 : "memory");
#else
    emu_load_shared(&result, from, 16);
#endif
    return result;
}

// Stores four floats in shared memory; `to` is aligned to 16 bytes.
PTX_FUNCTION void store_shared_floats(uint32_t to, struct float_x4 value) {
#if defined(__CUDACC__)
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(value.x[0]), "f"(value.x[1]),
                 "f"(value.x[2]), "f"(value.x[3])
                 : "memory");
#else
    emu_store_shared(to, &value, 16);
#endif
}
PTX_FUNCTION void store_shared_long(uint32_t to, uint64_t value) {
#if defined(__CUDACC__)
    asm volatile("st.shared.b64 [%0], %1;" ::"r"(to), "l"(value) : "memory");
#else
    emu_store_shared(to, &value, 8);
#endif
}
PTX_FUNCTION uint64_t load_shared_long(uint32_t from) {
    uint64_t result;
#if defined(__CUDACC__)
    asm volatile("ld.shared.b64 %0, [%1];" : "=l"(result) : "r"(from) : "memory");
#else
    emu_load_shared(&result, from, 8);
#endif
    return result;
}

// Loads four 8x8 matrices of 16-bit elements. Lane 8j + r gives the address, a multiple of 16, of row r of matrix j.
// All lanes call. Word j of the result is elements (g, 2t) and (g, 2t + 1) of matrix j, g = lane / 4, t = lane % 4.
PTX_FUNCTION struct word_x4 ldmatrix_x4(uint32_t row) {
    struct word_x4 result;
#if defined(__CUDACC__)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(result.x[0]), "=r"(result.x[1]), "=r"(result.x[2]), "=r"(result.x[3])
                 : "r"(row)
                 : "memory");
#else
    const struct emu_matrix_row *rows = emu_load_matrix_rows(row);
    for (int j = 0; j < 4; j++)
        result.x[j] = rows[8 * j + emu_lane() / 4].x[emu_lane() % 4];
#endif
    return result;
}
// Loads as ldmatrix_x4 does, but transposed: word j of the result holds elements (2t, g) and (2t + 1, g) of matrix j.
PTX_FUNCTION struct word_x4 ldmatrix_x4_trans(uint32_t row) {
    struct word_x4 result;
#if defined(__CUDACC__)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(result.x[0]), "=r"(result.x[1]), "=r"(result.x[2]), "=r"(result.x[3])
                 : "r"(row)
                 : "memory");
#else
    const struct emu_matrix_row *rows = emu_load_matrix_rows(row);
    const int g = emu_lane() / 4, t = emu_lane() % 4;
    for (int j = 0; j < 4; j++) {
        const uint32_t low = rows[8 * j + 2 * t].x[g / 2] >> 16 * (g % 2) & 0xffffu;
        const uint32_t high = rows[8 * j + 2 * t + 1].x[g / 2] >> 16 * (g % 2) & 0xffffu;
        result.x[j] = low | high << 16;
    }
#endif
    return result;
}

#ifdef CUDA_EMULATED
struct mma_fragments {
    uint32_t a[4], b[2];
    float c[4];
};
// Adds A . B to c in fragments (32), a struct mma_fragments of each lane, as mma_m16n8k16 does. Sums of four rows stay
// in registers: most of what the emulator computes is here.
static inline void mma_model(void *fragments) {
    typedef float four __attribute__((vector_size(16)));
    struct mma_fragments *lanes = (struct mma_fragments *)fragments;
    float a[16][16];
    union {
        float x[8];
        four columns[2];
    } b[16];
    for (int lane = 0; lane < 32; lane++) {
        const int g = lane / 4, t = lane % 4;
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            float *pair = &a[g + i % 2 * 8][2 * t + i / 2 * 8];
            pair[0] = emu_bf16(lanes[lane].a[i]);
            pair[1] = emu_bf16(lanes[lane].a[i] >> 16);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            b[2 * t + i * 8].x[g] = emu_bf16(lanes[lane].b[i]);
            b[2 * t + i * 8 + 1].x[g] = emu_bf16(lanes[lane].b[i] >> 16);
        }
    }
    for (int row = 0; row < 16; row += 4) {
        four sums[4][2] = {};
        for (int k = 0; k < 16; k++)
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) {
                sums[r][0] += a[row + r][k] * b[k].columns[0];
                sums[r][1] += a[row + r][k] * b[k].columns[1];
            }
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++)
#pragma GCC unroll 8
            for (int column = 0; column < 8; column++)
                lanes[(row + r) % 8 * 4 + column / 2].c[row / 8 * 2 + column % 2] += sums[r][column / 4][column % 4];
    }
}
#endif
// c (16 x 8, fp32) += a (16 x 16, bf16) . b (16 x 8, bf16). All lanes call. A lane has these elements (row, column),
// with g = lane / 4, t = lane % 4, where 2t.. stands for a word of two: 2t in its lower half, and 2t + 1.
//   a: (g, 2t..), (g + 8, 2t..), (g, 2t + 8..), (g + 8, 2t + 8..); b: (2t.., g), (2t + 8.., g)
//   c: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
PTX_FUNCTION void mma_m16n8k16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
#if defined(__CUDACC__)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    const struct mma_fragments mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
    const struct mma_fragments *all = (const struct mma_fragments *)emu_warp_combine(&mine, sizeof mine, mma_model);
    for (int i = 0; i < 4; i++)
        c[i] = all[emu_lane()].c[i];
#endif
}

#ifdef CUDA_EMULATED
// Returns the TF32 number that a tensor core makes of a float, given by its bits: its 13 lowest bits become 0.
static inline float mma_tf32(uint32_t bits) {
    float value;
    bits &= 0xffffe000u;
    memcpy(&value, &bits, sizeof value);
    return value;
}
// Does mma_m16n8k8 on fragments (32), a struct mma_fragments a lane. c + the products, all but exact in a double, is
// truncated to 24 bits, as tensor cores do (Fasi et al. 2021, "Numerical behavior of NVIDIA tensor cores").
static inline void mma_tf32_model(void *fragments) {
    struct mma_fragments *lanes = (struct mma_fragments *)fragments;
    float a[16][8], b[8][8];
    for (int lane = 0; lane < 32; lane++) {
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++)
            a[g + i % 2 * 8][t + i / 2 * 4] = mma_tf32(lanes[lane].a[i]);
        for (int i = 0; i < 2; i++)
            b[t + i * 4][g] = mma_tf32(lanes[lane].b[i]);
    }
    for (int row = 0; row < 16; row++) {
        double sums[8];
        for (int column = 0; column < 8; column++)
            sums[column] = lanes[row % 8 * 4 + column / 2].c[row / 8 * 2 + column % 2];
        for (int k = 0; k < 8; k++)
#pragma omp simd
            for (int column = 0; column < 8; column++)
                sums[column] += (double)a[row][k] * b[k][column];
        for (int column = 0; column < 8; column++) {
            uint64_t bits;
            memcpy(&bits, &sums[column], sizeof bits);
            bits &= ~0x1fffffffull;
            memcpy(&sums[column], &bits, sizeof bits);
            lanes[row % 8 * 4 + column / 2].c[row / 8 * 2 + column % 2] = (float)sums[column];
        }
    }
}
#endif
// c (16 x 8, fp32) += a (16 x 8, TF32) . b (8 x 8, TF32). TF32: a float whose 13 lowest bits are not read. All lanes
// call. a: words (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4); b: (t, g), (t + 4, g); c, g, t: as mma_m16n8k16's.
PTX_FUNCTION void mma_m16n8k8(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
#if defined(__CUDACC__)
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    const struct mma_fragments mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
    const struct mma_fragments *all =
        (const struct mma_fragments *)emu_warp_combine(&mine, sizeof mine, mma_tf32_model);
    for (int i = 0; i < 4; i++)
        c[i] = all[emu_lane()].c[i];
#endif
}

// Packs two floats, rounded to the nearest bf16, in one word, `low` in the lower half.
PTX_FUNCTION uint32_t pack_bf16x2(float low, float high) {
#if defined(__CUDACC__)
    uint32_t result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
#else
    return (uint32_t)emu_to_bf16(low) | (uint32_t)emu_to_bf16(high) << 16;
#endif
}

// Returns x + y, never as part of a fused multiply-add: where y is a product, its rounding counts.
PTX_FUNCTION float add_rounded(float x, float y) {
#if defined(__CUDACC__)
    return __fadd_rn(x, y);
#else
    return x + y;
#endif
}

// Packs four floats as FP8 codes, x[0] in the lowest byte: fp8_encode's codes, with or without the GPU's instruction.
PTX_FUNCTION uint32_t pack_fp8x4(const float x[4], enum fp8_format format) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t low, high;
    if (format == FP8_E4M3) {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x[1]), "f"(x[0]));
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x[3]), "f"(x[2]));
    } else {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x[1]), "f"(x[0]));
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x[3]), "f"(x[2]));
    }
    return (uint32_t)low | (uint32_t)high << 16;
#else
    uint32_t word = 0;
    for (int i = 0; i < 4; i++)
        word |= (uint32_t)fp8_encode(x[i], format) << 8 * i;
    return word;
#endif
}

// Returns a word of four bytes picked from a and b, whose bytes are numbered from a's lowest, 0, to b's highest, 7.
// Byte i of the result, from the lowest on, is the byte whose number is hexadecimal digit i of `bytes`.
PTX_FUNCTION uint32_t choose_bytes(uint32_t a, uint32_t b, uint32_t bytes) {
    uint32_t result;
#if defined(__CUDACC__)
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(bytes));
#else
    const uint64_t both = (uint64_t)b << 32 | a;
    result = 0;
    for (int i = 0; i < 4; i++)
        result |= (uint32_t)(both >> 8 * (bytes >> 4 * i & 7u) & 0xffu) << 8 * i;
#endif
    return result;
}

// Returns 2^x to about 2 units in the last place; denormals are flushed to 0. 2^-infinity = 0.
PTX_FUNCTION float exp2_approx(float x) {
#if defined(__CUDACC__)
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return emu_exp2(x);
#endif
}

// Returns 1 / x to 1 unit in the last place; denormals are flushed to 0. 1 / infinity = 0.
PTX_FUNCTION float reciprocal_approx(float x) {
#if defined(__CUDACC__)
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return emu_reciprocal(x);
#endif
}

#endif
