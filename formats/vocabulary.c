#include "formats/vocabulary.h"

#include <inttypes.h> // PRIu32
#include <stdlib.h>   // malloc, free
#include <string.h>   // memcpy, memcmp, strrchr
#include <unistd.h>   // access

#include "runtime/files/file_read.h" // read_whole
#include "runtime/machine/error.h"   // fail

enum { HEADER_BYTES = 24 };

const char *vocabulary_parse(struct vocabulary *vocabulary, const unsigned char *data, uint64_t data_bytes,
                             const char *name, struct error_text *error) {
    uint32_t header[4]; // version, tokens, end of text, flags
    if (data_bytes < HEADER_BYTES || memcmp(data, "GPTVOCAB", 8) != 0)
        return error_format(error, "%s: is not a vocabulary file; expected one that scripts/prepare_data.py wrote",
                            name);
    memcpy(header, data + 8, sizeof header);
    const uint32_t version = header[0], tokens = header[1], end_of_text = header[2];
    if (version != 1)
        return error_format(error, "%s: has version %" PRIu32 "; expected 1", name, version);
    if (tokens < 1 || tokens > INT32_MAX || (uint64_t)tokens + 1 > (data_bytes - HEADER_BYTES) / 4)
        return error_format(
            error, "%s: promises %" PRIu32 " tokens, but is %" PRIu64 " bytes long; it was cut off: make it again",
            name, tokens, data_bytes);
    if (end_of_text != UINT32_MAX && end_of_text >= tokens)
        return error_format(error, "%s: names token %" PRIu32 " as the end of text, of %" PRIu32 " tokens", name,
                            end_of_text, tokens);

    const unsigned char *offsets = data + HEADER_BYTES;
    const uint64_t text_bytes = data_bytes - HEADER_BYTES - 4 * ((uint64_t)tokens + 1);
    uint32_t previous = 0;
    for (uint64_t i = 0; i <= tokens; i++) {
        uint32_t offset;
        memcpy(&offset, offsets + 4 * i, sizeof offset);
        if ((i == 0 && offset != 0) || offset < previous || offset > text_bytes ||
            (i == tokens && offset != text_bytes))
            return error_format(error,
                                "%s: offset %" PRIu64 " is %" PRIu32 "; expected offsets rising from 0 to %" PRIu64
                                ", the end of the file; it is damaged: make it again",
                                name, i, offset, text_bytes);
        previous = offset;
    }
    vocabulary->size = (int)tokens;
    vocabulary->end_of_text = end_of_text == UINT32_MAX ? -1 : (int)end_of_text;
    vocabulary->strips_space = header[3] & VOCABULARY_STRIPS_SPACE;
    vocabulary->offsets = offsets;
    vocabulary->text = offsets + 4 * ((uint64_t)tokens + 1);
    return NULL;
}

// Builds the vocabulary of bytes, laid out as a file: token i is byte i; of vocab_size 257, token 256 is <|endoftext|>.
static const char *vocabulary_of_bytes(struct vocabulary *vocabulary, int vocab_size, struct error_text *error) {
    static const char mark[] = "<|endoftext|>";
    const uint32_t tokens = (uint32_t)vocab_size, text_bytes = 256 + (tokens > 256 ? (uint32_t)sizeof mark - 1 : 0);
    const uint32_t header[4] = {1, tokens, tokens > 256 ? 256 : UINT32_MAX, 0};
    const size_t data_bytes = HEADER_BYTES + 4 * ((size_t)tokens + 1) + text_bytes;
    unsigned char *data = (unsigned char *)malloc(data_bytes);
    if (!data)
        return error_format(error, "out of memory for a vocabulary of bytes");
    memcpy(data, "GPTVOCAB", 8);
    memcpy(data + 8, header, sizeof header);
    for (uint32_t i = 0; i <= tokens; i++) {
        const uint32_t offset = i <= 256 ? i : text_bytes;
        memcpy(data + HEADER_BYTES + 4 * i, &offset, sizeof offset);
    }
    unsigned char *text = data + HEADER_BYTES + 4 * ((size_t)tokens + 1);
    for (int i = 0; i < 256; i++)
        text[i] = (unsigned char)i;
    memcpy(text + 256, mark, text_bytes - 256);
    vocabulary->data = data;
    return vocabulary_parse(vocabulary, data, data_bytes, "bytes", error);
}

// Reads and parses a vocabulary file. Its bytes become vocabulary->data, even after a problem.
static const char *vocabulary_read(struct vocabulary *vocabulary, const char *path, struct error_text *error) {
    enum { MAX_BYTES = 1 << 30 };
    uint64_t bytes;
    RETURN_PROBLEM(read_whole(&vocabulary->data, &bytes, MAX_BYTES, path,
                              "a vocabulary file that scripts/prepare_data.py wrote", error));
    return vocabulary_parse(vocabulary, vocabulary->data, bytes, path, error);
}

