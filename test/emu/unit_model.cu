// What the emulator computes: tensor-core instructions' lane maps against plain matrix products, shuffles, thread and
// block indices, and when work on streams is done.
#include "kernels/device_memory.cuh" // device_allocate, device_upload
#include "kernels/device_queue.cuh"  // device_open, graph_begin
#include "kernels/packed.cuh"        // DEVICE_FUNCTION
#include "kernels/ptx.cuh"           // ldmatrix_x4, mma_m16n8k16
#include "test/testing.h"            // cmocka

static struct device device;
static int set_up(void **state) {
    device_open(&device, 0, false);
    return 0;
}
static int tear_down(void **state) {
    device_close(&device);
    return 0;
}

// --- Lane maps ----------------------------------------------------------------------------------------------------

// c = a b by one mma. The matrices are plain in memory. Fragments are taken element by element, as the PTX ISA numbers
// them: a_i is of row g (i in 0, 1, 4, 5) or g + 8, and of column 2t + i % 2, plus 8 where i >= 4; b_i is of row 2t + i
// % 2, plus 8 where i >= 2, and of column g; c_i is of row g (i < 2) or g + 8, and of column 2t + i % 2.
static __global__ void mma_kernel(float *c, const bf16 *a, const bf16 *b) {
    const int g = (int)threadIdx.x / 4, t = (int)threadIdx.x % 4;
    uint32_t a_words[4] = {0, 0, 0, 0}, b_words[2] = {0, 0};
    float sums[4];
    for (int i = 0; i < 8; i++) {
        const int row = i / 2 % 2 == 0 ? g : g + 8, column = 2 * t + i % 2 + (i >= 4 ? 8 : 0);
        a_words[i / 2] |= (uint32_t)a[row * 16 + column].bits << 16 * (i % 2);
    }
    for (int i = 0; i < 4; i++)
        b_words[i / 2] |= (uint32_t)b[(2 * t + i % 2 + (i >= 2 ? 8 : 0)) * 8 + g].bits << 16 * (i % 2);
    for (int i = 0; i < 4; i++)
        sums[i] = c[(i < 2 ? g : g + 8) * 8 + 2 * t + i % 2];
    mma_m16n8k16(sums, a_words, b_words[0], b_words[1]);
    for (int i = 0; i < 4; i++)
        c[(i < 2 ? g : g + 8) * 8 + 2 * t + i % 2] = sums[i];
}
static void mma_is_a_matrix_product(void **state) {
    bf16 a[16 * 16], b[16 * 8];
    float c[16 * 8];
    double expected[16 * 8];
    uint64_t random = 1;
    for (int i = 0; i < 16 * 16; i++)
        a[i] = bf16_from_float((float)(int)(16 * test_uniform(&random))); // integers, whose sums are exact
    for (int i = 0; i < 16 * 8; i++) {
        b[i] = bf16_from_float((float)(int)(16 * test_uniform(&random)));
        c[i] = (float)i;
    }
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 8; j++) {
            expected[i * 8 + j] = c[i * 8 + j];
            for (int k = 0; k < 16; k++)
                expected[i * 8 + j] += (double)bf16_to_float(a[i * 16 + k]) * bf16_to_float(b[k * 8 + j]);
        }
    struct device null = {};
    LAUNCH(&null, mma_kernel, 1, 32, 0, c, (const bf16 *)a, (const bf16 *)b);
    for (int i = 0; i < 16 * 8; i++)
        assert_true(c[i] == expected[i]);
}

