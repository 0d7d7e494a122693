// Tests what kernels/ptx_sm90.cuh relies on, one thing a test, against plain loops: wgmma's layouts, TMA's boxes,
// mbarriers, bulk copies, setmaxnreg, the order in which blocks start. On a GPU this is the first program to run, on
// plain device memory. On the emulator the same source tests its models.
//
//   unit_sm90          every test, each in a process of its own: an error or a hang in one test spoils no other
//   unit_sm90 NAME     only that test, in this process
//
// Exit status: 0 if all passed, 77 where there is no GPU of compute capability 9.0.
#ifndef DEVICE_WAIT_LIMIT
#define DEVICE_WAIT_LIMIT 2 // seconds
#endif
#include "kernels/attention/sm90_backward_plan.cuh" // sm90_operand, sm90_backward_plan
#include "kernels/attention/sm90_forward_plan.cuh"  // sm90_forward_plan
#include "kernels/device_memory.cuh"                // device_allocate, device_upload, device_download
#include "kernels/device_queue.cuh"                 // device_open
#include "kernels/ptx_sm90.cuh"                     // wgmma, TMA, mbarriers
#include "kernels/tensor_map.cuh"                   // tensor_map_of
#include "test/apart.h"                             // run_apart
#include "test/testing.h"                           // cmocka

enum { UNIT_SECONDS = 30, NO_GPU_STATUS = 77, SMALL_SHARED = 32768, MAX_SHARED = 227 * 1024 };
static struct device device;

// Kernels do nothing where they are built for another architecture than sm_90a.
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
enum { HAS_SM90A = 0 };
#else
enum { HAS_SM90A = 1 };
#endif

static void *uploaded(const void *host, size_t bytes) {
    void *memory = device_allocate(bytes);
    device_upload(memory, host, bytes, &device);
    device_synchronize(&device); // so that the caller may change the host's memory
    return memory;
}
static void *filled(int byte, size_t bytes) {
    void *memory = device_allocate(bytes);
    cuda_check(cudaMemsetAsync(memory, byte, bytes, device.stream));
    return memory;
}
template <class Kernel> static void allow_shared(Kernel *kernel, int bytes) {
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}
static int multiprocessors(void) {
    struct cudaDeviceProp properties;
    cuda_check(cudaGetDeviceProperties(&properties, 0));
    return properties.multiProcessorCount;
}

// Returns one of a few multiples of 1/8: sums of their products are exact in any order, and with fewer digits than fp32
// has.
HOST_DEVICE float element(int i) { return (float)(i * 37 % 61 - 30) / 8; }

// --- One wgmma, whose operands have the PTX ISA's canonical layouts
// -----------------------------------------------------

// Where an operand lies: atoms of 8 rows (MN-major: of 8 ks), each `span` bytes wide and swizzled by itself.
struct layout {
    int swizzle; // as in a descriptor: 0 none, 1: 128 bytes, 2: 64, 3: 32
    bool transposed;
    uint32_t leading, stride;
};
HOST_DEVICE uint32_t element_offset(struct layout layout, int row, int k) {
    if (layout.swizzle == 0) {
        const int within = layout.transposed ? k % 8 * 16 + row % 8 * 2 : row % 8 * 16 + k % 8 * 2;
        return (uint32_t)(row / 8) * layout.stride + (uint32_t)(k / 8) * layout.leading + (uint32_t)within;
    }
    const int span = 256 >> layout.swizzle, line = layout.transposed ? k : row, along = layout.transposed ? row : k;
    const int atom_line = line % 8, atom_byte = 2 * along % span;
    const int lines_apart = line / 8, spans_apart = 2 * along / span;
    const int mask = span / 16 - 1; // the XOR counts lines of 128 bytes
    const int piece = atom_byte / 16 ^ (atom_line * span / 128 & mask);
    return (uint32_t)lines_apart * layout.stride + (uint32_t)spans_apart * layout.leading +
           (uint32_t)(atom_line * span + piece * 16 + atom_byte % 16);
}

