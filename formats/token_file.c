#include "formats/token_file.h"
#include "formats/finetune_shard.h"  // finetune_shard_parse
#include "runtime/files/file_read.h" // open_regular, read_exactly, load_u32, load_u64
#include "runtime/files/hash.h"      // hash64
#include <errno.h>                   // errno
#include <inttypes.h>                // PRIu64, PRId64
#include <stdbool.h>                 // bool
#include <stdio.h>                   // snprintf
#include <stdlib.h>                  // malloc, free
#include <string.h>                  // memcpy, memcmp, strerror
#include <sys/mman.h>                // mmap
#include <unistd.h>                  // close, access

enum { MEGATRON_HEADER_BYTES = 34 };

const char *token_format_name(enum token_format format) {
    switch (format) {
    case TOKENS_LLMC: return "llm.c shards";
    case TOKENS_MEGATRON: return "Megatron .bin/.idx";
    case TOKENS_FINETUNE: return "finetuning shards";
    }
    return "";
}
const char *token_type_name(enum token_type type) {
    switch (type) {
    case TOKEN_U8: return "uint8";
    case TOKEN_I8: return "int8";
    case TOKEN_I16: return "int16";
    case TOKEN_U16: return "uint16";
    case TOKEN_I32: return "int32";
    case TOKEN_U32: return "uint32";
    case TOKEN_I64: return "int64";
    }
    return "";
}
uint64_t token_type_bytes(enum token_type type) {
    switch (type) {
    case TOKEN_U8:
    case TOKEN_I8: return 1;
    case TOKEN_I16:
    case TOKEN_U16: return 2;
    case TOKEN_I32:
    case TOKEN_U32: return 4;
    case TOKEN_I64: return 8;
    }
    return 0;
}

// The header of a shard of llm.c: 256 int32, of which [0] is the magic, [1] the version, [2] the number of tokens.
enum {
    LLMC_MAGIC_U16 = 20240520,
    LLMC_VERSION_U16 = 1,
    LLMC_MAGIC_U32 = 20240801,
    LLMC_VERSION_U32 = 7,
    LLMC_MAGIC_EVALUATION = 20240522
};

const char *llmc_shard_parse(struct token_file *file, const unsigned char *data, uint64_t data_bytes,
                             uint64_t file_bytes, const char *name, struct error_text *error) {
    if (file_bytes == 0)
        return error_format(error, "%s: is empty; expected a token shard; make it again with scripts/prepare_data.py",
                            name);
    const uint32_t magic = data_bytes >= 4 ? load_u32(data) : 0;
    if (magic == LLMC_MAGIC_EVALUATION)
        return error_format(error, "%s: is an evaluation file of llm.c (magic %d), not training tokens; leave it out",
                            name, LLMC_MAGIC_EVALUATION);
    if (magic != LLMC_MAGIC_U16 && magic != LLMC_MAGIC_U32)
        return error_format(
            error,
            "%s: begins with %" PRIu32 "; expected a token shard of llm.c (%d for uint16, %d for uint32), "
            "or Megatron tokens with their .idx file beside them; make shards with scripts/prepare_data.py",
            name, magic, LLMC_MAGIC_U16, LLMC_MAGIC_U32);
    if (data_bytes < LLMC_HEADER_BYTES)
        return error_format(error,
                            "%s: is %" PRIu64
                            " bytes long; expected a header of %d bytes; it was cut off: copy or make it again",
                            name, file_bytes, LLMC_HEADER_BYTES);
    const uint32_t version = load_u32(data + 4),
                   expected = magic == LLMC_MAGIC_U16 ? LLMC_VERSION_U16 : LLMC_VERSION_U32;
    if (version != expected)
        return error_format(error, "%s: has version %" PRIu32 "; expected %" PRIu32 " with magic %" PRIu32, name,
                            version, expected, magic);

    file->format = TOKENS_LLMC;
    file->row_tokens = 0;
    file->type = magic == LLMC_MAGIC_U16 ? TOKEN_U16 : TOKEN_U32;
    file->first_byte = LLMC_HEADER_BYTES;
    file->tokens = load_u32(data + 8);
    tokenizer_digest_of_header(&file->tokenizer, &file->vocabulary, data);
    const uint64_t expected_bytes = LLMC_HEADER_BYTES + file->tokens * token_type_bytes(file->type);
    if (file_bytes != expected_bytes)
        return error_format(
            error,
            "%s: is %" PRIu64 " bytes long; expected %" PRIu64 " for the %" PRIu64
            " %s tokens that its header promises; it was cut off or is still being written: copy or make it again",
            name, file_bytes, expected_bytes, file->tokens, token_type_name(file->type));
    if (file->tokens == 0)
        return error_format(error, "%s: holds no tokens; leave it out or make it again with scripts/prepare_data.py",
                            name);
    return NULL;
}

