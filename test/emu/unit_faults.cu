// What the emulator must find: each fault is planted in a small kernel. The kernel runs in a process of its own, which
// must end with status 3 and a message that names the kernel, the thread and the fault. Without the fault the same
// kernel must pass.
//
//   unit_faults           every fault          unit_faults NAME    only this fault, to see its message
//
// This test is compiled as for the oldest toolkit that the engine supports, so that it calls the functions that only
// old toolkits have.
#define CUDART_VERSION 12040
#include "kernels/device_memory.cuh" // device_allocate, device_upload
#include "kernels/device_queue.cuh"  // device_open
#include "kernels/packed.cuh"        // packed_load
#include "kernels/ptx.cuh"           // shared memory, cp_async, mma
#include "kernels/tensor_map.cuh"    // tensor_map_of
#include "test/apart.h"              // run_with_and_without
#include "test/testing.h"            // cmocka
#include <sys/wait.h>                // WEXITSTATUS

static struct device device;
static const bool healthy = true, faulty = false;

// --- Kernels, each with a fault that an argument asks for
// --------------------------------------------------------------

static __global__ void pack_kernel(floatX *out, const floatX *in) {
    packed_store(out + PACK * threadIdx.x, packed_load(in + PACK * threadIdx.x));
}
static __global__ void scalar_kernel(float *out, int64_t at) { out[at + threadIdx.x] = 1; }

// Passes a word from warp to warp through shared memory.
static __global__ void pass_kernel(float *out, bool barrier) {
    const uint32_t base = shared_memory(), to = base + 4 * threadIdx.x;
    store_shared_float(to, (float)threadIdx.x);
    if (barrier)
        __syncthreads();
    out[threadIdx.x] = load_shared_float(base + 4 * ((threadIdx.x + 32) % blockDim.x));
}
static __global__ void pass_in_warp_kernel(float *out, bool barrier) {
    const uint32_t base = shared_memory();
    store_shared_float(base + 4 * threadIdx.x, (float)threadIdx.x);
    if (barrier)
        __syncwarp();
    out[threadIdx.x] = load_shared_float(base + 4 * (threadIdx.x ^ 1u));
}
// Lets one thread overwrite a word of shared memory that another one has read.
static __global__ void reuse_kernel(float *out, bool barrier) {
    const uint32_t base = shared_memory();
    store_shared_float(base + 4 * threadIdx.x, (float)threadIdx.x);
    __syncthreads();
    out[threadIdx.x] = load_shared_float(base + 4 * (threadIdx.x ^ 32u));
    if (barrier)
        __syncthreads();
    store_shared_float(base + 4 * threadIdx.x, 0.0f);
}
static __global__ void both_write_kernel(bool apart) {
    store_shared_float(shared_memory() + (apart ? 4 * threadIdx.x : 0), (float)threadIdx.x);
}
static __global__ void unwritten_kernel(float *out, bool written) {
    const uint32_t at = shared_memory() + 4 * threadIdx.x;
    if (written)
        store_shared_float(at, 1.0f);
    out[threadIdx.x] = load_shared_float(at);
}
static __global__ void shared_address_kernel(float *out, uint32_t offset) {
    struct float_x4 zeroes = {{0, 0, 0, 0}};
    store_shared_floats(shared_memory() + offset, zeroes);
}
static __global__ void raw_offset_kernel(bool based) {
    store_shared_word((based ? shared_memory() : 0) + 4 * threadIdx.x, 0);
}

enum { COPY_WELL, COPY_WITHOUT_WAIT, COPY_WITHOUT_ANY_WAIT, COPY_WITHOUT_COMMIT, COPY_TWICE };
static __global__ void copy_kernel(float *out, const float *in, int fault) {
    const uint32_t to = shared_memory() + 16 * threadIdx.x;
    cp_async_16(to, in + 4 * threadIdx.x, true);
    if (fault == COPY_TWICE)
        cp_async_16(to, in + 4 * threadIdx.x, true);
    if (fault != COPY_WITHOUT_COMMIT)
        cp_async_commit();
    if (fault == COPY_WITHOUT_ANY_WAIT)
        return;
    if (fault == COPY_WITHOUT_WAIT)
        cp_async_wait<1>();
    else
        cp_async_wait<0>();
    __syncthreads();
    const struct float_x4 four = load_shared_floats(shared_memory() + 16 * (blockDim.x - 1 - threadIdx.x));
    out[threadIdx.x] = four.x[0];
}
static __global__ void copy_from_kernel(const char *in) {
    cp_async_16(shared_memory() + 16 * threadIdx.x, in + 16 * threadIdx.x, true);
    cp_async_commit();
    cp_async_wait<0>();
}

