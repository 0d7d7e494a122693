// Attention as the model calls it: a table of backends, and the calls to the one that run/attention_choice.cuh chooses.
// All compute causal attention with grouped queries; fused and flash for compute capability 9.0 also bidirectional
// attention (shape.full). Flash for 9.0 is faster than the other flash backend, for fewer shapes. Fused is cuDNN's, in
// bf16, loaded at run time. For backward, flash and fused keep a log-sum-exp per row, unfused T x T probabilities.
#pragma once
#include "kernels/attention/decode.cuh"  // attention_decode
#include "kernels/attention/flash.cuh"   // what flash_* and sm90_* are
#include "kernels/attention/shape.cuh"   // struct attention_shape
#include "kernels/attention/unfused.cuh" // what unfused_* are
#include "kernels/cudnn/attention.cuh"   // what fused_* are
#include "kernels/rope.cuh"              // rope_backward
#include "runtime/machine/error.h"       // fail

enum { ATTENTION_MAX_HEAD_DIM = 256 };
// --attention-backend flash stands for both flash backends, and attention_choose takes one of them. Where fused does
// not take the shape of a call, as with windows or some lengths of prompts, flash computes this call.
enum attention_backend {
    ATTENTION_AUTO,
    ATTENTION_FLASH,
    ATTENTION_UNFUSED,
    ATTENTION_FLASH_SM90,
    ATTENTION_FUSED,
};

enum { ATTENTION_BACKENDS_COUNT = ATTENTION_FUSED + 1 };
// Frees cuDNN's handle and plans, if any. Call this before device_close, once no recorded CUDA graph uses them.
static void attention_close(struct device *dev);

// Returns the bytes of `saved`: log-sum-exps (B, H, T) in fp32 or, if unfused, probabilities (B, H, T, T) in floatX.
static size_t attention_saved_bytes(enum attention_backend backend, struct attention_shape shape);
static size_t attention_forward_workspace_bytes(enum attention_backend backend, struct attention_shape shape,
                                                struct device *dev);
// Writes out = dropout(softmax(scale Q K^T + mask)) V, with the mask and softcap that the shape asks for. q and k are
// rotated already. Fills `saved` for attention_backward. Merges out's amax (kernels/amax.cuh) into amax (1), unless it
// is NULL. workspace has attention_forward_workspace_bytes. A feature that the backend lacks ends the program.
static void attention_forward(floatX *out,       // (B, T, H * D)
                              void *saved,       // attention_saved_bytes
                              const floatX *qkv, // (B, T, (H + 2 Hkv) * D)
                              enum attention_backend backend, struct attention_shape shape, struct dropout dropout,
                              uint32_t *amax, void *workspace, struct device *dev);

// Returns the bytes of attention_backward's workspace. any_order, of its options, lets dQ be summed in any order.
static size_t attention_backward_workspace_bytes(enum attention_backend backend, struct attention_shape shape,
                                                 bool any_order, struct device *dev);
// Writes the gradient of qkv to all of dqkv, from attention_forward's arguments and results. If the options ask for it,
// also undoes RoPE, merges amax and writes bias_partial. workspace has attention_backward_workspace_bytes.
static void attention_backward(floatX *dqkv,       // (B, T, (H + 2 Hkv) * D)
                               const floatX *dout, // (B, T, H * D)
                               const floatX *qkv,  // (B, T, (H + 2 Hkv) * D)
                               const floatX *out,  // (B, T, H * D)
                               const void *saved,  // attention_saved_bytes
                               enum attention_backend backend, struct attention_shape shape, struct dropout dropout,
                               struct attention_backward_options options, void *workspace, struct device *dev);

// ---- The backends ----

static size_t attention_larger(size_t a, size_t b) { return a > b ? a : b; }

// The types of a backend's forward and backward, with the arguments of attention_forward and attention_backward.
typedef void attention_forward_function(floatX *out, void *saved, const floatX *qkv, struct attention_shape shape,
                                        struct dropout dropout, uint32_t *amax, void *workspace, struct device *dev);
typedef void attention_backward_function(floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out,
                                         const void *saved, struct attention_shape shape, struct dropout dropout,
                                         struct attention_backward_options options, void *workspace,
                                         struct device *dev);
