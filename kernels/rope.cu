#include "kernels/rope.cuh"
#include "kernels/amax.cuh"           // amax_merge_rows, amax_merge_warp
#include "kernels/packed.cuh"         // packed_load_some
#include "kernels/packed_floats.cuh"  // floats_load_some
#include "kernels/positions.cuh"      // token_position
#include "kernels/rope_table.cuh"     // rope_table
#include "kernels/vectors_floatx.cuh" // row_vec_load, float_load

// Rotates q's and k's heads in place. direction: 1, or -1 for negative angles. Merges qkv's amax unless amax is NULL.
static void rope_rotate_all(floatX *qkv, const float *table, struct token_positions positions, int B, int T, int H,
                            int Hkv, int D, float direction, uint32_t *amax, struct device *dev);

#ifdef TARGET_CUDA

// A thread rotates one pack (16 bytes) of pairs in ROPE_HEADS heads of a token: it reads the table, which takes twice
// the bytes of a pair in bf16, once for them all, and has all their packs under way at a time.
enum { ROPE_THREADS = 128, ROPE_HEADS = 4 };

template <bool WHOLE> DEVICE_FUNCTION void rope_store(floatX *to, const struct packed &x, int count) {
    if (WHOLE)
        packed_store(to, x);
    else
        packed_store_some(to, x, count);
}
// Rotates this thread's pairs: one pack of pairs in each of ROPE_HEADS heads of one of `rows` tokens. Of a token's
// row_heads heads the first `heads` are rotated. WHOLE: PACK divides D/2, and the arrays are aligned to 16 bytes. With
// AMAX returns the largest fp8_magnitude that was stored, or read of v; else 0.
template <bool WHOLE, bool AMAX>
DEVICE_FUNCTION uint32_t rope_rotate_packs(floatX *qkv, const float *table, struct token_positions positions,
                                           int64_t rows, int T, int row_heads, int heads, int D, float direction) {
    const int half = D / 2, visited = AMAX ? row_heads : heads;
    const unsigned packs = (unsigned)((half + PACK - 1) / PACK),
                   groups = (unsigned)((visited + ROPE_HEADS - 1) / ROPE_HEADS);
    const int64_t at = (int64_t)blockIdx.x * ROPE_THREADS + threadIdx.x, row = at / (packs * groups);
    uint32_t largest = 0;
    if (row >= rows)
        return 0;
    const unsigned in_row = (unsigned)(at - row * (packs * groups));
    const int i = (int)(in_row % packs) * PACK, first_head = (int)(in_row / packs) * ROPE_HEADS, count = half - i;
    floatX *first = qkv + (row * row_heads + first_head) * D + i;
    const float *angles = table + token_position(positions, row, T) * D + i;

    struct packed a[ROPE_HEADS], b[ROPE_HEADS];
#pragma unroll
    for (int h = 0; h < ROPE_HEADS; h++)
        if (first_head + h < visited) {
            const floatX *from = first + (int64_t)h * D;
            a[h] = WHOLE ? packed_load(from) : packed_load_some(from, count);
            b[h] = WHOLE ? packed_load(from + half) : packed_load_some(from + half, count);
        }
    const struct packed_floats cosine = WHOLE ? floats_load(angles) : floats_load_some(angles, count);
    struct packed_floats sine = WHOLE ? floats_load(angles + half) : floats_load_some(angles + half, count);
#pragma unroll
    for (int k = 0; k < PACK; k++)
        sine.x[k] *= direction;
#pragma unroll
    for (int h = 0; h < ROPE_HEADS; h++)
        if (first_head + h < heads) {
            struct packed_floats x = packed_to_floats(a[h]), y = packed_to_floats(b[h]);
#pragma unroll
            for (int k = 0; k < PACK; k++)
                rope_rotate_pair(x.x[k], y.x[k], cosine.x[k], sine.x[k]);
            const struct packed low = packed_from_floats(x), high = packed_from_floats(y);
            floatX *to = first + (int64_t)h * D;
            rope_store<WHOLE>(to, low, count);
            rope_store<WHOLE>(to + half, high, count);
            if (AMAX)
                largest = amax_with_packed(amax_with_packed(largest, low, count), high, count);
        } else if (AMAX && first_head + h < visited)
            largest = amax_with_packed(amax_with_packed(largest, a[h], count), b[h], count);
    return largest;
}
template <bool WHOLE, bool AMAX>
static __global__ void __launch_bounds__(ROPE_THREADS)
    rope_kernel(floatX *qkv, const float *table, struct token_positions positions, int64_t rows, int T, int row_heads,
                int heads, int D, float direction, uint32_t *amax) {
    const uint32_t largest =
        rope_rotate_packs<WHOLE, AMAX>(qkv, table, positions, rows, T, row_heads, heads, D, direction);
    if (AMAX)
        amax_merge_warp(amax, largest);
}

