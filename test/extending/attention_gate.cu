// What kernels/attention_gate.cuh declares.
#include "kernels/attention_gate.cuh"
#include <math.h> // expf

HOST_DEVICE void gate_forward(floatX *out, const floatX *att, const floatX *gate) {
    *out = to_floatX(to_float(*att) / (1 + expf(-to_float(*gate))));
}
HOST_DEVICE void gate_backward(floatX *datt, floatX *dgate, const floatX *dout, const floatX *att, const floatX *gate) {
    const float d = to_float(*dout), share = 1 / (1 + expf(-to_float(*gate)));
    *datt = to_floatX(d * share);
    *dgate = to_floatX(d * to_float(*att) * share * (1 - share));
}

#ifdef TARGET_CUDA
static __global__ void gate_forward_kernel(floatX *out, const floatX *att, const floatX *gate, int64_t n) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        gate_forward(out + i, att + i, gate + i);
}
void attention_gate_forward(floatX *out, const floatX *att, const floatX *gate, int64_t n, struct device *dev) {
    LAUNCH(dev, gate_forward_kernel, blocks_for(n, 256), 256, 0, out, att, gate, n);
}
static __global__ void gate_backward_kernel(floatX *datt, floatX *dgate, const floatX *dout, const floatX *att,
                                            const floatX *gate, int64_t n) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        gate_backward(datt + i, dgate + i, dout + i, att + i, gate + i);
}
void attention_gate_backward(floatX *datt, floatX *dgate, const floatX *dout, const floatX *att, const floatX *gate,
                             int64_t n, struct device *dev) {
    LAUNCH(dev, gate_backward_kernel, blocks_for(n, 256), 256, 0, datt, dgate, dout, att, gate, n);
}
#else
void attention_gate_forward(floatX *out, const floatX *att, const floatX *gate, int64_t n, struct device *dev) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++)
        gate_forward(out + i, att + i, gate + i);
}
void attention_gate_backward(floatX *datt, floatX *dgate, const floatX *dout, const floatX *att, const floatX *gate,
                             int64_t n, struct device *dev) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++)
        gate_backward(datt + i, dgate + i, dout + i, att + i, gate + i);
}
#endif
