// The models of kernels/ptx_sm90.cuh against plain loops: which lane holds what, where operands lie in shared memory, what
// a box of a tensor map is, and who waits for whom.
#include "kernels/device_memory.cuh" // device_allocate
#include "kernels/device_queue.cuh"  // device_open
#include "kernels/ptx_sm90.cuh"      // wgmma, TMA, mbarriers
#include "kernels/tensor_map.cuh"    // tensor_map_of
#include "test/testing.h"            // cmocka

static float element(int i) { return (float)(i * 37 % 61 - 30) / 8; }

// --- wgmma --------------------------------------------------------------------------------------------------------

// Where an element of an operand lies, from the PTX ISA's canonical layouts: atoms of 8 rows (or, MN-major, of 8 ks),
// each `span` bytes long and swizzled by itself.
struct layout {
    int swizzle; // a descriptor's
    bool transposed;
    uint32_t leading, stride;
};
static int span_of(int swizzle) { return 256 >> swizzle; }
static uint32_t element_offset(struct layout layout, int rows, int row, int k) {
    if (layout.swizzle == 0) {
        const int mn = row;
        return layout.transposed ? (uint32_t)(mn / 8) * layout.stride + (uint32_t)(k / 8) * layout.leading +
                                       (uint32_t)(k % 8 * 16 + mn % 8 * 2)
                                 : (uint32_t)(mn / 8) * layout.stride + (uint32_t)(k / 8) * layout.leading +
                                       (uint32_t)(mn % 8 * 16 + k % 8 * 2);
    }
    const int span = span_of(layout.swizzle), line = layout.transposed ? k : row, along = layout.transposed ? row : k;
    const int atom_line = line % 8, atom_byte = 2 * along % span;
    const int lines_apart = line / 8, spans_apart = 2 * along / span;
    const int mask = span / 16 - 1; // lines of 128 bytes are what the XOR counts
    const int piece = atom_byte / 16 ^ (atom_line * span / 128 & mask);
    return (uint32_t)lines_apart * layout.stride + (uint32_t)spans_apart * layout.leading +
           (uint32_t)(atom_line * span + piece * 16 + atom_byte % 16);
}

