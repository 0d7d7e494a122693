// What kernels/channel_scale.cuh declares.
#include "kernels/channel_scale.cuh"

#ifdef TARGET_CUDA
static __global__ void channel_scale_forward_kernel(floatX *out, const floatX *in, const floatX *scale, int64_t n,
                                                    int C) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[i] = to_floatX(to_float(in[i]) * to_float(scale[i % C]));
}
void channel_scale_forward(floatX *out, const floatX *in, const floatX *scale, int64_t N, int C, struct device *dev) {
    LAUNCH(dev, channel_scale_forward_kernel, blocks_for(N * C, 256), 256, 0, out, in, scale, N * C, C);
}
static __global__ void channel_scale_backward_kernel(floatX *din, float *dscale, const floatX *dout, const floatX *in,
                                                     const floatX *scale, int64_t N, int C, bool add) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= C)
        return;
    float sum = add ? dscale[c] : 0;
    for (int64_t n = 0; n < N; n++) {
        const float d = to_float(dout[n * C + c]);
        sum += d * to_float(in[n * C + c]);
        din[n * C + c] = to_floatX(d * to_float(scale[c]));
    }
    dscale[c] = sum;
}
void channel_scale_backward(floatX *din, float *dscale, const floatX *dout, const floatX *in, const floatX *scale,
                            int64_t N, int C, bool add, struct device *dev) {
    LAUNCH(dev, channel_scale_backward_kernel, blocks_for(C, 256), 256, 0, din, dscale, dout, in, scale, N, C, add);
}
#else
void channel_scale_forward(floatX *out, const floatX *in, const floatX *scale, int64_t N, int C, struct device *dev) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < N * C; i++)
        out[i] = to_floatX(to_float(in[i]) * to_float(scale[i % C]));
}
void channel_scale_backward(floatX *din, float *dscale, const floatX *dout, const floatX *in, const floatX *scale,
                            int64_t N, int C, bool add, struct device *dev) {
#pragma omp parallel for schedule(static)
    for (int c = 0; c < C; c++) {
        float sum = add ? dscale[c] : 0;
        for (int64_t n = 0; n < N; n++) {
            const float d = to_float(dout[n * C + c]);
            sum += d * to_float(in[n * C + c]);
            din[n * C + c] = to_floatX(d * to_float(scale[c]));
        }
        dscale[c] = sum;
    }
}
#endif
