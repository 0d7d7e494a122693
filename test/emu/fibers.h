// How the emulator runs a launch: blocks on the host's threads, a block's threads as fibers, and the copies of cp.async.
// Only test/emu/emulator.cpp includes this file.
#pragma once
#include "test/emu/allocations.h" // emu_signal_stack
#include "test/emu/clocks.h"      // emu_set_in_flight
#include "test/emu/warp.h"        // struct emu_block
#include <stdarg.h>               // va_list
#include <sys/mman.h>             // mmap, mprotect
#include <time.h>                 // clock_gettime
#include <vector>                 // std::vector

void emu_report(const char *format, ...) {
    fflush(stdout);
    fputs("emu: ", stderr);
    if (emu) {
        const struct emu_dim3 block = emu->block_index, thread = emu->fibers[emu->current].index;
        fprintf(stderr, "kernel %s, block (%u, %u, %u), thread ", emu->kernel->name, block.x, block.y, block.z);
        if (emu->size.y * emu->size.z == 1)
            fprintf(stderr, "%u: ", thread.x);
        else
            fprintf(stderr, "(%u, %u, %u): ", thread.x, thread.y, thread.z);
    }
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    fflush(stderr);
    _Exit(3);
}

// async.h and global.h
static bool emu_explain_wait(char *text, size_t size, int *thread);
static struct emu_global *emu_global_begin(void);
static void emu_global_end(struct emu_global *global);
static void emu_thread_ends(void);
static void emu_block_ends(void);

// --- Fibers -------------------------------------------------------------------------------------------------------

static void emu_runner(void);

#ifdef EMU_USES_UCONTEXT
static inline void emu_context_switch(struct emu_context *from, struct emu_context *to) {
    swapcontext(&from->context, &to->context);
}
static void emu_context_start(struct emu_context *from, char *stack) {
    static __thread ucontext_t fresh;
    getcontext(&fresh);
    fresh.uc_stack.ss_sp = stack;
    fresh.uc_stack.ss_size = EMU_STACK_BYTES;
    makecontext(&fresh, emu_runner, 0);
    swapcontext(&from->context, &fresh);
}
static inline void emu_context_prefetch(const struct emu_context *context) {}
#else
extern "C" void emu_switch(void **from_stack_pointer, void *to_stack_pointer);
__asm__(".text\n.globl emu_switch\n.type emu_switch,@function\nemu_switch:\n"
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
        "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
        "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
        ".size emu_switch,.-emu_switch\n");
static inline void emu_context_switch(struct emu_context *from, struct emu_context *to) {
    emu_switch(&from->stack_pointer, to->stack_pointer);
}
// Prefetches the lines of a stack that emu_context_switch to it, and its return from emu_wait, will read.
static inline void emu_context_prefetch(const struct emu_context *context) {
    for (int i = 0; i < 3; i++)
        __builtin_prefetch((const char *)context->stack_pointer + 64 * i);
}
static void emu_context_start(struct emu_context *from, char *stack) {
    void **top = (void **)(stack + EMU_STACK_BYTES - 64);
    *--top = NULL; // the return address of emu_runner; it aligns the stack as after a call
    *--top = (void *)emu_runner;
    emu_switch(&from->stack_pointer, top - 6); // below: six saved registers
}
#endif

// Returns an unused stack. The page below it can't be touched, so that an overflow is found.
static char *emu_stack_take(void) {
    if (emu->num_free_stacks > 0)
        return emu->free_stacks[--emu->num_free_stacks];
    char *memory =
        (char *)mmap(NULL, EMU_STACK_BYTES + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == (char *)MAP_FAILED)
        emu_report("no memory for a thread's stack");
    mprotect(memory, 4096, PROT_NONE);
    // The parts of stacks that threads use lie in different cache sets.
    return memory + 4096 - emu->num_stacks++ * 5 % 64 * 64;
}

