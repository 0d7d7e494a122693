// Matrix products of a linear layer, forward and backward, with shapes and names as torch.nn.Linear has them. Sums are
// fp32 over the whole depth and are rounded once.
#pragma once
#include "kernels/device.cuh"      // floatX, struct device
#include "kernels/fp8.cuh"         // struct fp8_matrix
#include "kernels/matmul_gemm.cuh" // struct gemm

// Scratch that any of the three calls below needs, aligned to 64 bytes, on a GPU to 256.
static size_t matmul_workspace_bytes(int64_t M, int N, int K, struct device *dev);

// out = in weight^T + bias
static void matmul_forward(floatX *out,          // (M, N)
                           const floatX *in,     // (M, K)
                           const floatX *weight, // (N, K)
                           const floatX *bias,   // (N); NULL: none
                           int64_t M, int N, int K, void *workspace, struct device *dev);
// din = dout weight
static void matmul_backward_input(floatX *din,          // (M, K)
                                  const floatX *dout,   // (M, N)
                                  const floatX *weight, // (N, K)
                                  int64_t M, int N, int K, void *workspace, struct device *dev);
// matmul_backward_input for a layer whose input is gelu(pre): din = dout weight, or, on a GPU whose library was found to
// do both faster, that times gelu'(pre); returns whether it did. sums: the sums of the result's columns are wanted next.
static bool matmul_backward_input_gelu(floatX *din,          // (M, K)
                                       const floatX *dout,   // (M, N)
                                       const floatX *weight, // (N, K)
                                       const floatX *pre,    // (M, K)
                                       bool sums, int64_t M, int N, int K, void *workspace, struct device *dev);
// dweight = dout^T in, dbias = column sums of dout; or, where `add`, += these.
static void matmul_backward_weight(float *dweight,     // (N, K)
                                   float *dbias,       // (N); NULL: none
                                   const floatX *dout, // (M, N)
                                   const floatX *in,   // (M, K)
                                   int64_t M, int N, int K, bool add, void *workspace, struct device *dev);

// The same of matrices whose rows lie apart, as the columns of a wider matrix do: ld_* is the number of elements from
// one row to the next. An output that is added to is read, added to in fp32 and rounded once; elements between its rows
// are left alone. Sizes and distances may be any. Where N or K is small, as an adapter's rank is, these are the faster
// ones, also of matrices without gaps; their bits are others than those of the calls above.
//
// Scratch that any of the three calls below needs, by the distances of in and din, and of out and dout; aligned to 64
// bytes, on a GPU to 256.
static size_t matmul_strided_workspace_bytes(int64_t ld_in, int64_t ld_out, int64_t M, int N, int K,
                                             struct device *dev);
// out = in weight^T, or += where `add`
static void matmul_forward_strided(floatX *out, int64_t ld_out,     // (M, N)
                                   const floatX *in, int64_t ld_in, // (M, K)
                                   const floatX *weight,            // (N, K)
                                   int64_t M, int N, int K, bool add, void *workspace, struct device *dev);
// din = dout weight, or += where `add`
static void matmul_backward_input_strided(floatX *din, int64_t ld_din,         // (M, K)
                                          const floatX *dout, int64_t ld_dout, // (M, N)
                                          const floatX *weight,                // (N, K)
                                          int64_t M, int N, int K, bool add, void *workspace, struct device *dev);
// dweight = dout^T in, or += where `add`
static void matmul_backward_weight_strided(float *dweight,                      // (N, K)
                                           const floatX *dout, int64_t ld_dout, // (M, N)
                                           const floatX *in, int64_t ld_in,     // (M, K)
                                           int64_t M, int N, int K, bool add, void *workspace, struct device *dev);

// Products of FP8 matrices, with fp32 sums, rounded once: out = a b^T + bias, sum = a b^T, or += where `add`. Where
// both operands have one scale the sum over the depth is multiplied by the inverses at its end; scales of blocks are
// applied block by block. Sizes are multiples of 16; codes and scales of blocks begin at multiples of 16 bytes. fast:
// on a GPU tensor cores may keep the sum over the whole depth in fewer bits (CUBLASLT_MATMUL_DESC_FAST_ACCUM).
static size_t matmul_fp8_workspace_bytes(int64_t M, int64_t N, int64_t K, struct device *dev);
// NULL where the device and its library multiply FP8 matrices of this scaling; else why not, written to `text`, with
// the option to change. A GPU that is not open refuses nothing.
static const char *matmul_fp8_refusal(char *text, size_t n, enum fp8_scaling scaling, const struct device *dev);
static void matmul_fp8(floatX *out,         // (M, N)
                       struct fp8_matrix a, // (M, K)
                       struct fp8_matrix b, // (N, K)
                       const floatX *bias,  // (N); NULL: none
                       int64_t M, int64_t N, int64_t K, bool fast, void *workspace, struct device *dev);
