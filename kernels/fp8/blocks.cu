#include "kernels/fp8/blocks.cuh"
#include "kernels/amax.cuh"        // amax_larger, amax_with
#include "kernels/column_sums.cuh" // column_sums
#include "kernels/packed.cuh"      // packed_load
#include "kernels/ptx.cuh"         // pack_fp8x4, shared memory

size_t fp8_cast_blocks_workspace_bytes(int64_t M, int64_t N) {
    return (size_t)(M / FP8_BLOCK) * (size_t)N * sizeof(float); // partial sums of dbias, of each row of tiles
}

#ifdef TARGET_CUDA

// Bound by memory: a block of threads takes a tile of 128 x 128 elements, a thread 8 rows of 8 columns; a half warp
// reads rows of 256 bytes and writes rows of 128. Codes of the column form pass through shared memory.
enum { FP8_BLOCKS_THREADS = 256, FP8_BLOCKS_WARPS = FP8_BLOCKS_THREADS / 32, FP8_BLOCKS_EACH = 8 };
enum { FP8_BLOCKS_RESIDENT = sizeof(floatX) == 2 ? 3 : 2 }; // blocks a multiprocessor: 96 KB of bf16 loads in flight
enum { FP8_BLOCKS_LANES = FP8_BLOCK / FP8_BLOCKS_EACH };    // lanes that share a row of the tile

// Offsets in shared memory, in bytes: the transposed codes; of each warp the columns' maxima, then of each their sums;
// the columns' scales; of each warp a number of flushed values.
enum {
    FP8_BLOCKS_AMAXES = FP8_BLOCK * FP8_BLOCK,
    FP8_BLOCKS_SUMS = FP8_BLOCKS_AMAXES + FP8_BLOCKS_WARPS * FP8_BLOCK * 4,
    FP8_BLOCKS_SCALES = FP8_BLOCKS_SUMS + FP8_BLOCKS_WARPS * FP8_BLOCK * 4,
    FP8_BLOCKS_COUNTS = FP8_BLOCKS_SCALES + FP8_BLOCK * 4,
    FP8_BLOCKS_SHARED_BYTES = FP8_BLOCKS_COUNTS + FP8_BLOCKS_WARPS * 4
};

struct fp8_blocks_row {
    floatX x[FP8_BLOCKS_EACH];
};
#define EACH_FP8(i) _Pragma("unroll") for (int i = 0; i < FP8_BLOCKS_EACH; i++)

