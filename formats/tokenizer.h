// Text to token ids and back, by a tokenizer.json of Hugging Face: byte-level BPE, as in GPT-2, Llama 3 and Qwen2, and
// byte-fallback BPE, SentencePiece's, as in Llama 2, Mistral 7B, Gemma and Phi-3. Functions with an `error` return NULL
// when all is well, else what is wrong, in `error`. Parsers take any bytes.
//
// Ids are the `tokenizers` package's. Supported are BPE with ignore_merges; added tokens with lstrip and rstrip; a
// template that puts tokens before and after the text. Of byte-level BPE: normalizer NFC or none; split patterns that
// PCRE2 reads as Oniguruma does (formats/split_pattern.h), or GPT-2's; ByteLevel. Of byte-fallback BPE the three forms
// of formats/tokenizer_fallback.h. Anything else is refused by name: another model, as Unigram, dropout, an unknown
// member. Only `truncation` and `padding` are ignored: they are about batches. An added token has the id that the file
// gives it. Where ids below it are unused, the package renumbers it; prepare_data.py refuses such a file.
//
// Text may be any bytes; those that are not UTF-8 become byte tokens, so that decoding gives them back. Where nothing
// is added (add_prefix_space), stripped (lstrip, rstrip) or composed (NFC), decode(encode(text)) is the text. With byte
// fallback U+2581 comes back as a space, and a space put before the text is left out (tokenizer_strips_space).
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <stdint.h>    // int32_t
#include <sys/cdefs.h> // __BEGIN_DECLS

#include "formats/vocabulary.h"         // struct vocabulary
#include "runtime/machine/error_text.h" // struct error_text

enum encode_as {
    ENCODE_TEXT,        // a text by itself, without the template's tokens
    ENCODE_IN_TEMPLATE, // with them: Llama 3's beginning of text before it
    ENCODE_AS_REST      // what goes on after other tokens: nothing is put before it, no space either
};

struct piece_cache;

struct tokenizer {
    int32_t size;                    // the highest id + 1
    int32_t end_of_text;             // the id that ends a document; -1: none
    int32_t begin_of_text;           // the bos_token of the files beside it; -1: none
    struct tokenizer_tables *tables; // owned
};

__BEGIN_DECLS
// Reads the tokenizer.json at `path` into *tokenizer, for tokenizer_free; after an error nothing is held. end_of_text
// and begin_of_text come from tokenizer_config.json beside it, else special_tokens_map.json, else tokenizer_parse.
const char *tokenizer_read(struct tokenizer *tokenizer, const char *path, struct error_text *error);
// Parses a tokenizer.json; tokenizer_free frees *tokenizer, which holds nothing after an error. end_of_text is the
// first that it has of <|endoftext|>, <|end_of_text|>, </s>, <eos>, else -1, and begin_of_text -1. name: for messages.
const char *tokenizer_parse(struct tokenizer *tokenizer, const unsigned char *data, size_t bytes, const char *name,
                            struct error_text *error);
// Creates a tokenizer of bytes, which tokenizer_free frees. Token i is byte i. With vocab_size 257 the last token is
// <|endoftext|>, an added token. Sizes other than 256 and 257 are an error.
const char *tokenizer_of_bytes(struct tokenizer *tokenizer, int vocab_size, struct error_text *error);

// Sets end_of_text to the eos_token of a tokenizer_config.json or special_tokens_map.json, and begin_of_text to its
// bos_token, where it has them. An eos_token that the tokenizer does not have is an error; such a bos_token is ignored.
const char *tokenizer_parse_special(struct tokenizer *tokenizer, const unsigned char *data, size_t bytes,
                                    const char *name, struct error_text *error);
void tokenizer_free(struct tokenizer *tokenizer); // zeroed is fine

// *path = the tokenizer.json beside a shard, data/c_train_000.bin: the first that is there of
// data/c_train_tokenizer.json, data/c_tokenizer.json and data/tokenizer.json. False: none is, or path is too short.
bool tokenizer_find(const char *shard_path, char *path, size_t path_bytes);
// out = `path` with `sibling` in place of the final tokenizer.json. False: another ending, no such file, out too short.
bool tokenizer_find_sibling(const char *path, const char *sibling, char *out, size_t out_bytes);

// *ids = the *count ids of a text of at most 2^30 bytes, which the caller frees; NULL and 0 after an error. Added
// tokens are found in the text, special ones too, as in the `tokenizers` package.
const char *tokenizer_encode(const struct tokenizer *tokenizer, const void *text, size_t bytes, enum encode_as as,
                             int32_t **ids, int64_t *count, struct error_text *error);
// Encodes as tokenizer_encode does. Keeps pieces' ids in `cache`, for one thread and tokenizer only; NULL: no cache.
const char *tokenizer_encode_cached(const struct tokenizer *tokenizer, struct piece_cache *cache, const void *text,
                                    size_t bytes, enum encode_as as, int32_t **ids, int64_t *count,
                                    struct error_text *error);
// Whether a token is an added one, as special tokens are. A text is searched for added tokens before it is split.
bool tokenizer_is_added(const struct tokenizer *tokenizer, int32_t id);
// Returns an id's text, which the tokenizer owns: *length bytes, no 0, maybe part of a character. NULL: no such id.
const unsigned char *tokenizer_decode(const struct tokenizer *tokenizer, int32_t id, int *length);
// Whether the caller must leave out a space at the beginning of a decoded text: encoding has put it there.
bool tokenizer_strips_space(const struct tokenizer *tokenizer);
// *vocabulary = a copy of the tokenizer's tokens, for vocabulary_print; vocabulary_close frees it.
const char *tokenizer_vocabulary(const struct tokenizer *tokenizer, struct vocabulary *vocabulary,
                                 struct error_text *error);
__END_DECLS
