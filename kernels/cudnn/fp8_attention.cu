// What kernels/fp8/attention.cuh declares of FP8 attention itself, on a GPU: cuDNN's graphs.
#include "kernels/fp8/attention_rules.cuh" // fp8_attention_refuses, fp8_attention_planned_bytes
#ifdef TARGET_CUDA
#include "runtime/machine/error.h" // fail

static const char FP8_ATTENTION_ABSENT[] = "is not built in for GPUs yet: leave out --fp8-dot-product-attention";

// Writes the reason for the planned GPU where none is open: of compute capability 9.0 where none is named.
void fp8_attention_unavailable_reason(char *reason, size_t size, struct attention_shape shape,
                                      struct fp8_attention_demands demands, struct device *dev) {
    struct compute_capability gpu = dev->planned;
    if (dev->open) {
        fp8_attention_refuses_shape(reason, size, shape);
        if (!*reason)
            snprintf(reason, size, "%s", FP8_ATTENTION_ABSENT);
        return;
    }
    if (gpu.major == 0)
        gpu.major = 9;
    fp8_attention_refuses(reason, size, SIZE_MAX, gpu, shape, demands);
}
const char *fp8_attention_describe(struct device *dev) { return "cuDNN"; }
size_t fp8_attention_forward_workspace_bytes(struct attention_shape shape, struct fp8_attention_demands demands,
                                             struct device *dev) {
    return fp8_attention_planned_bytes(shape, demands, false);
}
size_t fp8_attention_backward_workspace_bytes(struct attention_shape shape, struct fp8_attention_demands demands,
                                              struct device *dev) {
    return fp8_attention_planned_bytes(shape, demands, true);
}
void fp8_attention_forward(fp8 *out8, floatX *out, float *lse, const fp8 *qkv8, struct fp8_attention a, bool takes_amax,
                           void *workspace, struct device *dev) {
    fail("FP8 attention %s", FP8_ATTENTION_ABSENT);
}
void fp8_attention_backward(floatX *dqkv, const fp8 *dout8, const fp8 *qkv8, const fp8 *out8, const float *lse,
                            struct fp8_attention a, uint32_t *amax, void *workspace, struct device *dev) {
    fail("FP8 attention %s", FP8_ATTENTION_ABSENT);
}
#endif
