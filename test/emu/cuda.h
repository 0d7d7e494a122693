// A stand-in for the part of the driver's interface that kernels/tensor_map.cuh uses: tensor maps, with the checks that
// the driver makes.
#pragma once
#include "test/emu/cuda_runtime.h" // cudaError_t, struct emu_tensor_map

typedef uint64_t cuuint64_t;
typedef uint32_t cuuint32_t;
typedef enum { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 } CUresult;
typedef enum { CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9 } CUtensorMapDataType;
typedef enum { CU_TENSOR_MAP_INTERLEAVE_NONE = 0 } CUtensorMapInterleave;
typedef enum {
    CU_TENSOR_MAP_SWIZZLE_NONE = 0,
    CU_TENSOR_MAP_SWIZZLE_32B = 1,
    CU_TENSOR_MAP_SWIZZLE_64B = 2,
    CU_TENSOR_MAP_SWIZZLE_128B = 3
} CUtensorMapSwizzle;
typedef enum {
    CU_TENSOR_MAP_L2_PROMOTION_NONE = 0,
    CU_TENSOR_MAP_L2_PROMOTION_L2_64B = 1,
    CU_TENSOR_MAP_L2_PROMOTION_L2_128B = 2,
    CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3
} CUtensorMapL2promotion;
typedef enum { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0 } CUtensorMapFloatOOBfill;
typedef struct emu_tensor_map CUtensorMap;

static inline CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base,
                                              const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                              const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                              CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                              CUtensorMapFloatOOBfill fill) {
    if ((uintptr_t)map % 64 != 0 || type != CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 || rank < 1 || rank > 5 || !base ||
        (uintptr_t)base % 16 != 0 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE)
        return CUDA_ERROR_INVALID_VALUE;
    memset(map, 0, sizeof *map);
    map->base = (char *)base;
    map->rank = rank;
    map->chunks = swizzle == CU_TENSOR_MAP_SWIZZLE_NONE ? 1u : 1u << swizzle;
    for (cuuint32_t i = 0; i < 5; i++) {
        map->dims[i] = i < rank ? dims[i] : 1;
        map->box[i] = (uint16_t)(i < rank ? box[i] : 1);
        if (i < rank && (dims[i] < 1 || dims[i] > (uint64_t)1 << 32 || box[i] < 1 || box[i] > 256 || steps[i] != 1))
            return CUDA_ERROR_INVALID_VALUE;
        if (i + 1 < rank) {
            map->strides[i] = strides[i];
            if (strides[i] % 16 != 0 || strides[i] >= (uint64_t)1 << 40)
                return CUDA_ERROR_INVALID_VALUE;
        }
    }
    const uint32_t row_bytes = 2 * box[0];
    if (row_bytes % 16 != 0 || (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE && row_bytes > 16 * map->chunks))
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

enum cudaDriverEntryPointQueryResult {
    cudaDriverEntryPointSuccess = 0,
    cudaDriverEntryPointSymbolNotFound = 1,
    cudaDriverEntryPointVersionNotSufficent = 2
};
enum { cudaEnableDefault = 0 };
static inline cudaError_t emu_driver_entry_point(const char *name, void **function, unsigned version,
                                                 enum cudaDriverEntryPointQueryResult *found) {
    const bool known = strcmp(name, "cuTensorMapEncodeTiled") == 0;
    *found = known ? version >= 12000 ? cudaDriverEntryPointSuccess : cudaDriverEntryPointVersionNotSufficent
                   : cudaDriverEntryPointSymbolNotFound;
    *function = *found == cudaDriverEntryPointSuccess ? (void *)cuTensorMapEncodeTiled : NULL;
    return cudaSuccess;
}
// cudaGetDriverEntryPointByVersion came with CUDA 12.5. cudaGetDriverEntryPoint ended with 12.9; it looks for the
// version of the toolkit itself.
#if CUDART_VERSION >= 12050
static inline cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                                           unsigned long long flags,
                                                           enum cudaDriverEntryPointQueryResult *found) {
    return emu_driver_entry_point(name, function, version, found);
}
#endif
#if CUDART_VERSION < 13000
static inline cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                                  enum cudaDriverEntryPointQueryResult *found = NULL) {
    enum cudaDriverEntryPointQueryResult ignored;
    return emu_driver_entry_point(name, function, CUDART_VERSION, found ? found : &ignored);
}
#endif
