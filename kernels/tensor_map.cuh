// Tensor maps describe a tensor in global memory to TMA: kernels take `const __grid_constant__ struct tensor_map`.
#pragma once
#include "kernels/device.cuh" // bf16, cuda_check, fail

#ifdef TARGET_CUDA
#include <cuda.h> // CUtensorMap, cuTensorMapEncodeTiled

struct tensor_map {
    CUtensorMap map; // 128 bytes, 64-byte aligned
};

// The driver's function is looked up by way of the runtime, so that the program needs no libcuda to start.
typedef decltype(&cuTensorMapEncodeTiled) tensor_map_encode;
#if CUDART_VERSION >= 12050
// Sets *function to the driver's cuTensorMapEncodeTiled, *found to CUDA's result of the search. Returns CUDA's error.
static cudaError_t tensor_map_look_up(void **function, enum cudaDriverEntryPointQueryResult *found) {
    return cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", function, 12000, cudaEnableDefault, found);
}
#else // CUDA 13 does not have this function
static cudaError_t tensor_map_look_up(void **function, enum cudaDriverEntryPointQueryResult *found) {
    return cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", function, cudaEnableDefault, found);
}
#endif
// Returns the driver's cuTensorMapEncodeTiled. Ends the program where the driver has none.
static tensor_map_encode tensor_map_find_encoder(void) {
    void *function = NULL;
    enum cudaDriverEntryPointQueryResult found;
    cuda_check(tensor_map_look_up(&function, &found));
    if (found != cudaDriverEntryPointSuccess || !function)
        fail("the driver has no tensor maps: CUDA 12.0 or newer is needed");
    return (tensor_map_encode)function;
}
static tensor_map_encode tensor_map_encoder(void) {
    static const tensor_map_encode encoder = tensor_map_find_encoder();
    return encoder;
}

// Returns the map of a 4-D view of bf16 in device memory. dims are innermost first: D, heads, T, B; strides_bytes are
// of all but the first. A box has `box_rows` rows along T of one head's `box_columns` elements: 16, 32 or 64, which are
// a swizzle of 32, 64 or 128 bytes. Past a dim's end TMA reads 0 and writes nothing. Ends the program if CUDA refuses.
static struct tensor_map tensor_map_of(const bf16 *base, const uint64_t dims[4], const uint64_t strides_bytes[3],
                                       int box_columns, int box_rows) {
    struct tensor_map result;
    const cuuint64_t sizes[4] = {dims[0], dims[1], dims[2], dims[3]};
    const cuuint64_t strides[3] = {strides_bytes[0], strides_bytes[1], strides_bytes[2]};
    const cuuint32_t box[4] = {(cuuint32_t)box_columns, 1, (cuuint32_t)box_rows, 1}, steps[4] = {1, 1, 1, 1};
    const CUtensorMapSwizzle swizzle = box_columns == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                                       : box_columns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                           : CU_TENSOR_MAP_SWIZZLE_32B;
    const CUresult status = tensor_map_encoder()(
        &result.map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void *)(uintptr_t)base, sizes, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS)
        fail("cuTensorMapEncodeTiled: error %d for a view of %llu x %llu x %llu x %llu at %p, box %d x %d", (int)status,
             (unsigned long long)dims[0], (unsigned long long)dims[1], (unsigned long long)dims[2],
             (unsigned long long)dims[3], (const void *)base, box_columns, box_rows);
    return result;
}
#endif
