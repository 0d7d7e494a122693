// Checks attention by cuDNN against our flash attention, once, before it is chosen and memory is planned: forward and
// backward at the model's heads and few tokens, forward a second time and, where it has to give the same bits, backward
// too, since no note tells of an engine that sums dQ as the tiles are done. The library is not in the tests of this
// program, and its versions have been wrong in silence: what is wrong on this GPU is a reason not to take it.
#if defined(TARGET_CUDA) && defined(PRECISION_BF16)
#include "kernels/attention/flash.cuh" // flash_forward, flash_backward
#include "kernels/cudnn/attention.cuh" // fused_forward, fused_backward
#include "kernels/cudnn/library.cuh"   // struct fused_library
#include "kernels/device_memory.cuh"   // device_allocate, device_upload, device_download
#include "kernels/device_queue.cuh"    // device_synchronize

// Two attentions in bf16 are less than a hundredth apart (fused_distance); with a wrong scale, mask or heads they are
// tens of times further apart.
static const double FUSED_CHECK_DISTANCE = 1.0 / 32;

// What forward and backward read and write, on the GPU.
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
// What forward and backward give, on the host.
struct fused_results {
    floatX *out, *dqkv;
};

// Returns `bytes` of elements on the host, uniform in [-2, 2), which the caller frees. Ends the program where memory is
// short.
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
// Allocates all that both attentions need for one sequence, qkv and dout filled; fused_check_close frees it.
static struct fused_check fused_check_open(struct attention_shape shape, enum fused_order order, struct device *dev) {
    struct fused_check c;
    memset(&c, 0, sizeof c);
    const struct fused_key backward = fused_key_of(shape, true, order);
    c.shape = shape;
    c.order = order;
    c.row = (int64_t)(shape.num_heads + 2 * shape.num_query_groups) * shape.head_dim;
    c.out_row = (int64_t)shape.num_heads * shape.head_dim;
    c.qkv_bytes = (size_t)(shape.T * c.row) * sizeof(floatX);
    c.out_bytes = (size_t)(shape.T * c.out_row) * sizeof(floatX);
    c.lse_bytes = (size_t)(shape.T * shape.num_heads) * sizeof(float);
    const size_t workspaces[] = {flash_forward_workspace_bytes(shape, dev), flash_backward_workspace_bytes(shape, dev),
                                 fused_forward_workspace_bytes(shape, dev), fused_workspace_bytes(&backward, dev)};
    for (int i = 0; i < 4; i++)
        c.workspace_bytes = workspaces[i] > c.workspace_bytes ? workspaces[i] : c.workspace_bytes;
    c.qkv = (floatX *)fused_check_upload(c.qkv_bytes, 1, dev);
    c.dout = (floatX *)fused_check_upload(c.out_bytes, 2, dev);
    c.out = (floatX *)device_allocate(c.out_bytes);
    c.dqkv = (floatX *)device_allocate(c.qkv_bytes);
    c.lse = (float *)device_allocate(c.lse_bytes);
    c.workspace = device_allocate(c.workspace_bytes);
    return c;
}
// Frees what fused_check_open allocated.
static void fused_check_close(struct fused_check *c) {
    device_free(c->qkv, c->qkv_bytes);
    device_free(c->dout, c->out_bytes);
    device_free(c->out, c->out_bytes);
    device_free(c->dqkv, c->qkv_bytes);
    device_free(c->lse, c->lse_bytes);
    device_free(c->workspace, c->workspace_bytes);
}
// Returns a copy on the host, which the caller frees.
static floatX *fused_check_download(const floatX *memory, size_t bytes, struct device *dev) {
    floatX *host = fused_check_floats(bytes, 0);
    device_download(host, memory, bytes, dev);
    return host;
}
// Returns forward's output, fused's or flash's, which the caller frees. The GPU's is cleared before, so that gaps show.
static floatX *fused_check_forward(struct fused_check *c, bool fused, struct device *dev) {
    device_zero(c->out, c->out_bytes, dev);
    if (fused)
        fused_forward(c->out, c->lse, c->qkv, c->shape, NULL, c->workspace, dev);
    else
        flash_forward(c->out, c->lse, c->qkv, c->shape, c->dropout, NULL, c->workspace, dev);
    return fused_check_download(c->out, c->out_bytes, dev);
}
// Returns backward's dqkv, which the caller frees, after a fused_check_forward by the same attention. The GPU's is
// cleared before.
static floatX *fused_check_backward(struct fused_check *c, bool fused, struct device *dev) {
    device_zero(c->dqkv, c->qkv_bytes, dev);
    if (fused)
        fused_backward_by(c->order, c->dqkv, c->dout, c->qkv, c->out, c->lse, c->shape, NULL, c->workspace, dev);
    else
        flash_backward(c->dqkv, c->dout, c->qkv, c->out, c->lse, c->shape, c->dropout, NULL, c->workspace, dev);
    return fused_check_download(c->dqkv, c->qkv_bytes, dev);
}

