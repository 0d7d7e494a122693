#include "formats/tokenizer_digest.h"

#include <jansson.h> // json_loadb
#include <stdio.h>   // open_memstream
#include <stdlib.h>  // malloc, qsort
#include <string.h>  // memcpy, strcmp, strchr

#include "runtime/files/file_read.h" // read_whole, load_u32
#include "runtime/net/sha256.h"      // sha256

bool tokenizer_digest_known(const struct tokenizer_digest *digest) {
    static const unsigned char none[TOKENIZER_DIGEST_HALF];
    return memcmp(digest->text, none, sizeof none) != 0;
}

void tokenizer_digest_of_header(struct tokenizer_digest *digest, uint32_t *vocabulary, const unsigned char *header) {
    enum { DIGEST_BYTE = 4 * 24, VOCABULARY_BYTE = 4 * 32 };
    memcpy(digest->text, header + DIGEST_BYTE, TOKENIZER_DIGEST_HALF);
    memcpy(digest->added, header + DIGEST_BYTE + TOKENIZER_DIGEST_HALF, TOKENIZER_DIGEST_HALF);
    *vocabulary = load_u32(header + VOCABULARY_BYTE);
}

static void put_u32(FILE *out, uint32_t value) {
    for (int i = 0; i < 4; i++)
        fputc((int)(value >> 8 * i & 255), out);
}
static void put_u64(FILE *out, uint64_t value) {
    put_u32(out, (uint32_t)value);
    put_u32(out, (uint32_t)(value >> 32));
}
static void put_text(FILE *out, const char *text, size_t bytes) {
    put_u32(out, (uint32_t)bytes);
    fwrite(text, 1, bytes, out);
}

// Whether a value counts as absent: null, false, 0, or an empty text, list or object.
static bool counts_as_absent(const json_t *value) {
    return json_is_null(value) || json_is_false(value) || (json_is_string(value) && json_string_length(value) == 0) ||
           (json_is_number(value) && json_number_value(value) == 0) ||
           (json_is_array(value) && json_array_size(value) == 0) ||
           (json_is_object(value) && json_object_size(value) == 0);
}

