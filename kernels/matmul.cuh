// Matrix products of a linear layer, forward and backward, with shapes and names as torch.nn.Linear has them. Sums are
// fp32 over the whole depth and are rounded once.
#pragma once
#include "kernels/device.cuh"      // floatX, struct device
#include "kernels/matmul_gemm.cuh" // struct gemm

// Scratch that any of the three calls below needs.
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
// dweight += dout^T in, dbias += column sums of dout
static void matmul_backward_weight(float *dweight,     // (N, K)
                                   float *dbias,       // (N); NULL: none
                                   const floatX *dout, // (M, N)
                                   const floatX *in,   // (M, K)
                                   int64_t M, int N, int K, void *workspace, struct device *dev);

#ifdef TARGET_CUDA
#include "kernels/matmul_cublaslt.cuh" // gemm_run, by cuBLASLt
#else
#include "kernels/matmul_amx.cuh"  // gemm_amx
#include "kernels/matmul_fp32.cuh" // gemm_fp32, enum matmul_backend
#include "kernels/matmul_rows.cuh" // gemm_few_rows
#include "runtime/machine/error.h" // fail
#include <stdio.h>                 // snprintf
#include <stdlib.h>                // malloc, free

struct matmul_library {
    enum matmul_backend backend;
    char description[64];
};

static bool matmul_available(enum matmul_backend backend) {
    switch (backend) {
    case MATMUL_AMX: return sizeof(floatX) == sizeof(bf16) && amx_available();
    case MATMUL_ONEDNN:
#ifdef HAVE_ONEDNN
        return true;
#else
        return false;
#endif
    case MATMUL_OPENBLAS:
#ifdef HAVE_OPENBLAS
        return true;
#else
        return false;
#endif
    case MATMUL_PLAIN: return true;
    case MATMUL_AUTO: break;
    }
    return false;
}

static void matmul_set_description(struct matmul_library *library) {
    char *const text = library->description;
    const size_t bytes = sizeof library->description;
    switch (library->backend) {
    case MATMUL_AMX: snprintf(text, bytes, "own AMX bf16"); break;
    case MATMUL_ONEDNN:
#ifdef HAVE_ONEDNN
        snprintf(text, bytes, "oneDNN %d.%d.%d fp32", dnnl_version()->major, dnnl_version()->minor,
                 dnnl_version()->patch);
#endif
        break;
    case MATMUL_OPENBLAS: snprintf(text, bytes, "OpenBLAS fp32"); break;
    case MATMUL_PLAIN:
    case MATMUL_AUTO: snprintf(text, bytes, "plain C fp32"); break;
    }
}

// As matmul_create, with a backend of choice; NULL where this machine or build does not have it.
static struct matmul_library *matmul_create_backend(struct device *dev, enum matmul_backend backend) {
    static const enum matmul_backend fastest_first[] = {MATMUL_AMX, MATMUL_ONEDNN, MATMUL_OPENBLAS, MATMUL_PLAIN};
    for (int i = 0; backend == MATMUL_AUTO; i++) // ends at the latest with plain C, which is always available
        if (matmul_available(fastest_first[i]))
            backend = fastest_first[i];
    if (!matmul_available(backend))
        return NULL;
    struct matmul_library *library = (struct matmul_library *)calloc(1, sizeof *library);
    if (library == NULL)
        fail("no memory for the matmul library's handle");
    library->backend = backend;
#ifdef HAVE_OPENBLAS
    openblas_set_num_threads(dev->threads);
#endif
    matmul_set_description(library);
    return library;
}
static struct matmul_library *matmul_create(struct device *dev) { return matmul_create_backend(dev, MATMUL_AUTO); }
static void matmul_destroy(struct matmul_library *library) { free(library); }
static const char *matmul_describe(const struct matmul_library *library) { return library->description; }

// Rows of dout that one partial sum of dbias covers. The number is fixed, so that the sums do not depend on that of
// threads.
enum { DBIAS_ROWS = 256 };

static size_t dbias_workspace_bytes(int64_t M, int N) {
    return (size_t)((M + DBIAS_ROWS - 1) / DBIAS_ROWS) * (size_t)N * sizeof(float);
}

// dbias += column sums of dout (M, N)
static void dbias_add(float *dbias, const floatX *dout, int64_t M, int N, void *workspace, struct device *dev) {
    float *partial = (float *)workspace; // (chunks, N)
    const int64_t chunks = (M + DBIAS_ROWS - 1) / DBIAS_ROWS;
#pragma omp parallel for schedule(static) num_threads(dev->threads)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        float *sum = partial + chunk * N;
        memset(sum, 0, (size_t)N * sizeof *sum);
        for (int64_t i = chunk * DBIAS_ROWS; i < gemm_min(M, (chunk + 1) * DBIAS_ROWS); i++) {
#pragma omp simd
            for (int j = 0; j < N; j++)
                sum[j] += to_float(dout[i * N + j]);
        }
    }
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
#pragma omp simd
        for (int j = 0; j < N; j++)
            dbias[j] += partial[chunk * N + j];
    }
}

static size_t gemm_workspace_bytes(const struct gemm *gemm, const struct device *dev) {
#ifdef PRECISION_BF16
    if (dev->matmul->backend == MATMUL_AMX)
        return amx_workspace_bytes(gemm, dev);
#endif
    return gemm_fp32_workspace_bytes(dev);
}

static void gemm_run(const struct gemm *gemm, float *dbias, void *workspace, struct device *dev) {
    if (gemm_has_few_rows(gemm)) {
        gemm_few_rows(gemm, dev);
        return;
    }
#ifdef PRECISION_BF16
    if (dev->matmul->backend == MATMUL_AMX) {
        gemm_amx(gemm, dbias, workspace, dev);
        return;
    }
#endif
    gemm_fp32(gemm, dev->matmul->backend, workspace, dev);
    if (dbias)
        dbias_add(dbias, gemm->a, gemm->depth, (int)gemm->rows, workspace, dev);
}

#endif

static size_t matmul_workspace_bytes(int64_t M, int N, int K, struct device *dev) {
    const struct gemm gemms[] = {gemm_forward(NULL, NULL, NULL, NULL, M, N, K),
                                 gemm_backward_input(NULL, NULL, NULL, M, N, K),
                                 gemm_backward_weight(NULL, NULL, NULL, M, N, K)};
    int64_t most = (int64_t)dbias_workspace_bytes(M, N);
    for (int i = 0; i < 3; i++)
        most = gemm_max(most, (int64_t)gemm_workspace_bytes(&gemms[i], dev));
    return (size_t)most;
}

static void matmul_forward(floatX *out, const floatX *in, const floatX *weight, const floatX *bias, int64_t M, int N,
                           int K, void *workspace, struct device *dev) {
    const struct gemm gemm = gemm_forward(out, in, weight, bias, M, N, K);
    gemm_run(&gemm, NULL, workspace, dev);
}

static void matmul_backward_input(floatX *din, const floatX *dout, const floatX *weight, int64_t M, int N, int K,
                                  void *workspace, struct device *dev) {
    const struct gemm gemm = gemm_backward_input(din, dout, weight, M, N, K);
    gemm_run(&gemm, NULL, workspace, dev);
}

static void matmul_backward_weight(float *dweight, float *dbias, const floatX *dout, const floatX *in, int64_t M, int N,
                                   int K, void *workspace, struct device *dev) {
    const struct gemm gemm = gemm_backward_weight(dweight, dout, in, M, N, K);
    gemm_run(&gemm, dbias, workspace, dev);
}
