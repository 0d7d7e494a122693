// Byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909): the tokens of a piece of text, by merging pairs of
// neighbours in the order in which training found them.
//
// Each step merges the pair of the lowest rank, of several the leftmost, until no neighbours have a merge. A piece of n
// bytes takes O(n log n): a megabyte without a space takes a second.
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <stdint.h>    // uint64_t, int32_t
#include <sys/cdefs.h> // __BEGIN_DECLS

// The merges of a tokenizer. Zeroed it has none, and bpe_free takes it.
struct bpe {
    struct bpe_merge *merges; // open-addressing hash table by pair of ids; owned
    uint64_t mask;            // slots - 1
    int32_t *ids;             // by rank: the id that the pair becomes; owned
};
// The memory that one thread encodes with, reused from piece to piece. Begins zeroed.
struct bpe_work {
    struct bpe_symbol *symbols; // owned
    uint64_t *heap;             // candidate pairs; owned
    size_t room;                // symbols
};

__BEGIN_DECLS
// Room for ranks 0 to merges - 1, of at most 2^27; false when out of memory (then bpe_free it too).
bool bpe_create(struct bpe *bpe, size_t merges);
void bpe_free(struct bpe *bpe);
// The pair left, right becomes id. A pair that is added twice has its later rank, as in the `tokenizers` package.
void bpe_add(struct bpe *bpe, uint32_t rank, int32_t left, int32_t right, int32_t id);

// Room for a piece of n symbols, whose old content is lost; false when out of memory.
bool bpe_work_reserve(struct bpe_work *work, size_t n);
void bpe_work_free(struct bpe_work *work);
// Merges ids[0..n) in place, for which work has room. Returns how many ids remain.
size_t bpe_encode(const struct bpe *bpe, struct bpe_work *work, size_t n, int32_t *ids);

// The finish of splitmix64, which makes neighbouring numbers distant ones: a hash for tables of 2^k slots.
uint64_t bpe_hash(uint64_t value);
__END_DECLS
