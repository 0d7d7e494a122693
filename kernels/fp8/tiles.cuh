// Casts to FP8 by one scale, by tiles, of any source: a matrix (cast.cu), or what an activation computes.
#pragma once
#include "kernels/amax.cuh"        // amax_larger, amax_merge, amax_elements
#include "kernels/column_sums.cuh" // column_sums
#include "kernels/fp8/fp8.cuh"     // struct fp8_matrix, struct fp8_cast
#include <math.h>                  // fabsf, fmaxf
#ifdef TARGET_CUDA
#include "kernels/packed.cuh" // packed_load
#include "kernels/ptx.cuh"    // pack_fp8x4, choose_bytes, shared memory
#else
#include "kernels/vectors_floatx.cuh" // floatx_load, transpose_16x16
#endif

// ---- counts ----

// Returns the magnitude above which a scaled value saturates; up to it rounding gives at most the largest finite value.
HOST_DEVICE float fp8_saturates_above(enum fp8_format format) {
    switch (format) {
    case FP8_E4M3: return 464.0f;          // the tie between 448 and 480 goes to 448
    case FP8_E5M2: return 0x1.dffffep+15f; // the tie between 57344 and 65536, 61440, goes to 65536
    }
    return 0;
}
// Returns the magnitude at and below which a scaled value other than zero is flushed: half the smallest subnormal.
HOST_DEVICE float fp8_flushes_to(enum fp8_format format) {
    switch (format) {
    case FP8_E4M3: return 0x1p-10f;
    case FP8_E5M2: return 0x1p-17f;
    }
    return 0;
}

// ---- FP8_PER_TENSOR, by tiles: what both targets share ----

// A tile's column form is written by runs of 64 bytes: whole sectors of a GPU's memory, a cache line of a CPU's.
enum { FP8_TILE = 64 };

static inline int64_t fp8_tiles(int64_t n) { return (n + FP8_TILE - 1) / FP8_TILE; }
static inline enum fp8_format fp8_cast_format(const struct fp8_cast *to) {
    return to->rows.codes ? to->rows.format : to->columns.format;
}
#ifdef TARGET_CUDA

// Bound by memory: 2 bytes an element are read, 1 a form written. A thread has 4 rows of 8 columns: a warp reads 128
// bytes of each of 16 rows and writes 64 bytes of codes; 4 x 4 codes are transposed in registers, the rest in shared
// memory. Half the GPU's threads have 64 KB of loads a multiprocessor in flight: twice what 4 TB/s at 0.9 us ask for.
enum { FP8_TILE_THREADS = 128, FP8_TILE_WARPS = FP8_TILE_THREADS / 32, FP8_THREAD_ROWS = 4, FP8_THREAD_COLUMNS = 8 };
enum { FP8_TILE_LANES = FP8_TILE / FP8_THREAD_COLUMNS }; // lanes of a warp that share a row of the tile

struct fp8_eight {
    floatX x[FP8_THREAD_COLUMNS];
};
DEVICE_FUNCTION struct fp8_eight fp8_eight_load(const floatX *from) { // aligned to 16 bytes
    struct fp8_eight result;
#pragma unroll
    for (int i = 0; i < FP8_THREAD_COLUMNS; i += PACK) {
        const struct packed pack = packed_load(from + i);
        memcpy(&result.x[i], &pack, sizeof pack);
    }
    return result;
}

// Returns the larger of amax and the largest fp8_magnitude of eight elements.
DEVICE_FUNCTION uint32_t fp8_eight_amax(uint32_t amax, const struct fp8_eight &x) {
#pragma unroll
    for (int i = 0; i < FP8_THREAD_COLUMNS; i++)
        amax = amax_with(amax, x.x[i]);
    return amax;
}

struct fp8_place {
    int64_t row, column;
};
// Returns at which row and column of the matrix this thread's 4 x 8 elements of a tile begin; they may be past its end.
DEVICE_FUNCTION struct fp8_place fp8_thread_place(int64_t tile_row, int64_t tile_column) {
    const int lane = (int)threadIdx.x % FP8_TILE_LANES, group = (int)threadIdx.x / FP8_TILE_LANES;
    const struct fp8_place place = {tile_row + group * FP8_THREAD_ROWS, tile_column + lane * FP8_THREAD_COLUMNS};
    return place;
}

