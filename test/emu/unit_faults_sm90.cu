// What the emulator must find of sm_90a's rules, as unit_faults.cu tests other rules: each fault is planted in a small
// kernel that runs in a process of its own; without the fault the same kernel must pass.
//
//   unit_faults_sm90           every fault          unit_faults_sm90 NAME    only this fault, to see its message
#include "kernels/device_memory.cuh" // device_allocate, device_download
#include "kernels/device_queue.cuh"  // device_open
#include "kernels/packed.cuh"        // packed_check
#include "kernels/ptx_sm90.cuh"      // wgmma, TMA, mbarriers
#include "kernels/tensor_map.cuh"    // tensor_map_of
#include "test/apart.h"              // run_with_and_without
#include "test/testing.h"            // cmocka
#include <sys/wait.h>                // WEXITSTATUS

static struct device device;
static float *memory(void) { return (float *)device_allocate(65536); }

// --- mbarriers and loads ------------------------------------------------------------------------------------------

enum {
    WELL,
    NO_WAIT,
    NO_FENCE,
    NO_BARRIER,
    TOO_FEW,
    TOO_MANY,
    ARRIVED_TWICE,
    NO_MBARRIER,
    WRONG_PARITY,
    AS_DATA,
    NOT_ALIGNED,
    PAST_SHARED,
    PAST_GLOBAL,
    TOO_EARLY,
    LATE,
    REUSED,
    NO_POLICY,
    FIRST,
    SECOND,
    THIRD
};

// Loads 1024 bytes by one thread, for all threads to read.
static __global__ void load_kernel(float *out, const float *in, int fault) {
    const uint32_t barrier = shared_memory(), to = barrier + 1024 + (fault == NOT_ALIGNED ? 8 : 0);
    const uint32_t thread = threadIdx.x;
    if (thread == 0) {
        mbarrier_init(barrier, 1);
        if (fault != NO_FENCE)
            mbarrier_init_fence();
    }
    if (fault == TOO_EARLY && thread == 5)
        store_shared_float(to + 4 * 5, 0.0f);
    if (fault != NO_BARRIER)
        __syncthreads();
    if (thread == 0) {
        mbarrier_arrive_expect(barrier, fault == TOO_FEW ? 1008 : fault == TOO_MANY ? 1040 : 1024);
        if (fault == ARRIVED_TWICE)
            mbarrier_arrive(barrier);
        bulk_load(fault == PAST_SHARED ? to + 4096 : to, in + (fault == PAST_GLOBAL ? 16384 - 128 : 0), 1024,
                  fault == NO_MBARRIER ? barrier + 8 : barrier, fault == NO_POLICY ? 2 : l2_evict_first());
    }
    if (fault == AS_DATA && thread == 1)
        store_shared_float(barrier, 0.0f);
    if (fault != NO_WAIT || thread != 3)
        mbarrier_wait(barrier, fault == WRONG_PARITY);
    out[thread] = load_shared_float(to + 4 * thread);
}
// Uses a stage twice: the threads read it and arrive, the loader waits for them.
static __global__ void stage_kernel(float *out, const float *in, int fault) {
    const uint32_t full = shared_memory(), empty = full + 8, stage = full + 1024, thread = threadIdx.x;
    if (thread == 0) {
        mbarrier_init(full, 1);
        mbarrier_init(empty, 64);
        mbarrier_init_fence();
    }
    __syncthreads();
    for (uint32_t i = 0; i < 2; i++) {
        if (thread == 64) {
            if (fault != NO_WAIT)
                mbarrier_wait(empty, 1 - i);
            mbarrier_arrive_expect(full, 1024);
            bulk_load(stage, in + 256 * i, 1024, full);
        } else if (thread < 64) {
            mbarrier_wait(full, i);
            if (fault == TOO_EARLY)
                mbarrier_arrive(empty);
            out[i * 64 + thread] = load_shared_float(stage + 4 * thread);
            if (fault != TOO_EARLY)
                mbarrier_arrive(empty);
        }
    }
}
static __global__ void wait_for_nothing_kernel(bool loaded_last) {
    const uint32_t barrier = shared_memory();
    if (threadIdx.x != 0)
        return;
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
    mbarrier_arrive(barrier);
    mbarrier_wait(barrier, 0);
    if (!loaded_last)
        mbarrier_wait(barrier, 1);
}
static __global__ void unawaited_kernel(const float *in, bool wait) {
    const uint32_t barrier = shared_memory();
    if (threadIdx.x != 0)
        return;
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(barrier, 256);
    bulk_load(barrier + 1024, in, 256, barrier);
    if (wait)
        mbarrier_wait(barrier, 0);
}
static __global__ void box_kernel(const __grid_constant__ struct tensor_map map, int fault) {
    const uint32_t barrier = shared_memory();
    if (threadIdx.x != 0)
        return;
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(barrier, 64 * 8);
    tma_load_4d(barrier + (fault == NOT_ALIGNED ? 1040 : 1024), &map, barrier, 0, 0, fault == TOO_EARLY ? -1 : 0, 0,
                fault == NO_POLICY ? 0 : l2_evict_last());
    mbarrier_wait(barrier, 0);
}