// Loads this thread's eight rows of eight elements, from x on, aligned to 16 bytes, of a matrix of N columns.
DEVICE_FUNCTION void fp8_blocks_load(struct fp8_blocks_row rows[FP8_BLOCKS_EACH], const floatX *x, int64_t N) {
    EACH_FP8(r) {
#pragma unroll
        for (int i = 0; i < FP8_BLOCKS_EACH; i += PACK) {
            const struct packed pack = packed_load(x + r * N + i);
            memcpy(&rows[r].x[i], &pack, sizeof pack);
        }
    }
}
// Makes the compiler convert elements again later, as kept floats take twice the registers. No element changes.
DEVICE_FUNCTION void fp8_blocks_forget_floats(struct fp8_blocks_row *row) {
    int words[sizeof *row / sizeof(int)];
    memcpy(words, row, sizeof words);
#pragma unroll
    for (int i = 0; i < (int)(sizeof words / sizeof *words); i++)
        words[i] = hide_value(words[i]);
    memcpy(row, words, sizeof words);
}
// Returns the maximum over each `lanes` neighboring lanes, in all of them. All lanes of the warp call.
DEVICE_FUNCTION uint32_t fp8_blocks_lanes_max(uint32_t x, int lanes) {
    for (int offset = lanes / 2; offset > 0; offset /= 2)
        x = amax_larger(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}
// Returns the bits of the largest magnitude of one row's eight elements.
DEVICE_FUNCTION uint32_t fp8_blocks_row_amax(const struct fp8_blocks_row &row) {
    uint32_t amax = 0;
    EACH_FP8(i) amax = amax_with(amax, row.x[i]);
    return amax;
}

// Returns the index of the word of column 8 `group` + i in a warp's line. Four columns of every group come before the
// other four, so that neither 16-byte accesses of groups side by side nor words in this order meet a bank twice.
DEVICE_FUNCTION int fp8_blocks_word(int group, int i) { return i / 4 * (FP8_BLOCK / 2) + group * 4 + i % 4; }
// Returns the column of the tile whose word fp8_blocks_word puts at `word`.
DEVICE_FUNCTION int fp8_blocks_column(int word) { return word / 4 % 16 * 8 + word / (FP8_BLOCK / 2) * 4 + word % 4; }
// Stores x, the columns of group lane % 16, in the warp's line of `to` (warps, 128). Lanes l and l + 16 have equal x.
DEVICE_FUNCTION void fp8_blocks_store_column_words(uint32_t to, const float x[FP8_BLOCKS_EACH]) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const bool upper = lane >= FP8_BLOCKS_LANES;
    struct float_x4 four;
#pragma unroll
    for (int i = 0; i < 4; i++)
        four.x[i] = upper ? x[4 + i] : x[i];
    store_shared_floats(to + (uint32_t)(warp * FP8_BLOCK + fp8_blocks_word(lane % FP8_BLOCKS_LANES, upper ? 4 : 0)) * 4,
                        four);
}
// Stores in shared memory, from FP8_BLOCKS_SUMS on, the column sums of the warp's 16 rows. All lanes call; no barrier.
DEVICE_FUNCTION void fp8_blocks_share_sums(uint32_t shared, const struct fp8_blocks_row rows[FP8_BLOCKS_EACH]) {
    float sums[FP8_BLOCKS_EACH];
    EACH_FP8(i) {
        sums[i] = 0;
        EACH_FP8(r) sums[i] += to_float(rows[r].x[i]);
        sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], FP8_BLOCKS_LANES);
    }
    fp8_blocks_store_column_words(shared + FP8_BLOCKS_SUMS, sums);
}
// Stores in shared memory, from FP8_BLOCKS_AMAXES on, the columns' amaxes over the warp's 16 rows. All lanes call.
DEVICE_FUNCTION void fp8_blocks_share_amaxes(uint32_t shared, const struct fp8_blocks_row rows[FP8_BLOCKS_EACH]) {
    float amaxes[FP8_BLOCKS_EACH];
    EACH_FP8(i) {
        uint32_t amax = 0;
        EACH_FP8(r) amax = amax_with(amax, rows[r].x[i]);
        amax = amax_larger(amax, __shfl_xor_sync(0xffffffffu, amax, FP8_BLOCKS_LANES));
        memcpy(&amaxes[i], &amax, sizeof amax);
    }
    fp8_blocks_store_column_words(shared + FP8_BLOCKS_AMAXES, amaxes);
}
// Returns the sum of column fp8_blocks_column(threadIdx.x) over the warps. Threads below 128 call, after a barrier.
DEVICE_FUNCTION float fp8_blocks_column_sum(uint32_t shared) {
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < FP8_BLOCKS_WARPS; warp++)
        sum += load_shared_float(shared + FP8_BLOCKS_SUMS + (warp * FP8_BLOCK + threadIdx.x) * 4);
    return sum;
}
// Returns the bits of column fp8_blocks_column(threadIdx.x)'s amax. Threads below 128 call, after a barrier.
DEVICE_FUNCTION uint32_t fp8_blocks_column_amax(uint32_t shared) {
    uint32_t amax = 0;
#pragma unroll
    for (int warp = 0; warp < FP8_BLOCKS_WARPS; warp++)
        amax = amax_larger(amax, load_shared_word(shared + FP8_BLOCKS_AMAXES + (warp * FP8_BLOCK + threadIdx.x) * 4));
    return amax;
}
// Returns the bits of the tile's largest magnitude; overwrites words from FP8_BLOCKS_AMAXES on. All threads call.
DEVICE_FUNCTION uint32_t fp8_blocks_tile_amax(uint32_t shared, const struct fp8_blocks_row rows[FP8_BLOCKS_EACH]) {
    uint32_t amax = 0;
    EACH_FP8(r) amax = amax_larger(amax, fp8_blocks_row_amax(rows[r]));
    amax = fp8_blocks_lanes_max(amax, 32);
    if (threadIdx.x % 32 == 0)
        store_shared_word(shared + FP8_BLOCKS_AMAXES + threadIdx.x / 32 * 4, amax);
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < FP8_BLOCKS_WARPS; warp++)
        amax = amax_larger(amax, load_shared_word(shared + FP8_BLOCKS_AMAXES + (uint32_t)warp * 4));
    return amax;
}