static __global__ void some_leave_kernel(unsigned leave) {
    if (threadIdx.x < leave)
        return;
    __syncthreads();
}
static __global__ void two_barriers_kernel(bool divided) {
    if (divided && threadIdx.x % 32 < 16)
        __syncwarp();
    else
        __syncthreads();
}
static __global__ void two_collectives_kernel(float *out, bool divided) {
    float c[4] = {0, 0, 0, 0};
    const uint32_t a[4] = {0, 0, 0, 0};
    if (divided && threadIdx.x < 16)
        out[threadIdx.x] = __shfl_xor_sync(~0u, 1.0f, 1);
    else
        mma_m16n8k16(c, a, 0, 0);
    out[threadIdx.x] = c[0];
}
static __global__ void half_a_warp_kernel(float *out, unsigned mask) {
    if (threadIdx.x < 16)
        out[threadIdx.x] = __shfl_xor_sync(mask, 1.0f, 1);
}
static __global__ void outside_the_mask_kernel(float *out, unsigned mask, int lane_mask) {
    if (threadIdx.x < 16)
        out[threadIdx.x] = __shfl_xor_sync(mask, 1.0f, lane_mask);
}
static __global__ void three_dimensions_kernel(floatX *out, int shift) {
    packed_store(out + shift * (int)(threadIdx.z * threadIdx.y), packed_load(out));
}
static __global__ void nothing_kernel(int unused) {}

// --- Faults -------------------------------------------------------------------------------------------------------

// Allocates a kernel's memory: 1024 floats.
static float *memory(void) { return (float *)device_allocate(4096); }
static void finish(void) { cuda_check(cudaDeviceSynchronize()); }
static void launch_nothing(dim3 grid, dim3 block, size_t shared) {
    LAUNCH(&device, nothing_kernel, grid, block, shared, 0);
}