// Returns the relative distance of `theirs` from `ours` in columns [begin, begin + width); NaN where one holds a NaN.
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
// Writes to `reason` (size bytes), unless it has a text, which result is too far from ours. *largest becomes the
// largest distance that was met.
static void fused_compare(char *reason, size_t size, const struct fused_check *c, struct fused_results ours,
                          struct fused_results theirs, double *largest) {
    const int64_t T = c->shape.T, group_row = (int64_t)c->shape.num_query_groups * c->shape.head_dim;
    const double distances[] = {
        fused_distance(ours.out, theirs.out, T, c->out_row, 0, c->out_row),
        fused_distance(ours.dqkv, theirs.dqkv, T, c->row, 0, c->out_row),
        fused_distance(ours.dqkv, theirs.dqkv, T, c->row, c->out_row, group_row),
        fused_distance(ours.dqkv, theirs.dqkv, T, c->row, c->out_row + group_row, group_row),
    };
    static const char *const names[] = {"output", "dQ", "dK", "dV"};
    for (int i = 0; i < 4 && !*reason; i++) {
        *largest = distances[i] > *largest ? distances[i] : *largest;
        if (!(distances[i] <= FUSED_CHECK_DISTANCE))
            snprintf(reason, size,
                     "its %s is wrong on this GPU: %.2g from that of flash, relative, where %.2g is right", names[i],
                     distances[i], FUSED_CHECK_DISTANCE);
    }
}

// Writes to `reason` (size bytes) what is wrong with fused, as it is asked now, for the shape's heads; empty: nothing.
static void fused_check_form(char *reason, size_t size, struct attention_shape shape, enum fused_order order,
                             struct device *dev) {
    struct fused_library *library = fused_library_of(dev);
    fused_refuses_order(reason, size, shape, order, dev);
    if (*reason)
        return;
    struct fused_check c = fused_check_open(shape, order, dev);
    struct fused_results ours, theirs;
    library->checks = true;
    library->broken[0] = 0;
    ours.out = fused_check_forward(&c, false, dev);
    ours.dqkv = fused_check_backward(&c, false, dev);
    theirs.out = fused_check_forward(&c, true, dev);
    theirs.dqkv = fused_check_backward(&c, true, dev);
    floatX *again = fused_check_forward(&c, true, dev), *dagain = fused_check_backward(&c, true, dev);
    library->checks = false;
    if (*library->broken)
        snprintf(reason, size, "it can't be run on this GPU: %s", library->broken);
    else
        fused_compare(reason, size, &c, ours, theirs, &library->distance);
    if (!*reason && memcmp(again, theirs.out, c.out_bytes) != 0)
        snprintf(reason, size, "its forward pass, computed again on this GPU, gives other bits");
    if (!*reason && order != FUSED_SUM_ANY && memcmp(dagain, theirs.dqkv, c.qkv_bytes) != 0)
        snprintf(reason, size,
                 "its deterministic backward pass, computed again on this GPU, gives other bits "
                 "(--deterministic-mode=false allows that)");
    fused_check_close(&c);
    floatX *const all[] = {ours.out, ours.dqkv, theirs.out, theirs.dqkv, again, dagain};
    for (int i = 0; i < 6; i++)
        free(all[i]);
}
void fused_check(char *reason, size_t size, struct attention_shape like, bool any_order, struct device *dev) {
    struct attention_shape shape = like;
    shape.B = 1;
    shape.T = FUSED_CHECK_TOKENS;
    reason[0] = 0;
    if (!dev->open)
        return;
    flash_unavailable_reason(reason, size, shape, dev);
    if (*reason) {
        reason[0] = 0;
        return;
    }
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

#endif