// A source of a tile's elements has
//   OUTPUTS            1 or 2: matrices that stand beside each other in one of OUTPUTS times the columns
//   TAKES_AMAX         the tile kernel merges the elements' amax into the scale's, where the scale is a delayed one
//   struct loaded      what it reads for eight neighboring elements of each output
//   load(row, column), values(eight, loaded)
struct fp8_matrix_source {
    enum { OUTPUTS = 1, TAKES_AMAX = 0 };
    const floatX *x; // (M, N)
    int64_t N;
    typedef struct fp8_eight loaded;
    __device__ __forceinline__ loaded load(int64_t row, int64_t column) const {
        return fp8_eight_load(x + row * N + column);
    }
    __device__ __forceinline__ void values(struct fp8_eight out[OUTPUTS], const loaded &in) const { out[0] = in; }
};

struct fp8_thread_tile {
    uint32_t codes[FP8_THREAD_ROWS][2];
    float sums[FP8_THREAD_COLUMNS];
};

// Returns how many of eight elements are saturated, in the upper half of the result, and how many are flushed, in the
// lower half. As few are saturated, it counts them only if the largest element is.
DEVICE_FUNCTION uint32_t fp8_count_eight(const struct fp8_eight &x, float scale, enum fp8_format format) {
    const float above = fp8_saturates_above(format), zero = fp8_flushes_to(format);
    float largest = 0;
    uint32_t count = 0;
#pragma unroll
    for (int i = 0; i < FP8_THREAD_COLUMNS; i++) {
        const float value = to_float(x.x[i]), size = fabsf(value * scale);
        largest = fmaxf(largest, size);
        if (value != 0 && size <= zero)
            count++;
    }
    if (largest > above)
        for (int i = 0; i < FP8_THREAD_COLUMNS; i++)
            count += fabsf(to_float(x.x[i]) * scale) > above ? 0x10000u : 0;
    return count;
}
// Encodes eight elements by the scale to two words of codes, and adds the elements, before the cast, to sums.
DEVICE_FUNCTION void fp8_encode_eight(uint32_t codes[2], float sums[FP8_THREAD_COLUMNS], const struct fp8_eight &x,
                                      float scale, enum fp8_format format) {
    float scaled[FP8_THREAD_COLUMNS];
#pragma unroll
    for (int i = 0; i < FP8_THREAD_COLUMNS; i++) {
        const float value = to_float(x.x[i]);
        scaled[i] = value * scale;
        sums[i] = add_rounded(sums[i], value);
    }
    codes[0] = pack_fp8x4(scaled, format);
    codes[1] = pack_fp8x4(scaled + 4, format);
}

// out[j] = byte j of each of the four words, the first word's in the lowest byte.
DEVICE_FUNCTION void transpose_bytes(uint32_t out[4], const uint32_t in[4]) {
    const uint32_t a = choose_bytes(in[0], in[1], 0x5140), b = choose_bytes(in[2], in[3], 0x5140);
    const uint32_t c = choose_bytes(in[0], in[1], 0x7362), d = choose_bytes(in[2], in[3], 0x7362);
    out[0] = choose_bytes(a, b, 0x5410);
    out[1] = choose_bytes(a, b, 0x7632);
    out[2] = choose_bytes(c, d, 0x5410);
    out[3] = choose_bytes(c, d, 0x7632);
}

// Shared memory of a block: outputs' transposed codes, then their column sums by warps, then warps' counts and maxima.
enum { FP8_TILE_CODES_BYTES = FP8_TILE * FP8_TILE, FP8_TILE_SUMS_BYTES = FP8_TILE_WARPS * FP8_TILE * 4 };
enum { FP8_TILE_WORDS_BYTES = 2 * FP8_TILE_WARPS * 4 };
#define FP8_TILE_SHARED_BYTES(outputs) ((outputs) * (FP8_TILE_CODES_BYTES + FP8_TILE_SUMS_BYTES) + FP8_TILE_WORDS_BYTES)