typedef size_t attention_forward_bytes(struct attention_shape shape, struct device *dev);
typedef size_t attention_backward_bytes(struct attention_shape shape, bool any_order, struct device *dev);

struct attention_row {
    const char *name;         // as --attention-backend has it
    const char *variable;     // the environment variable of NeMo and TransformerEngine that forbids it
    unsigned provides;        // features beyond causal attention with grouped queries, bits of enum attention_feature
    bool keeps_probabilities; // for backward; else a log-sum-exp of each row
    bool undoes_rope;         // in its backward; else attention_backward does, by a pass over dqkv
    bool log2_lse;            // log-sum-exps are to base 2, not natural
    attention_forward_bytes *forward_workspace;
    attention_backward_bytes *backward_workspace;
    int64_t (*bias_num_runs)(struct attention_shape); // attention_bias_num_runs; NULL: 0
    attention_forward_function *forward;
    attention_backward_function *backward;
};

static size_t attention_flash_forward_workspace_bytes(struct attention_shape s, struct device *dev) {
    return flash_forward_workspace_bytes(s, dev);
}
// Calls flash_backward_workspace_bytes. any_order makes no difference to flash.
static size_t attention_flash_backward_workspace_bytes(struct attention_shape s, bool any_order, struct device *dev) {
    return flash_backward_workspace_bytes(s, dev);
}
static void attention_flash_forward(floatX *out, void *saved, const floatX *qkv, struct attention_shape s,
                                    struct dropout dropout, uint32_t *amax, void *workspace, struct device *dev) {
    flash_forward(out, (float *)saved, qkv, s, dropout, amax, workspace, dev);
}
// Calls flash_backward. saved has log-sum-exps (B, H, T). Reads no option but amax, as the caller undoes RoPE.
static void attention_flash_backward(floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out,
                                     const void *saved, struct attention_shape s, struct dropout dropout,
                                     struct attention_backward_options options, void *workspace, struct device *dev) {
    flash_backward(dqkv, dout, qkv, out, (const float *)saved, s, dropout, options.amax, workspace, dev);
}

static size_t attention_sm90_forward_workspace_bytes(struct attention_shape s, struct device *dev) {
    return sm90_forward_workspace_bytes(s);
}
static size_t attention_sm90_backward_workspace_bytes(struct attention_shape s, bool any_order, struct device *dev) {
    return sm90_backward_workspace_bytes(s);
}
// Calls sm90_forward, which has no dropout. Fills saved with log-sum-exps to base 2 (B, H, T).
static void attention_sm90_forward(floatX *out, void *saved, const floatX *qkv, struct attention_shape s,
                                   struct dropout dropout, uint32_t *amax, void *workspace, struct device *dev) {
    sm90_forward(out, (float *)saved, qkv, s, amax, workspace, dev);
}
// Calls sm90_backward, which has no dropout and carries out all options. saved has log-sum-exps to base 2 (B, H, T).
static void attention_sm90_backward(floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out,
                                    const void *saved, struct attention_shape s, struct dropout dropout,
                                    struct attention_backward_options options, void *workspace, struct device *dev) {
    sm90_backward(dqkv, dout, qkv, out, (const float *)saved, s, options, workspace, dev);
}

// Returns the larger of cuDNN's and flash's bytes, as flash computes the calls that cuDNN will turn out to refuse.
static size_t attention_fused_forward_workspace_bytes(struct attention_shape s, struct device *dev) {
    return attention_larger(fused_forward_workspace_bytes(s, dev), flash_forward_workspace_bytes(s, dev));
}
// Returns the larger of cuDNN's and flash's bytes, as flash computes the calls that cuDNN will turn out to refuse.
static size_t attention_fused_backward_workspace_bytes(struct attention_shape s, bool any_order, struct device *dev) {
    return attention_larger(fused_backward_workspace_bytes(s, any_order, dev), flash_backward_workspace_bytes(s, dev));
}
// Calls fused_forward, which is cuDNN's and has no dropout. Fills saved with log-sum-exps (B, H, T).
static void attention_fused_forward(floatX *out, void *saved, const floatX *qkv, struct attention_shape s,
                                    struct dropout dropout, uint32_t *amax, void *workspace, struct device *dev) {
    fused_forward(out, (float *)saved, qkv, s, amax, workspace, dev);
}
// Calls fused_backward, which has no dropout. saved has log-sum-exps (B, H, T). The caller undoes RoPE.
static void attention_fused_backward(floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out,
                                     const void *saved, struct attention_shape s, struct dropout dropout,
                                     struct attention_backward_options options, void *workspace, struct device *dev) {
    fused_backward(dqkv, dout, qkv, out, (const float *)saved, s, options.any_order, options.amax, workspace, dev);
}

