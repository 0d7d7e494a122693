// Defines FP8 attention itself, of kernels/fp8/attention.cuh, on a GPU: by cuDNN's graphs (cudnn/fp8_graphs.cuh).
//
// cuDNN reads scales and descales from the device's memory, and writes amaxes there. The scales of the model's tensors
// are members of struct fp8_scale. P's scale, which never changes, and cuDNN's amaxes lie in the workspace.
#include "kernels/fp8/attention_rules.cuh" // fp8_attention_refuses, fp8_attention_planned_bytes
#if defined(TARGET_CUDA) && defined(PRECISION_BF16)
#include "kernels/cudnn/attention.cuh" // fused_describe
#include "kernels/cudnn/library.cuh"   // fused_plan_for, fused_run
#include "kernels/fp8/cast.cuh"        // fp8_amax

// The numbers of a call that belong to no tensor of the model. They lie in device memory, where the workspace begins.
struct fp8_cells {
    float p_scale, p_inverse;
    float one;                                    // the scale of outputs in bf16
    float amax_p, amax_out;                       // amaxes as cuDNN writes them: amax_p is not read
    float amaxes[FP8_ATTENTION_TENSORS];          // written from [FP8_ATTENTION_DS] on
    float unused[64 - 5 - FP8_ATTENTION_TENSORS]; // FUSED_SCRATCH_ALIGNMENT
};
static_assert(sizeof(struct fp8_cells) == FUSED_SCRATCH_ALIGNMENT, "what follows the cells is aligned");

// Sets the cells that cuDNN only reads: P's scale and its inverse, and 1. One thread calls.
static __global__ void fp8_cells_kernel(struct fp8_cells *cells) {
    cells->p_scale = FP8_ATTENTION_P_SCALE;
    cells->p_inverse = 1.0f / FP8_ATTENTION_P_SCALE;
    cells->one = 1.0f;
}
// Merges cuDNN's amax of a tensor into its scale's. rounded: round it to floatX first, as the tensor's values were.
static __global__ void fp8_merge_amax_kernel(struct fp8_scale *scale, const float *amax, bool rounded) {
    const uint32_t magnitude = fp8_magnitude(rounded ? to_float(to_floatX(*amax)) : *amax);
    scale->amax = magnitude > scale->amax ? magnitude : scale->amax;
}
// Enqueues scale->amax = max(scale->amax, *amax), both in device memory. rounded: *amax is rounded to floatX first.
static void fp8_merge_amax(struct fp8_scale *scale, const float *amax, bool rounded, struct device *dev) {
    LAUNCH(dev, fp8_merge_amax_kernel, 1u, 1, 0, scale, amax, rounded);
}

// Returns the key of a shape's FP8 plan. Unless any_order, backward takes FUSED_SUM_NONE, which is deterministic.
static struct fused_key fp8_key_of(struct attention_shape s, bool backward, enum fp8_format gradients,
                                   bool outputs_in_fp8, bool any_order) {
    struct fused_key key = fused_key_of(s, backward, any_order ? FUSED_SUM_ANY : FUSED_SUM_NONE);
    key.types = gradients == FP8_E5M2 ? FUSED_HYBRID : FUSED_E4M3;
    key.wide = !outputs_in_fp8;
    return key;
}
// Returns the key of the plan that the demands ask for. Doesn't read demands.full.
static struct fused_key fp8_key_for(struct attention_shape s, bool backward, struct fp8_attention_demands demands) {
    return fp8_key_of(s, backward, demands.gradients, demands.delayed, demands.any_order);
}