// Returns the offset in the tile's codes of rows 16 `chunk` to 16 `chunk` + 15 of a column. A warp writes one chunk of
// columns 8 apart, and eight lanes read the four chunks of two neighboring columns: neither meets a bank twice.
DEVICE_FUNCTION uint32_t fp8_chunk_offset(int column, int chunk) {
    const int group = column / FP8_THREAD_COLUMNS, i = column % FP8_THREAD_COLUMNS;
    return (uint32_t)((i * 4 + chunk) * FP8_TILE_LANES + (group ^ chunk ^ (i & 1) << 2)) * 16;
}
// Stores this thread's 4 x 8 codes, transposed, in the tile's codes at `shared`, as fp8_chunk_offset says. No barrier.
DEVICE_FUNCTION void fp8_store_transposed(uint32_t shared, const uint32_t codes[FP8_THREAD_ROWS][2]) {
    const int lane = (int)threadIdx.x % 32, chunk = (int)threadIdx.x / 32, first = lane % FP8_TILE_LANES * 8;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t rows[4] = {codes[0][half], codes[1][half], codes[2][half], codes[3][half]};
        uint32_t columns[4];
        transpose_bytes(columns, rows);
#pragma unroll
        for (int i = 0; i < 4; i++)
            store_shared_word(shared + fp8_chunk_offset(first + 4 * half + i, chunk) +
                                  (uint32_t)(lane / FP8_TILE_LANES) * 4,
                              columns[i]);
    }
}
// Writes rows x columns of the tile in `shared` to codes, M bytes a column; 16 divides rows. All call, after a barrier.
DEVICE_FUNCTION void fp8_write_columns(fp8 *codes, int64_t M, uint32_t shared, int64_t rows, int64_t columns) {
#pragma unroll
    for (int i = 0; i < FP8_TILE * 4 / FP8_TILE_THREADS; i++) {
        const int at = i * FP8_TILE_THREADS + (int)threadIdx.x, column = at / 4, chunk = at % 4;
        if (column >= columns || chunk * 16 >= rows)
            continue;
        const struct word_x4 words = load_shared_words(shared + fp8_chunk_offset(column, chunk));
        fp8 *to = codes + column * M + chunk * 16;
        packed_check(to, true);
        *(uint4 *)to = make_uint4(words.x[0], words.x[1], words.x[2], words.x[3]);
    }
}

// Stores the sums of columns over a warp's 16 rows in its line of `shared` (warps, 64); changes `sums`. All lanes call.
DEVICE_FUNCTION void fp8_store_sums(uint32_t shared, float sums[FP8_THREAD_COLUMNS]) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < FP8_THREAD_COLUMNS; i++)
        for (int offset = FP8_TILE_LANES; offset < 32; offset *= 2)
            sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], offset);
    if (lane >= FP8_TILE_LANES)
        return;
    const uint32_t to = shared + (uint32_t)(warp * FP8_TILE + lane * FP8_THREAD_COLUMNS) * 4;
    const struct float_x4 low = {{sums[0], sums[1], sums[2], sums[3]}}, high = {{sums[4], sums[5], sums[6], sums[7]}};
    store_shared_floats(to, low);
    store_shared_floats(to + 16, high);
}
// Returns the sum of a column over the warps, of what fp8_store_sums stored before a barrier.
DEVICE_FUNCTION float fp8_warps_sum(uint32_t shared, int column) {
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < FP8_TILE_WARPS; warp++)
        sum += load_shared_float(shared + (uint32_t)(warp * FP8_TILE + column) * 4);
    return sum;
}

// Stores a warp's sum of fp8_count_eight's counts, and its amax, in its line of `shared` (warps, 2). All lanes call.
DEVICE_FUNCTION void fp8_store_words(uint32_t shared, uint32_t count, uint32_t amax) {
    for (int offset = 16; offset > 0; offset /= 2)
        count += __shfl_xor_sync(0xffffffffu, count, offset); // at most 32 x 64 of each kind
    amax = __reduce_max_sync(0xffffffffu, amax);
    if (threadIdx.x % 32 == 0) {
        store_shared_word(shared + threadIdx.x / 32 * 8, count);
        store_shared_word(shared + threadIdx.x / 32 * 8 + 4, amax);
    }
}
// Adds fp8_count_eight's counts, which one thread has, to counts (FP8_COUNTS); NULL where both are 0.
DEVICE_FUNCTION void fp8_add_counts(uint64_t *counts, uint32_t count) {
    if (count >> 16 > 0)
        atomicAdd((unsigned long long *)&counts[FP8_SATURATED], (unsigned long long)(count >> 16));
    if ((count & 0xffffu) > 0)
        atomicAdd((unsigned long long *)&counts[FP8_FLUSHED], (unsigned long long)(count & 0xffffu));
}
// Adds fp8_store_words' counts to to.counts (NULL: they are 0). If takes_amax, merges the amax. One thread calls.
DEVICE_FUNCTION void fp8_merge_words(const struct fp8_cast &to, bool takes_amax, uint32_t shared) {
    uint32_t count = 0, amax = 0;
    for (uint32_t warp = 0; warp < FP8_TILE_WARPS; warp++) {
        count += load_shared_word(shared + warp * 8);
        amax = amax_larger(amax, load_shared_word(shared + warp * 8 + 4));
    }
    fp8_add_counts(to.counts, count);
    if (takes_amax)
        atomicMax(&to.scale->amax, amax);
}

