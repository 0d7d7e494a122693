#include "kernels/qk_norm.cuh"
#include "kernels/gpu_sizes.cuh" // gpu_qk_norm_backward_bytes
#include "kernels/norm_rows.cuh" // NORM_ROWS, norm_add_runs; on the cuda target row_packs, row_sums, norm_reduce_kernel
#include <math.h>                // sqrtf
#include "kernels/packed.cuh"    // packed_store_unsplit
#include "kernels/rope.cuh"      // rope_rotate; on the cuda target rope_rotate_one

#ifdef TARGET_CUDA

// A row is the work of THREADS neighboring lanes where they hold it in QK_PACKS packs each, and of a block otherwise.
// With two packs the index arithmetic and the lanes' sum are shared by twice the bytes.
enum { QK_PACKS = 2 };

// Calls LAUNCH_ROWS(threads, packs) for rows of up to `longest` elements. `whole`: norm_rows_whole of the rows' arrays.
#define QK_ROWS_DISPATCH(LAUNCH_ROWS, longest, whole)                                                                  \
    do {                                                                                                               \
        const int packs_ = blocks_for(longest, PACK);                                                                  \
        if (!(whole) || packs_ > 8 * NORM_THREADS)                                                                     \
            LAUNCH_ROWS(NORM_THREADS, 0);                                                                              \
        else if (packs_ <= QK_PACKS * 4)                                                                               \
            LAUNCH_ROWS(4, QK_PACKS);                                                                                  \
        else if (packs_ <= QK_PACKS * 8)                                                                               \
            LAUNCH_ROWS(8, QK_PACKS);                                                                                  \
        else if (packs_ <= QK_PACKS * 16)                                                                              \
            LAUNCH_ROWS(16, QK_PACKS);                                                                                 \
        else if (packs_ <= QK_PACKS * 32)                                                                              \
            LAUNCH_ROWS(32, QK_PACKS);                                                                                 \
        else if (packs_ <= 2 * NORM_THREADS)                                                                           \
            LAUNCH_ROWS(NORM_THREADS, 2);                                                                              \
        else if (packs_ <= 4 * NORM_THREADS)                                                                           \
            LAUNCH_ROWS(NORM_THREADS, 4);                                                                              \
        else                                                                                                           \
            LAUNCH_ROWS(NORM_THREADS, 8);                                                                              \
    } while (0)
static inline int qk_longest_row(struct qk_rows rows) {
    return rows.q_width > rows.k_width ? rows.q_width : rows.k_width;
}

// Does row_store, by packed_store_unsplit where PACKS is 1 to 7. With 8, packed_store_unsplit takes too many registers.
template <int PACKS> DEVICE_FUNCTION void qk_row_store(floatX *row, const struct packed &value, int c, int C) {
    if (PACKS > 0 && PACKS < 8)
        packed_store_unsplit(row + c, value);
    else
        row_store<PACKS>(row, value, c, C);
}

// Forward's shared memory: QK_STAGED bytes of a block's partial sums, then, where rows are rotated, the block's rows.
enum { QK_STAGED = NORM_THREADS / 32 * sizeof(float) };

struct qk_four {
    float x[4];
};
// Loads four cosines or four sines of a table; `from` is aligned to 16 bytes.
DEVICE_FUNCTION struct qk_four qk_load_angles(const float *from) {
    struct qk_four result;
    packed_check(from, false);
    const uint4 words = *(const uint4 *)from;
    memcpy(&result, &words, sizeof result);
    return result;
}
DEVICE_FUNCTION void qk_store_shared_pack(uint32_t to, const struct packed &x) {
    struct float_x4 words;
    memcpy(&words, &x, sizeof words);
    store_shared_floats(to, words);
}
// Loads four elements from shared memory; `from` is aligned to their size together.
DEVICE_FUNCTION void qk_load_shared_four(floatX x[4], uint32_t from) {
    struct word_x4 words;
    if (sizeof *x == 2) {
        const uint64_t pairs = load_shared_long(from);
        memcpy(&words, &pairs, sizeof pairs);
    } else
        words = load_shared_words(from);
    memcpy(x, &words, 4 * sizeof *x);
}

