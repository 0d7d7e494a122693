// Attention as the model sees it: the choice of a backend, and the calls to it.
//
// All backends compute causal attention with grouped queries (K and V are never expanded); flash for compute capability
// 9.0 and fused compute full attention too. Backends differ in what they keep for backward: flash and fused one
// log-sum-exp per row, unfused the T x T probabilities. On the cuda target there are two flash backends; the one for
// compute capability 9.0 is faster and takes fewer shapes. Fused is cuDNN's, for bf16, of a library loaded at run time.
#pragma once
#include "kernels/attention/decode.cuh"      // attention_decode
#include "kernels/attention/flash.cuh"       // what flash_* and sm90_* are
#include "kernels/attention/shape.cuh"       // struct attention_shape
#include "kernels/attention/unfused.cuh"     // what unfused_* are
#include "kernels/cudnn/attention.cuh"       // what fused_* are
#include "kernels/cudnn/attention_rules.cuh" // fused_leads_on
#include "kernels/rope.cuh"                  // rope_backward
#include "runtime/machine/error.h"           // fail
#include <stdio.h>                           // snprintf
#include <stdlib.h>                          // getenv

enum { ATTENTION_MAX_HEAD_DIM = 256 };
// Only attention_choose gives ATTENTION_FLASH_SM90: a user who asks for flash allows both flash backends. Where fused
// does not take a call's shape (windows, prompts of some lengths), flash does.
enum attention_backend {
    ATTENTION_AUTO,
    ATTENTION_FLASH,
    ATTENTION_UNFUSED,
    ATTENTION_FLASH_SM90,
    ATTENTION_FUSED,
};

enum { ATTENTION_BACKENDS_COUNT = ATTENTION_FUSED + 1 };
// Which of the GPU's flash kernels may be chosen.
enum flash_kernels { FLASH_KERNELS_AUTO, FLASH_KERNELS_WGMMA, FLASH_KERNELS_MMA };

// What a model asks of attention beside a shape.
struct attention_demands {
    float dropout;         // --attention-dropout
    const char *documents; // the option that separates documents, so that keys are hidden in every layer; NULL: none
    bool any_order;        // attention_backward_options's
    enum flash_kernels kernels;
    enum attention_backend fastest; // of those that auto may take, measured on this GPU; ATTENTION_AUTO: not measured
    const char *refused[ATTENTION_BACKENDS_COUNT]; // why a backend may not be chosen, whatever is here; NULL: it may
};

struct attention_choice {
    enum attention_backend backend; // never ATTENTION_AUTO
    char reason[1024];              // the backend and why it was chosen, for the start-up report
};

// Chooses the backend: flash wherever `wanted` allows it and it takes the shape, but fused where it is measured, or else
// known, to be faster. Where no backend is left, ends the program with the reason of each.
static struct attention_choice attention_choose(enum attention_backend wanted, struct attention_shape shape,
                                                struct attention_demands demands, struct device *dev);
// Frees what attention keeps from call to call; before device_close. May be called where nothing is kept.
static void attention_close(struct device *dev);

// Computes out = dropout(softmax(scale Q K^T + causal mask)) V, query head h with KV head h / (H / Hkv). `saved` is
// what forward keeps for backward: fp32 (B, H, T) log-sum-exps (flash, fused), or floatX (B, H, T, T) probabilities
// (unfused). amax: kernels/amax.cuh's, of out; NULL: not taken.
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
                                                 bool any_order, struct device *dev);
static void attention_backward(floatX *dqkv,       // (B, T, (H + 2 Hkv) * D)
                               const floatX *dout, // (B, T, H * D)
                               const floatX *qkv,  // (B, T, (H + 2 Hkv) * D)
                               const floatX *out,  // (B, T, H * D)
                               const void *saved,  // attention_saved_bytes
                               enum attention_backend backend, struct attention_shape shape, struct dropout dropout,
                               struct attention_backward_options options, void *workspace, struct device *dev);

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

