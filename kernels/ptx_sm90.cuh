// The instructions of sm_90a that kernels/ptx.cuh has not, each beside its model on the host (test/emu/async.h).
//
// Two kinds of access meet in shared memory: the generic proxy's (ordinary loads and stores, ldmatrix, stmatrix) and
// the async proxy's (TMA, bulk copies, wgmma). The async proxy sees what the generic proxy wrote after each thread that
// wrote has called async_proxy_fence, and then a barrier.
//
// The order of wgmma: wgmma_fence before the first one and after any write to registers that it uses; wgmma_commit;
// wgmma_wait. Until then nobody touches its accumulators and its A registers, nor writes the shared memory that it
// reads. The compiler does not know this of registers: wgmma_hold keeps it from moving their accesses across.
//
// Bodies of kernels that use these stand under
//   #if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(CUDA_EMULATED)
#pragma once
#include "kernels/ptx.cuh"        // PTX_FUNCTION, struct word_x4
#include "kernels/wait_limit.cuh" // device_wait_record, wait_place

#if defined(__CUDACC__) || defined(CUDA_EMULATED)

struct tensor_map; // kernels/tensor_map.cuh

// --- Waits that may take too long: kernels/wait_limit.cuh -----------------------------------------------------------

#if defined(__CUDACC__) && defined(DEVICE_WAIT_LIMIT)
// Repeats LOOK until it sets `found`, for WAIT_LIMIT_NS (%2); then the first thread to give up leaves a wait_record and
// traps. %0: the address, which STORE_ADDRESS stores; MBARRIER: 1 or 0; %1: what is awaited; FOUND: what was there; %3:
// the place. Takes few registers: the warps that copy have 24. One asm, whose other ends ptxas sees to be dead: else
// ptxas would not let wgmmas run past it. clang-format takes what stands between two strings for an expression.
// clang-format off
#define PTX_WAIT(LOOK, MBARRIER, STORE_ADDRESS, FOUND)                                                                 \
    "{\n\t.reg .pred found, soon;\n\t.reg .b32 now, begin, seen;\n\t.reg .b64 record;\n\t" LOOK                        \
    "@found bra done;\n\tmov.u32 begin, %%globaltimer_lo;\n"                                                           \
    "again:\n\t" LOOK "@found bra done;\n\t"                                                                           \
    "mov.u32 now, %%globaltimer_lo;\n\tsub.u32 now, now, begin;\n\tsetp.lt.u32 soon, now, %2;\n\t@soon bra again;\n\t" \
    "atom.global.exch.b32 now, [device_wait_taken], 1;\n\tsetp.ne.s32 soon, now, 0;\n\t@soon bra others;\n\t"          \
    "ld.global.b64 record, [device_wait_record];\n\t" STORE_ADDRESS                                                    \
    PTX_STORE(#MBARRIER, 8)                                                                                            \
    PTX_STORE("%1", 12)                                                                                                \
    PTX_STORE(#FOUND, 16)                                                                                              \
    PTX_STORE_SPECIAL(ctaid.x, 20)                                                                                     \
    PTX_STORE_SPECIAL(ctaid.y, 24)                                                                                     \
    PTX_STORE_SPECIAL(ctaid.z, 28)                                                                                     \
    PTX_STORE_SPECIAL(tid.x, 32)                                                                                       \
    PTX_STORE_SPECIAL(tid.y, 36)                                                                                       \
    PTX_STORE_SPECIAL(tid.z, 40)                                                                                       \
    PTX_STORE("%3", 44)                                                                                                \
    "fence.sc.sys;\n\ttrap;\n\texit;\n"                                                                                \
    "others:\n\tnanosleep.u32 1000;\n\tbra others;\n"                                                                \
    "done:\n\t}"
// clang-format on
// `what` is a string already: # would quote the operand as a formatter leaves it, "% 1".
#define PTX_STORE(what, offset) "st.global.b32 [record+" #offset "], " what ";\n\t"
#define PTX_STORE_SPECIAL(name, offset) "mov.u32 now, %%" #name ";\n\t" PTX_STORE("now", offset)
#define mbarrier_wait(barrier, parity) mbarrier_wait_at<wait_place(__FILE__, __LINE__)>(barrier, parity)
#define wait_acquire(at, value) wait_acquire_at<wait_place(__FILE__, __LINE__)>(at, value)
#endif

// --- mbarriers: 8 bytes of shared memory each ---------------------------------------------------------------------

// Sets up a barrier, by one thread, before mbarrier_init_fence. A phase ends with `arrivals` arrivals and all bytes.
PTX_FUNCTION void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
#if defined(__CUDACC__)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#else
    emu_mbarrier_init(barrier, arrivals);
#endif
}
// Publishes to TMA the barriers that this thread initialized, before the __syncthreads after which others use them.
PTX_FUNCTION void mbarrier_init_fence(void) {
#if defined(__CUDACC__)
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#else
    emu_mbarrier_init_fence();
#endif
}
// Counts one arrival in the current phase. Whoever then waits for the phase sees what this thread wrote before.
PTX_FUNCTION void mbarrier_arrive(uint32_t barrier) {
#if defined(__CUDACC__)
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#else
    emu_mbarrier_arrive(barrier, 0);
#endif
}
// Counts one arrival in the current phase, and lets it complete only when `bytes` more bytes have landed.
PTX_FUNCTION void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
#if defined(__CUDACC__)
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
#else
    emu_mbarrier_arrive(barrier, bytes);
#endif
}
#if defined(__CUDACC__) && defined(DEVICE_WAIT_LIMIT)
// Does mbarrier_wait, a macro that calls this; after WAIT_LIMIT_NS leaves a wait_record and traps. PLACE: a wait_place.
template <int PLACE> PTX_FUNCTION void mbarrier_wait_at(uint32_t barrier, uint32_t parity) {
    asm volatile(PTX_WAIT("mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 found, [%0], %1;\n\t", 1,
                          PTX_STORE("%0", 0) PTX_STORE("0", 4), 0)::"r"(barrier),
                 "r"(parity), "n"((unsigned)WAIT_LIMIT_NS), "n"(PLACE)
                 : "memory");
}
#else
// Waits until the phase of that parity is complete: 0 for the first phase, 1 for the second, 0 for the third, ... A
// barrier that has completed none counts as having completed a phase of parity 1.
PTX_FUNCTION void mbarrier_wait(uint32_t barrier, uint32_t parity) {
#if defined(__CUDACC__)
    asm volatile("{\n\t"
                 ".reg .pred complete;\n"
                 "again:\n\t"
                 "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 complete, [%0], %1;\n\t"
                 "@complete bra done;\n\t"
                 "bra again;\n"
                 "done:\n\t"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
#else
    emu_mbarrier_wait(barrier, parity);
#endif
}
#endif

// --- TMA and bulk copies: by one thread ---------------------------------------------------------------------------

// Brings the map to the cache that TMA reads it from, ahead of the first copy; one thread calls. It is a hint.
PTX_FUNCTION void tma_prefetch_map(const struct tensor_map *map) {
#if defined(__CUDACC__)
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}
// Returns a policy by which the L2 cache replaces a copy's lines before all others. It is a hint.
PTX_FUNCTION uint64_t l2_evict_first(void) {
#if defined(__CUDACC__)
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
#else
    return EMU_EVICT_FIRST;
#endif
}
// Returns a policy for copies by which the L2 cache replaces their lines after all others. It is a hint.
PTX_FUNCTION uint64_t l2_evict_last(void) {
#if defined(__CUDACC__)
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
#else
    return EMU_EVICT_LAST;
#endif
}
// Returns l2_evict_last's policy, made anew at each call: attention's backward would spill one kept in a register.
PTX_FUNCTION uint64_t l2_evict_last_anew(void) {
#if defined(__CUDACC__)
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
#else
    return EMU_EVICT_LAST;
#endif
}
// Begins to copy the map's box at elements (c0, c1, c2, c3), innermost first, none below 0, to shared memory at a
// multiple of 128; zeros past the tensor's ends. One thread calls. The barrier must expect the whole box's bytes.
PTX_FUNCTION void tma_load_4d(uint32_t to, const struct tensor_map *map, uint32_t barrier, int c0, int c1, int c2,
                              int c3) {
#if defined(__CUDACC__)
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
#else
    emu_tma_load(to, map, barrier, c0, c1, c2, c3);
#endif
}
PTX_FUNCTION void tma_load_4d(uint32_t to, const struct tensor_map *map, uint32_t barrier, int c0, int c1, int c2,
                              int c3, uint64_t policy) {
#if defined(__CUDACC__)
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
                 : "memory");
#else
    emu_check_policy(policy, "a TMA load");
    emu_tma_load(to, map, barrier, c0, c1, c2, c3);
#endif
}
// Begins to store the box at `from`, a multiple of 128, to where tma_load_4d would load one from. Nothing is stored
// past the tensor's ends. bulk_store's other conditions hold.
PTX_FUNCTION void tma_store_4d(const struct tensor_map *map, uint32_t from, int c0, int c1, int c2, int c3) {
#if defined(__CUDACC__)
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
#else
    emu_tma_store(map, from, c0, c1, c2, c3);
#endif
}
// Begins to copy `bytes`, which the barrier expects, to shared memory, by one thread. 16 divides bytes and addresses.
PTX_FUNCTION void bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier) {
#if defined(__CUDACC__)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
                 : "memory");