template <int N, bool TA, bool TB>
static __global__ void product_kernel(float *out, struct layout la, struct layout lb, bool registers) {
    const uint32_t a = shared_memory(), b = a + 32768;
    const int thread = (int)threadIdx.x, g = thread % 32 / 4, t = thread % 4, warp = thread / 32;
    if (thread == 0) { // pairs along the contiguous dimension make words
        for (int row = 0; row < 64; row += TA ? 2 : 1)
            for (int k = 0; k < 16; k += TA ? 1 : 2)
                store_shared_word(a + element_offset(la, 64, row, k),
                                  pack_bf16x2(element(row * 16 + k), element(row * 16 + k + (TA ? 16 : 1))));
        for (int row = 0; row < N; row += TB ? 2 : 1)
            for (int k = 0; k < 16; k += TB ? 1 : 2)
                store_shared_word(b + element_offset(lb, N, row, k),
                                  pack_bf16x2(element(row * 7 + k * 5), element(row * 7 + k * 5 + (TB ? 7 : 5))));
        async_proxy_fence();
    }
    __syncthreads();
    float acc[N / 2];
    for (int i = 0; i < N / 2; i++)
        acc[i] = element(thread + i);
    uint32_t left[4];
    for (int i = 0; i < 4; i++) {
        const int row = 16 * warp + g + i % 2 * 8, k = 2 * t + i / 2 * 8;
        left[i] = pack_bf16x2(element(row * 16 + k), element(row * 16 + k + 1));
    }
    const uint64_t da = matrix_descriptor(a, la.leading, la.stride, la.swizzle),
                   db = matrix_descriptor(b, lb.leading, lb.stride, lb.swizzle);
    wgmma_fence();
    if (registers)
        wgmma_registers<N, TB>(acc, left, db, true);
    else
        wgmma_shared<N, TA, TB>(acc, da, db, true);
    wgmma_shared<N, TA, TB>(acc, da, db, true);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold<N / 2>(acc);
    for (int i = 0; i < N / 2; i++)
        out[(16 * warp + g + 8 * (i / 2 % 2)) * N + 8 * (i / 4) + 2 * t + i % 2] = acc[i];
}
static struct layout layout_of(int swizzle, bool transposed, int rows) {
    const uint32_t span = (uint32_t)span_of(swizzle);
    if (swizzle == 0) {
        const struct layout none = {0, transposed, transposed ? (uint32_t)rows * 16 : 128, transposed ? 128u : 256u};
        return none;
    }
    const struct layout result = {swizzle, transposed, transposed ? 16 * span : 0, 8 * span};
    return result;
}
template <int N, bool TA, bool TB> static void check_product(int swizzle_a, int swizzle_b, bool registers) {
    static float out[64 * N];
    struct device null = {};
    auto *kernel = product_kernel<N, TA, TB>;
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536));
    LAUNCH(&null, kernel, 1, 128, 65536, out, layout_of(swizzle_a, TA, 64), layout_of(swizzle_b, TB, N), registers);
    for (int row = 0; row < 64; row++)
        for (int column = 0; column < N; column++) {
            // Of the accumulators' lane map: (row, column) is which thread's which.
            const int thread = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
            const int i = column / 8 * 4 + row % 16 / 8 * 2 + column % 2;
            float expected = element(thread + i);
            for (int k = 0; k < 16; k++)
                expected += 2 * element(row * 16 + k) * element(column * 7 + k * 5);
            if (out[row * N + column] != expected)
                fail_msg("N %d, swizzles %d and %d, transposed %d %d, (%d, %d): %g, expected %g", N, swizzle_a, swizzle_b,
                         TA, TB, row, column, out[row * N + column], expected);
        }
}
static void products(void **state) {
    for (int a = 0; a < 4; a++)
        for (int b = 0; b < 4; b++)
            for (int registers = 0; registers < 2; registers++) {
                check_product<64, false, false>(a, b, registers);
                check_product<64, false, true>(a, b, registers);
                check_product<64, true, false>(a, b, registers);
                check_product<64, true, true>(a, b, registers);
            }
    for (int registers = 0; registers < 2; registers++) {
        check_product<16, false, true>(1, 2, registers);
        check_product<80, false, false>(1, 1, registers);
        check_product<96, false, true>(1, 2, registers);
        check_product<128, false, true>(1, 1, registers);
        check_product<176, false, false>(1, 1, registers);
        check_product<192, false, true>(1, 1, registers);
        check_product<256, true, true>(1, 1, registers);
    }
}

// --- Boxes --------------------------------------------------------------------------------------------------------

