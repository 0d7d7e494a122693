// The choice of attention's backend, and its reasons in words.
#pragma once
#include "attention.cuh"                     // attention_row, attention_refusal
#include "kernels/cudnn/attention_rules.cuh" // fused_leads_on
#include "runtime/machine/error.h"           // fail
#include <stdio.h>                           // snprintf
#include <stdlib.h>                          // getenv

enum flash_kernels { FLASH_KERNELS_AUTO, FLASH_KERNELS_WGMMA, FLASH_KERNELS_MMA };

// A model's demands of attention, beside a shape.
struct attention_demands {
    float dropout;         // --attention-dropout
    const char *documents; // the option that separates documents, so that keys are hidden in every layer; NULL: none
    bool any_order;        // backward's bits may differ between calls
    enum flash_kernels kernels;
    enum attention_backend fastest; // of those that auto may take, measured on this GPU; ATTENTION_AUTO: not measured
    const char *refused[ATTENTION_BACKENDS_COUNT]; // why a backend may not be chosen, though it could; NULL: it may
};

struct attention_choice {
    enum attention_backend backend; // never ATTENTION_AUTO
    char reason[1024];              // the backend and why it was chosen, for the start-up report
};

// Whether an environment variable forbids a backend: 0 does; 1, empty and unset don't. Other values end the program.
static bool attention_switched_off(const char *variable) {
    const char *value = getenv(variable);
    if (!value || !*value || strcmp(value, "1") == 0)
        return false;
    if (strcmp(value, "0") != 0)
        fail("%s=%s in the environment: expected 0 (the backend is not used) or 1; change it or unset it", variable,
             value);
    return true;
}

