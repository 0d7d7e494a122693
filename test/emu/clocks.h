// Vector clocks, which say who has seen what. They are for blocks whose threads wait for each other at mbarriers and
// named barriers, or whose shared memory TMA and wgmma touch too. (Blocks that have only __syncthreads and __syncwarp
// use warp.h's counts, which are faster. A block changes over at its first mbarrier, named barrier, bulk copy or
// wgmma.)
//
// Whatever acts has a clock of its own: each thread; the wgmmas of each warpgroup; the bulk stores of each thread that
// makes some (one clock for what they have read, one for what they have written); and what lands at each mbarrier. A
// thread has three rows, with a time of each of these clocks: up to when it has seen what the clock's owner did; up to
// when it has seen writes that were followed by async_proxy_fence; and up to when anything had been seen before an
// async_proxy_fence_global that it has seen. A word of shared memory has a mark: who wrote it last, who has read it
// since, and when. An access is good if its thread has seen everything that it must come after. Global memory has its
// own marks in test/emu/global.h. After FastTrack (Flanagan and Freund, 2009).
#pragma once
#include "test/emu/warp.h" // struct emu_block
#include <algorithm>       // std::fill, std::find, std::remove_if
#include <map>             // std::map
#include <stddef.h>        // size_t
#include <utility>         // std::pair
#include <vector>          // std::vector

enum {
    EMU_WARPGROUPS = 4, // warpgroups that may use wgmma
    EMU_STORERS = 16,   // threads that may make bulk stores
    EMU_MBARRIERS = 64,
    EMU_NAMED_BARRIERS = 16,
    EMU_NOBODY = 0xffff
};

struct emu_mark {
    uint32_t write_time, read_time;
    uint16_t writer, reader; // clocks
    bool in_flight;          // as the word's, which lies elsewhere in memory
    uint16_t barrier;        // 1 + index of the mbarrier that the word is a part of; 0: none
    // > 0: the row of emu_async.readers that has the times of several readers, instead of `reader`
    int readers;
    uint32_t wgmma_reads[EMU_WARPGROUPS];
};

// What a thread has learned by load_acquire: up to which time of a clock of another block it has seen. at, thread:
// when, and which thread.
struct emu_learned {
    uint32_t time, at;
    int thread;
};
typedef std::map<std::pair<uint64_t, int>, uint32_t> emu_known; // {block, clock} -> time

struct emu_mbarrier;
struct emu_named;
struct emu_warpgroup;
struct emu_thread;

struct emu_async {
    int threads, clocks;                        // clocks: their number
    std::vector<uint32_t> rows;                 // (threads, EMU_ROWS, clocks)
    std::vector<struct emu_mark> marks;         // one for each word of shared memory
    std::vector<std::vector<uint32_t>> readers; // (rows, clocks); row 0 is not used
    std::vector<int> free_readers;
    std::vector<uint32_t> meeting;   // (EMU_ROWS, clocks) scratch of emu_clocks_meet
    std::vector<int> global_writers; // this block's clocks under which global memory was written
    std::map<std::pair<uint64_t, int>, std::vector<struct emu_learned>> learned; // by {block, clock}
    std::vector<struct emu_mbarrier> barriers;
    std::vector<struct emu_named> named;
    std::vector<struct emu_warpgroup> warpgroups;
    std::vector<struct emu_thread> thread;
    int storers;
    int registers_free;         // by setmaxnreg
    std::vector<int> registers; // a thread's, for each warp
};

static inline int emu_wgmma_clock(int warpgroup) { return emu->async->threads + warpgroup; }
static inline int emu_storer_clock(int storer) { return emu->async->threads + EMU_WARPGROUPS + storer; }
static inline int emu_barrier_clock(int barrier) {
    return emu->async->threads + EMU_WARPGROUPS + EMU_STORERS + barrier;
}
// Returns the clock of what a storer has written; emu_storer_clock is for what it has read.
static inline int emu_written_clock(int storer) { return emu_barrier_clock(EMU_MBARRIERS) + storer; }
enum { EMU_ROWS = 3 }; // seen; seen and fenced for shared memory; seen and fenced for global memory
static inline uint32_t *emu_seen(int thread) {
    return emu->async->rows.data() + (size_t)thread * EMU_ROWS * (size_t)emu->async->clocks;
}
static inline uint32_t *emu_seen_fenced(int thread) { return emu_seen(thread) + emu->async->clocks; }
static inline uint32_t *emu_seen_fenced_global(int thread) { return emu_seen(thread) + 2 * emu->async->clocks; }
static inline std::vector<uint32_t> emu_rows_of_nobody(void) {
    return std::vector<uint32_t>(EMU_ROWS * (size_t)emu->async->clocks, 0u);
}
static inline uint32_t emu_now(int thread) { return emu_seen(thread)[thread]; }

