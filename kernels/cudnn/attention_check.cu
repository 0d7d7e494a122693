// Checks attention by cuDNN against our flash attention, once, before it is chosen and memory is planned: forward and
// backward at the model's heads and few tokens, forward a second time and, where it has to give the same bits, backward
// too, since no note tells of an engine that sums dQ as the tiles are done. The library is not in the tests of this
// program, and its versions have been wrong in silence: what is wrong on this GPU is a reason not to take it.
//
// Attention in FP8 is checked against flash attention of what its codes of q, k, v and dout hold.
#if defined(TARGET_CUDA) && defined(PRECISION_BF16)
#include "kernels/attention/flash.cuh" // flash_forward, flash_backward
#include "kernels/cudnn/attention.cuh" // fused_forward, fused_backward
#include "kernels/cudnn/library.cuh"   // struct fused_library
#include "kernels/device_memory.cuh"   // device_allocate, device_upload, device_download
#include "kernels/device_queue.cuh"    // device_synchronize
#include "kernels/fp8/attention.cuh"   // struct fp8_attention
#include "kernels/fp8/cast.cuh"        // fp8_cast_with_amax

// Two attentions in bf16 are less than a hundredth apart; a wrong scale, mask or heads makes that tens of times more.
static const double FUSED_CHECK_DISTANCE = 1.0 / 32;
// Two attentions of the same codes, of which one rounds P, dS and its outputs to FP8: half as much again as the
// distances of output, dQ, dK and dV in the emulator. A scale that is wrong by a tenth is more than each of them.
static const double FP8_CHECK_DISTANCES[] = {0.06, 0.12, 0.12, 0.1};

// Holds what forward and backward read and write, on the GPU.
struct fused_check {
    struct attention_shape shape;
    struct dropout dropout; // none
    enum fused_order order; // of fused's backward
    int64_t row, out_row;   // elements a token of qkv, of out
    size_t qkv_bytes, out_bytes, lse_bytes, workspace_bytes;
    floatX *qkv, *dout, *out, *dqkv;
    float *lse;
    void *workspace;
};
// Holds what forward and backward give, on the host.
struct fused_results {
    floatX *out, *dqkv;
};

// Returns `bytes` of elements on the host, uniform in [-2, 2), which the caller frees; out of memory ends the program.
static floatX *fused_check_floats(size_t bytes, uint32_t seed) {
    floatX *x = (floatX *)malloc(bytes);
    if (x == NULL)
        fail("no memory to check cuDNN's attention");
    for (size_t i = 0; i < bytes / sizeof *x; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = to_floatX((float)(seed >> 8) * 0x1p-22f - 2); // uniform in [-2, 2)
    }
    return x;
}
// Returns fused_check_floats in memory of the device, which the caller frees by device_free with the same `bytes`.
static void *fused_check_upload(size_t bytes, uint32_t seed, struct device *dev) {
    void *memory = device_allocate(bytes);
    floatX *host = fused_check_floats(bytes, seed);
    device_upload(memory, host, bytes, dev);
    device_synchronize(dev);
    free(host);
    return memory;
}
static size_t fused_check_larger(size_t a, size_t b) { return a > b ? a : b; }
// Allocates what flash and another attention need for one sequence, and fills qkv and dout; fused_check_close frees it.
// workspace_bytes is what the other attention needs. `order` is how cuDNN's backward sums dQ.
static struct fused_check fused_check_open(struct attention_shape shape, enum fused_order order, size_t workspace_bytes,
                                           struct device *dev) {
    struct fused_check c;
    memset(&c, 0, sizeof c);
    c.shape = shape;
    c.order = order;
    c.row = (int64_t)(shape.num_heads + 2 * shape.num_query_groups) * shape.head_dim;
    c.out_row = (int64_t)shape.num_heads * shape.head_dim;
    c.qkv_bytes = (size_t)(shape.T * c.row) * sizeof(floatX);
    c.out_bytes = (size_t)(shape.T * c.out_row) * sizeof(floatX);
    c.lse_bytes = (size_t)(shape.T * shape.num_heads) * sizeof(float);
    c.workspace_bytes = fused_check_larger(
        fused_check_larger(flash_forward_workspace_bytes(shape, dev), flash_backward_workspace_bytes(shape, dev)),
        workspace_bytes);
    c.qkv = (floatX *)fused_check_upload(c.qkv_bytes, 1, dev);
    c.dout = (floatX *)fused_check_upload(c.out_bytes, 2, dev);
    c.out = (floatX *)device_allocate(c.out_bytes);
    c.dqkv = (floatX *)device_allocate(c.qkv_bytes);
    c.lse = (float *)device_allocate(c.lse_bytes);
    c.workspace = device_allocate(c.workspace_bytes);
    return c;
}
static void fused_check_close(struct fused_check *c) {
    device_free(c->qkv, c->qkv_bytes);
    device_free(c->dout, c->out_bytes);
    device_free(c->out, c->out_bytes);
    device_free(c->dqkv, c->qkv_bytes);
    device_free(c->lse, c->lse_bytes);
    device_free(c->workspace, c->workspace_bytes);
}
// Returns a copy of `memory` on the host, which the caller frees; waits for all work enqueued before.
static floatX *fused_check_download(const floatX *memory, size_t bytes, struct device *dev) {
    floatX *host = fused_check_floats(bytes, 0);
    device_download(host, memory, bytes, dev);
    return host;
}
// Returns forward's output, cuDNN's or flash's, which the caller frees. Clears c->out first: gaps show. Writes c->lse.
static floatX *fused_check_forward(struct fused_check *c, bool fused, struct device *dev) {
    device_zero(c->out, c->out_bytes, dev);
    if (fused)
        fused_forward(c->out, c->lse, c->qkv, c->shape, NULL, c->workspace, dev);
    else
        flash_forward(c->out, c->lse, c->qkv, c->shape, c->dropout, NULL, c->workspace, dev);
    return fused_check_download(c->out, c->out_bytes, dev);
}
// Returns backward's dqkv, which the caller frees. Call fused_check_forward with this `fused` before. Clears c->dqkv.
static floatX *fused_check_backward(struct fused_check *c, bool fused, struct device *dev) {
    device_zero(c->dqkv, c->qkv_bytes, dev);
    if (fused)
        fused_backward_by(c->order, c->dqkv, c->dout, c->qkv, c->out, c->lse, c->shape, NULL, c->workspace, dev);
    else
        flash_backward(c->dqkv, c->dout, c->qkv, c->out, c->lse, c->shape, c->dropout, NULL, c->workspace, dev);
    return fused_check_download(c->dqkv, c->qkv_bytes, dev);
}