// Writes to `reason` (size bytes) how the user rules a backend out, or "": by --attention-backend, which is `wanted`,
// or by an environment variable that is 0. backend: ATTENTION_FLASH for all of flash. A bad variable ends the program.
static void attention_ruled_out(char *reason, size_t size, enum attention_backend backend,
                                enum attention_backend wanted) {
    reason[0] = 0;
    if (wanted != ATTENTION_AUTO && wanted != backend)
        snprintf(reason, size, "%s: --attention-backend %s rules it out", attention_name(backend),
                 attention_name(wanted));
    else if (attention_switched_off(attention_row(backend)->variable))
        snprintf(reason, size, "%s: switched off by %s=0 in the environment", attention_name(backend),
                 attention_row(backend)->variable);
}
// Whether a backend can't do what shape and dropout ask for. If so, writes what it lacks to `reason` (size bytes).
static bool attention_lacks(char *reason, size_t size, enum attention_backend backend, struct attention_shape shape,
                            float dropout) {
    const char *lacks = attention_refusal(backend, attention_asked(shape, dropout));
    if (lacks)
        snprintf(reason, size, "has no %s", lacks);
    return lacks != NULL;
}
// Writes to `reason` (size bytes) why ATTENTION_FLASH can't be used, or "". wanted: --attention-backend.
static void attention_flash_reason(char *reason, size_t size, enum attention_backend wanted,
                                   struct attention_shape shape, const struct attention_demands *demands,
                                   const struct device *dev) {
    char kernels[128] = "";
    attention_ruled_out(reason, size, ATTENTION_FLASH, wanted);
    if (!attention_lacks(kernels, sizeof kernels, ATTENTION_FLASH, shape, demands->dropout))
        flash_unavailable_reason(kernels, sizeof kernels, shape, dev);
    if (!*reason && (*kernels || demands->refused[ATTENTION_FLASH]))
        snprintf(reason, size, "flash: %s", *kernels ? kernels : demands->refused[ATTENTION_FLASH]);
}
// Writes to `reason` (size bytes) why ATTENTION_FLASH_SM90 can't be used, or "". With --flash-kernels wgmma, a GPU, a
// shape or a dropout that these kernels can't take ends the program, unless the user rules out all of flash.
static void attention_sm90_reason(char *reason, size_t size, enum attention_backend wanted,
                                  struct attention_shape shape, const struct attention_demands *demands,
                                  struct device *dev) {
    attention_ruled_out(reason, size, ATTENTION_FLASH, wanted);
    if (*reason)
        return;
    if (demands->kernels == FLASH_KERNELS_MMA)
        snprintf(reason, size, "is ruled out by --flash-kernels mma");
    else if (!attention_lacks(reason, size, ATTENTION_FLASH_SM90, shape, demands->dropout))
        sm90_unavailable_reason(reason, size, shape, dev);
    if (!*reason) // what holds for all kernels of flash
        flash_unavailable_reason(reason, size, shape, dev);
    if (*reason && demands->kernels == FLASH_KERNELS_WGMMA && device_is_gpu(dev))
        fail("--flash-kernels wgmma: %s %s; leave the option out", sm90_describe(), reason);
    if (!*reason && demands->refused[ATTENTION_FLASH_SM90])
        snprintf(reason, size, "%s", demands->refused[ATTENTION_FLASH_SM90]);
}
// Writes to `reason` (size bytes) why fused can't be used, or takes too much workspace for auto, or "". May load cuDNN
// and run fused_check: check flash before, and record graphs only after. A bad environment variable ends the program.
static void attention_fused_reason(char *reason, size_t size, enum attention_backend wanted,
                                   struct attention_shape shape, struct attention_demands demands, struct device *dev) {
    // For auto. MAX_WORKSPACE: times qkv; dQ in fp32 and own dK and dV take up to 4. MAX_BYTES: cudnn-frontend's limit.
    enum { MAX_WORKSPACE = 8, MAX_BYTES = 256 << 20 };
    char library[280] = "";
    attention_ruled_out(reason, size, ATTENTION_FUSED, wanted);
    if (*reason)
        return;
    if (!attention_lacks(library, sizeof library, ATTENTION_FUSED, shape, demands.dropout)) {
        if (demands.refused[ATTENTION_FUSED])
            snprintf(library, sizeof library, "%s", demands.refused[ATTENTION_FUSED]);
        else if (demands.refused[ATTENTION_FLASH])
            snprintf(library, sizeof library, "leaves windows to flash, which %s", demands.refused[ATTENTION_FLASH]);
        else if (demands.documents)
            snprintf(library, sizeof library, "hides no documents from each other, as %s asks", demands.documents);
        else
            fused_unavailable_reason(library, sizeof library, shape, demands.any_order, dev);
    }
    if (!*library && wanted == ATTENTION_AUTO) { // some backward engines keep T x T numbers
        const size_t bytes = fused_backward_workspace_bytes(shape, demands.any_order, dev);
        const size_t heads = (size_t)(shape.num_heads + 2 * shape.num_query_groups);
        const size_t qkv_bytes = (size_t)shape.B * (size_t)shape.T * heads * (size_t)shape.head_dim * sizeof(floatX);
        if (bytes > MAX_WORKSPACE * qkv_bytes && bytes > MAX_BYTES)
            snprintf(library, sizeof library, "its backward takes %zu MiB of workspace", bytes >> 20);
    }
    if (!*library)
        fused_check(library, sizeof library, shape, demands.any_order, dev);
    if (!*library) // the check may have left another form of forward
        fused_unavailable_reason(library, sizeof library, shape, demands.any_order, dev);
    if (*library)
        snprintf(reason, size, "fused: %s", library);
}

