// The tables of a tokenizer: made, filled, searched and freed.
#include "formats/tokenizer_tables.h"

#include <stdlib.h> // calloc, free
#include <string.h> // memmove, memcmp

bool tokenizer_begin(struct tokenizer *tokenizer) {
    memset(tokenizer, 0, sizeof *tokenizer);
    tokenizer->end_of_text = tokenizer->begin_of_text = -1;
    tokenizer->tables = (struct tokenizer_tables *)calloc(1, sizeof *tokenizer->tables);
    for (int i = 0; i < 256 && tokenizer->tables; i++)
        tokenizer->tables->byte_token[i] = -1;
    return tokenizer->tables;
}

void tokenizer_free(struct tokenizer *tokenizer) {
    struct tokenizer_tables *tables = tokenizer->tables;
    if (tables) {
        free(tables->tokens);
        free(tables->text);
        free(tables->ids_by_text);
        for (size_t i = 0; tables->added && i < tables->added_count; i++)
            free(tables->added[i].normal);
        free(tables->added);
        free(tables->fallback.decoded);
        free(tables->fallback.decoded_offsets);
        bpe_free(&tables->bpe);
        for (int i = 0; i < tables->pattern_count; i++)
            split_pattern_free(tables->patterns[i]);
        free(tables);
    }
    memset(tokenizer, 0, sizeof *tokenizer);
}

void tokenizer_put(struct tokenizer_tables *tables, int32_t id, const void *text, size_t bytes, enum token_kind kind) {
    struct tokenizer_token *token = &tables->tokens[id];
    token->offset = (uint32_t)tables->text_bytes;
    token->bytes = (uint32_t)bytes;
    token->kind = kind;
    memmove(tables->text + tables->text_bytes, text, bytes);
    tables->text_bytes += bytes;
    if (bytes > tables->longest)
        tables->longest = bytes;
}

bool is_space_mark(const unsigned char *text, size_t left) {
    return left >= SPACE_MARK_BYTES && memcmp(text, SPACE_MARK, SPACE_MARK_BYTES) == 0;
}
// Returns a copy, *out_bytes long, to be freed. prefix: a mark before it. replace: marks for spaces. NULL: no memory.
unsigned char *mark_spaces(const unsigned char *text, size_t bytes, bool prefix, bool replace, size_t *out_bytes) {
    size_t marks = prefix;
    for (size_t i = 0; i < bytes && replace; i++)
        marks += text[i] == ' ';
    unsigned char *marked = (unsigned char *)malloc(bytes + SPACE_MARK_BYTES * marks + 1), *out = marked;
    if (!marked)
        return NULL;
    if (prefix)
        out = (unsigned char *)memcpy(out, SPACE_MARK, SPACE_MARK_BYTES) + SPACE_MARK_BYTES;
    for (size_t i = 0; i < bytes; i++)
        if (replace && text[i] == ' ')
            out = (unsigned char *)memcpy(out, SPACE_MARK, SPACE_MARK_BYTES) + SPACE_MARK_BYTES;
        else
            *out++ = text[i];
    *out_bytes = (size_t)(out - marked);
    return marked;
}

// Hashes as FNV-1a does, but begins with the number of bytes, and mixes so that the low bits depend on all others.
static uint64_t tokenizer_hash(const unsigned char *text, size_t bytes) {
    uint64_t hash = bytes;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ text[i]) * 0x100000001b3u;
    return bpe_hash(hash);
}

uint32_t *tokenizer_slot(const struct tokenizer_tables *tables, const unsigned char *text, size_t bytes) {
    uint64_t slot = tokenizer_hash(text, bytes) & tables->ids_mask;
    for (; tables->ids_by_text[slot]; slot = (slot + 1) & tables->ids_mask) {
        const struct tokenizer_token *token = &tables->tokens[tables->ids_by_text[slot] - 1];
        if (token->bytes == bytes && memcmp(tables->text + token->offset, text, bytes) == 0)
            break;
    }
    return &tables->ids_by_text[slot];
}
int32_t tokenizer_id_of_bytes(const struct tokenizer_tables *tables, const unsigned char *text, size_t bytes) {
    return (int32_t)*tokenizer_slot(tables, text, bytes) - 1;
}

int32_t tokenizer_id(const struct tokenizer_tables *tables, const char *text) {
    const size_t bytes = strlen(text);
    for (size_t i = 0; i < tables->added_count; i++) {
        const struct added_token *added = &tables->added[i];
        const struct tokenizer_token *token = &tables->tokens[added->id];
        const unsigned char *own = added->normal ? tables->text + token->offset : added->text;
        if ((added->normal ? token->bytes : added->bytes) == bytes && memcmp(own, text, bytes) == 0)
            return added->id;
    }
    return tables->ids_by_text ? tokenizer_id_of_bytes(tables, (const unsigned char *)text, bytes) : -1;
}

// Finds the longest token byte by byte: each byte of the text narrows the range [low, high) of tokens that still match.
const struct added_token *tokenizer_match_added(const struct added_token *list, size_t count, const unsigned char *text,
                                                size_t bytes) {
    const struct added_token *longest = NULL;
    size_t low = 0, high = count;
    for (size_t place = 0; low < high; place++) {
        if (list[low].bytes == place && place > 0)
            longest = &list[low++]; // a token that ends here is the first of those that match so far
        if (place == bytes)
            break;
        size_t left = low, right = high; // binary search for the first token whose byte is not below the text's
        while (left < right) {
            const size_t middle = (left + right) / 2;
            if (list[middle].text[place] < text[place])
                left = middle + 1;
            else
                right = middle;
        }
        low = left;
        right = high;
        while (left < right) { // then for the first token whose byte is above the text's
            const size_t middle = (left + right) / 2;
            if (list[middle].text[place] <= text[place])
                left = middle + 1;
            else
                right = middle;
        }
        high = left;
    }
    return longest;
}