// Returns |ours - theirs| / |ours| of two (rows, row), over `width` columns from `begin` on. NaN in either gives NaN.
static double fused_distance(const floatX *ours, const floatX *theirs, int64_t rows, int64_t row, int64_t begin,
                             int64_t width) {
    double apart = 0, all = 0;
    for (int64_t t = 0; t < rows; t++)
        for (int64_t i = t * row + begin; i < t * row + begin + width; i++) {
            const double one = (double)to_float(ours[i]), other = (double)to_float(theirs[i]);
            apart += (one - other) * (one - other);
            all += one * one;
        }
    return sqrt(apart / all);
}
// Writes to `reason` (size bytes) which of the first `count` of output, dQ, dK and dV is too far from ours, unless
// `reason` has a text. bounds (count) are their largest distances. Raises *largest to the largest distance measured.
static void fused_compare(char *reason, size_t size, const struct fused_check *c, struct fused_results ours,
                          struct fused_results theirs, const double *bounds, int count, double *largest) {
    const int64_t T = c->shape.T, group_row = (int64_t)c->shape.num_query_groups * c->shape.head_dim;
    const int64_t begins[] = {0, 0, c->out_row, c->out_row + group_row},
                  widths[] = {c->out_row, c->out_row, group_row, group_row};
    static const char *const names[] = {"output", "dQ", "dK", "dV"};
    for (int i = 0; i < count && !*reason; i++) {
        const double distance = i == 0 ? fused_distance(ours.out, theirs.out, T, c->out_row, begins[i], widths[i])
                                       : fused_distance(ours.dqkv, theirs.dqkv, T, c->row, begins[i], widths[i]);
        *largest = distance > *largest ? distance : *largest;
        if (!(distance <= bounds[i]))
            snprintf(reason, size,
                     "its %s is wrong on this GPU: %.2g from that of flash, relative, where %.2g is right", names[i],
                     distance, bounds[i]);
    }
}