static const char *attention_name(enum attention_backend backend) {
    switch (backend) {
    case ATTENTION_FLASH:
    case ATTENTION_FLASH_SM90: return "flash";
    case ATTENTION_UNFUSED: return "unfused";
    case ATTENTION_FUSED: return "fused";
    case ATTENTION_AUTO: break;
    }
    return "auto";
}
// The variable that attention_switched_off reads of a backend.
static const char *attention_switch(enum attention_backend backend) {
    switch (backend) {
    case ATTENTION_FLASH:
    case ATTENTION_FLASH_SM90: return "NVTE_FLASH_ATTN";
    case ATTENTION_UNFUSED: return "NVTE_UNFUSED_ATTN";
    case ATTENTION_FUSED: return "NVTE_FUSED_ATTN";
    case ATTENTION_AUTO: break;
    }
    fail("attention: no backend is chosen");
}

// Writes why the user does not want a backend; an empty reason where it is allowed.
static void attention_ruled_out(char *reason, size_t size, enum attention_backend backend,
                                enum attention_backend wanted) {
    reason[0] = 0;
    if (wanted != ATTENTION_AUTO && wanted != backend)
        snprintf(reason, size, "%s: --attention-backend %s rules it out", attention_name(backend),
                 attention_name(wanted));
    else if (attention_switched_off(attention_switch(backend)))
        snprintf(reason, size, "%s: switched off by %s=0 in the environment", attention_name(backend),
                 attention_switch(backend));
}
// Writes why flash can't be used, but for the backend of compute capability 9.0; an empty reason where it can.
static void attention_flash_reason(char *reason, size_t size, enum attention_backend wanted,
                                   struct attention_shape shape, const struct attention_demands *demands,
                                   const struct device *dev) {
    char kernels[128] = "";
    attention_ruled_out(reason, size, ATTENTION_FLASH, wanted);
    flash_unavailable_reason(kernels, sizeof kernels, shape, dev);
    if (!*reason && (*kernels || demands->refused[ATTENTION_FLASH]))
        snprintf(reason, size, "flash: %s", *kernels ? kernels : demands->refused[ATTENTION_FLASH]);
}
// Writes why flash, where it is allowed, is not the backend of compute capability 9.0; an empty reason where it is.
static void attention_sm90_reason(char *reason, size_t size, enum attention_backend wanted,
                                  struct attention_shape shape, const struct attention_demands *demands,
                                  struct device *dev) {
    attention_ruled_out(reason, size, ATTENTION_FLASH, wanted);
    if (*reason)
        return;
    if (demands->kernels == FLASH_KERNELS_MMA)
        snprintf(reason, size, "is ruled out by --flash-kernels mma");
    else if (demands->dropout > 0)
        snprintf(reason, size, "has no --attention-dropout");
    else
        sm90_unavailable_reason(reason, size, shape, dev);
    if (!*reason) // what holds for all kernels of flash
        flash_unavailable_reason(reason, size, shape, dev);
    if (*reason && demands->kernels == FLASH_KERNELS_WGMMA && device_is_gpu(dev))
        fail("--flash-kernels wgmma: %s %s; leave the option out", sm90_describe(), reason);
    if (!*reason && demands->refused[ATTENTION_FLASH_SM90])
        snprintf(reason, size, "%s", demands->refused[ATTENTION_FLASH_SM90]);
}
// Writes why fused can't be used; an empty reason where it can.
static void attention_fused_reason(char *reason, size_t size, enum attention_backend wanted,
                                   struct attention_shape shape, struct attention_demands demands, struct device *dev) {
    // Of what is not asked for. Times qkv: dQ in fp32 and own dK and dV take up to 4. Bytes: cudnn-frontend's limit.
    enum { MOST_WORKSPACE = 8, MOST_BYTES = 256 << 20 };
    char library[280] = "";
    attention_ruled_out(reason, size, ATTENTION_FUSED, wanted);
    if (*reason)
        return;
    if (demands.dropout > 0)
        snprintf(library, sizeof library, "has no --attention-dropout");
    else if (demands.refused[ATTENTION_FUSED])
        snprintf(library, sizeof library, "%s", demands.refused[ATTENTION_FUSED]);
    else if (demands.refused[ATTENTION_FLASH])
        snprintf(library, sizeof library, "leaves windows to flash, which %s", demands.refused[ATTENTION_FLASH]);
    else if (demands.documents)
        snprintf(library, sizeof library, "hides no documents from each other, as %s asks", demands.documents);
    else
        fused_unavailable_reason(library, sizeof library, shape, demands.any_order, dev);
    if (!*library && wanted == ATTENTION_AUTO) { // some backward engines keep T x T numbers
        const size_t bytes = fused_backward_workspace_bytes(shape, demands.any_order, dev);
        const size_t heads = (size_t)(shape.num_heads + 2 * shape.num_query_groups);
        const size_t qkv_bytes = (size_t)shape.B * (size_t)shape.T * heads * (size_t)shape.head_dim * sizeof(floatX);
        if (bytes > MOST_WORKSPACE * qkv_bytes && bytes > MOST_BYTES)
            snprintf(library, sizeof library, "its backward takes %zu MiB of workspace", bytes >> 20);
    }
    if (!*library)
        fused_check(library, sizeof library, shape, demands.any_order, dev);
    if (!*library) // the check may have left another form of forward
        fused_unavailable_reason(library, sizeof library, shape, demands.any_order, dev);
    if (*library)
        snprintf(reason, size, "fused: %s", library);
}

