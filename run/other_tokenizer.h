// Finds data of another tokenizer than the model's. Their ids are valid, so no other check finds that the model learns
// noise. If both tokenizers are known, the run is refused; if only the tokens' texts are, a note says so.
#pragma once
#include "formats/tokenizer_digest.h" // tokenizer_digest_read
#include "run/run.cuh"                // struct run
#include "runtime/files/file_read.h"  // read_whole
#include "runtime/machine/error.h"    // fail
#include "runtime/machine/say.h"      // say, say_warning

// The paths of the files that say which text a token has; "" where there is no such file.
struct token_text_paths {
    char tokenizer[PATH_MAX], vocabulary[PATH_MAX];
};

// Returns a shard's tokenizer.json and vocabulary.bin, as file_beside_shard finds them; "" for a missing file.
static struct token_text_paths token_text_paths_of_shard(const char *shard) {
    struct token_text_paths texts;
    if (!tokenizer_find(shard, texts.tokenizer, sizeof texts.tokenizer))
        *texts.tokenizer = '\0';
    if (!vocabulary_find(shard, texts.vocabulary, sizeof texts.vocabulary))
        *texts.vocabulary = '\0';
    return texts;
}
// Sets path to FOLDER/NAME if this file can be read, else to "". Doesn't open the file.
static void token_texts_find(char path[PATH_MAX], const char *folder, const char *name) {
    if ((size_t)snprintf(path, PATH_MAX, "%s/%s", folder, name) >= PATH_MAX || access(path, R_OK) != 0)
        *path = '\0';
}
// Returns the paths of a model folder's tokenizer.json and vocabulary.bin; "" for a file that can't be read.
static struct token_text_paths token_text_paths_of_model(const char *folder) {
    struct token_text_paths texts;
    token_texts_find(texts.tokenizer, folder, "tokenizer.json");
    token_texts_find(texts.vocabulary, folder, "vocabulary.bin");
    return texts;
}

// ---- tokenizers that are known ----

// A tokenizer's digest, zeros if it is not known, and the file that it comes from: a shard or a tokenizer.json.
struct known_tokenizer {
    struct tokenizer_digest digest;
    char from[PATH_MAX];
};

// Whether two tokenizers encode text without added tokens differently. False if the digest of one of them is not known.
static bool gives_other_ids(const struct known_tokenizer *a, const struct known_tokenizer *b) {
    return tokenizer_digest_known(&a->digest) && tokenizer_digest_known(&b->digest) &&
           memcmp(a->digest.text, b->digest.text, sizeof a->digest.text) != 0;
}
// Returns the first 8 bytes of the digest's half `text`, as messages show it.
static unsigned long long digest_shown(const struct known_tokenizer *known) {
    unsigned long long shown = 0;
    for (int i = 0; i < 8; i++)
        shown = shown << 8 | known->digest.text[i];
    return shown;
}
// Sets *known, zeros at first, from a tokenizer.json, unless it is from there. A bad or missing file ends the program.
static void known_tokenizer_read(struct known_tokenizer *known, const char *path) {
    struct error_text error;
    if (strcmp(known->from, path) == 0)
        return;
    const char *problem = tokenizer_digest_read(&known->digest, path, &error);
    if (problem)
        fail("%s", problem);
    snprintf(known->from, sizeof known->from, "%s", path);
}

// Ends the program if a shard of the loader (or NULL) is known to be of another tokenizer than *data. If *data is
// unknown (zeros), sets it to the first known tokenizer of a shard, by its header or by the tokenizer.json beside it.
static void check_shards(const struct dataloader *loader, struct known_tokenizer *data) {
    struct known_tokenizer shard, beside;
    char path[PATH_MAX];
    memset(&beside, 0, sizeof beside);
    for (int i = 0; loader && i < loader->num_files; i++) {
        const struct token_file *file = &loader->files[i];
        shard.digest = file->tokenizer;
        snprintf(shard.from, sizeof shard.from, "%s", file->path);
        if (!tokenizer_digest_known(&shard.digest) && tokenizer_find(file->path, path, sizeof path)) {
            known_tokenizer_read(&beside, path);
            shard = beside;
        }
        if (gives_other_ids(&shard, data))
            fail("%s: %s is of another tokenizer than %s: the same text has other ids (digests %016llx, %016llx); make "
                 "all shards by one tokenizer",
                 loader->option, shard.from, data->from, digest_shown(&shard), digest_shown(data));
        if (!tokenizer_digest_known(&data->digest))
            *data = shard;
    }
}

