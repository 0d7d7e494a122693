// Tells whether the host and the GPU of this machine see the same memory, as op tests need it: memory_probe
// managed|pinned. Exit status 0: values pass both ways. 1: they don't, and stdout says why. A machine on which this
// program hangs has no such memory either, so it runs under a time limit. On compute capability 9.0 it also tries bulk
// copies and bulk reductions, which attention uses.
#include "kernels/ptx_sm90.cuh" // bulk_load, bulk_reduce_add
#include <cuda_runtime.h>
#include <stdio.h>  // printf
#include <string.h> // strcmp

enum { COUNT = 1 << 18, BULK = 1 << 10 };

static __global__ void twice(float *x) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < COUNT)
        x[i] *= 2;
    if (i < 32)
        atomicAdd(&x[COUNT], 1.0f);
}

// Doubles x (BULK): copies it to shared memory, and adds that to it.
static __global__ void twice_by_bulk(float *x) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(CUDA_EMULATED)
    const uint32_t full = shared_memory(), stage = full + 128, bytes = BULK * sizeof *x;
    if (threadIdx.x != 0)
        return;
    mbarrier_init(full, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(full, bytes);
    bulk_load(stage, x, bytes, full);
    mbarrier_wait(full, 0);
    bulk_reduce_add(x, stage, bytes);
    bulk_commit();
    bulk_wait<0>();
#endif
}

// Runs a kernel to its end.
static cudaError_t run(void (*kernel)(float *), int blocks, int threads, size_t shared_bytes, float *x) {
    cudaLaunchConfig_t launch = {};
    launch.gridDim = dim3(blocks);
    launch.blockDim = dim3(threads);
    launch.dynamicSmemBytes = shared_bytes;
    const cudaError_t status = cudaLaunchKernelEx(&launch, kernel, x);
    return status == cudaSuccess ? cudaDeviceSynchronize() : status;
}
static int refuse(const char *what, cudaError_t status) {
    printf("%s: %s\n", what, cudaGetErrorString(status));
    return 1;
}

int main(int argc, char **argv) {
    const bool managed = argc == 2 && strcmp(argv[1], "managed") == 0;
    const size_t bytes = (COUNT + 1) * sizeof(float);
    float *x = NULL;
    if (!managed && (argc != 2 || strcmp(argv[1], "pinned") != 0)) {
        printf("usage: memory_probe managed|pinned\n");
        return 2;
    }
    struct cudaDeviceProp device;
    cudaError_t status = cudaGetDeviceProperties(&device, 0);
    if (status != cudaSuccess)
        return refuse("the device", status);
    if (managed && !(device.managedMemory && device.concurrentManagedAccess)) {
        printf("the device has no managed memory that the host may use while a kernel runs\n");
        return 1;
    }
    status = managed ? cudaMallocManaged((void **)&x, bytes, cudaMemAttachGlobal) : cudaMallocHost((void **)&x, bytes);
    if (status != cudaSuccess)
        return refuse("allocation", status);
    for (int i = 0; i <= COUNT; i++)
        x[i] = (float)(i % 1000);
    for (int turn = 0; turn < 2; turn++) { // a second time, after the host has used it
        x[COUNT] = 0;
        status = run(twice, COUNT / 256, 256, 0, x);
        if (status != cudaSuccess)
            return refuse("a kernel", status);
        for (int i = 0; i < COUNT; i++)
            if (x[i] != (float)(i % 1000) * (turn ? 4 : 2) || x[COUNT] != 32) {
                printf("the host doesn't see what the GPU wrote\n");
                return 1;
            }
    }
    if (device.major == 9) {
        status = run(twice_by_bulk, 1, 32, 128 + BULK * sizeof *x, x);
        if (status != cudaSuccess)
            return refuse("a bulk copy or reduction", status);
        for (int i = 0; i < BULK; i++)
            if (x[i] != (float)(i % 1000) * 8) {
                printf("a bulk copy or reduction is wrong in this memory\n");
                return 1;
            }
    }
    printf("the host and the GPU see each other's writes to %s memory\n", argv[1]);
    return 0;
}