#else
    emu_bulk_load(to, from, bytes, barrier);
#endif
}
PTX_FUNCTION void bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier, uint64_t policy) {
#if defined(__CUDACC__)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
                 "[%3], %4;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier), "l"(policy)
                 : "memory");
#else
    emu_check_policy(policy, "a bulk load");
    emu_bulk_load(to, from, bytes, barrier);
#endif
}
// Begins to copy `bytes` from shared to global memory, in the bulk group that bulk_commit closes. One thread calls,
// after async_proxy_fence by all writers and a barrier. `bytes` and the addresses are multiples of 16.
PTX_FUNCTION void bulk_store(void *to, uint32_t from, uint32_t bytes) {
#if defined(__CUDACC__)
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
                 "r"(from), "r"(bytes)
                 : "memory");
#else
    emu_bulk_store(to, from, bytes, false);
#endif
}
PTX_FUNCTION void bulk_store(void *to, uint32_t from, uint32_t bytes, uint64_t policy) {
#if defined(__CUDACC__)
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(
                     __cvta_generic_to_global(to)),
                 "r"(from), "r"(bytes), "l"(policy)
                 : "memory");
#else
    emu_check_policy(policy, "a bulk store");
    emu_bulk_store(to, from, bytes, false);
#endif
}
// Begins to add `bytes` of floats in shared memory to floats at `to`, each atomically, under bulk_store's conditions.
PTX_FUNCTION void bulk_reduce_add(float *to, uint32_t from, uint32_t bytes) {
#if defined(__CUDACC__)
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                     __cvta_generic_to_global(to)),
                 "r"(from), "r"(bytes)
                 : "memory");
