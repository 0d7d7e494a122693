// The flash attention backends: memory linear in T, causal, grouped queries. The softmax goes over the keys tile by
// tile, with a running maximum and sum that rescale what was added before, and backward makes the scores again (Dao et
// al. 2022, "FlashAttention", arXiv 2205.14135). Of what forward computes, each row keeps only its log-sum-exp, and
// work is divided by queries in forward, by keys in backward (Dao 2023, "FlashAttention-2", arXiv 2307.08691).
//   flash_*   with dropout: kernels/attention/cpu.cu on the CPU, kernels/attention/sm80.cu (mma.sync) on a GPU
//   sm90_*    without dropout, with or without the causal mask, and with RoPE's backward: wgmma, bf16, on a GPU of
//             compute capability 9.0, by kernels/attention/sm90_forward.cu and kernels/attention/sm90_backward.cu
// amax is kernels/amax.cuh's, into which the amax of out or dqkv is merged; NULL: none is taken. On a GPU pointers are
// aligned to 16 bytes. A shape that the backend has no kernel for ends the program.
#pragma once
#include "kernels/attention/shape.cuh" // struct attention_shape, struct attention_backward_options
#include "kernels/device.cuh"          // floatX, struct device
#include "kernels/random.cuh"          // struct dropout
#include <sys/cdefs.h>                 // __BEGIN_DECLS

__BEGIN_DECLS
// Writes to `reason` (size bytes) why flash_* can't take the shape's sizes. Empty where they can, as on every CPU.
void flash_unavailable_reason(char *reason, size_t size, struct attention_shape shape, const struct device *dev);
// Writes to `reason` (size bytes) why sm90_* can't be used: for the shape's sizes or softcap, the (planned) GPU, or
// this build. It is empty where they can. Asks the driver, which takes time: don't call it at each launch.
void sm90_unavailable_reason(char *reason, size_t size, struct attention_shape shape, struct device *dev);
// Returns the instructions and the types of the products, as constant text.
const char *flash_describe(const struct device *dev);
// Whether unfused attention is expected to be faster, on this GPU or the one that is planned for. It is false on a CPU.
bool flash_is_slower(const struct device *dev);
const char *sm90_describe(void);

size_t flash_forward_workspace_bytes(struct attention_shape shape, const struct device *dev);
// out = dropout(softmax(scale Q K^T + causal mask)) V, with the shape's softcap and hidden keys. lse = ln(sum of e^s)
// over each row's scores s after scale, softcap and mask. Attention is causal even if shape.full is set.
void flash_forward(floatX *out,       // (B, T, H * D)
                   float *lse,        // (B, H, T); NULL: not written
                   const floatX *qkv, // (B, T, (H + 2 Hkv) * D)
                   struct attention_shape shape, struct dropout dropout, uint32_t *amax, void *workspace,
                   struct device *dev);
size_t flash_backward_workspace_bytes(struct attention_shape shape, const struct device *dev);
// Computes the gradient of flash_forward, whose shape, dropout, qkv, out and lse it takes. Writes all of dqkv.
void flash_backward(floatX *dqkv,       // (B, T, (H + 2 Hkv) * D)
                    const floatX *dout, // (B, T, H * D)
                    const floatX *qkv,  // (B, T, (H + 2 Hkv) * D)
                    const floatX *out,  // (B, T, H * D)
                    const float *lse,   // (B, H, T)
                    struct attention_shape shape, struct dropout dropout, uint32_t *amax, void *workspace,
                    struct device *dev);

// Returns the bytes of workspace that sm90_forward needs with a first_key, whether or not the shape has one yet.
size_t sm90_forward_workspace_bytes(struct attention_shape shape);
// out = softmax(scale Q K^T + mask) V; lse = log2(sum of e^s) over each row's scaled, masked scores s. The mask is
// causal, and hides keys before shape.first_key. With shape.full there is no mask, and a first_key ends the program.
void sm90_forward(floatX *out,       // (B, T, H * D)
                  float *lse,        // (B, H, T); NULL: not written
                  const floatX *qkv, // (B, T, (H + 2 Hkv) * D)
                  struct attention_shape shape, uint32_t *amax,
                  void *workspace, // used where shape.first_key is given
                  struct device *dev);
// The number of runs of rows over which backward sums dqkv's columns, each a row of options.bias_partial.
int64_t sm90_bias_num_runs(struct attention_shape shape);
size_t sm90_backward_workspace_bytes(struct attention_shape shape);
// Computes the gradient of sm90_forward, whose shape, qkv, out and lse it takes. Writes all of dqkv, with RoPE undone
// on dQ and dK where options.rotary is given. With shape.full, a first_key or options.positions end the program.
void sm90_backward(floatX *dqkv,       // (B, T, (H + 2 Hkv) * D)
                   const floatX *dout, // (B, T, H * D)
                   const floatX *qkv,  // (B, T, (H + 2 Hkv) * D)
                   const floatX *out,  // (B, T, H * D)
                   const float *lse,   // (B, H, T), to base 2
                   struct attention_shape shape, struct attention_backward_options options, void *workspace,
                   struct device *dev);
__END_DECLS
