// Text to token ids and back, by a tokenizer.json of Hugging Face: byte-level BPE, as of GPT-2, Llama 3 and Qwen2.
//
// Ids are those of the `tokenizers` package. What a file may ask for: BPE with ignore_merges; added tokens with lstrip
// and rstrip; normalizer NFC or none; split patterns that PCRE2 reads as Oniguruma does (formats/split_pattern.h), or
// GPT-2's; ByteLevel; a template that puts tokens before and after the text. Anything else is refused by name and never
// ignored: another model, dropout, byte_fallback, an unknown member. Two members are set aside on purpose, as
// prepare_data.py does: `truncation` and `padding` are about batches, and text is never cut here.
//
// An added token has the id that the file gives it. The package numbers them anew where there are holes before them,
// which prepare_data.py refuses.
//
// Text may be any bytes. Those that are not UTF-8, which the package does not take, become their byte tokens, so that
// decoding gives them back. Where nothing is added (add_prefix_space), stripped (lstrip, rstrip) or composed (NFC),
// decode(encode(text)) is the text.
//
// The parsers take bytes in memory, trust none of them, and return an error text or NULL (runtime/machine/error_text.h).
#pragma once
#include <errno.h>   // errno
#include <jansson.h> // json_loadb
#include <stdbool.h> // bool
#include <stdint.h>  // int32_t
#include <stdio.h>   // FILE, fopen, snprintf
#include <stdlib.h>  // malloc, free, qsort
#include <string.h>  // memcpy, memcmp, strrchr

#include "formats/bpe.h"                // bpe_encode
#include "runtime/machine/error_text.h" // struct error_text
#include "formats/nfc.h"                // nfc_normalize
#include "formats/split_pattern.h"      // split_pattern_find
#include "runtime/text/utf8.h"          // utf8_decode
#include "formats/vocabulary.h"         // struct vocabulary

enum {
    TOKENIZER_MOST_IDS = 1 << 26,
    TOKENIZER_MOST_HOLES = 1 << 20,   // ids that no token has, below the highest: a table has a line for each
    TOKENIZER_LONGEST_ADDED = 1024,   // bytes of an added token; a text is searched for all of them at every byte
    TOKENIZER_MOST_PATTERNS = 8,      // one after the other; DeepSeek has 3
    TOKENIZER_MOST_TEMPLATE = 16,     // tokens before or after the text
    TOKENIZER_LONGEST_TEXT = 1 << 30, // bytes: places in a piece are 32 bits
    TOKENIZER_LONGEST_FILE = 1 << 30
};

enum token_kind { TOKEN_NONE, TOKEN_BPE, TOKEN_OTHER, TOKEN_ADDED }; // other: in the vocabulary, but not made of bytes
struct tokenizer_token {
    uint32_t offset, bytes; // in text
    uint32_t kind;
};
struct added_token {
    const unsigned char *text; // in the tokenizer's
    uint32_t bytes;
    int32_t id;
    bool lstrip, rstrip, normalized;
};

struct tokenizer {
    int32_t size;                   // the highest id + 1
    int32_t end_of_text;            // -1 when there is none
    struct tokenizer_token *tokens; // by id; owned
    unsigned char *text;            // of all tokens; owned
    size_t text_bytes, longest;     // of all tokens, of one
    int32_t byte_token[256];        // -1 where a byte has none
    uint32_t *ids_by_text;          // a hash table of ids + 1 of TOKEN_BPE; 0: free; owned
    uint64_t ids_mask;
    struct bpe bpe;
    struct added_token *added; // in the order of their text; those that match raw text first; owned
    size_t added_raw, added_count;
    bool nfc, add_prefix_space, ignore_merges;
    struct split_pattern patterns[TOKENIZER_MOST_PATTERNS];
    int pattern_count;
    int32_t before[TOKENIZER_MOST_TEMPLATE], after[TOKENIZER_MOST_TEMPLATE]; // with add_special_tokens
    int before_count, after_count;
};

static void tokenizer_free(struct tokenizer *tokenizer) {
    free(tokenizer->tokens);
    free(tokenizer->text);
    free(tokenizer->ids_by_text);
    free(tokenizer->added);
    bpe_free(&tokenizer->bpe);
    for (int i = 0; i < tokenizer->pattern_count; i++)
        split_pattern_free(&tokenizer->patterns[i]);
    memset(tokenizer, 0, sizeof *tokenizer);
}

// ---------------------------------------------------------------------------------------------------------------------
// Tables.

static uint64_t tokenizer_hash(const unsigned char *text, size_t bytes) {
    uint64_t hash = bytes;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ text[i]) * 0x100000001b3u; // FNV-1a, and below a finish that reaches the low bits
    return bpe_hash(hash);
}

// The slot of a token of bytes, or the free one where it would go.
static uint32_t *tokenizer_slot(const struct tokenizer *tokenizer, const unsigned char *text, size_t bytes) {
    uint64_t slot = tokenizer_hash(text, bytes) & tokenizer->ids_mask;
    for (; tokenizer->ids_by_text[slot]; slot = (slot + 1) & tokenizer->ids_mask) {
        const struct tokenizer_token *token = &tokenizer->tokens[tokenizer->ids_by_text[slot] - 1];
        if (token->bytes == bytes && memcmp(tokenizer->text + token->offset, text, bytes) == 0)
            break;
    }
    return &tokenizer->ids_by_text[slot];
}
static int32_t tokenizer_id_of_bytes(const struct tokenizer *tokenizer, const unsigned char *text, size_t bytes) {
    return (int32_t)*tokenizer_slot(tokenizer, text, bytes) - 1;
}

// GPT-2's way of writing bytes as printable characters: those that are printable stand for themselves, the others are
// numbered from 256 on. The byte that a character stands for, -1 for none.
static int byte_of_character(uint32_t code) {
    if ((code >= 0x21 && code <= 0x7e) || (code >= 0xa1 && code <= 0xff && code != 0xad))
        return (int)code;
    if (code < 256 || code >= 256 + 68)
        return -1;
    const int number = (int)code - 256;
    return number <= 0x20 ? number : number < 0x43 ? 0x7f + number - 0x21 : 0xad;
}

// What a vocabulary's entry stands for, into `out`, which has room for as many bytes as `text` has. Returns how many
// they are, or -1 where a character stands for no byte.
static int64_t bytes_of_entry(const char *text, size_t bytes, unsigned char *out) {
    int64_t count = 0;
    for (size_t i = 0; i < bytes;) {
        uint32_t code;
        const int length = utf8_decode((const unsigned char *)text + i, bytes - i, &code);
        const int byte = length ? byte_of_character(code) : -1;
        if (byte < 0)
            return -1;
        out[count++] = (unsigned char)byte;
        i += (size_t)length;
    }
    return count;
}

