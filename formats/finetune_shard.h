// Shards of examples to finetune on, as scripts/prepare_data.py --chat writes them: rows of packed examples, a bit for
// each token that is learned, and a bit for each that begins a document. All numbers are little-endian.
//   1024 bytes   256 int32: [0] magic, [1] version, [2] tokens of a row, [3] bytes of a token (2 or 4), [4..5] rows
//                (uint64), [6..7] learned tokens (uint64), [8..9] documents (uint64), [10] vocabulary, a number above
//                every token, [16..23] SHA-256 of tokenizer.json (zeros: none), [24..31] its digest; the others are 0
//   tokens       rows * (tokens of a row) + 1, then zeros up to a multiple of 8 bytes
//   loss bits    for each token, from the lowest bit of a byte on, whether it counts as a target; padded alike
//   start bits   for each token, whether it begins a document; padded alike
// A row is a sample. Its first token begins a document, as padding at its end does. A token that begins a document is
// predicted by nothing and has no loss bit, so that a row's last target, the first token of the next row, never counts.
#pragma once
#include "formats/token_file.h" // struct token_file
#include <stdbool.h>            // bool

enum { FINETUNE_MAGIC = 20261123, FINETUNE_VERSION = 1, FINETUNE_HEADER_BYTES = 1024 };

__BEGIN_DECLS
// Whether `data`, the first bytes of a file, says that the file is a finetuning shard.
bool is_finetune_shard(const unsigned char *data, uint64_t data_bytes);
// Reads a shard's header, whose magic was checked, into *file, except path, documents and digest. data: the file's
// first data_bytes, with the whole header if the file is that long. file_bytes: the file's length. name: for messages.
const char *finetune_shard_parse(struct token_file *file, const unsigned char *data, uint64_t data_bytes,
                                 uint64_t file_bytes, const char *name, struct error_text *error);
// marks (n) = for each of tokens first..first+n-1 the index in `marks` at which its document begins, or the index's
// complement (~) if the token has no loss. first: a row's first token. fd: open. raw: scratch of n / 8 + 2 bytes.
const char *finetune_shard_read(int32_t *marks, const struct token_file *file, int fd, uint64_t first, int n,
                                unsigned char *raw, struct error_text *error);
__END_DECLS