// Adds to `to` (EMU_ROWS, clocks) all that `from` (EMU_ROWS, clocks) has seen.
static void emu_clocks_join(uint32_t *to, const uint32_t *from) {
    const int n = EMU_ROWS * emu->async->clocks;
#pragma omp simd
    for (int i = 0; i < n; i++)
        to[i] = to[i] > from[i] ? to[i] : from[i];
}
static void emu_clocks_join(uint32_t *to, int from_thread) {
    emu_clocks_join(to, emu_seen(from_thread));
    emu_seen(from_thread)[from_thread]++; // so that what the thread does from now on is not included
}
// Lets `count` threads from `first` on, in each warp only the `lanes`, see what all of them have seen and done.
void emu_clocks_meet(int first, int count, uint32_t lanes) {
    std::vector<uint32_t> &all = emu->async->meeting;
    std::fill(all.begin(), all.end(), 0u);
    for (int i = 0; i < count; i++)
        if (lanes >> i % 32 & 1u)
            emu_clocks_join(all.data(), first + i);
    for (int i = 0; i < count; i++)
        if (lanes >> i % 32 & 1u)
            emu_clocks_join(emu_seen(first + i), all.data());
}

// --- Marks --------------------------------------------------------------------------------------------------------

static int emu_readers_new(void) {
    struct emu_async *a = emu->async;
    if (a->free_readers.empty()) {
        if (a->readers.empty())
            a->readers.emplace_back();
        a->readers.emplace_back((size_t)a->clocks, 0u);
        return (int)a->readers.size() - 1;
    }
    const int row = a->free_readers.back();
    a->free_readers.pop_back();
    a->readers[(size_t)row].assign((size_t)a->clocks, 0u);
    return row;
}
static void emu_mark_read(struct emu_mark *mark, int clock, uint32_t time, const uint32_t *seen) {
    if (mark->readers > 0) {
        emu->async->readers[(size_t)mark->readers][(size_t)clock] = time;
    } else if (mark->reader == EMU_NOBODY || mark->reader == clock || mark->read_time <= seen[mark->reader]) {
        mark->reader = (uint16_t)clock;
        mark->read_time = time;
    } else {
        mark->readers = emu_readers_new();
        std::vector<uint32_t> &row = emu->async->readers[(size_t)mark->readers];
        row[mark->reader] = mark->read_time;
        row[(size_t)clock] = time;
    }
}
static void emu_mark_written(struct emu_mark *mark, int clock, uint32_t time) {
    if (mark->readers > 0)
        emu->async->free_readers.push_back(mark->readers);
    mark->readers = 0;
    mark->reader = EMU_NOBODY;
    memset(mark->wgmma_reads, 0, sizeof mark->wgmma_reads);
    mark->writer = (uint16_t)clock;
    mark->write_time = time;
}
__attribute__((noreturn)) static void emu_report_unordered(int clock, bool was_write, bool write, uint32_t address) {
    const int at = emu_offset(address), threads = emu->async->threads;
    if (clock >= emu_barrier_clock(0))
        emu_report("%s what TMA wrote, without having waited at its mbarrier, shared address %d",
                   write ? "writes" : "reads", at);
    if (clock >= emu_storer_clock(0))
        emu_report("writes what a bulk store may still read, shared address %d", at);
    if (clock >= threads)
        emu_report("writes what a wgmma of warpgroup %d may still read, shared address %d", clock - threads, at);
    if (was_write && write)
        emu_report("two threads write a word without a barrier between, shared address %d; the other is %d", at, clock);
    if (was_write)
        emu_report("reads what another thread wrote before a barrier, shared address %d; the other is %d", at, clock);
    emu_report("writes what another thread read before a barrier, shared address %d; the other is %d", at, clock);
}
// Checks that the owner of `seen` (clocks) has seen the last write and, before it writes, all reads since.
static inline void emu_check_mark(const struct emu_mark *mark, const uint32_t *seen, bool write, uint32_t address) {
    if (mark->barrier)
        emu_report("touches an mbarrier as if it were data, shared address %d", emu_offset(address));
    if (mark->write_time > seen[mark->writer])
        emu_report_unordered(mark->writer, true, write, address);
    if (!write)
        return;
    if (mark->readers > 0) {
        const std::vector<uint32_t> &row = emu->async->readers[(size_t)mark->readers];
        for (int i = 0; i < emu->async->clocks; i++)
            if (row[(size_t)i] > seen[i])
                emu_report_unordered(i, false, true, address);
    } else if (mark->reader != EMU_NOBODY && mark->read_time > seen[mark->reader]) {
        emu_report_unordered(mark->reader, false, true, address);
    }
    for (int g = 0; g < EMU_WARPGROUPS; g++)
        if (mark->wgmma_reads[g] > seen[emu_wgmma_clock(g)])
            emu_report_unordered(emu_wgmma_clock(g), false, true, address);
}
static inline struct emu_mark *emu_mark_at(uint32_t address) {
    return &emu->async->marks[(address - EMU_SHARED_BASE) / 4];
}
// Notes for a word of shared memory whether an asynchronous copy is to write it.
static void emu_set_in_flight(uint32_t address, bool in_flight) {
    emu->words[(address - EMU_SHARED_BASE) / 4].in_flight = in_flight;
    if (emu->async)
        emu_mark_at(address)->in_flight = in_flight;
}
// Checks and marks an ordinary access by the current thread.
void emu_touch_mark(uint32_t address, bool write) {
    struct emu_mark *mark = emu_mark_at(address);
    const uint32_t *seen = emu_seen(emu->current);
    emu_check_mark(mark, seen, write, address);
    if (write)
        emu_mark_written(mark, emu->current, seen[emu->current]);
    else
        emu_mark_read(mark, emu->current, seen[emu->current], seen);
}
static inline void emu_check_fenced(const struct emu_mark *mark, const uint32_t *fenced, uint32_t address,
                                    const char *what) {
    if (mark->writer < emu->async->threads && mark->write_time > fenced[mark->writer])
        emu_report("%s touches what thread %d wrote without async_proxy_fence after it, shared address %d", what,
                   mark->writer, emu_offset(address));
}
// Checks a range of whole words that the async proxy is to touch on behalf of the current thread: ordinary stores to it
// must have been fenced by the threads that made them.
static void emu_check_async(uint32_t address, uint32_t bytes, bool write, const char *what) {
    if (address < EMU_SHARED_BASE || address - EMU_SHARED_BASE > emu->shared_bytes ||
        bytes > emu->shared_bytes - (address - EMU_SHARED_BASE))
        emu_report("%s goes past the shared memory of the launch, shared address %d, %u bytes of %u", what,
                   emu_offset(address), bytes, emu->shared_bytes);
    const uint32_t *seen = emu_seen(emu->current), *fenced = emu_seen_fenced(emu->current);
    const struct emu_mark *mark = emu_mark_at(address), *good = NULL;
    for (uint32_t i = 0; i < bytes / 4; i++) {
        if (good && !write && !mark[i].in_flight && mark[i].writer == good->writer &&
            mark[i].write_time == good->write_time && !mark[i].barrier)
            continue; // like the word before
        if (mark[i].in_flight)
            emu_report("%s touches what an asynchronous copy is to write, before its wait, shared address %d", what,
                       emu_offset(address + 4 * i));
        emu_check_mark(&mark[i], seen, write, address + 4 * i);
        emu_check_fenced(&mark[i], fenced, address + 4 * i, what);
        good = &mark[i];
    }
}

