// Defines what kernels/matmul/matmul.cuh and gemm.cuh declare: by cuBLASLt on a GPU, by a backend on the CPU.
#include "kernels/matmul/matmul.cuh"

#ifdef TARGET_CUDA
#include "kernels/matmul/tuning.cuh" // gemm_run, by cuBLASLt, and the choice of its algorithms
static size_t gemm_strided_workspace_bytes(const struct gemm *gemm, const struct device *dev) {
    return gemm_workspace_bytes(gemm, dev);
}
// Computes a gemm that has neither bias nor dbias. workspace: gemm_strided_workspace_bytes.
static void gemm_run_strided(const struct gemm *gemm, void *workspace, struct device *dev) {
    gemm_run(gemm, NULL, workspace, dev);
}
#else
#include "kernels/gpu_sizes.cuh"          // GPU_MATMUL_BYTES, gpu_dbias_bytes
#include "kernels/matmul/backend_run.cuh" // struct matmul_backend, gemm_run_backend
#include "kernels/matmul/fp32.cuh"        // gemm_fp32
#include "kernels/matmul/fp8.cuh"         // matmul_fp8, matmul_fp8_sum
#include "kernels/matmul/rows.cuh"        // gemm_few_rows
#include "kernels/matmul/thin.cuh"        // gemm_thin
#include "kernels/matmul/tiles.cuh"       // gemm_amx, gemm_dot
#include "runtime/machine/error.h"        // fail
#include <stdlib.h>                       // calloc, free
#if defined HAVE_ONEDNN && defined PRECISION_BF16
#include "kernels/matmul/onednn.cuh" // gemm_onednn
#endif