static void tokenizer_put(struct tokenizer *tokenizer, int32_t id, const void *text, size_t bytes,
                          enum token_kind kind) {
    struct tokenizer_token *token = &tokenizer->tokens[id];
    token->offset = (uint32_t)tokenizer->text_bytes;
    token->bytes = (uint32_t)bytes;
    token->kind = kind;
    memmove(tokenizer->text + tokenizer->text_bytes, text, bytes);
    tokenizer->text_bytes += bytes;
    if (bytes > tokenizer->longest)
        tokenizer->longest = bytes;
}

// ---------------------------------------------------------------------------------------------------------------------
// Reading JSON: each member is asked for by name and type, and none is left over.

struct tokenizer_reader {
    struct tokenizer *tokenizer;
    const char *name;
    struct error_text *error;
};

// `allowed`: names, each with a space on both sides.
static const char *only_members(struct tokenizer_reader *r, const json_t *object, const char *where,
                                const char *allowed) {
    if (!json_is_object(object))
        return error_format(r->error, "%s: %s is not an object; expected a tokenizer.json of Hugging Face", r->name,
                            where);
    for (void *i = json_object_iter((json_t *)object); i; i = json_object_iter_next((json_t *)object, i)) {
        char wanted[64];
        snprintf(wanted, sizeof wanted, " %.60s ", json_object_iter_key(i));
        if (strchr(json_object_iter_key(i), ' ') || !strstr(allowed, wanted))
            return error_format(r->error, "%s: %s has '%.100s', which is not supported", r->name, where,
                                json_object_iter_key(i));
    }
    return NULL;
}

// A flag; one that is missing or null keeps its value.
static const char *read_flag(struct tokenizer_reader *r, const json_t *object, const char *where, const char *key,
                             bool *value) {
    const json_t *member = json_object_get(object, key);
    if (!member || json_is_null(member))
        return NULL;
    if (!json_is_boolean(member))
        return error_format(r->error, "%s: %s.%s is not true or false", r->name, where, key);
    *value = json_is_true(member);
    return NULL;
}
static const char *refuse_flag(struct tokenizer_reader *r, const json_t *object, const char *where, const char *key,
                               bool refused) {
    bool value = !refused;
    const char *problem = read_flag(r, object, where, key, &value);
    if (!problem && value == refused)
        problem = error_format(r->error, "%s: %s.%s is %s, which is not supported", r->name, where, key,
                               refused ? "true" : "false");
    return problem;
}
static const char *refuse_text(struct tokenizer_reader *r, const json_t *object, const char *where, const char *key) {
    const json_t *member = json_object_get(object, key);
    if (!member || json_is_null(member) || (json_is_string(member) && json_string_length(member) == 0))
        return NULL;
    return error_format(r->error, "%s: %s.%s is set, which is not supported", r->name, where, key);
}
// The "type" of one of the file's parts, "" where there is none.
static const char *type_of(const json_t *object) {
    const char *type = json_string_value(json_object_get(object, "type"));
    return type ? type : "";
}
static const char *refuse_type(struct tokenizer_reader *r, const json_t *object, const char *where,
                               const char *expected) {
    return error_format(r->error, "%s: %s is %.100s, which is not supported; expected %s", r->name, where,
                        json_is_null(object) || !object ? "null"
                        : *type_of(object)              ? type_of(object)
                                                        : "without a type",
                        expected);
}

static const char *read_id(struct tokenizer_reader *r, const json_t *number, const char *token, int32_t *id) {
    const json_int_t value = json_is_integer(number) ? json_integer_value(number) : -1;
    if (value < 0 || value >= TOKENIZER_MOST_IDS)
        return error_format(r->error, "%s: the id of token '%.100s' is not a number from 0 to %d", r->name, token,
                            TOKENIZER_MOST_IDS - 1);
    *id = (int32_t)value;
    return NULL;
}

// ---- the vocabulary ----

// Highest id and bytes of text over the vocabulary and the added tokens; then memory for them.
static const char *allocate_tokens(struct tokenizer_reader *r, json_t *vocab, const json_t *added) {
    struct tokenizer *t = r->tokenizer;
    const size_t count = json_object_size(vocab), added_count = json_array_size(added);
    size_t bytes = 1;
    int32_t highest = -1, id = 0;
    const char *problem = NULL;
    for (void *i = json_object_iter(vocab); i && !problem; i = json_object_iter_next(vocab, i)) {
        problem = read_id(r, json_object_iter_value(i), json_object_iter_key(i), &id);
        bytes += strlen(json_object_iter_key(i));
        highest = !problem && id > highest ? id : highest;
    }
    for (size_t i = 0; i < added_count && !problem; i++) {
        const json_t *token = json_array_get(added, i), *content = json_object_get(token, "content");
        if (!json_is_string(content))
            return error_format(r->error, "%s: added token %zu has no content", r->name, i);
        problem = read_id(r, json_object_get(token, "id"), json_string_value(content), &id);
        bytes += json_string_length(content);
        highest = !problem && id > highest ? id : highest;
    }
    if (problem)
        return problem;
    if (count < 1)
        return error_format(r->error, "%s: model.vocab is empty", r->name);
    if ((size_t)highest + 1 > count + added_count + TOKENIZER_MOST_HOLES)
        return error_format(r->error, "%s: has ids up to %d, but only %zu tokens", r->name, (int)highest,
                            count + added_count);
    t->size = highest + 1;
    uint64_t slots = 2;
    while (slots < 2 * (count + 1))
        slots *= 2;
    t->ids_mask = slots - 1;
    t->tokens = (struct tokenizer_token *)calloc((size_t)t->size, sizeof *t->tokens);
    t->ids_by_text = (uint32_t *)calloc(slots, sizeof *t->ids_by_text);
    t->added = (struct added_token *)calloc(added_count + 1, sizeof *t->added);
    t->text = (unsigned char *)malloc(bytes);
    if (!t->tokens || !t->ids_by_text || !t->added || !t->text || bytes > UINT32_MAX)
        return error_format(r->error, "%s: out of memory for %zu tokens", r->name, count);
    return NULL;
}

static const char *read_vocabulary_entry(struct tokenizer_reader *r, const char *entry, int32_t id) {
    struct tokenizer *t = r->tokenizer;
    const size_t bytes = strlen(entry);
    unsigned char *text = t->text + t->text_bytes; // where there is room for as many
    if (bytes == 0)
        return error_format(r->error, "%s: token %d is empty", r->name, (int)id);
    if (t->tokens[id].kind != TOKEN_NONE)
        return error_format(r->error, "%s: two tokens have the id %d, one of them '%.100s'", r->name, (int)id, entry);
    const int64_t count = bytes_of_entry(entry, bytes, text);
    if (count < 0) { // added tokens may stand in the vocabulary as they are
        tokenizer_put(t, id, entry, bytes, TOKEN_OTHER);
        return NULL;
    }
    *tokenizer_slot(t, text, (size_t)count) = (uint32_t)id + 1;
    if (count == 1)
        t->byte_token[text[0]] = id;
    tokenizer_put(t, id, text, (size_t)count, TOKEN_BPE);
    return NULL;
}

