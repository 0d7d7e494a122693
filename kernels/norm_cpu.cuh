// The cpu target's norms and residual additions (kernels/norm.cuh has their prototypes): rows by SIMD vectors.
#pragma once
#include "kernels/amax.cuh"           // amax_merge_elements
#include "kernels/device.cuh"         // floatX
#include "kernels/gpu_sizes.cuh"      // gpu_norm_backward_num_runs
#include "kernels/norm_kind.cuh"      // struct norm_options, norm_weight_offset
#include "kernels/norm_rows.cuh"      // NORM_ROWS, norm_add_runs
#include "kernels/random.cuh"         // struct dropout, dropout_scales
#include "kernels/vectors_floatx.cuh" // row_vec_load, vec_sum_in_order
#include <math.h>                     // fmaf, sqrtf

struct norm_statistics {
    float mean, mean_rest, rstd; // the mean is mean + mean_rest
};

// Computes the statistics s (rows) of x (rows, C), rows <= NORM_ROWS; the means are 0.
ALWAYS_INLINE void rmsnorm_statistics(struct norm_statistics s[NORM_ROWS], const floatX *x, int C, float eps,
                                      const int rows) {
    vec squares[NORM_ROWS];
    EACH_ROW squares[r] = vec_set(0);
    for (int c = 0; c < C; c += LANES)
        EACH_ROW {
            const vec v = row_vec_load(x + (int64_t)r * C, c, C);
            if (rows > 1)
                __builtin_prefetch(x + (int64_t)(rows + r) * C + c);
            squares[r] += v * v;
        }
    EACH_ROW {
        s[r].mean = s[r].mean_rest = 0;
        s[r].rstd = 1.0f / sqrtf(vec_sum_in_order(squares[r]) / (float)C + eps);
    }
}

// Computes the statistics s (rows) of x (rows, C), rows <= NORM_ROWS (Chan, Golub, LeVeque 1983, eq. 1.7).
ALWAYS_INLINE void layernorm_statistics(struct norm_statistics s[NORM_ROWS], const floatX *x, int C, float eps,
                                        const int rows) {
    vec sum[NORM_ROWS], rest[NORM_ROWS], squares[NORM_ROWS];
    EACH_ROW sum[r] = rest[r] = squares[r] = vec_set(0);
    for (int c = 0; c < C; c += LANES)
        EACH_ROW {
            if (rows > 1)
                __builtin_prefetch(x + (int64_t)(rows + r) * C + c);
            sum[r] += row_vec_load(x + (int64_t)r * C, c, C);
        }
    EACH_ROW s[r].mean = vec_sum_in_order(sum[r]) / (float)C;
    for (int c = 0; c < C; c += LANES)
        EACH_ROW {
            const vec difference = row_vec_within(row_vec_load(x + (int64_t)r * C, c, C) - s[r].mean, c, C);
            rest[r] += difference;
            squares[r] += difference * difference;
        }
    EACH_ROW {
        s[r].mean_rest = vec_sum_in_order(rest[r]) / (float)C;
        s[r].rstd = 1.0f / sqrtf(vec_sum_in_order(squares[r]) / (float)C - s[r].mean_rest * s[r].mean_rest + eps);
    }
}

// Computes norm_forward of `rows` <= NORM_ROWS rows, without the amax. Each of out, mean and rstd may be NULL.
ALWAYS_INLINE void norm_some_rows(floatX *out, float *mean, float *rstd, const floatX *x, const floatX *weight,
                                  const floatX *bias, int C, struct norm_options options, const int rows) {
    struct norm_statistics s[NORM_ROWS];
    if (options.kind == NORM_LAYERNORM)
        layernorm_statistics(s, x, C, options.epsilon, rows);
    else
        rmsnorm_statistics(s, x, C, options.epsilon, rows);
    EACH_ROW {
        if (mean != NULL)
            mean[r] = s[r].mean + s[r].mean_rest;
        if (rstd != NULL)
            rstd[r] = s[r].rstd;
    }
    if (out == NULL)
        return;
    const vec offset = vec_set(norm_weight_offset(options.one_plus));
    for (int c = 0; c < C; c += LANES) {
        const vec w = row_vec_load(weight, c, C) + offset;
        vec y[NORM_ROWS];
        EACH_ROW y[r] = (row_vec_load(x + (int64_t)r * C, c, C) - s[r].mean - s[r].mean_rest) * s[r].rstd;
        if (bias != NULL) {
            const vec b = row_vec_load(bias, c, C);
            EACH_ROW y[r] = y[r] * w + b;
        } else
            EACH_ROW y[r] = y[r] * w;
        EACH_ROW {
            if (rows > 1)
                __builtin_prefetch(out + (int64_t)(rows + r) * C + c, 1);
            row_vec_store(out + (int64_t)r * C, y[r], c, C);
        }
    }
}

