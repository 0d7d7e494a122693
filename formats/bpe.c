#include "formats/bpe.h"

#include <stdlib.h> // malloc, free
#include <string.h> // memset

struct bpe_merge {
    uint64_t pair; // left << 32 | right
    uint32_t rank;
    int32_t id; // of the merged symbol; -1: the slot is free
};
// A symbol of a piece of text; symbols are doubly linked by index (-1: none). The heap holds rank << 32 | index of the
// left symbol, for each pair that may merge, the least first.
struct bpe_symbol {
    int32_t id; // -1: merged into its left neighbor
    int32_t previous, next;
};

static uint64_t bpe_pair(int32_t left, int32_t right) { return (uint64_t)(uint32_t)left << 32 | (uint32_t)right; }

uint64_t bpe_hash(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
    return value ^ (value >> 31);
}

// Returns the slot that holds a pair, or the free slot where it belongs.
static struct bpe_merge *bpe_slot(const struct bpe *bpe, uint64_t pair) {
    uint64_t slot = bpe_hash(pair) & bpe->mask;
    while (bpe->merges[slot].id >= 0 && bpe->merges[slot].pair != pair)
        slot = (slot + 1) & bpe->mask;
    return &bpe->merges[slot];
}

bool bpe_create(struct bpe *bpe, size_t merges) {
    size_t slots = 2; // a power of two, at most half of them taken
    while (slots < 2 * (merges + 1))
        slots *= 2;
    bpe->mask = slots - 1;
    bpe->merges = (struct bpe_merge *)malloc(slots * sizeof *bpe->merges);
    bpe->ids = (int32_t *)malloc((merges + 1) * sizeof *bpe->ids);
    for (size_t i = 0; bpe->merges && i < slots; i++)
        bpe->merges[i].id = -1;
    return bpe->merges && bpe->ids;
}
void bpe_free(struct bpe *bpe) {
    free(bpe->merges);
    free(bpe->ids);
    memset(bpe, 0, sizeof *bpe);
}
void bpe_add(struct bpe *bpe, uint32_t rank, int32_t left, int32_t right, int32_t id) {
    struct bpe_merge *merge = bpe_slot(bpe, bpe_pair(left, right));
    merge->pair = bpe_pair(left, right);
    merge->rank = rank;
    merge->id = bpe->ids[rank] = id;
}

void bpe_work_free(struct bpe_work *work) {
    free(work->symbols);
    free(work->heap);
    memset(work, 0, sizeof *work);
}
bool bpe_work_reserve(struct bpe_work *work, size_t n) {
    if (n <= work->room)
        return true;
    const size_t room = n > 2 * work->room ? n : 2 * work->room;
    bpe_work_free(work);
    work->symbols = (struct bpe_symbol *)malloc(room * sizeof *work->symbols);
    work->heap = (uint64_t *)malloc(3 * room * sizeof *work->heap); // n - 1 pairs, and 2 more for each of n - 1 merges
    work->room = work->symbols && work->heap ? room : 0;
    return work->room > 0;
}

// Adds an entry to a heap of *count entries, the least first; `heap` has room for one more.
static void heap_push(uint64_t *heap, size_t *count, uint64_t entry) {
    size_t place = (*count)++;
    for (; place > 0 && heap[(place - 1) / 2] > entry; place = (place - 1) / 2)
        heap[place] = heap[(place - 1) / 2];
    heap[place] = entry;
}
// Removes the least entry of a heap of *count entries, at least one, and returns the entry.
static uint64_t heap_pop(uint64_t *heap, size_t *count) {
    const uint64_t top = heap[0], last = heap[--*count];
    size_t place = 0;
    for (size_t child = 1; child < *count; child = 2 * place + 1) {
        child += child + 1 < *count && heap[child + 1] < heap[child];
        if (heap[child] >= last)
            break;
        heap[place] = heap[child];
        place = child;
    }
    heap[place] = last;
    return top;
}

// Adds symbol `left` with its right neighbor to the heap of *waiting pairs if they can merge. left -1: does nothing.
static void bpe_offer(const struct bpe *bpe, const struct bpe_work *work, size_t *waiting, int32_t left) {
    const int32_t right = left < 0 ? -1 : work->symbols[left].next;
    if (right < 0)
        return;
    const struct bpe_merge *merge = bpe_slot(bpe, bpe_pair(work->symbols[left].id, work->symbols[right].id));
    if (merge->id >= 0)
        heap_push(work->heap, waiting, (uint64_t)merge->rank << 32 | (uint32_t)left);
}

size_t bpe_encode(const struct bpe *bpe, struct bpe_work *work, size_t n, int32_t *ids) {
    struct bpe_symbol *symbols = work->symbols;
    size_t waiting = 0, count = 0;
    for (size_t i = 0; i < n; i++) {
        symbols[i].id = ids[i];
        symbols[i].previous = (int32_t)i - 1;
        symbols[i].next = i + 1 < n ? (int32_t)i + 1 : -1;
    }
    for (size_t i = 0; i + 1 < n; i++)
        bpe_offer(bpe, work, &waiting, (int32_t)i);
    while (waiting) {
        const uint64_t top = heap_pop(work->heap, &waiting);
        const int32_t left = (int32_t)(top & UINT32_MAX), id = bpe->ids[top >> 32], right = symbols[left].next;
        if (symbols[left].id < 0 || right < 0)
            continue;
        // An entry is stale when one of its two symbols has merged since: the pair then has another merge or none.
        if (bpe_slot(bpe, bpe_pair(symbols[left].id, symbols[right].id))->id != id)
            continue;
        symbols[left].id = id;
        symbols[left].next = symbols[right].next;
        symbols[right].id = -1;
        if (symbols[left].next >= 0)
            symbols[symbols[left].next].previous = left;
        bpe_offer(bpe, work, &waiting, symbols[left].previous);
        bpe_offer(bpe, work, &waiting, left);
    }
    for (int32_t i = 0; i >= 0 && n; i = symbols[i].next)
        ids[count++] = symbols[i].id;
    return count;
}
