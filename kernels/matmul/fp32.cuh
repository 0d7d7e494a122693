// Matrix products at fp32 rates: by oneDNN, OpenBLAS or plain C. bf16 operands are converted block by block.
#pragma once
#include "kernels/device.cuh"             // struct device, floatX
#include "kernels/matmul/backend_run.cuh" // struct matmul_library, dbias_sums
#include "kernels/matmul/plain.cuh"       // sgemm_plain
#include "runtime/machine/error.h"        // fail
#include <stdio.h>                        // snprintf
#ifdef HAVE_ONEDNN
#include <oneapi/dnnl/dnnl.h> // dnnl_sgemm
#endif
#ifdef HAVE_OPENBLAS
#include <cblas.h> // cblas_sgemm
#endif

#ifdef HAVE_ONEDNN
// Multiplies as sgemm_function says, by oneDNN's BLAS function, without a workspace; ends the program where oneDNN
// refuses. No fp32 primitive of oneDNN's is faster by more than a few percent, and its matmul with plain tags is far
// slower in places. GFLOP/s of one AVX-512 core whose FMA rate is 152, 512 tokens, all in turn, best of each; "packed"
// is a matmul whose second operand is reordered to the format it asks for at each call, "inner" an inner product's
// backward; the plain loops reach 70 to 85:
//    K x N       forward                         dX                              dW
//                sgemm matmul packed OpenBLAS    sgemm matmul packed OpenBLAS    sgemm matmul packed inner OpenBLAS
//    768x2304      120    114    103      114      104     57    108      107      122     84    113   122      117
//    768x768       121    114    106      113      110     92    113      112      116    108    109   114      119
//    768x3072      123    116    105      117      104     54    110      109      125     87    115   124      116
//    3072x768      117    122    107      112      119     63    111      114      124     53    109   123      122
//    768x50304     122    117    106      118      110     47    101      112      125    114    120   129      122
static void sgemm_onednn(bool a_transposed, bool b_transposed, int64_t rows, int64_t cols, int64_t depth,
                         const float *a, int64_t lda, const float *b, int64_t ldb, bool add, float *c, int64_t ldc,
                         void *workspace, const struct device *dev) {
    if (dnnl_sgemm(a_transposed ? 'T' : 'N', b_transposed ? 'T' : 'N', rows, cols, depth, 1.0f, a, lda, b, ldb,
                   add ? 1.0f : 0.0f, c, ldc) != dnnl_success)
        fail("oneDNN refused a matrix product of %lld x %lld x %lld", (long long)rows, (long long)cols,
             (long long)depth);
}
static bool onednn_fp32_open(struct matmul_library *library, const struct device *dev) {
    const dnnl_version_t *const version = dnnl_version();
    snprintf(library->description, sizeof library->description, "oneDNN %d.%d.%d fp32", version->major, version->minor,
             version->patch);
    return true;
}
#endif

#ifdef HAVE_OPENBLAS
static void sgemm_openblas(bool a_transposed, bool b_transposed, int64_t rows, int64_t cols, int64_t depth,
                           const float *a, int64_t lda, const float *b, int64_t ldb, bool add, float *c, int64_t ldc,
                           void *workspace, const struct device *dev) {
    cblas_sgemm(CblasRowMajor, a_transposed ? CblasTrans : CblasNoTrans, b_transposed ? CblasTrans : CblasNoTrans,
                (blasint)rows, (blasint)cols, (blasint)depth, 1.0f, a, (blasint)lda, b, (blasint)ldb, add ? 1.0f : 0.0f,
                c, (blasint)ldc);
}
static bool openblas_open(struct matmul_library *library, const struct device *dev) {
    openblas_set_num_threads(dev->threads);
    snprintf(library->description, sizeof library->description, "OpenBLAS fp32");
    return true;
}
#endif

static bool plain_open(struct matmul_library *library, const struct device *dev) {
    snprintf(library->description, sizeof library->description, "plain C fp32");
    return true;
}

#ifdef PRECISION_BF16

// bf16 operands become fp32 in blocks of at most this many rows and columns, three of 4 MB. oneDNN's own bf16 products
// run at a quarter of the fp32 rate where the CPU has no bf16 instructions: 24 against 96 GFLOP/s by this way.
enum { FP32_BLOCK = 1024 };

static size_t gemm_fp32_workspace_bytes(const struct gemm *g, const struct device *dev) {
    return sizeof(float) * 3 * FP32_BLOCK * FP32_BLOCK + sgemm_plain_workspace_bytes(dev);
}