// Returns the shared address of row r of 8 x 8 matrix j; row: 8j + r. The rows are shuffled, so that the test depends
// on no order.
DEVICE_FUNCTION uint32_t matrix_row(int row) { return shared_memory() + 16 * (uint32_t)((5 * row + 3) % 32); }
// Loads four matrices of distinct numbers. out (32, 4): the words that each lane got.
static __global__ void ldmatrix_kernel(uint32_t *out, bool transposed) {
    const int lane = (int)threadIdx.x;
    for (int i = 0; i < 4; i++) {
        const uint32_t first = (uint32_t)(lane * 8 + 2 * i);
        store_shared_word(matrix_row(lane) + 4 * (uint32_t)i, first | (first + 1) << 16);
    }
    __syncwarp();
    const struct word_x4 words = transposed ? ldmatrix_x4_trans(matrix_row(lane)) : ldmatrix_x4(matrix_row(lane));
    for (int j = 0; j < 4; j++)
        out[lane * 4 + j] = words.x[j];
}
static void ldmatrix_gives_each_lane_its_elements(void **state) {
    struct device null = {};
    for (int transposed = 0; transposed < 2; transposed++) {
        uint32_t out[32 * 4];
        LAUNCH(&null, ldmatrix_kernel, 1, 32, 512, out, transposed != 0);
        for (int lane = 0; lane < 32; lane++)
            for (int j = 0; j < 4; j++)
                for (int half = 0; half < 2; half++) {
                    const int g = lane / 4, k = 2 * (lane % 4) + half;
                    const int row = transposed ? k : g, column = transposed ? g : k;
                    assert_int_equal(out[lane * 4 + j] >> 16 * half & 0xffffu, j * 64 + row * 8 + column);
                }
    }
}
// Computes a product as kernels do: a by ldmatrix, b (k, n) by ldmatrix.trans, c by mma.
static __global__ void product_kernel(float *c, const bf16 *a, const bf16 *b) {
    const uint32_t lane = threadIdx.x, a_at = shared_memory(), b_at = a_at + 512;
    cp_async_16(a_at + 16 * lane, a + 8 * lane, true); // row lane / 2, columns from 8 (lane % 2) on
    cp_async_16(b_at + 16 * lane, b + 8 * (lane % 16), lane < 16);
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();
    const struct word_x4 left = ldmatrix_x4(a_at + 32 * (lane % 16) + 16 * (lane / 16));
    const struct word_x4 right = ldmatrix_x4_trans(b_at + 16 * lane);
    float sums[4] = {0, 0, 0, 0};
    mma_m16n8k16(sums, left.x, right.x[0], right.x[1]);
    for (uint32_t i = 0; i < 4; i++)
        c[(lane / 4 + 8 * (i / 2)) * 8 + 2 * (lane % 4) + i % 2] = sums[i] + (float)(right.x[2] | right.x[3]);
}
static void copies_ldmatrix_and_mma_make_a_product(void **state) {
    struct device null = {};
    bf16 *a = (bf16 *)test_alloc(512), *b = (bf16 *)test_alloc(256);
    float c[16 * 8];
    for (int i = 0; i < 256; i++)
        a[i] = bf16_from_float((float)(i % 17 - 8));
    for (int i = 0; i < 128; i++)
        b[i] = bf16_from_float((float)(i % 13 - 6));
    LAUNCH(&null, product_kernel, 1, 32, 1024, c, (const bf16 *)a, (const bf16 *)b);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 8; j++) {
            float expected = 0;
            for (int k = 0; k < 16; k++)
                expected += bf16_to_float(a[i * 16 + k]) * bf16_to_float(b[k * 8 + j]);
            assert_true(c[i * 8 + j] == expected);
        }
    free(a);
    free(b);
}

