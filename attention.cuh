// Attention as the model sees it: the choice of a backend, and the calls to it.
//
// All backends compute causal attention with grouped queries (K and V are never expanded); flash for compute capability
// 9.0 computes full attention too. Backends differ in what they keep for backward: flash one log-sum-exp per row,
// unfused the T x T probabilities. On the cuda target there are two flash backends; the one for compute capability 9.0
// is faster and takes fewer shapes.
#pragma once
#include "kernels/attention_decode.cuh"  // attention_decode
#include "kernels/attention_flash.cuh"   // what flash_* and sm90_* are
#include "kernels/attention_shape.cuh"   // struct attention_shape
#include "kernels/attention_unfused.cuh" // what unfused_* are
#include "kernels/rope.cuh"              // rope_backward
#include "runtime/machine/error.h"       // fail
#include <stdio.h>                       // snprintf
#include <stdlib.h>                      // getenv

enum { ATTENTION_MAX_HEAD_DIM = 256 };
// Only attention_choose gives ATTENTION_FLASH_SM90: a user who asks for flash allows both flash backends.
enum attention_backend { ATTENTION_AUTO, ATTENTION_FLASH, ATTENTION_UNFUSED, ATTENTION_FLASH_SM90 };

struct attention_choice {
    enum attention_backend backend; // never ATTENTION_AUTO
    char reason[512];               // the backend and why it was chosen, for the start-up report
};

// Chooses the backend: flash wherever `wanted` allows it and it takes the shape. `dropout`: --attention-dropout. Where
// no backend is left, ends the program with the reason of each.
static struct attention_choice attention_choose(enum attention_backend wanted, struct attention_shape shape,
                                                float dropout, struct device *dev);

// Computes out = dropout(softmax(scale Q K^T + causal mask)) V, query head h with KV head h / (H / Hkv). `saved` is
// what forward keeps for backward: fp32 (B, H, T) log-sum-exps (flash), or floatX (B, H, T, T) probabilities (unfused).
// amax: kernels/amax.cuh's, of out; NULL: not taken.
static size_t attention_saved_bytes(enum attention_backend backend, struct attention_shape shape);
static size_t attention_forward_workspace_bytes(enum attention_backend backend, struct attention_shape shape,
                                                struct device *dev);
static void attention_forward(floatX *out,       // (B, T, H * D)
                              void *saved,       // attention_saved_bytes
                              const floatX *qkv, // (B, T, (H + 2 Hkv) * D)
                              enum attention_backend backend, struct attention_shape shape, struct dropout dropout,
                              uint32_t *amax, void *workspace, struct device *dev);

// Computes the gradient of attention_forward and, where options.rotary is given, undoes RoPE on it. All of dqkv is
// written. `dropout` and `saved` are forward's.
static size_t attention_backward_workspace_bytes(enum attention_backend backend, struct attention_shape shape,
                                                 struct device *dev);
static void attention_backward(floatX *dqkv,       // (B, T, (H + 2 Hkv) * D)
                               const floatX *dout, // (B, T, H * D)
                               const floatX *qkv,  // (B, T, (H + 2 Hkv) * D)
                               const floatX *out,  // (B, T, H * D)
                               const void *saved,  // attention_saved_bytes
                               enum attention_backend backend, struct attention_shape shape, struct dropout dropout,
                               struct attention_backward_options options, void *workspace, struct device *dev);

