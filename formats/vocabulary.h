// Token ids to text, for printing samples. scripts/prepare_data.py writes PREFIX_vocabulary.bin beside the shards
// PREFIX_train_000.bin. Little-endian:
//    8 bytes "GPTVOCAB"; u32 version = 1; u32 number of tokens n; u32 id of the end-of-text token (0xffffffff: none);
//    u32 flags (1: a text's first space is left out); u32 offset[n + 1]; then the tokens' bytes, token i at offset[i].
#pragma once
#include <stdbool.h>   // bool
#include <stdint.h>    // uint64_t, int32_t
#include <stdio.h>     // FILE
#include <sys/cdefs.h> // __BEGIN_DECLS

#include "runtime/machine/error_text.h" // struct error_text

enum { VOCABULARY_STRIPS_SPACE = 1 };

struct vocabulary {
    int size;                     // tokens that have text; 0: none
    int end_of_text;              // the id that ends a document; -1: none
    bool strips_space;            // a space at the beginning of a text is not of the text: SentencePiece puts it there
    unsigned char *data;          // the file; owned; NULL where it is the caller's
    const unsigned char *offsets; // in data: (size + 1) u32, unaligned
    const unsigned char *text;    // in data
};

__BEGIN_DECLS
// Opens the vocabulary at `path`, whatever vocab_size is; vocabulary_close frees it, a failure ends the process. path
// NULL: for vocab_size 256 or 257 a vocabulary of bytes (token 256 ends a text), else one of no texts: ids are printed.
struct vocabulary vocabulary_open(const char *path, int vocab_size);
void vocabulary_close(struct vocabulary *vocabulary);
// Parses `data`, any bytes, which must outlive the vocabulary. Does not set vocabulary->data. NULL or the problem.
const char *vocabulary_parse(struct vocabulary *vocabulary, const unsigned char *data, uint64_t data_bytes,
                             const char *name, struct error_text *error);

// *path = the vocabulary.bin of a shard, found by file_beside_shard. False: none is there, or path is too short.
bool vocabulary_find(const char *shard_path, char *path, size_t path_bytes);
// *path = a shard's file. For data/c_train_000.bin and the ending vocabulary.bin it is the first that can be read of
// data/c_train_vocabulary.bin, data/c_vocabulary.bin and data/vocabulary.bin. False: none, or path is too short.
bool file_beside_shard(const char *shard_path, const char *ending, char *path, size_t path_bytes);

// Returns a token's *length bytes, in the vocabulary's memory, without a zero at the end. NULL and 0: no such token.
const unsigned char *vocabulary_decode(const struct vocabulary *vocabulary, int32_t token, int *length);
// Prints tokens (count) as a text, without a first space if strips_space; a token without text as [id]. Malformed
// bytes, and characters that act on a terminal, except newline and tab, are printed as \xNN: a model may sample any.
void vocabulary_print(FILE *out, const struct vocabulary *vocabulary, const int32_t *tokens, int count);

// Prints tokens one at a time, and each character when its last byte is there. Zeroed at first, except `out`.
struct terminal_text {
    FILE *out;
    unsigned char bytes[4];
    int have, want; // bytes of an unfinished character so far, and in all; want 0: no character is unfinished
    bool begun;     // a token was printed
};
// Prints a token as vocabulary_print does, but keeps an unfinished character in `text`. terminal_text_end must follow.
void vocabulary_print_token(struct terminal_text *text, const struct vocabulary *vocabulary, int32_t token);
// Prints the bytes of the unfinished character in `text`, if there is one, as \xNN. `begun` stays.
void terminal_text_end(struct terminal_text *text);
__END_DECLS