// The id of one half of a merge; its bytes come after those that `scratch` has.
static int32_t read_merge_half(const struct tokenizer *t, const char *half, size_t bytes, unsigned char *scratch,
                               size_t *scratch_bytes) {
    if (bytes < 1 || bytes > 2 * t->longest) // a character of the alphabet has at most two bytes
        return -1;
    const int64_t count = bytes_of_entry(half, bytes, scratch + *scratch_bytes);
    const int32_t id = count < 0 ? -1 : tokenizer_id_of_bytes(t, scratch + *scratch_bytes, (size_t)count);
    *scratch_bytes += id < 0 ? 0 : (size_t)count;
    return id;
}

// "a b" or ["a", "b"]
static const char *read_merge(struct tokenizer_reader *r, const json_t *merge, size_t rank, unsigned char *scratch) {
    const struct tokenizer *t = r->tokenizer;
    const char *left = json_string_value(merge), *right = NULL;
    size_t left_bytes = 0, right_bytes = 0, bytes = 0;
    if (left && (right = strchr(left, ' ')) && !strchr(right + 1, ' ')) {
        left_bytes = (size_t)(right - left);
        right_bytes = strlen(++right);
    } else if (json_array_size(merge) == 2) {
        left = json_string_value(json_array_get(merge, 0));
        right = json_string_value(json_array_get(merge, 1));
        left_bytes = left ? strlen(left) : 0;
        right_bytes = right ? strlen(right) : 0;
    }
    if (!left_bytes || !right_bytes)
        return error_format(r->error, "%s: merge %zu is not two tokens: expected \"a b\" or [\"a\", \"b\"]", r->name,
                            rank);
    const int32_t left_id = read_merge_half(t, left, left_bytes, scratch, &bytes);
    const int32_t right_id = left_id < 0 ? -1 : read_merge_half(t, right, right_bytes, scratch, &bytes);
    const int32_t id = right_id < 0 ? -1 : tokenizer_id_of_bytes(t, scratch, bytes);
    if (id < 0)
        return error_format(
            r->error, "%s: merge %zu, of '%.*s' and '%.*s', has a token that the vocabulary does not have", r->name,
            rank, left_bytes < 100 ? (int)left_bytes : 100, left, right_bytes < 100 ? (int)right_bytes : 100, right);
    bpe_add(&r->tokenizer->bpe, (uint32_t)rank, left_id, right_id, id);
    return NULL;
}

static const char *read_merges(struct tokenizer_reader *r, const json_t *merges) {
    const size_t count = json_array_size(merges);
    if (!json_is_array(merges) || count > TOKENIZER_MOST_IDS)
        return error_format(r->error, "%s: model.merges is not a list of at most %d pairs", r->name,
                            TOKENIZER_MOST_IDS);
    unsigned char *scratch = (unsigned char *)malloc(3 * r->tokenizer->longest + 1);
    const char *problem = NULL;
    if (!scratch || !bpe_create(&r->tokenizer->bpe, count))
        problem = error_format(r->error, "%s: out of memory for %zu merges", r->name, count);
    for (size_t i = 0; i < count && !problem; i++)
        problem = read_merge(r, json_array_get(merges, i), i, scratch);
    free(scratch);
    return problem;
}

static const char *refuse_dropout(struct tokenizer_reader *r, const json_t *model) {
    const json_t *dropout = json_object_get(model, "dropout");
    if (!dropout || json_is_null(dropout) || (json_is_number(dropout) && json_number_value(dropout) == 0))
        return NULL;
    return error_format(r->error, "%s: model.dropout is set, which is not supported", r->name);
}

// unk_token may be named: a byte-level vocabulary has every byte, and encoding says so where one has not.
static const char *read_model(struct tokenizer_reader *r, const json_t *model, const json_t *added) {
    json_t *vocab = json_object_get(model, "vocab");
    const json_t *merges = json_object_get(model, "merges");
    const char *type = type_of(model);
    if (*type ? strcmp(type, "BPE") != 0 : !vocab || !merges) // GPT-2's own file, an early one, has no type
        return refuse_type(r, model, "model", "BPE");
    const char *problem = only_members(r, model, "model",
                                       " type dropout unk_token continuing_subword_prefix end_of_word_suffix fuse_unk "
                                       "byte_fallback ignore_merges vocab merges ");
    problem = problem ? problem : refuse_dropout(r, model);
    problem = problem ? problem : refuse_text(r, model, "model", "continuing_subword_prefix");
    problem = problem ? problem : refuse_text(r, model, "model", "end_of_word_suffix");
    problem = problem ? problem : refuse_flag(r, model, "model", "fuse_unk", true);
    problem = problem ? problem : refuse_flag(r, model, "model", "byte_fallback", true);
    problem = problem ? problem : read_flag(r, model, "model", "ignore_merges", &r->tokenizer->ignore_merges);
    if (!problem && !json_is_object(vocab))
        problem = error_format(r->error, "%s: model.vocab is not an object of token: id", r->name);
    problem = problem ? problem : allocate_tokens(r, vocab, added);
    for (void *i = problem ? NULL : json_object_iter(vocab); i && !problem; i = json_object_iter_next(vocab, i))
        problem =
            read_vocabulary_entry(r, json_object_iter_key(i), (int32_t)json_integer_value(json_object_iter_value(i)));
    return problem ? problem : read_merges(r, merges);
}

// ---- added tokens ----

// The id that an added token must have when the vocabulary has its text too; -1 when it has not.
static int32_t id_in_vocabulary(const char *content, const json_t *vocab) {
    const json_t *id = json_object_get(vocab, content);
    return id ? (int32_t)json_integer_value(id) : -1;
}

