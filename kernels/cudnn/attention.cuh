// Attention by cuDNN, on a GPU, bf16: memory linear in T, causal or full, grouped queries, without dropout. The library
// is loaded at run time and may be absent. The forms by which cuDNN is asked: cudnn/attention_graphs.cuh.
//
// Packed qkv is read, and dqkv written, by strides. Forward keeps each row's log-sum-exp, as flash attention does.
//
// An execution plan is made when a shape is first asked for, and kept until the library is closed: recorded graphs hold
// its kernels. A call with a plan neither allocates GPU memory nor synchronizes, so that it can be recorded.
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
// Frees the library and its plans, if open; no recorded graph may use them any more. Call it before device_close.
void fused_close(struct device *dev);
// Returns the library's name and version, or an empty text where it can't be loaded. Without an open GPU, and in a
// build for fp32 or the CPU, it is only "cuDNN". The text lives until fused_close. The first call loads the library.
const char *fused_describe(struct device *dev);
// Returns a number that differs between installed libraries, without calling them; 0 without one, or in other builds.
uint64_t fused_installed(void);
// Whether published figures (docs/internals/attention-cudnn.md) say that cuDNN is faster than our kernels on the open
// GPU; false if no GPU is open. own: on a GPU of 9.x our kernels are preferred (attention_prefers_flash).
bool fused_leads(bool own, struct device *dev);
// Returns the open or planned GPU's compute capability, as 9.0, in `text` (size bytes), or without a GPU a constant.
const char *fused_gpu(char *text, size_t size, struct device *dev);
// Whether cuDNN computes forward of this shape. Ask at each call of attention, since prompts and windows have other
// shapes. Makes the plan unless it is there. Without an open GPU it goes by rules.
bool fused_takes(struct attention_shape shape, struct device *dev);
// The number of bytes of workspace of fused_forward, for a shape that it takes; without an open GPU an estimate.
size_t fused_forward_workspace_bytes(struct attention_shape shape, struct device *dev);
// The number of bytes of fused_backward's workspace for a shape and any_order that it takes; without a GPU estimated.
size_t fused_backward_workspace_bytes(struct attention_shape shape, bool any_order, struct device *dev);
// Returns a description of a shape's plans, which it makes, in `text` (size bytes): their workspace, and whether
// forward gives the same bits again. Without an open GPU returns a constant. any_order is backward's.
const char *fused_describe_plans(char *text, size_t size, struct attention_shape shape, bool any_order,
                                 struct device *dev);
// Enqueues out = softmax(scale Q K^T + causal mask) V, without the mask where shape.full, and lse = ln(sum of e^s) over
// each row's scaled and masked scores s. Merges out's amax unless NULL. Ends the program if cuDNN refuses a plan.
void fused_forward(floatX *out,       // (B, T, H * D)
                   float *lse,        // (B, H, T); NULL: not written
                   const floatX *qkv, // (B, T, (H + 2 Hkv) * D)
                   struct attention_shape shape, uint32_t *amax, void *workspace, struct device *dev);
// Enqueues the gradient of fused_forward, whose shape, qkv, out and lse it takes, to all of dqkv. Merges dqkv's amax
// unless NULL. With any_order its bits may differ from run to run. workspace: fused_backward_workspace_bytes.
void fused_backward(floatX *dqkv,       // (B, T, (H + 2 Hkv) * D)
                    const floatX *dout, // (B, T, H * D)
                    const floatX *qkv,  // (B, T, (H + 2 Hkv) * D)
                    const floatX *out,  // (B, T, H * D)
                    const float *lse,   // (B, H, T)
                    struct attention_shape shape, bool any_order, uint32_t *amax, void *workspace, struct device *dev);
// Writes to `reason` (size bytes) why cuDNN can't take the shape, forward or backward, or an empty text where it takes
// both. Makes their plans. Without an open GPU it goes by the rules of the newest version, for the planned GPU.
void fused_unavailable_reason(char *reason, size_t size, struct attention_shape shape, bool any_order,
                              struct device *dev);
// Tries cuDNN on FUSED_CHECK_TOKENS tokens of such heads. Writes to `reason` (size bytes) why it refuses them, or how
// it differs from flash attention or from itself computed again. Writes an empty text if all is well, no GPU is open,
// or no flash takes the shape. After a failure with forward as one operation, tries, and from then on uses, a graph of
// operations; this drops all plans, so record no graph before. A build for fp32 or the CPU leaves `reason` as it is.
void fused_check(char *reason, size_t size, struct attention_shape like, bool any_order, struct device *dev);
// Tries FP8 attention on FUSED_CHECK_TOKENS tokens of such heads. Writes to `reason` (size bytes) why it refuses them
// or, if a flash takes them, how it differs from flash attention of the same codes, or from itself computed again.
// Writes an empty text if all is well, if no GPU is open, and in a build for fp32 or the CPU.
void fp8_attention_check(char *reason, size_t size, struct attention_shape like, struct fp8_attention_demands demands,
                         struct device *dev);
__END_DECLS
