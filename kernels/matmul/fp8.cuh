// Products of FP8 matrices on the cpu target, by products of floatX: every finite FP8 number is a bf16 number, and a
// product of two is exact in fp32. Operands are decoded in blocks, so that scratch memory depends on no size. A block's
// fp32 sums run over the whole depth, and are rounded once. One scale for a whole matrix multiplies these sums. Scales
// of blocks multiply the decoded values: they are powers of two, so that this is exact while the exponent stays in
// bf16's range. A value above it becomes infinity, one below 2^-126 may be rounded or count as 0 in the product.
#pragma once
#include "kernels/fp8/fp8.cuh"            // fp8_decode, struct fp8_matrix
#include "kernels/gpu_sizes.cuh"          // GPU_MATMUL_BYTES, gpu_refuses_fp8
#include "kernels/matmul/backend_run.cuh" // gemm_run_backend, gemm_workspace_bytes

enum { FP8_LINES = 1024, FP8_DEPTH = 1024 }; // rows, and depth, decoded at a time: multiples of FP8_BLOCK

// Returns the rows that a block's buffer has room for: `lines`, at most FP8_LINES, rounded up to a multiple of 32.
static int64_t fp8_block_lines(int64_t lines) { return gemm_round_up(gemm_min(lines, FP8_LINES), 32); }
// Returns the depth that a block's buffers have room for: `depth`, at most FP8_DEPTH, rounded up to a multiple of 32.
static int64_t fp8_block_depth(int64_t depth) { return gemm_round_up(gemm_min(depth, FP8_DEPTH), 32); }

// Returns the gemm of one block: sum (rows, cols) += a (rows, depth) b (cols, depth)^T.
static struct gemm gemm_fp8(float *sum, const floatX *a, const floatX *b, int64_t rows, int64_t cols, int64_t depth) {
    const struct gemm gemm = {rows, cols, depth, {a, depth, false}, {b, depth, true}, NULL, cols, NULL,
                              sum,  true, false};
    return gemm;
}

// Returns the bytes of a block's sums and decoded operands, and the most workspace of a block's product, whole or not.
size_t matmul_fp8_workspace_bytes(int64_t M, int64_t N, int64_t K, struct device *dev) {
    if (device_is_gpu(dev))
        return GPU_MATMUL_BYTES;
    const int64_t rows[] = {gemm_min(M, FP8_LINES), M % FP8_LINES}, cols[] = {gemm_min(N, FP8_LINES), N % FP8_LINES};
    const int64_t depths[] = {gemm_min(K, FP8_DEPTH), K % FP8_DEPTH};
    const int64_t m = fp8_block_lines(M), n = fp8_block_lines(N), k = fp8_block_depth(K);
    size_t most = 0;
    float sum; // stands for a buffer that is not there yet
    for (int i = 0; i < 8; i++) {
        const struct gemm gemm = gemm_fp8(&sum, NULL, NULL, rows[i & 1], cols[i >> 1 & 1], depths[i >> 2]);
        if (gemm.rows > 0 && gemm.cols > 0 && gemm.depth > 0)
            most = (size_t)gemm_max((int64_t)most, (int64_t)gemm_workspace_bytes(&gemm, dev));
    }
    return (size_t)(m * n) * sizeof(float) + (size_t)((m + n) * k) * sizeof(floatX) + most;
}

// Returns the inverse of a row's block at k, a multiple of FP8_BLOCK. FP8_PER_TENSOR: 1, since sums are scaled.
static float fp8_inverse_at(const struct fp8_matrix *x, int64_t row, int64_t depth, int64_t rows, int64_t k) {
    const int64_t pitch = fp8_inverse_pitch(x->granularity, rows, depth);
    switch (x->granularity) {
    case FP8_PER_TENSOR: return 1;
    case FP8_1X128: return x->inverse[k / FP8_BLOCK * pitch + row];
    case FP8_128X128: return x->inverse[row / FP8_BLOCK * pitch + k / FP8_BLOCK];
    }
    return 1;
}

