// A functional model of one thread block, for the host: what kernels/ptx.cuh's models and cuda_runtime.h's stand-ins
// use.
//
// The threads of a block are fibers that run in turn until they wait. It is stricter than a GPU:
// - asynchronous copies land at the wait that asks for them, not before, and their destination is poisoned meanwhile;
// - shared memory is poisoned (NaN) when a block starts;
// - two threads that touch one word of shared memory, one of them writing, without a barrier between them are reported,
// as
//   are misaligned accesses, accesses past the block's shared memory, lanes of a warp that wait at different
//   collectives, and blocks that can't go on;
// - ldmatrix reports the bank conflicts of its rows.
// A finding ends the program with status 3, naming block and thread.
#pragma once
#include <math.h>   // exp2f
#include <stdint.h> // uint32_t, uint64_t
#include <stdio.h>  // fprintf
#include <stdlib.h> // malloc, exit
#include <string.h> // memcpy, memset
#if !defined(__x86_64__)
#include <ucontext.h> // swapcontext
#endif

struct emu_dim3 {
    unsigned x, y, z;
    emu_dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

enum { EMU_MAX_THREADS = 1024, EMU_MAX_COPIES = 256, EMU_STACK_BYTES = 1 << 17, EMU_EXCHANGE_BYTES = 32 };

struct emu_copy {
    uint32_t to;
    const void *from;
    int bytes;
    bool valid;
    int group;
};
struct emu_fiber {
#if defined(__x86_64__)
    void *stack_pointer;
#else
    ucontext_t context;
#endif
    char *stack;
    bool done;
    struct emu_copy copies[EMU_MAX_COPIES]; // under way, oldest first
    int num_copies, groups;                 // groups: committed so far
};
struct emu_warp {
    int arrived, bytes;
    unsigned generation;
    uint64_t epoch; // of __syncwarp
    char data[2][32 * EMU_EXCHANGE_BYTES];
};
// Who touched a word of shared memory last, and when.
struct emu_word {
    uint64_t write_epoch, write_warp_epoch, read_epoch, read_warp_epoch;
    int writer, reader; // thread; reader may be EMU_WARP + warp (several lanes of it) or EMU_MANY
};
enum { EMU_WARP = 1 << 16, EMU_MANY = 1 << 17 };

// One block at work; one per host thread.
struct emu_block {
    struct emu_dim3 block_index, grid, size;
    int threads, current, idle_turns;
    struct emu_fiber *fibers;
    struct emu_warp warps[EMU_MAX_THREADS / 32];
    int barrier_arrived;
    unsigned barrier_generation;
    uint64_t epoch;
    unsigned char *shared;
    struct emu_word *words;
    uint32_t shared_bytes;
    uint64_t bank_conflicts, matrix_loads;
    void (*body)(void *);
    void *argument;
#if defined(__x86_64__)
    void *host_stack_pointer;
#else
    ucontext_t host_context;
#endif
};
static __thread struct emu_block *emu;

// Shared addresses don't begin at 0, so that an offset used as an address is found out.
enum { EMU_SHARED_BASE = 0x4000 };
static inline uint32_t emu_shared_base(void) { return EMU_SHARED_BASE; }
static inline int emu_lane(void) { return emu->current % 32; }

__attribute__((noreturn)) static void emu_report(const char *what, uint32_t address) {
    fprintf(stderr, "emu: block (%u, %u, %u) thread %d: %s, shared address %d\n", emu->block_index.x,
            emu->block_index.y, emu->block_index.z, emu->current, what, (int)address - EMU_SHARED_BASE);
    fflush(stderr);
    _Exit(3);
}

// --- Fibers -------------------------------------------------------------------------------------------------------

#if defined(__x86_64__)
extern "C" void emu_switch(void **from_stack_pointer, void *to_stack_pointer);
__asm__(".text\n.globl emu_switch\n.type emu_switch,@function\nemu_switch:\n"
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
        "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
        "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
        ".size emu_switch,.-emu_switch\n");
#endif

static inline void emu_switch_to(int next) {
    struct emu_fiber *from = &emu->fibers[emu->current], *to = &emu->fibers[next];
    emu->current = next;
#if defined(__x86_64__)
    emu_switch(&from->stack_pointer, to->stack_pointer);
#else
    swapcontext(&from->context, &to->context);
#endif
}
static inline int emu_next(void) {
    int next = emu->current;
    do
        next = next + 1 == emu->threads ? 0 : next + 1;
    while (emu->fibers[next].done && next != emu->current);
    return next;
}
// Lets the others run; called again and again by who waits.
static void emu_yield(void) {
    if (++emu->idle_turns > 4 * emu->threads)
        emu_report("waits for threads that never come (a barrier or collective that not all reach)", EMU_SHARED_BASE);
    const int next = emu_next();
    if (next != emu->current)
        emu_switch_to(next);
}
static void emu_fiber_main(void) {
    emu->body(emu->argument);
    struct emu_fiber *self = &emu->fibers[emu->current];
    if (self->num_copies > 0)
        emu_report("ends with copies under way", self->copies[0].to);
    self->done = true;
    emu->idle_turns = 0;
    const int next = emu_next();
    if (next != emu->current)
        emu_switch_to(next);
#if defined(__x86_64__)
    void *unused;
    emu_switch(&unused, emu->host_stack_pointer);
#else
    setcontext(&emu->host_context);
#endif
}

// --- Warps and barriers -------------------------------------------------------------------------------------------

// Every lane gives `bytes`; returns those of all lanes, one after another, which stay until the lane's next but one
// call.
static const void *emu_warp_exchange(const void *mine, int bytes) {
    struct emu_warp *warp = &emu->warps[emu->current / 32];
    const unsigned generation = warp->generation;
    const int lanes = emu->threads - emu->current / 32 * 32 < 32 ? emu->threads - emu->current / 32 * 32 : 32;
    char *slot = warp->data[generation % 2];
    if (warp->arrived == 0)
        warp->bytes = bytes;
    else if (warp->bytes != bytes)
        emu_report("lanes of a warp meet in different collectives", EMU_SHARED_BASE);
    memcpy(slot + emu_lane() * bytes, mine, (size_t)bytes);
    if (++warp->arrived == lanes) {
        warp->arrived = 0;
        warp->generation++;
    } else
        while (warp->generation == generation)
            emu_yield();
    emu->idle_turns = 0;
    return slot;
}
static inline void emu_syncwarp(void) {
    emu_warp_exchange("", 1);
    if (emu_lane() == 0)
        emu->warps[emu->current / 32].epoch++;
    emu_warp_exchange("", 1); // none goes on before the epoch is counted
}
static inline void emu_syncthreads(void) {
    const unsigned generation = emu->barrier_generation;
    if (++emu->barrier_arrived == emu->threads) {
        emu->barrier_arrived = 0;
        emu->barrier_generation++;
        emu->epoch++;
    } else
        while (emu->barrier_generation == generation)
            emu_yield();
    emu->idle_turns = 0;
}

// --- Shared memory ------------------------------------------------------------------------------------------------

static void emu_touch_word(struct emu_word *word, bool write, uint32_t address) {
    const int me = emu->current, my_warp = me / 32;
    const uint64_t warp_epoch = emu->warps[my_warp].epoch;
    if (word->write_epoch == emu->epoch && word->writer != me &&
        !(word->writer / 32 == my_warp && word->write_warp_epoch < warp_epoch))
        emu_report(write ? "two threads write a word without a barrier between"
                         : "reads what another thread wrote before a "
                           "barrier",
                   address);
    const bool read_now = word->read_epoch == emu->epoch;
    if (write) {
        const int reader_warp = word->reader >= EMU_MANY   ? -1
                                : word->reader >= EMU_WARP ? word->reader - EMU_WARP
                                                           : word->reader / 32;
        if (read_now && word->reader != me && !(reader_warp == my_warp && word->read_warp_epoch < warp_epoch))
            emu_report("writes what another thread read before a barrier", address);
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
static unsigned char *emu_touch(uint32_t address, int bytes, bool write) {
    const uint32_t offset = address - EMU_SHARED_BASE;
    if (offset % (uint32_t)bytes != 0)
        emu_report("misaligned access", address);
    if (offset + (uint32_t)bytes > emu->shared_bytes)
        emu_report("access past the shared memory of the launch", address);
    for (int i = 0; i < bytes / 4; i++)
        emu_touch_word(&emu->words[offset / 4 + (uint32_t)i], write, address);
    return emu->shared + offset;
}
static inline void emu_load_shared(void *to, uint32_t from, int bytes) {
    memcpy(to, emu_touch(from, bytes, false), (size_t)bytes);
}
static inline void emu_store_shared(uint32_t to, const void *from, int bytes) {
    memcpy(emu_touch(to, bytes, true), from, (size_t)bytes);
}
// One lane's row of an ldmatrix. The eight rows of a matrix are read at once: each should be in banks of its own.
static inline void emu_load_matrix_row(void *to, uint32_t row) {
    emu_load_shared(to, row, 16);
    const uint32_t *rows = (const uint32_t *)emu_warp_exchange(&row, 4);
    for (int i = emu_lane() / 8 * 8; i < emu_lane(); i++)
        if (rows[i] / 16 % 8 == row / 16 % 8 && rows[i] != row)
            emu->bank_conflicts++;
    emu->matrix_loads += emu_lane() == 0;
}

// --- Asynchronous copies ------------------------------------------------------------------------------------------

static void emu_copy_async(uint32_t to, const void *from, int bytes, bool valid) {
    struct emu_fiber *self = &emu->fibers[emu->current];
    if ((uintptr_t)from % (uintptr_t)bytes != 0)
        emu_report("copies from a misaligned global address", to);
    if (self->num_copies == EMU_MAX_COPIES)
        emu_report("has more copies under way than the model holds", to);
    memset(emu_touch(to, bytes, true), 0xff, (size_t)bytes); // it may land at any time from now on
    const struct emu_copy copy = {to, from, bytes, valid, self->groups};
    self->copies[self->num_copies++] = copy;
}
static inline void emu_commit_async(void) { emu->fibers[emu->current].groups++; }
static void emu_wait_async(int pending) {
    struct emu_fiber *self = &emu->fibers[emu->current];
    int landed = 0;
    for (; landed < self->num_copies && self->copies[landed].group < self->groups - pending; landed++) {
        const struct emu_copy *copy = &self->copies[landed];
        unsigned char *to = emu_touch(copy->to, copy->bytes, true);
        if (copy->valid)
            memcpy(to, copy->from, (size_t)copy->bytes);
        else
            memset(to, 0, (size_t)copy->bytes);
    }
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
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return 0x7fff;
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
static inline float emu_exp2(float x) {
    const float result = exp2f(x);
    return result < 0x1p-126f ? 0.0f : result;
}

// --- A launch -----------------------------------------------------------------------------------------------------

static void emu_run_block(void) {
    memset(emu->shared, 0xff, emu->shared_bytes);
    emu->epoch++;
    emu->barrier_arrived = 0;
    emu->idle_turns = 0;
    for (int w = 0; w < (emu->threads + 31) / 32; w++)
        emu->warps[w].arrived = 0;
    for (int i = 0; i < emu->threads; i++) {
        struct emu_fiber *fiber = &emu->fibers[i];
        fiber->done = false;
        fiber->num_copies = fiber->groups = 0;
#if defined(__x86_64__)
        void **top = (void **)(fiber->stack + EMU_STACK_BYTES - 64);
        *--top = NULL; // the return address of emu_fiber_main, so that the stack is aligned as after a call
        *--top = (void *)emu_fiber_main;
        fiber->stack_pointer = top - 6; // six registers
#else
        getcontext(&fiber->context);
        fiber->context.uc_stack.ss_sp = fiber->stack;
        fiber->context.uc_stack.ss_size = EMU_STACK_BYTES;
        makecontext(&fiber->context, emu_fiber_main, 0);
#endif
    }
    emu->current = 0;
#if defined(__x86_64__)
    emu_switch(&emu->host_stack_pointer, emu->fibers[0].stack_pointer);
#else
    volatile bool started = false;
    getcontext(&emu->host_context);
    if (!started) {
        started = true;
        setcontext(&emu->fibers[0].context);
    }
#endif
}

static struct emu_block *emu_block_new(struct emu_dim3 grid, struct emu_dim3 size, uint32_t shared_bytes) {
    struct emu_block *block = (struct emu_block *)calloc(1, sizeof *block);
    block->grid = grid;
    block->size = size;
    block->threads = (int)(size.x * size.y * size.z);
    block->shared_bytes = shared_bytes;
    block->shared = (unsigned char *)malloc(shared_bytes + 1);
    block->words = (struct emu_word *)calloc(shared_bytes / 4 + 1, sizeof *block->words);
    block->fibers = (struct emu_fiber *)calloc((size_t)block->threads, sizeof *block->fibers);
    for (int i = 0; i < block->threads; i++)
        block->fibers[i].stack = (char *)aligned_alloc(64, EMU_STACK_BYTES);
    return block;
}
static void emu_block_free(struct emu_block *block) {
    for (int i = 0; i < block->threads; i++)
        free(block->fibers[i].stack);
    free(block->fibers);
    free(block->words);
    free(block->shared);
    free(block);
}

// Runs every block of a grid, in a shuffled order, on all of the host's threads. Returns the bank conflicts of
// ldmatrix.
static uint64_t emu_launch(struct emu_dim3 grid, struct emu_dim3 size, uint32_t shared_bytes, void (*body)(void *),
                           void *argument) {
    const uint64_t blocks = (uint64_t)grid.x * grid.y * grid.z;
    uint64_t stride = blocks * 5 / 8 + 1, conflicts = 0; // coprime with the number of blocks: visits each once
    for (uint64_t a = stride, b = blocks; b != 0;) {
        const uint64_t rest = a % b;
        a = b;
        b = rest;
        if (b == 0 && a != 1) {
            stride++;
            a = stride;
            b = blocks;
        }
    }
#pragma omp parallel reduction(+ : conflicts)
    {
        emu = emu_block_new(grid, size, shared_bytes);
        emu->body = body;
        emu->argument = argument;
#pragma omp for schedule(dynamic)
        for (uint64_t i = 0; i < blocks; i++) {
            const uint64_t at = i * stride % blocks;
            emu->block_index =
                emu_dim3((unsigned)(at % grid.x), (unsigned)(at / grid.x % grid.y), (unsigned)(at / grid.x / grid.y));
            emu_run_block();
        }
        conflicts = emu->bank_conflicts;
        emu_block_free(emu);
        emu = NULL;
    }
    return conflicts;
}