// Casts a tile of each output (M, N) per block. The first block sets to.scale's scale and inverse. partial (rows of
// tiles, OUTPUTS N) gets the tiles' column sums where to.dbias isn't NULL.
template <class source>
static __global__ void __launch_bounds__(FP8_TILE_THREADS)
    fp8_tile_kernel(const struct fp8_cast to, enum fp8_format format, const source from, int64_t M, int64_t N,
                    float *partial) {
    const int64_t tile_row = (int64_t)blockIdx.y * FP8_TILE, tile_column = (int64_t)blockIdx.x * FP8_TILE;
    const struct fp8_place at = fp8_thread_place(tile_row, tile_column);
    const bool inside = at.row < M && at.column < N, takes_amax = source::TAKES_AMAX && to.scale->delayed != 0;
    typename source::loaded in[FP8_THREAD_ROWS];
    struct fp8_thread_tile tiles[source::OUTPUTS];
    uint32_t count = 0, amax = 0;
    if (inside) {
#pragma unroll
        for (int r = 0; r < FP8_THREAD_ROWS; r++)
            in[r] = from.load(at.row + r, at.column);
    }
    const float scale = fp8_scale_for(to.scale, format);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
        to.scale->scale = scale;
        to.scale->inverse = 1.0f / scale;
    }
    memset(tiles, 0, sizeof tiles);
    if (inside) {
#pragma unroll
        for (int r = 0; r < FP8_THREAD_ROWS; r++) {
            struct fp8_eight values[source::OUTPUTS];
            from.values(values, in[r]);
#pragma unroll
            for (int o = 0; o < source::OUTPUTS; o++) {
                uint32_t *codes = tiles[o].codes[r];
                fp8_encode_eight(codes, tiles[o].sums, values[o], scale, format);
                if (to.rows.codes)
                    *(uint2 *)(to.rows.codes + (at.row + r) * source::OUTPUTS * N + o * N + at.column) =
                        make_uint2(codes[0], codes[1]);
                if (to.counts)
                    count += fp8_count_eight(values[o], scale, format);
                if (takes_amax)
                    amax = fp8_eight_amax(amax, values[o]);
            }
        }
    }

    const uint32_t shared = shared_memory(), shared_sums = shared + source::OUTPUTS * FP8_TILE_CODES_BYTES;
    const uint32_t shared_words = shared_sums + source::OUTPUTS * FP8_TILE_SUMS_BYTES;
#pragma unroll
    for (int o = 0; o < source::OUTPUTS; o++) {
        if (to.columns.codes)
            fp8_store_transposed(shared + o * FP8_TILE_CODES_BYTES, tiles[o].codes);
        if (to.dbias)
            fp8_store_sums(shared_sums + o * FP8_TILE_SUMS_BYTES, tiles[o].sums);
    }
    if (to.counts || takes_amax)
        fp8_store_words(shared_words, count, amax);
    __syncthreads();
