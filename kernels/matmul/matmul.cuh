// Matrix products of a linear layer, forward and backward, with shapes and names as torch.nn.Linear has them. Sums are
// fp32 over the whole depth and are rounded once. Calls need dev->matmul (matmul_create). On a GPU they enqueue or, in
// a dry run (matmul_list_begin), only list; they end the program where cuBLASLt has no algorithm for the sizes.
#pragma once
#include "kernels/device.cuh"      // floatX, struct device
#include "kernels/fp8/fp8.cuh"     // struct fp8_matrix
#include "kernels/matmul/gemm.cuh" // struct gemm
#include <sys/cdefs.h>             // __BEGIN_DECLS

__BEGIN_DECLS
// Returns the bytes of scratch, aligned to 64 (GPU: 256), that each of the four calls below needs with these sizes.
size_t matmul_workspace_bytes(int64_t M, int N, int K, struct device *dev);

// out = in weight^T + bias. workspace: matmul_workspace_bytes.
void matmul_forward(floatX *out,          // (M, N)
                    const floatX *in,     // (M, K)
                    const floatX *weight, // (N, K)
                    const floatX *bias,   // (N); NULL: none
                    int64_t M, int N, int K, void *workspace, struct device *dev);
// din = dout weight. workspace: matmul_workspace_bytes.
void matmul_backward_input(floatX *din,          // (M, K)
                           const floatX *dout,   // (M, N)
                           const floatX *weight, // (N, K)
                           int64_t M, int N, int K, void *workspace, struct device *dev);
// din = dout weight, for a layer whose input is gelu(pre). Returns whether din was also multiplied by gelu'(pre), as on
// a GPU where tuning found that faster; else the caller does. sums only tells tuning that din's columns will be summed.
bool matmul_backward_input_gelu(floatX *din,          // (M, K)
                                const floatX *dout,   // (M, N)
                                const floatX *weight, // (N, K)
                                const floatX *pre,    // (M, K)
                                bool sums, int64_t M, int N, int K, void *workspace, struct device *dev);
// dweight = dout^T in, dbias = column sums of dout; or, where `add`, += these. workspace: matmul_workspace_bytes.
void matmul_backward_weight(float *dweight,     // (N, K)
                            float *dbias,       // (N); NULL: none
                            const floatX *dout, // (M, N)
                            const floatX *in,   // (M, K)
                            int64_t M, int N, int K, bool add, void *workspace, struct device *dev);

// The strided calls take matrices whose rows lie apart, as the columns of a wider matrix do: ld_* is the number of
// elements from one row to the next. An output that is added to is read, added to in fp32 and rounded once (cuBLASLt's
// kernels for Hopper round the product to bf16 before the addition, and the sum again); elements between its rows stay
// as they are. Sizes and distances may be any. On the CPU, where N or K is small, as an adapter's rank is, these calls
// are faster than the calls above, also for matrices without gaps, and may give other bits.

// Returns the bytes of scratch, aligned to 64 (GPU: 256), of each call below. ld_in: of in, din; ld_out: of out, dout.
size_t matmul_strided_workspace_bytes(int64_t ld_in, int64_t ld_out, int64_t M, int N, int K, struct device *dev);
// out = in weight^T, or += where `add`. workspace: matmul_strided_workspace_bytes.
void matmul_forward_strided(floatX *out, int64_t ld_out,     // (M, N)
                            const floatX *in, int64_t ld_in, // (M, K)
                            const floatX *weight,            // (N, K)
                            int64_t M, int N, int K, bool add, void *workspace, struct device *dev);
// din = dout weight, or += where `add`. workspace: matmul_strided_workspace_bytes.
void matmul_backward_input_strided(floatX *din, int64_t ld_din,         // (M, K)
                                   const floatX *dout, int64_t ld_dout, // (M, N)
                                   const floatX *weight,                // (N, K)
                                   int64_t M, int N, int K, bool add, void *workspace, struct device *dev);
// dweight = dout^T in, or += where `add`. workspace: matmul_strided_workspace_bytes.
void matmul_backward_weight_strided(float *dweight,                      // (N, K)
                                    const floatX *dout, int64_t ld_dout, // (M, N)
                                    const floatX *in, int64_t ld_in,     // (M, K)
                                    int64_t M, int N, int K, bool add, void *workspace, struct device *dev);

// Products of FP8 matrices, with fp32 sums, rounded once. One scale an operand multiplies the finished sum; scales of
// blocks, which both operands have or neither, apply block by block. Sizes are multiples of 16 (on a GPU others end the
// program), as are addresses of codes and scales. fast: a GPU may keep sums in fewer bits, not with scales of blocks.

// Returns the bytes of scratch, aligned to 64 (GPU: 256), of matmul_fp8 and matmul_fp8_sum for a (M, K) and b (N, K).
size_t matmul_fp8_workspace_bytes(int64_t M, int64_t N, int64_t K, struct device *dev);
// Returns why the device or its library can't multiply FP8 matrices of this granularity, in `text` (n bytes), with the
// option to change; NULL where they can. A GPU neither open nor planned for is refused only in a build of fp32.
const char *matmul_fp8_refusal(char *text, size_t n, enum fp8_granularity granularity, const struct device *dev);
// out = a b^T + bias. workspace: matmul_fp8_workspace_bytes.
void matmul_fp8(floatX *out,         // (M, N)
                struct fp8_matrix a, // (M, K)
                struct fp8_matrix b, // (N, K)
                const floatX *bias,  // (N); NULL: none
                int64_t M, int64_t N, int64_t K, bool fast, void *workspace, struct device *dev);
// sum = a b^T, or += where `add`. workspace: matmul_fp8_workspace_bytes.
void matmul_fp8_sum(float *sum,          // (M, N)
                    struct fp8_matrix a, // (M, K)
                    struct fp8_matrix b, // (N, K)
                    int64_t M, int64_t N, int64_t K, bool add, bool fast, void *workspace, struct device *dev);
__END_DECLS
