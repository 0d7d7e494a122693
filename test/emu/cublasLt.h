// Stand-in for the part of cuBLASLt that kernels/matmul/cublaslt.cuh uses: the same names and types, products by plain
// loops on host memory.
//
// It is stricter than the library, and ends the program with status 3 at
// - descriptors that were not initialized, attributes of a wrong size or without use here,
// - layouts that do not fit each other or the operation, leading dimensions that are too small,
// - an algorithm that is used for something other than the heuristics were asked for: other shapes, types, epilogue,
// - pointers aligned to less than the preference said, a workspace that is too small or not aligned,
// - an output that overlaps an operand, the bias or the workspace,
// - reductions that round the parts of a sum to the output's type, which would show in our results,
// - FP8 operands that are both E5M2, do not lie along the depth, have a size, leading dimension or address that is not
//   a multiple of 16, or have no scales in the device's memory; an FP8 output; a bias of FP8 operands that is not bf16;
//   with scales of blocks: fast accumulation, two operands of 128 x 128, or a mode that no GPU of compute capability
//   9.0 has.
// It fills both ends of the workspace with NaN. The heuristics return EMU_LT_ALGORITHMS algorithms for a product, of
// ranks 0, 1, ..., all of them right. Some split the depth and add the parts in order, in fp32, so that sums have other
// bits; only the first takes the whole workspace. FP8 is never split. BGRADA, BGRADB and DGELU are for bf16 operands.
// Environment:
//   EMU_CUBLASLT_TIMES     microseconds that a product takes by each algorithm, such as 9,8,7: algorithms after the
//   last
//                          number take as long as the last one; 400,410,420,... if unset
//   EMU_CUBLASLT_BGRAD_TIMES
//                          the same for products with an epilogue that sums a bias gradient
//   EMU_CUBLASLT_DGELU_TIMES
//                          the same for products with an epilogue that applies GELU's derivative
//   EMU_CUBLASLT_LOOSE     if set, sums of a bias gradient have other bits in each call, and GELU's derivative is
//   ReLU's
//   EMU_CUBLASLT_VARIES    the rank of an algorithm whose products have other bits in each call
//   EMU_CUBLASLT_WRONG     the rank of an algorithm whose products are an eighth too large
//   EMU_CUBLASLT_REFUSES   the rank of an algorithm that does not run
//   EMU_CUBLASLT_LEAST     the fewest rows, columns and depth for which the heuristics have an algorithm; 1 if unset
//   EMU_CUBLASLT_VERSION   the library's version; 130000 if unset. Scale modes exist from 120800 on, scales of blocks
//   from
//                          120900 on.
//   EMU_CUBLASLT_TRUNCATE  if set, FP8 sums keep 13 bits of their mantissa, as on Hopper's tensor cores: over the whole
//                          depth with FAST_ACCUM, else over 128 of it
// FP8 has no algorithm below compute capability 8.9 (EMU_CAPABILITY), scales of blocks have one only on 9.0.
#pragma once
#include "test/emu/enqueue.h" // emu_enqueue
#include <cuda_runtime.h>     // cudaStream_t, emu_enqueue, emu_check_range, emu_find_allocation, emu_bf16
#include <math.h>             // ldexpf, NAN
#include <stdint.h>           // uint64_t
#include <stdio.h>            // fprintf
#include <stdlib.h>           // malloc, _Exit
#include <string.h>           // memcpy, memset

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
typedef enum { CUDA_R_32F = 0, CUDA_R_16BF = 14, CUDA_R_8F_E4M3 = 28, CUDA_R_8F_E5M2 = 29 } cudaDataType_t;
typedef enum {
    CUBLASLT_EPILOGUE_DEFAULT = 1,
    CUBLASLT_EPILOGUE_BIAS = 4,
    CUBLASLT_EPILOGUE_DGELU = 192,
    CUBLASLT_EPILOGUE_BGRADA = 256,
    CUBLASLT_EPILOGUE_BGRADB = 512
} cublasLtEpilogue_t;
typedef enum {
    CUBLASLT_REDUCTION_SCHEME_NONE = 0,
    CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2
} cublasLtReductionScheme_t;
typedef enum {
    CUBLASLT_MATMUL_DESC_TRANSA = 3,
    CUBLASLT_MATMUL_DESC_TRANSB = 4,
    CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
    CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8,
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER = 11,
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD = 12,
    CUBLASLT_MATMUL_DESC_A_SCALE_POINTER = 17,
    CUBLASLT_MATMUL_DESC_B_SCALE_POINTER = 18,
    CUBLASLT_MATMUL_DESC_C_SCALE_POINTER = 19,
    CUBLASLT_MATMUL_DESC_D_SCALE_POINTER = 20,
    CUBLASLT_MATMUL_DESC_AMAX_D_POINTER = 21,
    CUBLASLT_MATMUL_DESC_FAST_ACCUM = 25,
    CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE = 26,
    CUBLASLT_MATMUL_DESC_A_SCALE_MODE = 31,
    CUBLASLT_MATMUL_DESC_B_SCALE_MODE = 32
} cublasLtMatmulDescAttributes_t;
typedef enum {
    CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F = 0,
    CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3 = 1,
    CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0 = 2,
    CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F = 3,
    CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F = 4,
    CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F = 5
} cublasLtMatmulMatrixScale_t;
typedef enum {
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
    CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8
} cublasLtMatmulPreferenceAttributes_t;