#pragma unroll
    for (int o = 0; o < source::OUTPUTS; o++) {
        if (to.columns.codes)
            fp8_write_columns(to.columns.codes + (o * N + tile_column) * M + tile_row, M,
                              shared + o * FP8_TILE_CODES_BYTES, M - tile_row, N - tile_column);
        if (to.dbias && threadIdx.x < FP8_TILE && tile_column + threadIdx.x < N)
            partial[((int64_t)blockIdx.y * source::OUTPUTS + o) * N + tile_column + threadIdx.x] =
                fp8_warps_sum(shared_sums + o * FP8_TILE_SUMS_BYTES, (int)threadIdx.x);
    }
    if ((to.counts || takes_amax) && threadIdx.x == 0)
        fp8_merge_words(to, takes_amax, shared_words);
}
// Casts a source's outputs, M rows and N columns each, multiples of 16. Sets to.scale's scale and inverse. Merges the
// amax if TAKES_AMAX and `delayed` is not 0. workspace: fp8_cast_workspace_bytes(M, OUTPUTS N), or NULL without dbias.
template <class source>
static void fp8_cast_tiles(struct fp8_cast to, const source &from, int64_t M, int64_t N, void *workspace,
                           struct device *dev) {
    float *partial = (float *)workspace;
    LAUNCH(dev, fp8_tile_kernel<source>, dim3((unsigned)fp8_tiles(N), (unsigned)fp8_tiles(M)), FP8_TILE_THREADS,
           FP8_TILE_SHARED_BYTES(source::OUTPUTS), to, fp8_cast_format(&to), from, M, N, partial);
    if (to.dbias)
        column_sums(to.dbias, partial, fp8_tiles(M), source::OUTPUTS * N, to.add_dbias, dev);
}

enum { FP8_AMAX_THREADS = 256, FP8_AMAX_BLOCKS = 1024 }; // of kernels that take only a maximum: they fill any GPU

#else

// A source of elements: fills tiles (outputs, FP8_TILE, FP8_TILE) with `rows` x `columns` elements of each of its
// outputs, from (row, column) on. The rest of the tiles is 0 already. Outputs stand beside each other in one matrix. It
// is not inlined, because where floatX is float a product would be added to a sum without its rounding.
typedef void fp8_fill_tiles(floatX *tiles, const void *from, int64_t row, int64_t column, int rows, int columns);
enum { FP8_TILE_ELEMENTS = FP8_TILE * FP8_TILE, FP8_MAX_OUTPUTS = 2 };

struct fp8_matrix_source {
    const floatX *x; // (M, N)
    int64_t N;
};
static __attribute__((noinline)) void fp8_fill_from_matrix(floatX *tiles, const void *from, int64_t row, int64_t column,
                                                           int rows, int columns) {
    const struct fp8_matrix_source *source = (const struct fp8_matrix_source *)from;
    for (int r = 0; r < rows; r++)
        memcpy(tiles + r * FP8_TILE, source->x + (row + r) * source->N + column, (size_t)columns * sizeof *tiles);
}

// Says what is cast by tiles: M rows, N columns an output.
struct fp8_tiles_cast {
    struct fp8_cast to;
    enum fp8_format format;
    float scale;
    fp8_fill_tiles *fill;
    const void *from;
    int outputs;
    bool takes_amax; // merges the elements' amax into the scale's
    int64_t M, N;
    float *partial; // (rows of tiles, outputs N): sums of columns
};

// A tile's codes: by rows; and as words of four rows, the first of them in the lowest byte.
struct fp8_tile_codes {
    __attribute__((aligned(64))) fp8 rows[FP8_TILE * FP8_TILE];
    __attribute__((aligned(64))) word words[FP8_TILE / 4 * FP8_TILE];
};
typedef uint8_t vec_bytes __attribute__((vector_size(LANES), may_alias));
typedef uint8_t vec_bytes_anywhere __attribute__((vector_size(LANES), aligned(1), may_alias));

ALWAYS_INLINE vec_words vec_above(vec a, vec b) { return (vec_words)(a > b); }
ALWAYS_INLINE vec_words vec_choose(vec_words mask, vec_words yes, vec_words no) { return (yes & mask) | (no & ~mask); }

// Returns the codes of fp8_encode, one in each word's lowest byte; the other bytes are 0. The magnitude plus 2^23 u is
// rounded to a multiple of u, its unit in the last place or of subnormals: the lowest bits are the number of u.
ALWAYS_INLINE vec_words vec_fp8_encode(vec x, const enum fp8_format format) {
    const struct fp8_precision f = fp8_precision_of(format);
    const int drop = 23 - f.mantissa;
    const vec_words sign = (vec_words)x >> 24 & 0x80u;
    const vec magnitude = (vec)((vec_words)x & 0x7fffffffu),
              absolute = vec_min(magnitude, vec_set(fp8_largest(format)));
    const vec_words power =
        (vec_words)vec_max((vec)((vec_words)absolute & 0x7f800000u), vec_set(format == FP8_E4M3 ? 0x1p-6f : 0x1p-14f));
    const vec_words sum = (vec_words)vec_fma(absolute, (vec)power, vec_set(format == FP8_E4M3 ? 0x1p20f : 0x1p21f));
    const vec_words code =
        sum - power + (power >> drop) - (((uint32_t)drop << 23) + ((uint32_t)(127 + f.least) << f.mantissa));
    return vec_choose((vec_words)(magnitude == magnitude), sign | code, vec_words_set(0x7f));
}

