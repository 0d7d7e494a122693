// Tells any build whether a GPU takes attention by wgmma, and its sizes. Where it isn't built, calls end the program.
#include "kernels/attention/flash.cuh" // the prototypes
#include "kernels/gpu_sizes.cuh"       // gpu_sm90_unavailable_reason, gpu_sm90_backward_bytes

const char *sm90_describe(void) { return GPU_SM90_NAME; }
size_t sm90_forward_workspace_bytes(struct attention_shape shape) { return gpu_sm90_forward_bytes(shape); }
size_t sm90_backward_workspace_bytes(struct attention_shape shape) { return gpu_sm90_backward_bytes(shape); }
int64_t sm90_bias_num_runs(struct attention_shape shape) { return gpu_sm90_bias_num_runs(shape); }

#if defined(TARGET_CUDA) && defined(PRECISION_BF16)
#include "kernels/attention/sm90.cuh" // sm90_properties

void sm90_unavailable_reason(char *reason, size_t size, struct attention_shape shape, struct device *dev) {
    struct compute_capability gpu = dev->planned;
    if (gpu.major == 0) {
        const struct cudaDeviceProp properties = sm90_properties(dev);
        gpu.major = properties.major;
        gpu.minor = properties.minor;
    }
    gpu_sm90_unavailable_reason(reason, size, shape, gpu);
}

#else
#include "runtime/machine/error.h" // fail

void sm90_unavailable_reason(char *reason, size_t size, struct attention_shape shape, struct device *dev) {
    if (sizeof(floatX) == 2 && device_is_gpu(dev))
        gpu_sm90_unavailable_reason(reason, size, shape, dev->planned);
    else
        snprintf(reason, size, "takes only bf16 on a GPU");
}
// Ends the program. Never called: a build for fp32 or the CPU chooses wgmma only to plan a run.
void sm90_forward(floatX *out, float *lse, const floatX *qkv, struct attention_shape shape, uint32_t *amax,
                  void *workspace, struct device *dev) {
    fail("flash attention by wgmma takes only bf16 on a GPU");
}
void sm90_backward(floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out, const float *lse,
                   struct attention_shape shape, struct attention_backward_options options, void *workspace,
                   struct device *dev) {
    fail("flash attention by wgmma takes only bf16 on a GPU");
}

#endif
