// Intel AMX: eight tile registers of 16 rows x 64 bytes, and C (16 x 16 fp32) += A (16 x 32 bf16) . B (32 x 16 bf16). B
// is in VNNI order: row r of the tile holds, for each of the 16 columns n, the pair B[2r][n], B[2r+1][n]. Tile numbers
// must be literals. Every thread calls amx_begin before its first tile and amx_end after its last one. With AMX_EMULATE
// defined the same calls run on plain memory, so that kernels that use tiles are tested on any machine.
#pragma once
#include "kernels/device.cuh" // bf16
#include <stdint.h>           // uint8_t, uint16_t

#if defined(AMX_EMULATE)

struct amx_tile {
    union {
        float f[16][16];
        bf16 h[16][32];
    } as;
};
static __thread struct amx_tile amx_tiles[8];

static inline bool amx_available(void) { return true; }
static inline void amx_begin(void) {}
static inline void amx_end(void) {}
// Loads tile number `tile`, a literal from 0 to 7: 16 rows of 64 bytes, `stride_bytes` apart.
static inline void amx_load(int tile, const void *base, size_t stride_bytes) {
    for (int r = 0; r < 16; r++)
        memcpy(amx_tiles[tile].as.f[r], (const char *)base + (size_t)r * stride_bytes, 64);
}
static inline void amx_store(int tile, void *base, size_t stride_bytes) {
    for (int r = 0; r < 16; r++)
        memcpy((char *)base + (size_t)r * stride_bytes, amx_tiles[tile].as.f[r], 64);
}
static inline void amx_zero(int tile) { memset(&amx_tiles[tile], 0, sizeof amx_tiles[tile]); }
// c += a . b, tiles by number, emulated. The hardware sums even and odd products apart, and takes denormals as 0.
static inline void amx_dot(int c, int a, int b) {
    for (int r = 0; r < 16; r++)
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 16; n++)
                for (int e = 0; e < 2; e++)
                    amx_tiles[c].as.f[r][n] +=
                        bf16_to_float(amx_tiles[a].as.h[r][2 * k + e]) * bf16_to_float(amx_tiles[b].as.h[k][2 * n + e]);
}

#elif defined(__x86_64__) && defined(__linux__) && !defined(BF16_DOT_EMULATE) // whose tests go without AMX

#include <cpuid.h>       // __cpuid_count
#include <sys/syscall.h> // SYS_arch_prctl
#include <unistd.h>      // syscall

// Whether the CPU has AMX-BF16 and this process may use it. Asks Linux for that permission, which amx_begin needs.
static inline bool amx_available(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & (1u << 22)) || !(d & (1u << 24)))
        return false;
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
// Gives this thread its eight tiles, 16 rows of 64 bytes each, all 0, until amx_end. amx_available must have been true.
static inline void amx_begin(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes_per_row[16];
        uint8_t rows[16];
    } config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 8; i++) {
        config.bytes_per_row[i] = 64;
        config.rows[i] = 16;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
}
static inline void amx_end(void) { __asm__ volatile("tilerelease"); }
// Own asm: the loads of gcc's intrinsics don't say that they read memory, so gcc may move a store after a later load.
#define AMX_TILE(tile) "%%tmm" #tile
#define amx_load(tile, base, stride_bytes)                                                                             \
    __asm__ volatile("tileloadd (%0,%1,1), " AMX_TILE(tile)::"r"((const void *)(base)), "r"((long)(stride_bytes))      \
                     : "memory")
#define amx_store(tile, base, stride_bytes)                                                                            \
    __asm__ volatile("tilestored " AMX_TILE(tile) ", (%0,%1,1)" ::"r"((void *)(base)), "r"((long)(stride_bytes))       \
                     : "memory")
#define amx_zero(tile) __asm__ volatile("tilezero " AMX_TILE(tile)::)
#define amx_dot(c, a, b) __asm__ volatile("tdpbf16ps " AMX_TILE(b) ", " AMX_TILE(a) ", " AMX_TILE(c)::)

#else

static inline bool amx_available(void) { return false; }
static inline void amx_begin(void) {}
static inline void amx_end(void) {}
#define amx_load(tile, base, stride_bytes) ((void)(base), (void)(stride_bytes))
#define amx_store(tile, base, stride_bytes) ((void)(base), (void)(stride_bytes))
#define amx_zero(tile) ((void)0)
#define amx_dot(c, a, b) ((void)0)

#endif