#else
    emu_bulk_store(to, from, bytes, true);
#endif
}
PTX_FUNCTION void bulk_reduce_add(float *to, uint32_t from, uint32_t bytes, uint64_t policy) {
#if defined(__CUDACC__)
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%0], [%1], %2, %3;" ::"l"(
                     __cvta_generic_to_global(to)),
                 "r"(from), "r"(bytes), "l"(policy)
                 : "memory");
#else
    emu_check_policy(policy, "a bulk reduction");
    emu_bulk_store(to, from, bytes, true);
#endif
}
// Closes a group of this thread's bulk stores and reductions, for bulk_wait and bulk_wait_read.
PTX_FUNCTION void bulk_commit(void) {
#if defined(__CUDACC__)
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#else
    emu_bulk_commit();
#endif
}
// Waits until all but the latest PENDING of this thread's bulk groups have read shared memory, which is free to write.
template <int PENDING> PTX_FUNCTION void bulk_wait_read(void) {
#if defined(__CUDACC__)
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
#else
    emu_bulk_wait(PENDING, true);
#endif
}
// Waits for all but the latest PENDING of this thread's bulk groups; the thread sees what they wrote.
template <int PENDING> PTX_FUNCTION void bulk_wait(void) {
#if defined(__CUDACC__)
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
#else
    emu_bulk_wait(PENDING, false);
#endif
}
// Publishes what this thread wrote to shared memory: after the next barrier the async proxy sees it.
PTX_FUNCTION void async_proxy_fence(void) {
#if defined(__CUDACC__)
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
    emu_async_proxy_fence();
#endif
}
// Orders accesses to global memory of one proxy before later ones of the other, in both directions: between
// load_acquire and a bulk copy that must come after what was acquired, and between bulk_wait and store_release.
PTX_FUNCTION void async_proxy_fence_global(void) {
#if defined(__CUDACC__)
    asm volatile("fence.proxy.async.global;" ::: "memory");
#else
    emu_async_proxy_fence_global();
#endif
}

