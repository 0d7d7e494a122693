#include "formats/tokenizer.h"

#include <jansson.h> // json_loadb
#include <stdio.h>   // snprintf
#include <stdlib.h>  // malloc, calloc, qsort
#include <string.h>  // memcmp, strchr

#include "formats/nfc.h"                // nfc_normalize
#include "formats/tokenizer_fallback.h" // fallback_read_normalizer
#include "formats/tokenizer_reader.h"   // struct tokenizer_reader
#include "runtime/text/utf8.h"          // utf8_decode

enum {
    TOKENIZER_MAX_HOLES = 1 << 20, // unused ids below the highest: the tables have an entry for each
    TOKENIZER_LONGEST_ADDED = 1024 // bytes of an added token; a text is searched for all of them at every byte
};

// Returns a character's byte in GPT-2's alphabet, -1: none. Printable bytes are themselves, others come from U+0100 on.
static int byte_of_character(uint32_t code) {
    if ((code >= 0x21 && code <= 0x7e) || (code >= 0xa1 && code <= 0xff && code != 0xad))
        return (int)code;
    if (code < 256 || code >= 256 + 68)
        return -1;
    const int number = (int)code - 256;
    return number <= 0x20 ? number : number < 0x43 ? 0x7f + number - 0x21 : 0xad;
}