// Rotates row x (C, heads of D) in place by angles (D), after the block's stores to x and a barrier. All threads call.
DEVICE_FUNCTION void qk_rotate_stored(floatX *x, const float *angles, int C, int D) {
    const int half = D / 2;
    for (int pair = threadIdx.x; pair < C / 2; pair += NORM_THREADS) {
        const int i = pair % half;
        floatX *to = x + (pair - i) * 2 + i;
        float a = to_float(to[0]), b = to_float(to[half]);
        rope_rotate_pair(a, b, angles[i], angles[half + i]);
        to[0] = to_floatX(a);
        to[half] = to_floatX(b);
    }
}
// Returns `value`, the pack at column c of a row of heads of D, rotated by angles (D). Partners come from the row's
// whole copy at `row` in shared memory. D is a multiple of 8, so that each aligned four lie in one half of a head.
DEVICE_FUNCTION struct packed qk_rotate_pack(const struct packed &value, uint32_t row, const float *angles, int c,
                                             int D) {
    const int half = D / 2, head_c = c < D ? c : (int)((unsigned)c % (unsigned)D);
    struct packed_floats x = packed_to_floats(value);
#pragma unroll
    for (int i = 0; i < PACK; i += 4) {
        const bool second = head_c + i >= half;
        const int pair = second ? head_c + i - half : head_c + i;
        const struct qk_four cosine = qk_load_angles(angles + pair), sine = qk_load_angles(angles + half + pair);
        floatX partner[4];
        qk_load_shared_four(partner, row + (uint32_t)(second ? c + i - half : c + i + half) * (uint32_t)sizeof(floatX));
#pragma unroll
        for (int k = 0; k < 4; k++)
            x.x[i + k] =
                rope_rotate_one(x.x[i + k], to_float(partner[k]), cosine.x[k], second ? sine.x[k] : -sine.x[k]);
    }
    return packed_from_floats(x);
}

// Does qk_norm_forward. A thread past the last row takes an empty row, as the sums of its warp's rows need all lanes.
template <int THREADS, int PACKS>
static __global__ void __launch_bounds__(NORM_THREADS)
    qk_norm_forward_kernel(floatX *out, float *rstd, const floatX *qkv, const floatX *wq, const floatX *wk, int64_t N,
                           struct qk_rows rows, float offset, float epsilon, struct qk_norm_rotary rotary, int D) {
    const int normed_rows = rows.q_rows + rows.k_rows, token_rows = normed_rows + rows.k_rows;
    // 32 bits, whose division takes half the instructions, number the rows of any batch that fits a GPU
    const unsigned at = blockIdx.x * (NORM_THREADS / THREADS) + threadIdx.x / THREADS,
                   token = at / (unsigned)token_rows;
    const int64_t n = token;
    const int row = (int)(at - token * (unsigned)token_rows);
    const bool is_q = row < rows.q_rows;
    const int width = is_q ? rows.q_width : rows.k_width, C = n < N ? width : 0;
    const int64_t first =
        n * rows.width + (int64_t)row * width + (is_q ? 0 : rows.q_rows * (int64_t)(rows.q_width - rows.k_width));
    const floatX *x = qkv + first, *weight = is_q ? wq : wk;
    struct packed held[PACKS > 0 ? PACKS : 1];
    float squares[1] = {0};
    row_packs<THREADS, PACKS>(C, [&](int j, int c) {
        held[PACKS > 0 ? j : 0] = row_load<PACKS>(x, c, C);
        squares[0] += pack_squares(packed_to_floats(held[PACKS > 0 ? j : 0])); // 0 past the row's end
    });
    row_sums<THREADS>(squares, 0);
    const float row_rstd = 1.0f / sqrtf(squares[0] / (float)width + epsilon);
    const bool normed = row < normed_rows;
    const uint32_t staged = shared_memory() + QK_STAGED + threadIdx.x / THREADS * (uint32_t)(THREADS * PACKS * 16);
    if (threadIdx.x % THREADS == 0 && normed && n < N && rstd != NULL)
        rstd[n * normed_rows + row] = row_rstd;
    row_packs<THREADS, PACKS>(C, [&](int j, int c) {
        struct packed value = PACKS > 0 ? held[j] : row_load<PACKS>(x, c, C);
        if (normed) {
            struct packed_floats v = packed_to_floats(value);
            const struct packed_floats w = row_weight<PACKS>(weight, offset, c, C);
#pragma unroll
            for (int i = 0; i < PACK; i++)
                v.x[i] = v.x[i] * row_rstd * w.x[i];
            value = packed_from_floats(v);
        }
        held[PACKS > 0 ? j : 0] = value;
        if (PACKS == 0 || !normed || rotary.table == NULL)
            qk_row_store<PACKS>(out + first, value, c, C);
        else
            qk_store_shared_pack(staged + (uint32_t)c * (uint32_t)sizeof(floatX), value);
    });
    if (rotary.table == NULL)
        return;
    if (THREADS > 32)
        __syncthreads();
    else
        __syncwarp();
    if (!normed || n >= N)
        return;
    const float *angles = rotary.table + token_position(rotary.positions, n, rotary.T) * D;
    if (PACKS > 0)
        row_packs<THREADS, PACKS>(C, [&](int j, int c) {
            qk_row_store<PACKS>(out + first, qk_rotate_pack(held[j], staged, angles, c, D), c, C);
        });
    else
        qk_rotate_stored(out + first, angles, C, D);
}

