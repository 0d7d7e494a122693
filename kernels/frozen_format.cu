#include "kernels/frozen_format.cuh"
#include "kernels/amax.cuh"          // amax_larger
#include "kernels/device_memory.cuh" // device_copy
#include "kernels/fp8/blocks.cuh"    // fp8_block_scale
#include "kernels/packed.cuh"        // packed_store_some
#include "kernels/packed_floats.cuh" // packed_from_floats
#include "kernels/state_format.cuh"  // parameter_rounded

size_t frozen_bytes(enum frozen_format format, int64_t rows, int64_t cols) {
    const int64_t n = rows * cols, word = sizeof(float);
    switch (format) {
    case FROZEN_FLOATX: return frozen_round_up(n * (int64_t)sizeof(floatX));
    case FROZEN_FP8:
        return frozen_fp8_codes_bytes(rows, cols) + frozen_round_up(fp8_inverse_count(FP8_128X128, rows, cols) * word);
    case FROZEN_NF4:
        return frozen_nf4_codes_bytes(n) + frozen_nf4_absmaxes_bytes(n) +
               frozen_round_up((1 + nf4_absmax_blocks(n)) * word);
    }
    return 0;
}

size_t frozen_quantize_workspace_bytes(enum frozen_format format, int64_t rows, int64_t cols) {
    switch (format) {
    case FROZEN_FLOATX:
    case FROZEN_FP8: return 0;
    case FROZEN_NF4: return (size_t)nf4_blocks(rows * cols) * sizeof(float);
    }
    return 0;
}

// Encodes to's tile of up to 128 x 128 elements at (row, col), and its inverse scale. values: the tile's, `cols` a row.
static inline void frozen_fp8_encode_tile(struct fp8_matrix to, const float *values, int64_t rows, int64_t cols,
                                          int64_t row, int64_t col) {
    const int height = rows - row < FP8_BLOCK ? (int)(rows - row) : (int)FP8_BLOCK;
    const int width = cols - col < FP8_BLOCK ? (int)(cols - col) : (int)FP8_BLOCK;
    uint32_t amax = 0;
    for (int r = 0; r < height; r++)
        amax = amax_larger(amax, float_bits(floats_largest(values + r * cols, width)));
    const float scale = fp8_block_scale(amax, FP8_E4M3);
    to.inverse[row / FP8_BLOCK * fp8_inverse_pitch(FP8_128X128, rows, cols) + col / FP8_BLOCK] =
        fp8_block_inverse(scale);
    for (int r = 0; r < height; r++)
#pragma omp simd
        for (int c = 0; c < width; c++)
            to.codes[(row + r) * cols + col + c] = fp8_encode(values[r * cols + c] * scale, FP8_E4M3);
}
// Encodes values (n, cols) as rows [first, first + n) of a matrix (rows, cols); `first` is a multiple of FP8_BLOCK.
static inline void frozen_fp8_encode(struct fp8_matrix to, const float *values, int64_t rows, int64_t cols,
                                     int64_t first, int64_t n) {
    const int64_t across = (cols + FP8_BLOCK - 1) / FP8_BLOCK, tiles = (n + FP8_BLOCK - 1) / FP8_BLOCK * across;
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < tiles; t++) {
        const int64_t row = t / across * FP8_BLOCK, col = t % across * FP8_BLOCK;
        frozen_fp8_encode_tile(to, values + row * cols + col, rows, cols, first + row, col);
    }
}
// Encodes values (n) as elements `begin`, a multiple of NF4_BLOCK, and on. Sets these blocks' entries of absmaxes.
static inline void frozen_nf4_encode(struct nf4_matrix to, float *absmaxes, const float *values, int64_t begin,
                                     int64_t n) {
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < nf4_blocks(n); b++) {
        const int64_t at = b * NF4_BLOCK, block = begin / NF4_BLOCK + b;
        absmaxes[block] = nf4_encode_block(to.codes + block * (NF4_BLOCK / 2), values + at,
                                           n - at < NF4_BLOCK ? (int)(n - at) : (int)NF4_BLOCK);
    }
}
void frozen_quantize_rows(void *stored, const float *values, enum frozen_format format, int64_t rows, int64_t cols,
                          int64_t first, int64_t n, void *workspace) {
    floatX *const plain = (floatX *)stored + first * cols;
    if (first % FROZEN_ROWS != 0 || (n % FROZEN_ROWS != 0 && first + n != rows))
        fail("rows %lld to %lld of a frozen matrix are no whole blocks", (long long)first, (long long)(first + n));
    if (first == 0) // so that padding has the same bytes each time
        memset(stored, 0, frozen_bytes(format, rows, cols));
    switch (format) {
    case FROZEN_FLOATX:
#pragma omp parallel for simd schedule(static)
        for (int64_t i = 0; i < n * cols; i++)
            plain[i] = parameter_rounded(values[i]);
        return;
    case FROZEN_FP8: frozen_fp8_encode(frozen_fp8(stored, rows, cols), values, rows, cols, first, n); return;
    case FROZEN_NF4:
        frozen_nf4_encode(frozen_nf4(stored, rows * cols), (float *)workspace, values, first * cols, n * cols);
        return;
    }
}
void frozen_quantize_end(void *stored, enum frozen_format format, int64_t rows, int64_t cols, void *workspace) {
    switch (format) {
    case FROZEN_FLOATX:
    case FROZEN_FP8: return;
    case FROZEN_NF4:
        nf4_encode_absmaxes(frozen_nf4(stored, rows * cols), (const float *)workspace, nf4_blocks(rows * cols));
        return;
    }
}

