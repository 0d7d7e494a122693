// A functional model of one thread block, on the host, for the models in kernels/ptx.cuh and the stand-ins in
// cuda_runtime.h.
//
// The threads of a block are fibers that run in turn until they wait; a thread that never waits costs a function call.
// The model is stricter than a GPU:
// - An asynchronous copy lands at the wait that asks for it, not before. Its destination is poisoned until then, and
//   touching it is reported.
// - Shared memory is poisoned (NaN) when a block starts.
// - Two threads that touch one word of shared memory without a barrier between them are reported if one of them writes.
//   So are misaligned accesses, accesses past the block's shared memory, lanes of a warp that wait at different
//   collectives, and blocks that can't go on, such as at a barrier that an exited thread never reaches.
// - Blocks run in a shuffled order, and in each block another thread runs first.
// - ldmatrix counts the bank conflicts of its rows.
// - test/emu/clocks.h and async.h model what is asynchronous on sm_90a, and how threads wait for each other there.
// A finding ends the program with status 3, and names kernel, block and thread.
#pragma once
#include <math.h>     // exp2f
#include <stdarg.h>   // va_list
#include <stdint.h>   // uint32_t, uint64_t
#include <stdio.h>    // fprintf
#include <stdlib.h>   // calloc, _Exit
#include <string.h>   // memcpy, memset
#include <sys/mman.h> // mmap, mprotect
#include <time.h>     // clock_gettime
#if !defined(__x86_64__) || defined(EMU_UCONTEXT)
#define EMU_USES_UCONTEXT
#include <ucontext.h> // swapcontext
#endif