// --- wgmma: by the 128 threads of a warpgroup ---------------------------------------------------------------------

// Returns the descriptor by which wgmma reads an operand in shared memory. Leading and stride bytes are as in the PTX
// ISA; they and the address are multiples of 16. swizzle: 0 is none, 1 128 bytes, 2 64, 3 32 (not as in tensor maps).
PTX_FUNCTION uint64_t matrix_descriptor(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes, int swizzle) {
    return (uint64_t)(address >> 4 & 0x3fffu) | (uint64_t)(leading_bytes >> 4 & 0x3fffu) << 16 |
           (uint64_t)(stride_bytes >> 4 & 0x3fffu) << 32 | (uint64_t)swizzle << 62;
}
// Orders the warpgroup's writes to registers before the wgmmas that follow and use them.
PTX_FUNCTION void wgmma_fence(void) {
#if defined(__CUDACC__)
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#else
    emu_wgmma_fence();
#endif
}
PTX_FUNCTION void wgmma_commit(void) {
#if defined(__CUDACC__)
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#else
    emu_wgmma_commit();
#endif
}
// Waits for all but the latest PENDING groups of wgmmas that wgmma_commit closed. All threads of the warpgroup call.
template <int PENDING> PTX_FUNCTION void wgmma_wait(void) {
#if defined(__CUDACC__)
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#else
    emu_wgmma_wait(PENDING);
#endif
}
// Keeps the compiler from moving any access to these registers, acc (COUNT), across this call.
template <int COUNT> PTX_FUNCTION void wgmma_hold(float *acc) {
#if defined(__CUDACC__)
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        asm volatile("" : "+f"(acc[i])::"memory");
#endif
}
// Gives up the values in acc (COUNT): else the compiler keeps them in registers until a product overwrites them.
template <int COUNT> PTX_FUNCTION void wgmma_forget(float *acc) {
#if defined(__CUDACC__)
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        asm volatile("" : "=f"(acc[i]));
#endif
}

#if defined(__CUDACC__)
// wgmma.m64nNk16 for each N: its instruction names N/2 accumulators, operands %0 to %(N/2-1), and up to seven more
// after them. The lists are put together from tens of operand names and from powers of two of registers.
#define WGMMA_LAST_2(ten) "%" #ten "0, %" #ten "1"
#define WGMMA_LAST_4(ten) WGMMA_LAST_2(ten) ", %" #ten "2, %" #ten "3"
#define WGMMA_LAST_6(ten) WGMMA_LAST_4(ten) ", %" #ten "4, %" #ten "5"
#define WGMMA_LAST_8(ten) WGMMA_LAST_6(ten) ", %" #ten "6, %" #ten "7"
#define WGMMA_TEN(ten) WGMMA_LAST_8(ten) ", %" #ten "8, %" #ten "9"
#define WGMMA_TENS_1 WGMMA_TEN()
#define WGMMA_TENS_2 WGMMA_TENS_1 ", " WGMMA_TEN(1)
#define WGMMA_TENS_3 WGMMA_TENS_2 ", " WGMMA_TEN(2)
#define WGMMA_TENS_4 WGMMA_TENS_3 ", " WGMMA_TEN(3)
#define WGMMA_TENS_5 WGMMA_TENS_4 ", " WGMMA_TEN(4)
#define WGMMA_TENS_6 WGMMA_TENS_5 ", " WGMMA_TEN(5)
#define WGMMA_TENS_7 WGMMA_TENS_6 ", " WGMMA_TEN(6)
#define WGMMA_TENS_8 WGMMA_TENS_7 ", " WGMMA_TEN(7)
#define WGMMA_TENS_9 WGMMA_TENS_8 ", " WGMMA_TEN(8)
#define WGMMA_TENS_10 WGMMA_TENS_9 ", " WGMMA_TEN(9)
#define WGMMA_TENS_11 WGMMA_TENS_10 ", " WGMMA_TEN(10)
#define WGMMA_TENS_12 WGMMA_TENS_11 ", " WGMMA_TEN(11)
#define WGMMA_F4(i) "+f"(acc[i]), "+f"(acc[(i) + 1]), "+f"(acc[(i) + 2]), "+f"(acc[(i) + 3])
#define WGMMA_F8(i) WGMMA_F4(i), WGMMA_F4((i) + 4)
#define WGMMA_F16(i) WGMMA_F8(i), WGMMA_F8((i) + 8)
#define WGMMA_F32(i) WGMMA_F16(i), WGMMA_F16((i) + 16)
#define WGMMA_F64(i) WGMMA_F32(i), WGMMA_F32((i) + 32)
#define WGMMA_ALL(...) __VA_ARGS__

