#include "formats/tokenizer_fallback.h"

#include <stdlib.h> // malloc, calloc, free
#include <string.h> // memcpy, memcmp, strcmp

#include "runtime/text/utf8.h" // utf8_decode

int fallback_byte(const char *entry, size_t bytes, bool any_case) {
    static const char digits[] = "0123456789ABCDEFabcdef";
    if (bytes != 6 || memcmp(entry, "<0x", 3) != 0 || entry[5] != '>')
        return -1;
    int value = 0;
    for (int i = 3; i < 5; i++) {
        const char *digit = entry[i] ? strchr(digits, entry[i]) : NULL;
        const int place = digit ? (int)(digit - digits) : -1;
        if (place < 0 || (place >= 16 && !any_case))
            return -1;
        value = value * 16 + (place < 16 ? place : place - 6);
    }
    return value;
}

const char *fallback_check_bytes(struct tokenizer_reader *r) {
    struct tokenizer_tables *t = r->tables;
    for (int i = 0; i < 256; i++) {
        const unsigned char byte = (unsigned char)i;
        if (t->byte_token[i] < 0 && i < 0x80)
            t->byte_token[i] = tokenizer_id_of_bytes(t, &byte, 1);
        if (t->byte_token[i] < 0)
            return error_format(r->error, "%s: model.byte_fallback is true, but no token is <0x%02X>", r->name, i);
    }
    return NULL;
}

void fallback_note_merge(struct tokenizer_tables *tables, int32_t id) {
    const struct tokenizer_token *token = &tables->tokens[id];
    const unsigned char *text = tables->text + token->offset;
    bool other = false; // whether a character before is no mark
    for (uint32_t i = 0; i < token->bytes; i++) {
        const bool mark = is_space_mark(text + i, token->bytes - i);
        if (mark && other)
            tables->fallback.cuts = false;
        other = other || !mark;
        i += mark ? SPACE_MARK_BYTES - 1 : 0;
    }
}

// Refuses a Replace that replaces anything but `from` by `to`. where: the Replace's name, for messages.
static const char *check_replace(struct tokenizer_reader *r, const json_t *replace, const char *where, const char *from,
                                 const char *to) {
    const json_t *pattern = json_object_get(replace, "pattern");
    char its_pattern[48];
    snprintf(its_pattern, sizeof its_pattern, "%s.pattern", where);
    RETURN_PROBLEM(reader_only_members(r, replace, where, " type pattern content "));
    RETURN_PROBLEM(reader_only_members(r, pattern, its_pattern, " String "));
    RETURN_PROBLEM(reader_expect_text(r, pattern, its_pattern, "String", from));
    return reader_expect_text(r, replace, where, "content", to);
}

static const char *read_normalizer_part(struct tokenizer_reader *r, const json_t *part) {
    struct tokenizer_fallback *f = &r->tables->fallback;
    if (strcmp(reader_type(part), "Replace") == 0) {
        f->replaces = true;
        return check_replace(r, part, "Replace", " ", SPACE_MARK);
    }
    if (strcmp(reader_type(part), "Prepend") != 0)
        return reader_refuse_type(r, part, "a part of normalizer", "Prepend or Replace, beside byte_fallback");
    if (f->prepends)
        return error_format(r->error, "%s: normalizer has two Prepends, which is not supported", r->name);
    f->prepends = true;
    RETURN_PROBLEM(reader_only_members(r, part, "Prepend", " type prepend "));
    return reader_expect_text(r, part, "Prepend", "prepend", SPACE_MARK);
}

const char *fallback_read_normalizer(struct tokenizer_reader *r, const json_t *normalizer) {
    if (!normalizer || json_is_null(normalizer))
        return NULL;
    if (strcmp(reader_type(normalizer), "Sequence") != 0)
        return read_normalizer_part(r, normalizer);
    const json_t *parts;
    RETURN_PROBLEM(reader_sequence(r, normalizer, "normalizer", "normalizers", &parts));
    for (size_t i = 0; i < json_array_size(parts); i++)
        RETURN_PROBLEM(read_normalizer_part(r, json_array_get(parts, i)));
    return NULL;
}