static __global__ void shuffle_kernel(int *out) {
    const int lane = (int)threadIdx.x % 32, thread = (int)threadIdx.x;
    int *mine = out + thread * 8;
    mine[0] = __shfl_sync(~0u, thread, 5);
    mine[1] = __shfl_xor_sync(~0u, thread, 9);
    mine[2] = __shfl_down_sync(~0u, thread, 3);
    mine[3] = __shfl_up_sync(~0u, thread, 3);
    mine[4] = (int)__ballot_sync(~0u, lane % 3 == 0);
    // two groups of lanes
    mine[5] = lane < 8 ? __shfl_xor_sync(0xffu, thread, 7) : __shfl_sync(0xffffff00u, thread, 31);
    mine[6] = __any_sync(~0u, lane == 7) + 2 * __all_sync(~0u, lane < 31);
    mine[7] = (int)shuffle_xor_double((double)thread + 0.5, 1);
}
static void shuffles(void **state) {
    struct device null = {};
    int out[64 * 8];
    LAUNCH(&null, shuffle_kernel, 1, 64, 0, out);
    uint32_t thirds = 0;
    for (int lane = 0; lane < 32; lane += 3)
        thirds |= 1u << lane;
    for (int thread = 0; thread < 64; thread++) {
        const int lane = thread % 32, warp = thread - lane, *mine = out + thread * 8;
        assert_int_equal(mine[0], warp + 5);
        assert_int_equal(mine[1], warp + (lane ^ 9));
        assert_int_equal(mine[2], lane + 3 < 32 ? thread + 3 : thread);
        assert_int_equal(mine[3], lane >= 3 ? thread - 3 : thread);
        assert_int_equal((uint32_t)mine[4], thirds);
        assert_int_equal(mine[5], lane < 8 ? warp + (lane ^ 7) : warp + 31);
        assert_int_equal(mine[6], 1);
        assert_int_equal(mine[7], thread ^ 1);
    }
}

static __global__ void index_kernel(unsigned *out, unsigned *count) {
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    if (thread % 2 == 0)
        __syncwarp(0x55555555u); // lanes that wait and lanes that don't
    __syncthreads();
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] += block * 1000 + thread;
    atomicAdd(count, 1u);
}
static void every_thread_of_every_block_runs_once(void **state) {
    struct device null = {};
    const dim3 grids[] = {dim3(1), dim3(2), dim3(7, 3, 2), dim3(64), dim3(1, 5)};
    const dim3 blocks[] = {dim3(1), dim3(33), dim3(5, 4, 3), dim3(1024)};
    for (dim3 grid : grids)
        for (dim3 block : blocks) {
            const unsigned threads = block.x * block.y * block.z, n = grid.x * grid.y * grid.z * threads;
            unsigned *out = (unsigned *)calloc(n, sizeof *out), count = 0;
            LAUNCH(&null, index_kernel, grid, block, 0, out, &count);
            assert_int_equal(count, n);
            for (unsigned i = 0; i < n; i++)
                assert_int_equal(out[i], i / threads * 1000 + i % threads);
            free(out);
        }
}

// --- Streams ------------------------------------------------------------------------------------------------------

static __global__ void add_kernel(float *x, float y) { x[threadIdx.x] += y; }
static __global__ void order_kernel(int *first) { atomicCAS(first, -1, (int)(blockIdx.x * blockDim.x + threadIdx.x)); }