// Returns eight elements' codes, the first in the lowest byte. Where `counted`, adds to *flushed how many were flushed.
template <enum fp8_format FORMAT>
DEVICE_FUNCTION uint2 fp8_blocks_encode(int *flushed, const struct fp8_blocks_row &from, float scale, bool counted) {
    float scaled[FP8_BLOCKS_EACH];
    EACH_FP8(i) scaled[i] = to_float(from.x[i]) * scale;
    const uint32_t low = pack_fp8x4(scaled, FORMAT), high = pack_fp8x4(scaled + 4, FORMAT);
    if (counted)
        EACH_FP8(i) *flushed += fp8_is_flushed(to_float(from.x[i]), (i < 4 ? low : high) >> i % 4 * 8) ? 1 : 0;
    return make_uint2(low, high);
}
DEVICE_FUNCTION void fp8_blocks_write_row(fp8 *to, uint2 codes) { // `to` is aligned to 8 bytes
#ifdef CUDA_EMULATED
    emu_touch_global(to, sizeof codes, true);
#endif
    *(uint2 *)to = codes;
}
// Returns the offset in the tile's codes of rows 8 `rows` to 8 `rows` + 7 of a column. Lanes of a half warp write one
// `rows` of columns that are 8 apart, and later read along columns: neither meets a bank twice.
DEVICE_FUNCTION uint32_t fp8_blocks_codes_offset(int column, int rows) {
    return (uint32_t)(column * FP8_BLOCK + (rows ^ column / FP8_BLOCKS_EACH) * FP8_BLOCKS_EACH);
}
// Stores in shared memory the codes of this thread's eight rows, from 8 (threadIdx.x / 16) on, of a column of the tile.
DEVICE_FUNCTION void fp8_blocks_store_column(uint32_t shared, int column, uint2 codes) {
    const int rows = (int)threadIdx.x / FP8_BLOCKS_LANES;
    store_shared_long(shared + fp8_blocks_codes_offset(column, rows), (uint64_t)codes.y << 32 | codes.x);
}
// Writes the tile's columns from shared memory to a form of M bytes a column. All threads call, after a barrier.
DEVICE_FUNCTION void fp8_blocks_write_columns(fp8 *to, int64_t M, uint32_t shared) {
#pragma unroll
    for (int i = 0; i < FP8_BLOCK * FP8_BLOCK / 16 / FP8_BLOCKS_THREADS; i++) {
        const int at = i * FP8_BLOCKS_THREADS + (int)threadIdx.x, column = at / 8, pair = at % 8;
        const bool swapped = column / FP8_BLOCKS_EACH % 2 != 0; // the two runs of 8 rows are in the other order
        const struct word_x4 w =
            load_shared_words(shared + fp8_blocks_codes_offset(column, 2 * pair + (swapped ? 1 : 0)));
        fp8 *run = to + column * M + pair * 16;
        packed_check(run, true);
        *(uint4 *)run =
            swapped ? make_uint4(w.x[2], w.x[3], w.x[0], w.x[1]) : make_uint4(w.x[0], w.x[1], w.x[2], w.x[3]);
    }
}

// Adds the number of flushed values, as each thread counted it, to counts[FP8_FLUSHED]. All threads of the block call.
DEVICE_FUNCTION void fp8_blocks_count(uint64_t *counts, uint32_t shared, int flushed) {
    for (int offset = 16; offset > 0; offset /= 2)
        flushed += __shfl_xor_sync(0xffffffffu, flushed, offset);
    if (threadIdx.x % 32 == 0)
        store_shared_word(shared + FP8_BLOCKS_COUNTS + threadIdx.x / 32 * 4, (uint32_t)flushed);
    __syncthreads();
    if (threadIdx.x > 0)
        return;
    uint32_t total = 0;
    for (int warp = 0; warp < FP8_BLOCKS_WARPS; warp++)
        total += load_shared_word(shared + FP8_BLOCKS_COUNTS + (uint32_t)warp * 4);
    if (total > 0)
        atomicAdd((unsigned long long *)&counts[FP8_FLUSHED], (unsigned long long)total);
}

