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
// - ldmatrix and load_words_apart count the bank conflicts of their rows and words.
// - test/emu/clocks.h and async.h model what is asynchronous on sm_90a, and how threads wait for each other there.
// A finding ends the program with status 3, and names kernel, block and thread.
#pragma once
#include <math.h>   // exp2f
#include <stdint.h> // uint32_t, uint64_t
#include <stdio.h>  // fprintf
#include <stdlib.h> // calloc, _Exit
#include <string.h> // memcpy, memset
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
    uint32_t epoch, first_epoch;
    int num_groups;
    struct emu_group groups[EMU_MAX_GROUPS];
};
// The last write and the last read of a word of shared memory; small, so that caches hold those of a block's words.
struct emu_word {
    uint32_t write_epoch, write_warp_epoch, read_epoch, read_warp_epoch;
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
    uint32_t epoch, first_epoch; // epoch: counts __syncthreads; first_epoch: its value when this block began
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
__attribute__((noreturn, format(printf, 1, 2))) void emu_report(const char *format, ...);
static inline int emu_offset(uint32_t address) { return (int)(address - EMU_SHARED_BASE); }

#include "test/emu/memory.h" // emu_access_global

// fibers.h: lets other threads run until the current one is ready again; the caller has marked it as not ready. what:
// what it waits at, for messages.
void emu_wait(const char *what);
// Returns the group of these lanes of a warp, which is not the whole warp's; makes it where it is new.
struct emu_group *emu_find_group(struct emu_warp *warp, uint32_t lanes);
// clocks.h, for blocks that have emu_async.
void emu_clocks_meet(int first, int count, uint32_t lanes);
void emu_touch_mark(uint32_t address, bool write);

// --- Warps and barriers -------------------------------------------------------------------------------------------

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
// Counts an epoch of the warp, when the last lane has come and before any goes on. masks: each lane's, by lane.
static void emu_warp_meets(void *masks) {
    struct emu_warp *warp = &emu->warps[emu->current / 32];
    warp->epoch++;
    if (emu->async)
        emu_clocks_meet(emu->current / 32 * 32, 32, ((const uint32_t *)masks)[emu_lane()] & warp->lanes);
}
static inline void emu_syncwarp(uint32_t lanes) {
    emu_warp_exchange_among(lanes, &lanes, sizeof lanes, "__syncwarp", emu_warp_meets);
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
// Reports words (bytes bytes) that hold what is in flight; verb: what the thread does with them.
void emu_check_not_in_flight(const void *words, size_t bytes, const char *verb);

// --- Shared memory ------------------------------------------------------------------------------------------------

static void emu_touch_word(struct emu_word *word, bool write, uint32_t address) {
    const int me = emu->current, my_warp = me / 32;
    const uint32_t warp_epoch = emu->warps[my_warp].epoch;
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
// A lane's row of an ldmatrix: its 16 bytes and its address.
struct emu_matrix_row {
    uint32_t x[4], row;
};
// Loads each lane's row of an ldmatrix; returns all, by lane, until the lane's second next collective. A matrix's eight
// rows are read at once, so each should lie in banks of its own.
static inline const struct emu_matrix_row *emu_load_matrix_rows(uint32_t row, const char *what = __builtin_FUNCTION()) {
    struct emu_matrix_row mine = {{0, 0, 0, 0}, row};
    emu_load_shared(mine.x, row, sizeof mine.x);
    const struct emu_matrix_row *rows = (const struct emu_matrix_row *)emu_warp_exchange(&mine, sizeof mine, what);
    for (int i = emu_lane() / 8 * 8; i < emu_lane(); i++)
        if (rows[i].row / 16 % 8 == row / 16 % 8 && rows[i].row != row)
            emu->bank_conflicts++;
    emu->matrix_loads += emu_lane() == 0;
    return rows;
}

// Loads a word of each of four addresses. The lanes' i-th words are read at once, so each should lie in a bank of its
// own.
static inline void emu_load_words_apart(uint32_t to[4], const uint32_t from[4],
                                        const char *what = __builtin_FUNCTION()) {
    for (int i = 0; i < 4; i++)
        emu_load_shared(to + i, from[i], 4);
    const uint32_t *all = (const uint32_t *)emu_warp_exchange(from, 16, what);
    for (int lane = 0; lane < emu_lane(); lane++)
        for (int i = 0; i < 4; i++)
            if (all[4 * lane + i] / 4 % 32 == from[i] / 4 % 32 && all[4 * lane + i] != from[i])
                emu->bank_conflicts++;
}

// --- Asynchronous copies ------------------------------------------------------------------------------------------

void emu_copy_async(uint32_t to, const void *from, int bytes, bool valid);
static inline void emu_commit_async(void) { emu->fibers[emu->current].groups++; }
void emu_wait_async(int pending);

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

#include "test/emu/sm90.h" // mbarriers, TMA, wgmma, named barriers