template <int N, bool TA, bool TB, bool REGISTERS>
static __global__ void __launch_bounds__(128, 1) wgmma_kernel(float *out, struct layout la, struct layout lb) {
    if (!HAS_SM90A)
        return;
    const uint32_t a = shared_memory(), b = a + 32768;
    const int thread = (int)threadIdx.x, g = thread % 32 / 4, t = thread % 4, warp = thread / 32;
    if (thread == 0) { // a word is a pair along the contiguous dimension
        for (int row = 0; row < 64; row += TA ? 2 : 1)
            for (int k = 0; k < 16; k += TA ? 1 : 2)
                store_shared_word(a + element_offset(la, row, k),
                                  pack_bf16x2(element(row * 16 + k), element(row * 16 + k + (TA ? 16 : 1))));
        for (int row = 0; row < N; row += TB ? 2 : 1)
            for (int k = 0; k < 16; k += TB ? 1 : 2)
                store_shared_word(b + element_offset(lb, row, k),
                                  pack_bf16x2(element(row * 7 + k * 5), element(row * 7 + k * 5 + (TB ? 7 : 5))));
        async_proxy_fence();
    }
    __syncthreads();
    float acc[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        acc[i] = element(thread + i);
    uint32_t left[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = 16 * warp + g + i % 2 * 8, k = 2 * t + i / 2 * 8;
        left[i] = pack_bf16x2(element(row * 16 + k), element(row * 16 + k + 1));
    }
    const uint64_t da = matrix_descriptor(a, la.leading, la.stride, la.swizzle),
                   db = matrix_descriptor(b, lb.leading, lb.stride, lb.swizzle);
    wgmma_fence();
    if (REGISTERS)
        wgmma_registers<N, TB>(acc, left, db, true);
    else
        wgmma_shared<N, TA, TB>(acc, da, db, true);
    wgmma_shared<N, TA, TB>(acc, da, db, true);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold<N / 2>(acc);
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        out[(16 * warp + g + 8 * (i / 2 % 2)) * N + 8 * (i / 4) + 2 * t + i % 2] = acc[i];
}
static struct layout layout_of(int swizzle, bool transposed, int rows) {
    const uint32_t span = 256u >> swizzle;
    if (swizzle == 0) {
        const struct layout none = {0, transposed, transposed ? (uint32_t)rows * 16 : 128, transposed ? 128u : 256u};
        return none;
    }
    const struct layout result = {swizzle, transposed, transposed ? 16 * span : 0, 8 * span};
    return result;
}
template <int N, bool TA, bool TB, bool REGISTERS> static void check_wgmma(int swizzle_a, int swizzle_b) {
    static float out[64 * N];
    auto *kernel = wgmma_kernel<N, TA, TB, REGISTERS>;
    float *memory = (float *)filled(0xff, sizeof out);
    allow_shared(kernel, 65536);
    LAUNCH(&device, kernel, 1, 128, 65536, memory, layout_of(swizzle_a, TA, 64), layout_of(swizzle_b, TB, N));
    device_download(out, memory, sizeof out, &device);
    device_free(memory, sizeof out);
    for (int row = 0; row < 64; row++)
        for (int column = 0; column < N; column++) {
            // The accumulators' lane map: the thread and index that hold (row, column).
            const int thread = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
            const int i = column / 8 * 4 + row % 16 / 8 * 2 + column % 2;
            double expected = element(thread + i);
            for (int k = 0; k < 16; k++)
                expected += 2.0 * element(row * 16 + k) * element(column * 7 + k * 5);
            if (out[row * N + column] != expected)
                fail_msg("N %d, swizzles %d and %d, transposed %d %d, A first from %s: (%d, %d) is %g, expected %g", N,
                         swizzle_a, swizzle_b, TA, TB, REGISTERS ? "registers" : "shared memory", row, column,
                         out[row * N + column], expected);
        }
}
// Checks products with A from registers and with A from shared memory. Swizzles as in struct layout.
template <int N, bool TA, bool TB> static void check_both(int swizzle_a, int swizzle_b) {
    check_wgmma<N, TA, TB, true>(swizzle_a, swizzle_b);
    check_wgmma<N, TA, TB, false>(swizzle_a, swizzle_b);
}
template <int N, bool TA, bool TB, int SWIZZLE_A, int SWIZZLE_B> static void wgmma(void) {
    check_both<N, TA, TB>(SWIZZLE_A, SWIZZLE_B);
}
template <bool TA, bool TB> static void wgmma_n64(void) {
    for (int a = 0; a < 4; a++)
        for (int b = 0; b < 4; b++)
            check_both<64, TA, TB>(a, b);
}

// --- The products of attention: tiles that TMA loads, operands as attention's plans have them
// ----------------------------

// Where an operand begins in a tile that TMA loaded. The product is acc (64 x N) = left . right over DEPTH, by wgmma.
struct operand_at {
    int row, column; // of the tile
};
template <class tile> DEVICE_FUNCTION uint32_t operand_offset(struct operand_at at) {
    return (uint32_t)(at.row * tile::SPAN + 2 * at.column / tile::SPAN * tile::CHUNK_BYTES);
}
template <class tile, int COLUMNS>
DEVICE_FUNCTION void load_whole_tile(uint32_t to, const struct tensor_map *map, uint32_t barrier) {
    for (int c = 0; c < COLUMNS; c += tile::SPAN / 2)
        tma_load_4d(to + (uint32_t)(2 * c / tile::SPAN * tile::CHUNK_BYTES), map, barrier, c, 0, 0, 0);
}
struct product_arguments {
    struct tensor_map left, right;
    const bf16 *fragments; // (64, DEPTH) A's values, for registers
    float *out;            // (64, N)
    struct operand_at left_at, right_at;
};
template <class product>
static __global__ void __launch_bounds__(128, 1) product_kernel(const __grid_constant__ struct product_arguments a) {
    if (!HAS_SM90A)
        return;
    typedef typename product::left left;
    typedef typename product::right right;
    constexpr int N = product::N;
    const uint32_t barrier = shared_memory(), left_tile = barrier + 1024, right_tile = left_tile + product::LEFT_BYTES;
    const int thread = (int)threadIdx.x, row = sm90_row(), column = sm90_column();
    if (thread == 0) {
        mbarrier_init(barrier, 1);
        mbarrier_init_fence();
        mbarrier_arrive_expect(barrier, product::LEFT_BYTES + product::RIGHT_BYTES);
        load_whole_tile<left, product::LEFT_COLUMNS>(left_tile, &a.left, barrier);
        load_whole_tile<right, product::RIGHT_COLUMNS>(right_tile, &a.right, barrier);
    }
    __syncthreads();
    mbarrier_wait(barrier, 0);
    const uint32_t from_left = left_tile + operand_offset<left>(a.left_at);
    const uint32_t from_right = right_tile + operand_offset<right>(a.right_at);
    const uint64_t dl = product::TRANSPOSED_LEFT ? left::along_columns(from_left) : left::along_rows(from_left);
    const uint64_t dr = product::TRANSPOSED_RIGHT ? right::along_columns(from_right) : right::along_rows(from_right);
    float acc[N / 2];
    struct word_x4 words[product::DEPTH / 16];
#pragma unroll
    for (int k = 0; k < product::DEPTH / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bf16 *pair = a.fragments + (row + i % 2 * 8) * product::DEPTH + 16 * k + column + i / 2 * 8;
            words[k].x[i] = pack_bf16x2(bf16_to_float(pair[0]), bf16_to_float(pair[1]));
        }
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < product::DEPTH / 16; k++) {
        const uint64_t r = product::TRANSPOSED_RIGHT ? right::step_down(dr, k) : right::step_right(dr, k);
        const uint64_t l = product::TRANSPOSED_LEFT ? left::step_down(dl, k) : left::step_right(dl, k);
        if (product::REGISTERS)
            wgmma_registers<N, product::TRANSPOSED_RIGHT>(acc, words[k].x, r, k > 0);
        else
            wgmma_shared<N, product::TRANSPOSED_LEFT, product::TRANSPOSED_RIGHT>(acc, l, r, k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold<N / 2>(acc);
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        a.out[(row + 8 * (i / 2 % 2)) * N + 8 * (i / 4) + column + i % 2] = acc[i];
}

// The parameters of a product. left, right: sm90_operand types with their number of columns. An A from registers holds
// the left tile's values.
template <int N_, int DEPTH_, class left_, int LEFT_COLUMNS_, bool TRANSPOSED_LEFT_, class right_, int RIGHT_COLUMNS_,
          bool TRANSPOSED_RIGHT_, bool REGISTERS_>
struct product_of {
    typedef left_ left;
    typedef right_ right;
    static constexpr int N = N_, DEPTH = DEPTH_, LEFT_COLUMNS = LEFT_COLUMNS_, RIGHT_COLUMNS = RIGHT_COLUMNS_;
    static constexpr bool TRANSPOSED_LEFT = TRANSPOSED_LEFT_, TRANSPOSED_RIGHT = TRANSPOSED_RIGHT_,
                          REGISTERS = REGISTERS_;
    static constexpr int LEFT_ROWS = left::CHUNK_BYTES / left::SPAN, RIGHT_ROWS = right::CHUNK_BYTES / right::SPAN;
    static constexpr int LEFT_BYTES = LEFT_ROWS * LEFT_COLUMNS * 2, RIGHT_BYTES = RIGHT_ROWS * RIGHT_COLUMNS * 2;
    static constexpr int SHARED_BYTES = 1024 + LEFT_BYTES + RIGHT_BYTES;
};

// Returns a tile's matrix of small integers, which the caller frees: sums of up to 256 of their products are exact in
// 15 bits.
static bf16 *random_tile(int rows, int columns, uint64_t seed) {
    bf16 *x = (bf16 *)malloc(sizeof *x * (size_t)rows * (size_t)columns);
    assert_non_null(x);
    for (int i = 0; i < rows * columns; i++)
        x[i] = bf16_from_float((float)((int)(test_random(&seed) % 17) - 8));
    return x;
}
static struct tensor_map tile_map(const bf16 *memory, int rows, int columns, int box_columns) {
    const uint64_t row_bytes = 2 * (uint64_t)columns;
    const uint64_t dims[4] = {(uint64_t)columns, 1, (uint64_t)rows, 1};
    const uint64_t strides[3] = {row_bytes, row_bytes, row_bytes * (uint64_t)rows};
    return tensor_map_of(memory, dims, strides, box_columns, rows);
}
// Returns element (i, k) of an operand that begins at `at` in a tile; i is a row of the tile or, transposed, a column.
static double operand_value(const bf16 *tile, int columns, struct operand_at at, bool transposed, int i, int k) {
    const int row = at.row + (transposed ? k : i), column = at.column + (transposed ? i : k);
    return bf16_to_float(tile[row * columns + column]);
}
template <class product>
static void check_product(const char *name, struct operand_at left_at, struct operand_at right_at) {
    enum { N = product::N, DEPTH = product::DEPTH };
    static float out[64 * N];
    static bf16 fragments[64 * DEPTH];
    bf16 *left = random_tile(product::LEFT_ROWS, product::LEFT_COLUMNS, 1);
    bf16 *right = random_tile(product::RIGHT_ROWS, product::RIGHT_COLUMNS, 2);
    struct product_arguments a;
    memset(&a, 0, sizeof a);
    for (int i = 0; i < 64; i++)
        for (int k = 0; k < DEPTH; k++)
            fragments[i * DEPTH + k] = bf16_from_float(
                (float)operand_value(left, product::LEFT_COLUMNS, left_at, product::TRANSPOSED_LEFT, i, k));
    const bf16 *left_memory = (const bf16 *)uploaded(left, product::LEFT_BYTES);
    const bf16 *right_memory = (const bf16 *)uploaded(right, product::RIGHT_BYTES);
    a.left = tile_map(left_memory, product::LEFT_ROWS, product::LEFT_COLUMNS, product::left::SPAN / 2);
    a.right = tile_map(right_memory, product::RIGHT_ROWS, product::RIGHT_COLUMNS, product::right::SPAN / 2);
    a.fragments = (const bf16 *)uploaded(fragments, sizeof fragments);
    a.out = (float *)filled(0xff, sizeof out);
    a.left_at = left_at;
    a.right_at = right_at;
    allow_shared(product_kernel<product>, product::SHARED_BYTES);
    LAUNCH(&device, product_kernel<product>, 1, 128, product::SHARED_BYTES, a);
    device_download(out, a.out, sizeof out, &device);
    for (int i = 0; i < 64; i++)
        for (int j = 0; j < N; j++) {
            double expected = 0;
            for (int k = 0; k < DEPTH; k++)
                expected += bf16_to_float(fragments[i * DEPTH + k]) *
                            operand_value(right, product::RIGHT_COLUMNS, right_at, product::TRANSPOSED_RIGHT, j, k);
            if (out[i * N + j] != expected)
                fail_msg("%s, tiles at (%d, %d) and (%d, %d): (%d, %d) is %g, expected %g", name, left_at.row,
                         left_at.column, right_at.row, right_at.column, i, j, out[i * N + j], expected);
        }
    free(left);
    free(right);
}

// Checks forward's S = Q K^T.
template <int D> static void forward_scores(void) {
    typedef sm90_forward_plan<D> plan;
    enum { COLUMNS = sm90_layout<D>::COLUMNS };
    check_product<product_of<plan::KEYS, D, sm90_operand<COLUMNS, 64>, D, false, sm90_operand<COLUMNS, plan::KEYS>, D,
                             false, false>>("Q K^T", {0, 0}, {0, 0});
    // Checks forward's O = P V.
}
template <int D> static void forward_out(void) {
    typedef sm90_forward_plan<D> plan;
    enum { COLUMNS = sm90_layout<D>::COLUMNS };
    check_product<product_of<D, plan::KEYS, sm90_operand<16, 64>, plan::KEYS, false, sm90_operand<COLUMNS, plan::KEYS>,
                             D, true, true>>("P V", {0, 0}, {0, 0});
}
// Checks backward's S^T = K Q^T and dP^T = V dO^T, for each of the two warpgroups.
template <int D> static void backward_scores(void) {
    typedef sm90_backward_plan<D> plan;
    for (int w = 0; w < 2; w++) {
        const struct operand_at left = {plan::SPLIT_KEYS ? 64 * w : 0, 0},
                                right = {plan::SPLIT_KEYS ? 0 : w * plan::PART, 0};
        check_product<
            product_of<plan::PART, D, typename plan::keys, D, false, typename plan::queries, D, false, false>>(
            "K Q^T", left, right);
        check_product<
            product_of<plan::PART, D, typename plan::values, D, false, typename plan::queries, D, false, false>>(
            "V dO^T", left, right);
    }
}
// Checks dV = P^T dO, whose form dK = dS^T Q has too: P^T from registers, or transposed from shared memory.
template <int D> static void backward_values(void) {
    typedef sm90_backward_plan<D> plan;
    for (int w = 0; w < 2; w++)
        check_product<product_of<plan::COLUMNS, plan::QUERIES, typename plan::scores, 64, true, typename plan::queries,
                                 D, true, plan::SPLIT_KEYS>>("P^T dO", {0, 0},
                                                             {0, plan::SPLIT_KEYS ? 0 : w * plan::COLUMNS});
}
// Checks dQ = dS K, of which each warpgroup computes its own rows or columns.
template <int D> static void backward_queries(void) {
    typedef sm90_backward_plan<D> plan;
    for (int w = 0; w < 2; w++)
        check_product<product_of<plan::DQ_COLUMNS, plan::KEYS, typename plan::scores, plan::KEYS, false,
                                 typename plan::keys, D, true, false>>(
            "dS K", {plan::SPLIT_ROWS ? 64 * w : 0, 0}, {0, plan::SPLIT_ROWS ? 0 : w * plan::DQ_COLUMNS});
}

// --- Boxes --------------------------------------------------------------------------------------------------------

// Loads a box over old contents, gives out what it finds at each address, and stores the box elsewhere. The storing
// thread waits only until shared memory was read. The map, a parameter of that thread, must hold until the copy is
// done.
static __global__ void box_kernel(const __grid_constant__ struct tensor_map from,
                                  const __grid_constant__ struct tensor_map to, uint32_t *words, int bytes, int c0,
                                  int c1, int c2, int c3, int thread_stores) {
    if (!HAS_SM90A)
        return;
    const uint32_t barrier = shared_memory(), box = barrier + 1024;
    for (int i = 4 * (int)threadIdx.x; i < bytes; i += 4 * (int)blockDim.x)
        store_shared_word(box + (uint32_t)i, 0xabababab);
    async_proxy_fence();
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        tma_prefetch_map(&from);
        mbarrier_arrive_expect(barrier, (uint32_t)bytes); // the whole box, including what lies outside the tensor
        tma_load_4d(box, &from, barrier, c0, c1, c2, c3);
    }
    mbarrier_wait(barrier, 0);
    for (int i = 4 * (int)threadIdx.x; i < bytes; i += 4 * (int)blockDim.x)
        words[i / 4] = load_shared_words(box + (uint32_t)i / 16 * 16).x[i / 4 % 4];
    if ((int)threadIdx.x == thread_stores) {
        tma_store_4d(&to, box, c0, c1, c2, c3);
        bulk_commit();
        bulk_wait_read<0>();
    }
}
enum { HEADS = 3, TOKENS = 150, SEQUENCES = 2, COLUMNS = 128, ELEMENTS = SEQUENCES * TOKENS * HEADS * COLUMNS };
static void check_box(int columns, int rows, int c0, int c1, int c2, int c3) {
    static bf16 x[ELEMENTS], y[ELEMENTS];
    static uint16_t found[64 * 256];
    const size_t box_bytes = (size_t)(2 * columns * rows);
    for (int i = 0; i < ELEMENTS; i++) {
        x[i].bits = (uint16_t)(i % 65521 + 1);
        y[i].bits = 0xdead;
    }
    bf16 *in = (bf16 *)uploaded(x, sizeof x), *out = (bf16 *)uploaded(y, sizeof y);
    uint32_t *words = (uint32_t *)filled(0xff, box_bytes);
    const uint64_t dims[4] = {COLUMNS, HEADS, TOKENS, SEQUENCES},
                   strides[3] = {2 * COLUMNS, 2 * COLUMNS * HEADS, 2 * COLUMNS * HEADS * TOKENS};
    const struct tensor_map from = tensor_map_of(in, dims, strides, columns, rows),
                            to = tensor_map_of(out, dims, strides, columns, rows);
    LAUNCH(&device, box_kernel, 1, 64, SMALL_SHARED, from, to, words, (int)box_bytes, c0, c1, c2, c3, 40);
    device_download(found, words, box_bytes, &device);
    device_download(y, out, sizeof y, &device);
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < columns; column++) {
            const int span = 2 * columns, byte = row * span + 2 * column;
            const int physical = byte ^ (byte / 128 % (span / 16)) * 16;
            const int at[4] = {c0 + column, c1, c2 + row, c3};
            const bool inside = at[0] >= 0 && at[0] < COLUMNS && at[2] >= 0 && at[2] < TOKENS;
            const int index = ((at[3] * TOKENS + at[2]) * HEADS + at[1]) * COLUMNS + at[0];
            const uint16_t expected = inside ? x[index].bits : 0;
            if (found[physical / 2] != expected)
                fail_msg("box of %d x %d at (%d, %d, %d, %d): (%d, %d) is %d, expected %d", columns, rows, c0, c1, c2,
                         c3, column, row, found[physical / 2], expected);
        }
    for (int i = 0; i < ELEMENTS; i++) {
        const int at[4] = {i % COLUMNS, i / COLUMNS % HEADS, i / COLUMNS / HEADS % TOKENS,
                           i / COLUMNS / HEADS / TOKENS};
        const bool stored =
            at[0] >= c0 && at[0] < c0 + columns && at[1] == c1 && at[2] >= c2 && at[2] < c2 + rows && at[3] == c3;
        const uint16_t expected = stored ? x[i].bits : 0xdead;
        if (y[i].bits != expected)
            fail_msg("box of %d x %d stored at (%d, %d, %d, %d): (%d, %d, %d, %d) is %d, expected %d", columns, rows,
                     c0, c1, c2, c3, at[0], at[1], at[2], at[3], y[i].bits, expected);
    }
    device_free(in, sizeof x);
    device_free(out, sizeof y);
    device_free(words, box_bytes);
}
template <int BOX_COLUMNS, int ROWS> static void box_inside(void) {
    check_box(BOX_COLUMNS, ROWS, 0, 0, 0, 0);
    check_box(BOX_COLUMNS, ROWS, BOX_COLUMNS, 2, 3, 1);
}
template <int BOX_COLUMNS, int ROWS> static void box_over_the_end(void) {
    check_box(BOX_COLUMNS, ROWS, 0, 1, TOKENS - ROWS + 3, 1);
    check_box(BOX_COLUMNS, ROWS, 128 - BOX_COLUMNS, 2, TOKENS - 1, 0);
}
template <int BOX_COLUMNS, int ROWS> static void box_over_the_columns(void) {
    check_box(BOX_COLUMNS, ROWS, 120, 1, 2, 0);
}
// Checks boxes that lie wholly past the end: nothing is stored, and the zeros that are loaded count for the barrier.
template <int BOX_COLUMNS, int ROWS> static void box_past_the_end(void) {
    check_box(BOX_COLUMNS, ROWS, 0, 1, TOKENS, 0);
    check_box(BOX_COLUMNS, ROWS, 128 - BOX_COLUMNS, 1, TOKENS + 64, 1);
}