enum { EMU_LT_MADE = 0x6c740001 }; // the first member of an initialized descriptor

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
    int32_t bias_type, scale_modes[2]; // bias_type: -1 for the output's type; scale_modes: A's, B's
    int8_t fast;
    const void *bias, *scales[4], *amax; // scales: A's, B's, C's, D's; amax: D's
    // the matrix of which DGELU takes the derivative; aux_ld: its leading dimension
    const void *aux;
    int64_t aux_ld;
} cublasLtMatmulDescOpaque_t;
typedef struct {
    int made;
    uint64_t workspace_bytes;
    uint32_t reductions, alignment[4]; // alignment: A's, B's, C's, D's
} cublasLtMatmulPreferenceOpaque_t;
typedef enum {
    CUBLASLT_ALGO_CONFIG_ID = 0,
    CUBLASLT_ALGO_CONFIG_TILE_ID = 1,
    CUBLASLT_ALGO_CONFIG_SPLITK_NUM = 2,
    CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME = 3,
    CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING = 4,
    CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION = 5,
    CUBLASLT_ALGO_CONFIG_STAGES_ID = 6,
    CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID = 7,
    CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID = 8
} cublasLtMatmulAlgoConfigAttributes_t;
typedef struct {
    uint64_t data[8];
} cublasLtMatmulAlgo_t;
// An algorithm's 64 bytes: its attributes, and what the heuristics were asked for.
struct emu_lt_algo {
    int32_t made;
    uint8_t id, tile, stages, reduction;
    uint8_t splits, swizzle, inner, cluster;
    uint32_t custom, operation, layouts[4], version; // operation, layouts: hashes
    uint64_t workspace_bytes;
    uint16_t alignment[4], bias_alignment, unused[3];
};
static_assert(sizeof(struct emu_lt_algo) <= sizeof(cublasLtMatmulAlgo_t), "an algorithm has 64 bytes");
enum { EMU_LT_ALGORITHMS = 8 };
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
           : status == CUBLAS_STATUS_INVALID_VALUE ? "CUBLAS_STATUS_INVALID_VALUE"
           : status == CUBLAS_STATUS_NOT_SUPPORTED ? "CUBLAS_STATUS_NOT_SUPPORTED"
                                                   : "CUBLAS_STATUS_EXECUTION_FAILED";
}
static inline size_t cublasLtGetVersion(void) {
    const char *text = getenv("EMU_CUBLASLT_VERSION");
    return text ? (size_t)strtoull(text, NULL, 0) : CUBLAS_VERSION;
}
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

static inline bool emu_lt_is_fp8(cudaDataType_t type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }
// Returns the bytes of an element; 0: the type is not modeled.
static inline size_t emu_lt_type_bytes(cudaDataType_t type) {
    return type == CUDA_R_32F ? 4 : type == CUDA_R_16BF ? 2 : emu_lt_is_fp8(type) ? 1 : 0;
}

// ---- descriptors ----