// out (rows, cols), packed, = in (rows, cols), whose rows are ld apart, as fp32
static void floats_from_block(float *out, const floatX *in, int64_t ld, int64_t rows, int64_t cols,
                              const struct device *dev) {
#pragma omp parallel for schedule(static) num_threads(dev->threads)
    for (int64_t i = 0; i < rows; i++) {
#pragma omp simd
        for (int64_t j = 0; j < cols; j++)
            out[i * cols + j] = to_float(in[i * ld + j]);
    }
}

// Writes `in` (rows, cols), packed, plus bias (cols) unless NULL, to out, ld apart; where `add`, adds it without bias.
static void block_from_floats(floatX *out, const float *in, const floatX *bias, bool add, int64_t ld, int64_t rows,
                              int64_t cols, const struct device *dev) {
#pragma omp parallel for schedule(static) num_threads(dev->threads)
    for (int64_t i = 0; i < rows; i++) {
#pragma omp simd
        for (int64_t j = 0; j < cols; j++)
            out[i * ld + j] = to_floatX(in[i * cols + j] + (add    ? to_float(out[i * ld + j])
                                                            : bias ? to_float(bias[j])
                                                                   : 0.0f));
    }
}

// Computes a gemm by the backend's sgemm in fp32 blocks. dbias (g->rows), unless NULL, = a's column sums as stored,
// without gaps; += where g->add. workspace: gemm_fp32_workspace_bytes or, with dbias, dbias_workspace_bytes if more.
static void gemm_fp32(const struct gemm *g, float *dbias, void *workspace, const struct device *dev) {
    sgemm_function *const sgemm = dev->matmul->backend->sgemm;
    float *a = (float *)workspace, *b = a + FP32_BLOCK * FP32_BLOCK, *c = b + FP32_BLOCK * FP32_BLOCK;
    void *rest = c + FP32_BLOCK * FP32_BLOCK;
    for (int64_t i = 0; i < g->rows; i += FP32_BLOCK)
        for (int64_t j = 0; j < g->cols; j += FP32_BLOCK) {
            const int64_t rows = gemm_min(FP32_BLOCK, g->rows - i), cols = gemm_min(FP32_BLOCK, g->cols - j);
            for (int64_t k = 0; k < g->depth; k += FP32_BLOCK) {
                const int64_t depth = gemm_min(FP32_BLOCK, g->depth - k);
                if (g->a.transposed)
                    floats_from_block(a, g->a.data + k * g->a.ld + i, g->a.ld, depth, rows, dev);
                else
                    floats_from_block(a, g->a.data + i * g->a.ld + k, g->a.ld, rows, depth, dev);
                if (g->b.transposed)
                    floats_from_block(b, g->b.data + j * g->b.ld + k, g->b.ld, cols, depth, dev);
                else
                    floats_from_block(b, g->b.data + k * g->b.ld + j, g->b.ld, depth, cols, dev);
                float *target = g->sum ? g->sum + i * g->ld_out + j : c;
                sgemm(g->a.transposed, g->b.transposed, rows, cols, depth, a, g->a.transposed ? rows : depth, b,
                      g->b.transposed ? depth : cols, (g->sum && g->add) || k > 0, target, g->sum ? g->ld_out : cols,
                      rest, dev);
            }
            if (g->out)
                block_from_floats(g->out + i * g->ld_out + j, c, g->bias ? g->bias + j : NULL, g->add, g->ld_out, rows,
                                  cols, dev);
        }
    if (dbias)
        dbias_sums(dbias, g->a.data, g->depth, (int)g->rows, g->add, workspace, dev);
}

#else

static size_t gemm_fp32_workspace_bytes(const struct gemm *g, const struct device *dev) {
    return sgemm_plain_workspace_bytes(dev);
}

// Computes a gemm by the backend's sgemm. dbias (g->rows), unless NULL, = the column sums of a as stored, without gaps,
// or += where g->add. workspace: gemm_fp32_workspace_bytes or, with dbias, dbias_workspace_bytes if more.
static void gemm_fp32(const struct gemm *g, float *dbias, void *workspace, const struct device *dev) {
    sgemm_function *const sgemm = dev->matmul->backend->sgemm;
    if (g->bias) { // the product is then added onto the bias: cheaper than a pass over the result
#pragma omp parallel for schedule(static) num_threads(dev->threads)
        for (int64_t i = 0; i < g->rows; i++)
            memcpy(g->out + i * g->ld_out, g->bias, (size_t)g->cols * sizeof *g->bias);
    }
    sgemm(g->a.transposed, g->b.transposed, g->rows, g->cols, g->depth, g->a.data, g->a.ld, g->b.data, g->b.ld,
          g->add || g->bias, g->sum ? g->sum : g->out, g->ld_out, workspace, dev);
    if (dbias)
        dbias_sums(dbias, g->a.data, g->depth, (int)g->rows, g->add, workspace, dev);
}

#endif