static void a_map_is_checked(void) {
    static const struct {
        int offset;
        uint64_t stride;
        cuuint32_t columns, rows;
        CUtensorMapSwizzle swizzle;
        bool good;
    } cases[] = {
        {0, 512, 64, 64, CU_TENSOR_MAP_SWIZZLE_128B, true},   {16, 512, 64, 64, CU_TENSOR_MAP_SWIZZLE_128B, true},
        {8, 512, 64, 64, CU_TENSOR_MAP_SWIZZLE_128B, false},  {0, 506, 64, 64, CU_TENSOR_MAP_SWIZZLE_128B, false},
        {0, 512, 128, 64, CU_TENSOR_MAP_SWIZZLE_128B, false}, {0, 512, 64, 256, CU_TENSOR_MAP_SWIZZLE_128B, true},
        {0, 512, 64, 257, CU_TENSOR_MAP_SWIZZLE_128B, false}, {0, 512, 64, 64, CU_TENSOR_MAP_SWIZZLE_64B, false},
        {0, 512, 32, 64, CU_TENSOR_MAP_SWIZZLE_64B, true},    {0, 512, 32, 64, CU_TENSOR_MAP_SWIZZLE_32B, false},
        {0, 512, 4, 64, CU_TENSOR_MAP_SWIZZLE_32B, false},    {0, 512, 64, 0, CU_TENSOR_MAP_SWIZZLE_128B, false}};
    char *memory = (char *)device_allocate(65536);
    const tensor_map_encode encode = tensor_map_encoder();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct tensor_map map;
        const cuuint64_t dims[4] = {128, 2, 100, 1}, strides[3] = {256, cases[i].stride, 51200};
        const cuuint32_t box[4] = {cases[i].columns, 1, cases[i].rows, 1}, steps[4] = {1, 1, 1, 1};
        const CUresult status = encode(&map.map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, memory + cases[i].offset, dims,
                                       strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, cases[i].swizzle,
                                       CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        if ((status == CUDA_SUCCESS) != cases[i].good)
            fail_msg("case %zu: status %d", i, (int)status);
    }
}

