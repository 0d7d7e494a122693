// Token and position embedding, with dropout on their sum.
#pragma once
#include "kernels/positions.cuh" // struct token_positions
#include "kernels/device.cuh"    // floatX
#include "kernels/random.cuh"    // struct dropout, dropout_scales
#include <sys/cdefs.h>           // __BEGIN_DECLS

__BEGIN_DECLS
// out = dropout(scale * (wte[token] + wpe[position])) for each token.
void embedding_forward(floatX *out,           // (B * T, C)
                       const int32_t *tokens, // (B, T)
                       const floatX *wte,     // (Vp, C)
                       const floatX *wpe,     // (more than the largest position, C); NULL: no learned positions
                       struct token_positions positions, int B, int T, int C, float scale, struct dropout dropout,
                       struct device *dev);

struct table_gradient {
    float *sums;  // (rows, C); NULL: none, or not wanted
    int64_t rows; // more than the largest index
    bool add;     // to `sums`; else every row is overwritten, with zeroes where it has no token
};
// Returns the bytes of embedding_backward's workspace on a GPU, also one that is only planned for; 0 on a CPU.
size_t embedding_backward_workspace_bytes(int B, int T, const struct device *dev);
// dwte[token] and dwpe[position] = sums over the tokens, in a fixed order, of scale * dout * forward's dropout scales
void embedding_backward(struct table_gradient dwte, // sums NULL: skipped; add: += for =, else rows of no token become 0
                        struct table_gradient dwpe, // like dwte
                        const floatX *dout,         // (B * T, C)
                        const int32_t *tokens,      // (B, T)
                        struct token_positions positions, int B, int T, int C, float scale, struct dropout dropout,
                        void *workspace, struct device *dev);
__END_DECLS