static void matmul_fp8_sum(float *sum,          // (M, N)
                           struct fp8_matrix a, // (M, K)
                           struct fp8_matrix b, // (N, K)
                           int64_t M, int64_t N, int64_t K, bool add, bool fast, void *workspace, struct device *dev);

#ifdef TARGET_CUDA
#include "kernels/matmul_tuning.cuh" // gemm_run, by cuBLASLt, and the choice of its algorithms
static size_t gemm_strided_workspace_bytes(const struct gemm *gemm, const struct device *dev) {
    return gemm_workspace_bytes(gemm, dev);
}
static void gemm_run_strided(const struct gemm *gemm, void *workspace, struct device *dev) {
    gemm_run(gemm, NULL, workspace, dev);
}
#else
#include "kernels/matmul_backend.cuh" // struct matmul_backend, gemm_run_backend
#include "kernels/matmul_fp32.cuh"    // gemm_fp32
#include "kernels/matmul_fp8.cuh"     // matmul_fp8, matmul_fp8_sum
#include "kernels/matmul_rows.cuh"    // gemm_few_rows
#include "kernels/matmul_thin.cuh"    // gemm_thin
#include "kernels/matmul_tiles.cuh"   // gemm_amx, gemm_dot
#include "runtime/machine/error.h"    // fail
#include <stdlib.h>                   // calloc, free
#if defined HAVE_ONEDNN && defined PRECISION_BF16
#include "kernels/matmul_onednn.cuh" // gemm_onednn
#endif

// The backends that this build has, the fastest first; the last is on every machine.
static const struct matmul_backend matmul_backends[] = {
#ifdef PRECISION_BF16
    {"amx", true, true, amx_open, NULL, tiles_workspace_bytes, gemm_amx, NULL},
    {"dot", true, false, dot_open, NULL, tiles_workspace_bytes, gemm_dot, NULL},
#ifdef HAVE_ONEDNN
    {"onednn-bf16", false, false, onednn_open, onednn_close, onednn_workspace_bytes, gemm_onednn, sgemm_onednn},
#endif
#endif
#if defined HAVE_ONEDNN && defined __x86_64__ // for others dnnl_sgemm is loops in C++ (oneDNN's cpu/gemm/gemm.cpp)
    {"onednn-fp32", false, false, onednn_fp32_open, NULL, gemm_fp32_workspace_bytes, gemm_fp32, sgemm_onednn},
#endif
#ifdef HAVE_OPENBLAS
    {"openblas", false, false, openblas_open, NULL, gemm_fp32_workspace_bytes, gemm_fp32, sgemm_openblas},
#endif
    {"plain", true, false, plain_open, NULL, gemm_fp32_workspace_bytes, gemm_fp32, sgemm_plain},
};
enum { MATMUL_BACKENDS = sizeof matmul_backends / sizeof *matmul_backends };

// As matmul_create, by one backend; NULL where this machine does not have it.
static struct matmul_library *matmul_create_backend(struct device *dev, const struct matmul_backend *backend) {
    struct matmul_library *library = (struct matmul_library *)calloc(1, sizeof *library);
    if (library == NULL)
        fail("no memory for the matmul library's handle");
    library->backend = backend;
    if (backend->open(library, dev))
        return library;
    free(library);
    return NULL;
}
static struct matmul_library *matmul_create(struct device *dev) {
    struct matmul_library *library = NULL;
    for (int i = 0; i < MATMUL_BACKENDS && library == NULL; i++)
        library = matmul_create_backend(dev, &matmul_backends[i]);
    return library;
}
static void matmul_destroy(struct matmul_library *library) {
    if (library && library->backend->close)
        library->backend->close(library);
    free(library);
}
static const char *matmul_describe(const struct matmul_library *library) { return library->description; }

static void gemm_run(const struct gemm *gemm, float *dbias, void *workspace, struct device *dev) {
    if (gemm_has_few_rows(gemm))
        gemm_few_rows(gemm, dev);
    else
        gemm_run_backend(gemm, dbias, workspace, dev);
}
static bool gemm_applies_gelu(const struct gemm *gemm, struct device *dev) { return false; }
// gemm_run, of a product without a bias and dbias, which may be thin.
static bool gemm_takes_thin(const struct gemm *gemm, const struct device *dev) {
    return gemm_is_thin(gemm) && !gemm_has_few_rows(gemm) && !dev->matmul->backend->takes_thin;
}
static size_t gemm_strided_workspace_bytes(const struct gemm *gemm, const struct device *dev) {
    return gemm_takes_thin(gemm, dev) ? thin_workspace_bytes(gemm) : gemm_workspace_bytes(gemm, dev);
}
static void gemm_run_strided(const struct gemm *gemm, void *workspace, struct device *dev) {
    if (gemm_takes_thin(gemm, dev))
        gemm_thin(gemm, workspace, dev);
    else
        gemm_run(gemm, NULL, workspace, dev);
}
#endif