// --- mbarriers ----------------------------------------------------------------------------------------------------

// A phase takes the arrivals of two threads, each of which expects bytes of its own. All threads read; then both load
// again.
enum { PHASES = 9, PHASE_FLOATS = 384, PHASE_THREADS = 128 };
static __global__ void phases_kernel(float *out, const float *in) {
    if (!HAS_SM90A)
        return;
    const uint32_t full = shared_memory(), empty = full + 8, stage = full + 1024, thread = threadIdx.x;
    if (thread == 0) {
        mbarrier_init(full, 2);
        mbarrier_init(empty, PHASE_THREADS);
        mbarrier_init_fence();
    }
    __syncthreads();
    for (uint32_t i = 0; i < PHASES; i++) {
        mbarrier_wait(empty, 1 - i % 2); // the phase before the first counts as complete
        if (thread == 0) {
            mbarrier_arrive_expect(full, 512);
            bulk_load(stage, in + PHASE_FLOATS * i, 512, full);
        } else if (thread == 32) {
            mbarrier_arrive_expect(full, 1024);
            bulk_load(stage + 512, in + PHASE_FLOATS * i + 128, 256, full);
            bulk_load(stage + 768, in + PHASE_FLOATS * i + 192, 768, full);
        }
        mbarrier_wait(full, i % 2);
        for (uint32_t j = thread; j < PHASE_FLOATS; j += PHASE_THREADS)
            out[PHASE_FLOATS * i + j] = load_shared_float(stage + 4 * j);
        mbarrier_arrive(empty);
    }
}
static void phases_of_an_mbarrier(void) {
    static float in[PHASES * PHASE_FLOATS], out[PHASES * PHASE_FLOATS];
    for (int i = 0; i < PHASES * PHASE_FLOATS; i++)
        in[i] = (float)i;
    float *memory = (float *)filled(0xff, sizeof out);
    LAUNCH(&device, phases_kernel, 1, PHASE_THREADS, SMALL_SHARED, memory, (const float *)uploaded(in, sizeof in));
    device_download(out, memory, sizeof out, &device);
    for (int i = 0; i < PHASES * PHASE_FLOATS; i++)
        if (out[i] != in[i])
            fail_msg("phase %d, float %d: %g, expected %g", i / PHASE_FLOATS, i % PHASE_FLOATS, out[i], in[i]);
}

