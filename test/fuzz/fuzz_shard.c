// A file of tokens, in llm.c's format or in the format for finetuning: its header, then every token against a
// vocabulary.
#include "formats/finetune_shard.h" // under test
#include "formats/token_file.h"     // under test
#include "test/fuzz/fuzz.h"         // fuzz_require

// Parses a header for finetuning. Everything that an accepted header promises must lie within the file.
static const char *fuzz_parse_rows(const unsigned char *header, size_t header_bytes, size_t bytes,
                                   struct error_text *error) {
    struct token_file file;
    const char *problem = finetune_shard_parse(&file, header, header_bytes, bytes, "shard", error);
    if (problem)
        return problem;
    const uint64_t bits = (file.tokens + 7) / 8;
    fuzz_require(file.row_tokens > 0 && file.tokens % (uint64_t)file.row_tokens == 1 % (uint64_t)file.row_tokens);
    fuzz_require(file.first_byte + file.tokens * token_type_bytes(file.type) <= file.loss_byte);
    fuzz_require(file.loss_byte + bits <= file.start_byte && file.start_byte + bits <= bytes);
    return NULL;
}

static const char *fuzz_parse(const unsigned char *data, size_t bytes, struct error_text *error) {
    enum { VOCAB_SIZE = 50257 };
    struct token_file file;
    const size_t header_bytes = bytes < LLMC_HEADER_BYTES ? bytes : LLMC_HEADER_BYTES;
    unsigned char *header = (unsigned char *)malloc(header_bytes + 1);
    fuzz_require(header);
    memcpy(header, data, header_bytes);
    if (is_finetune_shard(header, header_bytes)) {
        const char *problem = fuzz_parse_rows(header, header_bytes, bytes, error);
        free(header);
        return problem;
    }
    const char *problem = llmc_shard_parse(&file, header, header_bytes, bytes, "shard", error);
    free(header);
    if (problem)
        return problem;
    fuzz_require(file.tokens > 0 && file.first_byte + file.tokens * token_type_bytes(file.type) == bytes);
    int64_t outside = 0;
    int32_t *tokens = (int32_t *)malloc(file.tokens * sizeof *tokens);
    fuzz_require(tokens);
    const int n = (int)file.tokens,
              good = tokens_widen(tokens, data + file.first_byte, file.type, n, VOCAB_SIZE, &outside);
    for (int i = 0; i < good; i++)
        fuzz_require(tokens[i] >= 0 && tokens[i] < VOCAB_SIZE);
    fuzz_require(good == n || outside < 0 || outside >= VOCAB_SIZE);
    free(tokens);
    return NULL;
}
