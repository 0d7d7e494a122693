// Helpers for the tests of config.json: options as from a command line, a file that is written, a file that is parsed.
#pragma once
#include "config/resolve.h"      // config_parse
#include "formats/huggingface.h" // huggingface_parse_config
#include "test/testing.h"        // cmocka

// Parses a copy of text (bytes) that ends where the text ends, so that the sanitizer sees a read beyond it. Returns
// NULL, or *error's text.
static inline const char *parse_bytes(struct huggingface_config *h, const char *text, size_t bytes,
                                      struct error_text *error) {
    unsigned char *copy = (unsigned char *)malloc(bytes ? bytes : 1);
    memcpy(copy, text, bytes);
    const char *problem = huggingface_parse_config(h, copy, bytes, "config.json", error);
    free(copy);
    return problem;
}
// Returns the config of a small model with `options`, words that are separated by blanks. The config points into a text
// that the fourth call from now overwrites.
static inline struct config config_of(const char *options) {
    static char texts[4][1024];
    static int next;
    char *text = texts[next++ % 4];
    char *words[64], *rest = NULL;
    int n = 0;
    snprintf(text, sizeof texts[0],
             "train_gpt --plan --num-layers 3 --hidden-size 64 --num-attention-heads 4 --vocab-size 777 "
             "--seq-length 20 %s",
             options);
    for (char *word = strtok_r(text, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        words[n++] = word;
    words[n] = NULL;
    return config_parse(n, words);
}
// Returns the config.json of a model as text, which the caller frees, and its length in *bytes.
static inline char *written(const struct config *c, int end_of_text, size_t *bytes) {
    char *text = NULL;
    FILE *out = open_memstream(&text, bytes);
    huggingface_write_config(out, c, end_of_text, true);
    fclose(out);
    return text;
}
