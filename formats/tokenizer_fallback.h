// Reads the parts of a tokenizer.json that byte-fallback BPE, SentencePiece's, has and byte-level BPE has not. Three
// forms are known. Llama 2, Mistral 7B, Phi-3: the normalizer puts a mark (U+2581) before the text and in the place of
// each space. Gemma: it only replaces spaces, and a Split at spaces does nothing after it. Files with "legacy": false:
// no normalizer, and a Metaspace as pre_tokenizer. The decoder turns marks into spaces and byte tokens into bytes, and
// leaves out a first space that was added. Functions that take `r` return NULL, or what is wrong, in r->error.
#pragma once
#include "formats/tokenizer_reader.h" // struct tokenizer_reader

__BEGIN_DECLS
// Returns the byte that a token's text names, as <0x0A> does; -1: another text. any_case: allows a to f, for decoding.
int fallback_byte(const char *entry, size_t bytes, bool any_case);
// Checks that every byte has a byte token, after the vocabulary was read. If an ASCII character has none, as in Gemma's
// first files, first makes the character's own token its byte token.
const char *fallback_check_bytes(struct tokenizer_reader *r);
// Sets fallback.cuts to false if token `id`, which a merge makes, has a mark behind another character.
void fallback_note_merge(struct tokenizer_tables *tables, int32_t id);
// Reads the normalizer: NULL or null (none), a Prepend of a mark, a Replace of spaces by marks, or a Sequence of these.
const char *fallback_read_normalizer(struct tokenizer_reader *r, const json_t *normalizer);
// Reads the pre_tokenizer, after the normalizer: NULL, null, a Metaspace or, if spaces are replaced, a Split at them.
const char *fallback_read_pre_tokenizer(struct tokenizer_reader *r, const json_t *pre_tokenizer);
// Reads the decoder, which must be there, and makes the tables' decoded texts. All else in the file is read before.
const char *fallback_read_decoder(struct tokenizer_reader *r, const json_t *decoder);
__END_DECLS