// Casts one tile per block. Writes the column sums over each row of tiles to partial (M / 128, N), unless NULL.
template <enum fp8_format FORMAT, enum fp8_granularity SCALING>
static __global__ void __launch_bounds__(FP8_BLOCKS_THREADS, FP8_BLOCKS_RESIDENT)
    fp8_blocks_kernel(struct fp8_cast to, float *partial, const floatX *x, int64_t M, int64_t N) {
    const uint32_t shared = shared_memory();
    const int64_t m = (int64_t)blockIdx.y * FP8_BLOCK, n = (int64_t)blockIdx.x * FP8_BLOCK;
    const int group = (int)threadIdx.x % FP8_BLOCKS_LANES, rows = (int)threadIdx.x / FP8_BLOCKS_LANES;
    const int64_t row = m + rows * FP8_BLOCKS_EACH, column = n + group * FP8_BLOCKS_EACH;
    struct fp8_blocks_row mine[FP8_BLOCKS_EACH];
    int flushed = 0;
    float tile_scale = 0;
    fp8_blocks_load(mine, x + row * N + column, N);
    if (partial != NULL)
        fp8_blocks_share_sums(shared, mine);
    if (SCALING == FP8_1X128)
        fp8_blocks_share_amaxes(shared, mine);
    else {
        tile_scale = fp8_block_scale(fp8_blocks_tile_amax(shared, mine), FORMAT);
        if (threadIdx.x == 0) {
            if (to.rows.codes != NULL)
                fp8_tile_inverse(&to.rows, fp8_block_inverse(tile_scale), m, n, M, N);
            if (to.columns.codes != NULL)
                fp8_tile_inverse(&to.columns, fp8_block_inverse(tile_scale), n, m, N, M);
        }
    }
    EACH_FP8(r) fp8_blocks_forget_floats(&mine[r]);
    if (to.rows.codes != NULL)
        EACH_FP8(r) {
            float scale = tile_scale;
            if (SCALING == FP8_1X128) {
                scale = fp8_block_scale(fp8_blocks_lanes_max(fp8_blocks_row_amax(mine[r]), FP8_BLOCKS_LANES), FORMAT);
                if (group == 0)
                    to.rows.inverse[n / FP8_BLOCK * fp8_inverse_pitch(FP8_1X128, M, N) + row + r] =
                        fp8_block_inverse(scale);
            }
            const uint2 codes = fp8_blocks_encode<FORMAT>(&flushed, mine[r], scale, to.counts != NULL);
            fp8_blocks_write_row(to.rows.codes + (row + r) * N + column, codes);
        }
    EACH_FP8(r) fp8_blocks_forget_floats(&mine[r]);
    __syncthreads();
    if (threadIdx.x < FP8_BLOCK) {
        const int word_column = fp8_blocks_column((int)threadIdx.x);
        if (partial != NULL)
            partial[m / FP8_BLOCK * N + n + word_column] = fp8_blocks_column_sum(shared);
        if (SCALING == FP8_1X128 && to.columns.codes != NULL) {
            const float scale = fp8_block_scale(fp8_blocks_column_amax(shared), FORMAT);
            to.columns.inverse[m / FP8_BLOCK * fp8_inverse_pitch(FP8_1X128, N, M) + n + word_column] =
                fp8_block_inverse(scale);
            store_shared_float(shared + FP8_BLOCKS_SCALES + threadIdx.x * 4, scale);
        }
    }
    if (to.columns.codes != NULL) {
        float scales[FP8_BLOCKS_EACH];
        const bool counted = to.counts != NULL && to.rows.codes == NULL;
        EACH_FP8(i) scales[i] = tile_scale;
        if (SCALING == FP8_1X128) {
            __syncthreads();
#pragma unroll
            for (int i = 0; i < FP8_BLOCKS_EACH; i += 4) {
                const uint32_t at = (uint32_t)fp8_blocks_word(group, i) * 4;
                const struct float_x4 four = load_shared_floats(shared + FP8_BLOCKS_SCALES + at);
                memcpy(&scales[i], &four, sizeof four);
            }
        }
        EACH_FP8(i) {
            struct fp8_blocks_row down;
            EACH_FP8(r) down.x[r] = mine[r].x[i];
            const uint2 codes = fp8_blocks_encode<FORMAT>(&flushed, down, scales[i], counted);
            fp8_blocks_store_column(shared, group * FP8_BLOCKS_EACH + i, codes);
        }
        __syncthreads();
        fp8_blocks_write_columns(to.columns.codes + n * M + m, M, shared);
    }
    if (to.counts != NULL)
        fp8_blocks_count(to.counts, shared, flushed);
}