static const char *read_added_token(struct tokenizer_reader *r, const json_t *token, size_t number,
                                    const json_t *vocab) {
    struct tokenizer *t = r->tokenizer;
    struct added_token *added = &t->added[number];
    const char *content = json_string_value(json_object_get(token, "content"));
    const size_t bytes = strlen(content);
    char where[160];
    bool special = false;
    snprintf(where, sizeof where, "added token '%.100s'", content);
    const char *problem = only_members(r, token, where, " id content single_word lstrip rstrip normalized special ");
    if (problem)
        return problem;
    if (bytes < 1 || bytes > TOKENIZER_LONGEST_ADDED)
        return error_format(r->error, "%s: %s has %zu bytes; expected 1 to %d", r->name, where, bytes,
                            TOKENIZER_LONGEST_ADDED);
    added->id = (int32_t)json_integer_value(json_object_get(token, "id"));
    added->bytes = (uint32_t)bytes;
    const int32_t in_vocabulary = id_in_vocabulary(content, vocab);
    if (in_vocabulary >= 0 && in_vocabulary != added->id)
        return error_format(r->error, "%s: %s has the id %d, but the vocabulary gives it %d", r->name, where,
                            (int)added->id, (int)in_vocabulary);
    if (t->tokens[added->id].kind == TOKEN_ADDED || (in_vocabulary < 0 && t->tokens[added->id].kind != TOKEN_NONE))
        return error_format(r->error, "%s: two tokens have the id %d, one of them '%.100s'", r->name, (int)added->id,
                            content);
    const struct tokenizer_token before = t->tokens[added->id];
    added->text = t->text + t->text_bytes;
    tokenizer_put(t, added->id, content, bytes, TOKEN_ADDED);
    if (before.kind == TOKEN_BPE) { // pieces are looked up by its bytes, which are the same but for strange tokens
        t->tokens[added->id] = before;
        t->tokens[added->id].kind = TOKEN_ADDED;
    }
    problem = refuse_flag(r, token, where, "single_word", true);
    problem = problem ? problem : read_flag(r, token, where, "lstrip", &added->lstrip);
    problem = problem ? problem : read_flag(r, token, where, "rstrip", &added->rstrip);
    problem = problem ? problem : read_flag(r, token, where, "normalized", &added->normalized);
    return problem ? problem : read_flag(r, token, where, "special", &special);
}

static bool same_text(const struct added_token *a, const struct added_token *b) {
    return a->bytes == b->bytes && memcmp(a->text, b->text, a->bytes) == 0;
}

static int compare_added(const void *a, const void *b) {
    const struct added_token *left = (const struct added_token *)a, *right = (const struct added_token *)b;
    if (left->normalized != right->normalized)
        return left->normalized - right->normalized;
    const int order = memcmp(left->text, right->text, left->bytes < right->bytes ? left->bytes : right->bytes);
    return order ? order : (left->bytes > right->bytes) - (left->bytes < right->bytes);
}