// out = the bytes that a vocabulary's entry `text` stands for, at most `bytes`; with byte fallback, the entry itself.
// Returns their number; -1, and `out` is undefined, where a character is not of the alphabet.
static int64_t bytes_of_entry(const struct tokenizer_tables *t, const char *text, size_t bytes, unsigned char *out) {
    int64_t count = 0;
    if (t->fallback.on) {
        memcpy(out, text, bytes);
        return (int64_t)bytes;
    }
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

// ---- the vocabulary ----

// Sets size to the highest id of `vocab` and `added` + 1 and allocates the tables. Refuses ids out of range or sparse.
static const char *allocate_tokens(struct tokenizer_reader *r, json_t *vocab, const json_t *added) {
    struct tokenizer_tables *t = r->tables;
    const size_t count = json_object_size(vocab), added_count = json_array_size(added);
    size_t bytes = 1;
    int32_t highest = -1, id = 0;
    const char *problem = NULL;
    for (void *i = json_object_iter(vocab); i && !problem; i = json_object_iter_next(vocab, i)) {
        problem = reader_id(r, json_object_iter_value(i), json_object_iter_key(i), &id);
        bytes += strlen(json_object_iter_key(i));
        highest = !problem && id > highest ? id : highest;
    }
    for (size_t i = 0; i < added_count && !problem; i++) {
        const json_t *token = json_array_get(added, i), *content = json_object_get(token, "content");
        if (!json_is_string(content))
            return error_format(r->error, "%s: added token %zu has no content", r->name, i);
        problem = reader_id(r, json_object_get(token, "id"), json_string_value(content), &id);
        bytes += json_string_length(content);
        highest = !problem && id > highest ? id : highest;
    }
    if (problem)
        return problem;
    if (count < 1)
        return error_format(r->error, "%s: model.vocab is empty", r->name);
    if ((size_t)highest + 1 > count + added_count + TOKENIZER_MAX_HOLES)
        return error_format(r->error, "%s: has ids up to %d, but only %zu tokens", r->name, (int)highest,
                            count + added_count);
    r->tokenizer->size = highest + 1;
    uint64_t slots = 2;
    while (slots < 2 * (count + 1))
        slots *= 2;
    t->ids_mask = slots - 1;
    t->tokens = (struct tokenizer_token *)calloc((size_t)r->tokenizer->size, sizeof *t->tokens);
    t->ids_by_text = (uint32_t *)calloc(slots, sizeof *t->ids_by_text);
    t->added = (struct added_token *)calloc(added_count + 1, sizeof *t->added);
    t->text = (unsigned char *)malloc(bytes);
    if (!t->tokens || !t->ids_by_text || !t->added || !t->text || bytes > UINT32_MAX)
        return error_format(r->error, "%s: out of memory for %zu tokens", r->name, count);
    return NULL;
}

// Sets token `id` to a TOKEN_BPE of the bytes that the entry stands for. If it stands for none: a TOKEN_OTHER.
static const char *read_vocabulary_entry(struct tokenizer_reader *r, const char *entry, int32_t id) {
    struct tokenizer_tables *t = r->tables;
    const size_t bytes = strlen(entry);
    unsigned char *text = t->text + t->text_bytes;
    if (bytes == 0)
        return error_format(r->error, "%s: token %d is empty", r->name, (int)id);
    if (t->tokens[id].kind != TOKEN_NONE)
        return error_format(r->error, "%s: two tokens have the id %d, one of them '%.100s'", r->name, (int)id, entry);
    const int64_t count = bytes_of_entry(t, entry, bytes, text);
    if (count < 0) { // an added token may stand in the vocabulary as it is
        tokenizer_put(t, id, entry, bytes, TOKEN_OTHER);
        return NULL;
    }
    *tokenizer_slot(t, text, (size_t)count) = (uint32_t)id + 1;
    const int byte = !t->fallback.on ? (count == 1 ? text[0] : -1) : fallback_byte(entry, bytes, false);
    if (byte >= 0)
        t->byte_token[byte] = id;
    tokenizer_put(t, id, text, (size_t)count, TOKEN_BPE);
    return NULL;
}

// Returns the id of one of a merge's two tokens; -1: none. Appends its bytes to `scratch`, which has *scratch_bytes.
static int32_t read_merge_half(const struct tokenizer_tables *t, const char *half, size_t bytes, unsigned char *scratch,
                               size_t *scratch_bytes) {
    if (bytes < 1 || bytes > 2 * t->longest) // a character of the alphabet has at most two bytes
        return -1;
    const int64_t count = bytes_of_entry(t, half, bytes, scratch + *scratch_bytes);
    const int32_t id = count < 0 ? -1 : tokenizer_id_of_bytes(t, scratch + *scratch_bytes, (size_t)count);
    *scratch_bytes += id < 0 ? 0 : (size_t)count;
    return id;
}

// Adds model.merges[rank], "a b" or ["a", "b"]. a, b and ab must be tokens (TOKEN_BPE). scratch: 3 * longest + 1 bytes.
static const char *read_merge(struct tokenizer_reader *r, const json_t *merge, size_t rank, unsigned char *scratch) {
    const struct tokenizer_tables *t = r->tables;
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
    bpe_add(&r->tables->bpe, (uint32_t)rank, left_id, right_id, id);
    if (t->fallback.on)
        fallback_note_merge(r->tables, id);
    return NULL;
}

// Reads model.merges, ranked by their order, into the tables. The vocabulary is read before.
static const char *read_merges(struct tokenizer_reader *r, const json_t *merges) {
    const size_t count = json_array_size(merges);
    if (!json_is_array(merges) || count > TOKENIZER_MAX_IDS)
        return error_format(r->error, "%s: model.merges is not a list of at most %d pairs", r->name, TOKENIZER_MAX_IDS);
    unsigned char *scratch = (unsigned char *)malloc(3 * r->tables->longest + 1);
    const char *problem = NULL;
    if (!scratch || !bpe_create(&r->tables->bpe, count))
        problem = error_format(r->error, "%s: out of memory for %zu merges", r->name, count);
    r->tables->merges = count;
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

// Reads "model", and makes room for `added`. Ignores unk_token: what has no token becomes bytes, and encoding refuses a
// byte without a token. Refuses a true fuse_unk, but ignores it with byte fallback, where all bytes have a token.
static const char *read_model(struct tokenizer_reader *r, const json_t *model, const json_t *added) {
    json_t *vocab = json_object_get(model, "vocab");
    const json_t *merges = json_object_get(model, "merges");
    const char *type = reader_type(model);
    if (*type ? strcmp(type, "BPE") != 0 : !vocab || !merges) // early files, GPT-2's own among them, have no type
        return reader_refuse_type(r, model, "model", "BPE");
    const char *problem =
        reader_only_members(r, model, "model",
                            " type dropout unk_token continuing_subword_prefix end_of_word_suffix fuse_unk "
                            "byte_fallback ignore_merges vocab merges ");
    problem = problem ? problem : refuse_dropout(r, model);
    problem = problem ? problem : reader_refuse_text(r, model, "model", "continuing_subword_prefix");
    problem = problem ? problem : reader_refuse_text(r, model, "model", "end_of_word_suffix");
    struct tokenizer_fallback *fallback = &r->tables->fallback;
    problem = problem ? problem : reader_flag(r, model, "model", "byte_fallback", &fallback->on);
    fallback->cuts = fallback->on;
    if (!problem && !fallback->on)
        problem = reader_refuse_flag(r, model, "model", "fuse_unk", true);
    problem = problem ? problem : reader_flag(r, model, "model", "ignore_merges", &r->tables->ignore_merges);
    if (!problem && !json_is_object(vocab))
        problem = error_format(r->error, "%s: model.vocab is not an object of token: id", r->name);
    problem = problem ? problem : allocate_tokens(r, vocab, added);
    for (void *i = problem ? NULL : json_object_iter(vocab); i && !problem; i = json_object_iter_next(vocab, i))
        problem =
            read_vocabulary_entry(r, json_object_iter_key(i), (int32_t)json_integer_value(json_object_iter_value(i)));
    if (!problem && fallback->on)
        problem = fallback_check_bytes(r);
    return problem ? problem : read_merges(r, merges);
}

// ---- added tokens ----

// Returns the id that the vocabulary gives the text of an added token; -1 if there is none.
static int32_t id_in_vocabulary(const char *content, const json_t *vocab) {
    const json_t *id = json_object_get(vocab, content);
    return id ? (int32_t)json_integer_value(id) : -1;
}

// Makes added->normal, the token's text with space marks, which is then the text by which the token is found.
static const char *normalize_added(struct tokenizer_reader *r, struct added_token *added) {
    const struct tokenizer_fallback *f = &r->tables->fallback;
    size_t bytes = 0;
    added->normal = mark_spaces(added->text, added->bytes, f->prepends, f->replaces, &bytes);
    if (!added->normal)
        return error_format(r->error, "%s: out of memory for added tokens", r->name);
    added->text = added->normal;
    added->bytes = (uint32_t)bytes;
    return NULL;
}

// Fills entry `number` of the added tokens, which allocate_tokens checked. Vocabulary and normalizer are read before.
// The id's kind becomes TOKEN_ADDED. The id gets the token's text, unless it was a TOKEN_BPE, whose bytes it keeps.
static const char *read_added_token(struct tokenizer_reader *r, const json_t *token, size_t number,
                                    const json_t *vocab) {
    struct tokenizer_tables *t = r->tables;
    struct added_token *added = &t->added[number];
    const char *content = json_string_value(json_object_get(token, "content"));
    const size_t bytes = strlen(content);
    char where[160];
    bool special = false;
    snprintf(where, sizeof where, "added token '%.100s'", content);
    const char *problem =
        reader_only_members(r, token, where, " id content single_word lstrip rstrip normalized special ");
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
    if (before.kind == TOKEN_BPE) { // ids_by_text finds it by the bytes that it has as a TOKEN_BPE
        t->tokens[added->id] = before;
        t->tokens[added->id].kind = TOKEN_ADDED;
    }
    problem = reader_refuse_flag(r, token, where, "single_word", true);
    problem = problem ? problem : reader_flag(r, token, where, "lstrip", &added->lstrip);
    problem = problem ? problem : reader_flag(r, token, where, "rstrip", &added->rstrip);
    problem = problem ? problem : reader_flag(r, token, where, "normalized", &added->normalized);
    const struct tokenizer_fallback *fallback = &t->fallback;
    if (!problem && added->normalized && (fallback->prepends || fallback->replaces))
        problem = normalize_added(r, added);
    return problem ? problem : reader_flag(r, token, where, "special", &special);
}

static bool same_text(const struct added_token *a, const struct added_token *b) {
    return a->bytes == b->bytes && memcmp(a->text, b->text, a->bytes) == 0;
}

// Orders added tokens: those that match raw text first, then by text.
static int compare_added(const void *a, const void *b) {
    const struct added_token *left = (const struct added_token *)a, *right = (const struct added_token *)b;
    if (left->normalized != right->normalized)
        return left->normalized - right->normalized;
    const int order = memcmp(left->text, right->text, left->bytes < right->bytes ? left->bytes : right->bytes);
    return order ? order : (left->bytes > right->bytes) - (left->bytes < right->bytes);
}

// Refuses an added token that NFC changes: the package matches its normalized form, which no known tokenizer needs.
static const char *check_normalized(struct tokenizer_reader *r, const struct added_token *added) {
    size_t bytes = 0;
    unsigned char *text = nfc_normalize(added->text, added->bytes, &bytes);
    const bool same = text && bytes == added->bytes && memcmp(text, added->text, bytes) == 0;
    free(text);
    return same ? NULL
                : error_format(r->error, "%s: added token '%.*s' changes under NFC, which is not supported", r->name,
                               (int)added->bytes, (const char *)added->text);
}

// Fills tables->added from the list (NULL or null: none). The normalizer is read before. Refuses two of the same text.
static const char *read_added_tokens(struct tokenizer_reader *r, const json_t *list, const json_t *vocab) {
    struct tokenizer_tables *t = r->tables;
    const size_t count = json_array_size(list);
    const char *problem = NULL;
    t->added_count = count;
    for (size_t i = 0; i < count && !problem; i++)
        problem = read_added_token(r, json_array_get(list, i), i, vocab);
    if (problem)
        return problem;
    qsort(t->added, count, sizeof *t->added, compare_added);
    for (size_t i = 0; i < count && !problem; i++) {
        const struct added_token *added = &t->added[i];
        t->added_raw += !added->normalized;
        const struct added_token *raw =
            added->normalized ? tokenizer_match_added(t->added, t->added_raw, added->text, added->bytes) : NULL;
        if ((raw && raw->bytes == added->bytes) || (i && same_text(added, &added[-1])))
            problem = error_format(r->error, "%s: added token '%.*s' comes twice", r->name, (int)added->bytes,
                                   (const char *)added->text);
        else if (added->normalized && t->nfc)
            problem = check_normalized(r, added);
    }
    return problem;
}

// ---- normalizer, pre_tokenizer, post_processor, decoder ----

// Sets whether text is normalized. Absent or null means that it is not; otherwise only NFC is known.
static const char *read_normalizer(struct tokenizer_reader *r, const json_t *normalizer) {
    if (!normalizer || json_is_null(normalizer))
        return NULL;
    r->tables->nfc = strcmp(reader_type(normalizer), "NFC") == 0;
    return r->tables->nfc ? reader_only_members(r, normalizer, "normalizer", " type ")
                          : reader_refuse_type(r, normalizer, "normalizer", "null or NFC");
}

// Compiles a split pattern and adds it after the others; more than TOKENIZER_MAX_PATTERNS are an error.
static const char *add_pattern(struct tokenizer_reader *r, const char *regex, size_t bytes) {
    struct tokenizer_tables *t = r->tables;
    if (t->pattern_count == TOKENIZER_MAX_PATTERNS)
        return error_format(r->error, "%s: pre_tokenizer splits more than %d times, which is not supported", r->name,
                            TOKENIZER_MAX_PATTERNS);
    return split_pattern_compile(&t->patterns[t->pattern_count++], regex, bytes, r->name, r->error);
}

// Adds a Split's pattern, a regular expression whose matches stand by themselves; refuses other Splits.
static const char *read_split(struct tokenizer_reader *r, const json_t *split) {
    const json_t *pattern = json_object_get(split, "pattern"), *regex = json_object_get(pattern, "Regex");
    const char *behavior = json_string_value(json_object_get(split, "behavior"));
    const char *problem = reader_only_members(r, split, "Split", " type pattern behavior invert ");
    problem = problem ? problem : reader_only_members(r, pattern, "Split.pattern", " Regex ");
    problem = problem ? problem : reader_refuse_flag(r, split, "Split", "invert", true);
    if (problem)
        return problem;
    if (!json_is_string(regex))
        return error_format(r->error, "%s: Split.pattern.Regex is not text", r->name);
    if (!behavior || strcmp(behavior, "Isolated") != 0)
        return error_format(r->error, "%s: Split.behavior is '%.100s', which is not supported; expected Isolated",
                            r->name, behavior ? behavior : "");
    return add_pattern(r, json_string_value(regex), json_string_length(regex));
}

// Reads a ByteLevel, which by default splits by GPT-2's pattern and puts a space before the text. where: for messages.
static const char *read_byte_level(struct tokenizer_reader *r, const json_t *byte_level, const char *where) {
    static const char gpt2[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
    bool use_regex = true, trim_offsets = true; // trim_offsets does not change ids
    const char *problem = reader_only_members(r, byte_level, where, " type add_prefix_space trim_offsets use_regex ");
    r->tables->add_prefix_space = true; // the package's default
    problem = problem ? problem : reader_flag(r, byte_level, where, "add_prefix_space", &r->tables->add_prefix_space);
    problem = problem ? problem : reader_flag(r, byte_level, where, "trim_offsets", &trim_offsets);
    problem = problem ? problem : reader_flag(r, byte_level, where, "use_regex", &use_regex);
    return problem || !use_regex ? problem : add_pattern(r, gpt2, sizeof gpt2 - 1);
}

// Adds pre_tokenizer's split patterns, in the order in which they apply, and sets add_prefix_space. Refuses null.
static const char *read_pre_tokenizer(struct tokenizer_reader *r, const json_t *pre_tokenizer) {
    static const char expected[] = "ByteLevel, or a Sequence of Splits and a ByteLevel";
    if (strcmp(reader_type(pre_tokenizer), "ByteLevel") == 0)
        return read_byte_level(r, pre_tokenizer, "pre_tokenizer");
    if (strcmp(reader_type(pre_tokenizer), "Sequence") != 0)
        return reader_refuse_type(r, pre_tokenizer, "pre_tokenizer", expected);
    const json_t *parts;
    const char *problem = reader_sequence(r, pre_tokenizer, "pre_tokenizer", "pretokenizers", &parts);
    const size_t count = json_array_size(parts);
    if (!problem && count == 0)
        problem = error_format(r->error, "%s: pre_tokenizer is an empty Sequence; expected %s", r->name, expected);
    for (size_t i = 0; i < count && !problem; i++) {
        const json_t *part = json_array_get(parts, i);
        const bool last = i + 1 == count;
        if (strcmp(reader_type(part), last ? "ByteLevel" : "Split") != 0)
            problem = reader_refuse_type(r, part, "a part of pre_tokenizer", expected);
        else
            problem = last ? read_byte_level(r, part, "ByteLevel") : read_split(r, part);
    }
    if (!problem && r->tables->add_prefix_space && count > 1) // every piece would get a space
        problem = error_format(r->error, "%s: ByteLevel.add_prefix_space after a Split is not supported", r->name);
    return problem;
}

// Appends the ids that `special`, special_tokens, has for `token` to `ids` (*count, at most TOKENIZER_MAX_TEMPLATE).
static const char *read_template_token(struct tokenizer_reader *r, const json_t *token, const json_t *special,
                                       int32_t *ids, int *count) {
    const char *name = json_string_value(json_object_get(token, "id"));
    const json_t *list = json_object_get(name ? json_object_get(special, name) : NULL, "ids");
    if (json_array_size(list) == 0)
        return error_format(r->error, "%s: the template's token '%.100s' has no ids", r->name, name ? name : "");
    for (size_t i = 0; i < json_array_size(list); i++) {
        int32_t id = -1;
        const char *problem = reader_id(r, json_array_get(list, i), name, &id);
        if (problem)
            return problem;
        if (id >= r->tokenizer->size || r->tables->tokens[id].kind == TOKEN_NONE)
            return error_format(r->error, "%s: the template's token '%.100s' has the id %d, which no token has",
                                r->name, name, (int)id);
        if (*count == TOKENIZER_MAX_TEMPLATE)
            return error_format(r->error, "%s: the template adds more than %d tokens, which is not supported", r->name,
                                TOKENIZER_MAX_TEMPLATE);
        ids[(*count)++] = id;
    }
    return NULL;
}

// Sets the template's tokens before and after the text, from "single". Ignores "pair": two texts are never encoded.
static const char *read_template(struct tokenizer_reader *r, const json_t *processor) {
    struct tokenizer_tables *t = r->tables;
    const json_t *single = json_object_get(processor, "single"),
                 *special = json_object_get(processor, "special_tokens");
    const char *problem = reader_only_members(r, processor, "TemplateProcessing", " type single pair special_tokens ");
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

// Reads one part of post_processor: a template, or a ByteLevel, which changes no ids.
static const char *read_processor(struct tokenizer_reader *r, const json_t *processor) {
    if (strcmp(reader_type(processor), "ByteLevel") == 0) // changes only offsets
        return reader_only_members(r, processor, "post_processor", " type add_prefix_space trim_offsets use_regex ");
    if (strcmp(reader_type(processor), "TemplateProcessing") == 0)
        return read_template(r, processor);
    return reader_refuse_type(r, processor, "post_processor", "ByteLevel, TemplateProcessing, or a Sequence of them");
}

static const char *read_post_processor(struct tokenizer_reader *r, const json_t *processor) {
    if (!processor || json_is_null(processor))
        return NULL;
    if (strcmp(reader_type(processor), "Sequence") != 0)
        return read_processor(r, processor);
    const json_t *parts;
    const char *problem = reader_sequence(r, processor, "post_processor", "processors", &parts);
    for (size_t i = 0; i < json_array_size(parts) && !problem; i++)
        problem = read_processor(r, json_array_get(parts, i));
    return problem;
}

// Checks that the decoder is a ByteLevel: with another, a token would not have the bytes that the tables have.
static const char *read_decoder(struct tokenizer_reader *r, const json_t *decoder) {
    if (strcmp(reader_type(decoder), "ByteLevel") != 0)
        return reader_refuse_type(r, decoder, "decoder", "ByteLevel");
    return reader_only_members(r, decoder, "decoder", " type add_prefix_space trim_offsets use_regex ");
}

// ---- the file ----

// Fills the tokenizer from the file's object. end_of_text is a usual one, else -1; the files beside may say otherwise.
static const char *read_tokenizer(struct tokenizer_reader *r, const json_t *root) {
    const json_t *model = json_object_get(root, "model"), *added = json_object_get(root, "added_tokens");
    const char *problem = reader_only_members(r, root, "the file",
                                              " version truncation padding added_tokens normalizer pre_tokenizer "
                                              "post_processor decoder model ");
    const char *version = json_string_value(json_object_get(root, "version"));
    if (!problem && version && strcmp(version, "1.0") != 0)
        problem = error_format(r->error, "%s: has version %.100s; expected 1.0", r->name, version);
    if (!problem && added && !json_is_null(added) && !json_is_array(added))
        problem = error_format(r->error, "%s: added_tokens is not a list", r->name);
    problem = problem ? problem : read_model(r, model, added);
    static const char *const ends[] = {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"}; // as prepare_data.py's
    const bool fallback = r->tables->fallback.on;
    const json_t *normalizer = json_object_get(root, "normalizer");
    const json_t *pre_tokenizer = json_object_get(root, "pre_tokenizer"), *decoder = json_object_get(root, "decoder");
    if (!problem)
        problem = fallback ? fallback_read_normalizer(r, normalizer) : read_normalizer(r, normalizer);
    problem = problem ? problem : read_added_tokens(r, added, json_object_get(model, "vocab"));
    if (!problem)
        problem = fallback ? fallback_read_pre_tokenizer(r, pre_tokenizer) : read_pre_tokenizer(r, pre_tokenizer);
    problem = problem ? problem : read_post_processor(r, json_object_get(root, "post_processor"));
    if (!problem)
        problem = fallback ? fallback_read_decoder(r, decoder) : read_decoder(r, decoder);
    if (problem)
        return problem;
    for (size_t i = 0; i < sizeof ends / sizeof *ends && r->tokenizer->end_of_text < 0; i++)
        r->tokenizer->end_of_text = tokenizer_id(r->tables, ends[i]);
    return NULL;
}

// Parses a file's JSON. Returns it, for the caller to release, and *problem NULL; or NULL, and the problem in *problem.
static json_t *tokenizer_json(const unsigned char *data, size_t bytes, const char *name, struct error_text *error,
                              const char **problem) {
    json_error_t json_error;
    json_t *root = json_loadb((const char *)data, bytes, JSON_REJECT_DUPLICATES, &json_error);
    *problem = root ? NULL
                    : error_format(error, "%s: line %d, column %d: %s; expected JSON of Hugging Face", name,
                                   json_error.line, json_error.column, json_error.text);
    return root;
}

const char *tokenizer_parse(struct tokenizer *tokenizer, const unsigned char *data, size_t bytes, const char *name,
                            struct error_text *error) {
    if (!tokenizer_begin(tokenizer))
        return error_format(error, "%s: out of memory for a tokenizer", name);
    const char *problem;
    json_t *root = tokenizer_json(data, bytes, name, error, &problem);
    if (root) {
        struct tokenizer_reader reader = {tokenizer, tokenizer->tables, name, error};
        problem = read_tokenizer(&reader, root);
        json_decref(root);
    }
    if (problem)
        tokenizer_free(tokenizer);
    return problem;
}

// Returns the text of the special token `key` of `root`: a string, or an object's content. NULL: none, or malformed.
static const char *special_token_text(const json_t *root, const char *key) {
    const json_t *token = json_object_get(root, key), *content = json_object_get(token, "content");
    return json_string_value(content ? content : token);
}
const char *tokenizer_parse_special(struct tokenizer *tokenizer, const unsigned char *data, size_t bytes,
                                    const char *name, struct error_text *error) {
    const char *problem;
    json_t *root = tokenizer_json(data, bytes, name, error, &problem);
    if (!root)
        return problem;
    const json_t *token = json_object_get(root, "eos_token");
    const char *text = special_token_text(root, "eos_token"), *begin = special_token_text(root, "bos_token");
    const int32_t id = text ? tokenizer_id(tokenizer->tables, text) : -1;
    if (!json_is_object(root) || (token && !json_is_null(token) && !text))
        problem = error_format(error, "%s: eos_token is not the text of a token", name);
    else if (text && id < 0)
        problem = error_format(error, "%s: names '%.100s' as eos_token, which the tokenizer does not have", name, text);
    else if (text)
        tokenizer->end_of_text = id;
    if (begin && tokenizer_id(tokenizer->tables, begin) >= 0)
        tokenizer->begin_of_text = tokenizer_id(tokenizer->tables, begin);
    json_decref(root);
    return problem;
}
