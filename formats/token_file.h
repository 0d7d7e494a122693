// Files of tokens: llm.c's shards, Megatron-LM's datasets, and shards to finetune on (formats/finetune_shard.h): their
// layout, and reading a range of tokens. A header of 256 int32 has in its ints 24..31 the digest of the tokenizer that
// made the file, or zeros, and in int 32 a number above every id of this tokenizer, or 0; llm.c reads the first three
// of its shards only. Functions that return const char * return NULL or, in `error`, the file's name and what is wrong.
#pragma once
#include "formats/tokenizer_digest.h"   // struct tokenizer_digest
#include "runtime/machine/error_text.h" // struct error_text
#include <stdint.h>                     // uint64_t, int32_t
#include <sys/cdefs.h>                  // __BEGIN_DECLS

#define TOKEN_FILES_EXPECTED "token shards: name them, as in 'FOLDER/*.bin'"

enum token_format { TOKENS_LLMC, TOKENS_MEGATRON, TOKENS_FINETUNE };
enum token_type { TOKEN_U8, TOKEN_I8, TOKEN_I16, TOKEN_U16, TOKEN_I32, TOKEN_U32, TOKEN_I64 };
enum { LLMC_HEADER_BYTES = 1024 };

struct token_file {
    char *path; // of the file that holds the tokens; owned
    enum token_format format;
    enum token_type type;
    uint64_t first_byte; // where the tokens begin
    uint64_t tokens;
    int row_tokens;                 // tokens of a sample; 0: any number
    uint64_t loss_byte, start_byte; // TOKENS_FINETUNE: where the bits begin
    uint32_t vocabulary;            // a number above every token of the tokenizer; 0: unknown
    struct tokenizer_digest tokenizer;
    uint64_t *documents; // (num_documents) the token at which each document begins, rising; NULL: not read; owned
    uint64_t num_documents;
    uint64_t digest; // token_file_digest, for its callers; 0: not computed
};

__BEGIN_DECLS
const char *token_format_name(enum token_format format); // in messages; a constant
const char *token_type_name(enum token_type type);       // in messages, as uint16; a constant
uint64_t token_type_bytes(enum token_type type);         // of a token

// Fills the zeroed *file, but not documents and digest, from Megatron's .bin at `path` if its .idx is beside it, else
// from a shard of llm.c or to finetune on. Nothing stays open. token_file_close frees *file, unless there was an error.
const char *token_file_open(struct token_file *file, const char *path, struct error_text *error);
void token_file_close(struct token_file *file);
// *digest = a hash, 1 to 2^63 - 1, of the file's length and of a few parts, the header among them. A file written anew
// almost always has another digest. The cost does not depend on the length. After an error *digest is undefined.
const char *token_file_digest(uint64_t *digest, const struct token_file *file, struct error_text *error);
// Fills file->documents, where documents begin, unless they were read before or the file is not of a Megatron dataset.
const char *token_file_read_documents(struct token_file *file, struct error_text *error);
// out (n) = the file's tokens first..first+n-1, which exist. Refuses one outside vocab_size. raw: scratch, n tokens.
const char *token_file_read(int32_t *out, const struct token_file *file, int fd, uint64_t first, int n, int vocab_size,
                            unsigned char *raw, struct error_text *error);
// Returns `path` with `ending` replaced, which the caller frees. NULL: the path ends otherwise, or out of memory.
char *path_with_ending(const char *path, const char *ending, const char *replacement);

// ---- the parsers, of untrusted bytes in memory: they set what the format has, but no path, documents and digest ----
// Parses the header of an llm.c shard, file_bytes long. data: its first data_bytes, the whole header if it has one.
const char *llmc_shard_parse(struct token_file *file, const unsigned char *data, uint64_t data_bytes,
                             uint64_t file_bytes, const char *name, struct error_text *error);
// Parses `index`, a whole .idx file, but leaves file->documents as it is. bin_bytes: the length of its .bin.
const char *megatron_index_parse(struct token_file *file, const unsigned char *index, uint64_t index_bytes,
                                 uint64_t bin_bytes, const char *name, struct error_text *error);
// Allocates and fills file->documents, NULL before. Skips empty documents. megatron_index_parse has accepted the index.
const char *megatron_documents_parse(struct token_file *file, const unsigned char *index, const char *name,
                                     struct error_text *error);
// out (n) = raw's tokens, unaligned. Returns n, or the index of the first outside the vocabulary; *outside = its value.
int tokens_widen(int32_t *out, const unsigned char *raw, enum token_type type, int n, int vocab_size, int64_t *outside);
__END_DECLS
