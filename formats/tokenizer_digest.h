// A hash of all in a tokenizer that decides the ids of text. A tokenizer.json's bytes are no identity, since Hugging
// Face's libraries write the same tokenizer in several ways. Shards of tokens carry the digest of the tokenizer that
// made them (formats/token_file.h), to be compared with the tokenizer.json in a model's folder.
//
// The half `text` covers the model (without unk_token and fuse_unk), the vocabulary without added tokens, merges as
// pairs of ids by rank, normalizer and pre_tokenizer. `added` covers the added tokens: id, text and flags, not
// `special`. Left out is what changes no id of a training document: template, decoder, truncation, padding, and members
// that say nothing (null, false, 0, empty) or what is the default. scripts/tokenizer_digest.py computes the same.
//
// Each half is the beginning of SHA-256 of values in a row, little-endian: a text as 's', u32 bytes, the bytes; an
// integer as 'i', i64; another number as 'd', double; true as 't', false as 'f', null as 'n'; a list as '[', u32
// length, its elements; an object as '{', u32 members, and each in the order of the names' bytes as a text and a value.
// `text`: the model without vocab and merges, normalizer and pre_tokenizer as a list; for each token by id u32 id, u32
// bytes, the bytes (of a list of tokens: the list as a value); for each merge u32 left, u32 right (0xffffffff: no
// token). `added`: the tokens in this form, each with a byte of flags: 1 single_word, 2 lstrip, 4 rstrip, 8 normalized.
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <stdint.h>    // uint32_t
#include <sys/cdefs.h> // __BEGIN_DECLS

#include "runtime/machine/error_text.h" // struct error_text

enum { TOKENIZER_DIGEST_HALF = 16 };
struct tokenizer_digest {
    unsigned char text[TOKENIZER_DIGEST_HALF], added[TOKENIZER_DIGEST_HALF]; // `text` all zeros: none is known
};

__BEGIN_DECLS
// *digest, *vocabulary = what a shard's first 1024 bytes say of its tokenizer (formats/token_file.h). Zeros: nothing.
void tokenizer_digest_of_header(struct tokenizer_digest *digest, uint32_t *vocabulary, const unsigned char *header);
bool tokenizer_digest_known(const struct tokenizer_digest *digest);
// *digest = the digest of a tokenizer.json, `data`, of any bytes and any kind of model. Undefined after an error.
const char *tokenizer_digest_parse(struct tokenizer_digest *digest, const unsigned char *data, size_t bytes,
                                   const char *name, struct error_text *error);
const char *tokenizer_digest_read(struct tokenizer_digest *digest, const char *path, struct error_text *error);
__END_DECLS