static void misaligned_pack(bool well) {
    floatX *x = (floatX *)memory();
    LAUNCH(&device, pack_kernel, 1, 64, 0, x, (const floatX *)x + (well ? 8 : 1));
}
static void pack_past_the_end(bool well) {
    floatX *x = (floatX *)memory();
    LAUNCH(&device, pack_kernel, 1, well ? 256 : 257, 0, x, (const floatX *)x);
}
static void pack_before(bool well) {
    floatX *x = (floatX *)memory();
    LAUNCH(&device, pack_kernel, 1, 4, 0, x - (well ? 0 : 2 * PACK), (const floatX *)x);
}
static void scalars_past_the_end(bool well) {
    LAUNCH(&device, scalar_kernel, 1, 32, 0, memory(), (int64_t)(well ? 992 : 1000));
}
static void scalars_before(bool well) { LAUNCH(&device, scalar_kernel, 1, 32, 0, memory(), (int64_t)(well ? 0 : -32)); }
static void scalars_far_out(bool well) {
    LAUNCH(&device, scalar_kernel, 1, 1, 0, memory(), (int64_t)(well ? 0 : 100000));
}
static void null_pointer(bool well) { LAUNCH(&device, scalar_kernel, 1, 1, 0, well ? memory() : NULL, (int64_t)0); }
static void host_reads(bool well) {
    float x, *at = memory();
    if (well)
        device_download(&x, at, sizeof x, &device);
    else
        x = *(volatile float *)at;
    (void)x;
}
static void copy_too_long(bool well) {
    static char host[8192];
    device_upload(memory(), host, well ? 4096 : 4097, &device);
}
static void wrong_kind_of_copy(bool well) {
    char *pinned = (char *)host_allocate(4096, &device);
    if (well)
        device_upload(memory(), pinned, 4096, &device);
    else
        device_copy(memory(), pinned, 4096, &device);
}
static void read_race(bool well) { LAUNCH(&device, pass_kernel, 1, 64, 256, memory(), well); }
static void read_race_in_warp(bool well) { LAUNCH(&device, pass_in_warp_kernel, 1, 64, 256, memory(), well); }
static void write_after_read(bool well) { LAUNCH(&device, reuse_kernel, 1, 64, 256, memory(), well); }
static void both_write(bool well) { LAUNCH(&device, both_write_kernel, 1, 64, 256, well); }
static void unwritten(bool well) {
    float *x = memory(), first;
    LAUNCH(&device, unwritten_kernel, 1, 64, 256, x, well);
    device_download(&first, x, sizeof first, &device);
    if (isnan(first))
        emu_report("unwritten shared memory gave NaN");
}
static void fresh_memory(bool well) {
    float *x = memory(), first;
    if (well)
        device_zero(x, 4096, &device);
    device_download(&first, x, sizeof first, &device);
    if (isnan(first))
        emu_report("fresh device memory gave NaN");
}
static void misaligned_shared(bool well) {
    LAUNCH(&device, shared_address_kernel, 1, 1, 64, memory(), well ? 16u : 8u);
}
static void past_shared(bool well) { LAUNCH(&device, shared_address_kernel, 1, 1, 64, memory(), well ? 48u : 64u); }
static void raw_offset(bool well) { LAUNCH(&device, raw_offset_kernel, 1, 32, 128, well); }
static void copies(int fault) { LAUNCH(&device, copy_kernel, 1, 64, 1024, memory(), (const float *)memory(), fault); }
static void without_wait(bool well) { copies(well ? COPY_WELL : COPY_WITHOUT_WAIT); }
static void without_any_wait(bool well) { copies(well ? COPY_WELL : COPY_WITHOUT_ANY_WAIT); }
static void without_commit(bool well) { copies(well ? COPY_WELL : COPY_WITHOUT_COMMIT); }
static void copied_twice(bool well) { copies(well ? COPY_WELL : COPY_TWICE); }
static void misaligned_copy(bool well) {
    LAUNCH(&device, copy_from_kernel, 1, 4, 64, (const char *)memory() + (well ? 16 : 8));
}
static void copy_past_the_end(bool well) {
    LAUNCH(&device, copy_from_kernel, 1, 4, 64, (const char *)memory() + (well ? 4096 - 64 : 4096 - 48));
}
static void some_leave(bool well) { LAUNCH(&device, some_leave_kernel, 1, 64, 0, well ? 0u : 5u); }
static void two_barriers(bool well) { LAUNCH(&device, two_barriers_kernel, 1, 64, 0, !well); }
static void two_collectives(bool well) { LAUNCH(&device, two_collectives_kernel, 1, 32, 0, memory(), !well); }
static void half_a_warp(bool well) { LAUNCH(&device, half_a_warp_kernel, 1, 32, 0, memory(), well ? 0xffffu : ~0u); }
static void not_in_mask(bool well) {
    LAUNCH(&device, outside_the_mask_kernel, 1, 32, 0, memory(), well ? 0xffffu : 0xff00u, 1);
}
static void source_not_in_mask(bool well) {
    LAUNCH(&device, outside_the_mask_kernel, 1, 32, 0, memory(), 0xffffu, well ? 8 : 16);
}
static void many_threads(bool well) { launch_nothing(1, dim3(32, well ? 32 : 33), 0); }
static void no_blocks(bool well) { launch_nothing(well ? 1 : 0, 32, 0); }
static void wide_grid(bool well) { launch_nothing(dim3(1, well ? 65535 : 65536), 1, 0); }
static void deep_grid(bool well) { launch_nothing(dim3(1, 1, well ? 65535 : 65536), 1, 0); }
static void much_shared(bool well) {
    static const struct {
        const char *capability;
        int kib;
    } cases[] = {{"8.0", 163}, {"8.6", 99}, {"8.9", 99}, {"9.0", 227}, {"10.0", 227}, {"12.0", 99}};
    for (int i = 0; i < 6; i++) {
        const int most = cases[i].kib * 1024;
        setenv("EMU_CAPABILITY", cases[i].capability, 1);
        if (cudaFuncSetAttribute(nothing_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most + 1) == cudaSuccess)
            emu_report("compute capability %s took more than %d KiB", cases[i].capability, cases[i].kib);
        cuda_check(cudaFuncSetAttribute(nothing_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
        launch_nothing(1, 1, well || i < 5 ? most : most + 1);
    }
}
static void much_shared_unasked(bool well) {
    if (well)
        cuda_check(cudaFuncSetAttribute(nothing_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 50000));
    launch_nothing(1, 1, 50000);
}
static void three_dimensions(bool well) {
    LAUNCH(&device, three_dimensions_kernel, dim3(1, 1, 1), dim3(2, 2, 2), 0, (floatX *)memory(), well ? 0 : 3);
}
static void wait_while_recording(bool well) {
    struct work_graph graph;
    graph_begin(&device);
    launch_nothing(1, 1, 0);
    if (!well)
        device_synchronize(&device);
    graph_end(&graph, &device);
    graph_free(&graph);
}
static void allocate_while_recording(bool well) {
    struct work_graph graph;
    graph_begin(&device);
    if (!well)
        device_allocate(64);
    graph_end(&graph, &device);
    graph_free(&graph);
}

// A second stream, whose work events make a part of a graph.
struct fork {
    cudaStream_t stream;
    cudaEvent_t begun, ended;
    struct device device; // the first device, but with this stream
    struct work_graph graph;
};
static struct fork make_fork(void) {
    struct fork f = {};
    cuda_check(cudaStreamCreateWithFlags(&f.stream, cudaStreamNonBlocking));
    cuda_check(cudaEventCreateWithFlags(&f.begun, cudaEventDisableTiming));
    cuda_check(cudaEventCreateWithFlags(&f.ended, cudaEventDisableTiming));
    f.device = device;
    f.device.stream = f.stream;
    return f;
}
static void pass_event(cudaEvent_t event, cudaStream_t from, cudaStream_t to) {
    cuda_check(cudaEventRecord(event, from));
    cuda_check(cudaStreamWaitEvent(to, event, 0));
}
static void on_fork(struct fork *f) { LAUNCH(&f->device, nothing_kernel, 1, 1, 0, 0); }

static void fork_is_not_joined(bool well) {
    struct fork f = make_fork();
    graph_begin(&device);
    pass_event(f.begun, device.stream, f.stream);
    on_fork(&f);
    if (well)
        pass_event(f.ended, f.stream, device.stream);
    graph_end(&f.graph, &device);
}
static void fork_goes_on_after_its_join(bool well) {
    struct fork f = make_fork();
    graph_begin(&device);
    pass_event(f.begun, device.stream, f.stream);
    on_fork(&f);
    pass_event(f.ended, f.stream, device.stream);
    if (!well)
        on_fork(&f);
    graph_end(&f.graph, &device);
}
static void recording_waits_for_work_outside(bool well) {
    struct fork f = make_fork();
    on_fork(&f);
    cuda_check(cudaEventRecord(f.ended, f.stream));
    if (well)
        cuda_check(cudaStreamWaitEvent(device.stream, f.ended, 0));
    graph_begin(&device);
    if (!well)
        cuda_check(cudaStreamWaitEvent(device.stream, f.ended, 0));
    graph_end(&f.graph, &device);
}
static void recording_waits_for_done_work_outside(bool well) {
    struct fork f = make_fork();
    cuda_check(cudaEventRecord(f.ended, f.stream));
    cuda_check(cudaStreamSynchronize(f.stream));
    graph_begin(&device);
    if (!well)
        cuda_check(cudaStreamWaitEvent(device.stream, f.ended, 0));
    graph_end(&f.graph, &device);
}
static void outside_waits_for_a_recorded_event(bool well) {
    struct fork f = make_fork();
    graph_begin(&device);
    cuda_check(cudaEventRecord(f.begun, device.stream));
    graph_end(&f.graph, &device);
    if (!well)
        cuda_check(cudaStreamWaitEvent(f.stream, f.begun, 0));
}
static void recordings_meet(bool well) {
    struct fork f = make_fork();
    struct work_graph other;
    graph_begin(&device);
    graph_begin(&f.device);
    cuda_check(cudaEventRecord(f.begun, device.stream));
    if (!well)
        cuda_check(cudaStreamWaitEvent(f.stream, f.begun, 0));
    graph_end(&other, &f.device);
    graph_end(&f.graph, &device);
}
static void recording_ends_elsewhere(bool well) {
    struct fork f = make_fork();
    graph_begin(&device);
    pass_event(f.begun, device.stream, f.stream);
    graph_end(&f.graph, well ? &device : &f.device);
}
static void null_stream_while_recording(bool well) {
    struct fork f = make_fork();
    cudaStream_t blocking;
    void *const x = memory();
    cuda_check(cudaStreamCreateWithFlags(&blocking, well ? cudaStreamNonBlocking : cudaStreamDefault));
    f.device.stream = blocking;
    graph_begin(&f.device);
    cuda_check(cudaMemsetAsync(x, 0, 64, NULL));
    graph_end(&f.graph, &f.device);
}
static void misaligned_tensor(bool well) {
    const uint64_t dims[4] = {64, 1, 4, 1}, strides_bytes[3] = {128, 128, 512};
    // It must be used: unit_faults_sm90.cu's bad_map says why.
    const struct tensor_map map = tensor_map_of((const bf16 *)memory() + (well ? 0 : 4), dims, strides_bytes, 64, 4);
    if (map.map.rank != 4)
        fail("a map of %u dimensions", map.map.rank);
}
static void too_much_memory(bool well) {
    setenv("EMU_MEMORY_BYTES", "1000000", 1);
    size_t available = device_free_bytes(&device);
    assert_int_equal(available, 1000000);
    device_allocate(600000);
    assert_int_equal(device_free_bytes(&device), 400000);
    device_allocate(well ? 400000 : 400001);
}

static const struct fault {
    const char *name;
    void (*run)(bool well);
    const char *kernel, *words; // parts of the message
    int status;
} faults[] = {
    {"misaligned_pack", misaligned_pack, "pack_kernel, block (0, 0, 0), thread ", "misaligned read of 16 bytes", 3},
    {"pack_past_the_end", pack_past_the_end, "pack_kernel, block (0, 0, 0), thread 256", "16 bytes past an allocation",
     3},
    {"pack_before", pack_before, "pack_kernel, block (0, 0, 0), thread ", "bytes before an allocation", 3},
    {"scalars_past_the_end", scalars_past_the_end, "kernel scalar_kernel", "wrote memory 0 bytes past the end of", 3},
    {"scalars_before", scalars_before, "kernel scalar_kernel", "before an allocation of 4096 bytes", 3},
    {"scalars_far_out", scalars_far_out, "scalar_kernel, block (0, 0, 0), thread 0", "where there is none", 3},
    {"null_pointer", null_pointer, "scalar_kernel, block (0, 0, 0), thread 0", "where there is none", 3},
    {"host_reads", host_reads, "", "host code touches device memory", 3},
    {"copy_too_long", copy_too_long, "", "a copy writes 4097 bytes", 3},
    {"wrong_kind_of_copy", wrong_kind_of_copy, "", "reads memory of the host", 3},
    {"read_race", read_race, "pass_kernel, block (0, 0, 0), thread ", "before a barrier", 3},
    {"read_race_in_warp", read_race_in_warp, "pass_in_warp_kernel", "before a barrier", 3},
    {"write_after_read", write_after_read, "reuse_kernel", "before a barrier", 3},
    {"both_write", both_write, "both_write_kernel", "two threads write a word", 3},
    {"unwritten", unwritten, "", "unwritten shared memory gave NaN", 3},
    {"fresh_memory", fresh_memory, "", "fresh device memory gave NaN", 3},
    {"misaligned_shared", misaligned_shared, "shared_address_kernel", "misaligned access of 16 bytes, shared address 8",
     3},
    {"past_shared", past_shared, "shared_address_kernel", "past the shared memory", 3},
    {"raw_offset", raw_offset, "raw_offset_kernel", "past the shared memory", 3},
    {"without_wait", without_wait, "copy_kernel", "before its wait", 3},
    {"without_any_wait", without_any_wait, "copy_kernel", "ends with copies under way", 3},
    {"without_commit", without_commit, "copy_kernel", "before its wait", 3},
    {"copied_twice", copied_twice, "copy_kernel", "before its wait", 3},
    {"misaligned_copy", misaligned_copy, "copy_from_kernel", "misaligned global address", 3},
    {"copy_past_the_end", copy_past_the_end, "copy_from_kernel, block (0, 0, 0), thread 3", "past an allocation", 3},
    {"some_leave", some_leave, "some_leave_kernel", "at __syncthreads for threads that never come: thread 0 has ended",
     3},
    {"two_barriers", two_barriers, "two_barriers_kernel", "__syncthreads", 3},
    {"two_collectives", two_collectives, "two_collectives_kernel", "different collectives", 3},
    {"half_a_warp", half_a_warp, "half_a_warp_kernel", "has ended", 3},
    {"not_in_mask", not_in_mask, "outside_the_mask_kernel", "is not in the mask", 3},
    {"source_not_in_mask", source_not_in_mask, "outside_the_mask_kernel", "which is not in its mask", 3},
    {"many_threads", many_threads, "nothing_kernel", "32 x 33 x 1 threads", 3},
    {"no_blocks", no_blocks, "nothing_kernel", "grid of 0 x 1 x 1", 3},
    {"wide_grid", wide_grid, "nothing_kernel", "1 x 65536 x 1", 3},
    {"deep_grid", deep_grid, "nothing_kernel", "1 x 1 x 65536", 3},
    {"much_shared", much_shared, "nothing_kernel", "a block can have 101376", 3},
    {"much_shared_unasked", much_shared_unasked, "nothing_kernel", "without cudaFuncSetAttribute", 3},
    {"three_dimensions", three_dimensions, "three_dimensions_kernel, block (0, 0, 0), thread (", ", 1, 1)", 3},
    {"wait_while_recording", wait_while_recording, "", "not permitted when stream is capturing", EXIT_USAGE},
    {"allocate_while_recording", allocate_while_recording, "", "not permitted when stream is capturing", EXIT_USAGE},
    {"fork_is_not_joined", fork_is_not_joined, "cudaStreamEndCapture", "has unjoined work", EXIT_USAGE},
    {"fork_goes_on_after_its_join", fork_goes_on_after_its_join, "cudaStreamEndCapture", "has unjoined work",
     EXIT_USAGE},
    {"recording_waits_for_work_outside", recording_waits_for_work_outside, "cudaStreamWaitEvent",
     "dependency created on uncaptured work", EXIT_USAGE},
    {"recording_waits_for_done_work_outside", recording_waits_for_done_work_outside, "cudaStreamWaitEvent",
     "dependency created on uncaptured work", EXIT_USAGE},
    {"outside_waits_for_a_recorded_event", outside_waits_for_a_recorded_event, "cudaStreamWaitEvent",
     "an event last recorded in a capturing stream", EXIT_USAGE},
    {"recordings_meet", recordings_meet, "cudaStreamWaitEvent", "merge of separate capture sequences", EXIT_USAGE},
    {"recording_ends_elsewhere", recording_ends_elsewhere, "cudaStreamEndCapture", "not ended in the same stream",
     EXIT_USAGE},
    {"null_stream_while_recording", null_stream_while_recording, "cudaMemsetAsync",
     "would make the legacy stream depend", EXIT_USAGE},
    {"misaligned_tensor", misaligned_tensor, "cuTensorMapEncodeTiled", "error 1 for a view of 64 x 1 x 4 x 1",
     EXIT_USAGE},
    {"too_much_memory", too_much_memory, "", "out of memory; lower --micro-batch-size", EXIT_USAGE},
};
enum { FAULTS = sizeof faults / sizeof *faults };

static void run_fault(const struct fault *fault, bool well) {
    device_open(&device, 0, false);
    fault->run(well);
    finish();
}

static void fault_is_found(void **state) {
    const struct fault *fault = (const struct fault *)*state;
    char message[4096];
    const int status = run_with_and_without(fault->name, message, sizeof message);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != fault->status || !strstr(message, fault->kernel) ||
        !strstr(message, fault->words))
        fail_msg("%s: status %d, expected %d and \"%s\", \"%s\": %s", fault->name, status, fault->status, fault->kernel,
                 fault->words, message);
}

int main(int argc, char **argv) {
    for (int i = 0; argc > 1 && i < FAULTS; i++)
        if (strcmp(argv[1], faults[i].name) == 0) {
            run_fault(&faults[i], argc > 2 ? healthy : faulty);
            return 0;
        }
    RUN_EACH(faults, FAULTS, fault_is_found);
}
