// The ids of pieces of text that were encoded before. Words repeat: merging the pairs of each word anew takes half of a
// tokenizer's time. A piece has one slot by its hash, which the last piece there takes.
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <stdint.h>    // int32_t
#include <sys/cdefs.h> // __BEGIN_DECLS

struct piece_cache; // of one tokenizer and one thread; 4 MiB

__BEGIN_DECLS
struct piece_cache *piece_cache_create(void);     // NULL: out of memory
void piece_cache_free(struct piece_cache *cache); // NULL is fine
// Returns the *count ids of a piece, the cache's, valid until the next piece_cache_put; NULL: the piece is not there.
const int32_t *piece_cache_find(const struct piece_cache *cache, const unsigned char *text, size_t bytes,
                                size_t *count);
// Puts the ids (count) of a piece in its slot, over another piece's; does nothing above MAX_PIECE bytes or MAX_IDS ids.
void piece_cache_put(struct piece_cache *cache, const unsigned char *text, size_t bytes, const int32_t *ids,
                     size_t count);
__END_DECLS