void qk_norm_forward(floatX *out, float *rstd, const floatX *qkv, const floatX *wq, const floatX *wk, int64_t N,
                     struct qk_norm_shape shape, struct qk_norm_rotary rotary, struct device *dev) {
    const struct qk_rows rows = qk_rows_of(shape);
    const void *arrays[] = {out, qkv, wq, wk, rotary.table};
    const float offset = norm_weight_offset(shape.one_plus);
#define QK_FORWARD(threads, packs)                                                                                     \
    LAUNCH(dev, (qk_norm_forward_kernel<threads, packs>),                                                              \
           blocks_for(N *(rows.q_rows + 2 * rows.k_rows), NORM_THREADS / threads), NORM_THREADS,                       \
           QK_STAGED + (rotary.table != NULL ? NORM_THREADS * packs * 16 : 0), out, rstd, qkv, wq, wk, N, rows,        \
           offset, shape.epsilon, rotary, shape.D)
    QK_ROWS_DISPATCH(QK_FORWARD, qk_longest_row(rows), norm_rows_whole(shape.D, arrays, 5));
#undef QK_FORWARD
}

size_t qk_norm_backward_workspace_bytes(int64_t N, struct qk_norm_shape shape, const struct device *dev) {
    return gpu_qk_norm_backward_bytes(N, shape);
}