// Rows that norm_forward takes at a time. In fp32, without conversions, one row is as fast, and one long stream.
enum { NORM_FORWARD_ROWS = sizeof(floatX) == 2 ? NORM_ROWS : 1 };

// Computes norm_forward of rows n to end - 1 of the arrays, NORM_FORWARD_ROWS at most, without the amax. Not inlined:
// residual_norm_forward must give the same bits, and so runs the same code.
__attribute__((noinline)) static void norm_rows(floatX *out, float *mean, float *rstd, const floatX *x,
                                                const floatX *weight, const floatX *bias, int64_t n, int64_t end, int C,
                                                struct norm_options options) {
    if (end - n == NORM_FORWARD_ROWS)
        norm_some_rows(out ? out + n * C : NULL, mean ? mean + n : NULL, rstd ? rstd + n : NULL, x + n * C, weight,
                       bias, C, options, NORM_FORWARD_ROWS);
    else
        for (; n < end; n++)
            norm_some_rows(out ? out + n * C : NULL, mean ? mean + n : NULL, rstd ? rstd + n : NULL, x + n * C, weight,
                           bias, C, options, 1);
}

void norm_forward(floatX *out, float *mean, float *rstd, const floatX *x, const floatX *weight, const floatX *bias,
                  int64_t N, int C, struct norm_options options, struct device *dev) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n += NORM_FORWARD_ROWS) {
        const int64_t end = N - n < NORM_FORWARD_ROWS ? N : n + NORM_FORWARD_ROWS;
        norm_rows(out, mean, rstd, x, weight, bias, n, end, C, options);
        if (out != NULL)
            amax_merge_elements(options.amax, out + n * C, (end - n) * C);
    }
}

int64_t norm_backward_num_runs(int64_t N, int C, const struct device *dev) {
    return device_is_gpu(dev) ? gpu_norm_backward_num_runs(N, C) : norm_backward_cpu_runs(N);
}
size_t norm_backward_workspace_bytes(int64_t N, int C, const struct device *dev) {
    if (device_is_gpu(dev))
        return gpu_norm_backward_bytes(N, C);
    return (size_t)(norm_backward_cpu_runs(N) * 2 * norm_padded_columns(C)) * sizeof(float);
}

// sums[c] += the sum over the rows of x (rows, C), which the nearest cache still holds. Does nothing if sums is NULL.
static inline void norm_add_columns(float *sums, const floatX *x, int64_t rows, int C) {
    for (int64_t r = 0; r < rows && sums != NULL; r++) {
#pragma omp simd
        for (int c = 0; c < C; c++)
            sums[c] += to_float(x[r * C + c]);
    }
}

