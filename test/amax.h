// Helpers for the tests of ops that take an amax (kernels/amax.cuh).
#pragma once
#include "kernels/device.cuh" // floatX
#include "test/testing.h"     // test_alloc

// Elements of which a maximum must neither lose nor mistake one: all finite; the last one NaN; the last one infinite;
// zeros of both signs.
enum { AMAX_FINITE, AMAX_NAN, AMAX_INFINITE, AMAX_ZEROS, AMAX_CASES };
static const char *const amax_case_names[] = {"finite", "the last is NaN", "the last is infinite", "zeros"};

// Changes x (n), which holds finite values, into the case AMAX_...
static inline void amax_case_set(floatX *x, int64_t n, int amax_case) {
    for (int64_t i = 0; i < n && amax_case == AMAX_ZEROS; i++)
        x[i] = to_floatX(i % 3 == 1 ? -0.0f : 0.0f);
    if (amax_case == AMAX_NAN || amax_case == AMAX_INFINITE)
        x[n - 1] = to_floatX(amax_case == AMAX_NAN ? NAN : -INFINITY);
}

static inline uint32_t *amax_new(uint32_t value) {
    uint32_t *amax = (uint32_t *)test_alloc(sizeof *amax);
    *amax = value;
    return amax;
}
// Returns the bits of an amax that held `before`, after an op has stored x (n).
static inline uint32_t amax_expected(uint32_t before, const floatX *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const float magnitude = fabsf(to_float(x[i]));
        uint32_t bits;
        memcpy(&bits, &magnitude, sizeof bits);
        before = bits > before ? bits : before;
    }
    return before;
}
