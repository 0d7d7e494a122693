// Attention by cuDNN, on a GPU, bf16: memory linear in T, causal or full, grouped queries, without dropout. The library
// is loaded at run time and may be absent.
//
// The forms by which cuDNN is asked: attention_cudnn_graphs.cuh.
//
// Q, K and V are read from packed qkv and their gradients written to packed dqkv, by strides. What forward keeps for
// backward is the log-sum-exp of each row, as flash attention's.
//
// An execution plan is made the first time that a shape is asked for, which takes the host some time, and kept until
// the library is closed: recorded graphs hold its kernels. A call with a plan allocates nothing on the GPU and
// synchronizes nothing, so that it can be recorded.
//
// Determinism. cuDNN states that most of its routines give the same bits in every run of one version on one
// architecture (its developer guide, "Reproducibility"); an engine that does not carries a note. Forward: the report
// says whether the engine has the note; without it recomputation should change no bit. Backward: enum fused_order.
#pragma once
#include "kernels/attention_shape.cuh" // struct attention_shape
#include "kernels/device.cuh"          // floatX, struct device
#include <sys/cdefs.h>                 // __BEGIN_DECLS

__BEGIN_DECLS
void fused_close(struct device *dev);
const char *fused_describe(struct device *dev);
bool fused_leads(bool own, struct device *dev);
const char *fused_gpu(char *text, size_t size, struct device *dev);
bool fused_takes(struct attention_shape shape, struct device *dev);
size_t fused_forward_workspace_bytes(struct attention_shape shape, struct device *dev);
size_t fused_backward_workspace_bytes(struct attention_shape shape, bool any_order, struct device *dev);
const char *fused_describe_plans(char *text, size_t size, struct attention_shape shape, bool any_order,
                                 struct device *dev);
void fused_forward(floatX *out,       // (B, T, H * D)
                   float *lse,        // (B, H, T); NULL: not written
                   const floatX *qkv, // (B, T, (H + 2 Hkv) * D)
                   struct attention_shape shape, uint32_t *amax, void *workspace, struct device *dev);
void fused_backward(floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out, const float *lse,
                    struct attention_shape shape, bool any_order, uint32_t *amax, void *workspace, struct device *dev);
void fused_unavailable_reason(char *reason, size_t size, struct attention_shape shape, bool any_order,
                              struct device *dev);
void fused_check(char *reason, size_t size, struct attention_shape like, bool any_order, struct device *dev);
__END_DECLS
