// A backend computes the cpu target's matrix products: own kernels, or a library's. kernels/matmul.cuh has the table of
// them; here are the type of its rows, and what several backends use.
#pragma once
#include "kernels/device.cuh"      // struct device, floatX
#include "kernels/matmul_gemm.cuh" // struct gemm
#include <omp.h>                   // omp_set_num_threads

// C (rows, cols) = A (rows, depth) B (depth, cols), plus C when `add`. A transposed operand is stored the other way
// round: A (depth, rows), B (cols, depth).
typedef void sgemm_function(bool a_transposed, bool b_transposed, int64_t rows, int64_t cols, int64_t depth,
                            const float *a, int64_t lda, const float *b, int64_t ldb, bool add, float *c, int64_t ldc,
                            void *workspace, const struct device *dev);

struct matmul_backend {
    const char *name;               // for tests and benchmarks
    bool same_bits_for_any_threads; // else the bits are the same for the same number of threads
    bool takes_thin;                // products that gemm_thin computes for the other backends
    // Returns whether this machine has the backend. Writes the library's description and makes its state, which close
    // frees; close is NULL where there is no state.
    bool (*open)(struct matmul_library *library, const struct device *dev);
    void (*close)(struct matmul_library *library);
    // gemm_workspace_bytes and gemm_run (kernels/matmul_gemm.cuh), called with OpenMP's number of threads set to the
    // device's.
    size_t (*workspace_bytes)(const struct gemm *gemm, const struct device *dev);
    void (*run)(const struct gemm *gemm, float *dbias, void *workspace, const struct device *dev);
    sgemm_function *sgemm; // by which gemm_fp32 multiplies; NULL: the backend does not call gemm_fp32
};
struct matmul_library {
    const struct matmul_backend *backend;
    void *state; // of the backend
    char description[64];
};

// The libraries take their number of threads from OpenMP's, which is restored after each call.
static size_t gemm_workspace_bytes(const struct gemm *gemm, const struct device *dev) {
    const int threads = omp_get_max_threads();
    omp_set_num_threads(dev->threads);
    const size_t bytes = dev->matmul->backend->workspace_bytes(gemm, dev);
    omp_set_num_threads(threads);
    return bytes;
}
static void gemm_run_backend(const struct gemm *gemm, float *dbias, void *workspace, const struct device *dev) {
    const int threads = omp_get_max_threads();
    omp_set_num_threads(dev->threads);
    dev->matmul->backend->run(gemm, dbias, workspace, dev);
    omp_set_num_threads(threads);
}

// Rows of dout that one partial sum of dbias covers: a constant, so that sums do not depend on the number of threads.
enum { DBIAS_ROWS = 256 };

static size_t dbias_workspace_bytes(int64_t M, int N) {
    return (size_t)((M + DBIAS_ROWS - 1) / DBIAS_ROWS) * (size_t)N * sizeof(float);
}

// dbias = column sums of dout (M, N), or += where `add`
static void dbias_sums(float *dbias, const floatX *dout, int64_t M, int N, bool add, void *workspace,
                       const struct device *dev) {
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
            dbias[j] = (add || chunk > 0 ? dbias[j] : 0) + partial[chunk * N + j];
    }
}