// Returns the next thread in turn, after the current one, that can run; -1: none can.
static inline int emu_next(void) {
    const int warp = emu->current / 32;
    const uint32_t after = emu->warps[warp].ready & ~1u << emu->current % 32;
    if (after)
        return warp * 32 + __builtin_ctz(after);
    for (int i = 1; i <= emu->num_warps; i++) {
        const int w = warp + i < emu->num_warps ? warp + i : warp + i - emu->num_warps;
        if (emu->warps[w].ready)
            return w * 32 + __builtin_ctz(emu->warps[w].ready);
    }
    return -1;
}
static bool emu_lane_ended(int thread) { return emu->warps[thread / 32].ended >> thread % 32 & 1u; }
__attribute__((noreturn)) static void emu_report_stuck(void) {
    // A pair of threads in one warp that wait at different places tells most; else any two threads of the block that
    // do, or of which one has ended.
    int first = -1, second = -1;
    for (int pass = 0; pass < 2 && second < 0; pass++)
        for (int i = 0; i < emu->threads && second < 0; i++) {
            if (emu_lane_ended(i))
                continue;
            const int begin = pass == 0 ? i / 32 * 32 : 0;
            const int end = pass == 0 && begin + 32 < emu->threads ? begin + 32 : emu->threads;
            first = i;
            for (int j = begin; j < end && second < 0; j++)
                if (emu_lane_ended(j) || emu->fibers[j].waits_at != emu->fibers[i].waits_at)
                    second = j;
        }
    char text[256];
    if (emu->async && emu_explain_wait(text, sizeof text, &emu->current))
        emu_report("%s", text);
    emu->current = first;
    const char *at = emu->fibers[first].waits_at;
    if (second < 0)
        emu_report("waits at %s for threads that never come", at);
    if (emu_lane_ended(second))
        emu_report("waits at %s for threads that never come: thread %d has ended", at, second);
    emu_report("waits at %s for threads that never come: thread %d waits at %s", at, second,
               emu->fibers[second].waits_at);
}
// Lets other threads run until the current one is ready again; the caller has marked it as not ready. what: what it
// waits at, for messages.
void emu_wait(const char *what) {
    struct emu_fiber *self = &emu->fibers[emu->current];
    const int next = emu_next();
    self->waits_at = what;
    if (next < 0)
        emu_report_stuck();
    emu->fiber_stacks[emu->current] = emu->stack;
    emu->current = next;
    emu_context_prefetch(&emu->fibers[next + 1].context);
    if (emu->warps[next / 32].started >> next % 32 & 1u) {
        emu->stack = emu->fiber_stacks[next];
        emu_context_switch(&self->context, &emu->fibers[next].context);
    } else {
        emu->stack = emu_stack_take();
        emu_context_start(&self->context, emu->stack);
    }
    self->waits_at = NULL;
}
// Runs on each stack, and there one thread after another, as long as there are threads that have not begun.
static void emu_runner(void) {
    for (;;) {
        struct emu_warp *warp = &emu->warps[emu->current / 32];
        const uint32_t lane = 1u << emu->current % 32;
        struct emu_fiber *self = &emu->fibers[emu->current];
        warp->started |= lane;
        self->num_copies = self->groups = self->waits_for = 0;
        emu->kernel->body(emu->kernel->argument);
        // The thread may have waited in the kernel, but it has not moved to another host thread or stack.
        if (self->num_copies > 0)
            emu_report("ends with copies under way, to shared address %d", emu_offset(self->copies[0].to));
        if (emu->async)
            emu_thread_ends();
        warp->ready &= ~lane;
        warp->ended |= lane;
        emu->ended++;
        const int next = emu_next();
        struct emu_context unused;
        if (next < 0 && emu->ended < emu->threads)
            emu_report_stuck();
        if (next >= 0 && !(emu->warps[next / 32].started >> next % 32 & 1u)) {
            emu->current = next;
            continue;
        }
        emu->free_stacks[emu->num_free_stacks++] = emu->stack; // unused from the switch on
        if (next < 0) {
            emu_context_switch(&unused, &emu->host);
        } else {
            emu->current = next;
            emu->stack = emu->fiber_stacks[next];
            emu_context_switch(&unused, &emu->fibers[next].context);
        }
    }
}

struct emu_group *emu_find_group(struct emu_warp *warp, uint32_t lanes) {
    for (int i = 1; i < warp->num_groups; i++)
        if (warp->groups[i].lanes == lanes)
            return &warp->groups[i];
    if (warp->num_groups == EMU_MAX_GROUPS)
        emu_report("its warp is divided into more groups than the model holds");
    struct emu_group *group = &warp->groups[warp->num_groups++];
    group->lanes = lanes;
    group->arrived = group->generation = 0;
    return group;
}
void emu_check_not_in_flight(const void *words, size_t bytes, const char *verb) {
    for (size_t i = 0; i + 4 <= bytes; i += 4) {
        uint32_t bits;
        memcpy(&bits, (const char *)words + i, 4);
        if (emu_from_flight(bits))
            emu_report("%s what it read from an accumulator or A register of a wgmma in flight", verb);
    }
}

