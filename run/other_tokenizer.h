// Data that were made by another tokenizer than the model's. Their token ids are within the model's vocabulary, so that
// no other check finds the mistake, and the model is trained on, or judged by, noise.
#pragma once
#include "run/run.cuh"               // struct run
#include "runtime/files/file_read.h" // read_whole
#include "runtime/machine/say.h"     // say

// The paths of the files that say which text a token has; "": there is no such file.
struct token_texts {
    char tokenizer[PATH_MAX], vocabulary[PATH_MAX];
};

// Returns the paths of the files that belong to a shard, beside it.
static struct token_texts token_texts_of_shard(const char *shard) {
    struct token_texts texts;
    if (!tokenizer_find(shard, texts.tokenizer, sizeof texts.tokenizer))
        *texts.tokenizer = '\0';
    if (!vocabulary_find(shard, texts.vocabulary, sizeof texts.vocabulary))
        *texts.vocabulary = '\0';
    return texts;
}
// path = the file of that name in a folder; "" where it can't be read.
static void token_texts_find(char path[PATH_MAX], const char *folder, const char *name) {
    if ((size_t)snprintf(path, PATH_MAX, "%s/%s", folder, name) >= PATH_MAX || access(path, R_OK) != 0)
        *path = '\0';
}
// Returns the paths of the files in a model's folder; "" for a file that can't be read.
static struct token_texts token_texts_of_model(const char *folder) {
    struct token_texts texts;
    token_texts_find(texts.tokenizer, folder, "tokenizer.json");
    token_texts_find(texts.vocabulary, folder, "vocabulary.bin");
    return texts;
}

// Whether two files have the same bytes; false where one can't be read.
static bool has_same_bytes(const char *a, const char *b) {
    enum { MAX_BYTES = 1 << 30 };
    unsigned char *data[2] = {NULL, NULL};
    uint64_t bytes[2] = {0, 0};
    struct error_text error;
    const bool same = !read_whole(&data[0], &bytes[0], MAX_BYTES, a, "a tokenizer", &error) &&
                      !read_whole(&data[1], &bytes[1], MAX_BYTES, b, "a tokenizer", &error) && bytes[0] == bytes[1] &&
                      memcmp(data[0], data[1], bytes[0]) == 0;
    free(data[0]);
    free(data[1]);
    return same;
}

// Opens the vocabulary of a tokenizer.json or a vocabulary.bin; vocabulary_close frees it. Its size is 0 where a
// tokenizer.json can't be read: whoever needs that file says so. A bad vocabulary.bin ends the program.
static struct vocabulary token_texts_open(const char *path, bool is_tokenizer) {
    struct vocabulary vocabulary;
    struct tokenizer tokenizer;
    struct error_text error;
    memset(&vocabulary, 0, sizeof vocabulary);
    if (!is_tokenizer)
        return vocabulary_open(path, 0);
    if (tokenizer_read(&tokenizer, path, &error))
        return vocabulary;
    if (tokenizer_vocabulary(&tokenizer, &vocabulary, &error))
        memset(&vocabulary, 0, sizeof vocabulary);
    tokenizer_free(&tokenizer);
    return vocabulary;
}

// Whether a token has the same bytes in two vocabularies, or no text in either.
static bool has_same_text(const struct vocabulary *a, const struct vocabulary *b, int token) {
    int length[2];
    const unsigned char *const text[2] = {vocabulary_decode(a, token, &length[0]),
                                          vocabulary_decode(b, token, &length[1])};
    return length[0] == length[1] && (length[0] == 0 || memcmp(text[0], text[1], (size_t)length[0]) == 0);
}

// Prints a note on `out`, on rank 0, where more than one token in a hundred has another text beside the data than in
// the folder of --init-from; nothing without them. A few may differ: users give the spare tokens of a model a meaning.
static void report_other_tokenizer(const struct run *r, FILE *out) {
    const struct config *c = r->config;
    const struct dataloader *loader = r->train ? r->train : r->val;
    if (!loader || !*c->checkpoints.init_from || c->rank > 0)
        return;
    const struct token_texts data = token_texts_of_shard(dataloader_path(loader, 0)),
                             model = token_texts_of_model(c->checkpoints.init_from);
    const bool vocabularies = *data.vocabulary && *model.vocabulary && (!*data.tokenizer || !*model.tokenizer);
    const bool data_tokenizer = *data.tokenizer && !vocabularies, model_tokenizer = *model.tokenizer && !vocabularies;
    const char *const data_path = data_tokenizer ? data.tokenizer : data.vocabulary;
    const char *const model_path = model_tokenizer ? model.tokenizer : model.vocabulary;
    if (!*data_path || !*model_path || has_same_bytes(data_path, model_path))
        return;
    struct vocabulary of_data = token_texts_open(data_path, data_tokenizer),
                      of_model = token_texts_open(model_path, model_tokenizer);
    const int shared = of_data.size < of_model.size ? of_data.size : of_model.size;
    int other = 0;
    for (int token = 0; token < shared; token++)
        other += !has_same_text(&of_data, &of_model, token);
    if (other > shared / 100)
        say(out,
            "note: %d of %d tokens have another text in %s than in %s: the data are not in the tokens that the model "
            "knows\n",
            other, shared, data_path, model_path);
    vocabulary_close(&of_data);
    vocabulary_close(&of_model);
}
