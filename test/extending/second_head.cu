// What kernels/second_head.cuh declares.
#include "kernels/second_head.cuh"

#ifdef TARGET_CUDA
static __global__ void targets_after_kernel(int32_t *after, const int32_t *targets, int64_t N, int T) {
    const int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n < N)
        after[n] = (n + 1) % T && targets[n] >= 0 ? targets[n + 1] : -1;
}
void targets_after(int32_t *after, const int32_t *targets, int B, int T, struct device *dev) {
    const int64_t N = (int64_t)B * T;
    LAUNCH(dev, targets_after_kernel, blocks_for(N, 256), 256, 0, after, targets, N, T);
}
static __global__ void losses_add_kernel(float *losses, const float *more, int64_t N) {
    const int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n < N)
        losses[n] += more[n];
}
void losses_add(float *losses, const float *more, int64_t N, struct device *dev) {
    LAUNCH(dev, losses_add_kernel, blocks_for(N, 256), 256, 0, losses, more, N);
}
#else
void targets_after(int32_t *after, const int32_t *targets, int B, int T, struct device *dev) {
    for (int64_t n = 0; n < (int64_t)B * T; n++)
        after[n] = (n + 1) % T && targets[n] >= 0 ? targets[n + 1] : -1;
}
void losses_add(float *losses, const float *more, int64_t N, struct device *dev) {
    for (int64_t n = 0; n < N; n++)
        losses[n] += more[n];
}
#endif