// The longest of a list of added tokens that stands at the beginning of `text`, NULL when none does. The list is in
// order, so each byte narrows it.
static const struct added_token *match_added(const struct added_token *list, size_t count, const unsigned char *text,
                                             size_t bytes) {
    const struct added_token *longest = NULL;
    size_t low = 0, high = count;
    for (size_t place = 0; low < high; place++) {
        if (list[low].bytes == place && place > 0)
            longest = &list[low++]; // the one that ends here comes first
        if (place == bytes)
            break;
        size_t left = low, right = high; // the first whose byte is not below text's
        while (left < right) {
            const size_t middle = (left + right) / 2;
            if (list[middle].text[place] < text[place])
                left = middle + 1;
            else
                right = middle;
        }
        low = left;
        right = high;
        while (left < right) { // the first whose byte is above it
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

// Tokens that match normalised text are normalised themselves by the package, which no tokenizer needs.
static const char *check_normalized(struct tokenizer_reader *r, const struct added_token *added) {
    size_t bytes = 0;
    unsigned char *text = nfc_normalize(added->text, added->bytes, &bytes);
    const bool same = text && bytes == added->bytes && memcmp(text, added->text, bytes) == 0;
    free(text);
    return same ? NULL
                : error_format(r->error, "%s: added token '%.*s' changes under NFC, which is not supported", r->name,
                               (int)added->bytes, (const char *)added->text);
}

static const char *read_added_tokens(struct tokenizer_reader *r, const json_t *list, const json_t *vocab) {
    struct tokenizer *t = r->tokenizer;
    const size_t count = json_array_size(list);
    const char *problem = NULL;
    for (size_t i = 0; i < count && !problem; i++)
        problem = read_added_token(r, json_array_get(list, i), i, vocab);
    if (problem)
        return problem;
    t->added_count = count;
    qsort(t->added, count, sizeof *t->added, compare_added);
    for (size_t i = 0; i < count && !problem; i++) {
        const struct added_token *added = &t->added[i];
        t->added_raw += !added->normalized;
        const struct added_token *raw =
            added->normalized ? match_added(t->added, t->added_raw, added->text, added->bytes) : NULL;
        if ((raw && raw->bytes == added->bytes) || (i && same_text(added, &added[-1])))
            problem = error_format(r->error, "%s: added token '%.*s' comes twice", r->name, (int)added->bytes,
                                   (const char *)added->text);
        else if (added->normalized && t->nfc)
            problem = check_normalized(r, added);
    }
    return problem;
}

// ---- normalizer, pre_tokenizer, post_processor, decoder ----

static const char *read_normalizer(struct tokenizer_reader *r, const json_t *normalizer) {
    if (!normalizer || json_is_null(normalizer))
        return NULL;
    r->tokenizer->nfc = strcmp(type_of(normalizer), "NFC") == 0;
    return r->tokenizer->nfc ? only_members(r, normalizer, "normalizer", " type ")
                             : refuse_type(r, normalizer, "normalizer", "null or NFC");
}

static const char *add_pattern(struct tokenizer_reader *r, const char *regex, size_t bytes) {
    struct tokenizer *t = r->tokenizer;
    if (t->pattern_count == TOKENIZER_MOST_PATTERNS)
        return error_format(r->error, "%s: pre_tokenizer splits more than %d times, which is not supported", r->name,
                            TOKENIZER_MOST_PATTERNS);
    return split_pattern_compile(&t->patterns[t->pattern_count++], regex, bytes, r->name, r->error);
}

static const char *read_split(struct tokenizer_reader *r, const json_t *split) {
    const json_t *pattern = json_object_get(split, "pattern"), *regex = json_object_get(pattern, "Regex");
    const char *behavior = json_string_value(json_object_get(split, "behavior"));
    const char *problem = only_members(r, split, "Split", " type pattern behavior invert ");
    problem = problem ? problem : only_members(r, pattern, "Split.pattern", " Regex ");
    problem = problem ? problem : refuse_flag(r, split, "Split", "invert", true);
    if (problem)
        return problem;
    if (!json_is_string(regex))
        return error_format(r->error, "%s: Split.pattern.Regex is not text", r->name);
    if (!behavior || strcmp(behavior, "Isolated") != 0)
        return error_format(r->error, "%s: Split.behavior is '%.100s', which is not supported; expected Isolated",
                            r->name, behavior ? behavior : "");
    return add_pattern(r, json_string_value(regex), json_string_length(regex));
}

static const char *read_byte_level(struct tokenizer_reader *r, const json_t *byte_level, const char *where) {
    static const char gpt2[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
    bool use_regex = true, trim_offsets = true; // offsets are nothing to ids
    const char *problem = only_members(r, byte_level, where, " type add_prefix_space trim_offsets use_regex ");
    r->tokenizer->add_prefix_space = true; // what the package takes for a member that is missing
    problem = problem ? problem : read_flag(r, byte_level, where, "add_prefix_space", &r->tokenizer->add_prefix_space);
    problem = problem ? problem : read_flag(r, byte_level, where, "trim_offsets", &trim_offsets);
    problem = problem ? problem : read_flag(r, byte_level, where, "use_regex", &use_regex);
    return problem || !use_regex ? problem : add_pattern(r, gpt2, sizeof gpt2 - 1);
}

static const char *read_pre_tokenizer(struct tokenizer_reader *r, const json_t *pre_tokenizer) {
    static const char expected[] = "ByteLevel, or a Sequence of Splits and a ByteLevel";
    if (strcmp(type_of(pre_tokenizer), "ByteLevel") == 0)
        return read_byte_level(r, pre_tokenizer, "pre_tokenizer");
    if (strcmp(type_of(pre_tokenizer), "Sequence") != 0)
        return refuse_type(r, pre_tokenizer, "pre_tokenizer", expected);
    const json_t *parts = json_object_get(pre_tokenizer, "pretokenizers");
    const size_t count = json_array_size(parts);
    const char *problem = only_members(r, pre_tokenizer, "pre_tokenizer", " type pretokenizers ");
    if (!problem && count == 0)
        problem = error_format(r->error, "%s: pre_tokenizer is an empty Sequence; expected %s", r->name, expected);
    for (size_t i = 0; i < count && !problem; i++) {
        const json_t *part = json_array_get(parts, i);
        const bool last = i + 1 == count;
        if (strcmp(type_of(part), last ? "ByteLevel" : "Split") != 0)
            problem = refuse_type(r, part, "a part of pre_tokenizer", expected);
        else
            problem = last ? read_byte_level(r, part, "ByteLevel") : read_split(r, part);
    }
    if (!problem && r->tokenizer->add_prefix_space && count > 1) // it would come before every piece
        problem = error_format(r->error, "%s: ByteLevel.add_prefix_space after a Split is not supported", r->name);
    return problem;
}

// The ids of one special token of a template go to the end of a list.
static const char *read_template_token(struct tokenizer_reader *r, const json_t *token, const json_t *special,
                                       int32_t *ids, int *count) {
    const char *name = json_string_value(json_object_get(token, "id"));
    const json_t *list = json_object_get(name ? json_object_get(special, name) : NULL, "ids");
    if (json_array_size(list) == 0)
        return error_format(r->error, "%s: the template's token '%.100s' has no ids", r->name, name ? name : "");
    for (size_t i = 0; i < json_array_size(list); i++) {
        int32_t id = -1;
        const char *problem = read_id(r, json_array_get(list, i), name, &id);
        if (problem)
            return problem;
        if (id >= r->tokenizer->size || r->tokenizer->tokens[id].kind == TOKEN_NONE)
            return error_format(r->error, "%s: the template's token '%.100s' has the id %d, which no token has",
                                r->name, name, (int)id);
        if (*count == TOKENIZER_MOST_TEMPLATE)
            return error_format(r->error, "%s: the template adds more than %d tokens, which is not supported", r->name,
                                TOKENIZER_MOST_TEMPLATE);
        ids[(*count)++] = id;
    }
    return NULL;
}

// Of "single": tokens, the text "A", tokens. "pair" is for two texts, of which there are none here.
static const char *read_template(struct tokenizer_reader *r, const json_t *processor) {
    struct tokenizer *t = r->tokenizer;
    const json_t *single = json_object_get(processor, "single"),
                 *special = json_object_get(processor, "special_tokens");
    const char *problem = only_members(r, processor, "TemplateProcessing", " type single pair special_tokens ");
    int texts = 0;
    if (!problem && (t->before_count || t->after_count))
        problem = error_format(r->error, "%s: post_processor has two templates, which is not supported", r->name);
    for (size_t i = 0; i < json_array_size(single) && !problem; i++) {
        const json_t *part = json_array_get(single, i), *token = json_object_get(part, "SpecialToken");
        const char *text = json_string_value(json_object_get(json_object_get(part, "Sequence"), "id"));
        if (token)
            problem = texts ? read_template_token(r, token, special, t->after, &t->after_count)
                            : read_template_token(r, token, special, t->before, &t->before_count);
        else if (text && strcmp(text, "A") == 0)
            texts++;
        else
            problem = error_format(r->error, "%s: TemplateProcessing.single has a part that is not supported", r->name);
    }
    if (!problem && texts != 1)
        problem = error_format(r->error, "%s: TemplateProcessing.single has the text %d times; expected once", r->name,
                               texts);
    return problem;
}

static const char *read_processor(struct tokenizer_reader *r, const json_t *processor) {
    if (strcmp(type_of(processor), "ByteLevel") == 0) // about offsets
        return only_members(r, processor, "post_processor", " type add_prefix_space trim_offsets use_regex ");
    if (strcmp(type_of(processor), "TemplateProcessing") == 0)
        return read_template(r, processor);
    return refuse_type(r, processor, "post_processor", "ByteLevel, TemplateProcessing, or a Sequence of them");
}

static const char *read_post_processor(struct tokenizer_reader *r, const json_t *processor) {
    if (!processor || json_is_null(processor))
        return NULL;
    if (strcmp(type_of(processor), "Sequence") != 0)
        return read_processor(r, processor);
    const json_t *parts = json_object_get(processor, "processors");
    const char *problem = only_members(r, processor, "post_processor", " type processors ");
    for (size_t i = 0; i < json_array_size(parts) && !problem; i++)
        problem = read_processor(r, json_array_get(parts, i));
    return problem;
}

static const char *read_decoder(struct tokenizer_reader *r, const json_t *decoder) {
    if (strcmp(type_of(decoder), "ByteLevel") != 0)
        return refuse_type(r, decoder, "decoder", "ByteLevel");
    return only_members(r, decoder, "decoder", " type add_prefix_space trim_offsets use_regex ");
}

// ---- the file ----

// The id of a token by its text: an added one, or one of the vocabulary; -1 when there is none.
static int32_t tokenizer_id(const struct tokenizer *t, const char *text) {
    const size_t bytes = strlen(text);
    for (size_t i = 0; i < t->added_count; i++)
        if (t->added[i].bytes == bytes && memcmp(t->added[i].text, text, bytes) == 0)
            return t->added[i].id;
    return t->ids_by_text ? tokenizer_id_of_bytes(t, (const unsigned char *)text, bytes) : -1;
}

static const char *read_tokenizer(struct tokenizer_reader *r, const json_t *root) {
    struct tokenizer *t = r->tokenizer;
    const json_t *model = json_object_get(root, "model"), *added = json_object_get(root, "added_tokens");
    const char *problem = only_members(r, root, "the file",
                                       " version truncation padding added_tokens normalizer pre_tokenizer "
                                       "post_processor decoder model ");
    const char *version = json_string_value(json_object_get(root, "version"));
    if (!problem && version && strcmp(version, "1.0") != 0)
        problem = error_format(r->error, "%s: has version %.100s; expected 1.0", r->name, version);
    if (!problem && added && !json_is_null(added) && !json_is_array(added))
        problem = error_format(r->error, "%s: added_tokens is not a list", r->name);
    problem = problem ? problem : read_model(r, model, added);
    problem = problem ? problem : read_normalizer(r, json_object_get(root, "normalizer"));
    problem = problem ? problem : read_added_tokens(r, added, json_object_get(model, "vocab"));
    problem = problem ? problem : read_pre_tokenizer(r, json_object_get(root, "pre_tokenizer"));
    problem = problem ? problem : read_post_processor(r, json_object_get(root, "post_processor"));
    problem = problem ? problem : read_decoder(r, json_object_get(root, "decoder"));
    if (problem)
        return problem;
    t->end_of_text = tokenizer_id(t, "<|endoftext|>");
    if (t->end_of_text < 0)
        t->end_of_text = tokenizer_id(t, "<|end_of_text|>");
    return NULL;
}

static json_t *tokenizer_json(const unsigned char *data, size_t bytes, const char *name, struct error_text *error,
                              const char **problem) {
    json_error_t json_error;
    json_t *root = json_loadb((const char *)data, bytes, JSON_REJECT_DUPLICATES, &json_error);
    *problem = root ? NULL
                    : error_format(error, "%s: line %d, column %d: %s; expected JSON of Hugging Face", name,
                                   json_error.line, json_error.column, json_error.text);
    return root;
}

// `data`: a tokenizer.json. tokenizer_free() it when this returned NULL; otherwise there is nothing to free.
static const char *tokenizer_parse(struct tokenizer *tokenizer, const unsigned char *data, size_t bytes,
                                   const char *name, struct error_text *error) {
    const char *problem;
    memset(tokenizer, 0, sizeof *tokenizer);
    tokenizer->end_of_text = -1;
    for (int i = 0; i < 256; i++)
        tokenizer->byte_token[i] = -1;
    json_t *root = tokenizer_json(data, bytes, name, error, &problem);
    if (root) {
        struct tokenizer_reader reader = {tokenizer, name, error};
        problem = read_tokenizer(&reader, root);
        json_decref(root);
    }
    if (problem)
        tokenizer_free(tokenizer);
    return problem;
}

// `data`: a tokenizer_config.json or special_tokens_map.json, whose eos_token is then what ends a text.
static const char *tokenizer_parse_special(struct tokenizer *tokenizer, const unsigned char *data, size_t bytes,
                                           const char *name, struct error_text *error) {
    const char *problem;
    json_t *root = tokenizer_json(data, bytes, name, error, &problem);
    if (!root)
        return problem;
    const json_t *token = json_object_get(root, "eos_token"), *content = json_object_get(token, "content");
    const char *text = json_string_value(content ? content : token);
    const int32_t id = text ? tokenizer_id(tokenizer, text) : -1;
    if (!json_is_object(root) || (token && !json_is_null(token) && !text))
        problem = error_format(error, "%s: eos_token is not the text of a token", name);
    else if (text && id < 0)
        problem = error_format(error, "%s: names '%.100s' as eos_token, which the tokenizer does not have", name, text);
    else if (text)
        tokenizer->end_of_text = id;
    json_decref(root);
    return problem;
}

// A token is a byte, and with 257 the last one ends a text; the same text as vocabulary_of_bytes has.
static const char *tokenizer_of_bytes(struct tokenizer *tokenizer, int vocab_size, struct error_text *error) {
    static const char mark[] = "<|endoftext|>";
    memset(tokenizer, 0, sizeof *tokenizer);
    if (vocab_size != 256 && vocab_size != 257)
        return error_format(error, "a vocabulary of %d tokens is not one of bytes; expected 256 or 257", vocab_size);
    tokenizer->tokens = (struct tokenizer_token *)calloc((size_t)vocab_size, sizeof *tokenizer->tokens);
    tokenizer->text = (unsigned char *)malloc(256 + sizeof mark);
    if (!tokenizer->tokens || !tokenizer->text || !bpe_create(&tokenizer->bpe, 0)) {
        tokenizer_free(tokenizer);
        return error_format(error, "out of memory for a tokenizer of bytes");
    }
    tokenizer->size = vocab_size;
    tokenizer->end_of_text = vocab_size > 256 ? 256 : -1;
    for (int i = 0; i < 256; i++) {
        const unsigned char byte = (unsigned char)i;
        tokenizer->byte_token[i] = i;
        tokenizer_put(tokenizer, i, &byte, 1, TOKEN_BPE);
    }
    if (vocab_size > 256)
        tokenizer_put(tokenizer, 256, mark, sizeof mark - 1, TOKEN_ADDED);
    return NULL;
}

// ---------------------------------------------------------------------------------------------------------------------
// Files.

// The whole file, for free(); NULL with a text in `error`.
static unsigned char *tokenizer_read_file(const char *path, size_t *bytes, struct error_text *error) {
    FILE *file = fopen(path, "rb");
    long length = -1;
    if (file && fseek(file, 0, SEEK_END) == 0)
        length = ftell(file);
    unsigned char *data = NULL;
    if (length > TOKENIZER_LONGEST_FILE)
        error_format(error, "%s: has %ld bytes; expected at most %d", path, length, TOKENIZER_LONGEST_FILE);
    else if (length < 0 || fseek(file, 0, SEEK_SET) != 0 || !(data = (unsigned char *)malloc((size_t)length + 1)) ||
             fread(data, 1, (size_t)length, file) != (size_t)length) {
        error_format(error, "%s: can't be read: %s", path, strerror(errno));
        free(data);
        data = NULL;
    }
    if (file)
        fclose(file);
    *bytes = data ? (size_t)length : 0;
    return data;
}

// PREFIXtokenizer.json to PREFIXtokenizer_config.json and so on; false where it has no such name or there is no such
// file.
static bool tokenizer_sibling(const char *path, const char *sibling, char *out, size_t out_bytes) {
    static const char ending[] = "tokenizer.json";
    const size_t length = strlen(path);
    if (length < sizeof ending - 1 || strcmp(path + length - (sizeof ending - 1), ending) != 0)
        return false;
    const size_t prefix = length - (sizeof ending - 1);
    if (prefix + strlen(sibling) >= out_bytes)
        return false;
    memcpy(out, path, prefix);
    memcpy(out + prefix, sibling, strlen(sibling) + 1);
    FILE *file = fopen(out, "rb");
    if (file)
        fclose(file);
    return file != NULL;
}

// A tokenizer.json, and eos_token from the tokenizer_config.json or else the special_tokens_map.json beside it.
static const char *tokenizer_read(struct tokenizer *tokenizer, const char *path, struct error_text *error) {
    static const char *const siblings[] = {"tokenizer_config.json", "special_tokens_map.json"};
    char sibling[4096];
    size_t bytes;
    unsigned char *data = tokenizer_read_file(path, &bytes, error);
    if (!data)
        return error->text;
    const char *problem = tokenizer_parse(tokenizer, data, bytes, path, error);
    free(data);
    for (size_t i = 0; i < 2 && !problem; i++) {
        if (!tokenizer_sibling(path, siblings[1 - i], sibling, sizeof sibling)) // the first, read last, wins
            continue;
        data = tokenizer_read_file(sibling, &bytes, error);
        problem = data ? tokenizer_parse_special(tokenizer, data, bytes, sibling, error) : error->text;
        free(data);
        if (problem)
            tokenizer_free(tokenizer);
    }
    return problem;
}

// The tokenizer.json that belongs to a shard, as vocabulary_find looks for a vocabulary: for data/c_train_000.bin the
// first there is of data/c_train_tokenizer.json, data/c_tokenizer.json and data/tokenizer.json.
static bool tokenizer_find(const char *shard_path, char *path, size_t path_bytes) {
    return file_beside_shard(shard_path, "tokenizer.json", path, path_bytes);
}

// ---------------------------------------------------------------------------------------------------------------------
// Text to ids.

struct tokenizer_work {
    const struct tokenizer *tokenizer;
    struct error_text *error;
    struct bpe_work bpe;
    struct split_search search;
    int32_t *ids;
    size_t count, room;
};

static const char *work_out_of_memory(struct tokenizer_work *work, size_t bytes) {
    return error_format(work->error, "out of memory for the tokens of %zu bytes of text", bytes);
}

static const char *work_reserve(struct tokenizer_work *work, size_t more) {
    if (more <= work->room - work->count)
        return NULL;
    const size_t room = work->count + more > 2 * work->room ? work->count + more : 2 * work->room;
    int32_t *ids = (int32_t *)realloc(work->ids, room * sizeof *ids);
    if (!ids)
        return work_out_of_memory(work, more);
    work->ids = ids;
    work->room = room;
    return NULL;
}
static const char *work_put(struct tokenizer_work *work, const int32_t *ids, size_t count) {
    const char *problem = work_reserve(work, count);
    if (!problem && count) {
        memcpy(work->ids + work->count, ids, count * sizeof *ids);
        work->count += count;
    }
    return problem;
}

// Each byte on its own.
static const char *encode_bytes(struct tokenizer_work *work, const unsigned char *text, size_t bytes) {
    const char *problem = work_reserve(work, bytes);
    if (problem)
        return problem;
    for (size_t i = 0; i < bytes; i++) {
        const int32_t id = work->tokenizer->byte_token[text[i]];
        if (id < 0)
            return error_format(work->error, "the tokenizer has no token for the byte 0x%02x of the text", text[i]);
        work->ids[work->count + i] = id;
    }
    work->count += bytes;
    return NULL;
}

// A piece that no pattern splits further.
static const char *encode_piece(struct tokenizer_work *work, const unsigned char *text, size_t bytes) {
    const struct tokenizer *t = work->tokenizer;
    const int32_t whole = t->ignore_merges ? tokenizer_id_of_bytes(t, text, bytes) : -1;
    if (whole >= 0)
        return work_put(work, &whole, 1);
    if (!bpe_work_reserve(&work->bpe, bytes))
        return work_out_of_memory(work, bytes);
    const char *problem = encode_bytes(work, text, bytes);
    if (problem)
        return problem;
    work->count -= bytes;
    int32_t *ids = work->ids + work->count;
    for (size_t i = 0; i < bytes; i++)
        work->bpe.symbols[i].id = ids[i];
    work->count += bpe_encode(&t->bpe, &work->bpe, bytes, ids);
    return NULL;
}

// Cuts at the matches of a pattern, and what lies between them stays too; each piece goes to the next pattern.
static const char *encode_split(struct tokenizer_work *work, const unsigned char *text, size_t bytes, int pattern) {
    if (bytes == 0)
        return NULL;
    if (pattern == work->tokenizer->pattern_count)
        return encode_piece(work, text, bytes);
    size_t done = 0;
    for (size_t from = 0; from < bytes;) {
        size_t begin, end;
        const int found =
            split_pattern_find(&work->tokenizer->patterns[pattern], &work->search, text, bytes, from, &begin, &end);
        if (found < 0)
            return error_format(work->error, "the tokenizer's split pattern takes too long at byte %zu of %zu", from,
                                bytes);
        if (found == 0)
            break;
        const char *problem = encode_split(work, text + done, begin - done, pattern + 1);
        problem = problem ? problem : encode_split(work, text + begin, end - begin, pattern + 1);
        if (problem)
            return problem;
        done = end;
        for (from = end + (begin == end); from < bytes && (text[from] & 0xc0) == 0x80; from++)
            ; // a match of nothing: on from the next character
    }
    return encode_split(work, text + done, bytes - done, pattern + 1);
}

// Well-formed text without added tokens.
static const char *encode_plain(struct tokenizer_work *work, const unsigned char *text, size_t bytes) {
    if (!work->tokenizer->add_prefix_space || bytes == 0 || text[0] == ' ')
        return encode_split(work, text, bytes, 0);
    unsigned char *prefixed = (unsigned char *)malloc(bytes + 1);
    if (!prefixed)
        return work_out_of_memory(work, bytes);
    prefixed[0] = ' ';
    memcpy(prefixed + 1, text, bytes);
    const char *problem = encode_split(work, prefixed, bytes + 1, 0);
    free(prefixed);
    return problem;
}

static size_t spaces_before(const unsigned char *text, size_t least, size_t end) {
    while (end > least) {
        size_t begin = end - 1;
        uint32_t code;
        while (begin > least && (text[begin] & 0xc0) == 0x80 && end - begin < 4)
            begin--;
        if ((size_t)utf8_decode(text + begin, end - begin, &code) != end - begin || !unicode_is_space(code))
            break;
        end = begin;
    }
    return end;
}
static size_t spaces_after(const unsigned char *text, size_t begin, size_t bytes) {
    uint32_t code;
    for (int length; begin < bytes; begin += (size_t)length) {
        length = utf8_decode(text + begin, bytes - begin, &code);
        if (length == 0 || !unicode_is_space(code))
            break;
    }
    return begin;
}

typedef const char *encode_rest(struct tokenizer_work *work, const unsigned char *text, size_t bytes);

// Finds added tokens of one list; what lies between them goes to `rest`.
static const char *encode_added(struct tokenizer_work *work, const struct added_token *list, size_t count,
                                const unsigned char *text, size_t bytes, encode_rest *rest) {
    size_t done = 0;
    const char *problem = NULL;
    bool first[256] = {false};
    for (size_t i = 0; i < count; i++)
        first[list[i].text[0]] = true;
    for (size_t i = 0; i < bytes && !problem;) {
        const struct added_token *added = first[text[i]] ? match_added(list, count, text + i, bytes - i) : NULL;
        if (!added) {
            i++;
            continue;
        }
        const size_t begin = added->lstrip ? spaces_before(text, done < i ? done : i, i) : i;
        i += added->bytes;
        if (done < begin)
            problem = rest(work, text + done, begin - done);
        problem = problem ? problem : work_put(work, &added->id, 1);
        const size_t end = added->rstrip ? spaces_after(text, i, bytes) : i;
        done = end > done ? end : done;
    }
    return problem || done == bytes ? problem : rest(work, text + done, bytes - done);
}

static const char *encode_normal(struct tokenizer_work *work, const unsigned char *text, size_t bytes) {
    const struct tokenizer *t = work->tokenizer;
    return encode_added(work, t->added + t->added_raw, t->added_count - t->added_raw, text, bytes, encode_plain);
}

static const char *encode_well_formed(struct tokenizer_work *work, const unsigned char *text, size_t bytes) {
    if (!work->tokenizer->nfc || !nfc_may_change(text, bytes))
        return encode_normal(work, text, bytes);
    size_t normal_bytes;
    unsigned char *normal = nfc_normalize(text, bytes, &normal_bytes);
    const char *problem = normal ? encode_normal(work, normal, normal_bytes) : work_out_of_memory(work, bytes);
    free(normal);
    return problem;
}

// Any bytes, without those added tokens that match raw text: well-formed stretches, and between them bytes that are
// not.
static const char *encode_any(struct tokenizer_work *work, const unsigned char *text, size_t bytes) {
    const char *problem = NULL;
    size_t begin = 0;
    for (size_t i = 0; i < bytes && !problem;) {
        uint32_t code;
        const int length = utf8_decode(text + i, bytes - i, &code);
        i += (size_t)length;
        if (length > 0)
            continue;
        if (begin < i)
            problem = encode_well_formed(work, text + begin, i - begin);
        problem = problem ? problem : encode_bytes(work, text + i, 1);
        begin = ++i;
    }
    return problem || begin == bytes ? problem : encode_well_formed(work, text + begin, bytes - begin);
}

static const char *encode_text(struct tokenizer_work *work, const unsigned char *text, size_t bytes,
                               bool add_special_tokens) {
    const struct tokenizer *t = work->tokenizer;
    const char *problem = work_reserve(work, 1 + bytes / 4); // some memory even for no text
    if (!problem && add_special_tokens)
        problem = work_put(work, t->before, (size_t)t->before_count);
    if (!problem && !t->ids_by_text)
        problem = encode_bytes(work, text, bytes);
    else if (!problem)
        problem = encode_added(work, t->added, t->added_raw, text, bytes, encode_any);
    if (!problem && add_special_tokens)
        problem = work_put(work, t->after, (size_t)t->after_count);
    return problem;
}

// The ids of `text`, for free(), and how many they are. Added tokens are found in the text, special ones too, as the
// package does; `add_special_tokens` puts those of the template (Llama 3's beginning of text) around it.
static const char *tokenizer_encode(const struct tokenizer *tokenizer, const void *text, size_t bytes,
                                    bool add_special_tokens, int32_t **ids, int64_t *count, struct error_text *error) {
    struct tokenizer_work work;
    memset(&work, 0, sizeof work);
    work.tokenizer = tokenizer;
    work.error = error;
    *ids = NULL;
    *count = 0;
    if (bytes > TOKENIZER_LONGEST_TEXT)
        return error_format(error, "a text of %zu bytes is too long to encode; expected at most %d", bytes,
                            TOKENIZER_LONGEST_TEXT);
    const char *problem = split_search_begin(&work.search, bytes)
                              ? encode_text(&work, (const unsigned char *)text, bytes, add_special_tokens)
                              : work_out_of_memory(&work, bytes);
    split_search_end(&work.search);
    bpe_work_free(&work.bpe);
    if (problem) {
        free(work.ids);
        return problem;
    }
    *ids = work.ids;
    *count = (int64_t)work.count;
    return NULL;
}

// ---------------------------------------------------------------------------------------------------------------------
// Ids to text.

// The bytes that a token stands for, *length of them, not ended by a zero; NULL when no token has the id. A character
// may be spread over several tokens.
static const unsigned char *tokenizer_decode(const struct tokenizer *tokenizer, int32_t id, int *length) {
    *length = 0;
    if (id < 0 || id >= tokenizer->size || tokenizer->tokens[id].kind == TOKEN_NONE)
        return NULL;
    *length = (int)tokenizer->tokens[id].bytes;
    return tokenizer->text + tokenizer->tokens[id].offset;
}

// Makes a vocabulary of it, so that vocabulary_print can print samples; vocabulary_close() it.
static const char *tokenizer_vocabulary(const struct tokenizer *tokenizer, struct vocabulary *vocabulary,
                                        struct error_text *error) {
    enum { HEADER_BYTES = 24 };
    const uint32_t header[4] = {1, (uint32_t)tokenizer->size,
                                tokenizer->end_of_text < 0 ? UINT32_MAX : (uint32_t)tokenizer->end_of_text, 0};
    const size_t offsets_bytes = 4 * ((size_t)tokenizer->size + 1);
    memset(vocabulary, 0, sizeof *vocabulary);
    unsigned char *data = (unsigned char *)malloc(HEADER_BYTES + offsets_bytes + tokenizer->text_bytes);
    if (!data)
        return error_format(error, "out of memory for a vocabulary of %d tokens", (int)tokenizer->size);
    memcpy(data, "GPTVOCAB", 8);
    memcpy(data + 8, header, sizeof header);
    uint32_t offset = 0;
    for (int32_t id = 0; id <= tokenizer->size; id++) {
        memcpy(data + HEADER_BYTES + 4 * (size_t)id, &offset, sizeof offset);
        int length;
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