static void a_host_buffer_is_read_when_the_host_waits(void **state) {
    float *x = (float *)device_allocate(4), *pinned = (float *)host_allocate(4, &device), result = -1;
    *pinned = 1;
    device_upload(x, pinned, 4, &device);
    *pinned = 2; // too early: the upload has not run yet
    device_download_begin(&result, x, 4, &device);
    assert_true(result == -1); // read too early
    device_synchronize(&device);
    assert_true(result == 2);
    host_free(pinned);
    device_free(x, 4);
}
static void arguments_are_taken_at_the_launch(void **state) {
    float *x = (float *)device_allocate(4), result, y = 3;
    device_zero(x, 4, &device);
    LAUNCH(&device, add_kernel, 1, 1, 0, x, y);
    y = 100;
    LAUNCH(&device, add_kernel, 1, 1, 0, x, y);
    device_download(&result, x, 4, &device);
    assert_true(result == 103);
    device_free(x, 4);
}
static void the_null_stream_and_blocking_launches_run_at_once(void **state) {
    struct device null = {};
    float *x = (float *)test_alloc(4);
    *x = 1;
    LAUNCH(&null, add_kernel, 1, 1, 0, x, 1.0f);
    assert_true(*x == 2);
    LAUNCH(&device, add_kernel, 1, 1, 0, x, 1.0f);
    assert_true(*x == 2);
    setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
    LAUNCH(&device, add_kernel, 1, 1, 0, x, 1.0f);
    assert_true(*x == 4);
    unsetenv("CUDA_LAUNCH_BLOCKING");
    cudaStream_t following;
    cuda_check(cudaStreamCreate(&following));
    struct device other = device;
    other.stream = following;
    LAUNCH(&other, add_kernel, 1, 1, 0, x, 1.0f);
    LAUNCH(&device, add_kernel, 1, 1, 0, x, 1.0f);
    assert_true(*x == 4);
    // comes after the stream that follows NULL, but not after the other one
    LAUNCH(&null, add_kernel, 1, 1, 0, x, 1.0f);
    assert_true(*x == 6);
    device_synchronize(&device);
    assert_true(*x == 7);
    cuda_check(cudaStreamDestroy(following));
    free(x);
}
static void an_event_waits_for_what_precedes_it(void **state) {
    float *x = (float *)test_alloc(4), milliseconds = -1;
    cudaEvent_t begin, end, untimed;
    cudaStream_t other;
    cuda_check(cudaEventCreate(&begin));
    cuda_check(cudaEventCreate(&end));
    cuda_check(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming));
    cuda_check(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    *x = 0;
    cuda_check(cudaEventRecord(begin, device.stream));
    LAUNCH(&device, add_kernel, 1, 1, 0, x, 1.0f);
    device_event_record(&device, 0);
    LAUNCH(&device, add_kernel, 1, 1, 0, x, 1.0f);
    cuda_check(cudaEventRecord(end, device.stream));
    LAUNCH(&device, add_kernel, 1, 1, 0, x, 1.0f);
    assert_int_equal(cudaEventElapsedTime(&milliseconds, begin, end), cudaErrorNotReady);
    device_event_wait(&device, 0);
    assert_true(*x == 1);
    cuda_check(cudaStreamWaitEvent(other, end, 0));
    assert_true(*x == 1);
    cuda_check(cudaStreamSynchronize(other)); // other waits for the event
    assert_true(*x == 2);
    cuda_check(cudaEventElapsedTime(&milliseconds, begin, end));
    assert_true(milliseconds >= 0 && milliseconds < 1e4f);
    int questions = 1;
    while (cudaStreamQuery(device.stream) == cudaErrorNotReady)
        questions++;
    assert_true(*x == 3 && questions == 2);
    cuda_check(cudaEventRecord(untimed, device.stream));
    assert_int_equal(cudaEventElapsedTime(&milliseconds, begin, untimed), cudaErrorInvalidResourceHandle);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidResourceHandle);
    assert_int_equal(cudaGetLastError(), cudaSuccess);
    cuda_check(cudaEventDestroy(begin));
    cuda_check(cudaEventDestroy(end));
    cuda_check(cudaEventDestroy(untimed));
    cuda_check(cudaStreamDestroy(other));
    free(x);
}
static void a_graph_replays_on_what_the_buffers_hold_then(void **state) {
    float *x = (float *)device_allocate(128), *pinned = (float *)host_allocate(4, &device), result[32], y = 10;
    struct work_graph graph = {};
    assert_false(graph_recorded(&graph));
    device_zero(x, 128, &device);
    device_synchronize(&device);
    graph_begin(&device);
    device_upload(x, pinned, 4, &device);
    LAUNCH(&device, add_kernel, 1, 32, 0, x, y);
    graph_end(&graph, &device);
    y = 0;
    assert_true(graph_recorded(&graph));
    device_download(result, x, 128, &device);
    assert_true(result[0] == 0 && result[31] == 0); // only recorded, not run
    for (int i = 1; i <= 3; i++) {
        *pinned = (float)i;
        graph_launch(&graph, &device);
        device_download(result, x, 128, &device);
        assert_true(result[0] == (float)(i + 10) && result[31] == (float)(10 * i));
    }
    graph_launch(&graph, &device);
    graph_free(&graph); // enqueued work still runs
    device_download(result, x, 128, &device);
    assert_true(result[31] == 40);
    host_free(pinned);
    device_free(x, 128);
}
static void a_spoiled_recording_is_reported_at_its_end(void **state) {
    cudaGraph_t graph;
    graph_begin(&device);
    assert_int_equal(cudaStreamSynchronize(device.stream), cudaErrorStreamCaptureUnsupported);
    assert_int_equal(cudaStreamEndCapture(device.stream, &graph), cudaErrorStreamCaptureInvalidated);
    assert_null(graph);
    cudaGetLastError();
    device_synchronize(&device);
}
// Checks that a second stream becomes part of a recording by waiting for an event of it.
static void streams_fork_and_join_in_a_recording(void **state) {
    float *x = (float *)test_alloc(4);
    struct device other = device;
    struct work_graph graph = {};
    cuda_check(cudaStreamCreateWithFlags(&other.stream, cudaStreamNonBlocking));
    *x = 0;
    graph_begin(&device);
    LAUNCH(&device, add_kernel, 1, 1, 0, x, 1.0f);
    device_event_record(&device, 0);
    cuda_check(cudaStreamWaitEvent(other.stream, device.events[0], 0));
    LAUNCH(&other, add_kernel, 1, 1, 0, x, 1.0f);
    device_event_record(&other, 1);
    cuda_check(cudaStreamWaitEvent(device.stream, device.events[1], 0));
    graph_end(&graph, &device);
    cuda_check(cudaStreamSynchronize(other.stream));
    assert_true(*x == 0);
    graph_launch(&graph, &device);
    device_synchronize(&device);
    assert_true(*x == 2);
    graph_free(&graph);
    cuda_check(cudaStreamDestroy(other.stream));
    free(x);
}
// Checks that neither blocks nor the threads of a block run in an order that a program could rely on.
static void no_thread_is_always_the_first(void **state) {
    struct device null = {};
    int first_block = -1, first = -1, thread_is_first = 0;
    LAUNCH(&null, order_kernel, 1000, 1, 0, &first_block);
    for (int i = 0; i < 8; i++) {
        int order[2] = {-1, -1};
        LAUNCH(&null, order_kernel, i + 1, 64, 0, order);
        thread_is_first += order[0] % 64 == 0;
        first = order[0];
    }
    assert_true(first >= 0 && first_block >= 0);
    assert_true(thread_is_first < 8);
}
static void no_device_is_visible(void **state) {
    assert_string_equal(device_unavailable_reason(), "");
    setenv("CUDA_VISIBLE_DEVICES", "", 1);
    assert_string_equal(device_unavailable_reason(), "no CUDA-capable device is detected");
    unsetenv("CUDA_VISIBLE_DEVICES");
    assert_int_equal(cudaGetLastError(), cudaSuccess);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mma_is_a_matrix_product),
        cmocka_unit_test(ldmatrix_gives_each_lane_its_elements),
        cmocka_unit_test(copies_ldmatrix_and_mma_make_a_product),
        cmocka_unit_test(shuffles),
        cmocka_unit_test(every_thread_of_every_block_runs_once),
        cmocka_unit_test(a_host_buffer_is_read_when_the_host_waits),
        cmocka_unit_test(arguments_are_taken_at_the_launch),
        cmocka_unit_test(the_null_stream_and_blocking_launches_run_at_once),
        cmocka_unit_test(an_event_waits_for_what_precedes_it),
        cmocka_unit_test(a_graph_replays_on_what_the_buffers_hold_then),
        cmocka_unit_test(a_spoiled_recording_is_reported_at_its_end),
        cmocka_unit_test(streams_fork_and_join_in_a_recording),
        cmocka_unit_test(no_thread_is_always_the_first),
        cmocka_unit_test(no_device_is_visible),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