// Does backward for `tokens` tokens' q rows or k rows; a token has `count` such rows of C elements. d becomes dx, sums
// (C) = their dweight. d, x and rstd start at the first such row. All threads call. turn: row_sums' slot, at first 0.
template <int THREADS, int PACKS>
DEVICE_FUNCTION void qk_norm_backward_run(float *sums, floatX *d, const floatX *x, const floatX *weight,
                                          const float *rstd, unsigned tokens, unsigned count, int C,
                                          const struct qk_rows &rows, float offset, int &turn) {
    enum { HELD = PACKS > 0 ? PACKS : 1, ROWS = NORM_THREADS / THREADS };
    struct packed_floats dweight[HELD];
    memset(dweight, 0, sizeof dweight);
    if (PACKS == 0)
        row_packs<THREADS, PACKS>(C, [&](int j, int c) { floats_store_some(sums + c, dweight[0], C - c); });
    for (unsigned begin = 0; begin < tokens * count; begin += ROWS, turn ^= 1) {
        const unsigned at = begin + threadIdx.x / THREADS, n = at / count, row = at - n * count;
        const int here = n < tokens ? C : 0;
        const int64_t first = (int64_t)n * rows.width + (int64_t)row * C;
        const float row_rstd = here > 0 ? rstd[(int64_t)n * (rows.q_rows + rows.k_rows) + row] : 0;
        struct packed x_held[HELD], d_held[HELD];
        if (PACKS > 0)
            row_packs<THREADS, PACKS>(here, [&](int j, int c) {
                x_held[j] = row_load<PACKS>(x + first, c, here);
                d_held[j] = row_load<PACKS>(d + first, c, here);
            });
        float gx[1] = {0};
        row_packs<THREADS, PACKS>(here, [&](int j, int c) {
            const struct packed_floats v = row_pack<PACKS>(x_held, x + first, j, c, here);
            const struct packed_floats dout = row_pack<PACKS>(d_held, d + first, j, c, here);
            const struct packed_floats w = row_weight<PACKS>(weight, offset, c, here);
            float part = 0;
#pragma unroll
            for (int i = 0; i < PACK; i++)
                part = fmaf(dout.x[i] * w.x[i], v.x[i], part);
            gx[0] += part;
        });
        row_sums<THREADS>(gx, turn);
        const float gy_mean = gx[0] * row_rstd / (float)C;
        row_packs<THREADS, PACKS>(here, [&](int j, int c) {
            const struct packed_floats v = row_pack<PACKS>(x_held, x + first, j, c, here);
            struct packed_floats dout = row_pack<PACKS>(d_held, d + first, j, c, here);
            const struct packed_floats w = row_weight<PACKS>(weight, offset, c, here);
            struct packed_floats &to = dweight[PACKS > 0 ? j : 0];
            if (PACKS == 0)
                to = floats_load_some(sums + c, C - c);
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                const float y = v.x[i] * row_rstd;
                to.x[i] = fmaf(dout.x[i], y, to.x[i]);
                dout.x[i] = row_rstd * (dout.x[i] * w.x[i] - y * gy_mean);
            }
            qk_row_store<PACKS>(d + first, packed_from_floats(dout), c, here);
            if (PACKS == 0)
                floats_store_some(sums + c, to, C - c);
        });
    }
    if (PACKS > 0 && THREADS <= 32) {
#pragma unroll
        for (int j = 0; j < PACKS; j++)
            norm_groups_reduce<THREADS>(sums + j * THREADS * PACK, C - j * THREADS * PACK, dweight[j]);
    } else if (PACKS > 0)
        row_packs<THREADS, PACKS>(C, [&](int j, int c) { floats_store(sums + c, dweight[j]); });
}

// Does qk_norm_backward except for adding up the runs: sums (blocks, q_width + k_width) = dwq, dwk of each block's run.
// Where a row takes a warp or less, two blocks fit an SM; left to itself the compiler spills registers to fit three.
template <int THREADS, int PACKS>
static __global__ void __launch_bounds__(NORM_THREADS, THREADS <= 32 ? 2 : 1)
    qk_norm_backward_kernel(float *sums, floatX *dqkv, const floatX *qkv, const floatX *wq, const floatX *wk,
                            const float *rstd, int64_t N, struct qk_rows rows, float offset) {
    const int64_t begin = blockIdx.x * N / gridDim.x, end = (blockIdx.x + 1) * N / gridDim.x;
    const int64_t first = begin * rows.width, keys = first + (int64_t)rows.q_rows * rows.q_width;
    float *run = sums + (int64_t)blockIdx.x * (rows.q_width + rows.k_width);
    rstd += begin * (rows.q_rows + rows.k_rows);
    int turn = 0;
    qk_norm_backward_run<THREADS, PACKS>(run, dqkv + first, qkv + first, wq, rstd, (unsigned)(end - begin),
                                         (unsigned)rows.q_rows, rows.q_width, rows, offset, turn);
    qk_norm_backward_run<THREADS, PACKS>(run + rows.q_width, dqkv + keys, qkv + keys, wk, rstd + rows.q_rows,
                                         (unsigned)(end - begin), (unsigned)rows.k_rows, rows.k_width, rows, offset,
                                         turn);
}

