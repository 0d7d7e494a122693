// Stand-in for the part of cuBLASLt that kernels/matmul_cublaslt.cuh uses: the same names and types, products by plain
// loops on host memory.
//
// It is stricter than the library, and ends the program with status 3 at
// - descriptors that were not initialised, attributes of a wrong size or of no use here,
// - layouts that do not fit each other or the operation, leading dimensions that are too small,
// - an algorithm used for anything but what the heuristics were asked for: other shapes, types, epilogue,
// - pointers aligned to less than the preference said, a workspace that is too small or not aligned,
// - an output that overlaps an operand, the bias or the workspace,
// - reductions that round the parts of a sum to the output's type, which our results would show.
// It fills both ends of the workspace with NaN. EMU_CUBLASLT_LEAST is the least number of rows, columns and depth that its
// heuristics have an algorithm for, 1 if unset.
#pragma once
#include <cuda_runtime.h> // cudaStream_t, emu_enqueue, emu_check_range, emu_bf16
#include <stdint.h>       // uint64_t
#include <stdio.h>        // fprintf
#include <stdlib.h>       // malloc, _Exit
#include <string.h>       // memcpy, memset

#define CUBLAS_VERSION 130000

typedef enum {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_NOT_INITIALIZED = 1,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_EXECUTION_FAILED = 13,
    CUBLAS_STATUS_NOT_SUPPORTED = 15
} cublasStatus_t;
typedef enum { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 } cublasOperation_t;
typedef enum { CUBLAS_COMPUTE_32F = 68 } cublasComputeType_t;
typedef enum { CUDA_R_32F = 0, CUDA_R_16BF = 14 } cudaDataType_t;
typedef enum { CUBLASLT_EPILOGUE_DEFAULT = 1, CUBLASLT_EPILOGUE_BIAS = 4 } cublasLtEpilogue_t;
typedef enum {
    CUBLASLT_REDUCTION_SCHEME_NONE = 0,
    CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2
} cublasLtReductionScheme_t;
typedef enum {
    CUBLASLT_MATMUL_DESC_TRANSA = 3,
    CUBLASLT_MATMUL_DESC_TRANSB = 4,
    CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
    CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8
} cublasLtMatmulDescAttributes_t;
typedef enum {
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
    CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8
} cublasLtMatmulPreferenceAttributes_t;

enum { EMU_LT_MADE = 0x6c740001 }; // what an initialised descriptor begins with

typedef struct {
    int made;
    cudaDataType_t type;
    uint64_t rows, cols;
    int64_t ld;
} cublasLtMatrixLayoutOpaque_t;
typedef struct {
    int made;
    cublasOperation_t transa, transb;
    cublasLtEpilogue_t epilogue;
    const void *bias;
} cublasLtMatmulDescOpaque_t;
typedef struct {
    int made;
    uint64_t workspace_bytes;
    uint32_t reductions, alignment[4]; // of A, B, C, D
} cublasLtMatmulPreferenceOpaque_t;
typedef struct { // what the heuristics were asked for
    int made;
    cublasLtMatmulDescOpaque_t operation;
    cublasLtMatrixLayoutOpaque_t layouts[4];
    uint64_t workspace_bytes;
    uint32_t alignment[4], bias_alignment;
} cublasLtMatmulAlgo_t;
typedef cublasLtMatrixLayoutOpaque_t *cublasLtMatrixLayout_t;
typedef cublasLtMatmulDescOpaque_t *cublasLtMatmulDesc_t;
typedef cublasLtMatmulPreferenceOpaque_t *cublasLtMatmulPreference_t;
typedef struct {
    cublasLtMatmulAlgo_t algo;
    size_t workspaceSize;
    cublasStatus_t state;
} cublasLtMatmulHeuristicResult_t;
typedef struct emu_lt_handle {
    int made;
} * cublasLtHandle_t;

#define EMU_LT_DEMAND(condition, ...)                                                                                  \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "emu: %s: ", __func__);                                                                    \
            fprintf(stderr, __VA_ARGS__);                                                                              \
            fprintf(stderr, "\n");                                                                                     \
            fflush(stderr);                                                                                            \
            _Exit(3);                                                                                                  \
        }                                                                                                              \
    } while (0)