// Sets *shape to `like` with one sequence of FUSED_CHECK_TOKENS. Returns whether a GPU is open and flash takes *shape.
static bool fused_check_compares(struct attention_shape *shape, struct attention_shape like, struct device *dev) {
    char reason[256];
    *shape = like;
    shape->B = 1;
    shape->T = FUSED_CHECK_TOKENS;
    if (!dev->open)
        return false;
    flash_unavailable_reason(reason, sizeof reason, *shape, dev);
    return !*reason;
}
// Returns the library. Until fused_judge, a call of it that fails is noted in `broken`, and doesn't end the program.
static struct fused_library *fused_check_begin(struct device *dev) {
    struct fused_library *library = fused_library_of(dev);
    library->checks = true;
    library->broken[0] = 0;
    return library;
}
// Frees the results, which may be NULL.
static void fused_results_free(struct fused_results results) {
    free(results.out);
    free(results.dqkv);
}
// Writes to `reason` (size bytes) what is wrong with `theirs`, which was computed twice (`again`) since
// fused_check_begin, or an empty text. bounds (4) and *largest, which the caller set, are fused_compare's. any_order:
// backward's bits may differ. Frees the three results, whose dqkv is NULL without backward, but not c.
static void fused_judge(char *reason, size_t size, const struct fused_check *c, struct fused_library *library,
                        struct fused_results ours, struct fused_results theirs, struct fused_results again,
                        const double *bounds, bool any_order, double *largest) {
    library->checks = false;
    reason[0] = 0;
    if (*library->broken)
        snprintf(reason, size, "it can't be run on this GPU: %s", library->broken);
    else
        fused_compare(reason, size, c, ours, theirs, bounds, theirs.dqkv ? 4 : 1, largest);
    if (!*reason && memcmp(again.out, theirs.out, c->out_bytes) != 0)
        snprintf(reason, size, "its forward pass, computed again on this GPU, gives other bits");
    if (!*reason && !any_order && theirs.dqkv && memcmp(again.dqkv, theirs.dqkv, c->qkv_bytes) != 0)
        snprintf(reason, size,
                 "its deterministic backward pass, computed again on this GPU, gives other bits "
                 "(--deterministic-mode=false allows that)");
    fused_results_free(ours);
    fused_results_free(theirs);
    fused_results_free(again);
}
// Writes why cuDNN refuses the shape (B 1) or computes it wrongly, else an empty text; library->composes says in which
// form forward is tried. Raises library->distance to the largest distance from flash.
static void fused_check_form(char *reason, size_t size, struct attention_shape shape, enum fused_order order,
                             struct device *dev) {
    fused_refuses_order(reason, size, shape, order, dev);
    if (*reason)
        return;
    const struct fused_key backward = fused_key_of(shape, true, order);
    const double bounds[] = {FUSED_CHECK_DISTANCE, FUSED_CHECK_DISTANCE, FUSED_CHECK_DISTANCE, FUSED_CHECK_DISTANCE};
    struct fused_check c = fused_check_open(
        shape, order,
        fused_check_larger(fused_forward_workspace_bytes(shape, dev), fused_workspace_bytes(&backward, dev)), dev);
    struct fused_results ours, theirs, again;
    struct fused_library *library = fused_check_begin(dev);
    ours.out = fused_check_forward(&c, false, dev);
    ours.dqkv = fused_check_backward(&c, false, dev);
    theirs.out = fused_check_forward(&c, true, dev);
    theirs.dqkv = fused_check_backward(&c, true, dev);
    again.out = fused_check_forward(&c, true, dev);
    again.dqkv = fused_check_backward(&c, true, dev);
    fused_judge(reason, size, &c, library, ours, theirs, again, bounds, order == FUSED_SUM_ANY, &library->distance);
    fused_check_close(&c);
}
void fused_check(char *reason, size_t size, struct attention_shape like, bool any_order, struct device *dev) {
    struct attention_shape shape;
    reason[0] = 0;
    if (!fused_check_compares(&shape, like, dev))
        return;
    struct fused_library *library = fused_library_of(dev);
    const enum fused_order order = fused_order_of(like, any_order, dev); // by the model's length
    fused_check_form(reason, size, shape, order, dev);
    if (!*reason || library->composes)
        return;
    library->composes = true;
    library->distance = 0;
    fused_forget_plans(library);
    fused_check_form(reason, size, shape, order, dev);
}

// ---- in FP8 ----