// *type = the type that a dtype code of Megatron means. Refuses the codes of floating-point types (6, 7).
static const char *megatron_type_parse(enum token_type *type, unsigned code, const char *name,
                                       struct error_text *error) {
    switch (code) {
    case 1: *type = TOKEN_U8; return NULL;
    case 2: *type = TOKEN_I8; return NULL;
    case 3: *type = TOKEN_I16; return NULL;
    case 4: *type = TOKEN_I32; return NULL;
    case 5: *type = TOKEN_I64; return NULL;
    case 8: *type = TOKEN_U16; return NULL;
    default:
        return error_format(error, "%s: has dtype code %u; expected an integer type: 1, 2, 3, 4, 5 or 8", name, code);
    }
}

// Checks that the sequences fill the .bin, without gaps. lengths: u32, tokens of `width` bytes; pointers: u64, bytes.
static const char *megatron_sequences_check(const unsigned char *lengths, const unsigned char *pointers,
                                            uint64_t sequences, uint64_t width, uint64_t bin_bytes, const char *name,
                                            struct error_text *error) {
    uint64_t next_byte = 0;
    for (uint64_t i = 0; i < sequences; i++) {
        const uint32_t length = load_u32(lengths + 4 * i);
        const uint64_t pointer = load_u64(pointers + 8 * i);
        if (length > INT32_MAX)
            return error_format(error,
                                "%s: sequence %" PRIu64 " has the negative length %" PRId32 "; the index is damaged",
                                name, i, (int32_t)length);
        if (pointer != next_byte)
            return error_format(error,
                                "%s: sequence %" PRIu64 " begins at byte %" PRId64 " of the .bin; expected %" PRIu64
                                ", the end of the sequence before it; make the dataset again",
                                name, i, (int64_t)pointer, next_byte);
        if (length * width > bin_bytes - next_byte) // next_byte <= bin_bytes always
            return error_format(error,
                                "%s: sequence %" PRIu64 " ends at byte %" PRIu64 " of the .bin, which has only %" PRIu64
                                "; the .bin was cut off or belongs to another .idx",
                                name, i, next_byte + length * width, bin_bytes);
        next_byte += length * width;
    }
    if (next_byte != bin_bytes)
        return error_format(error,
                            "%s: describes %" PRIu64 " bytes of tokens, but the .bin has %" PRIu64
                            "; the two don't belong together or one is still being written",
                            name, next_byte, bin_bytes);
    return NULL;
}

// Checks that the document index, `count` unaligned 64-bit numbers, goes from 0 to the number of sequences, never down.
static const char *megatron_documents_check(const unsigned char *documents, uint64_t count, uint64_t sequences,
                                            const char *name, struct error_text *error) {
    uint64_t previous = 0;
    for (uint64_t i = 0; i < count; i++) {
        const uint64_t first = load_u64(documents + 8 * i);
        if ((i == 0 && first != 0) || first < previous || first > sequences || (i == count - 1 && first != sequences))
            return error_format(error,
                                "%s: entry %" PRIu64 " of the document index is %" PRId64
                                "; expected numbers rising from 0 to %" PRIu64 ", the number of sequences",
                                name, i, (int64_t)first, sequences);
        previous = first;
    }
    return NULL;
}

