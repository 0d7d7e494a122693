// A backend computes the cpu target's matrix products: own kernels, or a library's (kernels/matmul/matmul.cu's table).
#pragma once
#include "kernels/device.cuh"      // struct device, floatX
#include "kernels/matmul/gemm.cuh" // struct gemm
#include <sys/cdefs.h>             // __BEGIN_DECLS

// C (rows, cols) = A (rows, depth) B (depth, cols), plus C when `add`. A transposed operand is stored the other way
// round: A (depth, rows), B (cols, depth). ld*: elements from row to row, as stored. workspace: for sgemm_plain.
typedef void sgemm_function(bool a_transposed, bool b_transposed, int64_t rows, int64_t cols, int64_t depth,
                            const float *a, int64_t lda, const float *b, int64_t ldb, bool add, float *c, int64_t ldc,
                            void *workspace, const struct device *dev);

struct matmul_backend {
    const char *name;               // for tests and benchmarks
    bool same_bits_for_any_threads; // else the bits are the same for the same number of threads
    bool takes_thin;                // products that gemm_thin computes for the other backends
    // Returns whether this machine has the backend. Writes a description and makes a state for close (NULL: none).
    bool (*open)(struct matmul_library *library, const struct device *dev);
    void (*close)(struct matmul_library *library);
    // gemm_workspace_bytes and gemm_run (kernels/matmul/gemm.cuh), called with the device's number of OpenMP threads.
    size_t (*workspace_bytes)(const struct gemm *gemm, const struct device *dev);
    void (*run)(const struct gemm *gemm, float *dbias, void *workspace, const struct device *dev);
    sgemm_function *sgemm; // by which gemm_fp32 multiplies; NULL: the backend does not call gemm_fp32
};
struct matmul_library {
    const struct matmul_backend *backend;
    void *state; // of the backend
    char description[64];
};
// The backends that this build has, the fastest first; the last is on every machine.
extern const struct matmul_backend matmul_backends[]; // (matmul_backends_count)
extern const int matmul_backends_count;
__BEGIN_DECLS
// Creates a library as matmul_create does, by one backend. Returns NULL where this machine does not have the backend.
struct matmul_library *matmul_create_backend(struct device *dev, const struct matmul_backend *backend);
__END_DECLS
