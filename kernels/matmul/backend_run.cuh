// Calls a backend of matrix products, and holds what several backends use.
#pragma once
#include "kernels/device.cuh"         // struct device, floatX
#include "kernels/matmul/backend.cuh" // struct matmul_backend
#include "kernels/matmul/gemm.cuh"    // struct gemm
#include <omp.h>                      // omp_set_num_threads

// Computes a gemm as gemm_run does, but always by the backend, with OpenMP's threads set to the device's for the call.
static void gemm_run_backend(const struct gemm *gemm, float *dbias, void *workspace, const struct device *dev) {
    const int threads = omp_get_max_threads();
    omp_set_num_threads(dev->threads);
    dev->matmul->backend->run(gemm, dbias, workspace, dev);
    omp_set_num_threads(threads);
}

enum { DBIAS_ROWS = 256 }; // of a partial sum of dbias: constant, so that sums do not depend on the threads' number

// dbias (N) = the sums of the columns of dout (M, N), or += where `add`. workspace: dbias_workspace_bytes.
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
