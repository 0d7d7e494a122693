// Causal attention with grouped queries whose four products of forward and backward multiply FP8 matrices, one scale a
// tensor, as TransformerEngine's fp8_dpa (d0067d0, pytorch/attention/dot_product_attention).
//   fp8_attention_*   on the CPU, by kernels/fp8/attention_cpu.cu, which is the reference; on a GPU cuDNN's, by
//                     kernels/cudnn/fp8_attention.cu; in a build for fp32 nothing takes a shape
//   the casts         of both targets, by kernels/fp8/attention_casts.cu
// The formulas. x8 are the values of codes, E(x, s) is the value of the code fp8(x s), s_x the scale of x; every sum
// is in fp32. P's scale is FP8_ATTENTION_P_SCALE, always.
//   forward   S = ((sum q8 k8) scale) / s_q / s_k   m = max S   l = sum e^(S - m), unrounded   lse = m + ln l
//             P8 = E4M3(e^(S - m) / l, 256)   O = (sum P8 v8) / 256 / s_v   O8 = E4M3(O, s_o)
//   backward  D = (sum dO8 O8) / s_do / s_o   P = e^(S - lse)   P8 = E4M3(P, 256)
//             dP = (sum dO8 v8) / s_do / s_v   dS = (dP - D) P scale   dS8 = E(dS, s_ds)
//             dV = sum over heads and queries P8 dO8 / 256 / s_do
//             dQ = (sum dS8 k8) / s_ds / s_k   dK = sum over heads and queries dS8 q8 / s_ds / s_q
// q, k, v, P and O are E4M3; dO, dS, dQ, dK and dV are struct fp8_attention's `gradients`.
// Outputs. Where `outputs_in_fp8` (delayed scales; all that cuDNN has on compute capability 9.0) O leaves as O8, and
// dQ, dK and dV are rounded to E(x, s_x) before they leave as floatX. Their scales, and always dS's, are known before
// their values are. Elsewhere O, dQ, dK and dV leave as floatX.
// Amaxes are of what is unrounded, in fp32, before the scale, and are merged into the scales' `amax`.
#pragma once
#include "kernels/attention/shape.cuh" // struct attention_shape
#include "kernels/fp8/fp8.cuh"         // struct fp8_scale, enum fp8_format
#include <sys/cdefs.h>                 // __BEGIN_DECLS

// The tensors of a layer's attention that have scales of their own. O's is the scale of the projection's input, O8.
enum fp8_attention_tensor {
    FP8_ATTENTION_Q,
    FP8_ATTENTION_K,
    FP8_ATTENTION_V,
    FP8_ATTENTION_DOUT,
    FP8_ATTENTION_DS,
    FP8_ATTENTION_DQ,
    FP8_ATTENTION_DK,
    FP8_ATTENTION_DV,
    FP8_ATTENTION_TENSORS
};
#define FP8_ATTENTION_P_SCALE 256.0f

struct fp8_attention {
    struct attention_shape shape; // asks for no feature (attention_asked)
    enum fp8_format gradients;
    bool outputs_in_fp8;
    bool full;      // backward is fp8_attention_backward; false: the scales of q, k and v are powers of two, so that
                    // the values that another backward reads are exact in bf16
    bool any_order; // dQ may be summed in an order, and so with bits, that differ from call to call
    // On a GPU, whose memory the host does not read: whether a scale that has to be known beforehand may have `delayed`
    // 0. The calls then are not recorded in a graph. The CPU looks at `delayed` itself.
    bool calibrates;
    struct fp8_scale *scales[FP8_ATTENTION_TENSORS]; // in device memory; NULL: [FP8_ATTENTION_DOUT] on unless `full`,
                                                     // [FP8_ATTENTION_DQ] on unless `full` and outputs_in_fp8
    struct fp8_scale *out;                           // O's
};
// Decides, beside the shape, whether FP8 attention can be computed.
struct fp8_attention_demands {
    bool full;      // backward too
    bool delayed;   // outputs_in_fp8
    bool any_order; // --deterministic-mode=false
    enum fp8_format gradients;
};