static int compare_names(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static bool put_value(FILE *out, const json_t *value);
// Appends an object, its members in the order of their names, without those that say nothing. False when out of memory.
static bool put_object(FILE *out, const json_t *object) {
    const char **names = (const char **)malloc((json_object_size(object) + 1) * sizeof *names);
    uint32_t count = 0;
    bool room = names != NULL;
    for (void *i = json_object_iter((json_t *)object); i && room; i = json_object_iter_next((json_t *)object, i))
        if (!counts_as_absent(json_object_iter_value(i)))
            names[count++] = json_object_iter_key(i);
    if (room)
        qsort(names, count, sizeof *names, compare_names);
    fputc('{', out);
    put_u32(out, count);
    for (uint32_t i = 0; i < count && room; i++) {
        fputc('s', out);
        put_text(out, names[i], strlen(names[i]));
        room = put_value(out, json_object_get(object, names[i]));
    }
    free(names);
    return room;
}
// Appends a value, an object as put_object does, NULL as null. jansson has bounded the depth. False when out of memory.
static bool put_value(FILE *out, const json_t *value) {
    bool room = true;
    switch (value ? json_typeof(value) : JSON_NULL) {
    case JSON_OBJECT: return put_object(out, value);
    case JSON_ARRAY:
        fputc('[', out);
        put_u32(out, (uint32_t)json_array_size(value));
        for (size_t i = 0; i < json_array_size(value) && room; i++)
            room = put_value(out, json_array_get(value, i));
        return room;
    case JSON_STRING:
        fputc('s', out);
        put_text(out, json_string_value(value), json_string_length(value));
        return true;
    case JSON_INTEGER:
        fputc('i', out);
        put_u64(out, (uint64_t)json_integer_value(value));
        return true;
    case JSON_REAL: {
        const double number = json_real_value(value);
        uint64_t bits;
        memcpy(&bits, &number, sizeof bits);
        fputc('d', out);
        put_u64(out, bits);
        return true;
    }
    case JSON_TRUE: fputc('t', out); return true;
    case JSON_FALSE: fputc('f', out); return true;
    case JSON_NULL: fputc('n', out); return true;
    }
    return true;
}

// Adds the member `name` if there is none: the text, or true where `text` is NULL.
static void set_if_absent(json_t *object, const char *name, const char *text) {
    if (!json_object_get(object, name))
        json_object_set_new(object, name, text ? json_string(text) : json_true());
}
// Brings the components in a value, at any depth, to one form, in place: older files lack or rename some members.
static void normalize_components(json_t *value) {
    const char *type = json_string_value(json_object_get(value, "type")), *name;
    json_t *member;
    size_t i;
    if (type && strcmp(type, "ByteLevel") == 0) {
        set_if_absent(value, "add_prefix_space", NULL);
        set_if_absent(value, "use_regex", NULL);
        json_object_del(value, "trim_offsets"); // of places in the text
    }
    if (type && strcmp(type, "Metaspace") == 0) {
        const bool never = json_is_false(json_object_get(value, "add_prefix_space"));
        if (never) // whatever scheme it has
            json_object_set_new(value, "prepend_scheme", json_string("never"));
        set_if_absent(value, "prepend_scheme", "always");
        set_if_absent(value, "split", NULL);
        json_object_del(value, "add_prefix_space");
        json_object_del(value, "str_rep");
    }
    if (json_is_object(value))
        json_object_foreach (value, name, member)
            normalize_components(member);
    if (json_is_array(value))
        json_array_foreach (value, i, member)
            normalize_components(member);
}

struct digest_token {
    int64_t id;
    const char *text;
    size_t bytes; // of the text, which may hold zeros
    unsigned char flags;
};
static int compare_tokens(const void *a, const void *b) {
    const struct digest_token *left = (const struct digest_token *)a, *right = (const struct digest_token *)b;
    if (left->id != right->id)
        return left->id < right->id ? -1 : 1;
    const int order = memcmp(left->text, right->text, left->bytes < right->bytes ? left->bytes : right->bytes);
    return order ? order : (left->bytes > right->bytes) - (left->bytes < right->bytes);
}
// Sorts tokens by id and appends id and text of each, with `flags` its flags too.
static void put_tokens(FILE *out, struct digest_token *tokens, size_t count, bool flags) {
    qsort(tokens, count, sizeof *tokens, compare_tokens);
    for (size_t i = 0; i < count; i++) {
        put_u32(out, (uint32_t)tokens[i].id);
        put_text(out, tokens[i].text, tokens[i].bytes);
        if (flags)
            fputc(tokens[i].flags, out);
    }
}

// Appends the tokens of `vocab` that `added` lacks. If `vocab` is no object, appends it as a value. False: no memory.
static bool put_vocabulary(FILE *out, json_t *vocab, const json_t *added) {
    if (!json_is_object(vocab))
        return put_value(out, vocab);
    struct digest_token *tokens = (struct digest_token *)calloc(json_object_size(vocab) + 1, sizeof *tokens);
    size_t count = 0;
    const char *text;
    json_t *id;
    if (!tokens)
        return false;
    json_object_foreach (vocab, text, id)
        if (!json_object_get(added, text)) {
            tokens[count].id = json_integer_value(id);
            tokens[count].text = text;
            tokens[count++].bytes = strlen(text); // jansson refuses zeros in names
        }
    put_tokens(out, tokens, count, false);
    free(tokens);
    return true;
}

// Appends the id of the token `text` (bytes; NULL: none); 0xffffffff where `vocab` lacks it, or when out of memory.
static void put_id(FILE *out, const json_t *vocab, const char *text, size_t bytes) {
    char *copy = strndup(text ? text : "", text ? bytes : 0);
    const json_t *id = copy ? json_object_get(vocab, copy) : NULL;
    put_u32(out, json_is_integer(id) ? (uint32_t)json_integer_value(id) : UINT32_MAX);
    free(copy);
}
// Appends merges, each "a b" or ["a", "b"], as pairs of ids.
static void put_merges(FILE *out, const json_t *merges, const json_t *vocab) {
    for (size_t i = 0; i < json_array_size(merges); i++) {
        const json_t *merge = json_array_get(merges, i);
        const char *left = json_string_value(merge), *space = left ? strchr(left, ' ') : NULL;
        const char *right = space ? space + 1 : NULL;
        if (!left) {
            left = json_string_value(json_array_get(merge, 0));
            right = json_string_value(json_array_get(merge, 1));
        }
        put_id(out, vocab, left, space ? (size_t)(space - left) : left ? strlen(left) : 0);
        put_id(out, vocab, right, right ? strlen(right) : 0);
    }
}

// Appends the added tokens. Adds to `names` their texts, but none with a zero: no vocabulary has one. False: no memory.
static bool put_added(FILE *out, const json_t *list, json_t *names) {
    static const char *const flags[] = {"single_word", "lstrip", "rstrip", "normalized"};
    const size_t count = json_array_size(list);
    struct digest_token *tokens = (struct digest_token *)calloc(count + 1, sizeof *tokens);
    if (!tokens || !names)
        return free(tokens), false;
    for (size_t i = 0; i < count; i++) {
        const json_t *token = json_array_get(list, i);
        const json_t *content = json_object_get(token, "content");
        tokens[i].id = json_integer_value(json_object_get(token, "id"));
        tokens[i].text = json_is_string(content) ? json_string_value(content) : "";
        tokens[i].bytes = json_string_length(content);
        for (int k = 0; k < 4; k++)
            tokens[i].flags |= (unsigned char)(json_is_true(json_object_get(token, flags[k])) << k);
        if (strlen(tokens[i].text) == tokens[i].bytes)
            json_object_set_new(names, tokens[i].text, json_true());
    }
    put_tokens(out, tokens, count, true);
    free(tokens);
    return true;
}

// Appends what decides the ids of text that has none of the added tokens, `names`. Changes *root. False: no memory.
static bool put_text_part(FILE *out, json_t *root, const json_t *names) {
    json_t *model = json_object_get(root, "model"), *vocab = json_object_get(model, "vocab");
    json_t *merges = json_object_get(model, "merges"), *list = json_array();
    json_incref(vocab);
    json_incref(merges);
    static const char *const unused[] = {"vocab", "merges", "unk_token", "fuse_unk"};
    for (size_t i = 0; i < sizeof unused / sizeof *unused; i++)
        json_object_del(model, unused[i]);
    if (model && merges && !json_is_null(merges))
        set_if_absent(model, "type", "BPE"); // GPT-2's own file has none
    json_array_append(list, model);
    static const char *const parts[] = {"normalizer", "pre_tokenizer"};
    for (int i = 0; i < 2; i++)
        if (json_object_get(root, parts[i]))
            json_array_append(list, json_object_get(root, parts[i]));
        else
            json_array_append_new(list, json_null());
    normalize_components(list);
    const bool room = list && put_value(out, list) && put_vocabulary(out, vocab, names);
    put_merges(out, merges, vocab);
    json_decref(list);
    json_decref(vocab);
    json_decref(merges);
    return room;
}

// hash = the first bytes of SHA-256 of what `out` wrote to *data. Closes `out`; frees *data. False when out of memory.
static bool finish_half_hash(unsigned char hash[TOKENIZER_DIGEST_HALF], FILE *out, char **data, size_t *bytes) {
    unsigned char whole[SHA256_BYTES];
    const bool written = fclose(out) == 0;
    if (written)
        sha256(whole, *data, *bytes);
    if (written)
        memcpy(hash, whole, TOKENIZER_DIGEST_HALF);
    free(*data);
    return written;
}

const char *tokenizer_digest_parse(struct tokenizer_digest *digest, const unsigned char *data, size_t bytes,
                                   const char *name, struct error_text *error) {
    json_error_t json_error;
    memset(digest, 0, sizeof *digest);
    json_t *root = json_loadb((const char *)data, bytes, JSON_ALLOW_NUL, &json_error);
    if (!root)
        return error_format(error, "%s: line %d, column %d: %s; expected JSON of Hugging Face", name, json_error.line,
                            json_error.column, json_error.text);
    json_t *model = json_object_get(root, "model"), *names = json_object();
    if (!json_is_object(model)) {
        json_decref(names);
        json_decref(root);
        return error_format(error, "%s: has no model; expected a tokenizer.json of Hugging Face", name);
    }
    char *half[2] = {NULL, NULL};
    size_t half_bytes[2] = {0, 0};
    FILE *added = open_memstream(&half[0], &half_bytes[0]), *text = open_memstream(&half[1], &half_bytes[1]);
    bool room = added && text && put_added(added, json_object_get(root, "added_tokens"), names) &&
                put_text_part(text, root, names);
    room = (!added || finish_half_hash(digest->added, added, &half[0], &half_bytes[0])) && room;
    room = (!text || finish_half_hash(digest->text, text, &half[1], &half_bytes[1])) && room;
    json_decref(names);
    json_decref(root);
    return room ? NULL : error_format(error, "%s: out of memory for a tokenizer's digest", name);
}

const char *tokenizer_digest_read(struct tokenizer_digest *digest, const char *path, struct error_text *error) {
    enum { MAX_BYTES = 1 << 30 };
    unsigned char *data;
    uint64_t bytes;
    RETURN_PROBLEM(read_whole(&data, &bytes, MAX_BYTES, path, "a tokenizer.json", error));
    const char *problem = tokenizer_digest_parse(digest, data, bytes, path, error);
    free(data);
    return problem;
}
