// Measures how fast attention is on a GPU. Prints a JSON object a line on stdout for each shape and direction, for
// scripts/gpu_check.sh and attention_sweep.sh. bf16, head dims 64 to 256, T from 1k to 16k, MHA and 64 query heads over
// 8 KV heads. The engines: "ours", the flash backend that is chosen on this GPU; "ours sm_80", where another one is
// chosen; and "fused", cuDNN's, whose row says why where it does not take the shape. Masks: causal, and full where the
// backend has it. Backward is measured with sums in any order, and deterministic; sm_80's backend has only the
// deterministic one.
// --small: T = 64, with only two and eight heads, for a rehearsal of those scripts on the emulator.
#include "attention.cuh"             // attention_forward, attention_backward
#include "kernels/device_memory.cuh" // device_allocate
#include "kernels/device_queue.cuh"  // device_open
#include "run/attention_choice.cuh"  // attention_choose
#include "test/cuda/timing.cuh"      // median_ms, random_array
#include <math.h>                    // sqrt
#include <stdio.h>                   // printf
#include <string.h>                  // strcmp

struct bench {
    struct attention_shape shape;
    struct dropout dropout;
    bf16 *qkv, *out, *dout, *dqkv;
    float *lse;
    void *workspace;
    enum attention_backend backend;
    struct attention_backward_options options;
    struct device *dev;
};

static void forward(void *argument) {
    struct bench *b = (struct bench *)argument;
    attention_forward(b->out, b->lse, b->qkv, b->backend, b->shape, b->dropout, NULL, b->workspace, b->dev);
}
static void backward(void *argument) {
    struct bench *b = (struct bench *)argument;
    attention_backward(b->dqkv, b->dout, b->qkv, b->out, b->lse, b->backend, b->shape, b->dropout, b->options,
                       b->workspace, b->dev);
}

static void bench(struct attention_shape s, enum attention_backend backend, const char *engine, struct device *dev) {
    const int64_t tokens = (int64_t)s.B * s.T, n_out = tokens * s.num_heads * s.head_dim;
    const int64_t n_qkv = tokens * (s.num_heads + 2 * s.num_query_groups) * s.head_dim;
    const size_t out_bytes = (size_t)n_out * sizeof(bf16), qkv_bytes = (size_t)n_qkv * sizeof(bf16);
    const size_t lse_bytes = (size_t)tokens * (size_t)s.num_heads * sizeof(float);
    struct bench b;
    memset(&b, 0, sizeof b);
    b.shape = s;
    b.backend = backend;
    b.dev = dev;
    b.qkv = random_array(n_qkv, dev);
    b.dout = random_array(n_out, dev);
    b.out = (bf16 *)device_allocate(out_bytes);
    b.dqkv = (bf16 *)device_allocate(qkv_bytes);
    b.lse = (float *)device_allocate(lse_bytes);
    const size_t ordered_bytes = attention_backward_workspace_bytes(backend, s, false, dev);
    const size_t any_order_bytes = attention_backward_workspace_bytes(backend, s, true, dev);
    const size_t forward_bytes = attention_forward_workspace_bytes(backend, s, dev);
    const size_t workspace_bytes = attention_larger(forward_bytes, attention_larger(ordered_bytes, any_order_bytes));
    b.workspace = device_allocate(workspace_bytes);
    // A head's two products are 4 T^2 D, of which the causal mask leaves half; backward has five products.
    const double flops = (s.full ? 4.0 : 2.0) * s.B * s.num_heads * s.T * s.T * s.head_dim;
    static const char *const directions[3] = {"forward", "backward", "deterministic backward"};
    char unproven[256] = ""; // why fused has no deterministic backward here, on some GPUs
    if (backend == ATTENTION_FUSED)
        fused_unavailable_reason(unproven, sizeof unproven, s, false, dev);
    for (int i = 0; i < (*unproven ? 2 : 3); i++) {
        b.options.any_order = i == 1;
        const double ms = median_ms(i ? backward : forward, &b, dev);
        printf(
            "{\"bench\": \"attention\", \"engine\": \"%s\", \"direction\": \"%s\", \"mask\": \"%s\", \"head_dim\": %d, "
            "\"heads\": %d, \"groups\": %d, \"batch\": %d, \"length\": %d, \"ms\": %.4f, \"tflops\": %.4g}\n",
            engine, directions[i], s.full ? "full" : "causal", s.head_dim, s.num_heads, s.num_query_groups, s.B, s.T,
            ms, (i ? 2.5 : 1) * flops / ms * 1e-9);
        fflush(stdout);
    }
    device_free(b.qkv, qkv_bytes);
    device_free(b.dout, out_bytes);
    device_free(b.out, out_bytes);
    device_free(b.dqkv, qkv_bytes);
    device_free(b.lse, lse_bytes);
    device_free(b.workspace, workspace_bytes);
}

