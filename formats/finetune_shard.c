#include "formats/finetune_shard.h"
#include "runtime/files/file_read.h" // read_exactly, load_u32, load_u64
#include <inttypes.h>                // PRIu64

#define AGAIN "make it again with scripts/prepare_data.py --chat"

bool is_finetune_shard(const unsigned char *data, uint64_t data_bytes) {
    return data_bytes >= 4 && load_u32(data) == FINETUNE_MAGIC;
}

static uint64_t finetune_round_up_8(uint64_t bytes) { return (bytes + 7) / 8 * 8; }

const char *finetune_shard_parse(struct token_file *file, const unsigned char *data, uint64_t data_bytes,
                                 uint64_t file_bytes, const char *name, struct error_text *error) {
    if (data_bytes < FINETUNE_HEADER_BYTES)
        return error_format(error,
                            "%s: is %" PRIu64 " bytes long; expected a header of %d bytes; it was cut off: copy or "
                            "make it again",
                            name, file_bytes, FINETUNE_HEADER_BYTES);
    const uint32_t version = load_u32(data + 4), row = load_u32(data + 8), width = load_u32(data + 12);
    const uint64_t rows = load_u64(data + 16), learned = load_u64(data + 24);
    if (version != FINETUNE_VERSION)
        return error_format(error, "%s: is a finetuning shard of version %" PRIu32 "; expected %d; " AGAIN, name,
                            version, FINETUNE_VERSION);
    if (row < 1 || row > INT32_MAX / 16)
        return error_format(error, "%s: has rows of %" PRIu32 " tokens; expected 1 to %d; " AGAIN, name, row,
                            INT32_MAX / 16);
    if (width != 2 && width != 4)
        return error_format(error, "%s: has tokens of %" PRIu32 " bytes; expected 2 or 4; " AGAIN, name, width);
    if (rows == 0 || rows > file_bytes / row) // every token takes 2 bytes at least
        return error_format(error,
                            "%s: promises %" PRIu64 " rows in %" PRIu64 " bytes; it was cut off, or is damaged: "
                            "copy or make it again",
                            name, rows, file_bytes);
    const uint64_t tokens = rows * row + 1, bits = finetune_round_up_8((tokens + 7) / 8);
    const uint64_t loss = FINETUNE_HEADER_BYTES + finetune_round_up_8(tokens * width), expected = loss + 2 * bits;
    if (file_bytes != expected)
        return error_format(error,
                            "%s: is %" PRIu64 " bytes long; expected %" PRIu64 " for the %" PRIu64 " rows of %" PRIu32
                            " tokens that its header promises; it was cut off or is still being written: copy or make "
                            "it again",
                            name, file_bytes, expected, rows, row);
    if (learned == 0 || learned >= tokens)
        return error_format(error, "%s: promises %" PRIu64 " tokens with loss of %" PRIu64 "; expected some; " AGAIN,
                            name, learned, tokens);
    file->format = TOKENS_FINETUNE;
    file->type = width == 2 ? TOKEN_U16 : TOKEN_U32;
    file->first_byte = FINETUNE_HEADER_BYTES;
    file->tokens = tokens;
    file->row_tokens = (int)row;
    tokenizer_digest_of_header(&file->tokenizer, &file->vocabulary, data);
    file->vocabulary = load_u32(data + 40);
    file->loss_byte = loss;
    file->start_byte = loss + bits;
    return NULL;
}

// Reads bits first..first+n-1 (n > 0) of the bit map at byte `begin` of fd. Bit `first` is bit first % 8 of raw[0].
static const char *finetune_read_bit_bytes(unsigned char *raw, const struct token_file *file, int fd, uint64_t begin,
                                           uint64_t first, int n, struct error_text *error) {
    const uint64_t low = first / 8, high = (first + (uint64_t)n - 1) / 8;
    return read_exactly(fd, raw, high - low + 1, begin + low, file->path, error);
}

const char *finetune_shard_read(int32_t *marks, const struct token_file *file, int fd, uint64_t first, int n,
                                unsigned char *raw, struct error_text *error) {
    const uint64_t skipped = first % 8;
    RETURN_PROBLEM(finetune_read_bit_bytes(raw, file, fd, file->start_byte, first, n, error));
    int32_t begin = 0;
    for (int t = 0; t < n; t++) {
        const uint64_t bit = skipped + (uint64_t)t;
        const bool row_begins = (first + (uint64_t)t) % (uint64_t)file->row_tokens == 0;
        begin = row_begins || raw[bit / 8] >> bit % 8 & 1 ? t : begin;
        marks[t] = begin;
    }
    RETURN_PROBLEM(finetune_read_bit_bytes(raw, file, fd, file->loss_byte, first, n, error));
    for (int t = 0; t < n; t++) {
        const uint64_t bit = skipped + (uint64_t)t;
        if (!(raw[bit / 8] >> bit % 8 & 1))
            marks[t] = ~marks[t];
        else if (marks[t] == t)
            return error_format(error,
                                "%s: token %" PRIu64 " begins a document and has loss, though nothing predicts it; the "
                                "file is damaged: " AGAIN,
                                file->path, first + (uint64_t)t);
    }
    return NULL;
}