#ifdef TARGET_CUDA
#include "kernels/attention_sm80.cuh"         // flash_forward, flash_backward, flash_unavailable_reason
#include "kernels/attention_unfused_cuda.cuh" // unfused_forward, unfused_backward
static const char *unfused_describe(void) { return FLOATX_NAME; }
#else
#include "kernels/attention_cpu.cuh"         // flash_forward, flash_backward
#include "kernels/attention_unfused_cpu.cuh" // unfused_forward, unfused_backward
static void flash_unavailable_reason(char *reason, size_t size, struct attention_shape shape) { reason[0] = 0; }
static const char *flash_describe(void) { return blocks_describe(); }
static const char *unfused_describe(void) { return blocks_describe(); }
#endif
#if defined(TARGET_CUDA) && defined(PRECISION_BF16)
#include "kernels/attention_sm90_backward.cuh" // sm90_backward
#include "kernels/attention_sm90_forward.cuh"  // sm90_forward, sm90_unavailable_reason
#else
// In this build attention_choose never chooses flash for compute capability 9.0: its reason says why.
static void sm90_unavailable_reason(char *reason, size_t size, struct attention_shape shape, struct device *dev) {
    snprintf(reason, size, "takes bf16 on a GPU alone");
}
static const char *sm90_describe(void) { return ""; }
static size_t sm90_forward_workspace_bytes(struct attention_shape shape) { return 0; }
static size_t sm90_backward_workspace_bytes(struct attention_shape shape) { return 0; }
static void sm90_forward(floatX *out, float *lse, const floatX *qkv, struct attention_shape shape, uint32_t *amax,
                         void *workspace, struct device *dev) {
    fail("flash attention by wgmma takes bf16 on a GPU alone");
}
static void sm90_backward(floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out, const float *lse,
                          struct attention_shape shape, struct attention_backward_options options, void *workspace,
                          struct device *dev) {
    fail("flash attention by wgmma takes bf16 on a GPU alone");
}
#endif

// Whether an environment variable of NeMo and TransformerEngine forbids a backend: 0 forbids it, 1 or unset allows it.
static bool attention_switched_off(const char *variable) {
    const char *value = getenv(variable);
    if (!value || !*value || strcmp(value, "1") == 0)
        return false;
    if (strcmp(value, "0") != 0)
        fail("%s=%s in the environment: expected 0 (the backend is not used) or 1; change it or unset it", variable,
             value);
    return true;
}

// Writes why a backend can't be used; an empty reason where it can. backend: flash or unfused.
static void attention_unavailable_reason(char *reason, size_t size, enum attention_backend backend,
                                         enum attention_backend wanted, struct attention_shape shape) {
    const char *name = backend == ATTENTION_FLASH ? "flash" : "unfused";
    const char *variable = backend == ATTENTION_FLASH ? "NVTE_FLASH_ATTN" : "NVTE_UNFUSED_ATTN";
    char kernels[128];
    reason[0] = kernels[0] = 0;
    if (backend == ATTENTION_FLASH)
        flash_unavailable_reason(kernels, sizeof kernels, shape);
    if (wanted != ATTENTION_AUTO && wanted != backend)
        snprintf(reason, size, "%s: --attention-backend %s rules it out", name,
                 wanted == ATTENTION_FLASH ? "flash" : "unfused");
    else if (attention_switched_off(variable))
        snprintf(reason, size, "%s: switched off by %s=0 in the environment", name, variable);
    else if (*kernels)
        snprintf(reason, size, "%s: %s", name, kernels);
}

// Writes why flash, where it is allowed, is not the backend of compute capability 9.0; an empty reason where it is.
static void attention_sm90_unavailable_reason(char *reason, size_t size, struct attention_shape shape, float dropout,
                                              struct device *dev) {
    if (dropout > 0)
        snprintf(reason, size, "has no --attention-dropout");
    else
        sm90_unavailable_reason(reason, size, shape, dev);
}

static struct attention_choice attention_choose(enum attention_backend wanted, struct attention_shape shape,
                                                float dropout, struct device *dev) {
    struct attention_choice choice;
    char flash[192], unfused[192], sm90[128], not_sm90[192] = "";
    if (shape.head_dim < 8 || shape.head_dim > ATTENTION_MAX_HEAD_DIM || shape.head_dim % 8 != 0)
        fail("no attention backend takes heads of %d: expected a multiple of 8 from 8 to %d; change --kv-channels, or "
             "--hidden-size and --num-attention-heads",
             shape.head_dim, ATTENTION_MAX_HEAD_DIM);
    attention_unavailable_reason(flash, sizeof flash, ATTENTION_FLASH, wanted, shape);
    attention_unavailable_reason(unfused, sizeof unfused, ATTENTION_UNFUSED, wanted, shape);
    attention_sm90_unavailable_reason(sm90, sizeof sm90, shape, dropout, dev);
    if (*flash && *unfused)
        fail("no attention backend is left (%s; %s): unset a switch or change --attention-backend", flash, unfused);
    choice.backend = *flash ? ATTENTION_UNFUSED : *sm90 ? ATTENTION_FLASH : ATTENTION_FLASH_SM90;
    if (choice.backend == ATTENTION_UNFUSED)
        snprintf(choice.reason, sizeof choice.reason, "unfused, %s (%s)", unfused_describe(),
                 wanted == ATTENTION_UNFUSED ? "asked for by --attention-backend unfused" : flash);
    else {
        if (*sm90 && !DEVICE_MEMORY_IS_HOSTS)
            snprintf(not_sm90, sizeof not_sm90, "; %s %s", sm90_describe(), sm90);
        snprintf(choice.reason, sizeof choice.reason, "flash, %s (%s%s)", *sm90 ? flash_describe() : sm90_describe(),
                 wanted == ATTENTION_FLASH ? "asked for by --attention-backend flash"
                                           : "memory linear in the sequence length",
                 not_sm90);
    }
    return choice;
}

