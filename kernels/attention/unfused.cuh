// Unfused attention: the baseline that flash attention is measured and tested against.
//   S = scale Q K^T     P = softmax(cap(S) + mask)     O = dropout(P) V     cap(s) = softcap tanh(s / softcap)
// P is stored whole, (B, H, T, T), with zeros where a query does not see a key; backward stores dS. Each of these
// matrices is made and read by blocks, in passes of its own; a block in which no query sees a key is neither computed
// nor read. With a softcap backward computes the scores again, since P does not tell them.
#pragma once
#include "kernels/attention/shape.cuh" // struct attention_shape
#include "kernels/random.cuh"          // struct dropout
#include <sys/cdefs.h>                 // __BEGIN_DECLS

__BEGIN_DECLS
size_t unfused_forward_workspace_bytes(struct attention_shape shape, const struct device *dev);
// P = softmax(cap(scale Q K^T) + causal mask), with the shape's softcap and first_key, and out = dropout(P) V.
// Overwrites all of out and, with P before dropout, probabilities. Merges out's amax unless NULL. Ignores shape.full.
void unfused_forward(floatX *out,           // (B, T, H * D)
                     floatX *probabilities, // (B, H, T, T)
                     const floatX *qkv,     // (B, T, (H + 2 Hkv) * D)
                     struct attention_shape shape, struct dropout dropout, uint32_t *amax, void *workspace,
                     struct device *dev);

size_t unfused_backward_workspace_bytes(struct attention_shape shape, const struct device *dev);
// Writes all of dqkv, the gradient of unfused_forward, whose arguments and P it takes. Merges dqkv's amax unless NULL.
void unfused_backward(floatX *dqkv,                // (B, T, (H + 2 Hkv) * D)
                      const floatX *dout,          // (B, T, H * D)
                      const floatX *qkv,           // (B, T, (H + 2 Hkv) * D)
                      const floatX *out,           // (B, T, H * D); not read on the CPU
                      const floatX *probabilities, // (B, H, T, T)
                      struct attention_shape shape, struct dropout dropout, uint32_t *amax, void *workspace,
                      struct device *dev);

// Returns the first key that query t of sequence b sees, from shape.first_key, in the device's memory; 0 if it is NULL.
HOST_DEVICE int unfused_first_key(struct attention_shape shape, int64_t b, int t) {
    return shape.first_key ? shape.first_key[b * shape.T + t] : 0;
}

// Returns what computes the products, for the report: their type on a GPU, or a planned one; else the CPU's kernels.
const char *unfused_compute_name(const struct device *dev);
__END_DECLS