static size_t matmul_workspace_bytes(int64_t M, int N, int K, struct device *dev) {
    floatX out, bias; // stand for buffers that are not there yet
    float sum;
    const struct gemm gemms[] = {gemm_forward(&out, NULL, NULL, &bias, M, N, K),
                                 gemm_forward(&out, NULL, NULL, NULL, M, N, K),
                                 gemm_backward_input(&out, K, NULL, N, NULL, M, N, K, false),
                                 gemm_backward_weight(&sum, NULL, N, NULL, K, M, N, K, false),
                                 gemm_backward_weight(&sum, NULL, N, NULL, K, M, N, K, true)};
    int64_t most = (int64_t)dbias_workspace_bytes(M, N);
    for (size_t i = 0; i < sizeof gemms / sizeof *gemms; i++)
        most = gemm_max(most, (int64_t)gemm_workspace_bytes(&gemms[i], dev));
    return (size_t)most;
}
static size_t matmul_strided_workspace_bytes(int64_t ld_in, int64_t ld_out, int64_t M, int N, int K,
                                             struct device *dev) {
    floatX out; // stands for buffers that are not there yet
    float sum;
    const struct gemm gemms[] = {gemm_forward_strided(&out, ld_out, NULL, ld_in, NULL, M, N, K, false),
                                 gemm_forward_strided(&out, ld_out, NULL, ld_in, NULL, M, N, K, true),
                                 gemm_backward_input(&out, ld_in, NULL, ld_out, NULL, M, N, K, false),
                                 gemm_backward_input(&out, ld_in, NULL, ld_out, NULL, M, N, K, true),
                                 gemm_backward_weight(&sum, NULL, ld_out, NULL, ld_in, M, N, K, false),
                                 gemm_backward_weight(&sum, NULL, ld_out, NULL, ld_in, M, N, K, true)};
    int64_t most = 0;
    for (size_t i = 0; i < sizeof gemms / sizeof *gemms; i++)
        most = gemm_max(most, (int64_t)gemm_strided_workspace_bytes(&gemms[i], dev));
    return (size_t)most;
}

static void matmul_forward(floatX *out, const floatX *in, const floatX *weight, const floatX *bias, int64_t M, int N,
                           int K, void *workspace, struct device *dev) {
    const struct gemm gemm = gemm_forward(out, in, weight, bias, M, N, K);
    gemm_run(&gemm, NULL, workspace, dev);
}

static void matmul_backward_input(floatX *din, const floatX *dout, const floatX *weight, int64_t M, int N, int K,
                                  void *workspace, struct device *dev) {
    const struct gemm gemm = gemm_backward_input(din, K, dout, N, weight, M, N, K, false);
    gemm_run(&gemm, NULL, workspace, dev);
}

static bool matmul_backward_input_gelu(floatX *din, const floatX *dout, const floatX *weight, const floatX *pre,
                                       bool sums, int64_t M, int N, int K, void *workspace, struct device *dev) {
    struct gemm gemm = gemm_backward_input(din, K, dout, N, weight, M, N, K, false);
    gemm.gelu = pre;
    gemm.gelu_sums = sums;
    gemm_run(&gemm, NULL, workspace, dev);
    return gemm_applies_gelu(&gemm, dev);
}

static void matmul_backward_weight(float *dweight, float *dbias, const floatX *dout, const floatX *in, int64_t M, int N,
                                   int K, bool add, void *workspace, struct device *dev) {
    const struct gemm gemm = gemm_backward_weight(dweight, dout, N, in, K, M, N, K, add);
    gemm_run(&gemm, dbias, workspace, dev);
}

static void matmul_forward_strided(floatX *out, int64_t ld_out, const floatX *in, int64_t ld_in, const floatX *weight,
                                   int64_t M, int N, int K, bool add, void *workspace, struct device *dev) {
    const struct gemm gemm = gemm_forward_strided(out, ld_out, in, ld_in, weight, M, N, K, add);
    gemm_run_strided(&gemm, workspace, dev);
}

static void matmul_backward_input_strided(floatX *din, int64_t ld_din, const floatX *dout, int64_t ld_dout,
                                          const floatX *weight, int64_t M, int N, int K, bool add, void *workspace,
                                          struct device *dev) {
    const struct gemm gemm = gemm_backward_input(din, ld_din, dout, ld_dout, weight, M, N, K, add);
    gemm_run_strided(&gemm, workspace, dev);
}

static void matmul_backward_weight_strided(float *dweight, const floatX *dout, int64_t ld_dout, const floatX *in,
                                           int64_t ld_in, int64_t M, int N, int K, bool add, void *workspace,
                                           struct device *dev) {
    const struct gemm gemm = gemm_backward_weight(dweight, dout, ld_dout, in, ld_in, M, N, K, add);
    gemm_run_strided(&gemm, workspace, dev);
}
