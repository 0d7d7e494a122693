// Encodes the texts that --eval-tasks and --perplexity score, by the model's tokenizer.
#pragma once
#include "run/generate.cuh" // open_tokenizer

// Returns the elements (*count) of an OPTION_LIST as texts. The caller frees each text and the list.
static char **list_elements(const char *list, int *count) {
    static const char list_end[] = {OPTION_LIST_END, 0};
    *count = option_list_count(list);
    char **elements = (char **)calloc((size_t)*count + 1, sizeof *elements);
    for (int i = 0; i < *count && elements; i++) {
        const size_t length = strcspn(list, list_end);
        if (!(elements[i] = strndup(list, length)))
            fail("out of memory");
        list += length + 1;
    }
    if (!elements)
        fail("out of memory");
    return elements;
}

// Encodes a text of `bytes`, with the template's tokens (a beginning of text) if `special`. Returns the tokens
// (*count), which the caller frees. where: the text's name in messages. A token that the model lacks ends the program.
static int32_t *encode_scored(const struct run *r, const char *text, size_t bytes, bool special, int64_t *count,
                              const char *where) {
    const int V = r->config->model.vocab_size;
    int32_t *ids;
    struct error_text error;
    const char *problem =
        tokenizer_encode(&r->tokenizer, text, bytes, special ? ENCODE_IN_TEMPLATE : ENCODE_TEXT, &ids, count, &error);
    if (problem)
        fail("%s: %s", where, problem);
    for (int64_t i = 0; i < *count; i++)
        if (ids[i] >= V)
            fail("%s: the tokenizer makes token %d, outside the model's vocabulary of %d", where, (int)ids[i], V);
    return ids;
}

// Returns the token before a text without context: begin of text, or else end of text. Without either the program ends.
static int32_t prefix_token(const struct run *r, const char *where) {
    const struct tokenizer *t = &r->tokenizer;
    const int32_t prefix = t->begin_of_text >= 0 ? t->begin_of_text : t->end_of_text;
    if (prefix < 0 || prefix >= r->config->model.vocab_size)
        fail("%s: nothing stands before what is scored, and the tokenizer has neither a beginning nor an end of text; "
             "expected a context",
             where);
    return prefix;
}
// Encodes a context, continued or not, by encode_scored: with the template's tokens, unless the prefix token begins it.
static int32_t *encode_with_context(const struct run *r, const char *text, size_t bytes, int64_t *count,
                                    const char *where) {
    const struct tokenizer *t = &r->tokenizer;
    int length = 0;
    const unsigned char *prefix =
        tokenizer_decode(t, t->begin_of_text >= 0 ? t->begin_of_text : t->end_of_text, &length);
    const bool has = prefix && length > 0 && bytes >= (size_t)length && memcmp(text, prefix, (size_t)length) == 0;
    return encode_scored(r, text, bytes, !has, count, where);
}
// Encodes a text without context, by encode_scored, behind the prefix token, which is not doubled if the text has it.
static int32_t *encode_without_context(const struct run *r, const char *text, size_t bytes, int64_t *count,
                                       const char *where) {
    const int32_t prefix = prefix_token(r, where);
    int32_t *ids = encode_scored(r, text, bytes, false, count, where);
    if (*count > 0 && ids[0] == prefix)
        return ids;
    int32_t *longer = (int32_t *)malloc((size_t)(*count + 1) * sizeof *longer);
    if (!longer)
        fail("%s: out of memory", where);
    longer[0] = prefix;
    if (*count > 0)
        memcpy(longer + 1, ids, (size_t)*count * sizeof *ids);
    free(ids);
    *count += 1;
    return longer;
}
