#include "kernels/fp8/cast.cuh"
#include "kernels/fp8/blocks.cuh" // fp8_cast_blocks
#include "kernels/fp8/tiles.cuh"  // fp8_cast_tiles

size_t fp8_cast_workspace_bytes(int64_t M, int64_t N) {
    return (size_t)fp8_tiles(M) * (size_t)N * sizeof(float); // partial sums of dbias, of each row of tiles
}

#ifdef TARGET_CUDA
static void fp8_cast_per_tensor(struct fp8_cast to, const floatX *x, int64_t M, int64_t N, void *workspace,
                                struct device *dev) {
    const struct fp8_matrix_source from = {x, N};
    fp8_cast_tiles(to, from, M, N, workspace, dev);
}

static __global__ void __launch_bounds__(FP8_AMAX_THREADS) fp8_amax_kernel(uint32_t *amax, const floatX *x, int64_t n) {
    const int64_t step = (int64_t)gridDim.x * FP8_AMAX_THREADS * PACK;
    uint32_t largest = 0;
#pragma unroll 4
    for (int64_t at = ((int64_t)blockIdx.x * FP8_AMAX_THREADS + threadIdx.x) * PACK; at < n; at += step)
        largest = amax_with_packed(largest, packed_load_some(x + at, n - at));
    amax_merge_block(amax, largest, shared_memory());
}
void fp8_amax(uint32_t *amax, const floatX *x, int64_t n, struct device *dev) {
    const unsigned blocks = blocks_for(n, FP8_AMAX_THREADS * PACK);
    LAUNCH(dev, fp8_amax_kernel, blocks < FP8_AMAX_BLOCKS ? blocks : (unsigned)FP8_AMAX_BLOCKS, FP8_AMAX_THREADS,
           AMAX_BLOCK_BYTES, amax, x, n);
}

static __global__ void __launch_bounds__(FP8_TILE_THREADS)
    fp8_transpose_kernel(fp8 *columns, const fp8 *rows, int64_t M, int64_t N) {
    const int64_t tile_row = (int64_t)blockIdx.y * FP8_TILE, tile_column = (int64_t)blockIdx.x * FP8_TILE;
    const struct fp8_place at = fp8_thread_place(tile_row, tile_column);
    uint32_t codes[FP8_THREAD_ROWS][2];
#pragma unroll
    for (int r = 0; r < FP8_THREAD_ROWS; r++) {
        uint2 eight = make_uint2(0, 0);
        if (at.row + r < M && at.column < N)
            eight = *(const uint2 *)(rows + (at.row + r) * N + at.column);
        codes[r][0] = eight.x;
        codes[r][1] = eight.y;
    }
    fp8_store_transposed(shared_memory(), codes);
    __syncthreads();
    fp8_write_columns(columns + tile_column * M + tile_row, M, shared_memory(), M - tile_row, N - tile_column);
}
void fp8_transpose(fp8 *columns, const fp8 *rows, int64_t M, int64_t N, struct device *dev) {
    LAUNCH(dev, fp8_transpose_kernel, dim3((unsigned)fp8_tiles(N), (unsigned)fp8_tiles(M)), FP8_TILE_THREADS,
           FP8_TILE_CODES_BYTES, columns, rows, M, N);
}

#else
static void fp8_cast_per_tensor(struct fp8_cast to, const floatX *x, int64_t M, int64_t N, void *workspace,
                                struct device *dev) {
    const struct fp8_matrix_source from = {x, N};
    fp8_cast_tiles(to, fp8_fill_from_matrix, &from, 1, false, M, N, workspace, dev);
}

void fp8_amax(uint32_t *amax, const floatX *x, int64_t n, struct device *dev) {
    uint32_t largest = 0;
#pragma omp parallel for schedule(static) reduction(max : largest)
    for (int64_t begin = 0; begin < n; begin += FP8_TILE_ELEMENTS) {
        const int64_t count = n - begin < FP8_TILE_ELEMENTS ? n - begin : (int64_t)FP8_TILE_ELEMENTS;
        largest = amax_larger(largest, amax_elements(x + begin, count));
    }
    amax_merge(amax, largest);
}

void fp8_transpose(fp8 *columns, const fp8 *rows, int64_t M, int64_t N, struct device *dev) {
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t row = 0; row < M; row += FP8_TILE)
        for (int64_t column = 0; column < N; column += FP8_TILE)
            for (int64_t c = column; c < column + fp8_tile_size(N, column); c++)
                for (int64_t r = row; r < row + fp8_tile_size(M, row); r++)
                    columns[c * M + r] = rows[r * N + c];
}

#endif

void fp8_cast(struct fp8_cast to, const floatX *x, int64_t M, int64_t N, void *workspace, struct device *dev) {
    switch (to.rows.codes ? to.rows.granularity : to.columns.granularity) {
    case FP8_PER_TENSOR: fp8_cast_per_tensor(to, x, M, N, workspace, dev); break;
    case FP8_1X128:
    case FP8_128X128: fp8_cast_blocks(to, x, M, N, workspace, dev); break;
    }
}