static void rope_rotate_all(floatX *qkv, const float *table, struct token_positions positions, int B, int T, int H,
                            int Hkv, int D, float direction, uint32_t *amax, struct device *dev) {
    const int64_t rows = (int64_t)B * T;
    const int heads = H + Hkv, row_heads = H + 2 * Hkv;
    const int64_t threads = rows * blocks_for(amax ? row_heads : heads, ROPE_HEADS) * blocks_for(D / 2, PACK);
    const bool whole = D % (2 * PACK) == 0 && (uintptr_t)qkv % 16 == 0 && (uintptr_t)table % 16 == 0;
    LAUNCH(dev,
           (amax ? (whole ? rope_kernel<true, true> : rope_kernel<false, true>)
                 : (whole ? rope_kernel<true, false> : rope_kernel<false, false>)),
           blocks_for(threads, ROPE_THREADS), ROPE_THREADS, 0, qkv, table, positions, rows, T, row_heads, heads, D,
           direction, amax);
}

#else

void rope_rotate(floatX *token, const float *table_row, int heads, int D, float direction) {
    const int half = D / 2;
    for (int i = 0; i < half; i += LANES) {
        const bool whole = half - i >= LANES;
        const vec cosine = whole ? float_load(table_row + i) : float_load_some(table_row + i, half - i);
        const vec sine = whole ? float_load(table_row + half + i) : float_load_some(table_row + half + i, half - i);
        const vec s = direction * sine;
        for (int h = 0; h < heads; h++) {
            floatX *a = token + (int64_t)h * D, *b = a + half;
            const vec x = row_vec_load(a, i, half), y = row_vec_load(b, i, half);
            row_vec_store(a, x * cosine - y * s, i, half);
            row_vec_store(b, y * cosine + x * s, i, half);
        }
    }
}
static void rope_rotate_all(floatX *qkv, const float *table, struct token_positions positions, int B, int T, int H,
                            int Hkv, int D, float direction, uint32_t *amax, struct device *dev) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < (int64_t)B * T; row++) {
        floatX *token = qkv + row * (H + 2 * Hkv) * D;
        rope_rotate(token, table + token_position(positions, row, T) * D, H + Hkv, D, direction);
        amax_merge_rows(amax, token, 0, 1, (int64_t)(H + 2 * Hkv) * D);
    }
}

#endif

void rope_forward(floatX *qkv, const float *table, struct token_positions positions, int B, int T, int H, int Hkv,
                  int D, struct device *dev) {
    rope_rotate_all(qkv, table, positions, B, T, H, Hkv, D, 1.0f, NULL, dev);
}

void rope_backward(floatX *dqkv, const float *table, struct token_positions positions, int B, int T, int H, int Hkv,
                   int D, uint32_t *amax, struct device *dev) {
    rope_rotate_all(dqkv, table, positions, B, T, H, Hkv, D, -1.0f, amax, dev);
}