// --- Stores -------------------------------------------------------------------------------------------------------

static __global__ void store_kernel(float *out, int fault) {
    const uint32_t from = shared_memory(), thread = threadIdx.x;
    store_shared_float(from + 4 * thread, (float)thread);
    if (fault != NO_FENCE)
        async_proxy_fence();
    if (fault == LATE)
        store_shared_float(from + 4 * thread, (float)thread); // comes after the fence
    if (fault != NO_BARRIER)
        __syncthreads();
    if (thread == 0) {
        if (fault == TOO_EARLY)
            cp_async_16(from, out + 1024, true); // nobody waits for it
        bulk_store(out + (fault == PAST_GLOBAL   ? 16384 - 60
                          : fault == NOT_ALIGNED ? 1
                                                 : 0),
                   from, 256, fault == NO_POLICY ? 1 : l2_evict_first());
        if (fault == FIRST)
            bulk_store(out, from, 8);
        bulk_commit();
        if (fault != NO_WAIT && fault != REUSED)
            bulk_wait_read<0>();
        if (fault == REUSED)
            store_shared_float(from, 1.0f);
        bulk_wait<0>();
    }
    if (fault != SECOND)
        __syncthreads();
    store_shared_float(from + 4 * thread, 0.0f);
}
// Writes four ones to shared memory, for a bulk store to read; returns their address.
DEVICE_FUNCTION uint32_t sixteen_bytes(void) {
    const uint32_t from = shared_memory();
    for (uint32_t i = 0; i < 4; i++)
        store_shared_float(from + 4 * i, 1.0f);
    async_proxy_fence();
    return from;
}
static __global__ void leave_kernel(float *out, bool wait) {
    if (threadIdx.x != 0)
        return;
    const uint32_t from = sixteen_bytes();
    bulk_store(out, from, 16);
    bulk_commit();
    if (wait)
        bulk_wait_read<0>();
}
static __global__ void release_kernel(float *out, int *flag, bool wait) {
    if (threadIdx.x != 0)
        return;
    const uint32_t from = sixteen_bytes();
    bulk_reduce_add(out, from, 16, l2_evict_last());
    bulk_commit();
    bulk_wait_read<0>();
    if (wait)
        bulk_wait<0>();
    async_proxy_fence_global();
    store_release(flag, 1);
}
// Lets each block wait for the block that is `step` away.
static __global__ void chain_kernel(int *flags, int step) {
    if (threadIdx.x != 0)
        return;
    const int other = (int)blockIdx.x + step;
    while (other >= 0 && other < (int)gridDim.x && load_acquire(flags + other) == 0) {
    }
    store_release(flags + blockIdx.x, 1);
}

// --- Global memory by both proxies --------------------------------------------------------------------------------