// The predicate says whether the product is added; 1, 1: neither operand is negated.
#define WGMMA_SIZE(N, NAMES, FLOATS, R0, R1, R2, R3, R4, R5, R6)                                                       \
    template <> struct wgmma_of<N> {                                                                                   \
        template <int TRANSPOSED_A, int TRANSPOSED_B>                                                                  \
        PTX_FUNCTION void shared(float *acc, uint64_t a, uint64_t b, int accumulate) {                                 \
            asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %" #R2 ", 0;\n\t"                                   \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NAMES "}, %" #R0 ", %" #R1       \
                         ", add, 1, 1, %" #R3 ", %" #R4 ";\n\t}"                                                       \
                         : FLOATS                                                                                      \
                         : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSED_A), "n"(TRANSPOSED_B));                     \
        }                                                                                                              \
        template <int TRANSPOSED_B>                                                                                    \
        PTX_FUNCTION void registers(float *acc, const uint32_t *a, uint64_t b, int accumulate) {                       \
            asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %" #R5 ", 0;\n\t"                                   \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NAMES "}, {%" #R0 ", %" #R1      \
                         ", %" #R2 ", %" #R3 "}, %" #R4 ", add, 1, 1, %" #R6 ";\n\t}"                                  \
                         : FLOATS                                                                                      \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TRANSPOSED_B));    \
        }                                                                                                              \
    };
template <int N> struct wgmma_of;
WGMMA_SIZE(16, WGMMA_LAST_8(), WGMMA_ALL(WGMMA_F8(0)), 8, 9, 10, 11, 12, 13, 14)
WGMMA_SIZE(32, WGMMA_TENS_1 ", " WGMMA_LAST_6(1), WGMMA_ALL(WGMMA_F16(0)), 16, 17, 18, 19, 20, 21, 22)
WGMMA_SIZE(48, WGMMA_TENS_2 ", " WGMMA_LAST_4(2), WGMMA_ALL(WGMMA_F16(0), WGMMA_F8(16)), 24, 25, 26, 27, 28, 29, 30)
WGMMA_SIZE(64, WGMMA_TENS_3 ", " WGMMA_LAST_2(3), WGMMA_ALL(WGMMA_F32(0)), 32, 33, 34, 35, 36, 37, 38)
WGMMA_SIZE(80, WGMMA_TENS_4, WGMMA_ALL(WGMMA_F32(0), WGMMA_F8(32)), 40, 41, 42, 43, 44, 45, 46)
WGMMA_SIZE(96, WGMMA_TENS_4 ", " WGMMA_LAST_8(4), WGMMA_ALL(WGMMA_F32(0), WGMMA_F16(32)), 48, 49, 50, 51, 52, 53, 54)
WGMMA_SIZE(112, WGMMA_TENS_5 ", " WGMMA_LAST_6(5), WGMMA_ALL(WGMMA_F32(0), WGMMA_F16(32), WGMMA_F8(48)), 56, 57, 58, 59,
           60, 61, 62)
WGMMA_SIZE(128, WGMMA_TENS_6 ", " WGMMA_LAST_4(6), WGMMA_ALL(WGMMA_F64(0)), 64, 65, 66, 67, 68, 69, 70)
WGMMA_SIZE(144, WGMMA_TENS_7 ", " WGMMA_LAST_2(7), WGMMA_ALL(WGMMA_F64(0), WGMMA_F8(64)), 72, 73, 74, 75, 76, 77, 78)
WGMMA_SIZE(160, WGMMA_TENS_8, WGMMA_ALL(WGMMA_F64(0), WGMMA_F16(64)), 80, 81, 82, 83, 84, 85, 86)
WGMMA_SIZE(176, WGMMA_TENS_8 ", " WGMMA_LAST_8(8), WGMMA_ALL(WGMMA_F64(0), WGMMA_F16(64), WGMMA_F8(80)), 88, 89, 90, 91,
           92, 93, 94)
