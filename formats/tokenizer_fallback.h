// Inside the reading of a tokenizer.json: what byte-fallback BPE, SentencePiece's, has that byte-level BPE has not.
// Three forms are known. Llama 2, Mistral 7B and Phi-3: the normalizer puts a mark (U+2581) before the text and in the
// place of each space. Gemma: it only replaces spaces, and a Split at spaces does nothing after it. Files with
// "legacy": false: no normalizer, and a Metaspace as pre_tokenizer. The decoder turns marks into spaces and byte tokens
// into bytes, and leaves out the first space where one was put there. Functions return NULL, or what is wrong, in
// r->error.
#pragma once
#include "formats/tokenizer_reader.h" // struct tokenizer_reader

__BEGIN_DECLS
// Returns the byte of the token `entry` (bytes), "<0x0A>"; -1: none. any_case: lower-case digits too, as when decoding.
int fallback_byte(const char *entry, size_t bytes, bool any_case);
// Completes byte_token once the vocabulary is there, and refuses one where a byte of a text has no token. An ASCII
// character without a byte token stands for itself, as in Gemma's first files.
const char *fallback_check_bytes(struct tokenizer_reader *r);
// Notes that text may not be cut before marks, if token `id`, made by a merge, has a mark behind another character.
void fallback_note_merge(struct tokenizer_tables *tables, int32_t id);
// Reads the normalizer: none, one that puts a mark before the text, one that replaces spaces by marks, or a Sequence.
const char *fallback_read_normalizer(struct tokenizer_reader *r, const json_t *normalizer);
// Reads the pre_tokenizer, after the normalizer: none, a Metaspace, or a Split at spaces, when all are replaced.
const char *fallback_read_pre_tokenizer(struct tokenizer_reader *r, const json_t *pre_tokenizer);
// Reads the decoder, after all else in the file, and makes the tables' decoded texts.
const char *fallback_read_decoder(struct tokenizer_reader *r, const json_t *decoder);
__END_DECLS
