// QK-norm (Dehghani et al. 2023, arXiv 2302.05442): RMSNorm of queries and keys, before their rotary embedding, by learned
// weights, with statistics in fp32. Of each head by itself (Qwen 3, Gemma 3), or of all query heads of a token as one row
// and all its key heads as another (OLMo 2).
//
// Either way a token is a number of rows, one after the other: q's, k's, and the values', which pass unchanged. A row is
// a head or, in full width, all heads.
#pragma once
#include "kernels/device.cuh" // floatX
#include "kernels/norm.cuh"   // norm_some_rows; on the cuda target row_packs, row_sums, norm_reduce_kernel

struct qk_norm_shape {
    int H, Hkv, D; // heads of q, of k and of v, and their size: a multiple of 8 up to 256
    bool full_width;
    bool one_plus; // a weight is stored as its difference from 1, which is added in fp32
    float epsilon; // added to the mean square
};

// For each row x of q and k: out = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + epsilon).
static void qk_norm_forward(floatX *out,       // (N, (H + 2 Hkv) D); may be qkv
                            float *rstd,       // (N, H + Hkv), in full width (N, 2); NULL: not written
                            const floatX *qkv, // (N, (H + 2 Hkv) D)
                            const floatX *wq,  // (D), in full width (H D)
                            const floatX *wk,  // (D), in full width (Hkv D)
                            int64_t N, struct qk_norm_shape shape, struct device *dev);

// The gradient of qk_norm_forward: dqkv, that of out, becomes that of qkv; those of the weights are added to what they
// hold, in an order that depends on the sizes alone. With y = x * rstd and g = dout * weight:
//   dx = rstd * (g - y * mean(g * y));  dweight += sum over rows of dout * y
static size_t qk_norm_backward_workspace_bytes(int64_t N, struct qk_norm_shape shape);
static void qk_norm_backward(floatX *dqkv,      // (N, (H + 2 Hkv) D)
                             float *dwq,        // (D), in full width (H D)
                             float *dwk,        // (D), in full width (Hkv D)
                             const floatX *qkv, // (N, (H + 2 Hkv) D)
                             const floatX *wq,  // (D), in full width (H D)
                             const floatX *wk,  // (D), in full width (Hkv D)
                             const float *rstd, // (N, H + Hkv), in full width (N, 2)
                             int64_t N, struct qk_norm_shape shape, void *workspace, struct device *dev);

// A token's rows: q_rows of q_width elements, then k_rows of k_width, then as many of v.
struct qk_rows {
    int q_rows, k_rows, q_width, k_width;
    int width; // of a token
};
static inline struct qk_rows qk_rows_of(struct qk_norm_shape s) {
    const struct qk_rows heads = {s.H, s.Hkv, s.D, s.D, (s.H + 2 * s.Hkv) * s.D},
                         whole = {1, 1, s.H * s.D, s.Hkv * s.D, (s.H + 2 * s.Hkv) * s.D};
    return s.full_width ? whole : heads;
}

#ifdef TARGET_CUDA
#else

// The first `rows` rows of width C of a token, NORM_ROWS at a time.
ALWAYS_INLINE void qk_norm_rows(floatX *out, float *rstd, const floatX *x, const floatX *weight, int rows, int C,
                                struct norm_options options) {
    int r = 0;
    for (; r + NORM_ROWS <= rows; r += NORM_ROWS)
        norm_some_rows(out + r * C, NULL, rstd ? rstd + r : NULL, x + r * C, weight, NULL, C, options, NORM_ROWS);
    for (; r < rows; r++)
        norm_some_rows(out + r * C, NULL, rstd ? rstd + r : NULL, x + r * C, weight, NULL, C, options, 1);
}

static void qk_norm_forward(floatX *out, float *rstd, const floatX *qkv, const floatX *wq, const floatX *wk, int64_t N,
                            struct qk_norm_shape shape, struct device *dev) {
    const struct qk_rows rows = qk_rows_of(shape);
    const struct norm_options options = {NORM_RMSNORM, shape.one_plus, shape.epsilon};
    const int q = rows.q_rows * rows.q_width, k = rows.k_rows * rows.k_width;
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        const floatX *x = qkv + n * rows.width;
        floatX *y = out + n * rows.width;
        float *q_rstd = rstd ? rstd + n * (rows.q_rows + rows.k_rows) : NULL;
        qk_norm_rows(y, q_rstd, x, wq, rows.q_rows, rows.q_width, options);
        qk_norm_rows(y + q, rstd ? q_rstd + rows.q_rows : NULL, x + q, wk, rows.k_rows, rows.k_width, options);
        if (out != qkv)
            memcpy(y + q + k, x + q + k, (size_t)k * sizeof *y);
    }
}

