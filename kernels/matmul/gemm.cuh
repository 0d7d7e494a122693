// The three products of a linear layer as one: C (rows, cols) = A (rows, depth) B (depth, cols), in BLAS's terms.
#pragma once
#include "kernels/device.cuh"  // floatX
#include "kernels/fp8/fp8.cuh" // struct fp8_matrix
#include <sys/cdefs.h>         // __BEGIN_DECLS

struct gemm_operand {
    const floatX *data;
    int64_t ld; // elements from one stored row to the next
    bool transposed;
    const struct fp8_matrix *fp8; // NULL, or what is multiplied in place of data; in both operands, only on a GPU
};
struct gemm {
    int64_t rows, cols, depth;
    struct gemm_operand a; // (rows, depth), or (depth, rows) when transposed
    struct gemm_operand b; // (depth, cols), or (cols, depth) when transposed
    floatX *out;           // (rows, cols) = A B + bias, or NULL: sum is the output
    int64_t ld_out;        // elements from one row of the output to the next
    const floatX *bias;    // (cols) or NULL
    float *sum;            // (rows, cols) = A B, where out is NULL
    bool add;              // the output, which has no bias then, += A B, as matmul/matmul.cuh has it
    bool fast;             // FP8: the GPU may keep the sum over the whole depth in fewer bits
    // NULL, or GELU's input (rows, cols), with rows ld_out apart: GELU's derivative multiplies the output in place, by
    // gemm_run where gemm_applies_gelu says so, else by the caller. gelu_sums: the caller then wants column sums.
    const floatX *gelu;
    bool gelu_sums;
};

__BEGIN_DECLS
// Creates a library, never NULL, which the caller puts in dev->matmul, for matmul_destroy. Ends the program on failure.
struct matmul_library *matmul_create(struct device *dev);
// Frees the library's handles and the library; does nothing for NULL.
void matmul_destroy(struct matmul_library *library);
// Returns the library's name, with a version if it has one, and the products' type. The text is the library's.
const char *matmul_describe(const struct matmul_library *library);

// Returns the bytes of workspace of gemm_run, which with dbias needs dbias_workspace_bytes where these are more.
size_t gemm_workspace_bytes(const struct gemm *gemm, const struct device *dev);
// Returns the bytes of workspace for column sums of dout (M, N); it may be the product's workspace.
size_t dbias_workspace_bytes(int64_t M, int N, const struct device *dev);
#ifdef TARGET_CUDA
// Enqueues dbias (N) = the sums of the columns of dout (M, N), or += where `add`. workspace: dbias_workspace_bytes.
void dbias_sums(float *dbias, const floatX *dout, int64_t M, int N, bool add, void *workspace, struct device *dev);
#endif
// Computes the gemm (on a GPU enqueues it) or, in a dry run, only lists it. Unless NULL, dbias (rows) = the sums of A's
// rows, or += where gemm->add; A must be a transposed dout without gaps. Ends the program without an algorithm.
void gemm_run(const struct gemm *gemm, float *dbias, void *workspace, struct device *dev);
// Whether gemm_run multiplies the output by GELU's derivative; if not, as on CPUs and in dry runs, the caller must.
bool gemm_applies_gelu(const struct gemm *gemm, struct device *dev);
__END_DECLS

// Returns the gemm of out (M, N) = in (M, K) weight (N, K)^T + bias (N); bias NULL: none.
static inline struct gemm gemm_forward(floatX *out, const floatX *in, const floatX *weight, const floatX *bias,
                                       int64_t M, int N, int K) {
    const struct gemm gemm = {M, N, K, {in, K, false}, {weight, K, true}, out, N, bias, NULL, false, false};
    return gemm;
}
// Returns the gemm of out (M, N) = in (M, K) weight (N, K)^T, or += where `add`; ld_*: elements from row to row.
static inline struct gemm gemm_forward_strided(floatX *out, int64_t ld_out, const floatX *in, int64_t ld_in,
                                               const floatX *weight, int64_t M, int N, int K, bool add) {
    const struct gemm gemm = {M, N, K, {in, ld_in, false}, {weight, K, true}, out, ld_out, NULL, NULL, add, false};
    return gemm;
}
// Returns the gemm of din (M, K) = dout (M, N) weight (N, K), or += where `add`.
static inline struct gemm gemm_backward_input(floatX *din, int64_t ld_din, const floatX *dout, int64_t ld_dout,
                                              const floatX *weight, int64_t M, int N, int K, bool add) {
    const struct gemm gemm = {M, K, N, {dout, ld_dout, false}, {weight, K, false}, din, ld_din, NULL, NULL, add, false};
    return gemm;
}
// Returns the gemm of dweight (N, K), without gaps, = dout (M, N)^T in (M, K), or += where `add`.
static inline struct gemm gemm_backward_weight(float *dweight, const floatX *dout, int64_t ld_dout, const floatX *in,
                                               int64_t ld_in, int64_t M, int N, int K, bool add) {
    const struct gemm gemm = {N, K, M, {dout, ld_dout, true}, {in, ld_in, false}, NULL, K, NULL, dweight, add, false};
    return gemm;
}

static inline int64_t gemm_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t gemm_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t gemm_round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