void qk_norm_backward(floatX *dqkv, float *dwq, float *dwk, const floatX *qkv, const floatX *wq, const floatX *wk,
                      const float *rstd, int64_t N, struct qk_norm_shape shape, bool add, void *workspace,
                      struct device *dev) {
    const struct qk_rows rows = qk_rows_of(shape);
    const void *arrays[] = {dqkv, qkv, wq, wk, workspace};
    const int64_t runs = gpu_qk_norm_backward_num_runs(N, shape);
    const float offset = norm_weight_offset(shape.one_plus);
    float *sums = (float *)workspace; // (runs, q_width + k_width)
#define QK_BACKWARD(threads, packs)                                                                                    \
    LAUNCH(dev, (qk_norm_backward_kernel<threads, packs>), (unsigned)runs, NORM_THREADS,                               \
           (threads <= 32 ? NORM_THREADS * PACK : 2 * NORM_THREADS / 32) * sizeof(float), sums, dqkv, qkv, wq, wk,     \
           rstd, N, rows, offset)
    QK_ROWS_DISPATCH(QK_BACKWARD, qk_longest_row(rows), norm_rows_whole(shape.D, arrays, 5));
#undef QK_BACKWARD
    if (dwq == NULL && dwk == NULL)
        return;
    LAUNCH(dev, norm_reduce_kernel, blocks_for(rows.q_width + rows.k_width, 32), NORM_REDUCE_THREADS,
           NORM_REDUCE_THREADS * sizeof(float), dwq, rows.q_width, dwk, rows.k_width, (const float *)sums, runs, add);
}

#else

// Normalizes x (rows, C), rows <= NORM_ROWS, to out, all rows at a time. rstd (rows) may be NULL.
ALWAYS_INLINE void qk_norm_some(floatX *out, float *rstd, const floatX *x, const floatX *weight, int C,
                                struct qk_norm_shape shape, const int rows) {
    const vec offset = vec_set(norm_weight_offset(shape.one_plus));
    vec squares[NORM_ROWS];
    float row_rstd[NORM_ROWS];
    EACH_ROW squares[r] = vec_set(0);
    for (int c = 0; c < C; c += LANES)
        EACH_ROW {
            const vec v = row_vec_load(x + (int64_t)r * C, c, C);
            squares[r] += v * v;
        }
    EACH_ROW {
        row_rstd[r] = 1.0f / sqrtf(vec_sum(squares[r]) / (float)C + shape.epsilon);
        if (rstd != NULL)
            rstd[r] = row_rstd[r];
    }
    for (int c = 0; c < C; c += LANES) {
        const vec w = row_vec_load(weight, c, C) + offset;
        EACH_ROW row_vec_store(out + (int64_t)r * C, row_vec_load(x + (int64_t)r * C, c, C) * row_rstd[r] * w, c, C);
    }
}
// Normalizes a token's q or k rows, x (rows, C), to out, NORM_ROWS at a time. rstd (rows) may be NULL.
ALWAYS_INLINE void qk_norm_rows(floatX *out, float *rstd, const floatX *x, const floatX *weight, int rows, int C,
                                struct qk_norm_shape shape) {
    int r = 0;
    for (; r + NORM_ROWS <= rows; r += NORM_ROWS)
        qk_norm_some(out + r * C, rstd ? rstd + r : NULL, x + r * C, weight, C, shape, NORM_ROWS);
    for (; r < rows; r++)
        qk_norm_some(out + r * C, rstd ? rstd + r : NULL, x + r * C, weight, C, shape, 1);
}

void qk_norm_forward(floatX *out, float *rstd, const floatX *qkv, const floatX *wq, const floatX *wk, int64_t N,
                     struct qk_norm_shape shape, struct qk_norm_rotary rotary, struct device *dev) {
    const struct qk_rows rows = qk_rows_of(shape);
    const int q = rows.q_rows * rows.q_width, k = rows.k_rows * rows.k_width;
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        const floatX *x = qkv + n * rows.width;
        floatX *y = out + n * rows.width;
        float *q_rstd = rstd ? rstd + n * (rows.q_rows + rows.k_rows) : NULL,
              *k_rstd = rstd ? q_rstd + rows.q_rows : NULL;
        qk_norm_rows(y, q_rstd, x, wq, rows.q_rows, rows.q_width, shape);
        qk_norm_rows(y + q, k_rstd, x + q, wk, rows.k_rows, rows.k_width, shape);
        if (rotary.table != NULL)
            rope_rotate(y, rotary.table + token_position(rotary.positions, n, rotary.T) * shape.D, shape.H + shape.Hkv,
                        shape.D, 1);
        if (out != qkv)
            memcpy(y + q + k, x + q + k, (size_t)k * sizeof *y);
    }
}

