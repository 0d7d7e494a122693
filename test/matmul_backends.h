// The backends of matrix products that this build has, for tests that go through them; on a GPU cuBLASLt only.
#pragma once
#include "kernels/matmul/matmul.cuh" // matmul_create, matmul_destroy
#include "test/testing.h"            // cmocka

#ifdef TARGET_CUDA
struct matmul_backend {
    bool same_bits_for_any_threads;
};
static const struct matmul_backend matmul_backends[] = {{true}};
enum { matmul_backends_count = 1 };
static struct matmul_library *matmul_create_backend(struct device *dev, const struct matmul_backend *backend) {
    return matmul_create(dev);
}
static void wait_for(struct device *dev) { cuda_check(cudaStreamSynchronize(dev->stream)); }
#else
#include "kernels/matmul/backend.cuh" // matmul_backends, matmul_create_backend
static void wait_for(struct device *dev) {}
#endif
static char backend_under_test[96] = "naive";

// Calls `check` with a device for each backend that this machine has, and prints their names.
static void for_each_backend(int threads, void (*check)(struct device *, const struct matmul_backend *)) {
    int found = 0;
    for (int b = 0; b < matmul_backends_count; b++) {
        struct device dev = {threads, NULL};
        dev.matmul = matmul_create_backend(&dev, &matmul_backends[b]);
        if (dev.matmul == NULL)
            continue;
        snprintf(backend_under_test, sizeof backend_under_test, "%s, %d threads", matmul_describe(dev.matmul), threads);
        print_message("           %s\n", backend_under_test);
        check(&dev, &matmul_backends[b]);
        matmul_destroy(dev.matmul);
        found++;
    }
    assert_true(found > 0);
}

// ---- arrays between guards: NaN around inputs, a pattern around outputs ----

enum { GUARD = 64 }; // elements on each side

// Returns memory of `bytes` bytes that, like the guards on both sides of it, is filled with `fill`; guarded_free frees
// it.
static void *guarded(size_t bytes, unsigned char fill) {
    char *memory = (char *)test_alloc(bytes + 2 * GUARD * sizeof(float));
    memset(memory, fill, bytes + 2 * GUARD * sizeof(float));
    return memory + GUARD * sizeof(float);
}
static void guarded_free(void *memory) { free((char *)memory - GUARD * sizeof(float)); }
// Checks that the guards around guarded memory of `bytes` bytes still hold `fill`.
static void assert_guards(const void *memory, size_t bytes, unsigned char fill) {
    const unsigned char *before = (const unsigned char *)memory - GUARD * sizeof(float);
    const unsigned char *after = (const unsigned char *)memory + bytes;
    for (size_t i = 0; i < GUARD * sizeof(float); i++) {
        assert_int_equal(before[i], fill);
        assert_int_equal(after[i], fill);
    }
}

enum { NAN_BYTE = 0xff }; // floats and bf16s whose bytes are all this are NaN
