#include "formats/tokenizer.h"

#include <stdlib.h> // malloc, realloc, free
#include <string.h> // memcpy, memset

#include "formats/nfc.h"              // nfc_normalize
#include "formats/piece_cache.h"      // piece_cache_find
#include "formats/tokenizer_tables.h" // struct tokenizer_tables
#include "runtime/text/utf8.h"        // utf8_decode

enum { TOKENIZER_LONGEST_TEXT = 1 << 30 }; // bytes, since indices in a piece are 32 bits

// The state of an encoding. Each stage passes what it does not encode itself to the next: encode_text, encode_added
// (raw text), encode_any, encode_well_formed, encode_normal, encode_added (normalized text), encode_plain,
// encode_split, encode_piece. With byte fallback: encode_text, encode_added (raw text), encode_fallback, encode_added
// (normalized text), encode_marked, encode_word, encode_characters. The functions are defined in the opposite order.
struct tokenizer_work {
    const struct tokenizer_tables *tables;
    struct error_text *error;
    const unsigned char *raw, *normal; // where the whole text begins, and the present stretch of normalized text
    bool first;                        // the present stretch is the text's beginning
    bool rest;                         // ENCODE_AS_REST
    struct piece_cache *cache;         // NULL: none
    struct bpe_work bpe;
    struct split_search *search;
    int32_t *ids; // owned
    size_t count, room;
};

static const char *work_out_of_memory(struct tokenizer_work *work, size_t text_bytes) {
    return error_format(work->error, "out of memory for the tokens of %zu bytes of text", text_bytes);
}

static const char *work_reserve(struct tokenizer_work *work, size_t more) {
    if (more <= work->room - work->count)
        return NULL;
    const size_t room = work->count + more > 2 * work->room ? work->count + more : 2 * work->room;
    int32_t *ids = (int32_t *)realloc(work->ids, room * sizeof *ids);
    if (!ids)
        return error_format(work->error, "out of memory for %zu more tokens", more);
    work->ids = ids;
    work->room = room;
    return NULL;
}
static const char *work_append(struct tokenizer_work *work, const int32_t *ids, size_t count) {
    const char *problem = work_reserve(work, count);
    if (!problem && count) {
        memcpy(work->ids + work->count, ids, count * sizeof *ids);
        work->count += count;
    }
    return problem;
}

// Encodes any bytes as their byte tokens; a byte without a token is an error.
static const char *encode_bytes(struct tokenizer_work *work, const unsigned char *text, size_t bytes) {
    const char *problem = work_reserve(work, bytes);
    if (problem)
        return problem;
    for (size_t i = 0; i < bytes; i++) {
        const int32_t id = work->tables->byte_token[text[i]];
        if (id < 0)
            return error_format(work->error, "the tokenizer has no token for the byte 0x%02x of the text", text[i]);
        work->ids[work->count + i] = id;
    }
    work->count += bytes;
    return NULL;
}

// Encodes a piece that is split no further: as one token if ignore_merges is set and it is one, else its bytes, merged.
static const char *encode_piece(struct tokenizer_work *work, const unsigned char *text, size_t bytes) {
    const struct tokenizer_tables *t = work->tables;
    const int32_t whole = t->ignore_merges ? tokenizer_id_of_bytes(t, text, bytes) : -1;
    if (whole >= 0)
        return work_append(work, &whole, 1);
    if (t->merges == 0)
        return encode_bytes(work, text, bytes);
    size_t known_count;
    const int32_t *known = work->cache ? piece_cache_find(work->cache, text, bytes, &known_count) : NULL;
    if (known)
        return work_append(work, known, known_count);
    if (!bpe_work_reserve(&work->bpe, bytes))
        return work_out_of_memory(work, bytes);
    const char *problem = encode_bytes(work, text, bytes);
    if (problem)
        return problem;
    work->count -= bytes;
    int32_t *ids = work->ids + work->count;
    const size_t count = bpe_encode(&t->bpe, &work->bpe, bytes, ids);
    work->count += count;
    if (work->cache)
        piece_cache_put(work->cache, text, bytes, ids, count);
    return NULL;
}

// Splits text into matches of pattern `pattern` and what lies between. Each goes on to the next one, or to
// encode_piece.
static const char *encode_split(struct tokenizer_work *work, const unsigned char *text, size_t bytes, int pattern) {
    if (bytes == 0)
        return NULL;
    if (pattern == work->tables->pattern_count)
        return encode_piece(work, text, bytes);
    size_t done = 0;
    for (size_t from = 0; from < bytes;) {
        size_t begin, end;
        const int found =
            split_pattern_find(work->tables->patterns[pattern], work->search, text, bytes, from, &begin, &end);
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
            ; // after an empty match the search goes on from the next character
    }
    return encode_split(work, text + done, bytes - done, pattern + 1);
}