// ---- Reading back ----

// Returns an E4M3 code's value times `inverse`, its block's 1 / scale, a power of two or NaN. The code's bits, moved to
// where fp32 has sign, exponent and fraction, are 2^-120 times the value, subnormals too. From 2^-126 up bf16 is exact.
HOST_DEVICE floatX frozen_fp8_value(fp8 code, float inverse) {
    const uint32_t bits = (uint32_t)(code & 0x80u) << 24 | (uint32_t)(code & 0x7fu) << 20;
    const float value = float_from_bits(bits) * 0x1p120f * inverse;
#ifdef PRECISION_BF16
    const bf16 upper = {(uint16_t)(float_bits(value) >> 16)};
    return upper;
#else
    return value;
#endif
}

#ifdef TARGET_CUDA

// Bound by memory: a thread stores packs of 16 bytes among its warp's, once the codes of all its packs are in flight.
enum { FROZEN_THREADS = 256, FROZEN_EACH = 4 };
#define EACH_FROZEN(k) _Pragma("unroll") for (int k = 0; k < FROZEN_EACH; k++)

// Copies the levels to shared memory (NF4_LEVELS floats). All threads of the block call, and see them on return.
DEVICE_FUNCTION void nf4_share_levels(uint32_t shared) {
    if (threadIdx.x < NF4_LEVELS)
        store_shared_float(shared + threadIdx.x * 4, device_nf4_levels[threadIdx.x]);
    __syncthreads();
}
// Loads the 4-bit codes of PACK elements, from a multiple of PACK on, into one word, whose lowest byte is codes[0].
DEVICE_FUNCTION uint32_t nf4_load_codes(const uint8_t *codes) {
#ifdef CUDA_EMULATED
    emu_touch_global(codes, PACK / 2, false);
#endif
    return PACK == 8 ? *(const uint32_t *)codes : *(const uint16_t *)codes;
}
// out[0, count) = elements begin, begin + 1, ...; begin is a multiple of PACK, so that a pack has one absmax.
static __global__ void __launch_bounds__(FROZEN_THREADS)
    nf4_dequantize_kernel(floatX *out, struct nf4_matrix from, int64_t begin, int64_t count) {
    const uint32_t levels = shared_memory();
    const int64_t first = ((int64_t)blockIdx.x * FROZEN_EACH * FROZEN_THREADS + threadIdx.x) * PACK;
    uint32_t codes[FROZEN_EACH];
    float absmaxes[FROZEN_EACH];
    nf4_share_levels(levels);
    EACH_FROZEN(k) {
        const int64_t at = first + k * FROZEN_THREADS * PACK, i = begin + (at < count ? at : 0);
        codes[k] = nf4_load_codes(from.codes + i / 2);
        absmaxes[k] = nf4_absmax(&from, i / NF4_BLOCK);
    }
    EACH_FROZEN(k) {
        const int64_t at = first + k * FROZEN_THREADS * PACK;
        struct packed_floats values;
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            const uint32_t code = codes[k] >> (i / 2 * 8 + (i % 2 ? 0 : 4)) & 15u;
            values.x[i] = load_shared_float(levels + code * 4) * absmaxes[k];
        }
        if (at < count)
            packed_store_some(out + at, packed_from_floats(values), count - at);
    }
}
static __global__ void __launch_bounds__(FROZEN_THREADS)
    nf4_dequantize_unaligned_kernel(floatX *out, struct nf4_matrix from, int64_t begin, int64_t count) {
    const int64_t at = (int64_t)blockIdx.x * FROZEN_THREADS + threadIdx.x, i = begin + at;
    if (at < count)
        out[at] = to_floatX(device_nf4_levels[nf4_code_at(&from, i)] * nf4_absmax(&from, i / NF4_BLOCK));
}
static void frozen_nf4_decode(floatX *out, struct nf4_matrix from, int64_t begin, int64_t count, struct device *dev) {
    if (begin % PACK == 0)
        LAUNCH(dev, nf4_dequantize_kernel, blocks_for(count, FROZEN_EACH * FROZEN_THREADS * PACK), FROZEN_THREADS,
               NF4_LEVELS * sizeof(float), out, from, begin, count);
    else
        LAUNCH(dev, nf4_dequantize_unaligned_kernel, blocks_for(count, FROZEN_THREADS), FROZEN_THREADS, 0, out, from,
               begin, count);
}

