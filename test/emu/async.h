// The model of what is asynchronous on sm_90a, behind test/emu/sm90.h: mbarriers, TMA and bulk copies, wgmma, named
// barriers, setmaxnreg, and the order among blocks. clocks.h holds which thread has seen what. The model is stricter
// than a GPU:
//
// - What TMA loads lands as late as the program allows: when a thread waits at the mbarrier and nothing else is
//   missing. Until then its destination is poisoned and can't be touched; after that, only threads that have waited may
//   touch it. A phase never completes whose expected bytes are not the bytes that were issued, and the report has both
//   counts.
// - A bulk store reads shared memory at the wait that asks for it, and writes global memory at bulk_wait, or when its
//   thread ends. Until then nobody may write what it reads.
// - A wgmma runs at the wgmma_wait that asks for it, when all four warps have come to that wait. Until then its
//   accumulators and A registers hold a NaN. Overwriting this NaN is reported, and so is rounding, storing or
//   multiplying it. Nobody may write the shared memory that the wgmma reads.
// - wgmma_fence must stand between a wgmma_wait and the next use of an accumulator that the wait gave. An accumulator
//   or A register that was used before must hold what it held at the last wgmma_fence.
// - What a thread stores by ordinary stores, the async proxy sees only after the same thread's async_proxy_fence.
//   Global memory: test/emu/global.h.
// - A block that asks by load_acquire for what others did is told the current value, often too early. When it asks
//   again, all blocks of lower index are done first. A value that it still waits for then never comes.
#pragma once
#include "test/emu/clocks.h" // emu_seen, emu_clocks_begin
#include "test/emu/fibers.h" // emu_next, emu_run_block
#include "test/emu/sm90.h"   // struct emu_tensor_map, struct emu_wgmma
#include <deque>             // std::deque
#include <sched.h>           // sched_yield
#include <vector>            // std::vector

// A copy between shared memory and a box, or a range, of global memory. It holds a copy of the map: the map is a
// parameter of the kernel, which on the host ends with the thread that began the transfer, while the transfer may run
// later.
struct emu_bulk {
    struct emu_tensor_map map;
    int at[4]; // the box's first element, innermost dimension first
    char *global;
    uint32_t shared, bytes;
    bool boxed, add, was_read;
    uint64_t group;
    std::vector<unsigned char> data; // of a store: what it has read; else empty
};
struct emu_mbarrier {
    uint32_t address, arrivals, pending, phase; // pending: arrivals that phase number `phase` lacks
    int64_t expected, issued;                   // bytes of the current phase
    // waiting: threads that wait for the current phase; unseen: threads that have yet to see that the last one is
    // complete
    int initializer, waiting, unseen;
    uint32_t initialized; // the initializer's time then
    bool fenced;
    // what the threads had seen that arrived: gathered in the current phase, released with the last
    std::vector<uint32_t> gathered, released;
    std::vector<struct emu_bulk> loads;
};
struct emu_named {
    int threads, arrived;
    std::vector<uint32_t> gathered;
    std::vector<bool> came;
    std::vector<int> waiting;
};

enum { EMU_ACCUMULATORS = 8, EMU_OPERANDS = 64, EMU_WARPGROUP = 128 };
struct emu_accumulator {
    float *at;
    int size;
    bool in_flight, held;   // held: snapshot is the value at the last wgmma_fence
    uint64_t group, result; // group: the last that uses it; result: when its result came
    float snapshot[128], value[128];
};
struct emu_operand {
    uint32_t *at;
    bool in_flight, held;
    uint64_t group, used;
    uint32_t snapshot[4], value[4];
};
// What a thread has in flight.
struct emu_thread {
    std::vector<struct emu_bulk> stores;
    uint64_t store_groups;
    int storer; // number of its clocks for bulk stores; -1: it has none yet
    uint64_t wgmmas, wgmma_groups;
    // counts wgmma_fence, wgmma_wait and uses of A registers; the last fence's and wait's
    uint64_t events, fenced_at, waited_at;
    struct emu_accumulator accumulators[EMU_ACCUMULATORS];
    struct emu_operand operands[EMU_OPERANDS];
    int num_accumulators, num_operands;
};
struct emu_wgmma_issued {
    struct emu_wgmma op;
    uint64_t group;
    int threads;                              // that have issued it
    uint32_t warps;                           // bits: warps whose right to read the operands was checked
    std::vector<uint32_t> a_pieces, b_pieces; // shared addresses, of 16 bytes each
    // for each write that the operands come from, the address of one of its words
    std::vector<uint32_t> written;
    uint32_t a[EMU_WARPGROUP][4];
    unsigned char accumulator[EMU_WARPGROUP];
};
struct emu_warpgroup {
    std::deque<struct emu_wgmma_issued> issued; // wgmmas that have not run yet
    std::deque<int> committed;                  // of each group that has not run yet: threads that have committed it
    uint64_t ran, groups_ran;                   // how many wgmmas, and groups, have run
};

static void emu_async_begin(void) {
    if (emu->async)
        return;
    if (!emu->async_memory)
        emu->async_memory = new struct emu_async;
    struct emu_async *a = emu->async = emu->async_memory;
    emu_clocks_begin();
    a->barriers.clear();
    a->barriers.reserve(EMU_MBARRIERS);
    a->named.assign(EMU_NAMED_BARRIERS, emu_named());
    a->warpgroups.assign(EMU_WARPGROUPS, emu_warpgroup());
    if (a->thread.size() < (size_t)emu->threads)
        a->thread.resize((size_t)emu->threads);
    for (struct emu_thread &thread : a->thread) {
        thread.stores.clear();
        thread.store_groups = thread.wgmmas = thread.wgmma_groups = thread.events = thread.fenced_at =
            thread.waited_at = 0;
        thread.storer = -1;
        thread.num_accumulators = thread.num_operands = 0;
    }
    a->storers = 0;
    const int each = 65536 / emu->threads / 8 * 8 < 255 ? 65536 / emu->threads / 8 * 8 : 255;
    a->registers.assign((size_t)emu->num_warps, each);
    a->registers_free = 65536 - each * 32 * emu->num_warps;
}
static inline struct emu_thread *emu_self(void) { return &emu->async->thread[(size_t)emu->current]; }