// As in norm_backward, the tokens are cut into runs, each of which has sums of its own in the workspace.
static inline int64_t qk_norm_sum_columns(struct qk_rows rows) {
    return norm_sum_columns(rows.q_width) + norm_sum_columns(rows.k_width);
}
static size_t qk_norm_backward_workspace_bytes(int64_t N, struct qk_norm_shape shape) {
    return (size_t)(norm_backward_runs(N) * qk_norm_sum_columns(qk_rows_of(shape))) * sizeof(float);
}

// `count` <= NORM_ROWS rows of width C; dweight_sum += dout * y.
ALWAYS_INLINE void qk_norm_backward_some(floatX *d, float *dweight_sum, const floatX *x, const floatX *weight,
                                         const float *rstd, int C, bool one_plus, const int rows) {
    const vec offset = vec_set(norm_weight_offset(one_plus));
    vec gx_sum[NORM_ROWS];
    float gy_mean[NORM_ROWS];
    EACH_ROW gx_sum[r] = vec_set(0);
    for (int c = 0; c < C; c += LANES) {
        const vec w = row_vec_load(weight, c, C) + offset;
        EACH_ROW gx_sum[r] += row_vec_load(d + (int64_t)r * C, c, C) * w * row_vec_load(x + (int64_t)r * C, c, C);
    }
    EACH_ROW gy_mean[r] = vec_sum(gx_sum[r]) * rstd[r] / (float)C;
    for (int c = 0; c < C; c += LANES) {
        const vec w = row_vec_load(weight, c, C) + offset;
        vec dw = float_load(dweight_sum + c);
        EACH_ROW {
            const vec dout = row_vec_load(d + (int64_t)r * C, c, C),
                      y = row_vec_load(x + (int64_t)r * C, c, C) * rstd[r];
            dw += dout * y;
            row_vec_store(d + (int64_t)r * C, rstd[r] * (dout * w - y * gy_mean[r]), c, C);
        }
        float_store(dweight_sum + c, dw);
    }
}
ALWAYS_INLINE void qk_norm_backward_rows(floatX *d, float *dweight_sum, const floatX *x, const floatX *weight,
                                         const float *rstd, int rows, int C, bool one_plus) {
    int r = 0;
    for (; r + NORM_ROWS <= rows; r += NORM_ROWS)
        qk_norm_backward_some(d + r * C, dweight_sum, x + r * C, weight, rstd + r, C, one_plus, NORM_ROWS);
    for (; r < rows; r++)
        qk_norm_backward_some(d + r * C, dweight_sum, x + r * C, weight, rstd + r, C, one_plus, 1);
}

static void qk_norm_backward(floatX *dqkv, float *dwq, float *dwk, const floatX *qkv, const floatX *wq,
                             const floatX *wk, const float *rstd, int64_t N, struct qk_norm_shape shape,
                             void *workspace, struct device *dev) {
    const struct qk_rows rows = qk_rows_of(shape);
    const int64_t runs = norm_backward_runs(N), columns = qk_norm_sum_columns(rows),
                  q_columns = norm_sum_columns(rows.q_width);
    const int q = rows.q_rows * rows.q_width;
    float *sums = (float *)workspace; // (runs, columns)
#pragma omp parallel for schedule(static)
    for (int64_t run = 0; run < runs; run++) {
        float *run_sums = sums + run * columns;
        memset(run_sums, 0, (size_t)columns * sizeof *run_sums);
        for (int64_t n = run * N / runs; n < (run + 1) * N / runs; n++) {
            floatX *d = dqkv + n * rows.width;
            const floatX *x = qkv + n * rows.width;
            const float *q_rstd = rstd + n * (rows.q_rows + rows.k_rows);
            qk_norm_backward_rows(d, run_sums, x, wq, q_rstd, rows.q_rows, rows.q_width, shape.one_plus);
            qk_norm_backward_rows(d + q, run_sums + q_columns, x + q, wk, q_rstd + rows.q_rows, rows.k_rows,
                                  rows.k_width, shape.one_plus);
        }
    }
    norm_add_runs(dwq, sums, runs, columns, rows.q_width);
    norm_add_runs(dwk, sums + q_columns, runs, columns, rows.k_width);
}

#endif
