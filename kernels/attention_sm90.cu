// Whether attention by wgmma can be had; in a build without it, why not.
#include "kernels/attention_flash.cuh" // the prototypes
#if defined(TARGET_CUDA) && defined(PRECISION_BF16)
#include "kernels/attention_sm90.cuh" // sm90_properties, sm90_shape_unavailable_reason

void sm90_unavailable_reason(char *reason, size_t size, struct attention_shape shape, struct device *dev) {
    sm90_shape_unavailable_reason(reason, size, shape);
    if (*reason)
        return;
    const struct cudaDeviceProp properties = sm90_properties(dev);
    if (properties.major == 0)
        snprintf(reason, size, "needs compute capability 9.0, and no GPU is here");
    else if (properties.major != 9 || properties.minor != 0)
        snprintf(reason, size, "needs compute capability 9.0, not %d.%d", properties.major, properties.minor);
}
const char *sm90_describe(void) { return "wgmma bf16"; }

#else
#include "runtime/machine/error.h" // fail
#include <stdio.h>                 // snprintf

// In this build attention_choose never chooses flash for compute capability 9.0: its reason says why.
void sm90_unavailable_reason(char *reason, size_t size, struct attention_shape shape, struct device *dev) {
    snprintf(reason, size, "takes bf16 on a GPU alone");
}
const char *sm90_describe(void) { return ""; }
size_t sm90_forward_workspace_bytes(struct attention_shape shape) { return 0; }
size_t sm90_backward_workspace_bytes(struct attention_shape shape) { return 0; }
int64_t sm90_bias_chunks(struct attention_shape shape) { return 0; }
void sm90_forward(floatX *out, float *lse, const floatX *qkv, struct attention_shape shape, uint32_t *amax,
                  void *workspace, struct device *dev) {
    fail("flash attention by wgmma takes bf16 on a GPU alone");
}
void sm90_backward(floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out, const float *lse,
                   struct attention_shape shape, struct attention_backward_options options, void *workspace,
                   struct device *dev) {
    fail("flash attention by wgmma takes bf16 on a GPU alone");
}

#endif