// Returns the time on a thread's clock that stands for an epoch of warp.h, as the block changes over and warp.h's
// records become marks. Time 1 is before the last __syncthreads: all have seen it, but nobody has fenced it.
static uint32_t emu_time_of(int thread, uint32_t warp_epoch) {
    return warp_epoch - emu->warps[thread / 32].first_epoch + 2;
}
static void emu_mark_of(struct emu_mark *mark, const struct emu_word *word) {
    mark->reader = EMU_NOBODY;
    mark->in_flight = word->in_flight;
    if (word->write_epoch >= emu->first_epoch) {
        mark->writer = (uint16_t)word->writer;
        mark->write_time = word->write_epoch < emu->epoch ? 1 : emu_time_of(word->writer, word->write_warp_epoch);
    }
    if (word->read_epoch != emu->epoch)
        return;
    const bool one = word->reader < EMU_WARP, all = word->reader == EMU_MANY;
    const int first = one ? word->reader : all ? 0 : (word->reader - EMU_WARP) * 32;
    const int count = one ? 1 : all || emu->threads - first < 32 ? emu->threads - first : 32;
    mark->readers = emu_readers_new();
    for (int i = first; i < first + count; i++)
        emu->async->readers[(size_t)mark->readers][(size_t)i] =
            all ? emu_now(i) : emu_time_of(i, word->read_warp_epoch);
}
static void emu_clocks_begin(void) {
    struct emu_async *a = emu->async;
    a->threads = emu->threads;
    a->clocks = emu->threads + EMU_WARPGROUPS + EMU_STORERS + EMU_MBARRIERS + EMU_STORERS;
    a->rows.assign((size_t)a->threads * EMU_ROWS * (size_t)a->clocks, 0u);
    for (int i = 0; i < a->threads; i++)
        std::fill(emu_seen(i), emu_seen(i) + a->threads, 1u);
    a->meeting = emu_rows_of_nobody();
    a->global_writers.clear();
    a->learned.clear();
    a->readers.clear();
    a->free_readers.clear();
    for (int i = 0; i < a->threads; i++) {
        const uint32_t now = emu_time_of(i, emu->warps[i / 32].epoch);
        for (int j = i / 32 * 32; j < i / 32 * 32 + 32 && j < a->threads; j++)
            emu_seen(i)[j] = now - 1;
        emu_seen(i)[i] = now;
    }
    const struct emu_mark none = {};
    a->marks.assign((size_t)(emu->shared_bytes + 3) / 4, none);
    for (size_t i = 0; i < a->marks.size(); i++)
        emu_mark_of(&a->marks[i], &emu->words[i]);
}