__BEGIN_DECLS
// Writes to `reason` (size bytes) why the device, open or only planned, can't compute FP8 attention of this shape as
// demanded; writes "" if it can. On an open GPU this makes cuDNN's plans.
void fp8_attention_unavailable_reason(char *reason, size_t size, struct attention_shape shape,
                                      struct fp8_attention_demands demands, struct device *dev);
// Returns, until fused_close, what does FP8 attention: "cuDNN", with its version on an open GPU, or the CPU's unit.
const char *fp8_attention_describe(struct device *dev);

size_t fp8_attention_forward_workspace_bytes(struct attention_shape shape, struct fp8_attention_demands demands,
                                             struct device *dev);
// Computes O and lse, after fp8_attention_cast. takes_amax merges O's amax into a.out; recomputation passes false, and
// takes the first forward's. Unless outputs_in_fp8, the amax is of `out` as stored. With outputs_in_fp8, sets a.out's
// scale (fp8_set_scales) before O8; if `delayed` is 0, or a.calibrates on a GPU, takes_amax first runs forward for it.
void fp8_attention_forward(fp8 *out8,       // (B, T, H * D); NULL unless a.outputs_in_fp8
                           floatX *out,     // (B, T, H * D); NULL where a.outputs_in_fp8
                           float *lse,      // (B, H, T), natural
                           const fp8 *qkv8, // (B, T, (H + 2 Hkv) * D)
                           struct fp8_attention a, bool takes_amax, void *workspace, struct device *dev);

size_t fp8_attention_backward_workspace_bytes(struct attention_shape shape, struct fp8_attention_demands demands,
                                              struct device *dev);
// Overwrites all of dqkv with the gradient of fp8_attention_forward, but doesn't undo RoPE. Needs a.full. Reads the
// `inverse` of q, k, v, dO and O. Before they are used, sets the scales of dS and, where outputs_in_fp8, of dQ, dK and
// dV (fp8_set_scales). If one has `delayed` 0, on a GPU if a.calibrates, earlier runs find dS's amax, then the others'.
// Merges the amaxes of these tensors into their scales, and dqkv's amax, as stored, into amax unless NULL.
void fp8_attention_backward(floatX *dqkv,     // (B, T, (H + 2 Hkv) * D)
                            const fp8 *dout8, // (B, T, H * D), cast by the scale [FP8_ATTENTION_DOUT]
                            const fp8 *qkv8,  // (B, T, (H + 2 Hkv) * D)
                            const fp8 *out8,  // (B, T, H * D), cast by a.out
                            const float *lse, // (B, H, T), natural
                            struct fp8_attention a, uint32_t *amax, void *workspace, struct device *dev);

// ---- the casts, by kernels/fp8/attention_casts.cu ----

// Casts q, k and v to E4M3, each by a scale, as fp8_cast does, and sets the scales' `scale` and `inverse`. Unless
// a.full, scales are rounded down to powers of two. takes_amax first merges the amaxes; recomputation passes false.
void fp8_attention_cast(fp8 *qkv8,         // (B, T, (H + 2 Hkv) * D)
                        const floatX *qkv, // (B, T, (H + 2 Hkv) * D)
                        struct fp8_attention a, bool takes_amax, struct device *dev);
// out = codes, each times the inverse of its head's scale, rounded to floatX
void fp8_attention_read_back(floatX *out,                       // (B, T, (H + 2 Hkv) * D)
                             const fp8 *codes,                  // (B, T, (H + 2 Hkv) * D)
                             struct fp8_scale *const scales[3], // of q, k and v heads
                             enum fp8_format format, struct attention_shape shape, struct device *dev);
// out (n) = codes (n), each times scale->inverse, rounded to floatX; n is a multiple of 16.
void fp8_read_back(floatX *out, const fp8 *codes, struct fp8_scale *scale, enum fp8_format format, int64_t n,
                   struct device *dev);
// Sets `scale` and `inverse` of scales (count <= FP8_ATTENTION_TENSORS) to what a cast takes, by fp8_scale_for.
void fp8_set_scales(struct fp8_scale *const *scales, int count, enum fp8_format format, struct device *dev);
// out (n) = lse (n) times the factor: for a backward whose log-sum-exps have another base
void fp8_attention_scale_lse(float *out, const float *lse, float factor, int64_t n, struct device *dev);
__END_DECLS