struct vocabulary vocabulary_open(const char *path, int vocab_size) {
    struct vocabulary vocabulary;
    struct error_text error;
    memset(&vocabulary, 0, sizeof vocabulary);
    vocabulary.end_of_text = -1;
    const char *problem = NULL;
    if (path)
        problem = vocabulary_read(&vocabulary, path, &error);
    else if (vocab_size == 256 || vocab_size == 257)
        problem = vocabulary_of_bytes(&vocabulary, vocab_size, &error);
    if (problem)
        fail("%s", problem);
    return vocabulary;
}

void vocabulary_close(struct vocabulary *vocabulary) {
    free(vocabulary->data);
    memset(vocabulary, 0, sizeof *vocabulary);
}

// Puts `ending` in place of what follows a _ of the name, from the last _ to the first, then in place of the name.
bool file_beside_shard(const char *shard_path, const char *ending, char *path, size_t path_bytes) {
    const size_t length = strlen(shard_path), ending_bytes = strlen(ending) + 1;
    const char *slash = strrchr(shard_path, '/');
    const size_t folder = slash ? (size_t)(slash - shard_path) + 1 : 0;
    if (length + ending_bytes > path_bytes)
        return false;
    for (size_t end = length + 1; end-- > folder;) {
        if (end > folder && (end == length || shard_path[end - 1] != '_'))
            continue;
        memcpy(path, shard_path, end);
        memcpy(path + end, ending, ending_bytes);
        if (access(path, R_OK) == 0)
            return true;
    }
    return false;
}

bool vocabulary_find(const char *shard_path, char *path, size_t path_bytes) {
    return file_beside_shard(shard_path, "vocabulary.bin", path, path_bytes);
}

const unsigned char *vocabulary_decode(const struct vocabulary *vocabulary, int32_t token, int *length) {
    uint32_t range[2];
    *length = 0;
    if (token < 0 || token >= vocabulary->size)
        return NULL;
    memcpy(range, vocabulary->offsets + 4 * (size_t)token, sizeof range);
    *length = (int)(range[1] - range[0]);
    return vocabulary->text + range[0];
}

// ---- printing ----

void terminal_text_end(struct terminal_text *text) {
    for (int i = 0; i < text->have; i++)
        fprintf(text->out, "\\x%02x", text->bytes[i]);
    text->have = text->want = 0;
}

// Prints and empties text->bytes, a whole character. Escapes it if it is malformed (overlong, surrogate, beyond
// Unicode), a C1 control, a separator of lines or paragraphs, or a mark that turns the direction of the text after it.
static void terminal_character(struct terminal_text *text) {
    static const uint32_t smallest[] = {0, 0, 0x80, 0x800, 0x10000};
    uint32_t code = text->bytes[0] & (0xffu >> (text->want + 1));
    for (int i = 1; i < text->want; i++)
        code = code << 6 | (text->bytes[i] & 0x3fu);
    const bool malformed = code < smallest[text->want] || (code >= 0xd800 && code < 0xe000) || code > 0x10ffff;
    const bool steers = code < 0xa0 || code == 0x61c || code == 0x200e || code == 0x200f ||
                        (code >= 0x2028 && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
    if (malformed || steers) {
        terminal_text_end(text);
        return;
    }
    fwrite(text->bytes, 1, (size_t)text->want, text->out);
    text->have = text->want = 0;
}

// Prints a byte, or keeps it until its character is whole. Escapes broken characters, and controls but newline and tab.
static void terminal_byte(struct terminal_text *text, unsigned char byte) {
    if (text->want && (byte & 0xc0) != 0x80)
        terminal_text_end(text); // the character before is cut short
    if (text->want) {
        text->bytes[text->have++] = byte;
        if (text->have == text->want)
            terminal_character(text);
        return;
    }
    if (byte == '\n' || byte == '\t' || (byte >= 0x20 && byte < 0x7f)) {
        fputc(byte, text->out);
        return;
    }
    text->bytes[0] = byte;
    text->have = 1;
    text->want = byte >= 0xc2 && byte < 0xe0   ? 2
                 : byte >= 0xe0 && byte < 0xf0 ? 3
                 : byte >= 0xf0 && byte < 0xf5 ? 4
                                               : 0;
    if (!text->want)
        terminal_text_end(text);
}

void vocabulary_print_token(struct terminal_text *text, const struct vocabulary *vocabulary, int32_t token) {
    int length;
    const unsigned char *bytes = vocabulary_decode(vocabulary, token, &length);
    if (!bytes) {
        terminal_text_end(text);
        fprintf(text->out, "[%d]", (int)token);
    }
    const bool strips = vocabulary->strips_space && !text->begun && length > 0 && bytes[0] == ' ';
    text->begun = true;
    for (int i = strips; i < length; i++)
        terminal_byte(text, bytes[i]);
}

void vocabulary_print(FILE *out, const struct vocabulary *vocabulary, const int32_t *tokens, int count) {
    struct terminal_text text;
    memset(&text, 0, sizeof text);
    text.out = out;
    for (int i = 0; i < count; i++)
        vocabulary_print_token(&text, vocabulary, tokens[i]);
    terminal_text_end(&text);
}