const struct matmul_backend matmul_backends[] = {
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
const int matmul_backends_count = sizeof matmul_backends / sizeof *matmul_backends;

struct matmul_library *matmul_create_backend(struct device *dev, const struct matmul_backend *backend) {
    struct matmul_library *library = (struct matmul_library *)calloc(1, sizeof *library);
    if (library == NULL)
        fail("no memory for the matmul library's handle");
    library->backend = backend;
    if (backend->open(library, dev))
        return library;
    free(library);
    return NULL;
}
struct matmul_library *matmul_create(struct device *dev) {
    struct matmul_library *library = NULL;
    for (int i = 0; i < matmul_backends_count && library == NULL; i++)
        library = matmul_create_backend(dev, &matmul_backends[i]);
    if (library && device_is_gpu(dev)) // only planned for
        snprintf(library->description, sizeof library->description, "cuBLASLt %s", FLOATX_NAME);
    return library;
}
void matmul_destroy(struct matmul_library *library) {
    if (library && library->backend->close)
        library->backend->close(library);
    free(library);
}
size_t gemm_workspace_bytes(const struct gemm *gemm, const struct device *dev) {
    if (device_is_gpu(dev))
        return GPU_MATMUL_BYTES;
    const int threads = omp_get_max_threads();
    omp_set_num_threads(dev->threads);
    const size_t bytes = dev->matmul->backend->workspace_bytes(gemm, dev);
    omp_set_num_threads(threads);
    return bytes;
}
size_t dbias_workspace_bytes(int64_t M, int N, const struct device *dev) {
    if (device_is_gpu(dev))
        return gpu_dbias_bytes(M, N);
    return (size_t)((M + DBIAS_ROWS - 1) / DBIAS_ROWS) * (size_t)N * sizeof(float);
}
const char *matmul_describe(const struct matmul_library *library) { return library->description; }

void gemm_run(const struct gemm *gemm, float *dbias, void *workspace, struct device *dev) {
    if (gemm_has_few_rows(gemm))
        gemm_few_rows(gemm, dev);
    else
        gemm_run_backend(gemm, dbias, workspace, dev);
}
bool gemm_applies_gelu(const struct gemm *gemm, struct device *dev) { return false; }
// Whether gemm_run_strided computes a gemm by gemm_thin. The caller sees to it that there is no bias and no dbias.
static bool gemm_takes_thin(const struct gemm *gemm, const struct device *dev) {
    return gemm_is_thin(gemm) && !gemm_has_few_rows(gemm) && !dev->matmul->backend->takes_thin;
}
static size_t gemm_strided_workspace_bytes(const struct gemm *gemm, const struct device *dev) {
    return gemm_takes_thin(gemm, dev) && !device_is_gpu(dev) ? thin_workspace_bytes(gemm)
                                                             : gemm_workspace_bytes(gemm, dev);
}
// Computes a gemm without bias and dbias, by gemm_thin or gemm_run. workspace: gemm_strided_workspace_bytes.
static void gemm_run_strided(const struct gemm *gemm, void *workspace, struct device *dev) {
    if (gemm_takes_thin(gemm, dev))
        gemm_thin(gemm, workspace, dev);
    else
        gemm_run(gemm, NULL, workspace, dev);
}
#endif

size_t matmul_workspace_bytes(int64_t M, int N, int K, struct device *dev) {
    floatX out, bias = {0}; // stand for buffers that are not there yet
    float sum;
    const struct gemm gemms[] = {gemm_forward(&out, NULL, NULL, &bias, M, N, K),
                                 gemm_forward(&out, NULL, NULL, NULL, M, N, K),
                                 gemm_backward_input(&out, K, NULL, N, NULL, M, N, K, false),
                                 gemm_backward_weight(&sum, NULL, N, NULL, K, M, N, K, false),
                                 gemm_backward_weight(&sum, NULL, N, NULL, K, M, N, K, true)};
    int64_t most = (int64_t)dbias_workspace_bytes(M, N, dev);
    for (size_t i = 0; i < sizeof gemms / sizeof *gemms; i++)
        most = gemm_max(most, (int64_t)gemm_workspace_bytes(&gemms[i], dev));
    return (size_t)most;
}
size_t matmul_strided_workspace_bytes(int64_t ld_in, int64_t ld_out, int64_t M, int N, int K, struct device *dev) {
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

void matmul_forward(floatX *out, const floatX *in, const floatX *weight, const floatX *bias, int64_t M, int N, int K,
                    void *workspace, struct device *dev) {
    const struct gemm gemm = gemm_forward(out, in, weight, bias, M, N, K);
    gemm_run(&gemm, NULL, workspace, dev);
}

void matmul_backward_input(floatX *din, const floatX *dout, const floatX *weight, int64_t M, int N, int K,
                           void *workspace, struct device *dev) {
    const struct gemm gemm = gemm_backward_input(din, K, dout, N, weight, M, N, K, false);
    gemm_run(&gemm, NULL, workspace, dev);
}

bool matmul_backward_input_gelu(floatX *din, const floatX *dout, const floatX *weight, const floatX *pre, bool sums,
                                int64_t M, int N, int K, void *workspace, struct device *dev) {
    struct gemm gemm = gemm_backward_input(din, K, dout, N, weight, M, N, K, false);
    gemm.gelu = pre;
    gemm.gelu_sums = sums;
    gemm_run(&gemm, NULL, workspace, dev);
    return gemm_applies_gelu(&gemm, dev);
}

void matmul_backward_weight(float *dweight, float *dbias, const floatX *dout, const floatX *in, int64_t M, int N, int K,
                            bool add, void *workspace, struct device *dev) {
    const struct gemm gemm = gemm_backward_weight(dweight, dout, N, in, K, M, N, K, add);
    gemm_run(&gemm, dbias, workspace, dev);
}

void matmul_forward_strided(floatX *out, int64_t ld_out, const floatX *in, int64_t ld_in, const floatX *weight,
                            int64_t M, int N, int K, bool add, void *workspace, struct device *dev) {
    const struct gemm gemm = gemm_forward_strided(out, ld_out, in, ld_in, weight, M, N, K, add);
    gemm_run_strided(&gemm, workspace, dev);
}

void matmul_backward_input_strided(floatX *din, int64_t ld_din, const floatX *dout, int64_t ld_dout,
                                   const floatX *weight, int64_t M, int N, int K, bool add, void *workspace,
                                   struct device *dev) {
    const struct gemm gemm = gemm_backward_input(din, ld_din, dout, ld_dout, weight, M, N, K, add);
    gemm_run_strided(&gemm, workspace, dev);
}

void matmul_backward_weight_strided(float *dweight, const floatX *dout, int64_t ld_dout, const floatX *in,
                                    int64_t ld_in, int64_t M, int N, int K, bool add, void *workspace,
                                    struct device *dev) {
    const struct gemm gemm = gemm_backward_weight(dweight, dout, ld_dout, in, ld_in, M, N, K, add);
    gemm_run_strided(&gemm, workspace, dev);
}