const char *megatron_index_parse(struct token_file *file, const unsigned char *index, uint64_t index_bytes,
                                 uint64_t bin_bytes, const char *name, struct error_text *error) {
    static const unsigned char magic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0};
    if (index_bytes == 0)
        return error_format(error, "%s: is empty; expected a Megatron index", name);
    if (memcmp(index, magic, index_bytes < sizeof magic ? index_bytes : sizeof magic) != 0)
        return error_format(error, "%s: doesn't begin with MMIDIDX; expected a memory-mapped Megatron index", name);
    if (index_bytes < MEGATRON_HEADER_BYTES)
        return error_format(error, "%s: is %" PRIu64 " bytes long; expected a header of %d bytes; it was cut off", name,
                            index_bytes, MEGATRON_HEADER_BYTES);
    const uint64_t version = load_u64(index + 9);
    if (version != 1)
        return error_format(error, "%s: has version %" PRIu64 "; expected 1", name, version);
    enum token_type type = TOKEN_U8;
    const char *problem = megatron_type_parse(&type, index[17], name, error);
    if (problem)
        return problem;

    const uint64_t sequences = load_u64(index + 18), documents = load_u64(index + 26),
                   rest = index_bytes - MEGATRON_HEADER_BYTES;
    const bool plausible = sequences <= rest / 12 && documents <= rest / 8; // so that the next line can't overflow
    const uint64_t expected = plausible ? 12 * sequences + 8 * documents : 0;
    if (!plausible ||
        (rest != expected && rest != expected + sequences)) // with a byte more per sequence: multimodal modes
        return error_format(error,
                            "%s: is %" PRIu64 " bytes long, which doesn't fit the %" PRIu64 " sequences and %" PRIu64
                            " document entries that its header promises; it was cut off or is still being written",
                            name, index_bytes, sequences, documents);
    if (documents == 0)
        return error_format(error, "%s: has no document index; expected at least its leading 0", name);
    const unsigned char *lengths = index + MEGATRON_HEADER_BYTES, *pointers = lengths + 4 * sequences;
    problem = megatron_sequences_check(lengths, pointers, sequences, token_type_bytes(type), bin_bytes, name, error);
    if (!problem)
        problem = megatron_documents_check(pointers + 8 * sequences, documents, sequences, name, error);
    if (problem)
        return problem;
    if (bin_bytes == 0)
        return error_format(error, "%s: holds no tokens; leave it out or make the dataset again", name);

    file->format = TOKENS_MEGATRON;
    file->row_tokens = 0;
    file->type = type;
    file->first_byte = 0;
    file->tokens = bin_bytes / token_type_bytes(type);
    return NULL;
}

// Fills *file, except its path, from the header of a shard. Its first bytes tell shards to finetune on from llm.c's.
static const char *shard_open(struct token_file *file, const char *path, struct error_text *error) {
    unsigned char header[LLMC_HEADER_BYTES];
    int fd;
    uint64_t file_bytes;
    const char *problem = open_regular(&fd, &file_bytes, path, TOKEN_FILES_EXPECTED, error);
    if (problem)
        return problem;
    const uint64_t header_bytes = file_bytes < sizeof header ? file_bytes : sizeof header;
    problem = read_exactly(fd, header, header_bytes, 0, path, error);
    if (!problem)
        problem = is_finetune_shard(header, header_bytes)
                      ? finetune_shard_parse(file, header, header_bytes, file_bytes, path, error)
                      : llmc_shard_parse(file, header, header_bytes, file_bytes, path, error);
    close(fd);
    return problem;
}

