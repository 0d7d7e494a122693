// The order of a kernel's accesses to global memory by two proxies, the generic one (ordinary loads and stores) and the
// async one (TMA, bulk copies and reductions), after the PTX ISA's memory consistency model ("causality order", "async
// proxy"). It is kept only for blocks that use something asynchronous, for the ranges that bulk operations touch and
// for the 16-byte accesses through kernels/packed.cuh; other loads and stores of global memory can't be seen. Each
// range has the writes of this kernel to it; writes of earlier kernels, every thread has seen.
//
// - An access must come after the writes of what it touches: within a block by its barriers, where a bulk store is done
//   at its thread's bulk_wait (not at bulk_wait_read); between blocks by store_release and load_acquire. Reductions
//   need no order among themselves.
// - The async proxy sees what generic accesses wrote, and what another block did, only after an
//   async_proxy_fence_global between load_acquire and the bulk operation, by a thread of its own block that had seen
//   it.
// - Stricter than PTX, where the completion of a bulk operation implies such a fence: store_release hands on bulk
//   stores only if async_proxy_fence_global came after their bulk_wait.
// - Reads are not recorded: a write that overtakes a read is not found.
#pragma once
#include "test/emu/clocks.h" // emu_seen, emu_known
#include <memory>            // std::shared_ptr
#include <mutex>             // std::mutex

struct emu_global_write {
    uint64_t block; // linear index
    int clock, thread;
    uint32_t time;
    bool async, add;
};
struct emu_global_range {
    uintptr_t end;
    std::vector<struct emu_global_write> writes; // the last write, or several reductions without an order
};
struct emu_global {
    std::mutex mutex;
    std::map<uintptr_t, struct emu_global_range> ranges; // by their begin; they don't overlap
    std::map<const int *, std::shared_ptr<const emu_known>> released;
};

static struct emu_global *emu_global_begin(void) { return new struct emu_global; }
static void emu_global_end(struct emu_global *global) { delete global; }