// Stores in block 0, and adds to what was stored in block 1.
static __global__ void hand_over_kernel(float *data, int *flag, int fault) {
    if (threadIdx.x != 0)
        return;
    const uint32_t from = sixteen_bytes();
    if (blockIdx.x == 0) {
        bulk_store(data, from, 16);
        bulk_commit();
        bulk_wait<0>();
        if (fault != FIRST)
            async_proxy_fence_global();
        store_release(flag, 1);
        return;
    }
    if (fault == TOO_EARLY)
        async_proxy_fence_global();
    while (fault != NO_WAIT && load_acquire(flag) != 1)
        ;
    if (fault != SECOND && fault != TOO_EARLY)
        async_proxy_fence_global();
    bulk_reduce_add(data, from, 16);
    bulk_commit();
    bulk_wait<0>();
}
// Fills two buffers in turn, by one warp. Two threads, with a buffer each, add them to global memory in the order of
// blocks, as backward adds dQ.
static __global__ void two_buffers_kernel(float *data, int *turns, int fault) {
    const uint32_t full = shared_memory(), empty = full + 16, buffers = full + 128, thread = threadIdx.x;
    const int number = (int)blockIdx.x;
    if (thread == 0) {
        for (uint32_t i = 0; i < 4; i++)
            mbarrier_init(full + 8 * i, 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    for (uint32_t step = thread == 64 ? 1 : 0; step < 4; step += thread < 32 ? 1 : 2) {
        const uint32_t buffer = step % 2, from = buffers + 128 * buffer;
        if (thread < 32) {
            const bool reused = fault == REUSED && step == 3; // waits for the other buffer
            mbarrier_wait(empty + 8 * (reused ? 0 : buffer), reused ? 1 : step / 2 % 2 ^ 1);
            store_shared_float(from + 4 * thread, 1.0f);
            async_proxy_fence();
            __syncwarp();
            if (thread == 0)
                mbarrier_arrive(full + 8 * buffer);
        } else if (thread == 32 || thread == 64) {
            if (number > 0) {
                wait_acquire(turns + (fault == SECOND ? step ^ 1 : step), number);
                async_proxy_fence_global();
            }
            mbarrier_wait(full + 8 * buffer, step / 2 % 2);
            if (number == 0)
                bulk_store(data + 32 * step, from, 128);
            else
                bulk_reduce_add(data + 32 * step, from, 128);
            bulk_commit();
            if (fault == TOO_EARLY)
                mbarrier_arrive(empty + 8 * buffer);
            bulk_wait_read<0>();
            if (fault != TOO_EARLY)
                mbarrier_arrive(empty + 8 * buffer);
            bulk_wait<0>();
            async_proxy_fence_global();
            store_release(turns + step, number + 1);
        }
    }
}
// Adds in any order of blocks, which is allowed. With the fault NO_WAIT one block reads meanwhile.
static __global__ void add_kernel(float *data, float *out, int fault) {
    if (threadIdx.x != 0)
        return;
    const uint32_t from = sixteen_bytes();
    if (fault == NO_WAIT && blockIdx.x == 2) {
        mbarrier_init(from + 16, 1);
        mbarrier_init_fence();
        mbarrier_arrive_expect(from + 16, 16);
        bulk_load(from, data, 16, from + 16);
        mbarrier_wait(from + 16, 0);
    } else {
        bulk_reduce_add(data, from, 16);
        bulk_commit();
        bulk_wait<0>();
    }
    out[blockIdx.x] = load_shared_float(from);
}
// Writes by one thread. A second one loads the same memory by TMA, and stores to it twice; a third one reads it.
static __global__ void both_proxies_kernel(const __grid_constant__ struct tensor_map map, float *data, int fault) {
    const uint32_t barrier = shared_memory(), box = barrier + 1024, thread = threadIdx.x;
    if (thread == 0) {
        mbarrier_init(barrier, 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    if (thread == 0) {
        packed_check(data, true);
        *(float4 *)data = make_float4(1, 2, 3, 4);
        if (fault != NO_FENCE)
            async_proxy_fence_global();
        if (fault == TOO_EARLY) {
            packed_check(data + 4, true);
            *(float4 *)(data + 4) = make_float4(1, 2, 3, 4);
        }
    }
    if (fault != NO_BARRIER)
        __syncthreads();
    if (thread == 32) {
        mbarrier_arrive_expect(barrier, 128);
        tma_load_4d(box, &map, barrier, 0, 0, 0, 0);
        mbarrier_wait(barrier, 0);
        tma_store_4d(&map, box, 0, 0, 0, 0);
        bulk_commit();
        if (fault != REUSED)
            bulk_wait<0>();
        bulk_store(data, box, 128);
        bulk_commit();
        if (fault == LATE)
            bulk_wait_read<0>();
        else
            bulk_wait<0>();
    }
    __syncthreads();
    if (thread == 1) {
        packed_check(data, false);
        const float4 quad = *(const float4 *)data;
        data[1024] = quad.y;
    }
}

// --- wgmma --------------------------------------------------------------------------------------------------------

enum { TILE_BYTES = 8192 }; // 64 rows of 64 columns
enum {
    PRODUCT_WELL,
    WITHOUT_FENCE,
    WITHOUT_SECOND_FENCE,
    WRITTEN_AFTER_FENCE,
    READ_IN_FLIGHT,
    WRITTEN_IN_FLIGHT,
    WITHOUT_COMMIT,
    WITHOUT_WAIT,
    READ_AND_STORED,
    A_CHANGED,
    A_READ,
    A_STORED,
    A_MULTIPLIED,
    A_WRITTEN_AFTER_FENCE,
    WITHOUT_PROXY_FENCE,
    WITHOUT_BARRIER,
    OVERWRITTEN,
    ONE_WARP_LESS,
    ANOTHER_OPERAND,
    NOT_AT_A_ROW,
    K_TOO_FAR,
    ANOTHER_SHAPE,
    SHARED_TOO_SMALL
};
static __global__ void product_kernel(float *out, int fault) {
    const uint32_t a = shared_memory(), b = a + TILE_BYTES, thread = threadIdx.x, scratch = b + TILE_BYTES + 4 * thread;
    for (uint32_t i = thread; i < 2 * TILE_BYTES / 4; i += 128)
        store_shared_word(a + 4 * i, 0x3f803f80);
    if (fault != WITHOUT_PROXY_FENCE)
        async_proxy_fence();
    if (fault != WITHOUT_BARRIER)
        __syncthreads();
    float acc[32], other[32];
    uint32_t left[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80}, copy[4] = {0, 0, 0, 0};
    for (int i = 0; i < 32; i++)
        acc[i] = 0;
    uint64_t da = matrix_descriptor(a, 0, 1024, 1), db = matrix_descriptor(b, 0, 1024, 1);
    if (fault == NOT_AT_A_ROW)
        db = matrix_descriptor(b + 128, 0, 1024, 1);
    if (fault == K_TOO_FAR)
        db = matrix_descriptor(b + 112, 0, 1024, 1);
    if (fault == ANOTHER_OPERAND && thread >= 96)
        db = da;
    if (fault == SHARED_TOO_SMALL)
        db = matrix_descriptor(b + 1024, 0, 1024, 1);
    for (int step = 0; step < 2; step++) {
        if (fault != WITHOUT_FENCE && (fault != WITHOUT_SECOND_FENCE || step == 0))
            wgmma_fence();
        if (fault == WRITTEN_AFTER_FENCE && step == 1)
            acc[3] *= 0.5f;
        if (fault == A_WRITTEN_AFTER_FENCE && step == 1)
            left[1] = 0;
        if (fault == ONE_WARP_LESS && thread >= 96)
            break;
        wgmma_shared<64, false, false>(acc, da, db, true);
        wgmma_registers<64, false>(acc, left, db, true);
        if (fault == ANOTHER_SHAPE)
            wgmma_shared<64, false, false>(other, da, db, false),
                wgmma_shared<32, false, false>(other + 16, da, db, false);
        if (fault != WITHOUT_COMMIT)
            wgmma_commit();
        if (fault == READ_IN_FLIGHT)
            out[thread] = acc[5];
        if (fault == WRITTEN_IN_FLIGHT)
            acc[5] = 0;
        if (fault == READ_AND_STORED)
            store_shared_float(scratch, acc[5]);
        if (fault == A_CHANGED)
            left[2]++;
        if (fault == A_READ)
            store_shared_word(scratch, pack_bf16x2(0.0f, 1.0f - __uint_as_float(left[2] << 16)));
        if (fault == A_STORED)
            store_shared_word(scratch, left[3]);
        if (fault == A_MULTIPLIED) {
            memcpy(copy, left, sizeof copy);
            wgmma_fence();
            wgmma_registers<64, false>(acc, copy, db, true);
            wgmma_commit();
        }
        if (fault == OVERWRITTEN)
            store_shared_word(b + 4 * thread, 0);
        if (fault != WITHOUT_WAIT || step == 0)
            wgmma_wait<0>();
        wgmma_hold<32>(acc);
    }
    if (fault != READ_IN_FLIGHT)
        out[thread] = acc[5];
}
// Lets TMA refill a stage that wgmma reads: the arrival must come after wgmma_wait.
static __global__ void refill_kernel(float *out, const float *in, int fault) {
    const uint32_t base = shared_memory(), full = base, empty = base + 8, begun = base + 16, stage = base + 1024;
    const uint32_t thread = threadIdx.x;
    if (thread == 0) {
        mbarrier_init(full, 1);
        mbarrier_init(begun, 1);
        mbarrier_init(empty, 4);
        mbarrier_init_fence();
    }
    __syncthreads();
    if (thread >= 128) {
        if (thread == 128)
            for (uint32_t i = 0; i < 3; i++) {
                mbarrier_wait(empty, 1 - i % 2);
                mbarrier_arrive_expect(full, TILE_BYTES);
                bulk_load(stage, in, TILE_BYTES, full);
                if (i == 0)
                    mbarrier_arrive(begun);
            }
        return;
    }
    float acc[32];
    for (uint32_t i = 0; i < 3; i++) {
        if (fault == THIRD && thread >= 96 && i == 0)
            mbarrier_wait(begun, 0); // comes after the load was issued, but not after it has landed
        else if (fault != NO_WAIT || i > 0)
            mbarrier_wait(full, i % 2);
        wgmma_fence();
        const uint64_t both = matrix_descriptor(stage, 0, 1024, 1);
        wgmma_shared<64, false, true>(acc, both, both, i > 0);
        wgmma_commit();
        if (fault == TOO_EARLY && thread % 32 == 0)
            mbarrier_arrive(empty);
        wgmma_wait<0>();
        if (fault != TOO_EARLY && thread % 32 == 0)
            mbarrier_arrive(empty);
    }
    out[thread] = acc[0];
}

// Releases an operand of three products after the last of them, and refills it meanwhile, as forward does with its
// queries.
static __global__ void queries_kernel(float *out, const float *in, int fault) {
    const uint32_t full = shared_memory(), empty = full + 8, stage = full + 1024, thread = threadIdx.x;
    const uint64_t both = matrix_descriptor(stage, 0, 1024, 1);
    float acc[32];
    if (thread == 0) {
        mbarrier_init(full, 1);
        mbarrier_init(empty, 4);
        mbarrier_init_fence();
    }
    __syncthreads();
    for (uint32_t i = 0; i < 2; i++) {
        if (thread == 128) {
            if (fault != NO_WAIT)
                mbarrier_wait(empty, 1 - i);
            mbarrier_arrive_expect(full, TILE_BYTES);
            bulk_load(stage, in, TILE_BYTES, full, l2_evict_first());
        }
        if (thread >= 128)
            continue;
        mbarrier_wait(full, i);
        for (int k = 0; k < 3; k++) {
            wgmma_fence();
            wgmma_shared<64, false, false>(acc, both, both, k > 0);
            wgmma_commit();
            if (fault == TOO_EARLY && k == 2 && elect_one())
                mbarrier_arrive(empty);
            wgmma_wait<0>();
            if (fault == FIRST && k == 1 && elect_one())
                mbarrier_arrive(empty);
        }
        if (fault != TOO_EARLY && fault != FIRST && elect_one())
            mbarrier_arrive(empty);
        out[thread] = acc[0];
    }
}
// Lets one warp store the same place twice by bulk copies, as forward stores O.
static __global__ void place_kernel(float *out, int fault) {
    const uint32_t from = shared_memory(), lane = threadIdx.x;
    for (uint32_t i = 0; i < 2; i++) {
        if (fault != NO_WAIT && elect_one())
            bulk_wait_read<0>();
        if (fault != NO_BARRIER)
            __syncwarp();
        store_shared_float(from + 4 * lane, (float)i);
        if (fault != NO_FENCE)
            async_proxy_fence();
        if (fault != SECOND)
            __syncwarp();
        if (elect_one()) {
            bulk_store(out + 32 * i, from, 128);
            bulk_commit();
        }
    }
    if (fault != LATE && elect_one())
        bulk_wait_read<0>();
}

// --- Named barriers, setmaxnreg -----------------------------------------------------------------------------------

static __global__ void named_kernel(float *out, int fault) {
    const uint32_t base = shared_memory(), thread = threadIdx.x;
    store_shared_float(base + 4 * thread, 1.0f);
    if (thread < 64) {
        if (fault == NO_BARRIER)
            out[thread] = load_shared_float(base + 4 * (thread ^ 32));
        named_barrier_sync(fault == SECOND && thread >= 32 ? 2 : fault == THIRD ? 0 : 1, 64);
        out[thread] = load_shared_float(base + 4 * (fault == FIRST ? thread + 64 : thread ^ 32));
    } else if (fault == LATE && thread < 96) {
        named_barrier_sync(3, 64);
    } else if (fault == WRONG_PARITY && thread < 96) {
        named_barrier_arrive(3, 64);
    } else if (fault == TOO_MANY && thread < 96) {
        named_barrier_arrive(3, 64);
        named_barrier_arrive(3, 64);
    }
}
// Lets threads only arrive at a named barrier: they do not see what the others did.
static __global__ void arrive_kernel(float *out, bool sync) {
    const uint32_t base = shared_memory(), thread = threadIdx.x;
    store_shared_float(base + 4 * thread, 1.0f);
    if (thread < 32 || sync)
        named_barrier_sync(1, 64);
    else
        named_barrier_arrive(1, 64);
    out[thread] = load_shared_float(base + 4 * (thread ^ 32));
}
static __global__ void registers_kernel(int fault) {
    const int warpgroup = (int)threadIdx.x / 128;
    if (warpgroup == 0) {
        if (fault == FIRST) {
            registers_increase<24>();
        } else if (fault != SECOND && (fault != THIRD || threadIdx.x >= 32)) {
            registers_decrease<24>();
        }
    } else {
        registers_increase<240>();
    }
}

// --- Faults -------------------------------------------------------------------------------------------------------

static void load(int fault) { LAUNCH(&device, load_kernel, 1, 256, 4096, memory(), (const float *)memory(), fault); }
static void stage(int fault) { LAUNCH(&device, stage_kernel, 1, 96, 4096, memory(), (const float *)memory(), fault); }
static void wait_for_nothing(int fault) { LAUNCH(&device, wait_for_nothing_kernel, 1, 32, 64, fault == WELL); }
static void unawaited(int fault) {
    LAUNCH(&device, unawaited_kernel, 1, 32, 2048, (const float *)memory(), fault == WELL);
}
static void box(int fault) {
    const uint64_t dims[4] = {64, 1, fault == PAST_GLOBAL ? 1024u : 64u, 1}, strides[3] = {128, 128, 8192};
    const bf16 *base = (const bf16 *)memory() + (fault == PAST_GLOBAL ? 32768 - 64 : 0);
    const struct tensor_map map = tensor_map_of(base, dims, strides, 64, 4);
    LAUNCH(&device, box_kernel, 1, 32, 4096, map, fault);
}
static void bad_map(int fault) {
    const uint64_t dims[4] = {64, 1, 64, 1}, strides[3] = {128, fault == WELL ? 128u : 120u, 8192};
    // It must be used: gcc 12 does not align the temporary of an ignored result to the 64 bytes that a map needs.
    const struct tensor_map map = tensor_map_of((const bf16 *)memory(), dims, strides, 64, 4);
    if (map.map.rank != 4)
        fail("a map of %u dimensions", map.map.rank);
}
static void store(int fault) { LAUNCH(&device, store_kernel, 1, 64, 1024, memory(), fault); }
static void leave(int fault) { LAUNCH(&device, leave_kernel, 1, 32, 64, memory(), fault == WELL); }
static void release(int fault) {
    int *flag = (int *)memory();
    LAUNCH(&device, release_kernel, 1, 32, 64, memory(), flag, fault == WELL);
}
static void chain(int fault) {
    int *flags = (int *)memory();
    device_zero(flags, 65536, &device);
    LAUNCH(&device, chain_kernel, 9, 32, 0, flags, fault == WELL ? -1 : 1);
}
static void hand_over(int fault) {
    float *data = memory();
    device_zero(data, 65536, &device);
    LAUNCH(&device, hand_over_kernel, 2, 32, 64, data, (int *)(data + 1024), fault);
}
static void two_buffers(int fault) {
    float *data = memory(), x[128];
    device_zero(data, 65536, &device);
    LAUNCH(&device, two_buffers_kernel, 2, 96, 1024, data, (int *)(data + 1024), fault);
    device_download(x, data, sizeof x, &device);
    for (int i = 0; fault == WELL && i < 128; i++)
        if (x[i] != 2)
            emu_report("the sum of two blocks is %g", x[i]);
}
static void add(int fault) {
    float *data = memory();
    device_zero(data, 65536, &device);
    LAUNCH(&device, add_kernel, 3, 32, 64, data, data + 1024, fault);
}
static void both_proxies(int fault) {
    float *data = memory(), x[1025];
    const uint64_t dims[4] = {64, 1, 64, 1}, strides[3] = {128, 128, 8192};
    const struct tensor_map map = tensor_map_of((const bf16 *)data, dims, strides, 64, 1);
    device_zero(data, 65536, &device);
    LAUNCH(&device, both_proxies_kernel, 1, 64, 2048, map, data, fault);
    device_download(x, data, sizeof x, &device);
    if (fault == WELL && x[1024] != 2)
        emu_report("%g came by way of TMA", x[1024]);
}
static void product(int fault) {
    float *out = memory(), x[128];
    LAUNCH(&device, product_kernel, 1, 128, 2 * TILE_BYTES + 512, out, fault);
    device_download(x, out, sizeof x, &device);
    if (isnan(x[7]))
        emu_report("an accumulator in flight gave NaN");
    if (fault == PRODUCT_WELL && x[7] != 64)
        emu_report("the product is %g", x[7]);
}
static void refill(int fault) {
    LAUNCH(&device, refill_kernel, 1, 160 + 96, 1024 + TILE_BYTES, memory(), (const float *)memory(), fault);
}
static void queries(int fault) {
    LAUNCH(&device, queries_kernel, 1, 256, 1024 + TILE_BYTES, memory(), (const float *)memory(), fault);
}
static void place(int fault) { LAUNCH(&device, place_kernel, 1, 32, 128, memory(), fault); }
static void named(int fault) { LAUNCH(&device, named_kernel, 1, 128, 1024, memory(), fault); }
static void arrive(int fault) { LAUNCH(&device, arrive_kernel, 1, 64, 1024, memory(), fault == WELL); }
static void set_registers(int fault) { LAUNCH(&device, registers_kernel, 1, 384, 0, fault); }

static const struct fault {
    const char *name;
    void (*run)(int fault);
    int fault;
    const char *words; // a part of the message
} faults[] = {
    {"load_without_wait", load, NO_WAIT, "load_kernel, block (0, 0, 0), thread 3: "},
    {"load_without_init_fence", load, NO_FENCE, "without mbarrier_init_fence"},
    {"load_without_barrier", load, NO_BARRIER, "mbarrier"},
    {"load_expects_too_few", load, TOO_FEW, "lacks 0 of 1 arrivals, expects 1008 bytes and was sent 1024"},
    {"load_expects_too_many", load, TOO_MANY, "lacks 0 of 1 arrivals, expects 1040 bytes and was sent 1024"},
    {"arrives_too_often", load, ARRIVED_TWICE, "all of whose 1 arrivals"},
    {"no_mbarrier", load, NO_MBARRIER, "where no mbarrier is"},
    {"wrong_parity", load, WRONG_PARITY, "shared address"},
    {"mbarrier_as_data", load, AS_DATA, "touches an mbarrier as if it were data"},
    {"load_not_aligned", load, NOT_ALIGNED, "must be multiples of 16"},
    {"load_past_shared", load, PAST_SHARED, "past the shared memory"},
    {"load_past_global", load, PAST_GLOBAL, "past an allocation"},
    {"load_over_a_store", load, TOO_EARLY, "without async_proxy_fence"},
    {"refilled_without_empty", stage, NO_WAIT, "writes what TMA wrote, without having waited"},
    {"read_after_arrival", stage, TOO_EARLY, "shared address"},
    {"waits_for_ever", wait_for_nothing, NO_WAIT, "waits at mbarrier_wait for ever: phase 1 "},
    {"load_nobody_waits_for", unawaited, NO_WAIT, "that nobody waited for"},
    {"box_not_aligned", box, NOT_ALIGNED, "no multiple of 128"},
    {"box_past_memory", box, PAST_GLOBAL, "a TMA load reads"},
    {"load_without_policy", load, NO_POLICY, "a bulk load with 0x2 for a policy of the L2 cache"},
    {"box_before_the_tensor", box, TOO_EARLY, "begins before the tensor"},
    {"box_without_policy", box, NO_POLICY, "a TMA load with 0 for a policy of the L2 cache"},
    {"store_without_policy", store, NO_POLICY, "a bulk store with 0x1 for a policy of the L2 cache"},
    {"map_of_odd_strides", bad_map, NOT_ALIGNED, "cuTensorMapEncodeTiled"},
    {"store_without_proxy_fence", store, NO_FENCE, "without async_proxy_fence"},
    {"store_after_proxy_fence", store, LATE, "without async_proxy_fence"},
    {"store_without_barrier", store, NO_BARRIER, "what a bulk store may still read"},
    {"store_reused_before_read", store, REUSED, "what a bulk store may still read"},
    {"store_reused_by_others", store, SECOND, "shared address"},
    {"store_of_a_copy_in_flight", store, TOO_EARLY,
     "a bulk store touches what an asynchronous copy is to write, before its wait"},
    {"store_past_global", store, PAST_GLOBAL, "past an allocation"},
    {"store_not_aligned", store, NOT_ALIGNED, "must be multiples of 16"},
    {"store_of_8_bytes", store, FIRST, "must be multiples of 16"},
    {"leaves_while_read", leave, NO_WAIT, "still read shared memory"},
    {"releases_too_early", release, NO_WAIT, "while bulk stores of its own are under way"},
    {"waits_for_a_later_block", chain, LATE, "all blocks of lower index are done"},
    {"handed_over_without_fence", hand_over, FIRST, "without async_proxy_fence_global since bulk_wait"},
    {"acquired_without_fence", hand_over, SECOND, "without async_proxy_fence_global since load_acquire"},
    {"acquired_after_the_fence", hand_over, TOO_EARLY, "without async_proxy_fence_global since load_acquire"},
    {"not_acquired", hand_over, NO_WAIT, "without load_acquire of what it released after that"},
    {"second_buffer_reused_before_read", two_buffers, REUSED, "what a bulk store may still read"},
    {"second_buffer_given_back_before_read", two_buffers, TOO_EARLY, "what a bulk store may still read"},
    {"turn_of_another_step", two_buffers, SECOND, "without load_acquire of what it released after that"},
    {"read_while_others_add", add, NO_WAIT, "without load_acquire of what it released after that"},
    {"global_without_proxy_fence", both_proxies, NO_FENCE,
     "a TMA load touches what thread 0 wrote, without async_proxy_fence_global since the write"},
    {"global_after_proxy_fence", both_proxies, TOO_EARLY, "without async_proxy_fence_global since the write"},
    {"global_without_barrier", both_proxies, NO_BARRIER, "global address"},
    {"global_stored_over", both_proxies, REUSED, "a bulk store touches what a bulk store of thread 32 wrote"},
    {"global_read_before_bulk_wait", both_proxies, LATE, "without having seen its bulk_wait"},
    {"wgmma_without_fence", product, WITHOUT_FENCE, "without a wgmma_fence since the kernel began"},
    {"wgmma_without_second_fence", product, WITHOUT_SECOND_FENCE, "that wgmma_wait gave, without wgmma_fence"},
    {"accumulator_written_after_fence", product, WRITTEN_AFTER_FENCE,
     "accumulator that was written after the last wgmma_fence"},
    {"accumulator_read_in_flight", product, READ_IN_FLIGHT, "in flight gave NaN"},
    {"accumulator_written_in_flight", product, WRITTEN_IN_FLIGHT, "writes an accumulator of a wgmma in flight"},
    {"wgmma_without_commit", product, WITHOUT_COMMIT, "thread"},
    {"wgmma_without_wait", product, WITHOUT_WAIT, "ends with a wgmma under way"},
    {"accumulator_stored_in_flight", product, READ_AND_STORED, "stores what it read from an accumulator or A register"},
    {"a_read_in_flight", product, A_READ, "rounds what it read from an accumulator or A register of a wgmma in flight"},
    {"a_stored_in_flight", product, A_STORED, "stores what it read from an accumulator or A register"},
    {"a_multiplied_in_flight", product, A_MULTIPLIED, "multiplies what it read from an accumulator or A register"},
    {"a_changed_in_flight", product, A_CHANGED, "changes the A registers of a wgmma in flight"},
    {"a_written_after_fence", product, A_WRITTEN_AFTER_FENCE,
     "A registers that were written after the last wgmma_fence"},
    {"wgmma_without_proxy_fence", product, WITHOUT_PROXY_FENCE, "a wgmma touches what thread"},
    {"wgmma_without_barrier", product, WITHOUT_BARRIER, "what a wgmma of warpgroup 0 may still read"},
    {"wgmma_operand_overwritten", product, OVERWRITTEN, "what a wgmma of warpgroup 0 may still read"},
    {"wgmma_of_three_warps", product, ONE_WARP_LESS, "has ended"},
    {"wgmma_of_two_kinds", product, ANOTHER_OPERAND, "issue different wgmmas"},
    {"wgmma_operand_not_at_a_row", product, NOT_AT_A_ROW, "not in the first row of a swizzle's"},
    {"wgmma_k_too_far", product, K_TOO_FAR, "or k goes past it"},
    {"wgmma_of_another_shape", product, ANOTHER_SHAPE, "overlap those of another shape"},
    {"wgmma_past_shared", product, SHARED_TOO_SMALL, "a wgmma goes past the shared memory"},
    {"wgmma_without_mbarrier_wait", refill, NO_WAIT, "what a wgmma of warpgroup 0 may still read"},
    {"wgmma_of_a_warp_that_did_not_wait", refill, THIRD, "reads what TMA wrote, without having waited"},
    {"arrives_before_wgmma_wait", refill, TOO_EARLY, "what a wgmma of warpgroup 0 may still read"},
    {"queries_refilled_unasked", queries, NO_WAIT, "writes what TMA wrote, without having waited"},
    {"queries_released_before_wgmma_wait", queries, TOO_EARLY, "what a wgmma of warpgroup 0 may still read"},
    {"queries_released_before_the_last_product", queries, FIRST, "what a wgmma of warpgroup 0 may still read"},
    {"place_overwritten", place, NO_WAIT, "what a bulk store may still read"},
    {"place_overwritten_by_other_lanes", place, NO_BARRIER, "what a bulk store may still read"},
    {"place_without_proxy_fence", place, NO_FENCE, "without async_proxy_fence"},
    {"place_copied_before_all_lanes_wrote", place, SECOND, "reads what another thread wrote before a barrier"},
    {"place_left_while_read", place, LATE, "still read shared memory"},
    {"named_barrier_missing", named, NO_BARRIER, "before a barrier"},
    {"named_barrier_of_others", named, FIRST, "before a barrier"},
    {"named_barriers_of_two_kinds", named, SECOND, "named_barrier_sync for threads that never come"},
    {"named_barrier_zero", named, THIRD, "1 to 15"},
    {"named_barrier_in_vain", named, LATE, "named_barrier_sync for threads that never come"},
    {"named_barrier_left_open", named, WRONG_PARITY, "lacking 32 of 64 threads"},
    {"named_barrier_twice", named, TOO_MANY, "again before all others came"},
    {"arrival_is_no_wait", arrive, NO_WAIT, "before a barrier"},
    {"registers_the_wrong_way", set_registers, FIRST, "increases 168 registers a thread to 24"},
    {"registers_nobody_gave", set_registers, SECOND, "setmaxnreg for threads that never come"},
    {"registers_of_three_warps", set_registers, THIRD, "setmaxnreg"},
};
enum { FAULTS = sizeof faults / sizeof *faults };

static void fault_is_found(void **state) {
    const struct fault *fault = (const struct fault *)*state;
    char message[4096];
    const int status = run_with_and_without(fault->name, message, sizeof message);
    const int expected = fault->run == bad_map ? EXIT_USAGE : 3;
    if (!WIFEXITED(status) || WEXITSTATUS(status) != expected || !strstr(message, fault->words))
        fail_msg("%s: status %d, expected %d and \"%s\": %s", fault->name, status, expected, fault->words, message);
}

int main(int argc, char **argv) {
    for (int i = 0; argc > 1 && i < FAULTS; i++)
        if (strcmp(argv[1], faults[i].name) == 0) {
            device_open(&device, 0, false);
            faults[i].run(argc > 2 ? (int)WELL : faults[i].fault);
            cuda_check(cudaDeviceSynchronize());
            return 0;
        }
    RUN_EACH(faults, FAULTS, fault_is_found);
}