// Writes why auto, to which flash is left, does not ask whether fused could be used. own: kernels of compute capability 9.0
// take the shape.
static void attention_fused_not_asked(char *reason, size_t size, enum attention_backend wanted,
                                      const struct attention_demands *demands, bool own, struct device *dev) {
    char gpu[32];
    attention_ruled_out(reason, size, ATTENTION_FUSED, wanted);
    if (*reason)
        return;
    if (demands->refused[ATTENTION_FUSED]) {
        snprintf(reason, size, "fused: %s", demands->refused[ATTENTION_FUSED]);
        return;
    }
    if (fused_leads_on(dev->planned.major, own))
        snprintf(reason, size,
                 "fused: a run on %s takes it where cuDNN is installed: --attention-backend fused plans it",
                 fused_gpu(gpu, sizeof gpu, dev));
    else
        snprintf(reason, size, "fused: not taken by auto on %s: --attention-backend fused tries it",
                 fused_gpu(gpu, sizeof gpu, dev));
}

// Chooses among the backends that `reasons` leave, and writes what it is and why.
struct attention_reasons {
    char flash[320], unfused[320], sm90[320], fused[320];
};
static void attention_choose_flash(struct attention_choice *choice, const struct attention_reasons *r,
                                   enum attention_backend wanted, const struct device *dev) {
    const bool sm90 = !*r->sm90, says_fused = wanted == ATTENTION_AUTO && device_is_gpu(dev);
    char not_sm90[400] = "";
    choice->backend = sm90 ? ATTENTION_FLASH_SM90 : ATTENTION_FLASH;
    if (!sm90 && device_is_gpu(dev))
        snprintf(not_sm90, sizeof not_sm90, "; %s %s", sm90_describe(), r->sm90);
    snprintf(
        choice->reason, sizeof choice->reason, "flash, %s (%s%s%s%s)", sm90 ? sm90_describe() : flash_describe(dev),
        wanted == ATTENTION_FLASH ? "asked for by --attention-backend flash" : "memory linear in the sequence length",
        not_sm90, says_fused ? "; " : "", says_fused ? r->fused : "");
}
static void attention_choose_fused(struct attention_choice *choice, const struct attention_reasons *r,
                                   enum attention_backend wanted, struct attention_shape shape,
                                   const struct attention_demands *demands, struct device *dev) {
    char plans[256];
    choice->backend = ATTENTION_FUSED;
    snprintf(choice->reason, sizeof choice->reason, "fused, %s bf16 (%s; %s)", fused_describe(dev),
             wanted == ATTENTION_FUSED ? "asked for by --attention-backend fused"
             : *r->flash               ? r->flash
             : demands->fastest == ATTENTION_FUSED
                 ? "measured as the fastest on this GPU"
                 : "by published figures faster on this GPU than our kernels that take the shape",
             fused_describe_plans(plans, sizeof plans, shape, demands->any_order, dev));
}

