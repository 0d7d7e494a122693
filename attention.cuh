// Attention as the model sees it: which backend, and the calls that go to it.
//
// All backends compute causal attention with grouped queries (K and V are never expanded) and differ in what they keep for
// backward: flash one log-sum-exp a row, unfused the T x T probabilities.
#pragma once
#include "kernels/attention_decode.cuh"  // kv_cache_append, attention_decode
#include "kernels/attention_shape.cuh"   // struct attention_shape
#include "kernels/attention_unfused.cuh" // unfused_forward, unfused_backward
#include "runtime/error.h"               // fail
#include <stdio.h>                       // snprintf
#include <stdlib.h>                      // getenv
#ifdef TARGET_CUDA
#include "kernels/attention_sm80.cuh" // flash_forward, flash_backward, flash_obstacle
static const char *unfused_describe(void) { return FLOATX_NAME; }
#else
#include "kernels/attention_cpu.cuh" // flash_forward, flash_backward
static void flash_obstacle(char *reason, size_t size, struct attention_shape shape) { reason[0] = 0; }
static const char *flash_describe(void) { return blocks_describe(); }
static const char *unfused_describe(void) { return blocks_describe(); }
#endif

enum { ATTENTION_MAX_HEAD_DIM = 256 };
enum attention_backend { ATTENTION_AUTO, ATTENTION_FLASH, ATTENTION_UNFUSED };

struct attention_choice {
    enum attention_backend backend; // never ATTENTION_AUTO
    char reason[512];
};

// NeMo's and TransformerEngine's switches: 0 forbids a backend, 1 or nothing allows it.
static bool attention_switched_off(const char *variable) {
    const char *value = getenv(variable);
    if (!value || !*value || strcmp(value, "1") == 0)
        return false;
    if (strcmp(value, "0") != 0)
        fail("%s=%s in the environment: expected 0 (the backend is not used) or 1; change it or unset it", variable, value);
    return true;
}

// Why a backend can't be used; an empty reason if it can.
static void attention_obstacle(char *reason, size_t size, enum attention_backend backend, enum attention_backend wanted,
                               struct attention_shape shape) {
    const char *name = backend == ATTENTION_FLASH ? "flash" : "unfused";
    const char *variable = backend == ATTENTION_FLASH ? "NVTE_FLASH_ATTN" : "NVTE_UNFUSED_ATTN";
    char kernels[128];
    reason[0] = kernels[0] = 0;
    if (backend == ATTENTION_FLASH)
        flash_obstacle(kernels, sizeof kernels, shape);
    if (wanted != ATTENTION_AUTO && wanted != backend)
        snprintf(reason, size, "%s: --attention-backend %s rules it out", name, wanted == ATTENTION_FLASH ? "flash" : "unfused");
    else if (attention_switched_off(variable))
        snprintf(reason, size, "%s: switched off by %s=0 in the environment", name, variable);
    else if (*kernels)
        snprintf(reason, size, "%s: %s", name, kernels);
}

// Flash wherever it is allowed and can do it. Fails with every backend's reason where none is left.
static struct attention_choice attention_choose(enum attention_backend wanted, struct attention_shape shape,
                                                struct device *dev) {
    struct attention_choice choice;
    char flash[192], unfused[192];
    if (shape.head_dim < 8 || shape.head_dim > ATTENTION_MAX_HEAD_DIM || shape.head_dim % 8 != 0)
        fail("no attention backend takes heads of %d: expected a multiple of 8 from 8 to %d; change --kv-channels, or "
             "--hidden-size and --num-attention-heads",
             shape.head_dim, ATTENTION_MAX_HEAD_DIM);
    attention_obstacle(flash, sizeof flash, ATTENTION_FLASH, wanted, shape);
    attention_obstacle(unfused, sizeof unfused, ATTENTION_UNFUSED, wanted, shape);
    if (*flash && *unfused)
        fail("no attention backend is left (%s; %s): unset a switch or change --attention-backend", flash, unfused);
    choice.backend = *flash ? ATTENTION_UNFUSED : ATTENTION_FLASH;
    if (choice.backend == ATTENTION_FLASH)
        snprintf(choice.reason, sizeof choice.reason, "flash, %s (%s)", flash_describe(),
                 wanted == ATTENTION_FLASH ? "asked for by --attention-backend flash"
                                           : "memory linear in the sequence length");
    else
        snprintf(choice.reason, sizeof choice.reason, "unfused, %s (%s)", unfused_describe(),
                 wanted == ATTENTION_UNFUSED ? "asked for by --attention-backend unfused" : flash);
    return choice;
}

// What forward keeps for backward: fp32 (B, H, T) log-sum-exps, or floatX (B, H, T, T) probabilities.
static size_t attention_saved_bytes(enum attention_backend backend, struct attention_shape shape) {
    const size_t rows = (size_t)shape.B * shape.num_heads * shape.T;
    return backend == ATTENTION_UNFUSED ? rows * (size_t)shape.T * sizeof(floatX) : rows * sizeof(float);
}
static size_t attention_forward_workspace_bytes(enum attention_backend backend, struct attention_shape shape,
                                                struct device *dev) {
    return backend == ATTENTION_UNFUSED ? unfused_forward_workspace_bytes(shape) : flash_forward_workspace_bytes(shape);
}
static size_t attention_backward_workspace_bytes(enum attention_backend backend, struct attention_shape shape,
                                                 struct device *dev) {
    return backend == ATTENTION_UNFUSED ? unfused_backward_workspace_bytes(shape) : flash_backward_workspace_bytes(shape);
}

// out = dropout(softmax(scale Q K^T, causal)) V, query head h with KV head h / (H / Hkv).
static void attention_forward(floatX *out /*(B, T, H*D)*/, void *saved /*attention_saved_bytes*/,
                              const floatX *qkv /*(B, T, (H + 2*Hkv)*D)*/, enum attention_backend backend,
                              struct attention_shape shape, struct dropout dropout, void *workspace, struct device *dev) {
    if (backend == ATTENTION_UNFUSED)
        unfused_forward(out, (floatX *)saved, qkv, shape, dropout, workspace, dev);
    else
        flash_forward(out, (float *)saved, qkv, shape, dropout, workspace, dev);
}
// dqkv = the gradient by qkv, all of it written. The dropout and `saved` are forward's.
static void attention_backward(floatX *dqkv /*(B, T, (H + 2*Hkv)*D)*/, const floatX *dout /*(B, T, H*D)*/,
                               const floatX *qkv /*(B, T, (H + 2*Hkv)*D)*/, const floatX *out /*(B, T, H*D)*/,
                               const void *saved /*attention_saved_bytes*/, enum attention_backend backend,
                               struct attention_shape shape, struct dropout dropout, void *workspace, struct device *dev) {
    if (backend == ATTENTION_UNFUSED)
        unfused_backward(dqkv, dout, qkv, out, (const floatX *)saved, shape, dropout, workspace, dev);
    else
        flash_backward(dqkv, dout, qkv, out, (const float *)saved, shape, dropout, workspace, dev);
}