// Sets metaspace, splits and prefix from a Metaspace. Earlier files give add_prefix_space in place of prepend_scheme.
static const char *read_metaspace(struct tokenizer_reader *r, const json_t *metaspace) {
    struct tokenizer_fallback *f = &r->tables->fallback;
    const json_t *member = json_object_get(metaspace, "prepend_scheme");
    const char *scheme = member ? json_string_value(member) : "always";
    bool prefix = true;
    f->metaspace = f->splits = true;
    RETURN_PROBLEM(reader_only_members(r, metaspace, "Metaspace",
                                       " type replacement str_rep add_prefix_space prepend_scheme split "));
    RETURN_PROBLEM(reader_expect_text(r, metaspace, "Metaspace", "replacement", SPACE_MARK));
    RETURN_PROBLEM(reader_flag(r, metaspace, "Metaspace", "split", &f->splits));
    RETURN_PROBLEM(reader_flag(r, metaspace, "Metaspace", "add_prefix_space", &prefix));
    if (scheme && strcmp(scheme, "always") == 0)
        f->prefix = prefix ? METASPACE_ALWAYS : METASPACE_NEVER;
    else if (scheme && strcmp(scheme, "first") == 0 && prefix)
        f->prefix = METASPACE_FIRST;
    else if (scheme && strcmp(scheme, "never") == 0)
        f->prefix = METASPACE_NEVER;
    else
        return error_format(r->error,
                            "%s: Metaspace.prepend_scheme is '%.100s'%s, which is not supported; expected always, "
                            "first or never",
                            r->name, scheme ? scheme : "", prefix ? "" : " without add_prefix_space");
    return NULL;
}

// Reads the pre_tokenizer; the normalizer must have been read before. Takes none (NULL or null), a Metaspace and, if
// the normalizer replaces spaces, a Split at spaces. Refuses all others.
const char *fallback_read_pre_tokenizer(struct tokenizer_reader *r, const json_t *pre_tokenizer) {
    static const char expected[] = "null, Metaspace or a Split at spaces that the normalizer has replaced, beside "
                                   "byte_fallback";
    if (!pre_tokenizer || json_is_null(pre_tokenizer))
        return NULL;
    if (strcmp(reader_type(pre_tokenizer), "Metaspace") == 0)
        return read_metaspace(r, pre_tokenizer);
    if (strcmp(reader_type(pre_tokenizer), "Split") != 0 || !r->tables->fallback.replaces)
        return reader_refuse_type(r, pre_tokenizer, "pre_tokenizer", expected);
    const json_t *pattern = json_object_get(pre_tokenizer, "pattern"); // never matches: no space is left
    RETURN_PROBLEM(reader_only_members(r, pre_tokenizer, "Split", " type pattern behavior invert "));
    RETURN_PROBLEM(reader_only_members(r, pattern, "Split.pattern", " String "));
    RETURN_PROBLEM(reader_expect_text(r, pattern, "Split.pattern", "String", " "));
    return reader_refuse_flag(r, pre_tokenizer, "Split", "invert", true);
}

// Sets strips from a Strip, which leaves out at most one space before the text; refuses others.
static const char *read_strip(struct tokenizer_reader *r, const json_t *strip) {
    const json_t *start = json_object_get(strip, "start"), *stop = json_object_get(strip, "stop");
    RETURN_PROBLEM(reader_only_members(r, strip, "Strip", " type content start stop "));
    RETURN_PROBLEM(reader_expect_text(r, strip, "Strip", "content", " "));
    if (!json_is_integer(start) || !json_is_integer(stop) || json_integer_value(stop) != 0 ||
        json_integer_value(start) < 0 || json_integer_value(start) > 1)
        return error_format(r->error, "%s: Strip.start and Strip.stop are not 0 or 1, and 0", r->name);
    r->tables->fallback.strips = json_integer_value(start) == 1;
    return NULL;
}