static size_t attention_unfused_forward_workspace_bytes(struct attention_shape s, struct device *dev) {
    return unfused_forward_workspace_bytes(s, dev);
}
static size_t attention_unfused_backward_workspace_bytes(struct attention_shape s, bool any_order, struct device *dev) {
    return unfused_backward_workspace_bytes(s, dev);
}
// Calls unfused_forward. Fills saved with probabilities (B, H, T, T).
static void attention_unfused_forward(floatX *out, void *saved, const floatX *qkv, struct attention_shape s,
                                      struct dropout dropout, uint32_t *amax, void *workspace, struct device *dev) {
    unfused_forward(out, (floatX *)saved, qkv, s, dropout, amax, workspace, dev);
}
// Calls unfused_backward. saved has probabilities (B, H, T, T). Reads no option but amax, as the caller undoes RoPE.
static void attention_unfused_backward(floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out,
                                       const void *saved, struct attention_shape s, struct dropout dropout,
                                       struct attention_backward_options options, void *workspace, struct device *dev) {
    unfused_backward(dqkv, dout, qkv, out, (const floatX *)saved, s, dropout, options.amax, workspace, dev);
}

// Returns a backend's row. Ends the program for ATTENTION_AUTO, which has no row.
static const struct attention_row *attention_row(enum attention_backend backend) {
    static const struct attention_row flash = {"flash",
                                               "NVTE_FLASH_ATTN",
                                               FEATURE_SOFTCAP | FEATURE_HIDDEN_KEYS | FEATURE_DROPOUT,
                                               false,
                                               false,
                                               false,
                                               attention_flash_forward_workspace_bytes,
                                               attention_flash_backward_workspace_bytes,
                                               NULL,
                                               attention_flash_forward,
                                               attention_flash_backward},
                                      sm90 = {"flash",
                                              "NVTE_FLASH_ATTN",
                                              FEATURE_FULL | FEATURE_HIDDEN_KEYS,
                                              false,
                                              true,
                                              true,
                                              attention_sm90_forward_workspace_bytes,
                                              attention_sm90_backward_workspace_bytes,
                                              sm90_bias_num_runs,
                                              attention_sm90_forward,
                                              attention_sm90_backward},
                                      fused = {"fused",
                                               "NVTE_FUSED_ATTN",
                                               FEATURE_FULL,
                                               false,
                                               false,
                                               false,
                                               attention_fused_forward_workspace_bytes,
                                               attention_fused_backward_workspace_bytes,
                                               NULL,
                                               attention_fused_forward,
                                               attention_fused_backward},
                                      unfused = {"unfused",
                                                 "NVTE_UNFUSED_ATTN",
                                                 FEATURE_SOFTCAP | FEATURE_HIDDEN_KEYS | FEATURE_DROPOUT,
                                                 true,
                                                 false,
                                                 false,
                                                 attention_unfused_forward_workspace_bytes,
                                                 attention_unfused_backward_workspace_bytes,
                                                 NULL,
                                                 attention_unfused_forward,
                                                 attention_unfused_backward};
    switch (backend) {
    case ATTENTION_FLASH: return &flash;
    case ATTENTION_FLASH_SM90: return &sm90;
    case ATTENTION_FUSED: return &fused;
    case ATTENTION_UNFUSED: return &unfused;
    case ATTENTION_AUTO: break;
    }
    fail("attention: no backend is chosen");
}
// Returns a backend's name in --attention-backend: "auto", "fused", "unfused", or "flash" for either flash backend.
static const char *attention_name(enum attention_backend backend) {
    return backend == ATTENTION_AUTO ? "auto" : attention_row(backend)->name;
}
// Returns the name of a feature in `asked` (bits of enum attention_feature) that the backend lacks; NULL: lacks none.
static const char *attention_refusal(enum attention_backend backend, unsigned asked) {
    return attention_feature_name(asked & ~attention_row(backend)->provides);
}