template <enum fp8_format FORMAT, enum fp8_granularity SCALING>
static void fp8_blocks_launch(struct fp8_cast to, const floatX *x, int64_t M, int64_t N, void *workspace,
                              struct device *dev) {
    float *partial = to.dbias != NULL ? (float *)workspace : NULL;
    const dim3 tiles((unsigned)(N / FP8_BLOCK), (unsigned)(M / FP8_BLOCK)); // M up to 128 x 65535
    LAUNCH(dev, (fp8_blocks_kernel<FORMAT, SCALING>), tiles, FP8_BLOCKS_THREADS, FP8_BLOCKS_SHARED_BYTES, to, partial,
           x, M, N);
    if (to.dbias != NULL)
        column_sums(to.dbias, partial, M / FP8_BLOCK, N, to.add_dbias, dev);
}
void fp8_cast_blocks(struct fp8_cast to, const floatX *x, int64_t M, int64_t N, void *workspace, struct device *dev) {
    const struct fp8_matrix *form = to.rows.codes != NULL ? &to.rows : &to.columns;
    const bool tiles = form->granularity == FP8_128X128;
    switch (form->format) {
    case FP8_E4M3:
        if (tiles)
            fp8_blocks_launch<FP8_E4M3, FP8_128X128>(to, x, M, N, workspace, dev);
        else
            fp8_blocks_launch<FP8_E4M3, FP8_1X128>(to, x, M, N, workspace, dev);
        return;
    case FP8_E5M2:
        if (tiles)
            fp8_blocks_launch<FP8_E5M2, FP8_128X128>(to, x, M, N, workspace, dev);
        else
            fp8_blocks_launch<FP8_E5M2, FP8_1X128>(to, x, M, N, workspace, dev);
        return;
    }
}

#else

struct fp8_tile {
    float x[FP8_BLOCK][FP8_BLOCK];
    float row_scales[FP8_BLOCK], column_scales[FP8_BLOCK];
    fp8 codes[FP8_BLOCK][FP8_BLOCK]; // of the column form, before they are transposed
};

// Encodes FP8_BLOCK elements, each by its scale; returns how many were flushed. The compiler vectorizes the loops.
static inline int fp8_encode_run(fp8 *to, const float *x, const float *scales, enum fp8_format format) {
    int flushed = 0;
    switch (format) {
    case FP8_E4M3:
        for (int i = 0; i < FP8_BLOCK; i++)
            to[i] = fp8_encode(x[i] * scales[i], FP8_E4M3);
        break;
    case FP8_E5M2:
        for (int i = 0; i < FP8_BLOCK; i++)
            to[i] = fp8_encode(x[i] * scales[i], FP8_E5M2);
        break;
    }
    for (int i = 0; i < FP8_BLOCK; i++)
        flushed += fp8_is_flushed(x[i], to[i]) ? 1 : 0;
    return flushed;
}

