// Attention by cuDNN, on a GPU, bf16: memory linear in T, causal or full, grouped queries, without dropout. The library
// is loaded at run time and may be absent. The forms by which cuDNN is asked: cudnn/attention_graphs.cuh.
//
// Q, K and V are read from packed qkv and their gradients written to packed dqkv, by strides. What forward keeps for
// backward is the log-sum-exp of each row, as flash attention's.
//
// An execution plan is made the first time that a shape is asked for, which takes the host some time, and kept until
// the library is closed: recorded graphs hold its kernels. A call with a plan allocates nothing on the GPU and
// synchronizes nothing, so that it can be recorded.
//
// Determinism. cuDNN states that most of its routines give the same bits in every run of one version on one
// architecture (its developer guide, "Reproducibility"); an engine whose bits may differ carries a note. Forward: the
// report says whether the engine has the note; without it recomputation should change no bit. Backward: fused_order.
#pragma once
#include "kernels/attention/shape.cuh" // struct attention_shape
#include "kernels/device.cuh"          // floatX, struct device
#include "kernels/fp8/attention.cuh"   // struct fp8_attention_demands
#include <stdint.h>                    // uint64_t
#include <sys/cdefs.h>                 // __BEGIN_DECLS

__BEGIN_DECLS
// Frees the library and its plans, which no recorded graph may hold, before device_close. Nothing need be open.
void fused_close(struct device *dev);
// Returns the library's name and version, empty where it can't be loaded; only "cuDNN" without an open GPU and in a
// build for fp32 or the CPU. The text lives until fused_close. The first call loads the library.
const char *fused_describe(struct device *dev);
// Returns a number that tells the installed library from another, without calling it; 0: none, or none in this build.
uint64_t fused_installed(void);
// Whether fused is by published figures faster than our kernels on this GPU; false where none is open. own: our kernels
// for 9.0 take the shape. On 10.x our kernels are written for 8.0's tensor cores; on 9.0 cuDNN is twice as fast as such
// kernels. On 8.x and 12.x figures disagree or are against it (docs/internals/attention-cudnn.md).
bool fused_leads(bool own, struct device *dev);
// Returns the compute capability, as 9.0, in `text` (size bytes), of the open or the planned GPU; neither: a constant.
const char *fused_gpu(char *text, size_t size, struct device *dev);
// Whether fused computes forward of this shape, asked at each call of attention: prompts and windows have other shapes.
// Makes the plan unless it is there; without an open GPU goes by rules.
bool fused_takes(struct attention_shape shape, struct device *dev);
// The number of bytes of workspace of fused_forward, for a shape that it takes; without an open GPU an estimate.
size_t fused_forward_workspace_bytes(struct attention_shape shape, struct device *dev);
// The number of bytes of fused_backward's workspace for a shape that it takes, by any_order; an estimate without a GPU.
size_t fused_backward_workspace_bytes(struct attention_shape shape, bool any_order, struct device *dev);
// Returns what the plans take and whether forward gives the same bits again, in `text` (size bytes), or, without an
// open GPU, a constant that says so. Makes the plans. any_order: of backward.
const char *fused_describe_plans(char *text, size_t size, struct attention_shape shape, bool any_order,
                                 struct device *dev);
// out = softmax(scale Q K^T + causal mask) V, without mask where shape.full; lse = ln(sum of e^s) of each row's masked,
// scaled scores s. Enqueued; ends the program if cuDNN refuses a plan. amax: kernels/amax.cuh's, of out, or NULL.
void fused_forward(floatX *out,       // (B, T, H * D)
                   float *lse,        // (B, H, T); NULL: not written
                   const floatX *qkv, // (B, T, (H + 2 Hkv) * D)
                   struct attention_shape shape, uint32_t *amax, void *workspace, struct device *dev);
// Writes to all of dqkv, enqueued, the gradient of fused_forward, whose shape, qkv, out and lse these are. amax:
// dqkv's, or NULL. any_order: the bits may differ from run to run. workspace: fused_backward_workspace_bytes.
void fused_backward(floatX *dqkv,       // (B, T, (H + 2 Hkv) * D)
                    const floatX *dout, // (B, T, H * D)
                    const floatX *qkv,  // (B, T, (H + 2 Hkv) * D)
                    const floatX *out,  // (B, T, H * D)
                    const float *lse,   // (B, H, T)
                    struct attention_shape shape, bool any_order, uint32_t *amax, void *workspace, struct device *dev);
// Writes to `reason` (size bytes) why fused can't take the shape, forward or backward; an empty text where it takes
// both. Makes their plans; without an open GPU goes by the rules of the newest version, for the planned GPU.
void fused_unavailable_reason(char *reason, size_t size, struct attention_shape shape, bool any_order,
                              struct device *dev);
// Writes to `reason` (size bytes) why fused refuses FUSED_CHECK_TOKENS tokens of such heads, or how it differs there
// from flash attention, or from itself computed again; an empty text where neither is so, no GPU is open or no flash
// takes the shape. If so with forward as one operation, drops all plans, so that no graph may be recorded yet, and
// checks forward as a graph of operations, as it is from then on. A build for fp32 or the CPU leaves `reason` as it is.
void fused_check(char *reason, size_t size, struct attention_shape like, bool any_order, struct device *dev);
// Writes to `reason` (size bytes) why FP8 attention refuses FUSED_CHECK_TOKENS tokens of such heads or, if a flash
// takes them, how it differs there from flash attention of the same codes, or from itself computed again; an empty text
// where neither is so, where no GPU is open, and in a build for fp32 or the CPU.
void fp8_attention_check(char *reason, size_t size, struct attention_shape like, struct fp8_attention_demands demands,
                         struct device *dev);
__END_DECLS