// Ends the job where shards are known to be of several tokenizers, or of another one than the folder of --resume or
// --init-from has. Only warns if only added tokens differ from the folder's: users give spare ones a meaning. Added
// tokens are not compared between shards. Only rank 0 checks.
static void check_tokenizers(const struct run *r) {
    const char *folder = *r->config->checkpoint ? r->config->checkpoint : r->config->checkpoints.init_from;
    char path[PATH_MAX];
    struct known_tokenizer data, model;
    memset(&data, 0, sizeof data);
    memset(&model, 0, sizeof model);
    if (r->config->rank > 0)
        return;
    check_shards(r->train, &data);
    check_shards(r->val, &data);
    token_texts_find(path, folder, "tokenizer.json");
    if (!tokenizer_digest_known(&data.digest) || !*folder || !*path)
        return;
    known_tokenizer_read(&model, path);
    if (gives_other_ids(&data, &model))
        fail("%s is of another tokenizer than %s: the same text has other ids (digests %016llx, %016llx); make the "
             "shards by the model's, with scripts/prepare_data.py",
             data.from, path, digest_shown(&data), digest_shown(&model));
    if (memcmp(data.digest.added, model.digest.added, sizeof data.digest.added) != 0)
        say_warning("the tokenizers of %s and %s have other added tokens, and give the same ids to text without them",
                    data.from, path);
}

// ---- texts of tokens ----

// Whether two files have the same bytes; false if one can't be read.
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

// Opens the vocabulary in a tokenizer.json or a vocabulary.bin, for vocabulary_close. Its size is 0 if a tokenizer.json
// can't be read, which its other users report. A bad vocabulary.bin ends the program.
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

static bool has_same_text(const struct vocabulary *a, const struct vocabulary *b, int token) {
    int length[2];
    const unsigned char *const text[2] = {vocabulary_decode(a, token, &length[0]),
                                          vocabulary_decode(b, token, &length[1])};
    return length[0] == length[1] && (length[0] == 0 || memcmp(text[0], text[1], (size_t)length[0]) == 0);
}

// Prints a note on `out`, on rank 0, if over 1 % of the tokens have other texts in --init-from than beside the first
// shard; users reuse a few spare ones. Does nothing if texts are missing, or check_tokenizers has compared them.
static void report_other_tokenizer(const struct run *r, FILE *out) {
    const struct config *c = r->config;
    const struct dataloader *loader = r->train ? r->train : r->val;
    if (!loader || !*c->checkpoints.init_from || c->rank > 0)
        return;
    const struct token_text_paths data = token_text_paths_of_shard(dataloader_path(loader, 0)),
                                  model = token_text_paths_of_model(c->checkpoints.init_from);
    const bool vocabularies = *data.vocabulary && *model.vocabulary && (!*data.tokenizer || !*model.tokenizer);
    const bool data_tokenizer = *data.tokenizer && !vocabularies, model_tokenizer = *model.tokenizer && !vocabularies;
    const char *const data_path = data_tokenizer ? data.tokenizer : data.vocabulary;
    const char *const model_path = model_tokenizer ? model.tokenizer : model.vocabulary;
    if (!*data_path || !*model_path || (data_tokenizer && model_tokenizer) || has_same_bytes(data_path, model_path))
        return; // check_tokenizers has compared two tokenizers
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

// Returns how many ids the shards' tokenizer has, by their headers or else a file beside the first; 0 if unknown.
static int tokens_of_data(const struct dataloader *train) {
    uint32_t tokens = 0;
    for (int i = 0; i < train->num_files; i++) {
        const uint32_t shard = train->files[i].vocabulary;
        if (shard == 0 || shard > INT32_MAX)
            break;
        tokens = shard > tokens ? shard : tokens;
        if (i + 1 == train->num_files)
            return (int)tokens;
    }
    const struct token_text_paths texts = token_text_paths_of_shard(dataloader_path(train, 0));
    const bool vocabulary = *texts.vocabulary != 0;
    if (!vocabulary && !*texts.tokenizer)
        return 0;
    struct vocabulary of_data = token_texts_open(vocabulary ? texts.vocabulary : texts.tokenizer, !vocabulary);
    const int size = of_data.size;
    vocabulary_close(&of_data);
    return size;
}
// Prints a note on `out`, on rank 0, if the model has at least twice as many tokens as --train-data's tokenizer.
static void report_unused_vocabulary(const struct run *r, FILE *out) {
    const int V = r->config->model.vocab_size, tokens = r->train && r->config->rank == 0 ? tokens_of_data(r->train) : 0;
    if (tokens > 0 && tokens <= V / 2)
        say(out,
            "note: the tokenizer of %s has %d tokens, far below the model's vocabulary of %d, whose other rows are "
            "memory and time for nothing; --vocab-size %d has room for all\n",
            dataloader_path(r->train, 0), tokens, V, tokens);
}