// Encodes a tile (FP8_TILE, FP8_TILE). sums = column sums before the cast; `counting`: counts += saturated and flushed.
ALWAYS_INLINE void fp8_encode_tile_as(const enum fp8_format format, const bool counting, struct fp8_tile_codes *codes,
                                      float sums[FP8_TILE], uint64_t counts[FP8_COUNTS], const floatX *tile,
                                      float scale) {
    const vec above = vec_set(fp8_saturates_above(format)), zero = vec_set(fp8_flushes_to(format));
    vec_words saturated = {0}, not_flushed = {0};
    for (int c = 0; c < FP8_TILE; c += LANES) {
        vec sum = vec_set(0);
        for (int r = 0; r < FP8_TILE; r += 4) {
            vec_words four = {0};
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                const vec x = floatx_load(tile + (r + i) * FP8_TILE + c), scaled = x * scale;
                const vec_words code = vec_fp8_encode(scaled, format);
                sum += x;
                four |= code << 8 * i;
                *(vec_bytes *)(codes->rows + (r + i) * FP8_TILE + c) = __builtin_convertvector(code, vec_bytes);
                if (counting) {
                    const vec size = (vec)((vec_words)scaled & 0x7fffffffu);
                    saturated -= vec_above(size, above);
                    not_flushed -= (vec_words)(x == vec_set(0)) | ~(vec_words)(size <= zero);
                }
            }
            *(vec_words *)(codes->words + r / 4 * FP8_TILE + c) = four;
        }
        float_store(sums + c, sum);
    }
    uint32_t flushed = FP8_TILE_ELEMENTS;
    for (int i = 0; counting && i < LANES; i++) {
        counts[FP8_SATURATED] += saturated[i];
        flushed -= not_flushed[i];
    }
    if (counting)
        counts[FP8_FLUSHED] += flushed;
}
// Encodes as fp8_encode_tile_as does, in any format. counts: (FP8_COUNTS); NULL: not counted.
static void fp8_encode_tile(struct fp8_tile_codes *codes, float sums[FP8_TILE], uint64_t *counts, const floatX *tile,
                            float scale, enum fp8_format format) {
    switch (format) {
    case FP8_E4M3:
        if (counts)
            fp8_encode_tile_as(FP8_E4M3, true, codes, sums, counts, tile, scale);
        else
            fp8_encode_tile_as(FP8_E4M3, false, codes, sums, counts, tile, scale);
        break;
    case FP8_E5M2:
        if (counts)
            fp8_encode_tile_as(FP8_E5M2, true, codes, sums, counts, tile, scale);
        else
            fp8_encode_tile_as(FP8_E5M2, false, codes, sums, counts, tile, scale);
        break;
    }
}

// Writes `rows` codes of the first `columns` columns of fp8_tile_codes' words to a form of M bytes a column, at `to`.
static void fp8_write_columns(fp8 *to, int64_t M, const word *words, int rows, int columns) {
    __attribute__((aligned(64))) word transposed[FP8_TILE * FP8_TILE / 4];
    for (int c = 0; c < columns; c += 16)
        transpose_16x16(transposed + c * FP8_TILE / 4, FP8_TILE / 4, words + c, FP8_TILE);
    for (int c = 0; c < columns; c++)
        memcpy(to + c * M, transposed + c * FP8_TILE / 4, (size_t)rows);
}