struct emu_dim3 {
    unsigned x, y, z;
    emu_dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

enum {
    EMU_MAX_THREADS = 1024,
    EMU_MAX_COPIES = 256,
    EMU_STACK_BYTES = 1 << 17,
    EMU_EXCHANGE_BYTES = 40,
    EMU_MAX_GROUPS = 17, // of lanes of a warp that exchange data: the whole warp, and up to sixteen others
    EMU_MAX_SHARED_BYTES = 227 * 1024
};

struct emu_copy {
    uint32_t to;
    const void *from;
    int bytes;
    bool valid;
    int group;
};
struct emu_context {
#ifdef EMU_USES_UCONTEXT
    ucontext_t context;
#else
    void *stack_pointer;
#endif
};
struct emu_fiber {
    struct emu_context context;
    struct emu_dim3 index;
    const char *waits_at;    // NULL: at nothing
    struct emu_copy *copies; // in flight, oldest first
    int num_copies, groups;  // groups: committed so far
    int waits_for;           // 1 + index of the mbarrier that it waits at; 0: none
};
// Lanes of a warp that exchange data.
struct emu_group {
    uint32_t lanes, arrived;
    int bytes;
    unsigned generation;
    const char *what;
    char data[2][32 * EMU_EXCHANGE_BYTES];
};
struct emu_warp {
    uint32_t lanes, ready, started, ended, at_barrier; // bits of lanes; ready: runs, can run, or has not started
    // epoch: counts __syncwarp; first_epoch: its value when the block began
    uint64_t epoch, first_epoch;
    int num_groups;
    struct emu_group groups[EMU_MAX_GROUPS];
};
// The last write and the last read of a word of shared memory.
struct emu_word {
    uint64_t write_epoch, write_warp_epoch, read_epoch, read_warp_epoch;
    int writer, reader; // a thread, or EMU_WARP + a warp (several of its lanes), or EMU_MANY
    bool in_flight;     // an asynchronous copy is to write it
};
enum { EMU_WARP = 1 << 16, EMU_MANY = 1 << 17 };

struct emu_kernel {
    const char *name;
    struct emu_dim3 grid, size;
    uint32_t shared_bytes;
    void (*body)(void *);
    void *argument;
    uint64_t launch; // number of the launch in this program: in each one blocks have another order
    // for each block: 0 not begun, 1 at work, 2 done, 3 at work and all blocks of lower index done
    unsigned char *progress;
    struct emu_global *global; // global.h's
};

// The block that a host thread works on; each host thread keeps its own from launch to launch.
struct emu_block {
    const struct emu_kernel *kernel;
    struct emu_dim3 block_index, grid, size, indexed; // indexed: the block size for which the fibers have their indices
    int threads, num_warps, current, ended;
    struct emu_fiber *fibers;
    struct emu_warp *warps;
    int barrier_arrived;
    uint64_t epoch, first_epoch; // epoch: counts __syncthreads; first_epoch: its value when this block began
    unsigned char *shared;
    struct emu_word *words;
    uint32_t shared_bytes;
    uint64_t bank_conflicts, matrix_loads;
    // free_stacks: those that no thread uses; stack: the running thread's.
    char *free_stacks[EMU_MAX_THREADS + 1], *stack;
    int num_free_stacks, num_stacks;
    char *fiber_stacks[EMU_MAX_THREADS];
    struct emu_context host;
    char signal_stack[1 << 14];
    uint64_t linear_index;
    struct emu_async *async, *async_memory; // async.h's; async: NULL until the block needs it
    // for blocks that this host thread runs while this block waits for them; NULL until needed
    struct emu_block *nested;
};
inline thread_local struct emu_block *emu;        // this host thread's running block; NULL outside of kernels
inline thread_local struct emu_block *emu_cached; // this host thread's own block

// Shared addresses begin above 0, so that an offset that is used as an address is found.
enum { EMU_SHARED_BASE = 0x4000 };
static inline uint32_t emu_shared_base(void) { return EMU_SHARED_BASE; }
static inline int emu_lane(void) { return emu->current % 32; }

// Reports a fault in the program under test, with the thread that it is in, and ends the program with status 3.
__attribute__((noreturn, format(printf, 1, 2))) static void emu_report(const char *format, ...) {
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
static int emu_offset(uint32_t address) { return (int)(address - EMU_SHARED_BASE); }

#include "test/emu/memory.h" // emu_access_global

// async.h
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
#else
extern "C" void emu_switch(void **from_stack_pointer, void *to_stack_pointer);
__asm__(".text\n.weak emu_switch\n.type emu_switch,@function\nemu_switch:\n"
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
        "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
        "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
        ".size emu_switch,.-emu_switch\n");
static inline void emu_context_switch(struct emu_context *from, struct emu_context *to) {
    emu_switch(&from->stack_pointer, to->stack_pointer);
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
static void emu_wait(const char *what) {
    struct emu_fiber *self = &emu->fibers[emu->current];
    const int next = emu_next();
    self->waits_at = what;
    if (next < 0)
        emu_report_stuck();
    emu->fiber_stacks[emu->current] = emu->stack;
    emu->current = next;
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

#include "test/emu/clocks.h" // emu_clocks_meet, emu_touch_mark

// --- Warps and barriers -------------------------------------------------------------------------------------------

static struct emu_group *emu_find_group(struct emu_warp *warp, uint32_t lanes) {
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
// Gathers `bytes` bytes from `mine` of every lane in `lanes` (bits; those that the block has). Returns all of them,
// lane i's at i * bytes; they stay until the lane's second next call. what: the collective's name, which must be the
// same for all. combine: the last lane to come calls it to replace what all gave by what all get; NULL: nothing is
// replaced.
static const void *emu_warp_exchange_among(uint32_t lanes, const void *mine, int bytes, const char *what,
                                           void (*combine)(void *) = NULL) {
    struct emu_warp *warp = &emu->warps[emu->current / 32];
    const uint32_t lane = 1u << emu_lane();
    if (!(lanes & lane))
        emu_report("is not in the mask that it gives to %s", what);
    struct emu_group *group = &warp->groups[0]; // the whole warp's
    if ((lanes & warp->lanes) != warp->lanes)
        group = emu_find_group(warp, lanes & warp->lanes);
    if (group->arrived == 0) {
        group->bytes = bytes;
        group->what = what;
    } else if (group->bytes != bytes || (group->what != what && strcmp(group->what, what) != 0)) {
        emu_report("lanes of a warp meet in different collectives, %s and %s", what, group->what);
    }
    char *slot = group->data[group->generation % 2];
    memcpy(slot + emu_lane() * bytes, mine, (size_t)bytes);
    group->arrived |= lane;
    if (group->arrived == group->lanes) {
        if (combine)
            combine(slot);
        group->arrived = 0;
        group->generation++;
        warp->ready |= group->lanes;
    } else {
        warp->ready &= ~lane;
        emu_wait(what);
    }
    return slot;
}
// Gathers among the whole warp; `what` is the calling function's name.
static inline const void *emu_warp_exchange(const void *mine, int bytes, const char *what = __builtin_FUNCTION()) {
    return emu_warp_exchange_among(~0u, mine, bytes, what);
}
static inline const void *emu_warp_combine(const void *mine, int bytes, void (*combine)(void *),
                                           const char *what = __builtin_FUNCTION()) {
    return emu_warp_exchange_among(~0u, mine, bytes, what, combine);
}
static inline void emu_syncwarp(uint32_t lanes) {
    emu_warp_exchange_among(lanes, "", 1, "__syncwarp");
    struct emu_warp *warp = &emu->warps[emu->current / 32];
    if ((lanes & warp->lanes & ((1u << emu_lane()) - 1u)) == 0) { // the first lane of the group
        warp->epoch++;
        if (emu->async)
            emu_clocks_meet(emu->current / 32 * 32, 32, lanes & warp->lanes);
    }
    emu_warp_exchange_among(lanes, "", 1, "__syncwarp"); // so that no lane goes on before the epoch is counted
}
static inline void emu_syncthreads(void) {
    struct emu_warp *warp = &emu->warps[emu->current / 32];
    const uint32_t lane = 1u << emu_lane();
    warp->at_barrier |= lane;
    if (++emu->barrier_arrived == emu->threads) {
        emu->barrier_arrived = 0;
        emu->epoch++;
        if (emu->async)
            emu_clocks_meet(0, emu->threads, ~0u);
        for (int w = 0; w < emu->num_warps; w++) {
            emu->warps[w].ready |= emu->warps[w].at_barrier;
            emu->warps[w].at_barrier = 0;
        }
    } else {
        warp->ready &= ~lane;
        emu_wait("__syncthreads");
    }
}

// --- Registers in flight ------------------------------------------------------------------------------------------

// What accumulators and A registers of a wgmma in flight hold. It is a NaN as a float and as either bf16, passes
// through arithmetic, and comes of nothing else.
static const uint32_t EMU_IN_FLIGHT = 0x7fed7fed;
static inline bool emu_from_flight(uint32_t bits) { // bits of a float, or of a widened bf16
    return (bits & 0x7fffffffu) == EMU_IN_FLIGHT || (bits & 0x7fffffffu) == (EMU_IN_FLIGHT & 0xffff0000u);
}
static void emu_check_not_in_flight(const void *words, size_t bytes, const char *verb) {
    for (size_t i = 0; i + 4 <= bytes; i += 4) {
        uint32_t bits;
        memcpy(&bits, (const char *)words + i, 4);
        if (emu_from_flight(bits))
            emu_report("%s what it read from an accumulator or A register of a wgmma in flight", verb);
    }
}

// --- Shared memory ------------------------------------------------------------------------------------------------

static void emu_touch_word(struct emu_word *word, bool write, uint32_t address) {
    const int me = emu->current, my_warp = me / 32;
    const uint64_t warp_epoch = emu->warps[my_warp].epoch;
    if (word->in_flight)
        emu_report("touches what an asynchronous copy is to write, before its wait, shared address %d",
                   emu_offset(address));
    if (emu->async) {
        emu_touch_mark(address, write);
        return;
    }
    if (word->write_epoch == emu->epoch && word->writer != me &&
        !(word->writer / 32 == my_warp && word->write_warp_epoch < warp_epoch)) {
        if (write)
            emu_report("two threads write a word without a barrier between, shared address %d; the other is %d",
                       emu_offset(address), word->writer);
        emu_report("reads what another thread wrote before a barrier, shared address %d; the other is %d",
                   emu_offset(address), word->writer);
    }
    const bool read_now = word->read_epoch == emu->epoch;
    if (write) {
        const int reader_warp = word->reader >= EMU_MANY   ? -1
                                : word->reader >= EMU_WARP ? word->reader - EMU_WARP
                                                           : word->reader / 32;
        if (read_now && word->reader != me && !(reader_warp == my_warp && word->read_warp_epoch < warp_epoch))
            emu_report("writes what another thread read before a barrier, shared address %d", emu_offset(address));
        word->write_epoch = emu->epoch;
        word->write_warp_epoch = warp_epoch;
        word->writer = me;
    } else {
        if (!read_now)
            word->reader = me;
        else if (word->reader < EMU_WARP && word->reader / 32 == my_warp)
            word->reader = word->reader == me ? me : EMU_WARP + my_warp;
        else if (word->reader != EMU_WARP + my_warp)
            word->reader = EMU_MANY;
        word->read_epoch = emu->epoch;
        word->read_warp_epoch = warp_epoch;
    }
}
// Checks and records an access to shared memory of `bytes` bytes; returns where they are on the host. bytes: at least
// 4, since narrower accesses would need finer records.
static unsigned char *emu_touch(uint32_t address, int bytes, bool write) {
    const uint32_t offset = address - EMU_SHARED_BASE;
    if (offset % (uint32_t)bytes != 0)
        emu_report("misaligned access of %d bytes, shared address %d", bytes, emu_offset(address));
    if (offset >= emu->shared_bytes || (uint32_t)bytes > emu->shared_bytes - offset)
        emu_report("access past the shared memory of the launch, shared address %d of %u", emu_offset(address),
                   emu->shared_bytes);
    if (bytes < 4)
        emu_report("accesses of %d bytes are not modeled, shared address %d", bytes, emu_offset(address));
    for (int i = 0; i < bytes / 4; i++)
        emu_touch_word(&emu->words[offset / 4 + (uint32_t)i], write, address + 4 * (uint32_t)i);
    return emu->shared + offset;
}
static inline void emu_load_shared(void *to, uint32_t from, int bytes) {
    memcpy(to, emu_touch(from, bytes, false), (size_t)bytes);
}
static inline void emu_store_shared(uint32_t to, const void *from, int bytes) {
    if (emu->async)
        emu_check_not_in_flight(from, (size_t)bytes, "stores");
    memcpy(emu_touch(to, bytes, true), from, (size_t)bytes);
}
// Loads one lane's row of an ldmatrix, 16 bytes. A matrix's eight rows are read at once, so each should lie in banks of
// its own.
static inline void emu_load_matrix_row(void *to, uint32_t row, const char *what = __builtin_FUNCTION()) {
    emu_load_shared(to, row, 16);
    const uint32_t *rows = (const uint32_t *)emu_warp_exchange(&row, 4, what);
    for (int i = emu_lane() / 8 * 8; i < emu_lane(); i++)
        if (rows[i] / 16 % 8 == row / 16 % 8 && rows[i] != row)
            emu->bank_conflicts++;
    emu->matrix_loads += emu_lane() == 0;
}

// --- Asynchronous copies ------------------------------------------------------------------------------------------

static void emu_copy_async(uint32_t to, const void *from, int bytes, bool valid) {
    struct emu_fiber *self = &emu->fibers[emu->current];
    if ((uintptr_t)from % (uintptr_t)bytes != 0)
        emu_report("copies from a misaligned global address, %p, to shared address %d", from, emu_offset(to));
    if (valid)
        emu_touch_global(from, bytes, false);
    if (self->num_copies == EMU_MAX_COPIES)
        emu_report("has more copies under way than the model holds");
    memset(emu_touch(to, bytes, true), 0xff, (size_t)bytes); // from now on it may land at any time
    for (int i = 0; i < bytes / 4; i++)
        emu->words[(to - EMU_SHARED_BASE) / 4 + (uint32_t)i].in_flight = true;
    const struct emu_copy copy = {to, from, bytes, valid, self->groups};
    self->copies[self->num_copies++] = copy;
}
static inline void emu_commit_async(void) { emu->fibers[emu->current].groups++; }
static void emu_wait_async(int pending) {
    struct emu_fiber *self = &emu->fibers[emu->current];
    int landed = 0;
    for (; landed < self->num_copies && self->copies[landed].group < self->groups - pending; landed++) {
        const struct emu_copy *copy = &self->copies[landed];
        for (int i = 0; i < copy->bytes / 4; i++)
            emu->words[(copy->to - EMU_SHARED_BASE) / 4 + (uint32_t)i].in_flight = false;
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

// --- Arithmetic ---------------------------------------------------------------------------------------------------

static inline float emu_bf16(uint32_t bits) {
    bits <<= 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline uint16_t emu_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        emu_check_not_in_flight(&bits, sizeof bits, "rounds");
        return 0x7fff;
    }
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
// Moves the result of ex2.approx or rcp.approx off the rounded one by as many units in the last place as the PTX ISA
// allows, up or down by a hash of the argument. So a kernel meets the largest errors that its bounds have to cover, the
// same ones in each run. Zeros, infinities and NaN are as in the ISA's tables.
static inline float emu_units_off(float result, float argument, uint32_t units) {
    uint32_t bits, hash;
    memcpy(&bits, &result, sizeof bits);
    memcpy(&hash, &argument, sizeof hash);
    hash *= 0x9e3779b1u;
    bits += hash >> 31 ? units : -units;
    memcpy(&result, &bits, sizeof result);
    return result;
}
static inline float emu_exp2(float x) {
    const float result = exp2f(x);
    if (result < 0x1p-126f)
        return 0.0f;
    return x == 0 || !std::isfinite(result) ? result : emu_units_off(result, x, 2);
}
static inline float emu_reciprocal(float x) {
    const float result = 1.0f / x;
    if (fabsf(result) < 0x1p-126f)
        return copysignf(0.0f, result);
    return !std::isfinite(result) ? result : emu_units_off(result, x, 1);
}

// --- A launch -----------------------------------------------------------------------------------------------------

// Makes this host thread's block ready for a kernel.
static void emu_block_enter(const struct emu_kernel *kernel) {
    if (!emu_cached) {
        emu_cached = (struct emu_block *)calloc(1, sizeof *emu_cached);
        emu_cached->fibers = (struct emu_fiber *)calloc(EMU_MAX_THREADS, sizeof *emu_cached->fibers);
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
static double emu_seconds(void) {
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

#include "test/emu/async.h" // mbarriers, TMA, wgmma, named barriers