static size_t attention_saved_bytes(enum attention_backend backend, struct attention_shape shape) {
    const size_t rows = (size_t)shape.B * shape.num_heads * shape.T;
    return backend == ATTENTION_UNFUSED ? rows * (size_t)shape.T * sizeof(floatX) : rows * sizeof(float);
}
static size_t attention_forward_workspace_bytes(enum attention_backend backend, struct attention_shape shape,
                                                struct device *dev) {
    switch (backend) {
    case ATTENTION_UNFUSED: return unfused_forward_workspace_bytes(shape);
    case ATTENTION_FLASH_SM90: return sm90_forward_workspace_bytes(shape);
    case ATTENTION_FLASH: return flash_forward_workspace_bytes(shape);
    case ATTENTION_AUTO: break;
    }
    fail("attention: no backend is chosen");
}
static size_t attention_backward_workspace_bytes(enum attention_backend backend, struct attention_shape shape,
                                                 struct device *dev) {
    switch (backend) {
    case ATTENTION_UNFUSED: return unfused_backward_workspace_bytes(shape);
    case ATTENTION_FLASH_SM90: return sm90_backward_workspace_bytes(shape);
    case ATTENTION_FLASH: return flash_backward_workspace_bytes(shape);
    case ATTENTION_AUTO: break;
    }
    fail("attention: no backend is chosen");
}

static void attention_check(enum attention_backend backend, struct attention_shape shape, struct dropout dropout) {
    if (backend == ATTENTION_FLASH_SM90 && dropout.p > 0)
        fail("flash attention by wgmma has no dropout");
    if (backend != ATTENTION_FLASH_SM90 && shape.full)
        fail("only flash attention by wgmma is there without a causal mask");
}
static void attention_forward(floatX *out, void *saved, const floatX *qkv, enum attention_backend backend,
                              struct attention_shape shape, struct dropout dropout, uint32_t *amax, void *workspace,
                              struct device *dev) {
    attention_check(backend, shape, dropout);
    switch (backend) {
    case ATTENTION_UNFUSED: unfused_forward(out, (floatX *)saved, qkv, shape, dropout, amax, workspace, dev); break;
    case ATTENTION_FLASH_SM90: sm90_forward(out, (float *)saved, qkv, shape, amax, workspace, dev); break;
    case ATTENTION_FLASH: flash_forward(out, (float *)saved, qkv, shape, dropout, amax, workspace, dev); break;
    case ATTENTION_AUTO: fail("attention: no backend is chosen");
    }
}
static void attention_backward(floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out,
                               const void *saved, enum attention_backend backend, struct attention_shape shape,
                               struct dropout dropout, struct attention_backward_options options, void *workspace,
                               struct device *dev) {
    attention_check(backend, shape, dropout);
    uint32_t *const amax = options.rotary ? NULL : options.amax; // of the last pass over dqkv
    switch (backend) {
    case ATTENTION_FLASH_SM90: // undoes RoPE itself
        sm90_backward(dqkv, dout, qkv, out, (const float *)saved, shape, options, workspace, dev);
        return;
    case ATTENTION_UNFUSED:
        unfused_backward(dqkv, dout, qkv, out, (const floatX *)saved, shape, dropout, amax, workspace, dev);
        break;
    case ATTENTION_FLASH:
        flash_backward(dqkv, dout, qkv, out, (const float *)saved, shape, dropout, amax, workspace, dev);
        break;
    case ATTENTION_AUTO: fail("attention: no backend is chosen");
    }
    if (options.rotary)
        rope_backward(dqkv, options.rotary, options.positions, shape.B, shape.T, shape.num_heads,
                      shape.num_query_groups, shape.head_dim, options.amax, dev);
}
