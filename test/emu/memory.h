// Device memory of the emulator: host memory that is watched on both sides.
//
//   | can't be touched | red zone, 0xff | contents | red zone, 0xff | can't be touched |
//
// - Contents are poisoned (0xff: NaN) when they are allocated. The red zones are checked after each kernel.
// - 16-byte accesses through kernels/packed.cuh, asynchronous copies and the runtime's copies are checked before they
//   are made. An address outside all allocations is taken for the host's, since tests pass host memory too.
// - Outside of kernels and the runtime's copies, device memory can't be touched at all. Host code that dereferences a
//   pointer to it is reported by a handler of SIGSEGV, and so is a kernel that goes past the red zones.
#pragma once

enum emu_memory_kind { EMU_DEVICE, EMU_PINNED, EMU_MANAGED };
struct emu_allocation {
    char *map; // the whole mapping
    size_t map_bytes;
    char *open; // the whole pages of it that can be touched
    size_t open_bytes;
    char *begin; // the contents
    size_t bytes;
    enum emu_memory_kind kind;
};
enum { EMU_RED_ZONE = 512, EMU_PAGE = 4096, EMU_GUARD_BYTES = 1 << 20 };

inline uint64_t emu_allocations_version = 1; // counts allocations and frees

// Returns the allocation whose mapping contains p, or NULL.
struct emu_allocation *emu_find_allocation(const void *p);
// Checks a whole range, such as a copy's: it must not leave the allocation that it begins in.
void emu_check_range(const void *p, size_t bytes, const char *verb);

// Checks one access of a thread to global memory: it must be aligned to its size, and touch no red zone.
static void emu_access_global(const void *p, int bytes, bool write) {
    // Ranges that were found good, the last few of each host thread.
    static __thread struct { uintptr_t begin, end; } known[4];
    static __thread uint64_t known_version;
    static __thread unsigned turn;
    const uintptr_t at = (uintptr_t)p;
    if (at % (uintptr_t)bytes != 0)
        emu_report("misaligned %s of %d bytes, global address %p", write ? "write" : "read", bytes, p);
    if (known_version == emu_allocations_version) {
        for (int i = 0; i < 4; i++)
            if (at >= known[i].begin && at + (uintptr_t)bytes <= known[i].end)
                return;
    } else {
        memset(known, 0, sizeof known);
        known_version = emu_allocations_version;
    }
    emu_check_range(p, (size_t)bytes, write ? "writes" : "reads");
    const struct emu_allocation *a = emu_find_allocation(p);
    if (a) {
        known[turn % 4].begin = (uintptr_t)a->begin;
        known[turn++ % 4].end = (uintptr_t)a->begin + a->bytes;
    } else { // of the host: at least this page is good
        known[turn % 4].begin = at / EMU_PAGE * EMU_PAGE;
        known[turn++ % 4].end = (at / EMU_PAGE + 1) * EMU_PAGE;
    }
}

void emu_touch_generic(const void *p, int bytes, bool write); // global.h
// Checks an access that is not atomic, and records its order to other accesses.
static void emu_touch_global(const void *p, int bytes, bool write) {
    emu_access_global(p, bytes, write);
    if (emu->async)
        emu_touch_generic(p, bytes, write);
}