// Loads a box, hands what it finds at each address out, and stores it elsewhere. Who began a copy does not wait for
// what it writes: its thread, and with it the map that is its parameter, may be gone when the copy runs.
static __global__ void box_kernel(const __grid_constant__ struct tensor_map from,
                                  const __grid_constant__ struct tensor_map to, uint32_t *words, int bytes, int c0, int c1, int c2, int c3, int thread_stores) {
    const uint32_t barrier = shared_memory(), box = barrier + 1024;
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        tma_prefetch_map(&from);
        mbarrier_arrive_expect(barrier, (uint32_t)bytes);
        tma_load_4d(box, &from, barrier, c0, c1, c2, c3);
    }
    if (threadIdx.x < 32)
        return;
    mbarrier_wait(barrier, 0);
    for (int i = 4 * ((int)threadIdx.x - 32); i < bytes; i += 4 * 32) {
        const float word = load_shared_float(box + (uint32_t)i);
        memcpy(words + i / 4, &word, 4);
    }
    if ((int)threadIdx.x == thread_stores) {
        tma_store_4d(&to, box, c0, c1, c2, c3);
        bulk_commit();
        bulk_wait_read<0>();
    }
}
enum { HEADS = 3, TOKENS = 21, SEQUENCES = 2 };
static void check_box(int columns, int rows, int c0, int c1, int c2, int c3) {
    enum { COLUMNS = 128, ELEMENTS = SEQUENCES * TOKENS * HEADS * COLUMNS };
    bf16 *x = (bf16 *)test_alloc(2 * ELEMENTS), *y = (bf16 *)test_alloc(2 * ELEMENTS);
    for (int i = 0; i < ELEMENTS; i++) {
        x[i].bits = (uint16_t)(i + 1);
        y[i].bits = 0xdead;
    }
    const uint64_t dims[4] = {COLUMNS, HEADS, TOKENS, SEQUENCES},
                   strides[3] = {2 * COLUMNS, 2 * COLUMNS * HEADS, 2 * COLUMNS * HEADS * TOKENS};
    const struct tensor_map from = tensor_map_of(x, dims, strides, columns, rows),
                            to = tensor_map_of(y, dims, strides, columns, rows);
    uint32_t *words = (uint32_t *)test_alloc((size_t)(2 * columns * rows));
    struct device null = {};
    LAUNCH(&null, box_kernel, 1, 64, 32768, from, to, words, 2 * columns * rows, c0, c1, c2, c3, 40);
    const uint16_t *found = (const uint16_t *)words;
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < columns; column++) {
            const int span = 2 * columns, byte = row * span + 2 * column;
            const int physical = byte ^ (byte / 128 % (span / 16)) * 16;
            const int at[4] = {c0 + column, c1, c2 + row, c3};
            const bool inside = at[0] >= 0 && at[0] < COLUMNS && at[2] >= 0 && at[2] < TOKENS;
            const int index = ((at[3] * TOKENS + at[2]) * HEADS + at[1]) * COLUMNS + at[0];
            const uint16_t expected = inside ? x[index].bits : 0;
            if (found[physical / 2] != expected)
                fail_msg("box of %d x %d at (%d, %d, %d, %d): (%d, %d) is %d, expected %d", columns, rows, c0, c1, c2, c3,
                         column, row, found[physical / 2], expected);
        }
    for (int i = 0; i < ELEMENTS; i++) {
        const int at[4] = {i % COLUMNS, i / COLUMNS % HEADS, i / COLUMNS / HEADS % TOKENS, i / COLUMNS / HEADS / TOKENS};
        const bool stored = at[0] >= c0 && at[0] < c0 + columns && at[1] == c1 && at[2] >= c2 && at[2] < c2 + rows &&
                            at[3] == c3;
        assert_int_equal(y[i].bits, stored ? x[i].bits : 0xdead);
    }
    free(x);
    free(y);
    free(words);
}
static void boxes(void **state) {
    for (int columns = 16; columns <= 64; columns *= 2) {
        check_box(columns, 16, 0, 0, 0, 0);
        check_box(columns, 16, columns, 2, 3, 1);
        check_box(columns, 16, 0, 1, 16, 1);
        check_box(columns, 13, 128 - columns, 1, 21, 0); // all past the end
        check_box(columns, 16, 0, 1, -5, 0);
        check_box(columns, 16, 120, 1, 2, 0);
    }
}

static void a_map_is_checked(void **state) {
    static const struct {
        uint64_t base, stride;
        cuuint32_t columns, rows;
        CUtensorMapSwizzle swizzle;
        bool good;
    } cases[] = {
        {0x10000, 256, 64, 64, CU_TENSOR_MAP_SWIZZLE_128B, true},  {0x10010, 256, 64, 64, CU_TENSOR_MAP_SWIZZLE_128B, true},
        {0x10008, 256, 64, 64, CU_TENSOR_MAP_SWIZZLE_128B, false}, {0x10000, 250, 64, 64, CU_TENSOR_MAP_SWIZZLE_128B, false},
        {0x10000, 256, 128, 64, CU_TENSOR_MAP_SWIZZLE_128B, false}, {0x10000, 256, 64, 256, CU_TENSOR_MAP_SWIZZLE_128B, true},
        {0x10000, 256, 64, 257, CU_TENSOR_MAP_SWIZZLE_128B, false}, {0x10000, 256, 64, 64, CU_TENSOR_MAP_SWIZZLE_64B, false},
        {0x10000, 256, 32, 64, CU_TENSOR_MAP_SWIZZLE_64B, true},    {0x10000, 256, 32, 64, CU_TENSOR_MAP_SWIZZLE_32B, false},
        {0x10000, 256, 4, 64, CU_TENSOR_MAP_SWIZZLE_32B, false},    {0x10000, 256, 64, 0, CU_TENSOR_MAP_SWIZZLE_128B, false}};
    const tensor_map_encode encode = tensor_map_encoder();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct tensor_map map;
        const cuuint64_t dims[4] = {128, 2, 100, 1}, strides[3] = {256, cases[i].stride, 51200};
        const cuuint32_t box[4] = {cases[i].columns, 1, cases[i].rows, 1}, steps[4] = {1, 1, 1, 1};
        const CUresult status =
            encode(&map.map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void *)cases[i].base, dims, strides, box, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, cases[i].swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        if ((status == CUDA_SUCCESS) != cases[i].good)
            fail_msg("case %zu: status %d", i, (int)status);
    }
    void *function;
    enum cudaDriverEntryPointQueryResult found;
    cuda_check(cudaGetDriverEntryPointByVersion("cuNothing", &function, 12000, cudaEnableDefault, &found));
    assert_true(found == cudaDriverEntryPointSymbolNotFound && !function);
}