// Why each backend can't be chosen; "" where it can.
struct attention_reasons {
    char flash[320], unfused[320], sm90[320], fused[320];
};
// Returns the option that asks for flash's kernels, and so for flash, or NULL. r: attention_prefers_flash's.
static const char *attention_option_for_flash(const struct attention_reasons *r, enum flash_kernels kernels) {
    if (*r->flash && *r->sm90)
        return NULL;
    switch (kernels) {
    case FLASH_KERNELS_AUTO: return NULL;
    case FLASH_KERNELS_WGMMA: return "--flash-kernels wgmma";
    case FLASH_KERNELS_MMA: return "--flash-kernels mma";
    }
    __builtin_unreachable();
}
// Writes to r->fused why cuDNN isn't even asked; never "". own: attention_prefers_flash's result.
static void attention_fused_not_asked_reason(struct attention_reasons *r, enum attention_backend wanted,
                                             const struct attention_demands *demands, bool own, struct device *dev) {
    const char *const option = attention_option_for_flash(r, demands->kernels);
    char gpu[32], *const reason = r->fused;
    const size_t size = sizeof r->fused;
    attention_ruled_out(reason, size, ATTENTION_FUSED, wanted);
    if (*reason)
        return;
    if (option) {
        snprintf(reason, size, "fused: %s asks for flash", option);
        return;
    }
    if (demands->refused[ATTENTION_FUSED]) {
        snprintf(reason, size, "fused: %s", demands->refused[ATTENTION_FUSED]);
        return;
    }
    if (sizeof(floatX) != 2)
        snprintf(reason, size, "fused: takes only bf16 on a GPU");
    else if (fused_leads_on(dev->planned.major, own))
        snprintf(reason, size,
                 "fused: a run on %s takes it where cuDNN is installed: --attention-backend fused plans it",
                 fused_gpu(gpu, sizeof gpu, dev));
    else
        snprintf(reason, size, "fused: not taken by auto on %s: --attention-backend fused tries it",
                 fused_gpu(gpu, sizeof gpu, dev));
}

// Chooses flash, and says why: its kernels for compute capability 9.0 if r->sm90 is empty, else the others.
static void attention_choose_flash(struct attention_choice *choice, const struct attention_reasons *r,
                                   enum attention_backend wanted, const struct device *dev) {
    const bool sm90 = !*r->sm90, says_fused = wanted == ATTENTION_AUTO && device_is_gpu(dev);
    char not_sm90[400] = "";
    choice->backend = sm90 ? ATTENTION_FLASH_SM90 : ATTENTION_FLASH;
    if (!sm90 && device_is_gpu(dev))
        snprintf(not_sm90, sizeof not_sm90, "; %s %s", sm90_describe(), r->sm90);
    snprintf(
        choice->reason, sizeof choice->reason, "flash, %s (%s%s%s%s%s)", sm90 ? sm90_describe() : flash_describe(dev),
        wanted == ATTENTION_FLASH ? "asked for by --attention-backend flash" : "memory linear in the sequence length",
        not_sm90, says_fused ? "; " : "", says_fused ? r->fused : "",
        says_fused && flash_is_slower(dev) ? "; unfused, in T x T memory, is predicted to be faster on this GPU" : "");
}
// Chooses fused, and says why, and what cuDNN's plans take. r->fused is empty.
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