// Makes a key's plan unless it is there. Writes to `reason` (size bytes) why the open library refuses it; else empty.
static void fp8_refuses_plan(char *reason, size_t size, const struct fused_key *key, struct fused_library *library) {
    const struct fused_plan *p = fused_plan_for(library, key);
    reason[0] = 0;
    if (p == NULL)
        snprintf(reason, size, "keeps no more than %d plans of %s", FUSED_PLANS, library->name);
    else if (p->plan == NULL)
        snprintf(reason, size, "is refused by %s, %s: %s", library->name, key->backward ? "backward" : "forward",
                 p->builder.reason);
}
void fp8_attention_unavailable_reason(char *reason, size_t size, struct attention_shape shape,
                                      struct fp8_attention_demands demands, struct device *dev) {
    const struct compute_capability hopper = {9, 0};
    fp8_attention_refuses_shape(reason, size, shape);
    if (*reason)
        return;
    if (!dev->open) { // compute capability 9.0 where none is named
        fp8_attention_refuses(reason, size, SIZE_MAX, dev->planned.major > 0 ? dev->planned : hopper, shape, demands);
        return;
    }
    struct fused_library *library = fused_library_of(dev);
    const struct compute_capability gpu = {library->major, library->minor};
    const struct fused_key forward = fp8_key_for(shape, false, demands), backward = fp8_key_for(shape, true, demands);
    if (library->handle == NULL) {
        snprintf(reason, size, "needs cuDNN: %s", library->obstacle);
        return;
    }
    fp8_attention_refuses(reason, size, library->version, gpu, shape, demands);
    if (!*reason)
        fp8_refuses_plan(reason, size, &forward, library);
    if (!*reason && demands.full)
        fp8_refuses_plan(reason, size, &backward, library);
}
const char *fp8_attention_describe(struct device *dev) { return fused_describe(dev); }

// ---- calls ----

// The number of bytes of a call's cells and of cuDNN's workspace. Makes the key's plan unless it is there.
static size_t fp8_plan_bytes(const struct fused_key *key, struct device *dev) {
    const struct fused_plan *p = fused_plan_for(fused_library_of(dev), key);
    return sizeof(struct fp8_cells) + (p && p->plan ? (size_t)p->workspace_bytes : 0);
}
size_t fp8_attention_forward_workspace_bytes(struct attention_shape shape, struct fp8_attention_demands demands,
                                             struct device *dev) {
    const struct fused_key key = fp8_key_for(shape, false, demands);
    return dev->open ? fp8_plan_bytes(&key, dev) : fp8_attention_planned_bytes(shape, demands, false);
}
size_t fp8_attention_backward_workspace_bytes(struct attention_shape shape, struct fp8_attention_demands demands,
                                              struct device *dev) {
    const struct fused_key key = fp8_key_for(shape, true, demands);
    if (!dev->open)
        return fp8_attention_planned_bytes(shape, demands, true);
    return fp8_plan_bytes(&key, dev) + (demands.delayed ? fp8_attention_codes_bytes(shape) : 0);
}

// A call of cuDNN with what it needs beside the tensors.
struct fp8_call {
    struct fused_library *library;
    const struct fused_plan *plan;
    struct fused_call call;
    struct fp8_cells *cells;
    void *workspace; // cuDNN's own part
};
// Begins a call: enqueues the setting of its cells, and sets the addresses of the tensors that forward and backward
// share. Ends the program if the call has no plan. workspace: the cells, then cuDNN's part, but not backward's codes.
static struct fp8_call fp8_begin(const struct fp8_attention *a, bool backward, const fp8 *qkv8, const float *lse,
                                 void *workspace, struct device *dev) {
    const struct fused_key key = fp8_key_of(a->shape, backward, a->gradients, a->outputs_in_fp8, a->any_order);
    struct fp8_call c;
    c.library = fused_library_of(dev);
    c.plan = fused_plan_to_run(c.library, &key);
    c.call = fused_call_of(c.library, a->shape.scale);
    c.cells = (struct fp8_cells *)workspace;
    c.workspace = c.cells + 1;
    const void **tensors = c.call.tensors;
    tensors[FUSED_Q] = qkv8;
    tensors[FUSED_K] = qkv8 + key.heads * key.head_dim;
    tensors[FUSED_V] = qkv8 + (key.heads + key.groups) * key.head_dim;
    tensors[FUSED_LSE] = lse;
    tensors[FUSED_DESCALE_Q] = &a->scales[FP8_ATTENTION_Q]->inverse;
    tensors[FUSED_DESCALE_K] = &a->scales[FP8_ATTENTION_K]->inverse;
    tensors[FUSED_DESCALE_V] = &a->scales[FP8_ATTENTION_V]->inverse;
    tensors[FUSED_DESCALE_P] = &c.cells->p_inverse;
    tensors[FUSED_SCALE_P] = &c.cells->p_scale;
    LAUNCH(dev, fp8_cells_kernel, 1u, 1, 0, c.cells);
    return c;
}
static void fp8_run(struct fp8_call *c, struct device *dev) {
    fused_run(c->library, c->plan, &c->call, c->workspace, dev);
}