// --- Asynchronous copies ------------------------------------------------------------------------------------------

void emu_copy_async(uint32_t to, const void *from, int bytes, bool valid) {
    struct emu_fiber *self = &emu->fibers[emu->current];
    if ((uintptr_t)from % (uintptr_t)bytes != 0)
        emu_report("copies from a misaligned global address, %p, to shared address %d", from, emu_offset(to));
    if (valid)
        emu_touch_global(from, bytes, false);
    if (self->num_copies == EMU_MAX_COPIES)
        emu_report("has more copies under way than the model holds");
    memset(emu_touch(to, bytes, true), 0xff, (size_t)bytes); // from now on it may land at any time
    for (int i = 0; i < bytes / 4; i++)
        emu_set_in_flight(to + 4 * (uint32_t)i, true);
    const struct emu_copy copy = {to, from, bytes, valid, self->groups};
    self->copies[self->num_copies++] = copy;
}
void emu_wait_async(int pending) {
    struct emu_fiber *self = &emu->fibers[emu->current];
    int landed = 0;
    for (; landed < self->num_copies && self->copies[landed].group < self->groups - pending; landed++) {
        const struct emu_copy *copy = &self->copies[landed];
        for (int i = 0; i < copy->bytes / 4; i++)
            emu_set_in_flight(copy->to + 4 * (uint32_t)i, false);
        unsigned char *to = emu_touch(copy->to, copy->bytes, true);
        if (copy->valid)
            memcpy(to, copy->from, (size_t)copy->bytes);
        else
            memset(to, 0, (size_t)copy->bytes);
    }
    if (landed == 0)
        return;
    memmove(self->copies, self->copies + landed, sizeof self->copies[0] * (size_t)(self->num_copies - landed));
    self->num_copies -= landed;
}

// --- A launch -----------------------------------------------------------------------------------------------------

// Forgets the accesses to shared memory of earlier launches, before an epoch's number comes again.
static void emu_restart_epochs(struct emu_block *block) {
    uint32_t last = block->epoch;
    for (int w = 0; w < EMU_MAX_THREADS / 32; w++)
        last = block->warps[w].epoch > last ? block->warps[w].epoch : last;
    if (last < 1u << 31)
        return;
    memset(block->words, 0, EMU_MAX_SHARED_BYTES / 4 * sizeof *block->words);
    block->epoch = 0;
    for (int w = 0; w < EMU_MAX_THREADS / 32; w++)
        block->warps[w].epoch = 0;
}
// Makes this host thread's block ready for a kernel.
static void emu_block_enter(const struct emu_kernel *kernel) {
    if (!emu_cached) {
        emu_cached = (struct emu_block *)calloc(1, sizeof *emu_cached);
        emu_cached->fibers = (struct emu_fiber *)calloc(EMU_MAX_THREADS + 1, sizeof *emu_cached->fibers);
        struct emu_copy *copies = (struct emu_copy *)calloc((size_t)EMU_MAX_THREADS * EMU_MAX_COPIES, sizeof *copies);
        for (int i = 0; i < EMU_MAX_THREADS; i++)
            emu_cached->fibers[i].copies = copies + i * EMU_MAX_COPIES;
        emu_cached->warps = (struct emu_warp *)calloc(EMU_MAX_THREADS / 32, sizeof *emu_cached->warps);
        emu_cached->shared = (unsigned char *)aligned_alloc(1024, (EMU_MAX_SHARED_BYTES + 1023) / 1024 * 1024);
        emu_cached->words = (struct emu_word *)calloc(EMU_MAX_SHARED_BYTES / 4, sizeof *emu_cached->words);
        emu_cached->indexed.x = 0;
        emu_signal_stack(emu_cached->signal_stack, sizeof emu_cached->signal_stack);
    }
    struct emu_block *block = emu_cached;
    emu_restart_epochs(block);
    block->kernel = kernel;
    block->grid = kernel->grid;
    block->size = kernel->size;
    block->shared_bytes = kernel->shared_bytes;
    block->threads = (int)(kernel->size.x * kernel->size.y * kernel->size.z);
    block->num_warps = (block->threads + 31) / 32;
    block->bank_conflicts = block->matrix_loads = 0;
    if (memcmp(&block->indexed, &block->size, sizeof block->size) != 0) {
        for (int i = 0; i < block->threads; i++) {
            const unsigned at = (unsigned)i;
            block->fibers[i].index =
                emu_dim3(at % block->size.x, at / block->size.x % block->size.y, at / block->size.x / block->size.y);
        }
        block->indexed = block->size;
        for (int w = 0; w < block->num_warps; w++)
            block->warps[w].lanes = block->threads - w * 32 < 32 ? (1u << block->threads % 32) - 1u : ~0u;
    }
    emu = block;
}