// Writes the reasons of flash. Returns whether auto prefers flash to fused: where its kernels of compute capability 9.0
// can be used, whatever refuses mma.sync, and where the self-check has refused them, since mma.sync is simpler.
static bool attention_prefers_flash(struct attention_reasons *r, enum attention_backend wanted,
                                    struct attention_shape shape, const struct attention_demands *demands,
                                    struct device *dev) {
    attention_flash_reason(r->flash, sizeof r->flash, wanted, shape, demands, dev);
    attention_sm90_reason(r->sm90, sizeof r->sm90, wanted, shape, demands, dev);
    return !*r->sm90 || (!*r->flash && demands->refused[ATTENTION_FLASH_SM90]);
}
// Whether attention_choose asks whether fused can be used; else the library need not be loaded.
static bool attention_asks_fused(const struct attention_reasons *r, enum attention_backend wanted, bool prefers_flash,
                                 enum attention_backend fastest, struct device *dev) {
    const bool leads = fastest == ATTENTION_AUTO ? fused_leads(prefers_flash, dev) : fastest == ATTENTION_FUSED;
    return wanted == ATTENTION_FUSED || (*r->flash && *r->sm90) || (wanted == ATTENTION_AUTO && leads);
}
// Whether attention_choose holds fused against flash, which takes the shape, in this process.
static bool attention_tries_fused(enum attention_backend wanted, struct attention_shape shape,
                                  struct attention_demands demands, struct device *dev) {
    struct attention_reasons r;
    char kernels[128] = "";
    const bool prefers_flash = attention_prefers_flash(&r, wanted, shape, &demands, dev);
    attention_ruled_out(r.fused, sizeof r.fused, ATTENTION_FUSED, wanted);
    flash_unavailable_reason(kernels, sizeof kernels, shape, dev);
    return !*r.fused && !*kernels && attention_asks_fused(&r, wanted, prefers_flash, demands.fastest, dev);
}

static struct attention_choice attention_choose(enum attention_backend wanted, struct attention_shape shape,
                                                struct attention_demands demands, struct device *dev) {
    struct attention_choice choice;
    struct attention_reasons r;
    if (shape.head_dim < 8 || shape.head_dim > ATTENTION_MAX_HEAD_DIM || shape.head_dim % 8 != 0)
        fail("no attention backend takes heads of %d: expected a multiple of 8 from 8 to %d; change --kv-channels, or "
             "--hidden-size and --num-attention-heads",
             shape.head_dim, ATTENTION_MAX_HEAD_DIM);
    const bool prefers_flash = attention_prefers_flash(&r, wanted, shape, &demands, dev);
    attention_ruled_out(r.unfused, sizeof r.unfused, ATTENTION_UNFUSED, wanted);
    if (!*r.unfused && demands.refused[ATTENTION_UNFUSED])
        snprintf(r.unfused, sizeof r.unfused, "unfused: %s", demands.refused[ATTENTION_UNFUSED]);
    if (attention_asks_fused(&r, wanted, prefers_flash, demands.fastest, dev))
        attention_fused_reason(r.fused, sizeof r.fused, wanted, shape, demands, dev);
    else
        attention_fused_not_asked(r.fused, sizeof r.fused, wanted, &demands, prefers_flash, dev);

    if (!*r.fused)
        attention_choose_fused(&choice, &r, wanted, shape, &demands, dev);
    else if (!*r.flash || !*r.sm90)
        attention_choose_flash(&choice, &r, wanted, dev);
    else if (!*r.unfused) {
        choice.backend = ATTENTION_UNFUSED;
        const bool says_fused = wanted == ATTENTION_AUTO && device_is_gpu(dev);
        snprintf(choice.reason, sizeof choice.reason, "unfused, %s (%s%s%s)", unfused_describe(dev),
                 wanted == ATTENTION_UNFUSED ? "asked for by --attention-backend unfused" : r.flash,
                 says_fused ? "; " : "", says_fused ? r.fused : "");
    } else
        fail("no attention backend is left (%s; %s; %s): unset a switch or change --attention-backend", r.flash,
             r.fused, r.unfused);
    return choice;
}
static void attention_close(struct device *dev) { fused_close(dev); }

// The backend of one call. Where fused does not take its shape, flash does: what the two keep for backward is the same.
static enum attention_backend attention_backend_of(enum attention_backend backend, struct attention_shape shape,
                                                   struct device *dev) {
    return backend == ATTENTION_FUSED && !fused_takes(shape, dev) ? ATTENTION_FLASH : backend;
}