// Loads the tile at x, in rows of N, and sets its rows' and columns' scales. sums (128) = its column sums, unless NULL.
static void fp8_tile_load(struct fp8_tile *tile, float *sums, const floatX *x, int64_t N,
                          enum fp8_granularity granularity, enum fp8_format format) {
    uint32_t columns[FP8_BLOCK] = {0}, whole = 0;
    if (sums != NULL)
        memset(sums, 0, FP8_BLOCK * sizeof *sums);
    for (int r = 0; r < FP8_BLOCK; r++) {
        float *row = tile->x[r];
        uint32_t amax = 0;
        for (int c = 0; c < FP8_BLOCK; c++)
            row[c] = to_float(x[r * N + c]);
#pragma omp simd reduction(max : amax)
        for (int c = 0; c < FP8_BLOCK; c++) {
            const uint32_t magnitude = fp8_magnitude(row[c]);
            amax = magnitude > amax ? magnitude : amax;
            columns[c] = magnitude > columns[c] ? magnitude : columns[c];
        }
        for (int c = 0; c < FP8_BLOCK && sums != NULL; c++)
            sums[c] += row[c];
        tile->row_scales[r] = fp8_block_scale(amax, format);
        whole = amax > whole ? amax : whole;
    }
    for (int i = 0; i < FP8_BLOCK; i++) {
        if (granularity == FP8_128X128)
            tile->row_scales[i] = fp8_block_scale(whole, format);
        tile->column_scales[i] = fp8_block_scale(granularity == FP8_128X128 ? whole : columns[i], format);
    }
}
// Stores the inverses of a tile's scales (128) in the form (rows, depth) that has the tile at (row, depth_at); for
// FP8_128X128 only the inverse of scales[0]. rows and depth are multiples of 128.
static void fp8_tile_inverses(const struct fp8_matrix *form, const float *scales, int64_t row, int64_t depth_at,
                              int64_t rows, int64_t depth) {
    if (form->granularity == FP8_128X128) {
        fp8_tile_inverse(form, fp8_block_inverse(scales[0]), row, depth_at, rows, depth);
        return;
    }
    float *to = form->inverse + depth_at / FP8_BLOCK * fp8_inverse_pitch(FP8_1X128, rows, depth) + row;
    for (int i = 0; i < FP8_BLOCK; i++)
        to[i] = fp8_block_inverse(scales[i]);
}
// Writes the codes and inverses of a tile at (m, n) of x (M, N) to the row form; returns how many values were flushed.
static int fp8_tile_rows(const struct fp8_matrix *form, const struct fp8_tile *tile, int64_t m, int64_t n, int64_t M,
                         int64_t N) {
    int flushed = 0;
    for (int r = 0; r < FP8_BLOCK; r++) {
        float scales[FP8_BLOCK];
        for (int c = 0; c < FP8_BLOCK; c++)
            scales[c] = tile->row_scales[r];
        flushed += fp8_encode_run(form->codes + (m + r) * N + n, tile->x[r], scales, form->format);
    }
    fp8_tile_inverses(form, tile->row_scales, m, n, M, N);
    return flushed;
}
// Writes a tile's codes and inverses, at (m, n) of x (M, N), to the column form; returns how many values were flushed.
static int fp8_tile_columns(const struct fp8_matrix *form, struct fp8_tile *tile, int64_t m, int64_t n, int64_t M,
                            int64_t N) {
    int flushed = 0;
    for (int r = 0; r < FP8_BLOCK; r++)
        flushed += fp8_encode_run(tile->codes[r], tile->x[r], tile->column_scales, form->format);
    for (int c = 0; c < FP8_BLOCK; c++)
        for (int r = 0; r < FP8_BLOCK; r++)
            form->codes[(n + c) * M + m + r] = tile->codes[r][c];
    fp8_tile_inverses(form, tile->column_scales, n, m, N, M);
    return flushed;
}

void fp8_cast_blocks(struct fp8_cast to, const floatX *x, int64_t M, int64_t N, void *workspace, struct device *dev) {
    const struct fp8_matrix *form = to.rows.codes != NULL ? &to.rows : &to.columns;
    float *partial = to.dbias != NULL ? (float *)workspace : NULL; // (M / 128, N)
    const int64_t across = N / FP8_BLOCK, tiles = M / FP8_BLOCK * across;
    int64_t flushed = 0;
#pragma omp parallel for schedule(static) reduction(+ : flushed)
    for (int64_t i = 0; i < tiles; i++) {
        const int64_t m = i / across * FP8_BLOCK, n = i % across * FP8_BLOCK;
        struct fp8_tile tile;
        int in_rows = 0, in_columns = 0;
        fp8_tile_load(&tile, partial != NULL ? partial + i / across * N + n : NULL, x + m * N + n, N, form->granularity,
                      form->format);
        if (to.rows.codes != NULL)
            in_rows = fp8_tile_rows(&to.rows, &tile, m, n, M, N);
        if (to.columns.codes != NULL)
            in_columns = fp8_tile_columns(&to.columns, &tile, m, n, M, N);
        flushed += to.rows.codes != NULL ? in_rows : in_columns;
    }
    if (to.counts != NULL)
        to.counts[FP8_FLUSHED] += (uint64_t)flushed;
    if (to.dbias != NULL)
        column_sums(to.dbias, partial, M / FP8_BLOCK, N, to.add_dbias, dev);
}

#endif