// Encodes normalized text, no added tokens. add_prefix_space ensures a first space, except where ENCODE_AS_REST begins.
static const char *encode_plain(struct tokenizer_work *work, const unsigned char *text, size_t bytes) {
    const bool goes_on = work->rest && work->first && text == work->normal;
    if (!work->tables->add_prefix_space || goes_on || bytes == 0 || text[0] == ' ')
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

// Returns where the white space that ends at byte `end` begins, at `least` or later.
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
// Returns where the white space that begins at byte `begin` ends.
static size_t spaces_after(const unsigned char *text, size_t begin, size_t bytes) {
    uint32_t code;
    for (int length; begin < bytes; begin += (size_t)length) {
        length = utf8_decode(text + begin, bytes - begin, &code);
        if (length == 0 || !unicode_is_space(code))
            break;
    }
    return begin;
}

typedef const char *encode_function(struct tokenizer_work *work, const unsigned char *text, size_t bytes);

// Encodes the added tokens of `list`, sorted by text, and drops white space that they strip. `rest` encodes all else.
static const char *encode_added(struct tokenizer_work *work, const struct added_token *list, size_t count,
                                const unsigned char *text, size_t bytes, encode_function *rest) {
    size_t done = 0, stripped = 0; // stripped: where the white space after the last token with rstrip ends
    const char *problem = NULL;
    bool first[256] = {false};
    for (size_t i = 0; i < count; i++)
        first[list[i].text[0]] = true;
    for (size_t i = 0; i < bytes && !problem;) {
        const struct added_token *added =
            first[text[i]] ? tokenizer_match_added(list, count, text + i, bytes - i) : NULL;
        if (!added) {
            i++;
            continue;
        }
        const size_t begin = added->lstrip ? spaces_before(text, done < i ? done : i, i) : i;
        i += added->bytes;
        if (done < begin)
            problem = rest(work, text + done, begin - done);
        problem = problem ? problem : work_append(work, &added->id, 1);
        // Tokens of white space match within what the last one strips: it is not searched again, for each of them.
        if (added->rstrip && stripped < i)
            stripped = spaces_after(text, i, bytes);
        const size_t end = added->rstrip ? stripped : i;
        done = end > done ? end : done;
    }
    return problem || done == bytes ? problem : rest(work, text + done, bytes - done);
}

// Encodes well-formed, normalized text, with the added tokens that match normalized text.
static const char *encode_normal(struct tokenizer_work *work, const unsigned char *text, size_t bytes) {
    const struct tokenizer_tables *t = work->tables;
    work->normal = text;
    return encode_added(work, t->added + t->added_raw, t->added_count - t->added_raw, text, bytes, encode_plain);
}

// Encodes well-formed text that has none of the added tokens of raw text. Composes it first if tables->nfc is set.
static const char *encode_well_formed(struct tokenizer_work *work, const unsigned char *text, size_t bytes) {
    work->first = text == work->raw;
    if (!work->tables->nfc || !nfc_may_change(text, bytes))
        return encode_normal(work, text, bytes);
    size_t normal_bytes;
    unsigned char *normal = nfc_normalize(text, bytes, &normal_bytes);
    const char *problem = normal ? encode_normal(work, normal, normal_bytes) : work_out_of_memory(work, bytes);
    free(normal);
    return problem;
}

// Encodes bytes that have none of the added tokens of raw text. Malformed bytes among them become byte tokens.
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

// Encodes text whose ends no merge crosses: merges its characters' tokens, or byte tokens where a character has none.
static const char *encode_characters(struct tokenizer_work *work, const unsigned char *text, size_t bytes) {
    const struct tokenizer_tables *t = work->tables;
    size_t count = 0;
    const int32_t *known = work->cache ? piece_cache_find(work->cache, text, bytes, &count) : NULL;
    if (known)
        return work_append(work, known, count);
    const char *problem = work_reserve(work, bytes);
    if (problem)
        return problem;
    int32_t *ids = work->ids + work->count;
    count = 0;
    for (size_t i = 0; i < bytes;) {
        uint32_t code;
        int length = utf8_decode(text + i, bytes - i, &code);
        const int32_t id = length ? tokenizer_id_of_bytes(t, text + i, (size_t)length) : -1;
        length = length ? length : 1;
        if (id >= 0)
            ids[count++] = id;
        for (int k = 0; k < length && id < 0; k++)
            ids[count++] = t->byte_token[text[i + (size_t)k]];
        i += (size_t)length;
    }
    if (!bpe_work_reserve(&work->bpe, count))
        return work_out_of_memory(work, bytes);
    count = bpe_encode(&t->bpe, &work->bpe, count, ids);
    work->count += count;
    if (work->cache)
        piece_cache_put(work->cache, text, bytes, ids, count);
    return NULL;
}

// Encodes a pre-tokenizer's piece. To save memory, cuts it before marks (U+2581) if no merge joins one to earlier text.
static const char *encode_word(struct tokenizer_work *work, const unsigned char *text, size_t bytes) {
    const struct tokenizer_tables *t = work->tables;
    const int32_t whole = t->ignore_merges ? tokenizer_id_of_bytes(t, text, bytes) : -1;
    if (whole >= 0)
        return work_append(work, &whole, 1);
    if (!t->fallback.cuts)
        return encode_characters(work, text, bytes);
    const char *problem = NULL;
    for (size_t begin = 0, end = 0; begin < bytes && !problem; begin = end) {
        while (is_space_mark(text + end, bytes - end))
            end += SPACE_MARK_BYTES;
        while (end < bytes && !is_space_mark(text + end, bytes - end))
            end++;
        problem = encode_characters(work, text + begin, end - begin);
    }
    return problem;
}

// Encodes text in which marks (U+2581) stand for spaces. With Metaspace.split, first splits it before each mark.
static const char *encode_words(struct tokenizer_work *work, const unsigned char *text, size_t bytes) {
    const struct tokenizer_fallback *f = &work->tables->fallback;
    if (!f->metaspace || !f->splits)
        return encode_word(work, text, bytes);
    const char *problem = NULL;
    for (size_t begin = 0, end = 0; begin < bytes && !problem; begin = end) {
        for (end = begin + 1; end < bytes && !is_space_mark(text + end, bytes - end);)
            end++;
        problem = encode_word(work, text + begin, end - begin);
    }
    return problem;
}

// Encodes normalized text without added tokens. A Metaspace, if there is one, first puts marks in the place of spaces.
static const char *encode_marked(struct tokenizer_work *work, const unsigned char *text, size_t bytes) {
    const struct tokenizer_fallback *f = &work->tables->fallback;
    if (!f->metaspace)
        return encode_words(work, text, bytes);
    const bool first = work->first && text == work->normal, has = text[0] == ' ' || is_space_mark(text, bytes);
    const bool wanted = f->prefix == METASPACE_ALWAYS || (f->prefix == METASPACE_FIRST && first);
    unsigned char *marked = mark_spaces(text, bytes, wanted && !has && !(first && work->rest), true, &bytes);
    const char *problem = marked ? encode_words(work, marked, bytes) : work_out_of_memory(work, bytes);
    free(marked);
    return problem;
}

// Encodes any bytes between added tokens of raw text. Marks spaces by the normalizer, then finds other added tokens.
static const char *encode_fallback(struct tokenizer_work *work, const unsigned char *text, size_t bytes) {
    const struct tokenizer_tables *t = work->tables;
    const struct added_token *list = t->added + t->added_raw;
    const bool prefix = t->fallback.prepends && !(work->rest && text == work->raw);
    unsigned char *normal = NULL;
    work->first = text == work->raw;
    if (prefix || t->fallback.replaces) {
        normal = mark_spaces(text, bytes, prefix, t->fallback.replaces, &bytes);
        if (!normal)
            return work_out_of_memory(work, bytes);
        text = normal;
    }
    work->normal = text;
    const char *problem = encode_added(work, list, t->added_count - t->added_raw, text, bytes, encode_marked);
    free(normal);
    return problem;
}

// Encodes a whole text. With add_special_tokens, puts the template's tokens before and after it.
static const char *encode_text(struct tokenizer_work *work, const unsigned char *text, size_t bytes,
                               bool add_special_tokens) {
    const struct tokenizer_tables *t = work->tables;
    const char *problem = work_reserve(work, 1 + bytes / 4); // not NULL even for an empty text
    if (!problem && add_special_tokens)
        problem = work_append(work, t->before, (size_t)t->before_count);
    encode_function *rest = !t->ids_by_text ? encode_bytes : t->fallback.on ? encode_fallback : encode_any;
    problem = problem ? problem : encode_added(work, t->added, t->added_raw, text, bytes, rest);
    if (!problem && add_special_tokens)
        problem = work_append(work, t->after, (size_t)t->after_count);
    return problem;
}

const char *tokenizer_encode(const struct tokenizer *tokenizer, const void *text, size_t bytes, enum encode_as as,
                             int32_t **ids, int64_t *count, struct error_text *error) {
    return tokenizer_encode_cached(tokenizer, NULL, text, bytes, as, ids, count, error);
}

const char *tokenizer_encode_cached(const struct tokenizer *tokenizer, struct piece_cache *cache, const void *text,
                                    size_t bytes, enum encode_as as, int32_t **ids, int64_t *count,
                                    struct error_text *error) {
    struct tokenizer_work work;
    memset(&work, 0, sizeof work);
    work.cache = cache;
    work.tables = tokenizer->tables;
    work.error = error;
    work.raw = (const unsigned char *)text;
    work.rest = as == ENCODE_AS_REST;
    *ids = NULL;
    *count = 0;
    if (bytes > TOKENIZER_LONGEST_TEXT)
        return error_format(error, "a text of %zu bytes is too long to encode; expected at most %d", bytes,
                            TOKENIZER_LONGEST_TEXT);
    work.search = split_search_create(bytes);
    const char *problem =
        work.search ? encode_text(&work, work.raw, bytes, as == ENCODE_IN_TEMPLATE) : work_out_of_memory(&work, bytes);
    split_search_free(work.search);
    bpe_work_free(&work.bpe);
    if (problem) {
        free(work.ids);
        return problem;
    }
    *ids = work.ids;
    *count = (int64_t)work.count;
    return NULL;
}
