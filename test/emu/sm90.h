// What kernels/ptx_sm90.cuh calls of the emulator: mbarriers, TMA and bulk copies, wgmma, named barriers, setmaxnreg and
// the order among blocks. test/emu/async.h has the model, and says what it reports.
#pragma once
#include <stdint.h> // uint32_t, uint64_t

struct emu_tensor_map {
    alignas(64) char *base;
    uint64_t dims[5], strides[4]; // dims: innermost first; strides: bytes
    uint32_t rank, chunks;        // chunks: 16-byte pieces that the swizzle spans; 1: no swizzle
    uint16_t box[5];
};
static_assert(sizeof(struct emu_tensor_map) == 128, "a tensor map has 128 bytes");

struct emu_wgmma {
    float *acc;
    const uint32_t *a_registers;
    uint64_t a, b;
    int n;
    bool transposed_a, transposed_b, accumulate;
};
// Policies of the L2 cache as createpolicy makes them on sm_90; a copy's hint must be one of them.
enum : uint64_t { EMU_EVICT_FIRST = 0x12f0000000000000u, EMU_EVICT_LAST = 0x14f0000000000000u };

struct tensor_map;
void emu_mbarrier_init(uint32_t address, uint32_t arrivals);
void emu_mbarrier_init_fence(void);
void emu_mbarrier_arrive(uint32_t address, uint32_t bytes);
void emu_mbarrier_wait(uint32_t address, uint32_t parity);
void emu_check_policy(uint64_t policy, const char *what);
void emu_tma_load(uint32_t to, const struct tensor_map *map, uint32_t barrier, int c0, int c1, int c2, int c3);
void emu_tma_store(const struct tensor_map *map, uint32_t from, int c0, int c1, int c2, int c3);
void emu_bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier);
void emu_bulk_store(void *to, uint32_t from, uint32_t bytes, bool add);
void emu_bulk_commit(void);
void emu_bulk_wait(int pending, bool read_only);
void emu_async_proxy_fence(void);
void emu_async_proxy_fence_global(void);
void emu_wgmma_fence(void);
void emu_wgmma_issue(const struct emu_wgmma *op);
void emu_wgmma_commit(void);
void emu_wgmma_wait(int pending);
void emu_set_registers(int registers, bool increase);
void emu_named_barrier(int number, int threads, bool sync);
int emu_load_acquire(const int *at);
void emu_store_release(int *at, int value);
