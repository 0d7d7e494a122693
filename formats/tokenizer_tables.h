// The inside of a tokenizer: tables that tokenizer_json.c fills from a file and by which tokenizer_encode.c encodes.
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <stdint.h>    // int32_t
#include <sys/cdefs.h> // __BEGIN_DECLS

#include "formats/bpe.h"           // struct bpe
#include "formats/split_pattern.h" // struct split_pattern
#include "formats/tokenizer.h"     // struct tokenizer

#define SPACE_MARK "\xe2\x96\x81" // U+2581, which SentencePiece writes for a space
enum {
    TOKENIZER_MAX_PATTERNS = 8,  // applied one after the other; DeepSeek has 3
    TOKENIZER_MAX_TEMPLATE = 16, // tokens before or after the text
    SPACE_MARK_BYTES = 3
};

enum token_kind {
    TOKEN_NONE,
    TOKEN_BPE,
    TOKEN_OTHER, // in the vocabulary, with characters outside the alphabet of bytes
    TOKEN_ADDED
};
struct tokenizer_token {
    uint32_t offset, bytes; // range of the tables' text
    enum token_kind kind;
};
struct added_token {
    const unsigned char *text; // what is found: in the tables' text, or its normalized form
    unsigned char *normal;     // that form; owned; NULL: the text is the token's own
    uint32_t bytes;
    int32_t id;
    bool lstrip, rstrip, normalized;
};

// Says where a Metaspace puts a mark: nowhere, before the text's first stretch, or before each between added tokens.
enum metaspace_prefix { METASPACE_NEVER, METASPACE_FIRST, METASPACE_ALWAYS };
// Byte-fallback BPE: symbols are characters, and the bytes of those that the vocabulary lacks. A mark is U+2581.
struct tokenizer_fallback {
    bool on;
    bool prepends, replaces;      // the normalizer: a mark before each stretch between added tokens, spaces to marks
    bool metaspace, splits;       // the pre_tokenizer: spaces to marks, and each mark begins a piece
    enum metaspace_prefix prefix; // with metaspace
    bool cuts;                    // no merge goes from another character to a mark after it
    bool strips;                  // the decoder: one space before the whole text is left out
    unsigned char *decoded;       // texts of all tokens, with spaces for marks and bytes for byte tokens; owned
    uint32_t *decoded_offsets;    // (size + 1) in `decoded`; owned
};

struct tokenizer_tables {
    struct tokenizer_token *tokens; // by id; owned
    unsigned char *text;            // of all tokens; owned
    size_t text_bytes, longest;     // bytes of all tokens, of the longest one
    int32_t byte_token[256];        // -1: the byte has no token
    uint32_t *ids_by_text;          // hash table of ids + 1 of TOKEN_BPE, 0: free slot; NULL: tokens are bytes; owned
    uint64_t ids_mask;              // slots - 1
    struct bpe bpe;
    size_t merges; // 0: tokens are encoded one by one
    struct tokenizer_fallback fallback;
    struct added_token *added; // those that match raw text, then those that match normalized text, each by text; owned
    size_t added_raw, added_count;
    bool nfc, add_prefix_space, ignore_merges;
    struct split_pattern *patterns[TOKENIZER_MAX_PATTERNS]; // owned
    int pattern_count;
    int32_t before[TOKENIZER_MAX_TEMPLATE], after[TOKENIZER_MAX_TEMPLATE]; // the template's, around the text
    int before_count, after_count;
};

__BEGIN_DECLS
// Begins a tokenizer with empty tables, for tokenizer_free. False when out of memory, with nothing to free.
bool tokenizer_begin(struct tokenizer *tokenizer);
// Sets tokens[id], not ids_by_text. Appends `text`, which may lie at that end already, to tables->text, which has room.
void tokenizer_put(struct tokenizer_tables *tables, int32_t id, const void *text, size_t bytes, enum token_kind kind);

bool is_space_mark(const unsigned char *text, size_t left);
// Returns a copy, *out_bytes long, to be freed, with a mark before it (prefix), for spaces (replace). NULL: no memory.
unsigned char *mark_spaces(const unsigned char *text, size_t bytes, bool prefix, bool replace, size_t *out_bytes);

// Returns the slot of ids_by_text with id + 1 of the token of these bytes, or a free slot (0). ids_by_text: not NULL.
uint32_t *tokenizer_slot(const struct tokenizer_tables *tables, const unsigned char *text, size_t bytes);
// Returns these bytes' id in ids_by_text (not NULL), or -1. A token entered as TOKEN_BPE may be TOKEN_ADDED by now.
int32_t tokenizer_id_of_bytes(const struct tokenizer_tables *tables, const unsigned char *text, size_t bytes);
// Returns the id of the added token with this text. If there is none, returns the id of the TOKEN_BPE whose bytes are
// the text, which is looked up only if ids_by_text is not NULL. Returns -1 if there is neither.
int32_t tokenizer_id(const struct tokenizer_tables *tables, const char *text);
// Returns the longest added token with which `text` begins. The list is sorted by text. NULL if there is none.
const struct added_token *tokenizer_match_added(const struct added_token *list, size_t count, const unsigned char *text,
                                                size_t bytes);
__END_DECLS