#include "test/emu/global.h" // emu_global_touch

// Makes the current thread wait until another one calls emu_wake for it.
static void emu_sleep(const char *what) {
    emu->warps[emu->current / 32].ready &= ~(1u << emu_lane());
    emu_wait(what);
}
static void emu_wake(int thread) { emu->warps[thread / 32].ready |= 1u << thread % 32; }
static bool emu_waits_at(int thread, const char *what) {
    return emu->fibers[thread].waits_at && strcmp(emu->fibers[thread].waits_at, what) == 0;
}

// --- Boxes --------------------------------------------------------------------------------------------------------

static uint32_t emu_swizzle(uint32_t address, uint32_t chunks) { return address ^ (address >> 7 & (chunks - 1)) << 4; }
static struct emu_bulk emu_box(const struct tensor_map *at, uint32_t shared, int c0, int c1, int c2, int c3,
                               const char *what) {
    if ((uintptr_t)at % 64 != 0)
        emu_report("%s by a tensor map that is not aligned to 64 bytes", what);
    struct emu_bulk bulk = {};
    memcpy(&bulk.map, at, sizeof bulk.map);
    bulk.at[0] = c0, bulk.at[1] = c1, bulk.at[2] = c2, bulk.at[3] = c3;
    bulk.shared = shared;
    bulk.bytes = 2u * bulk.map.box[0] * bulk.map.box[1] * bulk.map.box[2] * bulk.map.box[3];
    bulk.boxed = true;
    return bulk;
}
static struct emu_bulk emu_range(const void *global, uint32_t shared, uint32_t bytes) {
    struct emu_bulk bulk = {};
    bulk.global = (char *)(uintptr_t)global;
    bulk.shared = shared;
    bulk.bytes = bytes;
    return bulk;
}
// Calls row(global address, begin, end, offset in the box) for each row of the box, where elements begin to end - 1 lie
// within the tensor. The address is of element `begin`; NULL: no element lies within.
template <class F> static void emu_box_rows(const struct emu_bulk *bulk, F row) {
    const struct emu_tensor_map *map = &bulk->map;
    uint32_t offset = 0;
    int64_t at[4] = {bulk->at[0], bulk->at[1], bulk->at[2], bulk->at[3]};
    for (int i3 = 0; i3 < map->box[3]; i3++)
        for (int i2 = 0; i2 < map->box[2]; i2++)
            for (int i1 = 0; i1 < map->box[1]; i1++, offset += 2u * map->box[0]) {
                const int64_t c[4] = {at[0], at[1] + i1, at[2] + i2, at[3] + i3};
                bool inside = true;
                int64_t distance = 0;
                for (int d = 1; d < 4; d++) {
                    inside = inside && c[d] >= 0 && (uint64_t)c[d] < map->dims[d];
                    distance += c[d] * (int64_t)map->strides[d - 1];
                }
                int64_t begin = c[0] < 0 ? -c[0] : 0, end = (int64_t)map->dims[0] - c[0];
                end = end < map->box[0] ? end : map->box[0];
                if (!inside || begin >= end)
                    begin = end = 0;
                row(inside ? map->base + distance + 2 * (c[0] + begin) : NULL, begin, end, offset);
            }
}
static void emu_check_bulk(const struct emu_bulk *bulk, const char *what) {
    if (bulk->boxed) {
        if (bulk->map.rank != 4)
            emu_report("%s of 4 dimensions by a tensor map of %u", what, bulk->map.rank);
        for (int d = 0; d < 4; d++)
            if (bulk->at[d] < 0)
                emu_report("%s of a box that begins before the tensor, at %d of dimension %d: an H200 refuses its "
                           "load, its store, or each as an illegal instruction",
                           what, bulk->at[d], d);
        if (bulk->map.chunks > 1 && 2u * bulk->map.box[0] != 16 * bulk->map.chunks)
            emu_report("%s of a box whose rows are narrower than the swizzle, which is not modeled", what);
        if (bulk->shared % 128 != 0)
            emu_report("%s of a box at shared address %d, which is no multiple of 128", what, emu_offset(bulk->shared));
    } else if (bulk->shared % 16 != 0 || (uintptr_t)bulk->global % 16 != 0 || bulk->bytes % 16 != 0 ||
               bulk->bytes == 0) {
        emu_report("%s of %u bytes between %p and shared address %d: all must be multiples of 16", what, bulk->bytes,
                   (void *)bulk->global, emu_offset(bulk->shared));
    }
}
// Records that the async proxy is to touch a copy's global memory on behalf of the current thread. mine: the write that
// the copy is; NULL: it reads.
static void emu_check_global(const struct emu_bulk *bulk, const struct emu_global_write *mine, const char *what) {
    if (!bulk->boxed) {
        emu_global_touch(bulk->global, bulk->bytes, true, mine, what);
        return;
    }
    emu_box_rows(bulk, [&](const char *row, int64_t begin, int64_t end, uint32_t offset) {
        if (begin < end)
            emu_global_touch(row, (size_t)(2 * (end - begin)), true, mine, what);
    });
}
static unsigned char *emu_shared_at(uint32_t address) { return emu->shared + (address - EMU_SHARED_BASE); }