// Does norm_backward for `rows` <= NORM_ROWS rows, without amax and dx_partial. Adds dout * y to dweight_sum and dout
// to dbias_sum, which have norm_padded_columns(C) floats each. A NULL residual is 0.
ALWAYS_INLINE void norm_backward_rows(floatX *dx, float *dweight_sum, float *dbias_sum, const floatX *residual,
                                      const floatX *dout, const floatX *x, const floatX *weight, const float *mean,
                                      const float *rstd, int C, struct norm_options options, const int rows) {
    const vec offset = vec_set(norm_weight_offset(options.one_plus));
    vec g_sum[NORM_ROWS], gy_sum[NORM_ROWS], y_sum[NORM_ROWS];
    float row_mean[NORM_ROWS], g_mean[NORM_ROWS], gy_mean[NORM_ROWS], y_mean[NORM_ROWS];
    EACH_ROW {
        row_mean[r] = options.kind == NORM_LAYERNORM ? mean[r] : 0;
        g_sum[r] = gy_sum[r] = y_sum[r] = vec_set(0);
    }
    for (int c = 0; c < C; c += LANES) {
        const vec w = row_vec_load(weight, c, C) + offset;
        EACH_ROW {
            __builtin_prefetch(x + (int64_t)(rows + r) * C + c);
            __builtin_prefetch(dout + (int64_t)(rows + r) * C + c);
            const vec g = row_vec_load(dout + (int64_t)r * C, c, C) * w;
            const vec y = row_vec_within((row_vec_load(x + (int64_t)r * C, c, C) - row_mean[r]) * rstd[r], c, C);
            g_sum[r] += g;
            gy_sum[r] += g * y;
            y_sum[r] += y;
        }
    }
    EACH_ROW {
        g_mean[r] = options.kind == NORM_LAYERNORM ? vec_sum_in_order(g_sum[r]) / (float)C : 0;
        y_mean[r] = options.kind == NORM_LAYERNORM ? vec_sum_in_order(y_sum[r]) / (float)C : 0;
        // y_mean is 0 but for the rounding of `mean`
        gy_mean[r] = fmaf(-g_mean[r], y_mean[r], vec_sum_in_order(gy_sum[r]) / (float)C);
    }
    for (int c = 0; c < C; c += LANES) {
        const vec w = row_vec_load(weight, c, C) + offset;
        vec dw = float_load(dweight_sum + c), db = float_load(dbias_sum + c);
        EACH_ROW {
            __builtin_prefetch(dx + (int64_t)(rows + r) * C + c, 1);
            const vec d = row_vec_load(dout + (int64_t)r * C, c, C);
            const vec y = (row_vec_load(x + (int64_t)r * C, c, C) - row_mean[r]) * rstd[r] - y_mean[r];
            dw += d * y;
            db += d;
            const vec before = residual ? row_vec_load(residual + (int64_t)r * C, c, C) : vec_set(0);
            row_vec_store(dx + (int64_t)r * C, before + rstd[r] * (d * w - g_mean[r] - y * gy_mean[r]), c, C);
        }
        float_store(dweight_sum + c, dw);
        float_store(dbias_sum + c, db);
    }
}

void norm_backward(floatX *dx, float *dx_partial, float *dweight, float *dbias, const floatX *residual,
                   const floatX *dout, const floatX *x, const floatX *weight, const float *mean, const float *rstd,
                   int64_t N, int C, bool add, struct norm_options options, void *workspace, struct device *dev) {
    const int64_t runs = norm_backward_cpu_runs(N), columns = norm_padded_columns(C);
    float *sums = (float *)workspace; // (runs, 2, columns)
#pragma omp parallel for schedule(static)
    for (int64_t run = 0; run < runs; run++) {
        float *dweight_sum = sums + run * 2 * columns, *dbias_sum = dweight_sum + columns;
        float *dx_sum = dx_partial ? dx_partial + run * C : NULL;
        memset(dweight_sum, 0, 2 * (size_t)columns * sizeof(float));
        if (dx_sum != NULL)
            memset(dx_sum, 0, (size_t)C * sizeof(float));
        const int64_t end = (run + 1) * N / runs;
        int64_t rows;
        for (int64_t n = run * N / runs; n < end; n += rows) {
            const floatX *to_add = residual ? residual + n * C : NULL;
            rows = end - n >= NORM_ROWS ? NORM_ROWS : 1;
            if (rows == NORM_ROWS)
                norm_backward_rows(dx + n * C, dweight_sum, dbias_sum, to_add, dout + n * C, x + n * C, weight,
                                   mean + n, rstd + n, C, options, NORM_ROWS);
            else
                norm_backward_rows(dx + n * C, dweight_sum, dbias_sum, to_add, dout + n * C, x + n * C, weight,
                                   mean + n, rstd + n, C, options, 1);
            amax_merge_elements(options.amax, dx + n * C, rows * C);
            norm_add_columns(dx_sum, dx + n * C, rows, C);
        }
    }
    norm_add_runs(dweight, sums, runs, 2 * columns, C, add);
    norm_add_runs(dbias, sums + columns, runs, 2 * columns, C, add);
}

// Elements that a thread takes at a time in ops without rows, and whose dropout scales are made at a time.
enum { ELEMENTS_AT_A_TIME = 1024 };

// sum[i] = x[i] + scale * dropout(delta[i]), from the mask's element `first` on. Not inlined, so that bits are equal.
__attribute__((noinline)) static void residual_elements(floatX *sum, const floatX *x, const floatX *delta,
                                                        int64_t first, int64_t count, float scale,
                                                        struct dropout dropout) {
    if (dropout.p == 0) {
#pragma omp simd
        for (int64_t i = 0; i < count; i++)
            sum[i] = to_floatX(to_float(x[i]) + scale * to_float(delta[i]));
        return;
    }
    for (int64_t begin = 0; begin < count; begin += ELEMENTS_AT_A_TIME) {
        const int part = count - begin < ELEMENTS_AT_A_TIME ? (int)(count - begin) : (int)ELEMENTS_AT_A_TIME;
        const floatX *a = x + begin, *b = delta + begin;
        floatX *to = sum + begin;
        float scales[ELEMENTS_AT_A_TIME];
        dropout_scales(scales, dropout, (uint64_t)(first + begin), part);
#pragma omp simd
        for (int i = 0; i < part; i++)
            to[i] = to_floatX(to_float(a[i]) + scale * scales[i] * to_float(b[i]));
    }
}