static size_t attention_saved_bytes(enum attention_backend backend, struct attention_shape shape) {
    const size_t rows = (size_t)shape.B * shape.num_heads * shape.T;
    return backend == ATTENTION_UNFUSED ? rows * (size_t)shape.T * sizeof(floatX) : rows * sizeof(float);
}
static size_t attention_larger(size_t a, size_t b) { return a > b ? a : b; }
static size_t attention_forward_workspace_bytes(enum attention_backend backend, struct attention_shape shape,
                                                struct device *dev) {
    switch (backend) {
    case ATTENTION_UNFUSED: return unfused_forward_workspace_bytes(shape, dev);
    case ATTENTION_FLASH_SM90: return sm90_forward_workspace_bytes(shape);
    case ATTENTION_FLASH: return flash_forward_workspace_bytes(shape, dev);
    case ATTENTION_FUSED: // a layer's window, which flash takes, may not be known yet
        return attention_larger(fused_forward_workspace_bytes(shape, dev), flash_forward_workspace_bytes(shape, dev));
    case ATTENTION_AUTO: break;
    }
    fail("attention: no backend is chosen");
}
static size_t attention_backward_workspace_bytes(enum attention_backend backend, struct attention_shape shape,
                                                 bool any_order, struct device *dev) {
    switch (backend) {
    case ATTENTION_UNFUSED: return unfused_backward_workspace_bytes(shape, dev);
    case ATTENTION_FLASH_SM90: return sm90_backward_workspace_bytes(shape);
    case ATTENTION_FLASH: return flash_backward_workspace_bytes(shape, dev);
    case ATTENTION_FUSED:
        return attention_larger(fused_backward_workspace_bytes(shape, any_order, dev),
                                flash_backward_workspace_bytes(shape, dev));
    case ATTENTION_AUTO: break;
    }
    fail("attention: no backend is chosen");
}

// Runs of rows that the backend's backward sums dqkv's columns over; 0: it makes no such sums.
static int64_t attention_bias_chunks(enum attention_backend backend, struct attention_shape shape) {
    return backend == ATTENTION_FLASH_SM90 ? sm90_bias_chunks(shape) : 0;
}

static void attention_check(enum attention_backend backend, struct attention_shape shape, struct dropout dropout) {
    const bool takes_full = backend == ATTENTION_FLASH_SM90 || backend == ATTENTION_FUSED;
    if (takes_full && dropout.p > 0)
        fail("attention by wgmma or cuDNN has no dropout");
    if (!takes_full && shape.full)
        fail("only attention by wgmma or cuDNN is there without a causal mask");
}
static void attention_forward(floatX *out, void *saved, const floatX *qkv, enum attention_backend backend,
                              struct attention_shape shape, struct dropout dropout, uint32_t *amax, void *workspace,
                              struct device *dev) {
    backend = attention_backend_of(backend, shape, dev);
    attention_check(backend, shape, dropout);
    switch (backend) {
    case ATTENTION_UNFUSED: unfused_forward(out, (floatX *)saved, qkv, shape, dropout, amax, workspace, dev); break;
    case ATTENTION_FLASH_SM90: sm90_forward(out, (float *)saved, qkv, shape, amax, workspace, dev); break;
    case ATTENTION_FLASH: flash_forward(out, (float *)saved, qkv, shape, dropout, amax, workspace, dev); break;
    case ATTENTION_FUSED: fused_forward(out, (float *)saved, qkv, shape, amax, workspace, dev); break;
    case ATTENTION_AUTO: fail("attention: no backend is chosen");
    }
}
static void attention_backward(floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out,
                               const void *saved, enum attention_backend backend, struct attention_shape shape,
                               struct dropout dropout, struct attention_backward_options options, void *workspace,
                               struct device *dev) {
    backend = attention_backend_of(backend, shape, dev);
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
    case ATTENTION_FUSED:
        fused_backward(dqkv, dout, qkv, out, (const float *)saved, shape, options.any_order, amax, workspace, dev);
        break;
    case ATTENTION_AUTO: fail("attention: no backend is chosen");
    }
    if (options.rotary)
        rope_backward(dqkv, options.rotary, options.positions, shape.B, shape.T, shape.num_heads,
                      shape.num_query_groups, shape.head_dim, options.amax, dev);
}