static inline const char *cublasLtGetStatusName(cublasStatus_t status) {
    return status == CUBLAS_STATUS_SUCCESS         ? "CUBLAS_STATUS_SUCCESS"
           : status == CUBLAS_STATUS_NOT_SUPPORTED ? "CUBLAS_STATUS_NOT_SUPPORTED"
                                                   : "CUBLAS_STATUS_EXECUTION_FAILED";
}
static inline size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
static inline cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    EMU_LT_DEMAND(emu_forbid_while_recording() == cudaSuccess, "a handle is made while a graph is recorded");
    *handle = (cublasLtHandle_t)malloc(sizeof **handle);
    (*handle)->made = EMU_LT_MADE;
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    EMU_LT_DEMAND(handle && handle->made == EMU_LT_MADE, "no handle");
    handle->made = 0;
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

// ---- descriptors ----

static inline cublasStatus_t cublasLtMatmulDescInit(cublasLtMatmulDesc_t operation, cublasComputeType_t compute,
                                                    cudaDataType_t scale) {
    EMU_LT_DEMAND(compute == CUBLAS_COMPUTE_32F && scale == CUDA_R_32F, "only fp32 sums and scales are modelled");
    memset(operation, 0, sizeof *operation);
    operation->made = EMU_LT_MADE;
    operation->epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation,
                                                            cublasLtMatmulDescAttributes_t attribute, const void *value,
                                                            size_t bytes) {
    EMU_LT_DEMAND(operation->made == EMU_LT_MADE, "the descriptor was not initialised");
    EMU_LT_DEMAND(bytes == (attribute == CUBLASLT_MATMUL_DESC_BIAS_POINTER ? 8 : 4), "attribute %d has not %zu bytes",
                  (int)attribute, bytes);
    void *const to = attribute == CUBLASLT_MATMUL_DESC_TRANSA     ? (void *)&operation->transa
                     : attribute == CUBLASLT_MATMUL_DESC_TRANSB   ? (void *)&operation->transb
                     : attribute == CUBLASLT_MATMUL_DESC_EPILOGUE ? (void *)&operation->epilogue
                                                                  : (void *)&operation->bias;
    memcpy(to, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatrixLayoutInit(cublasLtMatrixLayout_t layout, cudaDataType_t type, uint64_t rows,
                                                      uint64_t cols, int64_t ld) {
    EMU_LT_DEMAND(type == CUDA_R_32F || type == CUDA_R_16BF, "type %d is not modelled", (int)type);
    EMU_LT_DEMAND(rows > 0 && cols > 0, "a matrix of %llu x %llu", (unsigned long long)rows, (unsigned long long)cols);
    EMU_LT_DEMAND(ld >= (int64_t)rows, "columns of %llu elements can't begin %lld apart", (unsigned long long)rows,
                  (long long)ld);
    memset(layout, 0, sizeof *layout);
    layout->made = EMU_LT_MADE;
    layout->type = type;
    layout->rows = rows;
    layout->cols = cols;
    layout->ld = ld;
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulPreferenceInit(cublasLtMatmulPreference_t preference) {
    memset(preference, 0, sizeof *preference);
    preference->made = EMU_LT_MADE;
    preference->reductions = 7;
    for (int i = 0; i < 4; i++)
        preference->alignment[i] = 256;
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                                  cublasLtMatmulPreferenceAttributes_t attribute,
                                                                  const void *value, size_t bytes) {
    EMU_LT_DEMAND(preference->made == EMU_LT_MADE, "the preference was not initialised");
    EMU_LT_DEMAND(bytes == (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES ? 8 : 4),
                  "attribute %d has not %zu bytes", (int)attribute, bytes);
    if (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES)
        memcpy(&preference->workspace_bytes, value, bytes);
    else if (attribute == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK)
        memcpy(&preference->reductions, value, bytes);
    else
        memcpy(&preference->alignment[attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

// ---- the choice of an algorithm ----

static inline uint32_t emu_lt_alignment(const void *pointer) {
    const uint32_t bits = (uint32_t)(uintptr_t)pointer | 256u;
    return bits & (0u - bits);
}
static inline void emu_lt_check_layouts(const cublasLtMatmulDescOpaque_t *operation,
                                        cublasLtMatrixLayout_t const layouts[4]) {
    const cublasLtMatrixLayoutOpaque_t *a = layouts[0], *b = layouts[1], *c = layouts[2], *d = layouts[3];
    for (int i = 0; i < 4; i++)
        EMU_LT_DEMAND(layouts[i]->made == EMU_LT_MADE, "layout %c was not initialised", "ABCD"[i]);
    EMU_LT_DEMAND(operation->made == EMU_LT_MADE, "the descriptor was not initialised");
    const bool ta = operation->transa == CUBLAS_OP_T, tb = operation->transb == CUBLAS_OP_T;
    const uint64_t m = ta ? a->cols : a->rows, k = ta ? a->rows : a->cols;
    const uint64_t n = tb ? b->rows : b->cols, k_of_b = tb ? b->cols : b->rows;
    EMU_LT_DEMAND(m == d->rows && n == d->cols && k == k_of_b, "(%llu x %llu) by (%llu x %llu) is not (%llu x %llu)",
                  (unsigned long long)m, (unsigned long long)k, (unsigned long long)k_of_b, (unsigned long long)n,
                  (unsigned long long)d->rows, (unsigned long long)d->cols);
    EMU_LT_DEMAND(memcmp(c, d, sizeof *c) == 0, "C and D differ in layout");
    EMU_LT_DEMAND(a->type == b->type && (d->type == a->type || d->type == CUDA_R_32F), "types %d by %d to %d",
                  (int)a->type, (int)b->type, (int)d->type);
}

// One algorithm for everything that is large enough, which takes scratch memory as one that splits the depth would.
static inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                                            cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                            cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                                            cublasLtMatmulPreference_t preference, int asked,
                                                            cublasLtMatmulHeuristicResult_t results[], int *found) {
    cublasLtMatrixLayout_t const layouts[4] = {a, b, c, d};
    EMU_LT_DEMAND(handle && handle->made == EMU_LT_MADE, "no handle");
    EMU_LT_DEMAND(preference->made == EMU_LT_MADE, "the preference was not initialised");
    EMU_LT_DEMAND(asked >= 1, "%d algorithms asked for", asked);
    EMU_LT_DEMAND((preference->reductions & ~(uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) == 0,
                  "a reduction that rounds the parts of a sum is allowed (mask %u)", preference->reductions);
    emu_lt_check_layouts(operation, layouts);
    EMU_LT_DEMAND((operation->epilogue == CUBLASLT_EPILOGUE_BIAS) == (operation->bias != NULL),
                  "epilogue %d with bias pointer %p", (int)operation->epilogue, operation->bias);
    const char *text = getenv("EMU_CUBLASLT_LEAST");
    const uint64_t least = text ? strtoull(text, NULL, 0) : 1;
    *found = 0;
    if (a->rows < least || a->cols < least || d->cols < least)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    cublasLtMatmulHeuristicResult_t *result = &results[0];
    memset(result, 0, sizeof *result);
    result->algo.made = EMU_LT_MADE;
    result->algo.operation = *operation;
    result->algo.operation.bias = NULL; // another may come with each call
    for (int i = 0; i < 4; i++) {
        result->algo.layouts[i] = *layouts[i];
        result->algo.alignment[i] = preference->alignment[i];
    }
    result->algo.bias_alignment = operation->bias ? emu_lt_alignment(operation->bias) : 1;
    result->algo.workspace_bytes = preference->workspace_bytes;
    result->workspaceSize = (size_t)preference->workspace_bytes;
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}

// ---- the product ----

static inline float emu_lt_load(const void *x, int64_t i, cudaDataType_t type) {
    return type == CUDA_R_32F ? ((const float *)x)[i] : emu_bf16(((const uint16_t *)x)[i]);
}
static inline void emu_lt_store(void *x, int64_t i, cudaDataType_t type, float value) {
    if (type == CUDA_R_32F)
        ((float *)x)[i] = value;
    else
        ((uint16_t *)x)[i] = emu_to_bf16(value);
}

// Blocks of EMU_LT_M x EMU_LT_N of D, from operands that are packed as (block, depth, EMU_LT_M or EMU_LT_N).
enum { EMU_LT_M = 32, EMU_LT_N = 8 };

// op(A)'s lines are its rows, op(B)'s its columns; `along`: a line's elements follow each other in memory.
static inline float *emu_lt_pack(const void *x, const cublasLtMatrixLayoutOpaque_t *layout, bool along, int64_t lines,
                                 int64_t depth, int width) {
    const int64_t blocks = (lines + width - 1) / width;
    float *packed = (float *)malloc((size_t)(blocks * depth * width) * sizeof *packed);
    EMU_LT_DEMAND(packed, "no memory to pack %lld x %lld", (long long)lines, (long long)depth);
#pragma omp parallel for if (lines * depth > 10000)
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t k = 0; k < depth; k++)
            for (int i = 0; i < width; i++) {
                const int64_t line = block * width + i, at = along ? line * layout->ld + k : k * layout->ld + line;
                packed[(block * depth + k) * width + i] = line < lines ? emu_lt_load(x, at, layout->type) : 0;
            }
    return packed;
}

// sums (EMU_LT_N, EMU_LT_M) = the block's product, each summed in the order of depth.
static inline void emu_lt_block(float *sums, const float *a, const float *b, int64_t depth) {
    float sum[EMU_LT_N][EMU_LT_M] = {{0}};
    for (int64_t k = 0; k < depth; k++)
        for (int j = 0; j < EMU_LT_N; j++) {
            const float factor = b[k * EMU_LT_N + j];
#pragma omp simd
            for (int i = 0; i < EMU_LT_M; i++)
                sum[j][i] += a[k * EMU_LT_M + i] * factor;
        }
    memcpy(sums, sum, sizeof sum);
}

// The bytes of a matrix, from its first element to its last.
static inline size_t emu_lt_extent(const cublasLtMatrixLayoutOpaque_t *layout) {
    const uint64_t elements = (layout->cols - 1) * (uint64_t)layout->ld + layout->rows;
    return (size_t)elements * (layout->type == CUDA_R_32F ? 4 : 2);
}
static inline bool emu_lt_overlap(const void *x, size_t x_bytes, const void *y, size_t y_bytes) {
    return (const char *)x < (const char *)y + y_bytes && (const char *)y < (const char *)x + x_bytes;
}

static inline void emu_lt_check_call(const cublasLtMatmulDescOpaque_t *operation,
                                     cublasLtMatrixLayout_t const layouts[4], const void *const pointers[4],
                                     const cublasLtMatmulAlgo_t *algo, const void *workspace, size_t workspace_bytes) {
    EMU_LT_DEMAND(algo && algo->made == EMU_LT_MADE, "no algorithm");
    emu_lt_check_layouts(operation, layouts);
    cublasLtMatmulDescOpaque_t asked = *operation;
    asked.bias = NULL;
    EMU_LT_DEMAND(asked.transa == algo->operation.transa && asked.transb == algo->operation.transb &&
                      asked.epilogue == algo->operation.epilogue,
                  "the algorithm is for another operation");
    for (int i = 0; i < 4; i++) {
        EMU_LT_DEMAND(memcmp(layouts[i], &algo->layouts[i], sizeof *layouts[i]) == 0,
                      "the algorithm is for another layout of %c", "ABCD"[i]);
        EMU_LT_DEMAND(pointers[i] && emu_lt_alignment(pointers[i]) >= algo->alignment[i],
                      "%c is aligned to %u bytes, the algorithm was asked for with %u", "ABCD"[i],
                      emu_lt_alignment(pointers[i]), algo -> alignment[i]);
    }
    EMU_LT_DEMAND(workspace_bytes >= algo->workspace_bytes, "a workspace of %zu bytes, the algorithm needs %llu",
                  workspace_bytes, (unsigned long long)algo->workspace_bytes);
    EMU_LT_DEMAND(workspace_bytes == 0 || (workspace && (uintptr_t)workspace % 256 == 0),
                  "the workspace %p is not aligned to 256 bytes", workspace);
    const size_t d_bytes = emu_lt_extent(layouts[3]);
    for (int i = 0; i < 2; i++)
        EMU_LT_DEMAND(!emu_lt_overlap(pointers[3], d_bytes, pointers[i], emu_lt_extent(layouts[i])) &&
                          !emu_lt_overlap(workspace, workspace_bytes, pointers[i], emu_lt_extent(layouts[i])),
                      "%c overlaps D or the workspace", "AB"[i]);
    EMU_LT_DEMAND(!emu_lt_overlap(workspace, workspace_bytes, pointers[3], d_bytes), "D overlaps the workspace");
    if (operation->epilogue == CUBLASLT_EPILOGUE_BIAS) {
        const size_t bias_bytes = layouts[3]->rows * (layouts[3]->type == CUDA_R_32F ? 4 : 2);
        EMU_LT_DEMAND(operation->bias && emu_lt_alignment(operation->bias) >= algo->bias_alignment,
                      "the bias %p is aligned to less than %u bytes", operation->bias, algo->bias_alignment);
        EMU_LT_DEMAND(!emu_lt_overlap(operation->bias, bias_bytes, pointers[3], d_bytes) &&
                          !emu_lt_overlap(operation->bias, bias_bytes, workspace, workspace_bytes),
                      "the bias overlaps D or the workspace");
    }
}

// A product that waits for its turn on the stream; the caller may change its descriptors meanwhile.
struct emu_lt_product {
    cublasLtMatmulDescOpaque_t operation;
    cublasLtMatrixLayoutOpaque_t a_layout, b_layout, d_layout;
    const void *a, *b;
    void *d, *workspace;
    size_t workspace_bytes;
    bool keep; // what D holds
};
static inline void emu_lt_run(const struct emu_lt_product *x) {
    emu_check_range(x->a, emu_lt_extent(&x->a_layout), "reads");
    emu_check_range(x->b, emu_lt_extent(&x->b_layout), "reads");
    emu_check_range(x->d, emu_lt_extent(&x->d_layout), "writes");
    emu_check_range(x->workspace, x->workspace_bytes, "writes");
    if (x->operation.bias)
        emu_check_range(x->operation.bias, x->d_layout.rows * (x->d_layout.type == CUDA_R_32F ? 4 : 2), "reads");
    const size_t end_bytes = x->workspace_bytes < 4096 ? x->workspace_bytes : 4096;
    if (end_bytes > 0) {
        memset(x->workspace, 0xff, end_bytes);
        memset((char *)x->workspace + x->workspace_bytes - end_bytes, 0xff, end_bytes);
    }
    const bool ta = x->operation.transa == CUBLAS_OP_T, tb = x->operation.transb == CUBLAS_OP_T;
    const int64_t m = (int64_t)x->d_layout.rows, n = (int64_t)x->d_layout.cols;
    const int64_t k = (int64_t)(ta ? x->a_layout.rows : x->a_layout.cols);
    float *packed_a = emu_lt_pack(x->a, &x->a_layout, ta, m, k, EMU_LT_M);
    float *packed_b = emu_lt_pack(x->b, &x->b_layout, !tb, n, k, EMU_LT_N);
    const int64_t m_blocks = (m + EMU_LT_M - 1) / EMU_LT_M, n_blocks = (n + EMU_LT_N - 1) / EMU_LT_N;
#pragma omp parallel for if (m * n * k > 100000)
    for (int64_t block = 0; block < m_blocks * n_blocks; block++) {
        const int64_t i0 = block / n_blocks * EMU_LT_M, j0 = block % n_blocks * EMU_LT_N;
        float sums[EMU_LT_N * EMU_LT_M];
        emu_lt_block(sums, packed_a + i0 * k, packed_b + j0 * k, k);
        for (int64_t j = j0; j < j0 + EMU_LT_N && j < n; j++)
            for (int64_t i = i0; i < i0 + EMU_LT_M && i < m; i++) {
                const int64_t at = j * x->d_layout.ld + i;
                float value = sums[(j - j0) * EMU_LT_M + i - i0];
                if (x->keep)
                    value += emu_lt_load(x->d, at, x->d_layout.type);
                if (x->operation.epilogue == CUBLASLT_EPILOGUE_BIAS)
                    value += emu_lt_load(x->operation.bias, i, x->d_layout.type);
                emu_lt_store(x->d, at, x->d_layout.type, value);
            }
    }
    free(packed_a);
    free(packed_b);
}

static inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void *alpha,
                                            const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                                            cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                                            cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout,
                                            const cublasLtMatmulAlgo_t *algo, void *workspace, size_t workspace_bytes,
                                            cudaStream_t stream) {
    cublasLtMatrixLayout_t const layouts[4] = {a_layout, b_layout, c_layout, d_layout};
    const void *const pointers[4] = {a, b, c, d};
    EMU_LT_DEMAND(handle && handle->made == EMU_LT_MADE, "no handle");
    emu_lt_check_call(operation, layouts, pointers, algo, workspace, workspace_bytes);
    const float scale = *(const float *)alpha, keep = *(const float *)beta;
    EMU_LT_DEMAND(scale == 1 && (keep == 0 || keep == 1), "only alpha 1 and beta 0 or 1 are modelled");
    EMU_LT_DEMAND(keep == 0 || c == d, "beta is not 0 and C is not D");
    const struct emu_lt_product product = {*operation, *a_layout, *b_layout, *d_layout,       a,
                                           b,          d,         workspace, workspace_bytes, keep != 0};
    const cudaError_t status = emu_enqueue(stream, "cublasLtMatmul", [product] { emu_lt_run(&product); });
    return status == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