void residual_forward(floatX *sum, const floatX *x, const floatX *delta, int64_t N, int C, float scale,
                      struct dropout dropout, struct device *dev) {
    const int64_t n = N * C;
#pragma omp parallel for schedule(static)
    for (int64_t begin = 0; begin < n; begin += ELEMENTS_AT_A_TIME)
        residual_elements(sum + begin, x + begin, delta + begin, begin,
                          n - begin < ELEMENTS_AT_A_TIME ? n - begin : (int64_t)ELEMENTS_AT_A_TIME, scale, dropout);
}

void residual_norm_forward(floatX *sum, floatX *out, float *mean, float *rstd, const floatX *x, const floatX *delta,
                           const floatX *weight, const floatX *bias, int64_t N, int C, struct norm_options options,
                           float scale, struct dropout dropout, struct device *dev) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n += NORM_FORWARD_ROWS) {
        const int64_t end = N - n < NORM_FORWARD_ROWS ? N : n + NORM_FORWARD_ROWS;
        residual_elements(sum + n * C, x + n * C, delta + n * C, n * C, (end - n) * C, scale, dropout);
        norm_rows(out, mean, rstd, sum, weight, bias, n, end, C, options);
        if (out != NULL)
            amax_merge_elements(options.amax, out + n * C, (end - n) * C);
    }
}

// ddelta[i] = dout[i] times scale and dropout scales, from the mask's element `first` on. Not inlined, for equal bits.
__attribute__((noinline)) static void residual_backward_elements(floatX *ddelta, const floatX *dout, int64_t first,
                                                                 int64_t count, float scale, struct dropout dropout) {
    for (int64_t begin = 0; begin < count; begin += ELEMENTS_AT_A_TIME) {
        const int part = count - begin < ELEMENTS_AT_A_TIME ? (int)(count - begin) : (int)ELEMENTS_AT_A_TIME;
        const floatX *from = dout + begin;
        floatX *to = ddelta + begin;
        float scales[ELEMENTS_AT_A_TIME];
        if (dropout.p == 0) {
#pragma omp simd
            for (int i = 0; i < part; i++)
                to[i] = to_floatX(scale * to_float(from[i]));
            continue;
        }
        dropout_scales(scales, dropout, (uint64_t)(first + begin), part);
#pragma omp simd
        for (int i = 0; i < part; i++)
            to[i] = to_floatX(scale * scales[i] * to_float(from[i]));
    }
}

int64_t residual_backward_num_runs(int64_t N, int C, const struct device *dev) {
    return device_is_gpu(dev) ? gpu_residual_backward_num_runs(N, C) : norm_backward_cpu_runs(N);
}
void residual_backward(floatX *ddelta, float *partial, const floatX *dout, int64_t N, int C, float scale,
                       struct dropout dropout, struct device *dev) {
    const int64_t n = N * C, runs = norm_backward_cpu_runs(N);
    const bool copies = dropout.p == 0 && scale == 1;
    if (copies && ddelta != dout)
        memcpy(ddelta, dout, (size_t)n * sizeof *ddelta);
    if (!copies && partial == NULL) {
#pragma omp parallel for schedule(static)
        for (int64_t begin = 0; begin < n; begin += ELEMENTS_AT_A_TIME)
            residual_backward_elements(ddelta + begin, dout + begin, begin,
                                       n - begin < ELEMENTS_AT_A_TIME ? n - begin : (int64_t)ELEMENTS_AT_A_TIME, scale,
                                       dropout);
    }
    if (partial == NULL)
        return;
#pragma omp parallel for schedule(static)
    for (int64_t run = 0; run < runs; run++) {
        memset(partial + run * C, 0, (size_t)C * sizeof *partial);
        for (int64_t at = run * N / runs; at < (run + 1) * N / runs; at++) {
            if (!copies)
                residual_backward_elements(ddelta + at * C, dout + at * C, at * C, C, scale, dropout);
            norm_add_columns(partial + run * C, ddelta + at * C, 1, C);
        }
    }
}
