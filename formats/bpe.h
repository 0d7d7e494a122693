// Byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909) of a piece of text, such as a word. Each step merges two
// neighboring symbols into one, until no neighbors have a merge. It takes the pair whose merge has the lowest rank, of
// several such pairs the leftmost; ranks are the order in which training found the merges. n bytes take O(n log n).
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <stdint.h>    // uint64_t, int32_t
#include <sys/cdefs.h> // __BEGIN_DECLS

// The merges of a tokenizer. A zeroed struct has none, and may be freed.
struct bpe {
    struct bpe_merge *merges; // open-addressing hash table by pair of ids; owned
    uint64_t mask;            // slots - 1
    int32_t *ids;             // by rank: the id that the pair becomes; owned
};
// The memory that one thread encodes with, reused from piece to piece. To be zeroed first.
struct bpe_work {
    struct bpe_symbol *symbols; // owned
    uint64_t *heap;             // candidate pairs; owned
    size_t room;                // capacity in symbols
};

__BEGIN_DECLS
// Prepares *bpe to take merges of ranks below `merges`, at most 2^27. False: out of memory. bpe_free follows even then.
bool bpe_create(struct bpe *bpe, size_t merges);
void bpe_free(struct bpe *bpe);
// Adds a merge: the tokens left and right become the token id, which is 0 or more. Each merge has a rank of its own,
// below bpe_create's `merges`. If a pair is added again, its last rank and id hold, as in the `tokenizers` package.
void bpe_add(struct bpe *bpe, uint32_t rank, int32_t left, int32_t right, int32_t id);

// Makes room in *work for n symbols. What it held may be lost. Returns false, and it has no room, when out of memory.
bool bpe_work_reserve(struct bpe_work *work, size_t n);
void bpe_work_free(struct bpe_work *work);
// Merges ids (n) in place, lowest rank first. bpe_work_reserve has made room for n. Returns how many ids remain.
size_t bpe_encode(const struct bpe *bpe, struct bpe_work *work, size_t n, int32_t *ids);

// Returns a hash of 64 bits, by splitmix64's finalizer. Any k of the bits serve as a slot in a table of 2^k slots.
uint64_t bpe_hash(uint64_t value);
__END_DECLS
