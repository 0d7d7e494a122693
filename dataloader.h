// The data loader: batches of samples from token shards. A sample is a window of T+1 tokens: inputs are its first T,
// targets its last T. Windows start at multiples of T within a shard, so that every target is seen once an epoch; a
// shard's last, incomplete window is left out. The order of samples is one global sequence that depends only on the
// shards, T and the seed: epochs in shuffled orders (formats/sample_order.h), or sets of shards mixed by weights, each
// in its own such order (formats/mixture.h). The position counts samples of that sequence, so that a run may resume
// with another batch size or number of processes.
//
// Where documents are separated, each token comes with the place in the sample at which its document begins, 0 if that
// is before the sample. Documents begin at the end-of-text token, after it, or where a Megatron dataset's .idx says.
// Finetuning shards (finetune_shard.h) say where documents begin and which targets count; their rows are the windows.
//
// A thread reads files by pread (why no mapping: read_exactly in runtime/files/file_read.c), ahead of the step, into a
// ring of samples. Timing can't change the result, because the place of each sample is computed.
#pragma once
#include <inttypes.h> // PRIu64
#include <pthread.h>  // pthread_create, mutex, condition
#include <signal.h>   // sigfillset, pthread_sigmask
#include <stdbool.h>  // bool
#include <stdint.h>   // uint64_t, int32_t
#include <stdlib.h>   // calloc, qsort
#include <string.h>   // memcpy, strcmp
#include <sys/stat.h> // fstat
#include <unistd.h>   // close

#include "runtime/machine/error.h"      // fail
#include "runtime/machine/error_text.h" // struct error_text
#include "runtime/machine/say.h"        // say_warning
#include "formats/finetune_shard.h"     // finetune_shard_read
#include "formats/mixture.h"            // struct mixture
#include "formats/sample_order.h"       // struct sample_order
#include "formats/token_file.h"         // struct token_file
#include "formats/token_paths.h"        // paths_find
#include "runtime/files/file_read.h"    // open_regular

// A file's size and modification time, which change if it is written anew. A copy by rsync or cp -p keeps them.
struct file_stamp {
    int64_t bytes;
    struct timespec modified;
};
// A reader of any sample, which keeps the last sample's file open.
struct sample_reader {
    struct file_stamp *stamps; // (num_files) of when the loader was opened, or a change was last warned of
    int file, fd;              // the open file, -1: none
    unsigned char *raw;        // (T+2) tokens as stored in the file
};

// A set of shards of a mixture, from first_file on. Only the thread, if there is one, locates samples in its order.
struct data_part {
    int first_file;
    uint64_t total_tokens;
    struct sample_order order;
};
// A part's past in a resumed run: the samples that it gave before the mixture began, and the changes of its data.
struct part_start {
    uint64_t before;
    const struct data_change *changes; // (num_changes) at least one; only first_epoch and files are read
    int num_changes;
};

enum document_boundary {
    BOUNDARY_NONE,  // not needed
    BOUNDARY_FIRST, // the delimiter is the first token of a document
    BOUNDARY_LAST,  // the delimiter is the last token of a document
    BOUNDARY_INDEX, // the .idx files have where documents begin
    BOUNDARY_BITS,  // finetuning shards have it, and which targets count
};
struct document_rule {
    enum document_boundary boundary;
    int delimiter; // the end-of-text token; -1: none is known
    // Targets that begin another document, and are not the delimiter, become -1: uncounted. Unused with BOUNDARY_BITS.
    bool mask_targets;
};

// The thread that reads this rank's samples ahead, by a plan: from `start` on, B at a time. The ring has [used, made).
struct read_ahead {
    int capacity;              // slots of the ring; 0: no thread
    int32_t *tokens;           // (capacity, T+1)
    int32_t *documents;        // (capacity, T+1) marks of the tokens; NULL: not needed
    struct error_text *errors; // (capacity) why a sample could not be read
    bool *bad;                 // (capacity) the sample could not be read
    pthread_t thread;
    pthread_mutex_t mutex; // guards what follows; a slot belongs to the thread until it is filled, then to the consumer
    pthread_cond_t changed;
    uint64_t start, made, used; // global position at which the plan begins; samples read and samples released since
    uint64_t plan;              // number of the current plan; a sample that was read for an older one is dropped
    int B;                      // samples that a rank takes at a time under this plan
    bool stop;
};