// The number of rows or columns of the tile that begins at `from`, of n in all.
static inline int fp8_tile_size(int64_t n, int64_t from) { return n - from < FP8_TILE ? (int)(n - from) : FP8_TILE; }
// Fills the outputs' tiles at (row, column) by `fill`. An output has M rows and N columns; past them tiles are 0.
static void fp8_fill(floatX *tiles, fp8_fill_tiles *fill, const void *from, int outputs, int64_t row, int64_t column,
                     int64_t M, int64_t N) {
    const int rows = fp8_tile_size(M, row), columns = fp8_tile_size(N, column);
    if (rows < FP8_TILE || columns < FP8_TILE)
        memset(tiles, 0, (size_t)outputs * FP8_TILE_ELEMENTS * sizeof *tiles);
    fill(tiles, from, row, column, rows, columns);
}
// Casts the tile at (row, column) of each output, by one thread; adds counts, merges the amax and sets cast->partial.
static void fp8_cast_tile(const struct fp8_tiles_cast *cast, int64_t row, int64_t column) {
    __attribute__((aligned(64))) floatX tiles[FP8_MAX_OUTPUTS * FP8_TILE_ELEMENTS];
    const int rows = fp8_tile_size(cast->M, row), columns = fp8_tile_size(cast->N, column);
    const struct fp8_cast *to = &cast->to;
    const int64_t N = cast->N * cast->outputs;
    uint64_t counts[FP8_COUNTS] = {0, 0};
    fp8_fill(tiles, cast->fill, cast->from, cast->outputs, row, column, cast->M, cast->N);
    if (cast->takes_amax)
        amax_merge(&to->scale->amax, amax_elements(tiles, cast->outputs * FP8_TILE_ELEMENTS));
    for (int o = 0; o < cast->outputs; o++) {
        const int64_t first = o * cast->N + column; // of the tile's columns
        struct fp8_tile_codes codes;
        float sums[FP8_TILE];
        fp8_encode_tile(&codes, sums, to->counts ? counts : NULL, tiles + o * FP8_TILE_ELEMENTS, cast->scale,
                        cast->format);
        for (int r = 0; to->rows.codes && r < rows; r++)
            memcpy(to->rows.codes + (row + r) * N + first, codes.rows + r * FP8_TILE, (size_t)columns);
        if (to->columns.codes)
            fp8_write_columns(to->columns.codes + first * cast->M + row, cast->M, codes.words, rows, columns);
        if (to->dbias)
            memcpy(cast->partial + row / FP8_TILE * N + first, sums, (size_t)columns * sizeof *sums);
    }
    for (int i = 0; to->counts && i < FP8_COUNTS; i++)
        __atomic_fetch_add(&to->counts[i], counts[i], __ATOMIC_RELAXED);
}
// Casts a source's outputs (M, N), multiples of 16, side by side into a matrix by one scale. Sets to.scale's scale and
// inverse and merges the amax if takes_amax. workspace: fp8_cast_workspace_bytes(M, outputs N); NULL without dbias.
static void fp8_cast_tiles(struct fp8_cast to, fp8_fill_tiles *fill, const void *from, int outputs, bool takes_amax,
                           int64_t M, int64_t N, void *workspace, struct device *dev) {
    const enum fp8_format format = fp8_cast_format(&to);
    const struct fp8_tiles_cast cast = {
        to, format, fp8_scale_for(to.scale, format), fill, from, outputs, takes_amax, M, N, (float *)workspace};
    to.scale->scale = cast.scale;
    to.scale->inverse = 1.0f / cast.scale;
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t row = 0; row < M; row += FP8_TILE)
        for (int64_t column = 0; column < N; column += FP8_TILE)
            fp8_cast_tile(&cast, row, column);
    if (to.dbias)
        column_sums(to.dbias, cast.partial, fp8_tiles(M), outputs * N, to.add_dbias, dev);
}

// *amax = the larger of *amax and the largest magnitude of the outputs' elements, M rows, and N columns an output
static void fp8_amax_tiles(uint32_t *amax, fp8_fill_tiles *fill, const void *from, int outputs, int64_t M, int64_t N) {
    uint32_t largest = 0;
#pragma omp parallel for collapse(2) schedule(static) reduction(max : largest)
    for (int64_t row = 0; row < M; row += FP8_TILE)
        for (int64_t column = 0; column < N; column += FP8_TILE) {
            floatX tiles[FP8_MAX_OUTPUTS * FP8_TILE_ELEMENTS];
            fp8_fill(tiles, fill, from, outputs, row, column, M, N);
            largest = amax_larger(largest, amax_elements(tiles, outputs * FP8_TILE_ELEMENTS));
        }
    amax_merge(amax, largest);
}

#endif