// Maps an index into memory, for unmap_index. *index is NULL for an empty file.
static const char *map_index(const unsigned char **index, uint64_t *bytes, const char *path, struct error_text *error) {
    int fd;
    *index = NULL;
    const char *problem = open_regular(&fd, bytes, path, "a Megatron index", error);
    if (problem)
        return problem;
    void *map = *bytes > 0 ? mmap(NULL, *bytes, PROT_READ, MAP_PRIVATE, fd, 0) : NULL;
    close(fd);
    if (map == MAP_FAILED)
        return error_format(error, "%s: can't be mapped: %s", path, strerror(errno));
    *index = (const unsigned char *)map;
    return NULL;
}
static void unmap_index(const unsigned char *index, uint64_t bytes) {
    if (index)
        munmap((void *)index, bytes);
}

// Fills the zeroed *file, except path, documents and digest, from Megatron's dataset. Nothing stays open or mapped.
static const char *megatron_open(struct token_file *file, const char *bin_path, const char *index_path,
                                 struct error_text *error) {
    int fd;
    uint64_t bin_bytes, index_bytes;
    const unsigned char *index;
    const char *problem = open_regular(&fd, &bin_bytes, bin_path, TOKEN_FILES_EXPECTED, error);
    if (problem)
        return problem;
    close(fd);
    RETURN_PROBLEM(map_index(&index, &index_bytes, index_path, error));
    problem = megatron_index_parse(file, index, index_bytes, bin_bytes, index_path, error);
    unmap_index(index, index_bytes);
    return problem;
}

const char *megatron_documents_parse(struct token_file *file, const unsigned char *index, const char *name,
                                     struct error_text *error) {
    const uint64_t sequences = load_u64(index + 18), entries = load_u64(index + 26),
                   width = token_type_bytes(file->type);
    const unsigned char *pointers = index + MEGATRON_HEADER_BYTES + 4 * sequences,
                        *documents = pointers + 8 * sequences;
    file->num_documents = 0;
    file->documents = (uint64_t *)malloc((entries ? entries : 1) * sizeof *file->documents);
    if (!file->documents)
        return error_format(error, "%s: out of memory for %" PRIu64 " documents", name, entries);
    for (uint64_t i = 0; i < entries; i++) { // the last entry is the end; empty documents begin where the next one does
        const uint64_t sequence = load_u64(documents + 8 * i);
        const uint64_t begin = sequence < sequences ? load_u64(pointers + 8 * sequence) / width : file->tokens;
        const bool new_place = file->num_documents == 0 || begin > file->documents[file->num_documents - 1];
        if (begin < file->tokens && new_place)
            file->documents[file->num_documents++] = begin;
    }
    return NULL;
}

const char *token_file_read_documents(struct token_file *file, struct error_text *error) {
    if (file->format != TOKENS_MEGATRON || file->documents)
        return NULL;
    char *index_path = path_with_ending(file->path, ".bin", ".idx");
    const unsigned char *index = NULL;
    uint64_t index_bytes = 0;
    if (!index_path)
        return error_format(error, "%s: out of memory", file->path);
    struct token_file now = *file; // the .idx may have changed since it was opened
    const char *problem = map_index(&index, &index_bytes, index_path, error);
    if (!problem)
        problem = megatron_index_parse(&now, index, index_bytes, file->tokens * token_type_bytes(file->type),
                                       index_path, error);
    if (!problem && now.type != file->type)
        problem = error_format(error, "%s: has tokens of %s, but had %s when it was opened; don't change it",
                               index_path, token_type_name(now.type), token_type_name(file->type));
    if (!problem)
        problem = megatron_documents_parse(file, index, index_path, error);
    unmap_index(index, index_bytes);
    free(index_path);
    return problem;
}

void token_file_close(struct token_file *file) {
    free(file->path);
    free(file->documents);
    memset(file, 0, sizeof *file);
}

char *path_with_ending(const char *path, const char *ending, const char *replacement) {
    const size_t length = strlen(path), cut = strlen(ending);
    if (length < cut || strcmp(path + length - cut, ending) != 0)
        return NULL;
    char *result = (char *)malloc(length - cut + strlen(replacement) + 1);
    if (result) {
        memcpy(result, path, length - cut);
        strcpy(result + length - cut, replacement);
    }
    return result;
}

