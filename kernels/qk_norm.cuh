// QK-norm (Dehghani et al. 2023, arXiv 2302.05442): RMSNorm of queries and keys, before their rotary embedding, by
// learned weights, with statistics in fp32. A token has rows of q, k and v, and v's pass unchanged. A row is a head
// (Qwen 3, Gemma 3) or, in full width, all heads of q, k or v (OLMo 2).
#pragma once
#include "kernels/device.cuh"    // floatX
#include "kernels/positions.cuh" // struct token_positions, token_position
#include <sys/cdefs.h>           // __BEGIN_DECLS

struct qk_norm_shape {
    int H, Hkv, D; // heads of q, of k and of v, and their size: a multiple of 8 up to 256
    bool full_width;
    bool one_plus; // a weight is stored as its difference from 1, which is added in fp32
    float epsilon; // added to the mean square
};

// The rotary embedding of what is normalized, as rope_forward takes it: the N tokens are (N / T, T).
struct qk_norm_rotary {
    const float *table; // (more than the largest position, D); NULL: none
    struct token_positions positions;
    int T;
};

__BEGIN_DECLS
// Normalizes q's and k's rows x to x * rstd * w, rstd = 1 / sqrt(mean(x^2) + epsilon), w = weight or, with one_plus, 1
// + weight. Rotates them where there is a table, to the same bits as rope_forward would afterwards. Copies v's rows.
void qk_norm_forward(floatX *out,       // (N, (H + 2 Hkv) D); may be qkv
                     float *rstd,       // (N, H + Hkv), in full width (N, 2); NULL: not written
                     const floatX *qkv, // (N, (H + 2 Hkv) D)
                     const floatX *wq,  // (D), in full width (H D)
                     const floatX *wk,  // (D), in full width (Hkv D)
                     int64_t N, struct qk_norm_shape shape, struct qk_norm_rotary rotary, struct device *dev);

size_t qk_norm_backward_workspace_bytes(int64_t N, struct qk_norm_shape shape, const struct device *dev);
// Turns dqkv, the gradient of what qk_norm_forward computed before rotation (rope_backward comes first), into qkv's
// gradient; v's part stays. With y = x * rstd and g = dout * weight, in an order that depends only on the sizes,
//   dx = rstd * (g - y * mean(g * y));  dweight = sum over rows of dout * y, or += where `add`
void qk_norm_backward(floatX *dqkv,      // (N, (H + 2 Hkv) D)
                      float *dwq,        // (D), in full width (H D); NULL: not wanted
                      float *dwk,        // (D), in full width (Hkv D); NULL: not wanted
                      const floatX *qkv, // (N, (H + 2 Hkv) D), forward's input
                      const floatX *wq,  // (D), in full width (H D)
                      const floatX *wk,  // (D), in full width (Hkv D)
                      const float *rstd, // (N, H + Hkv), in full width (N, 2); by forward
                      int64_t N, struct qk_norm_shape shape, bool add, void *workspace, struct device *dev);
__END_DECLS

// A token's rows: q_rows of q_width elements, then k_rows of k_width, then as many of v.
struct qk_rows {
    int q_rows, k_rows, q_width, k_width;
    int width; // of a token
};
static inline struct qk_rows qk_rows_of(struct qk_norm_shape s) {
    const struct qk_rows heads = {s.H, s.Hkv, s.D, s.D, (s.H + 2 * s.Hkv) * s.D},
                         whole = {1, 1, s.H * s.D, s.Hkv * s.D, (s.H + 2 * s.Hkv) * s.D};
    return s.full_width ? whole : heads;
}
