// Casts of floatX matrices to FP8: the row form, the column form, which is the transposed matrix, or both in one pass.
// On compute capability 8.9 and 9.0 cuBLASLt multiplies FP8 only by rows: backward needs operands transposed in memory.
#pragma once
#include "kernels/fp8/fp8.cuh" // struct fp8_matrix, struct fp8_cast
#include <string.h>            // memset
#include <sys/cdefs.h>         // __BEGIN_DECLS

__BEGIN_DECLS
// *amax = the larger of *amax and the largest fp8_magnitude in x (n)
void fp8_amax(uint32_t *amax, const floatX *x, int64_t n, struct device *dev);

// The number of bytes of workspace of a cast of x (M, N) that makes dbias.
size_t fp8_cast_workspace_bytes(int64_t M, int64_t N);
// Casts x (M, N). FP8_PER_TENSOR takes fp8_scale_for(scale), whose amax fp8_amax or x's op took, and sets scale->scale
// and scale->inverse, where the caller has the forms' `inverse` point. FP8_1X128 has a scale for each 128 elements of a
// form's row, so that the forms' codes may differ; with FP8_128X128 they don't. These scales are fp8_scale_of amaxes,
// rounded down to powers of 2; M and N are multiples of 128, else of 16. workspace may be NULL without dbias.
void fp8_cast(struct fp8_cast to, const floatX *x, int64_t M, int64_t N, void *workspace, struct device *dev);
// Merges the amax of x (M, N) into scale->amax, then casts x to codes (M, N) in row form as fp8_cast does, by scale.
static inline void fp8_cast_with_amax(fp8 *codes, struct fp8_scale *scale, enum fp8_format format, const floatX *x,
                                      int64_t M, int64_t N, struct device *dev) {
    struct fp8_cast to;
    memset(&to, 0, sizeof to);
    to.rows.codes = codes;
    to.rows.format = format;
    to.scale = scale;
    fp8_amax(&scale->amax, x, M * N, dev);
    fp8_cast(to, x, M, N, NULL, dev);
}
// columns (N, M) = the transpose of rows (M, N), codes by one scale; M and N are multiples of 16.
void fp8_transpose(fp8 *columns, const fp8 *rows, int64_t M, int64_t N, struct device *dev);
__END_DECLS