// Writes r->flash and r->sm90. Returns whether auto, without measurements, prefers flash to fused: if its sm90 kernels
// or, where demands->refused has those, its others can be used. A bad --flash-kernels wgmma ends the program.
static bool attention_prefers_flash(struct attention_reasons *r, enum attention_backend wanted,
                                    struct attention_shape shape, const struct attention_demands *demands,
                                    struct device *dev) {
    attention_flash_reason(r->flash, sizeof r->flash, wanted, shape, demands, dev);
    attention_sm90_reason(r->sm90, sizeof r->sm90, wanted, shape, demands, dev);
    return !*r->sm90 || (!*r->flash && demands->refused[ATTENTION_FLASH_SM90]);
}
// Whether attention_choose calls attention_fused_reason, which may load cuDNN. It does, too, if the user rules out
// fused and flash can't be used. r, prefers_flash: attention_prefers_flash's.
static bool attention_asks_fused(const struct attention_reasons *r, enum attention_backend wanted, bool prefers_flash,
                                 const struct attention_demands *demands, struct device *dev) {
    const bool measured = demands->fastest != ATTENTION_AUTO;
    const bool leads = measured ? demands->fastest == ATTENTION_FUSED : fused_leads(prefers_flash, dev);
    const bool may_lead = wanted == ATTENTION_AUTO && !attention_option_for_flash(r, demands->kernels);
    return wanted == ATTENTION_FUSED || (*r->flash && *r->sm90) || (may_lead && leads);
}
// Whether attention_choose, with the same arguments, may compare fused with flash by fused_check. If so, the caller
// must first let children check flash, then cuDNN. Ends the program where --flash-kernels wgmma is impossible.
static bool attention_may_check_fused(enum attention_backend wanted, struct attention_shape shape,
                                      struct attention_demands demands, struct device *dev) {
    struct attention_reasons r;
    char kernels[128] = "";
    const bool prefers_flash = attention_prefers_flash(&r, wanted, shape, &demands, dev);
    const bool lacks = demands.documents || attention_refusal(ATTENTION_FUSED, attention_asked(shape, demands.dropout));
    attention_ruled_out(r.fused, sizeof r.fused, ATTENTION_FUSED, wanted);
    flash_unavailable_reason(kernels, sizeof kernels, shape, dev);
    return !*r.fused && !lacks && !*kernels && fused_installed() != 0 &&
           attention_asks_fused(&r, wanted, prefers_flash, &demands, dev);
}

// Chooses the backend: fused if demands.fastest names it or, without measurements, if it is known to be faster, or if
// flash can't be used; else flash; else unfused. wanted: --attention-backend. May load and check cuDNN, so no graph may
// be recorded before. Ends the program if no backend can be used, or if options or NVTE_* are wrong.
static struct attention_choice attention_choose(enum attention_backend wanted, struct attention_shape shape,
                                                struct attention_demands demands, struct device *dev) {
    struct attention_choice choice;
    struct attention_reasons r;
    if (shape.head_dim < 8 || shape.head_dim > ATTENTION_MAX_HEAD_DIM || shape.head_dim % 8 != 0)
        fail("no attention backend takes heads of %d: expected a multiple of 8 from 8 to %d; change --kv-channels, or "
             "--hidden-size and --num-attention-heads",
             shape.head_dim, ATTENTION_MAX_HEAD_DIM);
    const bool prefers_flash = attention_prefers_flash(&r, wanted, shape, &demands, dev);
    char lacks[128];
    attention_ruled_out(r.unfused, sizeof r.unfused, ATTENTION_UNFUSED, wanted);
    if (!*r.unfused && attention_lacks(lacks, sizeof lacks, ATTENTION_UNFUSED, shape, demands.dropout))
        snprintf(r.unfused, sizeof r.unfused, "unfused: %s", lacks);
    else if (!*r.unfused && demands.refused[ATTENTION_UNFUSED])
        snprintf(r.unfused, sizeof r.unfused, "unfused: %s", demands.refused[ATTENTION_UNFUSED]);
    if (attention_asks_fused(&r, wanted, prefers_flash, &demands, dev))
        attention_fused_reason(r.fused, sizeof r.fused, wanted, shape, demands, dev);
    else
        attention_fused_not_asked_reason(&r, wanted, &demands, prefers_flash, dev);

    if (!*r.fused)
        attention_choose_fused(&choice, &r, wanted, shape, &demands, dev);
    else if (!*r.flash || !*r.sm90)
        attention_choose_flash(&choice, &r, wanted, dev);
    else if (!*r.unfused) {
        choice.backend = ATTENTION_UNFUSED;
        const bool says_fused = wanted == ATTENTION_AUTO && device_is_gpu(dev);
        snprintf(choice.reason, sizeof choice.reason, "unfused, %s (%s%s%s)", unfused_compute_name(dev),
                 wanted == ATTENTION_UNFUSED ? "asked for by --attention-backend unfused" : r.flash,
                 says_fused ? "; " : "", says_fused ? r.fused : "");
    } else
        fail("no attention backend is left (%s; %s; %s): unset a switch or change --attention-backend", r.flash,
             r.fused, r.unfused);
    return choice;
}