static void emu_run_block(uint64_t at) {
    unsigned char to_come = 0;
    if (!__atomic_compare_exchange_n(&emu->kernel->progress[at], &to_come, (unsigned char)1, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE))
        return;
    emu->linear_index = at;
    emu->async = NULL;
    const struct emu_dim3 grid = emu->grid;
    emu->block_index =
        emu_dim3((unsigned)(at % grid.x), (unsigned)(at / grid.x % grid.y), (unsigned)(at / grid.x / grid.y));
    if (emu->shared_bytes > 0)
        memset(emu->shared, 0xff, emu->shared_bytes);
    emu->first_epoch = ++emu->epoch;
    emu->barrier_arrived = emu->ended = 0;
    for (int w = 0; w < emu->num_warps; w++) {
        struct emu_warp *warp = &emu->warps[w];
        warp->ready = warp->lanes;
        warp->started = warp->ended = warp->at_barrier = 0;
        warp->first_epoch = warp->epoch;
        warp->num_groups = 1;
        warp->groups[0].lanes = warp->lanes;
        warp->groups[0].arrived = 0;
    }
    emu->current = (int)(((at + emu->kernel->launch * 7) * 2654435761u >> 7) % (uint64_t)emu->threads);
    emu->stack = emu_stack_take();
    emu_context_start(&emu->host, emu->stack);
    if (emu->async)
        emu_block_ends();
    __atomic_store_n(&emu->kernel->progress[at], (unsigned char)2, __ATOMIC_RELEASE);
}

// Returns a number without a common factor with the number of blocks, far from 1: its multiples visit each block once.
static uint64_t emu_stride(uint64_t blocks) {
    for (uint64_t stride = blocks * 5 / 8 + 1;; stride++) {
        uint64_t a = stride, b = blocks;
        while (b != 0) {
            const uint64_t rest = a % b;
            a = b;
            b = rest;
        }
        if (a == 1)
            return stride;
    }
}
double emu_seconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// Runs every block of a grid, in a shuffled order: the first ones on this host thread; the others on all host threads
// if blocks take long enough, as waking the threads takes some 10 us. Returns the number of ldmatrix's bank conflicts.
static uint64_t emu_run_kernel(struct emu_kernel *kernel) {
    const uint64_t blocks = (uint64_t)kernel->grid.x * kernel->grid.y * kernel->grid.z, stride = emu_stride(blocks);
    uint64_t begin = 0, conflicts = 0;
    std::vector<unsigned char> progress(blocks, 0);
    kernel->progress = progress.data();
    kernel->global = emu_global_begin();
    emu_block_enter(kernel);
    const double limit = emu_seconds() + 50e-6;
    while (begin < blocks && emu_seconds() < limit)
        emu_run_block((unsigned __int128)((kernel->launch + begin++) % blocks) * stride % blocks);
    conflicts = emu->bank_conflicts;
    emu = NULL;
    if (begin == blocks) {
        emu_global_end(kernel->global);
        return conflicts;
    }
#pragma omp parallel reduction(+ : conflicts)
    {
        emu_block_enter(kernel);
#pragma omp for schedule(dynamic)
        for (uint64_t i = begin; i < blocks; i++)
            emu_run_block((unsigned __int128)((kernel->launch + i) % blocks) * stride % blocks);
        conflicts += emu->bank_conflicts;
        emu = NULL;
    }
    emu_global_end(kernel->global);
    return conflicts;
}
