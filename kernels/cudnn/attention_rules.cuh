// Rules of attention by cuDNN that need no library: the shapes that its versions take, and what a plan of memory
// counts for it. Host arithmetic, compiled into every build, so that a build without CUDA plans a GPU's memory.
#pragma once
#include "kernels/attention/shape.cuh" // struct attention_shape
#include "kernels/device.cuh"          // floatX
#include <stdint.h>                    // SIZE_MAX
#include <stdio.h>                     // snprintf

enum { FUSED_SCRATCH_ALIGNMENT = 256 };

// Returns the first version that takes heads of up to 256 on compute capability major.x; SIZE_MAX: none does.
static inline size_t fused_wide_from(int major) {
    static const struct {
        int major;
        size_t version;
    } wide[] = {{9, 90500}, {10, 92600}};
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++)
        if (wide[i].major == major)
            return wide[i].version;
    return SIZE_MAX;
}

// Writes to `reason` (size bytes) why a version of cuDNN can't take a shape on major.x, else empty. any_order: backward
// may give other bits in another run, or isn't wanted. Conditions: the stricter ones of cudnn-frontend (3929da2) and
// TransformerEngine (d0067d0: nvte_get_fused_attn_backend, dot_product_attention/utils.py).
static inline void fused_refuses(char *reason, size_t size, size_t version, int major, struct attention_shape s,
                                 bool any_order) {
    const size_t wide_from = fused_wide_from(major);
    const int widest = wide_from != SIZE_MAX && version >= wide_from ? 256 : 128;
    char before[32] = "";
    if (wide_from != SIZE_MAX)
        snprintf(before, sizeof before, " before 9.%d", (int)(wide_from / 100 % 100));
    reason[0] = 0;
    if (major < 8)
        snprintf(reason, size, "needs compute capability 8.0");
    else if (major >= 10 && version < 90700)
        snprintf(reason, size, "before 9.7 takes no compute capability from 10.0 on");
    else if (major == 12 && version < 91801)
        snprintf(reason, size, "before 9.18.1 does not take compute capability 12.x");
    else if (version == 91000 || version == 91001)
        snprintf(reason, size, "versions 9.10.0 and 9.10.1 have known bugs");
    else if (s.softcap > 0)
        snprintf(reason, size, "has no --attn-logit-softcapping");
    else if (s.first_key)
        snprintf(reason, size, "has no documents and no windows");
    else if (s.head_dim > widest)
        snprintf(reason, size, "takes heads of up to %d on this GPU%s, not %d", widest, before, s.head_dim);
    else if (s.T == 1)
        snprintf(reason, size, "takes no sequences of one token");
    else if (s.T % 128 != 0 && version <= 91500)
        snprintf(reason, size, "before 9.15.1 takes only multiples of 128 tokens, not %d", s.T);
    else if (s.full && major == 9 && s.T % 128 == 64 && version < 92600)
        // The keys past the end of the last tile have a score of 0: exp(0 - lse) is infinite where lse is below -88
        // (cudnn-frontend's pull request 628, PyTorch's issue 196678). NVIDIA names a mend for 9.26.
        snprintf(reason, size, "before 9.26 without a causal mask gives NaN for some inputs of %d tokens", s.T);
    else if (major == 10 && version < 91801 && !any_order)
        snprintf(reason, size,
                 "before 9.18.1 has no deterministic backward here (--deterministic-mode=false allows any)");
    else if (major != 9 && major != 10 && !any_order)
        // TransformerEngine takes no such backward on 8.x and 12.x; on 11.x cudnn-frontend names no engine for it.
        snprintf(reason, size,
                 "its deterministic backward is not proven on compute capability %d.x (--deterministic-mode=false "
                 "allows any)",
                 major);
}

// Returns bytes rounded up to FUSED_SCRATCH_ALIGNMENT.
static inline size_t fused_rounded(size_t bytes) {
    return (bytes + FUSED_SCRATCH_ALIGNMENT - 1) / FUSED_SCRATCH_ALIGNMENT * FUSED_SCRATCH_ALIGNMENT;
}
// The number of bytes of one fp32 number a row, (B, heads, T), rounded up by fused_rounded.
static inline size_t fused_sums_bytes(int64_t B, int64_t heads, int64_t T) {
    return fused_rounded((size_t)(B * heads * T) * sizeof(float));
}
// The number of bytes of workspace to plan where cuDNN can't be asked.
static inline size_t fused_planned_bytes(struct attention_shape s, bool backward) {
    const size_t elements = (size_t)s.B * s.num_heads * s.T * s.head_dim;
    return fused_sums_bytes(s.B, s.num_heads, s.T) +
           (backward ? fused_rounded(elements * (sizeof(float) + 2 * sizeof(floatX))) : 0);
}

#define FUSED_NOT_ASKED "planned without asking it: no GPU is open"
// Whether cuDNN is faster than our kernels on major.x, by published figures. own: on 9.x our kernels are preferred.
static inline bool fused_leads_on(int major, bool own) { return major == 10 || (major == 9 && !own); }
// Writes why the newest version can't take a shape on the planned GPU, or on 9.x where none is named; else empty.
static inline void fused_refuses_planned(char *reason, size_t size, struct attention_shape s, bool any_order,
                                         const struct device *dev) {
    fused_refuses(reason, size, SIZE_MAX, dev->planned.major > 0 ? dev->planned.major : 9, s, any_order);
}
// Returns the planned GPU's compute capability in text (size bytes), or a constant where it isn't known.
static inline const char *fused_planned_gpu(char *text, size_t size, const struct device *dev) {
    if (dev->planned.major == 0)
        return "a GPU that is not open";
    snprintf(text, size, "%d.%d", dev->planned.major, dev->planned.minor);
    return text;
}
