// Rotary position embedding (Su et al. 2021) in the half-split form of Hugging Face: element i of a head is paired with
// element i + D/2. A table has the cosines and sines of each position's angles, times an amplitude, mostly 1.
#pragma once
#include "kernels/device.cuh"    // floatX
#include "kernels/positions.cuh" // struct token_positions
#include <sys/cdefs.h>           // __BEGIN_DECLS

__BEGIN_DECLS
// Rotates the q and k heads of each token in place by the angles of its position; v stays. D is even.
void rope_forward(floatX *qkv,        // (B, T, (H + 2 Hkv) * D): H q heads, Hkv k heads, Hkv v heads
                  const float *table, // (more than the largest position, D): D/2 cosines, D/2 sines
                  struct token_positions positions, int B, int T, int H, int Hkv, int D, struct device *dev);

// Turns the gradient of rope_forward's result into the gradient of its input, in place: rotates by the negative angles.
// Merges the amax of all of dqkv as stored, v's part too, into amax (1) (kernels/amax.cuh), unless amax is NULL.
void rope_backward(floatX *dqkv,       // (B, T, (H + 2 Hkv) * D)
                   const float *table, // (more than the largest position, D): D/2 cosines, D/2 sines
                   struct token_positions positions, int B, int T, int H, int Hkv, int D, uint32_t *amax,
                   struct device *dev);
__END_DECLS

#ifdef TARGET_CUDA
// Returns x, one of a pair, rotated. sine: the angle's sine for the pair's second element, its negative for the first.
// All rotations on a GPU call this: as all fuse the same multiplication with the addition, they have the same bits.
DEVICE_FUNCTION float rope_rotate_one(float x, float partner, float cosine, float sine) {
    return fmaf(x, cosine, partner * sine);
}
// Rotates the pair in place: (x, y) <- (x cosine - y sine, y cosine + x sine).
DEVICE_FUNCTION void rope_rotate_pair(float &x, float &y, float cosine, float sine) {
    const float rotated = rope_rotate_one(x, y, cosine, -sine);
    y = rope_rotate_one(y, x, cosine, sine);
    x = rotated;
}
#else
__BEGIN_DECLS
// Rotates a token's first `heads` heads in place. direction: 1, or -1 for negative angles. Not inlined, for equal bits.
void rope_rotate(floatX *token,          // (heads * D, and more)
                 const float *table_row, // (D): D/2 cosines, D/2 sines
                 int heads, int D, float direction);
__END_DECLS
#endif