static inline cublasStatus_t cublasLtMatmulDescInit(cublasLtMatmulDesc_t operation, cublasComputeType_t compute,
                                                    cudaDataType_t scale) {
    EMU_LT_DEMAND(compute == CUBLAS_COMPUTE_32F && scale == CUDA_R_32F, "only fp32 sums and scales are modeled");
    memset(operation, 0, sizeof *operation);
    operation->made = EMU_LT_MADE;
    operation->epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    operation->bias_type = -1;
    return CUBLAS_STATUS_SUCCESS;
}
// Returns where an attribute's value lies, and in *bytes its size; NULL: there is no such attribute here.
static inline void *emu_lt_attribute(cublasLtMatmulDescOpaque_t *x, cublasLtMatmulDescAttributes_t attribute,
                                     size_t *bytes) {
    *bytes = 8;
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return &x->bias;
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: return &x->aux;
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: return &x->aux_ld;
    case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER: return &x->scales[0];
    case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER: return &x->scales[1];
    case CUBLASLT_MATMUL_DESC_C_SCALE_POINTER: return &x->scales[2];
    case CUBLASLT_MATMUL_DESC_D_SCALE_POINTER: return &x->scales[3];
    case CUBLASLT_MATMUL_DESC_AMAX_D_POINTER: return &x->amax;
    case CUBLASLT_MATMUL_DESC_FAST_ACCUM: *bytes = 1; return &x->fast;
    case CUBLASLT_MATMUL_DESC_TRANSA: *bytes = 4; return &x->transa;
    case CUBLASLT_MATMUL_DESC_TRANSB: *bytes = 4; return &x->transb;
    case CUBLASLT_MATMUL_DESC_EPILOGUE: *bytes = 4; return &x->epilogue;
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: *bytes = 4; return &x->bias_type;
    case CUBLASLT_MATMUL_DESC_A_SCALE_MODE: *bytes = 4; return &x->scale_modes[0];
    case CUBLASLT_MATMUL_DESC_B_SCALE_MODE: *bytes = 4; return &x->scale_modes[1];
    }
    return NULL;
}
static inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation,
                                                            cublasLtMatmulDescAttributes_t attribute, const void *value,
                                                            size_t bytes) {
    EMU_LT_DEMAND(operation->made == EMU_LT_MADE, "the descriptor was not initialized");
    size_t wanted = 0;
    void *const to = emu_lt_attribute(operation, attribute, &wanted);
    const bool is_mode =
        attribute == CUBLASLT_MATMUL_DESC_A_SCALE_MODE || attribute == CUBLASLT_MATMUL_DESC_B_SCALE_MODE;
    if (is_mode && cublasLtGetVersion() < 120800)
        return CUBLAS_STATUS_INVALID_VALUE;
    EMU_LT_DEMAND(to && bytes == wanted, "attribute %d has not %zu bytes", (int)attribute, bytes);
    memcpy(to, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatrixLayoutInit(cublasLtMatrixLayout_t layout, cudaDataType_t type, uint64_t rows,
                                                      uint64_t cols, int64_t ld) {
    EMU_LT_DEMAND(emu_lt_type_bytes(type) > 0, "type %d is not modeled", (int)type);
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
    EMU_LT_DEMAND(preference->made == EMU_LT_MADE, "the preference was not initialized");
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

static inline cudaDataType_t emu_lt_bias_type(const cublasLtMatmulDescOpaque_t *operation,
                                              const cublasLtMatrixLayoutOpaque_t *d) {
    return operation->bias_type < 0 ? d->type : (cudaDataType_t)operation->bias_type;
}

// ---- what the library demands of FP8 ----

static inline bool emu_lt_is_block(int32_t mode) {
    return mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F || mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
}
static inline bool emu_lt_is_scalar(const cublasLtMatmulDescOpaque_t *x) {
    return x->scale_modes[0] == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F &&
           x->scale_modes[1] == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
}
// Whether this GPU and this version of the library have an algorithm for the operation's scale modes.
static inline bool emu_lt_has_fp8(const cublasLtMatmulDescOpaque_t *operation) {
    struct cudaDeviceProp properties;
    cudaGetDeviceProperties(&properties, emu_device);
    const int capability = properties.major * 10 + properties.minor;
    return emu_lt_is_scalar(operation) ? capability >= 89 : capability == 90 && cublasLtGetVersion() >= 120900;
}
// The number of scales of a matrix of `lines` lines along the depth, in the order of the mode, padding included.
static inline int64_t emu_lt_scale_count(int32_t mode, int64_t lines, int64_t depth) {
    const int64_t depth_blocks = (depth + 127) / 128;
    return mode == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F    ? lines
           : mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F     ? depth_blocks * ((lines + 3) / 4 * 4)
           : mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F ? (lines + 127) / 128 * ((depth_blocks + 3) / 4 * 4)
                                                                 : 1;
}
// Returns the place of the scale of element k of a line, in the order of the mode.
static inline int64_t emu_lt_scale_at(int32_t mode, int64_t lines, int64_t depth, int64_t line, int64_t k) {
    const int64_t depth_blocks = (depth + 127) / 128;
    return mode == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F    ? line
           : mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F     ? k / 128 * ((lines + 3) / 4 * 4) + line
           : mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F ? line / 128 * ((depth_blocks + 3) / 4 * 4) + k / 128
                                                                 : 0;
}

static inline void emu_lt_check_fp8_layouts(const cublasLtMatmulDescOpaque_t *operation,
                                            cublasLtMatrixLayout_t const layouts[4]) {
    const cublasLtMatrixLayoutOpaque_t *a = layouts[0], *b = layouts[1], *d = layouts[3];
    EMU_LT_DEMAND(emu_lt_is_fp8(a->type) && emu_lt_is_fp8(b->type), "FP8 by another type: %d by %d", (int)a->type,
                  (int)b->type);
    EMU_LT_DEMAND(a->type == CUDA_R_8F_E4M3 || b->type == CUDA_R_8F_E4M3, "both operands are E5M2");
    EMU_LT_DEMAND(d->type == CUDA_R_16BF || d->type == CUDA_R_32F, "an output of type %d is not modeled", (int)d->type);
    EMU_LT_DEMAND(operation->transa == CUBLAS_OP_T && operation->transb == CUBLAS_OP_N,
                  "FP8 operands must lie along the depth: A transposed, B not");
    EMU_LT_DEMAND(a->rows % 16 == 0 && d->rows % 16 == 0, "depth %llu or the output's width %llu is no multiple of 16",
                  (unsigned long long)a->rows, (unsigned long long)d->rows);
    for (int i = 0; i < 4; i++)
        EMU_LT_DEMAND(layouts[i]->ld % 16 == 0, "the leading dimension %lld of %c is no multiple of 16",
                      (long long)layouts[i]->ld, "ABCD"[i]);
}
static inline void emu_lt_check_fp8_scales(const cublasLtMatmulDescOpaque_t *x,
                                           cublasLtMatrixLayout_t const layouts[4]) {
    for (int i = 0; i < 2; i++) {
        const struct emu_allocation *memory = emu_find_allocation(x->scales[i]);
        EMU_LT_DEMAND(x->scales[i], "no scale of %c", "AB"[i]);
        EMU_LT_DEMAND(memory && memory->kind != EMU_PINNED, "the scale of %c at %p is not in the device's memory",
                      "AB"[i], x -> scales[i]);
        EMU_LT_DEMAND((uintptr_t)x->scales[i] % 16 == 0 || !emu_lt_is_block(x->scale_modes[i]),
                      "scales of %c at %p are not aligned to 16 bytes", "AB"[i], x -> scales[i]);
        EMU_LT_DEMAND(x->scale_modes[i] != CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3 &&
                          x->scale_modes[i] != CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0 && x->scale_modes[i] >= 0 &&
                          x->scale_modes[i] <= CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F,
                      "scale mode %d needs another GPU", x->scale_modes[i]);
    }
    EMU_LT_DEMAND(!x->scales[2] && !x->scales[3] && !x->amax, "a scale of C or D, or an amax of D, which is not FP8");
    const bool block[] = {emu_lt_is_block(x->scale_modes[0]), emu_lt_is_block(x->scale_modes[1])};
    EMU_LT_DEMAND(block[0] == block[1] && (block[0] || x->scale_modes[0] == x->scale_modes[1]),
                  "scale modes %d and %d do not meet", x->scale_modes[0], x->scale_modes[1]);
    EMU_LT_DEMAND(!block[0] || x->scale_modes[0] == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F ||
                      x->scale_modes[1] == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
                  "both operands have scales of 128 x 128");
    EMU_LT_DEMAND(!block[0] || x->fast == 0, "a fast sum by scales of blocks");
}
static inline void emu_lt_check_fp8(const cublasLtMatmulDescOpaque_t *x, cublasLtMatrixLayout_t const layouts[4]) {
    if (!emu_lt_is_fp8(layouts[0]->type) && !emu_lt_is_fp8(layouts[1]->type)) {
        EMU_LT_DEMAND(!x->scales[0] && !x->scales[1] && !x->fast && emu_lt_is_scalar(x), "scales, but no FP8");
        return;
    }
    emu_lt_check_fp8_layouts(x, layouts);
    emu_lt_check_fp8_scales(x, layouts);
    EMU_LT_DEMAND(x->fast == 0 || x->fast == 1, "FAST_ACCUM is %d", x->fast);
    EMU_LT_DEMAND(x->epilogue == CUBLASLT_EPILOGUE_DEFAULT || x->epilogue == CUBLASLT_EPILOGUE_BIAS,
                  "epilogue %d with FP8", (int)x->epilogue);
    const cudaDataType_t bias_type = emu_lt_bias_type(x, layouts[3]);
    EMU_LT_DEMAND(x->epilogue != CUBLASLT_EPILOGUE_BIAS || bias_type == CUDA_R_16BF, "a bias of type %d with FP8",
                  (int)bias_type);
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
        EMU_LT_DEMAND(layouts[i]->made == EMU_LT_MADE, "layout %c was not initialized", "ABCD"[i]);
    EMU_LT_DEMAND(operation->made == EMU_LT_MADE, "the descriptor was not initialized");
    const bool ta = operation->transa == CUBLAS_OP_T, tb = operation->transb == CUBLAS_OP_T;
    const uint64_t m = ta ? a->cols : a->rows, k = ta ? a->rows : a->cols;
    const uint64_t n = tb ? b->rows : b->cols, k_of_b = tb ? b->cols : b->rows;
    EMU_LT_DEMAND(m == d->rows && n == d->cols && k == k_of_b, "(%llu x %llu) by (%llu x %llu) is not (%llu x %llu)",
                  (unsigned long long)m, (unsigned long long)k, (unsigned long long)k_of_b, (unsigned long long)n,
                  (unsigned long long)d->rows, (unsigned long long)d->cols);
    EMU_LT_DEMAND(memcmp(c, d, sizeof *c) == 0, "C and D differ in layout");
    emu_lt_check_fp8(operation, layouts);
    EMU_LT_DEMAND(emu_lt_is_fp8(a->type) || (a->type == b->type && (d->type == a->type || d->type == CUDA_R_32F)),
                  "types %d by %d to %d", (int)a->type, (int)b->type, (int)d->type);
}

static inline bool emu_lt_sums_bias(const cublasLtMatmulDescOpaque_t *operation) {
    return operation->epilogue == CUBLASLT_EPILOGUE_BGRADA || operation->epilogue == CUBLASLT_EPILOGUE_BGRADB;
}
static inline bool emu_lt_takes_bias(const cublasLtMatmulDescOpaque_t *operation) {
    return operation->epilogue == CUBLASLT_EPILOGUE_BIAS || emu_lt_sums_bias(operation);
}
// Returns FNV-1a of n bytes.
static inline uint32_t emu_lt_hash(const void *bytes, size_t n) {
    uint32_t hash = 2166136261u;
    for (size_t i = 0; i < n; i++)
        hash = (hash ^ ((const uint8_t *)bytes)[i]) * 16777619u;
    return hash;
}
// Returns a hash of an operation, without the pointers that come with a call.
static inline uint32_t emu_lt_hash_operation(const cublasLtMatmulDescOpaque_t *operation) {
    cublasLtMatmulDescOpaque_t x;
    memset(&x, 0, sizeof x);
    x.made = operation->made;
    x.transa = operation->transa;
    x.transb = operation->transb;
    x.epilogue = operation->epilogue;
    x.bias_type = operation->bias_type;
    x.aux_ld = operation->aux_ld;
    memcpy(x.scale_modes, operation->scale_modes, sizeof x.scale_modes);
    x.fast = operation->fast;
    return emu_lt_hash(&x, sizeof x);
}
static inline struct emu_lt_algo emu_lt_algo_of(const cublasLtMatmulAlgo_t *algorithm) {
    struct emu_lt_algo algo;
    memcpy(&algo, algorithm, sizeof algo);
    return algo;
}

static inline void emu_lt_check_bias(const cublasLtMatmulDescOpaque_t *operation, cudaDataType_t type,
                                     cudaDataType_t output) {
    const bool takes_bias = emu_lt_takes_bias(operation);
    EMU_LT_DEMAND(takes_bias == (operation->bias != NULL), "epilogue %d with bias pointer %p", (int)operation->epilogue,
                  operation->bias);
    EMU_LT_DEMAND(!takes_bias || emu_lt_is_fp8(type) || operation->bias_type < 0 ||
                      operation->bias_type == (int32_t)output,
                  "a bias of type %d beside an output of type %d", operation->bias_type, (int)output);
}
// Checks what DGELU demands of the matrix of which it takes the derivative.
static inline void emu_lt_check_aux(const cublasLtMatmulDescOpaque_t *operation,
                                    const cublasLtMatrixLayoutOpaque_t *d) {
    const bool takes_aux = operation->epilogue == CUBLASLT_EPILOGUE_DGELU;
    EMU_LT_DEMAND(takes_aux == (operation->aux != NULL), "epilogue %d with auxiliary pointer %p",
                  (int)operation->epilogue, operation->aux);
    EMU_LT_DEMAND(!takes_aux || (operation->aux_ld % 8 == 0 && operation->aux_ld >= (int64_t)d->rows),
                  "the auxiliary leading dimension %lld is no multiple of 8, or less than %llu",
                  (long long)operation->aux_ld, (unsigned long long)d->rows);
    EMU_LT_DEMAND(!takes_aux || emu_lt_alignment(operation->aux) >= 16,
                  "the auxiliary matrix %p is aligned to less than 16 bytes", operation->aux);
}
// Whether an algorithm exists for these sizes and types on this GPU.
static inline bool emu_lt_is_supported(const cublasLtMatmulDescOpaque_t *operation,
                                       cublasLtMatrixLayout_t const layouts[4]) {
    const cublasLtMatrixLayoutOpaque_t *a = layouts[0], *d = layouts[3];
    const char *text = getenv("EMU_CUBLASLT_LEAST");
    const uint64_t least = text ? strtoull(text, NULL, 0) : 1;
    if (a->rows < least || a->cols < least || d->cols < least)
        return false;
    if ((emu_lt_sums_bias(operation) || operation->epilogue == CUBLASLT_EPILOGUE_DGELU) && a->type != CUDA_R_16BF)
        return false;
    return !emu_lt_is_fp8(a->type) || emu_lt_has_fp8(operation);
}

// Makes the algorithm of rank `id`.
static inline struct emu_lt_algo emu_lt_make_algo(int id, const cublasLtMatmulDescOpaque_t *operation,
                                                  cublasLtMatrixLayout_t const layouts[4],
                                                  const cublasLtMatmulPreferenceOpaque_t *preference) {
    static const uint8_t splits[EMU_LT_ALGORITHMS] = {1, 1, 2, 1, 3, 4, 1, 5};
    const bool may_split = (preference->reductions & CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) != 0;
    struct emu_lt_algo algo;
    memset(&algo, 0, sizeof algo);
    algo.made = EMU_LT_MADE;
    algo.id = (uint8_t)(60 + id);
    algo.tile = (uint8_t)(15 + id);
    algo.stages = (uint8_t)(8 + id % 3);
    algo.swizzle = (uint8_t)(id % 2);
    algo.inner = (uint8_t)(id % 4);
    algo.cluster = (uint8_t)(2 + id % 2);
    algo.custom = (uint32_t)id;
    algo.splits = may_split && !emu_lt_is_fp8(layouts[0]->type) ? splits[id] : 1;
    algo.reduction = algo.splits > 1 ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE;
    algo.operation = emu_lt_hash_operation(operation);
    algo.version = (uint32_t)cublasLtGetVersion();
    for (int i = 0; i < 4; i++) {
        algo.layouts[i] = emu_lt_hash(layouts[i], sizeof *layouts[i]);
        algo.alignment[i] = (uint16_t)preference->alignment[i];
    }
    algo.bias_alignment = operation->bias ? (uint16_t)emu_lt_alignment(operation->bias) : 1;
    algo.workspace_bytes = id == 0 ? preference->workspace_bytes : preference->workspace_bytes >> id;
    return algo;
}
static inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                                            cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                            cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                                            cublasLtMatmulPreference_t preference, int asked,
                                                            cublasLtMatmulHeuristicResult_t results[], int *found) {
    cublasLtMatrixLayout_t const layouts[4] = {a, b, c, d};
    EMU_LT_DEMAND(handle && handle->made == EMU_LT_MADE, "no handle");
    EMU_LT_DEMAND(preference->made == EMU_LT_MADE, "the preference was not initialized");
    EMU_LT_DEMAND(asked >= 1, "%d algorithms asked for", asked);
    EMU_LT_DEMAND((preference->reductions & ~(uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) == 0,
                  "a reduction that rounds the parts of a sum is allowed (mask %u)", preference->reductions);
    emu_lt_check_layouts(operation, layouts);
    emu_lt_check_bias(operation, a->type, d->type);
    emu_lt_check_aux(operation, d);
    *found = 0;
    if (!emu_lt_is_supported(operation, layouts))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    for (int i = 0; i < 4; i++)
        EMU_LT_DEMAND(!emu_lt_is_fp8(a->type) || preference->alignment[i] >= 16,
                      "%c is aligned to %u bytes, FP8 needs 16", "ABCD"[i], preference -> alignment[i]);
    for (; *found < asked && *found < EMU_LT_ALGORITHMS; ++*found) {
        const struct emu_lt_algo algo = emu_lt_make_algo(*found, operation, layouts, preference);
        cublasLtMatmulHeuristicResult_t *result = &results[*found];
        memset(result, 0, sizeof *result);
        memcpy(&result->algo, &algo, sizeof algo);
        result->workspaceSize = (size_t)algo.workspace_bytes;
    }
    return CUBLAS_STATUS_SUCCESS;
}
// Refuses a value that is no algorithm of this version, or an algorithm for another product.
static inline cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                                     cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                     cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                                     const cublasLtMatmulAlgo_t *algorithm,
                                                     cublasLtMatmulHeuristicResult_t *result) {
    cublasLtMatrixLayout_t const layouts[4] = {a, b, c, d};
    const struct emu_lt_algo algo = emu_lt_algo_of(algorithm);
    EMU_LT_DEMAND(handle && handle->made == EMU_LT_MADE, "no handle");
    emu_lt_check_layouts(operation, layouts);
    bool fits = algo.made == EMU_LT_MADE && algo.version == cublasLtGetVersion() &&
                algo.operation == emu_lt_hash_operation(operation);
    for (int i = 0; i < 4; i++)
        fits = fits && algo.layouts[i] == emu_lt_hash(layouts[i], sizeof *layouts[i]);
    if (!fits)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (!emu_lt_is_supported(operation, layouts))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    result->workspaceSize = (size_t)algo.workspace_bytes;
    result->state = CUBLAS_STATUS_SUCCESS;
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *algorithm,
                                                                  cublasLtMatmulAlgoConfigAttributes_t attribute,
                                                                  void *value, size_t bytes, size_t *written) {
    const struct emu_lt_algo algo = emu_lt_algo_of(algorithm);
    const uint32_t values[] = {algo.id,     algo.tile,   algo.splits, algo.reduction, algo.swizzle,
                               algo.custom, algo.stages, algo.inner,  algo.cluster};
    const bool is_short =
        attribute == CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID || attribute == CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID;
    const size_t wanted = is_short ? sizeof(uint16_t) : sizeof(uint32_t);
    EMU_LT_DEMAND(algo.made == EMU_LT_MADE, "no algorithm");
    EMU_LT_DEMAND((size_t)attribute < sizeof values / sizeof *values && bytes == wanted,
                  "attribute %d has not %zu bytes", (int)attribute, bytes);
    memcpy(value, &values[attribute], bytes); // little-endian
    if (written)
        *written = bytes;
    return CUBLAS_STATUS_SUCCESS;
}
// Returns the seconds that a product takes by an algorithm.
static inline double emu_lt_seconds(const struct emu_lt_algo *algo, const cublasLtMatmulDescOpaque_t *operation) {
    const char *text = getenv(emu_lt_sums_bias(operation)                      ? "EMU_CUBLASLT_BGRAD_TIMES"
                              : operation->epilogue == CUBLASLT_EPILOGUE_DGELU ? "EMU_CUBLASLT_DGELU_TIMES"
                                                                               : "EMU_CUBLASLT_TIMES");
    double microseconds = 400 + 10 * (algo->id - 60);
    for (int i = 0; text && *text && i <= algo->id - 60; i++) {
        char *end;
        microseconds = strtod(text, &end);
        text = *end == ',' ? end + 1 : end;
    }
    return 1e-6 * microseconds;
}

// ---- the product ----

static inline float emu_lt_fp8(uint8_t code, cudaDataType_t type) {
    const int mantissa_bits = type == CUDA_R_8F_E4M3 ? 3 : 2, bias = type == CUDA_R_8F_E4M3 ? 7 : 15;
    const int exponent = (code & 0x7f) >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
    const bool special = type == CUDA_R_8F_E4M3 ? (code & 0x7f) == 0x7f : exponent == 31;
    const float value = special ? (mantissa ? NAN : INFINITY)
                        : exponent == 0
                            ? ldexpf((float)mantissa, 1 - bias - mantissa_bits)
                            : ldexpf((float)(mantissa + (1 << mantissa_bits)), exponent - bias - mantissa_bits);
    return code & 0x80 ? -value : value;
}
static inline float emu_lt_load(const void *x, int64_t i, cudaDataType_t type) {
    switch (type) {
    case CUDA_R_32F: return ((const float *)x)[i];
    case CUDA_R_16BF: return emu_bf16(((const uint16_t *)x)[i]);
    case CUDA_R_8F_E4M3:
    case CUDA_R_8F_E5M2: return emu_lt_fp8(((const uint8_t *)x)[i], type);
    }
    return NAN;
}
static inline void emu_lt_store(void *x, int64_t i, cudaDataType_t type, float value) {
    if (type == CUDA_R_32F)
        ((float *)x)[i] = value;
    else
        ((uint16_t *)x)[i] = emu_to_bf16(value);
}

// D is computed in blocks of EMU_LT_M x EMU_LT_N, from operands packed as (block, depth, EMU_LT_M or EMU_LT_N).
enum { EMU_LT_M = 32, EMU_LT_N = 8 };

// Packs an operand as (blocks, depth, width), which the caller frees. Its lines are op(A)'s rows or op(B)'s columns.
// along: the elements of a line follow each other in memory.
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

// sums (EMU_LT_N, EMU_LT_M) = the product of a (depth, EMU_LT_M) and b (depth, EMU_LT_N), summed in the order of depth.
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

// Computes what emu_lt_block does in `splits` parts of the depth, whose sums are added in their order.
static inline void emu_lt_split_block(float *sums, const float *a, const float *b, int64_t depth, int splits) {
    float part[EMU_LT_N * EMU_LT_M];
    const int64_t each = (depth + splits - 1) / splits;
    emu_lt_block(sums, a, b, depth < each ? depth : each);
    for (int64_t k = each; k < depth; k += each) {
        emu_lt_block(part, a + k * EMU_LT_M, b + k * EMU_LT_N, depth - k < each ? depth - k : each);
        for (int i = 0; i < EMU_LT_N * EMU_LT_M; i++)
            sums[i] += part[i];
    }
}

// The scales of a product of FP8 matrices, and how it is summed.
struct emu_lt_fp8_product {
    const float *a_scales, *b_scales; // NULL: no FP8
    int32_t a_mode, b_mode;
    int64_t m, n, k;
    bool fast, truncate;
};
// Returns a finite number with only the 13 highest bits of its mantissa.
static inline float emu_lt_truncate(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits &= ~0x3ffu;
    memcpy(&x, &bits, sizeof x);
    return x;
}
// Computes the block of D at (i0, j0), as emu_lt_block does. Tensor cores sum 32 of the depth at a time. After each 128
// of the depth, or with `fast` only at its end, the sum goes to fp32, where scales of blocks are applied. Scales of
// whole matrices and of rows multiply the whole sum.
static inline void emu_lt_fp8_block(const struct emu_lt_fp8_product *x, float *sums, const float *a, const float *b,
                                    int64_t i0, int64_t j0) {
    float partial[EMU_LT_N * EMU_LT_M] = {0}, step[EMU_LT_N * EMU_LT_M];
    const bool blocks = emu_lt_is_block(x->a_mode);
    memset(sums, 0, sizeof partial);
    for (int64_t k = 0; k < x->k; k += 32) {
        const int64_t depth = x->k - k < 32 ? x->k - k : 32;
        const bool promote = k + depth == x->k || (!x->fast && (k + depth) % 128 == 0);
        emu_lt_block(step, a + k * EMU_LT_M, b + k * EMU_LT_N, depth);
        for (int e = 0; e < EMU_LT_N * EMU_LT_M; e++) {
            partial[e] += step[e];
            if (x->truncate)
                partial[e] = emu_lt_truncate(partial[e]);
            const int64_t i = i0 + e % EMU_LT_M, j = j0 + e / EMU_LT_M;
            if (!promote || i >= x->m || j >= x->n)
                continue;
            const float scale = x->a_scales[emu_lt_scale_at(x->a_mode, x->m, x->k, i, k)] *
                                x->b_scales[emu_lt_scale_at(x->b_mode, x->n, x->k, j, k)];
            sums[e] += blocks ? partial[e] * scale : partial[e];
            partial[e] = 0;
            if (!blocks && k + depth == x->k)
                sums[e] *= scale;
        }
    }
}

// The number of bytes of a matrix from its first element to its last.
static inline size_t emu_lt_extent(const cublasLtMatrixLayoutOpaque_t *layout) {
    const uint64_t elements = (layout->cols - 1) * (uint64_t)layout->ld + layout->rows;
    return (size_t)elements * emu_lt_type_bytes(layout->type);
}
static inline bool emu_lt_overlap(const void *x, size_t x_bytes, const void *y, size_t y_bytes) {
    return (const char *)x < (const char *)y + y_bytes && (const char *)y < (const char *)x + x_bytes;
}

static inline void emu_lt_check_algo(const cublasLtMatmulDescOpaque_t *operation,
                                     cublasLtMatrixLayout_t const layouts[4], const void *const pointers[4],
                                     const struct emu_lt_algo *algo) {
    EMU_LT_DEMAND(algo->made == EMU_LT_MADE, "no algorithm");
    EMU_LT_DEMAND(algo->operation == emu_lt_hash_operation(operation), "the algorithm is for another operation");
    for (int i = 0; i < 4; i++) {
        EMU_LT_DEMAND(algo->layouts[i] == emu_lt_hash(layouts[i], sizeof *layouts[i]),
                      "the algorithm is for another layout of %c", "ABCD"[i]);
        EMU_LT_DEMAND(pointers[i] && emu_lt_alignment(pointers[i]) >= algo->alignment[i],
                      "%c is aligned to %u bytes, the algorithm was asked for with %u", "ABCD"[i],
                      emu_lt_alignment(pointers[i]), (unsigned)algo -> alignment[i]);
    }
}
// The number of elements of the bias or bias gradient.
static inline uint64_t emu_lt_bias_count(const cublasLtMatmulDescOpaque_t *operation,
                                         const cublasLtMatrixLayoutOpaque_t *d) {
    return operation->epilogue == CUBLASLT_EPILOGUE_BGRADB ? d->cols : d->rows;
}
static inline void emu_lt_check_call(const cublasLtMatmulDescOpaque_t *operation,
                                     cublasLtMatrixLayout_t const layouts[4], const void *const pointers[4],
                                     const struct emu_lt_algo *algo, const void *workspace, size_t workspace_bytes) {
    emu_lt_check_layouts(operation, layouts);
    emu_lt_check_algo(operation, layouts, pointers, algo);
    EMU_LT_DEMAND(workspace_bytes >= algo->workspace_bytes, "a workspace of %zu bytes, the algorithm needs %llu",
                  workspace_bytes, (unsigned long long)algo->workspace_bytes);
    EMU_LT_DEMAND(workspace_bytes == 0 || (workspace && (uintptr_t)workspace % 256 == 0),
                  "the workspace %p is not aligned to 256 bytes", workspace);
    const size_t d_bytes = emu_lt_extent(layouts[3]);
    const size_t bias_bytes =
        emu_lt_bias_count(operation, layouts[3]) * emu_lt_type_bytes(emu_lt_bias_type(operation, layouts[3]));
    for (int i = 0; i < 2; i++)
        EMU_LT_DEMAND(!emu_lt_overlap(pointers[3], d_bytes, pointers[i], emu_lt_extent(layouts[i])) &&
                          !emu_lt_overlap(workspace, workspace_bytes, pointers[i], emu_lt_extent(layouts[i])) &&
                          (!emu_lt_sums_bias(operation) ||
                           !emu_lt_overlap(operation->bias, bias_bytes, pointers[i], emu_lt_extent(layouts[i]))),
                      "%c overlaps D, the bias gradient or the workspace", "AB"[i]);
    EMU_LT_DEMAND(!emu_lt_overlap(workspace, workspace_bytes, pointers[3], d_bytes), "D overlaps the workspace");
    emu_lt_check_aux(operation, layouts[3]);
    if (operation->aux) {
        const size_t aux_bytes = ((layouts[3]->cols - 1) * (uint64_t)operation->aux_ld + layouts[3]->rows) *
                                 emu_lt_type_bytes(layouts[3]->type);
        EMU_LT_DEMAND(!emu_lt_overlap(operation->aux, aux_bytes, pointers[3], d_bytes) &&
                          !emu_lt_overlap(operation->aux, aux_bytes, workspace, workspace_bytes),
                      "the auxiliary matrix overlaps D or the workspace");
    }
    if (!emu_lt_takes_bias(operation))
        return;
    EMU_LT_DEMAND(operation->bias && emu_lt_alignment(operation->bias) >= algo->bias_alignment,
                  "the bias %p is aligned to less than %u bytes", operation->bias, (unsigned)algo->bias_alignment);
    EMU_LT_DEMAND(!emu_lt_overlap(operation->bias, bias_bytes, pointers[3], d_bytes) &&
                      !emu_lt_overlap(operation->bias, bias_bytes, workspace, workspace_bytes),
                  "the bias overlaps D or the workspace");
}

// A product that waits for its turn on the stream; meanwhile the caller may change its descriptors.
struct emu_lt_product {
    cublasLtMatmulDescOpaque_t operation;
    cublasLtMatrixLayoutOpaque_t a_layout, b_layout, d_layout;
    const void *a, *b;
    void *d, *workspace;
    size_t workspace_bytes;
    bool keep; // D is added to
    struct emu_lt_algo algo;
    cudaStream_t stream;
};
// Returns the scales of a product. They are read when the product runs, as the device reads them.
static inline struct emu_lt_fp8_product emu_lt_fp8_of(const struct emu_lt_product *x) {
    const cublasLtMatmulDescOpaque_t *o = &x->operation;
    const int64_t m = (int64_t)x->d_layout.rows, n = (int64_t)x->d_layout.cols, k = (int64_t)x->a_layout.rows;
    const struct emu_lt_fp8_product fp8 = {(const float *)o->scales[0],
                                           (const float *)o->scales[1],
                                           o->scale_modes[0],
                                           o->scale_modes[1],
                                           m,
                                           n,
                                           k,
                                           o->fast != 0,
                                           getenv("EMU_CUBLASLT_TRUNCATE") != NULL};
    if (fp8.a_scales) {
        emu_check_range(fp8.a_scales, (size_t)emu_lt_scale_count(fp8.a_mode, m, k) * sizeof(float), "reads");
        emu_check_range(fp8.b_scales, (size_t)emu_lt_scale_count(fp8.b_mode, n, k) * sizeof(float), "reads");
    }
    return fp8;
}
// Sums each of `lines` lines of a packed operand over the depth, and stores the sums as the bias gradient.
static inline void emu_lt_sum_bias(const struct emu_lt_product *x, const float *packed, int64_t lines, int64_t depth,
                                   int width) {
    static int calls;
    const bool loose = getenv("EMU_CUBLASLT_LOOSE") != NULL;
    const cudaDataType_t type = emu_lt_bias_type(&x->operation, &x->d_layout);
    calls++;
    for (int64_t line = 0; line < lines; line++) {
        float sum = 0;
        for (int64_t k = 0; k < depth; k++)
            sum += packed[(line / width * depth + k) * width + line % width];
        emu_lt_store((void *)x->operation.bias, line, type, loose ? sum * (1 + 1e-6f * (float)(calls % 7)) : sum);
    }
}
// Whether a variable of the environment names this algorithm's rank.
static inline bool emu_lt_is_named(const char *variable, const struct emu_lt_algo *algo) {
    const char *text = getenv(variable);
    return text && atoi(text) == algo->id - 60;
}
// Returns the derivative of GELU in its tanh form.
static inline float emu_lt_gelu_derivative(float x) {
    const double c = 0.79788456080286536, t = tanh(c * (x + 0.044715 * x * x * x));
    if (getenv("EMU_CUBLASLT_LOOSE"))
        return x > 0;
    return (float)(0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 0.134145 * x * x));
}
static inline void emu_lt_run(const struct emu_lt_product *x) {
    static int calls;
    const float varied = emu_lt_is_named("EMU_CUBLASLT_VARIES", &x->algo)  ? 1 + 0x1p-7f * (float)(++calls % 2)
                         : emu_lt_is_named("EMU_CUBLASLT_WRONG", &x->algo) ? 1.125f
                                                                           : 1;
    const bool sums_bias = emu_lt_sums_bias(&x->operation);
    emu_model_time(x->stream, emu_lt_seconds(&x->algo, &x->operation));
    emu_check_range(x->a, emu_lt_extent(&x->a_layout), "reads");
    emu_check_range(x->b, emu_lt_extent(&x->b_layout), "reads");
    emu_check_range(x->d, emu_lt_extent(&x->d_layout), "writes");
    emu_check_range(x->workspace, x->workspace_bytes, "writes");
    const cudaDataType_t bias_type = emu_lt_bias_type(&x->operation, &x->d_layout);
    if (x->operation.bias)
        emu_check_range(x->operation.bias,
                        emu_lt_bias_count(&x->operation, &x->d_layout) * emu_lt_type_bytes(bias_type),
                        sums_bias ? "writes" : "reads");
    if (x->operation.aux)
        emu_check_range(x->operation.aux,
                        (size_t)(((int64_t)x->d_layout.cols - 1) * x->operation.aux_ld + (int64_t)x->d_layout.rows) *
                            emu_lt_type_bytes(x->d_layout.type),
                        "reads");
    const struct emu_lt_fp8_product fp8 = emu_lt_fp8_of(x);
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
        if (fp8.a_scales)
            emu_lt_fp8_block(&fp8, sums, packed_a + i0 * k, packed_b + j0 * k, i0, j0);
        else
            emu_lt_split_block(sums, packed_a + i0 * k, packed_b + j0 * k, k, x->algo.splits);
        for (int64_t j = j0; j < j0 + EMU_LT_N && j < n; j++)
            for (int64_t i = i0; i < i0 + EMU_LT_M && i < m; i++) {
                const int64_t at = j * x->d_layout.ld + i;
                float value = varied * sums[(j - j0) * EMU_LT_M + i - i0];
                if (x->keep)
                    value += emu_lt_load(x->d, at, x->d_layout.type);
                if (x->operation.epilogue == CUBLASLT_EPILOGUE_BIAS)
                    value += emu_lt_load(x->operation.bias, i, bias_type);
                if (x->operation.epilogue == CUBLASLT_EPILOGUE_DGELU)
                    value *= emu_lt_gelu_derivative(
                        emu_lt_load(x->operation.aux, j * x->operation.aux_ld + i, x->d_layout.type));
                emu_lt_store(x->d, at, x->d_layout.type, value);
            }
    }
    if (x->operation.epilogue == CUBLASLT_EPILOGUE_BGRADA)
        emu_lt_sum_bias(x, packed_a, m, k, EMU_LT_M);
    if (x->operation.epilogue == CUBLASLT_EPILOGUE_BGRADB)
        emu_lt_sum_bias(x, packed_b, n, k, EMU_LT_N);
    free(packed_a);
    free(packed_b);
}

static inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void *alpha,
                                            const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                                            cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                                            cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout,
                                            const cublasLtMatmulAlgo_t *algorithm, void *workspace,
                                            size_t workspace_bytes, cudaStream_t stream) {
    cublasLtMatrixLayout_t const layouts[4] = {a_layout, b_layout, c_layout, d_layout};
    const void *const pointers[4] = {a, b, c, d};
    EMU_LT_DEMAND(handle && handle->made == EMU_LT_MADE, "no handle");
    EMU_LT_DEMAND(algorithm, "no algorithm");
    const struct emu_lt_algo algo = emu_lt_algo_of(algorithm);
    emu_lt_check_call(operation, layouts, pointers, &algo, workspace, workspace_bytes);
    const float scale = *(const float *)alpha, keep = *(const float *)beta;
    EMU_LT_DEMAND(scale == 1 && (keep == 0 || keep == 1), "only alpha 1 and beta 0 or 1 are modeled");
    EMU_LT_DEMAND(keep == 0 || c == d, "beta is not 0 and C is not D");
    if (emu_lt_is_named("EMU_CUBLASLT_REFUSES", &algo))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    const struct emu_lt_product product = {*operation, *a_layout, *b_layout,       *d_layout, a,    b,
                                           d,          workspace, workspace_bytes, keep != 0, algo, stream};
    const cudaError_t status = emu_enqueue(stream, "cublasLtMatmul", [product] { emu_lt_run(&product); });
    return status == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