// Holds what FP8 attention reads and writes beside a fused_check, on the GPU.
struct fp8_check {
    struct fused_check c; // qkv and dout: what the codes hold
    struct fp8_attention a;
    struct fp8_scale *scales; // (FP8_ATTENTION_TENSORS + 1), the last is O's
    fp8 *qkv8, *dout8, *out8;
};
enum { FP8_CHECK_SCALES = (FP8_ATTENTION_TENSORS + 1) * sizeof(struct fp8_scale) };
// Allocates all that FP8 attention and flash need, and makes the codes of q, k, v and dout. fp8_check_close frees it.
static struct fp8_check fp8_check_open(struct attention_shape shape, struct fp8_attention_demands demands,
                                       struct device *dev) {
    const enum fp8_format gradients = demands.gradients;
    const size_t backward = demands.full ? fp8_attention_backward_workspace_bytes(shape, demands, dev) : 0;
    struct fp8_check f;
    memset(&f, 0, sizeof f);
    f.c =
        fused_check_open(shape, FUSED_SUM_ANY,
                         fused_check_larger(fp8_attention_forward_workspace_bytes(shape, demands, dev), backward), dev);
    f.scales = (struct fp8_scale *)device_allocate(FP8_CHECK_SCALES);
    f.qkv8 = (fp8 *)device_allocate(f.c.qkv_bytes);
    f.dout8 = (fp8 *)device_allocate(f.c.out_bytes);
    f.out8 = (fp8 *)device_allocate(f.c.out_bytes);
    device_zero(f.scales, FP8_CHECK_SCALES, dev);
    f.a.shape = shape;
    f.a.gradients = gradients;
    f.a.outputs_in_fp8 = demands.delayed;
    f.a.full = demands.full;
    f.a.any_order = demands.any_order;
    f.a.calibrates = true;
    f.a.out = f.scales + FP8_ATTENTION_TENSORS;
    for (int i = 0; i < FP8_ATTENTION_TENSORS; i++)
        f.a.scales[i] = f.scales + i;
    fp8_attention_cast(f.qkv8, f.c.qkv, f.a, true, dev);
    fp8_attention_read_back(f.c.qkv, f.qkv8, f.a.scales, FP8_E4M3, shape, dev);
    fp8_cast_with_amax(f.dout8, f.a.scales[FP8_ATTENTION_DOUT], gradients, f.c.dout, shape.T, f.c.out_row, dev);
    fp8_read_back(f.c.dout, f.dout8, f.a.scales[FP8_ATTENTION_DOUT], gradients, shape.T * f.c.out_row, dev);
    return f;
}
// Frees the device memory that fp8_check_open allocated.
static void fp8_check_close(struct fp8_check *f) {
    device_free(f->scales, FP8_CHECK_SCALES);
    device_free(f->qkv8, f->c.qkv_bytes);
    device_free(f->dout8, f->c.out_bytes);
    device_free(f->out8, f->c.out_bytes);
    fused_check_close(&f->c);
}
// Returns what FP8 attention computes, as bf16, which the caller frees; dqkv is NULL unless f->a.full.
static struct fused_results fp8_check_run(struct fp8_check *f, struct device *dev) {
    const bool fp8_out = f->a.outputs_in_fp8;
    struct fused_results results = {NULL, NULL};
    device_zero(f->c.out, f->c.out_bytes, dev);
    device_zero(f->c.dqkv, f->c.qkv_bytes, dev);
    fp8_attention_forward(fp8_out ? f->out8 : NULL, fp8_out ? NULL : f->c.out, f->c.lse, f->qkv8, f->a, true,
                          f->c.workspace, dev);
    if (fp8_out)
        fp8_read_back(f->c.out, f->out8, f->a.out, FP8_E4M3, f->c.shape.T * f->c.out_row, dev);
    else
        fp8_cast_with_amax(f->out8, f->a.out, FP8_E4M3, f->c.out, f->c.shape.T, f->c.out_row, dev);
    results.out = fused_check_download(f->c.out, f->c.out_bytes, dev);
    if (!f->a.full)
        return results;
    fp8_attention_backward(f->c.dqkv, f->dout8, f->qkv8, f->out8, f->c.lse, f->a, NULL, f->c.workspace, dev);
    results.dqkv = fused_check_download(f->c.dqkv, f->c.qkv_bytes, dev);
    return results;
}
void fp8_attention_check(char *reason, size_t size, struct attention_shape like, struct fp8_attention_demands demands,
                         struct device *dev) {
    struct attention_shape shape;
    struct fused_results ours = {NULL, NULL};
    double largest = 0;
    const bool compares = fused_check_compares(&shape, like, dev);
    reason[0] = 0;
    if (dev->open)
        fp8_attention_unavailable_reason(reason, size, shape, demands, dev);
    if (*reason || !compares)
        return;
    struct fp8_check f = fp8_check_open(shape, demands, dev);
    struct fused_library *library = fused_check_begin(dev);
    ours.out = fused_check_forward(&f.c, false, dev);
    if (demands.full)
        ours.dqkv = fused_check_backward(&f.c, false, dev);
    const struct fused_results theirs = fp8_check_run(&f, dev), again = fp8_check_run(&f, dev);
    fused_judge(reason, size, &f.c, library, ours, theirs, again, FP8_CHECK_DISTANCES, demands.any_order, &largest);
    fp8_check_close(&f);
}

#endif