// Appends what a token's text (bytes) decodes to, at most `bytes` bytes, to `out`, which has *length bytes and room.
static void decode_token(unsigned char *out, uint32_t *length, const unsigned char *text, uint32_t bytes) {
    const int byte = fallback_byte((const char *)text, bytes, true);
    if (byte >= 0) {
        out[(*length)++] = (unsigned char)byte;
        return;
    }
    for (uint32_t i = 0; i < bytes; i++) {
        const bool mark = is_space_mark(text + i, bytes - i);
        out[(*length)++] = mark ? ' ' : text[i];
        i += mark ? SPACE_MARK_BYTES - 1 : 0;
    }
}
// Sets decoded and decoded_offsets. As in the package, an added token decodes to the text that is searched for. If that
// is its normalized form, the mark that was put in front becomes a space. An unused id has no bytes.
static const char *make_decoded(struct tokenizer_reader *r) {
    struct tokenizer_tables *t = r->tables;
    struct tokenizer_fallback *f = &t->fallback;
    size_t bytes = t->text_bytes + 1;                                                  // no token becomes longer
    uint32_t *normal = (uint32_t *)calloc((size_t)r->tokenizer->size, sizeof *normal); // added tokens + 1 by id
    for (size_t i = 0; i < t->added_count && normal; i++)
        if (t->added[i].normal) {
            normal[t->added[i].id] = (uint32_t)i + 1;
            bytes += t->added[i].bytes;
        }
    f->decoded = (unsigned char *)malloc(bytes);
    f->decoded_offsets = (uint32_t *)malloc(((size_t)r->tokenizer->size + 1) * sizeof *f->decoded_offsets);
    const bool room = normal && f->decoded && f->decoded_offsets;
    uint32_t length = 0;
    for (int32_t id = 0; id < r->tokenizer->size && room; id++) {
        const struct added_token *added = normal[id] ? &t->added[normal[id] - 1] : NULL;
        const struct tokenizer_token *token = &t->tokens[id];
        f->decoded_offsets[id] = length;
        decode_token(f->decoded, &length, added ? added->text : t->text + token->offset,
                     added ? added->bytes : token->bytes);
    }
    if (room)
        f->decoded_offsets[r->tokenizer->size] = length;
    free(normal);
    return room ? NULL : error_format(r->error, "%s: out of memory for %d tokens", r->name, (int)r->tokenizer->size);
}

// Reads the decoder and makes the tables' decoded texts. An absent decoder is an error. All else is read before.
const char *fallback_read_decoder(struct tokenizer_reader *r, const json_t *decoder) {
    static const char *const types[] = {"Replace", "ByteFallback", "Fuse", "Strip"};
    static const char expected[] = "a Sequence of Replace, ByteFallback, Fuse and perhaps Strip, beside byte_fallback";
    const json_t *parts = json_object_get(decoder, "decoders");
    const size_t count = json_array_size(parts);
    if (strcmp(reader_type(decoder), "Sequence") != 0)
        return reader_refuse_type(r, decoder, "decoder", expected);
    RETURN_PROBLEM(reader_only_members(r, decoder, "decoder", " type decoders "));
    if (count < 3 || count > 4)
        return error_format(r->error, "%s: decoder has %zu parts; expected %s", r->name, count, expected);
    for (size_t i = 0; i < count; i++)
        if (strcmp(reader_type(json_array_get(parts, i)), types[i]) != 0)
            return reader_refuse_type(r, json_array_get(parts, i), "a part of decoder", expected);
    RETURN_PROBLEM(check_replace(r, json_array_get(parts, 0), "the decoder's Replace", SPACE_MARK, " "));
    for (size_t i = 1; i < 3; i++)
        RETURN_PROBLEM(reader_only_members(r, json_array_get(parts, i), types[i], " type "));
    if (count == 4)
        RETURN_PROBLEM(read_strip(r, json_array_get(parts, 3)));
    return make_decoded(r);
}
