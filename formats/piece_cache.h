// The ids of pieces of text that were encoded before. Words repeat: merging the pairs of each word anew takes half of a
// tokenizer's time. A piece's hash gives it one slot, which holds the last piece that was put there.
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <stdint.h>    // int32_t
#include <sys/cdefs.h> // __BEGIN_DECLS

struct piece_cache; // of one tokenizer and one thread; 4 MiB

__BEGIN_DECLS
struct piece_cache *piece_cache_create(void);     // NULL: out of memory
void piece_cache_free(struct piece_cache *cache); // NULL is fine
// Returns a piece's *count ids, in the cache's memory, valid until the next piece_cache_put. NULL if it is not there.
const int32_t *piece_cache_find(const struct piece_cache *cache, const unsigned char *text, size_t bytes,
                                size_t *count);
// Puts a piece's ids (count) in its slot, over what was there. Does nothing above MAX_PIECE bytes or MAX_IDS ids.
void piece_cache_put(struct piece_cache *cache, const unsigned char *text, size_t bytes, const int32_t *ids,
                     size_t count);
__END_DECLS
