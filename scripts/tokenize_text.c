// tokenize_text: the worker process of scripts/prepare_data.py. It turns blocks of documents on stdin into tokens on
// stdout by the engine's tokenizer, one block after the other, until stdin ends. Numbers are little-endian.
//   tokenize_text TOKENIZER_JSON END_OF_TEXT BYTES_A_TOKEN VAL_BELOW FIELD
//   tokenize_text --seen
// At the start the worker writes a `struct reply` of status READY, or FAILED and what is wrong.
//
// A request is a `struct request`. LINES: `bytes` of JSONL, of which each line has a text in FIELD. TEXTS_32, TEXTS_64:
// count + 1 offsets of so many bits, and `bytes`, of which document i is [offset i - offset 0, offset i+1 - offset 0),
// as Arrow has columns of strings. The answer is a `struct reply`, and where its status is READY for each document its
// digest (u64; text_digest), the bytes of its text (u64) and the number of its tokens (u64), then the tokens of the
// documents for training and then those for validation, which are those whose digest is below VAL_BELOW. A document's
// tokens begin with END_OF_TEXT; an empty one has none. LOOK: document number `documents` has to be looked at by a
// parser of all of JSON. FAILED: `documents` bytes follow that say what is wrong.
//
// With --seen a request is a u64 count of digests, then the digests. The answer has a byte for each digest: whether the
// digest was there before, in this request or an earlier one.
#include <errno.h>  // errno
#include <signal.h> // signal
#include <stdio.h>  // fprintf
#include <stdlib.h> // strtoull, realloc
#include <string.h> // memcpy
#include <unistd.h> // read, write

#include "formats/json_field.h"      // json_field_find
#include "formats/piece_cache.h"     // piece_cache_create
#include "formats/tokenizer.h"       // tokenizer_encode_cached
#include "formats/text_digest.h"     // text_digest
#include "runtime/files/file_read.h" // read_whole, load_u32

enum { LINES, TEXTS_32, TEXTS_64 };
enum { READY, LOOK, FAILED };
enum { SPLITS = 2 };                                 // train, val
static const uint64_t MAX_BYTES = (uint64_t)1 << 32; // of a request

struct request {
    uint32_t kind, count;
    uint64_t bytes;
};
struct reply {
    uint32_t status, documents;
    uint64_t tokens[SPLITS], documents_of[SPLITS]; // in all of each split; an empty document counts in none
    uint64_t bytes, digests;                       // of the texts in all; the sum of their digests, modulo 2^64
};

// A buffer that grows. A zeroed one is empty.
struct buffer {
    unsigned char *data; // owned
    size_t bytes, room;
};

struct worker {
    struct tokenizer tokenizer;
    struct piece_cache *cache; // owned
    int32_t end_of_text;
    size_t width; // bytes a token
    uint64_t val_below;
    const char *field;
    struct buffer payload, text, records, tokens[SPLITS];
    struct reply reply;
};

static void end_without_memory(void) {
    fprintf(stderr, "tokenize_text: out of memory\n");
    exit(2);
}
// Makes room for `more` bytes behind those that the buffer has, and returns the place.
static unsigned char *buffer_reserve(struct buffer *buffer, size_t more) {
    if (more > buffer->room - buffer->bytes) {
        const size_t need = buffer->bytes + more;
        buffer->room = need > 2 * buffer->room ? need : 2 * buffer->room;
        buffer->data = (unsigned char *)realloc(buffer->data, buffer->room);
        if (!buffer->data)
            end_without_memory();
    }
    return buffer->data + buffer->bytes;
}

// Reads exactly `bytes`; false: stdin ended before the first.
static int read_all(void *data, size_t bytes) {
    unsigned char *at = (unsigned char *)data;
    for (size_t left = bytes; left > 0;) {
        const ssize_t got = read(STDIN_FILENO, at, left);
        if (got < 0 && errno == EINTR)
            continue;
        if (got == 0 && left == bytes)
            return 0;
        if (got <= 0)
            exit(2); // prepare_data.py has ended
        at += got;
        left -= (size_t)got;
    }
    return 1;
}
static void write_all(const void *data, size_t bytes) {
    const unsigned char *at = (const unsigned char *)data;
    while (bytes > 0) {
        const ssize_t put = write(STDOUT_FILENO, at, bytes);
        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            exit(2);
        at += put;
        bytes -= (size_t)put;
    }
}
static void write_failure(const char *problem) {
    struct reply reply;
    memset(&reply, 0, sizeof reply);
    reply.status = FAILED;
    reply.documents = (uint32_t)strlen(problem);
    write_all(&reply, sizeof reply);
    write_all(problem, reply.documents);
}

