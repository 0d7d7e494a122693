// xvec: a SIMD register of floatX as they lie in memory, for the CPU's ops that read rows of weights or a KV cache
// once. (vectors_floatx.cuh widens bf16 to fp32; an xvec stays bf16, for the dot product of pairs.)
#pragma once
#include "kernels/device.cuh"  // floatX
#include "kernels/vectors.cuh" // vec, vec_words, vec_dot

// An xvec has XVEC_LANES elements, which as fp32 are XVEC_PARTS vectors.
#ifdef PRECISION_BF16
typedef vec_words xvec;
enum { XVEC_PARTS = 2, XVEC_LANES = XVEC_PARTS * LANES };
// Returns sum plus a b, lane by lane: in bf16 lane i adds the products of elements 2 i and 2 i + 1.
static inline vec xvec_dot(vec sum, xvec a, xvec b) { return vec_dot(sum, a, b); }
// Returns every XVEC_PARTS-th element, from number `part` < XVEC_PARTS on, in fp32.
static inline vec xvec_part(xvec x, int part) {
    if (part)
        return (vec)(x & 0xffff0000u);
    return (vec)(x << 16);
}
#else
typedef vec xvec;
enum { XVEC_PARTS = 1, XVEC_LANES = XVEC_PARTS * LANES };
static inline vec xvec_dot(vec sum, xvec a, xvec b) { return vec_fma(sum, a, b); }
static inline vec xvec_part(xvec x, int part) { return x; }
#endif

// Loads XVEC_LANES elements; p need not be aligned.
static inline xvec xvec_load(const floatX *p) {
    xvec x;
    memcpy(&x, p, sizeof x);
    return x;
}
// Returns the first n <= XVEC_LANES elements of a vector, the others 0; p need not be aligned.
static inline xvec xvec_load_some(const floatX *p, int n) {
    xvec x = {0};
    memcpy(&x, p, (size_t)n * sizeof *p);
    return x;
}