struct frozen_fp8_pack {
    fp8 codes[PACK];
};
DEVICE_FUNCTION struct frozen_fp8_pack frozen_fp8_load(const fp8 *from, int64_t count) {
    struct frozen_fp8_pack pack;
    if (count >= PACK && (uintptr_t)from % PACK == 0) {
#ifdef CUDA_EMULATED
        emu_touch_global(from, PACK, false);
#endif
        uint32_t words[PACK / 4];
        if (PACK == 8) {
            const uint2 two = *(const uint2 *)from;
            words[0] = two.x;
            words[PACK / 4 - 1] = two.y;
        } else
            words[0] = *(const uint32_t *)from;
        memcpy(&pack, words, sizeof pack);
        return pack;
    }
    for (int i = 0; i < PACK; i++)
        pack.codes[i] = i < count ? from[i] : 0;
    return pack;
}
static __global__ void __launch_bounds__(FROZEN_THREADS)
    frozen_fp8_dequantize_kernel(floatX *out, struct fp8_matrix from, int64_t rows, int64_t cols, int64_t first) {
    const int64_t row = first + blockIdx.x, pitch = fp8_inverse_pitch(FP8_128X128, rows, cols);
    const int64_t c = ((int64_t)blockIdx.y * FROZEN_THREADS + threadIdx.x) * PACK;
    if (c >= cols)
        return;
    const struct frozen_fp8_pack pack = frozen_fp8_load(from.codes + row * cols + c, cols - c);
    const float inverse = from.inverse[row / FP8_BLOCK * pitch + c / FP8_BLOCK];
    struct packed values;
#pragma unroll
    for (int i = 0; i < PACK; i++)
        values.x[i] = frozen_fp8_value(pack.codes[i], inverse);
    packed_store_some(out + (int64_t)blockIdx.x * cols + c, values, cols - c);
}
// Decodes rows [first, first + n) of a frozen matrix (rows, cols) to out (n, cols).
static void frozen_fp8_decode(floatX *out, struct fp8_matrix from, int64_t rows, int64_t cols, int64_t first, int64_t n,
                              struct device *dev) {
    LAUNCH(dev, frozen_fp8_dequantize_kernel, dim3((unsigned)n, blocks_for(cols, FROZEN_THREADS * PACK)),
           FROZEN_THREADS, 0, out, from, rows, cols, first);
}

#else

static void frozen_nf4_decode(floatX *out, struct nf4_matrix from, int64_t begin, int64_t count, struct device *dev) {
    const int64_t end = begin + count;
#pragma omp parallel for schedule(static)
    for (int64_t b = begin / NF4_BLOCK; b < nf4_blocks(end); b++) {
        const int64_t at = b * NF4_BLOCK;
        const float absmax = nf4_absmax(&from, b);
        if (at >= begin && at + NF4_BLOCK <= end)
            nf4_decode_block(out + (at - begin), from.codes + at / 2, absmax);
        else
            for (int64_t i = at > begin ? at : begin; i < at + NF4_BLOCK && i < end; i++)
                out[i - begin] = to_floatX(nf4_levels[nf4_code_at(&from, i)] * absmax);
    }
}
static void frozen_fp8_decode(floatX *out, struct fp8_matrix from, int64_t rows, int64_t cols, int64_t first, int64_t n,
                              struct device *dev) {
    const int64_t pitch = fp8_inverse_pitch(FP8_128X128, rows, cols);
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < n; r++)
        for (int64_t c = 0; c < cols; c += FP8_BLOCK) {
            const float inverse = from.inverse[(first + r) / FP8_BLOCK * pitch + c / FP8_BLOCK];
            const fp8 *const codes = from.codes + (first + r) * cols + c;
            floatX *const to = out + r * cols + c;
            const int width = cols - c < FP8_BLOCK ? (int)(cols - c) : (int)FP8_BLOCK;
#pragma omp simd
            for (int i = 0; i < width; i++)
                to[i] = frozen_fp8_value(codes[i], inverse);
        }
}

#endif

void frozen_dequantize(floatX *out, const void *stored, enum frozen_format format, int64_t rows, int64_t cols,
                       int64_t first, int64_t n, struct device *dev) {
    if (n == 0 || cols == 0)
        return;
    switch (format) {
    case FROZEN_FLOATX:
        device_copy(out, (const floatX *)stored + first * cols, (size_t)(n * cols) * sizeof *out, dev);
        return;
    case FROZEN_FP8: frozen_fp8_decode(out, frozen_fp8(stored, rows, cols), rows, cols, first, n, dev); return;
    case FROZEN_NF4: frozen_nf4_decode(out, frozen_nf4(stored, rows * cols), first * cols, n * cols, dev); return;
    }
}