// A ring of two stages. A producer warpgroup loads; two consumer warpgroups take turns by a named barrier, and add what
// was loaded to global memory by bulk reductions.
enum { STAGE_FLOATS = 256, STEPS = 7, RING_BLOCKS = 5 };
static __global__ void __launch_bounds__(384, 1) ring_kernel(float *sums, const float *in) {
    if (!HAS_SM90A)
        return;
    const uint32_t base = shared_memory(), full = base, empty = base + 16, stages = base + 1024, result = base + 8192;
    const int thread = (int)threadIdx.x, warpgroup = __shfl_sync(~0u, thread / 128, 0);
    if (thread == 0) {
        for (uint32_t i = 0; i < 2; i++) {
            mbarrier_init(full + 8 * i, 1);
            mbarrier_init(empty + 8 * i, 256);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (warpgroup == 0) {
        registers_decrease<24>();
        if (thread < 32 && elect_one())
            for (uint32_t i = 0; i < STEPS; i++) {
                mbarrier_wait(empty + 8 * (i % 2), 1 - i / 2 % 2);
                mbarrier_arrive_expect(full + 8 * (i % 2), 4 * STAGE_FLOATS);
                bulk_load(stages + 1024 * (i % 2), in + STAGE_FLOATS * i, 4 * STAGE_FLOATS, full + 8 * (i % 2));
            }
        return;
    }
    registers_increase<240>();
    const int mine = thread - 128;
    if (warpgroup == 2)
        named_barrier_arrive(1, 256); // so that the first turn is the first warpgroup's
    for (uint32_t i = 0; i < STEPS; i++) {
        mbarrier_wait(full + 8 * (i % 2), i / 2 % 2);
        const float x = load_shared_float(stages + 1024 * (i % 2) + 4 * (uint32_t)mine);
        mbarrier_arrive(empty + 8 * (i % 2));
        named_barrier_sync(warpgroup, 256);
        store_shared_float(result + 4 * (uint32_t)(mine % 128), x);
        async_proxy_fence();
        named_barrier_sync(2 + warpgroup, 128);
        if (mine % 128 == 0) {
            bulk_reduce_add(sums, result, 512);
            bulk_commit();
            bulk_wait_read<0>();
        }
        named_barrier_sync(2 + warpgroup, 128);
        if (i + 1 < STEPS || warpgroup == 1)
            named_barrier_arrive(3 - warpgroup, 256);
    }
}
static void a_ring_of_stages(void) {
    static float in[STAGE_FLOATS * STEPS], sums[128];
    for (int i = 0; i < STAGE_FLOATS * STEPS; i++)
        in[i] = (float)(i % 1000);
    float *memory = (float *)filled(0, sizeof sums);
    LAUNCH(&device, ring_kernel, RING_BLOCKS, 384, 16384, memory, (const float *)uploaded(in, sizeof in));
    device_download(sums, memory, sizeof sums, &device);
    for (int i = 0; i < 128; i++) {
        double expected = 0;
        for (int step = 0; step < STEPS; step++)
            expected += RING_BLOCKS * ((double)in[step * STAGE_FLOATS + i] + in[step * STAGE_FLOATS + 128 + i]);
        if (sums[i] != expected)
            fail_msg("float %d: %g, expected %g", i, sums[i], expected);
    }
}

// --- Bulk stores and reductions -----------------------------------------------------------------------------------

// A block's values: 16 KB, like a warpgroup's dQ. Some are large and some small, so that another order of sums gives
// other bits.
enum { PIECE_FLOATS = 4096, SUM_THREADS = 128, CHAIN_BLOCKS = 300 };
HOST_DEVICE float summand(int block, int i) {
    const uint32_t hash = ((uint32_t)block * 2654435761u + (uint32_t)i * 40503u) >> 7;
    return ((float)(hash % 2001) - 1000.0f) * (hash / 2048 % 2 ? 1.0f : 1.0f / 1024 / 3);
}
// Adds the blocks' values. in_order: block 0 stores, and each other block adds after the block before. Else blocks add
// integers, in any order.
static __global__ void sum_kernel(float *sums, int *turn, bool in_order) {
    if (!HAS_SM90A)
        return;
    const uint32_t from = shared_memory(), thread = threadIdx.x;
    const int block = (int)blockIdx.x;
    for (uint32_t i = thread; i < PIECE_FLOATS; i += SUM_THREADS)
        store_shared_float(from + 4 * i, in_order ? summand(block, (int)i) : (float)((block * 5 + (int)i) % 64));
    async_proxy_fence();
    __syncthreads();
    if (thread != 0)
        return;
    if (in_order && block > 0) {
        wait_acquire(turn, block);
        async_proxy_fence_global();
    }
    if (in_order && block == 0)
        bulk_store(sums, from, 4 * PIECE_FLOATS);
    else
        bulk_reduce_add(sums, from, 4 * PIECE_FLOATS);
    bulk_commit();
    bulk_wait<0>();
    async_proxy_fence_global();
    if (in_order)
        store_release(turn, block + 1);
}
static void sums_of(float *sums, bool in_order) {
    float *memory = (float *)filled(in_order ? 0xff : 0, 4 * PIECE_FLOATS);
    LAUNCH(&device, sum_kernel, CHAIN_BLOCKS, SUM_THREADS, 4 * PIECE_FLOATS, memory, (int *)filled(0, 4), in_order);
    device_download(sums, memory, 4 * PIECE_FLOATS, &device);
}
static void reductions_in_order(void) {
    static float sums[PIECE_FLOATS];
    sums_of(sums, true);
    for (int i = 0; i < PIECE_FLOATS; i++) {
        float expected = summand(0, i);
        for (int block = 1; block < CHAIN_BLOCKS; block++)
            expected += summand(block, i);
        if (sums[i] != expected)
            fail_msg("float %d: %.9g, expected %.9g", i, sums[i], expected);
    }
}
static void reductions_in_any_order(void) {
    static float sums[PIECE_FLOATS];
    sums_of(sums, false);
    for (int i = 0; i < PIECE_FLOATS; i++) {
        double expected = 0;
        for (int block = 0; block < CHAIN_BLOCKS; block++)
            expected += (block * 5 + i) % 64;
        if (sums[i] != expected)
            fail_msg("float %d: %g, expected %g", i, sums[i], expected);
    }
}

// --- stmatrix, setmaxnreg, shared memory ----------------------------------------------------------------------------

static __global__ void stmatrix_kernel(uint32_t *out, bool transposed) {
    if (!HAS_SM90A)
        return;
    const uint32_t base = shared_memory(), lane = threadIdx.x;
    struct word_x4 words;
    for (uint32_t i = 0; i < 4; i++)
        words.x[i] = lane * 1000 + i * 2 + (lane * 1000 + i * 2 + 1) * 65536;
    const uint32_t row = base + (lane % 8 * 4 + lane / 8) * 16; // four matrices side by side
    if (transposed)
        stmatrix_x4_trans(row, words);
    else
        stmatrix_x4(row, words);
    __syncwarp();
    const struct word_x4 back = transposed ? ldmatrix_x4_trans(row) : ldmatrix_x4(row);
    const struct word_x4 line = load_shared_words(base + lane * 16);
    for (uint32_t i = 0; i < 4; i++)
        out[lane * 4 + i] = back.x[i] == words.x[i] ? line.x[i] : 0xffffffffu;
}
static void stmatrix(void) {
    for (int transposed = 0; transposed < 2; transposed++) {
        uint32_t out[128];
        uint32_t *memory = (uint32_t *)filled(0xff, sizeof out);
        LAUNCH(&device, stmatrix_kernel, 1, 32, 512, memory, transposed != 0);
        device_download(out, memory, sizeof out, &device);
        const uint16_t *elements = (const uint16_t *)out;
        for (int matrix = 0; matrix < 4; matrix++)
            for (int row = 0; row < 8; row++)
                for (int column = 0; column < 8; column++) {
                    const int g = transposed ? column : row, other = transposed ? row : column;
                    const int lane = 4 * g + other / 2;
                    const uint16_t expected = (uint16_t)(lane * 1000 + matrix * 2 + (other % 2));
                    assert_int_equal(elements[(row * 4 + matrix) * 8 + column], expected);
                }
    }
}

// The last warpgroups hold more values than they had registers for at the launch.
enum { REGISTER_ROUNDS = 3 };
template <int FLOATS> HOST_DEVICE double mixed(int thread, const float *in /*[1024]*/) {
    float x[FLOATS];
    double sum = 0;
#pragma unroll
    for (int i = 0; i < FLOATS; i++)
        x[i] = in[(thread * 7 + i * 13) % 1024];
#pragma unroll
    for (int round = 0; round < REGISTER_ROUNDS; round++)
#pragma unroll
        for (int i = 0; i < FLOATS; i++)
            x[i] = x[i] * 0.5f + x[(i + FLOATS / 2) % FLOATS];
#pragma unroll
    for (int i = 0; i < FLOATS; i++)
        sum += x[i] * (float)(i % 7 + 1);
    return sum;
}
template <int THREADS, int LESS, int MORE, int FLOATS>
static __global__ void __launch_bounds__(THREADS, 1) registers_kernel(double *out, const float *in) {
    if (!HAS_SM90A)
        return;
    const int warpgroup = __shfl_sync(~0u, (int)threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        registers_decrease<LESS>();
        return;
    }
    registers_increase<MORE>();
    out[blockIdx.x * THREADS + threadIdx.x] = mixed<FLOATS>((int)threadIdx.x, in);
}
template <int THREADS, int LESS, int MORE, int FLOATS> static void setmaxnreg(void) {
    auto *kernel = registers_kernel<THREADS, LESS, MORE, FLOATS>;
    const int blocks = 3 * multiprocessors(); // so that later blocks follow earlier ones on each multiprocessor
    const size_t bytes = sizeof(double) * (size_t)(blocks * THREADS);
    float in[1024];
    double *out = (double *)malloc(bytes), *memory = (double *)filled(0xff, bytes);
    assert_non_null(out);
    for (int i = 0; i < 1024; i++)
        in[i] = (float)(i * 37 % 61);
    LAUNCH(&device, kernel, (unsigned)blocks, THREADS, 0, memory, (const float *)uploaded(in, sizeof in));
    device_download(out, memory, bytes, &device);
    for (int i = 0; i < blocks * THREADS; i++)
        if (i % THREADS >= 128 && out[i] != mixed<FLOATS>(i % THREADS, in))
            fail_msg("block %d, thread %d: %g, expected %g", i / THREADS, i % THREADS, out[i],
                     mixed<FLOATS>(i % THREADS, in));
    free(out);
}

static __global__ void base_kernel(uint32_t *bases) {
    if (!HAS_SM90A)
        return;
    if (threadIdx.x == 0)
        bases[blockIdx.x] = shared_memory();
}
static void shared_memory_is_aligned(void) {
    enum { BLOCKS = 500 };
    static uint32_t bases[BLOCKS];
    const int sizes[] = {1024, 5000, 100 * 1024, MAX_SHARED};
    uint32_t *memory = (uint32_t *)filled(0xff, sizeof bases);
    allow_shared(base_kernel, MAX_SHARED);
    for (int bytes : sizes) {
        LAUNCH(&device, base_kernel, BLOCKS, 128, (size_t)bytes, memory);
        device_download(bases, memory, sizeof bases, &device);
        for (int i = 0; i < BLOCKS; i++)
            if (bases[i] % 1024 != 0)
                fail_msg("%d bytes of shared memory begin at address %u, which is no multiple of 1024", bytes,
                         bases[i]);
    }
}

// --- The order of blocks ------------------------------------------------------------------------------------------

// As much shared memory as attention's blocks have, so that only one fits on a multiprocessor.
enum { START_ROUNDS = 20, START_SHARED = 200 * 1024 };

static __global__ void ticket_kernel(int *tickets, int *next) {
    if (!HAS_SM90A)
        return;
    if (threadIdx.x != 0)
        return;
    tickets[blockIdx.x] = atomicAdd(next, 1);
    const uint64_t work = 1000 + blockIdx.x * 2654435761u % 20000; // ns; unequal, so that blocks end in another order
    for (const uint64_t begin = global_timer(); global_timer() - begin < work;)
        continue;
}
// Checks that blocks start nearly in the order of their indices. Deterministic dQ waits for blocks of lower index only,
// which must have started. Blocks that start at the same time may take their tickets in any order. The emulator starts
// blocks in no order.
static void blocks_start_in_order(void) {
    const int at_once = multiprocessors(), blocks = START_ROUNDS * at_once;
    const size_t bytes = sizeof(int) * (size_t)blocks;
    int *tickets = (int *)malloc(bytes), *memory = (int *)filled(0xff, bytes), worst = 0;
    bool *taken = (bool *)calloc((size_t)blocks, sizeof *taken);
    assert_true(tickets && taken);
    allow_shared(ticket_kernel, START_SHARED);
    LAUNCH(&device, ticket_kernel, (unsigned)blocks, 128, START_SHARED, memory, (int *)filled(0, 4));
    device_download(tickets, memory, bytes, &device);
    for (int i = 0; i < blocks; i++) {
        const int apart = tickets[i] < i ? i - tickets[i] : tickets[i] - i;
        assert_true(tickets[i] >= 0 && tickets[i] < blocks && !taken[tickets[i]]);
        taken[tickets[i]] = true;
        worst = apart > worst ? apart : worst;
    }
    printf("measured: of %d blocks, %d at once, none started more than %d places from its index\n", blocks, at_once,
           worst);
#ifndef CUDA_EMULATED
    if (worst >= at_once)
        fail_msg("a block started %d places from its index, and %d run at once", worst, at_once);
#endif
    free(tickets);
    free(taken);
}

static __global__ void chain_kernel(int *turn, float *sum) {
    if (!HAS_SM90A)
        return;
    if (threadIdx.x != 0)
        return;
    wait_acquire(turn, (int)blockIdx.x);
    *sum = *sum * 0.5f + (float)blockIdx.x;
    store_release(turn, (int)blockIdx.x + 1);
}
// Checks a chain of many more blocks than fit at once.
static void blocks_in_a_chain(void) {
    const int blocks = START_ROUNDS * multiprocessors();
    const float one = 1;
    float sum, expected = 1;
    float *memory = (float *)uploaded(&one, sizeof one);
    allow_shared(chain_kernel, START_SHARED);
    LAUNCH(&device, chain_kernel, (unsigned)blocks, 64, START_SHARED, (int *)filled(0, 4), memory);
    device_download(&sum, memory, sizeof sum, &device);
    for (int i = 0; i < blocks; i++)
        expected = expected * 0.5f + (float)i;
    if (sum != expected)
        fail_msg("the sum is %.9g, expected %.9g", sum, expected);
}

// --- Waits without an end -----------------------------------------------------------------------------------------

// Lets a thread of block 1 wait, at an mbarrier or for its turn, for something that never comes.
static __global__ void hang_kernel(int *turn, bool at_mbarrier) {
    if (!HAS_SM90A)
        return;
    const uint32_t barrier = shared_memory();
    if (threadIdx.x != 7 || blockIdx.x != 1)
        return;
    if (at_mbarrier) {
        mbarrier_init(barrier, 1);
        mbarrier_init_fence();
        mbarrier_wait(barrier, 0);
    } else {
        wait_acquire(turn, 5);
    }
}
static void hang(bool at_mbarrier) {
    LAUNCH(&device, hang_kernel, 2, 32, 1024, (int *)filled(0, 4), at_mbarrier);
    device_synchronize(&device);
}
static void hang_at_mbarrier(void) { hang(true); }
static void hang_for_a_turn(void) { hang(false); }
// Checks that a hang ends with a report of block 1 that holds `words`: the time limit's report or, on the emulator,
// which sees such waits itself, the emulator's.
static void check_hang(const char *name, const char *words) {
    char message[4096];
    const int status = run_apart(name, "", message, sizeof message);
    if (status == 0 || !strstr(message, words) || !strstr(message, "block (1, 0, 0), thread"))
        fail_msg("%s: status %d, expected a report of block 1 with \"%s\": %s", name, status, words, message);
}
#ifdef CUDA_EMULATED
#define HANG_WORDS(emulator, gpu) emulator
#else
#define HANG_WORDS(emulator, gpu) gpu
#endif
static void a_hang_at_an_mbarrier_ends(void) {
    check_hang("hang_at_mbarrier",
               HANG_WORDS("waits at mbarrier_wait for ever: phase 0", "of parity 0 of the mbarrier at shared address"));
}
static void a_hang_for_a_turn_ends(void) {
    check_hang("hang_for_a_turn", HANG_WORDS("asks again and again by load_acquire", "for 5 at address"));
}
static void a_wait_is_described(void) {
    struct wait_record record = {
        0x10400, 1, 1, 0, {3, 2, 1}, {65, 0, 0}, wait_place("kernels/attention/sm90.cuh", 140)};
    char text[512];
    assert_string_equal(
        wait_describe(text, sizeof text, &record, 2),
        "block (3, 2, 1), thread (65, 0, 0) has waited for 2 s at attention/sm90.cuh:140 for the phase of "
        "parity 1 of the mbarrier at shared address 0x10400");
    record.mbarrier = 0;
    record.awaited = 7;
    record.found = 5;
    record.place = wait_place("/some/where.cuh", 9);
    assert_string_equal(
        wait_describe(text, sizeof text, &record, 2),
        "block (3, 2, 1), thread (65, 0, 0) has waited for 2 s at another file:9 for 7 at address 0x10400, "
        "which is 5");
    static_assert(wait_place(__FILE__, 1) % WAIT_FILES != wait_place("/some/where.cuh", 1) % WAIT_FILES,
                  "this file is known");
}

// --- All ----------------------------------------------------------------------------------------------------------

#define EACH_HEAD_DIM(f)                                                                                               \
    {#f "_64", f<64>}, {#f "_96", f<96>}, {#f "_128", f<128>}, { #f "_256", f < 256> }
#define EACH_BOX(columns, rows)                                                                                        \
    {"box_" #columns "x" #rows "_inside", box_inside<columns, rows>},                                                  \
        {"box_" #columns "x" #rows "_over_the_end", box_over_the_end<columns, rows>},                                  \
        {"box_" #columns "x" #rows "_over_the_columns", box_over_the_columns<columns, rows>}, {                        \
        "box_" #columns "x" #rows "_past_the_end", box_past_the_end<columns, rows>                                     \
    }
static const struct unit {
    const char *name;
    void (*run)(void);
} units[] = {
    {"shared_memory_is_aligned", shared_memory_is_aligned},
    {"stmatrix", stmatrix},
    {"wgmma_n64", wgmma_n64<false, false>},
    {"wgmma_n64_right_transposed", wgmma_n64<false, true>},
    {"wgmma_n64_left_transposed", wgmma_n64<true, false>},
    {"wgmma_n64_both_transposed", wgmma_n64<true, true>},
    {"wgmma_n16_right_transposed_64_bytes", wgmma<16, false, true, 1, 2>},
    {"wgmma_n32", wgmma<32, false, false, 1, 1>},
    {"wgmma_n48_right_transposed_32_bytes", wgmma<48, false, true, 1, 3>},
    {"wgmma_n80", wgmma<80, false, false, 1, 1>},
    {"wgmma_n96_right_transposed_64_bytes", wgmma<96, false, true, 1, 2>},
    {"wgmma_n128", wgmma<128, false, false, 2, 2>},
    {"wgmma_n128_right_transposed", wgmma<128, false, true, 1, 1>},
    {"wgmma_n176", wgmma<176, false, false, 1, 1>},
    {"wgmma_n192_right_transposed", wgmma<192, false, true, 1, 1>},
    {"wgmma_n256_right_transposed", wgmma<256, false, true, 1, 1>},
    {"wgmma_n256_both_transposed", wgmma<256, true, true, 1, 1>},
    EACH_BOX(16, 128),
    EACH_BOX(32, 64),
    EACH_BOX(32, 128),
    EACH_BOX(64, 64),
    EACH_BOX(64, 80),
    EACH_BOX(64, 128),
    {"box_16x13_over_the_end", box_over_the_end<16, 13>},
    {"a_map_is_checked", a_map_is_checked},
    EACH_HEAD_DIM(forward_scores),
    EACH_HEAD_DIM(forward_out),
    EACH_HEAD_DIM(backward_scores),
    EACH_HEAD_DIM(backward_values),
    EACH_HEAD_DIM(backward_queries),
    {"phases_of_an_mbarrier", phases_of_an_mbarrier},
    {"a_ring_of_stages", a_ring_of_stages},
    {"setmaxnreg_24_240", setmaxnreg<384, 24, 240, 200>},
    {"setmaxnreg_40_232", setmaxnreg<384, 40, 232, 196>},
    {"setmaxnreg_32_160", setmaxnreg<512, 32, 160, 140>},
    {"reductions_in_any_order", reductions_in_any_order},
    {"reductions_in_order", reductions_in_order},
    {"blocks_start_in_order", blocks_start_in_order},
    {"blocks_in_a_chain", blocks_in_a_chain},
    {"a_wait_is_described", a_wait_is_described},
    {"a_hang_at_an_mbarrier_ends", a_hang_at_an_mbarrier_ends},
    {"a_hang_for_a_turn_ends", a_hang_for_a_turn_ends},
    {"hang_at_mbarrier", hang_at_mbarrier}, // these two hang; the tests above run them
    {"hang_for_a_turn", hang_for_a_turn},
};
enum { UNITS = sizeof units / sizeof *units - 2 };

static void unit_passes(void **state) {
    const struct unit *unit = (const struct unit *)*state;
    static char message[65536];
    const int status = run_apart(unit->name, "", message, sizeof message);
    for (const char *at = strstr(message, "measured: "); at; at = strstr(at + 1, "measured: "))
        printf("# %s: %.*s\n", unit->name, (int)strcspn(at, "\n"), at);
    if (status != 0)
        fail_msg("%s: %s %d: %s", unit->name, WIFEXITED(status) ? "status" : "signal",
                 WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status), message);
}
static void unit_runs(void **state) { ((const struct unit *)*state)->run(); }

// Returns why these tests can't run here; "" where they can.
static const char *unit_unavailable_reason(void) {
    static char text[128];
    struct cudaDeviceProp properties;
    if (*device_unavailable_reason())
        return device_unavailable_reason();
    cuda_check(cudaGetDeviceProperties(&properties, 0));
    snprintf(text, sizeof text, "needs compute capability 9.0, not %d.%d", properties.major, properties.minor);
    return properties.major == 9 && properties.minor == 0 ? "" : text;
}

int main(int argc, char **argv) {
#ifdef CUDA_EMULATED
    setenv("EMU_CAPABILITY", "9.0", 0);
#endif
    setvbuf(stdout, NULL, _IOLBF, 0); // so that a limit that ends this program loses no result
    const char *const reason = unit_unavailable_reason();
    if (*reason) {
        printf("skipped: unit_sm90: %s\n", reason);
        return NO_GPU_STATUS;
    }
    for (const struct unit *unit = units; argc > 1 && unit < units + sizeof units / sizeof *units; unit++)
        if (strcmp(argv[1], unit->name) == 0) {
            alarm(UNIT_SECONDS);
            setenv("CMOCKA_MESSAGE_OUTPUT", "STDOUT", 1); // so that only the parent's lines are counted
            device_open(&device, 0, true);
            RUN_EACH(unit, 1, unit_runs);
        }
    if (argc > 1)
        fail("unit_sm90 has no test '%s'", argv[1]);
    RUN_EACH(units, UNITS, unit_passes);
}