enum emu_order { EMU_UNSEEN, EMU_UNFENCED, EMU_ORDERED };
// Returns how the current thread's next access by a proxy is ordered to a write.
static enum emu_order emu_global_order(const struct emu_global_write *write, bool async) {
    const uint32_t *seen = emu_seen(emu->current), *fenced = emu_seen_fenced_global(emu->current);
    if (write->block == emu->linear_index) {
        if (write->time > seen[write->clock])
            return EMU_UNSEEN;
        return async && !write->async && write->time > fenced[write->clock] ? EMU_UNFENCED : EMU_ORDERED;
    }
    enum emu_order order = EMU_UNSEEN;
    const auto learned = emu->async->learned.find({write->block, write->clock});
    if (learned == emu->async->learned.end())
        return order;
    for (const struct emu_learned &item : learned->second)
        if (write->time <= item.time && item.at <= seen[item.thread]) {
            if (!async || item.at <= fenced[item.thread])
                return EMU_ORDERED;
            order = EMU_UNFENCED;
        }
    return order;
}
__attribute__((noreturn)) static void emu_report_global(const struct emu_global_write *write, enum emu_order order,
                                                        uintptr_t at, const char *what) {
    char who[96];
    const bool own = write->block == emu->linear_index;
    const char *by = !write->async ? "" : write->add ? "a bulk reduction of " : "a bulk store of ";
    if (own)
        snprintf(who, sizeof who, "%sthread %d", by, write->thread);
    else
        snprintf(who, sizeof who, "%sthread %d of block %llu", by, write->thread, (unsigned long long)write->block);
    if (order == EMU_UNFENCED)
        emu_report("%s touches what %s wrote, without async_proxy_fence_global since %s, global address %p", what, who,
                   own ? "the write" : "load_acquire", (void *)at);
    emu_report("%s touches what %s wrote, without %s, global address %p", what, who,
               !own           ? "load_acquire of what it released after that"
               : write->async ? "having seen its bulk_wait"
                              : "a barrier between",
               (void *)at);
}
// Splits the range that contains `at`, if there is one, in two at that address.
static void emu_global_split(struct emu_global *global, uintptr_t at) {
    auto range = global->ranges.upper_bound(at);
    if (range == global->ranges.begin() || (--range)->first == at || range->second.end <= at)
        return;
    global->ranges.emplace(at, range->second);
    range->second.end = at;
}
// Checks an access to global memory, and records it if it writes. mine: the write; NULL: it is a read.
static void emu_global_touch(const void *p, size_t bytes, bool async, const struct emu_global_write *mine,
                             const char *what) {
    struct emu_global *global = emu->kernel->global;
    const uintptr_t begin = (uintptr_t)p, end = begin + bytes;
    const std::lock_guard<std::mutex> lock(global->mutex);
    auto range = global->ranges.upper_bound(begin);
    if (range != global->ranges.begin() && std::prev(range)->second.end > begin)
        --range;
    for (; range != global->ranges.end() && range->first < end; ++range)
        for (const struct emu_global_write &write : range->second.writes) {
            const enum emu_order order = emu_global_order(&write, async);
            if (order == EMU_UNFENCED || (order == EMU_UNSEEN && !(mine && mine->add && write.add)))
                emu_report_global(&write, order, begin > range->first ? begin : range->first, what);
        }
    if (!mine)
        return;
    emu_global_split(global, begin);
    emu_global_split(global, end);
    for (uintptr_t at = begin; at < end;) {
        auto next = global->ranges.lower_bound(at);
        if (next == global->ranges.end() || next->first > at) { // nobody has written here
            const uintptr_t stop = next == global->ranges.end() || next->first > end ? end : next->first;
            next = global->ranges.emplace(at, emu_global_range{stop, {}}).first;
        }
        std::vector<struct emu_global_write> &writes = next->second.writes;
        writes.erase(std::remove_if(writes.begin(), writes.end(),
                                    [&](const struct emu_global_write &write) {
                                        return emu_global_order(&write, async) == EMU_ORDERED;
                                    }),
                     writes.end());
        writes.push_back(*mine);
        at = next->second.end;
    }
}
// Adds a clock under which this block writes global memory, so that store_release tells of it.
static void emu_global_writes_by(int clock) {
    std::vector<int> &writers = emu->async->global_writers;
    if (std::find(writers.begin(), writers.end(), clock) == writers.end())
        writers.push_back(clock);
}
void emu_touch_generic(const void *p, int bytes, bool write) {
    const int me = emu->current;
    const struct emu_global_write mine = {emu->linear_index, me, me, emu_now(me), false, false};
    if (write)
        emu_global_writes_by(me);
    emu_global_touch(p, (size_t)bytes, false, write ? &mine : NULL, write ? "a store" : "a load");
}
void emu_async_proxy_fence_global(void) {
    emu_async_begin();
    uint32_t *seen = emu_seen(emu->current);
    memcpy(emu_seen_fenced_global(emu->current), seen, sizeof *seen * (size_t)emu->async->clocks);
    seen[emu->current]++; // what the thread sees or writes from now on is not fenced
}

// Records what the current thread has seen, for store_release at `at`; comes before the value is stored.
static void emu_global_release(const int *at) {
    struct emu_async *a = emu->async;
    uint32_t *seen = emu_seen(emu->current);
    const uint32_t *fenced = emu_seen_fenced_global(emu->current);
    for (int i = 0; i < a->storers; i++)
        if (seen[emu_written_clock(i)] > fenced[emu_written_clock(i)])
            emu_report("releases by store_release what bulk stores wrote, without async_proxy_fence_global since "
                       "bulk_wait");
    const std::shared_ptr<emu_known> known = std::make_shared<emu_known>();
    for (const int clock : a->global_writers)
        (*known)[{emu->linear_index, clock}] = seen[clock];
    for (const auto &learned : a->learned)
        for (const struct emu_learned &item : learned.second)
            if (item.at <= seen[item.thread]) {
                uint32_t &time = (*known)[learned.first];
                time = time > item.time ? time : item.time;
            }
    const std::lock_guard<std::mutex> lock(emu->kernel->global->mutex);
    emu->kernel->global->released[at] = known;
    seen[emu->current]++; // what the thread does from now on is not released
}
// Takes over what store_release at `at` recorded, after the value was loaded.
static void emu_global_acquire(const int *at) {
    std::shared_ptr<const emu_known> known;
    {
        const std::lock_guard<std::mutex> lock(emu->kernel->global->mutex);
        const auto released = emu->kernel->global->released.find(at);
        if (released == emu->kernel->global->released.end())
            return;
        known = released->second;
    }
    for (const auto &item : *known) {
        if (item.first.first == emu->linear_index)
            continue;
        std::vector<struct emu_learned> &learned = emu->async->learned[item.first];
        if (learned.empty() || learned.back().thread != emu->current || learned.back().time < item.second)
            learned.push_back({item.second, emu_now(emu->current), emu->current});
    }
}