// ---- The calls ----

// Returns the row for this call: the backend's or, if fused does not take the shape, flash's, whose log-sum-exps are
// equal. Ends the program if the row lacks a feature of the call.
static const struct attention_row *attention_row_of_call(enum attention_backend backend, struct attention_shape shape,
                                                         struct dropout dropout, struct device *dev) {
    const bool taken = backend != ATTENTION_FUSED || fused_takes(shape, dev);
    const enum attention_backend of_call = taken ? backend : ATTENTION_FLASH;
    const char *lacks = attention_refusal(of_call, attention_asked(shape, dropout.p));
    if (lacks)
        fail("attention by %s has no %s", attention_name(of_call), lacks);
    return attention_row(of_call);
}

static void attention_close(struct device *dev) { fused_close(dev); }

static size_t attention_saved_bytes(enum attention_backend backend, struct attention_shape shape) {
    const size_t rows = (size_t)shape.B * shape.num_heads * shape.T;
    return attention_row(backend)->keeps_probabilities ? rows * (size_t)shape.T * sizeof(floatX) : rows * sizeof(float);
}
// Returns the factor that turns natural log-sum-exps into what a backend's backward reads: log2(e) for base 2, else 1.
static float attention_lse_factor(enum attention_backend backend) {
    return attention_row(backend)->log2_lse ? 1.44269504f : 1;
}
static size_t attention_forward_workspace_bytes(enum attention_backend backend, struct attention_shape shape,
                                                struct device *dev) {
    return attention_row(backend)->forward_workspace(shape, dev);
}
static size_t attention_backward_workspace_bytes(enum attention_backend backend, struct attention_shape shape,
                                                 bool any_order, struct device *dev) {
    return attention_row(backend)->backward_workspace(shape, any_order, dev);
}
// The number of runs of dqkv's rows; backward writes each run's column sums to options.bias_partial. 0: it writes none.
static int64_t attention_bias_num_runs(enum attention_backend backend, struct attention_shape shape) {
    const struct attention_row *row = attention_row(backend);
    return row->bias_num_runs ? row->bias_num_runs(shape) : 0;
}

static void attention_forward(floatX *out, void *saved, const floatX *qkv, enum attention_backend backend,
                              struct attention_shape shape, struct dropout dropout, uint32_t *amax, void *workspace,
                              struct device *dev) {
    attention_row_of_call(backend, shape, dropout, dev)->forward(out, saved, qkv, shape, dropout, amax, workspace, dev);
}
// Returns the amax for a backward that leaves RoPE as it is: NULL if attention_undo_rope merges it, else options.amax.
static uint32_t *attention_amax_before_rope(struct attention_backward_options options) {
    return options.rotary ? NULL : options.amax;
}
// Undoes RoPE in place in dqkv (B, T, (H + 2 Hkv) * D), and merges its amax. Does nothing if options.rotary is NULL.
static void attention_undo_rope(floatX *dqkv, struct attention_backward_options options, struct attention_shape shape,
                                struct device *dev) {
    if (options.rotary)
        rope_backward(dqkv, options.rotary, options.positions, shape.B, shape.T, shape.num_heads,
                      shape.num_query_groups, shape.head_dim, options.amax, dev);
}
static void attention_backward(floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out,
                               const void *saved, enum attention_backend backend, struct attention_shape shape,
                               struct dropout dropout, struct attention_backward_options options, void *workspace,
                               struct device *dev) {
    const struct attention_row *row = attention_row_of_call(backend, shape, dropout, dev);
    struct attention_backward_options own = options;
    if (!row->undoes_rope)
        own.amax = attention_amax_before_rope(options);
    row->backward(dqkv, dout, qkv, out, saved, shape, dropout, own, workspace, dev);
    if (!row->undoes_rope)
        attention_undo_rope(dqkv, options, shape, dev);
}