const char *token_file_open(struct token_file *file, const char *path, struct error_text *error) {
    char *index_path = path_with_ending(path, ".bin", ".idx");
    const char *problem = index_path && access(index_path, F_OK) == 0 ? megatron_open(file, path, index_path, error)
                                                                      : shard_open(file, path, error);
    free(index_path);
    if (problem)
        return problem;
    file->path = strdup(path);
    return file->path ? NULL : error_format(error, "%s: out of memory", path);
}

#define TOKENS_WIDEN(TYPE)                                                                                             \
    for (int i = 0; i < n; i++) {                                                                                      \
        TYPE value;                                                                                                    \
        memcpy(&value, raw + sizeof(TYPE) * (size_t)i, sizeof(TYPE));                                                  \
        const int64_t token = (int64_t)value;                                                                          \
        if (token < 0 || token >= vocab_size) {                                                                        \
            *outside = token;                                                                                          \
            return i;                                                                                                  \
        }                                                                                                              \
        out[i] = (int32_t)token;                                                                                       \
    }                                                                                                                  \
    return n
int tokens_widen(int32_t *out, const unsigned char *raw, enum token_type type, int n, int vocab_size,
                 int64_t *outside) {
    switch (type) {
    case TOKEN_U8: TOKENS_WIDEN(uint8_t);
    case TOKEN_I8: TOKENS_WIDEN(int8_t);
    case TOKEN_I16: TOKENS_WIDEN(int16_t);
    case TOKEN_U16: TOKENS_WIDEN(uint16_t);
    case TOKEN_I32: TOKENS_WIDEN(int32_t);
    case TOKEN_U32: TOKENS_WIDEN(uint32_t);
    case TOKEN_I64: TOKENS_WIDEN(int64_t);
    }
    return 0;
}
#undef TOKENS_WIDEN

const char *token_file_digest(uint64_t *digest, const struct token_file *file, struct error_text *error) {
    enum { PARTS = 8, PART_BYTES = 4096 };
    unsigned char part[PART_BYTES];
    uint64_t bytes;
    int fd;
    RETURN_PROBLEM(open_regular(&fd, &bytes, file->path, "a token shard", error));
    const uint64_t n = bytes < PART_BYTES ? bytes : (uint64_t)PART_BYTES;
    const char *problem = NULL;
    uint64_t hash = hash64(&bytes, sizeof bytes, 0);
    for (uint64_t i = 0; i < PARTS && !problem; i++) {
        problem = read_exactly(fd, part, n, (bytes - n) / (PARTS - 1) * i, file->path, error);
        if (!problem)
            hash = hash64(part, n, hash);
    }
    close(fd);
    hash &= INT64_MAX; // what JSON's readers hold exactly enough of: a signed integer
    *digest = hash > 0 ? hash : 1;
    return problem;
}

const char *token_file_read(int32_t *out, const struct token_file *file, int fd, uint64_t first, int n, int vocab_size,
                            unsigned char *raw, struct error_text *error) {
    const uint64_t width = token_type_bytes(file->type);
    const char *problem =
        read_exactly(fd, raw, (uint64_t)n * width, file->first_byte + first * width, file->path, error);
    if (problem)
        return problem;
    int64_t outside = 0;
    const int place = tokens_widen(out, raw, file->type, n, vocab_size, &outside);
    if (place == n)
        return NULL;
    char size[32] = "that";
    if (file->vocabulary > (uint32_t)vocab_size)
        snprintf(size, sizeof size, "%" PRIu32 ", that", file->vocabulary);
    return error_format(error,
                        "%s: token %" PRIu64 " of the file is %" PRId64
                        ", outside the vocabulary of %d; set --vocab-size to %s of the tokenizer that made the file, "
                        "or make the file again",
                        file->path, first + (uint64_t)place, outside, vocab_size, size);
}