struct dataloader {
    const char *option; // that named the files, for messages
    struct token_file *files;
    uint64_t *windows; // (num_files) samples of each shard
    int num_files;     // the first part's, then the second's, ...
    struct mixture mixture;
    struct data_part *parts; // (mixture.count)
    int only_part;           // the part that all samples are of, in its own order; -1: they are mixed
    int T, vocab_size, rank, ranks;
    uint64_t position;                  // the next sample of the global sequence, over all ranks
    int32_t *sample, *sample_documents; // (T+1) where a sample is read to when there is no thread
    struct document_rule rule;
    struct sample_reader reader; // used only by the thread, if there is one
    struct read_ahead ahead;
};

// Allocates `count` zeroed elements of `bytes` bytes, which the caller frees. Out of memory ends the program, with a
// message that begins with `option`, the option that named the data files.
static void *dataloader_alloc(const char *option, size_t count, size_t bytes) {
    void *memory = calloc(count ? count : 1, bytes);
    if (!memory)
        fail("%s: out of memory for %zu x %zu bytes of the data loader", option, count, bytes);
    return memory;
}

// Finds where a sample begins: at token *first_token of files[*file]. `sample` counts in the global sequence or, if
// loader->only_part is a part, in the part's own order. Only the thread, if any, may call this: it changes a cache.
static void dataloader_locate(const struct dataloader *loader, uint64_t sample, int *file, uint64_t *first_token) {
    const struct mixture_place one = {loader->only_part, sample},
                               place = loader->only_part < 0 ? mixture_place(&loader->mixture, sample) : one;
    struct data_part *part = &loader->parts[place.part];
    uint64_t window;
    sample_order_locate(&part->order, place.sample, file, &window);
    *file += part->first_file;
    *first_token = window * (uint64_t)loader->T;
}