// Copies shared memory to data (bulk->bytes), or data to shared memory. data is in the box's order, without swizzle.
static void emu_bulk_shared(const struct emu_bulk *bulk, unsigned char *data, bool to_shared) {
    const uint32_t chunks = bulk->boxed ? bulk->map.chunks : 1;
    for (uint32_t i = 0; i < bulk->bytes; i += 16) {
        unsigned char *at = emu_shared_at(emu_swizzle(bulk->shared + i, chunks));
        memcpy(to_shared ? at : data + i, to_shared ? data + i : at, 16);
    }
}
static void emu_land(struct emu_bulk *bulk) {
    std::vector<unsigned char> data(bulk->bytes, 0);
    if (bulk->boxed) {
        emu_box_rows(bulk, [&](const char *from, int64_t begin, int64_t end, uint32_t offset) {
            if (begin == end)
                return;
            emu_check_range(from, (size_t)(2 * (end - begin)), "a TMA load reads");
            memcpy(data.data() + offset + 2 * begin, from, (size_t)(2 * (end - begin)));
        });
    } else {
        emu_check_range(bulk->global, bulk->bytes, "a bulk load reads");
        memcpy(data.data(), bulk->global, bulk->bytes);
    }
    emu_bulk_shared(bulk, data.data(), true);
    for (uint32_t i = 0; i < bulk->bytes / 4; i++)
        emu_set_in_flight(bulk->shared + 4 * i, false);
}
static void emu_add_floats(float *to, const float *from, size_t n) {
    for (size_t i = 0; i < n; i++) {
        float before, after;
        __atomic_load(to + i, &before, __ATOMIC_RELAXED);
        do
            after = before + from[i];
        while (!__atomic_compare_exchange(to + i, &before, &after, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
    }
}
static void emu_store_out(struct emu_bulk *bulk) {
    if (bulk->boxed) {
        emu_box_rows(bulk, [&](char *to, int64_t begin, int64_t end, uint32_t offset) {
            if (begin == end)
                return;
            emu_check_range(to, (size_t)(2 * (end - begin)), "a TMA store writes");
            memcpy(to, bulk->data.data() + offset + 2 * begin, (size_t)(2 * (end - begin)));
        });
        return;
    }
    emu_check_range(bulk->global, bulk->bytes, "a bulk store writes");
    if (bulk->add)
        emu_add_floats((float *)bulk->global, (const float *)(const void *)bulk->data.data(), bulk->bytes / 4);
    else
        memcpy(bulk->global, bulk->data.data(), bulk->bytes);
}

// --- mbarriers ----------------------------------------------------------------------------------------------------

void emu_mbarrier_init(uint32_t address, uint32_t arrivals) {
    emu_async_begin();
    struct emu_async *a = emu->async;
    if (address % 8 != 0)
        emu_report("an mbarrier at shared address %d, which is no multiple of 8", emu_offset(address));
    if (arrivals < 1 || arrivals >= 1 << 20)
        emu_report("an mbarrier of %u arrivals", arrivals);
    emu_touch(address, 8, true);
    if (a->barriers.size() == EMU_MBARRIERS)
        emu_report("has more mbarriers than the model holds");
    struct emu_mbarrier barrier = {};
    barrier.address = address;
    barrier.arrivals = barrier.pending = arrivals;
    barrier.initializer = emu->current;
    barrier.initialized = emu_now(emu->current);
    barrier.gathered = emu_rows_of_nobody();
    barrier.released = barrier.gathered;
    a->barriers.push_back(barrier);
    for (uint32_t i = 0; i < 8; i += 4)
        emu_mark_at(address + i)->barrier = (uint16_t)a->barriers.size();
}
void emu_mbarrier_init_fence(void) {
    emu_async_begin();
    for (struct emu_mbarrier &barrier : emu->async->barriers)
        barrier.fenced = barrier.fenced || barrier.initializer == emu->current;
}
static struct emu_mbarrier *emu_mbarrier_at(uint32_t address, const char *what) {
    emu_async_begin();
    const uint32_t offset = address - EMU_SHARED_BASE;
    struct emu_mark *mark = offset < emu->shared_bytes ? emu_mark_at(address) : NULL;
    if (!mark || !mark->barrier || emu->async->barriers[mark->barrier - 1u].address != address)
        emu_report("%s at shared address %d, where no mbarrier is", what, emu_offset(address));
    struct emu_mbarrier *barrier = &emu->async->barriers[mark->barrier - 1u];
    if (barrier->initialized > emu_seen(emu->current)[barrier->initializer])
        emu_report("%s at an mbarrier that thread %d initialized, without a barrier between, shared address %d", what,
                   barrier->initializer, emu_offset(address));
    return barrier;
}
static inline int emu_mbarrier_index(const struct emu_mbarrier *barrier) {
    return (int)(barrier - emu->async->barriers.data());
}
// Completes the current phase if nothing is missing. Loads land only if somebody waits for the phase.
static void emu_mbarrier_try(struct emu_mbarrier *barrier) {
    if (barrier->pending > 0 || barrier->expected != barrier->issued ||
        (!barrier->loads.empty() && barrier->waiting == 0))
        return;
    if (barrier->unseen > 0)
        emu_report("the mbarrier at shared address %d completes a phase before all who waited have seen the last",
                   emu_offset(barrier->address));
    for (struct emu_bulk &load : barrier->loads)
        emu_land(&load);
    barrier->loads.clear();
    barrier->pending = barrier->arrivals;
    barrier->expected = barrier->issued = 0;
    barrier->phase++;
    barrier->released.swap(barrier->gathered);
    std::fill(barrier->gathered.begin(), barrier->gathered.end(), 0u);
    barrier->released[(size_t)emu_barrier_clock(emu_mbarrier_index(barrier))] = barrier->phase;
    for (int i = 0; i < emu->threads && barrier->waiting > 0; i++)
        if (emu->fibers[i].waits_for == emu_mbarrier_index(barrier) + 1) {
            emu->fibers[i].waits_for = 0;
            emu_wake(i);
            barrier->waiting--;
            barrier->unseen++;
        }
}
void emu_mbarrier_arrive(uint32_t address, uint32_t bytes) {
    struct emu_mbarrier *barrier = emu_mbarrier_at(address, "arrives");
    if (barrier->pending == 0)
        emu_report("arrives at the mbarrier at shared address %d, all of whose %u arrivals this phase has had",
                   emu_offset(address), barrier->arrivals);
    barrier->pending--;
    barrier->expected += bytes;
    emu_clocks_join(barrier->gathered.data(), emu->current);
    emu_mbarrier_try(barrier);
}
void emu_mbarrier_wait(uint32_t address, uint32_t parity) {
    struct emu_mbarrier *barrier = emu_mbarrier_at(address, "waits");
    if (parity > 1)
        emu_report("waits at an mbarrier for parity %u", parity);
    if (barrier->phase % 2 == parity) { // this phase is not complete yet
        barrier->waiting++;
        emu->fibers[emu->current].waits_for = emu_mbarrier_index(barrier) + 1;
        emu_mbarrier_try(barrier);
        if (barrier->phase % 2 == parity)
            emu_sleep("mbarrier_wait");
        barrier->unseen--;
    }
    emu_clocks_join(emu_seen(emu->current), barrier->released.data());
}

// Says in text (size bytes) why a thread waits forever at an mbarrier, and in *thread which one; returns false where
// none waits there.
static bool emu_explain_wait(char *text, size_t size, int *thread) {
    for (int i = 0; i < emu->threads; i++) {
        if (emu_lane_ended(i) || emu->fibers[i].waits_for == 0)
            continue;
        const struct emu_mbarrier *barrier = &emu->async->barriers[(size_t)emu->fibers[i].waits_for - 1];
        snprintf(
            text, size,
            "waits at mbarrier_wait for ever: phase %u of the mbarrier at shared address %d lacks %u of %u arrivals, "
            "expects %lld bytes and was sent %lld",
            barrier->phase, emu_offset(barrier->address), barrier->pending, barrier->arrivals,
            (long long)barrier->expected, (long long)barrier->issued);
        *thread = i;
        return true;
    }
    return false;
}

// --- TMA and bulk copies ------------------------------------------------------------------------------------------

static void emu_load_begin(struct emu_bulk *load, uint32_t address, const char *what) {
    struct emu_mbarrier *barrier = emu_mbarrier_at(address, what);
    emu_check_bulk(load, what);
    if (!barrier->fenced)
        emu_report("%s at an mbarrier that was initialized without mbarrier_init_fence, shared address %d", what,
                   emu_offset(address));
    emu_check_async(load->shared, load->bytes, true, what);
    emu_check_global(load, NULL, what);
    memset(emu_shared_at(load->shared), 0xff, load->bytes);
    const int clock = emu_barrier_clock(emu_mbarrier_index(barrier));
    for (uint32_t i = 0; i < load->bytes; i += 4) {
        emu_set_in_flight(load->shared + i, true);
        emu_mark_written(emu_mark_at(load->shared + i), clock, barrier->phase + 1);
    }
    barrier->issued += load->bytes;
    barrier->loads.push_back(*load);
    emu_mbarrier_try(barrier);
}
void emu_check_policy(uint64_t policy, const char *what) {
    if (policy != EMU_EVICT_FIRST && policy != EMU_EVICT_LAST)
        emu_report("%s with %#llx for a policy of the L2 cache, which createpolicy did not make", what,
                   (unsigned long long)policy);
}
void emu_tma_load(uint32_t to, const struct tensor_map *map, uint32_t barrier, int c0, int c1, int c2, int c3) {
    struct emu_bulk load = emu_box(map, to, c0, c1, c2, c3, "a TMA load");
    emu_load_begin(&load, barrier, "a TMA load");
}
void emu_bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier) {
    struct emu_bulk load = emu_range(from, to, bytes);
    emu_load_begin(&load, barrier, "a bulk load");
}
static void emu_store_begin(struct emu_bulk *store, const char *what) {
    emu_async_begin();
    struct emu_thread *self = emu_self();
    emu_check_bulk(store, what);
    if (self->storer < 0) {
        if (emu->async->storers == EMU_STORERS)
            emu_report("%s by more threads of a block than the model holds", what);
        self->storer = emu->async->storers++;
    }
    emu_check_async(store->shared, store->bytes, false, what);
    const uint32_t *seen = emu_seen(emu->current), time = (uint32_t)self->store_groups + 1;
    for (uint32_t i = 0; i < store->bytes; i += 4)
        emu_mark_read(emu_mark_at(store->shared + i), emu_storer_clock(self->storer), time, seen);
    store->group = self->store_groups;
    const int written = emu_written_clock(self->storer);
    const struct emu_global_write mine = {emu->linear_index, written, emu->current, time, true, store->add};
    emu_global_writes_by(written);
    emu_check_global(store, &mine, what);
    self->stores.push_back(*store);
}
void emu_tma_store(const struct tensor_map *map, uint32_t from, int c0, int c1, int c2, int c3) {
    struct emu_bulk store = emu_box(map, from, c0, c1, c2, c3, "a TMA store");
    emu_store_begin(&store, "a TMA store");
}
void emu_bulk_store(void *to, uint32_t from, uint32_t bytes, bool add) {
    struct emu_bulk store = emu_range(to, from, bytes);
    store.add = add;
    emu_store_begin(&store, add ? "a bulk reduction" : "a bulk store");
}
void emu_bulk_commit(void) {
    emu_async_begin();
    emu_self()->store_groups++;
}
void emu_bulk_wait(int pending, bool read_only) {
    emu_async_begin();
    struct emu_thread *self = emu_self();
    if (self->storer < 0 || self->store_groups <= (uint64_t)pending)
        return;
    const uint64_t done = self->store_groups - (uint64_t)pending;
    size_t written = 0;
    for (struct emu_bulk &store : self->stores) {
        if (store.group >= done)
            break;
        if (!store.was_read) {
            store.data.resize(store.bytes);
            emu_bulk_shared(&store, store.data.data(), false);
            store.was_read = true;
        }
        if (!read_only) {
            emu_store_out(&store);
            written++;
        }
    }
    self->stores.erase(self->stores.begin(), self->stores.begin() + (long)written);
    uint32_t *seen = emu_seen(emu->current);
    const int clocks[2] = {emu_storer_clock(self->storer), emu_written_clock(self->storer)};
    for (int i = 0; i < (read_only ? 1 : 2); i++)
        seen[clocks[i]] = seen[clocks[i]] > done ? seen[clocks[i]] : (uint32_t)done;
}
void emu_async_proxy_fence(void) {
    emu_async_begin();
    emu_seen_fenced(emu->current)[emu->current] = emu_now(emu->current);
    emu_seen(emu->current)[emu->current]++;
}

// --- Named barriers, setmaxnreg -----------------------------------------------------------------------------------

void emu_named_barrier(int number, int threads, bool sync) {
    emu_async_begin();
    const int mine[2] = {number, threads};
    const int *all =
        (const int *)emu_warp_exchange(mine, sizeof mine, sync ? "named_barrier_sync" : "named_barrier_arrive");
    for (int i = 0; i < 32; i++)
        if (all[2 * i] != number || all[2 * i + 1] != threads)
            emu_report("lanes of a warp come to different named barriers, %d and %d", number, all[2 * i]);
    if (number < 1 || number >= EMU_NAMED_BARRIERS || threads % 32 != 0 || threads < 32 || threads > emu->threads)
        emu_report("named barrier %d of %d threads: 1 to 15, of whole warps of the block, are possible", number,
                   threads);
    struct emu_named *barrier = &emu->async->named[(size_t)number];
    if (barrier->arrived == 0) {
        barrier->threads = threads;
        barrier->gathered = emu_rows_of_nobody();
        barrier->came.assign((size_t)emu->threads, false);
        barrier->waiting.clear();
    } else if (barrier->threads != threads) {
        emu_report("named barrier %d is for %d threads here and for %d elsewhere", number, threads, barrier->threads);
    }
    if (barrier->came[(size_t)emu->current])
        emu_report("comes to named barrier %d again before all others came", number);
    barrier->came[(size_t)emu->current] = true;
    emu_clocks_join(barrier->gathered.data(), emu->current);
    if (sync)
        barrier->waiting.push_back(emu->current);
    if (++barrier->arrived < barrier->threads) {
        if (sync)
            emu_sleep("named_barrier_sync");
        return;
    }
    barrier->arrived = 0;
    for (int thread : barrier->waiting) { // before anybody comes to the barrier again
        emu_clocks_join(emu_seen(thread), barrier->gathered.data());
        emu_wake(thread);
    }
}

void emu_set_registers(int registers, bool increase) {
    emu_async_begin();
    struct emu_async *a = emu->async;
    const int warp = emu->current / 32;
    emu_warp_exchange(&registers, sizeof registers, increase ? "registers_increase" : "registers_decrease");
    if (emu_lane() == 0) {
        const int before = a->registers[(size_t)warp];
        if (increase ? registers < before : registers > before)
            emu_report("setmaxnreg %s %d registers a thread to %d", increase ? "increases" : "decreases", before,
                       registers);
        while (32 * (registers - before) > a->registers_free)
            emu_sleep("setmaxnreg");
        a->registers_free -= 32 * (registers - before);
        a->registers[(size_t)warp] = registers;
        for (int w = 0; w < emu->num_warps; w++) // warps that wait for registers look again
            if (emu_waits_at(32 * w, "setmaxnreg"))
                emu_wake(32 * w);
    }
    emu_warp_exchange(&registers, sizeof registers, increase ? "registers_increase" : "registers_decrease");
}

// --- wgmma --------------------------------------------------------------------------------------------------------

static void emu_put_in_flight(void *registers, int count) {
    for (int i = 0; i < count; i++)
        memcpy((char *)registers + 4 * i, &EMU_IN_FLIGHT, 4);
}
static bool emu_all_in_flight(const void *registers, int count) {
    for (int i = 0; i < count; i++)
        if (memcmp((const char *)registers + 4 * i, &EMU_IN_FLIGHT, 4) != 0)
            return false;
    return true;
}
void emu_wgmma_fence(void) {
    emu_async_begin();
    struct emu_thread *self = emu_self();
    self->fenced_at = ++self->events;
    for (int i = 0; i < self->num_accumulators; i++) {
        struct emu_accumulator *acc = &self->accumulators[i];
        if (!acc->in_flight)
            memcpy(acc->snapshot, acc->at, sizeof(float) * (size_t)acc->size);
        acc->held = !acc->in_flight;
    }
    for (int i = 0; i < self->num_operands; i++) {
        struct emu_operand *a = &self->operands[i];
        if (!a->in_flight)
            memcpy(a->snapshot, a->at, sizeof a->snapshot);
        a->held = !a->in_flight;
    }
}
static void emu_check_any_fence(const struct emu_thread *self) {
    if (self->fenced_at <= self->waited_at)
        emu_report("a wgmma without a wgmma_fence since %s",
                   self->waited_at ? "the last wgmma_wait" : "the kernel began");
}
// Returns the index of the thread's record of an accumulator, which is in flight from now on. Keeps its value aside.
static int emu_accumulator_use(struct emu_thread *self, float *at, int size, uint64_t group) {
    int found = -1;
    for (int i = 0; i < self->num_accumulators; i++) {
        struct emu_accumulator *acc = &self->accumulators[i];
        if (acc->at == at && acc->size == size) {
            found = i;
        } else if (at < acc->at + acc->size && acc->at < at + size) {
            if (acc->in_flight)
                emu_report("a wgmma's accumulators overlap those of another shape that are in flight");
            acc->at = NULL; // the array that it belonged to is gone
            acc->size = 0;
        }
    }
    for (int i = 0; i < self->num_accumulators && found < 0; i++)
        if (self->accumulators[i].size == 0)
            found = i;
    if (found < 0) {
        if (self->num_accumulators == EMU_ACCUMULATORS)
            emu_report("has more accumulators than the model holds");
        found = self->num_accumulators++;
        self->accumulators[found].size = 0;
    }
    struct emu_accumulator *acc = &self->accumulators[found];
    if (acc->size == 0) { // new
        emu_check_any_fence(self);
        acc->at = at;
        acc->size = size;
        acc->in_flight = acc->held = false;
        acc->result = 0;
    }
    if (!acc->in_flight) {
        if (self->fenced_at <= acc->result)
            emu_report("a wgmma on an accumulator that wgmma_wait gave, without wgmma_fence after it");
        if (acc->held && memcmp(acc->snapshot, acc->at, sizeof(float) * (size_t)size) != 0)
            emu_report("a wgmma on an accumulator that was written after the last wgmma_fence");
        memcpy(acc->value, at, sizeof(float) * (size_t)size);
        emu_put_in_flight(at, size);
        acc->in_flight = true;
    }
    acc->group = group;
    return found;
}
// Returns the kept value of four A registers, which are in flight from now on. Several wgmmas may share the registers.
static const uint32_t *emu_operand_use(struct emu_thread *self, uint32_t *at, uint64_t group) {
    struct emu_operand *a = NULL;
    for (int i = 0; i < self->num_operands && !a; i++)
        if (self->operands[i].at == at)
            a = &self->operands[i];
    const bool known = a != NULL;
    if (!known) {
        if (self->num_operands < EMU_OPERANDS) {
            a = &self->operands[self->num_operands++];
        } else { // replaces the one whose last use is the longest ago
            for (int i = 0; i < EMU_OPERANDS; i++)
                if (!self->operands[i].in_flight && (!a || self->operands[i].used < a->used))
                    a = &self->operands[i];
            if (!a)
                emu_report("has more A registers in flight than the model holds");
        }
        emu_check_any_fence(self);
        a->at = at;
        a->in_flight = a->held = false;
    }
    if (a->in_flight && !emu_all_in_flight(at, 4))
        emu_report("changes the A registers of a wgmma in flight");
    if (!a->in_flight) {
        if (a->held && memcmp(a->snapshot, at, sizeof a->snapshot) != 0)
            emu_report("a wgmma with A registers that were written after the last wgmma_fence");
        emu_check_not_in_flight(at, sizeof a->value, "multiplies");
        memcpy(a->value, at, sizeof a->value);
        emu_put_in_flight(at, 4);
        a->in_flight = true;
    }
    a->group = group;
    a->used = ++self->events;
    return a->value;
}

// Returns the shared addresses of an operand's 16-byte pieces. K-major: two pieces for each of `rows` rows, k = 0..7
// and 8..15. MN-major: 16 pieces for each 8 rows, one for each k.
static std::vector<uint32_t> emu_operand_pieces(uint64_t descriptor, int rows, bool transposed) {
    const uint32_t start = (uint32_t)(descriptor & 0x3fff) << 4, leading = (uint32_t)(descriptor >> 16 & 0x3fff) << 4,
                   stride = (uint32_t)(descriptor >> 32 & 0x3fff) << 4, swizzle = (uint32_t)(descriptor >> 62);
    const uint32_t chunks = swizzle == 0 ? 1 : 16u >> swizzle, row_bytes = 16 * chunks;
    if ((descriptor >> 49 & 7) != 0)
        emu_report("a wgmma's descriptor with a base offset, which is not modeled");
    if (swizzle != 0 && (start % (8 * row_bytes) >= row_bytes || (!transposed && start % row_bytes + 32 > row_bytes)))
        emu_report("a wgmma's operand at shared address %d is not in the first row of a swizzle's %u bytes, or k goes "
                   "past it",
                   emu_offset(start), 8 * row_bytes);
    std::vector<uint32_t> pieces((size_t)rows * 2);
    for (uint32_t i = 0; i < pieces.size(); i++) {
        uint32_t at;
        if (transposed) {
            const uint32_t k = i % 16, mn = i / 16; // mn counts groups of 8
            at = swizzle == 0 ? mn * stride + k / 8 * leading + k % 8 * 16
                              : mn / chunks * leading + mn % chunks * 16 + k % 8 * row_bytes + k / 8 * stride;
        } else {
            const uint32_t k = i % 2, r = i / 2; // k counts groups of 8
            at = swizzle == 0 ? r / 8 * stride + k * leading + r % 8 * 16 : r / 8 * stride + r % 8 * row_bytes + 16 * k;
        }
        pieces[i] = emu_swizzle(start + at, chunks);
    }
    return pieces;
}
static bool emu_same_wgmma(const struct emu_wgmma *x, const struct emu_wgmma *y) {
    return x->a == y->a && x->b == y->b && x->n == y->n && !x->a_registers == !y->a_registers &&
           x->transposed_a == y->transposed_a && x->transposed_b == y->transposed_b && x->accumulate == y->accumulate;
}
// Checks and marks each word that a wgmma reads, for the warp that issues it first. Adds to issued->written one word of
// each write that the operands come from.
static void emu_wgmma_reads(struct emu_wgmma_issued *issued, const std::vector<uint32_t> &pieces, int warpgroup) {
    const struct emu_mark *last = NULL;
    for (uint32_t piece : pieces) {
        emu_check_async(piece, 16, false, "a wgmma");
        struct emu_mark *mark = emu_mark_at(piece);
        for (uint32_t i = 0; i < 4; i++) {
            mark[i].wgmma_reads[warpgroup] = (uint32_t)issued->group + 1;
            if (!last || mark[i].writer != last->writer || mark[i].write_time != last->write_time)
                issued->written.push_back(piece + 4 * i);
            last = &mark[i];
        }
    }
}
// Checks, for a warp that issues the wgmma later, the words of issued->written: the warp must have seen each write, and
// nobody may have written since.
static void emu_wgmma_reads_too(const struct emu_wgmma_issued *issued) {
    for (uint32_t address : issued->written) {
        const struct emu_mark *mark = emu_mark_at(address);
        emu_check_mark(mark, emu_seen(emu->current), false, address);
        emu_check_fenced(mark, emu_seen_fenced(emu->current), address, "a wgmma");
    }
}
static struct emu_warpgroup *emu_warpgroup_of(int thread) {
    if (thread / EMU_WARPGROUP >= EMU_WARPGROUPS || emu->threads % EMU_WARPGROUP != 0)
        emu_report("wgmma by warpgroup %d of a block of %d threads, which is not modeled", thread / EMU_WARPGROUP,
                   emu->threads);
    return &emu->async->warpgroups[(size_t)(thread / EMU_WARPGROUP)];
}
void emu_wgmma_issue(const struct emu_wgmma *op) {
    emu_async_begin();
    struct emu_thread *self = emu_self();
    struct emu_warpgroup *warpgroup = emu_warpgroup_of(emu->current);
    const int in_group = emu->current % EMU_WARPGROUP;
    const uint64_t at = self->wgmmas++ - warpgroup->ran;
    if (at == warpgroup->issued.size()) { // the first thread that issues it
        warpgroup->issued.emplace_back();
        struct emu_wgmma_issued *fresh = &warpgroup->issued.back();
        fresh->op = *op;
        fresh->group = self->wgmma_groups;
        fresh->threads = 0;
        fresh->warps = 0;
        fresh->b_pieces = emu_operand_pieces(op->b, op->n, op->transposed_b);
        if (!op->a_registers)
            fresh->a_pieces = emu_operand_pieces(op->a, 64, op->transposed_a);
    }
    struct emu_wgmma_issued *issued = &warpgroup->issued[at];
    if (!emu_same_wgmma(&issued->op, op) || issued->group != self->wgmma_groups)
        emu_report("the threads of a warpgroup issue different wgmmas, or in different groups");
    issued->threads++;
    if (!(issued->warps >> in_group / 32 & 1u)) {
        if (issued->warps == 0) {
            emu_wgmma_reads(issued, issued->a_pieces, emu->current / EMU_WARPGROUP);
            emu_wgmma_reads(issued, issued->b_pieces, emu->current / EMU_WARPGROUP);
        } else {
            emu_wgmma_reads_too(issued);
        }
        issued->warps |= 1u << in_group / 32;
    }
    issued->accumulator[in_group] = (unsigned char)emu_accumulator_use(self, op->acc, op->n / 2, issued->group);
    if (op->a_registers) // registers are variables; the wrapper takes them as constants
        memcpy(issued->a[in_group], emu_operand_use(self, (uint32_t *)(uintptr_t)op->a_registers, issued->group),
               sizeof issued->a[in_group]);
}
static void emu_wake_wgmma_waits(int first_thread) {
    for (int i = first_thread; i < first_thread + EMU_WARPGROUP; i++)
        if (emu_waits_at(i, "wgmma_wait"))
            emu_wake(i);
}
void emu_wgmma_commit(void) {
    emu_async_begin();
    struct emu_warpgroup *warpgroup = emu_warpgroup_of(emu->current);
    const uint64_t at = emu_self()->wgmma_groups++ - warpgroup->groups_ran;
    if (at == warpgroup->committed.size())
        warpgroup->committed.push_back(0);
    if (++warpgroup->committed[at] == EMU_WARPGROUP)
        emu_wake_wgmma_waits(emu->current / EMU_WARPGROUP * EMU_WARPGROUP);
}
static void emu_operand_values(const std::vector<uint32_t> &pieces, bool transposed, float *values /*(16, rows)*/,
                               int rows) {
    for (uint32_t i = 0; i < pieces.size(); i++) {
        uint16_t elements[8];
        memcpy(elements, emu_shared_at(pieces[i]), sizeof elements);
        for (uint32_t j = 0; j < 8; j++) {
            const uint32_t row = transposed ? i / 16 * 8 + j : i / 2, k = transposed ? i % 16 : i % 2 * 8 + j;
            values[k * (uint32_t)rows + row] = emu_bf16(elements[j]);
        }
    }
}
static float *emu_fragment_value(const struct emu_wgmma_issued *issued, int first_thread, int thread) {
    return emu->async->thread[(size_t)(first_thread + thread)].accumulators[issued->accumulator[thread]].value;
}
// Copies a thread's part of a 64 x n matrix, from `value` to the matrix or back: pairs of elements, 8 columns apart, in
// two rows that are 8 apart. `matrix` points to the thread's first pair.
static inline void emu_fragment(float *matrix, float *value, int n, bool to_matrix) {
    for (int j = 0; j < n / 8; j++)
        for (int half = 0; half < 2; half++) {
            float *pair = matrix + half * 8 * n + 8 * j, *own = value + 4 * j + 2 * half;
            memcpy(to_matrix ? pair : own, to_matrix ? own : pair, 2 * sizeof(float));
        }
}
typedef float emu_floats __attribute__((vector_size(16))); // sums in registers, where gcc keeps arrays in memory
static void emu_wgmma_run(const struct emu_wgmma_issued *issued, int first_thread) {
    const int n = issued->op.n;
    static __thread float a[16 * 64], b[16 * 256], c[64 * 256];
    emu_operand_values(issued->b_pieces, issued->op.transposed_b, b, n);
    if (!issued->op.a_registers)
        emu_operand_values(issued->a_pieces, issued->op.transposed_a, a, 64);
    memset(c, 0, sizeof(float) * 64 * (size_t)n);
    for (int thread = 0; thread < EMU_WARPGROUP; thread++) {
        const int row = thread / 32 * 16 + thread % 32 / 4, t = thread % 4;
        if (issued->op.accumulate)
            emu_fragment(c + row * n + 2 * t, emu_fragment_value(issued, first_thread, thread), n, true);
        for (int i = 0; i < 4 && issued->op.a_registers; i++)
            for (int e = 0; e < 2; e++)
                a[(2 * t + i / 2 * 8 + e) * 64 + row + i % 2 * 8] = emu_bf16(issued->a[thread][i] >> 16 * e & 0xffffu);
    }
    for (int begin = 0; begin < n; begin += 8)
        for (int row = 0; row < 64; row++) {
            emu_floats left, right;
            memcpy(&left, c + row * n + begin, sizeof left);
            memcpy(&right, c + row * n + begin + 4, sizeof right);
            for (int k = 0; k < 16; k++) {
                emu_floats b_left, b_right;
                memcpy(&b_left, b + k * n + begin, sizeof b_left);
                memcpy(&b_right, b + k * n + begin + 4, sizeof b_right);
                left += a[k * 64 + row] * b_left;
                right += a[k * 64 + row] * b_right;
            }
            memcpy(c + row * n + begin, &left, sizeof left);
            memcpy(c + row * n + begin + 4, &right, sizeof right);
        }
    for (int thread = 0; thread < EMU_WARPGROUP; thread++) {
        const int row = thread / 32 * 16 + thread % 32 / 4, t = thread % 4;
        emu_fragment(c + row * n + 2 * t, emu_fragment_value(issued, first_thread, thread), n, false);
    }
}
// Runs the oldest group, which all threads of the warpgroup have committed.
static void emu_wgmma_run_group(struct emu_warpgroup *warpgroup, int first_thread) {
    while (!warpgroup->issued.empty() && warpgroup->issued.front().group == warpgroup->groups_ran) {
        if (warpgroup->issued.front().threads != EMU_WARPGROUP)
            emu_report("the threads of a warpgroup issue different numbers of wgmmas in a group");
        emu_wgmma_run(&warpgroup->issued.front(), first_thread);
        warpgroup->issued.pop_front();
        warpgroup->ran++;
    }
    warpgroup->committed.pop_front();
    warpgroup->groups_ran++;
}
// Gives the thread the results of the groups below `done`.
static void emu_wgmma_results(struct emu_thread *self, uint64_t done) {
    self->waited_at = ++self->events;
    for (int i = 0; i < self->num_operands; i++) {
        struct emu_operand *a = &self->operands[i];
        if (!a->in_flight)
            continue;
        if (!emu_all_in_flight(a->at, 4))
            emu_report("changes the A registers of a wgmma in flight");
        if (a->group >= done)
            continue;
        memcpy(a->at, a->value, sizeof a->value);
        a->in_flight = false;
    }
    for (int i = 0; i < self->num_accumulators; i++) {
        struct emu_accumulator *acc = &self->accumulators[i];
        if (!acc->in_flight)
            continue;
        if (!emu_all_in_flight(acc->at, acc->size))
            emu_report("writes an accumulator of a wgmma in flight");
        if (acc->group >= done)
            continue;
        memcpy(acc->at, acc->value, sizeof(float) * (size_t)acc->size);
        acc->in_flight = false;
        acc->result = self->events;
    }
}
void emu_wgmma_wait(int pending) {
    emu_async_begin();
    struct emu_thread *self = emu_self();
    struct emu_warpgroup *warpgroup = emu_warpgroup_of(emu->current);
    const int first = emu->current / EMU_WARPGROUP * EMU_WARPGROUP;
    const uint64_t done = self->wgmma_groups > (uint64_t)pending ? self->wgmma_groups - (uint64_t)pending : 0;
    while (warpgroup->groups_ran < done) {
        if (warpgroup->committed.front() == EMU_WARPGROUP) {
            emu_wgmma_run_group(warpgroup, first);
            emu_wake_wgmma_waits(first);
        } else {
            emu_sleep("wgmma_wait");
        }
    }
    emu_wgmma_results(self, done);
    uint32_t *seen = &emu_seen(emu->current)[emu_wgmma_clock(emu->current / EMU_WARPGROUP)];
    *seen = *seen > done ? *seen : (uint32_t)done;
}

// --- Order among blocks -------------------------------------------------------------------------------------------

// Runs the blocks of lower index that nobody has begun, and waits until the others are done.
static void emu_run_lower_blocks(void) {
    struct emu_block *outer = emu;
    unsigned char *progress = outer->kernel->progress;
    for (uint64_t i = 0; i < outer->linear_index; i++) {
        if (__atomic_load_n(&progress[i], __ATOMIC_ACQUIRE) == 0) {
            emu_cached = outer->nested;
            emu_block_enter(outer->kernel);
            outer->nested = emu_cached;
            emu_run_block(i);
            emu = emu_cached = outer;
        }
        while (__atomic_load_n(&progress[i], __ATOMIC_ACQUIRE) != 2)
            sched_yield();
    }
    outer->kernel->progress[outer->linear_index] = 3; // at work, and all blocks of lower index are done
}
int emu_load_acquire(const int *at) {
    static __thread const int *last;
    static __thread uint64_t spins;
    emu_async_begin();
    emu_access_global(at, sizeof *at, false);
    spins = last == at ? spins + 1 : 0;
    if (spins > 0 && emu->kernel->progress[emu->linear_index] == 1)
        emu_run_lower_blocks();
    last = at;
    const int value = __atomic_load_n(at, __ATOMIC_ACQUIRE);
    emu_global_acquire(at);
    if (spins > 1000000)
        emu_report(
            "asks again and again by load_acquire at %p, which stays %d though all blocks of lower index are done",
            (const void *)at, value);
    if (spins > 0) { // a thread of this block may be the one that is to store
        const int next = emu_next();
        if (next >= 0 && next != emu->current)
            emu_wait("load_acquire");
    }
    return value;
}
void emu_store_release(int *at, int value) {
    emu_async_begin();
    emu_access_global(at, sizeof *at, true);
    if (!emu_self()->stores.empty())
        emu_report("releases by store_release while bulk stores of its own are under way");
    emu_global_release(at);
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
}

// --- The end ------------------------------------------------------------------------------------------------------

static void emu_thread_ends(void) {
    struct emu_thread *self = emu_self();
    for (const struct emu_bulk &store : self->stores)
        if (!store.was_read)
            emu_report("ends with bulk stores that still read shared memory, address %d", emu_offset(store.shared));
    for (struct emu_bulk &store : self->stores)
        emu_store_out(&store);
    self->stores.clear();
    for (int i = 0; i < self->num_accumulators; i++)
        if (self->accumulators[i].in_flight)
            emu_report("ends with a wgmma under way");
}
static void emu_block_ends(void) {
    for (const struct emu_mbarrier &barrier : emu->async->barriers)
        if (!barrier.loads.empty())
            emu_report("ends with loads under way that nobody waited for, to shared address %d",
                       emu_offset(barrier.loads[0].shared));
    for (const struct emu_named &barrier : emu->async->named)
        if (barrier.arrived > 0)
            emu_report("ends with named barrier %d lacking %d of %d threads",
                       (int)(&barrier - emu->async->named.data()), barrier.threads - barrier.arrived, barrier.threads);
    for (int w = 0; w < emu->num_warps; w++)
        if (emu->async->registers[(size_t)w] != emu->async->registers[(size_t)(w / 4 * 4)])
            emu_report("ends with warps of a warpgroup that set different numbers of registers, %d and %d",
                       emu->async->registers[(size_t)w], emu->async->registers[(size_t)(w / 4 * 4)]);
}
