// The forward of a norm, a row on a GPU: for kernels that store the row (norm.cu) or cast it to FP8 (norm_fp8.cu).
#pragma once
#include "kernels/norm_rows.cuh" // row_packs, row_load, row_store, row_sums, row_weight
#include "kernels/random.cuh"    // struct dropout
#include <math.h>                // sqrtf, fmaf

#ifdef TARGET_CUDA

// Returns a + scale * dropout(b), rounded; the pack's first element is number `element` of the mask.
DEVICE_FUNCTION struct packed residual_pack(struct packed_floats a, const struct packed_floats &b, float scale,
                                            const struct dropout &dropout, int64_t element) {
    if (dropout.p == 0) {
#pragma unroll
        for (int i = 0; i < PACK; i++)
            a.x[i] = fmaf(scale, b.x[i], a.x[i]); // for scale 1 the bits of a + b
    } else {
        const struct packed_floats kept = dropout_scales_packed(dropout, (uint64_t)element);
#pragma unroll
        for (int i = 0; i < PACK; i++)
            a.x[i] = fmaf(scale * kept.x[i], b.x[i], a.x[i]);
    }
    return packed_from_floats(a);
}

enum { NORM_FORWARD_PLACES = 3 }; // slots of row_sums

// The arrays of norm_forward but `out`, as in norm.cuh. delta NULL: no residual is added.
struct norm_forward_arrays {
    floatX *sum; // NULL: not written
    float *mean, *rstd;
    const floatX *x, *delta, *weight, *bias;
};

// Computes row n of norm_forward or of residual_norm_forward, in one function, so that both have the same bits. All
// threads of the row call. Calls store(c, pack) for each of the thread's packs of out, at column c, if `stores`.
template <int THREADS, int PACKS, class STORE>
DEVICE_FUNCTION void norm_forward_row(const struct norm_forward_arrays &a, int64_t n, int C,
                                      const struct norm_options &options, float scale, const struct dropout &dropout,
                                      bool stores, STORE store) {
    const floatX *row = a.x + n * C;
    struct packed held[PACKS > 0 ? PACKS : 1], added[PACKS > 0 ? PACKS : 1];
    if (PACKS > 0)
        row_packs<THREADS, PACKS>(C, [&](int j, int c) { held[j] = row_load<PACKS>(row, c, C); });
    if (a.delta != NULL) {
        if (PACKS > 0)
            row_packs<THREADS, PACKS>(C, [&](int j, int c) { added[j] = row_load<PACKS>(a.delta + n * C, c, C); });
        row_packs<THREADS, PACKS>(C, [&](int j, int c) {
            const struct packed_floats b = row_pack<PACKS>(added, a.delta + n * C, j, c, C);
            held[j] = residual_pack(row_pack<PACKS>(held, row, j, c, C), b, scale, dropout, n * C + c);
            if (a.sum != NULL)
                row_store<PACKS>(a.sum + n * C, held[j], c, C);
        });
        if (PACKS == 0)
            row = a.sum + n * C; // which is not NULL then
    }

    float row_mean = 0, rest = 0, row_rstd;
    if (options.kind == NORM_LAYERNORM) {
        float total[1] = {0}, left[2] = {0, 0};
        row_packs<THREADS, PACKS>(C, [&](int j, int c) {
            const struct packed_floats v = row_pack<PACKS>(held, row, j, c, C); // 0 past the row's end
            float part = 0;
#pragma unroll
            for (int i = 0; i < PACK; i++)
                part += v.x[i];
            total[0] += part;
        });
        row_sums<THREADS>(total, 0);
        row_mean = total[0] / (float)C;
        row_packs<THREADS, PACKS>(C, [&](int j, int c) {
            const struct packed_floats v = row_pack<PACKS>(held, row, j, c, C);
            float part = 0, squares = 0;
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                const float difference = PACKS > 0 || c + i < C ? v.x[i] - row_mean : 0;
                part += difference;
                squares = fmaf(difference, difference, squares);
            }
            left[0] += part;
            left[1] += squares;
        });
        row_sums<THREADS>(left, 1);
        rest = left[0] / (float)C;
        row_rstd = 1.0f / sqrtf(left[1] / (float)C - rest * rest + options.epsilon);
    } else {
        float squares[1] = {0};
        row_packs<THREADS, PACKS>(
            C, [&](int j, int c) { squares[0] += pack_squares(row_pack<PACKS>(held, row, j, c, C)); });
        row_sums<THREADS>(squares, 0);
        row_rstd = 1.0f / sqrtf(squares[0] / (float)C + options.epsilon);
    }
    if (threadIdx.x % THREADS == 0) {
        if (a.mean != NULL)
            a.mean[n] = row_mean + rest;
        if (a.rstd != NULL)
            a.rstd[n] = row_rstd;
    }
    if (!stores)
        return;
    const float offset = norm_weight_offset(options.one_plus);
    row_packs<THREADS, PACKS>(C, [&](int j, int c) {
        struct packed_floats v = row_pack<PACKS>(held, row, j, c, C);
        const struct packed_floats w = row_weight<PACKS>(a.weight, offset, c, C);
#pragma unroll
        for (int i = 0; i < PACK; i++)
            v.x[i] = (v.x[i] - row_mean - rest) * row_rstd * w.x[i];
        if (a.bias != NULL) {
            const struct packed_floats b = packed_to_floats(row_load<PACKS>(a.bias, c, C));
#pragma unroll
            for (int i = 0; i < PACK; i++)
                v.x[i] += b.x[i];
        }
        store(c, packed_from_floats(v));
    });
}

#endif