WGMMA_SIZE(192, WGMMA_TENS_9 ", " WGMMA_LAST_6(9), WGMMA_ALL(WGMMA_F64(0), WGMMA_F32(64)), 96, 97, 98, 99, 100, 101,
           102)
WGMMA_SIZE(208, WGMMA_TENS_10 ", " WGMMA_LAST_4(10), WGMMA_ALL(WGMMA_F64(0), WGMMA_F32(64), WGMMA_F8(96)), 104, 105,
           106, 107, 108, 109, 110)
WGMMA_SIZE(224, WGMMA_TENS_11 ", " WGMMA_LAST_2(11), WGMMA_ALL(WGMMA_F64(0), WGMMA_F32(64), WGMMA_F16(96)), 112, 113,
           114, 115, 116, 117, 118)
WGMMA_SIZE(240, WGMMA_TENS_12, WGMMA_ALL(WGMMA_F64(0), WGMMA_F32(64), WGMMA_F16(96), WGMMA_F8(112)), 120, 121, 122, 123,
           124, 125, 126)
WGMMA_SIZE(256, WGMMA_TENS_12 ", " WGMMA_LAST_8(12), WGMMA_ALL(WGMMA_F64(0), WGMMA_F64(64)), 128, 129, 130, 131, 132,
           133, 134)
#endif

// Begins acc (64 x N, fp32) = A (64 x 16) . B (16 x N), or += where `accumulate`; wgmma_commit and wgmma_wait follow.
// a, b: matrix_descriptor of bf16. Thread 32 w + 4 g + t of the warpgroup has element (16 w + g + 8 (i / 2 % 2), 8 (i /
// 4) + 2 t + i % 2) in acc[i]. An operand is K-major (contiguous along k) or, where TRANSPOSED, MN-major.
template <int N, bool TRANSPOSED_A, bool TRANSPOSED_B>
PTX_FUNCTION void wgmma_shared(float *acc, uint64_t a, uint64_t b, bool accumulate) {
    static_assert(N % 16 == 0 && N <= 256, "a size that has a wrapper");
#if defined(__CUDACC__)
    wgmma_of<N>::template shared<TRANSPOSED_A, TRANSPOSED_B>(acc, a, b, accumulate);
#else
    const struct emu_wgmma mine = {acc, NULL, a, b, N, TRANSPOSED_A, TRANSPOSED_B, accumulate};
    emu_wgmma_issue(&mine);
#endif
}
// Begins wgmma_shared's product with A in registers: warp w's rows are 16 w to 16 w + 15. `a` stays until wgmma_wait.
template <int N, bool TRANSPOSED_B>
PTX_FUNCTION void wgmma_registers(float *acc, const uint32_t a[4], uint64_t b, bool accumulate) {
    static_assert(N % 16 == 0 && N <= 256, "a size that has a wrapper");
#if defined(__CUDACC__)
    wgmma_of<N>::template registers<TRANSPOSED_B>(acc, a, b, accumulate);
#else
    const struct emu_wgmma mine = {acc, a, 0, b, N, false, TRANSPOSED_B, accumulate};
    emu_wgmma_issue(&mine);
#endif
}

// --- Warp specialization ------------------------------------------------------------------------------------------

// Raises each thread's registers to REGISTERS, once the block has enough left. All warps of a warpgroup call.
template <int REGISTERS> PTX_FUNCTION void registers_increase(void) {
    static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "what setmaxnreg takes");
#if defined(__CUDACC__)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#else
    emu_set_registers(REGISTERS, true);
#endif
}
// Lowers each thread's registers to REGISTERS, for other warpgroups' registers_increase. All warps of a warpgroup call.
template <int REGISTERS> PTX_FUNCTION void registers_decrease(void) {
    static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "what setmaxnreg takes");
#if defined(__CUDACC__)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#else
    emu_set_registers(REGISTERS, false);