// out (count, steps) = x (rows, depth) from (row, k) on, decoded, times fp8_inverse_at; k is a multiple of FP8_BLOCK.
static void fp8_decode_block(floatX *out, const struct fp8_matrix *x, int64_t rows, int64_t depth, int64_t row,
                             int64_t count, int64_t k, int64_t steps, const struct device *dev) {
    float values[256];
    for (int code = 0; code < 256; code++)
        values[code] = fp8_decode((fp8)code, x->format);
#pragma omp parallel for schedule(static) num_threads(dev->threads)
    for (int64_t i = 0; i < count; i++)
        for (int64_t begin = 0; begin < steps; begin += FP8_BLOCK) {
            const fp8 *from = x->codes + (row + i) * depth + k + begin;
            floatX *to = out + i * steps + begin;
            const float inverse = fp8_inverse_at(x, row + i, depth, rows, k + begin);
            const int n = (int)gemm_min(FP8_BLOCK, steps - begin);
#pragma omp simd
            for (int j = 0; j < n; j++)
                to[j] = to_floatX(values[from[j]] * inverse);
        }
}

struct fp8_product {
    struct fp8_matrix a, b;
    int64_t M, N, K;
    floatX *out;
    const floatX *bias;
    float *sum;
    bool add;
};

// Returns what multiplies the sums: the product of both matrices' inverses, or 1 where scales are of blocks.
static float fp8_product_scale(const struct fp8_product *x) {
    return x->a.granularity == FP8_PER_TENSOR ? *x->a.inverse * *x->b.inverse : 1;
}

// Writes sums (rows, cols), scaled, from element (row, col) on: to x->out, with bias, or to x->sum, adding if x->add.
static void fp8_finish_block(const struct fp8_product *x, const float *sums, int64_t row, int64_t rows, int64_t col,
                             int64_t cols, const struct device *dev) {
    const float scale = fp8_product_scale(x);
#pragma omp parallel for schedule(static) num_threads(dev->threads)
    for (int64_t i = 0; i < rows; i++) {
        const float *from = sums + i * cols;
        const int64_t at = (row + i) * x->N + col;
        if (x->sum) {
#pragma omp simd
            for (int64_t j = 0; j < cols; j++)
                x->sum[at + j] = (x->add ? x->sum[at + j] : 0) + from[j] * scale;
        } else {
#pragma omp simd
            for (int64_t j = 0; j < cols; j++)
                x->out[at + j] = to_floatX(from[j] * scale + (x->bias ? to_float(x->bias[col + j]) : 0.0f));
        }
    }
}

// Computes x->sum, += where x->add, or, if x->sum is NULL, x->out with bias. workspace: matmul_fp8_workspace_bytes.
static void fp8_multiply(const struct fp8_product *x, void *workspace, struct device *dev) {
    const int64_t m = fp8_block_lines(x->M), n = fp8_block_lines(x->N), k = fp8_block_depth(x->K);
    float *sums = (float *)workspace;
    floatX *a = (floatX *)(sums + m * n), *b = a + m * k;
    void *rest = b + n * k;
    for (int64_t row = 0; row < x->M; row += FP8_LINES)
        for (int64_t col = 0; col < x->N; col += FP8_LINES) {
            const int64_t rows = gemm_min(FP8_LINES, x->M - row), cols = gemm_min(FP8_LINES, x->N - col);
            memset(sums, 0, (size_t)(rows * cols) * sizeof *sums);
            for (int64_t begin = 0; begin < x->K; begin += FP8_DEPTH) {
                const int64_t depth = gemm_min(FP8_DEPTH, x->K - begin);
                fp8_decode_block(a, &x->a, x->M, x->K, row, rows, begin, depth, dev);
                fp8_decode_block(b, &x->b, x->N, x->K, col, cols, begin, depth, dev);
                const struct gemm gemm = gemm_fp8(sums, a, b, rows, cols, depth);
                gemm_run_backend(&gemm, NULL, rest, dev);
            }
            fp8_finish_block(x, sums, row, rows, col, cols, dev);
        }
}

void matmul_fp8(floatX *out, struct fp8_matrix a, struct fp8_matrix b, const floatX *bias, int64_t M, int64_t N,
                int64_t K, bool fast, void *workspace, struct device *dev) {
    const struct fp8_product product = {a, b, M, N, K, out, bias, NULL, false};
    fp8_multiply(&product, workspace, dev);
}
void matmul_fp8_sum(float *sum, struct fp8_matrix a, struct fp8_matrix b, int64_t M, int64_t N, int64_t K, bool add,
                    bool fast, void *workspace, struct device *dev) {
    const struct fp8_product product = {a, b, M, N, K, NULL, NULL, sum, add};
    fp8_multiply(&product, workspace, dev);
}

const char *matmul_fp8_refusal(char *text, size_t n, enum fp8_granularity granularity, const struct device *dev) {
    return device_is_gpu(dev) && gpu_refuses_fp8(text, n, granularity, dev->planned) ? text : NULL;
}