// Appends ids (count) at the width of the shards.
static void put_tokens(struct buffer *tokens, const int32_t *ids, int64_t count, size_t width) {
    unsigned char *out = buffer_reserve(tokens, (size_t)count * width);
    if (width == 2) {
        for (int64_t i = 0; i < count; i++) {
            const uint16_t id = (uint16_t)ids[i];
            memcpy(out + 2 * i, &id, sizeof id);
        }
    } else {
        memcpy(out, ids, (size_t)count * sizeof *ids);
    }
    tokens->bytes += (size_t)count * width;
}

// Adds a document's text to the reply. Returns NULL, or what is wrong.
static const char *add_document(struct worker *worker, const unsigned char *text, size_t bytes,
                                struct error_text *error) {
    struct reply *reply = &worker->reply;
    uint64_t record[3] = {text_digest(text, bytes), bytes, 0};
    if (bytes) {
        const int split = record[0] < worker->val_below;
        int32_t *ids;
        int64_t count;
        RETURN_PROBLEM(
            tokenizer_encode_cached(&worker->tokenizer, worker->cache, text, bytes, ENCODE_TEXT, &ids, &count, error));
        put_tokens(&worker->tokens[split], &worker->end_of_text, 1, worker->width);
        put_tokens(&worker->tokens[split], ids, count, worker->width);
        free(ids);
        record[2] = (uint64_t)count + 1;
        reply->tokens[split] += record[2];
        reply->documents_of[split]++;
        reply->bytes += bytes;
        reply->digests += record[0];
    }
    memcpy(buffer_reserve(&worker->records, sizeof record), record, sizeof record);
    worker->records.bytes += sizeof record;
    reply->documents++;
    return NULL;
}

// Adds the lines of JSONL; status LOOK where a line is not for json_field_find.
static const char *add_lines(struct worker *worker, const unsigned char *data, size_t bytes, struct error_text *error) {
    unsigned char *text = buffer_reserve(&worker->text, bytes + 1);
    for (size_t begin = 0, end; begin < bytes; begin = end) {
        const unsigned char *line_end = (const unsigned char *)memchr(data + begin, '\n', bytes - begin);
        end = line_end ? (size_t)(line_end - data) + 1 : bytes;
        size_t first = begin, text_bytes;
        while (first < end && (data[first] == ' ' || (data[first] >= '\t' && data[first] <= '\r')))
            first++;
        if (first == end)
            continue; // an empty line
        if (!json_field_find(text, &text_bytes, data + begin, end - begin, worker->field)) {
            worker->reply.status = LOOK;
            return NULL;
        }
        RETURN_PROBLEM(add_document(worker, text, text_bytes, error));
    }
    return NULL;
}

// Adds texts: offsets (count + 1 of `width` bytes), then the bytes that they are in.
static const char *add_texts(struct worker *worker, const struct request *request, size_t width,
                             struct error_text *error) {
    const unsigned char *offsets = worker->payload.data;
    const unsigned char *data = offsets + ((size_t)request->count + 1) * width;
    uint64_t first = 0, begin = 0;
    for (size_t i = 0; i <= request->count; i++) {
        const uint64_t offset = width == 4 ? load_u32(offsets + 4 * i) : load_u64(offsets + 8 * i);
        first = i == 0 ? offset : first;
        const uint64_t end = offset - first;
        if (offset < first || end < begin || end > request->bytes)
            return error_format(error, "offset %zu of a block of texts is out of place", i);
        if (i > 0)
            RETURN_PROBLEM(add_document(worker, data + begin, end - begin, error));
        begin = end;
    }
    return NULL;
}

