// The device memory of test/emu/memory.h. Only test/emu/emulator.cpp includes this file.
#pragma once
#include "test/emu/memory.h" // struct emu_allocation
#include <signal.h>          // sigaction, sigaltstack
#include <sys/mman.h>        // mmap, mprotect
#include <vector>            // std::vector

static std::vector<struct emu_allocation> emu_allocations; // sorted by address
static size_t emu_allocated_bytes;                         // of the device's memory
static int emu_memory_opened;                              // > 0: device memory can be touched

static size_t emu_memory_bytes(void) {
    const char *text = getenv("EMU_MEMORY_BYTES");
    return text ? (size_t)strtoull(text, NULL, 0) : (size_t)8 << 30;
}

// Returns the allocation whose mapping contains p, or NULL.
struct emu_allocation *emu_find_allocation(const void *p) {
    size_t low = 0, high = emu_allocations.size();
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if ((const char *)p < emu_allocations[middle].map)
            high = middle;
        else
            low = middle + 1;
    }
    if (low == 0)
        return NULL;
    struct emu_allocation *a = &emu_allocations[low - 1];
    return (const char *)p < a->map + a->map_bytes ? a : NULL;
}
__attribute__((noreturn)) static void emu_report_access(const struct emu_allocation *a, const void *p, size_t bytes,
                                                        const char *verb) {
    const long long at = (const char *)p - a->begin;
    if (at < 0)
        emu_report("%s %zu bytes at %p, which begin %lld bytes before an allocation of %zu", verb, bytes, p, -at,
                   a->bytes);
    emu_report("%s %zu bytes at %p, which end %lld bytes past an allocation of %zu", verb, bytes, p,
               at + (long long)bytes - (long long)a->bytes, a->bytes);
}
// Checks a whole range, such as a copy's: it must not leave the allocation that it begins in.
void emu_check_range(const void *p, size_t bytes, const char *verb) {
    const struct emu_allocation *a = emu_find_allocation(p);
    if (a && bytes > 0 && ((const char *)p < a->begin || (const char *)p + bytes > a->begin + a->bytes))
        emu_report_access(a, p, bytes, verb);
}

static bool emu_all_poison(const char *begin, const char *end) {
    unsigned char all = 0xff;
    for (; begin < end; begin++)
        all &= (unsigned char)*begin;
    return all == 0xff;
}
// Reports a kernel or copy, `ran`, after which a red zone is no longer intact.
static void emu_check_red_zones(const char *ran) {
    for (const struct emu_allocation &a : emu_allocations) {
        const char *end = a.begin + a.bytes, *open_end = a.open + a.open_bytes;
        const bool before = emu_all_poison(a.open, a.begin);
        if (before && emu_all_poison(end, open_end))
            continue;
        const char *at = before ? end : a.begin - 1;
        while (*at == (char)0xff)
            at += before ? 1 : -1;
        emu_report("kernel %s: wrote memory %lld bytes %s an allocation of %zu bytes", ran,
                   (long long)(before ? at - end : a.begin - at), before ? "past the end of" : "before", a.bytes);
    }
}

static void emu_on_fault(int signal_number, siginfo_t *info, void *context) {
    const struct emu_allocation *a = emu_find_allocation(info->si_addr);
    if (emu)
        emu_report("touches memory at %p, where there is none (or, at nil, misaligned memory; or its stack is full)%s",
                   info->si_addr, a ? ", near an allocation" : "");
    if (a && a->kind == EMU_DEVICE && !emu_memory_opened)
        emu_report("host code touches device memory at %p, byte %lld of an allocation of %zu", info->si_addr,
                   (long long)((char *)info->si_addr - a->begin), a->bytes);
    if (a)
        emu_report("memory is touched at %p, byte %lld of an allocation of %zu", info->si_addr,
                   (long long)((char *)info->si_addr - a->begin), a->bytes);
    signal(signal_number, SIG_DFL); // not the emulator's business: the signal comes again and ends the program
}
// Gives the handler of SIGSEGV a stack, since a fiber whose stack is full can't run it.
static void emu_signal_stack(char *memory, size_t bytes) {
    stack_t stack = {};
    stack.ss_sp = memory;
    stack.ss_size = bytes;
    sigaltstack(&stack, NULL);
}
// Installs the handler of SIGSEGV again, since other code may have taken the signal.
static void emu_watch_faults(void) {
    struct sigaction action = {};
    action.sa_sigaction = emu_on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, NULL);
}

// Sets the protection of all device memory, before and after anything that the device does.
static void emu_memory_protect(int protection) {
    for (const struct emu_allocation &a : emu_allocations)
        if (a.kind == EMU_DEVICE)
            mprotect(a.open, a.open_bytes, protection);
}
static void emu_memory_open(void) {
    if (emu_memory_opened++ > 0)
        return;
    emu_watch_faults();
    emu_memory_protect(PROT_READ | PROT_WRITE);
}
static void emu_memory_close(void) {
    if (--emu_memory_opened == 0)
        emu_memory_protect(PROT_NONE);
}

// Allocates poisoned memory; returns NULL where there is too little.
static void *emu_memory_allocate(size_t bytes, enum emu_memory_kind kind) {
    struct emu_allocation a;
    const size_t limit = emu_memory_bytes();
    if (kind != EMU_PINNED && (emu_allocated_bytes > limit || bytes > limit - emu_allocated_bytes))
        return NULL;
    a.bytes = bytes;
    a.kind = kind;
    a.open_bytes = (bytes + 2 * EMU_RED_ZONE + EMU_PAGE - 1) / EMU_PAGE * EMU_PAGE;
    a.map_bytes = a.open_bytes + 2 * EMU_GUARD_BYTES;
    a.map = (char *)mmap(NULL, a.map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (a.map == (char *)MAP_FAILED)
        return NULL;
    a.open = a.map + EMU_GUARD_BYTES;
    a.begin = a.open + EMU_RED_ZONE;
    mprotect(a.open, a.open_bytes, PROT_READ | PROT_WRITE);
    // each kernel changes the protection of all pages, which this makes 512 times fewer
    madvise(a.open, a.open_bytes, MADV_HUGEPAGE);
    memset(a.open, 0xff, a.open_bytes);
    if (kind == EMU_DEVICE && !emu_memory_opened)
        mprotect(a.open, a.open_bytes, PROT_NONE);
    size_t at = 0;
    while (at < emu_allocations.size() && emu_allocations[at].map < a.map)
        at++;
    emu_allocations.insert(emu_allocations.begin() + (long)at, a);
    emu_allocations_version++;
    emu_allocated_bytes += kind == EMU_PINNED ? 0 : bytes;
    emu_watch_faults();
    return a.begin;
}
// Frees an allocation; returns false where `memory` is none, or not of this kind.
static bool emu_memory_free(void *memory, bool pinned) {
    struct emu_allocation *a = emu_find_allocation(memory);
    if (!a || a->begin != memory || (a->kind == EMU_PINNED) != pinned)
        return false;
    emu_allocated_bytes -= pinned ? 0 : a->bytes;
    munmap(a->map, a->map_bytes);
    emu_allocations.erase(emu_allocations.begin() + (a - emu_allocations.data()));
    emu_allocations_version++;
    return true;
}