#endif
}
// Waits at barrier 1 to 15 (0 is __syncthreads') until `threads` threads, in whole warps, have synced or arrived.
PTX_FUNCTION void named_barrier_sync(int barrier, int threads) {
#if defined(__CUDACC__)
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
#else
    emu_named_barrier(barrier, threads, true);
#endif
}
// Counts the warp as arrived where others call named_barrier_sync, with the same barrier and threads; does not wait.
PTX_FUNCTION void named_barrier_arrive(int barrier, int threads) {
#if defined(__CUDACC__)
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
#else
    emu_named_barrier(barrier, threads, false);
#endif
}
// Whether this lane is the warp's elected lane, the same at each call; all lanes call.
PTX_FUNCTION bool elect_one(void) {
#if defined(__CUDACC__)
    uint32_t elected;
    asm volatile("{\n\t.reg .pred mine;\n\telect.sync _|mine, 0xffffffff;\n\tselp.b32 %0, 1, 0, mine;\n\t}"
                 : "=r"(elected)
                 :
                 : "memory");
    return elected != 0;
#else
    emu_warp_exchange("", 1);
    return emu_lane() == 0;
#endif
}

// Stores four 8x8 matrices, the inverse of ldmatrix_x4. Lane 8j + r gives the address, a multiple of 16, of row r of
// matrix j. Word j holds elements (g, 2t), (g, 2t + 1) of matrix j, g = lane / 4, t = lane % 4. All lanes call.
PTX_FUNCTION void stmatrix_x4(uint32_t row, struct word_x4 words) {
#if defined(__CUDACC__)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(words.x[0]),
                 "r"(words.x[1]), "r"(words.x[2]), "r"(words.x[3])
                 : "memory");
#else
    const struct word_x4 *all = (const struct word_x4 *)emu_warp_exchange(&words, sizeof words);
    struct word_x4 mine;
    for (int i = 0; i < 4; i++)
        mine.x[i] = all[emu_lane() % 8 * 4 + i].x[emu_lane() / 8];
    emu_store_shared(row, &mine, 16);
#endif
}
// Stores as stmatrix_x4, but transposed: word j holds elements (2t, g) and (2t + 1, g) of matrix j.
PTX_FUNCTION void stmatrix_x4_trans(uint32_t row, struct word_x4 words) {
#if defined(__CUDACC__)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(words.x[0]),
                 "r"(words.x[1]), "r"(words.x[2]), "r"(words.x[3])
                 : "memory");
#else
    const struct word_x4 *all = (const struct word_x4 *)emu_warp_exchange(&words, sizeof words);
    const int r = emu_lane() % 8;
    struct word_x4 mine;
    for (int i = 0; i < 4; i++) { // columns 2i and 2i + 1 of row r: of lanes (g, t) = (2i, r / 2) and (2i + 1, r / 2)
        const uint32_t low = all[8 * i + r / 2].x[emu_lane() / 8] >> 16 * (r % 2) & 0xffffu;
        const uint32_t high = all[8 * i + 4 + r / 2].x[emu_lane() / 8] >> 16 * (r % 2) & 0xffffu;
        mine.x[i] = low | high << 16;
    }
    emu_store_shared(row, &mine, 16);
#endif
}

// --- Order among blocks -------------------------------------------------------------------------------------------

// Returns *at, in global memory. What another block wrote before its store_release of this value is visible after.
PTX_FUNCTION int load_acquire(const int *at) {
#if defined(__CUDACC__)
    int value;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(at)) : "memory");
    return value;
#else
    return emu_load_acquire(at);
#endif
}
#if defined(__CUDACC__) && defined(DEVICE_WAIT_LIMIT)
// Does wait_acquire, a macro that calls this; after WAIT_LIMIT_NS leaves a wait_record and traps. PLACE: a wait_place.
template <int PLACE> PTX_FUNCTION void wait_acquire_at(const int *at, int value) {
    asm volatile(PTX_WAIT("ld.acquire.gpu.global.b32 seen, [%0];\n\tsetp.eq.s32 found, seen, %1;\n\t", 0,
                          "st.global.b64 [record], %0;\n\t", seen)::"l"(__cvta_generic_to_global(at)),
                 "r"(value), "n"((unsigned)WAIT_LIMIT_NS), "n"(PLACE)
                 : "memory");
}
#else
// Waits, without limit, until load_acquire(at) returns `value`.
PTX_FUNCTION void wait_acquire(const int *at, int value) {
    while (load_acquire(at) != value)
        continue;
}
#endif
// Stores value at *at, in global memory. Whoever load_acquires it sees what this thread wrote before.
PTX_FUNCTION void store_release(int *at, int value) {
#if defined(__CUDACC__)
    asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(__cvta_generic_to_global(at)), "r"(value) : "memory");
#else
    emu_store_release(at, value);
#endif
}

#endif