// The number of the file's documents that begin before its token `token`.
static uint64_t documents_before(const struct token_file *file, uint64_t token) {
    uint64_t low = 0, high = file->num_documents; // all before low begin earlier, none from high on
    while (low < high) {
        const uint64_t middle = low + (high - low) / 2;
        if (file->documents[middle] < token)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}
// Fills documents (n): for each token of a sample, the index in the sample at which the token's document begins, or 0
// if it begins earlier. Writes nothing for BOUNDARY_NONE, nor for BOUNDARY_BITS, where finetune_shard_read does that.
// Only BOUNDARY_INDEX reads `file` and `first`, the token of the file at which the sample begins.
static void sample_documents(int32_t *documents, const int32_t *tokens, int n, struct document_rule rule,
                             const struct token_file *file, uint64_t first) {
    int32_t begin = 0;
    uint64_t next = rule.boundary == BOUNDARY_INDEX ? documents_before(file, first) : 0;
    switch (rule.boundary) {
    case BOUNDARY_NONE:
    case BOUNDARY_BITS: break;
    case BOUNDARY_FIRST:
        for (int t = 0; t < n; t++)
            documents[t] = begin = tokens[t] == rule.delimiter ? t : begin;
        break;
    case BOUNDARY_LAST:
        documents[0] = 0;
        for (int t = 1; t < n; t++)
            documents[t] = begin = tokens[t - 1] == rule.delimiter ? t : begin;
        break;
    case BOUNDARY_INDEX:
        for (int t = 0; t < n;) { // up to the next document's begin at a time
            if (next < file->num_documents && file->documents[next] == first + (uint64_t)t) {
                begin = t;
                next++;
            }
            const uint64_t left = next < file->num_documents ? file->documents[next] - first : UINT64_MAX;
            for (const int end = left < (uint64_t)n ? (int)left : n; t < end; t++)
                documents[t] = begin;
        }
        break;
    }
}

// Warns if the file that was just opened has been written anew since the loader was opened, or since the last warning.
static void reader_check_stamp(struct sample_reader *reader, const struct dataloader *loader, int file) {
    struct file_stamp *stamp = &reader->stamps[file];
    struct stat status;
    if (fstat(reader->fd, &status) != 0 ||
        (status.st_size == stamp->bytes && status.st_mtim.tv_sec == stamp->modified.tv_sec &&
         status.st_mtim.tv_nsec == stamp->modified.tv_nsec))
        return;
    say_warning("%s: %s was written anew while the run reads it; from now on its samples are of what it holds now",
                loader->option, loader->files[file].path);
    stamp->bytes = status.st_size;
    stamp->modified = status.st_mtim;
}

// Reads a sample's tokens into out (T+1), and refuses tokens outside the vocabulary. Fills documents (T+1, or NULL for
// BOUNDARY_NONE) as sample_documents or, for BOUNDARY_BITS, finetune_shard_read does. Returns NULL, or the problem.
static const char *reader_read(struct sample_reader *reader, const struct dataloader *loader, uint64_t sample,
                               int32_t *out, int32_t *documents, struct error_text *error) {
    int file;
    uint64_t first_token;
    dataloader_locate(loader, sample, &file, &first_token);
    const struct token_file *tokens = &loader->files[file];
    if (reader->file != file) {
        uint64_t bytes;
        if (reader->fd >= 0)
            close(reader->fd);
        reader->file = -1;
        const char *problem = open_regular(&reader->fd, &bytes, tokens->path, TOKEN_FILES_EXPECTED, error);
        if (problem)
            return problem;
        reader->file = file;
        reader_check_stamp(reader, loader, file);
    }
    RETURN_PROBLEM(
        token_file_read(out, tokens, reader->fd, first_token, loader->T + 1, loader->vocab_size, reader->raw, error));
    if (loader->rule.boundary == BOUNDARY_BITS)
        return finetune_shard_read(documents, tokens, reader->fd, first_token, loader->T + 1, reader->raw, error);
    sample_documents(documents, out, loader->T + 1, loader->rule, tokens, first_token);
    return NULL;
}

// Returns the global number of this rank's sample n from `start` on. Of B * ranks samples each rank takes B in a row.
static uint64_t rank_sample(const struct dataloader *loader, uint64_t start, uint64_t n, uint64_t B) {
    return start + n / B * B * (uint64_t)loader->ranks + (uint64_t)loader->rank * B + n % B;
}

// Runs as the thread: reads this rank's samples into the ring and marks bad ones, until ahead->stop. argument: loader.
static void *read_ahead_main(void *argument) {
    struct dataloader *loader = (struct dataloader *)argument;
    struct read_ahead *ahead = &loader->ahead;
    pthread_mutex_lock(&ahead->mutex);
    while (!ahead->stop) {
        if (ahead->made - ahead->used == (uint64_t)ahead->capacity) {
            pthread_cond_wait(&ahead->changed, &ahead->mutex);
            continue;
        }
        const uint64_t plan = ahead->plan, sample = rank_sample(loader, ahead->start, ahead->made, (uint64_t)ahead->B);
        const int slot = (int)(ahead->made % (uint64_t)ahead->capacity);
        pthread_mutex_unlock(&ahead->mutex);
        int32_t *tokens = ahead->tokens + (size_t)slot * (size_t)(loader->T + 1);
        int32_t *documents = ahead->documents ? ahead->documents + (size_t)slot * (size_t)(loader->T + 1) : NULL;
        ahead->bad[slot] =
            reader_read(&loader->reader, loader, sample, tokens, documents, &ahead->errors[slot]) != NULL;
        pthread_mutex_lock(&ahead->mutex);
        if (ahead->plan == plan) { // otherwise a new plan was made meanwhile, and the slot is free again
            ahead->made++;
            pthread_cond_broadcast(&ahead->changed);
        }
    }
    pthread_mutex_unlock(&ahead->mutex);
    return NULL;
}

// Makes the thread begin anew at loader->position, B samples at a time. Drops what was read. Does not wait.
static void read_ahead_restart(struct dataloader *loader, int B) {
    struct read_ahead *ahead = &loader->ahead;
    pthread_mutex_lock(&ahead->mutex);
    ahead->start = loader->position;
    ahead->B = B;
    ahead->made = ahead->used = 0;
    ahead->plan++;
    pthread_cond_broadcast(&ahead->changed);
    pthread_mutex_unlock(&ahead->mutex);
}

// Starts the thread at the loader's position, B samples at a time, with a ring of `capacity` samples; 0: does nothing.
static void read_ahead_start(struct dataloader *loader, int B, int capacity) {
    struct read_ahead *ahead = &loader->ahead;
    if (capacity == 0)
        return;
    const size_t slots = (size_t)capacity;
    ahead->capacity = capacity;
    ahead->tokens = (int32_t *)dataloader_alloc(loader->option, slots, (size_t)(loader->T + 1) * sizeof(int32_t));
    if (loader->rule.boundary != BOUNDARY_NONE)
        ahead->documents =
            (int32_t *)dataloader_alloc(loader->option, slots, (size_t)(loader->T + 1) * sizeof(int32_t));
    ahead->errors = (struct error_text *)dataloader_alloc(loader->option, slots, sizeof *ahead->errors);
    ahead->bad = (bool *)dataloader_alloc(loader->option, slots, sizeof *ahead->bad);
    pthread_mutex_init(&ahead->mutex, NULL);
    pthread_cond_init(&ahead->changed, NULL);
    read_ahead_restart(loader, B);

    sigset_t all, before; // signals are blocked in the thread, so that the one that trains receives them
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int status = pthread_create(&ahead->thread, NULL, read_ahead_main, loader);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (status != 0)
        fail("%s: can't start the thread that reads ahead: %s", loader->option, strerror(status));
}

// Ends the thread, frees the ring and zeroes *ahead, B and capacity included. Does nothing if there is no thread.
static void read_ahead_stop(struct read_ahead *ahead) {
    if (ahead->capacity == 0)
        return;
    pthread_mutex_lock(&ahead->mutex);
    ahead->stop = true;
    pthread_cond_broadcast(&ahead->changed);
    pthread_mutex_unlock(&ahead->mutex);
    pthread_join(ahead->thread, NULL);
    pthread_cond_destroy(&ahead->changed);
    pthread_mutex_destroy(&ahead->mutex);
    free(ahead->tokens);
    free(ahead->documents);
    free(ahead->errors);
    free(ahead->bad);
    memset(ahead, 0, sizeof *ahead);
}

// Waits for the ring's oldest sample and returns its slot, valid until read_ahead_release. Ends the program if this
// sample could not be read. *count gets how many slots are ready from there on, up to the ring's end or a bad sample.
static int read_ahead_take(struct dataloader *loader, int *count) {
    struct read_ahead *ahead = &loader->ahead;
    pthread_mutex_lock(&ahead->mutex);
    while (ahead->made == ahead->used)
        pthread_cond_wait(&ahead->changed, &ahead->mutex);
    const int ready = (int)(ahead->made - ahead->used), slot = (int)(ahead->used % (uint64_t)ahead->capacity);
    pthread_mutex_unlock(&ahead->mutex);
    if (ahead->bad[slot])
        fail("%s: %s", loader->option, ahead->errors[slot].text);
    for (*count = 1; *count < ready && slot + *count < ahead->capacity && !ahead->bad[slot + *count];)
        ++*count;
    return slot;
}
// Gives the slots of the ring's `count` oldest samples back to the reading thread, which may overwrite the slots.
static void read_ahead_release(struct read_ahead *ahead, int count) {
    pthread_mutex_lock(&ahead->mutex);
    ahead->used += (uint64_t)count;
    pthread_cond_broadcast(&ahead->changed);
    pthread_mutex_unlock(&ahead->mutex);
}

// ---- opening ----

// Fills files and windows from num_files on by paths (count). The caller raises num_files. Bad files end the program.
static void dataloader_open_files(struct dataloader *loader, char **paths, int count) {
    struct error_text error;
    const uint64_t T = (uint64_t)loader->T;
    for (int i = loader->num_files; i < loader->num_files + count; i++) {
        struct token_file *file = &loader->files[i];
        const char *problem = token_file_open(file, paths[i - loader->num_files], &error);
        if (problem)
            fail("%s: %s", loader->option, problem);
        const struct token_file *first = &loader->files[0];
        if (file->format != first->format || file->type != first->type)
            fail("%s: mixed formats: %s has %s (%s), %s has %s (%s); expected one, since token ids of two tokenizers "
                 "don't mix: narrow the pattern",
                 loader->option, first->path, token_format_name(first->format), token_type_name(first->type),
                 file->path, token_format_name(file->format), token_type_name(file->type));
        if (file->row_tokens > 0 && file->row_tokens != loader->T)
            fail(
                "%s: %s: has examples packed into rows of %d tokens; expected --seq-length %d; give --seq-length %d, or "
                "make the data again with scripts/prepare_data.py --chat",
                loader->option, file->path, file->row_tokens, loader->T, file->row_tokens);
        if (file->row_tokens > 0 && file->vocabulary > (uint32_t)loader->vocab_size)
            fail("%s: %s: was made by a tokenizer of %" PRIu32
                 " tokens; expected at most the model's vocabulary of %d; "
                 "make the data again with the model's tokenizer",
                 loader->option, file->path, file->vocabulary, loader->vocab_size);
        if (file->tokens < T + 1)
            fail("%s: %s: holds %" PRIu64 " tokens; expected at least %" PRIu64 ", one window of --seq-length %" PRIu64
                 " and the target of its last token; lower --seq-length, leave the file out, or make larger shards",
                 loader->option, file->path, file->tokens, T + 1, T);
        loader->windows[i] = (file->tokens - 1) / T;
    }
}

// Opens the files and the order of samples of all parts of the mixture. Ends the program where files can't be used.
static void dataloader_open_parts(struct dataloader *loader, uint64_t seed, bool shuffle) {
    const int parts = loader->mixture.count;
    loader->parts = (struct data_part *)dataloader_alloc(loader->option, (size_t)parts, sizeof *loader->parts);
    for (int p = 0; p < parts; p++) {
        int count;
        char **paths = paths_find(loader->mixture.parts[p].pattern, loader->option, &count);
        const size_t all = (size_t)loader->num_files + (size_t)count;
        struct token_file *files = (struct token_file *)dataloader_alloc(loader->option, all, sizeof *files);
        uint64_t *windows = (uint64_t *)dataloader_alloc(loader->option, all, sizeof *windows);
        for (int i = 0; i < loader->num_files; i++) {
            files[i] = loader->files[i];
            windows[i] = loader->windows[i];
        }
        free(loader->files);
        free(loader->windows);
        loader->files = files;
        loader->windows = windows;
        loader->parts[p].first_file = loader->num_files;
        dataloader_open_files(loader, paths, count);
        loader->num_files += count;
        for (int i = 0; i < count; i++)
            free(paths[i]);
        free(paths);
    }
    for (int p = 0; p < parts; p++) {
        const int first = loader->parts[p].first_file,
                  end = p + 1 < parts ? loader->parts[p + 1].first_file : loader->num_files;
        for (int i = first; i < end; i++)
            loader->parts[p].total_tokens += loader->files[i].tokens;
        sample_order_open(&loader->parts[p].order, loader->windows + first, end - first, seed, shuffle, loader->option);
    }
}

// Sets up a reader with no file open, and notes each shard's size and modification time, to find files changed later.
static void reader_create(struct sample_reader *reader, const struct dataloader *loader) {
    const size_t shards = (size_t)loader->num_files;
    reader->raw = (unsigned char *)dataloader_alloc(loader->option, (size_t)loader->T + 2,
                                                    token_type_bytes(loader->files[0].type));
    reader->stamps = (struct file_stamp *)dataloader_alloc(loader->option, shards, sizeof *reader->stamps);
    for (int i = 0; i < loader->num_files; i++) {
        struct stat status;
        if (stat(loader->files[i].path, &status) != 0)
            continue; // gone already: its first sample is an error
        reader->stamps[i].bytes = status.st_size;
        reader->stamps[i].modified = status.st_mtim;
    }
    reader->file = reader->fd = -1;
}

// Opens a loader at sample 0; dataloader_close frees it. pattern: globs with commas between, or a mixture of such
// patterns (formats/mixture.h). A rank takes B samples at a time. A thread reads B * batches_ahead samples ahead; 0: no
// thread. option, which gave the pattern, is for messages and outlives the loader. Unusable files end the program.
static struct dataloader *dataloader_open(const char *pattern, int T, uint64_t seed, bool shuffle, int vocab_size,
                                          int rank, int ranks, int B, int batches_ahead, const char *option) {
    if (T < 1 || T > INT32_MAX / 16)
        fail("--seq-length is %d; expected 1 to %d", T, INT32_MAX / 16);
    if (vocab_size < 1)
        fail("--vocab-size is %d; expected at least 1", vocab_size);
    if (B < 1 || batches_ahead < 0 || (batches_ahead > 0 && B > INT32_MAX / batches_ahead))
        fail("%s: a batch of %d samples, %d batches ahead, can't be read; expected at least 1 sample", option, B,
             batches_ahead);
    struct dataloader *loader = (struct dataloader *)dataloader_alloc(option, 1, sizeof *loader);
    loader->option = option;
    loader->T = T;
    loader->vocab_size = vocab_size;
    loader->only_part = -1;
    loader->rank = rank;
    loader->ranks = ranks;
    mixture_parse(&loader->mixture, pattern, option);
    dataloader_open_parts(loader, seed, shuffle);
    loader->sample = (int32_t *)dataloader_alloc(option, (size_t)T + 1, sizeof *loader->sample);
    reader_create(&loader->reader, loader);
    read_ahead_start(loader, B, B * batches_ahead);
    return loader;
}

// Ends the thread, closes the files and frees the loader; does nothing for NULL.
static void dataloader_close(struct dataloader *loader) {
    if (!loader)
        return;
    read_ahead_stop(&loader->ahead);
    if (loader->reader.fd >= 0)
        close(loader->reader.fd);
    for (int i = 0; i < loader->mixture.count; i++)
        sample_order_close(&loader->parts[i].order);
    mixture_close(&loader->mixture);
    free(loader->parts);
    free(loader->reader.raw);
    free(loader->reader.stamps);
    for (int i = 0; i < loader->num_files; i++)
        token_file_close(&loader->files[i]);
    free(loader->files);
    free(loader->windows);
    free(loader->sample);
    free(loader->sample_documents);
    free(loader);
}

// Sets how documents are told apart. Call it once, before reading. With BOUNDARY_INDEX a bad .idx ends the program.
static void dataloader_separate_documents(struct dataloader *loader, struct document_rule rule) {
    struct error_text error;
    const int B = loader->ahead.B, capacity = loader->ahead.capacity;
    read_ahead_stop(&loader->ahead);
    loader->rule = rule;
    for (int i = 0; i < loader->num_files && rule.boundary == BOUNDARY_INDEX; i++) {
        const char *problem = token_file_read_documents(&loader->files[i], &error);
        if (problem)
            fail("%s: %s", loader->option, problem);
    }
    loader->sample_documents =
        (int32_t *)dataloader_alloc(loader->option, (size_t)loader->T + 1, sizeof *loader->sample_documents);
    read_ahead_start(loader, B, capacity);
}
// Returns the format that all of the loader's token files have.
static inline enum token_format dataloader_files_format(const struct dataloader *loader) {
    return loader->files[0].format;
}

// ---- use ----

struct token_batch {
    int32_t *inputs, *targets; // (B, T); a target of -1 does not count
    int32_t *document_starts;  // (B, T) the place in its sample at which an input's document begins; NULL: not wanted
};

// Fills a batch's row b from reader_read's tokens and documents, (T+1) each. Targets that do not count become -1.
static void batch_row(struct token_batch batch, int b, const int32_t *tokens, const int32_t *documents,
                      const struct dataloader *loader) {
    const int T = loader->T;
    const size_t row = (size_t)b * (size_t)T, bytes = (size_t)T * sizeof *tokens;
    const struct document_rule rule = loader->rule;
    int32_t *targets = batch.targets + row;
    memcpy(batch.inputs + row, tokens, bytes);
    if (rule.boundary == BOUNDARY_BITS) {
        for (int t = 0; t < T && batch.document_starts; t++)
            batch.document_starts[row + (size_t)t] = documents[t] < 0 ? ~documents[t] : documents[t];
        for (int t = 1; t <= T; t++)
            targets[t - 1] = documents[t] < 0 ? -1 : tokens[t];
        return;
    }
    if (rule.boundary == BOUNDARY_NONE && batch.document_starts)
        memset(batch.document_starts + row, 0, bytes);
    if (rule.boundary != BOUNDARY_NONE && batch.document_starts)
        memcpy(batch.document_starts + row, documents, bytes);
    if (rule.boundary == BOUNDARY_NONE || !rule.mask_targets) {
        memcpy(targets, tokens + 1, bytes);
        return;
    }
    for (int t = 1; t <= T; t++) // without a branch, so that it becomes vector instructions
        targets[t - 1] = ((documents[t] == t) & (tokens[t] != rule.delimiter)) ? -1 : tokens[t];
}

// Reads this rank's next B samples into a batch, without a thread. The position stays. A bad sample ends the program.
static void dataloader_read_without_thread(struct dataloader *loader, struct token_batch batch, int B) {
    for (int b = 0; b < B; b++) {
        struct error_text error;
        const uint64_t number = rank_sample(loader, loader->position, (uint64_t)b, (uint64_t)B);
        const char *problem =
            reader_read(&loader->reader, loader, number, loader->sample, loader->sample_documents, &error);
        if (problem)
            fail("%s: %s", loader->option, problem);
        batch_row(batch, b, loader->sample, loader->sample_documents, loader);
    }
}

// Waits for the ring's next B samples and fills a batch with them. If B is another than before, the thread first begins
// anew at the position. The caller moves the position. A sample that could not be read ends the program.
static void dataloader_read_from_ring(struct dataloader *loader, struct token_batch batch, int B) {
    struct read_ahead *ahead = &loader->ahead;
    if (ahead->B != B) // only this thread writes ahead.B
        read_ahead_restart(loader, B);
    for (int b = 0; b < B;) {
        int count;
        const int slot = read_ahead_take(loader, &count);
        if (count > B - b)
            count = B - b;
        for (int i = 0; i < count; i++, b++) {
            const size_t at = (size_t)(slot + i) * (size_t)(loader->T + 1);
            batch_row(batch, b, ahead->tokens + at, ahead->documents ? ahead->documents + at : NULL, loader);
        }
        read_ahead_release(ahead, count);
    }
}

// Fills a batch with this rank's part of the next B * ranks samples, and moves the position past them all. Rank r gets
// samples [r B, (r + 1) B); B is the same on all ranks. Ends the program if a sample can't be read.
static void dataloader_read_batch(struct dataloader *loader, struct token_batch batch, int B) {
    if (loader->ahead.capacity > 0)
        dataloader_read_from_ring(loader, batch, B);
    else
        dataloader_read_without_thread(loader, batch, B);
    loader->position += (uint64_t)B * (uint64_t)loader->ranks;
}
// Reads inputs and targets (B, T) as dataloader_read_batch does, without document starts.
static inline void dataloader_read(struct dataloader *loader, int32_t *inputs, int32_t *targets, int B) {
    const struct token_batch batch = {inputs, targets, NULL};
    dataloader_read_batch(loader, batch, B);
}

// Returns the number of the next sample to be taken, in the sequence of all ranks. Samples read ahead don't count.
static inline uint64_t dataloader_position(const struct dataloader *loader) { return loader->position; }

// Moves to a sample of the global sequence, and drops what was read ahead. Does nothing if the loader is already there.
static void dataloader_seek(struct dataloader *loader, uint64_t sample) {
    if (loader->position == sample)
        return;
    loader->position = sample;
    if (loader->ahead.capacity > 0)
        read_ahead_restart(loader, loader->ahead.B);
}

// Moves to `sample` of a resumed run, whose mixture began at first_sample <= sample. Copies starts (mixture.count), of
// struct part_start. Shards added to a part since are used from its first epoch that has not begun.
static void dataloader_resume(struct dataloader *loader, uint64_t first_sample, const struct part_start *starts,
                              uint64_t sample) {
    const int B = loader->ahead.B, capacity = loader->ahead.capacity;
    read_ahead_stop(&loader->ahead);
    loader->mixture.first_sample = first_sample;
    for (int i = 0; i < loader->mixture.count; i++) {
        loader->mixture.parts[i].before = starts[i].before;
        sample_order_resume(&loader->parts[i].order, starts[i].changes, starts[i].num_changes,
                            mixture_taken(&loader->mixture, i, sample));
    }
    loader->position = sample;
    read_ahead_start(loader, B, capacity);
}

// Makes the loader read only one part, in its own order; -1: all parts, mixed. Moves to sample 0. No thread may run.
static void dataloader_take_part(struct dataloader *loader, int part) {
    loader->only_part = part;
    dataloader_seek(loader, 0);
}

// The number of samples in an epoch of the part that dataloader_take_part chose, else of all parts of a weight above 0.
static inline uint64_t dataloader_samples_per_epoch(const struct dataloader *loader) {
    uint64_t samples = 0;
    for (int i = 0; i < loader->mixture.count; i++)
        samples += (loader->only_part < 0 ? loader->mixture.parts[i].weight > 0 : loader->only_part == i)
                       ? loader->parts[i].order.samples_per_epoch
                       : 0;
    return samples;
}
static inline uint64_t dataloader_total_tokens(const struct dataloader *loader) {
    uint64_t tokens = 0;
    for (int i = 0; i < loader->mixture.count; i++)
        tokens += loader->parts[i].total_tokens;
    return tokens;
}
// Returns how many epochs of a part, as 1.5, the run took before `sample`, which is mixture.first_sample or later.
static inline double dataloader_epochs(const struct dataloader *loader, int part, uint64_t sample) {
    double more;
    const uint64_t taken = mixture_taken(&loader->mixture, part, sample),
                   epoch = sample_order_epoch(&loader->parts[part].order, taken, &more);
    return (double)epoch + more;
}
static inline int dataloader_num_files(const struct dataloader *loader) { return loader->num_files; }
static inline const char *dataloader_path(const struct dataloader *loader, int file) {
    return loader->files[file].path;
}
// Returns dataloader_path without the folder, which may differ between hosts and starts.
static inline const char *dataloader_name(const struct dataloader *loader, int file) {
    const char *path = dataloader_path(loader, file), *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}
static inline const char *dataloader_format_name(const struct dataloader *loader) {
    return token_format_name(loader->files[0].format); // of all files
}