static inline int64_t qk_norm_padded_columns(struct qk_rows rows) {
    return norm_padded_columns(rows.q_width) + norm_padded_columns(rows.k_width);
}
size_t qk_norm_backward_workspace_bytes(int64_t N, struct qk_norm_shape shape, const struct device *dev) {
    if (device_is_gpu(dev))
        return gpu_qk_norm_backward_bytes(N, shape);
    return (size_t)(norm_backward_cpu_runs(N) * qk_norm_padded_columns(qk_rows_of(shape))) * sizeof(float);
}

// Does backward for `rows` <= NORM_ROWS rows of C elements: d becomes dx, dweight_sum (norm_padded_columns(C)) +=
// dout * y. Prefetches the next token's rows, `ahead` elements further, which the hardware's prefetchers miss.
ALWAYS_INLINE void qk_norm_backward_some(floatX *d, float *dweight_sum, const floatX *x, const floatX *weight,
                                         const float *rstd, int C, bool one_plus, int64_t ahead, const int rows) {
    const vec offset = vec_set(norm_weight_offset(one_plus));
    vec gx_sum[NORM_ROWS];
    float gy_mean[NORM_ROWS];
    EACH_ROW gx_sum[r] = vec_set(0);
    for (int c = 0; c < C; c += LANES) {
        const vec w = row_vec_load(weight, c, C) + offset;
        EACH_ROW {
            __builtin_prefetch(x + ahead + (int64_t)r * C + c);
            __builtin_prefetch(d + ahead + (int64_t)r * C + c, 1);
            gx_sum[r] += row_vec_load(d + (int64_t)r * C, c, C) * w * row_vec_load(x + (int64_t)r * C, c, C);
        }
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
// Does backward for a token's q or k rows: d (rows, C) becomes dx, dweight_sum += dout * y, by qk_norm_backward_some.
ALWAYS_INLINE void qk_norm_backward_rows(floatX *d, float *dweight_sum, const floatX *x, const floatX *weight,
                                         const float *rstd, int rows, int C, bool one_plus, int64_t ahead) {
    int r = 0;
    for (; r + NORM_ROWS <= rows; r += NORM_ROWS)
        qk_norm_backward_some(d + r * C, dweight_sum, x + r * C, weight, rstd + r, C, one_plus, ahead, NORM_ROWS);
    for (; r < rows; r++)
        qk_norm_backward_some(d + r * C, dweight_sum, x + r * C, weight, rstd + r, C, one_plus, ahead, 1);
}

void qk_norm_backward(floatX *dqkv, float *dwq, float *dwk, const floatX *qkv, const floatX *wq, const floatX *wk,
                      const float *rstd, int64_t N, struct qk_norm_shape shape, bool add, void *workspace,
                      struct device *dev) {
    const struct qk_rows rows = qk_rows_of(shape);
    const int64_t runs = norm_backward_cpu_runs(N), columns = qk_norm_padded_columns(rows),
                  q_columns = norm_padded_columns(rows.q_width);
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
            qk_norm_backward_rows(d, run_sums, x, wq, q_rstd, rows.q_rows, rows.q_width, shape.one_plus, rows.width);
            qk_norm_backward_rows(d + q, run_sums + q_columns, x + q, wk, q_rstd + rows.q_rows, rows.k_rows,
                                  rows.k_width, shape.one_plus, rows.width);
        }
    }
    norm_add_runs(dwq, sums, runs, columns, rows.q_width, add);
    norm_add_runs(dwk, sums + q_columns, runs, columns, rows.k_width, add);
}

#endif
