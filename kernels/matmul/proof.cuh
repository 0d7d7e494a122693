// Whether an algorithm of cuBLASLt multiplies right on this GPU, by a few elements' plain sums in double.
#pragma once
#include "kernels/device_memory.cuh"     // device_download
#include "kernels/fp8/fp8.cuh"           // fp8_decode, fp8_inverse_pitch
#include "kernels/matmul/candidates.cuh" // struct matmul_candidate
#include "kernels/reduce.cuh"            // warp_sum_double
#include <math.h>                        // fabs

enum { PROOF_ELEMENTS = 8, PROOF_LANES = 32 };
// Sums of up to 2^20 products err by less than these shares of their magnitudes; FP8's, of struct matmul_noise's codes.
static const double PROOF_SHARE = 0x1p-10, PROOF_FP8_SHARE = 0x1p-14;
static const double PROOF_ROUNDING = 0x1p-8; // of an element that is stored in bf16, relative, at most

// An operand of a product as the kernel reads it: A (rows, depth) or B (depth, cols).
struct proof_operand {
    struct gemm_operand x;
    struct fp8_matrix fp8; // codes NULL: x's data are multiplied
    int64_t rows, depth;   // of the codes' matrix
};
struct proof_values {
    double got, right, magnitude; // magnitude: the sum of the products' absolute values
};
// Returns A's element (i, k) or, if depth_is_rows, B's (k, i), times FP8's inverse. i is a row or column of the output.
static __device__ inline double proof_element(struct proof_operand o, int64_t i, int64_t k, bool depth_is_rows) {
    const bool depth_first = o.x.transposed != depth_is_rows; // elements of one k lie together
    const int64_t at = depth_first ? k * o.x.ld + i : i * o.x.ld + k;
    if (!o.fp8.codes)
        return (double)to_float(o.x.data[at]);
    const int64_t pitch = fp8_inverse_pitch(o.fp8.granularity, o.rows, o.depth);
    int64_t scale = 0;
    switch (o.fp8.granularity) {
    case FP8_PER_TENSOR: break;
    case FP8_1X128: scale = k / FP8_BLOCK * pitch + i; break;
    case FP8_128X128: scale = i / FP8_BLOCK * pitch + k / FP8_BLOCK; break;
    }
    return (double)fp8_decode(o.fp8.codes[at], o.fp8.format) * (double)o.fp8.inverse[scale];
}
// Returns the row of checked element `number`. The rows go evenly from the first to the last.
static __host__ __device__ inline int64_t proof_row(int number, int64_t rows) {
    return number * (rows - 1) / (PROOF_ELEMENTS - 1);
}
// Returns the column of checked element `number`. The columns go evenly from the first to the last, in another order.
static __host__ __device__ inline int64_t proof_column(int number, int64_t cols) {
    return 5 * number % PROOF_ELEMENTS * (cols - 1) / (PROOF_ELEMENTS - 1);
}
// Fills values (PROOF_ELEMENTS), each by a block of one warp. out, sum, bias: as struct gemm's.
static __global__ void proof_kernel(struct proof_values *values, struct proof_operand a, struct proof_operand b,
                                    const floatX *out, const float *sum, const floatX *bias, int64_t ld_out,
                                    int64_t rows, int64_t cols, int64_t depth) {
    const int64_t i = proof_row((int)blockIdx.x, rows), j = proof_column((int)blockIdx.x, cols);
    struct proof_values v = {0, 0, 0};
    for (int64_t k = threadIdx.x; k < depth; k += PROOF_LANES) {
        const double product = proof_element(a, i, k, false) * proof_element(b, j, k, true);
        v.right += product;
        v.magnitude += product < 0 ? -product : product;
    }
    v.right = warp_sum_double(v.right);
    v.magnitude = warp_sum_double(v.magnitude);
    v.right += bias ? (double)to_float(bias[j]) : 0;
    v.got = sum ? (double)sum[i * ld_out + j] : (double)to_float(out[i * ld_out + j]);
    if (threadIdx.x == 0)
        values[blockIdx.x] = v;
}
// Returns an operand for proof_kernel. rows: the output's rows for A, its columns for B.
static struct proof_operand proof_operand_of(const struct gemm_operand *x, int64_t rows, int64_t depth) {
    struct proof_operand o;
    memset(&o, 0, sizeof o);
    o.x = *x;
    if (x->fp8)
        o.fp8 = *x->fp8;
    o.rows = rows;
    o.depth = depth;
    return o;
}
// Whether a candidate's output is the plain product: an epilogue that sums a bias gradient leaves the output as it is.
static bool matmul_can_be_proven(const struct matmul_candidate *candidate, const struct matmul_product *product) {
    return !candidate->plan.fused || product->dbias;
}
// Whether a candidate that can be proven multiplies right, run without GELU's derivative: a few elements agree with
// sums in double. Also true if the library refuses it. Overwrites the output, dbias and workspace; waits.
static bool matmul_is_proven(struct matmul_candidate *candidate, const struct matmul_product *product,
                             struct device *dev) {
    struct gemm gemm = product->gemm;
    struct proof_values values[PROOF_ELEMENTS];
    gemm.add = gemm.gelu_sums = false;
    gemm.gelu = NULL;
    if (matmul_enqueue(&candidate->plan, &gemm, product->dbias, product->workspace, dev) != CUBLAS_STATUS_SUCCESS)
        return true;
    struct proof_values *const found = (struct proof_values *)product->workspace;
    LAUNCH(dev, proof_kernel, PROOF_ELEMENTS, PROOF_LANES, 0, found, proof_operand_of(&gemm.a, gemm.rows, gemm.depth),
           proof_operand_of(&gemm.b, gemm.cols, gemm.depth), (const floatX *)gemm.out, (const float *)gemm.sum,
           gemm.bias, gemm.ld_out, gemm.rows, gemm.cols, gemm.depth);
    device_download(values, found, sizeof values, dev);
    const double share = gemm.a.fp8 ? PROOF_FP8_SHARE : PROOF_SHARE;
    const double rounding = gemm.sum || sizeof(floatX) == 4 ? 0 : PROOF_ROUNDING;
    for (int i = 0; i < PROOF_ELEMENTS; i++) {
        const struct proof_values v = values[i];
        if (isfinite(v.right) && !(fabs(v.got - v.right) <= share * v.magnitude + rounding * fabs(v.right)))
            return false;
    }
    return true;
}