void fp8_attention_forward(fp8 *out8,       // (B, T, H * D); NULL unless a.outputs_in_fp8
                           floatX *out,     // (B, T, H * D); NULL where a.outputs_in_fp8
                           float *lse,      // (B, H, T), natural
                           const fp8 *qkv8, // (B, T, (H + 2 Hkv) * D)
                           struct fp8_attention a, bool takes_amax, void *workspace, struct device *dev) {
    struct fp8_call c = fp8_begin(&a, false, qkv8, lse, workspace, dev);
    const void **tensors = c.call.tensors;
    tensors[FUSED_OUT] = a.outputs_in_fp8 ? (void *)out8 : (void *)out;
    tensors[FUSED_AMAX_P] = &c.cells->amax_p;
    tensors[FUSED_AMAX_OUT] = &c.cells->amax_out;
    tensors[FUSED_SCALE_OUT] = &c.cells->one;
    if (a.outputs_in_fp8 && a.calibrates && takes_amax) {
        fp8_run(&c, dev);
        fp8_merge_amax(a.out, &c.cells->amax_out, false, dev);
    }
    if (a.outputs_in_fp8) {
        fp8_set_scales(&a.out, 1, FP8_E4M3, dev);
        tensors[FUSED_SCALE_OUT] = &a.out->scale;
    }
    fp8_run(&c, dev);
    if (takes_amax)
        fp8_merge_amax(a.out, &c.cells->amax_out, !a.outputs_in_fp8, dev);
}

