// Measures the two rates of this GPU that bound most kernels of a step: a copy within its memory, which reads and
// writes, and a matrix product of 8192^3 in bf16 by the engine's library. Prints a line of JSON on stdout for
// scripts/gpu_check.sh. docs/internals/kernels.md predicts times by an H200's rates. --small: small sizes, for a
// rehearsal on the emulator.
#include "kernels/device_memory.cuh" // device_copy
#include "kernels/device_queue.cuh"  // device_open
#include "kernels/matmul/matmul.cuh" // matmul_forward
#include "test/cuda/timing.cuh"      // median_ms, random_array
#include <stdio.h>                   // printf

struct rates {
    bf16 *in, *weight, *out;
    void *workspace;
    int size;
    size_t copied_bytes;
    char *from, *to;
    struct device *dev;
};
static void multiply(void *argument) {
    struct rates *r = (struct rates *)argument;
    matmul_forward(r->out, r->in, r->weight, NULL, r->size, r->size, r->size, r->workspace, r->dev);
}
static void copy(void *argument) {
    struct rates *r = (struct rates *)argument;
    device_copy(r->to, r->from, r->copied_bytes, r->dev);
}

int main(int argc, char **argv) {
    const bool small = argc == 2 && strcmp(argv[1], "--small") == 0;
    struct device dev;
    memset(&dev, 0, sizeof dev);
    device_open(&dev, 0, false);
    dev.matmul = matmul_create(&dev);
    struct rates r;
    memset(&r, 0, sizeof r);
    r.dev = &dev;
    r.size = small ? 64 : 8192;
    r.copied_bytes = small ? 1 << 20 : (size_t)4 << 30; // far larger than any L2 cache
    const int64_t elements = (int64_t)r.size * r.size;
    const size_t workspace_bytes = matmul_workspace_bytes(r.size, r.size, r.size, &dev);
    r.from = (char *)device_allocate(r.copied_bytes);
    r.to = (char *)device_allocate(r.copied_bytes);
    device_zero(r.from, r.copied_bytes, &dev);
    const double copy_ms = median_ms(copy, &r, &dev);
    device_free(r.from, r.copied_bytes);
    device_free(r.to, r.copied_bytes);
    r.in = random_array(elements, &dev);
    r.weight = random_array(elements, &dev);
    r.out = random_array(elements, &dev);
    r.workspace = device_allocate(workspace_bytes);
    const double product_ms = median_ms(multiply, &r, &dev);
    printf("{\"bench\": \"rates\", \"copy_bytes_per_s\": %.4g, \"matmul_size\": %d, \"matmul_flops_per_s\": %.4g}\n",
           2 * (double)r.copied_bytes / copy_ms * 1e3, r.size, 2.0 * r.size * r.size * r.size / product_ms * 1e3);
    device_free(r.in, (size_t)elements * sizeof(bf16));
    device_free(r.weight, (size_t)elements * sizeof(bf16));
    device_free(r.out, (size_t)elements * sizeof(bf16));
    device_free(r.workspace, workspace_bytes);
    matmul_destroy(dev.matmul);
    device_close(&dev);
    return 0;
}
