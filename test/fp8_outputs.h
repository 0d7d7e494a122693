// What a cast to FP8 writes, for tests that compare an op that casts with the op, fp8_amax and fp8_cast.
#pragma once
#include "kernels/fp8/fp8.cuh" // struct fp8_cast
#include "test/testing.h"      // test_alloc

// What a cast writes, all forms in one array, so that two casts can be compared at once.
struct outputs {
    unsigned char *bytes;
    size_t count;
    struct fp8_cast to;
};
enum { UNTOUCHED = 0x5a, ALIGNMENT = 256 };
static struct outputs outputs_create(int64_t M, int64_t N, enum fp8_format format, float delayed, uint32_t amax) {
    const size_t form = (size_t)(M * N + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    const size_t sums = ((size_t)N * sizeof(float) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    struct outputs o;
    o.count = 2 * form + sums + 2 * ALIGNMENT;
    o.bytes = (unsigned char *)test_alloc(o.count);
    memset(o.bytes, UNTOUCHED, o.count);
    struct fp8_scale *const scale = (struct fp8_scale *)(o.bytes + 2 * form + sums + ALIGNMENT);
    const struct fp8_matrix rows = {o.bytes, &scale->inverse, format, FP8_PER_TENSOR};
    const struct fp8_matrix columns = {o.bytes + form, &scale->inverse, format, FP8_PER_TENSOR};
    const struct fp8_cast to = {rows, columns, (float *)(o.bytes + 2 * form),
                                true, scale,   (uint64_t *)(o.bytes + 2 * form + sums)};
    memset(to.dbias, 0, sums);
    memset(to.counts, 0, ALIGNMENT);
    memset(scale, 0, sizeof *scale);
    scale->amax = amax;
    scale->delayed = delayed;
    o.to = to;
    return o;
}
