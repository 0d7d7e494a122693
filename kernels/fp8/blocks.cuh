// Casts of floatX matrices to FP8 in blocks of 128 elements along the depth of a product, or of 128 x 128: the parts of
// fp8_cast (kernels/fp8/cast.cuh) for FP8_1X128 and FP8_128X128. Scales are powers of two, so that scaling is exact and
// a value read back is a bf16 number (of magnitudes from 0x1.ep127 on it may be infinity). No value saturates: where
// 448 / amax < 2^k, amax 2^k is at least a unit in the last place above 448, and the quotient so far below 2^k that it
// does not round to it (57344 has the same mantissa). A block with an infinity or a NaN has codes and inverse NaN.
#pragma once
#include "kernels/fp8/fp8.cuh" // struct fp8_cast
#include <sys/cdefs.h>         // __BEGIN_DECLS

__BEGIN_DECLS
// The number of bytes of workspace of a cast of x (M, N) that makes dbias; no more than fp8_cast_workspace_bytes.
size_t fp8_cast_blocks_workspace_bytes(int64_t M, int64_t N);
// Casts as fp8_cast does, with its parameters, for FP8_1X128 and FP8_128X128; M and N must be multiples of 128. The
// padding of `inverse` becomes 0, so that a product that reads it adds nothing. Of to.counts, only FP8_FLUSHED grows,
// by the flushed values of the row form if that is made, else of the column form.
void fp8_cast_blocks(struct fp8_cast to, const floatX *x, int64_t M, int64_t N, void *workspace, struct device *dev);
__END_DECLS

// Returns fp8_scale_of(amax, format), rounded down to a power of two; NaN stays NaN. amax: the bits of a float.
HOST_DEVICE float fp8_block_scale(uint32_t amax, enum fp8_format format) {
    const float scale = fp8_scale_of(amax, format);
    uint32_t bits;
    float power;
    memcpy(&bits, &scale, sizeof bits);
    bits &= 0xff800000u;
    memcpy(&power, &bits, sizeof power);
    return scale == scale ? power : scale;
}
// Returns 1 / scale, exactly, of a scale 2^k; NaN of NaN.
HOST_DEVICE float fp8_block_inverse(float scale) {
    uint32_t bits;
    float inverse;
    memcpy(&bits, &scale, sizeof bits);
    bits = 0x7f000000u - bits;
    memcpy(&inverse, &bits, sizeof inverse);
    return scale == scale ? inverse : scale;
}
// Stores the inverse of the FP8_128X128 tile at (row, depth_at) of a form (rows, depth), and zeroes padding behind it.
HOST_DEVICE void fp8_tile_inverse(const struct fp8_matrix *form, float inverse, int64_t row, int64_t depth_at,
                                  int64_t rows, int64_t depth) {
    const int64_t pitch = fp8_inverse_pitch(FP8_128X128, rows, depth), at = depth_at / FP8_BLOCK;
    float *to = form->inverse + row / FP8_BLOCK * pitch;
    to[at] = inverse;
    if (at == depth / FP8_BLOCK - 1)
        for (int64_t pad = at + 1; pad < pitch; pad++)
            to[pad] = 0;
}
// Whether x was made zero: it is not 0, but its code, the lowest byte of `code`, is a zero's.
HOST_DEVICE bool fp8_is_flushed(float x, uint32_t code) { return (code & 0x7fu) == 0 && x != 0; }
