// Finds the files for tokens to text and back: tokenizer.json with the files beside it, or vocabulary.bin.
#pragma once
#include "run/run.cuh" // struct run

// Finds the file `name`: beside a shard of the open training data or, without any, of validation data; else in the
// folder of the checkpoint or model that the run starts from. Looks for generation_config.json only in that folder.
// Looks for siblings of a tokenizer.json beside a shard only there. Returns whether path (size bytes) has the file.
static bool find_text_file(const struct run *r, const char *name, char *path, size_t size) {
    const struct config *c = r->config;
    const char *const folders[] = {c->checkpoint, c->checkpoints.init_from};
    const bool tokenizer = strcmp(name, "vocabulary.bin") != 0;
    const bool of_model = strcmp(name, "generation_config.json") == 0;
    const struct dataloader *loader = of_model ? NULL : r->train ? r->train : r->val;
    if (loader) {
        const char *shard = dataloader_path(loader, 0);
        if (!tokenizer && vocabulary_find(shard, path, size))
            return true;
        char first[PATH_MAX];
        if (tokenizer && tokenizer_find(shard, first, sizeof first)) {
            const bool sibling = strcmp(name, "tokenizer.json") != 0;
            if (sibling)
                return tokenizer_find_sibling(first, name, path, size);
            return (size_t)snprintf(path, size, "%s", first) < size;
        }
    }
    for (int f = 0; f < 2; f++)
        if (*folders[f] && (size_t)snprintf(path, size, "%s/%s", folders[f], name) < size && access(path, R_OK) == 0)
            return true;
    return false;
}

// Opens r->vocabulary, which has the tokens' texts: from vocabulary.bin, else from tokenizer.json, else single bytes if
// --vocab-size is 256 or 257, else none. A bad file ends the program. close_run closes the vocabulary.
static void open_vocabulary(struct run *r) {
    char path[PATH_MAX];
    struct error_text error;
    struct tokenizer tokenizer;
    if (find_text_file(r, "vocabulary.bin", path, sizeof path) ||
        !find_text_file(r, "tokenizer.json", path, sizeof path)) {
        const bool found = find_text_file(r, "vocabulary.bin", path, sizeof path);
        r->vocabulary = vocabulary_open(found ? path : NULL, r->config->model.vocab_size);
        return;
    }
    const char *problem = tokenizer_read(&tokenizer, path, &error);
    if (!problem) {
        problem = tokenizer_vocabulary(&tokenizer, &r->vocabulary, &error);
        tokenizer_free(&tokenizer);
    }
    if (problem)
        fail("%s", problem);
}
