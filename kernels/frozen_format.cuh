// Stores the frozen weight matrices of linear layers, and reads them back as floatX before each product.
//
//   FROZEN_FLOATX  as parameters of floatX are
//   FROZEN_FP8     E4M3 codes and, of each 128 x 128 elements, an fp32 inverse scale, a power of two: fp8/fp8.cuh's
//                  FP8_128X128, so that a product of FP8 matrices takes the stored bytes. 8.002 bits an element
//   FROZEN_NF4     QLoRA's 4 bits, with double quantization: kernels/nf4.cuh. 4.127 bits an element
//
// The host quantizes while weights are loaded. What is stored, and what is read back, has the same bits on every
// machine and target, for any number of threads; a weight that is not finite makes its block NaN, in NF4 the matrix.
#pragma once
#include "kernels/fp8/fp8.cuh" // struct fp8_matrix
#include "kernels/nf4.cuh"     // struct nf4_matrix
#include <sys/cdefs.h>         // __BEGIN_DECLS

enum frozen_format { FROZEN_FLOATX, FROZEN_FP8, FROZEN_NF4 };
enum { FROZEN_ALIGNMENT = 256 }; // of the parts of a stored matrix, and of the matrix in memory
enum { FROZEN_ROWS = 128 };      // quantized together: of any number of columns these are whole blocks

__BEGIN_DECLS
// Returns the bytes of a stored matrix (rows, cols), a multiple of FROZEN_ALIGNMENT.
size_t frozen_bytes(enum frozen_format format, int64_t rows, int64_t cols);

// Returns the bytes of host memory that all frozen_quantize_* calls for a matrix (rows, cols) share; 0 but for NF4.
size_t frozen_quantize_workspace_bytes(enum frozen_format format, int64_t rows, int64_t cols);
// Quantizes rows [first, first + n) of a matrix. The first call must have first = 0: it zeroes all of `stored`. Ends
// the program unless FROZEN_ROWS divides first and, but for the last rows, n. workspace: NULL where it has 0 bytes.
void frozen_quantize_rows(void *stored,        // frozen_bytes(format, rows, cols), on the host
                          const float *values, // (n, cols), on the host
                          enum frozen_format format, int64_t rows, int64_t cols, int64_t first, int64_t n,
                          void *workspace);
// Completes an NF4 matrix after all its rows, by quantizing the absmaxes in workspace. Does nothing for other formats.
void frozen_quantize_end(void *stored, enum frozen_format format, int64_t rows, int64_t cols, void *workspace);

// out = any rows [first, first + n) of a matrix stored in the device's memory, read back as floatX
void frozen_dequantize(floatX *out,        // (n, cols)
                       const void *stored, // frozen_bytes(format, rows, cols)
                       enum frozen_format format, int64_t rows, int64_t cols, int64_t first, int64_t n,
                       struct device *dev);
__END_DECLS

// ---- The parts of what is stored ----

static inline size_t frozen_round_up(int64_t bytes) {
    return (size_t)(bytes + FROZEN_ALIGNMENT - 1) / FROZEN_ALIGNMENT * FROZEN_ALIGNMENT;
}
static inline size_t frozen_fp8_codes_bytes(int64_t rows, int64_t cols) { return frozen_round_up(rows * cols); }
static inline size_t frozen_nf4_codes_bytes(int64_t n) { return frozen_round_up((n + 1) / 2); }
static inline size_t frozen_nf4_absmaxes_bytes(int64_t n) { return frozen_round_up(nf4_blocks(n)); }

// Returns pointers to the parts of the FP8 matrix at `stored`, its codes and inverse scales; converts nothing.
static inline struct fp8_matrix frozen_fp8(const void *stored, int64_t rows, int64_t cols) {
    fp8 *const codes = (fp8 *)(uintptr_t)stored;
    const struct fp8_matrix m = {codes, (float *)(void *)(codes + frozen_fp8_codes_bytes(rows, cols)), FP8_E4M3,
                                 FP8_128X128};
    return m;
}
// Returns pointers to the parts of the NF4 matrix of n elements at `stored`; converts nothing.
static inline struct nf4_matrix frozen_nf4(const void *stored, int64_t n) {
    uint8_t *const codes = (uint8_t *)(uintptr_t)stored, *const absmaxes = codes + frozen_nf4_codes_bytes(n);
    float *const mean = (float *)(void *)(absmaxes + frozen_nf4_absmaxes_bytes(n));
    const struct nf4_matrix m = {codes, absmaxes, mean + 1, mean};
    return m;
}

// ---- Quantizing ----