// --- stmatrix, bulk copies, specialised warps, the order of blocks -------------------------------------------------

static __global__ void stmatrix_kernel(uint32_t *out, bool transposed) {
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
    for (uint32_t i = 0; i < 4; i++) {
        out[lane * 4 + i] = back.x[i] == words.x[i] ? line.x[i] : 0xffffffffu;
    }
}
static void stmatrix(void **state) {
    struct device null = {};
    for (int transposed = 0; transposed < 2; transposed++) {
        uint32_t out[128];
        LAUNCH(&null, stmatrix_kernel, 1, 32, 512, out, transposed != 0);
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

// A ring of two stages: a producer warpgroup loads, two consumer warpgroups take turns by a named barrier and add what
// comes to global memory by bulk reductions.
enum { STAGE_FLOATS = 256, STEPS = 7 };
static __global__ void ring_kernel(float *sums, const float *in) {
    const uint32_t base = shared_memory(), full = base, empty = base + 16, stages = base + 1024, result = base + 8192;
    const int thread = (int)threadIdx.x, warpgroup = thread / 128;
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
        named_barrier_arrive(1, 256); // the first turn is the first warpgroup's
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
static void a_ring_of_stages(void **state) {
    struct device null = {};
    static float in[STAGE_FLOATS * STEPS] __attribute__((aligned(16))), sums[128] __attribute__((aligned(16)));
    memset(sums, 0, sizeof sums);
    for (int i = 0; i < STAGE_FLOATS * STEPS; i++)
        in[i] = (float)(i % 1000);
    LAUNCH(&null, ring_kernel, 5, 384, 16384, sums, (const float *)in);
    for (int i = 0; i < 128; i++) {
        float expected = 0;
        for (int step = 0; step < STEPS; step++)
            expected += in[step * STAGE_FLOATS + i] + in[step * STAGE_FLOATS + 128 + i];
        assert_true(sums[i] == 5 * expected);
    }
}

static __global__ void chain_kernel(int *flag, float *sum) {
    if (threadIdx.x != 0)
        return;
    while (load_acquire(flag) != (int)blockIdx.x) {
    }
    *sum = *sum * 0.5f + (float)blockIdx.x;
    store_release(flag, (int)blockIdx.x + 1);
}
static void blocks_in_a_chain(void **state) {
    struct device null = {};
    float sum = 1, expected = 1;
    int flag = 0;
    LAUNCH(&null, chain_kernel, 50, 64, 0, &flag, &sum);
    for (int i = 0; i < 50; i++)
        expected = expected * 0.5f + (float)i;
    assert_true(sum == expected && flag == 50);
}

static void the_capability_is_what_is_asked_for(void **state) {
    struct cudaDeviceProp properties;
    cuda_check(cudaGetDeviceProperties(&properties, 0));
    assert_int_equal(properties.major, 8);
    setenv("EMU_CAPABILITY", "9.0", 1);
    cuda_check(cudaGetDeviceProperties(&properties, 0));
    assert_int_equal(properties.major, 9);
    assert_int_equal(properties.minor, 0);
    unsetenv("EMU_CAPABILITY");
}

int main(void) {
    unsetenv("EMU_CAPABILITY");
    const struct CMUnitTest tests[] = {cmocka_unit_test(products),
                                       cmocka_unit_test(boxes),
                                       cmocka_unit_test(a_map_is_checked),
                                       cmocka_unit_test(stmatrix),
                                       cmocka_unit_test(a_ring_of_stages),
                                       cmocka_unit_test(blocks_in_a_chain),
                                       cmocka_unit_test(the_capability_is_what_is_asked_for)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