// Prints why fused does not take a shape. `reason` may be a loader's message with quotation marks, which this replaces.
static void print_refused(struct attention_shape s, char *reason) {
    for (char *c = reason; *c; c++)
        if (*c == '"' || *c == '\\' || (unsigned char)*c < ' ')
            *c = '\'';
    printf("{\"bench\": \"attention\", \"engine\": \"fused\", \"head_dim\": %d, \"heads\": %d, \"groups\": %d, "
           "\"batch\": %d, \"length\": %d, \"error\": \"%s\"}\n",
           s.head_dim, s.num_heads, s.num_query_groups, s.B, s.T, reason);
    fflush(stdout);
}

// Head dims, and the factor from one length to the next: head dims that few models have are timed at two lengths. The
// shapes by which goals are judged come first. peer_torch.py times the same shapes.
static const struct bench_heads { int head_dim, length_step; } bench_heads[] = {{128, 2}, {64, 2}, {96, 8}, {256, 8}};

// Measures the flash backend that is chosen here: causal, and full unless it is sm_80's.
static void bench_ours(struct attention_shape s, struct device *dev) {
    const struct attention_demands demands = {0, NULL, false};
    const enum attention_backend chosen = attention_choose(ATTENTION_FLASH, s, demands, dev).backend;
    bench(s, chosen, "ours", dev);
    s.full = true;
    if (chosen != ATTENTION_FLASH)
        bench(s, chosen, "ours", dev);
}

// Measures cuDNN's attention, which takes seconds to plan a shape, and sm_80's where another backend is chosen.
static void bench_others(struct attention_shape s, struct device *dev) {
    char reason[256];
    fused_unavailable_reason(reason, sizeof reason, s, true, dev);
    if (*reason)
        print_refused(s, reason);
    else
        bench(s, ATTENTION_FUSED, "fused", dev);
    attention_close(dev); // it keeps at most 64 plans, fewer than all shapes have
    const struct attention_demands demands = {0, NULL, false};
    if (attention_choose(ATTENTION_FLASH, s, demands, dev).backend != ATTENTION_FLASH)
        bench(s, ATTENTION_FLASH, "ours sm_80", dev);
}

int main(int argc, char **argv) {
    const bool small = argc == 2 && strcmp(argv[1], "--small") == 0;
    const int tokens = small ? 64 : 16384, grouped_heads = small ? 8 : 64;
    const struct bench_heads *end = bench_heads + sizeof bench_heads / sizeof *bench_heads;
    struct device dev;
    memset(&dev, 0, sizeof dev);
    device_open(&dev, 0, false);
    for (int pass = 0; pass < 2; pass++) // ours first: a limit that ends this program then loses none of it
        for (const struct bench_heads *h = bench_heads; h < end; h++)
            for (int gqa = 0; gqa < 2; gqa++)
                for (int T = small ? tokens : 1024; T <= tokens; T *= h->length_step) {
                    const int head_dim = h->head_dim, heads = gqa ? grouped_heads : small ? 2 : 2048 / head_dim;
                    const struct attention_shape s = {tokens / T, T,
                                                      heads,      gqa ? grouped_heads / 8 : heads,
                                                      head_dim,   (float)(1 / sqrt((double)head_dim)),
                                                      false};
                    (pass ? bench_others : bench_ours)(s, &dev);
                }
    attention_close(&dev);
    device_close(&dev);
    return 0;
}
