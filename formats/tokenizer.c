// A tokenizer's files, and ids to text.

#include "formats/tokenizer.h"

#include <stdlib.h> // calloc
#include <string.h> // memcpy, memset
#include <unistd.h> // access

#include "formats/tokenizer_tables.h" // struct tokenizer_tables
#include "runtime/files/file_read.h"  // read_whole

enum { TOKENIZER_LONGEST_FILE = 1 << 30 }; // bytes

bool tokenizer_is_added(const struct tokenizer *tokenizer, int32_t id) {
    return id >= 0 && id < tokenizer->size && tokenizer->tables->tokens[id].kind == TOKEN_ADDED;
}

const char *tokenizer_of_bytes(struct tokenizer *tokenizer, int vocab_size, struct error_text *error) {
    static const char mark[] = "<|endoftext|>";
    memset(tokenizer, 0, sizeof *tokenizer);
    if (vocab_size != 256 && vocab_size != 257)
        return error_format(error, "a vocabulary of %d tokens is not one of bytes; expected 256 or 257", vocab_size);
    const bool begun = tokenizer_begin(tokenizer);
    struct tokenizer_tables *tables = tokenizer->tables;
    if (begun) {
        tables->tokens = (struct tokenizer_token *)calloc((size_t)vocab_size, sizeof *tables->tokens);
        tables->text = (unsigned char *)malloc(256 + sizeof mark);
        tables->added = (struct added_token *)calloc(1, sizeof *tables->added);
    }
    if (!begun || !tables->tokens || !tables->text || !tables->added || !bpe_create(&tables->bpe, 0)) {
        tokenizer_free(tokenizer);
        return error_format(error, "out of memory for a tokenizer of bytes");
    }
    tokenizer->size = vocab_size;
    tokenizer->end_of_text = vocab_size > 256 ? 256 : -1;
    for (int i = 0; i < 256; i++) {
        const unsigned char byte = (unsigned char)i;
        tables->byte_token[i] = i;
        tokenizer_put(tables, i, &byte, 1, TOKEN_BPE);
    }
    if (vocab_size > 256) {
        tokenizer_put(tables, 256, mark, sizeof mark - 1, TOKEN_ADDED);
        tables->added->text = tables->text + tables->tokens[256].offset;
        tables->added->bytes = tables->tokens[256].bytes;
        tables->added->id = 256;
        tables->added_raw = tables->added_count = 1;
    }
    return NULL;
}

// ---- files ----

bool tokenizer_find_sibling(const char *path, const char *sibling, char *out, size_t out_bytes) {
    static const char ending[] = "tokenizer.json";
    const size_t length = strlen(path);
    if (length < sizeof ending - 1 || strcmp(path + length - (sizeof ending - 1), ending) != 0)
        return false;
    const size_t prefix = length - (sizeof ending - 1);
    if (prefix + strlen(sibling) >= out_bytes)
        return false;
    memcpy(out, path, prefix);
    memcpy(out + prefix, sibling, strlen(sibling) + 1);
    return access(out, R_OK) == 0;
}

const char *tokenizer_read(struct tokenizer *tokenizer, const char *path, struct error_text *error) {
    static const char *const siblings[] = {"special_tokens_map.json", "tokenizer_config.json"}; // the later one wins
    char sibling[4096];
    unsigned char *data;
    uint64_t bytes;
    RETURN_PROBLEM(read_whole(&data, &bytes, TOKENIZER_LONGEST_FILE, path, "a tokenizer.json", error));
    const char *problem = tokenizer_parse(tokenizer, data, bytes, path, error);
    free(data);
    for (size_t i = 0; i < 2 && !problem; i++) {
        if (!tokenizer_find_sibling(path, siblings[i], sibling, sizeof sibling))
            continue;
        problem = read_whole(&data, &bytes, TOKENIZER_LONGEST_FILE, sibling, "a file of a tokenizer", error);
        if (!problem)
            problem = tokenizer_parse_special(tokenizer, data, bytes, sibling, error);
        free(data);
        if (problem)
            tokenizer_free(tokenizer);
    }
    return problem;
}

bool tokenizer_find(const char *shard_path, char *path, size_t path_bytes) {
    return file_beside_shard(shard_path, "tokenizer.json", path, path_bytes);
}

// ---- ids to text ----

const unsigned char *tokenizer_decode(const struct tokenizer *tokenizer, int32_t id, int *length) {
    *length = 0;
    const struct tokenizer_tables *tables = tokenizer->tables;
    if (id < 0 || id >= tokenizer->size || tables->tokens[id].kind == TOKEN_NONE)
        return NULL;
    if (tables->fallback.on) {
        const uint32_t *offsets = tables->fallback.decoded_offsets + id;
        *length = (int)(offsets[1] - offsets[0]);
        return tables->fallback.decoded + offsets[0];
    }
    *length = (int)tables->tokens[id].bytes;
    return tables->text + tables->tokens[id].offset;
}

bool tokenizer_strips_space(const struct tokenizer *tokenizer) { return tokenizer->tables->fallback.strips; }

const char *tokenizer_vocabulary(const struct tokenizer *tokenizer, struct vocabulary *vocabulary,
                                 struct error_text *error) {
    enum { HEADER_BYTES = 24 };
    const uint32_t header[4] = {1, (uint32_t)tokenizer->size,
                                tokenizer->end_of_text < 0 ? UINT32_MAX : (uint32_t)tokenizer->end_of_text,
                                tokenizer_strips_space(tokenizer) ? VOCABULARY_STRIPS_SPACE : 0};
    const size_t offsets_bytes = 4 * ((size_t)tokenizer->size + 1);
    memset(vocabulary, 0, sizeof *vocabulary);
    size_t text_bytes = 0;
    int length;
    for (int32_t id = 0; id < tokenizer->size; id++)
        text_bytes += tokenizer_decode(tokenizer, id, &length) ? (size_t)length : 0;
    unsigned char *data = (unsigned char *)malloc(HEADER_BYTES + offsets_bytes + text_bytes);
    if (!data)
        return error_format(error, "out of memory for a vocabulary of %d tokens", (int)tokenizer->size);
    memcpy(data, "GPTVOCAB", 8);
    memcpy(data + 8, header, sizeof header);
    uint32_t offset = 0;
    for (int32_t id = 0; id <= tokenizer->size; id++) {
        memcpy(data + HEADER_BYTES + 4 * (size_t)id, &offset, sizeof offset);
        const unsigned char *text = tokenizer_decode(tokenizer, id, &length);
        if (text)
            memcpy(data + HEADER_BYTES + offsets_bytes + offset, text, (size_t)length);
        offset += (uint32_t)length;
    }
    vocabulary->data = data;
    const char *problem =
        vocabulary_parse(vocabulary, data, HEADER_BYTES + offsets_bytes + offset, "the tokenizer's vocabulary", error);
    if (problem)
        vocabulary_close(vocabulary);
    return problem;
}