void fp8_attention_backward(floatX *dqkv,     // (B, T, (H + 2 Hkv) * D)
                            const fp8 *dout8, // (B, T, H * D), cast by the scale [FP8_ATTENTION_DOUT]
                            const fp8 *qkv8,  // (B, T, (H + 2 Hkv) * D)
                            const fp8 *out8,  // (B, T, H * D), cast by a.out
                            const float *lse, // (B, H, T), natural
                            struct fp8_attention a, uint32_t *amax, void *workspace, struct device *dev) {
    // The gradients, in the order of the scales from [FP8_ATTENTION_DQ] on.
    static const enum fused_tensor outputs[] = {FUSED_DQ, FUSED_DK, FUSED_DV},
                                   scales[] = {FUSED_SCALE_DQ, FUSED_SCALE_DK, FUSED_SCALE_DV},
                                   amaxes[] = {FUSED_AMAX_DQ, FUSED_AMAX_DK, FUSED_AMAX_DV};
    const struct attention_shape s = a.shape;
    const int64_t begins[] = {0, s.num_heads * s.head_dim, (s.num_heads + s.num_query_groups) * s.head_dim};
    fp8 *codes = (fp8 *)workspace;
    void *rest = (char *)workspace + (a.outputs_in_fp8 ? fp8_attention_codes_bytes(s) : 0);
    struct fp8_call c = fp8_begin(&a, true, qkv8, lse, rest, dev);
    struct fp8_scale *const ds = a.scales[FP8_ATTENTION_DS];
    const void **tensors = c.call.tensors;
    tensors[FUSED_OUT] = out8;
    tensors[FUSED_DOUT] = dout8;
    tensors[FUSED_DESCALE_OUT] = &a.out->inverse;
    tensors[FUSED_DESCALE_DOUT] = &a.scales[FP8_ATTENTION_DOUT]->inverse;
    tensors[FUSED_DESCALE_DS] = &ds->inverse;
    tensors[FUSED_SCALE_DS] = &ds->scale;
    tensors[FUSED_AMAX_DS] = &c.cells->amaxes[FP8_ATTENTION_DS];
    for (int i = 0; i < 3; i++) {
        tensors[outputs[i]] = a.outputs_in_fp8 ? (void *)(codes + begins[i]) : (void *)(dqkv + begins[i]);
        tensors[scales[i]] = &c.cells->one;
        tensors[amaxes[i]] = &c.cells->amaxes[FP8_ATTENTION_DQ + i];
    }
    if (a.calibrates) { // dS's amax is right whatever its scale is; what follows from dS is not
        fp8_run(&c, dev);
        fp8_merge_amax(ds, &c.cells->amaxes[FP8_ATTENTION_DS], false, dev);
    }
    fp8_set_scales(&ds, 1, a.gradients, dev);
    if (a.calibrates && a.outputs_in_fp8) {
        fp8_run(&c, dev);
        for (int i = 0; i < 3; i++)
            fp8_merge_amax(a.scales[FP8_ATTENTION_DQ + i], &c.cells->amaxes[FP8_ATTENTION_DQ + i], false, dev);
    }
    if (a.outputs_in_fp8)
        fp8_set_scales(&a.scales[FP8_ATTENTION_DQ], 3, a.gradients, dev);
    for (int i = 0; i < 3 && a.outputs_in_fp8; i++)
        tensors[scales[i]] = &a.scales[FP8_ATTENTION_DQ + i]->scale;
    fp8_run(&c, dev);
    for (int i = FP8_ATTENTION_DS; i <= (a.outputs_in_fp8 ? FP8_ATTENTION_DV : FP8_ATTENTION_DS); i++)
        fp8_merge_amax(a.scales[i], &c.cells->amaxes[i], false, dev);
    if (a.outputs_in_fp8)
        fp8_attention_read_back(dqkv, codes, &a.scales[FP8_ATTENTION_DQ], a.gradients, s, dev);
    if (amax)
        fp8_amax(amax, dqkv, (int64_t)s.B * s.T * (s.num_heads + 2 * s.num_query_groups) * s.head_dim, dev);
}

#elif defined(TARGET_CUDA)
#include "runtime/machine/error.h" // fail

void fp8_attention_unavailable_reason(char *reason, size_t size, struct attention_shape shape,
                                      struct fp8_attention_demands demands, struct device *dev) {
    fp8_attention_refuses_shape(reason, size, shape);
}
const char *fp8_attention_describe(struct device *dev) { return "cuDNN"; }
size_t fp8_attention_forward_workspace_bytes(struct attention_shape shape, struct fp8_attention_demands demands,
                                             struct device *dev) {
    return 0;
}
size_t fp8_attention_backward_workspace_bytes(struct attention_shape shape, struct fp8_attention_demands demands,
                                              struct device *dev) {
    return 0;
}
void fp8_attention_forward(fp8 *out8, floatX *out, float *lse, const fp8 *qkv8, struct fp8_attention a, bool takes_amax,
                           void *workspace, struct device *dev) {
    fail("FP8 attention needs --precision bf16");
}
void fp8_attention_backward(floatX *dqkv, const fp8 *dout8, const fp8 *qkv8, const fp8 *out8, const float *lse,
                            struct fp8_attention a, uint32_t *amax, void *workspace, struct device *dev) {
    fail("FP8 attention needs --precision bf16");
}
#endif