static void answer(struct worker *worker, const struct request *request) {
    const size_t width = request->kind == TEXTS_32 ? 4 : request->kind == TEXTS_64 ? 8 : 0;
    const size_t bytes = (width ? ((size_t)request->count + 1) * width : 0) + request->bytes;
    struct error_text error;
    if (request->kind > TEXTS_64 || request->bytes > MAX_BYTES)
        exit(2); // no request of prepare_data.py's
    worker->payload.bytes = worker->records.bytes = worker->tokens[0].bytes = worker->tokens[1].bytes = 0;
    if (!read_all(buffer_reserve(&worker->payload, bytes + 1), bytes) && bytes)
        exit(2);
    memset(&worker->reply, 0, sizeof worker->reply);
    const char *problem = width ? add_texts(worker, request, width, &error)
                                : add_lines(worker, worker->payload.data, request->bytes, &error);
    if (problem) {
        write_failure(problem);
        return;
    }
    write_all(&worker->reply, sizeof worker->reply);
    if (worker->reply.status != READY)
        return;
    write_all(worker->records.data, worker->records.bytes);
    for (int split = 0; split < SPLITS; split++)
        write_all(worker->tokens[split].data, worker->tokens[split].bytes);
}

// Reads the tokenizer, and says that it is there or what is wrong with it.
static int start(struct worker *worker, char **arguments) {
    struct error_text error;
    unsigned char *data;
    uint64_t bytes;
    worker->end_of_text = (int32_t)strtol(arguments[2], NULL, 10);
    worker->width = strtoull(arguments[3], NULL, 10);
    worker->val_below = strtoull(arguments[4], NULL, 10);
    worker->field = arguments[5];
    const char *problem = read_whole(&data, &bytes, (uint64_t)1 << 30, arguments[1], "a tokenizer.json", &error);
    if (!problem)
        problem = tokenizer_parse(&worker->tokenizer, data, bytes, arguments[1], &error);
    free(data);
    if (problem) {
        write_failure(problem);
        return 0;
    }
    worker->cache = piece_cache_create();
    if (!worker->cache)
        end_without_memory();
    memset(&worker->reply, 0, sizeof worker->reply);
    write_all(&worker->reply, sizeof worker->reply);
    return 1;
}

// Puts a digest other than 0 into a hash table of slots (a power of two, 0: free); whether it was there.
static int put_seen(uint64_t *table, uint64_t slots, uint64_t digest) {
    uint64_t slot = digest & (slots - 1);
    while (table[slot] && table[slot] != digest)
        slot = (slot + 1) & (slots - 1);
    const int there = table[slot] != 0;
    table[slot] = digest;
    return there;
}
// Answers requests of --seen. The table grows where it is half full: 16 to 32 bytes a digest.
static void serve_seen(void) {
    uint64_t slots = 1 << 16, taken = 0, count;
    uint64_t *table = (uint64_t *)calloc(slots, sizeof *table);
    struct buffer digests, seen;
    memset(&digests, 0, sizeof digests);
    memset(&seen, 0, sizeof seen);
    if (!table)
        end_without_memory();
    while (read_all(&count, sizeof count)) {
        if (count > MAX_BYTES / 8)
            exit(2);
        const unsigned char *digest = buffer_reserve(&digests, count * 8 + 1);
        unsigned char *out = buffer_reserve(&seen, count + 1);
        if (!read_all(digests.data, count * 8) && count)
            exit(2);
        for (uint64_t i = 0; i < count; i++) {
            const uint64_t value = load_u64(digest + 8 * i);
            if (2 * taken >= slots) {
                uint64_t *larger = (uint64_t *)calloc(2 * slots, sizeof *table);
                if (!larger)
                    end_without_memory();
                for (uint64_t slot = 0; slot < slots; slot++) {
                    if (table[slot])
                        put_seen(larger, 2 * slots, table[slot]);
                }
                free(table);
                table = larger;
                slots *= 2;
            }
            out[i] = (unsigned char)put_seen(table, slots, value ? value : 1);
            taken += !out[i];
        }
        write_all(seen.data, count);
    }
    free(table);
    free(digests.data);
    free(seen.data);
}

int main(int count, char **arguments) {
    static struct worker worker;
    struct request request;
    signal(SIGINT, SIG_IGN); // of the terminal: prepare_data.py decides, and ends stdin
    if (count == 2 && strcmp(arguments[1], "--seen") == 0) {
        serve_seen();
        return 0;
    }
    if (count != 6) {
        fprintf(stderr, "tokenize_text: is started by scripts/prepare_data.py\n");
        return 2;
    }
    if (!start(&worker, arguments))
        return 2;
    while (read_all(&request, sizeof request))
        answer(&worker, &request);
    piece_cache_free(worker.cache);
    tokenizer_free(&worker.tokenizer);
    return 0;
}
